"""Recordings of running machines, in the messages of the Stately inspector.

A recording says which machines lived, which events they were given and what they became. Of
context and payloads it holds what was asked for by key, and of that no secret.
"""

from __future__ import annotations

import json
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final, Self

from guardchart._redact import scrub, scrub_text
from guardchart.errors import RecordingError
from guardchart.kernel import Event, Machine, StateNode
from guardchart.runtime._plugins import install, uninstall
from guardchart.runtime._sinks import Outlet

__all__ = ["InspectorPlugin", "read_recording"]

_VERSION: Final = "0.7.2"
_KINDS: Final = frozenset({"@xstate.actor", "@xstate.event", "@xstate.snapshot"})
_INIT: Final = "xstate.init"
_STATUS: Final = {"running": "active", "uninitialized": "active"}
_MAX_TYPE_CHARS: Final = 200
_MAX_NAMES: Final = 10_000


class InspectorPlugin:
    """Records machines as messages of the Stately inspector.

    Three kinds of message, told apart by ``type``: ``@xstate.actor`` when a machine starts,
    ``@xstate.event`` when it is given an event, ``@xstate.snapshot`` when it changed. Every
    machine has a session (``sessionId``, as its actor path: ``supervisor``,
    ``supervisor:worker-1``) and names its parent's and its root's.

    Args:
        sink: A `JsonLinesSink`, a path, a text stream, a callable, or anything with
            ``send(message)``. What it raises disturbs no machine.
        context_allowlist: Keys of the context to record; none by default. Secrets in their
            values are masked.
        include_payloads: Record the payloads of events, secrets masked.
        payload_allowlist: With ``include_payloads``, the only keys to record.
        clock: ``() -> float``, epoch seconds; the wall clock by default.

    Attributes:
        lost: How many messages the sink raised at.

    Source: xstate-statemachine, agents reference: recordings.

    Example:
        >>> from guardchart import InspectorPlugin, SyncInterpreter, create_machine
        >>> messages = []
        >>> lamp = create_machine({"id": "lamp", "initial": "off", "states": {
        ...     "off": {"on": {"FLIP": "on"}}, "on": {}}})
        >>> receipt = SyncInterpreter(lamp, plugins=[InspectorPlugin(messages.append)]).start(
        ...     ).send("FLIP")
        >>> [(m["type"], m.get("snapshot", {}).get("value")) for m in messages[2:]]
        [('@xstate.snapshot', 'off'), ('@xstate.event', None), ('@xstate.snapshot', 'on')]
    """

    def __init__(
        self,
        sink: Any,
        *,
        context_allowlist: Iterable[str] = (),
        include_payloads: bool = False,
        payload_allowlist: Iterable[str] = (),
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._outlet = Outlet(sink)
        self._context_keys = frozenset(context_allowlist)
        self._include_payloads = include_payloads
        self._payload_keys = frozenset(payload_allowlist)
        self._clock = clock if clock is not None else time.time
        self._lock = threading.Lock()
        self._sessions: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._taken: dict[str, int] = {}
        self._events: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()

    @property
    def lost(self) -> int:
        """How many messages the sink raised at."""
        return self._outlet.lost

    def install(self) -> Self:
        """Attach to every interpreter made from now on, in this process.

        Child machines have the plugins of their parent, so they are recorded either way.
        """
        install(self)
        return self

    def uninstall(self) -> None:
        """Undo ``install()``, for interpreters made from now on."""
        uninstall(self)

    # Hooks

    def on_interpreter_start(self, interpreter: Any) -> None:
        """``@xstate.actor``."""
        parent = interpreter.parent
        message = {
            "name": interpreter.machine.id,
            "definition": json.dumps(self._definition(interpreter.machine), sort_keys=True),
            "snapshot": self._snapshot(interpreter),
        }
        if parent is not None:
            message["parentId"] = self._session(parent)
        self._write("@xstate.actor", interpreter, message)
        self._event(interpreter, {"type": _INIT})

    def on_event_received(self, interpreter: Any, event: Event) -> None:
        """``@xstate.event``."""
        shown: dict[str, Any] = {"type": scrub_text(event.type[:_MAX_TYPE_CHARS])}
        if self._include_payloads:
            keys = self._payload_keys
            picked = {k: v for k, v in event.payload.items() if not keys or k in keys}
            shown = {**scrub(picked), **shown}
        self._event(interpreter, shown)

    def on_transition(self, interpreter: Any, from_ids: Any, to_ids: Any, taken: Any) -> None:
        """``@xstate.snapshot``."""
        self._changed(interpreter)

    def on_context(self, interpreter: Any, updates: Mapping[str, Any]) -> None:
        """``@xstate.snapshot``, where a recorded key was written."""
        if not self._context_keys.isdisjoint(updates):
            self._changed(interpreter)

    def on_interpreter_stop(self, interpreter: Any) -> None:
        """``@xstate.snapshot`` with the status in which it ended."""
        self._changed(interpreter)

    # Messages

    def _event(self, interpreter: Any, event: dict[str, Any]) -> None:
        self._events[interpreter] = event
        self._write("@xstate.event", interpreter, {"event": event})

    def _changed(self, interpreter: Any) -> None:
        event = self._events.get(interpreter, {"type": _INIT})
        self._write(
            "@xstate.snapshot",
            interpreter,
            {"event": event, "snapshot": self._snapshot(interpreter)},
        )

    def _write(self, kind: str, interpreter: Any, fields: dict[str, Any]) -> None:
        root = interpreter
        while root.parent is not None:
            root = root.parent
        self._outlet(
            {
                "type": kind,
                "sessionId": self._session(interpreter),
                "rootId": self._session(root),
                "createdAt": str(int(self._clock() * 1000)),
                "_version": _VERSION,
                "id": None,
                **fields,
            }
        )

    def _session(self, interpreter: Any) -> str:
        """The actor path; a later machine of the same id gets a number."""
        with self._lock:
            known = self._sessions.get(interpreter)
            if known is not None:
                return known
            parent = interpreter.parent
            # Whoever spawns a machine may name it after what an event said.
            own = scrub_text(interpreter.id[:_MAX_TYPE_CHARS])
            if parent is None:
                number = self._taken.pop(own, 0) + 1
                self._taken[own] = number
                if len(self._taken) > _MAX_NAMES:
                    del self._taken[next(iter(self._taken))]
                name = own if number == 1 else f"{own}#{number}"
            else:
                last = scrub_text(interpreter.id.removeprefix(parent.id)[:_MAX_TYPE_CHARS])
                name = self._sessions.get(parent, "") + last
            self._sessions[interpreter] = name
            return name

    def _snapshot(self, interpreter: Any) -> dict[str, Any]:
        snapshot = interpreter.snapshot
        prefix = f"{interpreter.id}:"
        children = sorted(
            scrub_text(each.removeprefix(prefix)[:_MAX_TYPE_CHARS]) for each in interpreter.actors
        )
        shown = {
            "status": _STATUS.get(interpreter.status, interpreter.status),
            "value": snapshot.value,
            "context": self._context(snapshot.context),
            "children": {each: {"id": each} for each in children},
            "historyValue": {key: list(ids) for key, ids in snapshot.history.items()},
            "tags": sorted({tag for node in snapshot.config.active for tag in node.tags}),
        }
        if interpreter.status == "error":
            error = interpreter.error
            named = error.get("name") if isinstance(error, Mapping) else type(error).__name__
            shown["error"] = scrub_text(str(named))
        return shown

    def _context(self, context: Mapping[str, Any]) -> dict[str, Any]:
        picked = {key: context[key] for key in sorted(self._context_keys) if key in context}
        clean: dict[str, Any] = scrub(picked)
        return clean

    def _definition(self, machine: Machine) -> dict[str, Any]:
        return {**_node(machine.root), "context": self._context(machine.context)}


def _node(node: StateNode) -> dict[str, Any]:
    """A state as chart JSON: what is needed to draw it."""
    shown: dict[str, Any] = {"id": node.id}
    if node.type in ("parallel", "final", "history"):
        shown["type"] = node.type
    if node.initial is not None and node.initial.targets:
        shown["initial"] = node.initial.targets[0].key
    on = {event: [_arrow(each) for each in found] for event, found in node.on.items()}
    if on:
        shown["on"] = on
    if node.always:
        shown["always"] = [_arrow(each) for each in node.always]
    if node.invokes:
        shown["invoke"] = [{"id": each.id, "src": each.src} for each in node.invokes]
    if node.tags:
        shown["tags"] = sorted(node.tags)
    if node.states:
        shown["states"] = {key: _node(child) for key, child in node.states.items()}
    return shown


def _arrow(transition: Any) -> dict[str, Any]:
    shown: dict[str, Any] = {"target": [f"#{node.id}" for node in transition.targets]}
    guard = transition.spec.guard
    if guard is not None:
        shown["guard"] = guard.name or guard.kind
    if transition.actions:
        shown["actions"] = [action.name for action in transition.actions]
    return shown


def read_recording(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read a recording back.

    Args:
        path: A file that an `InspectorPlugin` wrote through a `JsonLinesSink`.

    Returns:
        Its messages, oldest first. A last line that was cut off, as by a crash, is left out.

    Raises:
        RecordingError: The file holds no inspector messages (an ``AgentTracePlugin`` trace, for
            one, is not a recording), or a line before the last is no message. Record with
            ``InspectorPlugin(JsonLinesSink(path))``.
        OSError: The file cannot be read.

    Source: xstate-statemachine, agents reference: Troubleshooting.

    Example:
        >>> import os, tempfile
        >>> from guardchart import InspectorPlugin, JsonLinesSink, SyncInterpreter, create_machine
        >>> machine = create_machine({"id": "m", "initial": "a", "states": {"a": {}}})
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = os.path.join(folder, "run.jsonl")
        ...     with JsonLinesSink(path) as sink:
        ...         live = SyncInterpreter(machine, plugins=[InspectorPlugin(sink)]).start()
        ...     [message["sessionId"] for message in read_recording(path)]
        ['m', 'm', 'm']
    """
    lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    messages: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            message: Any = json.loads(line)
        except (ValueError, RecursionError):
            if number == len(lines) and messages:
                break
            raise RecordingError(f"line {number}: not JSON; this is not a recording") from None
        if not isinstance(message, dict) or message.get("type") not in _KINDS:
            raise RecordingError(
                f"line {number}: no inspector messages, so this is not a recording; record with "
                "InspectorPlugin(JsonLinesSink(path))"
            )
        messages.append(message)
    if not messages:
        raise RecordingError(
            "no inspector messages, so this is not a recording; record with "
            "InspectorPlugin(JsonLinesSink(path))"
        )
    return messages
