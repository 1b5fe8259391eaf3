"""The LangChain examples, run as a reader would run them."""

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


def run(name: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_guard_create_agent_refunds_once() -> None:
    lines = run("guard_create_agent.py")
    assert "refunds so far: []" in lines and lines[-1] == "refunds entered: 1"
    assert "c3 refund_order: refunded 1250 cents" in lines
    assert sum("not in this state's meta.tools" in line for line in lines) == 2


def test_guard_tool_node_does_not_send_the_rejected_mail() -> None:
    lines = run("guard_tool_node.py")
    assert lines[-1] == "mails sent: ['bob@work.example']"
    assert "c2: not run: rejected by a reviewer: who?" in lines


def test_langsmith_transitions_prints_the_tree_that_the_page_shows() -> None:
    lines = run("langsmith_transitions.py")
    assert lines[-1] == "runs left open: []"
    page = (ROOT / "docs" / "bridges" / "langchain.md").read_text(encoding="utf-8")
    assert "\n".join(lines[:-1]) in page
