"""guardchart._extras: version ranges and what is said about optional dependencies."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pytest

from guardchart import _extras
from guardchart._extras import (
    LANGGRAPH_TESTED,
    PYDANTIC_AI_TESTED,
    check_version,
    require,
    version_in_range,
    warn_untested,
)
from guardchart.errors import GuardchartError, MissingExtraError

GARBAGE: list[object] = [
    "",
    " ",
    "one",
    "1.",
    ".1",
    "1..2",
    "-1",
    "1.0 or so",
    "1.0\n",
    "١.٢",
    "1" * 5_000,
    "1." * 5_000 + "0",
    "1!1.0",
    None,
    1,
    1.2,
    (1, 2),
    b"1.2",
    True,
]


@pytest.mark.parametrize(
    ("version", "inside"),
    [
        ("1.0", True),
        ("1", True),
        ("1.0.0", True),
        ("v1.0", True),
        ("1.2.24", True),
        ("1.999.99999", True),
        ("1.0.post1", True),
        ("1.2+local.build", True),
        ("1.2rc1", True),
        ("1.0rc1", False),
        ("1.0a1", False),
        ("1.0.dev3", False),
        ("0.9.9", False),
        ("0", False),
        ("2.0", False),
        ("2", False),
        ("2.0.0", False),
        ("2.0rc1", False),
        ("2.0.0.dev1", False),
        ("10.0", False),
    ],
)
def test_range_holds_by_number_and_not_by_text(version: str, inside: bool) -> None:
    assert version_in_range(version, LANGGRAPH_TESTED) is inside


@pytest.mark.parametrize(
    ("tested", "inside"),
    [("==1.2", True), ("!=1.2", False), (">1.2", False), ("<=1.2", True), (">1.1, <1.3", True)],
)
def test_range_knows_every_comparison(tested: str, inside: bool) -> None:
    assert version_in_range("1.2.0", tested) is inside


@pytest.mark.parametrize("tested", ["", "1.0", "~=1.0", ">=", ">=one", ">=1.0,,<2"])
def test_range_that_cannot_be_read_is_a_programming_error(tested: str) -> None:
    with pytest.raises(ValueError, match="not a version range"):
        version_in_range("1.0", tested)


def test_check_version_passes_in_silence_when_inside() -> None:
    check_version("LangGraph", "1.2.24", LANGGRAPH_TESTED)
    check_version("pydantic-ai", "2.68.0", PYDANTIC_AI_TESTED)


@pytest.mark.parametrize(
    ("label", "version", "tested", "text"),
    [
        (
            "LangGraph",
            "0.6.1",
            LANGGRAPH_TESTED,
            "guardchart's LangGraph bridge is tested with langgraph >=1.0,<2.0; found 0.6.1",
        ),
        (
            "pydantic-ai",
            "1.9",
            PYDANTIC_AI_TESTED,
            "guardchart's pydantic-ai bridge is tested with pydantic-ai >=2.0,<3; found 1.9",
        ),
    ],
)
def test_check_version_names_range_and_find_when_outside(
    label: str, version: str, tested: str, text: str
) -> None:
    with pytest.raises(ImportError) as caught:
        check_version(label, version, tested)
    assert str(caught.value) == text


@pytest.mark.parametrize("version", GARBAGE, ids=lambda value: repr(value)[:20])
def test_garbage_version_raises_import_error_and_warns_without_raising(version: object) -> None:
    with pytest.raises(ImportError, match=r"tested with langgraph >=1\.0,<2\.0; found ") as caught:
        check_version("LangGraph", version, LANGGRAPH_TESTED)
    assert len(str(caught.value)) < 300
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warn_untested("LangGraph", version, LANGGRAPH_TESTED)


def test_warn_untested_warns_once_per_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_extras, "_warned", set())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for version in ("1.5", "2.1", "2.1", "3.0"):
            warn_untested("LangGraph", version, LANGGRAPH_TESTED)
    assert [str(w.message).rpartition(" ")[2] for w in caught] == ["2.1", "3.0"]
    assert {w.category for w in caught} == {RuntimeWarning}


def test_warn_untested_never_raises_when_warnings_are_errors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_extras, "_warned", set())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_untested("LangGraph", "9.9", LANGGRAPH_TESTED)
        warn_untested("LangGraph", "9.9", "not a range")


def test_require_returns_the_module_when_installed() -> None:
    assert require("json.decoder", extra="langgraph") is sys.modules["json.decoder"]


@pytest.mark.parametrize(
    ("module", "missing"),
    [("no_such_framework", "no_such_framework"), ("no_such_framework.graph", "no_such_framework")],
)
def test_require_names_the_install_when_missing(module: str, missing: str) -> None:
    with pytest.raises(MissingExtraError) as caught:
        require(module, extra="pydantic-ai")
    assert str(caught.value) == f'{missing} is not installed: pip install "guardchart[pydantic-ai]"'
    assert isinstance(caught.value, ImportError)
    assert isinstance(caught.value, GuardchartError)


def test_require_does_not_blame_the_extra_when_the_framework_is_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_framework.py").write_text("import its_missing_dependency\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="its_missing_dependency"):
        require("broken_framework", extra="langgraph")
