"""The approval of examples/human_in_the_loop.py: asked in one process, given in another."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [
    pytest.mark.needs_src,
    pytest.mark.skipif(not (ROOT / "examples").is_dir(), reason="the examples are not here"),
]


def call(*args: str) -> str:
    done = subprocess.run(
        [sys.executable, "examples/human_in_the_loop.py", *args],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def test_the_whole_story_runs_in_three_processes_and_sends_once() -> None:
    out = call()
    assert "waits for a person in mail.review" in out and "APPROVE" in out and "REJECT" in out
    assert "model calls: 2, mails sent: 1" in out


@pytest.mark.parametrize(("answer", "calls", "sent"), [("APPROVE", 1, 1), ("REJECT", 2, 0)])
def test_what_was_done_before_is_not_repeated_in_the_next_process(
    tmp_path: Path, answer: str, calls: int, sent: int
) -> None:
    call("--folder", str(tmp_path), "start")
    saved = json.loads((tmp_path / "snapshot.json").read_text())
    assert saved["value"] == "review" and lines(tmp_path / "sent.txt") == []
    call("--folder", str(tmp_path), answer)
    assert len(lines(tmp_path / "calls.txt")) == calls
    assert len(lines(tmp_path / "sent.txt")) == sent


def test_an_event_that_the_state_does_not_take_is_said_and_changes_nothing(tmp_path: Path) -> None:
    call("--folder", str(tmp_path), "start")
    before = (tmp_path / "snapshot.json").read_text()
    assert "PUBLISH is not possible now" in call("--folder", str(tmp_path), "PUBLISH")
    assert json.loads((tmp_path / "snapshot.json").read_text())["value"] == "review"
    assert (
        json.loads(before)["context"]
        == json.loads((tmp_path / "snapshot.json").read_text())["context"]
    )
