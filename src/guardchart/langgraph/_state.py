"""Graph state, whatever its schema: read by key or attribute, written as a dict of updates."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError

from guardchart.errors import AgentConfigError

__all__ = ["MAX_SNAPSHOT_CHARS", "check_clearable", "is_blank", "parse_snapshot", "read_key"]

MAX_SNAPSHOT_CHARS = 1 << 20
"""Longer text in the state key is not parsed at all; the kernel's own cap is the same."""


def read_key(state: Any, key: str) -> Any:
    """Return one entry of a graph state, None where it has not been written yet.

    Args:
        state: What LangGraph hands a node: a mapping, a pydantic model or a dataclass.
        key: The entry's name.

    Raises:
        AgentConfigError: The state's class declares no such field, so that LangGraph would
            drop what is written to it; or the state is none of the three. Nothing ran.

    Example:
        >>> read_key({"xsm": 1}, "xsm"), read_key({}, "xsm")
        (1, None)
    """
    if type(state) is dict or isinstance(state, Mapping):
        return state.get(key)
    value = getattr(state, key, _MISSING)
    if value is not _MISSING:
        return value
    if isinstance(state, BaseModel) or dataclasses.is_dataclass(state):
        raise AgentConfigError(
            f"the graph state {type(state).__name__} has no field {key!r}: declare it, "
            "or LangGraph drops what is written to it"
        )
    raise AgentConfigError(
        "the graph state must be a dict, a pydantic model or a dataclass, "
        f"not {type(state).__name__}"
    )


def is_blank(value: Any) -> bool:
    """Whether a state entry means "no snapshot yet": None, ``{}`` or ``""``.

    A pydantic or dataclass state has to give its field some default, and these are it.
    """
    return value is None or ((type(value) is dict or type(value) is str) and not value)


def parse_snapshot(value: Any, key: str) -> dict[str, Any]:
    """Return a snapshot entry as a dict; its content is not looked at.

    Args:
        value: A snapshot dict or its JSON text.
        key: The state key, for messages.

    Raises:
        AgentConfigError: Something else was written to the key.
    """
    if isinstance(value, str):
        if len(value) > MAX_SNAPSHOT_CHARS:
            raise AgentConfigError(f"state[{key!r}] is longer than {MAX_SNAPSHOT_CHARS} characters")
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            # The parser's own message would count the characters of somebody else's text.
            raise AgentConfigError(
                f"state[{key!r}] is text, but not valid snapshot JSON; "
                "reserve the key for statechart_node"
            ) from None
    if type(value) is dict:
        return value
    if isinstance(value, Mapping):
        return dict(value)
    raise AgentConfigError(
        f"state[{key!r}] must be a snapshot dict or JSON string, not {type(value).__name__}; "
        "reserve the key for statechart_node"
    )


def check_clearable(state_type: type[Any], key: str) -> None:
    """Refuse an event field that cannot hold None, which the node writes once it is consumed.

    LangGraph validates a pydantic state before every node; a None in a field that does not
    take it would make the thread raise for ever.

    Raises:
        AgentConfigError: Naming the field and the remedy. Nothing ran.
    """
    if not issubclass(state_type, BaseModel):
        return
    field = state_type.model_fields.get(key)
    if field is None or field.annotation is None:
        return
    try:
        TypeAdapter(field.annotation).validate_python(None)
    except ValidationError:
        raise AgentConfigError(
            f"event_key={key!r}: the field of {state_type.__name__} must accept None, "
            "since the node clears it once the event is consumed; "
            f"declare it as `{key}: dict | None = None`"
        ) from None


_MISSING: Any = object()
