"""What a model call costs: a price sheet, or the sheets of the genai-prices package."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping
from typing import Any, TypeAlias

from guardchart.agents._budgets import clamp_usage
from guardchart.agents._models import Usage
from guardchart.errors import AgentConfigError

__all__ = ["PackagedPrices", "Prices", "check_prices", "packaged_prices", "price", "read_usage"]

_PRICE_KEYS = frozenset({"input_per_mtok", "output_per_mtok"})


def price(prices: Mapping[str, float] | None, tokens_in: int, tokens_out: int) -> float:
    """Cost of one call from a price sheet.

    Args:
        prices: ``{"input_per_mtok", "output_per_mtok"}`` in US dollars per million tokens, or
            None.
        tokens_in: Input tokens.
        tokens_out: Output tokens.

    Returns:
        US dollars; 0.0 without a price sheet.

    Source: xstate-statemachine, agents reference: provider helpers.

    Example:
        >>> price({"input_per_mtok": 3.0, "output_per_mtok": 15.0}, 1_000, 200)
        0.006
    """
    if not prices:
        return 0.0
    counted = clamp_usage(Usage(tokens_in, tokens_out))
    total = counted.input_tokens * prices.get("input_per_mtok", 0.0)
    total += counted.output_tokens * prices.get("output_per_mtok", 0.0)
    return total / 1_000_000


def check_prices(prices: Mapping[str, float] | None) -> dict[str, float] | None:
    """Check a price sheet when a model is built, so that no budget runs on a typo.

    Returns:
        A copy, or None.

    Raises:
        AgentConfigError: A key is unknown or missing, or a price is not a finite number of at
            least 0.

    Example:
        >>> check_prices({"input_per_mtok": 3})
        Traceback (most recent call last):
            ...
        guardchart.errors.AgentConfigError: prices: expected exactly input_per_mtok and \
output_per_mtok
    """
    sheet: Any = prices
    if sheet is None:
        return None
    if not isinstance(sheet, Mapping) or set(sheet) != _PRICE_KEYS:
        raise AgentConfigError("prices: expected exactly input_per_mtok and output_per_mtok")
    for key in sorted(_PRICE_KEYS):
        value: Any = sheet[key]
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not 0 <= value < math.inf:
            raise AgentConfigError(f"prices: {key} must be a finite number of at least 0")
    return dict(sheet)


class PackagedPrices:
    """The prices of one model as genai-prices knows them; see `packaged_prices`.

    Tiers by length and cached tokens are priced as the provider does. An answer that names a
    model of its own is priced as that one, where it is known.
    """

    def __init__(self, package: Any, model: str, api_url: str) -> None:
        self._package = package
        self._model = model
        self._api_url = api_url

    def cost(
        self, usage: Usage, model: str | None, cache_read: int = 0, cache_write: int = 0
    ) -> float:
        """US dollars; never less than nothing."""
        cached = min(cache_read, usage.input_tokens)
        written = min(cache_write, usage.input_tokens - cached)
        counts = {
            "input_tokens": usage.input_tokens,
            "output_tokens": usage.output_tokens,
            **({"cache_read_tokens": cached} if cached else {}),
            **({"cache_write_tokens": written} if written else {}),
        }
        for name in (model, self._model):
            if not isinstance(name, str) or not name:
                continue
            try:
                found = self._package.calc_price(
                    self._package.Usage(**counts), name, provider_api_url=self._api_url
                )
            except (LookupError, ValueError):
                continue
            return max(0.0, float(found.total_price))
        return 0.0


Prices: TypeAlias = Mapping[str, float] | PackagedPrices
"""A price sheet, or prices that genai-prices knows."""


def packaged_prices(model: str, api_url: Any) -> PackagedPrices | None:
    """The prices of a model from the genai-prices package, where that is installed.

    Args:
        model: The model's name.
        api_url: The client's base URL: it says whose price it is. A service that the package
            does not know has no price here, whatever its models are called.

    Returns:
        None where the package is not installed or knows no price. Nothing is fetched: prices
        are those of the installed release.
    """
    if importlib.util.find_spec("genai_prices") is None:
        return None
    import genai_prices

    made = PackagedPrices(genai_prices, model, str(api_url))
    try:
        genai_prices.calc_price(
            genai_prices.Usage(input_tokens=1, output_tokens=1),
            model,
            provider_api_url=str(api_url),
        )
    except (LookupError, ValueError):
        return None
    return made


def read_usage(
    prices: Prices | None,
    tokens_in: Any,
    tokens_out: Any,
    *,
    model: str | None = None,
    cache_read: Any = 0,
    cache_write: Any = 0,
) -> Usage:
    """Clamped usage with its price, from the counts a provider sent.

    Args:
        prices: A price sheet, genai-prices' ones, or None.
        tokens_in: Input tokens, cached ones included.
        tokens_out: Output tokens.
        model: The model that answered, as the response names it.
        cache_read: How many of the input tokens were read from a cache.
        cache_write: How many were written to one.

    Example:
        >>> read_usage(None, 12, -3)
        Usage(input_tokens=12, output_tokens=0, cost_usd=0.0)
    """
    counted = clamp_usage(Usage(tokens_in, tokens_out))
    if isinstance(prices, PackagedPrices):
        cached = clamp_usage(Usage(cache_read, cache_write))
        cost = prices.cost(counted, model, cached.input_tokens, cached.output_tokens)
    else:
        cost = price(prices, counted.input_tokens, counted.output_tokens)
    return Usage(counted.input_tokens, counted.output_tokens, cost)
