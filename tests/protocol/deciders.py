"""One parked batch of two calls and several who decide about it, at once or on forks.

Every run starts from the same parked checkpoint with a decision of its own: a second click, a
retry, a rollback and a replay all look like this. A run decides, then settles each call: it
claims, enters and records, or takes the text that tells the model how the call ended. Runs
interleave freely and may crash between any two steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from tests.protocol import paper
from tests.protocol.explore import Step, Verb
from tests.protocol.paper import Decision, Refused, Row, Rows, Rules, Slot

TWICE = "one row was entered twice"
BOTH = "a call and its edit were both entered, nobody having said again"
NOT_APPROVED = "what ran is not what its reviewer approved"
TAKEN = "an approval was taken for arguments that were not displayed"
UNTRUE = "the model was told of an entered call that it was not"
DANGLING = "a call has no result"
STRANDED = "the parked batch can neither be approved nor rejected any more"

CALLS = {"a": 1, "b": 2}
EDITED = 3
KINDS = {
    "approve": {"a": Decision("approve", 1), "b": Decision("approve", 2)},
    "reject": {"a": Decision("reject"), "b": Decision("reject")},
    "mixed": {"a": Decision("approve", 1), "b": Decision("reject")},
    "edit": {"a": Decision("edit", 1, EDITED), "b": Decision("approve", 2)},
    "new input": {"a": Decision("close"), "b": Decision("close")},
    "approve by id": {"a": Decision("approve"), "b": Decision("approve")},
}
USUAL = ("approve", "reject", "mixed", "edit", "new input")
NOT_ENTERED = ("rejected", "void", "denied")


class Run(NamedTuple):
    number: int
    kind: str
    again: bool
    at: str = "decide"  # decide, settle, enter, record, write
    call: str = ""
    row: Row | None = None  # the row it works on, as it last saw it
    answers: tuple[tuple[str, Row], ...] = ()
    texts: tuple[tuple[str, str], ...] = ()


class State(NamedTuple):
    rows: Rows
    runs: tuple[Run, ...] = ()
    started: tuple[tuple[str, bool], ...] = ()
    crashes: int = 0
    tokens: int = 0
    entries: tuple[tuple[str, str, object], ...] = ()  # call, row id, act
    told: tuple[str, ...] = ()  # calls of which the model was told that they were not entered


@dataclass(frozen=True)
class Deciders:
    rules: Rules = field(default_factory=Rules)
    kinds: tuple[str, ...] = USUAL
    again: tuple[str, ...] = ()  # kinds that also come with again
    runs: int = 2
    crashes: int = 1
    failing: bool = False  # bodies may raise

    def start(self) -> State:
        return State(tuple(Row(call, Slot(0, 1, args)) for call, args in CALLS.items()))

    def steps(self, state: State) -> Iterator[Step]:
        if len(state.started) < self.runs:
            for kind, again in [(k, False) for k in self.kinds] + [(k, True) for k in self.again]:
                run = Run(len(state.started), kind, again)
                started = (*state.started, (kind, again))
                after = state._replace(started=started, runs=(*state.runs, run))
                yield Step(f"run {run.number}: {kind}{' again' * again}", after)
        for run in state.runs:
            alone = state._replace(runs=tuple(each for each in state.runs if each != run))
            for step in getattr(self, f"_{run.at}")(alone, run):
                ordered = tuple(sorted(step.state.runs, key=lambda each: each.number))
                yield step._replace(
                    label=f"run {run.number} {step.label}", state=step.state._replace(runs=ordered)
                )
            if state.crashes < self.crashes:
                yield Step(f"run {run.number} crashes", alone._replace(crashes=state.crashes + 1))

    # --- deciding --------------------------------------------------------------------------

    def _decide(self, state: State, run: Run) -> Iterator[Step]:
        if not self.rules.decide_first:
            yield self._tell(state, run)
            return
        decisions = KINDS[run.kind]
        given = {"decisions": decisions, "again": run.again}
        try:
            rows, answers = paper.decide(state.rows, decisions, run.number, run.again, self.rules)
        except Refused as refusal:
            verb = Verb("decide", given, str(refusal), state.rows)
            yield Step(f"is denied: {refusal}", state, verb=verb)
            return
        run = run._replace(at="settle", answers=tuple(answers.items()))
        verb = Verb("decide", given, answers, rows)
        broken = None
        for call, row in answers.items():
            approved = decisions[call].what == "approve" and not row.entered
            if approved and row.args != CALLS[call]:
                broken = TAKEN
        yield Step("decides", _with(state._replace(rows=rows), run), broken, verb)

    def _tell(self, state: State, run: Run) -> Step:
        """The chart has moved already: the ledger hears call by call, and is not heard."""
        call = "ab"[len(run.answers)]
        decision = KINDS[run.kind][call]
        rows, texts = state.rows, dict(run.texts)
        answer = paper.find(rows, call)
        try:
            rows, answers = paper.decide(rows, {call: decision}, run.number, run.again, self.rules)
            answer = answers[call]
        except Refused:
            pass
        if decision.what in ("reject", "close"):
            texts[call] = "rejected"
        run = run._replace(
            answers=(*run.answers, (call, answer)),
            texts=tuple(texts.items()),
            at="settle" if call == "b" else "decide",
        )
        return Step(f"tells the ledger of {call}", _with(state._replace(rows=rows), run))

    # --- settling --------------------------------------------------------------------------

    def _settle(self, state: State, run: Run) -> Iterator[Step]:
        texts = dict(run.texts)
        call = next((each for each in CALLS if each not in texts), None)
        if call is None:
            yield Step("folds", _with(state, run._replace(at="write")))
            return
        row = dict(run.answers)[call]
        if self.rules.follow_edits:
            row = paper.current(state.rows, paper.find(state.rows, row.id))
        token = state.tokens + 1
        given = {"row_id": row.id, "args": row.args, "token": token}
        try:
            rows, row, won = paper.claim(state.rows, row.id, row.args, token, self.rules)
        except Refused as refusal:
            verb = Verb("claim", given, str(refusal), state.rows)
            status = paper.find(state.rows, row.id).status
            text = status if status in NOT_ENTERED else "denied"
            yield Step(f"{call}: {text}", _with(state, _told(run, call, text)), verb=verb)
            return
        verb = Verb("claim", given, row, rows)
        if won:
            after = state._replace(rows=rows, tokens=token)
            run = run._replace(at="enter", call=call, row=row)
            yield Step(f"claims {row.id}", _with(after, run), verb=verb)
        elif row.status != "claimed":
            yield Step(
                f"{call}: {row.status}", _with(state, _told(run, call, row.status)), None, verb
            )
        elif not any(other.row and other.row.token == row.token for other in state.runs):
            yield Step(f"{call}: in doubt", _with(state, _told(run, call, "in doubt")), verb=verb)

    def _enter(self, state: State, run: Run) -> Iterator[Step]:
        entry = (run.call, run.row.id, run.row.act)
        after = state._replace(entries=(*state.entries, entry))
        yield Step(
            f"ENTERS {run.row.id}({run.row.args})",
            _with(after, run._replace(at="record")),
            self._broken(state, run),
        )

    def _broken(self, state: State, run: Run) -> str | None:
        again = any(again for _, again in state.started)
        for call, row_id, _ in state.entries:
            if row_id == run.row.id:
                return TWICE
            if call == run.call and not again:
                return BOTH
        kind, _ = state.started[run.row.act]
        decision = KINDS[kind][run.call]
        approved = {"approve": CALLS[run.call], "edit": decision.new}.get(decision.what)
        if run.row.args != approved:
            return NOT_APPROVED
        if run.call in state.told and not again:
            return UNTRUE
        return None

    def _record(self, state: State, run: Run) -> Iterator[Step]:
        for outcome in ("done", "failed") if self.failing else ("done",):
            given = {"row_id": run.row.id, "token": run.row.token, "outcome": outcome}
            try:
                rows, answer = paper.record(
                    state.rows, run.row.id, run.row.token, outcome, None, self.rules
                )
            except Refused as refusal:
                rows, answer = state.rows, str(refusal)
            after = _with(state._replace(rows=rows), _told(run, run.call, outcome))
            yield Step(f"records {outcome}", after, verb=Verb("record", given, answer, rows))

    def _write(self, state: State, run: Run) -> Iterator[Step]:
        texts = dict(run.texts)
        broken = DANGLING if set(texts) != set(CALLS) else None
        again = any(again for _, again in state.started)
        entered = {call for call, _, _ in state.entries}
        denied = {call for call, text in texts.items() if text in NOT_ENTERED}
        if denied & entered and not again:
            broken = UNTRUE
        after = state._replace(told=tuple(sorted({*state.told, *denied})))
        yield Step(f"tells the model {texts}", after, broken)

    # --- at rest ---------------------------------------------------------------------------

    def at_rest(self, state: State) -> str | None:
        if state.runs:
            return None
        for kind, again in (("approve", False), ("reject", False), ("approve", True)):
            try:
                paper.decide(state.rows, KINDS[kind], "probe", again, self.rules)
            except Refused:
                continue
            return None
        return STRANDED


def _with(state: State, run: Run) -> State:
    return state._replace(runs=(*state.runs, run))


def _told(run: Run, call: str, text: str) -> Run:
    return run._replace(at="settle", call="", row=None, texts=(*run.texts, (call, text)))
