"""What text logic, decision logic and user input have in common: a service with an executor.

Such a service is *unbound* until it has an executor: of its own (``with_executor``) or that of a
host (`Binding`). An unbound one can be asked for its request and cannot be run.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, Final, Self, TypeVar

import pydantic
from pydantic import ConfigDict

from guardchart.agents._models import is_async_model
from guardchart.agents._parts import AgentMessage
from guardchart.agents._requests import (
    AbortSignal,
    AgentExecutorInfo,
    AgentRequestExecutors,
    Generated,
    executor_form,
)
from guardchart.agents._watched import watched_executor
from guardchart.agents._wire import Wire, wire_error
from guardchart.errors import AgentConfigError, ChartError
from guardchart.gate._schema import declared_names, errors_text
from guardchart.kernel import Invoke, Machine

__all__ = [
    "Binding",
    "Configured",
    "FromInput",
    "RequestLogic",
    "Sampling",
    "Settings",
    "fit_error",
    "made_request",
]

Settings = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Binding:
    """What a host gives the request logic of a machine.

    Attributes:
        executors: The host's executors.
        live: Whether the host speaks for the machine: guards are checked before a decision is
            taken, and a decision without ``allowed_events`` may choose among all that is
            accepted. A bare interpreter does neither.
        before_call: Called with the request before each executor call, on the thread that will
            make it; what it raises becomes the service's failure.
        on_result: Called with the request and what the executor gave.
        on_chunk: Called with each piece of a streamed text and its request.
        signal: Handed to executors; ends decisions and waits.
    """

    executors: AgentRequestExecutors = field(default_factory=AgentRequestExecutors)
    live: bool = True
    before_call: Callable[[Any], None] | None = None
    on_result: Callable[[Any, Generated], None] | None = None
    on_chunk: Callable[[str, Any], None] | None = None
    signal: AbortSignal | None = None


_BARE: Final = Binding(live=False)
_MODELS: Final = frozenset({"text", "decision"})


class Configured:
    """Settings written in Python: values, or functions of the invoke's input.

    Args:
        what: How to name it in an error.
        fields: Values or functions by name; None says nothing.
        input: The pydantic type of the input, which functions then get validated.

    Raises:
        AgentConfigError: A function is async or does not take one argument.
    """

    def __init__(self, what: str, fields: Mapping[str, Any], input: Any = None) -> None:
        self.fields = {name: value for name, value in fields.items() if value is not None}
        self._input: pydantic.TypeAdapter[Any] | None = None
        self._what = what
        if input is not None:
            self._input = pydantic.TypeAdapter(input)
        for name, value in self.fields.items():
            if callable(value):
                _check_function(f"{what}: {name}", value)

    def read(self, given: Any) -> Settings:
        """The settings for this input.

        Raises:
            AgentConfigError: The input does not fit its type.
        """
        if self._input is not None:
            try:
                given = self._input.validate_python(given)
            except pydantic.ValidationError as error:
                told = fit_error(self._input, error)
                raise AgentConfigError(f"{self._what}: input: {told}") from None
        return {
            name: value(given) if callable(value) else value for name, value in self.fields.items()
        }

    def static(self, invoke: Invoke) -> Settings:
        """The settings that are known without an input."""
        return {name: value for name, value in self.fields.items() if not callable(value)}


def fit_error(adapter: pydantic.TypeAdapter[Any], error: pydantic.ValidationError) -> str:
    """What does not fit a type of the application's: declared names, no value.

    A type that has no JSON Schema declares no names, so that none is shown.
    """
    errors: list[Any] = error.errors(include_url=False, include_input=False)
    try:
        declared = declared_names(adapter.json_schema(), set())
    except Exception:  # whatever the type's own schema hook raises
        declared = set()
    return errors_text(errors, frozenset(declared))


def _check_function(what: str, fn: Callable[..., Any]) -> None:
    if inspect.iscoroutinefunction(fn):
        raise AgentConfigError(f"{what} is async; it is computed where nothing waits")
    try:
        inspect.signature(fn).bind(None)
    except TypeError:
        raise AgentConfigError(f"{what} is a function of one argument, the input") from None
    except ValueError:  # a builtin that does not say
        pass


class Sampling(Wire):
    """What the input of each built-in source may hold."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    system: str | None = None
    prompt: str | None = None
    messages: list[AgentMessage] | None = None
    temperature: float | None = None
    max_output_tokens: int | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop_sequences: list[str] | None = None
    metadata: dict[str, Any] | None = None


class FromInput:
    """Settings that the invoke's ``input`` holds, in either spelling.

    Args:
        source: The built-in source, for errors.
        shape: What the input may hold.
    """

    fields: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, source: str, shape: type[Wire]) -> None:
        self._source = source
        self._shape = shape

    def read(self, given: Any) -> Settings:
        """The settings of an input; None counts as an empty one.

        Raises:
            AgentConfigError: The input holds something else; the message names the place.
        """
        try:
            read = self._shape.model_validate({} if given is None else given)
        except pydantic.ValidationError as error:
            raise AgentConfigError(f"input of {self._source!r}: {wire_error(error)}") from None
        names = self._shape.model_fields
        return {name: getattr(read, name) for name in names if name in read.model_fields_set}

    def static(self, invoke: Invoke) -> Settings:
        """The settings of an input that is written in the chart; none of a computed one."""
        return {} if callable(invoke.input) else self.read(invoke.input)


RequestT = TypeVar("RequestT", bound=Wire)


def made_request(
    cls: type[RequestT], settings: Mapping[str, Any], id: str, src: str | None
) -> RequestT:
    """A request of these settings.

    Raises:
        AgentConfigError: A setting is of the wrong type; the message names it.
    """
    try:
        return cls.model_validate({**settings, "id": id, "src": src})
    except pydantic.ValidationError as error:
        raise AgentConfigError(f"source {src or id!r}: {wire_error(error)}") from None


class RequestLogic:
    """A service that has an executor answer a request.

    ``kind`` tells the sorts apart; a host finds the logic of a machine by it.
    """

    kind: ClassVar[str]
    __guardchart_form__: ClassVar[int] = 3

    def __init__(self, source: Configured | FromInput) -> None:
        self._source = source
        self._own: Callable[..., Any] | None = None
        self._binding = _BARE

    @property
    def slot(self) -> str:
        """The field of `AgentRequestExecutors` that serves it."""
        raise NotImplementedError

    @property
    def executor(self) -> Callable[..., Any] | None:
        """Its own executor, else that of its host, else None."""
        if self._own is not None:
            return self._own
        found: Callable[..., Any] | None = getattr(self._binding.executors, self.slot)
        return found

    @property
    def is_async(self) -> bool:
        """Whether its executor is."""
        executor = self.executor
        return executor is not None and is_async_model(executor)

    @property
    def bounded(self) -> bool:
        """Whether its executor promises to end by itself."""
        return getattr(self.executor, "bounded", False) is True

    def with_executor(self, execute: Callable[..., Any]) -> Self:
        """The same logic with an executor of its own, which no host replaces.

        Args:
            execute: ``(request)`` or ``(request, info)``, sync or async.

        Raises:
            AgentConfigError: It takes neither.
        """
        executor_form(execute)
        made = self._copy()
        made._own = execute
        return made

    def bound(self, binding: Binding) -> Self:
        """The same logic under a host."""
        made = self._copy()
        made._binding = binding
        return made

    def _copy(self) -> Self:
        made = type(self).__new__(type(self))
        made.__dict__.update(self.__dict__)
        return made

    def on_machine(self, machine: Machine, invoke: Invoke) -> None:
        """Check what is known when a machine that invokes this is compiled.

        Raises:
            ChartError: The settings do not fit the chart.
        """
        try:
            self._check(machine, self._source.static(invoke))
        except AgentConfigError as error:
            raise ChartError(str(error), path=invoke.spec.path) from None

    def _check(self, machine: Machine, settings: Settings) -> None:
        """Look at the settings that are known already."""

    def _called(self, scope: Any) -> Callable[..., Any]:
        executor = self.executor
        if executor is None:
            raise AgentConfigError(
                f"source {scope.invocation.src!r} has no executor: give it one by "
                f"with_executor(...), or pass {self.slot}= to its host"
            )
        return watched_executor(scope, executor) if self.kind in _MODELS else executor

    def _info(self, request: Any) -> AgentExecutorInfo:
        listen = self._binding.on_chunk
        on_chunk = None if listen is None else lambda chunk: listen(chunk, request)
        return AgentExecutorInfo(on_chunk, self._binding.signal)
