"""The house rules: who imports whom, what is public, what committed text may say.

To make a new name public on purpose, run ``python -m tests.public_names`` and look at the diff
of tests/public_names.json.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import guardchart
from tests.public_names import PINNED, entry_points, public_names

ROOT = Path(__file__).resolve().parent.parent
SRC = ROOT / "src" / "guardchart"

# The third party packages that each part may import, at the top or inside a function.
# A part that is not listed may import none.
ALLOWED: dict[str, set[str]] = {
    "persistence": {"psycopg", "psycopg_pool"},
    "gate": {"pydantic", "pydantic_core", "typing_extensions", "jsonschema", "referencing"},
    "agents": {
        "pydantic",
        "pydantic_core",
        "jsonschema",
        "instructor",
        "opentelemetry",
        "genai_prices",
    },
    "langgraph": {"langgraph", "langchain_core", "ormsgpack", "pydantic", "typing_extensions"},
    "langchain": {
        *("langchain", "langchain_core", "langgraph", "langsmith"),
        *("pydantic", "pydantic_core", "typing_extensions"),
    },
    "pydantic_ai": {
        *("pydantic_ai", "pydantic", "pydantic_core", "pydantic_graph", "opentelemetry"),
    },
    "openai": {"openai"},
    "anthropic": {"anthropic"},
    "dbos": {"dbos"},
    "temporal": {"temporalio"},
    "testing": {"pytest", "zstandard"},
}

# The kernel is pure: it reads no clock, file, socket, environment or random source.
IMPURE_MODULES = {
    "asyncio", "concurrent", "datetime", "glob", "http", "io", "multiprocessing", "os", "pathlib",
    "random", "secrets", "selectors", "shutil", "signal", "socket", "sqlite3", "ssl",
    "subprocess", "tempfile", "time", "urllib", "uuid",
}  # fmt: skip
IMPURE_BUILTINS = {"breakpoint", "eval", "exec", "input", "open", "print", "__import__"}

FRAMEWORKS = (
    "langgraph", "langchain", "langchain_core", "langsmith", "pydantic_ai", "instructor", "openai",
    "anthropic", "psycopg", "psycopg_pool", "dbos", "temporalio", "opentelemetry", "jsonschema",
    "genai_prices",
)  # fmt: skip

# The two workflow engines are not among the `dev` dependencies.
EXISTING = [n for n in entry_points() if n not in {"guardchart.dbos", "guardchart.temporal"}]


def _modules() -> list[Path]:
    return sorted(SRC.rglob("*.py"))


def _ids(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _part(path: Path) -> str:
    return path.relative_to(SRC).parts[0].removesuffix(".py")


def _imports(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and absolute dotted name of every import, wherever it stands."""
    package = ["guardchart", *path.relative_to(SRC).parent.parts]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            yield node.lineno, ".".join([*base, *([node.module] if node.module else [])])


# --- imports -----------------------------------------------------------------------------------


@pytest.mark.needs_src
def test_imports_point_downwards() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command as main; main()"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.needs_src
def test_imports_for_annotations_point_downwards_too() -> None:
    """The import contracts leave out what stands under TYPE_CHECKING; this does not."""
    contract = _pyproject()["tool"]["importlinter"]["contracts"][0]
    layers = [re.findall(r"\w+", layer) for layer in contract["layers"]]
    height = {part: -number for number, parts in enumerate(layers) for part in parts}
    wrong = []
    for path in _modules():
        for line, name in _imports(path):
            package, _, rest = name.partition(".")
            target = rest.split(".")[0]
            if package != "guardchart" or not target or _part(path) in {target, "__init__"}:
                continue
            if height[target] >= height[_part(path)]:
                wrong.append(f"{_ids(path)}:{line}: {name}")
    assert not wrong


@pytest.mark.needs_src
@pytest.mark.parametrize("path", _modules(), ids=_ids)
def test_module_imports_only_what_its_part_may(path: Path) -> None:
    allowed = ALLOWED.get(_part(path), set()) | sys.stdlib_module_names | {"guardchart"}
    foreign = [
        f"{line}: {name}" for line, name in _imports(path) if name.split(".")[0] not in allowed
    ]
    assert not foreign, f"{_ids(path)} imports {foreign}"


@pytest.mark.needs_src
@pytest.mark.parametrize("path", _modules(), ids=_ids)
def test_module_does_not_import_the_entry_point_above_it(path: Path) -> None:
    """`from guardchart import x` inside the package is a cycle that import order hides."""
    if path.name == "__init__.py" and path.parent == SRC:
        return
    upward = [line for line, name in _imports(path) if name == "guardchart"]
    assert not upward, f"{_ids(path)}: import the defining module instead, line {upward}"


@pytest.mark.needs_src
@pytest.mark.parametrize("path", [path for path in _modules() if _part(path) == "kernel"], ids=_ids)
def test_kernel_module_is_pure(path: Path) -> None:
    impure = [f"{line}: {n}" for line, n in _imports(path) if n.split(".")[0] in IMPURE_MODULES]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        called = node.func if isinstance(node, ast.Call) else None
        if isinstance(called, ast.Name) and called.id in IMPURE_BUILTINS:
            impure.append(f"{called.lineno}: {called.id}()")
    assert not impure, f"{_ids(path)} is impure: {impure}"


def _loaded_by(statement: str) -> set[str]:
    """Return the top-level modules that a statement loads in a fresh interpreter."""
    program = (
        "import sys, json; before = set(sys.modules)\n"
        f"{statement}\n"
        "print(json.dumps(sorted({n.split('.')[0] for n in set(sys.modules) - before})))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(json.loads(done.stdout))


def test_importing_guardchart_loads_no_third_party_package() -> None:
    foreign = _loaded_by("import guardchart") - sys.stdlib_module_names - {"guardchart"}
    assert not foreign


# A bridge loads its own framework, and what that drags in. Everything else loads none.
LOADS = {
    "guardchart.langchain": {"langchain_core", "langsmith", "opentelemetry"},
    "guardchart.langgraph": {"langgraph", "langchain_core", "langsmith", "opentelemetry"},
    "guardchart.pydantic_ai": {"pydantic_ai", "genai_prices", "opentelemetry"},
}


@pytest.mark.parametrize("name", EXISTING)
def test_importing_an_entry_point_loads_no_framework_but_its_own(name: str) -> None:
    assert not (_loaded_by(f"import {name}") & set(FRAMEWORKS)) - LOADS.get(name, set())


# --- public names ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EXISTING)
def test_entry_point_exports_exactly_the_pinned_names(name: str) -> None:
    exported = public_names(name)
    assert exported == sorted(set(exported)), f"{name}.__all__ is not sorted"
    assert exported == PINNED.get(name), (
        f"{name}.__all__ changed; if on purpose: python -m tests.public_names"
    )


@pytest.mark.parametrize("name", EXISTING)
def test_every_public_name_exists_and_is_documented(name: str) -> None:
    module = importlib.import_module(name)
    for exported in public_names(name):
        value = getattr(module, exported)
        if inspect.isclass(value) or inspect.isroutine(value):
            assert inspect.getdoc(value), f"{name}.{exported} has no docstring"


@pytest.mark.parametrize("name", ["guardchart", "guardchart.agents", "guardchart.langgraph"])
def test_what_users_start_with_carries_an_example(name: str) -> None:
    module = importlib.import_module(name)
    found = [(each, getattr(module, each)) for each in public_names(name)]
    bare = [
        each
        for each, value in found
        if (inspect.isroutine(value) or inspect.isclass(value))
        and not (inspect.isclass(value) and issubclass(value, Exception))
        and ">>>" not in (inspect.getdoc(value) or "")
    ]
    assert not bare, f"{name}: no example in {bare}"


def test_no_pinned_entry_point_has_vanished() -> None:
    assert set(PINNED) <= set(entry_points())


# --- text --------------------------------------------------------------------------------------


def _committed() -> list[Path]:
    """Return the files that are, or by `git add` would be, committed."""
    done = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    paths = (ROOT / name for name in done.stdout.decode().split("\0") if name)
    return sorted(path for path in paths if path.is_file())


# Each pattern spells one letter as a class, so that it does not find itself.
BANNED = {
    "a path of somebody's machine": r"(?<![\w.-])/(?:w[o]rk|r[o]ot|h[o]me/\w+|U[s]ers/\w+)/",
    "a registry's host": r"p[y]pi\.org|python[h]osted\.org|n[p]mjs\.|--(?:extra-)?inde[x]-url",
    "unfinished business": r"\b(?:TO[D]O|FI[X]ME|X[X]X)\b",
    "a file outside the repository": r"\bs[h]ared/(?:design|seeds|tools)\b",
    "an issue's number": r"(?i)\bissu[e] #?\d+\b|\bG[H]-\d+\b",
}


@pytest.mark.needs_src
@pytest.mark.parametrize("what", sorted(BANNED))
def test_committed_text_holds_no(what: str) -> None:
    pattern = re.compile(BANNED[what])
    found = []
    for path in _committed():
        if path.is_relative_to(ROOT / "fixtures") and what == "unfinished business":
            continue  # other people's documents, kept as they are
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(text.splitlines(), 1):
            if match := pattern.search(line):
                found.append(f"{_ids(path)}:{number}: {match[0]}")
    assert not found, f"{what}: {found}"


@pytest.mark.needs_src
def test_every_module_has_a_docstring() -> None:
    paths = [*_modules()]
    for folder in ("examples", "benchmarks"):
        paths += (ROOT / folder).rglob("*.py")
    bare = []
    for path in paths:
        text = path.read_text(encoding="utf-8")
        if text.strip() and not ast.get_docstring(ast.parse(text)):
            bare.append(_ids(path))
    assert not bare


def test_folders_of_modules_are_packages() -> None:
    """Else a contract would not see them, and tests/langgraph would hide the framework."""
    folders = {path.parent for path in [*_modules(), *(ROOT / "tests").rglob("*.py")]}
    assert not [_ids(folder) for folder in folders if not (folder / "__init__.py").exists()]


# --- packaging ---------------------------------------------------------------------------------


def _pyproject() -> dict[str, Any]:
    with open(ROOT / "pyproject.toml", "rb") as file:
        return tomllib.load(file)


def _requirements() -> dict[str, list[str]]:
    project = _pyproject()["project"]
    return {"": project["dependencies"], **project["optional-dependencies"]}


def _name(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match
    return re.sub(r"[-_.]+", "-", match[0]).lower()


def test_core_depends_on_pydantic_alone() -> None:
    assert [_name(requirement) for requirement in _requirements()[""]] == ["pydantic"]


def test_all_is_every_extra_but_dev() -> None:
    extras = _requirements()
    (line,) = extras["all"]
    assert sorted(line.partition("[")[2].rstrip("]").split(",")) == sorted(
        set(extras) - {"", "all", "dev"}
    )


def test_constraints_pin_every_direct_dependency() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[^\s;]+", pin) for pin in pins)
    pinned = {_name(pin) for pin in pins}
    direct = {_name(line) for lines in _requirements().values() for line in lines}
    assert direct - {"guardchart"} <= pinned


def test_the_version_is_the_same_in_both_places() -> None:
    assert guardchart.__version__ == _pyproject()["project"]["version"]


def test_changelog_keeps_an_unreleased_section() -> None:
    assert "\n## Unreleased\n" in (ROOT / "CHANGELOG.md").read_text()
