"""Executing one request of a step: the one place of the step path that has an effect."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from guardchart.agents._calls import CallResult
from guardchart.agents._models import ModelResponse
from guardchart.agents._recorded import dump_turn
from guardchart.agents._requests import (
    AgentDecisionRequest,
    AgentExecutorInfo,
    AgentRequest,
    AgentRequestExecutors,
    AgentTextRequest,
    AgentToolRequest,
    ChosenEvent,
    Generated,
    as_generated,
    call_executor,
    settled,
)
from guardchart.agents._resolve import Calls, Later, attempts, run_calls, run_calls_sync
from guardchart.agents._services import CallModel, RunTool
from guardchart.agents._stepper import FixedClock, Waiting
from guardchart.errors import AgentConfigError, NotSupportedError, ToolDeniedError
from guardchart.gate import (
    Facts,
    ToolCall,
    ToolRegistry,
    aexecute,
    as_allowed,
    execute,
    tool_registry,
)
from guardchart.kernel import can
from guardchart.runtime import SystemClock

__all__ = [
    "Executed",
    "as_executors",
    "execute_agent_request",
    "execute_agent_request_sync",
    "execute_waiting",
    "execute_waiting_sync",
]


_NO_EXECUTORS: Final = AgentRequestExecutors()
_ASYNC: Final = "execute_agent_request_sync: the executor is async; await execute_agent_request"


class Executed(NamedTuple):
    """What became of a request.

    Attributes:
        output: What `resolve_agent_step` takes; JSON types for tools and the loop's model.
        raw: What the executor returned, for logs and audits.

    Example:
        >>> from guardchart.agents import AgentTextRequest, execute_agent_request_sync
        >>> request = AgentTextRequest(id="draft@2", prompt="Say hi.")
        >>> executors = {"generate_text": lambda request: {"text": "hi", "finish": "stop"}}
        >>> execute_agent_request_sync(request, executors, verbose=True)
        Executed(output='hi', raw={'text': 'hi', 'finish': 'stop'})
    """

    output: Any
    raw: Any


def as_executors(executors: Any) -> AgentRequestExecutors:
    """The executors of a host: as such, or as a mapping of their names.

    Raises:
        AgentConfigError: There is no such slot.
    """
    if executors is None:
        return _NO_EXECUTORS
    if isinstance(executors, AgentRequestExecutors):
        return executors
    slots = AgentRequestExecutors.__slots__
    if not isinstance(executors, Mapping) or not set(executors) <= set(slots):
        raise AgentConfigError(f"executors: an AgentRequestExecutors, or a dict of {list(slots)}")
    return AgentRequestExecutors(**executors)


async def execute_agent_request(
    request: AgentRequest,
    executors: AgentRequestExecutors | Mapping[str, Any] | None = None,
    *,
    tools: ToolRegistry | None = None,
    ledger: Any = None,
    scope: str | None = None,
    verbose: bool = False,
    now: float | None = None,
) -> Any:
    """Execute one request of a step.

    Text goes to ``generate_text`` or ``stream_text``, a decision to ``decide`` until one of its
    candidates fits, a tool call through the gate, in the state of the step that made the
    request. The loop's own model call brings its model and needs no executor.

    Args:
        request: The request, as the step gave it. One read from JSON knows no state any more:
            text still works, a tool call is refused; take it from `get_agent_requests`.
        executors: ``AgentRequestExecutors``, or a dict of its fields.
        tools: The tools, instead of those of the machine's logic.
        ledger: The ledger, instead of the step's.
        scope: The scope, instead of the step's.
        verbose: Whether to return an `Executed` with the raw result too.
        now: The time that approvals are judged by, epoch milliseconds; the wall clock by
            default.

    Returns:
        What `resolve_agent_step` takes: the value of a text request, of the loop's model a turn
        as JSON types, of a decision the chosen event, of a tool call its result as JSON types.
        A tool call that is denied or fails is told in its result.

    Raises:
        AgentConfigError: The executor that is needed was not given; nothing ran.
        DecisionExhaustedError: No answer to a decision could be taken.
        Exception: Whatever a text or decision executor raised; hand it to `resolve_agent_step`
            as ``error=``.

    Source: @statelyai/agent, executeAgentRequest.

    Example:
        >>> import asyncio
        >>> request = AgentTextRequest(id="draft@2", prompt="Say hi.")
        >>> answer = execute_agent_request(request, {"generate_text": lambda request: "hi"})
        >>> asyncio.run(answer)
        'hi'
    """
    run = _Execution(request, executors, tools, ledger, scope, now)
    executed = await run.aexecuted()
    return executed if verbose else executed.output


def execute_agent_request_sync(
    request: AgentRequest,
    executors: AgentRequestExecutors | Mapping[str, Any] | None = None,
    *,
    tools: ToolRegistry | None = None,
    ledger: Any = None,
    scope: str | None = None,
    verbose: bool = False,
    now: float | None = None,
) -> Any:
    """`execute_agent_request` for synchronous executors, models and tools.

    Args, Returns and Raises are those of `execute_agent_request`; also:

    Raises:
        NotSupportedError: The executor or the model is async. An async tool is run.

    Example:
        >>> request = AgentTextRequest(id="draft@2", prompt="Say hi.")
        >>> execute_agent_request_sync(request, {"generate_text": lambda request: "hi"})
        'hi'
    """
    executed = _Execution(request, executors, tools, ledger, scope, now).executed()
    return executed if verbose else executed.output


def execute_waiting_sync(request: AgentRequest, executors: Any, waiting: Waiting) -> Any:
    """`execute_agent_request_sync` for a host that has the machine at hand, opened.

    Its clock, ledger and scope are those of the machine.
    """
    return _Execution(request, executors, None, None, None, None, waiting).executed().output


async def execute_waiting(request: AgentRequest, executors: Any, waiting: Waiting) -> Any:
    """As `execute_waiting_sync`, on the running loop."""
    run = _Execution(request, executors, None, None, None, None, waiting)
    return (await run.aexecuted()).output


class _Execution:
    """One execution; its sync and its async form differ in the waiting only."""

    def __init__(
        self,
        request: AgentRequest,
        executors: Any,
        tools: ToolRegistry | None,
        ledger: Any,
        scope: str | None,
        now: float | None,
        waiting: Waiting | None = None,
    ) -> None:
        self.request = request
        self.executors = as_executors(executors)
        self.tools = tools
        if tools is not None and not isinstance(tools, ToolRegistry):
            raise AgentConfigError("tools= must be a ToolRegistry; make one by tool_registry()")
        if not isinstance(request, AgentTextRequest | AgentDecisionRequest | AgentToolRequest):
            raise AgentConfigError("execute_agent_request: a request of a step, see step.requests")
        self.waiting = waiting
        self.raw: Any = None
        origin = request._origin if waiting is None else None
        if origin is not None:
            clock = SystemClock() if now is None else FixedClock(now)
            service_id = request.id.rpartition("#")[0] or request.id
            for waiting in origin.opened(clock, scope, ledger).waiting():
                if waiting.id == service_id:
                    self.waiting = waiting
                    break

    @property
    def service(self) -> Any:
        return None if self.waiting is None else self.waiting.invocation.service

    def executed(self) -> Executed:
        request = self.request
        if isinstance(request, AgentToolRequest):
            return self._tool()
        if isinstance(self.service, CallModel):
            return self._turn(self._plain(self._model()))
        if isinstance(request, AgentTextRequest):
            return self._text(self._plain(self._asked()))
        chosen = run_calls_sync(self._decision(request))
        if isinstance(chosen, Later):
            chosen.close()
            raise NotSupportedError(_ASYNC)
        return Executed(chosen, self.raw)

    async def aexecuted(self) -> Executed:
        request = self.request
        if isinstance(request, AgentToolRequest):
            return await self._atool()
        if isinstance(self.service, CallModel):
            return self._turn(await settled(self._model()))
        if isinstance(request, AgentTextRequest):
            return self._text(await settled(self._asked()))
        return Executed(await run_calls(self._decision(request)), self.raw)

    def _plain(self, result: Any) -> Any:
        if not inspect.isawaitable(result):
            return result
        if inspect.iscoroutine(result):
            result.close()
        raise NotSupportedError(_ASYNC)

    # Text

    def _model(self) -> Any:
        assert self.waiting is not None
        scope = self.waiting.scope
        return self.service(scope, scope.context, None)

    def _turn(self, turn: ModelResponse) -> Executed:
        return Executed(dump_turn(turn), turn)

    def _asked(self) -> Any:
        request = self.request
        assert isinstance(request, AgentTextRequest)
        return call_executor(
            self._executor("stream_text" if request.stream else "generate_text"), request, None
        )

    def _executor(self, slot: str) -> Any:
        """The source's own executor, else the host's."""
        executor = getattr(self.service, "executor", None) or getattr(self.executors, slot)
        if executor is None:
            request = self.request
            raise AgentConfigError(
                f"request {request.id!r} of source {request.src!r} needs the executor {slot}="
            )
        return executor

    def _text(self, result: Any) -> Executed:
        request = self.request
        assert isinstance(request, AgentTextRequest)
        generated = as_generated(result)
        raw, output = generated.raw, generated.output
        answer = output if isinstance(output, ModelResponse) else raw
        if isinstance(answer, ModelResponse) and (request.tools or answer.tool_calls):
            return Executed(dump_turn(answer), raw)
        return Executed(output, raw)

    # Decisions

    def _decision(self, request: AgentDecisionRequest) -> Calls[ChosenEvent]:
        waiting = self.waiting

        def noted(asked: AgentDecisionRequest, result: Generated) -> None:
            self.raw = result.raw

        return attempts(
            request,
            self._executor("decide"),
            AgentExecutorInfo(),
            can_take=None if waiting is None else lambda event: can(waiting.scope.snapshot, event),
            on_result=noted,
        )

    # Tools

    def _index(self) -> int:
        return int(self.request.id.rpartition("#")[2])

    def _calls(self) -> Any:
        """The pending calls of the request's turn; None where the request knows no state."""
        if self.waiting is None or not isinstance(self.service, RunTool):
            return None
        scope = self.waiting.scope
        calls = self.service.calls(scope, scope.context)
        if self.tools is not None:
            calls.registry = self.tools
        return calls if self._fits(calls) else None

    def _fits(self, calls: Any) -> bool:
        number = self.request.id.rpartition("#")[2]
        return number.isascii() and number.isdigit() and int(number) < len(calls.calls)

    def _unknown(self) -> tuple[ToolCall, Facts]:
        """A call of which no state is known: nothing is allowed there."""
        request = self.request
        assert isinstance(request, AgentToolRequest)
        call = ToolCall(request.tool_call_id, request.name, dict(request.arguments))
        return call, Facts(self.tools or tool_registry(), as_allowed(()))

    def _tool(self) -> Executed:
        calls = self._calls()
        if calls is None:
            return _told(CallResult.of(execute(*self._unknown())))
        try:
            calls.prepare()
        except ToolDeniedError as error:
            return _told(CallResult.refused(error))
        except Exception as error:
            return _told(CallResult.broken(error))
        calls.run(self._index())
        return _told(calls.results[self._index()])

    async def _atool(self) -> Executed:
        calls = self._calls()
        if calls is None:
            return _told(CallResult.of(await aexecute(*self._unknown())))
        try:
            if getattr(calls.ledger, "blocking", False):
                await asyncio.to_thread(calls.prepare)
            else:
                calls.prepare()
        except ToolDeniedError as error:
            return _told(CallResult.refused(error))
        except Exception as error:
            return _told(CallResult.broken(error))
        await calls.arun(self._index())
        return _told(calls.results[self._index()])


def _told(result: CallResult) -> Executed:
    data = result.dump()
    return Executed(data, data)
