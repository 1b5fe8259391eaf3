"""Compile a checked chart into a `Machine`: nodes, targets, transition tables, digests.

Everything a step would otherwise look up by name is resolved here, once: targets become
nodes, names become functions with a known form, delays become numbers where they can.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from guardchart.errors import ChartError
from guardchart.kernel import _digest
from guardchart.kernel._callables import (
    ACTION_FORMS,
    DELAY_FORMS,
    SERVICE_FORMS,
    form_of,
    refuse_async,
)
from guardchart.kernel._checks import check_eventless, check_invoke_ids, check_joint
from guardchart.kernel._config import copy_config, read_chart
from guardchart.kernel._configuration import Configuration, PlanCache
from guardchart.kernel._delays import checked_delay, literal_delay
from guardchart.kernel._draft import clone, is_scalar
from guardchart.kernel._events import DONE_ACTOR, DONE_STATE, ERROR_ACTOR, SNAPSHOT_ACTOR
from guardchart.kernel._guards import bind_guard
from guardchart.kernel._nodes import (
    Action,
    Invoke,
    StateNode,
    TimerDef,
    Transition,
    descend,
    find_by_id,
)
from guardchart.kernel._purity import watched
from guardchart.kernel._specs import (
    ActionSpec,
    ChartSpec,
    GuardSpec,
    InvokeSpec,
    NodeSpec,
    TransitionSpec,
    source_name,
)

if TYPE_CHECKING:
    from guardchart.kernel._state import Snapshot

_NOTHING: Mapping[str, Any] = MappingProxyType({})


class Machine:
    """A compiled chart: immutable, shared between threads, without any running state.

    ``id``, ``version``, ``context`` (declared), ``strict``, ``policy`` and ``max_microsteps``
    are the chart's; ``root`` is its top node, ``states`` the root's children by key, ``nodes``
    every node by id. ``shape`` and ``logic_digest`` identify the state tree and all the rest.

    >>> machine = create_machine({"id": "lamp", "initial": "off", "states": {"off": {}, "on": {}}})
    >>> machine.id, sorted(machine.nodes), machine.bound
    ('lamp', ['lamp', 'lamp.off', 'lamp.on'], True)
    """

    def __init__(self, spec: ChartSpec, logic: Any, check_purity: bool) -> None:
        self._spec = spec
        self._check_purity = check_purity
        self.id = spec.id
        self.version = spec.version
        self.context: MappingProxyType[str, Any] = MappingProxyType(copy_config(spec.context))
        self._nested = tuple(key for key, value in self.context.items() if not is_scalar(value))
        self.strict = spec.strict
        self.policy = spec.policy
        self.max_microsteps = spec.max_microsteps
        self.logic = logic
        built = _Builder(spec, logic, check_purity)
        self.root = built.root
        self.states: Mapping[str, StateNode] = self.root.states
        self.nodes: Mapping[str, StateNode] = MappingProxyType(built.nodes)
        self.order: tuple[StateNode, ...] = tuple(built.order)
        self.meta: Mapping[str, Any] = self.root.meta
        self.timers: Mapping[str, tuple[StateNode, TimerDef]] = MappingProxyType(built.timers)
        self.missing: tuple[str, ...] = tuple(built.missing)
        self.bound = not self.missing
        self.event_types: frozenset[str] = frozenset(built.event_types)
        self.wildcards: tuple[str, ...] = tuple(
            sorted(built.wildcards, key=len, reverse=True)
        )  # fmt: skip
        self.settling: frozenset[str] = frozenset(
            invoke.id for node in self.order for invoke in node.invokes if invoke.settle
        )
        self.eventless = any(node.always for node in self.order)
        self.shape = _digest.shape(spec, self.order)
        self.logic_digest = _digest.logic(spec)
        # What a snapshot says of it: plain texts, whatever kind of text the chart came with.
        self.stamp: MappingProxyType[str, str | None] = MappingProxyType(
            {
                "id": f"{self.id}",
                "version": None if self.version is None else f"{self.version}",
                "shape": self.shape,
                "logic": self.logic_digest,
            }
        )
        self.cache = PlanCache(self)

    @property
    def source_name(self) -> str:
        """What a snapshot calls a child that runs this machine: its id."""
        return self.id

    def __repr__(self) -> str:
        return f"<Machine {self.id!r}>"

    def __deepcopy__(self, memo: dict[int, Any]) -> Machine:
        return self

    def __copy__(self) -> Machine:
        return self

    def with_logic(self, logic: Any) -> Machine:
        """Return this machine bound to other logic.

        Raises:
            ChartError: a function of the logic has no form the kernel can call.
        """
        return _finish(Machine(self._spec, logic, self._check_purity))

    def require_bound(self) -> None:
        """Refuse to run a machine with names that nothing implements.

        Raises:
            ChartError: listing every missing name with its JSON path.
        """
        if self.missing:
            raise ChartError(f"machine {self.id!r} lacks logic: {'; '.join(self.missing)}")

    def configuration(self, leaves: Iterable[StateNode]) -> Configuration:
        """Return the configuration with these active leaves, the same object each time.

        The caller vouches that they are a legal set; their ancestors are added.
        """
        active: set[StateNode] = set()
        for leaf in leaves:
            active.add(leaf)
            active.update(leaf.ancestors)
        return self.cache.intern(active)

    def fresh_context(self) -> dict[str, Any]:
        """Return a copy of the declared context that shares no container with it."""
        context = self.context.copy()
        memo: dict[int, Any] = {}
        for key in self._nested:
            context[key] = clone(context[key], memo)
        return context

    def knows(self, event_type: str) -> bool:
        """Tell whether any state, active or not, has a descriptor for this event type."""
        return event_type in self.event_types or bool(self.cache.wildcards_of(event_type))

    def resolve(self, text: str) -> StateNode | None:
        """Return the node that an id, ``"#id"`` or ``"#id.path"`` names, or None."""
        return find_by_id(self.nodes, text.removeprefix("#"))

    def accepted_events(self, snapshot: Snapshot) -> Any:
        """The event types the snapshot's active states can take; guards not evaluated."""
        from guardchart.kernel._analysis import accepted_events

        return accepted_events(snapshot)

    def can(self, snapshot: Snapshot, event: Any) -> bool:
        """Whether the event would do anything now; guards evaluated with its payload."""
        from guardchart.kernel._analysis import can

        return can(snapshot, event)

    def to_mermaid(self, snapshot: Snapshot | None = None) -> str:
        """The chart as a Mermaid state diagram, active states marked."""
        from guardchart.kernel._analysis import to_mermaid

        return to_mermaid(self, snapshot)


def create_machine(
    config: Mapping[str, Any] | str,
    logic: Any = None,
    *,
    strict_config: bool = True,
    check_purity: bool = False,
) -> Machine:
    """Compile a Stately/XState chart.

    Args:
        config: the chart as a mapping or JSON text; it is never changed.
        logic: an object with the dicts ``actions``, ``guards``, ``services`` and ``delays``.
            Without it, or with names missing, the machine is *unbound*: it can be inspected,
            routed and drawn, and running it raises.
        strict_config: accepted for compatibility; every check is always on.
        check_purity: wrap actions and guards so that one which changes a value inside the
            context it was given is found; for development, it copies the context each time.

    Returns:
        The machine.

    Raises:
        ChartError: with the JSON path of what is wrong.

    Source: XState 5, ``createMachine``.

    >>> machine = create_machine({"id": "lamp", "initial": "off", "states": {
    ...     "off": {"on": {"TOGGLE": "on"}}, "on": {"on": {"TOGGLE": "off"}}}})
    >>> sorted(machine.states)
    ['off', 'on']
    """
    del strict_config
    return _finish(Machine(read_chart(config), logic, check_purity))


def _finish(machine: Machine) -> Machine:
    hook = getattr(machine.logic, "on_machine", None)
    if callable(hook):
        hook(machine)
    for node in machine.order:
        for invoke in node.invokes:
            # A service may look at the chart that invokes it, and refuse it.
            check = getattr(invoke.service, "on_machine", None)
            if callable(check):
                check(machine, invoke)
    return machine


class _Builder:
    """Builds the nodes of one machine; thrown away afterwards."""

    def __init__(self, spec: ChartSpec, logic: Any, check_purity: bool) -> None:
        self.spec = spec
        self.tables = {
            kind: _table(logic, kind) for kind in ("actions", "guards", "services", "delays")
        }
        self.purity = check_purity
        self.nodes: dict[str, StateNode] = {}
        self.order: list[StateNode] = []
        self.timers: dict[str, tuple[StateNode, TimerDef]] = {}
        self.missing: dict[str, None] = {}
        self.event_types: set[str] = set()
        self.wildcards: set[str] = set()
        self._fns: dict[tuple[int, str], tuple[Callable[..., Any], int]] = {}
        self.root = self.node(spec.root, None)
        for node in self.order:
            self.wire(node)
        check_invoke_ids(self.order)
        check_eventless(self.order)

    def node(self, spec: NodeSpec, parent: StateNode | None) -> StateNode:
        node = StateNode(spec, self.spec.id, parent, len(self.order), self.nodes)
        if node.id in self.nodes:
            raise ChartError(f"the state id {node.id!r} is used twice", path=spec.path)
        self.nodes[node.id] = node
        self.order.append(node)
        states = {key: self.node(child, node) for key, child in spec.states.items()}
        node.states = MappingProxyType(states)
        node.children = tuple(n for n in states.values() if n.type != "history")
        node.histories = tuple(n for n in states.values() if n.type == "history")
        node.last = len(self.order) - 1
        if node.type in ("compound", "parallel") and not node.children:
            raise ChartError(f"{node.type} state has no children", path=spec.path)
        return node

    def wire(self, node: StateNode) -> None:
        spec = node.spec
        node.entry = self.actions(spec.entry)
        node.exit = self.actions(spec.exit)
        node.invokes = tuple(self.invoke(node, i, one) for i, one in enumerate(spec.invokes))
        node.timers = tuple(self.timer(node, name) for name, _ in spec.after)
        if spec.initial is not None:
            node.initial = self.initial(node, spec.initial)
        if node.type == "history":
            node.history_target = self.history_target(node)
        node.always = self.transitions(node, "", spec.always)
        table: dict[str, list[Transition]] = {}
        for descriptor, specs in self.handlers(node):
            found = self.transitions(node, descriptor, specs)
            if found:
                table.setdefault(descriptor, []).extend(found)
        node.on = MappingProxyType({key: tuple(found) for key, found in table.items()})
        wildcards = [key for key in node.on if key == "*" or key.endswith(".*")]
        node.wildcards = tuple(sorted(wildcards, key=len, reverse=True))
        self.wildcards.update(node.wildcards)
        self.event_types.update(node.on.keys() - set(wildcards))

    def handlers(self, node: StateNode) -> Iterator[tuple[str, tuple[TransitionSpec, ...]]]:
        spec = node.spec
        yield from spec.on
        yield DONE_STATE + node.id, spec.on_done
        for invoke in node.invokes:
            yield DONE_ACTOR + invoke.id, invoke.spec.on_done
            yield ERROR_ACTOR + invoke.id, invoke.spec.on_error
            yield SNAPSHOT_ACTOR + invoke.id, invoke.spec.on_snapshot
        for timer, (_, specs) in zip(node.timers, spec.after, strict=True):
            yield timer.event_type, specs

    def transitions(
        self, node: StateNode, descriptor: str, specs: tuple[TransitionSpec, ...]
    ) -> tuple[Transition, ...]:
        return tuple(self.transition(node, descriptor, spec) for spec in specs)

    def transition(self, node: StateNode, descriptor: str, spec: TransitionSpec) -> Transition:
        targets = self.targets(node, spec.targets, spec.path)
        guard = None
        if spec.guard is not None:
            guard = bind_guard(spec.guard, self.guard_fn, self.named_state)
        return Transition(node, descriptor, spec, targets, guard, self.actions(spec.actions))

    def targets(
        self, source: StateNode, texts: tuple[str, ...], path: str
    ) -> tuple[StateNode, ...]:
        found: list[StateNode] = []
        for i, text in enumerate(texts):
            where = f"{path}.target" if len(texts) == 1 else f"{path}.target[{i}]"
            node = self.target(source, text, where)
            if node not in found:
                found.append(node)
        check_joint(found, path)
        return tuple(found)

    def target(self, source: StateNode, text: str, path: str) -> StateNode:
        found: StateNode | None
        if text.startswith("#"):
            found = find_by_id(self.nodes, text[1:])
        elif text.startswith("."):
            found = descend(source, text[1:])
        elif source.parent is None:
            if descend(source, text) is not None:
                raise ChartError(f"a target from the root is written '.{text}'", path=path)
            found = None
        else:
            found = descend(source.parent, text)
        if found is None:
            raise ChartError(f"unknown target {text!r}", path=path)
        return found

    def named_state(self, text: str, path: str) -> StateNode:
        found = find_by_id(self.nodes, text.removeprefix("#"))
        if found is None:
            raise ChartError(f"unknown state {text!r}", path=path)
        return found

    def initial(self, node: StateNode, spec: TransitionSpec) -> Transition:
        found = []
        for text in spec.targets:
            target = find_by_id(self.nodes, text[1:]) if text.startswith("#") else None
            if target is None:
                target = descend(node, text.removeprefix("."))
            if target is None or not node.contains(target):
                raise ChartError(f"unknown initial state {text!r}", path=spec.path)
            if target.parent is node and target.type == "history" and not target.spec.target:
                raise ChartError("a history state that is initial needs a target", path=spec.path)
            found.append(target)
        check_joint(found, spec.path)
        return Transition(node, "", spec, tuple(found), None, self.actions(spec.actions))

    def history_target(self, node: StateNode) -> tuple[StateNode, ...]:
        found = self.targets(node, node.spec.target, node.spec.path)
        parent = node.parent
        for target in found:
            if parent is None or not parent.contains(target) or target.type == "history":
                raise ChartError(
                    "a history target must be a state below the history state's parent",
                    path=node.spec.path + ".target",
                )
        return found

    def actions(self, specs: tuple[ActionSpec, ...]) -> tuple[Action, ...]:
        return tuple(self.action(spec) for spec in specs)

    def action(self, spec: ActionSpec) -> Action:
        fn = spec.fn or self.tables["actions"].get(spec.name)
        if fn is None:
            self.lacks("action", spec.name, spec.path)
            return Action(spec, None, 0)
        what = f"action {spec.name!r}"
        cached = self._fns.get((id(fn), what))
        if cached is None:
            refuse_async(fn, what, spec.path)
            form = form_of(fn, ACTION_FORMS, what, spec.path)
            wrapped = watched(fn, what) if self.purity and form != 4 else fn
            cached = self._fns[id(fn), what] = (wrapped, form)
        return Action(spec, *cached)

    def guard_fn(self, spec: GuardSpec) -> Callable[..., Any] | None:
        fn = spec.fn or self.tables["guards"].get(spec.name)
        if fn is None:
            self.lacks("guard", spec.name, spec.path)
            return None
        return watched(fn, f"guard {spec.name!r}") if self.purity else fn

    def invoke(self, node: StateNode, index: int, spec: InvokeSpec) -> Invoke:
        service = spec.src
        if isinstance(service, str):
            service = self.tables["services"].get(service)
            if service is None:
                self.lacks("service", spec.src, spec.path + ".src")
        if service is not None and not isinstance(service, Machine):
            form_of(service, SERVICE_FORMS, f"service {source_name(spec.src)!r}", spec.path)
        if callable(spec.input):
            refuse_async(spec.input, "an invoke's input", spec.path + ".input")
            form_of(spec.input, (2,), "an invoke's input", spec.path + ".input")
        return Invoke(spec, spec.id or f"{index}.{node.id}", service, node.id)

    def timer(self, node: StateNode, name: str) -> TimerDef:
        path = f"{node.spec.path}.after.{name}"
        delay: Any = literal_delay(name, path)
        if delay is None:
            delay = self.tables["delays"].get(name)
            if delay is None:
                self.lacks("delay", name, path)
            elif callable(delay):
                refuse_async(delay, f"delay {name!r}", path)
                form_of(delay, DELAY_FORMS, f"delay {name!r}", path)
            else:
                delay = checked_delay(delay, path)
        timer = TimerDef(name, node.id, delay)
        if timer.id in self.timers:
            raise ChartError(f"the timer id {timer.id!r} is used twice", path=path)
        self.timers[timer.id] = (node, timer)
        return timer

    def lacks(self, kind: str, name: str, path: str) -> None:
        self.missing.setdefault(f"{kind} {name!r} at {path}")


def _table(logic: Any, kind: str) -> Mapping[str, Any]:
    found = getattr(logic, kind, None)
    if found is None:
        return _NOTHING
    if not isinstance(found, Mapping):
        raise ChartError(f"logic.{kind} must be a dict of name and function")
    return found
