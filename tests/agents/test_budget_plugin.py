"""One budget for several agents: counted when reported, tripped once, never refunded."""

from __future__ import annotations

import json
import math
import threading
from typing import Any

import pytest

from guardchart import (
    Interpreter,
    Machine,
    MachineLogic,
    SimulatedClock,
    SyncInterpreter,
    create_machine,
)
from guardchart.agents import (
    AgentConfigError,
    BudgetPlugin,
    FakeModel,
    agent_logic,
    load_chart,
)
from guardchart.kernel import Event

SPENT = {"turns": 2, "input_tokens": 60, "output_tokens": 40, "cost_usd": 0.5}
REPORTS = ("AGENT_DONE", "AGENT_FAILED")


def _desk(**logic: Any) -> Machine:
    """A parent that collects reports until it is told that the budget is gone."""
    note = {"actions": "note"}
    actions = {
        "note": lambda context, event: {
            "log": [*context["log"], (event.type, context.get("budget_exceeded", False))]
        },
        **logic.pop("actions", {}),
    }
    chart = {
        "id": "desk",
        "initial": "open",
        "context": {"log": [], **logic.pop("context", {})},
        "on": logic.pop("anywhere", {}),
        "states": {
            "open": {
                "on": {
                    "AGENT_DONE": note,
                    "AGENT_FAILED": note,
                    "BUDGET_EXCEEDED": {"target": "closed", "actions": "note"},
                    **logic.pop("on", {}),
                },
            },
            "closed": {"on": {"AGENT_DONE": note, "AGENT_FAILED": note}},
        },
    }
    return create_machine(chart, MachineLogic(actions=actions, **logic))


def _started(
    plugin: BudgetPlugin, clock: SimulatedClock | None = None, **logic: Any
) -> SyncInterpreter:
    return SyncInterpreter(_desk(**logic), plugins=[plugin], clock=clock).start()


# --- wiring ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["max_total_usd", "max_total_tokens"])
@pytest.mark.parametrize("value", ["5", True, math.nan, -1, math.inf, [], {}])
def test_a_limit_that_could_not_be_enforced_is_refused(name: str, value: Any) -> None:
    with pytest.raises(AgentConfigError, match=rf"BudgetPlugin: {name}"):
        BudgetPlugin(**{name: value})


def test_a_fraction_of_a_token_is_refused() -> None:
    with pytest.raises(AgentConfigError, match="max_total_tokens must be an int"):
        BudgetPlugin(max_total_tokens=2.5)  # type: ignore[arg-type]


def test_a_plugin_without_a_limit_is_refused() -> None:
    with pytest.raises(AgentConfigError, match="set max_total_usd, max_total_tokens or both"):
        BudgetPlugin()


@pytest.mark.parametrize("count", [0, -1, True, 1.0, "9", None])
def test_max_tracked_agents_is_a_positive_int(count: Any) -> None:
    with pytest.raises(AgentConfigError, match="max_tracked_agents"):
        BudgetPlugin(1.0, max_tracked_agents=count)


# --- counting ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", REPORTS)
def test_every_report_is_added_to_the_total_and_to_its_agent(kind: str) -> None:
    desk = _started(BudgetPlugin(10.0))
    desk.send(kind, agent_id="desk:a-1", usage=SPENT)
    desk.send(kind, agent_id="desk:a-2", usage=SPENT)
    desk.send(kind, agent_id="desk:a-1", usage=SPENT)
    context = desk.context
    assert context["total_usage"] == {
        "turns": 6,
        "input_tokens": 180,
        "output_tokens": 120,
        "cost_usd": 1.5,
    }
    assert list(context["usage_by_agent"]) == ["desk:a-2", "desk:a-1"]
    assert context["usage_by_agent"]["desk:a-1"]["turns"] == 4
    assert not context.get("budget_exceeded")


def test_other_events_count_for_nothing() -> None:
    desk = _started(BudgetPlugin(10.0))
    desk.send("SOMETHING", usage=SPENT)
    assert "total_usage" not in desk.context


def test_one_event_counts_once_however_often_it_is_seen() -> None:
    plugin = BudgetPlugin(10.0)
    desk = _started(plugin)
    event = Event("AGENT_DONE", {"agent_id": "a", "usage": SPENT})
    plugin.on_before_send(desk, event)
    plugin.on_before_send(desk, event)
    plugin.on_event_received(desk, event)
    assert desk.context["total_usage"]["turns"] == 2
    # Another event, though it may live where the first one lived.
    for _ in range(200):
        desk.send("AGENT_DONE", agent_id="a", usage=SPENT)
    assert desk.context["total_usage"]["turns"] == 402


def test_a_report_to_a_machine_that_no_longer_runs_is_not_counted() -> None:
    plugin = BudgetPlugin(10.0)
    desk = _started(plugin)
    desk.send("AGENT_DONE", agent_id="a", usage=SPENT)
    desk.stop()
    plugin.on_before_send(desk, Event("AGENT_DONE", {"agent_id": "a", "usage": SPENT}))
    assert desk.context["total_usage"]["turns"] == 2


def test_a_report_that_passed_by_send_is_counted_when_it_is_received() -> None:
    plugin = BudgetPlugin(max_total_tokens=100)
    desk = _started(plugin)
    plugin.on_event_received(desk, Event("AGENT_DONE", {"agent_id": "a", "usage": SPENT}))
    assert desk.context["total_usage"]["turns"] == 2
    assert desk.context["log"][-1] == ("BUDGET_EXCEEDED", True)


@pytest.mark.parametrize(
    "usage",
    [
        None,
        "all of it",
        [],
        {},
        {"turns": -5, "input_tokens": -1, "output_tokens": math.nan, "cost_usd": -9.0},
        {"turns": True, "input_tokens": "9", "output_tokens": None, "cost_usd": [1]},
    ],
)
def test_usage_that_is_no_honest_number_refunds_nothing_and_breaks_nothing(usage: Any) -> None:
    desk = _started(BudgetPlugin(10.0))
    desk.send("AGENT_DONE", agent_id="a", usage=SPENT)
    desk.send("AGENT_DONE", agent_id="b", usage=usage)
    desk.send("AGENT_DONE", agent_id="c")
    assert desk.context["total_usage"] == SPENT
    assert not desk.faults


@pytest.mark.parametrize("cost", [math.nan, math.inf, 1e300])
def test_an_absurd_cost_exhausts_the_budget_and_stays_json(cost: float) -> None:
    desk = _started(BudgetPlugin(10.0))
    desk.send("AGENT_DONE", agent_id="a", usage={"cost_usd": cost})
    assert desk.context["budget_exceeded"] is True
    json.dumps(desk.context["total_usage"], allow_nan=False)


@pytest.mark.parametrize("agent_id", [None, 7, "", [], {"a": 1}])
def test_a_report_without_a_proper_name_counts_in_the_total_only(agent_id: Any) -> None:
    desk = _started(BudgetPlugin(10.0))
    desk.send("AGENT_DONE", agent_id=agent_id, usage=SPENT)
    assert desk.context["total_usage"]["turns"] == 2 and desk.context["usage_by_agent"] == {}


def test_names_are_bounded_and_storable() -> None:
    desk = _started(BudgetPlugin(10.0))
    desk.send("AGENT_DONE", agent_id="\ud800" + "x" * 5_000, usage=SPENT)
    (name,) = desk.context["usage_by_agent"]
    assert len(name) == 200 and name.startswith("\ufffdx")


def test_the_newest_agents_are_tracked_and_the_total_is_never_cut() -> None:
    desk = _started(BudgetPlugin(1_000.0, max_tracked_agents=3))
    for number in range(10):
        desk.send("AGENT_DONE", agent_id=f"a-{number}", usage=SPENT)
    assert list(desk.context["usage_by_agent"]) == ["a-7", "a-8", "a-9"]
    assert desk.context["total_usage"]["turns"] == 20


@pytest.mark.parametrize("forged", ["lots", 7, [1], {"cost_usd": "none"}, {"cost_usd": math.nan}])
def test_totals_forged_into_no_numbers_count_as_spent(forged: Any) -> None:
    plugin = BudgetPlugin(10.0)
    under = plugin.guards().guards["underGlobalBudget"]
    assert plugin.exceeded(forged) and not under({"total_usage": forged}, None)
    desk = _started(plugin, context={"usage_by_agent": "none"})
    desk.update_context({"total_usage": forged})
    desk.send("AGENT_DONE", agent_id="a", usage=SPENT)
    assert desk.context["budget_exceeded"] is True


# --- the limit ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "reports"),
    [
        ({"max_total_usd": 1.0}, 2),
        ({"max_total_tokens": 200}, 2),
        ({"max_total_usd": 100.0, "max_total_tokens": 101}, 2),
        ({"max_total_usd": 0}, 1),
    ],
)
def test_the_report_that_reaches_a_limit_trips_it_once_and_is_still_collected(
    limits: Any, reports: int
) -> None:
    desk = _started(BudgetPlugin(**limits))
    for _ in range(reports + 2):
        desk.send("AGENT_DONE", agent_id="a", usage=SPENT)
    log = desk.context["log"]
    # The guard and action of the tripping report see the new totals; the event follows it.
    assert log[reports - 1] == ("AGENT_DONE", True)
    assert log[reports] == ("BUDGET_EXCEEDED", True)
    assert [each[0] for each in log].count("BUDGET_EXCEEDED") == 1
    assert desk.context["total_usage"]["turns"] == 2 * (reports + 2)


def test_the_event_carries_the_totals() -> None:
    told: list[Any] = []
    desk = _started(
        BudgetPlugin(max_total_tokens=1),
        actions={"note": lambda context, event: told.append(dict(event.payload))},
    )
    desk.send("AGENT_DONE", agent_id="a", usage=SPENT)
    assert told[-1] == {"total_usage": SPENT}


def test_the_guard_turns_false_with_the_flag_or_with_the_totals() -> None:
    plugin = BudgetPlugin(max_total_usd=1.0)
    under = plugin.guards().guards["underGlobalBudget"]
    assert under({}, None) and under({"total_usage": {"cost_usd": 0.99}}, None)
    assert not under({"total_usage": {"cost_usd": 1.0}}, None)
    for flag in (True, 1, "yes", [0]):
        assert not under({"budget_exceeded": flag}, None)
    # A flag taken back by somebody who edits the context changes nothing.
    assert not under({"budget_exceeded": False, "total_usage": {"cost_usd": 5}}, None)


def test_what_is_queued_behind_a_report_sees_its_totals() -> None:
    seen: list[Any] = []

    def burst(scope: Any, context: Any, event: Any, action: Any) -> None:
        scope.send("AGENT_DONE", agent_id="a", usage=SPENT)
        scope.send("ASK")

    desk = _started(
        BudgetPlugin(max_total_tokens=50),
        actions={
            "burst": burst,
            "look": lambda context, event: seen.append(context.get("budget_exceeded")),
        },
        anywhere={"GO": {"actions": "burst"}, "ASK": {"actions": "look"}},
    )
    desk.send("GO")
    assert seen == [True]


def test_one_plugin_counts_for_several_interpreters_on_several_threads() -> None:
    plugin = BudgetPlugin(1e9)
    desks = [_started(plugin) for _ in range(4)]

    def report(desk: SyncInterpreter) -> None:
        for number in range(50):
            desk.send("AGENT_DONE", agent_id=f"a-{number % 3}", usage=SPENT)

    threads = [threading.Thread(target=report, args=(desk,)) for desk in desks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [desk.context["total_usage"]["turns"] for desk in desks] == [100] * 4


# --- real agents -------------------------------------------------------------------------------


def _agents(script: list[Any], *, is_async: bool, **options: Any) -> dict[str, Any]:
    """The parent's action that hires two agents, and the agents."""

    def hire(scope: Any, context: Any, event: Any, action: Any) -> None:
        for task in ("one", "two"):
            scope.spawn("worker", f"worker-{task}", {"prompt": task})

    logic = agent_logic(FakeModel(script, is_async=is_async), **options)
    return {
        "actions": {"hire": hire},
        "services": {"worker": create_machine(load_chart(), logic)},
        "on": {"HIRE": {"actions": "hire"}},
    }


USED = {"input_tokens": 30, "output_tokens": 20, "cost_usd": 0.25}


def test_real_agents_report_what_they_spent_failures_included() -> None:
    script = [{"text": "A", "usage": USED}, ConnectionError("no"), ConnectionError("no")]
    clock = SimulatedClock()
    agents = _agents(script, is_async=False, budgets={"max_turns": 1})
    desk = _started(BudgetPlugin(10.0), clock, **agents)
    desk.send("HIRE")
    assert desk.context["log"] == [("AGENT_DONE", False)]
    clock.increment(60_000)  # the other one waits before it tries again, and may not
    context = desk.context
    assert context["log"] == [("AGENT_DONE", False), ("AGENT_FAILED", False)]
    assert context["total_usage"] == {"turns": 2, **USED}
    assert context["usage_by_agent"] == {
        "desk:worker-one": {"turns": 1, **USED},
        "desk:worker-two": {"turns": 1, "input_tokens": 0, "output_tokens": 0, "cost_usd": 0},
    }
    desk.stop()


async def test_real_agents_of_the_async_engine_trip_the_budget_once() -> None:
    script = [{"text": "A", "usage": USED}, {"text": "B", "usage": USED}]
    machine = _desk(**_agents(script, is_async=True))
    desk = Interpreter(machine, plugins=[BudgetPlugin(max_total_usd=0.5)])
    await desk.start()
    await desk.send("HIRE", wait=True)
    await desk.idle()
    context = desk.context
    assert [each[0] for each in context["log"]] == ["AGENT_DONE", "AGENT_DONE", "BUDGET_EXCEEDED"]
    assert context["total_usage"] == {
        "turns": 2,
        "input_tokens": 60,
        "output_tokens": 40,
        "cost_usd": 0.5,
    }
    assert desk.current_state_ids == {"desk.closed"}
    desk.stop()


def test_an_agent_reports_what_those_below_it_spent() -> None:
    notify = agent_logic(FakeModel([])).actions["notifyParent"]
    told: dict[str, Any] = {}

    class Scope:
        parent = object()
        id = "desk:lead-1"

        def send_parent(self, event: str, /, **payload: Any) -> None:
            told.update(payload, type=event)

    context = {"turns": 1, "tokens_in": 5, "cost_usd": 0.5, "total_usage": SPENT, "result": "x"}
    notify(Scope(), context, None, None)
    assert told["type"] == "AGENT_DONE"
    assert told["usage"] == {
        "turns": 3,
        "input_tokens": 65,
        "output_tokens": 40,
        "cost_usd": 1.0,
    }
