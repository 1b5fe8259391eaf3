"""Both engines, both ledgers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from guardchart.persistence import InMemoryLedger, SQLiteLedger
from tests.agents.loops import Loops


@pytest.fixture(params=["sync", "async"])
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["memory", "sqlite"])
def ledger(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    if request.param == "memory":
        yield InMemoryLedger()
        return
    made = SQLiteLedger(tmp_path / "ledger.db")
    yield made
    made.disconnect()


@pytest.fixture
def loops(engine: str) -> Iterator[Loops]:
    """Loops of either engine on an in-memory ledger."""
    made = Loops(engine, InMemoryLedger())
    yield made
    made.close()


@pytest.fixture
def durable(engine: str, ledger: Any) -> Iterator[Loops]:
    """Loops of either engine on either ledger."""
    made = Loops(engine, ledger)
    yield made
    made.close()
