"""The story of examples/statechart_graph.py: each shape of an answer, from another process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [
    pytest.mark.needs_src,
    pytest.mark.timeout(240),
    pytest.mark.skipif(not (ROOT / "examples").is_dir(), reason="the examples are not here"),
]


def test_every_shape_of_an_answer_resumes_the_thread_of_another_process_once() -> None:
    done = subprocess.run(
        [sys.executable, "examples/statechart_graph.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert "step -.-> approval;" in done.stdout
    assert done.stdout.count("done: Your 25 euros are on their way.") == 5
    assert done.stdout.splitlines()[-1] == "refunds entered: 5, threads: 5"
