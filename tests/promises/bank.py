"""One small bank: the tools, the loop and the LangGraph node every promise is tested on."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Annotated, Any, TypedDict

from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from pydantic import BaseModel, Field

from guardchart import Machine, create_machine
from guardchart.agents import (
    AgentResult,
    FakeModel,
    RetryPolicy,
    agent_logic,
    load_chart,
    pending_approval,
    run_agent_sync,
    tool,
    tool_registry,
)
from guardchart.gate import approval_event
from guardchart.langgraph import route_by_statechart, statechart_node
from guardchart.persistence import InMemoryLedger

AT_ONCE = RetryPolicy(delay_s=0)
THREAD: dict[str, Any] = {"configurable": {"thread_id": "t1"}}


class Payee(BaseModel):
    """A nested argument that does not forbid extra keys by itself."""

    name: str
    iban: str


class Bank:
    """Tools, and what was done with them."""

    def __init__(self) -> None:
        self.entered: list[Any] = []

    def registry(self) -> Any:
        """``refund`` and ``transfer`` need a person, ``lookup`` does not, ``wire`` is unlisted."""

        def lookup(order_id: int) -> str:
            """Look up an order."""
            self.entered.append(("lookup", order_id))
            return f"order {order_id}"

        def refund(order_id: int, cents: Annotated[int, Field(gt=0, le=100_000)] = 100) -> str:
            """Refund an order."""
            self.entered.append(("refund", order_id, cents))
            return f"refunded {cents}"

        def transfer(to: Payee, cents: int) -> str:
            """Transfer money."""
            self.entered.append(("transfer", to.name, cents))
            return "transferred"

        def wire(cents: int) -> str:
            """Wire money; registered, never listed."""
            self.entered.append(("wire", cents))
            return "wired"

        return tool_registry(
            lookup,
            tool(refund, side_effect=True),
            tool(transfer, side_effect=True),
            tool(wire, side_effect=False),
            timeout_s=5,
        )

    def machine(self, script: Iterable[Any], **options: Any) -> Machine:
        options.setdefault("ledger", InMemoryLedger())
        logic = agent_logic(
            FakeModel(script, is_async=False), self.registry(), retry=AT_ONCE, **options
        )
        return create_machine(listed_chart(), logic)

    def run(self, script: Iterable[Any], **options: Any) -> AgentResult[Any]:
        return run_agent_sync(self.machine(script, **options), prompt="Please help.")


def listed_chart(*tools: str) -> dict[str, Any]:
    chart = load_chart()
    for state in ("awaiting_model", "awaiting_tool"):
        chart["states"][state]["meta"]["tools"] = list(tools or ("lookup", "refund", "transfer"))
    return chart


REFUND = {"tool": "refund", "args": {"order_id": 7, "cents": 250}}
SAY = {"text": "Done."}


class Parked:
    """A machine that waits for a person, and the means to answer it."""

    def __init__(self, *calls: dict[str, Any], **options: Any) -> None:
        self.bank = Bank()
        self.options = {"ledger": InMemoryLedger(), **options}
        script = [{"tool_calls": list(calls or (REFUND,))}]
        result = run_agent_sync(self.machine(script), prompt="Please help.", key="t1")
        assert result.waiting, result
        self.snapshot: dict[str, Any] = dict(result.snapshot)
        self.pending = pending_approval(result.context)

    def machine(self, script: Iterable[Any]) -> Machine:
        return self.bank.machine(script, **self.options)

    def edited(self, edit: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        """The parked snapshot after somebody edited it."""
        data = copy.deepcopy(self.snapshot)
        edit(data)
        data.pop("state_ids", None)
        return data

    def send(
        self, event: dict[str, Any], snapshot: dict[str, Any] | None = None, *script: Any
    ) -> AgentResult[Any]:
        return run_agent_sync(
            self.machine(script or (SAY,)),
            snapshot=self.snapshot if snapshot is None else snapshot,
            event=event,
            key="t1",
        )

    def approve(self, snapshot: dict[str, Any] | None = None) -> AgentResult[Any]:
        return self.send(approval_event(self.pending), snapshot)

    def approve_ids(self, snapshot: dict[str, Any] | None = None) -> AgentResult[Any]:
        ids = [each["id"] for each in self.pending]
        return self.send({"type": "HUMAN_APPROVED", "call_ids": ids}, snapshot)


class State(TypedDict, total=False):
    event: dict[str, Any] | None
    xsm: dict[str, Any]


def graph(bank: Bank, script: Iterable[Any], saver: Any = None, **options: Any) -> Any:
    """A graph of one statechart node; ``options`` are the node's."""
    chart = listed_chart()
    logic = agent_logic(FakeModel(script, is_async=False), bank.registry(), retry=AT_ONCE)
    options.setdefault("ledger", InMemoryLedger())
    node = statechart_node(
        chart,
        logic,
        event_from_state=lambda state: state.get("event"),
        event_key="event",
        **options,
    )
    builder = StateGraph(State)
    builder.add_node("agent", node)
    builder.add_edge(START, "agent")
    builder.add_conditional_edges(
        "agent", route_by_statechart(chart, {"awaiting_human": END, "done": END, "error": END})
    )
    return builder.compile(checkpointer=saver if saver is not None else InMemorySaver())


def start(prompt: str = "Please help.") -> dict[str, Any]:
    return {"event": {"type": "START", "prompt": prompt}}
