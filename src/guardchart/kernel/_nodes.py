"""The nodes of a compiled machine, and what hangs on them: names resolved, targets bound.

Built by `_compile` and not changed afterwards. All are compared and hashed by identity.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, cast

from guardchart.kernel._draft import ActionInfo
from guardchart.kernel._effects import CancelTimer, ScheduleTimer, StartService, StopService
from guardchart.kernel._events import AFTER
from guardchart.kernel._guards import Guard
from guardchart.kernel._specs import ActionSpec, InvokeSpec, NodeSpec, TransitionSpec, source_name

_NOTHING: Mapping[str, Any] = MappingProxyType({})


class Action:
    """A bound action: ``form`` 2, 3 or 4 is how many arguments ``fn`` takes."""

    __slots__ = ("fn", "form", "info", "name", "params")

    def __init__(self, spec: ActionSpec, fn: Callable[..., Any] | None, form: int) -> None:
        self.name = spec.name
        self.params = spec.params
        self.info = ActionInfo(spec.name, spec.params)
        self.fn = cast("Callable[..., Any]", fn)
        self.form = form


class Transition:
    """A transition with its targets resolved. Compared and hashed by identity."""

    __slots__ = (
        "actions", "description", "descriptor", "guard", "idle", "meta", "reenter", "source",
        "spec", "targets",
    )  # fmt: skip

    def __init__(
        self,
        source: StateNode,
        descriptor: str,
        spec: TransitionSpec,
        targets: tuple[StateNode, ...],
        guard: Guard | None,
        actions: tuple[Action, ...],
    ) -> None:
        self.source = source
        self.descriptor = descriptor
        self.spec = spec
        self.targets = targets
        self.guard = guard
        self.actions = actions
        self.reenter = spec.reenter
        self.meta = MappingProxyType(dict(spec.meta))
        self.description = spec.description
        self.idle = not targets and not actions

    def __repr__(self) -> str:
        return f"<Transition {self.source.id} on {self.descriptor!r}>"


class Invoke:
    """A service that runs while its state is active; ``start`` and ``stop`` are its effects."""

    __slots__ = (
        "description", "id", "input", "meta", "service", "settle", "spec", "src", "start", "stop",
    )  # fmt: skip

    def __init__(self, spec: InvokeSpec, id: str, service: Any, state_id: str) -> None:
        self.spec = spec
        self.id = id
        self.src = source_name(spec.src)
        self.input = spec.input
        self.service = service
        self.settle: Callable[..., Any] | None = getattr(service, "settle", None)
        self.meta = MappingProxyType(dict(spec.meta))
        self.description = spec.description
        self.start = StartService(id, self.src, state_id)
        self.stop = StopService(id)


class TimerDef:
    """An ``after`` delay of a state; ``delay`` is milliseconds or a function (context, event).

    ``schedule`` and ``cancel`` are its effects.
    """

    __slots__ = ("cancel", "delay", "event_type", "id", "name", "schedule")

    def __init__(self, name: str, state_id: str, delay: Any) -> None:
        self.name = name
        self.id = f"{name}.{state_id}"
        self.event_type = AFTER + self.id
        self.delay = delay
        self.schedule = ScheduleTimer(self.id)
        self.cancel = CancelTimer(self.id)


class StateNode:
    """One state of a compiled machine.

    ``order`` is its place in the document and ``last`` that of its last descendant, so that
    containment is two comparisons. ``states`` maps keys to children, history states included;
    ``children`` leaves those out.
    """

    __slots__ = (
        "_nodes",
        "always",
        "ancestors",
        "children",
        "description",
        "entry",
        "exit",
        "histories",
        "history",
        "history_target",
        "id",
        "initial",
        "invokes",
        "key",
        "last",
        "machine_id",
        "meta",
        "on",
        "order",
        "output",
        "parent",
        "path",
        "root",
        "spec",
        "states",
        "tags",
        "timers",
        "type",
        "wildcards",
    )  # fmt: skip

    def __init__(
        self,
        spec: NodeSpec,
        machine_id: str,
        parent: StateNode | None,
        order: int,
        nodes: Mapping[str, StateNode],
    ) -> None:
        self.spec = spec
        self.machine_id = machine_id
        self.key = spec.key or machine_id
        self.parent = parent
        self.path: tuple[str, ...] = () if parent is None else (*parent.path, spec.key)
        self.id = spec.id or ".".join((machine_id, *self.path))
        self.type = spec.type
        self.meta: Mapping[str, Any] = MappingProxyType(dict(spec.meta))
        self.tags = spec.tags
        self.description = spec.description
        self.output = spec.output
        self.history = spec.history
        self.history_target: tuple[StateNode, ...] = ()
        self.histories: tuple[StateNode, ...] = ()
        self.order = order
        self.last = order
        self.ancestors: tuple[StateNode, ...] = (
            () if parent is None else (parent, *parent.ancestors)
        )
        self.root: StateNode = self if parent is None else parent.root
        self._nodes: Mapping[str, StateNode] = nodes
        self.states: Mapping[str, StateNode] = _NOTHING
        self.children: tuple[StateNode, ...] = ()
        self.initial: Transition | None = None
        self.on: Mapping[str, tuple[Transition, ...]] = _NOTHING
        self.wildcards: tuple[str, ...] = ()
        self.always: tuple[Transition, ...] = ()
        self.entry: tuple[Action, ...] = ()
        self.exit: tuple[Action, ...] = ()
        self.invokes: tuple[Invoke, ...] = ()
        self.timers: tuple[TimerDef, ...] = ()

    def contains(self, other: StateNode) -> bool:
        """Tell whether ``other`` is a proper descendant."""
        return self.order < other.order <= self.last

    def recorded(self, ids: Iterable[str]) -> tuple[StateNode, ...]:
        """Return the states that a history record names."""
        return tuple(self._nodes[one] for one in ids)

    def __repr__(self) -> str:
        return f"<StateNode {self.id}>"


def find_by_id(nodes: Mapping[str, StateNode], text: str) -> StateNode | None:
    """Look up ``id`` or ``id.path``; the longest id that fits is the base of the path."""
    base = text
    while base:
        node = nodes.get(base)
        if node is not None:
            return descend(node, text[len(base) + 1 :])
        base = base.rpartition(".")[0]
    return None


def descend(node: StateNode, path: str) -> StateNode | None:
    """Look up a path of keys below a node; the empty path is the node itself."""
    found: StateNode | None = node
    for key in path.split(".") if path else ():
        found = found.states.get(key) if found is not None else None
    return found
