"""The model of the demo: a script, or a real one by ``openai:<name>`` or ``anthropic:<name>``."""

from __future__ import annotations

import os
from typing import Any

from guardchart.agents import FakeModel

SCRIPTS: dict[str, list[dict[str, Any]]] = {
    "refund": [
        {"tool": "lookup_order", "args": {"order_id": 7}},
        {"tool": "refund_order", "args": {"order_id": 7, "amount_cents": 4900}},
    ],
    "answer": [{"text": "Your 49.00 EUR are on their way."}],
    "injected": [
        {"tool": "lookup_order", "args": {"order_id": 666}},
        {"tool": "wire_money", "args": {"amount_cents": 999999}},
    ],
}


def make_model(name: str, script: str) -> Any:
    """The model called ``name``; without one, the script that this step of the story needs."""
    if not name:
        return FakeModel(SCRIPTS[script], is_async=False)
    provider, _, model = name.partition(":")
    key = f"{provider.upper()}_API_KEY"
    if provider in ("openai", "anthropic") and not os.environ.get(key):
        raise SystemExit(f"MODEL={name} needs {key}")
    if provider == "openai":
        import openai

        from guardchart.openai import openai_model

        return openai_model(openai.OpenAI(), model=model)
    if provider == "anthropic":
        import anthropic

        from guardchart.anthropic import anthropic_model

        return anthropic_model(anthropic.Anthropic(), model=model)
    raise SystemExit(f"MODEL is openai:<name> or anthropic:<name>, not {name!r}")
