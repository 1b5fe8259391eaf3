"""Steps the same charts through the kernel, the reference interpreter and stock XState.

``python -m tests.conformance.differential`` compares 2 000 charts of each family;
``--show plain SEED`` prints one chart and where it differs.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from guardchart.errors import ChartError, StepError
from guardchart.kernel import (
    CancelTimer,
    Machine,
    ScheduleTimer,
    Snapshot,
    StartService,
    StopService,
    accepted_events,
    create_machine,
    done,
    failed,
    fired,
    initial_step,
    step,
)
from tests.conformance.reference import Reference
from tests.conformance.strategy import Chart, Family, Move, draw
from tests.conformance.vocabulary import Endless, Logic

XSTATE = "5.33.3"
CHUNK = 50
EXPLAINED_SHARE = 0.02
HARNESS = Path(__file__).with_name("harness") / "xstate.mjs"
_KINDS = {
    StartService: "start",
    StopService: "stop",
    ScheduleTimer: "schedule",
    CancelTimer: "cancel",
}


class Unavailable(Exception):
    """There is no node, no npm, or no registry to fetch XState from."""


class Walk(NamedTuple):
    """One chart, the moves made on it in concrete form, and what was seen."""

    chart: Chart
    moves: list[dict[str, Any]]
    seen: list[Any]
    differences: list[str]
    notes: list[set[str]]


def drawn(seed: int, family: Family) -> Iterator[tuple[Chart, list[Move], Machine, Logic]]:
    """The charts of a seed that the compiler accepts, one after the other."""
    for attempt in range(100):
        chart, moves = draw(f"{seed}.{attempt}", family)
        logic = Logic()
        try:
            yield chart, moves, create_machine(chart, logic), logic
        except ChartError as error:
            if "eventless" not in str(error) and "together" not in str(error):
                raise


@functools.lru_cache(maxsize=512)
def walk(seed: int, family: Family) -> Walk:
    """Step the kernel and the reference side by side; note what differs.

    A plain chart where two leaves have eventless transitions enabled at once gives way to the
    next one of its seed.
    """
    for chart, moves, machine, logic in drawn(seed, family):
        found = compare(chart, moves, machine, logic)
        if family == "full" or not any("K3" in notes for notes in found.notes):
            return found
    raise AssertionError("no chart in a hundred will do")


def compare(chart: Chart, moves: list[Move], machine: Machine, logic: Logic) -> Walk:
    """Step this machine and the reference by the same moves."""
    reference = Reference(chart)
    made: list[dict[str, Any]] = []
    found = Walk(chart, made, [], [], [])
    snapshot: Snapshot | None = None
    for number, move in enumerate([None, *moves]):
        now = 100 * number
        logic.log.clear()
        concrete: dict[str, Any] = {"now": now}
        try:
            if snapshot is None or move is None:
                result = initial_step(machine, now=now)
            else:
                event = _event(move, snapshot, concrete)
                if event is None:
                    continue
                made.append(concrete)
                result = step(machine, snapshot, event, now=now)
        except StepError:
            found.seen.append("endless")
            if not _refers(reference, concrete):
                found.differences.append(f"{number}: the kernel alone finds no end")
            found.notes.append(set(reference.notes))
            return found
        if _refers(reference, concrete):
            found.differences.append(f"{number}: the reference alone finds no end")
            return found
        snapshot = result[0]
        mine = {
            **_seen(snapshot, list(logic.log)),
            "receipt": result[2].status,
            "effects": [(_KINDS[type(e)], e.id) for e in result[1] if type(e) in _KINDS],
            "rev": snapshot.rev,
            "statuses": {k: c.status for k, c in snapshot.children.items()},
            "history": {k: sorted(v) for k, v in snapshot.history.items()},
        }
        theirs = _seen_by(reference)
        for key, value in mine.items():
            if value != theirs[key]:
                found.differences.append(f"{number}: {key}: {value!r}, not {theirs[key]!r}")
        found.seen.append(mine)
        found.notes.append(set(reference.notes))
        if found.differences or snapshot.status != "active":
            return found
    return found


def _event(move: Move, snapshot: Snapshot, concrete: dict[str, Any]) -> Any:
    """Make a move concrete: which of the pending timers or children it takes."""
    kind, given = move
    if kind == "send":
        concrete["event"] = given
        return given
    if kind == "accepted":
        place, x = given
        types = accepted_events(snapshot) or ("E1",)
        concrete["event"] = {"type": types[int(place * len(types))], "x": x}
        return concrete["event"]
    if kind == "fire":
        timers = sorted(snapshot.timers)
        if not timers:
            return None
        concrete["timer"] = timers[int(given * len(timers))]
        return fired(concrete["timer"])
    children = sorted(k for k, child in snapshot.children.items() if child.status == "active")
    if not children:
        return None
    place, well = given
    child = concrete["child"] = children[int(place * len(children))]
    concrete["failed"] = not well
    key = snapshot.children[child].key
    return done(key, 1) if well else failed(key, RuntimeError("no"))


def _refers(reference: Reference, move: dict[str, Any]) -> bool:
    """Make the same move on the reference; tell whether it found no end."""
    now = move["now"]
    try:
        if "event" in move:
            reference.send(move["event"], now)
        elif "timer" in move:
            reference.fire(move["timer"], now)
        elif "child" in move:
            reference.finish(move["child"], move["failed"], now)
        else:
            reference.start(now)
    except Endless:
        return True
    return False


def _seen(snapshot: Snapshot, log: list[str]) -> dict[str, Any]:
    return {
        "value": snapshot.value,
        "context": dict(snapshot.context),
        "status": snapshot.status,
        "log": log,
        "timers": {key: timer.due_at for key, timer in sorted(snapshot.timers.items())},
        "children": sorted(snapshot.children),
        "output": snapshot.output,
    }


def _seen_by(reference: Reference) -> dict[str, Any]:
    return {
        "value": _value(reference.root, reference.active),
        "context": reference.context,
        "status": reference.status,
        "log": reference.log,
        "timers": dict(sorted(reference.timers.items())),
        "children": sorted(reference.children),
        "output": reference.output,
        "receipt": reference.receipt,
        "effects": reference.effects,
        "rev": reference.rev,
        "statuses": reference.children,
        "history": {k: sorted(s.id for s in v) for k, v in reference.history.items()},
    }


def _value(state: Any, active: Any) -> Any:
    if state.type == "parallel":
        return {child.key: _value(child, active) for child in state.children}
    child = next((c for c in state.children if c in active), None)
    if child is None:
        return {}
    return {child.key: _value(child, active)} if child.children else child.key


# XState


def xstate_home() -> Path:
    """The folder that holds XState, fetched on first use, outside the repository.

    Raises:
        Unavailable: node or npm is missing, or no registry answers.
    """
    if shutil.which("node") is None or shutil.which("npm") is None:
        raise Unavailable("node and npm are needed to run XState")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    home = cache / "guardchart" / "conformance" / f"xstate-{XSTATE}"
    if not (home / "node_modules" / "xstate" / "package.json").exists():
        home.mkdir(parents=True, exist_ok=True)
        (home / "package.json").write_text('{"private": true}\n')
        command = [
            "npm",
            "install",
            "--no-audit",
            "--no-fund",
            "--ignore-scripts",
            f"xstate@{XSTATE}",
        ]
        try:
            subprocess.run(command, cwd=home, check=True, capture_output=True, timeout=120)
        except (OSError, subprocess.SubprocessError) as error:
            raise Unavailable(f"xstate@{XSTATE} could not be fetched: {error}") from None
    return home


def by_xstate(walks: list[Walk], timeout_s: float = 120.0) -> list[list[Any]]:
    """What stock XState shows for the same charts and moves."""
    lines = [json.dumps({"chart": w.chart, "moves": w.moves}) for w in walks]
    done_ = subprocess.run(
        ["node", str(HARNESS), str(xstate_home())],
        input="\n".join(lines) + "\n",
        capture_output=True,
        text=True,
        check=True,
        timeout=timeout_s,
    )
    return [json.loads(line) for line in done_.stdout.splitlines() if line.startswith("[")]


class Verdict(NamedTuple):
    """What comparing one plain chart with XState gave."""

    steps: int
    explained: str | None
    unexplained: str | None


def judge(found: Walk, theirs: list[Any]) -> Verdict:
    """Compare step by step up to the first difference; say whether a ruling explains it."""
    for number, mine in enumerate(found.seen):
        other = theirs[number] if number < len(theirs) else "nothing"
        why = _difference(mine, other, found.chart)
        if why is None:
            continue
        notes = found.notes[number]
        if notes:
            return Verdict(number + 1, ",".join(sorted(notes)), None)
        return Verdict(number + 1, None, f"step {number}: {why}")
    return Verdict(len(found.seen), None, None)


def _difference(mine: Any, other: Any, chart: Chart) -> str | None:
    if isinstance(mine, str) or isinstance(other, str):
        return None if mine == other else f"{mine!r:.200}, not {other!r:.200}"
    for key in ("value", "context", "status", "log", "timers", "children", "output"):
        expected = mine[key]
        if key == "output" and "output" not in chart:
            continue
        if key == "children" and mine["status"] != "active":
            continue
        if expected != other[key]:
            return f"{key}: {expected!r}, not {other[key]!r}"
    return None


class Tally(NamedTuple):
    """What a range of seeds gave."""

    steps: int = 0
    explained: int = 0
    unexplained: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()


def plain_tally(seeds: range) -> Tally:
    """Compare plain charts with the reference and with XState."""
    walks = [walk(seed, "plain") for seed in seeds]
    faults = _faults("plain", seeds, walks)
    verdicts = [judge(*pair) for pair in zip(walks, by_xstate(walks), strict=True)]
    for seed, verdict in zip(seeds, verdicts, strict=True):
        if verdict.unexplained:
            faults.append(f"plain {seed}: {verdict.unexplained}")
    reasons = tuple(v.explained for v in verdicts if v.explained)
    return Tally(sum(v.steps for v in verdicts), len(reasons), tuple(faults), reasons)


def full_tally(seeds: range) -> Tally:
    """Compare full charts with the reference."""
    walks = [walk(seed, "full") for seed in seeds]
    return Tally(sum(len(w.seen) for w in walks), 0, tuple(_faults("full", seeds, walks)))


def _faults(family: Family, seeds: range, walks: list[Walk]) -> list[str]:
    pairs = zip(seeds, walks, strict=True)
    return [f"{family} {seed}: {w.differences[0]}" for seed, w in pairs if w.differences]


def run(charts: int, jobs: int) -> int:
    """Compare this many charts of each family; print what came of it, one line last."""
    chunks = [range(i, min(i + CHUNK, charts)) for i in range(0, charts, CHUNK)]
    xstate_home()
    with multiprocessing.Pool(jobs) as pool:
        plain = pool.map(plain_tally, chunks, chunksize=1)
        full = pool.map(full_tally, chunks, chunksize=1)
    steps, explained = sum(t.steps for t in plain), sum(t.explained for t in plain)
    for line in [line for tally in (*plain, *full) for line in tally.unexplained]:
        print(line[:400])
    for reason, count in Counter(r for t in plain for r in t.reasons).most_common():
        print(f"explained by {reason}: {count}")
    unexplained, differences = (sum(len(t.unexplained) for t in part) for part in (plain, full))
    print(
        f"differential: {charts} plain charts, {steps} steps, {explained} explained by rulings, "
        f"{unexplained} unexplained; {charts} full charts, {differences} differences"
    )
    return int(bool(unexplained or differences or explained > EXPLAINED_SHARE * steps))


def show(family: Family, seed: int) -> None:
    """Print one chart, its moves and its differences."""
    found = walk(seed, family)
    print(json.dumps(found.chart, indent=1))
    for move in found.moves:
        print(move)
    print(found.differences or "kernel and reference agree")
    if family == "plain":
        print(judge(found, by_xstate([found])[0]))


def main() -> int:
    """Return the exit status: 1 where anything differs that no ruling explains."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--charts", type=int, default=2_000, help="of each family")
    options.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1))
    options.add_argument("--fetch", action="store_true", help="only fetch XState")
    options.add_argument("--show", nargs=2, metavar=("FAMILY", "SEED"), help="look at one chart")
    chosen = options.parse_args()
    try:
        if chosen.fetch:
            xstate_home()
        elif chosen.show:
            show("plain" if chosen.show[0] == "plain" else "full", int(chosen.show[1]))
        else:
            return run(chosen.charts, chosen.jobs)
    except Unavailable as reason:
        print(f"differential: skipped, {reason}")
        return 0 if chosen.fetch else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
