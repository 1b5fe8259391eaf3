"""The step path: an agent as snapshots, requests and results, for hosts that keep each step.

A step is pure but for ``before_step`` (which asks the ledger) and for `execute_agent_request`.
Whoever wants to run an agent under an engine of his own performs the requests of a step, brings
each result to `resolve_agent_step`, and keeps the step's ``entry``.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from typing import Any, Final

from guardchart.agents._recorded import dump_failure, plain
from guardchart.agents._requests import AgentRequest
from guardchart.agents._sources import with_sources
from guardchart.agents._step import AgentStep, From, Given, Origin, requests_of, step_once
from guardchart.agents._stepper import AgentAction, FixedClock
from guardchart.errors import AgentError, StepError
from guardchart.kernel import EngineEvent, Event, Machine, as_event, fired

__all__ = [
    "AgentStep",
    "get_agent_requests",
    "initial_agent_step",
    "resolve_agent_step",
    "transition_agent_step",
]

_UNSET: Final[Any] = object()


def initial_agent_step(
    machine: Machine,
    input: Any = None,
    *,
    run: str | None = None,
    now: float | None = None,
    ledger: Any = None,
    scope: str | None = None,
    plugins: Iterable[Any] | None = None,
) -> AgentStep:
    """Start an agent.

    Args:
        machine: A machine whose logic is complete.
        input: The machine's input.
        run: The nonce of this run, by which its tool calls are filed; a new one by default. An
            engine that replays its code passes its own run's id.
        now: The time, epoch milliseconds; the wall clock by default.
        ledger: Where approvals and claims are kept, instead of the logic's own. Later steps
            and requests go on with it.
        scope: The thread id or store key that tool calls are filed under; the run by default.
        plugins: Observers of this and later steps. What one writes by ``update_context`` is part
            of the step's entry.

    Returns:
        The first step.

    Raises:
        ChartError: The machine's logic misses names.
        StepError: The first macrostep does not come to rest.

    Source: @statelyai/agent, initialAgentStep.

    Example:
        >>> from guardchart import create_machine
        >>> door = create_machine({"id": "door", "initial": "shut", "states": {"shut": {}}})
        >>> sorted(initial_agent_step(door).snapshot.state_ids)
        ['door.shut']
    """
    nonce = run if run is not None else uuid.uuid4().hex
    record = {"kind": "init", "event": {"type": "xstate.init", "input": input}, "run": nonce}
    return step_once(machine, None, record, Given(now, ledger, scope, True, plugins))


def transition_agent_step(
    machine: Machine,
    step: From,
    event: AgentAction | EngineEvent | Event | Mapping[str, Any] | str,
    *,
    agent: str | None = None,
    now: float | None = None,
    ledger: Any = None,
    scope: str | None = None,
    trusted: bool | None = None,
    plugins: Iterable[Any] | None = None,
) -> AgentStep:
    """Take one event from outside, or a timer that is due.

    A person's decision arrives here, and is taken in the ledger first. What a model chose does
    not: hand it to `resolve_agent_step`, so that it never counts as a person's word. A ``START``
    on a conversation that has ended begins its next turn.

    Args:
        machine: The machine.
        step: The previous step, or a snapshot.
        event: The event, or a timer of ``step.timers``.
        agent: The actor path of the child machine that gets the event; the root by default.
        now: The time, epoch milliseconds; the wall clock by default.
        ledger: As for `initial_agent_step`; the previous step's by default.
        scope: As for `initial_agent_step`; the previous step's by default.
        trusted: Whether a snapshot is your own, so that what its child machines have in store
            (delayed sends, spawned actors) is taken up; True after a step, else False.
        plugins: As for `initial_agent_step`; the previous step's by default.

    Returns:
        The next step; ``receipt`` says what became of the event. A denied one leaves the
        snapshot as it was.

    Raises:
        SnapshotError: ``step`` is no legal snapshot of this machine.
        StepError: This is no event, or there is no such agent; the snapshot is unchanged.

    Source: @statelyai/agent, transitionAgentStep.

    Example:
        >>> from guardchart import create_machine
        >>> door = create_machine({"id": "door", "initial": "shut", "states": {
        ...     "shut": {"on": {"OPEN": "open"}}, "open": {}}})
        >>> step = transition_agent_step(door, initial_agent_step(door), "OPEN")
        >>> sorted(step.snapshot.state_ids), step.receipt.status
        (['door.open'], 'taken')
    """
    return step_once(
        machine,
        step,
        _event_record(machine, event, agent),
        Given(now, ledger, scope, trusted, plugins),
    )


def resolve_agent_step(
    machine: Machine,
    step: From,
    request: AgentRequest | AgentAction | str,
    output: Any = _UNSET,
    *,
    error: BaseException | Mapping[str, Any] | None = None,
    raw: Any = None,
    now: float | None = None,
    ledger: Any = None,
    scope: str | None = None,
    trusted: bool | None = None,
    plugins: Iterable[Any] | None = None,
) -> AgentStep:
    """Bring the result of a request.

    The result of a text request completes its service; a decision's event is sent to the machine
    that asked; the results of tool calls are gathered until their turn is complete. A result
    that nobody waits for any more changes nothing but what was spent.

    Args:
        machine: The machine.
        step: The step as it is now, which need not be the one that made the request.
        request: The request, its id, or the ``start`` action of another service.
        output: What `execute_agent_request` returned; JSON types.
        error: What it raised instead, or the JSON that `dump_failure` made of it.
        raw: The executor's raw result, for the log.
        now: The time, epoch milliseconds; the wall clock by default.
        ledger: As for `initial_agent_step`; the previous step's by default.
        scope: As for `initial_agent_step`; the previous step's by default.
        trusted: As for `transition_agent_step`.
        plugins: As for `initial_agent_step`; the previous step's by default.

    Returns:
        The next step.

    Raises:
        AgentError: ``output`` is not JSON, or no result of such a request; nothing changed.
        SnapshotError: ``step`` is no legal snapshot of this machine.

    Source: @statelyai/agent, resolveAgentStep.

    Example:
        >>> from guardchart import create_machine
        >>> from guardchart.agents import TOOL_LOOP, FakeModel, agent_logic
        >>> machine = create_machine(TOOL_LOOP, agent_logic(FakeModel([]), []))
        >>> step = initial_agent_step(machine, {"task": "say hi"})
        >>> step = resolve_agent_step(machine, step, step.requests[0], {"text": "hi"})
        >>> step.done, step.snapshot.context["result"]
        (True, 'hi')
    """
    ident = request if isinstance(request, str) else request.id
    record: dict[str, Any] = {"request": ident, "raw": raw}
    if error is not None:
        if output is not _UNSET:
            raise AgentError("resolve_agent_step: pass output or error=, not both")
        told = dump_failure(error) if isinstance(error, BaseException) else dict(error)
        record |= {"kind": "failure", "event": {"type": "xstate.error.actor", "error": told}}
    else:
        value = plain(None if output is _UNSET else output, "the result of a request")
        record |= {"kind": "result", "event": {"type": "xstate.done.actor", "output": value}}
    return step_once(machine, step, record, Given(now, ledger, scope, trusted, plugins))


def get_agent_requests(
    machine: Machine,
    step: From,
    *,
    ledger: Any = None,
    scope: str | None = None,
    trusted: bool | None = None,
) -> tuple[AgentRequest, ...]:
    """What a snapshot waits for: what is to be executed now, side by side.

    Args:
        machine: The machine.
        step: A step, or a snapshot, for instance one that was just loaded.
        ledger: As for `initial_agent_step`.
        scope: As for `initial_agent_step`.
        trusted: As for `transition_agent_step`.

    Returns:
        The requests, the same as the step's that left the snapshot.

    Raises:
        SnapshotError: ``step`` is no legal snapshot of this machine.

    Source: @statelyai/agent, getAgentRequests.

    Example:
        >>> from guardchart import create_machine
        >>> door = create_machine({"id": "door", "initial": "shut", "states": {"shut": {}}})
        >>> get_agent_requests(door, initial_agent_step(door))
        ()
    """
    machine = with_sources(machine)
    given = Given(None, ledger, scope, trusted).after(machine, step)
    assert given.snapshot is not None
    origin = Origin(machine, given.snapshot, given.scope, given.ledger, given.trusted is True)
    return requests_of(origin.opened(FixedClock(0.0)), origin)


def _event_record(machine: Machine, event: Any, agent: str | None) -> dict[str, Any]:
    if isinstance(event, AgentAction):
        if event.kind != "timer":
            raise StepError("only a timer among a step's actions is an event")
        event, agent = fired(event.id), event.agent
    record: dict[str, Any]
    if isinstance(event, EngineEvent):
        if event.kind != "fired":
            raise StepError("bring the result of a service by resolve_agent_step")
        record = {"kind": "timer", "event": {"type": "xstate.after"}, "timer": event.key}
    else:
        made = as_event(event)
        record = {"kind": "event", "event": {**made.payload, "type": made.type}}
        if "type" in made.payload:
            record["payload"] = made.payload
    if agent is not None and agent != machine.id:
        record["agent"] = agent
    return record
