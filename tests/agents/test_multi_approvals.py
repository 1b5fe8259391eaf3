"""Approvals in a tree of agents: who is asked, who is answered, and by which host."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from guardchart import MachineLogic, SimulatedClock, create_machine
from guardchart.agents import (
    FakeModel,
    agent_logic,
    approval_event,
    decisions_event,
    load_chart,
    pending_approval,
    run_agent,
    run_agent_sync,
    spawn_agent,
)
from guardchart.errors import AgentConfigError, NotSupportedError, SnapshotError
from guardchart.persistence import (
    DueTimerScanner,
    InMemoryLedger,
    MemoryStore,
    SQLiteLedger,
    SQLiteStore,
)
from tests.agents.trees import Desk, Till, pays, supervisor_chart

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


def test_a_sync_run_refuses_agents_with_an_async_model_before_anything_starts() -> None:
    desk = Desk("async", BOTH)
    with pytest.raises(NotSupportedError, match="'callModel' is async"):
        run_agent_sync(desk.machine, event={"type": "PLAN", "tasks": ["pay ann"]})


async def test_a_decision_that_nobody_waits_for_is_denied(desks: Any) -> None:
    desk = desks(BOTH)
    await desk.start()
    await desk.plan("pay ann", "pay bob")
    shown = desk.pending
    both = [{"id": each["id"], "decision": "approve"} for each in shown]
    for event in (
        {"type": "HUMAN_APPROVED", "call_ids": ["another"]},
        {"type": "HUMAN_APPROVED", "call_ids": []},
        {"type": "HUMAN_APPROVED"},
        {"type": "HUMAN_APPROVED", "call_ids": [1, None]},
        {"type": "HUMAN_APPROVED", "call_ids": [each["id"] for each in shown]},
        decisions_event(both),
        {"type": "HUMAN_DECIDED", "decisions": ["zz", {}]},
    ):
        receipt = await desk.send(event)
        assert receipt.denied and receipt.reason
    assert desk.till.paid == [] and desk.pending == shown


async def test_a_chart_with_approvals_of_its_own_still_gets_them(engine: str) -> None:
    desk = Desk(engine, BOTH)
    chart = supervisor_chart("pay", "search")
    chart["on"] = {"HUMAN_APPROVED": {"actions": "hear"}}
    heard: list[Any] = []
    hear = MachineLogic(actions={"hear": lambda i, c, e, a: heard.append(e.payload)})
    desk.machine = create_machine(chart, desk.machine.logic.merge(hear))
    await desk.start()
    await desk.plan("pay ann", "pay bob")
    assert (await desk.send("HUMAN_APPROVED", call_ids=["of the chart"])).status == "taken"
    assert heard == [{"call_ids": ["of the chart"]}] and desk.till.paid == []
    await desk.send(approval_event(desk.pending[:1]))
    assert desk.till.paid == [("ann", 1)] and len(heard) == 1
    desk.stop()


def _loop_with_clerks(engine: str, till: Till) -> Any:
    """A tool loop of its own that spawns clerks on ASK."""
    is_async = engine == "async"
    chart = load_chart()
    chart["on"] = {"ASK": {"actions": "spawnClerk"}, "AGENT_DONE": {"actions": "hear"}}
    chart["meta"] = {"tools": ["pay", "search"]}
    chart["context"]["heard"] = []
    own = FakeModel([pays("own", 1, id="c1"), {"text": "Own."}], is_async=is_async)
    below = FakeModel([pays("below", 2, id="c1"), {"text": "Below."}], is_async=is_async)
    hear = MachineLogic(
        actions={"hear": lambda c, e: {"heard": [*c["heard"], e.payload["result"]]}}
    )
    clerk = spawn_agent(None, below, till.registry(), budget={"max_turns": 3}, name="clerk")
    return create_machine(chart, agent_logic(own, till.registry()).merge(clerk, hear))


async def test_a_loop_that_asks_and_has_an_agent_that_asks(engine: str) -> None:
    till = Till()
    desk = Desk(engine, {}, till=till)
    desk.machine = _loop_with_clerks(engine, till)
    live = await desk.start()
    await desk.send("START", prompt="go")
    await desk.send("ASK", task="go, too")
    own, below = desk.pending
    assert "agent_id" not in own and below["agent_id"] == "toolLoop:clerk-1"
    assert own["id"] == "c1" and below["id"] == "c1-2" and below["tool_call_id"] == "c1"
    receipt = await desk.send("HUMAN_APPROVED", agent_id=below["agent_id"], call_ids=[own["id"]])
    assert receipt.denied and till.paid == []
    receipt = await desk.send("HUMAN_APPROVED", agent_id="toolLoop", call_ids=[below["id"]])
    assert receipt.denied and till.paid == []
    await desk.send(approval_event([below]))
    assert till.paid == [("below", 2)] and live.context["heard"] == ["Below."]
    await desk.send("HUMAN_REJECTED")  # without a name it is for the machine it is sent to
    assert till.paid == [("below", 2)] and live.context["result"] == "Own."
    desk.stop()


async def test_a_rejection_without_a_name_is_for_the_machine_it_is_sent_to(engine: str) -> None:
    till = Till()
    desk = Desk(engine, {}, till=till)
    desk.machine = _loop_with_clerks(engine, till)
    await desk.start()
    await desk.send("START", prompt="go")
    await desk.send("ASK", task="go, too")
    own, below = desk.pending
    await desk.send("HUMAN_REJECTED", reason="no")
    rows = [desk.ledger.row("desk-1", each["id"]) for each in (own, below)]
    assert [(row.status, row.reason) for row in rows] == [("rejected", "no"), ("proposed", None)]
    assert desk.context["result"] == "Own." and desk.pending == [] and till.paid == []
    desk.stop()


# --- deadlines ---------------------------------------------------------------------------------


async def test_a_worker_that_nobody_answers_in_time_fails_alone(desks: Any) -> None:
    clock = SimulatedClock()
    desk = desks(BOTH, human_timeout_s=60)
    live = await desk.start(clock=clock)
    await desk.plan("pay ann", "pay bob")
    ann, bob = desk.pending
    await desk.send(approval_event([bob]))
    moved = clock.increment(61_000)
    if moved is not None:
        await moved
    await desk.rest()
    assert desk.context["failures"] == [
        {"kind": "human_timeout", "message": "no human decision in time"}
    ]
    assert desk.till.paid == [("bob", 2)] and desk.state == "reporting" and not live.actors
    assert (await desk.send(approval_event([ann]))).status != "taken"
    assert desk.till.paid == [("bob", 2)]


# --- durable runs ------------------------------------------------------------------------------


@pytest.fixture(params=["memory", "sqlite"])
def store(request: pytest.FixtureRequest, tmp_path: Any) -> Iterator[Any]:
    if request.param == "memory":
        yield MemoryStore()
        return
    made = SQLiteStore(tmp_path / "runs.db")
    yield made
    made.disconnect()


def _stored(desk: Desk, store: Any, **given: Any) -> Any:
    given = {"key": "desk-1", "store": store, **given}
    if desk.is_async:
        return asyncio.run(run_agent(desk.machine, **given))
    return run_agent_sync(desk.machine, **given)


def test_a_stored_tree_is_approved_by_another_run(desks: Any, store: Any) -> None:
    first = desks(BOTH)
    res = _stored(first, store, event={"type": "PLAN", "tasks": ["pay ann", "pay bob"]})
    assert res.waiting and first.till.paid == []
    after = {"pay ann": [{"text": "Ann is paid."}], "pay bob": [{"text": "Bob is paid."}]}
    second = desks(after)
    looked = _stored(second, store)
    assert looked.waiting and pending_approval(looked) == pending_approval(res)
    res = _stored(second, store, approve=pending_approval(looked)[:1])
    assert res.waiting and second.till.paid == [("ann", 1)]
    res = _stored(second, store, approve=True)
    assert res.final_state == "supervisor.reporting"
    assert second.till.paid == [("ann", 1), ("bob", 2)]
    assert res.context["results"] == ["Ann is paid.", "Bob is paid."]


def test_a_scanner_keeps_the_deadlines_of_stored_workers(desks: Any, store: Any) -> None:
    desk = desks(BOTH, human_timeout_s=60)
    res = _stored(desk, store, event={"type": "PLAN", "tasks": ["pay ann", "pay bob"]})
    assert res.waiting
    scanner = DueTimerScanner(store, lambda key: desk.machine)
    scan = scanner.run_once(now=store.load("desk-1").updated_at + 3_600_000)
    assert scan.errors == {} and scan.delivered
    saved = store.load("desk-1").snapshot
    assert saved["value"] == "reporting" and desk.till.paid == []
    assert [each["kind"] for each in saved["context"]["failures"]] == ["human_timeout"] * 2


async def test_a_tree_on_a_ledger_in_a_file_is_approved_call_by_call(
    desks: Any, tmp_path: Any
) -> None:
    ledger = SQLiteLedger(tmp_path / "ledger.db")
    till = Till()
    desk = desks(BOTH, ledger=ledger, till=till)
    live = await desk.start()
    await desk.plan("pay ann", "pay bob")
    saved, shown = json.loads(live.get_snapshot()), desk.pending
    for each in shown:
        assert (await desk.send(approval_event([each]))).status == "taken"
    assert sorted(till.paid) == [("ann", 1), ("bob", 2)] and desk.state == "reporting"
    fork = desks(BOTH, ledger=ledger, till=till)
    await fork.start(saved)
    await fork.send(approval_event(shown[:1]))
    assert sorted(till.paid) == [("ann", 1), ("bob", 2)]
    fork.stop()
    ledger.disconnect()


def test_eight_people_approve_one_worker_at_once_and_it_pays_once(tmp_path: Any) -> None:
    ledger, till = SQLiteLedger(tmp_path / "ledger.db"), Till()
    desk = Desk("sync", BOTH, ledger=ledger, till=till)
    res = run_agent_sync(
        desk.machine, event={"type": "PLAN", "tasks": ["pay ann"]}, key="desk-1", ledger=ledger
    )
    shown = pending_approval(res)

    def approve(_: int) -> Any:
        other = Desk("sync", {"pay ann": [{"text": "Paid."}] * 2}, ledger=ledger, till=till)
        return run_agent_sync(
            other.machine,
            snapshot=res.snapshot,
            trusted=True,
            approve=shown,
            key="desk-1",
            ledger=ledger,
        )

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(approve, range(8)))
    assert till.paid == [("ann", 1)]
    assert {each.final_state for each in results} == {"supervisor.reporting"}
    ledger.disconnect()
