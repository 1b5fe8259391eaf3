"""What the provider adapters share: reading SDK objects, prices, tool names, one model class.

The adapters themselves (guardchart.openai, guardchart.anthropic) hold only what differs: how
messages and tools are written in a provider's request and how its response is read.
"""

from __future__ import annotations

import importlib.util
import inspect
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from guardchart.agents._budgets import clamp_usage
from guardchart.agents._messages import Message, safe_text
from guardchart.agents._models import ModelResponse, ToolSchema, Usage, is_async_model, tool_names
from guardchart.errors import AgentConfigError, AgentError, MissingExtraError, NotSupportedError
from guardchart.gate import parse_arguments
from guardchart.gate._arguments import UNPARSEABLE

__all__ = [
    "Names",
    "ProviderModel",
    "check_options",
    "check_prices",
    "field",
    "items",
    "missing_sdk",
    "own_name",
    "price",
    "read_arguments",
    "read_usage",
    "require_sdk",
    "text_of",
    "tool_parts",
    "wire_name",
    "wire_names",
]

Names: TypeAlias = Mapping[str, str]
"""A tool's own name to its name on the wire."""

_PRICE_KEYS = frozenset({"input_per_mtok", "output_per_mtok"})
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
        >>> field({"id": "a"}, "id"), field(None, "id"), field(Usage(3), "input_tokens")
        ('a', None, 3)
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


# Prices and usage


def price(prices: Mapping[str, float] | None, tokens_in: int, tokens_out: int) -> float:
    """Cost of one call from a price sheet.

    Args:
        prices: ``{"input_per_mtok", "output_per_mtok"}`` in US dollars per million tokens, or
            None.
        tokens_in: Input tokens.
        tokens_out: Output tokens.

    Returns:
        US dollars; 0.0 without a price sheet.

    Source: xstate-statemachine, agents reference: provider helpers.

    Example:
        >>> price({"input_per_mtok": 3.0, "output_per_mtok": 15.0}, 1_000, 200)
        0.006
    """
    if not prices:
        return 0.0
    counted = clamp_usage(Usage(tokens_in, tokens_out))
    total = counted.input_tokens * prices.get("input_per_mtok", 0.0)
    total += counted.output_tokens * prices.get("output_per_mtok", 0.0)
    return total / 1_000_000


def check_prices(prices: Mapping[str, float] | None) -> dict[str, float] | None:
    """Check a price sheet when a model is built, so that no budget runs on a typo.

    Returns:
        A copy, or None.

    Raises:
        AgentConfigError: A key is unknown or missing, or a price is not a finite number of at
            least 0.

    Example:
        >>> check_prices({"input_per_mtok": 3})
        Traceback (most recent call last):
            ...
        guardchart.errors.AgentConfigError: prices: expected exactly input_per_mtok and \
output_per_mtok
    """
    sheet: Any = prices
    if sheet is None:
        return None
    if not isinstance(sheet, Mapping) or set(sheet) != _PRICE_KEYS:
        raise AgentConfigError("prices: expected exactly input_per_mtok and output_per_mtok")
    for key in sorted(_PRICE_KEYS):
        value: Any = sheet[key]
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not 0 <= value < math.inf:
            raise AgentConfigError(f"prices: {key} must be a finite number of at least 0")
    return dict(sheet)


def read_usage(prices: Mapping[str, float] | None, tokens_in: Any, tokens_out: Any) -> Usage:
    """Clamped usage with its price, from the counts a provider sent.

    Example:
        >>> read_usage(None, 12, -3)
        Usage(input_tokens=12, output_tokens=0, cost_usd=0.0)
    """
    counted = clamp_usage(Usage(tokens_in, tokens_out))
    cost = price(prices, counted.input_tokens, counted.output_tokens)
    return Usage(counted.input_tokens, counted.output_tokens, cost)


# Messages and tools


def text_of(message: Mapping[str, Any]) -> str:
    """Text of a message, ``""`` where it has none.

    Raises:
        NotSupportedError: The content is not text. Multimodal parts are not mapped yet.

    Example:
        >>> text_of({"role": "assistant", "content": None})
        ''
    """
    content = message.get("content")
    if content is None:
        return ""
    if not isinstance(content, str):
        raise NotSupportedError("only text content can be sent to this provider so far")
    return content


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


# The model


def check_options(factory: str, options: Mapping[str, Any], reserved: Iterable[str]) -> None:
    """Refuse options of a provider's ``create`` that the adapter itself sets or cannot serve.

    Raises:
        AgentConfigError: One is present.
    """
    clash = sorted(set(options) & set(reserved))
    if clash:
        raise AgentConfigError(f"{factory}: {clash[0]!r} is set by the adapter or not supported")


class ProviderModel:
    """A provider as a ``ModelCall``: build the request, call ``create``, read the response.

    Args:
        create: The SDK's method; whether it is async decides ``is_async``.
        name: The model's name.
        request: ``(messages, tools, names) -> keyword arguments of create``.
        parse: ``(response, names) -> ModelResponse``.
        prices: The price sheet, or None.
        max_output_tokens: The cap on one answer that each request declares, or None.

    Streaming will be a second method beside ``__call__``.
    """

    def __init__(
        self,
        create: Callable[..., Any],
        name: str,
        *,
        request: Callable[[Sequence[Message], Sequence[ToolSchema], Names], dict[str, Any]],
        parse: Callable[[Any, Names], ModelResponse],
        prices: Mapping[str, float] | None = None,
        max_output_tokens: int | None = None,
    ) -> None:
        self.name = name
        self.prices = prices
        self.max_output_tokens = max_output_tokens
        # SDKs wrap their methods, so an async one looks plain until it is unwrapped.
        self.is_async = is_async_model(create) or not inspect.isroutine(create)
        self._create = create
        self._request = request
        self._parse = parse

    def __call__(
        self, messages: list[Message], tools: list[ToolSchema]
    ) -> ModelResponse | Awaitable[ModelResponse]:
        """Ask the provider for one turn.

        Raises:
            AgentError: The response has no answer in it. The SDK's own errors pass through.
        """
        names = wire_names(tools)
        request = self._request(messages, tools, names)
        if self.is_async:
            return self._finish(request, names)
        answer = self._create(**request)
        if inspect.isawaitable(answer):  # a plain wrapper around an async client
            return self._later(answer, names)
        return self._parse(answer, names)

    async def _finish(self, request: dict[str, Any], names: Names) -> ModelResponse:
        answer = self._create(**request)
        return self._parse(await answer if inspect.isawaitable(answer) else answer, names)

    async def _later(self, answer: Awaitable[Any], names: Names) -> ModelResponse:
        return self._parse(await answer, names)
