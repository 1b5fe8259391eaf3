"""What an operator should be alerted by is visible: in the result, in the trace, or both.

Each test is a row of the table of signals in docs/tracing.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from guardchart import MachineLogic, SimulatedClock, SyncInterpreter, create_machine
from guardchart.agents import (
    AgentTracePlugin,
    BudgetPlugin,
    FakeModel,
    RetryPolicy,
    agent_logic,
    run_agent_sync,
    spawn_agent,
    tool_registry,
)
from guardchart.persistence import InMemoryLedger, MemoryStore, SQLiteStore
from tests.agents.loops import AT_ONCE, Bank, Loops, allowing, balance, pay, say


class Order(BaseModel):
    order_id: int


def run(script: list[Any], **options: Any) -> tuple[Any, list[dict[str, Any]]]:
    """Run an agent; its result, and its trace."""
    trace = AgentTracePlugin()
    options.setdefault("retry", AT_ONCE)
    result = run_agent_sync(
        FakeModel(script, is_async=False), prompt="please", plugins=[trace], **options
    )
    return result, trace.records


def ends(records: list[dict[str, Any]]) -> dict[str, Any]:
    (end,) = [each for each in records if each["kind"] == "agent_end"]
    return end


def assert_kind(result: Any, records: list[dict[str, Any]], kind: str) -> None:
    assert result.error["kind"] == kind
    last = [each for each in records if each["kind"] == "transition"][-1]
    assert last["error.kind"] == ends(records)["error.kind"] == kind
    assert last["state"] == ["toolLoop.error"]


@pytest.mark.parametrize(
    "limit",
    [{"max_turns": 1}, {"max_tokens": 5}, {"max_usd": 0.01}],
    ids=lambda each: next(iter(each)),
)
def test_a_run_that_used_up_its_budget_is_visible(limit: dict[str, Any]) -> None:
    used = {"input_tokens": 9, "cost_usd": 0.5}
    result, records = run([balance(usage=used), say()], tools=Bank().registry(), **limit)
    assert_kind(result, records, "budget")


def test_a_denied_tool_is_visible_with_its_name() -> None:
    result, records = run([{"tool": "wipe_disk", "args": {}}], tools=Bank().registry())
    assert_kind(result, records, "tool_denied")
    (denied,) = [each for each in records if each["kind"] == "tool_denied"]
    assert denied["gen_ai.tool.name"] == "wipe_disk"


def test_a_provider_that_fails_is_visible_in_each_call_and_in_the_end() -> None:
    script = [ConnectionError("down")] * 3
    result, records = run(script, retry=RetryPolicy(max_attempts=3, delay_s=0))
    assert_kind(result, records, "retries")
    calls = [each for each in records if each["kind"] == "model_call"]
    assert [each["error.type"] for each in calls] == ["ConnectionError"] * 3
    tried = [each.get("retries") for each in records if each["kind"] == "transition"]
    assert max(filter(None, tried)) == 2


async def test_a_provider_that_is_slow_is_visible_before_the_run_has_ended() -> None:
    loops = Loops("async", InMemoryLedger())
    trace = AgentTracePlugin()
    loop = await loops.start(
        [{"hang": True}, say()],
        plugins=[trace],
        clock=SimulatedClock(),
        model_timeout_s=5,
        retry=RetryPolicy(delay_s=60),
    )
    await loop.begin()
    await loop.move(5)
    assert loop.state == "timed_out" and loop.error["kind"] == "timeout"
    late = [each for each in trace.records if each["kind"] == "transition"][-1]
    assert late["error.kind"] == "timeout" and late["state"] == ["toolLoop.timed_out"]
    await loop.move(60)
    assert loop.state == "done"
    last = [each for each in trace.records if each["kind"] == "transition"][-1]
    assert "error.kind" not in last
    loops.close()


async def test_an_approval_nobody_answers_is_visible_by_age_and_then_by_kind(loops: Loops) -> None:
    now = {"s": 1_000.0}
    trace = AgentTracePlugin(clock=lambda: now["s"])
    clock = SimulatedClock()
    loop = await loops.parked(pay(), plugins=[trace], clock=clock, human_timeout_s=3600)
    # The oldest question: the rows of the ledger, over all threads.
    (row,) = loops.ledger.pending()
    assert row.status == "proposed" and row.slot.tool == "pay"
    assert row.created_at <= clock.now_ms() and row.decide_by == row.created_at + 3_600_000
    # The same in the trace: when the state was entered, and nothing of that agent since.
    newest = trace.records[-1]
    assert newest["state"] == ["toolLoop.awaiting_human"] and newest["ts"] == 1_000.0
    await loop.move(3600)
    assert loop.error["kind"] == "human_timeout"
    assert [each for each in trace.records if each["kind"] == "transition"][-1][
        "error.kind"
    ] == "human_timeout"
    assert loops.ledger.pending() == []


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
def test_the_oldest_question_of_a_store_is_visible_with_its_age(kind: str, tmp_path: Path) -> None:
    store: Any = MemoryStore() if kind == "memory" else SQLiteStore(tmp_path / "agents.db")
    trace = AgentTracePlugin()
    for number, second in (("1", 100), ("2", 160)):
        waiting = run_agent_sync(
            FakeModel([pay(id=f"p{number}")], is_async=False),
            tools=Bank().registry(),
            prompt="please",
            store=store,
            key=f"ticket:{number}",
            clock=SimulatedClock(wall_start=second),
            plugins=[trace],
        )
        assert waiting.waiting
    oldest, newest = store.find(state="toolLoop.awaiting_human")
    assert (oldest.key, newest.key) == ("ticket:1", "ticket:2")
    assert newest.since - oldest.since == 60_000
    # The trace tells the tickets apart by the same keys.
    ends = [each for each in trace.records if each["kind"] == "agent_end"]
    assert [(each["gen_ai.conversation.id"], each["state"]) for each in ends] == [
        ("ticket:1", ["toolLoop.awaiting_human"]),
        ("ticket:2", ["toolLoop.awaiting_human"]),
    ]
    if kind == "sqlite":
        store.disconnect()


def test_answers_that_miss_the_schema_are_visible_while_they_are_retried() -> None:
    script = [say("warm"), say('{"order_id": 4}')]
    result, records = run(script, output_model=Order)
    assert result.ok and result.context["output_retries"] == 1
    retried = [each for each in records if each.get("output_retries") == 1]
    assert retried and retried[0]["kind"] == "transition"
    assert ends(records)["output_retries"] == 1


def test_answers_that_never_fit_are_visible_by_kind() -> None:
    result, records = run([say("warm")] * 3, output_model=Order, max_output_retries=2)
    assert_kind(result, records, "output")
    assert result.context["output_retries"] == 2


def test_a_failed_agent_of_a_tree_is_visible_as_an_event_and_in_its_own_end() -> None:
    """The rate of AGENT_FAILED among the reports."""
    chart = allowing()
    chart["context"]["input"] = "work"
    worker = create_machine(
        chart,
        agent_logic(
            FakeModel([{"tool": "nothing_such", "args": {}}], is_async=False), tool_registry()
        ),
    )
    boss = create_machine(
        {
            "id": "boss",
            "initial": "waiting_for_it",
            "states": {
                "waiting_for_it": {
                    "invoke": {"id": "worker-1", "src": "worker"},
                    "on": {"AGENT_DONE": "fine", "AGENT_FAILED": "failed"},
                },
                "fine": {"type": "final"},
                "failed": {"type": "final"},
            },
        },
        MachineLogic(services={"worker": worker}),
    )
    trace = AgentTracePlugin()
    result = run_agent_sync(boss, plugins=[trace])
    assert result.final_state == "boss.failed"
    reports = [each for each in trace.records if each.get("event") == "AGENT_FAILED"]
    assert [each["agent_id"] for each in reports] == ["boss"]
    ended = [
        each
        for each in trace.records
        if each["kind"] == "agent_end" and each["agent_id"] == "boss:worker-1"
    ]
    assert ended[0]["error.kind"] == "tool_denied"


def test_who_spent_the_budget_is_a_row_of_the_totals() -> None:
    trace = AgentTracePlugin()
    model = FakeModel(
        [say(usage={"input_tokens": 5, "output_tokens": 5, "cost_usd": 0.25})], is_async=False
    )
    result = run_agent_sync(model, prompt="x", plugins=[trace])
    agents = trace.totals()["agents"]
    most = max(agents.items(), key=lambda each: each[1]["cost_usd"])
    assert most == (
        "toolLoop",
        {"turns": 1, "input_tokens": 5, "output_tokens": 5, "cost_usd": 0.25},
    )
    assert result.usage["cost_usd"] == 0.25


async def test_a_side_effect_in_doubt_is_visible_in_the_trace_and_in_the_ledger(
    loops: Loops,
) -> None:
    import time

    from guardchart.agents import tool

    def wire(to: str) -> str:
        """Send money slowly."""
        time.sleep(0.3)
        return "sent"

    trace = AgentTracePlugin()
    registry = tool_registry(tool(wire, side_effect=True, timeout_s=0.05))
    loop = await loops.parked(
        {"tool": "wire", "args": {"to": "ann"}}, tools=registry, plugins=[trace]
    )
    await loop.approve()
    (ran,) = [each for each in trace.records if each["kind"] == "tool_call"]
    assert ran["outcome"] == "timeout" and ran["entered"] is True
    assert ran["error.type"] == "ToolTimeoutError"
    row_id = next(iter(loop.rows))
    row = loops.ledger.row("ticket-1", row_id)
    assert row.entered


# Trees of agents


def tree(script: list[Any], **limits: Any) -> tuple[Any, AgentTracePlugin]:
    """A supervisor that spawns two workers one after another, with one budget for both."""
    budget = BudgetPlugin(**limits)
    note = {"actions": "count"}
    chart = {
        "id": "boss",
        "initial": "working",
        "context": {"reports": []},
        "states": {
            "working": {
                "on": {
                    "HIRE": {"actions": "spawnWorker"},
                    "AGENT_DONE": note,
                    "AGENT_FAILED": note,
                    "BUDGET_EXCEEDED": "over",
                }
            },
            "over": {"on": {"AGENT_DONE": note, "AGENT_FAILED": note}},
        },
    }
    logic = MachineLogic(
        actions={"count": lambda context, event: {"reports": [*context["reports"], event.type]}}
    ).merge(
        spawn_agent(
            None,
            FakeModel(script, is_async=False),
            tool_registry(),
            budget={"max_turns": 3},
            parent_tools=[],
            name="worker",
        )
    )
    trace = AgentTracePlugin()
    boss = SyncInterpreter(create_machine(chart, logic), plugins=[budget, trace]).start()
    boss.send("HIRE", task="one")
    boss.send("HIRE", task="two")
    return boss, trace


def test_the_rate_of_failed_agents_is_visible_in_reports_and_trace() -> None:
    boss, trace = tree([say("fine"), {"tool": "made_up", "args": {}}], max_total_tokens=1_000)
    assert boss.context["reports"] == ["AGENT_DONE", "AGENT_FAILED"]
    events = [each.get("event") for each in trace.records if each["agent_id"] == "boss"]
    assert events.count("AGENT_FAILED") == 1 and events.count("AGENT_DONE") == 1
    failed = [
        each for each in trace.records if each["kind"] == "agent_end" and "error.kind" in each
    ]
    assert [(each["agent_id"], each["parent_id"]) for each in failed] == [("boss:worker-2", "boss")]
    boss.stop()


def test_a_budget_of_a_tree_that_is_used_up_is_visible_in_context_and_trace() -> None:
    used = {"input_tokens": 30, "output_tokens": 5}
    boss, trace = tree([say(usage=used), say(usage=used)], max_total_tokens=30)
    assert boss.context["budget_exceeded"] is True
    (tripped,) = [each for each in trace.records if each["kind"] == "budget"]
    assert tripped["budget_exceeded"] is True and tripped["agent_id"] == "boss"
    moved = [each for each in trace.records if each.get("event") == "BUDGET_EXCEEDED"]
    assert moved[0]["state"] == ["boss.over"]
    boss.stop()


def test_how_many_agents_a_tree_has_had_and_who_spent_is_visible() -> None:
    used = {"input_tokens": 10, "output_tokens": 5, "cost_usd": 0.5}
    boss, trace = tree([say(usage=used), say()], max_total_usd=100)
    spent = boss.context["usage_by_agent"]
    assert len(spent) == 2
    agents = trace.totals()["agents"]
    assert set(agents) == set(spent) == {"boss:worker-1", "boss:worker-2"}
    assert max(agents.items(), key=lambda each: each[1]["cost_usd"])[0] == "boss:worker-1"
    boss.stop()
