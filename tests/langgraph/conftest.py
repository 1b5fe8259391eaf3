"""Prints the matrix of tests/langgraph/test_once.py at the end of a verbose run."""

from __future__ import annotations

from typing import Any

import pytest


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if config.get_verbosity() < 1:
        return
    from tests.langgraph.once.table import counted, lines

    stats = terminalreporter.stats
    found = counted(stats.get("passed", []) + stats.get("failed", []))
    if found:
        terminalreporter.section("once means once")
        for line in lines(found):
            terminalreporter.line(line)
