"""Several agents: hand-offs, tools, approvals and budgets of a tree."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from guardchart import Event, Interpreter, SyncInterpreter, create_machine
from guardchart.agents import (
    BudgetPlugin,
    FakeModel,
    approval_event,
    handoff_guard,
    load_chart,
    spawn_agent,
    tool_registry,
)
from guardchart.errors import AgentConfigError
from tests.agents.trees import Desk, Till, pays, search, supervisor_chart, supervisor_logic

ENGINES = pytest.mark.parametrize("engine", ["sync", "async"])
SAME = {task: [pays("ann", 1, id="c1"), {"text": "Done."}] for task in ("one", "two")}


def worker(engine: str, *texts: str, **options: Any) -> Any:
    model = FakeModel([{"text": each} for each in texts], is_async=engine == "async")
    return spawn_agent(None, model, budget={"max_turns": 2}, name="worker", **options)


async def _plan(live: Any, *tasks: str) -> None:
    sent = live.send("PLAN", tasks=list(tasks), wait=True)
    if live.engine == "async":
        await sent
        await asyncio.wait_for(live.idle(), 10)


def _started(engine: str, logic: Any, *tools: str) -> Any:
    kind: Any = Interpreter if engine == "async" else SyncInterpreter
    return kind(create_machine(supervisor_chart(*tools), logic)).start()


def test_hand_offs_pass_for_exact_pairs_only() -> None:
    guard = handoff_guard({"planner": ["worker"]}).guards["handoffAllowed"]
    assert guard({}, Event("HANDOFF", {"from": "planner", "to": "worker"}))
    for source, target in (
        ("worker", "judge"), ("planner", "judge"), ("planner", "Worker"), ("planner ", "worker"),
        (None, "worker"), ("planner", None), (["planner"], "worker"), ("planner", ["worker"]),
    ):  # fmt: skip
        assert not guard({}, Event("HANDOFF", {"from": source, "to": target}))
    assert not guard({}, Event("HANDOFF"))


@ENGINES
async def test_a_forged_hand_off_spawns_nobody(engine: str) -> None:
    live = _started(engine, supervisor_logic(worker(engine, "A")))
    for forged in ({"from": "worker", "to": "judge"}, {"to": "worker"}, {"from": "planner"}):
        receipt = live.send({"type": "HANDOFF", "task": "x", **forged}, wait=True)
        receipt = await receipt if engine == "async" else receipt
        assert receipt.denied and not live.actors
    live.stop()


@ENGINES
async def test_with_verified_senders_the_machine_says_who_hands_off(engine: str) -> None:
    logic = supervisor_logic(worker(engine, "A", "B"), sender="verified")
    live = _started(engine, logic)
    forged = {"type": "HANDOFF", "from": "planner", "to": "worker", "task": "x"}
    receipt = live.send(forged, wait=True)
    receipt = await receipt if engine == "async" else receipt
    assert receipt.denied and not live.actors
    await _plan(live, "a", "b")
    assert sorted(live.context["results"]) == ["A", "B"]
    live.stop()


def test_a_sub_agent_holds_no_tool_that_its_parent_lacks() -> None:
    with pytest.raises(AgentConfigError, match="not in the parent's allow-list"):
        worker("sync", tools=tool_registry(search), parent_tools=["fetch"])


@ENGINES
@pytest.mark.parametrize("listed", [["fetch"], []], ids=["another list", "no list"])
async def test_a_sub_agent_holds_no_tool_that_its_spawning_state_lacks(
    engine: str, listed: list[str]
) -> None:
    logic = supervisor_logic(worker(engine, "A", tools=tool_registry(search)))
    live = _started(engine, logic, *listed)
    await _plan(live, "a")
    assert live.status == "error" and "not in the parent's allow-list" in str(live.error)
    assert not live.actors


@pytest.mark.gate
@ENGINES
async def test_a_sub_agent_runs_no_tool_that_its_own_chart_does_not_list(engine: str) -> None:
    chart = load_chart()
    for state in ("awaiting_model", "awaiting_tool"):
        chart["states"][state]["meta"]["tools"] = ["search"]
    till = Till()
    model = FakeModel([pays("ann", 1)], is_async=engine == "async")
    spawning = spawn_agent(chart, model, till.registry(), budget={"max_turns": 2}, name="worker")
    live = _started(engine, supervisor_logic(spawning), "pay", "search")
    await _plan(live, "a")
    assert till.paid == [] and live.context["failures"][0]["kind"] == "tool_denied"
    live.stop()


@ENGINES
async def test_a_supervisor_whose_worker_waits_for_approval_can_be_approved(engine: str) -> None:
    desk = Desk(engine, SAME)
    await desk.start()
    await desk.plan("one", "two")
    assert [each["agent_id"] for each in desk.pending] == [
        "supervisor:worker-1", "supervisor:worker-2",
    ]  # fmt: skip
    for each in desk.pending:
        assert (await desk.send(approval_event([each]))).status == "taken"
    assert desk.till.paid == [("ann", 1)] * 2 and desk.state == "reporting"
    desk.stop()


@pytest.mark.gate
@ENGINES
async def test_one_agents_approval_counts_for_no_other_agent(engine: str) -> None:
    desk = Desk(engine, SAME)
    live = await desk.start()
    await desk.plan("one", "two")
    first, second = sorted(desk.pending, key=lambda each: each["id"] != "c1")
    assert desk.till.paid == [] and first["digest"] == second["digest"]
    yes = approval_event([first])
    for wrong in (
        {**yes, "agent_id": second["agent_id"]},
        {**yes, "agent_id": "supervisor"},
        {**yes, "agent_id": "supervisor:worker-3"},
    ):
        assert (await desk.send(wrong)).status != "taken" and desk.till.paid == []
    live.post(yes)  # from inside, as an agent would send it
    assert desk.till.paid == []
    await desk.send(yes)
    await desk.send(yes)
    assert desk.till.paid == [("ann", 1)] and desk.pending == [second]
    desk.stop()


@ENGINES
async def test_an_agents_exhausted_budget_ends_that_agent_alone(engine: str) -> None:
    look = {"tool": "search", "args": {"query": "x"}}
    scripts = {"long": [look] * 5, "short": [{"text": "Short."}]}
    desk = Desk(engine, scripts, budget={"max_turns": 2})
    await desk.start()
    await desk.plan("long", "short")
    assert desk.context["results"] == ["Short."] and desk.state == "reporting"
    assert desk.context["failures"] == [{"kind": "budget", "message": "turn limit reached"}]
    desk.stop()


@ENGINES
async def test_agents_count_in_the_budget_of_the_tree_which_stops_further_ones(
    engine: str,
) -> None:
    answer = {"text": "A", "usage": {"input_tokens": 5, "output_tokens": 5}}
    desk = Desk(engine, {each: [answer] for each in ("a", "b")})
    live = await desk.start(plugins=[BudgetPlugin(max_total_tokens=5)])
    hand = {"type": "HANDOFF", "from": "planner", "to": "worker"}
    await desk.send({**hand, "task": "a"})
    assert desk.context["results"] == ["A"] and desk.context["budget_exceeded"] is True
    assert desk.context["total_usage"]["input_tokens"] == 5
    await desk.send({**hand, "task": "b"})
    assert desk.context["total_usage"]["turns"] == 1 and not live.actors
    desk.stop()


@ENGINES
async def test_an_agent_that_breaks_is_reported_and_breaks_nobody_else(engine: str) -> None:
    desk = Desk(engine, {"good": [{"text": "Good."}], "bad": [{"text": "Bad."}]})
    agent = desk.machine.logic.services["worker"]
    store = agent.logic.actions["storeResult"]

    def breaking(context: Any, event: Any) -> Any:
        if context["task"] == "bad":
            raise ZeroDivisionError("secret")
        return store(context, event)

    logic = agent.logic.merge(type(agent.logic)(actions={"storeResult": breaking}))
    desk.machine.logic.services["worker"] = agent.with_logic(logic)
    await desk.start()
    await desk.plan("good", "bad")
    assert desk.state == "reporting" and desk.context["results"] == ["Good."]
    assert desk.context["failures"] == [{"kind": "machine", "message": "ZeroDivisionError"}]
    desk.stop()
