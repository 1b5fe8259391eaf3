"""One event loop on a daemon thread, for async services under the synchronous engine."""

from __future__ import annotations

import asyncio
import contextvars
import os
import threading
from collections.abc import Awaitable, Callable
from typing import Any, Final

from guardchart.runtime._workers import Ended

__all__ = ["LOOPS", "LoopThread"]


class LoopThread:
    """Runs coroutines for synchronous callers; the loop starts with the first one."""

    def __init__(self) -> None:
        self._reset()
        if hasattr(os, "register_at_fork"):  # a forked child has no such thread
            os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(
        self, ended: Ended, fn: Callable[..., Awaitable[Any]], /, *args: Any
    ) -> Callable[[], None]:
        """Await ``fn(*args)`` on the loop thread, in a copy of the caller's context variables.

        Args:
            ended: Called on the loop thread with the outcome; must return at once.
            fn: Called on the loop thread; what it returns is awaited.
            *args: Its arguments.

        Returns:
            What cancels the task; safe from any thread.
        """
        context = contextvars.copy_context()
        loop = self._running_loop()
        task: asyncio.Task[Any] | None = None

        async def main() -> Any:
            return await fn(*args)

        def begin() -> None:
            nonlocal task
            task = loop.create_task(main(), context=context)
            task.add_done_callback(lambda done: _tell(done, ended))

        def cancel() -> None:
            if task is not None:
                task.cancel()

        loop.call_soon_threadsafe(begin)
        # What is scheduled later runs later: the task exists when it is cancelled.
        return lambda: _discard(loop.call_soon_threadsafe(cancel))

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None or self._loop.is_closed():
                loop = self._loop = asyncio.new_event_loop()
                threading.Thread(
                    target=loop.run_forever, name="guardchart-loop", daemon=True
                ).start()
            return self._loop


def _discard(handle: asyncio.Handle) -> None:
    """Nobody needs the handle."""


def _tell(task: asyncio.Task[Any], ended: Ended) -> None:
    error: BaseException | None
    try:
        error = task.exception()
    except asyncio.CancelledError as cancelled:
        error = cancelled
    if error is not None:
        ended(None, error)
    else:
        ended(task.result(), None)


LOOPS: Final = LoopThread()
