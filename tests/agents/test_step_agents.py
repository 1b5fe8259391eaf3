"""Spawned agents under the step functions: requests, approvals, deadlines, a log."""

from __future__ import annotations

import json
from typing import Any

import pytest

from guardchart import MachineLogic, create_machine
from guardchart.agents import (
    FakeModel,
    approval_event,
    decisions_event,
    load_chart,
    pending_approval,
    replay,
    spawn_agent,
)
from guardchart.errors import SnapshotError, StepError
from guardchart.kernel import Machine, dump, load
from guardchart.persistence import InMemoryLedger
from tests.agents.loops import AT_ONCE, Bank, balance, pay, say, turn
from tests.agents.stepping import Stepped

DESK: dict[str, Any] = {
    "id": "desk",
    "initial": "open",
    "context": {"answers": [], "failed": 0, "left": 0},
    "meta": {"tools": list(Bank().registry().names)},
    "states": {
        "open": {
            "on": {
                "ASK": {"actions": ["count", "spawnClerk"]},
                "AGENT_DONE": {"actions": "keep"},
                "AGENT_FAILED": {"actions": "fail"},
            },
            "always": {"target": "closed", "guard": "allIn"},
        },
        "closed": {"type": "final"},
    },
}

OWN = MachineLogic(
    actions={
        "count": lambda context, event: {"left": context["left"] + 1},
        "keep": lambda context, event: {
            "answers": [*context["answers"], event.payload["result"]],
            "left": context["left"] - 1,
        },
        "fail": lambda context, event: {
            "failed": context["failed"] + 1,
            "left": context["left"] - 1,
        },
    },
    guards={"allIn": lambda context, event: context["left"] == 0 and _reported(context)},
)


def _reported(context: Any) -> bool:
    return bool(context["answers"] or context["failed"])


def _desk(script: list[Any], bank: Bank) -> Machine:
    chart = load_chart()
    for state in ("awaiting_model", "awaiting_tool"):
        chart["states"][state]["meta"]["tools"] = ["balance", "pay"]
    clerk = spawn_agent(
        chart,
        FakeModel(script, is_async=False),
        bank.registry(),
        budget={"max_turns": 4},
        name="clerk",
        retry=AT_ONCE,
    )
    return create_machine(DESK, OWN.merge(clerk))


def _asked(stepped: Stepped, *tasks: str) -> list[dict[str, Any]]:
    for task in tasks:
        stepped.send({"type": "ASK", "task": task})
    stepped.run()
    return pending_approval(stepped.step.snapshot)


JSON = pytest.mark.parametrize("json_each", [False, True])


@JSON
def test_a_spawned_agents_calls_are_requests_and_its_approval_names_it(json_each: bool) -> None:
    bank = Bank()
    machine = _desk([turn(pay(), balance()), say("paid")], bank)
    stepped = Stepped(machine, InMemoryLedger(), json_each=json_each)
    stepped.send({"type": "ASK", "task": "pay ann"})
    assert [each.id for each in stepped.requests] == ["clerk-1:model@1"]
    stepped.run()
    (call,) = pending_approval(stepped.step.snapshot)
    assert call["agent_id"] == "desk:clerk-1" and stepped.requests == ()
    assert stepped.send(approval_event([call]), agent="desk:clerk-1").status == "taken"
    stepped.run()
    assert stepped.step.done and stepped.context["answers"] == ["paid"]
    assert bank.entered == [("balance", "a1"), ("pay", "ann", 500, "none")]


@JSON
@pytest.mark.gate
def test_two_agents_ask_side_by_side_and_are_decided_apart(json_each: bool) -> None:
    bank = Bank()
    machine = _desk([turn(pay()), turn(pay()), say("one"), say("two")], bank)
    stepped = Stepped(machine, InMemoryLedger(), json_each=json_each)
    stepped.send({"type": "ASK", "task": "a"})
    stepped.send({"type": "ASK", "task": "b"})
    assert [each.id for each in stepped.requests] == ["clerk-1:model@1", "clerk-2:model@1"]
    stepped.run()
    first, second = pending_approval(stepped.step.snapshot)
    approved = [{"id": first["id"], "digest": first["digest"], "decision": "approve"}]
    refused = [{"id": second["id"], "decision": "reject", "reason": "no"}]
    for agent, decided in (("desk:clerk-1", approved), ("desk:clerk-2", refused)):
        event = decisions_event(decided, agent_id=agent)
        receipt = stepped.send(event, agent=agent)
        assert receipt.status == "taken", receipt.reason
    stepped.run()
    assert stepped.step.done and sorted(stepped.context["answers"]) == ["one", "two"]
    assert bank.entered == [("pay", "ann", 500, "none")]


@pytest.mark.gate
def test_an_approval_of_one_agent_sent_to_another_runs_nothing() -> None:
    bank = Bank()
    stepped = Stepped(_desk([turn(pay()), turn(pay())], bank), InMemoryLedger())
    first, _ = _asked(stepped, "a", "b")
    receipt = stepped.send(approval_event([first]), agent="desk:clerk-2")
    assert receipt.status != "taken" and bank.entered == []
    with pytest.raises(StepError, match="no such agent"):
        stepped.send(approval_event([first]), agent="desk:clerk-3")


def test_a_spawned_agents_failure_is_its_own_and_its_timer_tries_again() -> None:
    bank = Bank()
    script = [RuntimeError("down"), say("up again"), *[RuntimeError("down")] * 9]
    stepped = Stepped(_desk(script, bank), InMemoryLedger())
    stepped.send({"type": "ASK", "task": "a"})
    stepped.run()
    assert stepped.step.done and stepped.context["answers"] == ["up again"]
    again = Stepped(_desk([RuntimeError("down")] * 9, bank), InMemoryLedger())
    again.send({"type": "ASK", "task": "a"})
    again.run()
    assert again.step.done and again.context["failed"] == 1


def test_a_log_with_spawned_agents_replays_to_the_same_snapshot() -> None:
    bank = Bank()
    machine = _desk([turn(pay()), say("paid")], bank)
    stepped = Stepped(machine, InMemoryLedger())
    (call,) = _asked(stepped, "pay ann")
    stepped.send(approval_event([call]), agent="desk:clerk-1")
    stepped.run()
    entered = list(bank.entered)
    log = json.loads(json.dumps(stepped.log))
    again = replay(_desk([], bank), log)
    assert dump(again) == dump(stepped.step.snapshot) and bank.entered == entered


def test_a_spawned_agent_is_stepped_from_json_of_ones_own_only() -> None:
    machine = _desk([turn(pay())], Bank())
    stepped = Stepped(machine, InMemoryLedger())
    _asked(stepped, "pay ann")
    data = json.loads(json.dumps(dump(stepped.step.snapshot)))
    with pytest.raises(SnapshotError):
        load(machine, data)
    assert load(machine, data, trusted=True) == stepped.step.snapshot
