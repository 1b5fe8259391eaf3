"""The events a model may choose from: their names as tools, their payloads, which are accepted.

Schemas of payloads come with the logic (``attachments["events"]``, where `setup_agent` puts
them) or with the chart (``meta.events`` of its root, JSON Schemas).
"""

from __future__ import annotations

import json
import re
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Protocol, TypeAlias

from guardchart.agents._requests import AgentEventDescriptor, ChosenEvent
from guardchart.errors import AgentConfigError, ChartError
from guardchart.gate._arguments import ArgumentsRefused, admit
from guardchart.gate._schema import DocumentShape, type_shape
from guardchart.kernel import Machine, Snapshot, accepted_events, named_events
from guardchart.kernel._events import is_reserved, matches_descriptor

__all__ = [
    "AllowedEvents",
    "EVENTS",
    "as_patterns",
    "check_allowed",
    "check_payload",
    "event_table",
    "get_accepted_events",
    "narrowed",
    "tool_names",
]

EVENTS: Final = "events"
"""The attachment of a ``MachineLogic``, and the key in the root's ``meta``, that hold schemas."""

AllowedEvents: TypeAlias = str | Sequence[str]
"""Event types, ``"*"`` or ``"ns.*"``; one or several."""

_MAX_NAME: Final = 64
_NOT_IN_A_NAME: Final = re.compile(r"[^A-Za-z0-9_-]")
_NOTHING: Final = {"type": "object", "properties": {}, "additionalProperties": False}
_SHOWN: Final = 10


class PayloadShape(Protocol):
    """What checks a payload."""

    def load(self, arguments: dict[str, Any], raw: bytes) -> tuple[dict[str, Any], str]:
        """Return the payload with defaults filled in, and its text."""


class _NoPayload:
    def load(self, arguments: dict[str, Any], raw: bytes) -> tuple[dict[str, Any], str]:
        if arguments:
            raise ArgumentsRefused("*: this event has no payload")
        return {}, "{}"


class _Typed:
    """A shape that declares the event's type beside its payload."""

    def __init__(self, shape: PayloadShape, event_type: str) -> None:
        self._shape = shape
        self._type = event_type

    def load(self, arguments: dict[str, Any], raw: bytes) -> tuple[dict[str, Any], str]:
        whole = {**arguments, "type": self._type}
        return self._shape.load(whole, admit(whole))


class EventTable:
    """What a machine's events are called as tools and which payloads they take."""

    def __init__(self, machine: Machine) -> None:
        schemas = _schemas(machine)
        self.types: tuple[str, ...] = tuple(dict.fromkeys((*named_events(machine), *schemas)))
        self._names = tool_names(self.types, set())
        self._shapes: dict[str, PayloadShape] = {}
        self._documents: dict[str, dict[str, Any]] = {}
        for event_type, schema in schemas.items():
            shape, document = _shape(event_type, schema)
            self._shapes[event_type] = shape
            self._documents[event_type] = document

    def descriptors(self, types: Iterable[str]) -> list[AgentEventDescriptor]:
        """The descriptors of these events, in this order."""
        wanted = list(types)
        strangers = [each for each in wanted if each not in self._names]
        names = {**self._names, **tool_names(strangers, set(self._names.values()))}
        found = []
        for each in wanted:
            descriptor = AgentEventDescriptor(
                type=each, tool_name=names[each], input_schema=self._documents.get(each)
            )
            descriptor._shape = self._shapes.get(each)
            found.append(descriptor)
        return found


_TABLES: Final[weakref.WeakKeyDictionary[Machine, EventTable]] = weakref.WeakKeyDictionary()


def event_table(machine: Machine) -> EventTable:
    """The table of a machine, made once.

    Raises:
        AgentConfigError: A schema is none, or describes no object.
        MissingExtraError: A schema is a JSON Schema document, and jsonschema is not installed.
    """
    table = _TABLES.get(machine)
    if table is None:
        table = _TABLES[machine] = EventTable(machine)
    return table


def _schemas(machine: Machine) -> dict[str, Any]:
    found: dict[str, Any] = {}
    declared = machine.meta.get(EVENTS)
    if declared is not None:
        if not isinstance(declared, Mapping):
            raise ChartError("an object of event types and JSON Schemas", path="$.meta.events")
        found.update(declared)
    attached = getattr(machine.logic, "attachments", {}).get(EVENTS)
    if attached is not None:
        if not isinstance(attached, Mapping):
            raise AgentConfigError("the attachment 'events' must map event types to schemas")
        found.update(attached)
    return found


def _shape(event_type: str, schema: Any) -> tuple[PayloadShape, dict[str, Any]]:
    label = f"event {event_type!r}"
    if schema is None:
        return _NoPayload(), dict(_NOTHING)
    if isinstance(schema, Mapping):
        checked = DocumentShape(event_type, _without_type(dict(schema)), label=label)
        return checked, checked.parameters
    shape = type_shape(schema, label)
    document = _without_type(shape.parameters)
    return (shape if document is shape.parameters else _Typed(shape, event_type)), document


def _without_type(document: dict[str, Any]) -> dict[str, Any]:
    """The schema without a field ``type``: that is the event's own, whatever a model sends."""
    inner = document
    reference = document.get("$ref")
    if isinstance(reference, str):
        inner = document.get("$defs", {}).get(reference.rpartition("/")[2], document)
    properties = inner.get("properties")
    if not isinstance(properties, Mapping) or "type" not in properties:
        return document
    kept = {key: value for key, value in properties.items() if key != "type"}
    changed = {**inner, "properties": kept}
    if "required" in inner:
        changed["required"] = [each for each in inner["required"] if each != "type"]
    if inner is document:
        return changed
    key = str(reference).rpartition("/")[2]
    return {**document, "$defs": {**document["$defs"], key: changed}}


def tool_names(types: Iterable[str], taken: set[str]) -> dict[str, str]:
    """``send_event_<TYPE>`` in characters that every provider takes; collisions are numbered."""
    names: dict[str, str] = {}
    for each in types:
        base = name = ("send_event_" + _NOT_IN_A_NAME.sub("_", each))[:_MAX_NAME]
        number = 1
        while name in taken:
            number += 1
            suffix = f"_{number}"
            name = base[: _MAX_NAME - len(suffix)] + suffix
        taken.add(name)
        names[each] = name
    return names


def get_accepted_events(snapshot: Snapshot) -> list[AgentEventDescriptor]:
    """The events that the active states can take, guards not evaluated.

    Args:
        snapshot: A kernel snapshot, e.g. ``interpreter.snapshot`` or ``step.snapshot``.

    Returns:
        A descriptor for each, in document order; none once the machine is done or in error. An
        event that only a wildcard takes is listed where the chart or a schema names it.

    Source: the design of statelyai/agent 2, getAcceptedEvents.

    Example:
        >>> from guardchart import create_machine, initial_transition
        >>> machine = create_machine({"id": "door", "initial": "shut", "states": {
        ...     "shut": {"on": {"door.open": "open"}}, "open": {"on": {"door.shut": "shut"}}}})
        >>> get_accepted_events(initial_transition(machine)[0])[0].tool_name
        'send_event_door_open'
    """
    table = event_table(snapshot.machine)
    return table.descriptors(accepted_events(snapshot, types=table.types))


# Narrowing


def narrowed(snapshot: Snapshot, allowed: AllowedEvents | None) -> list[AgentEventDescriptor]:
    """The candidates of a decision: what is allowed of what is accepted.

    Args:
        snapshot: The snapshot as it is now.
        allowed: What was declared; None allows everything.
    """
    table = event_table(snapshot.machine)
    if allowed is None:
        return table.descriptors(accepted_events(snapshot, types=table.types))
    wanted = as_patterns(allowed)
    exact = [each for each in wanted if not _is_pattern(each)]
    found = accepted_events(snapshot, types=(*table.types, *exact))
    return table.descriptors(
        each for each in found if any(matches_descriptor(pattern, each) for pattern in wanted)
    )


def as_patterns(allowed: Any) -> tuple[str, ...]:
    """A declaration as a tuple of types and patterns.

    Raises:
        AgentConfigError: It is no text and no list of texts.
    """
    given = (allowed,) if isinstance(allowed, str) else allowed
    if not isinstance(given, Iterable) or isinstance(given, Mapping | bytes):
        raise AgentConfigError("allowed_events must be event types, 'ns.*' or '*'")
    found = tuple(given)
    if not all(isinstance(each, str) and each for each in found):
        raise AgentConfigError("allowed_events must be event types, 'ns.*' or '*'")
    return found


def check_allowed(machine: Machine, allowed: Any) -> None:
    """Refuse names of events that no state of the machine can ever take.

    Raises:
        AgentConfigError: One is unknown, or the engine's own.
    """
    known = event_table(machine).types
    for each in as_patterns(allowed):
        if _is_pattern(each):
            fits = (
                each == "*"
                or any(matches_descriptor(each, one) for one in known)
                or any(_overlap(each, wildcard) for wildcard in machine.wildcards)
            )
        else:
            fits = each in known or _is_foreign(machine, each)
        if not fits:
            shown = ", ".join(known[:_SHOWN]) or "none"
            raise AgentConfigError(
                f"allowed_events names {each!r}, which no state of machine {machine.id!r} takes; "
                f"its events are: {shown}{', ...' if len(known) > _SHOWN else ''}"
            )


def _is_foreign(machine: Machine, event_type: str) -> bool:
    """Whether a wildcard takes an event that nobody names."""
    return not is_reserved(event_type) and machine.knows(event_type)


def _is_pattern(text: str) -> bool:
    return text == "*" or text.endswith(".*")


def _overlap(one: str, other: str) -> bool:
    if "*" in (one, other):
        return True
    return one[:-1].startswith(other[:-1]) or other[:-1].startswith(one[:-1])


# Payloads


def check_payload(descriptor: AgentEventDescriptor, event: Mapping[str, Any]) -> ChosenEvent:
    """The event with its payload as the schema has it; its type is the descriptor's.

    Args:
        descriptor: One of the candidates.
        event: What was chosen, ``{"type", **payload}``.

    Returns:
        A fresh dict in JSON types. Where a schema is known defaults are filled in and unknown
        fields refused, strictly; else any JSON within the gate's limits is accepted.

    Raises:
        ArgumentsRefused: It does not fit; the text names declared fields only.
        MissingExtraError: The schema came as JSON, and jsonschema is not installed.
    """
    payload = {key: value for key, value in event.items() if key != "type"}
    shape: PayloadShape | None = descriptor._shape
    if shape is None and descriptor.input_schema is not None:
        shape = descriptor._shape = DocumentShape(
            descriptor.type, descriptor.input_schema, label="an event of the request"
        )
    raw = admit(payload)
    payload = json.loads(raw) if shape is None else shape.load(payload, raw)[0]
    payload.pop("type", None)
    return {"type": descriptor.type, **payload}
