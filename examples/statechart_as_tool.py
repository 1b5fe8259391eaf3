"""A statechart as a tool: the outer run pauses for a person whom the inner chart asks.

``python -m examples.statechart_as_tool``. The first process pauses and ends. The second one
shows what the inner machine would do, decides there, and resumes the outer run. Runs offline.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from pydantic_ai import Agent
from pydantic_ai.messages import (
    ModelMessagesTypeAdapter,
    ModelRequest,
    ModelResponse,
    TextPart,
    ToolCallPart,
    ToolReturnPart,
)
from pydantic_ai.models.function import AgentInfo, FunctionModel
from pydantic_ai.tools import DeferredToolRequests, DeferredToolResults, ToolApproved

from guardchart import create_machine
from guardchart.agents import (
    TOOL_LOOP,
    FakeModel,
    agent_logic,
    run_agent,
    tool,
    tool_registry,
)
from guardchart.persistence import SQLiteStore
from guardchart.pydantic_ai import agent_tool_from_machine


def inner(folder: Path, *script: dict[str, Any]) -> Any:
    """The machine inside: its own model, its own tools, its own person to ask."""

    def refund(order: int, cents: int) -> str:
        """Refund part of an order."""
        with (folder / "refunds.txt").open("a") as file:
            file.write(f"{order} {cents}\n")
        return "refunded"

    registry = tool_registry(tool(refund, side_effect=True))
    return create_machine(TOOL_LOOP, agent_logic(FakeModel(script), registry))


def answers(messages: list[Any], info: AgentInfo) -> ModelResponse:
    for message in messages:
        for part in message.parts if isinstance(message, ModelRequest) else ():
            if isinstance(part, ToolReturnPart):
                return ModelResponse(parts=[TextPart(f"The desk says: {part.content}")])
    call = ToolCallPart("refund_desk", {"prompt": "Refund order 7"}, tool_call_id="c1")
    return ModelResponse(parts=[call])


def outer(machine: Any, store: Any) -> Agent[Any, Any]:
    desk = agent_tool_from_machine(
        machine, name="refund_desk", description="Hand a refund to the desk.", store=store
    )
    return Agent(FunctionModel(answers), tools=[desk], output_type=[str, DeferredToolRequests])


def pause(folder: Path) -> None:
    """The first process: the inner machine asks, so the outer run pauses."""
    machine = inner(folder, {"tool": "refund", "args": {"order": 7, "cents": 500}})
    agent = outer(machine, SQLiteStore(folder / "runs.db"))
    result = asyncio.run(agent.run("I want my money back"))
    assert isinstance(result.output, DeferredToolRequests)
    (folder / "messages.json").write_bytes(result.all_messages_json())
    (folder / "asked.json").write_text(json.dumps(result.output.metadata["c1"]["guardchart"]))
    print("paused:", result.output.approvals[0].tool_name)


def resume(folder: Path) -> None:
    """The second process: decide inside, then go on outside."""
    asked = json.loads((folder / "asked.json").read_text())
    print("to approve:", asked["pending"][0]["name"], asked["pending"][0]["arguments"])
    machine = inner(folder, {"text": "Five euros are on their way."})
    store = SQLiteStore(folder / "runs.db")
    agent = outer(machine, store)
    messages = ModelMessagesTypeAdapter.validate_json((folder / "messages.json").read_bytes())

    async def go_on() -> Any:
        await run_agent(machine, store=store, key=asked["key"], approve=asked["pending"])
        return await agent.run(
            message_history=messages,
            deferred_tool_results=DeferredToolResults(approvals={"c1": ToolApproved()}),
        )

    result = asyncio.run(go_on())
    print(result.output)
    print("refunds:", (folder / "refunds.txt").read_text().splitlines())


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        for step in ("pause", "resume"):
            command = [sys.executable, "-m", "examples.statechart_as_tool", step, name]
            subprocess.run(command, check=True)


if __name__ == "__main__":
    if len(sys.argv) == 3:
        {"pause": pause, "resume": resume}[sys.argv[1]](Path(sys.argv[2]))
    else:
        main()
