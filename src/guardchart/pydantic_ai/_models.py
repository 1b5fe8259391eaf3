"""`model`: any model of pydantic-ai as the model of a tool loop."""

from __future__ import annotations

import copy
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Self, cast

from pydantic_ai.agent import AbstractAgent
from pydantic_ai.direct import model_request, model_request_stream
from pydantic_ai.messages import (
    ModelMessage,
    ModelRequest,
    ModelRequestPart,
    ModelResponse,
    ModelResponsePart,
    PartDeltaEvent,
    PartStartEvent,
    SystemPromptPart,
    TextPart,
    TextPartDelta,
    ToolCallPart,
    ToolReturnPart,
    UserPromptPart,
)
from pydantic_ai.models import Model, ModelRequestParameters, infer_model
from pydantic_ai.settings import ModelSettings
from pydantic_ai.tools import ToolDefinition

from guardchart.agents import Message, Usage
from guardchart.agents import ModelResponse as Turn
from guardchart.agents import ModelSettings as Wanted
from guardchart.agents._models import ToolSchema
from guardchart.agents._providers import own_name, read_arguments, tool_parts, wire_name, wire_names
from guardchart.errors import AgentConfigError
from guardchart.gate import ToolCall
from guardchart.pydantic_ai._usage import read_usage
from guardchart.runtime._loops import LOOPS

__all__ = ["PydanticAIModel", "model"]

Names = Mapping[str, str]


def model(
    agent_or_model: Any,
    *,
    is_async: bool = True,
    settings: Mapping[str, Any] | None = None,
) -> PydanticAIModel:
    """Make a pydantic-ai model a ``ModelCall``: for a tool loop, or to decide with.

    Args:
        agent_or_model: a model, its name (``"openai:gpt-4o-mini"``), or an agent, of which only
            the model is taken: tools, instructions and output types stay the agent's.
        is_async: False for the sync engine.
        settings: pydantic-ai's model settings, for each request.

    Returns:
        The model. Usage, cost and tool calls are those of the provider; ``stream`` tells the
        text piece by piece, ``capped`` gives one whose answers are short.

    Raises:
        AgentConfigError: it is no model, or an agent without one.

    >>> from pydantic_ai.models.test import TestModel
    >>> ask = model(TestModel(custom_output_text="42"))
    >>> import asyncio
    >>> asyncio.run(ask([{"role": "user", "content": "What is the answer?"}], [])).text
    '42'
    """
    found = agent_or_model
    if isinstance(found, AbstractAgent):
        found = found.model
        if found is None:
            raise AgentConfigError("model: this agent has no model of its own; pass the model")
    if isinstance(found, str):
        found = infer_model(found)
    if not isinstance(found, Model):
        raise AgentConfigError(
            f"model: {type(agent_or_model).__name__} is no pydantic-ai model, agent or model name"
        )
    return PydanticAIModel(found, is_async=is_async, settings=settings)


class PydanticAIModel:
    """A pydantic-ai model as a ``ModelCall``; made by `model`.

    Attributes:
        model: the model.
        is_async: whether it is awaited or called.
        name: the model's name.
    """

    def __init__(self, model: Model, *, is_async: bool, settings: Mapping[str, Any] | None) -> None:
        self.model = model
        self.is_async = is_async
        self.name = model.model_name
        self.max_output_tokens: int | None = None
        self._settings = dict(settings or {})

    def capped(self, max_output_tokens: int) -> Self:
        """Return the same model, whose answers have at most so many tokens."""
        if type(max_output_tokens) is not int or max_output_tokens < 1:
            raise AgentConfigError("capped: expected a number of tokens of at least 1")
        own = self._settings.get("max_tokens")
        if isinstance(own, int) and own <= max_output_tokens:
            return self
        made = copy.copy(self)
        made.max_output_tokens = max_output_tokens
        made._settings = {**self._settings, "max_tokens": max_output_tokens}
        return made

    def with_settings(self, settings: Wanted) -> Self:
        """Return the same model, asked with these settings in place of its own options.

        A cap larger than the model's own stays without effect.
        """
        cap = settings.max_output_tokens
        made = copy.copy(self if cap is None else self.capped(cap))
        names = ("temperature", "top_p", "top_k", "seed", "stop_sequences")
        wanted = {key: value for key, value in settings.given().items() if key in names}
        if settings.force_tool:
            wanted |= {"tool_choice": "required", "parallel_tool_calls": False}
        made._settings = {**made._settings, **wanted}
        return made

    def __call__(self, messages: list[Message], tools: list[ToolSchema]) -> Turn | Awaitable[Turn]:
        """Ask the model for one turn; the provider's own errors pass through."""
        names = wire_names(tools)
        sent, options = to_messages(messages, names), self._options(tools, names)
        if self.is_async:
            return self._ask(sent, options, names)
        # One loop for all synchronous calls: providers keep their connections in it.
        done: Future[Turn] = Future()

        def ended(turn: Any, error: BaseException | None) -> None:
            done.set_result(turn) if error is None else done.set_exception(error)

        LOOPS.start(ended, self._ask, sent, options, names)
        return done.result()

    async def _ask(self, sent: list[ModelMessage], options: dict[str, Any], names: Names) -> Turn:
        return _read(await model_request(self.model, sent, **options), names)

    async def stream(
        self,
        messages: list[Message],
        tools: list[ToolSchema],
        on_chunk: Callable[[str], Any],
    ) -> Turn:
        """Ask for one turn, and tell its text piece by piece."""
        names = wire_names(tools)
        sent, options = to_messages(messages, names), self._options(tools, names)
        async with model_request_stream(self.model, sent, **options) as events:
            async for event in events:
                if isinstance(event, PartStartEvent) and isinstance(event.part, TextPart):
                    _tell(on_chunk, event.part.content)
                elif isinstance(event, PartDeltaEvent) and isinstance(event.delta, TextPartDelta):
                    _tell(on_chunk, event.delta.content_delta)
            return _read(events.get(), names)

    def _options(self, tools: Sequence[ToolSchema], names: Names) -> dict[str, Any]:
        definitions = []
        for each in tools:
            name, description, parameters = tool_parts(each)
            definitions.append(
                ToolDefinition(
                    name=names[name], description=description, parameters_json_schema=parameters
                )
            )
        settings = dict(self._settings)
        if not definitions:  # a choice among none is refused
            settings.pop("tool_choice", None)
            settings.pop("parallel_tool_calls", None)
        return {
            "model_settings": cast("ModelSettings", settings) or None,
            "model_request_parameters": ModelRequestParameters(function_tools=definitions),
        }


def _tell(on_chunk: Callable[[str], Any], text: str) -> None:
    if text:
        on_chunk(text)


def to_messages(messages: Sequence[Message], names: Names) -> list[ModelMessage]:
    """Return a loop's conversation as pydantic-ai's: requests and answers in turn."""
    out: list[ModelMessage] = []
    parts: list[ModelRequestPart] = []
    called: dict[str, str] = {}
    for each in messages:
        role, content = each["role"], each.get("content")
        text = content if isinstance(content, str) else "" if content is None else str(content)
        if role == "assistant":
            if parts:
                out.append(ModelRequest(parts=parts))
                parts = []
            answer: list[ModelResponsePart] = [TextPart(text)] if text else []
            for call in each.get("tool_calls") or ():
                name = wire_name(names, call["name"])
                called[call["id"]] = name
                answer.append(ToolCallPart(name, call["arguments"], tool_call_id=call["id"]))
            out.append(ModelResponse(parts=answer))
        elif role == "tool":
            ident = each.get("tool_call_id") or ""
            name = called.get(ident) or wire_name(names, each.get("name") or "")
            parts.append(ToolReturnPart(name, text, tool_call_id=ident))
        elif role == "system":
            parts.append(SystemPromptPart(text))
        else:
            parts.append(UserPromptPart(text))
    if parts:
        out.append(ModelRequest(parts=parts))
    return out


def _read(response: ModelResponse, names: Names) -> Turn:
    calls = [
        ToolCall(
            part.tool_call_id,
            own_name(names, part.tool_name),
            read_arguments(part.args if part.args is not None else {}),
        )
        for part in response.tool_calls
    ]
    plain, cost = read_usage(response.usage)
    text = response.text
    return Turn(
        text=text if text or not calls else None,
        tool_calls=calls,
        usage=Usage(plain["input_tokens"], plain["output_tokens"], cost),
        model=response.model_name,
        finish_reason=response.finish_reason,
    )
