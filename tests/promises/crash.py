"""One process of the crash test: park, approve, and be killed where it is told.

``python -m tests.promises.crash <folder> <point>``; prints what a caller sees as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.graph import END, START, StateGraph

from guardchart.agents import (
    FakeModel,
    RetryPolicy,
    agent_logic,
    pending_approval,
    tool,
    tool_registry,
)
from guardchart.gate import approval_event
from guardchart.langgraph import ledger_for, statechart_node
from tests.langgraph.once.ledgers import Kills, die
from tests.promises.bank import SAY, THREAD, State, listed_chart

REFUND = {"tool": "refund", "args": {"order_id": 7, "cents": 250}, "id": "call_1"}


def main() -> None:
    folder, point = Path(sys.argv[1]), sys.argv[2]

    def refund(order_id: int, cents: int) -> str:
        """Refund an order."""
        if point == "enter":
            die()
        with (folder / "effects.log").open("a") as log:
            log.write(f"{order_id} {cents}\n")
            log.flush()
            os.fsync(log.fileno())
        if point == "effect":
            die()
        return "refunded"

    with SqliteSaver.from_conn_string(str(folder / "app.sqlite")) as saver:
        script = [SAY] if (folder / "parked").exists() else [REFUND, SAY]
        logic = agent_logic(
            FakeModel(script, is_async=False),
            tool_registry(tool(refund, side_effect=True, timeout_s=1)),
            retry=RetryPolicy(delay_s=0),
        )
        builder = StateGraph(State)
        node = statechart_node(
            listed_chart("refund"),
            logic,
            event_from_state=lambda state: state.get("event"),
            event_key="event",
            ledger=Kills(ledger_for(saver), point),
        )
        builder.add_node("agent", node)
        builder.add_edge(START, "agent")
        builder.add_edge("agent", END)
        app = builder.compile(checkpointer=saver)
        state = app.get_state(THREAD).values
        if (state.get("xsm") or {}).get("value") != "awaiting_human":
            state = app.invoke({"event": {"type": "START", "prompt": "Please help."}}, THREAD)
            (folder / "parked").touch()
        else:
            time.sleep(1.5)  # the claim of the process that died is older than the tool's timeout
        pending = pending_approval(state["xsm"]["context"])
        state = app.invoke({"event": approval_event(pending)}, THREAD)
    messages = state["xsm"]["context"]["messages"]
    results = [each["content"] for each in messages if each["role"] == "tool"]
    print(json.dumps({"state": state["xsm"]["value"], "result": results[-1]}))


if __name__ == "__main__":
    main()
