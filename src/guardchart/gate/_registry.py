"""The registry of an application's tools: what may be called at all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from guardchart._redact import truncated
from guardchart.errors import AgentConfigError, ToolDeniedError
from guardchart.gate import _check
from guardchart.gate._foreign import adapted
from guardchart.gate._rules import ALL_TOOLS, as_allowed
from guardchart.gate._tools import (
    DEFAULT_TOOL_TIMEOUT_S,
    Tool,
    ToolCall,
    read_timeout,
    tool,
)

__all__ = ["DEFAULT_MAX_OUTPUT_CHARS", "ToolRegistry", "tool_registry"]

DEFAULT_MAX_OUTPUT_CHARS = 4000
"""Where a tool's output is cut, in characters, unless its registry says otherwise."""


class ToolRegistry:
    """The tools of one application, by exact name. Made by `tool_registry`.

    >>> def look_up(order: int) -> str:
    ...     "Look up an order."
    >>> registry = tool_registry(look_up)
    >>> "look_up" in registry, registry.get("delete_all"), len(registry)
    (True, None, 1)
    """

    __slots__ = ("_tools", "max_output_chars")

    def __init__(self, tools: Iterable[Tool], *, max_output_chars: int) -> None:
        self._tools: dict[str, Tool] = {}
        for item in tools:
            if item.name in self._tools:
                raise AgentConfigError(f"two tools are named {item.name!r}")
            self._tools[item.name] = item
        self.max_output_chars = max_output_chars

    @property
    def names(self) -> tuple[str, ...]:
        """The registered names, in the order given."""
        return tuple(self._tools)

    def get(self, name: str) -> Tool | None:
        """Return the tool of exactly this name, or None."""
        return self._tools.get(name)

    def expand(self, names: Any) -> tuple[str, ...]:
        """Return the registered names that an allow-list stands for, in registry order.

        Args:
            names: names, ``["*"]`` or ``"*"``, or an `Allowed`.

        Raises:
            AgentConfigError: a name is not registered.
        """
        allowed = as_allowed(names)
        for name in sorted(allowed.listed):
            if name not in self._tools:
                raise AgentConfigError(f"{name!r} is not in the tool registry")
        return tuple(name for name in self._tools if name in allowed)

    def schemas(self, names: Any = ALL_TOOLS) -> list[dict[str, Any]]:
        """Return the schemas of the tools an allow-list permits, for a provider."""
        allowed = as_allowed(names)
        return [item.schema() for item in self._tools.values() if item.name in allowed]

    def truncate(self, text: str) -> str:
        """Cut a tool's output at ``max_output_chars``, with a marker that says so.

        >>> tool_registry(max_output_chars=5).truncate("abcdefgh")
        'abcde... [truncated 3 characters]'
        """
        over = len(text) - self.max_output_chars
        return text if over <= 0 else truncated(text, self.max_output_chars, over)

    def authorise(
        self, call: ToolCall, allowed: Any, approved_ids: Iterable[str] = ()
    ) -> dict[str, Any]:
        """Say whether a call would pass, without running or claiming anything.

        A rehearsal for tests and tools of your own: what comes back is not an AuthorisedCall,
        and no executor takes it.

        Args:
            call: the proposed call.
            allowed: names, ``["*"]``, or an `Allowed`.
            approved_ids: ids of calls a human is taken to have approved.

        Returns:
            The canonical arguments.

        Raises:
            ToolDeniedError: names the check that failed.

        Source: xstate-statemachine, agents reference: Reference.
        """
        checked = _check.check(call, _check.Facts(self, as_allowed(allowed), proposing=True))
        if checked.needs_approval and call.id not in set(approved_ids):
            raise ToolDeniedError(checked.tool.name, _check.NEEDS_APPROVAL)
        return checked.arguments

    def __len__(self) -> int:
        return len(self._tools)

    def __contains__(self, name: object) -> bool:
        return name in self._tools

    def __iter__(self) -> Iterator[Tool]:
        return iter(self._tools.values())

    def __repr__(self) -> str:
        return f"<ToolRegistry {', '.join(self._tools) or '(empty)'}>"


def tool_registry(
    *fns: Any,
    timeout_s: float = DEFAULT_TOOL_TIMEOUT_S,
    side_effect: bool = False,
    max_output_chars: int = DEFAULT_MAX_OUTPUT_CHARS,
) -> ToolRegistry:
    """Build the registry of an application's tools.

    Args:
        fns: functions, `Tool` objects, LangChain tools, or other registries.
        timeout_s: seconds, for tools that set none.
        side_effect: for tools that do not say.
        max_output_chars: where a tool's output is cut, in characters.

    Returns:
        The registry; being in it is no permission, see ``meta.tools``.

    Raises:
        AgentConfigError: something is not a tool, two share a name, or a limit is not usable.

    >>> def add(a: int, b: int) -> int:
    ...     "Add two numbers."
    ...     return a + b
    >>> tool_registry(add).names
    ('add',)

    Source: xstate-statemachine, agents reference: Reference.
    """
    default = read_timeout(timeout_s, "tool_registry()")
    if default is None:
        raise AgentConfigError("tool_registry(): timeout_s must be a number of seconds above zero")
    if type(max_output_chars) is not int or max_output_chars <= 0:
        raise AgentConfigError("tool_registry(): max_output_chars must be an int above zero")
    tools: list[Tool] = []
    for item in fns:
        if isinstance(item, ToolRegistry):
            tools.extend(item)
        elif isinstance(item, Tool):
            tools.append(item._with_defaults(default, side_effect))
        elif (foreign := adapted(item)) is not None:
            tools.append(foreign._with_defaults(default, side_effect))
        elif callable(item) and not isinstance(item, type):
            tools.append(tool(item)._with_defaults(default, side_effect))
        else:
            raise AgentConfigError(
                f"tool_registry(): {type(item).__name__} is not a tool; pass functions or tool(...)"
                + (" (its .func)" if callable(getattr(item, "func", None)) else "")
            )
    return ToolRegistry(tools, max_output_chars=max_output_chars)
