"""A thread seen from outside: what it waits for, and how it goes on.

Whatever a LangGraph thread still has to do stands in ``state.tasks``, that of subgraphs in the
tasks' own states. ``state.next`` is empty after a crash between a task's writes and the next
checkpoint, so it tells nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from langgraph.types import Command

from guardchart.agents import pending_approval as pending_of
from guardchart.errors import AgentConfigError

__all__ = ["apending_approval", "aresume_pending", "pending_approval", "resume_pending"]

_BATCHED: Final = "statechart.approval"
_PER_CALL: Final = "tool_approval"
_DECISION: Final = ("id", "digest", "decision", "arguments", "reason")


def pending_approval(graph: Any, config: Any) -> list[dict[str, Any]]:
    """The calls a thread waits for a person to decide, those of subgraphs included.

    Args:
        graph: The compiled graph, the outermost one.
        config: The thread's configuration.

    Returns:
        ``[{id, tool_call_id, name, arguments, digest, interrupt_id}, ...]``, an item of an agent
        below with its ``agent_id``; empty when nobody is asked.

    Example:
        >>> from langgraph.checkpoint.memory import InMemorySaver
        >>> from guardchart.agents import TOOL_LOOP, FakeModel, agent_logic
        >>> from guardchart.langgraph import statechart_graph
        >>> graph = statechart_graph(TOOL_LOOP, agent_logic(FakeModel([]), []),
        ...                          checkpointer=InMemorySaver())
        >>> pending_approval(graph, {"configurable": {"thread_id": "t"}})
        []
    """
    return list(_items(graph.get_state(config, subgraphs=True)))


async def apending_approval(graph: Any, config: Any) -> list[dict[str, Any]]:
    """`pending_approval` for an async saver, from its own event loop.

    Example:
        >>> import asyncio
        >>> from langgraph.checkpoint.memory import InMemorySaver
        >>> from guardchart.agents import TOOL_LOOP, FakeModel, agent_logic
        >>> from guardchart.langgraph import statechart_graph
        >>> graph = statechart_graph(TOOL_LOOP, agent_logic(FakeModel([]), []),
        ...                          checkpointer=InMemorySaver())
        >>> asyncio.run(apending_approval(graph, {"configurable": {"thread_id": "t"}}))
        []
    """
    return list(_items(await graph.aget_state(config, subgraphs=True)))


def resume_pending(
    graph: Any,
    config: Any,
    decisions: Sequence[Mapping[str, Any]] = (),
    *,
    by: str | None = None,
) -> Any:
    """Go on with a thread that was cut off, or that waits for decisions.

    Args:
        graph: The compiled graph, the outermost one.
        config: The thread's configuration.
        decisions: One for each call that is asked about: an item of `pending_approval` with
            ``"decision"`` set to ``"approve"``, ``"reject"`` or ``"edit"`` (then ``"arguments"``
            are the new ones), and a ``"reason"`` if you like.
        by: Who decided, for the record.

    Returns:
        What ``graph.invoke`` returns; None where there is nothing to go on with: the thread has
        come to its end, or it waits for decisions and none were given.

    Raises:
        AgentConfigError: A decision is about no call that is asked about, or one is missing;
            nothing was sent.
        pydantic.ValidationError: A decision does not fit its call; the question stays open.

    Example:
        >>> from langgraph.checkpoint.memory import InMemorySaver
        >>> from guardchart.agents import TOOL_LOOP, FakeModel, agent_logic
        >>> from guardchart.langgraph import statechart_graph
        >>> graph = statechart_graph(TOOL_LOOP, agent_logic(FakeModel([]), []),
        ...                          checkpointer=InMemorySaver())
        >>> resume_pending(graph, {"configurable": {"thread_id": "t"}}) is None
        True
    """
    found, sent = _going_on(graph.get_state(config, subgraphs=True), decisions, by)
    return graph.invoke(sent, config) if found else None


async def aresume_pending(
    graph: Any,
    config: Any,
    decisions: Sequence[Mapping[str, Any]] = (),
    *,
    by: str | None = None,
) -> Any:
    """`resume_pending` for an async saver, from its own event loop.

    Example:
        >>> import asyncio
        >>> from langgraph.checkpoint.memory import InMemorySaver
        >>> from guardchart.agents import TOOL_LOOP, FakeModel, agent_logic
        >>> from guardchart.langgraph import statechart_graph
        >>> graph = statechart_graph(TOOL_LOOP, agent_logic(FakeModel([]), []),
        ...                          checkpointer=InMemorySaver())
        >>> asyncio.run(aresume_pending(graph, {"configurable": {"thread_id": "t"}})) is None
        True
    """
    state = await graph.aget_state(config, subgraphs=True)
    found, sent = await asyncio.to_thread(_going_on, state, decisions, by)
    return await graph.ainvoke(sent, config) if found else None


def _going_on(
    state: Any, decisions: Sequence[Mapping[str, Any]], by: str | None
) -> tuple[bool, Any]:
    """Whether there is anything to go on with, and what to invoke the graph with."""
    items = list(_items(state))
    if not items:
        if decisions:
            raise AgentConfigError("resume_pending: the thread asks about no call")
        unanswered = any(task.interrupts for each in _states(state) for task in each.tasks)
        return bool(state.tasks) and not unanswered, None
    if not decisions:
        return False, None
    by_id = {item["id"]: item for item in items}
    answers: dict[str, list[dict[str, Any]]] = {}
    for each in decisions:
        item = by_id.pop(each.get("id"), None)
        if item is None:
            raise AgentConfigError(
                "resume_pending: a decision is about no call that is asked about"
            )
        answers.setdefault(item["interrupt_id"], []).append(_decision(each))
    missing = {item["interrupt_id"] for item in by_id.values()} & set(answers)
    if missing:
        raise AgentConfigError("resume_pending: decide about every call of a question")
    named = {} if by is None else {"by": by}
    return True, Command(
        resume={ident: {"decisions": made, **named} for ident, made in answers.items()}
    )


def _decision(each: Mapping[str, Any]) -> dict[str, Any]:
    made = {key: each[key] for key in _DECISION if each.get(key) is not None}
    if made.get("decision") != "edit":
        made.pop("arguments", None)
    return made


def _items(state: Any) -> Iterator[dict[str, Any]]:
    for each in _states(state):
        known = {item["id"]: item for item in _known(each.values)}
        for task in each.tasks:
            for interrupt in task.interrupts:
                for call in _calls(interrupt.value):
                    shown = known.get(call["id"], {**call, "arguments": None})
                    yield {**shown, "interrupt_id": interrupt.id}


def _states(state: Any) -> Iterator[Any]:
    """A thread's state, and the innermost ones below it that ask; a parent repeats its child's."""
    below = [task.state for task in state.tasks if hasattr(task.state, "tasks")]
    if not below:
        yield state
    for each in below:
        yield from _states(each)


def _known(values: Any) -> Iterator[dict[str, Any]]:
    """The pending calls of every snapshot in a state's values."""
    held = values.values() if isinstance(values, Mapping) else vars(values).values()
    for value in held:
        if isinstance(value, Mapping) and {"machine", "context", "value"} <= value.keys():
            yield from pending_of(value)


def _calls(payload: Any) -> list[Mapping[str, Any]]:
    if not isinstance(payload, Mapping):
        return []
    kind = payload.get("type")
    if kind == _BATCHED:
        return list(payload["calls"])
    if kind == _PER_CALL:
        return [{key: payload[key] for key in ("id", "tool_call_id", "name", "digest")}]
    return []
