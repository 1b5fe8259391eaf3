"""Graph state by key or attribute, and what may stand under the snapshot's key."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest
from pydantic import BaseModel

from guardchart.errors import AgentConfigError
from guardchart.langgraph._state import (
    MAX_SNAPSHOT_CHARS,
    check_clearable,
    is_blank,
    parse_snapshot,
    read_key,
)


class Model(BaseModel):
    xsm: dict[str, Any] | None = None
    event: dict[str, Any] | None = None


class Strict(BaseModel):
    event: dict[str, Any] = {}


@dataclass
class Data:
    xsm: dict[str, Any] | None = None


@pytest.mark.parametrize("state", [{"xsm": {"a": 1}}, Model(xsm={"a": 1}), Data(xsm={"a": 1})])
def test_read_key_reads_by_key_or_attribute(state: Any) -> None:
    assert read_key(state, "xsm") == {"a": 1}


def test_read_key_gives_none_when_a_dict_has_not_been_written() -> None:
    assert read_key({}, "xsm") is None


@pytest.mark.parametrize("state", [Model(), Data()])
def test_read_key_is_refused_when_the_state_class_declares_no_such_field(state: Any) -> None:
    with pytest.raises(AgentConfigError, match="has no field 'other': declare it"):
        read_key(state, "other")


def test_read_key_is_refused_when_the_state_is_something_else() -> None:
    with pytest.raises(AgentConfigError, match="must be a dict, a pydantic model or a dataclass"):
        read_key(["no"], "xsm")


@pytest.mark.parametrize("value", [None, {}, ""])
def test_is_blank_is_true_for_the_defaults_a_schema_needs(value: Any) -> None:
    assert is_blank(value)


@pytest.mark.parametrize("value", [{"a": 1}, "{}", [], 0, False])
def test_is_blank_is_false_for_anything_else(value: Any) -> None:
    assert not is_blank(value)


def test_parse_snapshot_takes_a_dict_or_its_json() -> None:
    assert parse_snapshot({"rev": 1}, "xsm") == {"rev": 1}
    assert parse_snapshot(json.dumps({"rev": 1}), "xsm") == {"rev": 1}


@pytest.mark.parametrize("text", ["{", "nope", "[" * 100_000, '{"a": 1} x'])
def test_parse_snapshot_is_refused_when_text_is_no_json(text: str) -> None:
    with pytest.raises(AgentConfigError, match="not valid snapshot JSON") as caught:
        parse_snapshot(text, "xsm")
    assert "nope" not in str(caught.value)


@pytest.mark.parametrize("value", [1, [], True, "[1]", "1", object()])
def test_parse_snapshot_is_refused_when_something_else_holds_the_key(value: Any) -> None:
    with pytest.raises(AgentConfigError, match="must be a snapshot dict or JSON string"):
        parse_snapshot(value, "xsm")


def test_parse_snapshot_reads_no_text_beyond_the_cap() -> None:
    with pytest.raises(AgentConfigError, match="longer than"):
        parse_snapshot("[" + " " * MAX_SNAPSHOT_CHARS + "]", "xsm")


def test_check_clearable_refuses_a_pydantic_field_that_cannot_hold_none() -> None:
    check_clearable(Model, "event")
    check_clearable(dict, "event")
    check_clearable(Data, "xsm")
    with pytest.raises(AgentConfigError, match="must accept None"):
        check_clearable(Strict, "event")
