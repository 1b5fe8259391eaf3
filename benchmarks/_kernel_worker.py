"""Measures one library's engine; run by `benchmarks.kernel`, in that library's environment.

Reads one JSON request a line, ``{"do": ..., "case": ..., "chart": ..., "events": [...],
"count": n}``, and answers each with one line: ``{"value": ...}`` (seconds of CPU time, or
bytes), or ``{"value": null}`` where the library has no such thing. Machines are kept.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import random
import sys
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

Run = Callable[[int], Any]
LIMIT = 10**9


def cycled(events: list[Any], count: int) -> list[Any]:
    """The events over and over, ``count`` in all."""
    return list(itertools.islice(itertools.cycle(events), count))


def seconds(fn: Callable[[], Any]) -> float:
    """The CPU time of a call."""
    gc.collect()
    start = time.process_time()
    fn()
    return time.process_time() - start


class Ours:
    """guardchart, by the pure function or one of the interpreters."""

    def __init__(self, engine: str) -> None:
        import guardchart.kernel as kernel
        from guardchart import Interpreter, MachineLogic, SyncInterpreter

        async def job(given: Any) -> int:
            return 1

        self.kernel, self.engine = kernel, engine
        self.Interpreter, self.SyncInterpreter = Interpreter, SyncInterpreter
        self.logic = MachineLogic(
            actions={"inc": lambda context, event: {"n": context["n"] + 1}},
            guards={"low": lambda context, event: context["n"] < LIMIT},
            services={"job": job if engine == "async" else lambda given: 1},
        )

    def build(self, chart: Any) -> Any:
        return self.kernel.create_machine(chart, self.logic)

    def runner(self, machine: Any, events: list[str]) -> Run:
        made = [self.kernel.Event(each) for each in events]
        if self.engine == "sync":
            send = self.SyncInterpreter(machine).start().send

            def drive(count: int) -> None:
                for event in cycled(made, count):
                    send(event)

            return drive
        if self.engine == "async":
            return lambda count: asyncio.run(self._drive(machine, cycled(made, count)))
        step, done = self.kernel.transition, self.kernel.done
        state = [self.kernel.initial_transition(machine)[0]]

        def pure(count: int) -> None:
            snapshot = state[0]
            for event in cycled(made, count):
                snapshot, _ = step(machine, snapshot, event)
            state[0] = snapshot

        def serving(count: int) -> None:
            snapshot = state[0]
            for event in cycled(made, count):
                snapshot, _ = step(machine, snapshot, event)
                snapshot, _ = step(machine, snapshot, done(snapshot.children["job"].key, 1))
            state[0] = snapshot

        return serving if events == ["START"] else pure

    async def _drive(self, machine: Any, events: list[Any]) -> None:
        interpreter = await self.Interpreter(machine).start()
        send, idle, serves = interpreter.send, interpreter.idle, events[0].type == "START"
        for event in events:
            await send(event, wait=True)
            if serves:
                await idle()
        interpreter.stop()

    def restore(self, machine: Any, events: list[str]) -> Run:
        dump, load = self.kernel.dump, self.kernel.load
        snapshot = self.kernel.initial_transition(machine)[0]

        def drive(count: int) -> None:
            for _ in range(count):
                load(machine, json.dumps(dump(snapshot)))

        return drive

    def instances(self, machine: Any, count: int) -> list[Any]:
        if self.engine == "pure":
            return [self.kernel.initial_transition(machine)[0] for _ in range(count)]
        return [self.SyncInterpreter(machine).start() for _ in range(count)]


class Restoring(Ours):
    """Questions about guardchart alone: parts of the bars."""

    def tables(self, machine: Any, processed: int) -> tuple[float, float]:
        """CPU time of dump and load, and of json.dumps and json.loads of the same dict."""
        kernel, rounds = self.kernel, 400
        snapshot = kernel.initial_transition(machine, None)[0]
        snapshot = kernel.update_context(
            snapshot, {"messages": [{"role": "user", "content": f"message {n}"} for n in range(20)]}
        )
        event = kernel.Event("INC")
        for _ in range(processed):
            snapshot = kernel.transition(machine, snapshot, event)[0]
        data = kernel.dump(snapshot)

        def ours() -> None:
            for _ in range(rounds):
                kernel.load(machine, kernel.dump(snapshot))

        def plain() -> None:
            for _ in range(rounds):
                json.loads(json.dumps(data))

        pairs = [(seconds(ours), seconds(plain)) for _ in range(5)]
        return min(each[0] for each in pairs), min(each[1] for each in pairs)

    def growth(self, machine: Any, events: list[str]) -> float:
        """Bytes gained between 20 000 and 100 000 random events: what the caches may grow."""
        rng, made = random.Random(1), [self.kernel.Event(each) for each in events]
        snapshot = self.kernel.initial_transition(machine)[0]
        sizes = []
        for _ in range(5):
            for event in rng.choices(made, k=20_000):
                snapshot = self.kernel.transition(machine, snapshot, event)[0]
            gc.collect()
            sizes.append(resident())
        return float(max(sizes[1:]) - sizes[0])


def resident() -> int:
    """The resident memory of this process in bytes; 0 where the system does not say."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * 4096
    except OSError:
        return 0


class Peer:
    """xstate-statemachine, by its synchronous interpreter."""

    def __init__(self) -> None:
        import xstate_statemachine as peer  # type: ignore[import-not-found]

        def inc(interpreter: Any, context: Any, event: Any, action: Any) -> None:
            context["n"] += 1

        self.peer = peer
        self.logic = peer.MachineLogic(
            actions={"inc": inc},
            guards={"low": lambda context, event: context["n"] < LIMIT},
            services={"job": lambda interpreter, context, event: 1},
        )

    def build(self, chart: Any) -> Any:
        return self.peer.create_machine(chart, logic=self.logic)

    def runner(self, machine: Any, events: list[str]) -> Run:
        send = self.peer.SyncInterpreter(machine).start().send
        made = [self.peer.Event(type=each) for each in events]

        def drive(count: int) -> None:
            for event in cycled(made, count):
                send(event)

        return drive

    def restore(self, machine: Any, events: list[str]) -> Run:
        started, cls = self.peer.SyncInterpreter(machine).start(), self.peer.SyncInterpreter

        def drive(count: int) -> None:
            for _ in range(count):
                cls.from_snapshot(started.get_snapshot(), machine)

        return drive

    def instances(self, machine: Any, count: int) -> list[Any]:
        return [self.peer.SyncInterpreter(machine).start() for _ in range(count)]


class Classes:
    """python-statemachine: a chart becomes a class."""

    def __init__(self) -> None:
        import statemachine  # type: ignore[import-not-found]

        self.lib = statemachine

    def build(self, chart: Any) -> Any:
        lib = self.lib
        if "invoke" in json.dumps(chart):
            return None
        states: dict[str, Any] = {}
        moves: dict[str, Any] = {}
        space: dict[str, Any] = {"n": 0, "low": lambda self: self.n < LIMIT, "inc": _inc_n}

        def members(raw: Any) -> dict[str, Any]:
            return {key: make(key, child, raw) for key, child in raw["states"].items()}

        def make(key: str, raw: Any, above: Any) -> Any:
            first = above.get("initial") == key
            if not raw.get("states"):
                states[key] = lib.State(initial=first)
                return states[key]
            base = lib.State.Parallel if raw.get("type") == "parallel" else lib.State.Compound
            made = type(key, (base,), members(raw))
            states[key] = made
            return made

        def connect(raw: Any) -> None:
            for key, child in raw["states"].items():
                for event, move in child.get("on", {}).items():
                    if isinstance(move, str):
                        found = states[key].to(states[move.rpartition(".")[2].removeprefix("#")])
                    else:
                        found = states[key].to.itself(cond="low", on="inc", internal=True)
                    moves[event] = found if event not in moves else moves[event] | found
                if child.get("states"):
                    connect(child)

        if chart.get("type") == "parallel":
            chart = {"initial": "all", "states": {"all": {**chart, "id": None}}}
        space.update(members(chart))
        connect(chart)
        return type("Chart", (lib.StateChart,), {**space, **moves})

    def runner(self, machine: Any, events: list[str]) -> Run:
        send = machine().send

        def drive(count: int) -> None:
            for event in cycled(events, count):
                send(event)

        return drive

    def instances(self, machine: Any, count: int) -> list[Any]:
        return [machine() for _ in range(count)]


def _inc_n(self: Any) -> None:
    self.n += 1


class Sismic:
    """sismic: a chart becomes a YAML document's dict."""

    def __init__(self) -> None:
        import sismic.interpreter  # type: ignore[import-not-found]
        import sismic.io  # type: ignore[import-not-found]

        self.io, self.interpreter = sismic.io, sismic.interpreter

    def build(self, chart: Any) -> Any:
        if "invoke" in json.dumps(chart):
            return None

        def state(name: str, raw: Any) -> dict[str, Any]:
            made: dict[str, Any] = {"name": name}
            below = [state(key, child) for key, child in raw.get("states", {}).items()]
            if below and raw.get("type") == "parallel":
                made["parallel states"] = below
            elif below:
                made |= {"states": below, "initial": raw["initial"]}
            moves: list[dict[str, Any]] = []
            for event, move in raw.get("on", {}).items():
                if isinstance(move, str):
                    target = move.rpartition(".")[2].removeprefix("#")
                    moves.append({"event": event, "target": target})
                else:
                    guard = f"n < {LIMIT}"
                    moves.append({"event": event, "guard": guard, "action": "n = n + 1"})
            return {**made, "transitions": moves} if moves else made

        root = state("root", chart)
        text = json.dumps({"statechart": {"name": "m", "preamble": "n = 0", "root state": root}})
        return self.io.import_from_yaml(text)

    def runner(self, machine: Any, events: list[str]) -> Run:
        interpreter = self.interpreter.Interpreter(machine)
        interpreter.execute()

        def drive(count: int) -> None:
            for event in cycled(events, count):
                interpreter.queue(event).execute()

        return drive

    def instances(self, machine: Any, count: int) -> list[Any]:
        made = [self.interpreter.Interpreter(machine) for _ in range(count)]
        for each in made:
            each.execute()
        return made


class Transitions:
    """transitions: a chart becomes a hierarchical machine."""

    def __init__(self) -> None:
        import transitions  # type: ignore[import-not-found]
        import transitions.extensions  # type: ignore[import-not-found]

        self.flat = transitions.Machine
        self.deep = transitions.extensions.HierarchicalMachine

    def build(self, chart: Any) -> Any:
        text = json.dumps(chart)
        if "invoke" in text:
            return None
        if '"states"' not in json.dumps(list(chart["states"].values())):
            return lambda: self._flat(chart)
        return lambda: self._deep(chart)

    def _flat(self, chart: Any) -> Any:
        moves = []
        for key, raw in chart["states"].items():
            for event, move in raw.get("on", {}).items():
                if isinstance(move, str):
                    moves.append({"trigger": event, "source": key, "dest": move})
                else:
                    moves.append({"trigger": event, "source": key, "dest": None,
                                  "conditions": "low", "after": "inc"})  # fmt: skip
        states = list(chart["states"])
        return self.flat(_Model(), states, chart["initial"], moves, auto_transitions=False)

    def _deep(self, chart: Any) -> Any:
        moves = []

        def state(name: str, raw: Any, path: str) -> Any:
            here = f"{path}_{name}" if path else name
            for event, move in raw.get("on", {}).items():
                target = move.removeprefix("#m.").replace(".", "_")
                moves.append([event, here, target if "#" in move else f"{path}_{target}"])
            if not raw.get("states"):
                return name
            below = [state(key, child, here) for key, child in raw["states"].items()]
            if raw.get("type") == "parallel":
                return {"name": name, "parallel": below}
            return {"name": name, "children": below, "initial": raw["initial"]}

        if chart.get("type") == "parallel":
            states, first = [state("all", chart, "")], "all"
        else:
            states = [state(key, raw, "") for key, raw in chart["states"].items()]
            first = chart["initial"]
        moves = [[e, s, d.replace("all_all", "all").lstrip("_")] for e, s, d in moves]
        return self.deep(_Model(), states, first, moves, auto_transitions=False)

    def runner(self, machine: Any, events: list[str]) -> Run:
        model = machine().model
        triggers = [getattr(model, each) for each in events]

        def drive(count: int) -> None:
            for trigger in cycled(triggers, count):
                trigger()

        return drive

    def instances(self, machine: Any, count: int) -> list[Any]:
        return [machine() for _ in range(count)]


class _Model:
    n = 0

    def low(self) -> bool:
        return self.n < LIMIT

    def inc(self) -> None:
        self.n += 1


LIBRARIES: dict[str, Callable[[], Any]] = {
    "pure": lambda: Restoring("pure"),
    "sync": lambda: Ours("sync"),
    "async": lambda: Ours("async"),
    "peer": Peer,
    "python-statemachine": Classes,
    "sismic": Sismic,
    "transitions": Transitions,
}


class Worker:
    """Answers requests for one engine; keeps what it built."""

    def __init__(self, engine: str) -> None:
        self.library = LIBRARIES[engine]()
        self.machines: dict[str, Any] = {}
        self.runs: dict[tuple[str, str], Run] = {}

    def answer(self, request: dict[str, Any]) -> Any:
        what, case, chart = request["do"], request["case"], request["chart"]
        if what == "build":
            return self.build(chart, request["count"])
        if case not in self.machines:
            self.machines[case] = self.library.build(chart)
        machine = self.machines[case]
        if machine is None or not hasattr(self.library, _NEEDS.get(what, what)):
            return None
        if what in ("runner", "restore"):
            key = (what, case)
            if key not in self.runs:
                self.runs[key] = getattr(self.library, what)(machine, request["events"])
                self.runs[key](200)
            return seconds(lambda: self.runs[key](request["count"]))
        if what == "memory":
            return self.memory(machine, request["count"])
        if what == "tables":
            return self.library.tables(machine, request["count"])
        return self.library.growth(machine, request["events"])

    def build(self, chart: Any, count: int) -> float | None:
        machine = self.library.build(chart)
        if machine is None:
            return None
        made = machine if callable(machine) and not isinstance(machine, type) else None
        return seconds(
            lambda: [made() if made else self.library.build(chart) for _ in range(count)]
        )

    def memory(self, machine: Any, count: int) -> float:
        """Bytes of one idle instance."""
        self.library.instances(machine, 10)
        gc.collect()
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        kept = self.library.instances(machine, count)
        gc.collect()
        after = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        return (after - before - kept.__sizeof__()) / len(kept)


_NEEDS = {"memory": "instances"}


def main() -> None:
    """Answer until the input ends."""
    worker = Worker(sys.argv[1])
    for line in sys.stdin:
        print(json.dumps({"value": worker.answer(json.loads(line))}), flush=True)


if __name__ == "__main__":
    main()
