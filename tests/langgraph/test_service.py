"""``langgraph_service``: results, streams, interrupts, parking, cancellation, nesting."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, TypedDict

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.errors import GraphRecursionError
from langgraph.graph import END, START, StateGraph
from langgraph.types import Interrupt, interrupt

from guardchart import Interpreter, MachineLogic, SyncInterpreter, create_machine
from guardchart.agents import run_agent
from guardchart.errors import AgentConfigError, GraphInterruptedError, NotSupportedError
from guardchart.langgraph import (
    INTERRUPT_KEY,
    langgraph_service,
    statechart_graph,
    statechart_node,
)
from tests.langgraph.graphs import compiled, thread


class Number(TypedDict, total=False):
    n: int
    seen: Annotated[list[Any], lambda a, b: [*a, *b]]


def double(state: Number) -> Any:
    return {"n": state["n"] * 2}


def ask(state: Number) -> Any:
    return {"n": state["n"] + interrupt({"question": "how much more?"})}


def inner(*nodes: Any, saver: Any = None) -> Any:
    graph = StateGraph(Number)
    names = ["start"]
    for at, node in enumerate(nodes):
        graph.add_node(f"{node.__name__}{at}", node)
        graph.add_edge(START if at == 0 else names[-1], f"{node.__name__}{at}")
        names.append(f"{node.__name__}{at}")
    graph.add_edge(names[-1], END)
    return graph.compile(checkpointer=saver)


CHART: dict[str, Any] = {
    "id": "host",
    "initial": "busy",
    "context": {"n": 21, "chunks": [], "asked": []},
    "states": {
        "busy": {
            "invoke": {
                "id": "graph",
                "src": "graph",
                "onDone": {"target": "over", "actions": "keep"},
                "onError": {"target": "failed", "actions": "note"},
            },
            "on": {
                "STREAM": {"actions": "chunk"},
                "CANCEL": "left",
                "GRAPH_INTERRUPTED": {"target": "waiting", "actions": "asked"},
            },
        },
        "waiting": {"tags": ["waiting"], "on": {"GRAPH_RESUMED": "busy"}},
        "left": {},
        "over": {"type": "final"},
        "failed": {"type": "final"},
    },
}


def plain_chart() -> dict[str, Any]:
    """The same without a place for a question."""
    chart = {**CHART, "states": dict(CHART["states"])}
    busy = dict(chart["states"]["busy"])
    busy["on"] = {key: each for key, each in busy["on"].items() if key != "GRAPH_INTERRUPTED"}
    chart["states"]["busy"] = busy
    return chart


errors: list[Any] = []


def written(value: Any) -> Any:
    """What a context can keep: LangGraph's tuples as lists, its interrupts by their value."""
    if isinstance(value, dict):
        return {key: written(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [written(each) for each in value]
    return written(value.value) if isinstance(value, Interrupt) else value


def logic(service: Any) -> MachineLogic:
    def note(context: Any, event: Any) -> None:
        errors.append(event.error)

    return MachineLogic(
        services={"graph": service},
        actions={
            "keep": lambda context, event: {"n": written(event.data)},
            "note": note,
            "chunk": lambda context, event: {"chunks": [*context["chunks"], written(event.data)]},
            "asked": lambda context, event: {"asked": event.payload["interrupts"]},
        },
    )


def of_n(context: Any, event: Any) -> Any:
    return {"n": context["n"]}


async def ran(service: Any, chart: Any = CHART) -> Any:
    errors.clear()
    return await run_agent(create_machine(chart, logic(service)))


async def test_the_output_is_what_on_done_receives() -> None:
    service = langgraph_service(inner(double), input_from=of_n, output_to=lambda out: out["n"])
    assert (await ran(service)).context["n"] == 42
    service = langgraph_service(inner(double), input_from=of_n)
    assert (await ran(service)).context["n"] == {"n": 42, "seen": []}


def test_a_bare_sync_interpreter_refuses_it_and_a_node_runs_it() -> None:
    service = langgraph_service(inner(double), input_from=of_n, output_to=lambda out: out["n"])
    with pytest.raises(NotSupportedError, match="async"):
        SyncInterpreter(create_machine(CHART, logic(service))).start()
    app = compiled(statechart_node(CHART, logic(service), event_from_state=lambda state: None))
    assert app.invoke({"event": None}, thread())["xsm"]["context"]["n"] == 42
    graph = statechart_graph(CHART, logic(service), checkpointer=InMemorySaver())
    assert graph.invoke({"event": None}, thread())["xsm"]["context"]["n"] == 42


@pytest.mark.parametrize("mode", ["values", "updates", ["values"], ["updates", "custom"]])
async def test_each_chunk_is_a_stream_event_and_the_last_one_the_output(mode: Any) -> None:
    service = langgraph_service(
        inner(double, double), input_from=of_n, stream=True, stream_mode=mode
    )
    result = await ran(service)
    chunks = result.context["chunks"]
    expected = {
        "values": [{"n": 21, "seen": []}, {"n": 42, "seen": []}, {"n": 84, "seen": []}],
        "updates": [{"double0": {"n": 42}}, {"double1": {"n": 84}}],
    }
    wanted = expected["values" if "values" in mode else "updates"]
    assert chunks == (wanted if isinstance(mode, str) else [[mode[0], each] for each in wanted])
    assert result.context["n"] == chunks[-1]


async def test_a_failing_graph_is_the_charts_business() -> None:
    def loop(state: Number) -> Any:
        return {"n": state["n"] + 1}

    graph = StateGraph(Number)
    graph.add_node("loop", loop)
    graph.add_edge(START, "loop")
    graph.add_edge("loop", "loop")
    service = langgraph_service(graph.compile(), input_from=of_n, config={"recursion_limit": 3})
    result = await ran(service)
    assert result.final_state == "host.failed" and isinstance(errors[0], GraphRecursionError)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("mode", ["values", "custom"])
async def test_an_interrupt_is_an_error_by_default(stream: bool, mode: str) -> None:
    service = langgraph_service(
        inner(double, ask, saver=InMemorySaver()),
        input_from=of_n,
        stream=stream,
        stream_mode=mode,
        config=thread("inner"),
    )
    result = await ran(service)
    assert result.final_state == "host.failed"
    (error,) = errors
    assert isinstance(error, GraphInterruptedError)
    assert str(error) == "LangGraph interrupt(): the graph is paused, asking [1 question]"
    assert error.interrupts[0].value == {"question": "how much more?"}
    if not stream:
        assert error.state["n"] == 42


async def test_an_interrupt_may_be_handed_on_as_it_is() -> None:
    service = langgraph_service(
        inner(ask, saver=InMemorySaver()),
        input_from=of_n,
        config=thread("inner"),
        on_interrupt="done",
    )
    out = (await ran(service)).context["n"]
    assert out[INTERRUPT_KEY] == [{"question": "how much more?"}]


def parking(nodes: Any = (double, ask), **options: Any) -> Any:
    return langgraph_service(
        inner(*nodes, saver=InMemorySaver()),
        input_from=of_n,
        output_to=lambda out: out["n"],
        config=lambda context, event: thread("inner"),
        on_interrupt="park",
        **options,
    )


async def test_a_parked_graph_goes_on_where_it_stopped() -> None:
    calls: list[int] = []

    def once(state: Number) -> Any:
        calls.append(1)
        return {"n": state["n"] * 2}

    machine = create_machine(CHART, logic(parking((once, ask))))
    result = await run_agent(machine)
    assert result.waiting and result.final_state == "host.waiting"
    (asked,) = result.context["asked"]
    assert asked["value"] == {"question": "how much more?"}
    answer = {"type": "GRAPH_RESUMED", "resume": 8}
    result = await run_agent(machine, snapshot=result.snapshot, event=answer)
    assert result.final_state == "host.over" and result.context["n"] == 50
    assert calls == [1]


async def test_a_machine_that_takes_no_question_gets_an_error() -> None:
    result = await ran(parking(), plain_chart())
    assert result.final_state == "host.failed" and isinstance(errors[0], GraphInterruptedError)


@pytest.mark.parametrize("kind", ["node", "graph"])
@pytest.mark.parametrize("is_async", [False, True])
async def test_a_parked_graph_pauses_the_chart_and_not_the_graph_around(
    kind: str, is_async: bool
) -> None:
    bound = logic(parking())
    app: Any
    if kind == "node":
        app = compiled(
            statechart_node(
                CHART, bound, event_from_state=lambda state: state.get("event"), event_key="event"
            )
        )
    else:
        app = statechart_graph(CHART, bound, checkpointer=InMemorySaver())

    async def run(value: Any) -> Any:
        if is_async:
            return await app.ainvoke(value, thread())
        return await asyncio.to_thread(app.invoke, value, thread())

    out = await run({"event": None})
    assert "__interrupt__" not in out and out["xsm"]["value"] == "waiting"
    out = await run({"event": {"type": "GRAPH_RESUMED", "resume": 8}})
    assert out["xsm"]["value"] == "over" and out["xsm"]["context"]["n"] == 50


async def test_the_threads_of_two_instances_are_their_own() -> None:
    seen: list[Any] = []
    saver = InMemorySaver()

    def config(context: Any, event: Any) -> Any:
        seen.append(context["n"])
        return thread(f"order-{context['n']}")

    service = langgraph_service(inner(double, saver=saver), input_from=of_n, config=config)
    machine = create_machine(CHART, logic(service))
    await asyncio.gather(*(run_agent(machine) for _ in range(2)))
    assert seen == [21, 21] and saver.get(thread("order-21")) is not None


async def test_leaving_the_state_cancels_the_run() -> None:
    ended: list[str] = []

    async def slow(state: Number) -> Any:
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    for saver in (None, InMemorySaver()):
        service = langgraph_service(inner(slow, saver=saver), input_from=of_n, config=thread("i"))
        interpreter = Interpreter(create_machine(CHART, logic(service)))
        await interpreter.start()
        await asyncio.sleep(0.05)
        await interpreter.send("CANCEL", wait=True)
        for _ in range(100):
            if ended:
                break
            await asyncio.sleep(0.01)
        assert ended == ["cancelled"], saver
        ended.clear()
        interpreter.stop()


async def test_runs_of_a_graph_apart_nest_under_the_graph_around() -> None:
    class Seen(BaseCallbackHandler):
        def __init__(self) -> None:
            self.names: list[str] = []

        def on_chain_start(self, serialized: Any, inputs: Any, **more: Any) -> None:
            self.names.append(more.get("name") or "")

    handler = Seen()
    service = langgraph_service(
        inner(double, saver=InMemorySaver()),
        input_from=of_n,
        config=lambda context, event: {**thread("inner"), "callbacks": [handler]},
    )
    app = compiled(statechart_node(CHART, logic(service), event_from_state=lambda state: None))
    await app.ainvoke({"event": None}, thread())
    assert "double0" in handler.names


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"compiled_graph": StateGraph(Number)}, r"call .compile\(\) first"),
        ({"input_from": {"n": 1}}, "input_from"),
        ({"output_to": "n"}, "output_to"),
        ({"config": "thread"}, "config"),
        ({"stream_mode": []}, "stream_mode"),
        ({"on_interrupt": "pause"}, "on_interrupt"),
        ({"on_interrupt": "park"}, "checkpointer of its own"),
    ],
)
def test_wrong_wiring_is_refused_when_it_is_built(options: Any, match: str) -> None:
    given = {"compiled_graph": inner(double), "input_from": of_n, **options}
    with pytest.raises(AgentConfigError, match=match):
        langgraph_service(given.pop("compiled_graph"), **given)


async def test_parking_without_a_thread_is_refused() -> None:
    graph = inner(ask, saver=InMemorySaver())
    with pytest.raises(AgentConfigError, match="thread_id"):
        langgraph_service(graph, input_from=of_n, on_interrupt="park")
    service = langgraph_service(
        graph, input_from=of_n, on_interrupt="park", config=lambda context, event: {}
    )
    await ran(service)
    assert isinstance(errors[0], AgentConfigError)
