"""The ledger of one process: dictionaries under one lock, bounded, and gone with the process."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

from guardchart.persistence._ledger import Rows
from guardchart.persistence._rows import Row, Slot
from guardchart.persistence._rules import refuse
from guardchart.persistence._verbs import RuleLedger

_Group = tuple[str, str, str]
_Batch = tuple[str, str, str, int]
_Key = tuple[Slot, str | None]

_default: InMemoryLedger | None = None
_default_lock = threading.Lock()


def default_ledger() -> InMemoryLedger:
    """Return the ``InMemoryLedger`` of this process, the ledger where a host brings none.

    >>> default_ledger() is default_ledger()
    True
    """
    global _default
    with _default_lock:
        if _default is None:
            _default = InMemoryLedger()
        return _default


class InMemoryLedger(RuleLedger):
    """A ledger in this process's memory; share one among all hosts (``default_ledger``).

    It takes over a batch it has never seen (``adopt``) where the batch is newer than any it
    knows of that (scope, run, agent), so a thread parked by another process sharing the
    checkpointer can be resumed here. Within one process a call is entered at most once;
    across a restart plus a fork, or in two processes at once, it can be entered twice: use
    ``SQLiteLedger`` where that matters.

    Memory: above ``max_rows`` the oldest batches without an open or claimed row are dropped,
    arguments, results and all. Of each conversation two numbers stay, so that a dropped call
    is refused (``evicted``, ``unproposed``) and never entered anew, and no id is given twice.
    Open and claimed rows are never dropped; they may exceed the bound.

    Args:
        max_rows: the number of rows above which old batches are dropped.

    >>> from guardchart.persistence import Decision, Slot
    >>> ledger = InMemoryLedger()
    >>> row = ledger.propose(Slot("t", "r", "", 1, "pay", "d1"), "c1", {"cents": 5}, now=0)
    >>> ledger.decide("t", {row.id: Decision("approve", row.digest)}, "ann", now=1)[row.id].status
    'approved'
    >>> ledger.claim("t", row.id, row.digest, owner="me", now=2).token is None
    False
    >>> ledger.claim("t", row.id, row.digest, owner="somebody else", now=3).token is None
    True
    """

    durable = False
    blocking = False
    requires_proposal = False

    def __init__(self, *, max_rows: int = 20_000) -> None:
        if max_rows < 1:
            raise ValueError("max_rows: at least 1")
        self._max_rows = max_rows
        self._lock = threading.RLock()
        self._rows = _MemoryRows()
        self._floors: dict[_Group, int] = {}
        self._thinned: set[str] = set()

    def __len__(self) -> int:
        """Return the number of rows held."""
        return len(self._rows.ids)

    @contextmanager
    def _transaction(self, scope: str | None, *, write: bool) -> Iterator[Rows]:
        with self._lock:
            rows = self._rows
            rows.journal.clear()
            try:
                yield rows
            except BaseException:
                rows.undo()
                raise
            if write and len(rows.ids) > self._max_rows:
                self._evict()

    def _missing(self, rows: Rows, slot: Slot) -> None:
        if slot.batch_no <= self._floors.get(slot[:3], slot.batch_no - 1):
            refuse("evicted")

    def _adoptable(self, rows: Rows, slot: Slot) -> bool:
        return slot.batch_no > self._rows.newest.get(slot[:3], slot.batch_no - 1)

    def _new_id(self, rows: Rows, scope: str, base: str) -> str:
        if scope in self._thinned:  # ids of dropped rows are unknown: never give one again
            return f"{base}-{uuid.uuid4().hex[:12]}"
        return super()._new_id(rows, scope, base)

    def _evict(self) -> None:
        goal = self._max_rows - self._max_rows // 10
        for batch in list(self._rows.batches):
            if len(self._rows.ids) <= goal:
                return
            if self._rows.drop(batch):
                group = batch[:3]
                self._floors[group] = max(batch[3], self._floors.get(group, batch[3]))
                self._thinned.add(batch[0])


class _MemoryRows:
    """All rows, with their indexes and a journal of the transaction that is under way."""

    def __init__(self) -> None:
        self.ids: dict[tuple[str, str], Row] = {}
        self.keys: dict[_Key, str] = {}
        self.batches: dict[_Batch, list[str]] = {}
        self.newest: dict[_Group, int] = {}
        self.model_ids: dict[tuple[str, str], int] = {}
        self.status: dict[str, dict[tuple[str, str], None]] = {"proposed": {}, "claimed": {}}
        self.journal: list[tuple[Row, Row | None, int | None]] = []

    def by_id(self, scope: str, row_id: str) -> Row | None:
        return self.ids.get((scope, row_id))

    def by_slot(self, slot: Slot, parent_id: str | None) -> Row | None:
        row_id = self.keys.get((slot, parent_id))
        return None if row_id is None else self.ids[slot.scope, row_id]

    def count_model_id(self, scope: str, model_id: str) -> int:
        return self.model_ids.get((scope, model_id), 0)

    def of_batch(self, scope: str, run: str, agent: str, batch_no: int) -> list[Row]:
        found = self.batches.get((scope, run, agent, batch_no), ())
        return [self.ids[scope, row_id] for row_id in found]

    def of_status(self, scope: str | None, status: str) -> list[Row]:
        found = [self.ids[key] for key in self.status[status] if scope in (None, key[0])]
        return sorted(found, key=lambda row: row.created_at)

    def of_scope(self, scope: str) -> list[Row]:
        return [row for key, row in self.ids.items() if key[0] == scope]

    def insert(self, row: Row) -> None:
        slot = row.slot
        group = slot[:3]
        self.journal.append((row, None, self.newest.get(group)))
        self.keys[slot, row.parent_id] = row.id
        self.batches.setdefault(slot[:4], []).append(row.id)
        self.newest[group] = max(slot.batch_no, self.newest.get(group, slot.batch_no))
        self._count(row, 1)
        self._index(row)

    def update(self, row: Row) -> None:
        self.journal.append((row, self.ids[row.slot.scope, row.id], None))
        self._index(row)

    def undo(self) -> None:
        while self.journal:
            row, before, newest = self.journal.pop()
            if before is not None:
                self._index(before)
                continue
            self._remove(row)
            batch = self.batches[row.slot[:4]]
            batch.remove(row.id)
            if not batch:
                del self.batches[row.slot[:4]]
            if newest is None:
                del self.newest[row.slot[:3]]
            else:
                self.newest[row.slot[:3]] = newest

    def drop(self, batch: _Batch) -> bool:
        """Forget a batch entirely, unless one of its rows is open or claimed."""
        rows = self.of_batch(*batch)
        if any(row.open or row.status == "claimed" for row in rows):
            return False
        for row in rows:
            self._remove(row)
        del self.batches[batch]
        return True

    def _index(self, row: Row) -> None:
        key = (row.slot.scope, row.id)
        self.ids[key] = row
        for status, members in self.status.items():
            if row.status == status:
                members[key] = None
            else:
                members.pop(key, None)

    def _remove(self, row: Row) -> None:
        key = (row.slot.scope, row.id)
        del self.ids[key]
        del self.keys[row.slot, row.parent_id]
        for members in self.status.values():
            members.pop(key, None)
        self._count(row, -1)

    def _count(self, row: Row, by: int) -> None:
        key = (row.slot.scope, row.model_id)
        count = self.model_ids.get(key, 0) + by
        if count:
            self.model_ids[key] = count
        else:
            del self.model_ids[key]
