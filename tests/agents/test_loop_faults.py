"""TOOL_LOOP against forks, edited snapshots, crashes and a ledger that fails."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from guardchart.agents import approval_event, pending_approval, tool
from guardchart.errors import StoreError
from guardchart.gate import digest
from guardchart.persistence import Decision, InMemoryLedger, SQLiteLedger
from tests.agents.loops import Loop, Loops, balance, pay, say, turn


def decision(item: dict[str, Any], kind: str, **more: Any) -> dict[str, Any]:
    return {"id": item["id"], "digest": item["digest"], "decision": kind, **more}


# --- forks: the same snapshot twice ------------------------------------------------------------


async def test_a_parked_snapshot_resumed_twice_enters_once(durable: Loops) -> None:
    loop = await durable.parked()
    saved, event = loop.saved(), approval_event(loop.pending)
    await loop.send(event)
    fork = await durable.again(loop, snapshot=saved)
    receipt = await fork.send(event)
    assert receipt.status == "taken" and fork.state == "done"
    assert len(durable.bank.paid) == 1 and fork.results == loop.results == ["paid 500 to ann"]


async def test_an_edit_replayed_on_a_fork_enters_once(durable: Loops) -> None:
    loop = await durable.parked()
    saved = loop.saved()
    edit = decision(loop.pending[0], "edit", arguments={"to": "ann", "cents": 1})
    for _ in range(2):
        fork = await durable.again(loop, snapshot=saved)
        await fork.decide(edit)
        assert fork.results == ["(ran with arguments that a reviewer edited) paid 1 to ann"]
    assert durable.bank.paid == [("pay", "ann", 1, "none")]


async def test_approving_the_original_on_a_fork_after_its_edit_ran_enters_nothing(
    durable: Loops,
) -> None:
    loop = await durable.parked()
    saved, event = loop.saved(), approval_event(loop.pending)
    await loop.decide(decision(loop.pending[0], "edit", arguments={"to": "ann", "cents": 1}))
    fork = await durable.again(loop, snapshot=saved)
    await fork.send(event)
    assert durable.bank.paid == [("pay", "ann", 1, "none")]
    assert fork.results == loop.results


async def test_a_fork_to_before_the_turn_with_the_same_answer_enters_once(durable: Loops) -> None:
    """The model answers the same, under a fresh id, after a time travel."""
    for ident in ({}, {"id": "same"}):
        before = len(durable.bank.paid)
        scope = f"fork-{ident}"
        call = pay("ann", 500, **ident)
        loop = await durable.start([balance(), call, say()], scope=scope)
        earlier = await _before_second_turn(durable, [balance(), call, say()], scope)
        await loop.ask()
        del loop
        first = await durable.start([call, say()], snapshot=earlier, trusted=True, scope=scope)
        await first.approve()
        again = await durable.start([call, say()], snapshot=earlier, trusted=True, scope=scope)
        await again.approve()
        assert len(durable.bank.paid) == before + 1 and again.results == first.results


async def _before_second_turn(loops: Loops, script: list[Any], scope: str) -> dict[str, Any]:
    """A snapshot taken in awaiting_model, before the second answer."""
    seen: list[dict[str, Any]] = []

    class Watch:
        def on_transition(self, interp: Any, before: Any, after: Any, t: Any) -> None:
            if "toolLoop.awaiting_model" in after:
                seen.append(interp.dump())

    loop = await loops.start(script, scope=scope, plugins=[Watch()])
    await loop.ask()
    return seen[-1] if loop.state == "awaiting_human" else seen[1]


async def test_a_changed_call_approved_on_a_fork_runs(durable: Loops) -> None:
    script = [balance(), pay("ann", 500), say()]
    earlier = await _before_second_turn(durable, script, "fork")
    first = await durable.start(
        [pay("ann", 500), say()], snapshot=earlier, trusted=True, scope="fork"
    )
    await first.approve()
    other = await durable.start(
        [pay("ann", 7), say()], snapshot=earlier, trusted=True, scope="fork"
    )
    assert other.state == "awaiting_human" and other.pending[0]["arguments"]["cents"] == 7
    await other.approve()
    assert [cents for _, _, cents, _ in durable.bank.paid] == [500, 7]


async def test_an_approval_of_one_answer_does_not_approve_another_under_its_id(
    durable: Loops,
) -> None:
    script = [balance(), pay("ann", 1, id="c"), say()]
    earlier = await _before_second_turn(durable, script, "fork")
    first = await durable.start(
        [pay("ann", 1, id="c"), say()], snapshot=earlier, trusted=True, scope="fork"
    )
    event = approval_event(first.pending)
    await first.send(event)
    other = await durable.start(
        [pay("ann", 99_999, id="c"), say()], snapshot=earlier, trusted=True, scope="fork"
    )
    assert (await other.send(event)).denied
    assert other.state == "awaiting_human" and len(durable.bank.paid) == 1


async def test_approve_against_reject_the_first_one_wins(durable: Loops) -> None:
    loop = await durable.parked()
    saved, event = loop.saved(), approval_event(loop.pending)
    await loop.send("HUMAN_REJECTED", reason="no")
    fork = await durable.again(loop, snapshot=saved)
    receipt = await fork.send(event)
    assert receipt.denied and "rejected" in receipt.reason and fork.state == "awaiting_human"
    assert durable.bank.entered == []
    receipt = await fork.send({**event, "again": True})
    assert receipt.status == "taken" and len(durable.bank.paid) == 1


async def test_reject_against_approve_tells_what_ran(durable: Loops) -> None:
    loop = await durable.parked()
    saved = loop.saved()
    await loop.approve()
    fork = await durable.again(loop, snapshot=saved)
    await fork.send("HUMAN_REJECTED")
    assert fork.results == ["paid 500 to ann"] and list(fork.rows.values()) == ["done"]


async def test_new_input_against_an_approval_that_ran_tells_what_ran(durable: Loops) -> None:
    loop = await durable.parked()
    saved = loop.saved()
    await loop.approve()
    fork = await durable.again(loop, snapshot=saved)
    await fork.ask("something else")
    assert fork.results[0] == "paid 500 to ann"


async def test_an_approval_against_new_input_is_refused(durable: Loops) -> None:
    loop = await durable.parked()
    saved, event = loop.saved(), approval_event(loop.pending)
    await loop.ask("something else")
    fork = await durable.again(loop, snapshot=saved)
    assert (await fork.send(event)).denied and durable.bank.entered == []


async def test_another_conversation_cannot_use_the_approval(durable: Loops) -> None:
    loop = await durable.parked(pay(id="c"))
    event = approval_event(loop.pending)
    saved = loop.saved()
    other = await durable.again(loop, snapshot=saved, scope="ticket-2")
    await loop.send(event)
    receipt = await other.send(event)
    if durable.ledger.durable:
        assert receipt.denied and other.error["kind"] == "tampered"
        assert len(durable.bank.paid) == 1


# --- edited snapshots --------------------------------------------------------------------------


def forged(loop: Loop, edit: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    saved = loop.saved()
    edit(saved["context"]["pending_tool_calls"][0])
    return saved


def _amount(entry: dict[str, Any]) -> None:
    entry["arguments"]["cents"] = 99_999


def _amount_and_digest(entry: dict[str, Any]) -> None:
    entry["arguments"]["cents"] = 99_999
    entry["digest"] = digest(entry["arguments"])


def _type(entry: dict[str, Any]) -> None:
    entry["arguments"]["cents"] = "500"


def _tool(entry: dict[str, Any]) -> None:
    entry.update(name="close_account", arguments={"name": "ann"})


def _unlisted(entry: dict[str, Any]) -> None:
    entry.update(name="format_disk", arguments={})


def _read_only(entry: dict[str, Any]) -> None:
    entry.update(name="balance", arguments={"account": "boss"})


def _unknown_key(entry: dict[str, Any]) -> None:
    entry["arguments"]["__class__"] = "x"


EDITS = [_amount, _amount_and_digest, _type, _tool, _unlisted, _read_only, _unknown_key]


@pytest.mark.parametrize(
    ("answer", "edit"),
    [
        *[("HUMAN_APPROVED", edit) for edit in EDITS],
        ("HUMAN_DECIDED", _amount),
        ("HUMAN_REJECTED", _amount),
        ("HUMAN_REJECTED", _read_only),
    ],
)
async def test_an_edited_call_is_refused_and_does_not_stay_parked(
    durable: Loops, edit: Any, answer: str
) -> None:
    loop = await durable.parked(pay(id="c"))
    honest = {
        "HUMAN_APPROVED": approval_event(loop.pending),
        "HUMAN_DECIDED": {
            "type": "HUMAN_DECIDED",
            "decisions": [decision(loop.pending[0], "approve")],
        },
        "HUMAN_REJECTED": {"type": "HUMAN_REJECTED"},
    }[answer]
    other = await durable.again(loop, snapshot=forged(loop, edit))
    receipt = await other.send(honest)
    assert receipt.denied and "not the ones that were proposed" in receipt.reason
    assert other.state == "error" and other.error["kind"] == "tampered"
    assert other.results[0].startswith("refused: ") and durable.bank.entered == []
    assert loop.rows == {"c": "proposed"}
    assert (await loop.approve()).status == "taken"
    assert durable.bank.paid == [("pay", "ann", 500, "none")]


@pytest.mark.parametrize("edit", [_amount, _tool])
async def test_one_edited_call_spoils_its_whole_batch(durable: Loops, edit: Any) -> None:
    loop = await durable.parked(pay(id="c"), pay("bob", 1, id="d"))
    event = approval_event(loop.pending)
    other = await durable.again(loop, snapshot=forged(loop, edit))
    assert (await other.send(event)).denied
    assert other.error["kind"] == "tampered" and durable.bank.entered == []
    assert set(loop.rows.values()) == {"proposed"}


def _flip(entry: dict[str, Any]) -> None:
    entry["needs_approval"] = False


def _decided(entry: dict[str, Any]) -> None:
    entry["decided"] = True


def _no_row_id(entry: dict[str, Any]) -> None:
    entry.pop("row_id", None)


def _flags(entry: dict[str, Any]) -> None:
    entry.update(needs_approval=False, decided=True, approved=True, human_approved=True)


@pytest.mark.parametrize("edit", [_flip, _decided, _no_row_id, _flags])
async def test_flipped_flags_run_nothing(durable: Loops, edit: Any) -> None:
    loop = await durable.parked(pay(id="c"), pay("bob", 1, id="d"))
    saved = forged(loop, edit)
    saved["context"].update(approved_call_ids=["c", "d"], human_approved=True)
    for event in (
        {"type": "HUMAN_APPROVED", "call_ids": []},
        {"type": "HUMAN_APPROVED", "call_ids": ["d"]},
    ):
        other = await durable.again(loop, snapshot=saved)
        receipt = await other.send(event)
        assert receipt.denied and other.state == "awaiting_human"
        assert set(other.rows.values()) == {"proposed"}
    assert durable.bank.entered == []


async def _under_way(loops: Loops, *calls: dict[str, Any], **options: Any) -> dict[str, Any]:
    """The snapshot of a batch that a person approved, taken as its service started."""
    seen: list[dict[str, Any]] = []

    class Watch:
        def on_transition(self, interp: Any, before: Any, after: Any, t: Any) -> None:
            if "toolLoop.awaiting_tool" in after:
                seen.append(interp.dump())

    loop = await loops.parked(*calls, plugins=[Watch()], **options)
    await loop.approve()
    loops.bank.entered.clear()
    return seen[0]


async def test_a_state_forged_to_awaiting_tool_runs_no_side_effect_without_its_rows(
    durable: Loops,
) -> None:
    """Even where its host takes the snapshot for its own and starts its services again."""
    saved = await _under_way(durable, pay(id="c"), pay("bob", 1, id="d"))
    saved["context"].update(approved_call_ids=["c", "d"], human_approved=True)
    for entry in saved["context"]["pending_tool_calls"]:
        entry.update(decided=True, needs_approval=False, approved=True)
    for trusted in (False, True):
        other = await durable.start(
            [say()], snapshot=saved, trusted=trusted, scope=f"elsewhere-{trusted}"
        )
        if not trusted:
            other.interp.fail_interrupted()
        await other.until(lambda other=other: other.interp.quiet())
        assert durable.bank.entered == []
        assert "done" not in other.rows.values()
    kinds = {"tampered"} if durable.ledger.durable else {"tool_denied"}
    assert other.state == "error" and other.error["kind"] in kinds


@pytest.mark.parametrize("edit", [_amount_and_digest, _tool, _unlisted])
async def test_a_batch_under_way_that_was_edited_runs_nothing(durable: Loops, edit: Any) -> None:
    saved = await _under_way(durable, pay(id="c"), balance())
    edit(saved["context"]["pending_tool_calls"][0])
    other = await durable.start([say()], snapshot=saved, trusted=True)
    kind = "tool_denied" if edit is _unlisted else "tampered"
    assert other.state == "error" and other.error["kind"] == kind
    assert durable.bank.entered == [] and len(other.results) == 2


async def test_a_batch_under_way_restored_by_its_owner_is_answered_from_its_rows(
    durable: Loops,
) -> None:
    saved = await _under_way(durable, pay(id="c"), balance())
    other = await durable.start([say()], snapshot=saved, trusted=True)
    assert other.state == "done" and other.results == ["paid 500 to ann", "a1: 12 EUR"]
    assert durable.bank.paid == []


# --- crashes -----------------------------------------------------------------------------------


class Killed(BaseException):
    """The process ends here."""


class Wrapped:
    """A ledger that fails at one of its verbs, or whose process ends there."""

    def __init__(
        self, inner: Any, verb: str, error: BaseException, *, after: bool = False, times: int = 1
    ) -> None:
        self.inner = inner
        self.verb = verb
        self.error = error
        self.after = after
        self.times = times
        self.dead = False

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.inner, name)
        if not callable(found):
            return found

        def verb(*args: Any, **kwargs: Any) -> Any:
            if self.dead:
                raise self.error
            if name != self.verb or self.times <= 0:
                return found(*args, **kwargs)
            self.times -= 1
            if self.after:
                found(*args, **kwargs)
            self.dead = isinstance(self.error, Killed)
            raise self.error

        return verb


async def _dies(loops: Loops, loop: Loop, sending: Any) -> None:
    """Run until the process ends; nothing it does afterwards reaches the ledger."""
    with contextlib.suppress(Killed):
        await sending
    assert loop.interp.host.ledger.dead
    loop.interp.stop()
    loops.made.remove(loop)


@pytest.fixture
def restartable(tmp_path: Path) -> Any:
    """The sync engine on a ledger file; each call of the function is another process."""
    opened: list[SQLiteLedger] = []

    def process() -> SQLiteLedger:
        opened.append(SQLiteLedger(tmp_path / "ledger.db"))
        return opened[-1]

    yield process
    for each in opened:
        each.disconnect()


@pytest.mark.parametrize("after", [False, True])
async def test_killed_at_propose_the_turn_is_asked_anew_and_enters_once(
    restartable: Any, after: bool
) -> None:
    loops = Loops("sync", restartable())
    loop = await loops.start([pay(), say()])
    idle = loop.saved()
    broken = Wrapped(loops.ledger, "propose_batch", Killed(), after=after)
    dying = await loops.start([pay()], snapshot=idle, ledger=broken)
    await _dies(loops, dying, dying.ask())
    loops.ledger = restartable()
    other = await loops.again(loop, [pay(), say()], snapshot=idle)
    await other.ask()
    await other.approve()
    assert len(loops.bank.paid) == 1
    loops.close()


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("verb", ["decide", "claim"])
async def test_killed_at_decide_or_before_the_claim_an_approval_enters_once(
    restartable: Any, verb: str, after: bool
) -> None:
    loops = Loops("sync", restartable())
    wire = _tools(loops)
    loop = await loops.parked({"tool": "wire", "args": {"to": "ann"}}, tools=wire)
    parked, event = loop.saved(), approval_event(loop.pending)
    broken = Wrapped(loops.ledger, verb, Killed(), after=after)
    dying = await loops.again(loop, snapshot=parked, ledger=broken, tools=wire)
    await _dies(loops, dying, dying.send(event))
    loops.ledger = restartable()
    other = await loops.again(loop, snapshot=parked, tools=wire)
    await other.send(event)
    assert other.state == "done"
    if verb == "claim" and after:
        assert loops.bank.entered == [] and "in doubt" in other.results[0]
    else:
        assert loops.bank.entered == [("wire", "ann")] and other.results == ["wired"]
    loops.close()


async def test_killed_before_the_record_the_call_is_in_doubt_and_not_run_again(
    restartable: Any,
) -> None:
    loops = Loops("sync", restartable())
    wire = _tools(loops)
    loop = await loops.parked({"tool": "wire", "args": {"to": "ann"}}, tools=wire)
    parked, event = loop.saved(), approval_event(loop.pending)
    broken = Wrapped(loops.ledger, "record", Killed())
    dying = await loops.again(loop, snapshot=parked, ledger=broken, tools=wire)
    await _dies(loops, dying, dying.send(event))
    loops.ledger = restartable()
    other = await loops.again(loop, snapshot=parked, tools=wire)
    await other.send(event)
    assert loops.bank.entered == [("wire", "ann")] and "in doubt" in other.results[0]
    loops.close()


def _tools(loops: Loops) -> Any:
    def wire(to: str) -> str:
        """Wire money."""
        loops.bank.enter(("wire", to))
        return "wired"

    return loops.bank.registry(tool(wire, side_effect=True, timeout_s=0.2))


async def test_resumed_in_the_middle_of_a_batch_nothing_runs_by_itself(durable: Loops) -> None:
    """The snapshot of a batch under way, restored by a host that does not own it."""
    saved = await _under_way(durable, pay(), balance())
    other = await durable.start([say()], snapshot=saved)
    other.interp.fail_interrupted()
    if durable.is_async:
        await other.interp.settle(30, until=("done", "error"))
    else:
        other.interp.settle(30, until=("done", "error"))
    assert other.state == "done" and durable.bank.entered == []
    assert other.results == ["paid 500 to ann", "error: ServiceInterruptedError"]


# --- a ledger that fails -----------------------------------------------------------------------


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("verb", ["propose_batch", "slot_row", "decide", "claim", "record", "row"])
async def test_a_ledger_that_fails_once_neither_strands_nor_enters_twice(
    durable: Loops, verb: str, after: bool
) -> None:
    failing = Wrapped(durable.ledger, verb, StoreError("disk full"), after=after)
    loop = await durable.start([pay(id="a"), pay(id="b"), say(), say()], ledger=failing)
    await loop.ask()
    for _ in range(4):
        if loop.state == "awaiting_human":
            await loop.approve()
    assert loop.state == "done", loop.context
    assert len(durable.bank.paid) <= 2
    paid_rows = [status for status in loop.rows.values() if status in ("done", "claimed")]
    assert len(durable.bank.paid) <= len(paid_rows)


@pytest.mark.parametrize("verb", ["propose_batch", "slot_row", "decide", "claim", "record"])
async def test_a_ledger_that_fails_for_ever_runs_at_most_what_it_claimed(
    durable: Loops, verb: str
) -> None:
    failing = Wrapped(durable.ledger, verb, StoreError("disk full"), times=10**6)
    loop = await durable.start([pay(), pay(), pay(), say()], ledger=failing)
    await loop.ask()
    for _ in range(3):
        if loop.state == "awaiting_human":
            receipt = await loop.approve()
            assert receipt.denied == (verb in ("slot_row", "decide"))
    if verb in ("propose_batch", "claim"):
        assert durable.bank.paid == []
        assert loop.error == {"kind": "retries", "message": "retries exhausted"}
    elif verb in ("slot_row", "decide"):
        assert durable.bank.paid == [] and loop.state == "awaiting_human"
    else:
        assert len(durable.bank.paid) == 3 and loop.state == "done"
        assert ["in doubt" in each for each in loop.results] == [True] * 3


async def test_a_failing_proposal_still_costs_its_tokens(loops: Loops) -> None:
    failing = Wrapped(loops.ledger, "propose_batch", StoreError("disk full"), times=10**6)
    script = [pay(usage={"input_tokens": 10})] * 9
    loop = await loops.start(script, ledger=failing, budgets={"max_tokens": 15})
    await loop.ask()
    assert loop.error == {"kind": "budget", "message": "token budget exhausted"}
    assert loop.context["turns"] == 2 and loop.context["last_failure"] == "StoreError"


async def test_results_of_a_batch_survive_a_ledger_that_fails_in_it(durable: Loops) -> None:
    failing = Wrapped(durable.ledger, "claim", StoreError("disk full"))
    loop = await durable.parked(balance(), pay(), ledger=failing)
    await loop.approve()
    assert loop.results == ["a1: 12 EUR", "not run: another call of this turn failed"]
    assert durable.bank.paid == []


# --- another process ---------------------------------------------------------------------------


async def test_a_batch_parked_elsewhere_is_taken_over_by_an_in_memory_ledger(
    loops: Loops,
) -> None:
    loop = await loops.parked(pay(id="c"), balance(), pay("bob", 1, id="d"))
    event = approval_event(pending_approval(loop.saved()["context"]))
    other = await loops.again(loop, ledger=InMemoryLedger())
    receipt = await other.send(event)
    assert receipt.status == "taken" and other.state == "done" and len(loops.bank.paid) == 2
    late = await loops.again(loop, ledger=other.interp.host.ledger)
    await late.send(event)
    assert len(loops.bank.paid) == 2


async def test_a_batch_unknown_to_a_durable_ledger_is_refused(engine: str, tmp_path: Path) -> None:
    loops = Loops(engine, SQLiteLedger(tmp_path / "one.db"))
    loop = await loops.parked()
    elsewhere = SQLiteLedger(tmp_path / "two.db")
    other = await loops.again(loop, ledger=elsewhere)
    assert (await other.approve()).denied
    assert other.error["kind"] == "tampered" and loops.bank.entered == []
    loops.close()
    loops.ledger.disconnect()
    elsewhere.disconnect()


async def test_row_ids_of_a_batch_that_is_taken_over_are_kept(loops: Loops) -> None:
    first = await loops.parked(pay("x", 1, id="c"))
    await first.send("HUMAN_REJECTED")
    loop = await loops.parked(pay("ann", 2, id="c"))
    assert loop.pending[0]["id"] == "c-2"
    other = await loops.again(loop, ledger=InMemoryLedger())
    receipt = await other.send("HUMAN_APPROVED", call_ids=["c-2"])
    assert receipt.status == "taken" and loops.bank.paid == [("pay", "ann", 2, "none")]


async def test_many_calls_of_one_turn_keep_their_order_and_rows(durable: Loops) -> None:
    calls = [pay(f"p{n}", n + 1) for n in range(8)]
    loop = await durable.start([turn(*calls), say()])
    await loop.ask()
    assert len(loop.pending) == 8
    await loop.approve()
    assert [to for _, to, *_ in durable.bank.paid] == [f"p{n}" for n in range(8)]


# --- at the same time --------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["approve", "mixed"])
async def test_eight_answers_at_once_enter_once(restartable: Any, how: str) -> None:
    loops = Loops("sync", restartable())
    loop = await loops.parked()
    saved, yes = loop.saved(), approval_event(loop.pending)
    no = {"type": "HUMAN_REJECTED"}
    others = [await loops.again(loop, snapshot=saved, ledger=restartable()) for _ in range(8)]
    events = [no if how == "mixed" and n % 2 else yes for n in range(8)]
    barrier = threading.Barrier(8)

    def answer(other: Loop, event: Any) -> Any:
        barrier.wait(5)
        return other.interp.send(event)

    with ThreadPoolExecutor(8) as pool:
        receipts = list(pool.map(answer, others, events))
    ran = len(loops.bank.paid)
    assert ran == 1 if how == "approve" else ran <= 1
    for other, receipt in zip(others, receipts, strict=True):
        if receipt.status == "taken":
            (told,) = other.results
            assert (
                (told == "paid 500 to ann" or "in doubt" in told) if ran else "rejected" in told
            ), told
        else:
            assert receipt.reason and other.state == "awaiting_human"
    loops.close()


async def test_a_double_click_enters_once(durable: Loops) -> None:
    loop = await durable.parked()
    yes = approval_event(loop.pending)
    if durable.is_async:
        first, second = await asyncio.gather(
            loop.interp.send(yes, wait=True), loop.interp.send(yes, wait=True)
        )
        await loop.interp.idle()
    else:
        first, second = loop.interp.send(yes), loop.interp.send(yes)
    # The sync engine is done by then, the async one runs the call.
    assert first.status == "taken"
    assert second.status == ("denied" if durable.is_async else "dropped")
    assert len(durable.bank.paid) == 1 and loop.state == "done"


@pytest.mark.parametrize("what", ["reject", "edit"])
async def test_a_decision_taken_elsewhere_while_the_batch_runs_counts(
    durable: Loops, what: str
) -> None:
    """The second call is decided anew, on a fork, while the first one is running."""

    def first(key: str) -> str:
        """Run first; somebody uses the time."""
        elsewhere = Decision("reject", reason="stop")
        if what == "edit":
            arguments = {"to": "ann", "cents": 1, "note": "none"}
            elsewhere = Decision("edit", arguments=arguments, new_digest=digest(arguments))
        host = loop.interp.host
        host.ledger.decide(host.scope, {"b": elsewhere}, now=int(loop.interp.clock.now_ms()))
        return "ran"

    tools = durable.bank.registry(tool(first, side_effect=True))
    calls = ({"tool": "first", "args": {"key": "k"}, "id": "a"}, pay(id="b"))
    loop = await durable.parked(*calls, tools=tools)
    await loop.approve()
    assert loop.state == "done"
    if what == "reject":
        assert loop.results == ["ran", "not run: rejected by a reviewer: stop"]
        assert durable.bank.paid == []
    else:
        assert loop.results[1] == "(ran with arguments that a reviewer edited) paid 1 to ann"
        assert durable.bank.paid == [("pay", "ann", 1, "none")]
