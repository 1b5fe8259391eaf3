"""What ``setup_agent`` and ``AgentResult`` tell a type checker.

Checked by ``mypy --strict`` with unused ignores reported: each ``type: ignore`` marks a line that
has to be an error.
"""

# ruff: noqa: B015, B018

from __future__ import annotations

from typing import Any, assert_type

from pydantic import BaseModel

from guardchart import Event, Machine
from guardchart.agents import (
    AgentResult,
    AgentSetup,
    AgentStep,
    TypedResult,
    execute_agent_request,
    initial_agent_step,
    is_idle,
    replay,
    resolve_agent_step,
    run_agent,
    setup_agent,
)
from guardchart.kernel import Snapshot


class Context(BaseModel):
    draft: str | None = None
    rounds: int = 0


class Input(BaseModel):
    topic: str


class Output(BaseModel):
    text: str


class Approve(BaseModel):
    by: str


class Reject(BaseModel):
    reason: str = ""


agent = setup_agent(
    context=Context,
    input=Input,
    output=Output,
    events={"APPROVE": Approve, "REJECT": Reject, "STOP": None},
)
assert_type(agent, AgentSetup[Context, Input, Output])
assert_type(setup_agent(context=Context), AgentSetup[Context, Any, Any])
assert_type(setup_agent(input=Input, output=Output).check, Any)  # type: ignore[attr-defined]

setup_agent(context=7)  # type: ignore[call-overload]
setup_agent(events={"APPROVE": "by"})  # type: ignore[dict-item]

# Events

approve = agent.event(Approve)
assert_type(approve(by="ann"), Event)
approve(by=3)  # type: ignore[arg-type]
approve()  # type: ignore[call-arg]
approve(by="ann", at=1)  # type: ignore[call-arg]
agent.event(len)  # type: ignore[type-var]

# Actions and guards


@agent.action("keep")
def keep(context: Context, event: Event) -> dict[str, Any]:
    return {"draft": event.data, "rounds": context.rounds + 1}


@agent.action("sign", event=Approve)
def sign(context: Context, event: Approve) -> Context:
    return context.model_copy(update={"draft": event.by})


@agent.action("wrong", event=Reject)  # type: ignore[arg-type]
def wrong_event(context: Context, event: Approve) -> None: ...


@agent.action("wrong")  # type: ignore[arg-type]
def wrong_context(context: Input, event: Event) -> None: ...


@agent.action("wrong")  # type: ignore[arg-type]
def wrong_updates(context: Context, event: Event) -> int:
    return context.rounds


@agent.guard("mayRetry")
def may_retry(context: Context, event: Event) -> bool:
    return context.rounds < 3


@agent.guard("wrong")  # type: ignore[arg-type]
def wrong_guard(context: Context, event: Event) -> str:
    return "yes"


# Runs


async def use(machine: Machine) -> None:
    result = await agent.run(machine, input=Input(topic="tea"), event=approve(by="ann"))
    assert_type(result, TypedResult[Context, Output])
    assert_type(result.output, Output | None)
    assert_type(result.typed_context, Context)
    if result.output is not None:
        result.output.text.upper()
        result.output.words  # type: ignore[attr-defined]
    result.typed_context.round  # type: ignore[attr-defined]
    await agent.run(machine, input=Output(text="x"))  # type: ignore[arg-type]
    await agent.run(machine, input={"topic": "tea"})  # type: ignore[arg-type]

    plain = await run_agent(machine)
    assert_type(plain, AgentResult[Any])
    plain.cause == "aborted"
    plain.cause == "nobody knows"  # type: ignore[comparison-overlap]
    plain.status == "paused"  # type: ignore[comparison-overlap]

    step = initial_agent_step(machine)
    assert_type(step, AgentStep)
    for request in step.requests:
        if request.kind == "tool":
            assert_type(request.side_effect, bool)
            request.events  # type: ignore[attr-defined]
        elif request.kind == "decision":
            assert_type(request.events[0].type, str)
        output = await execute_agent_request(request)
        step = resolve_agent_step(machine, step, request, output)
    assert_type(replay(machine, [step.entry]), Snapshot)
    is_idle("snapshot")  # type: ignore[arg-type]
