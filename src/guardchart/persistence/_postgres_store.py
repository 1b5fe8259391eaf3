"""The store of several machines: one PostgreSQL database, on psycopg 3."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from guardchart.persistence._postgres import READ, Database, key
from guardchart.persistence._postgres_ledger import PostgresLedger
from guardchart.persistence._store import (
    MAX_SNAPSHOT_BYTES,
    Due,
    Store,
    Stored,
    Summary,
    check_key,
    conflict,
    written,
)

if TYPE_CHECKING:
    from guardchart.persistence._postgres import Source

__all__ = ["PostgresStore"]

_VERSION: Final = 1

# Keys may be longer than what an index entry holds, so the indexes are on digests of them.
_TABLES: Final = (
    """CREATE TABLE {t}guardchart_runs (
        id BYTEA PRIMARY KEY, key TEXT NOT NULL, rev BIGINT NOT NULL, snapshot TEXT NOT NULL,
        status TEXT NOT NULL, state_ids TEXT[] NOT NULL,
        since BIGINT NOT NULL, updated_at BIGINT NOT NULL)""",
    """CREATE TABLE {t}guardchart_timers (
        run BYTEA NOT NULL, timer BYTEA NOT NULL, name TEXT NOT NULL,
        due_at DOUBLE PRECISION NOT NULL, rev BIGINT NOT NULL,
        leased_until DOUBLE PRECISION NOT NULL DEFAULT 0, leased_by TEXT,
        PRIMARY KEY (run, timer))""",
    """CREATE TABLE {t}guardchart_events (
        seq BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        run BYTEA NOT NULL, rev BIGINT NOT NULL, id BYTEA, event TEXT, UNIQUE (run, id))""",
    "CREATE INDEX ON {t}guardchart_timers (due_at)",
    "CREATE INDEX ON {t}guardchart_events (run, seq)",
    "CREATE INDEX ON {t}guardchart_runs USING gin (state_ids)",
    "CREATE INDEX ON {t}guardchart_runs (since)",
)

_CREATE: Final = """
    INSERT INTO {t}guardchart_runs
    VALUES (%(run)s, %(key)s, 1, %(snapshot)s, %(status)s, %(states)s, %(now)s, %(now)s)
    ON CONFLICT (id) DO NOTHING RETURNING id, rev"""

_UPDATE: Final = """
    UPDATE {t}guardchart_runs SET rev = rev + 1, snapshot = %(snapshot)s, status = %(status)s,
        since = CASE WHEN state_ids = %(states)s THEN since ELSE %(now)s END,
        state_ids = %(states)s, updated_at = %(now)s
    WHERE id = %(run)s AND rev = %(expect)s RETURNING id, rev"""

# Compare-and-swap, event and deadlines are one statement: nothing of it happens unless the run
# was still at `expect`.
_WRITE: Final = """
    WITH run AS ({write}),
    logged AS (
        INSERT INTO {t}guardchart_events (run, rev, id, event)
        SELECT run.id, run.rev, event.id, event.body
        FROM run, unnest(%(ids)s::bytea[], %(bodies)s::text[]) WITH ORDINALITY
            AS event (id, body, place)
        ORDER BY event.place),
    disarmed AS (
        DELETE FROM {t}guardchart_timers USING run
        WHERE run = run.id AND timer <> ALL (%(timers)s::bytea[])),
    armed AS (
        INSERT INTO {t}guardchart_timers AS known (run, timer, name, due_at, rev)
        SELECT run.id, timer.id, timer.name, timer.due_at, run.rev
        FROM run, unnest(%(timers)s::bytea[], %(names)s::text[], %(dues)s::float8[])
            AS timer (id, name, due_at)
        ON CONFLICT (run, timer) DO UPDATE SET leased_until = 0, due_at = excluded.due_at,
            rev = CASE WHEN known.due_at = excluded.due_at THEN known.rev ELSE excluded.rev END)
    SELECT rev FROM run"""

_CLAIM: Final = """
    WITH due AS (
        SELECT run, timer FROM {t}guardchart_timers
        WHERE due_at <= %(now)s AND leased_until <= %(now)s
        ORDER BY due_at LIMIT %(limit)s FOR UPDATE SKIP LOCKED),
    leased AS (
        UPDATE {t}guardchart_timers AS mine SET leased_until = %(until)s, leased_by = %(owner)s
        FROM due WHERE mine.run = due.run AND mine.timer = due.timer
        RETURNING mine.run, mine.name, mine.due_at, mine.rev)
    SELECT runs.key, leased.name, leased.due_at, leased.rev
    FROM leased JOIN {t}guardchart_runs AS runs ON runs.id = leased.run
    ORDER BY leased.due_at, runs.key, leased.name"""


class PostgresStore(Store):
    """A durable store in PostgreSQL, for any number of stateless workers.

    A write is one statement that compares, swaps, logs and arms; due deadlines are handed out
    with ``SKIP LOCKED``, so scanners do not wait for each other. Its ledger is a
    ``PostgresLedger`` in the same database. Tables are made when they are missing.

    Args:
        source: A DSN, a function that opens a new ``psycopg.Connection``, or a
            ``psycopg_pool.ConnectionPool``; as for ``PostgresLedger``.
        schema: The schema of the tables, which must exist; by default the first one of the
            ``search_path``.
        max_snapshot_bytes: The largest snapshot taken, in bytes of JSON text.
        timeout_s: How long to wait for a connection, and for another one's lock.
        max_connections: How many connections there are at most, the ledger's not counted.

    Raises:
        StoreError: The database cannot be reached, its tables were written by a newer release,
            or may not be made by this role. Methods raise it where the database fails.
        MissingExtraError: When imported, where psycopg is not installed.

    >>> from guardchart.persistence import PostgresStore
    >>> with PostgresStore(postgres_dsn) as store:
    ...     rev = store.create("ticket:1", {"status": "active", "state_ids": ["t.open"]}, now=0)
    ...     store.load("ticket:1").rev, [each.key for each in store.find(state="t.open")]
    (1, ['ticket:1'])
    """

    durable = True
    blocking = True

    def __init__(
        self,
        source: Source,
        *,
        schema: str | None = None,
        max_snapshot_bytes: int = MAX_SNAPSHOT_BYTES,
        timeout_s: float = 10.0,
        max_connections: int = 8,
    ) -> None:
        self.max_snapshot_bytes = max_snapshot_bytes
        self._options = {
            "schema": schema,
            "timeout_s": timeout_s,
            "max_connections": max_connections,
        }
        self._source = source
        self._lock = threading.Lock()
        self._ledger: PostgresLedger | None = None
        self._database = Database(
            source,
            schema=schema,
            part="store",
            version=_VERSION,
            tables=_TABLES,
            timeout_s=timeout_s,
            max_connections=max_connections,
        )

    @property
    def ledger(self) -> PostgresLedger:
        """The ledger beside the store, opened when it is first asked for."""
        with self._lock:
            if self._ledger is None:
                self._ledger = PostgresLedger(self._source, **self._options)  # type: ignore[arg-type]
            return self._ledger

    def disconnect(self) -> None:
        """Close the connections that are not in use, the ledger's too."""
        self._database.disconnect()
        if self._ledger is not None:
            self._ledger.disconnect()

    def __enter__(self) -> PostgresStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.disconnect()

    def load(self, key: str) -> Stored | None:
        sql = "SELECT rev, snapshot, updated_at FROM {t}guardchart_runs WHERE id = %s"
        found = self._all(READ, sql, (_id(key),))
        if not found:
            return None
        rev, text, updated_at = found[0]
        return Stored(key=key, rev=rev, snapshot=json.loads(text), updated_at=updated_at)

    def create(
        self,
        key: str,
        snapshot: Mapping[str, Any],
        *,
        events: Sequence[Mapping[str, Any]] = (),
        now: int,
    ) -> int:
        return self._write(_CREATE, key, 0, snapshot, events, now)

    def commit(
        self,
        key: str,
        expect: int,
        snapshot: Mapping[str, Any],
        *,
        events: Sequence[Mapping[str, Any]] = (),
        now: int,
    ) -> int:
        return self._write(_UPDATE, key, expect, snapshot, events, now)

    def _write(
        self,
        sql: str,
        name: str,
        expect: int,
        snapshot: Mapping[str, Any],
        events: Sequence[Mapping[str, Any]],
        now: int,
    ) -> int:
        import psycopg

        write = written(name, snapshot, events, self.max_snapshot_bytes)
        given = {
            "run": _id(name),
            "key": name,
            "expect": expect,
            "snapshot": write.text,
            "status": write.status,
            "states": [str(each) for each in json.loads(write.state_ids)],
            "now": now,
            "ids": [None if each is None else key(each) for each, _ in write.events],
            "bodies": [body for _, body in write.events],
            "timers": [key(each) for each in write.timers],
            "names": list(write.timers),
            "dues": list(write.timers.values()),
        }
        statement = self._database.sql(_WRITE.replace("{write}", sql))
        with self._database.transaction(self._database.write(None)) as cursor:
            try:
                found = cursor.execute(statement, given).fetchone()
            except psycopg.errors.UniqueViolation:
                raise conflict(name) from None
            if found is None:
                raise conflict(name)
            return int(found[0])

    def claim_due(self, now: int, owner: str, limit: int = 100, lease_s: float = 30.0) -> list[Due]:
        given = {
            "now": now,
            "owner": owner,
            "limit": max(limit, 0),
            "until": now + lease_s * 1000.0,
        }
        return [Due(*row) for row in self._all(self._database.write(None), _CLAIM, given)]

    def events(self, key: str, *, after: int = 0) -> list[dict[str, Any]]:
        sql = (
            "SELECT event, rev FROM {t}guardchart_events "
            "WHERE run = %s AND rev > %s AND event IS NOT NULL ORDER BY seq"
        )
        found = self._all(READ, sql, (_id(key), after))
        return [{**json.loads(text), "rev": rev} for text, rev in found]

    def compact(self, key: str, *, now: int) -> int:
        run = _id(key)
        sql = self._database.sql
        with self._database.transaction(self._database.write(None)) as cursor:
            # The run's row is the lock: no write comes between.
            select = "SELECT 1 FROM {t}guardchart_runs WHERE id = %s FOR UPDATE"
            cursor.execute(sql(select), (run,))
            count = "SELECT count(*) FROM {t}guardchart_events WHERE run = %s AND event IS NOT NULL"
            found = cursor.execute(sql(count), (run,)).fetchone()
            replaced = 0 if found is None else int(found[0])
            if replaced:
                for each in (
                    "DELETE FROM {t}guardchart_events WHERE run = %s AND id IS NULL",
                    "UPDATE {t}guardchart_events SET event = NULL WHERE run = %s",
                    "INSERT INTO {t}guardchart_events (run, rev, event) SELECT id, rev, "
                    """'{"kind":"snapshot","snapshot":' || snapshot || '}' """
                    "FROM {t}guardchart_runs WHERE id = %s",
                ):
                    cursor.execute(sql(each), (run,))
        return replaced

    def find(self, *, state: str | None = None, limit: int = 1_000) -> list[Summary]:
        sql = "SELECT key, rev, status, state_ids, since, updated_at FROM {t}guardchart_runs "
        if state is not None:
            sql += "WHERE state_ids @> ARRAY[%(state)s]::text[] "
        sql += "ORDER BY since, key LIMIT %(limit)s"
        found = self._all(READ, sql, {"state": state, "limit": max(limit, 0)})
        return [
            Summary(name, rev, status, tuple(ids), since, updated_at)
            for name, rev, status, ids, since, updated_at in found
        ]

    def delete(self, key: str) -> bool:
        run = _id(key)
        sql = self._database.sql
        with self._database.transaction(self._database.write(None)) as cursor:
            gone = cursor.execute(sql("DELETE FROM {t}guardchart_runs WHERE id = %s"), (run,))
            deleted = bool(gone.rowcount)
            for table in ("timers", "events"):
                cursor.execute(sql(f"DELETE FROM {{t}}guardchart_{table} WHERE run = %s"), (run,))
        return deleted

    def _all(self, begin: str, statement: str, given: Any) -> list[tuple[Any, ...]]:
        with self._database.transaction(begin) as cursor:
            return cursor.execute(self._database.sql(statement), given).fetchall()


def _id(name: str) -> bytes:
    check_key(name)
    return key(name)
