"""The same attacks against a bare Agent: each of them gets through.

It shows that the attacks are attacks, and that what stops them is the guard.
"""

from __future__ import annotations

import pytest

from tests.pydantic_ai.attacks import ATTACKS, TWICE


@pytest.mark.parametrize("name", ATTACKS)
def test_the_attack_gets_through_on_a_bare_agent(name: str) -> None:
    assert ATTACKS[name](False) != []


@pytest.mark.parametrize("name", TWICE)
def test_the_effect_happens_twice_on_a_bare_agent(name: str) -> None:
    assert TWICE[name](False) == [("refund", 7, 100)] * 2
