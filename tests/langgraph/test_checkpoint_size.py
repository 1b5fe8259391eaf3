"""How much a thread keeps in its checkpointer; the figures are those of `benchmarks`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from langgraph.checkpoint.memory import InMemorySaver

from guardchart.agents import FakeModel, agent_logic
from guardchart.gate import Seal
from guardchart.langgraph import statechart_graph
from guardchart.persistence import InMemoryLedger
from tests.langgraph.graphs import (
    Refunds,
    compiled,
    loop_chart,
    loop_node,
    loop_router,
    start,
    thread,
)

ROOT = Path(__file__).resolve().parent.parent.parent
SEAL = Seal(b"k" * 32)

needs_benchmarks = pytest.mark.skipif(
    not (ROOT / "benchmarks").is_dir(), reason="the benchmarks are not here"
)


@pytest.mark.needs_src
@needs_benchmarks
def test_a_snapshot_stays_under_4_kb_over_sixty_turns_with_approvals() -> None:
    from benchmarks.checkpoint_size import snapshot_bytes

    sizes = snapshot_bytes((1, 60))
    assert max(sizes.values()) < 4096
    # Nothing in it grows with the conversation but the digits of its counters.
    assert sizes[60] - sizes[1] < 16


@pytest.mark.needs_src
@needs_benchmarks
def test_checkpoints_of_approvals_are_at_most_1_3_times_those_of_a_graph_by_hand() -> None:
    from benchmarks.checkpoint_size import RATIO_BAR, written

    turns = 12
    assert written(turns, chart=True) <= RATIO_BAR * written(turns, chart=False)


def looks(ident: str) -> dict[str, Any]:
    return {"tool": "lookup", "args": {"order_id": 1}, "id": ident}


def made(kind: str, script: list[Any], seal: Any, saver: Any) -> Any:
    if kind == "graph":
        return statechart_graph(
            loop_chart("lookup", "refund"),
            agent_logic(FakeModel(script, is_async=False), Refunds().tools()),
            messages_key="messages",
            checkpointer=saver,
            ledger=InMemoryLedger(),
            seal=seal,
        )
    node = loop_node(script, messages_key="messages", event_key="event", seal=seal)
    return compiled(node, router=loop_router(), saver=saver)


@pytest.mark.parametrize("seal", [None, SEAL], ids=["unsealed", "sealed"])
@pytest.mark.parametrize("kind", ["graph", "node"])
def test_the_id_of_a_call_is_spent_for_good_though_only_the_channel_holds_it(
    kind: str, seal: Any
) -> None:
    saver = InMemorySaver()
    app = made(kind, [looks("a"), {"text": "one"}, looks("b"), {"text": "two"}], seal, saver)
    for number in range(2):
        out = app.invoke({"event": start(f"question {number}")}, thread())
        assert out["xsm"]["context"]["spent_call_ids"] == []
        assert out["xsm"]["state_ids"] == ["toolLoop.done"]
    # In a process of its own, which knows nothing but the checkpoint.
    again = made(kind, [looks("a"), {"text": "three"}], seal, saver)
    out = again.invoke({"event": start("once more")}, thread())
    assert out["xsm"]["context"]["error"]["kind"] == "tool_denied"
    ids = [call["id"] for each in out["messages"] for call in getattr(each, "tool_calls", ())]
    assert ids == ["a", "b", "a"]
    # The denied turn has spent nothing that was not spent.
    fresh = made(kind, [looks("c"), {"text": "four"}], seal, saver)
    out = fresh.invoke({"event": start("and now")}, thread())
    assert out["xsm"]["state_ids"] == ["toolLoop.done"]


def test_an_id_that_another_node_has_used_is_not_spent() -> None:
    saver = InMemorySaver()
    call = {"name": "lookup", "args": {"order_id": 1}, "id": "a"}
    said = [
        ("user", "before"),
        {"role": "assistant", "content": "", "tool_calls": [call], "id": "x-1"},
        {"role": "tool", "content": "shipped", "tool_call_id": "a"},
        ("ai", "It was shipped."),
    ]
    app = made("graph", [looks("a"), {"text": "one"}], None, saver)
    out = app.invoke({"messages": said, "event": start()}, thread())
    assert out["xsm"]["state_ids"] == ["toolLoop.done"]


def test_ids_that_the_channel_does_not_hold_stay_in_the_snapshot() -> None:
    app = made("graph", [looks("b"), {"text": "two"}], None, InMemorySaver())
    app.invoke({"event": start("one")}, thread())
    held = app.get_state(thread()).values["xsm"]
    # A context is untrusted: what is no text is kept, and nothing is raised.
    held["context"]["spent_call_ids"] = ["of old", ["odd"]]
    app.update_state(thread(), {"xsm": held})
    out = app.invoke({"event": start("two")}, thread())
    assert out["xsm"]["context"]["spent_call_ids"] == ["of old", ["odd"]]
