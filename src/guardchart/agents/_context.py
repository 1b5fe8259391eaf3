"""The loop's context, read as untrusted data: pending calls, counters, the request."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from guardchart.agents._messages import (
    Message,
    check_messages,
    safe_text,
    system_turn,
    tool_turn,
    user_turn,
)
from guardchart.agents._window import open_turn, paired, plain, window
from guardchart.gate import ToolCall

__all__ = [
    "calls_of",
    "closing",
    "conversation",
    "pending_entries",
    "prompt_of",
    "request_messages",
    "row_ids",
    "shortened",
    "shown_ids",
    "shown_item",
]

_LOG = logging.getLogger("guardchart")
_NO_RESULT: Final = "error: no result was recorded"


def pending_entries(context: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The well-formed entries of ``pending_tool_calls``, in order."""
    entries = context.get("pending_tool_calls")
    if not isinstance(entries, (list, tuple)):
        return []
    found = []
    for entry in entries:
        if type(entry) is dict or isinstance(entry, Mapping):
            named = isinstance(entry.get("id"), str) and isinstance(entry.get("name"), str)
            given = entry.get("arguments")
            if named and (type(given) is dict or isinstance(given, Mapping)):
                found.append(entry)
    return found


def calls_of(entries: Iterable[Mapping[str, Any]]) -> list[ToolCall]:
    """The calls of well-formed entries, as the model proposed them."""
    return [ToolCall(each["id"], each["name"], dict(each["arguments"])) for each in entries]


def row_ids(entries: Iterable[Mapping[str, Any]]) -> list[str | None]:
    """The ledger's row id that the snapshot notes for each pending call."""
    noted = [entry.get("row_id") for entry in entries]
    return [each if isinstance(each, str) and each else None for each in noted]


def shown_ids(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """The id under which a person is shown each pending call."""
    return [noted or entry["id"] for noted, entry in zip(row_ids(entries), entries, strict=True)]


def shown_item(entry: Mapping[str, Any]) -> dict[str, Any]:
    """What a reviewer is shown of a pending entry, as ``gate.pending_item`` shows a row."""
    return {
        "id": entry["row_id"] if isinstance(entry.get("row_id"), str) else entry["id"],
        "tool_call_id": entry["id"],
        "name": entry["name"],
        "arguments": dict(entry["arguments"]),
        "digest": entry.get("digest"),
    }


def prompt_of(context: Mapping[str, Any], event: Any) -> str | None:
    """The prompt of an event, of the machine's input, or of the context; None without one."""
    payload = getattr(event, "payload", None)
    if type(payload) is dict or isinstance(payload, Mapping):
        for key in ("prompt", "task"):
            if key in payload:
                return _text(payload[key])
    given = context.get("input")
    if isinstance(given, Mapping):
        for key in ("prompt", "task"):
            if key in given:
                return _text(given[key])
    return _text(given) or _text(context.get("task"))


def _text(value: Any) -> str | None:
    return safe_text(value) if isinstance(value, str) and value.strip() else None


def request_messages(
    context: Mapping[str, Any], system_prompt: str | None, *, shared: bool = False
) -> list[Message]:
    """What a model is sent: the system prompt (never stored), then the conversation.

    A conversation without a user message is opened by the context's task. Its messages are
    copies, or with ``shared`` the context's own, for a model that only reads them.
    """
    stored = context.get("messages")
    messages: list[Message] = []
    if isinstance(stored, list):
        messages.extend(stored if shared else map(dict, stored))
    if not any(each.get("role") == "user" for each in messages):
        task = prompt_of(context, None)
        if task is not None:
            messages.insert(0, user_turn(task))
    if system_prompt:
        messages.insert(0, system_turn(system_prompt))
    return messages


def shortened(
    context: Mapping[str, Any],
    messages: Sequence[Message],
    max_messages: int,
    summarise: Callable[[list[Message]], list[Message]] | None,
) -> list[Message]:
    """The conversation bounded to ``max_messages``, or what ``summarise`` makes of it."""
    if len(messages) <= max_messages:
        return list(messages)
    if summarise is not None:
        messages = [each for each in messages if _usable(each)]
        start = open_turn(messages)  # its results are still to come, so it stays as it is
        summary = _summary(summarise, messages[:start])
        if summary is not None:
            return [*summary, *messages[start:]]
    given = context.get("task")
    task = given if isinstance(given, str) else None
    try:
        return window(messages, max_messages, task=task)
    except (AttributeError, KeyError, TypeError):  # those of a restored context may be anything
        return window([each for each in messages if _usable(each)], max_messages, task=task)


def _summary(
    summarise: Callable[[list[Message]], list[Message]], messages: list[Message]
) -> list[Message] | None:
    """What is left of finished turns; None where that cannot be told, so that they are cut."""
    if not messages:
        return []
    try:
        return paired(check_messages(summarise(list(messages))))
    except Exception as error:  # a conversation must not end because its summary failed
        _LOG.warning("summarise failed (%s): the conversation is cut", type(error).__name__)
        return None


def conversation(context: Mapping[str, Any]) -> list[Message]:
    """The conversation as a new turn finds it: each call with its result, each result asked for.

    It may come from a message channel or a snapshot, where somebody else has left a call
    without its result, and where results may stand behind a later message.
    """
    stored = context.get("messages")
    if not isinstance(stored, list):
        return []
    try:
        if plain(stored):
            return stored
    except TypeError:  # an entry that has no length is no message
        pass
    return paired([each for each in stored if _usable(each)], _NO_RESULT)


def _usable(message: Any) -> bool:
    if type(message) is not dict and not isinstance(message, Mapping):
        return False
    if len(message) == 2 and "content" in message and message.get("role", "tool") != "tool":
        return True  # most are of this kind, and nothing of it can be wrong
    if message.get("role") == "tool" and not isinstance(message.get("tool_call_id"), str):
        return False
    calls = message.get("tool_calls") or ()
    return isinstance(calls, list | tuple) and all(
        isinstance(call, Mapping) and isinstance(call.get("id"), str) for call in calls
    )


def closing(
    context: Mapping[str, Any],
    outcomes: Mapping[str, str],
    default: str,
    results: Iterable[Mapping[str, Any]] = (),
) -> list[Message]:
    """One result message per pending call: its own result, the ledger's word, or ``default``."""
    own = {each["tool_call_id"]: each["content"] for each in results}
    messages = []
    for entry in pending_entries(context):
        text = own.get(entry["id"]) or outcomes.get(entry["id"]) or default
        messages.append(tool_turn(entry["id"], text, entry["name"]))
    return messages
