"""The troubleshooting table of the user's reference, row by row.

Each test is a row: the error's type, and the parts of its text that users look for. Ours may say
more. Where a ruling leads elsewhere than a row says, the test shows what happens instead, and
docs/differences.md lists it.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import logging
import re
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any, TypedDict

import pytest
from pydantic import BaseModel, ConfigDict, Field

from guardchart import (
    Interpreter,
    MachineLogic,
    SimulatedClock,
    SnapshotDriftError,
    SyncInterpreter,
    create_machine,
    read_recording,
)
from guardchart.agents import (
    AgentTracePlugin,
    BudgetPlugin,
    FakeModel,
    RetryPolicy,
    agent_logic,
    budget_guards,
    load_chart,
    pending_approval,
    run_agent,
    run_agent_sync,
    spawn_agent,
    structured_output,
    tool,
    tool_registry,
    validate_agent_chart,
    validate_structured,
)
from guardchart.errors import AgentConfigError, NotSupportedError, SnapshotTooLargeError
from guardchart.persistence import DueTimerScanner, MemoryStore, SQLiteStore
from tests.agents.trees import Desk, supervisor_chart, supervisor_logic

ROOT = Path(__file__).resolve().parent.parent
AT_ONCE = RetryPolicy(delay_s=0)


def shelve(book: str) -> str:
    """Put a book back on its shelf."""
    return f"{book} is back"


def lend(book: str, days: int) -> str:
    """Lend a book."""
    return f"{book} for {days} days"


def sync_model(*script: Any) -> FakeModel:
    return FakeModel(script, is_async=False)


def run(*script: Any, **given: Any) -> Any:
    given = {"prompt": "please", "retry": AT_ONCE, **given}
    return run_agent_sync(sync_model(*script), **given)


def lending(**options: Any) -> Any:
    return tool_registry(tool(lend, side_effect=True, timeout_s=5), **options)


def without(package: str, code: str) -> str:
    """What importing and calling says in a process that lacks a package."""
    blocked = (
        "import sys, importlib.abc\n"
        "class Block(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.partition('.')[0] == {package!r}:\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Block())\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", blocked + code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode != 0, done.stdout
    return done.stderr.strip().splitlines()[-1]


# --- agents that spawn agents ------------------------------------------------------------------


def test_spawn_agent_requires_an_explicit_budget() -> None:
    with pytest.raises(AgentConfigError, match="spawn_agent requires an explicit budget="):
        spawn_agent(None, sync_model(), budget=None)


def test_sub_agent_tools_are_not_in_the_parents_allow_list() -> None:
    parts = r"sub-agent tools \['shelve'\] are not in the parent's allow-list \['lend'\]"
    registry = tool_registry(shelve)
    with pytest.raises(AgentConfigError, match=parts):
        spawn_agent(None, sync_model(), registry, budget={"max_turns": 1}, parent_tools=["lend"])
    worker = spawn_agent(None, sync_model(), registry, budget={"max_turns": 1}, name="worker")
    machine = create_machine(supervisor_chart("lend"), supervisor_logic(worker))
    live = SyncInterpreter(machine).start()
    live.send("PLAN", tasks=["tidy up"])
    assert isinstance(live.error, AgentConfigError) and re.search(parts, str(live.error))


def test_pass_the_child_chart_as_a_dict() -> None:
    with pytest.raises(AgentConfigError, match="pass the child chart as a dict"):
        spawn_agent(create_machine(load_chart()), sync_model(), budget={"max_turns": 1})  # type: ignore[arg-type]


async def test_a_hand_off_without_a_task_stops_the_supervisor() -> None:
    desk = Desk("sync", {})
    live = await desk.start()
    receipt = await desk.send({"type": "HANDOFF", "from": "planner", "to": "worker"})
    assert live.status == "error"  # a ruling: `error`, where the row says it stops
    assert "spawnWorker: no task (event.task or context['task'])" in str(live.error)
    assert isinstance(receipt.error, AgentConfigError)


def test_a_supervisor_without_a_transition_for_budget_exceeded_stays_running(
    caplog: pytest.LogCaptureFixture,
) -> None:
    chart = supervisor_chart()
    del chart["states"]["running"]["states"]["workers"]["states"]["working"]["on"][
        "BUDGET_EXCEEDED"
    ]
    usage = {"usage": {"input_tokens": 9, "output_tokens": 9}}
    worker = spawn_agent(
        None, sync_model({"text": "one", **usage}), budget={"max_turns": 1}, name="worker"
    )
    logic = supervisor_logic(worker)
    logic.guards["allWorkersReported"] = lambda context, event: False
    plugin = BudgetPlugin(max_total_tokens=5)
    live = SyncInterpreter(create_machine(chart, logic), plugins=[plugin]).start()
    live.send("PLAN", tasks=["one"])
    with caplog.at_level(logging.INFO, "guardchart"):
        live.send({"type": "HANDOFF", "from": "planner", "to": "worker", "task": "two"})
    assert live.status == "running" and live.context["budget_exceeded"] is True
    assert "global budget exceeded; not spawning" in caplog.text and not live.actors
    live.stop()


def test_the_child_chart_never_runs_notify_parent() -> None:
    chart = load_chart()
    for end in ("done", "error"):
        del chart["states"][end]["entry"]
    with pytest.raises(AgentConfigError, match="the child chart never runs 'notifyParent'"):
        spawn_agent(chart, sync_model(), budget={"max_turns": 1})


def test_a_trace_is_not_a_recording(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    trace = AgentTracePlugin(str(path))
    run({"text": "Hello."}, plugins=[trace], tracer=trace)
    assert path.read_text()
    with pytest.raises(Exception, match="no inspector messages.*not a recording"):
        read_recording(path)


# --- what is not installed, or not in its range ------------------------------------------------


def test_the_agents_extra_does_not_exist_because_pydantic_comes_along() -> None:
    """A ruling: the row's MissingExtraError cannot occur."""
    requires = importlib.metadata.requires("guardchart") or []
    assert any(re.match(r"pydantic>=[\d.]+$", each) for each in requires)


def test_langgraph_is_not_installed() -> None:
    said = without("langgraph", "import guardchart.langgraph")
    assert "MissingExtraError" in said and "pip install" in said and "langgraph" in said


def test_langgraph_is_outside_of_the_tested_range() -> None:
    graph = pytest.importorskip("guardchart.langgraph")
    parts = r"is tested with langgraph >=[\d.]+,<[\d.]+; found 0\.1\.9"
    with pytest.raises(ImportError, match=parts):
        graph.check_langgraph_version("0.1.9")


@pytest.mark.parametrize(
    ("package", "code"),
    [
        ("openai", "import guardchart.openai as m; m.openai_model(object())"),
        ("anthropic", "import guardchart.anthropic as m; m.anthropic_model(object())"),
    ],
)
def test_a_providers_sdk_is_not_installed(package: str, code: str) -> None:
    said = without(package, code)
    assert "MissingExtraError" in said and "pip install" in said and package in said


def test_instructor_is_asked_for_but_not_installed() -> None:
    code = (
        "from guardchart.agents import structured_output\n"
        "import pydantic\n"
        "class Shelf(pydantic.BaseModel): row: int\n"
        "structured_output(Shelf, use_instructor=True)"
    )
    said = without("instructor", code)
    assert "AgentConfigError: use_instructor=True but instructor is not installed" in said


# --- LangGraph ---------------------------------------------------------------------------------


def _node(chart: Any, logic: Any = None, **options: Any) -> Any:
    graph = pytest.importorskip("guardchart.langgraph")
    options = {"event_from_state": lambda state: state.get("event"), **options}
    return graph.statechart_node(chart, logic, **options)


def test_something_else_wrote_the_state_key() -> None:
    node = _node(load_chart(), agent_logic(sync_model()))
    parts = r"state\['xsm'\] must be a snapshot dict or JSON string"
    with pytest.raises(AgentConfigError, match=parts):
        node({"xsm": 7, "event": None})


def test_a_built_machine_already_carries_its_logic() -> None:
    logic = agent_logic(sync_model())
    # The row says MachineNode, the class of its time.
    with pytest.raises(AgentConfigError, match=r"a built Machine\w* already carries its logic"):
        _node(create_machine(load_chart(), logic), logic)


def test_an_active_state_has_no_route() -> None:
    graph = pytest.importorskip("guardchart.langgraph")
    states: dict[str, Any] = {
        "open": {"on": {"X": "shut"}},
        "shut": {"type": "final"},
        "lost": {"on": {"X": "shut"}},
    }
    chart = {"id": "desk", "initial": "open", "states": states}
    with pytest.raises(AgentConfigError, match=r"route_by_statechart\('desk'\): no route for"):
        graph.route_by_statechart(chart, {"open": "a"})
    route = graph.route_by_statechart(chart, {"open": "a", "shut": "b"})
    with pytest.raises(AgentConfigError, match=r"no route for active states \['desk\.lost'\]"):
        route({"xsm": {"state_ids": ["desk.lost"]}})


def _inner_graph(node: Any, again: bool, **options: Any) -> Any:
    pytest.importorskip("langgraph")
    from langgraph.graph import END, START, StateGraph

    class Held(TypedDict, total=False):
        n: int

    graph: Any = StateGraph(Held)
    graph.add_node("work", node)
    graph.add_edge(START, "work")
    graph.add_edge("work", "work" if again else END)
    return graph.compile(**options)


def _failure_of_the_graph(graph: Any, **options: Any) -> BaseException:
    from guardchart import MachineLogic
    from guardchart.langgraph import langgraph_service

    seen: list[BaseException] = []
    service = langgraph_service(graph, input_from=lambda ctx, e: {"n": 0}, **options)
    invoke = {"src": "graph", "onError": {"target": "bad", "actions": "note"}, "onDone": "good"}
    states: dict[str, Any] = {
        "busy": {"invoke": invoke},
        "bad": {"type": "final"},
        "good": {"type": "final"},
    }
    logic = MachineLogic(
        services={"graph": service}, actions={"note": lambda c, e: seen.append(e.error)}
    )
    machine = create_machine({"id": "host", "initial": "busy", "states": states}, logic)
    assert asyncio.run(run_agent(machine)).final_state == "host.bad"
    return seen[0]


def test_the_inner_graph_of_a_service_looped() -> None:
    graph = _inner_graph(lambda state: {"n": state["n"] + 1}, again=True)
    error = _failure_of_the_graph(graph, config={"recursion_limit": 3})
    assert type(error).__name__ == "GraphRecursionError"


def test_the_inner_graph_of_a_service_called_interrupt() -> None:
    pytest.importorskip("langgraph")
    from langgraph.checkpoint.memory import InMemorySaver
    from langgraph.types import interrupt

    graph = _inner_graph(
        lambda state: {"n": interrupt("how many?")}, again=False, checkpointer=InMemorySaver()
    )
    error = _failure_of_the_graph(graph, config={"configurable": {"thread_id": "inner"}})
    assert type(error).__name__ == "GraphInterruptedError"
    assert str(error).startswith("LangGraph interrupt(): the graph is paused, asking [")


def test_a_snapshot_of_another_machine_is_restored() -> None:
    charts = [{"id": each, "initial": "s", "states": {"s": {}}} for each in ("a", "b")]
    first, second = map(create_machine, charts)
    saved = SyncInterpreter(first).start().get_snapshot()
    parts = "snapshot was taken from machine 'a' but is being restored into 'b'"
    with pytest.raises(SnapshotDriftError, match=parts):
        SyncInterpreter.from_snapshot(saved, second)
    with pytest.raises(SnapshotDriftError, match=parts):
        _node(second)({"xsm": json.loads(saved), "event": "X"})


def test_an_agent_node_times_out_by_itself() -> None:
    """A ruling: the row's cause is gone, deadlines are served inside of a node."""
    model = FakeModel([{"hang": True}, {"text": "Here."}])
    options = {"model_timeout_s": 0.05, "retry": AT_ONCE}
    node = _node(load_chart(), agent_logic(model, **options))  # type: ignore[arg-type]
    out = node({"event": {"type": "START", "prompt": "hello"}})
    assert out["xsm"]["context"]["result"] == "Here."
    assert out["xsm"]["context"]["last_failure"] == "TimeoutError"


# --- tools -------------------------------------------------------------------------------------


def test_a_chart_lists_a_tool_that_is_not_registered() -> None:
    chart = load_chart()
    chart["states"]["awaiting_tool"]["meta"]["tools"] = ["shelf"]
    machine = create_machine(chart, agent_logic(sync_model(), tool_registry(shelve)))
    parts = "meta.tools lists 'shelf', which is not in the tool registry"
    for check in (lambda: validate_agent_chart(machine), lambda: run_agent_sync(machine)):
        with pytest.raises(AgentConfigError, match=parts) as caught:
            check()
        assert "state 'toolLoop.awaiting_tool'" in str(caught.value)


@pytest.mark.parametrize("registered", [True, False])
def test_the_model_named_a_tool_that_is_not_allowed_here(registered: bool) -> None:
    chart = load_chart()
    for state in ("awaiting_model", "awaiting_tool"):
        chart["states"][state]["meta"]["tools"] = ["shelve"]
    tools = tool_registry(shelve, lend) if registered else tool_registry(shelve)
    call = {"tool": "lend", "args": {"book": "Emma", "days": 3}}
    res = run_agent_sync(chart, agent_logic(sync_model(call), tools), prompt="x")
    assert res.error == {"kind": "tool_denied", "message": "tool(s) ['lend'] not allowed here"}


@pytest.mark.parametrize(
    "args",
    [{"book": "Emma", "days": "31337"}, {"book": "Emma"}, {"book": "Emma", "days": 3, "zzz": 1}],
)
def test_arguments_do_not_match_the_schema(args: Any) -> None:
    res = run({"tool": "lend", "args": args}, tools=lending())
    assert res.error["kind"] == "tool_denied" and not res.waiting
    assert "invalid arguments (" in res.error["message"]
    assert "31337" not in res.error["message"] and "zzz" not in res.error["message"]


def test_too_many_calls_or_duplicate_ids_in_one_turn() -> None:
    call = {"tool": "shelve", "args": {"book": "Emma"}}
    res = run({"tool_calls": [call] * 9}, tools=tool_registry(shelve))
    assert res.error["kind"] == "tool_denied"
    assert "9 tool calls in one turn (max_tool_calls=8)" in res.error["message"]
    res = run({"tool_calls": [{**call, "id": "c1"}] * 2}, tools=tool_registry(shelve))
    assert res.error["kind"] == "tool_denied"
    assert "duplicate tool call ids" in res.error["message"]
    nine = run({"tool_calls": [call] * 9}, {"text": "Ok."}, tools=tool_registry(shelve),
               max_tool_calls=9)  # fmt: skip
    assert nine.output == "Ok."


@pytest.mark.parametrize("days", [-1, 10**12])
def test_a_bare_int_reaches_the_reviewer_and_a_range_does_not(days: int) -> None:
    call = {"tool": "lend", "args": {"book": "Emma", "days": days}}
    res = run(call, tools=lending())
    assert res.waiting and pending_approval(res.context)[0]["arguments"]["days"] == days

    def lend_for(book: str, days: Annotated[int, Field(gt=0, le=60)]) -> str:
        """Lend a book."""
        return "lent"

    ranged = tool_registry(tool(lend_for, name="lend", side_effect=True))
    res = run(call, tools=ranged)
    assert not res.waiting and res.error["kind"] == "tool_denied"


# --- budgets, retries, the script --------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "message"),
    [
        ({"max_turns": 1}, "turn limit reached"),
        ({"max_tokens": 10}, "token budget exhausted"),
        ({"max_usd": 0.01}, "cost budget exhausted"),
    ],
)
def test_a_budget_is_spent(limit: dict[str, Any], message: str) -> None:
    usage = {"input_tokens": 9, "output_tokens": 9, "cost_usd": 0.5}
    call = {"tool": "shelve", "args": {"book": "Emma"}, "usage": usage}
    res = run(call, {"text": "Ok."}, tools=tool_registry(shelve), **limit)
    assert res.error == {"kind": "budget", "message": message} and not res.ok


def test_the_script_of_a_fake_model_is_exhausted() -> None:
    failures: list[Any] = []

    class Watch:
        def on_service_error(self, interpreter: Any, invocation: Any, error: Any) -> None:
            failures.append(error)

    res = run(plugins=[Watch()])
    assert res.error == {"kind": "retries", "message": "retries exhausted"}
    assert "FakeModel script exhausted after 0 call(s)" in str(failures[0])


def test_after_a_restart_only_the_next_turn_is_asked_for() -> None:
    call = {"tool": "lend", "args": {"book": "Emma", "days": 3}}
    parked = run(call, tools=lending(), key="desk-1")
    res = run_agent_sync(
        sync_model({"text": "Enjoy."}),
        tools=lending(),
        key="desk-1",
        snapshot=parked.snapshot,
        approve=True,
    )
    assert res.output == "Enjoy." and res.ok


@pytest.mark.parametrize("wrong", ["raises", "hangs"])
async def test_model_failures_end_in_retries(wrong: str) -> None:
    item: Any = RuntimeError("down") if wrong == "raises" else {"hang": True}
    clock = SimulatedClock()
    logic = agent_logic(FakeModel([item] * 3), retry=RetryPolicy(max_attempts=3))
    live = await Interpreter(create_machine(load_chart(), logic), clock=clock).start()
    await live.send("START", prompt="please", wait=True)
    for _ in range(6):
        await clock.increment(61_000)
    assert live.current_state_ids == {"toolLoop.error"}
    assert live.context["error"]["kind"] == "retries" and live.context["turns"] == 3


def test_tool_failures_end_in_retries() -> None:
    def broken(book: str) -> str:
        """Fail."""
        raise OSError("no shelf")

    call = {"tool": "broken", "args": {"book": "Emma"}}
    res = run(call, call, call, tools=tool_registry(broken))
    assert res.error["kind"] == "retries" and res.context["last_failure"] == "OSError"


def test_an_async_model_under_the_sync_interpreter() -> None:
    failures: list[Any] = []

    class Watch:
        def on_service_error(self, interpreter: Any, invocation: Any, error: Any) -> None:
            failures.append(error)

    logic = agent_logic(FakeModel([{"text": "x"}] * 3), sync=True, retry=AT_ONCE)
    live = SyncInterpreter(create_machine(load_chart(), logic), plugins=[Watch()]).start()
    live.send("START", prompt="please")
    live.settle()
    assert isinstance(failures[0], TypeError)
    assert "the model returned an awaitable under SyncInterpreter" in str(failures[0])


# --- people ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("approve", "lent"), [(True, ["Emma"]), (False, []), ("event", ["Emma"]), ("reject", [])]
)
def test_an_agent_parks_for_a_person_and_goes_on_after_the_decision(
    approve: Any, lent: list[str]
) -> None:
    done: list[str] = []

    def lend(book: str) -> str:
        """Lend a book."""
        done.append(book)
        return "lent"

    tools = tool_registry(tool(lend, side_effect=True))
    model = sync_model({"tool": "lend", "args": {"book": "Emma"}}, {"text": "Ok."})
    machine = create_machine(load_chart(), agent_logic(model, tools))
    parked = run_agent_sync(machine, prompt="lend Emma", key="desk-2")
    assert parked.final_state == "toolLoop.awaiting_human" and parked.waiting and done == []
    given: dict[str, Any] = {"approve": approve}
    if approve == "event":
        ids = [each["id"] for each in pending_approval(parked.context)]
        given = {"event": {"type": "HUMAN_APPROVED", "call_ids": ids}}
    elif approve == "reject":
        given = {"event": "HUMAN_REJECTED"}
    res = run_agent_sync(machine, snapshot=parked.snapshot, key="desk-2", **given)
    assert res.output == "Ok." and done == lent


@pytest.mark.parametrize("payload", [{}, {"call_ids": []}, {"call_ids": ["another"]}])
def test_an_approval_that_does_not_name_the_pending_ids_is_denied(payload: dict[str, Any]) -> None:
    model = sync_model({"tool": "lend", "args": {"book": "Emma", "days": 3}}, {"text": "Ok."})
    live = SyncInterpreter(create_machine(load_chart(), agent_logic(model, lending()))).start()
    live.send("START", prompt="lend Emma")
    assert live.send("HUMAN_APPROVED", **payload).denied
    ids = [each["id"] for each in pending_approval(live.context)]
    assert not live.send("HUMAN_APPROVED", call_ids=ids).denied
    assert live.context["result"] == "Ok."


def test_a_deadline_that_passed_while_nothing_ran_fires_on_entry() -> None:
    """A ruling: a reload does not arm it anew."""
    clock = SimulatedClock()
    call = {"tool": "lend", "args": {"book": "Emma", "days": 3}}
    logic = agent_logic(sync_model(call), lending(), human_timeout_s=60)
    machine = create_machine(load_chart(), logic)
    parked = run_agent_sync(machine, prompt="lend Emma", clock=clock)
    assert parked.waiting
    clock.increment(61_000)
    late = run_agent_sync(machine, snapshot=parked.snapshot, clock=clock)
    assert late.error == {"kind": "human_timeout", "message": "no human decision in time"}


def test_a_deadline_that_passed_while_nothing_ran_is_fired_by_the_scanner() -> None:
    call = {"tool": "lend", "args": {"book": "Emma", "days": 3}}
    logic = agent_logic(sync_model(call), lending(), human_timeout_s=60)
    machine, store = create_machine(load_chart(), logic), MemoryStore()
    assert run_agent_sync(machine, prompt="lend Emma", store=store, key="t").waiting
    in_an_hour = store.load("t").updated_at + 3_600_000  # type: ignore[union-attr]
    assert DueTimerScanner(store, lambda key: machine).run_once(now=in_an_hour).delivered
    saved = store.load("t").snapshot  # type: ignore[union-attr]
    assert saved["context"]["error"]["kind"] == "human_timeout"


# --- stores ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
def test_a_prompt_larger_than_the_store_takes_creates_no_ticket(kind: str, tmp_path: Path) -> None:
    store: Any = MemoryStore(max_snapshot_bytes=10_000)
    if kind == "sqlite":
        store = SQLiteStore(tmp_path / "runs.db", max_snapshot_bytes=10_000)
    model = sync_model({"text": "Long."}, {"text": "Short."})
    with pytest.raises(SnapshotTooLargeError):
        run_agent_sync(model, prompt="long " * 3_000, store=store, key="ticket")
    assert store.load("ticket") is None and model.calls == []
    assert run_agent_sync(model, prompt="short", store=store, key="ticket").ok
    if kind == "sqlite":
        store.disconnect()


# --- structured output -------------------------------------------------------------------------


class Shelf(BaseModel):
    model_config = ConfigDict(extra="forbid")
    row: int = Field(gt=0)


def test_prose_around_json_is_not_valid_json_for_the_strict_parser() -> None:
    prose = 'Sure: {"row": 4} there you are'
    assert validate_structured(Shelf, prose, use_instructor=False) == (False, "not valid JSON")
    options = structured_output(Shelf, retries=0, use_instructor=False)
    res = run({"text": prose}, **options)
    message = "model output failed validation (not valid JSON)"
    assert res.error == {"kind": "output", "message": message}


def test_replies_keep_failing_the_schema() -> None:
    res = run({"text": '{"row": -31337}'}, {"text": '{"row": 0}'},
              **structured_output(Shelf, retries=1))  # fmt: skip
    assert res.error["kind"] == "output"
    assert res.error["message"].startswith("model output failed validation (row: ")
    assert "-31337" not in res.error["message"] and res.output is None


@pytest.mark.parametrize("retries", [-1, True, "2", None, 1.5])
def test_retries_must_be_an_int(retries: Any) -> None:
    with pytest.raises(AgentConfigError, match="retries must be an int >= 0"):
        structured_output(Shelf, retries=retries)


def test_an_output_model_that_cannot_be_resolved_is_an_error_of_construction() -> None:
    chart = load_chart()
    chart["states"]["awaiting_model"]["meta"]["output_model"] = "tests.nowhere:Shelf"
    for build in (
        lambda: agent_logic(sync_model(), output_model="tests.nowhere:Shelf"),
        lambda: create_machine(chart, agent_logic(sync_model())),
    ):
        with pytest.raises(AgentConfigError, match="output_model.*cannot be"):
            build()


# --- pydantic-ai -------------------------------------------------------------------------------

ASKING: dict[str, Any] = {
    "id": "desk",
    "initial": "asking",
    "context": {"tokens_in": 0, "tokens_out": 0, "turns": 0, "error": None},
    "states": {
        "asking": {
            "invoke": {
                "src": "ask",
                "onDone": "answered",
                "onError": {"target": "failed", "actions": "note"},
            }
        },
        "answered": {"on": {"AGAIN": [{"guard": "underTokenBudget", "target": "asking"}]}},
        "failed": {"type": "final"},
    },
}


def _asking(agent: Any, **options: Any) -> Any:
    bridge = pytest.importorskip("guardchart.pydantic_ai")
    logic = MachineLogic(
        services={"ask": bridge.pydantic_ai_service(agent, prompt_from=lambda context, event: "?")},
        actions={"note": lambda context, event: {"error": type(event.data).__name__}},
    )
    return create_machine(ASKING, logic.merge(budget_guards(**options)))


def test_pydantic_ai_is_not_installed() -> None:
    pytest.importorskip("guardchart.pydantic_ai")
    said = without("pydantic_ai", "import guardchart.pydantic_ai")
    assert "MissingExtraError" in said and "pip install" in said and "pydantic-ai" in said


async def test_pydantic_ai_gives_up_on_its_own_output_validation() -> None:
    pytest.importorskip("guardchart.pydantic_ai")
    from pydantic_ai import Agent, ModelRetry
    from pydantic_ai.models.test import TestModel

    agent = Agent(TestModel(custom_output_text="no"), retries=1)

    @agent.output_validator
    def never(text: str) -> str:
        raise ModelRetry("again")

    live = await Interpreter(_asking_unguarded(agent)).start()
    await live.idle()
    assert live.context["error"] == "UnexpectedModelBehavior"


def _asking_unguarded(agent: Any) -> Any:
    """The agent has an output validator, so its tools are left to itself."""
    bridge = pytest.importorskip("guardchart.pydantic_ai")
    service = bridge.pydantic_ai_service(agent, prompt_from=lambda c, e: "?", guard=False)
    note = {"note": lambda context, event: {"error": type(event.data).__name__}}
    logic = MachineLogic(services={"ask": service}, actions=note).merge(budget_guards())
    return create_machine(ASKING, logic)


def test_a_pydantic_ai_service_under_the_sync_interpreter() -> None:
    pytest.importorskip("guardchart.pydantic_ai")
    from pydantic_ai import Agent
    from pydantic_ai.models.test import TestModel

    with pytest.raises(NotSupportedError, match="(?i)service 'ask' is async and not supported"):
        SyncInterpreter(_asking(Agent(TestModel()))).start()


async def test_a_pydantic_ai_service_is_charged_without_usage_logic() -> None:
    """A ruling: budgets hold whether or not the chart records the usage itself."""
    pytest.importorskip("guardchart.pydantic_ai")
    from pydantic_ai import Agent
    from pydantic_ai.models.test import TestModel

    machine = _asking(Agent(TestModel(custom_output_text="A long answer")), max_tokens=10)
    live = await Interpreter(machine).start()
    await live.idle()
    assert live.context["tokens_in"] + live.context["tokens_out"] >= 10
    receipt = await live.send("AGAIN", wait=True)
    assert receipt is not None and receipt.denied and live.context["turns"] == 1
    live.stop()
