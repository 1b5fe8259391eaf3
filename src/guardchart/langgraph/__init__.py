"""LangGraph: a chart as a node, a router on its state, a ledger beside the checkpointer.

See docs/bridges/langgraph.md.
"""

from __future__ import annotations

from guardchart._extras import (
    LANGGRAPH_TESTED,
    check_version,
    installed_version,
    require,
    warn_untested,
)

require("langgraph.graph", extra="langgraph")
warn_untested("LangGraph", installed_version("langgraph"), LANGGRAPH_TESTED)

from guardchart.langgraph._ledger import ledger_for  # noqa: E402
from guardchart.langgraph._node import statechart_node  # noqa: E402
from guardchart.langgraph._route import route_by_statechart  # noqa: E402

__all__ = [
    "LANGGRAPH_TESTED",
    "check_langgraph_version",
    "ledger_for",
    "route_by_statechart",
    "statechart_node",
]


def check_langgraph_version(version: str) -> None:
    """Raise unless a LangGraph version lies in the tested range; importing only warns.

    Args:
        version: The version's text, e.g. ``langgraph.version.__version__``.

    Raises:
        ImportError: It lies outside `LANGGRAPH_TESTED`, or is no version.

    Example:
        >>> check_langgraph_version("1.2.24")
    """
    check_version("LangGraph", version, LANGGRAPH_TESTED)
