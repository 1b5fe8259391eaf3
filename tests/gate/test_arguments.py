from __future__ import annotations

import json
import random
import sys
import time
from typing import Any

import pytest

from guardchart.errors import ToolDeniedError
from guardchart.gate import UNPARSEABLE, ToolCall, canonical, digest, parse_arguments, tool_registry
from guardchart.gate._arguments import ArgumentsRefused, admit

BIG_INT = "9" * 4301

REFUSED_TEXTS = {
    "duplicate key": '{"a": 1, "a": 2}',
    "duplicate key below": '{"a": {"b": 1, "b": 1}}',
    "escaped duplicate key": '{"a": 1, "\\u0061": 2}',
    "NaN": '{"a": NaN}',
    "Infinity": '{"a": Infinity}',
    "-Infinity": '{"a": [-Infinity]}',
    "1e999": '{"a": 1e999}',
    "-1e999": '{"a": -1e999}',
    "int of 4301 digits": '{"a": ' + BIG_INT + "}",
    "negative int of 4301 digits": '{"a": -' + BIG_INT + "}",
    "lone surrogate": '{"a": "\\ud800"}',
    "lone surrogate in a key": '{"\\udfff": 1}',
    "NUL": '{"a": "x\\u0000"}',
    "NUL in a key": '{"a\\u0000": 1}',
    "65 levels": '{"a":' * 65 + "1" + "}" * 65,
    "5000 levels": '{"a":' + "[" * 5000 + "]" * 5000 + "}",
    "5000 open brackets": "[" * 5000,
    "too large": '{"a": "' + "x" * 65536 + '"}',
    "20 MB": '{"a": "' + "x" * 20_000_000 + '"}',
    "not an object": "[1]",
    "text": '"a"',
    "null": "null",
    "nothing": "",
    "blank": "  ",
    "prose": "Sure! {}",
    "trailing": "{} {}",
    "comment": "{/* */}",
    "single quotes": "{'a': 1}",
    "trailing comma": '{"a": 1,}',
    "BOM": "\ufeff{}",
    "control character": '{"a": "\n"}',
}


@pytest.mark.parametrize("text", REFUSED_TEXTS.values(), ids=REFUSED_TEXTS.keys())
def test_hostile_text_is_refused_without_repeating_it(text: str) -> None:
    started = time.process_time()
    with pytest.raises(ToolDeniedError, match="invalid arguments") as caught:
        parse_arguments(text)
    assert time.process_time() - started < 2
    assert caught.value.tool == "*"
    assert len(str(caught.value)) < 200


def test_bytes_that_are_not_utf8_are_refused() -> None:
    with pytest.raises(ToolDeniedError, match="not UTF-8"):
        parse_arguments(b'{"a": "\xff"}')


def test_plain_text_is_parsed() -> None:
    text = '{"a": [1, 2.5, true, null, "\\u00e9\\ud83d\\ude00"], "b": {"c": {}}}'
    assert parse_arguments(text) == {"a": [1, 2.5, True, None, "é😀"], "b": {"c": {}}}
    assert parse_arguments(text.encode()) == parse_arguments(text)


def test_a_text_that_only_spells_an_escape_is_no_nul() -> None:
    assert parse_arguments('{"a": "\\\\u0000"}') == {"a": "\\u0000"}


def test_64_levels_and_4300_digits_are_accepted() -> None:
    assert parse_arguments('{"a":' * 64 + "1" + "}" * 64)
    assert parse_arguments('{"a": ' + BIG_INT[1:] + "}")


def test_brackets_in_strings_are_no_depth() -> None:
    assert parse_arguments(json.dumps({"a": "[{" * 500 + '\\"'}))


def _deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return {"a": value}


class Text(str):
    pass


REFUSED_VALUES = {
    "NaN": {"a": float("nan")},
    "inf": {"a": [float("-inf")]},
    "int": {"a": (10**4300)},
    "surrogate": {"a": "\ud800"},
    "surrogate key": {"\ud800": 1},
    "NUL": {"a": {"b": ["\x00"]}},
    "deep": _deep(64),
    "very deep": _deep(100_000),
    "large": {"a": ["x"] * 70_000},
    "huge": {"a": "x" * 20_000_000},
    "wide": {str(i): i for i in range(40_000)},
    "int key": {"a": {1: 2}},
    "None key": {"a": {None: 2}},
    "tuple": {"a": (1, 2)},
    "set": {"a": {1}},
    "bytes": {"a": b"x"},
    "object": {"a": object()},
    "str subclass": {"a": Text("x")},
    "no dict": [("a", 1)],
    "dict subclass": type("D", (dict,), {})(a=1),
    "marker": {UNPARSEABLE: "prose"},
}


@pytest.mark.parametrize("value", REFUSED_VALUES.values(), ids=REFUSED_VALUES.keys())
def test_hostile_containers_are_refused_before_any_schema(value: Any) -> None:
    started = time.process_time()
    with pytest.raises(ArgumentsRefused):
        admit(value)
    assert time.process_time() - started < 1


def test_a_container_that_holds_itself_is_refused() -> None:
    value: dict[str, Any] = {}
    value["a"] = value
    with pytest.raises(ArgumentsRefused, match="64 levels"):
        admit(value)


def test_text_that_is_not_json_is_denied_by_every_schema() -> None:
    def anything(extra: dict[str, Any] | None = None) -> str:
        return "ran"

    registry = tool_registry(anything)
    call = ToolCall("1", "anything", {UNPARSEABLE: "Sure!"})
    with pytest.raises(ToolDeniedError, match="not valid JSON"):
        registry.authorise(call, ["*"])


def test_canonical_text_is_sorted_and_tells_types_apart() -> None:
    assert canonical({"b": [1.0, 1, True], "a": "é"}) == '{"a":"é","b":[1.0,1,true]}'
    assert len({digest(1), digest(1.0), digest(True), digest("1")}) == 4


@pytest.mark.parametrize("value", [float("nan"), {1, 2}, object(), b"x"])
def test_canonical_refuses_what_is_not_json(value: Any) -> None:
    with pytest.raises(ValueError, match="."):
        canonical(value)


def test_canonical_text_is_that_of_the_public_encoder() -> None:
    rng = random.Random(7)

    def make(depth: int) -> Any:
        kind = rng.randrange(8 if depth else 6)
        if kind == 6:
            return [make(depth - 1) for _ in range(rng.randrange(4))]
        if kind == 7:
            return {chr(rng.randrange(32, 0x250)) * 2: make(depth - 1) for _ in range(4)}
        choices = (
            None,
            True,
            rng.randrange(-(10**20), 10**20),
            rng.random() * 1e30,
            '\x01é\\"',
            "",
        )
        return choices[kind]

    for _ in range(500):
        value = make(4)
        expected = json.dumps(
            value, sort_keys=True, ensure_ascii=False, separators=(",", ":"), allow_nan=False
        )
        assert canonical(value) == expected
        assert json.loads(canonical(value)) == value


def test_a_lowered_conversion_limit_is_a_refusal_and_no_crash() -> None:
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(700)
    try:
        with pytest.raises(ToolDeniedError, match="digits"):
            parse_arguments('{"a": ' + "1" * 800 + "}")
    finally:
        sys.set_int_max_str_digits(before)
