"""What a person is asked, and what an answer says: functions of question and answer alone.

LangGraph keeps every answer to an ``interrupt()`` and gives them all again at each resume. So
whether one counts must not depend on ledger, clock or state, which move on: a refused answer
would be taken later, or an accepted one refused. What they say is asked after the last answer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal

from guardchart.errors import DecisionRefused, ToolDeniedError
from guardchart.gate import ToolRegistry, display, read_decisions, scrub
from guardchart.gate._approvals import HUMAN_EVENTS

__all__ = ["Positional", "Show", "ask", "question", "read_answer"]

Positional = Literal["refuse", "accept"]
Show = Literal["full", "ids"]

_ALLOWED: Final = ["approve", "edit", "reject"]
_AS_TEXT: Final = json.JSONEncoder(ensure_ascii=False, default=str)
_OWN: Final = frozenset({"id", "digest", "decision", "arguments", "reason"})
_THEIRS: Final = frozenset({"id", "digest", "type", "edited_action", "message"})


def question(
    pending: Sequence[Mapping[str, Any]], *, machine: str, show: Show = "full"
) -> dict[str, Any]:
    """Return the payload of the one ``interrupt()`` of a turn.

    Args:
        pending: Items of ``pending_item``, in the order of the calls.
        machine: The chart's id.
        show: ``"full"`` shows the arguments, secrets masked; ``"ids"`` leaves them out, for
            tracers and streams that must not have them.

    Returns:
        What ``HumanInTheLoopMiddleware`` asks (``action_requests``, ``review_configs``), and
        ``calls``: the id and digest of each, in the same order, which an answer names.
    """
    requests = []
    for item in pending:
        args = scrub(dict(item["arguments"])) if show == "full" else {}
        shown = _AS_TEXT.encode(display(args))
        requests.append(
            {
                "name": item["name"],
                "args": args,
                "description": f"{item['name']}({shown if show == 'full' else '...'})",
            }
        )
    return {
        "type": "statechart.approval",
        "machine": machine,
        "action_requests": requests,
        "review_configs": [
            {"action_name": item["name"], "allowed_decisions": list(_ALLOWED)} for item in pending
        ],
        "calls": [
            {key: item[key] for key in ("id", "tool_call_id", "name", "digest")} for item in pending
        ],
    }


def ask(
    pending: Sequence[Mapping[str, Any]],
    asked: Mapping[str, Any],
    *,
    registry: ToolRegistry,
    positional: Positional,
    interrupt: Callable[[Any], Any],
) -> tuple[dict[str, dict[str, Any]], str | None]:
    """Ask until an answer fits; never raises after an answer.

    Returns:
        A decision for each row id, as HUMAN_DECIDED has them, and who decided, where the answer
        says so.
    """
    payload: Any = asked
    while True:
        answer = interrupt(payload)
        try:
            return read_answer(pending, answer, registry=registry, positional=positional)
        except DecisionRefused as exc:
            payload = {**asked, "refused": str(exc)}


def read_answer(
    pending: Sequence[Mapping[str, Any]],
    answer: Any,
    *,
    registry: ToolRegistry,
    positional: Positional = "refuse",
) -> tuple[dict[str, dict[str, Any]], str | None]:
    """Return what an answer decides about every pending call; pure.

    Args:
        pending: What was asked.
        answer: A HUMAN_... event, ``{"decisions": [...]}`` or the list alone. A decision is
            ``{id, digest, decision, arguments?, reason?}``, or as LangChain's middleware has it
            (``{type, edited_action?, message?}``) with ``id`` and ``digest`` beside.
        registry: For the arguments of an edit.
        positional: ``"accept"`` takes decisions without ids by their place.

    Raises:
        DecisionRefused: It does not fit. The reason repeats nothing of the answer.
    """
    by = answer.get("by") if isinstance(answer, Mapping) else None
    kind = answer.get("type") if isinstance(answer, Mapping) else None
    if isinstance(kind, str) and kind in HUMAN_EVENTS:
        event: Mapping[str, Any] = answer
        if positional == "refuse" and kind == "HUMAN_APPROVED" and not answer.get("digests"):
            raise DecisionRefused("an approval needs digests: answer with approval_event(calls)")
        if kind == "HUMAN_DECIDED":
            event = {**answer, "decisions": _normal(answer, pending, positional)}
    else:
        event = {
            "type": "HUMAN_DECIDED",
            "decisions": _normal(answer, pending, positional),
            **({} if by is None else {"by": by}),
        }
    if event.get("again"):
        raise DecisionRefused("a question that is open needs no again")
    decided = read_decisions(event, pending)
    if set(decided) != {item["id"] for item in pending}:
        raise DecisionRefused(f"each of the {len(pending)} calls needs a decision")
    names = {item["id"]: item["name"] for item in pending}
    digests = {item["id"]: item["digest"] for item in pending}
    out: dict[str, dict[str, Any]] = {}
    for row_id, each in decided.items():
        made: dict[str, Any] = {"id": row_id, "decision": each.decision, "digest": digests[row_id]}
        if each.decision == "edit":
            made["arguments"] = _edited(registry, names[row_id], each.arguments)
        if each.reason is not None:
            made["reason"] = each.reason
        out[row_id] = made
    return out, by if isinstance(by, str) else None


def _edited(registry: ToolRegistry, name: str, arguments: Any) -> dict[str, Any]:
    tool = registry.get(name)
    if tool is None:
        raise DecisionRefused("the edited call's tool is not registered")
    try:
        return tool.validate(arguments)
    except ToolDeniedError as exc:
        raise DecisionRefused(f"the edited call is refused: {exc.reason}") from None


def _normal(
    answer: Any, pending: Sequence[Mapping[str, Any]], positional: Positional
) -> list[dict[str, Any]]:
    """Decisions in the form of HUMAN_DECIDED, each with the id of its call."""
    given = answer.get("decisions") if isinstance(answer, Mapping) else answer
    if not isinstance(given, (list, tuple)) or not all(isinstance(d, Mapping) for d in given):
        raise DecisionRefused("an answer is a list of decisions")
    if len(given) != len(pending):
        raise DecisionRefused(
            f"{len(given)} decisions for {len(pending)} calls: each needs exactly one"
        )
    placed = positional == "accept" and not any("id" in each for each in given)
    names = {item["id"]: item["name"] for item in pending}
    names |= {item["tool_call_id"]: item["name"] for item in pending}
    out = []
    for at, each in enumerate(given):
        made = _one(each)
        if placed:
            made |= {"id": pending[at]["id"], "digest": pending[at]["digest"]}
        elif "id" not in made:
            raise DecisionRefused("each decision names its call by id and digest")
        elif made["decision"] != "reject" and "digest" not in made and positional == "refuse":
            raise DecisionRefused("a decision to run a call needs the call's digest")
        tool = made.pop("tool", None)
        if tool is not None and tool != names.get(
            made["id"] if isinstance(made["id"], str) else ""
        ):
            raise DecisionRefused("an edit keeps the tool")
        out.append(made)
    return out


def _one(given: Mapping[str, Any]) -> dict[str, Any]:
    if "decision" in given:
        if set(given) - _OWN:
            raise DecisionRefused("a decision has an unknown key")
        return dict(given)
    if set(given) - _THEIRS:
        raise DecisionRefused("a decision has an unknown key")
    made: dict[str, Any] = {key: given[key] for key in ("id", "digest") if key in given}
    made["decision"] = given.get("type")
    action = given.get("edited_action")
    if action is not None:
        if not isinstance(action, Mapping) or set(action) - {"name", "args"}:
            raise DecisionRefused("an edit is {name, args}")
        made["arguments"] = action.get("args")
        if action.get("name") is not None:
            made["tool"] = action["name"]
    if given.get("message") is not None:
        made["reason"] = given["message"]
    return made
