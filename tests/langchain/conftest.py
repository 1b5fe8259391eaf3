"""Prints the run trees that a LangSmith client posted, at the end of a verbose run."""

from __future__ import annotations

from typing import Any

import pytest

RUN_TREE = "run tree"
"""What a test hands to ``record_property``; it reaches the controller of pytest-xdist."""


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if config.get_verbosity() < 1:
        return
    for report in terminalreporter.stats.get("passed", []):
        for name, tree in getattr(report, "user_properties", ()):
            if name == RUN_TREE:
                terminalreporter.section(f"recorded: {report.nodeid.rpartition('::')[2]}")
                terminalreporter.write_line(tree)
