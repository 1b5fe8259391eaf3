# pyright: strict
"""How the pydantic-ai bridge is typed: `[Deps, Output]` of an Agent flow through it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, assert_type

from pydantic import BaseModel
from pydantic_ai import Agent, RunContext, Tool
from pydantic_ai.agent import AbstractAgent
from pydantic_ai.run import AgentRunResult
from pydantic_ai.tools import DeferredToolRequests, DeferredToolResults

from guardchart import Interpreter, Machine, MachineLogic, create_machine
from guardchart.agents import AgentResult, ModelCall
from guardchart.gate import GuardSession, approval_event
from guardchart.pydantic_ai import (
    StatechartGuard,
    agent_tool_from_machine,
    approvals_for,
    check_pydantic_ai_version,
    model,
    pending_approval,
    pydantic_ai_service,
    usage_logic,
)


@dataclass
class Deps:
    tenant: str


class Refund(BaseModel):
    cents: int


machine = create_machine({"id": "m", "initial": "a", "states": {"a": {}}})


def session(ctx: RunContext[Deps]) -> GuardSession:
    return GuardSession(machine, scope=ctx.deps.tenant)


async def asession(ctx: RunContext[Deps]) -> Interpreter:
    return await Interpreter(machine, scope=ctx.deps.tenant).start()


guard = StatechartGuard(session, scope=lambda ctx: ctx.deps.tenant, side_effects=["refund"])
assert_type(guard, StatechartGuard[Deps])
agent: Agent[Deps, Refund | DeferredToolRequests] = Agent(
    "test",
    deps_type=Deps,
    output_type=[Refund, DeferredToolRequests],
    capabilities=[guard, StatechartGuard(asession), StatechartGuard(GuardSession(machine))],
)


@agent.tool
async def refund(ctx: RunContext[Deps], order: int) -> str:
    return f"{ctx.deps.tenant} {order}"


async def resume(run: AgentRunResult[Refund | DeferredToolRequests], deps: Deps) -> Refund | None:
    output = run.output
    if isinstance(output, Refund):
        return output
    pending = pending_approval(output)
    results = approvals_for(output, guard, approval_event(pending, by="ann"))
    assert_type(results, DeferredToolResults)
    again = await agent.run(
        message_history=run.all_messages(), deferred_tool_results=results, deps=deps
    )
    assert_type(again.output, Refund | DeferredToolRequests)
    return None


def deps_from(context: Mapping[str, Any], event: object) -> Deps:
    return Deps(str(context["tenant"]))


def prompt_from(context: Mapping[str, Any], event: object) -> str:
    return "hello"


service = pydantic_ai_service(agent, prompt_from=prompt_from, deps_from=deps_from)
the_agent: AbstractAgent[Deps, Refund | DeferredToolRequests] = service.agent


def other_deps(context: Mapping[str, Any], event: object) -> int:
    return 5


pydantic_ai_service(agent, prompt_from=prompt_from, deps_from=other_deps)  # type: ignore[arg-type]
StatechartGuard(session, on_denied="shrug")  # type: ignore[arg-type]
logic: MachineLogic = MachineLogic(services={"ask": service}).merge(usage_logic())


async def runner(prompt: str) -> AgentResult[Any]:
    raise NotImplementedError


inner: Machine = machine
by_machine: Tool[object] = agent_tool_from_machine(inner)
by_function: Tool[object] = agent_tool_from_machine(runner, name="ask")
with_tools = Agent("test", deps_type=Deps, tools=[by_machine, by_function])
loop_model: ModelCall = model(agent)
check_pydantic_ai_version()
