"""`pydantic_ai_service`: an Agent as a service that a chart invokes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, Generic, TypeAlias, TypeVar

from pydantic_ai.agent import AbstractAgent
from pydantic_ai.messages import (
    FinalResultEvent,
    ModelMessagesTypeAdapter,
    PartDeltaEvent,
    PartStartEvent,
    TextPart,
    TextPartDelta,
    ToolCallPart,
    ToolCallPartDelta,
)
from pydantic_ai.tools import DeferredToolRequests, DeferredToolResults, ToolApproved, ToolDenied
from pydantic_ai.usage import RunUsage, UsageLimits
from pydantic_core import to_jsonable_python

from guardchart.agents._services import METER
from guardchart.errors import AgentConfigError, ApprovalPendingError
from guardchart.gate import GuardSession, close_open, closing_text
from guardchart.gate._approvals import HUMAN_EVENTS
from guardchart.pydantic_ai._approvals import approvals_for, pending_approval
from guardchart.pydantic_ai._guard import StatechartGuard
from guardchart.pydantic_ai._outputs import output_wanted
from guardchart.pydantic_ai._turns import last_response, open_ids
from guardchart.pydantic_ai._usage import (
    KEPT,
    PAUSED,
    Requests,
    Spent,
    charge,
    mark,
    paused,
    spent_by,
    spent_of,
)
from guardchart.runtime import ServiceScope

__all__ = ["PydanticAIService", "pydantic_ai_service"]

From: TypeAlias = Callable[[Mapping[str, Any], Any], Any]
DepsT = TypeVar("DepsT")
OutputT = TypeVar("OutputT")


_NO_PROMPT: Final = object()


def pydantic_ai_service(
    agent: AbstractAgent[DepsT, OutputT],
    *,
    prompt_from: From,
    deps_from: Callable[[Mapping[str, Any], Any], DepsT] | None = None,
    stream: bool = False,
    history_from: From | None = None,
    limits_from: From | None = None,
    guard: bool = True,
) -> PydanticAIService[DepsT, OutputT]:
    """Make an Agent a service of a chart, its tools behind the invoking state's allow-list.

    Args:
        agent: a pydantic-ai Agent. An object that only has ``run(prompt, deps=)`` (and
            ``run_stream``) works, too, typed as Any; nothing guards its tools.
        prompt_from: ``(context, event) -> prompt``. Not asked when a HUMAN_* event resumes a
            paused run. While one waits, a prompt closes its calls as superseded; None goes on.
        deps_from: ``(context, event) -> deps``.
        stream: True sends ``STREAM`` events: ``{"delta": text}`` for each piece of the answer,
            then the final result.
        history_from: ``(context, event)`` gives the messages so far, or what a paused run left;
            None takes what `usage_logic` stored of a paused one.
        limits_from: ``(context, event) -> UsageLimits``, or a mapping of its fields.
        guard: False leaves the agent's tools to whatever guards the agent has itself.

    Returns:
        The service. Its ``onDone`` data is ``{"output", "usage"}``, or for a run that waits for
        a person ``{"deferred", "messages", "conversation_id", "usage"}``; usage is
        ``{"input_tokens", "output_tokens", "requests"}``. It is charged to the context's
        counters however the run ends: done, failed, cancelled, out of time.

    Raises:
        AgentConfigError: the agent has output validators and does not declare
            ``DeferredToolRequests``; it has to, since a run cannot add it then.

    >>> from pydantic_ai import Agent
    >>> from pydantic_ai.models.test import TestModel
    >>> service = pydantic_ai_service(Agent(TestModel()), prompt_from=lambda context, event: "hi")
    >>> import asyncio
    >>> asyncio.run(service(None, {}, None))["output"]
    'success (no tool calls)'

    Source: xstate-statemachine, agents reference: pydantic-ai.
    """
    return PydanticAIService(
        agent,
        prompt_from=prompt_from,
        deps_from=deps_from,
        stream=stream,
        history_from=history_from,
        limits_from=limits_from,
        guard=guard,
    )


class PydanticAIService(Generic[DepsT, OutputT]):
    """Runs an agent: ``(scope, context, event) -> {"output", "usage"}``. See the function."""

    __guardchart_form__ = 3
    is_async = True

    def __init__(
        self,
        agent: Any,
        *,
        prompt_from: From,
        deps_from: From | None,
        stream: bool,
        history_from: From | None,
        limits_from: From | None,
        guard: bool,
    ) -> None:
        self._real = isinstance(agent, AbstractAgent)
        if not self._real and not callable(getattr(agent, "run", None)):
            raise AgentConfigError(
                f"pydantic_ai_service: {type(agent).__name__} is no agent; it has no run()"
            )
        self.agent: AbstractAgent[DepsT, OutputT] = agent
        self._prompt_from = prompt_from
        self._deps_from = deps_from
        self._stream = stream
        self._history_from = history_from
        self._limits_from = limits_from
        self._guard = guard and self._real
        self._dropped: set[tuple[str, str]] = set()
        self._output_type = _output_type(agent) if self._guard else None

    def __call__(self, scope: ServiceScope | None, context: Mapping[str, Any], event: Any) -> Any:
        run = self._run_real if self._real else self._run_other
        return run(scope, context, event)

    def settle(self, context: Mapping[str, Any], outcome: Any) -> dict[str, Any]:
        """Charge a run that ended, done or failed."""
        spent = spent_by(outcome)
        if spent is None and isinstance(outcome, BaseException):
            spent = mark(outcome, Spent(usage={}))
        if spent is None:
            return charge(context, {})
        spent.charged = True
        return {} if spent.nothing else charge(context, spent["usage"], spent)

    late = settle

    # An agent of pydantic-ai

    async def _run_real(
        self, scope: ServiceScope | None, context: Mapping[str, Any], event: Any
    ) -> Spent:
        usage, requests = RunUsage(), Requests(_meter(scope))
        try:
            result = await self._ask(scope, context, event, usage, requests)
        except ApprovalPendingError:
            return self._still_paused(context, event)
        except BaseException as exc:
            # Cancelled runs are charged, too. A request that failed is a turn as well, and the
            # provider reports nothing of it.
            mark(exc, spent_of(usage, requests.made))
            raise
        return self._finished(scope, result, usage)

    async def _ask(
        self,
        scope: ServiceScope | None,
        context: Mapping[str, Any],
        event: Any,
        usage: RunUsage,
        requests: Requests,
    ) -> Any:
        options: dict[str, Any] = {"usage": usage, "deps": _asked(self._deps_from, context, event)}
        limits = _asked(self._limits_from, context, event)
        if limits is not None:
            options["usage_limits"] = (
                UsageLimits(**limits) if isinstance(limits, Mapping) else limits
            )
        session = None
        if requests.metered:
            options["capabilities"] = [requests]
        if self._guard and scope is not None:
            made: StatechartGuard[Any] = StatechartGuard(scope, scope=scope.host.scope)
            made.dropped = self._dropped
            options["capabilities"] = [requests, made]
            options["output_type"] = self._output_type
            session = made.session_of(scope.host.scope)
        prompt = self._resumed(session, context, event, options)
        if prompt is _NO_PROMPT:
            prompt = self._prompt_from(context, event)
        if self._stream and scope is not None:
            options["event_stream_handler"] = _Streamed(scope, session)
        run: Any = self.agent.run
        return await run(prompt, **options)

    def _resumed(
        self,
        session: GuardSession | None,
        context: Mapping[str, Any],
        event: Any,
        options: dict[str, Any],
    ) -> Any:
        """Add what a run goes on with; return the prompt, `_NO_PROMPT` where it is to be asked."""
        found = self._found(context, event)
        if found is None:
            return _NO_PROMPT
        if not paused(found):
            options["message_history"] = _messages(
                found.get("messages", ()) if isinstance(found, Mapping) else found
            )
            return _NO_PROMPT
        messages = _messages(found.get("messages", ()))
        options["message_history"] = messages
        if isinstance(found.get("conversation_id"), str):
            options["conversation_id"] = found["conversation_id"]
        if session is None:
            return _NO_PROMPT
        requests = _requests(found, messages, session.host.scope)
        prompt = None
        if getattr(event, "type", None) not in HUMAN_EVENTS:
            prompt = self._prompt_from(context, event)
        if prompt is None:
            results = approvals_for(requests, _Asked(session, self._dropped))
            results.calls.update(_given(event, requests))
        else:
            results = _superseded(requests, session)
        options["deferred_tool_results"] = results
        return prompt

    def _found(self, context: Mapping[str, Any], event: Any) -> Any:
        if self._history_from is not None:
            return self._history_from(context, event)
        return context.get(PAUSED)

    def _finished(self, scope: ServiceScope | None, result: Any, usage: RunUsage) -> Spent:
        output = result.output
        if isinstance(output, DeferredToolRequests):
            return spent_of(
                usage,
                deferred=_deferred(output),
                messages=ModelMessagesTypeAdapter.dump_python(result.all_messages(), mode="json"),
                conversation_id=result.conversation_id,
            )
        spent = spent_of(usage, output=_plain(output))
        if self._stream and scope is not None:
            scope.stream(spent)
        return spent

    def _still_paused(self, context: Mapping[str, Any], event: Any) -> Spent:
        """Nothing ran: some calls are decided, others still wait."""
        found = self._found(context, event)
        spent = spent_of({}, **{key: found[key] for key in KEPT if key in found})
        spent.nothing = True
        return spent

    # Anything else that runs

    async def _run_other(
        self, scope: ServiceScope | None, context: Mapping[str, Any], event: Any
    ) -> Spent:
        prompt = self._prompt_from(context, event)
        deps = _asked(self._deps_from, context, event)
        if (meter := _meter(scope)) is not None:
            meter.spend()  # how often it asks a model is not to be seen; at least once
        other: Any = self.agent
        if self._stream and scope is not None and hasattr(other, "run_stream"):
            async with other.run_stream(prompt, deps=deps) as run:
                async for delta in run.stream_text(delta=True):
                    scope.stream({"delta": delta})
                return self._told(await run.get_output(), run, scope)
        result = other.run(prompt, deps=deps)
        if isinstance(result, Awaitable):
            result = await result
        output = result.output if hasattr(result, "output") else getattr(result, "data", None)
        return self._told(output, result, scope)

    def _told(self, output: Any, result: Any, scope: ServiceScope | None) -> Spent:
        spent = spent_of(getattr(result, "usage", None) or {}, output=_plain(output))
        if self._stream and scope is not None:
            scope.stream(spent)
        return spent


class _Asked(StatechartGuard[Any]):
    """The guard of a run that is about to be resumed, for `approvals_for`."""

    def __init__(self, session: GuardSession, dropped: set[tuple[str, str]]) -> None:
        super().__init__(session)
        self.dropped = dropped
        self._sessions[session.host.scope] = session


class _Streamed:
    """Turns the events of a run into ``STREAM`` events of the chart."""

    def __init__(self, scope: ServiceScope, session: GuardSession | None) -> None:
        self._scope = scope
        self._session = session

    async def __call__(self, ctx: Any, events: Any) -> None:
        output: str | None = None
        answer: int | None = None
        names: dict[int, str] = {}
        async for event in events:
            if isinstance(event, FinalResultEvent):
                output = event.tool_name
                answer = next((at for at, name in names.items() if name == output), answer)
            elif isinstance(event, PartStartEvent):
                if isinstance(event.part, TextPart):
                    self._send(event.part.content, "text")
                elif isinstance(event.part, ToolCallPart):
                    names[event.index] = event.part.tool_name
            elif isinstance(event, PartDeltaEvent):
                if isinstance(event.delta, TextPartDelta):
                    self._send(event.delta.content_delta, "text")
                elif isinstance(event.delta, ToolCallPartDelta) and event.index == answer:
                    self._send(event.delta.args_delta, output or "")

    def _send(self, text: Any, kind: str) -> None:
        if not text or not isinstance(text, str):
            return
        if self._session is not None and not output_wanted(self._session, kind):
            return  # the state will send this answer back; nobody is to read it meanwhile
        self._scope.stream({"delta": text})


# Small things


def _meter(scope: ServiceScope | None) -> Any:
    return None if scope is None else scope.interpreter.attachments.get(METER)


def _asked(fn: From | None, context: Mapping[str, Any], event: Any) -> Any:
    return None if fn is None else fn(context, event)


def _plain(output: Any) -> Any:
    try:
        return to_jsonable_python(output)
    except Exception:  # the application's own object: a live machine takes it as it is
        return output


def _output_type(agent: Any) -> Any:
    given = agent.output_type
    kinds = list(given) if isinstance(given, (list, tuple)) else [given]
    if DeferredToolRequests in kinds:
        return None
    if getattr(agent, "_output_validators", None):
        raise AgentConfigError(
            "pydantic_ai_service: this agent has output validators, so a run cannot add an output "
            "type; declare it: Agent(..., output_type=[..., DeferredToolRequests])"
        )
    return [*kinds, DeferredToolRequests]


def _messages(found: Any) -> list[Any]:
    if isinstance(found, (str, bytes)):
        return list(ModelMessagesTypeAdapter.validate_json(found))
    items = list(found or ())
    if items and isinstance(items[0], Mapping):
        return list(ModelMessagesTypeAdapter.validate_python(items))
    return items


def _deferred(requests: DeferredToolRequests) -> list[dict[str, Any]]:
    """Return the open calls as plain data: those asked about, held ones, external ones."""
    out = [*pending_approval(requests)]
    known = {item["tool_call_id"] for item in out}
    for call in (*requests.approvals, *requests.calls):
        if call.tool_call_id in known:
            continue
        kind = "external" if call in requests.calls else "held"
        out.append(
            {
                "id": call.tool_call_id,
                "tool_call_id": call.tool_call_id,
                "name": call.tool_name,
                "arguments": call.args_as_dict(),
                kind: True,
            }
        )
    return out


def _requests(
    found: Mapping[str, Any], messages: Sequence[Any], scope: str
) -> DeferredToolRequests:
    """Return what the paused run asked, from plain data that nobody vouches for."""
    items = {
        item["tool_call_id"]: item
        for item in found["deferred"]
        if isinstance(item, Mapping) and isinstance(item.get("tool_call_id"), str)
    }
    _, response = last_response(messages)
    waiting = open_ids(messages)
    out = DeferredToolRequests()
    for call in () if response is None else response.tool_calls:
        item = items.get(call.tool_call_id, {})
        if call.tool_call_id not in waiting:
            continue
        if item.get("external"):
            out.calls.append(call)
            continue
        out.approvals.append(call)
        shown = {
            "scope": scope,
            "call_id": item.get("id") if isinstance(item.get("id"), str) else call.tool_call_id,
            "tool": item.get("name"),
            "digest": item.get("digest"),
            "arguments": item.get("arguments"),
        }
        if item.get("held"):
            shown["held"] = True
        out.metadata[call.tool_call_id] = {"guardchart": shown}
    return out


def _given(event: Any, requests: DeferredToolRequests) -> dict[str, Any]:
    """Return the results of external calls that an event brings, by id."""
    payload = getattr(event, "payload", None)
    results = payload.get("results") if isinstance(payload, Mapping) else None
    wanted = {call.tool_call_id for call in requests.calls}
    given = dict(results) if isinstance(results, Mapping) else {}
    if missing := wanted - given.keys():
        raise ApprovalPendingError(
            [{"id": call.tool_call_id} for call in requests.calls if call.tool_call_id in missing]
        )
    return {ident: given[ident] for ident in wanted}


def _superseded(requests: DeferredToolRequests, session: GuardSession) -> DeferredToolResults:
    """Close the open calls of a paused run, and tell each what became of it."""
    ledger, scope = session.ledger, session.host.scope
    out = DeferredToolResults()
    rows: dict[str, str] = {}
    for call in requests.approvals:
        row_id = requests.metadata[call.tool_call_id]["guardchart"]["call_id"]
        row = ledger.row(scope, row_id, follow=False)
        if row is not None and row.slot.tool == call.tool_name:
            rows[call.tool_call_id] = row_id
    answers = close_open(ledger, scope, rows.values(), "superseded", now=session.now_ms())
    for call in requests.approvals:
        answer = answers.get(rows.get(call.tool_call_id, ""))
        if answer is not None and answer.status == "done":
            out.approvals[call.tool_call_id] = ToolApproved()
        else:
            text = closing_text("superseded") if answer is None else answer.text
            out.approvals[call.tool_call_id] = ToolDenied(text)
    for call in requests.calls:
        out.calls[call.tool_call_id] = closing_text("superseded")
    return out
