"""From one turn of a conversation to the next, and what is left of a tampered one.

The chart ends with each answer. Hosts that hold a conversation (a LangGraph thread, a store
key) build the next turn from the finished one: the messages, the spent ids, the run and the
batch number go on; the state starts anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from guardchart.agents._actions import SPENT, error_of
from guardchart.agents._window import window
from guardchart.kernel import Event, Machine, Snapshot, dump, initial_transition, load

__all__ = ["continued", "is_final", "is_start", "smaller", "tampered"]

_KEPT: Final = ("messages", "spent_call_ids", "task")


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
    keys = _KEPT if budget_scope == "turn" else _KEPT + SPENT
    kept = {key: snapshot.context[key] for key in keys if key in snapshot.context}
    return fresh.replace(
        context={**fresh.context, **kept, "result": None, "error": None},
        rev=snapshot.rev + 1,
        run=snapshot.run,
        batch_no=snapshot.batch_no,
    )


def tampered(machine: Machine, run: str) -> Snapshot:
    """The ``error`` end of a machine whose snapshot cannot be trusted: a fresh context."""
    message = "the snapshot's seal does not fit; nothing of it was kept"
    return _ended(machine, {"run": run}, {"error": error_of("tampered", message)})


def smaller(machine: Machine, snapshot: Snapshot) -> Iterator[Snapshot]:
    """What to save in place of a snapshot that is too large to be saved, the best first.

    Its conversation is cut to fewer and fewer of its newest turns. The last resort, where the
    newest turn alone is too large, is the ``error`` end with the counters: a host that raised
    instead would raise at every event to come.
    """
    messages, task = snapshot.context.get("messages"), snapshot.context.get("task")
    count = len(messages) if isinstance(messages, list) else 0
    while messages and count > 1:
        count = (count + 1) // 2 if count > 2 else 1
        kept = window(messages, count, task=task if isinstance(task, str) else None)
        yield snapshot.replace(context=snapshot.context | {"messages": kept})
    if is_final(machine, "error"):
        message = "the conversation is larger than a snapshot may be; it was not kept"
        counted = {key: snapshot.context[key] for key in SPENT if key in snapshot.context}
        data = {"run": snapshot.run, "rev": snapshot.rev, "batch_no": snapshot.batch_no}
        yield _ended(machine, data, {**counted, "error": error_of("too_large", message)})


def is_final(machine: Machine, key: str) -> bool:
    """Whether a machine has a final state of this name at its top."""
    node = machine.states.get(key)
    return node is not None and node.type == "final"


def _ended(machine: Machine, identity: Mapping[str, Any], context: Mapping[str, Any]) -> Snapshot:
    fresh, _ = initial_transition(machine)
    data = {**dump(fresh), **identity}
    data.pop("state_ids", None)
    data.pop("configuration", None)
    data["status"] = "done"
    data["value"] = "error"
    data["context"] = {**data["context"], **context}
    return load(machine, data)
