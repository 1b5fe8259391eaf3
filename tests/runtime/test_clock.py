"""Time: after, delayed sends, the simulated clock, the real one, serving delays."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from functools import partial
from typing import Any

import pytest

from guardchart import SimulatedClock, StepError
from guardchart.runtime import Interpreter, MachineLogic, SyncInterpreter, create_machine
from tests.runtime.conftest import Rig, counter_chart


def waits(ms: Any = 1000, **more: Any) -> dict[str, Any]:
    return {
        "id": "w",
        "initial": "a",
        "states": {"a": {"after": {str(ms): "b"}, "on": {"GO": "c"}}, "b": {}, "c": {}, **more},
    }


async def test_a_timer_fires_when_the_clock_reaches_it_and_not_before(rig: Rig) -> None:
    clock = SimulatedClock(wall_start=100)
    live = await rig.start(waits(), clock=clock)
    assert live.next_due() == (101_000.0, "1000.w.a")
    await rig.move(clock, 999)
    assert live.current_state_ids == {"w.a"}
    await rig.move(clock, 1)
    assert live.current_state_ids == {"w.b"} and clock.now_ms() == 101_000


async def test_leaving_the_state_cancels_its_timer(rig: Rig) -> None:
    clock = SimulatedClock()
    live = await rig.start(waits(), clock=clock)
    await rig.send(live, "GO")
    assert live.next_due() is None
    await rig.move(clock, 5000)
    assert live.current_state_ids == {"w.c"}


async def test_due_timers_fire_in_order_and_the_clock_stands_at_each(rig: Rig) -> None:
    clock = SimulatedClock()
    seen: list[tuple[str, float]] = []
    logic = MachineLogic(actions={"see": lambda c, e: seen.append((e.type, clock.now_ms()))})
    chart = {
        "id": "p",
        "type": "parallel",
        "states": {
            key: {
                "initial": "on",
                "states": {"on": {"after": {ms: {"actions": "see"}}}},
            }
            for key, ms in (("z", 200), ("y", 100), ("x", 200))
        },
    }
    await rig.start(chart, logic, clock=clock)
    await rig.move(clock, 1000)
    assert seen == [
        ("xstate.after.100.p.y.on", 100),
        ("xstate.after.200.p.x.on", 200),
        ("xstate.after.200.p.z.on", 200),
    ]
    assert clock.now_ms() == 1000


async def test_a_chain_of_timers_goes_on_within_one_move(rig: Rig) -> None:
    clock = SimulatedClock()
    chart = waits(100, b={"after": {"100": "d"}}, d={"after": {"100": "c"}})
    live = await rig.start(chart, clock=clock)
    await rig.move(clock, 250)
    assert live.current_state_ids == {"w.d"} and clock.now_ms() == 250
    await rig.move(clock, 50)
    assert live.current_state_ids == {"w.c"}


async def test_services_run_to_their_end_between_two_timers(rig: Rig) -> None:
    clock = SimulatedClock()
    chart = waits(
        100,
        b={"invoke": {"src": "svc", "onDone": "d"}, "after": {"100": "late"}},
        d={"after": {"100": "c"}},
        late={},
    )
    live = await rig.start(chart, MachineLogic(services={"svc": lambda input: 1}), clock=clock)
    await rig.move(clock, 1000)
    assert live.current_state_ids == {"w.c"}


async def test_equal_deadlines_of_two_machines_fire_in_the_order_they_started(rig: Rig) -> None:
    clock = SimulatedClock()
    order: list[str] = []

    def note(name: str, context: Any, event: Any) -> None:
        order.append(name)

    for name in "zyx":
        logic = MachineLogic(actions={"see": partial(note, name)})
        chart = counter_chart()
        chart["states"]["a"] = {"after": {"5": {"actions": "see"}}}
        await rig.start(chart, logic, clock=clock)
    await rig.move(clock, 5)
    assert order == ["z", "y", "x"]


async def test_set_counts_from_the_start_and_never_goes_back(rig: Rig) -> None:
    clock = SimulatedClock(wall_start=7)
    live = await rig.start(waits(), clock=clock)
    await clock.set(1000)
    assert clock.now_ms() == 8000 and live.current_state_ids == {"w.b"}
    for wrong in (999, float("nan")):
        with pytest.raises(ValueError, match="forward"):
            clock.set(wrong)


def test_without_a_loop_the_clock_gives_none_and_is_done_on_return() -> None:
    clock = SimulatedClock()
    live = SyncInterpreter(create_machine(waits()), clock=clock).start()
    assert clock.increment(1000) is None
    assert live.current_state_ids == {"w.b"}


async def test_in_a_loop_the_clock_can_be_awaited_even_if_nobody_needs_it() -> None:
    clock = SimulatedClock()
    clock.increment(1)  # no warning
    await clock.increment(1)
    assert clock.now_ms() == 2


@pytest.mark.parametrize("depth", [1, 8])
async def test_moving_the_clock_drains_tasks_and_threads(rig: Rig, depth: int) -> None:
    clock = SimulatedClock()

    async def slow(input: Any) -> int:
        for _ in range(depth):
            await asyncio.sleep(0)
        return 1

    def threaded(input: Any) -> int:
        time.sleep(0.01)
        return 1

    chart = waits(
        10,
        b={"invoke": {"src": "one", "onDone": "d"}},
        d={"invoke": {"src": "two", "onDone": "c"}},
    )
    logic = MachineLogic(services={"one": slow if rig.is_async else threaded, "two": threaded})
    live = await rig.start(chart, logic, clock=clock)
    await rig.move(clock, 10)
    assert live.current_state_ids == {"w.c"}


async def test_a_hanging_service_does_not_hold_the_clock() -> None:
    release = threading.Event()
    ended: list[bool] = []
    clock = SimulatedClock()
    chart = {
        "id": "w",
        "initial": "a",
        "states": {"a": {"invoke": {"src": "hang"}, "after": {"5000": "b"}}, "b": {}},
    }
    live = Interpreter(
        create_machine(
            chart, MachineLogic(services={"hang": lambda i: ended.append(release.wait(10))})
        ),
        clock=clock,
    ).start()
    await clock.increment(5000)
    assert live.current_state_ids == {"w.b"} and ended == []
    live.stop()
    release.set()


def test_another_thread_may_move_the_clock_while_a_sync_service_hangs() -> None:
    release = threading.Event()
    clock = SimulatedClock()
    chart = {
        "id": "w",
        "initial": "a",
        "states": {
            "a": {"on": {"GO": "b"}},
            "b": {"invoke": {"src": "hang"}, "after": {"5000": "c"}},
            "c": {},
        },
    }
    logic = MachineLogic(services={"hang": lambda input: release.wait(10)})
    live = SyncInterpreter(create_machine(chart, logic), clock=clock).start()

    def move() -> None:
        while live.next_due() is None:
            time.sleep(0.001)
        clock.increment(5000)

    mover = threading.Thread(target=move)
    mover.start()
    assert live.send("GO").status == "taken"
    mover.join(5)
    assert live.current_state_ids == {"w.c"}
    release.set()


def test_a_clock_moved_by_an_action_fires_what_is_due_after_the_step() -> None:
    clock = SimulatedClock()

    def act(context: Any, event: Any) -> None:
        clock.increment(1000)

    chart = waits()
    chart["states"]["a"]["on"]["TICK"] = {"actions": "act"}
    live = SyncInterpreter(
        create_machine(chart, MachineLogic(actions={"act": act})), clock=clock
    ).start()
    assert live.send("TICK").status == "taken"
    assert clock.now_ms() == 1000 and live.current_state_ids == {"w.b"}


def test_a_clock_moved_by_a_service_fires_what_is_due() -> None:
    clock = SimulatedClock()
    chart = waits()
    chart["states"]["a"]["invoke"] = {"src": "slow", "onDone": "c"}
    logic = MachineLogic(services={"slow": lambda input: clock.increment(1000)})
    live = SyncInterpreter(create_machine(chart, logic), clock=clock).start()
    assert live.current_state_ids == {"w.b"}


async def test_timers_without_delay_do_not_hang_the_clock(rig: Rig) -> None:
    clock = SimulatedClock()
    chart = {
        "id": "w",
        "initial": "a",
        "states": {"a": {"after": {"0": {"target": "a", "reenter": True}}}},
    }
    live = await rig.start(chart, clock=clock, max_queue=20)
    with pytest.raises(StepError, match="without"):
        await rig.move(clock, 1)
    assert any("due at once" in str(each) for each in live.faults)


def delayed(ms: float = 100, target: str | None = None) -> MachineLogic:
    def act(scope: Any, context: Any, event: Any, action: Any) -> None:
        scope.send_after(ms, {"type": "LATER", "x": 1}, id="s", target=target)

    def cancel(scope: Any, context: Any, event: Any, action: Any) -> None:
        scope.cancel("s")

    return MachineLogic(
        actions={"act": act, "cancel": cancel, "keep": lambda c, e: {"got": e.payload["x"]}}
    )


DELAYED = {
    "id": "d",
    "initial": "a",
    "context": {"got": None},
    "states": {
        "a": {
            "on": {
                "GO": {"actions": "act"},
                "NO": {"actions": "cancel"},
                "LATER": {"target": "b", "actions": "keep"},
            }
        },
        "b": {},
    },
}


async def test_a_delayed_send_comes_when_it_is_due(rig: Rig) -> None:
    clock = SimulatedClock()
    live = await rig.start(DELAYED, delayed(), clock=clock)
    await rig.send(live, "GO")
    assert live.next_due() == (100.0, "s")
    await rig.move(clock, 99)
    assert live.current_state_ids == {"d.a"}
    await rig.move(clock, 1)
    assert live.current_state_ids == {"d.b"} and live.context["got"] == 1


async def test_a_cancelled_delayed_send_does_not_come(rig: Rig) -> None:
    clock = SimulatedClock()
    live = await rig.start(DELAYED, delayed(), clock=clock)
    await rig.send(live, "GO")
    await rig.send(live, "NO")
    await rig.move(clock, 500)
    assert live.current_state_ids == {"d.a"}


async def test_a_timer_and_a_delayed_send_survive_a_snapshot(rig: Rig) -> None:
    clock = SimulatedClock()
    live = await rig.start(DELAYED, delayed(), clock=clock)
    await rig.send(live, "GO")
    text = live.get_snapshot()
    live.stop()
    await rig.move(clock, 500)
    again = await rig.restore(text, live.machine, clock=clock, trusted=True)
    again.fire_overdue()
    assert again.current_state_ids == {"d.b"}


# Real time


async def test_a_real_deadline_fires_by_itself(rig: Rig) -> None:
    live = await rig.start(waits(20))
    await rig.until(lambda: live.current_state_ids == {"w.b"})


async def test_stop_disarms_a_real_deadline(rig: Rig) -> None:
    live = await rig.start(waits(20))
    live.stop()
    await asyncio.sleep(0.06)
    assert live.current_state_ids == {"w.a"}


def test_manual_timers_are_not_fired_in_the_background() -> None:
    live = SyncInterpreter(create_machine(waits(10)), manual_timers=True).start()
    time.sleep(0.05)
    assert live.current_state_ids == {"w.a"}
    live.fire_overdue()
    assert live.current_state_ids == {"w.b"}


def test_alarms_keep_no_interpreter_alive_and_no_old_deadline() -> None:
    from guardchart.runtime._clock import ALARMS

    chart = waits(3_600_000)
    chart["states"]["a"]["on"]["AGAIN"] = {"target": "a", "reenter": True}
    live = SyncInterpreter(create_machine(chart)).start()
    for _ in range(50):
        live.send("AGAIN")
    assert sum(each is live for each in ALARMS._due) == 1
    ref = weakref.ref(live)
    del live
    gc.collect()
    assert ref() is None


def test_a_slow_service_of_one_machine_delays_no_deadline_of_another() -> None:
    release = threading.Event()
    chart = waits(10, b={"invoke": {"src": "hang"}})
    logic = MachineLogic(services={"hang": lambda input: release.wait(10)})
    first = SyncInterpreter(create_machine(chart, logic)).start()
    while first.current_state_ids != {"w.b"}:
        time.sleep(0.001)
    second = SyncInterpreter(create_machine(waits(10))).start()
    deadline = time.monotonic() + 3
    while second.current_state_ids != {"w.b"}:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    release.set()
    first.stop()
    second.stop()


# Serving delays


async def test_settle_serves_short_delays_and_leaves_long_ones(rig: Rig) -> None:
    chart = waits(20, b={"after": {"60000": "c"}})
    live = await rig.start(chart, **({} if rig.is_async else {"manual_timers": True}))
    await rig.settle(live, 1.0)
    assert live.current_state_ids == {"w.b"} and live.next_due() is not None


async def test_settle_waits_for_no_more_than_it_may_in_all(rig: Rig) -> None:
    chart = {
        "id": "w",
        "initial": "a",
        "states": {"a": {"after": {"40": {"target": "a", "reenter": True}}}},
    }
    live = await rig.start(chart, **({} if rig.is_async else {"manual_timers": True}))
    started = time.monotonic()
    await rig.settle(live, 0.15)
    assert 0.05 < time.monotonic() - started < 2


@pytest.mark.parametrize("how", ["tag", "name"])
async def test_a_waiting_state_rests_whatever_its_timers(rig: Rig, how: str) -> None:
    chart = waits(50)
    if how == "tag":
        chart["states"]["a"]["tags"] = ["waiting"]
    live = await rig.start(chart, **({} if rig.is_async else {"manual_timers": True}))
    await rig.settle(live, 5.0, waiting=("a",) if how == "name" else ())
    assert live.current_state_ids == {"w.a"}


@pytest.mark.parametrize("name", ["b", "w.b"])
async def test_settle_stops_in_the_states_asked_for(rig: Rig, name: str) -> None:
    chart = waits(10, b={"after": {"50": "c"}})
    live = await rig.start(chart, **({} if rig.is_async else {"manual_timers": True}))
    await rig.settle(live, 5.0, until=(name,))
    assert live.current_state_ids == {"w.b"}


async def test_settle_under_a_simulated_clock_sleeps_for_nothing() -> None:
    clock = SimulatedClock()
    live = SyncInterpreter(create_machine(waits()), clock=clock).start()
    live.settle()
    assert live.current_state_ids == {"w.a"}
    other = Interpreter(create_machine(waits()), clock=clock).start()
    settled = asyncio.create_task(other.settle())
    await clock.increment(1000)
    await asyncio.wait_for(settled, 1)
    assert other.current_state_ids == {"w.b"}
    other.stop()


async def test_settle_of_a_long_simulated_delay_returns(rig: Rig) -> None:
    live = await rig.start(waits(60_000), clock=SimulatedClock())
    await rig.settle(live, 30.0)
    assert live.current_state_ids == {"w.a"}


async def test_settle_serves_the_delays_of_child_machines(rig: Rig) -> None:
    child = create_machine(
        {
            "id": "k",
            "initial": "a",
            "states": {"a": {"after": {"20": "z"}}, "z": {"type": "final"}},
        }
    )
    chart = {
        "id": "m",
        "initial": "a",
        "states": {"a": {"invoke": {"src": "kid", "onDone": "b"}}, "b": {}},
    }
    live = await rig.start(chart, MachineLogic(services={"kid": child}))
    await rig.settle(live, 5.0)
    assert live.current_state_ids == {"m.b"}


async def test_a_waiting_child_does_not_keep_its_parent_busy(rig: Rig) -> None:
    child = create_machine(
        {"id": "k", "initial": "a", "states": {"a": {"tags": ["waiting"], "after": {"9000": "a"}}}}
    )
    chart = {"id": "m", "initial": "a", "states": {"a": {"invoke": {"src": "kid"}}}}
    live = await rig.start(chart, MachineLogic(services={"kid": child}))
    due = live.next_due()
    await rig.settle(live, 30.0)
    assert due is not None and live.next_due() == due


def test_stop_from_another_thread_ends_a_sleeping_settle() -> None:
    live = SyncInterpreter(create_machine(waits(20_000)), manual_timers=True).start()
    stopper = threading.Timer(0.03, live.stop)
    stopper.start()
    started = time.monotonic()
    live.settle(30.0)
    assert time.monotonic() - started < 20  # when its own deadline would have come
    stopper.join()


def test_a_sleeping_settle_takes_events_of_other_threads() -> None:
    live = SyncInterpreter(create_machine(waits(20_000)), manual_timers=True).start()
    receipts: list[Any] = []
    sender = threading.Timer(0.03, lambda: receipts.append(live.send("GO")))
    sender.start()
    started = time.monotonic()
    live.settle(30.0)
    sender.join()
    assert time.monotonic() - started < 20  # when its own deadline would have come
    assert receipts[0].status == "taken" and live.current_state_ids == {"w.c"}


async def test_fire_overdue_goes_by_due_time_then_id_and_takes_new_ones_along(rig: Rig) -> None:
    clock = SimulatedClock()
    order: list[str] = []
    logic = MachineLogic(actions={"see": lambda c, e: order.append(e.type)})
    regions = {
        key: {
            "initial": "on",
            "states": {"on": {"after": {ms: {"target": "off", "actions": "see"}}}, "off": {}},
        }
        for key, ms in (("q", 30), ("p", 30), ("r", 10))
    }
    regions["r"]["states"]["off"] = {"after": {"5": {"actions": "see"}}}  # type: ignore[index]
    machine = create_machine({"id": "x", "type": "parallel", "states": regions}, logic)
    live = await rig.start(machine, clock=clock)
    data = live.dump()
    live.stop()
    await rig.move(clock, 100)
    again = await rig.restore(data, machine, clock=clock)
    if rig.is_async:
        await asyncio.sleep(0)
    assert order == []
    again.fire_overdue()
    # The one that became due through it counts from now, so it is not due yet.
    assert order == [f"xstate.after.{each}.on" for each in ("10.x.r", "30.x.p", "30.x.q")]
    assert again.next_due() == (105.0, "5.x.r.off")
