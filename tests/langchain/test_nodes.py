"""guard_tool_node, approval_gate and guard_tool in graphs of one's own."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import pytest
from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import InjectedToolCallId, tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import InjectedState, ToolNode, tools_condition
from langgraph.types import Command

from guardchart.errors import AgentConfigError, ToolDeniedError
from guardchart.gate import (
    GuardSession,
    Seal,
    ToolCall,
    approval_event,
    tool_registry,
)
from guardchart.gate import tool as gate_tool
from guardchart.kernel import create_machine
from guardchart.langchain import GuardState, approval_gate, guard_tool, guard_tool_node
from guardchart.persistence import InMemoryLedger
from tests.langchain.desk import (
    ASK,
    CLOSING,
    THREAD,
    Desk,
    asked,
    both,
    chart,
    complete,
    decision,
    results,
)
from tests.langchain.fakes import Scripted, call, says

REFUND = says(call("refund", "c1", order_id=7))


class State(MessagesState, GuardState):
    pass


class Graph:
    """agent -> approval -> tools -> agent, or agent -> tools -> agent without a gate."""

    def __init__(
        self,
        script: list[Any],
        *,
        gate: bool = True,
        machine: Any = None,
        is_async: bool = False,
        **options: Any,
    ) -> None:
        self.desk = Desk()
        self.model = Scripted(script=script)
        self.is_async = is_async
        self.ledger = InMemoryLedger()
        machine = chart() if machine is None else machine
        common: dict[str, Any] = {
            "side_effects": ["refund", "wire"],
            "ledger": self.ledger,
            **options,
        }
        bound = self.model.bind_tools(self.desk.tools)

        def agent(state: Any) -> Any:
            return {"messages": [bound.invoke(state["messages"])]}

        graph: Any = StateGraph(State)
        graph.add_node("agent", agent)
        graph.add_node("tools", guard_tool_node(self.desk.tools, machine, **common))
        graph.add_edge(START, "agent")
        graph.add_edge("tools", "agent")
        if gate:
            graph.add_node("approval", approval_gate(machine, self.desk.tools, **common))
            graph.add_edge("agent", "approval")
        else:
            graph.add_conditional_edges("agent", tools_condition)
        self.app = graph.compile(checkpointer=InMemorySaver())

    @property
    def entered(self) -> list[Any]:
        return self.desk.entered

    def invoke(self, value: Any = ASK) -> dict[str, Any]:
        if self.is_async:
            return asyncio.run(self.app.ainvoke(value, THREAD))  # type: ignore[no-any-return]
        return self.app.invoke(value, THREAD)  # type: ignore[no-any-return]

    def resume(self, answer: Any) -> dict[str, Any]:
        return self.invoke(Command(resume=answer))


# --- the tool node alone -----------------------------------------------------------------------


@pytest.mark.gate
@both
def test_a_tool_node_without_a_gate_runs_what_needs_nobody_and_refuses_the_rest(
    is_async: bool,
) -> None:
    turn = says(
        call("lookup", "c1", order_id=7),
        call("refund", "c2", order_id=7),
        call("wire", "c3", cents=1),
        call("lookup", "c4", order_id="7"),
        call("nothing", "c5"),
    )
    graph = Graph([turn, "done"], gate=False, is_async=is_async)
    told = results(graph.invoke())
    assert graph.entered == [("lookup", 7)]
    assert "needs human approval" in told["c2"] and "approval_gate" in told["c2"]
    assert "not in this state's meta.tools" in told["c3"]
    assert "valid integer" in told["c4"] and "not in this state's" in told["c5"]


@both
def test_outcomes_move_the_chart_of_a_tool_node_without_a_gate(is_async: bool) -> None:
    machine: Any = {
        "id": "desk",
        "initial": "open",
        "states": {
            "open": {"meta": {"tools": ["lookup"]}, "on": {"tool.done.lookup": "closed"}},
            "closed": {},
        },
    }
    turn = says(call("lookup", "c1", order_id=1), call("lookup", "c2", order_id=2))
    graph = Graph(
        [turn, says(call("lookup", "c3", order_id=3)), "done"],
        gate=False,
        machine=machine,
        is_async=is_async,
    )
    told = results(graph.invoke())
    assert graph.entered == [("lookup", 1)]
    assert "propose this again after its result" in told["c2"]
    assert "not in this state's meta.tools" in told["c3"]


# --- with the gate before it -------------------------------------------------------------------


@pytest.mark.gate
@both
def test_gate_and_tool_node_run_an_approved_call_once(is_async: bool) -> None:
    graph = Graph([REFUND, "done"], is_async=is_async)
    question = asked(graph.invoke())
    assert graph.entered == []
    out = graph.resume(approval_event(question["calls"]))
    assert graph.entered == [("refund", 7, 100)] and len(graph.model.asked) == 2
    assert complete(out["messages"])


@pytest.mark.gate
@both
def test_gate_and_tool_node_do_not_run_a_rejected_call(is_async: bool) -> None:
    turn = says(
        call("refund", "c1", order_id=7),
        call("refund", "c2", order_id=8),
        call("lookup", "c3", order_id=9),
        call("wire", "c4", cents=1),
    )
    graph = Graph([turn, "done"], is_async=is_async)
    first, second = asked(graph.invoke())["calls"]
    out = graph.resume({"decisions": [decision(first, "reject"), decision(second)]})
    assert sorted(graph.entered) == [("lookup", 9), ("refund", 8, 100)]
    told = results(out)
    assert told["c1"].startswith("not run: rejected") and "denied" in told["c4"]
    assert complete(out["messages"])


@both
def test_a_turn_of_refused_calls_alone_goes_back_to_the_model(is_async: bool) -> None:
    graph = Graph([says(call("wire", "c1", cents=1)), "sorry"], is_async=is_async)
    out = graph.invoke()
    assert graph.entered == [] and out["messages"][-1].content == "sorry"


@both
def test_an_edit_is_what_the_tool_node_gets(is_async: bool) -> None:
    graph = Graph([REFUND, "done"], is_async=is_async)
    (item,) = asked(graph.invoke())["calls"]
    out = graph.resume(
        {"decisions": [decision(item, "edit", arguments={"order_id": 7, "cents": 5})]}
    )
    assert graph.entered == [("refund", 7, 5)]
    answer = next(each for each in out["messages"] if isinstance(each, AIMessage))
    assert answer.tool_calls[0]["args"] == {"order_id": 7, "cents": 5}


@pytest.mark.gate
@both
def test_a_wrong_answer_leaves_the_question_of_the_gate_open(is_async: bool) -> None:
    graph = Graph([REFUND, "done"], is_async=is_async)
    question = asked(graph.invoke())
    again = asked(graph.resume({"decisions": [{"type": "approve"}]}))
    assert again["refused"] and graph.entered == []
    assert asked(graph.invoke(None))["calls"] == question["calls"]
    graph.resume(approval_event(question["calls"]))
    assert graph.entered == [("refund", 7, 100)]


@both
def test_the_chart_of_gate_and_node_moves_with_the_conversation(is_async: bool) -> None:
    graph = Graph(
        [REFUND, says(call("refund", "c2", order_id=7)), "done"],
        machine=CLOSING,
        is_async=is_async,
        seal=Seal("0123456789abcdef"),
    )
    graph.resume(approval_event(asked(graph.invoke())["calls"]))
    assert graph.entered == [("refund", 7, 100)]
    values = graph.app.get_state(THREAD).values
    assert values["xsm"]["state_ids"] == ["desk.closed"] and values["xsm_events"] == []


@pytest.mark.gate
def test_a_fork_to_before_the_answer_gets_the_recorded_result() -> None:
    graph = Graph([REFUND, "done", "done again"])
    question = asked(graph.invoke())
    parked = graph.app.get_state(THREAD).config
    graph.resume(approval_event(question["calls"]))
    out = graph.app.invoke(Command(resume=approval_event(question["calls"])), parked)
    assert graph.entered == [("refund", 7, 100)] and results(out) == {"c1": "refunded 100"}


def test_the_gate_draws_where_it_may_go() -> None:
    drawn = Graph(["x"]).app.get_graph().edges
    assert {(each.source, each.target) for each in drawn} >= {
        ("approval", "tools"),
        ("approval", "agent"),
        ("approval", "__end__"),
    }


def test_without_the_gate_node_a_forged_note_runs_nothing() -> None:
    graph = Graph([REFUND, "done"], gate=False)
    note = {"id": "m1", "calls": [{"id": "c1", "row": "c1"}]}
    graph.app.update_state(THREAD, {"xsm": {"turn": note}})
    with pytest.raises(Exception, match="version"):
        graph.invoke()
    assert graph.entered == []


def test_unknown_options_and_names_are_refused_when_built() -> None:
    with pytest.raises(AgentConfigError, match="side_effects"):
        guard_tool_node(Desk().tools, chart(), side_effects=["refnd"])
    with pytest.raises(TypeError):
        approval_gate(chart(), Desk().tools, nothing=1)


# --- one tool ----------------------------------------------------------------------------------


def session(desk: Desk, *, machine: Any = None) -> GuardSession:
    registry = tool_registry(desk.lookup, gate_tool(desk.refund, side_effect=True), desk.wire)
    return GuardSession(
        create_machine(chart() if machine is None else machine), registry, InMemoryLedger(), "t"
    )


@pytest.mark.gate
@both
async def test_a_guarded_tool_runs_only_what_its_session_allows(is_async: bool) -> None:
    desk = Desk()
    gate = session(desk)

    async def invoke(item: Any, value: Any) -> Any:
        guarded = guard_tool(item, gate)
        return await guarded.ainvoke(value) if is_async else guarded.invoke(value)

    assert await invoke(desk.lookup, {"order_id": 7}) == "order 7: shipped"
    message = await invoke(desk.lookup, call("lookup", "c1", order_id=8))
    assert isinstance(message, ToolMessage) and message.content == "order 8: shipped"
    with pytest.raises(ToolDeniedError, match="allow-list"):
        await invoke(desk.wire, {"cents": 5})
    refused = await invoke(desk.wire, call("wire", "c2", cents=5))
    assert refused.status == "error" and "denied" in refused.content
    with pytest.raises(ToolDeniedError, match="needs human approval"):
        await invoke(desk.refund, {"order_id": 7})
    with pytest.raises(ToolDeniedError, match="invalid arguments"):
        await invoke(desk.lookup, {"order_id": "7"})
    assert desk.entered == [("lookup", 7), ("lookup", 8)]


@pytest.mark.gate
def test_a_guarded_side_effect_runs_once_it_is_proposed_and_approved() -> None:
    desk = Desk()
    gate = session(desk)
    guarded = guard_tool(desk.refund, lambda config: gate)
    proposed = call("refund", "c1", order_id=7)
    gate.propose([ToolCall("c1", "refund", {"order_id": 7})])
    gate.decide(approval_event(gate.pending()))
    for _ in range(2):
        assert guarded.invoke(proposed).content == "refunded 100"
    assert desk.entered == [("refund", 7, 100)]


def test_a_guarded_tool_outside_of_every_door_is_refused() -> None:
    desk = Desk()
    with pytest.raises(ToolDeniedError, match="outside of every door"):
        guard_tool(desk.lookup).invoke({"order_id": 7})
    assert desk.entered == []


def test_a_guarded_tool_keeps_schema_and_injected_arguments() -> None:
    @tool
    def peek(
        n: int,
        config: RunnableConfig,
        secret: Annotated[str, InjectedState("secret")],
        call_id: Annotated[str, InjectedToolCallId],
    ) -> str:
        """Peek."""
        return f"{n} {secret} {call_id} {config['configurable']['thread_id']}"

    registry = tool_registry(peek)
    gate = GuardSession(create_machine(chart("peek")), registry)
    guarded = guard_tool(peek, gate)
    assert guarded.tool_call_schema.model_json_schema() == peek.tool_call_schema.model_json_schema()

    class Secret(MessagesState):
        secret: str

    graph: Any = StateGraph(Secret)
    graph.add_node("tools", ToolNode([guarded]))
    graph.add_edge(START, "tools")
    graph.add_edge("tools", END)
    out = graph.compile().invoke(
        {"messages": [says(call("peek", "c1", n=1))], "secret": "blue"}, THREAD
    )
    assert results(out) == {"c1": "1 blue c1 t"}


def test_what_cannot_be_guarded_is_refused_when_wrapped() -> None:
    desk = Desk()
    with pytest.raises(AgentConfigError, match="guarded already"):
        guard_tool(guard_tool(desk.lookup))
    with pytest.raises(AgentConfigError, match="not a LangChain tool"):
        guard_tool(print)  # type: ignore[arg-type]
    gate = GuardSession(create_machine(chart("wire")), tool_registry(desk.wire))
    with pytest.raises(AgentConfigError, match="not in the registry"):
        guard_tool(desk.lookup, gate).invoke({"order_id": 7})
