"""Build the wheel, install it elsewhere, and test it with the source tree out of reach.

First into an environment that holds pydantic and nothing else, where smoke.py runs; then the
``dev`` extra is added and the suite runs from a copy of the repository without src. Arguments go
to pytest. ``python -m tests.wheel.run``
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OUT_OF_REACH = shutil.ignore_patterns(
    "src", ".git", ".venv*", "build", "dist", "__pycache__", ".*_cache", ".hypothesis"
)


def run(*command: str | Path, cwd: Path) -> None:
    """Run a command; stop with its exit code if it fails."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    print("+", *command, flush=True)
    done = subprocess.run([str(part) for part in command], cwd=cwd, env=environment)
    if done.returncode:
        raise SystemExit(done.returncode)


def check_contents(wheel: Path) -> None:
    """Refuse a wheel that lacks a file it needs, or holds one it should not."""
    packed = set(zipfile.ZipFile(wheel).namelist())
    source = ROOT / "src"
    wanted = {
        path.relative_to(source).as_posix()
        for path in (source / "guardchart").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    missing = wanted - packed
    foreign = {name for name in packed - wanted if ".dist-info/" not in name}
    licences = [name for name in packed if name.endswith("/licenses/LICENSE")]
    if missing or foreign or not licences:
        raise SystemExit(f"missing: {missing}, foreign: {foreign}, licences: {licences}")


def main(pytest_arguments: list[str]) -> None:
    """Build, install, test."""
    with tempfile.TemporaryDirectory(prefix="guardchart-wheel-") as folder:
        base = Path(folder).resolve()
        build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", base]
        run(*build, cwd=ROOT)
        (wheel,) = base.glob("*.whl")
        check_contents(wheel)

        run(sys.executable, "-m", "venv", base / "venv", cwd=base)
        python = base / "venv" / "bin" / "python"
        install = [python, "-m", "pip", "--disable-pip-version-check", "install", "-qq"]
        install += ["-c", ROOT / "constraints.txt"]
        run(*install, wheel, cwd=base)
        tree = base / "tree"
        shutil.copytree(ROOT, tree, ignore=OUT_OF_REACH)
        run(python, "-I", tree / "tests" / "wheel" / "smoke.py", cwd=base)

        run(*install, f"guardchart[dev] @ {wheel.as_uri()}", cwd=base)
        run(
            python,
            *("-m", "pytest", "-m", "not slow and not needs_src", "-p", "no:cacheprovider"),
            *pytest_arguments,
            cwd=tree,
        )


if __name__ == "__main__":
    main(sys.argv[1:])
