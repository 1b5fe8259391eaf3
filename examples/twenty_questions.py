"""Twenty questions, the model guessing: ``python examples/twenty_questions.py [animal]``.

Every turn is a decision: the model picks one event that the chart accepts, ASK or GUESS. The
chart holds the rules (no question twice, no guess before three answers, twenty questions), so a
move against them is refused, told, and chosen anew. The host is a durable one in small: it
performs one request at a time, keeps a log, and rebuilds the end of the game from it without a
model. The guesser is a plain function; ``openai_model(...)`` would stand in its place. Runs
offline.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from guardchart import MachineLogic, Snapshot, create_machine
from guardchart.agents import (
    AgentDecisionRequest,
    AgentRequestExecutors,
    ModelCall,
    ModelResponse,
    ToolCall,
    decide_with,
    execute_agent_request_sync,
    initial_agent_step,
    replay,
    resolve_agent_step,
    transition_agent_step,
)
from guardchart.errors import DecisionExhaustedError

QUESTIONS = (
    "live in water",
    "have fur",
    "have feathers",
    "have more than four legs",
    "fly",
    "bite",
)
ANIMALS = {
    "dolphin": {"live in water"},
    "shark": {"live in water", "bite"},
    "penguin": {"have feathers"},
    "eagle": {"have feathers", "fly", "bite"},
    "horse": {"have fur"},
    "wolf": {"have fur", "bite"},
    "ant": {"have more than four legs", "bite"},
    "bee": {"have more than four legs", "fly"},
}

# The rules


class Ask(BaseModel):
    """Ask a question that is answered by yes or no."""

    question: str


class Guess(BaseModel):
    """Say which animal it is."""

    animal: str


class Answer(BaseModel):
    """What the other player says."""

    yes: bool


def prompt(context: Mapping[str, Any], event: Any) -> dict[str, Any]:
    """What the guesser is told: the facts so far."""
    facts = [f"- {question}: {'yes' if yes else 'no'}" for question, yes in context["facts"]]
    wrong = [f"- it is no {animal}" for animal in context["guesses"]]
    known = "\n".join([*facts, *wrong]) or "- nothing yet"
    return {
        "system": "Guess the animal. Ask what tells most animals apart.",
        "prompt": f"You know:\n{known}",
        "maxRetries": 3,
    }


CHART = {
    "id": "twentyQuestions",
    "initial": "thinking",
    "context": {"facts": [], "asked": None, "guesses": []},
    "states": {
        "thinking": {
            "invoke": {"src": "agent.decide", "input": prompt, "onError": "lost"},
            "on": {
                "ASK": {"target": "asking", "guard": "isNew", "actions": "ask"},
                "GUESS": {"target": "guessing", "guard": "knowsEnough", "actions": "guess"},
            },
        },
        "asking": {
            "tags": ["waiting"],
            "on": {"ANSWER": {"target": "thinking", "actions": "note"}},
        },
        "guessing": {
            "tags": ["waiting"],
            "on": {
                "ANSWER": [
                    {"guard": "isRight", "target": "won"},
                    {"guard": "mayGoOn", "target": "thinking"},
                    {"target": "lost"},
                ]
            },
        },
        "won": {"type": "final"},
        "lost": {"type": "final"},
    },
}

LOGIC = MachineLogic(
    guards={
        "isNew": lambda context, event: (
            len(context["facts"]) < 20
            and event.payload["question"] not in [question for question, _ in context["facts"]]
        ),
        "knowsEnough": lambda context, event: (
            len(context["facts"]) >= 3 and event.payload["animal"] not in context["guesses"]
        ),
        "isRight": lambda context, event: event.payload["yes"],
        "mayGoOn": lambda context, event: len(context["guesses"]) < 3,
    },
    actions={
        "ask": lambda context, event: {"asked": event.payload["question"]},
        "note": lambda context, event: {
            "facts": [*context["facts"], [context["asked"], event.payload["yes"]]],
            "asked": None,
        },
        "guess": lambda context, event: {"guesses": [*context["guesses"], event.payload["animal"]]},
    },
    attachments={"events": {"ASK": Ask, "GUESS": Guess, "ANSWER": Answer}},
)

machine = create_machine(CHART, LOGIC)


# The guesser: no model, but called like one


class Guesser:
    """Guesses at once, and repeats itself, until it is told that this is not possible."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, messages: list[Any], tools: list[Any]) -> ModelResponse:
        self.calls += 1
        told = "\n".join(message["content"] for message in messages)
        refused = "It was not taken" in messages[-1]["content"]
        known = {
            question: yes == "yes"
            for question, yes in re.findall(r"^- (.+): (yes|no)$", told, re.MULTILINE)
        }
        wrong = set(re.findall(r"^- it is no (\w+)$", told, re.MULTILINE))
        left = [
            animal
            for animal, traits in ANIMALS.items()
            if animal not in wrong and all((each in traits) == yes for each, yes in known.items())
        ]
        if not known and not refused:
            return _call("send_event_GUESS", animal=left[0])
        if len(known) == 2 and not refused:
            return _call("send_event_ASK", question=next(iter(known)))
        if len(left) == 1 and len(known) >= 3:
            return _call("send_event_GUESS", animal=left[0])
        return _call("send_event_ASK", question=_best(left, known))


def _best(left: list[str], known: Mapping[str, bool]) -> str:
    """The question that comes nearest to telling half of the animals from the others."""
    fresh = [each for each in QUESTIONS if each not in known]
    return min(fresh, key=lambda each: abs(sum(each in ANIMALS[a] for a in left) - len(left) / 2))


def _call(name: str, **arguments: str) -> ModelResponse:
    return ModelResponse(tool_calls=[ToolCall("call-1", name, arguments)])


# The host


@dataclass
class Game:
    """How a game went: where it ended, what was logged, what the model was asked."""

    snapshot: Snapshot
    log: list[dict[str, Any]] = field(default_factory=list)
    requests: list[AgentDecisionRequest] = field(default_factory=list)

    @property
    def won(self) -> bool:
        """Whether the animal was found."""
        return self.snapshot.state_ids == {"twentyQuestions.won"}


def play(secret: str, model: ModelCall, say: Callable[[str], None] = print) -> Game:
    """Play one game, step by step.

    Args:
        secret: The animal; the model is never told.
        model: The guesser.
        say: Takes the lines of the transcript.
    """
    choose = decide_with(model)

    def decide(request: AgentDecisionRequest) -> Any:
        game.requests.append(request)
        if request.attempts:
            newest = request.attempts[-1]
            say(f"    {_shown(newest.event)} - not taken: {newest.failure}")
        return choose(request)

    executors = AgentRequestExecutors(decide=decide)
    step = initial_agent_step(machine)
    game = Game(step.snapshot, [step.entry])
    while not step.done:
        for request in step.requests:
            try:
                chosen = execute_agent_request_sync(request, executors)
            except DecisionExhaustedError as error:
                step = resolve_agent_step(machine, step, request, error=error)
            else:
                step = resolve_agent_step(machine, step, request, chosen)
            game.log.append(step.entry)
        if not step.requests and not step.done:
            step = transition_agent_step(machine, step, _answer(step.snapshot, secret, say))
            game.log.append(step.entry)
    game.snapshot = step.snapshot
    return game


def _answer(snapshot: Snapshot, secret: str, say: Callable[[str], None]) -> dict[str, Any]:
    """What the other player says to what was asked last."""
    context = snapshot.context
    if context["asked"] is not None:
        yes = context["asked"] in ANIMALS[secret]
        number = len(context["facts"]) + 1
        say(f"{number:2}. Does it {context['asked']}? {'yes' if yes else 'no'}")
    else:
        yes = context["guesses"][-1] == secret
        say(f"    Is it a {context['guesses'][-1]}? {'yes' if yes else 'no'}")
    return {"type": "ANSWER", "yes": yes}


def _shown(event: Mapping[str, Any] | None) -> str:
    if event is None:
        return "no move"
    return " ".join(str(each) for each in event.values())


def main(secret: str) -> None:
    """Play, then rebuild the end of the game from its log."""
    guesser = Guesser()
    game = play(secret, guesser)
    calls = guesser.calls
    ended = replay(machine, game.log)
    assert guesser.calls == calls
    print(f"{len(game.log)} entries, {calls} model calls")
    print("replayed without a model:", *sorted(ended.state_ids))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "dolphin")
