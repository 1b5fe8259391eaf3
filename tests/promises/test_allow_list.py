"""An unlisted tool never runs, and a model is never told of it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from guardchart import MachineLogic, SyncInterpreter, create_machine
from guardchart.agents import FakeModel, agent_logic, run_agent, tool_registry
from tests.promises.bank import AT_ONCE, SAY, THREAD, Bank, graph, listed_chart, start

WIRE = {"tool": "wire", "args": {"cents": 5}}
LOOKUP = {"tool": "lookup", "args": {"order_id": 1}}


@pytest.mark.gate
def test_an_unlisted_tool_does_not_run_whatever_a_tool_result_says() -> None:
    bank = Bank()
    result = bank.run([LOOKUP, WIRE, SAY])
    assert result.error == {
        "kind": "tool_denied",
        "message": "tool(s) ['wire'] not allowed here",
    }
    assert ("wire", 5) not in bank.entered


@pytest.mark.gate
def test_an_unlisted_tool_in_a_parallel_batch_keeps_the_whole_turn_from_running() -> None:
    bank = Bank()
    result = bank.run([{"tool_calls": [LOOKUP, WIRE, LOOKUP]}, SAY])
    assert result.error is not None and result.error["kind"] == "tool_denied"
    assert bank.entered == []


@pytest.mark.gate
def test_an_unlisted_tool_does_not_run_in_a_langgraph_node() -> None:
    bank = Bank()
    out = graph(bank, [WIRE, SAY]).invoke(start(), THREAD)
    assert out["xsm"]["context"]["error"]["kind"] == "tool_denied"
    assert bank.entered == []


@pytest.mark.gate
def test_an_unlisted_tool_does_not_run_on_the_async_engine() -> None:
    bank = Bank()
    logic = agent_logic(FakeModel([WIRE, SAY]), bank.registry(), retry=AT_ONCE)
    machine = create_machine(listed_chart(), logic)
    result = asyncio.run(run_agent(machine, prompt="Please help."))
    assert result.error is not None and result.error["kind"] == "tool_denied"
    assert bank.entered == []


@pytest.mark.gate
def test_a_chart_without_its_guard_still_runs_no_unlisted_tool() -> None:
    chart = listed_chart()
    chart["states"]["awaiting_model"]["invoke"]["onDone"].pop(0)
    bank = Bank()
    logic = agent_logic(FakeModel([WIRE, SAY], is_async=False), bank.registry(), retry=AT_ONCE)
    interpreter = SyncInterpreter(create_machine(chart, logic)).start()
    interpreter.send("START", prompt="Please help.")
    assert ("wire", 5) not in bank.entered
    interpreter.stop()


@pytest.mark.gate
def test_a_state_that_changes_between_check_and_run_keeps_the_tool_from_running() -> None:
    from guardchart.gate import Facts, ToolCall, as_allowed, check, execute

    bank = Bank()
    tools, state = bank.registry(), ["lookup"]

    def look() -> Facts:
        return Facts(tools, as_allowed(state))

    call = ToolCall("c1", "lookup", {"order_id": 1})
    assert not check(call, look()).needs_row
    state.clear()
    assert execute(call, look).status == "denied"
    assert bank.entered == []


@pytest.mark.gate
def test_a_parallel_regions_tools_do_not_leak_into_a_sibling() -> None:
    bank = Bank()

    def region(src: str, tools: list[str]) -> dict[str, Any]:
        loop = listed_chart(*tools)
        states = loop["states"]
        states["idle"] = {"on": {"GO": "awaiting_model"}}
        states["awaiting_model"]["invoke"]["id"] = f"{src}_model"
        states["awaiting_tool"]["invoke"]["id"] = f"{src}_tools"
        return {"initial": "idle", "states": states}

    chart = {
        "id": "two",
        "type": "parallel",
        "context": listed_chart()["context"],
        "states": {"left": region("left", ["lookup"]), "right": region("right", ["wire"])},
    }
    chart["states"]["right"]["states"] = {"idle": {"meta": {"tools": ["wire"]}}}
    logic = agent_logic(FakeModel([WIRE, SAY], is_async=False), bank.registry(), retry=AT_ONCE)
    interpreter = SyncInterpreter(create_machine(chart, logic)).start()
    interpreter.send("GO")
    assert bank.entered == []
    assert interpreter.context["error"]["kind"] == "tool_denied"
    interpreter.stop()


def test_the_model_is_told_of_listed_tools_only_not_even_by_an_error_text() -> None:
    bank = Bank()
    model = FakeModel([WIRE, {"tool": "nope", "args": {}}, SAY], is_async=False)
    logic = agent_logic(model, bank.registry(), on_denied="retry", max_denied=5, retry=AT_ONCE)
    interpreter = SyncInterpreter(create_machine(listed_chart("lookup"), logic)).start()
    interpreter.send("START", prompt="Please help.")
    assert interpreter.context["result"] == "Done."
    for call in model.calls:
        assert call["tools"] == ["lookup"]
    texts = [each["content"] for each in interpreter.context["messages"] if each["role"] == "tool"]
    assert len(set(texts)) == 1, "an unlisted and an unregistered name are answered alike"
    for hidden in ("refund", "transfer", "wire"):
        assert hidden not in texts[0]


def test_a_service_of_another_name_gets_no_tools_by_accident() -> None:
    bank = Bank()
    model = FakeModel([LOOKUP], is_async=False)
    merged = agent_logic(model, bank.registry()).merge(MachineLogic())
    assert merged.services["callModel"](None, {"messages": []}, None).tool_calls
    assert model.calls[0]["tools"] == []
    assert bank.entered == []
    assert tool_registry().names == ()
