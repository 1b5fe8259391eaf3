"""A benchmark that no longer runs would be noticed by nobody: each case of ours, once."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

pytestmark = [
    pytest.mark.needs_src,
    pytest.mark.skipif(not (ROOT / "benchmarks").is_dir(), reason="the benchmarks are not here"),
]


@pytest.mark.parametrize("case", ["rounds:2", "held"])
def test_the_loop_benchmark_measures_what_it_says(case: str) -> None:
    from benchmarks._loop_worker import measure

    assert measure("guardchart", case, 1) > 0
