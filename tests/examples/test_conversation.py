"""The chat of examples/conversation.py, until its budget is spent."""

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


def test_the_chat_goes_on_from_json_until_the_budget_of_the_conversation_is_spent() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "examples.conversation"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0 and done.stderr == ""
    said = done.stdout.splitlines()
    assert said[0] == "  lamp: The lamp is 30 EUR." and said[2] == "  desk: The desk is 240 EUR."
    assert "token budget exhausted" in said[-2] and "tokens spent" in said[-1]
    kept = [int(line.split()[0]) for line in said if "messages kept" in line]
    assert max(kept) <= 6 and len(kept) > 3
