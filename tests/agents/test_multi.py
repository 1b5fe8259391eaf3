"""Spawned agents: their ids, limits, reports and ends, and who may hand work to whom."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from guardchart import (
    Event,
    Interpreter,
    MachineLogic,
    SimulatedClock,
    SyncInterpreter,
    create_machine,
)
from guardchart.agents import (
    BudgetPlugin,
    FakeModel,
    ModelResponse,
    approval_event,
    check_budget_event_declared,
    handoff_guard,
    load_chart,
    pending_approval,
    run_agent,
    run_agent_sync,
    spawn_agent,
    tool_registry,
)
from guardchart.errors import AgentConfigError
from guardchart.kernel import initial_transition, step
from tests.agents.trees import (
    AT_ONCE,
    Desk,
    Till,
    pays,
    quiet,
    running,
    search,
    supervisor_chart,
    supervisor_logic,
)


def desk_chart(**more: Any) -> dict[str, Any]:
    """A parent that spawns a clerk on ASK, and notes every report."""
    return {
        "id": "desk",
        "initial": "open",
        "context": {"reports": []},
        "states": {
            "open": {
                "on": {
                    "ASK": {"actions": "spawnClerk"},
                    "AGENT_DONE": {"actions": "keep"},
                    "AGENT_FAILED": {"actions": "keep"},
                },
                **more.pop("open", {}),
            },
        },
        **more,
    }


def keep(context: Any, event: Any) -> dict[str, Any]:
    return {"reports": [*context["reports"], {"type": event.type, **event.payload}]}


def clerk(engine: str, script: Any = ({"text": "Yes."},), **options: Any) -> MachineLogic:
    model = options.pop("model", None) or FakeModel(script, is_async=engine == "async")
    options = {"budget": {"max_turns": 4}, "name": "clerk", "retry": AT_ONCE, **options}
    spawning = spawn_agent(options.pop("chart", None), model, options.pop("tools", None), **options)
    return MachineLogic(actions={"keep": keep}).merge(spawning)


@pytest.fixture
def open_desk(engine: str) -> Iterator[Any]:
    made: list[Any] = []

    def start(script: Any = ({"text": "Yes."},), desk: Any = None, **options: Any) -> Any:
        logic = clerk(engine, script, **options)
        made.append(running(create_machine(desk or desk_chart(), logic), engine, scope="desk"))
        return made[-1]

    yield start
    for each in made:
        each.stop()


async def ask(live: Any, **payload: Any) -> Any:
    if live.engine == "sync":
        receipt = live.send("ASK", **payload)
        live.settle(5)
        return receipt
    receipt = await live.send("ASK", wait=True, **payload)
    await live.settle(5)
    return receipt


def refused(live: Any) -> str:
    """What put the machine into error, which has to be a mistake in the wiring."""
    assert live.status == "error" and isinstance(live.error, AgentConfigError)
    assert live.actors == {}
    return str(live.error)


# --- tasks, ids, reports -----------------------------------------------------------------------


async def test_an_agent_works_on_its_task_and_reports_once(open_desk: Any) -> None:
    live = open_desk([{"text": "Yes.", "usage": {"input_tokens": 3, "output_tokens": 1}}])
    assert (await ask(live, task="Are you open?")).status == "taken"
    (report,) = live.context["reports"]
    assert report == {
        "type": "AGENT_DONE",
        "agent_id": "desk:clerk-1",
        "usage": {"turns": 1, "input_tokens": 3, "output_tokens": 1, "cost_usd": 0.0},
        "result": "Yes.",
        "error": None,
    }
    assert live.actors == {} and not live.snapshot.children and live.status == "running"


async def test_the_task_is_the_events_or_else_the_contexts(open_desk: Any, engine: str) -> None:
    model = FakeModel([{"text": "1"}, {"text": "2"}], is_async=engine == "async")
    chart = desk_chart(context={"reports": [], "topic": "the context's"})
    live = open_desk(desk=chart, model=model, task_key="topic")
    await ask(live)
    await ask(live, task="the event's")
    assert [call["messages"][0]["content"] for call in model.calls] == [
        "the context's",
        "the event's",
    ]


@pytest.mark.parametrize("task", [None, "", "  \n"])
async def test_no_task_is_an_error_of_the_parent(open_desk: Any, task: Any) -> None:
    live = open_desk()
    await ask(live, task=task)
    assert refused(live) == "spawnClerk: no task (event.task or context['task'])"


@pytest.mark.parametrize("task", [5, ["do it"], {"prompt": "x"}, True])
async def test_a_task_that_is_no_text_is_refused(open_desk: Any, task: Any) -> None:
    live = open_desk()
    await ask(live, task=task)
    assert refused(live) == "spawnClerk: the task must be a text"


async def test_numbers_are_never_given_twice_and_live_in_the_snapshot(
    open_desk: Any, engine: str
) -> None:
    live = open_desk([{"text": "1"}, {"text": "2"}])
    await ask(live, task="one")
    await ask(live, task="two")
    ids = [each["agent_id"] for each in live.context["reports"]]
    assert ids == ["desk:clerk-1", "desk:clerk-2"]
    kind: Any = Interpreter if engine == "async" else SyncInterpreter
    machine = create_machine(desk_chart(), clerk(engine, [{"text": "3"}]))
    again = kind.from_snapshot(json.loads(live.get_snapshot()), machine).start()
    await ask(again, task="three")
    assert again.context["reports"][-1]["agent_id"] == "desk:clerk-3"
    again.stop()


@pytest.mark.parametrize("counts", [None, 3, {"clerk": "7"}, {"clerk": -2}, {"clerk": True}])
async def test_a_count_that_nobody_wrote_starts_anew(open_desk: Any, counts: Any) -> None:
    live = open_desk(desk=desk_chart(context={"reports": [], "spawned_agents": counts}))
    await ask(live, task="one")
    assert live.context["reports"][0]["agent_id"] == "desk:clerk-1"


async def test_an_id_of_the_event_is_free_again_once_its_agent_has_reported(
    open_desk: Any,
) -> None:
    live = open_desk([{"text": "1"}, {"text": "2"}])
    await ask(live, task="one", id="ticket-7")
    await ask(live, task="two", id="ticket-7")
    assert [each["agent_id"] for each in live.context["reports"]] == ["desk:ticket-7"] * 2


async def test_an_agent_may_follow_under_the_same_id_while_the_report_is_handled(
    engine: str,
) -> None:
    def more(scope: Any, context: Any, event: Any, action: Any) -> None:
        context["reports"] = [*context["reports"], event.payload["result"]]
        if len(context["reports"]) < 3:
            scope.send("ASK", task="again", id="ticket-7")

    logic = clerk(engine, [{"text": "1"}, {"text": "2"}, {"text": "3"}])
    logic.actions["keep"] = more
    live = running(create_machine(desk_chart(), logic), engine)
    await ask(live, task="first", id="ticket-7")
    assert live.context["reports"] == ["1", "2", "3"] and live.status == "running"
    assert live.actors == {} and not live.snapshot.children
    live.stop()


async def test_an_id_in_use_is_refused(engine: str) -> None:
    desk = Desk(engine, {"pay": [pays("ann", 1)]})
    live = await desk.start()
    event = {"type": "HANDOFF", "from": "planner", "to": "worker", "task": "pay", "id": "x9"}
    await desk.send(event)
    await desk.send(event)
    message = refused(live)
    assert "still running" in message and "x9" not in message
    desk.stop()


@pytest.mark.parametrize("given", [7, "", "a:b", "a\nb", "x" * 129, ["a"]])
async def test_a_malformed_id_is_refused_and_not_repeated(open_desk: Any, given: Any) -> None:
    live = open_desk()
    await ask(live, task="one", id=given)
    message = refused(live)
    assert "1 to 128" in message and (not given or str(given) not in message)


async def test_a_failing_agent_reports_its_error(open_desk: Any) -> None:
    live = open_desk([RuntimeError("down"), RuntimeError("down")], budget={"max_turns": 2})
    await ask(live, task="one")
    (report,) = live.context["reports"]
    assert report["type"] == "AGENT_FAILED" and report["usage"]["turns"] == 2
    assert report["error"] == {"kind": "budget", "message": "turn limit reached"}
    assert live.status == "running"


async def test_an_agent_that_breaks_reports_as_well_and_does_not_break_its_parent(
    open_desk: Any,
) -> None:
    def fault(context: Any, event: Any) -> None:
        raise ZeroDivisionError("secret")

    live = open_desk(logic=MachineLogic(actions={"storeResult": fault}))
    await ask(live, task="one")
    (report,) = live.context["reports"]
    assert report["type"] == "AGENT_FAILED" and report["agent_id"] == "desk:clerk-1"
    assert report["error"] == {"kind": "machine", "message": "ZeroDivisionError"}
    assert live.status == "running" and live.actors == {} and not live.snapshot.children


async def test_an_agent_whose_report_breaks_reports_that(open_desk: Any) -> None:
    def silent(scope: Any, context: Any, event: Any, action: Any) -> None:
        raise ValueError("no")

    live = open_desk(logic=MachineLogic(actions={"notifyParent": silent}))
    await ask(live, task="one")
    (report,) = live.context["reports"]
    assert report["type"] == "AGENT_FAILED" and report["error"]["message"] == "ValueError"


async def test_an_end_that_forgot_to_report_is_reported(open_desk: Any) -> None:
    chart = load_chart()
    del chart["states"]["done"]["entry"]
    live = open_desk(chart=chart)
    await ask(live, task="one")
    (report,) = live.context["reports"]
    assert report["type"] == "AGENT_DONE" and report["result"] == "Yes."


async def test_a_chart_that_waits_for_start_gets_it(open_desk: Any, engine: str) -> None:
    chart = load_chart()
    del chart["states"]["idle"]["always"]
    live = open_desk(chart=chart)
    await ask(live, task="one")
    assert live.context["reports"][0]["result"] == "Yes."


async def test_leaving_the_parent_stops_its_agents(engine: str) -> None:
    desk = Desk(engine, {"pay": [pays("ann", 1)]})
    live = await desk.start()
    await desk.plan("pay")
    (worker,) = live.actors.values()
    live.stop()
    assert worker.status == "stopped" and live.actors == {} and desk.till.paid == []


# --- wiring ------------------------------------------------------------------------------------


def wire(**given: Any) -> MachineLogic:
    given = {"budget": {"max_turns": 1}, **given}
    chart, tools = given.pop("chart", None), given.pop("tools", None)
    return spawn_agent(chart, FakeModel([]), tools, **given)


SEARCH = tool_registry(search)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"budget": None}, "spawn_agent requires an explicit budget="),
        ({"budget": {"max_turns": -1}}, "max_turns"),
        ({"chart": create_machine(load_chart())}, "pass the child chart as a dict"),
        ({"name": "two words"}, "name must be a word"),
        ({"name": ""}, "name must be a word"),
        ({"task_key": 3}, "task_key"),
        (
            {"tools": SEARCH, "parent_tools": ["fetch"]},
            r"sub-agent tools \['search'\] are not in the parent's allow-list \['fetch'\]",
        ),
        ({"tools": SEARCH, "parent_tools": []}, r"allow-list \[\]"),
        ({"tools": SEARCH, "parent_tools": tool_registry()}, r"allow-list \[\]"),
        ({"tools": SEARCH, "parent_tools": "search"}, "list of tool names"),
    ],
)
def test_wrong_wiring_is_refused_when_it_is_made(given: dict[str, Any], message: str) -> None:
    with pytest.raises(AgentConfigError, match=message):
        wire(**given)


def test_a_child_chart_that_never_reports_is_refused() -> None:
    chart = load_chart()
    for end in ("done", "error"):
        del chart["states"][end]["entry"]
    with pytest.raises(AgentConfigError, match="the child chart never runs 'notifyParent'"):
        wire(chart=chart)


def test_a_child_chart_with_a_tool_that_is_not_registered_is_refused() -> None:
    chart = load_chart()
    chart["states"]["awaiting_tool"]["meta"]["tools"] = ["sarch"]
    with pytest.raises(AgentConfigError, match="'sarch', which is not in the tool registry"):
        wire(chart=chart, tools=SEARCH)


@pytest.mark.parametrize("parent", [["search", "fetch"], "*", SEARCH, ("search",)])
def test_a_parents_tools_may_be_given_in_any_form(parent: Any) -> None:
    logic = wire(tools=SEARCH, parent_tools=parent, name="scout")
    assert set(logic.actions) == {"spawnScout"} and set(logic.guards) == {"fromScout"}


async def test_the_spawning_states_own_list_bounds_an_agents_tools(open_desk: Any) -> None:
    chart = desk_chart(open={"meta": {"tools": ["fetch"]}})
    live = open_desk(desk=chart, tools=SEARCH, parent_tools=["search"])
    await ask(live, task="one")
    assert refused(live) == (
        "sub-agent tools ['search'] are not in the parent's allow-list ['fetch']"
    )


async def test_without_any_list_an_agent_may_hold_no_tool(open_desk: Any) -> None:
    live = open_desk(tools=SEARCH)
    await ask(live, task="one")
    assert "allow-list []" in refused(live)


async def test_without_any_list_an_agent_without_tools_may_work(open_desk: Any) -> None:
    live = open_desk()
    await ask(live, task="one")
    assert live.context["reports"][0]["result"] == "Yes."


async def test_a_list_of_a_state_above_bounds_an_agents_tools(open_desk: Any) -> None:
    script = [{"tool": "search", "args": {"query": "x"}}, {"text": "Found."}]
    live = open_desk(script, desk=desk_chart(meta={"tools": ["search"]}), tools=SEARCH)
    await ask(live, task="one")
    assert live.context["reports"][0]["result"] == "Found."


def lead_chart(**more: Any) -> dict[str, Any]:
    """An agent that has a scout look first, and answers then."""
    asking = {"target": "done", "actions": ["recordModelResponse", "storeResult"]}
    return {
        "id": "lead",
        "initial": "looking",
        "context": {"task": "look", "messages": []},
        "states": {
            "looking": {
                "entry": "spawnScout",
                "on": {"AGENT_DONE": "asking", "AGENT_FAILED": "asking"},
                **more,
            },
            "asking": {"invoke": {"src": "callModel", "onDone": asking}},
            "done": {"type": "final", "entry": "notifyParent"},
        },
    }


@pytest.mark.parametrize("listed", [["*"], None], ids=["everything", "nothing"])
async def test_an_agent_gives_its_agents_no_tool_that_it_was_not_given(
    engine: str, listed: list[str] | None
) -> None:
    chart = lead_chart() if listed is None else lead_chart(meta={"tools": listed})
    given: dict[str, Any] = {"parent_tools": ["search"]} if listed is None else {}
    scout = clerk(engine, name="scout", tools=SEARCH, **given)
    logic = clerk(engine, chart=chart, logic=scout)
    live = running(create_machine(desk_chart(), logic), engine)
    await ask(live, task="look")
    (report,) = live.context["reports"]
    assert report["type"] == "AGENT_FAILED" and report["error"] == {
        "kind": "machine",
        "message": "sub-agent tools ['search'] are not in the parent's allow-list []",
    }
    live.stop()


async def test_an_agent_gives_its_agents_the_tools_that_it_was_given(engine: str) -> None:
    script = [{"tool": "search", "args": {"query": "x"}}, {"text": "seen"}]
    scout = clerk(engine, script, name="scout", tools=SEARCH)
    logic = clerk(engine, chart=lead_chart(meta={"tools": ["*"]}), logic=scout, tools=SEARCH)
    live = running(create_machine(desk_chart(meta={"tools": ["*"]}), logic), engine)
    await ask(live, task="look")
    assert live.context["reports"][0]["result"] == "Yes."
    live.stop()


async def test_an_agent_of_an_agent_is_approved_at_the_root(engine: str) -> None:
    till = Till()
    scout = clerk(engine, [pays("ann", 1), {"text": "paid"}], name="scout", tools=till.registry())
    chart = lead_chart(meta={"tools": ["pay", "search"]})
    logic = clerk(engine, chart=chart, logic=scout, tools=till.registry())
    live = running(create_machine(desk_chart(meta={"tools": ["*"]}), logic), engine)
    await ask(live, task="look")
    (call,) = pending_approval(live.context)
    assert call["agent_id"] == "desk:clerk-1:scout-1" and till.paid == []
    assert pending_approval(json.loads(live.get_snapshot())) == [call]
    sent = live.send(approval_event([call]), wait=True)
    if engine == "async":
        await sent
        await quiet(live)
    assert till.paid == [("ann", 1)] and live.context["reports"][0]["result"] == "Yes."
    live.stop()


async def test_a_model_of_the_other_kind_is_refused_in_the_action(engine: str) -> None:
    other = "sync" if engine == "async" else "async"
    live = running(create_machine(desk_chart(), clerk(other)), engine)
    await ask(live, task="one")
    assert "pairs with" in refused(live)
    live.stop()


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_hosts_that_take_either_kind_of_model_take_either_here(kind: str) -> None:
    machine = create_machine(desk_chart(), clerk(kind, [{"text": "Yes."}] * 3))
    event = {"type": "ASK", "task": "one"}
    res = asyncio.run(run_agent(machine, event=event))
    assert res.context["reports"][0]["result"] == "Yes."
    live = SyncInterpreter(machine, allow_async=True).start()
    live.send(event)
    assert live.context["reports"][0]["result"] == "Yes."
    live.stop()
    if kind == "sync":
        res = run_agent_sync(machine, event=event)
        assert res.context["reports"][0]["result"] == "Yes."


async def test_agents_spawn_agents(engine: str) -> None:
    inner = load_chart()
    inner["id"] = "lead"
    inner["states"]["awaiting_model"]["entry"] = "spawnScout"
    inner["states"]["awaiting_model"]["on"] = {"AGENT_DONE": {"actions": "note"}}
    scout = clerk(engine, [{"text": "seen"}], name="scout")
    note = MachineLogic(actions={"note": lambda c, e: {"seen": e.payload["agent_id"]}})
    live = running(
        create_machine(desk_chart(), clerk(engine, chart=inner, logic=scout.merge(note))), engine
    )
    await ask(live, task="look")
    assert live.context["reports"][0]["result"] == "Yes."
    live.stop()


async def test_more_agents_than_may_live_are_failures_and_not_the_end(engine: str) -> None:
    desk = Desk(engine, {f"t{n}": [pays("ann", n)] for n in range(8)})
    live = await desk.start(max_queue=5)
    hand = {"type": "HANDOFF", "from": "planner", "to": "worker"}
    for n in range(8):
        await desk.send({**hand, "task": f"t{n}"})
    assert live.status == "running" and len(live.actors) == 5
    assert [each["kind"] for each in desk.context["failures"]] == ["machine"] * 3
    assert {each["message"] for each in desk.context["failures"]} == {"StepError"}
    desk.stop()


async def test_spawning_and_reporting_are_pure(engine: str) -> None:
    desk = Desk(engine, {"look": [{"tool": "search", "args": {"query": "x"}}, {"text": "Yes."}]})
    chart = supervisor_chart("pay", "search")
    desk.machine = create_machine(chart, desk.machine.logic, check_purity=True)
    await desk.start()
    await desk.plan("look")
    assert desk.context["results"] == ["Yes."] and desk.state == "reporting"
    desk.stop()


# --- budgets -----------------------------------------------------------------------------------


async def test_an_exhausted_budget_fails_that_agent_alone(engine: str) -> None:
    look = {"tool": "search", "args": {"query": "x"}}
    desk = Desk(
        engine,
        {"long": [look] * 9, "short": [{"text": "Short."}]},
        budget={"max_turns": 2},
    )
    await desk.start()
    await desk.plan("long", "short")
    assert desk.state == "reporting" and desk.context["results"] == ["Short."]
    assert desk.context["failures"] == [{"kind": "budget", "message": "turn limit reached"}]
    desk.stop()


async def test_once_the_budget_of_the_tree_is_spent_nothing_is_spawned(
    open_desk: Any, caplog: pytest.LogCaptureFixture
) -> None:
    live = open_desk()
    live.update_context({"budget_exceeded": True})
    with caplog.at_level(logging.INFO, "guardchart"):
        assert (await ask(live, task="one")).status == "taken"
    assert live.context["reports"] == [] and live.status == "running"
    assert "spawnClerk: global budget exceeded; not spawning" in caplog.text


async def test_a_strict_chart_has_to_declare_the_budgets_event(open_desk: Any) -> None:
    live = open_desk(desk=desk_chart(strict=True))
    with pytest.raises(AgentConfigError, match="does not declare BUDGET_EXCEEDED"):
        check_budget_event_declared(live)
    await ask(live, task="one")
    assert "does not declare BUDGET_EXCEEDED" in refused(live)
    chart = desk_chart(strict=True)
    chart["states"]["open"]["on"]["BUDGET_EXCEEDED"] = {"actions": "keep"}
    live = open_desk(desk=chart)
    check_budget_event_declared(live)
    await ask(live, task="one")
    assert live.context["reports"][0]["result"] == "Yes."


def test_a_chart_that_is_not_strict_need_not_declare_the_budgets_event() -> None:
    check_budget_event_declared(create_machine(desk_chart()))


async def test_the_trees_budget_trips_once_and_still_collects_the_report_that_tripped_it(
    engine: str,
) -> None:
    trips: list[Any] = []

    class Watch:
        def on_event_received(self, interpreter: Any, event: Any) -> None:
            if event.type == "BUDGET_EXCEEDED":
                trips.append(interpreter.id)

    budget = BudgetPlugin(max_total_tokens=5)
    answer = {"text": "one", "usage": {"input_tokens": 5, "output_tokens": 5}}
    scripts = {task: [answer] for task in ("a", "b", "c")}
    desk = Desk(engine, scripts, budget={"max_turns": 1})
    live = await desk.start(plugins=[budget, Watch()])
    await desk.plan("a", "b", "c")
    assert desk.context["results"][0] == "one" and desk.context["budget_exceeded"] is True
    assert desk.state == "reporting" and live.actors == {} and trips == ["supervisor"]
    assert desk.context["total_usage"]["turns"] == len(desk.context["results"])
    desk.stop()


async def test_hand_offs_queued_behind_the_report_that_trips_spawn_nobody(engine: str) -> None:
    budget = BudgetPlugin(max_total_tokens=5)
    answer = {"text": "one", "usage": {"input_tokens": 5, "output_tokens": 5}}

    def keep_and_ask(scope: Any, context: Any, event: Any, action: Any) -> None:
        context["reports"] = [*context["reports"], event.payload["result"]]
        scope.send("ASK", task="more")

    logic = clerk(engine, [answer, answer])
    logic.actions["keep"] = keep_and_ask
    live = running(create_machine(desk_chart(), logic), engine, plugins=[budget])
    await ask(live, task="one")
    assert live.context["reports"] == ["one"] and live.actors == {}
    assert live.context["total_usage"]["turns"] == 1
    live.stop()


async def test_what_agents_of_an_agent_spend_counts_in_the_budget_of_the_whole_tree(
    engine: str,
) -> None:
    spent = {"usage": {"input_tokens": 2, "output_tokens": 1}}
    scout = clerk(engine, [{"text": "seen", **spent}], name="scout")
    logic = clerk(engine, [{"text": "Yes.", **spent}], chart=lead_chart(), logic=scout)
    plugin = BudgetPlugin(max_total_tokens=6)
    live = running(create_machine(desk_chart(), logic), engine, plugins=[plugin])
    await ask(live, task="look")
    assert live.context["reports"][0]["result"] == "Yes."
    assert live.context["total_usage"] == {
        "turns": 2, "input_tokens": 4, "output_tokens": 2, "cost_usd": 0.0,
    }  # fmt: skip
    assert live.context["budget_exceeded"] is True
    live.stop()


def test_the_model_calls_of_agents_count_in_the_limit_of_the_run(engine: str) -> None:
    look = {"tool": "search", "args": {"query": "x"}}
    desk = Desk(engine, {task: [look] * 9 for task in ("a", "b")}, budget={"max_turns": 9})
    given: Any = {"event": {"type": "PLAN", "tasks": ["a", "b"]}, "max_model_calls": 3}
    if engine == "async":
        res = asyncio.run(run_agent(desk.machine, **given))
    else:
        res = run_agent_sync(desk.machine, **given)
    assert res.status == "error" and res.cause == "max-model-calls"


# --- hand-offs ---------------------------------------------------------------------------------

GUARD = handoff_guard({"planner": ["worker"], "worker": ["judge", "planner"]})


@pytest.mark.parametrize(
    ("source", "target", "passes"),
    [
        ("planner", "worker", True),
        ("worker", "judge", True),
        ("planner", "judge", False),
        ("worker", "worker", False),
        ("Planner", "worker", False),
        ("planner", "worker ", False),
        (" planner", "worker", False),
        ("planner", "w", False),
        (None, "worker", False),
        ("planner", None, False),
        (["planner"], "worker", False),
        ("planner", ["worker"], False),
        (1, 2, False),
    ],
)
def test_only_listed_hand_offs_pass(source: Any, target: Any, passes: bool) -> None:
    payload = {"from": source, "to": target}
    assert GUARD.guards["handoffAllowed"]({}, Event("HANDOFF", payload)) is passes


def test_a_hand_off_without_names_or_without_an_event_does_not_pass() -> None:
    guard = GUARD.guards["handoffAllowed"]
    assert guard({}, Event("HANDOFF")) is False and guard({}, None) is False


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"allowed": {"planner": "worker"}}, 'not "worker"'),
        ({"allowed": {"planner": [1]}}, "names must be texts"),
        ({"allowed": {1: ["worker"]}}, "names must be texts"),
        ({"allowed": {"": ["worker"]}}, "names must be texts"),
        ({"allowed": {"planner": None}}, "list of names"),
        ({"allowed": [("planner", "worker")]}, "pass a mapping"),
        ({"allowed": {}, "sender": "trusted"}, "sender is"),
        ({"allowed": {}, "name": ""}, "name must be"),
    ],
)
def test_a_malformed_table_of_hand_offs_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(AgentConfigError, match=message):
        handoff_guard(**given)


def test_the_table_is_copied_and_the_guard_named() -> None:
    allowed = {"planner": ["worker"]}
    guard = handoff_guard(allowed, name="mayPass").guards["mayPass"]
    allowed["planner"].append("judge")
    assert guard({}, Event("HANDOFF", {"from": "planner", "to": "judge"})) is False


async def test_a_verified_sender_is_the_machines_and_not_the_payloads(engine: str) -> None:
    worker = spawn_agent(
        None,
        FakeModel([{"text": "A"}, {"text": "B"}], is_async=engine == "async"),
        budget={"max_turns": 2},
        name="worker",
    )
    logic = supervisor_logic(worker, sender="verified")
    live = running(create_machine(supervisor_chart(), logic), engine)
    forged = {"type": "HANDOFF", "from": "planner", "to": "worker", "task": "x"}
    receipt = live.send(forged, wait=True)
    receipt = await receipt if engine == "async" else receipt
    assert receipt.denied and live.actors == {}
    live.post(forged)
    await quiet(live)
    assert live.actors == {} and live.context["results"] == []
    sent = live.send("PLAN", tasks=["a", "b"], wait=True)
    if engine == "async":
        await sent
        await quiet(live)
    assert sorted(live.context["results"]) == ["A", "B"]
    live.stop()


async def test_a_child_is_known_by_the_name_of_its_source_whatever_it_says(engine: str) -> None:
    def claim(scope: Any, context: Any, event: Any, action: Any) -> None:
        scope.send_parent("HANDOFF", **{"from": "planner", "to": "judge"})

    chart = load_chart()
    chart["states"]["checking_budget"]["entry"] = "claim"
    heard: list[Any] = []

    def hear(scope: Any, context: Any, event: Any, action: Any) -> None:
        heard.append((event.sender, event.payload["from"]))

    logic = clerk(engine, chart=chart, logic=MachineLogic(actions={"claim": claim})).merge(
        MachineLogic(actions={"hear": hear}),
        handoff_guard({"clerk": ["judge"]}, name="clerkMay", sender="verified"),
        handoff_guard({"planner": ["judge"]}, name="plannerMay", sender="verified"),
    )
    on = {
        "HANDOFF": [
            {"guard": "plannerMay", "target": "open"},
            {"guard": "clerkMay", "actions": "hear"},
        ]
    }
    desk = desk_chart()
    desk["states"]["open"]["on"].update(on)
    live = running(create_machine(desk, logic), engine)
    await ask(live, task="one")
    assert heard == [(("clerk",), "planner")]
    live.stop()


def test_an_event_object_that_is_sent_on_keeps_its_own_sender() -> None:
    outside = Event("GO")

    def forward(scope: Any, context: Any, event: Any, action: Any) -> None:
        scope.send(event if event.type == "AGAIN" else Event("AGAIN"))
        scope.raise_(outside)

    machine = create_machine(
        {
            "id": "m",
            "initial": "a",
            "states": {"a": {"initial": "b", "states": {"b": {"on": {"X": {"actions": "f"}}}}}},
        },
        MachineLogic(actions={"f": forward}),
    )
    snapshot, _ = initial_transition(machine)
    _, effects, _ = step(machine, snapshot, "X")
    assert effects[0].event.sender == ("b", "a", "m")
    assert not hasattr(outside, "sender")


def test_reports_tell_of_whose_agents_they_are() -> None:
    guards = {**wire(name="pro").guards, **wire(name="con").guards}
    event = Event("AGENT_DONE", {"agent_id": "debate:pro-2"})
    assert guards["fromPro"]({}, event) and not guards["fromCon"]({}, event)
    for odd in ("debate:pro", "debate:profit-1", "debate:pro-x", None, 7):
        assert not guards["fromPro"]({}, Event("AGENT_DONE", {"agent_id": odd}))
    event.sender = ("con",)  # what the machine knows wins
    assert guards["fromCon"]({}, event) and not guards["fromPro"]({}, event)


# --- concurrency -------------------------------------------------------------------------------


async def test_workers_run_at_once_on_the_async_engine() -> None:
    meet = asyncio.Barrier(3)

    async def model(messages: Any, tools: Any) -> ModelResponse:
        await asyncio.wait_for(meet.wait(), 10)  # only three at once get through
        return ModelResponse(f"done: {messages[0]['content']}", ())

    desk = Desk("async", {}, model=model)
    await desk.start()
    await desk.plan("a", "b", "c")
    assert sorted(desk.context["results"]) == ["done: a", "done: b", "done: c"]
    desk.stop()


def test_workers_with_a_sync_model_run_at_once_under_run_agent() -> None:
    meet = threading.Barrier(3)

    def model(messages: Any, tools: Any) -> ModelResponse:
        meet.wait(10)
        return ModelResponse(f"done: {messages[0]['content']}", ())

    desk = Desk("sync", {}, model=model)
    event = {"type": "PLAN", "tasks": ["a", "b", "c"]}
    for run in (
        lambda: asyncio.run(run_agent(desk.machine, event=event)),
        lambda: run_agent_sync(desk.machine, event=event),
    ):
        res = run()
        assert res.final_state == "supervisor.reporting"
        assert sorted(res.context["results"]) == ["done: a", "done: b", "done: c"]


async def test_a_worker_that_hangs_keeps_no_other_from_its_report() -> None:
    async def model(messages: Any, tools: Any) -> ModelResponse:
        if messages[0]["content"] == "hang":
            await asyncio.get_running_loop().create_future()
        return ModelResponse("quick", ())

    clock = SimulatedClock()
    desk = Desk("async", {}, model=model, model_timeout_s=60, budget={"max_turns": 1})
    desk.live = Interpreter(desk.machine, clock=clock).start()
    await desk.live.send("PLAN", tasks=["hang", "go"], wait=True)
    for _ in range(20):
        await asyncio.sleep(0)
    assert desk.live.context["results"] == ["quick"] and len(desk.live.actors) == 1
    await clock.increment(61_000)
    assert desk.state == "reporting"
    assert desk.context["failures"] == [{"kind": "budget", "message": "turn limit reached"}]
    desk.stop()


# --- the shipped charts ------------------------------------------------------------------------

DAY_MS = 86_400_000


@pytest.mark.parametrize("name", ["supervisor", "pipeline", "debate"])
def test_a_shipped_chart_can_be_read_drawn_and_edited_without_logic(name: str) -> None:
    chart = load_chart(name)
    machine = create_machine(chart)
    assert machine.id == name
    chart["states"].clear()
    assert load_chart(name)["states"]


def test_the_charts_use_the_names_that_logic_for_them_has_always_bound() -> None:
    def names(value: Any, found: set[str]) -> set[str]:
        if isinstance(value, dict):
            for key, each in value.items():
                if key in ("actions", "entry", "exit", "guard") and isinstance(each, str):
                    found.add(each)
                elif key in ("actions", "entry", "exit") and isinstance(each, list):
                    found.update(each)
                else:
                    names(each, found)
        elif isinstance(value, list):
            for each in value:
                names(each, found)
        return found

    assert names(load_chart("supervisor"), set()) == {
        "storePlan", "handOffTasks", "handoffAllowed", "spawnWorker", "collectResult",
        "collectFailure", "allWorkersReported",
    }  # fmt: skip
    assert names(load_chart("pipeline"), set()) == {
        "spawnResearcher", "spawnWriter", "spawnReviewer", "storeResearch", "storeDraft",
        "storeReview", "approved", "underRevisionLimit", "countRevision",
    }  # fmt: skip
    assert names(load_chart("debate"), set()) == {
        "spawnPro", "spawnCon", "spawnJudge", "fromPro", "fromCon", "storePosition",
        "storeVerdict", "handoffAllowed", "forwardToJudge",
    }  # fmt: skip


def storing(key: str) -> Any:
    return lambda context, event: {key: event.payload["result"]}


def pipeline(engine: str, *reviews: str) -> Any:
    is_async = engine == "async"

    def stage(name: str, *texts: str, **tools: Any) -> MachineLogic:
        model = FakeModel([{"text": each} for each in texts], is_async=is_async)
        return spawn_agent(None, model, budget={"max_turns": 3}, name=name, retry=AT_ONCE)

    chart = load_chart("pipeline")
    chart["context"]["task"] = "Write about tides"
    return create_machine(
        chart,
        MachineLogic(
            actions={
                "storeResearch": storing("research"),
                "storeDraft": storing("draft"),
                "storeReview": storing("review"),
                "countRevision": lambda c, e: {"revisions": c["revisions"] + 1},
            },
            guards={
                "approved": lambda c, e: e.payload["result"] == "fine",
                "underRevisionLimit": lambda c, e: c["revisions"] < c["max_revisions"],
            },
        ).merge(
            stage("researcher", "facts"),
            stage("writer", "first", "second", "third"),
            stage("reviewer", *reviews),
        ),
    )


@pytest.mark.parametrize(
    ("reviews", "end", "revisions", "draft"),
    [
        (["fine"], "published", 0, "first"),
        (["again", "fine"], "published", 1, "second"),
        (["again", "again", "again"], "failed", 2, "third"),
    ],
)
def test_a_pipeline_revises_a_limited_number_of_times(
    engine: str, reviews: list[str], end: str, revisions: int, draft: str
) -> None:
    machine = pipeline(engine, *reviews)
    res = asyncio.run(run_agent(machine)) if engine == "async" else run_agent_sync(machine)
    assert res.final_state == f"pipeline.{end}"
    assert res.context["revisions"] == revisions and res.context["draft"] == draft


def debate(engine: str, pro: Any, con: Any, judge: Any) -> Any:
    def side(name: str, item: Any) -> MachineLogic:
        model = FakeModel([item], is_async=engine == "async")
        return spawn_agent(None, model, budget={"max_turns": 1}, name=name, retry=AT_ONCE)

    chart = load_chart("debate")
    chart["context"]["task"] = "Is it going to rain?"

    def position(context: Any, event: Any) -> dict[str, Any]:
        side = event.payload["agent_id"].partition(":")[2]
        said = event.payload["result"] or event.payload["error"]["kind"]
        return {"positions": {**context["positions"], side: said}}

    logic = MachineLogic(
        actions={
            "storePosition": position,
            "storeVerdict": storing("verdict"),
            "forwardToJudge": lambda c, e: None,
        }
    ).merge(
        side("pro", pro),
        side("con", con),
        side("judge", judge),
        handoff_guard({"pro": ["judge"], "con": ["judge"]}),
    )
    return create_machine(chart, logic)


def test_a_debate_is_judged_even_where_one_side_fails(engine: str) -> None:
    machine = debate(engine, {"text": "yes"}, RuntimeError("down"), {"text": "yes it is"})
    res = asyncio.run(run_agent(machine)) if engine == "async" else run_agent_sync(machine)
    assert res.final_state == "debate.decided" and res.context["verdict"] == "yes it is"
    assert res.context["positions"] == {"pro-1": "yes", "con-1": "budget"}


def test_a_debate_whose_judge_fails_is_undecided(engine: str) -> None:
    machine = debate(engine, {"text": "yes"}, {"text": "no"}, RuntimeError("down"))
    res = asyncio.run(run_agent(machine)) if engine == "async" else run_agent_sync(machine)
    assert res.final_state == "debate.undecided" and res.context["verdict"] is None


async def _late(machine: Any, event: Any = None) -> Any:
    """Run a machine whose agents never answer until its last deadline."""
    clock = SimulatedClock()
    live = await Interpreter(machine, clock=clock).start()
    if event is not None:
        await live.send(event, wait=True)
    moved = 0
    while live.status == "running" and moved < 4 * DAY_MS:
        due = live.next_due()
        assert due is not None, "nothing would ever wake this machine"
        step_ms = max(1, due[0] - clock.now_ms())
        await clock.increment(step_ms)
        moved += step_ms
    live.stop()
    return live


def never(name: str, **options: Any) -> MachineLogic:
    """Agents that never report: their model hangs, and its timeout is longer than a week."""

    async def model(messages: Any, tools: Any) -> Any:
        await asyncio.get_running_loop().create_future()

    return spawn_agent(
        None, model, budget={"max_turns": 1}, name=name, model_timeout_s=9e6, **options
    )


async def test_a_supervisor_whose_workers_say_nothing_ends_all_the_same() -> None:
    machine = create_machine(supervisor_chart(), supervisor_logic(never("worker")))
    live = await _late(machine, {"type": "PLAN", "tasks": ["a"]})
    assert live.current_state_ids == {"supervisor.reporting"}
    assert live.context["results"] == [] and live.context["outstanding"] == 1


async def test_every_report_gives_the_other_workers_time_again() -> None:
    async def model(messages: Any, tools: Any) -> ModelResponse:
        if messages[0]["content"] == "hang":
            await asyncio.get_running_loop().create_future()
        return ModelResponse("quick", ())

    worker = spawn_agent(None, model, budget={"max_turns": 1}, name="worker", model_timeout_s=9e6)
    clock = SimulatedClock()
    machine = create_machine(supervisor_chart(), supervisor_logic(worker))
    live = await Interpreter(machine, clock=clock).start()
    live.update_context({"outstanding": 3})
    hand = {"type": "HANDOFF", "from": "planner", "to": "worker"}
    await live.send({**hand, "task": "hang"}, wait=True)
    await clock.increment(20 * 3_600_000)
    await live.send({**hand, "task": "go"}, wait=True)
    await clock.increment(20 * 3_600_000)
    assert "supervisor.running.workers.working" in live.current_state_ids
    assert live.context["results"] == ["quick"]
    await clock.increment(6 * 3_600_000)
    assert "supervisor.running.workers.finished" in live.current_state_ids
    live.stop()


async def test_a_pipeline_and_a_debate_that_hear_nothing_end_all_the_same() -> None:
    stages = [never(each) for each in ("researcher", "writer", "reviewer")]
    machine = pipeline("async")
    live = await _late(machine.with_logic(machine.logic.merge(*stages)))
    assert live.current_state_ids == {"pipeline.failed"}
    machine = debate("async", {"text": "yes"}, {"text": "no"}, {"text": "yes"})
    live = await _late(machine.with_logic(machine.logic.merge(never("con"))))
    assert live.current_state_ids == {"debate.undecided"}
    assert live.context["positions"] == {"pro-1": "yes"}


@pytest.mark.parametrize("name", ["supervisor", "pipeline", "debate"])
def test_no_state_that_waits_for_agents_lacks_a_deadline(name: str) -> None:
    machine = create_machine(load_chart(name))
    for node in machine.nodes.values():
        if "AGENT_DONE" in node.on:
            around = (node, *node.ancestors)
            assert any(each.timers for each in around), node.id
            assert any("BUDGET_EXCEEDED" in each.on for each in around), node.id


def test_a_person_has_a_whole_day_before_a_chart_gives_up(engine: str) -> None:
    for name in ("supervisor", "pipeline", "debate"):
        machine = create_machine(load_chart(name))
        delays = [t.delay for node in machine.nodes.values() for t in node.timers]
        assert delays and all(delay > DAY_MS for delay in delays)


async def test_a_tree_that_waits_for_a_person_rests_whatever_its_own_deadlines(
    engine: str,
) -> None:
    chart = supervisor_chart("pay", "search")
    working = chart["states"]["running"]["states"]["workers"]["states"]["working"]
    working["after"] = {"500": "finished"}
    till = Till()
    desk = Desk(engine, {"pay": [pays("ann", 1), {"text": "Paid."}]}, till=till)
    desk.machine = create_machine(chart, desk.machine.logic)
    res = (
        await run_agent(desk.machine, event={"type": "PLAN", "tasks": ["pay"]})
        if engine == "async"
        else await asyncio.to_thread(
            run_agent_sync, desk.machine, event={"type": "PLAN", "tasks": ["pay"]}
        )
    )
    assert res.waiting and res.status == "idle" and till.paid == []
