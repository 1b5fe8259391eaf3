"""A slow interpreter that reads docs/semantics.md literally: no cache, no plan, no short cut.

It shares no code with the kernel. `Reference.notes` names, after each step, the rulings that
decided something otherwise than XState 5 would have; that is what explains a difference.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

Event = dict[str, Any]
UNITS_MS = {"W": 604_800_000, "D": 86_400_000, "H": 3_600_000, "M": 60_000, "S": 1_000}


class Endless(Exception):
    """More microsteps than the chart allows (K9)."""


class State:
    """One state of the chart."""

    def __init__(self, chart: Any, key: str, parent: State | None, all_: list[State]) -> None:
        self.raw, self.key, self.parent, self.order = chart, key, parent, len(all_)
        self.path: str = key if parent is None else f"{parent.path}.{key}"
        self.id: str = chart.get("id", self.path)
        implied = "compound" if chart.get("states") else "atomic"
        self.type: str = chart.get("type", "history" if chart.get("history") else implied)
        all_.append(self)
        below = chart.get("states", {}).items()
        self.every = [State(c, k, self, all_) for k, c in below]
        self.children = [c for c in self.every if c.type != "history"]
        self.histories = [c for c in self.every if c.type == "history"]

    def above(self) -> Iterator[State]:
        state = self.parent
        while state is not None:
            yield state
            state = state.parent

    def holds(self, other: State) -> bool:
        return self in other.above()

    def at(self, path: str) -> State:
        state = self
        for key in path.split("."):
            state = next(c for c in state.every if c.key == key)
        return state


class Move:
    """A transition: its source, targets, guard and actions."""

    def __init__(self, machine: Reference, source: State, raw: Any) -> None:
        raw = {"target": raw} if isinstance(raw, str) else raw or {}
        self.source, self.guard = source, raw.get("guard")
        self.targets = [machine.find(source, text) for text in listed(raw.get("target"))]
        self.actions, self.reenter = listed(raw.get("actions")), raw.get("reenter", False)
        self.idle = not self.targets and not self.actions  # K5


def listed(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, list) else [value]


def covers(descriptor: str, event_type: str) -> bool:
    stem = descriptor.removesuffix(".*")
    return descriptor == "*" or event_type == stem or event_type.startswith(stem + ".")


class Reference:
    """A machine and where it stands."""

    def __init__(self, chart: Any, delays: dict[str, Callable[[Any], float]]) -> None:
        self.states: list[State] = []
        self.root = State(chart, chart["id"], None, self.states)
        self.delays, self.limit = delays, chart.get("maxMicrosteps", 1_000)
        self.moves: dict[tuple[State, str], list[Move]] = {}
        for state in self.states:
            for descriptor, raw in self.handlers(state):
                found = [Move(self, state, one) for one in (raw if isinstance(raw, list) else [raw])]
                self.moves.setdefault((state, descriptor), []).extend(found)
        self.active: set[State] = set()
        self.context = dict(chart.get("context", {}))
        self.history: dict[State, list[State]] = {}
        self.timers: dict[str, float] = {}
        self.children: dict[str, str] = {}
        self.status, self.receipt, self.output, self.rev = "active", "taken", None, 0
        self.log: list[str] = []
        self.effects: list[tuple[str, str]] = []
        self.queue: list[tuple[Event, bool]] = []
        self.pending: dict[tuple[str, str], float] = {}
        self.notes: set[str] = set()

    def handlers(self, state: State) -> Iterator[tuple[str, Any]]:
        raw = state.raw
        yield from raw.get("on", {}).items()
        for name, after in raw.get("after", {}).items():
            yield f"xstate.after.{name}.{state.id}", after
        for name, invoke in self.invokes(state):
            yield f"xstate.done.actor.{name}", invoke.get("onDone", [])
            yield f"xstate.error.actor.{name}", invoke.get("onError", [])
        yield f"xstate.done.state.{state.id}", raw.get("onDone", [])
        yield "", raw.get("always", [])

    def invokes(self, state: State) -> list[tuple[str, Any]]:
        raw = listed(state.raw.get("invoke"))
        return [(one.get("id", f"{i}.{state.id}"), one) for i, one in enumerate(raw)]

    def find(self, source: State, text: str) -> State:
        if text.startswith("#"):
            return next(s for s in self.states if text[1:] in (s.id, s.path))
        below = source if text.startswith(".") or source.parent is None else source.parent
        return below.at(text.removeprefix("."))

    # Steps

    def start(self, now: float) -> None:
        self.begin(now)
        event = {"type": "xstate.init"}
        self.run([self.root], [], set(), event)
        self.settle(event)
        self.end(changed=True)

    def send(self, event: Event, now: float) -> None:
        self.step(event, now, engine=False)

    def fire(self, timer: str, now: float) -> None:
        self.step({"type": "xstate.after." + timer}, now, engine=True, timer=timer)

    def finish(self, child: str, failed: bool, now: float) -> None:
        kind = "error" if failed else "done"
        self.step({"type": f"xstate.{kind}.actor.{child}"}, now, engine=True, child=child)

    def step(self, event: Event, now: float, engine: bool, timer: str = "", child: str = "") -> None:
        before = self.begin(now)
        pending = self.timers.get(timer) is not None or self.children.get(child) == "active"
        if self.status != "active" or (engine and not pending):  # K12, K15
            self.receipt = "dropped"
            return
        self.timers.pop(timer, None)
        if child:
            self.children[child] = event["type"].split(".")[1]
        known = any(d and covers(d, event["type"]) for _, d in self.moves if self.moves[_, d])
        chosen, handled = self.select(event, engine)
        self.receipt = "denied" if handled else "ignored"
        if not engine and self.root.raw.get("strict") and not known:  # K18
            self.receipt = "denied"
            return
        if event["type"].startswith("xstate.error.") and not chosen:  # K16
            self.fail()
            return
        if chosen:
            self.receipt = "forbidden" if all(m.idle for m in chosen) else "taken"
            self.microstep(chosen, event)
        self.settle(event)
        self.end(changed=engine or self.receipt == "taken" or self.seen() != before)

    def begin(self, now: float) -> Any:
        self.now, self.log, self.effects, self.notes = now, [], [], set()
        self.queue.clear()
        self.pending.clear()
        return self.seen()

    def seen(self) -> Any:
        tables = dict(self.history), dict(self.timers), dict(self.children), list(self.effects)
        return set(self.active), dict(self.context), self.status, *tables

    def end(self, changed: bool) -> None:
        if self.status == "active":
            for (kind, name), due in self.pending.items():
                if kind == "timer":
                    self.timers[name] = due
                else:
                    self.children[name] = "active"
                self.effects.append(("schedule" if kind == "timer" else "start", name))
        else:
            self.stop_all()
        self.rev += changed or bool(self.effects)

    def fail(self) -> None:
        self.status, self.receipt = "error", "ignored"
        self.stop_all()
        self.rev += 1

    def stop_all(self) -> None:
        running = [name for name, status in self.children.items() if status == "active"]
        self.effects += [("stop", name) for name in running]
        self.effects += [("cancel", name) for name in self.timers]
        self.children, self.timers = {}, {}

    def settle(self, event: Event) -> None:  # K8
        steps, look = 0, True
        while self.status == "active":
            chosen = self.eventless(event) if look else []
            if chosen or self.queue:
                steps += 1
                if steps > self.limit:  # K9
                    raise Endless
            if chosen:
                before = set(self.active), dict(self.context)
                self.microstep(chosen, event)
                look = before != (self.active, self.context)
                if not look:
                    self.notes.add("K8")
                continue
            if not self.queue:
                return
            following, engine = self.queue.pop(0)
            chosen, _ = self.select(following, engine)
            look = True
            if chosen:
                event = following
                self.microstep(chosen, event)

    # Selection

    def select(self, event: Event, engine: bool) -> tuple[list[Move], bool]:
        """The transitions that answer an event, and whether any handler was asked (K1 to K3)."""

        def exact(state: State) -> list[Move]:
            return self.moves.get((state, event["type"]), [])

        def wild(state: State) -> list[Move]:
            mine = [d for s, d in self.moves if s is state and (d == "*" or d.endswith(".*"))]
            found = [d for d in mine if covers(d, event["type"])]
            return [m for d in sorted(found, key=len, reverse=True) for m in self.moves[state, d]]

        handled = any(exact(state) or wild(state) for state in self.active)
        if not engine:
            return self.choose(self.root, lambda s: exact(s) + wild(s), event), handled
        if any(wild(state) for state in self.active):
            self.notes.add("K1")
        chosen = self.choose(self.root, exact, event) or self.choose(self.root, wild, event)
        return chosen, handled

    def choose(self, state: State, pick: Callable[[State], list[Move]], event: Event) -> list[Move]:
        below = [c for c in state.children if c in self.active]
        found = [move for child in below for move in self.choose(child, pick, event)]
        return found or self.first(pick(state), event)

    def first(self, candidates: list[Move], event: Event) -> list[Move]:
        return next(([m] for m in candidates if self.passes(m.guard, event)), [])

    def eventless(self, event: Event) -> list[Move]:
        found: dict[Move, None] = {}
        for leaf in (s for s in self.states if s in self.active and not s.children):
            for state in (leaf, *leaf.above()):
                if chosen := self.first(self.moves.get((state, ""), []), event):
                    found[chosen[0]] = None
                    break
        if len(found) > 1:
            self.notes.add("K3")
        return list(found)

    def passes(self, guard: Any, event: Event) -> bool:  # K6
        if guard is None:
            return True
        if guard == "x":
            return event.get("x") is True
        kind, params = guard["type"], guard.get("params", {})
        if kind == "lt":
            return bool(self.context[params["key"]] < params["value"])
        if kind == "odd":
            return self.context[params["key"]] % 2 == 1
        if kind == "stateIn":
            return self.find(self.root, guard["state"]) in self.active
        if kind == "not":
            return not self.passes(guard["guard"], event)
        answers = [self.passes(each, event) for each in guard["guards"]]
        return all(answers) if kind == "and" else any(answers)

    # Microsteps

    def restored(self, target: State) -> list[State]:
        """What a target stands for: itself, or what a history state restores (K13)."""
        if target.type != "history":
            return [target]
        parent = target.parent
        assert parent is not None
        default = [parent.at(text) for text in listed(target.raw.get("target"))]
        return self.history.get(target) or default or [parent]

    def reached(self, move: Move) -> list[State]:
        return [state for target in move.targets for state in self.restored(target)]

    def domain(self, move: Move) -> tuple[State | None, bool]:
        """The domain, and whether the source is exited and entered with it (K10)."""
        source, reached = move.source, self.reached(move)
        again = source in reached and any(t.type == "history" for t in move.targets)  # K13
        if again:
            self.notes.add("K13")
        inside = all(t is source or source.holds(t) for t in reached) and not again
        domain: State | None = source
        if not inside:
            domain = next(
                (s for s in source.above() if all(s.holds(t) for t in reached)),
                None if move.reenter else self.root,
            )
        while domain and domain.type == "parallel" and not move.reenter:
            region = [c for c in domain.children if all(c is t or c.holds(t) for t in reached)]
            if not region:
                break
            domain = region[0]
            self.notes.add("K10")
        return domain, inside and move.reenter

    def left(self, move: Move) -> set[State]:
        if not move.targets:
            return set()
        domain, itself = self.domain(move)
        if domain is None:
            return set(self.active)
        return {s for s in self.active if domain.holds(s) or (itself and s is domain)}

    def microstep(self, chosen: list[Move], event: Event) -> None:
        kept: list[Move] = []
        for move in chosen:  # K4
            rivals = [other for other in kept if self.left(other) & self.left(move)]
            if all(other.source.holds(move.source) for other in rivals):
                kept = [other for other in kept if other not in rivals] + [move]
        domains = {move: self.domain(move) for move in kept}
        leaving: set[State] = set().union(*(self.left(move) for move in kept))
        staying = self.active - leaving
        self.leave(leaving, event)
        for move in kept:
            self.act(move.actions, event)
        self.active = staying
        entered: list[State] = []
        followed: set[State] = set()
        for move in kept:
            if move.targets:
                domain, itself = domains[move]
                self.enter(domain, itself, self.reached(move), entered, followed)
        self.run(entered, [s for s in followed if s not in entered], followed, event)

    def leave(self, leaving: set[State], event: Event) -> None:
        order = [s for s in reversed(self.states) if s in leaving]
        for state in order:
            for record in state.histories:
                below = [s for s in self.states if s in self.active and state.holds(s)]
                deep = record.raw.get("history") == "deep"
                self.history[record] = [
                    s for s in below if (not s.children if deep else s.parent is state)
                ]
        for state in order:  # K7
            self.act(listed(state.raw.get("exit")), event)
            for name, _ in self.invokes(state):
                if self.pending.pop(("child", name), None) is None and name in self.children:
                    if self.children.pop(name) == "active":
                        self.effects.append(("stop", name))
            for name in (f"{delay}.{state.id}" for delay in state.raw.get("after", {})):
                if self.pending.pop(("timer", name), None) is None and name in self.timers:
                    del self.timers[name]
                    self.effects.append(("cancel", name))
