"""The tasks of a compiled chart that do something: model, tools, approval, service, timer.

Only ``step`` moves the machine. The others each do one thing that a crash must not repeat, and
hand what came of it to ``step`` through the results channel. Every task starts from the graph
state alone, so LangGraph may run it again, elsewhere, whenever it likes.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from typing import Any, Final

from langgraph.errors import GraphBubbleUp

from guardchart.agents import (
    WAITING_STATES,
    pending_approval,
)
from guardchart.agents._execute import execute_waiting, execute_waiting_sync
from guardchart.agents._models import is_async_model
from guardchart.agents._recorded import dump_failure
from guardchart.agents._services import CallModel
from guardchart.agents._stepper import Stepper, Waiting
from guardchart.errors import StepError
from guardchart.kernel import StreamEvent, as_event
from guardchart.langgraph._move import Step
from guardchart.langgraph._question import Asked, ask
from guardchart.langgraph._state import read_key
from guardchart.langgraph._task import (
    APPROVAL,
    ITEM,
    MODEL,
    SERVICE,
    STEP,
    TIMER,
    TOOLS,
    BaseTask,
    GraphSettings,
    Task,
)
from guardchart.langgraph._visit import Visit
from guardchart.runtime import Invocation, is_async_service
from guardchart.runtime._loops import LOOPS
from guardchart.runtime._rest import serving_due
from guardchart.runtime._services import call_service
from guardchart.runtime._workers import WORKERS

__all__ = ["tasks_of"]


def tasks_of(settings: GraphSettings) -> dict[str, Task]:
    """Every task, by the name of its node."""
    makers = {
        STEP: Step,
        MODEL: _Model,
        TOOLS: _Tools,
        APPROVAL: _Approval,
        SERVICE: _Service,
        TIMER: _Timer,
    }
    found = {}
    for name, kind in makers.items():
        made = kind(settings)
        found[name] = Task(name, made.run, made.arun)
    return found


class _Request(BaseTask):
    """Executes one request of the step, the first of its kind or the one it was sent."""

    kinds: tuple[str, ...] = ()

    def found(self, visit: Visit, state: Any, ledger: Any) -> tuple[Any, Waiting] | None:
        """The request, and the service that waits for its result."""
        is_dict = type(state) is dict or isinstance(state, Mapping)
        wanted = state.get(ITEM) if is_dict else None
        for request in self.requests(visit, ledger):
            if request.kind in self.kinds and wanted in (None, request.id):
                waiting = self.waiting(visit, request.id, ledger)
                return None if waiting is None else (request, waiting)
        return None


class _Model(_Request):
    """Asks a model: a turn of the loop, a text, a decision. Its failure is the chart's business.

    It waits no longer than the chart does: when a deadline of the machine passes first, the task
    ends without a result and ``step`` fires the deadline.
    """

    kinds = ("text", "decision")

    def run(self, state: Any, config: Any) -> Any:
        visit = self.looked(state, config)
        ledger = self.ledger()
        found = self.found(visit, state, ledger)
        if found is None:
            return {}
        request, waiting = found[0], _called(found[1])
        limit_s = self.limit_s(visit, ledger)
        given = request, self.settings.executors, waiting
        service = waiting.invocation.service
        try:
            if self._is_async(request, service):
                future: Future[Any] = Future()
                cancel = LOOPS.start(_tell(future), execute_waiting, *given)
                output = _within(future, limit_s, cancel)
            elif limit_s is None or getattr(service, "bounded", False) is True:
                output = execute_waiting_sync(*given)
            else:
                output = _within(WORKERS.submit(execute_waiting_sync, *given), limit_s, None)
        except _TooLate:
            return {}
        except Exception as error:
            return self._failed(visit, request, error)
        dumped = _is_dumped(service, output)
        return self.result(visit, request.id, dumped=dumped, output=output)

    async def arun(self, state: Any, config: Any) -> Any:
        visit = self.looked(state, config)
        ledger = await self.aledger()
        found = self.found(visit, state, ledger)
        if found is None:
            return {}
        request, waiting = found
        limit_s = self.limit_s(visit, ledger)
        given = request, self.settings.executors, waiting
        service = waiting.invocation.service
        try:
            if self._is_async(request, service):
                call: Awaitable[Any] = execute_waiting(*given)
            else:
                call = _threaded(lambda: execute_waiting_sync(*given))
            output = await _awithin(call, limit_s)
        except _TooLate:
            return {}
        except Exception as error:
            return self._failed(visit, request, error)
        dumped = _is_dumped(service, output)
        return self.result(visit, request.id, dumped=dumped, output=output)

    def _is_async(self, request: Any, service: Any) -> bool:
        declared = getattr(service, "is_async", None)
        executor = getattr(service, "executor", None)
        if executor is None and declared is None:
            slots = ("decide",) if request.kind == "decision" else ("generate_text", "stream_text")
            given = self.settings.executors
            found = [
                given.get(slot) if isinstance(given, Mapping) else getattr(given, slot, None)
                for slot in slots
            ]
            return any(each is not None and is_async_model(each) for each in found)
        return is_async_model(executor) if executor is not None else bool(declared)

    def _failed(self, visit: Visit, request: Any, error: Exception) -> Any:
        """Let LangGraph try again where it was told to; what is left is the chart's business."""
        if isinstance(error, GraphBubbleUp):
            raise error
        info = getattr(visit.runtime, "execution_info", None)
        if getattr(info, "node_attempt", 1) < self.settings.attempts(error):
            raise error
        return self.result(visit, request.id, error=dump_failure(error))


_NAMES: Final = frozenset({str, type(None)})


def _is_dumped(service: Any, output: Any) -> bool:
    """Whether an answer is JSON types: a turn, unless the model gave bytes or such for a name."""
    if not isinstance(service, CallModel):
        return False
    names = [output["model"]]
    for call in output["tool_calls"]:
        names += call["id"], call["name"]
    return _NAMES.issuperset(map(type, names))


def _called(waiting: Waiting) -> Waiting:
    """A model's call as the synchronous engine makes it: without an event loop, where it can."""
    service = waiting.invocation.service
    called = service.in_sync if isinstance(service, CallModel) else None
    if called is None:
        return waiting
    return waiting._replace(invocation=waiting.invocation._replace(service=called))


class _Tools(_Request):
    """Takes one call through the gate. Never raises: one that did would cancel its siblings."""

    kinds = ("tool",)

    def run(self, state: Any, config: Any) -> Any:
        visit = self.looked(state, config)
        found = self.found(visit, state, self.ledger())
        if found is None:
            return {}
        request, waiting = found
        output = execute_waiting_sync(request, None, waiting)
        return self.result(visit, request.id, dumped=True, output=output)

    async def arun(self, state: Any, config: Any) -> Any:
        visit = self.looked(state, config)
        found = self.found(visit, state, await self.aledger())
        if found is None:
            return {}
        request, waiting = found
        output = await execute_waiting(request, None, waiting)
        return self.result(visit, request.id, dumped=True, output=output)


class _Approval(BaseTask):
    """Asks a person, and nothing else, so that a resume repeats nothing."""

    def run(self, state: Any, config: Any) -> Any:
        visit = self.looked(state, config)
        # While a person is asked, the state is in the app's hands.
        visit.leave()
        if visit.snapshot is None:
            return {}
        pending = pending_approval(visit.snapshot)
        settings = self.settings
        alone = settings.per_call
        if alone:
            wanted = read_key(state, ITEM)
            pending = [item for item in pending if wanted in (None, item["id"])][:1]
        if not pending:
            return {}
        asked_at = read_key(state, settings.asked)

        def too_soon() -> bool:
            since = visit.now_ms() - (asked_at if isinstance(asked_at, int | float) else 0.0)
            return since < settings.min_review_s * 1000.0

        decisions, by = ask(
            Asked(
                pending,
                machine=visit.snapshot.machine.id,
                alone=alone,
                show=settings.show,
                positional=settings.positional,
                registry=settings.registry,
                too_soon=too_soon,
            )
        )
        return self.result(visit, "", decisions=decisions, by=by)

    async def arun(self, state: Any, config: Any) -> Any:
        return self.run(state, config)


class _Service(BaseTask):
    """Runs a service of the chart that is neither a model call nor a tool call.

    What it sends its machine is handed to ``step`` with its output; what it streams goes to
    LangGraph's custom stream. Its code is the app's, and may go on in a thread after its time is
    up, so that the context it gets is nobody else's.
    """

    alone = True

    def run(self, state: Any, config: Any) -> Any:
        visit = self.looked(state, config)
        ledger = self.ledger()
        found = self._found(visit, state, ledger)
        if found is None:
            return {}
        actor, invocation, sent = found
        limit_s = self.limit_s(visit, ledger)
        try:
            if is_async_service(invocation.service):
                future: Future[Any] = Future()
                cancel = LOOPS.start(_tell(future), call_service, actor, invocation)
                output = _within(future, limit_s, cancel)
            elif limit_s is None:
                output = call_service(actor, invocation)
            else:
                output = _within(WORKERS.submit(call_service, actor, invocation), limit_s, None)
        except _TooLate:
            return {}
        except GraphBubbleUp:
            raise
        except Exception as error:
            return self.result(visit, invocation.key, sent=sent, error=dump_failure(error))
        return self.result(visit, invocation.key, sent=sent, output=output)

    async def arun(self, state: Any, config: Any) -> Any:
        visit = self.looked(state, config)
        ledger = await self.aledger()
        found = self._found(visit, state, ledger)
        if found is None:
            return {}
        actor, invocation, sent = found
        try:
            if is_async_service(invocation.service):
                call: Awaitable[Any] = call_service(actor, invocation)
            else:
                call = _threaded(lambda: call_service(actor, invocation))
            output = await _awithin(call, self.limit_s(visit, ledger))
        except _TooLate:
            return {}
        except GraphBubbleUp:
            raise
        except Exception as error:
            return self.result(visit, invocation.key, sent=sent, error=dump_failure(error))
        return self.result(visit, invocation.key, sent=sent, output=output)

    def _found(
        self, visit: Visit, state: Any, ledger: Any
    ) -> tuple[Stepper, Invocation, list[Any]] | None:
        """The service to run: its machine standing still, its invocation, and what it sends."""
        if visit.snapshot is None:
            return None
        wanted = read_key(state, ITEM)
        begun = read_key(state, self.settings.begun)
        for waiting in self.standing(visit, ledger).waiting():
            if hasattr(waiting.invocation.service, "step_requests"):
                continue
            if wanted in (None, waiting.id):
                kept = begun.get(waiting.id) if isinstance(begun, Mapping) else None
                event = None
                # State is untrusted: what is no event began nothing.
                with contextlib.suppress(StepError):
                    event = None if kept is None else as_event(kept)
                invocation = waiting.invocation._replace(event=event, key=waiting.id)
                return waiting.actor, invocation, _listen(waiting.actor, visit)
        return None


def _listen(actor: Stepper, visit: Visit) -> list[Any]:
    """Have what a service sends to its machine written down, since the machine stands still."""
    sent: list[Any] = []
    context = contextvars.copy_context()

    def post(event: Any, **payload: Any) -> None:
        made = as_event(event, payload or None)
        if not isinstance(made, StreamEvent):
            sent.append({**made.payload, "type": made.type})
        elif visit.runtime is not None:
            item = {"type": "statechart.stream", "machine": actor.id, "data": made.data}
            context.copy().run(visit.runtime.stream_writer, item)

    actor.post = post  # type: ignore[method-assign]
    return sent


class _Timer(BaseTask):
    """Sleeps until the next deadline; ``step`` fires it."""

    def run(self, state: Any, config: Any) -> Any:
        time.sleep(self._left_s(state, config))
        return {}

    async def arun(self, state: Any, config: Any) -> Any:
        await asyncio.sleep(self._left_s(state, config))
        return {}

    def _left_s(self, state: Any, config: Any) -> float:
        visit = self.looked(state, config)
        if visit.snapshot is None:
            return 0.0
        due = serving_due(self.standing(visit, None), WAITING_STATES)
        left_s = 0.0 if due is None else (due - visit.now_ms()) / 1000.0
        return min(max(0.0, left_s), self.node.serve_delay_s)


# Waiting


class _TooLate(Exception):
    """The chart's deadline came before the answer."""


def _tell(future: Future[Any]) -> Callable[[Any, BaseException | None], None]:
    def ended(output: Any, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is None:
            future.set_result(output)
        else:
            future.set_exception(error)

    return ended


def _within(future: Future[Any], limit_s: float | None, cancel: Any) -> Any:
    try:
        return future.result(limit_s)
    except TimeoutError:
        if future.done():
            raise
        if cancel is not None:
            cancel()
        raise _TooLate from None
    except BaseException:
        if cancel is not None and not future.done():
            cancel()
        raise


async def _awithin(call: Awaitable[Any], limit_s: float | None) -> Any:
    task = asyncio.ensure_future(call)
    try:
        done, _ = await asyncio.wait({task}, timeout=limit_s)
    except asyncio.CancelledError:
        task.cancel()
        raise
    if not done:
        task.cancel()
        raise _TooLate
    return task.result()


async def _threaded(fn: Callable[[], Any]) -> Any:
    """Call on a daemon worker, context variables carried; an abandoned call delays nothing."""
    context = contextvars.copy_context()
    return await asyncio.wrap_future(WORKERS.submit(context.run, fn))
