"""Conversations too large to be saved, which left a thread that raised at every event."""

from __future__ import annotations

import json
from typing import Any

import pytest

from guardchart.agents import (
    FakeModel,
    ModelResponse,
    agent_logic,
    pending_approval,
    run_agent_sync,
    tool,
    tool_registry,
)
from guardchart.gate import ToolCall, approval_event
from guardchart.langgraph import statechart_node
from guardchart.persistence import InMemoryLedger
from tests.langgraph.graphs import compiled, from_event, loop_chart, loop_router, start, thread
from tests.promises.bank import AT_ONCE, Parked


def read(n: int) -> str:
    """Read a page in a script of which each character is six in JSON."""
    return "漢" * 4000


def write(n: int) -> str:
    """Write."""
    return "漢" * 4000


REGISTRY = tool_registry(read, tool(write, side_effect=True))
PAGES = {"tool_calls": [{"tool": "read", "args": {"n": n}} for n in range(8)]}


def logic(script: list[Any], **options: Any) -> Any:
    options.setdefault("ledger", InMemoryLedger())
    return agent_logic(FakeModel(script, is_async=False), REGISTRY, retry=AT_ONCE, **options)


def app(script: list[Any]) -> Any:
    node = statechart_node(
        loop_chart("read", "write"), logic(script), event_key="event", event_from_state=from_event
    )
    return compiled(node, router=loop_router())


def test_a_long_conversation_loses_its_oldest_turns_and_not_its_thread() -> None:
    script = [*[PAGES] * 6, {"tool": "write", "args": {"n": 1}, "id": "w"}, {"text": "done"}]
    graph = app(script)
    out = graph.invoke({"event": start("read it all")}, thread())
    assert out["xsm"]["value"] == "awaiting_human"
    pending = pending_approval(out["xsm"]["context"])
    out = graph.invoke({"event": approval_event(pending)}, thread())
    messages = out["xsm"]["context"]["messages"]
    assert out["xsm"]["value"] == "done" and messages[0]["content"] == "read it all"
    assert messages[-2]["tool_call_id"] == "w" and messages[-1]["content"] == "done"
    assert len(json.dumps(out["xsm"])) < 1 << 20


@pytest.mark.parametrize(
    "answer",
    [
        ModelResponse("x" * 1_200_000),
        ModelResponse(None, [ToolCall("i" * 600_000, "n" * 600_000, {})]),
    ],
)
def test_one_turn_that_no_snapshot_can_hold_ends_the_run_and_not_the_thread(answer: Any) -> None:
    graph = app([answer, {"text": "better"}])
    out = graph.invoke({"event": start()}, thread())
    assert out["xsm"]["value"] == "error" and out["event"] is None
    assert out["xsm"]["context"]["error"]["kind"] == "too_large"
    assert out["xsm"]["context"]["turns"] == 1
    out = graph.invoke({"event": start()}, thread())
    assert out["xsm"]["value"] == "done"


def test_a_run_whose_conversation_is_too_large_for_a_snapshot_still_gives_its_result() -> None:
    result = run_agent_sync(
        loop_chart("read", "write"), logic([*[PAGES] * 6, {"text": "done"}]), prompt="read it all"
    )
    assert result.ok and result.output == "done"
    assert result.snapshot["context"]["messages"][-1]["content"] == "done"


@pytest.mark.parametrize(
    "entry", [1, {"role": "tool", "content": "x"}, {"role": "assistant", "tool_calls": 5}]
)
def test_a_conversation_of_malformed_entries_does_not_break_the_machine(entry: Any) -> None:
    parked = Parked()

    def fill(data: dict[str, Any]) -> None:
        data["context"]["messages"] = [entry] * 300

    result = parked.send({"type": "HUMAN_REJECTED"}, parked.edited(fill))
    assert result.status == "done" and parked.bank.entered == []
