"""Anthropic's Messages API as a ``ModelCall``.

The three mapping functions are pure and need no SDK; ``anthropic_model`` needs ``pip install
anthropic``. Thinking blocks are left out.
"""

from __future__ import annotations

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

__all__ = [
    "anthropic_model",
    "from_anthropic_response",
    "to_anthropic_messages",
    "to_anthropic_tools",
]

_RESERVED = frozenset({"messages", "model", "stream", "system", "tools"})


def anthropic_model(
    client: Any,
    model: str = "claude-sonnet-4-5",
    *,
    max_tokens: int = 1024,
    prices: Mapping[str, float] | None = None,
    **create_kw: Any,
) -> ProviderModel:
    """Make a model of an Anthropic client.

    Args:
        client: ``anthropic.AsyncAnthropic()``, or ``anthropic.Anthropic()`` (a sync model, for
            the sync engine).
        model: Model name.
        max_tokens: Cap on one answer in tokens, which the API demands; also what a token budget
            can be overshot by.
        prices: ``{"input_per_mtok", "output_per_mtok"}`` in US dollars. None takes those that
            the genai-prices package knows, where it is installed and knows the service and the
            model; else ``cost_usd`` stays 0 and no cost budget can trip.
        **create_kw: More arguments of ``messages.create``, e.g. ``temperature``. A system
            prompt goes to ``agent_logic(system_prompt=...)``.

    Returns:
        A ``ModelCall`` that streams. The SDK's own errors pass through it.

    Raises:
        MissingExtraError: The SDK is not installed; the message names the ``pip install``.
        AgentConfigError: ``max_tokens`` or prices are invalid, or an option is one the adapter
            sets itself.

    Source: xstate-statemachine, agents reference: anthropic_model.
    """
    try:
        import anthropic  # noqa: F401
    except ImportError as exc:
        raise missing_sdk("anthropic") from exc
    check_options("anthropic_model", create_kw, _RESERVED)
    cap: Any = max_tokens
    if isinstance(cap, bool) or not isinstance(cap, int) or cap < 1:
        raise AgentConfigError("anthropic_model: max_tokens must be an int of at least 1")
    known = provider_prices(client, model, check_prices(prices))
    options = dict(create_kw)

    def request(
        messages: Sequence[Any], tools: Sequence[ToolSchema], names: Names
    ) -> dict[str, Any]:
        system, turns = to_anthropic_messages(messages, names=names)
        sent = {"model": model, "max_tokens": max_tokens, **options, "messages": turns}
        if system:
            sent["system"] = system
        if _answers_calls(turns):
            # The API wants the thinking of this turn back with it, and a conversation has none.
            sent.pop("thinking", None)
        return {**sent, "tools": to_anthropic_tools(tools, names=names)} if tools else sent

    return ProviderModel(
        client.messages.create,
        model,
        request=request,
        parse=lambda response, names: _response(response, known, names),
        reader=_Events,
        stream_options={"stream": True},
        cap_option="max_tokens",
        provider="anthropic",
        prices=known,
        max_output_tokens=max_tokens,
        settings=lambda wanted: _settings(wanted, thinks="thinking" in options),
    )


def _answers_calls(turns: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the newest turn goes on with what an assistant turn has begun."""
    return bool(turns) and any(block["type"] == "tool_result" for block in turns[-1]["content"])


def _settings(wanted: ModelSettings, *, thinks: bool) -> dict[str, Any]:
    """What a request wants, as arguments of ``create``."""
    names = {
        "temperature": "temperature",
        "top_p": "top_p",
        "top_k": "top_k",
        "stop_sequences": "stop_sequences",
    }
    sent = {names[key]: value for key, value in wanted.given().items() if key in names}
    if wanted.force_tool:
        sent["tool_choice"] = {"type": "any", "disable_parallel_tool_use": True}
        if thinks:  # the API refuses to force a model that thinks
            sent["thinking"] = {"type": "disabled"}
    return sent


def to_anthropic_messages(
    messages: Iterable[Any], *, names: Names | None = None
) -> tuple[str, list[dict[str, Any]]]:
    """Write a conversation as a system prompt and Messages API turns.

    The API wants alternating turns, with the results of one assistant turn together at the
    start of the user turn after it: neighbours of one role are joined, results before the rest.

    Args:
        messages: Messages, newest last: compact ones, or messages of parts (objects or their
            JSON). PDF and text files are sent as documents;
            ``provider_options={"anthropic": {"cache_control": {...}}}`` on a part, or on a
            message for its last block, adds to what is sent.
        names: Wire names of the request's tools, where they differ from their own.

    Returns:
        The system messages joined by a blank line (``""`` without any), and the turns.

    Raises:
        AgentError: A message is malformed; it is named by its place.
        NotSupportedError: The API has no place for a part: a file or an image of another type,
            a model's own file.

    Source: xstate-statemachine, agents reference: provider helpers.

    Example:
        >>> to_anthropic_messages([
        ...     {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}
        ... ])
        ('Be brief.', [{'role': 'user', 'content': [{'type': 'text', 'text': 'Hi'}]}])
    """
    system: list[str] = []
    turns: list[dict[str, Any]] = []
    for turn in read_turns(messages):
        if turn.role == "system":
            system.append(text_only(turn, "a system message"))
            continue
        role = "assistant" if turn.role == "assistant" else "user"
        blocks = _blocks(turn, names)
        if blocks and turns and turns[-1]["role"] == role:
            turns[-1]["content"].extend(blocks)
        elif blocks:  # the API refuses empty turns and empty text
            turns.append({"role": role, "content": blocks})
    for each in turns:
        each["content"].sort(key=lambda block: _ORDER.get(block["type"], 1))
    return "\n\n".join(part for part in system if part), turns


_ORDER = {"tool_result": 0, "tool_use": 2}


def _blocks(turn: Turn, names: Names | None) -> list[dict[str, Any]]:
    if turn.role == "tool":
        return [_result(turn)]
    blocks = [_part(part) for part in turn.parts if not _is_blank(part)]
    blocks.extend(
        {
            "type": "tool_use",
            "id": call["id"],
            "name": wire_name(names, call["name"]),
            "input": dict(call["arguments"]),
        }
        for call in turn.calls
    )
    if blocks:
        blocks[-1].update(options_of(turn.source, "anthropic"))
    return blocks


def _result(turn: Turn) -> dict[str, Any]:
    plain = all(isinstance(part, str) for part in turn.parts)
    content: Any = text_only(turn, "a tool result") if plain else list(map(_part, turn.parts))
    block = {"type": "tool_result", "tool_use_id": turn.call_id, "content": content}
    if turn.failed:
        block["is_error"] = True
    return {**block, **options_of(turn.source, "anthropic")}


def _is_blank(part: Any) -> bool:
    text = part.text if isinstance(part, TextPart) else part
    return isinstance(text, str) and not text.strip()


def _part(part: str | TextPart | ImagePart | FilePart) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    more = options_of(part, "anthropic")
    if isinstance(part, TextPart):
        return {"type": "text", "text": part.text, **more}
    media = media_of(part)
    source: dict[str, Any] = {"type": "base64", "media_type": media.kind, "data": media.data}
    if media.url is not None:
        source = {"type": "url", "url": media.url}
    if media.kind in _IMAGES:
        return {"type": "image", "source": source, **more}
    if isinstance(part, FilePart) and media.kind in ("application/pdf", "text/plain"):
        if media.kind == "text/plain":
            if media.url is not None:
                raise NotSupportedError("Anthropic takes text files as bytes, not by URL")
            source = {"type": "text", "media_type": "text/plain", "data": media.text()}
        title = {} if part.filename is None else {"title": part.filename}
        return {"type": "document", "source": source, **title, **more}
    raise NotSupportedError(
        "Anthropic takes jpeg, png, gif and webp images, PDF and plain text files, no other types"
    )


_IMAGES = frozenset({"image/jpeg", "image/png", "image/gif", "image/webp", "image/*"})


def to_anthropic_tools(
    tools: Iterable[ToolSchema], *, names: Names | None = None
) -> list[dict[str, Any]]:
    """Write tool schemas as Messages API tools.

    Args:
        tools: ``{"name", "description", "parameters"}`` each.
        names: Wire names of the tools, where they differ from their own.

    Returns:
        One tool for each, in order.

    Raises:
        AgentConfigError: A schema has no name.

    Example:
        >>> to_anthropic_tools([{"name": "now"}])
        [{'name': 'now', 'input_schema': {'type': 'object', 'properties': {}}}]
    """
    return [_tool(tool, names) for tool in tools]


def _tool(tool: ToolSchema, names: Names | None) -> dict[str, Any]:
    name, description, parameters = tool_parts(tool)
    written: dict[str, Any] = {"name": wire_name(names, name), "input_schema": parameters}
    if description:
        written["description"] = description
    return written


def from_anthropic_response(
    response: Any, *, prices: Mapping[str, float] | None = None, names: Names | None = None
) -> ModelResponse:
    """Read a Messages API response, as an SDK object or as the JSON it came from.

    Args:
        response: The response.
        prices: The price sheet, for ``usage.cost_usd``; cached tokens are charged as input.
        names: Wire names that the request used.

    Returns:
        Text blocks joined, proposed calls, and clamped usage whose input counts cache reads and
        writes too. Blocks of other types are left out. The last call of an answer that was cut
        at ``max_tokens`` is made unparseable, so that the gate denies it: what is missing may be
        an argument.

    Raises:
        AgentError: There is no content list.

    Example:
        >>> from_anthropic_response({"content": [{"type": "text", "text": "hi"}]}).text
        'hi'
    """
    return _response(response, prices, names)


def _response(response: Any, prices: Prices | None, names: Names | None) -> ModelResponse:
    found = field(response, "content")
    if found is None:
        raise AgentError("the provider's response has no content")
    content = items(found, "content")
    texts = [field(block, "text") for block in content if field(block, "type") == "text"]
    proposed = [block for block in content if field(block, "type") == "tool_use"]
    calls = [_call(block, names) for block in proposed]
    reason = field(response, "stop_reason")
    if reason == "max_tokens" and proposed and content[-1] is proposed[-1]:
        calls[-1] = ToolCall(calls[-1].id, calls[-1].name, read_arguments("(cut at max_tokens)"))
    model = field(response, "model")
    model = model if isinstance(model, str) else None
    usage = field(response, "usage")
    return ModelResponse(
        text=safe_text("".join(t for t in texts if isinstance(t, str))) if texts else None,
        tool_calls=tuple(calls),
        usage=read_usage(
            prices,
            *_tokens(usage),
            model=model,
            cache_read=field(usage, "cache_read_input_tokens"),
            cache_write=field(usage, "cache_creation_input_tokens"),
        ),
        model=model,
        finish_reason=reason if isinstance(reason, str) else None,
    )


_INPUT_COUNTS = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")


def _tokens(usage: Any) -> tuple[int, Any]:
    counts = (read_usage(None, field(usage, name), 0).input_tokens for name in _INPUT_COUNTS)
    return sum(counts), field(usage, "output_tokens")


def _call(block: Any, names: Names | None) -> ToolCall:
    id_, name = field(block, "id"), field(block, "name")
    return ToolCall(
        id_ if isinstance(id_, str) else "",
        own_name(names, name) if isinstance(name, str) else "",
        read_arguments(field(block, "input")),
    )


class _Events:
    """The events of one streamed message, put together again."""

    def __init__(self) -> None:
        self._message: dict[str, Any] = {"model": None, "stop_reason": None}
        self._usage: dict[str, Any] = {}
        self._blocks: dict[Any, dict[str, Any]] = {}
        self._ended = False
        self._size = 0

    def add(self, event: Any) -> str | None:
        kind = field(event, "type")
        if kind == "message_start":
            message = field(event, "message")
            self._message["model"] = field(message, "model")
            self._count(field(message, "usage"))
        elif kind == "content_block_start":
            return self._open(field(event, "index"), field(event, "content_block"))
        elif kind == "content_block_delta":
            return self._extend(field(event, "index"), field(event, "delta"))
        elif kind == "message_delta":
            reason = field(field(event, "delta"), "stop_reason")
            self._message["stop_reason"] = reason or self._message["stop_reason"]
            self._count(field(event, "usage"))
        elif kind == "message_stop":
            self._ended = True
        elif kind == "error":
            raise AgentError("the provider's stream reported an error")
        return None

    def _count(self, usage: Any) -> None:
        """Counts are cumulative: the newest one of each name is the count."""
        for name in (*_INPUT_COUNTS, "output_tokens"):
            value = field(usage, name)
            if value is not None:
                self._usage[name] = value

    def _open(self, index: Any, block: Any) -> str | None:
        text = field(block, "text")
        self._blocks[index] = {
            "type": field(block, "type"),
            "id": field(block, "id"),
            "name": field(block, "name"),
            "input": field(block, "input"),
            "text": [],
            "json": [],
        }
        return self._say(index, text) if isinstance(text, str) and text else None

    def _extend(self, index: Any, delta: Any) -> str | None:
        if index not in self._blocks:
            raise AgentError("the provider's stream is malformed: a delta without its block")
        text, json_text = field(delta, "text"), field(delta, "partial_json")
        if isinstance(json_text, str):
            self._blocks[index]["json"].append(json_text)
            self._size += len(json_text)
        for other in ("thinking", "signature"):  # left out, and paid for
            received = field(delta, other)
            self._size += len(received) if isinstance(received, str) else 0
        return self._say(index, text) if isinstance(text, str) and text else None

    def _say(self, index: Any, text: str) -> str | None:
        self._size += len(text)
        self._blocks[index]["text"].append(text)
        return text if self._blocks[index]["type"] == "text" else None

    def complete(self) -> bool:
        return self._ended

    def counts(self) -> tuple[Any, Any]:
        return _tokens(self._usage)

    def size(self) -> int:
        return self._size

    def response(self) -> dict[str, Any]:
        content = [
            {
                **block,
                "text": "".join(block["text"]),
                "input": "".join(block["json"]) if block["json"] else block["input"],
            }
            for _, block in sorted(self._blocks.items(), key=lambda each: str(each[0]).zfill(9))
        ]
        return {**self._message, "content": content, "usage": self._usage}
