"""The ledger of several machines: one PostgreSQL database, on psycopg 3."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from guardchart.persistence._columns import COLUMNS, VARIABLE, row_of, values, variable
from guardchart.persistence._ledger import Rows
from guardchart.persistence._postgres import READ, Database, key, lock_key
from guardchart.persistence._rows import Row, Slot
from guardchart.persistence._verbs import RuleLedger

if TYPE_CHECKING:
    from guardchart.persistence._postgres import Cursor, Source

__all__ = ["PostgresLedger"]

_VERSION = 1

# Scopes, agents and a model's ids may be longer than what an index entry holds, so the indexes
# are on digests of them. The columns themselves are for people who look.
_KEYS = ("id_key", "slot_key", "scope_key", "batch_key", "model_key")
_TABLES = (
    """CREATE TABLE {t}guardchart_ledger (
        seq BIGINT GENERATED ALWAYS AS IDENTITY,
        id_key BYTEA PRIMARY KEY, slot_key BYTEA NOT NULL UNIQUE,
        scope_key BYTEA NOT NULL, batch_key BYTEA NOT NULL, model_key BYTEA NOT NULL,
        scope TEXT NOT NULL, id TEXT NOT NULL,
        run TEXT NOT NULL, agent TEXT NOT NULL, batch_no BIGINT NOT NULL,
        tool TEXT NOT NULL, digest TEXT NOT NULL, ordinal BIGINT NOT NULL,
        parent_id TEXT, model_id TEXT NOT NULL,
        timeout_s DOUBLE PRECISION NOT NULL, created_at BIGINT NOT NULL,
        arguments TEXT, status TEXT NOT NULL, decided_by TEXT, reason TEXT, result TEXT,
        child_id TEXT, decide_by BIGINT, use_by BIGINT, claimed_at BIGINT,
        owner TEXT, token TEXT, releases INTEGER NOT NULL, updated_at BIGINT NOT NULL,
        forgotten BOOLEAN NOT NULL)""",
    "CREATE INDEX ON {t}guardchart_ledger (batch_key, seq)",
    "CREATE INDEX ON {t}guardchart_ledger (scope_key, seq)",
    "CREATE INDEX ON {t}guardchart_ledger (model_key)",
    "CREATE INDEX ON {t}guardchart_ledger (status, seq) WHERE status IN ('proposed', 'claimed')",
)

_SELECT = f"SELECT {', '.join(COLUMNS)} FROM {{t}}guardchart_ledger WHERE "
_INSERT = (
    f"INSERT INTO {{t}}guardchart_ledger ({', '.join(_KEYS + COLUMNS)}) "
    f"VALUES ({', '.join(['%s'] * len(_KEYS + COLUMNS))})"
)
_UPDATE = (
    f"UPDATE {{t}}guardchart_ledger SET {', '.join(f'{name} = %s' for name in VARIABLE)}, "
    "arguments = CASE WHEN %s THEN NULL ELSE arguments END WHERE id_key = %s"
)


class PostgresLedger(RuleLedger):
    """A durable ledger in PostgreSQL, for any number of processes and machines.

    Every verb is one transaction. One that writes first takes an advisory lock on its scope, so
    that conversations do not wait for each other; it is committed with ``synchronous_commit``
    on, so that what a verb answered survives a crash. Tables are made when they are missing.

    Args:
        source: A DSN (``postgresql://user:password@host/database``), a function without
            arguments that opens a new ``psycopg.Connection``, or a
            ``psycopg_pool.ConnectionPool``. Behind a pooler that knows no prepared statements,
            a function that connects with ``prepare_threshold=None``.
        schema: The schema of the tables, which must exist; by default the first one of the
            ``search_path``.
        timeout_s: How long a verb waits for a connection, and for the lock of its scope.
        max_connections: How many connections there are at most; more threads wait. A pool
            decides for itself, so give it at least as many.

    Raises:
        StoreError: The database cannot be reached, its tables were written by a newer release,
            or may not be made by this role. Verbs raise it where the database fails or is
            locked for longer than ``timeout_s``; they may be called again.
        MissingExtraError: When imported, where psycopg is not installed.

    >>> from guardchart.persistence import PostgresLedger, Slot
    >>> with PostgresLedger(postgres_dsn) as ledger:
    ...     row = ledger.propose(Slot("t", "r", "", 1, "pay", "d1"), "c1", {"cents": 5}, now=0)
    >>> with PostgresLedger(postgres_dsn) as again:
    ...     again.row("t", row.id) == row
    True
    """

    durable = True
    blocking = True
    requires_proposal = True

    def __init__(
        self,
        source: Source,
        *,
        schema: str | None = None,
        timeout_s: float = 10.0,
        max_connections: int = 8,
    ) -> None:
        self._database = Database(
            source,
            schema=schema,
            part="ledger",
            version=_VERSION,
            tables=_TABLES,
            timeout_s=timeout_s,
            max_connections=max_connections,
        )

    def disconnect(self) -> None:
        """Close the connections that are not in use; a later verb opens new ones."""
        self._database.disconnect()

    def __enter__(self) -> PostgresLedger:
        return self

    def __exit__(self, *_: object) -> None:
        self.disconnect()

    @contextmanager
    def _transaction(self, scope: str | None, *, write: bool) -> Iterator[Rows]:
        database = self._database
        begin = database.write(lock_key("ledger", scope or "")) if write else READ
        with database.transaction(begin) as cursor:
            yield _PostgresRows(cursor, database)


class _PostgresRows:
    """``Rows`` over an open transaction."""

    def __init__(self, cursor: Cursor, database: Database) -> None:
        self._cursor = cursor
        self._sql = database.sql

    def by_id(self, scope: str, row_id: str) -> Row | None:
        return self._one("id_key = %s", key(scope, row_id))

    def by_slot(self, slot: Slot, parent_id: str | None) -> Row | None:
        return self._one("slot_key = %s", _slot_key(slot, parent_id))

    def count_model_id(self, scope: str, model_id: str) -> int:
        sql = "SELECT count(*) FROM {t}guardchart_ledger WHERE model_key = %s"
        found = self._execute(sql, (key(scope, model_id),)).fetchone()
        return 0 if found is None else int(found[0])

    def of_batch(self, scope: str, run: str, agent: str, batch_no: int) -> list[Row]:
        return self._all("batch_key = %s ORDER BY seq", key(scope, run, agent, batch_no))

    def of_status(self, scope: str | None, status: str) -> list[Row]:
        # The literal lets PostgreSQL use the partial index.
        where = f"status = '{'claimed' if status == 'claimed' else 'proposed'}'"
        if scope is None:
            return self._all(f"{where} ORDER BY seq")
        return self._all(f"{where} AND scope_key = %s ORDER BY seq", key(scope))

    def of_scope(self, scope: str) -> list[Row]:
        return self._all("scope_key = %s ORDER BY seq", key(scope))

    def insert(self, row: Row) -> None:
        slot, scope = row.slot, row.slot.scope
        self._execute(
            _INSERT,
            (
                key(scope, row.id),
                _slot_key(slot, row.parent_id),
                key(scope),
                key(*slot[:4]),
                key(scope, row.model_id),
                *values(row, no_parent=None),
            ),
        )

    def update(self, row: Row) -> None:
        self._execute(_UPDATE, (*variable(row), row.forgotten, key(row.slot.scope, row.id)))

    def _one(self, where: str, value: bytes) -> Row | None:
        found = self._execute(_SELECT + where, (value,)).fetchone()
        return None if found is None else row_of(found)

    def _all(self, where: str, *values: bytes) -> list[Row]:
        return [row_of(found) for found in self._execute(_SELECT + where, values).fetchall()]

    def _execute(self, sql: str, values: tuple[Any, ...]) -> Cursor:
        return self._cursor.execute(self._sql(sql), values)


def _slot_key(slot: Slot, parent_id: str | None) -> bytes:
    return key(*slot, "" if parent_id is None else f"edit of {parent_id}")
