"""Daemon worker threads for synchronous services and tools.

``concurrent.futures`` joins its threads at interpreter exit, so one hung tool would keep
the process alive. These threads are daemons: a body that never returns is abandoned, and
an idle thread ends after a second.
"""

from __future__ import annotations

import contextvars
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final

__all__ = ["WORKERS", "WorkerPool"]

_IDLE_S: Final = 1.0

_Job = tuple[Future[Any], contextvars.Context, Callable[..., Any], tuple[Any, ...]]


class WorkerPool:
    """Runs callables on reusable daemon threads, context variables carried along."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[queue.SimpleQueue[_Job]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any) -> Future[Any]:
        """Start ``fn(*args)`` on a worker at once (a new one where none is idle).

        Returns:
            The future of its result. Cancelling it does not stop a body that has begun.
        """
        future: Future[Any] = Future()
        job: _Job = (future, contextvars.copy_context(), fn, args)
        with self._lock:
            inbox = self._idle.pop() if self._idle else None
            if inbox is not None:
                inbox.put(job)
                return future
        inbox = queue.SimpleQueue()
        inbox.put(job)
        threading.Thread(
            target=self._work, args=(inbox,), name="guardchart-worker", daemon=True
        ).start()
        return future

    def _work(self, inbox: queue.SimpleQueue[_Job]) -> None:
        while True:
            try:
                future, context, fn, args = inbox.get(timeout=_IDLE_S)
            except queue.Empty:
                with self._lock:
                    if inbox in self._idle:
                        self._idle.remove(inbox)
                        return
                continue
            if future.set_running_or_notify_cancel():
                try:
                    result = context.run(fn, *args)
                except BaseException as error:
                    self._rest(inbox)
                    future.set_exception(error)
                else:
                    self._rest(inbox)
                    future.set_result(result)
            else:
                self._rest(inbox)
            # A job kept in this frame would keep its arguments alive while idle.
            del future, context, fn, args

    def _rest(self, inbox: queue.SimpleQueue[_Job]) -> None:
        with self._lock:
            self._idle.append(inbox)


WORKERS: Final = WorkerPool()
