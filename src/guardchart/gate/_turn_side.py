"""The turn's side of a session: the calls of one model answer, judged, filed and looked up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

from guardchart.errors import AgentConfigError, LedgerError, ToolDeniedError
from guardchart.gate import _check
from guardchart.gate._answers import closing_text
from guardchart.gate._approvals import pending_item
from guardchart.gate._batch import Verdict, assess, lookup_verdicts, passed, propose_verdicts
from guardchart.gate._chart_side import ChartSide
from guardchart.gate._check import MISMATCH, Facts
from guardchart.gate._registry import ToolRegistry
from guardchart.gate._rules import ALL, Allowed
from guardchart.gate._tools import ToolCall
from guardchart.gate._turn import Proposed, proposed, refreshed
from guardchart.persistence import Proposal, Slot, default_ledger
from guardchart.runtime import Host

__all__ = ["TurnSide"]


class TurnSide(ChartSide):
    """One conversation's turns: proposed as a whole, or opened and filed call by call."""

    def __init__(
        self,
        machine: Any,
        registry: ToolRegistry | None,
        ledger: Any,
        scope: str | None,
        snapshot: Any,
        *,
        input: Any,
        now: Callable[[], float] | None,
        max_tool_calls: int,
        human_timeout_s: float | None,
        approval_ttl_s: float,
        agent: str,
        chart: Any,
    ) -> None:
        super().__init__(machine, registry, snapshot, input=input, now=now, chart=chart)
        self.ledger = default_ledger() if ledger is None else ledger
        if scope is None and self.ledger.durable and registry is not None:
            raise AgentConfigError("GuardSession: a durable ledger needs scope= (the thread id)")
        self.max_tool_calls = max_tool_calls
        self._human_timeout_s = human_timeout_s
        self._approval_ttl_s = approval_ttl_s
        self._turn: dict[str, Proposed] = {}
        self._left: set[tuple[str, str]] = set()
        self._spent: set[str] = set()
        # Of a turn that is filed call by call: which batch it is, and whose calls are unlike.
        self._batch_no = 0
        self._fresh = True
        self._filed: set[str] = set()
        self._nested: set[str] = set()
        self._unlike: dict[str, Any] = {}
        run = self._snapshot.run
        self.host = Host(run if scope is None else scope, self.ledger, run, agent)

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
            self._tell("model.turn", {"calls": len(calls)})
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
            self._spend(calls)
            self._tell_denials(verdicts)
            return self.turn()

    def open(
        self,
        calls: Sequence[ToolCall],
        *,
        run: str,
        batch_no: int,
        fresh: bool,
        spent_ids: Collection[str] = (),
    ) -> None:
        """Take a turn without filing it: for a door whose framework may still change its calls.

        Sends ``model.turn`` where the turn is fresh. `file` is then called for each call that
        is about to run. The door keeps the conversation, so it says which batch this is.

        Args:
            calls: the turn's calls, in order; may be empty.
            run: identifies the conversation up to this turn; the same wherever that is replayed.
            batch_no: the number of this batch in the conversation.
            fresh: whether the model has just made these calls. Others come from a stored
                conversation: what has no row yet is asked about, whatever the chart would
                approve by itself.
            spent_ids: ids that the conversation has seen, besides those this session knows.
        """
        counts = Counter(call.id for call in calls)
        with self._lock:
            self._overdue()
            if fresh:
                self._tell("model.turn", {"calls": len(calls)})
            self._open()
            self.host = self.host._replace(run=run)
            self._batch_no, self._fresh = batch_no, fresh
            self._filed, self._nested = set(), set()
            seen = self._spent.union(spent_ids) if fresh else frozenset()
            self._unlike = {
                "turn_size": len(calls),
                "duplicate_ids": frozenset(ident for ident, n in counts.items() if n > 1),
                "spent_ids": frozenset(call.id for call in calls if call.id in seen),
            }
            self._keep([Verdict(call, True) for call in calls], [None] * len(calls))
            self._spend(calls)

    def file(self, call: ToolCall, *, within: str = "", ordinal: int = 0) -> Proposed:
        """File one call of the opened turn, with the arguments it is about to run with.

        A call that has its row is looked up instead. One that follows a call which waits for a
        person gets none yet; it is ``held``.

        Args:
            call: the call as it would run. One that `open` did not name was made by a tool that
                runs.
            within: the place of such a call, the same wherever that tool runs again.
            ordinal: which call it is at that place.

        Returns:
            The item: ``run``, ``ask``, ``held``, ``answered`` or ``denied``.
        """
        with self._lock:
            self._overdue()
            known = self._item(call)
            item = self._judge(call)
            if item.status == "run" and (item.verdict.needs_row or not self._fresh):
                item = self._looked_up(item, known, within, ordinal)
            elif item.status == "denied":
                item = self._answered(item, known, within, ordinal)
            if item.status == "run" and self._is_held(item) and self._waits_before(call):
                item = replace(item, status="held")
            elif item.status == "run" and item.verdict.needs_row and item.row is None:
                item = self._proposed(item, within, ordinal)
            self._turn[call.id if type(call.id) is str else "\x00"] = item
            self._filed.add(call.id)
            if within:
                self._nested.add(call.id)
            return item

    def resume(self, rows: Iterable[tuple[Any, str]]) -> None:
        """Take up calls that wait elsewhere, so that `decide` can be told about them.

        Args:
            rows: the row of each, with the id its conversation knows it by.
        """
        with self._lock:
            self._open()
            for row, ident in rows:
                call = ToolCall(ident, row.slot.tool, dict(row.arguments or {}))
                tool = self.registry.get(row.slot.tool)
                verdict = Verdict(
                    call,
                    True,
                    tool=tool,
                    arguments=call.arguments,
                    digest=row.digest,
                    needs_row=True,
                    needs_approval=True,
                )
                self._turn[ident] = proposed(verdict, row)

    def look(self, call: ToolCall) -> Proposed:
        """Judge a call by checks 1 to 5 as of now, without filing it."""
        with self._lock:
            self._overdue()
            item = self._judge(call)
            self._turn[call.id if type(call.id) is str else "\x00"] = item
            return item

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
                    verdict = verdict._replace(ok=False, reason=closing_text("tampered"))
                judged.append(verdict)
            self._open()
            self._keep(judged, rows)
            self._spend(calls)
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

    # Inside

    def _open(self) -> None:
        self._turn, self._left, self._unlike = {}, set(), {}

    def _spend(self, calls: Iterable[ToolCall]) -> None:
        self._spent.update(call.id for call in calls if type(call.id) is str)

    def _tell_denials(self, verdicts: Iterable[Verdict]) -> None:
        for verdict in verdicts:
            if not verdict.ok:
                self._outcome("denied", verdict.call, {"reason": verdict.reason})

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
            entered=self._chart.entered,
        )

    def _keep(self, verdicts: Iterable[Verdict], rows: Iterable[Any]) -> None:
        for at, (verdict, row) in enumerate(zip(verdicts, rows, strict=True)):
            ident = verdict.call.id
            # Ids that cannot be told apart are refused calls; they are kept by their place.
            key = ident if type(ident) is str and ident not in self._turn else f"\x00{at}"
            self._turn[key] = proposed(verdict, row)

    def _is_held(self, item: Proposed) -> bool:
        return item.verdict.needs_row or self._chart.moves(item.call.name)

    def _item(self, call: ToolCall) -> Proposed | None:
        return self._turn.get(call.id) if type(call.id) is str else None

    # Call by call

    def _judge(self, call: ToolCall, allowed: Allowed | None = None) -> Proposed:
        """Judge one call by checks 1 to 5; ``allowed`` takes the place of the state's list."""
        facts = Facts(
            registry=self.registry,
            allowed=self._allowed() if allowed is None else allowed,
            max_tool_calls=self.max_tool_calls,
            context=self._snapshot.context,
            entered=self._chart.entered,
            proposing=True,
            **(self._unlike if allowed is None else {}),
        )
        try:
            return proposed(passed(_check.check(call, facts)), None)
        except ToolDeniedError as exc:
            return proposed(Verdict(call, False, exc.reason), None)

    def _slot(self, verdict: Verdict, within: str, ordinal: int) -> Slot:
        host = self.host
        run = f"{host.run}:{within}" if within else host.run
        if not within:
            for ident, item in self._turn.items():
                if ident == verdict.call.id:
                    break
                same = item.verdict.call.name == verdict.call.name
                ordinal += same and item.verdict.digest == verdict.digest
        return Slot(
            host.scope, run, host.agent, self._batch_no, verdict.call.name, verdict.digest, ordinal
        )

    def _row_of(
        self, verdict: Verdict, known: Proposed | None, within: str, ordinal: int
    ) -> tuple[Any, bool]:
        """Return the row of a call, and whether its id is that of another call of this place."""
        slot = self._slot(verdict, within, ordinal)
        row = None if known is None else known.row
        if row is None:
            row = self.ledger.row(self.host.scope, verdict.call.id, follow=False)
        if row is not None and row.slot.tool == verdict.call.name:
            digests = {row.digest}
            if row.status == "edited":
                child = self.ledger.row(self.host.scope, row.id)
                digests.add(row.digest if child is None else child.digest)
            if verdict.digest in digests:
                return row, False
        own = self.ledger.slot_row(slot)
        if own is not None or row is None:
            return own, False
        return None, row.slot[:4] == slot[:4]

    def _looked_up(
        self, item: Proposed, known: Proposed | None, within: str, ordinal: int
    ) -> Proposed:
        row, other = self._row_of(item.verdict, known, within, ordinal)
        if other:
            return proposed(item.verdict._replace(ok=False, reason=MISMATCH), None)
        if row is None:
            return item
        # A row that was filed is claimed, also where the state asks for none any more.
        item = proposed(item.verdict._replace(needs_row=True), row)
        return refreshed(item, self.ledger, self._ms())

    def _answered(
        self, item: Proposed, known: Proposed | None, within: str, ordinal: int
    ) -> Proposed:
        """Return the answer of a refused call that was entered or closed before."""
        bare = self._judge(item.call, ALL)
        if bare.status == "denied":
            return item
        row, _ = self._row_of(bare.verdict, known, within, ordinal)
        if row is None:
            return item
        found = refreshed(proposed(bare.verdict, row), self.ledger, self._ms())
        if found.status == "answered" or row.status == "claimed":
            return found
        return replace(item, row=row)

    def _waits_before(self, call: ToolCall) -> bool:
        """Whether a call before this one waits for a person, or one that it made itself."""
        now, passed_by = self._ms(), False
        for ident, item in self._turn.items():
            if ident == call.id:
                passed_by = True
                continue
            if passed_by and ident not in self._nested:
                continue
            row = item.row
            if row is None and ident not in self._filed:
                # Filed by a process that is being replayed.
                row = self.ledger.row(self.host.scope, ident, follow=False)
            if row is None or not self._of_this_turn(row.slot):
                continue
            if refreshed(replace(item, row=row), self.ledger, now).status == "ask":
                return True
        return False

    def _of_this_turn(self, slot: Slot) -> bool:
        host = self.host
        here = (host.scope, host.run, host.agent, self._batch_no)
        return (slot.scope, slot.run.partition(":")[0], slot.agent, slot.batch_no) == here

    def _proposed(self, item: Proposed, within: str, ordinal: int) -> Proposed:
        verdict, at = item.verdict, self._ms()
        late = self._human_timeout_s
        asks = verdict.needs_approval or not self._fresh
        assert verdict.tool is not None and verdict.arguments is not None
        proposal = Proposal(
            slot=self._slot(verdict, within, ordinal),
            model_id=verdict.call.id,
            arguments=verdict.arguments,
            decide_by=None if late is None else at + round(late * 1000),
            timeout_s=verdict.tool.timeout_s,
            approve_until=None if asks else at + round(self._approval_ttl_s * 1000),
        )
        try:
            (row,) = self.ledger.propose_batch([proposal], now=at)
        except LedgerError as exc:
            return proposed(verdict._replace(ok=False, reason=str(exc)), None)
        if not self._fresh:
            verdict = verdict._replace(needs_approval=True)
        return refreshed(proposed(verdict, row), self.ledger, at)
