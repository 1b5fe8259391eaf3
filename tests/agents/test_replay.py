"""The event log: rebuilt without a model, forked, and honest about a chart that changed."""

from __future__ import annotations

import copy
import json
from typing import Any, NamedTuple

import pytest

from guardchart import Event, MachineLogic, create_machine
from guardchart.agents import (
    BudgetPlugin,
    FakeModel,
    agent_logic,
    approval_event,
    execute_agent_request_sync,
    fork,
    initial_agent_step,
    load_chart,
    pending_approval,
    replay,
    resolve_agent_step,
    transition_agent_step,
)
from guardchart.errors import ReplayDivergedError
from guardchart.kernel import dump
from guardchart.persistence import InMemoryLedger
from tests.agents.loops import AT_ONCE, Bank, allowing, balance, pay, say, turn
from tests.agents.stepping import START, Stepped
from tests.agents.test_steps import SCENARIOS, _machine, _stepped, _supervised


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_replayed_log_gives_the_snapshot_and_calls_neither_model_nor_tool_p11(name: str) -> None:
    stepped, bank, model = _stepped(name)
    calls, entered = len(model.calls), list(bank.entered)
    options = SCENARIOS[name][2]
    other, unused = _machine([], options, Bank())
    assert dump(replay(other, stepped.log)) == dump(stepped.step.snapshot)
    assert replay(stepped.machine, stepped.log) == stepped.step.snapshot
    assert len(model.calls) == calls and bank.entered == entered and not unused.calls


@pytest.mark.parametrize("name", ["approved", "edited", "model fails"])
def test_a_log_replayed_up_to_each_entry_gives_the_snapshot_of_that_step_p11(name: str) -> None:
    stepped, _, _ = _stepped(name)
    for index, entry in enumerate(stepped.log):
        reached = replay(stepped.machine, stepped.log[: index + 1])
        assert reached.rev == entry["after"]["rev"]


def test_a_log_of_a_child_machine_replays_p11() -> None:
    bank = Bank()
    stepped = Stepped(_supervised(bank, [turn(pay(), balance()), say()]), InMemoryLedger())
    stepped.perform(stepped.requests[0])
    child = stepped.step.snapshot.children["w"].snapshot
    stepped.send(approval_event(pending_approval(child["context"])), agent="boss:w")
    stepped.run()
    other = _supervised(Bank(), [])
    assert dump(replay(other, stepped.log)) == dump(stepped.step.snapshot)


def test_an_entry_holds_the_event_the_raw_result_and_the_time_p12() -> None:
    machine, _ = _machine([say("hi", usage={"input_tokens": 3})], {}, Bank())
    step = initial_agent_step(machine, "please", now=7.0, run="r")
    executed = execute_agent_request_sync(step.requests[0], verbose=True)
    step = resolve_agent_step(
        machine, step, step.requests[0], executed.output, raw=executed.raw, now=9.0
    )
    entry = step.entry
    assert entry["event"]["type"] == "xstate.done.actor.model" and entry["at_ms"] == 9.0
    assert entry["raw"]["usage"]["input_tokens"] == 3 and entry["raw"]["text"] == "hi"
    assert json.loads(json.dumps(entry)) == entry


def test_a_raw_result_that_is_a_named_tuple_is_kept_by_its_names_p12() -> None:
    machine, _ = _machine([say("hi")], {}, Bank())
    step = initial_agent_step(machine, "please", now=7.0, run="r")
    raw = Marked("hi", 3)
    step = resolve_agent_step(machine, step, step.requests[0], {"text": "hi"}, raw=raw, now=9.0)
    assert step.entry["raw"] == {"text": "hi", "tokens": 3}


class Marked(NamedTuple):
    text: str
    tokens: int


def test_a_denied_event_is_replayed_as_denied_p11() -> None:
    """The ledger's word is in the log, and the ledger is not asked again."""
    machine, _ = _machine([pay(), say()], {}, Bank())
    stepped = Stepped(machine, InMemoryLedger()).ask()
    wrong = {**approval_event(stepped.pending), "digests": {stepped.pending[0]["id"]: "0" * 64}}
    assert stepped.send(wrong).status == "denied"
    late = approval_event(stepped.pending)
    stepped.now += 100_000_000_000
    assert stepped.send(late).reason == "the decision came too late"
    assert stepped.state == "error"
    assert replay(machine, stepped.log) == stepped.step.snapshot


def test_a_hook_that_fails_is_replayed_as_failing_p11() -> None:

    class Failing(InMemoryLedger):
        def propose_batch(self, *args: Any, **kw: Any) -> Any:
            raise OSError("disk full")

    machine, _ = _machine([pay(), say()], {}, Bank())
    stepped = Stepped(machine, Failing()).ask()
    assert stepped.context["last_failure"] == "OSError"
    assert replay(machine, stepped.log) == stepped.step.snapshot


def _door(**states: Any) -> Any:
    chart = {
        "id": "door",
        "initial": "shut",
        "context": {"n": 0},
        "states": {
            "shut": {"on": {"OPEN": "open"}},
            "open": {"on": {"SHUT": "shut", "LOCK": "locked"}},
            "locked": {"on": {"OPEN": "open"}},
            **states,
        },
    }
    return create_machine(chart, MachineLogic(actions={"count": lambda c, e: {"n": c["n"] + 1}}))


def _walked(*events: str) -> list[dict[str, Any]]:
    stepped = Stepped(_door(), None)
    for event in events:
        stepped.send(event)
    return stepped.log


@pytest.mark.parametrize(
    ("states", "index", "match"),
    [
        ({"open": {"on": {"SHUT": "shut", "LOCK": "shut"}}}, 2, r"log says \['door.locked'\]"),
        ({"open": {"on": {"SHUT": "shut"}}}, 2, r"reaches \['door.open'\]"),
        ({"locked": {"entry": "count", "on": {"OPEN": "open"}}}, 2, "the context"),
        ({"locked": {"after": {"5": "open"}, "on": {"OPEN": "open"}}}, 2, "what is pending"),
        ({"locked": {"on": {"OPEN": "shut"}}}, 3, r"entry 3: the log says \['door.open'\]"),
    ],
)
def test_a_changed_chart_says_at_which_entry_it_diverges_p13(
    states: dict[str, Any], index: int, match: str
) -> None:
    log = _walked("OPEN", "LOCK", "OPEN")
    with pytest.raises(ReplayDivergedError, match=match) as caught:
        replay(_door(**states), log)
    assert caught.value.index == index and caught.value.code == "replay-diverged"
    assert replay(_door(**states), log, verify=False).status == "active"


def test_a_log_without_fingerprints_replays_and_finds_results_nobody_waits_for_p13() -> None:
    """``{event, raw, at_ms}`` is enough."""
    stepped, _, _ = _stepped("reads")
    bare = [{k: v for k, v in entry.items() if k != "after"} for entry in stepped.log]
    assert replay(stepped.machine, bare) == stepped.step.snapshot
    chart = load_chart()
    chart["states"]["awaiting_model"]["invoke"]["id"] = "asked"
    logic = agent_logic(FakeModel([], is_async=False), Bank().registry(), retry=AT_ONCE)
    with pytest.raises(ReplayDivergedError, match="nothing waits for this") as caught:
        replay(create_machine(chart, logic), bare)
    assert caught.value.index == 2


def test_a_registry_that_changed_diverges_where_its_call_is_judged_p13() -> None:
    stepped, _, _ = _stepped("approved")
    logic = agent_logic(FakeModel([], is_async=False), [], retry=AT_ONCE)
    with pytest.raises(ReplayDivergedError) as caught:
        replay(create_machine(load_chart(), logic), stepped.log)
    assert caught.value.index == 2


@pytest.mark.parametrize(
    "log",
    [
        [],
        [{"event": {"type": "GO"}, "raw": None, "at_ms": 0}],
        [7],
        [{"event": "GO", "at_ms": 0}],
        [{"kind": "init", "event": {"type": "xstate.init"}, "at_ms": True}],
        [{"kind": "other", "event": {"type": "xstate.init"}, "at_ms": 1}],
        [{"kind": "init", "event": {"type": "xstate.init"}, "at_ms": 1, "verdicts": []}],
    ],
)
def test_what_is_no_log_is_refused(log: Any) -> None:
    with pytest.raises(ReplayDivergedError):
        replay(_door(), log)


@pytest.mark.parametrize(
    "entry",
    [
        {"event": {}},
        {"event": {"type": 5}},
        {"kind": "result", "event": {"output": 1}},
        {"kind": "result", "event": {}, "request": "m@2"},
        {"kind": "timer", "event": {}},
        {"kind": "init", "event": {}},
        {"event": {"type": "GO"}, "agent": "door:nobody"},
        {"event": {"type": "GO"}, "verdicts": {"x": {}}},
    ],
)
def test_an_entry_that_is_not_one_is_named(entry: Any) -> None:
    log = [*_walked("OPEN"), {"raw": None, "at_ms": 1.0, **entry}]
    with pytest.raises(ReplayDivergedError) as caught:
        replay(_door(), log)
    assert caught.value.index == 2


def test_an_outside_event_in_a_log_never_poses_as_a_result_p12() -> None:
    """What makes an entry a result is the entry, not its event."""
    machine, _ = _machine([say()], {}, Bank())
    stepped = Stepped(machine, InMemoryLedger())
    stepped.send(START)
    forged = {"type": "xstate.done.actor.model", "output": {"text": "mine"}, "request": "model@2"}
    stepped.send(forged)
    assert stepped.log[-1]["event"]["type"] == "xstate.done.actor.model"
    snapshot = replay(machine, stepped.log)
    assert snapshot == stepped.step.snapshot and snapshot.context["result"] is None


def test_an_event_with_a_type_in_its_payload_replays() -> None:
    door = _door(shut={"on": {"OPEN": {"target": "open", "actions": "keep"}}})
    door = door.with_logic(
        door.logic.merge(MachineLogic(actions={"keep": lambda c, e: {"n": e.payload["type"]}}))
    )
    stepped = Stepped(door, None)
    stepped.send(Event("OPEN", {"type": "wide"}))
    assert replay(door, stepped.log).context["n"] == "wide"


def test_a_fork_goes_on_from_an_earlier_entry_and_leaves_the_log_alone_p14() -> None:
    bank = Bank()
    machine, _ = _machine([pay(), say(), say()], {}, bank)
    ledger = InMemoryLedger()
    stepped = Stepped(machine, ledger).ask()
    before = copy.deepcopy(stepped.log)
    parked, event = len(stepped.log) - 1, approval_event(stepped.pending)
    stepped.approve()
    forked = fork(machine, stepped.log, parked)
    assert forked.log == before and stepped.log[: parked + 1] == before
    other = Stepped(machine, ledger)
    other.step = transition_agent_step(machine, forked.snapshot, event, **other.given)
    other.run()
    assert other.results == stepped.results and len(bank.paid) == 1
    with pytest.raises(ReplayDivergedError):
        fork(machine, stepped.log, 99)


def test_a_log_replays_after_its_chart_gained_a_state_that_it_never_entered_p13() -> None:
    """What the log never touched may change."""
    stepped, _, _ = _stepped("reads")
    chart = allowing("balance", "pay", "rate", "close_account")
    chart["states"]["paused"] = {"on": {"GO": "idle"}}
    logic = agent_logic(FakeModel([], is_async=False), Bank().registry(), retry=AT_ONCE)
    snapshot = replay(create_machine(chart, logic), stepped.log)
    assert snapshot.context == stepped.step.snapshot.context


# --- plugins -----------------------------------------------------------------------------------


class Counter:
    """Writes into the context and sends an event, as a budget does."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_interpreter_start(self, interpreter: Any) -> None:
        self.seen.append("start")

    def on_before_send(self, interpreter: Any, event: Any) -> None:
        if event.type == "REPORT":
            count = interpreter.context["n"] + 1
            interpreter.update_context({"n": count})
            if count == 2:
                interpreter.send("FULL", n=count)

    def on_transition(self, interpreter: Any, before: Any, after: Any, receipt: Any) -> None:
        self.seen.append(",".join(sorted(after)))

    def on_interpreter_stop(self, interpreter: Any) -> None:
        self.seen.append("stop")


def _counting() -> Any:
    def follow(scope: Any, context: Any, event: Any, action: Any) -> None:
        scope.send("FOLLOW")

    chart = {
        "id": "m",
        "initial": "a",
        "context": {"n": 0, "order": []},
        "states": {
            "a": {
                "on": {
                    "REPORT": {"actions": ["noted", "follow"]},
                    "FOLLOW": {"actions": "noted"},
                    "FULL": {"target": "b", "actions": "noted"},
                }
            },
            "b": {"on": {"FOLLOW": {"actions": "noted"}, "END": "c"}},
            "c": {"type": "final"},
        },
    }

    def noted(context: Any, event: Any) -> dict[str, Any]:
        return {"order": [*context["order"], f"{event.type}{context['n']}"]}

    return create_machine(chart, MachineLogic(actions={"noted": noted, "follow": follow}))


def test_what_a_plugin_writes_and_sends_is_in_the_entry_and_replayed_p11() -> None:
    machine, plugin = _counting(), Counter()
    step = initial_agent_step(machine, plugins=[plugin])
    log = [step.entry]
    for event in ("REPORT", "REPORT", "END"):
        step = transition_agent_step(machine, step, event)
        log.append(json.loads(json.dumps(step.entry)))
    assert step.snapshot.context["order"] == ["REPORT1", "FOLLOW1", "REPORT2", "FULL2", "FOLLOW2"]
    assert plugin.seen[0] == "start" and plugin.seen[-1] == "stop"
    assert plugin.seen.count("start") == plugin.seen.count("stop") == 1
    before = list(plugin.seen)
    assert replay(machine, log) == step.snapshot
    assert plugin.seen == before
    assert [entry["event"]["type"] for entry in log] == ["xstate.init", "REPORT", "REPORT", "END"]


def test_a_budget_plugin_counts_on_the_step_path_and_replays_p11() -> None:
    budget = BudgetPlugin(1.0)
    chart = {
        "id": "boss",
        "initial": "on",
        "context": {"total_usage": {}, "budget_exceeded": False},
        "states": {
            "on": {"on": {"AGENT_DONE": {}, "BUDGET_EXCEEDED": "over"}},
            "over": {"type": "final"},
        },
    }
    machine = create_machine(chart, MachineLogic())
    step = initial_agent_step(machine, plugins=[budget])
    log = [step.entry]
    for cost in (0.4, 0.8):
        report = {"type": "AGENT_DONE", "agent_id": "boss:w", "usage": {"cost_usd": cost}}
        step = transition_agent_step(machine, step, report)
        log.append(json.loads(json.dumps(step.entry)))
    assert step.done and step.snapshot.context["budget_exceeded"] is True
    assert replay(machine, log) == step.snapshot
