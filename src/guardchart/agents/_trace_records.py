"""What a trace says of a call: fields under OpenTelemetry's GenAI names, without secrets.

Names, counts and outcomes always; what was said and passed only where a trace records content.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from guardchart._redact import scrub_bounded, scrub_text
from guardchart.agents._budgets import MAX_COST_USD, clamp_usage
from guardchart.agents._models import Usage
from guardchart.gate._tools import shown_name

__all__ = [
    "bounded",
    "denials",
    "model_request",
    "model_result",
    "named",
    "reported",
    "request_content",
    "response_content",
    "run_facts",
    "tool_request",
    "tool_result",
]

Fields = dict[str, Any]

_MAX_NAME_CHARS: Final = 128
_MAX_NODES: Final = 4_000
_MAX_TEXT: Final = 4_000
_MAX_CONTENT: Final = 64_000
_MAX_MESSAGES: Final = 50
_COUNTS: Final = ("output_retries", "denied_turns", "retries")


def named(value: Any) -> str | None:
    """A name as it may be written: text, without a secret, of bounded length."""
    return scrub_text(value[:_MAX_NAME_CHARS]) if isinstance(value, str) and value else None


def bounded(value: Any) -> Any:
    """Any value without its secrets, and no more of it than a record should hold."""
    return scrub_bounded(value, max_nodes=_MAX_NODES, max_text=_MAX_TEXT)


def _present(**fields: Any) -> Fields:
    """The fields that have a value; ``__`` in a name stands for a dot."""
    return {
        name.replace("__", "."): value
        for name, value in fields.items()
        if value is not None and value != []
    }


# Models


def model_request(model: Any) -> Fields:
    """Whom is asked, and what it may answer at most."""
    cap = getattr(model, "max_output_tokens", None)
    return _present(
        gen_ai__provider__name=named(getattr(model, "provider", None)),
        gen_ai__request__model=named(getattr(model, "name", None)),
        gen_ai__request__max_tokens=cap if type(cap) is int else None,
    )


def model_result(response: Any) -> Fields:
    """What was answered, as far as names and counts go."""
    reason = named(getattr(response, "finish_reason", None))
    return _present(
        gen_ai__response__model=named(getattr(response, "model", None)),
        gen_ai__response__finish_reasons=None if reason is None else [reason],
        gen_ai__response__tool_calls=[
            named(shown_name(each.name)) for each in getattr(response, "tool_calls", ())
        ],
    )


def reported(source: Any) -> Usage:
    """The usage of a response, or of an error that knows it; finite, so that JSON can hold it."""
    try:
        used = clamp_usage(getattr(source, "usage", None))
    except Exception:  # an error of somebody else's, whose attribute computes
        used = Usage()
    return Usage(used.input_tokens, used.output_tokens, min(used.cost_usd, MAX_COST_USD))


def request_content(messages: Sequence[Any]) -> Fields:
    """The conversation a model was sent, the newest part of it where it is long."""
    system = [each for each in messages if _role(each) == "system"]
    rest = [each for each in messages if _role(each) != "system"]
    kept: list[Any] = []
    left = _MAX_CONTENT
    for message in reversed(rest[-_MAX_MESSAGES:]):
        shown = bounded(_message(message))
        left -= len(str(shown))
        if left < 0 and kept:
            break
        kept.append(shown)
    return _present(
        gen_ai__system_instructions=[
            part for each in system for part in bounded(_message(each))["parts"]
        ],
        gen_ai__input__messages=kept[::-1],
        guardchart__messages_left_out=len(rest) - len(kept) or None,
    )


def response_content(response: Any) -> Fields:
    """The answer itself."""
    parts: list[Any] = []
    if isinstance(response.text, str):
        parts.append({"type": "text", "content": response.text})
    parts.extend(_call(call.id, call.name, call.arguments) for call in response.tool_calls)
    message = {"role": "assistant", "parts": parts}
    reason = getattr(response, "finish_reason", None)
    if isinstance(reason, str):
        message["finish_reason"] = reason
    return {"gen_ai.output.messages": bounded([message])}


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, Mapping) else None


def _message(message: Any) -> Fields:
    if not isinstance(message, Mapping):
        return {"role": "user", "parts": []}
    content = message.get("content")
    if message.get("role") == "tool":
        id_ = message.get("tool_call_id")
        return {
            "role": "tool",
            "parts": [{"type": "tool_call_response", "id": id_, "response": content}],
        }
    parts = list(_parts(content))
    parts.extend(
        _call(call.get("id"), call.get("name"), call.get("arguments"))
        for call in message.get("tool_calls") or ()
        if isinstance(call, Mapping)
    )
    return {"role": message.get("role"), "parts": parts}


def _parts(content: Any) -> Iterable[Fields]:
    """Text as it is; of images and files only that they were there."""
    if isinstance(content, str):
        yield {"type": "text", "content": content}
    elif isinstance(content, list | tuple):
        for part in content:
            kind = part.get("type") if isinstance(part, Mapping) else None
            text = part.get("text") if isinstance(part, Mapping) else None
            if kind == "text" and isinstance(text, str):
                yield {"type": "text", "content": text}
            else:
                yield {"type": kind if isinstance(kind, str) else "other"}


def _call(id_: Any, name: Any, arguments: Any) -> Fields:
    return {"type": "tool_call", "id": id_, "name": name, "arguments": arguments}


# Tools


def tool_request(call: Any) -> Fields:
    """Which call of which tool."""
    return _present(
        gen_ai__tool__name=named(shown_name(call.name)),
        gen_ai__tool__type="function",
        gen_ai__tool__call__id=named(call.id),
    )


def tool_result(outcome: Any) -> Fields:
    """What became of it: its outcome, whether its body ran now, why it was denied."""
    error = outcome.error
    return _present(
        outcome=outcome.status,
        entered=bool(outcome.entered),
        reason=named(getattr(error, "reason", None)) if outcome.status in _DENIED else None,
        error__type=None if error is None else type(error).__name__,
    )


_DENIED: Final = ("denied", "tampered")


def denials(turn: Any) -> list[Fields]:
    """A line for each call of a turn that the gate refused before anything ran."""
    return [
        {**tool_request(each.call), **_present(outcome="denied", reason=named(each.reason))}
        for each in getattr(turn, "verdicts", None) or ()
        if not each.ok
    ]


# Machines


def run_facts(context: Mapping[str, Any]) -> Fields:
    """What a loop's context says of how it goes: the kind of its error, what was tried again."""
    error = context.get("error")
    kind = error.get("kind") if isinstance(error, Mapping) else None
    counts = {key: value for key in _COUNTS if type(value := context.get(key)) is int and value > 0}
    exceeded = {"budget_exceeded": True} if context.get("budget_exceeded") is True else {}
    return {**_present(error__kind=named(kind)), **counts, **exceeded}
