"""Ledgers with something done to them: some forget, some wait, some kill their process."""

from __future__ import annotations

import contextlib
import inspect
import os
import signal
import threading
from typing import Any

from guardchart.persistence import Claim

MEETING_S = 5.0


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Around:
    """A ledger whose verbs are another's."""

    def __init__(self, ledger: Any) -> None:
        self._ledger = ledger

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ledger, name)


class Forgets(Around):
    """The negative control: proposals and decisions are kept, that a call was entered is not.

    So it is the ledger less the one thing that only a ledger can do. What remembers an entry then
    is what the checkpointer has saved.
    """

    _lock = threading.Lock()

    def claim(self, scope: str, row_id: str, digest: str, *, owner: str, now: int) -> Claim:
        with self._lock:
            row, token = self._ledger.claim(scope, row_id, digest, owner=owner, now=now)
            assert token is not None
            given = self._ledger.release(scope, row.id, token, reason="state-changed", now=now)
        return Claim(given, token)

    def record(self, scope: str, row_id: str, *args: Any, **more: Any) -> Any:
        return self._ledger.row(scope, row_id)

    def release(self, scope: str, row_id: str, *args: Any, **more: Any) -> Any:
        return self._ledger.row(scope, row_id)


class Meets(Around):
    """A ledger at which two callers meet once before either decides or closes anything."""

    def __init__(self, ledger: Any) -> None:
        super().__init__(ledger)
        self._meeting: _Meeting | None = None

    def expect_two(self, first: str = "", until: str = "") -> None:
        """Have the next two callers wait for each other.

        Args:
            first: The one that goes on at once: who wants to ``approve``, ``reject`` or
                ``close``. Either, by default.
            until: The verb of the ledger that the other one waits for.
        """
        self._meeting = _Meeting(first, until)

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        meeting = self._meeting
        if meeting is None or not callable(value):
            return value

        def verb(*args: Any, **more: Any) -> Any:
            if name in ("decide", "close"):
                meeting.attend("close" if name == "close" else _decided(args[1]))
            result = value(*args, **more)
            meeting.happened(name)
            return result

        return verb


class _Meeting:
    def __init__(self, first: str, until: str) -> None:
        self._first, self._until = first, until
        self._kinds: list[str] = []
        self._barrier = threading.Barrier(2, action=self._met)
        self._over = threading.Event()

    def attend(self, kind: str) -> None:
        """Wait for the other caller, then for what it does first."""
        if self._barrier.broken or len(self._kinds) == 2:
            return
        self._kinds.append(kind)
        with contextlib.suppress(threading.BrokenBarrierError):
            self._barrier.wait(MEETING_S)
            if kind != self._first:
                self._over.wait(MEETING_S)

    def happened(self, verb: str) -> None:
        if verb == self._until:
            self._over.set()

    def _met(self) -> None:
        # LangGraph hands an answer that is stored already to both callers.
        if self._first not in self._kinds or not self._until:
            self._over.set()


def _decided(decisions: Any) -> str:
    (decision,) = {each.decision for each in decisions.values()}
    return str(decision)


class Kills(Around):
    """A ledger that kills its process right after one verb."""

    def __init__(self, ledger: Any, point: str) -> None:
        super().__init__(ledger)
        self._point = point

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._ledger, name)
        if not name.startswith(self._point) or not callable(value):
            return value

        def verb(*args: Any, **more: Any) -> Any:
            result = value(*args, **more)
            die()
            return result

        return verb


class Countdown:
    """Counts calls, and kills its process before or after one of them."""

    WRITES = ("propose_batch", "adopt", "decide", "close", "claim", "record", "release")
    SAVES = ("put", "put_writes", "aput", "aput_writes")

    def __init__(self, left: int) -> None:
        self._left = left
        self._lock = threading.Lock()

    def point(self) -> None:
        with self._lock:
            self._left -= 1
            if self._left == 0:
                die()

    def around(self, target: Any, names: tuple[str, ...]) -> Any:
        """Count each call of these methods twice: before it and after it."""
        for name in names:
            setattr(target, name, self._counted(getattr(target, name)))
        return target

    def _counted(self, call: Any) -> Any:
        async def acounted(*args: Any, **more: Any) -> Any:
            self.point()
            result = await call(*args, **more)
            self.point()
            return result

        def counted(*args: Any, **more: Any) -> Any:
            self.point()
            result = call(*args, **more)
            self.point()
            return result

        return acounted if inspect.iscoroutinefunction(call) else counted
