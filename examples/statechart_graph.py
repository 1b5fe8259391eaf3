"""A chart compiled into LangGraph tasks: it asks a person, its process ends, another resumes it.

``python examples/statechart_graph.py`` runs each life in a process of its own over one SQLite
file, once for each shape of an answer, and prints the graph.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.types import Command

from guardchart.agents import FakeModel, agent_logic, approval_event, load_chart, tool
from guardchart.agents import tool_registry as registry
from guardchart.langgraph import ledger_for, pending_approval, resume_pending, statechart_graph

REFUND = {"tool": "refund_order", "args": {"order_id": 7, "amount_cents": 2500}, "id": "call_1"}
SHAPES = ("decisions", "approval_event", "hitl", "resume_pending", "per_call")


def lookup_order(order_id: int) -> str:
    """Look up an order."""
    return f"order {order_id}: delivered, 25.00 EUR"


def build(folder: Path, saver: Any, shape: str, resumed: bool) -> Any:
    """The graph; a process that resumes has a model that goes on, and never asks again."""

    def refund_order(order_id: int, amount_cents: int) -> str:
        """Refund an order."""
        with (folder / "refunds.log").open("a") as log:
            log.write(f"{order_id} {amount_cents}\n")
        return "refunded"

    chart = load_chart()
    for state in ("awaiting_model", "awaiting_tool"):
        chart["states"][state]["meta"]["tools"] = ["lookup_order", "refund_order"]
    look = {"tool": "lookup_order", "args": {"order_id": 7}}
    script = [{"text": "Your 25 euros are on their way."}] if resumed else [look, REFUND]
    return statechart_graph(
        chart,
        agent_logic(
            FakeModel(script, is_async=False),
            registry(lookup_order, tool(refund_order, side_effect=True)),
        ),
        messages_key="messages",
        interrupt_mode="per_call" if shape == "per_call" else "batched",
        checkpointer=saver,
        ledger=ledger_for(saver),
    )


def answer(graph: Any, config: Any, shape: str) -> Any:
    """Approve what is pending, in one of the shapes an approval page may send."""
    (item,) = pending_approval(graph, config)
    named = {"id": item["id"], "digest": item["digest"]}
    if shape == "resume_pending":
        return resume_pending(graph, config, [{**item, "decision": "approve"}], by="ann")
    shapes: dict[str, Any] = {
        "decisions": {"decisions": [{**named, "decision": "approve"}], "by": "ann"},
        "approval_event": approval_event([item], by="ann"),
        "hitl": {"decisions": [{**named, "type": "approve"}]},
        "per_call": {"decision": "approve", "digest": item["digest"], "by": "ann"},
    }
    return graph.invoke(Command(resume=shapes[shape]), config)


def live(folder: Path, step: str, shape: str) -> None:
    """One process: ask, or approve; prints what came of it."""
    with SqliteSaver.from_conn_string(str(folder / "app.sqlite")) as saver:
        graph = build(folder, saver, shape, resumed=step == "resume")
        config = {"configurable": {"thread_id": shape}}
        if step == "picture":
            print(graph.get_graph().draw_mermaid())
        elif step == "ask":
            start = {"type": "START", "prompt": "Refund order 7, please."}
            graph.invoke({"event": start}, config)
            (item,) = pending_approval(graph, config)
            print(f"{item['name']}({json.dumps(item['arguments'])}) {item['digest'][:12]}")
        else:
            out = answer(graph, config, shape)
            print(f"{out['xsm']['value']}: {out['messages'][-1].content}")


def run(folder: Path, step: str, shape: str) -> str:
    """Run one life in a process of its own."""
    command = [sys.executable, __file__, str(folder), step, shape]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def main() -> None:
    """Tell the story."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        print(run(folder, "picture", "decisions"))
        for shape in SHAPES:
            print(f"\n{shape}")
            print("  a process asks:      ", run(folder, "ask", shape))
            print("  another one resumes: ", run(folder, "resume", shape))
        refunds = (folder / "refunds.log").read_text().splitlines()
        print(f"\nrefunds entered: {len(refunds)}, threads: {len(SHAPES)}")


if __name__ == "__main__":
    if len(sys.argv) == 4:
        live(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
    else:
        main()
