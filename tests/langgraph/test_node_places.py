"""`statechart_node` in the places a graph can put it: subgraphs, Send, threads, cancellation."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from langgraph.types import Command, Send, interrupt

from guardchart.agents import FakeModel, agent_logic
from guardchart.langgraph import statechart_node
from guardchart.persistence import InMemoryLedger
from guardchart.runtime import MachineLogic
from tests.langgraph.graphs import (
    COUNTER,
    REFUND,
    Refunds,
    State,
    add,
    compiled,
    from_event,
    loop_chart,
    loop_node,
    loop_router,
    start,
    thread,
)

LOGIC = MachineLogic(actions={"add": add}, guards={"allowed": lambda c, e: True})


def scopes(ledger: Any) -> set[tuple[str, str]]:
    return {(row.slot.scope, row.slot.run) for row in ledger.pending()}


def test_calls_are_filed_under_the_thread_in_a_subgraph_and_a_nested_invocation() -> None:
    ledger = InMemoryLedger()
    node = loop_node([REFUND] * 4, ledger=ledger)
    inner = StateGraph(State)
    inner.add_node("agent", node)
    inner.add_edge(START, "agent")
    outer = compiled(inner.compile())
    outer.invoke({"event": start()}, thread(42))
    assert {scope for scope, _ in scopes(ledger)} == {"42"}
    nested = compiled(lambda state: node({"event": start()}))
    nested.invoke({"event": None}, thread("nested"))
    assert {scope for scope, _ in scopes(ledger)} == {"42", "nested"}


def test_nodes_that_send_starts_side_by_side_have_runs_of_their_own() -> None:
    ledger = InMemoryLedger()
    graph = StateGraph(State)
    graph.add_node("agent", loop_node([REFUND] * 3, ledger=ledger))
    graph.add_conditional_edges(
        START, lambda state: [Send("agent", {"event": start(str(n))}) for n in range(3)], ["agent"]
    )
    # Three snapshots for one last-value entry: what counts here is what the ledger was told.
    app = graph.compile(checkpointer=InMemorySaver())
    with pytest.raises(Exception, match="Can receive only one value"):
        app.invoke({}, thread())
    assert len(scopes(ledger)) == 3


def test_without_a_thread_calls_are_filed_under_the_run() -> None:
    ledger = InMemoryLedger()
    xsm = loop_node([REFUND], ledger=ledger)({"event": start()})["xsm"]
    assert scopes(ledger) == {(xsm["run"], xsm["run"])}


def test_one_node_serves_many_threads_at_once() -> None:
    app = compiled(statechart_node(COUNTER, LOGIC, event_from_state=from_event))

    def count(name: int) -> Any:
        for _ in range(20):
            out = app.invoke({"event": "ADD"}, thread(name))
        return out["xsm"]["context"]["n"]

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(count, range(8))) == [20] * 8


async def test_cancelling_the_graph_stops_the_machine_and_its_service() -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def forever(scope: Any, context: Any, event: Any) -> None:
        begun.set()
        try:
            await asyncio.sleep(3600)
        finally:
            ended.set()

    chart = {"id": "c", "initial": "a", "states": {"a": {"invoke": {"src": "forever"}}}}
    node = statechart_node(
        chart, MachineLogic(services={"forever": forever}), event_from_state=lambda s: None
    )
    task = asyncio.create_task(compiled(node).ainvoke({"event": 1}, thread()))
    await asyncio.wait_for(begun.wait(), 5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.wait_for(ended.wait(), 5)


def test_a_machine_is_not_moved_by_deadlines_once_it_has_been_written() -> None:
    fired = threading.Event()
    chart = {
        "id": "c",
        "initial": "a",
        "states": {"a": {"tags": ["waiting"], "after": {"50": {"actions": "fire"}}}},
    }
    logic = MachineLogic(actions={"fire": lambda c, e: fired.set()})
    node = statechart_node(chart, logic, event_from_state=lambda s: None)
    xsm = node({})["xsm"]
    assert xsm["timers"] and not fired.wait(0.2)
    assert node({"xsm": xsm})["xsm"]["rev"] > xsm["rev"] and fired.is_set()


def test_interrupt_waits_until_what_is_due_has_happened_and_sends_no_stale_event() -> None:
    refunds = Refunds()
    model = FakeModel([REFUND, {"text": "x"}], is_async=False)
    node = statechart_node(
        loop_chart("refund"),
        agent_logic(model, refunds.tools()),
        event_from_state=from_event,
        on_wait="interrupt",
    )
    app = compiled(node, router=loop_router(awaiting_human="agent"))
    out = app.invoke({"event": start()}, thread())
    late = out["xsm"]
    for timer in late["timers"].values():
        timer["due_at"] = 1
    app.update_state(thread(), {"xsm": late}, as_node="__start__")
    out = app.invoke(None, thread())
    assert "__interrupt__" not in out
    assert out["xsm"]["state_ids"] == ["toolLoop.error"] and len(model.calls) == 1


def test_interrupt_rests_where_there_is_nobody_to_ask() -> None:
    node = loop_node([REFUND], on_wait="interrupt")
    xsm = node({"event": start()})["xsm"]
    assert node({"event": start(), "xsm": xsm}) == {}


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_an_interrupt_inside_a_service_reaches_langgraph_and_is_no_error(kind: str) -> None:
    def ask(scope: Any, context: Any, event: Any) -> Any:
        return interrupt("how much?")

    chart = {
        "id": "asks",
        "initial": "idle",
        "context": {"got": None},
        "states": {
            "idle": {"on": {"GO": "asking"}},
            "asking": {
                "invoke": {
                    "src": "ask",
                    "onDone": {"target": "idle", "actions": "keep"},
                    "onError": "broken",
                },
                "after": {"60000": "broken"},
            },
            "broken": {},
        },
    }
    logic = MachineLogic(services={"ask": ask}, actions={"keep": lambda c, e: {"got": e.data}})
    app = compiled(statechart_node(chart, logic, event_from_state=from_event))

    async def run(state: Any) -> Any:
        if kind == "sync":
            return app.invoke(state, thread())
        return await app.ainvoke(state, thread())

    (asked,) = (await run({"event": "GO"}))["__interrupt__"]
    assert asked.value == "how much?"
    out = await run(Command(resume=5))
    assert out["xsm"]["context"]["got"] == 5 and out["xsm"]["value"] == "idle"


def test_a_command_to_the_parent_carries_the_snapshot_along() -> None:
    def leave(view: Any, state: Any) -> Any:
        return Command(graph=Command.PARENT, goto="after", update={"answer": view.context["n"]})

    inner = StateGraph(State)
    inner.add_node(
        "agent",
        statechart_node(COUNTER, LOGIC, event_from_state=from_event, result_to_state=leave),
    )
    inner.add_edge(START, "agent")
    outer = StateGraph(State)
    outer.add_node("sub", inner.compile(), destinations=("after",))
    outer.add_node("after", lambda state: {})
    outer.add_edge(START, "sub")
    outer.add_edge("after", END)
    out = outer.compile().invoke({"event": "ADD"})
    assert out["answer"] == 1 and out["xsm"]["context"]["n"] == 1
