"""A supervisor and its workers, one of whom a person has to agree with.

``python -m examples.supervisor``. Three tasks are handed out; two workers look things up, one
wants to send a letter and parks. What it would send is shown, the approval is given under its
agent's id, and the supervisor reports. Runs offline.
"""

from __future__ import annotations

import asyncio
from typing import Any

from guardchart import Machine, MachineLogic, create_machine
from guardchart.agents import (
    AgentResult,
    BudgetPlugin,
    FakeModel,
    display,
    handoff_guard,
    load_chart,
    pending_approval,
    run_agent,
    spawn_agent,
    tool,
    tool_registry,
)

SENT: list[tuple[str, str]] = []


def search(query: str) -> str:
    """Search the archive."""
    return f"two pages on {query}"


def send_letter(to: str, text: str) -> str:
    """Send a letter."""
    SENT.append((to, text))
    return "on its way"


SCRIPTS = {
    "Look up the harbour": [
        {"tool": "search", "args": {"query": "harbour"}},
        {"text": "The harbour is old."},
    ],
    "Look up the lighthouse": [{"text": "The lighthouse is older."}],
    "Tell the mayor": [
        {"tool": "send_letter", "args": {"to": "the mayor", "text": "Both are old."}},
        {"text": "The mayor knows."},
    ],
}


def scripted() -> Any:
    """One model for all workers, which plays the script of the task it is given."""
    models = {task: FakeModel(script) for task, script in SCRIPTS.items()}

    async def model(messages: list[Any], tools: list[Any]) -> Any:
        return await models[messages[0]["content"]](messages, tools)  # type: ignore[misc]

    return model


def store_plan(context: Any, event: Any) -> dict[str, Any]:
    """Keep the tasks, and how many reports to expect."""
    return {"tasks": event.payload["tasks"], "outstanding": len(event.payload["tasks"])}


def hand_off(scope: Any, context: Any, event: Any, action: Any) -> None:
    """Hand each task to a worker."""
    for task in context["tasks"]:
        scope.send({"type": "HANDOFF", "from": "planner", "to": "worker", "task": task})


def all_reported(context: Any, event: Any) -> bool:
    """Whether every task has its report."""
    return 0 < context["outstanding"] <= len(context["results"]) + len(context["failures"])


def build(budget: BudgetPlugin) -> Machine:
    """The shipped supervisor with workers of our own."""
    chart = load_chart("supervisor")
    workers = chart["states"]["running"]["states"]["workers"]
    for state in (workers, workers["states"]["working"]):
        state["meta"]["tools"] = ["search", "send_letter"]
    own = MachineLogic(
        actions={
            "storePlan": store_plan,
            "handOffTasks": hand_off,
            "collectResult": lambda c, e: {"results": [*c["results"], e.payload["result"]]},
            "collectFailure": lambda c, e: {"failures": [*c["failures"], e.payload["error"]]},
        },
        guards={"allWorkersReported": all_reported},
    )
    worker = spawn_agent(
        None,
        scripted(),
        tool_registry(search, tool(send_letter, side_effect=True)),
        budget={"max_turns": 4},
        name="worker",
    )
    hands = handoff_guard({"planner": ["worker"]}, sender="verified")
    return create_machine(chart, own.merge(worker, hands, budget.guards()))


def run() -> AgentResult[Any]:
    """Plan, show what waits for a person, approve it."""
    budget = BudgetPlugin(max_total_tokens=100_000)
    machine = build(budget)
    plan = {"type": "PLAN", "tasks": list(SCRIPTS)}
    parked = asyncio.run(run_agent(machine, event=plan, key="desk-1", plugins=[budget]))
    print("reported:", parked.context["results"])
    shown = pending_approval(parked)
    for call in shown:
        print(call["agent_id"], "wants", call["name"], display(call["arguments"]))
    return asyncio.run(
        run_agent(
            machine,
            snapshot=parked.snapshot,
            trusted=True,
            approve=shown,
            key="desk-1",
            plugins=[budget],
        )
    )


def main() -> None:
    """Run the story."""
    result = run()
    print("sent:", SENT)
    print(result.final_state, result.context["results"])
    print("turns:", result.context["total_usage"]["turns"])


if __name__ == "__main__":
    main()
