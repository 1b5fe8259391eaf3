"""What a ledger keeps: slots, rows, proposals, decisions and claims, as plain immutable data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

Status: TypeAlias = Literal[
    "proposed",
    "approved",
    "rejected",
    "edited",
    "void",
    "expired",
    "claimed",
    "done",
    "failed",
]
ReleaseReason: TypeAlias = Literal["not-sent", "paused", "state-changed", "cancelled", "late-entry"]

OPEN: frozenset[str] = frozenset({"proposed", "approved"})
CLOSED: frozenset[str] = frozenset({"rejected", "edited", "void", "expired"})
ENTERED: frozenset[str] = frozenset({"claimed", "done", "failed"})

ENTRY_S = 5.0
"""A claimed body starts within this many seconds of its claim, or gives the claim back."""

APPROVAL_TTL_S = 3600.0
"""How long an approval is good where ``decide`` is given no ``use_by``."""

MAX_NOT_SENT = 3
"""How often one row may be released because its side effect certainly did not happen."""


class Slot(NamedTuple):
    """The identity of one proposed call; the model's own id is no part of it.

    Args:
        scope: the conversation: ``str(thread_id)`` or the store key.
        run: a nonce minted when the machine first started.
        agent: the actor path of the agent that proposes, ``""`` for the root.
        batch_no: the number of the tool batch, counted up for ever.
        tool: the exact registered name.
        digest: the digest of the validated arguments.
        ordinal: 0 for the first call of this tool with these arguments in the batch,
            1 for the second, and so on (see ``batch_slots``).
    """

    scope: str
    run: str
    agent: str
    batch_no: int
    tool: str
    digest: str
    ordinal: int = 0


class Row(NamedTuple):
    """One call in the ledger. Instances are immutable; verbs answer with new ones.

    Attributes:
        id: unique in the scope and never reused: one tool and one argument set for ever.
        slot: the call's identity. The row of an edit has its parent's slot with the new digest.
        model_id: the id the model gave the call; may repeat.
        arguments: validated arguments as JSON types; None once forgotten. Read, never change.
        status: open (``proposed``, ``approved``), closed and never entered (``rejected``,
            ``edited``, ``void``, ``expired``), or entered (``claimed``, ``done``, ``failed``).
        by: who decided last, as the host named them; ``"policy"`` for no human.
        reason: why it was rejected or closed, None where nobody said.
        result: the recorded result or error text, None before that and once forgotten.
        parent_id: the row this one is an edit of (always an unedited original), or None.
        child_id: where ``status`` is ``edited``, the row that took its place.
        decide_by: epoch ms after which no decision is taken, None for no limit.
        use_by: epoch ms until which the approval is good, None while not approved.
        claimed_at: epoch ms of the claim, None while not entered.
        owner: the claiming process (see ``owner_id``), None while not entered.
        token: the claimant's secret, kept by ``record``, None before the claim and after
            ``release`` and ``resolve``.
        releases: how often it was released as certainly not sent.
        timeout_s: the tool's timeout in seconds; after it a claimed row is in doubt.
        created_at: epoch ms.
        updated_at: epoch ms.
        forgotten: arguments, result and reason were blanked, and stay blank.
    """

    id: str
    slot: Slot
    model_id: str
    arguments: Mapping[str, Any] | None
    status: Status = "proposed"
    by: str | None = None
    reason: str | None = None
    result: str | None = None
    parent_id: str | None = None
    child_id: str | None = None
    decide_by: int | None = None
    use_by: int | None = None
    claimed_at: int | None = None
    owner: str | None = None
    token: str | None = None
    releases: int = 0
    timeout_s: float = 30.0
    created_at: int = 0
    updated_at: int = 0
    forgotten: bool = False

    @property
    def digest(self) -> str:
        """The digest of the arguments, as in the slot."""
        return self.slot.digest

    @property
    def tool(self) -> str:
        """The tool's name, as in the slot."""
        return self.slot.tool

    @property
    def open(self) -> bool:
        """Whether it can still be decided, closed or claimed."""
        return self.status in OPEN

    @property
    def closed(self) -> bool:
        """Whether it was closed without ever being entered."""
        return self.status in CLOSED

    @property
    def entered(self) -> bool:
        """Whether its body may have begun: claimed, done or failed."""
        return self.status in ENTERED


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """One call as the step that saw the model's answer proposes it.

    Args:
        slot: the call's identity.
        model_id: the id the model gave it, a non-empty string.
        arguments: validated arguments as JSON types, defaults filled in.
        decide_by: epoch ms after which no decision is taken, None for no limit.
        timeout_s: the tool's timeout in seconds.
        approve_until: for a call that needs no human (``approval: never``): the row is made
            approved by ``"policy"`` and good until this epoch ms. None for all others.
        row_id: for ``adopt`` only: the row id the snapshot holds.
    """

    slot: Slot
    model_id: str
    arguments: Mapping[str, Any]
    decide_by: int | None = None
    timeout_s: float = 30.0
    approve_until: int | None = None
    row_id: str | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """What somebody decided about one row.

    Args:
        decision: ``approve``, ``reject``, ``edit`` or ``close`` (the host's own, to ``void``).
        digest: the digest that was displayed. Where given it must fit; ``again`` demands it.
        arguments: for ``edit``, the new validated arguments as JSON types.
        new_digest: for ``edit``, their digest.
        reason: for ``reject`` and ``close``: shown to the model, None for nothing.
    """

    decision: Literal["approve", "reject", "edit", "close"]
    digest: str | None = None
    arguments: Mapping[str, Any] | None = None
    new_digest: str | None = None
    reason: str | None = None


class Claim(NamedTuple):
    """The answer of ``claim``.

    ``token`` is the right to enter, record and release. It is None where the row had been
    entered before: ``row`` then says how that ended (``done``, ``failed``) or that it runs
    or is in doubt (``claimed``).
    """

    row: Row
    token: str | None


def batch_slots(
    scope: str, run: str, agent: str, batch_no: int, calls: Iterable[tuple[str, str]]
) -> list[Slot]:
    """Return the slots of one batch, numbering equal calls.

    Args:
        calls: (tool, digest) of each call, in the model's order.

    Returns:
        One slot a call, in the same order. A call's ordinal counts only equal ones before it,
        so that a re-sampled answer in another order meets the same rows.

    >>> [slot.ordinal for slot in batch_slots("t", "r", "", 1, [("pay", "d"), ("pay", "d")])]
    [0, 1]
    """
    seen: dict[tuple[str, str], int] = {}
    slots = []
    for tool, digest in calls:
        ordinal = seen.get((tool, digest), 0)
        seen[tool, digest] = ordinal + 1
        slots.append(Slot(scope, run, agent, batch_no, tool, digest, ordinal))
    return slots
