"""The tally of the outside suites at the end of a run."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conformance.scxml.suites import EXCLUDED

# Under the synchronous interpreter; the other runs tell whether they agree.
TESTS = {
    "test_scripted_document_follows_its_script[": "scripted",
    "test_irp_document_passes[": "irp",
    "test_irp_document_of_scion_passes[": "irp-scion",
}


@pytest.hookimpl(tryfirst=True)
def pytest_terminal_summary(terminalreporter: Any) -> None:
    total: dict[str, int] = {}
    passed: dict[str, int] = {}
    for outcome in ("passed", "failed", "xfailed", "xpassed"):
        for report in terminalreporter.stats.get(outcome, ()):
            for test, family in TESTS.items():
                if f"::{test}" in report.nodeid:
                    total[family] = total.get(family, 0) + 1
                    passed[family] = passed.get(family, 0) + (outcome == "passed")
    if not total:
        return
    terminalreporter.write_sep("-", "outside suites")
    for family, count in total.items():
        terminalreporter.write_line(f"{family} {passed[family]}/{count}")
        for name, reason in EXCLUDED[family].items():
            terminalreporter.write_line(f"  not {name}: {reason}")
