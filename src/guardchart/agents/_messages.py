"""The conversation as a context holds it: plain dicts, JSON types only, newest last.

A message is ``{"role", "content"}`` with ``tool_calls`` on an assistant turn that proposes
calls and ``tool_call_id`` and ``name`` on a result. This compact form is what snapshots and
models see; typed, multimodal parts are a layer on top and will convert to and from it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, TypeAlias

from guardchart.errors import AgentError
from guardchart.gate import ToolCall
from guardchart.gate._arguments import MAX_ARGUMENT_BYTES, MAX_DEPTH, UNPARSEABLE

__all__ = [
    "Message",
    "ROLES",
    "assistant_turn",
    "call_ids",
    "check_messages",
    "open_calls",
    "safe_text",
    "storable_arguments",
    "system_turn",
    "tool_turn",
    "user_turn",
]

Message: TypeAlias = dict[str, Any]
"""One entry of a conversation: ``{role, content, tool_calls?, tool_call_id?, name?}``."""

ROLES: Final = frozenset({"system", "user", "assistant", "tool"})

_KEYS = frozenset({"role", "content", "tool_calls", "tool_call_id", "name"})
_CALL_KEYS = frozenset({"id", "name", "arguments"})


# Building


def system_turn(text: str) -> Message:
    """A system message.

    Example:
        >>> system_turn("Be brief.")
        {'role': 'system', 'content': 'Be brief.'}
    """
    return {"role": "system", "content": safe_text(text)}


def user_turn(text: str) -> Message:
    """A user message: a task, or the loop's own request for a better answer.

    Example:
        >>> user_turn("Where is order 42?")
        {'role': 'user', 'content': 'Where is order 42?'}
    """
    return {"role": "user", "content": safe_text(text)}


def assistant_turn(
    text: str | None,
    tool_calls: Iterable[ToolCall] = (),
    *,
    max_argument_bytes: int = MAX_ARGUMENT_BYTES,
) -> Message:
    """An assistant message with the calls it proposes, if any.

    Args:
        text: The answer; None where the model only proposes calls.
        tool_calls: Proposed calls. Arguments that cannot be stored are replaced by a note, see
            ``storable_arguments``; what is checked and run is never read from here.
        max_argument_bytes: Largest arguments recorded, in bytes.

    Example:
        >>> assistant_turn(None, [ToolCall("c1", "lookup", {"order_id": 42})])["tool_calls"]
        [{'id': 'c1', 'name': 'lookup', 'arguments': {'order_id': 42}}]
    """
    message: Message = {"role": "assistant", "content": None if text is None else safe_text(text)}
    calls = [
        {
            "id": safe_text(call.id),
            "name": safe_text(call.name),
            "arguments": storable_arguments(call.arguments, max_argument_bytes),
        }
        for call in tool_calls
    ]
    if calls:
        message["tool_calls"] = calls
    return message


def tool_turn(tool_call_id: str, content: str, name: str | None = None) -> Message:
    """The result of one call.

    Args:
        tool_call_id: The id the model gave the call.
        content: The result's text.
        name: The tool, where known.

    Example:
        >>> tool_turn("c1", "shipped", "lookup")["tool_call_id"]
        'c1'
    """
    message: Message = {
        "role": "tool",
        "tool_call_id": safe_text(tool_call_id),
        "content": safe_text(content),
    }
    if name is not None:
        message["name"] = safe_text(name)
    return message


def safe_text(value: object) -> str:
    """Text that every store can hold: NUL and lone surrogates become U+FFFD.

    Args:
        value: The text; anything else is shown by ``str``.

    Example:
        >>> safe_text("a\\ud800b") == "a\\ufffdb"
        True
    """
    text = value if type(value) is str else str(value)
    if "\0" in text:
        text = text.replace("\0", "\ufffd")
    if text.isascii():
        return text
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return "".join("\ufffd" if "\ud800" <= c <= "\udfff" else c for c in text)
    return text


_CONTAINERS: Final = (dict, list, tuple)
_ENCODER: Final = json.JSONEncoder(allow_nan=False, ensure_ascii=False)


def storable_arguments(arguments: object, max_bytes: int = MAX_ARGUMENT_BYTES) -> dict[str, Any]:
    """Arguments as a conversation records them: a fresh copy in JSON types.

    Args:
        arguments: What the model proposed.
        max_bytes: Roughly the largest JSON text; never less than the gate's own limit allows.

    Returns:
        The copy, or ``{"__unparseable__": reason}`` for what is no JSON object, nests deeper
        than 64 levels or exceeds ``max_bytes``: the gate refuses such a call, and a
        conversation that held it could not be saved.

    Example:
        >>> storable_arguments({"n": (1, 2)})
        {'n': [1, 2]}
        >>> storable_arguments({"n": float("nan")})
        {'__unparseable__': 'not a JSON object'}
    """
    refusal = _refusal(arguments, max_bytes)
    if refusal is None:
        try:
            text = _ENCODER.encode(arguments)
            text.encode("utf-8")
            copy: dict[str, Any] = json.loads(text)
        except (ValueError, TypeError):  # lone surrogates and endless ints are ValueErrors
            refusal = "not a JSON object"
        else:
            return copy
    return {UNPARSEABLE: refusal}


def _refusal(arguments: object, max_bytes: int) -> str | None:
    """Look at every node once, level by level; bounded in work whatever shares or contains what."""
    if not isinstance(arguments, dict):
        return "not a JSON object"
    left = max_bytes
    level: list[object] = [arguments]
    depth = 0
    while level:
        below: list[object] = []
        for item in level:
            left -= len(item) + 1 if isinstance(item, str) else 1
            if left < 0:
                return "too large"
            if isinstance(item, str):
                if "\0" in item:
                    return "not a JSON object"
            elif isinstance(item, _CONTAINERS):
                if depth == MAX_DEPTH:
                    return "nested too deeply"
                below.extend(item)
                if isinstance(item, dict):
                    below.extend(item.values())
        level = below
        depth += 1
    return None


# Reading


def check_messages(value: object) -> list[Message]:
    """Check a conversation that came from outside: graph state, a snapshot, a summariser.

    Args:
        value: What should be a list of messages, newest last.

    Returns:
        A new list of the same messages.

    Raises:
        AgentError: It is not; the message names the place and never a value.

    Example:
        >>> check_messages([{"role": "robot", "content": "x"}])
        Traceback (most recent call last):
            ...
        guardchart.errors.AgentError: messages[0]: unknown role
    """
    if not isinstance(value, list | tuple):
        raise AgentError("messages: expected a list")
    for index, message in enumerate(value):
        problem = _problem(message)
        if problem:
            raise AgentError(f"messages[{index}]: {problem}")
    return list(value)


def _problem(message: object) -> str | None:
    if not isinstance(message, Mapping):
        return "expected a mapping"
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        return "unknown role"
    if not _KEYS.issuperset(message):
        return "unknown key"
    content = message.get("content")
    if content is not None and not isinstance(content, str):
        return "content must be text"
    if content is None and role != "assistant":
        return "content is missing"
    if "name" in message and not isinstance(message["name"], str):
        return "name must be text"
    if (role == "tool") != ("tool_call_id" in message):
        return "a tool message, and no other, has a tool_call_id"
    if role == "tool" and not isinstance(message["tool_call_id"], str):
        return "tool_call_id must be text"
    if "tool_calls" not in message:
        return None
    if role != "assistant":
        return "only an assistant message has tool_calls"
    return _calls_problem(message["tool_calls"])


def _calls_problem(calls: object) -> str | None:
    if not isinstance(calls, list | tuple):
        return "tool_calls must be a list"
    for call in calls:
        if not isinstance(call, Mapping) or not _CALL_KEYS.issuperset(call):
            return "a tool call is {id, name, arguments}"
        if not isinstance(call.get("id"), str) or not isinstance(call.get("name"), str):
            return "a tool call's id and name must be text"
        if not isinstance(call.get("arguments"), Mapping):
            return "a tool call's arguments must be a mapping"
    return None


def call_ids(messages: Iterable[Mapping[str, Any]]) -> list[str]:
    """Ids of every tool call a conversation proposes or answers, first seen first, each once.

    Example:
        >>> call_ids([assistant_turn(None, [ToolCall("c1", "t", {})]), tool_turn("c1", "ok")])
        ['c1']
    """
    seen: dict[str, None] = {}
    for message in messages:
        for call in message.get("tool_calls") or ():
            seen.setdefault(call["id"])
        if message.get("role") == "tool":
            seen.setdefault(message["tool_call_id"])
    return list(seen)


def open_calls(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """Ids of proposed calls that have no result yet, in the order they were proposed.

    Example:
        >>> open_calls([assistant_turn(None, [ToolCall("c1", "t", {})])])
        ['c1']
    """
    waiting: dict[str, None] = {}
    for message in messages:
        for call in message.get("tool_calls") or ():
            waiting.setdefault(call["id"])
        if message.get("role") == "tool":
            waiting.pop(message["tool_call_id"], None)
    return list(waiting)
