"""``run_agent``: start or resume a machine, run it until it rests, say how it went."""

from __future__ import annotations

import asyncio
import concurrent.futures
import math
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from guardchart.agents._approval import answers
from guardchart.agents._budgets import Budget
from guardchart.agents._charts import TOOL_LOOP, WAITING_STATES, validate_agent_chart
from guardchart.agents._control import RunControl, restarts
from guardchart.agents._durable import Durable, aopen_run, open_run
from guardchart.agents._execute import Executed
from guardchart.agents._loop import agent_logic
from guardchart.agents._requests import (
    AbortSignal,
    AgentDecisionExecutor,
    AgentRequestExecutor,
    AgentRequestExecutors,
    AgentUserInputExecutor,
)
from guardchart.agents._result import AgentResult, result_of
from guardchart.errors import AgentConfigError, NotSupportedError
from guardchart.kernel import Event, Machine, Snapshot, as_event, initial_step, load
from guardchart.persistence import Store
from guardchart.runtime import (
    Clock,
    Interpreter,
    MachineLogic,
    SyncInterpreter,
    create_machine,
    is_async_service,
)
from guardchart.runtime._workers import WORKERS

__all__ = ["run_agent", "run_agent_sync"]

_SHORTCUTS: Final = ("max_turns", "max_usd", "max_tokens")
SERVED_S: Final = 30.0


@dataclass(frozen=True)
class _Plan:
    """A run's machine and what opens it, worked out before anything starts."""

    machine: Machine
    prompt: str | None
    event: Any
    approve: Any
    until: tuple[str, ...]

    def opening(self, interpreter: Any) -> list[Event]:
        """The events to send, given where the machine stands."""
        if self.event is not None:
            return [as_event(self.event)]
        if self.approve is not None:
            return answers(interpreter, self.approve)
        if self.prompt is not None and "idle" in self.machine.states:
            return [Event("START", {"prompt": self.prompt})]
        return []

    def resumed(self, snapshot: Any, trusted: bool) -> Snapshot | None:
        """The snapshot to go on from; of a finished conversation given a prompt, its next turn."""
        if snapshot is None:
            return None
        if isinstance(snapshot, Snapshot):
            loaded: Snapshot = snapshot
        else:
            data = snapshot if isinstance(snapshot, str) else dict(snapshot)
            loaded = load(self.machine, data, trusted=trusted)
        settings = getattr(self.machine.logic, "attachments", {}).get("agent")
        event = self.event
        if event is None and self.prompt is not None and self.approve is None:
            event = "START"
        if settings is None or event is None:
            return loaded
        return settings.next_turn(self.machine, loaded, event) or loaded


def _plan(
    machine_or_chart: Any,
    logic: MachineLogic | None,
    model: Any,
    tools: Any,
    prompt: str | None,
    event: Any,
    approve: Any,
    until: Sequence[str],
    options: dict[str, Any],
    control: RunControl,
    services: Mapping[str, Any] | None,
) -> _Plan:
    chart = machine_or_chart
    if chart is not None and not isinstance(chart, Machine | Mapping | str | Path):
        if model is not None:
            raise AgentConfigError("run_agent: pass the model once, first or as model=")
        chart, model = None, chart
    shortcuts = {key: options.pop(key) for key in _SHORTCUTS if key in options}
    if shortcuts:
        if options.get("budgets") is not None:
            raise AgentConfigError("run_agent: pass budgets= or max_turns=/max_usd=/max_tokens=")
        options["budgets"] = Budget(**shortcuts)
    if isinstance(chart, Machine):
        if logic is not None or model is not None or tools is not None or options:
            raise AgentConfigError(
                "run_agent: a built machine already carries its logic; pass the chart with "
                "logic= or model=, or the machine alone"
            )
        machine = chart
    else:
        if logic is None:
            if model is not None:
                logic = agent_logic(model, tools, **options)
            elif chart is not None and (services or control.serves) and not (tools or options):
                logic = MachineLogic()
            else:
                raise AgentConfigError("run_agent: pass a machine, a logic, or a model")
        elif model is not None or tools is not None or options:
            raise AgentConfigError("run_agent: pass logic= or model= and its options, not both")
        machine = create_machine(chart if chart is not None else TOOL_LOOP, logic)
    machine = control.bound(machine, services)
    if machine.logic is not None and machine.logic.attachments.get("registry") is not None:
        validate_agent_chart(machine)
    if prompt is not None and not isinstance(prompt, str):
        raise AgentConfigError("run_agent: prompt must be a str")
    if event is not None and approve is not None:
        raise AgentConfigError("run_agent: pass event= or approve=, not both")
    return _Plan(machine, prompt, event, approve, tuple(until))


def _needs_loop() -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise NotSupportedError(
        "run_agent_sync would block the running event loop; use 'await run_agent(...)'"
    )


def _needs_sync(machine: Machine) -> None:
    for name, service in getattr(machine.logic, "services", {}).items():
        if isinstance(service, Machine):
            _needs_sync(service)
        elif is_async_service(service):
            raise NotSupportedError(
                f"run_agent_sync: service {name!r} is async; use 'await run_agent(...)', or a "
                "sync model (a plain function, FakeModel(..., is_async=False))"
            )


async def run_agent(
    machine_or_chart: Any = None,
    logic: MachineLogic | None = None,
    *,
    model: Any = None,
    tools: Any = None,
    prompt: str | None = None,
    event: Any = None,
    snapshot: Mapping[str, Any] | str | None = None,
    store: Store | None = None,
    key: str | None = None,
    until: Sequence[str] = ("done", "error"),
    clock: Clock | None = None,
    plugins: Iterable[Any] = (),
    timeout_s: float | None = None,
    approve: bool | Sequence[Mapping[str, Any]] | None = None,
    input: Any = None,
    ledger: Any = None,
    serve_delay_s: float | None = None,
    trusted: bool = False,
    services: Mapping[str, Any] | None = None,
    generate_text: AgentRequestExecutor | None = None,
    stream_text: AgentRequestExecutor | None = None,
    decide: AgentDecisionExecutor | None = None,
    user_input: AgentUserInputExecutor | None = None,
    on_chunk: Callable[[str, Any], Any] | None = None,
    on_result: Callable[[Any, Executed], Any] | None = None,
    on_transition: Callable[[Snapshot, Event], Any] | None = None,
    max_model_calls: int = 100,
    signal: AbortSignal | None = None,
    **agent_logic_kw: Any,
) -> AgentResult[Any]:
    """Run a machine until it ends or rests (a person is asked), and say how it went.

    Args:
        machine_or_chart: A built machine, a chart, or the model itself; TOOL_LOOP by default.
        logic: The chart's logic, instead of ``model=``.
        model: A ``ModelCall``; with ``tools`` and the options of ``agent_logic`` it makes the
            logic.
        tools: The tool registry.
        prompt: The task. A machine without an ``idle`` state ignores it.
        event: An event to send instead.
        snapshot: Snapshot JSON to resume from, e.g. ``result.snapshot``. Requests to models
            that were under way are made again; other services that were running are told that
            they were interrupted.
        store: Where the run is kept, under ``key``. If it is there already it goes on from
            there: overdue deadlines fire, services that were running start again. Each step is
            written before what it asks for begins.
        key: The scope tool calls are filed under, e.g. a ticket's number; the run by default.
        until: Keys of states to stop in, beside final ones.
        clock: Where the time comes from.
        plugins: Observers.
        timeout_s: Seconds the whole run may take.
        approve: True approves whatever is pending now, a ``pending_approval`` list exactly
            what it shows (digests are sent), False rejects.
        input: The machine's input.
        ledger: Where approvals and claims are kept, instead of the logic's own. With a store
            and none of either, the store's.
        serve_delay_s: The longest delay that is waited for, in seconds; a longer one settles
            ``idle`` with its deadline in the snapshot. 30 with a store, which has somebody to
            serve it; without one every delay is waited for.
        trusted: Your word that ``snapshot`` comes from nobody but you. Spawned agents and
            delayed sends load from such a one only, and what ran is started again.
        services: Services by name, beside those of the logic and before them.
        generate_text: Executor of text requests: ``(request)`` or ``(request, info)``, sync or
            async.
        stream_text: Executor of text requests that stream.
        decide: Executor of decisions.
        user_input: Answers ``agent.user_input``.
        on_chunk: Called with each piece of a streamed answer and its request.
        on_result: Called with each request and what came of it, ``(output, raw)``.
        on_transition: Called with the root machine's snapshot and the event that led to it.
            The three only look on; what one raises ends the run and is raised here.
        max_model_calls: The most model calls of the run, attempts of decisions and child
            machines included. One more is not made and settles the run, whatever the chart says
            about errors.
        signal: An ``asyncio.Event``, or anything with ``is_set()``, that aborts the run.
        **agent_logic_kw: Options of ``agent_logic``, and ``max_turns``, ``max_usd``,
            ``max_tokens``.

    Returns:
        An `AgentResult`; a failed model or tool is told there, not raised.

    Raises:
        AgentConfigError, ChartError: The wiring is wrong, an executor is missing; nothing ran.
        SnapshotError: ``snapshot`` is not a legal snapshot of this machine.
        TimeoutError: ``timeout_s`` ran out; the interpreter was stopped, and a store has the
            last snapshot.
        StoreConflictError: Somebody else has written this run meanwhile. What was to be done
            may be done already: call again and look.
        SnapshotTooLargeError: A snapshot is larger than the store takes. At the first write
            nothing is stored; later the snapshot before it stays.

    Source: xstate-statemachine, agents reference: run_agent; @statelyai/agent, runAgent.

    Example:
        >>> import asyncio
        >>> from guardchart.agents import FakeModel, run_agent
        >>> asyncio.run(run_agent(FakeModel([{"text": "hi"}]), prompt="hello")).output
        'hi'
    """
    control = RunControl(
        AgentRequestExecutors(generate_text, stream_text, decide, user_input),
        max_model_calls=max_model_calls,
        signal=signal,
        on_chunk=on_chunk,
        on_result=on_result,
        on_transition=on_transition,
    )
    plan = _plan(
        machine_or_chart,
        logic,
        model,
        tools,
        prompt,
        event,
        approve,
        until,
        agent_logic_kw,
        control,
        services,
    )
    kept = await aopen_run(store, key, snapshot, trusted, plan.machine, ledger)
    resumed = plan.resumed(kept.snapshot(plan.machine), trusted)
    options = {"clock": clock, "plugins": plugins, "scope": key, "ledger": ledger, "input": input}
    interpreter = _made(Interpreter, plan, kept, resumed, control, options)
    if control.aborted():
        result = _aborted(interpreter, plan, control, input)
        await kept.leave(interpreter)
        return result
    watching = control.watch()
    try:
        result = await asyncio.wait_for(
            _drive(interpreter, plan, resumed, _served(serve_delay_s, store), control), timeout_s
        )
    finally:
        if watching is not None:
            watching.cancel()
        await kept.leave(interpreter)
    control.reraise()
    kept.check()
    return result


def _served(serve_delay_s: float | None, store: Any) -> float:
    if serve_delay_s is not None:
        return serve_delay_s
    return math.inf if store is None else SERVED_S


def _made(
    engine: Any,
    plan: _Plan,
    kept: Durable,
    resumed: Snapshot | None,
    control: RunControl,
    options: dict[str, Any],
) -> Any:
    """The interpreter of a run, not started."""
    options = {**options, **control.options()}
    options["plugins"] = (*options["plugins"], *control.plugins())
    interpreter = kept.interpreter(engine, plan.machine, resumed, **options)
    control.attach(interpreter)
    return interpreter


async def _drive(
    interpreter: Interpreter,
    plan: _Plan,
    resumed: Snapshot | None,
    serve_delay_s: float,
    control: RunControl,
) -> AgentResult[Any]:
    interpreter.mixed = True
    await interpreter.start()
    if resumed is not None:
        asked: list[Any] = []
        interpreter.fail_interrupted(_asked_again(asked))
        interpreter.fire_overdue()
        # What is asked again may take long; an event need not wait for it.
        if not asked:
            await interpreter.idle()
    ignored = None
    for event in plan.opening(interpreter):
        receipt = await interpreter.send(event, wait=True)
        if receipt is not None and receipt.status != "taken":
            ignored = ignored or event
    await interpreter.settle(serve_delay_s, waiting=WAITING_STATES, until=plan.until)
    return result_of(interpreter, ignored, control)


def _asked_again(asked: list[Any]) -> Callable[[Any], bool]:
    def again(service: Any) -> bool:
        if restarts(service):
            asked.append(service)
            return True
        return False

    return again


def _aborted(interpreter: Any, plan: _Plan, control: RunControl, input: Any) -> AgentResult[Any]:
    """The result of a run whose signal was set before it began: nothing was started."""
    if interpreter._snapshot is None:
        now = interpreter.clock.now_ms()
        snapshot, _, _ = initial_step(plan.machine, input, now=now, host=interpreter)
        interpreter._snapshot = snapshot.replace(run=uuid.uuid4().hex)
    control.halt("aborted")
    return result_of(interpreter, None, control)


def run_agent_sync(
    machine_or_chart: Any = None,
    logic: MachineLogic | None = None,
    *,
    model: Any = None,
    tools: Any = None,
    prompt: str | None = None,
    event: Any = None,
    snapshot: Mapping[str, Any] | str | None = None,
    store: Store | None = None,
    key: str | None = None,
    until: Sequence[str] = ("done", "error"),
    clock: Clock | None = None,
    plugins: Iterable[Any] = (),
    timeout_s: float | None = None,
    approve: bool | Sequence[Mapping[str, Any]] | None = None,
    input: Any = None,
    ledger: Any = None,
    serve_delay_s: float | None = None,
    trusted: bool = False,
    services: Mapping[str, Any] | None = None,
    generate_text: AgentRequestExecutor | None = None,
    stream_text: AgentRequestExecutor | None = None,
    decide: AgentDecisionExecutor | None = None,
    user_input: AgentUserInputExecutor | None = None,
    on_chunk: Callable[[str, Any], Any] | None = None,
    on_result: Callable[[Any, Executed], Any] | None = None,
    on_transition: Callable[[Snapshot, Event], Any] | None = None,
    max_model_calls: int = 100,
    signal: AbortSignal | None = None,
    **agent_logic_kw: Any,
) -> AgentResult[Any]:
    """`run_agent` for a synchronous model, without an event loop.

    Args, Returns and Raises are those of `run_agent`; also:

    Raises:
        NotSupportedError: An event loop is running (use ``await run_agent(...)``), or the
            model is async.

    Example:
        >>> from guardchart.agents import FakeModel, run_agent_sync
        >>> model = FakeModel([{"text": "hi"}], is_async=False)
        >>> run_agent_sync(model, prompt="hello").final_state
        'toolLoop.done'
    """
    _needs_loop()
    control = RunControl(
        AgentRequestExecutors(generate_text, stream_text, decide, user_input),
        max_model_calls=max_model_calls,
        signal=signal,
        on_chunk=on_chunk,
        on_result=on_result,
        on_transition=on_transition,
    )
    plan = _plan(
        machine_or_chart,
        logic,
        model,
        tools,
        prompt,
        event,
        approve,
        until,
        agent_logic_kw,
        control,
        services,
    )
    _needs_sync(plan.machine)
    kept = open_run(store, key, snapshot, trusted, plan.machine, ledger)
    resumed = plan.resumed(kept.snapshot(plan.machine), trusted)
    options = {"clock": clock, "plugins": plugins, "scope": key, "ledger": ledger, "input": input}
    interpreter = _made(SyncInterpreter, plan, kept, resumed, control, options)
    interpreter.manual_timers = True
    if control.aborted():
        return _aborted(interpreter, plan, control, input)
    drive = (interpreter, plan, kept, resumed, _served(serve_delay_s, store), control)
    control.watch_in_thread()
    try:
        if timeout_s is None:
            result = _drive_sync(*drive)
        else:
            future = WORKERS.submit(_drive_sync, *drive)
            try:
                result = future.result(timeout_s)
            except concurrent.futures.TimeoutError:
                if future.done():
                    raise
                raise TimeoutError(f"the run took longer than {timeout_s:g} s") from None
    finally:
        control.ended()
        interpreter.stop()
    control.reraise()
    kept.check()
    return result


def _drive_sync(
    interpreter: SyncInterpreter,
    plan: _Plan,
    kept: Durable,
    resumed: Snapshot | None,
    serve_delay_s: float,
    control: RunControl,
) -> AgentResult[Any]:
    try:
        interpreter.start()
        if resumed is not None:
            interpreter.fail_interrupted(restarts)
            interpreter.fire_overdue()
        ignored = None
        for event in plan.opening(interpreter):
            if interpreter.send(event).status != "taken":
                ignored = ignored or event
        interpreter.settle(serve_delay_s, waiting=WAITING_STATES, until=plan.until)
        return result_of(interpreter, ignored, control)
    finally:
        kept.write()
