"""What the service and its worker share: the store, the machine, the trace."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.support_bot.chart import GUARDS, support_chart
from examples.support_bot.model import make_model
from examples.support_bot.tools import make_tools
from guardchart import create_machine
from guardchart.agents import (
    AgentTracePlugin,
    Budget,
    RetryPolicy,
    agent_logic,
    validate_agent_chart,
)
from guardchart.persistence import DueTimerScanner, SQLiteStore

WAITING = "support.awaiting_human"


@dataclass
class Desk:
    """One process of the bot."""

    store: SQLiteStore
    machine: Any
    trace: AgentTracePlugin

    @classmethod
    def open(cls, folder: Path, *, model: str = "", human_timeout_s: float = 86_400) -> Desk:
        """Open the bot's folder; any number of processes may."""
        folder.mkdir(parents=True, exist_ok=True)
        trace = AgentTracePlugin(folder / "trace.jsonl")
        logic = agent_logic(
            make_model(model),
            make_tools(folder),
            budgets=Budget(max_turns=6, max_tokens=20_000, max_usd=0.50),
            system_prompt="You are the support desk of a small shop. Be brief.",
            human_timeout_s=human_timeout_s,
            # What a tool result talks the model into must not end the conversation.
            on_denied="retry",
            retry=RetryPolicy(max_attempts=2, delay_s=0.5),
        )
        machine = create_machine(support_chart(), logic.merge(GUARDS))
        validate_agent_chart(machine)
        return cls(SQLiteStore(folder / "bot.db"), machine, trace)

    def scanner(self) -> DueTimerScanner:
        """What escalates approvals that nobody gave."""
        return DueTimerScanner(
            self.store,
            lambda key: self.machine if key.startswith("ticket:") else None,
            plugins=[self.trace],
        )

    def oldest_wait_s(self) -> float:
        """How long the ticket that has waited longest for a person has waited, in seconds."""
        waiting = self.store.find(state=WAITING, limit=1)
        return max(0.0, time.time() - waiting[0].since / 1000) if waiting else 0.0
