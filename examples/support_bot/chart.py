"""The bot's chart: TOOL_LOOP with two places where a model is asked, each with its own tools.

Until an order has been looked up the model may only look things up. After that it may propose a
refund, and a person is asked.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from guardchart import MachineLogic
from guardchart.agents import load_chart

READING = ["search_help", "lookup_order"]
ACTING = [*READING, "refund_order"]


def support_chart() -> dict[str, Any]:
    """The chart, as JSON types."""
    chart = load_chart()
    chart["id"] = "support"
    states = chart["states"]
    for name in ("awaiting_model", "awaiting_tool"):
        states[name]["meta"]["tools"] = READING

    resolving = deepcopy(states["awaiting_model"])
    resolving["invoke"]["id"] = "resolver"
    acting = deepcopy(states["awaiting_tool"])
    acting["invoke"]["id"] = "actions"
    for state in (resolving, acting):
        state["meta"]["tools"] = ACTING
    for way in (*resolving["invoke"]["onDone"], *_ways(states["awaiting_human"])):
        if way.get("target") == "awaiting_tool":
            way["target"] = "acting"
    states.update(resolving=resolving, acting=acting)

    # Every turn passes the budget guards first; where it goes then is the chart's to say.
    always = states["checking_budget"]["always"]
    always.insert(-1, {"guard": "orderKnown", "target": "resolving"})
    return chart


def _ways(state: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [way for found in state["on"].values() if isinstance(found, list) for way in found]


def order_known(context: Mapping[str, Any], event: Any) -> bool:
    """Whether an order has been found in this conversation."""
    return any(
        message["role"] == "tool"
        and message.get("name") == "lookup_order"
        and str(message["content"]).startswith("order ")
        for message in context["messages"]
    )


GUARDS = MachineLogic(guards={"orderKnown": order_known})
