"""`chat_model`: any LangChain chat model as the model of a tool loop."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, Final

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage
from langchain_core.runnables import Runnable

from guardchart.agents import Message, ModelResponse
from guardchart.agents._messages import safe_text
from guardchart.agents._models import ModelSettings, ToolSchema
from guardchart.agents._prices import check_prices, read_usage
from guardchart.agents._providers import (
    Names,
    check_options,
    own_name,
    read_arguments,
    tool_parts,
    wire_name,
    wire_names,
)
from guardchart.errors import AgentConfigError, AgentError
from guardchart.gate import ToolCall
from guardchart.gate._arguments import UNPARSEABLE
from guardchart.langchain._messages import to_langchain_messages

__all__ = ["ChatModel", "chat_model"]

_RESERVED: Final = ("tools", "functions", "config", "stop_sequences", "input")
_ONLY_WITH_TOOLS: Final = ("parallel_tool_calls", "strict", "tool_choice")
_KEPT: Final = 16
_ASYNC_FORMS: Final = (
    "ainvoke",
    "astream",
    "agenerate",
    "agenerate_prompt",
    "_agenerate",
    "_agenerate_with_cache",
    "_astream",
)


class ChatModel:
    """A LangChain chat model as a ``ModelCall``; made by `chat_model`.

    Attributes:
        model: The chat model.
        is_async: Whether it is awaited (``ainvoke``) or called (``invoke``).
        prices: The price sheet, or None.
    """

    def __init__(
        self,
        model: BaseChatModel,
        *,
        is_async: bool,
        prices: Mapping[str, float] | None,
        options: Mapping[str, Any],
    ) -> None:
        self.model = model
        self.is_async = is_async
        self.prices = prices
        self.max_output_tokens = options.get("max_tokens", getattr(model, "max_tokens", None))
        self._options = dict(options)
        self._plain: Runnable[Any, Any] | None = None
        # A chart has few sets of tools, and binding one makes the provider's schemas anew.
        self._bound: list[tuple[list[ToolSchema], Runnable[Any, Any], Names]] = []

    def with_settings(self, settings: ModelSettings) -> ChatModel:
        """The same model, asked with these settings in place of its own options.

        Returns:
            A new model. Settings go under the names that LangChain's chat models share; what a
            provider does not take under such a name is for the chat model itself.
        """
        names = {
            "temperature": "temperature",
            "max_output_tokens": "max_tokens",
            "top_p": "top_p",
            "seed": "seed",
            "stop_sequences": "stop",
        }
        wanted = {names[key]: value for key, value in settings.given().items() if key in names}
        if settings.force_tool:
            wanted["tool_choice"] = "any"
        return ChatModel(
            self.model,
            is_async=self.is_async,
            prices=self.prices,
            options={**self._options, **wanted},
        )

    def in_sync(self) -> ChatModel | None:
        """The same model, called and not awaited; None where it has an async form of its own.

        LangChain awaits a model that has none by calling it on a thread, so where nobody else
        waits on the event loop that is only a longer way.
        """
        if not self.is_async or type(self) is not ChatModel or _is_awaited(self.model):
            return None
        return ChatModel(self.model, is_async=False, prices=self.prices, options=self._options)

    def __call__(
        self, messages: list[Message], tools: list[ToolSchema]
    ) -> ModelResponse | Awaitable[ModelResponse]:
        """Ask the model for one turn; callbacks and config are those of the run it is part of.

        Raises:
            AgentError: What came back is no answer of a chat model. The provider's own errors
                pass through.
        """
        runnable, names = self._bind(tools)
        sent = to_langchain_messages(_renamed(messages, names))
        if self.is_async:
            return self._ask(runnable, sent, names)
        return self._read(runnable.invoke(sent), names)

    async def _ask(self, runnable: Runnable[Any, Any], sent: Any, names: Names) -> ModelResponse:
        return self._read(await runnable.ainvoke(sent), names)

    def _bind(self, tools: Sequence[ToolSchema]) -> tuple[Runnable[Any, Any], Names]:
        if not tools:
            if self._plain is None:
                options = {k: v for k, v in self._options.items() if k not in _ONLY_WITH_TOOLS}
                self._plain = self.model.bind(**options) if options else self.model
            return self._plain, {}
        wanted = list(tools)
        for schemas, runnable, names in self._bound:
            if schemas == wanted:
                return runnable, names
        names = wire_names(wanted)
        made = self.model.bind_tools([_function(each, names) for each in wanted], **self._options)
        self._bound = [(wanted, made, names), *self._bound[: _KEPT - 1]]
        return made, names

    def _read(self, answer: Any, names: Names) -> ModelResponse:
        if not isinstance(answer, AIMessage):
            kind = type(answer).__name__
            raise AgentError(f"a chat model must answer with an AIMessage, not a {kind}")
        raw = _raw_arguments(answer)
        calls = [
            ToolCall(
                call["id"] or "",
                own_name(names, call["name"]),
                read_arguments(raw.get(call["id"] or "", call["args"])),
            )
            for call in answer.tool_calls
        ]
        calls += [
            ToolCall(
                call.get("id") or "",
                own_name(names, call.get("name") or ""),
                {UNPARSEABLE: safe_text(call.get("args") or "")[:4000]},
            )
            for call in answer.invalid_tool_calls
        ]
        usage: Mapping[str, Any] = answer.usage_metadata or {}
        text = str(answer.text)
        meta = answer.response_metadata
        name = meta.get("model_name") or meta.get("model")
        return ModelResponse(
            text=safe_text(text) if text or not calls else None,
            tool_calls=calls,
            usage=read_usage(self.prices, usage.get("input_tokens"), usage.get("output_tokens")),
            model=name if isinstance(name, str) else None,
        )


def _is_awaited(model: BaseChatModel) -> bool:
    """Whether a chat model does anything of its own when it is awaited."""
    kind = type(model)
    return any(getattr(kind, name) is not getattr(BaseChatModel, name) for name in _ASYNC_FORMS)


def _raw_arguments(answer: AIMessage) -> dict[str, str]:
    """Arguments as the provider wrote them, where LangChain kept the text.

    LangChain parses them leniently: of two equal keys the last one wins, NaN passes.
    """
    kept = answer.additional_kwargs.get("tool_calls")
    found: dict[str, str] = {}
    for each in kept if isinstance(kept, list) else ():
        function = each.get("function") if isinstance(each, Mapping) else None
        text = function.get("arguments") if isinstance(function, Mapping) else None
        if isinstance(text, str) and isinstance(each.get("id"), str):
            found[each["id"]] = text
    return found


def _function(tool: ToolSchema, names: Names) -> dict[str, Any]:
    name, description, parameters = tool_parts(tool)
    function = {"name": names[name], "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


def _renamed(messages: Sequence[Message], names: Names) -> list[Message]:
    """The conversation with the names that its calls have on the wire."""
    out = []
    for message in messages:
        if calls := message.get("tool_calls"):
            renamed = [{**call, "name": wire_name(names, call["name"])} for call in calls]
            message = {**message, "tool_calls": renamed}
        elif "name" in message:
            message = {**message, "name": wire_name(names, message["name"])}
        out.append(message)
    return out


def chat_model(
    model: BaseChatModel,
    *,
    is_async: bool = True,
    prices: Mapping[str, float] | None = None,
    **options: Any,
) -> ChatModel:
    """Make any LangChain chat model the model of a tool loop.

    Callbacks come from the run the call is part of, so inside a LangGraph node its tokens reach
    ``stream_mode="messages"``, and a tracer shows it where it ran.

    Args:
        model: The chat model.
        is_async: True awaits ``ainvoke``, in both engines of a LangGraph node; a
            ``statechart_graph`` that is invoked calls a model without an async form of its own.
            False calls ``invoke``, for ``run_agent_sync`` and clients that are bound to no event
            loop.
        prices: ``{"input_per_mtok", "output_per_mtok"}`` in US dollars; without them
            ``cost_usd`` stays 0 and no cost budget can trip.
        **options: What ``bind_tools`` takes besides tools, e.g. ``tool_choice``,
            ``temperature``, ``max_tokens``.

    Returns:
        The model, for ``agent_logic`` and ``run_agent``. Its answers carry text, proposed calls
        and usage; arguments that are no JSON object are refused by the gate.

    Raises:
        AgentConfigError: Not a chat model, invalid prices, or an option the bridge sets itself.

    Example:
        >>> from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
        >>> fake = GenericFakeChatModel(messages=iter(["It has shipped."]))
        >>> chat_model(fake, is_async=False)([{"role": "user", "content": "Where?"}], []).text
        'It has shipped.'
    """
    if not isinstance(model, BaseChatModel):
        raise AgentConfigError(
            f"chat_model: {type(model).__name__} is not a chat model; pass the BaseChatModel "
            "itself, tools are bound for each state"
        )
    check_options("chat_model", options, _RESERVED)
    return ChatModel(model, is_async=is_async, prices=check_prices(prices), options=options)
