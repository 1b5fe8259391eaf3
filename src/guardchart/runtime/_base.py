"""How an interpreter lives: start and end, the effects of a step, children, time.

The kernel decides; this module carries out. Each engine adds only how a service is run and how
it waits.
"""

from __future__ import annotations

import hashlib
import logging
import uuid
from collections.abc import Callable, Iterable
from typing import Any, Final, Self

from guardchart.errors import (
    ChartError,
    QueueFullError,
    ServiceInterruptedError,
    StepError,
)
from guardchart.kernel import (
    Emit,
    EngineEvent,
    Event,
    InitEvent,
    Log,
    Machine,
    Receipt,
    Send,
    Snapshot,
    Spawn,
    StartService,
    StopService,
    as_event,
    done,
    failed,
    fired,
    initial_step,
    interrupted,
    load,
    observed,
    restart_services,
)
from guardchart.runtime._address import addressee
from guardchart.runtime._core import (
    ENGINE,
    INSIDE,
    OUTSIDE,
    AnyEvent,
    Entry,
    InterpreterCore,
)
from guardchart.runtime._plugins import contained
from guardchart.runtime._services import Invocation
from guardchart.runtime._steps import InterpreterSteps

__all__ = ["InterpreterBase", "written_service"]

_LOG = logging.getLogger("guardchart")
_MAX_DEPTH: Final = 32


class InterpreterBase(InterpreterSteps):
    """A running machine; see `SyncInterpreter` and `Interpreter`.

    Args:
        machine: A machine whose logic is complete.
        clock: Where the time comes from; the wall clock by default.
        plugins: Observers; see `Plugin`. Child machines get them too.
        scope: The thread id or store key that tool calls are filed under; the run by default.
        ledger: The ledger approvals and claims are kept in, instead of the logic's own.
        run: The nonce of this machine's life; minted here when the machine first starts.
        input: The machine's input, ``.input`` of its first event.
        max_queue: How many events may wait, how many may follow one another without one from
            outside in between, and how many child machines may live.
        bubbles: Exceptions by which a service speaks to the host, not to the chart. They are no
            failure: the machine stops, and ``bubbled`` holds the first of them.
        parent: The interpreter that started this one; set by it.
        id: The actor path; the machine's id by default.
        attachments: Objects that a host wants its services to find; child machines get them too.

    Raises:
        ChartError: The machine's logic misses names; all of them are listed.
    """

    __slots__ = ()

    # Life

    def _begin(self) -> None:
        """Enter the initial configuration, or take up the restored one."""
        restored = self._snapshot
        if restored is not None and restored.run is None:
            restored = self._snapshot = restored.replace(run=self._nonce or uuid.uuid4().hex)
        if restored is not None and restored.status != "active":
            self._state = restored.status
            return
        self._state = "running"
        self._driving = True
        try:
            if restored is None:
                self._enter()
            else:
                self._revive(restored)
        except BaseException:
            self._quit()
            self._snapshot, self._state = restored, "uninitialized"
            raise
        finally:
            self._driving = False

    def _enter(self) -> None:
        self._stepping = True
        try:
            snapshot, effects, receipt = initial_step(
                self.machine, self._input, now=self.clock.now_ms(), host=self
            )
        finally:
            self._stepping = False
        snapshot = snapshot.replace(run=self._nonce or uuid.uuid4().hex)
        self._snapshot = snapshot
        for fault in receipt.faults:
            self._fault(fault)
        self._announce()
        self._commit(snapshot, effects, receipt, InitEvent(self._input), frozenset())

    def _revive(self, restored: Snapshot) -> None:
        if not self._restart:
            self._announce()
            if self._adopts:
                self._adopt(restored, trusted=False)
            return
        snapshot, effects = restart_services(self.machine, restored)
        services = self.logic.services
        for name, child in restored.children.items():
            if child.spawned and child.status == "active" and child.src not in services:
                raise ChartError(f"actor {name!r} cannot be restored: its source has no name")
        self._snapshot = snapshot
        self._announce()
        self._perform(effects, InitEvent())

    def _announce(self) -> None:
        if self.parent is None:
            self.clock.attach(self)
        if self._plugins.items:
            self._plugins.call("on_interpreter_start", self)

    def _adopt(self, restored: Snapshot, *, trusted: bool) -> None:
        """Take up the child machines as they stood; nothing of them is started again."""
        for name, child in restored.children.items():
            service = self.logic.services.get(child.src)
            if child.status != "active" or child.snapshot is None:
                continue
            if isinstance(service, Machine):
                state_id = child.state_id or None
                invocation = Invocation(
                    name, child.key, child.src, service, state_id, None, child.input
                )
                self._restore_actor(invocation, service, child.snapshot, trusted)

    def fail_interrupted(self, again: Callable[[Any], bool] | None = None) -> None:
        """Tell the machine of every service that was running when its snapshot was taken.

        Each gets ``failed(key, ServiceInterruptedError)``, a full step. Services that run in
        this life are left alone. So are child machines that were adopted; of what ran below
        them they are told.

        Args:
            again: Asked with each such service whether it is to be started again instead, as
                the same invocation.
        """
        live = {actor._invocation.key for actor in self.actors.values()}
        for key in interrupted(self.snapshot):
            if key in live or key in self._flying:
                continue
            name = key.rpartition("@")[0]
            child = self.snapshot.children.get(name)
            if child is None or child.key != key:
                continue
            effect = StartService(name, child.src, child.state_id)
            service = self.logic.services.get(child.src) or written_service(self.machine, effect)
            if again is not None and again(service):
                self._start(name, service, child.state_id or None, InitEvent())
                continue
            error = ServiceInterruptedError("the service was interrupted")
            self._accept(failed(key, error), ENGINE)
        for actor in list(self.actors.values()):
            if actor._adopts:
                InterpreterBase.fail_interrupted(actor, again)

    def _end(self) -> None:
        """The snapshot is done or in error: nothing goes on from here."""
        snapshot = self.snapshot
        self._state = snapshot.status
        self._quit()
        if self._plugins.items:
            if snapshot.status == "done":
                self._plugins.call("on_done", self, snapshot.output)
            else:
                self._plugins.call("on_error", self, self.error)
            self._plugins.call("on_interpreter_stop", self)
        if self.parent is not None:
            self.parent._actor_ended(self)

    def stop(self) -> Self:
        """Stop: cancel timers and services, run no exit actions, keep the snapshot.

        Returns:
            The interpreter; a second call does nothing. Called by an action, the step is
            completed and its effects are not carried out.
        """
        if self._state in ("running", "uninitialized"):
            ran = self._state == "running"
            self._state = "stopped"
            # How the children stood is part of how this machine stood.
            self._left = dict(self.actors)
            self._quit()
            if ran and self._plugins.items:
                self._plugins.call("on_interpreter_stop", self)
        return self

    def _quit(self) -> None:
        """Stop children and services, forget deadlines."""
        for actor in list(self.actors.values()):
            actor.stop()
        self.actors.clear()
        flying, self._flying = self._flying, {}
        for cancel in flying.values():
            cancel()
        if self.parent is None:
            self.clock.detach(self)

    # Commit

    def _commit(
        self,
        snapshot: Snapshot,
        effects: Iterable[Any],
        receipt: Receipt,
        event: AnyEvent,
        before: frozenset[str],
    ) -> None:
        if snapshot.status == "error":
            self._error = receipt.error or _exception_of(event)
        if self._state != "running":
            return
        if self._plugins.items and (receipt.status == "taken" or snapshot.state_ids != before):
            self._plugins.call("on_transition", self, before, snapshot.state_ids, receipt)
        if effects:
            self._perform(effects, event)
        if self._observers:
            for observer in self._observers:
                contained("observer", observer, self)
        if self._state != "running":
            return
        if snapshot.status != "active":
            self._end()
        elif self._watched:
            self._show()

    # Effects

    def _perform(self, effects: Iterable[Any], event: AnyEvent) -> None:
        for effect in effects:
            if self._state != "running":
                return
            kind = type(effect)
            if kind is StartService:
                service = self.logic.services.get(effect.src)
                service = service or written_service(self.machine, effect)
                self._start(effect.id, service, effect.state_id, event)
            elif kind is StopService:
                self._stop_child(effect.id)
            elif kind is Send:
                if not effect.delay:
                    self._send(effect)
            elif kind is Spawn:
                src = effect.src
                service = self.logic.services.get(src) if isinstance(src, str) else src
                self._start(effect.id, service, None, event)
            elif kind is Emit:
                for listener in self._listeners:
                    contained("listener", listener, effect.event)
            elif kind is Log:
                _LOG.info("%s: %s", self.id, effect.label)
            # Timers and delayed sends are read from the snapshot.

    def _start(self, name: str, service: Any, state_id: str | None, event: AnyEvent) -> None:
        snapshot = self._snapshot
        child = None if snapshot is None else snapshot[4].children.get(name)
        if child is None or child.status != "active":
            return
        seen = event.event if isinstance(event, EngineEvent) else event
        fields = (name, child.key, child.src, service, state_id, seen, child.input)
        invocation = tuple.__new__(Invocation, fields)
        if self._plugins.items:
            self._plugins.call("on_service_start", self, invocation, child.input)
        try:
            if isinstance(service, Machine):
                self._start_actor(invocation, service, child.snapshot)
            else:
                self._start_service(invocation)
        except Exception as error:
            self._fail_child(invocation, None, error)

    def _start_service(self, invocation: Invocation) -> None:
        raise NotImplementedError

    def _start_actor(self, invocation: Invocation, machine: Machine, saved: Any) -> None:
        actor = self._made_actor(invocation, machine, input=invocation.input)
        if saved is not None:
            actor._snapshot = load(machine, saved, trusted=True)
            actor._restart = True
        self._live(actor)

    def _restore_actor(
        self, invocation: Invocation, machine: Machine, saved: Any, trusted: bool
    ) -> None:
        """A child machine as it stood when its parent's snapshot was taken."""
        actor = self._made_actor(invocation, machine)
        actor._snapshot = load(machine, saved, trusted=trusted)
        actor._adopts = True
        self._live(actor)

    def _made_actor(self, invocation: Invocation, machine: Machine, input: Any = None) -> Self:
        self._check_breeding()
        actor = type(self)(
            machine,
            clock=self.clock,
            plugins=self._plugins.items,
            scope=self.host.scope,
            ledger=self._ledger,
            run=_nonce_of(self.host.run, invocation.key),
            input=input,
            max_queue=self.max_queue,
            parent=self,
            id=f"{self.id}:{invocation.id}",
            attachments=self.attachments,
            bubbles=self._bubbles,
        )
        actor._invocation = invocation
        if self._looks_on(invocation):
            actor._watched = actor._observed = True
        return actor

    def _live(self, actor: Self) -> None:
        """Let a child machine begin, and see it end where it does so at once."""
        self.actors[actor.id] = actor
        try:
            actor._join(self)
            actor._begin()
        except BaseException:
            self.actors.pop(actor.id, None)
            raise
        if actor._state in ("done", "error"):
            self._actor_ended(actor)
        else:
            actor._drive()

    def _join(self, parent: Any) -> None:
        """Become part of the parent's engine."""

    def _looks_on(self, invocation: Invocation) -> bool:
        """Whether the invoking state has ``onSnapshot`` transitions for this child."""
        node = self.machine.nodes.get(invocation.state_id or "")
        invokes = () if node is None else node.invokes
        return any(each.id == invocation.id and each.spec.on_snapshot for each in invokes)

    def _check_breeding(self) -> None:
        """Refuse a child too many: machines that spawn themselves end here.

        Raises:
            StepError: The child is not started.
        """
        root, depth = self, 1
        while root.parent is not None:
            root, depth = root.parent, depth + 1
        if depth > _MAX_DEPTH or root._count() > self.max_queue:
            raise StepError(f"{self.id}: too many child machines")

    def _count(self) -> int:
        return 1 + sum(actor._count() for actor in self.actors.values()) if self.actors else 1

    def _actor_ended(self, actor: InterpreterBase) -> None:
        """A child machine is done or in error: the machine gets its output or exception."""
        if self.actors.get(actor.id) is not actor or actor._invocation is None:
            return
        del self.actors[actor.id]
        if actor._state == "done":
            self._settle_child(actor._invocation, actor.output, None)
            self._report(actor._invocation, actor, None)
            return
        error = actor.error
        if not isinstance(error, BaseException):
            error = StepError("the actor failed before its snapshot was taken")
        self._fail_child(actor._invocation, actor, error)

    def _fail_child(self, invocation: Invocation, actor: Any, error: Exception) -> None:
        """Tell the machine that a child failed; an agent it spawned has a report of its own."""
        if _reporter(invocation) is None:
            self._settle_child(invocation, None, error)
            return
        if self._plugins.items:
            self._plugins.call("on_service_error", self, invocation, error)
        self._accept(done(invocation.key, None), ENGINE)
        self._report(invocation, actor, error)

    def _report(self, invocation: Invocation, actor: Any, error: Exception | None) -> None:
        """Have an agent that ended without a word report after all."""
        reporter = _reporter(invocation)
        event = None if reporter is None else reporter(f"{self.id}:{invocation.id}", actor, error)
        if event is not None:
            event.sender = (invocation.src,)
            self._accept(event, INSIDE)

    def is_over(self, name: str) -> bool:
        """Whether the child machine of this id has come to its end, though not yet settled."""
        actor = self.actors.get(f"{self.id}:{name}")
        return actor is not None and actor._snapshot is not None and actor._snapshot[1] != "active"

    def _show(self) -> None:
        """Give the parent's ``onSnapshot`` transitions the snapshot as it is now."""
        invocation = self._invocation
        if invocation is not None and self.parent.is_current(invocation):
            self.parent._accept(observed(invocation.key, self.snapshot), ENGINE)

    def _stop_child(self, name: str) -> None:
        """Cancel whatever runs under this child id."""
        actor = self.actors.pop(f"{self.id}:{name}", None)
        if actor is not None:
            actor.stop()
        for key in [key for key in self._flying if key.rpartition("@")[0] == name]:
            self._flying.pop(key)()

    def _send(self, effect: Send) -> None:
        target: Any = self
        if effect.target == "#parent":
            target = self.parent
        elif effect.target is not None:
            target = self.actors.get(f"{self.id}:{effect.target}")
        if target is None:
            _LOG.warning("%s: no actor to send an event to", self.id)
            return
        event = effect.event
        if target is not self:
            # What the other machine knows the sender as; it does not know this one's states.
            known = self._invocation if effect.target == "#parent" else None
            event.sender = (self.machine.id if known is None else known.src,)
        try:
            target._accept(event, INSIDE)
        except QueueFullError as error:
            self._fault(error)

    # Services

    def _finish(self, invocation: Invocation, output: Any, error: BaseException | None) -> None:
        """A service returned or raised: tell the machine, or charge what came too late."""
        self._flying.pop(invocation.key, None)
        if self.is_current(invocation):
            deliver = getattr(invocation.service, "deliver", None)
            if deliver is not None and error is None:
                error = self._deliver(deliver, output)
                # Where its event has led out of the state nobody waits for the service.
                if not self.is_current(invocation):
                    return
            self._settle_child(invocation, output, error)
        else:
            self._charge(invocation, output if error is None else error)

    def _charge(self, invocation: Invocation, outcome: Any) -> None:
        """Let a service whose state was left still add what it used to the context."""
        late = getattr(invocation.service, "late", None)
        if late is None or self._state != "running":
            return
        try:
            updates = late(self.snapshot.context, outcome)
            if updates:
                InterpreterCore.update_context(self, updates)
        except Exception as fault:
            self._fault(fault)

    def _deliver(self, deliver: Any, output: Any) -> Exception | None:
        """Take the event a service was there to find, before its completion."""
        try:
            self._accept(as_event(deliver(output)), INSIDE)
        except Exception as error:
            return error
        return None

    def _settle_child(
        self, invocation: Invocation, output: Any, error: BaseException | None
    ) -> None:
        if self._plugins.items:
            if error is None:
                self._plugins.call("on_service_done", self, invocation, output)
            else:
                self._plugins.call("on_service_error", self, invocation, error)
        if error is not None and isinstance(error, self._bubbles):
            self._bubble(error)
            return
        key = invocation.key
        self._accept(done(key, output) if error is None else failed(key, error), ENGINE)

    def _decision(self, event: Event) -> Entry:
        """Take a person's decision to the machine of this tree that it is for."""
        target, reason = addressee(self, event)
        if target is not None:
            return target._accept(event, OUTSIDE)  # type: ignore[no-any-return]
        entry = Entry(event, OUTSIDE)
        entry.receipt = self._refused("denied", reason)
        return entry

    def _bubble(self, error: BaseException) -> None:
        """Stop the whole machine for an exception that is none of the chart's business."""
        root: InterpreterBase = self
        while root.parent is not None:
            root = root.parent
        root.bubbled = root.bubbled or error
        root.stop()

    def _in_flight(self) -> bool:
        """Whether a service runs, here or in a child machine."""
        if self._flying or not self.actors:
            return bool(self._flying)
        return any(actor._in_flight() for actor in self.actors.values())

    # Time

    def next_due(self) -> tuple[float, str] | None:
        """The earliest deadline as ``(due_at in epoch ms, id)``.

        Delayed sends and the deadlines of child machines are included.
        """
        found = self._due()
        return None if found is None else found[:2]

    def fire_due(self) -> bool:
        """Deliver every timer that is due; see the engines."""
        raise NotImplementedError

    def computing(self) -> bool:
        """Whether a synchronous service runs on a thread."""
        raise NotImplementedError

    def own_due(self) -> tuple[float, str] | None:
        """As `next_due`, without child machines."""
        if self._state != "running" or self._snapshot is None:
            return None
        rest = self._snapshot[4]
        if not rest.timers and not rest.sends:
            return None
        return min(
            (timer.due_at, name)
            for table in (rest.timers, rest.sends)
            for name, timer in table.items()
        )

    def _due(self) -> tuple[float, str, Any] | None:
        own = self.own_due()
        best: tuple[float, str, Any] | None = None if own is None else (*own, self)
        for actor in self.actors.values():
            found = actor._due()
            if found is not None and (best is None or found[:2] < best[:2]):
                best = found
        return best

    def _fire_next(self) -> bool:
        """Deliver the timer that has been due longest, by ``(due_at, id)``.

        Returns:
            Whether there may be more. False where none is due, where it has to wait for what
            is being processed, or where timers breed timers without time passing.
        """
        found = self._due()
        if found is None or found[0] > self.clock.now_ms() or not found[2].quiet():
            self._fired = 0
            return False
        self._fired += 1
        if self._fired > self.max_queue:
            self._fired = 0
            self._fault(StepError(f"{self.id}: more than {self.max_queue} timers were due at once"))
            return False
        found[2]._accept(fired(found[1]), ENGINE)
        return True

    def quiet(self) -> bool:
        """Whether nothing is queued or being processed (services may be in flight)."""
        return not self._queue and not self._driving


def written_service(machine: Machine, effect: StartService) -> Any:
    """A service that stands in the chart itself, in place of a name."""
    node = machine.nodes.get(effect.state_id)
    for each in () if node is None else node.invokes:
        if each.id == effect.id and not isinstance(each.spec.src, str):
            return each.service
    return None


def _reporter(invocation: Invocation) -> Any:
    """What reports for a spawned machine that fails, or ends without having reported itself."""
    service = invocation.service
    if invocation.state_id is not None or not isinstance(service, Machine):
        return None
    return getattr(service.logic, "attachments", {}).get("report")


def _nonce_of(run: str, key: str) -> str:
    """The nonce of a child's life: another one each time it is started, the same on a retry.

    A child counts its batches from the beginning whenever its state is entered. Under its
    parent's nonce what it proposes the second time would pass for what it did the first time.
    """
    return hashlib.sha256(f"{run}\0{key}".encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _exception_of(event: AnyEvent) -> BaseException | None:
    if isinstance(event, EngineEvent):
        return event.value if isinstance(event.value, BaseException) else None
    return event.error
