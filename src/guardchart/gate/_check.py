"""The reference monitor: whether one proposed tool call may run, from facts alone.

Theory
------
A tool call is a request made by somebody who cannot be trusted, on behalf of a state that can.
`check` decides it as a function of the call and of *facts* gathered at the moment of execution;
it reads no clock, ledger, file or global, and runs nothing but the schema of the tool. What it
returns is a description of what would run, not a permission to run it: only `authorise`, which
calls `check` and then claims the call's row, makes a thing that an executor accepts.

The checks stand in one order, so that a refusal says no more than the caller may know. Whether a
name is registered (1) and whether the state lists it (2) are answered alike: a model cannot probe
for tools it was never told of. Ids (3) come before arguments, since an id that was used is a
replay whatever it carries. The schema (4) precedes the state's rules (5), which may rely on
types; and both precede the human (6), so that nobody is asked about a call that could not run.

Approval is a row of the ledger for exactly this tool and these arguments. A flag in a snapshot,
a list of approved ids in a context, or an event says nothing here. The row's digest is compared
with one computed now from the validated arguments, so what runs is what was shown, defaults
included. With ``proposing`` set, the question is whether to ask, and 6 is only announced.

The claim (7) is not a check: it is a write, and belongs to the ledger.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from guardchart.errors import ToolDeniedError
from guardchart.gate._arguments import ArgumentsRefused, digest_text
from guardchart.gate._rules import Allowed, Rule, judge
from guardchart.gate._tools import Registry, Tool, ToolCall, shown_name

__all__ = [
    "Checked",
    "DEFAULT_MAX_TOOL_CALLS",
    "DUPLICATE_IDS",
    "Facts",
    "MISMATCH",
    "NEEDS_APPROVAL",
    "NOT_ALLOWED",
    "check",
]

DEFAULT_MAX_TOOL_CALLS = 8
"""The most calls of one turn, unless the host says otherwise."""
NOT_ALLOWED = "not in this state's meta.tools allow-list"
MALFORMED_ID = "malformed tool call id"
DUPLICATE_IDS = "duplicate tool call ids"
SPENT_ID = "duplicate tool call ids: this id was already used in the conversation"
NEEDS_APPROVAL = "needs human approval"
TOO_LATE = "its human approval has expired"
MISMATCH = "differs from the call that the ledger holds"
_MAX_ID = 256
_NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})


class Facts(NamedTuple):
    """What is true at the moment a call is judged.

    Args:
        registry: the application's tools.
        allowed: the allow-list of the active states, read now.
        max_tool_calls: the most calls of one turn.
        turn_size: how many calls the turn has.
        duplicate_ids: ids that occur more than once in the turn.
        spent_ids: ids that the conversation has already seen.
        context: the machine's context, for rules.
        entered: how often each tool was entered in this visit of the state, for rules.
        row: the call's row in the ledger, None where it has none.
        now: host clock, epoch milliseconds.
        proposing: True before anybody is asked: checks 1 to 5.
    """

    registry: Registry
    allowed: Allowed
    max_tool_calls: int = DEFAULT_MAX_TOOL_CALLS
    turn_size: int = 1
    duplicate_ids: Collection[str] = frozenset()
    spent_ids: Collection[str] = frozenset()
    context: Mapping[str, Any] = _NOTHING
    entered: Mapping[str, int] = _NOTHING
    row: Any = None
    now: int = 0
    proposing: bool = False


class Checked(NamedTuple):
    """A call that passed: what would run, and what is still needed."""

    call: ToolCall
    tool: Tool
    arguments: dict[str, Any]
    """Canonical: JSON types, defaults filled in."""
    text: str
    """The canonical text of the arguments."""
    digest: str
    needs_row: bool
    """Whether it runs only by a row of the ledger: a side effect, or an approval."""
    needs_approval: bool
    """Whether a human decides; False where the rule lets the chart approve."""
    rule: Rule


def check(call: ToolCall, facts: Facts, before: Checked | None = None) -> Checked:
    """Judge one call; pure.

    Args:
        call: what the model proposes, or what a restored snapshot holds.
        facts: what is true now.
        before: what an earlier look made of this very call: the arguments that its tool has
            validated are not validated again.

    Returns:
        The validated call. With ``facts.proposing``, ``needs_approval`` says whether a human
        must still be asked; without it, an approval that was needed was found.

    Raises:
        ToolDeniedError: the first check that failed. Nothing ran.

    Source: docs/semantics.md, G1 to G5.

    >>> from guardchart.gate import as_allowed, tool, tool_registry
    >>> def refund(order: int) -> str:
    ...     "Refund an order."
    >>> facts = Facts(tool_registry(tool(refund, side_effect=True)), as_allowed(["refund"]))
    >>> check(ToolCall("c1", "refund", {"order": 7}), facts)
    Traceback (most recent call last):
        ...
    guardchart.errors.ToolDeniedError: tool 'refund' denied: needs human approval
    """
    # 1, 2: registered and allowed, by exact name; one answer for both
    name = call.name
    tool: Tool | None = facts.registry.get(name) if type(name) is str else None
    if tool is None or name not in facts.allowed:
        raise ToolDeniedError(shown_name(name), NOT_ALLOWED)
    # 3: ids, and the size of the turn
    if facts.turn_size > facts.max_tool_calls:
        reason = f"{facts.turn_size} tool calls in one turn (max_tool_calls={facts.max_tool_calls})"
        raise ToolDeniedError(name, reason)
    if type(call.id) is not str or not 0 < len(call.id) <= _MAX_ID or not call.id.isprintable():
        raise ToolDeniedError(name, MALFORMED_ID)
    if call.id in facts.duplicate_ids:
        raise ToolDeniedError(name, DUPLICATE_IDS)
    if call.id in facts.spent_ids:
        raise ToolDeniedError(name, SPENT_ID)
    # 4: schema
    if before is not None and before.call is call and before.tool is tool:
        arguments, text, digest = before.arguments, before.text, before.digest
    else:
        try:
            arguments, text = tool.load(call.arguments)
        except ArgumentsRefused as exc:
            raise ToolDeniedError(name, f"invalid arguments ({exc})") from None
        digest = digest_text(text)
    # 5: rules of the state
    rule = facts.allowed.rule(name)
    refusal = judge(rule, arguments, facts)
    if refusal is not None:
        raise ToolDeniedError(name, refusal)
    # 6: approved, by a row for exactly this call, in time
    needs = tool.side_effect or tool.requires_approval or rule.approval == "always"
    row = facts.row
    if needs and not facts.proposing:
        if row is None:
            raise ToolDeniedError(name, NEEDS_APPROVAL)
        if row.slot.tool != name or row.digest != digest:
            raise ToolDeniedError(name, MISMATCH)
        if row.status != "approved":
            raise ToolDeniedError(name, NEEDS_APPROVAL)
        if row.use_by is not None and facts.now > row.use_by:
            raise ToolDeniedError(name, TOO_LATE)
    asks = needs and rule.approval != "never"
    return Checked(call, tool, arguments, text, digest, needs, asks, rule)
