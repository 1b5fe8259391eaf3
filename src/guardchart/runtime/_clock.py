"""Where interpreters get the time from, and who wakes them when a deadline is due."""

from __future__ import annotations

import asyncio
import contextvars
import os
import threading
import time
import weakref
from collections.abc import Awaitable, Generator
from typing import Any, ClassVar, Final, Protocol

from guardchart.errors import StepError
from guardchart.runtime._workers import WORKERS, ignore

__all__ = ["ALARMS", "Clock", "SimulatedClock", "SystemClock", "Timed"]

_IDLE_S: Final = 1.0
_DRAIN_ROUNDS: Final = 25
_GRACE_S: Final = 0.1
_MAX_ROUNDS: Final = 1_000


class Timed(Protocol):
    """What a clock needs of an interpreter. Child machines are their root's to serve."""

    engine: ClassVar[str]

    def next_due(self) -> tuple[float, str] | None:
        """The earliest deadline as ``(due_at in epoch ms, timer id)``, or None."""

    def fire_due(self) -> bool:
        """Deliver every timer whose deadline has passed; False if that has to wait."""

    def quiet(self) -> bool:
        """Whether nothing is queued or being processed right now."""

    def computing(self) -> bool:
        """Whether a synchronous service runs on a thread."""


class Clock(Protocol):
    """The time in epoch milliseconds, and the interpreters that live by it."""

    simulated: bool

    def now_ms(self) -> float:
        """The time, epoch milliseconds."""

    def attach(self, interpreter: Timed) -> None:
        """An interpreter starts to live by this clock."""

    def detach(self, interpreter: Timed) -> None:
        """It ended or was stopped."""


class SystemClock:
    """The wall clock. Stateless; every interpreter without a clock shares one.

    Example:
        >>> SystemClock().now_ms() > 1_700_000_000_000
        True
    """

    simulated = False

    def now_ms(self) -> float:
        """The wall clock, epoch milliseconds."""
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
        self._rounds = 0
        # In order of attachment, which decides between deadlines that are equal.
        self._attached: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()

    def now_ms(self) -> float:
        """The simulated time, epoch milliseconds."""
        return self._now_ms

    def attach(self, interpreter: Timed) -> None:
        """Fire this interpreter's timers, too, when the time moves."""
        self._attached[interpreter] = None

    def detach(self, interpreter: Timed) -> None:
        """Leave this interpreter alone from here on."""
        self._attached.pop(interpreter, None)

    def increment(self, ms: float) -> Awaitable[None] | None:
        """Move on by ``ms`` milliseconds; see `set`."""
        return self._move(self._now_ms + ms)

    def set(self, ms: float) -> Awaitable[None] | None:
        """Move to ``ms`` milliseconds after the start (never backwards).

        Returns:
            None outside an event loop, with every due timer fired in order. Inside one, an
            awaitable; once awaited, due timers have fired in order and the attached
            interpreters are drained: whatever could go on without time passing has gone on. A
            service on a thread is given a tenth of a second each time.

        Raises:
            ValueError: The time lies before the present; the clock is unchanged.
            StepError: Timers of no delay follow one another without end.
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
        return _Done()

    def _next(self, target_ms: float) -> Any | None:
        """The interpreter with the earliest deadline up to ``target_ms``; time moves to it."""
        best: tuple[float, str] | None = None
        owner = None
        for each in list(self._attached):
            due = each.next_due()
            if due is not None and due[0] <= target_ms and (best is None or due < best):
                best, owner = due, each
        moved = max(self._now_ms, target_ms if best is None else best[0])
        self._rounds = 0 if moved > self._now_ms else self._rounds + 1
        if self._rounds > _MAX_ROUNDS + len(self._attached):
            raise StepError("timers without delay follow one another; the clock cannot go on")
        self._now_ms = moved
        return owner

    def _run(self, target_ms: float) -> None:
        while (owner := self._next(target_ms)) is not None:
            if not owner.fire_due():
                # Moved by an action or a hook: its machine goes on with it when that is over.
                self._now_ms = max(self._now_ms, target_ms)
                return

    async def _run_async(self, target_ms: float) -> None:
        await self._drain()
        while (owner := self._next(target_ms)) is not None:
            owner.fire_due()
            await self._drain()

    async def _drain(self) -> None:
        """Let tasks that can go on without time passing go on."""
        calm = 0
        patience = time.monotonic() + _GRACE_S
        while calm < _DRAIN_ROUNDS:
            await asyncio.sleep(0)
            attached = list(self._attached)
            if not all(each.quiet() for each in attached):
                calm = 0
            elif any(each.computing() for each in attached) and time.monotonic() < patience:
                await asyncio.sleep(0.001)
                calm = 0
            else:
                calm += 1


class _Done:
    """Awaitable, done already, and no warning where nobody awaits it."""

    def __await__(self) -> Generator[Any, None, None]:
        return
        yield


class _Alarms:
    """One daemon thread that wakes synchronous interpreters at their next deadline.

    It only looks at the time: what a deadline sets off runs on a worker, so that no machine
    holds up another's deadlines.
    """

    def __init__(self) -> None:
        self._reset()
        if hasattr(os, "register_at_fork"):  # a forked child has no such thread
            os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        self._changed = threading.Condition()
        self._due: weakref.WeakKeyDictionary[Any, tuple[float, contextvars.Context]]
        self._due = weakref.WeakKeyDictionary()
        self._running = False

    def set(self, owner: Any, due_ms: float | None) -> None:
        """Call ``owner._ring()`` on a worker at ``due_ms`` (epoch ms), once; None for never.

        A later call replaces an earlier one. An owner that nothing else refers to any more is
        forgotten.
        """
        with self._changed:
            if due_ms is None:
                self._due.pop(owner, None)
                return
            self._due[owner] = (due_ms, contextvars.copy_context())
            if not self._running:
                self._running = True
                threading.Thread(target=self._run, name="guardchart-alarms", daemon=True).start()
            else:
                self._changed.notify()

    def _run(self) -> None:
        # The frames that hold owners end before the next wait: none is kept alive here.
        while self._ring(self._ripe()):
            pass

    def _ripe(self) -> list[tuple[Any, contextvars.Context]] | None:
        """Wait; what is due then, or None when nothing was left to wait for."""
        with self._changed:
            if not self._due and not self._changed.wait_for(lambda: bool(self._due), _IDLE_S):
                self._running = False
                return None
            now = time.time() * 1000.0
            ripe = [(owner, at[1]) for owner, at in self._due.items() if at[0] <= now]
            for owner, _ in ripe:
                del self._due[owner]
            if not ripe:
                first = min((at[0] for at in self._due.values()), default=now)
                self._changed.wait(min(max(first - now, 0.0) / 1000.0, 3600.0))
            return ripe

    def _ring(self, ripe: list[tuple[Any, contextvars.Context]] | None) -> bool:
        if ripe is None:
            return False
        for owner, context in ripe:
            context.run(WORKERS.start, ignore, owner._ring)
        return True


ALARMS: Final = _Alarms()
