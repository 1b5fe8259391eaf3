import json
import math

import pytest

from guardchart.agents import (
    FakeModel,
    ModelResponse,
    agent_logic,
    run_agent_sync,
)
from guardchart.agents._budgets import (
    MAX_COST_USD,
    MAX_COUNT,
    Budget,
    add_usage,
    budget_guards,
    clamp_usage,
)
from guardchart.agents._models import Usage
from guardchart.errors import AgentConfigError

HUGE = 10**400


class Hostile:
    """Every field a provider could report, none of them a number."""

    input_tokens = object()
    output_tokens = [1]
    cost_usd = "free"


# --- Budget ------------------------------------------------------------------------------------


def test_budget_limits_turns_to_ten_by_default_and_nothing_else():
    assert Budget() == Budget(max_tokens=None, max_usd=None, max_turns=10)


@pytest.mark.parametrize("name", ["max_tokens", "max_usd", "max_turns"])
@pytest.mark.parametrize("value", ["5", True, False, math.nan, -1, -0.5, [], {}, math.inf])
def test_budget_refuses_a_limit_that_could_not_be_enforced(name, value):
    with pytest.raises(AgentConfigError, match=name):
        Budget(**{name: value})
    with pytest.raises(AgentConfigError, match=name):
        budget_guards(**{name: value})


@pytest.mark.parametrize("name", ["max_tokens", "max_turns"])
def test_budget_refuses_a_fraction_of_a_token_or_turn(name):
    with pytest.raises(AgentConfigError, match=name):
        Budget(**{name: 2.5})


@pytest.mark.parametrize("name", ["max_tokens", "max_usd", "max_turns"])
def test_budget_takes_zero_and_no_limit(name):
    assert getattr(Budget(**{name: 0}), name) == 0
    assert getattr(Budget(**{name: None}), name) is None


def test_budget_is_read_from_a_mapping_or_left_as_it_is():
    budget = Budget(max_usd=1)
    assert Budget.of(budget) is budget
    assert Budget.of({"max_usd": 1}) == budget
    assert Budget.of(None) == Budget()


@pytest.mark.parametrize("value", [{"max_dollars": 1}, {1: 2}, [("max_usd", 1)], "10", 10])
def test_budget_refuses_an_unknown_limit_or_shape(value):
    with pytest.raises(AgentConfigError):
        Budget.of(value)


# --- clamp_usage -------------------------------------------------------------------------------


def test_clamp_usage_leaves_honest_usage_alone():
    assert clamp_usage(Usage(10, 5, 0.25)) == Usage(10, 5, 0.25)
    assert clamp_usage({"input_tokens": 10, "output_tokens": 5}) == Usage(10, 5, 0.0)


@pytest.mark.parametrize("value", [-1, -math.inf, -HUGE, "7", True, None, [], math.nan, -0.0])
def test_clamp_usage_spends_a_negative_or_non_numeric_count_as_zero(value):
    assert clamp_usage(Usage(value, value)) == Usage(0, 0, 0.0)


@pytest.mark.parametrize("value", [HUGE, math.inf, 1e300, MAX_COUNT + 1])
def test_clamp_usage_caps_a_huge_count(value):
    clamped = clamp_usage(Usage(value, value))
    assert clamped.input_tokens == clamped.output_tokens == MAX_COUNT


def test_clamp_usage_rounds_a_fractional_count_up_to_an_int():
    clamped = clamp_usage(Usage(0.2, 3.0))
    assert (clamped.input_tokens, clamped.output_tokens) == (1, 3)
    assert type(clamped.input_tokens) is int


@pytest.mark.parametrize("cost", [math.nan, math.inf, HUGE, 1e300])
def test_clamp_usage_spends_a_nan_or_endless_cost_as_infinity(cost):
    assert clamp_usage(Usage(cost_usd=cost)).cost_usd == math.inf


@pytest.mark.parametrize("cost", [-0.5, -math.inf, -HUGE, "1", True, None])
def test_clamp_usage_spends_a_negative_or_non_numeric_cost_as_zero(cost):
    assert clamp_usage(Usage(cost_usd=cost)).cost_usd == 0.0


@pytest.mark.parametrize("usage", [None, 5, "usage", [], Hostile(), object()])
def test_clamp_usage_makes_nothing_of_what_is_no_usage(usage):
    assert clamp_usage(usage) == Usage()


# --- add_usage ---------------------------------------------------------------------------------


def test_add_usage_adds_turns_tokens_and_cost_to_a_context():
    context = {"turns": 1, "tokens_in": 10, "tokens_out": 2, "cost_usd": 0.5, "task": "x"}
    assert add_usage(context, Usage(5, 1, 0.25), turns=1) == {
        "turns": 2,
        "tokens_in": 15,
        "tokens_out": 3,
        "cost_usd": 0.75,
    }
    assert context["turns"] == 1


@pytest.mark.parametrize("value", [-5, -math.inf, -HUGE, math.nan, "x", True, None, HUGE, [1]])
def test_add_usage_never_refunds_and_stays_json(value):
    context = {"turns": 3, "tokens_in": 10, "tokens_out": 2, "cost_usd": 0.5}
    after = add_usage(context, Usage(value, value, value), turns=1)
    assert all(after[key] >= context[key] for key in context)
    assert json.loads(json.dumps(after, allow_nan=False)) == after


def test_add_usage_stores_an_infinite_cost_as_a_finite_number_that_exhausts_any_budget():
    after = add_usage({}, Usage(cost_usd=math.nan))
    assert after["cost_usd"] == MAX_COST_USD
    assert not budget_guards(max_usd=1e300).guards["underCostBudget"](after, None)
    assert add_usage(after, Usage(cost_usd=math.inf))["cost_usd"] == MAX_COST_USD


@pytest.mark.parametrize("forged", [math.nan, "0", True, None, [], HUGE])
def test_add_usage_counts_a_forged_counter_as_exhausted_and_a_negative_one_as_zero(forged):
    keys = ("turns", "tokens_in", "tokens_out", "cost_usd")
    after = add_usage(dict.fromkeys(keys, forged), Usage(1, 1, 1.0), turns=1)
    assert after == {**dict.fromkeys(keys[:3], MAX_COUNT), "cost_usd": MAX_COST_USD}
    after = add_usage(dict.fromkeys(keys, -50), Usage(1, 1, 1.0), turns=1)
    assert after == {"turns": 1, "tokens_in": 1, "tokens_out": 1, "cost_usd": 1.0}


# --- budget_guards -----------------------------------------------------------------------------

LIMITED = budget_guards(max_tokens=100, max_usd=1.0, max_turns=3).guards
COUNTERS = {
    "underTokenBudget": "tokens_in",
    "underCostBudget": "cost_usd",
    "underTurnLimit": "turns",
}


def test_budget_guards_bring_exactly_three_guards_and_nothing_else():
    logic = budget_guards()
    assert set(logic.guards) == set(COUNTERS)
    assert not (logic.actions or logic.services or logic.delays)


@pytest.mark.parametrize(
    ("guard", "context", "expected"),
    [
        ("underTokenBudget", {"tokens_in": 60, "tokens_out": 39}, True),
        ("underTokenBudget", {"tokens_in": 60, "tokens_out": 40}, False),
        ("underTokenBudget", {"tokens_out": 101}, False),
        ("underCostBudget", {"cost_usd": 0.999}, True),
        ("underCostBudget", {"cost_usd": 1}, False),
        ("underTurnLimit", {"turns": 2}, True),
        ("underTurnLimit", {"turns": 3}, False),
        ("underTokenBudget", {}, True),
    ],
)
def test_budget_guards_hold_while_the_spent_is_strictly_below(guard, context, expected):
    assert LIMITED[guard](context, None) is expected


@pytest.mark.parametrize("guard", COUNTERS)
def test_budget_guards_never_deny_without_a_limit(guard):
    for context in ({COUNTERS[guard]: HUGE}, {COUNTERS[guard]: "x"}, None):
        assert budget_guards().guards[guard](context, None) is True


@pytest.mark.parametrize("guard", COUNTERS)
def test_budget_guards_deny_everything_at_a_limit_of_zero(guard):
    zero = budget_guards(max_tokens=0, max_usd=0, max_turns=0).guards
    assert zero[guard]({COUNTERS[guard]: -5}, None) is False


@pytest.mark.parametrize("guard", COUNTERS)
@pytest.mark.parametrize("value", ["0", True, False, math.nan, None, [], {}, math.inf, HUGE])
def test_budget_guards_deny_when_a_counter_is_no_number(guard, value):
    assert LIMITED[guard]({COUNTERS[guard]: value}, None) is False


@pytest.mark.parametrize("guard", COUNTERS)
@pytest.mark.parametrize("value", [-1, -0.5, -math.inf, -HUGE])
def test_budget_guards_count_a_negative_counter_as_zero(guard, value):
    assert LIMITED[guard]({COUNTERS[guard]: value}, None) is True
    assert LIMITED["underTokenBudget"]({"tokens_in": value, "tokens_out": 100}, None) is False


@pytest.mark.parametrize("guard", COUNTERS)
@pytest.mark.parametrize("context", [None, 5, "context", [], object()])
def test_budget_guards_deny_when_the_context_is_no_mapping(guard, context):
    assert LIMITED[guard](context, None) is False


# --- whose budget ------------------------------------------------------------------------------


@pytest.mark.parametrize("scope", ["turn", "conversation"])
def test_turns_of_a_conversation_have_their_own_budget_or_share_one(scope):
    snapshot, spent = None, []
    usage = {"input_tokens": 30, "output_tokens": 20}
    for _ in range(3):
        result = run_agent_sync(
            FakeModel([{"text": "x", "usage": usage}], is_async=False),
            prompt="Go on.",
            snapshot=snapshot,
            budgets={"max_tokens": 100},
            budget_scope=scope,
        )
        snapshot = result.snapshot
        spent.append((result.ok, result.usage["tokens_in"]))
    if scope == "turn":
        assert spent == [(True, 30)] * 3
    else:
        assert spent == [(True, 30), (True, 60), (False, 60)]
        assert result.error == {"kind": "budget", "message": "token budget exhausted"}


def test_a_cost_limit_without_prices_is_warned_of_when_it_is_built():
    class Unpriced:
        prices = None
        is_async = False

        def __call__(self, messages, tools):
            return ModelResponse("x")

    with pytest.warns(UserWarning, match="prices="):
        agent_logic(Unpriced(), budgets={"max_usd": 1.0})
