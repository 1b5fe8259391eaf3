"""Once through the real SDK, against a provider on the loopback interface."""

import openai
import pytest

from guardchart.agents import FilePart, ImagePart, TextPart, user_message
from guardchart.agents._messages import assistant_turn, tool_turn, user_turn
from guardchart.gate import ToolCall
from guardchart.openai import openai_model
from tests.agents.loopback import fixture, provider

LOOKUP = {"name": "lookup_order", "description": "", "parameters": {"type": "object"}}
ASKED = [user_turn("Where is order 42?")]
ANSWERED = [
    *ASKED,
    assistant_turn(None, [ToolCall("call_a1", "lookup_order", {"order_id": 42})]),
    tool_turn("call_a1", "shipped"),
]


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def options(server):
    return {"api_key": "unused", "base_url": f"{server.url}/v1", "max_retries": 0}


async def test_openai_async_client_runs_a_tool_turn_and_a_text_turn():
    answers = (200, fixture("openai/tool_calls.json")), (200, fixture("openai/text.json"))
    with provider(*answers) as server:
        async with openai.AsyncOpenAI(**options(server)) as client:
            model = openai_model(client, max_completion_tokens=50)
            assert model.is_async
            first = await model(ASKED, [LOOKUP, {"name": "shop.refund"}])
            second = await model(ANSWERED, [LOOKUP])
    assert [c.name for c in first.tool_calls] == ["lookup_order", "shop.refund"]
    assert second.text == "Order 42 has shipped." and second.usage.input_tokens == 82
    (path, asked), (_, answered) = server.requests
    assert path == "/v1/chat/completions"
    assert asked["model"] == "gpt-4o-mini" and asked["max_completion_tokens"] == 50
    assert [t["function"]["name"] for t in asked["tools"]] == ["lookup_order", "shop_refund"]
    assert [m["role"] for m in answered["messages"]] == ["user", "assistant", "tool"]


def test_openai_sync_client_makes_a_sync_model():
    text = (200, fixture("openai/text.json"))
    with provider(text) as server, openai.OpenAI(**options(server)) as client:
        model = openai_model(client)
        assert not model.is_async
        assert model(ASKED, []).text == "Order 42 has shipped."


async def test_openai_errors_of_the_sdk_pass_through():
    with provider((429, fixture("openai/error_429.json"))) as server:
        async with openai.AsyncOpenAI(**options(server)) as client:
            with pytest.raises(openai.RateLimitError):
                await openai_model(client)(ASKED, [])


async def test_openai_client_sends_an_image_and_a_file():
    parts = [
        TextPart(text="What does it cost?"),
        ImagePart(image=b"\x89PNG\r\n\x1a\n"),
        FilePart(data=b"%PDF-1.7", media_type="application/pdf", filename="prices.pdf"),
    ]
    with provider((200, fixture("openai/text.json"))) as server:
        async with openai.AsyncOpenAI(**options(server)) as client:
            await openai_model(client)([user_message(parts)], [])
    (_, asked), *_ = server.requests
    text, image, file = asked["messages"][0]["content"]
    assert text == {"type": "text", "text": "What does it cost?"}
    assert image["image_url"]["url"].startswith("data:image/png;base64,")
    assert file["file"]["filename"] == "prices.pdf"
