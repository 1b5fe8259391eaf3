"""A refund desk: tools that note their entries, a chart, and how an agent is driven."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.messages import ToolMessage
from langchain_core.tools import BaseTool, tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import Command

from guardchart.langchain import StatechartMiddleware
from guardchart.persistence import InMemoryLedger
from tests.langchain.fakes import Scripted

THREAD: Any = {"configurable": {"thread_id": "t"}}
ASK: Any = {"messages": [("user", "please")]}

both = pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])


class Desk:
    """Tools whose bodies are noted in `entered`; one desk a test."""

    def __init__(self) -> None:
        self.entered: list[Any] = []

        @tool
        def lookup(order_id: int) -> str:
            """Look up an order."""
            self.entered.append(("lookup", order_id))
            return f"order {order_id}: shipped"

        @tool
        def refund(order_id: int, cents: int = 100) -> str:
            """Refund an order."""
            self.entered.append(("refund", order_id, cents))
            return f"refunded {cents}"

        @tool
        def wire(cents: int) -> str:
            """Wire money."""
            self.entered.append(("wire", cents))
            return "wired"

        self.lookup: BaseTool = lookup
        self.refund: BaseTool = refund
        self.wire: BaseTool = wire

    @property
    def tools(self) -> list[BaseTool]:
        return [self.lookup, self.refund, self.wire]


def chart(*tools: str, **more: Any) -> dict[str, Any]:
    """A chart of one state, which lists these tools."""
    listed = list(tools) or ["lookup", "refund"]
    return {
        "id": "desk",
        "initial": "open",
        "states": {"open": {"meta": {"tools": listed}, **more}},
    }


CLOSING: Any = {
    "id": "desk",
    "initial": "open",
    "states": {
        "open": {
            "meta": {"tools": ["lookup", "refund"]},
            "on": {"tool.done.refund": "closed", "tool.rejected.refund": "refused"},
        },
        "closed": {"meta": {"tools": ["lookup"]}},
        "refused": {"meta": {"tools": ["lookup"]}},
    },
}
"""A refund, or its rejection, moves it; afterwards only lookups are allowed."""


class Agent:
    """A guarded ``create_agent`` agent, and what it was asked."""

    def __init__(
        self,
        script: list[Any],
        *,
        desk: Desk | None = None,
        machine: Any = None,
        is_async: bool = False,
        outer: tuple[Any, ...] = (),
        inner: tuple[Any, ...] = (),
        tools: Any = None,
        ledger: Any = None,
        saver: Any = None,
        side_effects: Any = ("refund", "wire"),
        agent: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.desk = Desk() if desk is None else desk
        self.model = Scripted(script=script)
        self.is_async = is_async
        self.ledger = InMemoryLedger() if ledger is None else ledger
        self.saver = InMemorySaver() if saver is None else saver
        self.guard = StatechartMiddleware(
            chart() if machine is None else machine,
            tools=self.desk.tools if tools is None else tools,
            side_effects=side_effects,
            ledger=self.ledger,
            **options,
        )
        self.app: Any = create_agent(
            self.model,
            middleware=[*outer, self.guard, *inner],
            checkpointer=self.saver,
            **(agent or {}),
        )

    def invoke(self, value: Any = ASK, config: Any = THREAD) -> dict[str, Any]:
        if self.is_async:
            return asyncio.run(self.app.ainvoke(value, config))  # type: ignore[no-any-return]
        return self.app.invoke(value, config)  # type: ignore[no-any-return]

    def resume(self, answer: Any, config: Any = THREAD) -> dict[str, Any]:
        return self.invoke(Command(resume=answer), config)

    def approve(self, out: dict[str, Any], config: Any = THREAD) -> dict[str, Any]:
        return self.resume({"decisions": [decision(c) for c in asked(out)["calls"]]}, config)

    @property
    def entered(self) -> list[Any]:
        return self.desk.entered

    def state(self, config: Any = THREAD) -> Any:
        return self.app.get_state(config)

    def states(self, config: Any = THREAD) -> list[str]:
        return self.state(config).values["xsm"]["state_ids"]  # type: ignore[no-any-return]


def asked(out: dict[str, Any]) -> dict[str, Any]:
    """The one open question of a run's output."""
    (question,) = out["__interrupt__"]
    return question.value  # type: ignore[no-any-return]


def decision(call: dict[str, Any], kind: str = "approve", **more: Any) -> dict[str, Any]:
    return {"id": call["id"], "digest": call["digest"], "decision": kind, **more}


def results(out: dict[str, Any]) -> dict[str, str]:
    """Content of each tool message, by call id."""
    found = [each for each in out["messages"] if isinstance(each, ToolMessage)]
    assert len({each.tool_call_id for each in found}) == len(found), "a call has two results"
    return {each.tool_call_id: str(each.content) for each in found}


def complete(messages: list[Any]) -> bool:
    """Whether every call has exactly one result, directly after its answer."""
    for at, message in enumerate(messages):
        ids = [call["id"] for call in getattr(message, "tool_calls", None) or ()]
        after = messages[at + 1 : at + 1 + len(ids)]
        if sorted(ids) != sorted(getattr(each, "tool_call_id", "") for each in after):
            return False
    return True


Hook = Callable[[Any, Any], Any]
