"""What the SQLite ledger and store share: one connection, transactions, the schema's version."""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Final, TypeAlias, TypeVar

from guardchart.errors import StoreError

__all__ = ["BEGIN_READ", "BEGIN_WRITE", "SQLiteDatabase", "Source"]

T = TypeVar("T")

Source: TypeAlias = str | os.PathLike[str] | Callable[[], sqlite3.Connection]

BEGIN_READ: Final = "BEGIN"
BEGIN_WRITE: Final = "BEGIN IMMEDIATE"

_SCHEMA = """CREATE TABLE IF NOT EXISTS guardchart_schema (
    name TEXT PRIMARY KEY, version INTEGER NOT NULL)"""


class SQLiteDatabase:
    """One SQLite file: threads share a connection under a lock, processes share the file.

    Args:
        source: A path, ``":memory:"``, or a function that opens a connection.
        part: What is stored there, ``"ledger"`` or ``"store"``.
        version: The version of its tables that this release writes.
        tables: Statements that make them where they are missing.
        timeout_s: How long to wait for a lock that another process holds.
    """

    def __init__(
        self, source: Source, *, part: str, version: int, tables: Sequence[str], timeout_s: float
    ) -> None:
        self.durable = True
        self.connection: sqlite3.Connection | None = None
        self._part = part
        self._version = version
        self._tables = tables
        self._timeout_s = timeout_s
        self._lock = threading.RLock()
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
        try:
            with self._lock:
                self._connected()
        except sqlite3.Error as error:
            raise self._failed(error) from error

    def disconnect(self) -> None:
        """Close the connection; the next transaction opens a new one."""
        with self._lock:
            if self.connection is not None and self._pid == os.getpid():
                self.connection.close()
            self.connection = None

    def transaction(self, *, write: bool) -> AbstractContextManager[sqlite3.Connection]:
        """Lend the connection inside a transaction: committed on leaving, undone by an exception.

        Raises:
            StoreError: The database stays locked, or fails; nothing was written.
        """
        return self.lent(BEGIN_WRITE if write else BEGIN_READ, _itself)

    # A generator: nothing else gives the lock back wherever a signal comes.
    @contextmanager
    def lent(self, begin: str | None, lend: Callable[[sqlite3.Connection], T]) -> Iterator[T]:
        """As `transaction`, in the form that ``lend`` gives the connection.

        Args:
            begin: `BEGIN_READ`, `BEGIN_WRITE`, or None for a read of one statement, which is a
                transaction by itself.
            lend: Makes of the connection what is lent.
        """
        try:
            with self._lock:
                connection, begun = self._connected(), False
                try:
                    if begin is not None:
                        connection.execute(begin)
                        begun = True
                    yield lend(connection)
                    if begin is not None:
                        connection.execute("COMMIT")
                except BaseException as error:
                    # A signal may come while BEGIN waits for a lock, which it then may have.
                    mine = begun or (begin is not None and not isinstance(error, sqlite3.Error))
                    if mine and connection.in_transaction:
                        connection.execute("ROLLBACK")
                    raise
        except sqlite3.Error as error:
            raise self._failed(error) from error

    def _failed(self, error: sqlite3.Error) -> StoreError:
        """Return what to raise from an error of the database."""
        name = getattr(error, "sqlite_errorname", type(error).__name__)
        return StoreError(
            f"SQLite {self._part}: {name}; nothing was written, the call may be repeated "
            "(SQLITE_BUSY: raise timeout_s)"
        )

    def _connected(self) -> sqlite3.Connection:
        """Return this process's connection, opened where there is none; to be called locked."""
        if self.connection is not None and self._pid == os.getpid():
            return self.connection
        if self.connection is not None:
            # A forked child: closing the parent's connection would break the parent's locks.
            self._abandoned.append(self.connection)
        connection = self._open()
        try:
            connection.isolation_level = None
            connection.execute(f"PRAGMA busy_timeout = {round(self._timeout_s * 1000)}")
            self._prepare(connection)
        except BaseException:
            connection.close()
            raise
        self.connection, self._pid = connection, os.getpid()
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
        if self._written(connection) is None:
            connection.execute("BEGIN IMMEDIATE")
            try:
                if self._written(connection) is None:  # or another opener was quicker
                    for statement in (_SCHEMA, *self._tables):
                        connection.execute(statement)
                    connection.execute(
                        "INSERT INTO guardchart_schema VALUES (?, ?)",
                        (self._part, self._version),
                    )
                connection.execute("COMMIT")
            except BaseException:
                connection.execute("ROLLBACK")
                raise
        version = self._written(connection)
        if version != self._version:
            raise StoreError(
                f"the {self._part}'s schema has version {version}, this release knows "
                f"{self._version}: upgrade guardchart"
            )

    def _written(self, connection: sqlite3.Connection) -> int | None:
        found = connection.execute(
            "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'guardchart_schema'"
        ).fetchone()
        if found is None:
            return None
        row = connection.execute(
            "SELECT version FROM guardchart_schema WHERE name = ?", (self._part,)
        ).fetchone()
        return None if row is None else int(row[0])


def _itself(connection: sqlite3.Connection) -> sqlite3.Connection:
    return connection
