"""A conversation as the provider adapters read it: either form, one message after another.

Compact messages (plain dicts) and messages of typed parts (objects, or their JSON) become the
same few fields; images and files are told apart into bytes and URLs.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from pydantic import TypeAdapter

from guardchart.agents._messages import ROLES
from guardchart.agents._parts import (
    AgentMessage,
    AssistantMessage,
    ContentOutput,
    ErrorJsonOutput,
    ErrorTextOutput,
    FilePart,
    ImagePart,
    TextOutput,
    TextPart,
    ToolCallPart,
    ToolMessage,
    ToolResultPart,
)
from guardchart.agents._wire import read_wire
from guardchart.errors import AgentError, NotSupportedError

__all__ = ["Media", "Turn", "media_of", "options_of", "read_turns", "text_only"]

Part: TypeAlias = str | TextPart | ImagePart | FilePart
"""A piece of a message; plain text stands for a text part without options."""


@dataclass(slots=True)
class Turn:
    """One message, whichever form it came in.

    Attributes:
        role: ``system``, ``user``, ``assistant`` or ``tool``.
        parts: Text, images and files, in order.
        calls: Proposed calls: ``{"id", "name", "arguments"}`` each.
        call_id: Of a result, the call it answers.
        failed: Whether a result says that the tool failed.
        source: What provider options are read from.
    """

    role: str
    parts: list[Part] = field(default_factory=list)
    calls: list[Mapping[str, Any]] = field(default_factory=list)
    call_id: str = ""
    failed: bool = False
    source: Any = None


_MESSAGE: Final[TypeAdapter[Any]] = TypeAdapter(AgentMessage)


def read_turns(messages: Iterable[Any]) -> Iterator[Turn]:
    """Read a conversation in compact form, in parts, or mixed.

    Raises:
        AgentError: A message is neither; it is named by its place, never by a value.
    """
    for index, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else message
        if content is None or isinstance(content, str):
            yield _compact(message, content, index)
        else:
            yield from _typed(
                read_wire(f"messages[{index}]", _MESSAGE.validate_python, message), index
            )


def _compact(message: Any, content: str | None, index: int) -> Turn:
    role = message.get("role") if isinstance(message, Mapping) else None
    if not isinstance(role, str) or role not in ROLES:
        raise AgentError(f"messages[{index}]: unknown role")
    parts: list[Part] = [content] if content else []
    if role == "tool":
        return Turn(role, parts, call_id=message["tool_call_id"], source=message)
    calls = message.get("tool_calls") if role == "assistant" else None
    return Turn(role, parts, list(calls or ()), source=message)


def _typed(message: Any, index: int) -> Iterator[Turn]:
    content = message.content
    if isinstance(message, ToolMessage):
        for part in content:
            yield _result(part, index)
        return
    turn = Turn(message.role, source=message)
    for part in [content] if isinstance(content, str) else content:
        if isinstance(part, ToolCallPart):
            arguments = part.input if isinstance(part.input, Mapping) else {}
            turn.calls.append(
                {"id": part.tool_call_id, "name": part.tool_name, "arguments": arguments}
            )
        elif isinstance(part, ToolResultPart):
            raise NotSupportedError(
                f"messages[{index}]: results of tools that a provider ran itself cannot be sent"
            )
        else:
            turn.parts.append(part)
    if isinstance(message, AssistantMessage) and any(isinstance(p, FilePart) for p in turn.parts):
        raise NotSupportedError(f"messages[{index}]: a model's own files cannot be sent back")
    yield turn


def _result(part: ToolResultPart, index: int) -> Turn:
    output = part.output
    failed = isinstance(output, ErrorTextOutput | ErrorJsonOutput)
    turn = Turn("tool", call_id=part.tool_call_id, failed=failed, source=part)
    if isinstance(output, ContentOutput):
        turn.parts.extend(output.value)
    elif isinstance(output, TextOutput | ErrorTextOutput):
        turn.parts.append(output.value)
    else:
        try:
            turn.parts.append(json.dumps(output.value, ensure_ascii=False, allow_nan=False))
        except (TypeError, ValueError, RecursionError):
            raise AgentError(f"messages[{index}]: a tool result is not JSON") from None
    return turn


def text_only(turn: Turn, what: str) -> str:
    """The text of a turn where a provider takes nothing else.

    Raises:
        NotSupportedError: It holds an image or a file.

    Example:
        >>> text_only(Turn("user", ["a", "b"]), "a system message")
        'a\\nb'
    """
    texts = []
    for part in turn.parts:
        if not isinstance(part, str | TextPart):
            raise NotSupportedError(f"{what} cannot hold a part of type {part.type!r} here")
        texts.append(part if isinstance(part, str) else part.text)
    return "\n".join(texts)


def options_of(source: Any, provider: str) -> dict[str, Any]:
    """The options a message or part carries for one provider; ``{}`` without any.

    Example:
        >>> options_of({"provider_options": {"openai": {"detail": "low"}}}, "openai")
        {'detail': 'low'}
    """
    if isinstance(source, Mapping):
        found = source.get("provider_options") or source.get("providerOptions")
    else:
        found = getattr(source, "provider_options", None)
    own = found.get(provider) if isinstance(found, Mapping) else None
    return dict(own) if isinstance(own, Mapping) else {}


# Images and files


@dataclass(frozen=True, slots=True)
class Media:
    """An image or a file: where it is, or what it is.

    Attributes:
        kind: Its media type, lower case, without parameters.
        url: An http or https URL, or None.
        data: Its bytes as base64 text, "" where there is a URL.
    """

    kind: str
    url: str | None
    data: str

    @property
    def data_url(self) -> str:
        """The bytes as a ``data:`` URL."""
        return f"data:{self.kind};base64,{self.data}"

    def text(self) -> str:
        """The bytes read as UTF-8.

        Raises:
            AgentError: They are none.
        """
        try:
            return base64.b64decode(self.data).decode("utf-8")
        except UnicodeDecodeError:
            raise AgentError("a text file is not UTF-8") from None


_MAGIC: Final = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF87a", "image/gif"),
    (b"GIF89a", "image/gif"),
)


def media_of(part: ImagePart | FilePart) -> Media:
    """Tell bytes, base64 text, ``data:`` URLs and other URLs apart.

    Returns:
        The media. An image without a media type gets it from its ``data:`` URL or its first
        bytes; a URL without one counts as an image.

    Raises:
        AgentError: It is nothing of these, or an image of unknown type.

    Example:
        >>> media_of(ImagePart(image="https://example.org/cat.png")).url
        'https://example.org/cat.png'
        >>> media_of(FilePart(data=b"hi", media_type="text/plain")).data
        'aGk='
    """
    value = part.image if isinstance(part, ImagePart) else part.data
    kind = (part.media_type or "").partition(";")[0].strip().lower()
    if isinstance(value, bytes):
        return _checked(kind or _sniffed(value), base64.b64encode(value).decode("ascii"))
    head = value[:8].lower()
    if head.startswith(("http://", "https://")):
        return Media(kind or "image/*", value, "")
    if head.startswith("data:"):
        named, _, rest = value[5:].partition(",")
        said, _, coding = named.partition(";")
        if not coding.endswith("base64"):
            raise AgentError(f"a part of type {part.type!r}: its data: URL must be base64")
        value, kind = rest, kind or said.strip().lower()
    try:
        raw = base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError):
        raise AgentError(
            f"a part of type {part.type!r}: expected bytes, base64 text, or a data:, http: or "
            "https: URL"
        ) from None
    return _checked(kind or _sniffed(raw), value)


def _sniffed(raw: bytes) -> str:
    if raw[:4] == b"RIFF" and raw[8:12] == b"WEBP":
        return "image/webp"
    return next((kind for magic, kind in _MAGIC if raw.startswith(magic)), "")


def _checked(kind: str, data: str) -> Media:
    if not kind:
        raise AgentError("an image of unknown type: give its media_type")
    return Media(kind, None, data)
