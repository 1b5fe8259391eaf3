"""Which answers a state allows: ``meta.outputs``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["output_allowed", "output_name"]


def output_name(context: Any) -> str:
    """Return how an answer is named: its output tool, its type, or ``text``."""
    if context.tool_def is not None:
        return str(context.tool_def.name)
    if context.object_def is not None and context.object_def.name:
        return str(context.object_def.name)
    kind = context.output_type
    return "text" if kind in (None, str) else getattr(kind, "__name__", "text")


def output_allowed(wanted: Sequence[Any], name: str) -> bool:
    """Return whether every region that says anything of outputs allows this one.

    Args:
        wanted: the ``meta.outputs`` of the active states: a list of names, or False for none.
            A name is ``text``, an output tool's, or a type's.
        name: the answer's name.
    """
    for each in wanted:
        if each is True or each == "*":
            continue
        if not isinstance(each, (list, tuple)):
            return False
        if not any(_fits(item, name) for item in each):
            return False
    return True


def _fits(item: Any, name: str) -> bool:
    return isinstance(item, str) and (item in ("*", name) or name.endswith(f"_{item}"))
