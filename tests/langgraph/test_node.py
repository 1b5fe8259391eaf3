"""`statechart_node` with any chart: events, state, receipts, deadlines, errors."""

from __future__ import annotations

import asyncio
import contextvars
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from langgraph.graph import END, START, StateGraph
from langgraph.types import Command, RetryPolicy, Send
from pydantic import BaseModel

from guardchart.errors import (
    AgentConfigError,
    ChartError,
    SnapshotDriftError,
    SnapshotError,
    StepError,
)
from guardchart.langgraph import statechart_node
from guardchart.runtime import MachineLogic, create_machine
from tests.langgraph.graphs import (
    COUNTER,
    DataState,
    ModelState,
    State,
    add,
    compiled,
    from_event,
    thread,
)

LOGIC = MachineLogic(actions={"add": add}, guards={"allowed": lambda c, e: c["n"] > 0})


def counter(**options: Any) -> Any:
    options.setdefault("event_from_state", from_event)
    return statechart_node(COUNTER, LOGIC, **options)


# --- building ----------------------------------------------------------------------------------


def test_node_takes_a_chart_in_any_form(tmp_path: Path) -> None:
    path = tmp_path / "chart.json"
    path.write_text(json.dumps(COUNTER))
    for form in (COUNTER, json.dumps(COUNTER), path):
        node = statechart_node(form, LOGIC, event_from_state=lambda s: "ADD")
        assert node({})["xsm"]["context"] == {"n": 1}
    built = create_machine(COUNTER, LOGIC)
    assert statechart_node(built, event_from_state=lambda s: "ADD")({})["xsm"]["rev"]


def test_node_is_refused_when_a_built_machine_comes_with_logic() -> None:
    with pytest.raises(AgentConfigError, match="already carries its logic"):
        statechart_node(create_machine(COUNTER, LOGIC), LOGIC, event_from_state=lambda s: None)


def test_node_is_refused_when_logic_misses_names() -> None:
    with pytest.raises(ChartError, match="add"):
        statechart_node(COUNTER, event_from_state=lambda s: None)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"event_key": "xsm"}, "must be different entries"),
        ({"state_key": ""}, "state_key must be a text"),
        ({"on_wait": "sleep"}, 'on_wait is "rest" or "interrupt"'),
        ({"event_from_state": "event"}, "event_from_state must be callable"),
        ({"signed_approvals": True}, "needs seal="),
        ({"event_from_state": asyncio.sleep}, "event_from_state must be a plain function"),
        ({"result_to_state": asyncio.sleep}, "result_to_state must be a plain function"),
        ({"serve_delay_s": float("nan")}, "serve_delay_s must be a number"),
        ({"messages_key": "messages"}, "context declares 'messages'"),
    ],
)
def test_node_is_refused_at_build_when_options_are_wrong(
    options: dict[str, Any], says: str
) -> None:
    with pytest.raises(AgentConfigError, match=says):
        counter(**options)


# --- state and events --------------------------------------------------------------------------


@pytest.mark.parametrize("schema", [State, ModelState, DataState])
async def test_node_goes_on_from_its_snapshot_whatever_the_state_class(schema: Any) -> None:
    app = compiled(counter(), schema)
    for n in (1, 2):
        out = app.invoke({"event": {"type": "ADD"}}, thread())
        assert out["xsm"]["context"]["n"] == n
    out = await app.ainvoke({"event": {"type": "ADD", "by": 5}}, thread())
    assert out["xsm"]["context"]["n"] == 7
    assert out["xsm"]["receipt"]["status"] == "taken"


def test_node_is_refused_when_a_state_class_lacks_the_key() -> None:
    class Other(BaseModel):
        event: Any = None

    with pytest.raises(AgentConfigError, match="has no field 'xsm': declare it"):
        compiled(counter(), Other).invoke({"event": "ADD"}, thread())


def test_node_passes_the_runtime_to_an_event_function_that_wants_it() -> None:
    seen: list[Any] = []

    def events(state: Any, runtime: Any) -> Any:
        seen.append(runtime)
        return runtime.context or "ADD"

    app = compiled(counter(event_from_state=events))
    out = app.invoke({}, thread(), context="RAISE")
    assert out["xsm"]["value"] == "high"
    assert seen[0].context == "RAISE" and callable(seen[0].stream_writer)
    assert counter(event_from_state=events)({})["xsm"]["context"] == {"n": 1}
    bound = counter(event_from_state=lambda state, kind="ADD": kind)
    assert bound({})["xsm"]["context"] == {"n": 1}, "a default binds a closure's variable"


@pytest.mark.parametrize("value", [7, [], {}, {"type": 3}, {"type": ""}, "", b"ADD", object()])
def test_node_is_refused_when_the_event_is_none_of_the_forms(value: Any) -> None:
    app = compiled(counter(event_from_state=lambda state: value))
    with pytest.raises(AgentConfigError, match="event_from_state must return an event"):
        app.invoke({}, thread())


def test_node_starts_the_machine_and_writes_it_when_there_is_no_event() -> None:
    out = compiled(counter()).invoke({"event": None}, thread())
    assert out["xsm"]["value"] == "low" and "receipt" not in out["xsm"]


def test_node_writes_nothing_when_there_is_no_event_and_no_change() -> None:
    app = compiled(counter())
    app.invoke({"event": "ADD"}, thread())
    before = app.get_state(thread()).values["xsm"]
    (update,) = app.stream({"event": None}, thread(), stream_mode="updates")
    assert not update["agent"]
    assert app.get_state(thread()).values["xsm"] == before


def test_node_clears_the_event_once_it_is_consumed() -> None:
    app = compiled(counter(event_key="event"))
    assert app.invoke({"event": "ADD"}, thread())["event"] is None
    out = app.invoke({"answer": 1}, thread())
    assert out["xsm"]["context"]["n"] == 1, "the event is not sent twice"


def test_node_is_refused_when_a_pydantic_event_field_cannot_be_cleared() -> None:
    class Strict(BaseModel):
        xsm: Any = None
        event: dict[str, Any] = {}

    app = compiled(counter(event_key="event"), Strict)
    with pytest.raises(AgentConfigError, match="must accept None"):
        app.invoke({"event": {"type": "ADD"}}, thread())
    assert app.get_state(thread()).values.get("xsm") is None


def test_node_takes_a_snapshot_as_text_and_writes_a_dict() -> None:
    node = counter()
    text = json.dumps(node({"event": "ADD"})["xsm"])
    again = node({"event": "ADD", "xsm": text})["xsm"]
    assert again["context"]["n"] == 2
    entered = node({"event": None, "xsm": text})["xsm"]
    assert isinstance(entered, dict) and entered["context"]["n"] == 1


def test_node_does_not_change_the_state_it_was_given() -> None:
    node = counter()
    state = {"event": "ADD", "xsm": node({"event": "ADD"})["xsm"]}
    before = json.dumps(state)
    node(state)
    assert json.dumps(state) == before


# --- receipts ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("event", "status", "denied"),
    [("ADD", "taken", False), ("NOPE", "ignored", False), ("xstate.init", "denied", True)],
)
def test_node_writes_the_receipt_into_the_snapshot(event: str, status: str, denied: bool) -> None:
    app = compiled(counter())
    out = app.invoke({"event": event}, thread())
    receipt = out["xsm"]["receipt"]
    assert receipt["event"] == event
    assert (receipt["status"], receipt["denied"]) == (status, denied)
    assert receipt["changed"] is (status == "taken")
    assert app.invoke({"event": "ADD"}, thread())["xsm"]["receipt"]["status"] == "taken"


def test_node_writes_a_denial_and_leaves_the_machine_as_it_was() -> None:
    app = compiled(counter())
    app.invoke({"event": "RAISE"}, thread())
    out = app.invoke({"event": "LOWER"}, thread())
    assert out["xsm"]["receipt"]["denied"] and out["xsm"]["value"] == "high"


def test_node_drops_what_is_sent_to_a_machine_that_is_done() -> None:
    app = compiled(counter())
    for event in ("RAISE", "END"):
        app.invoke({"event": event}, thread())
    out = app.invoke({"event": "ADD"}, thread())
    assert out["xsm"]["status"] == "done" and out["xsm"]["receipt"]["status"] == "dropped"


# --- results -----------------------------------------------------------------------------------


def test_result_to_state_gets_a_read_only_view_and_adds_to_the_update() -> None:
    seen: list[Any] = []

    def result(view: Any, state: Any) -> dict[str, Any]:
        seen.append(view)
        return {"answer": view.context["n"]}

    out = compiled(counter(result_to_state=result)).invoke({"event": "ADD"}, thread())
    assert out["answer"] == 1
    (view,) = seen
    assert (view.id, view.status, view.current_state_ids) == (
        "counter", "running", {"counter.low"},
    )  # fmt: skip
    assert view.receipt["status"] == "taken" and view.output is None
    with pytest.raises(TypeError):
        view.context["n"] = 9
    with pytest.raises(AttributeError):
        view.status = "done"


def test_result_to_state_may_give_a_command_whose_goto_adds_to_the_router() -> None:
    def result(view: Any, state: Any) -> Any:
        return Command(update=[("answer", ["here"])], goto=Send("extra", {"sent": True}))

    graph = StateGraph(State)
    graph.add_node("agent", counter(result_to_state=result), destinations=("extra",))
    graph.add_node("extra", lambda state: {"messages": [("ai", "extra")]})
    graph.add_node("usual", lambda state: {"messages": [("ai", "usual")]})
    graph.add_edge(START, "agent")
    graph.add_conditional_edges("agent", lambda state: "usual", ["usual"])
    out = graph.compile().invoke({"event": "ADD"})
    assert out["answer"] == ["here"] and out["xsm"]["context"]["n"] == 1
    assert {each.content for each in out["messages"]} == {"extra", "usual"}


@pytest.mark.parametrize(
    ("result", "says"),
    [
        ({"xsm": {}}, "must not write 'xsm'"),
        (Command(update={"xsm": {}}), "must not write 'xsm'"),
        (["no"], "must return a dict, a Command or None"),
        (Command(update=7), "a Command's update must be"),
    ],
    ids=["key", "command", "list", "update"],
)
def test_result_to_state_is_refused_when_it_is_no_update(result: Any, says: str) -> None:
    node = counter(result_to_state=lambda view, state: result)
    with pytest.raises(AgentConfigError, match=says):
        node({"event": "ADD"})


# --- hostile state -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "snapshot",
    [
        7,
        "nope",
        [1],
        {"version": 1},
        {"version": 99, "machine": {}},
        "[" * 50_000,
        {"a": float("nan")},
    ],
    ids=str,
)
def test_node_raises_one_typed_error_when_the_snapshot_is_hostile(snapshot: Any) -> None:
    node = counter()
    with pytest.raises((AgentConfigError, SnapshotError)):
        node({"event": "ADD", "xsm": snapshot})


def test_node_raises_when_the_snapshot_is_another_machines() -> None:
    other = statechart_node(
        {"id": "other", "initial": "a", "states": {"a": {}}}, event_from_state=lambda s: None
    )
    with pytest.raises(SnapshotDriftError):
        counter()({"event": "ADD", "xsm": other({})["xsm"]})


def test_node_refuses_events_that_lie_in_a_snapshot() -> None:
    node = counter()
    snapshot = node({"event": "ADD"})["xsm"]
    with pytest.raises(SnapshotError):
        node({"event": None, "xsm": {**snapshot, "queue": [{"type": "RAISE"}]}})


# --- services, deadlines -----------------------------------------------------------------------

CALLER: dict[str, Any] = {
    "id": "caller",
    "initial": "idle",
    "context": {"got": None, "why": None},
    "states": {
        "idle": {"on": {"GO": "calling"}},
        "calling": {
            "invoke": {
                "id": "call",
                "src": "call",
                "onDone": {"target": "idle", "actions": "keep"},
                "onError": {"target": "broken", "actions": "why"},
            },
            "after": {"limit": "late"},
        },
        "late": {"on": {"GO": "calling"}},
        "broken": {"after": {"pause": "calling"}},
    },
}


def caller(call: Any, *, limit: float = 60_000, pause: float = 60_000, **options: Any) -> Any:
    logic = MachineLogic(
        actions={
            "keep": lambda c, e: {"got": e.data},
            "why": lambda c, e: {"why": type(e.error).__name__},
        },
        services={"call": call},
        delays={"limit": limit, "pause": pause},
    )
    options.setdefault("event_from_state", from_event)
    return statechart_node(CALLER, logic, **options)


SEEN: contextvars.ContextVar[str] = contextvars.ContextVar("SEEN", default="nothing")


async def test_services_of_both_kinds_run_in_sync_and_async_graphs_with_context_variables() -> None:
    def plain(scope: Any, context: Any, event: Any) -> str:
        return SEEN.get()

    async def later(scope: Any, context: Any, event: Any) -> str:
        await asyncio.sleep(0)
        return SEEN.get()

    SEEN.set("carried")
    for call in (plain, later):
        app = compiled(caller(call))
        assert app.invoke({"event": "GO"}, thread())["xsm"]["context"]["got"] == "carried"
        out = await app.ainvoke({"event": "GO"}, thread("async"))
        assert out["xsm"]["context"]["got"] == "carried"


CHAIN: dict[str, Any] = {
    "id": "chain",
    "initial": "one",
    "context": {"saw": []},
    "states": {
        name: {
            "invoke": {"src": "look", "onDone": {"target": after, "actions": "note"}},
            "after": {"60000": "late"},
        }
        for name, after in (("one", "two"), ("two", "three"), ("three", "over"))
    }
    | {"late": {}, "over": {}},
}


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync service", "async service"])
async def test_every_service_of_a_chain_has_the_context_variables(
    kind: str, is_async: bool
) -> None:
    from langchain_core.runnables.config import var_child_runnable_config

    def seen() -> str:
        config = var_child_runnable_config.get() or {}
        return SEEN.get() + " in " + str(config.get("configurable", {}).get("thread_id"))

    def plain(scope: Any, context: Any, event: Any) -> str:
        time.sleep(0.01)
        return seen()

    async def later(scope: Any, context: Any, event: Any) -> str:
        await asyncio.sleep(0.01)
        return seen()

    logic = MachineLogic(
        actions={"note": lambda c, e: {"saw": [*c["saw"], e.data]}},
        services={"look": later if is_async else plain},
    )
    app = compiled(statechart_node(CHAIN, logic, event_from_state=lambda s: None))
    SEEN.set("carried")
    if kind == "sync":
        out = app.invoke({"event": 1}, thread())
    else:
        out = await app.ainvoke({"event": 1}, thread())
    assert out["xsm"]["context"]["saw"] == ["carried in t1"] * 3


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_deadlines_hold_while_a_service_hangs(kind: str) -> None:
    hold = threading.Event()
    ended: list[bool] = []

    def hangs(scope: Any, context: Any, event: Any) -> None:
        ended.append(hold.wait(20))

    app = compiled(caller(hangs, limit=50))
    if kind == "sync":
        out = app.invoke({"event": "GO"}, thread())
    else:
        out = await app.ainvoke({"event": "GO"}, thread())
    assert ended == []
    hold.set()
    assert out["xsm"]["value"] == "late"


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_short_delays_are_served_and_long_ones_rest(kind: str) -> None:
    calls: list[int] = []

    def flaky(scope: Any, context: Any, event: Any) -> str:
        calls.append(1)
        if len(calls) < 3:
            raise ConnectionError("transient")
        return "ok"

    async def run(node: Any) -> Any:
        app = compiled(node)
        if kind == "sync":
            return app.invoke({"event": "GO"}, thread())
        return await app.ainvoke({"event": "GO"}, thread())

    out = await run(caller(flaky, pause=20))
    assert len(calls) == 3 and out["xsm"]["context"]["got"] == "ok"
    calls.clear()
    out = await run(caller(flaky, pause=5_000, serve_delay_s=1))
    assert len(calls) == 1 and out["xsm"]["value"] == "broken"
    assert out["xsm"]["timers"]


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_overdue_deadlines_fire_on_entry_before_the_event(kind: str) -> None:
    calls: list[int] = []

    def fails_once(scope: Any, context: Any, event: Any) -> str:
        calls.append(1)
        if len(calls) == 1:
            raise ConnectionError("transient")
        return "ok"

    node = caller(fails_once, pause=60_000, serve_delay_s=1)
    state = {"event": "GO", **node({"event": "GO"})}
    assert state["xsm"]["value"] == "broken"
    for timer in state["xsm"]["timers"].values():
        timer["due_at"] = 1
    state["event"] = None
    out = node(state) if kind == "sync" else await node.ainvoke(state)
    assert out["xsm"]["value"] == "idle" and out["xsm"]["context"]["got"] == "ok"
    assert "receipt" not in out["xsm"]
    out = node(state | {"event": "GO"})
    assert out["xsm"]["receipt"]["status"] == "taken" and len(calls) == 4


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_an_interrupted_service_is_reported_and_not_run_again(kind: str) -> None:
    ran: list[int] = []
    node = caller(lambda s, c, e: ran.append(1), limit=3_600_000, serve_delay_s=1)
    snapshot = node({"event": None})["xsm"]
    running = {
        **snapshot,
        "value": "calling",
        "state_ids": ["caller.calling"],
        "timers": {"limit.caller.calling": {"due_at": 4_000_000_000_000}},
        "children": {"call": {"src": "call", "key": "call@1", "status": "active"}},
    }
    state = {"event": None, "xsm": running}
    out = node(state) if kind == "sync" else await node.ainvoke(state)
    assert out["xsm"]["value"] == "broken" and ran == []
    assert out["xsm"]["context"]["why"] == "ServiceInterruptedError"


# --- errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_an_apps_own_error_is_raised_as_it_is_and_the_state_stays(kind: str) -> None:
    def broken(context: Any, event: Any) -> None:
        raise ZeroDivisionError("a bug")

    logic = MachineLogic(actions={"add": broken}, guards={"allowed": lambda c, e: True})
    app = compiled(statechart_node(COUNTER, logic, event_from_state=from_event))
    app.invoke({"event": "RAISE"}, thread())
    app.invoke({"event": "LOWER"}, thread())
    with pytest.raises(ZeroDivisionError, match="a bug"):
        if kind == "sync":
            app.invoke({"event": "ADD"}, thread())
        else:
            await app.ainvoke({"event": "ADD"}, thread())
    assert app.get_state(thread()).values["xsm"]["value"] == "low"


def test_an_unhandled_service_error_is_raised_so_that_langgraph_may_retry() -> None:
    calls: list[int] = []

    def flaky(scope: Any, context: Any, event: Any) -> str:
        calls.append(1)
        if len(calls) < 3:
            raise ConnectionError("transient")
        return "ok"

    chart = {
        "id": "bare",
        "initial": "calling",
        "states": {"calling": {"invoke": {"src": "call", "onDone": "ok"}}, "ok": {}},
    }
    node = statechart_node(
        chart, MachineLogic(services={"call": flaky}), event_from_state=lambda s: None
    )
    graph = StateGraph(State)
    graph.add_node("agent", node, retry_policy=RetryPolicy(initial_interval=0.01, jitter=False))
    graph.add_edge(START, "agent")
    assert graph.compile().invoke({"event": 1})["xsm"]["value"] == "ok"
    assert len(calls) == 3


def test_an_error_the_chart_rolls_back_is_the_charts_business() -> None:
    def broken(context: Any, event: Any) -> None:
        raise ZeroDivisionError("a bug")

    chart = {**COUNTER, "actionErrorPolicy": "rollback"}
    logic = MachineLogic(actions={"add": broken}, guards={"allowed": lambda c, e: True})
    node = statechart_node(chart, logic, event_from_state=from_event)
    receipt = node({"event": "ADD"})["xsm"]["receipt"]
    assert receipt["denied"] and receipt["error"] == "ZeroDivisionError"


def test_a_chart_that_never_settles_raises_and_the_state_stays() -> None:
    chart = {
        "id": "loop",
        "initial": "a",
        "maxMicrosteps": 50,
        "states": {"a": {"on": {"GO": "b"}}, "b": {"always": {"guard": "yes", "target": "c"}},
                   "c": {"always": {"guard": "yes", "target": "b"}}},
    }  # fmt: skip
    logic = MachineLogic(guards={"yes": lambda c, e: True})
    app = compiled(statechart_node(chart, logic, event_from_state=from_event))
    app.invoke({"event": None}, thread())
    with pytest.raises(StepError):
        app.invoke({"event": "GO"}, thread())
    assert app.get_state(thread()).values["xsm"]["value"] == "a"


def test_what_only_a_seal_could_bring_back_is_refused_before_it_is_written() -> None:
    chart = {
        "id": "sender",
        "initial": "a",
        "states": {
            "a": {"on": {"GO": {"target": "b", "actions": "later"}}},
            "b": {"on": {"LATER": "a"}},
        },
    }

    def later(scope: Any, context: Any, event: Any, action: Any) -> None:
        scope.send({"type": "LATER"})

    node = statechart_node(
        chart, MachineLogic(actions={"later": later}), event_from_state=from_event
    )
    assert node({"event": "GO"})["xsm"]["value"] == "a"


# --- observing ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_transitions_go_to_the_custom_stream(kind: str) -> None:
    app = compiled(caller(lambda s, c, e: "ok"))
    if kind == "sync":
        items = list(app.stream({"event": "GO"}, thread(), stream_mode="custom"))
    else:
        items = [
            each async for each in app.astream({"event": "GO"}, thread(), stream_mode="custom")
        ]
    moves = [(each["event"], each["from"], each["to"]) for each in items]
    assert moves[-2:] == [
        ("GO", ["caller.idle"], ["caller.calling"]),
        ("xstate.done.actor.call", ["caller.calling"], ["caller.idle"]),
    ]
    assert all(each["type"] == "statechart.transition" for each in items)
    assert all(each["machine"] == "caller" for each in items)


async def test_plugins_observe_and_may_be_bound_for_one_invocation() -> None:
    class Watch:
        def __init__(self) -> None:
            self.bound: list[Any] = []
            self.seen: list[str] = []

        def bind_invocation(self, config: Any, *, is_async: bool) -> Any:
            self.bound.append((config["configurable"]["thread_id"], is_async))
            return self

        def on_transition(self, i: Any, before: Any, after: Any, taken: Any) -> None:
            self.seen.append(min(after))

    watch = Watch()
    app = compiled(counter(plugins=[watch]))
    app.invoke({"event": "RAISE"}, thread())
    await app.ainvoke({"event": "END"}, thread())
    assert watch.bound == [("t1", False), ("t1", True)]
    assert watch.seen[-1] == "counter.over"


def test_node_opens_no_trace_run_of_its_own() -> None:
    from langchain_core.callbacks import BaseCallbackHandler

    class Runs(BaseCallbackHandler):
        def __init__(self) -> None:
            self.names: list[str] = []

        def on_chain_start(self, *args: Any, **kwargs: Any) -> None:
            self.names.append(kwargs.get("name") or "")

    runs = Runs()
    compiled(counter()).invoke({"event": "ADD"}, {**thread(), "callbacks": [runs]})
    assert runs.names == ["LangGraph", "agent"]


# --- identity ----------------------------------------------------------------------------------


def test_node_mints_the_run_from_the_task_and_keeps_it() -> None:
    app = compiled(counter())
    first = app.invoke({"event": "ADD"}, thread())["xsm"]["run"]
    assert app.invoke({"event": "ADD"}, thread())["xsm"]["run"] == first
    assert app.invoke({"event": "ADD"}, thread("t2"))["xsm"]["run"] != first


def test_node_mints_the_same_run_when_langgraph_retries() -> None:
    runs: list[str] = []

    def result(view: Any, state: Any) -> dict[str, Any]:
        runs.append(view.run)
        if len(runs) < 3:
            raise ConnectionError("after the fact")
        return {}

    graph = StateGraph(State)
    graph.add_node(
        "agent",
        counter(result_to_state=result),
        retry_policy=RetryPolicy(initial_interval=0.01, jitter=False),
    )
    graph.add_edge(START, "agent")
    graph.compile().invoke({"event": "ADD"})
    assert len(runs) == 3 and len(set(runs)) == 1
    assert END
