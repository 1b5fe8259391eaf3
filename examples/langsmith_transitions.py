"""A chart's transitions in LangSmith: the run tree that a real client posts, as text.

Run it: ``python examples/langsmith_transitions.py``. It is offline: a recorder on the loopback
interface stands in for LangSmith, and a scripted model for a real one. In an app, set
``LANGSMITH_TRACING=true`` and your key, and give the node the plugin; nothing else.
"""

from __future__ import annotations

from typing import Any, TypedDict

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage
from langchain_core.tools import tool as langchain_tool
from langchain_core.tracers.langchain import LangChainTracer
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from langsmith import Client

from guardchart.agents import agent_logic, approval_event, load_chart, pending_approval
from guardchart.gate import tool, tool_registry
from guardchart.langchain import LangChainCallbackPlugin, chat_model
from guardchart.langgraph import ledger_for, route_by_statechart, statechart_node
from guardchart.testing import LangSmithRecorder


@langchain_tool
def refund_order(order_id: int, cents: int) -> str:
    """Refund an order."""
    return f"refunded {cents} cents"


class Model(GenericFakeChatModel):
    """A scripted chat model."""

    def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
        return self


class State(TypedDict, total=False):
    """The event, and where the chart stands."""

    event: dict[str, Any] | None
    xsm: dict[str, Any]


def app() -> Any:
    chart = load_chart()
    for state in ("awaiting_model", "awaiting_tool"):
        chart["states"][state]["meta"]["tools"] = ["refund_order"]
    args = {"order_id": 7, "cents": 1250}
    call = {"name": "refund_order", "args": args, "id": "c1", "type": "tool_call"}
    model = Model(messages=iter([AIMessage("", tool_calls=[call]), AIMessage("Done.")]))
    saver = InMemorySaver()
    node = statechart_node(
        chart,
        agent_logic(chat_model(model), tool_registry(tool(refund_order, side_effect=True))),
        event_key="event",
        event_from_state=lambda state: state.get("event"),
        ledger=ledger_for(saver),
        plugins=[LangChainCallbackPlugin()],  # takes the callbacks of the node it runs in
    )
    graph: Any = StateGraph(State)
    graph.add_node("agent", node)
    graph.add_edge(START, "agent")
    graph.add_conditional_edges(
        "agent", route_by_statechart(chart, {"awaiting_human": END, "done": END, "error": END})
    )
    return graph.compile(checkpointer=saver)


def main() -> None:
    with LangSmithRecorder(zstd=True) as recorder:
        client = Client(api_url=recorder.url, api_key="none")
        tracer: BaseCallbackHandler = LangChainTracer(client=client, project_name="refunds")
        config = {"callbacks": [tracer], "configurable": {"thread_id": "ticket-7"}}
        graph = app()
        out = graph.invoke({"event": {"type": "START", "prompt": "Refund order 7."}}, config)
        pending = pending_approval(out["xsm"]["context"])
        graph.invoke({"event": approval_event(pending, by="ann")}, config)
        client.flush()
        recorder.wait_for(lambda runs: runs and not recorder.open())
        client.close()
        print(recorder.tree())
        print("runs left open:", recorder.open())


if __name__ == "__main__":
    main()
