"""What a thread of approvals leaves in the checkpointer: ``python -m benchmarks.checkpoint_size``.

A turn is one side effect: a question, the model's call, a person's yes, the tool, an answer. The
chart compiled by `statechart_graph` is compared with the same graph written by hand (same nodes,
same supersteps, same messages), each on a SQLite file of its own. Counted is what the saver's
tables hold. Exit status 1: a bar was missed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any, TypedDict

from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.graph import END, START, StateGraph

from benchmarks._task_graphs import KINDS, by_hand, of_chart, talk

SNAPSHOT_BAR = 4096
RATIO_BAR = 1.3
TURNS = (1, 60, 200)

THREAD: Any = {"configurable": {"thread_id": "t"}}


def snapshot_bytes(turns: tuple[int, ...]) -> dict[int, int]:
    """The largest snapshot of a turn, as JSON text, by the number of the turn."""
    app, kind = of_chart(KINDS["approval"], InMemorySaver()), KINDS["approval"]
    found = {}
    for number in range(1, max(turns) + 1):
        # It is largest while a call waits.
        asked: list[Any] = []
        out = talk(app, kind, THREAD, chart=True, asked=asked)
        if number in turns:
            found[number] = max(len(json.dumps(each["xsm"])) for each in (out, *asked))
    return found


def written(turns: int, *, chart: bool, delta: bool = False) -> int:
    """What a thread's checkpoints and writes add up to, in bytes."""
    make, kind = (of_chart if chart else by_hand), KINDS["approval"]
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder) / "checkpoints.sqlite")
        with SqliteSaver.from_conn_string(file) as saver:
            app = make(kind, saver, delta=delta)
            for _ in range(turns):
                talk(app, kind, THREAD, chart=chart)
            return _held(saver)


class _Nothing(TypedDict, total=False):
    event: Any


def floor(calls: int) -> int:
    """What LangGraph itself writes for a node that does nothing."""
    graph = StateGraph(_Nothing)
    graph.add_node("nothing", lambda state: {})
    graph.add_edge(START, "nothing")
    graph.add_edge("nothing", END)
    with SqliteSaver.from_conn_string(":memory:") as saver:
        app = graph.compile(checkpointer=saver)
        for _ in range(calls):
            app.invoke({"event": None}, THREAD)
        return _held(saver)


def _held(saver: SqliteSaver) -> int:
    saver.setup()
    (checkpoints,) = saver.conn.execute(
        "SELECT sum(length(checkpoint) + length(metadata)) FROM checkpoints"
    ).fetchone()
    (writes,) = saver.conn.execute("SELECT coalesce(sum(length(value)), 0) FROM writes").fetchone()
    return int(checkpoints) + int(writes)


def main() -> int:
    """Print the figures; return the exit status."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--turns", type=int, default=60, help="approvals on the thread")
    options.add_argument("--json", action="store_true", help="print one JSON object")
    chosen = options.parse_args()
    sizes = snapshot_bytes(TURNS)
    rows = {}
    for name, delta in (("add_messages", False), ("DeltaChannel", True)):
        ours = written(chosen.turns, chart=True, delta=delta)
        theirs = written(chosen.turns, chart=False, delta=delta)
        rows[name] = {"guardchart": ours, "by_hand": theirs, "ratio": round(ours / theirs, 3)}
    least = floor(2 * chosen.turns)
    missed = max(sizes.values()) >= SNAPSHOT_BAR or rows["add_messages"]["ratio"] > RATIO_BAR
    if chosen.json:
        told = {"turns": chosen.turns, "snapshot_bytes": sizes, "written": rows, "floor": least}
        print(json.dumps(told))
        return 1 if missed else 0
    print(f"Bytes of {chosen.turns} approvals on one thread of a SqliteSaver\n")
    print(f"{'messages channel':24}{'guardchart':>14}{'by hand':>14}{'ratio':>8}{'bar':>8}")
    for name, row in rows.items():
        bar = f"{RATIO_BAR:.2f}" if name == "add_messages" else "-"
        print(f"{name:24}{row['guardchart']:14,}{row['by_hand']:14,}{row['ratio']:8.2f}{bar:>8}")
    print(f"{f'{2 * chosen.turns} calls of a no-op node':24}{'-':>14}{least:14,}\n")
    print(f"{'largest snapshot in turn':24}{'bytes':>14}{'bar':>14}")
    for number, size in sizes.items():
        print(f"{number:24}{size:14,}{SNAPSHOT_BAR:14,}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
