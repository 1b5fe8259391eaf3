"""The supervisor of examples/supervisor.py: three workers, one letter, one approval."""

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


def test_the_supervisor_reports_once_the_letter_was_approved() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "examples.supervisor"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "supervisor:worker-3 wants send_letter" in done.stdout
    assert "sent: [('the mayor', 'Both are old.')]" in done.stdout
    assert "supervisor.reporting" in done.stdout and "turns: 5" in done.stdout
