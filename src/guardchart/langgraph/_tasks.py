"""The tasks of a compiled chart: step, model, tools, approval, service, timer.

Only ``step`` moves the machine. The others each do one thing that a crash must not repeat, and
hand what came of it to ``step`` through the results channel. Every task starts from the graph
state alone, so LangGraph may run it again, elsewhere, whenever it likes.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import Future
from typing import Any, Final, NamedTuple

from langchain_core.runnables import Runnable, RunnableConfig
from langgraph.errors import GraphBubbleUp
from langgraph.types import Command, Send

from guardchart.agents import (
    WAITING_STATES,
    AgentStep,
    decisions_event,
    execute_agent_request,
    execute_agent_request_sync,
    get_agent_requests,
    initial_agent_step,
    pending_approval,
    resolve_agent_step,
    transition_agent_step,
)
from guardchart.agents._models import is_async_model
from guardchart.agents._recorded import dump_failure
from guardchart.agents._step import Origin
from guardchart.agents._stepper import FixedClock, Stepper, Waiting
from guardchart.errors import StepError
from guardchart.kernel import Receipt, Snapshot, dump
from guardchart.langgraph._ledger import DeferredLedger
from guardchart.langgraph._question import Asked, Show, ask
from guardchart.langgraph._state import read_key
from guardchart.langgraph._update import close
from guardchart.langgraph._visit import Settings, Visit
from guardchart.runtime import is_async_service
from guardchart.runtime._loops import LOOPS
from guardchart.runtime._rest import serving_due
from guardchart.runtime._services import call_service
from guardchart.runtime._workers import WORKERS

__all__ = ["END", "GraphSettings", "Task", "tasks_of"]

END: Final = "__end__"
STEP, MODEL, TOOLS, APPROVAL, SERVICE, TIMER = (
    "step",
    "model",
    "tools",
    "approval",
    "service",
    "timer",
)
ITEM: Final = "statechart_item"
"""What a ``Send`` is about: a request, a service or a call by its id."""


class GraphSettings(NamedTuple):
    """The arguments of ``statechart_graph``, checked.

    Attributes:
        node: What it has in common with ``statechart_node``.
        results: The channel of what tasks hand to ``step``.
        asked: The channel that holds when the open question was asked, epoch milliseconds.
        executors: Executors of text requests and decisions.
        per_call: Whether each call is asked about by an interrupt of its own.
        positional: ``"refuse"`` or ``"accept"``.
        min_review_s: How soon an answer by place may come, in seconds.
        show: ``"full"`` or ``"ids"``.
        attempts: How often LangGraph runs a failing model task, and whether it would.
        view: Makes of the state's dict what ``event_from_state`` expects.
        registry: The tools of the machine and its children, by name.
    """

    node: Settings
    results: str
    asked: str
    executors: Any
    per_call: bool
    positional: Any
    min_review_s: float
    show: Show
    attempts: Callable[[BaseException], int]
    view: Callable[[Any], Any]
    registry: Any


class Task(Runnable[Any, Any]):
    """A node of the graph: LangGraph opens no trace run beside the node's."""

    def __init__(
        self,
        name: str,
        run: Callable[[Any, Any], Any],
        arun: Callable[[Any, Any], Awaitable[Any]],
    ) -> None:
        self.name = name
        self._run, self._arun = run, arun

    def invoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        """Run the task on a graph state and return its update."""
        return self._run(input, config)

    async def ainvoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        """As `invoke`, on the running loop."""
        return await self._arun(input, config)


def tasks_of(settings: GraphSettings) -> dict[str, Task]:
    """Every task, by the name of its node."""
    makers = {
        STEP: _Step,
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


class _Base:
    """What the tasks share: finding out where they are."""

    def __init__(self, settings: GraphSettings) -> None:
        self.settings = settings
        self.node = settings.node

    def run(self, state: Any, config: Any) -> Any:
        """The task on a graph state; its update."""
        raise NotImplementedError

    async def arun(self, state: Any, config: Any) -> Any:
        """As `run`, on the running loop."""
        raise NotImplementedError

    def visit(self, state: Any, config: Any) -> Visit:
        visit = Visit(self.node, state, config)
        visit.check_ledger(self.node.ledger)
        return visit

    def looked(self, state: Any, config: Any) -> Visit:
        visit = self.visit(state, config)
        visit.look()
        return visit

    def ledger(self) -> Any:
        ledger = self.node.ledger
        return ledger.resolve() if isinstance(ledger, DeferredLedger) else ledger

    async def aledger(self) -> Any:
        ledger = self.node.ledger
        return await ledger.aresolve() if isinstance(ledger, DeferredLedger) else ledger

    def stepper(self, visit: Visit, snapshot: Snapshot, ledger: Any = None) -> Stepper:
        """The machine as a snapshot has it, standing still."""
        origin = Origin(self.node.machine, snapshot, visit.scope, ledger, visit.own)
        return origin.opened(FixedClock(visit.now_ms()))

    def waiting(self, visit: Visit, ident: str, ledger: Any) -> Waiting | None:
        assert visit.snapshot is not None
        service_id = ident.rpartition("#")[0] or ident
        for waiting in self.stepper(visit, visit.snapshot, ledger).waiting():
            if waiting.id == service_id:
                return waiting
        return None

    def requests(self, visit: Visit, ledger: Any) -> tuple[Any, ...]:
        if visit.snapshot is None:
            return ()
        return get_agent_requests(
            self.node.machine,
            visit.snapshot,
            ledger=ledger,
            scope=visit.scope,
            trusted=visit.own,
        )

    def result(self, visit: Visit, ident: str, **outcome: Any) -> dict[str, Any]:
        """The update that hands an outcome to ``step``."""
        return {self.settings.results: [{"id": ident, "at": visit.now_ms(), **outcome}]}


class _Step(_Base):
    """Moves the machine: results, deadlines that have passed, then the event."""

    def run(self, state: Any, config: Any) -> Any:
        visit = self._opened(state, config)
        ledger = self.ledger()
        visit.load()
        return _Move(self, visit, ledger, state).update()

    async def arun(self, state: Any, config: Any) -> Any:
        visit = self._opened(state, config)
        ledger = await self.aledger()
        visit.load()
        move = _Move(self, visit, ledger, state)
        # A ledger on disk or behind a socket is asked on a thread.
        if getattr(ledger, "blocking", False):
            return await _threaded(move.update)
        return move.update()

    def _opened(self, state: Any, config: Any) -> Visit:
        return self.visit(self.settings.view(state), config)


class _Settled(NamedTuple):
    """A machine after a step, as `close` reads an interpreter."""

    snapshot: Snapshot
    error: BaseException | None
    faults: tuple[BaseException, ...]
    actors: tuple[Any, ...] = ()

    @property
    def machine(self) -> Any:
        return self.snapshot.machine

    def dump(self) -> dict[str, Any]:
        return dump(self.snapshot)


class _Move:
    """One run of ``step``."""

    def __init__(self, task: _Step, visit: Visit, ledger: Any, state: Any) -> None:
        self.task, self.visit, self.ledger, self.state = task, visit, ledger, state
        self.settings, self.node = task.settings, task.node
        self.now = visit.now_ms()
        self.faults: list[BaseException] = []
        self.receipt: Receipt | None = None
        self.error: BaseException | None = None
        self.snapshot = self._found()

    def _found(self) -> Snapshot:
        visit = self.visit
        if visit.snapshot is None:
            step = initial_agent_step(
                self.node.machine,
                run=visit.nonce(),
                now=self.now,
                ledger=self.ledger,
                scope=visit.scope,
            )
            self._note(step)
            found = step.snapshot
            conversation = visit.conversation
            if conversation is not None and conversation.before:
                context = {**found.context, "messages": conversation.before}
                found = found.replace(context=context)
            visit.snapshot = found
        visit.kept = visit.snapshot.context.get("messages") or ()
        return visit.snapshot

    def update(self) -> Any:
        """Take everything in, and say where to go on; a ``Command``."""
        settings, visit = self.settings, self.visit
        for result in sorted(read_key(self.state, settings.results) or (), key=_at):
            self._fire_until(_at(result))
            self._take(result)
        self._fire_until(self.now)
        if visit.event is not None:
            self.receipt = self._note(self._transition(visit.event))
        settled = _Settled(self.snapshot, self.error, tuple(self.faults))
        update = close(visit, settled, self.receipt)
        command = update if isinstance(update, Command) else Command(update=update)
        written = dict(command.update or {})
        written[settings.results] = None
        goto = self._goto(written)
        if APPROVAL in goto or any(isinstance(g, Send) and g.node == APPROVAL for g in goto):
            written[settings.asked] = self.now
        also = command.goto if isinstance(command.goto, list | tuple) else [command.goto]
        return Command(update=written, goto=[*also, *goto] if command.goto else goto)

    # Moving

    def _options(self) -> dict[str, Any]:
        visit = self.visit
        return {"ledger": self.ledger, "scope": visit.scope, "trusted": visit.own}

    def _transition(self, event: Any, at: float | None = None, agent: str | None = None) -> Any:
        now = self.now if at is None else at
        return transition_agent_step(
            self.node.machine, self.snapshot, event, agent=agent, now=now, **self._options()
        )

    def _take(self, result: Any) -> None:
        """A result of a task, or decisions of a person. State is untrusted: an odd one is not."""
        if not isinstance(result, Mapping):
            return
        at = _at(result)
        if isinstance(result.get("decisions"), list):
            for event in self._decided(result):
                self.receipt = self._note(self._transition(event, at))
                self.visit.receipt = None
            return
        ident = result.get("id")
        if not isinstance(ident, str):
            return
        outcome = (
            {"error": result["error"]} if "error" in result else {"output": result.get("output")}
        )
        step = resolve_agent_step(
            self.node.machine, self.snapshot, ident, now=at, **outcome, **self._options()
        )
        self._note(step)

    def _decided(self, result: Mapping[str, Any]) -> Iterable[Any]:
        """One event for each agent whose calls were decided."""
        owners = {each["id"]: each.get("agent_id") for each in pending_approval(self.snapshot)}
        by_agent: dict[Any, list[Any]] = {}
        for each in result["decisions"]:
            ident = each.get("id") if isinstance(each, Mapping) else None
            by_agent.setdefault(owners.get(ident), []).append(each)
        for agent, decisions in by_agent.items():
            yield decisions_event(decisions, by=result.get("by"), agent_id=agent)

    def _fire_until(self, at: float) -> None:
        """Deliver the deadlines that had passed by then, in order of ``due_at``."""
        for _ in range(_MOST_TIMERS):
            if self.snapshot.status != "active":
                return
            timers = self.task.stepper(self.visit, self.snapshot, self.ledger).timers()
            if not timers or (timers[0].due_at or 0.0) > at:
                return
            self._note(self._transition(timers[0], max(at, timers[0].due_at or 0.0)))
        raise StepError(f"more than {_MOST_TIMERS} deadlines were due at once")

    def _note(self, step: AgentStep) -> Receipt | None:
        before = None if self.visit.snapshot is None else getattr(self, "snapshot", None)
        self.snapshot = step.snapshot
        receipt = step.receipt
        if receipt is not None:
            self.faults.extend(receipt.faults)
            self.error = receipt.error or self.error
        if before is not None and before.state_ids != step.snapshot.state_ids:
            self._tell(before, step)
        return receipt

    def _tell(self, before: Snapshot, step: AgentStep) -> None:
        runtime = self.visit.runtime
        if runtime is not None:
            runtime.stream_writer(
                {
                    "type": "statechart.transition",
                    "machine": step.snapshot.machine.id,
                    "event": step._record.get("event", {}).get("type"),
                    "from": sorted(before.state_ids),
                    "to": sorted(step.snapshot.state_ids),
                }
            )

    # Where to

    def _goto(self, written: Mapping[str, Any]) -> list[Any]:
        if self.snapshot.status != "active":
            return [END]
        stepper = self.task.stepper(self.visit, self.snapshot, self.ledger)
        work = [
            (TOOLS if request.kind == "tool" else MODEL, request.id)
            for request in self.task.requests(self._here(), self.ledger)
        ]
        work += [
            (SERVICE, waiting.id)
            for waiting in stepper.waiting()
            if not hasattr(waiting.invocation.service, "step_requests")
        ]
        if not work:
            # A person is asked once nothing else is left to be done.
            asked = [item["id"] for item in pending_approval(self.snapshot)]
            if asked:
                work = (
                    [(APPROVAL, each) for each in asked]
                    if self.settings.per_call
                    else [(APPROVAL, "")]
                )
        if work:
            return self._sent(work, written)
        due = serving_due(stepper, WAITING_STATES)
        clock = self.node.clock
        if due is not None and due - self.now <= self.node.serve_delay_s * 1000.0:
            return [END] if clock is not None and clock.simulated else [TIMER]
        return [END]

    def _here(self) -> Visit:
        self.visit.snapshot = self.snapshot
        return self.visit

    def _sent(self, work: list[tuple[str, str]], written: Mapping[str, Any]) -> list[Any]:
        """A single task reads the state; several are sent what each is about."""
        if len(work) == 1:
            return [work[0][0]]
        node, settings = self.node, self.settings
        carried = {
            node.state_key: written.get(node.state_key, read_key(self.state, node.state_key))
        }
        spoken = {}
        if node.messages_key is not None and any(name == MODEL for name, _ in work):
            said = read_key(self.state, node.messages_key) or ()
            spoken = {node.messages_key: [*said, *(written.get(node.messages_key) or ())]}
        return [
            Send(
                name,
                {
                    **carried,
                    **(spoken if name == MODEL else {}),
                    ITEM: ident,
                    settings.asked: self.now,
                },
            )
            for name, ident in work
        ]


_MOST_TIMERS: Final = 1000


def _at(result: Any) -> float:
    at = result.get("at") if isinstance(result, Mapping) else None
    return float(at) if isinstance(at, int | float) and math.isfinite(at) else 0.0


class _Request(_Base):
    """Executes one request of the step, the first of its kind or the one it was sent."""

    kinds: tuple[str, ...] = ()

    def found(self, visit: Visit, state: Any, ledger: Any) -> Any:
        wanted = read_key(state, ITEM) if isinstance(state, Mapping) else None
        for request in self.requests(visit, ledger):
            if request.kind in self.kinds and wanted in (None, request.id):
                return request
        return None

    def options(self, visit: Visit, ledger: Any) -> dict[str, Any]:
        clock = self.node.clock
        now = clock.now_ms() if clock is not None and clock.simulated else None
        return {"ledger": ledger, "scope": visit.scope, "now": now}


class _Model(_Request):
    """Asks a model: a turn of the loop, a text, a decision. Its failure is the chart's business.

    It waits no longer than the chart does: when a deadline of the machine passes first, the task
    ends without a result and ``step`` fires the deadline.
    """

    kinds = ("text", "decision")

    def run(self, state: Any, config: Any) -> Any:
        visit = self.looked(state, config)
        ledger = self.ledger()
        request = self.found(visit, state, ledger)
        if request is None:
            return {}
        limit_s = self._limit_s(visit, ledger)
        options = self.options(visit, ledger)
        executors = self.settings.executors
        try:
            if self._is_async(visit, request, ledger):
                future: Future[Any] = Future()
                cancel = LOOPS.start(
                    _tell(future), _asking(execute_agent_request, request, executors, options)
                )
                output = _within(future, limit_s, cancel)
            elif limit_s is None or self._is_bounded(visit, request, ledger):
                output = execute_agent_request_sync(request, executors, **options)
            else:
                call = _asking(execute_agent_request_sync, request, executors, options)
                output = _within(WORKERS.submit(call), limit_s, None)
        except _TooLate:
            return {}
        except Exception as error:
            return self._failed(visit, request, error)
        return self.result(visit, request.id, output=output)

    async def arun(self, state: Any, config: Any) -> Any:
        visit = self.looked(state, config)
        ledger = await self.aledger()
        request = self.found(visit, state, ledger)
        if request is None:
            return {}
        limit_s = self._limit_s(visit, ledger)
        options = self.options(visit, ledger)
        executors = self.settings.executors
        try:
            if self._is_async(visit, request, ledger):
                call: Awaitable[Any] = execute_agent_request(request, executors, **options)
            else:
                call = _threaded(_asking(execute_agent_request_sync, request, executors, options))
            output = await _awithin(call, limit_s)
        except _TooLate:
            return {}
        except Exception as error:
            return self._failed(visit, request, error)
        return self.result(visit, request.id, output=output)

    def _limit_s(self, visit: Visit, ledger: Any) -> float | None:
        """How long the chart waits, in seconds; None where it has no deadline."""
        clock = self.node.clock
        assert visit.snapshot is not None
        timers = self.stepper(visit, visit.snapshot, ledger).timers()
        if not timers or (clock is not None and clock.simulated):
            return None
        return max(0.0, ((timers[0].due_at or 0.0) - visit.now_ms()) / 1000.0)

    def _service(self, visit: Visit, request: Any, ledger: Any) -> Any:
        waiting = self.waiting(visit, request.id, ledger)
        return None if waiting is None else waiting.invocation.service

    def _is_async(self, visit: Visit, request: Any, ledger: Any) -> bool:
        service = self._service(visit, request, ledger)
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

    def _is_bounded(self, visit: Visit, request: Any, ledger: Any) -> bool:
        return getattr(self._service(visit, request, ledger), "bounded", False) is True

    def _failed(self, visit: Visit, request: Any, error: Exception) -> Any:
        """Let LangGraph try again where it was told to; what is left is the chart's business."""
        if isinstance(error, GraphBubbleUp):
            raise error
        info = getattr(visit.runtime, "execution_info", None)
        if getattr(info, "node_attempt", 1) < self.settings.attempts(error):
            raise error
        return self.result(visit, request.id, error=dump_failure(error))


class _Tools(_Request):
    """Takes one call through the gate. Never raises: one that did would cancel its siblings."""

    kinds = ("tool",)

    def run(self, state: Any, config: Any) -> Any:
        visit = self.looked(state, config)
        ledger = self.ledger()
        request = self.found(visit, state, ledger)
        if request is None:
            return {}
        output = execute_agent_request_sync(request, **self.options(visit, ledger))
        return self.result(visit, request.id, output=output)

    async def arun(self, state: Any, config: Any) -> Any:
        visit = self.looked(state, config)
        ledger = await self.aledger()
        request = self.found(visit, state, ledger)
        if request is None:
            return {}
        output = await execute_agent_request(request, **self.options(visit, ledger))
        return self.result(visit, request.id, output=output)


class _Approval(_Base):
    """Asks a person, and nothing else, so that a resume repeats nothing."""

    def run(self, state: Any, config: Any) -> Any:
        visit = self.looked(state, config)
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


class _Service(_Base):
    """Runs a service of the chart that is neither a model call nor a tool call."""

    def run(self, state: Any, config: Any) -> Any:
        visit = self.looked(state, config)
        ledger = self.ledger()
        waiting = self._found(visit, state, ledger)
        if waiting is None:
            return {}
        service = waiting.invocation.service
        try:
            if is_async_service(service):
                future: Future[Any] = Future()
                cancel = LOOPS.start(_tell(future), call_service, waiting.actor, waiting.invocation)
                output = _within(future, None, cancel)
            else:
                output = call_service(waiting.actor, waiting.invocation)
        except GraphBubbleUp:
            raise
        except Exception as error:
            return self.result(visit, waiting.id, error=dump_failure(error))
        return self.result(visit, waiting.id, output=output)

    async def arun(self, state: Any, config: Any) -> Any:
        visit = self.looked(state, config)
        ledger = await self.aledger()
        waiting = self._found(visit, state, ledger)
        if waiting is None:
            return {}
        actor, invocation = waiting.actor, waiting.invocation
        try:
            if is_async_service(invocation.service):
                output = await call_service(actor, invocation)
            else:
                output = await _threaded(lambda: call_service(actor, invocation))
                if inspect.isawaitable(output):
                    output = await output
        except GraphBubbleUp:
            raise
        except Exception as error:
            return self.result(visit, waiting.id, error=dump_failure(error))
        return self.result(visit, waiting.id, output=output)

    def _found(self, visit: Visit, state: Any, ledger: Any) -> Waiting | None:
        if visit.snapshot is None:
            return None
        wanted = read_key(state, ITEM)
        for waiting in self.stepper(visit, visit.snapshot, ledger).waiting():
            asks = hasattr(waiting.invocation.service, "step_requests")
            if not asks and wanted in (None, waiting.id):
                return waiting
        return None


class _Timer(_Base):
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
        due = serving_due(self.stepper(visit, visit.snapshot), WAITING_STATES)
        left_s = 0.0 if due is None else (due - visit.now_ms()) / 1000.0
        return min(max(0.0, left_s), self.node.serve_delay_s)


# Waiting


class _TooLate(Exception):
    """The chart's deadline came before the answer."""


def _asking(execute: Callable[..., Any], request: Any, executors: Any, options: Any) -> Any:
    return lambda: execute(request, executors, **options)


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
