"""The loop's hook: what is decided in the ledger before a step is taken.

Three things happen here and nowhere else in the loop. A model's answer is assessed and its
calls are proposed, before anything is parked. A person's decision is taken in the ledger,
all or none, before the chart moves. And whatever else closes pending calls (a deadline, new
input, a failed batch) closes their rows first, so that what the conversation is told comes
from the ledger.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from guardchart.agents._context import (
    calls_of,
    pending_entries,
    row_ids,
    shown_ids,
    shown_item,
)
from guardchart.agents._guards import LoopGuards
from guardchart.agents._models import ModelResponse
from guardchart.agents._services import CallModel
from guardchart.agents._turn import Decided, ModelTurn, assessed_turn
from guardchart.errors import LedgerError, ToolDeniedError
from guardchart.gate import (
    DecisionRefused,
    Verdict,
    as_allowed,
    assess,
    close_open,
    lookup_verdicts,
    propose_verdicts,
    read_decisions,
)
from guardchart.gate._approvals import HUMAN_EVENTS, named_calls, other_name
from guardchart.kernel import (
    Child,
    EngineEvent,
    Event,
    Snapshot,
    StateNode,
    can,
    done,
    failed,
    fired,
    transition,
)
from guardchart.persistence import Decision
from guardchart.runtime import BeforeStep, Host

__all__ = ["LedgerHook"]

_LATE: Final = "the decision came too late"
_MODEL_SRC: Final = "callModel"


class LedgerHook:
    """``before_step`` of an ``agent_logic``.

    Args:
        guards: The loop's guards; they know registry and limits.
        ledger: ``host -> Ledger``: the host's own, else the logic's.
        human_timeout_s: How long a decision may take, in seconds.
        approval_ttl_s: How long an approval is good, in seconds.
    """

    def __init__(
        self,
        guards: LoopGuards,
        *,
        ledger: Callable[[Any], Any],
        human_timeout_s: float,
        approval_ttl_s: float,
    ) -> None:
        self._guards = guards
        self._ledger = ledger
        self._human_timeout_ms = human_timeout_s * 1000.0
        self._approval_ttl_ms = approval_ttl_s * 1000.0

    def concerns(self, snapshot: Snapshot, event: Event | EngineEvent) -> bool:
        """Whether this event makes the hook ask the ledger (which may block)."""
        if isinstance(event, EngineEvent) and event.kind == "done":
            return bool(getattr(event.value, "tool_calls", ()))
        return bool(snapshot.context.get("pending_tool_calls"))

    def asked(self, snapshot: Snapshot, event: Event) -> int:
        """How well a decision fits what is asked here.

        Returns:
            2 where it names calls by the ids they are shown under, 1 where by the provider's
            ids or (a rejection) none, 0 where nobody is asked or it names others.
        """
        asked = [e for e in pending_entries(snapshot.context) if e.get("needs_approval") is True]
        if not asked:
            return 0
        if event.type == "HUMAN_REJECTED":
            return 1
        named = named_calls(event)
        shown = {shown_item(entry)["id"] for entry in asked}
        if named and named <= shown:
            return 2
        return 1 if named and named <= shown | {entry["id"] for entry in asked} else 0

    def __call__(
        self,
        snapshot: Snapshot,
        event: Event | EngineEvent,
        now: float,
        host: Host,
        outside: bool,
    ) -> BeforeStep | None:
        if isinstance(event, EngineEvent):
            if event.kind == "done":
                return self._turn(snapshot, event, now, host)
            if event.kind == "observed":
                return None
            return self._closing(snapshot, event, now, host)
        if event.type in HUMAN_EVENTS:
            if not outside:
                return BeforeStep(denied="an approval counts only from outside")
            if event.payload.get("agent_id", host.agent) != host.agent:
                return BeforeStep(denied="the decision names another agent")
            return self._human(snapshot, event, now, host)
        return self._closing(snapshot, event, now, host)

    # A model's answer

    def judged(self, snapshot: Snapshot, event: EngineEvent) -> ModelTurn:
        """The turn a completion brings, its calls assessed for the state that asked; pure."""
        child = snapshot.children.get(event.key.rpartition("@")[0])
        return self._guards.assessed(event.value, snapshot.context, _node_of(snapshot, child))

    def _turn(
        self, snapshot: Snapshot, event: EngineEvent, now: float, host: Host
    ) -> BeforeStep | None:
        turn = event.value
        child = snapshot.children.get(event.key.rpartition("@")[0])
        if (
            not isinstance(turn, ModelResponse)
            or child is None
            or child.key != event.key
            or not _asks_model(snapshot, child.src)
        ):
            return None
        verdicts = self._guards.verdicts(turn, snapshot.context, _node_of(snapshot, child))
        if not verdicts or not all(each.ok for each in verdicts):
            judged = assessed_turn(turn, verdicts)
            return None if judged is turn else BeforeStep(event=done(event.key, judged))
        batch_no = snapshot.batch_no + 1
        try:
            rows = propose_verdicts(
                self._ledger(host),
                host,
                batch_no,
                verdicts,
                decide_by=int(now + self._human_timeout_ms),
                use_by=int(now + self._approval_ttl_ms),
                now=int(now),
            )
        except Exception as error:
            error.usage = turn.usage  # type: ignore[attr-defined]  # the turn was paid for
            raise
        row_ids = [None if row is None else row.id for row in rows]
        proposed = assessed_turn(turn, verdicts, row_ids)
        return BeforeStep(event=done(event.key, proposed), batch_no=batch_no)

    # A person's decision

    def _human(self, snapshot: Snapshot, event: Event, now: float, host: Host) -> BeforeStep | None:
        entries = pending_entries(snapshot.context)
        if not entries:
            # Nobody is asked about tools; or the calls were taken out of a loop that waits.
            emptied = not can(snapshot, event) and can(snapshot, Decided(event, tampered=True))
            return self._refused(snapshot, event) if emptied else None
        verdicts, rows = self._rows(snapshot, entries, now, host)
        if not _as_proposed(verdicts, rows, shown_ids(entries)):
            return self._refused(snapshot, event)
        try:
            items = _items(event, entries, verdicts, rows, self._ledger(host))
            given = read_decisions(event, items)
            decisions = self._checked(given, verdicts, rows)
        except DecisionRefused as refused:
            return BeforeStep(denied=refused.reason)
        except ToolDeniedError as refused:
            return BeforeStep(denied=f"the edit was refused: {refused.reason}")
        trial = Decided(event, decided_ids=tuple(decisions), open_ids=_open(rows, decisions))
        if not can(snapshot, trial):
            return BeforeStep(denied="the chart takes no such decision now")
        try:
            answers = self._ledger(host).decide(
                host.scope,
                decisions,
                by=_text(event.payload.get("by")),
                again=event.payload.get("again") is True,
                now=int(now),
                use_by=int(now + self._approval_ttl_ms),
            )
        except LedgerError as error:
            return self._denied(snapshot, error, now, host)
        outcomes: dict[str, str] = {}
        if event.type == "HUMAN_REJECTED":
            outcomes = self._close(verdicts, rows, "rejected", now, host)
        return BeforeStep(
            event=Decided(
                event,
                outcomes=outcomes,
                decided_ids=tuple(decisions),
                open_ids=_open(rows, decisions),
                edits=_edits(verdicts, rows, answers),
            )
        )

    def _rows(
        self, snapshot: Snapshot, entries: list[Mapping[str, Any]], now: float, host: Host
    ) -> tuple[list[Verdict], list[Any]]:
        """Verdict and row of each pending call, recomputed: nothing a snapshot says counts."""
        verdicts = assess(
            calls_of(entries),
            self._guards.registry,
            as_allowed("*"),
            max_tool_calls=self._guards.max_tool_calls,
            context=snapshot.context,
        )
        rows = lookup_verdicts(
            self._ledger(host),
            host,
            snapshot.batch_no,
            verdicts,
            row_ids=row_ids(entries),
            now=int(now),
        )
        return verdicts, rows

    def _refused(self, snapshot: Snapshot, event: Event) -> BeforeStep | None:
        """The snapshot disagrees with its rows: no row changes, and it does not stay parked."""
        tampered = Decided(event, tampered=True)
        if can(snapshot, tampered):
            return BeforeStep(
                event=tampered, denied="the pending calls are not the ones that were proposed"
            )
        return BeforeStep(denied="the pending calls are not the ones that were proposed")

    def _checked(
        self, given: Mapping[str, Any], verdicts: list[Verdict], rows: list[Any]
    ) -> dict[str, Decision]:
        """The decisions as the ledger takes them; an edit passes the schema first."""
        by_id = {row.id: v for v, row in zip(verdicts, rows, strict=True) if row is not None}
        decisions: dict[str, Decision] = {}
        for row_id, each in given.items():
            if each.decision != "edit":
                decisions[row_id] = Decision(each.decision, digest=each.digest, reason=each.reason)
                continue
            verdict = by_id[row_id]
            call = type(verdict.call)(
                verdict.call.id, verdict.call.name, dict(each.arguments or {})
            )
            (edited,) = assess([call], self._guards.registry, as_allowed("*"), max_tool_calls=1)
            if not edited.ok:
                raise ToolDeniedError(verdict.call.name, edited.reason)
            decisions[row_id] = Decision(
                "edit",
                digest=each.digest,
                arguments=edited.arguments,
                new_digest=edited.digest,
                reason=each.reason,
            )
        return decisions

    def _close(
        self, verdicts: list[Verdict], rows: list[Any], reason: str, now: float, host: Host
    ) -> dict[str, str]:
        """Close the rows that are open; what each call is told, by the provider's id."""
        ids = {row.id: v.call.id for v, row in zip(verdicts, rows, strict=True) if row is not None}
        answers = close_open(self._ledger(host), host.scope, ids, reason, now=int(now))
        return {ids[row_id]: answer.text for row_id, answer in answers.items()}

    def _denied(self, snapshot: Snapshot, error: LedgerError, now: float, host: Host) -> BeforeStep:
        if error.reason != "late":
            return BeforeStep(denied=str(error))
        timers = snapshot.timers
        for timer_id in sorted(timers, key=lambda each: (timers[each].due_at, each)):
            closed = self._closing(snapshot, fired(timer_id), now, host)
            if closed is not None:  # the deadline of these calls, not another region's
                return BeforeStep(event=closed.event, denied=_LATE)
        return BeforeStep(denied=_LATE)

    # Everything else that closes pending calls

    def _closing(
        self,
        snapshot: Snapshot,
        event: Event | EngineEvent,
        now: float,
        host: Host,
    ) -> BeforeStep | None:
        """Close the rows of calls this event will close, and give it their recorded outcomes."""
        entries = pending_entries(snapshot.context)
        if not any(map(self._guards.has_row, entries)):
            return None
        after, _ = transition(snapshot.machine, snapshot, event, now=now)
        left = {entry["id"] for entry in pending_entries(after.context)}
        gone = [entry["id"] for entry in entries if entry["id"] not in left]
        if not gone:
            return None
        verdicts, rows = self._rows(snapshot, entries, now, host)
        closing = [
            row if verdict.call.id in gone else None
            for verdict, row in zip(verdicts, rows, strict=True)
        ]
        outcomes = self._close(verdicts, closing, _reason(event, rows), now, host)
        if not isinstance(event, EngineEvent):
            return BeforeStep(event=Decided(event, outcomes=outcomes))
        if event.kind == "fired":
            return BeforeStep(event=fired(event.key, {"outcomes": outcomes}))
        event.value.outcomes = outcomes
        return BeforeStep(event=failed(event.key, event.value))


def _reason(event: Event | EngineEvent, rows: list[Any]) -> str:
    if not isinstance(event, EngineEvent):
        return "superseded" if event.type == "START" else "void"
    if event.kind != "fired":
        return "failed"
    undecided = any(row is not None and row.status == "proposed" for row in rows)
    return "expired" if undecided else "timeout"


def _as_proposed(verdicts: list[Verdict], rows: list[Any], shown: list[str]) -> bool:
    """Whether parked calls are the proposed ones: each has its row, and one is to be decided.

    A row is shown under its own id. Where two calls of a turn have exchanged their arguments,
    each has a row still, but under an id for which a person has seen the other's arguments.
    """
    for verdict, row, ident in zip(verdicts, rows, shown, strict=True):
        if not verdict.ok or (verdict.needs_row if row is None else row.id != ident):
            return False
    return any(verdict.needs_approval for verdict in verdicts)


def _items(
    event: Event,
    entries: list[Mapping[str, Any]],
    verdicts: list[Verdict],
    rows: list[Any],
    ledger: Any,
) -> list[dict[str, Any]]:
    """What an event may decide, read from the rows.

    An approval answers the calls shown as undecided; a rejection closes the whole batch, and a
    decision call by call may come back to one that was decided before.
    """
    asked = [
        (row, verdict)
        for verdict, row in zip(verdicts, rows, strict=True)
        if row is not None and verdict.needs_approval
    ]
    if event.type == "HUMAN_APPROVED":
        noted = {each["id"] for each in entries if each.get("decided") is True}
        asked = [each for each in asked if each[1].call.id not in noted] or asked
    return [
        {
            "id": row.id,
            "tool_call_id": other_name(ledger, row, verdict.call.id),
            "name": verdict.call.name,
            "arguments": verdict.arguments,
            "digest": row.digest,
        }
        for row, verdict in asked
    ]


def _node_of(snapshot: Snapshot, child: Child | None) -> StateNode | None:
    return None if child is None else snapshot.machine.nodes.get(child.state_id)


def _asks_model(snapshot: Snapshot, src: str) -> bool:
    """Whether a child is the loop's model call, by its service or under its usual name."""
    services = getattr(snapshot.machine.logic, "services", {})
    return src == _MODEL_SRC or isinstance(services.get(src), CallModel)


def _edits(verdicts: list[Verdict], rows: list[Any], answers: Mapping[str, Any]) -> dict[str, str]:
    """Edits of calls that had run: the entered row stays what it is, so it does not lead there."""
    return {
        verdict.call.id: answers[row.id].id
        for verdict, row in zip(verdicts, rows, strict=True)
        if row is not None and row.entered and row.id in answers and answers[row.id].id != row.id
    }


def _open(rows: list[Any], decisions: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(
        row.id
        for row in rows
        if row is not None and row.status == "proposed" and row.id not in decisions
    )


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None
