"""`ledger_for`: the ledger that belongs beside a checkpointer."""

from __future__ import annotations

import asyncio
import gc
import sqlite3
import weakref
from pathlib import Path
from typing import Any

import pytest
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver

from guardchart.errors import AgentConfigError
from guardchart.langgraph import ledger_for
from guardchart.langgraph._ledger import DeferredLedger
from guardchart.persistence import InMemoryLedger, Slot, SQLiteLedger

SLOT = Slot("t", "r", "agent", 0, "refund", "d" * 64, 0)


def test_ledger_for_gives_an_in_memory_saver_one_in_memory_ledger() -> None:
    saver, other = InMemorySaver(), InMemorySaver()
    assert isinstance(ledger_for(saver), InMemoryLedger)
    assert ledger_for(saver) is ledger_for(saver)
    assert ledger_for(saver) is not ledger_for(other)


def test_ledger_for_does_not_keep_a_saver_alive() -> None:
    saver = InMemorySaver()
    ledger = ledger_for(saver)
    gone = weakref.ref(saver)
    del saver
    gc.collect()
    assert gone() is None and ledger is not None


def test_ledger_for_puts_its_table_into_the_file_of_a_sqlite_saver(tmp_path: Path) -> None:
    file = tmp_path / "checkpoints.sqlite"
    with SqliteSaver.from_conn_string(str(file)) as saver:
        ledger = ledger_for(saver)
        assert isinstance(ledger, SQLiteLedger)
        assert ledger_for(saver) is ledger
        row = ledger.propose(SLOT, "call_1", {"amount_cents": 5}, now=1)
        with sqlite3.connect(file) as look:
            tables = [name for (name,) in look.execute("select name from sqlite_master")]
        look.close()
        assert any("ledger" in name or "call" in name for name in tables), tables
        assert ledger.row("t", row.id) == row
        ledger.disconnect()


@pytest.mark.parametrize("name", [":memory:", "file:shared?mode=memory&cache=shared"])
def test_ledger_for_gives_a_sqlite_saver_in_memory_an_in_memory_ledger(name: str) -> None:
    conn = sqlite3.connect(name, uri=True, check_same_thread=False)
    assert isinstance(ledger_for(SqliteSaver(conn)), InMemoryLedger)
    conn.close()


async def test_ledger_for_finds_the_file_of_an_async_saver_at_first_use(tmp_path: Path) -> None:
    file = tmp_path / "checkpoints.sqlite"
    async with AsyncSqliteSaver.from_conn_string(str(file)) as saver:
        ledger: Any = ledger_for(saver)
        assert ledger_for(saver) is ledger
        assert isinstance(ledger, DeferredLedger) and not ledger.resolved
        with pytest.raises(AgentConfigError, match="ainvoke"):
            ledger.pending("t")
        # Any other thread may simply use it.
        row = await asyncio.to_thread(
            lambda: ledger.propose(SLOT, "call_1", {"amount_cents": 5}, now=1)
        )
        real = await ledger.aresolve()
        assert isinstance(real, SQLiteLedger) and ledger.resolved
        assert ledger.durable and real.row("t", row.id) == row
        real.disconnect()


async def test_ledger_for_resolves_an_async_saver_from_its_own_loop(tmp_path: Path) -> None:
    async with AsyncSqliteSaver.from_conn_string(str(tmp_path / "c.sqlite")) as saver:
        real = await ledger_for(saver).aresolve()  # type: ignore[attr-defined]
        assert isinstance(real, SQLiteLedger)
        real.disconnect()
    async with AsyncSqliteSaver.from_conn_string(":memory:") as saver:
        assert isinstance(await ledger_for(saver).aresolve(), InMemoryLedger)  # type: ignore[attr-defined]


def test_a_deferred_ledger_says_so_when_its_saver_or_loop_is_gone() -> None:
    async def make() -> tuple[Any, Any]:
        async with AsyncSqliteSaver.from_conn_string(":memory:") as saver:
            return saver, ledger_for(saver)

    saver, ledger = asyncio.run(make())
    with pytest.raises(AgentConfigError, match="loop of the AsyncSqliteSaver does not run"):
        ledger.pending("t")
    del saver
    gc.collect()
    with pytest.raises(AgentConfigError, match="no longer exists"):
        ledger.pending("t")


class RedisSaver:
    """Stands for a saver of another database."""


@pytest.mark.parametrize(
    ("saver", "says"),
    [
        (RedisSaver(), r"SQLiteLedger\(path\) or PostgresLedger\(dsn\), as ledger="),
        (None, "no checkpointer; pass the saver itself"),
        (True, "no checkpointer; pass the saver itself"),
        (InMemorySaver, "from a class"),
        ({}, "from a dict; pass a Ledger of your own"),
        ("checkpoints.sqlite", "from a str; pass a Ledger of your own"),
    ],
    ids=lambda each: each if isinstance(each, str) else type(each).__name__,
)
def test_ledger_for_says_what_to_pass_when_it_knows_no_ledger(saver: Any, says: str) -> None:
    with pytest.raises(AgentConfigError, match=says):
        ledger_for(saver)
