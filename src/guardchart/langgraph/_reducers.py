"""Reducers for state keys that hold snapshots, and the marks by which they tell updates apart.

LangGraph hands a reducer two values and no word of where they come from: what is there may be
from an earlier superstep or from a node beside. So a snapshot that a node writes says which task
wrote it and which snapshot that task had started from, at each level of nested graphs, because
the channel may be the parent's:

    "lineage": {"tasks": [outermost, ..., own], "from": [the snapshot each had started from]}

The own task's id is the written snapshot's name. An update fits if what is there is one of those
it started from: a comparison and a swap, so that no order of siblings loses a move. One that a
compiled chart writes while it still has work to do is ``"open"``: no graph around has seen it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from langgraph.config import get_config

from guardchart.errors import AgentConfigError, SnapshotConflictError
from guardchart.langgraph._state import is_blank, parse_snapshot

__all__ = [
    "LINEAGE",
    "lineage_after",
    "mark_open",
    "resuming_reducer",
    "snapshot_map_reducer",
    "snapshot_reducer",
]

LINEAGE: Final = "lineage"

_TEXT: Final = frozenset({str})
_ON_PURPOSE: Final = (
    "To go back or to start anew on purpose, write langgraph.types.Overwrite(...); nothing of "
    "this superstep was kept"
)
_REMEDY: Final = (
    "Give each machine a state key of its own (state_key=), keep one snapshot an item "
    "(snapshot_map_reducer), Send each item a state of its own, or leave the fan-out to "
    "statechart_graph, whose machine moves in one place. "
)


def snapshot_reducer(left: Any, right: Any) -> Any:
    """Take an update of a snapshot only if it starts from the snapshot that is there.

    For ``Annotated[dict, snapshot_reducer]``. With it, two nodes or two ``Send``s that move one
    machine in the same superstep are an error that says what to do, whatever their order;
    nothing of the superstep is kept.

    Args:
        left: What is there, or what a node beside has just written.
        right: The update.

    Returns:
        The update where nothing is there, or where it started from what is there, be it many
        revisions ago in a subgraph. What is there where the update says nothing new: the same,
        what it had started from itself, None or ``{}``.

    Raises:
        SnapshotConflictError: Anything else: two moves from one snapshot, another run or another
            machine, a much older snapshot, one edited by hand.
        AgentConfigError: Something that is no snapshot.

    Example:
        >>> first = {"rev": 1, "run": "r", "lineage": {"tasks": ["a"], "from": [""]}}
        >>> one = {"rev": 2, "run": "r", "lineage": {"tasks": ["b"], "from": ["a"]}}
        >>> two = {"rev": 2, "run": "r", "lineage": {"tasks": ["c"], "from": ["a"]}}
        >>> snapshot_reducer(snapshot_reducer({}, first), one) == one
        True
        >>> snapshot_reducer(snapshot_reducer(first, one), two)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
            ...
        guardchart.errors.SnapshotConflictError: two updates of one machine ...
    """
    if is_blank(right):
        return left
    new = parse_snapshot(right, "...")
    if is_blank(left):
        return right
    held = parse_snapshot(left, "...")
    if _name(held) in _marks(new, "from"):
        return right
    # A node beside may hand on the whole state it was given; that is no move.
    if new == held or _name(new) in _marks(held, "from"):
        return left
    raise SnapshotConflictError(_told(held, new))


def snapshot_map_reducer(left: Any, right: Any) -> Any:
    """Merge maps of one snapshot an item, ``{item_id: snapshot}``, each by `snapshot_reducer`.

    For ``Annotated[dict, snapshot_map_reducer]``: any number of items may move in one superstep,
    each of them once.

    Args:
        left: The map that is there.
        right: The items that were written; the others stay as they are.

    Returns:
        The merged map, a new dict.

    Raises:
        SnapshotConflictError: An item's update does not start from the snapshot that is there.
        AgentConfigError: Something that is no map of snapshots.

    Example:
        >>> merged = snapshot_map_reducer({"a": {"rev": 1}}, {"b": {"rev": 4}})
        >>> sorted(merged)
        ['a', 'b']
    """
    merged = dict(_map(left))
    for item, snapshot in _map(right).items():
        merged[item] = snapshot_reducer(merged.get(item), snapshot)
    return merged


def resuming_reducer(left: Any, right: Any) -> Any:
    """The last value, unless a parent hands its subgraph what that had started from long ago.

    The parent sees a subgraph's snapshot when the subgraph ends. New input to one that was cut
    off, or that waits for a person, brings the parent's, which is older.
    """
    if is_blank(left) or not isinstance(left, Mapping):
        return right
    new = {} if is_blank(right) else right
    return left if isinstance(new, Mapping) and _is_ahead(left, new) else right


def lineage_after(found: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The marks of a snapshot that the running task writes.

    Args:
        found: The snapshot that it started from, with its own marks; None for none.

    Returns:
        The marks; None outside of a graph, where nothing has to be told apart.
    """
    try:
        configurable = get_config().get("configurable") or {}
    except RuntimeError:
        return None
    tasks = _tasks(configurable)
    if not tasks:
        return None
    found = found or {}
    held, before = _marks(found, "tasks"), _marks(found, "from")
    # A task around the one that wrote what was found had started earlier, from what it had.
    shared, most = 0, min(len(tasks), len(held), len(before))
    while shared < most and _goes_on(tasks[shared], held[shared], found):
        shared += 1
    name = held[-1] if held else _name(found)
    return {"tasks": tasks, "from": [*before[:shared], *[name] * (len(tasks) - shared)]}


def mark_open(update: Mapping[str, Any], key: str) -> None:
    """Note in an update that the graph which writes its snapshot goes on."""
    snapshot = update.get(key)
    if isinstance(snapshot, dict) and LINEAGE in snapshot:
        snapshot[LINEAGE]["open"] = True


def _goes_on(task: str, held: str, found: Mapping[str, Any]) -> bool:
    if task == held:
        return True
    # A subgraph with a memory of its own that was cut off, taken up by a later run of its parent.
    name, at, _ = task.rpartition("@")
    return bool(at) and held.startswith(name + at) and _is_open(found)


def _is_ahead(left: Mapping[str, Any], right: Mapping[str, Any]) -> bool:
    """Whether ``left`` had started from ``right``, in a subgraph that has not come to its end."""
    return _is_open(left) and _name(right) in _marks(left, "from")


def _is_open(snapshot: Mapping[str, Any]) -> bool:
    lineage = snapshot.get(LINEAGE)
    return isinstance(lineage, Mapping) and lineage.get("open") is True


def _name(snapshot: Mapping[str, Any]) -> str:
    """What tells one written snapshot from another: its task, or what a bare one has."""
    if not snapshot:
        return ""
    tasks = _marks(snapshot, "tasks")
    return tasks[-1] if tasks else f"{snapshot.get('run')}@{snapshot.get('rev')}"


def _marks(snapshot: Mapping[str, Any], part: str) -> list[str]:
    """A part of the marks; state is untrusted, so that odd ones are none."""
    lineage = snapshot.get(LINEAGE)
    if lineage is None:
        return []
    known = type(lineage) is dict or isinstance(lineage, Mapping)
    marks = lineage.get(part) if known else None
    return marks if isinstance(marks, list) and _TEXT.issuperset(map(type, marks)) else []


def _tasks(configurable: Mapping[str, Any]) -> list[str]:
    """The running task and those around it, outermost first: ``"sub:<id>|node:<id>"``.

    A subgraph with a memory of its own stands there without an id; the parent's checkpoint tells
    one run of it from the next.
    """
    namespace = configurable.get("checkpoint_ns")
    if not isinstance(namespace, str) or not namespace:
        return []
    checkpoints = configurable.get("checkpoint_map") or {}
    tasks, parent = [], ""
    for part in namespace.split("|"):
        name, _, task = part.rpartition(":")
        tasks.append(task if name else f"{part}@{checkpoints.get(parent)}")
        parent = f"{parent}|{part}" if parent else part
    return tasks


def _map(value: Any) -> Mapping[Any, Any]:
    if is_blank(value):
        return {}
    if isinstance(value, Mapping):
        return value
    raise AgentConfigError(
        "snapshot_map_reducer: the state key holds a map of snapshots, {item_id: snapshot}, "
        f"not {type(value).__name__}"
    )


def _told(held: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    if _machine(held) != _machine(new):
        return (
            f"the snapshots of two machines were written to one state key. {_REMEDY}{_ON_PURPOSE}"
        )
    if held.get("run") != new.get("run"):
        return f"two runs of one machine were written to one state key. {_REMEDY}{_ON_PURPOSE}"
    return (
        "two updates of one machine were written in one superstep, or one that does not start "
        f"from the snapshot that is there. {_REMEDY}{_ON_PURPOSE}"
    )


def _machine(snapshot: Mapping[str, Any]) -> Any:
    machine = snapshot.get("machine")
    return machine.get("id") if isinstance(machine, Mapping) else None
