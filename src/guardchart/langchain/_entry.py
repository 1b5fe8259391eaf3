"""One tool call on its way through a door: the gate again, the framework's body, the result."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from langchain_core.messages import ToolMessage
from langgraph.errors import GraphBubbleUp
from langgraph.types import Command

from guardchart.errors import ToolDeniedError
from guardchart.gate import (
    NEEDS_APPROVAL,
    NOT_ALLOWED,
    Outcome,
    ToolCall,
    closing_text,
    scrub,
    shown_name,
)
from guardchart.gate._answers import EDITED_NOTE
from guardchart.gate._run import render
from guardchart.gate._stored import rowless
from guardchart.langchain._door import CURRENT, Current, Door, Opened, as_call, calls_of, turn_of
from guardchart.langchain._tools import ToolFailedError, messages_in, shown_of, tool_text

__all__ = ["Entry", "refusal_message", "refusal_text"]

REPLACED: Final = "the tool behind this name is not the registered one"


class _Resumed(Exception):
    """A tool's own ``interrupt()`` got an answer that does not fit: LangGraph asks again."""

    def __init__(self, cause: Exception) -> None:
        super().__init__()
        self.cause = cause


_PAUSES: Final = (GraphBubbleUp, _Resumed)


def _bad_resume(error: Exception) -> bool:
    try:
        from langgraph.errors import is_invalid_resume
    except ImportError:  # before LangGraph checked answers
        return False
    return is_invalid_resume(error)


def refusal_text(name: str, reason: str) -> str:
    """Return what the conversation is told of a call that is refused for a reason."""
    if reason == closing_text("tampered"):
        return reason
    return f"error: tool {name!r} denied: {reason}"


def refusal_message(name: str, call_id: str, text: str) -> ToolMessage:
    """Return the result of a call that does not run."""
    return ToolMessage(text, name=name, tool_call_id=call_id, status="error")


class Entry:
    """A call that LangGraph is about to run.

    Args:
        door: Whose it is.
        opened: The session of the state that the call's task sees.
        request: The final request, whatever other hooks made of it.
        hint: Added to a refusal for want of an approval.
    """

    def __init__(self, door: Door, opened: Opened, request: Any, hint: str = "") -> None:
        self.door = door
        self.session = opened.session
        self.request = request
        self.hint = hint
        self.call = as_call(request.tool_call)
        self._result: Any = None
        self._since = 0
        self._refusal: str | None = None
        self._take_up(opened)

    def _take_up(self, opened: Opened) -> None:
        """Find the call in the stored turn, or judge it with those it came with."""
        call, note = self.call, opened.notes.get(self.call.id)
        plain = rowless(self.door.registry, call)
        known = self.door.tools.get(call.name) if type(call.name) is str else None
        if known is None:
            self._refusal = NOT_ALLOWED
        elif self.request.tool is not known:
            self._refusal = REPLACED
        elif note is not None and note.get("denied"):
            self._refusal = str(note["denied"])
        elif note is not None and note.get("row") is None and plain:
            self.session.take(call)
        elif note is not None:
            (item,) = self.session.restore([call], row_ids=[note.get("row")])
            if item.status == "denied":
                self._refusal = item.verdict.reason
        elif len(beside := self._beside(call)) == 1 and plain:
            self.session.take(call)
        else:
            for item in self.session.judge(beside):
                if item.call is call and item.status == "denied":
                    self._refusal = item.verdict.reason
        self._since = len(self.session.told)

    def _beside(self, call: ToolCall) -> list[ToolCall]:
        """The calls of the answer this one is from, itself as it is now."""
        state = self.request.state
        key = self.door.messages_key
        messages = state.get(key) if isinstance(state, Mapping) else state
        calls = calls_of(turn_of(messages)) if isinstance(messages, list) else []
        if call.id not in [each.id for each in calls]:
            return [call]
        return [call if each.id == call.id else each for each in calls]

    # The body

    def run(self, handler: Callable[[Any], Any]) -> Any:
        """Take the call the whole way; everything but a pause becomes a result."""
        if self._refusal is not None:
            return self._told(self._refused(self._refusal))

        def body(arguments: dict[str, Any]) -> Any:
            CURRENT.set(Current(self.session, arguments, self.request.tool))
            try:
                return self._taken(handler(self._request(arguments)))
            except Exception as exc:
                if _bad_resume(exc):
                    raise _Resumed(exc) from None
                raise

        try:
            outcome = self.session.run(self.call, body=body, as_text=self._as_text, pauses=_PAUSES)
        except _Resumed as exc:
            raise exc.cause from None
        return self._told(outcome)

    async def arun(self, handler: Callable[[Any], Awaitable[Any]]) -> Any:
        """Do what `run` does, from a running loop."""
        if self._refusal is not None:
            return self._told(self._refused(self._refusal))

        async def body(arguments: dict[str, Any]) -> Any:
            CURRENT.set(Current(self.session, arguments, self.request.tool))
            try:
                return self._taken(await handler(self._request(arguments)))
            except Exception as exc:
                if _bad_resume(exc):
                    raise _Resumed(exc) from None
                raise

        try:
            outcome = await self.session.arun(
                self.call, body=body, as_text=self._as_text, pauses=_PAUSES
            )
        except _Resumed as exc:
            raise exc.cause from None
        return self._told(outcome)

    def _request(self, arguments: dict[str, Any]) -> Any:
        return self.request.override(tool_call={**self.request.tool_call, "args": arguments})

    def _refused(self, reason: str) -> Outcome:
        error = ToolDeniedError(shown_name(self.call.name), reason)
        text = refusal_text(error.tool, reason)
        outcome = Outcome(self.call.id, error.tool, "denied", text, error=error)
        self.session.leave(self.call, outcome)
        return outcome

    def _taken(self, result: Any) -> Any:
        """Keep what the framework gave, return what is shown of it.

        A failure that it reports as a message is one.
        """
        self._result = result
        for message in messages_in(result, self.door.messages_key):
            if isinstance(message, ToolMessage) and message.status == "error":
                raise ToolFailedError(tool_text(message))
        return shown_of(result)

    def _as_text(self, value: Any) -> str:
        if type(value) is str:
            return self._shown(value)
        found = [
            each
            for each in messages_in(value, self.door.messages_key)
            if isinstance(each, ToolMessage)
        ]
        own = [each for each in found if each.tool_call_id == self.call.id] or found
        return self._shown("".join(map(tool_text, own)))

    def _shown(self, text: str) -> str:
        return render(text, self.door.registry.max_output_chars)

    # The result

    def _told(self, outcome: Outcome) -> Any:
        name, ident = shown_name(self.call.name), self.request.tool_call.get("id") or ""
        text = outcome.text
        if outcome.status == "denied" and getattr(outcome.error, "reason", "") == NEEDS_APPROVAL:
            text += self.hint
        if outcome.entered and outcome.status in ("done", "failed") and self._result is not None:
            result = self._masked(self._result, text)
        else:
            status = "success" if outcome.ok else "error"
            result = ToolMessage(text, name=name, tool_call_id=ident, status=status)
        if not self.session.moves_chart(self.call.name):
            return result
        events = self.session.stored_events(self._since, outcome.row_id)
        return self._with_events(result, events)

    def _with_events(self, result: Any, events: list[dict[str, Any]]) -> Any:
        if not events or not isinstance(self.request.state, Mapping):
            return result
        update = {self.door.events_key: self.door.signed(events, self.session.host.scope)}
        if isinstance(result, ToolMessage):
            return Command(update={self.door.messages_key: [result], **update})
        return [*(result if isinstance(result, list) else [result]), Command(update=update)]

    def _masked(self, result: Any, text: str) -> Any:
        """The framework's result, with the text that was recorded in the place of its own."""
        if isinstance(result, ToolMessage):
            if result.tool_call_id != self.call.id:
                text = self._shown(tool_text(result))
            if result.content == text:
                return result
            return result.model_copy(update={"content": _content(result.content, text)})
        if isinstance(result, list):
            return [self._masked(each, text) for each in result]
        key, update = self.door.messages_key, getattr(result, "update", None)
        if isinstance(result, Command) and isinstance(update, Mapping) and key in update:
            messages = [self._masked(each, text) for each in messages_in(result, key)]
            return dataclasses.replace(result, update={**update, key: messages})
        return result


def _content(content: Any, text: str) -> Any:
    if not isinstance(content, list):
        return text
    blocks = [scrub(each) if _is_text(each) else each for each in content]
    return [EDITED_NOTE, *blocks] if text.startswith(EDITED_NOTE) else blocks


def _is_text(block: Any) -> bool:
    return isinstance(block, str) or (isinstance(block, dict) and block.get("type") == "text")
