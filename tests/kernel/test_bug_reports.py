"""What users of other statechart engines reported, each with the outcome that is right here.

The rulings of docs/semantics.md are named in brackets.
"""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest

from guardchart import (
    ChartError,
    Interpreter,
    MachineLogic,
    SimulatedClock,
    SyncInterpreter,
    create_machine,
)
from guardchart.errors import QueueFullError, StepError
from guardchart.kernel import (
    CancelTimer,
    ScheduleTimer,
    StopService,
    dump,
    fired,
    initial_transition,
    load,
    transition,
)
from tests.kernel.drive import Driver


def test_a_transition_below_a_final_state_is_refused() -> None:
    """[K22] Elsewhere it is accepted, and runs in a parallel state."""
    final = {"type": "final", "on": {"AGAIN": "a"}}
    with pytest.raises(ChartError, match="'on'") as caught:
        create_machine({"id": "m", "initial": "a", "states": {"a": {}, "end": final}})
    assert caught.value.path == "$.states.end"


def _regions(**left: Any) -> dict[str, Any]:
    """Two regions; the right one has moved on, runs a service and waits for a timer."""
    right = {
        "initial": "1",
        "states": {"1": {"on": {"GO": "2"}}, "2": {"invoke": {"id": "job", "src": "work"}, "after": {"50": "1"}}},
    }  # fmt: skip
    states = {"initial": "1", "states": {"1": {}, "2": {}}, **left}
    return {"type": "parallel", "states": {"left": states, "right": right}}


@pytest.mark.parametrize("target", ["left", "left.2"])
def test_a_region_that_reenters_leaves_its_sibling_alone(target: str) -> None:
    """[K10] Elsewhere the sibling is reset, and its timers and services start again."""
    again = {"AGAIN": {"target": f"#m.{target}", "reenter": True}}
    machine = Driver(_regions(on=again))
    machine.send("GO")
    before = machine.snapshot
    machine.send("AGAIN")
    assert machine.value["right"] == "2"
    assert machine.snapshot.timers == before.timers
    assert machine.snapshot.children == before.children
    assert machine.effects == ()


def test_a_timer_of_a_region_that_targets_its_sibling_loses_no_other_timer() -> None:
    """[K10] Elsewhere the whole parallel state is left, and the sibling's timer with it."""
    left = {"initial": "1", "states": {"1": {"after": {"10": "#m.right.1"}}}}
    machine = Driver(_regions(**left))
    machine.send("GO")
    assert set(machine.snapshot.timers) == {"10.m.left.1", "50.m.right.2"}
    machine.send(fired("10.m.left.1"))
    assert machine.value == {"left": "1", "right": "1"}
    assert machine.effects == (StopService("job"), CancelTimer("50.m.right.2"))

    # The timer was asked for by the left region, which stayed: it is spent, not lost.
    assert not machine.snapshot.timers


def test_a_timer_that_was_saved_fires_when_it_is_restored() -> None:
    """[K14] Elsewhere a restored machine waits for ever."""
    chart = {"id": "m", "initial": "a", "states": {"a": {"after": {"1000": "b"}}, "b": {}}}
    machine = create_machine(chart)
    clock = SimulatedClock()
    saved = SyncInterpreter(machine, clock=clock).start()
    clock.increment(400)
    text = saved.get_snapshot()
    saved.stop()

    restored = SyncInterpreter.from_snapshot(text, machine, clock=clock).start()
    clock.increment(599)
    assert restored.matches("a")
    clock.increment(1)
    assert restored.matches("b")


def test_history_survives_being_saved_as_json() -> None:
    """[K13] Elsewhere a restored machine has forgotten where it was."""
    on = {
        "initial": "slow",
        "states": {"slow": {"on": {"UP": "fast"}}, "fast": {}, "last": {"type": "history"}},
        "on": {"POWER": "off"},
    }
    machine = create_machine(
        {"id": "m", "initial": "on", "states": {"on": on, "off": {"on": {"POWER": "on.last"}}}}
    )
    snapshot, _ = initial_transition(machine)
    for event in ("UP", "POWER"):
        snapshot, _ = transition(machine, snapshot, event)
    restored = load(machine, json.loads(json.dumps(dump(snapshot))))
    assert transition(machine, restored, "POWER")[0].value == {"on": "fast"}


def _until(event: str, **more: Any) -> dict[str, Any]:
    """A region that is done when an event comes."""
    return {
        "initial": "open",
        "states": {"open": {"on": {event: "closed"}}, "closed": {"type": "final"}, **more},
    }


def test_the_end_of_a_nested_parallel_state_reaches_the_outer_one() -> None:
    """[K11] Elsewhere the outer state stays active."""
    inner = {"type": "parallel", "states": {"a": _until("A"), "b": _until("B")}}
    outer = {"type": "parallel", "states": {"inner": inner, "c": _until("C")}, "onDone": "over"}
    machine = Driver({"initial": "outer", "states": {"outer": outer, "over": {}}})
    for event in ("A", "C"):
        machine.send(event)
        assert machine.value != "over"
    machine.send("B")
    assert machine.value == "over"


def test_a_history_child_does_not_hold_up_the_end_of_a_parallel_state() -> None:
    """[K11] Elsewhere it counts as a region that is never done."""
    work = {
        "type": "parallel",
        "states": {"a": _until("A"), "b": _until("B", was={"type": "history"}), "h": {"type": "history"}},
        "onDone": "over",
    }  # fmt: skip
    machine = Driver({"initial": "work", "states": {"work": work, "over": {}}})
    machine.send("A")
    machine.send("B")
    assert machine.value == "over"


def _child(heard: list[str]) -> Any:
    logic = MachineLogic(actions={"hear": lambda context, event: heard.append(event.type)})
    return create_machine({"id": "child", "on": {"*": {"actions": "hear"}}}, logic)


def _talking(heard: list[str], **where: Any) -> SyncInterpreter:
    """A machine whose action ``tell`` sends to the child of the state that is being left."""
    invoking = {"invoke": {"id": "child", "src": "child"}, **where}
    logic = MachineLogic(
        services={"child": _child(heard)},
        actions={"tell": lambda scope, context, event, action: scope.send_to("child", "BYE")},
    )
    chart = {"id": "m", "initial": "a", "states": {"a": invoking, "b": {}}}
    return SyncInterpreter(create_machine(chart, logic)).start()


def test_sending_to_a_service_while_its_state_is_left_does_not_crash() -> None:
    """[K7] Elsewhere the transition fails: the child is gone already. Here it is merely late."""
    heard: list[str] = []
    machine = _talking(heard, on={"GO": {"target": "b", "actions": "tell"}})
    receipt = machine.send("GO")
    assert receipt.status == "taken" and not receipt.faults
    assert machine.matches("b") and heard == []


def test_sending_to_a_service_on_exit_reaches_it_before_it_is_stopped() -> None:
    """[K7] Elsewhere the child is stopped first."""
    heard: list[str] = []
    machine = _talking(heard, exit="tell", on={"GO": "b"})
    machine.send("GO")
    assert machine.matches("b") and heard == ["BYE"]


def test_events_raised_by_two_regions_are_both_handled_first_in_first_out() -> None:
    """[K8] Elsewhere the second raise replaces the first."""

    def region(name: str) -> dict[str, Any]:
        return {"initial": "1", "states": {"1": {"on": {"GO": {"target": "2", "actions": f"raise{name}"}}}, "2": {}}}  # fmt: skip

    seen: list[str] = []
    machine = Driver(
        {
            "type": "parallel",
            "states": {"a": region("A"), "b": region("B")},
            "on": {"A": {"actions": "note"}, "B": {"actions": "note"}},
        },
        actions={
            "raiseA": lambda scope, context, event, action: scope.raise_("A"),
            "raiseB": lambda scope, context, event, action: scope.raise_("B"),
            "note": lambda context, event: seen.append(event.type),
        },
    )
    machine.send("GO")
    assert seen == ["A", "B"]


def test_guarded_candidates_under_one_delay_are_one_timer() -> None:
    """[K14] Elsewhere each candidate sets its own, and the second fires into the next state."""
    later = [{"guard": "no", "target": "b"}, {"target": "c"}]
    machine = Driver({"initial": "a", "states": {"a": {"after": {"10": later}}, "b": {}, "c": {}}})
    assert machine.effects == (ScheduleTimer("10.m.a"),)
    machine.send(fired("10.m.a"))
    assert machine.value == "c" and not machine.snapshot.timers


def test_a_transition_leaves_the_snapshot_it_was_given_as_it_was() -> None:
    """[K21] Elsewhere context, history or children of the old snapshot change with the new."""

    def write(scope: Any, context: Any, event: Any, action: Any) -> None:
        context["list"].append(1)
        context["nested"]["deep"]["n"] = 1

    states = {
        "a": {"invoke": {"id": "job", "src": "work"}, "after": {"10": "b"}, "on": {"GO": "b"}},
        "b": {},
        "last": {"type": "history"},
    }
    machine = Driver(
        {
            "context": {"list": [], "nested": {"deep": {"n": 0}}},
            "initial": "top",
            "states": {"top": {"initial": "a", "states": states}, "out": {}},
            "on": {"OUT": {"target": ".out", "actions": "write"}},
        },
        actions={"write": write},
    )
    before, text = machine.snapshot, json.dumps(dump(machine.snapshot))
    machine.send("OUT")
    assert machine.snapshot.context["list"] == [1]
    assert json.dumps(dump(before)) == text
    again, _ = transition(machine.machine, before, "OUT")
    assert dump(again) == dump(machine.snapshot)


def test_a_raised_event_keeps_its_payload_and_comes_before_a_queued_external_one() -> None:
    """[K8] Elsewhere it loses its payload, or waits behind what was queued."""
    seen: list[tuple[str, Any]] = []

    def both(scope: Any, context: Any, event: Any, action: Any) -> None:
        scope.send("OUTSIDE", n=1)
        scope.raise_("INSIDE", n=2)

    actions = {
        "both": both,
        "note": lambda context, event: seen.append((event.type, event.payload)),
    }
    on = {
        "GO": {"actions": "both"},
        "INSIDE": {"actions": "note"},
        "OUTSIDE": {"actions": "note"},
        "SENT": {"actions": "note"},
    }
    machine = SyncInterpreter(create_machine({"id": "m", "on": on}, MachineLogic(actions=actions)))
    machine.start().send("GO")
    assert seen == [("INSIDE", {"n": 2}), ("OUTSIDE", {"n": 1})]


def test_a_snapshot_is_never_taken_in_the_middle_of_a_step() -> None:
    """A snapshot holds no queue: what an action, an observer or the caller sees is at rest."""
    seen: list[str] = []

    def look(scope: Any, context: Any, event: Any, action: Any) -> None:
        scope.raise_("NEXT")
        seen.append(json.loads(interpreter.get_snapshot())["value"])

    states = {
        "a": {"on": {"GO": {"target": "b", "actions": "look"}}},
        "b": {"on": {"NEXT": "c"}},
        "c": {"always": "d"},
        "d": {},
    }
    logic = MachineLogic(actions={"look": look})
    machine = create_machine({"id": "m", "initial": "a", "states": states}, logic)
    interpreter = SyncInterpreter(machine).start()
    interpreter.subscribe(lambda each: seen.append(json.loads(each.get_snapshot())["value"]))
    interpreter.send("GO")
    assert seen == ["a", "d"]


def test_the_completion_of_a_child_machine_carries_its_output_not_its_context() -> None:
    """[K11] Elsewhere ``data`` is the child's whole context, secrets included."""
    seen: list[Any] = []
    end = {"type": "final", "output": {"answer": 42}}
    child = create_machine(
        {"id": "child", "context": {"secret": "s"}, "initial": "end", "states": {"end": end}}
    )
    silent = create_machine(
        {"id": "silent", "context": {"secret": "s"}, "initial": "end", "states": {"end": {"type": "final"}}}
    )  # fmt: skip
    note = {"actions": "note"}
    invokes = [{"src": "child", "onDone": note}, {"src": "silent", "onDone": note}]
    logic = MachineLogic(
        services={"child": child, "silent": silent},
        actions={"note": lambda context, event: seen.append(event.data)},
    )
    SyncInterpreter(create_machine({"id": "m", "invoke": invokes}, logic)).start()
    assert seen == [{"answer": 42}, None]


def _counting() -> Any:
    logic = MachineLogic(actions={"count": lambda context, event: {"n": context["n"] + 1}})
    chart = {"id": "m", "context": {"n": 0}, "on": {"GO": {"actions": "count"}}}
    return create_machine(chart, logic)


async def test_a_send_that_is_cancelled_leaves_the_queue_usable() -> None:
    """Elsewhere the queue waits for ever for the task that was cancelled."""
    interpreter = await Interpreter(_counting()).start()
    tasks = [asyncio.ensure_future(interpreter.send("GO", wait=True)) for _ in range(3)]
    tasks[1].cancel()
    await asyncio.wait(tasks)
    assert [task.cancelled() for task in tasks] == [False, True, False]
    receipt = await interpreter.send("GO", wait=True)
    assert receipt is not None and receipt.status == "taken"
    # Nobody waits for the cancelled one any more; its event was posted, and is taken.
    assert interpreter.context["n"] == 4
    await interpreter.stop()


def test_a_send_that_fails_leaves_the_queue_usable() -> None:
    """Elsewhere the event that was refused stays in the queue, or the machine stays busy."""

    def flood(scope: Any, context: Any, event: Any, action: Any) -> None:
        interpreter.send("GO")
        with pytest.raises(QueueFullError):
            interpreter.send("GO")

    logic = MachineLogic(actions={"count": _counting().logic.actions["count"], "flood": flood})
    on = {"GO": {"actions": "count"}, "FLOOD": {"actions": "flood"}}
    machine = create_machine({"id": "m", "context": {"n": 0}, "on": on}, logic)
    interpreter = SyncInterpreter(machine, max_queue=1).start()
    with pytest.raises(StepError):
        interpreter.send({"no": "type"})
    interpreter.send("FLOOD")
    assert interpreter.context["n"] == 1
    assert interpreter.send("GO").changed and interpreter.context["n"] == 2


def test_sends_of_many_threads_are_atomic() -> None:
    """Elsewhere two of them interleave, and updates are lost."""
    interpreter = SyncInterpreter(_counting()).start()
    threads = [
        threading.Thread(target=lambda: [interpreter.send("GO") for _ in range(50)])
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert interpreter.context["n"] == 400


@pytest.mark.parametrize("policy", ["fail", "rollback", "continue"])
def test_an_action_that_raises_never_strands_the_interpreter(policy: str) -> None:
    """[K17] Elsewhere the machine is left between two states and answers nothing any more."""
    logic = MachineLogic(actions={"boom": lambda context, event: 1 / 0})
    states = {"a": {"on": {"GO": {"target": "b", "actions": "boom"}, "ON": "b"}}, "b": {}}
    chart = {"id": "m", "initial": "a", "states": states, "actionErrorPolicy": policy}
    interpreter = SyncInterpreter(create_machine(chart, logic)).start()
    receipt = interpreter.send("GO")
    assert isinstance(receipt.error, ZeroDivisionError)
    assert len(interpreter.current_state_ids) == 1
    following = interpreter.send("ON")
    if policy == "fail":
        assert interpreter.status == "error" and following.status == "dropped"
    else:
        assert interpreter.status == "running" and interpreter.matches("b")
