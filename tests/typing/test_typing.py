"""Programs of this folder that ask for it are taken by pyright strictly, and by mypy."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PROGRAMS = sorted(
    each.name for each in HERE.glob("*.py") if each.read_text().startswith("# pyright: strict")
)

pytestmark = [pytest.mark.needs_src, pytest.mark.slow, pytest.mark.timeout(600)]


def checked(*command: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", PROGRAMS)
def test_mypy_takes_the_program_strictly(name: str) -> None:
    checked("mypy", "--strict", f"tests/typing/{name}")


@pytest.mark.needs_node
@pytest.mark.parametrize("name", PROGRAMS)
def test_pyright_takes_the_program_strictly(name: str) -> None:
    if shutil.which("node") is None:
        pytest.skip("pyright needs Node.js")
    checked("pyright", "--pythonpath", sys.executable, f"tests/typing/{name}")
