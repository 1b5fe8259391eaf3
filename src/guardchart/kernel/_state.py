"""The data a step reads and returns: snapshots, their parts, and receipts.

A snapshot is a tuple subclass of five fields, because making one is the largest single cost
of a step; the fields that seldom change sit together in the fifth.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from guardchart.kernel._events import Event

if TYPE_CHECKING:
    from guardchart.kernel._compile import Machine
    from guardchart.kernel._configuration import Configuration

Status = Literal["active", "done", "error"]
ReceiptStatus = Literal["taken", "denied", "forbidden", "ignored", "dropped"]
_new = tuple.__new__
EMPTY: MappingProxyType[str, Any] = MappingProxyType({})


class Child(NamedTuple):
    """A service or machine that a state invoked, or an action spawned.

    ``key`` is ``"<id>@<rev>"``, rev being that of the step which started it; a completion
    has to name it. ``status`` is ``active``, ``done`` or ``error``. ``snapshot`` is what the
    host recorded of a child machine. ``state_id`` is the invoking state, "" when spawned.
    """

    src: str
    key: str
    status: str = "active"
    input: Any = None
    snapshot: Any = None
    spawned: bool = False
    state_id: str = ""


class Timer(NamedTuple):
    """When a timer is due: epoch milliseconds. All else follows from its id."""

    due_at: float


class DelayedSend(NamedTuple):
    """An event that waits to be sent: when it is due, to whom, and what."""

    due_at: float
    target: str | None
    event: Event


class Rest(NamedTuple):
    """The fields of a snapshot that most steps leave alone."""

    history: MappingProxyType[str, tuple[str, ...]] = EMPTY
    timers: MappingProxyType[str, Timer] = EMPTY
    children: MappingProxyType[str, Child] = EMPTY
    sends: MappingProxyType[str, DelayedSend] = EMPTY
    output: Any = None
    error: Mapping[str, Any] | None = None
    run: str | None = None
    batch_no: int = 0


NO_REST = Rest()


class _Fields(NamedTuple):
    """What a snapshot is made of."""

    rev: int
    status: str
    context: MappingProxyType[str, Any]
    config: Configuration
    rest: Rest


def _view(context: Mapping[str, Any]) -> MappingProxyType[str, Any]:
    return context if isinstance(context, MappingProxyType) else MappingProxyType(dict(context))


class Snapshot(_Fields):
    """The whole state of a machine after a macrostep. Immutable.

    ``rev`` counts the steps, ``status`` is ``active``, ``done`` or ``error``, ``context`` is
    a read-only mapping, ``config`` the active configuration, ``value`` the same as XState
    writes it, ``state_ids`` the ids of its leaves. ``history`` maps a history state's id to
    the ids it would restore; ``timers``, ``children`` and ``sends`` hold what is pending.
    ``run`` and ``batch_no`` belong to the host; steps carry them along unread. ``rest`` is all
    that most steps leave alone, together.

    >>> from guardchart.kernel import create_machine, initial_transition
    >>> snapshot, _ = initial_transition(create_machine({"initial": "a", "states": {"a": {}}}))
    >>> snapshot.rev, snapshot.status, snapshot.value, dict(snapshot.context)
    (1, 'active', 'a', {})
    """

    __slots__ = ()

    def __new__(
        cls,
        rev: int,
        status: str,
        context: Mapping[str, Any],
        config: Configuration,
        rest: Rest = NO_REST,
    ) -> Snapshot:
        """Make a snapshot; ``context`` is taken as it is when it is a read-only view."""
        return _new(cls, (rev, status, _view(context), config, rest))

    @property
    def machine(self) -> Machine:
        """The machine this is a snapshot of."""
        return self[3].machine

    @property
    def value(self) -> Any:
        """The state value, as XState writes it; a fresh object."""
        return self[3].value

    @property
    def state_ids(self) -> frozenset[str]:
        """The ids of the active leaves."""
        return self[3].ids

    @property
    def history(self) -> MappingProxyType[str, tuple[str, ...]]:
        """What each history state that was left would restore: state ids."""
        return self[4].history

    @property
    def timers(self) -> MappingProxyType[str, Timer]:
        """The pending ``after`` timers by id."""
        return self[4].timers

    @property
    def children(self) -> MappingProxyType[str, Child]:
        """Invoked and spawned children by id."""
        return self[4].children

    @property
    def sends(self) -> MappingProxyType[str, DelayedSend]:
        """The delayed sends by id."""
        return self[4].sends

    @property
    def output(self) -> Any:
        """The machine's output once it is done."""
        return self[4].output

    @property
    def error(self) -> Mapping[str, Any] | None:
        """``{"type", "message"}`` once the machine is in error."""
        return self[4].error

    @property
    def run(self) -> str | None:
        """The host's name for this run; opaque to the kernel."""
        return self[4].run

    @property
    def batch_no(self) -> int:
        """The host's count of batches; opaque to the kernel."""
        return self[4].batch_no

    def replace(
        self,
        *,
        rev: int | None = None,
        status: str | None = None,
        context: Mapping[str, Any] | None = None,
        config: Configuration | None = None,
        **fields: Any,
    ) -> Snapshot:
        """Return a copy with the given fields; ``rev`` stays unless it is among them."""
        made = (
            self[0] if rev is None else rev,
            self[1] if status is None else status,
            self[2] if context is None else _view(context),
            self[3] if config is None else config,
            self[4]._replace(**fields) if fields else self[4],
        )
        return _new(Snapshot, made)

    def __copy__(self) -> Snapshot:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Snapshot:
        return self

    def __repr__(self) -> str:
        ids = ", ".join(sorted(self.state_ids))
        return f"<Snapshot rev={self[0]} {self[1]} [{ids}]>"


class Microstep(NamedTuple):
    """One microstep of a macrostep: the event's type ("" when eventless), from, to (leaf ids)."""

    event_type: str
    from_ids: frozenset[str]
    to_ids: frozenset[str]


class Receipt(NamedTuple):
    """What became of an event.

    ``status``: ``taken`` a transition ran; ``denied`` an active handler existed and all its
    guards refused, or strict mode, a reserved type or a fault forbade it; ``forbidden`` a
    handler swallowed it on purpose; ``ignored`` no active state handles it; ``dropped`` the
    machine is not active, or a completion or timer is not (or no longer) the snapshot's.
    ``reason`` says why in words, ``faults`` holds the exceptions of actions and guards,
    ``changed`` tells whether the snapshot is a new one.

    >>> from guardchart.kernel import create_machine, initial_step, step
    >>> machine = create_machine({"initial": "a", "states": {"a": {"on": {"GO": "b"}}, "b": {}}})
    >>> snapshot, _, _ = initial_step(machine)
    >>> step(machine, snapshot, "GO")[2].status, step(machine, snapshot, "STOP")[2].status
    ('taken', 'ignored')
    """

    status: ReceiptStatus
    reason: str | None
    faults: tuple[BaseException, ...]
    changed: bool
    state_ids: frozenset[str]
    microsteps: tuple[Microstep, ...] = ()

    @property
    def error(self) -> BaseException | None:
        """The first fault, or None."""
        return self.faults[0] if self.faults else None

    @property
    def denied(self) -> bool:
        """Whether the status is ``denied``."""
        return self.status == "denied"
