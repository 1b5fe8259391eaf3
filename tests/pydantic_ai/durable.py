"""A durable workflow around a guarded agent; also a program that can be killed at a point.

``python -m tests.pydantic_ai.durable FOLDER POINT`` runs it, or recovers what an earlier process
of the same folder left, and prints what came of it as JSON.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

from dbos import DBOS, SetWorkflowID
from pydantic_ai import Agent
from pydantic_ai.durable_exec.dbos import DBOSDurability
from pydantic_ai.messages import ModelRequest, ModelResponse, TextPart, ToolReturnPart
from pydantic_ai.models.function import FunctionModel
from pydantic_ai.tools import DeferredToolRequests

from guardchart.gate import GuardSession, approval_event
from guardchart.persistence import SQLiteLedger
from guardchart.pydantic_ai import StatechartGuard, approvals_for, pending_approval
from tests.pydantic_ai.agents import call, machine

POINTS = ("model-1", "body-before", "body-after", "recorded", "model-2")
WORKFLOW = "ticket-7"


class Durable:
    """The agent, its guard and its workflow, on files of one folder."""

    def __init__(self, folder: Path, point: str = "", **options: Any) -> None:
        self.folder = folder
        self.point = point
        self.journal = folder / "refunds"
        self.sessions: dict[str, GuardSession] = {}
        logging.getLogger("dbos").setLevel(logging.ERROR)
        DBOS(
            config={
                "name": "desk-test",
                "system_database_url": f"sqlite:///{folder}/dbos.sqlite",
                "run_admin_server": False,
                "application_version": "1",
                "log_level": "ERROR",
            }
        )
        self.ledger = Recorder(folder / "ledger.db", self)
        self.guard: StatechartGuard[Any] = StatechartGuard(
            lambda ctx: self.sessions[self.workflow_id()],
            **{"id": "desk", "scope": "ticket-7", **options},
        )
        self.agent: Agent[Any, Any] = Agent(
            FunctionModel(self.answer),
            name="desk",
            output_type=[str, DeferredToolRequests],
            capabilities=[DBOSDurability(), self.guard],
        )
        self.agent.tool_plain(self.look_up)
        self.agent.tool_plain(self.refund, requires_approval=True)
        self.agent.tool_plain(self.close)

        async def ticket(prompt: str) -> str:
            return await self.run(prompt)

        self.workflow = DBOS.workflow(name="ticket")(ticket)

    @staticmethod
    def workflow_id() -> str:
        found = DBOS.workflow_id
        assert found is not None
        return found

    def killed_at(self, point: str) -> None:
        flag = self.folder / "killed"
        if point == self.point and not flag.exists():
            flag.write_text(point)
            os._exit(9)

    def answer(self, messages: Any, info: Any) -> ModelResponse:
        if not any(isinstance(each, ModelResponse) for each in messages):
            self.killed_at("model-1")
            return ModelResponse(
                parts=[
                    call("look_up", {"order": 7}),
                    call("refund", {"order": 7}, "c2"),
                    call("close", {}, "c3"),
                ]
            )
        self.killed_at("model-2")
        said = [
            str(part.content)
            for message in messages
            if isinstance(message, ModelRequest)
            for part in message.parts
            if isinstance(part, ToolReturnPart) and part.tool_call_id == "c2"
        ]
        return ModelResponse(parts=[TextPart(said[-1] if said else "nothing")])

    async def look_up(self, order: int) -> str:
        return "delivered"

    async def refund(self, order: int) -> str:
        self.killed_at("body-before")
        with self.journal.open("a") as file:
            file.write(f"{order}\n")
        self.killed_at("body-after")
        return "refunded"

    async def close(self) -> str:
        return "closed"

    async def run(self, prompt: str) -> str:
        chart = self.sessions[self.workflow_id()] = GuardSession(machine(), ledger=self.ledger)
        result = await self.agent.run(prompt)
        if isinstance(result.output, DeferredToolRequests):
            pending = pending_approval(result.output)
            yes = approvals_for(result.output, self.guard, approval_event(pending, by="ann"))
            result = await self.agent.run(
                message_history=result.all_messages(), deferred_tool_results=yes
            )
        return f"{result.output} {sorted(chart.snapshot.state_ids)}"

    @property
    def refunds(self) -> list[str]:
        return self.journal.read_text().splitlines() if self.journal.exists() else []


class Recorder(SQLiteLedger):
    """A ledger that may be killed when it has recorded, before the engine has."""

    def __init__(self, path: Path, durable: Durable) -> None:
        super().__init__(path)
        self.durable_run = durable

    def record(self, *args: Any, **options: Any) -> Any:
        row = super().record(*args, **options)
        self.durable_run.killed_at("recorded")
        return row


def main(folder: Path, point: str) -> None:
    durable = Durable(folder, point)
    DBOS.launch()
    output, steps = asyncio.run(_result(durable, (folder / "killed").exists()))
    DBOS.destroy()
    print(json.dumps({"output": output, "refunds": durable.refunds, "steps": steps}))


async def _result(durable: Durable, recovered: bool) -> tuple[Any, list[str]]:
    if recovered:  # DBOS.launch() has taken it up
        handle: Any = await DBOS.retrieve_workflow_async(WORKFLOW)
    else:
        with SetWorkflowID(WORKFLOW):
            handle = await DBOS.start_workflow_async(durable.workflow, "hello")
    output = await handle.get_result(polling_interval_sec=0.05)
    steps = await DBOS.list_workflow_steps_async(WORKFLOW)
    return output, [each["function_name"] for each in steps]


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
