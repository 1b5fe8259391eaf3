"""The loop's logic merged with that of a pydantic-ai service: the loop's approvals stand."""

from __future__ import annotations

import pytest

from guardchart import SyncInterpreter, create_machine
from guardchart.agents import (
    TOOL_LOOP,
    FakeModel,
    agent_logic,
    approval_event,
    pending_approval,
    tool,
    tool_registry,
)
from guardchart.persistence import InMemoryLedger
from guardchart.pydantic_ai import usage_logic


@pytest.mark.parametrize("loop_first", [True, False])
def test_a_merged_loop_still_takes_its_decisions_in_the_ledger(loop_first: bool) -> None:
    paid: list[int] = []

    def pay(cents: int) -> str:
        """Pay."""
        paid.append(cents)
        return "paid"

    model = FakeModel([{"tool": "pay", "args": {"cents": 5}}, {"text": "Done."}], is_async=False)
    loop = agent_logic(model, tool_registry(tool(pay, side_effect=True)))
    merged = loop.merge(usage_logic()) if loop_first else usage_logic().merge(loop)
    ledger = InMemoryLedger()
    machine = create_machine(TOOL_LOOP, merged)
    interpreter = SyncInterpreter(machine, ledger=ledger, scope="t").start()
    interpreter.send("START", prompt="Pay Ann.")
    (item,) = pending_approval(interpreter.context)
    assert ledger.row("t", item["id"]).status == "proposed" and paid == []
    forged = {**item, "digest": "0" * 64}
    assert interpreter.send(approval_event([forged])).denied and paid == []
    assert interpreter.send(approval_event([item])).status == "taken"
    assert paid == [5] and interpreter.status == "done"
    interpreter.stop()
