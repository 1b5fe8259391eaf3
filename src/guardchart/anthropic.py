"""Anthropic's Messages API as a ``ModelCall``.

The three mapping functions are pure and need no SDK; ``anthropic_model`` needs ``pip install
anthropic``. Text and tool calls are mapped; streaming, multimodal content and thinking blocks
are not yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from guardchart.agents._messages import Message, safe_text
from guardchart.agents._models import ModelResponse, ToolSchema
from guardchart.agents._providers import (
    Names,
    ProviderModel,
    check_options,
    check_prices,
    field,
    items,
    missing_sdk,
    own_name,
    read_arguments,
    read_usage,
    text_of,
    tool_parts,
    wire_name,
)
from guardchart.errors import AgentConfigError, AgentError
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
        prices: ``{"input_per_mtok", "output_per_mtok"}`` in US dollars; without them
            ``cost_usd`` stays 0 and no cost budget can trip.
        **create_kw: More arguments of ``messages.create``, e.g. ``temperature``. A system
            prompt goes to ``agent_logic(system_prompt=...)``.

    Returns:
        A ``ModelCall``. The SDK's own errors pass through it.

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
    sheet = check_prices(prices)
    options = dict(create_kw)

    def request(
        messages: Sequence[Message], tools: Sequence[ToolSchema], names: Names
    ) -> dict[str, Any]:
        system, turns = to_anthropic_messages(messages, names=names)
        sent = {"model": model, "max_tokens": max_tokens, **options, "messages": turns}
        if system:
            sent["system"] = system
        if tools:
            return {**sent, "tools": to_anthropic_tools(tools, names=names)}
        sent.pop("tool_choice", None)  # refused without tools, and a state may allow none
        return sent

    return ProviderModel(
        client.messages.create,
        model,
        request=request,
        parse=lambda response, names: from_anthropic_response(response, prices=sheet, names=names),
        prices=sheet,
        max_output_tokens=max_tokens,
    )


def to_anthropic_messages(
    messages: Iterable[Mapping[str, Any]], *, names: Names | None = None
) -> tuple[str, list[dict[str, Any]]]:
    """Write a conversation as a system prompt and Messages API turns.

    The API wants alternating turns, with the results of one assistant turn together at the
    start of the user turn after it: neighbours of one role are joined, results before text.

    Args:
        messages: Compact messages, newest last.
        names: Wire names of the request's tools, where they differ from their own.

    Returns:
        The system messages joined by a blank line (``""`` without any), and the turns.

    Raises:
        NotSupportedError: Content is not text.

    Example:
        >>> to_anthropic_messages([
        ...     {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}
        ... ])
        ('Be brief.', [{'role': 'user', 'content': [{'type': 'text', 'text': 'Hi'}]}])
    """
    system: list[str] = []
    turns: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "system":
            system.append(text_of(message))
            continue
        role = "assistant" if message["role"] == "assistant" else "user"
        blocks = _blocks(message, names)
        if blocks and turns and turns[-1]["role"] == role:
            turns[-1]["content"].extend(blocks)
        elif blocks:  # the API refuses empty turns and empty text
            turns.append({"role": role, "content": blocks})
    for turn in turns:
        turn["content"].sort(key=lambda block: _ORDER[block["type"]])
    return "\n\n".join(part for part in system if part), turns


_ORDER = {"tool_result": 0, "text": 1, "tool_use": 2}


def _blocks(message: Mapping[str, Any], names: Names | None) -> list[dict[str, Any]]:
    text = text_of(message)
    if message["role"] == "tool":
        id_ = message["tool_call_id"]
        return [{"type": "tool_result", "tool_use_id": id_, "content": text}]
    blocks: list[dict[str, Any]] = [{"type": "text", "text": text}] if text.strip() else []
    blocks.extend(
        {
            "type": "tool_use",
            "id": call["id"],
            "name": wire_name(names, call["name"]),
            "input": dict(call["arguments"]),
        }
        for call in message.get("tool_calls") or ()
    )
    return blocks


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
    found = field(response, "content")
    if found is None:
        raise AgentError("the provider's response has no content")
    content = items(found, "content")
    texts = [field(block, "text") for block in content if field(block, "type") == "text"]
    proposed = [block for block in content if field(block, "type") == "tool_use"]
    calls = [_call(block, names) for block in proposed]
    cut = field(response, "stop_reason") == "max_tokens"
    if cut and proposed and content[-1] is proposed[-1]:
        calls[-1] = ToolCall(calls[-1].id, calls[-1].name, read_arguments("(cut at max_tokens)"))
    model = field(response, "model")
    return ModelResponse(
        text=safe_text("".join(t for t in texts if isinstance(t, str))) if texts else None,
        tool_calls=tuple(calls),
        usage=read_usage(prices, *_tokens(field(response, "usage"))),
        model=model if isinstance(model, str) else None,
    )


def _tokens(usage: Any) -> tuple[int, Any]:
    counts = (
        read_usage(None, field(usage, name), 0).input_tokens
        for name in ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    )
    return sum(counts), field(usage, "output_tokens")


def _call(block: Any, names: Names | None) -> ToolCall:
    id_, name = field(block, "id"), field(block, "name")
    return ToolCall(
        id_ if isinstance(id_, str) else "",
        own_name(names, name) if isinstance(name, str) else "",
        read_arguments(field(block, "input")),
    )
