"""What reviewers are asked, by one agent or by a tree of them, and the events that answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from guardchart.agents._context import pending_entries, shown_item
from guardchart.gate import approval_event
from guardchart.kernel import Event, Snapshot, as_event

__all__ = ["answers", "pending_approval"]

_SNAPSHOT_KEYS: Final = frozenset({"version", "machine", "value", "context"})
_DEEPEST: Final = 32


def pending_approval(context: Any) -> list[dict[str, Any]]:
    """The calls that wait for a person, in a whole tree of agents: what will run, if approved.

    Args:
        context: A machine's context, e.g. ``interp.context`` or ``result.context``, which know
            the agents below; or the interpreter, the result, or snapshot JSON such as
            ``state["xsm"]``. The context inside of snapshot JSON is that of one machine.

    Returns:
        ``[{id, tool_call_id, name, arguments, digest}, ...]``, the machine's own first, each
        agent's in its model's order; empty when nobody is asked. ``id`` is the ledger's, to be
        named by an approval; ``tool_call_id`` the provider's; ``arguments`` are validated,
        defaults filled in. An item of an agent below has its ``agent_id``, too.

    Source: xstate-statemachine, agents reference: pending_approval.

    Example:
        >>> pending_approval({"pending_tool_calls": []})
        []
    """
    found = []
    for agent_id, own in _contexts(context, None, 0):
        name = {} if agent_id is None else {"agent_id": agent_id}
        found += [
            {**name, **shown_item(entry)}
            for entry in pending_entries(own)
            if entry.get("needs_approval") is True and entry.get("decided") is not True
        ]
    return found


def answers(interpreter: Any, approve: Any) -> list[Event]:
    """The events that answer what a tree asks, one for each agent that is answered.

    Args:
        interpreter: The tree's root.
        approve: False rejects all, True approves all, a list of `pending_approval` what it
            shows.
    """
    asked = pending_approval(interpreter)
    if approve is not True and approve is not False:
        asked = list(approve)
    by_agent: dict[Any, list[Mapping[str, Any]]] = {}
    for item in asked:
        by_agent.setdefault(item.get("agent_id"), []).append(item)
    if approve is not False:
        return [as_event(approval_event(items)) for items in by_agent.values() or ([],)]
    return [
        Event("HUMAN_REJECTED", {} if agent_id is None else {"agent_id": agent_id})
        for agent_id in by_agent or (None,)
    ]


def _contexts(
    source: Any, agent_id: str | None, depth: int
) -> Iterator[tuple[str | None, Mapping[str, Any]]]:
    """The contexts of a tree with their agent ids, None for the root; a snapshot is untrusted."""
    if depth > _DEEPEST:
        return
    if isinstance(source, Snapshot):
        yield agent_id, source.context
        below = {n: c.snapshot for n, c in source.children.items() if c.snapshot is not None}
        if below:
            yield from _saved(below, agent_id or source.machine.id, depth)
    elif not isinstance(source, Mapping):
        # An interpreter knows its actors; of a result the context does.
        yield from _contexts(source.context, agent_id, depth + 1)
    elif _is_snapshot(source):
        yield agent_id, source["context"]
        children, machine = source.get("children"), source["machine"]
        if isinstance(children, Mapping):
            below = {k: v.get("snapshot") for k, v in children.items() if isinstance(v, Mapping)}
            yield from _saved(below, agent_id or str(machine.get("id")), depth)
    else:
        yield agent_id, source
        actors: Mapping[str, Any] = getattr(source, "actors", {})
        for each, context in actors.items():
            yield from _contexts(context, each, depth + 1)


def _saved(
    children: Mapping[str, Any], parent_id: str, depth: int
) -> Iterator[tuple[str | None, Mapping[str, Any]]]:
    for name, saved in children.items():
        if isinstance(saved, Mapping) and _is_snapshot(saved):
            yield from _contexts(saved, f"{parent_id}:{name}", depth + 1)


def _is_snapshot(source: Mapping[str, Any]) -> bool:
    return (
        source.keys() >= _SNAPSHOT_KEYS
        and isinstance(source["context"], Mapping)
        and isinstance(source["machine"], Mapping)
    )
