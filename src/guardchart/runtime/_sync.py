"""The synchronous interpreter: one caller drives, everybody else queues.

A service runs in the caller's thread, unless a deadline is pending somewhere in the machine:
then it runs on a worker thread and is abandoned when its state is left, so that a hung body
delays nothing. One that promises to end by itself (``bounded = True``) is spared the way there.
"""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections.abc import Callable, Collection, Mapping
from threading import get_ident
from typing import Any, ClassVar, Final, Self, Unpack

from guardchart.errors import NotSupportedError, StepError
from guardchart.kernel import EngineEvent, Event, Machine, Receipt, as_event
from guardchart.runtime._address import DECISIONS
from guardchart.runtime._base import InterpreterBase
from guardchart.runtime._clock import ALARMS
from guardchart.runtime._core import INSIDE, OUTSIDE, Entry, Options
from guardchart.runtime._loops import LOOPS
from guardchart.runtime._rest import reached, serving_due
from guardchart.runtime._services import (
    Invocation,
    Manner,
    async_services,
    awaited,
    call_service,
    is_awaitable,
    manner_of,
)
from guardchart.runtime._tree import Tree
from guardchart.runtime._workers import WORKERS, abandon

__all__ = ["SyncInterpreter"]

# What most services give, and nobody awaits; asking is faster than `inspect` is.
_PLAIN: Final = frozenset({type(None), bool, int, float, str, dict, list, tuple})
_ENDED: Final = frozenset({"done", "error", "stopped"})


class SyncInterpreter(InterpreterBase):
    """Runs a machine in the caller's thread; see `InterpreterBase` for the arguments.

    Deadlines that fall due while nobody calls are delivered by a thread of the library's own.
    It keeps no interpreter alive: keep a reference, and call ``stop()``.

    Args:
        allow_async: Run async services too, on one loop thread shared by the process, with
            the caller's context variables. Without it they are refused at ``start()``.
        manual_timers: Deadlines are delivered only inside a call (`settle`, `fire_due`, or
            while a service runs), never in the background.

    Example:
        >>> from guardchart import create_machine
        >>> toggle = create_machine({"id": "t", "initial": "off", "states": {
        ...     "off": {"on": {"FLIP": "on"}}, "on": {"on": {"FLIP": "off"}}}})
        >>> light = SyncInterpreter(toggle).start()
        >>> light.send("FLIP").status, sorted(light.current_state_ids)
        ('taken', ['t.on'])
    """

    engine: ClassVar[str] = "sync"

    def __init__(
        self,
        machine: Machine,
        *,
        allow_async: bool = False,
        manual_timers: bool = False,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(machine, **options)
        self.manual_timers = manual_timers
        self._allow_async = self.mixed = allow_async
        self._tree = Tree(self)
        self._armed: float | None = None
        self._armed_for: Any = None
        self._manners: dict[str, Manner] = {}

    def start(self) -> Self:
        """Enter the initial configuration (or take up the snapshot); run to quiet.

        Raises:
            NotSupportedError: The logic has an async service and ``allow_async`` is off.
            StepError: The initial macrostep does not come to rest, or an invoke's input raised
                while services were restarted. Nothing was started.
            ChartError: An actor of the snapshot cannot be restored.
        """
        if self._state != "uninitialized":
            return self
        if not self._allow_async:
            for name in async_services(self.machine):
                raise NotSupportedError(
                    f"service {name!r} is async and not supported by SyncInterpreter; "
                    "use Interpreter, allow_async=True, or a sync service"
                )
        tree = self._tree
        tree.enter(wait=True)
        try:
            self._begin()
            self._drive()
            tree.run()
        finally:
            tree.leave()
        return self

    def _join(self, parent: Any) -> None:
        self._tree = parent._tree
        self._allow_async = parent._allow_async
        self.mixed = parent.mixed

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
            only queued and the receipt is ``ignored`` with the reason "queued". While another
            thread drives the machine, that thread processes the event, and this call returns
            with its receipt. A machine that is done, in error or stopped drops the event.

        Raises:
            StepError: The interpreter was never started, or this is no event.
            QueueFullError: ``max_queue`` events are waiting; this one was not accepted.
        """
        entry: Entry
        if type(event) is str:
            made = Event(event, payload)
        else:
            made = event if type(event) is Event and not payload else as_event(event, payload)
        if self._state == "uninitialized":
            raise StepError(f"{self.id} has not been started; call start() first")
        tree = self._tree
        if self.actors and made.type in DECISIONS:
            entry = self._as_driver(lambda: self._decision(made))
            return entry.receipt or self._refused("ignored", "queued")
        me = get_ident()
        if tree.owner == me:
            return self._accept(made, OUTSIDE).receipt or self._refused("ignored", "queued")
        if not tree.lock.acquire(False):
            self._check_room(tree.inbox.qsize())
            entry = tree.call(lambda: self._accept(made, OUTSIDE))
            return entry.receipt or self._refused("ignored", "queued")
        tree.owner = me
        try:
            if self._queue or self._plugins.items:
                receipt = self._accept(made, OUTSIDE).receipt
            else:
                self._driving = True
                try:
                    plain = self._hook is None and self._state == "running"
                    receipt = self._step(made) if plain else self._apply(made, OUTSIDE)
                finally:
                    self._driving = False
                if self._queue:
                    self._streak = 0
                    self._drive()
            root = tree.root
            if tree.jobs or root._flying or root.actors:
                tree.run()
        finally:
            tree.leave()
        return receipt or self._refused("dropped", "the machine was interrupted")

    def post(self, event: str | Mapping[str, Any] | Event, **payload: Any) -> None:
        """Queue an event from inside; see `InterpreterBase.post`."""
        made = as_event(event, payload or None)
        tree = self._tree
        if tree.owner == get_ident():
            self._accept(made, INSIDE)
            return
        self._check_room(tree.inbox.qsize())
        tree.deliver(lambda: self._accept(made, INSIDE))

    def update_context(self, updates: Mapping[str, Any]) -> None:
        """Write context outside a step; see `InterpreterCore.update_context`.

        From another thread than the one that drives the machine it is written between two
        steps.
        """
        write = super().update_context
        self._as_driver(lambda: write(updates))

    def fail_interrupted(self, again: Callable[[Any], bool] | None = None) -> None:
        """As `InterpreterBase.fail_interrupted`, run to quiet."""
        fail = super().fail_interrupted
        self._as_driver(lambda: fail(again))

    def _as_driver(self, fn: Callable[[], Any]) -> Any:
        """Call ``fn`` while no other thread drives, and run to quiet."""
        tree = self._tree
        if tree.owner == get_ident():
            return fn()
        if not tree.enter():
            return tree.call(fn)
        try:
            answer = fn()
            tree.run()
        finally:
            tree.leave()
        return answer

    # Services

    def _start_service(self, invocation: Invocation) -> None:
        self._tree.jobs.append((self, invocation))

    def _run_job(self, invocation: Invocation) -> None:
        if not self.is_current(invocation):
            return
        tree = self._tree
        manner = self._manners.get(invocation.src)
        if manner is None or manner.service is not invocation.service:
            try:
                manner = self._manners[invocation.src] = manner_of(invocation.service)
            except Exception as error:  # no callable, or in no form
                self._finish(invocation, None, error)
                return
        if manner.is_async:
            if self._allow_async:
                self._launch(invocation, LOOPS.start, call_service, self, invocation)
            else:
                self._finish(invocation, None, self._no_async(invocation))
        elif not manner.bounded and tree.root._in_company():
            self._launch(invocation, WORKERS.start, call_service, self, invocation)
        else:
            try:
                if self._plugins.has("on_service_call"):
                    # What a plugin sets for the service is not the caller's to keep.
                    context = contextvars.copy_context()
                    output = context.run(call_service, self, invocation, manner.form)
                else:
                    output = call_service(self, invocation, manner.form)
            except Exception as error:
                self._finish(invocation, None, error)
            else:
                # Where nobody looks on and nothing waits, a result need not queue.
                plain = type(output) in _PLAIN and not manner.delivers
                unseen = self._hook is None and not self._plugins.items
                if plain and unseen and not self._queue and self._state == "running":
                    self._step_at_once(EngineEvent("done", invocation.key, output))
                else:
                    self._land(invocation, output, None)

    def _in_company(self) -> bool:
        """Whether anything else runs or a deadline is pending, so that a body must not block."""
        if self._flying or self.actors or self._snapshot is None:
            return self._in_flight() or self.next_due() is not None
        rest = self._snapshot[4]
        return bool(rest.timers or rest.sends)

    def _step_at_once(self, event: EngineEvent) -> None:
        self._driving = True
        try:
            self._step(event)
        finally:
            self._driving = False
        if self._queue:
            self._drive()

    def _launch(self, invocation: Invocation, start: Callable[..., Any], *args: Any) -> None:
        tree = self._tree

        def ended(output: Any, error: BaseException | None) -> None:
            tree.deliver(lambda: self._land(invocation, output, error))

        self._flying[invocation.key] = start(ended, *args) or abandon

    def _land(self, invocation: Invocation, output: Any, error: BaseException | None) -> None:
        """What a service gave: its outcome, or something still to be awaited."""
        if isinstance(error, asyncio.CancelledError):
            if self.is_current(invocation):
                error = NotSupportedError("the service was cancelled, but not by the machine")
                self._finish(invocation, None, error)
            else:
                self._charge(invocation, error)
        elif type(output) in _PLAIN or not is_awaitable(output):
            self._finish(invocation, output, error)
        elif self._allow_async and self.is_current(invocation):
            self._launch(invocation, LOOPS.start, awaited, output)
        else:
            close: Callable[[], None] | None = getattr(output, "close", None)
            if close is not None:
                close()
            self._finish(invocation, None, self._no_async(invocation))

    def _no_async(self, invocation: Invocation) -> NotSupportedError:
        return NotSupportedError(
            f"service {invocation.src!r} is async and not supported by SyncInterpreter; "
            "use Interpreter, or allow_async=True"
        )

    # Time

    def _arm(self) -> None:
        """Ask the alarm thread to ring at the next deadline; called on the root."""
        if self._snapshot is None:
            return
        self._armed_for = self._snapshot[4]
        if self.manual_timers or self.clock.simulated:
            return
        due = self.next_due()
        at = None if due is None else due[0]
        if at != self._armed:
            self._armed = at
            ALARMS.set(self, at)

    def _ring(self) -> None:
        """The alarm thread's call: a deadline may be due."""
        self._armed = self._armed_for = None
        tree = self._tree
        tree.tick = True
        tree.inbox.put(None)
        tree.pump()

    def fire_due(self) -> bool:
        """Deliver every timer that is due, in order of ``(due_at, id)``, and run to quiet.

        Returns:
            True once that is done; False from inside an action or hook, where it follows.
        """
        tree = self._tree
        if tree.owner == get_ident():
            tree.tick = True
            return False
        return bool(self._as_driver(self._tick))

    def _tick(self) -> bool:
        self._tree.tick = True
        self._tree.run()
        return True

    def fire_overdue(self) -> None:
        """Fire what is due; the node's and the store hosts' first act after ``start``."""
        due = self.next_due()
        if due is not None and due[0] <= self.clock.now_ms():
            self.fire_due()

    def computing(self) -> bool:
        """Always False: whoever moves the clock waits for this engine's services anyway."""
        return False

    def settle(
        self,
        serve_delay_s: float = 30.0,
        *,
        serve_total_s: float | None = None,
        waiting: Collection[str] = (),
        until: Collection[str] = (),
    ) -> None:
        """Serve short delays until the machine rests, ends or faces a longer one.

        Events from other threads are processed meanwhile. Inside an action or hook it does
        nothing.

        Args:
            serve_delay_s: The longest delay that is slept for, in seconds. Under a
                ``SimulatedClock`` nothing is slept for.
            serve_total_s: How long this call may sleep in all, in seconds, so that a chart that
                polls does not keep it; as ``serve_delay_s`` by default. A delay that does not
                fit any more is left to the next call.
            waiting: Keys of states that rest whatever their timers, beside those tagged
                ``waiting``.
            until: Keys or ids of states to stop in.
        """
        tree = self._tree
        if tree.owner == get_ident() or self._state in _ENDED:
            return
        tree.enter(wait=True)
        left_s = serve_delay_s if serve_total_s is None else serve_total_s
        try:
            tree.run()
            for _ in range(self.max_queue):
                if self._state != "running" or reached(self, until):
                    return
                due = serving_due(self, waiting)
                if due is None:
                    return
                wait_s = (due - self.clock.now_ms()) / 1000.0
                if wait_s > min(serve_delay_s, left_s) or (wait_s > 0 and self.clock.simulated):
                    return
                started = time.monotonic()
                tree.tick = wait_s <= 0 or not tree.receive(wait_s)
                left_s -= time.monotonic() - started
                tree.run()
            self._fault(StepError(f"{self.id}: more than {self.max_queue} delays in one call"))
        finally:
            tree.leave()

    def stop(self) -> Self:
        """Stop: cancel timers and services, run no exit actions, keep the snapshot.

        Returns:
            The interpreter; a second call does nothing. Called by an action, the step is
            completed and its effects are not carried out.
        """
        super().stop()
        # Whoever waits for something that will not come any more.
        if self._tree.lock.locked():
            self._tree.inbox.put(None)
        return self

    def _quit(self) -> None:
        super()._quit()
        if self.parent is None and self._armed is not None:
            self._armed = None
            ALARMS.set(self, None)
