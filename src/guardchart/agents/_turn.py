"""What travels with an event between the ledger and the chart.

A model's answer arrives as a completion; before the step sees it, each proposed call has
been assessed and, where a person must decide, proposed in the ledger. A person's answer
arrives as an event; before the step sees it, the ledger has decided. Both facts ride on the
event itself, so that guards and actions stay pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from guardchart.agents._budgets import clamp_usage
from guardchart.agents._models import _UNUSED, ModelResponse, Usage
from guardchart.errors import AgentError
from guardchart.gate import ToolCall, Verdict
from guardchart.kernel import Event

__all__ = ["Decided", "ModelTurn", "assessed_turn", "charged_turn", "outcomes_of"]


@dataclass(frozen=True, init=False)
class ModelTurn(ModelResponse):
    """A model's answer together with what the gate said of its calls.

    Attributes:
        verdicts: One per call, in order; None while nobody has assessed them.
        row_ids: The ledger's row of each call, None where a call needs none.
        charged: Whether its usage has been added to the context already.
    """

    verdicts: tuple[Verdict, ...] | None = None
    row_ids: tuple[str | None, ...] = ()
    charged: bool = False

    def __init__(
        self,
        text: str | None = None,
        tool_calls: Sequence[ToolCall] = (),
        usage: Usage = _UNUSED,
        model: str | None = None,
        finish_reason: str | None = None,
        verdicts: tuple[Verdict, ...] | None = None,
        row_ids: tuple[str | None, ...] = (),
        charged: bool = False,
    ) -> None:
        super().__init__(text, tool_calls, usage, model, finish_reason)
        fields = vars(self)
        fields["verdicts"] = verdicts
        fields["row_ids"] = row_ids
        fields["charged"] = charged


def charged_turn(
    text: Any,
    tool_calls: Sequence[ToolCall],
    usage: Any,
    model: str | None,
    finish_reason: str | None = None,
) -> ModelTurn:
    """A turn whose service charges for it, and whose calls nobody has assessed yet.

    Raises:
        AgentError: The text is none.
    """
    if text is not None and not isinstance(text, str):
        raise AgentError("a model's text must be a str or None")
    return ModelTurn(
        text,
        tool_calls,
        clamp_usage(usage),
        model,
        finish_reason,
        # Without calls there is nothing to assess.
        verdicts=None if tool_calls else (),
        charged=True,
    )


def assessed_turn(
    turn: ModelResponse, verdicts: Iterable[Verdict], row_ids: Iterable[str | None] = ()
) -> ModelTurn:
    """The turn with what the gate said of its calls, and the ledger's rows of them."""
    if isinstance(turn, ModelTurn) and not turn.tool_calls and turn.verdicts == ():
        return turn
    return ModelTurn(
        turn.text,
        turn.tool_calls,
        turn.usage,
        turn.model,
        turn.finish_reason,
        verdicts=tuple(verdicts),
        row_ids=tuple(row_ids),
        charged=getattr(turn, "charged", False),
    )


class Decided(Event):
    """An event from outside after the ledger has spoken. Made by the loop's hook only.

    Attributes:
        outcomes: Result text by provider call id, for calls this event closes.
        open_ids: Row ids that still wait for a decision after this one.
        decided_ids: Row ids this event decided.
        edits: By provider call id, the row of an edit made of a call that had run already.
        tampered: Whether the snapshot disagrees with its rows.
    """

    __slots__ = ("decided_ids", "edits", "open_ids", "outcomes", "tampered")

    def __init__(
        self,
        event: Event,
        *,
        outcomes: Mapping[str, str] | None = None,
        open_ids: tuple[str, ...] = (),
        decided_ids: tuple[str, ...] = (),
        edits: Mapping[str, str] | None = None,
        tampered: bool = False,
    ) -> None:
        super().__init__(event.type, event.payload)
        self.outcomes = dict(outcomes or {})
        self.open_ids = open_ids
        self.decided_ids = decided_ids
        self.edits = dict(edits or {})
        self.tampered = tampered


def outcomes_of(event: Any) -> Mapping[str, str]:
    """Result texts the ledger gave for calls this event closes; empty where it gave none."""
    if isinstance(event, Decided):
        return event.outcomes
    error = getattr(event, "error", None)
    found = getattr(error, "outcomes", None)
    if found is None and getattr(event, "type", "").startswith("xstate.after."):
        found = event.payload.get("outcomes")
    return found if isinstance(found, Mapping) else {}
