"""The rules a ledger's rows follow, written once: pure functions from rows to rows.

A storage only finds and writes rows inside a transaction (``RuleLedger``); which change is
right is decided here. A refusal is a ``LedgerError`` and changes nothing.

==================  =======================================================================
row class           what a decision does
==================  =======================================================================
open                approve, reject, edit, close as they say; late ones are refused
closed, not entered reject is fine; approve and edit need ``again`` and the digest
entered             answered with the row as it is; only edit with ``again`` opens a new row
==================  =======================================================================

An edit closes the row (``edited``, pointing to its child) and approves a child with the new
digest. The original and its edits are one family with one row a digest, so an edit made
twice is one row, and an ``edited`` row leads, pointer by pointer, to the one that counts:
each pointer was set later than the one before it, so there is no cycle.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Literal, NamedTuple, NoReturn

from guardchart.errors import LedgerError
from guardchart.persistence._rows import (
    ENTRY_S,
    MAX_NOT_SENT,
    Claim,
    Decision,
    Proposal,
    ReleaseReason,
    Row,
)

_REMEDY = {
    "unproposed": "no such row: only calls that were proposed here can be decided or run",
    "digest": "the digest does not fit the row: look at the pending call again",
    "late": "the deadline for this decision has passed: fire the human timeout",
    "rejected": "the call was rejected: decide again=True with its digest to reopen it",
    "edited": "the call was edited: decide about the edit, or again=True with the old digest",
    "void": "the call was closed: decide again=True with its digest to reopen it",
    "expired": "the approval or its question has expired: the call has to be approved anew",
    "not-approved": "nobody has approved the call yet",
    "arguments": "an edit needs both arguments and new_digest",
    "decision": "a decision is one of approve, reject, edit, close",
    "token": "only the claimant, with the token of its claim, can do this",
    "not-claimed": "the row is not claimed (any more)",
    "releases": "released as not sent three times already: record it as failed",
    "early": "the tool may still be running: resolve after its timeout",
    "outcome": "an outcome is done or failed",
    "mismatch": "the call differs from its row: no row was changed",
    "ambiguous": "two of the ids name one call",
    "evicted": "this batch was dropped for memory: use SQLiteLedger, or raise max_rows",
    "scope": "all calls of one batch share one scope",
    "slot": "a slot or id holds a value no ledger can keep (text with NUL or surrogates, "
    "or a number out of range)",
}


def refuse(reason: str, row_id: str | None = None) -> NoReturn:
    """Raise the ``LedgerError`` for ``reason``, with its remedy."""
    raise LedgerError(_REMEDY[reason], reason=reason, row_id=row_id)


class Act(NamedTuple):
    """Who decides, when, and whether on purpose against an earlier decision."""

    by: str | None
    again: bool
    now: int
    use_by: int


class Change(NamedTuple):
    """The row to answer with, and the rows to write for it."""

    answer: Row
    updates: tuple[Row, ...] = ()
    insert: Row | None = None


def follow(row: Row, get: Callable[[str], Row | None]) -> Row:
    """Return the row that counts for ``row``: itself, or where its edits lead.

    Args:
        get: finds a row of the same scope by id.
    """
    while row.status == "edited" and row.child_id is not None:
        child = get(row.child_id)
        if child is None:
            break
        row = child
    return row


def root_id(row: Row) -> str:
    """Return the id of the unedited original of the row's family."""
    return row.parent_id if row.parent_id is not None else row.id


# Proposing


def new_row(proposal: Proposal, row_id: str, now: int) -> Row:
    """Return the row that a proposal of an unseen slot makes."""
    row = Row(
        id=row_id,
        slot=proposal.slot,
        model_id=proposal.model_id,
        arguments=copy.deepcopy(dict(proposal.arguments)),
        decide_by=proposal.decide_by,
        timeout_s=proposal.timeout_s,
        created_at=now,
        updated_at=now,
    )
    return repropose(row, proposal, now)


def repropose(row: Row, proposal: Proposal, now: int) -> Row:
    """Return the row a slot has after it was proposed again.

    Arguments, digest and every decision stay. A question nobody answered is asked anew, so
    its ``decide_by`` becomes the later of the two; a policy approval is given, or renewed.
    """
    if row.status == "proposed" and _later(proposal.decide_by, row.decide_by):
        row = row._replace(decide_by=proposal.decide_by, updated_at=now)
    if proposal.approve_until is None:
        return row
    renewed = row.status == "approved" and row.by == "policy" and _stale(row, now)
    if row.status == "proposed" or renewed:
        return _approved(row, Act("policy", False, now, proposal.approve_until))
    return row


def _later(a: int | None, b: int | None) -> bool:
    return b is not None and (a is None or a > b)


# Deciding


def decide_row(
    named: Row,
    current: Row,
    twin: Row | None,
    decision: Decision,
    act: Act,
    new_id: Callable[[], str],
) -> Change:
    """Return what one decision does.

    Args:
        named: the row the decision names.
        current: ``follow(named)``.
        twin: for an edit, the row of the same family with the new digest, where there is one.
        new_id: a fresh id for the row of an edit; called at most once.

    Raises:
        LedgerError: ``digest``, ``late``, ``arguments``, ``decision``, or the closed row's
            status (``rejected``, ``edited``, ``void``, ``expired``). Nothing is to be written.
    """
    if decision.digest is not None and decision.digest not in (current.digest, named.digest):
        refuse("digest", named.id)
    match decision.decision:
        case "approve":
            return _approve(named, current, decision, act)
        case "reject":
            return _reject(current, decision, act)
        case "edit":
            return _edit(current, twin, decision, act, new_id)
        case "close":
            return close_row(current, "void", decision.reason, act.now)
    refuse("decision", named.id)


def _approve(named: Row, current: Row, decision: Decision, act: Act) -> Change:
    if current is not named and decision.digest != current.digest:
        # The reviewer looked at the original of a call that somebody has edited since.
        if act.again and decision.digest == named.digest:
            reopened = _approved(named, act)
            edit = close_row(current, "void", "superseded", act.now)
            return Change(reopened, (reopened, *edit.updates))
        if current.entered:
            return Change(current)
        refuse("edited", named.id)
    if current.entered or (current.status == "approved" and not _stale(current, act.now)):
        return Change(current)
    if current.open:
        _in_time(current, act)
    else:
        _deliberate(current, decision, act)
    approved = _approved(current, act)
    return Change(approved, (approved,))


def _reject(current: Row, decision: Decision, act: Act) -> Change:
    if current.entered or current.status == "rejected":
        return Change(current)
    if current.status == "proposed":
        _in_time(current, act)
    rejected = current._replace(
        status="rejected",
        by=act.by,
        reason=None if current.forgotten else decision.reason,
        use_by=None,
        updated_at=act.now,
    )
    return Change(rejected, (rejected,))


def _edit(
    current: Row, twin: Row | None, decision: Decision, act: Act, new_id: Callable[[], str]
) -> Change:
    if decision.arguments is None or not decision.new_digest:
        refuse("arguments", current.id)
    if decision.new_digest == current.digest:
        return _approve(current, current, decision, act)
    if current.entered:
        if not act.again:
            return Change(current)
        _deliberate(current, decision, act)
    elif current.open:
        _in_time(current, act)
    else:
        _deliberate(current, decision, act)
    updates: tuple[Row, ...] = ()
    insert = None
    if twin is None:
        child = insert = _child(current, decision, act, new_id())
    elif twin.entered or (twin.status == "approved" and not _stale(twin, act.now)):
        child = twin
    else:
        if twin.closed:
            _deliberate(twin, decision, act)
        child = _approved(twin, act)
        updates = (child,)
    if not current.entered:
        edited = current._replace(
            status="edited", by=act.by, child_id=child.id, use_by=None, updated_at=act.now
        )
        updates = (edited, *updates)
    return Change(child, updates, insert)


def _child(current: Row, decision: Decision, act: Act, row_id: str) -> Row:
    assert decision.arguments is not None and decision.new_digest
    return Row(
        id=row_id,
        slot=current.slot._replace(digest=decision.new_digest),
        model_id=current.model_id,
        arguments=copy.deepcopy(dict(decision.arguments)),
        status="approved",
        by=act.by,
        parent_id=root_id(current),
        decide_by=current.decide_by,
        use_by=act.use_by,
        timeout_s=current.timeout_s,
        created_at=act.now,
        updated_at=act.now,
    )


def close_row(row: Row, status: Literal["void", "expired"], reason: str | None, now: int) -> Change:
    """Return what closing a row does: open rows become ``status``, all others stay."""
    if not row.open:
        return Change(row)
    closed = row._replace(
        status=status,
        reason=None if row.forgotten else reason,
        use_by=None,
        updated_at=now,
    )
    return Change(closed, (closed,))


def _approved(row: Row, act: Act) -> Row:
    return row._replace(
        status="approved",
        by=act.by,
        reason=None,
        child_id=None,
        use_by=act.use_by,
        updated_at=act.now,
    )


def _stale(row: Row, now: int) -> bool:
    return row.use_by is not None and now > row.use_by


def _in_time(row: Row, act: Act) -> None:
    if row.decide_by is not None and act.now > row.decide_by:
        refuse("late", row.id)


def _deliberate(row: Row, decision: Decision, act: Act) -> None:
    if not act.again:
        refuse(row.status, row.id)
    if decision.digest is None:
        refuse("digest", row.id)


# Running


def claim_row(row: Row, digest: str, owner: str, token: str, now: int) -> Claim:
    """Return the claim of a row: with the token, or without where it was entered before.

    Args:
        row: the row that counts (``follow``).
        digest: the digest of the arguments that will run.
        token: a fresh secret.

    Raises:
        LedgerError: ``digest``, ``not-approved``, ``rejected``, ``edited``, ``void``, or
            ``expired`` (also for an approval past its ``use_by``).
    """
    if row.digest != digest:
        refuse("digest", row.id)
    if row.entered:
        return Claim(row, None)
    if row.status == "proposed":
        refuse("not-approved", row.id)
    if row.status != "approved":
        refuse(row.status, row.id)
    if _stale(row, now):
        refuse("expired", row.id)
    claimed = row._replace(
        status="claimed", owner=owner, token=token, claimed_at=now, updated_at=now
    )
    return Claim(claimed, token)


def record_row(
    row: Row, token: str, outcome: Literal["done", "failed"], result: str, now: int
) -> Row:
    """Return the row with its outcome; the same row where this very record was made before.

    Raises:
        LedgerError: ``outcome``, ``token``, or ``not-claimed`` (released, or resolved by a
            person meanwhile).
    """
    if outcome not in ("done", "failed"):
        refuse("outcome", row.id)
    if row.status == outcome and row.token == token:
        return row
    _claimant(row, token)
    return _settled(row, outcome, result, now)


def release_row(row: Row, token: str, reason: ReleaseReason, now: int) -> Row:
    """Return the row as approved again; only ``not-sent`` counts towards ``MAX_NOT_SENT``.

    Raises:
        LedgerError: ``token``, ``not-claimed``, or ``releases``.
    """
    _claimant(row, token)
    counted = reason == "not-sent"
    if counted and row.releases >= MAX_NOT_SENT:
        refuse("releases", row.id)
    return row._replace(
        status="approved",
        owner=None,
        token=None,
        claimed_at=None,
        releases=row.releases + counted,
        updated_at=now,
    )


def resolve_row(
    row: Row, outcome: Literal["done", "failed"], result: str, by: str | None, now: int
) -> Row:
    """Return an in-doubt row with the outcome a person or a probe found.

    Raises:
        LedgerError: ``outcome``, ``not-claimed``, or ``early`` (before ``ENTRY_S`` plus the
            tool's timeout after the claim, dead owner or not).
    """
    if outcome not in ("done", "failed"):
        refuse("outcome", row.id)
    if row.status != "claimed":
        refuse("not-claimed", row.id)
    if now < (row.claimed_at or 0) + round((ENTRY_S + row.timeout_s) * 1000):
        refuse("early", row.id)
    return _settled(row, outcome, result, now)._replace(by=by, token=None)


def in_doubt_row(row: Row, now: int, alive: Callable[[str], bool]) -> bool:
    """Return whether a row is in doubt: claimed, and overdue or its owner dead.

    Args:
        alive: whether an owner may still be running.
    """
    if row.status != "claimed":
        return False
    overdue = now > (row.claimed_at or 0) + round(row.timeout_s * 1000)
    return overdue or (row.owner is not None and not alive(row.owner))


def forget_row(row: Row, now: int) -> Row:
    """Return the row without arguments, result and reason; key, status and id stay."""
    return row._replace(arguments=None, result=None, reason=None, forgotten=True, updated_at=now)


def _claimant(row: Row, token: str) -> None:
    if row.status != "claimed":
        refuse("not-claimed", row.id)
    if row.token != token:
        refuse("token", row.id)


def _settled(row: Row, outcome: Literal["done", "failed"], result: str, now: int) -> Row:
    return row._replace(status=outcome, result=None if row.forgotten else result, updated_at=now)
