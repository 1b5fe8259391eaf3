"""A thread with one call a batch: forks, retries, crashes, edited state, new input, restarts.

Two workers (processes, retries, resumes: a framework cannot tell them apart) take steps in any
order and may crash between any two. A worker starts from a checkpoint: with a START or new
input it asks the model, proposes and parks; with an approval it decides, claims, enters,
records and writes the next checkpoint. The model repeats its id "c" for ever and may answer
anew on every run. Promises are checked with ghosts that no rule can see: which answer of the
model ("birth") and which life of the machine an entry belongs to.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from tests.protocol import paper
from tests.protocol.explore import Step, Verb
from tests.protocol.paper import Decision, Refused, Rows, Rules, Slot

TWICE = "one call was entered twice"
ACT_TWICE = "one approval was used for two entries"
NOT_SHOWN = "what ran is not what was displayed"
UNTRUE = "a call was answered with what is not true of it"
STRANDED = "an honest approval of the parked head is refused"


class Call(NamedTuple):
    id: str
    args: int
    birth: int
    edited: bool = False


class Snap(NamedTuple):
    phase: str = "idle"  # idle, parked, done, error
    run: int = 0
    batch_no: int = 0
    life: int = 0
    call: Call | None = None

    @property
    def slot(self) -> Slot:
        return Slot(self.run, self.batch_no, self.call.args)


class Act(NamedTuple):
    """What somebody who looked at the parked head sends."""

    id: str
    seen: int | None  # the digest, where events carry it
    displayed: int
    again: bool
    delivered: int = 0


class Entry(NamedTuple):
    slot: Slot
    birth: int
    life: int
    act: object


class Worker(NamedTuple):
    at: str  # model, propose, park, decide, claim, enter, record, release, close, write
    snap: Snap
    act: object = None
    token: int = 0


class Spent(NamedTuple):
    births: int = 0
    forks: int = 0
    crashes: int = 0
    edits: int = 0
    resets: int = 0
    restarts: int = 0
    resolves: int = 0
    inputs: int = 0
    unsent: int = 0
    tokens: int = 0

    def more(self, *names: str) -> Spent:
        return self._replace(**{name: getattr(self, name) + 1 for name in names})


class State(NamedTuple):
    checkpoints: tuple[Snap, ...] = (Snap(),)
    head: int = 0
    rows: Rows = ()
    acts: tuple[Act, ...] = ()
    workers: tuple[Worker, ...] = ()
    entries: tuple[Entry, ...] = ()
    told_void: tuple[tuple[int, Slot], ...] = ()
    spent: Spent = Spent()

    def write(self, snap: Snap) -> State:
        return self._replace(checkpoints=(*self.checkpoints, snap), head=len(self.checkpoints))


@dataclass(frozen=True)
class Conversation:
    rules: Rules = field(default_factory=Rules)
    births: int = 2
    acts: int = 2
    deliveries: int = 2
    forks: int = 1
    crashes: int = 0
    edits: int = 0
    resets: int = 0
    restarts: int = 0
    resolves: int = 0
    inputs: int = 0
    unsent: int = 0
    workers: int = 2
    digests: bool = True  # events carry the digest that was displayed
    policy: bool = False  # approved by policy: no human, no parking
    fresh_ids: bool = False

    def start(self) -> State:
        return State()

    def steps(self, state: State) -> Iterator[Step]:
        for index, worker in enumerate(state.workers):
            others = state.workers[:index] + state.workers[index + 1 :]
            alone = state._replace(workers=others)
            for step in getattr(self, f"_{worker.at}")(alone, worker):
                yield step._replace(state=_sorted(step.state))
            if state.spent.crashes < self.crashes:
                spent = state.spent.more("crashes")
                yield Step(f"crash before {worker.at}", alone._replace(spent=spent))
        yield from self._arrivals(state)
        yield from self._outsiders(state)

    # --- what begins -----------------------------------------------------------------------

    def _arrivals(self, state: State) -> Iterator[Step]:
        if len(state.workers) == self.workers:
            return
        for index, snap in enumerate(state.checkpoints):
            spent = state.spent
            if index != state.head:
                if spent.forks == self.forks:
                    continue
                spent = spent.more("forks")
            forked = state._replace(spent=spent)
            at = f"at c{index}"
            if snap.phase != "parked":
                if spent.births < self.births:
                    yield Step(f"START {at}", _join(forked, Worker("model", snap)))
                continue
            for number, act in enumerate(state.acts):
                if act.delivered < self.deliveries:
                    acts = list(state.acts)
                    acts[number] = act._replace(delivered=act.delivered + 1)
                    begun = forked._replace(acts=tuple(acts))
                    yield Step(
                        f"act {number} arrives {at}", _join(begun, Worker("decide", snap, number))
                    )
            if spent.inputs < self.inputs and spent.births < self.births:
                begun = forked._replace(spent=spent.more("inputs"))
                yield Step(f"new input {at}", _join(begun, Worker("close", snap)))

    def _outsiders(self, state: State) -> Iterator[Step]:
        snap, spent = state.checkpoints[state.head], state.spent
        if snap.phase == "parked" and len(state.acts) < self.acts:
            act = self._look(state)
            yield Step(
                f"somebody sees {act.displayed} pending", state._replace(acts=(*state.acts, act))
            )
        if snap.phase == "parked" and spent.edits < self.edits:
            edited = state._replace(spent=spent.more("edits"))
            for bump in (0, 1):
                call = snap.call._replace(args=3 - snap.call.args, edited=True)
                forged = snap._replace(call=call, batch_no=snap.batch_no + bump)
                yield Step(f"the state is edited, batch +{bump}", edited.write(forged))
        if snap.phase != "idle" and spent.resets < self.resets:
            life = spent.resets + 1
            reset = state._replace(spent=spent.more("resets"))
            run = life if self.rules.run_nonce else 0
            yield Step("the machine starts anew", reset.write(Snap(run=run, life=life)))
        if spent.restarts < self.restarts and not state.workers:
            yield Step(
                "the process restarts: its memory is empty",
                state._replace(rows=(), spent=spent.more("restarts")),
            )
        if spent.resolves < self.resolves:
            yield from self._resolve(state)

    def _look(self, state: State) -> Act:
        """Return the honest approval of what the head displays."""
        call = state.checkpoints[state.head].call
        row = next((row for row in state.rows if row.id == call.id), None)
        closed = row is not None and row.status not in (*paper.OPEN, *paper.ENTERED)
        return Act(call.id, call.args if self.digests else None, call.args, again=closed)

    def _resolve(self, state: State) -> Iterator[Step]:
        for row in state.rows:
            starting = any(w.at == "enter" and w.token == row.token for w in state.workers)
            if row.status != "claimed" or starting:
                continue  # entry_s and the timeout are over before anybody resolves
            entered = [entry for entry in state.entries if entry.slot == row.slot]
            outcome = "done" if entered else "failed"
            result = (entered[0].slot, entered[0].life) if entered else None
            rows, answer = paper.resolve(state.rows, row.id, outcome, result, self.rules)
            after = state._replace(rows=rows, spent=state.spent.more("resolves"))
            given = {"row_id": row.id, "outcome": outcome}
            yield Step("a person resolves", after, verb=Verb("resolve", given, answer, rows))

    # --- what a worker does next -----------------------------------------------------------

    def _model(self, state: State, worker: Worker) -> Iterator[Step]:
        birth = state.spent.births
        if birth == self.births:
            yield Step("the model is silent", state)
            return
        for args in (1, 2):
            call = Call(f"m{birth}" if self.fresh_ids else "c", args, birth)
            snap = worker.snap._replace(
                phase="parked", batch_no=worker.snap.batch_no + 1, call=call
            )
            asked = state._replace(spent=state.spent.more("births"))
            at = "propose" if self.rules.propose_first or self.policy else "park"
            yield Step(f"the model wants {args}", _join(asked, Worker(at, snap)))

    def _propose(self, state: State, worker: Worker) -> Iterator[Step]:
        snap = worker.snap
        rows, row = paper.propose(state.rows, snap.slot, snap.call.id, self.rules)
        given = {"slot": snap.slot, "model_id": snap.call.id, "policy": self.policy}
        if self.policy and row.status == "proposed":
            row = row._replace(status="approved", act="policy")
            rows = paper.put(rows, row)
        verb = Verb("propose", given, row, rows)
        after = state._replace(rows=rows)
        if self.rules.propose_first or self.policy:
            snap = snap._replace(call=snap.call._replace(id=row.id))
            at = "claim" if self.policy else "park"
            after = _join(after, Worker(at, snap))
        yield Step(f"propose: {row.id} {row.status}", after, verb=verb)

    def _park(self, state: State, worker: Worker) -> Iterator[Step]:
        after = state.write(worker.snap)
        if not self.rules.propose_first:
            after = _join(after, worker._replace(at="propose"))
        yield Step("park", after)

    def _restored(self, state: State, snap: Snap) -> tuple[State, Verb]:
        """Compare a restored call with its row (and take it over where that is allowed)."""
        given = {"slot": snap.slot, "row_id": snap.call.id}
        try:
            rows, row = paper.adopt(state.rows, snap.slot, snap.call.id, self.rules)
        except Refused as refusal:
            return state, Verb("adopt", given, str(refusal), state.rows)
        return state._replace(rows=rows), Verb("adopt", given, row, rows)

    def _decide(self, state: State, worker: Worker) -> Iterator[Step]:
        """First look the call up; a mismatch ends the chart and changes no row."""
        state, verb = self._restored(state, worker.snap)
        act, call = state.acts[worker.act], worker.snap.call
        if isinstance(verb.answer, str):
            if self.rules.mismatch_ends:
                ended = worker.snap._replace(phase="error", call=None)
                state = _join(state, Worker("write", ended))
            yield Step(f"restored call: {verb.answer}", state, verb=verb)
        elif act.id != call.id or act.seen not in (None, call.args):
            yield Step("the guard denies", state, verb=verb)
        else:
            call = call._replace(id=verb.answer.id)
            snap = worker.snap._replace(call=call)
            yield Step(
                "restored", _join(state, worker._replace(at="approve", snap=snap)), verb=verb
            )

    def _approve(self, state: State, worker: Worker) -> Iterator[Step]:
        act, row_id = state.acts[worker.act], worker.snap.call.id
        decisions = {row_id: Decision("approve", act.seen)}
        given = {"decisions": decisions, "again": act.again}
        try:
            rows, answer = paper.decide(state.rows, decisions, worker.act, act.again, self.rules)
        except Refused as refusal:
            verb = Verb("decide", given, str(refusal), state.rows)
            yield Step(f"decide: {refusal}", state, verb=verb)
            return
        after = _join(state._replace(rows=rows), worker._replace(at="claim"))
        yield Step("decide", after, verb=Verb("decide", given, answer, rows))

    def _claim(self, state: State, worker: Worker) -> Iterator[Step]:
        snap, token = worker.snap, state.spent.tokens + 1
        given = {"row_id": snap.call.id, "args": snap.call.args, "token": token}
        try:
            rows, row, won = paper.claim(
                state.rows, snap.call.id, snap.call.args, token, self.rules
            )
        except Refused as refusal:
            verb = Verb("claim", given, str(refusal), state.rows)
            yield Step(f"claim: {refusal}", state, verb=verb)
            return
        verb = Verb("claim", given, row, rows)
        if won:
            after = state._replace(rows=rows, spent=state.spent.more("tokens"))
            worker = worker._replace(at="enter", token=token, act=row.act)
            yield Step(f"claim {row.id}", _join(after, worker), verb=verb)
        elif row.status != "claimed":
            broken = None
            if row.result is not None and row.result != (snap.slot, snap.life):
                broken = UNTRUE
            ended = Worker("write", snap._replace(phase="done", call=None))
            yield Step(f"recorded: {row.status}", _join(state, ended), broken, verb)
        elif not any(other.token == row.token for other in state.workers):
            ended = Worker("write", snap._replace(phase="done", call=None))
            yield Step("in doubt", _join(state, ended), verb=verb)

    def _enter(self, state: State, worker: Worker) -> Iterator[Step]:
        snap = worker.snap
        entry = Entry(snap.slot, snap.call.birth, snap.life, worker.act)
        after = state._replace(entries=(*state.entries, entry))
        yield Step(
            f"ENTER {entry.slot}",
            _join(after, worker._replace(at="record")),
            self._broken(state, entry),
        )
        if state.spent.unsent < self.unsent:
            after = state._replace(spent=state.spent.more("unsent"))
            yield Step("not sent", _join(after, worker._replace(at="release")))

    def _broken(self, state: State, entry: Entry) -> str | None:
        for other in state.entries:
            if (other.life, other.slot) == (entry.life, entry.slot) or other.birth == entry.birth:
                return TWICE
            if other.act == entry.act and entry.act != "policy":
                return ACT_TWICE
        if entry.act == "policy":
            return None
        act = state.acts[entry.act]
        if act.displayed != entry.slot.args:
            return NOT_SHOWN
        if (entry.life, entry.slot) in state.told_void and not act.again:
            return UNTRUE
        return None

    def _record(self, state: State, worker: Worker) -> Iterator[Step]:
        snap = worker.snap
        given = {"row_id": snap.call.id, "token": worker.token, "outcome": "done"}
        result = (snap.slot, snap.life)
        try:
            rows, answer = paper.record(
                state.rows, snap.call.id, worker.token, "done", result, self.rules
            )
        except Refused as refusal:
            rows, answer = state.rows, str(refusal)
        ended = Worker("write", snap._replace(phase="done", call=None))
        after = _join(state._replace(rows=rows), ended)
        yield Step("record", after, verb=Verb("record", given, answer, rows))

    def _release(self, state: State, worker: Worker) -> Iterator[Step]:
        row_id = worker.snap.call.id
        given = {"row_id": row_id, "token": worker.token}
        try:
            rows, answer = paper.release(state.rows, row_id, worker.token, self.rules)
        except Refused as refusal:
            rows, answer = state.rows, str(refusal)
        verb = Verb("release", given, answer, rows)
        after = state._replace(rows=rows)
        yield Step("release", after, verb=verb)
        if worker.at == "release" and worker.token > 0 and not isinstance(answer, str):
            # The answer got lost: the release is sent once more, who knows when.
            yield Step("release, unheard", _join(after, worker._replace(at="repeat")), verb=verb)

    def _repeat(self, state: State, worker: Worker) -> Iterator[Step]:
        yield from self._release(state, worker)

    def _close(self, state: State, worker: Worker) -> Iterator[Step]:
        """New input: the open call is closed and answered before the model speaks again."""
        state, verb = self._restored(state, worker.snap)
        if isinstance(verb.answer, str):
            ended = worker.snap._replace(phase="error", call=None)
            yield Step(
                f"restored call: {verb.answer}", _join(state, Worker("write", ended)), verb=verb
            )
            return
        decisions = {verb.answer.id: Decision("close")}
        rows, answers = paper.decide(state.rows, decisions, None, False, self.rules)
        [row] = answers.values()
        told = state.told_void
        if not row.entered:
            told = tuple(sorted({*told, (worker.snap.life, worker.snap.slot)}))
        after = state._replace(rows=rows, told_void=told)
        worker = Worker("model", worker.snap._replace(phase="idle", call=None))
        verb = Verb("close", {"row_id": verb.answer.id}, answers, rows)
        yield Step(f"close: {row.status}", _join(after, worker), verb=verb)

    def _write(self, state: State, worker: Worker) -> Iterator[Step]:
        yield Step(f"checkpoint: {worker.snap.phase}", state.write(worker.snap))

    # --- at rest ---------------------------------------------------------------------------

    def at_rest(self, state: State) -> str | None:
        """An honest approval of a parked head must get somewhere."""
        snap = state.checkpoints[state.head]
        if state.workers or snap.phase != "parked":
            return None
        probe = state._replace(acts=(*state.acts, self._look(state)))
        worker = Worker("decide", snap, len(state.acts))
        [step] = self._decide(probe, worker)
        if snap.call.edited:
            return None if step.state.workers or step.state.rows != probe.rows else STRANDED
        if not step.state.workers or step.state.workers[0].at != "approve":
            return STRANDED
        [step] = self._approve(step.state._replace(workers=()), step.state.workers[0])
        return None if step.state.workers else STRANDED


def _join(state: State, worker: Worker) -> State:
    return state._replace(workers=(*state.workers, worker))


def _sorted(state: State) -> State:
    """Return the state with its workers in one order: which is which does not matter."""
    if len(state.workers) < 2:
        return state
    return state._replace(workers=tuple(sorted(state.workers, key=_order)))


def _order(worker: Worker) -> tuple[str, int, str, int, tuple[object, ...]]:
    snap = worker.snap
    call = (snap.call.args, snap.call.birth) if snap.call else ()
    return worker.at, worker.token, str(worker.act), snap.batch_no, call
