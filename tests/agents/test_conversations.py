"""Many turns of one conversation: what goes on, what starts anew, what the model is sent."""

from __future__ import annotations

import json
import logging
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import BaseModel

from guardchart import create_machine
from guardchart.agents import (
    AgentConfigError,
    FakeModel,
    RetryPolicy,
    agent_logic,
    load_chart,
    run_agent,
    run_agent_sync,
    structured_output,
    tool,
    tool_registry,
)
from guardchart.persistence import InMemoryLedger, SQLiteLedger
from tests.agents.test_window import assert_accepted

AT_ONCE = RetryPolicy(delay_s=0)


def look(key: str) -> str:
    """Look something up."""
    if key == "broken":
        raise ConnectionError("no")
    return f"{key}: found"


def pay(to: str) -> str:
    """Pay somebody."""
    return f"paid {to}"


TOOLS = tool_registry(look, tool(pay, side_effect=True), timeout_s=5)


def _looks(*keys: str) -> dict[str, Any]:
    return {"tool_calls": [{"tool": "look", "args": {"key": key}} for key in keys]}


PAY = {"tool": "pay", "args": {"to": "Ann"}}


class Talk:
    """One conversation, each turn in a process of its own as far as that can be told."""

    def __init__(self, **options: Any) -> None:
        self.options = {"retry": AT_ONCE, "max_turns": 20, **options}
        self.ledger = options.pop("ledger", None) or InMemoryLedger()
        self.options.pop("ledger", None)
        self.snapshot: Any = None
        self.sent: list[list[dict[str, Any]]] = []
        self.result: Any = None

    def turn(self, *script: Any, **how: Any) -> Any:
        model = FakeModel(script, is_async=False)
        self.result = run_agent_sync(
            model,
            tools=TOOLS,
            snapshot=self.snapshot,
            key="t-1",
            ledger=self.ledger,
            **how,
            **self.options,
        )
        self.snapshot = json.loads(json.dumps(self.result.snapshot))
        self.sent += [call["messages"] for call in model.calls]
        return self.result

    @property
    def messages(self) -> list[dict[str, Any]]:
        return list(self.result.context["messages"])


def _first_and_last(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [messages[0], *messages[-3:]]


def _headline(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": f"{len(messages)} messages so far"}]


def _shuffled(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    mixed = list(messages)
    random.Random(len(mixed)).shuffle(mixed)
    return mixed[: len(mixed) // 2]


SUMMARIES: list[Callable[..., Any] | None] = [None, _first_and_last, _headline, _shuffled]


@pytest.mark.parametrize("summarise", SUMMARIES, ids=["cut", "ends", "headline", "shuffled"])
@pytest.mark.parametrize("seed", range(4))
def test_a_model_is_never_sent_a_call_without_its_result_nor_a_result_without_its_call(
    summarise: Any, seed: int, tmp_path: Any
) -> None:
    """Forty turns of everything that can happen, each resumed from JSON."""
    rng = random.Random(seed)
    ledger = SQLiteLedger(tmp_path / "ledger.sqlite") if seed % 2 else None
    talk = Talk(
        max_messages=rng.choice([1, 3, 6, 11]), summarise=summarise, on_denied="retry",
        ledger=ledger,
    )  # fmt: skip
    kinds = ("text", "look", "looks", "broken", "denied", "model error", "pay", "no answer")
    waiting = False
    for number in range(40):
        steps: list[Any] = []
        for kind in rng.choices(kinds, k=rng.randrange(1, 4)):
            steps += {
                "text": [],
                "look": [_looks(f"k{number}")],
                "looks": [_looks("a", "b", "c")],
                "broken": [_looks("ok", "broken")],
                "denied": [{"tool": "nowhere"}],
                "model error": [ConnectionError("no")],
                "pay": [PAY],
                "no answer": [ConnectionError("no")] * 3,
            }[kind]
        script = [*steps, {"text": f"answer {number}"}]
        if not waiting:
            talk.turn(*script, prompt=f"question {number}")
        else:
            how = rng.choice(["approve", "reject", "supersede"])
            decision = {"approve": True} if how == "approve" else {"approve": False}
            given: dict[str, Any] = {"prompt": f"question {number}"}
            talk.turn(*script, **(given if how == "supersede" else decision))
        waiting = talk.result.waiting
        assert talk.result.status in ("done", "idle"), talk.result
    for messages in talk.sent:
        assert_accepted(messages)
        assert any(each["role"] == "user" for each in messages)
    ids = talk.result.context["spent_call_ids"]
    assert len(ids) == len(set(ids)) > 0


def test_a_turn_takes_over_the_conversation_and_starts_the_rest_anew() -> None:
    talk = Talk(on_denied="retry")
    first = talk.turn(_looks("a"), {"tool": "nowhere"}, {"text": "one"}, prompt="first")
    second = talk.turn({"text": "two"}, prompt="second")
    assert (second.output, second.usage["turns"], second.context["task"]) == ("two", 1, "second")
    assert second.context["denied_turns"] == 0 and first.context["denied_turns"] == 1
    assert second.context["spent_call_ids"] == first.context["spent_call_ids"]
    assert second.context["messages"][: len(first.context["messages"])] == first.context["messages"]
    assert second.snapshot["run"] == first.snapshot["run"]
    assert second.snapshot["batch_no"] == first.snapshot["batch_no"]


def test_an_id_of_an_earlier_turn_is_spent_though_its_turn_was_cut() -> None:
    talk = Talk(max_messages=2)
    talk.turn({"tool": "look", "args": {"key": "a"}, "id": "c1"}, {"text": "x"}, prompt="first")
    for number in range(5):
        talk.turn({"text": "x"}, prompt=f"question {number}")
    again = talk.turn({"tool": "look", "args": {"key": "a"}, "id": "c1"}, prompt="again")
    assert again.error is not None and again.error["kind"] == "tool_denied"


@pytest.mark.parametrize("scope", ["turn", "conversation"])
def test_a_superseded_question_counts_in_the_budget_of_the_conversation_only(scope: str) -> None:
    talk = Talk(budget_scope=scope, budgets={"max_turns": 3, "max_tokens": 1_000})
    del talk.options["max_turns"]
    usage = {"usage": {"input_tokens": 10, "output_tokens": 5}}
    for number in range(3):
        assert talk.turn({**PAY, **usage}, prompt=f"question {number}").waiting
        if scope == "turn":
            assert talk.result.usage["turns"] == 1 and talk.result.usage["tokens_in"] == 10
        else:
            assert talk.result.usage["turns"] == number + 1
    last = talk.turn({"text": "fine", **usage}, prompt="last")
    if scope == "turn":
        assert last.ok and last.usage == {
            "turns": 1,
            "tokens_in": 10,
            "tokens_out": 5,
            "cost_usd": 0.0,
        }
    else:
        assert last.error == {"kind": "budget", "message": "turn limit reached"}


@pytest.mark.parametrize("failure", ["budget", "denied", "retries", "output"])
def test_a_turn_that_ended_badly_does_not_end_the_conversation(failure: str) -> None:
    bad: dict[str, Any] = {
        "budget": {"script": [_looks("a")] * 9, "max_turns": 2},
        "denied": {"script": [{"tool": "nowhere"}]},
        "retries": {"script": [ConnectionError("no")] * 3},
        "output": {"script": [{"text": "x"}], **structured_output(retries=0)},
    }[failure]
    if failure == "output":
        bad["output_model"] = Answer
    talk = Talk()
    talk.turn({"text": "fine"}, prompt="first")
    plain, talk.options = (
        talk.options,
        {**talk.options, **{k: bad[k] for k in bad if k != "script"}},
    )
    assert (
        talk.turn(*bad["script"], prompt="second").error["kind"]
        == {
            "budget": "budget",
            "denied": "tool_denied",
            "retries": "retries",
            "output": "output",
        }[failure]
    )
    talk.options = plain
    third = talk.turn({"text": "better"}, prompt="third")
    assert third.ok and third.output == "better"
    assert_accepted(talk.sent[-1])
    said = [each["content"] for each in third.context["messages"] if each["role"] == "user"]
    assert said == ["first", "second", "third"]


class Answer(BaseModel):
    n: int


# --- the window --------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [1, 2, 5, 20])
def test_the_window_keeps_the_task_of_this_turn_and_holds_its_limit(limit: int) -> None:
    talk = Talk(max_messages=limit)
    for number in range(30):
        talk.turn(_looks(f"k{number}"), {"text": f"answer {number}"}, prompt=f"question {number}")
        assert len(talk.messages) <= max(limit, 3)
        request = talk.sent[-1]
        assert {"role": "user", "content": f"question {number}"} in request
        assert_accepted(request)


async def test_the_window_is_the_same_on_the_async_engine() -> None:
    snapshot, sent = None, []
    for number in range(8):
        model = FakeModel([_looks("a", "b"), {"text": f"answer {number}"}])
        result = await run_agent(
            model, tools=TOOLS, prompt=f"question {number}", snapshot=snapshot, max_messages=5
        )
        snapshot = result.snapshot
        sent += [call["messages"] for call in model.calls]
    for messages in sent:
        assert_accepted(messages)
    assert [m["content"] for m in sent[-1] if m["role"] == "user"][-1] == "question 7"


# --- summaries ---------------------------------------------------------------------------------


def test_a_summary_replaces_what_it_was_given_and_the_next_turn_builds_on_it() -> None:
    given: list[list[str]] = []

    def summarise(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        given.append([str(each["content"]) for each in messages])
        return [{"role": "user", "content": f"summary {len(given)}"}, messages[-1]]

    talk = Talk(max_messages=4, summarise=summarise)
    for number in range(4):
        talk.turn({"text": f"answer {number}"}, prompt=f"question {number}")
    assert given == [
        ["question 0", "answer 0", "question 1", "answer 1", "question 2"],
        ["summary 1", "question 2", "answer 2", "question 3", "answer 3"],
    ]
    assert [m["content"] for m in talk.messages] == ["summary 2", "answer 3"]


def test_a_turn_whose_results_are_to_come_is_not_summarised() -> None:
    given: list[Any] = []

    def nothing(messages: list[Any]) -> list[Any]:
        given.append(messages)
        return []

    talk = Talk(max_messages=1, summarise=nothing)
    parked = talk.turn(PAY, prompt="pay her")
    assert parked.waiting and parked.context["messages"][-1]["tool_calls"]
    done = talk.turn({"text": "paid"}, approve=True)
    assert done.output == "paid"
    for messages in talk.sent:
        assert_accepted(messages)
    assert all(not each[-1].get("tool_calls") for each in given if each)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda messages: None,
        lambda messages: "so far so good",
        lambda messages: [{"role": "robot", "content": "x"}],
        lambda messages: [{"role": "user", "content": 7}],
        lambda messages: messages[100],
        lambda messages: 1 / 0,
    ],
)
def test_a_summary_that_fails_cuts_the_conversation_and_is_logged(
    wrong: Any, caplog: pytest.LogCaptureFixture
) -> None:
    talk = Talk(max_messages=3, summarise=wrong)
    with caplog.at_level(logging.WARNING, logger="guardchart"):
        for number in range(4):
            assert talk.turn({"text": f"answer {number}"}, prompt=f"question {number}").ok
    assert len(talk.messages) <= 3 and talk.messages[-1]["content"] == "answer 3"
    assert "summarise failed" in caplog.text and "question" not in caplog.text


def test_a_summariser_must_be_a_plain_function() -> None:
    async def summarise(messages: list[Any]) -> list[Any]:
        return messages

    with pytest.raises(AgentConfigError, match="summarise is async"):
        agent_logic(FakeModel([]), summarise=summarise)  # type: ignore[arg-type]


# --- conversations from elsewhere --------------------------------------------------------------


OPEN = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "o1", "name": "look", "arguments": {"key": "a"}}],
}
LATE = {"role": "tool", "tool_call_id": "o1", "content": "late", "name": "look"}
ASKED = {"role": "user", "content": "earlier"}


@pytest.mark.parametrize(
    ("found", "results"),
    [
        ([ASKED, OPEN], ["error: no result was recorded"]),
        ([ASKED, OPEN, ASKED], ["error: no result was recorded"]),
        ([ASKED, OPEN, ASKED, LATE], ["late"]),
        ([LATE, ASKED], []),
        ([ASKED, OPEN, LATE, LATE], ["late"]),
        ([7, "x", None, [], {"role": "tool"}, OPEN], ["error: no result was recorded"]),
    ],
)
def test_a_conversation_from_elsewhere_is_made_one_that_providers_take(
    found: list[Any], results: list[str]
) -> None:
    talk = Talk()
    talk.turn({"text": "x"}, prompt="first")
    talk.snapshot["context"]["messages"] = found
    talk.turn({"text": "y"}, prompt="go on")
    request = talk.sent[-1]
    assert_accepted(request)
    assert [m["content"] for m in request if m["role"] == "tool"] == results
    assert request[-1] == {"role": "user", "content": "go on"}


def test_a_call_proposed_where_only_a_reply_counts_is_told_that_it_did_not_run() -> None:
    chart = load_chart()
    chart["states"] = {
        "idle": chart["states"]["idle"],
        "checking_budget": {"always": "asking"},
        "asking": {
            "meta": {"tools": ["look"]},
            "invoke": {
                "src": "callModel",
                "onDone": [
                    {
                        "guard": "outputValid",
                        "target": "done",
                        "actions": ["recordModelResponse", "storeResult"],
                    },
                    {
                        "guard": "canRetryOutput",
                        "target": "checking_budget",
                        "actions": ["recordModelResponse", "retryOutput"],
                    },
                    {"target": "error", "actions": ["recordModelResponse", "failOutput"]},
                ],
            },
        },
        "done": {"type": "final"},
        "error": {"type": "final"},
    }
    for retries in (1, 0):
        model = FakeModel([_looks("a", "b"), {"text": '{"n": 1}'}], is_async=False)
        logic = agent_logic(model, TOOLS, output_model=Answer, max_output_retries=retries)
        result = run_agent_sync(create_machine(chart, logic), prompt="Count.")
        assert_accepted(result.context["messages"])
        assert result.context["pending_tool_calls"] == []
        told = [m["content"] for m in result.context["messages"] if m["role"] == "tool"]
        assert told == ["not run: a reply was asked for"] * 2
    assert result.error is not None and result.error["kind"] == "output"


# --- side by side ------------------------------------------------------------------------------


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
async def test_read_only_calls_of_a_turn_meet_each_other_and_answer_in_the_models_order(
    is_async: bool,
) -> None:
    # Nobody gets past the barrier alone, so this ends only if all three run at the same time.
    barrier = threading.Barrier(3)
    order: list[str] = []

    def meet(name: str) -> str:
        """Wait for the others."""
        barrier.wait(30)
        return f"{name} was there"

    def note(name: str) -> str:
        """Note a name; one at a time."""
        order.append(name)
        return name

    tools = tool_registry(meet, tool(note, sequential=True), timeout_s=60)
    calls = [
        {"tool": "note", "args": {"name": "one"}},
        {"tool": "meet", "args": {"name": "a"}},
        {"tool": "meet", "args": {"name": "b"}},
        {"tool": "note", "args": {"name": "two"}},
        {"tool": "meet", "args": {"name": "c"}},
    ]
    model = FakeModel([{"tool_calls": calls}, {"text": "done"}], is_async=is_async)
    result = await run_agent(model, tools=tools, prompt="Meet.")
    told = [m["content"] for m in result.context["messages"] if m["role"] == "tool"]
    assert told == ["one", "a was there", "b was there", "two", "c was there"]
    assert order == ["one", "two"]
