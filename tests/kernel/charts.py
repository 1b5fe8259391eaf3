"""A chart with everything a snapshot can hold, and its logic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from guardchart.kernel._compile import Machine, create_machine
from guardchart.kernel._state import Snapshot
from guardchart.kernel._step import initial_transition, transition

RICH: dict[str, Any] = {
    "id": "rich",
    "version": "2",
    "context": {"messages": [], "count": 0},
    "initial": "idle",
    "output": {"ok": True},
    "on": {"SAY": {"actions": "say"}, "COUNT": {"actions": "count"}, "CRASH": {"actions": "crash"}},
    "states": {
        "idle": {
            "tags": ["resting"],
            "on": {
                "WORK": "work",
                "FORK": "fork",
                "BACK": "work.last",
                "DEEP": "#rich.work.two.deepest",
                "LATER": {"actions": "later"},
                "SPAWN": {"actions": "spawn"},
            },
        },
        "work": {
            "initial": "one",
            "meta": {"tools": ["search", {"name": "book", "approval": "always"}]},
            "after": {"5000": "idle"},
            "invoke": {
                "id": "job",
                "src": "job",
                "input": lambda context, event: {"n": context["count"] + 1},
                "onDone": {"actions": "count"},
                "onError": {"target": "idle", "guard": "often"},
            },
            "on": {"LEAVE": "#rich.idle"},
            "states": {
                "one": {"on": {"NEXT": "two"}},
                "two": {
                    "initial": "inner",
                    "states": {
                        "inner": {"on": {"NEXT": "other"}},
                        "other": {},
                        "deepest": {"type": "history", "history": "deep"},
                    },
                },
                "last": {"type": "history"},
                "all": {"type": "history", "history": "deep"},
            },
        },
        "fork": {
            "type": "parallel",
            "onDone": "end",
            "states": {
                "z": {
                    "initial": "z1",
                    "states": {"z1": {"on": {"A": "z2"}}, "z2": {"type": "final"}},
                },
                "a": {
                    "initial": "a1",
                    "states": {
                        "a1": {"id": "apple", "on": {"B": "a2"}},
                        "a2": {"type": "final"},
                    },
                },
            },
        },
        "end": {"type": "final"},
    },
}
RICH["states"]["work"]["invoke"]["input"].__qualname__ = "rich_input"


def _say(context: Any, event: Any) -> dict[str, Any]:
    return {"messages": [*context["messages"], {"role": "user"}]}


def _count(context: Any, event: Any) -> dict[str, Any]:
    return {"count": context["count"] + 1}


def _crash(context: Any, event: Any) -> dict[str, Any]:
    raise LookupError("CANARY")


def _later(scope: Any, context: Any, event: Any, action: Any) -> None:
    scope.send_after(500, {"type": "COUNT", "by": 1})


def _spawn(scope: Any, context: Any, event: Any, action: Any) -> None:
    scope.spawn("job", id="extra", input={"n": 3})


class Logic:
    """What a machine is bound to, as plain dicts."""

    def __init__(self, **services: Callable[..., Any]) -> None:
        self.actions = {
            "say": _say,
            "count": _count,
            "crash": _crash,
            "later": _later,
            "spawn": _spawn,
        }
        self.guards = {"often": lambda context, event: context["count"] > 3}
        self.services = {"job": lambda given: given, "job2": lambda given: given, **services}
        self.delays: dict[str, Any] = {}


_MACHINE: list[Machine] = []


def rich() -> Machine:
    """The machine of `RICH`, the same each time."""
    if not _MACHINE:
        _MACHINE.append(create_machine(RICH, Logic()))
    return _MACHINE[0]


def walk(machine: Machine, *events: str) -> Snapshot:
    """Start the machine at 0 ms and send the events, a second apart."""
    snapshot = initial_transition(machine)[0]
    for number, event in enumerate(events):
        snapshot = transition(machine, snapshot, event, now=1000 * (number + 1))[0]
    return snapshot
