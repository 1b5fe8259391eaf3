"""LangGraph: a chart as a node, a router on its state, a ledger beside the checkpointer.

See docs/bridges/langgraph.md. The names are loaded when they are first used, and a LangGraph
outside the tested range is warned of then.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from guardchart._extras import (
    LANGGRAPH_TESTED,
    check_version,
    installed_version,
    require,
    warn_untested,
)

if TYPE_CHECKING:
    from guardchart.errors import GraphInterruptedError
    from guardchart.langchain import LangChainCallbackPlugin
    from guardchart.langgraph._graph import statechart_graph
    from guardchart.langgraph._ledger import ledger_for
    from guardchart.langgraph._node import statechart_node
    from guardchart.langgraph._reducers import snapshot_map_reducer, snapshot_reducer
    from guardchart.langgraph._route import route_by_statechart
    from guardchart.langgraph._service import INTERRUPT_KEY, langgraph_service
    from guardchart.langgraph._threads import (
        apending_approval,
        aresume_pending,
        pending_approval,
        resume_pending,
    )

__all__ = [
    "GraphInterruptedError",
    "INTERRUPT_KEY",
    "LANGGRAPH_TESTED",
    "LangChainCallbackPlugin",
    "apending_approval",
    "aresume_pending",
    "check_langgraph_version",
    "langgraph_service",
    "ledger_for",
    "pending_approval",
    "resume_pending",
    "route_by_statechart",
    "snapshot_map_reducer",
    "snapshot_reducer",
    "statechart_graph",
    "statechart_node",
]

_MODULES = {
    "GraphInterruptedError": "_service",
    "INTERRUPT_KEY": "_service",
    "LangChainCallbackPlugin": "guardchart.langchain",
    "apending_approval": "_threads",
    "aresume_pending": "_threads",
    "langgraph_service": "_service",
    "ledger_for": "_ledger",
    "pending_approval": "_threads",
    "resume_pending": "_threads",
    "route_by_statechart": "_route",
    "snapshot_map_reducer": "_reducers",
    "snapshot_reducer": "_reducers",
    "statechart_graph": "_graph",
    "statechart_node": "_node",
}

require("langgraph.graph", extra="langgraph")


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warn_untested("LangGraph", installed_version("langgraph"), LANGGRAPH_TESTED)
    home = module if "." in module else f"{__name__}.{module}"
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


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
