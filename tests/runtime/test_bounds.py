"""Queues, loops and threads: what is bounded, what is atomic, what leaks nothing."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from typing import Any

import pytest

from guardchart import SimulatedClock, StepError
from guardchart.errors import QueueFullError
from guardchart.runtime import Interpreter, MachineLogic, SyncInterpreter, create_machine
from guardchart.runtime._loops import LoopThread
from guardchart.runtime._workers import WorkerPool
from tests.runtime.conftest import COUNT, Rig, counter_chart, inc


def again(scope: Any, context: Any, event: Any, action: Any) -> None:
    context["n"] += 1
    scope.send("N")


async def test_an_action_that_sends_for_ever_is_cut_off(rig: Rig) -> None:
    live = await rig.start(counter_chart(), MachineLogic(actions={"inc": again}), max_queue=100)
    receipt = await rig.send(live, "N")
    assert receipt.status == "taken" and live.context["n"] == 101
    assert isinstance(live.faults[0], StepError) and "100 events followed" in str(live.faults[0])
    assert live.status == "running" and live.quiet()
    assert (await rig.send(live, "OTHER")).status == "ignored"


async def test_many_events_that_breed_none_are_no_loop(rig: Rig) -> None:
    live = await rig.start(counter_chart(), COUNT, max_queue=10)
    for _ in range(50):
        await rig.send(live, "N")
    assert live.context["n"] == 50 and live.faults == []


async def test_an_action_may_send_some_events_to_its_machine_and_they_come_after(
    rig: Rig,
) -> None:
    order: list[str] = []

    def act(scope: Any, context: Any, event: Any, action: Any) -> None:
        order.append(event.type)
        if event.type == "N":
            scope.send("B")
            scope.raise_("A")

    chart = counter_chart()
    chart["states"]["a"]["on"] = {each: {"actions": "inc"} for each in "NAB"}
    live = await rig.start(chart, MachineLogic(actions={"inc": act}))
    await rig.send(live, "N")
    assert order == ["N", "A", "B"]


async def test_a_send_from_an_action_is_queued_and_processed_after(rig: Rig) -> None:
    box: list[Any] = []
    receipts: list[Any] = []

    def act(context: Any, event: Any) -> dict[str, Any]:
        if context["n"] == 0:
            receipts.append(box[0].send("N"))
            assert box[0].context["n"] == 0
        return {"n": context["n"] + 1}

    live = await rig.start(counter_chart(), MachineLogic(actions={"inc": act}))
    box.append(live)
    receipt = await rig.send(live, "N")
    assert receipt.status == "taken" and live.context["n"] == 2
    if rig.is_async:
        assert await receipts[0] is None
    else:
        assert (receipts[0].status, receipts[0].reason) == ("ignored", "queued")


async def test_a_full_queue_refuses_the_sender_and_keeps_the_rest(rig: Rig) -> None:
    box: list[Any] = []
    refused: list[Any] = []

    def act(context: Any, event: Any) -> dict[str, Any]:
        if context["n"] == 0:
            for _ in range(7):
                try:
                    box[0].send("N")
                except QueueFullError as error:
                    refused.append(error)
        return {"n": context["n"] + 1}

    live = await rig.start(counter_chart(), MachineLogic(actions={"inc": act}), max_queue=5)
    box.append(live)
    await rig.send(live, "N")
    assert len(refused) == 2 and live.context["n"] == 6
    assert (await rig.send(live, "N")).status == "taken"


async def test_a_step_that_never_rests_is_in_the_receipt_and_changes_nothing(rig: Rig) -> None:
    chart = counter_chart(maxMicrosteps=20)
    chart["states"]["a"]["on"] = {"LOOP": "b", "N": {"actions": "inc"}}
    chart["states"]["b"] = {"always": {"guard": "yes", "actions": "inc"}}
    logic = MachineLogic(actions={"inc": inc}, guards={"yes": lambda c, e: True})
    live = await rig.start(chart, logic)
    rev = live.snapshot.rev
    receipt = await rig.send(live, "LOOP")
    assert receipt.denied and isinstance(receipt.error, StepError) and not receipt.changed
    assert live.snapshot.rev == rev and live.faults == [receipt.error]
    assert (await rig.send(live, "N")).status == "taken"


async def test_a_completion_whose_step_never_rests_becomes_a_failure(rig: Rig) -> None:
    chart = {
        "id": "m",
        "initial": "a",
        "maxMicrosteps": 20,
        "context": {"n": 0},
        "states": {
            "a": {"on": {"GO": "b"}},
            "b": {"invoke": {"src": "svc", "onDone": "loop", "onError": "bad"}},
            "loop": {"always": {"guard": "yes", "actions": "inc"}},
            "bad": {},
        },
    }
    logic = MachineLogic(
        actions={"inc": inc}, guards={"yes": lambda c, e: True}, services={"svc": lambda i: 1}
    )
    live = await rig.start(chart, logic)
    await rig.send(live, "GO")
    assert live.current_state_ids == {"m.bad"} and isinstance(live.faults[0], StepError)


@pytest.mark.parametrize("what", ["timer", "send", "failure"])
async def test_what_the_engine_reports_never_comes_twice_though_its_step_never_rests(
    rig: Rig, what: str
) -> None:
    def svc(input: Any) -> None:
        raise ValueError

    def later(scope: Any, context: Any, event: Any, action: Any) -> None:
        scope.send_after(10, "LOOP")

    state: dict[str, Any] = {"on": {"LOOP": "loop"}}
    if what == "timer":
        state["after"] = {"10": "loop"}
    elif what == "send":
        state["entry"] = "later"
    else:
        state["invoke"] = {"src": "svc", "onError": "loop"}
    chart = {
        "id": "m",
        "initial": "a",
        "maxMicrosteps": 20,
        "context": {"n": 0},
        "states": {
            "a": {"on": {"GO": "b"}},
            "b": state,
            "loop": {"always": {"guard": "yes", "actions": "inc"}},
        },
    }
    logic = MachineLogic(
        actions={"inc": inc, "later": later},
        guards={"yes": lambda c, e: True},
        services={"svc": svc},
    )
    clock = SimulatedClock()
    live = await rig.start(chart, logic, clock=clock)
    await rig.send(live, "GO")
    await rig.move(clock, 10)
    assert live.current_state_ids == {"m.b"} and live.status == "running"
    assert [type(each) for each in live.faults] == [StepError]
    assert live.next_due() is None
    assert live.dump()["status"] == "active"


async def test_faults_are_kept_but_not_for_ever(rig: Rig) -> None:
    def boom(context: Any, event: Any) -> None:
        raise ValueError

    live = await rig.start(
        counter_chart(actionErrorPolicy="continue"), MachineLogic(actions={"inc": boom})
    )
    for _ in range(120):
        await rig.send(live, "N")
    assert len(live.faults) == 100


# Threads


def test_concurrent_sends_are_atomic() -> None:
    live = SyncInterpreter(create_machine(counter_chart(), COUNT)).start()
    receipts: list[Any] = []

    def many() -> None:
        receipts.extend(live.send("N") for _ in range(200))

    threads = [threading.Thread(target=many) for _ in range(6)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert live.context["n"] == 1200 == len(receipts)
    assert {each.status for each in receipts} == {"taken"}
    assert live.snapshot.rev == 1201


def test_posts_from_threads_all_arrive_without_waiting() -> None:
    live = SyncInterpreter(create_machine(counter_chart(), COUNT)).start()
    threads = [
        threading.Thread(target=lambda: [live.post("N") for _ in range(100)]) for _ in range(4)
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    deadline = time.monotonic() + 5
    while live.context["n"] != 400:
        assert time.monotonic() < deadline
        time.sleep(0.002)


async def test_posts_from_threads_reach_the_loop() -> None:
    live = Interpreter(create_machine(counter_chart(), COUNT)).start()
    await asyncio.to_thread(lambda: [live.post("N") for _ in range(100)])
    await asyncio.sleep(0.01)
    assert live.context["n"] == 100
    live.stop()


async def test_a_post_too_many_from_a_thread_is_a_fault() -> None:
    box: list[Any] = []

    def act(context: Any, event: Any) -> dict[str, Any]:
        if event.type == "FILL":
            for _ in range(3):
                box[0].send("N")
            box[0]._accept_late(event)
        return {"n": context["n"] + 1}

    chart = counter_chart()
    chart["states"]["a"]["on"]["FILL"] = {"actions": "inc"}
    live = Interpreter(
        create_machine(chart, MachineLogic(actions={"inc": act})), max_queue=3
    ).start()
    box.append(live)
    live.send("FILL")
    assert [type(each) for each in live.faults] == [QueueFullError]
    live.stop()


def test_update_context_from_another_thread_is_written_between_steps() -> None:
    inside = threading.Event()
    release = threading.Event()

    def act(context: Any, event: Any) -> dict[str, Any]:
        inside.set()
        release.wait(10)
        return {"n": context["n"] + 1}

    live = SyncInterpreter(
        create_machine(counter_chart(), MachineLogic(actions={"inc": act}))
    ).start()
    driver = threading.Thread(target=lambda: live.send("N"))
    driver.start()
    inside.wait(10)
    threading.Timer(0.02, release.set).start()
    live.update_context({"x": 1})
    driver.join()
    assert live.context == {"n": 1, "x": 1}


def test_an_exception_of_another_threads_request_is_that_threads() -> None:
    inside = threading.Event()
    release = threading.Event()

    def act(context: Any, event: Any) -> None:
        inside.set()
        release.wait(10)

    live = SyncInterpreter(
        create_machine(counter_chart(), MachineLogic(actions={"inc": act}))
    ).start()
    driver = threading.Thread(target=lambda: live.send("N"))
    driver.start()
    inside.wait(10)
    threading.Timer(0.02, release.set).start()
    with pytest.raises(Exception, match="keys"):
        live.update_context({1: 1})
    driver.join()
    assert live.status == "running"


def test_an_interrupt_in_a_service_leaves_the_machine_usable() -> None:
    hits: list[int] = []

    def svc(input: Any) -> int:
        hits.append(1)
        if len(hits) == 1:
            raise KeyboardInterrupt
        return 1

    chart = counter_chart()
    chart["states"] = {
        "a": {"on": {"GO": "b"}},
        "b": {"invoke": {"src": "svc", "onDone": "c", "onError": "bad"}},
        "c": {},
        "bad": {},
    }
    live = SyncInterpreter(
        create_machine(chart, MachineLogic(actions={"inc": inc}, services={"svc": svc}))
    ).start()
    with pytest.raises(KeyboardInterrupt):
        live.send("GO")
    assert live.current_state_ids == {"c.b"}
    live.fail_interrupted()
    assert live.current_state_ids == {"c.bad"}
    assert live.send("GO").status == "ignored"


def test_a_stopped_interpreter_is_collected_and_so_are_its_arguments() -> None:
    class Thing:
        pass

    thing = Thing()
    ref = weakref.ref(thing)
    chart = counter_chart()
    chart["states"]["a"]["after"] = {"60000": "a"}
    chart["states"]["a"]["invoke"] = {"src": "svc"}
    machine = create_machine(
        chart, MachineLogic(actions={"inc": inc}, services={"svc": lambda input: None})
    )
    live = SyncInterpreter(machine, input={"thing": thing}).start()
    live.stop()
    del live, thing
    deadline = time.monotonic() + 5
    while ref() is not None:
        gc.collect()
        assert time.monotonic() < deadline
        time.sleep(0.01)


# Worker threads and the loop thread


def test_workers_are_reused_and_end_when_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("guardchart.runtime._workers._IDLE_S", 0.05)
    pool = WorkerPool()
    names = {pool.submit(threading.get_ident).result(5) for _ in range(20)}
    assert len(names) == 1 and len(pool._idle) == 1
    deadline = time.monotonic() + 5
    while pool._idle:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert pool.submit(lambda: 7).result(5) == 7


def test_a_worker_gives_the_exception_and_goes_on() -> None:
    pool = WorkerPool()
    with pytest.raises(ZeroDivisionError):
        pool.submit(lambda: 1 / 0).result(5)
    with pytest.raises(KeyboardInterrupt):
        pool.submit(_interrupt).result(5)
    assert pool.submit(lambda: 7).result(5) == 7


def _interrupt() -> None:
    raise KeyboardInterrupt


def test_hung_workers_hold_up_nobody() -> None:
    pool, release = WorkerPool(), threading.Event()
    hung = [pool.submit(release.wait, 20) for _ in range(3)]
    assert pool.submit(lambda: 7).result(5) == 7
    assert not any(each.done() for each in hung)
    release.set()
    assert [each.result(5) for each in hung] == [True] * 3


def test_a_loop_task_can_be_cancelled_before_it_begins() -> None:
    loop, ended = LoopThread(), threading.Event()
    outcomes: list[Any] = []

    def tell(output: Any, error: Any) -> None:
        outcomes.append(error)
        ended.set()

    async def body() -> None:
        await asyncio.sleep(30)

    loop.start(tell, body)()
    assert ended.wait(5) and isinstance(outcomes[0], asyncio.CancelledError)
    assert loop._loop is not None
    loop._loop.call_soon_threadsafe(loop._loop.stop)


@pytest.mark.skipif(not hasattr(__import__("os"), "fork"), reason="needs fork")
def test_a_forked_process_gets_threads_of_its_own() -> None:
    import subprocess
    import sys

    code = """
import os, time, warnings
warnings.simplefilter("ignore")
from guardchart import *
from guardchart.runtime._workers import WORKERS
async def svc(input): return 1
chart = {"id": "m", "initial": "a", "states": {
    "a": {"invoke": {"src": "svc", "onDone": "b"}}, "b": {"after": {"20": "c"}}, "c": {}}}
machine = create_machine(chart, MachineLogic(services={"svc": svc}))
def run():
    live = SyncInterpreter(machine, allow_async=True).start()
    until = time.monotonic() + 5
    while live.current_state_ids != {"m.c"} and time.monotonic() < until: time.sleep(0.005)
    return live.current_state_ids == {"m.c"} and WORKERS.submit(lambda: 7).result(5) == 7
assert run()
pid = os.fork()
if pid == 0:
    os._exit(0 if run() else 1)
assert os.waitpid(pid, 0)[1] == 0
print("ok")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "ok\n", done.stderr
