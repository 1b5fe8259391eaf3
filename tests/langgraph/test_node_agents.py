"""A supervisor as a LangGraph node: its workers park, and are approved by a later call."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.graph import END
from langgraph.types import Command

from guardchart import MachineLogic, create_machine
from guardchart.agents import (
    FakeModel,
    RetryPolicy,
    agent_logic,
    approval_event,
    load_chart,
    pending_approval,
    spawn_agent,
)
from guardchart.errors import AgentConfigError
from guardchart.gate import Seal, sign_decision
from guardchart.langgraph import ledger_for, route_by_statechart, statechart_node
from tests.agents.loops import Bank, pay
from tests.agents.trees import Desk, Till, pays, supervisor_chart, supervisor_logic
from tests.langgraph.graphs import compiled, from_event, thread

SEAL = Seal("a key of sixteen letters or more")
BOTH = {
    "pay ann": [pays("ann", 1), {"text": "Ann is paid."}],
    "pay bob": [pays("bob", 2), {"text": "Bob is paid."}],
}
PLAN = {"type": "PLAN", "tasks": ["pay ann", "pay bob"]}


def node(desk: Desk, **options: Any) -> Any:
    options = {"event_from_state": from_event, "event_key": "event", "seal": SEAL, **options}
    return statechart_node(desk.machine, **options)


def invoke(app: Any, given: Any, is_async: bool, name: str = "t1") -> Any:
    if is_async:
        return asyncio.run(app.ainvoke(given, thread(name)))
    return app.invoke(given, thread(name))


@pytest.fixture(params=["sync model", "async model"])
def desk(request: pytest.FixtureRequest) -> Desk:
    return Desk(str(request.param).partition(" ")[0], BOTH)


@pytest.fixture(params=[False, True], ids=["invoke", "ainvoke"])
def is_async(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def test_a_worker_parked_in_a_node_is_approved_by_a_later_call(desk: Desk, is_async: bool) -> None:
    app = compiled(node(desk))
    out = invoke(app, {"event": PLAN}, is_async)
    assert desk.till.paid == [] and out["xsm"]["status"] == "active"
    ann, bob = pending_approval(out["xsm"])
    assert [ann["agent_id"], bob["agent_id"]] == ["supervisor:worker-1", "supervisor:worker-2"]
    out = invoke(app, {"event": approval_event([bob])}, is_async)
    assert out["xsm"]["receipt"]["status"] == "taken" and desk.till.paid == [("bob", 2)]
    assert pending_approval(out["xsm"]) == [ann]
    by_hand = {"type": "HUMAN_APPROVED", "agent_id": ann["agent_id"], "call_ids": [ann["id"]]}
    out = invoke(app, {"event": by_hand}, is_async)
    assert desk.till.paid == [("bob", 2), ("ann", 1)]
    assert out["xsm"]["state_ids"] == ["supervisor.reporting"]
    assert out["xsm"]["context"]["results"] == ["Bob is paid.", "Ann is paid."]


def test_an_approval_of_the_wrong_worker_is_denied_and_said_so(desk: Desk, is_async: bool) -> None:
    app = compiled(node(desk))
    out = invoke(app, {"event": PLAN}, is_async)
    shown = pending_approval(out["xsm"])
    wrong = {**approval_event(shown[:1]), "agent_id": shown[1]["agent_id"]}
    out = invoke(app, {"event": wrong}, is_async)
    assert out["xsm"]["receipt"]["denied"] and "not pending" in out["xsm"]["receipt"]["reason"]
    assert desk.till.paid == [] and pending_approval(out["xsm"]) == shown


def test_going_back_to_before_an_approval_and_giving_it_again_pays_once(desk: Desk) -> None:
    app = compiled(node(desk))
    out = invoke(app, {"event": PLAN}, False)
    parked = next(iter(app.get_state_history(thread()))).config
    yes = approval_event(pending_approval(out["xsm"])[:1])
    app.invoke({"event": yes}, thread())
    app.invoke({"event": yes}, parked)
    assert desk.till.paid == [("ann", 1)]


def test_an_interrupt_asks_for_the_calls_of_the_whole_tree(desk: Desk, is_async: bool) -> None:
    router = route_by_statechart(desk.machine, {"working": "agent"}, default=END)
    app = compiled(node(desk, on_wait="interrupt"), router=router)
    out = invoke(app, {"event": PLAN}, is_async)
    (asked,) = out["__interrupt__"]
    shown = asked.value["pending"]
    assert [each["agent_id"] for each in shown] == ["supervisor:worker-1", "supervisor:worker-2"]
    out = invoke(app, Command(resume=approval_event(shown[:1])), is_async)
    (asked,) = out["__interrupt__"]
    assert asked.value["pending"] == shown[1:] and desk.till.paid == [("ann", 1)]
    out = invoke(app, Command(resume=approval_event(shown[1:])), is_async)
    assert desk.till.paid == [("ann", 1), ("bob", 2)] and "__interrupt__" not in out
    assert out["xsm"]["state_ids"] == ["supervisor.reporting"]


def test_result_to_state_sees_what_the_tree_asks(desk: Desk, is_async: bool) -> None:
    ask = node(desk, result_to_state=lambda view, state: {"answer": pending_approval(view.context)})
    out = invoke(compiled(ask), {"event": PLAN}, is_async)
    assert [each["arguments"]["to"] for each in out["answer"]] == ["ann", "bob"]


def test_workers_that_may_wait_for_a_person_need_a_seal(desk: Desk) -> None:
    with pytest.raises(AgentConfigError, match="pass seal="):
        node(desk, seal=None)


def test_workers_without_side_effects_need_no_seal(is_async: bool) -> None:
    model = FakeModel([{"text": "A"}, {"text": "B"}], is_async=is_async)
    worker = spawn_agent(None, model, budget={"max_turns": 2}, name="worker")
    machine = create_machine(supervisor_chart(), supervisor_logic(worker))
    app = compiled(statechart_node(machine, event_from_state=from_event))
    out = invoke(app, {"event": PLAN}, is_async)
    assert sorted(out["xsm"]["context"]["results"]) == ["A", "B"]


def test_a_retry_delay_of_a_worker_that_the_node_does_not_wait_for_is_refused() -> None:
    desk = Desk("sync", BOTH, retry=RetryPolicy(delay_s=50))
    with pytest.raises(AgentConfigError, match="retry delay"):
        node(desk)


def test_a_transient_error_of_a_workers_model_strands_nothing(is_async: bool) -> None:
    scripts = {"pay ann": [RuntimeError("busy"), {"text": "Ann."}], "pay bob": [{"text": "Bob."}]}
    desk = Desk("sync", scripts, retry=RetryPolicy(delay_s=0.01))
    out = invoke(compiled(node(desk)), {"event": PLAN}, is_async)
    assert sorted(out["xsm"]["context"]["results"]) == ["Ann.", "Bob."]


def test_a_worker_edited_in_the_state_runs_nothing(desk: Desk) -> None:
    app = compiled(node(desk))
    out = invoke(app, {"event": PLAN}, False)
    yes = approval_event(pending_approval(out["xsm"])[:1])
    forged = json.loads(json.dumps(out["xsm"]))
    worker = forged["children"]["worker-1"]["snapshot"]["context"]
    worker["pending_tool_calls"][0]["arguments"]["cents"] = 99_999
    app.update_state(thread(), {"xsm": forged})
    with pytest.raises(Exception, match="seal"):
        app.invoke({"event": yes}, thread())
    assert desk.till.paid == []


def test_a_signed_approval_of_a_worker_counts_and_an_unsigned_one_does_not(desk: Desk) -> None:
    app = compiled(node(desk, signed_approvals=True))
    out = invoke(app, {"event": PLAN}, False)
    yes = approval_event(pending_approval(out["xsm"])[:1])
    out = invoke(app, {"event": yes}, False)
    assert out["xsm"]["receipt"]["denied"] and desk.till.paid == []
    invoke(app, {"event": sign_decision(SEAL, yes, "t1")}, False)
    assert desk.till.paid == [("ann", 1)]


OTHER_PROCESS = """
import json, sys
sys.path[:0] = json.loads(sys.argv[2])
from tests.langgraph.test_node_agents import other_process
other_process(sys.argv[1])
"""


def _app(file: str, scripts: dict[str, list[Any]]) -> tuple[Any, Any, Desk]:
    opened = SqliteSaver.from_conn_string(file)
    saver = opened.__enter__()
    desk = Desk("sync", scripts, till=Till())
    return compiled(node(desk, ledger=ledger_for(saver)), saver=saver), opened, desk


def other_process(file: str) -> None:
    """Approve whatever waits; only the checkpointer's file says what that is."""
    after = {"pay ann": [{"text": "Ann is paid."}], "pay bob": [{"text": "Bob is paid."}]}
    app, opened, desk = _app(file, after)
    state = app.get_state(thread()).values
    for each in pending_approval(state["xsm"]):
        state = app.invoke({"event": approval_event([each])}, thread())
    opened.__exit__(None, None, None)
    print(json.dumps([desk.till.paid, state["xsm"]["context"]["results"]]))


def test_another_process_approves_the_workers_through_the_checkpointer(tmp_path: Path) -> None:
    file = str(tmp_path / "threads.db")
    app, opened, desk = _app(file, BOTH)
    app.invoke({"event": PLAN}, thread())
    assert desk.till.paid == []
    opened.__exit__(None, None, None)
    done = subprocess.run(
        [sys.executable, "-c", OTHER_PROCESS, file, json.dumps(sys.path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    paid, results = json.loads(done.stdout)
    assert paid == [["ann", 1], ["bob", 2]] and results == ["Ann is paid.", "Bob is paid."]


def test_each_visit_is_saved_by_any_checkpointer_as_plain_json(desk: Desk) -> None:
    saver = InMemorySaver()
    app = compiled(node(desk), saver=saver)
    out = invoke(app, {"event": PLAN}, False)
    assert json.loads(json.dumps(out["xsm"])) == out["xsm"]


@pytest.mark.parametrize("is_async", [False, True], ids=["invoke", "ainvoke"])
def test_an_invoked_worker_goes_on_where_it_stood_without_a_seal_r5(is_async: bool) -> None:
    bank = Bank()
    model = FakeModel([pay(), {"text": "Paid."}], is_async=is_async)
    worker = create_machine(load_chart(), agent_logic(model, bank.registry()))
    chart = {
        "id": "boss",
        "initial": "work",
        "states": {
            "work": {"invoke": {"src": "worker", "id": "w", "input": "pay ann", "onDone": "end"}},
            "end": {"type": "final"},
        },
    }
    machine = create_machine(chart, MachineLogic(services={"worker": worker}))
    app = compiled(statechart_node(machine, event_from_state=from_event, event_key="event"))
    out = invoke(app, {"event": {"type": "GO"}}, is_async)
    (asked,) = pending_approval(out["xsm"])
    assert asked["agent_id"] == "boss:w" and bank.paid == []
    out = invoke(app, {"event": approval_event([asked])}, is_async)
    assert out["xsm"]["state_ids"] == ["boss.end"] and len(bank.paid) == 1
    assert len(model.calls) == 2
