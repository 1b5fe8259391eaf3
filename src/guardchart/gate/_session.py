"""`GuardSession`: a chart, a registry and a ledger behind a door that owns its own loop.

A framework that runs its own agent loop asks the session which tools the chart allows now, hands
it each turn's calls, and runs a call only with what `enter` gives. What became of a call returns
as an event, so the chart moves with the conversation.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from guardchart.errors import AgentConfigError, DecisionRefused, LedgerError, ToolDeniedError
from guardchart.gate._answers import (
    Answer,
    Outcome,
    close_open,
    closing_text,
)
from guardchart.gate._approvals import other_name, pending_item, read_decisions
from guardchart.gate._authorise import AuthorisedCall, aauthorise, authorise
from guardchart.gate._batch import Verdict, assess, lookup_verdicts, propose_verdicts
from guardchart.gate._chart_side import ChartSide, as_event
from guardchart.gate._check import DEFAULT_MAX_TOOL_CALLS, Facts
from guardchart.gate._registry import ToolRegistry
from guardchart.gate._rules import ALL, Allowed
from guardchart.gate._run import AsText, Body, Pauses, aexecute, execute
from guardchart.gate._tools import ToolCall, shown_name
from guardchart.gate._turn import Proposed, proposed, refreshed
from guardchart.kernel import Event
from guardchart.persistence import Decision, default_ledger
from guardchart.runtime import Host

__all__ = ["GuardSession", "Proposed"]

HELD: Final = "held until a person has decided about a call before it"


class GuardSession(ChartSide):
    """The gate for one conversation, driven by a framework.

    Args:
        machine: a compiled chart, bound. It has no services of its own: the framework's loop is
            the agent, the chart is its policy.
        registry: the application's tools; every ``meta.tools`` is checked against it.
        ledger: where rows are kept; None takes the process's own, in memory.
        scope: ``str(thread_id)`` or the store key; None is this run alone, in memory only.
        snapshot: a kernel Snapshot to go on from (see ``kernel.load``); None starts the chart.
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
        registry: ToolRegistry,
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
    ) -> None:
        super().__init__(machine, registry, snapshot, input=input, now=now)
        self.ledger = default_ledger() if ledger is None else ledger
        if scope is None and self.ledger.durable:
            raise AgentConfigError("GuardSession: a durable ledger needs scope= (the thread id)")
        self.max_tool_calls = max_tool_calls
        self._human_timeout_s = human_timeout_s
        self._approval_ttl_s = approval_ttl_s
        self._turn: dict[str, Proposed] = {}
        self._left: set[tuple[str, str]] = set()
        self._spent: set[str] = set()
        run = self._snapshot.run
        self.host = Host(run if scope is None else scope, self.ledger, run, agent)

    # One turn

    def propose(
        self, calls: Sequence[ToolCall], *, spent_ids: Collection[str] = ()
    ) -> list[Proposed]:
        """Take a model's answer: judge its calls and file those that need a row.

        Only the step that holds the answer fresh from the model calls this; a parked turn that
        comes back is given to `restore`. Sends ``model.turn``, then ``tool.denied.<name>`` for
        each refused call.

        Args:
            calls: the turn's calls, in order; may be empty.
            spent_ids: ids that the conversation has seen, besides those this session knows.

        Returns:
            One item a call, in order.
        """
        with self._lock:
            self._overdue()
            self._step(Event("model.turn", {"calls": len(calls)}))
            verdicts = self._assess(calls, self._spent.union(spent_ids))
            at = self._ms()
            late = self._human_timeout_s
            batch_no = self._snapshot.batch_no + 1
            rows = propose_verdicts(
                self.ledger,
                self.host,
                batch_no,
                verdicts,
                decide_by=None if late is None else at + round(late * 1000),
                use_by=at + round(self._approval_ttl_s * 1000),
                now=at,
            )
            self._snapshot = self._snapshot.replace(batch_no=batch_no)
            self._open()
            self._keep(verdicts, rows)
            self._spent.update(call.id for call in calls if type(call.id) is str)
            for verdict in verdicts:
                if not verdict.ok:
                    self._outcome("denied", verdict.call, {"reason": verdict.reason})
            return self.turn()

    def restore(
        self, calls: Sequence[ToolCall], *, row_ids: Sequence[str | None] | None = None
    ) -> list[Proposed]:
        """Take a parked turn again, after a restart: its rows are looked up, nothing is filed.

        Args:
            calls: the turn's calls, as the stored conversation has them.
            row_ids: the row ids that were stored with them, where they were.

        Returns:
            One item a call; a call whose row is not as it was proposed is ``denied``.
        """
        with self._lock:
            self._overdue()
            # A row that was entered is answered whatever the state allows now.
            verdicts = self._assess(calls, (), ALL)
            rows = lookup_verdicts(
                self.ledger,
                self.host,
                self._snapshot.batch_no,
                verdicts,
                row_ids=row_ids,
                now=self._ms(),
            )
            judged = []
            for verdict, row in zip(verdicts, rows, strict=True):
                if verdict.ok and verdict.needs_row and row is None:
                    verdict = replace(verdict, ok=False, reason=closing_text("tampered"))
                judged.append(verdict)
            self._open()
            self._keep(judged, rows)
            self._spent.update(call.id for call in calls if type(call.id) is str)
            return self.turn()

    def turn(self) -> list[Proposed]:
        """Return the open turn's calls as they stand now, read from their rows."""
        with self._lock:
            waiting = False
            out = []
            for item in self._turn.values():
                item = refreshed(item, self.ledger, self._ms())
                if item.status == "ask":
                    waiting = True
                elif waiting and item.status == "run" and self._is_held(item):
                    item = replace(item, status="held")
                out.append(item)
            return out

    def pending(self) -> list[dict[str, Any]]:
        """Return what a reviewer is shown: ``{id, tool_call_id, name, arguments, digest}``."""
        return [
            pending_item(item.row, tool_call_id=item.call.id)
            for item in self.turn()
            if item.status == "ask"
        ]

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
            asked = [
                pending_item(item.row, tool_call_id=other_name(self.ledger, item.row, item.call.id))
                for item in items.values()
                if item.verdict.needs_approval and (again or item.status == "ask")
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
        self._refuse_held(call)
        return await aauthorise(call, self._look(call), **self._claimant(call))

    def leave(self, call: ToolCall, outcome: Outcome) -> Any:
        """Tell the chart what became of a call; return the receipt, None where it knows already.

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
            if outcome.entered:
                self._entered[call.name] += 1
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
        if (held := self._held(call)) is not None:
            return held
        outcome = await aexecute(
            call,
            self._look(call),
            body=body,
            as_text=as_text,
            pauses=pauses,
            **self._claimant(call),
        )
        self.leave(call, outcome)
        return outcome

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

    def _open(self) -> None:
        self._turn, self._left = {}, set()

    def _refuse_held(self, call: ToolCall) -> None:
        for item in self.turn():
            if item.status == "held" and item.call.id == call.id:
                raise ToolDeniedError(shown_name(call.name), HELD)

    def _held(self, call: ToolCall) -> Outcome | None:
        try:
            self._refuse_held(call)
        except ToolDeniedError as exc:
            return Outcome(call.id, exc.tool, "denied", f"not run: {exc.reason}", error=exc)
        return None

    def _assess(
        self, calls: Sequence[ToolCall], spent: Collection[str], allowed: Allowed | None = None
    ) -> list[Verdict]:
        return assess(
            calls,
            self.registry,
            self._allowed() if allowed is None else allowed,
            spent_ids=spent,
            max_tool_calls=self.max_tool_calls,
            context=self._snapshot.context,
            entered=self._entered,
        )

    def _keep(self, verdicts: Iterable[Verdict], rows: Iterable[Any]) -> None:
        for at, (verdict, row) in enumerate(zip(verdicts, rows, strict=True)):
            ident = verdict.call.id
            # Ids that cannot be told apart are refused calls; they are kept by their place.
            key = ident if type(ident) is str and ident not in self._turn else f"\x00{at}"
            self._turn[key] = proposed(verdict, row)

    def _is_held(self, item: Proposed) -> bool:
        return item.verdict.needs_row or item.call.name in self._moving

    def _judged(
        self, decisions: Mapping[str, Decision], items: Mapping[str, Proposed]
    ) -> dict[str, Decision]:
        """Judge each edit by checks 1 to 5, and add the digest of what would run."""
        out = {}
        for row_id, decision in decisions.items():
            if decision.decision == "edit":
                call = replace(items[row_id].call, arguments=dict(decision.arguments or {}))
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
                return Facts(
                    registry=self.registry,
                    allowed=self._allowed(),
                    max_tool_calls=self.max_tool_calls,
                    turn_size=max(1, len(self._turn)),
                    spent_ids=() if self._item(call) else frozenset(self._spent),
                    context=self._snapshot.context,
                    entered=dict(self._entered),
                )

        return look

    def _item(self, call: ToolCall) -> Proposed | None:
        return self._turn.get(call.id) if type(call.id) is str else None

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
