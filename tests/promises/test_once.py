"""A side effect is entered at most once per call; a crash in between is reported as in doubt."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from langgraph.graph import END, START, StateGraph
from langgraph.types import RetryPolicy

from guardchart.agents import (
    FakeModel,
    agent_logic,
    pending_approval,
    run_agent_sync,
    tool,
    tool_registry,
)
from guardchart.gate import approval_event
from guardchart.langgraph import statechart_node
from guardchart.persistence import InMemoryLedger
from tests.promises.bank import AT_ONCE, REFUND, SAY, THREAD, Bank, Parked, State, listed_chart

ROOT = Path(__file__).resolve().parents[2]
POINTS = ("propose", "decide", "claim", "enter", "effect", "record")


@pytest.mark.parametrize("point", POINTS)
def test_killed_at_any_point_a_restart_and_an_approval_enter_once_or_report_in_doubt(
    point: str, tmp_path: Path
) -> None:
    def life(kill: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "tests.promises.crash", str(tmp_path), kill]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)

    first = life(point)
    assert first.returncode == -signal.SIGKILL, first.stderr
    second = life("nowhere")
    assert second.returncode == 0, second.stderr
    told = json.loads(second.stdout.splitlines()[-1])
    log = tmp_path / "effects.log"
    effects = log.read_text().splitlines() if log.exists() else []
    if point in ("claim", "enter", "effect", "record"):
        assert len(effects) == (1 if point in ("effect", "record") else 0)
        assert ("refunded" if point == "record" else "in doubt") in told["result"]
    else:
        assert effects == ["7 250"]
        assert "refunded" in told["result"]


@pytest.mark.gate
def test_a_node_retried_after_the_effect_does_not_enter_again() -> None:
    bank = Bank()
    raised: list[int] = []

    def breaks_once(view: Any, state: Any) -> dict[str, Any]:
        if bank.entered and not raised:
            raised.append(1)
            raise ConnectionError("after the effect")
        return {}

    chart = listed_chart()
    logic = agent_logic(
        FakeModel([REFUND, SAY, SAY], is_async=False), bank.registry(), retry=AT_ONCE
    )
    builder = StateGraph(State)
    builder.add_node(
        "agent",
        statechart_node(
            chart,
            logic,
            event_from_state=lambda state: state.get("event"),
            event_key="event",
            result_to_state=breaks_once,
            ledger=InMemoryLedger(),
        ),
        retry_policy=RetryPolicy(max_attempts=3, initial_interval=0.01, jitter=False),
    )
    builder.add_edge(START, "agent")
    builder.add_edge("agent", END)
    from langgraph.checkpoint.memory import InMemorySaver

    app = builder.compile(checkpointer=InMemorySaver())
    out = app.invoke({"event": {"type": "START", "prompt": "Please help."}}, THREAD)
    pending = pending_approval(out["xsm"]["context"])
    assert bank.entered == []
    out = app.invoke({"event": approval_event(pending)}, THREAD)
    assert raised == [1]
    assert bank.entered == [("refund", 7, 250)]
    assert out["xsm"]["value"] == "done"


@pytest.mark.gate
def test_a_raising_plugin_or_callback_enters_nothing_again() -> None:
    from guardchart import SyncInterpreter

    class Raises:
        def __getattr__(self, name: str) -> Any:
            if not name.startswith("on_"):
                raise AttributeError(name)

            def hook(*args: Any) -> None:
                raise RuntimeError("a plugin's fault")

            return hook

    parked = Parked()
    interpreter = SyncInterpreter.from_snapshot(
        parked.snapshot, parked.machine([SAY]), plugins=[Raises()], scope="t1"
    ).start()
    interpreter.send(approval_event(parked.pending))
    assert interpreter.status == "done"
    assert parked.approve().ok
    assert parked.bank.entered == [("refund", 7, 250)]


def test_a_failure_in_a_batch_keeps_the_results_of_finished_calls() -> None:
    def fine(n: int) -> str:
        """Answer."""
        return f"fine {n}"

    def breaks(n: int) -> str:
        """Break."""
        raise ValueError("sk-thisisaverysecretkeyindeed0123456789")

    from guardchart import create_machine

    model = FakeModel(
        [
            {
                "tool_calls": [
                    {"tool": "fine", "args": {"n": 1}},
                    {"tool": "breaks", "args": {"n": 2}},
                    {"tool": "fine", "args": {"n": 3}},
                ]
            },
            SAY,
        ],
        is_async=False,
    )
    logic = agent_logic(model, tool_registry(fine, breaks), retry=AT_ONCE)
    result = run_agent_sync(create_machine(listed_chart("fine", "breaks"), logic), prompt="Go.")
    texts = [each["content"] for each in result.context["messages"] if each["role"] == "tool"]
    assert texts[0] == "fine 1" and texts[2] == "fine 3"
    assert "ValueError" in texts[1] and "secret" not in str(result.context)
    assert result.ok


@pytest.mark.gate
def test_a_side_effect_that_timed_out_is_not_run_again_by_itself() -> None:
    entered: list[int] = []

    def slow(n: int) -> str:
        """Take too long."""
        entered.append(n)
        time.sleep(1.0)
        return "late"

    from guardchart import create_machine

    ledger = InMemoryLedger()
    call = {"tool": "slow", "args": {"n": 1}}

    def machine(script: list[Any]) -> Any:
        logic = agent_logic(
            FakeModel(script, is_async=False),
            tool_registry(tool(slow, side_effect=True, timeout_s=0.2)),
            retry=AT_ONCE,
            ledger=ledger,
        )
        return create_machine(listed_chart("slow"), logic)

    parked = run_agent_sync(machine([call]), prompt="Go.", key="t1")
    event = approval_event(pending_approval(parked.context))
    done = run_agent_sync(machine([SAY]), snapshot=parked.snapshot, event=event, key="t1")
    assert done.final_state == "toolLoop.done"
    assert entered == [1]
    assert "in doubt" in str(done.context["messages"])
    again = run_agent_sync(machine([SAY]), snapshot=parked.snapshot, event=event, key="t1")
    assert again.final_state == "toolLoop.done"
    assert entered == [1]
    time.sleep(1.0)


@pytest.mark.gate
def test_a_model_that_repeats_its_call_ids_for_ever_is_denied_and_strands_nothing() -> None:
    bank = Bank()
    lookup = {"tool": "lookup", "args": {"order_id": 1}, "id": "c1"}
    result = bank.run([lookup] * 30)
    assert result.status == "done" and result.error is not None
    assert result.error["kind"] == "tool_denied"
    assert "duplicate tool call ids" in result.error["message"]
    assert bank.entered == [("lookup", 1)]


@pytest.mark.gate
@pytest.mark.parametrize("ids", ["repeated", "fresh"])
def test_a_resampled_fork_of_an_entered_call_enters_nothing_again(ids: str) -> None:
    bank = Bank()
    ledger = InMemoryLedger()

    def turn(script: list[Any], **how: Any) -> Any:
        return run_agent_sync(bank.machine(script, ledger=ledger), key="t1", **how)

    before = turn([SAY], prompt="Hello.").snapshot
    for sample in range(2):
        call = {**REFUND, "id": "c1" if ids == "repeated" else f"c{sample}"}
        parked = turn([call], snapshot=before, prompt="Refund order 7.")
        assert parked.waiting
        event = approval_event(pending_approval(parked.context))
        done = turn([SAY], snapshot=parked.snapshot, event=event)
        assert done.ok and "refunded 250" in str(done.context["messages"])
        assert bank.entered == [("refund", 7, 250)]
