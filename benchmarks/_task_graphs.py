"""The same support agent twice: a chart compiled by `statechart_graph`, and written by hand.

Both are LangGraph graphs with the nodes ``step``, ``model``, ``approval`` and ``tools``, take the
same supersteps a turn, and hold the same conversation in the same message channel. The one
written by hand checks nothing: no allow-list, no arguments, no budget, no ledger, no deadline.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple, TypedDict, get_type_hints

from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool as lc_tool
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import add_messages
from langgraph.prebuilt import ToolNode
from langgraph.types import Command, interrupt
from pydantic import BaseModel

from guardchart.agents import (
    ModelResponse,
    ToolCall,
    agent_logic,
    approval_event,
    load_chart,
    tool,
    tool_registry,
)
from guardchart.langchain import chat_model
from guardchart.langgraph import ledger_for, statechart_graph

__all__ = ["KINDS", "Kind", "by_hand", "of_chart", "talk"]

ANSWER = "It is on its way, and should be with you by the end of the week."


def lookup(order_id: int) -> str:
    """Look up an order."""
    return f"order {order_id}: shipped on Monday, handed to the carrier on Tuesday"


def refund(order_id: int, amount_cents: int) -> str:
    """Refund an order."""
    return f"order {order_id}: {amount_cents} cents refunded"


TOOLS = {"lookup": lookup, "refund": refund}
SIDE_EFFECTS = {"refund"}


class Kind(NamedTuple):
    """A kind of turn: what the user says, and which tool the model asks for, if any."""

    prompt: str
    name: str | None
    args: dict[str, Any]


KINDS = {
    "answer": Kind("What became of my order 42, please?", None, {}),
    "tool": Kind("What became of my order 42, please?", "lookup", {"order_id": 42}),
    "approval": Kind(
        "Order 42 never came, I want my money back.",
        "refund",
        {"order_id": 42, "amount_cents": 1250},
    ),
}


def script(kind: Kind) -> Iterator[tuple[str | None, dict[str, Any]]]:
    """What the model says, turn after turn: the id of a call, or None for its answer."""
    number = 0
    while True:
        if kind.name is not None:
            number += 1
            yield f"call_{number:024}", kind.args
        yield None, {}


# The chart


class Talk(TypedDict, total=False):
    """The app's state beside the chart's snapshot."""

    xsm: dict[str, Any]
    event: Any
    messages: Annotated[list[Any], add_messages]


class HandTalk(TypedDict, total=False):
    """The state of the graph that is written by hand."""

    event: Any
    decision: str | None
    messages: Annotated[list[Any], add_messages]


def _schema(given: Any, delta: bool) -> Any:
    """The state as it is, or with a channel whose checkpoints hold only what was added."""
    if not delta:
        return given
    from langgraph.channels.delta import DeltaChannel
    from langgraph.graph.message import _messages_delta_reducer

    fields: dict[str, Any] = get_type_hints(given, include_extras=True)
    fields["messages"] = Annotated[list[Any], DeltaChannel(_messages_delta_reducer)]
    return TypedDict(given.__name__, fields, total=False)  # type: ignore[operator]


class Chat(GenericFakeChatModel):
    """A LangChain chat model that plays a script; binding tools changes nothing."""

    def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
        return self


def chat(kind: Kind) -> Chat:
    """The chat model of both graphs."""

    def said() -> Iterator[AIMessage]:
        for ident, args in script(kind):
            if ident is None:
                yield AIMessage(ANSWER)
            else:
                call: Any = {"name": kind.name, "args": args, "id": ident, "type": "tool_call"}
                yield AIMessage("", tool_calls=[call])

    return Chat(messages=said())


class Scripted:
    """A model of `agent_logic` that plays a script."""

    is_async = False
    bounded = True

    def __init__(self, kind: Kind) -> None:
        self._name, self._script = kind.name or "", script(kind)

    def __call__(self, messages: Any, tools: Any) -> ModelResponse:
        ident, args = next(self._script)
        if ident is None:
            return ModelResponse(ANSWER)
        return ModelResponse(None, (ToolCall(ident, self._name, args),))


def of_chart(
    kind: Kind,
    saver: Any = None,
    *,
    delta: bool = False,
    langchain: bool = False,
    ledger: Any = None,
    bounded: bool = True,
) -> Any:
    """The tool loop's chart, compiled; its model and tools are functions, or LangChain's.

    The ledger lies beside the checkpoints, unless another is given. The tools are ``bounded``, as
    nobody watches a deadline of those of the graph by hand either.
    """
    chart = load_chart()
    for state in ("awaiting_model", "awaiting_tool"):
        chart["states"][state]["meta"]["tools"] = list(TOOLS)
    model: Any = Scripted(kind)
    given = [lookup, refund]
    if langchain:
        model = chat_model(chat(kind))
        given = list(map(lc_tool, given))
    harmless, harmful = given
    tools = tool_registry(
        tool(harmless, bounded=bounded), tool(harmful, side_effect=True, bounded=bounded)
    )
    return statechart_graph(
        chart,
        agent_logic(model, tools, budgets={"max_turns": None}),
        state_schema=_schema(Talk, delta),
        messages_key="messages",
        checkpointer=saver,
        ledger=ledger_for(saver) if ledger is None and saver is not None else ledger,
    )


# By hand


def _step(state: Any) -> Command[Any]:
    event = state.get("event")
    if event is not None:
        said = [HumanMessage(event["prompt"])]
        update = {"messages": said, "event": None, "decision": None}
        return Command(update=update, goto="model")
    last = state["messages"][-1]
    if not isinstance(last, AIMessage):
        return Command(goto="model")
    if not last.tool_calls:
        return Command(goto=END)
    if state.get("decision") is None and last.tool_calls[0]["name"] in SIDE_EFFECTS:
        return Command(goto="approval")
    return Command(goto="tools")


class Answer(BaseModel):
    """What the graph that is written by hand takes for an answer; LangGraph checks it."""

    decisions: list[dict[Literal["type"], Literal["approve", "reject"]]]


def _approval(state: Any) -> dict[str, Any]:
    (call,) = state["messages"][-1].tool_calls
    answer = interrupt(
        {
            "type": "approval",
            "action_requests": [
                {
                    "name": call["name"],
                    "args": call["args"],
                    "description": f"{call['name']}({call['args']})",
                }
            ],
            "review_configs": [
                {
                    "action_name": call["name"],
                    "allowed_decisions": ["approve", "reject"],
                }
            ],
        },
        response_schema=Answer,
    )
    if answer.decisions[0]["type"] == "approve":
        return {"decision": "approve"}
    refused = ToolMessage("not run: a person refused", tool_call_id=call["id"], name=call["name"])
    return {"messages": [refused]}


def _tools(state: Any) -> dict[str, Any]:
    (call,) = state["messages"][-1].tool_calls
    content = TOOLS[call["name"]](**call["args"])
    return {"messages": [ToolMessage(content, tool_call_id=call["id"], name=call["name"])]}


def by_hand(kind: Kind, saver: Any = None, *, delta: bool = False, langchain: bool = False) -> Any:
    """The same agent without a chart."""
    if langchain:
        bound = chat(kind).bind_tools(list(map(lc_tool, TOOLS.values())))
        run = ToolNode(list(map(lc_tool, TOOLS.values())))
        return _compiled(
            lambda state: {"messages": [bound.invoke(state["messages"])]}, run, saver, delta
        )
    said, name = script(kind), kind.name or ""

    def model(state: Any) -> dict[str, Any]:
        ident, args = next(said)
        if ident is None:
            return {"messages": [AIMessage(ANSWER)]}
        call: Any = {"name": name, "args": args, "id": ident, "type": "tool_call"}
        return {"messages": [AIMessage("", tool_calls=[call])]}

    return _compiled(model, _tools, saver, delta)


def _compiled(model: Any, tools: Any, saver: Any, delta: bool) -> Any:
    graph: Any = StateGraph(_schema(HandTalk, delta))
    graph.add_node("step", _step, destinations=("model", "approval", "tools", END))
    graph.add_edge(START, "step")
    for task, run in (("model", model), ("approval", _approval), ("tools", tools)):
        graph.add_node(task, run)
        graph.add_edge(task, "step")
    return graph.compile(checkpointer=saver)


# Both


def talk(
    app: Any, kind: Kind, thread: Any, *, chart: bool, asked: list[Any] | None = None
) -> dict[str, Any]:
    """One turn; a question is answered with yes.

    Args:
        app: A graph of `of_chart` or `by_hand`.
        kind: The kind it was made for.
        thread: LangGraph's configuration.
        chart: Whether it is of a chart.
        asked: Gets the state in which the graph stopped to ask.
    """
    out: dict[str, Any] = app.invoke({"event": {"type": "START", "prompt": kind.prompt}}, thread)
    if "__interrupt__" not in out:
        return out
    if asked is not None:
        asked.append(out)
    if not chart:
        yes = {"decisions": [{"type": "approve"}]}
        return app.invoke(Command(resume=yes), thread)  # type: ignore[no-any-return]
    answer = approval_event(out["__interrupt__"][0].value["calls"], by="ann")
    return app.invoke(Command(resume=answer), thread)  # type: ignore[no-any-return]
