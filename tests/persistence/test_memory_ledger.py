"""InMemoryLedger: bounded, and safe about what it dropped."""

from __future__ import annotations

import pytest

from guardchart.errors import LedgerError
from guardchart.persistence import (
    Decision,
    InMemoryLedger,
    Proposal,
    Slot,
    default_ledger,
    owner_id,
)

NOW = 1_000_000


def slot(batch_no, digest="d", scope="t"):
    return Slot(scope, "r", "", batch_no, "pay", digest)


def run(ledger, where, model_id="c"):
    row = ledger.propose(where, model_id, {"n": 1}, now=NOW)
    ledger.decide(where.scope, {row.id: Decision("approve")}, now=NOW)
    token = ledger.claim(where.scope, row.id, where.digest, owner=owner_id(), now=NOW).token
    return ledger.record(where.scope, row.id, token, "done", "ok", now=NOW)


def reason(verb, *args, **named):
    with pytest.raises(LedgerError) as caught:
        verb(*args, **named)
    return caught.value.reason


def test_the_default_ledger_is_one_a_process():
    assert default_ledger() is default_ledger()
    assert isinstance(default_ledger(), InMemoryLedger)


def test_a_bound_below_one_is_refused():
    with pytest.raises(ValueError, match="max_rows"):
        InMemoryLedger(max_rows=0)


def test_rows_stay_bounded_and_the_oldest_batches_go_first():
    ledger = InMemoryLedger(max_rows=20)
    for batch_no in range(1, 200):
        run(ledger, slot(batch_no), f"c{batch_no}")
        assert len(ledger) <= 20
    assert ledger.slot_row(slot(1)) is None
    assert ledger.slot_row(slot(199)).status == "done"


def test_open_and_claimed_rows_are_never_dropped():
    ledger = InMemoryLedger(max_rows=10)
    for batch_no in range(1, 31):
        ledger.propose(slot(batch_no), "c", {}, now=NOW)
    row = ledger.propose(slot(31), "x", {}, approve_until=NOW, now=NOW)
    token = ledger.claim("t", row.id, "d", owner=owner_id(), now=NOW).token
    for batch_no in range(32, 90):
        run(ledger, slot(batch_no))
    assert len(ledger.pending()) == 30
    assert ledger.record("t", row.id, token, "done", "ok", now=NOW).status == "done"


def test_a_dropped_call_is_refused_and_never_entered_anew():
    ledger = InMemoryLedger(max_rows=10)
    for batch_no in range(1, 40):
        run(ledger, slot(batch_no), f"c{batch_no}")
    gone = slot(1)
    assert reason(ledger.propose, gone, "c1", {"n": 1}, now=NOW) == "evicted"
    assert reason(ledger.propose, slot(1, "other"), "c1", {"n": 1}, now=NOW) == "evicted"
    restored = Proposal(slot=gone, model_id="c1", arguments={}, row_id="c1")
    assert reason(ledger.adopt, [restored], now=NOW) == "unproposed"
    approve = {"c1": Decision("approve", "d")}
    assert reason(ledger.decide, "t", approve, now=NOW, again=True) == "unproposed"
    assert reason(ledger.claim, "t", "c1", "d", owner="o", now=NOW) == "unproposed"
    assert run(ledger, slot(40), "c40").status == "done"


def test_the_newest_batch_of_a_quiet_conversation_is_not_taken_over_once_dropped():
    ledger = InMemoryLedger(max_rows=10)
    run(ledger, slot(7, scope="quiet"))
    for batch_no in range(1, 40):
        run(ledger, slot(batch_no))
    restored = Proposal(slot=slot(7, scope="quiet"), model_id="c", arguments={}, row_id="c")
    assert reason(ledger.adopt, [restored], now=NOW) == "unproposed"


def test_ids_of_dropped_rows_are_not_given_again():
    ledger = InMemoryLedger(max_rows=10)
    ids = [run(ledger, slot(batch_no), "c").id for batch_no in range(1, 60)]
    assert len(set(ids)) == len(ids)
    assert ids[0] == "c"


def test_a_refused_batch_leaves_no_trace_in_any_index():
    ledger = InMemoryLedger()
    good = Proposal(slot=slot(3), model_id="c", arguments={}, row_id="a")
    bad = Proposal(slot=slot(4), model_id="c", arguments={}, row_id="b")
    assert reason(ledger.adopt, [good, bad], now=NOW) == "mismatch"
    assert len(ledger) == 0
    assert ledger.pending() == []
    assert ledger.lookup("t", "r", "", 3) == []
    [row] = ledger.adopt([good], now=NOW)
    assert row.id == "a"
    assert ledger.propose(slot(1), "c", {}, now=NOW).id == "c-2"


def test_after_a_restart_only_a_newer_batch_is_taken_over():
    ledger = InMemoryLedger()
    old = Proposal(slot=slot(5), model_id="c", arguments={}, row_id="c")
    [row] = ledger.adopt([old], now=NOW)
    assert row.status == "proposed"
    fork = Proposal(slot=slot(5, "edited"), model_id="c", arguments={}, row_id="c")
    assert reason(ledger.adopt, [fork], now=NOW) == "mismatch"
    for batch_no in (4, 5):
        older = Proposal(slot=slot(batch_no, "x"), model_id="x", arguments={}, row_id="x")
        assert reason(ledger.adopt, [older], now=NOW) == "unproposed"
    elsewhere = Proposal(slot=slot(1, scope="u"), model_id="x", arguments={}, row_id="x")
    assert ledger.adopt([elsewhere], now=NOW)[0].id == "x"
