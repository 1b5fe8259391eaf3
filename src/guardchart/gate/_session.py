"""`GuardSession`: a chart, a registry and a ledger behind a door that owns its own loop.

A framework that runs its own agent loop asks the session which tools the chart allows now, hands
it each turn's calls, and runs a call only with what `enter` gives. What became of a call returns
as an event, so the chart moves with the conversation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final, TypeVar

from guardchart.errors import DecisionRefused, LedgerError, ToolDeniedError
from guardchart.gate._answers import (
    Answer,
    Outcome,
    close_open,
    closing_text,
)
from guardchart.gate._approvals import other_name, pending_item, read_decisions
from guardchart.gate._arguments import digest
from guardchart.gate._authorise import AuthorisedCall, aauthorise, authorise, in_thread
from guardchart.gate._chart_side import as_event
from guardchart.gate._charts import LiveChart
from guardchart.gate._check import DEFAULT_MAX_TOOL_CALLS, Facts
from guardchart.gate._registry import ToolRegistry
from guardchart.gate._run import AsText, Body, Pauses, aexecute, execute
from guardchart.gate._tools import ToolCall, shown_name
from guardchart.gate._turn import Proposed
from guardchart.gate._turn_side import TurnSide
from guardchart.persistence import Decision

__all__ = ["GuardSession", "Proposed"]

T = TypeVar("T")
HELD: Final = "held until a person has decided about a call before it"


class GuardSession(TurnSide):
    """The gate for one conversation, driven by a framework.

    Args:
        machine: a compiled chart, bound. It has no services of its own: the framework's loop is
            the agent, the chart is its policy. Or an interpreter that runs a chart, which then
            moves by itself as well and is sent the outcomes.
        registry: the application's tools; every ``meta.tools`` is checked against it. None where
            the door knows them later and sets ``registry`` itself.
        ledger: where rows are kept; None takes the process's own, in memory.
        scope: ``str(thread_id)`` or the store key; None is this run alone, in memory only.
        snapshot: a kernel Snapshot to go on from (see ``kernel.load``); None starts the chart.
            An interpreter has its own.
        input: for a chart that is started.
        now: the host's clock in epoch milliseconds, a callable; None takes the system's.
        max_tool_calls: the most calls of one turn.
        human_timeout_s: seconds a decision may take; None for no limit.
        approval_ttl_s: seconds an approval is good.
        agent: the actor path that rows are filed under.

    Raises:
        AgentConfigError: an unknown tool in the chart, or a ledger that outlives the process
            without a scope.
        NotSupportedError: the chart starts a service.

    >>> from guardchart.gate import approval_event, tool, tool_registry
    >>> from guardchart.kernel import create_machine
    >>> def refund(order: int) -> str:
    ...     return f"refunded {order}"
    >>> chart = {"id": "desk", "initial": "open", "states": {
    ...     "open": {"meta": {"tools": ["refund"]}, "on": {"tool.done.refund": "closed"}},
    ...     "closed": {}}}
    >>> registry = tool_registry(tool(refund, side_effect=True))
    >>> session = GuardSession(create_machine(chart), registry)
    >>> call = ToolCall("c1", "refund", {"order": 7})
    >>> session.propose([call])[0].status
    'ask'
    >>> _ = session.decide(approval_event(session.pending(), by="ann"))
    >>> session.run(call).text, sorted(session.snapshot.state_ids)
    ('refunded 7', ['desk.closed'])
    """

    def __init__(
        self,
        machine: Any,
        registry: ToolRegistry | None = None,
        ledger: Any = None,
        scope: str | None = None,
        snapshot: Any = None,
        *,
        input: Any = None,
        now: Callable[[], float] | None = None,
        max_tool_calls: int = DEFAULT_MAX_TOOL_CALLS,
        human_timeout_s: float | None = 86_400.0,
        approval_ttl_s: float = 3600.0,
        agent: str = "",
        _chart: Any = None,
    ) -> None:
        super().__init__(
            machine,
            registry,
            ledger,
            scope,
            snapshot,
            input=input,
            now=now,
            max_tool_calls=max_tool_calls,
            human_timeout_s=human_timeout_s,
            approval_ttl_s=approval_ttl_s,
            agent=agent,
            chart=_chart,
        )

    def conversation(
        self, scope: str, *, registry: ToolRegistry | None = None, on_behalf_of: Any = None
    ) -> GuardSession:
        """Return a session for one conversation, on the chart of this one.

        What moves the chart in one conversation holds for all; turns, rows and spent ids are
        each conversation's own.

        Args:
            scope: where its rows are kept.
            registry: its tools; None takes those of this session.
            on_behalf_of: the `ServiceScope` of a service of the interpreter: the allow-list of
                its state counts, and nothing is allowed once the machine has left it.
        """
        chart = self._chart
        if on_behalf_of is not None:
            chart = LiveChart(chart.interpreter, on_behalf_of)
        return GuardSession(
            self.machine,
            self.registry if registry is None else registry,
            self.ledger,
            scope,
            now=self._now if callable(self._now) else None,
            max_tool_calls=self.max_tool_calls,
            human_timeout_s=self._human_timeout_s,
            approval_ttl_s=self._approval_ttl_s,
            agent=self.host.agent,
            _chart=chart,
        )

    def decide(self, event: Any, *, by: str | None = None, again: bool = False) -> dict[str, Any]:
        """Take a human's decision: in the ledger first, then in the chart.

        Args:
            event: HUMAN_APPROVED, HUMAN_REJECTED or HUMAN_DECIDED (see `approval_event`), or a
                list of ``{id, decision, digest?, arguments?, reason?}``.
            by: who decides, for the record; the event's own ``by`` where None.
            again: reopen closed calls.

        Returns:
            The row that counts now, by row id. A call that was entered before comes back with
            its outcome.

        Raises:
            DecisionRefused: it does not fit, comes too late, or the chart cannot take it.
                Ledger and snapshot are as they were.
        """
        if isinstance(event, (list, tuple)):
            event = {"type": "HUMAN_DECIDED", "decisions": list(event)}
        made = as_event(event, {})
        with self._lock:
            self._overdue()
            items = {item.row.id: item for item in self.turn() if item.row is not None}
            again = again or made.payload.get("again") is True
            waiting = any(item.status == "ask" for item in items.values())
            asked = [
                pending_item(item.row, tool_call_id=other_name(self.ledger, item.row, item.call.id))
                for item in items.values()
                if item.verdict.needs_approval
                and (
                    again
                    or item.status == "ask"
                    # Where nothing waits, a yes that was not used yet may be taken back.
                    or (not waiting and item.row.status == "approved")
                )
            ]
            decisions = self._judged(read_decisions(made, asked), items)
            before = self._snapshot
            known = any(
                made.type in node.on for node in self.machine.nodes.values()
            ) and made.type in self.machine.accepted_events(before)
            if known and not self.machine.can(before, made):
                raise DecisionRefused("the chart's state does not take this decision")
            at = self._ms()
            try:
                rows: dict[str, Any] = self.ledger.decide(
                    self.host.scope,
                    decisions,
                    by if by is not None else made.payload.get("by"),
                    again=again,
                    now=at,
                    use_by=at + round(self._approval_ttl_s * 1000),
                )
            except LedgerError as exc:
                raise DecisionRefused(str(exc)) from exc
            if known:
                self._step(made)
            for row_id, row in rows.items():
                if row.status == "rejected" and row_id in items:
                    reason = {"reason": row.reason or ""}
                    self._outcome("rejected", items[row_id].call, reason)
            return rows

    def enter(self, call: ToolCall) -> AuthorisedCall | Answer:
        """Let one call of the open turn through, now; see `authorise`.

        Raises:
            ToolDeniedError: a check failed in the state as it is now, or the call follows one
                that a person has not decided yet; nothing ran.
        """
        self._refuse_held(call)
        return authorise(call, self._look(call), **self._claimant(call))

    async def aenter(self, call: ToolCall) -> AuthorisedCall | Answer:
        """Do what `enter` does, from a running loop."""
        await self._off_loop(lambda: self._refuse_held(call))
        claimant = await self._off_loop(lambda: self._claimant(call))
        return await aauthorise(call, self._look(call), **claimant)

    def leave(self, call: ToolCall, outcome: Outcome) -> Any:
        """Tell the chart what became of a call; return the receipt.

        None where the chart knows already, and where no state of it names such an event.

        Sends ``tool.done.<name>``, ``tool.failed.<name>``, ``tool.rejected.<name>`` or
        ``tool.denied.<name>`` with ``{id, reason | error}``; the result only for a tool that is
        registered ``trusted``.
        """
        status = outcome.status
        with self._lock:
            told = (call.id if type(call.id) is str else "", status)
            if told in self._left:
                return None
            self._left.add(told)
            row_id = outcome.row_id
            if row_id is not None and self._chart.knows(self.host.scope, row_id, status):
                return None
            if outcome.entered:
                self._chart.entered[call.name] += 1
            if status == "done":
                tool = self.registry.get(call.name)
                trusted = tool is not None and tool.trusted
                return self._outcome("done", call, {"result": outcome.text} if trusted else {})
            if status in ("denied", "tampered"):
                reason = getattr(outcome.error, "reason", outcome.text)
                return self._outcome("denied", call, {"reason": reason})
            if status in ("rejected", "expired", "void"):
                return self._outcome("rejected", call, {"reason": outcome.text})
            error = status if outcome.error is None else type(outcome.error).__name__
            return self._outcome("failed", call, {"error": error})

    def run(
        self,
        call: ToolCall,
        *,
        body: Body | None = None,
        as_text: AsText | None = None,
        pauses: Pauses = (),
    ) -> Outcome:
        """Take one call the whole way: enter, run, record, leave. Never raises for a denial."""
        if (held := self._held(call)) is not None:
            return held
        outcome = execute(
            call,
            self._look(call),
            body=body,
            as_text=as_text,
            pauses=pauses,
            **self._claimant(call),
        )
        self.leave(call, outcome)
        return outcome

    async def arun(
        self,
        call: ToolCall,
        *,
        body: Body | None = None,
        as_text: AsText | None = None,
        pauses: Pauses = (),
    ) -> Outcome:
        """Do what `run` does, from a running loop."""
        if (held := await self._off_loop(lambda: self._held(call))) is not None:
            return held
        outcome = await self.aperform(call, body=body, as_text=as_text, pauses=pauses)
        self.leave(call, outcome)
        return outcome

    async def aperform(
        self,
        call: ToolCall,
        *,
        body: Body | None = None,
        as_text: AsText | None = None,
        pauses: Pauses = (),
    ) -> Outcome:
        """Enter, run and record a call that `file` gave as ``run``; the chart is not told yet.

        The door tells it by `leave`, which a replay of its own can then repeat.
        """
        claimant = await self._off_loop(lambda: self._claimant(call))
        return await aexecute(
            call, self._look(call), body=body, as_text=as_text, pauses=pauses, **claimant
        )

    def close(self, reason: str = "superseded") -> dict[str, str]:
        """Close what is open of the turn; return each unanswered call's text, by call id.

        Before the next model turn, on new input, and when a deadline has passed.
        """
        with self._lock:
            items = [item for item in self.turn() if item.status != "denied"]
            ids = [item.row.id for item in items if item.row is not None]
            answers = close_open(self.ledger, self.host.scope, ids, reason, now=self._ms())
            self._open()
            return {
                item.call.id: closing_text(reason)
                if item.row is None
                else answers[item.row.id].text
                for item in items
            }

    # Inside

    async def _off_loop(self, read: Callable[[], T]) -> T:
        """Read what stands in the turn's rows; a turn without rows asks no ledger."""
        filed = any(item.row is not None for item in self._turn.values())
        return await in_thread(self.ledger, read) if filed else read()

    def _refuse_held(self, call: ToolCall) -> None:
        if not any(item.row is not None for item in self._turn.values()):
            return  # nothing was filed, so nobody is waited for
        for item in self.turn():
            if item.status == "held" and item.call.id == call.id:
                raise ToolDeniedError(shown_name(call.name), HELD)

    def _held(self, call: ToolCall) -> Outcome | None:
        try:
            self._refuse_held(call)
        except ToolDeniedError as exc:
            return Outcome(call.id, exc.tool, "denied", f"not run: {exc.reason}", error=exc)
        return None

    def _judged(
        self, decisions: Mapping[str, Decision], items: Mapping[str, Proposed]
    ) -> dict[str, Decision]:
        """Judge each edit by checks 1 to 5, and add the digest of what would run.

        Where the door has not brought its tools yet, an edit is judged when it runs.
        """
        out = {}
        for row_id, decision in decisions.items():
            if decision.decision == "edit":
                call = replace(items[row_id].call, arguments=dict(decision.arguments or {}))
                if self.registry.get(call.name) is None and not len(self.registry):
                    out[row_id] = replace(decision, new_digest=_digest(call.arguments))
                    continue
                (verdict,) = self._assess([call], ())
                if not verdict.ok:
                    raise DecisionRefused(f"the edited call is refused: {verdict.reason}")
                decision = replace(decision, arguments=verdict.arguments, new_digest=verdict.digest)
            out[row_id] = decision
        return out

    def _look(self, call: ToolCall) -> Callable[[], Facts]:
        def look() -> Facts:
            with self._lock:
                self._overdue()
                unlike = self._unlike or {
                    "turn_size": max(1, len(self._turn)),
                    "spent_ids": () if self._item(call) else frozenset(self._spent),
                }
                return Facts(
                    registry=self.registry,
                    allowed=self._allowed(),
                    max_tool_calls=self.max_tool_calls,
                    context=self._snapshot.context,
                    entered=dict(self._chart.entered),
                    **unlike,
                )

        return look

    def _claimant(self, call: ToolCall) -> dict[str, Any]:
        item = self._item(call)
        row = None
        if item is not None and item.row is not None:
            row = self.ledger.row(self.host.scope, item.row.id, follow=False)
        return {
            "ledger": self.ledger,
            "scope": self.host.scope,
            "row": row,
            "now": self._now,
        }


def _digest(arguments: dict[str, Any]) -> str:
    try:
        return digest(arguments)
    except ValueError:
        raise DecisionRefused("the edited arguments are not JSON") from None
