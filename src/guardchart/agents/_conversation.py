"""From one turn of a conversation to the next, and what is left of a tampered one.

The chart ends with each answer. Hosts that hold a conversation (a LangGraph thread, a store
key) build the next turn from the finished one: the messages, the spent ids, the run and the
batch number go on; the state starts anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from guardchart.agents._actions import error_of
from guardchart.kernel import Event, Machine, Snapshot, dump, initial_transition, load

__all__ = ["continued", "is_start", "tampered"]

_KEPT: Final = ("messages", "spent_call_ids", "task")
_SPENT: Final = ("turns", "tokens_in", "tokens_out", "cost_usd")


def is_start(event: Any) -> bool:
    """Whether an event opens a turn."""
    if isinstance(event, Event):
        return event.type == "START"
    return event == "START" or (isinstance(event, Mapping) and event.get("type") == "START")


def continued(machine: Machine, snapshot: Snapshot, *, budget_scope: str) -> Snapshot:
    """The idle snapshot of a conversation's next turn.

    Args:
        machine: The machine.
        snapshot: Its finished snapshot.
        budget_scope: ``"turn"`` starts the counters anew, ``"conversation"`` keeps them.
    """
    fresh, _ = initial_transition(machine)
    keys = _KEPT if budget_scope == "turn" else _KEPT + _SPENT
    kept = {key: snapshot.context[key] for key in keys if key in snapshot.context}
    return fresh.replace(
        context={**fresh.context, **kept, "result": None, "error": None},
        rev=snapshot.rev + 1,
        run=snapshot.run,
        batch_no=snapshot.batch_no,
    )


def tampered(machine: Machine, run: str) -> Snapshot:
    """The ``error`` end of a machine whose snapshot cannot be trusted: a fresh context."""
    fresh, _ = initial_transition(machine)
    data = dump(fresh.replace(run=run))
    data.pop("state_ids", None)
    data.pop("configuration", None)
    data["status"] = "done"
    data["value"] = "error"
    data["context"] = {
        **data["context"],
        "error": error_of("tampered", "the snapshot's seal does not fit; nothing of it was kept"),
    }
    return load(machine, data)
