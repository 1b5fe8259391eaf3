"""How the loop's services tell tracers of model and tool calls.

A tracer is the ``tracer=`` of an ``agent_logic``, or a plugin of the interpreter with the
methods of `Tracer`; one that is both is told once. Whatever it raises is logged and changes
nothing about the call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Final, Protocol, Self

from guardchart.errors import AgentError
from guardchart.runtime import ServiceScope
from guardchart.runtime._plugins import contained

__all__ = ["Tracer", "Watch", "chunk_listener", "is_watched", "watch_model", "watch_tool"]

Ended = Callable[[Any, BaseException | None], None]
"""``(result, error)``: how a call ended; both None where it was answered by nothing."""


class Tracer(Protocol):
    """What a tracer is told; each method returns what is called when the call has ended."""

    def begin_model_call(
        self, scope: ServiceScope, model: Any, messages: Sequence[Any], tools: Sequence[Any]
    ) -> Ended:
        """A model is about to be asked; ends with its `ModelResponse`."""

    def begin_tool_call(self, scope: ServiceScope, call: Any, tool: Any) -> Ended:
        """A call is about to be authorised and run; ends with the gate's `Outcome`."""


class Watch:
    """The tracers of one call, as a ``with`` block around it."""

    __slots__ = ("_ends", "_result")

    def __init__(self, ends: Sequence[Ended]) -> None:
        self._ends = ends
        self._result: Any = None

    def ended(self, result: Any) -> None:
        """Note the result that the tracers are told at the end of the block."""
        self._result = result

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        for end in self._ends:
            contained("the end of a call", end, self._result, error)


class _Unwatched(Watch):
    """Shared by all calls that nobody looks at, so it keeps nothing."""

    __slots__ = ()

    def ended(self, result: Any) -> None:
        """Nobody is told."""


_UNWATCHED: Final = _Unwatched(())


def is_watched(scope: ServiceScope | None) -> bool:
    """Whether anybody may look on; False is certain."""
    return scope is not None and bool(
        scope.interpreter.plugins or scope.logic.attachments.get("tracer") is not None
    )


def watch_model(
    scope: ServiceScope | None, model: Any, messages: Sequence[Any], tools: Sequence[Any]
) -> Watch:
    """Tell whoever looks on that the model is about to be asked."""
    return _watch(scope, "begin_model_call", model, messages, tools)


def watch_tool(scope: ServiceScope | None, call: Any, tool: Any) -> Watch:
    """Tell whoever looks on that a call is about to be authorised and run."""
    return _watch(scope, "begin_tool_call", call, tool)


def _watch(scope: ServiceScope | None, method: str, *args: Any) -> Watch:
    if scope is None:
        return _UNWATCHED
    tracer = scope.logic.attachments.get("tracer")
    plugins = scope.interpreter.plugins
    if tracer is None and not plugins:
        return _UNWATCHED
    begun: list[Ended] = []

    def begin(start: Callable[..., Ended]) -> None:
        begun.append(start(scope, *args))

    for each in plugins if tracer is None or tracer in plugins else (*plugins, tracer):
        start = getattr(each, method, None)
        if start is not None:
            contained("the beginning of a call", begin, start)
    return Watch(begun) if begun else _UNWATCHED


def chunk_listener(scope: ServiceScope | None) -> Callable[[str], None] | None:
    """Who is told the pieces of an answer as they arrive; None where nobody is.

    Plugins with ``on_chunk``, and the chart itself where it handles ``STREAM``, whose ``data``
    is then ``{"delta": text}``.

    Returns:
        What to call with each piece, on the thread where the answer is read. It raises
        ``AgentError`` once the state has been left, which ends the stream.
    """
    if scope is None:
        return None
    interpreter, invocation = scope.interpreter, scope.invocation
    told = [each.on_chunk for each in interpreter.plugins if hasattr(each, "on_chunk")]
    charted = "STREAM" in interpreter.machine.event_types
    if not told and not charted:
        return None

    def tell(chunk: str) -> None:
        if not scope.active:
            raise AgentError("the answer is not waited for any more")
        for each in told:
            contained("on_chunk", each, interpreter, invocation, chunk)
        if charted:
            contained("STREAM", scope.stream, {"delta": chunk})

    return tell
