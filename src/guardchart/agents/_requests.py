"""What a host is asked to do for a machine, and what executors are and return.

A request is data: it says which model to ask what, never how a provider is made to answer. Its
JSON (``to_json``, `request_from_json`) is what a durable host records.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, Protocol, Self, TypeAlias

from pydantic import ConfigDict, Field, PrivateAttr, model_serializer

from guardchart.agents._messages import Message
from guardchart.agents._models import ModelResponse, Usage
from guardchart.agents._parts import AgentMessage
from guardchart.agents._wire import Wire
from guardchart.errors import AgentConfigError, AgentError

__all__ = [
    "AbortSignal",
    "AgentDecisionExecutor",
    "AgentDecisionRequest",
    "AgentEventDescriptor",
    "AgentExecutorInfo",
    "AgentRequest",
    "AgentRequestExecutor",
    "AgentRequestExecutors",
    "AgentTextRequest",
    "AgentToolRequest",
    "AgentUserInput",
    "AgentUserInputExecutor",
    "ChosenEvent",
    "DecisionAttempt",
    "DecisionFailure",
    "Generated",
    "LoopTextRequest",
    "LoopToolRequest",
    "ModelRequest",
    "as_generated",
    "call_executor",
    "executor_form",
    "request_from_json",
    "settled",
]

ChosenEvent: TypeAlias = dict[str, Any]
"""An event as a decision gives it: ``{"type": ..., **payload}``, JSON types only."""

DecisionFailure = Literal["unknown-event", "invalid-payload", "rejected-by-guard"]


class ModelRequest(Wire):
    """What text and decision requests have in common.

    Attributes:
        id: The invoke's id; the same over retries and restarts.
        src: The source's name in the chart, e.g. ``"agent.decide"``.
        model: The model's name, where the chart names one; the executor decides what it means.
        system: The system prompt.
        prompt: What is asked.
        messages: The conversation before the prompt, newest last.
        temperature: Sampling temperature.
        max_output_tokens: Largest answer, in tokens.
        top_p: Nucleus sampling.
        top_k: Number of candidates for sampling.
        seed: Sampling seed.
        stop_sequences: Texts that end the answer.
        metadata: The host's own; never sent to a model.
    """

    model_config = ConfigDict(extra="forbid")

    id: str
    src: str | None = None
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
    # The snapshot it was made from, where it was made by the step path; no part of the data.
    _origin: Any = PrivateAttr(default=None)


class AgentTextRequest(ModelRequest):
    """Ask a model for an answer.

    Attributes:
        kind: ``"text"``.
        tools: Tools the model is told of: ``{"name", "description", "parameters"}`` each.
        output_schema: JSON Schema of a structured answer.
        stream: Whether ``stream_text`` is to serve it, chunk by chunk, and not
            ``generate_text``.

    Example:
        >>> request = AgentTextRequest(id="draft", prompt="Say hi.", max_output_tokens=20)
        >>> request.to_json()["maxOutputTokens"], AgentTextRequest.from_json(request.to_json()).id
        (20, 'draft')
    """

    kind: Literal["text"] = "text"
    tools: list[dict[str, Any]] = Field(default_factory=list)
    output_schema: dict[str, Any] | None = None
    stream: bool = False


class AgentEventDescriptor(Wire):
    """One event that may be chosen.

    Attributes:
        type: The event's type.
        tool_name: A name that every provider takes for a tool; unique in its machine.
        input_schema: JSON Schema of the payload, None where any is accepted.

    Example:
        >>> AgentEventDescriptor(type="door.open", tool_name="send_event_door_open").to_json()
        {'type': 'door.open', 'toolName': 'send_event_door_open'}
    """

    model_config = ConfigDict(extra="forbid")

    type: str
    tool_name: str
    input_schema: dict[str, Any] | None = None
    # What checks a payload; not part of the data, found again from the schema after JSON.
    _shape: Any = PrivateAttr(default=None)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, AgentEventDescriptor):
            return NotImplemented
        return (self.type, self.tool_name, self.input_schema) == (
            other.type,
            other.tool_name,
            other.input_schema,
        )

    __hash__ = None  # type: ignore[assignment]


class DecisionAttempt(Wire):
    """One answer to a decision that could not be taken.

    Attributes:
        event: What the model chose, where it chose anything that can be kept.
        failure: ``"unknown-event"``: not one of the candidates. ``"invalid-payload"``: the
            payload does not fit. ``"rejected-by-guard"``: the chart does not take it now.
        reason: Why, in words a model can use; names declared fields only.

    Example:
        >>> attempt = DecisionAttempt(event={"type": "HEAL"}, failure="rejected-by-guard",
        ...                           reason="the chart does not take it now")
        >>> attempt.failure
        'rejected-by-guard'
    """

    model_config = ConfigDict(extra="forbid")

    event: ChosenEvent | None = None
    failure: DecisionFailure
    reason: str


class AgentDecisionRequest(ModelRequest):
    """Ask a model to choose exactly one event.

    Attributes:
        kind: ``"decision"``.
        events: The candidates.
        attempts: What was chosen before in this decision and could not be taken, oldest first.
            Adapters tell the model of them; system, prompt and messages stay as they are.
        max_retries: How many further answers are asked for.

    Example:
        >>> go = AgentEventDescriptor(type="GO", tool_name="send_event_GO")
        >>> request = AgentDecisionRequest(id="move", events=[go])
        >>> request_from_json(request.to_json()) == request
        True
    """

    kind: Literal["decision"] = "decision"
    events: list[AgentEventDescriptor]
    attempts: list[DecisionAttempt] = Field(default_factory=list)
    max_retries: int = Field(default=2, ge=0)

    def with_attempts(self, attempts: list[DecisionAttempt]) -> AgentDecisionRequest:
        """The same request after these failed attempts."""
        return self.model_copy(update={"attempts": list(attempts)})


class AgentToolRequest(Wire):
    """Run one tool call, through the gate.

    All requests of one step may run side by side: calls that only read come together, a side
    effect alone and in its turn.

    Attributes:
        kind: ``"tool"``.
        id: The call's place in the run; the same over retries and restarts.
        src: The source's name in the chart.
        tool_call_id: The id by which the model knows the call.
        name: The tool's name.
        arguments: As proposed and validated; an edited call runs as its row has it.
        digest: Of the canonical arguments, "" where the call may not run.
        row_id: Its row in the ledger, None for a call that needs none.
        side_effect: Whether it runs by a row of the ledger, claimed before it is entered.
        needs_approval: Whether a person has to have approved that row.
        timeout_s: Seconds its body may take.

    Example:
        >>> call = AgentToolRequest(id="tools@4#0", tool_call_id="c1", name="pay", arguments={})
        >>> call.to_json()["toolCallId"], call.side_effect
        ('c1', False)
    """

    model_config = ConfigDict(extra="forbid")

    kind: Literal["tool"] = "tool"
    id: str
    src: str | None = None
    tool_call_id: str
    name: str
    arguments: dict[str, Any]
    digest: str = ""
    row_id: str | None = None
    side_effect: bool = False
    needs_approval: bool = False
    timeout_s: float = 0.0
    _origin: Any = PrivateAttr(default=None)


class _Made(Wire):
    """A request of the tool loop; some of its fields are made when somebody looks at them.

    Every step has one, and a host that only executes it never looks.
    """

    _PLAIN: ClassVar[type[Wire]]
    _LATE: ClassVar[frozenset[str]]
    _late: Any = PrivateAttr(default=None)

    @classmethod
    def made(cls, late: Callable[[str], Any], **fields: Any) -> Self:
        """A request of fields that need no check, and what makes the late ones by their name."""
        request = cls.__new__(cls)
        # What a pydantic model is made of; its own constructors take ten times as long.
        object.__setattr__(request, "__dict__", _defaults(cls) | fields)
        object.__setattr__(request, "__pydantic_fields_set__", set(fields))
        object.__setattr__(request, "__pydantic_extra__", None)
        object.__setattr__(request, "__pydantic_private__", {"_origin": None, "_late": late})
        return request

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name not in self._LATE:
                return super().__getattr__(name)
            found = self.__dict__[name] = self._late(name)
            return found

    @model_serializer(mode="wrap")
    def _written(self, handler: Any) -> dict[str, Any]:
        # All of them, in the order of the fields.
        made = {name: getattr(self, name) for name in self._PLAIN.model_fields}
        object.__setattr__(self, "__dict__", made)
        return super()._written(handler)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, self._PLAIN):
            return NotImplemented
        return self.to_json() == other.to_json()

    __hash__ = None  # type: ignore[assignment]


@functools.cache
def _defaults(cls: type[_Made]) -> dict[str, Any]:
    return {
        name: each.default
        for name, each in cls.model_fields.items()
        if name not in cls._LATE and not each.is_required()
    }


class LoopTextRequest(_Made, AgentTextRequest):
    """A tool loop's model call as a request; conversation and tools are made late."""

    _PLAIN = AgentTextRequest
    _LATE = frozenset({"messages", "tools"})


class LoopToolRequest(_Made, AgentToolRequest):
    """A call of a tool loop as a request; what the gate says of it is asked late."""

    _PLAIN = AgentToolRequest
    _LATE = frozenset({"digest", "side_effect", "needs_approval", "timeout_s"})


class AgentUserInput(Wire):
    """Ask a person, inline, without settling.

    Attributes:
        id: The invoke's id.
        src: The source's name in the chart.
        prompt: What to ask.
        input_schema: JSON Schema of the answer, where one is expected.
        metadata: The host's own.

    Example:
        >>> AgentUserInput(id="ask", prompt="Which colour?").to_json()
        {'id': 'ask', 'prompt': 'Which colour?'}
    """

    model_config = ConfigDict(extra="forbid")

    id: str
    src: str | None = None
    prompt: str | None = None
    input_schema: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None


AgentRequest: TypeAlias = AgentTextRequest | AgentDecisionRequest | AgentToolRequest
"""One request of a step, told apart by its ``kind``."""

_KINDS: dict[str, type[Wire]] = {
    "text": AgentTextRequest,
    "decision": AgentDecisionRequest,
    "tool": AgentToolRequest,
}


def request_from_json(data: Any) -> AgentRequest:
    """Read a recorded request, told apart by its ``kind``.

    Raises:
        AgentError: It is no request; the message names the place, never a value.

    Example:
        >>> request_from_json({"kind": "text", "id": "draft", "maxOutputTokens": 5}).stream
        False
    """
    kind = data.get("kind") if isinstance(data, Mapping) else None
    cls = _KINDS.get(kind) if isinstance(kind, str) else None
    if cls is None:
        raise AgentError(f"a request is a mapping whose kind is one of {sorted(_KINDS)}")
    return cls.from_json(data)  # type: ignore[return-value]


# Executors


class AbortSignal(Protocol):
    """An ``asyncio.Event``, a ``threading.Event``, or anything else that can be asked."""

    def is_set(self) -> bool:
        """Whether the run is to end."""


@dataclass(frozen=True, slots=True)
class AgentExecutorInfo:
    """What an executor is handed beside its request.

    Attributes:
        on_chunk: Call it with each piece of text as it arrives; None where nobody listens.
        signal: Set when the answer is not wanted any more; None where nothing can end it.

    Example:
        >>> AgentExecutorInfo(on_chunk=print).signal is None
        True
    """

    on_chunk: Callable[[str], None] | None = None
    signal: AbortSignal | None = None


@dataclass(frozen=True, slots=True)
class Generated:
    """What an executor returns when it has more to say than a value.

    Attributes:
        output: The value; of a decision ``{"event": {"type", ...}, "reason"?}``.
        messages: What the model said, as messages, newest last.
        usage: What the call consumed.
        raw: The provider's answer, for logs and audits.

    Example:
        >>> Generated("hello", usage=Usage(12, 3)).output
        'hello'
    """

    output: Any
    messages: list[AgentMessage] | list[Message] | None = None
    usage: Usage | Mapping[str, Any] | None = None
    raw: Any = None


AgentRequestExecutor: TypeAlias = (
    Callable[[AgentTextRequest], Any] | Callable[[AgentTextRequest, AgentExecutorInfo], Any]
)
"""``generate_text`` or ``stream_text``: ``(request)`` or ``(request, info)``, sync or async."""

AgentDecisionExecutor: TypeAlias = (
    Callable[[AgentDecisionRequest], Any] | Callable[[AgentDecisionRequest, AgentExecutorInfo], Any]
)
"""``decide``: returns ``{"event": {"type", **payload}, "reason"?}`` or a `Generated` of it.

``{"event": None}`` says that the model chose nothing; the attempt counts as ``unknown-event``.
"""

AgentUserInputExecutor: TypeAlias = (
    Callable[[AgentUserInput], Any] | Callable[[AgentUserInput, AgentExecutorInfo], Any]
)
"""``user_input``: returns the person's answer."""


@dataclass(frozen=True, slots=True)
class AgentRequestExecutors:
    """The executors of a host, each sync or async.

    Attributes:
        generate_text: Serves text requests.
        stream_text: Serves text requests with ``stream``.
        decide: Serves decision requests.
        user_input: Serves ``agent.user_input``.

    Example:
        >>> executors = AgentRequestExecutors(decide=lambda request: {"event": {"type": "GO"}})
        >>> executors.generate_text is None
        True
    """

    generate_text: AgentRequestExecutor | None = None
    stream_text: AgentRequestExecutor | None = None
    decide: AgentDecisionExecutor | None = None
    user_input: AgentUserInputExecutor | None = None


_NO_INFO: Final = AgentExecutorInfo()


def call_executor(
    executor: Callable[..., Any], request: Any, info: AgentExecutorInfo | None
) -> Any:
    """Call an executor with the request, and with ``info`` where it takes it.

    Returns:
        What it returns; an awaitable where it is async.

    Raises:
        AgentConfigError: It takes neither ``(request)`` nor ``(request, info)``.
    """
    form = executor_form(executor)
    if form == "request":
        return executor(request)
    given = info if info is not None else _NO_INFO
    return executor(request, info=given) if form == "keyword" else executor(request, given)


def executor_form(executor: Callable[..., Any]) -> Literal["request", "keyword", "positional"]:
    """How an executor takes ``info``: not at all, as ``info=``, or as a required second argument.

    Raises:
        AgentConfigError: It can be called in no such form.
    """
    if not callable(executor):
        raise AgentConfigError("an executor must be callable: (request) or (request, info)")
    try:
        signature = inspect.signature(executor)
    except (TypeError, ValueError):  # a builtin that does not say
        return "request"
    named = signature.parameters.get("info")
    if named is not None and named.kind in (named.KEYWORD_ONLY, named.POSITIONAL_OR_KEYWORD):
        if _fits(signature, 1, info=None):
            return "keyword"
    elif _fits(signature, 1):
        return "request"
    elif _fits(signature, 2):
        return "positional"
    name = getattr(executor, "__name__", type(executor).__name__)
    raise AgentConfigError(f"executor {name!r}: it takes (request) or (request, info)")


def _fits(signature: inspect.Signature, positional: int, **named: Any) -> bool:
    try:
        signature.bind(*[None] * positional, **named)
    except TypeError:
        return False
    return True


def as_generated(result: Any) -> Generated:
    """What an executor returned, as a `Generated`; ``raw`` is never empty-handed.

    A ``dict`` with ``object``, ``text`` or ``output``, looked for in this order, stands for that
    value, since AI toolkits return such; a ``ModelResponse`` for its text. Tool results are not
    looked into.

    Example:
        >>> as_generated({"text": "hi", "usage": {"input_tokens": 3}}).output
        'hi'
    """
    if isinstance(result, Generated):
        if result.raw is not None:
            return result
        return Generated(result.output, result.messages, result.usage, result.output)
    if isinstance(result, ModelResponse):
        return Generated(result.text, None, result.usage, result)
    if type(result) is dict:
        for key in ("object", "text", "output"):
            if key in result:
                return Generated(result[key], None, result.get("usage"), result)
    return Generated(result, raw=result)


async def settled(result: Any) -> Any:
    """What an executor returned, awaited where it has to be."""
    while isinstance(result, Awaitable):
        result = await result
    return result
