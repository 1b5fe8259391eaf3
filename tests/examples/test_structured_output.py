"""The form of examples/structured_output.py, filled in and given up."""

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


def test_the_form_is_filled_in_and_what_does_not_fit_is_asked_for_again() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "examples.structured_output"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "booking.booked" in done.stdout and "6 turns, 3 asked for again" in done.stdout
    assert "duplicate key" in done.stdout and "destination: Extra" not in done.stdout


def test_a_form_that_never_fits_ends_without_an_answer() -> None:
    from examples.structured_output import run

    result = run(retries=0)
    assert result.final_state == "booking.refused" and result.context["form"] == {}
    assert result.error is not None and result.error["kind"] == "output"
