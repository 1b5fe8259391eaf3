"""One call of an open turn, as a session hands it to its door."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from guardchart.gate._answers import answer_from_row
from guardchart.gate._batch import Verdict
from guardchart.gate._tools import ToolCall, shown_name

__all__ = ["Proposed", "proposed", "refreshed"]


@dataclass(frozen=True, slots=True)
class Proposed:
    """One call of the open turn, as its door is to treat it.

    Args:
        call: the call as proposed.
        status: ``run`` (enter it), ``ask`` (a person decides first), ``held`` (it follows a call
            that waits), ``denied``, or ``answered`` (closed or entered before).
        text: for ``denied`` and ``answered``: what the conversation is told.
        row: the row, None for a call without one.
        verdict: what checks 1 to 5 said.
    """

    call: ToolCall
    status: str
    text: str
    row: Any
    verdict: Verdict


def proposed(verdict: Verdict, row: Any) -> Proposed:
    """Return a call as it stands when it was judged and filed."""
    if verdict.ok:
        return Proposed(verdict.call, "run", "", row, verdict)
    text = f"error: tool {shown_name(verdict.call.name)!r} denied: {verdict.reason}"
    return Proposed(verdict.call, "denied", text, row, verdict)


def refreshed(item: Proposed, ledger: Any, now: int) -> Proposed:
    """Return a call as its row says it stands now."""
    if item.row is None:
        return item
    row = ledger.row(item.row.slot.scope, item.row.id, follow=False) or item.row
    answer = answer_from_row(row, ledger=ledger, now=now)
    if answer is not None:
        return replace(item, row=row, status="answered", text=answer.text)
    return replace(item, row=row, status="ask" if row.status == "proposed" else "run")
