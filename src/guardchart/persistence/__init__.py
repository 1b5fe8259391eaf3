"""What outlives a step: ledgers and stores, in memory, SQLite or PostgreSQL.

A ledger makes a call enter at most once, whatever is retried, forked or restarted; a store
keeps the last snapshot of a run, its deadlines and its log. The names that need psycopg are
loaded when they are first used: ``pip install "guardchart[postgres]"``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from guardchart.persistence._durable import apersisted, persisted
from guardchart.persistence._ledger import Ledger, Rows
from guardchart.persistence._memory import InMemoryLedger, default_ledger
from guardchart.persistence._memory_store import MemoryStore
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
from guardchart.persistence._scanner import DueTimerScanner, Scan
from guardchart.persistence._sqlite import SQLiteLedger
from guardchart.persistence._sqlite_store import SQLiteStore
from guardchart.persistence._store import MAX_SNAPSHOT_BYTES, Due, Store, Stored, Summary
from guardchart.persistence._verbs import RuleLedger

if TYPE_CHECKING:
    from guardchart.persistence._postgres_ledger import PostgresLedger
    from guardchart.persistence._postgres_store import PostgresStore

__all__ = [
    "APPROVAL_TTL_S",
    "Claim",
    "Decision",
    "Due",
    "DueTimerScanner",
    "ENTRY_S",
    "InMemoryLedger",
    "Ledger",
    "MAX_NOT_SENT",
    "MAX_SNAPSHOT_BYTES",
    "MemoryStore",
    "PostgresLedger",
    "PostgresStore",
    "Proposal",
    "ReleaseReason",
    "Row",
    "Rows",
    "RuleLedger",
    "SQLiteLedger",
    "SQLiteStore",
    "Scan",
    "Slot",
    "Status",
    "Store",
    "Stored",
    "Summary",
    "apersisted",
    "batch_slots",
    "default_ledger",
    "owner_alive",
    "owner_id",
    "persisted",
]

_POSTGRES = {"PostgresLedger": "_postgres_ledger", "PostgresStore": "_postgres_store"}


def __getattr__(name: str) -> Any:
    module = _POSTGRES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
