"""One trace for many threads of a graph: every visit its own agent, no record lost or mixed."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypedDict

import pytest
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from guardchart.agents import (
    AgentTracePlugin,
    ModelResponse,
    ToolCall,
    Usage,
    agent_logic,
    load_chart,
    pending_approval,
    tool,
    tool_registry,
)
from guardchart.langgraph import statechart_node

THREADS = 8


class State(TypedDict, total=False):
    xsm: dict
    event: dict


def refund(order_id: int) -> str:
    """Refund an order."""
    return "refunded"


def app(trace: AgentTracePlugin, *, side_effect: bool = False) -> Any:
    """A graph of one node; the model asks for one refund, then says so."""
    made = threading.local()

    def model(messages: Any, tools: Any) -> ModelResponse:
        used = Usage(10, 2, 0.01)
        if messages[-1]["role"] == "tool":
            return ModelResponse("Refunded.", usage=used)
        made.number = getattr(made, "number", 0) + 1
        id_ = f"c{threading.get_ident()}-{made.number}"
        return ModelResponse(None, [ToolCall(id_, "refund", {"order_id": 7})], used)

    registry = tool_registry(tool(refund, side_effect=side_effect))
    node = statechart_node(
        load_chart(),
        agent_logic(model, registry, tracer=trace),
        event_from_state=lambda state: state.get("event"),
        plugins=[trace],
    )
    graph = StateGraph(State)
    graph.add_node("agent", node)
    graph.add_edge(START, "agent")
    graph.add_edge("agent", END)
    return graph.compile(checkpointer=InMemorySaver())


def config(thread: Any) -> Any:
    return {"configurable": {"thread_id": f"t{thread}"}}


ASK = {"event": {"type": "START", "prompt": "refund order 7"}}


def test_threads_of_a_graph_share_a_trace_and_are_told_apart() -> None:
    trace = AgentTracePlugin()
    graph = app(trace)
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(lambda n: graph.invoke(ASK, config(n)), range(THREADS * 4)))
    by_thread: dict[str, list[str]] = {}
    for each in trace.records:
        by_thread.setdefault(each["gen_ai.conversation.id"], []).append(each["kind"])
    assert len(by_thread) == THREADS * 4
    for kinds in by_thread.values():
        assert kinds.count("model_call") == 2 and kinds.count("tool_call") == 1
        assert kinds[0] == "agent_start" and kinds[-1] == "agent_end"
    assert len({each["trace_id"] for each in trace.records}) == THREADS * 4
    assert trace.totals()["total"]["turns"] == 2 * THREADS * 4
    assert not trace._agents


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_question_and_its_answer_are_two_visits_of_one_trace(is_async: bool) -> None:
    trace = AgentTracePlugin()
    graph = app(trace, side_effect=True)

    async def visit(event: Any) -> Any:
        if is_async:
            return await graph.ainvoke(event, config(1))
        return graph.invoke(event, config(1))

    out = await visit(ASK)
    (question,) = pending_approval(out["xsm"]["context"])
    answer = {"type": "HUMAN_APPROVED", "call_ids": [question["id"]]}
    out = await visit({"event": answer})
    assert out["xsm"]["value"] == "done"
    assert len({each["trace_id"] for each in trace.records}) == 1
    ends = [each for each in trace.records if each["kind"] == "agent_end"]
    assert [each["state"] for each in ends] == [
        ["toolLoop.awaiting_human"],
        ["toolLoop.done"],
    ]
    (ran,) = [each for each in trace.records if each["kind"] == "tool_call"]
    assert ran["entered"] is True


def test_spans_of_a_visit_lie_below_the_span_of_the_request() -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    graph = app(AgentTracePlugin(on_span="otel", tracer_provider=provider))
    with provider.get_tracer("web").start_as_current_span("POST /tickets") as request:
        graph.invoke(ASK, config(1))
    spans = {each.name: each for each in exporter.get_finished_spans()}
    agent = spans["invoke_agent toolLoop"]
    assert agent.parent.span_id == request.get_span_context().span_id
    assert spans["execute_tool refund"].parent.span_id == agent.context.span_id
    assert agent.attributes["gen_ai.conversation.id"] == "t1"
    provider.shutdown()
