"""What a conversation was told of a call, and was not so."""

from __future__ import annotations

import copy
from typing import Any

from guardchart import MachineLogic, SyncInterpreter, create_machine
from guardchart.agents import (
    FakeModel,
    agent_logic,
    pending_approval,
    run_agent_sync,
    tool,
    tool_registry,
)
from guardchart.gate import ToolCall, approval_event, as_allowed, execute, turn_facts
from guardchart.persistence import InMemoryLedger
from tests.promises.bank import AT_ONCE, REFUND, SAY, Bank, listed_chart

TRANSFER: dict[str, Any] = {
    "tool": "transfer",
    "args": {"to": {"name": "a", "iban": "b"}, "cents": 5},
    "id": "c2",
}


def results(context: Any) -> list[str]:
    return [each["content"] for each in context["messages"] if each["role"] == "tool"]


def test_calls_that_ran_are_told_their_results_though_the_state_lists_their_tools_no_more() -> None:
    bank, ledger = Bank(), InMemoryLedger()

    def machine(script: list[Any], *listed: str) -> Any:
        model = FakeModel(script, is_async=False)
        logic = agent_logic(model, bank.registry(), retry=AT_ONCE, ledger=ledger)
        return create_machine(listed_chart(*listed), logic)

    turn = {"tool_calls": [REFUND | {"id": "c1"}, TRANSFER]}
    parked = run_agent_sync(machine([turn]), prompt="x", key="t1")
    saved, shown = copy.deepcopy(dict(parked.snapshot)), pending_approval(parked.context)
    run_agent_sync(machine([SAY]), snapshot=saved, approve=shown, key="t1")
    assert len(bank.entered) == 2

    # The process died before it could save; the next release lists one of the tools no more.
    later = machine([SAY], "lookup", "refund")
    again = run_agent_sync(later, snapshot=saved, approve=shown, key="t1")
    assert results(again.context) == ["refunded 250", "transferred"] and len(bank.entered) == 2


def test_of_a_turn_that_is_refused_the_call_that_had_run_is_told_its_result() -> None:
    bank, ledger = Bank(), InMemoryLedger()

    def send(to: str) -> str:
        """Send a letter."""
        return "sent"

    def machine(script: list[Any], *listed: str) -> Any:
        registry = tool_registry(*bank.registry(), send)
        model = FakeModel(script, is_async=False)
        logic = agent_logic(model, registry, retry=AT_ONCE, ledger=ledger)
        return create_machine(listed_chart(*listed), logic)

    turn = {"tool_calls": [REFUND | {"id": "c1"}, {"tool": "send", "args": {"to": "a"}}]}
    parked = run_agent_sync(machine([turn], "refund", "send"), prompt="x", key="t1")
    saved, shown = copy.deepcopy(dict(parked.snapshot)), pending_approval(parked.context)
    run_agent_sync(machine([SAY], "refund", "send"), snapshot=saved, approve=shown, key="t1")
    assert bank.entered == [("refund", 7, 250)]

    again = run_agent_sync(machine([SAY], "refund"), snapshot=saved, approve=shown, key="t1")
    assert again.error is not None and again.error["kind"] == "tool_denied"
    ran, refused = results(again.context)
    assert ran == "refunded 250" and refused.startswith("refused")


def test_a_child_loop_that_is_started_again_does_not_pass_off_its_first_call_as_the_second() -> (
    None
):
    bank, ledger = Bank(), InMemoryLedger()
    script = [REFUND | {"id": "a1"}, SAY, REFUND | {"id": "a2"}, SAY]
    model = FakeModel(script, is_async=False)
    logic = agent_logic(model, bank.registry(), retry=AT_ONCE, ledger=ledger)
    worker = create_machine(listed_chart(), logic)
    work = {"id": "w", "src": "worker", "input": {"prompt": "x"}, "onDone": "rest"}
    boss = create_machine(
        {
            "id": "boss",
            "initial": "work",
            "states": {"work": {"invoke": work}, "rest": {"on": {"AGAIN": "work"}}},
        },
        MachineLogic(services={"worker": worker}),
    )
    live = SyncInterpreter(boss, scope="t1", ledger=ledger).start()
    for times in (1, 2):
        (child,) = live.actors.values()
        child.send(approval_event(pending_approval(child.context)))
        assert bank.entered == [("refund", 7, 250)] * times
        live.send("AGAIN")
    live.stop()


class Unshowable(dict[str, int]):
    def items(self) -> Any:
        raise RuntimeError("no")


def test_a_tool_that_ran_is_done_though_its_result_cannot_be_shown() -> None:
    def look(n: int) -> Any:
        """Look."""
        return Unshowable(n=n)

    registry = tool_registry(tool(look))
    call = ToolCall("c1", "look", {"n": 1})
    facts = turn_facts([call], registry, as_allowed("*"), proposing=False)
    outcome = execute(call, facts)
    assert outcome.status == "done" and "cannot be shown" in outcome.text
