"""Ledgers: what makes a call enter at most once, whatever is retried, forked or restarted.

``InMemoryLedger`` is the default, one a process; ``SQLiteLedger`` survives the process.
"""

from __future__ import annotations

from guardchart.persistence._ledger import Ledger, Rows
from guardchart.persistence._memory import InMemoryLedger, default_ledger
from guardchart.persistence._owner import owner_alive, owner_id
from guardchart.persistence._rows import (
    APPROVAL_TTL_S,
    ENTRY_S,
    MAX_NOT_SENT,
    Claim,
    Decision,
    Proposal,
    ReleaseReason,
    Row,
    Slot,
    Status,
    batch_slots,
)
from guardchart.persistence._sqlite import SQLiteLedger
from guardchart.persistence._verbs import RuleLedger

__all__ = [
    "APPROVAL_TTL_S",
    "Claim",
    "Decision",
    "ENTRY_S",
    "InMemoryLedger",
    "Ledger",
    "MAX_NOT_SENT",
    "Proposal",
    "ReleaseReason",
    "Row",
    "Rows",
    "RuleLedger",
    "SQLiteLedger",
    "Slot",
    "Status",
    "batch_slots",
    "default_ledger",
    "owner_alive",
    "owner_id",
]
