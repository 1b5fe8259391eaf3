"""The chart behind a session: a policy that the session steps itself, or a machine that runs.

Several sessions may stand on one chart, each for a conversation of its own; what moves the chart
in one of them holds for all.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, Final

from guardchart.errors import NotSupportedError, StepError
from guardchart.gate._rules import Allowed, allowed_in_all, allowed_tools
from guardchart.kernel import Event, Receipt, StartService, fired, initial_step, step
from guardchart.runtime import Interpreter

__all__ = ["LiveChart", "PolicyChart", "chart_of"]

_MAX_OVERDUE: Final = 1000
_MAX_TOLD: Final = 10_000
_POST_S: Final = 5.0
_VERBS: Final = ("done", "failed", "rejected", "denied")


class _Chart:
    """What a session asks of its chart, and does to it under `lock`.

    Attributes:
        machine: the compiled chart.
        lock: held for each look and each step; never while a body runs.
        entered: how often each tool was entered in this visit of the state.
        told: rows whose end the chart knows of, so that a resume does not tell it again.
    """

    def __init__(self, machine: Any) -> None:
        self.machine = machine
        self._fresh()
        named = {key for node in machine.nodes.values() for key in node.on}
        self._exact = {key for key in named if not key.endswith("*")}
        self._prefixes = tuple(key[:-1] for key in named if key.endswith("*"))
        self._moving: dict[str, bool] = {}
        self._allowed: dict[frozenset[str], Allowed] = {}

    def _fresh(self) -> None:
        self.lock = threading.RLock()
        self.entered: Counter[str] = Counter()
        self.told: dict[tuple[str, str, str], None] = {}

    def allowed_in(self, state_ids: frozenset[str]) -> Allowed:
        """Return what a configuration allows; charts do not change, so it is read once."""
        known = self._allowed.get(state_ids)
        if known is None:
            nodes = self.machine.nodes
            known = allowed_in_all(nodes[ident] for ident in sorted(state_ids))
            if len(self._allowed) < 10_000:
                self._allowed[state_ids] = known
        return known

    def hears(self, event_type: str) -> bool:
        """Return whether some state names an event, exactly or by a wildcard."""
        return event_type in self._exact or event_type.startswith(self._prefixes)

    def hears_tools(self) -> bool:
        """Return whether some state names any outcome event of any tool."""
        if any(key.startswith("tool.") for key in self._exact):
            return True
        return any(key.startswith("tool.") or "tool.".startswith(key) for key in self._prefixes)

    def knows(self, scope: str, row_id: str, status: str) -> bool:
        """Return whether the chart was told how a call ended, and note that it is now."""
        key = (scope, row_id, status)
        if key in self.told:
            return True
        self.told[key] = None
        if len(self.told) > _MAX_TOLD:
            del self.told[next(iter(self.told))]
        return False

    def moves(self, name: str) -> bool:
        """Return whether some state names an outcome event of this tool."""
        known = self._moving.get(name)
        if known is None:
            known = any(self.hears(f"tool.{verb}.{name}") for verb in _VERBS)
            if len(self._moving) < 10_000:
                self._moving[name] = known
        return known


class PolicyChart(_Chart):
    """A chart without services, stepped by what a door tells it."""

    def __init__(self, machine: Any, snapshot: Any, *, input: Any, now: int) -> None:
        super().__init__(machine)
        if snapshot is None:
            snapshot, effects, receipt = initial_step(machine, input, now=now)
            _no_services(effects)
            if receipt.error is not None:
                raise receipt.error
        self.snapshot = snapshot

    def at(self, snapshot: Any) -> PolicyChart:
        """Return this chart in another state, with nothing entered and nothing told.

        The two share what was read of the machine, which does not change.
        """
        other = PolicyChart.__new__(PolicyChart)
        other.__dict__.update(self.__dict__)
        other._fresh()
        other.snapshot = snapshot
        return other

    def allowed(self) -> Allowed:
        """Return what every active state allows; nothing once the chart has ended."""
        snapshot = self.snapshot
        return self.allowed_in(snapshot.state_ids) if snapshot.status == "active" else Allowed()

    def nodes(self) -> list[Any]:
        """Return the active leaves, in the order of their ids."""
        return [self.machine.nodes[ident] for ident in sorted(self.snapshot.state_ids)]

    def step(self, event: Any, now: int) -> Any:
        """Take one event; return the receipt."""
        before = self.snapshot
        after, effects, receipt = step(self.machine, before, event, now=now)
        _no_services(effects)
        if after.state_ids != before.state_ids:
            self.entered.clear()
        self.snapshot = after
        return receipt

    def overdue(self, clock: Callable[[], int]) -> None:
        """Fire what is due, in the order of its deadlines; bounded, a chart may re-arm itself."""
        for _ in range(_MAX_OVERDUE):
            timers = self.snapshot.timers
            if not timers or self.snapshot.status != "active":
                return
            at = clock()
            due = [(timer.due_at, ident) for ident, timer in timers.items() if timer.due_at <= at]
            if not due:
                return
            self.step(fired(min(due)[1]), at)


class LiveChart(_Chart):
    """A machine that an interpreter runs: it keeps its own time, and moves by itself, too.

    Args:
        interpreter: started; a sync one is used from one thread at a time.
        scope: of the service on whose behalf calls are made. Its state's allow-list counts, and
            only while the service is still what that state waits for; None takes the
            intersection over the active states.
    """

    def __init__(self, interpreter: Any, scope: Any = None) -> None:
        super().__init__(interpreter.machine)
        self.interpreter = interpreter
        self.scope = scope
        self._seen: Any = None

    @property
    def snapshot(self) -> Any:
        """The snapshot after the last macrostep."""
        return self.interpreter.snapshot

    def nodes(self) -> list[Any]:
        """Return the state that asked, or the active leaves in the order of their ids."""
        if self.scope is not None:
            node = self.scope.node
            return [] if node is None else [node]
        return [self.machine.nodes[ident] for ident in sorted(self.snapshot.state_ids)]

    def allowed(self) -> Allowed:
        """Return what may be called now; nothing once the machine has ended or moved on."""
        snapshot = self.snapshot
        if self.interpreter.status != "running" or snapshot.status != "active":
            return Allowed()
        if snapshot.state_ids != self._seen:
            self._seen = snapshot.state_ids
            self.entered.clear()
        if self.scope is not None:
            return allowed_tools(self.scope.node) if self.scope.active else Allowed()
        return self.allowed_in(snapshot.state_ids)

    def step(self, event: Any, now: int) -> Any:
        """Send one event; return the receipt, None where it waits for what is processed now.

        Raises:
            StepError: the machine's loop did not take the event in time.
        """
        interpreter = self.interpreter
        if not isinstance(interpreter, Interpreter):
            return interpreter.send(event)
        loop = interpreter._started()
        try:
            here = asyncio.get_running_loop() is loop
        except RuntimeError:
            here = False
        if here:
            return interpreter.send(event)._entry.receipt
        return _sent_elsewhere(interpreter, event, loop)

    def overdue(self, clock: Callable[[], int]) -> None:
        """Do nothing: the interpreter fires its own timers."""


def _sent_elsewhere(interpreter: Interpreter, event: Event, loop: Any) -> Receipt | None:
    future: Future[Receipt | None] = Future()

    def send() -> None:
        try:
            future.set_result(interpreter.send(event)._entry.receipt)
        except BaseException as exc:
            future.set_exception(exc)

    loop.call_soon_threadsafe(send)
    try:
        return future.result(_POST_S)
    except TimeoutError:
        raise StepError("the machine's event loop did not take an event in time") from None


def chart_of(machine: Any, snapshot: Any, *, input: Any, now: int) -> Any:
    """Return the chart of a compiled machine, or of an interpreter that runs one."""
    if hasattr(machine, "current_state_ids") and hasattr(machine, "machine"):
        return LiveChart(machine)
    return PolicyChart(machine, snapshot, input=input, now=now)


def _no_services(effects: Iterable[Any]) -> None:
    if any(isinstance(effect, StartService) for effect in effects):
        raise NotSupportedError(
            "GuardSession: this chart invokes a service; start an interpreter and pass that, a "
            "session's own chart is a policy"
        )
