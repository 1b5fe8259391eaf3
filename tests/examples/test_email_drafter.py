"""The mail of examples/email_drafter.py: drafted, sent back once with advice, accepted."""

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


def test_the_drafter_revises_once_and_prints_a_readable_transcript() -> None:
    done = subprocess.run(
        [sys.executable, "examples/email_drafter.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    out = done.stdout
    assert out.count("assistant:") == 2 and "user: [file application/pdf invoice.pdf]" in out
    assert out.index("reviewer chose REVISE") < out.index("reviewer chose ACCEPT")
    assert "model calls: 4" in out and "1 200 EUR" in out.rpartition("accepted")[2]


def test_the_conversation_of_the_drafter_survives_json() -> None:
    from examples.email_drafter import draft
    from guardchart.agents import messages_schema

    result = draft()
    messages = messages_schema.validate_python(result.context["messages"])
    assert [message.role for message in messages] == [
        "system",
        "user",
        "assistant",
        "user",
        "assistant",
    ]
    assert messages[1].content[1].filename == "invoice.pdf"
