"""How results, failures and the ledger's verdicts are written into a log, and read again.

What a host hands to a step is first made plain JSON and then read back, live as in a replay, so
that both see the same.
"""

from __future__ import annotations

import contextlib
import keyword
import sys
from collections.abc import Callable, Mapping
from math import isfinite
from typing import Any, Final

from pydantic import BaseModel

from guardchart.agents._budgets import clamp_usage
from guardchart.agents._models import ModelResponse, Usage
from guardchart.agents._requests import DecisionAttempt
from guardchart.agents._turn import Decided, ModelTurn, assessed_turn, charged_turn
from guardchart.errors import (
    AgentError,
    DecisionExhaustedError,
    GuardchartError,
    RecordedFailure,
)
from guardchart.gate import ToolCall
from guardchart.kernel import EngineEvent, Event, done, failed, fired
from guardchart.runtime import BeforeStep

__all__ = [
    "dump_failure",
    "dump_turn",
    "dump_verdict",
    "load_failure",
    "load_turn",
    "named_failure",
    "plain",
    "recall_verdict",
]

_MAX_DEPTH: Final = 64
_AS_IT_IS: Final = frozenset({str, bool, int, type(None)})


def plain(value: Any, what: str, depth: int = 0) -> Any:
    """A copy of a value made of JSON types; pydantic models are dumped.

    Raises:
        AgentError: Something in it is not JSON; ``what`` names it, the value is not shown.
    """
    kind = type(value)
    if kind in _AS_IT_IS or (kind is float and isfinite(value)):
        return value
    if depth > _MAX_DEPTH:
        raise AgentError(f"{what} is nested too deeply to be recorded")
    if kind is not dict and kind is not list and isinstance(value, BaseModel):
        to_json = getattr(value, "to_json", None)
        value = to_json() if callable(to_json) else value.model_dump(mode="json")
    # Loops, as a comprehension would cost each call of this function its closure.
    if kind is dict or (kind is not list and isinstance(value, Mapping)):
        for key in value:
            if type(key) is not str:
                raise _no_json(value, what)
        copied = {}
        for key, each in value.items():
            kind = type(each)
            flat = kind in _AS_IT_IS or (kind is float and isfinite(each))
            copied[key] = each if flat else plain(each, what, depth + 1)
        return copied
    if kind is list or isinstance(value, list | tuple):
        listed = []
        for each in value:
            copy = each if type(each) in _AS_IT_IS else plain(each, what, depth + 1)
            listed.append(copy)
        return listed
    raise _no_json(value, what)


def _no_json(value: Any, what: str) -> AgentError:
    return AgentError(
        f"{what} holds a {type(value).__name__}, which no log can keep; return JSON types or a "
        "pydantic model"
    )


# Failures


def dump_failure(error: BaseException) -> dict[str, Any]:
    """A failure as JSON: its class, its message where it is one of ours, and what was spent."""
    data: dict[str, Any] = {"type": type(error).__name__}
    if isinstance(error, GuardchartError):
        data["message"] = str(error)
    usage = getattr(error, "usage", None)
    if isinstance(usage, Usage):
        data["usage"] = dump_usage(usage)
    attempts = getattr(error, "attempts", None)
    if isinstance(attempts, list | tuple):
        data["attempts"] = plain(list(attempts), "an attempt")
    return data


def load_failure(data: Any) -> AgentError:
    """The failure that JSON describes; always one, whatever it is given."""
    if not isinstance(data, Mapping):
        data = {}
    message = data.get("message")
    if data.get("type") == DecisionExhaustedError.__name__:
        return DecisionExhaustedError(_attempts(data.get("attempts")))
    error = named_failure(data.get("type"), message if isinstance(message, str) else "")
    if "usage" in data:
        error.usage = load_usage(data["usage"])  # type: ignore[attr-defined]
    return error


def _attempts(data: Any) -> list[DecisionAttempt]:
    found = []
    for each in data if isinstance(data, list | tuple) else ():
        with contextlib.suppress(AgentError):
            found.append(DecisionAttempt.from_json(each))
    return found


def named_failure(name: Any, message: str = "") -> AgentError:
    """A failure whose class has this name: the log's word, so no class is looked up by it."""
    fit = isinstance(name, str) and len(name) <= 80 and name.isascii()
    if not (fit and name.isidentifier() and not keyword.iskeyword(name)):
        name = "AgentError"
    kind: type[AgentError] = type(name, (RecordedFailure,), {"__module__": __name__})
    return kind(message)


# A model's turn


def dump_usage(usage: Usage) -> dict[str, Any]:
    clean = clamp_usage(usage)
    return {
        "input_tokens": clean.input_tokens,
        "output_tokens": clean.output_tokens,
        "cost_usd": min(clean.cost_usd, sys.float_info.max),
    }


def load_usage(data: Any) -> Usage:
    if not isinstance(data, Mapping):
        return Usage()
    tokens_in, tokens_out = data.get("input_tokens", 0), data.get("output_tokens", 0)
    return clamp_usage(Usage(tokens_in, tokens_out, data.get("cost_usd", 0.0)))


def dump_turn(turn: ModelResponse) -> dict[str, Any]:
    """A model's answer as JSON types."""
    return {
        "text": turn.text,
        "tool_calls": [
            {"id": call.id, "name": call.name, "arguments": plain(call.arguments, "an argument")}
            for call in turn.tool_calls
        ],
        "usage": dump_usage(turn.usage),
        "model": turn.model,
    }


def load_turn(data: Any) -> ModelTurn:
    """The answer that JSON types describe, as the loop's service returns it; a text is final.

    Raises:
        AgentError: It describes none.
    """
    if data is None or isinstance(data, str):
        return charged_turn(data, (), Usage(), None)
    if not isinstance(data, Mapping):
        raise AgentError("a model's turn is a text, a ModelResponse, or a mapping made of one")
    calls = data.get("tool_calls") or ()
    model = data.get("model")
    if not isinstance(calls, list | tuple) or not all(_is_call(each) for each in calls):
        raise AgentError("tool_calls is a list of {'id', 'name', 'arguments'}")
    return charged_turn(
        data.get("text"),
        tuple(ToolCall(each["id"], each["name"], dict(each["arguments"])) for each in calls),
        load_usage(data.get("usage")),
        model if isinstance(model, str) else None,
    )


def _is_call(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and {"id", "name", "arguments"} <= set(value)
        and isinstance(value["arguments"], Mapping)
    )


# Verdicts of before_step


def dump_verdict(came: Any, verdict: BeforeStep | Exception) -> dict[str, Any]:
    """What a hook said of an event, as JSON types.

    Raises:
        AgentError: The hook is not the loop's, and its event holds what no log can keep.
    """
    if isinstance(verdict, Exception):
        return {"raised": dump_failure(verdict)}
    data: dict[str, Any] = {}
    if verdict.denied is not None:
        data["denied"] = verdict.denied
    if verdict.batch_no is not None:
        data["batch_no"] = verdict.batch_no
    event = verdict.event
    if isinstance(event, Decided):
        data["decided"] = {
            "outcomes": dict(event.outcomes),
            "open_ids": list(event.open_ids),
            "decided_ids": list(event.decided_ids),
            "edits": dict(event.edits),
            "tampered": event.tampered,
        }
    elif isinstance(event, EngineEvent):
        data["engine"] = _dump_engine(came, event)
    elif event is not None:
        payload = plain(event.payload, "the event of a hook")
        data["event"] = {"type": event.type, "payload": payload}
    return data


def _dump_engine(came: Any, event: EngineEvent) -> dict[str, Any]:
    data: dict[str, Any] = {"kind": event.kind, "key": event.key}
    value = event.value
    if event.kind == "fired":
        data["payload"] = plain(value or {}, "the payload of a timer")
    elif event.kind == "failed":
        data["outcomes"] = plain(getattr(value, "outcomes", {}), "an outcome")
    elif isinstance(value, ModelTurn):
        # Text and calls are the event's own; the verdicts are found again, being pure.
        data["row_ids"] = list(value.row_ids)
    else:
        data["output"] = plain(value, "the output of a hook's event")
    return data


def recall_verdict(
    data: Mapping[str, Any], came: Any, judged: Callable[[Any], ModelTurn]
) -> BeforeStep | Exception:
    """The verdict that JSON types describe, of the event it was given about.

    Args:
        data: From `dump_verdict`.
        came: The event as it came, live or in a replay.
        judged: Assesses the calls of a model's turn.
    """
    if "raised" in data:
        return load_failure(data["raised"])
    event: Any = None
    if "decided" in data:
        said = data["decided"]
        event = Decided(
            came,
            outcomes=said["outcomes"],
            open_ids=tuple(said["open_ids"]),
            decided_ids=tuple(said["decided_ids"]),
            edits=said["edits"],
            tampered=said["tampered"],
        )
    elif "engine" in data:
        event = _recall_engine(data["engine"], came, judged)
    elif "event" in data:
        event = Event(data["event"]["type"], data["event"]["payload"])
    return BeforeStep(event, data.get("batch_no"), data.get("denied"))


def _recall_engine(
    said: Mapping[str, Any], came: Any, judged: Callable[[Any], ModelTurn]
) -> EngineEvent:
    key = said["key"]
    if said["kind"] == "fired":
        return fired(key, said["payload"])
    if said["kind"] == "failed":
        error: Any = came.value if isinstance(came.value, BaseException) else load_failure(None)
        error.outcomes = dict(said["outcomes"])
        return failed(key, error)
    if "row_ids" not in said:
        return done(key, said["output"])
    turn = judged(came.value)
    return done(key, assessed_turn(turn, turn.verdicts or (), said["row_ids"]))
