"""Effects: what a step asks its host to do, as plain immutable data.

An effect carries no identity of its own: it is known by the revision of the snapshot that
came with it and its position in the list, so equal effects may be one shared object. What
belongs to one run (a child's key and input, a timer's due time) is read from that snapshot.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from guardchart.kernel._events import Event


class StartService(NamedTuple):
    """Start the child ``snapshot.children[id]`` (its key, source and input are there)."""

    id: str
    src: str
    state_id: str


class StopService(NamedTuple):
    """Stop the child with this id; its completion, if it still comes, is dropped."""

    id: str


class ScheduleTimer(NamedTuple):
    """Arrange for `fired` with this id at ``snapshot.timers[id].due_at``."""

    id: str


class CancelTimer(NamedTuple):
    """Forget the timer with this id."""

    id: str


class Send(NamedTuple):
    """Deliver an event: to the machine itself (``target`` None), a child id or ``"#parent"``.

    With a ``delay`` (milliseconds above 0) the event rests in ``snapshot.sends[id]``; the
    host calls `fired` with ``id`` when it is due, and delivers nothing by itself.
    """

    target: str | None
    event: Event
    delay: float = 0
    id: str | None = None


class CancelSend(NamedTuple):
    """Forget the delayed send with this id."""

    id: str


class Emit(NamedTuple):
    """Hand an event to whoever listens outside; the machine does not see it."""

    event: Event


class Spawn(NamedTuple):
    """Start a child that no state owns. ``src`` is a service's name, a function or a Machine."""

    id: str
    src: Any
    input: Any = None


class Log(NamedTuple):
    """Write a line to the host's log."""

    label: str
    value: Any = None


Effect = (
    StartService
    | StopService
    | ScheduleTimer
    | CancelTimer
    | Send
    | CancelSend
    | Emit
    | Spawn
    | Log
)
Effects = tuple[Effect, ...]
NO_EFFECTS: Effects = ()
