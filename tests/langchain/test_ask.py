"""What an answer of a person says: a function of question and answer, whatever the answer is."""

from __future__ import annotations

from typing import Any

import pytest

from guardchart.errors import DecisionRefused
from guardchart.gate import tool_registry
from guardchart.langchain._ask import ask, question, read_answer
from tests.langchain.desk import Agent, asked, both, decision
from tests.langchain.fakes import call, says

ODD = {
    "list": ["HUMAN_APPROVED"],
    "dict": {"HUMAN_APPROVED": 1},
    "int": 7,
    "bool": True,
    "none": None,
    "float": 0.5,
}
odd_values = pytest.mark.parametrize("odd", ODD.values(), ids=list(ODD))

PENDING: list[dict[str, Any]] = [
    {"id": "r1", "tool_call_id": "c1", "digest": "ab", "name": "refund", "arguments": {"cents": 5}}
]


@odd_values
@pytest.mark.parametrize("positional", ["refuse", "accept"])
def test_an_answer_whose_type_is_no_text_is_refused(positional: Any, odd: Any) -> None:
    for answer in (
        {"type": odd},
        {"type": odd, "call_ids": ["r1"], "digests": {"r1": "ab"}},
        {"decisions": [{"id": "r1", "digest": "ab", "type": odd}]},
        {"decisions": [{"id": "r1", "digest": "ab", "decision": odd}]},
    ):
        with pytest.raises(DecisionRefused):
            read_answer(PENDING, answer, registry=tool_registry(), positional=positional)


@odd_values
def test_an_answer_whose_type_is_no_text_has_the_person_asked_again(odd: Any) -> None:
    answers: list[Any] = [{"type": odd}, {"decisions": [decision(PENDING[0], "reject")]}]
    shown: list[Any] = []

    def interrupt(payload: Any) -> Any:
        shown.append(payload)
        return answers[len(shown) - 1]

    decided, by = ask(
        PENDING,
        question(PENDING, machine="desk"),
        registry=tool_registry(),
        positional="refuse",
        interrupt=interrupt,
    )
    assert (decided["r1"]["decision"], by) == ("reject", None)
    assert ["refused" in payload for payload in shown] == [False, True]


@pytest.mark.gate
@both
@odd_values
def test_an_agent_whose_person_answers_with_an_odd_type_still_waits(
    is_async: bool, odd: Any
) -> None:
    agent = Agent([says(call("refund", order_id=7)), "done"], is_async=is_async)
    open_question = asked(agent.invoke())
    again = agent.resume({"type": odd})
    assert agent.entered == [] and asked(again)["calls"] == open_question["calls"]
    agent.approve(again)
    assert agent.entered == [("refund", 7, 100)]
