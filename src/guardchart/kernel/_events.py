"""Events: what a machine reacts to, and the only makers of engine events.

An event that comes from outside is an `Event` (or a mapping with a ``type``). What the
engine reports about its own timers and children is an `EngineEvent`; nothing but `done`,
`failed`, `fired` and `observed` makes one, so no payload from outside can pose as one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from guardchart.errors import StepError

if TYPE_CHECKING:
    from guardchart.kernel._nodes import StateNode

RESERVED_PREFIXES = ("xstate.", "guardchart.")
INIT = "xstate.init"
DONE_ACTOR = "xstate.done.actor."
ERROR_ACTOR = "xstate.error.actor."
SNAPSHOT_ACTOR = "xstate.snapshot."
DONE_STATE = "xstate.done.state."
AFTER = "xstate.after."


def is_reserved(event_type: str) -> bool:
    """Tell whether only the engine may make events of this type."""
    return event_type.startswith(RESERVED_PREFIXES)


class Event:
    """One thing that happened: a type and a payload. Treat it as immutable.

    An event that an action sent also has ``sender``: the names its sender goes by, as the
    machine knows them, whatever the payload says. For a machine's own actions these are the
    keys of the state and its ancestors, for a child the name of its source, for a parent its
    id. An event from outside has none, and JSON keeps none.

    Args:
        type: the event's type, e.g. ``"USER_MESSAGE"``.
        payload: what came with it; a dict on every event, ``{}`` where nothing came.

    Raises:
        StepError: the type is no text, or the payload no mapping.

    >>> Event("GO", {"speed": 3}).payload["speed"]
    3
    """

    __slots__ = ("payload", "sender", "type")

    sender: tuple[str, ...]

    def __init__(self, type: str, payload: Mapping[str, Any] | None = None) -> None:
        if not isinstance(type, str) or not type:
            raise StepError("an event's type must be a text that is not empty")
        if payload is None:
            payload = {}
        elif not isinstance(payload, dict):
            if not isinstance(payload, Mapping):
                raise StepError("an event's payload must be a mapping with text keys")
            payload = dict(payload)
        self.type = type
        self.payload: dict[str, Any] = payload

    @property
    def data(self) -> Any:
        """What the event brought: here the payload."""
        return self.payload

    @property
    def error(self) -> BaseException | None:
        """The exception an error event carries; None on any other."""
        return None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Event) or type(other) is not type(self):
            return NotImplemented
        return self.type == other.type and self.payload == other.payload

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.type!r})"


class DoneEvent(Event):
    """A service, a child machine or a state finished: with output, or with an exception.

    ``data`` is the output or the exception, ``error`` the exception or None, ``src`` the
    name of what ran, ``invoke_id`` its id and ``node`` the `StateNode` whose ``invoke``
    made it (None for a spawned child, a done state, or an event made by hand).

    >>> DoneEvent("xstate.done.actor.fetch", 7, "fetch").data
    7
    """

    __slots__ = ("_data", "invoke_id", "node", "src")

    def __init__(
        self,
        type: str,
        data: Any = None,
        src: str = "",
        *,
        invoke_id: str | None = None,
        node: StateNode | None = None,
    ) -> None:
        self.type = type
        self.payload = {"data": data}
        self._data = data
        self.src = src
        self.invoke_id = invoke_id
        self.node = node

    @property
    def data(self) -> Any:
        """The output, or the exception of a failure."""
        return self._data

    @property
    def output(self) -> Any:
        """The output; None for a failure."""
        return None if isinstance(self._data, BaseException) else self._data

    @property
    def error(self) -> BaseException | None:
        """The exception of a failure, else None."""
        return self._data if isinstance(self._data, BaseException) else None


class StreamEvent(Event):
    """One item a streaming service produced: type ``"STREAM"``, the item in ``data``.

    >>> StreamEvent("chunk").payload
    {'data': 'chunk'}
    """

    __slots__ = ()

    def __init__(self, data: Any = None) -> None:
        super().__init__("STREAM", {"data": data})

    @property
    def data(self) -> Any:
        """The item."""
        return self.payload["data"]


EngineKind = Literal["done", "failed", "fired", "observed"]


class EngineEvent:
    """What a host reports about a timer or child. Made by the functions below only.

    ``kind`` says which, ``key`` names the child's key or the timer's id, ``value`` is the
    output, exception, snapshot or payload. ``event`` is the `Event` that guards and actions
    see, once a step (or `resolve`) has found out what the key belongs to; it is made once.
    """

    __slots__ = ("event", "key", "kind", "value")

    def __init__(self, kind: EngineKind, key: str, value: Any) -> None:
        if type(key) is not str:
            raise StepError("an engine event's key must be text")
        self.kind: EngineKind = kind
        self.key = key
        self.value = value
        self.event: Event | None = None

    def __repr__(self) -> str:
        return f"{self.kind}({self.key!r})"


def done(key: str, output: Any = None) -> EngineEvent:
    """Report that the child with this key (``"<id>@<rev>"``) finished with an output."""
    return EngineEvent("done", key, output)


def failed(key: str, error: BaseException | str) -> EngineEvent:
    """Report that the child with this key failed.

    Args:
        key: the child's key, ``"<id>@<rev>"``.
        error: the exception, or a text where only that is known any more (a log); a text
            becomes a `RuntimeError`.
    """
    if not isinstance(error, BaseException):
        error = RuntimeError(str(error))
    return EngineEvent("failed", key, error)


def fired(timer_id: str, payload: Mapping[str, Any] | None = None) -> EngineEvent:
    """Report that a timer of the snapshot (or a delayed send) is due.

    Args:
        timer_id: a key of ``snapshot.timers`` or ``snapshot.sends``.
        payload: becomes the payload of the ``after`` event; unused for a delayed send.
    """
    return EngineEvent("fired", timer_id, dict(payload) if payload else None)


def observed(key: str, snapshot: Any) -> EngineEvent:
    """Report a new snapshot of a running child, for its ``onSnapshot`` transitions."""
    return EngineEvent("observed", key, snapshot)


def as_event(
    event: str | Mapping[str, Any] | Event, payload: Mapping[str, Any] | None = None
) -> Event:
    """Return the event a text, mapping or `Event` stands for.

    Args:
        event: a type, a mapping ``{"type": ..., **payload}``, or an `Event`.
        payload: further payload; only for the first two.

    Returns:
        The same object for an `Event` without further payload, else a new one.

    Raises:
        StepError: no type, or one that is not text.

    >>> as_event({"type": "GO", "speed": 3}).payload
    {'speed': 3}
    """
    if isinstance(event, str):
        return Event(event, payload)
    if isinstance(event, Event):
        if payload:
            raise StepError("give an Event or a payload, not both")
        return event
    if type(event) is not dict and not isinstance(event, Mapping):
        raise StepError("an event must be an Event, a mapping with 'type', or a type")
    rest = dict(event)
    event_type = rest.pop("type", None)
    if payload:
        rest.update(payload)
    return Event(event_type, rest)


def matches_descriptor(descriptor: str, event_type: str) -> bool:
    """Tell whether ``descriptor`` (exact, ``"a.*"`` or ``"*"``) covers ``event_type``.

    ``"a.*"`` covers ``a``, ``a.b`` and ``a.b.c``, never ``ab``.
    """
    if descriptor == "*" or descriptor == event_type:
        return True
    if not descriptor.endswith(".*"):
        return False
    prefix = descriptor[:-2]
    return event_type == prefix or event_type.startswith(prefix + ".")


class InitEvent(Event):
    """What entry actions see when a machine starts; ``input`` is what it was started with."""

    __slots__ = ()

    def __init__(self, input: Any = None) -> None:
        super().__init__(INIT, {"input": input})

    @property
    def input(self) -> Any:
        """The machine's input, None where none was given."""
        return self.payload["input"]
