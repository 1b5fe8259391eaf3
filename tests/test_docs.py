"""Everything the documentation shows is run: fences, docstring examples, links, tables.

The ``python`` fences of a page run in order, in one namespace, in an empty directory, offline.
A fence of ``>>>`` lines is compared with its output. A page whose code needs a package that is
not always installed says so in a comment: ``<!-- requires: dbos -->``.
"""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import json
import linecache
import pkgutil
import re
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import guardchart
from guardchart import errors
from guardchart.errors import GuardchartError, MissingExtraError

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])

_FENCE = re.compile(r"^( *)(`{3,}|~{3,})([^\n`]*)\n(.*?)^\1\2`*~* *$", re.MULTILINE | re.DOTALL)
_REQUIRES = re.compile(r"<!-- requires: ([\w., ]+) -->")
_LINK = re.compile(r"(?<!!)\[[^\]\n]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ +(.+?) *#*$", re.MULTILINE)


@dataclass
class Fence:
    language: str
    code: str
    line: int


def fences(text: str) -> Iterator[Fence]:
    """Yield the fenced blocks of a page, with the line on which the code starts."""
    for match in _FENCE.finditer(text):
        indent, _, info, code = match.groups()
        code = re.sub(f"^{indent}", "", code, flags=re.MULTILINE) if indent else code
        words = info.split()
        line = text.count("\n", 0, match.start(4)) + 1
        yield Fence(words[0].lower() if words else "", code, line)


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _with_python(paths: list[Path]) -> list[Path]:
    return [p for p in paths if any(f.language == "python" for f in fences(p.read_text()))]


def _require(text: str) -> None:
    for match in _REQUIRES.finditer(text):
        for module in re.split(r"[, ]+", match[1].strip()):
            try:
                found = importlib.util.find_spec(module) is not None
            except ModuleNotFoundError:
                found = False
            if not found:
                pytest.skip(f"needs {module}")


def _lend_database(source: str, names: dict[str, object], request: pytest.FixtureRequest) -> None:
    """Give code that speaks of ``postgres_dsn`` an empty database of its own."""
    if "postgres_dsn" in source:
        names["postgres_dsn"] = request.getfixturevalue("postgres_database")


def _run_doctest(test: doctest.DocTest) -> None:
    said: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    runner.run(test, out=said.append, clear_globs=False)
    assert not runner.failures, "".join(said)


# --- pages -------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", _with_python(PAGES), ids=_name)
def test_python_fences_of_a_page_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    text = page.read_text(encoding="utf-8")
    _require(text)
    monkeypatch.chdir(tmp_path)
    # A real module: frameworks look functions' annotations up in sys.modules.
    module = types.ModuleType("docs_page")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    _lend_database(text, module.__dict__, request)
    for fence in fences(text):
        if fence.language != "python":
            continue
        name = f"{_name(page)}:{fence.line}"
        if fence.code.lstrip().startswith(">>>"):
            parser = doctest.DocTestParser()
            test = parser.get_doctest(fence.code, module.__dict__, name, str(page), fence.line - 1)
            test.globs = module.__dict__
            _run_doctest(test)
            continue
        # Padded, so that a traceback shows the page's own line; cached, so that tools which
        # read a function's source find it.
        source = "\n" * (fence.line - 1) + fence.code
        filename = f"<{name}>"
        linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
        exec(compile(source, filename, "exec", dont_inherit=True), module.__dict__)


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_data_fences_of_a_page_parse(page: Path) -> None:
    for fence in fences(page.read_text(encoding="utf-8")):
        if fence.language == "json":
            json.loads(fence.code)


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_relative_links_of_a_page_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    prose = _FENCE.sub("", text)
    dead = []
    for target in _LINK.findall(prose):
        if re.match(r"[a-z][a-z0-9+.-]*:", target):
            continue
        file, _, anchor = target.partition("#")
        path = (page.parent / file).resolve() if file else page
        in_page = anchor and path.suffix == ".md" and path.exists()
        if not path.exists() or (in_page and anchor not in _anchors(path.read_text())):
            dead.append(target)
    assert not dead


def test_the_readme_leads_to_every_page() -> None:
    """A folder that is linked stands for its pages (docs/adr)."""
    targets = {
        target.partition("#")[0] for target in _LINK.findall((ROOT / "README.md").read_text())
    }
    linked = {(ROOT / target).resolve() for target in targets if ":" not in target}
    pages = sorted((ROOT / "docs").rglob("*.md"))
    assert not [_name(page) for page in pages if not linked & {page, page.parent}]


def _anchors(text: str) -> set[str]:
    headings = _HEADING.findall(_FENCE.sub("", text))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_fences_are_found_with_indent_language_and_line() -> None:
    text = "a\n\n```python title='x'\n1\n```\n- b\n\n  ~~~json\n  {}\n  ~~~\n````\n```\n````\n"
    assert list(fences(text)) == [
        Fence("python", "1\n", 4),
        Fence("json", "{}\n", 9),
        Fence("", "```\n", 12),
    ]


# --- docstrings --------------------------------------------------------------------------------


def _module_names() -> list[str]:
    walked = pkgutil.walk_packages(guardchart.__path__, "guardchart.", onerror=lambda name: None)
    return ["guardchart", *sorted(m.name for m in walked if not m.name.endswith(".__main__"))]


@pytest.mark.parametrize("name", _module_names())
def test_docstring_examples_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    try:
        module = importlib.import_module(name)
    except MissingExtraError as exc:
        pytest.skip(str(exc))
    monkeypatch.chdir(tmp_path)
    for test in doctest.DocTestFinder(exclude_empty=True).find(module):
        if test.examples:
            _lend_database(test.docstring or "", test.globs, request)
            _run_doctest(test)


# --- docs/errors.md ----------------------------------------------------------------------------


def _all_errors() -> dict[str, type[GuardchartError]]:
    """Return every error class of the library by name, those of modules outside errors.py too."""
    for name in _module_names():
        try:
            importlib.import_module(name)
        except MissingExtraError:
            continue
    found: dict[str, type[GuardchartError]] = {}
    todo: list[type[GuardchartError]] = [GuardchartError]
    while todo:
        cls = todo.pop()
        todo += cls.__subclasses__()
        if cls.__module__.split(".")[0] == "guardchart":
            found[cls.__name__] = cls
    return found


def test_errors_page_lists_every_error_with_its_code_and_family() -> None:
    text = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w-]+)` \| `(\w+)` \| `([\w, `]+)` \|", text, re.MULTILINE)
    listed = {error: (code, re.split(r"[`, ]+", bases)) for code, error, bases in rows}
    actual = {
        name: (cls.code, [base.__name__ for base in cls.__bases__])
        for name, cls in _all_errors().items()
    }
    assert listed == actual
    assert len(rows) == len(listed)


def test_error_codes_are_distinct_and_each_class_has_its_own() -> None:
    classes = _all_errors().values()
    assert len({cls.code for cls in classes}) == len(classes)
    assert all("code" in vars(cls) for cls in classes)
    assert all(re.fullmatch(r"[a-z]+(-[a-z]+)*", cls.code) for cls in classes)


def test_errors_module_exports_every_error_it_defines() -> None:
    defined = {n for n, c in _all_errors().items() if c.__module__ == "guardchart.errors"}
    assert set(errors.__all__) == defined
