"""What the provider adapters share: reading SDK objects, tool names, options.

The adapters themselves (guardchart.openai, guardchart.anthropic) hold only what differs: how
messages and tools are written in a provider's request and how its response is read.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from guardchart.agents._messages import safe_text
from guardchart.agents._models import tool_names
from guardchart.errors import AgentConfigError, AgentError, MissingExtraError
from guardchart.gate import parse_arguments
from guardchart.gate._arguments import UNPARSEABLE

__all__ = [
    "Names",
    "check_options",
    "field",
    "items",
    "missing_sdk",
    "own_name",
    "read_arguments",
    "require_sdk",
    "tool_parts",
    "wire_name",
    "wire_names",
]

Names: TypeAlias = Mapping[str, str]
"""A tool's own name to its name on the wire."""

_MAX_RAW_CHARS = 4000


# SDKs


def require_sdk(name: str) -> None:
    """Make sure a provider's SDK is installed, without importing it.

    Args:
        name: Its import name, e.g. ``"openai"``.

    Raises:
        MissingExtraError: It is not installed; the message names the ``pip install``.

    Source: xstate-statemachine, agents reference: provider helpers.

    Example:
        >>> require_sdk("json")
        >>> require_sdk("no_such_sdk")
        Traceback (most recent call last):
            ...
        guardchart.errors.MissingExtraError: the no_such_sdk SDK is not installed: \
pip install no_such_sdk
    """
    if not name.isidentifier():
        raise AgentConfigError("require_sdk: expected the import name of one package")
    try:
        found = importlib.util.find_spec(name) is not None
    except ValueError:  # loaded, but by something that left no spec
        found = True
    if not found:
        raise missing_sdk(name)


def missing_sdk(name: str) -> MissingExtraError:
    """The error of a missing SDK, for the factory whose own import statement failed.

    Example:
        >>> print(missing_sdk("openai"))
        the openai SDK is not installed: pip install openai
    """
    return MissingExtraError(f"the {name} SDK", f"pip install {name}")


def field(obj: Any, name: str, default: Any = None) -> Any:
    """Read a field of an SDK object or of the same thing as a dict.

    Args:
        obj: An object, a mapping, or None.
        name: The field.
        default: What an absent field gives.

    Returns:
        The value, which may be None where the provider sent null.

    Example:
        >>> field({"id": "a"}, "id"), field(None, "id"), field(3 + 4j, "imag")
        ('a', None, 4.0)
    """
    if isinstance(obj, Mapping):
        return obj.get(name, default)
    return getattr(obj, name, default)


def items(value: Any, what: str) -> list[Any]:
    """A list of a provider's response; None counts as an empty one.

    Raises:
        AgentError: It is something else.

    Example:
        >>> items(None, "tool_calls")
        []
    """
    if value is None:
        return []
    if not isinstance(value, list | tuple):
        raise AgentError(f"the provider's response is malformed: {what} is no list")
    return list(value)


# Calls and tools


def read_arguments(raw: Any) -> dict[str, Any]:
    """Arguments of a proposed call, from the JSON text or the object a provider sent.

    Args:
        raw: JSON text, a mapping, or None for a call without arguments.

    Returns:
        The arguments; ``{"__unparseable__": raw}`` for what is no JSON object, which the tool's
        schema then denies.

    Example:
        >>> read_arguments('{"city": "Kochi"}'), read_arguments("{oops")
        ({'city': 'Kochi'}, {'__unparseable__': '{oops'})
    """
    if raw is None or raw == "":
        return {}
    if isinstance(raw, Mapping):
        return dict(raw)
    if isinstance(raw, str):
        try:
            parsed: Any = parse_arguments(raw)
        except (ValueError, AgentError):
            parsed = None
        if isinstance(parsed, dict):
            return parsed
    return {UNPARSEABLE: safe_text(raw)[:_MAX_RAW_CHARS] if isinstance(raw, str) else ""}


def tool_parts(tool: Any) -> tuple[str, str, dict[str, Any]]:
    """Name, description and parameters of a tool schema.

    Args:
        tool: ``{"name", "description"?, "parameters"?}``, or the same under ``"function"``.

    Raises:
        AgentConfigError: It has no name.

    Example:
        >>> tool_parts({"name": "now"})
        ('now', '', {'type': 'object', 'properties': {}})
    """
    inner = field(tool, "function")
    source = inner if isinstance(inner, Mapping) else tool
    name = field(source, "name")
    if not isinstance(name, str) or not name:
        raise AgentConfigError("a tool schema needs a name")
    parameters = field(source, "parameters") or {"type": "object", "properties": {}}
    return name, field(source, "description") or "", dict(parameters)


def wire_names(tools: Iterable[Any]) -> dict[str, str]:
    """Names that providers accept, which allow no dots, for the tools of one request.

    Returns:
        Own name to wire name: dots become underscores, collisions get ``_2``, ``_3``; a name
        without dots is kept.

    Example:
        >>> wire_names([{"name": "shop.refund"}, {"name": "shop_refund"}])
        {'shop_refund': 'shop_refund', 'shop.refund': 'shop_refund_2'}
    """
    names = list(dict.fromkeys(tool_names(tools)))
    wire = {name: name for name in names if "." not in name}
    taken = set(wire)
    for name in names:
        if name in wire:
            continue
        base = candidate = name.replace(".", "_")
        number = 1
        while candidate in taken:
            number += 1
            suffix = f"_{number}"
            candidate = base[: 64 - len(suffix)] + suffix
        taken.add(candidate)
        wire[name] = candidate
    return wire


def wire_name(names: Names | None, name: str) -> str:
    """The wire name of a call in the conversation, whether its tool is still offered or not.

    Example:
        >>> wire_name(None, "shop.refund")
        'shop_refund'
    """
    return (names or {}).get(name) or name.replace(".", "_")


def own_name(names: Names | None, wire: str) -> str:
    """The tool a response means by a wire name; an unknown one stays as it is.

    Example:
        >>> own_name({"shop.refund": "shop_refund"}, "shop_refund")
        'shop.refund'
    """
    return next((own for own, sent in (names or {}).items() if sent == wire), wire)


# Options


def check_options(factory: str, options: Mapping[str, Any], reserved: Iterable[str]) -> None:
    """Refuse options of a provider's ``create`` that the adapter itself sets or cannot serve.

    Raises:
        AgentConfigError: One is present.
    """
    clash = sorted(set(options) & set(reserved))
    if clash:
        raise AgentConfigError(f"{factory}: {clash[0]!r} is set by the adapter or not supported")
