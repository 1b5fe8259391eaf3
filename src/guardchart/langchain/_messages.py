"""Conversations in LangChain's form and in guardchart's, both ways.

The compact form is ``{role, content, tool_calls?, tool_call_id?, name?}``. Its content is text,
or, where a message holds more than text, a list of parts: ``{"type": "text", "text"}``,
``{"type": "image", "image", "mediaType"?}`` and ``{"type": "file", "data", "mediaType",
"filename"?}``, images and data being a URL or base64. On the way in, the parts of a typed message
(``tool-call``, ``tool-result``) are understood, too.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping
from typing import Any, Final

from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
    convert_to_messages,
)

from guardchart.errors import AgentConfigError
from guardchart.gate._arguments import UNPARSEABLE

__all__ = [
    "from_compact",
    "from_langchain_messages",
    "text_of_blocks",
    "to_compact",
    "to_langchain_messages",
]

_ROLES: Final = {"human": "user", "ai": "assistant", "tool": "tool", "system": "system"}
_BLOCKS: Final = {"image": "image", "image_url": "image", "audio": "audio", "video": "video"}
# What providers put beside the text of an answer; its calls are read from `tool_calls`.
_SILENT: Final = frozenset(
    {"tool_use", "tool_call", "tool_call_chunk", "thinking", "reasoning", "redacted_thinking"}
)
_MEDIA: Final = {
    "image": "image/*",
    "audio": "audio/*",
    "video": "video/*",
    "file": "application/octet-stream",
    "text-plain": "text/plain",
}


# From LangChain


def from_langchain_messages(messages: Iterable[Any]) -> list[dict[str, Any]]:
    """Return LangChain messages in the compact form.

    Args:
        messages: Messages, newest last; what LangChain itself converts (tuples, dicts with a
            role) is taken, too.

    Returns:
        One compact message each. Content that is more than text is a list of parts; what has no
        part (a citation, a block only its provider understands) is named in a text part and not
        carried. Reasoning is left out: it belongs to the answer it led to.

    Raises:
        AgentConfigError: Something is no message, or has no place in a conversation.

    Example:
        >>> from_langchain_messages([HumanMessage("hi")])
        [{'role': 'user', 'content': 'hi'}]
    """
    try:
        converted = convert_to_messages(list(messages))
    except Exception:
        raise AgentConfigError("from_langchain_messages: expected LangChain messages") from None
    return [_with_parts(to_compact(each), each) for each in converted]


def to_compact(message: BaseMessage) -> dict[str, Any]:
    """Return a LangChain message in the compact form, as text: other blocks are named.

    Raises:
        AgentConfigError: Its type has no place in a conversation with a model.

    Example:
        >>> to_compact(HumanMessage("hi"))
        {'role': 'user', 'content': 'hi'}
    """
    role = _ROLES.get(message.type.removesuffix("MessageChunk").lower())
    if role is None:
        raise AgentConfigError(
            f"a {type(message).__name__} has no place in the conversation; "
            "human, AI, tool and system messages have"
        )
    content = message.content
    compact: dict[str, Any] = {
        "role": role,
        "content": content if type(content) is str else text_of_blocks(content),
    }
    if role == "assistant":
        calls = message.tool_calls  # type: ignore[attr-defined]
        if calls:
            compact["content"] = compact["content"] or None
            compact["tool_calls"] = [
                {"id": call["id"] or "", "name": call["name"], "arguments": call["args"]}
                for call in calls
            ]
    elif role == "tool":
        compact["tool_call_id"] = message.tool_call_id  # type: ignore[attr-defined]
        if message.name:
            compact["name"] = message.name
    return compact


def text_of_blocks(blocks: Any) -> str:
    """Return the text of a message made of blocks; another kind of block is named, not carried.

    Example:
        >>> text_of_blocks([{"type": "text", "text": "see "}, {"type": "image", "url": "u"}])
        'see [image]'
    """
    parts = []
    for each in blocks:
        kind = "text" if isinstance(each, str) else each.get("type")
        text = each if isinstance(each, str) else each.get("text")
        if kind == "text" and isinstance(text, str):
            parts.append(text)
        elif kind not in _SILENT:
            parts.append(f"[{_BLOCKS.get(kind, 'attachment')}]")
    return "".join(parts)


def _with_parts(compact: dict[str, Any], message: BaseMessage) -> dict[str, Any]:
    if isinstance(message.content, str):
        return compact
    # LangChain reads each provider's own blocks as its standard ones.
    blocks = [block for block in message.content_blocks if block.get("type") not in _SILENT]
    if all(block.get("type") == "text" for block in blocks):
        return compact
    compact["content"] = [_part(block, compact["role"]) for block in blocks]
    return compact


def _part(block: Mapping[str, Any], role: str) -> dict[str, Any]:
    kind = str(block.get("type"))
    if kind == "text":
        return {"type": "text", "text": str(block.get("text", ""))}
    data = block.get("url") or block.get("base64")
    media = block.get("mime_type")
    if kind not in _MEDIA or not isinstance(data, str):
        return {"type": "text", "text": f"[{_BLOCKS.get(kind, 'attachment')}]"}
    if kind == "image" and role != "assistant":  # what a model draws is a file
        return {"type": "image", "image": data, **({"mediaType": media} if media else {})}
    name = block.get("filename") or (block.get("extras") or {}).get("filename")
    part = {"type": "file", "data": data, "mediaType": media or _MEDIA[kind]}
    return part if name is None else {**part, "filename": name}


# To LangChain


def to_langchain_messages(messages: Iterable[Any]) -> list[BaseMessage]:
    """Return a conversation as LangChain messages.

    Args:
        messages: Compact messages, or typed ones with parts, newest last.

    Returns:
        The messages, in order. A typed tool message with several results becomes one
        ``ToolMessage`` each.

    Raises:
        AgentConfigError: A role or part is unknown; the message names its place, no value.

    Example:
        >>> [m.type for m in to_langchain_messages([{"role": "user", "content": "hi"}])]
        ['human']
    """
    out: list[BaseMessage] = []
    for index, each in enumerate(messages):
        message = _plain(each)
        if message.get("role") not in ("user", "assistant", "tool", "system"):
            raise AgentConfigError(f"messages[{index}]: unknown role")
        try:
            out.extend(_messages(message))
        except (KeyError, TypeError, AttributeError, ValueError):
            raise AgentConfigError(f"messages[{index}]: a part is malformed or unknown") from None
    return out


def from_compact(compact: Mapping[str, Any], id: str | None = None) -> BaseMessage:
    """Return a compact message as the LangChain message of its role.

    Args:
        compact: One entry of the chart's ``messages``.
        id: The id the message gets in the channel.
    """
    role, content = compact.get("role"), compact.get("content")
    if content is None:
        content = ""
    elif not isinstance(content, str):
        content = [_block(_plain(part)) for part in content]
    if role == "assistant":
        calls = compact.get("tool_calls")
        if not calls:
            return AIMessage(content=content, id=id)
        return AIMessage(content=content, id=id, tool_calls=[_call(each) for each in calls])
    if role == "tool":
        return ToolMessage(
            content=content,
            id=id,
            tool_call_id=compact.get("tool_call_id") or "",
            name=compact.get("name"),
        )
    if role == "system":
        return SystemMessage(content=content, id=id)
    return HumanMessage(content=content, id=id)


def _plain(value: Any) -> Mapping[str, Any]:
    """A typed message or part as its wire form; a mapping as it is."""
    if type(value) is dict or isinstance(value, Mapping):
        return value
    dump = getattr(value, "model_dump", None)
    if dump is None:
        raise AgentConfigError("to_langchain_messages: expected messages in guardchart's form")
    plain: dict[str, Any] = dump(by_alias=True, exclude_none=True)
    return plain


def _messages(message: Mapping[str, Any]) -> list[BaseMessage]:
    content = message.get("content")
    if isinstance(content, str) or content is None:
        return [from_compact(message)]
    parts = [_plain(part) for part in content]
    if message["role"] == "tool" and "tool_call_id" not in message:
        return [_result(part) for part in parts]
    calls = [part for part in parts if part.get("type") == "tool-call"]
    rest = [part for part in parts if part.get("type") not in ("tool-call", "tool-result")]
    compact = {**message, "content": rest or None}
    if calls:
        compact["tool_calls"] = [
            {
                "id": _field(call, "toolCallId"),
                "name": _field(call, "toolName"),
                "arguments": call["input"],
            }
            for call in calls
        ]
    # A provider that ran a tool itself reports the result inside its own answer.
    results = [_result(part) for part in parts if part.get("type") == "tool-result"]
    return [from_compact(compact), *results]


def _field(part: Mapping[str, Any], name: str) -> Any:
    snake = "".join(f"_{c.lower()}" if c.isupper() else c for c in name)
    return part[name] if name in part else part[snake]


def _result(part: Mapping[str, Any]) -> ToolMessage:
    if part.get("type") != "tool-result":
        raise ValueError("a tool message holds tool-result parts")
    output = _plain(part["output"])
    kind, value = output["type"], output["value"]
    content: Any
    if kind in ("text", "error-text"):
        content = value
    elif kind in ("json", "error-json"):
        content = json.dumps(value, ensure_ascii=False)
    elif kind == "content":
        content = [_block(_plain(each)) for each in value]
    else:
        raise ValueError("an unknown kind of output")
    return ToolMessage(
        content=content,
        tool_call_id=_field(part, "toolCallId"),
        name=_field(part, "toolName"),
        status="error" if kind.startswith("error") else "success",
    )


def _block(part: Mapping[str, Any]) -> dict[str, Any]:
    kind = part["type"]
    if kind == "text":
        return {"type": "text", "text": part["text"]}
    if kind not in ("image", "file"):
        raise ValueError("an unknown kind of part")
    media = part.get("mediaType", part.get("media_type"))
    family = "image" if kind == "image" else _family(media)
    block: dict[str, Any] = {"type": family, **_data(part["image" if kind == "image" else "data"])}
    if media is not None:
        block.setdefault("mime_type", media)
    if part.get("filename") is not None:
        block["filename"] = part["filename"]
    return block


def _family(media: Any) -> str:
    family = str(media).partition("/")[0]
    return family if family in ("image", "audio", "video") else "file"


def _data(data: Any) -> dict[str, Any]:
    """Where a part's bytes are: a URL, or base64 with the type that a data URL names."""
    if isinstance(data, bytes | bytearray):
        return {"base64": base64.b64encode(bytes(data)).decode()}
    text = data if isinstance(data, str) else str(data)
    head, comma, body = text.partition(",")
    if comma and head.startswith("data:") and head.endswith(";base64"):
        return {"base64": body, "mime_type": head[len("data:") : -len(";base64")]}
    if "://" in text[:64] or text.startswith("data:"):
        return {"url": text}
    return {"base64": text}


def _call(call: Mapping[str, Any]) -> Any:
    """A proposed call; arguments that were no JSON object stay a note, so that it can be answered.

    A result must follow its call, and providers know a call only by ``tool_calls``.
    """
    arguments = call.get("arguments")
    args = dict(arguments) if isinstance(arguments, Mapping) else {UNPARSEABLE: str(arguments)}
    return {
        "id": call.get("id"),
        "name": call.get("name") or "",
        "args": args,
        "type": "tool_call",
    }
