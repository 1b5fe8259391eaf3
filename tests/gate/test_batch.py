from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from guardchart.gate import (
    Allowed,
    Rule,
    ToolCall,
    answer_from_row,
    assess,
    close_open,
    closing_text,
    digest,
    follow,
    lookup_verdicts,
    pending_item,
    propose_verdicts,
    slots,
    tool,
    tool_registry,
)
from guardchart.persistence import InMemoryLedger, SQLiteLedger
from tests.gate.helpers import NOW, Batch


def read(q: str) -> str:
    return q


def pay(amount: int, currency: str = "EUR") -> str:
    return currency


REGISTRY = tool_registry(read, tool(pay, side_effect=True, timeout_s=7))


def calls(*amounts: int) -> list[ToolCall]:
    return [ToolCall(f"c{i}", "pay", {"amount": n}) for i, n in enumerate(amounts)]


@pytest.fixture(params=["memory", "sqlite"])
def ledger(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    if request.param == "memory":
        yield InMemoryLedger()
        return
    made = SQLiteLedger(tmp_path / "ledger.db")
    yield made
    close = getattr(made, "close_connection", None) or getattr(made, "dispose", None)
    if close is not None:
        close()


def test_every_call_gets_a_verdict_in_order_and_nothing_is_raised() -> None:
    turn = [
        ToolCall("a", "read", {"q": "x"}),
        ToolCall("b", "pay", {"amount": 1}),
        ToolCall("c", "pay", {"amount": "1"}),
        ToolCall("d", "nope", {}),
        ToolCall("", "read", {"q": "x"}),
        ToolCall(None, None, None),  # type: ignore[arg-type]
        ToolCall("e", "read", {"q": object()}),
    ]
    verdicts = assess(turn, REGISTRY, ["read", "pay"])
    assert [v.call for v in verdicts] == turn
    assert [v.ok for v in verdicts] == [True, True, False, False, False, False, False]
    assert [v.needs_row for v in verdicts] == [False, True] + [False] * 5
    assert verdicts[1].arguments == {"amount": 1, "currency": "EUR"}
    assert verdicts[1].digest == digest(verdicts[1].arguments)
    assert all(v.reason and v.arguments is None for v in verdicts if not v.ok)


def test_a_shared_id_spoils_every_call_that_has_it_and_no_other() -> None:
    turn = [
        ToolCall("a", "read", {"q": "1"}),
        ToolCall("a", "read", {"q": "2"}),
        ToolCall("b", "read", {"q": "3"}),
    ]
    verdicts = assess(turn, REGISTRY, "*")
    assert [v.ok for v in verdicts] == [False, False, True]
    assert verdicts[0].reason == "duplicate tool call ids"


def test_a_spent_id_is_refused() -> None:
    (verdict,) = assess([ToolCall("a", "read", {"q": "1"})], REGISTRY, "*", spent_ids=["a"])
    assert "duplicate tool call ids" in verdict.reason


def test_a_turn_with_too_many_calls_is_refused_whole() -> None:
    turn = [ToolCall(str(i), "read", {"q": ""}) for i in range(9)]
    assert {v.reason for v in assess(turn, REGISTRY, "*")} == {
        "9 tool calls in one turn (max_tool_calls=8)"
    }
    assert all(v.ok for v in assess(turn, REGISTRY, "*", max_tool_calls=9))


def test_a_verdict_tells_no_hidden_tool() -> None:
    hidden, missing = assess(
        [ToolCall("a", "pay", {}), ToolCall("b", "zzz", {})], REGISTRY, ["read"]
    )
    assert hidden._replace(call=missing.call) == missing


def test_only_calls_that_need_one_get_a_row(ledger: Any) -> None:
    turn = [ToolCall("a", "read", {"q": "x"}), *calls(1), ToolCall("z", "nope", {})]
    batch = Batch(REGISTRY, turn, ledger=ledger)
    assert [r is not None for r in batch.rows] == [False, True, False]
    row = batch.rows[1]
    assert (row.status, row.slot.tool, row.timeout_s, row.model_id) == ("proposed", "pay", 7, "c0")
    assert pending_item(row) == {
        "id": "c0",
        "tool_call_id": "c0",
        "name": "pay",
        "arguments": {"amount": 1, "currency": "EUR"},
        "digest": row.digest,
    }


def test_equal_calls_of_a_batch_have_a_slot_each(ledger: Any) -> None:
    batch = Batch(REGISTRY, calls(1, 2, 1), ledger=ledger)
    places = slots(batch.host, 1, batch.verdicts)
    assert [s.ordinal for s in places if s] == [0, 0, 1]
    assert len({r.id for r in batch.rows}) == 3


def test_proposing_twice_gives_the_same_rows(ledger: Any) -> None:
    batch = Batch(REGISTRY, calls(1), ledger=ledger)
    fresh = [v._replace(call=replace(v.call, id="other")) for v in batch.verdicts]
    again = propose_verdicts(ledger, batch.host, 1, fresh, now=NOW + 5)
    assert [r.id for r in again if r] == [r.id for r in batch.rows]


def test_a_rule_that_spares_the_human_approves_by_policy(ledger: Any) -> None:
    allowed = Allowed(everything=True, rules={"pay": Rule("never")})
    batch = Batch(REGISTRY, calls(1), ledger=ledger, allowed=allowed)
    row = batch.rows[0]
    assert (row.status, row.by) == ("approved", "policy")


def test_a_parked_batch_is_looked_up_and_nothing_is_made(ledger: Any) -> None:
    batch = Batch(REGISTRY, calls(1, 2), ledger=ledger)
    found = lookup_verdicts(ledger, batch.host, 1, batch.verdicts, now=NOW)
    assert found == batch.rows
    changed = assess(calls(1, 3), REGISTRY, "*")
    rows = lookup_verdicts(ledger, batch.host, 1, changed, now=NOW)
    assert rows[0] == batch.rows[0]
    assert rows[1] is None


def test_a_batch_nobody_proposed_is_adopted_by_memory_only() -> None:
    host = Batch(REGISTRY, []).host
    verdicts = assess(calls(1), REGISTRY, "*")
    memory = InMemoryLedger()
    (row,) = lookup_verdicts(memory, host, 5, verdicts, row_ids=["c0-2"], now=NOW)
    assert row is not None
    assert (row.id, row.status) == ("c0-2", "proposed")
    (older,) = lookup_verdicts(memory, host, 4, assess(calls(2), REGISTRY, "*"), now=NOW)
    assert older is None


def test_a_durable_ledger_adopts_nothing(tmp_path: Path) -> None:
    host = Batch(REGISTRY, []).host
    durable = SQLiteLedger(tmp_path / "l.db")
    assert lookup_verdicts(durable, host, 5, assess(calls(1), REGISTRY, "*"), now=NOW) == [None]
    assert durable.pending() == []


def test_open_rows_are_closed_with_a_reason_and_entered_ones_tell_their_outcome(
    ledger: Any,
) -> None:
    batch = Batch(REGISTRY, calls(1, 2, 3, 4, 5), ledger=ledger)
    new = {"amount": 9, "currency": "EUR"}
    for i in (1, 2, 3):
        batch.decide(i)
    done = ledger.claim("t", "c1", batch.rows[1].digest, owner="o", now=NOW)
    ledger.record("t", "c1", done.token, "done", "paid", now=NOW)
    ledger.claim("t", "c2", batch.rows[2].digest, owner="o", now=NOW)
    batch.decide(4, "edit", arguments=new, new_digest=digest(new))
    answers = close_open(
        ledger, "t", [r.id for r in batch.rows] + ["gone"], "superseded", now=NOW + 1
    )
    assert {k: a.status for k, a in answers.items()} == {
        "c0": "void",
        "c1": "done",
        "c2": "in_doubt",
        "c3": "void",
        "c4": "void",
        "gone": "void",
    }
    assert answers["c0"].text == "not run: superseded by new input"
    assert answers["c1"].text == "paid"
    assert "in doubt" in answers["c2"].text
    assert follow(ledger, ledger.row("t", "c4", follow=False)).status == "void"
    assert close_open(ledger, "t", [], "superseded", now=NOW) == {}


def test_an_expired_question_says_so(ledger: Any) -> None:
    batch = Batch(REGISTRY, calls(1), ledger=ledger)
    (answer,) = close_open(ledger, "t", ["c0"], "expired", now=NOW).values()
    assert (answer.status, answer.text) == ("expired", "not run: no human decision in time")
    assert answer_from_row(batch.row()) == answer


def test_open_and_running_rows_have_no_answer_yet(ledger: Any) -> None:
    batch = Batch(REGISTRY, calls(1), ledger=ledger)
    assert answer_from_row(None) is None
    assert answer_from_row(batch.row()) is None
    batch.decide()
    assert answer_from_row(batch.row()) is None
    ledger.claim("t", "c0", batch.rows[0].digest, owner="o", now=NOW)
    assert answer_from_row(batch.row(), now=NOW + 7000) is None
    answer = answer_from_row(batch.row(), now=NOW + 7001)
    assert answer is not None
    assert answer.status == "in_doubt"


def test_a_reviewers_reason_is_told_masked_and_cut(ledger: Any) -> None:
    batch = Batch(REGISTRY, calls(1), ledger=ledger)
    batch.decide(decision="reject", reason="because password=CANARY " + "x" * 900)
    answer = answer_from_row(batch.row())
    assert answer is not None
    assert answer.text.startswith("not run: rejected by a reviewer: because password=***")
    assert len(answer.text) < 600


@pytest.mark.parametrize(
    "reason",
    [
        "superseded",
        "expired",
        "timeout",
        "rejected",
        "denied",
        "failed",
        "tampered",
        "void",
        "whatever",
    ],
)
def test_every_closing_reason_has_a_text(reason: str) -> None:
    assert closing_text(reason).startswith(("not run: ", "refused: "))
