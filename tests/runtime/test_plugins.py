"""Plugins see everything, in order, disturb nothing, and may send and write context."""

from __future__ import annotations

import contextvars
import threading
import time
from typing import Any

import pytest

from guardchart import Event, NotSupportedError, SimulatedClock, StepError
from guardchart.errors import SnapshotError
from guardchart.runtime import Interpreter, MachineLogic, SyncInterpreter, create_machine
from tests.runtime.conftest import COUNT, Recorder, Rig, counter_chart, inc

CALLER = {
    "id": "m",
    "initial": "a",
    "states": {
        "a": {"on": {"GO": "b"}},
        "b": {"invoke": {"id": "job", "src": "svc", "onDone": "z", "onError": "a"}},
        "z": {"type": "final"},
    },
}


async def test_hooks_come_in_order_over_a_whole_life(rig: Rig, recorder: Recorder) -> None:
    logic = MachineLogic(services={"svc": lambda input: 7})
    live = await rig.start(CALLER, logic, plugins=[recorder])
    await rig.send(live, "GO")
    assert recorder.hooks == [
        "on_interpreter_start",
        "on_transition",
        "on_before_send",
        "on_event_received",
        "on_transition",
        "on_service_start",
        "on_service_call",
        "on_service_done",
        "on_event_received",
        "on_transition",
        "on_done",
        "on_interpreter_stop",
    ]
    moves = [(sorted(a), sorted(b)) for a, b, _ in recorder.args("on_transition")]
    assert moves == [([], ["m.a"]), (["m.a"], ["m.b"]), (["m.b"], ["m.z"])]
    assert [each[2].status for each in recorder.args("on_transition")] == ["taken"] * 3
    ((invocation, output),) = recorder.args("on_service_done")
    assert (invocation.id, invocation.src, invocation.state_id, output) == ("job", "svc", "m.b", 7)
    live.stop()
    assert recorder.hooks.count("on_interpreter_stop") == 1


async def test_one_event_object_passes_through_all_hooks_and_actions(
    rig: Rig, recorder: Recorder
) -> None:
    seen: list[Any] = []
    logic = MachineLogic(actions={"inc": lambda c, e: seen.append(e)})
    live = await rig.start(counter_chart(), logic, plugins=[recorder])
    event = Event("N")
    await rig.send(live, event)
    ((sent,),) = recorder.args("on_before_send")
    ((received,),) = recorder.args("on_event_received")
    assert sent is received is seen[0] is event


async def test_the_event_of_a_completion_is_the_one_its_action_sees(
    rig: Rig, recorder: Recorder
) -> None:
    seen: list[Any] = []
    chart = {
        "id": "m",
        "initial": "b",
        "states": {
            "b": {"invoke": {"src": "svc", "onDone": {"target": "c", "actions": "see"}}},
            "c": {},
        },
    }
    logic = MachineLogic(
        actions={"see": lambda c, e: seen.append(e)}, services={"svc": lambda input: 7}
    )
    await rig.start(chart, logic, plugins=[recorder])
    ((received,),) = recorder.args("on_event_received")
    assert received is seen[0] and received.data == 7 and received.node.id == "m.b"


async def test_a_service_error_and_a_fault_reach_their_hooks(rig: Rig, recorder: Recorder) -> None:
    boom = ValueError("no")

    def svc(input: Any) -> None:
        raise boom

    chart = {"id": "m", "initial": "b", "states": {"b": {"invoke": {"src": "svc"}}}}
    live = await rig.start(chart, MachineLogic(services={"svc": svc}), plugins=[recorder])
    assert live.status == "error" and live.error is boom
    assert recorder.args("on_service_error")[0][1] is boom
    assert recorder.args("on_error") == [(boom,)]
    assert recorder.hooks[-1] == "on_interpreter_stop"


async def test_an_eventless_move_after_an_ignored_event_is_a_transition(
    rig: Rig, recorder: Recorder
) -> None:
    gate: list[int] = []
    chart = {
        "id": "m",
        "initial": "a",
        "states": {"a": {"always": {"guard": "open", "target": "b"}}, "b": {}},
    }
    logic = MachineLogic(guards={"open": lambda c, e: bool(gate)})
    live = await rig.start(chart, logic, plugins=[recorder])
    gate.append(1)
    receipt = await rig.send(live, "ANYTHING")
    assert receipt.status == "ignored" and receipt.changed
    before, after, _ = recorder.args("on_transition")[-1]
    assert (before, after) == ({"m.a"}, {"m.b"})


async def test_raising_hooks_are_contained_and_named_without_their_words(
    rig: Rig, recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    class Bad:
        def __getattr__(self, hook: str) -> Any:
            if not hook.startswith("on_"):
                raise AttributeError(hook)

            def call(*args: Any) -> None:
                raise RuntimeError("secret")

            return call

    logic = MachineLogic(services={"svc": lambda input: 7})
    live = await rig.start(CALLER, logic, plugins=[Bad(), recorder])
    await rig.send(live, "GO")
    assert live.status == "done" and len(recorder.calls) == 12
    assert "RuntimeError" in caplog.text and "secret" not in caplog.text


@pytest.mark.parametrize("form", ["plain", "async"])
async def test_what_a_plugin_sets_for_a_service_is_seen_by_it_alone(rig: Rig, form: str) -> None:
    mark: contextvars.ContextVar[str] = contextvars.ContextVar("mark", default="")
    seen: list[str] = []

    class Marks:
        def on_service_call(self, interpreter: Any, invocation: Any) -> None:
            mark.set(invocation.src)

        def on_service_done(self, interpreter: Any, invocation: Any, output: Any) -> None:
            seen.append(f"done:{mark.get()}")

    def plain(input: Any) -> None:
        seen.append(mark.get())

    async def awaited(input: Any) -> None:
        seen.append(mark.get())

    service = plain if form == "plain" else awaited
    logic = MachineLogic(services={"svc": service})
    options = {} if rig.is_async else {"allow_async": True}
    live = await rig.start(CALLER, logic, plugins=[Marks()], **options)
    await rig.send(live, "GO")
    assert live.status == "done" and seen[0] == "svc"
    assert mark.get() == ""


def test_an_async_hook_is_refused(toggle: Any) -> None:
    class Bad:
        async def on_transition(self, *args: Any) -> None: ...

    with pytest.raises(NotSupportedError, match="async"):
        SyncInterpreter(toggle, plugins=[Bad()])
    live = SyncInterpreter(toggle)
    with pytest.raises(NotSupportedError, match="on_transition"):
        live.use(Bad())
    assert live.use(object()) is live


@pytest.mark.parametrize("hook", ["on_before_send", "on_event_received", "on_transition"])
async def test_what_a_hook_sends_comes_after_what_it_was_told_of(rig: Rig, hook: str) -> None:
    order: list[str] = []

    class Once:
        pass

    def react(self: Any, interpreter: Any, *args: Any) -> None:
        if "sent" not in order:
            order.append("sent")
            receipt = interpreter.send("LATER")
            if interpreter.engine == "sync":
                assert (receipt.status, receipt.reason) == ("ignored", "queued")

    setattr(Once, hook, react)

    def note(context: Any, event: Any) -> dict[str, Any]:
        order.append(event.type)
        return {"n": context["n"] + 1}

    chart = counter_chart()
    chart["states"]["a"]["on"] = {"N": {"actions": "note"}, "LATER": {"actions": "note"}}
    live = await rig.start(chart, MachineLogic(actions={"note": note}))
    live.use(Once())
    await rig.send(live, "N")
    told_before = hook != "on_transition"
    assert order == (["sent", "N", "LATER"] if told_before else ["N", "sent", "LATER"])


@pytest.mark.parametrize("hook", ["on_before_send", "on_event_received"])
async def test_context_a_hook_writes_is_seen_by_the_guards_of_that_event(
    rig: Rig, hook: str
) -> None:
    class Budget:
        pass

    setattr(Budget, hook, lambda self, i, e: i.update_context({"spent": i.context["spent"] + 5}))
    chart = counter_chart(context={"n": 0, "spent": 0})
    chart["states"]["a"]["on"] = {"N": {"guard": "under", "actions": "inc"}}
    logic = MachineLogic(actions={"inc": inc}, guards={"under": lambda c, e: c["spent"] < 10})
    live = await rig.start(chart, logic, plugins=[Budget()])
    assert (await rig.send(live, "N")).status == "taken"
    assert (await rig.send(live, "N")).status == "denied"
    assert live.context == {"n": 1, "spent": 10}


@pytest.mark.parametrize("hook", ["on_interpreter_start", "on_transition", "on_service_start"])
async def test_context_a_hook_writes_at_the_start_is_kept(rig: Rig, hook: str) -> None:
    class Writer:
        pass

    setattr(Writer, hook, lambda self, i, *args: i.update_context({hook: True}))
    chart = {"id": "m", "initial": "b", "states": {"b": {"invoke": {"src": "svc"}}}}
    live = await rig.start(
        chart, MachineLogic(services={"svc": lambda input: 1}), plugins=[Writer()]
    )
    assert live.context[hook] is True


async def test_update_context_is_merged_counted_and_told(rig: Rig, recorder: Recorder) -> None:
    live = await rig.start(counter_chart(), COUNT, plugins=[recorder])
    rev = live.snapshot.rev
    given = {"x": [1]}
    live.update_context(given)
    assert live.context == {"n": 0, "x": [1]} and live.snapshot.rev == rev + 1
    assert recorder.args("on_context") == [(given,)]
    with pytest.raises(SnapshotError, match="keys"):
        live.update_context({1: 2})


async def test_update_context_from_an_action_is_refused_as_it_would_be_lost(rig: Rig) -> None:
    box: list[Any] = []
    caught: list[Any] = []

    def act(context: Any, event: Any) -> None:
        try:
            box[0].update_context({"n": 9})
        except StepError as error:
            caught.append(error)

    live = await rig.start(counter_chart(), MachineLogic(actions={"inc": act}))
    box.append(live)
    await rig.send(live, "N")
    assert "return the updates" in str(caught[0]) and live.context == {"n": 0}


async def test_an_event_an_action_sends_by_the_interpreter_is_shown_after_its_step(
    rig: Rig,
) -> None:
    box: list[Any] = []

    class Counting:
        def on_before_send(self, interpreter: Any, event: Any) -> None:
            interpreter.update_context({"n": interpreter.context["n"] + 10})

    def act(context: Any, event: Any) -> dict[str, Any]:
        if context["n"] < 15:
            box[0].send("N")
        return {"n": context["n"] + 1}

    live = await rig.start(counter_chart(), MachineLogic(actions={"inc": act}))
    box.append(live.use(Counting()))
    await rig.send(live, "N")
    assert live.context["n"] == 22  # 0 +10 +1, then +10 +1


def test_a_plugin_of_the_sync_engine_runs_one_hook_at_a_time_whoever_sends() -> None:
    inside: list[int] = []
    overlaps: list[int] = []

    class Slow:
        def on_before_send(self, interpreter: Any, event: Any) -> None:
            inside.append(1)
            overlaps.append(len(inside))
            time.sleep(0.001)
            interpreter.update_context({"seen": interpreter.context.get("seen", 0) + 1})
            inside.pop()

    live = SyncInterpreter(create_machine(counter_chart(), COUNT), plugins=[Slow()]).start()
    threads = [threading.Thread(target=lambda: [live.send("N") for _ in range(10)]) for _ in "1234"]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert live.context == {"n": 40, "seen": 40} and max(overlaps) == 1
    live.stop()


async def test_children_get_the_plugins_of_their_parent(rig: Rig, recorder: Recorder) -> None:
    child = create_machine({"id": "k", "initial": "z", "states": {"z": {"type": "final"}}})
    await rig.start(CALLER, MachineLogic(services={"svc": child}), plugins=[recorder])
    live = rig.made[0]
    await rig.send(live, "GO")
    assert [each[1] for each in recorder.calls if each[0] == "on_done"] == ["m:job", "m"]


async def test_a_restored_end_starts_nothing_and_calls_no_hook(
    rig: Rig, recorder: Recorder
) -> None:
    chart = {"id": "m", "initial": "z", "states": {"z": {"type": "final"}}}
    first = await rig.start(chart)
    clock = SimulatedClock()
    again = await rig.restore(first.dump(), first.machine, plugins=[recorder], clock=clock)
    assert again.status == "done" and recorder.calls == []


async def test_a_hook_may_stop_the_machine_and_its_effects_are_not_carried_out(rig: Rig) -> None:
    ran: list[int] = []

    class Stopper:
        def on_transition(self, interpreter: Any, before: Any, after: Any, taken: Any) -> None:
            if "m.b" in after:
                interpreter.stop()

    logic = MachineLogic(services={"svc": lambda input: ran.append(1)})
    live = await rig.start(CALLER, logic, plugins=[Stopper()])
    receipt = await rig.send(live, "GO")
    assert receipt.status == "taken" and live.status == "stopped" and ran == []
    assert (
        live.dump()["status"] == "active" and live.dump()["children"]["job"]["status"] == "active"
    )


def test_no_plugin_no_work(toggle: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    live = SyncInterpreter(toggle).start()

    def refuse(*args: Any) -> None:
        raise AssertionError("a hook was looked up")

    monkeypatch.setattr(type(live._plugins), "call", refuse)
    assert live.send("FLIP").changed
    live.stop()


def test_both_engines_have_the_same_public_names() -> None:
    names = [
        {n for n in dir(kind) if not n.startswith("_")} for kind in (SyncInterpreter, Interpreter)
    ]
    assert names[0] - names[1] == set()
    assert names[1] - names[0] == {"busy", "changed", "idle"}
