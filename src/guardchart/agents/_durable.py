"""``run_agent(store=, key=)``: what it writes, and what it goes on from."""

from __future__ import annotations

from typing import Any, Final

from guardchart.errors import AgentConfigError
from guardchart.kernel import Machine, Snapshot
from guardchart.persistence._durable import durable, restored
from guardchart.persistence._journal import Journal, open_journal, open_journal_async

__all__ = ["Durable", "aopen_run", "open_run"]

_METHODS: Final = ("load", "create", "commit")


class Durable:
    """The stored side of one call of ``run_agent``; with no store, nothing happens in it."""

    def __init__(self, journal: Journal | None, given: Any, trusted: bool) -> None:
        self.journal = journal
        self._given = given
        self._trusted = trusted

    def snapshot(self, machine: Machine) -> Any:
        """What to go on from: the stored snapshot, else the one that was given."""
        return self._given if self.journal is None else restored(machine, self.journal)

    def interpreter(
        self, engine: Any, machine: Machine, snapshot: Snapshot | None, **options: Any
    ) -> Any:
        """An interpreter that is not started."""
        journal = self.journal
        if journal is not None:
            if snapshot is not None:
                options.pop("input", None)
            is_async = engine.engine == "async"
            return durable(journal, machine, snapshot, is_async=is_async, **options)
        if snapshot is None:
            return engine(machine, **options)
        options.pop("input", None)
        return engine.from_snapshot(
            snapshot,
            machine,
            restart_services=self._trusted,
            adopt_children=True,
            **options,
        )

    def write(self) -> None:
        """Write what has not been written, in the thread that drives the machine."""
        if self.journal is not None:
            self.journal.write()

    def check(self) -> None:
        """Raise what kept a step from being written."""
        if self.journal is not None:
            self.journal.check()

    async def leave(self, interpreter: Any) -> None:
        """Stop the machine and write how it stood."""
        if self.journal is None:
            interpreter.stop()
            return
        self.journal.freeze()
        interpreter.stop()
        await self.journal.close()


def open_run(
    store: Any, key: str | None, snapshot: Any, trusted: bool, machine: Machine, ledger: Any
) -> Durable:
    """Look up what a store has of a run.

    Raises:
        AgentConfigError: A store without a key, with a snapshot, or that is none.
    """
    if store is None:
        return Durable(None, snapshot, trusted)
    name = _key(store, key, snapshot)
    return Durable(open_journal(store, name, machine, ledger), None, True)


async def aopen_run(
    store: Any, key: str | None, snapshot: Any, trusted: bool, machine: Machine, ledger: Any
) -> Durable:
    """Do what `open_run` does, without blocking the loop."""
    if store is None:
        return Durable(None, snapshot, trusted)
    name = _key(store, key, snapshot)
    return Durable(await open_journal_async(store, name, machine, ledger), None, True)


def _key(store: Any, key: str | None, snapshot: Any) -> str:
    # Asked of the class: `isinstance` would look at `ledger`, which opens one.
    if not all(callable(getattr(type(store), name, None)) for name in _METHODS):
        raise AgentConfigError(
            "run_agent: store= takes a Store, e.g. SQLiteStore(path) or MemoryStore()"
        )
    if not isinstance(key, str) or not key:
        raise AgentConfigError("run_agent: store= needs key=, what the run is stored under")
    if snapshot is not None:
        raise AgentConfigError(
            "run_agent: pass snapshot= or store=, not both; the store has the snapshot"
        )
    return key
