"""The columns of a ledger's row, which ledgers in SQL share, and a row as their values."""

from __future__ import annotations

import json
from typing import Any, Final

from guardchart.persistence._rows import Row, Slot

__all__ = ["COLUMNS", "OF_ROW", "VARIABLE", "row_of", "values", "variable"]

OF_ROW: Final = (
    *("id", "model_id", "arguments", "status", "decided_by", "reason", "result"),
    *("parent_id", "child_id", "decide_by", "use_by", "claimed_at", "owner", "token"),
    *("releases", "timeout_s", "created_at", "updated_at", "forgotten"),
)
"""The fields of a row but for its slot, in their order."""

COLUMNS: Final = (*Slot._fields, *OF_ROW)

VARIABLE: Final = (
    *("status", "decided_by", "reason", "result", "child_id", "decide_by", "use_by"),
    *("claimed_at", "owner", "token", "releases", "updated_at", "forgotten"),
)
"""What verbs change; arguments are only ever blanked, where the row is forgotten."""

_encode = json.JSONEncoder(separators=(",", ":")).encode
_decode = json.JSONDecoder().raw_decode  # what `_encode` wrote has no space around it


def values(row: Row, *, no_parent: str | None) -> tuple[Any, ...]:
    """Return the values of the `COLUMNS`, with ``no_parent`` in place of no parent's id."""
    row_id, slot, model_id, arguments, status, by, reason, result, parent_id, *rest = row
    text = None if arguments is None else _encode(arguments)
    parent_id = no_parent if parent_id is None else parent_id
    return (*slot, row_id, model_id, text, status, by, reason, result, parent_id, *rest)


def variable(row: Row) -> tuple[Any, ...]:
    """Return the values of the `VARIABLE` columns."""
    return (
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


def row_of(found: tuple[Any, ...], slot: Slot | None = None) -> Row:
    """Return the row that the `COLUMNS` tell of; no parent may be ``""``.

    Args:
        slot: The row's slot where it is known: then only the columns `OF_ROW` were asked for.
    """
    if slot is None:
        slot, found = Slot._make(found[:7]), found[7:]
    row_id, model_id, text, status, by, reason, result, parent_id, *rest, forgotten = found
    arguments = None if text is None else _decode(text)[0]
    decided = (status, by, reason, result, parent_id or None)
    return Row._make((row_id, slot, model_id, arguments, *decided, *rest, bool(forgotten)))
