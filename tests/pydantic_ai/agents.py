"""Agents, charts and scripted models that the tests of this bridge share."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Sequence
from typing import Any

from pydantic_ai import Agent
from pydantic_ai.messages import (
    ModelMessage,
    ModelMessagesTypeAdapter,
    ModelRequest,
    ModelResponse,
    TextPart,
    ToolCallPart,
    ToolReturnPart,
)
from pydantic_ai.models.function import AgentInfo, FunctionModel
from pydantic_ai.tools import DeferredToolRequests

from guardchart import create_machine
from guardchart.gate import GuardSession, approval_event
from guardchart.persistence import InMemoryLedger
from guardchart.pydantic_ai import StatechartGuard, pending_approval

Item = Any

DESK: dict[str, Any] = {
    "id": "desk",
    "initial": "open",
    "context": {"denied": 0},
    "states": {
        "open": {
            "meta": {"tools": ["look_up", "refund", "close"]},
            "on": {
                "tool.done.close": "closed",
                "tool.denied.wipe": {"actions": "count"},
                "tool.denied.run_code": {"actions": "count"},
            },
        },
        "closed": {"meta": {"tools": ["look_up"]}},
    },
}
"""Looks up and refunds while it is open; `close` moves it."""


def call(name: str, args: Any = None, id: str = "c1") -> ToolCallPart:
    return ToolCallPart(name, {} if args is None else args, tool_call_id=id)


class Script:
    """A model that plays its items, one an answer, and keeps what it was shown."""

    def __init__(self, *items: Item) -> None:
        self.items = list(items)
        self.tools: list[list[str]] = []
        self.outputs: list[list[str]] = []
        self.instructions: list[str | None] = []
        self.messages: list[list[ModelMessage]] = []

    def __call__(self, messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        self.tools.append([each.name for each in info.function_tools])
        self.outputs.append([each.name for each in info.output_tools])
        self.instructions.append(info.instructions)
        self.messages.append(list(messages))
        item = self.items[len(self.tools) - 1]
        if callable(item):
            item = item(messages)
        if isinstance(item, BaseException):
            raise item
        if isinstance(item, ModelResponse):
            return item
        parts = item if isinstance(item, (list, tuple)) else [item]
        return ModelResponse(parts=[TextPart(p) if isinstance(p, str) else p for p in parts])

    @property
    def model(self) -> FunctionModel:
        return FunctionModel(self)


def machine(chart: dict[str, Any] | None = None) -> Any:
    from guardchart import MachineLogic

    def count(context: Any, event: Any) -> dict[str, Any]:
        return {"denied": context["denied"] + 1}

    return create_machine(DESK if chart is None else chart, MachineLogic(actions={"count": count}))


def session(chart: dict[str, Any] | None = None, **options: Any) -> GuardSession:
    options.setdefault("ledger", InMemoryLedger())
    return GuardSession(machine(chart), **options)


class Desk:
    """An agent with a guard in front of it, and what its tools did."""

    def __init__(
        self,
        *script: Item,
        guarded: bool = True,
        chart: dict[str, Any] | None = None,
        before: Sequence[Any] = (),
        after: Sequence[Any] = (),
        runner: Any = None,
        also: Sequence[str] = (),
        agent_options: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.did: list[Any] = []
        self.script = Script(*script)
        chart = copy.deepcopy(DESK if chart is None else chart)
        chart["states"]["open"]["meta"]["tools"].extend(also)
        self.session = runner if runner is not None else session(chart)
        self.guard: StatechartGuard[Any] = StatechartGuard(self.session, **options)
        self.agent: Agent[Any, Any] = Agent(
            self.script.model,
            output_type=[str, DeferredToolRequests],
            capabilities=[*before, *([self.guard] if guarded else []), *after],
            **(agent_options or {}),
        )
        self.last: Any = None
        did = self.did

        @self.agent.tool_plain
        async def look_up(order: int) -> str:
            did.append(("look_up", order))
            return f"order {order}: delivered"

        @self.agent.tool_plain(requires_approval=True)
        async def refund(order: int, cents: int = 100) -> str:
            did.append(("refund", order, cents))
            return f"refunded {cents}"

        @self.agent.tool_plain
        async def close() -> str:
            did.append(("close",))
            return "closed"

        @self.agent.tool_plain
        async def wipe(table: str = "orders") -> str:
            did.append(("wipe", table))
            return "gone"

    def run(self, prompt: str | None = "hello", **options: Any) -> Any:
        self.last = asyncio.run(self.arun(prompt, **options))
        return self.last

    async def arun(self, prompt: str | None = "hello", **options: Any) -> Any:
        self.last = await self.agent.run(prompt, **options)
        return self.last

    @property
    def states(self) -> list[str]:
        return sorted(self.session.snapshot.state_ids)

    @property
    def requests(self) -> DeferredToolRequests:
        output = self.last.output
        assert isinstance(output, DeferredToolRequests), output
        return output

    @property
    def pending(self) -> list[dict[str, Any]]:
        return pending_approval(self.requests)

    def yes(self) -> dict[str, Any]:
        return approval_event(self.pending, by="ann")


def results(messages: Sequence[ModelMessage]) -> dict[str, tuple[str, Any]]:
    """Every tool result of a conversation, by the call's id: outcome and content."""
    return {
        part.tool_call_id: (part.outcome, part.content)
        for message in messages
        if isinstance(message, ModelRequest)
        for part in message.parts
        if isinstance(part, ToolReturnPart)
    }


def round_trip(messages: Sequence[ModelMessage]) -> list[ModelMessage]:
    """A history as it comes back from a client: through JSON."""
    text = ModelMessagesTypeAdapter.dump_json(list(messages))
    return list(ModelMessagesTypeAdapter.validate_json(text))


Edit = Callable[[ToolCallPart], None]


def edited(messages: Sequence[ModelMessage], change: Edit) -> list[ModelMessage]:
    """A history whose calls somebody changed while it lay around."""
    out = round_trip(messages)
    for message in out:
        if isinstance(message, ModelResponse):
            for part in message.tool_calls:
                change(part)
    return out
