"""Traces as real OpenTelemetry spans, by the semantic conventions for generative AI.

``invoke_agent`` for each machine, ``chat`` and ``execute_tool`` below it. A call's span is the
current one while the call runs, so that the spans of an SDK or of a tool lie below it. Errors
are class names: a recorded exception would carry its message.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from guardchart._extras import require

__all__ = ["OtelSpans"]


class _CallSpan:
    """A span that is current while its call runs."""

    def __init__(self, span: Any, token: Any) -> None:
        self.span = span
        self.token = token
        context = span.get_span_context()
        self.id = f"{context.span_id:016x}" if context.is_valid else None
        self.trace_id = f"{context.trace_id:032x}" if context.is_valid else None


class OtelSpans:
    """Opens and closes the spans of one tracer provider.

    Args:
        tracer_provider: The provider; None takes the global one.

    Raises:
        MissingExtraError: OpenTelemetry is not installed.
    """

    def __init__(self, tracer_provider: Any = None) -> None:
        self._api = require("opentelemetry.trace", extra="otel")
        self._context = require("opentelemetry.context", extra="otel")
        self._tracer = self._api.get_tracer("guardchart", tracer_provider=tracer_provider)

    def start_agent(self, agent: Any, parent: Any) -> None:
        """Open an agent's span below its parent's, or below what is current; take its ids."""
        context = None
        if parent is not None and parent.span is not None:
            context = self._api.set_span_in_context(parent.span)
        attributes = {
            "gen_ai.operation.name": "invoke_agent",
            "gen_ai.agent.name": agent.id,
            "guardchart.run": agent.run,
        }
        if agent.conversation is not None:
            attributes["gen_ai.conversation.id"] = agent.conversation
        agent.span = self._tracer.start_span(
            f"invoke_agent {agent.id}",
            context=context,
            kind=self._api.SpanKind.INTERNAL,
            attributes=attributes,
        )
        found = agent.span.get_span_context()
        if found.is_valid:
            agent.trace_id = f"{found.trace_id:032x}"
            agent.span_id = f"{found.span_id:016x}"

    def end_agent(self, agent: Any, fields: Mapping[str, Any]) -> None:
        """Close an agent's span; one that ended by an error kind is an error."""
        used = fields["usage"]
        shown = {
            **{name: value for name, value in fields.items() if name not in _PRIVATE},
            "gen_ai.usage.input_tokens": used["input_tokens"],
            "gen_ai.usage.output_tokens": used["output_tokens"],
            "guardchart.turns": used["turns"],
            "guardchart.cost_usd": used["cost_usd"],
        }
        if "error.kind" in shown:
            shown.setdefault("error.type", shown["error.kind"])
        self._close(agent.span, shown)

    def note(self, agent: Any, name: str, fields: Mapping[str, Any]) -> None:
        """An event on an agent's span."""
        agent.span.add_event(name, {_name(key): _plain(v) for key, v in fields.items()})

    def start_call(self, agent: Any, kind: str, fields: Mapping[str, Any]) -> _CallSpan:
        """Open the span of a model or tool call and make it the current one.

        It lies below its agent's; below what is current where the agent itself is not traced.
        """
        operation = "chat" if kind == "model_call" else "execute_tool"
        subject = fields.get("gen_ai.request.model") or fields.get("gen_ai.tool.name")
        kinds = self._api.SpanKind
        span = self._tracer.start_span(
            f"{operation} {subject}" if subject else operation,
            context=None if agent.span is None else self._api.set_span_in_context(agent.span),
            kind=kinds.CLIENT if kind == "model_call" else kinds.INTERNAL,
            attributes={
                "gen_ai.operation.name": operation,
                "gen_ai.agent.name": agent.id,
                **{_name(key): _plain(value) for key, value in fields.items()},
            },
        )
        token = self._context.attach(self._api.set_span_in_context(span))
        return _CallSpan(span, token)

    def end_call(self, call: _CallSpan, fields: Mapping[str, Any]) -> None:
        """Close the span of a call; what was denied or failed is an error."""
        self._context.detach(call.token)
        shown = {name: value for name, value in fields.items() if name not in _PRIVATE}
        outcome = shown.get("outcome")
        if outcome is not None and outcome != "done":
            shown.setdefault("error.type", outcome)
        self._close(call.span, shown)

    def _close(self, span: Any, fields: Mapping[str, Any]) -> None:
        for name, value in fields.items():
            span.set_attribute(_name(name), _plain(value))
        if "error.type" in fields:
            span.set_status(self._api.StatusCode.ERROR, str(fields["error.type"]))
        span.end()


_PRIVATE = frozenset({"duration_s", "usage"})


def _name(name: str) -> str:
    """Names that are no convention's are ours."""
    known = name.startswith(("gen_ai.", "guardchart.")) or name == "error.type"
    return name if known else f"guardchart.{name}"


def _plain(value: Any) -> Any:
    """An attribute's value: a plain one, a list of texts, or JSON text."""
    if isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, list | tuple) and all(isinstance(each, str) for each in value):
        return list(value)
    return json.dumps(value, ensure_ascii=False, default=str)
