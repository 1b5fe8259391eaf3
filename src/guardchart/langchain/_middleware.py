"""`StatechartMiddleware`: a chart in front of the tools of a ``create_agent`` agent."""

from __future__ import annotations

import functools
import uuid
from collections.abc import Awaitable, Callable, Iterable
from typing import Annotated, Any, Final, NotRequired

from langchain.agents.middleware import AgentMiddleware, AgentState
from langchain.agents.middleware.types import (
    ExtendedModelResponse,
    ModelRequest,
    ModelResponse,
    PrivateStateAttr,
)
from langchain.agents.structured_output import (
    AutoStrategy,
    ProviderStrategy,
    ToolStrategy,
)
from langchain_core.messages import AIMessage, RemoveMessage, ToolMessage
from langchain_core.tools import BaseTool
from langgraph.graph.message import REMOVE_ALL_MESSAGES
from langgraph.types import Command, Overwrite, interrupt

from guardchart.errors import AgentConfigError
from guardchart.gate import closing_text, shown_name
from guardchart.gate._authorise import in_thread
from guardchart.langchain._ask import Positional, Show
from guardchart.langchain._door import Door, Opened, appended, calls_of, turn_of
from guardchart.langchain._entry import Entry, refusal_message, refusal_text
from guardchart.langchain._turns import (
    Asking,
    answered_ids,
    open_answers,
    propose,
    spent_before,
    supersede,
)

__all__ = ["GuardedState", "StatechartMiddleware"]

NOT_NOW: Final = "this answer is not wanted in the present state"
# Where another tool hook lies between this one and the tool, the handler is langchain's.
_FACTORY: Final = "langchain.agents.factory"


class GuardedState(AgentState[Any]):
    """What the middleware keeps beside the conversation."""

    xsm: NotRequired[Annotated[dict[str, Any], PrivateStateAttr]]
    xsm_events: NotRequired[Annotated[list[dict[str, Any]], PrivateStateAttr, appended]]


class StatechartMiddleware(AgentMiddleware[Any, Any, Any]):
    """Let a chart decide which tools a ``create_agent`` agent may run; last in the list.

    The model is told of the tools that the chart's state allows. Each call it proposes is judged
    and, where a person must agree, filed in the ledger and asked about by one ``interrupt()``;
    each is judged again, claimed and recorded when it runs. What became of it returns to the
    chart as an event (``tool.done.<name>`` and its kin).

    Args:
        machine: The chart: a dict, JSON text, a path, or a built machine without services.
        tools: The registry, exposed as ``AgentMiddleware.tools``: ``@tool`` functions,
            ``BaseTool`` objects, plain functions, ``tool(<LangChain tool>, side_effect=True)``.
            A provider's own tool is given as its dict, and offered while the state lists it. What
            is not here does not run.
        ledger: Where approvals and claims are kept; None takes the process's own, in memory. See
            ``guardchart.langgraph.ledger_for``.
        side_effects: Names of tools of which a person approves each call.
        outputs: Names of structured outputs, so that ``meta.outputs`` of the chart is checked
            when this is built.
        scope: What calls are filed under, a text or ``(state) -> text``; None is the thread.
        seal: Signs what is stored in the state, so that an edited chart state is refused.
        positional: ``"accept"`` takes decisions without ids, by their place, as user interfaces
            for ``HumanInTheLoopMiddleware`` send them: whoever clicks twice approves what is
            asked next.
        interrupt_payload: ``"ids"`` leaves the arguments out of the question.
        max_tool_calls: The most calls of one turn.
        human_timeout_s: Seconds a decision may take; None for no limit.
        approval_ttl_s: Seconds an approval is good.
        max_output_chars: Where a tool's output is cut, in characters.
        now: A clock giving epoch milliseconds; None takes the system's.

    Raises:
        AgentConfigError: A state lists a tool or output that is not here, ``side_effects`` names
            none of the tools, the chart invokes a service. When run: another tool hook lies
            inside this one, a durable ledger or a seal without a thread.

    Example:
        >>> from langchain_core.tools import tool
        >>> @tool
        ... def refund(order_id: int) -> str:
        ...     "Refund an order."
        ...     return "refunded"
        >>> chart = {"id": "desk", "initial": "open", "states": {
        ...     "open": {"meta": {"tools": ["refund"]}, "on": {"tool.done.refund": "closed"}},
        ...     "closed": {}}}
        >>> guard = StatechartMiddleware(chart, tools=[refund], side_effects=["refund"])
        >>> [each.name for each in guard.tools]
        ['refund']
    """

    state_schema = GuardedState

    def __init__(
        self,
        machine: Any,
        *,
        tools: Iterable[Any],
        ledger: Any = None,
        side_effects: Iterable[str] = (),
        outputs: Iterable[str] = (),
        scope: str | Callable[[Any], str] | None = None,
        seal: Any = None,
        positional: Positional = "refuse",
        interrupt_payload: Show = "full",
        max_tool_calls: int = 8,
        human_timeout_s: float | None = 86_400.0,
        approval_ttl_s: float = 3600.0,
        max_output_chars: int = 4000,
        now: Callable[[], float] | None = None,
    ) -> None:
        super().__init__()
        self._door = Door(
            "StatechartMiddleware",
            machine,
            tools,
            ledger=ledger,
            side_effects=side_effects,
            outputs=outputs,
            scope=scope,
            seal=seal,
            positional=positional,
            interrupt_payload=interrupt_payload,
            max_tool_calls=max_tool_calls,
            human_timeout_s=human_timeout_s,
            approval_ttl_s=approval_ttl_s,
            max_output_chars=max_output_chars,
            now=now,
        )
        self.tools: list[BaseTool] = list(self._door.tools.values())
        self._has_question = True
        if type(self) is StatechartMiddleware:
            idle: list[str] = []
            if not self._door.may_ask():
                self._has_question = False
                idle += ["after_model", "aafter_model"]
            if not self._door.may_move():
                idle += ["after_agent", "aafter_agent"]
            if idle:
                self.__class__ = _lacking(*idle)

    @property
    def name(self) -> str:
        """The name under which LangChain lists it, and its nodes."""
        return "StatechartMiddleware"

    @property
    def machine(self) -> Any:
        """The compiled chart."""
        return self._door.machine

    # New input

    def before_agent(self, state: Any, runtime: Any) -> dict[str, Any] | None:
        """Close what earlier input left open: each such call gets its result."""
        return self._superseded(self._door.open(state, runtime), state)

    async def abefore_agent(self, state: Any, runtime: Any) -> dict[str, Any] | None:
        """Do what `before_agent` does, from a running loop."""
        opened = await self._door.aopen(state, runtime)
        return await in_thread(opened.session.ledger, lambda: self._superseded(opened, state))

    def _superseded(self, opened: Opened, state: Any) -> dict[str, Any] | None:
        messages = state.get("messages") or []
        left = open_answers(messages)
        if not left:
            return self._stored(opened) if opened.fresh or opened.folded else None
        rebuilt = list(messages)
        for at, message, calls in reversed(left):
            texts: dict[str, str] = {}
            if message.id == opened.message_id:
                ids = [(opened.notes.get(call.id) or {}).get("row") for call in calls]
                texts = supersede(opened.session, calls, ids)
            results = [
                ToolMessage(
                    texts.get(call.id) or closing_text("superseded"),
                    name=call.name,
                    tool_call_id=call.id,
                    status="error",
                )
                for call in calls
            ]
            end = at + 1
            while end < len(rebuilt) and isinstance(rebuilt[end], ToolMessage):
                end += 1
            rebuilt[end:end] = results
        update = self._stored(opened)
        update["messages"] = [RemoveMessage(id=REMOVE_ALL_MESSAGES), *rebuilt]
        return update

    # The model

    def wrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], ModelResponse[Any]]
    ) -> Any:
        """Show what the state allows; propose what the answer calls."""
        opened = self._door.open(request.state, request.runtime)
        response = handler(self._shown(opened, request))
        return self._proposed(opened, request, response)

    async def awrap_model_call(
        self,
        request: ModelRequest[Any],
        handler: Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]],
    ) -> Any:
        """Do what `wrap_model_call` does, from a running loop."""
        opened = await self._door.aopen(request.state, request.runtime)
        response = await handler(self._shown(opened, request))
        ledger = opened.session.ledger
        return await in_thread(ledger, lambda: self._proposed(opened, request, response))

    def _shown(self, opened: Opened, request: ModelRequest[Any]) -> ModelRequest[Any]:
        door, allowed = self._door, opened.session.allowed()
        known = door.tools
        tools: list[Any] = [
            each
            for each in request.tools
            if isinstance(each, BaseTool) and known.get(each.name) is each and each.name in allowed
        ]
        tools += [item for name, item in door.provider_tools.items() if name in allowed]
        changes: dict[str, Any] = {}
        if tools != request.tools:
            changes["tools"] = tools
            # A choice that names a tool may name one that is gone.
            if not tools or request.tool_choice not in (None, "auto", "none", "any", "required"):
                changes["tool_choice"] = None
        wanted = self._format(opened, request.response_format)
        if wanted is not request.response_format:
            changes["response_format"] = wanted
        return request.override(**changes) if changes else request

    def _format(self, opened: Opened, given: Any) -> Any:
        """The response format without the outputs that the state withholds."""
        specs = _specs(given)
        kept = [s for s in specs if self._door.output_allowed(opened, s.name)]
        if len(kept) == len(specs):
            return given
        if not kept:
            return None
        return _narrowed(given, kept)

    def _proposed(self, opened: Opened, request: Any, response: ModelResponse[Any]) -> Any:
        door = self._door
        message = turn_of(response.result)
        if message is None:
            return response
        if message.id is None:
            message.id = str(uuid.uuid4())  # as LangGraph does when it is too late for the notes
        outputs = {spec.name for spec in _specs(request.response_format)}
        denied: dict[str, str] = {}
        for call in message.tool_calls:
            if call["name"] in outputs and call["name"] not in door.tools:
                allowed = door.output_allowed(opened, call["name"])
                denied[call["id"] or ""] = "" if allowed else NOT_NOW
        withheld = {ident for ident, reason in denied.items() if reason}
        spent = spent_before(request.state.get("messages") or [])
        notes = propose(door, opened, message, spent=spent, denied=denied)
        for ident in withheld:
            opened.session.send("output.denied", id=ident, reason=NOT_NOW)
        if withheld:
            response = _without(response, withheld)
        if not self._has_question:
            response = _answered(response, message, notes)
        if not opened.moved and _needs_no_notes(opened, message, notes):
            return response
        return ExtendedModelResponse(response, Command(update=self._stored(opened, notes, message)))

    # The question

    def after_model(self, state: Any, runtime: Any) -> dict[str, Any] | None:
        """Answer what is refused; ask, once, for all that needs a person."""
        message = turn_of(state["messages"])
        if message is None or not message.tool_calls or self._door.settled_turn(state, message):
            return None
        opened = self._door.open(state, runtime)
        asking = self._asking(opened, state, message)
        if asking.waits:
            asking.decide(*asking.ask(interrupt))
        return self._settled(opened, asking)

    async def aafter_model(self, state: Any, runtime: Any) -> dict[str, Any] | None:
        """Do what `after_model` does, from a running loop."""
        message = turn_of(state["messages"])
        if message is None or not message.tool_calls or self._door.settled_turn(state, message):
            return None
        opened = await self._door.aopen(state, runtime)
        ledger = opened.session.ledger
        asking = await in_thread(ledger, lambda: self._asking(opened, state, message))
        if await in_thread(ledger, lambda: asking.waits):
            decisions, by = asking.ask(interrupt)
            await in_thread(ledger, lambda: asking.decide(decisions, by))
        return await in_thread(ledger, lambda: self._settled(opened, asking))

    def _asking(self, opened: Opened, state: Any, message: AIMessage) -> Asking:
        return Asking(self._door, opened, message, answered_ids(state["messages"], message))

    def _settled(self, opened: Opened, asking: Asking) -> dict[str, Any] | None:
        settled = asking.settle()
        update: dict[str, Any] = {}
        messages: list[Any] = [*settled.results]
        if settled.rewritten is not None:
            messages.insert(0, settled.rewritten)
        if messages:
            update["messages"] = messages
        if opened.session.told or opened.changed:
            notes = list(opened.notes.values())
            update |= self._stored(opened, notes, asking.message)
        return update or None

    # The tool

    def wrap_tool_call(self, request: Any, handler: Callable[[Any], Any]) -> Any:
        """Judge the final call again, claim it, run it, record it, tell the chart."""
        self._check_innermost(handler)
        return Entry(self._door, self._door.open(request.state, request.runtime), request).run(
            handler
        )

    async def awrap_tool_call(self, request: Any, handler: Callable[[Any], Awaitable[Any]]) -> Any:
        """Do what `wrap_tool_call` does, from a running loop."""
        self._check_innermost(handler)
        opened = await self._door.aopen(request.state, request.runtime)
        ledger = opened.session.ledger
        entry = await in_thread(ledger, lambda: Entry(self._door, opened, request))
        return await entry.arun(handler)

    def _check_innermost(self, handler: Any) -> None:
        if getattr(handler, "__module__", None) == _FACTORY:
            raise AgentConfigError(
                "StatechartMiddleware: another middleware's tool hook lies inside this one and "
                "could change a call after it was checked; put StatechartMiddleware last"
            )

    # The end

    def after_agent(self, state: Any, runtime: Any) -> dict[str, Any] | None:
        """Fold the outcomes of the last turn."""
        if not state.get("xsm_events"):
            return None
        return self._stored(self._door.open(state, runtime))

    async def aafter_agent(self, state: Any, runtime: Any) -> dict[str, Any] | None:
        """Do what `after_agent` does, from a running loop."""
        if not state.get("xsm_events"):
            return None
        return self._stored(await self._door.aopen(state, runtime))

    def _stored(
        self, opened: Opened, notes: Any = (), message: AIMessage | None = None
    ) -> dict[str, Any]:
        door = self._door
        message_id = None if message is None else message.id
        update: dict[str, Any] = {door.state_key: door.written(opened, notes, message_id)}
        if opened.folded:
            update[door.events_key] = Overwrite([])
        return update


@functools.cache
def _lacking(*hooks: str) -> type[StatechartMiddleware]:
    """Return the class without hooks that would never have work.

    LangChain asks the class whether there is a hook, and makes a node of it if there is: a step
    and a checkpoint of each turn, or of each run.
    """
    left_out = {name: getattr(AgentMiddleware, name) for name in hooks}
    return type("StatechartMiddleware", (StatechartMiddleware,), left_out)


def _answered(
    response: ModelResponse[Any], message: AIMessage, notes: list[dict[str, Any]]
) -> ModelResponse[Any]:
    """The response, with a result for each call that was refused."""
    refused = {note["id"]: str(note["denied"]) for note in notes if note.get("denied")}
    if not refused:
        return response
    results = [
        refusal_message(
            shown_name(call.name), call.id, refusal_text(shown_name(call.name), refused[call.id])
        )
        for call in calls_of(message)
        if call.id in refused
    ]
    return ModelResponse([*response.result, *results], response.structured_response)


def _needs_no_notes(opened: Opened, message: AIMessage, notes: list[dict[str, Any]]) -> bool:
    """Whether nothing has to be known of a turn when its calls are entered.

    True of at most one call, that has no row and was not refused: it is judged once more then,
    and stands beside no other. Its id must not be one that older notes speak of. One that moves
    the chart is a batch of its own, since an outcome counts in its batch only.
    """
    if not message.tool_calls:
        return True
    if len(message.tool_calls) > 1 or not notes:
        return False
    if opened.session.moves_chart(message.tool_calls[0]["name"]):
        return False
    return notes[0].keys() == {"id"} and notes[0]["id"] not in opened.notes


def _specs(given: Any) -> list[Any]:
    """The outputs that a response format names."""
    if given is None:
        return []
    if isinstance(given, ToolStrategy):
        return list(given.schema_specs)
    if isinstance(given, ProviderStrategy):
        return [given.schema_spec]
    schema = given.schema if isinstance(given, AutoStrategy) else given
    return list(ToolStrategy(schema=schema).schema_specs)


def _narrowed(given: Any, kept: list[Any]) -> Any:
    schemas = tuple(spec.schema for spec in kept)
    if any(isinstance(each, dict) for each in schemas):
        schema: Any = schemas[0] if len(schemas) == 1 else {"oneOf": list(schemas)}
    else:
        schema = schemas[0]
        for each in schemas[1:]:
            schema = schema | each
    if isinstance(given, ToolStrategy):
        return ToolStrategy(
            schema=schema,
            tool_message_content=given.tool_message_content,
            handle_errors=given.handle_errors,
        )
    return AutoStrategy(schema=schema)


def _without(response: ModelResponse[Any], withheld: set[str]) -> ModelResponse[Any]:
    """The response without an output that the state withholds."""
    result = []
    structured = response.structured_response
    for message in response.result:
        if isinstance(message, ToolMessage) and message.tool_call_id in withheld:
            structured = None
            continue
        result.append(message)
    return ModelResponse(result=result, structured_response=structured)
