"""A batch in a ledger, shared by the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from guardchart.gate import (
    Facts,
    ToolCall,
    ToolRegistry,
    as_allowed,
    assess,
    propose_verdicts,
)
from guardchart.persistence import Decision, InMemoryLedger
from guardchart.runtime import Host

NOW = 1_000_000


class Batch:
    """Calls proposed to a ledger, with a clock that the test moves."""

    def __init__(
        self,
        registry: ToolRegistry,
        calls: Iterable[ToolCall],
        *,
        ledger: Any = None,
        allowed: Any = "*",
        batch_no: int = 1,
        scope: str = "t",
    ) -> None:
        self.registry = registry
        self.calls = list(calls)
        self.ledger = InMemoryLedger() if ledger is None else ledger
        self.host = Host(scope, self.ledger, "run", "")
        self.at = NOW
        self.allowed = allowed
        self.looks = 0
        self.verdicts = assess(self.calls, registry, allowed)
        self.rows = propose_verdicts(self.ledger, self.host, batch_no, self.verdicts, now=NOW)

    def now(self) -> int:
        return self.at

    def look(self) -> Facts:
        self.looks += 1
        return Facts(self.registry, as_allowed(self.allowed), turn_size=len(self.calls))

    def decide(self, index: int = 0, decision: str = "approve", **more: Any) -> Any:
        row = self.rows[index]
        made = Decision(decision, **more)  # type: ignore[arg-type]
        return self.ledger.decide("t", {row.id: made}, "ann", now=self.at)[row.id]

    def row(self, index: int = 0) -> Any:
        row = self.rows[index]
        return None if row is None else self.ledger.row("t", row.id, follow=False)

    def arguments(self, index: int = 0, look: Callable[[], Facts] | None = None) -> dict[str, Any]:
        """What authorise and execute are called with, besides the call."""
        return {
            "look": look or self.look,
            "ledger": self.ledger,
            "scope": "t",
            "row": self.row(index),
            "now": self.now,
        }
