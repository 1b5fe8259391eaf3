"""``setup_agent``: a builder that knows the types of context, input, output and events."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Final, Generic, ParamSpec, TypeVar, overload

import pydantic
from pydantic import BaseModel

from guardchart.agents._accepted import EVENTS, check_payload, event_table
from guardchart.agents._request_logic import fit_error
from guardchart.agents._result import AgentResult
from guardchart.agents._run import run_agent, run_agent_sync
from guardchart.agents._sources import with_sources
from guardchart.errors import AgentConfigError, AgentError, ChartError
from guardchart.gate._arguments import ArgumentsRefused
from guardchart.kernel import EngineEvent, Event, Machine, Snapshot
from guardchart.kernel._callables import ACTION_FORMS, WithForm, form_of
from guardchart.runtime import BeforeStep, MachineLogic, create_machine

__all__ = ["AgentSetup", "TypedResult", "setup_agent"]

ContextT = TypeVar("ContextT")
InputT = TypeVar("InputT")
OutputT = TypeVar("OutputT")
EventModelT = TypeVar("EventModelT", bound=BaseModel)
ContextModelT = TypeVar("ContextModelT", bound=BaseModel)
InputModelT = TypeVar("InputModelT", bound=BaseModel)
OutputModelT = TypeVar("OutputModelT", bound=BaseModel)
P = ParamSpec("P")

Updates = Mapping[str, Any] | BaseModel | None
AnyAction = Callable[..., Any]

_ACTION_KEYS: Final = frozenset({"actions", "entry", "exit"})


class TypedResult(AgentResult[OutputT], Generic[ContextT, OutputT]):
    """An `AgentResult` whose output and context have types.

    Attributes:
        output: The output as its model, None while there is none.

    Example:
        >>> from pydantic import BaseModel
        >>> class Count(BaseModel):
        ...     n: int = 0
        >>> agent = setup_agent(context=Count)
        >>> machine = agent.create_machine({"id": "counter", "initial": "on",
        ...     "context": {"n": 1}, "states": {"on": {"type": "final"}}})
        >>> agent.run_sync(machine).typed_context
        Count(n=1)
    """

    _context_model: Any = None

    @property
    def typed_context(self) -> ContextT:
        """The context as its model; the mapping itself where no model was given.

        Raises:
            AgentError: It does not fit.
        """
        return _read(self._context_model, dict(self.context), "the context")  # type: ignore[no-any-return]


class AgentSetup(Generic[ContextT, InputT, OutputT]):
    """The types of an agent, and what is built with them; made by `setup_agent`.

    Example:
        >>> from pydantic import BaseModel
        >>> class Count(BaseModel):
        ...     n: int = 0
        >>> class Add(BaseModel):
        ...     by: int
        >>> agent = setup_agent(context=Count, events={"ADD": Add})
        >>> @agent.action("add", event=Add)
        ... def add(context: Count, event: Add) -> dict[str, int]:
        ...     return {"n": context.n + event.by}
        >>> machine = agent.create_machine({"id": "counter", "initial": "on", "context": {"n": 1},
        ...     "states": {"on": {"on": {"ADD": {"actions": "add"}}}}})
        >>> result = agent.run_sync(machine, event=agent.event(Add)(by=2))
        >>> result.typed_context.n
        3
    """

    def __init__(
        self,
        context: Any,
        input: Any,
        output: Any,
        events: Mapping[str, type[BaseModel] | None],
        check_context: bool,
    ) -> None:
        for name, model in {"context": context, "input": input, "output": output}.items():
            if model is not None and not _is_model(model):
                raise AgentConfigError(f"setup_agent: {name} must be a pydantic model")
        if not isinstance(events, Mapping) or not all(isinstance(each, str) for each in events):
            raise AgentConfigError("setup_agent: events maps event types to pydantic models")
        for model in events.values():
            if model is not None and not _is_model(model):
                raise AgentConfigError("setup_agent: an event's payload must be a pydantic model")
        if check_context and context is None:
            raise AgentConfigError("setup_agent: check_context= needs context=")
        self._context, self._input, self._output = context, input, output
        self._events = dict(events)
        self._check_context = check_context
        self._logic = MachineLogic(attachments={EVENTS: self._events})

    # Events

    def event(self, model: Callable[P, EventModelT]) -> Callable[P, Event]:
        """What makes events with this payload: called like the model itself.

        Args:
            model: One of the models of ``events``, under one type only.

        Raises:
            AgentConfigError: No event has this payload, or several have.
        """
        types = [each for each, known in self._events.items() if known is model]
        if len(types) != 1:
            raise AgentConfigError(
                "setup_agent: no event has this payload"
                if not types
                else f"setup_agent: the events {types} have this payload; write Event(type, ...)"
            )

        def make(*args: P.args, **kwargs: P.kwargs) -> Event:
            return Event(types[0], model(*args, **kwargs).model_dump(mode="json"))

        return make

    # What names mean

    @overload
    def action(
        self, name: str
    ) -> Callable[[Callable[[ContextT, Event], Updates]], Callable[[ContextT, Event], Updates]]: ...

    @overload
    def action(
        self, name: str, *, event: type[EventModelT]
    ) -> Callable[
        [Callable[[ContextT, EventModelT], Updates]], Callable[[ContextT, EventModelT], Updates]
    ]: ...

    def action(self, name: str, *, event: Any = None) -> Any:
        """Give an action its function: ``(context, event) -> updates``, pure.

        Args:
            name: Its name in charts.
            event: The model of the payload it is to get instead of the `Event`.
        """

        def decorate(fn: AnyAction) -> AnyAction:
            self._logic.actions[name] = WithForm(
                lambda context, came: _updates(fn(*self._arguments(context, came, event))), 2
            )
            return fn

        return decorate

    @overload
    def guard(
        self, name: str
    ) -> Callable[[Callable[[ContextT, Event], bool]], Callable[[ContextT, Event], bool]]: ...

    @overload
    def guard(
        self, name: str, *, event: type[EventModelT]
    ) -> Callable[
        [Callable[[ContextT, EventModelT], bool]], Callable[[ContextT, EventModelT], bool]
    ]: ...

    def guard(self, name: str, *, event: Any = None) -> Any:
        """Give a guard its function: ``(context, event) -> bool``, pure.

        Args:
            name: Its name in charts.
            event: The model of the payload it is to get instead of the `Event`.
        """

        def decorate(fn: Callable[..., bool]) -> Callable[..., bool]:
            self._logic.guards[name] = lambda context, came: fn(
                *self._arguments(context, came, event)
            )
            return fn

        return decorate

    def _arguments(self, context: Mapping[str, Any], came: Any, event: Any) -> tuple[Any, Any]:
        given = _read(self._context, dict(context), "the context")
        if event is None:
            return given, came
        return given, _read(event, dict(came.payload), "the payload")

    # Machines

    def create_machine(
        self,
        chart: Mapping[str, Any] | str | Path,
        logic: MachineLogic | None = None,
        *,
        check_purity: bool = False,
    ) -> Machine:
        """Compile a chart with what was declared here.

        Args:
            chart: As for ``create_machine``.
            logic: What other names mean, e.g. an `agent_logic`.
            check_purity: As for ``create_machine``.

        Returns:
            A machine that refuses an event from outside whose payload does not fit its model
            (the receipt is denied), and fills in defaults. With ``check_context`` an action whose
            result does not fit fails.

        Raises:
            ChartError: The chart is wrong, or with ``check_context`` its context does not fit.
        """
        merged = self._logic if logic is None else logic.merge(self._logic)
        made = MachineLogic().merge(merged)
        made.before_step = _PayloadHook(self._events, made.before_step)
        if self._check_context:
            made.actions = {name: self._checked(fn, name) for name, fn in made.actions.items()}
            if isinstance(chart, Mapping):
                chart = self._checked_chart(chart)
        machine = create_machine(chart, made, check_purity=check_purity)
        if self._check_context:
            try:
                _read(self._context, dict(machine.context), "the context")
            except AgentError as error:
                raise ChartError(str(error), path="$.context") from None
        machine = with_sources(machine)
        event_table(machine)
        return machine

    def _checked_chart(self, node: Any, key: str = "") -> Any:
        """The chart with the actions that stand in it checked, too."""
        if isinstance(node, Mapping):
            return {each: self._checked_chart(value, str(each)) for each, value in node.items()}
        if isinstance(node, list | tuple):
            return [self._checked_chart(each, key) for each in node]
        if key not in _ACTION_KEYS or not callable(node):
            return node
        return self._checked(node, getattr(node, "__name__", type(node).__name__))

    def _checked(self, fn: AnyAction, name: str) -> AnyAction:
        form = form_of(fn, ACTION_FORMS, f"action {name!r}", "")
        what = f"the context after action {name!r}"

        def call(*args: Any) -> Any:
            updates = fn(*args)
            if form == 4:
                _read(self._context, dict(args[1]), what)
            elif updates is not None:
                _read(self._context, {**args[0], **updates}, what)
            return updates

        call.__guardchart_form__ = form  # type: ignore[attr-defined]
        return call

    # Runs

    async def run(
        self, machine: Machine, *, input: InputT | None = None, **options: Any
    ) -> TypedResult[ContextT, OutputT]:
        """Do what `run_agent` does, with types.

        Args:
            machine: From `create_machine`.
            input: The machine's input, as its model.
            **options: The other arguments of `run_agent`.

        Returns:
            An `AgentResult` whose ``output`` is a model. An output that does not fit gives
            ``status="error"``, ``cause="machine"``.

        Raises:
            AgentConfigError, SnapshotError, TimeoutError: As `run_agent`.
        """
        return self._typed(await run_agent(machine, input=self._given(input), **options))

    def run_sync(
        self, machine: Machine, *, input: InputT | None = None, **options: Any
    ) -> TypedResult[ContextT, OutputT]:
        """Do what `run_agent_sync` does, with types; see `run`."""
        return self._typed(run_agent_sync(machine, input=self._given(input), **options))

    def _given(self, input: Any) -> Any:
        if input is None or self._input is None:
            return input
        try:
            read = _read(self._input, input, "input")
        except AgentError as error:
            raise AgentConfigError(str(error)) from None
        return read.model_dump(mode="json")

    def _typed(self, result: AgentResult[Any]) -> TypedResult[ContextT, OutputT]:
        parts = {each.name: getattr(result, each.name) for each in fields(AgentResult)}
        if self._output is not None and result.status == "done" and result.error is None:
            try:
                parts["output"] = _read(self._output, result.output, "the output")
            except AgentError as error:
                told = {"kind": "output", "message": str(error)}
                parts.update(status="error", cause="machine", error=told, exception=error)
        typed: TypedResult[ContextT, OutputT] = TypedResult(**parts)
        object.__setattr__(typed, "_context_model", self._context)
        return typed


class _PayloadHook:
    """Checks the payloads of events from outside, then asks the hook of the logic, if any."""

    def __init__(self, events: Mapping[str, Any], inner: Any) -> None:
        self._events = events
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        # What else a hook may offer its host.
        return getattr(object.__getattribute__(self, "_inner"), name)

    def concerns(self, snapshot: Snapshot, event: Any) -> bool:
        """Whether the hook asks a ledger about this event."""
        if self._inner is None:
            return False
        concerns = getattr(self._inner, "concerns", None)
        return concerns is None or bool(concerns(snapshot, event))

    def __call__(
        self, snapshot: Snapshot, event: Event | EngineEvent, now: float, host: Any, outside: bool
    ) -> BeforeStep | None:
        given = event
        if outside and isinstance(event, Event) and event.type in self._events:
            (descriptor,) = event_table(snapshot.machine).descriptors([event.type])
            try:
                chosen = check_payload(descriptor, {**event.payload, "type": event.type})
            except ArgumentsRefused as refused:
                return BeforeStep(denied=f"the payload does not fit: {refused}")
            payload = {key: value for key, value in chosen.items() if key != "type"}
            if payload != event.payload:
                given = Event(event.type, payload)
        verdict = None if self._inner is None else self._inner(snapshot, given, now, host, outside)
        if given is event or (verdict is not None and (verdict.event or verdict.denied)):
            return verdict
        return BeforeStep(given, None if verdict is None else verdict.batch_no)


def _is_model(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, BaseModel)


def _read(model: Any, value: Any, what: str) -> Any:
    if model is None:
        return value
    try:
        return model.model_validate(value)
    except pydantic.ValidationError as error:
        told = fit_error(pydantic.TypeAdapter(model), error)
        raise AgentError(f"{what} does not fit {model.__name__}: {told}") from None


def _updates(given: Any) -> Any:
    return given.model_dump(mode="json") if isinstance(given, BaseModel) else given


@overload
def setup_agent(
    *,
    context: type[ContextModelT],
    input: type[InputModelT],
    output: type[OutputModelT],
    events: Mapping[str, type[BaseModel] | None] = ...,
    check_context: bool = ...,
) -> AgentSetup[ContextModelT, InputModelT, OutputModelT]: ...
@overload
def setup_agent(
    *,
    context: type[ContextModelT],
    input: type[InputModelT],
    output: None = ...,
    events: Mapping[str, type[BaseModel] | None] = ...,
    check_context: bool = ...,
) -> AgentSetup[ContextModelT, InputModelT, Any]: ...
@overload
def setup_agent(
    *,
    context: type[ContextModelT],
    input: None = ...,
    output: type[OutputModelT],
    events: Mapping[str, type[BaseModel] | None] = ...,
    check_context: bool = ...,
) -> AgentSetup[ContextModelT, Any, OutputModelT]: ...
@overload
def setup_agent(
    *,
    context: type[ContextModelT],
    input: None = ...,
    output: None = ...,
    events: Mapping[str, type[BaseModel] | None] = ...,
    check_context: bool = ...,
) -> AgentSetup[ContextModelT, Any, Any]: ...
@overload
def setup_agent(
    *,
    context: None = ...,
    input: type[InputModelT],
    output: type[OutputModelT],
    events: Mapping[str, type[BaseModel] | None] = ...,
    check_context: bool = ...,
) -> AgentSetup[Mapping[str, Any], InputModelT, OutputModelT]: ...
@overload
def setup_agent(
    *,
    context: None = ...,
    input: type[InputModelT],
    output: None = ...,
    events: Mapping[str, type[BaseModel] | None] = ...,
    check_context: bool = ...,
) -> AgentSetup[Mapping[str, Any], InputModelT, Any]: ...
@overload
def setup_agent(
    *,
    context: None = ...,
    input: None = ...,
    output: type[OutputModelT],
    events: Mapping[str, type[BaseModel] | None] = ...,
    check_context: bool = ...,
) -> AgentSetup[Mapping[str, Any], Any, OutputModelT]: ...
@overload
def setup_agent(
    *,
    context: None = ...,
    input: None = ...,
    output: None = ...,
    events: Mapping[str, type[BaseModel] | None] = ...,
    check_context: bool = ...,
) -> AgentSetup[Mapping[str, Any], Any, Any]: ...
def setup_agent(
    *,
    context: Any = None,
    input: Any = None,
    output: Any = None,
    events: Mapping[str, type[BaseModel] | None] | None = None,
    check_context: bool = False,
) -> Any:
    """Declare the types of an agent; a type checker knows them from here on.

    Args:
        context: The pydantic model of the context.
        input: That of the input.
        output: That of the output.
        events: That of each event's payload, None for one without. An event from outside that
            does not fit is denied; decisions are told the schemas.
        check_context: Whether the context is checked at build time and after every action; for
            development.

    Returns:
        An `AgentSetup`: its decorators give names their functions, ``create_machine`` builds,
        ``event`` makes events, ``run`` runs.

    Raises:
        AgentConfigError: One of them is no pydantic model.

    Source: @statelyai/agent, setupAgent.

    Example:
        >>> from pydantic import BaseModel
        >>> class Approve(BaseModel):
        ...     by: str
        >>> agent = setup_agent(events={"APPROVE": Approve})
        >>> agent.event(Approve)(by="ann").payload
        {'by': 'ann'}
    """
    return AgentSetup(context, input, output, {} if events is None else events, check_context)
