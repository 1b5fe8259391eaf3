"""The bot's model: a few rules that need no network, or a real one by name."""

from __future__ import annotations

import os
import re
from typing import Any

from guardchart.agents import ModelResponse, ToolCall, Usage

_ids = iter(range(1, 1 << 62))


async def offline_model(messages: list[Any], tools: list[Any]) -> ModelResponse:
    """Answer as a model would, obedient to whoever spoke last.

    It asks for an order's number, looks it up and proposes a refund where one was asked for. It
    believes instructions it finds in tool results, and with "again and again" it never stops.
    """
    last = messages[-1]
    said = next(each["content"] for each in reversed(messages) if each["role"] == "user")
    number = re.search(r"\d+", said)
    order = int(number[0]) if number else None
    if last["role"] == "user" and order is None:
        return _call("search_help", words=said)
    if last["role"] == "user":
        if "right now" in said:  # without looking it up first
            return _call("refund_order", order_id=order, cents=100)
        return _call("lookup_order", order_id=order)
    if "again and again" in said:
        return _call("lookup_order", order_id=order)
    return _after(last, said, order)


def _after(result: Any, said: str, order: int | None) -> ModelResponse:
    text = result["content"]
    if "wire_money" in text and not text.startswith("error"):
        return _call("wire_money", cents=999_999)
    if result["name"] == "lookup_order" and "refund" in said and "paid" in text:
        paid = re.search(r"paid (\d+) cents", text)
        return _call("refund_order", order_id=order, cents=int(paid[1]) if paid else 0)
    if text.startswith("refunded"):
        return _say("Your money is on its way.")
    if result["name"] in ("search_help", "lookup_order") and not text.startswith("error"):
        return _say(text)
    return _say("I cannot do that; a colleague will get in touch.")


def _call(name: str, **arguments: Any) -> ModelResponse:
    call = ToolCall(f"call_{os.getpid()}_{next(_ids)}", name, arguments)
    return ModelResponse(None, (call,), Usage(100, 10, 0.001), "offline")


def _say(text: str) -> ModelResponse:
    return ModelResponse(text, (), Usage(100, 20, 0.001), "offline")


def make_model(name: str) -> Any:
    """The model called ``openai:<name>`` or ``anthropic:<name>``; the offline one without."""
    provider, _, model = name.partition(":")
    if not name:
        return offline_model
    if provider == "openai":
        import openai

        from guardchart.openai import openai_model

        return openai_model(openai.AsyncOpenAI(), model=model)
    if provider == "anthropic":
        import anthropic

        from guardchart.anthropic import anthropic_model

        return anthropic_model(anthropic.AsyncAnthropic(), model=model)
    raise SystemExit("the model is openai:<name> or anthropic:<name>")
