"""One run of a guarded agent: its turns, its calls, and what the chart is told of them."""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import hashlib
import itertools
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NoReturn

from opentelemetry import trace
from pydantic_ai.exceptions import ApprovalRequired, ToolFailed, UnexpectedModelBehavior
from pydantic_ai.messages import (
    ModelMessage,
    ModelRequest,
    ModelResponse,
    ToolCallPart,
    ToolReturn,
    ToolReturnPart,
)

from guardchart.errors import LedgerError, ToolDeniedError
from guardchart.gate import (
    NEEDS_APPROVAL,
    NOT_ALLOWED,
    AuthorisedCall,
    GuardSession,
    Outcome,
    ToolCall,
    answer_from_row,
    close_open,
)
from guardchart.gate._answers import IN_DOUBT
from guardchart.gate._arguments import ArgumentsRefused
from guardchart.kernel import Event
from guardchart.persistence import Decision
from guardchart.pydantic_ai._calls import (
    CONTROL,
    Fate,
    Tools,
    control_of,
    guard_metadata,
    raise_control,
)

__all__ = ["GuardRun", "Within", "last_response", "open_ids"]

NOT_OUTPUT: Final = "not run: the conversation ended with an answer before it was decided"


@dataclasses.dataclass(frozen=True, slots=True)
class Within:
    """The guarded call in whose body we are."""

    run: GuardRun
    call: ToolCall
    row_id: str | None
    count: Iterator[int]


_WITHIN: contextvars.ContextVar[tuple[Within, ...]] = contextvars.ContextVar(
    "guardchart_within", default=()
)


def last_response(messages: Sequence[ModelMessage]) -> tuple[int, ModelResponse | None]:
    """Return the last answer of a model in a conversation, and its place."""
    for at in range(len(messages) - 1, -1, -1):
        message = messages[at]
        if isinstance(message, ModelResponse):
            return at, message
    return -1, None


def open_ids(messages: Sequence[ModelMessage]) -> set[str]:
    """Return the ids of calls of the last answer that have no result yet."""
    at, response = last_response(messages)
    if response is None:
        return set()
    answered = {
        part.tool_call_id
        for message in messages[at + 1 :]
        if isinstance(message, ModelRequest)
        for part in message.parts
        if isinstance(part, ToolReturnPart)
    }
    return {call.tool_call_id for call in response.tool_calls} - answered


class GuardRun:
    """What a `StatechartGuard` keeps for one run of its agent.

    Attributes:
        durable: whether an engine replays the run.
        asked: whether the model was asked in this run, so that its calls are fresh.
        forget: refused names that cost no retry.
        light: tools that change nothing and move nothing: neither filed nor held nor claimed.

    Args:
        session: the gate of this conversation.
        tools: the tools of the run, filled step by step.
        on_denied: what a refused call does: ``fail_call`` or ``fail_run``.
        max_denied: how many refused calls a run survives.
        dropped: rows whose bodies were cancelled in this process, shared by all runs.
    """

    def __init__(
        self,
        session: GuardSession,
        tools: Tools,
        *,
        on_denied: str,
        max_denied: int,
        dropped: set[tuple[str, str]],
    ) -> None:
        self.session = session
        self.tools = tools
        self.durable = False
        self.asked = False
        self.forget: set[str] = set()
        self.light: frozenset[str] = frozenset()
        nodes = session.machine.nodes.values()
        self.instructs = any("instructions" in (node.meta or {}) for node in nodes)
        self._on_denied = on_denied
        self._max_denied = max_denied
        self._dropped = dropped
        self._denied = 0
        self._told: set[str] = set()
        self._opened: Any = None
        self._response: ModelResponse | None = None
        self._at = -1
        self._ids: frozenset[str] = frozenset()
        self._bodies: dict[str, Callable[[], Awaitable[Fate]]] = {}
        self._tickets = itertools.count()

    # Turns

    def open(self, messages: Sequence[ModelMessage], skip: Callable[[str], bool]) -> None:
        """Take the last answer as the open turn, once.

        Args:
            messages: the conversation so far.
            skip: tells the names that are none of the gate's: output tools, and pydantic-ai's
                own.
        """
        at, response = last_response(messages)
        if response is None or (response is self._response and at == self._at):
            return
        self._response, self._at = response, at
        parts = response.tool_calls
        key = (at, tuple(part.tool_call_id for part in parts))
        if key == self._opened:
            return
        self._opened = key
        self._told = set()
        before = [m for m in messages[:at] if isinstance(m, ModelResponse) and m.tool_calls]
        spent = [part.tool_call_id for message in before for part in message.tool_calls]
        nonce = "" if self.durable else (self.session.snapshot.run or "")
        digest = hashlib.sha256("\x00".join([nonce, *spent]).encode("utf-8", "surrogatepass"))
        calls = [
            ToolCall(part.tool_call_id, part.tool_name)
            for part in parts
            if not skip(part.tool_name)
        ]
        self._ids = frozenset(call.id for call in calls)
        self.session.open(
            calls,
            run=digest.hexdigest()[:32],
            batch_no=len(before) + 1,
            fresh=self.asked,
            spent_ids=spent,
        )

    def kept(self, messages: Sequence[ModelMessage]) -> set[str]:
        """Return tools that stay visible whatever the state: open calls that have their row."""
        waiting = open_ids(messages)
        if not waiting:
            return set()
        _, response = last_response(messages)
        assert response is not None
        scope, ledger = self.session.host.scope, self.session.ledger
        return {
            part.tool_name
            for part in response.tool_calls
            if part.tool_call_id in waiting
            and (row := ledger.row(scope, part.tool_call_id, follow=False)) is not None
            and row.slot.tool == part.tool_name
        }

    # Calls

    async def call(
        self,
        name: str,
        values: dict[str, Any],
        call_id: str,
        body: Callable[[dict[str, Any]], Awaitable[Any]],
        durably: Callable[[str], Awaitable[Any]] | None,
    ) -> Any:
        """Take one call through the gate and give the framework what it came to."""
        known = self.tools.by_name.get(name)
        if known is None:
            return self._refuse(ToolCall(call_id, name), NOT_ALLOWED)
        try:
            arguments = known.shape.write(values)
        except ArgumentsRefused as exc:
            return self._refuse(ToolCall(call_id, name), f"invalid arguments ({exc})")
        call = ToolCall(call_id, name, arguments)
        if durably is None and self.asked and name in self.light:
            right = self._right(call)
            if right is not None:
                return await self._read(call, right, values, body)

        async def enter() -> Fate:
            return await self._enter(call, known, values, body)

        try:
            if durably is None:
                fate = await enter()
            else:
                ticket = str(next(self._tickets))
                self._bodies[ticket] = enter
                try:
                    fate = await durably(ticket)
                finally:
                    del self._bodies[ticket]
        except CONTROL:
            raise
        except Exception as exc:
            self._leave(call, Fate("failed", entered=True, error=type(exc).__name__))
            raise
        return self._deliver(call, fate)

    def _right(self, call: ToolCall) -> AuthorisedCall | None:
        """Let a call through that changes nothing; None where a person must be asked after all."""
        try:
            right = self.session.enter(call)
        except ToolDeniedError as exc:
            if exc.reason == NEEDS_APPROVAL:
                return None
            self._refuse(call, exc.reason)
        assert isinstance(right, AuthorisedCall)  # it has no row that could answer
        return right

    async def _read(
        self,
        call: ToolCall,
        right: AuthorisedCall,
        values: dict[str, Any],
        body: Callable[[dict[str, Any]], Awaitable[Any]],
    ) -> Any:
        """Run a call without a row: nothing is left behind that somebody would have to settle."""
        right.take()
        right.enter()
        around = _WITHIN.get()
        token = _WITHIN.set((*around, Within(self, call, None, itertools.count())))
        try:
            value = await body(values)
        except CONTROL:
            raise
        except Exception as exc:
            self._leave(call, Fate("failed", entered=True, error=type(exc).__name__))
            raise
        finally:
            _WITHIN.reset(token)
        fate = Fate("done", entered=True)
        _mark(self.session, call, fate)
        self._leave(call, fate)
        return value

    async def perform(self, ticket: str) -> Fate:
        """Do the part of a call that happens at most once: the body of a durable step."""
        return await self._bodies[ticket]()

    async def _enter(
        self,
        call: ToolCall,
        known: Any,
        values: dict[str, Any],
        body: Callable[[dict[str, Any]], Awaitable[Any]],
    ) -> Fate:
        session = self.session
        around = _WITHIN.get()
        rule = session.allowed().rule(call.name)
        if known.shape.hides and (known.tool.side_effect or rule.approval == "always"):
            return Fate("denied", reason="an argument hides its value, so nobody could approve it")
        if self._passed_by(around, call):
            # Another guard has claimed exactly this call: two charts, one row.
            item = session.look(call)
            if item.status == "run":
                return await self._beside(call, values, body, around)
        else:
            place, ordinal = self._place(around, call)
            item = session.file(call, within=place, ordinal=ordinal)
        if item.status in ("ask", "held"):
            shown = guard_metadata(
                session, call, item.row, item.verdict.digest, held=item.status == "held"
            )
            return Fate(item.status, metadata=shown)
        if item.status == "answered":
            answer = answer_from_row(item.row, ledger=session.ledger, now=session.now_ms())
            status = "in_doubt" if answer is None else answer.status
            return Fate(status, item.text, row_id=item.row.id)
        if item.status == "denied":
            return Fate("denied", reason=item.verdict.reason)
        if item.row is not None and (item.row.slot.scope, item.row.id) in self._dropped:
            return Fate("in_doubt", IN_DOUBT, row_id=item.row.id)
        row_id = None if item.row is None else item.row.id
        return await self._perform(call, known, values, body, around, row_id)

    async def _perform(
        self,
        call: ToolCall,
        known: Any,
        values: dict[str, Any],
        body: Callable[[dict[str, Any]], Awaitable[Any]],
        around: tuple[Within, ...],
        row_id: str | None,
    ) -> Fate:
        returned: list[Any] = []
        started = False

        async def run(arguments: dict[str, Any]) -> Any:
            nonlocal started
            # What runs beside a row is read from what the row holds.
            given = values if row_id is None else known.shape.fresh(arguments)
            started = True
            _WITHIN.set((*around, Within(self, call, row_id, itertools.count())))
            value = await body(given)
            returned.append(value)
            if row_id is None:
                return None
            return value.return_value if isinstance(value, ToolReturn) else value

        try:
            outcome = await self.session.aperform(call, body=run, pauses=CONTROL)
        except asyncio.CancelledError:
            if started and row_id is not None:
                self._dropped.add((self.session.host.scope, row_id))
            raise
        if outcome.status == "failed" and outcome.entered and outcome.error is not None:
            control = control_of(outcome.error)
            if control is None:
                raise outcome.error
            return Fate("failed", row_id=outcome.row_id, entered=True, control=control)
        if outcome.status in ("denied", "tampered"):
            reason = outcome.error.reason if isinstance(outcome.error, ToolDeniedError) else ""
            return Fate("denied", reason=reason or outcome.text, row_id=outcome.row_id)
        return Fate(
            outcome.status,
            outcome.text,
            returned[0] if returned and outcome.status == "done" else None,
            outcome.row_id,
            outcome.entered,
        )

    async def _beside(
        self,
        call: ToolCall,
        values: dict[str, Any],
        body: Callable[[dict[str, Any]], Awaitable[Any]],
        around: tuple[Within, ...],
    ) -> Fate:
        token = _WITHIN.set((*around, Within(self, call, None, itertools.count())))
        try:
            return Fate("done", value=await body(values), entered=True)
        finally:
            _WITHIN.reset(token)

    def _passed_by(self, around: tuple[Within, ...], call: ToolCall) -> bool:
        host = self.session.host
        return any(
            each.run is not self
            and each.row_id is not None
            and each.call == call
            and each.run.session.ledger is self.session.ledger
            and each.run.session.host.scope == host.scope
            for each in around
        )

    def _place(self, around: tuple[Within, ...], call: ToolCall) -> tuple[str, int]:
        """Return where a call stands that a running tool makes; nothing for the model's own."""
        if call.id in self._ids:
            return "", 0
        for each in reversed(around):
            if each.run is self:
                return each.call.id, next(each.count)
        return "", 0

    # What the framework and the chart are told

    def _deliver(self, call: ToolCall, fate: Fate) -> Any:
        _mark(self.session, call, fate)
        if fate.metadata is not None:
            raise ApprovalRequired(metadata=fate.metadata)
        if fate.status == "denied":
            return self._refuse(call, fate.reason)
        self._leave(call, fate)
        if fate.control is not None:
            raise_control(fate.control)
        if fate.status == "done":
            return fate.value if fate.entered else fate.text
        raise ToolFailed(fate.text)

    def _leave(self, call: ToolCall, fate: Fate) -> None:
        self._told.add(call.id)
        error = None if fate.error is None else type(fate.error, (Exception,), {})()
        outcome = Outcome(
            call.id,
            call.name,
            fate.status,
            fate.text,
            error=error,
            row_id=fate.row_id,
            entered=fate.entered,
        )
        self.session.leave(call, outcome)

    def _refuse(self, call: ToolCall, reason: str) -> NoReturn:
        self.deny(call, reason)
        raise ToolFailed(f"error: tool {call.name!r} denied: {reason}")

    def deny(self, call: ToolCall, reason: str) -> None:
        """Tell the chart of a refused call, and count it.

        Raises:
            ToolDeniedError: ``on_denied="fail_run"``.
            UnexpectedModelBehavior: it is one too many.
        """
        error = ToolDeniedError(call.name, reason)
        self._told.add(call.id)
        self.session.leave(call, Outcome(call.id, call.name, "denied", reason, error=error))
        self._denied += 1
        if self._on_denied == "fail_run":
            raise error
        if self._denied > self._max_denied:
            raise UnexpectedModelBehavior(
                f"more than {self._max_denied} tool calls of this run were denied; "
                "see StatechartGuard(max_denied=)"
            )

    # After the calls of an answer

    def settle(self, parts: Sequence[Any]) -> None:
        """Tell the chart what the framework decided by itself: refusals, and a host's denials."""
        for part in parts:
            if not isinstance(part, ToolReturnPart) or part.tool_call_id not in self._ids:
                continue
            call = ToolCall(part.tool_call_id, part.tool_name)
            if part.outcome == "retried" and part.retry is not None:
                if part.retry.cause in ("unknown_tool", "unavailable_tool"):
                    self.forget.add(part.tool_name)
                    self.deny(call, NOT_ALLOWED)
            elif part.outcome == "denied":
                self._host_denied(call, part)
            elif part.outcome == "failed" and call.id not in self._told:
                self.deny(call, "invalid arguments")
            elif part.outcome == "success" and self._external(part.tool_name):
                self._leave(call, Fate("done"))

    def _external(self, name: str) -> bool:
        known = self.tools.by_name.get(name)
        return known is not None and known.kind == "external"

    def _host_denied(self, call: ToolCall, part: ToolReturnPart) -> None:
        """A host denied a call: its row is closed, or its own word takes the denial's place."""
        scope, ledger = self.session.host.scope, self.session.ledger
        row = ledger.row(scope, call.id, follow=False)
        if row is not None and row.slot.tool == call.name:
            reason = part.content if isinstance(part.content, str) else None
            if row.open:
                no = {row.id: Decision("reject", reason=reason)}
                try:
                    ledger.decide(scope, no, "host", now=self.session.now_ms())
                except LedgerError:
                    ledger.close(scope, [row.id], "void", now=self.session.now_ms())
            row = ledger.row(scope, row.id)
            if row is not None and row.entered:
                answer = answer_from_row(row, ledger=ledger, now=self.session.now_ms())
                part.content = IN_DOUBT if answer is None else answer.text
                done = answer is not None and answer.status == "done"
                part.outcome = "success" if done else "failed"
                return
        self._leave(call, Fate("rejected", part.content if isinstance(part.content, str) else ""))

    def close(self, messages: list[ModelMessage]) -> None:
        """Close what is open at an ordinary end, and answer it in the conversation."""
        waiting = open_ids(messages) & self._ids
        if not waiting:
            return
        _, response = last_response(messages)
        assert response is not None
        scope, ledger = self.session.host.scope, self.session.ledger
        rows = [ident for ident in waiting if ledger.row(scope, ident, follow=False) is not None]
        answers = close_open(ledger, scope, rows, "superseded", now=self.session.now_ms())
        parts = [
            _closing(part, answers[ident].text if ident in answers else NOT_OUTPUT)
            for part in response.tool_calls
            if (ident := part.tool_call_id) in waiting
        ]
        last = messages[-1]
        if isinstance(last, ModelRequest):
            messages[-1] = dataclasses.replace(last, parts=[*last.parts, *parts])
        else:
            messages.append(ModelRequest(parts=list(parts)))

    def output_denied(self) -> None:
        """Tell the chart that an answer came where the state wants none."""
        self.session.send(Event("output.denied", {}))


def _closing(part: ToolCallPart, text: str) -> ToolReturnPart:
    return ToolReturnPart(
        tool_name=part.tool_name, content=text, tool_call_id=part.tool_call_id, outcome="failed"
    )


def _mark(session: GuardSession, call: ToolCall, fate: Fate) -> None:
    """Note on the current span where the chart stood and what it decided."""
    span = trace.get_current_span()
    if span.is_recording():
        span.set_attribute("guardchart.machine", session.machine.id)
        span.set_attribute("guardchart.state", sorted(session.snapshot.state_ids))
        span.set_attribute("guardchart.decision", fate.status)
        if fate.row_id is not None:
            span.set_attribute("guardchart.row", fate.row_id)


@contextmanager
def outside() -> Iterator[None]:
    """Leave the bodies we are in, for a run that is none of theirs."""
    token = _WITHIN.set(())
    try:
        yield
    finally:
        _WITHIN.reset(token)
