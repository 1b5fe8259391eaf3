"""The loop's actions: pure updates of the context, callable by hand.

Each takes ``(scope, context, event, action)`` in the update style: it reads, and returns the
keys to change. Called by hand with a plain dict, it changes that dict, as the peer's do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from guardchart.agents._budgets import add_usage, spent_by
from guardchart.agents._context import (
    closing,
    conversation,
    pending_entries,
    prompt_of,
    shortened,
)
from guardchart.agents._messages import Message, assistant_turn, safe_text, user_turn
from guardchart.agents._models import ModelResponse
from guardchart.agents._structured import OutputCheck
from guardchart.agents._turn import ModelTurn, outcomes_of
from guardchart.errors import (
    AgentError,
    TamperedError,
    ToolBatchError,
    ToolDeniedError,
    ToolTimeoutError,
)
from guardchart.gate import NOT_ALLOWED, closing_text, shown_name

__all__ = ["LoopActions", "error_of", "notify_parent", "report_of"]

SPENT: Final = ("turns", "tokens_in", "tokens_out", "cost_usd")
SUPERSEDED: Final = closing_text("superseded")
REJECTED: Final = closing_text("rejected")
EXPIRED: Final = closing_text("expired")
REFUSED: Final = closing_text("tampered")
TOOL_TIMEOUT: Final = "tool call timed out"
NOT_RUN_HERE: Final = "not run: a reply was asked for"
LATE: Final = "error: no answer in time; the outcome is unknown"

Update = dict[str, Any] | None


def error_of(kind: str, message: str) -> dict[str, str]:
    """The context's ``error``: exactly a kind and a message."""
    return {"kind": kind, "message": message}


class LoopActions:
    """The actions of one ``agent_logic``, with the settings they share."""

    def __init__(
        self,
        *,
        output: OutputCheck,
        max_messages: int,
        summarise: Callable[[list[Message]], list[Message]] | None,
        judge: Callable[[Mapping[str, Any], Any], ModelTurn | None],
        budget_scope: str = "turn",
    ) -> None:
        self._output = output
        self._max_messages = max_messages
        self._summarise = summarise
        self._judge = judge
        self._budget_scope = budget_scope

    def table(self) -> dict[str, Callable[..., Any]]:
        """The actions by the names charts use."""
        updates = {
            "appendUserMessage": self.append_user_message,
            "recordModelResponse": self.record_model_response,
            "appendToolResults": self.append_tool_results,
            "approveHuman": self.approve_human,
            "noteDecisions": self.note_decisions,
            "rejectPending": self.reject_pending,
            "supersedePending": self.supersede_pending,
            "refusePending": self.refuse_pending,
            "storeResult": self.store_result,
            "retryOutput": self.retry_output,
            "denyTool": self.deny_tool,
            "returnDenials": self.return_denials,
            "recordFailure": self.record_failure,
            "recordModelTimeout": self.record_model_timeout,
            "recordToolTimeout": self.record_tool_timeout,
            "failTurnLimit": _failing("budget", "turn limit reached"),
            "failTokenBudget": _failing("budget", "token budget exhausted"),
            "failCostBudget": _failing("budget", "cost budget exhausted"),
            "failOutput": self.fail_output,
            "failRetries": _failing("retries", "retries exhausted"),
            "escalateHuman": self.escalate_human,
            "retryBump": self.retry_bump,
            "retryReset": self.retry_reset,
        }
        table = {name: _by_hand(update) for name, update in updates.items()}
        table["notifyParent"] = notify_parent
        return table

    # The conversation

    def _messages(self, context: Mapping[str, Any], *new: Message) -> list[Message]:
        stored = context.get("messages")
        messages = [*stored, *new] if isinstance(stored, list) else list(new)
        return shortened(context, messages, self._max_messages, self._summarise)

    def _closed(
        self, context: Mapping[str, Any], event: Any, default: str, results: Any = ()
    ) -> dict[str, Any]:
        """Every pending call gets its result; none stays pending."""
        new = closing(context, outcomes_of(event), default, results)
        return {"messages": self._messages(context, *new), **_nothing_pending()}

    def append_user_message(self, context: Mapping[str, Any], event: Any) -> Update:
        prompt = prompt_of(context, event)
        if prompt is None:
            raise AgentError("START carries no prompt; send START with prompt='...'")
        return {
            "task": prompt,
            "messages": shortened(
                {"task": prompt},
                [*conversation(context), user_turn(prompt)],
                self._max_messages,
                self._summarise,
            ),
            "result": None,
            "error": None,
            "output_retries": 0,
            "denied_turns": 0,
        }

    def record_model_response(self, context: Mapping[str, Any], event: Any) -> Update:
        turn = event.data if event is not None else None
        if not isinstance(turn, ModelResponse):
            raise AgentError("recordModelResponse: the completion holds no ModelResponse")
        judged = self._judge(context, event) or turn
        said = assistant_turn(turn.text, turn.tool_calls)
        pending = _pending(judged, said.get("tool_calls", ()))
        updates: dict[str, Any] = {
            "messages": self._messages(context, said),
            "pending_tool_calls": pending,
            "approved_call_ids": [],
            "error": None,
        }
        if pending:
            spent = context.get("spent_call_ids")
            known = list(spent) if isinstance(spent, list) else []
            updates["spent_call_ids"] = [*known, *(entry["id"] for entry in pending)]
        if not getattr(turn, "charged", False):
            updates.update(add_usage(context, turn.usage, turns=1))
        return updates

    def append_tool_results(self, context: Mapping[str, Any], event: Any) -> Update:
        results = event.data if event is not None else ()
        return self._closed(context, event, "error: no result", _results(results))

    # People

    def approve_human(self, context: Mapping[str, Any], event: Any) -> Update:
        ids = event.payload.get("call_ids") if event is not None else None
        return {"approved_call_ids": [each for each in ids or () if isinstance(each, str)]}

    def note_decisions(self, context: Mapping[str, Any], event: Any) -> Update:
        decided = set(getattr(event, "decided_ids", ()))
        if not decided and event is not None:
            given = event.payload.get("decisions")
            decided = {each.get("id") for each in given or () if isinstance(each, Mapping)}
        edits = getattr(event, "edits", {})
        noted = []
        for entry in pending_entries(context):
            note = dict(entry)
            if entry.get("row_id", entry["id"]) in decided or entry["id"] in decided:
                note["decided"] = True
            if entry["id"] in edits:
                note["edit_row_id"] = edits[entry["id"]]
            noted.append(note)
        return {"pending_tool_calls": noted}

    def reject_pending(self, context: Mapping[str, Any], event: Any) -> Update:
        return self._closed(context, event, REJECTED)

    def supersede_pending(self, context: Mapping[str, Any], event: Any) -> Update:
        closed = self._closed(context, event, SUPERSEDED)
        if self._budget_scope == "turn":  # new input is a new turn, though the old one never ended
            closed.update({key: 0 for key in SPENT if key in context})
        return closed

    def refuse_pending(self, context: Mapping[str, Any], event: Any) -> Update:
        message = "the pending calls are not the ones that were proposed"
        return {**self._closed(context, event, REFUSED), "error": error_of("tampered", message)}

    def escalate_human(self, context: Mapping[str, Any], event: Any) -> Update:
        error = error_of("human_timeout", "no human decision in time")
        return {**self._closed(context, event, EXPIRED), "error": error}

    # Ends and failures

    def store_result(self, context: Mapping[str, Any], event: Any) -> Update:
        ok, value = self._output.of(context, event)
        return {"result": value, "error": None} if ok else None

    def retry_output(self, context: Mapping[str, Any], event: Any) -> Update:
        _, detail = self._output.of(context, event)
        request = f"RETRY_OUTPUT: your reply did not fit ({detail}). Reply with the JSON alone."
        retries = context.get("output_retries")
        closed = closing(context, outcomes_of(event), NOT_RUN_HERE)
        return {
            "messages": self._messages(context, *closed, user_turn(request)),
            **(_nothing_pending() if closed else {}),
            "output_retries": (retries if type(retries) is int else 0) + 1,
        }

    def fail_output(self, context: Mapping[str, Any], event: Any) -> Update:
        _, detail = self._output.of(context, event)
        error = error_of("output", f"model output failed validation ({detail})")
        if not pending_entries(context):
            return {"error": error}
        return {**self._closed(context, event, NOT_RUN_HERE), "error": error}

    def deny_tool(self, context: Mapping[str, Any], event: Any) -> Update:
        denied = getattr(event, "error", None)
        if isinstance(denied, ToolDeniedError):
            kind = "tampered" if isinstance(denied, TamperedError) else "tool_denied"
            results = _results(getattr(denied, "results", ()))
            closed = self._closed(context, event, f"refused: {denied.reason}", results)
            return {**closed, "error": error_of(kind, str(denied))}
        turn = self._judge(context, event)
        results = _refusals(turn)
        return {
            **self._closed(context, event, "refused", results),
            "error": error_of("tool_denied", _denial(turn)),
        }

    def return_denials(self, context: Mapping[str, Any], event: Any) -> Update:
        turn = self._judge(context, event)
        denied = context.get("denied_turns")
        return {
            **self._closed(context, event, "refused", _refusals(turn)),
            "denied_turns": (denied if type(denied) is int else 0) + 1,
        }

    def record_failure(self, context: Mapping[str, Any], event: Any) -> Update:
        error = getattr(event, "error", None)
        cause = error.__cause__ or error if isinstance(error, ToolBatchError) else error
        name = type(cause).__name__ if cause is not None else "AgentError"
        kind = "timeout" if isinstance(cause, TimeoutError) or "Timeout" in name else "failure"
        message = TOOL_TIMEOUT if isinstance(error, ToolTimeoutError) else name
        results = _results(getattr(error, "results", ()))
        closed = self._closed(context, event, f"error: {name}", results)
        return {**closed, "last_failure": name, "error": error_of(kind, message)}

    def record_model_timeout(self, context: Mapping[str, Any], event: Any) -> Update:
        return {
            **add_usage(context, None, turns=1),
            "last_failure": "TimeoutError",
            "error": error_of("timeout", "model call timed out"),
        }

    def record_tool_timeout(self, context: Mapping[str, Any], event: Any) -> Update:
        return {
            **self._closed(context, event, LATE),
            "last_failure": "ToolTimeoutError",
            "error": error_of("timeout", TOOL_TIMEOUT),
        }

    def retry_bump(self, context: Mapping[str, Any], event: Any) -> Update:
        retries = context.get("retries")
        return {"retries": (retries if type(retries) is int else 0) + 1}

    def retry_reset(self, context: Mapping[str, Any], event: Any) -> Update:
        return {"retries": 0, "error": None}


def _nothing_pending() -> dict[str, Any]:
    return {"pending_tool_calls": [], "approved_call_ids": []}


def _pending(turn: ModelResponse, shown: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What the snapshot keeps of each proposed call: exactly what would run."""
    verdicts = getattr(turn, "verdicts", None) or ()
    row_ids = getattr(turn, "row_ids", ())
    entries = []
    for index, call in enumerate(shown):
        entry: dict[str, Any] = dict(call)
        if index < len(verdicts) and verdicts[index].ok:
            verdict = verdicts[index]
            entry["arguments"] = verdict.arguments
            entry["digest"] = verdict.digest
            if verdict.needs_approval:
                entry["needs_approval"] = True
        if index < len(row_ids) and row_ids[index] is not None:
            entry["row_id"] = row_ids[index]
        entries.append(entry)
    return entries


def _results(value: Any) -> list[dict[str, str]]:
    """Well-formed result entries of a completion or an error; anything else is dropped."""
    if not isinstance(value, list | tuple):
        return []
    return [
        {"tool_call_id": each["tool_call_id"], "content": each["content"]}
        for each in value
        if isinstance(each, Mapping)
        and isinstance(each.get("tool_call_id"), str)
        and isinstance(each.get("content"), str)
    ]


def _refusals(turn: ModelTurn | None) -> list[dict[str, str]]:
    """A result per call of a denied turn: its own reason, or that another call spoiled it."""
    if turn is None or turn.verdicts is None:
        return []
    return [
        {
            "tool_call_id": safe_text(verdict.call.id),
            "content": "refused: another call of this turn was denied"
            if verdict.ok
            else f"refused: {verdict.reason}",
        }
        for verdict in turn.verdicts
    ]


def _denial(turn: ModelTurn | None) -> str:
    bad = [each for each in (turn.verdicts or () if turn else ()) if not each.ok]
    if not bad:
        return "tool call denied"
    unlisted = [each for each in bad if each.reason == NOT_ALLOWED]
    if unlisted:
        names = sorted({shown_name(each.call.name) for each in unlisted})
        return f"tool(s) {names} not allowed here"
    first = bad[0]
    return f"tool {shown_name(first.call.name)!r} denied: {first.reason}"


def _failing(kind: str, message: str) -> Callable[[Mapping[str, Any], Any], Update]:
    def fail(context: Mapping[str, Any], event: Any) -> Update:
        return {"error": error_of(kind, message)}

    return fail


def _by_hand(update: Callable[[Mapping[str, Any], Any], Update]) -> Callable[..., Any]:
    """An update as an action that may also be called by hand with four arguments."""

    def action(*args: Any) -> Update:
        if len(args) in (2, 3):
            return update(args[0], args[1])
        _, context, event, _ = args
        changes = update(context, event)
        if changes:
            context.update(changes)
        return None

    action.__guardchart_form__ = 2  # type: ignore[attr-defined]
    return action


def notify_parent(scope: Any, context: Any, event: Any, action: Any) -> None:
    """Report an agent's end to the machine that spawned it: ``AGENT_DONE`` or ``AGENT_FAILED``."""
    if scope is None or scope.parent is None:
        return
    kind, payload = report_of(scope.id, context)
    context["reported"] = True
    scope.send_parent(kind, **payload)


def report_of(
    agent_id: str, context: Mapping[str, Any], error: Mapping[str, Any] | None = None
) -> tuple[str, dict[str, Any]]:
    """Type and payload of the report about an agent, from its context."""
    error = error if error is not None else context.get("error")
    return "AGENT_FAILED" if error else "AGENT_DONE", {
        "agent_id": agent_id,
        "usage": spent_by(context),
        "result": context.get("result"),
        "error": error,
    }
