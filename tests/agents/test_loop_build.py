"""Wirings of the loop that could not work are refused while they are built."""

from __future__ import annotations

from typing import Any

import pytest

from guardchart import MachineLogic, SyncInterpreter, create_machine
from guardchart.agents import FakeModel, agent_logic, load_chart, pending_approval
from guardchart.errors import AgentConfigError
from guardchart.gate import approval_event
from guardchart.persistence import InMemoryLedger
from tests.agents.loops import Bank, pay, say


def test_two_loops_in_regions_over_one_context_are_refused_and_told_the_remedy() -> None:
    def region(name: str) -> dict[str, Any]:
        loop = load_chart()
        loop["states"]["awaiting_model"]["invoke"]["id"] = f"{name}_model"
        loop["states"]["awaiting_tool"]["invoke"]["id"] = f"{name}_tools"
        return {"initial": "idle", "states": loop["states"]}

    chart = {
        "id": "two",
        "type": "parallel",
        "context": load_chart()["context"],
        "states": {"left": region("left"), "right": region("right")},
    }
    with pytest.raises(AgentConfigError, match=r"'left', 'right'.*child machine"):
        create_machine(chart, agent_logic(FakeModel([])))


def test_the_model_call_may_go_by_another_name() -> None:
    bank = Bank()
    chart = load_chart()
    chart["states"]["awaiting_model"]["invoke"]["src"] = "ask"
    logic = agent_logic(
        FakeModel([pay(), say()], is_async=False), bank.registry(), ledger=InMemoryLedger()
    )
    logic = logic.merge(MachineLogic(services={"ask": logic.services["callModel"]}))
    interpreter = SyncInterpreter(create_machine(chart, logic)).start()
    interpreter.send("START", prompt="Pay Ann.")
    pending = pending_approval(interpreter.context)
    assert len(pending) == 1 and bank.paid == []
    interpreter.send(approval_event(pending))
    assert interpreter.status == "done"
    assert len(bank.paid) == 1
    interpreter.stop()
