"""Structured output and turns: only what was validated is a result, and each try is paid for."""

from __future__ import annotations

import datetime
import json
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict, Field

from guardchart import SyncInterpreter, create_machine
from guardchart.agents import (
    FakeModel,
    RetryPolicy,
    agent_logic,
    load_chart,
    run_agent_sync,
    structured_output,
    tool_registry,
)

USAGE = {"input_tokens": 30, "output_tokens": 20, "cost_usd": 0.25}


class Booking(BaseModel):
    """What a state asks for; unknown fields are refused."""

    model_config = ConfigDict(extra="forbid")
    nights: int = Field(gt=0, le=30)
    arrival: datetime.date


class Loose(BaseModel):
    """The same without a word about unknown fields: pydantic ignores them."""

    nights: int


GOOD = '{"nights": 2, "arrival": "2026-05-01"}'
BAD = '{"nights": 0, "arrival": "2026-05-01"}'


def _run(*replies: str, **options: Any) -> Any:
    model = FakeModel([{"text": each, "usage": USAGE} for each in replies], is_async=False)
    return run_agent_sync(model, prompt="Book it.", **options)


def test_a_result_is_validated_before_the_machine_is_done_and_holds_json_only() -> None:
    seen: list[tuple[set[str], Any]] = []

    class Watch:
        def on_transition(self, interpreter: Any, before: Any, after: Any, taken: Any) -> None:
            seen.append((set(after), interpreter.context["result"]))

    model = FakeModel([{"text": BAD}, {"text": "soon"}, {"text": GOOD}], is_async=False)
    machine = create_machine(load_chart(), agent_logic(model, output_model=Booking))
    interpreter = SyncInterpreter(machine, plugins=[Watch()]).start()
    interpreter.send("START", prompt="Book it.")
    result = {"nights": 2, "arrival": "2026-05-01"}
    assert seen[-1] == ({"toolLoop.done"}, result)
    assert all(found is None for ids, found in seen[:-1])
    assert json.loads(json.dumps(interpreter.context["result"])) == result
    interpreter.stop()


@pytest.mark.parametrize(
    "reply",
    [
        BAD,
        '{"nights": 31, "arrival": "2026-05-01"}',
        '{"nights": 2, "arrival": "2026-02-30"}',
        '{"nights": 2, "arrival": "2026-05-01", "vip": true}',
        '{"nights": 2}',
        "[]",
        "2",
    ],
)
def test_value_ranges_and_unknown_fields_are_enforced_not_suggested(reply: str) -> None:
    result = _run(reply, **structured_output(Booking, retries=0))
    assert result.error is not None and result.error["kind"] == "output"
    assert result.output is None


def test_unknown_fields_are_dropped_where_the_model_does_not_forbid_them() -> None:
    assert _run('{"nights": 2, "vip": true}', output_model=Loose).output == {"nights": 2}


@pytest.mark.parametrize(
    ("budget", "message", "turns"),
    [
        ({"max_turns": 2}, "turn limit reached", 2),
        ({"max_tokens": 100}, "token budget exhausted", 2),
        ({"max_usd": 0.75}, "cost budget exhausted", 3),
    ],
)
def test_every_reply_that_is_asked_for_again_counts_against_every_budget(
    budget: dict[str, Any], message: str, turns: int
) -> None:
    result = _run(*[BAD] * 9, budgets=budget, **structured_output(Booking, retries=8))
    assert result.error == {"kind": "budget", "message": message}
    assert result.usage["turns"] == turns and result.context["output_retries"] == turns
    assert result.usage["cost_usd"] == 0.25 * turns


@pytest.mark.parametrize(
    "reply",
    [
        f"Gladly: {GOOD} and {GOOD.replace('2,', '3,')}",
        f"The old one was {BAD}, the new one is {GOOD}",
        '{"booking": {"nights": 2, "arrival": "2026-05-01"}',
        '{"nights": 1, "nights": 2, "arrival": "2026-05-01"}',
        '{"nights": NaN, "arrival": "2026-05-01"}',
        f"{GOOD} [2]",
    ],
)
@pytest.mark.parametrize("use_instructor", [False, True, None])
def test_an_ambiguous_truncated_or_garbled_reply_is_asked_for_again_never_repaired(
    reply: str, use_instructor: bool | None
) -> None:
    model = FakeModel([{"text": reply}, {"text": GOOD}], is_async=False)
    options = structured_output(Booking, use_instructor=use_instructor)
    result = run_agent_sync(model, prompt="Book it.", **options)
    assert result.output == {"nights": 2, "arrival": "2026-05-01"}
    assert result.context["output_retries"] == 1
    asked = model.calls[1]["messages"][-1]["content"]
    assert asked.startswith("RETRY_OUTPUT: ") and "not valid JSON" in asked


def test_the_active_states_schema_wins_over_that_of_the_logic() -> None:
    chart = load_chart()
    chart["states"]["awaiting_model"]["meta"]["output_model"] = f"{__name__}:Booking"
    model = FakeModel([{"text": '{"nights": 2}'}, {"text": GOOD}], is_async=False)
    machine = create_machine(chart, agent_logic(model, output_model=Loose))
    result = run_agent_sync(machine, prompt="Book it.")
    assert result.output["arrival"] == "2026-05-01" and result.context["output_retries"] == 1


# --- turns -------------------------------------------------------------------------------------


def test_a_second_start_begins_the_next_turn_and_does_not_return_the_first_answer() -> None:
    first = run_agent_sync(FakeModel([{"text": "one"}], is_async=False), prompt="First?")
    second = run_agent_sync(
        FakeModel([{"text": "two"}], is_async=False), prompt="Second?", snapshot=first.snapshot
    )
    assert second.output == "two"
    assert [each["content"] for each in second.context["messages"]] == [
        *("First?", "one", "Second?", "two")
    ]


def test_a_success_after_a_timeout_leaves_no_error() -> None:
    def slow(n: int) -> str:
        """Time out."""
        raise TimeoutError

    script = [TimeoutError("no"), {"tool": "slow", "args": {"n": 1}}, {"text": "fine"}]
    result = run_agent_sync(
        FakeModel(script, is_async=False),
        tools=tool_registry(slow),
        prompt="Go.",
        retry=RetryPolicy(delay_s=0),
    )
    assert result.ok and result.error is None and result.context["error"] is None
    assert result.context["last_failure"] is not None


def test_a_final_answer_is_never_cut() -> None:
    answer = "word " * 100_000
    result = run_agent_sync(FakeModel([{"text": answer}], is_async=False), prompt="Go.")
    assert result.output == answer and result.context["messages"][-1]["content"] == answer
