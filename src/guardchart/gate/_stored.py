"""`StoredSession`: a session for doors whose state lies in a checkpoint between two hooks.

A framework's hooks may run in different processes, and again after a crash or on a fork. So the
session is made anew in each, from the stored snapshot; the turn is found again by the row ids
that were stored beside it, and outcomes travel as stored events to the hook that folds them.
Ids and events only say where to look: what they claim is compared with the ledger.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final

from guardchart.gate._answers import Answer, close_open, closing_text, follow
from guardchart.gate._batch import Verdict, lookup_verdicts
from guardchart.gate._rules import ALL, Allowed
from guardchart.gate._session import GuardSession
from guardchart.gate._tools import Registry, ToolCall, shown_name
from guardchart.gate._turn import Proposed
from guardchart.kernel import Event

__all__ = ["FOLLOWS", "StoredSession", "rowless"]

FOLLOWS: Final = (
    "it stands beside a call that may change what is allowed; propose this again after its result"
)
_MAX_EVENTS: Final = 1000
_ENTERED: Final = frozenset({"claimed", "done", "failed"})
_FITS: Final[dict[str, frozenset[str]]] = {
    "done": frozenset({"done"}),
    "failed": _ENTERED,
    "rejected": frozenset({"rejected", "void", "expired"}),
    "denied": frozenset({"proposed", "approved", "rejected", "void", "expired", "edited"}),
}


def rowless(registry: Registry, call: ToolCall) -> bool:
    """Return whether a call's tool is one that runs without a row, if it may run."""
    tool = registry.get(call.name) if type(call.name) is str else None
    return tool is not None and not tool.side_effect and not tool.requires_approval


class StoredSession(GuardSession):
    """A `GuardSession` for calls that run side by side, in a framework that checkpoints.

    The calls of one turn all see the state in which the turn began. After one that may move the
    chart, the rest of the turn is refused: it has to be proposed again.

    Attributes:
        told: the outcome events that were sent to the chart by this object, as JSON data.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        self.told: list[dict[str, Any]] = []
        super().__init__(*args, **options)

    def restore(
        self, calls: Sequence[ToolCall], *, row_ids: Sequence[str | None] | None = None
    ) -> list[Proposed]:
        """Take a parked turn again: by row id where that fits, else by the place of each call.

        Args:
            calls: the turn's calls, or some of them, as the stored conversation has them.
            row_ids: the row ids that were stored with them; an edit is found by the id of the
                call that was edited.

        Returns:
            One item a call; a call whose row is not as it was proposed is ``denied``.
        """
        with self._lock:
            self._overdue()
            # A row that was entered is answered whatever the state allows now.
            verdicts = self._assess(calls, (), ALL)
            ids: Sequence[str | None] = row_ids or [None] * len(calls)
            rows = [self._by_id(v, each) for v, each in zip(verdicts, ids, strict=True)]
            if any(v.needs_row and row is None for v, row in zip(verdicts, rows, strict=True)):
                found = lookup_verdicts(
                    self.ledger,
                    self.host,
                    self._snapshot.batch_no,
                    verdicts,
                    row_ids=row_ids,
                    now=self._ms(),
                )
                rows = [row or other for row, other in zip(rows, found, strict=True)]
            judged = [_with_row(v, row) for v, row in zip(verdicts, rows, strict=True)]
            self._open()
            self._keep(judged, rows)
            self._spent.update(call.id for call in calls if type(call.id) is str)
            return self.turn()

    def take(self, call: ToolCall) -> None:
        """Open a turn of one call of a stored conversation that has no row and is `rowless`.

        There is nothing to look up, and nothing is judged yet: that is done when it is entered.
        """
        with self._lock:
            self._open()
            self._keep([Verdict(call, True)], [None])
            self._spend([call])

    def judge(self, calls: Sequence[ToolCall]) -> list[Proposed]:
        """Open a turn that nobody proposed: judged as of now, no row filed or looked up."""
        with self._lock:
            self._overdue()
            verdicts = self._assess(calls, ())
            self._open()
            self._keep(verdicts, [None] * len(calls))
            return self.turn()

    def refusals(self, calls: Sequence[ToolCall]) -> dict[str, str]:
        """Return why calls of a stored turn fail checks 1 to 5 as of now, by call id."""
        with self._lock:
            self._overdue()
            verdicts = self._assess(calls, ())
            return {v.call.id: v.reason for v in verdicts if not v.ok and v.reason != FOLLOWS}

    def close_rows(self, row_ids: Iterable[str], reason: str) -> dict[str, Answer]:
        """Close some calls of the turn; return what each is to be told."""
        with self._lock:
            return close_open(self.ledger, self.host.scope, row_ids, reason, now=self._ms())

    def late(self, row: Any) -> bool:
        """Return whether the time to decide about a row has passed."""
        return row.decide_by is not None and self._ms() > row.decide_by

    def stored_events(self, since: int, row_id: str | None) -> list[dict[str, Any]]:
        """Return the events told since then, with what `fold` compares them by."""
        extra = {"batch": self._snapshot.batch_no, "row": row_id}
        return [{**each, **extra} for each in self.told[since:]]

    def fold(self, events: Any) -> bool:
        """Step the chart by stored outcomes, in order.

        An event counts if it is of the current batch and names a registered tool, and where the
        tool has a side effect only if the ledger's row bears it out. Another one is dropped.

        Returns:
            Whether the chart took anything.
        """
        with self._lock:
            before = self._snapshot
            seen: set[tuple[str, Any]] = set()
            for each in list(events or ())[:_MAX_EVENTS]:
                event = self._vouched(each)
                if event is None or (event.type, event.payload["id"]) in seen:
                    continue
                seen.add((event.type, event.payload["id"]))
                self._overdue()
                self._step(event)
            return self._snapshot is not before

    # Inside

    def _assess(
        self, calls: Sequence[ToolCall], spent: Collection[str], allowed: Allowed | None = None
    ) -> list[Verdict]:
        verdicts = super()._assess(calls, spent, allowed)
        if allowed is not None:
            return verdicts
        moved = False
        for at, verdict in enumerate(verdicts):
            if moved and verdict.ok:
                verdicts[at] = verdict._replace(ok=False, reason=FOLLOWS)
            moved = moved or (verdict.ok and self.moves_chart(verdict.call.name))
        return verdicts

    def _outcome(self, verb: str, call: ToolCall, payload: dict[str, Any]) -> Any:
        if payload.get("reason") == FOLLOWS:
            return None  # put off, not denied: the chart has nothing to learn from it
        name = shown_name(call.name)
        if name != "*" and not self.moves_chart(name):
            return None  # no state names any outcome of this tool
        return super()._outcome(verb, call, payload)

    def _step(self, event: Any) -> Any:
        if isinstance(event, Event) and event.type.startswith("tool."):
            self.told.append({"type": event.type, **event.payload})
        return super()._step(event)

    def _by_id(self, verdict: Verdict, row_id: str | None) -> Any:
        if type(row_id) is not str or not verdict.ok:
            return None
        row = self.ledger.row(self.host.scope, row_id, follow=False)
        if row is None or row.slot.tool != verdict.call.name:
            return None
        host = self.host
        if row.slot[:4] != (host.scope, host.run, host.agent, self._snapshot.batch_no):
            return None
        return row if verdict.digest in {row.digest, follow(self.ledger, row).digest} else None

    def _vouched(self, stored: Any) -> Event | None:
        if not isinstance(stored, Mapping) or stored.get("batch") != self._snapshot.batch_no:
            return None
        kind = stored.get("type")
        head, _, rest = kind.partition(".") if isinstance(kind, str) else ("", "", "")
        verb, _, name = rest.partition(".")
        tool = self.registry.get(name)
        if head != "tool" or verb not in _FITS or tool is None:
            return None
        if type(stored.get("id")) is not str:
            return None
        row_id = stored.get("row")
        if tool.side_effect or tool.requires_approval or row_id is not None:
            row = self.ledger.row(self.host.scope, row_id) if type(row_id) is str else None
            fits = row is not None and row.slot.tool == name and row.status in _FITS[verb]
            if not fits and not (verb == "denied" and row_id is None):
                return None
        payload = {key: stored[key] for key in ("id", "reason", "error") if key in stored}
        if tool.trusted and "result" in stored:
            payload["result"] = stored["result"]
        return Event(str(kind), payload)


def _with_row(verdict: Verdict, row: Any) -> Verdict:
    if row is not None:
        # A row that was filed is claimed, also where the state asks for none any more.
        asked = verdict.needs_approval or row.status == "proposed"
        return verdict._replace(needs_row=True, needs_approval=asked)
    if verdict.ok and verdict.needs_row:
        return verdict._replace(ok=False, reason=closing_text("tampered"))
    return verdict
