"""Text requests and questions to a person, as services."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from functools import partial
from typing import Any, ClassVar

import pydantic
from pydantic import ConfigDict, Field

from guardchart.agents._decisions import ValueOrFn
from guardchart.agents._request_logic import (
    Configured,
    FromInput,
    RequestLogic,
    Sampling,
    Settings,
    fit_error,
    made_request,
)
from guardchart.agents._requests import (
    AgentTextRequest,
    AgentUserInput,
    as_generated,
    call_executor,
)
from guardchart.agents._resolve import run_calls, run_calls_sync
from guardchart.agents._stepper import Fed
from guardchart.agents._wire import Wire
from guardchart.errors import AbortedError, AgentConfigError, AgentError
from guardchart.kernel import Snapshot
from guardchart.runtime import ServiceScope

__all__ = [
    "TextInput",
    "TextLogic",
    "UserInputLogic",
    "create_text_logic",
    "text_source",
    "user_input_source",
]


class TextInput(Sampling):
    """The input of ``agent.generate_text`` and ``agent.stream_text``."""

    tools: list[dict[str, Any]] = Field(default_factory=list)
    output_schema: dict[str, Any] | None = None


class TextLogic(RequestLogic):
    """A service that has a model answer; its output is the answer.

    Made by `create_text_logic`; give it a name in ``MachineLogic.services`` and invoke that.

    Example:
        >>> greet = create_text_logic(prompt="Say hi.", stream=True)
        >>> greet.kind, greet.slot, greet.request().prompt
        ('text', 'stream_text', 'Say hi.')
    """

    kind: ClassVar[str] = "text"

    def __init__(
        self, source: Configured | FromInput, *, stream: bool = False, output: Any = None
    ) -> None:
        super().__init__(source)
        self.stream = stream
        self._output: pydantic.TypeAdapter[Any] | None = None
        self._schema: dict[str, Any] | None = None
        if isinstance(output, Mapping):
            self._schema = dict(output)
        elif output is not None:
            self._output = pydantic.TypeAdapter(output)
            self._schema = self._output.json_schema()

    @property
    def slot(self) -> str:
        """``"stream_text"`` for one that streams, else ``"generate_text"``."""
        return "stream_text" if self.stream else "generate_text"

    def request(
        self,
        input: Any = None,
        snapshot: Snapshot | None = None,
        *,
        id: str = "text",
        src: str | None = None,
    ) -> AgentTextRequest:
        """The request for an input.

        Args:
            input: The invoke's input.
            snapshot: Not needed; taken so that both kinds of logic are asked alike.
            id: The invoke's id.
            src: The source's name in the chart.

        Raises:
            AgentConfigError: The input does not fit.
        """
        settings = {"output_schema": self._schema, **self._source.read(input)}
        return made_request(AgentTextRequest, {**settings, "stream": self.stream}, id, src)

    def __call__(self, scope: Any, context: Mapping[str, Any], event: Any) -> Any:
        """Ask; what the runtime calls."""
        executor, binding, invocation = self._called(scope), self._binding, scope.invocation
        request = self.request(invocation.input, id=invocation.id, src=invocation.src)
        calls = self._calls(executor, request)
        return run_calls(calls, binding.signal) if self.is_async else run_calls_sync(calls)

    def _calls(self, executor: Any, request: AgentTextRequest) -> Generator[Any, Any, Any]:
        binding = self._binding
        if binding.signal is not None and binding.signal.is_set():
            raise AbortedError("the signal was set before the model was asked")
        if binding.before_call is not None:
            binding.before_call(request)
        result = as_generated(
            (yield partial(call_executor, executor, request, self._info(request)))
        )
        if binding.on_result is not None:
            binding.on_result(request, result)
        return self.read(result.output)

    def step_requests(self, scope: ServiceScope, id: str) -> list[Any]:
        """The request of an invoke that waits for its answer; see the step path."""
        return [self.request(scope.invocation.input, id=id, src=scope.invocation.src)]

    def step_result(self, scope: ServiceScope, id: str, data: Any) -> Fed:
        """What an answer that a host brings makes of the invoke."""
        try:
            return Fed(self.read(data))
        except AgentError as error:
            return Fed(error=error)

    def read(self, answer: Any) -> Any:
        """The output of an answer: validated where ``output`` is a type, else as it is.

        Args:
            answer: What the executor gave; text is read as JSON where a type is wanted.

        Raises:
            AgentError: It does not fit; the message names declared fields only.
        """
        adapter = self._output
        if adapter is None:
            return answer
        try:
            if isinstance(answer, str):
                try:
                    read = adapter.validate_python(answer, strict=True)
                except pydantic.ValidationError:
                    read = adapter.validate_json(answer)
            else:
                read = adapter.validate_python(answer)
            return adapter.dump_python(read, mode="json")
        except pydantic.ValidationError as error:
            told = fit_error(adapter, error)
            raise AgentError(f"the answer does not fit its output: {told}") from None


def create_text_logic(
    *,
    model: ValueOrFn = None,
    system: ValueOrFn = None,
    prompt: ValueOrFn = None,
    messages: ValueOrFn = None,
    tools: ValueOrFn = None,
    output: Any = None,
    stream: bool = False,
    input: Any = None,
    temperature: ValueOrFn = None,
    max_output_tokens: ValueOrFn = None,
    top_p: ValueOrFn = None,
    top_k: ValueOrFn = None,
    seed: ValueOrFn = None,
    stop_sequences: ValueOrFn = None,
    metadata: ValueOrFn = None,
) -> TextLogic:
    """Make a text request that can be reused, tested alone and given a name in a logic.

    Every setting but ``output`` and ``stream`` is a value or a function of the invoke's input.

    Args:
        model: The model's name; the executor decides what it means.
        system: The system prompt.
        prompt: What is asked.
        messages: The conversation before the prompt, newest last.
        tools: Tools the model is told of: a registry, ``Tool`` objects, or ``{"name",
            "description", "parameters"}`` each. Nothing here runs one.
        output: The pydantic type of the answer, which is then validated and given as JSON; or a
            JSON Schema, which is only told.
        stream: Whether ``stream_text`` serves it, chunk by chunk, and not ``generate_text``.
        input: The pydantic type of the input; functions then get it validated.
        temperature: Sampling temperature.
        max_output_tokens: Largest answer, in tokens.
        top_p: Nucleus sampling.
        top_k: Number of candidates for sampling.
        seed: Sampling seed.
        stop_sequences: Texts that end the answer.
        metadata: The host's own.

    Returns:
        A `TextLogic` without an executor: `run_agent` binds ``generate_text=`` or
        ``stream_text=``, and ``with_executor`` gives it one of its own.

    Raises:
        AgentConfigError: A setting is of the wrong type.

    Source: the design of statelyai/agent 2, createTextLogic.

    Example:
        >>> from guardchart import MachineLogic, SyncInterpreter, create_machine
        >>> greet = create_text_logic(prompt=lambda input: f"Greet {input['name']}.")
        >>> greet.request({"name": "Ada"}).prompt
        'Greet Ada.'
        >>> chart = {"id": "hello", "initial": "asking", "states": {
        ...     "asking": {"invoke": {"src": "greet", "input": {"name": "Ada"},
        ...         "onDone": {"target": "said",
        ...                    "actions": lambda context, event: {"answer": event.data}}}},
        ...     "said": {}}}
        >>> answered = greet.with_executor(lambda request: {"text": "Hello, Ada."})
        >>> machine = create_machine(chart, MachineLogic(services={"greet": answered}))
        >>> SyncInterpreter(machine).start().context["answer"]
        'Hello, Ada.'
    """
    if not isinstance(stream, bool):
        raise AgentConfigError("create_text_logic: stream must be True or False")
    fields = {
        "model": model,
        "system": system,
        "prompt": prompt,
        "messages": messages,
        "tools": None if tools is None else _tools(tools),
        "temperature": temperature,
        "max_output_tokens": max_output_tokens,
        "top_p": top_p,
        "top_k": top_k,
        "seed": seed,
        "stop_sequences": stop_sequences,
        "metadata": metadata,
    }
    source = Configured("create_text_logic", fields, input)
    return TextLogic(source, stream=stream, output=output)


def _tools(tools: Any) -> Any:
    """Tools as schemas; of a function, a function that gives such."""
    if callable(tools):
        return lambda given: _schemas(tools(given))
    return _schemas(tools)


def _schemas(tools: Any) -> list[dict[str, Any]]:
    return [dict(each) if isinstance(each, Mapping) else each.schema() for each in tools]


class UserInputLogic(RequestLogic):
    """A service that asks a person inline; its output is the answer."""

    kind: ClassVar[str] = "user_input"

    @property
    def slot(self) -> str:
        """``"user_input"``."""
        return "user_input"

    def request(
        self,
        input: Any = None,
        snapshot: Snapshot | None = None,
        *,
        id: str = "user_input",
        src: str | None = None,
    ) -> AgentUserInput:
        """What the handler is given for an input.

        Raises:
            AgentConfigError: The input does not fit.
        """
        settings: Settings = self._source.read(input)
        return made_request(AgentUserInput, settings, id, src)

    def __call__(self, scope: Any, context: Mapping[str, Any], event: Any) -> Any:
        """Ask; what the runtime calls."""
        handler, invocation = self._called(scope), scope.invocation
        request = self.request(invocation.input, id=invocation.id, src=invocation.src)
        return call_executor(handler, request, self._info(request))


class UserInput(Wire):
    """The input of ``agent.user_input``."""

    model_config = ConfigDict(extra="forbid")

    prompt: str | None = None
    input_schema: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None


def text_source(stream: bool) -> TextLogic:
    """The logic of ``agent.generate_text`` or ``agent.stream_text``."""
    name = "agent.stream_text" if stream else "agent.generate_text"
    return TextLogic(FromInput(name, TextInput), stream=stream)


def user_input_source() -> UserInputLogic:
    """The logic of ``agent.user_input``."""
    return UserInputLogic(FromInput("agent.user_input", UserInput))
