"""Which states a microstep leaves and enters, worked out once and kept.

A `Configuration` is a set of active states, one object per set. It owns three tables: the
transitions that may answer an event type (`Row`), those that need no event, and the `Plan`
for each choice of transitions. A plan is a list of operations and the next configuration, so
a step that was taken before costs two look-ups.

Event types are compared with those the chart names before any table is touched, so unknown
types cannot fill one; plans and rows are counted, and all tables are emptied at once when
there are too many (evicting one by one is far slower when a chart cycles through more).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from guardchart.kernel._effects import (
    CancelTimer,
    Effect,
    Effects,
    ScheduleTimer,
    StartService,
    StopService,
)
from guardchart.kernel._events import matches_descriptor
from guardchart.kernel._state import Microstep, Receipt

if TYPE_CHECKING:
    from guardchart.kernel._compile import Machine, StateNode, Transition

# The operations of a plan: (operation, state, argument).
ACTIONS: Final = 0  # run a list of actions
STOP: Final = 1  # the state was left: stop its services, cancel its timers
START: Final = 2  # the state was entered: record its services and timers
DONE: Final = 3  # a final state was entered: raise done events; argument: `Completion`

Op = tuple[int, "StateNode", Any]
History = Mapping[str, tuple[str, ...]]
Chosen = tuple["Transition", ...]


class Completion:
    """What entering one final state completes: its parent, parallels above, the machine."""

    __slots__ = ("compound", "final", "parallels", "top")

    def __init__(
        self,
        final: StateNode,
        compound: StateNode | None,
        parallels: tuple[StateNode, ...],
        top: StateNode | None,
    ) -> None:
        self.final = final
        self.compound = compound
        self.parallels = parallels
        self.top = top


class Plan:
    """A microstep: operations in order, the next configuration, history to record.

    Most plans need no `Run`. A *bare* one changes the configuration and nothing else; a
    *simple* one also runs update-form actions; a *linear* one also stops and starts timers
    and services whose delays and inputs are constants. After none of them is there an
    eventless transition to look for. ``stops`` and ``starts`` list what a linear plan does to
    the tables, in the order in which `Run` would; ``ends`` says that the machine is done.
    """

    __slots__ = (
        "bare", "consulted", "ends", "linear", "next", "ops", "records", "simple",
        "start_effects", "starts", "stopped", "stops", "updates",
    )  # fmt: skip

    def __init__(
        self,
        ops: tuple[Op, ...],
        following: Configuration,
        records: tuple[tuple[str, tuple[str, ...]], ...],
        consulted: bool,
        ends: bool,
    ) -> None:
        self.ops = ops
        self.next = following
        self.records = records
        self.consulted = consulted
        self.ends = ends
        self.updates = tuple(a for op, _, actions in ops if op == ACTIONS for a in actions)
        self.stops: tuple[tuple[bool, str, str, Effect], ...] = tuple(
            stop for op, node, _ in ops if op == STOP for stop in _stops_of(node)
        )
        self.stopped = frozenset((service, key) for service, key, _, _ in self.stops)
        self.starts = tuple(s for op, node, _ in ops if op == START for s in _starts_of(node))
        self.start_effects: Effects = tuple(effect for *_, effect in self.starts)
        quiet = not (following.eventless or records or ends or consulted)
        self.linear = (
            quiet
            and all(op != DONE for op, _, _ in ops)
            and all(action.form in (2, 3) for action in self.updates)
            and not any(callable(value) for _, _, value, _, _, _ in self.starts)
        )
        self.simple = self.linear and not self.stops and not self.starts
        self.bare = self.simple and not self.updates


def _stops_of(node: StateNode) -> Iterator[tuple[bool, str, str, Effect]]:
    """What leaving a state stops: (is a service, id, state id, effect)."""
    for invoke in node.invokes:
        yield True, invoke.id, node.id, StopService(invoke.id)
    for timer in node.timers:
        yield False, timer.id, node.id, CancelTimer(timer.id)


def _starts_of(node: StateNode) -> Iterator[tuple[bool, str, Any, str, str, Effect]]:
    """What entering a state starts: (is a service, id, delay or input, src, state id, effect)."""
    for timer in node.timers:
        yield False, timer.id, timer.delay, "", node.id, ScheduleTimer(timer.id)
    for invoke in node.invokes:
        effect = StartService(invoke.id, invoke.src, node.id)
        yield True, invoke.id, invoke.input, invoke.src, node.id, effect


class Candidate:
    """One transition (or a whole choice that needs no guard) in a row without regions."""

    __slots__ = ("fn", "idle", "plan", "receipt", "test", "transitions")

    def __init__(self, transitions: Chosen) -> None:
        self.transitions = transitions
        guard = transitions[0].guard if len(transitions) == 1 else None
        self.fn = guard.fn if guard is not None else None
        self.test = guard.test if guard is not None else None
        self.idle = all(t.idle for t in transitions)
        self.plan: Plan | None = None
        self.receipt: Receipt | None = None


class Selection:
    """The candidates below one state: those of its regions, else its own in order."""

    __slots__ = ("own", "regions")

    def __init__(self, regions: tuple[Selection, ...], own: Chosen) -> None:
        self.regions = regions
        self.own = own

    def settled(self) -> Chosen | None:
        """What is selected whatever the context is, or None where guards decide."""
        if not self.regions:
            return self.own[:1] if self.own and self.own[0].guard is None else None
        found: list[Transition] = []
        for region in self.regions:
            chosen = region.settled()
            if chosen is None:
                return None
            found.extend(chosen)
        return tuple(found)


class Row:
    """What may answer one event type in one configuration.

    ``fast`` is the next configuration and the receipt when the answer is a bare move that no
    guard decides; ``flat`` the candidates when no regions compete; ``selections`` the general
    form, tried one after the other (for an engine event exact keys, then wildcards).
    """

    __slots__ = ("event_type", "fast", "flat", "selections")

    def __init__(self, event_type: str, selections: tuple[Selection, ...]) -> None:
        self.event_type = event_type
        self.selections = selections
        self.fast: tuple[Configuration, Receipt] | None = None
        self.flat: tuple[Candidate, ...] | None = None
        if not event_type or not selections:
            return
        settled = selections[0].settled()
        if settled is not None:
            self.flat = (Candidate(settled),)
        elif not any(part.regions for part in selections):
            self.flat = tuple(Candidate((t,)) for part in selections for t in part.own)


class Configuration:
    """A set of active states. One object per set and machine, as long as tables are kept.

    ``nodes`` are the active states in document order, ``leaves`` those without children,
    ``ids`` the leaves' ids. ``eventless`` holds per leaf the ``always`` candidates at and above
    it, innermost first.
    """

    __slots__ = (
        "__weakref__", "active", "denied", "engine_rows", "eventless", "ids", "ignored",
        "leaves", "machine", "nodes", "plans", "rows",
    )  # fmt: skip

    def __init__(self, machine: Machine, nodes: tuple[StateNode, ...]) -> None:
        self.machine = machine
        self.nodes = nodes
        self.active = frozenset(nodes)
        self.leaves = tuple(n for n in nodes if not n.children)
        self.ids = frozenset(n.id for n in self.leaves)
        self.rows: dict[Any, Row] = {}
        self.engine_rows: dict[Any, Row] = {}
        self.plans: dict[Any, Plan | None] = {}
        self.eventless: tuple[Chosen, ...] = ()
        if machine.eventless:
            chains = (sum((n.always for n in (leaf, *leaf.ancestors)), ()) for leaf in self.leaves)
            self.eventless = tuple(chain for chain in chains if chain)
        self.ignored = Receipt("ignored", "no active state handles this event", (), False, self.ids)
        self.denied = Receipt("denied", "every guard refused", (), False, self.ids)

    @property
    def value(self) -> Any:
        """The state value: a key for a simple child, an object for one with children."""
        return self._value(self.machine.root)

    def _value(self, node: StateNode) -> Any:
        if not node.children:
            return {}
        if node.type == "parallel":
            return {child.key: self._value(child) for child in node.children}
        child = next(c for c in node.children if c in self.active)
        return {child.key: self._value(child)} if child.children else child.key

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Configuration):
            return NotImplemented
        return self.machine is other.machine and self.nodes == other.nodes

    def __hash__(self) -> int:
        return hash(self.nodes)

    def __repr__(self) -> str:
        return f"<Configuration {', '.join(sorted(self.ids))}>"

    def row(self, event_type: str) -> Row | None:
        """Return the row of an event from outside, None when no state answers its type."""
        machine = self.machine
        key: Any = event_type
        if event_type not in machine.event_types:
            key = machine.cache.wildcards_of(event_type)
            if not key:
                return None
        row = self.rows.get(key)
        if row is None:
            made = _select_tree(self, machine.root, lambda n: _exact(n, key) + _wild(n, event_type))
            short = key is event_type and machine.policy != "continue"
            row = Row(event_type if short else "", () if made is None else (made,))
            self._prepare(row)
            machine.cache.keep(self, self.rows, key, row)
        return row

    def engine_row(self, event_type: str) -> Row:
        """Return the row of an event the engine made: exact keys first, then wildcards."""
        machine = self.machine
        known = event_type in machine.event_types
        key: Any = event_type if known else machine.cache.wildcards_of(event_type)
        row = self.engine_rows.get(key)
        if row is None:
            parts = (
                _select_tree(self, machine.root, lambda n: _exact(n, key)),
                _select_tree(self, machine.root, lambda n: _wild(n, event_type)),
            )
            short = known and machine.policy != "continue"
            found = tuple(part for part in parts if part is not None)
            row = Row(event_type if short else "", found)
            machine.cache.keep(self, self.engine_rows, key, row)
        return row

    def _prepare(self, row: Row) -> None:
        """Make the plan of a bare move ready, so that a step finds it in the row."""
        if not row.flat or row.flat[0].test is not None:
            return
        first = row.flat[0]
        if first.idle or self.machine.cache.histories:
            return
        plan = self.plan(first.transitions, {})
        if plan.simple:
            first.plan = plan
            first.receipt = self.taken(row.event_type, plan)
            if plan.bare:
                row.fast = (plan.next, first.receipt)

    def taken(self, event_type: str, plan: Plan) -> Receipt:
        """The receipt of one microstep."""
        following = plan.next.ids
        step = Microstep(event_type, self.ids, following)
        return Receipt("taken", None, (), True, following, (step,))

    def plan(self, chosen: Chosen, history: History) -> Plan:
        """Return the plan for these transitions, given what history would restore."""
        key: Any = chosen[0] if len(chosen) == 1 else chosen
        try:
            plan = self.plans[key]
        except KeyError:
            plan = make_plan(self, chosen, history)
            cache = self.machine.cache
            if not plan.consulted:
                cache.keep(self, self.plans, key, plan)
                return plan
            cache.keep(self, self.plans, key, None)
        if plan is None:
            key = (key, frozenset(history.items()))
            plan = self.plans.get(key)
            if plan is None:
                plan = make_plan(self, chosen, history)
                self.machine.cache.keep(self, self.plans, key, plan)
        return plan


class PlanCache:
    """The configurations of one machine, and the count that keeps its tables small."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._lock = threading.Lock()
        self._configurations: dict[tuple[int, ...], Configuration] = {}
        self._filled: list[Configuration] = []
        self._plans = 0
        self._rows = 0
        self._initial: Plan | None = None
        self.limit = max(512, 2 * len(machine.order))
        self.histories = any(node.type == "history" for node in machine.order)

    def intern(self, active: Iterable[StateNode]) -> Configuration:
        """Return the one configuration with exactly these active states."""
        nodes = tuple(sorted(active, key=lambda n: n.order))
        key = tuple(n.order for n in nodes if not n.children)
        found = self._configurations.get(key)
        if found is None:
            found = Configuration(self._machine, nodes)
            with self._lock:
                if len(self._configurations) >= self.limit:
                    self._clear()
                found = self._configurations.setdefault(key, found)
        return found

    def keep(self, owner: Configuration, table: dict[Any, Any], key: Any, value: Any) -> None:
        """Put an entry into one of a configuration's tables."""
        with self._lock:
            rows = table is not owner.plans
            if (self._rows if rows else self._plans) >= self.limit * (8 if rows else 1):
                self._clear()
            if not (owner.rows or owner.engine_rows or owner.plans):
                self._filled.append(owner)
            if rows:
                self._rows += 1
            else:
                self._plans += 1
            table[key] = value

    def _clear(self) -> None:
        for configuration in self._filled:
            configuration.rows.clear()
            configuration.engine_rows.clear()
            configuration.plans.clear()
        self._filled.clear()
        self._configurations.clear()
        self._plans = self._rows = 0

    def wildcards_of(self, event_type: str) -> tuple[str, ...]:
        """The chart's wildcards that cover a type: the key of all types alike to it."""
        return tuple(w for w in self._machine.wildcards if matches_descriptor(w, event_type))

    def initial(self) -> Plan:
        """The plan that enters the machine."""
        if self._initial is None:
            entry = _Entry({})
            entry.add(self._machine.root)
            entry.descend(self._machine.root)
            self._initial = _assemble(self._machine, frozenset(), (), entry, (), False)
        return self._initial


def _exact(node: StateNode, key: Any) -> Chosen:
    return node.on.get(key, ())


def _wild(node: StateNode, event_type: str) -> Chosen:
    found: Chosen = ()
    for descriptor in node.wildcards:
        if matches_descriptor(descriptor, event_type):
            found += node.on[descriptor]
    return found


def _select_tree(
    config: Configuration, node: StateNode, pick: Callable[[StateNode], Chosen]
) -> Selection | None:
    below = [_select_tree(config, c, pick) for c in node.children if c in config.active]
    regions = tuple(part for part in below if part is not None)
    own = pick(node)
    if len(regions) == 1:
        # One competitor: its candidates come first, the state's own after them.
        inner = regions[0]
        if not inner.regions:
            return Selection((), inner.own + own)
        return Selection(inner.regions, inner.own + own)
    if not regions and not own:
        return None
    return Selection(regions, own)


def _effective(targets: Iterable[StateNode], history: History, seen: list[bool]) -> list[StateNode]:
    """Replace history states by what they restore."""
    found: list[StateNode] = []
    for target in targets:
        if target.type != "history":
            found.append(target)
            continue
        seen.append(True)
        assert target.parent is not None
        record = history.get(target.id)
        nodes = target.recorded(record) if record else target.history_target
        if not nodes:
            parent = target.parent
            nodes = parent.initial.targets if parent.initial is not None else parent.children
        found.extend(_effective(nodes, history, seen) if not record else nodes)
    return list(dict.fromkeys(found))


def _narrow(domain: StateNode, targets: list[StateNode]) -> StateNode:
    """Narrow a parallel domain to the one region that holds every target."""
    while domain.type == "parallel":
        region = next(
            (
                child
                for child in domain.children
                if all(target is child or child.contains(target) for target in targets)
            ),
            None,
        )
        if region is None:
            return domain
        domain = region
    return domain


def transition_domain(
    transition: Transition, history: History, seen: list[bool]
) -> StateNode | None:
    """The state below which a transition exits and enters; None is all, the root included."""
    source = transition.source
    targets = _effective(transition.targets, history, seen)
    restores_source = source in targets and any(t.type == "history" for t in transition.targets)
    if not restores_source and all(t is source or source.contains(t) for t in targets):
        return source if transition.reenter else _narrow(source, targets)
    head, *tail = (*targets, source)
    common = next((n for n in head.ancestors if all(n.contains(t) for t in tail)), None)
    if transition.reenter:
        return common
    return _narrow(common or source.root, targets)


def _exit_set(
    config: Configuration, transition: Transition, history: History, seen: list[bool]
) -> frozenset[StateNode]:
    if not transition.targets:
        return frozenset()
    domain = transition_domain(transition, history, seen)
    if domain is None:
        return config.active
    left = {node for node in config.nodes if domain.contains(node)}
    if transition.reenter and transition.source is domain:
        left.add(domain)
    return frozenset(left)


def make_plan(config: Configuration, chosen: Chosen, history: History) -> Plan:
    """Work out a microstep.

    Args:
        config: the active configuration.
        chosen: the selected transitions in order; conflicts among them are resolved here.
        history: what history states would restore, before this microstep.
    """
    seen: list[bool] = []
    kept: list[tuple[Transition, frozenset[StateNode]]] = []
    for one in chosen:
        left = _exit_set(config, one, history, seen)
        rivals = [pair for pair in kept if pair[1] & left]
        if all(rival.source.contains(one.source) for rival, _ in rivals):
            kept = [pair for pair in kept if pair not in rivals]
            kept.append((one, left))
    leaving: frozenset[StateNode] = frozenset().union(*(left for _, left in kept))
    records = tuple(_records(config, leaving))
    entry = _Entry({**history, **dict(records)})
    for one, _ in kept:
        if one.targets:
            entry.enter(one, transition_domain(one, history, seen))
    transitions = tuple(one for one, _ in kept)
    consulted = bool(seen) or entry.consulted
    survivors = config.active - leaving
    return _assemble(
        config.machine, survivors, _leave(config, leaving, transitions), entry, records, consulted
    )


def _records(
    config: Configuration, leaving: frozenset[StateNode]
) -> Iterator[tuple[str, tuple[str, ...]]]:
    for node in config.nodes:
        if node not in leaving:
            continue
        for target in node.histories:
            if target.history == "deep":
                found = [leaf for leaf in config.leaves if node.contains(leaf)]
            else:
                found = [child for child in node.children if child in config.active]
            yield target.id, tuple(one.id for one in found)


def _leave(
    config: Configuration, leaving: frozenset[StateNode], transitions: Chosen
) -> tuple[Op, ...]:
    ops: list[Op] = []
    for node in reversed(config.nodes):
        if node in leaving:
            if node.exit:
                ops.append((ACTIONS, node, node.exit))
            if node.invokes or node.timers:
                ops.append((STOP, node, None))
    ops.extend((ACTIONS, t.source, t.actions) for t in transitions if t.actions)
    return tuple(ops)


class _Entry:
    """Collects the states to enter, and those whose ``initial`` is followed."""

    def __init__(self, history: History) -> None:
        self.history = history
        self.states: set[StateNode] = set()
        self.followed: set[StateNode] = set()
        self.consulted = False

    def add(self, node: StateNode) -> None:
        self.states.add(node)

    def enter(self, transition: Transition, domain: StateNode | None) -> None:
        """Enter a transition's targets and what lies between them and the domain."""
        for target in transition.targets:
            resets = target is domain and not (transition.reenter and transition.source is domain)
            if target.type != "history" and not resets:
                self.add(target)
            self.descend(target)
        seen: list[bool] = []
        for target in _effective(transition.targets, self.history, seen):
            self.ancestors(target, domain)
            if domain is not None and domain.type == "parallel":
                self.regions(domain)
        self.consulted = self.consulted or bool(seen)
        if transition.reenter and transition.source is domain:
            self.add(transition.source)

    def descend(self, node: StateNode) -> None:
        """Enter what entering this state entails below it."""
        if node.type == "history":
            self.restore(node)
        elif node.type == "compound":
            assert node.initial is not None
            self.followed.add(node)
            self.targets(node.initial.targets, node)
        elif node.type == "parallel":
            self.regions(node)

    def restore(self, node: StateNode) -> None:
        self.consulted = True
        parent = node.parent
        assert parent is not None
        record = self.history.get(node.id)
        nodes = node.recorded(record) if record else node.history_target
        if nodes:
            self.targets(nodes, parent)
        else:
            self.descend(parent)

    def targets(self, nodes: Iterable[StateNode], top: StateNode) -> None:
        for node in nodes:
            if node.type != "history":
                self.add(node)
        for node in nodes:
            self.descend(node)
        for node in nodes:
            self.ancestors(node, top)

    def ancestors(self, node: StateNode, top: StateNode | None) -> None:
        """Enter the states above ``node`` and below ``top``, and all regions of parallels."""
        for above in node.ancestors:
            if above is top or (top is not None and not top.contains(above)):
                return
            self.add(above)
            if above.type == "parallel":
                self.regions(above)

    def regions(self, node: StateNode) -> None:
        for region in node.children:
            if not any(region.contains(state) for state in self.states):
                self.add(region)
                self.descend(region)


def _assemble(
    machine: Machine,
    survivors: frozenset[StateNode],
    leave: tuple[Op, ...],
    entry: _Entry,
    records: tuple[tuple[str, tuple[str, ...]], ...],
    consulted: bool,
) -> Plan:
    ops = list(leave)
    active = set(survivors)
    completed: set[StateNode] = set()
    ends = False
    # A history state may name ancestors of what it restores that were never left.
    entered = entry.states - survivors
    for node in sorted(entered | entry.followed, key=lambda n: n.order):
        if node in entered:
            active.add(node)
            if node.entry:
                ops.append((ACTIONS, node, node.entry))
            if node.invokes or node.timers:
                ops.append((START, node, None))
        if node in entry.followed and node.initial is not None and node.initial.actions:
            ops.append((ACTIONS, node, node.initial.actions))
        if node.type == "final" and node in entered:
            completion = _complete(node, active, completed)
            ends = ends or completion.top is not None
            ops.append((DONE, node, completion))
    following = machine.cache.intern(active)
    if ends:
        ops.extend((ACTIONS, n, n.exit) for n in reversed(following.nodes) if n.exit)
    return Plan(tuple(ops), following, records, consulted, ends)


def _complete(final: StateNode, active: set[StateNode], completed: set[StateNode]) -> Completion:
    parent = final.parent
    assert parent is not None
    above = parent if parent.type == "parallel" else parent.parent
    top = above or final
    parallels: list[StateNode] = []
    while (
        above is not None
        and above.type == "parallel"
        and above not in completed
        and _is_done(above, active)
    ):
        completed.add(above)
        parallels.append(above)
        top = above
        above = above.parent
    return Completion(
        final,
        parent if parent.type == "compound" else None,
        tuple(parallels),
        top if above is None else None,
    )


def _is_done(node: StateNode, active: set[StateNode]) -> bool:
    if node.type == "compound":
        return any(child.type == "final" and child in active for child in node.children)
    if node.type == "parallel":
        return all(_is_done(child, active) for child in node.children)
    return node.type == "final" and node in active
