"""What a tool loop costs: ``python -m benchmarks.loop [--rounds N] [--no-peer]``.

A loop of 10 and of 100 tool rounds, one turn of a conversation that holds 199 messages, and a
whole conversation of 200; each turn of the last two is restored from JSON text and saved as
JSON text. CPU times, guardchart and the peer taking turns, each in a process of its own (the
peer's environment is that of `benchmarks.node`). Exit status 1: a bar was missed.
"""

from __future__ import annotations

import argparse
import sys
from typing import NamedTuple

from benchmarks.node import PEER, PEER_VERSION, Worker, peer_python

TURNS = 3
FLAT_BAR = 1.3


class Row(NamedTuple):
    """One case, and how many times faster than the peer it must be, at least."""

    case: str
    title: str
    bar: float | None


ROWS = (
    Row("rounds:10", "one round of 10", None),
    Row("rounds:100", "one round of 100", None),
    Row("held", "one turn at 199 messages", 4.0),
    Row("chat", "a conversation of 200 messages", None),
)


def main() -> int:
    """Print the table; return the exit status."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=20, help="runs per case and turn")
    options.add_argument("--no-peer", action="store_true", help="measure guardchart alone")
    chosen = options.parse_args()
    python = None if chosen.no_peer else peer_python()
    ours = Worker(sys.executable, "guardchart", "_loop_worker.py")
    peer = None if python is None else Worker(python, "peer", "_loop_worker.py")
    print(f"CPU time, best of {TURNS} x {chosen.rounds} runs; peer: {PEER} {PEER_VERSION}\n")
    print(f"{'':34}{'guardchart, us':>16}{'peer, us':>12}{'times faster':>14}{'bar':>7}")
    missed = False
    found: dict[str, float] = {}
    theirs: dict[str, float] = {}
    for row in ROWS:
        for _ in range(TURNS):
            spent = ours.ask(row.case, chosen.rounds)["us"]
            found[row.case] = min(spent, found.get(row.case, spent))
            if peer is not None:
                spent = peer.ask(row.case, chosen.rounds)["us"]
                theirs[row.case] = min(spent, theirs.get(row.case, spent))
        bar = "-" if row.bar is None else f">={row.bar:g}"
        line = f"{row.title:34}{found[row.case]:16.0f}"
        if peer is not None:
            faster = theirs[row.case] / found[row.case]
            missed |= row.bar is not None and faster < row.bar
            line += f"{theirs[row.case]:12.0f}{faster:14.1f}{bar:>7}"
        print(line)
    ours.close()
    if peer is not None:
        peer.close()
    flat = found["rounds:100"] / found["rounds:10"]
    missed |= flat > FLAT_BAR
    line = f"\n{'a round of 100 / a round of 10':34}{flat:15.2f}"
    if peer is not None:
        line += f"{theirs['rounds:100'] / theirs['rounds:10']:13.2f}"
    print(f"{line}{'':14}{'<=' + format(FLAT_BAR, 'g'):>7}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
