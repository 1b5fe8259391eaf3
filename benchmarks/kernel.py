"""Events a second against other engines: ``python -m benchmarks.kernel [--json] [--turns N]``.

Each engine runs in a process of its own; they take turns on the same events, and CPU time is
what counts. A ratio is the median over the turns, so a slow moment of the machine hits both
sides. The other Python libraries live in an environment made on first use below the user's
cache folder, XState in a folder there. Exit status 1: a bar was missed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import IO, Any, NamedTuple

PEERS = {
    "xstate-statemachine": "0.11.0",
    "python-statemachine": "3.2.2",
    "sismic": "1.6.14",
    "transitions": "0.9.3",
}
XSTATE = "5.33.3"
OURS = ("pure", "sync", "async")
OTHERS = ("peer", "python-statemachine", "sismic", "transitions", "xstate")
NAMES = {
    "pure": "guardchart, transition",
    "sync": "guardchart, SyncInterpreter",
    "async": "guardchart, Interpreter",
    "peer": "xstate-statemachine, sync",
    "xstate": "XState on node",
}
TURN_S = 0.12

_ROOT = Path(__file__).resolve().parent.parent


def ring(size: int) -> dict[str, Any]:
    """A ring of states, one event moving on."""
    states = {f"s{n}": {"on": {"NEXT": f"s{(n + 1) % size}"}} for n in range(size)}
    return {"id": "m", "initial": "s0", "states": states}


def regions(count: int, event: str = "") -> dict[str, Any]:
    """Parallel regions that toggle, all by one event or each by its own."""

    def region(n: int) -> dict[str, Any]:
        name = event or f"E{n}"
        on, off = f"on{n}", f"off{n}"
        return {"initial": off, "states": {off: {"on": {name: on}}, on: {"on": {name: off}}}}

    return {"id": "m", "type": "parallel", "states": {f"r{n}": region(n) for n in range(count)}}


class Case(NamedTuple):
    """A chart and the events that go through it over and over."""

    title: str
    chart: dict[str, Any]
    events: list[str]


CASES = {
    "flat": Case(
        "flat toggle",
        {
            "id": "m",
            "initial": "off",
            "states": {"off": {"on": {"TOGGLE": "on"}}, "on": {"on": {"TOGGLE": "off"}}},
        },
        ["TOGGLE"],
    ),
    "nested": Case(
        "three levels",
        {
            "id": "m",
            "initial": "a",
            "states": {
                top: {
                    "initial": middle,
                    "on": {"NEXT": other},
                    "states": {
                        middle: {
                            "initial": one,
                            "states": {one: {"on": {"GO": two}}, two: {"on": {"GO": one}}},
                        }
                    },
                }
                for top, other, middle, one, two in (
                    ("a", "x", "b", "c", "d"),
                    ("x", "a", "y", "z", "w"),
                )
            },
        },
        ["GO", "NEXT"],
    ),
    "regions": Case("four regions", regions(4, "TOGGLE"), ["TOGGLE"]),
    "guard": Case(
        "guard and assign",
        {
            "id": "m",
            "initial": "a",
            "context": {"n": 0},
            "states": {"a": {"on": {"INC": {"guard": "low", "actions": "inc"}}}},
        },
        ["INC"],
    ),
    "invoke": Case(
        "invoke loop",
        {
            "id": "m",
            "initial": "idle",
            "states": {
                "idle": {"on": {"START": "busy"}},
                "busy": {"invoke": {"id": "job", "src": "job", "onDone": "idle"}},
            },
        },
        ["START"],
    ),
}
SIZES = {
    **{f"ring{n}": Case(f"ring of {n} states", ring(n), ["NEXT"]) for n in (10, 100, 1000)},
    **{
        f"regions{n}": Case(f"{n} regions, one moves", regions(n), [f"E{i}" for i in range(n)])
        for n in (2, 8, 16)
    },
}
# What one engine has to reach, as a ratio to another's events a second.
BARS = {
    ("pure", "peer"): {"flat": 8.0, "nested": 8.0, "regions": 8.0, "guard": 5.0, "invoke": 5.0},
    ("pure", "xstate"): {"flat": 2.0, "nested": 2.0, "regions": 2.0, "guard": 1.5, "invoke": 2.0},
    ("sync", "peer"): {"flat": 4.0, "nested": 4.0, "regions": 4.0, "guard": 3.0, "invoke": 4.0},
    **{("pure", name): dict.fromkeys(CASES, 1.0) for name in OTHERS[1:4]},
}
MAX_INSTANCE_BYTES = 400
MAX_RESTORE_RATIO = 4.0
MAX_SIZE_LOSS = 0.15
MAX_GROWTH_BYTES = 8 << 20


def cache(name: str) -> Path:
    """A folder below the user's cache folder."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "guardchart" / name


def peers_python() -> Path | None:
    """The interpreter of the environment with the other libraries, made if need be."""
    pins = [f"{name}=={version}" for name, version in PEERS.items()]
    home = cache("benchmarks") / ("kernel-" + "-".join(PEERS.values()))
    python = home / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if (home / "ready").exists():
        return python
    try:
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(home)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", *pins], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"other Python libraries are not measured: {error}", file=sys.stderr)
        return None
    (home / "ready").touch()
    return python


def xstate_home() -> Path | None:
    """The folder that holds XState, fetched if need be; None without node, npm or a registry."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        print("XState is not measured: node and npm are missing", file=sys.stderr)
        return None
    home = cache("conformance") / f"xstate-{XSTATE}"
    if not (home / "node_modules" / "xstate" / "package.json").exists():
        home.mkdir(parents=True, exist_ok=True)
        (home / "package.json").write_text('{"private": true}\n')
        command = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts"]
        try:
            subprocess.run([*command, f"xstate@{XSTATE}"], cwd=home, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"XState is not measured: {error}", file=sys.stderr)
            return None
    return home


class Worker:
    """A process that measures one engine."""

    def __init__(self, command: list[str]) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=_ROOT
        )

    def ask(self, what: str, name: str, case: Case, count: int) -> Any:
        """Make one request and return its answer."""
        requests, answers = self._process.stdin, self._process.stdout
        assert requests is not None and answers is not None
        request = {"do": what, "case": name, "chart": case.chart, "events": case.events}
        print(json.dumps({**request, "count": count}), file=requests, flush=True)
        line = answers.readline()
        if not line:
            raise SystemExit(f"the worker ended with status {self._process.wait()}")
        return json.loads(line)["value"]

    def close(self) -> None:
        """End the process."""
        pipe: IO[Any] | None = self._process.stdin
        if pipe is not None:
            pipe.close()
        self._process.wait()


def workers() -> dict[str, Worker]:
    """One process per engine that can be had."""
    script = str(Path(__file__).with_name("_kernel_worker.py"))
    found = {name: Worker([sys.executable, script, name]) for name in OURS}
    python = peers_python()
    if python is not None:
        found |= {name: Worker([str(python), script, name]) for name in OTHERS[:4]}
    home = xstate_home()
    if home is not None:
        harness = str(Path(__file__).with_name("_kernel_xstate.mjs"))
        found["xstate"] = Worker(["node", "--expose-gc", harness, str(home)])
    return found


class Bench:
    """Takes the measurements, and notes each bar that was missed."""

    def __init__(self, turns: int) -> None:
        self.turns = turns
        self.engines = workers()
        self.missed: list[str] = []
        self.report: dict[str, Any] = {}

    def rates(self, what: str, name: str, case: Case, engines: list[str]) -> dict[str, list[float]]:
        """Per engine its rate in each turn, the engines taking turns."""
        counts: dict[str, int] = {}
        for engine in engines:
            spent = self.engines[engine].ask(what, name, case, 100)
            if spent is None:
                continue
            spent = self.engines[engine].ask(what, name, case, 400)
            many = int(400 * TURN_S / max(spent, 1e-4))
            counts[engine] = -(-max(many, 100) // len(case.events)) * len(case.events)
        found: dict[str, list[float]] = {engine: [] for engine in counts}
        for _ in range(self.turns):
            for engine, count in counts.items():
                spent = self.engines[engine].ask(what, name, case, count)
                found[engine].append(count / max(spent, 1e-9))
        return found

    def events(self) -> None:
        """The five charts on every engine, and their bars."""
        table: dict[str, Any] = {}
        for name, case in CASES.items():
            found = self.rates("runner", name, case, list(self.engines))
            rows = {engine: round(max(rates)) for engine, rates in found.items()}
            ratios: dict[str, Any] = {}
            for (ours, other), bars in BARS.items():
                if other not in found:
                    continue
                pairs = zip(found[ours], found[other], strict=True)
                ratio = statistics.median(mine / theirs for mine, theirs in pairs)
                ratios[f"{ours}/{other}"] = round(ratio, 2)
                self.hold(ratio >= bars[name], f"{case.title}: {ours}/{other} {ratio:.2f}")
            table[name] = {"events_per_s": rows, "ratios": ratios}
        self.report["events"] = table

    def others(self) -> None:
        """Snapshot and restore, memory and build time of every engine."""
        flat, nested = CASES["flat"], CASES["nested"]
        engines = [name for name in self.engines if name not in ("sync", "async")]
        found = self.rates("restore", "flat", flat, engines)
        self.report["snapshot_and_restore_per_s"] = {n: round(max(r)) for n, r in found.items()}
        memory = {
            name: worker.ask("memory", "flat", flat, 1_000)
            for name, worker in self.engines.items()
            if name != "async"
        }
        self.report["bytes_per_idle_instance"] = {
            name: round(size) for name, size in memory.items() if size is not None
        }
        size = memory["pure"]
        self.hold(size <= MAX_INSTANCE_BYTES, f"bytes of an idle pure instance {size:.0f}")
        built = {}
        for name in ("pure", *(each for each in OTHERS if each in self.engines)):
            times = [self.engines[name].ask("build", "nested", nested, 20) for _ in range(3)]
            if None not in times:
                built[name] = round(min(times) / 20 * 1e3, 3)
        self.report["build_ms"] = built
        large = self.engines["pure"].ask("build", "ring1000", SIZES["ring1000"], 1)
        self.report["build_ms_of_1000_states"] = round(large * 1e3, 1)

    def sizes(self) -> None:
        """guardchart alone: larger charts, more regions, the cost of a snapshot, caches."""
        pure = self.engines["pure"]
        rates: dict[str, list[float]] = {name: [] for name in SIZES}
        for _ in range(self.turns):
            for name, case in SIZES.items():
                pure.ask("runner", name, case, 4_000)
                rates[name].append(40_000 / pure.ask("runner", name, case, 40_000))
        self.report["sizes_events_per_s"] = {n: round(max(r)) for n, r in rates.items()}
        pairs = zip(rates["ring1000"], rates["ring10"], strict=True)
        share = statistics.median(large / small for large, small in pairs)
        self.hold(share >= 1 - MAX_SIZE_LOSS, f"1 000 states reach {share:.2f} of 10 states")
        guard = CASES["guard"]
        for processed in (0, 50_000):
            ours, plain = pure.ask("tables", "guard", guard, processed)
            ratio = ours / plain
            self.report[f"dump_and_load_over_json_after_{processed}_events"] = round(ratio, 2)
            self.hold(ratio <= MAX_RESTORE_RATIO, f"dump and load {ratio:.2f} times json")
        grown = pure.ask("growth", "regions16", SIZES["regions16"], 0)
        self.report["growth_bytes_20000_to_100000_random_events"] = round(grown)
        self.hold(grown <= MAX_GROWTH_BYTES, f"caches grew by {grown / (1 << 20):.1f} MiB")

    def hold(self, reached: bool, what: str) -> None:
        """Note a bar that was missed."""
        if not reached:
            self.missed.append(what)

    def run(self) -> None:
        """Measure everything."""
        try:
            self.events()
            self.others()
            self.sizes()
        finally:
            for worker in self.engines.values():
                worker.close()
        self.report["missed"] = self.missed


def show(report: dict[str, Any]) -> None:
    """Print the tables."""
    cases = list(CASES)
    print("events a second, CPU time, best turn")
    print(f"{'':30}" + "".join(f"{CASES[name].title:>18}" for name in cases))
    for engine in (*OURS, *OTHERS):
        row = [report["events"][name]["events_per_s"].get(engine) for name in cases]
        if any(row):
            cells = (f"{each:>18,}" if each else f"{'-':>18}" for each in row)
            print(f"{NAMES.get(engine, engine):30}" + "".join(cells))
    print("\nratios, median of the turns (bar)")
    for (ours, other), bars in BARS.items():
        pair = f"{ours}/{other}"
        row = [report["events"][name]["ratios"].get(pair) for name in cases]
        if any(row):
            found = zip(row, cases, strict=True)
            cells = [f"{each:.1f} ({bars[n]:g})" if each else "-" for each, n in found]
            print(f"{pair:30}" + "".join(f"{each:>18}" for each in cells))
    for key, value in report.items():
        if key not in ("events", "missed"):
            rows = value.items() if isinstance(value, dict) else [("", value)]
            cells = (f"{name} {each:,}".strip() for name, each in rows)
            print(f"\n{key.replace('_', ' ')}: {', '.join(cells)}", end="")
    print(
        "\n\n" + ("missed: " + "; ".join(report["missed"]) if report["missed"] else "all bars met")
    )


def main() -> int:
    """Print the tables or JSON; return the exit status."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--json", action="store_true", help="print everything as JSON")
    options.add_argument("--turns", type=int, default=5)
    chosen = options.parse_args()
    bench = Bench(chosen.turns)
    bench.run()
    if chosen.json:
        print(json.dumps(bench.report, indent=1))
    else:
        show(bench.report)
    return 1 if bench.missed else 0


if __name__ == "__main__":
    sys.exit(main())
