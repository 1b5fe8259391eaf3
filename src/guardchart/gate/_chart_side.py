"""The chart's side of a session: its snapshot, its timers, and the events that move it."""

from __future__ import annotations

import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from guardchart.errors import AgentConfigError, NotSupportedError
from guardchart.gate._approvals import HUMAN_EVENTS
from guardchart.gate._authorise import Now, read_now
from guardchart.gate._registry import ToolRegistry
from guardchart.gate._rules import Allowed, allowed_in_all, validate_tools
from guardchart.gate._tools import ToolCall, shown_name
from guardchart.kernel import Event, StartService, fired, initial_step, step

__all__ = ["ChartSide", "as_event"]

_VERBS: Final = ("done", "failed", "rejected", "denied")
_MAX_OVERDUE: Final = 1000


class ChartSide:
    """A policy chart that is stepped by outcomes, and asked what it allows."""

    def __init__(
        self,
        machine: Any,
        registry: ToolRegistry,
        snapshot: Any,
        *,
        input: Any,
        now: Callable[[], float] | None,
    ) -> None:
        validate_tools(machine, registry)
        self.machine = machine
        self.registry = registry
        self._now: Now = now
        self._lock = threading.RLock()
        self._entered: Counter[str] = Counter()
        self._moving = _moving_tools(machine, registry)
        if snapshot is None:
            snapshot, effects, receipt = initial_step(machine, input, now=self._ms())
            _no_services(effects)
            if receipt.error is not None:
                raise receipt.error
        if snapshot.run is None:
            snapshot = snapshot.replace(run=uuid.uuid4().hex)
        self._snapshot = snapshot

    @property
    def snapshot(self) -> Any:
        """The kernel Snapshot now, to be stored beside the conversation."""
        return self._snapshot

    def allowed(self) -> Allowed:
        """Return what the active states allow now: in parallel regions, what each of them does.

        Fires timers that are due first.
        """
        with self._lock:
            self._overdue()
            return self._allowed()

    def schemas(self) -> list[dict[str, Any]]:
        """Return the schemas of the tools a model may be told of now."""
        return self.registry.schemas(self.allowed())

    def moves_chart(self, name: str) -> bool:
        """Return whether some state names an outcome event of this tool."""
        return name in self._moving

    def send(self, event: Any, **payload: Any) -> Any:
        """Step the chart with an event of the host's own; return the receipt.

        A human's decision is refused here: `decide` takes it, in the ledger first.
        """
        made = as_event(event, payload)
        if made.type in HUMAN_EVENTS:
            raise AgentConfigError(f"GuardSession.send: {made.type} goes through decide()")
        with self._lock:
            return self._step(made)

    def _ms(self) -> int:
        return read_now(self._now)

    def _allowed(self) -> Allowed:
        if self._snapshot.status != "active":
            return Allowed()
        nodes = self.machine.nodes
        return allowed_in_all(nodes[ident] for ident in sorted(self._snapshot.state_ids))

    def _outcome(self, verb: str, call: ToolCall, payload: dict[str, Any]) -> Any:
        name = shown_name(call.name)
        ident = call.id if type(call.id) is str and call.id.isprintable() else ""
        kind = f"tool.{verb}" if name == "*" else f"tool.{verb}.{name}"
        return self._step(Event(kind, {"id": ident, **payload}))

    def _step(self, event: Any) -> Any:
        before = self._snapshot
        after, effects, receipt = step(self.machine, before, event, now=self._ms())
        _no_services(effects)
        if after.state_ids != before.state_ids:
            self._entered.clear()
        self._snapshot = after
        return receipt

    def _overdue(self) -> None:
        """Fire what is due, in the order of its deadlines; bounded, a chart may re-arm itself."""
        for _ in range(_MAX_OVERDUE):
            at = self._ms()
            timers = self._snapshot.timers
            due = [(timer.due_at, ident) for ident, timer in timers.items() if timer.due_at <= at]
            if not due or self._snapshot.status != "active":
                return
            self._step(fired(min(due)[1]))


def as_event(event: Any, payload: Mapping[str, Any]) -> Event:
    if isinstance(event, Mapping):
        rest = {key: value for key, value in event.items() if key != "type"}
        return Event(str(event["type"]), {**rest, **payload})
    if isinstance(event, str):
        return Event(event, dict(payload))
    return event  # type: ignore[no-any-return]


def _no_services(effects: Iterable[Any]) -> None:
    if any(isinstance(effect, StartService) for effect in effects):
        raise NotSupportedError(
            "GuardSession: this chart invokes a service; use an interpreter, a session's chart "
            "is a policy"
        )


def _moving_tools(machine: Any, registry: ToolRegistry) -> frozenset[str]:
    """Return the tools of which some state names an outcome event; known at build time."""
    named = {key for node in machine.nodes.values() for key in node.on}
    exact = {key for key in named if not key.endswith("*")}
    prefixes = tuple(key[:-1] for key in named if key.endswith("*"))
    return frozenset(
        name
        for name in registry.names
        for verb in _VERBS
        if (kind := f"tool.{verb}.{name}") in exact or kind.startswith(prefixes)
    )
