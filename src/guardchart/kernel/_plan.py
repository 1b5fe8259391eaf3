"""Which states a microstep leaves and enters, worked out as a `Plan`.

A plan is a list of operations and the next configuration. It depends on the chart alone: on the
active states, the chosen transitions and what history would restore. So it is made once and kept
(`Configuration`), and a step that was taken before costs two look-ups.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from guardchart.kernel._effects import Effect, Effects

if TYPE_CHECKING:
    from guardchart.kernel._compile import Machine
    from guardchart.kernel._configuration import Configuration
    from guardchart.kernel._nodes import StateNode, Transition

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
        yield True, invoke.id, node.id, invoke.stop
    for timer in node.timers:
        yield False, timer.id, node.id, timer.cancel


def _starts_of(node: StateNode) -> Iterator[tuple[bool, str, Any, str, str, Effect]]:
    """What entering a state starts: (is a service, id, delay or input, src, state id, effect)."""
    for timer in node.timers:
        yield False, timer.id, timer.delay, "", node.id, timer.schedule
    for invoke in node.invokes:
        yield True, invoke.id, invoke.input, invoke.src, node.id, invoke.start


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
    survivors = config.active - leaving
    entry = _Entry({**history, **dict(records)}, survivors)
    for one, _ in kept:
        if one.targets:
            entry.enter(one, transition_domain(one, history, seen))
    transitions = tuple(one for one, _ in kept)
    consulted = bool(seen) or entry.consulted
    return _assemble(
        config.machine, survivors, _leave(config, leaving, transitions), entry, records, consulted
    )


def initial_plan(machine: Machine) -> Plan:
    """Work out the plan that enters a machine."""
    entry = _Entry({})
    entry.states.add(machine.root)
    entry.descend(machine.root, ())
    return _assemble(machine, frozenset(), (), entry, (), False)


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
    """Collects the states to enter, and those whose ``initial`` is followed.

    It works from a domain downwards and into each child once, so what it finds is a legal
    configuration whatever the targets are. ``staying`` are the states that are not left.
    """

    def __init__(self, history: History, staying: frozenset[StateNode] = frozenset()) -> None:
        self.history = history
        self.staying = staying
        self.states: set[StateNode] = set()
        self.followed: set[StateNode] = set()
        self.consulted = False

    def enter(self, transition: Transition, domain: StateNode | None) -> None:
        """Enter a transition's targets and what lies between them and the domain."""
        wanted = self.wanted(transition.targets)
        top = transition.source.root if domain is None else domain
        if domain is None or (transition.reenter and transition.source is domain):
            self.states.add(top)
        self.descend(top, wanted)

    def wanted(self, targets: Iterable[StateNode]) -> list[StateNode]:
        """The states that targets stand for, history restored."""
        found: list[StateNode] = []
        for target in targets:
            parent = target.parent
            if target.type != "history" or parent is None:
                found.append(target)
                continue
            self.consulted = True
            record = self.history.get(target.id)
            if record:
                found.extend(target.recorded(record))
            elif target.history_target:
                found.extend(self.wanted(target.history_target))
            elif parent.initial is not None:
                self.followed.add(parent)
                found.extend(self.wanted(parent.initial.targets))
            else:
                found.extend(parent.children)
        return found

    def descend(self, node: StateNode, wanted: Iterable[StateNode]) -> None:
        """Enter below a state: towards what is wanted, elsewhere what is entered by default."""
        below = [state for state in wanted if node.contains(state)]
        if node.type == "compound" and not below:
            assert node.initial is not None
            self.followed.add(node)
            below = self.wanted(node.initial.targets)
        for child in node.children:
            aimed = any(state is child or child.contains(state) for state in below)
            if aimed or (node.type == "parallel" and child not in self.staying):
                self.states.add(child)
                self.descend(child, below)


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
