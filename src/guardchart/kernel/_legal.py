"""What a snapshot may say: from plain JSON data to a legal `Snapshot`, or one error.

The data has been copied and holds plain JSON types only. Here every name is looked up, the
configuration has to be complete and consistent with the status, and what is pending has to
be declared by an active state.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Set
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NoReturn

from guardchart.errors import SnapshotError
from guardchart.kernel._events import Event, is_reserved
from guardchart.kernel._state import EMPTY, NO_REST, Child, DelayedSend, Rest, Snapshot, Timer

if TYPE_CHECKING:
    from guardchart.kernel._compile import Machine
    from guardchart.kernel._configuration import Configuration
    from guardchart.kernel._nodes import Invoke, StateNode

__all__ = ["KNOWN", "REQUIRED", "LegalReader", "check_keys", "check_object"]

REQUIRED: Final = ("version", "machine", "rev", "status", "value", "context")
KNOWN: Final = frozenset(REQUIRED) | {
    "history", "timers", "children", "output", "error", "state_ids", "configuration", "sends",
    "run", "batch_no",
}  # fmt: skip
_HOSTS: Final = ("seal", "receipt", "lineage")
_STATUSES: Final = ("active", "done", "error")
_REV_LIMIT: Final = 2**53
_TIME_LIMIT: Final = 1.7976931348623157e308
_RUN_CHARS: Final = 500
_ERROR_CHARS: Final = 500
_KEY_REV: Final = re.compile(r"0|[1-9][0-9]{0,15}", re.ASCII)
_CHILD: Final = ("src", "key", "status")
_CHILD_KNOWN: Final = frozenset(_CHILD) | {"input", "snapshot", "spawned"}


class LegalReader:
    """Reads one snapshot; thrown away afterwards.

    Args:
        machine: What the snapshot has to fit.
        trusted: Whether delayed sends and spawned children are read.
        lenient: Whether timers, children and history that the chart no longer declares are
            left out (``dropped`` lists their paths) instead of refused, and invokes the
            snapshot does not know (``missing``) count as interrupted.
    """

    def __init__(self, machine: Machine, trusted: bool, lenient: bool) -> None:
        self._machine = machine
        self._trusted = trusted
        self._lenient = lenient
        self.dropped: list[str] = []
        self.missing: list[str] = []

    def snapshot(self, data: dict[str, Any]) -> Snapshot:
        """Return the snapshot, or raise `SnapshotError`."""
        rev = _whole(data["rev"], "$.rev")
        status = data["status"]
        if type(status) is not str or status not in _STATUSES:
            _refuse("must be 'active', 'done' or 'error'", "$.status")
        config = self._configuration(data, status)
        context = MappingProxyType(check_object(data["context"], "$.context"))
        return Snapshot(rev, status, context, config, self._rest(data, rev, status, config))

    # The configuration

    def _configuration(self, data: dict[str, Any], status: str) -> Configuration:
        leaves: list[StateNode] = []
        _leaves(self._machine.root, data["value"], "$.value", leaves)
        config = self._machine.configuration(leaves)
        if "state_ids" in data:
            _agree(data["state_ids"], config.ids, "$.state_ids")
        if "configuration" in data:
            _agree(data["configuration"], {n.id for n in config.nodes}, "$.configuration")
        over = _is_done(self._machine.root, config)
        if status == "done" and not over:
            _refuse("'done' without a final configuration", "$.status")
        if status == "active" and over:
            _refuse("'active' in a final configuration", "$.status")
        return config

    # What is pending

    def _rest(self, data: dict[str, Any], rev: int, status: str, config: Configuration) -> Rest:
        output = data.get("output")
        if output is not None and status != "done":
            _refuse("only a machine that is done has output", "$.output")
        run = data.get("run")
        if run is not None:
            _text(run, "$.run", _RUN_CHARS)
        rest = Rest(
            history=self._history(data),
            timers=self._timers(data, status, config),
            children=self._children(data, rev, status, config),
            sends=self._sends(data, status),
            output=output,
            error=_error(data.get("error"), status),
            run=run,
            batch_no=_whole(data.get("batch_no", 0), "$.batch_no"),
        )
        return NO_REST if rest == NO_REST else rest

    def _undeclared(self, what: str, path: str) -> None:
        if not self._lenient:
            _refuse(f"no active state declares this {what}", path)
        self.dropped.append(path)

    def _history(self, data: dict[str, Any]) -> Any:
        found: dict[str, tuple[str, ...]] = {}
        records = check_object(data.get("history", {}), "$.history")
        for position, (key, value) in enumerate(records.items()):
            node = self._machine.nodes.get(key)
            if node is None or node.type != "history":
                _refuse("not a history state", f"$.history.<key {position + 1}>")
            found[key] = self._record(node, _texts(value, f"$.history.{key}"), f"$.history.{key}")
        return MappingProxyType(found) if found else EMPTY

    def _record(self, history: StateNode, ids: list[str], path: str) -> tuple[str, ...]:
        parent = history.parent
        assert parent is not None
        nodes: list[StateNode] = []
        for index, name in enumerate(ids):
            node = self._machine.nodes.get(name)
            if node is None or not parent.contains(node) or node.type == "history":
                _refuse("not a state this history can restore", f"{path}[{index}]")
            nodes.append(node)
        if history.history == "deep":
            active = {one for node in nodes for one in (node, *node.ancestors)}
            whole = not any(node.children for node in nodes) and _complete(parent, active)
        else:
            wanted = len(parent.children) if parent.type == "parallel" else 1
            whole = len(nodes) == wanted and all(node.parent is parent for node in nodes)
        if not whole:
            _refuse("not a complete record", path)
        return tuple(node.id for node in sorted(nodes, key=lambda node: node.order))

    def _timers(self, data: dict[str, Any], status: str, config: Configuration) -> Any:
        found: dict[str, Timer] = {}
        timers = check_object(data.get("timers", {}), "$.timers")
        if timers and status != "active":
            _refuse("only an active machine has timers", "$.timers")
        for position, (key, value) in enumerate(timers.items()):
            declared = self._machine.timers.get(key)
            if declared is None or declared[0] not in config.active:
                self._undeclared("timer", f"$.timers.<key {position + 1}>")
                continue
            path = f"$.timers.{key}"
            check_keys(check_object(value, path), path, ("due_at",), ("due_at",))
            found[key] = Timer(_time(value["due_at"], path + ".due_at"))
        return MappingProxyType(found) if found else EMPTY

    def _children(self, data: dict[str, Any], rev: int, status: str, config: Configuration) -> Any:
        children = check_object(data.get("children", {}), "$.children")
        if children and status != "active":
            _refuse("only an active machine has children", "$.children")
        declared = {
            invoke.id: (node, invoke) for node in config.nodes for invoke in node.invokes
        }  # fmt: skip
        found: dict[str, Child] = {}
        for position, (key, value) in enumerate(children.items()):
            owner = declared.get(key)
            hidden = f"$.children.<key {position + 1}>"
            path = hidden if owner is None else f"$.children.{key}"
            check_keys(check_object(value, path), path, _CHILD, _CHILD_KNOWN)
            child = _child(key, value, rev, path)
            if child.spawned:
                if not self._trusted:
                    _refuse("spawned children load only from a trusted snapshot", path)
                if owner is not None:
                    _refuse("an invoke has this id", path)
                found[key] = child
            elif owner is None or owner[1].src != child.src:
                self._undeclared("child", path)
            else:
                found[key] = child._replace(state_id=owner[0].id)
        if status == "active":
            self._require(declared, found)
        return MappingProxyType(found) if found else EMPTY

    def _require(
        self, declared: dict[str, tuple[StateNode, Invoke]], found: dict[str, Child]
    ) -> None:
        for key, (node, invoke) in declared.items():
            if key in found:
                continue
            if self._lenient:
                # Recorded as running under a key that no step ever gave, so that a host finds
                # it interrupted like any other and the machine does not wait for nobody.
                found[key] = Child(invoke.src, f"{key}@0", state_id=node.id)
                self.missing.append(key)
            elif self._machine.policy != "continue" or not callable(invoke.input):
                # Under 'continue' a step passes over an invoke whose input raised.
                _refuse("lacks a child that an active state invokes", f"$.children.{key}")

    def _sends(self, data: dict[str, Any], status: str) -> Any:
        if "sends" not in data:
            return EMPTY
        if not self._trusted:
            _refuse("delayed sends load only from a trusted snapshot", "$.sends")
        sends = check_object(data["sends"], "$.sends")
        if sends and status != "active":
            _refuse("only an active machine has delayed sends", "$.sends")
        found: dict[str, DelayedSend] = {}
        for position, (key, value) in enumerate(sends.items()):
            path = f"$.sends.<key {position + 1}>"
            if key in self._machine.timers:
                _refuse("a timer has this id", path)
            parts = ("due_at", "target", "event")
            check_keys(check_object(value, path), path, parts, parts)
            due_at = _time(value["due_at"], path + ".due_at")
            target = value["target"]
            if target is not None:
                _text(target, path + ".target", _RUN_CHARS)
            found[key] = DelayedSend(due_at, target, _event(value["event"], path + ".event"))
        return MappingProxyType(found) if found else EMPTY


def _agree(value: object, ids: Set[str], path: str) -> None:
    names = _texts(value, path)
    if len(names) != len(ids) or not all(name in ids for name in names):
        _refuse("disagrees with 'value'", path)


def _leaves(node: StateNode, value: object, path: str, found: list[StateNode]) -> None:
    """Collect the leaves a state value names. As deep as the chart at most."""
    if node.type == "parallel":
        if type(value) is not dict or len(value) != len(node.children):
            _refuse("must name every region once", path)
        for region in node.children:
            if region.key not in value:
                _refuse("must name every region once", path)
            _leaves(region, value[region.key], f"{path}.{region.key}", found)
        return
    if not node.children:
        if type(value) is not dict or value:
            _refuse("a state without children has the value {}", path)
        found.append(node)
        return
    key: Any = value
    below: Any = None
    if type(value) is dict:
        if len(value) != 1:
            _refuse("must name exactly one child", path)
        key, below = next(iter(value.items()))
    if type(key) is not str:
        _refuse("must be a state's key or an object", path)
    child = node.states.get(key)
    if child is None or child.type == "history":
        _refuse("not a state of this machine", path)
    if type(value) is dict:
        if not child.children:
            _refuse("a state without children is named by its key", path)
        _leaves(child, below, f"{path}.{child.key}", found)
    elif child.children:
        _refuse("does not say which of its children are active", path)
    else:
        found.append(child)


def _complete(node: StateNode, active: set[StateNode]) -> bool:
    """Tell whether ``active`` holds a whole, legal set of descendants of ``node``."""
    below = [child for child in node.children if child in active]
    if len(below) != (
        len(node.children) if node.type == "parallel" else min(1, len(node.children))
    ):
        return False
    return all(_complete(child, active) for child in below)


def _is_done(node: StateNode, config: Configuration) -> bool:
    if node.type == "parallel":
        return all(_is_done(region, config) for region in node.children)
    if node.type == "final":
        return True
    return any(child.type == "final" and child in config.active for child in node.children)


def _child(key: str, value: dict[str, Any], rev: int, path: str) -> Child:
    src = _text(value["src"], path + ".src", 1_000)
    status = value["status"]
    if type(status) is not str or status not in _STATUSES:
        _refuse("must be 'active', 'done' or 'error'", path + ".status")
    name, at, started = _text(value["key"], path + ".key", len(key) + 20).rpartition("@")
    if name != key or not at or not _KEY_REV.fullmatch(started) or int(started) > rev:
        _refuse(
            "must be the child's id, '@' and the rev of the step that started it", path + ".key"
        )
    inner = value.get("snapshot")
    if inner is not None:
        check_object(inner, path + ".snapshot")
    spawned = value.get("spawned", False)
    if type(spawned) is not bool:
        _refuse("must be true or false", path + ".spawned")
    return Child(src, value["key"], status, value.get("input"), inner, spawned)


def _event(value: object, path: str) -> Event:
    event = check_object(value, path)
    check_keys(event, path, ("type", "payload"), ("type", "payload"))
    kind = _text(event["type"], path + ".type", 1_000)
    if not kind or is_reserved(kind):
        _refuse("not a type an action could have sent", path + ".type")
    return Event(kind, check_object(event["payload"], path + ".payload"))


def _error(value: object, status: str) -> Any:
    if (value is None) != (status != "error"):
        _refuse("an error goes with the status 'error', and only with it", "$.error")
    if value is None:
        return None
    error = check_object(value, "$.error")
    check_keys(error, "$.error", ("type", "message"), ("type", "message"))
    for part in ("type", "message"):
        _text(error[part], f"$.error.{part}", _ERROR_CHARS)
    return MappingProxyType(error)


def check_keys(
    data: dict[str, Any], path: str, required: Iterable[str], known: Iterable[str]
) -> None:
    """Refuse an object that lacks a required key or has one that is not known."""
    for key in required:
        if key not in data:
            _refuse(f"lacks {key!r}", path)
    for position, key in enumerate(data):
        if key not in known:
            if path == "$" and key in _HOSTS:
                _refuse(f"{key!r} is the host's, to be checked and removed before", path)
            _refuse("unknown key", f"{path}.<key {position + 1}>")


def check_object(value: object, path: str) -> dict[str, Any]:
    """Return the value if it is an object, else refuse it."""
    if type(value) is not dict:
        _refuse("must be an object", path)
    return value


def _refuse(message: str, path: str) -> NoReturn:
    raise SnapshotError(message, path=path)


def _texts(value: object, path: str) -> list[str]:
    if type(value) is not list or not all(type(item) is str for item in value):
        _refuse("must be a list of strings", path)
    if len(set(value)) != len(value):
        _refuse("names something twice", path)
    return value


def _text(value: object, path: str, limit: int) -> str:
    if type(value) is not str or len(value) > limit:
        _refuse(f"must be a string of at most {limit} characters", path)
    return value


def _whole(value: object, path: str) -> int:
    if type(value) is not int or not 0 <= value < _REV_LIMIT:
        _refuse("must be a whole number from 0", path)
    return value


def _time(value: object, path: str) -> float:
    # Python's integers have no bound, but a host does floating point with them.
    if (type(value) is not float and type(value) is not int) or abs(value) > _TIME_LIMIT:
        _refuse("must be a finite number of milliseconds", path)
    return value
