"""The embedded store: one SQLite file shared by threads and processes of one machine."""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from guardchart.persistence._ledger import Ledger
from guardchart.persistence._memory import InMemoryLedger
from guardchart.persistence._sqlite import SQLiteLedger
from guardchart.persistence._sqlite_database import Source, SQLiteDatabase
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

__all__ = ["SQLiteStore"]

_VERSION = 1

_TABLES = (
    """CREATE TABLE guardchart_runs (
        key TEXT PRIMARY KEY, rev INTEGER NOT NULL, snapshot TEXT NOT NULL,
        status TEXT NOT NULL, state_ids TEXT NOT NULL,
        since INTEGER NOT NULL, updated_at INTEGER NOT NULL) WITHOUT ROWID""",
    """CREATE TABLE guardchart_timers (
        key TEXT NOT NULL, id TEXT NOT NULL, due_at REAL NOT NULL, rev INTEGER NOT NULL,
        leased_until REAL NOT NULL DEFAULT 0, leased_by TEXT,
        PRIMARY KEY (key, id)) WITHOUT ROWID""",
    "CREATE INDEX guardchart_timers_due ON guardchart_timers (due_at)",
    """CREATE TABLE guardchart_events (
        seq INTEGER PRIMARY KEY, key TEXT NOT NULL, rev INTEGER NOT NULL,
        id TEXT, event TEXT, UNIQUE (key, id))""",
    "CREATE INDEX guardchart_events_key ON guardchart_events (key, seq)",
    "CREATE INDEX guardchart_runs_since ON guardchart_runs (since)",
)


class SQLiteStore(Store):
    """A durable store in an SQLite file, on the standard library's ``sqlite3``.

    Threads share one connection under a lock; processes share the file. Every write is one
    ``BEGIN IMMEDIATE`` transaction, in WAL mode with ``synchronous=FULL``: what was written
    survives a crash and a power cut. The file must be on a local disk. Its ledger is a
    ``SQLiteLedger`` on a connection of its own to the same file.

    Args:
        source: A path, ``":memory:"`` (this object alone, gone with it), or a function without
            arguments that opens a new ``sqlite3.Connection`` with ``check_same_thread=False``.
        max_snapshot_bytes: The largest snapshot taken, in bytes of JSON text.
        timeout_s: How long to wait for a lock that another process holds.

    Raises:
        StoreError: The file cannot be opened, is no database, or was written by a newer
            release. Methods raise it where the database stays locked or fails; nothing was
            written then.

    >>> from guardchart.persistence import SQLiteStore
    >>> with SQLiteStore("runs.db") as store:
    ...     rev = store.create("ticket:1", {"status": "active", "state_ids": ["t.open"]}, now=0)
    >>> with SQLiteStore("runs.db") as again:
    ...     again.load("ticket:1").rev, [each.key for each in again.find(state="t.open")]
    (1, ['ticket:1'])
    """

    durable = True
    blocking = True

    def __init__(
        self,
        source: Source,
        *,
        max_snapshot_bytes: int = MAX_SNAPSHOT_BYTES,
        timeout_s: float = 10.0,
    ) -> None:
        self.max_snapshot_bytes = max_snapshot_bytes
        self._source = source
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._ledger: Ledger | None = None
        self._database = SQLiteDatabase(
            source, part="store", version=_VERSION, tables=_TABLES, timeout_s=timeout_s
        )
        self.durable = self._database.durable

    @property
    def ledger(self) -> Ledger:
        """The ledger beside the store, opened when it is first asked for."""
        with self._lock:
            if self._ledger is None:
                self._ledger = (
                    SQLiteLedger(self._source, timeout_s=self._timeout_s)
                    if self.durable
                    else InMemoryLedger()
                )
            return self._ledger

    def disconnect(self) -> None:
        """Close the connections, the ledger's too; a later call opens new ones."""
        self._database.disconnect()
        if isinstance(self._ledger, SQLiteLedger):
            self._ledger.disconnect()

    def __enter__(self) -> SQLiteStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.disconnect()

    def load(self, key: str) -> Stored | None:
        check_key(key)
        sql = "SELECT rev, snapshot, updated_at FROM guardchart_runs WHERE key = ?"
        with self._database.transaction(write=False) as connection:
            row = connection.execute(sql, (key,)).fetchone()
        if row is None:
            return None
        return Stored(key=key, rev=row[0], snapshot=json.loads(row[1]), updated_at=row[2])

    def create(
        self,
        key: str,
        snapshot: Mapping[str, Any],
        *,
        events: Sequence[Mapping[str, Any]] = (),
        now: int,
    ) -> int:
        write = written(key, snapshot, events, self.max_snapshot_bytes)
        values = (key, write.text, write.status, write.state_ids, now, now)
        sql = "INSERT OR IGNORE INTO guardchart_runs VALUES (?, 1, ?, ?, ?, ?, ?)"
        with self._database.transaction(write=True) as connection:
            if not connection.execute(sql, values).rowcount:
                raise conflict(key)
            _follow(connection, key, 1, write)
        return 1

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
        sql = (
            "UPDATE guardchart_runs SET rev = rev + 1, snapshot = ?, status = ?, "
            "since = CASE WHEN state_ids = ? THEN since ELSE ? END, state_ids = ?, "
            "updated_at = ? WHERE key = ? AND rev = ?"
        )
        ids = write.state_ids
        values = (write.text, write.status, ids, now, ids, now, key, expect)
        with self._database.transaction(write=True) as connection:
            if not connection.execute(sql, values).rowcount:
                raise conflict(key)
            _follow(connection, key, expect + 1, write)
        return expect + 1

    def claim_due(self, now: int, owner: str, limit: int = 100, lease_s: float = 30.0) -> list[Due]:
        sql = (
            "SELECT key, id, due_at, rev FROM guardchart_timers "
            "WHERE due_at <= ? AND leased_until <= ? ORDER BY due_at, key, id LIMIT ?"
        )
        lease = (
            "UPDATE guardchart_timers SET leased_until = ?, leased_by = ? WHERE key = ? AND id = ?"
        )
        values = (now, now, max(limit, 0))
        with self._database.transaction(write=False) as connection:
            if not connection.execute(sql, values).fetchall():
                return []  # without the lock that writers wait for
        with self._database.transaction(write=True) as connection:
            found = [Due(*row) for row in connection.execute(sql, values)]
            for due in found:
                until = now + lease_s * 1000.0
                connection.execute(lease, (until, owner, due.key, due.timer_id))
        return found

    def events(self, key: str, *, after: int = 0) -> list[dict[str, Any]]:
        check_key(key)
        sql = (
            "SELECT event, rev FROM guardchart_events "
            "WHERE key = ? AND rev > ? AND event IS NOT NULL ORDER BY seq"
        )
        with self._database.transaction(write=False) as connection:
            found = connection.execute(sql, (key, after)).fetchall()
        return [{**json.loads(text), "rev": rev} for text, rev in found]

    def compact(self, key: str, *, now: int) -> int:
        check_key(key)
        with self._database.transaction(write=True) as connection:
            count = "SELECT count(*) FROM guardchart_events WHERE key = ? AND event IS NOT NULL"
            replaced = int(connection.execute(count, (key,)).fetchone()[0])
            if replaced:
                for sql in (
                    "DELETE FROM guardchart_events WHERE key = ? AND id IS NULL",
                    "UPDATE guardchart_events SET event = NULL WHERE key = ?",
                    "INSERT INTO guardchart_events (key, rev, event) SELECT key, rev, "
                    """'{"kind":"snapshot","snapshot":' || snapshot || '}' """
                    "FROM guardchart_runs WHERE key = ?",
                ):
                    connection.execute(sql, (key,))
        return replaced

    def find(self, *, state: str | None = None, limit: int = 1_000) -> list[Summary]:
        sql = "SELECT key, rev, status, state_ids, since, updated_at FROM guardchart_runs "
        if state is not None:
            sql += "WHERE EXISTS (SELECT 1 FROM json_each(state_ids) WHERE value = :state) "
        sql += "ORDER BY since, key LIMIT :limit"
        with self._database.transaction(write=False) as connection:
            given = {"state": state, "limit": max(limit, 0)}
            found = connection.execute(sql, given).fetchall()
        return [
            Summary(key, rev, status, tuple(json.loads(ids)), since, updated_at)
            for key, rev, status, ids, since, updated_at in found
        ]

    def delete(self, key: str) -> bool:
        check_key(key)
        with self._database.transaction(write=True) as connection:
            for table in ("timers", "events"):
                connection.execute(f"DELETE FROM guardchart_{table} WHERE key = ?", (key,))
            deleted = connection.execute("DELETE FROM guardchart_runs WHERE key = ?", (key,))
            return bool(deleted.rowcount)


def _follow(connection: sqlite3.Connection, key: str, rev: int, write: Written) -> None:
    """Write what belongs to a snapshot: its deadlines, and what led to it."""
    log = "INSERT INTO guardchart_events (key, rev, id, event) VALUES (?, ?, ?, ?)"
    try:
        connection.executemany(log, [(key, rev, *event) for event in write.events])
    except sqlite3.IntegrityError:
        raise conflict(key) from None
    known = "SELECT id, due_at FROM guardchart_timers WHERE key = ?"
    armed = dict(connection.execute(known, (key,)).fetchall())
    gone = [(key, name) for name in armed if name not in write.timers]
    connection.executemany("DELETE FROM guardchart_timers WHERE key = ? AND id = ?", gone)
    if armed:
        connection.execute("UPDATE guardchart_timers SET leased_until = 0 WHERE key = ?", (key,))
    connection.executemany(
        "INSERT OR REPLACE INTO guardchart_timers (key, id, due_at, rev) VALUES (?, ?, ?, ?)",
        [
            (key, name, due_at, rev)
            for name, due_at in write.timers.items()
            if armed.get(name) != due_at
        ],
    )
