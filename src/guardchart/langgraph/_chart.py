"""What node and router accept as a chart, and how a built machine is told from one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from guardchart.errors import AgentConfigError
from guardchart.kernel import Machine
from guardchart.runtime import create_machine

if TYPE_CHECKING:
    from guardchart.kernel import StateNode

__all__ = ["as_machine", "lineage", "walk"]


def as_machine(
    machine: Machine | Mapping[str, Any] | str | Path, logic: Any = None, *, caller: str
) -> Machine:
    """Return the machine to use.

    Args:
        machine: A built machine, a chart as a dict or JSON text, or the path of one.
        logic: Callables for a chart; a built machine already carries its own.
        caller: The public function's name, for messages.

    Raises:
        AgentConfigError: A built machine and ``logic`` were both given.
        ChartError: The chart itself is wrong.
    """
    if isinstance(machine, Machine):
        if logic is not None:
            raise AgentConfigError(
                f"{caller}: a built Machine already carries its logic; "
                "pass the chart with logic=, or the machine alone"
            )
        return machine
    return create_machine(machine, logic)


def walk(root: StateNode) -> Iterator[StateNode]:
    """Every state below ``root`` that can be active, in document order."""
    for child in root.children:
        yield child
        yield from walk(child)


def lineage(node: StateNode) -> Iterator[StateNode]:
    """``node`` and its ancestors up to, and without, the root."""
    at: StateNode | None = node
    while at is not None and at.parent is not None:
        yield at
        at = at.parent
