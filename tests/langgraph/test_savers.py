"""LangGraph's own conformance suite, on savers whose database holds our ledger, in use."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from langgraph.checkpoint.postgres import PostgresSaver
from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver

from guardchart.langgraph import ledger_for
from guardchart.persistence import Decision, Slot

pytestmark = pytest.mark.slow


class Awaited:
    """A sync saver's verbs, awaited: the suite knows no others."""

    async def aput(self: Any, *args: Any, **more: Any) -> Any:
        return await asyncio.to_thread(self.put, *args, **more)

    async def aput_writes(self: Any, *args: Any, **more: Any) -> None:
        await asyncio.to_thread(self.put_writes, *args, **more)

    async def aget_tuple(self: Any, config: Any) -> Any:
        return await asyncio.to_thread(self.get_tuple, config)

    async def alist(self: Any, *args: Any, **more: Any) -> AsyncIterator[Any]:
        for each in await asyncio.to_thread(lambda: list(self.list(*args, **more))):
            yield each

    async def adelete_thread(self: Any, thread_id: str) -> None:
        await asyncio.to_thread(self.delete_thread, thread_id)


class AwaitedSqliteSaver(Awaited, SqliteSaver):
    pass


class AwaitedPostgresSaver(Awaited, PostgresSaver):
    pass


def use(ledger: Any, scope: str, number: int) -> None:
    """A call's whole life."""
    slot = Slot(scope, "run", "", number, "refund", "d" * 64, 0)
    row = ledger.propose(slot, f"call_{number}", {"order_id": number}, now=1)
    ledger.decide(scope, {row.id: Decision("approve", row.digest)}, "ann", now=2)
    claim = ledger.claim(scope, row.id, row.digest, owner="me", now=3)
    ledger.record(scope, row.id, claim.token, "done", "refunded", now=4)


@contextlib.asynccontextmanager
async def in_use(ledger: Any, scope: str) -> AsyncIterator[list[int]]:
    """Have the ledger used from another thread, all the time."""
    numbers: list[int] = []

    async def go_on() -> None:
        while True:
            await asyncio.to_thread(use, ledger, scope, len(numbers))
            numbers.append(len(numbers))
            await asyncio.sleep(0.01)

    task = asyncio.create_task(go_on())
    try:
        yield numbers
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@pytest.mark.parametrize(
    "kind",
    [
        AwaitedSqliteSaver,
        AsyncSqliteSaver,
        pytest.param(AwaitedPostgresSaver, marks=pytest.mark.needs_postgres),
        pytest.param(AsyncPostgresSaver, marks=pytest.mark.needs_postgres),
    ],
    ids=lambda kind: kind.__name__,
)
async def test_a_saver_conforms_while_the_ledger_beside_it_is_used(
    kind: Any, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    from langgraph.checkpoint.conformance import checkpointer_test, validate

    on_postgres = "Postgres" in kind.__name__
    where = request.getfixturevalue("postgres_database") if on_postgres else str(tmp_path / "c.db")
    lives: list[int] = []

    @checkpointer_test(name=kind.__name__)
    async def opened() -> AsyncIterator[Any]:
        made = kind.from_conn_string(where)
        async with contextlib.AsyncExitStack() as stack:
            if hasattr(made, "__aenter__"):
                saver = await stack.enter_async_context(made)
                await saver.setup()
                ledger = await ledger_for(saver).aresolve()  # type: ignore[attr-defined]
            else:
                saver = stack.enter_context(made)
                saver.setup()
                ledger = ledger_for(saver)
            stack.callback(ledger.disconnect)
            scope = f"thread {len(lives)}"
            numbers = await stack.enter_async_context(in_use(ledger, scope))
            yield saver
            rows = [ledger.row(scope, f"call_{number}") for number in numbers]
            assert all(row is not None and row.status == "done" for row in rows)
            lives.append(len(rows))

    report = await validate(opened)
    assert report.passed_all(), [each.failures for each in report.results.values()]
    assert report.passed_all_base()
    assert sum(lives)
