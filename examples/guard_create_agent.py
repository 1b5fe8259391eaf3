"""A ``create_agent`` agent whose refund needs a person, once, and is asked for only once.

Run it: ``python examples/guard_create_agent.py``. It is offline; a scripted model stands in for
``init_chat_model(...)``.
"""

from __future__ import annotations

from typing import Any

from langchain.agents import create_agent
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import Command

from guardchart.gate import approval_event
from guardchart.langchain import StatechartMiddleware
from guardchart.langgraph import ledger_for

refunds: list[tuple[int, int]] = []


@tool
def lookup_order(order_id: int) -> str:
    """Look up an order."""
    return f"order {order_id}: 12.50, delivered"


@tool
def refund_order(order_id: int, cents: int) -> str:
    """Refund an order."""
    refunds.append((order_id, cents))
    return f"refunded {cents} cents"


# What may happen, and what may not: no refund before the order was looked up, one refund only.
CHART: dict[str, Any] = {
    "id": "refund_desk",
    "initial": "triage",
    "states": {
        "triage": {
            "meta": {"tools": ["lookup_order"]},
            "on": {"tool.done.lookup_order": "deciding"},
        },
        "deciding": {
            "meta": {"tools": ["lookup_order", "refund_order"]},
            "on": {"tool.done.refund_order": "settled", "tool.rejected.refund_order": "settled"},
        },
        "settled": {"meta": {"tools": ["lookup_order"]}},
    },
}


class Model(GenericFakeChatModel):
    """A scripted model: too fast, then right, then greedy."""

    def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
        return self


def proposes(name: str, ident: str, **args: Any) -> AIMessage:
    call = {"name": name, "args": args, "id": ident, "type": "tool_call"}
    return AIMessage("", tool_calls=[call])


def main() -> None:
    script = [
        proposes("refund_order", "c1", order_id=7, cents=1250),
        proposes("lookup_order", "c2", order_id=7),
        proposes("refund_order", "c3", order_id=7, cents=1250),
        proposes("refund_order", "c4", order_id=7, cents=1250),
        AIMessage("12.50 is on its way."),
    ]
    saver = InMemorySaver()
    guard = StatechartMiddleware(
        CHART,
        tools=[lookup_order, refund_order],
        side_effects=["refund_order"],
        ledger=ledger_for(saver),
    )
    agent: Any = create_agent(Model(messages=iter(script)), middleware=[guard], checkpointer=saver)
    thread = {"configurable": {"thread_id": "ticket-7"}}

    out = agent.invoke({"messages": [("user", "My money back for order 7!")]}, thread)
    question = out["__interrupt__"][0].value
    print("asked:", question["action_requests"][0]["description"])
    print("refunds so far:", refunds)

    answer = approval_event(question["calls"], by="ann")
    out = agent.invoke(Command(resume=answer), thread)
    for message in out["messages"]:
        if message.type == "tool":
            print(f"{message.tool_call_id} {message.name}: {message.content}")
    print("answer:", out["messages"][-1].content)

    agent.invoke(Command(resume=answer), thread)  # a double click
    print("refunds entered:", len(refunds))


if __name__ == "__main__":
    main()
