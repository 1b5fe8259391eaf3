"""The asynchronous interpreter: steps run inline, services are tasks or worker threads.

A step is a plain function call, so an event is processed where it is sent. Only a hook
that blocks (a ledger on disk) moves processing into a task of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from typing import Any, ClassVar, Self

from guardchart.errors import NotSupportedError, QueueFullError, StepError
from guardchart.kernel import Event, Receipt, as_event
from guardchart.runtime._address import DECISIONS
from guardchart.runtime._base import InterpreterBase
from guardchart.runtime._core import INSIDE, OUTSIDE, Entry
from guardchart.runtime._rest import reached, serving_due
from guardchart.runtime._services import (
    Invocation,
    awaited,
    call_service,
    is_async_service,
    is_awaitable,
)
from guardchart.runtime._workers import WORKERS, abandon

__all__ = ["Interpreter"]


class _Sent:
    """What ``send`` returns: awaited, it gives the receipt if ``wait`` was asked for."""

    __slots__ = ("_entry", "_loop", "_wait")

    def __init__(self, entry: Entry, wait: bool, loop: asyncio.AbstractEventLoop) -> None:
        self._entry = entry
        self._wait = wait
        self._loop = loop

    def __await__(self) -> Generator[Any, None, Receipt | None]:
        entry = self._entry
        if not self._wait:
            return None
        if entry.receipt is None:
            future: asyncio.Future[Receipt] = self._loop.create_future()
            entry.waiter = lambda receipt: None if future.done() else future.set_result(receipt)
            yield from future
        return entry.receipt


class Interpreter(InterpreterBase):
    """Runs a machine on the running event loop; see `InterpreterBase` for the arguments.

    ``start()`` begins at once and may be awaited; it gives the interpreter. Sync services
    run on worker threads with their context variables. Everything but `post` belongs on the
    loop's own thread.

    Example:
        >>> import asyncio
        >>> from guardchart import create_machine
        >>> toggle = create_machine({"id": "t", "initial": "off", "states": {
        ...     "off": {"on": {"FLIP": "on"}}, "on": {"on": {"FLIP": "off"}}}})
        >>> async def main():
        ...     light = await Interpreter(toggle).start()
        ...     receipt = await light.send("FLIP", wait=True)
        ...     light.stop()
        ...     return receipt.status
        >>> asyncio.run(main())
        'taken'
    """

    engine: ClassVar[str] = "async"

    _loop: asyncio.AbstractEventLoop | None = None
    _pump: asyncio.Task[None] | None = None
    _timer: asyncio.TimerHandle | None = None
    _armed: float | None = None
    _armed_for: Any = None
    _computing = 0
    _waiters: tuple[asyncio.Future[None], ...] = ()

    def start(self) -> Self:
        """Enter the initial configuration (or take up the snapshot); may be awaited.

        Raises:
            NotSupportedError: No event loop is running; use ``SyncInterpreter``.
            StepError: The initial macrostep does not come to rest, or an invoke's input raised
                while services were restarted. Nothing was started.
            ChartError: An actor of the snapshot cannot be restored.
        """
        if self._state != "uninitialized":
            return self
        try:
            self._loop = asyncio.get_running_loop()
        except RuntimeError:
            raise NotSupportedError(
                "Interpreter is async: start() needs a running event loop; call it in a "
                "coroutine, or use SyncInterpreter"
            ) from None
        self._begin()
        self._arm()
        self._drive()
        return self

    def _join(self, parent: Any) -> None:
        self._loop = parent._loop
        self.mixed = parent.mixed

    def __await__(self) -> Generator[Any, None, Self]:
        yield from asyncio.sleep(0).__await__()
        return self

    def send(
        self, event: str | Mapping[str, Any] | Event, *, wait: bool = False, **payload: Any
    ) -> _Sent:
        """Send one event; it is processed at once unless something is being processed.

        Args:
            event: A type with payload keywords, a dict with ``type``, or an ``Event``.
            wait: Whether awaiting gives the receipt of the event's macrostep.
            **payload: The payload, when ``event`` is a type.

        Returns:
            An awaitable: None, or with ``wait`` the receipt. It need not be awaited. A machine
            that is done, in error or stopped drops the event.

        Raises:
            StepError: The interpreter was never started, or this is no event.
            QueueFullError: ``max_queue`` events are waiting; this one was not accepted.
        """
        made = as_event(event, payload or None)
        loop = self._started()
        if self.actors and made.type in DECISIONS:
            return _Sent(self._decision(made), wait, loop)
        return _Sent(self._accept(made, OUTSIDE), wait, loop)

    def post(self, event: str | Mapping[str, Any] | Event, **payload: Any) -> None:
        """Queue an event from inside, or from another thread; see `InterpreterBase.post`."""
        made = as_event(event, payload or None)
        loop = self._started()
        try:
            here = asyncio.get_running_loop() is loop
        except RuntimeError:
            here = False
        if here:
            self._accept(made, INSIDE)
        else:
            loop.call_soon_threadsafe(self._accept_late, made)

    def _accept_late(self, event: Event) -> None:
        try:
            self._accept(event, INSIDE)
        except QueueFullError as error:
            self._fault(error)

    def _started(self) -> asyncio.AbstractEventLoop:
        if self._loop is None or self._state == "uninitialized":
            raise StepError(f"{self.id} has not been started; call start() first")
        return self._loop

    # Driving

    def _drive(self) -> None:
        if self._driving or self._pump is not None:
            return
        queue = self._queue
        self._driving = True
        try:
            while queue:
                if self._hook is not None and self._blocks(queue[0]):
                    self._pump = self._started().create_task(self._pump_queue())
                    break
                self._take(queue.popleft())
        finally:
            self._driving = False
        self._notify()

    def _blocks(self, entry: Entry) -> bool:
        """Whether the hook would block the loop for this event."""
        ledger = self._ledger
        if ledger is None:
            ledger = self.logic.attachments.get("ledger")
        if not getattr(ledger, "blocking", False) or self._state != "running":
            return False
        concerns = getattr(self._hook, "concerns", None)
        try:
            return concerns is None or bool(concerns(self.snapshot, entry.event))
        except Exception:
            return True

    async def _pump_queue(self) -> None:
        """Process the queue with the hook's blocking part on a worker thread."""
        while self._queue:
            if self._blocks(self._queue[0]):
                event, origin = self._queue[0].event, self._queue[0].origin
                self._verdict = await asyncio.wrap_future(
                    WORKERS.submit(self._ask_hook, event, origin)
                )
            self._driving = True
            try:
                self._take(self._queue.popleft())
            finally:
                self._driving = False
                self._verdict = None
        self._pump = None
        self._arm()
        self._notify()

    def _notify(self) -> None:
        """Wake whoever waits for a change, here or in a parent."""
        each: Interpreter | None = self
        while each is not None:
            if each._waiters:
                waiters, each._waiters = each._waiters, ()
                for future in waiters:
                    if not future.done():
                        future.set_result(None)
            each = each.parent

    def quiet(self) -> bool:
        """Whether nothing is queued or being processed (services may be in flight)."""
        return (
            super().quiet()
            and self._pump is None
            and all(actor.quiet() for actor in self.actors.values())
        )

    # Services

    def _start_service(self, invocation: Invocation) -> None:
        if is_async_service(invocation.service):
            self._start_task(invocation, call_service, self, invocation)
            return
        loop = self._started()
        # What follows from the outcome sees the variables of whoever started the service.
        context = contextvars.copy_context()

        def ended(output: Any, error: BaseException | None) -> None:
            # The loop may have been closed while a body hung on.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._land, invocation, output, error, context=context)

        self._computing += 1
        self._flying[invocation.key] = abandon
        WORKERS.start(ended, call_service, self, invocation)

    def _land(self, invocation: Invocation, output: Any, error: BaseException | None) -> None:
        """What a service gave on its thread: its outcome, or something still to be awaited."""
        self._computing -= 1
        if is_awaitable(output) and self.is_current(invocation):
            self._start_task(invocation, awaited, output)
            return
        if is_awaitable(output):
            close: Callable[[], None] | None = getattr(output, "close", None)
            if close is not None:
                close()
        self._finish(invocation, output, error)
        self._notify()

    def _start_task(self, invocation: Invocation, fn: Callable[..., Any], *args: Any) -> None:
        task = self._started().create_task(
            self._run(invocation, fn, *args), name=f"guardchart:{self.id}:{invocation.id}"
        )
        self._flying[invocation.key] = task.cancel

    async def _run(self, invocation: Invocation, fn: Callable[..., Any], *args: Any) -> None:
        output: Any = None
        failure: BaseException | None = None
        try:
            output = await fn(*args)
        except asyncio.CancelledError as cancelled:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                self._flying.pop(invocation.key, None)
                self._charge(invocation, cancelled)
                self._notify()
                raise
            failure = NotSupportedError("the service was cancelled, but not by the machine")
        except Exception as error:
            failure = error
        self._finish(invocation, output, failure)
        self._notify()

    # Time

    def _perform(self, effects: Iterable[Any], event: Any) -> None:
        super()._perform(effects, event)
        self._arm()  # a deadline comes and goes by an effect

    def _arm(self) -> None:
        """Have the loop call at the next deadline of this machine; children arm their own."""
        if self.clock.simulated or self._loop is None or self._snapshot is None:
            return
        rest = self._snapshot[4] if self._state == "running" else None
        if rest is self._armed_for:
            return
        self._armed_for = rest
        due = self.own_due()
        at = None if due is None else due[0]
        if at == self._armed:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._armed = at
        if at is not None:
            delay_s = max(0.0, (at - self.clock.now_ms()) / 1000.0)
            self._timer = self._loop.call_later(delay_s, self._on_timer)

    def _on_timer(self) -> None:
        self._armed = self._armed_for = self._timer = None
        # A queue that is being processed arms again when it is done.
        if self.fire_due() or self._pump is None:
            self._arm()

    def fire_due(self) -> bool:
        """Deliver every timer that is due, in order of ``(due_at, id)``.

        Returns:
            False where the next one has to wait for what is being processed.
        """
        while self._fire_next():
            pass
        return self.quiet()

    def fire_overdue(self) -> None:
        """Fire what is due; the node's and the store hosts' first act after ``start``."""
        self.fire_due()

    @property
    def busy(self) -> bool:
        """Whether anything is queued, being processed or in flight, children included."""
        return not self.quiet() or self._in_flight()

    def computing(self) -> bool:
        """Whether a synchronous service runs on a thread, here or in a child machine."""
        return self._computing > 0 or any(actor.computing() for actor in self.actors.values())

    async def changed(self) -> None:
        """Wait until something was processed, a service ended or a deadline fired."""
        future = self._started().create_future()
        self._waiters = (*self._waiters, future)
        await future

    async def idle(self) -> None:
        """Wait until nothing is queued, being processed or in flight."""
        while self._state == "running" and self.busy:
            await self.changed()

    async def settle(
        self,
        serve_delay_s: float = 30.0,
        *,
        serve_total_s: float | None = None,
        waiting: Collection[str] = (),
        until: Collection[str] = (),
    ) -> None:
        """Wait until nothing is in flight and the machine rests, ends or faces a long delay.

        Args:
            serve_delay_s: The longest delay that is waited for, in seconds of the machine's
                clock. Under a ``SimulatedClock`` somebody must move the clock meanwhile.
            serve_total_s: How long delays this call may wait for in all, so that a chart that
                polls does not keep it; as ``serve_delay_s`` by default. A delay that does not
                fit any more is left to the next call.
            waiting: Keys of states that rest whatever their timers, beside those tagged
                ``waiting``.
            until: Keys or ids of states to stop in.
        """
        longest_ms = serve_delay_s * 1000.0
        left_ms = longest_ms if serve_total_s is None else serve_total_s * 1000.0
        while self._state == "running" and not reached(self, until):
            resting_since = None
            if not self.busy:
                due = serving_due(self, waiting)
                resting_since = self.clock.now_ms()
                if due is None or due - resting_since > min(longest_ms, left_ms):
                    return
            await self.changed()
            if resting_since is not None:
                left_ms -= self.clock.now_ms() - resting_since

    # The end

    def _quit(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._armed = self._armed_for = None
        current = None
        with contextlib.suppress(RuntimeError):
            current = asyncio.current_task()
        if current is not None:
            # A service that stops its own machine may finish what it is about.
            own = current.cancel
            self._flying = {k: cancel for k, cancel in self._flying.items() if cancel != own}
        super()._quit()
        if self._pump is not None and self._pump is not current:
            self._pump.cancel()
            self._pump = None
            queue = list(self._queue)
            self._queue.clear()
            for entry in queue:
                entry.receipt = self._refused("dropped", f"the machine is {self._state}")
                self._answer(entry)
        self._notify()
