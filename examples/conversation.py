"""A chat of many turns, each resumed from JSON: ``python -m examples.conversation``.

The window is small, so that old turns are summed up after a while; the turns share one budget,
which ends the chat. Runs offline, with a scripted model.
"""

from __future__ import annotations

import json
from typing import Any

from guardchart.agents import AgentResult, FakeModel, run_agent_sync, tool_registry

PRICES = {"lamp": 30, "desk": 240, "chair": 95}
USAGE = {"input_tokens": 120, "output_tokens": 20}


def price_of(item: str) -> str:
    """What an item costs."""
    return f"{item}: {PRICES[item]} EUR"


def sum_up(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One line instead of everything but the newest question and answer."""
    told = [m["content"] for m in messages if m["role"] == "tool"]
    said = [m["content"] for m in messages if m["role"] == "user"]
    known = next((text for text in said if text.startswith("Known:")), "Known:")
    line = " ".join([known, *(each for each in told if each not in known)])
    return [{"role": "user", "content": line}, *messages[-1:]]


def turn(snapshot: Any, item: str) -> AgentResult[Any]:
    """Ask for one price, and go on from where the chat was."""
    model = FakeModel(
        [
            {"tool": "price_of", "args": {"item": item}, "usage": USAGE},
            {"text": f"The {item} is {PRICES[item]} EUR.", "usage": USAGE},
        ],
        is_async=False,
    )
    return run_agent_sync(
        model,
        tools=tool_registry(price_of),
        prompt=f"What is the {item}?",
        snapshot=snapshot,
        key="chat-1",
        max_messages=5,
        summarise=sum_up,
        budgets={"max_tokens": 1_000, "max_turns": None},
        budget_scope="conversation",
    )


def main() -> None:
    """Chat until the budget is spent."""
    saved: str | None = None
    while True:
        for item in PRICES:
            result = turn(None if saved is None else json.loads(saved), item)
            saved = json.dumps(result.snapshot)  # what a database would hold between turns
            spent = result.usage["tokens_in"] + result.usage["tokens_out"]
            print(f"{item:>6}: {result.output or result.error}")
            print(f"        {len(result.context['messages'])} messages kept, {spent} tokens spent")
            if not result.ok:
                return


if __name__ == "__main__":
    main()
