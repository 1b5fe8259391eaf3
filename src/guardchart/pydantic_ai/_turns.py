"""The turns of a guarded run, and what the chart is told of the calls in them."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from typing import Any, Final, NoReturn

from pydantic_ai.exceptions import ToolFailed, UnexpectedModelBehavior
from pydantic_ai.messages import (
    ModelMessage,
    ModelRequest,
    ModelResponse,
    ToolCallPart,
    ToolReturnPart,
)

from guardchart.errors import LedgerError, ToolDeniedError
from guardchart.gate import (
    NOT_ALLOWED,
    GuardSession,
    Outcome,
    ToolCall,
    answer_from_row,
    close_open,
    shown_name,
)
from guardchart.gate._answers import IN_DOUBT
from guardchart.kernel import Event
from guardchart.persistence import Decision
from guardchart.pydantic_ai._calls import Fate, Tools

__all__ = ["RunTurns", "last_response", "open_ids"]

NOT_OUTPUT: Final = "not run: the conversation ended with an answer before it was decided"


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


class RunTurns:
    """The turns of one run: opened, settled and closed.

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
    """

    def __init__(
        self,
        session: GuardSession,
        tools: Tools,
        *,
        on_denied: str,
        max_denied: int,
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
        self._denied = 0
        self._told: set[str] = set()
        self._opened: Any = None
        self._response: ModelResponse | None = None
        self._at = -1
        self._ids: frozenset[str] = frozenset()

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

    # What the framework and the chart are told

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

    def refuse(self, call: ToolCall, reason: str) -> NoReturn:
        """Do what `deny` does, and tell the model."""
        self.deny(call, reason)
        raise ToolFailed(f"error: tool {shown_name(call.name)!r} denied: {reason}")

    def deny(self, call: ToolCall, reason: str) -> None:
        """Tell the chart of a refused call, and count it.

        Raises:
            ToolDeniedError: ``on_denied="fail_run"``.
            UnexpectedModelBehavior: it is one too many.
        """
        error = ToolDeniedError(shown_name(call.name), reason)
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
        """Tell the chart what others decided: the framework's refusals, and a host's results."""
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
            elif part.outcome == "success" and call.id not in self._told:
                if self._external(part.tool_name):
                    self._leave(call, Fate("done"))
                else:
                    self._host_answered(call, part)

    def _external(self, name: str) -> bool:
        known = self.tools.by_name.get(name)
        return known is not None and known.kind == "external"

    def _host_denied(self, call: ToolCall, part: ToolReturnPart) -> None:
        """A host denied a call: its row is closed, or its own word takes the denial's place."""
        scope, ledger = self.session.host.scope, self.session.ledger
        row = self._row(call)
        if row is not None and row.open:
            reason = part.content if isinstance(part.content, str) else None
            no = {row.id: Decision("reject", reason=reason)}
            try:
                ledger.decide(scope, no, "host", now=self.session.now_ms())
            except LedgerError:
                ledger.close(scope, [row.id], "void", now=self.session.now_ms())
            row = self._row(call)
        if row is not None and row.entered:
            self._say(row, part)
            return
        self._leave(call, Fate("rejected", part.content if isinstance(part.content, str) else ""))

    def _host_answered(self, call: ToolCall, part: ToolReturnPart) -> None:
        """A host gave a result for a call that has a row: what counts is what became of that."""
        row = self._row(call)
        if row is None:
            return
        if row.open:
            scope, now = self.session.host.scope, self.session.now_ms()
            self.session.ledger.close(scope, [row.id], "void", now=now)
            row = self._row(call)
        self._say(row, part)
        if not row.entered:
            self._leave(call, Fate("void", str(part.content), row_id=row.id))

    def _row(self, call: ToolCall) -> Any:
        """Return the row that stands for a call of the open turn now; None without one."""
        row = self.session.ledger.row(self.session.host.scope, call.id)
        return row if row is not None and row.slot.tool == call.name else None

    def _say(self, row: Any, part: ToolReturnPart) -> None:
        """Let a row's word take the place of a host's."""
        answer = answer_from_row(row, ledger=self.session.ledger, now=self.session.now_ms())
        part.content = IN_DOUBT if answer is None else answer.text
        part.outcome = "success" if answer is not None and answer.status == "done" else "failed"

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
