"""The verbs of a ledger, written once over a storage's transactions."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Literal

from guardchart.persistence import _rules
from guardchart.persistence._ledger import Ledger, Rows
from guardchart.persistence._owner import owner_alive
from guardchart.persistence._rows import (
    APPROVAL_TTL_S,
    Claim,
    Decision,
    Proposal,
    ReleaseReason,
    Row,
    Slot,
)
from guardchart.persistence._rules import Act, Change, refuse

_INT64 = 2**63 - 1


class RuleLedger(Ledger):
    """Every verb of ``Ledger``, by the rules of ``_rules``, over a storage's transactions.

    A storage subclasses this and implements ``_transaction``; a transaction that writes must
    exclude every other one on the same scope from its first read to its commit.
    """

    durable = False
    blocking = False
    requires_proposal = True

    def _transaction(self, scope: str | None, *, write: bool) -> AbstractContextManager[Rows]:
        """Begin a transaction: committed on leaving, undone by an exception.

        Args:
            scope: the only scope it touches; None for reads across all.
        """
        raise NotImplementedError

    def _statement(self, scope: str | None) -> AbstractContextManager[Rows]:
        """Begin a read of one statement, where a storage may do without a transaction."""
        return self._transaction(scope, write=False)

    def _missing(self, rows: Rows, slot: Slot) -> None:
        """Raise where a slot without a row must not get one (rows were dropped)."""

    def _adoptable(self, rows: Rows, slot: Slot) -> bool:
        """Return whether an unproposed batch may be taken over."""
        return False

    def _new_id(self, rows: Rows, scope: str, base: str) -> str:
        """Return ``base``, or ``base-2``, ``base-3`` ..., whichever is free in the scope."""
        n = rows.count_model_id(scope, base) + 1
        while True:
            row_id = base if n == 1 else f"{base}-{n}"
            if rows.by_id(scope, row_id) is None:
                return row_id
            n += 1

    # Proposing

    def propose(
        self,
        slot: Slot,
        model_id: str,
        arguments: Mapping[str, object],
        *,
        decide_by: int | None = None,
        timeout_s: float = 30.0,
        approve_until: int | None = None,
        now: int,
    ) -> Row:
        proposal = Proposal(
            slot=slot,
            model_id=model_id,
            arguments=arguments,
            decide_by=decide_by,
            timeout_s=timeout_s,
            approve_until=approve_until,
        )
        return self.propose_batch([proposal], now=now)[0]

    def propose_batch(self, proposals: Sequence[Proposal], *, now: int) -> list[Row]:
        if not proposals:
            return []
        scope = _one_scope(proposals)
        with self._transaction(scope, write=True) as rows:
            return [self._propose(rows, scope, each, now) for each in proposals]

    def _propose(self, rows: Rows, scope: str, proposal: Proposal, now: int) -> Row:
        row = rows.by_slot(proposal.slot, None)
        if row is None:
            self._missing(rows, proposal.slot)
            model_id = clean(proposal.model_id)
            if model_id != proposal.model_id:
                proposal = replace(proposal, model_id=model_id)
            row = _rules.new_row(proposal, self._new_id(rows, scope, model_id), now)
            rows.insert(row)
            return row
        asked = _rules.repropose(row, proposal, now)
        if asked is not row:
            rows.update(asked)
        return asked

    def adopt(self, proposals: Sequence[Proposal], *, now: int) -> list[Row]:
        if not proposals:
            return []
        scope = _one_scope(proposals)
        with self._transaction(scope, write=not self.requires_proposal) as rows:
            slot = proposals[0].slot
            if not rows.of_batch(*slot[:4]) and self._adoptable(rows, slot):
                return [self._take_over(rows, scope, slot, each, now) for each in proposals]
            return [self._compare(rows, scope, each) for each in proposals]

    def _take_over(self, rows: Rows, scope: str, first: Slot, proposal: Proposal, now: int) -> Row:
        row_id = proposal.row_id
        if not row_id or not storable(row_id) or rows.by_id(scope, row_id) is not None:
            refuse("mismatch", row_id)
        if proposal.slot[:4] != first[:4] or rows.by_slot(proposal.slot, None) is not None:
            refuse("mismatch", row_id)
        row = _rules.new_row(replace(proposal, model_id=clean(proposal.model_id)), row_id, now)
        rows.insert(row)
        return row

    def _compare(self, rows: Rows, scope: str, proposal: Proposal) -> Row:
        row = _find(rows, scope, proposal.row_id or "")
        if row.slot != proposal.slot:
            refuse("mismatch", row.id)
        return row

    # Deciding

    def decide(
        self,
        scope: str,
        decisions: Mapping[str, Decision],
        by: str | None = None,
        *,
        again: bool = False,
        now: int,
        use_by: int | None = None,
    ) -> dict[str, Row]:
        if use_by is None:
            use_by = now + round(APPROVAL_TTL_S * 1000)
        act = Act(_clean_or_none(by), again, now, use_by)
        with self._transaction(scope, write=True) as rows:
            families: set[str] = set()
            answer = {}
            for row_id, decision in decisions.items():
                named = _find(rows, scope, row_id)
                family = _rules.root_id(named)
                if family in families:
                    refuse("ambiguous", row_id)
                families.add(family)
                change = self._change(rows, named, _current(rows, named), decision, act)
                _write(rows, change)
                answer[row_id] = change.answer
            return answer

    def _change(self, rows: Rows, named: Row, current: Row, decision: Decision, act: Act) -> Change:
        if decision.reason is not None:
            decision = replace(decision, reason=clean(decision.reason))
        twin = None
        if decision.decision == "edit" and decision.new_digest:
            twin = _member(rows, current, decision.new_digest)

        def new_id() -> str:
            return self._new_id(rows, current.slot.scope, current.model_id)

        return _rules.decide_row(named, current, twin, decision, act, new_id)

    def close(
        self,
        scope: str,
        row_ids: Sequence[str],
        reason: str | None = None,
        *,
        status: Literal["void", "expired"] = "void",
        now: int,
    ) -> dict[str, Row]:
        with self._transaction(scope, write=True) as rows:
            answer = {}
            for row_id in row_ids:
                row = _get(rows, scope, row_id)
                if row is not None:
                    change = _rules.close_row(
                        _current(rows, row), status, _clean_or_none(reason), now
                    )
                    _write(rows, change)
                    answer[row_id] = change.answer
            return answer

    # Running

    def claim(self, scope: str, row_id: str, digest: str, *, owner: str, now: int) -> Claim:
        with self._transaction(scope, write=True) as rows:
            named = _find(rows, scope, row_id)
            row = _current(rows, named)
            if row is not named and digest == named.digest:
                refuse("edited", row_id)
            claim = _rules.claim_row(row, digest, owner, secrets.token_hex(16), now)
            if claim.token is not None:
                rows.update(claim.row)
            return claim

    def record(
        self,
        scope: str,
        row_id: str,
        token: str,
        outcome: Literal["done", "failed"],
        result: str,
        *,
        now: int,
    ) -> Row:
        with self._transaction(scope, write=True) as rows:
            row = _find(rows, scope, row_id)
            return _put(rows, row, _rules.record_row(row, token, outcome, clean(result), now))

    def release(
        self, scope: str, row_id: str, token: str, *, reason: ReleaseReason, now: int
    ) -> Row:
        with self._transaction(scope, write=True) as rows:
            row = _find(rows, scope, row_id)
            return _put(rows, row, _rules.release_row(row, token, reason, now))

    def resolve(
        self,
        scope: str,
        row_id: str,
        outcome: Literal["done", "failed"],
        result: str,
        *,
        by: str | None,
        now: int,
    ) -> Row:
        with self._transaction(scope, write=True) as rows:
            row = _find(rows, scope, row_id)
            settled = _rules.resolve_row(row, outcome, clean(result), _clean_or_none(by), now)
            return _put(rows, row, settled)

    # Reading

    def row(self, scope: str, row_id: str, *, follow: bool = True) -> Row | None:
        with self._transaction(scope, write=False) as rows:
            row = _get(rows, scope, row_id)
            return _current(rows, row) if row is not None and follow else row

    def slot_row(self, slot: Slot) -> Row | None:
        if not storable(*slot):
            return None
        with self._statement(slot.scope) as rows:
            return rows.by_slot(slot, None)

    def lookup(self, scope: str, run: str, agent: str, batch_no: int) -> list[Row]:
        if not storable(scope, run, agent, batch_no):
            return []
        with self._statement(scope) as rows:
            return rows.of_batch(scope, run, agent, batch_no)

    def pending(self, scope: str | None = None) -> list[Row]:
        with self._statement(scope) as rows:
            return rows.of_status(scope, "proposed")

    def in_doubt(self, scope: str | None = None, *, now: int) -> list[Row]:
        with self._statement(scope) as rows:
            claimed = rows.of_status(scope, "claimed")
        return [row for row in claimed if _rules.in_doubt_row(row, now, owner_alive)]

    def forget(self, scope: str, *, now: int) -> int:
        with self._transaction(scope, write=True) as rows:
            found = rows.of_scope(scope)
            for row in found:
                if not row.forgotten:
                    rows.update(_rules.forget_row(row, now))
            return len(found)


def storable(*values: object) -> bool:
    """Return whether every storage can keep these slot fields or ids, and tell them apart."""
    for value in values:
        if isinstance(value, str):
            if (not value.isascii() or "\0" in value) and clean(value) != value:
                return False
        elif type(value) is not int or not -_INT64 <= value <= _INT64:
            return False
    return True


def clean(text: str) -> str:
    """Return text that every storage can keep: NUL and lone surrogates become U+FFFD."""
    if text.isascii():
        return text.replace("\0", "\ufffd")
    text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text.replace("\0", "\ufffd")


def _clean_or_none(text: str | None) -> str | None:
    return None if text is None else clean(text)


def _one_scope(proposals: Sequence[Proposal]) -> str:
    scope = proposals[0].slot.scope
    for proposal in proposals:
        slot = proposal.slot
        if not storable(*slot):
            refuse("slot")
        if slot.scope != scope:
            refuse("scope")
    return scope


def _get(rows: Rows, scope: str, row_id: str) -> Row | None:
    return rows.by_id(scope, row_id) if storable(scope, row_id) else None


def _find(rows: Rows, scope: str, row_id: str) -> Row:
    row = _get(rows, scope, row_id)
    if row is None:
        refuse("unproposed", row_id)
    return row


def _current(rows: Rows, row: Row) -> Row:
    scope = row.slot.scope
    return _rules.follow(row, lambda row_id: rows.by_id(scope, row_id))


def _member(rows: Rows, row: Row, digest: str) -> Row | None:
    """Return the row of the same family (original and edits) that has a digest."""
    root = rows.by_id(row.slot.scope, row.parent_id) if row.parent_id is not None else row
    if root is None or root.digest == digest:
        return root
    slot = root.slot._replace(digest=digest)
    return rows.by_slot(slot, root.id) if storable(digest) else None


def _put(rows: Rows, before: Row, after: Row) -> Row:
    if after is not before:
        rows.update(after)
    return after


def _write(rows: Rows, change: Change) -> None:
    for row in change.updates:
        rows.update(row)
    if change.insert is not None:
        rows.insert(change.insert)
