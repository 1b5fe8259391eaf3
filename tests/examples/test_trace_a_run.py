"""The example of docs/tracing.md runs and says what it should."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples import trace_a_run


def test_the_example_shows_lines_spans_recording_and_totals(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace_a_run.main(tmp_path)
    said = capsys.readouterr().out
    for each in (
        "tool_call    toolLoop.awaiting_tool       delivery_date",
        "  execute_tool delivery_date",
        "  invoke_agent toolLoop",
        "  @xstate.snapshot   START",
        "total: 2 turns, 0.0009 USD",
    ):
        assert each in said
