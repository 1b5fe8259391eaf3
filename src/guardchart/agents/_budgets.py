"""Budgets: limits, the guards that enforce them, and the clamping of what providers report.

Usage is untrusted. A negative number is spent as 0, so it never refunds; a cost that is not a
number is spent as infinity, so it never disables a budget. Counters in a context are untrusted
too: one that is no number counts as infinite, because nothing honest writes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

from guardchart.agents._models import Usage
from guardchart.errors import AgentConfigError
from guardchart.runtime import MachineLogic

__all__ = [
    "Budget",
    "MAX_COST_USD",
    "MAX_COUNT",
    "add_usage",
    "budget_guards",
    "clamp_usage",
    "report_totals",
    "spent_by",
    "sum_totals",
    "total_of",
]

MAX_COUNT: Final = 2**53 - 1
"""A counter never exceeds this, so that any JSON reader holds it exactly."""

MAX_COST_USD: Final = 1e15
"""What infinite cost is stored as: JSON has no infinity. Reaching it exhausts every budget."""


_NUMBERS: Final = (int, float)


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of one agent's run; None means no limit.

    Args:
        max_tokens: Input and output tokens together.
        max_usd: Cost in US dollars.
        max_turns: Model turns, failed ones and output retries included.

    Raises:
        AgentConfigError: A limit is a string, a bool, NaN, infinite or negative; a token or
            turn limit is not an int. A limit that would not be enforced is never accepted.

    Source: xstate-statemachine, agents reference: Budget.

    Example:
        >>> Budget(max_usd=0.25).max_turns
        10
        >>> Budget(max_turns="10")
        Traceback (most recent call last):
            ...
        guardchart.errors.AgentConfigError: Budget: max_turns must be an int of at least 0, or None
    """

    max_tokens: int | None = None
    max_usd: float | None = None
    max_turns: int | None = 10

    def __post_init__(self) -> None:
        for name in ("max_tokens", "max_turns"):
            value: Any = getattr(self, name)
            if value is not None and (
                isinstance(value, bool) or not isinstance(value, int) or value < 0
            ):
                raise AgentConfigError(f"Budget: {name} must be an int of at least 0, or None")
        usd: Any = self.max_usd
        if usd is not None and (
            isinstance(usd, bool) or not isinstance(usd, int | float) or not 0 <= usd < math.inf
        ):
            raise AgentConfigError(
                "Budget: max_usd must be a finite number of at least 0, or None for no limit"
            )

    @classmethod
    def of(cls, value: Budget | Mapping[str, Any] | None) -> Budget:
        """Read a budget given as a ``Budget``, a mapping of its fields, or None.

        Returns:
            The budget; None gives the defaults.

        Raises:
            AgentConfigError: An unknown field, an invalid limit, or another type.

        Example:
            >>> Budget.of({"max_turns": 4}) == Budget(max_turns=4)
            True
        """
        if value is None:
            return cls()
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise AgentConfigError("a budget is a Budget or a mapping of its fields")
        known = [f.name for f in fields(cls)]
        unknown = sorted(str(key) for key in value if key not in known)
        if unknown:
            raise AgentConfigError(f"Budget: unknown limit {unknown[0]!r}; known are {known}")
        return cls(**value)


def clamp_usage(usage: Any) -> Usage:
    """Make reported usage safe to add.

    Args:
        usage: A ``Usage`` or anything with its fields, as an adapter or a sub-agent reports it.

    Returns:
        A ``Usage`` whose counts are ints from 0 to ``MAX_COUNT`` and whose cost is a float from
        0 to infinity. Negative numbers, and what is not a number, become 0; infinite counts
        become ``MAX_COUNT``; a NaN cost becomes infinity.

    Example:
        >>> clamp_usage(Usage(input_tokens=-5, cost_usd=float("nan")))
        Usage(input_tokens=0, output_tokens=0, cost_usd=inf)
    """
    if type(usage) is Usage and _is_clean(usage):
        return usage
    return Usage(
        _reported_count(_read(usage, "input_tokens")),
        _reported_count(_read(usage, "output_tokens")),
        _reported_cost(_read(usage, "cost_usd")),
    )


def add_usage(context: Any, usage: Any, *, turns: int = 0) -> dict[str, Any]:
    """Compute the counters of a context after one more model call.

    Args:
        context: Holds ``turns``, ``tokens_in``, ``tokens_out`` and ``cost_usd``; absent is 0.
        usage: Reported usage; clamped here.
        turns: Turns to add, e.g. 1 per call.

    Returns:
        The four new counters, for ``context.update``: finite, JSON-safe and never below the
        old ones. An old counter that is no number becomes the largest value, so that its
        budget is exhausted.

    Example:
        >>> add_usage({"tokens_in": 5, "cost_usd": -9}, Usage(10, 2, 0.5), turns=1)
        {'turns': 1, 'tokens_in': 15, 'tokens_out': 2, 'cost_usd': 0.5}
    """
    new = clamp_usage(usage)
    return {
        "turns": min(_spent(context, "turns", MAX_COUNT) + turns, MAX_COUNT),
        "tokens_in": min(_spent(context, "tokens_in", MAX_COUNT) + new.input_tokens, MAX_COUNT),
        "tokens_out": min(_spent(context, "tokens_out", MAX_COUNT) + new.output_tokens, MAX_COUNT),
        "cost_usd": min(
            float(_spent(context, "cost_usd", MAX_COST_USD)) + new.cost_usd, MAX_COST_USD
        ),
    }


_TOTALS: Final = {
    "turns": MAX_COUNT,
    "input_tokens": MAX_COUNT,
    "output_tokens": MAX_COUNT,
    "cost_usd": MAX_COST_USD,
}
"""What a report and a total count, and what each stands for infinity at."""


def total_of(totals: Any) -> dict[str, Any]:
    """Totals as an untrusted context holds them: absent is 0, no number is the largest value.

    Example:
        >>> total_of({"turns": 2, "input_tokens": -7, "cost_usd": "free"})["cost_usd"]
        1000000000000000.0
    """
    return {key: _spent(totals, key, ceiling) for key, ceiling in _TOTALS.items()}


def report_totals(usage: Any) -> dict[str, Any]:
    """What an agent reported, clamped as a provider's usage is.

    Args:
        usage: ``turns``, ``input_tokens``, ``output_tokens``, ``cost_usd``, from an event.

    Example:
        >>> report_totals({"turns": 2, "input_tokens": -7})
        {'turns': 2, 'input_tokens': 0, 'output_tokens': 0, 'cost_usd': 0.0}
    """
    clamped = clamp_usage(usage)
    return {
        "turns": _reported_count(_read(usage, "turns")),
        "input_tokens": clamped.input_tokens,
        "output_tokens": clamped.output_tokens,
        "cost_usd": min(clamped.cost_usd, MAX_COST_USD),
    }


def sum_totals(totals: Any, more: Any) -> dict[str, Any]:
    """Two totals added up: finite, JSON-safe, never below either.

    Example:
        >>> sum_totals({"turns": 1}, {"turns": 2, "cost_usd": 0.5})["turns"]
        3
    """
    old, new = total_of(totals), total_of(more)
    return {key: min(old[key] + new[key], ceiling) for key, ceiling in _TOTALS.items()}


def spent_by(context: Mapping[str, Any]) -> dict[str, Any]:
    """What an agent spent, those below it included: its counters and its ``total_usage``.

    Example:
        >>> spent_by({"turns": 2, "tokens_in": 5, "total_usage": {"turns": 3}})["turns"]
        5
    """
    own = {
        "turns": context.get("turns", 0),
        "input_tokens": context.get("tokens_in", 0),
        "output_tokens": context.get("tokens_out", 0),
        "cost_usd": context.get("cost_usd", 0.0),
    }
    return sum_totals(own, context.get("total_usage") or {})


def budget_guards(
    max_tokens: int | None = None, max_usd: float | None = None, max_turns: int | None = None
) -> MachineLogic:
    """Build the three budget guards, each true while the amount spent is strictly below its limit.

    They read ``tokens_in`` + ``tokens_out``, ``cost_usd`` and ``turns`` of the context and
    never raise: an absent counter is 0, a negative one is 0, and one that is no number (a bool,
    text, NaN, null) counts as infinite, which denies.

    Args:
        max_tokens: Limit of ``underTokenBudget``; None never denies.
        max_usd: Limit of ``underCostBudget`` in US dollars; None never denies.
        max_turns: Limit of ``underTurnLimit``; None never denies.

    Returns:
        A ``MachineLogic`` to merge into a chart's own.

    Raises:
        AgentConfigError: A limit is invalid (see ``Budget``).

    Source: xstate-statemachine, agents reference: budget_guards.

    Example:
        >>> guard = budget_guards(max_tokens=10).guards["underTokenBudget"]
        >>> guard({"tokens_in": 6, "tokens_out": 3}, None), guard({"tokens_in": 10}, None)
        (True, False)
    """
    limits = Budget(max_tokens, max_usd, max_turns)
    return MachineLogic(
        guards={
            "underTokenBudget": _under(limits.max_tokens, MAX_COUNT, "tokens_in", "tokens_out"),
            "underCostBudget": _under(limits.max_usd, MAX_COST_USD, "cost_usd"),
            "underTurnLimit": _under(limits.max_turns, MAX_COUNT, "turns"),
        }
    )


def _under(limit: float | None, ceiling: float, *keys: str) -> Callable[[Any, Any], bool]:
    def under(context: Any, event: Any) -> bool:
        if limit is None:
            return True
        total = 0
        for key in keys:
            spent = _spent(context, key, ceiling)
            if spent >= ceiling:
                return False
            total += spent
        return bool(total < limit)

    return under


def _spent(context: Any, key: str, ceiling: Any) -> Any:
    """One counter of an untrusted context: from 0 to the ceiling, which stands for infinity."""
    try:
        value = context.get(key, 0)
    except (AttributeError, TypeError):  # the context itself is no mapping
        return ceiling
    if type(value) is int and 0 <= value < ceiling:
        return value
    if isinstance(value, bool) or not isinstance(value, _NUMBERS) or value != value:
        return ceiling
    if value <= 0:
        return 0
    if value >= ceiling:
        return ceiling
    return value if isinstance(ceiling, float) else math.ceil(value)


def _is_clean(usage: Usage) -> bool:
    """Whether clamping would change nothing: most reports are as they should be."""
    tokens_in, tokens_out, cost = usage.input_tokens, usage.output_tokens, usage.cost_usd
    return (
        type(tokens_in) is int
        and type(tokens_out) is int
        and type(cost) is float
        and 0 <= tokens_in <= MAX_COUNT
        and 0 <= tokens_out <= MAX_COUNT
        and 0 <= cost < MAX_COST_USD
    )


def _reported_count(value: Any) -> int:
    if type(value) is int and 0 <= value < MAX_COUNT:
        return value
    if isinstance(value, bool) or not isinstance(value, _NUMBERS) or not value > 0:
        return 0
    return MAX_COUNT if value >= MAX_COUNT else math.ceil(value)


def _reported_cost(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, _NUMBERS):
        return 0.0
    if value != value or value >= MAX_COST_USD:
        return math.inf
    return float(value) if value > 0 else 0.0


def _read(usage: Any, name: str) -> Any:
    if type(usage) is not Usage and isinstance(usage, Mapping):
        return usage.get(name)
    return getattr(usage, name, None)
