"""One budget for a tree of agents: what they report, summed up in their parent's context."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Final

from guardchart.agents._budgets import (
    MAX_COST_USD,
    MAX_COUNT,
    Budget,
    report_totals,
    sum_totals,
    total_of,
)
from guardchart.agents._messages import safe_text
from guardchart.errors import AgentConfigError
from guardchart.runtime import MachineLogic

__all__ = ["BudgetPlugin"]

_REPORTS: Final = frozenset({"AGENT_DONE", "AGENT_FAILED"})
_MAX_SEEN: Final = 10_000
_MAX_ID_CHARS: Final = 200


class BudgetPlugin:
    """Adds up what agents report to their parent, and enforces a budget for all of them.

    Each ``AGENT_DONE`` and ``AGENT_FAILED`` is counted when it is sent, before the parent sees
    it: ``total_usage`` and ``usage_by_agent`` of the parent's context are up to date for
    whatever is queued already. The report that reaches a limit sets ``budget_exceeded``, and
    ``BUDGET_EXCEEDED`` follows it, so that its result is still collected. ``spawn_agent`` then
    spawns nobody any more. Agents that run already go on and are counted, so the total may
    exceed the limit by what they spend.

    Only what is reported counts. Attach it with ``interpreter.use(plugin)`` or ``plugins=``;
    one may serve several interpreters, and counts for each by itself.

    Args:
        max_total_usd: Limit of the tree's cost in US dollars, or None.
        max_total_tokens: Limit of its input and output tokens together, or None.
        max_tracked_agents: How many agents ``usage_by_agent`` keeps, the newest ones;
            ``total_usage`` is never cut.

    Raises:
        AgentConfigError: A limit is text, a bool, NaN, infinite or negative, a token limit or
            ``max_tracked_agents`` is no int, or there is no limit at all.

    Source: xstate-statemachine, agents reference: BudgetPlugin.

    Example:
        >>> from guardchart import SyncInterpreter, create_machine
        >>> desk = create_machine({"id": "desk", "initial": "open", "context": {}, "states": {
        ...     "open": {"on": {"BUDGET_EXCEEDED": "closed"}}, "closed": {}}})
        >>> desk = SyncInterpreter(desk, plugins=[BudgetPlugin(max_total_tokens=100)]).start()
        >>> spent = {"turns": 1, "input_tokens": 90, "output_tokens": 20}
        >>> receipt = desk.send("AGENT_DONE", agent_id="desk:clerk-1", usage=spent)
        >>> desk.context["total_usage"]["input_tokens"], desk.context["budget_exceeded"]
        (90, True)
        >>> desk.current_state_ids == {"desk.closed"}
        True
    """

    def __init__(
        self,
        max_total_usd: float | None = None,
        max_total_tokens: int | None = None,
        *,
        max_tracked_agents: int = 10_000,
    ) -> None:
        try:
            limits = Budget(max_total_tokens, max_total_usd, None)
        except AgentConfigError as error:
            words = str(error).replace("Budget: max_", "BudgetPlugin: max_total_")
            raise AgentConfigError(words) from None
        if max_total_usd is None and max_total_tokens is None:
            raise AgentConfigError("BudgetPlugin: set max_total_usd, max_total_tokens or both")
        if type(max_tracked_agents) is not int or max_tracked_agents < 1:
            raise AgentConfigError("BudgetPlugin: max_tracked_agents must be an int of at least 1")
        self.max_total_usd = limits.max_usd
        self.max_total_tokens = limits.max_tokens
        self.max_tracked_agents = max_tracked_agents
        # Held, not only noted: the identity of an event that is gone may be another's.
        self._seen: OrderedDict[int, Any] = OrderedDict()
        self._lock = threading.Lock()

    def exceeded(self, totals: Any) -> bool:
        """Whether totals such as ``context["total_usage"]`` have reached a limit.

        Args:
            totals: ``turns``, ``input_tokens``, ``output_tokens``, ``cost_usd``; absent is 0,
                and what is no number has reached every limit.
        """
        read = total_of(totals)
        tokens = read["input_tokens"] + read["output_tokens"]
        full = max(read["input_tokens"], read["output_tokens"]) >= MAX_COUNT
        if self.max_total_tokens is not None and (full or tokens >= self.max_total_tokens):
            return True
        spent = read["cost_usd"]
        return self.max_total_usd is not None and (
            spent >= MAX_COST_USD or spent >= self.max_total_usd
        )

    def guards(self) -> MachineLogic:
        """The guard ``underGlobalBudget``: true until a limit is reached.

        Returns:
            A ``MachineLogic`` to merge into the parent's own.

        Example:
            >>> guard = BudgetPlugin(1.0).guards().guards["underGlobalBudget"]
            >>> guard({"total_usage": {"cost_usd": 0.9}}, None), guard({"budget_exceeded": True}, 0)
            (True, False)
        """

        def under(context: Any, event: Any) -> bool:
            flagged = context.get("budget_exceeded") not in (None, False)
            return not flagged and not self.exceeded(context.get("total_usage") or {})

        return MachineLogic(guards={"underGlobalBudget": under})

    def on_before_send(self, interpreter: Any, event: Any) -> None:
        """Count a report when it is sent."""
        if event.type in _REPORTS and interpreter.status == "running":
            self._count(interpreter, event)

    def on_event_received(self, interpreter: Any, event: Any) -> None:
        """Count a report that was not counted when it was sent; forget one that was."""
        if event.type not in _REPORTS:
            return
        self._count(interpreter, event)
        with self._lock:
            self._seen.pop(id(event), None)

    def _count(self, interpreter: Any, event: Any) -> None:
        with self._lock:
            if self._seen.get(id(event)) is event:
                return
            self._seen[id(event)] = event
            while len(self._seen) > _MAX_SEEN:
                self._seen.popitem(last=False)
        usage = report_totals(event.payload.get("usage"))
        context = interpreter.context
        totals = sum_totals(context.get("total_usage") or {}, usage)
        updates: dict[str, Any] = {
            "total_usage": totals,
            "usage_by_agent": self._by_agent(context, event.payload.get("agent_id"), usage),
        }
        trips = context.get("budget_exceeded") in (None, False) and self.exceeded(totals)
        if trips:
            updates["budget_exceeded"] = True
        interpreter.update_context(updates)
        if trips:
            interpreter.send("BUDGET_EXCEEDED", total_usage=dict(totals))

    def _by_agent(
        self, context: Mapping[str, Any], agent_id: Any, usage: dict[str, Any]
    ) -> dict[str, Any]:
        known = context.get("usage_by_agent")
        agents = dict(known) if isinstance(known, Mapping) else {}
        if isinstance(agent_id, str) and agent_id:
            name = safe_text(agent_id[:_MAX_ID_CHARS])
            agents[name] = sum_totals(agents.pop(name, {}), usage)  # the newest stands last
        for name in list(agents)[: max(len(agents) - self.max_tracked_agents, 0)]:
            del agents[name]
        return agents
