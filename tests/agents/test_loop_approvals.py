"""TOOL_LOOP and people: what is asked, what is decided, what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from guardchart.agents import RetryPolicy, approval_event, load_chart, pending_approval, tool
from guardchart.errors import NotSentError
from guardchart.gate import IdempotencyKey
from guardchart.runtime import SimulatedClock
from tests.agents.loops import Loop, Loops, balance, pay, say

HOUR = 3600.0


def ids(loop: Loop) -> list[str]:
    return [each["id"] for each in loop.pending]


def decision(item: dict[str, Any], kind: str, **more: Any) -> dict[str, Any]:
    return {"id": item["id"], "digest": item["digest"], "decision": kind, **more}


# --- what is asked -----------------------------------------------------------------------------


async def test_what_is_shown_is_exactly_what_runs_defaults_included(durable: Loops) -> None:
    loop = await durable.parked(pay("ann", 500, id="call-7"), balance())
    (item,) = loop.pending
    assert set(item) == {"id", "tool_call_id", "name", "arguments", "digest"}
    assert item["id"] == item["tool_call_id"] == "call-7" and item["name"] == "pay"
    assert item["arguments"] == {"to": "ann", "cents": 500, "note": "none"}
    assert len(item["digest"]) == 64 and durable.bank.entered == []
    await loop.approve()
    assert durable.bank.paid == [("pay", "ann", 500, "none")] and loop.pending == []


async def test_nothing_runs_while_a_person_is_asked(durable: Loops) -> None:
    loop = await durable.parked(balance(), pay())
    assert durable.bank.entered == [] and loop.results == []
    assert loop.rows == {ids(loop)[0]: "proposed"}


async def test_a_snapshot_round_trip_asks_the_same_question(durable: Loops) -> None:
    loop = await durable.parked(pay(), pay("bob", 1))
    saved = loop.saved()
    assert pending_approval(saved["context"]) == loop.pending
    other = await durable.again(loop)
    assert other.pending == loop.pending


# --- approve -----------------------------------------------------------------------------------


async def test_an_approval_names_exactly_the_pending_calls(durable: Loops) -> None:
    loop = await durable.parked(pay(), pay("bob", 1))
    receipt = await loop.send("HUMAN_APPROVED", call_ids=ids(loop))
    assert receipt.status == "taken" and loop.state == "done"
    assert len(durable.bank.paid) == 2 and set(loop.rows.values()) == {"done"}


@pytest.mark.parametrize(
    "named",
    [
        [],
        ["a"],
        ["a", "b", "c"],
        ["a", "b", "b"],
        ["a", "B"],
        ["a", " b"],
        ["a", "b "],
        ["a", "b\u200b"],
        ["a", "\u0061\u0300b"],
        ["a", 1],
        ["a", None],
        "ab",
        None,
        {"a": 1, "b": 1},
        [["a"], ["b"]],
    ],
)
async def test_ids_that_are_not_exactly_the_pending_ones_are_denied(
    loops: Loops, named: Any
) -> None:
    loop = await loops.parked(pay(id="a"), pay("bob", 1, id="b"))
    before = loop.saved()["context"]
    receipt = await loop.send({"type": "HUMAN_APPROVED", "call_ids": named})
    assert receipt.denied and receipt.reason
    assert loop.state == "awaiting_human" and loop.saved()["context"] == before
    assert set(loop.rows.values()) == {"proposed"} and loops.bank.entered == []
    assert (await loop.approve()).status == "taken"


async def test_the_integer_one_is_not_the_id_one(loops: Loops) -> None:
    loop = await loops.parked(pay(id="1"))
    assert (await loop.send("HUMAN_APPROVED", call_ids=[1])).denied
    assert (await loop.send("HUMAN_APPROVED")).denied
    assert loop.state == "awaiting_human"


@pytest.mark.parametrize(
    "digests",
    [
        {"a": "0" * 64},
        {},
        {"a": 7},
        {"a": None},
        {"other": "x"},
        ["a"],
        "a",
    ],
)
async def test_digests_must_be_those_of_the_pending_calls(loops: Loops, digests: Any) -> None:
    loop = await loops.parked(pay(id="a"))
    receipt = await loop.send({"type": "HUMAN_APPROVED", "call_ids": ["a"], "digests": digests})
    if digests == {}:
        assert receipt.status == "taken"  # no digests given: ids alone
        return
    assert receipt.denied and loop.state == "awaiting_human"


async def test_an_approval_notes_who_gave_it(durable: Loops) -> None:
    loop = await durable.parked()
    (row_id,) = ids(loop)
    await loop.approve(by="eve@example.org")
    host = loop.interp.host
    assert host.ledger.row(host.scope, row_id).by == "eve@example.org"


@pytest.mark.parametrize("extra", [{"by": 7}, {"by": "x" * 3000}, {"again": 1}, {"again": "yes"}])
async def test_a_malformed_approval_is_denied(loops: Loops, extra: Any) -> None:
    loop = await loops.parked()
    assert (await loop.approve(**extra)).denied
    assert loop.state == "awaiting_human"


async def test_a_second_approval_enters_nothing_and_is_not_silent(durable: Loops) -> None:
    loop = await durable.parked(script=[pay("bob", 1), say()])
    event = approval_event(loop.pending)
    await loop.send(event)
    assert loop.state == "awaiting_human" and loop.pending[0]["arguments"]["to"] == "bob"
    receipt = await loop.send(event)
    assert receipt.denied and "not pending" in receipt.reason
    assert len(durable.bank.paid) == 1 and loop.state == "awaiting_human"


async def test_an_approval_where_nobody_is_asked_is_ignored(loops: Loops) -> None:
    loop = await loops.start([say()])
    receipt = await loop.send("HUMAN_APPROVED", call_ids=["x"])
    assert receipt.status == "ignored" and loop.state == "idle"


async def test_a_providers_id_that_denotes_an_earlier_call_does_not_approve_a_later_one(
    durable: Loops,
) -> None:
    first = await durable.parked(pay("ann", 1, id="c1"))
    await first.send("HUMAN_REJECTED")
    second = await durable.parked(pay("bob", 2, id="c1"))
    (item,) = second.pending
    assert item["tool_call_id"] == "c1" and item["id"] == "c1-2"
    receipt = await second.send("HUMAN_APPROVED", call_ids=["c1"])
    assert receipt.denied and durable.bank.paid == []
    receipt = await second.send("HUMAN_APPROVED", call_ids=["c1-2"])
    assert receipt.status == "taken" and durable.bank.paid == [("pay", "bob", 2, "none")]


async def test_equal_calls_of_one_turn_are_two_calls(durable: Loops) -> None:
    loop = await durable.parked(pay(), pay())
    assert len(set(ids(loop))) == 2
    await loop.approve()
    assert len(durable.bank.paid) == 2 and list(loop.rows.values()) == ["done", "done"]


# --- reject ------------------------------------------------------------------------------------


async def test_a_rejection_closes_the_batch_with_its_reason(durable: Loops) -> None:
    loop = await durable.parked(pay(), balance(), pay("bob", 1))
    receipt = await loop.send("HUMAN_REJECTED", reason="not in this country")
    assert receipt.status == "taken" and loop.state == "done" and durable.bank.entered == []
    assert loop.results[0] == "not run: rejected by a reviewer: not in this country"
    assert loop.results[2] == loop.results[0] and len(loop.results) == 3
    assert set(loop.rows.values()) == {"rejected"}


async def test_a_rejection_after_a_partial_approval_closes_every_row(durable: Loops) -> None:
    loop = await durable.parked(pay(), pay("bob", 1), pay("cy", 2))
    first, second, _ = loop.pending
    await loop.decide(decision(first, "approve"))
    await loop.decide(decision(second, "edit", arguments={"to": "bob", "cents": 2}))
    await loop.send("HUMAN_REJECTED")
    assert loop.state == "done" and durable.bank.entered == []
    assert sorted(loop.rows.values()) == ["edited", "rejected", "rejected", "rejected"]


async def test_a_call_rejected_before_may_be_proposed_and_asked_anew(durable: Loops) -> None:
    loop = await durable.parked(pay(), script=[pay(), say()])
    (first,) = ids(loop)
    await loop.send("HUMAN_REJECTED")
    assert loop.state == "awaiting_human" and ids(loop) != [first]
    await loop.approve()
    assert len(durable.bank.paid) == 1


# --- call by call ------------------------------------------------------------------------------


async def test_calls_are_decided_one_by_one(durable: Loops) -> None:
    loop = await durable.parked(pay(), balance(), pay("bob", 1))
    first, second = loop.pending
    receipt = await loop.decide(decision(first, "approve"))
    assert receipt.status == "taken" and loop.state == "awaiting_human"
    assert loop.pending == [second] and durable.bank.entered == []
    await loop.decide(decision(second, "reject", reason="no"))
    assert loop.state == "done" and durable.bank.paid == [("pay", "ann", 500, "none")]
    assert loop.results == [
        "paid 500 to ann",
        "a1: 12 EUR",
        "not run: rejected by a reviewer: no",
    ]


async def test_all_calls_are_decided_at_once(durable: Loops) -> None:
    loop = await durable.parked(pay(), pay("bob", 1), pay("cy", 2))
    first, second, third = loop.pending
    await loop.decide(
        decision(first, "approve"),
        decision(second, "edit", arguments={"to": "bob", "cents": 3, "note": "less"}),
        decision(third, "reject"),
        by="eve",
    )
    assert loop.state == "done"
    assert durable.bank.paid == [("pay", "ann", 500, "none"), ("pay", "bob", 3, "less")]
    assert loop.results == [
        "paid 500 to ann",
        "(ran with arguments that a reviewer edited) paid 3 to bob",
        "not run: rejected by a reviewer",
    ]


async def test_an_approval_of_the_rest_completes_single_decisions(durable: Loops) -> None:
    loop = await durable.parked(pay(), pay("bob", 1))
    await loop.decide(decision(loop.pending[0], "approve"))
    receipt = await loop.approve()
    assert receipt.status == "taken" and len(durable.bank.paid) == 2


async def test_single_decisions_survive_a_restart(durable: Loops) -> None:
    loop = await durable.parked(pay(), pay("bob", 1))
    first, second = loop.pending
    await loop.decide(decision(first, "edit", arguments={"to": "ann", "cents": 1}))
    other = await durable.again(loop)
    assert other.pending == [second]
    await other.decide(decision(second, "approve"))
    assert [cents for _, _, cents, _ in durable.bank.paid] == [1, 1]


async def test_an_edit_keeps_the_models_call_in_the_conversation(durable: Loops) -> None:
    loop = await durable.parked(pay("ann", 500))
    (item,) = loop.pending
    await loop.decide(decision(item, "edit", arguments={"to": "ann", "cents": 5}))
    proposed = next(m for m in loop.context["messages"] if m.get("tool_calls"))
    assert proposed["tool_calls"][0]["arguments"] == {"to": "ann", "cents": 500}
    assert durable.bank.paid == [("pay", "ann", 5, "none")]
    assert sorted(loop.rows.values()) == ["done", "edited"]


@pytest.mark.parametrize(
    "arguments",
    [
        {"to": "ann", "cents": 0},
        {"to": "ann"},
        {"to": "ann", "cents": 1, "more": 1},
        {"to": "ann", "cents": "1"},
        {"to": "ann", "cents": 1.0},
        {"to": "ann", "cents": float("nan")},
    ],
)
async def test_a_bad_edit_is_refused_and_nothing_is_decided(durable: Loops, arguments: Any) -> None:
    loop = await durable.parked(pay(), pay("bob", 1))
    first, second = loop.pending
    receipt = await loop.decide(
        decision(second, "approve"), decision(first, "edit", arguments=arguments)
    )
    assert receipt.denied and "edit was refused" in receipt.reason
    assert loop.state == "awaiting_human" and set(loop.rows.values()) == {"proposed"}


@pytest.mark.parametrize(
    "decisions",
    [
        [],
        "approve",
        None,
        [7],
        [{"id": "a"}],
        [{"id": "a", "decision": "close"}],
        [{"id": "a", "decision": ["approve"]}],
        [{"id": "zz", "decision": "approve"}],
        [{"id": "a", "decision": "approve"}, {"id": "a", "decision": "reject"}],
        [{"id": "a", "decision": "edit"}],
        [{"id": "a", "decision": "approve", "arguments": {}}],
        [{"id": "a", "decision": "approve", "digest": "0" * 64}],
        [{"id": "a", "decision": "reject", "reason": 7}],
        [{"id": "a", "decision": "approve", "unknown": 1}],
    ],
)
async def test_malformed_decisions_are_denied(loops: Loops, decisions: Any) -> None:
    loop = await loops.parked(pay(id="a"))
    receipt = await loop.send({"type": "HUMAN_DECIDED", "decisions": decisions})
    assert receipt.denied and receipt.reason and loop.state == "awaiting_human"
    assert loop.rows == {"a": "proposed"}


async def test_a_reviewer_may_take_an_approval_back_while_others_are_open(durable: Loops) -> None:
    loop = await durable.parked(pay(), pay("bob", 1))
    first, second = loop.pending
    await loop.decide(decision(first, "approve"))
    await loop.decide(decision(first, "reject"), decision(second, "approve"))
    assert durable.bank.paid == [("pay", "bob", 1, "none")]


async def test_an_edit_may_be_turned_back_into_the_original(durable: Loops) -> None:
    loop = await durable.parked(pay(), pay("bob", 1))
    first, second = loop.pending
    await loop.decide(decision(first, "edit", arguments={"to": "ann", "cents": 1}))
    receipt = await loop.decide(decision(first, "approve"))
    assert receipt.denied and loop.state == "awaiting_human"  # not by accident
    await loop.decide(decision(first, "approve"), again=True)
    await loop.decide(decision(second, "reject"))
    assert durable.bank.paid == [("pay", "ann", 500, "none")]
    assert "edited" not in loop.results[0]


# --- time --------------------------------------------------------------------------------------


async def test_nobody_deciding_ends_as_human_timeout(durable: Loops) -> None:
    clock = SimulatedClock()
    loop = await durable.parked(pay(), balance(), clock=clock, human_timeout_s=HOUR)
    await loop.move(HOUR - 1)
    assert loop.state == "awaiting_human"
    await loop.move(2)
    assert loop.state == "error"
    assert loop.error == {"kind": "human_timeout", "message": "no human decision in time"}
    assert loop.results[0] == "not run: no human decision in time" and len(loop.results) == 2
    assert list(loop.rows.values()) == ["expired"] and durable.bank.entered == []


async def test_a_timeout_closes_what_was_approved_before(durable: Loops) -> None:
    clock = SimulatedClock()
    loop = await durable.parked(pay(), pay("bob", 1), clock=clock, human_timeout_s=HOUR)
    await loop.decide(decision(loop.pending[0], "approve"))
    await loop.move(HOUR + 1)
    assert loop.state == "error" and set(loop.rows.values()) == {"expired"}
    assert durable.bank.entered == []


async def test_a_late_decision_is_refused_and_the_timeout_fires(durable: Loops) -> None:
    """Nobody was running when the deadline passed."""
    loop = await durable.parked(clock=SimulatedClock(wall_start=0), human_timeout_s=HOUR)
    other = await durable.again(loop, clock=SimulatedClock(wall_start=2 * HOUR))
    assert other.state == "awaiting_human"
    receipt = await other.approve()
    assert receipt.denied and "too late" in receipt.reason
    assert other.state == "error" and other.error["kind"] == "human_timeout"
    assert list(other.rows.values()) == ["expired"] and durable.bank.entered == []


async def test_a_deadline_edited_in_the_snapshot_changes_nothing(durable: Loops) -> None:
    loop = await durable.parked(clock=SimulatedClock(wall_start=0), human_timeout_s=HOUR)
    saved = loop.saved()
    for timer in saved["timers"].values():
        timer["due_at"] = 10**13
    other = await durable.again(loop, snapshot=saved, clock=SimulatedClock(wall_start=2 * HOUR))
    assert (await other.approve()).denied
    assert other.state == "error" and durable.bank.entered == []


async def test_an_approval_is_good_for_its_time_only(durable: Loops) -> None:
    clock = SimulatedClock()
    loop = await durable.parked(pay(), pay("bob", 1), clock=clock, approval_ttl_s=60)
    first, second = loop.pending
    await loop.decide(decision(first, "approve"))
    await loop.move(120)
    await loop.decide(decision(second, "approve"))
    assert loop.error is not None and loop.error["kind"] == "tool_denied"
    assert "expired" in loop.error["message"]
    assert ("pay", "ann", 500, "none") not in durable.bank.paid


# --- new input ---------------------------------------------------------------------------------


async def test_new_input_supersedes_what_is_pending(durable: Loops) -> None:
    loop = await durable.parked(pay(), balance())
    old = approval_event(loop.pending)
    await loop.ask("never mind")
    assert loop.state == "done" and loop.context["task"] == "never mind"
    assert loop.results[0] == "not run: superseded by new input" and len(loop.results) == 2
    assert list(loop.rows.values()) == ["void"]
    assert (await loop.send(old)).status == "dropped" and durable.bank.entered == []


# --- from outside only -------------------------------------------------------------------------


async def test_an_approval_the_chart_raises_counts_for_nothing(durable: Loops) -> None:
    chart = load_chart()
    chart["states"]["awaiting_human"]["entry"] = {
        "type": "raiseApproval",
    }

    def raise_approval(scope: Any, context: Any, event: Any, action: Any) -> None:
        scope.raise_(approval_event(pending_approval(context)))

    loop = await _with_action(durable, chart, raise_approval)
    assert durable.bank.entered == [] and set(loop.rows.values()) <= {"proposed", "void"}


async def test_an_approval_the_chart_sends_itself_counts_for_nothing(durable: Loops) -> None:
    chart = load_chart()
    chart["states"]["awaiting_human"]["entry"] = {"type": "raiseApproval"}

    def send_approval(scope: Any, context: Any, event: Any, action: Any) -> None:
        scope.send(approval_event(pending_approval(context)))

    loop = await _with_action(durable, chart, send_approval)
    assert loop.state == "awaiting_human" and list(loop.rows.values()) == ["proposed"]
    assert durable.bank.entered == []


async def _with_action(loops: Loops, chart: Any, action: Any) -> Loop:
    from guardchart import Interpreter, MachineLogic, SyncInterpreter, create_machine

    machine, model = loops.machine([pay(), say()])
    logic = machine.logic.merge(MachineLogic(actions={"raiseApproval": action}))
    machine = create_machine(chart, logic)
    made: Any = Interpreter if loops.is_async else SyncInterpreter
    loop = Loop(loops.kind, machine, model, made(machine, scope="t", ledger=loops.ledger))
    loops.made.append(loop)
    loop.interp.start()
    await loop.ask()
    return loop


async def test_an_approval_a_child_sends_counts_for_nothing(durable: Loops) -> None:
    from guardchart import Interpreter, MachineLogic, SyncInterpreter, create_machine

    def tell(scope: Any, context: Any, event: Any, action: Any) -> None:
        scope.send_parent({"type": "HUMAN_APPROVED", "call_ids": ["c1"]})

    child = create_machine(
        {"id": "child", "initial": "a", "states": {"a": {"entry": "tell"}}},
        MachineLogic(actions={"tell": tell}),
    )
    chart = load_chart()
    chart["states"]["awaiting_human"]["invoke"] = {"id": "helper", "src": "helper"}
    machine, model = durable.machine([pay(id="c1"), say()])
    machine = create_machine(chart, machine.logic.merge(MachineLogic(services={"helper": child})))
    made: Any = Interpreter if durable.is_async else SyncInterpreter
    loop = Loop(durable.kind, machine, model, made(machine, scope="t", ledger=durable.ledger))
    durable.made.append(loop)
    loop.interp.start()
    await loop.ask()
    assert loop.state == "awaiting_human" and loop.rows == {"c1": "proposed"}
    assert durable.bank.entered == []


# --- tools that know of the protocol -----------------------------------------------------------


async def test_a_tool_may_take_its_idempotency_key(durable: Loops) -> None:
    keys: list[str] = []

    def charge(cents: int, key: IdempotencyKey) -> str:
        """Charge."""
        keys.append(key)
        return "charged"

    tools = durable.bank.registry(tool(charge, side_effect=True))
    loop = await durable.parked({"tool": "charge", "args": {"cents": 1}}, tools=tools)
    assert loop.pending[0]["arguments"] == {"cents": 1}
    await loop.approve()
    assert loop.state == "done" and len(keys) == 1 and keys[0]


async def test_a_request_that_was_not_sent_is_tried_again(durable: Loops) -> None:
    tries: list[int] = []

    def flaky(n: int) -> str:
        """Connect at the third try."""
        tries.append(n)
        if len(tries) < 3:
            raise NotSentError("no connection")
        return "sent"

    tools = durable.bank.registry(tool(flaky, side_effect=True))
    loop = await durable.parked({"tool": "flaky", "args": {"n": 1}}, tools=tools)
    await loop.approve()
    assert len(tries) == 3 and loop.results == ["sent"] and list(loop.rows.values()) == ["done"]


async def test_a_request_that_is_never_sent_is_given_up(durable: Loops) -> None:
    tries: list[int] = []

    def down(n: int) -> str:
        """Never connect."""
        tries.append(n)
        raise NotSentError("no connection")

    tools = durable.bank.registry(tool(down, side_effect=True))
    loop = await durable.parked(
        {"tool": "down", "args": {"n": 1}}, tools=tools, retry=RetryPolicy(delay_s=0)
    )
    await loop.approve()
    assert 1 < len(tries) <= 4 and loop.state == "done"
    assert list(loop.rows.values()) == ["failed"] and loop.results[0].startswith("error: NotSent")
