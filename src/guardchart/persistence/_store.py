"""The store: the last snapshot of each run, its deadlines, and the log of what happened to it.

``Store`` is what hosts call. What is the same in every storage is written here once: what may
be a key, how a snapshot is written, which deadlines it holds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple, Protocol, runtime_checkable

from guardchart.errors import SnapshotTooLargeError, StoreConflictError, StoreError
from guardchart.persistence._ledger import Ledger
from guardchart.persistence._verbs import storable

__all__ = [
    "Due",
    "MAX_SNAPSHOT_BYTES",
    "Store",
    "Stored",
    "Summary",
    "Written",
    "conflict",
    "written",
]

MAX_SNAPSHOT_BYTES: Final = 1 << 20
"""The largest snapshot a store takes unless told otherwise: 1 MiB of JSON text."""

_MAX_DEPTH: Final = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A run as its store has it.

    Attributes:
        key: What it is stored under.
        rev: The number of the last write, 1 for the first; what `Store.commit` compares.
        snapshot: The snapshot as JSON types, yours to change.
        updated_at: Epoch ms of the last write.
    """

    key: str
    rev: int
    snapshot: dict[str, Any] = field(repr=False)
    updated_at: int


class Due(NamedTuple):
    """A deadline that has passed, leased to whoever claimed it.

    Attributes:
        key: The run.
        timer_id: The timer's id in its snapshot, below child machines with their path.
        due_at: When it was due, epoch ms.
        rev: The write that armed it; ``timer_id@rev`` names its delivery.
    """

    key: str
    timer_id: str
    due_at: float
    rev: int


class Summary(NamedTuple):
    """What `Store.find` tells of a run, without its snapshot.

    Attributes:
        key: What it is stored under.
        rev: The number of the last write.
        status: ``active``, ``done`` or ``error``.
        state_ids: The ids of the active leaf states, sorted.
        since: Epoch ms since which it has been in these states.
        updated_at: Epoch ms of the last write.
    """

    key: str
    rev: int
    status: Literal["active", "done", "error"]
    state_ids: tuple[str, ...]
    since: int
    updated_at: int


@runtime_checkable
class Store(Protocol):
    """Where runs are kept between processes.

    Every method is synchronous and one transaction, or nothing at all where it raises.
    ``now`` is the caller's clock in epoch ms. A storage that fails raises ``StoreError``.

    Attributes:
        durable: Whether what is written outlives the process.
        blocking: Whether methods do I/O, so that async hosts call them in a thread.
        max_snapshot_bytes: The largest snapshot taken, in bytes of JSON text.
        ledger: The ledger beside it, as durable as the store; a host that is given none
            files tool calls there.
    """

    durable: bool
    blocking: bool
    max_snapshot_bytes: int

    @property
    def ledger(self) -> Ledger:
        """The ledger beside the store; always the same object."""
        ...

    def load(self, key: str) -> Stored | None:
        """Return what is stored under a key, None where there is nothing."""
        ...

    def create(
        self,
        key: str,
        snapshot: Mapping[str, Any],
        *,
        events: Sequence[Mapping[str, Any]] = (),
        now: int,
    ) -> int:
        """Store a new run.

        Args:
            key: Text that is not empty.
            snapshot: Snapshot JSON, as ``dump`` gives it. Its deadlines are armed.
            events: What led to it, for the log, as JSON types. One with an ``id`` is taken
                once: a second one of that id is a conflict.
            now: Epoch ms.

        Returns:
            1, the number of this write.

        Raises:
            StoreConflictError: There is a run under this key.
            SnapshotTooLargeError: The snapshot is larger than ``max_snapshot_bytes``.
        """
        ...

    def commit(
        self,
        key: str,
        expect: int,
        snapshot: Mapping[str, Any],
        *,
        events: Sequence[Mapping[str, Any]] = (),
        now: int,
    ) -> int:
        """Replace a run's snapshot and deadlines and append to its log, if nobody else has.

        Args:
            key: The run.
            expect: The ``rev`` this follows.
            snapshot: As for `create`.
            events: As for `create`.
            now: Epoch ms.

        Returns:
            The number of this write, ``expect + 1``.

        Raises:
            StoreConflictError: The run's ``rev`` is another one, or there is no run, or an
                event of such an ``id`` was taken before. Nothing was written: load it again.
            SnapshotTooLargeError: As for `create`.
        """
        ...

    def claim_due(self, now: int, owner: str, limit: int = 100, lease_s: float = 30.0) -> list[Due]:
        """Lease deadlines that have passed, those due longest first.

        Of several callers each gets other ones. A lease keeps others away for ``lease_s``
        seconds; the next `commit` of that run ends it.

        Args:
            now: Epoch ms.
            owner: Who claims, for people who look.
            limit: How many at most.
            lease_s: How long nobody else gets them, in seconds.
        """
        ...

    def events(self, key: str, *, after: int = 0) -> list[dict[str, Any]]:
        """Return the log of a run, oldest first, each entry with the ``rev`` of its write.

        Args:
            key: The run; an unknown one has no events.
            after: Only entries of later writes than this one.
        """
        ...

    def compact(self, key: str, *, now: int) -> int:
        """Replace a run's log by its snapshot, ``{"kind": "snapshot", "snapshot", "rev"}``.

        Ids of events that were taken stay taken.

        Returns:
            How many entries were replaced.
        """
        ...

    def find(self, *, state: str | None = None, limit: int = 1_000) -> list[Summary]:
        """List runs, those longest in their states first; of one age, by key.

        Args:
            state: Only those in this leaf state, by its full id.
            limit: How many at most.
        """
        ...

    def delete(self, key: str) -> bool:
        """Erase a run, its deadlines and its log; tell whether there was one.

        The ledger keeps its rows, so that no call can be entered anew; see ``Ledger.forget``.
        """
        ...


# What every storage does alike


class Written(NamedTuple):
    """A write, worked out: what a storage puts into its columns."""

    text: str
    status: str
    state_ids: str
    timers: dict[str, float]
    events: list[tuple[str | None, str]]


def written(
    key: str, snapshot: Mapping[str, Any], events: Sequence[Mapping[str, Any]], max_bytes: int
) -> Written:
    """Return a write as text and columns.

    Raises:
        StoreError: The key is none, or snapshot or events are not JSON.
        SnapshotTooLargeError: The snapshot's text is longer than ``max_bytes``.
    """
    check_key(key)
    text = _text(snapshot, "snapshot")
    size = len(text) if text.isascii() else len(text.encode())
    if size > max_bytes:
        raise SnapshotTooLargeError(size, max_bytes)
    ids = snapshot.get("state_ids")
    return Written(
        text,
        str(snapshot.get("status")),
        json.dumps(ids if isinstance(ids, list) else []),
        dict(_timers(snapshot)),
        [(_event_id(each), _text(each, "event")) for each in events],
    )


def check_key(key: str) -> None:
    """Refuse what cannot be a key.

    Raises:
        StoreError: It is no text, empty, or text that no storage can keep.
    """
    if not isinstance(key, str) or not key or not storable(key):
        raise StoreError("a store's key is text that is not empty, without NUL or surrogates")


def conflict(key: str) -> StoreConflictError:
    """Return the error of a write that came second. Keys may be personal: it names none."""
    return StoreConflictError(
        "this run was written by somebody else meanwhile; nothing was written. Load it again "
        "and look at where it stands"
    )


def _text(value: Mapping[str, Any], what: str) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise StoreError(f"the {what} is not JSON ({type(error).__name__})") from None
    return text


def _event_id(event: Mapping[str, Any]) -> str | None:
    found = event.get("id")
    return found if isinstance(found, str) else None


def _timers(snapshot: Mapping[str, Any], path: str = "", depth: int = 0) -> Iterator[Any]:
    """Yield id and ``due_at`` of every deadline of a snapshot, child machines included."""
    for table in ("timers", "sends"):
        found = snapshot.get(table)
        for name, timer in found.items() if isinstance(found, Mapping) else ():
            due_at = timer.get("due_at") if isinstance(timer, Mapping) else None
            if isinstance(due_at, int | float) and not isinstance(due_at, bool):
                yield f"{path}{name}", float(due_at)
    children = snapshot.get("children")
    if depth < _MAX_DEPTH and isinstance(children, Mapping):
        for name, child in children.items():
            below = child.get("snapshot") if isinstance(child, Mapping) else None
            if isinstance(below, Mapping) and child.get("status") == "active":
                yield from _timers(below, f"{path}{name}/", depth + 1)
