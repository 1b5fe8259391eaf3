"""What a conversation is told of a call, read from the call's row.

Whoever closes a call takes its text from here and not from his own event: the ledger may know
better. Nothing in this module runs, claims or decides.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from guardchart._redact import scrub_text

__all__ = ["Answer", "Outcome", "answer_from_row", "close_open", "closing_text", "follow"]

EDITED_NOTE = "(ran with arguments that a reviewer edited) "
IN_DOUBT = (
    "error: this call was started and its outcome is not known (in doubt); "
    "do not repeat it, a person has to find out what happened"
)
_CLOSING = {
    "superseded": "not run: superseded by new input",
    "expired": "not run: no human decision in time",
    "timeout": "not run: the turn timed out",
    "rejected": "not run: rejected by a reviewer",
    "denied": "not run: another call of this turn was denied",
    "failed": "not run: another call of this turn failed",
    "tampered": "refused: the state of this conversation does not match its ledger",
    "void": "not run: the call was closed",
}


@dataclass(frozen=True, slots=True)
class Answer:
    """The recorded fate of a call.

    Args:
        text: what the conversation gets.
        status: ``done``, ``failed``, ``in_doubt``, ``rejected``, ``void`` or ``expired``; from
            `authorise` also ``running``, while another claimant is in time.
        row_id: the row it was read from (the child's, after an edit).
    """

    text: str
    status: str
    row_id: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one call in this process.

    Args:
        id: the call's id.
        tool: the tool's name, as far as it may be shown.
        status: ``done``, ``failed``, ``timeout``, ``denied``, ``tampered``, ``not_sent``,
            ``rejected``, ``void``, ``expired`` or ``in_doubt``.
        text: what the conversation gets: masked, cut at ``max_output_chars``.
        value: what the body returned, where it ran now and returned; else None.
        error: the exception, where there was one; never shown to a model.
        row_id: the row, None for a call without one.
        entered: whether the body was entered now, in this process.
    """

    id: str
    tool: str
    status: str
    text: str
    value: Any = None
    error: BaseException | None = None
    row_id: str | None = None
    entered: bool = False

    @property
    def ok(self) -> bool:
        """Whether the call has a result."""
        return self.status == "done"


def closing_text(reason: str) -> str:
    """Return what a call without a row is told when its batch is closed for a reason.

    >>> closing_text("superseded")
    'not run: superseded by new input'
    """
    return _CLOSING.get(reason, _CLOSING["void"])


def follow(ledger: Any, row: Any) -> Any:
    """Return the row that stands for a call now: the edit's child, followed to the end.

    Args:
        ledger: where the rows are.
        row: a row, or None.

    Returns:
        The row itself where nobody edited it; a child that cannot be found leaves its parent.
    """
    if row is None or row.status != "edited":
        return row
    return ledger.row(row.slot.scope, row.id) or row


def _stale(row: Any, now: int | None) -> bool:
    if now is None or row.claimed_at is None:
        return False
    return bool(now - row.claimed_at > row.timeout_s * 1000)


def answer_from_row(row: Any, *, ledger: Any = None, now: int | None = None) -> Answer | None:
    """Return the recorded fate of a call, or None while it is open or running.

    Args:
        row: the call's row; None gives None.
        ledger: to follow an edited row to its child; without it an edited row is void.
        now: host clock, epoch milliseconds; a claim older than the tool's timeout is in doubt.

    Returns:
        None for a row that is ``proposed`` or ``approved``, or ``claimed`` and still in time.
    """
    if row is None:
        return None
    edited = row.parent_id is not None
    if row.status == "edited" and ledger is not None:
        child = follow(ledger, row)
        edited, row = edited or child is not row, child
    note = EDITED_NOTE if edited else ""
    status = row.status
    if status == "done":
        return Answer(note + (row.result or ""), "done", row.id)
    if status == "failed":
        return Answer(note + (row.result or "error: the tool failed"), "failed", row.id)
    if status == "claimed":
        return Answer(IN_DOUBT, "in_doubt", row.id) if _stale(row, now) else None
    if status == "rejected":
        text = _CLOSING["rejected"]
        if row.reason:
            text += f": {scrub_text(str(row.reason))[:500]}"
        return Answer(text, "rejected", row.id)
    if status == "expired":
        return Answer(_CLOSING["expired"], "expired", row.id)
    if status in ("void", "edited"):
        return Answer(closing_text(row.reason or "void"), "void", row.id)
    return None


def close_open(
    ledger: Any, scope: str, row_ids: Iterable[str], reason: str, *, now: int
) -> dict[str, Answer]:
    """Close the open rows of a batch and return what each of its calls is to be told.

    Args:
        ledger: where the rows are.
        scope: their scope.
        row_ids: the rows of the calls that have no result yet; no other row is touched.
        reason: ``superseded``, ``expired``, ``timeout``, ``denied``, ``failed``, ``void``.
        now: host clock, epoch milliseconds.

    Returns:
        An answer for every id. One whose row was entered gets its recorded outcome, or says
        that it is in doubt; a call is never told that it did not run while it did.
    """
    ids = list(row_ids)
    if not ids:
        return {}
    status = "expired" if reason == "expired" else "void"
    closed = ledger.close(scope, ids, reason, status=status, now=now)
    answers: dict[str, Answer] = {}
    for row_id in ids:
        row = closed.get(row_id)
        if row is None:
            answers[row_id] = Answer(closing_text(reason), "void", row_id)
            continue
        answer = answer_from_row(row, ledger=ledger, now=now)
        answers[row_id] = answer or Answer(IN_DOUBT, "in_doubt", row.id)
    return answers
