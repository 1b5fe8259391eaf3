"""Daemon worker threads for synchronous services and tools.

``concurrent.futures`` joins its threads at interpreter exit, so one hung tool would keep
the process alive. These threads are daemons: a body that never returns is abandoned, and
an idle thread ends after ten seconds.
"""

from __future__ import annotations

import contextvars
import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final

__all__ = ["WORKERS", "Ended", "WorkerPool", "abandon", "ignore"]

_IDLE_S: Final = 10.0

Ended = Callable[[Any, BaseException | None], None]
"""Called once with the output and None, or with None and the exception."""

_Job = tuple[Ended, contextvars.Context, Callable[..., Any], tuple[Any, ...]]


class WorkerPool:
    """Runs callables on reusable daemon threads, context variables carried along."""

    def __init__(self) -> None:
        self._reset()
        if hasattr(os, "register_at_fork"):  # a forked child has none of the threads
            os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[queue.SimpleQueue[_Job]] = []

    def start(self, ended: Ended, fn: Callable[..., Any], /, *args: Any) -> None:
        """Start ``fn(*args)`` on a worker at once (a new one where none is idle).

        Args:
            ended: Called on the worker with the outcome; must return at once and never raise.
            fn: What to run, in a copy of the caller's context variables.
            *args: Its arguments.
        """
        job: _Job = (ended, contextvars.copy_context(), fn, args)
        with self._lock:
            if self._idle:
                self._idle.pop().put(job)
                return
        inbox: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        inbox.put(job)
        threading.Thread(
            target=self._work, args=(inbox,), name="guardchart-worker", daemon=True
        ).start()

    def submit(self, fn: Callable[..., Any], /, *args: Any) -> Future[Any]:
        """Start ``fn(*args)`` on a worker at once; see `start`.

        Returns:
            The future of its result; it is running and cannot be cancelled.
        """
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()

        def ended(output: Any, error: BaseException | None) -> None:
            if error is None:
                future.set_result(output)
            else:
                future.set_exception(error)

        self.start(ended, fn, *args)
        return future

    def _work(self, inbox: queue.SimpleQueue[_Job]) -> None:
        while True:
            try:
                ended, context, fn, args = inbox.get(timeout=_IDLE_S)
            except queue.Empty:
                with self._lock:
                    if inbox in self._idle:
                        self._idle.remove(inbox)
                        return
                continue
            output: Any = None
            failure: BaseException | None = None
            try:
                output = context.run(fn, *args)
            except BaseException as error:
                failure = error
            # Idle before anybody is told, so that what follows finds this thread.
            with self._lock:
                self._idle.append(inbox)
            ended(output, failure)
            # A job kept in this frame would keep its arguments alive while idle.
            del ended, context, fn, args, output, failure


def ignore(output: Any, error: BaseException | None) -> None:
    """For work that has nothing to tell."""


def abandon() -> None:
    """What cancels a body on a thread: nothing can, so it is left behind."""


WORKERS: Final = WorkerPool()
