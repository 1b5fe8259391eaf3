"""What a statechart node hands back: the snapshot, new messages, and what the app adds."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from langgraph.types import Command

from guardchart.errors import (
    AgentConfigError,
    QueueFullError,
    SnapshotError,
    StepError,
    StoreError,
)
from guardchart.kernel import Receipt, Snapshot, dump
from guardchart.langgraph._messages import SPENT_IDS, without
from guardchart.langgraph._reducers import LINEAGE, lineage_after
from guardchart.langgraph._view import StatechartView, receipt_json
from guardchart.langgraph._visit import Visit

__all__ = ["close"]

# The event could not be taken at all. An action's own error is no such fault: the chart's
# policy has dealt with it, or has put the machine into `error`.
_HOST_FAULTS = (StepError, StoreError, QueueFullError)


def close(visit: Visit, interpreter: Any, receipt: Receipt | None) -> Any:
    """Return the node's update: a dict, or a ``Command`` where ``result_to_state`` gave one.

    Args:
        visit: The invocation.
        interpreter: Its interpreter, settled.
        receipt: What became of the event; None if none was sent.

    Raises:
        BaseException: What broke the machine, where an action, a guard or a service without
            ``onError`` did: the app's error, as it is, so that LangGraph's ``RetryPolicy``
            sees its class. The graph state keeps the snapshot it had.
    """
    settings = visit.settings
    snapshot: Snapshot = interpreter.snapshot
    _raise_fault(visit, interpreter, receipt)
    if receipt is not None:
        visit.receipt = receipt_json(None if visit.event is None else visit.event.type, receipt)
    update: dict[str, Any] = {}
    before = visit.loaded
    if (
        before is None
        or visit.receipt is not None
        or snapshot.rev != before.rev
        or snapshot.status != before.status
        or visit.rewrite
        or _moved_below(interpreter, before)
    ):
        snapshot, update = _fitting(visit, interpreter)
        visit.written = snapshot
        visit.added = update.get(settings.messages_key or "", ())
    if settings.event_key is not None and visit.consumed:
        update[settings.event_key] = None
    if settings.result_to_state is None:
        return update
    view = StatechartView(snapshot, visit.receipt, interpreter)
    return _merged(visit, update, settings.result_to_state(view, visit.state))


def _moved_below(interpreter: Any, before: Snapshot) -> bool:
    """Whether a child machine moved, which is no revision of its parent."""
    if all(child.snapshot is None for child in before.children.values()):
        return False
    moved: bool = interpreter.dump()["children"] != dump(before)["children"]
    return moved


def _raise_fault(visit: Visit, interpreter: Any, receipt: Receipt | None) -> None:
    if interpreter.bubbled is not None:
        raise interpreter.bubbled
    failed = interpreter.snapshot.status == "error"
    if failed and (visit.loaded is None or visit.loaded.status != "error"):
        error = interpreter.error
        if isinstance(error, BaseException):
            raise error
        raise StepError(f"the machine {interpreter.machine.id!r} failed")
    for fault in interpreter.faults:
        if isinstance(fault, _HOST_FAULTS):
            raise fault
    # Whoever had to decide about the event raised; the chart never saw it.
    undecided = receipt is not None and (receipt.reason or "").endswith("while deciding")
    if undecided and receipt is not None and receipt.error is not None:
        raise receipt.error


def _fitting(visit: Visit, interpreter: Any) -> tuple[Snapshot, dict[str, Any]]:
    """The snapshot and its update; of a loop that is too large to be saved, what can be.

    Raising would leave the thread with the snapshot it had, and raise again at every event: a
    side effect that ran could never be told to the model.
    """
    snapshot: Snapshot = interpreter.snapshot
    try:
        return snapshot, _written(visit, interpreter, snapshot)
    except SnapshotError:
        agent = visit.settings.agent
        for fewer in () if agent is None else agent.smaller(snapshot.machine, snapshot):
            with contextlib.suppress(SnapshotError):
                return fewer, _written(visit, interpreter, fewer)
        raise


def _written(visit: Visit, interpreter: Any, snapshot: Snapshot) -> dict[str, Any]:
    settings = visit.settings
    added = _added(visit, snapshot)
    data = _dumped(visit, interpreter, snapshot, added)
    update: dict[str, Any] = {settings.state_key: data}
    if added:
        update[settings.messages_key or ""] = added
    if settings.seal is not None:
        thread, machine = visit.sealed_for()
        data["seal"] = settings.seal.sign(data, thread=thread, machine=machine)
    if visit.receipt is not None:
        data["receipt"] = visit.receipt
    lineage = None if visit.runtime is None else lineage_after(visit.found)
    if lineage is not None:
        data[LINEAGE] = lineage
    return update


def _added(visit: Visit, snapshot: Snapshot) -> list[Any]:
    """What the channel has to gain; nothing where there is none."""
    if visit.conversation is None:
        return []
    said = snapshot.context.get("messages") or ()
    begun = visit.snapshot is not None
    return visit.conversation.new(visit.kept, said, snapshot.run or "", begun=begun)


def _dumped(
    visit: Visit, interpreter: Any, snapshot: Snapshot, added: Sequence[Any]
) -> dict[str, Any]:
    """The snapshot as JSON types, without what the channel holds: the conversation, its calls.

    Raises:
        AgentConfigError: Nobody could load it again.
    """
    own = snapshot is interpreter.snapshot
    if visit.conversation is None:
        data: dict[str, Any] = interpreter.dump() if own else dump(snapshot)
    else:
        kept: dict[str, Any] = snapshot.context | {"messages": []}
        if isinstance(kept.get(SPENT_IDS), list) and kept[SPENT_IDS]:
            kept[SPENT_IDS] = without(
                kept[SPENT_IDS], visit.conversation.call_ids(snapshot.run, added)
            )
        if interpreter.actors and own:
            data = interpreter.dump()
            data["context"] |= {key: kept[key] for key in ("messages", SPENT_IDS) if key in kept}
        else:
            data = dump(snapshot.replace(context=kept))
    if visit.settings.seal is None and (
        data.get("sends") or any("spawned" in each for each in data["children"].values())
    ):
        raise AgentConfigError(
            f"statechart_node: {snapshot.machine.id!r} rests with a delayed send or a spawned "
            "actor, which load only from a sealed snapshot; pass seal="
        )
    return data


def _merged(visit: Visit, update: dict[str, Any], result: Any) -> Any:
    if result is None:
        return update
    if isinstance(result, Command):
        extra = {} if result.update is None else result.update
        if isinstance(extra, list | tuple):
            extra = dict(extra)
        if not isinstance(extra, Mapping):
            raise AgentConfigError(
                "result_to_state: a Command's update must be a dict, a list of pairs or None"
            )
        return dataclasses.replace(result, update=_joined(visit, update, extra))
    if not isinstance(result, Mapping):
        raise AgentConfigError(
            f"result_to_state must return a dict, a Command or None, not {type(result).__name__}"
        )
    return _joined(visit, update, result)


def _joined(visit: Visit, update: dict[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    settings = visit.settings
    if settings.state_key in extra:
        raise AgentConfigError(
            f"result_to_state must not write {settings.state_key!r}: "
            "the key is reserved for statechart_node"
        )
    joined = {**update, **extra}
    key = settings.messages_key
    if key is not None and key in update and key in extra:
        more = extra[key]
        joined[key] = [*update[key], *(more if isinstance(more, list) else [more])]
    return joined
