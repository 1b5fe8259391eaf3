"""Events, what may be sent, receipts, ids, observers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from guardchart import DoneEvent, Event, NotSupportedError, StepError
from guardchart.errors import ChartError
from guardchart.kernel import StreamEvent
from guardchart.runtime import Interpreter, MachineLogic, SyncInterpreter, create_machine
from tests.runtime.conftest import COUNT, Rig, counter_chart, inc


def test_every_event_has_type_payload_data_and_error() -> None:
    plain = Event("A")
    assert (plain.type, plain.payload, plain.data, plain.error) == ("A", {}, {}, None)
    assert Event("A", {"x": 1}).data == {"x": 1}
    done = DoneEvent("xstate.done.actor.s", 7, "svc")
    assert (done.payload, done.data, done.src, done.error) == ({"data": 7}, 7, "svc", None)
    boom = ValueError("no")
    failed = DoneEvent("xstate.error.actor.s", boom, "svc")
    assert failed.error is boom and failed.data is boom and failed.payload == {"data": boom}
    item = StreamEvent({"k": 1})
    assert (item.type, item.payload, item.data) == ("STREAM", {"data": {"k": 1}}, {"k": 1})


@pytest.mark.parametrize("form", ["name", "dict", "event"])
async def test_send_takes_a_type_with_payload_a_dict_or_an_event(rig: Rig, form: str) -> None:
    seen: list[Any] = []
    logic = MachineLogic(actions={"see": lambda c, e: seen.append(e)})
    chart = {"id": "m", "initial": "a", "states": {"a": {"on": {"E": {"actions": "see"}}}}}
    live = await rig.start(chart, logic)
    event = Event("E", {"x": 1})
    if form == "name":
        receipt = await rig.send(live, "E", x=1)
    elif form == "dict":
        receipt = await rig.send(live, {"type": "E", "x": 1})
    else:
        receipt = await rig.send(live, event)
        assert seen[0] is event
    assert receipt.status == "taken"
    assert seen[0].payload == {"x": 1}


async def test_a_payload_need_not_be_json(rig: Rig) -> None:
    thing = object()
    logic = MachineLogic(actions={"keep": lambda c, e: {"kept": e.payload["x"]}})
    chart = counter_chart(context={"kept": None})
    chart["states"]["a"]["on"] = {"E": {"actions": "keep"}}
    live = await rig.start(chart, logic)
    await rig.send(live, "E", x=thing)
    assert live.context["kept"] is thing


@pytest.mark.parametrize("bad", [None, 7, {"no": "type"}, ""])
async def test_send_refuses_what_is_no_event_and_nothing_happens(rig: Rig, bad: Any) -> None:
    live = await rig.start(counter_chart(), COUNT)
    with pytest.raises(StepError):
        live.send(bad)
    assert (await rig.send(live, "N")).status == "taken"


async def test_the_receipt_tells_what_became_of_an_event(rig: Rig) -> None:
    chart = counter_chart()
    chart["states"]["a"]["on"] = {
        "N": {"actions": "inc"},
        "NO": {"guard": "never", "actions": "inc"},
        "OFF": {},
        "BAD": {"actions": "boom"},
    }
    chart["actionErrorPolicy"] = "rollback"

    def boom(context: Any, event: Any) -> None:
        raise KeyError("secret")

    logic = MachineLogic(actions={"inc": inc, "boom": boom}, guards={"never": lambda c, e: False})
    live = await rig.start(chart, logic)
    taken = await rig.send(live, "N")
    assert (taken.status, taken.changed, taken.denied, taken.error) == ("taken", True, False, None)
    assert taken.state_ids == {"c.a"}
    denied = await rig.send(live, "NO")
    assert (denied.status, denied.changed, denied.denied) == ("denied", False, True)
    assert denied.reason
    assert (await rig.send(live, "OFF")).status == "forbidden"
    assert (await rig.send(live, "WHAT")).status == "ignored"
    assert (await rig.send(live, "xstate.done.actor.x")).status == "denied"
    bad = await rig.send(live, "BAD")
    assert bad.denied and isinstance(bad.error, KeyError)
    assert live.faults == [bad.error]
    assert live.error is None
    assert live.context == {"n": 1}


async def test_without_wait_the_async_engine_gives_none() -> None:
    live = Interpreter(create_machine(counter_chart(), COUNT)).start()
    assert await live.send("N") is None
    assert (await live.send("N", wait=True)).status == "taken"
    live.send("N")  # need not be awaited
    assert live.context["n"] == 3
    live.stop()


async def test_sends_of_the_async_engine_can_be_gathered_and_timed() -> None:
    live = Interpreter(create_machine(counter_chart(), COUNT)).start()
    receipts = await asyncio.gather(*(live.send("N", wait=True) for _ in range(3)))
    assert [each.status for each in receipts] == ["taken"] * 3
    assert (await asyncio.wait_for(live.send("N", wait=True), 1)).changed
    live.stop()


async def test_ids_are_kept_after_done_and_after_stop(rig: Rig) -> None:
    chart = {
        "id": "m",
        "initial": "a",
        "states": {"a": {"on": {"GO": "z"}}, "z": {"type": "final"}},
    }
    live = await rig.start(chart)
    assert live.id == "m" and live.current_state_ids == {"m.a"}
    await rig.send(live, "GO")
    assert live.current_state_ids == {"m.z"} and live.status == "done"
    other = await rig.start(chart)
    other.stop()
    assert other.current_state_ids == {"m.a"} and other.status == "stopped"


async def test_done_error_and_stopped_machines_drop_events_and_never_raise(rig: Rig) -> None:
    chart = {
        "id": "m",
        "initial": "a",
        "states": {"a": {"on": {"GO": "z", "BAD": {"actions": "boom"}}}, "z": {"type": "final"}},
    }

    def boom(context: Any, event: Any) -> None:
        raise ValueError

    machine = create_machine(chart, MachineLogic(actions={"boom": boom}))
    for event, status in (("GO", "done"), ("BAD", "error"), (None, "stopped")):
        live = await rig.start(machine)
        if event is None:
            live.stop()
        else:
            await rig.send(live, event)
        assert live.status == status
        receipt = await rig.send(live, "GO")
        assert (receipt.status, receipt.changed) == ("dropped", False)
        assert status in receipt.reason
        assert live.stop() is live


async def test_error_is_the_exception_that_broke_the_machine(rig: Rig) -> None:
    def boom(context: Any, event: Any) -> None:
        raise ValueError("private")

    chart = counter_chart()
    live = await rig.start(chart, MachineLogic(actions={"inc": boom}))
    assert live.error is None
    receipt = await rig.send(live, "N")
    assert live.status == "error"
    assert isinstance(live.error, ValueError) and live.error is receipt.error
    assert live.dump()["error"] == {"type": "ValueError", "message": ""}
    back = await rig.restore(live.dump(), live.machine)
    assert back.status == "error" and back.error["type"] == "ValueError"


@pytest.mark.parametrize("policy", ["fail", "rollback", "continue"])
async def test_action_error_policy_decides_what_a_fault_leaves(rig: Rig, policy: str) -> None:
    def boom(context: Any, event: Any) -> None:
        raise ValueError

    chart = counter_chart(actionErrorPolicy=policy)
    chart["states"] = {
        "a": {"on": {"N": {"target": "b", "actions": ["inc", "boom", "inc"]}}},
        "b": {},
    }
    live = await rig.start(chart, MachineLogic(actions={"inc": inc, "boom": boom}))
    receipt = await rig.send(live, "N")
    assert isinstance(receipt.error, ValueError)
    expected = {
        "fail": ("error", {"c.a"}, 0, "denied"),
        "rollback": ("running", {"c.a"}, 0, "denied"),
        "continue": ("running", {"c.b"}, 1, "taken"),
    }[policy]
    got = (live.status, live.current_state_ids, live.context["n"], receipt.status)
    assert got == expected


async def test_observers_get_the_interpreter_after_each_macrostep(rig: Rig) -> None:
    live = await rig.start(counter_chart(), COUNT)
    seen: list[int] = []
    quit_ = live.subscribe(lambda i: seen.append(i.context["n"]))
    await rig.send(live, "N")
    await rig.send(live, "N")
    await rig.send(live, "WHAT")
    quit_()
    quit_()
    await rig.send(live, "N")
    assert seen == [1, 2]


async def test_a_raising_observer_or_listener_disturbs_nothing(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    def act(scope: Any, context: Any, event: Any, action: Any) -> None:
        scope.emit("SAID")
        context["n"] += 1

    live = await rig.start(counter_chart(), MachineLogic(actions={"inc": act}))

    def bad(thing: Any) -> None:
        raise ValueError("secret")

    heard: list[str] = []
    live.subscribe(bad)
    live.on_emit(bad)
    live.on_emit(lambda event: heard.append(event.type))
    assert (await rig.send(live, "N")).status == "taken"
    assert live.context["n"] == 1 and heard == ["SAID"]
    assert "ValueError" in caplog.text and "secret" not in caplog.text


async def test_emit_reaches_listeners_until_they_are_removed(rig: Rig) -> None:
    def act(scope: Any, context: Any, event: Any, action: Any) -> None:
        scope.emit("SAID", x=1)

    live = await rig.start(counter_chart(), MachineLogic(actions={"inc": act}))
    heard: list[Any] = []
    remove = live.on_emit(heard.append)
    await rig.send(live, "N")
    remove()
    remove()
    await rig.send(live, "N")
    assert [(each.type, each.payload) for each in heard] == [("SAID", {"x": 1})]


async def test_can_and_matches_ask_the_live_snapshot(rig: Rig, toggle: Any) -> None:
    live = await rig.start(toggle)
    assert live.can("FLIP") and not live.can({"type": "NO"})
    assert live.matches("off") and not live.matches("on")
    await rig.send(live, "FLIP")
    assert live.matches("t.on")


def test_an_interpreter_that_was_not_started_says_so(toggle: Any) -> None:
    for kind in (SyncInterpreter, Interpreter):
        live = kind(toggle)
        assert live.status == "uninitialized" and live.current_state_ids == frozenset()
        with pytest.raises(StepError, match="start"):
            live.send("FLIP")
        with pytest.raises(StepError, match="start"):
            _ = live.context
        with pytest.raises(StepError, match="start"):
            live.post("FLIP") if kind is Interpreter else live.dump()
        assert live.stop().status == "stopped"
        assert live.start().status == "stopped"


def test_a_machine_without_its_logic_is_refused_with_every_missing_name() -> None:
    machine = create_machine(counter_chart())
    with pytest.raises(ChartError, match="inc"):
        SyncInterpreter(machine)


def test_the_async_engine_needs_a_running_loop(toggle: Any) -> None:
    with pytest.raises(NotSupportedError, match="async"):
        Interpreter(toggle).start()


async def test_start_gives_the_interpreter_and_a_second_start_nothing_new(
    rig: Rig, toggle: Any
) -> None:
    live = await rig.start(toggle)
    rev = live.snapshot.rev
    assert live.start() is live
    assert live.snapshot.rev == rev


async def test_the_input_is_in_context_and_in_the_first_event(rig: Rig) -> None:
    seen: list[Any] = []
    chart = counter_chart(entry="see")
    logic = MachineLogic(actions={"inc": inc, "see": lambda c, e: seen.append(e.input)})
    live = await rig.start(chart, logic, input={"q": 1})
    assert live.context["input"] == {"q": 1} and seen == [{"q": 1}]


async def test_a_first_step_without_end_raises_and_nothing_was_started(rig: Rig) -> None:
    chart = counter_chart(maxMicrosteps=10)
    chart["states"] = {"a": {"always": {"guard": "yes", "actions": "inc"}}}
    logic = MachineLogic(actions={"inc": inc}, guards={"yes": lambda c, e: True})
    live = rig.kind(create_machine(chart, logic))
    with pytest.raises(StepError, match="microsteps"):
        live.start()
    assert live.status == "uninitialized"
