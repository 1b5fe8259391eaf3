"""The loop's guards: pure questions about the context and the event."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from guardchart.agents._context import pending_entries, prompt_of, shown_item
from guardchart.agents._models import ModelResponse
from guardchart.agents._retry import RetryPolicy
from guardchart.agents._structured import OutputCheck
from guardchart.agents._turn import Decided, ModelTurn, assessed_turn
from guardchart.errors import ToolDeniedError
from guardchart.gate import (
    DecisionRefused,
    ToolRegistry,
    Verdict,
    allowed_tools,
    assess,
    read_decisions,
)

__all__ = ["LoopGuards"]

Guard = Callable[[Mapping[str, Any], Any], bool]


class LoopGuards:
    """The guards of one ``agent_logic``, with the settings they share."""

    def __init__(
        self,
        registry: ToolRegistry,
        *,
        output: OutputCheck,
        retry: RetryPolicy,
        max_tool_calls: int,
        on_denied: str,
        max_denied: int,
    ) -> None:
        self.registry = registry
        self.output = output
        self.retry = retry
        self.max_tool_calls = max_tool_calls
        self.on_denied = on_denied
        self.max_denied = max_denied

    def table(self) -> dict[str, Guard]:
        """The guards by the names charts use."""
        return {
            "toolAllowed": self.tool_allowed,
            "turnDenied": self.turn_denied,
            "needsHuman": self.needs_human,
            "hasToolCalls": self.has_tool_calls,
            "outputValid": self.output_valid,
            "canRetryOutput": self.can_retry_output,
            "isToolDenied": self.is_tool_denied,
            "hasTask": self.has_task,
            "promptValid": self.prompt_valid,
            "approvalMatches": self.approval_matches,
            "decisionsMatch": self.decisions_match,
            "decisionsComplete": self.decisions_complete,
            "tampered": self.tampered,
            "retryCanRetry": self.retry_can_retry,
        }

    # A model's turn

    def judge(self, context: Mapping[str, Any], event: Any) -> ModelTurn | None:
        """The turn an event carries, assessed: by the hook, or here when no host called it."""
        turn = getattr(event, "data", None)
        if isinstance(turn, ModelTurn) and turn.verdicts is not None:
            return turn
        if not isinstance(turn, ModelResponse):
            return None
        return self.assessed(turn, context, getattr(event, "node", None))

    def assessed(self, turn: ModelResponse, context: Mapping[str, Any], node: Any) -> ModelTurn:
        """The turn with one verdict per call, for the state that asked for it."""
        return assessed_turn(turn, self.verdicts(turn, context, node))

    def verdicts(self, turn: ModelResponse, context: Mapping[str, Any], node: Any) -> list[Verdict]:
        """One verdict per call, for the state that asked for it."""
        if not turn.tool_calls:
            return []
        return assess(
            turn.tool_calls,
            self.registry,
            allowed_tools(node),
            spent_ids=_texts(context.get("spent_call_ids")),
            max_tool_calls=self.max_tool_calls,
            context=context,
        )

    def tool_allowed(self, context: Mapping[str, Any], event: Any) -> bool:
        turn = self.judge(context, event)
        if turn is None:
            return not pending_entries(context)
        return not _denied(turn) or self._may_retry(context)

    def _may_retry(self, context: Mapping[str, Any]) -> bool:
        denied = context.get("denied_turns", 0)
        return self.on_denied == "retry" and type(denied) is int and denied < self.max_denied

    def turn_denied(self, context: Mapping[str, Any], event: Any) -> bool:
        turn = self.judge(context, event)
        return turn is not None and _denied(turn)

    def needs_human(self, context: Mapping[str, Any], event: Any) -> bool:
        turn = self.judge(context, event)
        return turn is not None and any(each.needs_approval for each in turn.verdicts or ())

    def has_tool_calls(self, context: Mapping[str, Any], event: Any) -> bool:
        turn = self.judge(context, event)
        return bool(turn.tool_calls) if turn is not None else bool(pending_entries(context))

    def output_valid(self, context: Mapping[str, Any], event: Any) -> bool:
        turn = getattr(event, "data", None)
        if not isinstance(turn, ModelResponse) or turn.tool_calls:
            return False
        return self.output.of(context, event)[0]

    def can_retry_output(self, context: Mapping[str, Any], event: Any) -> bool:
        retries = context.get("output_retries", 0)
        return type(retries) is int and 0 <= retries < self.output.max_retries

    def is_tool_denied(self, context: Mapping[str, Any], event: Any) -> bool:
        return isinstance(getattr(event, "error", None), ToolDeniedError)

    # The request

    def has_task(self, context: Mapping[str, Any], event: Any) -> bool:
        given = context.get("input")
        if given is None or not isinstance(given, (str, Mapping)):
            return False
        return prompt_of(context, None) is not None

    def prompt_valid(self, context: Mapping[str, Any], event: Any) -> bool:
        return prompt_of(context, event) is not None

    def retry_can_retry(self, context: Mapping[str, Any], event: Any) -> bool:
        retries = context.get("retries", 0)
        return type(retries) is int and 0 <= retries < self.retry.max_attempts - 1

    # People

    def needing(self, context: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """Pending entries a person must decide: by the registry, not by what a snapshot says."""
        entries = []
        for entry in pending_entries(context):
            tool = self.registry.get(entry["name"])
            if (
                tool is None
                or tool.side_effect
                or tool.requires_approval
                or entry.get("needs_approval") is True
            ):
                entries.append(entry)
        return entries

    def has_row(self, entry: Mapping[str, Any]) -> bool:
        """Whether a pending entry may have a row in the ledger."""
        tool = self.registry.get(entry["name"])
        return "row_id" in entry or tool is None or tool.side_effect or tool.requires_approval

    def items(self, context: Mapping[str, Any]) -> list[dict[str, Any]]:
        """What ``read_decisions`` compares an event with."""
        return [
            shown_item(entry) for entry in self.needing(context) if entry.get("decided") is not True
        ]

    def approval_matches(self, context: Mapping[str, Any], event: Any) -> bool:
        if isinstance(event, Decided):
            return bool(event.decided_ids) and not event.open_ids
        items = self.items(context)
        if event is None or not items:
            return False
        try:
            read_decisions(event, items)
        except DecisionRefused:
            return False
        return True

    def decisions_match(self, context: Mapping[str, Any], event: Any) -> bool:
        if isinstance(event, Decided):
            return bool(event.decided_ids)
        return self.approval_matches(context, event)

    def decisions_complete(self, context: Mapping[str, Any], event: Any) -> bool:
        if isinstance(event, Decided):
            return bool(event.decided_ids) and not event.open_ids
        items = self.items(context)
        if event is None or not items:
            return False
        try:
            decided = read_decisions(event, items)
        except DecisionRefused:
            return False
        return {item["id"] for item in items} <= set(decided)

    def tampered(self, context: Mapping[str, Any], event: Any) -> bool:
        return isinstance(event, Decided) and event.tampered


def _denied(turn: ModelTurn) -> bool:
    return any(not verdict.ok for verdict in turn.verdicts or ())


def _texts(value: Any) -> list[str]:
    return [each for each in value if isinstance(each, str)] if isinstance(value, list) else []
