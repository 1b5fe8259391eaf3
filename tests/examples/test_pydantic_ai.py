"""The pydantic-ai examples, run as a reader would run them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [
    pytest.mark.needs_src,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not (ROOT / "examples").is_dir(), reason="the examples are not here"),
]


def told(name: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", f"examples.{name}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_the_guarded_agent_refunds_once_whatever_is_resumed() -> None:
    said = told("pydantic_ai_guard")
    assert said[0] == 'to approve: {"order": 7, "cents": 1250}'
    assert said[2::2] == ["  refunds: ['7 1250']"] * 3


def test_the_agent_as_a_service_waits_and_goes_on_within_its_budget() -> None:
    said = told("pydantic_ai_service")
    assert said[1] == "a wrong approval: denied []"
    assert said[2] == "answered: Five euros are on their way. [(7, 500)]"
    assert said[3] == "spent: {'turns': 2, 'tokens_in': 80, 'tokens_out': 20}"


@pytest.mark.slow
def test_the_outer_run_pauses_for_the_inner_chart_and_goes_on_in_another_process() -> None:
    said = told("statechart_as_tool")
    assert said[0] == "paused: refund_desk"
    assert said[1] == "to approve: refund {'order': 7, 'cents': 500}"
    assert "Five euros are on their way." in said[2]
    assert said[3] == "refunds: ['7 500']"
