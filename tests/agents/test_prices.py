"""What calls cost: a sheet, or the sheets of genai-prices where that is installed."""

from __future__ import annotations

import importlib.util
import sys
import types
from typing import Any, ClassVar

import anthropic
import openai
import pytest

from guardchart.agents import Budget, FakeModel, Usage, agent_logic, run_agent_sync
from guardchart.agents._models import reports_cost
from guardchart.agents._prices import PackagedPrices, packaged_prices, read_usage
from guardchart.anthropic import anthropic_model
from guardchart.openai import openai_model
from tests.agents.loopback import fixture

OPENAI = "https://api.openai.com/v1/"


class Package:
    """Stands in for genai_prices: one model of one service, one dollar a thousand tokens."""

    Usage = types.SimpleNamespace

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def calc_price(self, usage: Any, model: str, *, provider_api_url: str) -> Any:
        self.asked.append((model, usage))
        if not model.startswith("known") or not provider_api_url.startswith(OPENAI):
            raise LookupError(model)
        return types.SimpleNamespace(total_price=(usage.input_tokens + usage.output_tokens) / 1000)


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Package:
    made = Package()
    module = types.ModuleType("genai_prices")
    module.__spec__ = importlib.util.spec_from_loader("genai_prices", None)
    module.calc_price = made.calc_price  # type: ignore[attr-defined]
    module.Usage = made.Usage  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "genai_prices", module)
    return made


def test_a_model_the_package_knows_has_a_price(package: Package) -> None:
    prices = packaged_prices("known-1", OPENAI)
    assert prices is not None
    assert read_usage(prices, 1000, 500, model="known-1-2026") == Usage(1000, 500, 1.5)
    assert package.asked[-1][0] == "known-1-2026"


def test_an_answer_of_a_model_it_does_not_know_is_priced_as_the_one_asked(
    package: Package,
) -> None:
    prices = packaged_prices("known-1", OPENAI)
    assert read_usage(prices, 1000, 0, model="made-up").cost_usd == 1.0
    assert read_usage(prices, 1000, 0, model=None).cost_usd == 1.0


@pytest.mark.parametrize(
    ("model", "url"), [("other", OPENAI), ("known-1", "http://127.0.0.1:8000/v1/")]
)
def test_an_unknown_model_or_service_has_no_price(package: Package, model: str, url: str) -> None:
    assert packaged_prices(model, url) is None


def test_cached_tokens_are_told_and_never_more_than_there_are(package: Package) -> None:
    prices = packaged_prices("known-1", OPENAI)
    read_usage(prices, 100, 0, cache_read=80, cache_write=50)
    counts = package.asked[-1][1]
    assert (counts.cache_read_tokens, counts.cache_write_tokens) == (80, 20)
    read_usage(prices, 100, 0, cache_read="many", cache_write=-3)
    assert not hasattr(package.asked[-1][1], "cache_read_tokens")


def test_hostile_counts_are_clamped_before_they_are_priced(package: Package) -> None:
    prices = packaged_prices("known-1", OPENAI)
    assert read_usage(prices, -5, float("nan")) == Usage(0, 0, 0.0)


def test_without_the_package_there_is_no_price(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "genai_prices" else found(name)
    )
    assert packaged_prices("gpt-4o-mini", OPENAI) is None
    client = openai.OpenAI(api_key="unused")
    with client:
        assert not reports_cost(openai_model(client))


def test_a_sheet_of_ones_own_wins(package: Package) -> None:
    sheet = {"input_per_mtok": 1.0, "output_per_mtok": 2.0}
    with openai.OpenAI(api_key="unused") as client:
        model = openai_model(client, "known-1", prices=sheet)
    assert model.prices == sheet and package.asked == []


# The package itself


def test_the_real_package_prices_both_providers() -> None:
    with openai.OpenAI(api_key="unused") as client:
        gpt = openai_model(client, "gpt-4o-mini")
    with anthropic.Anthropic(api_key="unused") as other:
        claude = anthropic_model(other, "claude-sonnet-5")
    for model in (gpt, claude):
        assert isinstance(model.prices, PackagedPrices) and reports_cost(model)
    answer = gpt._parse(fixture("openai/text.json"), {})
    assert 0 < answer.usage.cost_usd < 0.001
    plain = read_usage(gpt.prices, 1000, 100).cost_usd
    assert 0 < read_usage(gpt.prices, 1000, 100, cache_read=900).cost_usd < plain
    cached = claude._parse(fixture("anthropic/cached_usage.json"), {})
    assert cached.usage.cost_usd > 0


def test_a_service_the_real_package_does_not_know_has_no_price() -> None:
    with openai.OpenAI(api_key="unused", base_url="http://127.0.0.1:9/v1") as client:
        assert openai_model(client, "gpt-4o-mini").prices is None


def test_no_price_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    def refuse(*args: Any, **more: Any) -> Any:
        raise AssertionError("a price was looked for on the network")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert packaged_prices("gpt-4o-mini", OPENAI) is not None


# Caps


class Capped(FakeModel):
    """Notes the caps it is asked for."""

    max_output_tokens: int | None = None
    asked: ClassVar[list[int]] = []

    def capped(self, max_output_tokens: int) -> Any:
        self.asked.append(max_output_tokens)
        return self


@pytest.mark.parametrize(
    ("budget", "own", "asked"),
    [
        (Budget(max_tokens=500), None, [500]),
        (Budget(max_tokens=4096), None, [4096]),
        (Budget(max_tokens=500), 90, [500]),
        (Budget(max_tokens=100_000), 90, [100_000]),
        # A provider refuses a cap above what its model can write, and nobody has said what that is.
        (Budget(max_tokens=4097), None, []),
        (Budget(max_turns=3), None, []),
        (Budget(max_tokens=0), None, []),
    ],
)
def test_a_token_budget_caps_what_one_answer_may_cost(
    budget: Budget, own: int | None, asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Capped, "asked", [])
    model = Capped([])
    model.max_output_tokens = own
    agent_logic(model, budgets=budget)
    assert Capped.asked == asked


@pytest.mark.parametrize(
    ("base_url", "given", "option", "sent"),
    [
        (None, {}, "max_completion_tokens", 300),
        (None, {"max_tokens": 50}, "max_tokens", 50),
        (None, {"max_completion_tokens": 900}, "max_completion_tokens", 300),
        ("http://127.0.0.1:9/v1", {}, "max_tokens", 300),
        ("https://mine.openai.azure.com/openai/", {}, "max_completion_tokens", 300),
    ],
)
def test_the_cap_goes_to_the_provider_under_the_name_it_knows(
    base_url: str | None, given: dict[str, int], option: str, sent: int
) -> None:
    class Client:
        class chat:
            class completions:
                @staticmethod
                def create(**kw: Any) -> Any:
                    requests.append(kw)
                    return fixture("openai/text.json")

    requests: list[dict[str, Any]] = []
    client: Any = Client()
    if base_url is not None:
        client.base_url = base_url
    model = openai_model(client, **given)
    result = run_agent_sync(model, prompt="x", max_tokens=300)
    assert result.output == "Order 42 has shipped."
    (request,) = requests
    caps = {name: value for name, value in request.items() if name.startswith("max_")}
    assert caps == {option: sent}
