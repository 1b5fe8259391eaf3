"""Every kind of tool that an agent can have is behind the gate, with strict arguments."""

from __future__ import annotations

import asyncio
import json
from datetime import date
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field, SecretStr
from pydantic_ai import Agent, Tool, ToolOutput
from pydantic_ai.capabilities import NativeTool
from pydantic_ai.mcp import MCPToolset
from pydantic_ai.native_tools import WebSearchTool
from pydantic_ai.tools import DeferredToolRequests, DeferredToolResults, RunContext, ToolDefinition
from pydantic_ai.toolsets import ExternalToolset, FunctionToolset

from guardchart.persistence import InMemoryLedger
from guardchart.pydantic_ai import StatechartGuard, approvals_for
from tests.pydantic_ai.agents import Desk, Script, call, results, session


def chart(*tools: Any) -> dict[str, Any]:
    return {"id": "m", "initial": "a", "states": {"a": {"meta": {"tools": list(tools)}}}}


def ping(did: list[Any]) -> Any:
    async def ping(text: str) -> str:
        did.append(text)
        return text

    return ping


# --- where tools come from ---------------------------------------------------------------------


def run_level(did: list[Any], toolset: Any) -> dict[str, Any]:
    return {"toolsets": [toolset]}


@pytest.mark.parametrize("listed", [True, False])
@pytest.mark.parametrize("source", ["agent", "run", "dynamic", "mcp", "override"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_tool_runs_only_where_it_is_listed_wherever_it_comes_from(
    source: str, listed: bool
) -> None:
    did: list[Any] = []
    script = Script(call("ping", {"text": "hi"}), "done")
    guard = StatechartGuard(session(chart("ping" if listed else "pong")))
    agent: Agent[Any, Any] = Agent(script.model, capabilities=[guard])
    options: dict[str, Any] = {}
    if source == "agent":
        agent.tool_plain(ping(did))
    elif source == "run":
        options["toolsets"] = [FunctionToolset([ping(did)])]
    elif source == "dynamic":

        @agent.toolset
        def tools(ctx: RunContext[Any]) -> Any:
            return FunctionToolset([ping(did)])

    elif source == "mcp":
        options["toolsets"] = [mcp(did)]

    async def run() -> Any:
        if source == "override":
            with agent.override(tools=[ping(did)]):
                return await agent.run("hello")
        return await agent.run("hello", **options)

    result = asyncio.run(run())
    assert result.output == "done"
    assert did == (["hi"] if listed else [])
    assert script.tools[0] == (["ping"] if listed else [])


def mcp(did: list[Any]) -> MCPToolset[Any]:
    from fastmcp.server import FastMCP

    server: Any = FastMCP("desk")
    server.tool(ping(did))
    return MCPToolset(server)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_arguments_of_an_mcp_tool_are_held_to_its_json_schema() -> None:
    did: list[Any] = []
    script = Script(call("ping", {"text": 5}), call("ping", {"text": "a", "more": 1}, "c2"), "done")
    guard = StatechartGuard(session(chart("ping")))
    agent: Agent[Any, Any] = Agent(script.model, capabilities=[guard], toolsets=[mcp(did)])
    found = results(asyncio.run(agent.run("hello")).all_messages())
    assert did == [] and [each[0] for each in found.values()] == ["failed", "failed"]
    assert "text: does not satisfy 'type'" in found["c1"][1]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_an_mcp_tool_can_be_a_side_effect() -> None:
    did: list[Any] = []
    script = Script(call("ping", {"text": "a"}), "done")
    guard = StatechartGuard(session(chart("ping")), side_effects=["ping"])
    agent: Agent[Any, Any] = Agent(
        script.model,
        output_type=[str, DeferredToolRequests],
        capabilities=[guard],
        toolsets=[mcp(did)],
    )
    first = asyncio.run(agent.run("hello"))
    assert did == []
    shown = first.output.metadata["c1"]["guardchart"]
    assert shown["arguments"] == {"text": "a"}
    yes = {"type": "HUMAN_APPROVED", "call_ids": ["c1"], "digests": {"c1": shown["digest"]}}
    for _ in range(2):
        script.tools.clear()
        script.items = ["done"]
        asyncio.run(
            agent.run(
                message_history=first.all_messages(),
                deferred_tool_results=approvals_for(first.output, guard, yes),
            )
        )
    assert did == ["a"]


def test_metadata_makes_a_tool_a_side_effect() -> None:
    did: list[Any] = []
    script = Script(call("ping", {"text": "a"}), "done")
    guard = StatechartGuard(session(chart("ping")))
    agent: Agent[Any, Any] = Agent(
        script.model,
        output_type=[str, DeferredToolRequests],
        tools=[Tool(ping(did), metadata={"side_effect": True})],
        capabilities=[guard],
    )
    first = asyncio.run(agent.run("hello"))
    assert isinstance(first.output, DeferredToolRequests) and did == []


# --- strict arguments --------------------------------------------------------------------------


class Line(BaseModel):
    sku: str
    count: int


async def order(count: int, lines: list[Line], price: float = 1.0) -> str:
    """Order something."""
    return f"{count} {[each.count for each in lines]} {price}"


GOOD = {"count": 5, "lines": [{"sku": "a", "count": 1}]}
LAX: dict[str, Any] = {
    "text for an int": {**GOOD, "count": "5"},
    "a float for an int": {**GOOD, "count": 5.0},
    "a bool for an int": {**GOOD, "count": True},
    "padded text for an int": {**GOOD, "count": " 7 "},
    "text that is not a number": {**GOOD, "price": "NaN"},
    "an undeclared key": {**GOOD, "gift": 1},
    "a nested coercion": {**GOOD, "lines": [{"sku": "a", "count": "1"}]},
    "a nested undeclared key": {**GOOD, "lines": [{"sku": "a", "count": 1, "gift": 1}]},
}
RAW: dict[str, str] = {
    "NaN": '{"count": 5, "lines": [], "price": NaN}',
    "an overflow": '{"count": 5, "lines": [], "price": 1e999}',
    "a duplicate key": '{"count": 5, "count": 6, "lines": []}',
    "no JSON": "count=5",
    "a list": "[1]",
    "NUL": '{"count": 5, "lines": [{"sku": "a\\u0000", "count": 1}]}',
}


WRITTEN: dict[str, Any] = {
    **{f"{name}, as an object": args for name, args in LAX.items()},
    **{f"{name}, as text": json.dumps(args) for name, args in LAX.items()},
    **RAW,
}


@pytest.mark.parametrize("args", WRITTEN.values(), ids=WRITTEN)
def test_lax_arguments_are_refused_and_the_run_goes_on(args: Any) -> None:
    script = Script(call("order", args), "done")
    entered: list[Any] = []

    async def spy(count: int, lines: list[Line], price: float = 1.0) -> str:
        entered.append(count)
        return "ordered"

    agent: Agent[Any, Any] = Agent(
        script.model,
        tools=[Tool(spy, name="order")],
        capabilities=[StatechartGuard(session(chart("order")))],
    )
    result = asyncio.run(agent.run("hello"))
    outcome, text = results(result.all_messages())["c1"]
    assert entered == [] and result.output == "done"
    assert outcome == "failed" and "invalid arguments" in text
    assert "gift" not in text and '"5"' not in text


def test_good_arguments_run_as_the_types_the_tool_asks_for() -> None:
    script = Script(call("order", json.dumps(GOOD)), "done")
    agent: Agent[Any, Any] = Agent(
        script.model,
        tools=[order],
        capabilities=[StatechartGuard(session(chart("order")), side_effects=["order"])],
        output_type=[str, DeferredToolRequests],
    )
    first = asyncio.run(agent.run("hello"))
    shown = first.output.metadata["c1"]["guardchart"]
    assert shown["arguments"] == {**GOOD, "price": 1.0}


async def single(line: Line) -> str:
    """Take one model, whose fields are the arguments."""
    return f"{type(line).__name__} {line.count}"


async def many(
    day: date,
    tags: set[str],
    kind: Literal["a", "b"],
    cents: Annotated[int, Field(gt=0)],
    extra: dict[str, Any] | None = None,
) -> str:
    """Take what JSON cannot say directly."""
    return f"{day.isoformat()} {sorted(tags)} {kind} {cents} {extra}"


RICH: list[tuple[Any, dict[str, Any], str]] = [
    (single, {"sku": "a", "count": 3}, "Line 3"),
    (
        many,
        {"day": "2026-01-02", "tags": ["b", "a"], "kind": "a", "cents": 5},
        "2026-01-02 ['a', 'b'] a 5 None",
    ),
    (
        many,
        {"day": "2026-01-02", "tags": [], "kind": "b", "cents": 1, "extra": {"__class__": 1}},
        "2026-01-02 [] b 1 {'__class__': 1}",
    ),
]


@pytest.mark.parametrize("effect", [False, True])
@pytest.mark.parametrize("number", range(len(RICH)))
def test_rich_arguments_arrive_as_what_the_tool_declares(number: int, effect: bool) -> None:
    fn, args, text = RICH[number]
    script = Script(call(fn.__name__, args), "done")
    guard = StatechartGuard(
        session(chart(fn.__name__)), side_effects=[fn.__name__] if effect else []
    )
    agent: Agent[Any, Any] = Agent(
        script.model,
        tools=[fn],
        capabilities=[guard],
        output_type=[str, DeferredToolRequests],
    )
    result = asyncio.run(agent.run("hello"))
    if effect:
        shown = result.output.metadata["c1"]["guardchart"]
        yes = {"type": "HUMAN_APPROVED", "call_ids": ["c1"], "digests": {"c1": shown["digest"]}}
        script.tools.clear()
        script.items = ["done"]
        result = asyncio.run(
            agent.run(
                message_history=result.all_messages(),
                deferred_tool_results=approvals_for(result.output, guard, yes),
            )
        )
    assert results(result.all_messages())["c1"] == ("success", text)


@pytest.mark.parametrize(("args", "fine"), [({"a": 1}, True), ({"a": "1"}, False)])
def test_a_tool_of_free_keywords_is_held_to_its_json_schema(args: Any, fine: bool) -> None:
    async def count(**more: int) -> str:
        return str(sum(more.values()))

    script = Script(call("count", args), "done")
    agent: Agent[Any, Any] = Agent(
        script.model, tools=[count], capabilities=[StatechartGuard(session(chart("count")))]
    )
    outcome, _ = results(asyncio.run(agent.run("hello")).all_messages())["c1"]
    assert outcome == ("success" if fine else "failed")


def test_a_side_effect_that_hides_an_argument_cannot_be_approved() -> None:
    entered: list[Any] = []

    async def login(password: SecretStr) -> str:
        entered.append(password)
        return "in"

    script = Script(call("login", {"password": "hunter2"}), "done")
    agent: Agent[Any, Any] = Agent(
        script.model,
        tools=[login],
        capabilities=[StatechartGuard(session(chart("login")), side_effects=["login"])],
        output_type=[str, DeferredToolRequests],
    )
    result = asyncio.run(agent.run("hello"))
    assert entered == [] and result.output == "done"
    assert "hides its value" in results(result.all_messages())["c1"][1]


# --- external tools ----------------------------------------------------------------------------

SHIP = ToolDefinition(
    name="ship",
    parameters_json_schema={
        "type": "object",
        "properties": {"order": {"type": "integer"}},
        "required": ["order"],
    },
)


def shipping(*script: Any, **options: Any) -> Desk:
    return Desk(
        *script,
        also=["ship"],
        agent_options={"toolsets": [ExternalToolset([SHIP])]},
        **options,
    )


def test_an_external_call_is_handed_out_while_the_state_allows_it() -> None:
    desk = shipping(call("ship", {"order": 7}), "done")
    first = desk.run()
    assert [each.tool_name for each in desk.requests.calls] == ["ship"]
    given = DeferredToolResults(calls={"c1": "shipped"})
    result = desk.run(None, message_history=first.all_messages(), deferred_tool_results=given)
    assert results(result.all_messages())["c1"] == ("success", "shipped")


@pytest.mark.parametrize("args", [{"order": "7"}, {"order": 7, "gift": 1}, {}])
def test_arguments_of_an_external_call_are_held_to_its_json_schema(args: Any) -> None:
    desk = shipping(call("ship", args), "done")
    result = desk.run()
    assert result.output == "done"
    assert results(result.all_messages())["c1"][0] == "failed"


def test_an_external_call_is_refused_when_its_sibling_has_moved_the_chart() -> None:
    desk = shipping([call("close"), call("ship", {"order": 7}, "c2")], "done")
    result = desk.run()
    assert result.output == "done" and desk.states == ["desk.closed"]
    assert results(result.all_messages())["c2"][0] == "failed"


def test_an_external_tool_that_would_need_approval_is_not_shown() -> None:
    desk = shipping("done", side_effects=["ship"])
    desk.run()
    assert "ship" not in desk.script.tools[0]


# --- what cannot be policed --------------------------------------------------------------------


def test_what_cannot_be_policed_is_said_when_the_agent_is_made(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def decide(text: str) -> str:
        return text

    async def anything(**more: Any) -> str:
        return "ok"

    guard = StatechartGuard(session(chart("anything")))
    agent: Agent[Any, Any] = Agent(
        Script("done").model,
        output_type=ToolOutput(decide),
        tools=[anything],
        capabilities=[guard, NativeTool(WebSearchTool())],
        toolsets=[ExternalToolset([SHIP], id="dock")],
    )
    said = guard.unpoliced(agent)
    assert any("native tools web_search are left out" in each for each in said)
    assert any("output function" in each for each in said)
    assert any("'anything' takes undeclared arguments" in each for each in said)
    assert any("dock" in each for each in said)
    assert any("web_search" in each for each in caplog.messages)


@pytest.mark.parametrize("native", ["deny", "allow"])
def test_native_tools_are_taken_out_of_each_request(native: Any) -> None:
    from pydantic_ai.messages import ModelResponse, TextPart
    from pydantic_ai.models.function import FunctionModel
    from pydantic_ai.profiles import ModelProfile

    seen: list[Any] = []

    def answer(messages: Any, info: Any) -> ModelResponse:
        seen.extend(info.model_request_parameters.native_tools)
        return ModelResponse(parts=[TextPart("done")])

    model = FunctionModel(
        answer, profile=ModelProfile(supported_native_tools=frozenset({WebSearchTool}))
    )
    agent: Agent[Any, Any] = Agent(
        model,
        capabilities=[
            StatechartGuard(session(chart()), native=native),
            NativeTool(WebSearchTool()),
        ],
    )
    asyncio.run(agent.run("hello"))
    assert [each.kind for each in seen] == ([] if native == "deny" else ["web_search"])


# --- tracing -----------------------------------------------------------------------------------


def test_the_current_span_says_where_the_chart_stood_and_what_it_decided() -> None:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
    from pydantic_ai.models.instrumented import InstrumentationSettings

    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    desk = Desk(
        call("look_up", {"order": 7}),
        call("refund", {"order": 7}, "c2"),
        "done",
        runner=session(ledger=InMemoryLedger()),
    )
    desk.agent.instrument = InstrumentationSettings(tracer_provider=provider)
    desk.run()
    marks = [
        (span.attributes["guardchart.decision"], span.attributes["guardchart.state"])
        for span in exporter.get_finished_spans()
        if span.attributes and "guardchart.decision" in span.attributes
    ]
    assert marks == [("done", ("desk.open",)), ("ask", ("desk.open",))]


# --- tools that pydantic-ai adds by itself, and plain functions --------------------------------


def test_tools_that_are_searched_for_are_gated_when_they_are_found() -> None:
    did: list[Any] = []

    async def rare(text: str) -> str:
        """A tool that is seldom needed."""
        did.append(text)
        return "found"

    async def secret(text: str) -> str:
        """A tool that is seldom needed and never listed."""
        did.append("secret")
        return "found"

    def search(messages: Any) -> Any:
        return call("search_tools", {"queries": ["seldom"]}, "c0")

    script = Script(
        search, call("rare", {"text": "a"}), call("secret", {"text": "b"}, "c2"), "done"
    )
    agent: Agent[Any, Any] = Agent(
        script.model,
        tools=[Tool(rare, defer_loading=True), Tool(secret, defer_loading=True)],
        capabilities=[StatechartGuard(session(chart("rare")))],
    )
    result = asyncio.run(agent.run("hello"))
    assert result.output == "done" and did == ["a"]
    assert "rare" in script.tools[1]
    assert "secret" not in {name for shown in script.tools for name in shown}


@pytest.mark.parametrize("effect", [False, True])
def test_a_plain_function_is_run_in_a_thread_and_gated_alike(effect: bool) -> None:
    import threading

    threads: list[Any] = []

    def ping(text: str) -> str:
        threads.append(threading.current_thread())
        return text

    script = Script(call("ping", {"text": "a"}), "done")
    guard = StatechartGuard(session(chart("ping")), side_effects=["ping"] if effect else [])
    agent: Agent[Any, Any] = Agent(
        script.model, tools=[ping], capabilities=[guard], output_type=[str, DeferredToolRequests]
    )
    result = asyncio.run(agent.run("hello"))
    if effect:
        shown = result.output.metadata["c1"]["guardchart"]
        yes = {"type": "HUMAN_APPROVED", "call_ids": ["c1"], "digests": {"c1": shown["digest"]}}
        script.tools.clear()
        script.items = ["done"]
        result = asyncio.run(
            agent.run(
                message_history=result.all_messages(),
                deferred_tool_results=approvals_for(result.output, guard, yes),
            )
        )
    assert results(result.all_messages())["c1"] == ("success", "a")
    assert len(threads) == 1 and threads[0] is not threading.main_thread()


@pytest.mark.parametrize("effect", [False, True])
@pytest.mark.parametrize("kind", ["retry", "failed", "crash"])
def test_what_a_tool_raises_reaches_the_framework_as_it_was(kind: str, effect: bool) -> None:
    from pydantic_ai import ModelRetry
    from pydantic_ai.exceptions import ToolFailed

    class Crash(Exception):
        """The application's own."""

    async def ping(text: str) -> str:
        raise {"retry": ModelRetry("again"), "failed": ToolFailed("no"), "crash": Crash()}[kind]

    failed = {**chart("ping")}
    failed["states"]["a"]["on"] = {"tool.failed.ping": "b"}
    failed["states"]["b"] = {"meta": {"tools": ["ping"]}}
    gate = session(failed)
    script = Script(call("ping", {"text": "a"}), "done")
    guard = StatechartGuard(gate, side_effects=["ping"] if effect else [])
    agent: Agent[Any, Any] = Agent(
        script.model, tools=[ping], capabilities=[guard], output_type=[str, DeferredToolRequests]
    )

    async def run() -> Any:
        result = await agent.run("hello")
        if not effect:
            return result
        shown = result.output.metadata["c1"]["guardchart"]
        yes = {"type": "HUMAN_APPROVED", "call_ids": ["c1"], "digests": {"c1": shown["digest"]}}
        script.tools.clear()
        script.items = ["done"]
        return await agent.run(
            message_history=result.all_messages(),
            deferred_tool_results=approvals_for(result.output, guard, yes),
        )

    if kind == "crash":
        with pytest.raises(Crash):
            asyncio.run(run())
    else:
        found = results(asyncio.run(run()).all_messages())["c1"][0]
        assert found == ("retried" if kind == "retry" else "failed")
    assert gate.snapshot.state_ids == {"m.b"}
    if effect:
        (row,) = [each for each in _rows(gate) if each.id == "c1"]
        assert row.status == "failed"


def _rows(gate: Any) -> list[Any]:
    return list(gate.ledger._rows.ids.values())
