"""OpenAI's Chat Completions as a ``ModelCall``, and every service that speaks the same protocol.

The three mapping functions are pure and need no SDK; ``openai_model`` needs ``pip install
openai``. Text and tool calls are mapped; streaming and multimodal content are not yet.
"""

from __future__ import annotations

import json
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

__all__ = ["from_openai_response", "openai_model", "to_openai_messages", "to_openai_tools"]

_RESERVED = frozenset({"functions", "function_call", "messages", "model", "stream", "tools"})
_ONLY_WITH_TOOLS = ("parallel_tool_calls", "tool_choice")


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
        prices: ``{"input_per_mtok", "output_per_mtok"}`` in US dollars; without them
            ``cost_usd`` stays 0 and no cost budget can trip.
        **create_kw: More arguments of ``chat.completions.create``, e.g. ``temperature``.
            ``max_completion_tokens`` caps one answer, and so what a budget can be overshot by.

    Returns:
        A ``ModelCall``. The SDK's own errors pass through it.

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
    sheet = check_prices(prices)
    options = dict(create_kw)

    def request(
        messages: Sequence[Message], tools: Sequence[ToolSchema], names: Names
    ) -> dict[str, Any]:
        sent = {"model": model, **options, "messages": to_openai_messages(messages, names=names)}
        if tools:
            return {**sent, "tools": to_openai_tools(tools, names=names)}
        # The API refuses these two without tools, and a state may allow none.
        return {key: value for key, value in sent.items() if key not in _ONLY_WITH_TOOLS}

    return ProviderModel(
        client.chat.completions.create,
        model,
        request=request,
        parse=lambda response, names: from_openai_response(response, prices=sheet, names=names),
        prices=sheet,
        max_output_tokens=options.get("max_completion_tokens", options.get("max_tokens")),
    )


def to_openai_messages(
    messages: Iterable[Mapping[str, Any]], *, names: Names | None = None
) -> list[dict[str, Any]]:
    """Write a conversation as Chat Completions messages.

    Args:
        messages: Compact messages, newest last.
        names: Wire names of the request's tools, where they differ from their own.

    Returns:
        One message for each; arguments of calls as JSON text.

    Raises:
        NotSupportedError: Content is not text.

    Example:
        >>> to_openai_messages([{"role": "tool", "tool_call_id": "c1", "content": "ok"}])
        [{'role': 'tool', 'tool_call_id': 'c1', 'content': 'ok'}]
    """
    return [_message(message, names) for message in messages]


def _message(message: Mapping[str, Any], names: Names | None) -> dict[str, Any]:
    role, text = message["role"], text_of(message)
    if role == "tool":
        return {"role": "tool", "tool_call_id": message["tool_call_id"], "content": text}
    calls = message.get("tool_calls")
    if role != "assistant" or not calls:
        return {"role": role, "content": text}
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
            for call in calls
        ],
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
    choices = items(field(response, "choices"), "choices")
    message = field(choices[0], "message") if choices else None
    if message is None:
        raise AgentError("the provider's response has no choice with a message in it")
    usage = field(response, "usage")
    model = field(response, "model")
    return ModelResponse(
        text=_text(message),
        tool_calls=tuple(
            _call(call, names) for call in items(field(message, "tool_calls"), "tool_calls")
        ),
        usage=read_usage(prices, field(usage, "prompt_tokens"), field(usage, "completion_tokens")),
        model=model if isinstance(model, str) else None,
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
