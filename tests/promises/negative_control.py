"""Show that the promise tests look at the gate: without it, each one marked `gate` must fail.

Runs ``pytest tests/promises -m gate --allow-all-gate`` and exits 1 unless every one of these
tests failed in its own body. A test that errs while setting up, is skipped, or passes has shown
nothing. Run it with ``python -m tests.promises.negative_control``.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def outcomes(junit: str) -> dict[str, str]:
    """Return what became of each test: ``failed``, ``error``, ``skipped`` or ``passed``.

    A test that failed and whose teardown then erred counts as failed.
    """
    found: dict[str, str] = {}
    rank = ["passed", "skipped", "error", "failed"]
    for case in ElementTree.fromstring(junit).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        outcome = "passed"
        for tag, meaning in (("skipped", "skipped"), ("error", "error"), ("failure", "failed")):
            if case.find(tag) is not None:
                outcome = meaning
        found[name] = max(found.get(name, "passed"), outcome, key=rank.index)
    return found


def verdict(pytest_code: int, found: dict[str, str]) -> tuple[int, list[str]]:
    """Return the exit code and what to print.

    Args:
        pytest_code: What pytest exited with: 1 where tests failed, 5 where none were collected.
        found: As :func:`outcomes` returns it.
    """
    lines = [f"{outcome}: {name}" for name, outcome in sorted(found.items()) if outcome != "failed"]
    red = sum(outcome == "failed" for outcome in found.values())
    lines.append(f"without the gate {red} of {len(found)} gate tests fail; all of them must")
    wanted = 1 if found else 5
    return int(red != len(found) or pytest_code != wanted), lines


def main() -> int:
    """Run the promise tests without the gate and judge the outcome."""
    if not list((ROOT / "tests" / "promises").rglob("test_*.py")):
        print("tests/promises holds no tests yet")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "junit.xml"
        command = [sys.executable, "-m", "pytest", "tests/promises", "-m", "gate"]
        command += ["--allow-all-gate", f"--junitxml={report}", "-p", "no:cacheprovider"]
        done = subprocess.run(
            [*command, "-q", "--tb=no", "-n", "2"], cwd=ROOT, capture_output=True, text=True
        )
        if done.returncode not in {0, 1, 5} or not report.exists():
            print(done.stdout, done.stderr, sep="\n")
            return 1
        code, lines = verdict(done.returncode, outcomes(report.read_text()))
    print("\n".join(lines))
    return code


if __name__ == "__main__":
    raise SystemExit(main())
