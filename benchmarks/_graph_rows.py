"""What a superstep of `statechart_graph` costs; ``python -m benchmarks.node --graph``.

Peer is the same graph written by hand (`benchmarks._task_graphs`): the same nodes, supersteps,
messages and saver. A unit is one turn on a thread of its own, CPU time of this process, chart
and peer taking turns. The rows with a bar run on `SqliteSaver`: a compiled chart is made for a
saver that lasts, and its ledger lies in the same file. ``all three`` is a superstep of the three
kinds of turn together. An approval alone has no bar: the peer asks a person too, but writes
nothing down that would keep it from paying twice. Nor have the rows that show what is left where
LangGraph itself keeps next to nothing.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import operator
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, Final, NamedTuple

from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.sqlite import SqliteSaver

from benchmarks._task_graphs import KINDS, Kind, by_hand, of_chart, talk

__all__ = ["ROWS", "GraphRow", "measure", "report"]

WARM = 5
BAR = 1.3


class GraphRow(NamedTuple):
    """A kind of turn, or all three; what it runs on; the ratio to stay under, if there is one."""

    kind: str
    saver: str
    held: int
    langchain: bool
    bar: float | None

    @property
    def title(self) -> str:
        """The row's name in the table."""
        nodes = "LangChain's" if self.langchain else "functions"
        held = f", {self.held} messages" if self.held else ""
        return f"{self.kind:10}{nodes}, {self.saver}{held}"


ALL = "all three"
DISK, MEMORY, NONE = "SqliteSaver", "InMemorySaver", "no saver"

ROWS: Final = (
    GraphRow("answer", DISK, 0, True, BAR),
    GraphRow("tool", DISK, 0, True, BAR),
    GraphRow("approval", DISK, 0, True, None),
    GraphRow(ALL, DISK, 0, True, BAR),
    GraphRow("answer", DISK, 0, False, BAR),
    GraphRow("tool", DISK, 0, False, BAR),
    GraphRow("approval", DISK, 0, False, None),
    GraphRow(ALL, DISK, 0, False, BAR),
    GraphRow("tool", DISK, 200, False, BAR),
    GraphRow("tool", MEMORY, 0, True, None),
    GraphRow("approval", MEMORY, 0, True, None),
    GraphRow("tool", MEMORY, 0, False, None),
    GraphRow("tool", NONE, 0, True, None),
    GraphRow("tool", NONE, 0, False, None),
)


class Measured(NamedTuple):
    """CPU times of turns, in microseconds; chart and peer took turns.

    Attributes:
        chart: Of the chart's graph, a turn each.
        hand: The same of the peer.
        supersteps: How many a turn has, in both.
    """

    chart: list[float]
    hand: list[float]
    supersteps: int

    @property
    def ratio(self) -> float:
        """The median of the turns' ratios."""
        return statistics.median(a / b for a, b in zip(self.chart, self.hand, strict=True))

    @property
    def ratio_of_best(self) -> float:
        """The ratio of the fastest turn of each."""
        return min(self.chart) / min(self.hand)

    @property
    def chart_us(self) -> float:
        """The fastest turn of the chart's graph, per superstep."""
        return min(self.chart) / self.supersteps

    @property
    def hand_us(self) -> float:
        """The same of the peer."""
        return min(self.hand) / self.supersteps

    def figures(self) -> dict[str, float]:
        """What is printed of it."""
        names = ("ratio", "ratio_of_best", "chart_us", "hand_us", "supersteps")
        return {name: getattr(self, name) for name in names}

    def then(self, other: Measured) -> Measured:
        """Both turns, one after the other."""
        return Measured(
            list(map(operator.add, self.chart, other.chart)),
            list(map(operator.add, self.hand, other.hand)),
            self.supersteps + other.supersteps,
        )


def measure(row: GraphRow, rounds: int) -> Measured:
    """Measure one row of one kind."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:

        def saver(name: str) -> Any:
            if row.saver == DISK:
                file = str(Path(folder, name))
                return stack.enter_context(SqliteSaver.from_conn_string(file))
            return InMemorySaver() if row.saver == MEMORY else None

        return _measured(row, rounds, saver("chart.db"), saver("hand.db"))


def _measured(row: GraphRow, rounds: int, ours_on: Any, theirs_on: Any) -> Measured:
    kind = KINDS[row.kind]
    chart = of_chart(kind, ours_on, langchain=row.langchain)
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
                spent[is_chart].append((time.process_time() - start) * 1e6)
    return Measured(spent[True], spent[False], steps)


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


def _together(row: GraphRow, found: dict[GraphRow, Measured]) -> Measured:
    """The turns of every kind that were measured under the same circumstances."""
    same = [each for of, each in found.items() if of[1:4] == row[1:4]]
    return functools.reduce(Measured.then, same)


def report(rounds: int, *, as_json: bool) -> int:
    """Print the table; return the exit status."""
    found: dict[GraphRow, Measured] = {}
    for row in ROWS:
        found[row] = _together(row, found) if row.kind == ALL else measure(row, rounds)
    missed = any(row.bar is not None and each.ratio > row.bar for row, each in found.items())
    if as_json:
        print(json.dumps({row.title: each.figures() for row, each in found.items()}))
        return 1 if missed else 0
    print("CPU time of a superstep, statechart_graph / by hand\n")
    print(f"{'':48}{'ratio':>7}{'best':>7}{'bar':>7}   by hand / chart, us")
    for row, each in found.items():
        print(
            f"{row.title:48}{each.ratio:7.2f}{each.ratio_of_best:7.2f}"
            f"{'' if row.bar is None else format(row.bar, '.2f'):>7}"
            f"   {each.hand_us:.0f} / {each.chart_us:.0f}"
        )
    return 1 if missed else 0
