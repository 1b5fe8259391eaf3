"""A compiled chart among LangGraph's own features: context, policies, streams, drawings."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import pytest
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, ToolMessage
from langgraph.cache.memory import InMemoryCache
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.errors import NodeTimeoutError
from langgraph.runtime import get_runtime
from langgraph.types import CachePolicy, Command, RetryPolicy

from guardchart import MachineLogic
from guardchart.agents import FakeModel, agent_logic
from guardchart.agents import RetryPolicy as LoopRetry
from guardchart.errors import AgentConfigError
from guardchart.gate import Seal
from guardchart.langchain import chat_model
from guardchart.langgraph import aresume_pending, pending_approval, statechart_graph
from tests.langgraph.graphs import REFUND, loop_chart, start, thread
from tests.langgraph.test_graph import (
    BOTH,
    LOOKUP,
    SAY,
    approved,
    made,
    parent,
    run,
)

KEY = Seal("0123456789abcdef")
PUBLIC = {"xsm", "event", "messages"}


# --- context_schema ----------------------------------------------------------------------------


@dataclass
class Who:
    user: str


@BOTH
@pytest.mark.parametrize("is_async", [False, True])
async def test_the_runtimes_context_reaches_event_model_and_tools(
    kind: str, is_async: bool
) -> None:
    seen: list[tuple[str, Any]] = []

    def look(what: str) -> None:
        seen.append((what, get_runtime(Who).context.user))

    inner = FakeModel([{"tool_calls": [LOOKUP, LOOKUP]}, SAY], is_async=is_async)

    def sync_model(messages: Any, tools: Any) -> Any:
        look("model")
        return inner(messages, tools)

    async def async_model(messages: Any, tools: Any) -> Any:
        look("model")
        return await inner(messages, tools)

    def lookup(order_id: int) -> str:
        """Look up an order."""
        look("tool")
        return "shipped"

    def event(state: Any, runtime: Any) -> Any:
        seen.append(("event", runtime.context.user))
        return state.get("event")

    graph = statechart_graph(
        loop_chart("lookup"),
        agent_logic(async_model if is_async else sync_model, [lookup]),
        event_from_state=event,
        context_schema=Who,
        checkpointer=InMemorySaver(),
    )
    value, who = {"event": start()}, Who("ann")
    if kind == "async":
        out = await graph.ainvoke(value, thread(), context=who)
    else:
        out = await asyncio.to_thread(lambda: graph.invoke(value, thread(), context=who))
    assert out["xsm"]["context"]["result"] == "Done."
    assert {what for what, _ in seen} == {"event", "model", "tool"}
    assert {user for _, user in seen} == {"ann"}
    assert graph.get_context_jsonschema()["properties"]["user"]["type"] == "string"


# --- policies of the model task ----------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("messages_key", [None, "messages"])
@pytest.mark.parametrize("seal", [None, KEY])
async def test_time_travel_to_before_an_answer_finds_it_in_the_cache(
    kind: str, messages_key: str | None, seal: Any
) -> None:
    model = FakeModel([LOOKUP, {"text": "one"}, {"text": "two"}], is_async=False)
    graph = made(
        [],
        model=model,
        cache_policy=CachePolicy(),
        cache=InMemoryCache(),
        messages_key=messages_key,
        seal=seal,
    )
    await run(kind, graph, {"event": start()})
    befores = [each for each in graph.get_state_history(thread()) if each.next == ("model",)]
    assert len(befores) == 2
    for before in befores:
        out = await run(kind, graph, None, before.config)
        assert out["xsm"]["context"]["result"] == "one"
    assert len(model.calls) == 2


@BOTH
async def test_a_cached_answer_is_told_to_no_other_turn_and_no_other_thread(kind: str) -> None:
    model = FakeModel([{"text": n} for n in ("one", "two", "three")], is_async=False)
    graph = made([], model=model, cache_policy=CachePolicy(), cache=InMemoryCache())
    said = []
    for config in (thread("a"), thread("a"), thread("b")):
        out = await run(kind, graph, {"event": start("the same")}, config)
        said.append(out["xsm"]["context"]["result"])
    assert said == ["one", "two", "three"]


@BOTH
@pytest.mark.parametrize("messages_key", [None, "messages"])
async def test_threads_that_were_begun_from_one_snapshot_are_told_no_cached_answer_of_each_other(
    kind: str, messages_key: str | None
) -> None:
    model = FakeModel([{"text": n} for n in ("first", "one", "two")], is_async=False)
    graph = made(
        [],
        model=model,
        cache_policy=CachePolicy(),
        cache=InMemoryCache(),
        messages_key=messages_key,
        ledger=None,
    )
    begun = (await run(kind, graph, {"event": start("hello")}, thread("template")))["xsm"]
    said = []
    for name in ("a", "b"):
        given = {"xsm": begun, "event": start("the same")}
        out = await run(kind, graph, given, thread(name))
        said.append(out["xsm"]["context"]["result"])
    assert said == ["one", "two"]


@BOTH
async def test_a_conversation_that_no_cache_key_can_tell_is_not_cached_and_ends_no_run(
    kind: str,
) -> None:
    graph = made([SAY], cache_policy=CachePolicy(), cache=InMemoryCache(), messages_key="messages")
    call = {"name": "lookup", "args": {"at": UUID(int=1)}, "id": "c1"}
    odd = [AIMessage("", tool_calls=[call]), ToolMessage("found", tool_call_id="c1")]
    out = await run(kind, graph, {"event": start(), "messages": odd})
    assert out["xsm"]["context"]["result"] == "Done."


class Down:
    """A model that fails, or answers too late, the first time."""

    is_async = False

    def __init__(self, late_s: float | None) -> None:
        self.late_s, self.asked = late_s, 0
        self.inner = FakeModel([{"text": n} for n in ("one", "two", "three")], is_async=False)

    def __call__(self, messages: Any, tools: Any) -> Any:
        self.asked += 1
        if self.asked == 1 and self.late_s is None:
            raise ValueError("down")
        if self.asked == 1:
            time.sleep(self.late_s or 0.0)
        return self.inner(messages, tools)


class Kept(InMemoryCache[Any]):
    """A cache that counts what is put into it."""

    puts = 0

    def set(self, pairs: Any) -> None:
        self.puts += len(pairs)
        super().set(pairs)

    async def aset(self, pairs: Any) -> None:
        self.set(pairs)


@BOTH
@pytest.mark.parametrize("late_s", [None, 1.0], ids=["fails", "is late"])
async def test_a_models_failure_is_not_cached(kind: str, late_s: float | None) -> None:
    model, cache = Down(late_s), Kept()
    logic = {
        "model_timeout_s": 30.0 if late_s is None else 0.3,
        "retry": LoopRetry(delay_s=0.01),
    }
    graph = made([], model=model, cache_policy=CachePolicy(), cache=cache, logic=logic)
    await run(kind, graph, {"event": start()})
    assert model.asked == 2 and cache.puts == 1
    befores = [each for each in graph.get_state_history(thread()) if each.next == ("model",)]
    assert len(befores) == 2
    await run(kind, graph, None, befores[0].config)
    assert model.asked == 2
    if late_s is None:
        out = await run(kind, graph, None, befores[1].config)
        assert model.asked == 3 and out["xsm"]["state_ids"] == ["toolLoop.done"]
    graph.clear_cache()
    await run(kind, graph, None, befores[0].config)
    assert model.asked == (4 if late_s is None else 3)


@pytest.mark.parametrize("policy", [CachePolicy(key_func=lambda state: "same")])
def test_a_key_of_ones_own_for_the_cache_is_refused(policy: Any) -> None:
    for given in (policy, {"model": policy}):
        with pytest.raises(AgentConfigError, match="takes no key_func"):
            made([SAY], cache_policy=given)


def slow_once(answer: dict[str, Any]) -> Any:
    inner, first = FakeModel([answer]), iter([True])

    async def model(messages: Any, tools: Any) -> Any:
        if next(first, False):
            await asyncio.sleep(60)
        return await inner(messages, tools)

    return model


async def test_a_model_over_langgraphs_time_limit_ends_the_run_and_a_resume_asks_again() -> None:
    graph = made([], model=slow_once(SAY), timeout=0.1)
    with pytest.raises(NodeTimeoutError):
        await graph.ainvoke({"event": start()}, thread())
    assert graph.get_state(thread()).next == ("model",)
    out = await aresume_pending(graph, thread())
    assert out["xsm"]["context"]["result"] == "Done."


async def test_langgraph_tries_a_model_over_its_time_limit_again_where_it_was_told_to() -> None:
    retry = RetryPolicy(max_attempts=2, initial_interval=0.01, retry_on=NodeTimeoutError)
    graph = made([], model=slow_once(SAY), timeout=0.1, retry_policy=retry)
    out = await graph.ainvoke({"event": start()}, thread())
    assert out["xsm"]["context"]["result"] == "Done." and out["xsm"]["context"]["retries"] == 0


async def test_the_time_limit_of_the_model_is_none_of_a_tools() -> None:
    def lookup(order_id: int) -> str:
        """Look up an order."""
        import time

        time.sleep(0.3)
        return "shipped"

    logic = agent_logic(FakeModel([LOOKUP, SAY]), [lookup])
    graph = statechart_graph(loop_chart("lookup"), logic, timeout=0.2, checkpointer=InMemorySaver())
    out = await graph.ainvoke({"event": start()}, thread())
    assert out["xsm"]["context"]["result"] == "Done."


# --- streams -----------------------------------------------------------------------------------


def streaming(sub: bool, **options: Any) -> Any:
    """A loop that looks up and then asks a person; alone, or below a parent."""
    if not sub:
        return made([LOOKUP, REFUND, SAY], messages_key="messages", **options)
    inner = made(
        [LOOKUP, REFUND, SAY],
        messages_key="messages",
        checkpointer=None,
        as_subgraph=True,
        **options,
    )
    return parent(inner)


async def parts(kind: str, graph: Any, value: Any, mode: Any) -> list[Any]:
    """What a stream with ``subgraphs=True`` gives: namespace first."""
    options: dict[str, Any] = {"stream_mode": mode, "subgraphs": True}
    if kind == "async":
        return [each async for each in graph.astream(value, thread(), **options)]
    return await asyncio.to_thread(lambda: list(graph.stream(value, thread(), **options)))


def of(found: list[Any], space: tuple[str, ...]) -> Iterator[Any]:
    return (each[-1] for each in found if each[0] == space)


ALONE = pytest.mark.parametrize(("sub", "space"), [(False, ()), (True, ("agent",))])
TASKS = ["step", "model", "step", "tools", "step", "model", "step"]


@BOTH
@ALONE
async def test_updates_name_each_task_in_turn(kind: str, sub: bool, space: Any) -> None:
    found = await parts(kind, streaming(sub), {"event": start()}, "updates")
    names = [name for update in of(found, space) for name in update]
    assert names == [*TASKS, "__interrupt__"]
    # The question is told on every level.
    assert "__interrupt__" in found[-1][-1]


@BOTH
@ALONE
async def test_values_end_with_the_question(kind: str, sub: bool, space: Any) -> None:
    found = await parts(kind, streaming(sub), {"event": start()}, "values")
    values = list(of(found, space))
    assert all(PUBLIC & set(each) for each in values)
    # What else there is belongs to the graph.
    own = {key for each in values for key in each} - PUBLIC - {"__interrupt__"}
    assert all(key.startswith("xsm_") for key in own)
    assert values[-1]["__interrupt__"][0].value["type"] == "statechart.approval"
    assert values[-1]["xsm"]["value"] == "awaiting_human"


@BOTH
@ALONE
async def test_transitions_are_streamed_where_they_happen(kind: str, sub: bool, space: Any) -> None:
    graph = streaming(sub)
    found = await parts(kind, graph, {"event": start()}, "custom")
    assert [each["to"] for each in of(found, space)] == [
        ["toolLoop.awaiting_model"],
        ["toolLoop.awaiting_tool"],
        ["toolLoop.awaiting_model"],
        ["toolLoop.awaiting_human"],
    ]
    (call,) = pending_approval(graph, thread())
    answer = Command(resume=approved({"calls": [call]}))
    found = await parts(kind, graph, answer, "custom")
    assert next(each["event"] for each in of(found, space)) == "HUMAN_DECIDED"


@BOTH
@ALONE
async def test_messages_are_streamed_once_each_with_their_task(
    kind: str, sub: bool, space: Any
) -> None:
    found = await parts(kind, streaming(sub), {"event": start()}, "messages")
    told = [(type(message).__name__, meta["langgraph_node"]) for message, meta in of(found, space)]
    assert told == [
        ("HumanMessage", "step"),
        ("AIMessage", "step"),
        ("ToolMessage", "step"),
        ("AIMessage", "step"),
    ]
    ids = [message.id for message, _ in of(found, space)]
    assert len(set(ids)) == len(ids)


class Talking(GenericFakeChatModel):
    """It takes tools, as every chat model does, and uses none."""

    def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
        return self


@BOTH
@pytest.mark.parametrize("sub", [False, True])
async def test_tokens_come_from_the_model_task_and_whole_messages_from_step(
    kind: str, sub: bool
) -> None:
    talking = chat_model(Talking(messages=iter([AIMessage("It is on its way.")])))
    options: dict[str, Any] = {"model": talking, "messages_key": "messages"}
    if sub:
        graph = parent(made([], checkpointer=None, as_subgraph=True, **options))
    else:
        graph = made([], **options)
    found = await parts(kind, graph, {"event": start()}, "messages")
    told = list(of(found, ("agent",) if sub else ()))
    tokens = [m.content for m, meta in told if meta["langgraph_node"] == "model"]
    whole = [m for m, meta in told if meta["langgraph_node"] == "step"]
    assert len(tokens) > 3 and "".join(tokens) == "It is on its way."
    assert [each.content for each in whole] == ["refund order 7", "It is on its way."]
    assert not any(isinstance(each, AIMessageChunk) for each in whole)


@BOTH
@ALONE
async def test_debug_tells_tasks_their_results_and_checkpoints(
    kind: str, sub: bool, space: Any
) -> None:
    found = list(of(await parts(kind, streaming(sub), {"event": start()}, "debug"), space))
    began = [each["payload"]["name"] for each in found if each["type"] == "task"]
    ended = [each["payload"]["name"] for each in found if each["type"] == "task_result"]
    assert began == [*TASKS, "approval"] and ended == began
    assert sum(each["type"] == "checkpoint" for each in found) >= len(TASKS)
    assert not any(each["payload"].get("error") for each in found if each["type"] == "task_result")


@BOTH
@ALONE
async def test_several_modes_at_once_are_told_apart(kind: str, sub: bool, space: Any) -> None:
    modes = ["updates", "custom", "messages", "values"]
    found = await parts(kind, streaming(sub), {"event": start()}, modes)
    here = [(mode, item) for at, mode, item in found if at == space]
    assert {mode for mode, _ in here} == set(modes)
    # A transition is told before the update of the step that made it.
    order = [mode for mode, _ in here if mode != "values"]
    assert order.index("custom") < order.index("updates")


@BOTH
async def test_without_subgraphs_a_parent_streams_its_own_part_only(kind: str) -> None:
    graph = streaming(True)
    if kind == "async":
        found = [
            e async for e in graph.astream({"event": start()}, thread(), stream_mode="updates")
        ]
    else:
        stream = graph.stream({"event": start()}, thread(), stream_mode="updates")
        found = await asyncio.to_thread(list, stream)
    assert [list(each) for each in found] == [["__interrupt__"]]


# --- drawings ----------------------------------------------------------------------------------


def edges(graph: Any, **options: Any) -> set[tuple[str, str, bool]]:
    drawn = graph.get_graph(**options)
    return {(each.source, each.target, each.conditional) for each in drawn.edges}


def test_a_drawing_shows_every_task_and_where_step_may_lead() -> None:
    graph = made([SAY])
    tasks = ("model", "tools", "approval", "timer")
    assert edges(graph) == {
        ("__start__", "step", False),
        *(("step", each, True) for each in (*tasks, "__end__")),
        *((each, "step", False) for each in tasks),
    }
    text = graph.get_graph().draw_mermaid()
    for each in tasks:
        assert f"\tstep -.-> {each};" in text and f"\t{each} --> step;" in text
    assert "\t__start__ --> step;" in text and "\tstep -.-> __end__;" in text


def test_a_drawing_of_a_parent_shows_the_tasks_below() -> None:
    graph = streaming(True)
    assert edges(graph) == {("__start__", "agent", False), ("agent", "__end__", False)}
    text = graph.get_graph(xray=True).draw_mermaid()
    assert "subgraph agent" in text
    assert "agent\\3astep -.-> agent\\3aapproval;" in text


def test_a_drawing_shows_no_task_that_the_chart_cannot_ask_for() -> None:
    chart = {
        "id": "plain",
        "initial": "busy",
        "states": {
            "busy": {"invoke": {"src": "work", "onDone": "over"}},
            "over": {"type": "final"},
        },
    }
    graph = statechart_graph(chart, MachineLogic(services={"work": lambda context: 1}))
    assert edges(graph) == {
        ("__start__", "step", False),
        ("step", "service", True),
        ("step", "__end__", True),
        ("service", "step", False),
    }


def test_a_retry_is_handed_a_request_of_its_own() -> None:
    told = []

    def generate(request: Any) -> str:
        told.append(len(request.messages))
        request.messages.append(request.messages[0])
        if len(told) < 3:
            raise ConnectionError
        return "hi"

    asking = {"prompt": "Say hi.", "messages": [{"role": "user", "content": "Hello?"}]}
    chart = {
        "id": "hello",
        "initial": "asking",
        "states": {
            "asking": {"invoke": {"src": "agent.generate_text", "input": asking, "onDone": "said"}},
            "said": {"type": "final"},
        },
    }
    graph = statechart_graph(
        chart,
        MachineLogic(),
        checkpointer=InMemorySaver(),
        executors={"generate_text": generate},
        retry_policy=RetryPolicy(max_attempts=4, initial_interval=0.01, jitter=False),
    )
    out = graph.invoke({"event": {"type": "GO"}}, thread())
    assert out["xsm"]["state_ids"] == ["hello.said"]
    assert told == [told[0]] * 3
