"""Small graphs and models that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, TypedDict

from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import add_messages
from pydantic import BaseModel

from guardchart.agents import FakeModel, agent_logic, load_chart, tool_registry
from guardchart.langgraph import route_by_statechart, statechart_node


class State(TypedDict, total=False):
    """The usual state: the snapshot, an event, what came of it."""

    xsm: Any
    event: Any
    answer: Any
    messages: Annotated[list[Any], add_messages]


class ModelState(BaseModel):
    """The same as a pydantic model."""

    xsm: Any = None
    event: Any = None
    answer: Any = None
    messages: Annotated[list[Any], add_messages] = []


@dataclass
class DataState:
    """The same as a dataclass."""

    xsm: Any = None
    event: Any = None
    answer: Any = None
    messages: Annotated[list[Any], add_messages] = field(default_factory=list)


COUNTER: dict[str, Any] = {
    "id": "counter",
    "initial": "low",
    "context": {"n": 0},
    "states": {
        "low": {"on": {"ADD": {"actions": "add"}, "RAISE": "high"}},
        "high": {"on": {"LOWER": {"target": "low", "guard": "allowed"}, "END": "over"}},
        "over": {"type": "final"},
    },
}
"""A chart without services."""


def add(context: Any, event: Any) -> dict[str, Any]:
    """Add the event's ``by``, 1 by default."""
    return {"n": context["n"] + event.payload.get("by", 1)}


def compiled(node: Any, schema: Any = State, *, saver: Any = None, router: Any = None) -> Any:
    """A graph of that one node."""
    graph = StateGraph(schema)
    graph.add_node("agent", node)
    graph.add_edge(START, "agent")
    if router is None:
        graph.add_edge("agent", END)
    else:
        graph.add_conditional_edges("agent", router)
    return graph.compile(checkpointer=InMemorySaver() if saver is None else saver)


def thread(name: Any = "t1") -> dict[str, Any]:
    """The configuration that names a thread."""
    return {"configurable": {"thread_id": name}}


class Refunds:
    """A tool with a side effect, and what it did."""

    def __init__(self) -> None:
        self.done: list[tuple[int, int]] = []

    def tools(self) -> Any:
        """A registry with ``lookup`` (harmless) and ``refund`` (asks a person)."""
        from guardchart.agents import tool

        def lookup(order_id: int) -> str:
            """Look up an order."""
            return f"order {order_id}: shipped"

        def refund(order_id: int, amount_cents: int) -> str:
            """Refund an order."""
            self.done.append((order_id, amount_cents))
            return "refunded"

        return tool_registry(lookup, tool(refund, timeout_s=5, side_effect=True), timeout_s=5)


def loop_chart(*tools: str) -> dict[str, Any]:
    """TOOL_LOOP with an allow-list."""
    chart = load_chart()
    for state in ("awaiting_model", "awaiting_tool"):
        chart["states"][state]["meta"]["tools"] = list(tools)
    return chart


REFUND: dict[str, Any] = {"tool": "refund", "args": {"order_id": 7, "amount_cents": 500}}


def loop_node(
    script: list[Any],
    refunds: Refunds | None = None,
    *,
    is_async: bool = False,
    logic: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """A TOOL_LOOP node with both tools allowed and the event read from ``event``."""
    tools = (refunds or Refunds()).tools()
    model = FakeModel(script, is_async=is_async)
    options.setdefault("event_from_state", from_event)
    return statechart_node(
        loop_chart("lookup", "refund"), agent_logic(model, tools, **(logic or {})), **options
    )


def from_event(state: Any) -> Any:
    """Read the event from its entry, whatever the state's class."""
    return state.get("event") if isinstance(state, dict) else state.event


def loop_router(**routes: str) -> Any:
    """Every place where the loop rests leads to END, unless told otherwise."""
    return route_by_statechart(
        load_chart(), {"done": END, "error": END, "awaiting_human": END, **routes}
    )


def start(prompt: str = "refund order 7") -> dict[str, Any]:
    """The event that opens a turn."""
    return {"type": "START", "prompt": prompt}


Make = Callable[..., Any]
