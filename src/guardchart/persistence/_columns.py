"""The columns of a ledger's row, which ledgers in SQL share, and a row as their values."""

from __future__ import annotations

import json
from typing import Any, Final

from guardchart.persistence._rows import Row, Slot

__all__ = ["FIXED", "VARIABLE", "row_of", "variable"]

FIXED: Final = (
    *("scope", "id", "run", "agent", "batch_no", "tool", "digest", "ordinal"),
    *("parent_id", "model_id", "timeout_s", "created_at"),
)
"""What is written once."""

VARIABLE: Final = (
    *("arguments", "status", "decided_by", "reason", "result", "child_id", "decide_by"),
    *("use_by", "claimed_at", "owner", "token", "releases", "updated_at", "forgotten"),
)
"""What verbs change."""


def variable(row: Row) -> tuple[Any, ...]:
    """Return the values of the `VARIABLE` columns."""
    return (
        None if row.arguments is None else json.dumps(row.arguments, separators=(",", ":")),
        row.status,
        row.by,
        row.reason,
        row.result,
        row.child_id,
        row.decide_by,
        row.use_by,
        row.claimed_at,
        row.owner,
        row.token,
        row.releases,
        row.updated_at,
        row.forgotten,
    )


def row_of(found: tuple[Any, ...]) -> Row:
    """Return the row that `FIXED` and then `VARIABLE` columns tell of; no parent may be ``""``."""
    scope, row_id, *rest = found
    arguments = found[12]
    return Row(
        id=row_id,
        slot=Slot(scope, *rest[:6]),
        parent_id=found[8] or None,
        model_id=found[9],
        timeout_s=found[10],
        created_at=found[11],
        arguments=None if arguments is None else json.loads(arguments),
        status=found[13],
        by=found[14],
        reason=found[15],
        result=found[16],
        child_id=found[17],
        decide_by=found[18],
        use_by=found[19],
        claimed_at=found[20],
        owner=found[21],
        token=found[22],
        releases=found[23],
        updated_at=found[24],
        forgotten=bool(found[25]),
    )
