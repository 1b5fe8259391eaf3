"""A form that is filled in state by state: ``python -m examples.structured_output``.

Each state has a schema of its own. The scripted model answers too early once, wraps an answer
in prose once and repeats a key once; the chart takes none of that for an answer, and says what
it asked for again. Runs offline.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from guardchart import MachineLogic, create_machine
from guardchart.agents import AgentResult, FakeModel, agent_logic, run_agent_sync, structured_output


class Traveller(BaseModel):
    """Who travels."""

    model_config = ConfigDict(extra="forbid")
    name: str = Field(min_length=1, max_length=100)


class Journey(BaseModel):
    """From where to where."""

    model_config = ConfigDict(extra="forbid")
    origin: str
    destination: str


class Consent(BaseModel):
    """Whether to book."""

    model_config = ConfigDict(extra="forbid")
    confirmed: bool


SCRIPT = (
    {"text": '{"name": "Ines", "destination": "Porto"}'},
    {"text": '{"name": "Ines"}'},
    {"text": 'Sure! {"origin": "Lisbon", "destination": "Porto"} Anything else?'},
    {"text": '{"origin": "Lisbon", "destination": "Porto"}'},
    {"text": '{"confirmed": false, "confirmed": true}'},
    {"text": '{"confirmed": true}'},
)


def ask(state: str, schema: str, target: str) -> dict[str, Any]:
    """A state that asks the model until its reply fits the schema."""
    recorded = "recordModelResponse"
    return {
        "meta": {"output_model": f"{__name__}:{schema}"},
        "invoke": {
            "src": "callModel",
            "onDone": [
                {
                    "guard": "outputValid",
                    "target": target,
                    "actions": [recorded, "storeResult", "keep"],
                },
                {
                    "guard": "canRetryOutput",
                    "target": state,
                    "reenter": True,
                    "actions": [recorded, "retryOutput"],
                },
                {"target": "refused", "actions": [recorded, "failOutput"]},
            ],
        },
    }


CHART: dict[str, Any] = {
    "id": "booking",
    "initial": "traveller",
    "context": {"messages": [], "form": {}, "output_retries": 0, "task": "Book me a train"},
    "states": {
        "traveller": ask("traveller", "Traveller", "journey"),
        "journey": ask("journey", "Journey", "consent"),
        "consent": ask("consent", "Consent", "booked"),
        "booked": {"type": "final"},
        "refused": {"type": "final"},
    },
}


def keep(context: Any, event: Any) -> dict[str, Any]:
    """Add the validated reply to the form."""
    return {"form": {**context["form"], **context["result"]}}


def run(retries: int = 5) -> AgentResult[Any]:
    """Fill in the form; the strict parser, so that prose is asked for again, too."""
    model = FakeModel(SCRIPT, is_async=False)
    logic = agent_logic(model, **structured_output(retries=retries, use_instructor=False))
    machine = create_machine(CHART, logic.merge(MachineLogic(actions={"keep": keep})))
    return run_agent_sync(machine)


def main() -> None:
    """Run it and show what was asked."""
    result = run()
    for message in result.context["messages"]:
        print(f"{message['role']:>9}: {message['content']}")
    print(f"\n{result.final_state} with {result.context['form']}")
    print(f"{result.usage['turns']} turns, {result.context['output_retries']} asked for again")


if __name__ == "__main__":
    main()
