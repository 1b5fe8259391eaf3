"""A stored run killed at any call goes on, and enters its side effect once or reports a doubt."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def lives(request: Any, folder: Path, where: str, engine: str, ledger: str, kills: str) -> Any:
    dsn = "-" if where == "sqlite" else request.getfixturevalue("postgres_database")
    command = [sys.executable, "-m", "tests.promises.durable_crash", str(folder), dsn]
    done = subprocess.run(
        [*command, engine, ledger, kills], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(runs: Any) -> None:
    for run in runs:
        assert run["state"] == "toolLoop.done", run
        (told,) = run["told"]
        if "in doubt" in told:
            assert run["effects"] in (0, 1), run
        else:
            assert told == "refunded" and run["effects"] == 1, run
        # Two turns; of a model call that was cut off nothing is known, so it is made again.
        assert run["models"] in (2, 3), run


COMBINATIONS = [
    ("sqlite", "sync"),
    ("postgres", "async"),
    pytest.param("sqlite", "async", marks=pytest.mark.slow),
    pytest.param("postgres", "sync", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("where", "engine"), COMBINATIONS)
def test_a_stored_run_killed_at_every_call_enters_once_or_reports_a_doubt(
    request: pytest.FixtureRequest, tmp_path: Path, where: str, engine: str
) -> None:
    runs = lives(request, tmp_path, where, engine, "ledger", "every")
    assert len(runs) >= 20
    check(runs)
    doubts = [run for run in runs if "in doubt" in run["told"][0]]
    assert {run["effects"] for run in doubts} == {0, 1} and len(doubts) <= 6


@pytest.mark.parametrize("where", ["sqlite", pytest.param("postgres", marks=pytest.mark.slow)])
def test_the_same_run_without_a_ledger_shows_duplicates(
    request: pytest.FixtureRequest, tmp_path: Path, where: str
) -> None:
    runs = lives(request, tmp_path, where, "sync", "none", "every")
    assert max(run["effects"] for run in runs) > 1


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["sync", "async"])
@pytest.mark.parametrize("where", ["sqlite", "postgres"])
def test_a_stored_run_killed_at_random_moments_enters_once_or_reports_a_doubt(
    request: pytest.FixtureRequest, tmp_path: Path, where: str, engine: str
) -> None:
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    check(lives(request, tmp_path, where, engine, "ledger", str(seed)))
