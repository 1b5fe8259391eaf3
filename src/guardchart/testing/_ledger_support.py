"""Small things the ledger checks share."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from guardchart.errors import LedgerError
from guardchart.persistence import Claim, Decision, Ledger, Row, Slot

NOW = 1_700_000_000_000
"""The epoch ms at which the checks happen."""

TIMEOUT_S = 30.0


def digest_of(arguments: Mapping[str, Any]) -> str:
    """Return some digest of arguments; a ledger takes any text."""
    return hashlib.sha256(json.dumps(arguments, sort_keys=True).encode()).hexdigest()[:16]


def call(
    arguments: Mapping[str, Any],
    *,
    scope: str = "t",
    run: str = "r",
    agent: str = "",
    batch_no: int = 1,
    tool: str = "pay",
) -> Slot:
    """Return the slot of a call."""
    return Slot(scope, run, agent, batch_no, tool, digest_of(arguments))


def propose(
    ledger: Ledger,
    model_id: str = "c",
    arguments: Mapping[str, Any] | None = None,
    *,
    decide_by: int | None = None,
    now: int = NOW,
    **slot: Any,
) -> Row:
    """Propose a call."""
    arguments = {"n": 0} if arguments is None else arguments
    return ledger.propose(
        call(arguments, **slot),
        model_id,
        arguments,
        decide_by=decide_by,
        timeout_s=TIMEOUT_S,
        now=now,
    )


def approve(ledger: Ledger, row: Row, *, now: int = NOW) -> Row:
    """Approve a row as displayed."""
    scope = row.slot.scope
    return ledger.decide(scope, {row.id: Decision("approve", row.digest)}, "ann", now=now)[row.id]


def edit(number: int, digest: str | None = None) -> Decision:
    """Return an edit of the arguments to ``{"n": number}``."""
    arguments = {"n": number}
    return Decision("edit", digest, arguments, digest_of(arguments))


def claim(ledger: Ledger, row: Row, *, now: int = NOW) -> Claim:
    """Claim a row with its own digest."""
    return ledger.claim(row.slot.scope, row.id, row.digest, owner="elsewhere", now=now)


def claimed(ledger: Ledger, *, now: int = NOW, **slot: Any) -> tuple[Row, str]:
    """Return a claimed row and its token."""
    row, token = claim(ledger, approve(ledger, propose(ledger, now=now, **slot), now=now), now=now)
    assert token is not None
    return row, token


def refused(reason: str, verb: Callable[..., object], /, *args: Any, **named: Any) -> None:
    """Assert that ``verb(*args, **named)`` raises ``LedgerError`` with this reason."""
    with pytest.raises(LedgerError) as caught:
        verb(*args, **named)
    assert caught.value.reason == reason
    assert str(caught.value)


def unchanged(
    ledger: Ledger, reason: str, verb: Callable[..., object], /, *args: Any, **named: Any
) -> None:
    """Assert that a verb is refused and changes no row of the usual batch."""
    before = ledger.lookup("t", "r", "", 1)
    refused(reason, verb, *args, **named)
    assert ledger.lookup("t", "r", "", 1) == before
