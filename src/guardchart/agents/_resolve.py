"""From a decision request and an executor to exactly one event that the chart takes.

The rules are written once, as a generator that yields the calls to make; two drivers carry them
out, one that waits for awaitables and one that does not.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Generator, Mapping
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

from guardchart.agents._accepted import check_payload
from guardchart.agents._messages import safe_text
from guardchart.agents._requests import (
    AbortSignal,
    AgentDecisionExecutor,
    AgentDecisionRequest,
    AgentExecutorInfo,
    ChosenEvent,
    DecisionAttempt,
    DecisionFailure,
    Generated,
    as_generated,
    call_executor,
)
from guardchart.errors import (
    AbortedError,
    AgentConfigError,
    AgentError,
    DecisionExhaustedError,
    NotSupportedError,
)
from guardchart.gate._arguments import ArgumentsRefused, admit
from guardchart.kernel import Event

__all__ = [
    "Calls",
    "Later",
    "attempts",
    "judged",
    "resolve_decision",
    "resolve_decision_sync",
    "run_calls",
    "run_calls_sync",
]

T = TypeVar("T")

Calls = Generator[Callable[[], Any], Any, T]
"""Yields functions to call, is sent what each gave (awaited), returns its result."""

CanTake = Callable[[ChosenEvent], bool]

_MAX_TYPE: Final = 256
_MAX_REASON: Final = 500
_SHOWN: Final = 20


async def resolve_decision(
    request: AgentDecisionRequest,
    decide: AgentDecisionExecutor,
    *,
    max_retries: int | None = None,
    can_take: CanTake | None = None,
    signal: AbortSignal | None = None,
) -> ChosenEvent:
    """Have one of the request's events chosen, and ask again for what cannot be taken.

    Each answer is checked three times: its type is one of the candidates (else
    ``unknown-event``), its payload fits (else ``invalid-payload``), the chart takes it now (else
    ``rejected-by-guard``). What fails becomes a `DecisionAttempt`, and the next call sees all of
    them in ``request.attempts``; system, prompt and messages stay as they are.

    Args:
        request: The candidates and what is asked.
        decide: The executor, sync or async: ``{"event": {"type", **payload}, "reason"?}``, or a
            `Generated` of it. ``{"event": None}`` says that nothing was chosen.
        max_retries: How many further answers are asked for; the request's own, 2 unless its
            chart says otherwise, by default.
        can_take: Whether the chart takes an event now, guards included, e.g.
            ``lambda event: can(step.snapshot, event)``. None leaves guards unchecked.
        signal: Ends the decision once it is set: before the next call, and with an
            ``asyncio.Event`` during one.

    Returns:
        The event as ``{"type", **payload}`` in JSON types, defaults of its schema filled in.
        Nothing was sent: that is the caller's.

    Raises:
        DecisionExhaustedError: Every answer failed (see ``.attempts``), or the request has no
            candidate, in which case nobody was asked.
        AbortedError: The signal was set.
        AgentError: The executor returned no decision at all. What it raises passes through.

    Source: the design of statelyai/agent 2, resolveDecision.

    Example:
        >>> import asyncio
        >>> from guardchart.agents import AgentEventDescriptor, AgentDecisionRequest
        >>> go = AgentEventDescriptor(type="GO", tool_name="send_event_GO")
        >>> def decide(request):
        ...     return {"event": {"type": "GO" if request.attempts else "FLY"}}
        >>> asyncio.run(resolve_decision(AgentDecisionRequest(id="move", events=[go]), decide))
        {'type': 'GO'}
    """
    info = AgentExecutorInfo(signal=signal)
    calls = attempts(request, decide, info, max_retries=max_retries, can_take=can_take)
    return await run_calls(calls, signal)


def resolve_decision_sync(
    request: AgentDecisionRequest,
    decide: AgentDecisionExecutor,
    *,
    max_retries: int | None = None,
    can_take: CanTake | None = None,
    signal: AbortSignal | None = None,
) -> ChosenEvent:
    """`resolve_decision` for a synchronous executor, without an event loop.

    Args, Returns and Raises are those of `resolve_decision`; also:

    Raises:
        NotSupportedError: The executor is async; await `resolve_decision`.

    Example:
        >>> from guardchart.agents import AgentEventDescriptor, AgentDecisionRequest
        >>> go = AgentEventDescriptor(type="GO", tool_name="send_event_GO")
        >>> request = AgentDecisionRequest(id="move", events=[go])
        >>> resolve_decision_sync(request, lambda request: {"event": {"type": "GO"}})
        {'type': 'GO'}
    """
    info = AgentExecutorInfo(signal=signal)
    calls = attempts(request, decide, info, max_retries=max_retries, can_take=can_take)
    found = run_calls_sync(calls)
    if isinstance(found, Later):
        found.close()
        raise NotSupportedError("the decide executor is async; use 'await resolve_decision(...)'")
    return found


# The rules


def attempts(
    request: AgentDecisionRequest,
    decide: AgentDecisionExecutor,
    info: AgentExecutorInfo,
    *,
    max_retries: int | None = None,
    can_take: CanTake | None = None,
    before_call: Callable[[AgentDecisionRequest], None] | None = None,
    on_result: Callable[[AgentDecisionRequest, Generated], None] | None = None,
) -> Calls[ChosenEvent]:
    """The calls of a decision; see `resolve_decision`.

    Args:
        request: The request; its attempts, if any, are kept before new ones.
        decide: The executor.
        info: What it is handed beside the request.
        max_retries: As for `resolve_decision`.
        can_take: As for `resolve_decision`.
        before_call: Called before each call; what it raises ends the decision.
        on_result: Called with what each call gave.
    """
    retries = request.max_retries if max_retries is None else max_retries
    if type(retries) is not int or retries < 0:
        raise AgentConfigError("max_retries must be an int of at least 0")
    if not request.events:
        raise DecisionExhaustedError(())
    failed: list[DecisionAttempt] = []
    for _ in range(retries + 1):
        if info.signal is not None and info.signal.is_set():
            raise AbortedError("the signal was set before the decision was made")
        asked = request.with_attempts([*request.attempts, *failed]) if failed else request
        if before_call is not None:
            before_call(asked)
        result = _answer((yield partial(call_executor, decide, asked, info)))
        if on_result is not None:
            on_result(asked, result)
        found = judged(request, result.output, can_take)
        if not isinstance(found, DecisionAttempt):
            return found
        failed.append(found)
    raise DecisionExhaustedError(failed)


def _answer(result: Any) -> Generated:
    """What ``decide`` returned; a dict with an event is an answer, whatever else is in it."""
    if type(result) is dict and "event" in result:
        return Generated(result, usage=result.get("usage"), raw=result)
    return as_generated(result)


def judged(
    request: AgentDecisionRequest, answer: Any, can_take: CanTake | None
) -> ChosenEvent | DecisionAttempt:
    """The event of an answer, or why it cannot be taken."""
    event, reason = _read(answer)
    if event is None:
        return _failed("unknown-event", reason or "no event was chosen")
    event_type = event["type"]
    descriptor = next((each for each in request.events if each.type == event_type), None)
    if descriptor is None:
        names = [each.type for each in request.events]
        shown = ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
        return _failed("unknown-event", f"not an event to choose here; choose from: {shown}", event)
    try:
        chosen = check_payload(descriptor, event)
    except ArgumentsRefused as refused:
        return _failed("invalid-payload", f"the payload does not fit ({refused})", event)
    if can_take is not None and can_take(dict(chosen)) is False:
        return _failed("rejected-by-guard", "the chart does not take this event now", chosen)
    return chosen


def _read(answer: Any) -> tuple[dict[str, Any] | None, str | None]:
    """The event of an executor's answer as a flat dict, and the reason given beside it."""
    if not isinstance(answer, Mapping) or "event" not in answer:
        raise AgentError("the decide executor returned no {'event': {'type': ...}}")
    event, reason = answer["event"], answer.get("reason")
    text = safe_text(reason)[:_MAX_REASON] if isinstance(reason, str) else None
    if event is None:
        return None, text
    if isinstance(event, Event):
        event = {**event.payload, "type": event.type}
    if not isinstance(event, Mapping) or not isinstance(event.get("type"), str):
        raise AgentError("the decide executor returned an event without a type")
    return dict(event), text


def _failed(
    failure: DecisionFailure, reason: str, event: Mapping[str, Any] | None = None
) -> DecisionAttempt:
    return DecisionAttempt(
        event=None if event is None else _kept(event), failure=failure, reason=reason
    )


def _kept(event: Mapping[str, Any]) -> ChosenEvent:
    """What was chosen, as far as a log can keep it."""
    kept = {"type": safe_text(event["type"])[:_MAX_TYPE]}
    payload = {key: value for key, value in event.items() if key != "type"}
    try:
        admit(payload)
    except ArgumentsRefused:
        return kept
    return {**kept, **payload}


# Drivers


class _Ended(NamedTuple):
    """What a generator returned."""

    value: Any


class Later:
    """What is left of calls after one gave an awaitable; to be awaited or closed."""

    def __init__(self, calls: Calls[Any], given: Any) -> None:
        self._calls = calls
        self._given = given

    def __await__(self) -> Generator[Any, None, Any]:
        return _go_on(self._calls, partial(_same, self._given), None).__await__()

    def close(self) -> None:
        """Give up: nothing is awaited."""
        self._calls.close()
        close = getattr(self._given, "close", None)
        if close is not None:
            close()


def run_calls_sync(calls: Calls[T]) -> T | Later:
    """Make the calls here and now.

    Returns:
        The result. Where a call gave an awaitable, what goes on from there once awaited.
    """
    step = _next(calls, None)
    while not isinstance(step, _Ended):
        given = step()
        if inspect.isawaitable(given):
            return Later(calls, given)
        step = _next(calls, given)
    return step.value  # type: ignore[no-any-return]


async def run_calls(calls: Calls[T], signal: AbortSignal | None = None) -> T:
    """Make the calls, awaiting what has to be; an ``asyncio.Event`` ends the wait."""
    return await _go_on(calls, _next(calls, None), signal)


async def _go_on(
    calls: Calls[T], step: Callable[[], Any] | _Ended, signal: AbortSignal | None
) -> T:
    while not isinstance(step, _Ended):
        given = step()
        if inspect.isawaitable(given):
            given = await _unless(signal, given)
        step = _next(calls, given)
    return step.value  # type: ignore[no-any-return]


def _same(value: Any) -> Any:
    return value


def _next(calls: Calls[Any], given: Any) -> Callable[[], Any] | _Ended:
    """The next call to make, or the end."""
    try:
        return calls.send(given)
    except StopIteration as end:
        return _Ended(end.value)


async def _unless(signal: AbortSignal | None, awaitable: Awaitable[Any]) -> Any:
    """Await, but no longer than until an ``asyncio.Event`` is set."""
    if not isinstance(signal, asyncio.Event):
        return await awaitable
    asked = asyncio.ensure_future(awaitable)
    aborted = asyncio.ensure_future(signal.wait())
    # Whatever a call that nobody waits for any more comes to is of no interest.
    asked.add_done_callback(lambda task: task.cancelled() or task.exception())
    try:
        await asyncio.wait((asked, aborted), return_when=asyncio.FIRST_COMPLETED)
        if asked.done():
            return asked.result()
        raise AbortedError("the signal was set while the model was asked")
    finally:
        asked.cancel()
        aborted.cancel()
