"""Sets of active states, and for each what may answer an event there.

A `Configuration` is a set of active states, one object per set. It owns three tables: the
transitions that may answer an event type (`Row`), those that need no event, and the `Plan`
for each choice of transitions.

Event types are compared with those the chart names before any table is touched, so unknown
types cannot fill one; plans and rows are counted, and all tables are emptied at once when
there are too many (evicting one by one is far slower when a chart cycles through more).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from guardchart.kernel._events import matches_descriptor
from guardchart.kernel._plan import Chosen, History, Plan, initial_plan, make_plan
from guardchart.kernel._state import Microstep, Receipt

if TYPE_CHECKING:
    from guardchart.kernel._compile import Machine
    from guardchart.kernel._nodes import StateNode, Transition


class Candidate:
    """One transition (or a whole choice that needs no guard) in a row without regions.

    With ``plan`` comes the ``receipt`` of performing it alone.
    """

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
    ``ending`` is the linear plan of a timer's or child's end that leaves its state, the receipt,
    and (is a child, its id).
    """

    __slots__ = ("ending", "event_type", "fast", "flat", "selections")

    def __init__(self, event_type: str, selections: tuple[Selection, ...]) -> None:
        self.event_type = event_type
        self.selections = selections
        self.fast: tuple[Configuration, Receipt] | None = None
        self.flat: tuple[Candidate, ...] | None = None
        self.ending: tuple[Plan, Receipt, tuple[bool, str]] | None = None
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
        root, leaf = self.machine.root, self.leaves[0] if self.leaves else None
        if leaf is not None and leaf.parent is root and root.type != "parallel":
            return leaf.key
        return self._value(root)

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
    """The configurations of one machine, and the count that keeps its tables small.

    ``blank`` is the one without states, from which a machine starts.
    """

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._lock = threading.Lock()
        self._configurations: dict[tuple[int, ...], Configuration] = {}
        self._filled: list[Configuration] = []
        self._plans = 0
        self._rows = 0
        self._initial: Plan | None = None
        self.blank = Configuration(machine, ())
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
            self._initial = initial_plan(self._machine)
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
