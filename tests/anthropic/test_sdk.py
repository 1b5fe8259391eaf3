"""Once through the real SDK, against a provider on the loopback interface."""

import anthropic
import pytest

from guardchart.agents import FilePart, ImagePart, TextPart, user_message
from guardchart.agents._messages import assistant_turn, system_turn, tool_turn, user_turn
from guardchart.agents._models import ModelSettings
from guardchart.anthropic import anthropic_model
from guardchart.gate import ToolCall
from tests.agents.loopback import fixture, provider

# The SDK warns of the default model's end of life, and warnings are errors here.
MODEL = "claude-sonnet-5"
LOOKUP = {"name": "lookup_order", "description": "", "parameters": {"type": "object"}}
ASKED = [system_turn("Be brief."), user_turn("Where is order 42?")]
ANSWERED = [
    *ASKED,
    assistant_turn(None, [ToolCall("toolu_a1", "lookup_order", {"order_id": 42})]),
    tool_turn("toolu_a1", "shipped"),
]


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def options(server):
    return {"api_key": "unused", "base_url": server.url, "max_retries": 0}


async def test_anthropic_async_client_runs_a_tool_turn_and_a_text_turn():
    answers = (200, fixture("anthropic/tool_use.json")), (200, fixture("anthropic/text.json"))
    with provider(*answers) as server:
        async with anthropic.AsyncAnthropic(**options(server)) as client:
            model = anthropic_model(client, MODEL, max_tokens=50)
            assert model.is_async
            first = await model(ASKED, [LOOKUP, {"name": "shop.refund"}])
            second = await model(ANSWERED, [LOOKUP])
    assert [c.name for c in first.tool_calls] == ["lookup_order", "shop.refund"]
    assert second.text == "Order 42 has shipped." and second.usage.input_tokens == 82
    (path, asked), (_, answered) = server.requests
    assert path == "/v1/messages"
    assert (asked["model"], asked["max_tokens"]) == (MODEL, 50)
    assert asked["system"] == "Be brief."
    assert [t["name"] for t in asked["tools"]] == ["lookup_order", "shop_refund"]
    assert [m["role"] for m in answered["messages"]] == ["user", "assistant", "user"]


def test_anthropic_sync_client_makes_a_sync_model():
    text = (200, fixture("anthropic/text.json"))
    with provider(text) as server, anthropic.Anthropic(**options(server)) as client:
        model = anthropic_model(client, MODEL)
        assert not model.is_async
        assert model(ASKED, []).text == "Order 42 has shipped."


async def test_anthropic_errors_of_the_sdk_pass_through():
    with provider((529, fixture("anthropic/error_529.json"))) as server:
        async with anthropic.AsyncAnthropic(**options(server)) as client:
            with pytest.raises(anthropic.APIStatusError):
                await anthropic_model(client, MODEL)(ASKED, [])


async def test_anthropic_client_sends_an_image_and_a_file():
    parts = [
        TextPart(text="What does it cost?"),
        ImagePart(image="https://example.org/shelf.png"),
        FilePart(data=b"%PDF-1.7", media_type="application/pdf", filename="prices.pdf"),
    ]
    with provider((200, fixture("anthropic/text.json"))) as server:
        async with anthropic.AsyncAnthropic(**options(server)) as client:
            await anthropic_model(client, MODEL)([user_message(parts)], [])
    (_, asked), *_ = server.requests
    text, image, file = asked["messages"][0]["content"]
    assert text == {"type": "text", "text": "What does it cost?"}
    assert image["source"] == {"type": "url", "url": "https://example.org/shelf.png"}
    assert file["source"]["media_type"] == "application/pdf" and file["title"] == "prices.pdf"


async def test_anthropic_thinks_at_the_beginning_of_a_turn_and_not_after_its_tools():
    answers = (200, fixture("anthropic/thinking.json")), (200, fixture("anthropic/text.json"))
    thinking = {"type": "enabled", "budget_tokens": 1024}
    with provider(*answers) as server:
        async with anthropic.AsyncAnthropic(**options(server)) as client:
            model = anthropic_model(client, MODEL, max_tokens=4096, thinking=thinking)
            await model(ASKED, [LOOKUP])
            await model(ANSWERED, [LOOKUP])
    (_, first), (_, second) = server.requests
    assert first["thinking"] == thinking
    assert "thinking" not in second


async def test_anthropic_does_not_think_where_a_tool_is_forced():
    thinking = {"type": "enabled", "budget_tokens": 1024}
    with provider((200, fixture("anthropic/tool_use.json"))) as server:
        async with anthropic.AsyncAnthropic(**options(server)) as client:
            model = anthropic_model(client, MODEL, max_tokens=4096, thinking=thinking)
            await model.with_settings(ModelSettings(force_tool=True))(ASKED, [LOOKUP])
    ((_, asked),) = server.requests
    assert asked["tool_choice"]["type"] == "any"
    assert asked["thinking"] == {"type": "disabled"}
