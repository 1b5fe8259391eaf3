"""The game of examples/twenty_questions.py: a decision loop under a host that records steps."""

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


@pytest.mark.parametrize(
    "how", [["-m", "examples.twenty_questions"], ["examples/twenty_questions.py"]]
)
def test_the_game_prints_a_transcript_and_is_won(how: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, *how], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert any(line.startswith(" 1. Does it") for line in lines)
    assert any("not taken: rejected-by-guard" in line for line in lines)
    assert any("Is it a dolphin? yes" in line for line in lines)
    assert "replayed without a model: twentyQuestions.won" in done.stdout


@pytest.mark.parametrize("secret", ["dolphin", "penguin", "ant", "horse", "eagle", "shark"])
def test_every_animal_is_found_within_twenty_questions(secret: str) -> None:
    from examples.twenty_questions import Guesser, play

    game = play(secret, Guesser(), say=lambda line: None)
    assert game.won and game.snapshot.context["guesses"][-1] == secret
    assert len(game.snapshot.context["facts"]) <= 20


def test_a_question_that_was_asked_and_a_guess_too_early_are_refused_and_chosen_anew() -> None:
    from examples.twenty_questions import Guesser, play

    game = play("horse", Guesser(), say=lambda line: None)
    failures = {each.failure for request in game.requests for each in request.attempts}
    assert failures == {"rejected-by-guard"}
    refused = [request.attempts[-1].event for request in game.requests if request.attempts]
    assert {each["type"] for each in refused} == {"ASK", "GUESS"}
    # What was refused stands nowhere in the log.
    asked = [entry["event"] for entry in game.log if entry["event"].get("type") == "ASK"]
    assert len({each["question"] for each in asked}) == len(asked)


def test_a_replay_of_the_log_asks_no_model() -> None:
    from examples.twenty_questions import Guesser, machine, play
    from guardchart.agents import replay

    guesser = Guesser()
    game = play("ant", guesser, say=lambda line: None)
    calls = guesser.calls
    assert replay(machine, game.log).context == game.snapshot.context
    assert guesser.calls == calls


def test_a_guesser_that_never_makes_up_its_mind_loses() -> None:
    from examples.twenty_questions import play
    from guardchart.agents import ModelResponse

    game = play("ant", lambda messages, tools: ModelResponse("Hmm."), say=lambda line: None)
    assert not game.won and not game.snapshot.context["facts"]
