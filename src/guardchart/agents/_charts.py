"""The shipped charts, and what a chart says about tools."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any, Final

from guardchart.errors import AgentConfigError
from guardchart.gate import ALL_TOOLS, ToolRegistry, allowed_in_all, allowed_tools, validate_tools
from guardchart.kernel import Machine, Snapshot, StateNode, active_nodes, load

__all__ = [
    "CHARTS_DIR",
    "TOOL_LOOP",
    "WAITING_STATES",
    "load_chart",
    "saved_children",
    "state_tools",
    "validate_agent_chart",
    "waits",
]

CHARTS_DIR: Final = Path(__file__).parent / "charts"
"""The folder of the shipped charts."""

WAITING_STATES: Final = ("awaiting_human",)
"""Keys of states that ``run_agent`` rests in, beside those tagged ``waiting``."""


def waits(snapshot: Snapshot) -> bool:
    """Whether an active state waits for a person: by its tag ``waiting``, or by its key.

    Of a snapshot that was loaded, the saved child machines count, too.
    """
    if any("waiting" in node.tags or node.key in WAITING_STATES for node in active_nodes(snapshot)):
        return True
    return any(waits(child) for child in saved_children(snapshot))


def saved_children(snapshot: Snapshot) -> list[Snapshot]:
    """The running child machines that a loaded snapshot holds, loaded in turn."""
    services = getattr(snapshot.machine.logic, "services", {})
    found = []
    for child in snapshot.children.values():
        machine = services.get(child.src)
        if child.status == "active" and child.snapshot and isinstance(machine, Machine):
            found.append(load(machine, child.snapshot, trusted=True))
    return found


@functools.cache
def _text(name: str) -> str:
    path = CHARTS_DIR / f"{name}.json"
    if Path(name).name != name or not path.is_file():
        known = sorted(each.stem for each in CHARTS_DIR.glob("*.json"))
        raise AgentConfigError(f"load_chart: no such chart; shipped are {known}")
    return path.read_text(encoding="utf-8")


def load_chart(name: str = "tool_loop") -> dict[str, Any]:
    """A fresh copy of a shipped chart, to edit and hand to ``create_machine``.

    Args:
        name: The chart's file name without its ending.

    Returns:
        The chart as a dict of its own: editing it changes nobody else's.

    Raises:
        AgentConfigError: There is no such chart; the message lists those there are.

    Source: xstate-statemachine, agents reference: load_chart.

    Example:
        >>> chart = load_chart()
        >>> chart["states"]["awaiting_model"]["meta"]["tools"]
        ['*']
    """
    chart: dict[str, Any] = json.loads(_text(name))
    return chart


TOOL_LOOP: Final[dict[str, Any]] = load_chart("tool_loop")
"""The loop every agent runs by default; ``load_chart()`` gives a copy to edit."""


def state_tools(interp: Any, event: Any = None) -> tuple[str, ...]:
    """The allow-list that governs the current step of a running machine.

    Args:
        interp: An interpreter, or a service's scope. None gives no tools.
        event: A completion: the state that invoked it decides, instead of the active states.

    Returns:
        Tool names; ``("*",)`` for every registered one. Over parallel regions only what all of
        them allow.

    Source: xstate-statemachine, agents reference: state_tools.

    Example:
        >>> from guardchart import SyncInterpreter, create_machine
        >>> desk = create_machine({"id": "desk", "initial": "open", "states": {
        ...     "open": {"meta": {"tools": ["look_up"]}}}})
        >>> state_tools(SyncInterpreter(desk).start())
        ('look_up',)
    """
    node = getattr(event, "node", None) or getattr(interp, "node", None)
    if node is not None:
        allowed = allowed_tools(node)
    elif interp is None:
        return ()
    else:
        allowed = allowed_in_all(_leaves(interp.snapshot))
    return (ALL_TOOLS,) if allowed.everything else tuple(sorted(allowed.listed))


def _leaves(snapshot: Snapshot) -> list[StateNode]:
    return [snapshot.machine.nodes[each] for each in sorted(snapshot.state_ids)]


def validate_agent_chart(
    machine: Machine, registry: ToolRegistry | None = None, *, tools: ToolRegistry | None = None
) -> tuple[str, ...]:
    """Check that every tool a chart's ``meta.tools`` names is registered.

    Args:
        machine: The machine, bound or not.
        registry: The tools; by default those its ``agent_logic`` was given.
        tools: Another name for ``registry``.

    Returns:
        The names of registered tools that are read-only, so that the author has looked at
        them: nobody is asked before they run.

    Raises:
        AgentConfigError: A state names a tool that is not registered, or no registry is known.

    Source: xstate-statemachine, agents reference: validate_agent_chart.

    Example:
        >>> from guardchart.agents import FakeModel, agent_logic, tool_registry
        >>> from guardchart.runtime import create_machine
        >>> def look_up(order: int) -> str:
        ...     "Look up an order."
        >>> logic = agent_logic(FakeModel([]), tool_registry(look_up))
        >>> validate_agent_chart(create_machine(load_chart(), logic))
        ('look_up',)
    """
    known = registry or tools
    if known is None and machine.logic is not None:
        known = getattr(machine.logic, "attachments", {}).get("registry")
    if known is None:
        raise AgentConfigError("validate_agent_chart: pass the tool registry")
    validate_tools(machine, known)
    return tuple(
        name
        for name in known.names
        if not (known.get(name).side_effect or known.get(name).requires_approval)  # type: ignore[union-attr]
    )
