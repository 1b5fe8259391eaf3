"""When a machine has come to rest, as far as a host should wait for it."""

from __future__ import annotations

from collections.abc import Collection

from guardchart.kernel import active_nodes
from guardchart.runtime._base import InterpreterBase

__all__ = ["reached", "serving_due", "waits"]


def waits(interpreter: InterpreterBase, waiting: Collection[str]) -> bool:
    """Whether a running machine, or one below it, is in a state that waits for somebody."""
    if interpreter.status != "running":
        return False
    if any(
        "waiting" in node.tags or node.key in waiting for node in active_nodes(interpreter.snapshot)
    ):
        return True
    return any(waits(actor, waiting) for actor in interpreter.actors.values())


def serving_due(interpreter: InterpreterBase, waiting: Collection[str]) -> float | None:
    """The earliest deadline worth waiting for, epoch ms; None where the machine rests.

    A state tagged ``waiting`` (or named so) rests whatever its timers. So does all that is below
    a child machine in such a state, and so do the machines above it: their deadlines are those
    of the person it waits for.
    """
    if interpreter.status != "running":
        return None
    own = interpreter.own_due()
    if own is None and not interpreter.actors:
        return None
    for node in active_nodes(interpreter.snapshot):
        if "waiting" in node.tags or node.key in waiting:
            return None
    if own is not None and any(waits(actor, waiting) for actor in interpreter.actors.values()):
        own = None
    found = [serving_due(actor, waiting) for actor in interpreter.actors.values()]
    return min((due for due in (own[0] if own else None, *found) if due is not None), default=None)


def reached(interpreter: InterpreterBase, until: Collection[str]) -> bool:
    """Whether an active leaf is one of ``until``, by key or id."""
    if not until:
        return False
    nodes = interpreter.machine.nodes
    return any(each in until or nodes[each].key in until for each in interpreter.snapshot.state_ids)
