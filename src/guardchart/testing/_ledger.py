"""What every ledger must do, as tests: subclass ``LedgerConformance`` and say how to make one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from guardchart.persistence import Decision, Ledger, Proposal, Row, Slot, batch_slots
from guardchart.testing._ledger_decisions import DecisionChecks
from guardchart.testing._ledger_races import RaceChecks
from guardchart.testing._ledger_runs import RunChecks
from guardchart.testing._ledger_support import NOW, approve, call, propose, refused


class ProposalChecks:
    """Slots, row ids, lookups, forgetting."""

    def test_a_proposal_makes_one_row_and_finds_it_again(self, ledger: Ledger) -> None:
        row = propose(ledger, "c", {"amount": 5})
        again = propose(ledger, "another id", {"amount": 5})
        assert again == row
        assert (row.id, row.status, row.model_id) == ("c", "proposed", "c")
        assert row.arguments == {"amount": 5}
        assert ledger.slot_row(row.slot) == row

    def test_a_taken_id_is_given_a_number_and_denotes_one_call_for_ever(
        self, ledger: Ledger
    ) -> None:
        ids = [propose(ledger, "c", {"n": n}, batch_no=n).id for n in range(1, 4)]
        assert ids == ["c", "c-2", "c-3"]
        assert propose(ledger, "c-2", {"n": 9}, batch_no=9).id == "c-2-2"
        assert propose(ledger, "c", {"n": 1}, scope="other").id == "c"

    @pytest.mark.parametrize(
        "change",
        [
            {"scope": "b"},
            {"run": "b"},
            {"agent": "b"},
            {"batch_no": 2},
            {"tool": "b"},
            {"digest": "b"},
            {"ordinal": 1},
        ],
        ids=lambda change: next(iter(change)),
    )
    def test_every_part_of_a_slot_tells_calls_apart(
        self, ledger: Ledger, change: dict[str, Any]
    ) -> None:
        slot = Slot("a", "a", "a", 1, "a", "a", 0)
        first = ledger.propose(slot, "c", {}, now=NOW)
        other = ledger.propose(slot._replace(**change), "c", {}, now=NOW)
        assert other.slot != first.slot
        assert (other.slot.scope, other.id) != (first.slot.scope, first.id)

    def test_equal_calls_of_a_batch_are_told_apart_by_their_count(self, ledger: Ledger) -> None:
        slots = batch_slots("t", "r", "", 1, [("pay", "d"), ("get", "e"), ("pay", "d")])
        assert [slot.ordinal for slot in slots] == [0, 0, 1]
        rows = ledger.propose_batch(
            [Proposal(slot=slot, model_id="c", arguments={}) for slot in slots], now=NOW
        )
        assert [row.id for row in rows] == ["c", "c-2", "c-3"]

    def test_a_batch_of_several_scopes_is_refused_whole(self, ledger: Ledger) -> None:
        batch = [
            Proposal(slot=call({"n": n}, scope=scope), model_id="c", arguments={"n": n})
            for n, scope in enumerate("ab")
        ]
        refused("scope", ledger.propose_batch, batch, now=NOW)
        assert ledger.pending() == []

    def test_a_closed_slot_proposed_again_stays_closed(self, ledger: Ledger) -> None:
        row = propose(ledger)
        ledger.decide("t", {row.id: Decision("reject")}, now=NOW)
        assert propose(ledger).status == "rejected"

    def test_a_question_asked_again_gets_the_later_deadline(self, ledger: Ledger) -> None:
        slot = call({"n": 1})

        def deadline(decide_by: int | None) -> int | None:
            return ledger.propose(slot, "c", {"n": 1}, decide_by=decide_by, now=NOW).decide_by

        assert [deadline(NOW + 5), deadline(NOW + 9), deadline(NOW + 5)] == [
            NOW + 5,
            NOW + 9,
            NOW + 9,
        ]
        assert deadline(None) is None

    def test_a_policy_approves_in_the_proposal_and_renews_only_its_own(
        self, ledger: Ledger
    ) -> None:
        slot = call({"n": 1})
        row = ledger.propose(slot, "c", {"n": 1}, approve_until=NOW + 10, now=NOW)
        assert (row.status, row.by, row.use_by) == ("approved", "policy", NOW + 10)
        row = ledger.propose(slot, "c", {"n": 1}, approve_until=NOW + 90, now=NOW + 50)
        assert row.use_by == NOW + 90
        ledger.close("t", [row.id], "superseded", now=NOW)
        row = ledger.propose(slot, "c", {"n": 1}, approve_until=NOW + 90, now=NOW)
        assert row.status == "void"
        human = approve(ledger, propose(ledger, "d", {"n": 2}))
        again = ledger.propose(human.slot, "d", {"n": 2}, approve_until=NOW**2, now=NOW * 2)
        assert again == human

    def test_arguments_kept_do_not_follow_the_callers_objects(self, ledger: Ledger) -> None:
        arguments: dict[str, Any] = {"items": [1]}
        row = ledger.propose(call(arguments), "c", arguments, now=NOW)
        arguments["items"].append(2)
        kept = ledger.row("t", row.id)
        assert kept is not None
        assert kept.arguments == {"items": [1]}

    @pytest.mark.parametrize("bad", ["a\0b", "\ud800", 2**70, 1.5, None, True])
    def test_a_slot_no_ledger_can_keep_is_refused_and_never_found(
        self, ledger: Ledger, bad: Any
    ) -> None:
        for slot in (call({})._replace(run=bad), call({})._replace(batch_no=bad)):
            refused("slot", ledger.propose, slot, "c", {}, now=NOW)
            assert ledger.slot_row(slot) is None
            assert ledger.lookup(*slot[:4]) == []
        assert ledger.row("t", bad) is None

    def test_text_of_any_kind_is_kept_readable(self, ledger: Ledger) -> None:
        text = "caf\u00e9 \U0001f600 \ud83d\ude00 \udcff \0 end"
        row = ledger.propose(call({}), text, {}, now=NOW)
        ledger.decide("t", {row.id: Decision("reject", reason=text)}, by=text, now=NOW)
        kept = ledger.row("t", row.id)
        assert kept is not None
        for value in (kept.id, kept.reason, kept.by):
            assert value == "caf\u00e9 \U0001f600 \U0001f600 \ufffd \ufffd end"

    def test_lookup_lists_a_batch_with_its_edits_and_nothing_else(self, ledger: Ledger) -> None:
        first = propose(ledger, "c", {"n": 1})
        propose(ledger, "c", {"n": 2}, batch_no=2)
        propose(ledger, "c", {"n": 1}, agent="child")
        edit = Decision("edit", arguments={"n": 3}, new_digest="d3")
        child = ledger.decide("t", {first.id: edit}, now=NOW)[first.id]
        rows = ledger.lookup("t", "r", "", 1)
        assert [(row.id, row.status) for row in rows] == [
            (first.id, "edited"),
            (child.id, "approved"),
        ]
        assert ledger.lookup("t", "r", "", 7) == []

    def test_pending_lists_undecided_rows_of_one_scope_or_of_all(self, ledger: Ledger) -> None:
        a = propose(ledger, "a", {"n": 1})
        b = propose(ledger, "b", {"n": 2}, scope="u")
        approve(ledger, propose(ledger, "c", {"n": 3}))
        assert ledger.pending("t") == [a]
        assert ledger.pending() == [a, b]

    def test_forget_blanks_contents_but_never_frees_an_id_or_a_call(self, ledger: Ledger) -> None:
        row = propose(ledger, "c", {"secret": 1})
        approve(ledger, row)
        token = ledger.claim("t", row.id, row.digest, owner="o", now=NOW).token
        assert token is not None
        other = propose(ledger, "d", {"n": 1}, scope="u")
        assert ledger.forget("t", now=NOW) == 1
        done = ledger.record("t", row.id, token, "done", "a secret result", now=NOW)
        assert (done.arguments, done.result, done.status) == (None, None, "done")
        assert done.forgotten
        again = propose(ledger, "c", {"secret": 1})
        assert (again.id, again.status, again.arguments) == (row.id, "done", None)
        assert propose(ledger, "c", {"n": 2}, batch_no=2).id == "c-2"
        assert ledger.row("u", "d") == other
        assert ledger.forget("nobody", now=NOW) == 0

    def test_adopt_compares_restored_calls_and_changes_no_row(self, ledger: Ledger) -> None:
        row = propose(ledger, "c", {"n": 1})
        before = ledger.lookup("t", "r", "", 1)

        def restored(slot: Slot, row_id: str | None) -> list[Row]:
            each = Proposal(slot=slot, model_id="c", arguments={"n": 1}, row_id=row_id)
            return ledger.adopt([each], now=NOW)

        assert restored(row.slot, "c") == [row]
        for field, value in (("digest", "x"), ("tool", "x"), ("ordinal", 1)):
            slot = row.slot._replace(**{field: value})  # type: ignore[arg-type]
            refused("mismatch", restored, slot, "c")
        for row_id in ("x", "", None, "\ud800"):
            refused("unproposed", restored, row.slot, row_id)
        assert ledger.lookup("t", "r", "", 1) == before
        assert ledger.adopt([], now=NOW) == []

    def test_an_unseen_batch_is_taken_over_only_where_no_proposal_is_required(
        self, ledger: Ledger
    ) -> None:
        propose(ledger, "c", {"n": 1}, batch_no=5)

        def restored(batch_no: int, row_id: str, n: int = 7) -> list[Row]:
            slot = call({"n": n}, batch_no=batch_no)
            each = Proposal(slot=slot, model_id="c", arguments={"n": n}, row_id=row_id)
            return ledger.adopt([each], now=NOW)

        if ledger.requires_proposal:
            refused("unproposed", restored, 6, "z")
            assert ledger.pending() == [ledger.row("t", "c")]
            return
        for batch_no in (4, 5):
            refused("unproposed", restored, batch_no, "z")
        refused("mismatch", restored, 6, "c")
        [row] = restored(6, "z")
        assert (row.id, row.status, row.slot.batch_no) == ("z", "proposed", 6)
        assert restored(6, "z") == [row]
        refused("mismatch", restored, 6, "z", n=8)
        refused("unproposed", restored, 6, "y", n=8)


class LedgerConformance(ProposalChecks, DecisionChecks, RunChecks, RaceChecks):
    """Every promise of a ledger as a test. Subclass it and override ``make_ledger``.

    Example::

        class TestMyLedger(LedgerConformance):
            @pytest.fixture
            def make_ledger(self, tmp_path):
                return lambda: MyLedger(tmp_path / "ledger.db")
    """

    @pytest.fixture
    def make_ledger(self) -> Callable[[], Ledger]:
        """Return a function that opens one more handle on the same, at first empty, rows.

        A ledger that lives in one object returns that object each time.
        """
        raise NotImplementedError("override the fixture make_ledger")

    @pytest.fixture
    def ledger(self, make_ledger: Callable[[], Ledger]) -> Ledger:
        """Return one handle, checked to implement the protocol."""
        ledger = make_ledger()
        assert isinstance(ledger, Ledger)
        return ledger
