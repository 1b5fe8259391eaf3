"""The ledger on paper: its rules over tuples, small enough to explore exhaustively.

Arguments are small integers that stand for their digest. There is no time here: deadlines and
timeouts are somebody else's steps. ``Rules`` says which of the protocol's rules hold; every
switch that is off is a weakened protocol, and the tests show what it breaks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

OPEN = ("proposed", "approved")
ENTERED = ("claimed", "done", "failed")


@dataclass(frozen=True)
class Rules:
    """The protocol; each field is one of its rules."""

    slot_identity: bool = True  # a call is its slot, not the id the model gave it
    run_nonce: bool = True  # a machine that starts anew has a new run
    propose_first: bool = True  # the row is made before the parked checkpoint is written
    decide_first: bool = True  # the ledger decides, all or none, before the chart moves
    tokens: bool = True  # record and release need the claimant's token
    resolve_settles: bool = True  # in doubt ends as done or failed, never as claimable
    mismatch_ends: bool = True  # a snapshot that disagrees with its rows leaves the parked state
    edit_makes_child: bool = True  # an edit is a new row, the old one keeps its digest
    follow_edits: bool = True  # who closes a call takes its text from the row that counts
    closed_needs_again: bool = True  # a plain approval does not reopen a closed row
    claim_compares: bool = True  # a claim is a compare-and-set on the row's status
    adopt: str = "no"  # "batch": unseen newer batches; "call": any unseen call; "no": none


class Slot(NamedTuple):
    run: int
    batch_no: int
    args: int


class Row(NamedTuple):
    id: str
    slot: Slot
    status: str = "proposed"
    act: object = None  # the approval it is good by
    token: int | None = None
    result: object = None
    parent: str | None = None
    child: str | None = None

    @property
    def args(self) -> int:
        return self.slot.args

    @property
    def entered(self) -> bool:
        return self.status in ENTERED


Rows = tuple[Row, ...]


class Decision(NamedTuple):
    what: str  # approve, reject, edit, close
    seen: int | None = None
    new: int | None = None


class Refused(Exception):
    """A verb that does not fit; nothing has changed."""


def find(rows: Rows, row_id: str) -> Row:
    for row in rows:
        if row.id == row_id:
            return row
    raise Refused("unproposed")


def put(rows: Rows, row: Row) -> Rows:
    return tuple(sorted((row, *(each for each in rows if each.id != row.id))))


def current(rows: Rows, row: Row) -> Row:
    while row.status == "edited":
        row = find(rows, row.child)
    return row


def fresh_id(rows: Rows, model_id: str) -> str:
    taken = {row.id for row in rows}
    n = 1
    while (row_id := model_id if n == 1 else f"{model_id}-{n}") in taken:
        n += 1
    return row_id


def propose(rows: Rows, slot: Slot, model_id: str, rules: Rules) -> tuple[Rows, Row]:
    for row in rows:
        if row.parent is None and row.slot == slot if rules.slot_identity else row.id == model_id:
            return rows, row
    row = Row(fresh_id(rows, model_id), slot)
    return put(rows, row), row


def adopt(rows: Rows, slot: Slot, row_id: str, rules: Rules) -> tuple[Rows, Row]:
    """Return the row of a restored call, taken over where the rules allow it."""
    batch = [row for row in rows if row.slot[:2] == slot[:2]]
    newest = max((row.slot.batch_no for row in rows if row.slot.run == slot.run), default=0)
    known = any(row.id == row_id for row in rows)
    if rules.adopt == "batch" and not batch and slot.batch_no > newest:
        if known:
            raise Refused("mismatch")
        return put(rows, Row(row_id, slot)), Row(row_id, slot)
    if rules.adopt == "call" and not any(row.slot == slot for row in rows):
        row = Row(fresh_id(rows, row_id), slot)
        return put(rows, row), row
    if rules.adopt == "call":
        return rows, next(row for row in rows if row.slot == slot)
    row = find(rows, row_id)
    if row.slot != slot:
        raise Refused("mismatch")
    return rows, row


def decide(
    rows: Rows, decisions: Mapping[str, Decision], act: object, again: bool, rules: Rules
) -> tuple[Rows, dict[str, Row]]:
    answers = {}
    for row_id, decision in decisions.items():
        rows, answers[row_id] = _decide(rows, find(rows, row_id), decision, act, again, rules)
    return rows, answers


def _decide(
    rows: Rows, named: Row, decision: Decision, act: object, again: bool, rules: Rules
) -> tuple[Rows, Row]:
    what, seen, new = decision
    row = current(rows, named)
    if seen is not None and seen not in (row.args, named.args):
        raise Refused("digest")
    if what == "edit" and rules.edit_makes_child and new != row.args:
        return _edit(rows, row, decision, act, again)
    if what in ("approve", "edit"):
        if what == "approve" and row.id != named.id and seen != row.args:
            if again and seen == named.args:
                if row.status in OPEN:
                    rows = put(rows, row._replace(status="void"))
                named = named._replace(status="approved", act=act, child=None)
                return put(rows, named), named
            if row.entered:
                return rows, row
            raise Refused("edited")
        if row.entered:
            return rows, row
        if row.status not in OPEN and rules.closed_needs_again:
            _deliberate(row, seen, again)
        if row.status != "approved" or what == "edit":
            slot = row.slot if what == "approve" else row.slot._replace(args=new)
            row = row._replace(status="approved", act=act, slot=slot)
        return put(rows, row), row
    if row.entered or (what == "close" and row.status not in OPEN):
        return rows, row
    row = row._replace(status="rejected" if what == "reject" else "void")
    return put(rows, row), row


def _edit(rows: Rows, row: Row, decision: Decision, act: object, again: bool) -> tuple[Rows, Row]:
    if row.entered and not again:
        return rows, row
    if row.status not in OPEN:
        _deliberate(row, decision.seen, again)
    root = row.parent or row.id
    family = [each for each in rows if root in (each.id, each.parent)]
    child = next((each for each in family if each.args == decision.new), None)
    if child is None:
        model_id = root.split("-")[0]
        slot = row.slot._replace(args=decision.new)
        child = Row(fresh_id(rows, model_id), slot, "approved", act, parent=root)
    elif not child.entered and child.status != "approved":
        _deliberate(child, decision.seen, again)
        child = child._replace(status="approved", act=act, child=None)
    rows = put(rows, child)
    if not row.entered:
        rows = put(rows, row._replace(status="edited", child=child.id))
    return rows, child


def _deliberate(row: Row, seen: int | None, again: bool) -> None:
    if not again:
        raise Refused(row.status)
    if seen is None:
        raise Refused("digest")


def claim(rows: Rows, row_id: str, args: int, token: int, rules: Rules) -> tuple[Rows, Row, bool]:
    """Return the rows, the row that counts, and whether this claim may enter."""
    named = find(rows, row_id)
    row = current(rows, named)
    if row is not named and args == named.args:
        raise Refused("edited")
    if row.args != args:
        raise Refused("digest")
    if row.entered and (rules.claim_compares or row.status != "claimed"):
        return rows, row, False
    if row.status not in ("approved", "claimed"):
        raise Refused("not-approved" if row.status == "proposed" else row.status)
    row = row._replace(status="claimed", token=token)
    return put(rows, row), row, True


def record(
    rows: Rows, row_id: str, token: int, outcome: str, result: object, rules: Rules
) -> tuple[Rows, Row]:
    row = _held(find(rows, row_id), token, rules)
    row = row._replace(status=outcome, result=result)
    return put(rows, row), row


def release(rows: Rows, row_id: str, token: int, rules: Rules) -> tuple[Rows, Row]:
    row = _held(find(rows, row_id), token, rules)
    row = row._replace(status="approved", token=None)
    return put(rows, row), row


def _held(row: Row, token: int, rules: Rules) -> Row:
    if row.status != "claimed":
        raise Refused("not-claimed")
    if rules.tokens and row.token != token:
        raise Refused("token")
    return row


def resolve(
    rows: Rows, row_id: str, outcome: str, result: object, rules: Rules
) -> tuple[Rows, Row]:
    row = find(rows, row_id)
    if row.status != "claimed":
        raise Refused("not-claimed")
    status = outcome if rules.resolve_settles else "approved"
    row = row._replace(status=status, result=result, token=None)
    return put(rows, row), row
