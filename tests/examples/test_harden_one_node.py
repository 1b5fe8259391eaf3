"""The story that ``make demo`` tells, step by step, in processes of its own."""

from __future__ import annotations

import os
import re
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


def tell(folder: Path, ledger: str) -> tuple[int, str]:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "examples.harden_one_node"),
            *("--folder", str(folder), "--ledger", ledger),
        ],
        cwd=ROOT,
        env={**os.environ, "GUARDCHART_DEMO_LEDGER": "", "GUARDCHART_DEMO_MODEL": ""},
        capture_output=True,
        text=True,
        timeout=240,
    )
    return done.returncode, done.stdout + done.stderr


def entered(output: str) -> int:
    found = re.search(r"^refunds entered: (\d+)$", output, re.MULTILINE)
    assert found, output
    return int(found[1])


def test_the_story_enters_one_refund_and_leaves_picture_and_database(tmp_path: Path) -> None:
    code, output = tell(tmp_path / "demo", "on")
    assert code == 0, output
    assert entered(output) == 1
    assert (tmp_path / "demo" / "app.sqlite").stat().st_size > 0
    assert "awaiting_human" in (tmp_path / "demo" / "chart.mmd").read_text()
    assert "tampered" in output
    assert "tool(s) ['wire_money'] not allowed here" in output


def test_the_same_story_enters_more_than_one_refund_when_the_ledger_is_off(tmp_path: Path) -> None:
    code, output = tell(tmp_path / "demo", "off")
    assert code == 0, output
    assert entered(output) > 1
