"""The attack list against a guarded agent: nothing runs that nobody allowed."""

from __future__ import annotations

import pytest

from tests.pydantic_ai.attacks import ATTACKS, TWICE

# Stopped before the reference monitor is asked: the tool is not there, the text is not JSON of it.
UNSEEN = {
    "a_hidden_tool_that_the_model_makes_up",
    "a_tool_that_calls_a_hidden_one_itself",
    "text_that_passes_for_a_number",
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=[] if each in UNSEEN else [pytest.mark.gate]) for each in ATTACKS],
)
def test_nothing_runs_that_nobody_allowed(name: str) -> None:
    assert ATTACKS[name](True) == []


@pytest.mark.parametrize("name", TWICE)
def test_what_was_allowed_runs_once(name: str) -> None:
    assert TWICE[name](True) == [("refund", 7, 100)]
