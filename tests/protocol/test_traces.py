"""The real ledgers answer as the paper one does, along random ways through the models."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from guardchart.errors import LedgerError
from guardchart.persistence import (
    Decision,
    InMemoryLedger,
    Proposal,
    Slot,
    SQLiteLedger,
    _rules,
)
from tests.protocol import paper
from tests.protocol.conversation import Conversation
from tests.protocol.deciders import CALLS, KINDS, Deciders
from tests.protocol.explore import Verb, walk
from tests.protocol.paper import Rules

FAR = 10**12


def models(rules):
    everything = dict.fromkeys(
        ("crashes", "edits", "resets", "resolves", "inputs", "unsent", "forks"), 1
    )
    return [
        Deciders(
            rules=rules,
            runs=6,
            kinds=tuple(KINDS),
            again=("approve", "edit"),
            crashes=2,
            failing=True,
        ),
        Conversation(rules=rules, births=3, acts=3, deliveries=3, **everything),
        Conversation(rules=rules, births=2, acts=3, deliveries=4, unsent=2, resolves=1),
        Conversation(rules=rules, births=3, acts=0, policy=True, fresh_ids=True, crashes=1),
    ]


class Mirror:
    """Makes the verbs of one trace on a real ledger and compares every answer and row."""

    def __init__(self, ledger, scope, seen):
        self.ledger, self.scope, self.seen = ledger, scope, seen
        self.now = 1_000_000
        self.tokens = {}

    def slot(self, slot):
        return Slot(self.scope, str(slot.run), "", slot.batch_no, "pay", f"d{slot.args}")

    def follow(self, verb: Verb):
        self.now += 1
        try:
            answer = self.shape(getattr(self, f"_{verb.name}")(**verb.given))
        except LedgerError as refusal:
            answer = refusal.reason
        expected = self.shape(verb.answer)
        assert answer == expected, verb
        self.seen[verb.name, expected if isinstance(expected, str) else "ok"] += 1
        batches = {row.slot[:2] for row in verb.rows}
        kept = [
            self.shape(row)
            for run, batch_no in batches
            for row in self.ledger.lookup(self.scope, str(run), "", batch_no)
        ]
        assert sorted(kept) == sorted(self.shape(row) for row in verb.rows), verb

    def shape(self, value):
        if isinstance(value, str):
            return value
        if isinstance(value, dict):
            return {key: self.shape(row) for key, row in value.items()}
        if isinstance(value, paper.Row):
            slot = self.slot(value.slot)
            return value.id, slot, value.status, value.parent or "", value.child or ""
        return value.id, value.slot, value.status, value.parent_id or "", value.child_id or ""

    def _propose(self, slot, model_id, policy=False):
        return self.ledger.propose(
            self.slot(slot),
            model_id,
            {"args": slot.args},
            timeout_s=0,
            approve_until=FAR if policy else None,
            now=self.now,
        )

    def _adopt(self, slot, row_id):
        proposal = Proposal(
            slot=self.slot(slot),
            model_id=row_id,
            arguments={"args": slot.args},
            timeout_s=0,
            row_id=row_id,
        )
        return self.ledger.adopt([proposal], now=self.now)[0]

    def _decide(self, decisions, again):
        real = {
            row_id: Decision(
                each.what,
                None if each.seen is None else f"d{each.seen}",
                None if each.new is None else {"args": each.new},
                None if each.new is None else f"d{each.new}",
            )
            for row_id, each in decisions.items()
        }
        return self.ledger.decide(self.scope, real, "somebody", again=again, now=self.now)

    def _close(self, row_id):
        return self.ledger.close(self.scope, [row_id], "superseded", now=self.now)

    def _claim(self, row_id, args, token):
        row, secret = self.ledger.claim(
            self.scope, row_id, f"d{args}", owner="somewhere else", now=self.now
        )
        if secret is not None:
            self.tokens[token] = secret
        return row

    def _record(self, row_id, token, outcome):
        return self.ledger.record(
            self.scope, row_id, self.tokens[token], outcome, "a result", now=self.now
        )

    def _release(self, row_id, token):
        return self.ledger.release(
            self.scope, row_id, self.tokens[token], reason="not-sent", now=self.now
        )

    def _resolve(self, row_id, outcome):
        self.now += 10_000
        return self.ledger.resolve(
            self.scope, row_id, outcome, "found out", by="somebody", now=self.now
        )


def drive(ledger, rules, walks, seed):
    """Follow random traces; return how often each verb met each answer."""
    seen = Counter()
    rng = random.Random(seed)
    for model in models(rules):
        for number in range(walks):
            mirror = Mirror(ledger, f"{type(model).__name__} {id(model)} {number}", seen)
            if isinstance(model, Deciders):
                for call, args in CALLS.items():
                    mirror._propose(paper.Slot(0, 1, args), call)
            for verb in walk(model, rng, 60):
                mirror.follow(verb)
    return seen


MET = {
    ("propose", "ok"),
    ("adopt", "ok"),
    ("adopt", "mismatch"),
    ("decide", "ok"),
    ("decide", "edited"),
    ("decide", "rejected"),
    ("decide", "void"),
    ("close", "ok"),
    ("claim", "ok"),
    ("claim", "rejected"),
    ("claim", "void"),
    ("record", "ok"),
    ("release", "ok"),
    ("release", "token"),
    ("release", "not-claimed"),
    ("resolve", "ok"),
}


def test_the_memory_ledger_follows_the_traces():
    seen = drive(InMemoryLedger(), Rules(adopt="batch"), walks=100, seed=1)
    assert set(seen) >= MET


def test_the_sqlite_ledger_follows_the_traces(tmp_path):
    with SQLiteLedger(tmp_path / "ledger.db") as ledger:
        seen = drive(ledger, Rules(), walks=15, seed=2)
    assert sum(seen.values()) > 300


def test_the_postgres_ledger_follows_the_traces(postgres_database):
    from guardchart.persistence import PostgresLedger

    with PostgresLedger(postgres_database) as ledger:
        seen = drive(ledger, Rules(), walks=4, seed=9)
    assert sum(seen.values()) > 80


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3, 8))
def test_both_ledgers_follow_many_traces(tmp_path, seed):
    drive(InMemoryLedger(), Rules(adopt="batch"), walks=1_500, seed=seed)
    with SQLiteLedger(tmp_path / "ledger.db") as ledger:
        assert set(drive(ledger, Rules(), walks=500, seed=seed)) >= MET


@pytest.mark.parametrize(
    ("rule", "broken"),
    [
        ("_claimant", lambda row, token: None),
        ("_deliberate", lambda row, decision, act: None),
        ("follow", lambda row, get: row),
        ("resolve_row", lambda row, outcome, result, by, now: row),
    ],
)
def test_a_ledger_without_a_rule_is_caught_along_the_traces(monkeypatch, rule, broken):
    monkeypatch.setattr(_rules, rule, broken)
    with pytest.raises((AssertionError, LedgerError)):
        drive(InMemoryLedger(), Rules(adopt="batch"), walks=100, seed=1)
