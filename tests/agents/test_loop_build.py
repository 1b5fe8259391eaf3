"""Wirings of the loop that could not work are refused while they are built."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from guardchart import MachineLogic, SyncInterpreter, create_machine
from guardchart.agents import (
    FakeModel,
    ModelResponse,
    agent_logic,
    load_chart,
    pending_approval,
    run_agent_sync,
)
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


@pytest.mark.parametrize("bounded", [True, False])
def test_a_model_that_promises_to_end_by_itself_is_called_in_the_callers_thread(
    bounded: bool,
) -> None:
    seen: list[int] = []

    class Model:
        is_async = False

        def __init__(self) -> None:
            self.bounded = bounded

        def __call__(self, messages: Any, tools: Any) -> ModelResponse:
            seen.append(threading.get_ident())
            return ModelResponse("Hello.")

    result = run_agent_sync(Model(), prompt="Hello?")
    assert result.output == "Hello."
    assert (seen == [threading.get_ident()]) is bounded


def test_a_fake_model_is_bounded_unless_an_item_hangs() -> None:
    assert FakeModel([{"text": "hi"}, ValueError("no")]).bounded
    assert not FakeModel([{"text": "hi"}, {"hang": True}]).bounded


@pytest.mark.parametrize("only_reads", [True, False])
def test_a_model_is_handed_copies_unless_it_promises_only_to_read(only_reads: bool) -> None:
    class Model:
        is_async = False

        def __init__(self) -> None:
            self.only_reads = only_reads
            self.seen: list[Any] = []

        def __call__(self, messages: Any, tools: Any) -> ModelResponse:
            self.seen = list(messages)
            return ModelResponse("Hello.")

    model = Model()
    result = run_agent_sync(model, prompt="Hello?")
    kept = result.context["messages"][0]
    assert model.seen[0] == kept
    assert (model.seen[0] is kept) is only_reads
