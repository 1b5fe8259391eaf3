"""Who approves: an approval is trusted as its channel is, and a bad answer never comes back."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from guardchart import MachineLogic, SyncInterpreter, create_machine
from guardchart.agents import FakeModel, agent_logic, pending_approval
from guardchart.gate import Seal, approval_event, sign_decision
from guardchart.persistence import InMemoryLedger
from tests.promises.bank import (
    AT_ONCE,
    REFUND,
    SAY,
    THREAD,
    Bank,
    Parked,
    graph,
    listed_chart,
    start,
)

ROOT = Path(__file__).resolve().parents[2]
SEAL = Seal(b"k" * 32)


@pytest.mark.gate
def test_with_signed_approvals_an_unsigned_decision_is_refused_and_a_signed_one_counts() -> None:
    bank = Bank()
    app = graph(bank, [REFUND, SAY], seal=SEAL, signed_approvals=True)
    pending = pending_approval(app.invoke(start(), THREAD)["xsm"]["context"])
    event = approval_event(pending, by="eve")
    out = app.invoke({"event": event}, THREAD)
    assert out["xsm"]["value"] == "awaiting_human"
    assert out["xsm"]["receipt"]["denied"]
    assert bank.entered == []
    out = app.invoke({"event": sign_decision(SEAL, event, "t1")}, THREAD)
    assert out["xsm"]["value"] == "done"
    assert bank.entered == [("refund", 7, 250)]


@pytest.mark.gate
def test_a_decision_signed_for_another_thread_is_refused() -> None:
    bank = Bank()
    app = graph(bank, [REFUND, SAY], seal=SEAL, signed_approvals=True)
    pending = pending_approval(app.invoke(start(), THREAD)["xsm"]["context"])
    app.invoke({"event": sign_decision(SEAL, approval_event(pending), "t2")}, THREAD)
    assert bank.entered == []


@pytest.mark.gate
def test_an_approval_raised_by_the_chart_itself_counts_for_nothing() -> None:
    for kind in ("raise", "send"):
        bank = Bank()
        chart = listed_chart()

        def approve(scope: Any, context: Any, event: Any, action: Any, kind: str = kind) -> None:
            ids = [each["id"] for each in context["pending_tool_calls"]]
            (scope.raise_ if kind == "raise" else scope.send)("HUMAN_APPROVED", call_ids=ids)

        chart["states"]["awaiting_human"]["entry"] = "approveItself"
        logic = agent_logic(
            FakeModel([REFUND, SAY], is_async=False),
            bank.registry(),
            retry=AT_ONCE,
            ledger=InMemoryLedger(),
        ).merge(MachineLogic(actions={"approveItself": approve}))
        interpreter = SyncInterpreter(create_machine(chart, logic)).start()
        interpreter.send("START", prompt="Please help.")
        assert bank.entered == []
        interpreter.stop()


@pytest.mark.gate
def test_a_refused_answer_never_comes_back_and_the_right_one_is_taken_afterwards() -> None:
    bank = Bank()
    app = graph(bank, [REFUND, SAY])
    pending = pending_approval(app.invoke(start(), THREAD)["xsm"]["context"])
    for bad in (
        {"type": "HUMAN_APPROVED"},
        {"type": "HUMAN_APPROVED", "call_ids": ["someone"]},
        {"type": "HUMAN_APPROVED", "call_ids": 7},
        {"type": "HUMAN_DECIDED", "decisions": "all"},
        {"type": "HUMAN_DECIDED", "decisions": [{"id": pending[0]["id"], "decision": "maybe"}]},
    ):
        out = app.invoke({"event": bad}, THREAD)
        assert out["xsm"]["value"] == "awaiting_human"
        assert out["xsm"]["receipt"]["denied"]
    assert bank.entered == []
    app.invoke({"event": None}, THREAD)
    assert bank.entered == []
    out = app.invoke({"event": approval_event(pending)}, THREAD)
    assert out["xsm"]["value"] == "done"
    assert bank.entered == [("refund", 7, 250)]


@pytest.mark.gate
def test_reject_wins_over_a_later_approval_and_approval_over_a_later_reject() -> None:
    rejected = Parked()
    rejected.send({"type": "HUMAN_REJECTED", "reason": "no"})
    late = rejected.approve()
    assert rejected.bank.entered == []
    assert late.waiting
    approved = Parked()
    approved.approve()
    told = approved.send({"type": "HUMAN_REJECTED"})
    assert approved.bank.entered == [("refund", 7, 250)]
    assert "refunded 250" in str(told.context["messages"])


@pytest.mark.gate
def test_new_input_closes_a_pending_call_so_that_its_old_approval_runs_nothing() -> None:
    parked = Parked()
    told = parked.send({"type": "START", "prompt": "Never mind, what time is it?"})
    assert told.ok
    assert "superseded" in str(told.context["messages"])
    parked.approve()
    assert parked.bank.entered == []


def test_what_the_node_writes_survives_strict_msgpack_unchanged_and_names_no_type() -> None:
    program = """
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from tests.promises.bank import REFUND, SAY, THREAD, Bank, graph, start
from guardchart.agents import pending_approval
from guardchart.gate import approval_event
serde = JsonPlusSerializer()
app = graph(Bank(), [REFUND, SAY])
for event in (start(), None):
    if event is None:
        event = {"event": approval_event(pending_approval(snapshot["context"]))}
    snapshot = app.invoke(event, THREAD)["xsm"]
    kind, data = serde.dumps_typed(snapshot)
    assert serde.loads_typed((kind, data)) == snapshot
    assert kind == "msgpack" and b"guardchart." not in data
print("same")
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, "LANGGRAPH_STRICT_MSGPACK": "true"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.strip() == "same", done.stderr
