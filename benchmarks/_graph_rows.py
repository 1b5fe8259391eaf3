"""What a superstep of `statechart_graph` costs; ``python -m benchmarks.node --graph``.

Peer is the same graph written by hand (`benchmarks._task_graphs`): the same nodes, supersteps,
messages and saver. A unit is one turn on a thread of its own, CPU time of this process, chart
and peer taking turns. The rows with a bar run on `SqliteSaver`: a compiled chart is made for a
saver that lasts. An approval has its bar with the ledger in memory: the peer asks a person too,
but writes nothing down that would keep it from paying twice, so that what the ledger's
transactions cost is a row beside it. So is what a thread costs on which a tool's deadline
holds; the tools of the other rows bound themselves, as the peer's have to. The other rows
without a bar show what is left where LangGraph itself keeps next to nothing.
"""

from __future__ import annotations

import contextlib
import gc
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, Final, NamedTuple

from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.sqlite import SqliteSaver

from benchmarks._task_graphs import KINDS, Kind, by_hand, of_chart, talk
from guardchart.persistence import InMemoryLedger

__all__ = ["ROWS", "GraphRow", "measure", "report"]

WARM = 5
BAR = 1.3


class GraphRow(NamedTuple):
    """One kind of turn, what it runs on, and the ratio it is to stay under, if there is one."""

    kind: str
    saver: str
    held: int
    langchain: bool
    bar: float | None
    noted: bool = True
    """Whether the ledger lies beside the checkpoints, else in memory."""
    watched: bool = False
    """Whether tools run on a thread of their own, so that their deadline holds."""

    @property
    def title(self) -> str:
        """The row's name in the table."""
        nodes = "LangChain's" if self.langchain else "functions"
        held = f", {self.held} messages" if self.held else ""
        noted = "" if self.noted else ", ledger in memory"
        watched = ", tools watched" if self.watched else ""
        return f"{self.kind:9}{nodes}, {self.saver}{held}{noted}{watched}"


DISK, MEMORY, NONE = "SqliteSaver", "InMemorySaver", "no saver"

ROWS: Final = (
    GraphRow("answer", DISK, 0, True, BAR),
    GraphRow("tool", DISK, 0, True, BAR),
    GraphRow("approval", DISK, 0, True, BAR, noted=False),
    GraphRow("approval", DISK, 0, True, None),
    GraphRow("answer", DISK, 0, False, BAR),
    GraphRow("tool", DISK, 0, False, BAR),
    GraphRow("approval", DISK, 0, False, BAR, noted=False),
    GraphRow("approval", DISK, 0, False, None),
    GraphRow("tool", DISK, 0, False, None, watched=True),
    GraphRow("tool", DISK, 200, False, BAR),
    GraphRow("tool", MEMORY, 0, True, None),
    GraphRow("approval", MEMORY, 0, True, None),
    GraphRow("tool", MEMORY, 0, False, None),
    GraphRow("tool", NONE, 0, True, None),
    GraphRow("tool", NONE, 0, False, None),
)


class Measured(NamedTuple):
    """CPU times of a superstep, in microseconds, and their ratio.

    Attributes:
        ratio: The median of the turns' ratios.
        ratio_of_best: Of the fastest turn of each.
        chart_us: The fastest turn of the chart's graph, per superstep.
        hand_us: The same of the peer.
        supersteps: How many a turn has, in both.
    """

    ratio: float
    ratio_of_best: float
    chart_us: float
    hand_us: float
    supersteps: int


def measure(row: GraphRow, rounds: int) -> Measured:
    """Measure one row."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:

        def saver(name: str) -> Any:
            if row.saver == DISK:
                file = str(Path(folder, name))
                return stack.enter_context(SqliteSaver.from_conn_string(file))
            return InMemorySaver() if row.saver == MEMORY else None

        return _measured(row, rounds, saver("chart.db"), saver("hand.db"))


def _measured(row: GraphRow, rounds: int, ours_on: Any, theirs_on: Any) -> Measured:
    kind = KINDS[row.kind]
    ledger = None if row.noted else InMemoryLedger()
    chart = of_chart(kind, ours_on, langchain=row.langchain, ledger=ledger, bounded=not row.watched)
    hand = by_hand(kind, theirs_on, langchain=row.langchain)
    steps = _supersteps(row, kind)
    said = [("user" if n % 2 == 0 else "ai", f"message {n}: what of it?") for n in range(row.held)]
    spent: dict[bool, list[float]] = {True: [], False: []}
    for number in range(rounds + WARM):
        for app, is_chart in ((chart, True), (hand, False)):
            thread: Any = {"configurable": {"thread_id": f"t{number}"}}
            if said:
                app.update_state(thread, {"messages": said})
            # What one of the two leaves behind is not collected at the other's cost.
            gc.collect()
            start = time.process_time()
            talk(app, kind, thread, chart=is_chart)
            if number >= WARM:
                spent[is_chart].append((time.process_time() - start) * 1e6 / steps)
    ours, theirs = spent[True], spent[False]
    return Measured(
        ratio=statistics.median(a / b for a, b in zip(ours, theirs, strict=True)),
        ratio_of_best=min(ours) / min(theirs),
        chart_us=min(ours),
        hand_us=min(theirs),
        supersteps=steps,
    )


def _supersteps(row: GraphRow, kind: Kind) -> int:
    """How many supersteps a turn has; an approval's begins anew when it is resumed."""
    found = []
    for make, chart in ((of_chart, True), (by_hand, False)):
        app = make(kind, InMemorySaver(), langchain=row.langchain)
        thread: Any = {"configurable": {"thread_id": "t"}}
        talk(app, kind, thread, chart=chart)
        history = app.get_state_history(thread)
        found.append(sum(len(state.next) for state in history if state.next != ("__start__",)))
    assert found[0] == found[1], f"the graphs differ: {found}"
    return found[0]


def report(rounds: int, *, as_json: bool) -> int:
    """Print the table; return the exit status."""
    # A bar is told from a median within a few hundredths of it only by many turns.
    found = {row: measure(row, rounds // 2 if row.bar is None else rounds * 2) for row in ROWS}
    missed = any(row.bar is not None and each.ratio > row.bar for row, each in found.items())
    if as_json:
        print(json.dumps({row.title: each._asdict() for row, each in found.items()}))
        return 1 if missed else 0
    print("CPU time of a superstep, statechart_graph / by hand\n")
    print(f"{'':56}{'ratio':>7}{'best':>7}{'bar':>7}   by hand / chart, us")
    for row, each in found.items():
        print(
            f"{row.title:56}{each.ratio:7.2f}{each.ratio_of_best:7.2f}"
            f"{'' if row.bar is None else format(row.bar, '.2f'):>7}"
            f"   {each.hand_us:.0f} / {each.chart_us:.0f}"
        )
    return 1 if missed else 0
