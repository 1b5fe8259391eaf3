"""Snapshots as JSON: written plainly, read as hostile input.

`load` believes nothing. It checks the size and nesting of what it is given, copies it while
checking that it is plain JSON, and then looks up every name in the machine, so that only a
snapshot the machine could have produced comes out. It calls no user code and imports nothing.

Neither direction shares a container: what `dump` returns and what `load` was given may be
changed afterwards without touching a snapshot.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from guardchart.errors import SnapshotDriftError, SnapshotError, StepError
from guardchart.kernel._effects import NO_EFFECTS, Effect, Effects, Spawn
from guardchart.kernel._events import InitEvent
from guardchart.kernel._legal import KNOWN, REQUIRED, LegalReader, check_keys, check_object
from guardchart.kernel._plain import MAX_BYTES, MAX_DEPTH, copy_json, parse_json, written_size
from guardchart.kernel._state import Child, DelayedSend, Snapshot

if TYPE_CHECKING:
    from guardchart.kernel._compile import Machine

__all__ = [
    "Drift",
    "dump",
    "interrupted",
    "load",
    "load_with_drift",
    "restart_services",
    "update_context",
]

FORMAT: Final = 1
# More than a snapshot's version, machine, rev and status take, the machine's names aside.
_FRAME_CHARS: Final = 400
_PARTS: Final = frozenset(
    {"id", "shape", "logic", "due_at", "src", "key", "input", "snapshot", "spawned", "target",
     "event", "type", "payload", "message"}
)  # fmt: skip
_PLAIN_ID: Final = re.compile(r"[A-Za-z_(][A-Za-z0-9_.()-]{0,63}", re.ASCII)

Migration = Callable[[dict[str, Any]], dict[str, Any] | None]


class Drift(NamedTuple):
    """How a snapshot and the machine it was restored into differ, the states being the same.

    Args:
        saved_version: The chart's version when the snapshot was taken; None where it had
            none, or one that is no plain word.
        version: The chart's version now.
        dropped: Paths in the snapshot that the machine declares no longer, left out.
        missing: Invoke ids of active states of which the snapshot knows nothing. They count
            as running when it was taken: `interrupted` lists them (under a key no step gave,
            ``"<id>@0"``) and `restart_services` starts them.
    """

    saved_version: str | None
    version: str | None
    dropped: tuple[str, ...]
    missing: tuple[str, ...]


def dump(
    snapshot: Snapshot, *, max_bytes: int = MAX_BYTES, max_depth: int = MAX_DEPTH
) -> dict[str, Any]:
    """Return a snapshot as plain JSON data.

    Args:
        snapshot: Any snapshot; it is not changed.
        max_bytes: Cap on the length of its JSON text, so that what is written can be read
            again: a host that raises it here raises it for `load`.
        max_depth: Cap on nested containers.

    Returns:
        A new dict that shares no container with the snapshot.

    Raises:
        SnapshotError: The context, an input or the output is not JSON or is beyond a cap;
            the path says where. The snapshot is unchanged.

    >>> from guardchart.kernel import create_machine, initial_transition
    >>> machine = create_machine({"id": "lamp", "initial": "off", "states": {"off": {}}})
    >>> dump(initial_transition(machine)[0])["state_ids"]
    ['lamp.off']
    """
    rev, status, view, config, rest = snapshot
    context = view.copy()
    machine: Machine = config.machine
    # What comes before this is the machine's own word, and needs no second look.
    state: dict[str, Any] = {
        "value": config.value,
        "state_ids": sorted(config.ids),
        # A view may be of a subclass of dict, which is no JSON.
        "context": context if type(context) is dict else dict(context),
        "history": {key: list(ids) for key, ids in rest.history.items()},
        "timers": {key: {"due_at": timer.due_at} for key, timer in rest.timers.items()},
        "children": {key: _dump_child(child) for key, child in rest.children.items()},
        "output": rest.output,
        "error": None if rest.error is None else dict(rest.error),
    }
    if rest.sends:
        state["sends"] = {key: _dump_send(send) for key, send in rest.sends.items()}
    if rest.run is not None:
        state["run"] = rest.run
    if rest.batch_no:
        state["batch_no"] = rest.batch_no
    copy, size = copy_json(state, max_bytes, max_depth, _Names(machine))
    data = {
        "version": FORMAT,
        "machine": machine.stamp.copy(),
        "rev": rev,
        "status": status,
        **copy,
    }
    # Thirteen: a float of 24 digits and its comma are counted as two. A character takes no more
    # than twelve, a surrogate pair written as two escapes.
    most = 13 * (size + len(machine.id) + len(machine.version or "") + _FRAME_CHARS)
    if most > max_bytes and written_size(data) > max_bytes:
        raise SnapshotError(f"larger than max_bytes={max_bytes}")
    return data


def load(
    machine: Machine,
    data: dict[str, Any] | str,
    *,
    max_bytes: int = MAX_BYTES,
    max_depth: int = MAX_DEPTH,
    trusted: bool = False,
    migrate: Migration | None = None,
) -> Snapshot:
    """Return the snapshot that JSON data describes, or refuse it; nothing in between.

    Args:
        machine: The machine it has to fit; it need not be bound to logic.
        data: A dict of plain JSON types or JSON text, from anywhere. It is not changed, and
            changing it later changes no snapshot. A host's ``seal``, ``receipt`` and
            ``lineage`` are taken off before.
        max_bytes: Cap on the size: UTF-8 bytes of text; of a dict the characters of its
            keys and strings and the least punctuation.
        max_depth: Cap on nested containers, the snapshot being the first.
        trusted: The host's word that the data is its own (its store, a checked seal).
            Delayed sends and spawned children load only then.
        migrate: Called with a private copy of a snapshot whose states do not fit; returns
            one that does (its ``machine`` entry is not looked at), or None to refuse.

    Returns:
        A snapshot equal to the one that was dumped. Restoring starts nothing.

    Raises:
        SnapshotDriftError: It was taken from another machine or another shape of this one
            and no migration mended that.
        SnapshotError: Anything else is wrong; ``path`` says where. No value of the data is
            repeated in the message.

    Source: docs/semantics.md, Snapshots.
    """
    return load_with_drift(
        machine, data, max_bytes=max_bytes, max_depth=max_depth, trusted=trusted, migrate=migrate
    )[0]


def load_with_drift(
    machine: Machine,
    data: dict[str, Any] | str,
    *,
    max_bytes: int = MAX_BYTES,
    max_depth: int = MAX_DEPTH,
    trusted: bool = False,
    migrate: Migration | None = None,
) -> tuple[Snapshot, Drift | None]:
    """Do what `load` does, and say what has changed since the snapshot was taken.

    Returns:
        The snapshot, and None where the chart is the same to the letter, else a `Drift`.

    Raises:
        SnapshotError: As `load`.
    """
    if type(data) is str:
        plain = _plain_dict(parse_json(data, max_bytes), machine, max_bytes, max_depth, owned=True)
    else:
        plain = _plain_dict(data, machine, max_bytes, max_depth)
    saved = _header(plain)
    misfit = _misfit(machine, saved)
    if misfit is not None:
        if migrate is None:
            raise misfit
        plain = _plain_dict(_migrated(migrate, plain, misfit), machine, max_bytes, max_depth)
        _frame(plain)
    lenient = misfit is not None or saved["logic"] != machine.logic_digest
    reader = LegalReader(machine, trusted, lenient)
    snapshot = reader.snapshot(plain)
    if not lenient:
        return snapshot, None
    version = saved["version"]
    if version is not None and not _PLAIN_ID.fullmatch("_" + version):
        version = None
    drift = Drift(version, machine.version, tuple(reader.dropped), tuple(reader.missing))
    return snapshot, drift


def interrupted(snapshot: Snapshot) -> list[str]:
    """Return the keys of the children recorded as running, in the order they were started.

    After a restore none of them runs any more: a host that does not restart them reports
    each by ``failed(key, ServiceInterruptedError(...))``.
    """
    return [child.key for child in snapshot.children.values() if child.status == "active"]


def restart_services(machine: Machine, snapshot: Snapshot) -> tuple[Snapshot, Effects]:
    """Start again what ran when the snapshot was taken: a step, so every key is a new one.

    Only for a snapshot that is the host's own. Started are the invokes of active states that
    are not recorded as done or in error, their input computed anew, and the spawned children
    still recorded as running whose source the logic knows by name.

    Args:
        machine: A bound machine.
        snapshot: One of its snapshots; it is not changed. Pending timers keep their due time.

    Returns:
        The next snapshot and the effects that start its children; the same snapshot and no
        effects where nothing has to be started.

    Raises:
        ChartError: The machine is unbound.
        StepError: An invoke's ``input`` raised; nothing was started.
    """
    machine.require_bound()
    if snapshot.status != "active":
        return snapshot, NO_EFFECTS
    rev = snapshot.rev + 1
    children = snapshot.children.copy()
    effects: list[Effect] = []
    for node in snapshot.config.nodes:
        for invoke in node.invokes:
            child = children.get(invoke.id)
            if child is not None and child.status != "active":
                continue
            given = invoke.input
            if callable(given):
                try:
                    given = given(snapshot.context, InitEvent())
                except Exception as error:
                    raise StepError(
                        f"the input of invoke {invoke.id!r} raised {type(error).__name__}; "
                        "nothing was restarted"
                    ) from error
            kept = None if child is None else child.snapshot
            key = f"{invoke.id}@{rev}"
            children[invoke.id] = Child(invoke.src, key, "active", given, kept, False, node.id)
            effects.append(invoke.start)
    services = getattr(machine.logic, "services", None) or {}
    for name, child in snapshot.children.items():
        if child.spawned and child.status == "active" and child.src in services:
            children[name] = child._replace(key=f"{name}@{rev}")
            effects.append(Spawn(name, child.src, child.input))
    if not effects:
        return snapshot, NO_EFFECTS
    return snapshot.replace(rev=rev, children=MappingProxyType(children)), tuple(effects)


def update_context(snapshot: Snapshot, updates: Mapping[str, Any]) -> Snapshot:
    """Return a snapshot with some keys of its context replaced, and ``rev`` + 1.

    The one way to write context outside a step; a host records it in its log.

    Args:
        snapshot: It is not changed.
        updates: New values by key, merged shallowly.

    Raises:
        SnapshotError: A key is no string.
    """
    if not all(type(key) is str for key in updates):
        raise SnapshotError("the keys of a context must be strings", path="$.context")
    context = MappingProxyType(snapshot.context | dict(updates))
    return snapshot.replace(context=context, rev=snapshot.rev + 1)


def _dump_child(child: Child) -> dict[str, Any]:
    data: dict[str, Any] = {"src": child.src, "key": child.key, "status": child.status}
    if child.input is not None:
        data["input"] = child.input
    if child.snapshot is not None:
        data["snapshot"] = child.snapshot
    if child.spawned:
        data["spawned"] = True
    return data


def _dump_send(send: DelayedSend) -> dict[str, Any]:
    event = {"type": send.event.type, "payload": send.event.payload}
    return {"due_at": send.due_at, "target": send.target, "event": event}


class _Names:
    """The keys that an error's path may show: the format's and the chart's own."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def __contains__(self, name: object) -> bool:
        machine = self._machine
        return (
            name in KNOWN
            or name in _PARTS
            or name in machine.context
            or name in machine.nodes
            or name in machine.timers
            or any(name == invoke.id for node in machine.order for invoke in node.invokes)
        )


def _plain_dict(
    found: object, machine: Machine, max_bytes: int, max_depth: int, *, owned: bool = False
) -> dict[str, Any]:
    if type(found) is not dict:
        raise SnapshotError("a snapshot is an object, or JSON text of one")
    return copy_json(found, max_bytes, max_depth, _Names(machine), owned=owned)[0]


def _frame(data: dict[str, Any]) -> None:
    check_keys(data, "$", REQUIRED, KNOWN)
    if type(data["version"]) is not int or data["version"] != FORMAT:
        raise SnapshotError(f"this release reads snapshot version {FORMAT}", path="$.version")


def _header(data: dict[str, Any]) -> dict[str, Any]:
    """Check what has to hold before the snapshot can be told to fit or not."""
    _frame(data)
    saved = check_object(data["machine"], "$.machine")
    parts = ("id", "version", "shape", "logic")
    check_keys(saved, "$.machine", parts, parts)
    for part in parts:
        if type(saved[part]) is not str and not (part == "version" and saved[part] is None):
            raise SnapshotError("must be a string", path=f"$.machine.{part}")
    return saved


def _misfit(machine: Machine, saved: Mapping[str, str]) -> SnapshotDriftError | None:
    if saved["id"] != machine.id:
        # The other id is the sender's word: shown only where it cannot be anything but a name.
        other = saved["id"]
        source = f"machine {other!r}" if _PLAIN_ID.fullmatch(other) else "another machine"
        return SnapshotDriftError(
            f"snapshot was taken from {source} but is being restored into {machine.id!r}",
            path="$.machine.id",
        )
    if saved["shape"] != machine.shape:
        return SnapshotDriftError(
            f"structure changed: the states of machine {machine.id!r} are not those of the "
            "snapshot; give a migration, or start anew",
            path="$.machine.shape",
        )
    return None


def _migrated(migrate: Migration, data: dict[str, Any], misfit: SnapshotDriftError) -> object:
    try:
        found = migrate(data)
    except Exception as error:
        raise SnapshotDriftError(
            f"the migration failed with {type(error).__name__}", path=misfit.path
        ) from error
    if found is None:
        raise misfit
    return found
