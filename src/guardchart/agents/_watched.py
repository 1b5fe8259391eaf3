"""Executors of text and decision requests, as tracers see them: as model calls."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

from guardchart.agents._models import ModelResponse, Usage
from guardchart.agents._observe import Watch, is_watched, watch_model
from guardchart.agents._requests import (
    AgentExecutorInfo,
    ModelRequest,
    as_generated,
    call_executor,
    settled,
)
from guardchart.runtime import ServiceScope

__all__ = ["watched_executor"]


class _Asked:
    """A request as the model it names."""

    def __init__(self, request: ModelRequest) -> None:
        self.name = request.model
        self.max_output_tokens = request.max_output_tokens


class _Messages(Sequence[Any]):
    """A request's conversation in JSON, written out only where a trace records content."""

    def __init__(self, request: ModelRequest) -> None:
        self._request = request
        self._made: list[Any] | None = None

    def _messages(self) -> list[Any]:
        if self._made is None:
            asked = self._request
            made: list[Any] = [{"role": "system", "content": asked.system}] if asked.system else []
            made += [each.to_json() for each in asked.messages or ()]
            if asked.prompt:
                made.append({"role": "user", "content": asked.prompt})
            self._made = made
        return self._made

    def __len__(self) -> int:
        return len(self._messages())

    def __getitem__(self, index: Any) -> Any:
        return self._messages()[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._messages())


def watched_executor(
    scope: ServiceScope | None, executor: Callable[..., Any]
) -> Callable[..., Any]:
    """The executor, each of whose calls is told to the tracers; itself where there are none."""
    if not is_watched(scope):
        return executor

    def watched(request: Any, info: AgentExecutorInfo) -> Any:
        watch = watch_model(scope, _Asked(request), _Messages(request), ())
        try:
            result = call_executor(executor, request, info)
        except BaseException as error:
            watch.__exit__(type(error), error, error.__traceback__)
            raise
        if inspect.isawaitable(result):
            return _later(watch, result)
        with watch:
            watch.ended(_response(result))
        return result

    return watched


async def _later(watch: Watch, result: Awaitable[Any]) -> Any:
    with watch:
        answer = await settled(result)
        watch.ended(_response(answer))
    return answer


def _response(result: Any) -> ModelResponse:
    """What a tracer is told of an answer."""
    made = as_generated(result)
    usage: Any = made.usage
    if isinstance(usage, Mapping):
        usage = Usage(**{name: usage[name] for name in _USAGE if name in usage})
    text = made.output if isinstance(made.output, str) else None
    model = getattr(made.raw, "model", None)
    return ModelResponse(
        text,
        usage=usage if isinstance(usage, Usage) else Usage(),
        model=model if isinstance(model, str) else None,
    )


_USAGE = ("input_tokens", "output_tokens", "cost_usd")
