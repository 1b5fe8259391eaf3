"""Approvals: what a reviewer is shown, and what a reviewer's event says.

The list a reviewer sees is read from rows, so it is exactly what will run. An event is compared
with that list here; the decision itself is taken in the ledger.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from guardchart.errors import AgentConfigError, DecisionRefused
from guardchart.gate._seal import Seal
from guardchart.persistence import Decision
from guardchart.runtime._address import DECISIONS

__all__ = [
    "HUMAN_EVENTS",
    "approval_event",
    "decisions_event",
    "display",
    "named_calls",
    "pending_item",
    "read_decisions",
    "sign_decision",
    "verify_decision",
]

APPROVED: Final = "HUMAN_APPROVED"
REJECTED: Final = "HUMAN_REJECTED"
DECIDED: Final = "HUMAN_DECIDED"
HUMAN_EVENTS: Final = DECISIONS
"""The types by which a person decides; they count only where they come from outside."""
SIGNATURE: Final = "signature"
_MAX_REASON = 2000


def pending_item(row: Any, *, tool_call_id: str | None = None) -> dict[str, Any]:
    """Return what a reviewer is shown of a row: ``{id, tool_call_id, name, arguments, digest}``.

    Args:
        row: the row of a call that needs a decision.
        tool_call_id: the provider's id of the call; None takes the row's note of it.
    """
    return {
        "id": row.id,
        "tool_call_id": row.model_id if tool_call_id is None else tool_call_id,
        "name": row.slot.tool,
        "arguments": dict(row.arguments or {}),
        "digest": row.digest,
    }


def other_name(ledger: Any, row: Any, tool_call_id: Any) -> Any:
    """Return the id by which an event may name a row, besides its own: the provider's.

    Providers repeat ids on forks and in later runs. One that is another row's denotes that row
    for ever, so an approval of long ago that still lies in some state names nothing here.
    """
    if type(tool_call_id) is not str or tool_call_id == row.id:
        return row.id
    taken = ledger.row(row.slot.scope, tool_call_id, follow=False) is not None
    return row.id if taken else tool_call_id


def approval_event(
    pending: Sequence[Mapping[str, Any]], by: str | None = None, *, again: bool = False
) -> dict[str, Any]:
    """Return the event that approves exactly the calls that were shown, digests included.

    Args:
        pending: items of `pending_approval`, as the reviewer saw them: of one agent, whose
            ``agent_id`` the event then names.
        by: who approves, for the record.
        again: True reopens calls that were closed without running.

    Raises:
        AgentConfigError: The items are of several agents; send one event for each.

    >>> approval_event([{"id": "c1", "digest": "ab"}])
    {'type': 'HUMAN_APPROVED', 'call_ids': ['c1'], 'digests': {'c1': 'ab'}}
    """
    event: dict[str, Any] = {
        "type": APPROVED,
        "call_ids": [item["id"] for item in pending],
        "digests": {item["id"]: item["digest"] for item in pending},
    }
    agents = {item.get("agent_id") for item in pending}
    if len(agents) > 1:
        raise AgentConfigError("the calls are of several agents; make one event for each agent_id")
    return _by(event, by, again, agents.pop() if agents else None)


def decisions_event(
    decisions: Iterable[Mapping[str, Any]],
    by: str | None = None,
    *,
    again: bool = False,
    agent_id: str | None = None,
) -> dict[str, Any]:
    """Return the event that decides call by call.

    Args:
        decisions: ``{id, decision, digest?, arguments?, reason?}``, ``decision`` being
            ``approve``, ``reject`` or ``edit``.
        by: who decides, for the record.
        again: True reopens calls that were closed without running.
        agent_id: whose calls they are, as `pending_approval` shows it of an agent below.

    >>> decisions_event([{"id": "c1", "decision": "reject"}], by="ann")["by"]
    'ann'
    """
    event = {"type": DECIDED, "decisions": [dict(item) for item in decisions]}
    return _by(event, by, again, agent_id)


def _by(event: dict[str, Any], by: str | None, again: bool, agent_id: str | None) -> dict[str, Any]:
    if agent_id is not None:
        event["agent_id"] = agent_id
    if by is not None:
        event["by"] = by
    if again:
        event["again"] = True
    return event


def _payload(event: Any) -> tuple[str, Mapping[str, Any]]:
    if isinstance(event, Mapping):
        return str(event.get("type")), event
    return event.type, event.payload


def _by_name(pending: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any] | None]:
    """Return the pending item by row id, and by the provider's id where that names one only."""
    names: dict[str, Mapping[str, Any] | None] = {}
    for item in pending:
        other = item.get("tool_call_id")
        if isinstance(other, str):
            names[other] = None if other in names else item
    for item in pending:
        names[item["id"]] = item  # a row id always wins
    return names


def named_calls(event: Any) -> set[str]:
    """Return the ids an event names, whatever they are ids of; none where it is malformed."""
    kind, payload = _payload(event)
    given = payload.get("call_ids") if kind == APPROVED else payload.get("decisions")
    if not isinstance(given, (list, tuple)):
        return set()
    found = [each.get("id") if isinstance(each, Mapping) else each for each in given]
    return {each for each in found if type(each) is str}


def _text(value: Any, what: str) -> str | None:
    if value is None:
        return None
    if type(value) is not str or len(value) > _MAX_REASON:
        raise DecisionRefused(f"{what} must be text of at most {_MAX_REASON} characters")
    return value


def _find(names: Mapping[str, Mapping[str, Any] | None], ident: Any) -> Mapping[str, Any]:
    item = names.get(ident) if type(ident) is str else None
    if item is None:
        raise DecisionRefused("it names a call that is not pending")
    return item


def _digest(item: Mapping[str, Any], given: Any) -> str | None:
    if given is not None and (type(given) is not str or given != item["digest"]):
        raise DecisionRefused("a digest is not that of the pending call")
    return given


def _approve(
    payload: Mapping[str, Any], names: Mapping[str, Mapping[str, Any] | None], wanted: set[str]
) -> dict[str, Decision]:
    ids = payload.get("call_ids")
    if not isinstance(ids, (list, tuple)):
        raise DecisionRefused("call_ids must list exactly the pending calls")
    digests = payload.get("digests")
    if digests is not None and not isinstance(digests, Mapping):
        raise DecisionRefused("digests must be an object")
    left = dict(digests or {})
    out: dict[str, Decision] = {}
    for ident in ids:
        item = _find(names, ident)
        if item["id"] in out:
            raise DecisionRefused("call_ids names a call twice")
        given = left.pop(ident, None)
        if given is None and ident != item["id"]:
            given = left.pop(item["id"], None)
        if digests and given is None:
            raise DecisionRefused("digests must cover every call")
        out[item["id"]] = Decision("approve", digest=_digest(item, given))
    if left:
        raise DecisionRefused("digests names a call that is not pending")
    if set(out) != wanted:
        raise DecisionRefused("call_ids must list exactly the pending calls")
    return out


def _decide(
    payload: Mapping[str, Any], names: Mapping[str, Mapping[str, Any] | None]
) -> dict[str, Decision]:
    given = payload.get("decisions")
    if not isinstance(given, (list, tuple)) or not given:
        raise DecisionRefused("decisions must be a non-empty list")
    out: dict[str, Decision] = {}
    for each in given:
        if not isinstance(each, Mapping):
            raise DecisionRefused("a decision must be an object")
        if set(each) - {"id", "digest", "decision", "arguments", "reason"}:
            raise DecisionRefused("a decision has an unknown key")
        item = _find(names, each.get("id"))
        if item["id"] in out:
            raise DecisionRefused("decisions names a call twice")
        kind = each.get("decision")
        if type(kind) is not str or kind not in ("approve", "reject", "edit"):
            raise DecisionRefused("a decision is approve, reject or edit")
        arguments = each.get("arguments")
        if (kind == "edit") != (type(arguments) is dict):
            raise DecisionRefused("an edit, and only an edit, has arguments")
        out[item["id"]] = Decision(
            kind,  # type: ignore[arg-type]
            digest=_digest(item, each.get("digest")),
            arguments=arguments,
            reason=_text(each.get("reason"), "reason"),
        )
    return out


def read_decisions(event: Any, pending: Sequence[Mapping[str, Any]]) -> dict[str, Decision]:
    """Compare a human's event with the pending calls and return what it decides; pure.

    Ids match exactly: text, case, blanks and all. An event may name a call by its row id, or by
    the provider's id where only one pending call, and no row of another, has it.

    Args:
        event: HUMAN_APPROVED, HUMAN_REJECTED or HUMAN_DECIDED, as an Event or a mapping.
        pending: the items that need a decision, as `pending_item` makes them.

    Returns:
        Decisions by row id. An edit carries its new arguments as given: the caller judges them
        by checks 1 to 5 and adds their digest.

    Raises:
        DecisionRefused: it does not fit. Nothing was decided.

    >>> shown = [{"id": "c1", "tool_call_id": "c1", "digest": "ab"}]
    >>> read_decisions(approval_event(shown), shown)["c1"].decision
    'approve'
    """
    kind, payload = _payload(event)
    if not pending:
        raise DecisionRefused("no call is waiting for a decision")
    again = payload.get("again")
    if again is not None and type(again) is not bool:
        raise DecisionRefused("again must be true or false")
    _text(payload.get("by"), "by")
    names = _by_name(pending)
    if kind == APPROVED:
        return _approve(payload, names, {item["id"] for item in pending})
    if kind == REJECTED:
        reason = _text(payload.get("reason"), "reason")
        return {item["id"]: Decision("reject", reason=reason) for item in pending}
    if kind == DECIDED:
        return _decide(payload, names)
    raise DecisionRefused("not a decision")


# Display


# What is drawn as nothing, or as a blank, though Unicode calls it printable: fillers, joiners,
# variation selectors. Text may be hidden in them.
_UNSEEN = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0"
    "\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)


def _escape(text: str) -> str:
    if text.isascii() and text.isprintable():
        return text
    out = []
    for char in text:
        # Cc control, Cf bidi and zero-width, Cs surrogate, Co private, Cn unassigned, Zl, Zp.
        if char != " " and (not char.isprintable() or _UNSEEN.match(char)):
            code = ord(char)
            out.append(f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}")
        else:
            out.append(char)
    return "".join(out)


def display(value: Any) -> Any:
    r"""Return a copy of JSON data in which nothing invisible or reordering is left.

    Control, bidi and zero-width characters are shown as ``\uXXXX``, in keys too. For a person's
    eyes only: what runs, and what a digest is of, is the value itself.

    >>> display({"to": "a\u202eb"})
    {'to': 'a\\u202eb'}
    """
    if isinstance(value, str):
        return _escape(value)
    if type(value) is dict or isinstance(value, Mapping):
        return {_escape(str(key)): display(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [display(item) for item in value]
    return value


# Signed decisions


def sign_decision(
    seal: Seal, event: Mapping[str, Any], thread: str, machine: str = ""
) -> dict[str, Any]:
    """Return a decision event with its signature, for hosts with ``signed_approvals=True``.

    Args:
        seal: holds the key, on the side that authenticated the reviewer.
        event: the event as a mapping, ``type`` included.
        thread: the thread or store key whose calls it decides.
        machine: the machine's id where the host checks it, else ``""``.

    >>> from guardchart.gate import Seal
    >>> seal = Seal("0123456789abcdef")
    >>> event = sign_decision(seal, {"type": "HUMAN_REJECTED"}, "ticket-7")
    >>> verify_decision(seal, event, "ticket-7"), verify_decision(seal, event, "ticket-8")
    (True, False)
    """
    body = {key: value for key, value in event.items() if key != SIGNATURE}
    mark = seal.sign(body, thread=thread, machine=machine, purpose="decision")
    return {**body, SIGNATURE: mark}


def verify_decision(seal: Seal, event: Any, thread: str, machine: str = "") -> bool:
    """Return whether a decision event was signed by a key of the seal, for this thread.

    Args:
        seal: holds the keys.
        event: the Event, or a mapping with its ``type``: the signature covers the type.
        thread: the thread or store key of this conversation.
        machine: as it was given to `sign_decision`.
    """
    if isinstance(event, Mapping) and "type" not in event:
        raise TypeError("verify_decision takes the event, not its payload alone")
    kind, payload = _payload(event)
    signed = {key: value for key, value in payload.items() if key != SIGNATURE}
    signed["type"] = kind
    return seal.fits(
        payload.get(SIGNATURE), signed, thread=thread, machine=machine, purpose="decision"
    )
