"""The river of examples/river_crossing.py: guards refuse the moves that would end badly."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [
    pytest.mark.needs_src,
    pytest.mark.skipif(not (ROOT / "examples").is_dir(), reason="the examples are not here"),
]


@pytest.mark.parametrize("how", [["-m", "examples.river_crossing"], ["examples/river_crossing.py"]])
def test_everybody_arrives_and_the_transcript_shows_what_was_refused(how: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, *how], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].strip() == "farmer wolf goat cabbage | -"
    assert "cross.alone - not taken: rejected-by-guard" in done.stdout
    assert "- | farmer wolf goat cabbage" in done.stdout
    assert lines[-1] == "river.across, 7 crossings"


def test_nobody_is_ever_left_with_whoever_eats_it() -> None:
    from examples.river_crossing import careless, cross

    result = cross(careless, say=lambda line: None)
    assert result.ok and len(result.context["seen"]) == 7
    for banks in [*result.context["seen"]]:
        for bank in banks.split(" | "):
            there = set(bank.split())
            assert "farmer" in there or not (
                {"wolf", "goat"} <= there or {"goat", "cabbage"} <= there
            )


def test_the_model_chooses_among_crossings_only() -> None:
    from examples.river_crossing import CROSSINGS, careless, cross

    seen = []

    def watching(messages, tools):
        seen.append({each["name"] for each in tools})
        return careless(messages, tools)

    assert cross(watching, say=lambda line: None).ok
    assert all(each == {f"send_event_{c.replace('.', '_')}" for c in CROSSINGS} for each in seen)


def test_a_rower_who_insists_on_a_forbidden_move_gets_nowhere() -> None:
    from examples.river_crossing import cross
    from guardchart.agents import ModelResponse, ToolCall

    def stubborn(messages, tools):
        return ModelResponse(tool_calls=[ToolCall("c", "send_event_cross_wolf", {})])

    result = cross(stubborn, say=lambda line: None)
    assert result.final_state == "river.stuck" and result.context["seen"] == []


def test_a_rower_who_goes_to_and_fro_is_stopped_by_the_cap() -> None:
    from examples.river_crossing import cross
    from guardchart.agents import ModelResponse, ToolCall

    def pendulum(messages, tools):
        return ModelResponse(tool_calls=[ToolCall("c", "send_event_cross_goat", {})])

    result = cross(pendulum, max_model_calls=10, say=lambda line: None)
    assert (result.status, result.cause) == ("error", "max-model-calls")
    assert len(result.context["seen"]) == 10
