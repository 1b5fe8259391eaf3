"""Running a tool's body: on a daemon thread or as a task, never longer than its timeout.

A body that bounds itself is called where its caller is: a thread beside costs more than a step.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

from guardchart.runtime._workers import WORKERS

__all__ = ["BodyQuit", "BodyTimeout", "run_async", "run_here", "run_sync"]

_GRACE_S = 0.25
_MARGIN_S = 1.0
_PLAIN = frozenset({str, int, bool, type(None)})

Abandoned = Callable[[Future[Any]], None]
Then = Callable[[Any], Any]


class BodyTimeout(Exception):
    """The body did not end in time."""


class BodyQuit(Exception):
    """The body raised what would end its host: ``sys.exit()``, or a stray ``StopIteration``.

    A loop that meets ``SystemExit`` in a task ends, and every other conversation with it.
    """

    def __init__(self, cause: BaseException) -> None:
        super().__init__(type(cause).__name__)
        self.cause = cause


def _ignore(task: asyncio.Future[Any]) -> None:
    task.add_done_callback(lambda t: None if t.cancelled() else t.exception() and None)


async def _await_bounded(awaitable: Any, timeout_s: float) -> Any:
    loop = asyncio.get_running_loop()
    over = loop.create_future()  # at the body's end, or when its time is up

    def end() -> None:
        if not over.done():
            over.set_result(None)

    async def inner() -> Any:
        try:
            return await awaitable
        except SystemExit as exc:
            raise BodyQuit(exc) from exc
        finally:
            end()  # the task itself would tell one turn of the loop later

    # A task that is waited for, not awaited: a body that ignores its cancellation is left
    # behind instead of holding up the result.
    task = loop.create_task(inner())
    timer = loop.call_later(timeout_s, end)
    try:
        await over
    except asyncio.CancelledError:
        if not task.done():
            await _drop(task)
        raise
    finally:
        timer.cancel()
    if task.done():
        return task.result()
    await _drop(task)
    raise BodyTimeout


async def _drop(task: asyncio.Future[Any]) -> None:
    task.cancel()
    _ignore(task)
    await asyncio.wait({task}, timeout=_GRACE_S)


def _call(body: Callable[[], Any]) -> Any:
    try:
        return body()
    except (SystemExit, GeneratorExit, StopIteration, StopAsyncIteration) as exc:
        raise BodyQuit(exc) from exc
    except KeyboardInterrupt as exc:
        if threading.current_thread() is threading.main_thread():
            raise  # somebody pressed it
        raise BodyQuit(exc) from exc


async def _elsewhere(then: Then, value: Any, timeout_s: float, abandoned: Abandoned) -> Any:
    """Apply ``then`` off the loop: it may run somebody's code, which may block."""
    future = WORKERS.submit(then, value)
    wrapped = asyncio.wrap_future(future)
    try:
        await asyncio.wait({wrapped}, timeout=timeout_s)
    except asyncio.CancelledError:
        wrapped.cancel()
        abandoned(future)
        raise
    if not wrapped.done():
        wrapped.cancel()
        abandoned(future)
        raise BodyTimeout
    return wrapped.result()


async def _finished(then: Then, value: Any, timeout_s: float, abandoned: Abandoned) -> Any:
    if type(value) in _PLAIN:
        return then(value)
    return await _elsewhere(then, value, timeout_s, abandoned)


def run_sync(body: Callable[[], Any], timeout_s: float, abandoned: Abandoned, then: Then) -> Any:
    """Run a body from synchronous code; an awaitable result is awaited on the worker's own loop.

    Args:
        body: runs on a daemon thread that sees the caller's context variables.
        timeout_s: seconds it may take.
        abandoned: gets the body's future where nobody waits for it any more.
        then: makes of the body's result what is returned, within the same time.

    Raises:
        BodyTimeout: it took longer. Anything else comes from the body.
    """
    awaiting = False

    def work() -> Any:
        nonlocal awaiting
        result = _call(body)
        if not inspect.isawaitable(result):
            return then(result)
        awaiting = True
        return then(asyncio.run(_await_bounded(result, timeout_s)))

    future = WORKERS.submit(work)
    try:
        try:
            return future.result(timeout_s)
        except FutureTimeout:
            if awaiting and not future.done():  # it bounds itself, and cleans up first
                return future.result(_MARGIN_S)
            raise
    except FutureTimeout:
        if future.done():
            return future.result()  # the body's own TimeoutError, or a result at the last moment
        abandoned(future)
        raise BodyTimeout from None
    except BaseException:
        if not future.done():  # this thread was interrupted, the body was not
            abandoned(future)
        raise


def run_here(body: Callable[[], Any], timeout_s: float, abandoned: Abandoned, then: Then) -> Any:
    """As `run_sync` for a body that ends in time by itself: in the caller's thread.

    Only what it may return to be awaited is awaited on a worker, for as long as it may take.
    """
    context = contextvars.copy_context()
    result = context.run(_call, body)
    if inspect.isawaitable(result):
        return context.run(run_sync, lambda: result, timeout_s, abandoned, then)
    return context.run(then, result)


async def run_async(
    body: Callable[[], Any],
    timeout_s: float,
    abandoned: Abandoned,
    then: Then,
    *,
    threaded: bool,
) -> Any:
    """Run a body from a running loop: awaited there, or on a thread where it is synchronous.

    Args:
        body: what runs.
        timeout_s: seconds it may take.
        abandoned: gets the body's future where nobody waits for it any more.
        then: makes of the body's result what is returned.
        threaded: whether ``body()`` itself may block.

    Raises:
        BodyTimeout: it took longer. Anything else comes from the body.
    """
    if not threaded:
        result = _call(body)
        if inspect.isawaitable(result):
            result = await _await_bounded(result, timeout_s)
        return await _finished(then, result, timeout_s, abandoned)

    def work(_: Any) -> Any:
        result = _call(body)
        return result if inspect.isawaitable(result) else then(result)

    # Cancelling the wrapper cannot cancel a body that runs; it only cuts the tie to this loop.
    result = await _elsewhere(work, None, timeout_s, abandoned)
    if inspect.isawaitable(result):
        result = await _await_bounded(result, timeout_s)
        result = await _finished(then, result, timeout_s, abandoned)
    return result
