"""One process of the PostgreSQL tests: park or answer a thread, and die where it is told.

``python -m tests.langgraph.postgres_life <dsn> <folder> <sync|async> <step> <point>`` prints
what its caller sees as JSON. ``step`` is ``park`` or ``approve``, ``point`` a verb of the
ledger after which the process is killed, ``enter``, ``effect``, or ``nowhere``.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from langgraph.checkpoint.postgres import PostgresSaver
from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver

from guardchart.agents import FakeModel, RetryPolicy, agent_logic, pending_approval, tool
from guardchart.agents import tool_registry as registry
from guardchart.gate import approval_event
from guardchart.langgraph import ledger_for, statechart_node
from tests.langgraph.graphs import REFUND, compiled, from_event, loop_chart, start, thread
from tests.langgraph.once.ledgers import Kills, die

SAY = {"text": "Done."}


def graph(saver: Any, ledger: Any, folder: Path, point: str = "nowhere", **model: Any) -> Any:
    """The usual loop whose refund is written to ``effects.log``."""

    def refund(order_id: int, amount_cents: int) -> str:
        """Refund an order."""
        if point == "enter":
            die()
        with (folder / "effects.log").open("a") as log:
            log.write(f"{order_id} {amount_cents}\n")
            log.flush()
            os.fsync(log.fileno())
        if point == "effect":
            die()
        return "refunded"

    # A process that resumes has a model that goes on, and never one that asks again.
    parked = (folder / "parked").exists()
    node = statechart_node(
        loop_chart("refund"),
        agent_logic(
            FakeModel([SAY] if parked else [REFUND, SAY], **model),
            registry(tool(refund, side_effect=True, timeout_s=1)),
            retry=RetryPolicy(delay_s=0),
        ),
        event_from_state=from_event,
        event_key="event",
        ledger=ledger,
    )
    return compiled(node, saver=saver)


def told(state: Any) -> dict[str, Any]:
    xsm = state["xsm"]
    results = [each["content"] for each in xsm["context"]["messages"] if each["role"] == "tool"]
    return {"state": xsm["value"], "results": results, "denied": xsm["receipt"]["denied"]}


def sync_life(dsn: str, folder: Path, step: str, point: str) -> Any:
    with PostgresSaver.from_conn_string(dsn) as saver:
        saver.setup()
        ledger = ledger_for(saver)
        app = graph(saver, Kills(ledger, point), folder, point, is_async=False)
        if step == "park":
            return app.invoke({"event": start()}, thread())
        pending = pending_approval(app.get_state(thread()).values["xsm"]["context"])
        return app.invoke({"event": approval_event(pending)}, thread())


async def async_life(dsn: str, folder: Path, step: str, point: str) -> Any:
    async with AsyncPostgresSaver.from_conn_string(dsn) as saver:
        await saver.setup()
        ledger = await ledger_for(saver).aresolve()  # type: ignore[attr-defined]
        app = graph(saver, Kills(ledger, point), folder, point)
        if step == "park":
            return await app.ainvoke({"event": start()}, thread())
        state = await app.aget_state(thread())
        pending = pending_approval(state.values["xsm"]["context"])
        return await app.ainvoke({"event": approval_event(pending)}, thread())


def live(dsn: str, folder: Path, kind: str, step: str, point: str = "nowhere") -> dict[str, Any]:
    """Park or approve, in this process."""
    if kind == "sync":
        state = sync_life(dsn, folder, step, point)
    else:
        state = asyncio.run(async_life(dsn, folder, step, point))
    if step == "park":
        (folder / "parked").touch()
    return told(state)


if __name__ == "__main__":
    dsn, folder, *rest = sys.argv[1:]
    print(json.dumps(live(dsn, Path(folder), *rest)))
