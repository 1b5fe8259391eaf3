"""Messages made of typed parts: text, images, files, tool calls and their results.

What executors and models of any modality are handed. A context holds either this form as JSON
(``to_json``) or the compact form of ``guardchart.agents._messages``; `messages_from_compact`
and `messages_to_compact` convert.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Final, Literal, TypeAlias, TypeVar

from pydantic import ConfigDict, Discriminator, StrictStr, Tag, TypeAdapter

from guardchart.agents._messages import Message, assistant_turn, check_messages, tool_turn
from guardchart.agents._wire import Bytes, Wire, read_wire
from guardchart.errors import AgentError
from guardchart.gate import ToolCall

__all__ = [
    "AgentMessage",
    "AssistantMessage",
    "ContentOutput",
    "ErrorJsonOutput",
    "ErrorTextOutput",
    "FilePart",
    "ImagePart",
    "JsonOutput",
    "SystemMessage",
    "TextOutput",
    "TextPart",
    "ToolCallPart",
    "ToolMessage",
    "ToolResultOutput",
    "ToolResultPart",
    "UserMessage",
    "assistant_message",
    "messages_from_compact",
    "messages_schema",
    "messages_to_compact",
    "system_message",
    "tool_message",
    "user_message",
]

_MessageT = TypeVar("_MessageT", bound=Wire)

ProviderOptions: TypeAlias = dict[str, dict[str, Any]]
"""Options for one provider each, by its name; passed through as they are."""


class _Part(Wire):
    # A provider's own fields survive a round trip; provider_options is the place meant for them.
    model_config = ConfigDict(extra="allow")

    provider_options: ProviderOptions | None = None


def _among(field: str, *known: str) -> Any:
    """A discriminator that never repeats an unknown tag."""

    def tag(value: Any) -> str | None:
        found = value.get(field) if isinstance(value, Mapping) else getattr(value, field, None)
        return found if isinstance(found, str) and found in known else None

    where = "" if field == "role" else ", or one that has no place here"
    return Discriminator(
        tag,
        custom_error_type=f"unknown_{field}",
        custom_error_message=f"unknown {'role' if field == 'role' else 'type'}{where}",
    )


def _is_text(value: Any) -> str:
    return "text" if isinstance(value, str) else "parts"


_TEXT_OR_PARTS: Final = Discriminator(_is_text)


# Parts


class TextPart(_Part):
    """A piece of text.

    Example:
        >>> TextPart(text="hello").to_json()
        {'type': 'text', 'text': 'hello'}
    """

    type: Literal["text"] = "text"
    text: StrictStr


class ImagePart(_Part):
    """An image: bytes, base64 text or a URL.

    Bytes become base64 text in JSON, and a URL may expire: whoever persists a context that holds
    either decides how it is kept. ``media_type`` is an IANA type such as ``"image/png"``.

    Example:
        >>> ImagePart(image="https://example.org/cat.png").media_type is None
        True
    """

    type: Literal["image"] = "image"
    image: Bytes
    media_type: StrictStr | None = None


class FilePart(_Part):
    """A file: bytes, base64 text or a URL, persisted as `ImagePart` says.

    Example:
        >>> FilePart(data=b"hi", media_type="text/plain").to_json()["data"]
        'aGk='
    """

    type: Literal["file"] = "file"
    data: Bytes
    media_type: StrictStr
    filename: StrictStr | None = None


class ToolCallPart(_Part):
    """A tool call that the model proposes.

    Example:
        >>> ToolCallPart(tool_call_id="c1", tool_name="lookup", input={"id": 4}).to_json()
        {'type': 'tool-call', 'toolCallId': 'c1', 'toolName': 'lookup', 'input': {'id': 4}}
    """

    type: Literal["tool-call"] = "tool-call"
    tool_call_id: StrictStr
    tool_name: StrictStr
    input: Any


class TextOutput(Wire):
    """A tool's result as text.

    Example:
        >>> TextOutput(value="shipped").to_json()
        {'type': 'text', 'value': 'shipped'}
    """

    model_config = ConfigDict(extra="allow")

    type: Literal["text"] = "text"
    value: StrictStr


class JsonOutput(Wire):
    """A tool's result as JSON.

    Example:
        >>> JsonOutput(value={"state": "shipped"}).to_json()
        {'type': 'json', 'value': {'state': 'shipped'}}
    """

    model_config = ConfigDict(extra="allow")

    type: Literal["json"] = "json"
    value: Any


class ErrorTextOutput(Wire):
    """A tool's failure as text.

    Example:
        >>> ErrorTextOutput(value="no such order").to_json()
        {'type': 'error-text', 'value': 'no such order'}
    """

    model_config = ConfigDict(extra="allow")

    type: Literal["error-text"] = "error-text"
    value: StrictStr


class ErrorJsonOutput(Wire):
    """A tool's failure as JSON.

    Example:
        >>> ErrorJsonOutput(value={"code": 404}).to_json()
        {'type': 'error-json', 'value': {'code': 404}}
    """

    model_config = ConfigDict(extra="allow")

    type: Literal["error-json"] = "error-json"
    value: Any


ContentPart = Annotated[
    Annotated[TextPart, Tag("text")] | Annotated[ImagePart, Tag("image")],
    _among("type", "text", "image"),
]


class ContentOutput(Wire):
    """A tool's result made of text and images.

    Example:
        >>> ContentOutput(value=[TextPart(text="a cat")]).value[0].text
        'a cat'
    """

    model_config = ConfigDict(extra="allow")

    type: Literal["content"] = "content"
    value: list[ContentPart]


ToolResultOutput = Annotated[
    Annotated[TextOutput, Tag("text")]
    | Annotated[JsonOutput, Tag("json")]
    | Annotated[ErrorTextOutput, Tag("error-text")]
    | Annotated[ErrorJsonOutput, Tag("error-json")]
    | Annotated[ContentOutput, Tag("content")],
    _among("type", "text", "json", "error-text", "error-json", "content"),
]
"""What a tool gave: text, JSON, a failure as either, or content parts."""


class ToolResultPart(_Part):
    """The result of one tool call.

    Example:
        >>> part = ToolResultPart(tool_call_id="c1", tool_name="lookup",
        ...                       output={"type": "text", "value": "shipped"})
        >>> part.output.value
        'shipped'
    """

    type: Literal["tool-result"] = "tool-result"
    tool_call_id: StrictStr
    tool_name: StrictStr
    output: ToolResultOutput


# Messages

UserPart = Annotated[
    Annotated[TextPart, Tag("text")]
    | Annotated[ImagePart, Tag("image")]
    | Annotated[FilePart, Tag("file")],
    _among("type", "text", "image", "file"),
]
AssistantPart = Annotated[
    Annotated[TextPart, Tag("text")]
    | Annotated[FilePart, Tag("file")]
    | Annotated[ToolCallPart, Tag("tool-call")]
    | Annotated[ToolResultPart, Tag("tool-result")],
    _among("type", "text", "file", "tool-call", "tool-result"),
]


class SystemMessage(_Part):
    """Instructions; text only.

    Example:
        >>> SystemMessage(content="Be brief.").role
        'system'
    """

    role: Literal["system"] = "system"
    content: StrictStr


class UserMessage(_Part):
    """What a user says: text, or parts of text, images and files.

    Example:
        >>> UserMessage(content=[TextPart(text="hello")]).content[0].text
        'hello'
    """

    role: Literal["user"] = "user"
    content: Annotated[
        Annotated[StrictStr, Tag("text")] | Annotated[list[UserPart], Tag("parts")],
        _TEXT_OR_PARTS,
    ]


class AssistantMessage(_Part):
    """What the model says: text, or parts of text, files, tool calls and their results.

    Results stand here only where the provider itself ran the tool.

    Example:
        >>> AssistantMessage(content="Done.").to_json()
        {'role': 'assistant', 'content': 'Done.'}
    """

    role: Literal["assistant"] = "assistant"
    content: Annotated[
        Annotated[StrictStr, Tag("text")] | Annotated[list[AssistantPart], Tag("parts")],
        _TEXT_OR_PARTS,
    ]


class ToolMessage(_Part):
    """Results of tool calls.

    Example:
        >>> result = ToolResultPart(tool_call_id="c1", tool_name="lookup",
        ...                         output=TextOutput(value="shipped"))
        >>> ToolMessage(content=[result]).role
        'tool'
    """

    role: Literal["tool"] = "tool"
    content: list[ToolResultPart]


AgentMessage = Annotated[
    Annotated[SystemMessage, Tag("system")]
    | Annotated[UserMessage, Tag("user")]
    | Annotated[AssistantMessage, Tag("assistant")]
    | Annotated[ToolMessage, Tag("tool")],
    _among("role", "system", "user", "assistant", "tool"),
]
"""One message, told apart by its role; usable as a pydantic annotation."""

messages_schema: TypeAdapter[list[AgentMessage]] = TypeAdapter(
    list[AgentMessage], config=ConfigDict(hide_input_in_errors=True)
)
"""Validates, writes and describes a conversation, newest last.

``messages_schema.validate_python(value)`` reads dicts of either spelling and message objects,
``dump_python(messages, mode="json")`` writes camelCase.
"""


def system_message(
    content: str, *, provider_options: ProviderOptions | None = None
) -> SystemMessage:
    """A system message.

    Args:
        content: The instructions.
        provider_options: Options by provider.

    Raises:
        AgentError: The content is not text.

    Example:
        >>> system_message("Be brief.").to_json()
        {'role': 'system', 'content': 'Be brief.'}
    """
    return _made(SystemMessage, content, provider_options)


def user_message(
    content: str | Sequence[TextPart | ImagePart | FilePart | Mapping[str, Any]],
    *,
    provider_options: ProviderOptions | None = None,
) -> UserMessage:
    """A user message.

    Args:
        content: Text, or text, image and file parts as objects or mappings.
        provider_options: Options by provider.

    Raises:
        AgentError: A part has no place here, or misses a field.

    Example:
        >>> message = user_message([{"type": "text", "text": "What is this?"},
        ...                         ImagePart(image="https://example.org/cat.png")])
        >>> [part.type for part in message.content]
        ['text', 'image']
    """
    return _made(UserMessage, content, provider_options)


def assistant_message(
    content: str
    | Sequence[TextPart | FilePart | ToolCallPart | ToolResultPart | Mapping[str, Any]],
    *,
    provider_options: ProviderOptions | None = None,
) -> AssistantMessage:
    """An assistant message.

    Args:
        content: Text, or text, file, tool-call and tool-result parts as objects or mappings.
        provider_options: Options by provider.

    Raises:
        AgentError: A part has no place here, or misses a field.

    Example:
        >>> assistant_message("Done.").role
        'assistant'
    """
    return _made(AssistantMessage, content, provider_options)


def tool_message(
    content: Sequence[ToolResultPart | Mapping[str, Any]],
    *,
    provider_options: ProviderOptions | None = None,
) -> ToolMessage:
    """The results of tool calls.

    Args:
        content: Tool-result parts as objects or mappings.
        provider_options: Options by provider.

    Raises:
        AgentError: A part is no tool result, or misses a field.

    Example:
        >>> result = {"type": "tool-result", "toolCallId": "c1", "toolName": "lookup",
        ...           "output": {"type": "json", "value": {"state": "shipped"}}}
        >>> tool_message([result]).content[0].output.value
        {'state': 'shipped'}
    """
    return _made(ToolMessage, content, provider_options)


def _made(cls: type[_MessageT], content: Any, provider_options: Any) -> _MessageT:
    if isinstance(content, tuple):
        content = list(content)
    data = {"content": content, "provider_options": provider_options}
    return cls.from_json(data)


# The compact form


def messages_from_compact(messages: Iterable[Mapping[str, Any]]) -> list[AgentMessage]:
    """The parts form of a conversation in compact form; one message for each.

    Args:
        messages: ``{role, content, tool_calls?, tool_call_id?, name?}``, newest last, as
            TOOL_LOOP's ``context["messages"]`` holds them.

    Returns:
        A new list. A result becomes text; one that does not name its tool gets the name from
        the call it answers, ``""`` where there is none.

    Raises:
        AgentError: It is no conversation; the message names the place.

    Example:
        >>> from guardchart.agents import messages_from_compact
        >>> messages_from_compact([{"role": "user", "content": "hello"}])[0].content
        'hello'
    """
    names: dict[str, str] = {}
    return [_from_compact(each, names) for each in check_messages(_listed(messages))]


def _listed(messages: Any) -> Any:
    """A list of any iterable of messages; what is none is left for the check to refuse."""
    plain = isinstance(messages, list | str | Mapping) or not isinstance(messages, Iterable)
    return messages if plain else list(messages)


def _from_compact(message: Message, names: dict[str, str]) -> AgentMessage:
    role, content = message["role"], message.get("content")
    if role == "system":
        return SystemMessage(content=content or "")
    if role == "user":
        return UserMessage(content=content or "")
    if role == "tool":
        id_ = message["tool_call_id"]
        name = message.get("name") or names.get(id_, "")
        part = ToolResultPart(
            tool_call_id=id_, tool_name=name, output=TextOutput(value=content or "")
        )
        return ToolMessage(content=[part])
    calls = message.get("tool_calls")
    if not calls and content is not None:
        return AssistantMessage(content=content)
    parts: list[Any] = [] if content is None else [TextPart(text=content)]
    for call in calls or ():
        names[call["id"]] = call["name"]
        arguments = dict(call.get("arguments") or {})
        parts.append(ToolCallPart(tool_call_id=call["id"], tool_name=call["name"], input=arguments))
    return AssistantMessage(content=parts)


def messages_to_compact(
    messages: Iterable[AgentMessage | Mapping[str, Any]],
) -> list[Message]:
    """The compact form of a conversation made of parts.

    Args:
        messages: Message objects or their JSON, newest last.

    Returns:
        A new list in JSON types. Several text parts are joined by a newline, each tool result
        becomes a message of its own, JSON results become their text. Provider options are
        dropped.

    Raises:
        AgentError: It is no conversation, or holds an image or a file, for which the compact
            form has no place; the message says where.

    Example:
        >>> messages_to_compact([user_message("hello"), assistant_message("hi")])[1]
        {'role': 'assistant', 'content': 'hi'}
    """
    read = read_wire("messages", messages_schema.validate_python, _listed(messages))
    compact: list[Message] = []
    for index, message in enumerate(read):
        compact.extend(_to_compact(message, f"messages[{index}]"))
    return compact


def _to_compact(message: Any, where: str) -> Iterable[Message]:
    content = message.content
    if isinstance(message, ToolMessage):
        return [_result(part, where) for part in content]
    if isinstance(message, AssistantMessage):
        parts = [TextPart(text=content)] if isinstance(content, str) else content
        results = [_result(part, where) for part in parts if isinstance(part, ToolResultPart)]
        calls = [
            ToolCall(part.tool_call_id, part.tool_name, part.input)
            for part in parts
            if isinstance(part, ToolCallPart)
        ]
        spoken = [part for part in parts if not isinstance(part, ToolCallPart | ToolResultPart)]
        text = _text(spoken, where) if spoken else None
        return [assistant_turn(text, calls), *results]
    text = content if isinstance(content, str) else _text(content, where)
    return [{"role": message.role, "content": text}]


def _text(parts: Iterable[Any], where: str) -> str:
    texts = []
    for part in parts:
        if not isinstance(part, TextPart):
            raise AgentError(f"{where}: the compact form has no place for a {part.type} part")
        texts.append(part.text)
    return "\n".join(texts)


def _result(part: ToolResultPart, where: str) -> Message:
    output = part.output
    if isinstance(output, ContentOutput):
        text = _text(output.value, where)
    elif isinstance(output, TextOutput | ErrorTextOutput):
        text = output.value
    else:
        try:
            text = json.dumps(output.value, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError, RecursionError):
            raise AgentError(f"{where}: a tool result is not JSON") from None
    return tool_turn(part.tool_call_id, text, part.tool_name or None)
