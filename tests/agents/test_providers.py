import math
import sys
import types

import pytest

from guardchart.agents._models import ModelResponse, Usage
from guardchart.agents._prices import check_prices, price, read_usage
from guardchart.agents._provider_model import ProviderModel
from guardchart.agents._providers import (
    field,
    items,
    own_name,
    read_arguments,
    require_sdk,
    tool_parts,
    wire_name,
    wire_names,
)
from guardchart.errors import AgentConfigError, AgentError, MissingExtraError

SHEET = {"input_per_mtok": 3.0, "output_per_mtok": 15.0}


# --- SDKs --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["openai", "anthropic"])
def test_require_sdk_names_the_pip_install_when_the_sdk_is_missing(name, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtraError, match=f"pip install {name}"):
        require_sdk(name)
    with pytest.raises(ImportError):
        require_sdk(name)


def test_require_sdk_passes_an_installed_one_without_importing_it(monkeypatch):
    monkeypatch.delitem(sys.modules, "antigravity", raising=False)
    require_sdk("antigravity")
    assert "antigravity" not in sys.modules


def test_require_sdk_passes_a_loaded_stand_in(monkeypatch):
    monkeypatch.setitem(sys.modules, "openai", types.SimpleNamespace(__spec__=None))
    require_sdk("openai")


@pytest.mark.parametrize("name", ["os.path", "", "a b", "../x"])
def test_require_sdk_refuses_what_is_no_package_name(name):
    with pytest.raises(AgentConfigError):
        require_sdk(name)


# --- reading -----------------------------------------------------------------------------------


def test_field_reads_objects_and_dicts_alike():
    for obj in ({"a": 1, "n": None}, types.SimpleNamespace(a=1, n=None)):
        assert field(obj, "a") == 1
        assert field(obj, "n", 5) is None
        assert field(obj, "b") is None
        assert field(obj, "b", 5) == 5


def test_price_charges_a_million_tokens_at_the_sheet_price():
    assert price(SHEET, 1_000_000, 0) == 3.0
    assert price(SHEET, 0, 2_000_000) == 30.0
    assert price(None, 10**6, 10**6) == 0.0


@pytest.mark.parametrize("count", [-5, math.nan, None, "7", True])
def test_price_charges_nothing_for_a_count_that_is_none(count):
    assert price(SHEET, count, count) == 0.0


def test_read_usage_clamps_what_a_provider_reports():
    assert read_usage(SHEET, 1000, 200) == Usage(1000, 200, 0.006)
    assert read_usage(SHEET, -1000, None) == Usage(0, 0, 0.0)


def test_check_prices_copies_a_good_sheet():
    checked = check_prices(SHEET)
    assert checked == SHEET and checked is not SHEET
    assert check_prices(None) is None


@pytest.mark.parametrize(
    "prices",
    [
        {},
        {"input_per_mtok": 1},
        {**SHEET, "extra": 1},
        {"input": 1, "output": 2},
        {**SHEET, "input_per_mtok": "3"},
        {**SHEET, "input_per_mtok": True},
        {**SHEET, "output_per_mtok": -1},
        {**SHEET, "output_per_mtok": math.nan},
        {**SHEET, "output_per_mtok": math.inf},
        [1, 2],
    ],
)
def test_check_prices_refuses_a_sheet_that_would_misprice(prices):
    with pytest.raises(AgentConfigError, match="prices"):
        check_prices(prices)


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ('{"a": [1, 2.5, null]}', {"a": [1, 2.5, None]}),
        ("", {}),
        (None, {}),
        ({"a": 1}, {"a": 1}),
        ("{oops", {"__unparseable__": "{oops"}),
        ("[1]", {"__unparseable__": "[1]"}),
        ('"x"', {"__unparseable__": '"x"'}),
        ("null", {"__unparseable__": "null"}),
        ('{"a": NaN}', {"__unparseable__": '{"a": NaN}'}),
        ('{"a": 1e999}', {"__unparseable__": '{"a": 1e999}'}),
        ('{"a": 1, "a": 2}', {"__unparseable__": '{"a": 1, "a": 2}'}),
        ("\ud800", {"__unparseable__": "\ufffd"}),
        (5, {"__unparseable__": ""}),
        ([("a", 1)], {"__unparseable__": ""}),
    ],
)
def test_read_arguments_marks_what_is_no_strict_json_object(raw, expected):
    assert read_arguments(raw) == expected


def test_read_arguments_keeps_a_bounded_piece_of_endless_garbage():
    assert len(read_arguments("{" * 10**6)["__unparseable__"]) == 4000


def test_items_refuses_a_response_field_that_is_no_list():
    assert items(None, "x") == [] and items((1,), "x") == [1]
    with pytest.raises(AgentError, match="choices"):
        items("text", "choices")


def test_tool_parts_reads_both_shapes_and_fills_in_an_empty_schema():
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    flat = {"name": "a", "description": "d", "parameters": schema}
    assert tool_parts(flat) == ("a", "d", schema)
    assert tool_parts({"type": "function", "function": flat}) == ("a", "d", schema)
    assert tool_parts({"name": "a"})[2] == {"type": "object", "properties": {}}
    with pytest.raises(AgentConfigError, match="name"):
        tool_parts({"description": "d"})


# --- names on the wire -------------------------------------------------------------------------


def test_wire_names_are_what_providers_accept_and_never_collide():
    names = ["a.b", "a_b", "a.b_2", "a_b_2", "plain", "x." + "y" * 62, "x_" + "y" * 62]
    wire = wire_names([{"name": n} for n in names])
    assert set(wire) == set(names)
    assert len(set(wire.values())) == len(names)
    assert all(len(w) <= 64 and "." not in w for w in wire.values())
    assert all(wire[n] == n for n in names if "." not in n)
    assert all(own_name(wire, sent) == own for own, sent in wire.items())


def test_wire_name_of_a_tool_that_is_no_longer_offered_has_no_dots_either():
    assert wire_name({}, "shop.refund") == wire_name(None, "shop.refund") == "shop_refund"
    assert own_name(None, "anything") == own_name({}, "anything") == "anything"


# --- the model ---------------------------------------------------------------------------------


def model_of(create):
    return ProviderModel(
        create,
        "m",
        request=lambda messages, tools, names: {"messages": messages, "names": names},
        parse=lambda response, names: ModelResponse(str(response)),
    )


class Client:
    async def acreate(self, **kw):
        return "async"

    def create(self, **kw):
        return "sync"

    def hidden(self, **kw):
        return self.acreate(**kw)


class Untold:
    """A create that is no function at all, as instrumentation may leave it."""

    def __call__(self, **kw):
        return "untold"


def test_provider_model_is_sync_only_when_create_is_a_plain_function():
    assert model_of(Client().create).is_async is False
    assert model_of(Client().acreate).is_async is True
    assert model_of(Untold()).is_async is True


async def test_provider_model_answers_whatever_create_returns():
    assert model_of(Client().create)([], []).text == "sync"
    assert (await model_of(Client().acreate)([], [])).text == "async"
    assert (await model_of(Untold())([], [])).text == "untold"
    assert (await model_of(Client().hidden)([], [])).text == "async"


def test_provider_model_knows_its_name_and_prices():
    model = model_of(Client().create)
    assert (model.name, model.prices, model.max_output_tokens) == ("m", None, None)


def test_provider_model_capped_keeps_the_smaller_cap_and_leaves_the_original_alone():
    sent = []

    def create(**kw):
        sent.append(kw)
        return "x"

    model = ProviderModel(
        create,
        "m",
        request=lambda *_: {},
        parse=lambda response, names: ModelResponse(response),
        cap_option="max_completion_tokens",
        max_output_tokens=100,
    )
    assert model.capped(500) is model
    model.capped(40)([], [])
    model([], [])
    assert [each["max_completion_tokens"] for each in sent] == [40, 100]


@pytest.mark.parametrize("cap", [0, -1, True, 1.5, "9"])
def test_provider_model_refuses_a_cap_that_is_no_number_of_tokens(cap):
    with pytest.raises(AgentConfigError, match="capped"):
        model_of(Client().create).capped(cap)


def test_provider_model_without_a_reader_does_not_stream():
    with pytest.raises(AgentConfigError, match="does not stream"):
        model_of(Client().create).stream([], [])
