"""LangChain tools in a registry: strict schemas, hidden injection, MCP, the two engines."""

from __future__ import annotations

import datetime
from decimal import Decimal
from typing import Annotated, Any, TypedDict

import langchain_core.tools as lc
import pytest
from langchain_core.messages import ToolMessage
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import BaseTool, InjectedToolArg, InjectedToolCallId, ToolException
from langchain_mcp_adapters.tools import load_mcp_tools
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from langgraph.prebuilt import InjectedState, InjectedStore, ToolRuntime
from langgraph.store.base import BaseStore
from langgraph.store.memory import InMemoryStore
from langgraph.types import Command
from mcp.server.fastmcp import FastMCP
from mcp.shared.memory import create_connected_server_and_client_session
from pydantic import BaseModel, Field, field_validator

from guardchart.agents import (
    FakeModel,
    agent_logic,
    pending_approval,
    run_agent,
    run_agent_sync,
)
from guardchart.errors import AgentConfigError
from guardchart.gate import (
    Facts,
    IdempotencyKey,
    Outcome,
    ToolCall,
    aexecute,
    as_allowed,
    execute,
    tool,
    tool_registry,
)
from guardchart.langchain import guard_tool
from guardchart.langgraph import statechart_node
from tests.langchain.desk import Agent, both, chart, results
from tests.langchain.fakes import call, says
from tests.langchain.test_models import loop_chart


def run(item: Any, _name: str = "t", /, **arguments: Any) -> Outcome:
    registry = tool_registry(item)
    (name,) = registry.names
    return execute(ToolCall("c1", name, arguments), Facts(registry, as_allowed("*")))


async def arun(item: Any, **arguments: Any) -> Outcome:
    registry = tool_registry(item)
    (name,) = registry.names
    return await aexecute(ToolCall("c1", name, arguments), Facts(registry, as_allowed("*")))


class Line(BaseModel):
    sku: str
    cents: int


@lc.tool
def order(lines: list[Line], due: datetime.date, rate: Decimal = Decimal("1.0")) -> str:
    """Order things."""
    return f"{lines!r} {due!r} {rate!r}"


def test_a_decorated_function_is_registered_under_its_name_with_a_closed_schema() -> None:
    (schema,) = tool_registry(order).schemas()
    assert schema["name"] == "order" and schema["description"] == "Order things."
    assert schema["parameters"]["additionalProperties"] is False
    assert schema["parameters"]["$defs"]["Line"]["additionalProperties"] is False


def test_typed_arguments_reach_the_body_as_langchain_gives_them() -> None:
    out = run(order, lines=[{"sku": "a", "cents": 5}], due="2026-01-02")
    assert out.status == "done"
    assert out.text == "[Line(sku='a', cents=5)] datetime.date(2026, 1, 2) Decimal('1.0')"


@pytest.mark.parametrize(
    "arguments",
    [
        {"lines": [{"sku": "a", "cents": "5"}], "due": "2026-01-02"},
        {"lines": [{"sku": "a", "cents": 5, "SECRET": 1}], "due": "2026-01-02"},
        {"lines": [], "due": "2026-01-02", "SECRET": 1},
        {"lines": [], "due": float("nan")},
        {"lines": []},
    ],
)
def test_coercions_and_unknown_keys_are_refused_at_every_depth(arguments: Any) -> None:
    out = run(order, **arguments)
    assert out.status == "denied" and "SECRET" not in out.text


def test_a_classes_own_validator_judges_before_a_person_is_asked() -> None:
    class Amount(BaseModel):
        cents: int

        @field_validator("cents")
        @classmethod
        def _positive(cls, value: int) -> int:
            if value <= 0:
                raise ValueError("SECRET")
            return value

    @lc.tool(args_schema=Amount)
    def pay(cents: int) -> str:
        """Pay."""
        return f"paid {cents}"

    assert run(pay, cents=5).text == "paid 5"
    refused = run(pay, cents=-1)
    assert refused.status == "denied" and "SECRET" not in refused.text


def test_aliases_are_what_a_model_sends() -> None:
    class Aliased(BaseModel):
        from_: str = Field(alias="from")

    @lc.tool(args_schema=Aliased)
    def trip(from_: str) -> str:
        """Go."""
        return f"from {from_}"

    assert run(trip, **{"from": "Rome"}).text == "from Rome"


# Injection


@lc.tool
def injected(
    n: int,
    config: RunnableConfig,
    call_id: Annotated[str, InjectedToolCallId],
    key: Annotated[IdempotencyKey, InjectedToolArg],
    quiet: Annotated[bool, InjectedToolArg] = True,
) -> str:
    """Show what was injected."""
    assert isinstance(key, IdempotencyKey) and len(key) == 32
    return f"{n} {call_id} {quiet} {(config.get('configurable') or {}).get('who')}"


def test_injected_arguments_are_hidden_and_injected() -> None:
    registry = tool_registry(injected)
    assert list(registry.schemas()[0]["parameters"]["properties"]) == ["n"]
    assert run(injected, n=1).text == "1 c1 True None"


@pytest.mark.parametrize("name", ["config", "call_id", "key", "quiet"])
def test_a_model_cannot_send_an_injected_argument(name: str) -> None:
    out = run(injected, n=1, **{name: "forged"})
    assert out.status == "denied"
    assert (
        out.text
        == "error: tool 'injected' denied: invalid arguments (*: Extra inputs are not permitted)"
    )


def test_an_argument_that_nobody_injects_is_refused_when_registered() -> None:
    @lc.tool
    def lonely(n: int, user: Annotated[str, InjectedToolArg]) -> str:
        """Needs a user."""
        return user

    with pytest.raises(AgentConfigError, match="nobody injects 'user'"):
        tool_registry(lonely)


class State(TypedDict, total=False):
    event: dict[str, Any] | None
    xsm: dict[str, Any]
    customer: str


@lc.tool
def whoami(
    n: int,
    state: Annotated[dict[str, Any], InjectedState],
    customer: Annotated[str, InjectedState("customer")],
    store: Annotated[BaseStore, InjectedStore()],
    runtime: ToolRuntime[Any, Any],
) -> str:
    """Who asks?"""
    item = store.get(("names",), customer)
    assert item is not None and state["customer"] == customer
    runtime.stream_writer({"from": "the tool"})
    thread = runtime.config["configurable"]["thread_id"]  # type: ignore[typeddict-item]
    return f"{item.value['name']} in {thread}, call {runtime.tool_call_id}, for {runtime.context}"


def graph_with(item: Any, *, is_async: bool) -> Any:
    script = [{"tool": "whoami", "args": {"n": 1}, "id": "c9"}, {"text": "done"}]
    logic = agent_logic(FakeModel(script, is_async=is_async), tool_registry(item))
    node = statechart_node(
        loop_chart("whoami"), logic, event_key="event", event_from_state=lambda s: s.get("event")
    )
    graph = StateGraph(State, context_schema=dict)
    graph.add_node("agent", node)
    graph.add_edge(START, "agent")
    graph.add_edge("agent", END)
    store = InMemoryStore()
    store.put(("names",), "ann", {"name": "Ann"})
    return graph.compile(checkpointer=InMemorySaver(), store=store)


INPUT: Any = {"event": {"type": "START", "prompt": "who?"}, "customer": "ann"}
THREAD: Any = {"configurable": {"thread_id": "t"}}
SEEN = "Ann in t, call c9, for {'tenant': 'x'}"


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
async def test_state_store_and_runtime_reach_a_tool_in_a_node(is_async: bool) -> None:
    app = graph_with(whoami, is_async=is_async)
    custom = []
    if is_async:
        async for mode, item in app.astream(
            INPUT, THREAD, context={"tenant": "x"}, stream_mode=["custom", "values"]
        ):
            custom.append((mode, item))
    else:
        custom = list(
            app.stream(INPUT, THREAD, context={"tenant": "x"}, stream_mode=["custom", "values"])
        )
    assert ("custom", {"from": "the tool"}) in custom
    messages = app.get_state(THREAD).values["xsm"]["context"]["messages"]
    assert [m["content"] for m in messages if m["role"] == "tool"] == [SEEN]


def test_a_tool_that_asks_for_the_runtime_fails_outside_a_graph_and_says_why() -> None:
    out = run(whoami, n=1)
    assert out.status == "failed" and "statechart_node" in out.text


# Forms


class Both(BaseTool):
    name: str = "both"
    description: str = "Has two forms."

    def _run(self, n: int) -> str:
        return f"sync {n}"

    async def _arun(self, n: int) -> str:
        return f"async {n}"


class OnlySync(BaseTool):
    name: str = "only_sync"
    description: str = "Has one form."

    def _run(self, n: int) -> str:
        return f"sync {n}"


@lc.tool
async def only_async(n: int) -> str:
    """Has one form."""
    return f"async {n}"


async def test_each_engine_uses_the_form_that_suits_it() -> None:
    assert (await arun(Both(), n=1)).text == "async 1"
    assert (await arun(OnlySync(), n=1)).text == "sync 1"
    assert (await arun(only_async, n=1)).text == "async 1"


def test_the_sync_engine_runs_every_form() -> None:
    assert run(Both(), n=1).text == "sync 1"
    assert run(OnlySync(), n=1).text == "sync 1"
    assert run(only_async, n=1).text == "async 1"


def test_a_tool_of_one_text_keeps_its_argument() -> None:
    old = lc.Tool(name="shout", func=str.upper, description="Shout.")
    assert run(old, __arg1="hi").text == "HI"


# Results


def test_a_failure_the_tool_reports_counts_as_a_failure() -> None:
    @lc.tool
    def flaky(n: int) -> str:
        """Fail."""
        raise ToolException("out of stock")

    flaky.handle_tool_error = True
    out = run(flaky, n=1)
    assert out.status == "failed" and "out of stock" in out.text


def test_blocks_an_artifact_and_a_command_are_told_as_text() -> None:
    @lc.tool(response_format="content_and_artifact")
    def picture(n: int) -> Any:
        """Draw."""
        return [{"type": "text", "text": "see "}, {"type": "image", "url": "u"}], object()

    assert run(picture, n=1).text == "see [image]"

    @lc.tool
    def move(n: int, call_id: Annotated[str, InjectedToolCallId]) -> Any:
        """Move."""
        return Command(update={"messages": [ToolMessage("moved", tool_call_id=call_id)]})

    assert run(move, n=1).text == "moved"


def test_secrets_in_a_result_are_masked_and_long_ones_cut() -> None:
    @lc.tool
    def leak(n: int) -> str:
        """Leak."""
        return "Bearer abcdefghijklmnopqrstuvwxyz0123456789 " + "x" * 9000

    text = run(leak, n=1).text
    assert "abcdefghijklmnop" not in text and "truncated" in text


# What makes a side effect


def test_a_side_effect_is_named_by_tool_by_metadata_or_by_the_registry() -> None:
    marked = order.model_copy(update={"metadata": {"side_effect": True, "readOnlyHint": True}})
    hinted = order.model_copy(update={"metadata": {"readOnlyHint": True}})
    assert tool_registry(marked).get("order").side_effect is True  # type: ignore[union-attr]
    assert tool_registry(hinted).get("order").side_effect is False  # type: ignore[union-attr]
    assert tool_registry(hinted, side_effect=True).get("order").side_effect is True  # type: ignore[union-attr]
    made = tool(order, side_effect=True, timeout_s=3, name="buy")
    assert (made.side_effect, made.timeout_s, made.name) == (True, 3, "buy")


def test_an_approved_langchain_tool_runs_once_in_the_loop() -> None:
    entered: list[int] = []

    @lc.tool
    def refund(order_id: int) -> str:
        """Refund an order."""
        entered.append(order_id)
        return "refunded"

    script = [{"tool": "refund", "args": {"order_id": 7}}, {"text": "Done."}]

    def again(model: Any, **more: Any) -> Any:
        tools = tool_registry(tool(refund, side_effect=True))
        return run_agent_sync(model, tools=tools, key="thread-lc-refund", **more)

    parked = again(FakeModel(script, is_async=False), prompt="refund 7")
    assert entered == []
    for _ in range(2):
        again(
            FakeModel(script[1:], is_async=False),
            snapshot=parked.snapshot,
            approve=pending_approval(parked.context),
        )
    assert entered == [7]


# A tool within a tool


@pytest.mark.gate
@both
def test_a_nested_tool_of_the_same_name_but_another_object_is_not_let_through(
    is_async: bool,
) -> None:
    entered: list[Any] = []

    @lc.tool("refund")
    def inner(order_id: int) -> str:
        """Refund an order by another way."""
        entered.append(("inner", order_id))
        return "refunded"

    guarded = guard_tool(inner)

    def sync_body(order_id: int) -> str:
        entered.append(("outer", order_id))
        return str(guarded.invoke({"order_id": order_id}))

    async def async_body(order_id: int) -> str:
        entered.append(("outer", order_id))
        return str(await guarded.ainvoke({"order_id": order_id}))

    outer = lc.StructuredTool.from_function(
        sync_body, async_body, name="refund", description="Refund an order."
    )
    script = [says(call("refund", "c1", order_id=7)), "done"]
    agent = Agent(
        script,
        tools=[outer],
        machine=chart("refund"),
        side_effects=["refund"],
        is_async=is_async,
    )
    out = agent.approve(agent.invoke())
    assert entered == [("outer", 7)]
    assert "needs human approval" in results(out)["c1"]


# MCP


async def test_mcp_tools_run_with_their_json_schema_enforced() -> None:
    server = FastMCP("shop")
    seen: list[Any] = []

    @server.tool()
    def stock(sku: str, warehouse: int = 1) -> str:
        """How many are there?"""
        seen.append((sku, warehouse))
        if sku == "none":
            raise ValueError("no such sku")
        return f"{sku}: 3"

    async with create_connected_server_and_client_session(server._mcp_server) as session:
        tools = await load_mcp_tools(session)
        script = [{"tool": "stock", "args": {"sku": "a-1"}}, {"text": "three"}]
        result = await run_agent(FakeModel(script), tools=tool_registry(*tools), prompt="?")
        assert result.output == "three"
        told = [m["content"] for m in result.context["messages"] if m["role"] == "tool"]
        assert told == ["a-1: 3"] and seen == [("a-1", 1)]
        for bad in (
            {"sku": 1},
            {"sku": "a", "warehouse": "2"},
            {"sku": "a", "runtime": {}},
            {"sku": "a", "config": {}},
            {},
        ):
            assert (await arun(tools[0], **bad)).status == "denied"
        assert len(seen) == 1
        failed = await arun(tools[0], sku="none")
        assert failed.status == "failed" and "no such sku" in failed.text


def test_a_schema_that_cannot_be_checked_is_refused() -> None:
    made = lc.StructuredTool(
        name="odd", description="d", func=lambda: "", args_schema={"type": "array"}
    )
    with pytest.raises(AgentConfigError, match="object"):
        tool_registry(made)
