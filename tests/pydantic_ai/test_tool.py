"""A statechart as a tool of an outer agent."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from pydantic_ai import Agent
from pydantic_ai.tools import DeferredToolRequests, DeferredToolResults, ToolApproved

from guardchart import create_machine
from guardchart.agents import (
    TOOL_LOOP,
    FakeModel,
    agent_logic,
    run_agent,
    run_agent_sync,
    tool,
    tool_registry,
)
from guardchart.errors import AgentConfigError, NotSupportedError
from guardchart.persistence import MemoryStore
from guardchart.pydantic_ai import StatechartGuard, agent_tool_from_machine
from tests.pydantic_ai.agents import Script, call, results, session


def inner(did: list[Any], *script: Any) -> Any:
    def refund(order: int) -> str:
        did.append(order)
        return "refunded"

    model = FakeModel(
        list(script) or [{"tool": "refund", "args": {"order": 7}}, {"text": "It is done."}]
    )
    registry = tool_registry(tool(refund, side_effect=True))
    return create_machine(TOOL_LOOP, agent_logic(model, registry))


def outer(machine: Any, *script: Any, store: Any = None, **options: Any) -> Agent[Any, Any]:
    return Agent(
        Script(*(script or (call("run_statechart", {"prompt": "refund order 7"}), "done"))).model,
        tools=[agent_tool_from_machine(machine, store=store)],
        output_type=[str, DeferredToolRequests],
        **options,
    )


async def test_it_gives_state_output_and_error_and_nothing_of_the_conversation() -> None:
    made = agent_tool_from_machine(inner([], {"text": "It is done."}))
    assert await made.function("refund order 7") == {
        "state": "toolLoop.done",
        "output": "It is done.",
        "error": None,
    }


async def test_an_outer_agent_gets_the_result_of_the_machine() -> None:
    agent = outer(inner([], {"text": "It is done."}))
    result = await agent.run("hello")
    outcome, content = results(result.all_messages())["c1"]
    assert outcome == "success" and content["output"] == "It is done."


async def test_a_failed_machine_says_why() -> None:
    made = agent_tool_from_machine(inner([], {"tool": "unknown"}))
    found = await made.function("go")
    assert found["state"] == "toolLoop.error" and found["error"]["kind"] == "tool_denied"


async def test_without_a_store_a_waiting_machine_is_reported_as_it_stands() -> None:
    did: list[Any] = []
    result = await outer(inner(did)).run("hello")
    _, content = results(result.all_messages())["c1"]
    assert content["state"] == "toolLoop.awaiting_human" and did == []
    assert content["error"]["kind"] == "waiting"


@pytest.mark.parametrize("guarded", [False, True])
@pytest.mark.parametrize("yes", [True, False])
async def test_a_waiting_machine_pauses_the_outer_run_and_resumes_it(
    yes: bool, guarded: bool
) -> None:
    did: list[Any] = []
    store = MemoryStore()
    machine = inner(did)
    options: dict[str, Any] = {}
    if guarded:
        chart = {
            "id": "m",
            "initial": "a",
            "states": {"a": {"meta": {"tools": ["run_statechart"]}}},
        }
        options["capabilities"] = [StatechartGuard(session(chart))]
    agent = outer(machine, store=store, **options)
    first = await agent.run("hello")
    shown = first.output.metadata["c1"]["guardchart"]
    assert shown["key"] == f"{first.conversation_id}:c1" and did == []
    assert shown["pending"][0]["arguments"] == {"order": 7}
    answer = shown["pending"] if yes else False
    await run_agent(machine, store=store, key=shown["key"], approve=answer)
    assert did == ([7] if yes else [])
    result = await agent.run(
        message_history=first.all_messages(),
        deferred_tool_results=DeferredToolResults(approvals={"c1": ToolApproved()}),
    )
    _, content = results(result.all_messages())["c1"]
    # After a rejection the inner model is told so, and ends by its own words.
    assert content == {"state": "toolLoop.done", "output": "It is done.", "error": None}
    assert did == ([7] if yes else [])


async def test_an_approval_of_the_outer_call_alone_runs_nothing_inside() -> None:
    did: list[Any] = []
    agent = outer(inner(did), store=MemoryStore())
    first = await agent.run("hello")
    again = await agent.run(
        message_history=first.all_messages(),
        deferred_tool_results=DeferredToolResults(
            approvals={"c1": ToolApproved(override_args={"prompt": "refund everything"})}
        ),
    )
    assert isinstance(again.output, DeferredToolRequests) and did == []


async def test_a_function_can_run_the_machine() -> None:
    async def runner(prompt: str) -> Any:
        return SimpleNamespace(final_state="a", output=prompt.upper(), error=None, waiting=False)

    made = agent_tool_from_machine(runner, name="shout", description="Shout.")
    assert made.name == "shout" and made.description == "Shout."
    assert await made.function("hi") == {"state": "a", "output": "HI", "error": None}


async def test_a_sync_runner_inside_a_running_loop_says_what_to_do() -> None:
    machine = create_machine(TOOL_LOOP, agent_logic(FakeModel([{"text": "x"}], is_async=False)))
    made = agent_tool_from_machine(lambda prompt: run_agent_sync(machine, prompt=prompt))
    with pytest.raises(NotSupportedError, match="await run_agent"):
        await made.function("go")


async def test_run_sync_of_a_guarded_agent_inside_a_running_loop_says_what_to_do() -> None:
    agent = Agent(Script("done").model, capabilities=[StatechartGuard(session())])
    with pytest.raises(RuntimeError, match=r"run_sync|await|running"):
        agent.run_sync("hello")


def test_what_is_no_machine_is_refused() -> None:
    with pytest.raises(AgentConfigError, match="machine or a function"):
        agent_tool_from_machine("desk")  # type: ignore[arg-type]
