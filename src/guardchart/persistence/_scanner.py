"""``DueTimerScanner``: what keeps the deadlines of runs that nobody is running."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Final, NamedTuple

from guardchart.errors import StoreConflictError
from guardchart.kernel import Machine
from guardchart.persistence._durable import durable, restored
from guardchart.persistence._journal import open_journal
from guardchart.persistence._owner import owner_id
from guardchart.persistence._store import Due, Store
from guardchart.runtime import Clock, SystemClock

__all__ = ["DueTimerScanner", "Scan"]

_LOG = logging.getLogger("guardchart")

_IN_FLIGHT_GRACE_MS: Final = 10_000.0


class Scan(NamedTuple):
    """What one round of a scanner did.

    Attributes:
        delivered: The ids of the deadlines delivered, ``timer_id@rev``, with their run's key:
            ``(key, id)``.
        skipped: Runs that somebody else moved on meanwhile, that run right now, or that no
            machine was given for. They come again if they are still due.
        errors: By key, what a run raised; the others were not disturbed. It comes again when
            its lease has ended.
    """

    delivered: tuple[tuple[str, str], ...]
    skipped: tuple[str, ...]
    errors: dict[str, Exception]


class _Shifted(SystemClock):
    """The wall clock, moved so that the scan begins at a given time."""

    def __init__(self, now_ms: float) -> None:
        self._by = now_ms - super().now_ms()

    def now_ms(self) -> float:
        return super().now_ms() + self._by


class DueTimerScanner:
    """Delivers deadlines that have passed while nobody ran their machine.

    An approval that nobody gave escalates because a scanner runs; `run_agent` fires what is
    overdue only when it is called. Any number may run, in any process: each deadline is leased
    to one of them, and its delivery is a compare-and-swap with the id ``timer_id@rev``, so that
    a second delivery changes nothing.

    Args:
        store: The store.
        machine_for_key: Gives the machine of a key, or None for runs that are not this
            scanner's.
        clock: Where the time comes from.
        ledger: As for ``persisted``.
        plugins: Observers of the machines.
        lease_s: How long a deadline is kept from other scanners, in seconds.
        limit: How many deadlines one round delivers at most.
        serve_delay_s: The longest further delay of a machine that is waited for, in seconds.
        waiting: Keys of states that rest whatever their timers, beside those tagged
            ``waiting``.

    Source: xstate-statemachine, persistence: DueTimerScanner.

    >>> from guardchart import create_machine
    >>> from guardchart.persistence import DueTimerScanner, MemoryStore, persisted
    >>> desk = create_machine({"id": "desk", "initial": "asked", "states": {
    ...     "asked": {"after": {"60000": "escalated"}}, "escalated": {}}})
    >>> store = MemoryStore()
    >>> with persisted(store, "ticket:1", desk):
    ...     pass
    >>> scanner = DueTimerScanner(store, lambda key: desk)
    >>> in_an_hour = store.load("ticket:1").updated_at + 3_600_000
    >>> scanner.run_once(now=in_an_hour).delivered
    (('ticket:1', '60000.desk.asked@1'),)
    >>> store.load("ticket:1").snapshot["value"]
    'escalated'
    """

    def __init__(
        self,
        store: Store,
        machine_for_key: Callable[[str], Machine | None],
        *,
        clock: Clock | None = None,
        ledger: Any = None,
        plugins: Iterable[Any] = (),
        lease_s: float = 30.0,
        limit: int = 100,
        serve_delay_s: float = 5.0,
        waiting: Collection[str] = ("awaiting_human",),
    ) -> None:
        self.store = store
        self.machine_for_key = machine_for_key
        self._clock = clock
        self._ledger = ledger
        self._plugins = tuple(plugins)
        self._lease_s = lease_s
        self._limit = limit
        self._serve_delay_s = serve_delay_s
        self._waiting = tuple(waiting)

    def run_once(self, now: float | None = None) -> Scan:
        """Deliver what is due, and return; for cron, a worker's loop, or a test.

        Services that a deadline starts run to their end here; async ones on a loop of their
        own. An async app calls this by ``await asyncio.to_thread(scanner.run_once)``.

        Args:
            now: The time, epoch ms; the clock's by default.

        Returns:
            What was delivered, skipped and raised.

        Raises:
            StoreError: The store cannot be asked; nothing was delivered.
        """
        clock: Clock = self._clock if self._clock is not None else SystemClock()
        if now is not None:
            clock = _Shifted(now)
        else:
            now = clock.now_ms()
        due = self.store.claim_due(int(now), owner_id(), self._limit, self._lease_s)
        runs: dict[str, list[Due]] = {}
        for each in due:
            runs.setdefault(each.key, []).append(each)
        delivered: list[tuple[str, str]] = []
        skipped: list[str] = []
        errors: dict[str, Exception] = {}
        for key, timers in runs.items():
            try:
                names = self._deliver(key, timers, clock, now)
            except StoreConflictError:
                skipped.append(key)
            except Exception as error:
                _LOG.warning("a deadline of a stored run: %s", type(error).__name__)
                errors[key] = error
            else:
                delivered += [(key, name) for name in names]
                if not names:
                    skipped.append(key)
        return Scan(tuple(delivered), tuple(skipped), errors)

    def run_forever(self, interval_s: float = 30.0, *, stop: threading.Event | None = None) -> None:
        """Deliver what is due, again and again; a round that fails is logged and repeated.

        Args:
            interval_s: Seconds between two rounds. A round that found as much as it may
                deliver is followed by the next one at once.
            stop: Returns once this is set; otherwise never.
        """
        stop = stop if stop is not None else threading.Event()
        while not stop.is_set():
            full = False
            try:
                scan = self.run_once()
                full = len(scan.delivered) >= self._limit
            except Exception as error:
                _LOG.warning("DueTimerScanner: %s", type(error).__name__)
            if not full:
                stop.wait(interval_s)

    def _deliver(self, key: str, timers: list[Due], clock: Clock, now: float) -> list[str]:
        machine = self.machine_for_key(key)
        if machine is None:
            return []
        journal = open_journal(self.store, key, machine, self._ledger)
        snapshot = restored(machine, journal)
        found = journal.found
        if snapshot is None or found is None:
            return []
        # Somebody runs it right now, most likely, and keeps its deadlines; or did until lately.
        if _computes(found.snapshot) and now - timers[0].due_at < _IN_FLIGHT_GRACE_MS:
            return []
        wanted = {each.timer_id: f"{each.timer_id}@{each.rev}" for each in timers}
        journal.names.update(wanted)
        interpreter = durable(
            journal,
            machine,
            snapshot,
            is_async=False,
            clock=clock,
            plugins=self._plugins,
            scope=key,
            allow_async=True,
            manual_timers=True,
        )
        try:
            interpreter.start()
            interpreter.fire_overdue()
            interpreter.settle(self._serve_delay_s, waiting=self._waiting)
        finally:
            journal.write()
            interpreter.stop()
        journal.check()
        return [name for timer_id, name in wanted.items() if timer_id not in journal.names]


def _computes(snapshot: Mapping[str, Any]) -> bool:
    """Whether a service was running when a snapshot was taken, child machines included."""
    children = snapshot.get("children") or {}
    return any(
        child["status"] == "active"
        and (child.get("snapshot") is None or _computes(child["snapshot"]))
        for child in children.values()
    )
