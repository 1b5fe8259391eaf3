"""Budgets, time and exhaustion: nothing refunds, nothing hangs, nothing grows without bound."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from guardchart import MachineLogic, SimulatedClock, SyncInterpreter, create_machine
from guardchart.agents import (
    FakeModel,
    ModelResponse,
    Usage,
    agent_logic,
    run_agent_sync,
    tool_registry,
)
from guardchart.errors import StepError
from guardchart.langgraph import statechart_node
from tests.promises.bank import AT_ONCE, SAY, THREAD, Bank, graph, listed_chart, start

LOOKUP = {"tool": "lookup", "args": {"order_id": 1}}
HOSTILE = [-1_000_000, float("nan"), float("inf"), 10**30, "many", None, True]


@pytest.mark.parametrize("value", HOSTILE)
def test_hostile_usage_never_refunds_and_never_crashes(value: Any) -> None:
    usage = Usage(value, value, value)
    bank = Bank()
    script = [
        {"tool": "lookup", "args": {"order_id": 1}, "usage": {"input_tokens": 100}},
        ModelResponse("Done.", (), usage),
    ]
    result = bank.run(script, budgets={"max_tokens": 10_000})
    spent = result.usage
    assert spent["tokens_in"] >= 100 and spent["tokens_out"] >= 0 and spent["cost_usd"] >= 0
    assert spent["turns"] == 2


def test_failed_model_calls_count_as_turns() -> None:
    bank = Bank()
    script = [ConnectionError("no"), ConnectionError("no"), LOOKUP, SAY]
    result = bank.run(script, budgets={"max_turns": 2})
    assert result.error == {"kind": "budget", "message": "turn limit reached"}
    assert result.usage["turns"] == 2
    assert bank.entered == []


def test_every_limit_is_checked_on_the_only_road_to_the_model() -> None:
    usage = {"input_tokens": 60, "output_tokens": 60, "cost_usd": 0.6}
    for budget, message in (
        ({"max_turns": 1}, "turn limit reached"),
        ({"max_tokens": 100}, "token budget exhausted"),
        ({"max_usd": 0.5}, "cost budget exhausted"),
    ):
        bank = Bank()
        result = bank.run([{**LOOKUP, "usage": usage}, SAY], budgets=budget)
        assert result.error == {"kind": "budget", "message": message}
        assert result.usage["turns"] == 1


class Hang:
    """What hangs until it is released, and says whether it still does."""

    def __init__(self) -> None:
        self._release = threading.Event()
        self.entered = 0
        self.ended = threading.Semaphore(0)

    def __call__(self) -> None:
        self.entered += 1
        self._release.wait()
        self.ended.release()

    @property
    def hangs(self) -> bool:
        """Whether it was entered and nobody has come back."""
        return self.entered > 0 and not self.ended.acquire(blocking=False)

    def release(self) -> None:
        self._release.set()
        for _ in range(self.entered):
            self.ended.acquire()


@pytest.fixture
def hang() -> Iterator[Hang]:
    made = Hang()
    yield made
    made.release()


def _hanging_once(hang: Hang) -> Any:
    """A model that hangs at first, then has its say."""

    def model(messages: list[Any], tools: list[Any]) -> ModelResponse:
        if not hang.entered:
            hang()
        return ModelResponse("Done.")

    return model


def test_a_hung_model_delays_neither_the_result_nor_the_interpreters_exit(hang: Hang) -> None:
    logic = agent_logic(_hanging_once(hang), model_timeout_s=0.1, retry=AT_ONCE)
    result = run_agent_sync(create_machine(listed_chart("*"), logic), prompt="Go.")
    assert result.output == "Done." and result.usage["turns"] == 2
    # The run is over and its interpreter was stopped, and the call hangs all the same.
    assert hang.hangs


def test_a_models_time_is_the_charts_to_the_millisecond(hang: Hang) -> None:
    clock = SimulatedClock()
    logic = agent_logic(_hanging_once(hang), model_timeout_s=30, retry=AT_ONCE)
    machine = create_machine(listed_chart("*"), logic)
    interpreter = SyncInterpreter(machine, clock=clock)
    interpreter.start()
    driver = threading.Thread(target=interpreter.send, args=("START",), kwargs={"prompt": "Go."})
    driver.start()
    while not hang.entered:
        time.sleep(0.001)
    clock.increment(29_999)
    assert interpreter.current_state_ids == {"toolLoop.awaiting_model"}
    clock.increment(1)
    assert interpreter.context["last_failure"] == "TimeoutError"
    clock.increment(0)
    assert interpreter.context["result"] == "Done." and hang.hangs
    driver.join()
    interpreter.stop()


def test_model_and_tool_timeouts_hold_inside_a_node(hang: Hang) -> None:
    def slow(n: int) -> str:
        """Hang."""
        hang()
        return "late"

    model = FakeModel([{"tool": "slow", "args": {"n": 1}}, {"hang": True}, SAY], is_async=False)
    logic = agent_logic(
        model, tool_registry(slow, timeout_s=0.1), model_timeout_s=0.1, retry=AT_ONCE
    )
    node = statechart_node(listed_chart("slow"), logic, event_from_state=lambda s: s["event"])
    out = node(start())
    assert out["xsm"]["value"] == "done"
    context = out["xsm"]["context"]
    told = [each["content"] for each in context["messages"] if each["role"] == "tool"]
    assert told == ["error: tool call timed out after 0.1 s"]
    assert context["last_failure"] == "TimeoutError" and context["turns"] == 3
    # The node has answered, and the tool hangs all the same.
    assert hang.hangs
    model.release()


def test_a_hung_tool_does_not_keep_the_process_alive() -> None:
    program = """
import time
from guardchart.agents import FakeModel, RetryPolicy, run_agent_sync, tool_registry
def hang(n: int) -> str:
    "Hang."
    time.sleep(60)
model = FakeModel([{"tool": "hang", "args": {"n": 1}}, {"text": "Done."}], is_async=False)
result = run_agent_sync(
    model, tools=tool_registry(hang, timeout_s=0.2), prompt="Go.", retry=RetryPolicy(delay_s=0)
)
print(result.output)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=45
    )
    assert done.stdout.strip() == "Done.", done.stderr


@pytest.mark.parametrize("kind", ["eventless", "raise", "self-send"])
def test_loops_of_a_machine_with_itself_stop(kind: str) -> None:
    def again(scope: Any, context: Any, event: Any, action: Any) -> None:
        scope.raise_("AGAIN") if kind == "raise" else scope.send("AGAIN")

    states: dict[str, Any] = {"a": {"on": {"AGAIN": {"actions": "again"}}}}
    if kind == "eventless":
        states = {
            "a": {"on": {"AGAIN": "b"}},
            "b": {"always": {"target": "c", "guard": "yes"}},
            "c": {"always": {"target": "b", "guard": "yes"}},
        }
    chart = {"id": "m", "initial": "a", "maxMicrosteps": 50, "states": states}
    logic = MachineLogic(actions={"again": again}, guards={"yes": lambda c, e: True})
    interpreter = SyncInterpreter(create_machine(chart, logic), max_queue=100).start()
    receipt = interpreter.send("AGAIN")
    faults = [*interpreter.faults, receipt.error]
    assert any(isinstance(each, StepError) for each in faults)
    interpreter.stop()


def test_a_queue_is_bounded() -> None:
    from guardchart.errors import QueueFullError

    taken: list[str] = []

    def flood(scope: Any, context: Any, event: Any, action: Any) -> None:
        for _ in range(500):
            scope.send("X")

    on = {"GO": {"actions": "flood"}, "X": {"actions": "take"}}
    actions = {"flood": flood, "take": lambda context, event: taken.append(event.type)}
    machine = create_machine({"id": "m", "on": on}, MachineLogic(actions=actions))
    interpreter = SyncInterpreter(machine, max_queue=100).start()
    interpreter.send("GO")
    assert len(taken) == 100
    assert {type(each) for each in interpreter.faults} == {QueueFullError}
    interpreter.stop()


def test_output_is_capped_before_costly_work(monkeypatch: pytest.MonkeyPatch) -> None:
    from guardchart import _redact

    looked_at: list[int] = []
    mask = _redact.scrub_text

    def counting(text: str, **options: Any) -> str:
        looked_at.append(len(text))
        return mask(text, **options)

    monkeypatch.setattr(_redact, "scrub_text", counting)

    def huge(n: int) -> Any:
        """Return a lot."""
        text = "token=abc " * 5_000_000
        return text if n else {"rows": [text] * 3}

    calls = [{"tool": "huge", "args": {"n": n}} for n in (0, 1)]
    model = FakeModel([{"tool_calls": calls}, SAY], is_async=False)
    result = run_agent_sync(model, tools=tool_registry(huge, max_output_chars=100), prompt="Go.")
    texts = [each["content"] for each in result.context["messages"] if each["role"] == "tool"]
    assert len(texts) == 2
    assert all("truncated" in text and len(text) < 400 for text in texts)
    # Masking is what costs: it saw the beginning, and the margin in which a secret may be cut.
    assert looked_at and max(looked_at) < 10_000 and sum(looked_at) < 50_000


def test_no_transient_error_strands_a_thread() -> None:
    bank = Bank()
    out = graph(bank, [ConnectionError("no"), LOOKUP, TimeoutError("no"), SAY]).invoke(
        start(), THREAD
    )
    assert out["xsm"]["value"] == "done"
    assert out["xsm"]["context"]["error"] is None


async def test_model_and_tool_timeouts_hold_in_an_asynchronous_node() -> None:
    async def slow(n: int) -> str:
        """Hang."""
        await asyncio.sleep(30)
        return "late"

    model = FakeModel([{"tool": "slow", "args": {"n": 1}}, {"hang": True}, SAY])
    logic = agent_logic(
        model, tool_registry(slow, timeout_s=0.2), model_timeout_s=0.3, retry=AT_ONCE
    )
    node = statechart_node(
        listed_chart("slow"), logic, event_from_state=lambda state: state["event"]
    )
    out = await asyncio.wait_for(node.ainvoke(start()), 20)
    assert out["xsm"]["value"] == "done"


def test_a_machine_that_spawns_itself_for_ever_is_stopped() -> None:
    def spawn(scope: Any, context: Any, event: Any, action: Any) -> None:
        scope.spawn("self")

    chart = {
        "id": "bomb",
        "initial": "a",
        "states": {"a": {"entry": "spawn"}},
    }
    logic = MachineLogic(actions={"spawn": spawn})
    machine = create_machine(chart, logic)
    logic.services["self"] = machine
    interpreter = SyncInterpreter(machine, max_queue=50).start()
    depth, actor = 0, interpreter
    while actor.actors:
        depth, actor = depth + 1, next(iter(actor.actors.values()))
    assert depth < 1_000
    interpreter.stop()
