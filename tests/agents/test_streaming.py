"""Streaming in the loop: who listens is told, everybody else is unaffected, all is charged."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import anthropic
import openai
import pytest

from guardchart import MachineLogic, SimulatedClock, create_machine
from guardchart.agents import (
    AgentTracePlugin,
    FakeModel,
    ModelResponse,
    RetryPolicy,
    Usage,
    agent_logic,
    load_chart,
    run_agent,
    run_agent_sync,
    tool_registry,
)
from guardchart.anthropic import anthropic_model
from guardchart.openai import openai_model
from tests.agents.loopback import Stream, fixture, provider
from tests.agents.loops import Loops, balance, say

SHEET = {"input_per_mtok": 1.0, "output_per_mtok": 1.0}


class Listener:
    def __init__(self) -> None:
        self.told: list[tuple[str, str, str]] = []

    def on_chunk(self, interpreter: Any, invocation: Any, chunk: str) -> None:
        self.told.append((interpreter.id, invocation.src, chunk))

    @property
    def text(self) -> str:
        return "".join(chunk for _, _, chunk in self.told)


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


async def test_a_plugin_that_listens_is_told_each_piece(loops: Loops) -> None:
    listener = Listener()
    loop = await loops.start([balance(), say("It is twelve euros.")], plugins=[listener])
    await loop.ask()
    assert loop.context["result"] == "It is twelve euros."
    assert [chunk for _, _, chunk in listener.told] == ["It", " is", " twelve", " euros."]
    assert {each[:2] for each in listener.told} == {("toolLoop", "callModel")}


async def test_nobody_listens_then_nothing_streams(loops: Loops) -> None:
    class Model(FakeModel):
        def stream(self, *args: Any) -> Any:
            raise AssertionError("it streamed")

    model = Model([say()], is_async=loops.is_async)
    loop = await loops.start([], model=model, plugins=[AgentTracePlugin()])
    await loop.ask()
    assert loop.state == "done"


async def test_a_model_that_cannot_stream_is_called_as_ever(loops: Loops) -> None:
    inner = FakeModel([say("hi")], is_async=False)

    def plain(messages: Any, tools: Any) -> Any:
        return inner(messages, tools)

    async def awaited(messages: Any, tools: Any) -> Any:
        return inner(messages, tools)

    listener = Listener()
    loop = await loops.start([], model=awaited if loops.is_async else plain, plugins=[listener])
    await loop.ask()
    assert loop.context["result"] == "hi" and listener.told == []


async def test_a_listener_that_raises_changes_nothing(loops: Loops) -> None:
    class Broken:
        def on_chunk(self, *args: Any) -> None:
            raise RuntimeError("no")

    loop = await loops.start([say("one two")], plugins=[Broken()])
    await loop.ask()
    assert loop.context["result"] == "one two"


async def test_a_chart_that_handles_stream_gets_each_piece_as_an_event(loops: Loops) -> None:
    chart = load_chart()
    chart["context"]["heard"] = []
    chart["states"]["awaiting_model"]["on"] = {"STREAM": {"actions": "hear"}}
    hear = MachineLogic(
        actions={"hear": lambda context, event: {"heard": [*context["heard"], event.data]}}
    )
    model = FakeModel([say("one two three")], is_async=loops.is_async)
    machine = create_machine(chart, agent_logic(model, sync=not loops.is_async).merge(hear))
    result = (
        await run_agent(machine, prompt="x")
        if loops.is_async
        else await asyncio.to_thread(run_agent_sync, machine, prompt="x")
    )
    assert result.output == "one two three"
    assert result.context["heard"] == [{"delta": "one"}, {"delta": " two"}, {"delta": " three"}]


# What is charged


def test_an_answer_streamed_by_the_real_sdk_is_charged_as_reported() -> None:
    listener = Listener()
    stream = Stream(fixture("openai/stream_text.json"))
    with (
        provider((200, stream)) as server,
        openai.OpenAI(api_key="x", base_url=f"{server.url}/v1", max_retries=0) as client,
    ):
        result = run_agent_sync(
            openai_model(client, prices=SHEET), prompt="Where?", plugins=[listener]
        )
    assert result.output == listener.text == "Order 42 has shipped."
    assert result.usage["tokens_in"] == 82 and result.usage["tokens_out"] == 17


async def test_a_broken_stream_is_charged_and_asked_again() -> None:
    events = fixture("anthropic/stream_text.json")
    answers = (
        (200, Stream(events, named=True, breaks_after=5)),
        (200, Stream(events, named=True)),
    )
    trace, listener = AgentTracePlugin(), Listener()
    with provider(*answers) as server:
        async with anthropic.AsyncAnthropic(
            api_key="x", base_url=server.url, max_retries=0
        ) as client:
            result = await run_agent(
                anthropic_model(client, "claude-sonnet-5", prices=SHEET),
                prompt="Where?",
                plugins=[trace, listener],
                retry=RetryPolicy(delay_s=0),
            )
    assert result.ok and result.output == "Order 42 has shipped."
    assert result.usage["turns"] == 2
    assert result.usage["tokens_in"] == 2 * 82
    assert result.usage["tokens_out"] > 17
    first, second = [each for each in trace.records if each["kind"] == "model_call"]
    assert first["gen_ai.usage.input_tokens"] == 82 and "error.type" in first
    assert second["gen_ai.usage.output_tokens"] == 17
    assert trace.totals()["total"]["input_tokens"] == result.usage["tokens_in"]
    assert listener.text.endswith("Order 42 has shipped.")


async def test_a_stream_that_outlives_its_timeout_is_cut_and_charged() -> None:
    """The model's deadline fires in the middle of the answer."""
    clock = SimulatedClock()
    hanging = asyncio.Event()

    class Model:
        is_async = True

        async def stream(self, messages: Any, tools: Any, on_chunk: Any) -> ModelResponse:
            try:
                on_chunk("one")
                hanging.set()
                await asyncio.get_running_loop().create_future()
            except asyncio.CancelledError as cancelled:
                cancelled.usage = Usage(50, 7)  # type: ignore[attr-defined]
                raise
            raise AssertionError

        async def __call__(self, messages: Any, tools: Any) -> ModelResponse:
            raise AssertionError

    machine = create_machine(
        load_chart(),
        agent_logic(Model(), model_timeout_s=5, retry=RetryPolicy(max_attempts=1)),
    )
    running = asyncio.ensure_future(
        run_agent(machine, prompt="x", plugins=[Listener()], clock=clock)
    )
    await asyncio.wait_for(hanging.wait(), 5)
    await clock.increment(5_000)
    while not running.done():
        await clock.increment(1_000)
        await asyncio.sleep(0)
    result = await running
    assert result.error["kind"] == "retries"
    assert result.usage["turns"] == 1
    assert (result.usage["tokens_in"], result.usage["tokens_out"]) == (50, 7)


def test_a_sync_stream_whose_state_was_left_ends_at_its_next_piece() -> None:
    from guardchart import SyncInterpreter

    reading, let_go, ended = threading.Event(), threading.Event(), threading.Event()
    pieces: list[str] = []

    class Model:
        is_async = False

        def stream(self, messages: Any, tools: Any, on_chunk: Any) -> ModelResponse:
            try:
                for number in range(10):
                    pieces.append(str(number))
                    on_chunk(str(number))
                    reading.set()
                    let_go.wait(5)
            except Exception as error:
                error.usage = Usage(9, 2)  # type: ignore[attr-defined]
                ended.set()
                raise
            raise AssertionError

        def __call__(self, messages: Any, tools: Any) -> ModelResponse:
            raise AssertionError

    clock = SimulatedClock()
    machine = create_machine(
        load_chart(),
        agent_logic(Model(), model_timeout_s=5, retry=RetryPolicy(max_attempts=1, delay_s=100)),
    )
    live = SyncInterpreter(machine, clock=clock, plugins=[Listener()]).start()
    thread = threading.Thread(target=live.send, args=({"type": "START", "prompt": "x"},))
    thread.start()
    assert reading.wait(5)
    clock.increment(5_000)
    let_go.set()
    assert ended.wait(5)
    thread.join(5)
    assert pieces == ["0", "1"]
    for _ in range(200):
        if live.context["tokens_in"]:
            break
        threading.Event().wait(0.01)
    assert (live.context["tokens_in"], live.context["tokens_out"]) == (9, 2)
    assert live.context["turns"] == 1
    live.stop()


async def test_the_sync_engine_charges_a_cancelled_async_model_too() -> None:
    """An async model under the sync engine, as in a synchronous LangGraph node."""
    from guardchart import SyncInterpreter

    hanging = threading.Event()

    async def model(messages: Any, tools: Any) -> ModelResponse:
        hanging.set()
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError as cancelled:
            cancelled.usage = Usage(30, 3)  # type: ignore[attr-defined]
            raise
        raise AssertionError

    clock = SimulatedClock()
    machine = create_machine(
        load_chart(),
        agent_logic(
            model, tool_registry(), model_timeout_s=5, retry=RetryPolicy(max_attempts=1, delay_s=99)
        ),
    )
    live = SyncInterpreter(machine, clock=clock, allow_async=True).start()
    thread = threading.Thread(target=live.send, args=({"type": "START", "prompt": "x"},))
    thread.start()
    assert hanging.wait(5)
    moving = clock.increment(5_000)
    if moving is not None:
        await moving
    for _ in range(300):
        if live.context["tokens_in"]:
            break
        await asyncio.sleep(0.01)
    thread.join(5)
    assert live.context["tokens_in"] == 30
    live.stop()
