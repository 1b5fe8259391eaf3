"""Services: forms, outcomes, deadlines, threads, context variables, late completions."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from guardchart import NotSupportedError, SimulatedClock
from guardchart.errors import ChartError, ServiceInterruptedError
from guardchart.runtime import Interpreter, MachineLogic, SyncInterpreter, create_machine
from tests.runtime.conftest import Rig

VAR: contextvars.ContextVar[str] = contextvars.ContextVar("VAR", default="unset")


def caller(deadline_ms: int | None = None, **more: Any) -> dict[str, Any]:
    busy: dict[str, Any] = {
        "invoke": {
            "id": "job",
            "src": "svc",
            "onDone": {"target": "good", "actions": "keep"},
            "onError": {"target": "bad", "actions": "keep"},
        },
        "on": {"LEAVE": "left", "STREAM": {"actions": "add"}},
    }
    if deadline_ms is not None:
        busy["after"] = {str(deadline_ms): "late"}
    return {
        "id": "m",
        "initial": "idle",
        "context": {"got": None, "items": [], "charged": 0},
        "states": {
            "idle": {"on": {"GO": "busy"}},
            "busy": busy,
            "good": {},
            "bad": {},
            "left": {},
            "late": {"on": {"BACK": "busy"}},
            **more,
        },
    }


def logic(svc: Any) -> MachineLogic:
    return MachineLogic(
        actions={
            "keep": lambda c, e: {"got": e.data},
            "add": lambda c, e: {"items": [*c["items"], e.data]},
        },
        services={"svc": svc},
    )


async def test_a_service_gets_scope_context_and_event(rig: Rig) -> None:
    seen: list[Any] = []

    def svc(scope: Any, context: Any, event: Any) -> str:
        seen.extend([scope.id, scope.parent, scope.engine, scope.state_id, scope.node.id])
        seen.extend([context["got"], event.payload, scope.active, scope.host.scope])
        seen.extend([scope.snapshot is scope.interpreter.snapshot, scope.context["got"]])
        seen.append(scope.logic is scope.interpreter.logic)
        with pytest.raises(TypeError):
            context["got"] = 1
        return "out"

    live = await rig.start(caller(), logic(svc), scope="thread-1")
    await rig.send(live, "GO", x=1)
    assert seen == [
        "m", None, rig.engine, "m.busy", "m.busy", None, {"x": 1}, True, "thread-1", True, None, True,
    ]  # fmt: skip
    assert live.context["got"] == "out" and live.current_state_ids == {"m.good"}


async def test_a_service_of_one_argument_gets_the_input(rig: Rig) -> None:
    chart = caller()
    chart["states"]["busy"]["invoke"]["input"] = {"q": 2}
    live = await rig.start(chart, logic(lambda input: input["q"] + 1))
    await rig.send(live, "GO")
    assert live.context["got"] == 3


async def test_a_service_started_at_once_sees_the_first_event(rig: Rig) -> None:
    seen: list[Any] = []
    chart = {"id": "m", "initial": "a", "states": {"a": {"invoke": {"src": "svc"}}}}
    svc = MachineLogic(services={"svc": lambda scope, context, event: seen.append(event)})
    await rig.start(chart, svc, input=5)
    assert seen[0].type == "xstate.init" and seen[0].input == 5


async def test_a_service_error_that_is_handled_is_an_event(rig: Rig) -> None:
    boom = ValueError("no")

    def svc(input: Any) -> None:
        raise boom

    live = await rig.start(caller(), logic(svc))
    await rig.send(live, "GO")
    assert live.current_state_ids == {"m.bad"} and live.context["got"] is boom
    assert live.status == "running" and live.faults == []


async def test_a_service_error_that_nobody_handles_is_the_machines_error(rig: Rig) -> None:
    boom = ValueError("no")

    def svc(input: Any) -> None:
        raise boom

    chart = caller()
    del chart["states"]["busy"]["invoke"]["onError"]
    live = await rig.start(chart, logic(svc))
    receipt = await rig.send(live, "GO")
    assert receipt.status == "taken"
    assert live.status == "error" and live.error is boom and live.faults == [boom]


async def test_async_services_run_under_the_async_engine() -> None:
    async def svc(scope: Any, context: Any, event: Any) -> int:
        await asyncio.sleep(0)
        return 7

    for each in (svc, functools.partial(svc), lambda s, c, e: svc(s, c, e)):
        live = Interpreter(create_machine(caller(), logic(each))).start()
        live.send("GO")
        await asyncio.wait_for(live.idle(), 5)
        assert live.context["got"] == 7
        live.stop()


def test_the_sync_engine_refuses_an_async_service_at_the_start() -> None:
    async def svc(input: Any) -> int:
        return 7

    live = SyncInterpreter(create_machine(caller(), logic(svc)))
    with pytest.raises(NotSupportedError, match="async"):
        live.start()
    assert live.status == "uninitialized"
    child = create_machine(caller(), logic(svc))
    outer = SyncInterpreter(create_machine(caller(), logic(child)))
    with pytest.raises(NotSupportedError, match="async"):
        outer.start()


def test_the_sync_engine_fails_a_service_that_turns_out_to_be_async() -> None:
    async def svc() -> int:
        return 7

    live = SyncInterpreter(create_machine(caller(), logic(lambda input: svc()))).start()
    live.send("GO")
    assert live.current_state_ids == {"m.bad"}
    assert isinstance(live.context["got"], NotSupportedError) and "async" in str(
        live.context["got"]
    )


# allow_async


@pytest.mark.parametrize("hidden", [False, True])
def test_allow_async_runs_async_services_with_the_callers_variables(hidden: bool) -> None:
    threads: list[str] = []

    async def svc(scope: Any, context: Any, event: Any) -> str:
        await asyncio.sleep(0.001)
        threads.append(threading.current_thread().name)
        return VAR.get()

    given = (lambda s, c, e: svc(s, c, e)) if hidden else svc
    live = SyncInterpreter(create_machine(caller(), logic(given)), allow_async=True).start()
    token = VAR.set("mine")
    try:
        live.send("GO")
    finally:
        VAR.reset(token)
    assert live.context["got"] == "mine" and threads == ["guardchart-loop"]


def test_allow_async_cancels_the_task_when_its_deadline_fires() -> None:
    ended: list[str] = []

    async def svc(input: Any) -> None:
        try:
            await asyncio.sleep(30)
            ended.append("late")
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    live = SyncInterpreter(create_machine(caller(20), logic(svc)), allow_async=True).start()
    live.send("GO")
    assert live.current_state_ids == {"m.late"} and "late" not in ended
    deadline = time.monotonic() + 5
    while not ended:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_allow_async_reaches_child_machines() -> None:
    async def svc(input: Any) -> int:
        return 7

    chart = caller()
    chart["initial"] = "busy"
    chart["states"]["good"] = {"type": "final"}
    chart["output"] = {"ok": True}
    outer = caller()
    live = SyncInterpreter(
        create_machine(outer, logic(create_machine(chart, logic(svc)))), allow_async=True
    ).start()
    live.send("GO")
    assert live.context["got"] == {"ok": True}


def test_allow_async_runs_the_services_of_two_regions_side_by_side() -> None:
    async def svc(scope: Any, context: Any, event: Any) -> None:
        # Each waits for the other.
        meeting.append(scope.state_id)
        while len(meeting) < 2:
            await asyncio.sleep(0.001)

    meeting: list[Any] = []
    region = {"initial": "a", "states": {"a": {"invoke": {"src": "svc", "onDone": "b"}}, "b": {}}}
    chart = {"id": "p", "type": "parallel", "states": {"x": region, "y": region}}
    machine = create_machine(chart, MachineLogic(services={"svc": svc}))
    live = SyncInterpreter(machine, allow_async=True).start()
    assert live.current_state_ids == {"p.x.b", "p.y.b"}


def test_a_task_somebody_else_cancels_is_a_failure() -> None:
    async def svc(input: Any) -> None:
        asyncio.current_task().cancel()  # type: ignore[union-attr]
        await asyncio.sleep(1)

    live = SyncInterpreter(create_machine(caller(), logic(svc)), allow_async=True).start()
    live.send("GO")
    assert live.current_state_ids == {"m.bad"}


async def test_an_error_of_cancellation_from_within_is_a_failure() -> None:
    async def svc(input: Any) -> None:
        raise asyncio.CancelledError

    live = Interpreter(create_machine(caller(), logic(svc))).start()
    live.send("GO")
    await asyncio.wait_for(live.idle(), 5)
    assert live.current_state_ids == {"m.bad"}
    live.stop()


# Threads


async def test_a_sync_service_on_a_thread_has_the_callers_variables(rig: Rig) -> None:
    where: list[str] = []

    def svc(input: Any) -> str:
        where.append(threading.current_thread().name)
        return VAR.get()

    live = await rig.start(caller(60_000), logic(svc))
    token = VAR.set("mine")
    try:
        await rig.send(live, "GO")
    finally:
        VAR.reset(token)
    assert live.context["got"] == "mine" and where == ["guardchart-worker"]


async def test_what_follows_a_threaded_service_has_the_callers_variables(rig: Rig) -> None:
    seen: list[str] = []

    class Look:
        def on_transition(self, *args: Any) -> None:
            seen.append(VAR.get())

    live = await rig.start(caller(60_000), logic(lambda input: 1))
    live.use(Look())
    token = VAR.set("mine")
    try:
        await rig.send(live, "GO")
    finally:
        VAR.reset(token)
    assert seen == ["mine", "mine"]


def test_without_a_deadline_the_sync_engine_stays_in_the_callers_thread() -> None:
    where: list[str] = []
    svc = logic(lambda input: where.append(threading.current_thread().name))
    live = SyncInterpreter(create_machine(caller(), svc)).start()
    live.send("GO")
    assert where == [threading.current_thread().name]


async def test_a_hung_service_is_abandoned_when_its_states_deadline_fires(rig: Rig) -> None:
    release = threading.Event()
    ended: list[bool] = []
    live = await rig.start(caller(30), logic(lambda input: ended.append(release.wait(20))))
    await rig.send(live, "GO")
    assert live.current_state_ids == {"m.late"} and ended == []
    # Its completion, when it comes at last, is dropped.
    release.set()
    await asyncio.sleep(0.02)
    assert live.current_state_ids == {"m.late"} and live.context["got"] is None


async def test_a_hung_service_of_a_child_is_abandoned_at_the_parents_deadline(rig: Rig) -> None:
    release = threading.Event()
    ended: list[bool] = []
    child = create_machine(
        {"id": "k", "initial": "a", "states": {"a": {"invoke": {"src": "hang"}}}},
        MachineLogic(services={"hang": lambda input: ended.append(release.wait(20))}),
    )
    live = await rig.start(caller(30), logic(child))
    await rig.send(live, "GO")
    assert live.current_state_ids == {"m.late"} and ended == []
    assert live.actors == {}
    release.set()


async def test_a_hung_service_does_not_starve_the_other_region(rig: Rig) -> None:
    release = threading.Event()
    region = {
        "initial": "a",
        "states": {
            "a": {"invoke": {"src": "hang", "onDone": "b"}, "after": {"200": "late"}},
            "b": {},
            "late": {},
        },
    }
    other = {
        **region,
        "states": {
            **region["states"],
            "a": {**region["states"]["a"], "invoke": {"src": "ok", "onDone": "b"}},
        },
    }  # type: ignore[dict-item]
    chart = {"id": "p", "type": "parallel", "states": {"x": region, "y": other}}
    both = MachineLogic(services={"hang": lambda i: release.wait(20), "ok": lambda i: 1})
    live = await rig.start(chart, both)
    await rig.settle(live, 0.0)
    assert live.current_state_ids == {"p.x.late", "p.y.b"}
    release.set()


async def test_an_event_from_another_thread_ends_a_hung_service(rig: Rig) -> None:
    release = threading.Event()
    live = await rig.start(caller(60_000), logic(lambda input: release.wait(20)))
    poster = threading.Timer(0.03, lambda: live.post("LEAVE"))
    poster.start()
    await rig.send(live, "GO")
    poster.join()
    assert live.current_state_ids == {"m.left"}
    release.set()


async def test_entering_the_state_again_starts_a_new_run_and_drops_the_old_ones_result(
    rig: Rig,
) -> None:
    first = threading.Event()
    runs: list[int] = []

    def svc(input: Any) -> str:
        runs.append(1)
        if len(runs) == 1:
            first.wait(20)
            return "old"
        first.set()
        time.sleep(0.02)
        return "new"

    live = await rig.start(caller(300), logic(svc))
    await rig.send(live, "GO")
    await rig.send(live, "BACK")
    assert live.context["got"] == "new" and live.current_state_ids == {"m.good"}


@pytest.mark.parametrize("engine", ["sync", "async"])
def test_a_hung_service_does_not_delay_the_exit_of_the_process(engine: str) -> None:
    code = f"""
import asyncio, threading
from guardchart import *
chart = {{"id": "m", "initial": "a", "states": {{
    "a": {{"invoke": {{"src": "hang"}}, "after": {{"20": "b"}}}}, "b": {{}}}}}}
machine = create_machine(chart, MachineLogic(services={{"hang": lambda i: threading.Event().wait()}}))
if "{engine}" == "sync":
    live = SyncInterpreter(machine).start()
    print(sorted(live.current_state_ids))
else:
    async def main():
        live = Interpreter(machine).start()
        await live.idle()
        print(sorted(live.current_state_ids))
        live.stop()
    asyncio.run(main())
import sys, time
print(time.time(), flush=True)
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    ended = time.time()
    assert done.stderr == ""
    states, left = done.stdout.splitlines()
    assert states == "['m.b']" and ended - float(left) < 2.0


# Late completions


class Late:
    """A service that is charged for when it ends, in time or not."""

    __guardchart_form__ = 1

    def __init__(self, release: threading.Event) -> None:
        self.release = release

    def __call__(self, input: Any) -> int:
        self.release.wait(20)
        return 5

    def settle(self, context: Any, outcome: Any) -> dict[str, Any]:
        return {"charged": context["charged"] + 1}

    def late(self, context: Any, outcome: Any) -> dict[str, Any]:
        return {"charged": context["charged"] + (outcome if isinstance(outcome, int) else 100)}


async def test_settle_writes_before_the_outcome_is_selected(rig: Rig) -> None:
    release = threading.Event()
    release.set()
    live = await rig.start(caller(), logic(Late(release)))
    await rig.send(live, "GO")
    assert live.context["charged"] == 1 and live.context["got"] == 5


async def test_a_late_completion_is_charged_and_changes_no_state(rig: Rig) -> None:
    release = threading.Event()
    told: list[Any] = []

    class Tell:
        def on_context(self, interpreter: Any, updates: Any) -> None:
            told.append(updates)

    live = await rig.start(caller(20), logic(Late(release)), plugins=[Tell()])
    await rig.send(live, "GO")
    assert live.current_state_ids == {"m.late"} and live.context["charged"] == 0
    release.set()
    await rig.until(lambda: live.context["charged"])
    assert live.context["charged"] == 5 and live.current_state_ids == {"m.late"}
    assert told == [{"charged": 5}]


async def test_a_late_completion_after_the_end_is_dropped(rig: Rig) -> None:
    release = threading.Event()
    live = await rig.start(caller(20), logic(Late(release)))
    await rig.send(live, "GO")
    live.stop()
    release.set()
    await asyncio.sleep(0.03)
    assert live.context["charged"] == 0


async def test_a_raising_late_is_a_fault_and_no_more(rig: Rig) -> None:
    release = threading.Event()
    service = Late(release)
    service.late = lambda context, outcome: 1 / 0  # type: ignore[method-assign]
    live = await rig.start(caller(20), logic(service))
    await rig.send(live, "GO")
    release.set()
    await rig.until(lambda: live.faults)
    assert isinstance(live.faults[0], ZeroDivisionError) and live.status == "running"


async def test_an_async_late_completion_that_ignores_its_cancellation_is_charged() -> None:
    class Stubborn:
        __guardchart_form__ = 1
        is_async = True

        async def __call__(self, input: Any) -> int:
            try:
                await asyncio.sleep(30)
            except asyncio.CancelledError:
                pass
            return 5

        def late(self, context: Any, outcome: Any) -> dict[str, Any]:
            return {"charged": outcome}

    machine = create_machine(caller(20), logic(Stubborn()))
    sync = SyncInterpreter(machine, allow_async=True).start()
    await asyncio.to_thread(sync.send, "GO")
    live = Interpreter(machine).start()
    live.send("GO")
    deadline = time.monotonic() + 5
    while sync.context["charged"] != 5 or live.context["charged"] != 5:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)
    live.stop()
    sync.stop()


# Sending from services


async def test_a_service_streams_items_to_its_machine(rig: Rig) -> None:
    def svc(scope: Any, context: Any, event: Any) -> str:
        for n in range(3):
            scope.stream(n)
        scope.send("STREAM", data=3)
        return "end"

    live = await rig.start(caller(), logic(svc))
    await rig.send(live, "GO")
    assert live.context["items"] == [0, 1, 2, {"data": 3}] and live.context["got"] == "end"


async def test_a_long_stream_is_no_self_send_loop(rig: Rig) -> None:
    def svc(scope: Any, context: Any, event: Any) -> None:
        for n in range(300):
            scope.stream(n)
            if n % 20 == 0:
                time.sleep(0.001)

    live = await rig.start(caller(), logic(svc), max_queue=100)
    await rig.send(live, "GO")
    assert len(live.context["items"]) == 300 and live.faults == []


async def test_a_service_that_leaves_its_own_state_has_no_outcome(rig: Rig) -> None:
    actives: list[bool] = []

    def svc(scope: Any, context: Any, event: Any) -> str:
        scope.send("LEAVE")
        deadline = time.monotonic() + 5
        while scope.active and time.monotonic() < deadline:
            time.sleep(0.001)
        actives.append(scope.active)
        return "late"

    live = await rig.start(caller(), logic(svc))
    await rig.send(live, "GO")
    await rig.until(lambda: actives)
    assert live.current_state_ids == {"m.left"} and actives == [False]


async def test_the_service_of_a_state_left_in_the_same_macrostep_never_starts(rig: Rig) -> None:
    ran: list[int] = []
    chart = caller()
    chart["states"]["busy"]["always"] = "left"
    live = await rig.start(chart, logic(lambda input: ran.append(1)))
    await rig.send(live, "GO")
    assert live.current_state_ids == {"m.left"} and ran == []


async def test_a_service_without_a_place_in_the_logic_fails_and_strands_nothing(rig: Rig) -> None:
    machine = create_machine(caller(), logic(lambda input: 1))
    del machine.logic.services["svc"]  # type: ignore[union-attr]
    live = await rig.start(machine)
    await rig.send(live, "GO")
    assert live.current_state_ids == {"m.bad"}


# Interrupted


async def test_fail_interrupted_tells_the_machine_of_each_lost_service(rig: Rig) -> None:
    release = threading.Event()
    machine = create_machine(caller(60_000), logic(lambda input: release.wait(20)))
    first = Interpreter(machine).start()
    first.send("GO")
    data = first.dump()
    first.stop()
    release.set()
    assert data["children"]["job"]["status"] == "active"
    live = await rig.restore(data, machine)
    assert live.current_state_ids == {"m.busy"}
    live.fail_interrupted()
    assert live.current_state_ids == {"m.bad"}
    assert isinstance(live.context["got"], ServiceInterruptedError)
    live.fail_interrupted()


async def test_fail_interrupted_leaves_running_services_alone() -> None:
    clock = SimulatedClock()
    release = threading.Event()
    machine = create_machine(caller(60_000), logic(lambda input: release.wait(20)))
    live = Interpreter(machine, clock=clock).start()
    live.send("GO")
    live.fail_interrupted()
    assert live.current_state_ids == {"m.busy"}
    live.stop()
    release.set()


async def test_stop_frees_whoever_waits_for_a_hung_service(rig: Rig) -> None:
    release = threading.Event()
    live = await rig.start(caller(60_000), logic(lambda input: release.wait(20)))
    if rig.is_async:
        live.send("GO")
        asyncio.get_running_loop().call_later(0.03, live.stop)
        await asyncio.wait_for(live.settle(), 5)
    else:
        stopper = threading.Timer(0.03, live.stop)
        stopper.start()
        assert live.send("GO").status == "taken"
        stopper.join()
    assert live.status == "stopped" and live.dump()["status"] == "active"
    assert live.dump()["children"]["job"]["status"] == "active"
    release.set()


async def test_stop_runs_no_exit_actions(rig: Rig) -> None:
    ran: list[int] = []
    chart = caller()
    chart["states"]["idle"]["exit"] = "note"
    made = logic(lambda input: 1)
    made.actions["note"] = lambda c, e: ran.append(1)
    live = await rig.start(chart, made)
    live.stop()
    assert ran == [] and live.dump()["status"] == "active"


async def test_cancelling_whoever_waits_leaves_the_machine_usable() -> None:
    async def svc(input: Any) -> None:
        await asyncio.sleep(30)

    live = Interpreter(create_machine(caller(), logic(svc))).start()
    live.send("GO")
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(live.settle(), 0.02)
    assert (await live.send("LEAVE", wait=True)).status == "taken"
    await asyncio.wait_for(live.settle(), 1)
    live.stop()


async def test_a_service_may_stop_its_own_machine_and_finish() -> None:
    ended: list[int] = []

    async def svc(scope: Any, context: Any, event: Any) -> None:
        scope.interpreter.stop()
        await asyncio.sleep(0)
        ended.append(1)

    live = Interpreter(create_machine(caller(), logic(svc))).start()
    live.send("GO")
    await asyncio.sleep(0.01)
    assert ended == [1] and live.status == "stopped"


async def test_a_loop_that_is_gone_is_no_error_for_a_body_that_hung_on() -> None:
    release = threading.Event()
    ended = threading.Event()

    def svc(input: Any) -> None:
        release.wait(20)
        ended.set()

    def run() -> None:
        async def main() -> None:
            live = Interpreter(create_machine(caller(), logic(svc))).start()
            live.send("GO")
            live.stop()

        asyncio.run(main())

    await asyncio.to_thread(run)
    release.set()
    assert await asyncio.to_thread(ended.wait, 5)


# --- services that are there to find an event --------------------------------------------------


class Finder:
    """A service whose output is an event for its machine."""

    def __init__(self, event):
        self.event = event

    def __call__(self, input):
        return self.event

    def deliver(self, output):
        return output


class AsyncFinder(Finder):
    is_async = True

    async def __call__(self, input):
        return self.event


FOUND = {
    "id": "m",
    "initial": "a",
    "context": {"order": []},
    "states": {
        "a": {
            "invoke": {"src": "find", "onDone": {"actions": "done"}, "onError": "failed"},
            "on": {"STAY": {"actions": "stay"}, "LEAVE": "left"},
        },
        "left": {},
        "failed": {},
    },
}


def _found(event, cls):
    def note(name):
        return lambda context, event: {"order": [*context["order"], name]}

    actions = {"done": note("done"), "stay": note("stay")}
    return create_machine(FOUND, MachineLogic(actions, services={"find": cls(event)}))


@pytest.mark.parametrize(
    ("event", "order", "state"),
    [
        ("STAY", ["stay", "done"], "m.a"),
        ({"type": "LEAVE"}, [], "m.left"),
        ("NOBODY", ["done"], "m.a"),
        (7, [], "m.failed"),
        ("xstate.init", ["done"], "m.a"),
    ],
)
def test_an_event_that_a_service_delivers_is_taken_before_its_completion(event, order, state):
    light = SyncInterpreter(_found(event, Finder)).start()
    assert (light.context["order"], light.current_state_ids) == (order, {state})
    light.stop()

    async def main():
        running = await Interpreter(_found(event, AsyncFinder)).start()
        await running.idle()
        running.stop()
        return running

    running = asyncio.run(main())
    assert (running.context["order"], running.current_state_ids) == (order, {state})


def test_a_service_that_stands_in_the_chart_runs():
    child = create_machine(
        {"id": "k", "initial": "x", "states": {"x": {"type": "final", "output": 2}}}
    )
    for src, output in ((lambda input: 1, 1), (child, 2)):
        chart = {
            "id": "m",
            "initial": "a",
            "states": {
                "a": {
                    "invoke": {
                        "src": src,
                        "onDone": {
                            "target": "b",
                            "actions": lambda context, event: {"got": event.data},
                        },
                    }
                },
                "b": {},
            },
        }
        done = SyncInterpreter(create_machine(chart)).start()
        assert done.context["got"] == output
        done.stop()


def test_a_service_may_refuse_the_chart_that_invokes_it():
    class Picky:
        def __call__(self, input):
            return None

        def on_machine(self, machine, invoke):
            raise ChartError(f"not in {machine.id}", path=invoke.spec.path)

    with pytest.raises(ChartError, match=r"\$\.states\.a\.invoke: not in m"):
        create_machine(FOUND, MachineLogic(services={"find": Picky()}))


async def test_an_exception_for_the_host_is_no_failure_of_the_service(rig: Rig) -> None:
    class ForTheHost(Exception):
        pass

    def speak(given: Any) -> None:
        raise ForTheHost

    chart = {
        "id": "m",
        "initial": "busy",
        "states": {"busy": {"invoke": {"src": "speak", "onError": "failed"}}, "failed": {}},
    }
    logic = MachineLogic(services={"speak": speak})
    live = await rig.start(chart, logic, bubbles=(ForTheHost,))
    await rig.settle(live)
    assert isinstance(live.bubbled, ForTheHost)
    assert live.status == "stopped" and live.current_state_ids == {"m.busy"}
