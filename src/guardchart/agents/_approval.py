"""What a reviewer is asked, read from a context."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from guardchart.agents._context import pending_entries, shown_item

__all__ = ["pending_approval"]


def pending_approval(context: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The calls that wait for a person: exactly what will run, if approved.

    Args:
        context: A machine's context, e.g. ``interp.context`` or ``state["xsm"]["context"]``.

    Returns:
        ``[{id, tool_call_id, name, arguments, digest}, ...]`` in the model's order; empty when
        nobody is asked. ``id`` is the ledger's, to be named by an approval; ``tool_call_id``
        the provider's; ``arguments`` are validated, defaults filled in.

    Source: xstate-statemachine, agents reference: pending_approval.

    Example:
        >>> pending_approval({"pending_tool_calls": []})
        []
    """
    return [
        shown_item(entry)
        for entry in pending_entries(context)
        if entry.get("needs_approval") is True and entry.get("decided") is not True
    ]
