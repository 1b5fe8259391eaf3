"""The embedded ledger: one SQLite file shared by threads and processes of one machine."""

from __future__ import annotations

import json
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from guardchart.errors import StoreError
from guardchart.persistence._ledger import Rows
from guardchart.persistence._rows import Row, Slot
from guardchart.persistence._verbs import RuleLedger

_VERSION = 1

_SCHEMA = (
    """CREATE TABLE IF NOT EXISTS guardchart_schema (
        name TEXT PRIMARY KEY, version INTEGER NOT NULL)""",
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
    f"INSERT OR IGNORE INTO guardchart_schema VALUES ('ledger', {_VERSION})",
)

_FIXED = (
    *("scope", "id", "run", "agent", "batch_no", "tool", "digest", "ordinal"),
    *("parent_id", "model_id", "timeout_s", "created_at"),
)
_VARIABLE = (
    *("arguments", "status", "decided_by", "reason", "result", "child_id", "decide_by"),
    *("use_by", "claimed_at", "owner", "token", "releases", "updated_at", "forgotten"),
)
_COLUMNS = ", ".join(_FIXED + _VARIABLE)
_SELECT = f"SELECT {_COLUMNS} FROM guardchart_ledger WHERE "
_INSERT = (
    f"INSERT INTO guardchart_ledger ({_COLUMNS}) "
    f"VALUES ({', '.join('?' * len(_FIXED + _VARIABLE))})"
)
_UPDATE = (
    f"UPDATE guardchart_ledger SET {', '.join(f'{name} = ?' for name in _VARIABLE)} "
    "WHERE scope = ? AND id = ?"
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

    def __init__(
        self,
        source: str | os.PathLike[str] | Callable[[], sqlite3.Connection],
        *,
        timeout_s: float = 10.0,
    ) -> None:
        self._timeout_s = timeout_s
        self._lock = threading.RLock()
        self._connection: sqlite3.Connection | None = None
        self._pid = 0
        self._abandoned: list[sqlite3.Connection] = []
        if callable(source):
            self._open = source
        else:
            path = os.fspath(source)
            if path == ":memory:":
                self.durable = False
            elif not path.startswith("file:"):
                path = str(Path(path).absolute())
            self._open = lambda: sqlite3.connect(
                path,
                timeout=timeout_s,
                isolation_level=None,
                check_same_thread=False,
                uri=path.startswith("file:"),
            )
        with self._lock, _as_store_error():
            self._connected()

    def disconnect(self) -> None:
        """Close the connection; a later verb opens a new one (``:memory:`` loses its rows)."""
        with self._lock:
            if self._connection is not None and self._pid == os.getpid():
                self._connection.close()
            self._connection = None

    def __enter__(self) -> SQLiteLedger:
        return self

    def __exit__(self, *_: object) -> None:
        self.disconnect()

    def _connected(self) -> sqlite3.Connection:
        if self._connection is not None and self._pid == os.getpid():
            return self._connection
        if self._connection is not None:
            # A forked child: closing the parent's connection would break the parent's locks.
            self._abandoned.append(self._connection)
        connection = self._open()
        try:
            connection.isolation_level = None
            connection.execute(f"PRAGMA busy_timeout = {round(self._timeout_s * 1000)}")
            self._prepare(connection)
        except BaseException:
            connection.close()
            raise
        self._connection, self._pid = connection, os.getpid()
        return connection

    def _prepare(self, connection: sqlite3.Connection) -> None:
        # Switching to WAL does not wait for locks by itself, so several first openers meet.
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                connection.execute("PRAGMA journal_mode = WAL")
                break
            except sqlite3.OperationalError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
        connection.execute("PRAGMA synchronous = FULL")
        if _version(connection) is None:
            connection.execute("BEGIN IMMEDIATE")
            try:
                for statement in _SCHEMA:
                    connection.execute(statement)
                connection.execute("COMMIT")
            except BaseException:
                connection.execute("ROLLBACK")
                raise
        version = _version(connection)
        if version != _VERSION:
            raise StoreError(
                f"the ledger's schema has version {version}, this release knows {_VERSION}: "
                "upgrade guardchart"
            )

    @contextmanager
    def _transaction(self, scope: str | None, *, write: bool) -> Iterator[Rows]:
        with self._lock, _as_store_error():
            connection = self._connected()
            connection.execute("BEGIN IMMEDIATE" if write else "BEGIN")
            try:
                yield _SQLiteRows(connection)
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise


@contextmanager
def _as_store_error() -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        name = getattr(error, "sqlite_errorname", type(error).__name__)
        raise StoreError(
            f"SQLite ledger: {name}; nothing was written, the call may be repeated "
            "(SQLITE_BUSY: raise timeout_s)"
        ) from error


def _version(connection: sqlite3.Connection) -> int | None:
    found = connection.execute(
        "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'guardchart_schema'"
    ).fetchone()
    if found is None:
        return None
    row = connection.execute(
        "SELECT version FROM guardchart_schema WHERE name = 'ledger'"
    ).fetchone()
    return None if row is None else int(row[0])


class _SQLiteRows:
    """``Rows`` over the connection's open transaction."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._execute = connection.execute

    def by_id(self, scope: str, row_id: str) -> Row | None:
        return self._one("scope = ? AND id = ?", (scope, row_id))

    def by_slot(self, slot: Slot, parent_id: str | None) -> Row | None:
        where = (
            "scope = ? AND run = ? AND agent = ? AND batch_no = ? AND tool = ? "
            "AND digest = ? AND ordinal = ? AND parent_id = ?"
        )
        return self._one(where, (*slot, parent_id or ""))

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
        fixed = (row.slot.scope, row.id, *row.slot[1:], row.parent_id or "", row.model_id)
        self._execute(_INSERT, (*fixed, row.timeout_s, row.created_at, *_variable(row)))

    def update(self, row: Row) -> None:
        self._execute(_UPDATE, (*_variable(row), row.slot.scope, row.id))

    def _one(self, where: str, values: tuple[Any, ...]) -> Row | None:
        found = self._execute(_SELECT + where, values).fetchone()
        return None if found is None else _row(found)

    def _all(self, where: str, values: tuple[Any, ...]) -> list[Row]:
        return [_row(found) for found in self._execute(_SELECT + where, values)]


def _variable(row: Row) -> tuple[Any, ...]:
    return (
        None if row.arguments is None else json.dumps(row.arguments, separators=(",", ":")),
        row.status,
        row.by,
        row.reason,
        row.result,
        row.child_id,
        row.decide_by,
        row.use_by,
        row.claimed_at,
        row.owner,
        row.token,
        row.releases,
        row.updated_at,
        int(row.forgotten),
    )


def _row(found: tuple[Any, ...]) -> Row:
    scope, row_id, *rest = found
    arguments = found[12]
    return Row(
        id=row_id,
        slot=Slot(scope, *rest[:6]),
        parent_id=found[8] or None,
        model_id=found[9],
        timeout_s=found[10],
        created_at=found[11],
        arguments=None if arguments is None else json.loads(arguments),
        status=found[13],
        by=found[14],
        reason=found[15],
        result=found[16],
        child_id=found[17],
        decide_by=found[18],
        use_by=found[19],
        claimed_at=found[20],
        owner=found[21],
        token=found[22],
        releases=found[23],
        updated_at=found[24],
        forgotten=bool(found[25]),
    )
