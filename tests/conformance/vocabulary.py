"""What drawn charts call: the actions and guards of `strategy`, for the kernel and the reference.

The reference takes `act` and `passes`; the kernel takes `Logic`, with its own forms. Both write
``name@event`` to a log, so that order and the event that was seen can be compared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Event = dict[str, Any]


class Endless(Exception):
    """More microsteps than the chart allows."""


class Raised(Exception):
    """An action or a guard raised."""


def delay_of(name: str, context: Any) -> float:
    """The milliseconds of a delay: ``by_n`` looks at the context."""
    known = {"slow": 40.0, "by_n": 5.0 * context["n"], "PT0.03S": 30.0}
    return known[name] if name in known else float(name)


def passes(guard: Any, event: Event, context: Any, active: set[str]) -> bool:
    """Evaluate a guard of the vocabulary; ``active`` holds the ids of the active states."""
    if guard is None:
        return True
    if isinstance(guard, str):
        return event.get(guard) is True
    kind, params = guard["type"], guard.get("params", {})
    if kind == "lt":
        return bool(context[params["key"]] < params["value"])
    if kind == "odd":
        return bool(context[params["key"]] % 2 == 1)
    if kind == "stateIn":
        return guard["state"].removeprefix("#") in active
    if kind == "not":
        return not passes(guard["guard"], event, context, active)
    if kind == "crash":
        raise Raised
    some = any if kind == "or" else all
    return some(passes(each, event, context, active) for each in guard["guards"])


def act(action: Any, event: Event, context: Any, log: list[str], queue: list[Any]) -> None:
    """Perform an action of the vocabulary on this context."""
    kind, params = action["type"], action["params"]
    if kind == "log":
        log.append(f"{params['name']}@{event['type']}")
    elif kind == "raise":
        queue.append(({"type": params["event"]}, False))
    elif kind in ("inc", "inc_draft"):
        context[params["key"]] += params["by"]
    elif kind == "set":
        context[params["key"]] = params["value"]
    else:
        raise Raised


class Logic:
    """The same as guardchart logic; ``log`` holds what the actions of a step wrote."""

    def __init__(self, services: dict[str, Any] | None = None) -> None:
        self.log: list[str] = []
        self.actions: dict[str, Callable[..., Any]] = {
            "log": self._log,
            "raise": _raise,
            "inc": _inc,
            "inc_draft": _inc_draft,
            "set": _set,
            "crash": _crash,
        }
        self.guards: dict[str, Callable[..., Any]] = {
            "lt": lambda context, event, params: context[params["key"]] < params["value"],
            "odd": lambda context, event, params: context[params["key"]] % 2 == 1,
            "x": lambda context, event: event.payload.get("x") is True,
            "crash": _crash,
        }
        given = dict.fromkeys(("good", "bad", "slow"), lambda given: given)
        self.services: dict[str, Any] = {**given, **(services or {})}
        self.delays: dict[str, Any] = {"slow": 40, "by_n": lambda c, e: 5.0 * c["n"]}

    def _log(self, context: Any, event: Any, params: Any) -> None:
        self.log.append(f"{params['name']}@{event.type}")


def _raise(scope: Any, context: Any, event: Any, action: Any) -> None:
    scope.raise_(action.params["event"])


def _inc(context: Any, event: Any, params: Any) -> dict[str, int]:
    return {params["key"]: context[params["key"]] + params["by"]}


def _inc_draft(scope: Any, context: Any, event: Any, action: Any) -> None:
    context[action.params["key"]] += action.params["by"]


def _set(context: Any, event: Any, params: Any) -> dict[str, int]:
    return {params["key"]: params["value"]}


def _crash(context: Any, event: Any, params: Any) -> Any:
    raise Raised
