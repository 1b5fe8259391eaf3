import math
import sys

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionMessageParam, ChatCompletionToolParam
from pydantic import TypeAdapter

from guardchart.agents._messages import assistant_turn, system_turn, tool_turn, user_turn
from guardchart.agents._models import Usage, is_async_model, reports_cost
from guardchart.errors import AgentConfigError, AgentError, MissingExtraError
from guardchart.gate import ToolCall
from guardchart.openai import (
    from_openai_response,
    openai_model,
    to_openai_messages,
    to_openai_tools,
)
from tests.agents.loopback import fixture

PRICES = {"input_per_mtok": 0.15, "output_per_mtok": 0.6}
SCHEMA = {
    "type": "object",
    "properties": {"order_id": {"type": "integer"}},
    "required": ["order_id"],
    "additionalProperties": False,
}
LOOKUP = {"name": "lookup_order", "description": "Look up an order.", "parameters": SCHEMA}
CONVERSATION = [
    system_turn("Be brief."),
    user_turn("Where is order 42?"),
    assistant_turn("Let me look.", [ToolCall("c1", "lookup_order", {"order_id": 42})]),
    tool_turn("c1", "shipped", "lookup_order"),
    assistant_turn(None, [ToolCall("c2", "shop.refund", {"é": None})]),
    tool_turn("c2", "error: ValueError", "shop.refund"),
    assistant_turn("It has shipped."),
]
RESPONSES = ["text", "tool_calls", "text_and_tool_call", "bad_arguments", "refusal", "custom_tool"]


def both(name):
    """The fixture as recorded JSON and as the SDK's own object."""
    data = fixture(f"openai/{name}.json")
    return data, ChatCompletion.model_validate(data, strict=True)


# --- requests ----------------------------------------------------------------------------------


def test_openai_messages_fit_the_published_request_schema():
    sent = to_openai_messages(CONVERSATION)
    for message in sent:
        TypeAdapter(ChatCompletionMessageParam).validate_python(message)
    assert [m["role"] for m in sent] == [m["role"] for m in CONVERSATION]


def test_openai_messages_carry_calls_with_arguments_as_json_text():
    sent = to_openai_messages(CONVERSATION)
    assert sent[2] == {
        "role": "assistant",
        "content": "Let me look.",
        "tool_calls": [
            {
                "id": "c1",
                "type": "function",
                "function": {"name": "lookup_order", "arguments": '{"order_id": 42}'},
            }
        ],
    }
    assert sent[3] == {"role": "tool", "tool_call_id": "c1", "content": "shipped"}
    assert sent[4]["content"] is None
    assert sent[4]["tool_calls"][0]["function"] == {
        "name": "shop_refund",
        "arguments": '{"é": null}',
    }


def test_openai_messages_leave_the_conversation_alone():
    before = repr(CONVERSATION)
    to_openai_messages(CONVERSATION)
    assert repr(CONVERSATION) == before


def test_openai_tools_fit_the_published_request_schema():
    (sent,) = to_openai_tools([LOOKUP])
    TypeAdapter(ChatCompletionToolParam).validate_python(sent)
    assert sent == {
        "type": "function",
        "function": {
            "name": "lookup_order",
            "description": "Look up an order.",
            "parameters": SCHEMA,
        },
    }


# --- responses ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RESPONSES)
def test_openai_responses_read_the_same_from_json_and_from_the_sdk(name):
    data, obj = both(name)
    assert from_openai_response(data, prices=PRICES) == from_openai_response(obj, prices=PRICES)


def test_openai_text_comes_back_with_usage_model_and_cost():
    response = from_openai_response(both("text")[1], prices=PRICES)
    assert response.text == "Order 42 has shipped." and response.tool_calls == ()
    assert response.model == "gpt-4o-mini-2024-07-18"
    assert (response.usage.input_tokens, response.usage.output_tokens) == (82, 17)
    assert response.usage.cost_usd == pytest.approx((82 * 0.15 + 17 * 0.6) / 1e6)


def test_openai_costs_nothing_without_prices():
    assert from_openai_response(both("text")[0]).usage == Usage(82, 17, 0.0)


def test_openai_tool_calls_come_back_with_the_providers_ids():
    response = from_openai_response(both("tool_calls")[0], names={"shop.refund": "shop_refund"})
    assert response.text is None
    assert response.tool_calls == (
        ToolCall("call_a1", "lookup_order", {"order_id": 42}),
        ToolCall("call_a2", "shop.refund", {"order_id": 42, "amount_cents": 1250}),
    )


def test_openai_text_beside_a_call_is_kept_and_empty_arguments_are_an_object():
    response = from_openai_response(both("text_and_tool_call")[0])
    assert response.text == "Let me look."
    assert response.tool_calls == (ToolCall("call_b1", "now", {}),)


def test_openai_arguments_that_are_no_json_object_are_marked_unparseable():
    calls = from_openai_response(both("bad_arguments")[0]).tool_calls
    assert [c.id for c in calls] == [f"call_c{n}" for n in range(1, 6)]
    assert all(list(c.arguments) == ["__unparseable__"] for c in calls)
    assert calls[0].arguments["__unparseable__"] == '{"order_id": 42,'


def test_openai_refusal_counts_as_text():
    assert from_openai_response(both("refusal")[0]).text == "I cannot help with that."


def test_openai_custom_tool_call_is_proposed_with_arguments_no_schema_takes():
    (call,) = from_openai_response(both("custom_tool")[0]).tool_calls
    assert call == ToolCall("call_d1", "run_query", {"__unparseable__": "select 1"})


def test_openai_compatible_service_may_leave_out_usage_model_and_ids():
    response = from_openai_response(fixture("openai/compatible_service.json"))
    assert (response.text, response.usage, response.model) == ("hello", Usage(), None)


@pytest.mark.parametrize(
    "response",
    [
        None,
        {},
        "text",
        {"choices": []},
        {"choices": None},
        {"choices": "x"},
        {"choices": [None]},
        {"choices": [{}]},
        {"choices": [{"message": None}]},
        {"choices": [{"message": {"tool_calls": 5}}]},
        {"error": {"message": "SECRET"}},
    ],
)
def test_openai_response_without_an_answer_is_one_agent_error(response):
    with pytest.raises(AgentError) as caught:
        from_openai_response(response)
    assert "SECRET" not in str(caught.value)


@pytest.mark.parametrize("call", [None, {}, 5, {"id": 7, "function": {"name": None}}])
def test_openai_call_without_id_or_name_is_left_for_the_gate_to_deny(call):
    data = {"choices": [{"message": {"tool_calls": [call]}}]}
    (proposed,) = from_openai_response(data).tool_calls
    assert (proposed.id, proposed.name) == ("", "")


@pytest.mark.parametrize("count", [-5, math.nan, "7", True, None, [], 10**400, math.inf])
def test_openai_hostile_usage_never_refunds_and_never_raises(count):
    usage = {"prompt_tokens": count, "completion_tokens": count}
    data = {"choices": [{"message": {"content": "x"}}], "usage": usage}
    read = from_openai_response(data, prices=PRICES).usage
    assert read.input_tokens >= 0 and read.output_tokens >= 0 and read.cost_usd >= 0


# --- the factory -------------------------------------------------------------------------------


class Client:
    """A client whose create is a plain function."""

    def __init__(self, answer=None):
        self.chat = self.completions = self
        self.sent = []
        self.answer = answer or fixture("openai/text.json")

    def create(self, **kw):
        self.sent.append(kw)
        return self.answer


class AsyncClient(Client):
    async def create(self, **kw):
        return Client.create(self, **kw)


def test_openai_model_names_the_pip_install_when_the_sdk_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(MissingExtraError, match="pip install openai"):
        openai_model(Client())


def test_openai_model_is_sync_for_a_plain_create_and_async_otherwise():
    assert not is_async_model(openai_model(Client()))
    assert is_async_model(openai_model(AsyncClient()))


async def test_openai_model_sends_the_request_and_reads_the_response():
    client = AsyncClient()
    model = openai_model(client, model="gpt-x", prices=PRICES, temperature=0, max_tokens=64)
    answer = await model([user_turn("hi")], [LOOKUP])
    assert answer.text == "Order 42 has shipped." and answer.usage.cost_usd > 0
    assert client.sent == [
        {
            "model": "gpt-x",
            "temperature": 0,
            "max_tokens": 64,
            "messages": [{"role": "user", "content": "hi"}],
            "tools": to_openai_tools([LOOKUP]),
        }
    ]


def test_openai_model_leaves_out_tools_and_tool_choice_where_the_state_allows_none():
    client = Client()
    model = openai_model(client, tool_choice="auto", parallel_tool_calls=False)
    model([user_turn("hi")], [])
    model([user_turn("hi")], [LOOKUP])
    assert set(client.sent[0]) == {"model", "messages"}
    assert set(client.sent[1]) >= {"tools", "tool_choice", "parallel_tool_calls"}


def test_openai_model_translates_dotted_tool_names_both_ways():
    client = Client(fixture("openai/tool_calls.json"))
    offered = [LOOKUP, {"name": "shop.refund"}]
    answer = openai_model(client)([user_turn("hi")], offered)
    sent = [t["function"]["name"] for t in client.sent[0]["tools"]]
    assert sent == ["lookup_order", "shop_refund"]
    assert [c.name for c in answer.tool_calls] == ["lookup_order", "shop.refund"]


def test_openai_model_tells_its_name_cap_and_whether_it_knows_costs():
    model = openai_model(Client(), max_completion_tokens=99)
    assert (model.name, model.max_output_tokens) == ("gpt-4o-mini", 99)
    assert not reports_cost(model)
    assert reports_cost(openai_model(Client(), prices=PRICES))


@pytest.mark.parametrize(
    "options",
    [{"stream": True}, {"messages": []}, {"tools": []}, {"functions": []}, {"n": 2}],
)
def test_openai_model_refuses_an_option_it_sets_itself_or_cannot_serve(options):
    with pytest.raises(AgentConfigError, match=next(iter(options))):
        openai_model(Client(), **options)


def test_openai_model_refuses_a_price_sheet_that_would_misprice():
    with pytest.raises(AgentConfigError, match="prices"):
        openai_model(Client(), prices={"input": 1})
