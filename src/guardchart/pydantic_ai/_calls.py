"""The tools of one run step as the gate sees them, and what one call came to."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final

from pydantic_ai.exceptions import ApprovalRequired, CallDeferred, ModelRetry, ToolFailed

from guardchart.errors import AgentConfigError
from guardchart.gate import Tool, ToolCall, ToolRegistry
from guardchart.gate._arguments import digest
from guardchart.pydantic_ai._arguments import ForeignShape

__all__ = ["CONTROL", "Fate", "Foreign", "Tools", "guard_metadata", "is_of", "shown_arguments"]

CONTROL: Final = (ApprovalRequired, CallDeferred)
"""What a body raises to pause: its claim is given back."""
OWN_KINDS: Final = frozenset({"tool-search", "capability-load"})
"""Tools by which pydantic-ai itself reveals others."""
_MAX_KEPT: Final = 1000


async def _never(**_: Any) -> None:
    raise AssertionError("a foreign tool is run by its framework")


@dataclasses.dataclass(frozen=True, slots=True)
class Foreign:
    """One tool of the framework: the gate's view of it, and its shape."""

    tool: Tool
    shape: ForeignShape
    kind: str


def asks(definition: Any, side_effects: Collection[str]) -> bool:
    """Whether a tool changes something, as far as the application says so itself."""
    metadata = definition.metadata
    declared = isinstance(metadata, Mapping) and metadata.get("side_effect") is True
    return declared or definition.kind == "unapproved" or definition.name in side_effects


class Tools:
    """Every tool that the run step knows, by name; what the state hides is among them."""

    def __init__(
        self, *, side_effects: Collection[str], timeout_s: float, max_output_chars: int
    ) -> None:
        self._side_effects = side_effects
        self._timeout_s = timeout_s
        self._max_output_chars = max_output_chars
        self._kept: dict[Any, Foreign] = {}
        self.by_name: dict[str, Foreign] = {}
        self.unfit: dict[str, str] = {}
        self.registry = ToolRegistry((), max_output_chars=max_output_chars)

    def update(self, tools: Mapping[str, Any], context: Any) -> None:
        """Take the tools of a run step, as the framework hands them over."""
        by_name = {}
        for name, tool in tools.items():
            try:
                by_name[name] = self._foreign(name, tool, context)
            except AgentConfigError as exc:
                # A name or schema that cannot be checked: such a tool is never shown.
                self.unfit[name] = str(exc)
        if by_name != self.by_name:
            self.by_name = by_name
            self.registry = ToolRegistry(
                (each.tool for each in by_name.values()), max_output_chars=self._max_output_chars
            )

    def _foreign(self, name: str, tool: Any, context: Any) -> Foreign:
        definition = tool.tool_def
        effect = asks(definition, self._side_effects)
        timeout_s = definition.timeout
        key = (name, id(tool.args_validator), definition.kind, effect, timeout_s, id(context))
        kept = self._kept.get(key)
        if kept is not None and kept.shape.parameters == definition.parameters_json_schema:
            return kept
        owner = getattr(getattr(tool, "call_func", None), "__self__", None)
        shape = ForeignShape(
            name,
            tool.args_validator,
            definition.parameters_json_schema,
            single=getattr(owner, "single_arg_name", None),
            context=context,
        )
        made = Foreign(
            Tool(
                name,
                _never,
                shape,
                description=definition.description or "",
                timeout_s=self._timeout_s if timeout_s is None else timeout_s + 1.0,
                side_effect=effect,
                sequential=definition.sequential,
            ),
            shape,
            definition.kind,
        )
        if len(self._kept) >= _MAX_KEPT:
            self._kept.clear()
        self._kept[key] = made
        return made


@dataclasses.dataclass(slots=True)
class Fate:
    """What a call came to, as plain data that a durable step can record.

    Args:
        status: an `Outcome`'s status, or ``ask`` and ``held``.
        text: what the conversation is told where ``value`` does not count.
        value: what the body returned.
        row_id: the call's row, None without one.
        entered: whether the body was entered.
        reason: of a denial.
        metadata: for whoever is asked.
        control: what the body raised to speak to the framework: kind, and its argument.
        error: the name of what the body raised.
    """

    status: str
    text: str = ""
    value: Any = None
    row_id: str | None = None
    entered: bool = False
    reason: str = ""
    metadata: dict[str, Any] | None = None
    control: tuple[str, Any] | None = None
    error: str | None = None


def control_of(exc: BaseException | None) -> tuple[str, Any] | None:
    """Return how the framework is spoken to by an exception; None for any other."""
    if isinstance(exc, ModelRetry):
        return "retry", exc.message
    if isinstance(exc, ToolFailed):
        return "failed", exc.message
    return None


def raise_control(control: tuple[str, Any]) -> None:
    """Raise what a body raised to speak to the framework."""
    kind, argument = control
    raise ModelRetry(argument) if kind == "retry" else ToolFailed(argument)


def guard_metadata(
    session: Any, call: ToolCall, row: Any, digest: str, *, held: bool
) -> dict[str, Any]:
    """Return what a person is shown of a call that waits, under the one key that is ours."""
    shown = {
        "scope": session.host.scope,
        "call_id": call.id if row is None else row.id,
        "tool": call.name,
        "arguments": call.arguments if row is None else dict(row.arguments or {}),
        "digest": digest if row is None else row.digest,
        "state": sorted(session.snapshot.state_ids),
    }
    if held:
        shown["held"] = True
    return {"guardchart": shown}


def shown_arguments(shown: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that a person reads; none where what was kept is no object."""
    found = shown.get("arguments")
    return dict(found) if isinstance(found, Mapping) else {}


def is_of(row: Any, name: Any, shown: Mapping[str, Any]) -> bool:
    """Whether a row is of what a person was shown: the tool, the arguments and their digest.

    What is shown may have lain with somebody who changes it; the row is what would run.
    """
    if row.slot.tool != name or row.digest != shown.get("digest"):
        return False
    try:
        return bool(digest(shown_arguments(shown)) == row.digest)
    except ValueError:
        return False


def names(items: Iterable[Any]) -> str:
    """Return names for a message, quoted and in order."""
    return ", ".join(repr(each) for each in items)
