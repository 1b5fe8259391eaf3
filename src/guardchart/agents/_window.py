"""The window of a conversation that is kept: cut at turns, each call with its result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from guardchart.agents._messages import Message, open_calls, tool_turn
from guardchart.errors import AgentConfigError

__all__ = ["open_turn", "paired", "plain", "window"]


def window(
    messages: Sequence[Message], max_messages: int, *, task: str | None = None
) -> list[Message]:
    """Cut a conversation to its task and its newest turns.

    The window never starts between an assistant message and its results, and it starts with a
    message of the user's, as some providers demand: the task, or the question of the oldest turn
    that is in it. The newest turn is kept whole even where it alone exceeds ``max_messages``: a
    model must see the results it has just asked for.

    Args:
        messages: The conversation, newest last.
        max_messages: How many messages to keep, at least 1.
        task: Text of the current task; its newest user message is kept. None keeps the first
            user message.

    Returns:
        The kept messages as a new list.

    Raises:
        AgentConfigError: ``max_messages`` is no int or below 1.

    Example:
        >>> from guardchart.agents._messages import user_turn
        >>> [m["content"] for m in window([user_turn(str(n)) for n in range(5)], 2)]
        ['0', '4']
    """
    if not _is_int(max_messages) or max_messages < 1:
        raise AgentConfigError("max_messages must be an int of at least 1")
    total = len(messages)
    if total <= max_messages:
        return list(messages)
    start = total - max_messages
    pinned = _task_index(messages, task)
    if (pinned is None or pinned >= start) and messages[start].get("role") != "user":
        pinned = _question_index(messages, start)  # of the turn that is cut in two
    if pinned is not None and pinned < start:
        start += 1  # it takes one place
    else:
        pinned = None
    newest = _newest_turn(messages)
    while start < newest and messages[start].get("role") == "tool":
        start += 1
    start = min(start, newest)
    head = [messages[pinned]] if pinned is not None and pinned < start else []
    kept = [*head, *messages[start:]]
    return _without_orphans(kept) if _has_calls(kept) else kept


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _without_orphans(messages: Sequence[Message]) -> list[Message]:
    """Drop results whose assistant turn is not before them: providers refuse such requests."""
    proposed: set[str] = set()
    kept = []
    for message in messages:
        if calls := message.get("tool_calls"):
            proposed.update(call["id"] for call in calls)
        if message.get("role") != "tool" or message["tool_call_id"] in proposed:
            kept.append(message)
    return kept


def open_turn(messages: Sequence[Mapping[str, Any]]) -> int:
    """Where the newest turn starts if it has calls without a result; else the number of messages.

    Example:
        >>> from guardchart.gate import ToolCall
        >>> from guardchart.agents._messages import assistant_turn, user_turn
        >>> asked = assistant_turn(None, [ToolCall("c1", "t", {})])
        >>> open_turn([user_turn("x"), asked]), open_turn([asked, tool_turn("c1", "ok")])
        (1, 2)
    """
    start = _newest_turn(messages)
    return start if start < len(messages) and open_calls(messages[start:]) else len(messages)


def paired(messages: Sequence[Message], default: str | None = None) -> list[Message]:
    """Put each result right behind the turn that asked for it: providers refuse anything else.

    Args:
        messages: A conversation that may have come from outside, or from a summariser.
        default: The result of a call that has none; None takes such a call out.

    Returns:
        A new list of the same messages in their order, but for results: those that nothing
        asked for are left out. An assistant message that loses every call and has no text is
        left out, too.

    Example:
        >>> from guardchart.gate import ToolCall
        >>> from guardchart.agents._messages import assistant_turn, user_turn
        >>> asked = assistant_turn(None, [ToolCall("c1", "t", {})])
        >>> [m["role"] for m in paired([asked, user_turn("x"), tool_turn("c1", "ok")])]
        ['assistant', 'tool', 'user']
        >>> paired([asked])
        []
    """
    waiting: dict[str, list[Message]] = {}
    for message in messages:
        if message.get("role") == "tool":
            waiting.setdefault(message["tool_call_id"], []).append(message)
    kept: list[Message] = []
    for message in messages:
        if message.get("role") == "tool":
            continue
        calls = message.get("tool_calls")
        if not calls:
            kept.append(message)
            continue
        answered, results = [], []
        for call in calls:
            found = waiting.get(call["id"])
            if found:
                results.append(found.pop(0))
            elif default is not None:
                results.append(tool_turn(call["id"], default, call.get("name")))
            else:
                continue
            answered.append(call)
        if len(answered) < len(calls):
            message = {key: message[key] for key in message if key != "tool_calls"}
            if answered:
                message["tool_calls"] = answered
            elif not message.get("content"):
                continue
        kept.append(message)
        kept.extend(results)
    return kept


def plain(messages: Sequence[Any]) -> bool:
    """Whether no message has more than a role and a content; told without looking at each.

    Example:
        >>> from guardchart.agents._messages import user_turn
        >>> plain([user_turn("x")]), plain([tool_turn("c1", "ok")])
        (True, False)
    """
    sizes = list(map(len, messages))
    # Counting compares by identity first; a maximum would ask each pair of numbers.
    return sizes.count(2) == len(sizes) or max(sizes) <= 2


def _has_calls(messages: Sequence[Message]) -> bool:
    """Whether any tool call or result is among them; plain messages have two keys."""
    return not plain(messages) and any(
        "tool_calls" in message or "tool_call_id" in message for message in messages
    )


def _task_index(messages: Sequence[Message], task: str | None) -> int | None:
    """Where the newest user message with this text stands, else the first user message."""
    if task is not None:
        for index in range(len(messages) - 1, -1, -1):
            if messages[index].get("role") == "user" and messages[index].get("content") == task:
                return index
    for index, message in enumerate(messages):
        if message.get("role") == "user":
            return index
    return None


def _question_index(messages: Sequence[Message], before: int) -> int | None:
    """Where the last message of the user's stands that comes before a place."""
    for index in range(before - 1, -1, -1):
        if messages[index].get("role") == "user":
            return index
    return None


def _newest_turn(messages: Sequence[Mapping[str, Any]]) -> int:
    """Where the newest turn starts: the last message that is not a tool result."""
    for index in range(len(messages) - 1, -1, -1):
        if messages[index].get("role") != "tool":
            return index
    return len(messages)
