"""One run of a guarded agent: its turns, its calls, and what the chart is told of them."""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import itertools
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Final

from opentelemetry import trace
from pydantic_ai.exceptions import ApprovalRequired, ToolFailed
from pydantic_ai.messages import (
    ToolReturn,
)

from guardchart.errors import ToolDeniedError
from guardchart.gate import (
    NOT_ALLOWED,
    AuthorisedCall,
    GuardSession,
    ToolCall,
    answer_from_row,
)
from guardchart.gate._answers import IN_DOUBT
from guardchart.gate._arguments import ArgumentsRefused
from guardchart.pydantic_ai._calls import (
    CONTROL,
    Fate,
    Tools,
    control_of,
    guard_metadata,
    raise_control,
)
from guardchart.pydantic_ai._turns import RunTurns

__all__ = ["GuardRun", "Within"]

WITHIN_ITSELF: Final = "it is made within the very call that it would be"


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Within:
    """The guarded call in whose body we are.

    Args:
        run: the run of the guard that let it through.
        call: the call.
        row_id: the row it holds; None without one.
        count: numbers the calls that its body makes.
        passed: the guard runs that have let it through on the strength of that row.
    """

    run: GuardRun
    call: ToolCall
    row_id: str | None
    count: Iterator[int] = dataclasses.field(default_factory=itertools.count)
    passed: set[GuardRun] = dataclasses.field(default_factory=set)


_WITHIN: contextvars.ContextVar[tuple[Within, ...]] = contextvars.ContextVar(
    "guardchart_within", default=()
)


class GuardRun(RunTurns):
    """What a `StatechartGuard` keeps for one run of its agent; the arguments of `RunTurns`, and:

    Args:
        dropped: rows whose bodies were cancelled in this process, shared by all runs.
        run_id: the framework's name for the run, None where it has none.
    """

    def __init__(
        self,
        session: GuardSession,
        tools: Tools,
        *,
        dropped: set[tuple[str, str]],
        run_id: str | None,
        **options: Any,
    ) -> None:
        super().__init__(session, tools, **options)
        self.run_id = run_id
        self._begun_in = _WITHIN.get()
        self._dropped = dropped
        self._bodies: dict[str, Callable[[], Awaitable[Fate]]] = {}
        self._tickets = itertools.count()

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
            return self.refuse(ToolCall(call_id, name), NOT_ALLOWED)
        try:
            arguments = known.shape.write(values)
        except ArgumentsRefused as exc:
            return self.refuse(ToolCall(call_id, name), f"invalid arguments ({exc})")
        call = ToolCall(call_id, name, arguments)
        if durably is None and self.asked and name in self.light:
            return await self._read(call, self._right(call), values, body)

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

    def _right(self, call: ToolCall) -> AuthorisedCall:
        """Let a call through that changes nothing."""
        try:
            right = self.session.enter(call)
        except ToolDeniedError as exc:
            self.refuse(call, exc.reason)
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
        token = _WITHIN.set((*around, Within(self, call, None)))
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
        if known.shape.hides and known.tool.side_effect:
            return Fate("denied", reason="an argument hides its value, so nobody could approve it")
        if self._passed_by(around, call):
            # Another guard has claimed exactly this call: two charts, one row.
            item = session.look(call)
            if item.status == "run":
                return await self._beside(call, values, body, around)
        else:
            place, ordinal = self._place(around, call)
            item = session.file(call, within=place, ordinal=ordinal)
            if item.row is not None and any(self._holds(each, item.row.id) for each in around):
                return Fate("denied", reason=WITHIN_ITSELF)  # it would wait for its own end
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
            _WITHIN.set((*around, Within(self, call, row_id)))
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
        token = _WITHIN.set((*around, Within(self, call, None)))
        try:
            return Fate("done", value=await body(values), entered=True)
        finally:
            _WITHIN.reset(token)

    def _passed_by(self, around: tuple[Within, ...], call: ToolCall) -> bool:
        """Whether another guard of this run has claimed this very call; true once."""
        for each in around:
            if (
                each.run is not self
                and each.run.run_id is not None
                and each.run.run_id == self.run_id
                and each not in self._begun_in  # a run in a call's body is not that call
                and self not in each.passed
                and each.call == call
                and self._holds(each, each.row_id)
            ):
                each.passed.add(self)
                return True
        return False

    def _holds(self, each: Within, row_id: str | None) -> bool:
        """Whether a call holds this row, in the ledger and scope of this run."""
        there = each.run.session
        return (
            row_id is not None
            and each.row_id == row_id
            and there.ledger is self.session.ledger
            and there.host.scope == self.session.host.scope
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
            return self.refuse(call, fate.reason)
        self._leave(call, fate)
        if fate.control is not None:
            raise_control(fate.control)
        if fate.status == "done":
            return fate.value if fate.entered else fate.text
        raise ToolFailed(fate.text)


def _mark(session: GuardSession, call: ToolCall, fate: Fate) -> None:
    """Note on the current span where the chart stood and what it decided."""
    span = trace.get_current_span()
    if span.is_recording():
        span.set_attribute("guardchart.machine", session.machine.id)
        span.set_attribute("guardchart.state", sorted(session.snapshot.state_ids))
        span.set_attribute("guardchart.decision", fate.status)
        if fate.row_id is not None:
            span.set_attribute("guardchart.row", fate.row_id)
