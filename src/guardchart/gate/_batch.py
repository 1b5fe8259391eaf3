"""One turn's calls: judged in order, proposed to the ledger, looked up again after a restart.

`GuardSession` and the tool loop both stand on these functions, so that a call is judged and
filed in one way whichever door it came through.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from guardchart.errors import LedgerError, ToolDeniedError
from guardchart.gate import _check
from guardchart.gate._check import DEFAULT_MAX_TOOL_CALLS, Checked, Facts
from guardchart.gate._rules import PLAIN, Rule, as_allowed
from guardchart.gate._tools import Registry, Tool, ToolCall
from guardchart.persistence import APPROVAL_TTL_S, Proposal, Row, Slot, batch_slots

__all__ = [
    "Verdict",
    "assess",
    "lookup_verdicts",
    "passed",
    "propose_verdicts",
    "slots",
    "turn_facts",
]


class Verdict(NamedTuple):
    """What checks 1 to 5 say of one call.

    Args:
        call: the call as proposed.
        ok: whether it passed.
        reason: why it did not; empty where it did. Safe to show.
        tool: the registered tool, None where the call failed before it was known.
        arguments: canonical arguments, None unless ``ok``.
        digest: of the canonical arguments, empty unless ``ok``.
        needs_row: it runs only by a row of the ledger.
        needs_approval: a human decides.
        side_effect: the tool says it changes something.
        rule: the state's rule for it.
    """

    call: ToolCall
    ok: bool
    reason: str = ""
    tool: Tool | None = None
    arguments: dict[str, Any] | None = None
    digest: str = ""
    needs_row: bool = False
    needs_approval: bool = False
    side_effect: bool = False
    rule: Rule = PLAIN


def passed(checked: Checked) -> Verdict:
    """Return the verdict on a call that passed checks 1 to 5."""
    return Verdict(
        checked.call,
        True,
        "",
        checked.tool,
        checked.arguments,
        checked.digest,
        checked.needs_row,
        checked.needs_approval,
        checked.tool.side_effect,
        checked.rule,
    )


def turn_facts(
    calls: Sequence[ToolCall],
    registry: Registry,
    allowed: Any,
    *,
    spent_ids: Collection[str] = (),
    max_tool_calls: int = DEFAULT_MAX_TOOL_CALLS,
    context: Mapping[str, Any] | None = None,
    entered: Mapping[str, int] | None = None,
    proposing: bool = True,
    now: int = 0,
) -> Facts:
    """Return the facts that the calls of one turn share; a row is added for each call."""
    duplicates: frozenset[str] = frozenset()
    if len(calls) > 1:
        counts = Counter(call.id for call in calls if type(call.id) is str)
        duplicates = frozenset(ident for ident, n in counts.items() if n > 1)
    return Facts(
        registry=registry,
        allowed=as_allowed(allowed),
        max_tool_calls=max_tool_calls,
        turn_size=len(calls),
        duplicate_ids=duplicates,
        spent_ids=frozenset(spent_ids),
        context={} if context is None else context,
        entered={} if entered is None else entered,
        proposing=proposing,
        now=now,
    )


def assess(
    calls: Sequence[ToolCall],
    registry: Registry,
    allowed: Any,
    *,
    spent_ids: Collection[str] = (),
    max_tool_calls: int = DEFAULT_MAX_TOOL_CALLS,
    context: Mapping[str, Any] | None = None,
    entered: Mapping[str, int] | None = None,
) -> list[Verdict]:
    """Judge the calls of one turn, in order, by checks 1 to 5; pure.

    Args:
        calls: the turn's calls, in the model's order.
        registry: the application's tools.
        allowed: the allow-list of the state now: names, ``["*"]`` or an `Allowed`.
        spent_ids: ids that the conversation has already seen.
        max_tool_calls: the most calls of one turn; beyond it every call is refused.
        context: the machine's context, for rules.
        entered: how often each tool was entered in this visit of the state, for rules.

    Returns:
        A verdict for each call, in order. A bad call never raises.

    >>> from guardchart.gate import tool_registry
    >>> def look_up(order: int) -> str:
    ...     "Look up an order."
    >>> calls = [ToolCall("c1", "look_up", {"order": 7}), ToolCall("c2", "delete_all")]
    >>> [verdict.ok for verdict in assess(calls, tool_registry(look_up), ["look_up"])]
    [True, False]
    """
    if not calls:
        return []
    facts = turn_facts(
        calls,
        registry,
        allowed,
        spent_ids=spent_ids,
        max_tool_calls=max_tool_calls,
        context=context,
        entered=entered,
    )
    verdicts = []
    for call in calls:
        try:
            verdicts.append(passed(_check.check(call, facts)))
        except ToolDeniedError as exc:
            name = call.name if type(call.name) is str and call.name in facts.allowed else ""
            found = registry.get(name)
            effect = found is not None and found.side_effect
            verdicts.append(Verdict(call, False, exc.reason, found, side_effect=effect))
    return verdicts


def slots(host: Any, batch_no: int, verdicts: Sequence[Verdict]) -> list[Slot | None]:
    """Return the slot of each verdict that needs a row, None for the others.

    Args:
        host: with ``scope``, ``run`` and ``agent``.
        batch_no: the number of this batch in the run.
        verdicts: of the whole turn, in order, since equal calls are counted.
    """
    wanted = [v for v in verdicts if v.ok and v.needs_row]
    made = iter(
        batch_slots(
            host.scope, host.run, host.agent, batch_no, [(v.call.name, v.digest) for v in wanted]
        )
    )
    return [next(made) if v.ok and v.needs_row else None for v in verdicts]


def _proposals(
    places: Sequence[Slot | None],
    verdicts: Sequence[Verdict],
    *,
    decide_by: int | None = None,
    use_by: int | None = None,
    row_ids: Sequence[str | None] | None = None,
) -> list[Proposal]:
    out = []
    for i, (slot, verdict) in enumerate(zip(places, verdicts, strict=True)):
        if slot is None or verdict.tool is None or verdict.arguments is None:
            continue
        given = None if row_ids is None else row_ids[i]
        out.append(
            Proposal(
                slot=slot,
                model_id=verdict.call.id,
                arguments=verdict.arguments,
                decide_by=decide_by,
                timeout_s=verdict.tool.timeout_s,
                approve_until=None if verdict.needs_approval else use_by,
                row_id=given or verdict.call.id,
            )
        )
    return out


def _spread(places: Sequence[Slot | None], rows: Iterable[Row]) -> list[Row | None]:
    left = iter(rows)
    return [None if slot is None else next(left) for slot in places]


def propose_verdicts(
    ledger: Any,
    host: Any,
    batch_no: int,
    verdicts: Sequence[Verdict],
    *,
    decide_by: int | None = None,
    use_by: int | None = None,
    now: int,
) -> list[Row | None]:
    """Give every call that needs one its row; one transaction.

    Only the step that first sees a model's answer proposes; a restored batch is looked up.

    Args:
        ledger: where the rows are made.
        host: with ``scope``, ``run`` and ``agent``.
        batch_no: the number of this batch in the run.
        verdicts: of the whole turn, in order.
        decide_by: epoch milliseconds after which no decision is taken.
        use_by: epoch milliseconds until which an approval by the chart's own rule is good;
            None for an hour.
        now: host clock, epoch milliseconds.

    Returns:
        A row, or None, for each verdict. A row that exists already is returned as it is; a rule
        ``approval: never`` has its rows approved by ``policy``.

    Raises:
        LedgerError: the ledger cannot keep one of the calls; no row was made.
    """
    places = slots(host, batch_no, verdicts)
    if use_by is None:
        use_by = now + round(APPROVAL_TTL_S * 1000)
    proposals = _proposals(places, verdicts, decide_by=decide_by, use_by=use_by)
    if not proposals:
        return [None] * len(verdicts)
    return _spread(places, ledger.propose_batch(proposals, now=now))


def lookup_verdicts(
    ledger: Any,
    host: Any,
    batch_no: int,
    verdicts: Sequence[Verdict],
    *,
    row_ids: Sequence[str | None] | None = None,
    now: int,
) -> list[Row | None]:
    """Return the rows of a parked or restored batch; nothing is proposed or decided.

    A ledger that does not require the proposal (`InMemoryLedger`) takes over a batch that
    another process parked, where its own rules allow that.

    Args:
        ledger: where the rows are.
        host: with ``scope``, ``run`` and ``agent``.
        batch_no: the number of this batch in the run.
        verdicts: of the whole turn, in order.
        row_ids: the row ids that the snapshot notes, parallel to the verdicts; None takes the
            calls' own ids for a batch that is taken over.
        now: host clock, epoch milliseconds.

    Returns:
        The row of each call's slot, not followed to an edit; None where the call needs none,
        and where there is none: such a call was never proposed as it stands and must not run.
    """
    places = slots(host, batch_no, verdicts)
    rows = [None if slot is None else ledger.slot_row(slot) for slot in places]
    missing = any(slot is not None for slot in places) and not any(rows)
    if missing and not ledger.requires_proposal:
        proposals = _proposals(places, verdicts, row_ids=row_ids)
        try:
            return _spread(places, ledger.adopt(proposals, now=now))
        except LedgerError:
            return rows
    return rows
