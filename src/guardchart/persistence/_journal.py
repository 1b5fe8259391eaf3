"""The journal: what a running machine writes into its store, and when.

A step is written before what it asks for begins: a service starts only once the snapshot that
says so is stored. Whoever restores that snapshot therefore knows of everything that may have
happened, and the ledger knows how far it came.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, Final, NamedTuple

from guardchart.errors import GuardchartError
from guardchart.kernel import EngineEvent, Event, InitEvent, Machine
from guardchart.persistence._store import Store, Stored
from guardchart.runtime._workers import WORKERS

__all__ = ["Journal", "open_journal", "open_journal_async"]

_UNBOUNDED: Final = 1 << 40
_MAX_DEPTH: Final = 64


class _Write(NamedTuple):
    """A write as it will be made, and how many notes it holds."""

    snapshot: dict[str, Any]
    events: list[dict[str, Any]]
    now: int
    notes: int


class Journal:
    """The writes of one run, one after another, each following the one before it.

    Args:
        store: Where to.
        key: The run.
        found: What was there when it was opened.
        ledger: What the run's calls are filed in.

    Attributes:
        failure: Why nothing is written any more; the machine was stopped then.
        names: Ids under which deadlines are noted when they fire, by their timer's id.
    """

    def __init__(self, store: Store, key: str, found: Stored | None, ledger: Any = None) -> None:
        self.store = store
        self.key = key
        self.found = found
        self.ledger = ledger
        self.rev = 0 if found is None else found.rev
        self.failure: Exception | None = None
        self.names: dict[str, str] = {}
        self._root: Any = None
        self._last: Any = None
        self._notes: list[dict[str, Any]] = []
        # Counts of notes: taken down, held by a write, written.
        self._noted = self._taken = self._saved = 0
        self._frozen: _Write | None = None
        self._writer: asyncio.Task[None] | None = None
        self._flight: tuple[_Write, Future[int]] | None = None
        self._waiters: list[asyncio.Future[None]] = []

    def attach(self, root: Any) -> None:
        """Write for this interpreter from now on."""
        self._root = root
        self._last = root._snapshot

    def check(self) -> None:
        """Raise what kept a step from being written.

        Raises:
            StoreConflictError: Somebody else has written this run meanwhile.
            SnapshotTooLargeError: The snapshot is larger than the store takes.
            StoreError: The store failed.
            SnapshotError: The context holds something that is not JSON.
        """
        if self.failure is not None:
            raise self.failure

    def note(self, interpreter: Any, event: Event | EngineEvent) -> None:
        """Remember what a step was about, for the next write."""
        self._noted += 1
        if isinstance(event, EngineEvent) and event.kind == "observed":
            return
        entry = _entry(event)
        if interpreter is not self._root:
            entry["agent"] = interpreter.id
        timer_id = entry.get("timer")
        if timer_id is not None:
            below = interpreter.id.removeprefix(self._root.id).removeprefix(":")
            path = f"{below.replace(':', '/')}/{timer_id}" if below else timer_id
            name = self.names.pop(path, None)
            if name is not None:
                entry["id"] = name
        entry["at_ms"] = interpreter.clock.now_ms()
        self._notes.append(entry)

    @property
    def behind(self) -> bool:
        """Whether there is anything that has not been written."""
        return self.failure is None and (
            self._new or self._frozen is not None or self._flight is not None
        )

    @property
    def _new(self) -> bool:
        """Whether there is anything that no write holds."""
        return self._taken < self._noted or self._root._snapshot is not self._last

    # At once

    def write(self) -> None:
        """Write what has not been written; where that fails, stop the machine."""
        if not self.behind:
            return
        self._note_update()
        try:
            work = self._work()
            self.rev = self._put(work)
        except Exception as error:
            self._fail(error)
        else:
            self._saved = max(self._saved, work.notes)

    def freeze(self) -> None:
        """Take down how the machine stands, before it is stopped and its children with it."""
        if self.failure is None and self._frozen is None and self._new:
            try:
                self._frozen = self._work()
            except Exception as error:
                self._fail(error)

    # From an event loop

    def schedule(self) -> None:
        """Begin to write what has not been written."""
        if not self.behind:
            return
        self._note_update()
        if self._writer is None:
            self._writer = asyncio.get_running_loop().create_task(self._run())

    async def saved(self) -> bool:
        """Wait until all that has happened up to now is written; False where it will not be."""
        target = self._noted
        while self._saved < target and self.failure is None and self._writer is not None:
            future = asyncio.get_running_loop().create_future()
            self._waiters.append(future)
            await future
        return self._saved >= target

    async def close(self) -> None:
        """Write the rest, whoever cancels meanwhile."""
        self.schedule()
        if self._writer is not None:
            await asyncio.shield(self._writer)

    async def _run(self) -> None:
        try:
            while self.behind:
                if self._flight is None:
                    work = self._work()
                    self._flight = work, WORKERS.submit(self._put, work)
                # Kept where this task is cancelled: the thread writes on, and the next one waits.
                work, future = self._flight
                try:
                    self.rev = await asyncio.wrap_future(future)
                except Exception:
                    self._flight = None
                    raise
                self._flight = None
                self._saved = max(self._saved, work.notes)
                self._wake()
        except Exception as error:
            self._fail(error)
        finally:
            self._writer = None
            self._wake()

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for future in waiters:
            if not future.done():
                future.set_result(None)

    # One write

    def _note_update(self) -> None:
        """Count a change that no event brought: services started again, context written."""
        if self._taken == self._noted and self._root._snapshot is not self._last:
            self._noted += 1
            self._notes.append({"kind": "update", "at_ms": self._root.clock.now_ms()})

    def _work(self) -> _Write:
        if self._frozen is not None:
            work, self._frozen = self._frozen, None
            return work
        self._last, self._taken = self._root._snapshot, self._noted
        notes, self._notes = self._notes, []
        # Upwards: no deadline that this snapshot sets lies further ahead of it than it should.
        now = math.ceil(self._root.clock.now_ms())
        # Its size is for the store to judge.
        return _Write(self._root.dump(max_bytes=_UNBOUNDED), notes, now, self._noted)

    def _put(self, work: _Write) -> int:
        if self.rev == 0:
            return self.store.create(self.key, work.snapshot, events=work.events, now=work.now)
        return self.store.commit(
            self.key, self.rev, work.snapshot, events=work.events, now=work.now
        )

    def _fail(self, error: Exception) -> None:
        self.failure = error
        self._root.stop()


def open_journal(store: Store, key: str, machine: Machine, ledger: Any) -> Journal:
    """Return the journal of a run, with what its store has of it.

    Args:
        store: The store.
        key: The run.
        machine: What runs.
        ledger: The ledger a host gave. Without one it is the logic's own, else the store's.
    """
    found = store.load(key)
    if ledger is None and getattr(machine.logic, "attachments", {}).get("ledger") is None:
        ledger = getattr(store, "ledger", None)
    return Journal(store, key, found, ledger)


async def open_journal_async(store: Store, key: str, machine: Machine, ledger: Any) -> Journal:
    """Do what `open_journal` does, a store that blocks being asked in a thread."""
    if not store.blocking:
        return open_journal(store, key, machine, ledger)
    return await asyncio.wrap_future(WORKERS.submit(open_journal, store, key, machine, ledger))


# Entries of the log


def _entry(event: Event | EngineEvent) -> dict[str, Any]:
    """What happened, as JSON types: the event the chart saw, and what brought it."""
    if not isinstance(event, EngineEvent):
        kind = "init" if isinstance(event, InitEvent) else "event"
        return {"kind": kind, "event": {"type": event.type, "payload": _plain(event.payload)}}
    seen = event.event
    entry: dict[str, Any] = {"event": {"type": None if seen is None else seen.type}}
    if event.kind == "fired":
        return {"kind": "timer", **entry, "timer": event.key}
    kind = "failure" if event.kind == "failed" else "result"
    return {"kind": kind, **entry, "service": event.key, "raw": _plain(event.value)}


def _plain(value: Any, depth: int = 0) -> Any:
    """A copy made of JSON types. What is none is named by its class; nothing is called on it."""
    if value is None or isinstance(value, bool | int | str):
        return value if type(value) in (bool, int, str, type(None)) else str(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, BaseException):
        told = {"message": str(value)} if isinstance(value, GuardchartError) else {}
        return {"type": type(value).__name__, **told}
    if depth < _MAX_DEPTH:
        if isinstance(value, Mapping):
            return {str(name): _plain(each, depth + 1) for name, each in value.items()}
        names = getattr(type(value), "_fields", None)
        if names is not None and isinstance(value, tuple):
            return _plain(dict(zip(names, value, strict=True)), depth)
        if isinstance(value, list | tuple):
            return [_plain(each, depth + 1) for each in value]
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            parts = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
            return _plain(parts, depth)
    return {"type": type(value).__name__}
