"""Who a person's decision is for: in a tree of machines, the one that asked.

A decision may name a machine by its actor path (``agent_id``). One that does not is for the
machine it was sent to, unless that machine does not wait for it and exactly one below does.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from guardchart.kernel import Event, accepted_events

__all__ = ["DECISIONS", "addressee", "tree"]

DECISIONS: Final = frozenset({"HUMAN_APPROVED", "HUMAN_REJECTED", "HUMAN_DECIDED"})
"""The types of event by which a person decides."""

_NOBODY: Final = "no agent of this name is running"
_NOTHING: Final = "it names no call that waits for a decision"
_SEVERAL: Final = "several agents wait for a decision; name one of them by agent_id"


def tree(interpreter: Any) -> Iterator[Any]:
    """The interpreter and the live child machines below it, parents first."""
    yield interpreter
    for actor in interpreter.actors.values():
        yield from tree(actor)


def addressee(interpreter: Any, event: Event) -> tuple[Any, str]:
    """Find the machine a decision is for.

    Returns:
        ``(interpreter, "")``, or ``(None, reason)`` where it is for nobody or not for one only.
    """
    named = event.payload.get("agent_id")
    if named is not None:
        for each in tree(interpreter):
            if each.id == named:
                return each, ""
        return None, _NOBODY
    fits = [(_fit(each, event), each) for each in tree(interpreter)]
    best = max(fit for fit, _ in fits)
    found = [each for fit, each in fits if fit == best]
    if best == 0 and interpreter._hook is None and event.type not in _accepted(interpreter):
        return None, _NOTHING
    if best == 0 or interpreter in found:
        return interpreter, ""
    return (found[0], "") if len(found) == 1 else (None, _SEVERAL)


def _accepted(interpreter: Any) -> tuple[str, ...]:
    """What the chart may have a use for itself, though no agent asks."""
    return accepted_events(interpreter.snapshot)


def _fit(interpreter: Any, event: Event) -> int:
    """How well a decision fits what a machine asks: 0 not at all, 2 by the ids it shows."""
    asked = getattr(interpreter._hook, "asked", None)
    if asked is None or interpreter.status != "running":
        return 0
    return int(asked(interpreter.snapshot, event))
