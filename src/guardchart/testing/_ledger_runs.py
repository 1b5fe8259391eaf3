"""Claim, record, release, resolve: from an approval to the end of its one entry."""

from __future__ import annotations

from typing import Literal, TypeAlias

import pytest

from guardchart.persistence import ENTRY_S, MAX_NOT_SENT, Ledger, ReleaseReason, owner_id
from guardchart.testing._ledger_support import (
    NOW,
    TIMEOUT_S,
    approve,
    claim,
    claimed,
    propose,
    refused,
    unchanged,
)

Outcome: TypeAlias = Literal["done", "failed"]

_TIMEOUT = round(TIMEOUT_S * 1000)
_ENTRY = round(ENTRY_S * 1000)


class RunChecks:
    """Rules 6 to 8 of the protocol."""

    def test_only_an_approved_row_is_claimed_and_only_once(self, ledger: Ledger) -> None:
        row = propose(ledger)
        unchanged(ledger, "not-approved", claim, ledger, row)
        approve(ledger, row)
        won = claim(ledger, row)
        assert won.token
        assert (won.row.status, won.row.owner, won.row.claimed_at) == ("claimed", "elsewhere", NOW)
        assert claim(ledger, row) == (won.row, None)
        done = ledger.record("t", row.id, won.token, "done", "paid", now=NOW + 1)
        assert claim(ledger, row) == (done, None)
        refused("unproposed", ledger.claim, "t", "x", "d", owner="o", now=NOW)

    def test_a_claim_of_other_arguments_is_refused_even_after_the_entry(
        self, ledger: Ledger
    ) -> None:
        row = approve(ledger, propose(ledger))

        def other() -> object:
            return ledger.claim("t", row.id, "other", owner="o", now=NOW)

        unchanged(ledger, "digest", other)
        claim(ledger, row)
        unchanged(ledger, "digest", other)

    def test_an_approval_is_good_until_its_last_millisecond(self, ledger: Ledger) -> None:
        row = approve(ledger, propose(ledger))
        assert row.use_by is not None
        unchanged(ledger, "expired", claim, ledger, row, now=row.use_by + 1)
        assert claim(ledger, row, now=row.use_by).token

    @pytest.mark.parametrize("outcome", ["done", "failed"])
    def test_a_record_needs_the_token_and_may_be_repeated(
        self, ledger: Ledger, outcome: Outcome
    ) -> None:
        row, token = claimed(ledger)
        unchanged(ledger, "token", ledger.record, "t", row.id, "x", "done", "no", now=NOW)
        ended = ledger.record("t", row.id, token, outcome, "it was", now=NOW + 5)
        assert (ended.status, ended.result, ended.updated_at) == (outcome, "it was", NOW + 5)
        assert ledger.record("t", row.id, token, outcome, "it was", now=NOW + 9) == ended
        unchanged(ledger, "not-claimed", ledger.record, "t", row.id, "x", outcome, "no", now=NOW)
        other: Outcome = "done" if outcome == "failed" else "failed"
        unchanged(
            ledger,
            "not-claimed",
            ledger.record,
            "t",
            row.id,
            token,
            other,
            "no",
            now=NOW,
        )
        unchanged(
            ledger,
            "not-claimed",
            ledger.release,
            "t",
            row.id,
            token,
            reason="paused",
            now=NOW,
        )

    def test_an_outcome_is_done_or_failed(self, ledger: Ledger) -> None:
        row, token = claimed(ledger)
        odd = "approved"
        unchanged(
            ledger,
            "outcome",
            ledger.record,
            "t",
            row.id,
            token,
            odd,
            "",
            now=NOW,
        )
        unchanged(
            ledger,
            "outcome",
            ledger.resolve,
            "t",
            row.id,
            odd,
            "",
            by=None,
            now=NOW * 2,
        )

    def test_a_release_gives_the_claim_back_and_its_token_is_spent(self, ledger: Ledger) -> None:
        row, token = claimed(ledger)
        unchanged(ledger, "token", ledger.release, "t", row.id, "x", reason="paused", now=NOW)
        free = ledger.release("t", row.id, token, reason="cancelled", now=NOW)
        assert (free.status, free.token, free.owner, free.claimed_at) == (
            "approved",
            None,
            None,
            None,
        )
        unchanged(ledger, "not-claimed", ledger.record, "t", row.id, token, "done", "", now=NOW)
        new = claim(ledger, free)
        assert new.token not in (None, token)
        unchanged(ledger, "token", ledger.record, "t", row.id, token, "done", "", now=NOW)

    def test_not_sent_is_believed_three_times_other_releases_are_not_counted(
        self, ledger: Ledger
    ) -> None:
        row, token = claimed(ledger)

        def give_back(reason: ReleaseReason) -> None:
            nonlocal token
            free = ledger.release("t", row.id, token, reason=reason, now=NOW)
            again = claim(ledger, free)
            assert again.token is not None
            token = again.token

        others: tuple[ReleaseReason, ...] = ("paused", "state-changed", "cancelled", "late-entry")
        for reason in others * 2:
            give_back(reason)
        for _ in range(MAX_NOT_SENT):
            give_back("not-sent")
        unchanged(ledger, "releases", ledger.release, "t", row.id, token, reason="not-sent", now=0)
        give_back("paused")
        assert ledger.record("t", row.id, token, "failed", "not sent", now=NOW).releases == 3

    def test_a_claimed_row_is_in_doubt_after_its_timeout(self, ledger: Ledger) -> None:
        row, token = claimed(ledger)
        other, _ = claimed(ledger, scope="u")
        assert ledger.in_doubt(now=NOW + _TIMEOUT) == []
        assert ledger.in_doubt(now=NOW + _TIMEOUT + 1) == [row, other]
        assert ledger.in_doubt("u", now=NOW + _TIMEOUT + 1) == [other]
        ledger.record("t", row.id, token, "done", "late but true", now=NOW + 9 * _TIMEOUT)
        assert ledger.in_doubt("t", now=NOW + 9 * _TIMEOUT) == []

    def test_a_claim_whose_owner_died_is_in_doubt_at_once(self, ledger: Ledger) -> None:
        live = approve(ledger, propose(ledger, "a", {"n": 1}))
        dead = approve(ledger, propose(ledger, "b", {"n": 2}))
        me = owner_id()
        pid, _, rest = me.partition(":")
        ghost = f"{pid}:1{rest}"  # this pid, started at another time
        ledger.claim("t", live.id, live.digest, owner=me, now=NOW)
        ledger.claim("t", dead.id, dead.digest, owner=ghost, now=NOW)
        expected = [] if rest.startswith("0:") else [dead.id]
        assert [row.id for row in ledger.in_doubt(now=NOW)] == expected

    def test_in_doubt_is_resolved_by_a_person_after_the_tool_is_over(self, ledger: Ledger) -> None:
        row, token = claimed(ledger)
        at = NOW + _ENTRY + _TIMEOUT
        unchanged(
            ledger,
            "early",
            ledger.resolve,
            "t",
            row.id,
            "failed",
            "no",
            by="ann",
            now=at - 1,
        )
        settled = ledger.resolve("t", row.id, "failed", "it never arrived", by="ann", now=at)
        assert (settled.status, settled.by, settled.result) == (
            "failed",
            "ann",
            "it never arrived",
        )
        for verb in (
            lambda: ledger.record("t", row.id, token, "done", "late", now=at),
            lambda: ledger.record("t", row.id, token, "failed", "late", now=at),
            lambda: ledger.release("t", row.id, token, reason="not-sent", now=at),
            lambda: ledger.resolve("t", row.id, "done", "yes", by="bob", now=at),
        ):
            unchanged(ledger, "not-claimed", verb)
        assert claim(ledger, row, now=at) == (settled, None)

    @pytest.mark.parametrize("status", ["proposed", "approved", "rejected"])
    def test_only_a_claimed_row_can_be_resolved(self, ledger: Ledger, status: str) -> None:
        row = propose(ledger)
        if status == "approved":
            approve(ledger, row)
        elif status == "rejected":
            ledger.close("t", [row.id], now=NOW)
        unchanged(
            ledger,
            "not-claimed",
            ledger.resolve,
            "t",
            row.id,
            "done",
            "",
            by=None,
            now=NOW * 2,
        )
        for verb in (
            lambda: ledger.resolve("t", "x", "done", "", by=None, now=NOW),
            lambda: ledger.record("t", "x", "", "done", "", now=NOW),
            lambda: ledger.release("t", "x", "", reason="paused", now=NOW),
        ):
            refused("unproposed", verb)
