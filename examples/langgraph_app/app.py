"""Two graphs for LangGraph's server: a compiled chart, and a chat around it.

``langgraph dev`` in this folder serves them, with a checkpointer of its own. The model needs no
network.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

from langchain_core.messages import HumanMessage
from langgraph.graph import END, START, MessagesState, StateGraph

from guardchart.agents import FakeModel, agent_logic, load_chart, tool, tool_registry
from guardchart.langgraph import snapshot_reducer, statechart_graph


def lookup_order(order_id: int) -> str:
    """Look up an order."""
    return f"order {order_id}: delivered, 25.00 EUR"


def refund_order(order_id: int, amount_cents: int) -> str:
    """Refund an order."""
    return f"refunded {amount_cents} cents of order {order_id}"


async def model(messages: list[Any], tools: list[Any]) -> Any:
    """Answer by a few rules: look the order up, propose a refund, report."""
    last = messages[-1]
    said = next(each["content"] for each in reversed(messages) if each["role"] == "user")
    order = re.search(r"\d+", said)
    if order is None:
        item: dict[str, Any] = {"text": "Which order is it about?"}
    elif last["role"] == "user":
        item = {"tool": "lookup_order", "args": {"order_id": int(order[0])}}
    elif last["name"] == "lookup_order" and "refund" in said.lower():
        arguments = {"order_id": int(order[0]), "amount_cents": 2500}
        item = {"tool": "refund_order", "args": arguments}
    else:
        item = {"text": last["content"]}
    return await FakeModel([item])(messages, tools)


def build(**options: Any) -> Any:
    """The chart as a graph: both tools may be proposed, a refund asks a person."""
    chart = load_chart()
    chart["id"] = "refunds"
    for state in ("awaiting_model", "awaiting_tool"):
        chart["states"][state]["meta"]["tools"] = ["lookup_order", "refund_order"]
    tools = tool_registry(lookup_order, tool(refund_order, side_effect=True))
    return statechart_graph(chart, agent_logic(model, tools), messages_key="messages", **options)


class Chat(MessagesState):
    """What a chat page sends is a message; what the chart takes is an event."""

    xsm: Annotated[dict[str, Any], snapshot_reducer]
    event: dict[str, Any] | None


def listen(state: Chat) -> dict[str, Any]:
    """The last message, if it is a person's, opens a turn."""
    last = state["messages"][-1] if state["messages"] else None
    if not isinstance(last, HumanMessage):
        return {}
    return {"event": {"type": "START", "prompt": str(last.text)}}


refunds = build()

_chat = StateGraph(Chat)
_chat.add_node("listen", listen)
_chat.add_node("agent", build(as_subgraph=True))
_chat.add_edge(START, "listen")
_chat.add_edge("listen", "agent")
_chat.add_edge("agent", END)
chat = _chat.compile(name="chat")
