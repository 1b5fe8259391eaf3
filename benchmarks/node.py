"""What a chart in a LangGraph node costs: ``python -m benchmarks.node [--rounds N] [--no-peer]``.

With ``--graph``: what it costs compiled into tasks, see `benchmarks._graph_rows`.

Every row is a ratio of CPU times taken in one process. The peer runs in an environment of its
own, made on first use below the user's cache folder, and takes turns with guardchart. Each
sample begins with garbage collected, the no-op's like the node's; "pairs" is the median of the
ratios of neighbouring samples, beside the ratio of their medians, which the bar is for. The model
is a `FakeModel`, of which the node knows that it answers at once; the row "on a worker thread" has
one that does not say so, and no bar. Exit status 1: a bar was missed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO, Any, NamedTuple

PEER = "xstate-statemachine"
PEER_VERSION = "0.11.0"
TURNS = 7

_ROOT = Path(__file__).resolve().parent.parent


class Row(NamedTuple):
    """One case, and the ratio it must stay under, if any."""

    case: str
    title: str
    bar: float | None
    peer: bool


ROWS = (
    Row("fresh", "START to done, 0 messages held", 1.25, True),
    Row("worker", "the same, the model on a worker thread", None, False),
    Row("snapshot", "START to done, 199 messages in the snapshot", 1.8, True),
    Row("channel", "START to done, 199 messages, messages_key", 1.4, False),
    Row("check", "check of a five-argument call / validate_json", 10.0, False),
)
IMPORT_BAR_MS = 20.0


def peer_python() -> Path | None:
    """Return the interpreter of the peer's environment, made if need be; None if that fails."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    langgraph = importlib.metadata.version("langgraph")
    home = cache / "guardchart" / "benchmarks" / f"peer-{PEER_VERSION}-langgraph-{langgraph}"
    python = home / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    ready = home / "ready"
    if ready.exists():
        return python
    try:
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(home)], check=True)
        wanted = [f"{PEER}[agents]=={PEER_VERSION}", f"langgraph=={langgraph}"]
        subprocess.run([str(python), "-m", "pip", "install", "-q", *wanted], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"the peer is not measured: its environment could not be made ({error})")
        return None
    ready.touch()
    return python


class Worker:
    """A process that measures one library; see `benchmarks._node_worker`."""

    def __init__(self, python: Path | str, library: str, worker: str = "_node_worker.py") -> None:
        # By path: the peer's environment does not know this package.
        script = Path(__file__).with_name(worker)
        self._process = subprocess.Popen(
            [str(python), str(script), library],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=_ROOT,
        )

    def ask(self, case: str, rounds: int) -> dict[str, float]:
        """Measure one case once."""
        requests, answers = self._process.stdin, self._process.stdout
        assert requests is not None and answers is not None
        print(json.dumps({"case": case, "rounds": rounds}), file=requests, flush=True)
        line = answers.readline()
        if not line:
            raise SystemExit(f"the worker ended with status {self._process.wait()}")
        answer: dict[str, float] = json.loads(line)
        return answer

    def close(self) -> None:
        """End the process."""
        pipe: IO[Any] | None = self._process.stdin
        if pipe is not None:
            pipe.close()
        self._process.wait()


def import_ms(turns: int) -> tuple[float, float]:
    """Return the CPU time of importing the bridge once ``langgraph.graph`` is there, in ms.

    The second number is that of the import and the first use of every name, which loads the
    rest. Bytecode is cached, as it is anywhere but in the first run after an installation.
    """
    program = (
        "import gc, time, langgraph.graph; gc.collect(); "
        "start = time.process_time(); import guardchart.langgraph; "
        "done = time.process_time(); from guardchart.langgraph import *; "
        "print(done - start, time.process_time() - start)"
    )
    spent: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory() as cache:
        env = {name: v for name, v in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        env["PYTHONPYCACHEPREFIX"] = cache
        for _ in range(turns + 1):
            done = subprocess.run(
                [sys.executable, "-c", program],
                capture_output=True,
                text=True,
                check=True,
                cwd=_ROOT,
                env=env,
            )
            first, whole = done.stdout.split()
            spent.append((float(first) * 1e3, float(whole) * 1e3))
    measured = spent[1:]
    return min(each[0] for each in measured), min(each[1] for each in measured)


def _median(ratios: list[float]) -> str:
    return f"{statistics.median(ratios):.2f}" if ratios else "-"


def main() -> int:
    """Print the table; return the exit status."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=60, help="invocations per case and turn")
    options.add_argument("--no-peer", action="store_true", help="measure guardchart alone")
    options.add_argument("--graph", action="store_true", help="measure statechart_graph")
    options.add_argument("--json", action="store_true", help="with --graph: one JSON object")
    chosen = options.parse_args()
    if chosen.graph:
        from benchmarks._graph_rows import report

        return report(chosen.rounds, as_json=chosen.json)
    python = None if chosen.no_peer else peer_python()
    ours = Worker(sys.executable, "guardchart")
    peer = None if python is None else Worker(python, "peer")
    print(f"CPU time against a no-op node on InMemorySaver; peer: {PEER} {PEER_VERSION}\n")
    print(f"{'':48}{'guardchart':>12}{'pairs':>8}{'bar':>8}{'peer':>8}   no-op / node, us")
    missed = False
    for row in ROWS:
        found: list[dict[str, float]] = []
        theirs: list[float] = []
        for _ in range(TURNS):
            found.append(ours.ask(row.case, chosen.rounds))
            if peer is not None and row.peer:
                theirs.append(peer.ask(row.case, chosen.rounds)["ratio"])
        ratio = statistics.median(each["ratio"] for each in found)
        best = min(found, key=lambda each: each["node_us"])
        pairs = [each["pairs"] for each in found if "pairs" in each]
        missed |= row.bar is not None and ratio > row.bar
        aside = f"{_median(pairs):>8}{'-' if row.bar is None else f'{row.bar:.2f}':>8}"
        print(
            f"{row.title:48}{ratio:12.2f}{aside}{_median(theirs):>8}"
            f"   {best['noop_us']:.0f} / {best['node_us']:.0f}"
        )
    ours.close()
    if peer is not None:
        peer.close()
    spent, whole = import_ms(5)
    missed |= spent > IMPORT_BAR_MS
    print(
        f"{'import, ms over langgraph.graph':48}{spent:12.1f}{'-':>8}{IMPORT_BAR_MS:8.1f}{'-':>8}"
        f"   {whole:.1f} with every name used"
    )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
