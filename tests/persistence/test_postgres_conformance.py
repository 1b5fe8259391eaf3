"""The PostgreSQL ledger passes the kit that every ledger has to pass."""

from __future__ import annotations

import psycopg
import psycopg_pool
import pytest

from guardchart.persistence import PostgresLedger
from guardchart.testing import LedgerConformance


@pytest.fixture(scope="module")
def database(_postgres_cluster):
    """One database for the module: tables are emptied, which is faster than a new one a test."""
    return _postgres_cluster.create_database()


@pytest.fixture
def empty(database):
    with psycopg.connect(database, autocommit=True) as connection:
        if connection.execute("SELECT to_regclass('guardchart_ledger')").fetchone() != (None,):
            connection.execute("TRUNCATE guardchart_ledger RESTART IDENTITY")
    return database


@pytest.mark.needs_postgres
class TestPostgresLedger(LedgerConformance):
    @pytest.fixture
    def make_ledger(self, empty):
        handles = []

        def make():
            handles.append(PostgresLedger(empty))
            return handles[-1]

        yield make
        for handle in handles:
            handle.disconnect()


@pytest.mark.needs_postgres
@pytest.mark.slow
class TestPostgresLedgerOnAPool(LedgerConformance):
    """The same on an app's pool, whose connections are neither autocommit nor tuples."""

    @pytest.fixture
    def make_ledger(self, empty):
        options = {"row_factory": psycopg.rows.dict_row}
        with psycopg_pool.ConnectionPool(
            empty, min_size=1, max_size=8, kwargs=options, open=True
        ) as pool:
            yield lambda: PostgresLedger(pool)
