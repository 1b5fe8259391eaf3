"""What two processes have in common: digests, and a ledger on disk."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter
from pydantic_ai import Agent
from pydantic_ai.messages import ModelMessagesTypeAdapter
from pydantic_ai.tools import DeferredToolRequests

from guardchart.gate import approval_event
from guardchart.persistence import SQLiteLedger
from guardchart.pydantic_ai import StatechartGuard, approvals_for, pending_approval
from tests.pydantic_ai.agents import Script, call, results, session

ROOT = Path(__file__).resolve().parents[2]
REQUESTS = TypeAdapter(DeferredToolRequests)
WORDS = [f"word-{n}" for n in range(40)]

pytestmark = pytest.mark.needs_src


def tagger(folder: Path, *script: Any) -> tuple[StatechartGuard[Any], Agent[Any, Any]]:
    chart = {"id": "m", "initial": "a", "states": {"a": {"meta": {"tools": ["tag"]}}}}
    guard: StatechartGuard[Any] = StatechartGuard(
        session(chart, ledger=SQLiteLedger(folder / "ledger.db")), side_effects=["tag"]
    )
    agent: Agent[Any, Any] = Agent(
        Script(*script).model, capabilities=[guard], output_type=[str, DeferredToolRequests]
    )

    @agent.tool_plain
    async def tag(tags: set[str], groups: list[frozenset[str]]) -> str:
        with (folder / "journal").open("a") as file:
            file.write(f"{len(tags)}\n")
        return "tagged"

    return guard, agent


def park(folder: Path) -> None:
    """The other process: leaves messages and requests in JSON."""
    arguments = {"tags": WORDS, "groups": [WORDS[:9], WORDS[9:]]}
    _, agent = tagger(folder, call("tag", arguments))
    result = asyncio.run(agent.run("hello"))
    (folder / "messages.json").write_bytes(result.all_messages_json())
    (folder / "requests.json").write_bytes(REQUESTS.dump_json(result.output))


def test_an_approval_goes_through_json_to_another_process_and_sets_keep_their_digest(
    tmp_path: Path,
) -> None:
    code = f"from tests.pydantic_ai.test_processes import park, Path; park(Path({str(tmp_path)!r}))"
    subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        # Sets are iterated in another order there.
        env={**os.environ, "PYTHONHASHSEED": "1"},
        check=True,
    )
    requests = REQUESTS.validate_json((tmp_path / "requests.json").read_bytes())
    guard, agent = tagger(tmp_path, "done", "done")
    yes = approvals_for(requests, guard, approval_event(pending_approval(requests), by="ann"))
    for _ in range(2):
        history = ModelMessagesTypeAdapter.validate_json((tmp_path / "messages.json").read_bytes())
        result = asyncio.run(agent.run(message_history=history, deferred_tool_results=yes))
        assert results(result.all_messages())["c1"] == ("success", "tagged")
    assert (tmp_path / "journal").read_text() == "40\n"
