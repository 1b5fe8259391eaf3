"""A decision put to a model: one tool for each event, or JSON where it has no tools."""

from __future__ import annotations

import inspect
import json
from collections.abc import Awaitable, Mapping
from typing import Any, Final, Literal

from guardchart.agents._messages import Message, safe_text, system_turn, user_turn
from guardchart.agents._models import (
    ModelCall,
    ModelResponse,
    ModelSettings,
    ToolSchema,
    is_async_model,
)
from guardchart.agents._parser import json_parser
from guardchart.agents._parts import messages_to_compact
from guardchart.agents._requests import (
    AgentDecisionRequest,
    AgentEventDescriptor,
    DecisionAttempt,
    Generated,
)
from guardchart.errors import AgentConfigError, AgentError
from guardchart.gate._arguments import UNPARSEABLE

__all__ = ["DecideWith", "decide_with"]

_BY_TOOL: Final = "Choose exactly one of the events that are offered to you as tools: call it once."
_BY_JSON: Final = (
    "Choose exactly one of the events below. Answer with one JSON object and nothing else: "
    '{"event": {"type": "<type>", ...the fields of its payload...}, "reason": "<why, in short>"}'
)
_NO_FIELDS: Final = {"type": "object", "properties": {}}
_NONE: Final = "no event was chosen: call exactly one of the tools"
_NONE_BY_JSON: Final = "no event was chosen: answer with one JSON object that has an event"
_SEVERAL: Final = "several events were chosen: choose exactly one"
_SHOWN: Final = 500

Mode = Literal["tools", "json"]


class DecideWith:
    """A ``decide`` executor over a model; made by `decide_with`.

    Attributes:
        model: The model.
        is_async: Whether it is awaited.
        bounded: Whether the model promises to end by itself.
    """

    def __init__(self, model: ModelCall, mode: Mode) -> None:
        self.model = model
        self.is_async = is_async_model(model)
        self.bounded = getattr(model, "bounded", False) is True
        self._mode = mode

    def __call__(self, request: AgentDecisionRequest) -> Generated | Awaitable[Generated]:
        """Ask the model once.

        Returns:
            What it chose, with its usage; ``raw`` is the `ModelResponse`.

        Raises:
            AgentError: The model returned something else. What it raises passes through.
        """
        messages = self.messages(request)
        tools = [_tool(each) for each in request.events] if self._mode == "tools" else []
        response = self._tuned(request)(messages, tools)
        if inspect.isawaitable(response):
            return self._later(response, request)
        return self._read(response, request)

    async def _later(
        self, response: Awaitable[ModelResponse], request: AgentDecisionRequest
    ) -> Generated:
        return self._read(await response, request)

    def _tuned(self, request: AgentDecisionRequest) -> ModelCall:
        """The model with what the request wants, where it can be asked for it."""
        with_settings = getattr(self.model, "with_settings", None)
        if with_settings is None:
            return self.model
        tuned: ModelCall = with_settings(
            ModelSettings(
                force_tool=self._mode == "tools",
                temperature=request.temperature,
                max_output_tokens=request.max_output_tokens,
                top_p=request.top_p,
                top_k=request.top_k,
                seed=request.seed,
                stop_sequences=request.stop_sequences,
            )
        )
        return tuned

    # What is sent

    def messages(self, request: AgentDecisionRequest) -> list[Message]:
        """The conversation that is sent: the request's, then one message for failed attempts."""
        how = _BY_TOOL if self._mode == "tools" else f"{_BY_JSON}\n\n{_listed(request.events)}"
        system = how if request.system is None else f"{request.system}\n\n{how}"
        messages = [system_turn(system), *_conversation(request)]
        if request.prompt is not None:
            messages.append(user_turn(request.prompt))
        elif messages[-1]["role"] != "user":
            messages.append(user_turn("Choose."))
        if request.attempts:
            messages.append(user_turn(_told(request)))
        return messages

    # What comes back

    def _read(self, response: Any, request: AgentDecisionRequest) -> Generated:
        if not isinstance(response, ModelResponse):
            raise AgentError("decide_with: the model returned no ModelResponse")
        event, reason = self._chosen(response, request)
        answer = {"event": event, "reason": reason}
        return Generated(answer, usage=response.usage, raw=response)

    def _chosen(
        self, response: ModelResponse, request: AgentDecisionRequest
    ) -> tuple[dict[str, Any] | None, str | None]:
        calls = response.tool_calls
        if len(calls) > 1:
            return None, _SEVERAL
        if calls:
            by_tool = {each.tool_name: each.type for each in request.events}
            call = calls[0]
            arguments = call.arguments
            payload = dict(arguments) if isinstance(arguments, Mapping) else {UNPARSEABLE: ""}
            return {**payload, "type": by_tool.get(call.name, call.name)}, response.text
        found = _from_text(response.text, request)
        if found is None:
            return None, _NONE if self._mode == "tools" else _NONE_BY_JSON
        return found


def _conversation(request: AgentDecisionRequest) -> list[Message]:
    """The request's messages in compact form; one with images or files stays in parts.

    The adapters of providers read both.
    """
    sent: list[Message] = []
    for message in request.messages or ():
        try:
            sent.extend(messages_to_compact([message]))
        except AgentError:
            sent.append(message.to_json())
    return sent


def _tool(descriptor: AgentEventDescriptor) -> ToolSchema:
    schema = descriptor.input_schema or _NO_FIELDS
    about = schema.get("description")
    return {
        "name": descriptor.tool_name,
        "description": about if isinstance(about, str) else f"Send the event {descriptor.type}.",
        "parameters": schema,
    }


def _listed(events: list[AgentEventDescriptor]) -> str:
    return "\n".join(
        f"- {each.type}"
        + (f", payload: {json.dumps(each.input_schema)}" if each.input_schema else "")
        for each in events
    )


def _told(request: AgentDecisionRequest) -> str:
    """What failed so far, in the model's terms, and what may be chosen."""
    lines = [_line(each) for each in request.attempts]
    names = ", ".join(each.type for each in request.events)
    refused = {
        each.event["type"]
        for each in request.attempts
        if each.event is not None and each.failure == "rejected-by-guard"
    }
    hint = ""
    if refused and any(each.type not in refused for each in request.events):
        hint = " The same choice will be refused again: choose differently."
    return "\n".join([*lines, f"Choose again, from: {names}.{hint}"])


def _line(attempt: DecisionAttempt) -> str:
    if attempt.event is None:
        return f"Your answer was not taken: {attempt.reason}."
    payload = {key: value for key, value in attempt.event.items() if key != "type"}
    shown = safe_text(attempt.event["type"])
    if payload:
        text = json.dumps(payload, ensure_ascii=False)
        shown += f" with {text if len(text) <= _SHOWN else text[:_SHOWN] + '...'}"
    return f"You chose {shown}. It was not taken: {attempt.reason}."


# Strict, whatever is installed: a choice is not to be guessed out of prose.
_parse: Final = json_parser(use_instructor=False)


def _from_text(
    text: str | None, request: AgentDecisionRequest
) -> tuple[dict[str, Any], str | None] | None:
    """The event that a text names: by JSON, or by being a candidate's type and nothing else."""
    if not text:
        return None
    types = {each.type for each in request.events}
    types |= {each.tool_name for each in request.events}
    bare = text.strip()
    if bare in types:
        return {"type": _type_of(bare, request)}, None
    try:
        value = _parse(text)
    except ValueError:
        return None
    if not isinstance(value, Mapping):
        return None
    event, reason = value.get("event", value), value.get("reason")
    if isinstance(event, str):
        event = {**{k: v for k, v in value.items() if k not in ("event", "reason")}, "type": event}
    if not isinstance(event, Mapping) or not isinstance(event.get("type"), str):
        return None
    found = {**event, "type": _type_of(event["type"], request)}
    if event is value and not _declares_reason(found["type"], request):
        found.pop("reason", None)
    return found, reason if isinstance(reason, str) else None


def _declares_reason(event_type: str, request: AgentDecisionRequest) -> bool:
    """Whether a reason is part of the event's own payload."""
    schema = next((each.input_schema for each in request.events if each.type == event_type), None)
    return "reason" in (schema or {}).get("properties", {})


def _type_of(name: str, request: AgentDecisionRequest) -> str:
    """A candidate's type by its type or its tool's name; any other text as it is."""
    known = {each.tool_name: each.type for each in request.events}
    known.update({each.type: each.type for each in request.events})
    return known.get(name, name)


def decide_with(model: ModelCall, *, mode: Mode = "tools") -> DecideWith:
    """Have any model make decisions: the ``decide`` executor for a ``ModelCall``.

    Each candidate event is a tool with the event's payload as its arguments, and a model that
    has ``with_settings`` is made to call exactly one. One that answers with JSON, or with the
    bare type of a candidate, instead of a call is understood too. Failed attempts are told in a
    last message, so that the next answer differs.

    Args:
        model: A ``ModelCall``: ``openai_model(...)``, ``anthropic_model(...)``, LangChain's by
            ``chat_model(...)``, a ``FakeModel``, or a function of your own.
        mode: ``"tools"``, or ``"json"`` for a model without tools.

    Returns:
        The executor; sync or async as the model is. ``reason`` is the text beside the call.

    Raises:
        AgentConfigError: The model is no callable, or the mode is unknown.

    Source: the design of statelyai/agent 2, the decide executor of its AI SDK adapter.

    Example:
        >>> from guardchart.agents import FakeModel, create_decision_logic
        >>> from guardchart.agents import resolve_decision_sync
        >>> request = create_decision_logic(allowed_events=["ATTACK", "FLEE"]).request()
        >>> model = FakeModel([{"tool": "send_event_FLEE", "args": {}}], is_async=False)
        >>> resolve_decision_sync(request, decide_with(model))
        {'type': 'FLEE'}
    """
    if not callable(model):
        raise AgentConfigError(
            f"decide_with: {type(model).__name__} is no ModelCall; wrap a LangChain chat model by "
            "chat_model(...), an SDK client by openai_model(...) or anthropic_model(...)"
        )
    if mode not in ("tools", "json"):
        raise AgentConfigError("decide_with: mode must be 'tools' or 'json'")
    return DecideWith(model, mode)
