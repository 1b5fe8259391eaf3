"""LangChainCallbackPlugin: what a real LangSmith client posts to a loopback recorder."""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import Iterator
from typing import Any, TypedDict

import pytest
from langchain_core.callbacks import AsyncCallbackHandler, BaseCallbackHandler, CallbackManager
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import tool as langchain_tool
from langchain_core.tracers.langchain import LangChainTracer
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from langsmith import Client, traceable

from guardchart import Interpreter, MachineLogic, SyncInterpreter, create_machine
from guardchart.agents import agent_logic, tool_registry
from guardchart.errors import AgentConfigError
from guardchart.langchain import LangChainCallbackPlugin, chat_model
from guardchart.langgraph import LangChainCallbackPlugin as FromLangGraph
from guardchart.langgraph import statechart_node
from guardchart.testing import LangSmithRecorder
from tests.langchain.conftest import RUN_TREE
from tests.langchain.fakes import Scripted, call, says
from tests.langchain.test_models import loop_chart

SECRET = "CANARY-5f0d1c"


class Desk:
    """A recorder, a client that posts to it, and a tracer of that client."""

    def __init__(self) -> None:
        self.recorder = LangSmithRecorder()
        self.client = Client(api_url=self.recorder.url, api_key="none", auto_batch_tracing=True)

    def tracer(self) -> LangChainTracer:
        return LangChainTracer(client=self.client, project_name="test")

    def done(self) -> LangSmithRecorder:
        """The recorder, with everything that was posted."""
        self.client.flush()
        self.recorder.wait_for(lambda runs: runs and not self.recorder.open())
        return self.recorder


@pytest.fixture
def desk() -> Iterator[Desk]:
    made = Desk()
    yield made
    made.client.close()
    made.recorder.close()


LAMP: Any = {
    "id": "lamp",
    "version": "3",
    "initial": "off",
    "context": {"secret": SECRET},
    "states": {
        "off": {"on": {"FLIP": "warming"}},
        "warming": {"always": "on"},
        "on": {"on": {"FLIP": "off"}},
    },
}


def lamp(plugin: Any) -> SyncInterpreter:
    return SyncInterpreter(create_machine(LAMP), plugins=[plugin])


def flipped(plugin: Any) -> None:
    machine = lamp(plugin).start()
    machine.send("FLIP", secret=SECRET)
    machine.stop()


TREE = """\
chain lamp
  chain (start) -> lamp.off
  chain lamp.off -> lamp.on  [FLIP]"""


# --- each way in -------------------------------------------------------------------------------


def test_a_handler_alone_gets_a_root_run_and_the_transitions_below_it(desk: Desk) -> None:
    flipped(LangChainCallbackPlugin(desk.tracer()))
    recorder = desk.done()
    assert recorder.tree() == TREE
    (flip,) = recorder.named("lamp.off -> lamp.on")
    assert flip["inputs"] == {"from": ["lamp.off"], "event": "FLIP"}
    assert flip["outputs"]["to"] == ["lamp.on"]
    steps = flip["outputs"]["microsteps"]
    assert [(step["event"], step["to"]) for step in steps] == [
        ("FLIP", ["lamp.warming"]),
        ("", ["lamp.on"]),
    ]
    assert [each["name"] for each in flip["events"] if each["name"] == "microstep"] == [
        "microstep"
    ] * 2
    metadata = flip["extra"]["metadata"]
    assert metadata["guardchart.machine"] == "lamp" and metadata["guardchart.version"] == "3"
    assert metadata["guardchart.state"] == "lamp.on" and flip["tags"] == ["guardchart"]


def test_the_root_run_takes_the_id_it_is_given(desk: Desk) -> None:
    wanted = uuid.uuid4()
    flipped(LangChainCallbackPlugin(desk.tracer(), run_id=wanted))
    (root,) = desk.done().named("lamp")
    assert root["id"] == str(wanted) and root["outputs"]["state_ids"] == ["lamp.on"]


def test_a_callback_manager_gives_the_parent(desk: Desk) -> None:
    manager = CallbackManager.configure(inheritable_callbacks=[desk.tracer()])
    run = manager.on_chain_start(None, {}, name="mine")
    flipped(LangChainCallbackPlugin(run.get_child()))
    run.on_chain_end({})
    assert desk.done().tree() == TREE.replace("chain lamp\n", "chain mine\n", 1)


def test_inside_a_runnable_it_lies_under_that_run(desk: Desk) -> None:
    chain = RunnableLambda(lambda value: flipped(LangChainCallbackPlugin()), name="mine")
    chain.invoke(1, {"callbacks": [desk.tracer()]})
    assert desk.done().tree() == TREE.replace("chain lamp\n", "chain mine\n", 1)


def test_standalone_tracing_of_the_environment_gets_a_root_of_its_own(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    from langsmith import tracing_context

    with tracing_context(enabled=True, client=desk.client):
        flipped(LangChainCallbackPlugin())
    assert desk.done().tree() == TREE


async def test_the_async_engine_shows_the_same(desk: Desk) -> None:
    machine = Interpreter(create_machine(LAMP), plugins=[LangChainCallbackPlugin(desk.tracer())])
    machine.start()
    await machine.send("FLIP", wait=True)
    machine.stop()
    assert desk.done().tree() == TREE


def test_async_handlers_are_run_to_their_end() -> None:
    seen: list[Any] = []

    class Show(AsyncCallbackHandler):
        async def on_chain_start(self, serialized: Any, inputs: Any, **kwargs: Any) -> None:
            await asyncio.sleep(0)
            seen.append(kwargs["name"])

    flipped(LangChainCallbackPlugin(Show()))
    assert seen == ["lamp", "(start) -> lamp.off", "lamp.off -> lamp.on"]


# --- in a graph --------------------------------------------------------------------------------


class State(TypedDict, total=False):
    event: Any
    xsm: dict[str, Any]


def graph(machine: Any, logic: Any, plugin: Any) -> Any:
    node = statechart_node(
        machine,
        logic,
        plugins=[plugin],
        event_key="event",
        event_from_state=lambda state: state.get("event"),
    )
    made: Any = StateGraph(State)
    made.add_node("agent", node)
    made.add_edge(START, "agent")
    made.add_edge("agent", END)
    return made.compile(checkpointer=InMemorySaver())


def config(desk: Desk, thread: str = "t") -> Any:
    return {"callbacks": [desk.tracer()], "configurable": {"thread_id": thread}}


@langchain_tool
def lookup(order_id: int) -> str:
    """Look up an order."""
    return "shipped"


def loop(plugin: Any, *, is_async: bool) -> Any:
    chat = Scripted(script=[says(call("lookup", "c1", order_id=7)), "It has shipped."])
    logic = agent_logic(chat_model(chat, is_async=is_async), tool_registry(lookup))
    return graph(loop_chart("lookup"), logic, plugin)


BEGIN: Any = {"event": {"type": "START", "prompt": "Where is 7?"}}

LOOP_TREE = """\
chain LangGraph
  chain agent
    chain (start) -> toolLoop.idle
    chain toolLoop.idle -> toolLoop.awaiting_model  [START]
    chain callModel
      llm Scripted
    chain toolLoop.awaiting_model -> toolLoop.awaiting_tool  [xstate.done.actor.model]
    chain runTool
      tool lookup
    chain toolLoop.awaiting_tool -> toolLoop.awaiting_model  [xstate.done.actor.tools]
    chain callModel
      llm Scripted
    chain toolLoop.awaiting_model -> toolLoop.done  [xstate.done.actor.model]"""


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_graphs_node_shows_transitions_models_and_tools_nested_in_order(
    desk: Desk, is_async: bool, record_property: Any
) -> None:
    app = loop(FromLangGraph(), is_async=is_async)
    if is_async:
        asyncio.run(app.ainvoke(BEGIN, config(desk)))
    else:
        app.invoke(BEGIN, config(desk))
    tree = desk.done().tree()
    record_property(RUN_TREE, tree)
    assert tree == LOOP_TREE


def test_a_handler_that_the_graph_has_too_nests_and_one_it_has_not_gets_its_own_root(
    desk: Desk,
) -> None:
    other = Desk()
    try:
        shared = desk.tracer()
        plugin = LangChainCallbackPlugin([shared])
        app = graph(LAMP, None, plugin)
        thread = {"configurable": {"thread_id": "t"}}
        app.invoke({"event": "FLIP"}, {"callbacks": [shared], **thread})
        nested = desk.done().tree()
        assert nested.startswith("chain LangGraph\n  chain agent\n    chain (start) -> lamp.off")
        app = graph(LAMP, None, LangChainCallbackPlugin(other.tracer()))
        app.invoke({"event": "FLIP"}, config(desk))
        assert other.done().tree() == TREE
    finally:
        other.client.close()
        other.recorder.close()


def test_eight_threads_and_one_plugin_keep_their_runs_apart(desk: Desk) -> None:
    app = graph(LAMP, None, LangChainCallbackPlugin())
    alone = LangChainCallbackPlugin(desk.tracer())
    barrier = threading.Barrier(8)
    errors: list[BaseException] = []

    def work(n: int) -> None:
        try:
            barrier.wait()
            if n % 2:
                flipped(alone)
            else:
                app.invoke({"event": "FLIP"}, config(desk, f"t{n}"))
        except BaseException as exc:
            errors.append(exc)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not errors
    recorder = desk.done()
    for root in recorder.named("agent"):
        names = [run["name"] for run in recorder.children(root)]
        assert names == ["(start) -> lamp.off", "lamp.off -> lamp.on"]
    for root in recorder.named("lamp"):
        names = [run["name"] for run in recorder.children(root)]
        assert names == ["(start) -> lamp.off", "lamp.off -> lamp.on"]
    assert len(recorder.named("agent")) == len(recorder.named("lamp")) == 4
    assert len(recorder.named("lamp.off -> lamp.on")) == 8


# --- services ----------------------------------------------------------------------------------

SERVING: Any = {
    "id": "m",
    "initial": "a",
    "context": {"secret": SECRET},
    "states": {
        "a": {"on": {"GO": "b"}},
        "b": {"invoke": {"src": "work", "onDone": "c", "onError": "d"}, "on": {"LEAVE": "a"}},
        "c": {},
        "d": {},
    },
}


def serving(service: Any, plugin: Any) -> SyncInterpreter:
    logic = MachineLogic(services={"work": service})
    return SyncInterpreter(create_machine(SERVING, logic), plugins=[plugin]).start()


def test_no_secret_of_a_failing_service_is_in_what_we_post(desk: Desk) -> None:
    def work(input: Any) -> Any:
        try:
            raise KeyError(SECRET)
        except KeyError as cause:
            raise RuntimeError(f"Bearer {SECRET}") from cause

    machine = serving(work, LangChainCallbackPlugin(desk.tracer()))
    machine.send("GO", secret=SECRET)
    machine.settle()
    assert machine.current_state_ids == {"m.d"}
    machine.stop()
    recorder = desk.done()
    (service,) = recorder.named("work")
    assert "RuntimeError" in service["error"] and recorder.open() == []
    assert all(SECRET.encode() not in body for body in recorder.bodies)


async def waiting(input: Any) -> None:
    await asyncio.sleep(30)


async def parked(desk: Desk) -> Interpreter:
    logic = MachineLogic(services={"work": waiting})
    plugin = LangChainCallbackPlugin(desk.tracer())
    machine = Interpreter(create_machine(SERVING, logic), plugins=[plugin])
    machine.start()
    await machine.send("GO", wait=True)
    await asyncio.sleep(0)
    return machine


async def test_a_service_that_is_left_is_closed_as_cancelled(desk: Desk) -> None:
    machine = await parked(desk)
    await machine.send("LEAVE", wait=True)
    machine.stop()
    (service,) = desk.done().named("work")
    assert service["outputs"] == {"status": "cancelled"}


async def test_every_run_is_closed_when_the_machine_stops(desk: Desk) -> None:
    machine = await parked(desk)
    machine.stop()
    recorder = desk.done()
    assert recorder.open() == []
    assert recorder.named("work")[0]["outputs"] == {"status": "stopped"}


def test_what_a_service_calls_nests_under_its_run_and_nothing_leaks_out(desk: Desk) -> None:
    @traceable(name="inner")
    def inner() -> int:
        return 1

    runnable = RunnableLambda(lambda value: value, name="runnable")

    def work(input: Any) -> int:
        runnable.invoke(1)
        return inner()

    machine = serving(work, LangChainCallbackPlugin(desk.tracer()))
    machine.send("GO")
    machine.settle()
    runnable.invoke(1)  # afterwards, outside: not traced
    machine.stop()
    assert desk.done().tree() == (
        "chain m\n"
        "  chain (start) -> m.a\n"
        "  chain m.a -> m.b  [GO]\n"
        "  chain work\n"
        "    chain runnable\n"
        "    chain inner\n"
        "  chain m.b -> m.c  [xstate.done.actor.0.m.b]"
    )


def test_a_child_machine_nests_under_the_service_that_it_is(desk: Desk) -> None:
    child = create_machine(
        {"id": "child", "initial": "x", "states": {"x": {"always": "y"}, "y": {"type": "final"}}}
    )
    logic = MachineLogic(services={"work": child})
    machine = SyncInterpreter(
        create_machine(SERVING, logic), plugins=[LangChainCallbackPlugin(desk.tracer())]
    ).start()
    machine.send("GO")
    machine.settle()
    machine.stop()
    lines = desk.done().tree().splitlines()
    assert "  chain work" in lines
    assert lines[lines.index("  chain work") + 1] == "    chain (start) -> child.y"


# --- how much ----------------------------------------------------------------------------------


class Seen(BaseCallbackHandler):
    def __init__(self) -> None:
        self.runs: list[str] = []
        self.custom: list[tuple[str, Any, Any]] = []

    def on_chain_start(self, serialized: Any, inputs: Any, **kwargs: Any) -> None:
        self.runs.append(kwargs["name"])

    def on_custom_event(self, name: str, data: Any, *, run_id: Any, **kwargs: Any) -> None:
        self.custom.append((name, data, run_id))


@pytest.mark.parametrize(
    ("granularity", "runs"),
    [
        ("transition", ["m", "(start) -> m.a", "m.a -> m.b", "work", "m.b -> m.c"]),
        ("service", ["m", "work"]),
        ("event", []),
    ],
)
def test_granularity_turns_the_runs_down_and_keeps_the_custom_events(
    granularity: Any, runs: list[str]
) -> None:
    seen = Seen()
    machine = serving(lambda input: 1, LangChainCallbackPlugin(seen, granularity=granularity))
    machine.send("GO")
    machine.settle()
    machine.stop()
    assert seen.runs == runs
    assert [name for name, _, _ in seen.custom] == [
        "xsm.transition",
        "xsm.transition",
        "xsm.service_done",
        "xsm.transition",
    ]
    assert seen.custom[1][1] == {"machine": "m", "event": "GO", "from": ["m.a"], "to": ["m.b"]}


def test_a_failing_service_is_a_custom_event_with_the_class_alone() -> None:
    def work(input: Any) -> None:
        raise ValueError(SECRET)

    seen = Seen()
    machine = serving(work, LangChainCallbackPlugin(seen))
    machine.send("GO")
    machine.settle()
    machine.stop()
    found = [data for name, data, _ in seen.custom if name == "xsm.service_error"]
    assert found == [{"machine": "m", "service": "work", "error": "ValueError"}]
    assert all(run_id is not None for _, _, run_id in seen.custom)


def test_hostile_event_types_are_bounded_and_storable() -> None:
    seen = Seen()
    machine = SyncInterpreter(
        create_machine({"id": "m", "initial": "a", "states": {"a": {"on": {"*": "b"}}, "b": {}}}),
        plugins=[LangChainCallbackPlugin(seen)],
    ).start()
    machine.send("x" * 100_000 + "\ud800\0")
    machine.stop()
    assert len(seen.custom[-1][1]["event"]) == 200


def test_a_raising_handler_disturbs_nothing() -> None:
    class Bad(BaseCallbackHandler):
        raise_error = True

        def on_chain_start(self, *args: Any, **kwargs: Any) -> None:
            raise RuntimeError("no")

    machine = lamp(LangChainCallbackPlugin(Bad())).start()
    assert machine.send("FLIP").status == "taken"
    machine.stop()


@pytest.mark.parametrize(
    ("arguments", "options"),
    [((7,), {}), (([7],), {}), ((), {"granularity": "all"}), ((), {"run_id": "no"})],
)
def test_wrong_wiring_is_refused(arguments: Any, options: Any) -> None:
    with pytest.raises(AgentConfigError):
        LangChainCallbackPlugin(*arguments, **options)


# --- OpenTelemetry -----------------------------------------------------------------------------


def test_the_opentelemetry_path_finds_the_microsteps() -> None:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    recorder = LangSmithRecorder()
    client = Client(
        api_url=recorder.url, api_key="none", tracing_mode="otel", otel_tracer_provider=provider
    )
    try:
        flipped(LangChainCallbackPlugin(LangChainTracer(client=client, project_name="test")))
        client.flush()
        recorder.wait_for(lambda _: len(exporter.get_finished_spans()) >= 3)
        spans = {span.name: span for span in exporter.get_finished_spans()}
    finally:
        client.close()
        provider.shutdown()
        recorder.close()
    flip = spans["lamp.off -> lamp.on"]
    assert "lamp.warming" in str(dict(flip.attributes or {}))
    parent = flip.parent
    assert parent is not None and parent.span_id == spans["lamp"].context.span_id  # type: ignore[union-attr]


# --- the recorder ------------------------------------------------------------------------------


@pytest.mark.parametrize("multipart", [True, False])
def test_the_recorder_reads_multipart_and_batch_posts(multipart: bool) -> None:
    with LangSmithRecorder(multipart=multipart) as recorder:
        client = Client(api_url=recorder.url, api_key="none")
        flipped(LangChainCallbackPlugin(LangChainTracer(client=client, project_name="test")))
        client.flush()
        recorder.wait_for(lambda runs: len(runs) == 3 and not recorder.open())
        client.close()
        assert recorder.tree() == TREE
    with pytest.raises(TimeoutError):
        recorder.wait_for(lambda runs: len(runs) > 3, timeout_s=0.05)
