"""A provider as a ``ModelCall``: whole answers, and answers piece by piece."""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, Self, TypeAlias

from guardchart.agents._messages import Message
from guardchart.agents._models import (
    ModelResponse,
    ModelSettings,
    ToolSchema,
    Usage,
    is_async_model,
)
from guardchart.agents._prices import PackagedPrices, Prices, packaged_prices, read_usage
from guardchart.agents._providers import Names, wire_names
from guardchart.errors import AgentConfigError, AgentError

__all__ = ["BROKEN_OFF", "OnChunk", "ProviderModel", "StreamReader", "provider_prices"]

BROKEN_OFF = "the provider's stream broke off before its end"

OnChunk: TypeAlias = Callable[[str], Any]
"""Called with each piece of an answer's text, in order."""

Request: TypeAlias = Callable[[Sequence[Any], Sequence[ToolSchema], Names], dict[str, Any]]
Parse: TypeAlias = Callable[[Any, Names], ModelResponse]


class StreamReader(Protocol):
    """Puts the events of one stream together."""

    def add(self, event: Any) -> str | None:
        """Take one event in; returns the text it brings, if any."""

    def complete(self) -> bool:
        """Whether the answer came to its end."""

    def response(self) -> dict[str, Any]:
        """The answer as the provider gives it when it does not stream."""

    def counts(self) -> tuple[Any, Any]:
        """Input and output tokens as reported so far, None where nothing was."""

    def size(self) -> int:
        """How many characters were received so far, arguments of calls included."""


class ProviderModel:
    """A provider as a ``ModelCall``: build the request, call ``create``, read the response.

    Args:
        create: The SDK's method; whether it is async decides ``is_async``.
        name: The model's name.
        request: ``(messages, tools, names) -> keyword arguments of create``.
        parse: ``(response, names) -> ModelResponse``.
        reader: Makes a `StreamReader`; None for a provider that does not stream.
        stream_options: What ``create`` is given to make it stream.
        cap_option: The option of ``create`` that caps one answer.
        provider: The provider's name in traces.
        prices: What calls cost, or None where nobody knows.
        max_output_tokens: The cap on one answer that each request declares, or None.
        settings: ``settings -> keyword arguments of create``, the cap left out.
    """

    only_reads = True

    def __init__(
        self,
        create: Callable[..., Any],
        name: str,
        *,
        request: Request,
        parse: Parse,
        reader: Callable[[], StreamReader] | None = None,
        stream_options: Mapping[str, Any] | None = None,
        cap_option: str = "max_tokens",
        provider: str | None = None,
        prices: Prices | None = None,
        max_output_tokens: int | None = None,
        settings: Callable[[ModelSettings], dict[str, Any]] | None = None,
    ) -> None:
        self.name = name
        self.provider = provider
        self.prices = prices
        self.max_output_tokens = max_output_tokens
        # SDKs wrap their methods, so an async one looks plain until it is unwrapped.
        self.is_async = is_async_model(create) or not inspect.isroutine(create)
        self._create = create
        self._make_request = request
        self._parse = parse
        self._reader = reader
        self._stream_options = dict(stream_options or {})
        self._cap_option = cap_option
        self._settings = settings
        self._wanted: dict[str, Any] = {}

    def capped(self, max_output_tokens: int) -> Self:
        """The same model, whose answers have at most so many tokens.

        Returns:
            Itself where its own cap is as small already.

        Example:
            >>> model = ProviderModel(print, "m", request=lambda *_: {}, parse=print)
            >>> model.capped(50).max_output_tokens, model.max_output_tokens
            (50, None)
        """
        cap: Any = max_output_tokens
        if type(cap) is not int or cap < 1:
            raise AgentConfigError("capped: expected a number of tokens of at least 1")
        own = self.max_output_tokens
        if isinstance(own, int) and own <= cap:
            return self
        made = copy.copy(self)
        made.max_output_tokens = cap
        return made

    def with_settings(self, settings: ModelSettings) -> Self:
        """The same model, asked with these settings in place of its own options.

        Returns:
            A new model. What the provider does not take is left out, and a cap larger than the
            model's own stays without effect.
        """
        cap = settings.max_output_tokens
        made = copy.copy(self if cap is None else self.capped(cap))
        wanted = {} if self._settings is None else self._settings(settings)
        made._wanted = {key: value for key, value in wanted.items() if _takes(self._create, key)}
        return made

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

    def _request(
        self, messages: Sequence[Any], tools: Sequence[ToolSchema], names: Names
    ) -> dict[str, Any]:
        request = {**self._make_request(messages, tools, names), **self._wanted}
        if not tools:  # which a state may allow none of; APIs refuse these without any
            request = {key: value for key, value in request.items() if key not in _ABOUT_TOOLS}
        if self.max_output_tokens is not None:
            request[self._cap_option] = self.max_output_tokens
        return request

    # Streaming

    def stream(
        self,
        messages: list[Message],
        tools: list[ToolSchema],
        on_chunk: OnChunk | None = None,
    ) -> ModelResponse | Awaitable[ModelResponse]:
        """Ask for one turn, and tell each piece of its text as it arrives.

        Args:
            messages: The conversation, newest last.
            tools: The tools of the state.
            on_chunk: Called with each piece, in order, where the stream is read. What it raises
                ends the stream.

        Returns:
            The whole turn, as a call without streaming gives it; an awaitable of it for an
            async model.

        Raises:
            AgentError: The stream ended before its answer did. The SDK's own errors pass
                through. What was used so far is the error's ``usage``, also of a call that is
                cancelled: as the provider reported it, else an estimate from the text.
        """
        if self._reader is None:
            raise AgentConfigError(f"the model {self.name!r} does not stream")
        names = wire_names(tools)
        request = {**self._stream_options, **self._request(messages, tools, names)}
        for key in self._stream_options:
            if request[key] is None:  # a service that does not know the option
                del request[key]
        reading = _Reading(self, self._reader(), request, names, on_chunk)
        if self.is_async:
            return reading.aread(None)
        events = self._create(**request)
        if inspect.isawaitable(events):
            return reading.aread(events)
        return reading.read(events)


class _Reading:
    """One stream being read."""

    def __init__(
        self,
        model: ProviderModel,
        reader: StreamReader,
        request: dict[str, Any],
        names: Names,
        on_chunk: OnChunk | None,
    ) -> None:
        self.model = model
        self.reader = reader
        self.request = request
        self.names = names
        self.on_chunk = on_chunk
        self.opened = False

    @contextlib.contextmanager
    def charged(self) -> Iterator[None]:
        """Tell an error that leaves what was used until then."""
        try:
            yield
        except BaseException as error:
            if self.opened:  # before that nobody has taken the request
                with contextlib.suppress(Exception):
                    error.usage = self.used()  # type: ignore[attr-defined]
            raise

    def used(self) -> Usage:
        """What the provider reported so far; an estimate from the text where it did not."""
        tokens_in, tokens_out = self.reader.counts()
        if not tokens_in:
            tokens_in = _estimate(_text_size(self.request))
        tokens_out = max(tokens_out or 0, _estimate(self.reader.size()))
        return read_usage(self.model.prices, tokens_in, tokens_out, model=self.model.name)

    def take(self, event: Any) -> None:
        text = self.reader.add(event)
        if text and self.on_chunk is not None:
            self.on_chunk(text)

    def end(self) -> ModelResponse:
        if not self.reader.complete():
            raise AgentError(BROKEN_OFF)
        return self.model._parse(self.reader.response(), self.names)

    def whole(self, answer: Any) -> ModelResponse | None:
        """The turn of a service that does not stream though it was asked to."""
        if not isinstance(answer, Mapping) and not hasattr(answer, "model_dump"):
            return None
        turn = self.model._parse(answer, self.names)
        if turn.text and self.on_chunk is not None:
            self.on_chunk(turn.text)
        return turn

    def read(self, events: Any) -> ModelResponse:
        self.opened = True
        with self.charged():
            if (turn := self.whole(events)) is not None:
                return turn
            try:
                for event in events:
                    self.take(event)
            finally:
                close = getattr(events, "close", None)
                if close is not None:
                    close()
            return self.end()

    async def aread(self, opening: Awaitable[Any] | None) -> ModelResponse:
        with self.charged():
            events: Any = self.model._create(**self.request) if opening is None else opening
            if inspect.isawaitable(events):
                events = await events
            self.opened = True
            if (turn := self.whole(events)) is not None:
                return turn
            try:
                if hasattr(events, "__aiter__"):
                    async for event in events:
                        self.take(event)
                else:
                    for event in events:
                        self.take(event)
            finally:
                close = getattr(events, "close", None) or getattr(events, "aclose", None)
                closing = close() if close is not None else None
                if inspect.isawaitable(closing):
                    await closing
            return self.end()


_ABOUT_TOOLS = frozenset({"tool_choice", "parallel_tool_calls"})


def _takes(create: Callable[..., Any], option: str) -> bool:
    """Whether an SDK's method has this option; new versions drop some."""
    try:
        parameters = inspect.signature(create).parameters
    except (TypeError, ValueError):  # a builtin that does not say
        return True
    return option in parameters or any(
        each.kind is each.VAR_KEYWORD for each in parameters.values()
    )


_CHARS_PER_TOKEN = 3.0
_NO_TEXT = frozenset({"data", "url", "file_data", "image_url"})


def _estimate(chars: int) -> int:
    """Tokens of so much text; rather too many than too few."""
    return math.ceil(chars / _CHARS_PER_TOKEN)


def _text_size(value: Any) -> int:
    """How much text a request holds, images and files left out."""
    size, todo = 0, [value]
    while todo:
        item = todo.pop()
        if isinstance(item, str):
            size += len(item)
        elif isinstance(item, Mapping):
            todo.extend(each for key, each in item.items() if key not in _NO_TEXT)
        elif isinstance(item, list | tuple):
            todo.extend(item)
    return size


def provider_prices(client: Any, model: str, sheet: Mapping[str, float] | None) -> Prices | None:
    """The prices of a model: the sheet that was given, else what genai-prices knows."""
    if sheet is not None:
        return sheet
    url = getattr(client, "base_url", None)
    found: PackagedPrices | None = None
    if url is not None:
        found = packaged_prices(model, url)
    return found
