"""What an interpreter is made of, and how it is read, observed and written down.

`InterpreterBase` adds how it lives: steps, effects, children, time.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Final, Self, TypedDict

from guardchart.errors import SnapshotError, StepError
from guardchart.kernel import (
    EngineEvent,
    Event,
    Machine,
    Receipt,
    Snapshot,
    as_event,
    can,
    dump,
    load,
    matches,
    update_context,
)
from guardchart.kernel._plain import MAX_BYTES
from guardchart.runtime._clock import Clock, SystemClock
from guardchart.runtime._contexts import TreeContext
from guardchart.runtime._logic import BeforeStep, Host, MachineLogic
from guardchart.runtime._plugins import NO_PLUGINS, Plugins, with_installed
from guardchart.runtime._services import Invocation

__all__ = ["AnyEvent", "ENGINE", "Entry", "INSIDE", "InterpreterCore", "OUTSIDE", "Options"]

_SYSTEM: Final = SystemClock()
_MAX_FAULTS: Final = 100

AnyEvent = Event | EngineEvent

# Where a queued event came from. Only an outside one may decide an approval.
OUTSIDE: Final = "outside"
INSIDE: Final = "inside"
ENGINE: Final = "engine"


class Options(TypedDict, total=False):
    """The keyword arguments that both engines share."""

    clock: Clock | None
    plugins: Iterable[Any]
    scope: str | None
    ledger: Any
    run: str | None
    input: Any
    max_queue: int
    parent: Any
    id: str | None
    attachments: Mapping[str, Any] | None
    bubbles: tuple[type[BaseException], ...]


class Entry:
    """A queued event, and the place of its receipt."""

    __slots__ = ("counted", "event", "origin", "receipt", "shown", "waiter")

    def __init__(self, event: AnyEvent, origin: str) -> None:
        self.event = event
        self.origin = origin
        # Whether it came while another was processed, and whether plugins were told of it.
        self.counted = False
        self.shown = False
        self.receipt: Receipt | None = None
        self.waiter: Callable[[Receipt], None] | None = None


class InterpreterCore:
    """State of a running machine; see `InterpreterBase`.

    Its attributes are slots: there are more of them than CPython keeps in shared dicts.
    """

    __slots__ = (
        "_adopts", "_bubbles", "_driving", "_error", "_fired", "_flying", "_hook", "_host",
        "_input", "_invocation", "_ledger", "_left", "_listeners", "_nonce", "_observed",
        "_observers", "_plugins", "_queue", "_restart", "_scope", "_snapshot", "_state",
        "_stepping", "_streak", "_verdict", "_watched", "actors", "attachments", "bubbled",
        "clock", "faults", "id", "logic", "machine", "max_queue", "parent",
    )  # fmt: skip

    engine: ClassVar[str]
    mixed: bool = False
    """Whether the app left the engine to a host, so that services of either kind are welcome."""

    def __init__(
        self,
        machine: Machine,
        *,
        clock: Clock | None = None,
        plugins: Iterable[Any] = (),
        scope: str | None = None,
        ledger: Any = None,
        run: str | None = None,
        input: Any = None,
        max_queue: int = 10_000,
        parent: Any = None,
        id: str | None = None,
        attachments: Mapping[str, Any] | None = None,
        bubbles: tuple[type[BaseException], ...] = (),
    ) -> None:
        machine.require_bound()
        self.machine = machine
        self.logic: MachineLogic = machine.logic if machine.logic is not None else MachineLogic()
        self.clock: Clock = clock if clock is not None else _SYSTEM
        self.id = id if id is not None else machine.id
        self.parent = parent
        self.max_queue = max_queue
        self.attachments: Mapping[str, Any] = attachments if attachments is not None else {}
        self.actors: dict[str, Any] = {}
        # The children of a machine that was stopped, for its snapshot.
        self._left: dict[str, Any] = {}
        self.faults: list[BaseException] = []
        # A child machine is given its parent's, the installed ones among them.
        given = tuple(plugins if parent is not None else with_installed(plugins))
        self._plugins = Plugins(given) if given else NO_PLUGINS
        # Whether anybody looks at each step: a plugin, an observer, a parent.
        self._observed = bool(self._plugins.items)
        self._observers: tuple[Callable[[Any], None], ...] = ()
        self._listeners: tuple[Callable[[Event], None], ...] = ()
        self._hook = getattr(self.logic, "before_step", None)
        self._bubbles = bubbles
        self.bubbled: BaseException | None = None
        self._scope, self._ledger, self._nonce, self._input = scope, ledger, run, input
        self._snapshot: Snapshot | None = None
        self._restart = self._adopts = False
        self._state = "uninitialized"
        self._error: BaseException | None = None
        self._host: Host | None = None
        self._verdict: BeforeStep | Exception | None = None
        self._queue: deque[Entry] = deque()
        self._driving = False
        self._stepping = False
        self._streak = self._fired = 0
        # What runs for this machine now, by the child's key, and how each is cancelled.
        self._flying: dict[str, Callable[[], Any]] = {}
        # Of a child machine: the invocation it answers, and whether its parent looks on.
        self._invocation: Invocation | None = None
        self._watched = False

    # Reading

    @property
    def status(self) -> str:
        """``uninitialized``, ``running``, ``done``, ``error`` or ``stopped``."""
        return self._state

    @property
    def snapshot(self) -> Snapshot:
        """The kernel's snapshot after the last macrostep.

        Raises:
            StepError: The interpreter was never started; call ``start()``.
        """
        snapshot = self._snapshot
        if snapshot is None:
            raise StepError(f"{self.id} has not been started; call start() first")
        return snapshot

    @property
    def context(self) -> Mapping[str, Any]:
        """The context; read it, change it by events or `update_context`.

        Where child machines live it is a `TreeContext`, whose ``actors`` are theirs.
        """
        if not self.actors:
            return self.snapshot.context
        actors = {actor.id: actor.context for actor in list(self.actors.values())}
        return TreeContext(self.snapshot.context, actors)

    @property
    def current_state_ids(self) -> frozenset[str]:
        """The ids of the active leaf states; kept after done and stop."""
        return frozenset() if self._snapshot is None else self._snapshot.state_ids

    @property
    def output(self) -> Any:
        """The machine's output once it is done."""
        return self.snapshot.output

    @property
    def error(self) -> Any:
        """What put the machine into ``error``: the exception, or the snapshot's record of it."""
        if self._error is not None:
            return self._error
        return None if self._snapshot is None else self._snapshot.error

    @property
    def host(self) -> Host:
        """Scope, ledger, run and agent path of this machine."""
        host = self._host
        if host is None:
            run = self.snapshot.run or self._nonce or ""
            host = self._host = Host(self._scope or run, self._ledger, run, self.id)
        return host

    @property
    def _actors(self) -> dict[str, Any]:
        # Plugins and tests written for xstate-statemachine know it by this name.
        return self.actors

    def can(self, event: str | Mapping[str, Any] | Event, **payload: Any) -> bool:
        """Whether the event would be taken now, guards evaluated with its payload."""
        return can(self.snapshot, as_event(event, payload or None))

    def matches(self, state: str) -> bool:
        """Whether the state of this id or dotted path is active."""
        return matches(self.snapshot, state)

    # Observing

    @property
    def plugins(self) -> tuple[Any, ...]:
        """The plugins, in the order in which they are called."""
        return self._plugins.items

    def use(self, *plugins: Any) -> Self:
        """Attach plugins; returns self.

        Raises:
            NotSupportedError: A hook is async; hooks are called, not awaited.
        """
        for plugin in plugins:
            self._plugins = Plugins((*self._plugins.items, plugin))
        self._observed = True
        return self

    def subscribe(self, observer: Callable[[Any], None]) -> Callable[[], None]:
        """Call ``observer(self)`` after each macrostep; returns what unsubscribes it.

        What an observer raises is logged and disturbs nothing, as with a plugin.
        """
        self._observers = (*self._observers, observer)
        self._observed = True

        def unsubscribe() -> None:
            self._observers = _without(self._observers, observer)

        return unsubscribe

    def on_emit(self, listener: Callable[[Event], None]) -> Callable[[], None]:
        """Call ``listener(event)`` for each emitted event; returns what removes it."""
        self._listeners = (*self._listeners, listener)

        def remove() -> None:
            self._listeners = _without(self._listeners, listener)

        return remove

    # Snapshots

    def dump(self, *, max_bytes: int = MAX_BYTES) -> dict[str, Any]:
        """The snapshot as JSON types, live children included.

        Args:
            max_bytes: Cap on the length of its JSON text.

        Raises:
            SnapshotError: The context holds something that is not JSON, or is too large.
        """
        snapshot = self.snapshot
        actors = self.actors or self._left
        if actors:
            children = snapshot.children.copy()
            for actor in list(actors.values()):
                child = children.get(actor._invocation.id)
                if child is not None and child.key == actor._invocation.key:
                    children[actor._invocation.id] = child._replace(
                        snapshot=actor.dump(max_bytes=max_bytes)
                    )
            snapshot = snapshot.replace(children=MappingProxyType(children))
        return dump(snapshot, max_bytes=max_bytes)

    def get_snapshot(self) -> str:
        """The snapshot as JSON text; see `dump`."""
        return json.dumps(self.dump(), ensure_ascii=False, separators=(",", ":"))

    @classmethod
    def from_snapshot(
        cls,
        data: str | Mapping[str, Any] | Snapshot,
        machine: Machine,
        *,
        restart_services: bool = False,
        trusted: bool | None = None,
        adopt_children: bool = False,
        clock: Clock | None = None,
        plugins: Iterable[Any] = (),
        **options: Any,
    ) -> Self:
        """An interpreter that goes on from a snapshot once started; nothing runs before.

        Args:
            data: Snapshot JSON as text or dict, or a loaded kernel ``Snapshot``.
            machine: The machine it was taken from.
            restart_services: Your word that the snapshot is your own (from your store, or
                sealed): services that were running are started again, inputs computed anew,
                and child machines go on from their own snapshots.
            trusted: Whether delayed sends and spawned actors load; as ``restart_services``.
            adopt_children: Whether child machines, where services are not restarted, go on as
                they stood, nothing of them running, and do not count as interrupted.
            clock: As for the constructor.
            plugins: As for the constructor.
            **options: The constructor's other arguments.

        Raises:
            SnapshotError: The data is not a legal snapshot of this machine.
        """
        if not isinstance(data, Snapshot):
            own = restart_services if trusted is None else trusted
            data = load(machine, data if isinstance(data, str) else dict(data), trusted=own)
        elif data.machine is not machine:
            raise SnapshotError("the snapshot was loaded for another machine object")
        interpreter = cls(machine, clock=clock, plugins=plugins, **options)
        interpreter._snapshot = data
        interpreter._restart = restart_services
        interpreter._adopts = adopt_children
        return interpreter

    def update_context(self, updates: Mapping[str, Any]) -> None:
        """Write context outside a step; the one way to do so, told to ``on_context``.

        Args:
            updates: New values by key, merged shallowly.

        Raises:
            StepError: Called by an action, whose step would overwrite it: return the updates
                instead. Or the interpreter was never started.
            SnapshotError: A key is no string.
        """
        if self._stepping:
            raise StepError("update_context cannot be called by an action; return the updates")
        updates = dict(updates)
        self._snapshot = update_context(self.snapshot, updates)
        if self._plugins.items:
            self._plugins.call("on_context", self, updates)

    # Small things

    def _fault(self, error: BaseException) -> None:
        """Remember a fault; the oldest give way."""
        self.faults.append(error)
        del self.faults[:-_MAX_FAULTS]

    def _refused(self, status: Any, reason: str, error: BaseException | None = None) -> Receipt:
        faults = () if error is None else (error,)
        return Receipt(status, reason, faults, False, self.current_state_ids)

    def is_current(self, invocation: Invocation) -> bool:
        """Whether this invocation is still what its state waits for."""
        if self._state != "running" or self._snapshot is None:
            return False
        child = self._snapshot[4].children.get(invocation.id)
        return child is not None and child.key == invocation.key and child.status == "active"


def _without(items: tuple[Any, ...], item: Any) -> tuple[Any, ...]:
    """The tuple without the first occurrence of an item."""
    if item not in items:
        return items
    at = items.index(item)
    return items[:at] + items[at + 1 :]
