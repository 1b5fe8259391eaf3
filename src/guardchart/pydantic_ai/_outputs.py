"""How an answer of an agent is named, and whether a state wants it."""

from __future__ import annotations

from typing import Any, Final

from guardchart.gate import GuardSession

__all__ = ["output_name", "output_wanted"]

_OUTPUT_TOOL: Final = "final_result_"
"""How the output tool of a type is called where there are several."""


def output_name(context: Any) -> str:
    """Return how an answer is named: its output tool, its type, or ``text``."""
    if context.tool_def is not None:
        return str(context.tool_def.name)
    if context.object_def is not None and context.object_def.name:
        return str(context.object_def.name)
    kind = context.output_type
    return "text" if kind in (None, str) else getattr(kind, "__name__", "text")


def output_wanted(session: GuardSession, name: str) -> bool:
    """Return whether the chart wants an answer; it may name an output tool by its type."""
    return session.wants(name, name.removeprefix(_OUTPUT_TOOL))
