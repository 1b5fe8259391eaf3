"""Approvals of one call that were made to run another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from guardchart.agents import pending_approval
from guardchart.gate import GuardSession, ToolCall, display
from guardchart.gate._approvals import DecisionRefused
from guardchart.kernel import create_machine
from guardchart.persistence import InMemoryLedger, SQLiteLedger
from tests.promises.bank import REFUND, SAY, THREAD, Bank, Parked, graph, start


def refund(cents: int, ident: str) -> dict[str, Any]:
    return {"tool": "refund", "args": {"order_id": 1, "cents": cents}, "id": ident}


def test_calls_whose_arguments_were_exchanged_are_not_decided_by_their_ids(tmp_path: Path) -> None:
    with SQLiteLedger(tmp_path / "ledger.db") as ledger:
        parked = Parked(refund(1, "c1"), refund(999, "c2"), ledger=ledger)

        def exchange(data: dict[str, Any]) -> None:
            first, second = data["context"]["pending_tool_calls"]
            for key in ("arguments", "digest"):
                first[key], second[key] = second[key], first[key]

        forged = parked.edited(exchange)
        assert pending_approval(forged["context"])[1]["arguments"]["cents"] == 1
        decisions = [{"id": "c1", "decision": "reject"}, {"id": "c2", "decision": "approve"}]
        result = parked.send({"type": "HUMAN_DECIDED", "decisions": decisions}, forged)
        assert parked.bank.entered == []
        assert result.error is not None and result.error["kind"] == "tampered"


def test_an_adopted_batch_does_not_answer_to_the_id_of_a_known_call() -> None:
    parked = Parked(refund(1, "c1"))

    def forge(data: dict[str, Any]) -> None:
        entry = data["context"]["pending_tool_calls"][0]
        entry["arguments"]["cents"] = 99_999
        entry["row_id"] = "unheard-of"
        del entry["digest"]
        data["batch_no"] += 1

    parked.send({"type": "HUMAN_APPROVED", "call_ids": ["c1"]}, parked.edited(forge))
    assert parked.bank.entered == []


def test_a_used_approval_that_lies_in_the_state_approves_no_call_of_a_fork() -> None:
    bank = Bank()
    script = [REFUND | {"id": "c1"}, SAY, refund(99_999, "c1"), SAY]
    app = graph(bank, script, ledger=InMemoryLedger())
    app.invoke(start(), THREAD)
    approval = {"event": {"type": "HUMAN_APPROVED", "call_ids": ["c1"]}}
    before = list(app.get_state_history(THREAD))[1]
    app.invoke(approval, THREAD)
    assert bank.entered == [("refund", 7, 250)]

    forked = app.invoke(None, before.config)
    (item,) = pending_approval(forked["xsm"]["context"])
    assert item["tool_call_id"] == "c1" and item["arguments"]["cents"] == 99_999
    out = app.invoke(approval, THREAD)
    assert out["xsm"]["receipt"]["denied"] and bank.entered == [("refund", 7, 250)]
    out = app.invoke({"event": {"type": "HUMAN_APPROVED", "call_ids": [item["id"]]}}, THREAD)
    assert out["xsm"]["value"] == "done" and len(bank.entered) == 2


def test_a_session_does_not_take_the_id_of_an_earlier_call_for_a_later_one() -> None:
    bank, ledger = Bank(), InMemoryLedger()
    chart = {"id": "desk", "initial": "open", "states": {"open": {"meta": {"tools": ["refund"]}}}}

    def session() -> GuardSession:
        return GuardSession(create_machine(chart), bank.registry(), ledger, scope="t1")

    approval = {"type": "HUMAN_APPROVED", "call_ids": ["c1"]}
    first, call = session(), ToolCall("c1", "refund", {"order_id": 7})
    first.propose([call])
    first.decide(approval)
    first.run(call)
    second = session()
    second.propose([ToolCall("c1", "refund", {"order_id": 8, "cents": 9})])
    with pytest.raises(DecisionRefused):
        second.decide(approval)
    assert bank.entered == [("refund", 7, 100)]


def test_a_loop_whose_pending_calls_were_taken_out_does_not_stay_parked() -> None:
    parked = Parked()

    def empty(data: dict[str, Any]) -> None:
        data["context"]["pending_tool_calls"] = []

    result = parked.send({"type": "HUMAN_APPROVED", "call_ids": ["c1"]}, parked.edited(empty))
    assert result.error is not None and result.error["kind"] == "tampered"
    assert parked.bank.entered == []


@pytest.mark.parametrize("unseen", "\u034f\u115f\u17b4\u2800\u3164\ufe0f\uffa0\U000e0101")
def test_characters_that_are_drawn_as_nothing_are_shown_to_a_reviewer(unseen: str) -> None:
    shown = display({f"a{unseen}": f"b{unseen}c"})
    assert unseen not in str(shown) and shown != display({"a": "bc"})
