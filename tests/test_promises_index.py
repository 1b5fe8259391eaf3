"""docs/promises.md: each row names a test that exists, each promise test has its row."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "promises.md"

_TEST = re.compile(r"`((?:tests|examples)/[\w/]+\.py::[\w:]+)`")


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip())[1:-1]]


def rows() -> list[list[str]]:
    """Return the cells of the table: promise, source, test."""
    table = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    assert _cells(table[0]) == ["promise", "source", "test"]
    return [_cells(line) for line in table[2:]]


def defined_tests(path: Path) -> set[str]:
    """Return the ids of the tests that a file defines, parameters left out."""
    name = path.relative_to(ROOT)
    module = ast.parse(path.read_text(encoding="utf-8"))
    found = {f"{name}::{test}" for test in _functions(module)}
    for node in module.body:
        if isinstance(node, ast.ClassDef):
            found |= {f"{name}::{node.name}::{test}" for test in _functions(node)}
    return found


def _functions(node: ast.Module | ast.ClassDef) -> list[str]:
    return [
        child.name
        for child in node.body
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
        and child.name.startswith("test_")
    ]


def test_every_row_is_complete_and_names_tests_that_exist() -> None:
    wrong = []
    for row in rows():
        assert len(row) == 3 and all(row), row
        named = _TEST.findall(row[2])
        if not named:
            wrong.append(row[2])
        for test in named:
            path = ROOT / test.partition("::")[0]
            if not path.is_file() or test not in defined_tests(path):
                wrong.append(test)
    assert not wrong


def test_every_promise_test_has_its_row() -> None:
    promised = {test for row in rows() for test in _TEST.findall(row[2])}
    defined = set()
    for path in (ROOT / "tests" / "promises").rglob("test_*.py"):
        defined |= defined_tests(path)
    assert sorted(defined - promised) == []


def _statements() -> set[str]:
    """Return the numbers that stand in docs/security.md (T) and docs/semantics.md (a letter each)."""
    docs = ROOT / "docs"
    found = set(re.findall(r"^\| (T\d+) \|", (docs / "security.md").read_text(), re.MULTILINE))
    rulings = (docs / "semantics.md").read_text(encoding="utf-8")
    return found | set(re.findall(r"^\*\*([A-S]\d+)\. ", rulings, re.MULTILINE))


def test_every_statement_that_a_row_names_as_its_source_exists() -> None:
    named = {number for row in rows() for number in re.findall(r"\b[A-T]\d+\b", row[1])}
    assert len(named) > 30
    assert sorted(named - _statements()) == []


def test_every_ruling_that_a_tests_name_ends_with_exists() -> None:
    name = re.compile(r"^ *(?:async )?def test_\w+_([a-s]\d+)\(", re.MULTILINE)
    cited = {
        number.upper()
        for path in (ROOT / "tests").rglob("test_*.py")
        for number in name.findall(path.read_text(encoding="utf-8"))
    }
    assert len(cited) > 15
    assert sorted(cited - _statements()) == []


def test_no_promise_is_made_twice() -> None:
    promises = [row[0] for row in rows()]
    assert len(promises) == len(set(promises))
