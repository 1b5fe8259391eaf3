"""What the gate costs a tool round in LangChain: ``python -m benchmarks.middleware [--rounds N]``.

A round is one answer of the model that calls one tool, the tool, and the way back to the model.
Each door is compared with the same agent or graph without it: same model, same tool, same saver,
CPU time of one process, the two taking turns, each from a heap that was collected just before.
A middleware that does nothing stands beside ours: what LangChain itself spends on having one, on
its tracing wrappers above all, which hop to a thread and back four times a round under ainvoke.
No middleware can spare that, so that under ainvoke the bar is held against this one.
Exit status 1: a bar was missed.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from langgraph.types import Command

from guardchart.gate import GuardSession, approval_event, tool_registry
from guardchart.kernel import create_machine
from guardchart.langchain import (
    GuardState,
    StatechartMiddleware,
    approval_gate,
    guard_tool,
    guard_tool_node,
)

TURNS = 15


@tool
def lookup(order_id: int) -> str:
    """Look up an order."""
    return "shipped"


@tool
def refund(order_id: int) -> str:
    """Refund an order."""
    return "refunded"


CHART: dict[str, Any] = {
    "id": "desk",
    "initial": "open",
    "states": {"open": {"meta": {"tools": ["lookup", "refund"]}}},
}
TOOLS = [lookup, refund]


class Model(GenericFakeChatModel):
    """Plays answers; binding tools changes nothing."""

    def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
        return self


class Idle(AgentMiddleware[Any, Any, Any]):
    """Hooks where ours has them at every round; they pass on what they are given."""

    def wrap_model_call(self, request: Any, handler: Any) -> Any:
        return handler(request)

    async def awrap_model_call(self, request: Any, handler: Any) -> Any:
        return await handler(request)

    def wrap_tool_call(self, request: Any, handler: Any) -> Any:
        return handler(request)

    async def awrap_tool_call(self, request: Any, handler: Any) -> Any:
        return await handler(request)


class State(MessagesState, GuardState):
    """The conversation, and the chart."""


def script(rounds: int, name: str = "lookup") -> Iterator[AIMessage]:
    for n in range(rounds):
        call = {"name": name, "args": {"order_id": n}, "id": f"c{n}", "type": "tool_call"}
        yield AIMessage("", tool_calls=[call])
    yield AIMessage("done")


ASK: Any = {"messages": [("user", "please")]}
THREAD: Any = {"configurable": {"thread_id": "t"}, "recursion_limit": 10_000}


def agent(rounds: int, middleware: Any, name: str = "lookup") -> Any:
    return create_agent(
        Model(messages=script(rounds, name)),
        TOOLS,
        middleware=middleware,
        checkpointer=InMemorySaver(),
    )


def graph(rounds: int, tools: Any, gate: Any = None) -> Any:
    model = Model(messages=script(rounds))
    made: Any = StateGraph(State)
    made.add_node("agent", lambda state: {"messages": [model.invoke(state["messages"])]})
    made.add_node("tools", tools)
    made.add_edge(START, "agent")
    made.add_edge("tools", "agent")
    if gate is None:
        made.add_conditional_edges("agent", tools_condition)
    else:
        made.add_node("approval", gate)
        made.add_edge("agent", "approval")
    return made.compile(checkpointer=InMemorySaver())


def guard(**options: Any) -> StatechartMiddleware:
    return StatechartMiddleware(CHART, tools=TOOLS, **options)


def wrapped() -> list[Any]:
    session = GuardSession(create_machine(CHART), tool_registry(*TOOLS))
    return [guard_tool(each, session) for each in TOOLS]


def asked(app: Any) -> None:
    """Answer every question with yes."""
    out = app.invoke(ASK, THREAD)
    while "__interrupt__" in out:
        calls = out["__interrupt__"][0].value["calls"]
        out = app.invoke(Command(resume=approval_event(calls)), THREAD)


def invoked(app: Any) -> None:
    app.invoke(ASK, THREAD)


def awaited(app: Any) -> None:
    asyncio.run(app.ainvoke(ASK, THREAD))


class Row(NamedTuple):
    """A door, what it is compared with, and the ratio it must stay under; None is for show."""

    title: str
    plain: Callable[[int], Any]
    guarded: Callable[[int], Any]
    bar: float | None
    drive: Callable[[Any], None] = invoked
    drive_guarded: Callable[[Any], None] | None = None


ROWS = (
    Row("create_agent", lambda n: agent(n, ()), lambda n: agent(n, [guard()]), 1.4),
    Row(
        "a middleware that does nothing", lambda n: agent(n, ()), lambda n: agent(n, [Idle()]), None
    ),
    Row(
        "create_agent, ainvoke",
        lambda n: agent(n, ()),
        lambda n: agent(n, [guard()]),
        None,
        awaited,
    ),
    Row(
        "a middleware that does nothing, ainvoke",
        lambda n: agent(n, ()),
        lambda n: agent(n, [Idle()]),
        None,
        awaited,
    ),
    Row(
        "ours against that, ainvoke",
        lambda n: agent(n, [Idle()]),
        lambda n: agent(n, [guard()]),
        1.4,
        awaited,
    ),
    Row(
        "create_agent, another tool asks",
        lambda n: agent(n, ()),
        lambda n: agent(n, [guard(side_effects=["refund"])]),
        None,
    ),
    Row(
        "create_agent, each call approved",
        lambda n: agent(n, (), "refund"),
        lambda n: agent(n, [guard(side_effects=["refund"])], "refund"),
        None,
        invoked,
        asked,
    ),
    Row(
        "guard_tool_node",
        lambda n: graph(n, ToolNode(TOOLS)),
        lambda n: graph(n, guard_tool_node(TOOLS, CHART)),
        None,
    ),
    Row(
        "approval_gate and guard_tool_node",
        lambda n: graph(n, ToolNode(TOOLS)),
        lambda n: graph(n, guard_tool_node(TOOLS, CHART), approval_gate(CHART, TOOLS)),
        None,
    ),
    Row(
        "guard_tool in a ToolNode",
        lambda n: graph(n, ToolNode(TOOLS)),
        lambda n: graph(n, ToolNode(wrapped())),
        None,
    ),
)


def spent_ms(make: Callable[[int], Any], drive: Callable[[Any], None], rounds: int) -> float:
    """Return the CPU time of one round, in ms; building the graph is not part of it."""
    app = make(rounds)
    gc.collect()
    start = time.process_time()
    drive(app)
    return (time.process_time() - start) * 1e3 / rounds


def main() -> int:
    """Print the table; return the exit status."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=40, help="tool rounds per run")
    rounds = options.parse_args().rounds
    print(f"CPU time of a tool round, guarded / unguarded, on InMemorySaver; {rounds} rounds\n")
    print(f"{'':40}{'ratio':>8}{'bar':>8}   unguarded / guarded, ms")
    for row in ROWS:
        spent_ms(row.plain, row.drive, 3)
        spent_ms(row.guarded, row.drive_guarded or row.drive, 3)
    gc.collect()
    gc.freeze()  # what the libraries hold is not walked again
    missed = False
    for row in ROWS:
        drive_guarded = row.drive_guarded or row.drive
        plain, guarded = [], []
        for _ in range(TURNS):
            plain.append(spent_ms(row.plain, row.drive, rounds))
            guarded.append(spent_ms(row.guarded, drive_guarded, rounds))
        ratio = statistics.median(g / p for g, p in zip(guarded, plain, strict=True))
        missed |= row.bar is not None and ratio > row.bar
        bar = "-" if row.bar is None else f"{row.bar:.2f}"
        print(f"{row.title:40}{ratio:8.2f}{bar:>8}   {min(plain):.2f} / {min(guarded):.2f}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
