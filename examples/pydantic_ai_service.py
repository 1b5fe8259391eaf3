"""An Agent as a service of a chart: on its budget, its tools behind the state, a person asked.

``python -m examples.pydantic_ai_service``. The chart asks the agent; the agent wants to refund;
the run completes as paused, a wrong approval is denied, the right one goes on. Runs offline.
"""

from __future__ import annotations

import asyncio
from typing import Any

from pydantic_ai import Agent
from pydantic_ai.messages import ModelResponse, TextPart, ToolCallPart
from pydantic_ai.models.function import AgentInfo, FunctionModel
from pydantic_ai.usage import RequestUsage

from guardchart import Interpreter, MachineLogic, create_machine
from guardchart.gate import approval_event
from guardchart.pydantic_ai import pending_approval, pydantic_ai_service, usage_logic

CHART: dict[str, Any] = {
    "id": "ticket",
    "initial": "working",
    "context": {"tokens_in": 0, "tokens_out": 0, "turns": 0},
    "states": {
        "working": {
            "meta": {"tools": ["refund"]},
            "invoke": {
                "src": "desk",
                "onDone": [
                    {"guard": "agentPaused", "target": "asking", "actions": "recordAgentUsage"},
                    {"target": "answered", "actions": "recordAgentUsage"},
                ],
                "onError": {"target": "failed", "actions": "recordAgentUsage"},
            },
            "after": {"60000": "failed"},
        },
        "asking": {
            "tags": ["waiting"],
            "on": {"HUMAN_APPROVED": "working", "HUMAN_REJECTED": "working"},
        },
        "answered": {"type": "final"},
        "failed": {"type": "final"},
    },
}


def answers(messages: list[Any], info: AgentInfo) -> ModelResponse:
    usage = RequestUsage(input_tokens=40, output_tokens=10)
    if any(isinstance(each, ModelResponse) for each in messages):
        return ModelResponse(parts=[TextPart("Five euros are on their way.")], usage=usage)
    call = ToolCallPart("refund", {"order": 7, "cents": 500}, tool_call_id="c1")
    return ModelResponse(parts=[call], usage=usage)


agent = Agent(FunctionModel(answers))
refunded: list[tuple[int, int]] = []


@agent.tool_plain(requires_approval=True)
async def refund(order: int, cents: int) -> str:
    """Refund part of an order."""
    refunded.append((order, cents))
    return "refunded"


async def main() -> None:
    service = pydantic_ai_service(agent, prompt_from=lambda context, event: "Refund order 7")
    logic = MachineLogic(services={"desk": service}).merge(usage_logic())
    ticket = await Interpreter(create_machine(CHART, logic), scope="ticket-7").start()
    await ticket.idle()
    pending = pending_approval(ticket.context["paused_agent"])
    print("waiting:", sorted(ticket.current_state_ids), pending[0]["arguments"])

    wrong = {"type": "HUMAN_APPROVED", "call_ids": ["c1"], "digests": {"c1": "0" * 64}}
    receipt = await ticket.send(wrong, wait=True)
    assert receipt is not None
    print("a wrong approval:", receipt.status, refunded)

    await ticket.send(approval_event(pending, by="ann"), wait=True)
    await ticket.idle()
    print("answered:", ticket.context["result"], refunded)
    print("spent:", {key: ticket.context[key] for key in ("turns", "tokens_in", "tokens_out")})


if __name__ == "__main__":
    asyncio.run(main())
