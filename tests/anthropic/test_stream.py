"""Streamed messages: put together from recorded events, and through the real SDK."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import anthropic
import pytest
from anthropic.types import RawMessageStreamEvent
from pydantic import TypeAdapter

from guardchart.agents import Usage
from guardchart.agents._messages import system_turn, user_turn
from guardchart.anthropic import _Events, anthropic_model, from_anthropic_response
from guardchart.errors import AgentError
from tests.agents.loopback import Stream, fixture, provider

MODEL = "claude-sonnet-5"
PRICES = {"input_per_mtok": 3.0, "output_per_mtok": 15.0}
LOOKUP = {"name": "lookup_order", "description": "", "parameters": {"type": "object"}}
REFUND = {"name": "shop.refund", "description": "", "parameters": {"type": "object"}}
ASKED = [system_turn("Be brief."), user_turn("Where is order 42?")]
STREAMS = ["text", "tool_use", "thinking", "cut"]
_EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


def events(name: str) -> Any:
    return fixture(f"anthropic/stream_{name}.json")


def read(recorded: Any) -> tuple[Any, list[str]]:
    reader = _Events()
    told = [text for text in map(reader.add, recorded) if text]
    assert reader.complete()
    return from_anthropic_response(reader.response(), prices=PRICES), told


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


# The events


@pytest.mark.parametrize("name", STREAMS)
def test_events_fit_the_published_schema_and_read_the_same_as_objects(name: str) -> None:
    known = [each for each in events(name) if each["type"] != "ping"]
    objects = [_EVENT.validate_python(each) for each in known]
    assert read(events(name)) == read(objects)


def test_text_comes_piece_by_piece_and_whole_with_its_usage() -> None:
    turn, told = read(events("text"))
    assert told == ["Order 42", " has", " shipped."]
    assert turn.text == "Order 42 has shipped." and turn.finish_reason == "end_turn"
    assert turn.usage == Usage(82, 17, (82 * 3 + 17 * 15) / 1e6)
    assert turn.model == "claude-sonnet-4-5-20250929"


def test_calls_and_text_of_one_turn_are_told_apart() -> None:
    turn, told = read(events("tool_use"))
    assert turn.text == "".join(told) == "Let me look."
    assert [(c.id, c.name, c.arguments) for c in turn.tool_calls] == [
        ("toolu_a1", "lookup_order", {"order_id": 42}),
        ("toolu_a2", "shop_refund", {"order_id": 42, "reason": "late"}),
        ("toolu_a3", "now", {}),
    ]
    assert turn.usage.input_tokens == 120  # cached ones included


def test_thinking_is_left_out_and_not_told() -> None:
    turn, told = read(events("thinking"))
    assert turn.text == "".join(told) == "It has shipped."


def test_a_call_cut_at_max_tokens_is_denied_even_where_what_is_left_is_valid() -> None:
    turn, _ = read(events("cut"))
    assert turn.finish_reason == "max_tokens"
    assert "__unparseable__" in turn.tool_calls[0].arguments


def test_arguments_with_a_key_twice_are_unparseable() -> None:
    recorded = events("tool_use")
    for event in recorded:
        if event.get("delta", {}).get("partial_json") == '_id": 42}':
            event["delta"]["partial_json"] = '_id": 42, "order_id": 7}'
    turn, _ = read(recorded)
    assert "__unparseable__" in turn.tool_calls[0].arguments


def test_an_error_event_is_an_error_without_its_text() -> None:
    reader = _Events()
    with pytest.raises(AgentError) as raised:
        for event in events("error"):
            reader.add(event)
    assert "Overloaded" not in str(raised.value)


def test_a_delta_without_its_block_is_malformed() -> None:
    with pytest.raises(AgentError, match="malformed"):
        _Events().add(
            {
                "type": "content_block_delta",
                "index": 3,
                "delta": {"type": "text_delta", "text": "x"},
            }
        )


# The SDK


def options(server: Any) -> dict[str, Any]:
    return {"api_key": "unused", "base_url": server.url, "max_retries": 0}


def stream(name: str, **more: Any) -> Any:
    return 200, Stream(events(name), named=True, **more)


async def test_an_async_client_streams_text_and_a_tool_turn() -> None:
    told: list[str] = []
    with provider(stream("tool_use"), stream("text")) as server:
        async with anthropic.AsyncAnthropic(**options(server)) as client:
            model = anthropic_model(client, MODEL, max_tokens=50, prices=PRICES)
            first = await model.stream(ASKED, [LOOKUP, REFUND], told.append)
            second = await model.stream(ASKED, [LOOKUP], told.append)
    assert [c.name for c in first.tool_calls] == ["lookup_order", "shop.refund", "now"]
    assert "".join(told) == "Let me look.Order 42 has shipped."
    assert second.usage.output_tokens == 17 and second.usage.cost_usd > 0
    _, asked = server.requests[0]
    assert asked["stream"] is True and asked["max_tokens"] == 50


def test_a_sync_client_streams() -> None:
    told: list[str] = []
    with provider(stream("text")) as server, anthropic.Anthropic(**options(server)) as client:
        turn = anthropic_model(client, MODEL).stream(ASKED, [], told.append)
    assert turn.text == "".join(told) == "Order 42 has shipped."


@pytest.mark.parametrize("name", ["text", "error"])
def test_a_stream_that_breaks_off_knows_the_input_as_reported(name: str) -> None:
    broken = stream(name, breaks_after=4 if name == "text" else None)
    with (
        provider(broken) as server,
        anthropic.Anthropic(**options(server)) as client,
        pytest.raises(Exception) as error,
    ):
        anthropic_model(client, MODEL, prices=PRICES).stream(ASKED, [])
    used = error.value.usage  # type: ignore[attr-defined]
    assert used.input_tokens == 82
    assert used.output_tokens >= 2 and used.cost_usd > 0


async def test_a_cancelled_stream_closes_its_connection_and_knows_what_was_used() -> None:
    held = Stream(events("text"), named=True, breaks_after=4, hold=threading.Event())
    assert held.hold is not None
    arrived = asyncio.Event()
    with provider((200, held)) as server:
        async with anthropic.AsyncAnthropic(**options(server)) as client:
            model = anthropic_model(client, MODEL, prices=PRICES)
            task = asyncio.ensure_future(
                model.stream(ASKED, [], lambda text: arrived.set())  # type: ignore[arg-type]
            )
            await asyncio.wait_for(arrived.wait(), 5)
            task.cancel()
            held.hold.set()
            with pytest.raises(asyncio.CancelledError) as cancelled:
                await task
            assert await asyncio.to_thread(held.gone.wait, 5)
    assert cancelled.value.usage.input_tokens == 82  # type: ignore[attr-defined]
