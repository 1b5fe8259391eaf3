"""From a paused run to its results: what a person decided, read from the ledger."""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from typing import Any, Final

from pydantic_ai.messages import ToolCallPart
from pydantic_ai.tools import DeferredToolRequests, DeferredToolResults, ToolApproved, ToolDenied
from pydantic_ai.toolsets import FunctionToolset

from guardchart.errors import AgentConfigError, ApprovalPendingError
from guardchart.gate import GuardSession, answer_from_row, closing_text, pending_item
from guardchart.gate._answers import IN_DOUBT
from guardchart.pydantic_ai._calls import Tools, is_of, shown_arguments
from guardchart.pydantic_ai._guard import StatechartGuard

__all__ = ["approvals_for", "pending_approval"]

_NOT_SHOWN: Final = closing_text("tampered")


def _shown(requests: DeferredToolRequests, call: ToolCallPart) -> Mapping[str, Any] | None:
    """Return what the guard wrote beside a call; None where another asked."""
    metadata = (requests.metadata or {}).get(call.tool_call_id)
    shown = metadata.get("guardchart") if isinstance(metadata, Mapping) else None
    if not isinstance(shown, Mapping) or not isinstance(shown.get("scope"), str):
        return None
    return shown if isinstance(shown.get("call_id"), str) else None


def pending_approval(requests: DeferredToolRequests | Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return what a reviewer is asked about: ``{id, tool_call_id, name, arguments, digest}``.

    Args:
        requests: the output of a run that paused, read again where it was kept in JSON; or what
            a chart keeps of a paused service, ``context["paused_agent"]``.

    Returns:
        One item for each call that needs a decision; held calls and those that another part of
        the application deferred are not among them.
    """
    if isinstance(requests, Mapping):
        kept = requests.get("deferred")
        kept = kept if isinstance(kept, (list, tuple)) else ()  # a context is untrusted
        asked = [each for each in kept if isinstance(each, Mapping)]
        return [dict(each) for each in asked if not (each.get("held") or each.get("external"))]
    out = []
    for call in requests.approvals:
        shown = _shown(requests, call)
        if shown is not None and not shown.get("held"):
            out.append(
                {
                    "id": shown["call_id"],
                    "tool_call_id": call.tool_call_id,
                    "name": call.tool_name,
                    "arguments": shown_arguments(shown),
                    "digest": shown.get("digest"),
                }
            )
    return out


def approvals_for(
    requests: DeferredToolRequests,
    guard: StatechartGuard[Any] | GuardSession,
    decisions: Any = None,
    *,
    by: str | None = None,
    scope: str | None = None,
) -> DeferredToolResults:
    """Record what a person decided, and answer every open call from the ledger.

    What a run is resumed with is what the ledger says, not what the caller hopes: a call that
    somebody else has rejected meanwhile is denied, one that ran already gives its result.

    Args:
        requests: the output of the run that paused.
        guard: the guard of that run, or one made alike in another process; a `GuardSession`
            where the guard finds its own by a function of ``RunContext``.
        decisions: an event (`approval_event`, ``HUMAN_REJECTED``, ``HUMAN_DECIDED``) or a list
            of ``{id, decision, digest?, arguments?, reason?}``; None where they were recorded
            before, by an inbox for example.
        by: who decides, for the record.
        scope: under what the conversation's calls are filed, where the caller knows it; calls
            of another are denied. None believes the requests, which name it themselves.

    Returns:
        ``deferred_tool_results`` for the next run: approved, held and done calls as
        ``ToolApproved`` (an edited one with the reviewer's arguments), all others as
        ``ToolDenied`` with the reason. Calls that somebody else deferred are left out.

    Raises:
        DecisionRefused: the decisions do not fit the calls. Nothing was recorded.
        ApprovalPendingError: a call still waits; what was decided stays decided.
        AgentConfigError: the guard does not know this conversation; pass its session.
    """
    ours = [(call, shown) for call in requests.approvals if (shown := _shown(requests, call))]
    by_scope: dict[str, list[tuple[ToolCallPart, Mapping[str, Any]]]] = {}
    for call, shown in ours:
        by_scope.setdefault(shown["scope"], []).append((call, shown))
    out: dict[str, Any] = {}
    waiting: list[dict[str, Any]] = []
    for there, items in by_scope.items():
        if scope is not None and there != scope:
            out.update((call.tool_call_id, ToolDenied(_NOT_SHOWN)) for call, _ in items)
            continue
        session = _session_of(guard, there)
        if decisions is not None:
            _decide(session, guard, items, decisions, by)
        for call, shown in items:
            answer = _answer(session, guard, call, shown, waiting)
            if answer is not None:
                out[call.tool_call_id] = answer
    if waiting:
        raise ApprovalPendingError(waiting)
    return DeferredToolResults(approvals=out)


def _session_of(guard: Any, scope: str) -> GuardSession:
    if isinstance(guard, GuardSession):
        return guard if guard.host.scope == scope else guard.conversation(scope)
    if not isinstance(guard, StatechartGuard):
        raise AgentConfigError(
            f"approvals_for: pass the StatechartGuard or its GuardSession, not "
            f"{type(guard).__name__}"
        )
    return guard.session_of(scope)


def _decide(
    session: GuardSession,
    guard: Any,
    items: Sequence[tuple[ToolCallPart, Mapping[str, Any]]],
    decisions: Any,
    by: str | None,
) -> None:
    rows = []
    for call, shown in items:
        row = None if shown.get("held") else _row(session, call, shown)
        if row is not None:
            rows.append((row, call.tool_call_id))
    still = {row.status for row, _ in rows}
    if "proposed" not in still and not ("approved" in still and _takes_back(decisions)):
        return  # the same answer once more: the ledger has it
    if not len(session.registry) and isinstance(guard, StatechartGuard):
        session.registry = _registry(guard)
    session.resume(rows)
    session.decide(decisions, by=by)


def _takes_back(decisions: Any) -> bool:
    """Whether an answer says anything but yes."""
    if isinstance(decisions, Mapping):
        if decisions.get("type") == "HUMAN_REJECTED":
            return True
        decisions = decisions.get("decisions", ())
    return any(
        isinstance(each, Mapping) and each.get("decision") != "approve" for each in decisions
    )


def _row(session: GuardSession, call: ToolCallPart, shown: Mapping[str, Any]) -> Any:
    """Return the row of a call, where it is the row of what was shown."""
    row = session.ledger.row(session.host.scope, shown["call_id"], follow=False)
    if row is None or row.slot.tool != call.tool_name or not is_of(row, shown.get("tool"), shown):
        return None
    return row


def _answer(
    session: GuardSession,
    guard: Any,
    call: ToolCallPart,
    shown: Mapping[str, Any],
    waiting: list[dict[str, Any]],
) -> ToolApproved | ToolDenied | None:
    if shown.get("held"):
        return ToolApproved()
    ledger, now = session.ledger, session.now_ms()
    row = _row(session, call, shown)
    if row is None:
        return ToolDenied(_NOT_SHOWN)
    current = ledger.row(session.host.scope, row.id) or row
    if current.status == "proposed" and current.decide_by is not None and now > current.decide_by:
        closed = ledger.close(session.host.scope, [row.id], "expired", status="expired", now=now)
        current = closed.get(row.id, current)
        row = current
    if current.status == "proposed":
        waiting.append(pending_item(current, tool_call_id=call.tool_call_id))
        return None
    if current.status == "claimed" and _lost(session, guard, current, now):
        return ToolDenied(IN_DOUBT)
    if current.status in ("approved", "done", "claimed"):
        edited = current.arguments if current.id != row.id else None
        return ToolApproved(override_args=None if edited is None else dict(edited))
    answer = answer_from_row(row, ledger=ledger, now=now)
    return ToolDenied(closing_text("void") if answer is None else answer.text)


def _lost(session: GuardSession, guard: Any, row: Any, now: int) -> bool:
    """Whether a call that was entered will not come to its end any more."""
    dropped: Any = getattr(guard, "dropped", frozenset())
    scope = session.host.scope
    if (scope, row.id) in dropped:
        return True
    return any(each.id == row.id for each in session.ledger.in_doubt(scope, now=now))


def _registry(guard: StatechartGuard[Any]) -> Any:
    """Return the tools of the guard's agents, as far as they are known without a run."""
    tools = Tools(side_effects=(), timeout_s=300.0, max_output_chars=4000)
    found: dict[str, Any] = {}
    for agent in guard.agents:
        for toolset in agent.toolsets:
            leaves: list[Any] = []
            toolset.apply(leaves.append)
            for leaf in leaves:
                if isinstance(leaf, FunctionToolset):
                    found.update({name: _as_tool(each) for name, each in leaf.tools.items()})
    tools.update(found, None)
    return tools.registry


def _as_tool(tool: Any) -> Any:
    return types.SimpleNamespace(
        tool_def=tool.tool_def,
        args_validator=tool.function_schema.validator,
        call_func=tool.function_schema.call,
    )
