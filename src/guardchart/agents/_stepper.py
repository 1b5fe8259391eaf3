"""A machine that is stepped and never runs anything: the interpreter without its services.

Queue, hook, kernel, child machines and receipts are the runtime's own. What differs is that a
service rests until its result is brought, that time stands still, and that what a host would
have to do is written down.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Final, Literal, NamedTuple, Self

from guardchart.errors import ServiceInterruptedError
from guardchart.kernel import (
    CancelSend,
    CancelTimer,
    Child,
    Emit,
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
    failed,
)
from guardchart.runtime import BeforeStep, Invocation, ServiceScope
from guardchart.runtime._base import InterpreterBase, written_service
from guardchart.runtime._core import ENGINE, INSIDE, OUTSIDE, AnyEvent, Entry
from guardchart.runtime._plugins import NO_PLUGINS
from guardchart.runtime._steps import _NOTHING

__all__ = ["AgentAction", "Fed", "FixedClock", "Recorded", "Replayer", "Stepper", "Tape", "Waiting"]

_new = tuple.__new__

ActionKind = Literal["timer", "cancel", "start", "stop", "emit", "log"]


class AgentAction(NamedTuple):
    """One thing a step asks of its host, beside its requests; plain data.

    Attributes:
        kind: ``"timer"``: hand this action to `transition_agent_step` once ``due_at`` has come.
            ``"cancel"``: a timer is not needed any more. ``"start"``: perform the service
            ``src`` and hand its result to `resolve_agent_step` under ``id``. ``"stop"``: its
            result is not wanted any more. ``"emit"``: an event for whoever listens. ``"log"``.
        agent: The actor path of the machine that asks.
        id: What it is known by there.
        due_at: When a timer is due, epoch milliseconds.
        src: The source of a service.
        value: A service's input, an emitted event, or what is logged.

    Example:
        >>> AgentAction("timer", "m", "m.a.after.0", 1500.0).due_at
        1500.0
    """

    kind: ActionKind
    agent: str
    id: str
    due_at: float | None = None
    src: str | None = None
    value: Any = None


class FixedClock:
    """A clock that shows the time of one step."""

    __slots__ = ("_now_ms",)

    simulated = True

    def __init__(self, now_ms: float) -> None:
        self._now_ms = now_ms

    def now_ms(self) -> float:
        return self._now_ms

    def attach(self, interpreter: Any) -> None:
        """Nothing to do: time stands still."""

    def detach(self, interpreter: Any) -> None:
        """Nothing to do."""


class Recorded(NamedTuple):
    """What a log holds of one step beside its event.

    Attributes:
        verdicts: ``(stepper, event) -> verdict`` by the number of the question.
        updates: As `Tape.updates`.
        sends: As `Tape.sends`.
    """

    verdicts: Mapping[int, Callable[[Any, Any], Any]]
    updates: Sequence[tuple[int, str, Mapping[str, Any]]]
    sends: Mapping[int, tuple[str, str, Event]]


_NO_LOG: Final = Recorded({}, (), {})


class Tape:
    """What one step wrote down, and in a replay what it reads instead of asking the hook.

    Attributes:
        performed: The effects of each macrostep, with the agent, its prefix and its snapshot.
        verdicts: What the hooks said, by the number of the question.
        updates: What plugins wrote into contexts: how many macrosteps had been taken, the
            agent, and the keys.
        sends: What plugins sent, by how many events had been queued: the agent, where it came
            from, and the event.
        recorded: The verdicts, updates and sends of a log; for a `Replayer`.
    """

    __slots__ = (
        "accepted",
        "asked",
        "performed",
        "recorded",
        "sends",
        "stepped",
        "updates",
        "verdicts",
    )

    def __init__(self, recorded: Recorded = _NO_LOG) -> None:
        self.performed: list[tuple[str, str, Snapshot, Iterable[Any]]] = []
        self.verdicts: dict[int, Any] = {}
        self.updates: list[tuple[int, str, dict[str, Any]]] = []
        self.sends: dict[int, tuple[str, str, Event]] = {}
        self.asked = self.stepped = self.accepted = 0
        self.recorded = recorded

    def actions(self) -> tuple[AgentAction, ...]:
        """What the host is asked to do."""
        found = (
            _action(agent, prefix, snapshot, effect)
            for agent, prefix, snapshot, effects in self.performed
            for effect in effects
        )
        return tuple(each for each in found if each is not None)


class Fed(NamedTuple):
    """What a service makes of a result it was brought: its end, or a note that more is needed.

    Attributes:
        output: What the service gives, where it ended well.
        error: What it failed with.
        note: JSON that is kept in the snapshot until the next result; None where it ended.
        event: An event to send to the machine instead; what it does to the service counts.
    """

    output: Any = None
    error: BaseException | None = None
    note: Any = None
    event: Mapping[str, Any] | None = None


class Waiting(NamedTuple):
    """A service that waits for its result.

    Attributes:
        id: What requests and results call it: its key, below a child with the child's path.
        actor: The machine that invoked it.
        invocation: The invocation.
    """

    id: str
    actor: Stepper
    invocation: Invocation

    @property
    def scope(self) -> ServiceScope:
        """The service's view of its machine."""
        return ServiceScope(self.actor, self.invocation)


class Stepper(InterpreterBase):
    """One machine with its child machines, for the length of one step."""

    engine: ClassVar[str] = "sync"
    mixed = True

    tape: Tape
    trusted = False
    prefix = ""
    _known: tuple[Any, list[Invocation]] = None, []

    @classmethod
    def opened(
        cls,
        machine: Machine,
        snapshot: Snapshot | None,
        *,
        clock: Any,
        scope: str | None,
        ledger: Any,
        run: str | None = None,
        input: Any = None,
        tape: Tape | None = None,
        trusted: bool = False,
        plugins: Iterable[Any] = (),
    ) -> Self:
        """A machine as its snapshot has it, children included, or entered anew."""
        stepper = cls(
            machine,
            clock=clock,
            scope=scope,
            ledger=ledger,
            run=run,
            input=input,
            plugins=plugins,
        )
        stepper.tape = tape if tape is not None else Tape()
        stepper.trusted = trusted
        stepper._snapshot = snapshot
        stepper._begin()
        return stepper

    def folded(self) -> Snapshot:
        """The snapshot, with those of the child machines in it."""
        snapshot = self.snapshot
        if not self.actors:
            return snapshot
        children = snapshot.children.copy()
        for actor in self.actors.values():
            invocation = actor._invocation
            child = children.get(invocation.id)
            if child is not None and child.key == invocation.key:
                children[invocation.id] = child._replace(snapshot=actor.dump())
        return snapshot.replace(children=MappingProxyType(children))

    def tree(self) -> list[Stepper]:
        """This machine and every living one below it."""
        found = [self]
        for actor in self.actors.values():
            found += actor.tree()
        return found

    def waiting(self) -> list[Waiting]:
        """The services that wait for a result, here and below, in the order they were started."""
        found = []
        for actor in self.tree() if self.actors else (self,):
            for invocation in actor._invocations() if actor._state == "running" else ():
                if not isinstance(invocation.service, Machine):
                    fields = (actor.prefix + invocation.key, actor, invocation)
                    found.append(_new(Waiting, fields))
        return found

    def _invocations(self) -> Sequence[Invocation]:
        """What this machine has started and waits for; looked up once for each of its snapshots."""
        snapshot = self._snapshot
        assert snapshot is not None
        children = snapshot[4].children
        known, found = self._known
        if known is not children:
            found = []
            for name, child in children.items():
                if child.status == "active":
                    found.append(self._invocation_of(name, child))
            self._known = children, found
        return found

    def timers(self) -> list[AgentAction]:
        """Every pending timer and delayed send, the earliest first."""
        found = [
            AgentAction("timer", actor.id, name, timer.due_at)
            for actor in self.tree()
            if actor._state == "running"
            for table in (actor.snapshot.timers, actor.snapshot.sends)
            for name, timer in table.items()
        ]
        return sorted(found, key=lambda each: (each.due_at or 0.0, each.agent, each.id))

    def note(self, waiting: Waiting, data: Any) -> None:
        """Write into the snapshot what is known of a service so far."""
        actor, name = waiting.actor, waiting.invocation.id
        snapshot = actor.snapshot
        noted = {name: snapshot.children[name]._replace(snapshot=data)}
        actor._snapshot = snapshot.replace(
            rev=snapshot.rev + 1, children=MappingProxyType(snapshot.children | noted)
        )

    # What differs from a running machine

    def send(
        self, event: str | Mapping[str, Any] | Event, *, wait: bool = False, **payload: Any
    ) -> Receipt:
        """What a plugin sends, which is part of the step and of its entry."""
        entry = self._sent(as_event(event, payload or None), OUTSIDE)
        return entry.receipt or self._refused("ignored", "queued")

    def post(self, event: str | Mapping[str, Any] | Event, **payload: Any) -> None:
        """As `send`, from inside."""
        self._sent(as_event(event, payload or None), INSIDE)

    def _sent(self, event: Event, origin: str) -> Entry:
        self.tape.sends[self.tape.accepted] = (self.id, origin, event)
        return self._accept(event, origin)

    def _accept_entry(self, entry: Entry) -> Entry:
        self.tape.accepted += 1
        return super()._accept_entry(entry)

    def update_context(self, updates: Mapping[str, Any]) -> None:
        """What a plugin writes, which is part of the step and of its entry."""
        super().update_context(updates)
        self.tape.updates.append((self.tape.stepped, self.id, dict(updates)))

    def _step(self, event: AnyEvent) -> Receipt:
        self.tape.stepped += 1
        return super()._step(event)

    def _join(self, parent: Any) -> None:
        self.tape = parent.tape
        self.trusted = parent.trusted
        self.prefix = f"{parent.prefix}{self._invocation.id}:" if self._invocation else ""

    def _revive(self, restored: Snapshot) -> None:
        """Take up the snapshot as it is: nothing is started again, nothing was interrupted."""
        for invocation in self._invocations():
            service = invocation.service
            if not isinstance(service, Machine):
                self._start_service(invocation)
                continue
            saved = restored.children[invocation.id].snapshot
            if saved is None:
                error = ServiceInterruptedError("the child's snapshot was not kept")
                self._accept(failed(invocation.key, error), ENGINE)
            else:
                self._restore_actor(invocation, service, saved, self.trusted)

    def _start_service(self, invocation: Invocation) -> None:
        """A service rests; one that has nothing to ask for ends at once."""
        at_once = getattr(invocation.service, "step_at_once", None)
        if at_once is not None:
            output = at_once(ServiceScope(self, invocation))
            if output is not None:
                self._settle_child(invocation, output, None)

    def _perform(self, effects: Iterable[Any], event: AnyEvent) -> None:
        self.tape.performed.append((self.id, self.prefix, self.snapshot, effects))
        super()._perform(effects, event)

    def _invocation_of(self, name: str, child: Child) -> Invocation:
        service = _service_of(self.machine, name, child)
        src, key, _, given, _, _, state_id = child
        return _new(Invocation, (name, key, src, service, state_id or None, None, given))

    def _ask_hook(self, event: AnyEvent, origin: str) -> BeforeStep | Exception:
        tape = self.tape
        number = tape.asked
        tape.asked += 1
        verdict = super()._ask_hook(event, origin)
        if verdict is not _NOTHING:
            tape.verdicts[number] = (self._hook, event, verdict)
        return verdict


class Replayer(Stepper):
    """A machine that takes a step of a log: what hooks and plugins did is read from there."""

    def _begin(self) -> None:
        # A replay shows nobody anything, not even plugins that are installed.
        self._plugins = NO_PLUGINS
        super()._begin()

    def _accept_entry(self, entry: Entry) -> Entry:
        self._inject()
        return super()._accept_entry(entry)

    def _drive(self) -> None:
        super()._drive()
        if self.parent is None and not self._driving:
            self._inject()

    def _inject(self) -> None:
        """Queue what a plugin had sent at this point."""
        tape = self.tape
        found = tape.recorded.sends.get(tape.accepted)
        for actor in () if found is None else self._root().tree():
            if found is not None and actor.id == found[0]:
                tape.accepted += 1
                InterpreterBase._accept_entry(actor, Entry(found[2], found[1]))
                break

    def _root(self) -> Any:
        root: Any = self
        while root.parent is not None:
            root = root.parent
        return root

    def _step(self, event: AnyEvent) -> Receipt:
        self.written()
        return super()._step(event)

    def written(self) -> None:
        """Write what a plugin had written at this point."""
        tape = self.tape
        for at, agent, updates in tape.recorded.updates:
            if at == tape.stepped:
                for actor in self._root().tree():
                    if actor.id == agent:
                        InterpreterBase.update_context(actor, updates)

    def _ask_hook(self, event: AnyEvent, origin: str) -> BeforeStep | Exception:
        tape = self.tape
        noted = tape.recorded.verdicts.get(tape.asked)
        tape.asked += 1
        return _NOTHING if noted is None else noted(self, event)


def _action(agent: str, prefix: str, snapshot: Snapshot, effect: Any) -> AgentAction | None:
    """What an effect asks of the host; ``snapshot`` is the one that came with it."""
    kind = type(effect)
    if kind is ScheduleTimer:
        timer = snapshot.timers.get(effect.id)
        return timer and AgentAction("timer", agent, effect.id, timer.due_at)
    if kind is Send:
        send = snapshot.sends.get(effect.id) if effect.delay else None
        return send and AgentAction("timer", agent, effect.id, send.due_at)
    if kind is CancelTimer or kind is CancelSend:
        return AgentAction("cancel", agent, effect.id)
    if kind is StartService or kind is Spawn:
        return _started(agent, prefix, snapshot, effect.id)
    if kind is StopService:
        return AgentAction("stop", agent, prefix + effect.id)
    if kind is Emit:
        return AgentAction("emit", agent, effect.event.type, value=dict(effect.event.payload))
    if kind is Log:
        return AgentAction("log", agent, effect.label, value=effect.value)
    return None


def _started(agent: str, prefix: str, snapshot: Snapshot, name: str) -> AgentAction | None:
    """A service that is no request and no machine, so that the host performs it."""
    child = snapshot.children.get(name)
    if child is None or child.status != "active":
        return None
    service = _service_of(snapshot.machine, name, child)
    if isinstance(service, Machine) or hasattr(service, "step_requests"):
        return None
    return AgentAction("start", agent, prefix + child.key, src=child.src, value=child.input)


def _service_of(machine: Machine, name: str, child: Child) -> Any:
    services = getattr(machine.logic, "services", None) or {}
    service = services.get(child.src)
    if service is None and child.state_id:
        service = written_service(machine, StartService(name, child.src, child.state_id))
    return service
