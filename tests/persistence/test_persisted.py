"""persisted and apersisted: every step stored before what it asks for begins."""

from __future__ import annotations

import asyncio
import threading

import pytest

from guardchart import MachineLogic, create_machine
from guardchart.errors import SnapshotDriftError, StepError, StoreConflictError, StoreError
from guardchart.persistence import MemoryStore, SQLiteStore, apersisted, persisted

COUNTER = {
    "id": "counter",
    "initial": "on",
    "context": {"n": 0},
    "states": {"on": {"on": {"ADD": {"actions": "add"}, "WORK": "working"}}, "working": {}},
}


def counter():
    return create_machine(
        COUNTER, MachineLogic(actions={"add": lambda context, event: {"n": context["n"] + 1}})
    )


@pytest.fixture(params=["memory", "sqlite"])
def store(request, tmp_path):
    if request.param == "memory":
        yield MemoryStore()
    else:
        with SQLiteStore(tmp_path / "runs.db") as store:
            yield store


def test_each_step_is_in_the_store_when_its_receipt_is_there(store):
    with persisted(store, "k", counter()) as interpreter:
        assert store.load("k") is None
        for n in range(1, 4):
            interpreter.send("ADD")
            assert store.load("k").snapshot["context"]["n"] == n
        interpreter.send("NOTHING")
        assert store.load("k").rev == 3


async def test_an_async_machine_is_stored_when_it_is_left(store):
    async with apersisted(store, "k", counter()) as interpreter:
        for _ in range(3):
            await interpreter.send("ADD", wait=True)
    assert store.load("k").snapshot["context"]["n"] == 3
    assert [each["kind"] for each in store.events("k")] == ["init", "event", "event", "event"]


async def test_an_async_service_begins_once_its_step_is_stored(store):
    seen = []

    async def work(scope, context, event):
        seen.append((await asyncio.to_thread(store.load, "k")).snapshot["value"])

    chart = {**COUNTER, "states": {**COUNTER["states"], "working": {"invoke": {"src": "work"}}}}
    logic = MachineLogic(actions={"add": lambda c, e: {}}, services={"work": work})
    async with apersisted(store, "k", create_machine(chart, logic)) as interpreter:
        await interpreter.send("WORK", wait=True)
        await interpreter.idle()
    assert seen == ["working"]


async def test_a_service_whose_state_is_left_before_it_is_stored_does_not_begin(tmp_path):
    began = []
    chart = {
        "id": "m",
        "initial": "a",
        "states": {
            "a": {"on": {"GO": "b"}},
            "b": {"invoke": {"src": "work"}, "on": {"LEAVE": "a"}},
        },
    }
    logic = MachineLogic(services={"work": lambda s, c, e: began.append(1)})
    gate = threading.Event()

    class Slow(SQLiteStore):
        def create(self, *args, **more):
            gate.wait(10)
            return super().create(*args, **more)

    with Slow(tmp_path / "runs.db") as store:
        async with apersisted(store, "k", create_machine(chart, logic)) as interpreter:
            await interpreter.send("GO", wait=True)
            await interpreter.send("LEAVE", wait=True)
            gate.set()
            await interpreter.idle()
        assert store.load("k").snapshot["value"] == "a" and began == []


async def test_a_service_whose_step_will_not_be_stored_does_not_begin(tmp_path):
    began = []
    chart = {"id": "m", "initial": "a", "states": {"a": {"on": {"GO": "b"}}, "b": {}}}
    chart["states"]["b"] = {"invoke": {"src": "work"}}
    logic = MachineLogic(services={"work": lambda s, c, e: began.append(1)})
    gate = threading.Event()

    class Slow(SQLiteStore):
        def create(self, *args, **more):
            gate.wait(10)
            return super().create(*args, **more)

    with Slow(tmp_path / "runs.db") as store:
        async with apersisted(store, "k", create_machine(chart, logic)) as interpreter:
            await interpreter.send("GO", wait=True)
            await asyncio.sleep(0)
            interpreter.journal._writer.cancel()  # as a loop does that is shut down
            await asyncio.sleep(0.05)
            assert began == []
            gate.set()
        # What its thread was about to write is written, and nothing twice.
        assert (store.load("k").rev, store.load("k").snapshot["value"]) == (1, "b")


def test_of_two_that_hold_a_run_the_second_writer_is_told_and_stopped(store):
    with persisted(store, "k", counter()) as interpreter:
        interpreter.send("ADD")
    with (
        pytest.raises(StoreConflictError),
        persisted(store, "k", counter()) as one,
        persisted(store, "k", counter()) as two,
    ):
        assert two.send("ADD").changed
        one.send("ADD")
        assert one.status == "stopped" and one.send("ADD").status == "dropped"
    assert store.load("k").snapshot["context"]["n"] == 2


async def test_an_async_second_writer_is_told_and_stopped(store):
    async with apersisted(store, "k", counter()) as interpreter:
        await interpreter.send("ADD", wait=True)
    with pytest.raises(StoreConflictError):
        async with apersisted(store, "k", counter()) as one:
            with persisted(store, "k", counter()) as two:
                two.send("ADD")
            await one.send("ADD", wait=True)
    assert store.load("k").snapshot["context"]["n"] == 2


def test_context_written_outside_a_step_is_stored_on_leaving(store):
    with persisted(store, "k", counter()) as interpreter:
        interpreter.send("ADD")
        interpreter.update_context({"n": 40})
    assert store.load("k").snapshot["context"]["n"] == 40
    assert store.events("k")[-1]["kind"] == "update"


def test_what_was_done_is_stored_also_when_the_block_raises(store):
    with pytest.raises(KeyError), persisted(store, "k", counter()) as interpreter:
        interpreter.send("ADD")
        raise KeyError("the app's own")
    assert store.load("k").snapshot["context"]["n"] == 1


def test_a_machine_that_cannot_start_leaves_no_trace(store):
    there, back = {"target": "b", "guard": "yes"}, {"target": "a", "guard": "yes"}
    chart = {"id": "m", "initial": "a", "states": {"a": {"always": there}, "b": {"always": back}}}
    machine = create_machine(chart, MachineLogic(guards={"yes": lambda context, event: True}))
    with pytest.raises(StepError), persisted(store, "k", machine):
        pass
    assert store.load("k") is None


def test_a_store_that_fails_stops_the_machine_before_the_effect():
    began = []

    class Failing(MemoryStore):
        def create(self, *args, **more):
            raise StoreError("the disk is full")

    chart = {"id": "m", "initial": "a", "states": {"a": {"invoke": {"src": "work"}}}}
    machine = create_machine(
        chart, MachineLogic(services={"work": lambda s, c, e: began.append(1)})
    )
    with pytest.raises(StoreError, match="disk"), persisted(Failing(), "k", machine) as interpreter:
        assert interpreter.status == "stopped"
    assert began == []


def test_the_snapshot_of_another_shape_is_refused(store):
    with persisted(store, "k", counter()) as interpreter:
        interpreter.send("ADD")
    other = create_machine({"id": "counter", "initial": "off", "states": {"off": {}}})
    with pytest.raises(SnapshotDriftError), persisted(store, "k", other):
        pass


def test_a_finished_run_takes_no_more_events(store):
    machine = create_machine(
        {"id": "m", "initial": "a", "states": {"a": {"on": {"END": "b"}}, "b": {"type": "final"}}}
    )
    with persisted(store, "k", machine) as interpreter:
        interpreter.send("END")
    with persisted(store, "k", machine) as interpreter:
        assert interpreter.status == "done" and interpreter.send("END").status == "dropped"
    assert store.load("k").rev == 1


def test_what_is_no_json_in_the_log_is_named_by_its_class_and_not_called():
    class Odd:
        def __repr__(self):
            raise AssertionError("called")

    store = MemoryStore()
    with persisted(store, "k", counter()) as interpreter:
        interpreter.send("ADD", odd=Odd(), error=ValueError("a secret"), number=float("nan"))
    payload = store.events("k")[-1]["event"]["payload"]
    assert payload == {"odd": {"type": "Odd"}, "error": {"type": "ValueError"}, "number": "nan"}
