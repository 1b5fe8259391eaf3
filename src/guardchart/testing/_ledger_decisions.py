"""Decisions: what approve, reject, edit and close do on every class of row."""

from __future__ import annotations

from typing import Literal

import pytest

from guardchart.persistence import Decision, Ledger, Row
from guardchart.testing._ledger_support import (
    NOW,
    approve,
    claim,
    claimed,
    digest_of,
    edit,
    propose,
    refused,
    unchanged,
)

CLOSED = ("rejected", "void", "expired")


def _closed(ledger: Ledger, status: str) -> Row:
    row = propose(ledger)
    if status == "rejected":
        return ledger.decide("t", {row.id: Decision("reject", reason="no")}, now=NOW)[row.id]
    if status == "expired":
        return ledger.close("t", [row.id], "later", status="expired", now=NOW)[row.id]
    return ledger.close("t", [row.id], "later", now=NOW)[row.id]


def _decide(
    ledger: Ledger, row: Row, decision: Decision, *, again: bool = False, now: int = NOW
) -> Row:
    return ledger.decide("t", {row.id: decision}, "ann", again=again, now=now)[row.id]


class DecisionChecks:
    """Rule 5 of the protocol, class by class, and its deadlines."""

    def test_an_approval_names_who_and_until_when(self, ledger: Ledger) -> None:
        row = propose(ledger)
        use_by = NOW + 10
        answer = ledger.decide("t", {row.id: Decision("approve")}, "ann", now=NOW, use_by=use_by)
        approved = answer[row.id]
        assert (approved.status, approved.by, approved.use_by) == ("approved", "ann", use_by)
        assert ledger.row("t", row.id) == approved
        again = ledger.decide("t", {row.id: Decision("approve")}, "bob", now=NOW + 1)
        assert again == answer
        assert ledger.pending() == []

    def test_an_approval_without_limit_is_good_for_an_hour(self, ledger: Ledger) -> None:
        assert approve(ledger, propose(ledger)).use_by == NOW + 3_600_000

    def test_decisions_are_taken_all_or_none(self, ledger: Ledger) -> None:
        a, b = propose(ledger, "a", {"n": 1}), propose(ledger, "b", {"n": 2})
        decisions = {
            a.id: edit(9),
            b.id: Decision("approve", "not the digest"),
        }
        unchanged(ledger, "digest", ledger.decide, "t", decisions, now=NOW)
        decisions = {a.id: Decision("approve"), "nobody": Decision("reject")}
        unchanged(ledger, "unproposed", ledger.decide, "t", decisions, now=NOW)
        decisions = {a.id: Decision("approve"), b.id: Decision("reject", reason="no")}
        answer = ledger.decide("t", decisions, now=NOW)
        assert {k: row.status for k, row in answer.items()} == {"a": "approved", "b": "rejected"}

    def test_a_decision_in_another_scope_finds_nothing(self, ledger: Ledger) -> None:
        row = propose(ledger)
        decisions = {row.id: Decision("approve")}
        unchanged(ledger, "unproposed", ledger.decide, "u", decisions, now=NOW)

    @pytest.mark.parametrize("name", ["approve", "reject", "edit"])
    def test_a_wrong_digest_is_refused_whatever_the_decision(
        self, ledger: Ledger, name: str
    ) -> None:
        row = propose(ledger)
        given = Decision(name, "wrong", {"n": 1}, "d1")  # type: ignore[arg-type]
        unchanged(ledger, "digest", _decide, ledger, row, given)

    def test_an_unknown_or_incomplete_decision_is_refused(self, ledger: Ledger) -> None:
        row = propose(ledger)
        odd = Decision("allow")  # type: ignore[arg-type]
        unchanged(ledger, "decision", _decide, ledger, row, odd)
        for part in (Decision("edit", arguments={}), Decision("edit", new_digest="d")):
            unchanged(ledger, "arguments", _decide, ledger, row, part)

    @pytest.mark.parametrize("decision", [Decision("approve"), Decision("reject"), edit(1)])
    def test_a_late_decision_is_refused_and_changes_nothing(
        self, ledger: Ledger, decision: Decision
    ) -> None:
        row = propose(ledger, decide_by=NOW + 10)
        for again in (False, True):
            unchanged(
                ledger,
                "late",
                _decide,
                ledger,
                row,
                decision,
                again=again,
                now=NOW + 11,
            )
        expired = ledger.close("t", [row.id], "expired", status="expired", now=NOW + 11)
        assert expired[row.id].status == "expired"
        if decision.decision != "reject":
            refused("expired", _decide, ledger, row, decision, now=NOW + 11)

    def test_a_decision_on_the_dot_is_in_time(self, ledger: Ledger) -> None:
        row = propose(ledger, decide_by=NOW + 10)
        assert approve(ledger, row, now=NOW + 10).status == "approved"
        # The question is answered: its deadline no longer binds the answer.
        assert approve(ledger, row, now=NOW + 99).status == "approved"
        unchanged(ledger, "late", _decide, ledger, row, edit(1), now=NOW + 99)
        assert _decide(ledger, row, Decision("reject"), now=NOW + 99).status == "rejected"

    def test_an_approval_past_its_use_can_be_given_anew(self, ledger: Ledger) -> None:
        row = propose(ledger)
        approve(ledger, row)
        later = NOW + 3_600_001
        refused("expired", claim, ledger, row, now=later)
        assert approve(ledger, row, now=later).use_by == later + 3_600_000
        assert claim(ledger, row, now=later).token

    def test_open_rows_can_be_rejected_and_closed_before_and_after_approval(
        self, ledger: Ledger
    ) -> None:
        for n, decision in enumerate((Decision("reject", reason="no"), Decision("close"))):
            row = propose(ledger, "c", {"n": 10 + n})
            other = approve(ledger, propose(ledger, "c", {"n": 20 + n}))
            for each in (row, other):
                closed = _decide(ledger, each, decision)
                assert closed.status == ("void" if n else "rejected")
                assert closed.reason == decision.reason
                refused(closed.status, claim, ledger, each)

    @pytest.mark.parametrize("status", CLOSED)
    def test_a_closed_row_takes_a_reject_but_reopens_only_again_and_with_digest(
        self, ledger: Ledger, status: str
    ) -> None:
        row = _closed(ledger, status)
        assert row.status == status
        for decision in (Decision("approve"), Decision("approve", row.digest), edit(1)):
            unchanged(ledger, status, _decide, ledger, row, decision)
        for decision in (Decision("approve"), edit(1)):
            unchanged(ledger, "digest", _decide, ledger, row, decision, again=True)
        assert _decide(ledger, row, Decision("close")) == row
        assert _decide(ledger, row, Decision("reject", reason="no")).status == "rejected"
        approved = _decide(ledger, row, Decision("approve", row.digest), again=True)
        assert (approved.status, approved.reason) == ("approved", None)
        assert claim(ledger, approved).token

    @pytest.mark.parametrize("status", CLOSED)
    def test_a_closed_row_can_be_edited_again_with_digest(
        self, ledger: Ledger, status: str
    ) -> None:
        row = _closed(ledger, status)
        child = _decide(ledger, row, edit(1, row.digest), again=True)
        assert (child.status, child.parent_id, child.arguments) == ("approved", row.id, {"n": 1})
        original = ledger.row("t", row.id, follow=False)
        assert original is not None
        assert (original.status, original.child_id) == ("edited", child.id)

    @pytest.mark.parametrize("status", ["claimed", "done", "failed"])
    def test_an_entered_row_answers_every_decision_with_its_outcome(
        self, ledger: Ledger, status: Literal["claimed", "done", "failed"]
    ) -> None:
        row, token = claimed(ledger)
        if status != "claimed":
            row = ledger.record("t", row.id, token, status, "so it was", now=NOW)
        for decision in (
            Decision("approve"),
            Decision("approve", row.digest),
            Decision("reject", reason="no"),
            Decision("close"),
            edit(1),
        ):
            assert _decide(ledger, row, decision, now=NOW + 9**9) == row
        same = Decision("edit", row.digest, row.arguments, row.digest)
        for decision in (Decision("approve", row.digest), Decision("reject", row.digest), same):
            assert _decide(ledger, row, decision, again=True) == row
        assert ledger.close("t", [row.id], "later", now=NOW) == {row.id: row}
        unchanged(ledger, "digest", _decide, ledger, row, edit(1), again=True)
        child = _decide(ledger, row, edit(1, row.digest), again=True)
        assert (child.status, child.parent_id) == ("approved", row.id)
        assert ledger.row("t", row.id) == row
        assert _decide(ledger, row, edit(1, row.digest), again=True) == child

    def test_an_edit_closes_the_row_and_approves_a_child_with_its_own_id(
        self, ledger: Ledger
    ) -> None:
        row = propose(ledger, "c", {"n": 0}, decide_by=NOW + 5)
        child = _decide(ledger, row, edit(1))
        assert child.id == "c-2"
        assert child.slot == row.slot._replace(digest=digest_of({"n": 1}))
        assert (child.status, child.by, child.parent_id) == ("approved", "ann", "c")
        assert child.decide_by == row.decide_by
        original = ledger.row("t", "c", follow=False)
        assert original is not None
        assert (original.status, original.arguments) == ("edited", {"n": 0})
        assert ledger.row("t", "c") == child
        assert ledger.slot_row(row.slot) == original
        assert ledger.slot_row(child.slot) is None

    def test_every_verb_follows_an_edit_to_its_child(self, ledger: Ledger) -> None:
        row = propose(ledger)
        child = _decide(ledger, row, edit(1))
        refused("edited", claim, ledger, row)
        won = ledger.claim("t", row.id, child.digest, owner="o", now=NOW)
        assert won.row.id == child.id
        assert won.token is not None
        done = ledger.record("t", child.id, won.token, "done", "ok", now=NOW)
        for decision in (Decision("approve"), Decision("reject"), edit(1), edit(2)):
            assert _decide(ledger, row, decision) == done
        assert ledger.close("t", [row.id], now=NOW) == {row.id: done}
        assert ledger.claim("t", row.id, child.digest, owner="o", now=NOW) == (done, None)

    def test_who_saw_only_the_original_cannot_approve_the_edit(self, ledger: Ledger) -> None:
        row = propose(ledger)
        child = _decide(ledger, row, edit(1))
        for decision in (Decision("approve"), Decision("approve", row.digest)):
            unchanged(ledger, "edited", _decide, ledger, row, decision)
        unchanged(ledger, "edited", _decide, ledger, row, Decision("approve"), again=True)
        assert _decide(ledger, row, Decision("approve", child.digest)) == child
        assert _decide(ledger, row, Decision("reject", row.digest)).status == "rejected"

    def test_going_back_to_the_original_closes_the_edit(self, ledger: Ledger) -> None:
        row = propose(ledger)
        child = _decide(ledger, row, edit(1))
        back = _decide(ledger, row, Decision("approve", row.digest), again=True)
        assert (back.id, back.status) == (row.id, "approved")
        refused("void", claim, ledger, child)
        assert claim(ledger, back).token

    def test_editing_back_to_the_original_reopens_its_row(self, ledger: Ledger) -> None:
        row = propose(ledger, "c", {"n": 0})
        child = _decide(ledger, row, edit(1))
        unchanged(ledger, "edited", _decide, ledger, child, edit(0))
        back = _decide(ledger, child, edit(0, child.digest), again=True)
        assert (back.id, back.status, back.child_id) == (row.id, "approved", None)
        assert ledger.row("t", child.id) == back
        assert len(ledger.lookup("t", "r", "", 1)) == 2

    def test_the_first_reason_of_a_rejection_stays(self, ledger: Ledger) -> None:
        row = propose(ledger)
        rejected = _decide(ledger, row, Decision("reject", reason="first"))
        assert _decide(ledger, row, Decision("reject", reason="second")) == rejected

    def test_a_second_edit_takes_the_place_of_the_first(self, ledger: Ledger) -> None:
        row = propose(ledger)
        first = _decide(ledger, row, edit(1))
        second = _decide(ledger, row, edit(2))
        assert (second.parent_id, second.arguments) == (row.id, {"n": 2})
        for each in (row, first, second):
            assert ledger.row("t", each.id) == second
        refused("edited", claim, ledger, first)
        unchanged(ledger, "edited", _decide, ledger, row, edit(1))
        again = _decide(ledger, row, edit(1, second.digest), again=True)
        assert again.id == first.id
        for each in (row, first, second):
            assert ledger.row("t", each.id) == again
        assert sum(each.status == "approved" for each in ledger.lookup("t", "r", "", 1)) == 1

    def test_an_edit_made_twice_is_one_row_and_entered_once(self, ledger: Ledger) -> None:
        row = propose(ledger)
        child = _decide(ledger, row, edit(1))
        assert _decide(ledger, row, edit(1)) == child
        _, token = claim(ledger, child)
        assert token is not None
        done = ledger.record("t", child.id, token, "done", "ok", now=NOW)
        back = _decide(ledger, row, Decision("approve", row.digest), again=True)
        assert back.status == "approved"
        assert _decide(ledger, row, edit(1, row.digest)) == done
        refused("edited", claim, ledger, row)

    def test_an_edit_to_the_arguments_of_another_call_is_a_call_of_its_own(
        self, ledger: Ledger
    ) -> None:
        a, b = propose(ledger, "a", {"n": 1}), propose(ledger, "b", {"n": 2})
        answer = ledger.decide("t", {a.id: edit(2), b.id: Decision("approve")}, now=NOW)
        assert answer[a.id].digest == answer[b.id].digest
        assert answer[a.id].id != answer[b.id].id
        assert all(claim(ledger, row).token for row in answer.values())

    def test_an_edit_without_a_change_is_an_approval(self, ledger: Ledger) -> None:
        row = propose(ledger, "c", {"n": 1})
        approved = _decide(ledger, row, edit(1))
        assert (approved.id, approved.status) == (row.id, "approved")

    def test_two_decisions_about_one_call_are_refused(self, ledger: Ledger) -> None:
        row = propose(ledger)
        child = _decide(ledger, row, edit(1))
        both = {row.id: Decision("reject"), child.id: Decision("approve")}
        unchanged(ledger, "ambiguous", ledger.decide, "t", both, now=NOW)

    def test_close_leaves_out_ids_it_does_not_know(self, ledger: Ledger) -> None:
        row = propose(ledger)
        answer = ledger.close("t", [row.id, "nobody", "\ud800"], "superseded", now=NOW)
        assert {k: (r.status, r.reason) for k, r in answer.items()} == {
            row.id: ("void", "superseded")
        }
