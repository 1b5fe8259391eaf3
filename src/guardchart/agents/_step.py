"""One step of an agent: what it starts from, what is applied to it, and what it leaves."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from guardchart.agents._models import ModelResponse
from guardchart.agents._recorded import dump_turn, dump_verdict, load_failure, plain
from guardchart.agents._requests import AgentRequest
from guardchart.agents._sources import with_sources
from guardchart.agents._stepper import (
    AgentAction,
    FixedClock,
    Recorded,
    Replayer,
    Stepper,
    Tape,
    Waiting,
)
from guardchart.errors import StepError
from guardchart.kernel import Event, Machine, Receipt, Snapshot, as_event, dump, fired, load
from guardchart.runtime._address import DECISIONS
from guardchart.runtime._core import ENGINE, OUTSIDE

__all__ = ["AgentStep", "From", "Given", "Origin", "fingerprint", "requests_of", "step_once"]


@dataclass(slots=True, eq=False)
class Origin:
    """Where a request comes from: what its execution looks at."""

    machine: Machine
    snapshot: Snapshot
    scope: str | None
    ledger: Any
    trusted: bool
    plugins: tuple[Any, ...] = ()

    # A request is the data it carries: one read from a log equals the one a step made.
    def __eq__(self, other: object) -> bool:
        return other is None or isinstance(other, Origin)

    __hash__ = None  # type: ignore[assignment]

    def opened(self, clock: Any, scope: str | None = None, ledger: Any = None) -> Stepper:
        """The machine as the snapshot has it."""
        return Stepper.opened(
            self.machine,
            self.snapshot,
            clock=clock,
            scope=self.scope if scope is None else scope,
            ledger=self.ledger if ledger is None else ledger,
            trusted=self.trusted,
            plugins=self.plugins,
        )


class _Actions:
    """The actions of a step, made when somebody looks at them."""

    def __get__(self, step: AgentStep | None, owner: type) -> tuple[AgentAction, ...]:
        if step is None:  # the class has none, so that the field has no default
            raise AttributeError("actions")
        made = vars(step)["actions"] = step._tape.actions()
        return made


@dataclass(frozen=True, init=False, kw_only=True)
class AgentStep:
    """What a step left: where the agent stands, and what it asks of its host.

    Attributes:
        snapshot: The machine's snapshot, those of child machines in it.
        actions: Timers, and whatever else the host performs; see `AgentAction`.
        requests: What is to be executed now, side by side; told apart by ``kind``.
        receipt: What became of the event; None for `initial_agent_step`.
        at_ms: The time of the step, epoch milliseconds.

    Example:
        >>> from guardchart.agents import FakeModel, agent_logic, initial_agent_step, TOOL_LOOP
        >>> from guardchart import create_machine
        >>> machine = create_machine(TOOL_LOOP, agent_logic(FakeModel([]), []))
        >>> step = initial_agent_step(machine, {"task": "say hi"})
        >>> [request.kind for request in step.requests], step.done
        (['text'], False)
    """

    snapshot: Snapshot
    actions: _Actions = _Actions()
    requests: tuple[AgentRequest, ...]
    receipt: Receipt | None
    at_ms: float
    _origin: Origin = field(repr=False)
    _record: Mapping[str, Any] = field(repr=False)
    _tape: Tape = field(repr=False, compare=False)
    # The machine, standing still as the step left it; a host may look, and feed it nothing.
    _left: Stepper = field(repr=False, compare=False)

    # Each step makes one, and the __init__ of a frozen dataclass sets field by field.
    def __init__(
        self,
        origin: Origin,
        requests: tuple[AgentRequest, ...],
        receipt: Receipt | None,
        at_ms: float,
        record: Mapping[str, Any],
        tape: Tape,
        left: Stepper,
    ) -> None:
        fields = vars(self)
        fields["snapshot"] = origin.snapshot
        fields["requests"] = requests
        fields["receipt"] = receipt
        fields["at_ms"] = at_ms
        fields["_origin"] = origin
        fields["_record"] = record
        fields["_tape"] = tape
        fields["_left"] = left

    @property
    def done(self) -> bool:
        """Whether the machine has ended, well or in error."""
        return self.snapshot.status != "active"

    @property
    def timers(self) -> tuple[AgentAction, ...]:
        """Every pending timer, the earliest first; to be handed back once it is due."""
        return tuple(self._left.timers())

    @property
    def entry(self) -> dict[str, Any]:
        """What a host appends to its log: ``{event, raw, at_ms}`` and how to check it; JSON.

        Raises:
            AgentError: The event holds something that is not JSON.
            SnapshotError: So does the context.
        """
        record = dict(self._record)
        event = plain(record.pop("event"), "the event")
        raw = _raw(record.pop("raw", None))
        entry: dict[str, Any] = {"event": event, "raw": raw, "at_ms": self.at_ms, **record}
        if self._tape.verdicts:
            entry["verdicts"] = {
                str(number): dump_verdict(came, verdict)
                for number, (_, came, verdict) in self._tape.verdicts.items()
            }
        if self._tape.updates:
            entry["updates"] = plain(self._tape.updates, "what a plugin wrote")
        if self._tape.sends:
            entry["sends"] = {
                str(number): {
                    "agent": agent,
                    "origin": origin,
                    "type": event.type,
                    "payload": plain(event.payload, "what a plugin sent"),
                }
                for number, (agent, origin, event) in self._tape.sends.items()
            }
        entry["after"] = fingerprint(self.snapshot)
        return entry


From: TypeAlias = AgentStep | Snapshot | Mapping[str, Any] | str
"""Where a step starts: the previous one, a snapshot, or a snapshot's JSON."""

# One step


class Given:
    """The arguments that every step takes, and the snapshot it starts from."""

    def __init__(
        self,
        now: float | None,
        ledger: Any,
        scope: str | None,
        trusted: bool | None,
        plugins: Iterable[Any] | None = None,
    ) -> None:
        self._plugins = None if plugins is None else tuple(plugins)
        self.now = time.time() * 1000.0 if now is None else float(now)
        self.ledger, self.scope, self.trusted = ledger, scope, trusted
        self.snapshot: Snapshot | None = None

    @property
    def plugins(self) -> tuple[Any, ...]:
        return self._plugins or ()

    def after(self, machine: Machine, step: From | None) -> Given:
        if isinstance(step, AgentStep):
            origin = step._origin
            self._plugins = origin.plugins if self._plugins is None else self._plugins
            self.ledger = origin.ledger if self.ledger is None else self.ledger
            self.scope = origin.scope if self.scope is None else self.scope
            self.trusted = origin.trusted if self.trusted is None else self.trusted
            step = step.snapshot
        if isinstance(step, Snapshot):
            if step.machine is not machine:
                if with_sources(step.machine) is not machine:
                    raise StepError("the snapshot is of another machine; load it for this one")
                # The same machine, without the built-in sources.
                step = load(machine, dump(step), trusted=True)
            self.snapshot = step
        elif step is not None:
            data = step if isinstance(step, str) else dict(step)
            self.snapshot = load(machine, data, trusted=self.trusted is True)
        return self


def step_once(
    machine: Machine,
    step: From | None,
    record: Mapping[str, Any],
    given: Any,
    recorded: Recorded | None = None,
) -> AgentStep:
    """Apply one record: what every step is, live or in a replay."""
    machine = with_sources(machine)
    given = given.after(machine, step)
    tape = Tape() if recorded is None else Tape(recorded)
    record = dict(record)
    kind, event = record["kind"], record["event"]
    snapshot = given.snapshot
    if kind == "event":
        snapshot = _next_turn(machine, snapshot, event) or snapshot
    opener = Stepper if recorded is None else Replayer
    stepper = opener.opened(
        machine,
        snapshot,
        clock=FixedClock(given.now),
        scope=given.scope,
        ledger=given.ledger,
        run=record.get("run"),
        input=event.get("input") if kind == "init" else None,
        tape=tape,
        trusted=given.trusted is True,
        plugins=given.plugins,
    )
    stepper._drive()
    receipt: Receipt | None = None
    if kind in ("event", "timer"):
        actor = _agent(stepper, record.get("agent"))
        if kind == "timer":
            receipt = actor._accept(fired(record["timer"]), ENGINE).receipt
        else:
            receipt = _take(actor, _event_of(record), "agent" in record).receipt
        receipt = receipt or _dropped(stepper)
    elif kind != "init":
        receipt = _bring(stepper, record)
    if isinstance(stepper, Replayer):
        stepper.written()
    origin = Origin(
        machine,
        stepper.folded(),
        given.scope,
        given.ledger,
        given.trusted is True,
        given.plugins,
    )
    requests = requests_of(stepper, origin)
    return AgentStep(origin, requests, receipt, given.now, record, tape, stepper)


def _next_turn(machine: Machine, snapshot: Snapshot | None, event: Any) -> Snapshot | None:
    """The next turn of a finished conversation, where this event begins one."""
    settings = getattr(machine.logic, "attachments", {}).get("agent")
    if settings is None or snapshot is None or snapshot.status != "done":
        return None
    return settings.next_turn(machine, snapshot, event)  # type: ignore[no-any-return]


def _take(actor: Stepper, event: Event, named: bool) -> Any:
    """Hand over an event from outside; a decision finds the machine of the tree it is for."""
    if actor.actors and not named and event.type in DECISIONS:
        return actor._decision(event)
    return actor._accept(event, OUTSIDE)


def _event_of(record: Mapping[str, Any]) -> Event:
    if "payload" in record:
        return Event(record["event"]["type"], record["payload"])
    return as_event(record["event"])


def _agent(stepper: Stepper, path: str | None) -> Stepper:
    for actor in stepper.tree():
        if path is None or actor.id == path:
            return actor
    raise StepError("there is no such agent; its id is the actor path, e.g. 'supervisor:worker'")


def _dropped(stepper: Stepper) -> Receipt:
    return stepper._refused("dropped", f"the machine is {stepper.status}")


def _bring(stepper: Stepper, record: dict[str, Any]) -> Receipt:
    """Hand a result or a failure to the service that waits for it."""
    ident, event = record["request"], record["event"]
    if record["kind"] == "decision":
        event = {"output": {"event": event}}
    service_id = ident.rpartition("#")[0] if "#" in ident else ident
    for waiting in stepper.waiting():
        if waiting.id in (ident, service_id):
            if record["kind"] != "decision":
                kind = "error" if record["kind"] == "failure" else "done"
                named = f"xstate.{kind}.actor.{waiting.invocation.id}"
                record["event"] = {**record["event"], "type": named}
            return _feed(stepper, waiting, record, event)
    _charge(stepper, ident, event, record["kind"])
    return stepper._refused("dropped", "no service waits for this result")


def _feed(
    stepper: Stepper, waiting: Waiting, record: dict[str, Any], event: Mapping[str, Any]
) -> Receipt:
    actor, service = waiting.actor, waiting.invocation.service
    if record["kind"] == "failure":
        failing = getattr(service, "step_failure", None)
        if failing is None:
            return _finish(stepper, waiting, None, load_failure(event["error"]))
        fed = failing(waiting.scope, record["request"], event["error"])
    elif hasattr(service, "step_result"):
        fed = service.step_result(waiting.scope, record["request"], event["output"])
    else:
        return _finish(stepper, waiting, event["output"], None)
    if fed.note is not None:
        stepper.note(waiting, fed.note)
        return Receipt("taken", None, (), True, actor.current_state_ids)
    if fed.event is None:
        return _finish(stepper, waiting, fed.output, fed.error)
    # What the log holds of a decision is the event that was chosen.
    record |= {"kind": "decision", "event": dict(fed.event)}
    return _finish(stepper, waiting, dict(fed.event), None)


def _finish(
    stepper: Stepper, waiting: Waiting, output: Any, error: BaseException | None
) -> Receipt:
    before = stepper.snapshot.rev
    waiting.actor._finish(waiting.invocation, output, error)
    changed = stepper.snapshot.rev != before
    return Receipt("taken", None, (), changed, stepper.current_state_ids)


def _charge(stepper: Stepper, ident: str, event: Mapping[str, Any], kind: str) -> None:
    """A result came too late: what it cost is added all the same."""
    for actor in stepper.tree():
        name, at, _ = ident.removeprefix(actor.prefix).rpartition("@")
        if not ident.startswith(actor.prefix) or not at:
            continue
        for invoke in (each for node in actor.machine.order for each in node.invokes):
            service: Any = actor.logic.services.get(invoke.src)
            if invoke.id != name or not hasattr(service, "late"):
                continue
            if kind == "failure":
                outcome: Any = load_failure(event["error"])
            elif hasattr(service, "step_late"):
                outcome = service.step_late(event["output"])
            else:
                continue
            updates = service.late(actor.snapshot.context, outcome)
            if updates and actor._state == "running":
                actor.update_context(updates)
            return


def requests_of(stepper: Stepper, origin: Origin) -> tuple[AgentRequest, ...]:
    found: list[AgentRequest] = []
    for waiting in stepper.waiting():
        ask = getattr(waiting.invocation.service, "step_requests", None)
        if ask is None:
            continue
        for request in ask(waiting.scope, waiting.id):
            request._origin = origin
            found.append(request)
    return tuple(found)


# The log


def fingerprint(snapshot: Snapshot) -> dict[str, Any]:
    """What tells a snapshot from another: where it stands, and a digest of all it holds."""
    data = dump(snapshot)
    del data["machine"]
    text = json.dumps(_unversioned(data), sort_keys=True, separators=(",", ":"))
    return {
        "rev": snapshot.rev,
        "state_ids": sorted(snapshot.state_ids),
        "digest": hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:24],
    }


def _unversioned(data: dict[str, Any]) -> dict[str, Any]:
    """The data without the machine headers of child snapshots, which name the logic's digest."""
    for child in data.get("children", {}).values():
        inner = child.get("snapshot")
        if isinstance(inner, dict) and "machine" in inner:
            child["snapshot"] = _unversioned({k: v for k, v in inner.items() if k != "machine"})
    return data


def _raw(value: Any) -> Any:
    """The raw result as the log keeps it: JSON where it is, else its class's name."""
    if isinstance(value, ModelResponse):
        return dump_turn(value)
    try:
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            value = dataclasses.asdict(value)
        elif hasattr(value, "_asdict"):
            value = value._asdict()
        return plain(value, "raw")
    except Exception:
        return {"type": type(value).__name__}
