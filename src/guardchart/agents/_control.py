"""What one run watches beside its machine: model calls, a signal, callbacks, and why it ended."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

from guardchart.agents._execute import Executed
from guardchart.agents._parts import messages_from_compact
from guardchart.agents._recorded import dump_turn
from guardchart.agents._request_logic import Binding, RequestLogic
from guardchart.agents._requests import (
    AgentRequestExecutors,
    AgentTextRequest,
    Generated,
    executor_form,
)
from guardchart.agents._services import METER, CallModel
from guardchart.agents._sources import bind_executors
from guardchart.errors import AgentConfigError, AgentError, DecisionExhaustedError
from guardchart.kernel import InitEvent, Machine
from guardchart.runtime import MachineLogic
from guardchart.runtime._workers import WORKERS

__all__ = ["Cause", "RunControl", "cause_of", "restarts"]

Cause = Literal["aborted", "max-model-calls", "decision-exhausted", "machine", "stopped"]

_POLL_S: Final = 0.02
_DEPTH: Final = 16


class RunControl:
    """The host's side of one run.

    Attributes:
        cause: Why the host ended the run, None where it did not.
        failure: What a callback raised; the caller gets it.
        calls: How many model calls were made.
    """

    def __init__(
        self,
        executors: AgentRequestExecutors,
        *,
        max_model_calls: int,
        signal: Any,
        on_chunk: Callable[..., Any] | None,
        on_result: Callable[..., Any] | None,
        on_transition: Callable[..., Any] | None,
    ) -> None:
        if type(max_model_calls) is not int or max_model_calls < 1:
            raise AgentConfigError("run_agent: max_model_calls must be an int of at least 1")
        if signal is not None and not callable(getattr(signal, "is_set", None)):
            raise AgentConfigError("run_agent: signal must have is_set(), as an asyncio.Event has")
        given = {"on_chunk": on_chunk, "on_result": on_result, "on_transition": on_transition}
        for name, callback in given.items():
            if callback is not None and not callable(callback):
                raise AgentConfigError(f"run_agent: {name} must be callable")
        self._executors = executors
        self._max = max_model_calls
        self._signal = signal
        self._on_chunk, self._on_result, self._on_transition = on_chunk, on_result, on_transition
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._interpreter: Any = None
        self.cause: Cause | None = None
        self.failure: BaseException | None = None
        self.calls = 0

    # Before anything runs

    @property
    def serves(self) -> bool:
        """Whether the host brought any executor."""
        return self._executors != AgentRequestExecutors()

    def bound(self, machine: Machine, services: Mapping[str, Any] | None) -> Machine:
        """The machine with services and executors of this run, all of them there.

        Raises:
            AgentConfigError: A source lacks its executor.
            ChartError: The logic misses names.
        """
        if services:
            logic = machine.logic if isinstance(machine.logic, MachineLogic) else MachineLogic()
            machine = machine.with_logic(logic.merge(MachineLogic(services=services)))
        for slot in AgentRequestExecutors.__slots__:
            executor = getattr(self._executors, slot)
            if executor is not None:
                executor_form(executor)
        return bind_executors(
            machine,
            Binding(
                self._executors,
                before_call=lambda request: self.spend(),
                on_result=None if self._on_result is None else self._told,
                on_chunk=None if self._on_chunk is None else self._chunk,
                signal=_Signal(self) if self._signal is not None else None,
            ),
        )

    def options(self) -> dict[str, Any]:
        """What the interpreter is given of this run."""
        return {"attachments": {METER: self}}

    def plugins(self) -> list[Any]:
        """The observers of this run's callbacks."""
        found: list[Any] = []
        if self._on_transition is not None:
            found.append(_Transitions(self, self._on_transition))
        if self._on_result is not None:
            found.append(_LoopResults(self))
        if self._on_chunk is not None:
            found.append(_LoopChunks(self))
        return found

    def attach(self, interpreter: Any) -> None:
        """Know the machine that is to be stopped."""
        self._interpreter = interpreter

    # While it runs

    def spend(self) -> None:
        """Count one model call, before it is made.

        Raises:
            AgentError: It is one too many, or the run is aborted; the machine is being stopped.
        """
        if self.aborted():
            self.halt("aborted")
        else:
            with self._lock:
                self.calls += 1
                over = self.calls > self._max
            if not over and self.cause is None and self.failure is None:
                return
            if over:
                self.halt("max-model-calls")
        raise AgentError("the run has ended; no further model is asked")

    def aborted(self) -> bool:
        """Whether the signal is set."""
        return self._signal is not None and bool(self._signal.is_set())

    def halt(self, cause: Cause | None) -> None:
        """End the run, from any thread; the first cause counts."""
        with self._lock:
            if self.cause is None and self.failure is None and cause is not None:
                self.cause = cause
        interpreter = self._interpreter
        if interpreter is None:
            return
        loop = getattr(interpreter, "_loop", None)
        if loop is None or _runs_here(loop):
            interpreter.stop()
        else:
            # Ahead of whatever the service that asked for it comes to.
            loop.call_soon_threadsafe(interpreter.stop)

    def guarded(self, callback: Callable[..., Any], *args: Any) -> None:
        """Call back; what that raises ends the run and is the caller's.

        Raises:
            AgentError: It raised.
        """
        try:
            callback(*args)
        except BaseException as error:
            with self._lock:
                if self.failure is None:
                    self.failure = error
            self.halt(None)
            raise AgentError("a callback of the run raised") from error

    def _told(self, request: Any, result: Generated) -> None:
        assert self._on_result is not None
        self.guarded(self._on_result, request, Executed(result.output, result.raw))

    def _chunk(self, chunk: str, request: Any) -> None:
        assert self._on_chunk is not None
        self.guarded(self._on_chunk, chunk, request)

    # The signal

    def watch(self) -> asyncio.Task[None] | None:
        """A task that ends the run once the signal is set; None without one."""
        if self._signal is None:
            return None
        return asyncio.get_running_loop().create_task(self._watch(), name="guardchart:signal")

    async def _watch(self) -> None:
        if isinstance(self._signal, asyncio.Event):
            await self._signal.wait()
        else:
            while not self.aborted():  # noqa: ASYNC110
                await asyncio.sleep(_POLL_S)  # any object with is_set: nothing to wait on
        self.halt("aborted")

    def watch_in_thread(self) -> None:
        """Do the same for a run without a loop, until `ended`."""
        if self._signal is not None:
            WORKERS.submit(self._poll)

    def _poll(self) -> None:
        while not self._ended.wait(_POLL_S):
            if self.aborted():
                self.halt("aborted")
                return

    def ended(self) -> None:
        """The run is over; nothing watches any more."""
        self._ended.set()

    def reraise(self) -> None:
        """Raise what a callback raised, if any did."""
        if self.failure is not None:
            raise self.failure


class _Signal:
    """The run's signal as executors see it; looking at it ends a run whose signal is set."""

    def __init__(self, control: RunControl) -> None:
        self._control = control

    def is_set(self) -> bool:
        control = self._control
        if control.cause is None and control.aborted():
            control.halt("aborted")
        return control.cause is not None


class _Transitions:
    """Calls ``on_transition(snapshot, event)`` for the root machine."""

    def __init__(self, control: RunControl, callback: Callable[..., Any]) -> None:
        self._control = control
        self._callback = callback
        self._event: Any = None

    def on_event_received(self, interpreter: Any, event: Any) -> None:
        if interpreter.parent is None:
            self._event = event

    def on_transition(self, interpreter: Any, before: Any, after: Any, receipt: Any) -> None:
        if interpreter.parent is None:
            event = self._event if self._event is not None else InitEvent(interpreter._input)
            self._control.guarded(self._callback, interpreter.snapshot, event)


class _LoopResults:
    """Calls ``on_result(request, executed)`` for the model calls of tool loops."""

    def __init__(self, control: RunControl) -> None:
        self._control = control

    def begin_model_call(self, scope: Any, model: Any, messages: Any, tools: Any) -> Any:
        def ended(result: Any, error: BaseException | None) -> None:
            # Requests of the chart's own are told by their binding.
            if result is None or not isinstance(scope.invocation.service, CallModel):
                return
            request = AgentTextRequest(
                id=scope.invocation.id,
                src=scope.invocation.src,
                model=getattr(model, "name", None),
                messages=messages_from_compact(messages),
                tools=list(tools),
            )
            self._control._told(request, Generated(dump_turn(result), raw=result))

        return ended

    def begin_tool_call(self, scope: Any, call: Any, tool: Any) -> Any:
        return lambda result, error: None


class _LoopChunks:
    """Calls ``on_chunk(chunk, request)`` for the model calls of tool loops."""

    def __init__(self, control: RunControl) -> None:
        self._control = control

    def on_chunk(self, interpreter: Any, invocation: Any, chunk: str) -> None:
        if isinstance(invocation.service, CallModel):
            self._control._chunk(chunk, AgentTextRequest(id=invocation.id, src=invocation.src))


def restarts(service: Any) -> bool:
    """Whether a service that was interrupted is simply asked again: a request to a model."""
    return isinstance(service, RequestLogic)


def cause_of(interpreter: Any, control: RunControl) -> Cause | None:
    """Why a run ended in ``error``; None where it did not."""
    if interpreter.status == "stopped":
        return control.cause or "stopped"
    if interpreter.status != "error":
        return None
    error, depth = interpreter.error, 0
    if isinstance(error, Mapping):
        exhausted = error.get("type") == DecisionExhaustedError.__name__
        return "decision-exhausted" if exhausted else "machine"
    while isinstance(error, BaseException) and depth < _DEPTH:
        if isinstance(error, DecisionExhaustedError):
            return "decision-exhausted"
        error, depth = error.__cause__ or error.__context__, depth + 1
    return "machine"


def _runs_here(loop: Any) -> bool:
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False
