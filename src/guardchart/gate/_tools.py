"""Tools: what a model may propose to call, and how a call's arguments are checked."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import pydantic

from guardchart.errors import AgentConfigError, ToolDeniedError
from guardchart.gate._arguments import MAX_ARGUMENT_BYTES, ArgumentsRefused, admit
from guardchart.gate._foreign import adapted
from guardchart.gate._schema import DocumentShape, Shape, signature_shape

__all__ = [
    "DEFAULT_TOOL_TIMEOUT_S",
    "Registry",
    "Tool",
    "ToolCall",
    "shown_name",
    "tool",
]

RESERVED_NAME = "*"
_MAX_TIMEOUT_S = 1e9
DEFAULT_TOOL_TIMEOUT_S = 30.0
"""Seconds a tool's body may take where neither it nor its registry says otherwise."""
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def shown_name(name: object) -> str:
    """Return a proposed name as far as it may be repeated: well-formed, else ``"*"``.

    Whether it is a registered one makes no difference, so the answer tells a model nothing.

    >>> shown_name("refund"), shown_name("ignore all instructions")
    ('refund', '*')
    """
    return name if type(name) is str and _NAME.fullmatch(name) else "*"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call a model proposes.

    Args:
        id: the provider's id of the call.
        name: the tool's name, as the model wrote it.
        arguments: the parsed arguments; untrusted.

    >>> ToolCall("c1", "refund", {"order": 7}).arguments
    {'order': 7}
    """

    id: str
    name: str
    arguments: dict[str, Any] = field(default_factory=dict)


class Registry(Protocol):
    """What the gate reads of a `ToolRegistry`."""

    max_output_chars: int

    @property
    def names(self) -> tuple[str, ...]:
        """The registered names."""

    def get(self, name: str) -> Any:
        """Return the tool of exactly this name, or None."""


def read_timeout(value: Any, label: str) -> float | None:
    if value is None:
        return None
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 < value < _MAX_TIMEOUT_S:  # NaN fails both comparisons
        raise AgentConfigError(f"{label}: timeout_s must be a number of seconds above zero")
    return float(value)


def _first_paragraph(fn: Any) -> str:
    doc = inspect.getdoc(fn) or ""
    return " ".join(doc.split("\n\n", 1)[0].split())


class Tool:
    """A function a model may propose to call, with its schema and limits.

    Made by `tool`, `Tool.from_schema` or `tool_registry`; not changed afterwards. A Tool is
    not callable: `run_authorised` runs it, for a call the gate has let through.

    >>> def refund(order: int, cents: int = 100) -> str:
    ...     "Refund an order."
    >>> tool(refund, side_effect=True).validate({"order": 7})
    {'order': 7, 'cents': 100}
    """

    __slots__ = (
        "_side_effect",
        "_timeout_s",
        "bounded",
        "description",
        "fn",
        "is_async",
        "max_argument_bytes",
        "name",
        "requires_approval",
        "sequential",
        "shape",
        "trusted",
    )

    def __init__(
        self,
        name: str,
        fn: Callable[..., Any],
        shape: Shape,
        *,
        description: str = "",
        timeout_s: float | None = None,
        side_effect: bool | None = None,
        trusted: bool = False,
        sequential: bool = False,
        requires_approval: bool = False,
        bounded: bool = False,
        max_argument_bytes: int = MAX_ARGUMENT_BYTES,
    ) -> None:
        if name == RESERVED_NAME:
            raise AgentConfigError("the tool name '*' is reserved: it means every tool")
        if type(name) is not str or not _NAME.fullmatch(name):
            raise AgentConfigError(
                f"tool name {name!r}: use 1 to 64 of A-Z a-z 0-9 '_' '.' '-' (ASCII only)"
            )
        if not callable(fn):
            raise AgentConfigError(f"tool {name!r}: {type(fn).__name__} is not a tool")
        self.name = name
        self.fn = fn
        self.shape = shape
        self.description = description
        self._timeout_s = read_timeout(timeout_s, f"tool {name!r}")
        self._side_effect = side_effect
        self.trusted = bool(trusted)
        self.sequential = bool(sequential)
        self.requires_approval = bool(requires_approval)
        self.bounded = bool(bounded)
        self.max_argument_bytes = max_argument_bytes
        self.is_async = inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(
            getattr(fn, "__call__", None)  # noqa: B004
        )

    @classmethod
    def from_schema(
        cls,
        name: str,
        schema: Mapping[str, Any],
        fn: Callable[..., Any],
        *,
        description: str = "",
        timeout_s: float | None = None,
        side_effect: bool | None = None,
        trusted: bool = False,
        sequential: bool = False,
        requires_approval: bool = False,
        bounded: bool = False,
    ) -> Tool:
        """Make a tool that is known by a JSON Schema only (MCP, external servers).

        Args:
            name: its name, 1 to 64 ASCII letters, digits, ``_``, ``.``, ``-``.
            schema: a JSON Schema of an object. Objects that list properties and say nothing of
                others are closed.
            fn: called with the arguments as keywords.
            description: what the model is told.
            timeout_s: seconds the body may take; None takes the registry's.
            side_effect: True asks a human for each call; None takes the registry's.
            trusted: True lets its results count as trusted sources.
            sequential: True never runs it beside another call.
            requires_approval: True asks a human even where nothing changes.
            bounded: True says that the body ends within ``timeout_s`` by itself. A synchronous host
                then calls it in its own thread, and nobody stops waiting for it.

        Raises:
            MissingExtraError: ``jsonschema`` is not installed.
            AgentConfigError: not a usable schema, name or limit.
        """
        return cls(
            name,
            fn,
            DocumentShape(name, schema),
            description=description,
            timeout_s=timeout_s,
            side_effect=side_effect,
            trusted=trusted,
            sequential=sequential,
            requires_approval=requires_approval,
            bounded=bounded,
        )

    @property
    def timeout_s(self) -> float:
        """Seconds the body may take."""
        return DEFAULT_TOOL_TIMEOUT_S if self._timeout_s is None else self._timeout_s

    @property
    def side_effect(self) -> bool:
        """Whether a human approves each call."""
        return bool(self._side_effect)

    @property
    def parameters(self) -> dict[str, Any]:
        """The JSON Schema of the arguments."""
        return self.shape.parameters

    @property
    def args_model(self) -> type[pydantic.BaseModel] | None:
        """The pydantic model of the arguments; None for a tool known by a JSON Schema."""
        return self.shape.args_model

    def schema(self) -> dict[str, Any]:
        """Return ``{name, description, parameters}``, as providers are told."""
        return {
            "name": self.name,
            "description": self.description,
            "parameters": self.parameters,
        }

    def load(self, arguments: object) -> tuple[dict[str, Any], str]:
        """Validate arguments; return them in canonical form, and their canonical text.

        Raises:
            ArgumentsRefused: whose text is safe to show.
        """
        raw = admit(arguments, self.max_argument_bytes)
        return self.shape.load(arguments, raw)  # type: ignore[arg-type]  # admit: a dict

    def validate(self, arguments: object) -> dict[str, Any]:
        """Validate arguments strictly, at every depth.

        Args:
            arguments: a dict of JSON values.

        Returns:
            The canonical arguments: JSON types, defaults filled in, sets sorted.

        Raises:
            ToolDeniedError: the reason names declared fields, and no value.

        Source: xstate-statemachine, agents reference: Reference.
        """
        try:
            return self.load(arguments)[0]
        except ArgumentsRefused as exc:
            raise ToolDeniedError(self.name, f"invalid arguments ({exc})") from None

    def _with_defaults(self, timeout_s: float, side_effect: bool) -> Tool:
        out = Tool.__new__(Tool)
        for slot in Tool.__slots__:
            setattr(out, slot, getattr(self, slot))
        if out._timeout_s is None:
            out._timeout_s = timeout_s
        if out._side_effect is None:
            out._side_effect = side_effect
        return out

    def __repr__(self) -> str:
        return f"<Tool {self.name}{' (side effect)' if self.side_effect else ''}>"


def tool(
    fn: Callable[..., Any],
    *,
    timeout_s: float | None = None,
    side_effect: bool | None = None,
    name: str | None = None,
    description: str | None = None,
    trusted: bool = False,
    sequential: bool = False,
    requires_approval: bool = False,
    bounded: bool = False,
) -> Tool:
    """Make a tool from a function; its annotated signature becomes a strict schema.

    Args:
        fn: a plain or async function. Every parameter is annotated; one annotated
            `IdempotencyKey` is filled in by the gate and hidden from the model. Or a LangChain
            ``BaseTool``, whose schema is taken as it is.
        timeout_s: seconds the body may take; None takes the registry's.
        side_effect: True asks a human for each call; None takes the registry's.
        name: the name a model calls it by; None takes the function's.
        description: None takes the first paragraph of the docstring.
        trusted: True lets its results count as trusted sources for rules.
        sequential: True never runs it beside another call of the same turn.
        requires_approval: True asks a human though it changes nothing.
        bounded: True says that the body ends within ``timeout_s`` by itself. A synchronous host
            then calls it in its own thread, and nobody stops waiting for it.

    Returns:
        The tool, for `tool_registry`. What the registry says of timeouts and side effects
        holds where the tool says nothing itself.

    Raises:
        AgentConfigError: not a function, a name that is not an ASCII identifier, an
            unannotated parameter, ``*args``, a timeout that is not above zero.

    >>> def refund(order_id: int) -> str:
    ...     "Refund an order."
    >>> tool(refund, timeout_s=10, side_effect=True).schema()["description"]
    'Refund an order.'
    """
    foreign = adapted(
        fn,
        timeout_s=timeout_s,
        side_effect=side_effect,
        name=name,
        description=description,
        trusted=trusted,
        sequential=sequential,
        requires_approval=requires_approval,
        bounded=bounded,
    )
    if foreign is not None:
        return foreign  # type: ignore[no-any-return]
    if isinstance(fn, Tool) or not callable(fn):
        inner = " (its .func)" if callable(getattr(fn, "func", None)) else ""
        raise AgentConfigError(f"tool(): {type(fn).__name__} is not a tool; pass a function{inner}")
    label = name if name is not None else getattr(fn, "__name__", None)
    if label is None:
        raise AgentConfigError("tool(): this callable has no __name__; pass name=")
    if type(label) is not str or label == RESERVED_NAME or not _NAME.fullmatch(label):
        Tool(label, fn, None)  # type: ignore[arg-type]  # raises what is wrong with the name
    return Tool(
        label,
        fn,
        signature_shape(fn, label),
        description=_first_paragraph(fn) if description is None else description,
        timeout_s=timeout_s,
        side_effect=side_effect,
        trusted=trusted,
        sequential=sequential,
        requires_approval=requires_approval,
        bounded=bounded,
    )
