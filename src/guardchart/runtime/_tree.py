"""Who drives a synchronous machine: one thread at a time, and what others want done."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from threading import get_ident
from typing import Any, Final

from guardchart.runtime._services import Invocation
from guardchart.runtime._workers import WORKERS, ignore

__all__ = ["Tree"]

_LONGEST_WAIT_S: Final = 3600.0


class Tree:
    """A root interpreter and its child machines: one thread at a time drives them all.

    ``inbox`` is what other threads want done: events, results, a wish to wake up. Whoever
    releases the tree looks there once more, so that nothing is left lying.
    """

    __slots__ = ("inbox", "jobs", "lock", "owner", "root", "tick")

    def __init__(self, root: Any) -> None:
        self.root = root
        self.lock = threading.Lock()
        self.owner = 0
        self.inbox: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self.jobs: deque[tuple[Any, Invocation]] = deque()
        self.tick = False

    def enter(self, *, wait: bool = False) -> bool:
        """Become the driver; False where another thread is, and this one does not wait."""
        if not self.lock.acquire(wait):
            return False
        self.owner = get_ident()
        return True

    def leave(self) -> None:
        """Stop driving, unless there is more to do and nobody else to do it."""
        while True:
            root = self.root
            snapshot = root._snapshot
            if snapshot is not None:
                rest = snapshot[4]
                if root.actors or (
                    rest is not root._armed_for
                    and (rest.timers or rest.sends or root._armed is not None)
                ):
                    root._arm()
            self.owner = 0
            self.lock.release()
            if (self.inbox.empty() and not self.tick) or not self.enter():
                return
            try:
                self.run()
            except BaseException:
                self.owner = 0
                self.lock.release()
                raise

    def deliver(self, item: Callable[[], Any] | None) -> None:
        """Have something done by the driver, or by a worker where there is none."""
        self.inbox.put(item)
        if not self.lock.locked():
            WORKERS.start(ignore, self.pump)

    def pump(self) -> None:
        """Do what is in the inbox, unless somebody does."""
        if self.enter():
            try:
                self.run()
            finally:
                self.leave()

    def call(self, fn: Callable[[], Any]) -> Any:
        """Have the driver, another thread, call ``fn``; wait for it and return its result."""
        answers: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

        def item() -> None:
            try:
                answers.put((fn(), None))
            except BaseException as error:
                answers.put((None, error))
                if not isinstance(error, Exception):
                    raise

        self.inbox.put(item)
        self.pump()
        answer, error = answers.get()
        if error is not None:
            raise error
        return answer

    def run(self) -> None:
        """Go on until nothing is queued or in flight; the caller is the driver."""
        root, inbox, jobs = self.root, self.inbox, self.jobs
        while True:
            if not inbox.empty():
                self.receive(0.0)
            elif jobs:
                interpreter, invocation = jobs.popleft()
                interpreter._run_job(invocation)
            elif self.tick:
                self.tick = root._fire_next()
            elif root._flying or (root.actors and root._in_flight()):
                self.wait()
            else:
                return

    def wait(self) -> None:
        """Wait for a result, an event or a deadline, whichever comes first."""
        due = self.root.next_due()
        if due is None or self.root.clock.simulated:
            self.receive(None)
            return
        wait_s = (due[0] - self.root.clock.now_ms()) / 1000.0
        if wait_s <= 0 or not self.receive(wait_s):
            self.tick = True

    def receive(self, wait_s: float | None) -> bool:
        """Do one thing from the inbox; False where none came in time."""
        try:
            item = self.inbox.get(
                wait_s != 0.0, None if wait_s is None else min(wait_s, _LONGEST_WAIT_S)
            )
        except queue.Empty:
            return False
        if item is not None:
            item()
        return True
