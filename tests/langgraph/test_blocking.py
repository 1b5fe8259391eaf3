"""Under ``langgraph dev`` a call that blocks the event loop is an error; ours make none."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver

from guardchart.agents import FakeModel, agent_logic, approval_event
from guardchart.gate import Seal
from guardchart.langgraph import (
    apending_approval,
    aresume_pending,
    ledger_for,
    statechart_graph,
    statechart_node,
)
from guardchart.persistence import SQLiteLedger
from tests.langgraph.graphs import REFUND, Refunds, compiled, from_event, loop_chart, start, thread

blockbuster = pytest.importorskip("blockbuster", reason="a dependency of development")

LOOKUP = {"tool": "lookup", "args": {"order_id": 42}}
SAY = {"text": "Done."}


@pytest.fixture
def no_blocking() -> Iterator[None]:
    """Blocking calls on a loop raise, as the server in development has it."""
    guard = blockbuster.BlockBuster()
    # What the server leaves out as well: locks are held for moments only.
    guard.functions.pop("threading.Lock.acquire").deactivate()
    guard.activate()
    try:
        yield
    finally:
        guard.deactivate()


async def test_a_call_that_blocks_the_loop_is_seen(no_blocking: None) -> None:
    with pytest.raises(blockbuster.BlockingError):
        time.sleep(0.001)


async def asked_and_approved(graph: Any) -> Any:
    await graph.ainvoke({"event": start()}, thread())
    calls = await apending_approval(graph, thread())
    return await aresume_pending(graph, thread(), [{**c, "decision": "approve"} for c in calls])


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("kept", ["memory", "file"])
async def test_a_compiled_chart_blocks_no_loop(
    is_async: bool, kept: str, tmp_path: Path, no_blocking: None
) -> None:
    refunds = Refunds()
    logic = agent_logic(FakeModel([LOOKUP, REFUND, SAY], is_async=is_async), refunds.tools())
    options: dict[str, Any] = {"messages_key": "messages", "seal": Seal("0123456789abcdef")}
    chart = loop_chart("lookup", "refund")
    if kept == "memory":
        graph = statechart_graph(chart, logic, checkpointer=InMemorySaver(), **options)
        out = await asked_and_approved(graph)
    else:
        async with AsyncSqliteSaver.from_conn_string(str(tmp_path / "app.sqlite")) as saver:
            graph = statechart_graph(
                chart, logic, checkpointer=saver, ledger=ledger_for(saver), **options
            )
            out = await asked_and_approved(graph)
    assert refunds.done == [(7, 500)] and out["messages"][-1].content == "Done."


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("kept", ["memory", "file"])
async def test_a_node_blocks_no_loop(
    is_async: bool, kept: str, tmp_path: Path, no_blocking: None
) -> None:
    refunds = Refunds()
    ledger = None
    if kept == "file":
        ledger = await asyncio.to_thread(SQLiteLedger, tmp_path / "ledger.sqlite")
    node = statechart_node(
        loop_chart("lookup", "refund"),
        agent_logic(FakeModel([LOOKUP, REFUND, SAY], is_async=is_async), refunds.tools()),
        event_from_state=from_event,
        event_key="event",
        ledger=ledger,
    )
    graph = compiled(node)
    out = await graph.ainvoke({"event": start()}, thread())
    calls = out["xsm"]["context"]["pending_tool_calls"]
    out = await graph.ainvoke({"event": approval_event(calls)}, thread())
    assert refunds.done == [(7, 500)] and out["xsm"]["context"]["result"] == "Done."
