"""Where interpreters get the time from, and who wakes them when a deadline is due."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import threading
import time
import weakref
from collections.abc import Awaitable, Coroutine
from typing import Any, Final, Protocol

__all__ = ["ALARMS", "Clock", "SimulatedClock", "SystemClock", "Timed"]

_IDLE_S: Final = 1.0
_DRAIN_ROUNDS: Final = 25


class Timed(Protocol):
    """What a clock needs of an interpreter."""

    engine: str

    def next_due(self) -> tuple[float, str] | None:
        """The earliest deadline as ``(due_at in epoch ms, timer id)``, or None."""

    def fire_due(self) -> None:
        """Deliver every timer whose deadline has passed, in order of ``(due_at, id)``."""

    def quiet(self) -> bool:
        """Whether nothing is queued or being processed right now."""


class Clock(Protocol):
    """The time in epoch milliseconds, and the interpreters that live by it."""

    simulated: bool

    def now_ms(self) -> float: ...
    def attach(self, interpreter: Timed) -> None: ...
    def detach(self, interpreter: Timed) -> None: ...


class SystemClock:
    """The wall clock. Stateless; every interpreter without a clock shares one."""

    simulated = False

    def now_ms(self) -> float:
        return time.time() * 1000.0

    def attach(self, interpreter: Timed) -> None:
        """Nothing to do: interpreters arm their own alarms."""

    def detach(self, interpreter: Timed) -> None:
        """Nothing to do."""


class SimulatedClock:
    """A clock that moves only when told to, for tests and simulations.

    Args:
        wall_start: The time it starts at, in epoch seconds.

    Example:
        >>> clock = SimulatedClock(wall_start=10)
        >>> clock.increment(500)
        >>> clock.now_ms()
        10500.0
    """

    simulated = True

    def __init__(self, wall_start: float = 0.0) -> None:
        self._start_ms = float(wall_start) * 1000.0
        self._now_ms = self._start_ms
        self._attached: weakref.WeakSet[Any] = weakref.WeakSet()

    def now_ms(self) -> float:
        return self._now_ms

    def attach(self, interpreter: Timed) -> None:
        self._attached.add(interpreter)

    def detach(self, interpreter: Timed) -> None:
        self._attached.discard(interpreter)

    def increment(self, ms: float) -> Awaitable[None] | None:
        """Move on by ``ms`` milliseconds; see `set`."""
        return self._move(self._now_ms + ms)

    def set(self, ms: float) -> Awaitable[None] | None:
        """Move to ``ms`` milliseconds after the start (never backwards).

        Returns:
            None outside an event loop, with every due timer fired in order. Inside one, an
            awaitable; once awaited, due timers have fired in order and the attached
            interpreters are drained.

        Raises:
            ValueError: The time lies before the present; the clock is unchanged.
        """
        return self._move(self._start_ms + ms)

    def _move(self, target_ms: float) -> Awaitable[None] | None:
        if not target_ms >= self._now_ms:
            raise ValueError("a clock only moves forward")
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            self._run(target_ms)
            return None
        if any(each.engine == "async" for each in self._attached):
            return self._run_async(target_ms)
        self._run(target_ms)
        return _nothing()

    def _next(self, target_ms: float) -> Any | None:
        """The interpreter with the earliest deadline up to ``target_ms``; time moves to it."""
        best: tuple[float, str] | None = None
        owner = None
        for each in list(self._attached):
            due = each.next_due()
            if due is not None and due[0] <= target_ms and (best is None or due < best):
                best, owner = due, each
        if best is None:
            self._now_ms = target_ms
            return None
        self._now_ms = max(self._now_ms, best[0])
        return owner

    def _run(self, target_ms: float) -> None:
        while (owner := self._next(target_ms)) is not None:
            owner.fire_due()

    async def _run_async(self, target_ms: float) -> None:
        await self._drain()
        while (owner := self._next(target_ms)) is not None:
            owner.fire_due()
            await self._drain()

    async def _drain(self) -> None:
        """Let tasks that can go on without time passing go on."""
        calm = 0
        while calm < _DRAIN_ROUNDS:
            await asyncio.sleep(0)
            calm = calm + 1 if all(each.quiet() for each in list(self._attached)) else 0


def _nothing() -> Coroutine[Any, Any, None]:
    async def done() -> None:
        return None

    return done()


class _Alarms:
    """One daemon thread that wakes synchronous interpreters at their next deadline."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._heap: list[tuple[float, int, weakref.ref[Any]]] = []
        self._count = itertools.count()
        self._running = False

    def set(self, interpreter: Timed, due_ms: float) -> None:
        """Call ``interpreter.fire_due()`` on the alarm thread at ``due_ms`` (epoch ms)."""
        with self._changed:
            heapq.heappush(self._heap, (due_ms, next(self._count), weakref.ref(interpreter)))
            if not self._running:
                self._running = True
                threading.Thread(target=self._run, name="guardchart-alarms", daemon=True).start()
            else:
                self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._heap and not self._changed.wait_for(lambda: self._heap, _IDLE_S):
                    self._running = False
                    return
                due_ms, _, ref = self._heap[0]
                wait_s = due_ms / 1000.0 - time.time()
                if wait_s > 0:
                    self._changed.wait(min(wait_s, 3600.0))
                    continue
                heapq.heappop(self._heap)
            interpreter = ref()
            if interpreter is not None:
                interpreter.fire_due()
            del interpreter


ALARMS: Final = _Alarms()
