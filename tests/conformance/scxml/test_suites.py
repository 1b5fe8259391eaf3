"""The documents of the outside suites, one test each; see `suites` for those that are excluded."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conformance.scxml.driver import PureRun, Run, follow, verdict, verdict_async
from tests.conformance.scxml.fetch import SCION, STATEMACHINE, folder
from tests.conformance.scxml.loader import load
from tests.conformance.scxml.suites import EXCLUDED, Case, cases

WHERE = "is not here: 'make suites' fetches it where a registry answers"


def _documents(family: str) -> list[Any]:
    suite = STATEMACHINE if family == "irp" else SCION
    if not folder(suite).is_dir():
        skip = pytest.mark.skip(reason=f"suite {suite.name} {WHERE}")
        return [pytest.param(None, id="none", marks=skip)]
    excluded = EXCLUDED[family]
    return [
        pytest.param(
            case,
            id=case.name,
            marks=[pytest.mark.xfail(reason=excluded[case.name], strict=True)]
            if case.name in excluded
            else [],
        )
        for case in cases(family)
    ]


@pytest.mark.parametrize("case", _documents("scripted"))
def test_scripted_document_follows_its_script(case: Case) -> None:
    assert follow(Run(load(case.path, case.model)), case.script) is None


@pytest.mark.parametrize("case", _documents("scripted"))
def test_scripted_document_follows_its_script_without_an_interpreter(case: Case) -> None:
    assert follow(PureRun(load(case.path, case.model)), case.script) is None


@pytest.mark.parametrize("case", _documents("irp"))
def test_irp_document_passes(case: Case) -> None:
    assert case.expected <= verdict(load(case.path, case.model))


# Its scripts say where a document stands before its own events are handled, too. That is a
# property of an engine that works in the background; what counts is where it ends.
@pytest.mark.parametrize("case", _documents("irp-scion"))
def test_irp_document_of_scion_passes(case: Case) -> None:
    assert verdict(load(case.path, case.model)) == case.expected


@pytest.mark.parametrize("family", ["irp", "irp-scion"])
async def test_async_interpreter_ends_where_the_sync_one_does(family: str) -> None:
    found = cases(family)
    if not found:
        pytest.skip(f"the suite {WHERE}")
    for case in found:
        if case.name not in EXCLUDED[family]:
            ended = await verdict_async(load(case.path, case.model))
            assert case.expected <= ended, case.name


@pytest.mark.parametrize(
    ("family", "documents", "bar"),
    [("scripted", 127, 115), ("irp", 193, 165), ("irp-scion", 189, 180)],
)
def test_suite_is_whole_and_above_its_bar(family: str, documents: int, bar: int) -> None:
    found = {case.name for case in cases(family)}
    if not found:
        pytest.skip(f"the suite {WHERE}")
    assert len(found) == documents
    assert set(EXCLUDED[family]) <= found
    assert documents - len(EXCLUDED[family]) > bar
