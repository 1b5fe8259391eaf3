"""The walk that copies untrusted data: caps, exact types, paths without values."""

from __future__ import annotations

import enum
import json
import math
import time
import tracemalloc
from collections import OrderedDict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from guardchart.errors import SnapshotError
from guardchart.kernel._plain import MAX_BYTES, MAX_DEPTH, copy_json, parse_json

NAMES = frozenset({"context", "messages"})


def copied(value: dict[str, Any], *, max_bytes: int = MAX_BYTES, max_depth: int = MAX_DEPTH) -> Any:
    return copy_json(value, max_bytes, max_depth, NAMES)[0]


def refusal(value: dict[str, Any], **caps: int) -> SnapshotError:
    with pytest.raises(SnapshotError) as caught:
        copied(value, **caps)
    return caught.value


class Word(str):
    pass


class Whole(int):
    pass


class Colour(enum.IntEnum):
    RED = 1


def test_copy_equals_the_original_and_shares_no_container() -> None:
    value = {"context": {"messages": [{"a": [1, 2.5, True, None, "x"]}], "n": -3}}
    copy = copied(value)
    assert copy == value
    copy["context"]["messages"][0]["a"].append(1)
    assert value["context"]["messages"][0]["a"] == [1, 2.5, True, None, "x"]


def test_copy_unshares_a_container_that_occurs_twice() -> None:
    inner: list[int] = []
    copy = copied({"a": inner, "b": inner})
    copy["a"].append(1)
    assert copy["b"] == []


def test_copy_keeps_the_order_of_keys() -> None:
    assert list(copied({"b": 1, "a": 2, "c": 3})) == ["b", "a", "c"]


@pytest.mark.parametrize(
    "item",
    [
        (1, 2),
        {1, 2},
        frozenset(),
        b"x",
        bytearray(b"x"),
        1j,
        object(),
        Word("x"),
        Whole(1),
        Colour.RED,
        OrderedDict(),
        print,
        int,
        ...,
        range(3),
    ],
    ids=lambda item: type(item).__name__,
)
@pytest.mark.parametrize("inside", ["dict", "list"])
def test_copy_refuses_what_is_not_exactly_a_json_type(item: object, inside: str) -> None:
    messages: Any = [0, item] if inside == "list" else {"k": 0, "l": item}
    error = refusal({"context": {"messages": messages}})
    where = "[1]" if inside == "list" else ".<key 2>"
    assert error.path == "$.context.messages" + where
    assert "are JSON" in str(error)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("inside", ["dict", "list"])
def test_copy_refuses_a_number_that_is_not_finite(number: float, inside: str) -> None:
    error = refusal({"context": [number] if inside == "list" else {"messages": number}})
    assert error.path == ("$.context[0]" if inside == "list" else "$.context.messages")
    assert "finite" in str(error)


@pytest.mark.parametrize("number", [1.7976931348623157e308, -1.7976931348623157e308, 5e-324, -0.0])
def test_copy_accepts_the_extremes_of_finite_floats(number: float) -> None:
    assert copied({"context": number}) == {"context": number}


def test_copy_refuses_an_integer_python_could_not_write_as_text() -> None:
    assert copied({"context": 10**4299})
    assert "4300" in str(refusal({"context": 10**4300}))
    assert "4300" in str(refusal({"context": [-(10**4300)]}))


@pytest.mark.parametrize("key", [1, None, True, 1.5, ("a",), Word("context"), b"a"], ids=repr)
def test_copy_refuses_a_key_that_is_not_exactly_a_string(key: object) -> None:
    error = refusal({"context": {"messages": {key: 1}}})
    assert error.path == "$.context.messages"
    assert "keys" in str(error)


def test_copy_names_no_undeclared_key_and_no_value() -> None:
    error = refusal({"context": {"SECRET": {"CANARY": ["TOKEN", {"x": "PASSWORD", "y": b"HUSH"}]}}})
    assert error.path == "$.context.<key 1>.<key 1>[1].<key 2>"
    for word in ("SECRET", "CANARY", "TOKEN", "PASSWORD", "HUSH"):
        assert word not in str(error)


def test_copy_stops_at_the_depth_cap() -> None:
    def nested(levels: int) -> dict[str, Any]:
        value: dict[str, Any] = {}
        for _ in range(levels - 1):
            value = {"context": value}
        return value

    assert copied(nested(5), max_depth=5) == nested(5)
    with_list = {"context": {"context": []}}
    assert copied(with_list, max_depth=3) == with_list
    assert refusal(with_list, max_depth=2).path == "$.context.context"
    error = refusal(nested(6), max_depth=5)
    assert "max_depth=5" in str(error)
    assert error.path == "$" + ".context" * 5


@pytest.mark.parametrize("kind", ["list", "dict"])
def test_copy_survives_a_hundred_thousand_levels(kind: str) -> None:
    value: Any = {}
    for _ in range(100_000):
        value = [value] if kind == "list" else {"context": value}
    error = refusal({"context": value})
    assert "max_depth=100" in str(error)
    assert len(error.path) < 200
    while value:  # unwind: freeing the chain at once is the test's problem, not the walk's
        value = value.pop() if kind == "list" else value.pop("context")


def test_copy_is_bounded_when_containers_are_shared_without_end() -> None:
    bomb: Any = []
    for _ in range(90):
        bomb = [bomb] * 10
    started = time.process_time()
    assert "max_bytes" in str(refusal({"context": bomb}))
    assert time.process_time() - started < 5


def test_copy_is_bounded_when_a_container_holds_itself() -> None:
    wide: list[Any] = []
    wide.extend([wide, wide])
    assert "max_bytes" in str(refusal({"context": wide}))
    narrow: dict[str, Any] = {}
    narrow["context"] = narrow
    assert "max_depth" in str(refusal(narrow))


@pytest.mark.parametrize("kind", ["list", "dict"])
def test_copy_is_bounded_when_a_large_container_is_reached_a_thousand_times(kind: str) -> None:
    large: Any = [None] * 200_000 if kind == "list" else dict.fromkeys(map(str, range(30_000)))
    tracemalloc.start()
    try:
        for many in ([large] * 1000, dict.fromkeys(map(str, range(1000)), large)):
            assert "max_bytes" in str(refusal({"context": many}))
        assert tracemalloc.get_traced_memory()[1] < 50_000_000
    finally:
        tracemalloc.stop()


def test_copy_refuses_fifty_megabytes_before_copying_them() -> None:
    for big in ([0] * 25_000_000, "x" * 50_000_000, {"context": "x" * 50_000_000}):
        started = time.process_time()
        assert "max_bytes" in str(refusal({"context": big}))
        assert time.process_time() - started < 0.5


def test_copy_counts_keys_and_strings_and_never_more_than_the_text() -> None:
    for value in ({"context": ["aé\n"] * 10, "k" * 50: {}}, {}, {"a": 1}, {"a": [[], {}, ""]}):
        size = copy_json(value, MAX_BYTES, MAX_DEPTH, NAMES)[1]
        assert size <= len(json.dumps(value, ensure_ascii=False, separators=(",", ":"))) + 2
    assert "max_bytes=99" in str(refusal({"k" * 100: 1}, max_bytes=99))


def test_parse_refuses_text_beyond_the_cap_before_parsing() -> None:
    with pytest.raises(SnapshotError, match="max_bytes=10"):
        parse_json("é" * 6, 10)
    with pytest.raises(SnapshotError, match="max_bytes=10"):
        parse_json("\ud800" * 4, 10)
    with pytest.raises(SnapshotError, match="max_bytes=10"):
        parse_json("[" * 11, 10)


@pytest.mark.parametrize(
    "text",
    ["", "{", "nul", "{'a': 1}", "[" * 100_000, '{"a":' * 100_000, "1" * 5000, "\ufeff{}"],
    ids=["empty", "open", "word", "quotes", "lists", "objects", "digits", "bom"],
)
def test_parse_names_text_that_does_not_parse(text: str) -> None:
    with pytest.raises(SnapshotError, match="not valid snapshot JSON") as caught:
        parse_json(text, MAX_BYTES)
    assert caught.value.path == "$"
    assert caught.value.__suppress_context__


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_parse_leaves_infinities_to_the_copy_which_knows_their_path(text: str) -> None:
    parsed = parse_json(f'{{"context": {text}}}', MAX_BYTES)
    assert isinstance(parsed, dict)
    assert refusal(parsed).path == "$.context"


ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=3)
    | st.builds(Word)
    | st.builds(Whole)
    | st.binary(max_size=2)
    | st.just(()),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=2) | st.integers(0, 1), inner, max_size=3)
    ),
    max_leaves=8,
)


def is_plain(value: object) -> bool:
    if type(value) is dict:
        return all(type(key) is str and is_plain(item) for key, item in value.items())
    if type(value) is list:
        return all(is_plain(item) for item in value)
    if type(value) is float:
        return math.isfinite(value)
    return value is None or type(value) in (str, int, bool)


@settings(max_examples=200, deadline=None)
@given(value=ANYTHING)
def test_copy_takes_plain_json_and_nothing_else(value: Any) -> None:
    root = {"context": value}
    if is_plain(value):
        assert copied(root) == root
        assert json.loads(json.dumps(copied(root))) == root
    else:
        error = refusal(root)
        assert error.path.startswith("$.context")
        assert "changed" not in str(error)


def test_an_owned_value_is_checked_where_it_is() -> None:
    value = {"context": [{}]}
    copy, _ = copy_json(value, MAX_BYTES, MAX_DEPTH, NAMES, owned=True)
    assert copy is value
    with pytest.raises(SnapshotError):
        copy_json({"context": [math.inf]}, MAX_BYTES, MAX_DEPTH, NAMES, owned=True)


class _Text(str):
    """A subclass may do anything when it is read."""


@pytest.mark.parametrize(
    ("last", "path"),
    [
        ({"role": "user", "content": _Text("x")}, "$.context[2].<key 2>"),
        ({"role": "user", "content": b"x"}, "$.context[2].<key 2>"),
        ({"role": "user", "content": math.nan}, "$.context[2].<key 2>"),
        ({"role": "user", _Text("content"): "x"}, "$.context[2]"),
        ({"role": "user", 7: "x"}, "$.context[2]"),
    ],
)
def test_a_list_of_texts_is_checked_to_its_last_entry(last: Any, path: str) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    good = {"context": [*messages, {"role": "user", "content": "x"}]}
    copy, size = copy_json(good, MAX_BYTES, MAX_DEPTH, NAMES)
    assert copy == good and size == copy_json(good, MAX_BYTES, MAX_DEPTH, NAMES, owned=True)[1]
    assert not {id(each) for each in copy["context"]} & {id(each) for each in good["context"]}
    for cap in (size - 1, 20, 3):
        with pytest.raises(SnapshotError, match="larger than"):
            copy_json(good, cap, MAX_DEPTH, NAMES)
    with pytest.raises(SnapshotError, match="nested deeper"):
        copy_json(good, MAX_BYTES, 2, NAMES)
    with pytest.raises(SnapshotError) as refused:
        copy_json({"context": [*messages, last]}, MAX_BYTES, MAX_DEPTH, NAMES)
    assert refused.value.path == path
