"""A conversation in a message channel: both directions, and what counts as new."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    FunctionMessage,
    HumanMessage,
    RemoveMessage,
    SystemMessage,
    ToolMessage,
)

from guardchart.errors import AgentConfigError
from guardchart.langchain._messages import from_compact, to_compact
from guardchart.langgraph._messages import Conversation

CALL = {"id": "c1", "name": "lookup", "arguments": {"order_id": 42}}
PAIRS: list[tuple[dict[str, Any], BaseMessage]] = [
    ({"role": "user", "content": "hi"}, HumanMessage("hi", id="r-1")),
    ({"role": "system", "content": "be brief"}, SystemMessage("be brief", id="r-1")),
    ({"role": "assistant", "content": "hello"}, AIMessage("hello", id="r-1")),
    (
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        AIMessage(
            "",
            id="r-1",
            tool_calls=[{"id": "c1", "name": "lookup", "args": {"order_id": 42}}],
        ),
    ),
    (
        {"role": "tool", "content": "shipped", "tool_call_id": "c1", "name": "lookup"},
        ToolMessage("shipped", tool_call_id="c1", name="lookup", id="r-1"),
    ),
]


@pytest.mark.parametrize(("compact", "message"), PAIRS, ids=lambda each: type(each).__name__)
def test_messages_convert_both_ways(compact: dict[str, Any], message: BaseMessage) -> None:
    assert from_compact(compact, "r-1") == message
    assert to_compact(message) == compact


def test_to_compact_joins_text_blocks_and_names_others() -> None:
    blocks: list[Any] = [
        {"type": "text", "text": "look: "},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
        "done",
        {"type": "<script>", "x": 1},
    ]
    assert to_compact(HumanMessage(blocks))["content"] == "look: [image]done[attachment]"


def test_to_compact_leaves_out_what_a_provider_puts_beside_the_text() -> None:
    message = AIMessage(
        [
            {"type": "thinking", "thinking": "hm"},
            {"type": "text", "text": "ok"},
            {"type": "tool_use", "id": "c1", "name": "lookup", "input": {}},
        ],
        tool_calls=[{"id": "c1", "name": "lookup", "args": {}}],
    )
    assert to_compact(message)["content"] == "ok"


@pytest.mark.parametrize(
    "message", [RemoveMessage(id="x"), FunctionMessage("x", name="f")], ids=["remove", "function"]
)
def test_to_compact_is_refused_when_a_message_has_no_place(message: BaseMessage) -> None:
    with pytest.raises(AgentConfigError, match="has no place in the conversation"):
        to_compact(message)


@pytest.mark.parametrize("channel", ["text", 7, {"a": 1}, [object()], [{"no": "role"}]])
def test_conversation_is_refused_when_the_channel_holds_something_else(channel: Any) -> None:
    with pytest.raises(AgentConfigError, match="add_messages"):
        Conversation(channel)


def test_conversation_takes_what_langchain_takes_for_messages() -> None:
    talk = Conversation([{"role": "user", "content": "hi"}, ("ai", "hello")])
    assert [each["role"] for each in talk.before] == ["user", "assistant"]


def _after(talk: Conversation, *new: dict[str, Any]) -> list[dict[str, Any]]:
    return [*talk.before, *new]


def test_conversation_writes_only_what_is_new_under_ids_of_the_run() -> None:
    talk = Conversation([HumanMessage("hi", id="mine"), AIMessage("hello", id="r-2")])
    new = talk.new(
        talk.before,
        _after(talk, {"role": "user", "content": "more"}, {"role": "assistant", "content": "ok"}),
        "r",
    )
    assert [(each.id, each.content) for each in new] == [("r-3", "more"), ("r-4", "ok")]


def test_conversation_never_uses_an_id_twice_when_the_app_removed_messages() -> None:
    talk = Conversation([AIMessage("late", id="r-9"), HumanMessage("x", id="r-3x")])
    new = talk.new(talk.before, _after(talk, {"role": "user", "content": "more"}), "r")
    assert [each.id for each in new] == ["r-10"]


def test_conversation_says_the_prompt_once_when_the_channel_ends_with_it() -> None:
    talk = Conversation([HumanMessage("first"), AIMessage("a"), HumanMessage("second")], "second")
    assert [each["content"] for each in talk.before] == ["first", "a"]
    added = {"role": "user", "content": "second"}, {"role": "assistant", "content": "b"}
    assert [each.content for each in talk.new(talk.before, _after(talk, *added), "r")] == ["b"]


def test_conversation_writes_a_prompt_that_the_channel_does_not_hold() -> None:
    talk = Conversation([HumanMessage("first"), AIMessage("a")], "second")
    added = {"role": "user", "content": "second"}, {"role": "assistant", "content": "b"}
    new = talk.new(talk.before, _after(talk, *added), "r")
    assert [each.content for each in new] == ["second", "b"]


def test_conversation_writes_only_the_new_turn_when_the_window_was_cut() -> None:
    talk = Conversation([HumanMessage(str(n)) for n in range(10)])
    added = {"role": "assistant", "content": "new"}
    new = talk.new(talk.before, [talk.before[0], *talk.before[-2:], added], "r")
    assert [each.content for each in new] == ["new"]


def test_conversation_writes_only_the_new_turn_when_all_before_was_summarised() -> None:
    talk = Conversation([HumanMessage("1"), AIMessage("2")])
    summary = {"role": "system", "content": "they greeted"}
    turn = {"role": "user", "content": "3"}, {"role": "assistant", "content": "4"}
    assert [each.content for each in talk.new(talk.before, [summary, *turn], "r")] == ["3", "4"]


def test_conversation_says_the_prompt_once_when_results_are_told_before_it() -> None:
    call = {"id": "c1", "name": "pay", "args": {}, "type": "tool_call"}
    talk = Conversation([AIMessage("", tool_calls=[call]), HumanMessage("wait")], "wait")
    result = {"role": "tool", "tool_call_id": "c1", "content": "superseded"}
    said = {"role": "user", "content": "wait"}
    new = talk.new(talk.before, _after(talk, result, said), "r")
    assert [each.content for each in new] == ["superseded"]


def test_conversation_writes_nothing_twice_when_a_result_was_put_behind_its_call() -> None:
    call = {"id": "c1", "name": "pay", "args": {}, "type": "tool_call"}
    asked = AIMessage("", tool_calls=[call])
    talk = Conversation([asked, HumanMessage("hi"), ToolMessage("paid", tool_call_id="c1")])
    first, greeting, result = talk.before
    added = {"role": "user", "content": "more"}
    new = talk.new(talk.before, [first, result, greeting, added], "r")
    assert [each.content for each in new] == ["more"]


def test_conversation_writes_nothing_when_nothing_was_said() -> None:
    talk = Conversation([HumanMessage("1")])
    assert talk.new(talk.before, talk.before, "r") == []
    empty = Conversation(None)
    assert empty.new([], [], "r") == []
