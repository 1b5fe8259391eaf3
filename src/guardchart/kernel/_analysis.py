"""Questions about a chart and its snapshots that change nothing: what may happen, what is on.

Nothing here runs an action or a service. Guards run in `can` only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from guardchart.errors import StepError
from guardchart.kernel._events import DONE_STATE, Event, as_event, is_reserved
from guardchart.kernel._mermaid import to_mermaid
from guardchart.kernel._nodes import descend
from guardchart.kernel._run import Fault, Run

if TYPE_CHECKING:
    from guardchart.kernel._compile import Machine
    from guardchart.kernel._configuration import Configuration, Selection
    from guardchart.kernel._nodes import StateNode, Transition
    from guardchart.kernel._state import Snapshot

__all__ = [
    "accepted_events",
    "active_nodes",
    "can",
    "get_meta",
    "has_tag",
    "matches",
    "named_events",
    "reachable",
    "to_mermaid",
    "unreachable",
]


def active_nodes(snapshot: Snapshot) -> tuple[StateNode, ...]:
    """Return the active states in document order, ancestors included."""
    return snapshot.config.nodes


def has_tag(snapshot: Snapshot, tag: str) -> bool:
    """Tell whether an active state carries the tag."""
    return any(tag in node.tags for node in snapshot.config.nodes)


def get_meta(snapshot: Snapshot) -> dict[str, Mapping[str, Any]]:
    """Return the ``meta`` of each active state that has one, by state id, outermost first.

    Source: XState 5, ``snapshot.getMeta()``.
    """
    return {node.id: node.meta for node in snapshot.config.nodes if node.meta}


def matches(snapshot: Snapshot, state: str | Mapping[str, Any]) -> bool:
    """Tell whether a state is active.

    Args:
        snapshot: The snapshot to ask.
        state: A state's id, with or without ``#``; a path of keys from the root,
            ``"work.one"``; or a part of a state value, ``{"work": {"left": "one"}}``.

    Returns:
        True when it (every state it names) is active; False otherwise, also for a name
        the chart does not have.

    >>> from guardchart.kernel import create_machine, initial_transition
    >>> machine = create_machine({"id": "lamp", "initial": "off", "states": {"off": {}}})
    >>> snapshot = initial_transition(machine)[0]
    >>> matches(snapshot, "off"), matches(snapshot, "lamp.off"), matches(snapshot, "on")
    (True, True, False)

    Source: XState 5, ``snapshot.matches()``; ids besides.
    """
    config = snapshot.config
    root = config.machine.root
    if isinstance(state, str):
        node = config.machine.nodes.get(state.removeprefix("#"))
        if node is None and state:
            node = descend(root, state)
        return node in config.active
    return _matches_value(root, state, config)


def _matches_value(node: StateNode, value: Any, config: Configuration) -> bool:
    if isinstance(value, str):
        value = {value: {}}
    if not isinstance(value, Mapping):
        return False
    for key, below in value.items():
        child = node.states.get(key)
        if child not in config.active or not _matches_value(child, below, config):
            return False
    return True


# Events


def accepted_events(snapshot: Snapshot, *, types: Iterable[str] = ()) -> tuple[str, ...]:
    """Return the event types that the active states can take, guards not evaluated.

    Types the engine makes are left out, so are types that are forbidden here whatever the
    guards say. A wildcard counts for the types that some state of the chart names.

    Args:
        snapshot: The snapshot to ask; its machine need not be bound.
        types: Types to ask for beside those that the chart names: a wildcard may take them.

    Returns:
        The types in document order, those asked for last; none once the machine is done or in
        error.

    >>> from guardchart.kernel import create_machine, initial_transition
    >>> machine = create_machine({"id": "lamp", "initial": "off", "states": {
    ...     "off": {"on": {"TOGGLE": "on"}}, "on": {"on": {"BREAK": "off"}}}})
    >>> accepted_events(initial_transition(machine)[0])
    ('TOGGLE',)
    """
    if snapshot.status != "active":
        return ()
    found: list[str] = []
    extra = (each for each in types if not is_reserved(each))
    for event_type in dict.fromkeys((*named_events(snapshot.machine), *extra)):
        row = snapshot.config.row(event_type)
        if row is not None and any(_can_take(one) for one in row.selections):
            found.append(event_type)
    return tuple(found)


def can(snapshot: Snapshot, event: Event | Mapping[str, Any] | str) -> bool:
    """Tell whether an event would be taken now, guards evaluated with its payload.

    Args:
        snapshot: The snapshot to ask; its machine has to be bound.
        event: An event from outside.

    Returns:
        True when some transition would run; False for an event that is forbidden, refused by
        all guards, unknown or reserved, and once the machine is done or in error.

    Raises:
        ChartError: The machine is unbound.
        StepError: A guard raised, and ``actionErrorPolicy`` is not ``continue``, under which
            only its candidate is passed over.

    Source: XState 5, ``snapshot.can()``.

    >>> from guardchart.kernel import create_machine, initial_transition
    >>> till = create_machine({"id": "till", "on": {"PAY": {"guard": lambda context, event:
    ...     event.payload["cents"] <= 500, "actions": lambda context, event: None}}})
    >>> snapshot, _ = initial_transition(till)
    >>> can(snapshot, {"type": "PAY", "cents": 100}), can(snapshot, {"type": "PAY", "cents": 900})
    (True, False)
    """
    event = as_event(event)
    config = snapshot.config
    config.machine.require_bound()
    if snapshot.status != "active" or is_reserved(event.type):
        return False
    row = config.row(event.type)
    if row is None:
        return False
    try:
        chosen = Run(config.machine, snapshot, 0, None).select(row.selections, event)
    except Fault as fault:
        raise StepError(f"a guard raised {type(fault.error).__name__}") from fault.error
    return any(not transition.idle for transition in chosen)


def named_events(machine: Machine) -> dict[str, None]:
    """The event types that a chart names, in document order; the engine's own are left out."""
    return {
        key: None
        for node in machine.order
        for key in node.on
        if key in machine.event_types and not is_reserved(key)
    }


def _can_take(selection: Selection) -> bool:
    if any(_can_take(region) for region in selection.regions):
        return True
    if any(_surely_selects(region) for region in selection.regions):
        return False
    return any(not transition.idle for transition in _possible(selection.own))


def _surely_selects(selection: Selection) -> bool:
    return any(_surely_selects(region) for region in selection.regions) or any(
        transition.guard is None for transition in selection.own
    )


def _possible(candidates: tuple[Transition, ...]) -> Iterator[Transition]:
    """The candidates up to the first without a guard: nothing behind that is ever reached."""
    for transition in candidates:
        yield transition
        if transition.guard is None:
            return


# Reachability


def reachable(machine: Machine) -> frozenset[str]:
    """Return the ids of the states that some run might enter.

    Any event may come, any guard pass, any service end either way. So a state that is left
    out can never be entered; one that is in may still be ruled out by guards.
    """
    search = _Search(machine)
    return frozenset(node.id for node in search.run())


def unreachable(machine: Machine) -> tuple[str, ...]:
    """Return the ids of the states no run can enter, in document order."""
    found = reachable(machine)
    return tuple(node.id for node in machine.order if node.id not in found)


class _Search:
    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.found: set[StateNode] = set()

    def run(self) -> set[StateNode]:
        self.enter(self.machine.root)
        size = -1
        while size != len(self.found):
            size = len(self.found)
            for node in self.machine.order:
                if node in self.found:
                    self.follow(node)
        return self.found

    def follow(self, node: StateNode) -> None:
        for descriptor, candidates in (*node.on.items(), ("", node.always)):
            if descriptor == DONE_STATE + node.id and not self.completes(node):
                continue
            for transition in _possible(candidates):
                for target in transition.targets:
                    self.enter(target)

    def completes(self, node: StateNode) -> bool:
        if node.type == "parallel":
            return all(self.completes(region) for region in node.children)
        if node.type == "final":
            return node in self.found
        return any(child.type == "final" and child in self.found for child in node.children)

    def enter(self, node: StateNode) -> None:
        if node in self.found:
            return
        self.found.add(node)
        for above in node.ancestors:
            self.found.add(above)
            if above.type == "parallel":
                for region in above.children:
                    if region is not node and not region.contains(node):
                        self.enter(region)
        self.below(node)

    def below(self, node: StateNode) -> None:
        if node.type == "parallel":
            for region in node.children:
                self.enter(region)
        elif node.initial is not None:
            for target in node.initial.targets:
                self.enter(target)
        elif node.type == "history" and node.parent is not None:
            for target in node.history_target:
                self.enter(target)
            if not node.history_target:
                self.below(node.parent)
