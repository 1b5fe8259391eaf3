"""An approval binds exactly what was displayed, once, in time."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from guardchart import SimulatedClock, SyncInterpreter, create_machine
from guardchart.agents import FakeModel, agent_logic, pending_approval
from guardchart.gate import approval_event, decisions_event, display
from guardchart.persistence import InMemoryLedger, SQLiteLedger
from tests.promises.bank import (
    AT_ONCE,
    REFUND,
    SAY,
    THREAD,
    Bank,
    Parked,
    graph,
    listed_chart,
    start,
)


def _wrong(ids: list[str]) -> dict[str, Any]:
    first = ids[0]
    return {
        "another case": [first.upper(), *ids[1:]],
        "blanks": [f" {first}", *ids[1:]],
        "a zero-width space": [first + "\u200b", *ids[1:]],
        "one too many": [*ids, "call_x"],
        "one missing": ids[1:],
        "a duplicate": [first, first],
        "the integer 1": [1, *ids[1:]],
        "no list": first,
        "nothing": None,
    }


@pytest.mark.gate
@pytest.mark.parametrize("what", _wrong(["a"]))
def test_ids_match_exactly_or_nothing_runs(what: str) -> None:
    second = {"tool": "refund", "args": {"order_id": 8, "cents": 1}}
    parked = Parked({**REFUND, "id": "call_a1"}, {**second, "id": "call_b2"})
    ids = [each["id"] for each in parked.pending]
    result = parked.send({"type": "HUMAN_APPROVED", "call_ids": _wrong(ids)[what]})
    assert result.waiting and result.ignored is not None
    assert parked.bank.entered == []


@pytest.mark.gate
def test_a_digest_that_does_not_fit_denies_the_approval() -> None:
    parked = Parked()
    event = approval_event(parked.pending)
    event["digests"] = {each["id"]: "0" * 64 for each in parked.pending}
    assert parked.send(event).waiting
    assert parked.bank.entered == []


@pytest.mark.gate
def test_a_used_approval_replayed_enters_nothing_again() -> None:
    parked = Parked()
    assert parked.approve().ok
    replayed = parked.approve()
    assert parked.bank.entered == [("refund", 7, 250)]
    assert "refunded 250" in str(replayed.context["messages"])


@pytest.mark.gate
def test_a_used_approval_in_another_thread_is_denied(tmp_path: Path) -> None:
    bank = Bank()
    app = graph(bank, [REFUND, SAY, REFUND, SAY], ledger=SQLiteLedger(tmp_path / "l.sqlite"))
    pending = pending_approval(app.invoke(start(), THREAD)["xsm"]["context"])
    other = {"configurable": {"thread_id": "t2"}}
    app.invoke({"event": approval_event(pending)}, THREAD)
    app.invoke(start(), other)
    out = app.invoke({"event": approval_event(pending)}, other)
    assert bank.entered == [("refund", 7, 250)]
    assert out["xsm"]["receipt"]["denied"] and out["xsm"]["value"] == "awaiting_human"


@pytest.mark.gate
def test_a_fork_to_before_the_approval_enters_nothing_again() -> None:
    bank = Bank()
    app = graph(bank, [REFUND, SAY, SAY])
    pending = pending_approval(app.invoke(start(), THREAD)["xsm"]["context"])
    assert bank.entered == []
    parked = app.get_state(THREAD).config
    app.invoke({"event": approval_event(pending)}, THREAD)
    out = app.invoke({"event": approval_event(pending)}, parked)
    assert bank.entered == [("refund", 7, 250)]
    assert out["xsm"]["value"] == "done"


@pytest.mark.gate
def test_a_changed_call_deliberately_approved_on_a_fork_can_run() -> None:
    parked = Parked()
    assert parked.approve().ok
    (call,) = parked.pending
    decision = {
        "id": call["id"],
        "digest": call["digest"],
        "decision": "edit",
        "arguments": {"order_id": 7, "cents": 99},
    }
    denied = parked.send(decisions_event([decision]))
    assert parked.bank.entered == [("refund", 7, 250)]
    assert denied.context["messages"]
    allowed = parked.send({**decisions_event([decision]), "again": True})
    assert allowed.ok
    assert parked.bank.entered == [("refund", 7, 250), ("refund", 7, 99)]


@pytest.mark.gate
def test_executed_is_what_was_displayed_defaults_included() -> None:
    parked = Parked({"tool": "refund", "args": {"order_id": 7}})
    assert parked.pending[0]["arguments"] == {"order_id": 7, "cents": 100}
    assert parked.approve().ok
    assert parked.bank.entered == [("refund", 7, 100)]


@pytest.mark.gate
def test_a_late_approval_is_refused_on_arrival_whether_or_not_a_timer_fired() -> None:
    bank = Bank()
    clock = SimulatedClock(wall_start=1_000_000)
    logic = agent_logic(
        FakeModel([REFUND, SAY], is_async=False),
        bank.registry(),
        ledger=InMemoryLedger(),
        retry=AT_ONCE,
        human_timeout_s=60,
    )
    machine = create_machine(listed_chart(), logic)
    first = SyncInterpreter(machine, clock=clock, scope="t1").start()
    first.send("START", prompt="Please help.")
    data = first.dump()
    pending = pending_approval(first.context)
    first.stop()
    for timer in data["timers"].values():
        timer["due_at"] += 1_000_000  # an edited deadline in a snapshot changes nothing
    clock.increment(61_000)
    second = SyncInterpreter.from_snapshot(data, machine, clock=clock, scope="t1").start()
    receipt = second.send(approval_event(pending))
    assert receipt.denied
    assert bank.entered == []
    assert second.context["error"]["kind"] == "human_timeout"
    second.stop()


@pytest.mark.gate
def test_one_call_of_a_batch_can_be_approved_rejected_or_edited_alone() -> None:
    calls = [
        {"tool": "refund", "args": {"order_id": n, "cents": 10 * n}, "id": f"c{n}"}
        for n in (1, 2, 3)
    ]
    parked = Parked(*calls)
    decisions = [
        {"id": "c1", "decision": "approve"},
        {"id": "c2", "decision": "reject", "reason": "too much"},
        {"id": "c3", "decision": "edit", "arguments": {"order_id": 3, "cents": 5}},
    ]
    snapshot: Any = None
    for decision in decisions:
        result = parked.send(decisions_event([decision]), snapshot)
        snapshot = dict(result.snapshot)
        if decision["id"] != "c3":
            assert result.waiting and parked.bank.entered == []
    assert result.ok
    assert parked.bank.entered == [("refund", 1, 10), ("refund", 3, 5)]
    texts = [each["content"] for each in result.context["messages"] if each["role"] == "tool"]
    assert "too much" in texts[1] and "edited" in texts[2]


@pytest.mark.gate
@pytest.mark.parametrize("people", [2, 8])
def test_people_who_approve_at_once_enter_once_and_all_see_the_result(
    people: int, tmp_path: Path
) -> None:
    parked = Parked(ledger=SQLiteLedger(tmp_path / "ledger.sqlite"))
    barrier = threading.Barrier(people)

    def approve(_: int) -> Any:
        barrier.wait()
        return parked.approve()

    with ThreadPoolExecutor(people) as pool:
        results = list(pool.map(approve, range(people)))
    assert parked.bank.entered == [("refund", 7, 250)]
    for result in results:
        assert "refunded 250" in str(result.context["messages"])


def test_bidi_zero_width_and_control_characters_are_shown_escaped() -> None:
    shown = str(display({"to": "ann\u202etxe\u200b\x07\u2066"}))
    for hidden in ("\u202e", "\u200b", "\x07", "\u2066"):
        assert hidden not in shown
    assert "ann" in shown
