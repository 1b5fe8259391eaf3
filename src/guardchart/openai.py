"""OpenAI's Chat Completions as a ``ModelCall``, and every service that speaks the same protocol.

The three mapping functions are pure and need no SDK; ``openai_model`` needs ``pip install
openai``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from guardchart.agents._messages import safe_text
from guardchart.agents._models import ModelResponse, ModelSettings, ToolSchema
from guardchart.agents._parts import FilePart, ImagePart, TextPart
from guardchart.agents._prices import Prices, check_prices, read_usage
from guardchart.agents._provider_messages import Turn, media_of, options_of, read_turns, text_only
from guardchart.agents._provider_model import ProviderModel, provider_prices
from guardchart.agents._providers import (
    Names,
    check_options,
    field,
    items,
    missing_sdk,
    own_name,
    read_arguments,
    tool_parts,
    wire_name,
)
from guardchart.errors import AgentConfigError, AgentError, NotSupportedError
from guardchart.gate import ToolCall

__all__ = ["from_openai_response", "openai_model", "to_openai_messages", "to_openai_tools"]

_RESERVED = frozenset({"functions", "function_call", "messages", "model", "stream", "tools"})
_CAPS = ("max_completion_tokens", "max_tokens")


def openai_model(
    client: Any,
    model: str = "gpt-4o-mini",
    *,
    prices: Mapping[str, float] | None = None,
    **create_kw: Any,
) -> ProviderModel:
    """Make a model of an OpenAI client.

    Args:
        client: ``openai.AsyncOpenAI()``, ``openai.OpenAI()`` (a sync model, for the sync
            engine), or a client of a compatible service.
        model: Model name.
        prices: ``{"input_per_mtok", "output_per_mtok"}`` in US dollars. None takes those that
            the genai-prices package knows, where it is installed and knows the service and the
            model; else ``cost_usd`` stays 0 and no cost budget can trip.
        **create_kw: More arguments of ``chat.completions.create``, e.g. ``temperature``.
            ``max_completion_tokens`` (``max_tokens`` for services that only know that) caps one
            answer, and so what a budget can be overshot by. ``stream_options=None`` leaves that
            option out, for services that refuse it; usage is then an estimate where it streams.

    Returns:
        A ``ModelCall`` that streams. The SDK's own errors pass through it.

    Raises:
        MissingExtraError: The SDK is not installed; the message names the ``pip install``.
        AgentConfigError: Prices are invalid, or an option is one the adapter sets itself.

    Source: xstate-statemachine, agents reference: openai_model.
    """
    try:
        import openai  # noqa: F401
    except ImportError as exc:
        raise missing_sdk("openai") from exc
    check_options("openai_model", create_kw, _RESERVED)
    if create_kw.get("n", 1) != 1:
        raise AgentConfigError("openai_model: one answer a turn; leave `n` out")
    known = provider_prices(client, model, check_prices(prices))
    options = dict(create_kw)
    caps = [name for name in _CAPS if options.get(name) is not None]
    cap_option = caps[0] if caps else _CAPS[0 if _is_openai(client) or _is_azure(client) else 1]

    def request(
        messages: Sequence[Any], tools: Sequence[ToolSchema], names: Names
    ) -> dict[str, Any]:
        sent = {"model": model, **options, "messages": to_openai_messages(messages, names=names)}
        return {**sent, "tools": to_openai_tools(tools, names=names)} if tools else sent

    return ProviderModel(
        client.chat.completions.create,
        model,
        request=request,
        parse=lambda response, names: _response(response, known, names),
        reader=_Chunks,
        stream_options={"stream": True, "stream_options": {"include_usage": True}},
        cap_option=cap_option,
        provider="openai" if _is_openai(client) else None,
        prices=known,
        max_output_tokens=options.get(cap_option),
        settings=_settings,
    )


def _is_openai(client: Any) -> bool:
    """Whether a client talks to OpenAI itself, and not to a service that speaks its protocol."""
    url = str(getattr(client, "base_url", "https://api.openai.com/"))
    return url.startswith("https://api.openai.com/")


def _is_azure(client: Any) -> bool:
    """Whether a client talks to Azure, which runs OpenAI's own models."""
    host = str(getattr(client, "base_url", "")).partition("://")[2].partition("/")[0]
    return host.endswith((".openai.azure.com", ".services.ai.azure.com"))


def _settings(wanted: ModelSettings) -> dict[str, Any]:
    """What a request wants, as arguments of ``create``."""
    names = {
        "temperature": "temperature",
        "top_p": "top_p",
        "seed": "seed",
        "stop_sequences": "stop",
    }
    sent = {names[key]: value for key, value in wanted.given().items() if key in names}
    if wanted.force_tool:
        sent |= {"tool_choice": "required", "parallel_tool_calls": False}
    return sent


def to_openai_messages(
    messages: Iterable[Any], *, names: Names | None = None
) -> list[dict[str, Any]]:
    """Write a conversation as Chat Completions messages.

    Args:
        messages: Messages, newest last: compact ones, or messages of parts (objects or their
            JSON). Images are sent as they are, PDF and audio files as such, text files as text;
            ``provider_options={"openai": {"detail": "low"}}`` on a part adds to what is sent.
        names: Wire names of the request's tools, where they differ from their own.

    Returns:
        One message for each, and for each tool result; arguments of calls as JSON text.

    Raises:
        AgentError: A message is malformed; it is named by its place.
        NotSupportedError: The API has no place for a part: a file of another type or by URL, an
            image in a tool's result, a model's own file.

    Source: xstate-statemachine, agents reference: provider helpers.

    Example:
        >>> to_openai_messages([{"role": "tool", "tool_call_id": "c1", "content": "ok"}])
        [{'role': 'tool', 'tool_call_id': 'c1', 'content': 'ok'}]
    """
    return [_message(turn, names) for turn in read_turns(messages)]


def _message(turn: Turn, names: Names | None) -> dict[str, Any]:
    if turn.role == "user":
        return {"role": "user", "content": _content(turn)}
    text = text_only(turn, "a tool result" if turn.role == "tool" else f"a {turn.role} message")
    if turn.role == "tool":
        return {"role": "tool", "tool_call_id": turn.call_id, "content": text}
    if not turn.calls:
        return {"role": turn.role, "content": text}
    return {
        "role": "assistant",
        "content": text or None,
        "tool_calls": [
            {
                "id": call["id"],
                "type": "function",
                "function": {
                    "name": wire_name(names, call["name"]),
                    "arguments": json.dumps(call["arguments"], ensure_ascii=False),
                },
            }
            for call in turn.calls
        ],
    }


def _content(turn: Turn) -> str | list[dict[str, Any]]:
    """Text where it is all there is, else a list of content parts."""
    if all(isinstance(part, str) for part in turn.parts):
        return text_only(turn, "a user message")
    return [_part(part) for part in turn.parts]


def _part(part: str | TextPart | ImagePart | FilePart) -> dict[str, Any]:
    if isinstance(part, str | TextPart):
        return {"type": "text", "text": part if isinstance(part, str) else part.text}
    media, more = media_of(part), options_of(part, "openai")
    if isinstance(part, ImagePart) or media.kind.startswith("image/"):
        return {"type": "image_url", "image_url": {"url": media.url or media.data_url, **more}}
    if media.url is not None:
        raise NotSupportedError("OpenAI takes files as bytes, not by URL; images may be URLs")
    if media.kind in _AUDIO:
        audio = {"data": media.data, "format": _AUDIO[media.kind]}
        return {"type": "input_audio", "input_audio": {**audio, **more}}
    if media.kind == "application/pdf":
        file = {"filename": part.filename or "document.pdf", "file_data": media.data_url}
        return {"type": "file", "file": {**file, **more}}
    if media.kind.startswith("text/"):
        return {"type": "text", "text": media.text()}
    raise NotSupportedError("OpenAI takes images, PDF, wav, mp3 and text files, no other types")


_AUDIO = {
    "audio/mp3": "mp3",
    "audio/mpeg": "mp3",
    "audio/wav": "wav",
    "audio/wave": "wav",
    "audio/x-wav": "wav",
}


def to_openai_tools(
    tools: Iterable[ToolSchema], *, names: Names | None = None
) -> list[dict[str, Any]]:
    """Write tool schemas as Chat Completions function tools.

    Args:
        tools: ``{"name", "description", "parameters"}`` each.
        names: Wire names of the tools, where they differ from their own.

    Returns:
        One function tool for each, in order.

    Raises:
        AgentConfigError: A schema has no name.

    Example:
        >>> to_openai_tools([{"name": "now", "description": "The time."}])[0]["function"]["name"]
        'now'
    """
    return [_tool(tool, names) for tool in tools]


def _tool(tool: ToolSchema, names: Names | None) -> dict[str, Any]:
    name, description, parameters = tool_parts(tool)
    function: dict[str, Any] = {"name": wire_name(names, name), "parameters": parameters}
    if description:
        function["description"] = description
    return {"type": "function", "function": function}


def from_openai_response(
    response: Any, *, prices: Mapping[str, float] | None = None, names: Names | None = None
) -> ModelResponse:
    """Read a Chat Completions response, as an SDK object or as the JSON it came from.

    Args:
        response: The response.
        prices: The price sheet, for ``usage.cost_usd``.
        names: Wire names that the request used.

    Returns:
        Text (a refusal counts as text), proposed calls and clamped usage. Arguments that are no
        JSON object become ``{"__unparseable__": raw}``, which the tool's schema denies.

    Raises:
        AgentError: There is no choice with a message in it.

    Example:
        >>> from_openai_response({"choices": [{"message": {"content": "hi"}}]}).text
        'hi'
    """
    return _response(response, prices, names)


def _response(response: Any, prices: Prices | None, names: Names | None) -> ModelResponse:
    choices = items(field(response, "choices"), "choices")
    message = field(choices[0], "message") if choices else None
    if message is None:
        raise AgentError("the provider's response has no choice with a message in it")
    usage = field(response, "usage")
    details = field(usage, "prompt_tokens_details")
    model = field(response, "model")
    model = model if isinstance(model, str) else None
    reason = field(choices[0], "finish_reason")
    return ModelResponse(
        text=_text(message),
        tool_calls=tuple(
            _call(call, names) for call in items(field(message, "tool_calls"), "tool_calls")
        ),
        usage=read_usage(
            prices,
            field(usage, "prompt_tokens"),
            field(usage, "completion_tokens"),
            model=model,
            cache_read=field(details, "cached_tokens"),
        ),
        model=model,
        finish_reason=reason if isinstance(reason, str) else None,
    )


def _text(message: Any) -> str | None:
    for name in ("content", "refusal"):
        value = field(message, name)
        if isinstance(value, str):
            return safe_text(value)
    return None


def _call(call: Any, names: Names | None) -> ToolCall:
    function, custom = field(call, "function"), field(call, "custom")
    name = field(custom if function is None else function, "name")
    raw = field(custom, "input") if function is None else field(function, "arguments")
    id_ = field(call, "id")
    return ToolCall(
        id_ if isinstance(id_, str) else "",
        own_name(names, name) if isinstance(name, str) else "",
        read_arguments(raw),
    )


class _Chunks:
    """The chunks of one streamed completion, put together again."""

    def __init__(self) -> None:
        self._model: Any = None
        self._usage: Any = None
        self._finish: Any = None
        self._content: list[str] = []
        self._refusal: list[str] = []
        self._calls: dict[Any, dict[str, Any]] = {}
        self._last: Any = None
        self._size = 0

    def add(self, event: Any) -> str | None:
        usage = field(event, "usage")
        self._usage = usage if usage is not None else self._usage
        self._model = field(event, "model") or self._model
        told = ""
        for choice in items(field(event, "choices"), "choices"):
            if field(choice, "index", 0) not in (0, None):
                continue
            self._finish = field(choice, "finish_reason") or self._finish
            delta = field(choice, "delta")
            for kind, kept in (("content", self._content), ("refusal", self._refusal)):
                text = field(delta, kind)
                if isinstance(text, str) and text:
                    kept.append(text)
                    told += text
            for piece in items(field(delta, "tool_calls"), "tool_calls"):
                self._add_call(piece)
        self._size += len(told)
        return told or None

    def _add_call(self, piece: Any) -> None:
        id_, index = field(piece, "id"), field(piece, "index")
        if index is None:  # some services number nothing: an id begins the next call
            index = self._last if self._last is not None and not id_ else len(self._calls)
        self._last = index
        call = self._calls.setdefault(index, {"id": None, "name": None, "arguments": []})
        function = field(piece, "function")
        call["id"] = call["id"] or id_
        call["name"] = call["name"] or field(function, "name")
        arguments = field(function, "arguments")
        if isinstance(arguments, str):
            call["arguments"].append(arguments)
            self._size += len(arguments)

    def complete(self) -> bool:
        return self._finish is not None

    def counts(self) -> tuple[Any, Any]:
        return field(self._usage, "prompt_tokens"), field(self._usage, "completion_tokens")

    def size(self) -> int:
        return self._size

    def response(self) -> dict[str, Any]:
        calls = [
            {
                "id": call["id"],
                "function": {"name": call["name"], "arguments": "".join(call["arguments"])},
            }
            for call in self._calls.values()
        ]
        message = {
            "content": "".join(self._content) if self._content else None,
            "refusal": "".join(self._refusal) if self._refusal else None,
            "tool_calls": calls,
        }
        return {
            "model": self._model,
            "choices": [{"message": message, "finish_reason": self._finish}],
            "usage": self._usage,
        }
