"""Every store passes the kit that every store has to pass."""

from __future__ import annotations

import psycopg
import pytest

from guardchart.persistence import MemoryStore, PostgresStore, SQLiteStore
from guardchart.testing import StoreConformance

SIZE = {"max_snapshot_bytes": 20_000}


@pytest.fixture(scope="module")
def database(_postgres_cluster):
    return _postgres_cluster.create_database()


class TestMemoryStore(StoreConformance):
    @pytest.fixture
    def make_store(self):
        store = MemoryStore(**SIZE)
        return lambda: store


class TestSQLiteStore(StoreConformance):
    @pytest.fixture
    def make_store(self, tmp_path):
        handles = []

        def make():
            handles.append(SQLiteStore(tmp_path / "runs.db", **SIZE))
            return handles[-1]

        yield make
        for handle in handles:
            handle.disconnect()


class TestSQLiteStoreInMemory(StoreConformance):
    @pytest.fixture
    def make_store(self):
        with SQLiteStore(":memory:", **SIZE) as store:
            yield lambda: store


@pytest.mark.needs_postgres
class TestPostgresStore(StoreConformance):
    @pytest.fixture
    def make_store(self, database):
        handles = []

        def make():
            handles.append(PostgresStore(database, **SIZE))
            return handles[-1]

        yield make
        for handle in handles:
            handle.disconnect()
        tables = [f"guardchart_{each}" for each in ("runs", "timers", "events", "ledger")]
        with psycopg.connect(database, autocommit=True) as connection:
            for table in tables:
                if connection.execute("SELECT to_regclass(%s)", (table,)).fetchone() != (None,):
                    connection.execute(f"TRUNCATE {table}")
