import math
import sys

import pytest
from anthropic.types import Message, MessageParam, ToolParam
from pydantic import TypeAdapter

from guardchart.agents._messages import assistant_turn, system_turn, tool_turn, user_turn
from guardchart.agents._models import Usage, is_async_model, reports_cost
from guardchart.anthropic import (
    anthropic_model,
    from_anthropic_response,
    to_anthropic_messages,
    to_anthropic_tools,
)
from guardchart.errors import AgentConfigError, AgentError, MissingExtraError
from guardchart.gate import ToolCall
from tests.agents.loopback import fixture

PRICES = {"input_per_mtok": 3.0, "output_per_mtok": 15.0}
SCHEMA = {
    "type": "object",
    "properties": {"order_id": {"type": "integer"}},
    "required": ["order_id"],
    "additionalProperties": False,
}
LOOKUP = {"name": "lookup_order", "description": "Look up an order.", "parameters": SCHEMA}
CONVERSATION = [
    system_turn("Be brief."),
    user_turn("Where are orders 1 and 2?"),
    assistant_turn(
        "Let me look.",
        [ToolCall("c1", "lookup_order", {"order_id": 1}), ToolCall("c2", "shop.find", {})],
    ),
    tool_turn("c1", "shipped", "lookup_order"),
    tool_turn("c2", "error: ValueError", "shop.find"),
    user_turn("Hurry."),
    assistant_turn("Order 1 has shipped."),
]
RESPONSES = ["text", "tool_use", "cached_usage", "cut_tool_use", "thinking", "empty"]


def both(name):
    """The fixture as recorded JSON and as the SDK's own object."""
    data = fixture(f"anthropic/{name}.json")
    return data, Message.model_validate(data, strict=True)


def text(value):
    return {"type": "text", "text": value}


# --- requests ----------------------------------------------------------------------------------


def test_anthropic_messages_fit_the_published_request_schema():
    _, turns = to_anthropic_messages(CONVERSATION)
    for turn in turns:
        TypeAdapter(MessageParam).validate_python(turn)


def test_anthropic_messages_move_system_text_out_and_join_results_before_text():
    system, turns = to_anthropic_messages(CONVERSATION)
    assert system == "Be brief."
    assert turns == [
        {"role": "user", "content": [text("Where are orders 1 and 2?")]},
        {
            "role": "assistant",
            "content": [
                text("Let me look."),
                {
                    "type": "tool_use",
                    "id": "c1",
                    "name": "lookup_order",
                    "input": {"order_id": 1},
                },
                {"type": "tool_use", "id": "c2", "name": "shop_find", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": "shipped"},
                {"type": "tool_result", "tool_use_id": "c2", "content": "error: ValueError"},
                text("Hurry."),
            ],
        },
        {"role": "assistant", "content": [text("Order 1 has shipped.")]},
    ]


def test_anthropic_messages_put_a_result_first_even_when_text_came_before_it():
    messages = [user_turn("late"), tool_turn("c1", "ok")]
    (turn,) = to_anthropic_messages(messages)[1]
    assert [b["type"] for b in turn["content"]] == ["tool_result", "text"]


def test_anthropic_messages_alternate_and_hold_no_empty_text():
    messages = [
        user_turn("a"),
        assistant_turn(""),
        user_turn("b"),
        assistant_turn(" \n"),
        assistant_turn("c"),
    ]
    assert to_anthropic_messages(messages) == (
        "",
        [
            {"role": "user", "content": [text("a"), text("b")]},
            {"role": "assistant", "content": [text("c")]},
        ],
    )


def test_anthropic_messages_join_several_system_messages():
    messages = [system_turn("a"), user_turn("x"), system_turn(""), system_turn("b")]
    assert to_anthropic_messages(messages)[0] == "a\n\nb"


def test_anthropic_messages_leave_the_conversation_alone():
    before = repr(CONVERSATION)
    to_anthropic_messages(CONVERSATION)
    assert repr(CONVERSATION) == before


def test_anthropic_tools_fit_the_published_request_schema():
    (sent,) = to_anthropic_tools([LOOKUP])
    TypeAdapter(ToolParam).validate_python(sent)
    assert sent == {
        "name": "lookup_order",
        "description": "Look up an order.",
        "input_schema": SCHEMA,
    }


# --- responses ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RESPONSES)
def test_anthropic_responses_read_the_same_from_json_and_from_the_sdk(name):
    data, obj = both(name)
    read = from_anthropic_response(data, prices=PRICES)
    assert read == from_anthropic_response(obj, prices=PRICES)


def test_anthropic_text_blocks_come_back_joined_with_usage_model_and_cost():
    response = from_anthropic_response(both("text")[1], prices=PRICES)
    assert response.text == "Order 42 has shipped." and response.tool_calls == ()
    assert response.model == "claude-sonnet-4-5-20250929"
    assert (response.usage.input_tokens, response.usage.output_tokens) == (82, 17)
    assert response.usage.cost_usd == pytest.approx((82 * 3 + 17 * 15) / 1e6)


def test_anthropic_tool_calls_come_back_with_the_providers_ids():
    names = {"shop.refund": "shop_refund"}
    response = from_anthropic_response(both("tool_use")[0], names=names)
    assert response.text == "Let me look."
    assert response.tool_calls == (
        ToolCall("toolu_a1", "lookup_order", {"order_id": 42}),
        ToolCall("toolu_a2", "shop.refund", {"order_id": 42, "amount_cents": 1250}),
    )


def test_anthropic_cached_tokens_count_as_input():
    usage = from_anthropic_response(both("cached_usage")[0], prices=PRICES).usage
    assert (usage.input_tokens, usage.output_tokens) == (3210, 5)
    assert usage.cost_usd == pytest.approx((3210 * 3 + 5 * 15) / 1e6)


def test_anthropic_last_call_of_an_answer_that_was_cut_cannot_run():
    whole, cut = from_anthropic_response(both("cut_tool_use")[0]).tool_calls
    assert whole == ToolCall("toolu_b1", "lookup_order", {"order_id": 42})
    assert (cut.id, cut.name, list(cut.arguments)) == (
        "toolu_b2",
        "shop_refund",
        ["__unparseable__"],
    )


def test_anthropic_calls_before_text_that_was_cut_are_whole():
    data = fixture("anthropic/cut_tool_use.json")
    data["content"].append(text("and then"))
    assert all(
        "__unparseable__" not in call.arguments for call in from_anthropic_response(data).tool_calls
    )


def test_anthropic_thinking_is_left_out_of_the_answer():
    assert from_anthropic_response(both("thinking")[0]).text == "Shipped."


def test_anthropic_empty_answer_has_no_text():
    assert from_anthropic_response(both("empty")[0]).text is None


@pytest.mark.parametrize(
    "response",
    [None, {}, "text", {"content": None}, {"content": "SECRET"}, {"error": {"message": "SECRET"}}],
)
def test_anthropic_response_without_content_is_one_agent_error(response):
    with pytest.raises(AgentError) as caught:
        from_anthropic_response(response)
    assert "SECRET" not in str(caught.value)


@pytest.mark.parametrize("value", [None, [1], 5, "{oops", "[1]"])
def test_anthropic_input_that_is_no_object_is_empty_or_marked_unparseable(value):
    block = {"type": "tool_use", "id": "c", "name": "t", "input": value}
    (call,) = from_anthropic_response({"content": [block]}).tool_calls
    assert call.arguments == {} if value is None else "__unparseable__" in call.arguments


def test_anthropic_call_without_id_or_name_is_left_for_the_gate_to_deny():
    (call,) = from_anthropic_response({"content": [{"type": "tool_use"}]}).tool_calls
    assert (call.id, call.name) == ("", "")


@pytest.mark.parametrize("count", [-5, math.nan, "7", True, None, [], 10**400, math.inf])
def test_anthropic_hostile_usage_never_refunds_and_never_raises(count):
    names = (
        "input_tokens",
        "output_tokens",
        "cache_read_input_tokens",
        "cache_creation_input_tokens",
    )
    data = {"content": [text("x")], "usage": dict.fromkeys(names, count)}
    read = from_anthropic_response(data, prices=PRICES).usage
    assert read.input_tokens >= 0 and read.output_tokens >= 0 and read.cost_usd >= 0
    assert from_anthropic_response({"content": [], "usage": 5}).usage == Usage()


# --- the factory -------------------------------------------------------------------------------


class Client:
    """A client whose create is a plain function."""

    def __init__(self, answer=None):
        self.messages = self
        self.sent = []
        self.answer = answer or fixture("anthropic/text.json")

    def create(self, **kw):
        self.sent.append(kw)
        return self.answer


class AsyncClient(Client):
    async def create(self, **kw):
        return Client.create(self, **kw)


def test_anthropic_model_names_the_pip_install_when_the_sdk_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "anthropic", None)
    with pytest.raises(MissingExtraError, match="pip install anthropic"):
        anthropic_model(Client())


def test_anthropic_model_is_sync_for_a_plain_create_and_async_otherwise():
    assert not is_async_model(anthropic_model(Client()))
    assert is_async_model(anthropic_model(AsyncClient()))


async def test_anthropic_model_sends_the_request_and_reads_the_response():
    client = AsyncClient()
    model = anthropic_model(client, model="claude-x", max_tokens=64, prices=PRICES, temperature=0)
    answer = await model([system_turn("Be brief."), user_turn("hi")], [LOOKUP])
    assert answer.text == "Order 42 has shipped." and answer.usage.cost_usd > 0
    assert client.sent == [
        {
            "model": "claude-x",
            "max_tokens": 64,
            "temperature": 0,
            "system": "Be brief.",
            "messages": [{"role": "user", "content": [text("hi")]}],
            "tools": to_anthropic_tools([LOOKUP]),
        }
    ]


def test_anthropic_model_leaves_out_system_tools_and_tool_choice_where_there_are_none():
    client = Client()
    model = anthropic_model(client, tool_choice={"type": "any"})
    model([user_turn("hi")], [])
    model([user_turn("hi")], [LOOKUP])
    assert set(client.sent[0]) == {"model", "max_tokens", "messages"}
    assert set(client.sent[1]) >= {"tools", "tool_choice"}


def test_anthropic_model_translates_dotted_tool_names_both_ways():
    client = Client(fixture("anthropic/tool_use.json"))
    offered = [LOOKUP, {"name": "shop.refund"}]
    answer = anthropic_model(client)([user_turn("hi")], offered)
    assert [t["name"] for t in client.sent[0]["tools"]] == ["lookup_order", "shop_refund"]
    assert [c.name for c in answer.tool_calls] == ["lookup_order", "shop.refund"]


def test_anthropic_model_tells_its_name_cap_and_whether_it_knows_costs():
    model = anthropic_model(Client())
    assert (model.name, model.max_output_tokens) == ("claude-sonnet-4-5", 1024)
    assert not reports_cost(model)
    assert reports_cost(anthropic_model(Client(), prices=PRICES))


@pytest.mark.parametrize(
    "options", [{"stream": True}, {"messages": []}, {"tools": []}, {"system": "x"}]
)
def test_anthropic_model_refuses_an_option_it_sets_itself_or_cannot_serve(options):
    with pytest.raises(AgentConfigError, match=next(iter(options))):
        anthropic_model(Client(), **options)


@pytest.mark.parametrize("cap", [0, -1, True, 1.5, "64", None])
def test_anthropic_model_refuses_a_cap_that_is_no_positive_int(cap):
    with pytest.raises(AgentConfigError, match="max_tokens"):
        anthropic_model(Client(), max_tokens=cap)


def test_anthropic_model_refuses_a_price_sheet_that_would_misprice():
    with pytest.raises(AgentConfigError, match="prices"):
        anthropic_model(Client(), prices={"input": 1})
