"""A mail is drafted from a conversation of typed parts, and a model says when it is good.

``python examples/email_drafter.py``. The user's message has a file beside its text; the drafter
answers, a reviewer chooses one event: ``ACCEPT``, or ``REVISE`` with advice that becomes the next
message. The conversation lives in the context as JSON. Runs offline: both models are scripts.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pydantic import BaseModel

from guardchart import Event
from guardchart.agents import (
    FilePart,
    TextPart,
    TypedResult,
    assistant_message,
    messages_schema,
    setup_agent,
    system_message,
    user_message,
)


class Mail(BaseModel):
    messages: list[Any]
    rounds: int = 0
    result: str | None = None


class Revise(BaseModel):
    advice: str


agent = setup_agent(context=Mail, events={"ACCEPT": None, "REVISE": Revise}, check_context=True)

OPENING = [
    system_message("You write short, friendly business mails."),
    user_message(
        [
            TextPart(text="Write to Ada that her invoice is attached."),
            FilePart(data="JVBERi0xLjQ=", media_type="application/pdf", filename="invoice.pdf"),
        ]
    ),
]

CHART: dict[str, Any] = {
    "id": "drafter",
    "initial": "drafting",
    "context": {"messages": [each.to_json() for each in OPENING], "rounds": 0, "result": None},
    "states": {
        "drafting": {
            "invoke": {
                "src": "agent.generate_text",
                "input": lambda context, event: {"messages": context["messages"]},
                "onDone": {"target": "reviewing", "actions": "keepDraft"},
            }
        },
        "reviewing": {
            "invoke": {
                "src": "agent.decide",
                "input": lambda context, event: {
                    "system": "Accept the mail, or say in one sentence what is missing.",
                    "messages": context["messages"],
                },
            },
            "on": {
                "ACCEPT": {"target": "accepted", "actions": "accept"},
                "REVISE": {"target": "drafting", "guard": "mayRevise", "actions": "advise"},
            },
        },
        "accepted": {"type": "final"},
    },
}


@agent.action("keepDraft")
def keep_draft(context: Mail, event: Event) -> dict[str, Any]:
    drafted = assistant_message(event.data).to_json()
    return {"messages": [*context.messages, drafted], "rounds": context.rounds + 1}


@agent.action("advise", event=Revise)
def advise(context: Mail, event: Revise) -> dict[str, Any]:
    return {"messages": [*context.messages, user_message(event.advice).to_json()]}


@agent.action("accept")
def accept(context: Mail, event: Event) -> dict[str, Any]:
    return {"result": context.messages[-1]["content"]}


@agent.guard("mayRevise")
def may_revise(context: Mail, event: Event) -> bool:
    return context.rounds < 3


DRAFTS = (
    "Dear Ada, your invoice is attached. Kind regards",
    "Dear Ada, your invoice over 1 200 EUR is attached. Kind regards",
)
REVIEWS = (
    {"event": {"type": "REVISE", "advice": "Name the amount, 1 200 EUR."}, "reason": "no amount"},
    {"event": {"type": "ACCEPT"}, "reason": "says everything"},
)


def scripted(answers: Any, asked: list[Any]) -> Any:
    """An executor that gives one answer after another, whoever asks."""
    left: Iterator[Any] = iter(answers)

    def execute(request: Any) -> Any:
        asked.append(request)
        return next(left)

    return execute


def draft(asked: list[Any] | None = None) -> TypedResult[Mail, Any]:
    """Run the drafter to its end."""
    asked = asked if asked is not None else []

    def told(request: Any, executed: Any) -> None:
        if request.kind == "decision":
            chosen = executed.raw["event"]["type"]
            print(f"-- reviewer chose {chosen}: {executed.raw['reason']}")

    return agent.run_sync(
        agent.create_machine(CHART),
        generate_text=scripted(DRAFTS, asked),
        decide=scripted(REVIEWS, asked),
        on_result=told,
    )


def shown(content: Any) -> Iterator[str]:
    """The lines of a message's parts."""
    for part in [TextPart(text=content)] if isinstance(content, str) else content:
        if isinstance(part, TextPart):
            yield part.text
        elif isinstance(part, FilePart):
            yield f"[file {part.media_type} {part.filename}]"


def main() -> None:
    asked: list[Any] = []
    result = draft(asked)
    print()
    for message in messages_schema.validate_python(result.typed_context.messages):
        for line in shown(message.content):
            print(f"{message.role}: {line}")
    print(f"\nmodel calls: {len(asked)}")
    print(f"accepted: {result.typed_context.result}")


if __name__ == "__main__":
    main()
