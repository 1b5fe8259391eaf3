"""Fetch the outside suites, once, into a folder outside of the tree.

    python -m tests.conformance.scxml.fetch [--required]

Both packages come through the ordinary clients of their registries. Where no registry answers,
one line says why and the tests that need the suite are skipped; ``--required`` makes that an
error.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

LIMIT_S = 120


class Suite(NamedTuple):
    """A package, the folder of it that is kept, and how a client downloads it to a folder."""

    name: str
    part: str
    command: Callable[[Path], list[str]]


def _npm(folder: Path) -> list[str]:
    return [
        "npm", "pack", "@scion-scxml/test-framework@2.0.16", "--loglevel=error", "--ignore-scripts",
        "--fetch-retries=0", "--fetch-timeout=15000", f"--pack-destination={folder}",
    ]  # fmt: skip


def _pip(folder: Path) -> list[str]:
    # The source distribution, because the wheel holds no tests.
    return [
        sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-q", "--no-deps",
        "--retries=0", "--timeout=15", "--no-binary", "python-statemachine",
        f"--dest={folder}", "python-statemachine==3.2.2",
    ]  # fmt: skip


SCION = Suite("scion-2.0.16", "package/test", _npm)
STATEMACHINE = Suite("python-statemachine-3.2.2", "tests/scxml/w3c", _pip)


def cache() -> Path:
    """The folder that holds the suites."""
    named = os.environ.get("GUARDCHART_SUITES")
    if named:
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "guardchart" / "suites"


def folder(suite: Suite) -> Path:
    """Where a suite lies once it is fetched."""
    return cache() / suite.name


def fetch(suite: Suite) -> str | None:
    """Fetch a suite unless it is there; why it could not be had, or None."""
    if folder(suite).is_dir():
        return None
    try:
        cache().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache()) as name:
            return _fetch(suite, Path(name))
    except (OSError, tarfile.TarError) as error:
        return f"{type(error).__name__}: {error}"


def _fetch(suite: Suite, work: Path) -> str | None:
    command = suite.command(work)
    if shutil.which(command[0]) is None:
        return f"{command[0]} is not installed"
    try:
        subprocess.run(
            command, cwd=work, check=True, capture_output=True, text=True, timeout=LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {LIMIT_S} s"
    except subprocess.CalledProcessError as error:
        said = [line for line in error.stderr.splitlines() if "rror" in line]
        return f"{Path(command[0]).name}: {said[0][:200] if said else 'no answer'}"
    unpacked = work / "unpacked"
    for archive in work.glob("*gz"):
        with tarfile.open(archive) as packed:
            packed.extractall(unpacked, filter="data")
    part = next(unpacked.rglob(suite.part), None)
    if part is None:
        return "the package holds no suite"
    try:
        part.rename(folder(suite))
    except OSError:
        if not folder(suite).is_dir():  # else somebody was faster
            raise
    return None


def main(arguments: list[str]) -> int:
    missing = 0
    for suite in (SCION, STATEMACHINE):
        reason = fetch(suite)
        if reason is not None:
            missing += 1
            print(f"suite {suite.name} is skipped: {reason}")
    return 1 if missing and "--required" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
