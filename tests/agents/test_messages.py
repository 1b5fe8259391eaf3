import json
import math

import pytest

from guardchart.agents._messages import (
    assistant_turn,
    call_ids,
    check_messages,
    open_calls,
    safe_text,
    storable_arguments,
    system_turn,
    tool_turn,
    user_turn,
)
from guardchart.errors import AgentError
from guardchart.gate import ToolCall


def asks(*ids):
    return assistant_turn(None, [ToolCall(i, "lookup", {"n": 1}) for i in ids])


def contents(messages):
    return [m["content"] or "+".join(call_ids([m])) for m in messages]


# --- building ----------------------------------------------------------------------------------


def test_messages_have_exactly_the_compact_keys():
    assert system_turn("s") == {"role": "system", "content": "s"}
    assert user_turn("u") == {"role": "user", "content": "u"}
    assert assistant_turn("a") == {"role": "assistant", "content": "a"}
    assert assistant_turn(None, [ToolCall("c", "t", {"n": 1})]) == {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c", "name": "t", "arguments": {"n": 1}}],
    }
    assert tool_turn("c", "ok", "t") == {
        "role": "tool",
        "tool_call_id": "c",
        "content": "ok",
        "name": "t",
    }


def test_safe_text_replaces_only_what_no_store_can_hold():
    assert safe_text("plain é 漢 😀 \u202e") == "plain é 漢 😀 \u202e"
    assert safe_text("a\ud800b\0c\udfff") == "a\ufffdb\ufffdc\ufffd"
    assert safe_text(5) == "5"


def test_messages_from_a_hostile_model_can_always_be_stored():
    loop = {}
    loop["self"] = loop
    wide = {}
    for _ in range(80):
        wide = {"a": wide, "b": wide}
    calls = [
        ToolCall("\ud800", "\0", {"x": "\ud800"}),
        ToolCall(7, None, {"x": math.nan}),
        ToolCall("c", "t", loop),
        ToolCall("c", "t", wide),
        ToolCall("c", "t", {"x": {1, 2}}),
        ToolCall("c", "t", "text"),
        ToolCall("c", "t", {"x": 10**5000}),
        ToolCall("c", "t", {"\0": 1}),
    ]
    message = assistant_turn("\ud800", calls)
    check_messages([message])
    text = json.dumps(message, allow_nan=False, ensure_ascii=False)
    assert "\\u0000" not in text and text.encode()
    assert all("__unparseable__" in c["arguments"] for c in message["tool_calls"])


def test_storable_arguments_copies_plain_arguments_in_their_own_order():
    given = {"z": [1, {"y": None}], "a": "\\u0000", "f": 1.5, "é": "漢"}
    copy = storable_arguments(given)
    assert copy == given and list(copy) == list(given)
    assert copy["z"] is not given["z"]


def test_storable_arguments_notes_what_is_too_deep_or_too_large():
    def nested(levels):
        value = {}
        for _ in range(levels - 1):
            value = {"a": value}
        return value

    assert storable_arguments(nested(64)) == nested(64)
    assert storable_arguments(nested(65)) == {"__unparseable__": "nested too deeply"}
    assert storable_arguments(nested(5000)) == {"__unparseable__": "nested too deeply"}
    flat = {"a": [[] for _ in range(500)]}
    assert storable_arguments(flat) == flat
    assert storable_arguments({"a": "x" * 70_000}) == {"__unparseable__": "too large"}
    assert storable_arguments({"a": "x" * 70_000}, 80_000)["a"]


# --- checking ----------------------------------------------------------------------------------


def test_check_messages_returns_a_new_list_of_good_messages():
    good = [system_turn("s"), user_turn("u"), asks("c"), tool_turn("c", "ok"), assistant_turn("a")]
    checked = check_messages(good)
    assert checked == good and checked is not good


@pytest.mark.parametrize(
    "bad",
    [
        None,
        5,
        {},
        {"role": "robot", "content": "SECRET"},
        {"role": ["user"], "content": "SECRET"},
        {"role": "user"},
        {"role": "user", "content": None},
        {"role": "user", "content": 5},
        {"role": "user", "content": "x", "SECRET": 1},
        {"role": "user", "content": "x", "tool_call_id": "SECRET"},
        {"role": "user", "content": "x", "tool_calls": []},
        {"role": "user", "content": "x", "name": 5},
        {"role": "tool", "content": "x"},
        {"role": "tool", "content": "x", "tool_call_id": 5},
        {"role": "assistant", "content": None, "tool_calls": "SECRET"},
        {"role": "assistant", "content": None, "tool_calls": ["SECRET"]},
        {"role": "assistant", "content": None, "tool_calls": [{"id": 1, "name": "SECRET"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c", "name": "t", "arguments": "SECRET"}],
        },
    ],
)
def test_check_messages_names_the_place_and_echoes_nothing(bad):
    with pytest.raises(AgentError, match=r"messages\[1\]") as caught:
        check_messages([user_turn("fine"), bad])
    assert "SECRET" not in str(caught.value)


@pytest.mark.parametrize("value", [None, "text", {}, 5])
def test_check_messages_refuses_what_is_no_list(value):
    with pytest.raises(AgentError, match="expected a list"):
        check_messages(value)


def test_call_ids_lists_each_id_once_in_order():
    assert call_ids([asks("b", "a"), tool_turn("b", ""), tool_turn("x", "")]) == ["b", "a", "x"]


def test_open_calls_lists_calls_without_a_result():
    messages = [asks("a"), tool_turn("a", "ok"), asks("b", "c"), tool_turn("c", "ok")]
    assert open_calls(messages) == ["b"]
