"""Interpreters whose steps are in a store before what they ask for begins."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Final

from guardchart.kernel import InitEvent, Machine, Snapshot, StartService, load
from guardchart.kernel._effects import Spawn
from guardchart.persistence._journal import Journal, open_journal, open_journal_async
from guardchart.persistence._store import Store
from guardchart.runtime import Interpreter, Invocation, SyncInterpreter
from guardchart.runtime._base import InterpreterBase
from guardchart.runtime._core import AnyEvent

__all__ = [
    "DurableInterpreter",
    "DurableSyncInterpreter",
    "apersisted",
    "durable",
    "persisted",
    "restored",
]

_STARTS: Final = (StartService, Spawn)


class _Journaled(InterpreterBase):
    """What both engines write, and when. Child machines write into their root's journal."""

    journal: Journal

    def _join(self, parent: Any) -> None:
        super()._join(parent)
        self.journal = parent.journal
        self._observed = True

    def _commit(
        self, snapshot: Snapshot, effects: Iterable[Any], receipt: Any, event: AnyEvent, before: Any
    ) -> None:
        self.journal.note(self, event)
        super()._commit(snapshot, effects, receipt, event, before)
        # A machine that has only been entered is not a run yet: what opens it may be refused.
        if not (isinstance(event, InitEvent) and self.parent is None):
            self._save()

    def _perform(self, effects: Iterable[Any], event: AnyEvent) -> None:
        if any(isinstance(each, _STARTS) for each in effects):
            self._save()
        super()._perform(effects, event)

    def _save(self) -> None:
        self.journal.write()


class DurableSyncInterpreter(_Journaled, SyncInterpreter):
    """A `SyncInterpreter` that writes each step where it is taken."""


class DurableInterpreter(_Journaled, Interpreter):
    """An `Interpreter` that writes on a worker thread; services wait until it is done."""

    def _save(self) -> None:
        if self.journal.store.blocking:
            self.journal.schedule()
        else:
            self.journal.write()

    def _start_service(self, invocation: Invocation) -> None:
        if not self.journal.behind:
            super()._start_service(invocation)
            return
        task = self._started().create_task(self._start_saved(invocation))
        self._flying[invocation.key] = task.cancel

    async def _start_saved(self, invocation: Invocation) -> None:
        saved = await self.journal.saved()
        if saved and self.is_current(invocation):
            self._flying.pop(invocation.key, None)
            super()._start_service(invocation)


def restored(machine: Machine, journal: Journal) -> Snapshot | None:
    """Return the stored snapshot, the store's word being the host's; None for a new run."""
    found = journal.found
    if found is None:
        return None
    cap = 4 * max(journal.store.max_snapshot_bytes, 1 << 20)
    return load(machine, found.snapshot, trusted=True, max_bytes=cap)


def durable(
    journal: Journal, machine: Machine, snapshot: Snapshot | None, *, is_async: bool, **options: Any
) -> Any:
    """Return an interpreter that writes into a journal; not started.

    Services that were running when the snapshot was taken start again, which is a step that is
    written first: of two workers that restore one run, one goes on.
    """
    engine: Any = DurableInterpreter if is_async else DurableSyncInterpreter
    options["ledger"] = journal.ledger
    if snapshot is None:
        interpreter = engine(machine, **options)
    else:
        interpreter = engine.from_snapshot(snapshot, machine, restart_services=True, **options)
    interpreter._observed = True
    interpreter.journal = journal
    journal.attach(interpreter)
    return interpreter


@contextmanager
def persisted(
    store: Store, key: str, machine: Machine, *, ledger: Any = None, **options: Any
) -> Iterator[SyncInterpreter]:
    """A running machine whose every step is stored before what it asks for begins.

    A new run starts; a stored one goes on where it was: deadlines that have passed fire, and
    services that were running start again.

    Args:
        store: Where the run is kept.
        key: What it is kept under; tool calls are filed under it, too.
        machine: The machine.
        ledger: Where approvals and claims are kept; by default the logic's own, else the
            store's.
        **options: Arguments of ``SyncInterpreter``.

    Yields:
        A started ``SyncInterpreter``. It is stopped on leaving, its snapshot stays stored.

    Raises:
        StoreConflictError: On leaving, where somebody else has written the run meanwhile. The
            machine was stopped at that step; nothing it asked for began.
        SnapshotTooLargeError: On leaving, where a step could not be written for its size.
        SnapshotError: What is stored is not a snapshot of this machine.

    Source: xstate-statemachine, persistence: persisted.

    >>> from guardchart import create_machine
    >>> from guardchart.persistence import MemoryStore, persisted
    >>> light = create_machine({"id": "light", "initial": "off", "states": {
    ...     "off": {"on": {"FLIP": "on"}}, "on": {"on": {"FLIP": "off"}}}})
    >>> store = MemoryStore()
    >>> for _ in range(3):
    ...     with persisted(store, "hall", light) as interpreter:
    ...         sorted(interpreter.current_state_ids), interpreter.send("FLIP").status
    (['light.off'], 'taken')
    (['light.on'], 'taken')
    (['light.off'], 'taken')
    """
    journal = open_journal(store, key, machine, ledger)
    options = {"scope": key, **options}
    snapshot = restored(machine, journal)
    interpreter = durable(journal, machine, snapshot, is_async=False, **options)
    try:
        interpreter.start()
        if snapshot is not None:
            interpreter.fire_overdue()
        yield interpreter
    finally:
        journal.write()
        interpreter.stop()
    journal.check()


@asynccontextmanager
async def apersisted(
    store: Store, key: str, machine: Machine, *, ledger: Any = None, **options: Any
) -> AsyncIterator[Interpreter]:
    """`persisted` with an ``Interpreter``, on the running event loop.

    A store that blocks is written to on a worker thread; services wait for that.

    >>> import asyncio
    >>> from guardchart import create_machine
    >>> from guardchart.persistence import MemoryStore, apersisted
    >>> light = create_machine({"id": "light", "initial": "off", "states": {
    ...     "off": {"on": {"FLIP": "on"}}, "on": {"on": {"FLIP": "off"}}}})
    >>> store = MemoryStore()
    >>> async def flip():
    ...     async with apersisted(store, "hall", light) as interpreter:
    ...         await interpreter.send("FLIP", wait=True)
    >>> asyncio.run(flip())
    >>> store.load("hall").snapshot["value"]
    'on'
    """
    journal = await open_journal_async(store, key, machine, ledger)
    options = {"scope": key, **options}
    snapshot = restored(machine, journal)
    interpreter = durable(journal, machine, snapshot, is_async=True, **options)
    try:
        interpreter.start()
        if snapshot is not None:
            interpreter.fire_overdue()
        yield interpreter
    finally:
        journal.freeze()
        interpreter.stop()
        await journal.close()
    journal.check()
