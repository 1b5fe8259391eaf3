"""Real OpenTelemetry spans, read back from the SDK's in-memory exporter."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry import trace as otel
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from guardchart import MachineLogic, create_machine
from guardchart.agents import (
    AgentTracePlugin,
    FakeModel,
    agent_logic,
    run_agent_sync,
    tool_registry,
)
from guardchart.errors import MissingExtraError
from tests.agents.loops import Loops, allowing, balance, pay, say, turn

SECRET = "sk-live-4242424242424242"


class Spans:
    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = self.provider.get_tracer("test")

    def plugin(self, **options: Any) -> AgentTracePlugin:
        return AgentTracePlugin(on_span="otel", tracer_provider=self.provider, **options)

    @property
    def finished(self) -> list[Any]:
        return list(self.exporter.get_finished_spans())

    def of(self, operation: str) -> list[Any]:
        name = "gen_ai.operation.name"
        return [each for each in self.finished if each.attributes.get(name) == operation]

    def text(self) -> str:
        return "\n".join(each.to_json() for each in self.finished)


@pytest.fixture
def spans() -> Iterator[Spans]:
    made = Spans()
    yield made
    made.provider.shutdown()


async def test_a_run_is_an_agent_span_with_its_calls_below_it(loops: Loops, spans: Spans) -> None:
    trace = spans.plugin()
    used = {"input_tokens": 10, "output_tokens": 4, "cost_usd": 0.5}
    loop = await loops.start([balance(usage=used, id="c1"), say(usage=used)], plugins=[trace])
    await loop.ask()
    names = [each.name for each in spans.finished]
    assert names == ["chat fake", "execute_tool balance", "chat fake", "invoke_agent toolLoop"]
    chat, ran, _, agent = spans.finished
    assert chat.kind is SpanKind.CLIENT and ran.kind is agent.kind is SpanKind.INTERNAL
    assert agent.parent is None
    for each in (chat, ran):
        assert each.parent.span_id == agent.context.span_id
        assert each.context.trace_id == agent.context.trace_id
        assert each.status.status_code is StatusCode.UNSET
        assert agent.start_time <= each.start_time <= each.end_time <= agent.end_time
    assert dict(chat.attributes) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.agent.name": "toolLoop",
        "gen_ai.request.model": "fake",
        "gen_ai.response.model": "fake",
        "gen_ai.response.tool_calls": ("balance",),
        "gen_ai.usage.input_tokens": 10,
        "gen_ai.usage.output_tokens": 4,
        "guardchart.cost_usd": 0.5,
    }
    assert dict(ran.attributes) == {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.agent.name": "toolLoop",
        "gen_ai.tool.name": "balance",
        "gen_ai.tool.type": "function",
        "gen_ai.tool.call.id": "c1",
        "guardchart.outcome": "done",
        "guardchart.entered": True,
    }
    assert agent.attributes["gen_ai.usage.input_tokens"] == 20
    assert agent.attributes["guardchart.turns"] == 2
    assert agent.attributes["guardchart.status"] == "done"
    assert agent.attributes["guardchart.run"] == loop.interp.host.run
    assert agent.attributes["gen_ai.conversation.id"] == "ticket-1"
    moves = [each.attributes["guardchart.to"] for each in agent.events]
    assert moves[0] == ("toolLoop.idle",) and moves[-1] == ("toolLoop.done",)


async def test_lines_carry_the_ids_of_the_spans(loops: Loops, spans: Spans) -> None:
    trace = spans.plugin()
    loop = await loops.start([balance(), say()], plugins=[trace])
    await loop.ask()
    known = {
        (f"{each.context.trace_id:032x}", f"{each.context.span_id:016x}") for each in spans.finished
    }
    assert {(each["trace_id"], each["span_id"]) for each in trace.records} == known


async def test_an_agent_lies_below_the_span_it_is_started_in(loops: Loops, spans: Spans) -> None:
    with spans.tracer.start_as_current_span("request") as request:
        loop = await loops.start([balance(), say()], plugins=[spans.plugin()])
        await loop.ask()
        assert otel.get_current_span() is request
    (agent,) = spans.of("invoke_agent")
    assert agent.parent.span_id == request.get_span_context().span_id


async def test_spans_of_a_model_and_of_a_tool_lie_below_their_calls(
    loops: Loops, spans: Spans
) -> None:
    def look() -> str:
        """Look."""
        with spans.tracer.start_as_current_span("inside the tool"):
            return "seen"

    inner = FakeModel([{"tool": "look", "args": {}}, say()], is_async=False)

    def sync_model(messages: Any, tools: Any) -> Any:
        with spans.tracer.start_as_current_span("inside the model"):
            return inner(messages, tools)

    async def async_model(messages: Any, tools: Any) -> Any:
        return sync_model(messages, tools)

    model = async_model if loops.is_async else sync_model
    loop = await loops.start([], tools=tool_registry(look), model=model, plugins=[spans.plugin()])
    await loop.ask()
    by_name = {each.name: each for each in spans.finished}
    assert by_name["inside the model"].parent.span_id in {
        each.context.span_id for each in spans.of("chat")
    }
    (ran,) = spans.of("execute_tool")
    assert by_name["inside the tool"].parent.span_id == ran.context.span_id


async def test_a_tracer_that_is_no_plugin_makes_spans_of_calls_below_what_is_current(
    loops: Loops, spans: Spans
) -> None:
    trace = spans.plugin()
    with spans.tracer.start_as_current_span("request") as request:
        loop = await loops.start([balance(), say()], tracer=trace)
        await loop.ask()
    here = request.get_span_context()
    calls = [*spans.of("chat"), *spans.of("execute_tool")]
    assert len(calls) == 3 and spans.of("invoke_agent") == []
    assert {each.parent.span_id for each in calls} == {here.span_id}
    assert {each["trace_id"] for each in trace.records} == {f"{here.trace_id:032x}"}


async def test_parallel_calls_are_siblings(loops: Loops, spans: Spans) -> None:
    script = [turn(balance("a1"), balance("a2"), balance("a3")), say()]
    loop = await loops.start(script, plugins=[spans.plugin()])
    await loop.ask()
    (agent,) = spans.of("invoke_agent")
    ran = spans.of("execute_tool")
    assert len(ran) == 3
    assert {each.parent.span_id for each in ran} == {agent.context.span_id}


def test_a_child_machine_lies_below_its_parent(spans: Spans) -> None:
    chart = allowing()
    chart["context"]["input"] = "work"
    child = create_machine(chart, agent_logic(FakeModel([say()], is_async=False)))
    boss = create_machine(
        {
            "id": "boss",
            "initial": "run",
            "states": {
                "run": {"invoke": {"id": "one", "src": "worker", "onDone": "over"}},
                "over": {"type": "final"},
            },
        },
        MachineLogic(services={"worker": child}),
    )
    run_agent_sync(boss, plugins=[spans.plugin()])
    below, above = spans.of("invoke_agent")
    assert (below.name, above.name) == ("invoke_agent boss:one", "invoke_agent boss")
    assert below.parent.span_id == above.context.span_id
    assert below.attributes["guardchart.run"] == above.attributes["guardchart.run"]
    (chat,) = spans.of("chat")
    assert chat.parent.span_id == below.context.span_id


async def test_what_went_wrong_is_an_error_by_class_name(loops: Loops, spans: Spans) -> None:
    def broken() -> str:
        """Break."""
        raise ConnectionError(SECRET)

    script = [RuntimeError(SECRET), {"tool": "broken", "args": {}}, pay(id="p")]
    loop = await loops.start(
        script, tools=tool_registry(broken), plugins=[spans.plugin(record_content=True)]
    )
    await loop.ask()
    failed, *_ = spans.of("chat")
    assert failed.status.status_code is StatusCode.ERROR
    assert failed.status.description == failed.attributes["error.type"] == "RuntimeError"
    assert not failed.events
    (ran,) = spans.of("execute_tool")
    assert ran.status.status_code is StatusCode.ERROR
    assert ran.attributes["error.type"] == "ConnectionError"
    (agent,) = spans.of("invoke_agent")
    assert agent.status.status_code is StatusCode.ERROR
    assert agent.attributes["guardchart.error.kind"] == "tool_denied"
    assert SECRET not in spans.text()


async def test_content_is_json_text_and_only_on_request(loops: Loops, spans: Spans) -> None:
    loop = await loops.start([say("a long answer")], plugins=[spans.plugin()])
    await loop.ask("a long question")
    assert "a long" not in spans.text()
    told = await loops.start([say("a long answer")], plugins=[spans.plugin(record_content=True)])
    await told.ask("a long question")
    chat = spans.of("chat")[-1]
    (asked,) = json.loads(chat.attributes["gen_ai.input.messages"])
    assert asked["parts"] == [{"type": "text", "content": "a long question"}]
    (answer,) = json.loads(chat.attributes["gen_ai.output.messages"])
    assert answer["parts"] == [{"type": "text", "content": "a long answer"}]


async def test_every_name_of_the_conventions_is_one_they_have(loops: Loops, spans: Spans) -> None:
    from opentelemetry.semconv._incubating.attributes import gen_ai_attributes

    known = {value for name, value in vars(gen_ai_attributes).items() if name.startswith("GEN_AI_")}
    loop = await loops.start(
        [balance(), say()], plugins=[spans.plugin(record_content=True)], system_prompt="Be brief."
    )
    await loop.ask()
    used = {
        name
        for span in spans.finished
        for name in span.attributes
        if name.startswith("gen_ai.") and name != "gen_ai.response.tool_calls"
    }
    assert len(used) > 10
    assert used <= known


async def test_a_parked_run_ends_its_span_and_goes_on_in_another(
    loops: Loops, spans: Spans
) -> None:
    parked = await loops.parked(pay(), plugins=[spans.plugin()])
    parked.interp.stop()
    again = await loops.again(parked, plugins=[spans.plugin()])
    await again.approve()
    first, second = spans.of("invoke_agent")
    assert first.attributes["guardchart.status"] == "stopped"
    assert second.attributes["guardchart.status"] == "done"
    assert first.attributes["guardchart.run"] == second.attributes["guardchart.run"]


async def test_without_an_sdk_nothing_breaks_and_lines_have_ids(loops: Loops) -> None:
    trace = AgentTracePlugin(on_span="otel", tracer_provider=otel.NoOpTracerProvider())
    loop = await loops.start([balance(), say()], plugins=[trace])
    await loop.ask()
    assert loop.state == "done"
    assert {each["trace_id"] for each in trace.records} == {loop.interp.host.run}
    assert all(int(each["span_id"], 16) for each in trace.records)


def test_without_opentelemetry_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.trace", None)
    with pytest.raises(MissingExtraError, match=r'pip install "guardchart\[otel\]"'):
        AgentTracePlugin(on_span="otel")
