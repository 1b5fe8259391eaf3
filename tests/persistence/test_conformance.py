"""Both ledgers of the standard library pass the kit that every ledger has to pass."""

from __future__ import annotations

import pytest

from guardchart.persistence import InMemoryLedger, SQLiteLedger
from guardchart.testing import LedgerConformance


class TestInMemoryLedger(LedgerConformance):
    @pytest.fixture
    def make_ledger(self):
        ledger = InMemoryLedger()
        return lambda: ledger


class TestSQLiteLedger(LedgerConformance):
    @pytest.fixture
    def make_ledger(self, tmp_path):
        handles = []

        def make():
            handles.append(SQLiteLedger(tmp_path / "ledger.db"))
            return handles[-1]

        yield make
        for handle in handles:
            handle.disconnect()


class TestSQLiteLedgerInMemory(LedgerConformance):
    @pytest.fixture
    def make_ledger(self):
        with SQLiteLedger(":memory:") as ledger:
            yield lambda: ledger
