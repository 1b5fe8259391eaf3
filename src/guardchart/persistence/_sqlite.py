"""The embedded ledger: one SQLite file shared by threads and processes of one machine."""

from __future__ import annotations

import sqlite3
from contextlib import AbstractContextManager
from typing import Any

from guardchart.persistence._columns import COLUMNS, OF_ROW, VARIABLE, row_of, values, variable
from guardchart.persistence._ledger import Rows
from guardchart.persistence._rows import Row, Slot
from guardchart.persistence._sqlite_database import (
    BEGIN_READ,
    BEGIN_WRITE,
    Source,
    SQLiteDatabase,
)
from guardchart.persistence._verbs import RuleLedger

_VERSION = 1

_TABLES = (
    """CREATE TABLE IF NOT EXISTS guardchart_ledger (
        seq INTEGER PRIMARY KEY,
        scope TEXT NOT NULL, id TEXT NOT NULL,
        run TEXT NOT NULL, agent TEXT NOT NULL, batch_no INTEGER NOT NULL,
        tool TEXT NOT NULL, digest TEXT NOT NULL, ordinal INTEGER NOT NULL,
        parent_id TEXT NOT NULL, model_id TEXT NOT NULL,
        timeout_s REAL NOT NULL, created_at INTEGER NOT NULL,
        arguments TEXT, status TEXT NOT NULL, decided_by TEXT, reason TEXT, result TEXT,
        child_id TEXT, decide_by INTEGER, use_by INTEGER, claimed_at INTEGER,
        owner TEXT, token TEXT, releases INTEGER NOT NULL, updated_at INTEGER NOT NULL,
        forgotten INTEGER NOT NULL,
        UNIQUE (scope, id),
        UNIQUE (scope, run, agent, batch_no, tool, digest, ordinal, parent_id))""",
    """CREATE INDEX IF NOT EXISTS guardchart_ledger_model
        ON guardchart_ledger (scope, model_id)""",
    """CREATE INDEX IF NOT EXISTS guardchart_ledger_live
        ON guardchart_ledger (status, scope) WHERE status IN ('proposed', 'claimed')""",
)

_SELECT = f"SELECT {', '.join(COLUMNS)} FROM guardchart_ledger WHERE "
_BY_ID = f"{_SELECT}scope = ? AND id = ?"
_BY_SLOT = (
    f"SELECT {', '.join(OF_ROW)} FROM guardchart_ledger WHERE scope = ? AND run = ? "
    "AND agent = ? AND batch_no = ? AND tool = ? AND digest = ? AND ordinal = ? AND parent_id = ?"
)
_INSERT = (
    f"INSERT INTO guardchart_ledger ({', '.join(COLUMNS)}) VALUES ({', '.join('?' * len(COLUMNS))})"
)
_UPDATE = (
    f"UPDATE guardchart_ledger SET {', '.join(f'{name} = ?' for name in VARIABLE)}, "
    "arguments = CASE WHEN ? THEN NULL ELSE arguments END WHERE scope = ? AND id = ?"
)


class SQLiteLedger(RuleLedger):
    """A durable ledger in an SQLite file, on the standard library's ``sqlite3``.

    Threads share one connection under a lock; processes share the file. Every writing verb
    is one ``BEGIN IMMEDIATE`` transaction, in WAL mode with ``synchronous=FULL``: what a verb
    answered survives a crash and a power cut. The file must be on a local disk.

    Args:
        source: a path, ``":memory:"`` (this object alone, gone with it), or a function
            without arguments that opens a new ``sqlite3.Connection`` (it may be used from
            any thread, so with ``check_same_thread=False``).
        timeout_s: how long a verb waits for a lock that another process holds.

    Raises:
        StoreError: the file cannot be opened, is no database, or was written by a newer
            release. Verbs raise it where the database stays locked or fails; nothing was
            written then, and the verb may be called again.

    >>> from guardchart.persistence import Slot
    >>> with SQLiteLedger("ledger.db") as ledger:
    ...     row = ledger.propose(Slot("t", "r", "", 1, "pay", "d1"), "c1", {"cents": 5}, now=0)
    >>> with SQLiteLedger("ledger.db") as again:
    ...     again.row("t", row.id) == row
    True
    """

    durable = True
    blocking = True
    requires_proposal = True

    def __init__(self, source: Source, *, timeout_s: float = 10.0) -> None:
        self._database = SQLiteDatabase(
            source, part="ledger", version=_VERSION, tables=_TABLES, timeout_s=timeout_s
        )
        self.durable = self._database.durable

    def disconnect(self) -> None:
        """Close the connection; a later verb opens a new one (``:memory:`` loses its rows)."""
        self._database.disconnect()

    def __enter__(self) -> SQLiteLedger:
        return self

    def __exit__(self, *_: object) -> None:
        self.disconnect()

    @property
    def _connection(self) -> sqlite3.Connection | None:
        return self._database.connection

    def _transaction(self, scope: str | None, *, write: bool) -> AbstractContextManager[Rows]:
        return self._database.lent(BEGIN_WRITE if write else BEGIN_READ, _SQLiteRows)

    def _statement(self, scope: str | None) -> AbstractContextManager[Rows]:
        return self._database.lent(None, _SQLiteRows)


class _SQLiteRows:
    """``Rows`` over the connection's open transaction."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._execute = connection.execute

    def by_id(self, scope: str, row_id: str) -> Row | None:
        found = self._execute(_BY_ID, (scope, row_id)).fetchone()
        return None if found is None else row_of(found)

    def by_slot(self, slot: Slot, parent_id: str | None) -> Row | None:
        found = self._execute(_BY_SLOT, (*slot, parent_id or "")).fetchone()
        return None if found is None else row_of(found, slot)

    def count_model_id(self, scope: str, model_id: str) -> int:
        sql = "SELECT count(*) FROM guardchart_ledger WHERE scope = ? AND model_id = ?"
        return int(self._execute(sql, (scope, model_id)).fetchone()[0])

    def of_batch(self, scope: str, run: str, agent: str, batch_no: int) -> list[Row]:
        where = "scope = ? AND run = ? AND agent = ? AND batch_no = ? ORDER BY seq"
        return self._all(where, (scope, run, agent, batch_no))

    def of_status(self, scope: str | None, status: str) -> list[Row]:
        # The literal lets SQLite use the partial index.
        where = f"status = '{'claimed' if status == 'claimed' else 'proposed'}'"
        if scope is None:
            return self._all(f"{where} ORDER BY seq", ())
        return self._all(f"{where} AND scope = ? ORDER BY seq", (scope,))

    def of_scope(self, scope: str) -> list[Row]:
        return self._all("scope = ? ORDER BY seq", (scope,))

    def insert(self, row: Row) -> None:
        self._execute(_INSERT, values(row, no_parent=""))

    def update(self, row: Row) -> None:
        self._execute(_UPDATE, (*variable(row), row.forgotten, row.slot.scope, row.id))

    def _all(self, where: str, given: tuple[Any, ...]) -> list[Row]:
        return [row_of(found) for found in self._execute(_SELECT + where, given)]
