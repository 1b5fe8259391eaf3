"""The chart's side of a session: its snapshot, its timers, and the events that move it."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from guardchart.errors import AgentConfigError
from guardchart.gate._approvals import HUMAN_EVENTS
from guardchart.gate._authorise import Now, read_now
from guardchart.gate._charts import chart_of
from guardchart.gate._registry import ToolRegistry
from guardchart.gate._rules import Allowed, validate_tools
from guardchart.gate._tools import ToolCall, shown_name
from guardchart.kernel import Event

__all__ = ["ChartSide", "as_event"]


class ChartSide:
    """A policy chart that is stepped by outcomes, and asked what it allows."""

    def __init__(
        self,
        machine: Any,
        registry: ToolRegistry | None,
        snapshot: Any,
        *,
        input: Any,
        now: Callable[[], float] | None,
        chart: Any = None,
    ) -> None:
        self._now: Now = now
        # A door that brings its tools later names them when it knows them.
        self.registry = ToolRegistry((), max_output_chars=4000) if registry is None else registry
        self._chart = (
            chart_of(machine, snapshot, input=input, now=self._ms()) if chart is None else chart
        )
        self.machine = self._chart.machine
        if registry is not None and chart is None:
            validate_tools(self.machine, registry)
        # A running machine keeps its own order; only what sessions step themselves is shared.
        self._lock = threading.RLock() if self._live else self._chart.lock
        if chart is None and not self._live and self._snapshot.run is None:
            self._snapshot = self._snapshot.replace(run=uuid.uuid4().hex)

    @property
    def _live(self) -> bool:
        return hasattr(self._chart, "interpreter")

    @property
    def _snapshot(self) -> Any:
        return self._chart.snapshot

    @_snapshot.setter
    def _snapshot(self, snapshot: Any) -> None:
        self._chart.snapshot = snapshot

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

    def meta(self, key: str) -> list[Any]:
        """Return a ``meta`` value as the active states have it now, one for each region.

        The nearest state that declares the key counts, from the active leaf upward; a region
        where no state does gives none.
        """
        with self._lock:
            self._overdue()
            out = []
            for node in self._chart.nodes():
                at = node
                while at is not None and key not in (at.meta or {}):
                    at = at.parent
                if at is not None:
                    out.append(at.meta[key])
            return out

    def wants(self, *names: str) -> bool:
        """Return whether the active states want an answer that goes by one of these names.

        Every region that says anything of answers has to: ``meta.outputs`` is a list of names,
        ``True`` or ``"*"`` for any, and whatever else for none.
        """
        return all(
            wanted is True
            or wanted == "*"
            or (isinstance(wanted, (list, tuple)) and any(n in wanted for n in ("*", *names)))
            for wanted in self.meta("outputs")
        )

    def schemas(self) -> list[dict[str, Any]]:
        """Return the schemas of the tools a model may be told of now."""
        return self.registry.schemas(self.allowed())

    def moves_chart(self, name: str) -> bool:
        """Return whether some state names an outcome event of this tool."""
        return bool(self._chart.moves(name))

    def send(self, event: Any, **payload: Any) -> Any:
        """Step the chart with an event of the host's own; return the receipt.

        A human's decision is refused here: `decide` takes it, in the ledger first.
        """
        made = as_event(event, payload)
        if made.type in HUMAN_EVENTS:
            raise AgentConfigError(f"GuardSession.send: {made.type} goes through decide()")
        with self._lock:
            return self._step(made)

    def now_ms(self) -> int:
        """Return the host's time, in epoch milliseconds."""
        return self._ms()

    def _ms(self) -> int:
        return read_now(self._now)

    def _allowed(self) -> Allowed:
        allowed: Allowed = self._chart.allowed()
        return allowed

    def _outcome(self, verb: str, call: ToolCall, payload: dict[str, Any]) -> Any:
        name = shown_name(call.name)
        ident = call.id if type(call.id) is str and call.id.isprintable() else ""
        kind = f"tool.{verb}" if name == "*" else f"tool.{verb}.{name}"
        return self._tell(kind, {"id": ident, **payload})

    def _tell(self, kind: str, payload: dict[str, Any]) -> Any:
        """Send what a door has to say; None where no state of the chart could take it."""
        return self._step(Event(kind, payload)) if self._chart.hears(kind) else None

    def _step(self, event: Any) -> Any:
        return self._chart.step(event, self._ms())

    def _overdue(self) -> None:
        self._chart.overdue(self._ms)


def as_event(event: Any, payload: Mapping[str, Any]) -> Event:
    if isinstance(event, Mapping):
        rest = {key: value for key, value in event.items() if key != "type"}
        return Event(str(event["type"]), {**rest, **payload})
    if isinstance(event, str):
        return Event(event, dict(payload))
    return event  # type: ignore[no-any-return]
