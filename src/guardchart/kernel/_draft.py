"""What an action in draft form is given: a context it may change, and a scope to act through.

The draft clones a value when it is first reached, never the whole context, so the snapshot
before the step stays as it was however deep an action writes. Nothing an action asks of the
scope happens at once: requests are collected and become effects if the step succeeds.
"""

from __future__ import annotations

import copy
from collections.abc import ItemsView, Iterator, KeysView, Mapping, ValuesView
from itertools import repeat
from operator import is_
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from guardchart.errors import StepError
from guardchart.kernel._delays import checked_delay
from guardchart.kernel._effects import CancelSend, Effect, Emit, Log, Send
from guardchart.kernel._events import Event, as_event, is_reserved
from guardchart.kernel._state import DelayedSend

if TYPE_CHECKING:
    from guardchart.kernel._compile import Machine
    from guardchart.kernel._nodes import StateNode
    from guardchart.kernel._run import Run

_SCALARS: Final = frozenset({str, int, float, bool, type(None), bytes, complex})
_ABSENT: Final = object()


def is_scalar(value: Any) -> bool:
    """Whether a value cannot change, so that contexts may share it."""
    return type(value) in _SCALARS


def clone(value: Any, memo: dict[int, Any]) -> Any:
    """Copy a value deeply; what cannot be copied (a client, a lock) is shared."""
    kind = type(value)
    if kind in _SCALARS:
        return value
    known = memo.get(id(value), _ABSENT)
    if known is not _ABSENT:
        return known
    made: Any
    if kind is dict:
        made = memo[id(value)] = {}
        for key, item in value.items():
            made[key] = item if type(item) in _SCALARS else clone(item, memo)
    elif kind is list:
        made = memo[id(value)] = []
        for item in value:
            made.append(item if type(item) in _SCALARS else clone(item, memo))
    elif kind is tuple:
        made = memo[id(value)] = tuple(clone(item, memo) for item in value)
    else:
        try:
            made = copy.deepcopy(value, memo)
        except Exception:
            made = value
        memo[id(value)] = made
    return made


class Draft(dict[str, Any]):
    """A context to write to. Every accessor hands out a clone, made once per key.

    The accessors that CPython would serve from the underlying table (``{**draft}``,
    ``dict(draft)``, ``draft | other``) are overridden too, or they would leak values of the
    snapshot before the step.
    """

    __slots__ = ("_memo", "_origin", "_own")

    def __init__(self, origin: Mapping[str, Any]) -> None:
        super().__init__(origin.copy() if type(origin) is MappingProxyType else origin)
        self._origin = origin
        self._own: set[str] = set()
        self._memo: dict[int, Any] = {}

    def _reach(self, key: str) -> Any:
        value = super().__getitem__(key)
        if type(value) in _SCALARS or key in self._own:
            return value
        self._own.add(key)
        if value is self._origin.get(key, _ABSENT):
            value = clone(value, self._memo)
            super().__setitem__(key, value)
        return value

    def __getitem__(self, key: str) -> Any:
        return self._reach(key)

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value, cloned on first reach, or the default."""
        return self._reach(key) if key in self else default

    def setdefault(self, key: str, default: Any = None) -> Any:
        """Return the value; set it to the default first where the key is absent."""
        if key not in self:
            super().__setitem__(key, default)
        return self._reach(key)

    def pop(self, key: str, *default: Any) -> Any:
        """Remove the key and return its value."""
        if key in self:
            value = self._reach(key)
            super().__delitem__(key)
            return value
        if default:
            return default[0]
        raise KeyError(key)

    def popitem(self) -> tuple[str, Any]:
        """Remove and return the last pair."""
        for key in reversed(list(super().keys())):
            return key, self.pop(key)
        raise KeyError("the context is empty")

    def __iter__(self) -> Iterator[str]:
        return super().__iter__()

    def keys(self) -> KeysView[str]:  # type: ignore[override]
        """The keys; overridden so that ``{**draft}`` and ``dict(draft)`` ask `__getitem__`."""
        return KeysView(self)

    def values(self) -> ValuesView[Any]:  # type: ignore[override]
        """The values, each cloned when it is reached."""
        return ValuesView(self)

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]
        """The pairs, each value cloned when it is reached."""
        return ItemsView(self)

    def copy(self) -> dict[str, Any]:
        """A plain dict of clones."""
        return {key: self._reach(key) for key in dict.keys(self)}

    __copy__ = copy

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return {key: copy.deepcopy(self._reach(key), memo) for key in dict.keys(self)}

    def __or__(self, other: Any) -> Any:
        return self.copy() | other if isinstance(other, dict) else NotImplemented

    def __ror__(self, other: Any) -> Any:
        return other | self.copy() if isinstance(other, dict) else NotImplemented

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (self.copy(),)

    def finish(self) -> dict[str, Any] | None:
        """Return the context as it was left, or None when nothing was written.

        A clone that is still equal to its original gives way to it, so that unchanged values
        keep their identity from snapshot to snapshot.
        """
        origin = self._origin
        now, before = dict.values(self), map(origin.get, dict.keys(self), repeat(_ABSENT))
        if len(origin) == len(self) and all(map(is_, now, before)):
            return None
        # Not dict.copy(self): CPython would go through this class's own accessors and clone all.
        final = dict(dict.items(self))
        changed = len(final) != len(origin)
        for key, value in final.items():
            old = origin.get(key, _ABSENT)
            if value is old:
                continue
            if key in self._own and old is not _ABSENT and same(value, old):
                final[key] = old
            else:
                changed = True
        return final if changed else None


def same(a: Any, b: Any) -> bool:
    """Deep equality that does not take 1 for True, nor 1.0 for 1, and never raises."""
    if type(a) is not type(b):
        return False
    try:
        if type(a) is dict:
            return len(a) == len(b) and list(a) == list(b) and all(same(a[k], b[k]) for k in a)
        if type(a) in (list, tuple):
            return len(a) == len(b) and all(map(same, a, b))
        return bool(a == b)
    except Exception:
        return False


class ActionInfo:
    """The action as the chart names it: what a draft-form action gets as its fourth argument."""

    __slots__ = ("params", "type")

    def __init__(self, type: str, params: Any) -> None:
        self.type = type
        self.params = params


class Scope:
    """The machine as one running action may act on it. Valid while the action runs.

    ``id``, ``parent`` and ``engine`` (``"sync"`` or ``"async"``) come from the host and are
    None in the pure functions; ``mixed`` tells whether that engine runs services of the other
    kind as well. ``node`` is the state whose action this is, ``state_id`` its id, ``machine``
    its machine.
    """

    __slots__ = ("_run", "context", "engine", "id", "mixed", "node", "parent", "state_id")

    def __init__(self, run: Run, host: Any, node: StateNode, context: Mapping[str, Any]) -> None:
        self._run = run
        self.id: str | None = getattr(host, "id", None)
        self.parent: Any = getattr(host, "parent", None)
        self.engine: str | None = getattr(host, "engine", None)
        self.mixed: bool = getattr(host, "mixed", False)
        self.node = node
        self.state_id = node.id
        self.context = context

    @property
    def machine(self) -> Machine:
        """The machine."""
        return self._run.machine

    def send(self, event: str | Mapping[str, Any] | Event, /, **payload: Any) -> None:
        """Queue an external event to this machine; handled after this macrostep."""
        self._push(Send(None, self._own(event, payload)))

    def send_to(
        self,
        target: str,
        event: str | Mapping[str, Any] | Event,
        /,
        **payload: Any,
    ) -> None:
        """Send an event to the child with this id (``"#parent"`` for the parent)."""
        self._push(Send(target, self._own(event, payload)))

    def send_parent(self, event: str | Mapping[str, Any] | Event, /, **payload: Any) -> None:
        """Send an event to the machine that started this one."""
        self._push(Send("#parent", self._own(event, payload)))

    def send_after(
        self,
        delay: float | str,
        event: str | Mapping[str, Any] | Event,
        /,
        *,
        id: str | None = None,
        target: str | None = None,
    ) -> str:
        """Send an event later; return the id by which `cancel` forgets it.

        Args:
            delay: milliseconds, or an ISO-8601 duration.
            event: the event.
            id: an id of one's own; a pending send with the same id is replaced.
            target: None for this machine, a child's id, or ``"#parent"``.
        """
        run = self._run
        delay_ms = checked_delay(delay)
        made = self._own(event, {})
        if id is None:
            taken = len(run.sends)
            while f"send-{run.rev}-{taken}" in run.sends:
                taken += 1
            id = f"send-{run.rev}-{taken}"
        if id in run.timer_ids():
            raise StepError("a send may not take the id of a timer")
        run.set_send(id, DelayedSend(run.now + delay_ms, target, made))
        self._push(Send(target, made, delay_ms, id))
        return id

    def cancel(self, send_id: str) -> None:
        """Forget a delayed send; nothing happens when it is unknown or was sent."""
        if self._run.drop_send(send_id):
            self._push(CancelSend(send_id))

    def raise_(self, event: str | Mapping[str, Any] | Event, /, **payload: Any) -> None:
        """Queue an internal event: handled within this macrostep, before any external one."""
        self._run.queue.append((self._own(event, payload), False))

    def emit(self, event: str | Mapping[str, Any] | Event, /, **payload: Any) -> None:
        """Hand an event to outside listeners."""
        self._push(Emit(_outgoing(event, payload)))

    def log(self, label: str, value: Any = None) -> None:
        """Write to the host's log."""
        self._push(Log(label, value))

    def spawn(self, src: Any, id: str | None = None, input: Any = None) -> str:
        """Start a child that outlives this state; return its id.

        Args:
            src: the name of a service in the logic, a function or a `Machine`.
            id: its id; by default the source's name and the first free number.
            input: JSON handed to it.

        Raises:
            StepError: a running child has this id, or ``src`` is an unknown name.
        """
        return self._run.spawn(src, id, input)

    def stop(self, id: str) -> None:
        """Stop a spawned child; nothing happens when it is unknown."""
        self._run.stop_spawned(id)

    def _push(self, effect: Effect) -> None:
        self._run.effects.append(effect)

    def _own(self, event: str | Mapping[str, Any] | Event, payload: Mapping[str, Any]) -> Event:
        """The event as this state's: a copy where the object is somebody's already."""
        made = _outgoing(event, payload)
        if made is event:
            made = copy.copy(made)
        node = self.node
        made.sender = (node.key, *(each.key for each in node.ancestors))
        return made


def _outgoing(event: str | Mapping[str, Any] | Event, payload: Mapping[str, Any]) -> Event:
    made = as_event(event, payload or None)
    if is_reserved(made.type):
        raise StepError("event types beginning with 'xstate.' or 'guardchart.' are the engine's")
    return made
