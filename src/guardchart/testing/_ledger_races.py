"""Threads and several handles at once: one row, one decision, one entry."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from guardchart.errors import LedgerError
from guardchart.persistence import Claim, Decision, Ledger, Row
from guardchart.testing._ledger_support import NOW, approve, call, claim, edit, propose

_T = TypeVar("_T")
_WORKERS = 6


def at_once(count: int, work: Callable[[int], _T]) -> list[_T | LedgerError]:
    """Run ``work(0) .. work(count - 1)`` in threads that start together.

    Returns:
        Their results in order; a ``LedgerError`` stands for itself, another error is raised.
    """
    results: list[_T | BaseException | None] = [None] * count
    barrier = threading.Barrier(count)

    def run(index: int) -> None:
        try:
            barrier.wait(30)
            results[index] = work(index)
        except BaseException as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    answer: list[_T | LedgerError] = []
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, LedgerError):
            raise result
        answer.append(result)  # type: ignore[arg-type]
    return answer


class RaceChecks:
    """The same checks through one handle in many threads, and through many handles."""

    def test_what_one_handle_writes_another_reads(self, make_ledger: Callable[[], Ledger]) -> None:
        one, two = make_ledger(), make_ledger()
        row = propose(one)
        assert two.pending() == [row]
        approve(two, row)
        won = claim(one, row)
        assert won.token is not None
        assert claim(two, row) == (won.row, None)
        two.record("t", row.id, won.token, "done", "ok", now=NOW)
        assert one.row("t", row.id) == two.row("t", row.id)

    def test_claims_at_once_have_one_winner(self, make_ledger: Callable[[], Ledger]) -> None:
        handles = [make_ledger() for _ in range(3)]

        def claim_by(row: Row, i: int) -> Claim:
            return claim(handles[i % 3], row)

        for number in range(5):
            row = approve(handles[0], propose(handles[0], "c", {"n": number}))
            claims = at_once(_WORKERS, partial(claim_by, row))
            tokens = [c.token for c in claims if not isinstance(c, LedgerError)]
            assert len(tokens) == _WORKERS
            assert sum(token is not None for token in tokens) == 1

    def test_proposals_of_one_slot_at_once_make_one_row(
        self, make_ledger: Callable[[], Ledger]
    ) -> None:
        handles = [make_ledger() for _ in range(3)]
        rows = at_once(_WORKERS, lambda i: propose(handles[i % 3], "c", {"n": 1}))
        assert [row.id for row in rows if isinstance(row, Row)] == ["c"] * _WORKERS
        assert len(handles[0].lookup("t", "r", "", 1)) == 1

    def test_proposals_of_one_id_at_once_get_ids_of_their_own(
        self, make_ledger: Callable[[], Ledger]
    ) -> None:
        handles = [make_ledger() for _ in range(3)]
        rows = at_once(_WORKERS, lambda i: propose(handles[i % 3], "c", {"n": i}))
        ids = {row.id for row in rows if isinstance(row, Row)}
        assert ids == {"c", *(f"c-{n}" for n in range(2, _WORKERS + 1))}

    def test_opposite_decisions_at_once_take_one_side_for_the_whole_batch(
        self, make_ledger: Callable[[], Ledger]
    ) -> None:
        handles = [make_ledger() for _ in range(2)]
        sides = [Decision("approve"), Decision("reject", reason="no")]

        def decide(rows: list[Row], i: int) -> object:
            return handles[i].decide("t", {row.id: sides[i] for row in rows}, now=NOW)

        for number in range(5):
            batch_no = number + 1
            rows = [
                propose(handles[0], "c", {"n": number, "k": k}, batch_no=batch_no) for k in range(2)
            ]
            at_once(2, partial(decide, rows))
            kept = {row.status for row in handles[0].lookup("t", "r", "", batch_no)}
            # Reject after approve is allowed before the entry; approve after reject is not.
            assert kept == {"rejected"}

    def test_edits_at_once_leave_one_row_to_run(self, make_ledger: Callable[[], Ledger]) -> None:
        handles = [make_ledger() for _ in range(3)]
        row = propose(handles[0])
        at_once(
            _WORKERS,
            lambda i: handles[i % 3].decide("t", {row.id: edit(1 + i % 3)}, str(i), now=NOW),
        )
        statuses = Counter(each.status for each in handles[0].lookup("t", "r", "", 1))
        assert statuses["approved"] == 1
        current = handles[1].row("t", row.id)
        assert current is not None
        assert current.status == "approved"

    def test_close_against_claim_ends_closed_or_entered_never_both(
        self, make_ledger: Callable[[], Ledger]
    ) -> None:
        handles = [make_ledger() for _ in range(2)]

        def act(row: Row, i: int) -> object:
            if i == 0:
                return claim(handles[0], row)
            return handles[1].close("t", [row.id], "superseded", now=NOW)

        for number in range(8):
            row = approve(handles[0], propose(handles[0], "c", {"n": number}))
            claimed, closed = at_once(2, partial(act, row))
            kept = handles[0].row("t", row.id)
            assert kept is not None
            if isinstance(claimed, LedgerError):
                assert (claimed.reason, kept.status) == ("void", "void")
            else:
                assert kept.status == "claimed"
                assert closed == {row.id: kept}

    def test_records_at_once_keep_one_outcome(self, make_ledger: Callable[[], Ledger]) -> None:
        handles = [make_ledger() for _ in range(2)]
        row = approve(handles[0], propose(handles[0]))
        token = claim(handles[0], row).token
        assert token is not None
        results = at_once(
            _WORKERS,
            lambda i: handles[i % 2].record(
                "t", row.id, token, "done" if i % 2 else "failed", str(i), now=NOW
            ),
        )
        kept = handles[0].row("t", row.id)
        for result in results:
            if isinstance(result, LedgerError):
                assert result.reason == "not-claimed"
            else:
                assert result == kept

    def test_scopes_do_not_disturb_each_other(self, make_ledger: Callable[[], Ledger]) -> None:
        handles = [make_ledger() for _ in range(2)]

        def life(i: int) -> str:
            ledger, scope = handles[i % 2], f"scope {i}"
            slot = call({"n": 1}, scope=scope)
            row = approve(ledger, ledger.propose(slot, "c", {"n": 1}, now=NOW))
            token = claim(ledger, row).token
            assert token is not None
            return ledger.record(scope, row.id, token, "done", scope, now=NOW).result or ""

        assert at_once(_WORKERS, life) == [f"scope {i}" for i in range(_WORKERS)]
