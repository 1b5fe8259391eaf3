import json
import math
import random

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
    trim_messages,
    user_turn,
)
from guardchart.errors import AgentConfigError, AgentError
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


# --- trimming ----------------------------------------------------------------------------------


def test_trim_messages_keeps_a_short_conversation_and_returns_a_new_list():
    messages = [user_turn("task"), assistant_turn("a")]
    kept, dropped = trim_messages(messages, 2)
    assert (kept, dropped) == (messages, ()) and kept is not messages


def test_trim_messages_keeps_the_task_and_the_newest_tail():
    messages = [user_turn("task"), *(assistant_turn(str(n)) for n in range(10))]
    kept, _ = trim_messages(messages, 4)
    assert contents(kept) == ["task", "7", "8", "9"]


def test_trim_messages_drops_a_result_with_the_turn_that_asked_for_it():
    messages = [
        user_turn("task"),
        asks("a", "b"),
        tool_turn("a", "ra"),
        tool_turn("b", "rb"),
        asks("c"),
        tool_turn("c", "rc"),
    ]
    for limit in (3, 4, 5):
        kept, dropped = trim_messages(messages, limit)
        assert contents(kept) == ["task", "c", "rc"]
        assert dropped == ("a", "b")


def test_trim_messages_keeps_the_newest_turn_whole_even_above_the_limit():
    messages = [user_turn("task"), asks("a"), tool_turn("a", "ra"), asks("b", "c")]
    messages += [tool_turn("b", "rb"), tool_turn("c", "rc")]
    for limit in (1, 2, 3):
        kept, dropped = trim_messages(messages, limit)
        assert contents(kept) == ["task", "b+c", "rb", "rc"]
        assert dropped == ("a",)


def test_trim_messages_keeps_the_task_it_is_told_rather_than_the_first():
    messages = [user_turn("old"), assistant_turn("done"), user_turn("new")]
    messages += [assistant_turn(str(n)) for n in range(5)]
    assert contents(trim_messages(messages, 3, task="new")[0]) == ["new", "3", "4"]
    assert contents(trim_messages(messages, 3)[0]) == ["old", "3", "4"]
    assert contents(trim_messages(messages, 3, task="unknown")[0]) == ["old", "3", "4"]
    assert contents(trim_messages(messages, 6, task="new")[0]) == ["new", "0", "1", "2", "3", "4"]


def test_trim_messages_does_without_a_task_when_there_is_no_user_message():
    messages = [assistant_turn(str(n)) for n in range(5)]
    assert contents(trim_messages(messages, 2)[0]) == ["3", "4"]


def test_trim_messages_drops_results_that_nothing_in_the_window_asked_for():
    messages = [user_turn("task"), asks("a"), user_turn("more"), tool_turn("a", "late")]
    messages += [assistant_turn("x")]
    kept, dropped = trim_messages(messages, 4)
    assert contents(kept) == ["task", "more", "x"]
    assert dropped == ("a",)


def test_trim_messages_never_orphans_a_result_nor_loses_an_id_whatever_the_conversation():
    rng = random.Random(7)
    for _ in range(300):
        messages, n = [user_turn("task")], 0
        for _ in range(rng.randrange(1, 12)):
            ids = [f"c{n + i}" for i in range(rng.randrange(0, 4))]
            n += len(ids)
            messages.append(asks(*ids) if ids else assistant_turn("text"))
            messages += [tool_turn(i, "r") for i in ids]
            if rng.random() < 0.3:
                messages.append(user_turn("again"))
        limit = rng.randrange(1, len(messages) + 2)
        kept, dropped = trim_messages(messages, limit)
        assert kept[0] == messages[0] and kept[-1] == messages[-1]
        assert len(kept) <= max(limit, 5)
        proposed = set()
        for message in kept:
            proposed.update(c["id"] for c in message.get("tool_calls", ()))
            assert message["role"] != "tool" or message["tool_call_id"] in proposed
        assert sorted([*call_ids(kept), *dropped]) == sorted(call_ids(messages))
        assert open_calls(kept) == []


@pytest.mark.parametrize("limit", [0, -1, True, 2.0, "5", None])
def test_trim_messages_refuses_a_limit_that_is_no_positive_int(limit):
    with pytest.raises(AgentConfigError, match="max_messages"):
        trim_messages([user_turn("x")], limit)
