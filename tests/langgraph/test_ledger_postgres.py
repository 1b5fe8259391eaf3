"""`ledger_for` and `statechart_node` on LangGraph's PostgreSQL savers, with real processes."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any

import psycopg
import pytest
from langgraph.checkpoint.postgres import PostgresSaver
from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver
from psycopg.conninfo import make_conninfo
from psycopg_pool import AsyncConnectionPool, ConnectionPool

from guardchart.agents import pending_approval
from guardchart.errors import AgentConfigError
from guardchart.gate import approval_event
from guardchart.langgraph import ledger_for
from guardchart.persistence import PostgresLedger, Slot
from tests.langgraph.graphs import start, thread
from tests.langgraph.postgres_life import graph, live, told

ROOT = Path(__file__).resolve().parents[2]
SLOT = Slot("t", "r", "agent", 0, "refund", "d" * 64, 0)
KINDS = ["connection", "pipeline", "pool"]

pytestmark = pytest.mark.needs_postgres


@pytest.fixture
def dsn(postgres_database: str) -> str:
    return postgres_database


def schemas(dsn: str) -> list[str]:
    query = "SELECT schemaname FROM pg_tables WHERE tablename = 'guardchart_ledger'"
    with psycopg.connect(dsn) as connection:
        return [name for (name,) in connection.execute(query)]


def set_up(dsn: str) -> None:
    # Not in a pipeline: what LangGraph's `setup` creates, PostgreSQL does not create in one.
    with PostgresSaver.from_conn_string(dsn) as saver:
        saver.setup()


def sync_saver(stack: ExitStack, kind: str, dsn: str) -> PostgresSaver:
    if kind == "pool":
        pool: Any = ConnectionPool(dsn, min_size=1, max_size=2, kwargs={"autocommit": True})
        return PostgresSaver(stack.enter_context(pool))
    saver = PostgresSaver.from_conn_string(dsn, pipeline=kind == "pipeline")
    return stack.enter_context(saver)


async def async_saver(stack: AsyncExitStack, kind: str, dsn: str) -> AsyncPostgresSaver:
    if kind == "pool":
        options: Any = {"autocommit": True}
        pool: Any = AsyncConnectionPool(dsn, min_size=1, max_size=2, kwargs=options, open=False)
        return AsyncPostgresSaver(await stack.enter_async_context(pool))
    saver = AsyncPostgresSaver.from_conn_string(dsn, pipeline=kind == "pipeline")
    return await stack.enter_async_context(saver)


# --- what the saver holds decides ----------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_ledger_for_opens_the_database_of_a_postgres_saver(dsn: str, kind: str) -> None:
    with ExitStack() as stack:
        saver = sync_saver(stack, kind, dsn)
        ledger = ledger_for(saver)
        assert isinstance(ledger, PostgresLedger) and ledger_for(saver) is ledger
        with ledger, PostgresLedger(dsn) as same:
            row = ledger.propose(SLOT, "call_1", {"amount_cents": 5}, now=1)
            assert same.pending() == [row]
        set_up(dsn)
        # The saver's own connection is none the worse for having been asked.
        assert list(saver.list(None)) == []


@pytest.mark.parametrize("kind", KINDS)
async def test_ledger_for_finds_the_database_of_an_async_saver_at_first_use(
    dsn: str, kind: str
) -> None:
    async with AsyncExitStack() as stack:
        saver = await async_saver(stack, kind, dsn)
        ledger: Any = ledger_for(saver)
        assert ledger_for(saver) is ledger and not ledger.resolved
        with pytest.raises(AgentConfigError, match=r"of an AsyncPostgresSaver .* ainvoke"):
            ledger.pending("t")
        row = await asyncio.to_thread(lambda: ledger.propose(SLOT, "call_1", {}, now=1))
        real = await ledger.aresolve()
        assert isinstance(real, PostgresLedger) and ledger.durable
        with real, PostgresLedger(dsn) as same:
            assert same.pending() == [row]
        set_up(dsn)
        assert [each async for each in saver.alist(None)] == []


@pytest.mark.parametrize("ready", [True, False], ids=["set up", "not set up"])
def test_ledger_for_puts_its_table_beside_the_checkpoints(dsn: str, ready: bool) -> None:
    with psycopg.connect(dsn, autocommit=True) as admin:
        admin.execute('CREATE SCHEMA "My App"')

    def configure(connection: psycopg.Connection[Any]) -> None:
        connection.execute('SET search_path = "My App", public')

    pool: Any = ConnectionPool(dsn, min_size=1, configure=configure, kwargs={"autocommit": True})
    with pool:
        saver = PostgresSaver(pool)
        if ready:
            saver.setup()
        ledger_for(saver).disconnect()  # type: ignore[attr-defined]
        saver.setup()
    assert schemas(dsn) == ["My App"]


def test_ledger_for_follows_checkpoints_that_are_not_in_the_first_schema(dsn: str) -> None:
    with PostgresSaver.from_conn_string(dsn) as saver:
        saver.setup()
    with psycopg.connect(dsn, autocommit=True) as admin:
        admin.execute("CREATE SCHEMA first")
    with PostgresSaver.from_conn_string(f"{dsn}?options=-csearch_path%3Dfirst,public") as saver:
        ledger_for(saver).disconnect()  # type: ignore[attr-defined]
    assert schemas(dsn) == ["public"]


def test_ledger_for_says_what_to_pass_when_the_saver_is_closed(dsn: str) -> None:
    with PostgresSaver.from_conn_string(dsn) as saver:
        pass
    with pytest.raises(AgentConfigError, match=r"while the saver is open; or pass PostgresLedger"):
        ledger_for(saver)


async def test_ledger_for_says_what_to_pass_when_an_async_saver_is_closed(dsn: str) -> None:
    async with AsyncPostgresSaver.from_conn_string(dsn) as saver:
        ledger: Any = ledger_for(saver)
    with pytest.raises(AgentConfigError, match=r"while the saver is open; or pass PostgresLedger"):
        await ledger.aresolve()


def test_ledger_for_says_what_to_pass_when_the_role_may_not_make_a_table(dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as admin:
        admin.execute("CREATE ROLE saver_only LOGIN PASSWORD 'pw'")
    with PostgresSaver.from_conn_string(make_conninfo(dsn, user="saver_only", password="pw")) as it:
        with pytest.raises(AgentConfigError, match=r"InsufficientPrivilege.*or pass Postgres") as e:
            ledger_for(it)
        assert "pw" not in str(e.value)
    with psycopg.connect(dsn, autocommit=True) as admin:
        admin.execute("DROP ROLE saver_only")


# --- the node ------------------------------------------------------------------------------------


def life(dsn: str, folder: Path, kind: str, step: str, point: str) -> Any:
    command = [sys.executable, "-m", "tests.langgraph.postgres_life", dsn, str(folder), kind]
    return subprocess.run(
        [*command, step, point], cwd=ROOT, capture_output=True, text=True, timeout=100
    )


def entered(folder: Path) -> list[str]:
    log = folder / "effects.log"
    return log.read_text().splitlines() if log.exists() else []


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_an_approval_given_in_another_process_runs_the_call_once(
    dsn: str, kind: str, tmp_path: Path
) -> None:
    parked = live(dsn, tmp_path, kind, "park")
    assert parked["state"] == "awaiting_human" and entered(tmp_path) == []
    answered = life(dsn, tmp_path, kind, "approve", "nowhere")
    assert answered.returncode == 0, answered.stderr
    assert json.loads(answered.stdout)["state"] == "done" and entered(tmp_path) == ["7 500"]


@pytest.mark.parametrize(
    ("kind", "point"),
    [
        ("sync", "effect"),
        ("async", "effect"),
        *(
            pytest.param(kind, point, marks=pytest.mark.slow)
            for kind in ("sync", "async")
            for point in ("decide", "claim", "enter", "record")
        ),
    ],
)
def test_a_process_killed_while_it_answers_leaves_one_entry_or_a_doubt(
    dsn: str, kind: str, point: str, tmp_path: Path
) -> None:
    live(dsn, tmp_path, kind, "park")
    killed = life(dsn, tmp_path, kind, "approve", point)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    time.sleep(1.1)  # the claim of the process that died is older than the tool's timeout
    result = live(dsn, tmp_path, kind, "approve")["results"][-1]
    expected = {"decide": 1, "claim": 0, "enter": 0, "effect": 1, "record": 1}
    assert entered(tmp_path) == ["7 500"] * expected[point]
    assert ("refunded" if point in ("decide", "record") else "in doubt") in result


@pytest.mark.parametrize("kind", KINDS)
def test_two_resumes_at_once_enter_once_and_both_see_the_result(
    dsn: str, kind: str, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        set_up(dsn)
        saver = sync_saver(stack, kind, dsn)
        ledger: Any = stack.enter_context(ledger_for(saver))  # type: ignore[arg-type]
        app = graph(saver, ledger, tmp_path, is_async=False)
        out = app.invoke({"event": start()}, thread())
        (tmp_path / "parked").touch()
        answer = {"event": approval_event(pending_approval(out["xsm"]["context"]))}

        def resume(_: int) -> Any:
            # As two workers would: a graph and a ledger each.
            with PostgresLedger(dsn) as own:
                return graph(saver, own, tmp_path, is_async=False).invoke(answer, thread())

        with ThreadPoolExecutor(2) as workers:
            seen = [told(state) for state in workers.map(resume, range(2))]
    assert entered(tmp_path) == ["7 500"]
    assert [each["results"] for each in seen] == [["refunded"]] * 2


@pytest.mark.parametrize("kind", KINDS)
async def test_two_resumes_at_once_on_an_async_saver_enter_once(
    dsn: str, kind: str, tmp_path: Path
) -> None:
    async with AsyncExitStack() as stack:
        set_up(dsn)
        saver = await async_saver(stack, kind, dsn)
        deferred: Any = ledger_for(saver)
        app = graph(saver, deferred, tmp_path)
        out = await app.ainvoke({"event": start()}, thread())
        (tmp_path / "parked").touch()
        answer = {"event": approval_event(pending_approval(out["xsm"]["context"]))}
        workers = [graph(saver, deferred, tmp_path) for _ in range(2)]
        states = await asyncio.gather(*(each.ainvoke(answer, thread()) for each in workers))
        (await deferred.aresolve()).disconnect()
    assert entered(tmp_path) == ["7 500"]
    assert [told(state)["results"] for state in states] == [["refunded"]] * 2
