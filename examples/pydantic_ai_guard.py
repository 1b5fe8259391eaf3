"""A pydantic-ai Agent behind a chart: parked, approved in another process, attacked.

``python -m examples.pydantic_ai_guard``. Two processes share a ledger on disk and nothing else
but JSON. The refund is approved once, resumed twice, then resumed with other arguments, and a
tool that no state lists is asked for. It refunds once. Runs offline.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from pydantic_ai import Agent
from pydantic_ai.messages import (
    ModelMessagesTypeAdapter,
    ModelResponse,
    TextPart,
    ToolCallPart,
)
from pydantic_ai.models.function import AgentInfo, FunctionModel
from pydantic_ai.tools import DeferredToolRequests

from guardchart import create_machine
from guardchart.gate import GuardSession, approval_event
from guardchart.persistence import SQLiteLedger
from guardchart.pydantic_ai import StatechartGuard, approvals_for, pending_approval

CHART: dict[str, Any] = {
    "id": "desk",
    "initial": "open",
    "states": {
        "open": {
            "meta": {"tools": ["look_up", "refund"]},
            "on": {"tool.done.refund": "refunded"},
        },
        "refunded": {"meta": {"tools": ["look_up"]}},
    },
}
REQUESTS = TypeAdapter(DeferredToolRequests)


def answers(messages: list[Any], info: AgentInfo) -> ModelResponse:
    """A model that was talked into more than the state allows."""
    said = sum(isinstance(each, ModelResponse) for each in messages)
    if said == 0:
        return ModelResponse(parts=[ToolCallPart("wipe_orders", {}, tool_call_id="c1")])
    if said == 1:
        arguments = {"order": 7, "cents": 1250}
        return ModelResponse(parts=[ToolCallPart("refund", arguments, tool_call_id="c2")])
    return ModelResponse(parts=[TextPart("Twelve fifty are on their way.")])


class Desk:
    """The agent and its guard, made alike in every process."""

    def __init__(self, folder: Path) -> None:
        self.journal = folder / "refunds.txt"
        session = GuardSession(create_machine(CHART), ledger=SQLiteLedger(folder / "ledger.db"))
        self.guard: StatechartGuard[Any] = StatechartGuard(session)
        self.agent = Agent(
            FunctionModel(answers),
            output_type=[str, DeferredToolRequests],
            capabilities=[self.guard],
        )

        @self.agent.tool_plain(requires_approval=True)
        async def refund(order: int, cents: int) -> str:
            """Refund part of an order."""
            with self.journal.open("a") as file:
                file.write(f"{order} {cents}\n")
            return "refunded"

        @self.agent.tool_plain
        async def wipe_orders() -> str:
            """Wipe all orders."""
            raise AssertionError("no state lists this tool")

    def refunds(self) -> list[str]:
        return self.journal.read_text().splitlines() if self.journal.exists() else []


def park(folder: Path) -> None:
    """The first process: the run pauses, and leaves its messages and its question."""
    result = asyncio.run(Desk(folder).agent.run("I want my money back"))
    assert isinstance(result.output, DeferredToolRequests)
    (folder / "messages.json").write_bytes(result.all_messages_json())
    (folder / "requests.json").write_bytes(REQUESTS.dump_json(result.output))


def resume(folder: Path) -> None:
    """The second process: a person reads, agrees, and the run goes on; twice, and attacked."""
    desk = Desk(folder)
    requests = REQUESTS.validate_json((folder / "requests.json").read_bytes())
    pending = pending_approval(requests)
    print("to approve:", json.dumps(pending[0]["arguments"]))
    results = approvals_for(requests, desk.guard, approval_event(pending, by="ann"))
    for attempt in ("approved", "resumed once more", "resumed with other arguments"):
        messages = ModelMessagesTypeAdapter.validate_json((folder / "messages.json").read_bytes())
        if attempt.endswith("arguments"):
            for message in messages:
                for call in getattr(message, "tool_calls", ()):
                    if call.tool_name == "refund":
                        call.args = {"order": 7, "cents": 999_999}
        result = asyncio.run(
            desk.agent.run(message_history=messages, deferred_tool_results=results)
        )
        print(f"{attempt}: {result.output}")
        print(f"  refunds: {desk.refunds()}")


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        for step in ("park", "resume"):
            command = [sys.executable, "-m", "examples.pydantic_ai_guard", step, name]
            subprocess.run(command, check=True)


if __name__ == "__main__":
    if len(sys.argv) == 3:
        {"park": park, "resume": resume}[sys.argv[1]](Path(sys.argv[2]))
    else:
        main()
