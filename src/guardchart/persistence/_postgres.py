"""What the PostgreSQL ledger and store share: connections, transactions, the schema's version."""

from __future__ import annotations

import hashlib
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from guardchart._extras import require
from guardchart.errors import StoreError

require("psycopg", extra="postgres")

import psycopg  # noqa: E402
from psycopg import pq, rows  # noqa: E402
from psycopg.conninfo import conninfo_to_dict, make_conninfo  # noqa: E402

if TYPE_CHECKING:
    import psycopg_pool

    Connection = psycopg.Connection[Any]
    Cursor = psycopg.Cursor[tuple[Any, ...]]
    Source = str | Callable[[], Connection] | psycopg_pool.ConnectionPool[Any]

__all__ = ["Database", "READ", "key", "like", "lock_key"]

READ: Final = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"

_COMMITTED: Final = "committed"

_SCHEMA: Final = (
    "CREATE TABLE IF NOT EXISTS {t}guardchart_schema "
    "(name TEXT PRIMARY KEY, version INTEGER NOT NULL)"
)


def key(*parts: str | int) -> bytes:
    """Return a short key for parts of any length: B-trees refuse long ones."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        data = str(part).encode("utf-8", "surrogatepass")
        digest.update(b"%d:" % len(data))
        digest.update(data)
    return digest.digest()


def lock_key(*parts: str) -> int:
    """Return the number of the advisory lock that guards these parts in a database."""
    return int.from_bytes(key("guardchart", *parts)[:8], "big", signed=True)


class Database:
    """Connections to one database, lent out for one transaction each.

    A DSN's connections are kept here, at most ``max_connections``; threads wait for one. A
    connection that broke while idle is replaced unnoticed, since nothing was begun on it. A
    forked child opens its own.

    Args:
        source: A DSN, a function that opens a ``psycopg.Connection``, or a
            ``psycopg_pool.ConnectionPool``, which then decides how many there are.
        schema: Where the tables are; None is what the ``search_path`` says.
        part: What is stored there, ``"ledger"`` or ``"store"``.
        version: The version of its tables that this release writes.
        tables: Statements that make them; ``{t}`` stands for the schema.
        timeout_s: How long to wait for a connection, and for another one's lock.
        max_connections: How many there are at most.
    """

    def __init__(
        self,
        source: Source,
        *,
        schema: str | None,
        part: str,
        version: int,
        tables: Sequence[str],
        timeout_s: float,
        max_connections: int,
    ) -> None:
        if max_connections < 1:
            raise ValueError("max_connections: at least 1")
        if schema is not None and (not schema or "\0" in schema):
            raise ValueError("schema: the name of a schema, or None")
        self._part = part
        self._timeout_s = timeout_s
        self._prefix = "" if schema is None else '"' + schema.replace('"', '""') + '".'
        self._version = version
        self._tables = tables
        self._pool: Any = None
        self._idle: list[Connection] = []
        self._abandoned: list[Connection] = []
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._free = threading.BoundedSemaphore(max_connections)
        self._max_connections = max_connections
        # A ledger that is dropped without `disconnect` closes what it opened.
        self._finalizer = weakref.finalize(self, _close, self._idle, self._pid)
        if isinstance(source, str):
            self._open = _opener(source, timeout_s, part)
        elif callable(source):
            self._open = source
        elif callable(getattr(source, "getconn", None)):
            self._pool = source
        else:
            raise TypeError(
                f"PostgreSQL {part}: pass a DSN, a function that opens a psycopg.Connection, or "
                "a psycopg_pool.ConnectionPool (not an async one)"
            )
        self._prepare()

    def sql(self, statement: str) -> str:
        """Return a statement with ``{t}`` replaced by the schema."""
        return statement.replace("{t}", self._prefix)

    def disconnect(self) -> None:
        """Close the idle connections; a later transaction opens new ones."""
        with self._lock:
            idle, self._idle[:] = list(self._idle), []
            if self._pid != os.getpid():
                self._abandoned += idle
                idle = []
        for connection in idle:
            connection.close()

    def write(self, lock: int | None) -> str:
        """Return the statements that begin a writing transaction.

        Args:
            lock: The advisory lock it holds until it ends, waiting for it first.
        """
        begin = (
            "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE; "
            f"SET LOCAL lock_timeout = {max(1, round(self._timeout_s * 1000))}; "
            # What a verb answered has to survive a power cut, whatever the database's default.
            "SELECT set_config('synchronous_commit', 'on', true) "
            "WHERE current_setting('synchronous_commit') = 'off'"
        )
        return begin if lock is None else f"{begin}; SELECT pg_advisory_xact_lock({lock})"

    @contextmanager
    def transaction(self, begin: str) -> Iterator[Cursor]:
        """Lend a cursor inside a transaction: committed on leaving, undone by an exception.

        Raises:
            StoreError: The database cannot be reached, refuses, or takes longer than
                ``timeout_s``. Nothing was written, unless the message says that this is unknown.
        """
        stage = ["connecting"]
        with self._as_store_error(stage), self._lent(begin) as connection:
            stage[0] = "working"
            cursor = connection.cursor(row_factory=rows.tuple_row)
            try:
                yield cursor
                stage[0] = "committing"
                _run(connection, "COMMIT")
                stage[0] = _COMMITTED
            finally:
                cursor.close()
                if stage[0] != _COMMITTED:
                    _undo(connection)

    @contextmanager
    def _as_store_error(self, stage: list[str]) -> Iterator[None]:
        try:
            yield
        except psycopg.Error as error:
            name = type(error).__name__
            state = f" {error.sqlstate}" if error.sqlstate else ""
            unknown = stage[0] == "committing" and not state
            written = "whether it was written is unknown" if unknown else "nothing was written"
            hints = {
                "LockNotAvailable": "; raise timeout_s",
                "InsufficientPrivilege": "; create its tables with a role that may",
            }
            raise StoreError(
                f"PostgreSQL {self._part}: {name}{state} while {stage[0]}; {written}, the call "
                f"may be repeated{hints.get(name, '')}"
            ) from error

    # Connections

    @contextmanager
    def _lent(self, begin: str) -> Iterator[Connection]:
        self._after_fork()
        if not self._free.acquire(timeout=self._timeout_s):
            raise StoreError(
                f"PostgreSQL {self._part}: no connection became free within "
                f"{self._timeout_s:g} s; nothing was written, the call may be repeated"
            )
        try:
            connection = self._begun(begin)
            try:
                yield connection
            finally:
                self._give_back(connection)
        finally:
            self._free.release()

    def _begun(self, begin: str) -> Connection:
        while True:
            connection, fresh = self._take()
            try:
                _run(connection, begin)
                return connection
            except BaseException as error:
                broken = connection.broken and isinstance(error, psycopg.OperationalError)
                _undo(connection)
                self._give_back(connection)
                if fresh or not broken:
                    raise

    def _take(self) -> tuple[Connection, bool]:
        if self._pool is not None:
            connection = self._pool.getconn(self._timeout_s)
            if not connection.autocommit:
                connection.autocommit = True
                connection._guardchart_restore = True
            return connection, True
        with self._lock:
            if self._idle:
                return self._idle.pop(), False
        connection = self._open()
        connection.autocommit = True
        return connection, True

    def _give_back(self, connection: Connection) -> None:
        if self._pool is not None:
            if connection.__dict__.pop("_guardchart_restore", False) and not connection.closed:
                connection.autocommit = False
            self._pool.putconn(connection)
        elif not connection.closed:
            with self._lock:
                self._idle.append(connection)

    def _after_fork(self) -> None:
        if self._pid == os.getpid():
            return
        # The parent's connections are the parent's: to close one here would end it there.
        self._abandoned += self._idle
        self._idle = []
        self._lock = threading.Lock()
        self._free = threading.BoundedSemaphore(self._max_connections)
        self._pid = os.getpid()
        self._finalizer.detach()
        self._finalizer = weakref.finalize(self, _close, self._idle, self._pid)

    # The schema

    def _prepare(self) -> None:
        with self.transaction(READ) as cursor:
            version = self._written(cursor)
        if version is None:
            version = self._create()
        if version != self._version:
            raise StoreError(
                f"the {self._part}'s schema has version {version}, this release knows "
                f"{self._version}: upgrade guardchart"
            )

    def _written(self, cursor: Cursor) -> int | None:
        """Return the version of this part's tables, None where there are none."""
        found = cursor.execute("SELECT to_regclass(%s)", (f"{self._prefix}guardchart_schema",))
        return None if found.fetchone() == (None,) else self._noted(cursor)

    def _noted(self, cursor: Cursor) -> int | None:
        select = self.sql("SELECT version FROM {t}guardchart_schema WHERE name = %s")
        row = cursor.execute(select, (self._part,)).fetchone()
        return None if row is None else int(row[0])

    def _create(self) -> int:
        # Several sessions may find nothing at once; the lock lets one create it. The others
        # must not ask `to_regclass` again: it may answer from the session's cache.
        with self.transaction(self.write(lock_key("schema"))) as cursor:
            cursor.execute(self.sql(_SCHEMA))
            version = self._noted(cursor)
            if version is not None:
                return version
            for statement in self._tables:
                cursor.execute(self.sql(statement))
            insert = self.sql("INSERT INTO {t}guardchart_schema VALUES (%s, %s)")
            cursor.execute(insert, (self._part, self._version))
            return self._version


def like(connection: Connection | psycopg.AsyncConnection[Any]) -> Callable[[], Connection]:
    """Return a function that opens connections as this one was opened, password included."""
    parameters: dict[str, Any] = {
        "fallback_application_name": "guardchart",
        **connection.info.get_parameters(),
        "password": connection.info.password or None,
        "prepare_threshold": connection.prepare_threshold,
    }
    return lambda: psycopg.connect(**parameters, autocommit=True)


def _opener(dsn: str, timeout_s: float, part: str) -> Callable[[], Connection]:
    try:
        given: dict[str, Any] = dict(conninfo_to_dict(dsn))
    except psycopg.Error:
        # Its own text repeats the DSN, and a DSN holds a password.
        raise StoreError(f"PostgreSQL {part}: this is no connection string") from None
    given.setdefault("connect_timeout", max(2, round(timeout_s)))
    given.setdefault("fallback_application_name", "guardchart")
    conninfo = make_conninfo(**given)
    return lambda: psycopg.connect(conninfo, autocommit=True)


def _run(connection: Connection, statements: str) -> None:
    # Several statements in one message cannot be prepared, and need not be.
    connection.execute(statements, prepare=False)


def _undo(connection: Connection) -> None:
    """Roll back what was begun; a connection on which that fails is of no more use."""
    if connection.closed:
        return
    try:
        if connection.info.transaction_status != pq.TransactionStatus.IDLE:
            _run(connection, "ROLLBACK")
    except BaseException as error:
        connection.close()
        if not isinstance(error, psycopg.Error):
            raise


def _close(idle: list[Connection], pid: int) -> None:
    if pid != os.getpid():
        return
    while idle:
        idle.pop().close()
