"""A chart as the reference interpreter reads it: states, and transitions with their targets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


class State:
    """One state of the chart."""

    def __init__(self, raw: Any, key: str, parent: State | None, states: list[State]) -> None:
        self.raw, self.key, self.parent = raw, key, parent
        self.path: str = key if parent is None else f"{parent.path}.{key}"
        self.id: str = raw.get("id", self.path)
        implied = "compound" if raw.get("states") else "atomic"
        self.type: str = raw.get("type", "history" if raw.get("history") else implied)
        states.append(self)
        self.every = [State(c, k, self, states) for k, c in raw.get("states", {}).items()]
        self.children = [c for c in self.every if c.type != "history"]
        self.histories = [c for c in self.every if c.type == "history"]
        found = listed(raw.get("invoke"))
        self.invokes = [(one.get("id", f"{i}.{self.id}"), one) for i, one in enumerate(found)]
        self.timers = [(f"{name}.{self.id}", name) for name in raw.get("after", {})]

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

    def handlers(self) -> Iterator[tuple[str, Any]]:
        raw = self.raw
        yield from raw.get("on", {}).items()
        for timer, name in self.timers:
            yield f"xstate.after.{timer}", raw["after"][name]
        for name, invoke in self.invokes:
            yield f"xstate.done.actor.{name}", invoke.get("onDone", [])
            yield f"xstate.error.actor.{name}", invoke.get("onError", [])
        yield f"xstate.done.state.{self.id}", raw.get("onDone", [])
        yield "", raw.get("always", [])


class Move:
    """A transition: its source, targets, guard and actions."""

    def __init__(self, chart: Chart, source: State, raw: Any) -> None:
        raw = {"target": raw} if isinstance(raw, str) else raw or {}
        self.source, self.guard = source, raw.get("guard")
        self.targets = [chart.find(source, text) for text in listed(raw.get("target"))]
        self.actions, self.reenter = listed(raw.get("actions")), raw.get("reenter", False)
        self.idle = not self.targets and not self.actions


class Chart:
    """All states in document order, and the transitions by state and descriptor."""

    def __init__(self, raw: Any) -> None:
        self.raw = raw
        self.states: list[State] = []
        self.root = State(raw, raw["id"], None, self.states)
        self.moves: dict[tuple[State, str], list[Move]] = {}
        for state in self.states:
            for descriptor, found in state.handlers():
                made = [
                    Move(self, state, one)
                    for one in (found if isinstance(found, list) else [found])
                ]
                self.moves.setdefault((state, descriptor), []).extend(made)
        self.wildcards: dict[State, list[str]] = {}
        for state, key in self.moves:
            if key.endswith("*"):
                self.wildcards.setdefault(state, []).append(key)
        self.descriptors = {key for (_, key), found in self.moves.items() if found and key}

    def find(self, source: State, text: str) -> State:
        if text.startswith("#"):
            return next(s for s in self.states if text[1:] in (s.id, s.path))
        below = source if text.startswith(".") or source.parent is None else source.parent
        return below.at(text.removeprefix("."))

    def exact(self, event_type: str, state: State) -> list[Move]:
        return self.moves.get((state, event_type), [])

    def wild(self, event_type: str, state: State) -> list[Move]:
        """The candidates under wildcards that cover a type, the longer before the shorter."""
        mine = [key for key in self.wildcards.get(state, ()) if covers(key, event_type)]
        mine.sort(key=len, reverse=True)
        return [move for key in mine for move in self.moves[state, key]]

    def initial(self, state: State) -> list[State]:
        raw = state.raw["initial"]
        return [state.at(text) for text in listed(raw["target"] if isinstance(raw, dict) else raw)]

    def initial_actions(self, state: State) -> list[Any]:
        raw = state.raw.get("initial")
        return listed(raw.get("actions")) if isinstance(raw, dict) else []


def listed(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, list | tuple) else [value]


def covers(descriptor: str, event_type: str) -> bool:
    """Whether a descriptor covers an event type: ``a.*`` covers ``a`` and ``a.b``, not ``ab``."""
    stem = descriptor.removesuffix(".*")
    wild = stem != descriptor and event_type.startswith(stem + ".")
    return descriptor == "*" or event_type == stem or wild
