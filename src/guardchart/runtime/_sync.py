"""The synchronous interpreter: one caller drives, everybody else queues.

A service runs in the caller's thread, unless a deadline is pending: then it runs on a
worker thread and is abandoned when the deadline fires, so a hung body delays nothing.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from typing import Any, ClassVar, Final, NamedTuple, Self

from guardchart.errors import NotSupportedError, QueueFullError, StepError
from guardchart.kernel import Event, Machine, Receipt, active_nodes, as_event, done, failed
from guardchart.runtime._base import ENGINE, OUTSIDE, SELF, AnyEvent, InterpreterBase, _receipt
from guardchart.runtime._clock import ALARMS
from guardchart.runtime._loops import LOOPS
from guardchart.runtime._services import Invocation, call_service, is_async_service
from guardchart.runtime._workers import WORKERS

__all__ = ["SyncInterpreter"]


class _Entry:
    """A queued event and, for a caller in another thread, the place of its receipt."""

    __slots__ = ("event", "origin", "receipt", "waiter")

    def __init__(self, event: AnyEvent, origin: str) -> None:
        self.event = event
        self.origin = origin
        self.receipt: Receipt | None = None
        self.waiter: threading.Event | None = None


class _Job(NamedTuple):
    invocation: Invocation
    future: Future[Any]


_LATE: Final = "late"


class SyncInterpreter(InterpreterBase):
    """Runs a machine in the caller's thread; see `InterpreterBase` for the arguments.

    Args:
        allow_async: Run async services too, on one loop thread shared by the process, with
            the caller's context variables. Without it they are refused at ``start()``.

    Example:
        >>> from guardchart import create_machine
        >>> toggle = create_machine({"id": "t", "initial": "off", "states": {
        ...     "off": {"on": {"FLIP": "on"}}, "on": {"on": {"FLIP": "off"}}}})
        >>> light = SyncInterpreter(toggle).start()
        >>> light.send("FLIP").status, sorted(light.current_state_ids)
        ('taken', ['t.on'])
    """

    engine: ClassVar[str] = "sync"

    def __init__(self, machine: Machine, *, allow_async: bool = False, **options: Any) -> None:
        super().__init__(machine, **options)
        self._allow_async = allow_async
        self._queue: deque[_Entry] = deque()
        self._jobs: deque[Invocation] = deque()
        self._running: _Job | None = None
        self._mutex = threading.Lock()
        self._wake = threading.Event()
        self._driver: int | None = None
        self._armed: float | None = None
        self._self_sent = 0
        self.manual_timers = False

    def start(self) -> Self:
        """Enter the initial configuration (or take up the snapshot); run to quiet.

        Raises:
            NotSupportedError: The logic has an async service and ``allow_async`` is off.
        """
        if self._state != "uninitialized":
            return self
        with self._mutex:
            self._driver = threading.get_ident()
        try:
            self._begin()
        except BaseException:
            self._driver = None
            raise
        self._drive()
        return self

    def send(
        self, event: str | Mapping[str, Any] | Event, *, wait: bool = False, **payload: Any
    ) -> Receipt:
        """Send one event and run to quiet: services, children and their replies included.

        Args:
            event: A type with payload keywords, a dict with ``type``, or an ``Event``.
            wait: Accepted for symmetry with ``Interpreter``; this engine always waits.
            **payload: The payload, when ``event`` is a type.

        Returns:
            The receipt of the event's macrostep. From inside an action or hook the event is
            only queued and the receipt is ``ignored`` with the reason "queued". A machine
            that is done, in error or stopped drops the event.

        Raises:
            StepError: The interpreter was never started.
            QueueFullError: ``max_queue`` events are waiting; this one was not accepted.
        """
        if self._state == "uninitialized":
            raise StepError(f"{self.id} has not been started; call start() first")
        return self._submit(_Entry(self._outside(event, payload), OUTSIDE))

    def post(self, event: str | Mapping[str, Any] | Event, **payload: Any) -> None:
        """Queue an event from inside; see `InterpreterBase.post`."""
        made = as_event(event, payload or None)
        self._plugins.call("on_before_send", self, made)
        entry = _Entry(made, SELF)
        with self._mutex:
            self._push(entry)
            driven = self._driver is not None
        if driven:
            self._wake.set()
        else:
            self._try_drive()

    def _submit(self, entry: _Entry) -> Receipt:
        me = threading.get_ident()
        with self._mutex:
            self._push(entry)
            if self._driver is None:
                self._driver = me
            elif self._driver == me:
                return _receipt("ignored", "queued", self.current_state_ids)
            else:
                entry.waiter = threading.Event()
        if entry.waiter is not None:
            self._wake.set()
            entry.waiter.wait()
        else:
            self._drive()
        return entry.receipt or _receipt("dropped", "stopped", self.current_state_ids)

    def _push(self, entry: _Entry) -> None:
        if len(self._queue) >= self.max_queue and entry.origin != ENGINE:
            raise QueueFullError(f"{self.id}: {self.max_queue} events are waiting already")
        self._queue.append(entry)

    def _put(self, event: AnyEvent, origin: str) -> Any:
        entry = _Entry(event, origin)
        with self._mutex:
            try:
                self._push(entry)
            except QueueFullError as error:
                self.faults.append(error)
                return None
            driven = self._driver is not None
        if driven:
            self._wake.set()
        else:
            self._try_drive()
        return None

    # Driving

    def _try_drive(self) -> None:
        with self._mutex:
            if self._driver is not None:
                self._wake.set()
                return
            self._driver = threading.get_ident()
        self._drive()

    def _drive(self) -> None:
        """Process until quiet. The caller has made itself the driver."""
        queue = self._queue
        self._self_sent = 0
        try:
            while True:
                if queue:
                    self._take(queue.popleft())
                elif self._running is not None:
                    self._watch(self._running)
                elif self._jobs:
                    self._run_next(self._jobs.popleft())
                else:
                    with self._mutex:
                        if not queue and not self._jobs:
                            self._driver = None
                            break
        except BaseException:
            with self._mutex:
                self._driver = None
            raise
        self._arm()

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
        if entry.origin == _LATE:
            self._charge_late(entry)
        else:
            entry.receipt = self._apply(entry.event, entry.origin)
        if entry.waiter is not None:
            entry.waiter.set()

    def _charge_late(self, entry: _Entry) -> None:
        if self._state == "running":
            invocation, outcome = entry.event.payload["invocation"], entry.event.payload["outcome"]
            updates = invocation.service.late(self.snapshot.context, outcome)
            if updates:
                self.update_context(updates)

    # Services

    def _check_services(self) -> None:
        if not self._allow_async:
            self._refuse_async()

    def _start_service(self, invocation: Invocation) -> None:
        self._jobs.append(invocation)

    def _current(self, invocation: Invocation) -> bool:
        child = self.snapshot.children.get(invocation.id)
        return (
            self._state == "running"
            and child is not None
            and child.key == invocation.key
            and child.status == "active"
        )

    def _run_next(self, invocation: Invocation) -> None:
        if not self._current(invocation):
            return
        if is_async_service(invocation.service):
            self._running = _Job(
                invocation, LOOPS.submit(call_service, self, invocation)
            )
        elif self.next_due() is not None:
            self._running = _Job(invocation, WORKERS.submit(call_service, self, invocation))
        else:
            try:
                output = call_service(self, invocation)
                self._complete(invocation, _no_awaitable(invocation, output), None)
            except Exception as error:
                self._complete(invocation, None, error)
            return
        self._running.future.add_done_callback(lambda _: self._wake.set())

    def _watch(self, job: _Job) -> None:
        """Wait for the running service, an event or a deadline, whichever comes first."""
        if not self._current(job.invocation):
            self._running = None
            self._abandon(job)
            return
        self._wake.clear()
        if job.future.done():
            self._running = None
            self._harvest(job)
            return
        event = self._due_event()
        if event is not None:
            self._queue.append(_Entry(event, ENGINE))
            return
        if self._queue:
            return
        due = self.next_due()
        if due is None or self.clock.simulated:
            self._wake.wait()
        else:
            self._wake.wait(max(0.0, (due[0] - self.clock.now_ms()) / 1000.0))

    def _harvest(self, job: _Job) -> None:
        try:
            output = _no_awaitable(job.invocation, job.future.result())
        except asyncio.CancelledError:
            self._complete(job.invocation, None, NotSupportedError("the service was cancelled"))
        except Exception as error:
            self._complete(job.invocation, None, error)
        else:
            self._complete(job.invocation, output, None)

    def _complete(
        self, invocation: Invocation, output: Any, error: BaseException | None
    ) -> None:
        self._settled(invocation, output, error)
        key = invocation.key
        event = done(key, output) if error is None else failed(key, error)
        self._queue.append(_Entry(event, ENGINE))

    def _abandon(self, job: _Job) -> None:
        """The state was left: cancel what can be cancelled, charge what arrives late."""
        job.future.cancel()
        if hasattr(job.invocation.service, "late"):
            job.future.add_done_callback(lambda future: self._late(job.invocation, future))

    def _late(self, invocation: Invocation, future: Future[Any]) -> None:
        if future.cancelled() or self._state != "running":
            return
        outcome = future.exception() or future.result()
        event = Event("guardchart.late", {"invocation": invocation, "outcome": outcome})
        self._put(event, _LATE)

    def _adopt(self, actor: InterpreterBase, invocation: Invocation) -> None:
        self.actors[actor.id] = actor
        ended = _Ended(self, invocation)
        actor.use(ended)
        try:
            actor.start()  # type: ignore[attr-defined]
        except Exception as error:
            self.actors.pop(actor.id, None)
            self._complete(invocation, None, error)

    # Time

    def _arm(self) -> None:
        """Ask the alarm thread to wake this interpreter at its next deadline."""
        if self.manual_timers or self.clock.simulated:
            return
        due = self.next_due()
        if due is not None and due[0] != self._armed:
            self._armed = due[0]
            ALARMS.set(self, due[0])

    def fire_due(self) -> None:
        """Deliver every timer that is due, in order of ``(due_at, id)``, and run to quiet.

        While another thread drives, it is woken and delivers them.
        """
        self._armed = None
        with self._mutex:
            if self._driver is not None:
                self._wake.set()
                return
            self._driver = threading.get_ident()
        for _ in range(self.max_queue):
            event = self._due_event()
            if event is None:
                break
            self._queue.append(_Entry(event, ENGINE))
            self._drive()
            with self._mutex:
                if self._driver is not None:
                    return
                self._driver = threading.get_ident()
        self._drive()

    def quiet(self) -> bool:
        """Whether nothing is queued or being processed."""
        return self._driver is None and not self._queue

    def settle(
        self,
        serve_delay_s: float = 30.0,
        *,
        waiting: Collection[str] = (),
        until: Collection[str] = (),
    ) -> None:
        """Serve short delays until the machine rests, ends or faces a longer one.

        Args:
            serve_delay_s: The longest delay that is slept for, in seconds. Under a
                ``SimulatedClock`` nothing is slept for.
            waiting: Keys of states that rest whatever their timers, beside those tagged
                ``waiting``.
            until: Keys or ids of states to stop in.
        """
        while self._state == "running" and not reached(self, until):
            due = self.next_due()
            if due is None or self.clock.simulated or rests(self, waiting):
                return
            remaining_s = (due[0] - self.clock.now_ms()) / 1000.0
            if remaining_s > serve_delay_s:
                return
            if remaining_s > 0:
                time.sleep(remaining_s)
            self.fire_due()

    def fire_overdue(self) -> None:
        """Fire what is due; the node's and the store hosts' first act after ``start``."""
        if self.next_due() is not None:
            self.fire_due()

    def stop(self) -> Self:
        """Stop: cancel timers and services, run no exit actions, keep the snapshot."""
        if self._state in ("running", "uninitialized"):
            running = self._state == "running"
            self._state = "stopped"
            self._quit_children()
            self._jobs.clear()
            job, self._running = self._running, None
            if job is not None:
                job.future.cancel()
            self.clock.detach(self)
            self._wake.set()
            if running:
                self._plugins.call("on_interpreter_stop", self)
        return self

    def _stop_child(self, name: str) -> None:
        super()._stop_child(name)
        if self._running is not None and self._running.invocation.id == name:
            self._wake.set()


class _Ended:
    """The plugin that reports a child machine's end to its parent."""

    def __init__(self, parent: Any, invocation: Invocation) -> None:
        self._parent = parent
        self._invocation = invocation

    def on_done(self, interpreter: Any, output: Any) -> None:
        self._report(interpreter, done(self._invocation.key, output), output, None)

    def on_error(self, interpreter: Any, error: Any) -> None:
        raised = error if isinstance(error, BaseException) else StepError("the actor failed")
        self._report(interpreter, failed(self._invocation.key, raised), None, raised)

    def _report(
        self, interpreter: Any, event: Event, output: Any, error: BaseException | None
    ) -> None:
        parent = self._parent
        if interpreter.parent is not parent or parent.actors.get(interpreter.id) is not interpreter:
            return
        parent.actors.pop(interpreter.id, None)
        parent._settled(self._invocation, output, error)
        parent._put(event, ENGINE)


def rests(interpreter: InterpreterBase, waiting: Collection[str]) -> bool:
    """Whether an active state waits for somebody outside: tagged ``waiting``, or named."""
    for node in active_nodes(interpreter.snapshot):
        if "waiting" in node.tags or node.key in waiting:
            return True
    return False


def reached(interpreter: InterpreterBase, until: Collection[str]) -> bool:
    """Whether an active leaf is one of ``until``, by key or id."""
    if not until:
        return False
    nodes = interpreter.machine.nodes
    return any(
        each in until or nodes[each].key in until for each in interpreter.snapshot.state_ids
    )


def _no_awaitable(invocation: Invocation, output: Any) -> Any:
    if inspect.isawaitable(output):
        close: Callable[[], None] | None = getattr(output, "close", None)
        if close is not None:
            close()
        raise NotSupportedError(
            f"service {invocation.src!r} returned an awaitable; it is async and not supported by "
            "SyncInterpreter unless it says so (async def)"
        )
    return output


