"""What is kept of a conversation: whole turns, each call with its result."""

import random

import pytest

from guardchart.agents._messages import (
    assistant_turn,
    call_ids,
    check_messages,
    open_calls,
    tool_turn,
    user_turn,
)
from guardchart.agents._window import open_turn, paired, plain, window
from guardchart.errors import AgentConfigError
from guardchart.gate import ToolCall


def asks(*ids, text=None):
    return assistant_turn(text, [ToolCall(i, "lookup", {"n": 1}) for i in ids])


def cut(messages, limit, *, task=None):
    """The window, and the ids of the calls that are not in it."""
    kept = window(messages, limit, task=task)
    held = call_ids(kept)
    return kept, tuple(ident for ident in call_ids(messages) if ident not in held)


def contents(messages):
    return [m["content"] or "+".join(call_ids([m])) for m in messages]


# --- trimming ----------------------------------------------------------------------------------


def test_window_keeps_a_short_conversation_and_returns_a_new_list():
    messages = [user_turn("task"), assistant_turn("a")]
    kept, dropped = cut(messages, 2)
    assert (kept, dropped) == (messages, ()) and kept is not messages


def test_window_keeps_the_task_and_the_newest_tail():
    messages = [user_turn("task"), *(assistant_turn(str(n)) for n in range(10))]
    kept, _ = cut(messages, 4)
    assert contents(kept) == ["task", "7", "8", "9"]


def test_window_drops_a_result_with_the_turn_that_asked_for_it():
    messages = [
        user_turn("task"),
        asks("a", "b"),
        tool_turn("a", "ra"),
        tool_turn("b", "rb"),
        asks("c"),
        tool_turn("c", "rc"),
    ]
    for limit in (3, 4, 5):
        kept, dropped = cut(messages, limit)
        assert contents(kept) == ["task", "c", "rc"]
        assert dropped == ("a", "b")


def test_window_keeps_the_newest_turn_whole_even_above_the_limit():
    messages = [user_turn("task"), asks("a"), tool_turn("a", "ra"), asks("b", "c")]
    messages += [tool_turn("b", "rb"), tool_turn("c", "rc")]
    for limit in (1, 2, 3):
        kept, dropped = cut(messages, limit)
        assert contents(kept) == ["task", "b+c", "rb", "rc"]
        assert dropped == ("a",)


def test_window_keeps_the_task_it_is_told_rather_than_the_first():
    messages = [user_turn("old"), assistant_turn("done"), user_turn("new")]
    messages += [assistant_turn(str(n)) for n in range(5)]
    assert contents(cut(messages, 3, task="new")[0]) == ["new", "3", "4"]
    assert contents(cut(messages, 3)[0]) == ["old", "3", "4"]
    assert contents(cut(messages, 3, task="unknown")[0]) == ["old", "3", "4"]
    assert contents(cut(messages, 6, task="new")[0]) == ["new", "0", "1", "2", "3", "4"]


def test_window_starts_with_the_question_of_the_turn_that_it_cuts_in_two():
    old = [user_turn("old"), asks("a"), tool_turn("a", "ra"), asks("b"), tool_turn("b", "rb")]
    messages = [user_turn("first"), assistant_turn("x"), *old, assistant_turn("y")]
    messages += [user_turn("new"), assistant_turn("z")]
    assert contents(window(messages, 6, task="new")) == ["old", "b", "rb", "y", "new", "z"]
    assert contents(window(messages, 5, task="new")) == ["old", "y", "new", "z"]
    assert contents(window(messages, 4, task="new")) == ["old", "y", "new", "z"]
    assert contents(window(messages, 3, task="new")) == ["old", "new", "z"]
    assert contents(window(messages, 2, task="new")) == ["new", "z"]


def test_window_always_starts_with_the_user_where_the_user_has_spoken():
    rng = random.Random(3)
    for _ in range(300):
        messages = []
        for turn in range(rng.randrange(1, 6)):
            messages.append(user_turn(f"question {turn}"))
            for call in range(rng.randrange(0, 4)):
                ident = f"{turn}-{call}"
                messages += [asks(ident), tool_turn(ident, "r")]
            messages.append(assistant_turn("answer"))
        limit = rng.randrange(1, len(messages) + 1)
        kept = window(messages, limit, task=f"question {turn}")
        assert kept[0]["role"] == "user" and user_turn(f"question {turn}") in kept
        assert len(kept) <= max(limit, 4)
        assert_accepted(kept)


def test_window_does_without_a_task_when_there_is_no_user_message():
    messages = [assistant_turn(str(n)) for n in range(5)]
    assert contents(cut(messages, 2)[0]) == ["3", "4"]


def test_window_drops_results_that_nothing_in_the_window_asked_for():
    messages = [user_turn("task"), asks("a"), user_turn("more"), tool_turn("a", "late")]
    messages += [assistant_turn("x")]
    kept, dropped = cut(messages, 4)
    assert contents(kept) == ["task", "more", "x"]
    assert dropped == ("a",)


def test_window_never_orphans_a_result_nor_loses_an_id_whatever_the_conversation():
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
        kept, dropped = cut(messages, limit)
        assert kept[0] == messages[0] and kept[-1] == messages[-1]
        assert len(kept) <= max(limit, 5)
        proposed = set()
        for message in kept:
            proposed.update(c["id"] for c in message.get("tool_calls", ()))
            assert message["role"] != "tool" or message["tool_call_id"] in proposed
        assert sorted([*call_ids(kept), *dropped]) == sorted(call_ids(messages))
        assert open_calls(kept) == []


@pytest.mark.parametrize("limit", [0, -1, True, 2.0, "5", None])
def test_window_refuses_a_limit_that_is_no_positive_int(limit):
    with pytest.raises(AgentConfigError, match="max_messages"):
        cut([user_turn("x")], limit)


# --- pairing -----------------------------------------------------------------------------------


def test_paired_leaves_a_sound_conversation_alone_message_by_message():
    messages = [user_turn("x"), asks("a", "b"), tool_turn("a", "1"), tool_turn("b", "2")]
    kept = paired(messages)
    assert kept == messages and all(one is other for one, other in zip(kept, messages, strict=True))


def test_paired_puts_a_late_result_behind_its_call():
    messages = [asks("a"), user_turn("x"), assistant_turn("y"), tool_turn("a", "late")]
    assert contents(paired(messages)) == ["a", "late", "x", "y"]


def test_paired_drops_results_that_nothing_asked_for():
    messages = [tool_turn("z", "0"), asks("a"), tool_turn("a", "1"), tool_turn("a", "again")]
    assert contents(paired(messages)) == ["a", "1"]


def test_paired_takes_out_or_answers_calls_without_a_result():
    messages = [asks("a", "b"), tool_turn("b", "2"), asks("c", text="hm"), asks("d")]
    before = [dict(each) for each in messages]
    kept = paired(messages)
    assert [m.get("role") for m in kept] == ["assistant", "tool", "assistant"]
    assert call_ids(kept) == ["b"] and "tool_calls" not in kept[2]
    answered = paired(messages, "unknown")
    assert open_calls(answered) == [] and call_ids(answered) == ["a", "b", "c", "d"]
    assert [m["content"] for m in answered if m["role"] == "tool"] == [
        *("unknown", "2", "unknown", "unknown")
    ]
    assert messages == before


def test_paired_keeps_as_many_results_as_there_are_calls_of_one_id():
    messages = [asks("a", "a"), tool_turn("a", "1"), tool_turn("a", "2"), tool_turn("a", "3")]
    assert contents(paired(messages)) == ["a", "1", "2"]


def test_paired_makes_any_heap_of_messages_one_that_providers_take():
    rng = random.Random(11)
    for _ in range(500):
        heap = [
            rng.choice(
                [
                    user_turn("u"),
                    assistant_turn("t"),
                    asks(*rng.sample("abcd", rng.randrange(1, 4)), text=rng.choice([None, "t"])),
                    tool_turn(rng.choice("abcde"), "r"),
                ]
            )
            for _ in range(rng.randrange(0, 14))
        ]
        for default in (None, "none"):
            kept = paired(heap, default)
            check_messages(kept)
            assert_accepted(kept)
            assert paired(kept, default) == kept


def assert_accepted(messages):
    """What providers ask for: results right behind the turn that asked, one per call."""
    waiting = []
    for message in messages:
        if message["role"] == "tool":
            waiting.remove(message["tool_call_id"])
            continue
        assert not waiting
        waiting = [call["id"] for call in message.get("tool_calls", ())]
    assert not waiting


def test_open_turn_is_the_newest_turn_whose_results_are_to_come():
    sound = [user_turn("x"), asks("a"), tool_turn("a", "1")]
    assert open_turn(sound) == 3 and open_turn([]) == 0
    assert open_turn([*sound, asks("b", "c"), tool_turn("b", "2")]) == 3
    assert open_turn([asks("a"), user_turn("x")]) == 2


def test_plain_tells_messages_without_calls():
    assert plain([]) and plain([user_turn("x"), assistant_turn("y")])
    assert not plain([user_turn("x"), asks("a")])
