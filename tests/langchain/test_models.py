"""chat_model: a LangChain chat model behind the tool loop, alone and inside a node."""

from __future__ import annotations

import asyncio
import threading
from typing import Annotated, Any, TypedDict

import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import add_messages

from guardchart.agents import (
    agent_logic,
    load_chart,
    run_agent,
    run_agent_sync,
    tool,
    tool_registry,
)
from guardchart.errors import AgentConfigError
from guardchart.langchain import chat_model
from guardchart.langgraph import route_by_statechart, statechart_graph, statechart_node
from tests.langchain.fakes import Scripted, call, says


def lookup(order_id: int) -> str:
    """Look up an order."""
    return f"order {order_id}: shipped"


def loop_chart(*names: str) -> dict[str, Any]:
    chart = load_chart()
    for state in ("awaiting_model", "awaiting_tool"):
        chart["states"][state]["meta"]["tools"] = list(names)
    return chart


USAGE = {"input_tokens": 12, "output_tokens": 3, "total_tokens": 15}


def ask(model: Any, **more: Any) -> Any:
    return run_agent_sync(model, tools=tool_registry(lookup), prompt="Where is order 7?", **more)


def test_a_chat_model_proposes_calls_and_answers() -> None:
    chat = Scripted(
        script=[
            says(call("lookup", order_id=7), usage_metadata=USAGE),
            AIMessage("It has shipped.", response_metadata={"model_name": "m-1"}),
        ]
    )
    result = ask(chat_model(chat, is_async=False), system_prompt="Be brief.")
    assert result.output == "It has shipped."
    assert (result.usage["tokens_in"], result.usage["tokens_out"]) == (12, 3)
    assert chat.told == [["lookup"]]  # bound once, though it was asked twice
    first, second = chat.asked
    assert [type(each) for each in first] == [SystemMessage, HumanMessage]
    assert isinstance(second[-1], ToolMessage) and second[-1].content == "order 7: shipped"


async def test_the_same_model_is_awaited_in_the_async_engine() -> None:
    chat = Scripted(script=[says(call("lookup", order_id=7)), "It has shipped."])
    result = await run_agent(
        chat_model(chat), tools=tool_registry(lookup), prompt="Where is order 7?"
    )
    assert result.output == "It has shipped."


def test_prices_give_costs_and_options_reach_the_model() -> None:
    chat = Scripted(script=[AIMessage("hi", usage_metadata=USAGE)])
    model = chat_model(
        chat,
        is_async=False,
        prices={"input_per_mtok": 1.0, "output_per_mtok": 2.0},
        tool_choice="auto",
        temperature=0,
    )
    answer: Any = model([{"role": "user", "content": "hi"}], [])
    assert answer.usage.cost_usd == pytest.approx(18e-6)


def test_arguments_langchain_could_not_parse_are_denied_by_the_gate() -> None:
    broken = AIMessage(
        "",
        invalid_tool_calls=[
            {
                "name": "lookup",
                "args": "{oops",
                "id": "c1",
                "error": "",
                "type": "invalid_tool_call",
            }
        ],
    )
    result = ask(chat_model(Scripted(script=[broken, "?"]), is_async=False))
    assert result.error["kind"] == "tool_denied"


def test_the_providers_own_argument_text_is_read_strictly() -> None:
    # LangChain has parsed it already, and let the second of two equal keys win.
    raw = {
        "id": "c1",
        "type": "function",
        "function": {"name": "lookup", "arguments": '{"order_id": 1, "order_id": 7}'},
    }
    message = says(call("lookup", order_id=7), additional_kwargs={"tool_calls": [raw]})
    result = ask(chat_model(Scripted(script=[message, "?"]), is_async=False))
    assert result.error["kind"] == "tool_denied"


def test_a_tool_with_a_dotted_name_goes_by_another_one_on_the_wire() -> None:
    chat = Scripted(script=[says(call("shop_lookup", order_id=7)), "It has shipped."])
    dotted = tool(lookup, name="shop.lookup")
    registry = tool_registry(dotted)
    result = run_agent_sync(chat_model(chat, is_async=False), tools=registry, prompt="Where?")
    assert result.output == "It has shipped."
    assert chat.told == [["shop_lookup"]]
    assert chat.asked[1][-2].tool_calls[0]["name"] == "shop_lookup"  # type: ignore[attr-defined]


def test_an_images_turn_reaches_the_model_as_blocks() -> None:
    chat = Scripted(script=["a cat"])
    content = [{"type": "image", "image": "https://example.com/a.png"}]
    chat_model(chat, is_async=False)([{"role": "user", "content": content}], [])
    assert chat.asked[0][0].content == [{"type": "image", "url": "https://example.com/a.png"}]


def test_what_is_no_chat_model_is_refused() -> None:
    chat = Scripted(script=[])
    with pytest.raises(AgentConfigError, match="not a chat model"):
        chat_model(chat.bind(stop=["x"]))  # type: ignore[arg-type]
    with pytest.raises(AgentConfigError, match="'tools'"):
        chat_model(chat, tools=[])
    with pytest.raises(AgentConfigError, match="prices"):
        chat_model(chat, prices={"input": 1.0})


# Inside a node


class State(TypedDict, total=False):
    event: dict[str, Any] | None
    xsm: dict[str, Any]
    messages: Annotated[list[Any], add_messages]


def compiled(chat: Scripted, *, is_async: bool) -> Any:
    model = chat_model(chat, is_async=is_async)
    chart = loop_chart("lookup")
    node = statechart_node(
        chart,
        agent_logic(model, tool_registry(lookup)),
        event_key="event",
        messages_key="messages",
        event_from_state=lambda state: state.get("event"),
    )
    graph = StateGraph(State)
    graph.add_node("agent", node)
    graph.add_edge(START, "agent")
    graph.add_conditional_edges(
        "agent", route_by_statechart(chart, {"awaiting_human": END, "done": END, "error": END})
    )
    return graph.compile(checkpointer=InMemorySaver())


START_EVENT = {"event": {"type": "START", "prompt": "Where is order 7?"}}
THREAD: Any = {"configurable": {"thread_id": "t"}}
SCRIPT = [says(call("lookup", order_id=7)), "It has shipped already."]


@pytest.mark.parametrize("is_async", [False, True], ids=["sync model", "async model"])
def test_tokens_reach_the_messages_stream_of_a_graph(is_async: bool) -> None:
    app = compiled(Scripted(script=SCRIPT), is_async=is_async)
    chunks = [
        chunk.content
        for chunk, _ in app.stream(START_EVENT, THREAD, stream_mode="messages")
        if chunk.type == "AIMessageChunk"
    ]
    assert [each for each in chunks if each] == ["It", " has", " shipped", " already."]


@pytest.mark.parametrize("is_async", [False, True], ids=["sync model", "async model"])
async def test_tokens_reach_the_messages_stream_of_an_async_graph(is_async: bool) -> None:
    app = compiled(Scripted(script=SCRIPT), is_async=is_async)
    chunks = [
        chunk.content
        async for chunk, _ in app.astream(START_EVENT, THREAD, stream_mode="messages")
        if chunk.type == "AIMessageChunk"
    ]
    assert "".join(chunks) == "It has shipped already."
    assert app.get_state(THREAD).values["messages"][-1].content == "It has shipped already."


class Awaited(Scripted):
    """A chat model with an async form of its own."""

    async def _agenerate(
        self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any
    ) -> Any:
        return self._generate(messages)


class Forwarding:
    """A model that notes what it passes on to another one, whatever is asked of it."""

    def __init__(self, model: Any) -> None:
        self.model, self.noted = model, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    async def __call__(self, messages: Any, tools: Any) -> Any:
        self.noted += 1
        return await self.model(messages, tools)


def noting(where: list[tuple[str, bool]], text: str) -> Any:
    """An item of a script that notes its thread and whether a loop runs there."""

    def item(messages: Any) -> AIMessage:
        looped = True
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            looped = False
        where.append((threading.current_thread().name, looped))
        return AIMessage(text)

    return item


def graph_of(model: Any, **options: Any) -> Any:
    return statechart_graph(
        loop_chart("lookup"),
        agent_logic(model, tool_registry(lookup), **options),
        messages_key="messages",
        state_schema=State,
    )


@pytest.mark.parametrize(
    ("kind", "where"),
    [(Scripted, ("guardchart-worker", False)), (Awaited, ("guardchart-loop", True))],
    ids=["no async form", "an async form"],
)
def test_a_graph_that_is_invoked_awaits_only_a_chat_model_with_an_async_form(
    kind: type[Scripted], where: tuple[str, bool]
) -> None:
    seen: list[tuple[str, bool]] = []
    out = graph_of(chat_model(kind(script=[noting(seen, "Hi.")]))).invoke(START_EVENT)
    assert out["messages"][-1].content == "Hi." and seen == [where]


async def test_a_graph_that_is_awaited_awaits_a_chat_model_of_either_kind() -> None:
    for kind in (Scripted, Awaited):
        app = graph_of(chat_model(kind(script=[says(call("lookup", order_id=7)), "Hi."])))
        assert (await app.ainvoke(START_EVENT))["messages"][-1].content == "Hi."


def test_a_chat_model_that_hangs_in_a_graph_is_given_up_when_the_chart_does() -> None:
    release = threading.Event()

    def hang(messages: Any) -> AIMessage:
        release.wait(30)
        return AIMessage("too late")

    try:
        app = graph_of(chat_model(Scripted(script=[hang, "Hi."])), model_timeout_s=0.2)
        assert "too late" not in str(app.invoke(START_EVENT))
    finally:
        release.set()


def test_a_model_around_a_chat_model_is_never_passed_by() -> None:
    model = Forwarding(chat_model(Scripted(script=[says(call("lookup", order_id=7)), "Hi."])))
    out = graph_of(model).invoke(START_EVENT)
    assert out["messages"][-1].content == "Hi." and model.noted == 2
