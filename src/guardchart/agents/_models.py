"""What the loop knows of a model: a call, a response, its usage, and a scripted fake.

A ``ModelCall`` is any callable ``(messages, tools) -> ModelResponse``, plain or async. The
adapters for real providers live in guardchart.openai and guardchart.anthropic. Three methods are
optional: ``stream(messages, tools, on_chunk)`` gives the same turn and tells its text piece by
piece, ``capped(max_output_tokens)`` gives a model whose answers have at most so many tokens, and
``with_settings(settings)`` one that is asked with other settings.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import inspect
import marshal
import re
import threading
import uuid
import weakref
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, TypeAlias

from guardchart.agents._messages import Message
from guardchart.agents._retry import RetryPolicy
from guardchart.errors import AgentConfigError, AgentError
from guardchart.gate import ToolCall

__all__ = [
    "FakeModel",
    "ModelCall",
    "ModelResponse",
    "ModelSettings",
    "RetryPolicy",
    "ToolSchema",
    "Usage",
    "is_async_model",
    "reports_cost",
    "tool_names",
]

ToolSchema: TypeAlias = dict[str, Any]
"""One tool as a model is told of it: ``{"name", "description", "parameters"}``."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What one model call consumed, as the provider reports it.

    Untrusted: numbers may be negative, NaN or no numbers at all until ``clamp_usage`` has seen
    them.

    Args:
        input_tokens: Tokens of the request, cached ones included.
        output_tokens: Tokens of the answer.
        cost_usd: Price of the call in US dollars; 0 where no prices are known.

    Example:
        >>> Usage(12, 3).input_tokens
        12
    """

    input_tokens: int = 0
    output_tokens: int = 0
    cost_usd: float = 0.0


_UNUSED: Final = Usage()


@dataclass(frozen=True, init=False)
class ModelResponse:
    """One answer of a model: text, proposed tool calls, or both.

    Args:
        text: The answer, or None where the model only proposes calls.
        tool_calls: Proposed calls, in the model's order; kept as a tuple.
        usage: What the call consumed.
        model: The model's name, as the provider gives it.
        finish_reason: Why the answer ended, in the provider's words.

    Example:
        >>> ModelResponse("hello").tool_calls
        ()
    """

    text: str | None = None
    tool_calls: Sequence[ToolCall] = ()
    usage: Usage = _UNUSED
    model: str | None = None
    finish_reason: str | None = None

    # Each turn makes several, and the __init__ of a frozen dataclass sets field by field.
    def __init__(
        self,
        text: str | None = None,
        tool_calls: Sequence[ToolCall] = (),
        usage: Usage = _UNUSED,
        model: str | None = None,
        finish_reason: str | None = None,
    ) -> None:
        fields = vars(self)
        fields["text"] = text
        fields["tool_calls"] = tool_calls if type(tool_calls) is tuple else tuple(tool_calls or ())
        fields["usage"] = usage
        fields["model"] = model
        fields["finish_reason"] = finish_reason

    def __post_init__(self) -> None:
        """What the ``__init__`` of a dataclass that is made of this one calls."""
        if type(self.tool_calls) is not tuple:
            vars(self)["tool_calls"] = tuple(self.tool_calls or ())


ModelCall: TypeAlias = Callable[
    [list[Message], list[ToolSchema]], ModelResponse | Awaitable[ModelResponse]
]
"""A model: ``(messages, tools) -> ModelResponse``, sync or async; messages newest last."""


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """What one request wants of a model beside its own options; None says nothing.

    A model that can be asked for it has ``with_settings(settings)``, which returns a
    ``ModelCall``; others answer with the options they were made with.

    Args:
        force_tool: Whether exactly one of the tools must be called.
        temperature: Sampling temperature.
        max_output_tokens: Largest answer, in tokens.
        top_p: Nucleus sampling.
        top_k: Number of candidates for sampling.
        seed: Sampling seed.
        stop_sequences: Texts that end the answer.

    Example:
        >>> ModelSettings(force_tool=True).given()
        {'force_tool': True}
    """

    force_tool: bool = False
    temperature: float | None = None
    max_output_tokens: int | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop_sequences: Sequence[str] | None = None

    def given(self) -> dict[str, Any]:
        """The settings that say something."""
        pairs = ((each.name, getattr(self, each.name)) for each in fields(self))
        return {name: value for name, value in pairs if value is not None and value is not False}


def is_async_model(model: object) -> bool:
    """Tell whether calling a model returns an awaitable.

    A boolean ``is_async`` attribute decides; without one, the callable itself, its
    ``__call__``, and what ``functools.partial`` or ``functools.wraps`` hides.

    Returns:
        True for an async model, False for a plain one. A plain function that returns an
        awaitable all the same cannot be known before it is called.

    Example:
        >>> is_async_model(FakeModel([])), is_async_model(FakeModel([], is_async=False))
        (True, False)
    """
    declared = getattr(model, "is_async", None)
    if isinstance(declared, bool):
        return declared
    function: Any = model
    while isinstance(function, functools.partial):
        function = function.func
    if not callable(function):
        return False
    if not (inspect.isroutine(function) or inspect.isclass(function)):
        function = type(function).__call__
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        inspect.unwrap(function)
    )


def reports_cost(model: object) -> bool:
    """Tell whether a model can report what its calls cost.

    Returns:
        False only for a model that has a ``prices`` attribute and no price sheet in it: its
        ``cost_usd`` stays 0, so a cost budget would never trip.

    Example:
        >>> reports_cost(FakeModel([]))
        True
    """
    return getattr(model, "prices", True) is not None


def tool_names(tools: Iterable[Any]) -> list[str]:
    """Names of tool schemas, in their order.

    Args:
        tools: Schemas (with ``name`` on top or under ``function``) or ``Tool`` objects.

    Example:
        >>> tool_names([{"name": "a"}, {"type": "function", "function": {"name": "b"}}])
        ['a', 'b']
    """
    names = []
    for item in tools:
        if type(item) is dict or isinstance(item, Mapping):
            inner = item.get("function")
            name = item.get("name") or (inner.get("name") if isinstance(inner, Mapping) else None)
        else:
            name = getattr(item, "name", None)
        names.append(str(name))
    return names


# The fake

_ITEM_KEYS = frozenset({"text", "tool", "args", "tool_calls", "hang", "usage", "id"})
_CALL_KEYS = frozenset({"tool", "name", "args", "arguments", "id"})
_USAGE_KEYS = frozenset(f.name for f in fields(Usage))


class FakeModel:
    """A scripted model: deterministic, offline, usable wherever a ``ModelCall`` is.

    One item of the script answers one call: ``{"text": ...}``; ``{"tool": name, "args":
    {...}}``, ``id`` optional; ``{"tool_calls": [{"tool", "args", "id"?}, ...]}``;
    ``{"hang": True}``, which never answers; a ``ModelResponse``; or an exception, which is
    raised. Text and calls may stand in one item, and each item may bring its ``usage``.

    Args:
        script: The items, first call first.
        is_async: Whether calls are awaited; False pairs with the sync engine.
        name: The model name in responses.
        default_usage: Usage of items that bring none: a ``Usage`` or a mapping of its fields.

    Raises:
        AgentConfigError: An item has an unknown shape; the message gives its index.

    Attributes:
        bounded: Whether every call ends by itself, at once; True unless an item hangs.
        only_reads: True: the messages of a request are copied before they are kept, and never
            changed.

    Source: xstate-statemachine, agents reference: FakeModel.

    Example:
        >>> model = FakeModel([{"text": "hi"}], is_async=False)
        >>> model([{"role": "user", "content": "hello"}], []).text
        'hi'
        >>> model.calls[0]["messages"][0]["content"]
        'hello'
    """

    only_reads = True

    def __init__(
        self,
        script: Iterable[Any],
        *,
        is_async: bool = True,
        name: str = "fake",
        default_usage: Usage | Mapping[str, Any] | None = None,
    ) -> None:
        self.is_async = bool(is_async)
        self.name = name
        self._calls: list[dict[str, Any]] = []
        self._unread: list[tuple[bytes | list[Message], list[str]]] = []
        usage = _usage(default_usage, "default_usage")
        self._script = tuple(_item(item, i, name, usage) for i, item in enumerate(script))
        self.bounded = _HANG not in self._script
        self._next = 0
        self._lock = threading.Lock()
        self._released = threading.Event()

    @property
    def calls(self) -> list[dict[str, Any]]:
        """What each call was sent, ``{"messages": [...], "tools": [names]}``; always one list."""
        with self._lock:
            for kept, names in self._unread:
                messages = marshal.loads(kept) if isinstance(kept, bytes) else kept
                self._calls.append({"messages": messages, "tools": names})
            self._unread.clear()
        return self._calls

    def __call__(
        self, messages: list[Message], tools: list[ToolSchema]
    ) -> ModelResponse | Awaitable[ModelResponse]:
        """Answer with the script's next item.

        Raises:
            AgentError: The script is exhausted, or a hanging call was released.
        """
        return (
            self._answer_async(messages, tools) if self.is_async else self._answer(messages, tools)
        )

    def stream(
        self,
        messages: list[Message],
        tools: list[ToolSchema],
        on_chunk: Callable[[str], Any] | None = None,
    ) -> ModelResponse | Awaitable[ModelResponse]:
        """Answer with the script's next item, its text told word by word.

        Example:
            >>> words = []
            >>> model = FakeModel([{"text": "It is sunny."}], is_async=False)
            >>> model.stream([], [], words.append).text, words
            ('It is sunny.', ['It', ' is', ' sunny.'])
        """
        answer: Any = self(messages, tools)
        if self.is_async:
            return self._stream_async(answer, on_chunk)
        for piece in _pieces(answer.text, on_chunk):
            piece()
        return answer  # type: ignore[no-any-return]

    async def _stream_async(self, answer: Any, on_chunk: Any) -> ModelResponse:
        turn: ModelResponse = await answer
        for piece in _pieces(turn.text, on_chunk):
            piece()
            await asyncio.sleep(0)
        return turn

    def release(self) -> None:
        """Let every sync call that hangs, now or later, raise ``AgentError`` instead."""
        self._released.set()

    def _take(self, messages: Sequence[Message], tools: Iterable[Any]) -> Any:
        kept: Any = list(messages)
        try:
            # A long conversation costs next to nothing until somebody looks.
            kept = marshal.dumps(kept)
        except ValueError:  # there is more in it than plain data
            kept = list(map(dict, kept))
        names = tool_names(tools)
        with self._lock:
            n = self._next
            if n >= len(self._script):
                raise AgentError(f"FakeModel script exhausted after {n} call(s)")
            self._next = n + 1
            self._unread.append((kept, names))
        item = self._script[n]
        if isinstance(item, ModelResponse) or item is _HANG:
            return item
        if isinstance(item, _Turn):
            return item.response()
        raise item

    def _answer(self, messages: Sequence[Message], tools: Iterable[Any]) -> ModelResponse:
        answer = self._take(messages, tools)
        if answer is _HANG:
            _release_at_exit(self._released)
            self._released.wait()
            raise AgentError("FakeModel released a call that was hanging")
        return answer  # type: ignore[no-any-return]

    async def _answer_async(
        self, messages: Sequence[Message], tools: Iterable[Any]
    ) -> ModelResponse:
        answer = self._take(messages, tools)
        if answer is _HANG:
            await asyncio.get_running_loop().create_future()
        return answer  # type: ignore[no-any-return]


def _pieces(text: Any, on_chunk: Any) -> Iterable[Callable[[], Any]]:
    if on_chunk is None or not isinstance(text, str):
        return ()
    return (functools.partial(on_chunk, piece) for piece in re.findall(r"\s*\S+|\s+$", text))


class _Hang:
    """The type of the one item that never answers."""


_HANG = _Hang()


@dataclass(frozen=True, slots=True)
class _Turn:
    """A scripted answer; calls without an id get a fresh one each time it is played."""

    text: str | None
    calls: tuple[tuple[str | None, str, Any], ...]
    usage: Usage
    model: str

    def response(self) -> ModelResponse:
        calls = tuple(
            ToolCall(_fresh_id() if id_ is None else id_, name, args)
            for id_, name, args in self.calls
        )
        return ModelResponse(self.text, calls, self.usage, self.model)


def _fresh_id() -> str:
    return f"call_{uuid.uuid4().hex[:16]}"


def _item(item: Any, index: int, model: str, default: Usage) -> Any:
    where = f"FakeModel script[{index}]"
    if isinstance(item, ModelResponse | BaseException):
        return item
    if isinstance(item, type) and issubclass(item, BaseException):
        return item
    if not isinstance(item, Mapping):
        raise AgentConfigError(
            f"{where}: expected a mapping, a ModelResponse or an exception, "
            f"not {type(item).__name__}"
        )
    _known(item, _ITEM_KEYS, where)
    if "hang" in item:
        if item["hang"] is not True or len(item) != 1:
            raise AgentConfigError(f'{where}: write {{"hang": True}} and nothing beside it')
        return _HANG
    calls = [_call(c, f"{where}.tool_calls[{i}]") for i, c in enumerate(item.get("tool_calls", ()))]
    if "tool" in item:
        calls.insert(0, (item.get("id"), item["tool"], _arguments(item.get("args"))))
    elif "args" in item or "id" in item:
        raise AgentConfigError(f"{where}: `args` and `id` need a `tool` beside them")
    elif "text" not in item and "tool_calls" not in item:
        raise AgentConfigError(f"{where}: expected `text`, `tool`, `tool_calls` or `hang`")
    usage = _usage(item["usage"], f"{where}.usage") if "usage" in item else default
    return _Turn(item.get("text"), tuple(calls), usage, model)


def _call(call: Any, where: str) -> tuple[str | None, str, Any]:
    if isinstance(call, ToolCall):
        return call.id, call.name, call.arguments
    if not isinstance(call, Mapping):
        raise AgentConfigError(f"{where}: expected a mapping or a ToolCall")
    _known(call, _CALL_KEYS, where)
    if ("tool" in call) == ("name" in call):
        raise AgentConfigError(f"{where}: expected exactly one of `tool` and `name`")
    if "args" in call and "arguments" in call:
        raise AgentConfigError(f"{where}: expected at most one of `args` and `arguments`")
    name = call["tool"] if "tool" in call else call["name"]
    return call.get("id"), name, _arguments(call.get("args", call.get("arguments")))


def _arguments(value: Any) -> Any:
    return {} if value is None else value


def _known(item: Mapping[Any, Any], keys: frozenset[str], where: str) -> None:
    unknown = sorted(str(key) for key in item if key not in keys)
    if unknown:
        raise AgentConfigError(f"{where}: unknown key {unknown[0]!r}; known are {sorted(keys)}")


def _usage(value: Usage | Mapping[str, Any] | None, where: str) -> Usage:
    if value is None:
        return Usage()
    if isinstance(value, Usage):
        return value
    if not isinstance(value, Mapping):
        raise AgentConfigError(f"{where}: expected a Usage or a mapping of its fields")
    _known(value, _USAGE_KEYS, where)
    return Usage(**value)


_hanging: weakref.WeakSet[threading.Event] = weakref.WeakSet()
_hook_lock = threading.Lock()
_hooked = False


def _release_at_exit(event: threading.Event) -> None:
    """Set the event when the interpreter shuts down, before it joins its worker threads."""
    global _hooked
    with _hook_lock:
        _hanging.add(event)
        if _hooked:
            return
        _hooked = True
    # atexit runs after threads are joined, which is too late for a call that hangs in
    # asyncio.to_thread: the executor would wait for it. Importing the executor first puts our
    # hook before its own, since they run newest first.
    import concurrent.futures.thread  # noqa: F401

    register = getattr(threading, "_register_atexit", atexit.register)
    try:
        register(_release_all)
    except RuntimeError:  # the interpreter is shutting down already
        _release_all()


def _release_all() -> None:
    for event in tuple(_hanging):
        event.set()
