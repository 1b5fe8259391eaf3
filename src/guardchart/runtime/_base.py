"""What both interpreters share: state, queue entries, plugins, and the effects of a step.

The kernel decides; this module carries out. Each engine adds only how a service is run
and how the queue is driven.
"""

from __future__ import annotations

import copy
import json
import logging
import uuid
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Final, Self

from guardchart.errors import ChartError, NotSupportedError, ServiceInterruptedError, StepError
from guardchart.kernel import (
    CancelSend,
    CancelTimer,
    Emit,
    EngineEvent,
    Event,
    Log,
    Machine,
    Receipt,
    ScheduleTimer,
    Send,
    Snapshot,
    Spawn,
    StartService,
    StopService,
    as_event,
    can,
    dump,
    failed,
    fired,
    initial_step,
    interrupted,
    load,
    matches,
    resolve,
    restart_services,
    step,
    update_context,
)
from guardchart.runtime._clock import Clock, SystemClock
from guardchart.runtime._logic import BeforeStep, Host, MachineLogic
from guardchart.runtime._plugins import Plugins
from guardchart.runtime._services import Invocation, is_async_service

__all__ = ["InterpreterBase"]

_LOG = logging.getLogger("guardchart")
_SYSTEM: Final = SystemClock()
_NOTHING: Final = BeforeStep()

AnyEvent = Event | EngineEvent

# Where a queued event came from. Only "outside" ones may decide an approval.
OUTSIDE: Final = "outside"
SELF: Final = "self"
CHILD: Final = "child"
ENGINE: Final = "engine"


class InterpreterBase:
    """State and effects of a running machine; see `SyncInterpreter` and `Interpreter`.

    Args:
        machine: A machine whose logic is complete.
        clock: Where the time comes from; the wall clock by default.
        plugins: Observers; see `Plugin`.
        scope: The thread id or store key that tool calls are filed under; the run by default.
        ledger: The ledger approvals and claims are kept in, instead of the logic's own.
        run: The nonce of this machine's life; minted here when the machine first starts.
        input: The machine's input, ``.input`` of its first event.
        max_queue: How many events may wait, and how many a machine may send itself in a row.

    Raises:
        ChartError: The machine's logic misses names; all of them are listed.
    """

    engine: ClassVar[str]

    def __init__(
        self,
        machine: Machine,
        *,
        clock: Clock | None = None,
        plugins: Iterable[Any] = (),
        scope: str | None = None,
        ledger: Any = None,
        run: str | None = None,
        input: Any = None,
        max_queue: int = 10_000,
        parent: InterpreterBase | None = None,
        id: str | None = None,
    ) -> None:
        machine.require_bound()
        self.machine = machine
        self.logic: MachineLogic = machine.logic if machine.logic is not None else MachineLogic()
        self.clock: Clock = clock if clock is not None else _SYSTEM
        self.id = id if id is not None else machine.id
        self.parent = parent
        self.max_queue = max_queue
        self.actors: dict[str, InterpreterBase] = {}
        self.faults: list[BaseException] = []
        self._plugins = Plugins(plugins)
        self._observers: list[Callable[[Any], None]] = []
        self._emits: list[Callable[[Event], None]] = []
        self._hook = getattr(self.logic, "before_step", None)
        self._scope, self._ledger, self._nonce, self._input = scope, ledger, run, input
        self._snapshot: Snapshot | None = None
        self._restored: Snapshot | None = None
        self._restart = False
        self._state = "uninitialized"
        self._error: BaseException | None = None
        self._host: Host | None = None
        self._verdict: BeforeStep | Exception | None = None

    # Reading

    @property
    def status(self) -> str:
        """``uninitialized``, ``running``, ``done``, ``error`` or ``stopped``."""
        return self._state

    @property
    def snapshot(self) -> Snapshot:
        """The kernel's snapshot after the last macrostep.

        Raises:
            StepError: The interpreter was never started; call ``start()``.
        """
        snapshot = self._snapshot or self._restored
        if snapshot is None:
            raise StepError(f"{self.id} has not been started; call start() first")
        return snapshot

    @property
    def context(self) -> Mapping[str, Any]:
        """The context; read it, change it by events or `update_context`."""
        return self.snapshot.context

    @property
    def current_state_ids(self) -> frozenset[str]:
        """The ids of the active leaf states; kept after done and stop."""
        snapshot = self._snapshot or self._restored
        return frozenset() if snapshot is None else frozenset(snapshot.state_ids)

    @property
    def output(self) -> Any:
        """The machine's output once it is done."""
        return self.snapshot.output

    @property
    def error(self) -> Any:
        """What put the machine into ``error``: the exception, or the snapshot's record of it."""
        if self._error is not None:
            return self._error
        snapshot = self._snapshot or self._restored
        return None if snapshot is None else snapshot.error

    @property
    def host(self) -> Host:
        """Scope, ledger, run and agent path of this machine."""
        host = self._host
        if host is None:
            run = self.snapshot.run or self._nonce or ""
            host = self._host = Host(self._scope or run, self._ledger, run, self.id)
        return host

    @property
    def _actors(self) -> dict[str, InterpreterBase]:
        return self.actors

    def can(self, event: str | Mapping[str, Any] | Event, **payload: Any) -> bool:
        """Whether the event would be taken now, guards evaluated with its payload."""
        return can(self.snapshot, as_event(event, payload or None))

    def matches(self, state: str) -> bool:
        """Whether the state of this id or dotted path is active."""
        return matches(self.snapshot, state)

    # Observing

    def use(self, *plugins: Any) -> Self:
        """Attach plugins; returns self."""
        for plugin in plugins:
            self._plugins.add(plugin)
        return self

    def subscribe(self, observer: Callable[[Any], None]) -> Callable[[], None]:
        """Call ``observer(self)`` after each macrostep; returns what unsubscribes it."""
        self._observers.append(observer)

        def unsubscribe() -> None:
            if observer in self._observers:
                self._observers.remove(observer)

        return unsubscribe

    def on_emit(self, listener: Callable[[Event], None]) -> Callable[[], None]:
        """Call ``listener(event)`` for each emitted event; returns what removes it."""
        self._emits.append(listener)

        def remove() -> None:
            if listener in self._emits:
                self._emits.remove(listener)

        return remove

    # Snapshots

    def dump(self) -> dict[str, Any]:
        """The snapshot as JSON types, live children included.

        Raises:
            SnapshotError: The context holds something that is not JSON.
        """
        snapshot = self.snapshot
        if self.actors:
            children = dict(snapshot.children)
            for actor in self.actors.values():
                name = getattr(actor, "_child_id", None)
                if name in children and actor._snapshot is not None:
                    children[name] = children[name]._replace(snapshot=actor.dump())
            snapshot = snapshot.replace(children=children)
        return dump(snapshot)

    def get_snapshot(self) -> str:
        """The snapshot as JSON text; see `dump`."""
        return json.dumps(self.dump(), ensure_ascii=False, separators=(",", ":"))

    @classmethod
    def from_snapshot(
        cls,
        data: str | Mapping[str, Any] | Snapshot,
        machine: Machine,
        *,
        restart_services: bool = False,
        trusted: bool | None = None,
        clock: Clock | None = None,
        plugins: Iterable[Any] = (),
        **options: Any,
    ) -> Self:
        """An interpreter that goes on from a snapshot once started; nothing runs before.

        Args:
            data: Snapshot JSON as text or dict, or a loaded kernel ``Snapshot``.
            machine: The machine it was taken from.
            restart_services: Your word that the snapshot is your own (from your store, or
                sealed): services that were running are started again, inputs computed anew.
            trusted: Whether delayed sends and spawned actors load; as ``restart_services``.
            clock: As for the constructor.
            plugins: As for the constructor.
            **options: The constructor's other arguments.

        Raises:
            SnapshotError: The data is not a legal snapshot of this machine.
        """
        if not isinstance(data, Snapshot):
            own = restart_services if trusted is None else trusted
            data = load(machine, dict(data) if not isinstance(data, str) else data, trusted=own)
        interpreter = cls(machine, clock=clock, plugins=plugins, **options)
        interpreter._restored = data
        interpreter._restart = restart_services
        return interpreter

    def update_context(self, updates: Mapping[str, Any]) -> None:
        """Write context outside a step; the one way to do so, told to ``on_context``."""
        self._snapshot = update_context(self.snapshot, dict(updates))
        self._plugins.call("on_context", self, dict(updates))

    # Life

    def _begin(self) -> None:
        """Enter the initial configuration, or take up the restored one."""
        self._check_services()
        self.clock.attach(self)
        now = self.clock.now_ms()
        restored = self._restored
        if restored is not None:
            if restored.run is None:
                restored = restored.replace(run=self._nonce or uuid.uuid4().hex)
            self._snapshot = restored
            self._state = {"done": "done", "error": "error"}.get(restored.status, "running")
            self._plugins.call("on_interpreter_start", self)
            if self._state == "running":
                self._revive(restored, now)
            return
        self._state = "running"
        self._plugins.call("on_interpreter_start", self)
        snapshot, effects, receipt = initial_step(
            self.machine, self._input, now=now, host=self
        )
        snapshot = snapshot.replace(run=self._nonce or uuid.uuid4().hex)
        self._commit(snapshot, effects, receipt, None, frozenset())

    def _revive(self, snapshot: Snapshot, now: float) -> None:
        spawned = {name: child for name, child in snapshot.children.items() if child.spawned}
        if self._restart:
            snapshot, effects = restart_services(self.machine, snapshot, now)
            self._snapshot = snapshot
            self._perform(effects, Event("xstate.init", {"input": None}))
            for name, child in spawned.items():
                if child.status == "active" and child.snapshot is not None:
                    self._restore_child(name, child)
        self._after_commit()

    def fail_interrupted(self) -> None:
        """Tell the machine of every service that was running when its snapshot was taken.

        Each gets ``failed(key, ServiceInterruptedError)``, a full step.
        """
        for key in interrupted(self.snapshot):
            self._put(failed(key, ServiceInterruptedError("the service was interrupted")), ENGINE)

    def _check_services(self) -> None:
        """Refuse what this engine cannot run."""

    def _services_used(self) -> Iterable[tuple[str, Any]]:
        services = self.logic.services
        names = {invoke.src for node in self.machine.order for invoke in node.invokes}
        return ((name, services[name]) for name in sorted(names) if name in services)

    def _finish_life(self) -> None:
        """Called once the snapshot is done or in error."""
        snapshot = self.snapshot
        if snapshot.status == "done":
            self._state = "done"
            self._plugins.call("on_done", self, snapshot.output)
        else:
            self._state = "error"
            self._plugins.call("on_error", self, self.error)
        self._quit_children()
        self.clock.detach(self)
        self._plugins.call("on_interpreter_stop", self)

    def _quit_children(self) -> None:
        for actor in list(self.actors.values()):
            actor.stop()
        self.actors.clear()

    def stop(self) -> Self:
        """Stop: cancel timers and services, run no exit actions, keep the snapshot."""
        raise NotImplementedError

    # One step

    def _put(self, event: AnyEvent, origin: str) -> Any:
        """Queue an event and see that the queue is driven; returns the engine's handle."""
        raise NotImplementedError

    def post(self, event: str | Mapping[str, Any] | Event, **payload: Any) -> None:
        """Queue an event from inside (a service, an action); never waits for its step."""
        raise NotImplementedError

    def _outside(self, event: str | Mapping[str, Any] | Event, payload: dict[str, Any]) -> Event:
        made = as_event(event, payload or None)
        self._plugins.call("on_before_send", self, made)
        return made

    def _apply(self, event: AnyEvent, origin: str) -> Receipt:
        """One event, one macrostep: hook, kernel, effects. Never raises."""
        if self._state != "running":
            return _receipt("dropped", f"the machine is {self._state}", self.current_state_ids)
        now = self.clock.now_ms()
        denied: str | None = None
        if self._hook is not None:
            verdict = self._verdict
            if verdict is None:
                verdict = self._ask_hook(event, origin)
            self._verdict = None
            if isinstance(verdict, Exception):
                fallback = _after_hook_failure(event, origin, verdict)
                if fallback is None:
                    self.faults.append(verdict)
                    reason = f"{type(verdict).__name__} while deciding"
                    return _receipt("denied", reason, self.current_state_ids, verdict)
                event = fallback
            else:
                denied = verdict.denied
                if verdict.batch_no is not None:
                    self._snapshot = self.snapshot.replace(batch_no=verdict.batch_no)
                if verdict.event is not None:
                    event = verdict.event
                elif denied is not None:
                    return _receipt("denied", denied, self.current_state_ids)
        snapshot = self.snapshot
        if self._plugins.items:
            seen = resolve(snapshot, event) if isinstance(event, EngineEvent) else event
            if seen is not None:
                self._plugins.call("on_event_received", self, seen)
        try:
            after, effects, receipt = step(self.machine, snapshot, event, now=now, host=self)
        except StepError as error:
            self.faults.append(error)
            return _receipt("denied", str(error), self.current_state_ids, error)
        if receipt.faults:
            self.faults.extend(receipt.faults)
        if after is not snapshot:
            self._commit(after, effects, receipt, event, snapshot.state_ids)
        if denied is not None:
            receipt = receipt._replace(status="denied", reason=denied)
        return receipt

    def _ask_hook(self, event: AnyEvent, origin: str) -> BeforeStep | Exception:
        """The hook's answer, or what it raised; may run on a worker thread."""
        assert self._hook is not None
        try:
            answer = self._hook(
                self.snapshot, event, self.clock.now_ms(), self.host, origin == OUTSIDE
            )
        except Exception as error:
            return error
        return answer if answer is not None else _NOTHING

    def _commit(
        self,
        snapshot: Snapshot,
        effects: Iterable[Any],
        receipt: Receipt,
        event: AnyEvent | None,
        before: frozenset[str],
    ) -> None:
        self._snapshot = snapshot
        if receipt.error is not None:
            self._error = receipt.error
        elif snapshot.status == "error" and event is not None:
            self._error = _exception_of(event)
        if effects:
            self._perform(effects, event)
        if receipt.status == "taken" or event is None:
            self._plugins.call("on_transition", self, before, snapshot.state_ids, receipt)
        self._after_commit()
        for observer in tuple(self._observers):
            observer(self)
        if snapshot.status != "active" and self._state == "running":
            self._finish_life()

    def _after_commit(self) -> None:
        """A snapshot was committed; engines re-arm timers here."""

    # Effects

    def _perform(self, effects: Iterable[Any], event: AnyEvent | None) -> None:
        for effect in effects:
            kind = type(effect)
            if kind is StartService:
                self._start(effect, event)
            elif kind is StopService:
                self._stop_child(effect.id)
            elif kind is Send:
                self._send(effect)
            elif kind is Spawn:
                self._spawn(effect, event)
            elif kind is Emit:
                for listener in tuple(self._emits):
                    listener(effect.event)
            elif kind is Log:
                _LOG.info("%s: %s", self.id, effect.label)
            elif kind is ScheduleTimer or kind is CancelTimer or kind is CancelSend:
                continue

    def _start(self, effect: StartService, event: AnyEvent | None) -> None:
        child = self.snapshot.children.get(effect.id)
        if child is None or child.status != "active":
            return
        service = self.logic.services.get(child.src)
        invocation = Invocation(
            effect.id, child.key, child.src, service, child.state_id, _seen(event), child.input
        )
        self._plugins.call("on_service_start", self, invocation, child.input)
        if isinstance(service, Machine):
            self._start_machine(invocation, service)
        else:
            self._start_service(invocation)

    def _spawn(self, effect: Spawn, event: AnyEvent | None) -> None:
        child = self.snapshot.children.get(effect.id)
        if child is None or child.status != "active":
            return
        src = effect.src
        service = src if not isinstance(src, str) else self.logic.services.get(src)
        name = src if isinstance(src, str) else getattr(src, "id", "actor")
        invocation = Invocation(effect.id, child.key, name, service, None, _seen(event), child.input)
        self._plugins.call("on_service_start", self, invocation, child.input)
        if isinstance(service, Machine):
            self._start_machine(invocation, service)
        else:
            self._start_service(invocation)

    def _start_machine(self, invocation: Invocation, machine: Machine) -> None:
        actor = self._make_child(invocation, machine)
        actor._input = copy.copy(invocation.input)
        self._adopt(actor, invocation)

    def _restore_child(self, name: str, child: Any) -> None:
        machine = self.logic.services.get(child.src)
        if not isinstance(machine, Machine):
            raise ChartError(f"actor {name!r} cannot be restored: its machine is not in the logic")
        invocation = Invocation(name, child.key, child.src, machine, None, None, child.input)
        actor = self._make_child(invocation, machine)
        actor._restored = load(machine, child.snapshot, trusted=True)
        actor._restart = True
        self._adopt(actor, invocation)

    def _make_child(self, invocation: Invocation, machine: Machine) -> InterpreterBase:
        actor = type(self)(
            machine,
            clock=self.clock,
            plugins=self._plugins.items,
            scope=self.host.scope,
            ledger=self._ledger,
            run=self.host.run,
            max_queue=self.max_queue,
            parent=self,
            id=f"{self.id}:{invocation.id}",
        )
        actor._child_id = invocation.id  # type: ignore[attr-defined]
        actor._child_key = invocation.key  # type: ignore[attr-defined]
        return actor

    def _adopt(self, actor: InterpreterBase, invocation: Invocation) -> None:
        """Start a child machine and report its end to this one."""
        raise NotImplementedError

    def _start_service(self, invocation: Invocation) -> None:
        raise NotImplementedError

    def _stop_child(self, name: str) -> None:
        """Cancel whatever runs under this child id."""
        full = f"{self.id}:{name}"
        actor = self.actors.pop(full, None)
        if actor is not None:
            actor.stop()

    def _send(self, effect: Send) -> None:
        if effect.delay:
            return
        target = effect.target
        if target is None:
            self._put_self(effect.event)
        elif target == "#parent":
            if self.parent is not None:
                self.parent._from_child(effect.event)
        else:
            actor = self.actors.get(f"{self.id}:{target}")
            if actor is not None:
                actor._from_child(effect.event)
            else:
                _LOG.warning("%s: no actor to send an event to", self.id)

    def _put_self(self, event: Event) -> None:
        self._plugins.call("on_before_send", self, event)
        self._put(event, SELF)

    def _from_child(self, event: Event) -> None:
        self._plugins.call("on_before_send", self, event)
        self._put(event, CHILD)

    def _settled(self, invocation: Invocation, output: Any, error: BaseException | None) -> None:
        if error is None:
            self._plugins.call("on_service_done", self, invocation, output)
        else:
            self._plugins.call("on_service_error", self, invocation, error)

    # Time

    def next_due(self) -> tuple[float, str] | None:
        """The earliest deadline as ``(due_at in epoch ms, id)``, delayed sends included."""
        if self._state != "running":
            return None
        snapshot = self.snapshot
        best: tuple[float, str] | None = None
        for table in (snapshot.timers, snapshot.sends):
            for name, timer in table.items():
                if best is None or (timer.due_at, name) < best:
                    best = (timer.due_at, name)
        return best

    def _due_event(self) -> EngineEvent | None:
        """The event of the earliest timer that is due now, or None."""
        due = self.next_due()
        if due is None or due[0] > self.clock.now_ms():
            return None
        return fired(due[1])

    def _refuse_async(self) -> None:
        for name, service in self._services_used():
            if is_async_service(service):
                raise NotSupportedError(
                    f"service {name!r} is async and not supported by SyncInterpreter; "
                    "use Interpreter, or a sync service"
                )


def _exception_of(event: AnyEvent) -> BaseException | None:
    if isinstance(event, EngineEvent):
        return event.value if isinstance(event.value, BaseException) else None
    return event.error


def _seen(event: AnyEvent | None) -> Event | None:
    """The event as a service sees it."""
    return event.event if isinstance(event, EngineEvent) else event


def _receipt(
    status: Any,
    reason: str | None,
    state_ids: Iterable[str],
    error: BaseException | None = None,
) -> Receipt:
    return Receipt(
        status=status,
        reason=reason,
        faults=() if error is None else (error,),
        changed=False,
        state_ids=frozenset(state_ids),
    )


def _after_hook_failure(event: AnyEvent, origin: str, error: Exception) -> AnyEvent | None:
    """What to step when a hook failed: a completion fails, a deadline fires, the rest is denied."""
    if origin != ENGINE:
        return None
    if isinstance(event, EngineEvent) and event.kind == "done":
        return failed(event.key, error)
    return event
