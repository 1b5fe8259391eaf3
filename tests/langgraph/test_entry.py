"""The entry point: names, versions, and what importing it costs nobody."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import guardchart.langgraph as bridge
from guardchart.langgraph import LANGGRAPH_TESTED, check_langgraph_version


def test_the_seeds_signatures_are_kept() -> None:
    node = inspect.signature(bridge.statechart_node).parameters
    assert list(node)[:2] == ["machine", "logic"] and node["logic"].default is None
    assert node["state_key"].default == "xsm"
    assert node["event_from_state"].default is inspect.Parameter.empty
    assert node["result_to_state"].default is None
    route = inspect.signature(bridge.route_by_statechart).parameters
    assert list(route) == ["machine", "mapping", "state_key", "default"]
    assert route["default"].default is None


def test_names_load_when_they_are_used_and_others_do_not_exist() -> None:
    assert set(dir(bridge)) == set(bridge.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = bridge.nothing


def test_importing_the_bridge_loads_neither_agents_nor_sqlite() -> None:
    program = (
        "import sys, guardchart.langgraph; "
        "print([m for m in ('guardchart.agents', 'guardchart.gate', 'sqlite3') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("version", ["0.6.1", "2.0", "2.0rc1", "soon", "", None, 1.2])
def test_check_langgraph_version_raises_outside_the_tested_range(version: object) -> None:
    with pytest.raises(ImportError, match="is tested with langgraph"):
        check_langgraph_version(version)  # type: ignore[arg-type]


def test_check_langgraph_version_accepts_what_is_tested() -> None:
    assert LANGGRAPH_TESTED
    for version in ("1.0", "1.2.24"):
        check_langgraph_version(version)


def test_importing_outside_the_tested_range_only_warns() -> None:
    program = (
        "import warnings, importlib.metadata as m\n"
        "real = m.version\n"
        "m.version = lambda name: '9.9' if name == 'langgraph' else real(name)\n"
        "with warnings.catch_warnings(record=True) as seen:\n"
        "    warnings.simplefilter('always')\n"
        "    from guardchart.langgraph import statechart_node\n"
        "print([str(w.message) for w in seen if 'tested with' in str(w.message)])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert "found 9.9" in done.stdout
