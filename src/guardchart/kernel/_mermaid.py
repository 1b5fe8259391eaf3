"""A chart as a Mermaid state diagram.

Mermaid has its own grammar for labels, so every character that could be part of it is
written as an entity (``#59;``), and states get ids made of letters, digits and ``_`` alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from guardchart.kernel._events import AFTER, DONE_ACTOR, DONE_STATE, ERROR_ACTOR, SNAPSHOT_ACTOR

if TYPE_CHECKING:
    from guardchart.kernel._compile import Machine
    from guardchart.kernel._nodes import Action, StateNode, Transition
    from guardchart.kernel._specs import GuardSpec
    from guardchart.kernel._state import Snapshot

__all__ = ["to_mermaid"]

_PLAIN = frozenset(" _.,()[]/!?*+=-@")
_KEYWORDS = frozenset({"as", "class", "classDef", "default", "direction", "end", "note", "state"})
_ACTIVE_STYLE = "classDef active fill:#ffd866,stroke:#8a6d00,stroke-width:2px,color:#000000"


def to_mermaid(machine: Machine, snapshot: Snapshot | None = None) -> str:
    """Draw a chart as a Mermaid ``stateDiagram-v2``.

    Transitions are labelled ``EVENT [guard] / actions``; a note lists a leaf's tools
    (``meta.tools``), services, entry and exit actions. The drawing holds names of the chart
    alone, nothing of a context.

    Args:
        machine: The machine; it need not be bound to logic.
        snapshot: Marks the active states: leaves by the class ``active``, states around
            them by a star at their name, since Mermaid cannot style those.

    Returns:
        The text, the same for the same chart, ending in a newline.

    >>> from guardchart.kernel import create_machine
    >>> print(to_mermaid(create_machine({"id": "lamp", "initial": "off", "states": {
    ...     "off": {"on": {"TOGGLE": "on"}}, "on": {}}})), end="")
    stateDiagram-v2
        state "off" as lamp_off
        state "on" as lamp_on
        [*] --> lamp_off
        lamp_off --> lamp_on : TOGGLE
    """
    return "\n".join(_Drawing(machine, snapshot).lines()) + "\n"


class _Drawing:
    def __init__(self, machine: Machine, snapshot: Snapshot | None) -> None:
        self.root = machine.root
        self.active = snapshot.config.active if snapshot is not None else frozenset()
        self.names = _names(machine)
        self.edges: dict[StateNode | None, list[str]] = {}
        for node in machine.order:
            for transition in _transitions(node):
                self.add_edges(node, transition.targets or (node,), _label(transition))
            self.add_edges(node, node.history_target, "")

    def lines(self) -> Iterator[str]:
        yield "stateDiagram-v2"
        root = self.root
        # Regions need a state around them; so do transitions that start at the root.
        if root.type == "compound" and not self.edges.get(None) and not _remarks(root):
            yield from self.inside(root, 1)
        else:
            yield from self.state(root, 1)
            yield f"    [*] --> {self.names[root]}"
            yield from (f"    {edge}" for edge in self.edges.get(None, ()))
        leaves = [self.names[node] for node in self.names if self.marked(node)]
        if leaves:
            yield f"    {_ACTIVE_STYLE}"
            yield f"    class {','.join(leaves)} active"

    def marked(self, node: StateNode) -> bool:
        return node in self.active and not node.children

    def state(self, node: StateNode, level: int) -> Iterator[str]:
        indent = "    " * level
        name = self.names[node]
        label = _escaped(node.key)
        if node.type == "history":
            label = f"{label} (H*)" if node.history == "deep" else f"{label} (H)"
        remarks = _remarks(node)
        if not node.children:
            yield f'{indent}state "{label}" as {name}'
            if remarks:
                yield f"{indent}note right of {name}"
                yield from (f"{indent}    {remark}" for remark in remarks)
                yield f"{indent}end note"
            return
        star = " *" if node in self.active and node.parent is not None else ""
        around = f" ({', '.join(remarks)})" if remarks else ""
        yield f'{indent}state "{label}{star}{around}" as {name} {{'
        yield from self.inside(node, level + 1)
        yield f"{indent}}}"

    def inside(self, node: StateNode, level: int) -> Iterator[str]:
        indent = "    " * level
        for index, child in enumerate(node.states.values()):
            if node.type == "parallel" and index and child.type != "history":
                yield f"{indent}--"
            yield from self.state(child, level)
        if node.initial is not None:
            actions = _actions(node.initial.actions)
            for target in node.initial.targets:
                yield f"{indent}[*] --> {self.names[target]}" + (f" : {actions}" if actions else "")
        for edge in self.edges.get(node, ()):
            yield f"{indent}{edge}"
        for child in node.states.values():
            if child.type == "final":
                yield f"{indent}{self.names[child]} --> [*]"

    def add_edges(self, source: StateNode, targets: tuple[StateNode, ...], label: str) -> None:
        for target in targets:
            line = f"{self.names[source]} --> {self.names[target]}"
            above = next((n for n in source.ancestors if n.contains(target)), None)
            self.edges.setdefault(above, []).append(f"{line} : {label}" if label else line)


def _transitions(node: StateNode) -> Iterator[Transition]:
    for candidates in node.on.values():
        # A forbidden event is no edge.
        yield from (transition for transition in candidates if not transition.idle)
    yield from node.always


def _names(machine: Machine) -> dict[StateNode, str]:
    names: dict[StateNode, str] = {}
    used: set[str] = set()
    for node in machine.order:
        words = (machine.id, *node.path)
        base = "_".join(
            "".join(c if c.isascii() and c.isalnum() else "_" for c in word) for word in words
        )
        if not base[0].isalpha() or base in _KEYWORDS:
            base = "s" + base
        name, count = base, 1
        while name in used:
            count += 1
            name = f"{base}_{count}"
        used.add(name)
        names[node] = name
    return names


def _label(transition: Transition) -> str:
    parts = [_event(transition)]
    if transition.spec.guard is not None:
        parts.append(f"[{_guard(transition.spec.guard)}]")
    actions = _actions(transition.actions)
    if actions:
        parts.append(actions)
    return " ".join(part for part in parts if part)


def _event(transition: Transition) -> str:
    descriptor = transition.descriptor
    for prefix, word in (
        (DONE_ACTOR, "done "),
        (ERROR_ACTOR, "error "),
        (SNAPSHOT_ACTOR, "snapshot "),
    ):
        if descriptor.startswith(prefix):
            return _escaped(word + descriptor.removeprefix(prefix))
    if descriptor == DONE_STATE + transition.source.id:
        return "done"
    for timer in transition.source.timers:
        if descriptor == timer.event_type:
            return _escaped(f"after {timer.name}")
    return _escaped(descriptor.removeprefix(AFTER))


def _guard(spec: GuardSpec) -> str:
    if spec.kind == "name":
        return _escaped(spec.name)
    if spec.kind == "stateIn":
        return _escaped(f"in {spec.name.removeprefix('#')}")
    inner = [_guard(guard) for guard in spec.guards]
    if spec.kind == "not":
        return f"!{inner[0]}"
    return "(" + f" {spec.kind} ".join(inner) + ")"


def _actions(actions: tuple[Action, ...]) -> str:
    return "/ " + ", ".join(_escaped(action.name) for action in actions) if actions else ""


def _remarks(node: StateNode) -> list[str]:
    found = []
    tools = _tools(node.meta.get("tools"))
    if tools:
        found.append(f"tools {_escaped(', '.join(tools))}")
    found.extend(f"invoke {_escaped(invoke.src)}" for invoke in node.invokes)
    if node.entry:
        found.append(f"entry {_actions(node.entry)}")
    if node.exit:
        found.append(f"exit {_actions(node.exit)}")
    return found


def _tools(raw: object) -> list[str]:
    """The names in ``meta.tools``: names, or rules with a name; what else stands there is meta."""
    if isinstance(raw, str):
        raw = [raw]
    if not isinstance(raw, list | tuple):
        return []
    names = (rule.get("name") if isinstance(rule, Mapping) else rule for rule in raw)
    return [name for name in names if isinstance(name, str)]


def _escaped(text: str) -> str:
    return "".join(c if c.isalnum() or c in _PLAIN else f"#{ord(c)};" for c in text)
