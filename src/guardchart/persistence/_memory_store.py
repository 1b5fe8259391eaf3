"""The store of one process: for tests, scripts and services that may forget."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from guardchart.persistence._memory import InMemoryLedger
from guardchart.persistence._store import (
    MAX_SNAPSHOT_BYTES,
    Due,
    Store,
    Stored,
    Summary,
    Written,
    check_key,
    conflict,
    written,
)

__all__ = ["MemoryStore"]


class _Run:
    """One run: everything is replaced, nothing changed in place but the log."""

    def __init__(self) -> None:
        self.rev = 0
        self.write: Any = None
        self.since = self.updated_at = 0
        # By timer: when it is due, the write that armed it, and until when it is leased.
        self.timers: dict[str, tuple[float, int, float]] = {}
        self.log: list[tuple[int, str]] = []
        self.taken: set[str] = set()


class MemoryStore(Store):
    """A store in this process's memory; everything is gone with the process.

    Args:
        max_snapshot_bytes: The largest snapshot taken, in bytes of JSON text.

    >>> from guardchart.persistence import MemoryStore
    >>> store = MemoryStore()
    >>> store.create("ticket:1", {"status": "active", "state_ids": ["t.open"]}, now=0)
    1
    >>> store.commit("ticket:1", 1, {"status": "done", "state_ids": ["t.shut"]}, now=5)
    2
    >>> store.load("ticket:1").snapshot["status"], store.find(state="t.open")
    ('done', [])
    """

    durable = False
    blocking = False

    def __init__(self, *, max_snapshot_bytes: int = MAX_SNAPSHOT_BYTES) -> None:
        self.max_snapshot_bytes = max_snapshot_bytes
        self._lock = threading.Lock()
        self._runs: dict[str, _Run] = {}
        self._ledger = InMemoryLedger()

    @property
    def ledger(self) -> InMemoryLedger:
        """The ledger beside the store."""
        return self._ledger

    def load(self, key: str) -> Stored | None:
        check_key(key)
        with self._lock:
            run = self._runs.get(key)
            if run is None:
                return None
            found = run.write.text, run.rev, run.updated_at
        text, rev, updated_at = found
        return Stored(key=key, rev=rev, snapshot=json.loads(text), updated_at=updated_at)

    def create(
        self,
        key: str,
        snapshot: Mapping[str, Any],
        *,
        events: Sequence[Mapping[str, Any]] = (),
        now: int,
    ) -> int:
        write = written(key, snapshot, events, self.max_snapshot_bytes)
        with self._lock:
            if key in self._runs:
                raise conflict(key)
            return self._write(key, _Run(), write, now)

    def commit(
        self,
        key: str,
        expect: int,
        snapshot: Mapping[str, Any],
        *,
        events: Sequence[Mapping[str, Any]] = (),
        now: int,
    ) -> int:
        write = written(key, snapshot, events, self.max_snapshot_bytes)
        with self._lock:
            run = self._runs.get(key)
            if run is None or run.rev != expect:
                raise conflict(key)
            return self._write(key, run, write, now)

    def _write(self, key: str, run: _Run, write: Written, now: int) -> int:
        ids = [event_id for event_id, _ in write.events if event_id is not None]
        if len(set(ids)) < len(ids) or run.taken & set(ids):
            raise conflict(key)
        run.taken.update(ids)
        run.rev += 1
        if run.write is None or run.write.state_ids != write.state_ids:
            run.since = now
        run.write, run.updated_at = write, now
        run.log += [(run.rev, text) for _, text in write.events]
        run.timers = {
            name: (due_at, run.timers[name][1], 0.0)
            if name in run.timers and run.timers[name][0] == due_at
            else (due_at, run.rev, 0.0)
            for name, due_at in write.timers.items()
        }
        self._runs[key] = run
        return run.rev

    def claim_due(self, now: int, owner: str, limit: int = 100, lease_s: float = 30.0) -> list[Due]:
        with self._lock:
            found = sorted(
                (due_at, key, name, rev)
                for key, run in self._runs.items()
                for name, (due_at, rev, leased_until) in run.timers.items()
                if due_at <= now and leased_until <= now
            )[: max(limit, 0)]
            for due_at, key, name, rev in found:
                self._runs[key].timers[name] = (due_at, rev, now + lease_s * 1000.0)
        return [Due(key, name, due_at, rev) for due_at, key, name, rev in found]

    def events(self, key: str, *, after: int = 0) -> list[dict[str, Any]]:
        check_key(key)
        with self._lock:
            run = self._runs.get(key)
            log = [] if run is None else list(run.log)
        return [{**json.loads(text), "rev": rev} for rev, text in log if rev > after]

    def compact(self, key: str, *, now: int) -> int:
        check_key(key)
        with self._lock:
            run = self._runs.get(key)
            if run is None or not run.log:
                return 0
            replaced = len(run.log)
            run.log = [(run.rev, f'{{"kind":"snapshot","snapshot":{run.write.text}}}')]
            return replaced

    def find(self, *, state: str | None = None, limit: int = 1_000) -> list[Summary]:
        with self._lock:
            found = [
                Summary(
                    key,
                    run.rev,
                    run.write.status,
                    tuple(json.loads(run.write.state_ids)),
                    run.since,
                    run.updated_at,
                )
                for key, run in self._runs.items()
            ]
        fit = [each for each in found if state is None or state in each.state_ids]
        return sorted(fit, key=lambda each: (each.since, each.key))[: max(limit, 0)]

    def delete(self, key: str) -> bool:
        check_key(key)
        with self._lock:
            return self._runs.pop(key, None) is not None
