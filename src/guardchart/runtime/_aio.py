"""The asynchronous interpreter: steps run inline, services are tasks.

A step is a plain function call, so an event is processed where it is sent. Only a hook
that blocks (a ledger on disk) moves processing into a task of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Collection, Generator, Mapping
from typing import Any, ClassVar, Self

from guardchart.errors import NotSupportedError, QueueFullError, StepError
from guardchart.kernel import EngineEvent, Event, Machine, Receipt, as_event, done, failed
from guardchart.runtime._base import ENGINE, OUTSIDE, SELF, AnyEvent, InterpreterBase, _receipt
from guardchart.runtime._services import Invocation, call_service, is_async_service
from guardchart.runtime._sync import _Ended, reached, rests
from guardchart.runtime._workers import WORKERS

__all__ = ["Interpreter"]


class _Entry:
    __slots__ = ("event", "future", "origin", "receipt")

    def __init__(self, event: AnyEvent, origin: str) -> None:
        self.event = event
        self.origin = origin
        self.receipt: Receipt | None = None
        self.future: asyncio.Future[Receipt] | None = None


class _Sent:
    """What ``send`` returns: awaited, it gives the receipt if ``wait`` was asked for."""

    __slots__ = ("_entry", "_loop", "_wait")

    def __init__(self, entry: _Entry, wait: bool, loop: asyncio.AbstractEventLoop) -> None:
        self._entry = entry
        self._wait = wait
        self._loop = loop

    def __await__(self) -> Generator[Any, None, Receipt | None]:
        entry = self._entry
        if not self._wait:
            return None
        if entry.receipt is None:
            entry.future = self._loop.create_future()
            yield from entry.future
        return entry.receipt


class Interpreter(InterpreterBase):
    """Runs a machine on the running event loop; see `InterpreterBase` for the arguments.

    ``start()`` begins at once and may be awaited; it gives the interpreter. Sync services
    run on worker threads with their context variables.

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

    def __init__(self, machine: Machine, **options: Any) -> None:
        super().__init__(machine, **options)
        self._queue: deque[_Entry] = deque()
        self._tasks: dict[str, asyncio.Task[Any]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._driving = False
        self._pump: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._armed: float | None = None
        self._changed: list[asyncio.Future[None]] = []
        self._self_sent = 0

    def start(self) -> Self:
        """Enter the initial configuration (or take up the snapshot); may be awaited.

        Raises:
            NotSupportedError: No event loop is running; use ``SyncInterpreter``.
        """
        if self._state != "uninitialized":
            return self
        try:
            self._loop = asyncio.get_running_loop()
        except RuntimeError:
            raise NotSupportedError(
                "Interpreter.start() needs a running event loop; call it in a coroutine, "
                "or use SyncInterpreter"
            ) from None
        self._driving = True
        try:
            self._begin()
        finally:
            self._driving = False
        self._drive()
        return self

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
            An awaitable: None, or with ``wait`` the receipt. It need not be awaited.

        Raises:
            StepError: The interpreter was never started.
            QueueFullError: ``max_queue`` events are waiting; this one was not accepted.
        """
        loop = self._loop
        if loop is None:
            raise StepError(f"{self.id} has not been started; call start() first")
        entry = _Entry(self._outside(event, payload), OUTSIDE)
        self._push(entry)
        self._drive()
        return _Sent(entry, wait, loop)

    def post(self, event: str | Mapping[str, Any] | Event, **payload: Any) -> None:
        """Queue an event from inside or from another thread."""
        made = as_event(event, payload or None)
        self._plugins.call("on_before_send", self, made)
        self._from_anywhere(_Entry(made, SELF))

    def _from_anywhere(self, entry: _Entry) -> None:
        loop = self._loop
        if loop is None:
            raise StepError(f"{self.id} has not been started; call start() first")
        try:
            here = asyncio.get_running_loop() is loop
        except RuntimeError:
            here = False
        if here:
            self._push(entry)
            self._drive()
        else:
            loop.call_soon_threadsafe(self._accept, entry)

    def _accept(self, entry: _Entry) -> None:
        try:
            self._push(entry)
        except QueueFullError as error:
            self.faults.append(error)
        else:
            self._drive()

    def _push(self, entry: _Entry) -> None:
        if len(self._queue) >= self.max_queue and entry.origin != ENGINE:
            raise QueueFullError(f"{self.id}: {self.max_queue} events are waiting already")
        self._queue.append(entry)

    def _put(self, event: AnyEvent, origin: str) -> Any:
        self._accept(_Entry(event, origin))

    # Driving

    def _blocks(self, entry: _Entry) -> bool:
        """Whether the hook would block the loop for this event."""
        hook = self._hook
        if hook is None:
            return False
        ledger = self._ledger or self.logic.attachments.get("ledger")
        if not getattr(ledger, "blocking", False):
            return False
        concerns = getattr(hook, "concerns", None)
        return concerns is None or bool(concerns(self.snapshot, entry.event))

    def _drive(self) -> None:
        if self._driving or self._pump is not None:
            return
        queue = self._queue
        self._driving = True
        self._self_sent = 0
        try:
            while queue:
                if self._blocks(queue[0]):
                    assert self._loop is not None
                    self._pump = self._loop.create_task(self._pump_queue())
                    break
                self._take(queue.popleft())
        finally:
            self._driving = False
        self._notify()

    async def _pump_queue(self) -> None:
        """Process the queue with the hook's blocking part on a worker thread."""
        try:
            while self._queue:
                entry = self._queue.popleft()
                if self._blocks(entry):
                    await asyncio.wrap_future(WORKERS.submit(self._decide, entry))
                self._driving = True
                try:
                    self._take(entry)
                finally:
                    self._driving = False
                    self._verdict = None
        finally:
            self._pump = None
            self._notify()

    def _decide(self, entry: _Entry) -> None:
        self._verdict = self._ask_hook(entry.event, entry.origin)

    def _take(self, entry: _Entry) -> None:
        if entry.origin == SELF:
            self._self_sent += 1
            if self._self_sent > self.max_queue:
                self.faults.append(
                    StepError(f"{self.id} sent itself more than {self.max_queue} events in a row")
                )
                self._queue.clear()
                return
        elif entry.origin == OUTSIDE:
            self._self_sent = 0
        entry.receipt = self._apply(entry.event, entry.origin)
        if entry.future is not None and not entry.future.done():
            entry.future.set_result(entry.receipt)

    def _notify(self) -> None:
        """Wake whoever waits for a change in `settle`."""
        waiting, self._changed = self._changed, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    # Services

    def _start_service(self, invocation: Invocation) -> None:
        assert self._loop is not None
        self._tasks[invocation.key] = self._loop.create_task(
            self._run(invocation), name=f"guardchart:{self.id}:{invocation.id}"
        )

    async def _run(self, invocation: Invocation) -> None:
        try:
            if is_async_service(invocation.service):
                output = await call_service(self, invocation)
            else:
                output = await asyncio.wrap_future(WORKERS.submit(call_service, self, invocation))
                if hasattr(output, "__await__"):
                    output = await output
        except asyncio.CancelledError:
            self._tasks.pop(invocation.key, None)
            self._notify()
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            self._finish(invocation, None, NotSupportedError("the service cancelled itself"))
        except Exception as error:
            self._finish(invocation, None, error)
        else:
            self._finish(invocation, output, None)

    def _finish(
        self, invocation: Invocation, output: Any, error: BaseException | None
    ) -> None:
        self._tasks.pop(invocation.key, None)
        child = self.snapshot.children.get(invocation.id)
        if child is None or child.key != invocation.key or self._state != "running":
            self._charge_late(invocation, output if error is None else error)
            self._notify()
            return
        self._settled(invocation, output, error)
        key = invocation.key
        self._put(done(key, output) if error is None else failed(key, error), ENGINE)

    def _charge_late(self, invocation: Invocation, outcome: Any) -> None:
        late = getattr(invocation.service, "late", None)
        if late is not None and self._state == "running":
            updates = late(self.snapshot.context, outcome)
            if updates:
                self.update_context(updates)

    def _stop_child(self, name: str) -> None:
        super()._stop_child(name)
        for key, task in list(self._tasks.items()):
            if key.rpartition("@")[0] == name:
                task.cancel()
                self._tasks.pop(key, None)

    def _adopt(self, actor: InterpreterBase, invocation: Invocation) -> None:
        self.actors[actor.id] = actor
        actor.use(_Ended(self, invocation))
        try:
            actor.start()  # type: ignore[attr-defined]
        except Exception as error:
            self.actors.pop(actor.id, None)
            self._settled(invocation, None, error)
            self._put(failed(invocation.key, error), ENGINE)

    # Time

    def _after_commit(self) -> None:
        if self.clock.simulated:
            return
        due = self.next_due()
        at = None if due is None else due[0]
        if at == self._armed:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._armed = at
        if at is not None and self._loop is not None:
            delay_s = max(0.0, (at - self.clock.now_ms()) / 1000.0)
            self._timer = self._loop.call_later(delay_s, self._on_timer)

    def _on_timer(self) -> None:
        self._armed = None
        self._timer = None
        self.fire_due()
        self._after_commit()

    def fire_due(self) -> None:
        """Deliver every timer that is due, in order of ``(due_at, id)``."""
        for _ in range(self.max_queue):
            event = self._due_event()
            if event is None or any(_same(each.event, event) for each in self._queue):
                return
            self._put(event, ENGINE)
            if self._pump is not None or self._driving:
                return

    def fire_overdue(self) -> None:
        """Fire what is due; the node's and the store hosts' first act after ``start``."""
        if self.next_due() is not None:
            self.fire_due()

    @property
    def busy(self) -> bool:
        """Whether anything is queued, being processed or in flight, children included."""
        return bool(
            self._queue
            or self._driving
            or self._pump is not None
            or self._tasks
            or any(actor.busy for actor in self.actors.values() if isinstance(actor, Interpreter))
        )

    def quiet(self) -> bool:
        """Whether nothing is queued or being processed (services may be in flight)."""
        return not self._queue and not self._driving and self._pump is None

    async def changed(self) -> None:
        """Wait until something was processed, a service ended or a deadline fired."""
        assert self._loop is not None
        future = self._loop.create_future()
        self._changed.append(future)
        await future

    async def idle(self) -> None:
        """Wait until nothing is queued, being processed or in flight."""
        while self._state == "running" and self.busy:
            await self.changed()

    async def settle(
        self,
        serve_delay_s: float = 30.0,
        *,
        waiting: Collection[str] = (),
        until: Collection[str] = (),
    ) -> None:
        """Wait until nothing is in flight and the machine rests, ends or faces a long delay.

        Args:
            serve_delay_s: The longest delay that is waited for, in seconds. Under a
                ``SimulatedClock`` any delay is waited for: somebody must move the clock.
            waiting: Keys of states that rest whatever their timers, beside those tagged
                ``waiting``.
            until: Keys or ids of states to stop in.
        """
        while self._state == "running" and not reached(self, until):
            if not self.busy:
                due = self.next_due()
                if due is None or rests(self, waiting):
                    return
                remaining_s = (due[0] - self.clock.now_ms()) / 1000.0
                if not self.clock.simulated and remaining_s > serve_delay_s:
                    return
            await self.changed()

    def stop(self) -> Self:
        """Stop: cancel timers and services, run no exit actions, keep the snapshot."""
        if self._state in ("running", "uninitialized"):
            running = self._state == "running"
            self._state = "stopped"
            self._release()
            self._quit_children()
            self.clock.detach(self)
            if running:
                self._plugins.call("on_interpreter_stop", self)
            self._notify()
        return self

    def _finish_life(self) -> None:
        super()._finish_life()
        self._release()
        parent = self.parent
        if isinstance(parent, Interpreter):
            parent._notify()

    def _release(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        current = None
        with contextlib.suppress(RuntimeError):
            current = asyncio.current_task()
        for task in self._tasks.values():
            if task is not current:
                task.cancel()
        self._tasks.clear()


def _same(queued: AnyEvent, event: EngineEvent) -> bool:
    """Whether this deadline waits in the queue already."""
    return isinstance(queued, EngineEvent) and queued.kind == "fired" and queued.key == event.key
