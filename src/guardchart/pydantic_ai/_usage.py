"""What a run of an agent used: read once, clamped, and charged to the chart's budget."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final

from pydantic_ai.capabilities import AbstractCapability

from guardchart.agents import Usage
from guardchart.agents._budgets import add_usage, clamp_usage
from guardchart.errors import DecisionRefused, LedgerError
from guardchart.gate import pending_item, read_decisions
from guardchart.gate._approvals import HUMAN_EVENTS
from guardchart.kernel import EngineEvent, Event, Snapshot
from guardchart.persistence import default_ledger
from guardchart.pydantic_ai._calls import is_of
from guardchart.runtime import BeforeStep, Host, MachineLogic

if TYPE_CHECKING:
    from pydantic_ai.models import ModelRequestContext
    from pydantic_ai.tools import RunContext

__all__ = [
    "KEPT",
    "PAUSED",
    "Requests",
    "Spent",
    "charge",
    "ledger_of",
    "mark",
    "paused",
    "spent_by",
    "spent_of",
    "usage_logic",
]

PAUSED: Final = "paused_agent"
"""Where a paused run lies in a context."""
_MARK: Final = "guardchart_spent"


class Spent(dict[str, Any]):
    """A result of the service: a plain dict, which remembers that it was charged."""

    charged = False
    nothing = False
    cost_usd = 0.0
    asked = 0


def read_usage(usage: Any) -> tuple[dict[str, int], float]:
    """Return usage as the chart sees it, clamped, and its cost in US dollars.

    Args:
        usage: pydantic-ai's own, or anything with its fields; older ones are methods.
    """
    if callable(usage) and not hasattr(usage, "input_tokens"):
        usage = usage()

    def read(name: str) -> Any:
        found = usage.get(name) if isinstance(usage, Mapping) else getattr(usage, name, None)
        return found or 0

    cost = read("cost")
    cost = float(cost) if isinstance(cost, Decimal) else cost
    known = clamp_usage(Usage(read("input_tokens"), read("output_tokens"), cost))
    requests = clamp_usage(Usage(read("requests"))).input_tokens
    plain = {
        "input_tokens": known.input_tokens,
        "output_tokens": known.output_tokens,
        "requests": requests,
    }
    return plain, known.cost_usd


def spent_of(usage: Any, asked: int = 0, **data: Any) -> Spent:
    """Return a result with its usage.

    Args:
        usage: pydantic-ai's own, or anything with its fields.
        asked: how often the model was asked, as far as that is known.
        data: the rest of the result.
    """
    plain, cost_usd = read_usage(usage)
    spent = Spent(**data, usage=plain)
    spent.cost_usd, spent.asked = cost_usd, asked
    return spent


def charge(context: Any, usage: Mapping[str, Any], spent: Spent | None = None) -> dict[str, Any]:
    """Return a context's counters after a run: each request is a turn, and a run at least one."""
    plain, _ = read_usage(usage)
    asked, cost_usd = (0, 0.0) if spent is None else (spent.asked, spent.cost_usd)
    used = Usage(plain["input_tokens"], plain["output_tokens"], cost_usd)
    return add_usage(context, used, turns=max(1, plain["requests"], asked))


def mark(error: BaseException, spent: Spent) -> Spent:
    """Note on an exception what its run used."""
    try:
        setattr(error, _MARK, spent)
    except Exception:  # an exception with slots: it is charged, but cannot say so
        return spent
    return spent


def spent_by(outcome: Any) -> Spent | None:
    """Return what a result or an exception of the service says it used."""
    found = outcome if isinstance(outcome, Spent) else getattr(outcome, _MARK, None)
    return found if isinstance(found, Spent) else None


class Requests(AbstractCapability[Any]):
    """Counts the requests of one run, each before it is made, against the host's meter, too.

    Args:
        meter: has ``spend()``, which raises where the host wants no more; None counts only.
    """

    def __init__(self, meter: Any) -> None:
        self.id = None
        self.description = None
        self.defer_loading = False
        self.made = 0
        self._meter = meter

    @property
    def metered(self) -> bool:
        """Whether a host counts, too."""
        return self._meter is not None

    async def prepare_model_request(
        self, ctx: RunContext[Any], request_context: ModelRequestContext
    ) -> ModelRequestContext:
        """Count one attempt."""
        if self._meter is not None:
            self._meter.spend()
        self.made += 1
        return request_context


# Logic for the chart


class _Record:
    """``onDone`` and ``onError``: the counters, where the service did not do so, and the result."""

    def __call__(self, context: Mapping[str, Any], event: Any) -> dict[str, Any]:
        outcome = event.error if getattr(event, "error", None) is not None else event.data
        spent = spent_by(outcome)
        updates: dict[str, Any] = {}
        if spent is None or not spent.charged:
            given = spent if spent is not None else outcome
            usage = given.get("usage") if isinstance(given, Mapping) else None
            updates.update(charge(context, usage if isinstance(usage, Mapping) else {}, spent))
        if isinstance(outcome, BaseException):
            return updates
        data = outcome if isinstance(outcome, Mapping) else {}
        if paused(data):
            return {**updates, PAUSED: {k: data[k] for k in KEPT if k in data}}
        updates["result"] = data.get("output")
        if context.get(PAUSED) is not None:
            updates[PAUSED] = None
        return updates


KEPT: Final = ("deferred", "messages", "conversation_id")


def paused(data: Any) -> bool:
    """Whether a completion is that of a run that waits."""
    return isinstance(data, Mapping) and bool(data.get("deferred"))


class _DecideFirst:
    """``before_step``: a person's decision is taken in the ledger before the chart moves."""

    def concerns(self, snapshot: Snapshot, event: Event | EngineEvent) -> bool:
        """Whether the ledger will be asked."""
        return event.type in HUMAN_EVENTS if isinstance(event, Event) else False

    def __call__(
        self,
        snapshot: Snapshot,
        event: Event | EngineEvent,
        now: float,
        host: Host,
        outside: bool,
    ) -> BeforeStep | None:
        if not isinstance(event, Event) or event.type not in HUMAN_EVENTS:
            return None
        kept = snapshot.context.get(PAUSED)
        if kept is None or not paused(kept):
            return None
        if not outside:
            return BeforeStep(denied="an approval counts only from outside")
        ledger = ledger_of(host.ledger, snapshot.machine.logic)
        rows = _waiting(ledger, host.scope, kept)
        if not snapshot.machine.can(snapshot, event):
            return None  # the chart says no by itself; nothing is decided
        try:
            decisions = read_decisions(
                event, [pending_item(row, tool_call_id=i) for row, i in rows]
            )
            for decision in decisions.values():
                if decision.decision == "edit":
                    raise DecisionRefused("edit a call through approvals_for, which knows its tool")
            ledger.decide(host.scope, decisions, event.payload.get("by"), now=int(now))
        except (DecisionRefused, LedgerError) as exc:
            return BeforeStep(denied=str(exc))
        return None


def ledger_of(brought: Any, logic: Any) -> Any:
    """Return the host's ledger, the logic's own, or the one of this process."""
    if brought is None and logic is not None:
        brought = logic.attachments.get("ledger")
    return default_ledger() if brought is None else brought


def _waiting(ledger: Any, scope: str, kept: Mapping[str, Any]) -> list[tuple[Any, str]]:
    out = []
    items = kept["deferred"]
    for item in items if isinstance(items, (list, tuple)) else ():
        if not isinstance(item, Mapping) or item.get("held"):
            continue
        ident, other = item.get("id"), item.get("tool_call_id")
        row = ledger.row(scope, ident, follow=False) if isinstance(ident, str) else None
        if row is not None and row.status == "proposed" and is_of(row, item.get("name"), item):
            out.append((row, other if isinstance(other, str) else row.id))
    return out


def usage_logic(name: str = "recordAgentUsage") -> MachineLogic:
    """Return the logic that goes with `pydantic_ai_service`, to be merged into a chart's own.

    Args:
        name: of the action, for ``onDone`` and ``onError``.

    Returns:
        The action adds a run's usage to ``tokens_in``, ``tokens_out``, ``cost_usd`` and
        ``turns`` where the service has not done so, and stores ``result``, or what a paused run
        is resumed with. The guards ``agentPaused`` and ``agentFinished`` tell the two apart. A
        HUMAN_* event from outside decides the waiting calls in the ledger before the chart
        moves.

    >>> from types import SimpleNamespace
    >>> record = usage_logic().actions["recordAgentUsage"]
    >>> used = {"output": "hi", "usage": {"input_tokens": 3, "output_tokens": 2, "requests": 1}}
    >>> record({}, SimpleNamespace(data=used))
    {'turns': 1, 'tokens_in': 3, 'tokens_out': 2, 'cost_usd': 0.0, 'result': 'hi'}

    Source: xstate-statemachine, agents reference: pydantic-ai.
    """
    return MachineLogic(
        actions={name: _Record()},
        guards={
            "agentPaused": lambda context, event: paused(getattr(event, "data", None)),
            "agentFinished": lambda context, event: not paused(getattr(event, "data", None)),
        },
        before_step=_DecideFirst(),
    )
