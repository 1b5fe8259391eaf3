"""A wolf, a goat and a cabbage: ``python examples/river_crossing.py``.

A model rows; the chart keeps the animals alive. Each crossing is a decision among the events
``cross.*``, and the guards know the rules: the cargo must be where the farmer is, and neither
goat nor cabbage may be left with whoever eats it. A crossing against the rules is never made:
the decision is refused, the model is told, and chooses again. ``max_model_calls`` ends a run that
would go on for ever. The rower is a plain function; ``openai_model(...)`` would stand in its
place. Runs offline.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from guardchart import MachineLogic, Snapshot, create_machine
from guardchart.agents import (
    AgentDecisionRequest,
    AgentResult,
    ModelCall,
    ModelResponse,
    ToolCall,
    decide_with,
    run_agent_sync,
)
from guardchart.kernel import Event

EVERYBODY = ("farmer", "wolf", "goat", "cabbage")
CROSSINGS = ("cross.alone", "cross.wolf", "cross.goat", "cross.cabbage")

# The rules


def after(context: Mapping[str, Any], crossing: str) -> dict[str, str]:
    """Where everybody is after a crossing."""
    cargo = crossing.removeprefix("cross.")
    other = "right" if context["farmer"] == "left" else "left"
    moved = {"farmer"} | ({cargo} & set(EVERYBODY))
    return {each: other if each in moved else context[each] for each in EVERYBODY}


def is_safe(context: Mapping[str, Any], event: Event) -> bool:
    """Whether the cargo is at hand, and nobody is eaten on the bank that is left behind."""
    cargo = event.type.removeprefix("cross.")
    if cargo != "alone" and context[cargo] != context["farmer"]:
        return False
    there = after(context, event.type)
    alone = {each for each in EVERYBODY if there[each] != there["farmer"]}
    return not ({"wolf", "goat"} <= alone or {"goat", "cabbage"} <= alone)


def move(context: Mapping[str, Any], event: Event) -> dict[str, Any]:
    """Cross, and remember where everybody was."""
    before = shown(context)
    return {**after(context, event.type), "seen": [*context["seen"], before]}


def shown(context: Mapping[str, Any]) -> str:
    """Both banks as one line."""
    left = [each for each in EVERYBODY if context[each] == "left"]
    right = [each for each in EVERYBODY if context[each] == "right"]
    return f"{' '.join(left) or '-'} | {' '.join(right) or '-'}"


def prompt(context: Mapping[str, Any], event: Any) -> dict[str, Any]:
    """What the model is told, and what it may choose."""
    before = "\n".join(f"seen: {each}" for each in context["seen"])
    return {
        "system": "Bring everybody to the right bank. Only the farmer can row.",
        "prompt": f"{before}\nnow: {shown(context)}".strip(),
        "allowedEvents": "cross.*",
        "maxRetries": 3,
    }


CHART = {
    "id": "river",
    "initial": "rowing",
    "context": {**dict.fromkeys(EVERYBODY, "left"), "seen": []},
    "states": {
        "rowing": {
            "invoke": {"src": "agent.decide", "input": prompt, "onError": "stuck"},
            "on": {
                **{
                    each: {"target": "landing", "guard": "isSafe", "actions": "move"}
                    for each in CROSSINGS
                },
                "giveUp": "stuck",
            },
        },
        "landing": {"always": [{"guard": "allAcross", "target": "across"}, {"target": "rowing"}]},
        "across": {"type": "final"},
        "stuck": {"type": "final"},
    },
}

LOGIC = MachineLogic(
    guards={
        "isSafe": is_safe,
        "allAcross": lambda context, event: all(context[each] == "right" for each in EVERYBODY),
    },
    actions={"move": move},
    attachments={"events": dict.fromkeys(CROSSINGS)},
)

machine = create_machine(CHART, LOGIC)


# The rower: no model, but called like one


def careless(messages: list[Any], tools: list[Any]) -> ModelResponse:
    """Takes the first cargo that leads to something new, and does not care who eats whom."""
    told = "\n".join(message["content"] for message in messages)
    refused = set(re.findall(r"You chose (cross\.\w+)", told))
    seen = set(re.findall(r"^seen: (.+)$", told, re.MULTILINE))
    (now,) = re.findall(r"^now: (.+) \| (.+)$", told, re.MULTILINE)
    here = {each: "left" if each in now[0].split() else "right" for each in EVERYBODY}
    for crossing in CROSSINGS:
        if crossing not in refused and shown(after(here, crossing)) not in seen:
            name = f"send_event_{crossing.replace('.', '_')}"
            return ModelResponse(tool_calls=[ToolCall("call-1", name, {})])
    return ModelResponse("I do not know what to do.")


# The host


def cross(
    model: ModelCall, *, max_model_calls: int = 100, say: Callable[[str], None] = print
) -> AgentResult[Any]:
    """Let a model row.

    Args:
        model: The rower.
        max_model_calls: How often it may be asked in all.
        say: Takes the lines of the transcript.
    """
    choose = decide_with(model)

    def decide(request: AgentDecisionRequest) -> Any:
        if request.attempts:
            newest = request.attempts[-1]
            said = "no choice" if newest.event is None else newest.event["type"]
            say(f"    {said} - not taken: {newest.failure}")
        return choose(request)

    def transition(snapshot: Snapshot, event: Event) -> None:
        if event.type in CROSSINGS:
            say(f"{event.type:14} {shown(snapshot.context)}")

    say(f"{'':14} {shown(machine.context)}")
    return run_agent_sync(
        machine, decide=decide, on_transition=transition, max_model_calls=max_model_calls
    )


def main() -> None:
    """Cross the river."""
    result = cross(careless)
    print(f"{result.final_state}, {len(result.context['seen'])} crossings")


if __name__ == "__main__":
    main()
