"""Tools and results that took their process, its loop or its time with them."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiosqlite
import pytest
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver

from guardchart.agents import FakeModel, agent_logic, pending_approval, tool, tool_registry
from guardchart.errors import AgentConfigError
from guardchart.gate import approval_event
from guardchart.langgraph import ledger_for, statechart_node
from guardchart.persistence import InMemoryLedger
from tests.langgraph.graphs import compiled, from_event, loop_chart, loop_router, start, thread
from tests.promises.bank import AT_ONCE


def quits(n: int) -> str:
    """Exit."""
    sys.exit(n)


async def quits_async(n: int) -> str:
    """Exit."""
    sys.exit(n)


def presses(n: int) -> str:
    """Interrupt."""
    raise KeyboardInterrupt


def stops(n: int) -> str:
    """Stop."""
    raise StopIteration(n)


class Lazy:
    """Something that is read when it is shown."""

    def __str__(self) -> str:
        reading.set()
        return "read" if read.wait(5) else "nobody else came to run"


reading, read = threading.Event(), threading.Event()


@pytest.fixture(autouse=True)
def _read() -> Any:
    reading.clear()
    read.clear()
    yield
    read.set()


def lazy(n: int) -> Any:
    """Return something lazy."""
    return Lazy()


async def lazy_async(n: int) -> Any:
    """Return something lazy."""
    return Lazy()


def app(fn: Callable[..., Any], *, is_async: bool, timeout_s: float = 5) -> Any:
    registry = tool_registry(tool(fn, side_effect=True, timeout_s=timeout_s))
    model = FakeModel(
        [{"tool": fn.__name__, "args": {"n": 3}, "id": "c1"}, {"text": "ok"}], is_async=is_async
    )
    node = statechart_node(
        loop_chart(fn.__name__),
        agent_logic(model, registry, retry=AT_ONCE, ledger=InMemoryLedger()),
        event_key="event",
        event_from_state=from_event,
    )
    return compiled(node, router=loop_router())


async def approved(app: Any) -> list[str]:
    out = await app.ainvoke({"event": start()}, thread())
    pending = pending_approval(out["xsm"]["context"])
    out = await app.ainvoke({"event": approval_event(pending)}, thread())
    assert out["xsm"]["value"] == "done"
    return [m["content"] for m in out["xsm"]["context"]["messages"] if m["role"] == "tool"]


@pytest.mark.parametrize("fn", [quits, quits_async, presses, stops])
async def test_a_tool_that_raises_what_ends_a_loop_is_a_tool_that_failed(
    fn: Callable[..., Any],
) -> None:
    (text,) = await approved(app(fn, is_async=True))
    assert text.startswith(("error: SystemExit", "error: KeyboardInterrupt", "error: StopIter"))


@pytest.mark.parametrize("fn", [lazy, lazy_async])
async def test_a_result_that_takes_its_time_to_be_shown_holds_up_no_other_conversation(
    fn: Callable[..., Any],
) -> None:
    async def other() -> None:
        while not reading.is_set():
            await asyncio.sleep(0.005)
        read.set()

    conversation = asyncio.create_task(other())
    (text,) = await approved(app(fn, is_async=True))
    conversation.cancel()
    assert text == '"read"'


def test_the_timeout_of_a_tool_covers_the_showing_of_its_result() -> None:
    graph = app(lazy, is_async=False, timeout_s=0.1)
    out = graph.invoke({"event": start()}, thread())
    pending = pending_approval(out["xsm"]["context"])
    out = graph.invoke({"event": approval_event(pending)}, thread())
    (told,) = [m["content"] for m in out["xsm"]["context"]["messages"] if m["role"] == "tool"]
    assert "timed out" in told


async def test_the_ledger_of_a_saver_whose_loop_stands_still_is_refused_not_awaited_for_ever(
    tmp_path: Path,
) -> None:
    async def saver() -> Any:
        return AsyncSqliteSaver(await aiosqlite.connect(tmp_path / "checkpoints.db"))

    other = asyncio.new_event_loop()
    try:
        made = await asyncio.to_thread(other.run_until_complete, saver())
        with pytest.raises(AgentConfigError, match="does not run"):
            await asyncio.wait_for(ledger_for(made).aresolve(), 5)  # type: ignore[attr-defined]
        await asyncio.to_thread(other.run_until_complete, made.conn.close())
    finally:
        other.close()
