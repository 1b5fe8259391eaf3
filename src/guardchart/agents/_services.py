"""The loop's two services: the model call, and the tools a turn may run."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final

from guardchart.agents._budgets import add_usage
from guardchart.agents._calls import CallResult, PendingCalls
from guardchart.agents._context import pending_entries, request_messages
from guardchart.agents._models import ModelCall, ModelResponse, Usage, is_async_model
from guardchart.agents._observe import chunk_listener, watch_model
from guardchart.agents._parts import messages_from_compact
from guardchart.agents._recorded import load_failure, load_turn, plain
from guardchart.agents._requests import LoopTextRequest, LoopToolRequest
from guardchart.agents._stepper import Fed
from guardchart.agents._turn import ModelTurn, charged_turn
from guardchart.errors import AgentError
from guardchart.gate import ToolCall, ToolRegistry, allowed_tools
from guardchart.runtime import ServiceScope

__all__ = ["METER", "CallModel", "RunTool"]


METER: Final = "meter"
"""The attachment of an interpreter whose ``spend()`` is called before each model call."""


class CallModel:
    """Asks the model once: ``(scope, context, event) -> ModelTurn``.

    Its usage is added by ``settle`` when it ends, failed or not, and by ``late`` when it ends
    after its state was left.
    """

    __guardchart_form__ = 3

    def __init__(
        self,
        model: ModelCall,
        registry: ToolRegistry,
        *,
        system_prompt: str | None = None,
        is_async: bool | None = None,
    ) -> None:
        self.model = model
        self.registry = registry
        self.system_prompt = system_prompt
        self.is_async = is_async_model(model) if is_async is None else is_async
        self.bounded = getattr(model, "bounded", False) is True
        self._only_reads = getattr(model, "only_reads", False) is True
        # Asked of the class: what passes everything on to another model is not that model.
        plain = getattr(type(model), "in_sync", None) if self.is_async else None
        called = None if plain is None else plain(model)
        self.in_sync: CallModel | None = (
            None
            if called is None
            else CallModel(called, registry, system_prompt=system_prompt, is_async=False)
        )

    def __call__(self, scope: ServiceScope | None, context: Mapping[str, Any], event: Any) -> Any:
        if scope is not None:
            meter = scope.interpreter.attachments.get(METER)
            if meter is not None:
                meter.spend()
        allowed = allowed_tools(None if scope is None else scope.node)
        messages = request_messages(context, self.system_prompt, shared=self._only_reads)
        schemas = self.registry.schemas(allowed)
        if self.is_async:
            return self._ask(scope, messages, schemas)
        with watch_model(scope, self.model, messages, schemas) as watch:
            answer = self._begin(scope, messages, schemas)
            if not isinstance(answer, ModelResponse) and inspect.isawaitable(answer):
                if inspect.iscoroutine(answer):
                    answer.close()
                raise TypeError(
                    "the model returned an awaitable under SyncInterpreter; use a sync model, or "
                    "the async Interpreter"
                )
            turn = _turn(answer)
            watch.ended(turn)
        return turn

    def step_requests(self, scope: ServiceScope, id: str) -> list[Any]:
        """The model call as a request of the step path; it brings its own model."""
        context = scope.context
        allowed = allowed_tools(scope.node)
        name = getattr(self.model, "name", None)

        def late(name: str) -> Any:
            if name == "tools":
                return self.registry.schemas(allowed)
            try:
                return messages_from_compact(request_messages(context, None, shared=True))
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                # A restored context may hold anything.
                raise AgentError("the context's messages are no conversation") from error

        request = LoopTextRequest.made(
            late,
            id=id,
            src=scope.invocation.src,
            model=name if isinstance(name, str) else None,
            system=self.system_prompt,
        )
        return [request]

    def step_result(self, scope: ServiceScope, id: str, data: Any) -> Fed:
        """What an answer makes of the call: its turn, as if the service had asked itself."""
        return Fed(_read(data))

    def step_late(self, data: Any) -> Any:
        """What an answer cost that nobody waits for any more."""
        return _read(data)

    async def _ask(
        self, scope: ServiceScope | None, messages: list[Any], schemas: list[Any]
    ) -> ModelTurn:
        with watch_model(scope, self.model, messages, schemas) as watch:
            answer: Any = self._begin(scope, messages, schemas)
            turn = _turn(await answer if inspect.isawaitable(answer) else answer)
            watch.ended(turn)
        return turn

    def _begin(self, scope: ServiceScope | None, messages: list[Any], schemas: list[Any]) -> Any:
        """Ask the model; piece by piece where it can and somebody listens."""
        stream = getattr(self.model, "stream", None)
        listener = None if stream is None else chunk_listener(scope)
        if stream is None or listener is None:
            return self.model(messages, schemas)
        return stream(messages, schemas, listener)

    def settle(self, context: Mapping[str, Any], outcome: Any) -> dict[str, Any]:
        """One more turn and its usage; a failed call is a turn too."""
        return add_usage(context, _usage(outcome), turns=1)

    def late(self, context: Mapping[str, Any], outcome: Any) -> dict[str, Any]:
        """The usage of a call whose turn was counted when its deadline fired."""
        used = _usage(outcome)
        return add_usage(context, used) if used != Usage() else {}


def _turn(answer: Any) -> ModelTurn:
    if not isinstance(answer, ModelResponse):
        raise AgentError(
            f"a model must return a ModelResponse, not {type(answer).__name__}; see ModelCall"
        )
    if answer.tool_calls and not all(isinstance(call, ToolCall) for call in answer.tool_calls):
        raise AgentError("a model's tool_calls must be ToolCall objects")
    return charged_turn(
        answer.text, answer.tool_calls, answer.usage, answer.model, answer.finish_reason
    )


def _read(data: Any) -> ModelTurn:
    """The turn of a result that a host brings."""
    return _turn(data) if isinstance(data, ModelResponse) else load_turn(data)


def _usage(outcome: Any) -> Usage:
    found = getattr(outcome, "usage", None)
    return found if found is not None else Usage()


class RunTool:
    """Runs the pending calls through the gate: ``(scope, context, event) -> results``.

    Read-only calls run concurrently, then side effects one after another in the model's
    order. Whatever happens, every pending call has a result: in what is returned, or in
    ``results`` of what is raised.

    Returns:
        ``[{"tool_call_id", "content"}, ...]``, one per pending call.

    Raises:
        ToolDeniedError: A call may not run; none of the batch did.
        ToolBatchError, ToolTimeoutError: A tool failed or did not answer in time.
    """

    __guardchart_form__ = 3

    def __init__(
        self,
        registry: ToolRegistry,
        *,
        ledger: Callable[[Any], Any],
        max_tool_calls: int = 8,
        is_async: bool = True,
    ) -> None:
        self.registry = registry
        self.ledger = ledger
        self.max_tool_calls = max_tool_calls
        self.is_async = is_async

    def __call__(self, scope: ServiceScope | None, context: Mapping[str, Any], event: Any) -> Any:
        calls = self.calls(scope, context)
        return self._arun(calls) if self.is_async else self._run(calls)

    def calls(self, scope: ServiceScope | None, context: Mapping[str, Any]) -> PendingCalls:
        """The pending calls of a machine, with the ledger its host brought."""
        return PendingCalls(
            scope,
            context,
            self.registry,
            ledger=self.ledger(None if scope is None else scope.host),
            max_tool_calls=self.max_tool_calls,
        )

    # The same, one request a call

    def step_at_once(self, scope: ServiceScope) -> Any:
        """The results of a batch without calls; None where there are any."""
        return None if pending_entries(scope.context) else []

    def step_requests(self, scope: ServiceScope, id: str) -> list[Any]:
        """The calls that may run now, side by side, each a request of the step path."""
        calls, known = self._noted(scope)
        calls.recall(known)
        return [self._request(calls, index, id) for index in calls.ready()]

    def _request(self, calls: PendingCalls, index: int, id: str) -> LoopToolRequest:
        call, row_id = calls.calls[index], calls.entries[index].get("row_id")

        def late(name: str) -> Any:
            verdict = calls.verdicts[index]
            if name == "timeout_s":
                return 0.0 if verdict.tool is None else verdict.tool.timeout_s
            return verdict.needs_row if name == "side_effect" else getattr(verdict, name)

        return LoopToolRequest.made(
            late,
            id=f"{id}#{index}",
            src="runTool" if calls.scope is None else calls.scope.invocation.src,
            tool_call_id=call.id,
            name=call.name,
            arguments=plain(call.arguments, "an argument"),
            row_id=row_id if isinstance(row_id, str) else None,
        )

    def step_result(self, scope: ServiceScope, id: str, data: Any) -> Fed:
        """What a call's result makes of the batch: its end, or a note of what is known."""
        calls, known = self._noted(scope)
        index = _index(id, len(calls.calls))
        result = data if isinstance(data, CallResult) else CallResult.load(data)
        if index is None or result is None:
            raise AgentError("the result of a tool request is what execute_agent_request gave")
        known.setdefault(index, result)
        calls.recall(known)
        if calls.ready() and result.batch is None:
            noted = {str(each): known.dump() for each, known in sorted(calls.results.items())}
            return Fed(note={"results": noted})
        try:
            return Fed(calls.close())
        except AgentError as error:
            return Fed(error=error)

    def step_failure(self, scope: ServiceScope, id: str, error: Any) -> Fed:
        """A host that could not execute the call: whether it was entered only its row knows."""
        return self.step_result(scope, id, CallResult.broken(load_failure(error)))

    def _noted(self, scope: ServiceScope) -> tuple[PendingCalls, dict[int, CallResult]]:
        """The pending calls, and the results that the snapshot notes."""
        calls = PendingCalls(
            scope, scope.context, self.registry, max_tool_calls=self.max_tool_calls
        )
        child = scope.snapshot.children.get(scope.invocation.id)
        noted = getattr(child, "snapshot", None)
        noted = noted.get("results") if isinstance(noted, Mapping) else None
        known: dict[int, CallResult] = {}
        for key, data in noted.items() if isinstance(noted, Mapping) else ():
            index, result = _index(f"#{key}", len(calls.calls)), CallResult.load(data)
            if index is not None and result is not None:
                known[index] = result
        return calls, known

    def _run(self, calls: PendingCalls) -> list[dict[str, str]]:
        calls.prepare()
        while ready := calls.ready():
            if len(ready) == 1:
                calls.run(ready[0])
                continue
            from guardchart.runtime._workers import WORKERS

            for future in [WORKERS.submit(calls.run, index) for index in ready]:
                future.result()
        return calls.close()

    async def _arun(self, calls: PendingCalls) -> list[dict[str, str]]:
        if getattr(calls.ledger, "blocking", False):
            await asyncio.to_thread(calls.prepare)
        else:
            calls.prepare()
        while ready := calls.ready():
            await asyncio.gather(*(calls.arun(index) for index in ready))
        return calls.close()


def _index(id: str, count: int) -> int | None:
    """The number after the last ``#``, where a batch of this size has such a call."""
    number = id.rpartition("#")[2]
    if not (number.isascii() and number.isdigit() and len(number) <= 6):
        return None
    return int(number) if int(number) < count else None
