"""Whether a snapshot rests: nothing is in flight, and only an event or a late deadline moves it."""

from __future__ import annotations

from typing import Any

from guardchart.agents._charts import WAITING_STATES
from guardchart.agents._step import AgentStep
from guardchart.kernel import Machine, Snapshot, active_nodes, load

__all__ = ["is_idle"]


def is_idle(snapshot: Snapshot | AgentStep, *, due_after: float | None = None) -> bool:
    """Tell whether an agent waits for an event and does nothing by itself.

    Nothing may be in flight, here or in a child machine; a child that is idle itself does not
    count. Where no state waits for a person (tag ``waiting``), a pending timer counts as work.
    Eventless transitions never do: a step has taken what there was to take.

    Args:
        snapshot: A kernel snapshot or a step. For JSON, ``kernel.load`` it first.
        due_after: Timers due later than this, in epoch milliseconds, do not count either; a run
            that faces only such settles idle, too.

    Returns:
        False also for a machine that has ended.

    Source: @statelyai/agent, isIdle.

    Example:
        >>> from guardchart import create_machine
        >>> from guardchart.agents import initial_agent_step
        >>> door = create_machine({"id": "door", "initial": "shut", "states": {
        ...     "shut": {"on": {"KNOCK": "opening"}},
        ...     "opening": {"after": {"500": "open"}}, "open": {}}})
        >>> from guardchart.agents import transition_agent_step
        >>> step = initial_agent_step(door, now=0)
        >>> is_idle(step), is_idle(transition_agent_step(door, step, "KNOCK", now=0))
        (True, False)
    """
    if isinstance(snapshot, AgentStep):
        snapshot = snapshot.snapshot
    if snapshot.status != "active":
        return False
    services = getattr(snapshot.machine.logic, "services", None) or {}
    for child in snapshot.children.values():
        if child.status == "active" and not _rests(services.get(child.src), child, due_after):
            return False
    return _waits(snapshot) or not _due(snapshot, due_after)


def _rests(service: Any, child: Any, due_after: float | None) -> bool:
    """Whether a child is a machine that is idle."""
    if not isinstance(service, Machine) or child.snapshot is None:
        return False
    return is_idle(load(service, child.snapshot, trusted=True), due_after=due_after)


def _waits(snapshot: Snapshot) -> bool:
    """Whether a machine of this tree waits for a person, so that its deadlines are his."""
    if any("waiting" in node.tags or node.key in WAITING_STATES for node in active_nodes(snapshot)):
        return True
    services = getattr(snapshot.machine.logic, "services", None) or {}
    return any(
        isinstance(services.get(child.src), Machine)
        and child.snapshot is not None
        and child.status == "active"
        and _waits(load(services[child.src], child.snapshot, trusted=True))
        for child in snapshot.children.values()
    )


def _due(snapshot: Snapshot, due_after: float | None) -> bool:
    tables = (snapshot.timers, snapshot.sends)
    return any(
        due_after is None or each.due_at <= due_after for table in tables for each in table.values()
    )
