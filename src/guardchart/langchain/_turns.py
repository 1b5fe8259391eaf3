"""One answer of the model: proposed where it is fresh, asked about, and settled.

A turn's stored notes say which row belongs to which call and what was refused when it was
proposed. They restrict: nothing runs because a note says so.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from langchain_core.messages import AIMessage, ToolMessage

from guardchart.errors import DecisionRefused, ToolDeniedError
from guardchart.gate import Outcome, ToolCall, pending_item, shown_name
from guardchart.gate._stored import StoredSession
from guardchart.langchain._ask import ask, question
from guardchart.langchain._door import Door, Note, Opened, calls_of
from guardchart.langchain._entry import refusal_message, refusal_text

__all__ = [
    "Asking",
    "Settled",
    "answered_ids",
    "open_answers",
    "propose",
    "spent_before",
    "supersede",
]

UNPROPOSED = "it was not proposed here as it stands"


def propose(
    door: Door,
    opened: Opened,
    message: AIMessage,
    *,
    spent: Sequence[str],
    denied: Mapping[str, str],
) -> list[Note]:
    """Propose a fresh answer's calls; return the notes of its turn.

    Args:
        door: Whose turn it is.
        opened: The session.
        message: The answer.
        spent: Ids that the conversation has seen.
        denied: Calls that are not the gate's to judge, and why they are refused: outputs that
            the state withholds. An empty reason leaves one to the framework.
    """
    calls = [call for call in calls_of(message) if call.id not in denied]
    items = opened.session.propose(calls, spent_ids=spent)
    notes: list[Note] = []
    for call, item in zip(calls, items, strict=True):
        note: Note = {"id": call.id}
        if item.row is not None:
            note["row"] = item.row.id
        if item.status == "denied":
            note["denied"] = item.verdict.reason
        elif item.status == "ask":
            note["ask"] = True
        notes.append(note)
    notes += [{"id": ident, "denied": reason} for ident, reason in denied.items() if reason]
    return notes


def spent_before(messages: Sequence[Any], message: AIMessage | None = None) -> list[str]:
    """Return the ids of all calls of a conversation, those of one answer left out."""
    return [
        call["id"] or ""
        for each in messages
        if isinstance(each, AIMessage) and (message is None or each.id != message.id)
        for call in each.tool_calls
    ]


def answered_ids(messages: Sequence[Any], message: AIMessage) -> set[str]:
    """Return the ids of an answer's calls that have a result."""
    found: set[str] = set()
    after = False
    for each in messages:
        if each is message:
            after = True
        elif after and isinstance(each, AIMessage):
            break
        elif after and isinstance(each, ToolMessage):
            found.add(each.tool_call_id)
    return found


class Asking:
    """A turn that is looked up again, before and after its question.

    Args:
        door: Whose turn it is.
        opened: The session.
        message: The answer that the calls are from.
        done: Ids of calls that have a result already.
    """

    def __init__(self, door: Door, opened: Opened, message: AIMessage, done: set[str]) -> None:
        self.door = door
        self.session = opened.session
        self.message = message
        notes = opened.notes if opened.message_id == message.id else {}
        self.refused: dict[str, str] = {}
        self.calls: list[ToolCall] = []
        self.asked: list[dict[str, Any]] = []
        for call in calls_of(message):
            note = notes.get(call.id)
            if call.id in done:
                continue
            if note is not None and note.get("denied"):
                self.refused[call.id] = str(note["denied"])
            elif note is not None or call.name not in door.outputs:
                self.calls.append(call)
        if opened.message_id == message.id:
            ids = [(notes.get(call.id) or {}).get("row") for call in self.calls]
            items = self.session.restore(self.calls, row_ids=ids)
        else:
            items = self.session.judge(self.calls)
        self._look(items, notes)

    def _look(self, items: Sequence[Any], notes: Mapping[str, Note]) -> None:
        """Refuse what fails now, and note what was asked when the turn was proposed."""
        now = self.session.refusals(self.calls)
        close: dict[str, str] = {}
        for call, item in zip(self.calls, items, strict=True):
            note = notes.get(call.id) or {}
            if item.status == "denied":
                self.refused[call.id] = item.verdict.reason
            elif item.status == "answered":
                continue
            elif call.id in now:
                self._refuse(call, now[call.id])
                if item.row is not None:
                    close[item.row.id] = "denied"
            elif item.verdict.needs_row and item.row is None:
                self.refused[call.id] = UNPROPOSED
            elif item.status == "ask" and self.session.late(item.row):
                close[item.row.id] = "expired"
            if item.row is not None and note.get("ask") and call.id not in self.refused:
                self.asked.append(pending_item(item.row, tool_call_id=call.id))
        for row_id, reason in close.items():
            self.session.close_rows([row_id], reason)

    def _refuse(self, call: ToolCall, reason: str) -> None:
        self.refused[call.id] = reason
        error = ToolDeniedError(shown_name(call.name), reason)
        outcome = Outcome(call.id, error.tool, "denied", reason, error=error)
        self.session.leave(call, outcome)

    @property
    def waits(self) -> bool:
        """Whether anybody has to be asked."""
        return any(item.status == "ask" for item in self._items())

    def _items(self) -> list[Any]:
        return [item for item in self.session.turn() if item.call.id not in self.refused]

    def ask(self, interrupt: Callable[[Any], Any]) -> tuple[dict[str, dict[str, Any]], str | None]:
        """Ask for all calls that need a person, again until an answer fits."""
        payload = question(
            self.asked, machine=self.door.machine.id, show=self.door.interrupt_payload
        )
        return ask(
            self.asked,
            payload,
            registry=self.door.registry,
            positional=self.door.positional,
            interrupt=interrupt,
        )

    def decide(self, decisions: Mapping[str, dict[str, Any]], by: str | None) -> None:
        """Take an answer, in the ledger first; what the ledger knows better stands.

        Nothing is raised and nothing is asked again: LangGraph has stored the answer. A decision
        that cannot be taken any more closes its call.
        """
        open_ids = {item.row.id for item in self._items() if item.status == "ask"}
        left = [each for row_id, each in decisions.items() if row_id in open_ids]
        if not left:
            return
        try:
            self.session.decide(_event(left), by=by)
        except DecisionRefused:
            for each in left:
                self._decide_one(each, by)

    def _decide_one(self, decision: dict[str, Any], by: str | None) -> None:
        try:
            self.session.decide([decision], by=by)
        except DecisionRefused as exc:
            row_id = decision["id"]
            answers = self.session.close_rows([row_id], "void")
            if answers[row_id].status == "void":
                call_id = next((e["tool_call_id"] for e in self.asked if e["id"] == row_id), "")
                self.refused[call_id] = str(exc)

    def settle(self) -> Settled:
        """Return what the conversation gains, and which calls may run."""
        results: list[ToolMessage] = []
        edited: dict[str, dict[str, Any]] = {}
        may_run: list[str] = []
        items = {item.call.id: item for item in self._items()}
        for call in calls_of(self.message):
            reason = self.refused.get(call.id)
            if reason is not None:
                text = refusal_text(shown_name(call.name), reason)
                results.append(refusal_message(shown_name(call.name), call.id, text))
                continue
            item = items.get(call.id)
            if item is None:
                continue
            if item.status == "answered" and not self._entered(item):
                results.append(refusal_message(shown_name(call.name), call.id, item.text))
                self._tell(call, item)
                continue
            may_run.append(call.id)
            if item.row is not None and item.row.status == "edited":
                row = self.session.ledger.row(self.session.host.scope, item.row.id)
                if row is not None and row.arguments is not None:
                    edited[call.id] = dict(row.arguments)
        return Settled(results, _rewritten(self.message, edited), may_run)

    def _entered(self, item: Any) -> bool:
        row = self.session.ledger.row(self.session.host.scope, item.row.id)
        return row is not None and bool(row.entered)

    def _tell(self, call: ToolCall, item: Any) -> None:
        """Tell the chart of a call that somebody else decided, or nobody in time."""
        row = self.session.ledger.row(self.session.host.scope, item.row.id)
        status = "rejected" if row is None else row.status
        told = {"type": f"tool.rejected.{call.name}", "id": call.id}
        if any(told.items() <= each.items() for each in self.session.told):
            return
        self.session.leave(call, Outcome(call.id, call.name, status, item.text))


@dataclasses.dataclass(slots=True)
class Settled:
    """What becomes of a turn: results, the answer as a reviewer edited it, and what may run."""

    results: list[ToolMessage]
    rewritten: AIMessage | None
    may_run: list[str]


def _event(decisions: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The event that says the same, as a chart is most likely to name it."""
    kinds = {each["decision"] for each in decisions}
    if kinds == {"approve"}:
        ids = [each["id"] for each in decisions]
        digests = {each["id"]: each["digest"] for each in decisions}
        return {"type": "HUMAN_APPROVED", "call_ids": ids, "digests": digests}
    reasons = {each.get("reason") for each in decisions}
    if kinds == {"reject"} and len(reasons) == 1:
        (reason,) = reasons
        return {"type": "HUMAN_REJECTED", **({} if reason is None else {"reason": reason})}
    return {"type": "HUMAN_DECIDED", "decisions": list(decisions)}


def _rewritten(message: AIMessage, edited: Mapping[str, dict[str, Any]]) -> AIMessage | None:
    """The answer with a reviewer's arguments, under its own id, None where nothing changed."""
    if not edited:
        return None
    calls = [
        {**call, "args": edited[call["id"] or ""]} if call["id"] in edited else call
        for call in message.tool_calls
    ]
    content = message.content
    if isinstance(content, list):
        content = [_block(block, edited) for block in content]
    return message.model_copy(update={"tool_calls": calls, "content": content})


def _block(block: Any, edited: Mapping[str, dict[str, Any]]) -> Any:
    """A provider's own block of a call, with the reviewer's arguments."""
    if not isinstance(block, Mapping) or block.get("id") not in edited:
        return block
    for key in ("input", "args"):
        if key in block:
            return {**block, key: edited[block["id"]]}
    return block


# New input


def open_answers(messages: Sequence[Any]) -> list[tuple[int, AIMessage, list[ToolCall]]]:
    """Return the answers with calls that have no result: position, answer, those calls."""
    out = []
    for at, message in enumerate(messages):
        if isinstance(message, AIMessage) and message.tool_calls:
            done = answered_ids(messages, message)
            left = [call for call in calls_of(message) if call.id not in done]
            if left:
                out.append((at, message, left))
    return out


def supersede(
    session: StoredSession, calls: Sequence[ToolCall], row_ids: Sequence[str | None]
) -> dict[str, str]:
    """Close what new input leaves open; return what each call is told, by its id.

    A call that ran before, in a step whose results were lost, is told its result, and so is the
    chart.
    """
    items = session.restore(calls, row_ids=row_ids)
    texts = session.close("superseded")
    for item in items:
        row = None if item.row is None else session.ledger.row(session.host.scope, item.row.id)
        if row is not None and row.status in ("done", "failed"):
            text = texts.get(item.call.id, "")
            session.leave(item.call, Outcome(item.call.id, item.call.name, row.status, text))
    return texts
