"""One event loop on a daemon thread, for async services under the synchronous engine."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import Any, Final

__all__ = ["LOOPS", "LoopThread"]


class LoopThread:
    """Runs coroutines for synchronous callers; the loop starts with the first one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def submit(self, fn: Callable[..., Any], /, *args: Any) -> Future[Any]:
        """Await ``fn(*args)`` on the loop thread, in a copy of the caller's context.

        Returns:
            Its future. Cancelling it cancels the task.
        """
        context = contextvars.copy_context()
        outcome: Future[Any] = Future()
        loop = self._running_loop()

        async def main() -> Any:
            return await fn(*args)

        def begin() -> None:
            task = loop.create_task(main(), context=context)

            def cancel(future: Future[Any]) -> None:
                if future.cancelled():
                    loop.call_soon_threadsafe(task.cancel)

            outcome.add_done_callback(cancel)
            task.add_done_callback(lambda done: _copy(done, outcome))

        loop.call_soon_threadsafe(begin)
        return outcome

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None or self._loop.is_closed():
                loop = self._loop = asyncio.new_event_loop()
                threading.Thread(
                    target=loop.run_forever, name="guardchart-loop", daemon=True
                ).start()
            return self._loop


def _copy(task: asyncio.Task[Any], outcome: Future[Any]) -> None:
    if task.cancelled():
        outcome.cancel()
        return
    error = task.exception()
    # The waiting thread may cancel between any two lines here; it wants no outcome then.
    with contextlib.suppress(InvalidStateError):
        if error is not None:
            outcome.set_exception(error)
        else:
            outcome.set_result(task.result())


LOOPS: Final = LoopThread()
