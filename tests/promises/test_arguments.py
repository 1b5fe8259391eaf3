"""Arguments are JSON, strict at every depth, and names are exact."""

from __future__ import annotations

import dataclasses
import enum
import uuid
from datetime import date, datetime
from decimal import Decimal
from typing import Any

import pytest
from pydantic import BaseModel
from typing_extensions import TypedDict

from guardchart.agents import FakeModel, run_agent_sync, tool_registry
from guardchart.errors import ToolDeniedError
from guardchart.gate import parse_arguments
from tests.promises.bank import AT_ONCE, SAY, Bank


class Model(BaseModel):
    n: int


class Typed(TypedDict):
    n: int


@dataclasses.dataclass
class Data:
    n: int


class Color(enum.Enum):
    RED = "red"


SEEN: list[Any] = []


def take(model: Model, typed: Typed, data: Data, free: dict[str, Any], number: float = 0.5) -> str:
    """Take nested arguments."""
    SEEN.append((model, typed, data, free, number))
    return "taken"


GOOD: dict[str, Any] = {"model": {"n": 1}, "typed": {"n": 1}, "data": {"n": 1}, "free": {}}


def proposed(arguments: Any, *tools: Any, name: str = "take") -> Any:
    SEEN.clear()
    model = FakeModel([{"tool": name, "args": arguments}, SAY], is_async=False)
    return run_agent_sync(
        model, tools=tool_registry(*(tools or (take,))), prompt="Go.", retry=AT_ONCE
    )


def test_well_formed_nested_arguments_are_taken() -> None:
    assert proposed(GOOD).ok
    assert SEEN


LAX: dict[str, Any] = {
    "an unknown key at the top": {**GOOD, "secret_key_9": 1},
    "an unknown key in a model": {**GOOD, "model": {"n": 1, "x": 2}},
    "an unknown key in a TypedDict": {**GOOD, "typed": {"n": 1, "x": 2}},
    "an unknown key in a dataclass": {**GOOD, "data": {"n": 1, "x": 2}},
    "a number as text": {**GOOD, "model": {"n": "1"}},
    "a float for an int": {**GOOD, "typed": {"n": 1.0}},
    "a bool for an int": {**GOOD, "data": {"n": True}},
    "a missing key": {"model": {"n": 1}},
    "text for a number": {**GOOD, "number": "0.5"},
    "NaN": {**GOOD, "number": float("nan")},
    "infinity": {**GOOD, "number": float("inf")},
    "ten to the 400": {**GOOD, "number": 10**400},
    "a lone surrogate": {**GOOD, "free": {"x": "\ud800"}},
    "NUL": {**GOOD, "free": {"x": "a\0b"}},
}


def _nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


LAX["5 000 levels"] = {**GOOD, "free": {"x": _nested(5_000)}}
LAX["20 MB"] = {**GOOD, "free": {"x": "y" * 20_000_000}}


@pytest.mark.gate
@pytest.mark.parametrize("what", LAX)
def test_unknown_keys_coercions_and_non_json_are_refused_at_every_depth(what: str) -> None:
    result = proposed(LAX[what])
    assert result.error is not None and result.error["kind"] == "tool_denied"
    assert "invalid arguments" in result.error["message"]
    assert "secret_key_9" not in str(result.error)
    assert SEEN == []


RAW = {
    "duplicate keys": '{"n": 1, "n": 2}',
    "NaN": '{"n": NaN}',
    "a literal that overflows": '{"n": 1e999}',
    "Infinity": '{"n": Infinity}',
    "a huge int": '{"n": ' + "9" * 5000 + "}",
    "a lone surrogate": '{"n": "\\ud800"}',
    "NUL": '{"n": "\\u0000"}',
    "5 000 levels": '{"n": ' + "[" * 5000 + "]" * 5000 + "}",
    "20 MB": '{"n": "' + "x" * 20_000_000 + '"}',
    "no object": "[1]",
    "no JSON": "{",
}


@pytest.mark.parametrize("what", RAW)
def test_raw_argument_text_is_refused_before_any_schema_sees_it(what: str) -> None:
    with pytest.raises(ToolDeniedError, match="invalid arguments"):
        parse_arguments(RAW[what])


def test_json_dates_decimals_uuids_enums_and_bytes_are_usable() -> None:
    got: list[Any] = []

    def rich(
        day: date,
        at: datetime,
        amount: Decimal,
        key: uuid.UUID,
        color: Color,
        blob: bytes,
        pair: tuple[int, str],
    ) -> str:
        """Take rich types."""
        got.append((day, at, amount, key, color, blob, pair))
        return "ok"

    arguments = {
        "day": "2026-11-30",
        "at": "2026-11-30T12:00:00Z",
        "amount": "12.50",
        "key": "12345678-1234-5678-1234-567812345678",
        "color": "red",
        "blob": "aGk=",
        "pair": [1, "x"],
    }
    assert proposed(arguments, rich, name="rich").ok
    ((day, at, amount, key, color, blob, pair),) = got
    assert day == date(2026, 11, 30) and at.year == 2026 and amount == Decimal("12.50")
    assert isinstance(key, uuid.UUID) and color is Color.RED and pair == (1, "x")
    assert blob == b"hi"


@pytest.mark.gate
@pytest.mark.parametrize(
    "name", ["lооkup", "lookup\u200b", "lookup\n", "LOOKUP", " lookup", "l" * 10_000, "", "*"]
)
def test_look_alike_and_malformed_tool_names_are_unregistered(name: str) -> None:
    bank = Bank()
    result = bank.run([{"tool": name, "args": {"order_id": 1}}, SAY])
    assert result.error is not None and result.error["kind"] == "tool_denied"
    assert bank.entered == []
    assert len(str(result.error)) < 500


def test_dunder_keys_in_free_dicts_stay_inert_data() -> None:
    free = {"__class__": "os.system", "__proto__": {"x": 1}, "__reduce__": [1]}
    assert proposed({**GOOD, "free": free}).ok
    assert SEEN[0][3] == free and type(SEEN[0][3]) is dict
