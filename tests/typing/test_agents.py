"""Type checkers see the types of an agent, and wrong ones are errors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_mypy_infers_the_types_of_an_agent_and_refuses_wrong_ones() -> None:
    command = [sys.executable, "-m", "mypy", "--strict", "tests/typing/agents.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
