"""Streamed completions: put together from recorded chunks, and through the real SDK."""

from __future__ import annotations

import asyncio
import copy
import threading
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionChunk

from guardchart.agents import Usage
from guardchart.agents._messages import user_turn
from guardchart.errors import AgentError
from guardchart.openai import _Chunks, from_openai_response, openai_model
from tests.agents.loopback import Stream, fixture, provider

PRICES = {"input_per_mtok": 0.15, "output_per_mtok": 0.6}
LOOKUP = {"name": "lookup_order", "description": "", "parameters": {"type": "object"}}
REFUND = {"name": "shop.refund", "description": "", "parameters": {"type": "object"}}
ASKED = [user_turn("Where is order 42?")]
STREAMS = ["text", "tool_calls", "refusal", "cut", "compatible_service"]


def chunks(name: str) -> Any:
    return fixture(f"openai/stream_{name}.json")


def read(events: Any) -> tuple[Any, list[str]]:
    reader = _Chunks()
    told = [text for text in map(reader.add, events) if text]
    assert reader.complete()
    return from_openai_response(reader.response(), prices=PRICES), told


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


# The chunks


@pytest.mark.parametrize("name", [each for each in STREAMS if each != "compatible_service"])
def test_chunks_fit_the_published_schema(name: str) -> None:
    for each in chunks(name):
        ChatCompletionChunk.model_validate(each, strict=True)


@pytest.mark.parametrize("name", STREAMS)
def test_chunks_read_the_same_from_json_and_from_the_sdk(name: str) -> None:
    objects = [ChatCompletionChunk.model_construct(**each) for each in chunks(name)]
    if name != "compatible_service":
        objects = [ChatCompletionChunk.model_validate(each) for each in chunks(name)]
    assert read(chunks(name)) == read(objects)


def test_text_comes_piece_by_piece_and_whole_with_its_usage() -> None:
    turn, told = read(chunks("text"))
    assert told == ["Order", " 42", " has", " shipped", "."]
    assert turn.text == "Order 42 has shipped." and turn.finish_reason == "stop"
    assert turn.usage == Usage(82, 17, (82 * 0.15 + 17 * 0.6) / 1e6)
    assert turn.model == "gpt-4o-mini-2024-07-18"


def test_calls_are_put_together_by_their_index() -> None:
    turn, told = read(chunks("tool_calls"))
    assert told == [] and turn.text is None
    assert [(c.id, c.name, c.arguments) for c in turn.tool_calls] == [
        ("call_a1", "lookup_order", {"order_id": 42}),
        ("call_a2", "shop_refund", {"order_id": 42, "reason": "late"}),
    ]


def test_a_refusal_counts_as_text() -> None:
    turn, told = read(chunks("refusal"))
    assert turn.text == "".join(told) == "I cannot help with that."


def test_a_call_that_was_cut_is_unparseable() -> None:
    turn, _ = read(chunks("cut"))
    assert turn.finish_reason == "length"
    assert turn.tool_calls[0].arguments == {"__unparseable__": '{"order_id": 4'}


def test_a_service_without_indices_and_usage_is_read_all_the_same() -> None:
    turn, told = read(chunks("compatible_service"))
    assert told == ["Looking."]
    assert [(c.id, c.arguments) for c in turn.tool_calls] == [
        ("a", {"order_id": 1}),
        ("b", {"order_id": 2}),
    ]
    assert turn.usage == Usage()


def test_malformed_chunks_are_one_error() -> None:
    with pytest.raises(AgentError, match="no list"):
        _Chunks().add({"choices": "text"})


# The SDK


def options(server: Any) -> dict[str, Any]:
    return {"api_key": "unused", "base_url": f"{server.url}/v1", "max_retries": 0}


async def test_an_async_client_streams_text_and_a_tool_turn() -> None:
    answers = (200, Stream(chunks("tool_calls"))), (200, Stream(chunks("text")))
    told: list[str] = []
    with provider(*answers) as server:
        async with openai.AsyncOpenAI(**options(server)) as client:
            model = openai_model(client, prices=PRICES)
            first = await model.stream(ASKED, [LOOKUP, REFUND], told.append)
            second = await model.stream(ASKED, [LOOKUP], told.append)
    assert [c.name for c in first.tool_calls] == ["lookup_order", "shop.refund"]
    assert second.text == "".join(told) == "Order 42 has shipped."
    assert second.usage.output_tokens == 17 and second.usage.cost_usd > 0
    _, asked = server.requests[0]
    assert asked["stream"] is True and asked["stream_options"] == {"include_usage": True}


def test_a_sync_client_streams() -> None:
    told: list[str] = []
    with (
        provider((200, Stream(chunks("text")))) as server,
        openai.OpenAI(**options(server)) as client,
    ):
        turn = openai_model(client).stream(ASKED, [], told.append)
    assert turn.text == "".join(told) == "Order 42 has shipped."


def test_stream_options_can_be_left_out() -> None:
    with (
        provider((200, Stream(chunks("text")))) as server,
        openai.OpenAI(**options(server)) as client,
    ):
        openai_model(client, stream_options=None).stream(ASKED, [])
    _, asked = server.requests[0]
    assert asked["stream"] is True and "stream_options" not in asked


def test_a_service_that_does_not_stream_gives_its_answer_in_one_piece() -> None:
    class Client:
        base_url = "http://127.0.0.1/v1"

        class chat:
            class completions:
                @staticmethod
                def create(**kw: Any) -> Any:
                    return fixture("openai/text.json")

    told: list[str] = []
    turn = openai_model(Client).stream(ASKED, [], told.append)
    assert told == [turn.text] == ["Order 42 has shipped."]


@pytest.mark.parametrize("sent", [3, 0])
def test_a_stream_that_breaks_off_is_an_error_that_knows_what_was_used(sent: int) -> None:
    stream = Stream(chunks("text"), breaks_after=sent)
    with (
        provider((200, stream)) as server,
        openai.OpenAI(**options(server)) as client,
        pytest.raises(Exception) as broken,
    ):
        openai_model(client, prices=PRICES).stream(ASKED, [])
    used = broken.value.usage  # type: ignore[attr-defined]
    assert used.input_tokens >= 5
    assert used.output_tokens == (0 if sent == 0 else 3)
    assert used.cost_usd > 0


def test_a_stream_that_ends_without_an_end_is_an_error() -> None:
    cut = [
        each
        for each in chunks("text")
        if not each["choices"] or not each["choices"][0]["finish_reason"]
    ]
    with (
        provider((200, Stream(cut[:-1]))) as server,
        openai.OpenAI(**options(server)) as client,
        pytest.raises(AgentError, match="broke off") as broken,
    ):
        openai_model(client).stream(ASKED, [])
    assert broken.value.usage.output_tokens > 0  # type: ignore[attr-defined]


def test_an_error_before_the_stream_is_the_sdks_own_and_costs_nothing() -> None:
    with (
        provider((429, fixture("openai/error_429.json"))) as server,
        openai.OpenAI(**options(server)) as client,
        pytest.raises(openai.RateLimitError) as refused,
    ):
        openai_model(client).stream(ASKED, [])
    assert not hasattr(refused.value, "usage")


def test_a_listener_that_raises_ends_the_stream_and_the_connection() -> None:
    def enough(text: str) -> None:
        raise RuntimeError("enough")

    held = Stream(chunks("text"), breaks_after=3, hold=threading.Event())
    assert held.hold is not None
    held.hold.set()
    with provider((200, held)) as server, openai.OpenAI(**options(server)) as client:
        with pytest.raises(RuntimeError, match="enough") as ended:
            openai_model(client).stream(ASKED, [], enough)
        assert held.gone.wait(5)
    assert ended.value.usage.output_tokens >= 1  # type: ignore[attr-defined]


async def test_a_cancelled_stream_closes_its_connection_and_knows_what_was_used() -> None:
    held = Stream(chunks("text"), breaks_after=4, hold=threading.Event())
    assert held.hold is not None
    arrived = asyncio.Event()
    with provider((200, held)) as server:
        async with openai.AsyncOpenAI(**options(server)) as client:
            model = openai_model(client, prices=PRICES)
            task = asyncio.ensure_future(
                model.stream(ASKED, [], lambda text: arrived.set())  # type: ignore[arg-type]
            )
            await asyncio.wait_for(arrived.wait(), 5)
            await asyncio.sleep(0.05)
            task.cancel()
            held.hold.set()
            with pytest.raises(asyncio.CancelledError) as cancelled:
                await task
            assert await asyncio.to_thread(held.gone.wait, 5)
    used = cancelled.value.usage  # type: ignore[attr-defined]
    assert used.input_tokens > 0 and used.output_tokens > 0


def test_an_image_is_not_counted_as_text_in_an_estimate() -> None:
    from guardchart.agents import ImagePart, user_message

    picture = user_message([ImagePart(image=b"\x89PNG\r\n\x1a\n" + b"\0" * 300_000)])
    stream = Stream(chunks("text"), breaks_after=2)
    with (
        provider((200, stream)) as server,
        openai.OpenAI(**options(server)) as client,
        pytest.raises(Exception) as broken,
    ):
        openai_model(client).stream([picture], [])
    assert broken.value.usage.input_tokens < 100  # type: ignore[attr-defined]


def test_reading_leaves_recorded_chunks_alone() -> None:
    recorded = chunks("tool_calls")
    before = copy.deepcopy(recorded)
    read(recorded)
    assert recorded == before
