"""Approvals in a tree of agents: who is asked, who is answered, and by which host."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from guardchart.agents import (
    approval_event,
    decisions_event,
    pending_approval,
    run_agent,
    run_agent_sync,
)
from guardchart.errors import AgentConfigError, SnapshotError
from guardchart.persistence import InMemoryLedger
from tests.agents.trees import Desk, Till, pays

BOTH = {
    "pay ann": [pays("ann", 1, id="c1"), {"text": "Ann is paid."}],
    "pay bob": [pays("bob", 2, id="c1"), {"text": "Bob is paid."}],
}
SAME = {task: [pays("ann", 1, id="c1"), {"text": f"{task} is done."}] for task in ("one", "two")}


@pytest.fixture
def desks(engine: str) -> Iterator[Any]:
    made: list[Desk] = []

    def make(scripts: Any, **options: Any) -> Desk:
        made.append(Desk(engine, scripts, **options))
        return made[-1]

    yield make
    for each in made:
        each.stop()


async def test_a_supervisor_whose_worker_waits_for_approval_can_be_approved(desks: Any) -> None:
    desk = desks(BOTH)
    await desk.start()
    await desk.plan("pay ann", "pay bob")
    assert desk.till.paid == [] and desk.state.endswith("workers.working")
    ann, bob = desk.pending
    assert set(ann) == {"agent_id", "id", "tool_call_id", "name", "arguments", "digest"}
    assert [ann["agent_id"], bob["agent_id"]] == ["supervisor:worker-1", "supervisor:worker-2"]
    assert [ann["arguments"]["to"], bob["arguments"]["to"]] == ["ann", "bob"]
    receipt = await desk.send(approval_event([bob]))
    assert receipt.status == "taken" and desk.till.paid == [("bob", 2)]
    assert desk.pending == [ann] and desk.context["results"] == ["Bob is paid."]
    receipt = await desk.send("HUMAN_APPROVED", agent_id=ann["agent_id"], call_ids=[ann["id"]])
    assert receipt.status == "taken" and desk.till.paid == [("bob", 2), ("ann", 1)]
    assert desk.state == "reporting" and desk.pending == []


async def test_an_approval_by_ids_alone_finds_the_agent_that_shows_them(desks: Any) -> None:
    desk = desks(BOTH)
    await desk.start()
    await desk.plan("pay ann", "pay bob")
    shown = desk.pending
    assert {each["tool_call_id"] for each in shown} == {"c1"}
    assert {each["id"] for each in shown} == {"c1", "c1-2"}
    (other,) = [each for each in shown if each["id"] != "c1"]
    assert (await desk.send("HUMAN_APPROVED", call_ids=[other["id"]])).status == "taken"
    assert desk.till.paid == [tuple(other["arguments"].values())]


async def test_one_agents_approval_does_not_count_for_another_with_the_same_call(
    desks: Any,
) -> None:
    desk = desks(SAME)
    await desk.start()
    await desk.plan("one", "two")
    # Who proposed first, and has the provider's id for its row, is a matter of chance.
    first, second = sorted(desk.pending, key=lambda each: each["id"] != "c1")
    assert first["digest"] == second["digest"] and first["arguments"] == second["arguments"]
    for wrong in (first["id"], first["tool_call_id"]):
        receipt = await desk.send("HUMAN_APPROVED", agent_id=second["agent_id"], call_ids=[wrong])
        assert receipt.denied and "not pending" in receipt.reason and desk.till.paid == []
    await desk.send(approval_event([first]))
    assert desk.till.paid == [("ann", 1)] and desk.pending == [second]
    assert (await desk.send(approval_event([first]))).status != "taken"
    assert desk.till.paid == [("ann", 1)]


async def test_a_decision_sent_to_an_agent_under_another_name_is_denied(desks: Any) -> None:
    desk = desks(SAME)
    live = await desk.start()
    await desk.plan("one", "two")
    first, second = desk.pending
    actor = live.actors[second["agent_id"]]
    event = {**approval_event([second]), "agent_id": first["agent_id"]}
    receipt = actor.send(event) if not desk.is_async else await actor.send(event, wait=True)
    assert receipt.denied and "another agent" in receipt.reason and desk.till.paid == []


@pytest.mark.parametrize("named", ["supervisor:worker-9", "worker-1", "SUPERVISOR:worker-1", 7])
async def test_a_decision_for_an_agent_that_does_not_exist_is_denied(
    desks: Any, named: Any
) -> None:
    desk = desks(BOTH)
    await desk.start()
    await desk.plan("pay ann", "pay bob")
    shown = desk.pending
    receipt = await desk.send({**approval_event(shown[:1]), "agent_id": named})
    assert receipt.denied and receipt.reason == "no agent of this name is running"
    assert desk.till.paid == [] and desk.pending == shown


async def test_a_rejection_has_to_say_whose_calls_where_several_wait(desks: Any) -> None:
    desk = desks(BOTH)
    await desk.start()
    await desk.plan("pay ann", "pay bob")
    receipt = await desk.send("HUMAN_REJECTED", reason="no")
    assert receipt.denied and "agent_id" in receipt.reason and len(desk.pending) == 2
    await desk.send("HUMAN_REJECTED", agent_id="supervisor:worker-1", reason="no")
    assert [each["agent_id"] for each in desk.pending] == ["supervisor:worker-2"]
    await desk.send("HUMAN_REJECTED", reason="no")
    assert desk.pending == [] and desk.till.paid == [] and desk.state == "reporting"


async def test_calls_of_an_agent_are_edited_and_decided_one_by_one(desks: Any) -> None:
    desk = desks({"both": [{"tool_calls": [pays("ann", 1), pays("bob", 2)]}, {"text": "Done."}]})
    await desk.start()
    await desk.plan("both")
    ann, bob = desk.pending
    edit = {"id": ann["id"], "decision": "edit", "arguments": {"to": "ann", "cents": 7}}
    await desk.send(decisions_event([edit], agent_id=ann["agent_id"]))
    assert desk.pending == [bob] and desk.till.paid == []
    await desk.send(decisions_event([{"id": bob["id"], "decision": "reject"}]))
    assert desk.till.paid == [("ann", 7)] and desk.context["results"] == ["Done."]


async def test_a_child_cannot_approve_its_sibling(desks: Any) -> None:
    desk = desks(BOTH)
    live = await desk.start()
    await desk.plan("pay ann", "pay bob")
    shown = desk.pending
    for event in (approval_event(shown[:1]), approval_event(shown[1:])):
        live.post(event)
        live.actors[event["agent_id"]].post(event)
    await desk.rest()
    assert desk.till.paid == [] and desk.pending == shown


async def test_a_tree_saved_and_restored_elsewhere_is_approved_there(desks: Any) -> None:
    till, ledger = Till(), InMemoryLedger()
    first = desks(BOTH, till=till, ledger=ledger)
    live = await first.start()
    await first.plan("pay ann", "pay bob")
    saved, shown = json.loads(live.get_snapshot()), first.pending
    live.stop()
    assert pending_approval(saved) == shown
    assert pending_approval(saved["context"]) == []  # of the supervisor alone
    after = {"pay ann": [{"text": "Ann is paid."}], "pay bob": [{"text": "Bob is paid."}]}
    second = desks(after, till=till, ledger=ledger)
    await second.start(saved)
    assert second.pending == shown
    for each in shown:
        assert (await second.send(approval_event([each]))).status == "taken"
    assert till.paid == [("ann", 1), ("bob", 2)] and second.state == "reporting"
    assert sorted(second.context["results"]) == ["Ann is paid.", "Bob is paid."]
    # The same approval on a fork of the first snapshot enters nothing again.
    fork = desks(after, till=till, ledger=ledger)
    await fork.start(saved)
    await fork.send(approval_event(shown[:1]))
    assert till.paid == [("ann", 1), ("bob", 2)]


async def test_arguments_edited_in_the_saved_snapshot_of_an_agent_do_not_run(desks: Any) -> None:
    till, ledger = Till(), InMemoryLedger()
    first = desks(BOTH, till=till, ledger=ledger)
    live = await first.start()
    await first.plan("pay ann", "pay bob")
    saved, shown = json.loads(live.get_snapshot()), first.pending
    worker = saved["children"]["worker-1"]["snapshot"]
    worker["context"]["pending_tool_calls"][0]["arguments"]["cents"] = 99_999
    forged = desks(BOTH, till=till, ledger=ledger)
    await forged.start(saved)
    receipt = await forged.send(approval_event(shown[:1]))
    assert receipt.denied and till.paid == []
    assert forged.context["failures"][0]["kind"] == "tampered"


async def test_an_approval_event_is_for_one_agent(desks: Any) -> None:
    desk = desks(BOTH)
    await desk.start()
    await desk.plan("pay ann", "pay bob")
    with pytest.raises(AgentConfigError, match="several agents"):
        approval_event(desk.pending)


async def test_the_context_of_a_tree_is_read_only_and_stays_a_dict(desks: Any) -> None:
    desk = desks(BOTH)
    live = await desk.start()
    await desk.plan("pay ann", "pay bob")
    context = live.context
    assert json.loads(json.dumps(context))["outstanding"] == 2
    assert context.actors["supervisor:worker-1"]["task"] == "pay ann"
    for change in (
        lambda: context.update(outstanding=0),
        lambda: context.__setitem__("outstanding", 0),
        lambda: context.pop("outstanding"),
        lambda: context.clear(),
    ):
        with pytest.raises(TypeError, match="not in place"):
            change()
    assert live.context["outstanding"] == 2


# --- run_agent ---------------------------------------------------------------------------------


def _run(desk: Desk, **given: Any) -> Any:
    given = {"key": "desk-1", "ledger": desk.ledger, **given}
    if desk.is_async:
        return asyncio.run(run_agent(desk.machine, **given))
    return run_agent_sync(desk.machine, **given)


@pytest.mark.parametrize("how", ["shown", "all"])
def test_run_agent_rests_where_a_worker_waits_and_approves_it(desks: Any, how: str) -> None:
    desk = desks(BOTH)
    res = _run(desk, event={"type": "PLAN", "tasks": ["pay ann", "pay bob"]})
    assert res.status == "idle" and res.waiting and desk.till.paid == []
    shown = pending_approval(res)
    assert shown == pending_approval(res.context) == pending_approval(res.snapshot)
    assert [each["arguments"]["to"] for each in shown] == ["ann", "bob"]
    snapshot = json.loads(json.dumps(res.snapshot))
    res = _run(desk, snapshot=snapshot, trusted=True, approve=shown if how == "shown" else True)
    assert res.final_state == "supervisor.reporting" and res.ignored is None
    assert sorted(desk.till.paid) == [("ann", 1), ("bob", 2)]
    assert sorted(res.context["results"]) == ["Ann is paid.", "Bob is paid."]


def test_run_agent_approves_one_worker_and_rejects_the_rest(desks: Any) -> None:
    desk = desks(BOTH)
    res = _run(desk, event={"type": "PLAN", "tasks": ["pay ann", "pay bob"]})
    shown = pending_approval(res)
    res = _run(desk, snapshot=res.snapshot, trusted=True, approve=shown[1:])
    assert res.waiting and desk.till.paid == [("bob", 2)]
    assert pending_approval(res) == shown[:1]
    res = _run(desk, snapshot=res.snapshot, trusted=True, approve=False)
    assert not res.waiting and desk.till.paid == [("bob", 2)]
    assert res.final_state == "supervisor.reporting"


def test_run_agent_says_that_an_approval_came_for_nobody(desks: Any) -> None:
    desk = desks(BOTH)
    res = _run(desk, event={"type": "PLAN", "tasks": ["pay ann", "pay bob"]})
    wrong = [{**pending_approval(res)[0], "agent_id": "supervisor:worker-9"}]
    res = _run(desk, snapshot=res.snapshot, trusted=True, approve=wrong)
    assert res.ignored is not None and res.waiting and desk.till.paid == []


def test_a_tree_loads_from_a_snapshot_of_ones_own_only(desks: Any) -> None:
    desk = desks(BOTH)
    res = _run(desk, event={"type": "PLAN", "tasks": ["pay ann"]})
    with pytest.raises(SnapshotError, match="trusted"):
        _run(desk, snapshot=res.snapshot, approve=True)
    assert desk.till.paid == []
