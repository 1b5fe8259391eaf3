"""``before_step``: what a host asks before every step, and what it does with the answer."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

from guardchart import Event, SimulatedClock
from guardchart.errors import StoreError
from guardchart.kernel import EngineEvent, done
from guardchart.runtime import BeforeStep, Interpreter, MachineLogic, create_machine
from tests.runtime.conftest import Recorder, Rig, counter_chart, inc


def logic(hook: Any, **services: Any) -> MachineLogic:
    return MachineLogic(
        actions={"inc": inc, "keep": lambda c, e: {"got": e.data}},
        services=services,
        before_step=hook,
    )


def calls(**more: Any) -> dict[str, Any]:
    return {
        "id": "m",
        "initial": "idle",
        "context": {"got": None},
        "states": {
            "idle": {"on": {"GO": "busy"}},
            "busy": {
                "invoke": {
                    "src": "svc",
                    "onDone": {"target": "good", "actions": "keep"},
                    "onError": {"target": "bad", "actions": "keep"},
                },
                **more,
            },
            "good": {},
            "bad": {},
            "late": {},
        },
    }


async def test_the_hook_is_asked_before_every_step_but_the_first(rig: Rig) -> None:
    seen: list[Any] = []

    def hook(snapshot: Any, event: Any, now: float, host: Any, outside: bool) -> None:
        what = event.kind if isinstance(event, EngineEvent) else event.type
        seen.append((what, snapshot.value, now, host.agent, host.scope, outside))

    clock = SimulatedClock(wall_start=5)
    live = await rig.start(calls(), logic(hook, svc=lambda i: 1), clock=clock, scope="th")
    await rig.send(live, "GO")
    assert seen == [
        ("GO", "idle", 5000.0, "m", "th", True),
        ("done", "busy", 5000.0, "m", "th", False),
    ]


async def test_only_an_event_from_outside_is_outside(rig: Rig) -> None:
    seen: list[Any] = []

    def hook(snapshot: Any, event: Any, now: float, host: Any, outside: bool) -> None:
        what = event.kind if isinstance(event, EngineEvent) else event.type
        seen.append((what, outside))

    def act(scope: Any, context: Any, event: Any, action: Any) -> None:
        scope.send("SELF")
        scope.send_after(5, "LATER")

    chart = counter_chart()
    chart["states"]["a"]["after"] = {"1": {"actions": "nothing"}}
    made = logic(hook)
    made.actions.update(inc=act, nothing=lambda c, e: None)
    clock = SimulatedClock()
    live = await rig.start(chart, made, clock=clock)
    await rig.send(live, "N")
    live.post("POSTED")
    await rig.move(clock, 10)
    assert seen == [
        ("N", True), ("SELF", False), ("POSTED", False), ("fired", False), ("fired", False),
    ]  # fmt: skip


async def test_the_hook_may_replace_the_event(rig: Rig, recorder: Recorder) -> None:
    def hook(snapshot: Any, event: Any, now: float, host: Any, outside: bool) -> Any:
        if isinstance(event, EngineEvent):
            return BeforeStep(event=done(event.key, "judged"))
        return BeforeStep(event=Event("GO", {"more": 1})) if event.type == "ASK" else None

    live = await rig.start(calls(), logic(hook, svc=lambda i: "raw"), plugins=[recorder])
    receipt = await rig.send(live, "ASK")
    assert receipt.status == "taken" and live.context["got"] == "judged"
    received = [each for (each,) in recorder.args("on_event_received")]
    assert [each.type.rpartition(".")[0] for each in received] == ["", "xstate.done.actor.0.m"]
    assert received[0].payload == {"more": 1} and received[1].data == "judged"


async def test_observers_see_the_event_that_came_where_the_hook_only_adds_to_it(
    rig: Rig, recorder: Recorder
) -> None:
    class More(Event):
        __slots__ = ()

    def hook(snapshot: Any, event: Any, now: float, host: Any, outside: bool) -> Any:
        return BeforeStep(event=More(event.type, event.payload))

    live = await rig.start(counter_chart(), logic(hook), plugins=[recorder])
    event = Event("N")
    await rig.send(live, event)
    assert live.context["n"] == 1
    assert recorder.args("on_before_send")[0][0] is event
    assert recorder.args("on_event_received")[0][0] is event


async def test_a_denial_without_an_event_steps_nothing(rig: Rig, recorder: Recorder) -> None:
    def hook(*args: Any) -> Any:
        return BeforeStep(denied="not yours")

    live = await rig.start(counter_chart(), logic(hook), plugins=[recorder])
    rev = live.snapshot.rev
    receipt = await rig.send(live, "N")
    assert (receipt.status, receipt.reason, receipt.changed) == ("denied", "not yours", False)
    assert live.snapshot.rev == rev and recorder.args("on_event_received") == []


async def test_a_denial_with_an_event_steps_it_and_still_says_denied(rig: Rig) -> None:
    def hook(*args: Any) -> Any:
        return BeforeStep(event=Event("N"), denied="too late")

    live = await rig.start(counter_chart(), logic(hook))
    receipt = await rig.send(live, "WHATEVER")
    assert (receipt.status, receipt.reason, receipt.changed) == ("denied", "too late", True)
    assert live.context["n"] == 1


async def test_batch_no_is_kept_in_the_snapshot(rig: Rig) -> None:
    def hook(snapshot: Any, *args: Any) -> Any:
        return BeforeStep(batch_no=snapshot.batch_no + 1)

    machine = create_machine(counter_chart(), logic(hook))
    live = await rig.start(machine)
    await rig.send(live, "N")
    await rig.send(live, "N")
    assert live.snapshot.batch_no == 2 == live.dump()["batch_no"]
    again = await rig.restore(live.get_snapshot(), machine)
    assert again.snapshot.batch_no == 2 and again.host.run == live.host.run


async def test_a_hook_that_raises_denies_an_event_and_keeps_the_exception(rig: Rig) -> None:
    boom = StoreError("disk")

    def hook(*args: Any) -> Any:
        raise boom

    live = await rig.start(counter_chart(), logic(hook))
    receipt = await rig.send(live, "N")
    assert receipt.denied and receipt.error is boom
    assert receipt.reason == "StoreError while deciding" and live.faults == [boom]
    assert live.context["n"] == 0 and live.status == "running"


async def test_a_hook_that_raises_turns_a_result_into_a_failure(rig: Rig) -> None:
    boom = StoreError("disk")

    def hook(snapshot: Any, event: Any, *args: Any) -> Any:
        if isinstance(event, EngineEvent) and event.kind == "done":
            raise boom

    live = await rig.start(calls(), logic(hook, svc=lambda i: 1))
    await rig.send(live, "GO")
    assert live.current_state_ids == {"m.bad"} and live.context["got"] is boom
    assert live.faults == [boom]


async def test_a_hook_that_raises_holds_up_no_deadline(rig: Rig) -> None:
    def hook(snapshot: Any, event: Any, *args: Any) -> Any:
        if isinstance(event, EngineEvent):
            raise StoreError("disk")

    clock = SimulatedClock()
    chart = counter_chart()
    chart["states"]["a"]["after"] = {"10": "b"}
    chart["states"]["b"] = {}
    live = await rig.start(chart, logic(hook), clock=clock)
    await rig.move(clock, 10)
    assert live.current_state_ids == {"c.b"} and isinstance(live.faults[0], StoreError)


async def test_the_hook_is_not_asked_about_what_is_dropped_anyway(rig: Rig) -> None:
    asked: list[Any] = []

    def hook(snapshot: Any, event: Any, *args: Any) -> None:
        asked.append(event)

    live = await rig.start(counter_chart(), logic(hook))
    live._accept(done("nobody@3", 1), "engine")
    assert asked == []
    live.stop()
    await rig.send(live, "N")
    assert asked == []


# A blocking hook of the async engine


class Blocking:
    """A ledger's shape: its hook blocks a thread."""

    blocking = True

    def __init__(self) -> None:
        self.threads: list[str] = []
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self, snapshot: Any, event: Any, *args: Any) -> Any:
        self.threads.append(threading.current_thread().name)
        self.gate.wait(10)
        if isinstance(event, Event) and event.type == "RAISE":
            raise StoreError("disk")
        return None


def order_machine(hook: Any, ledger: Any) -> Any:
    chart = counter_chart(context={"order": []})
    chart["states"]["a"]["on"] = {"*": {"actions": "note"}}
    made = MachineLogic(
        actions={"note": lambda c, e: {"order": [*c["order"], e.type]}},
        before_step=hook,
        attachments={"ledger": ledger},
    )
    return create_machine(chart, made)


async def test_a_blocking_hook_runs_on_a_thread_and_events_keep_their_order() -> None:
    hook = Blocking()
    live = Interpreter(order_machine(hook, hook)).start()
    hook.gate.clear()
    sent = [live.send(name, wait=True) for name in ("A", "B", "C")]
    await asyncio.sleep(0.02)
    assert live.context["order"] == [] and live.busy and not live.quiet()
    hook.gate.set()
    receipts = await asyncio.wait_for(asyncio.gather(*sent), 5)
    assert [each.status for each in receipts] == ["taken"] * 3
    assert live.context["order"] == ["A", "B", "C"]
    assert set(hook.threads) == {"guardchart-worker"}
    live.stop()


async def test_a_hook_that_need_not_be_asked_does_not_leave_the_loop() -> None:
    class Sometimes(Blocking):
        def concerns(self, snapshot: Any, event: Any) -> bool:
            return bool(event.type == "B")

    hook = Sometimes()
    live = Interpreter(order_machine(hook, hook)).start()
    live.send("A")
    assert live.context["order"] == ["A"] and hook.threads == ["MainThread"]
    assert (await live.send("B", wait=True)).status == "taken"
    assert hook.threads[1] == "guardchart-worker"
    live.stop()


async def test_a_blocking_hook_that_raises_denies_only_its_event() -> None:
    hook = Blocking()
    live = Interpreter(order_machine(hook, None), ledger=hook).start()
    bad, good = live.send("RAISE", wait=True), live.send("B", wait=True)
    assert (await bad).reason == "StoreError while deciding"
    assert (await good).status == "taken" and live.context["order"] == ["B"]
    live.stop()


async def test_stop_answers_those_who_wait_for_a_blocked_hook() -> None:
    hook = Blocking()
    live = Interpreter(order_machine(hook, hook)).start()
    hook.gate.clear()
    sent = [live.send(name, wait=True) for name in ("A", "B")]
    waiting = asyncio.gather(*sent)
    await asyncio.sleep(0.01)
    live.stop()
    receipts = await asyncio.wait_for(waiting, 5)
    assert [each.status for each in receipts] == ["dropped", "dropped"]
    hook.gate.set()
    await asyncio.sleep(0.01)
    assert live.context["order"] == [] and live.quiet()


async def test_a_deadline_that_falls_while_a_hook_blocks_fires_after_it() -> None:
    hook = Blocking()
    chart = counter_chart()
    chart["states"] = {"a": {"after": {"20": "b"}, "on": {"N": {"actions": "inc"}}}, "b": {}}
    made = MachineLogic(actions={"inc": inc}, before_step=hook, attachments={"ledger": hook})
    live = Interpreter(create_machine(chart, made)).start()
    hook.gate.clear()
    live.send("N")
    await asyncio.sleep(0.05)
    assert live.current_state_ids == {"c.a"}
    hook.gate.set()
    deadline = time.monotonic() + 5
    while live.current_state_ids != {"c.b"}:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.002)
    assert live.context["n"] == 1
    live.stop()


@pytest.mark.parametrize("which", ["replaced", "raised"])
async def test_a_hook_of_the_sync_engine_runs_where_the_step_runs(rig: Rig, which: str) -> None:
    where: list[str] = []

    def hook(*args: Any) -> Any:
        where.append(threading.current_thread().name)
        if which == "raised":
            raise ValueError
        return BeforeStep(event=Event("N"))

    live = await rig.start(counter_chart(), logic(hook))
    await rig.send(live, "X")
    assert where == [threading.current_thread().name]


async def test_merged_logic_asks_the_hook_of_each_part(rig: Rig) -> None:
    asked: list[str] = []

    def first(snapshot: Any, event: Any, now: float, host: Any, outside: bool) -> Any:
        asked.append("first")
        return BeforeStep(denied="first says no") if event.type == "NO" else None

    def second(snapshot: Any, event: Any, now: float, host: Any, outside: bool) -> Any:
        asked.append("second")
        return BeforeStep(denied="second says no")

    merged = logic(first).merge(MachineLogic(before_step=second), MachineLogic())
    live = await rig.start(counter_chart(), merged)
    assert (await rig.send(live, "NO")).reason == "first says no"
    assert asked == ["first"]
    assert (await rig.send(live, "INC")).reason == "second says no"
    assert asked == ["first", "first", "second"]
    assert logic(first).merge(logic(first)).before_step is first


async def test_the_second_hook_sees_what_the_first_makes_of_the_event(rig: Rig) -> None:
    seen: list[Any] = []

    def first(snapshot: Any, event: Any, now: float, host: Any, outside: bool) -> Any:
        return BeforeStep(Event("INC", {"by": 2}), batch_no=3)

    def second(snapshot: Any, event: Any, now: float, host: Any, outside: bool) -> Any:
        seen.append(event.payload)
        return BeforeStep()

    merged = logic(first).merge(MachineLogic(before_step=second))
    live = await rig.start(counter_chart(), merged)
    await rig.send(live, "INC")
    assert seen == [{"by": 2}] and live.snapshot.batch_no == 3
