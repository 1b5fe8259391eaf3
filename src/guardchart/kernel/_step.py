"""One step: select transitions, run microsteps to rest, return a snapshot and effects.

Three roads lead through `step`, from the shortest: a *bare* move, known to the row of the
event, builds the next snapshot at once; a *simple* one evaluates guards in order and merges
what its update-form actions return; all else goes through `Run`, which holds the state of
one macrostep. All three follow the same plans, so the semantics exist once.

The functions here are pure: they read no clock and start nothing. What they are given stays
as it was, whether they return or raise.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, cast

from guardchart.errors import GuardchartError, StepError
from guardchart.kernel._configuration import Candidate, Configuration, Row
from guardchart.kernel._effects import NO_EFFECTS, Effect, Effects, Send
from guardchart.kernel._events import (
    AFTER,
    DONE_ACTOR,
    ERROR_ACTOR,
    SNAPSHOT_ACTOR,
    DoneEvent,
    EngineEvent,
    Event,
    InitEvent,
    as_event,
    is_reserved,
)
from guardchart.kernel._guards import verdict
from guardchart.kernel._plan import Chosen, Plan
from guardchart.kernel._run import FORBIDDEN, TAKEN, Fault, Run, StepResult, merge, stops
from guardchart.kernel._state import (
    EMPTY,
    Child,
    Receipt,
    ReceiptStatus,
    Rest,
    Snapshot,
    Timer,
)

if TYPE_CHECKING:
    from guardchart.kernel._compile import Machine

__all__ = [
    "StepResult",
    "initial_step",
    "initial_transition",
    "resolve",
    "step",
    "transition",
]

MAX_ERROR_CHARS: Final = 500
_OF_CHILD: Final = {"done": DONE_ACTOR, "failed": ERROR_ACTOR, "observed": SNAPSHOT_ACTOR}
_new = tuple.__new__


def step(
    machine: Machine,
    snapshot: Snapshot,
    event: Event | EngineEvent | Mapping[str, Any] | str,
    *,
    now: float = 0,
    host: Any = None,
) -> StepResult:
    """Take one macrostep.

    Args:
        machine: the machine of the snapshot.
        snapshot: where it stands; unchanged afterwards.
        event: from outside as an `Event`, a mapping with ``type`` or a type; from the engine
            as what `done`, `failed`, `fired` or `observed` made.
        now: epoch milliseconds; only added to delays to give ``due_at``.
        host: gives draft-form actions ``scope.id``, ``.parent`` and ``.engine``.

    Returns:
        ``(snapshot, effects, receipt)``. The same snapshot object and no effects where nothing
        came of the event. A raising action or guard is no exception here but a receipt with
        ``faults`` and a snapshot as the chart's ``actionErrorPolicy`` has it.

    Raises:
        StepError: more than ``maxMicrosteps`` microsteps, another machine's snapshot, or no
            event; the snapshot is unchanged.
        ChartError: the machine is unbound.

    Source: SCXML appendix D; XState 5 ``macrostep``.
    """
    rev, status, context, config, rest = snapshot
    if config.machine is not machine:
        raise StepError(
            f"the snapshot is of machine {config.machine.id!r}, not of this {machine.id!r}"
        )
    if type(event) is not Event:
        if type(event) is EngineEvent:
            return _engine_step(machine, snapshot, event, now, host)
        event = as_event(cast("Event | Mapping[str, Any] | str", event))
    if status != "active":
        return _refused(snapshot, "dropped", f"the machine is {status}")
    row = config.rows.get(event.type)
    if row is None:
        return _external_step(machine, snapshot, event, now, host)
    fast = row.fast
    if fast is not None:
        moved = _new(Snapshot, (rev + 1, "active", context, fast[0], rest))
        return moved, NO_EFFECTS, fast[1]
    if row.flat is None:
        return _external_step(machine, snapshot, event, now, host, row)
    for candidate in row.flat:
        fn = candidate.fn
        try:
            if fn is not None:
                answer = fn(context, event)
                if answer is not True and (answer is False or not verdict(answer)):
                    continue
            elif candidate.test is not None and not candidate.test(context, event, config):
                continue
        except Exception as error:
            return _faulted(Run(machine, snapshot, now, host), error)
        plan = candidate.plan
        if plan is None or not plan.simple:
            if plan is None or not plan.linear:
                return _external_step(machine, snapshot, event, now, host, row, candidate)
            try:
                return _linear_step(snapshot, plan, candidate.receipt, event, now)  # type: ignore[arg-type]
            except Fault as fault:
                return _faulted(Run(machine, snapshot, now, host), fault.error)
        try:
            for action in plan.updates:
                if action.form == 2:
                    updates = action.fn(context, event)
                else:
                    updates = action.fn(context, event, action.params)
                if updates is not None:
                    context = merge(context, updates)
        except Exception as error:
            return _faulted(Run(machine, snapshot, now, host), error)
        moved = _new(Snapshot, (rev + 1, "active", context, plan.next, rest))
        return moved, NO_EFFECTS, candidate.receipt  # type: ignore[return-value]
    if config.eventless:
        return _external_step(machine, snapshot, event, now, host, row, _NONE)
    return snapshot, NO_EFFECTS, config.denied


def transition(
    machine: Machine,
    snapshot: Snapshot,
    event: Event | EngineEvent | Mapping[str, Any] | str,
    *,
    now: float = 0,
) -> tuple[Snapshot, Effects]:
    """Take one macrostep and return ``(snapshot, effects)``; `step` without the receipt.

    Args:
        machine: the machine of the snapshot.
        snapshot: where it stands; unchanged afterwards.
        event: as for `step`.
        now: epoch milliseconds; only added to delays to give ``due_at``.

    Returns:
        The next snapshot and what a host has to do, in order; the same snapshot object and no
        effects where nothing came of the event.

    Raises:
        StepError: as `step`; the snapshot is unchanged.
        ChartError: the machine is unbound.

    Source: XState 5, ``transition``.

    >>> from guardchart.kernel import create_machine, initial_transition
    >>> lamp = create_machine({"initial": "off", "states": {
    ...     "off": {"on": {"TOGGLE": "on"}}, "on": {"on": {"TOGGLE": "off"}}}})
    >>> snapshot, _ = initial_transition(lamp)
    >>> transition(lamp, snapshot, "TOGGLE")[0].value
    'on'
    """
    following, effects, _ = step(machine, snapshot, event, now=now)
    return following, effects


def initial_transition(
    machine: Machine, input: Any = None, *, now: float = 0
) -> tuple[Snapshot, Effects]:
    """Start a machine and return ``(snapshot, effects)``; `initial_step` without the receipt.

    Args:
        machine: a bound machine.
        input: as for `initial_step`.
        now: epoch milliseconds; only added to delays to give ``due_at``.

    Returns:
        The first snapshot, its ``rev`` being 1, and what a host has to do, in order.

    Raises:
        ChartError: the machine is unbound, with every missing name.
        StepError: more than ``maxMicrosteps`` microsteps.

    Source: XState 5, ``initialTransition``.

    >>> from guardchart.kernel import create_machine
    >>> lamp = create_machine({"initial": "off", "states": {"off": {"after": {"500": "on"}},
    ...     "on": {}}})
    >>> snapshot, effects = initial_transition(lamp, now=1_000)
    >>> snapshot.value, [timer.due_at for timer in snapshot.timers.values()], len(effects)
    ('off', [1500], 1)
    """
    snapshot, effects, _ = initial_step(machine, input, now=now)
    return snapshot, effects


def initial_step(
    machine: Machine, input: Any = None, *, now: float = 0, host: Any = None
) -> StepResult:
    """Enter the machine's initial states and come to rest.

    Args:
        machine: a bound machine.
        input: ``.input`` of the event that entry actions see, and ``context["input"]`` where
            it is not None and the chart declares no such key.
        now: epoch milliseconds.
        host: as for `step`.

    Returns:
        ``(snapshot, effects, receipt)``, the snapshot's ``rev`` being 1. A raising action
        puts it in ``error`` unless the policy is ``continue``.

    Raises:
        ChartError: the machine is unbound, with every missing name.
        StepError: more than ``maxMicrosteps`` microsteps.
    """
    machine.require_bound()
    context = machine.fresh_context()
    if input is not None and "input" not in context:
        context["input"] = input
    plan = machine.cache.initial()
    event = InitEvent(input)
    before = Snapshot(0, "active", MappingProxyType(context), machine.cache.blank)
    run = Run(machine, before, now, host)
    try:
        run.execute(plan, event)
        run.settle(event)
    except Fault as fault:
        entered = before.replace(config=plan.next, rev=1)
        return _in_error(entered, (*run.faults, fault.error), fault.error, "denied", RAISED)
    return run.finish(*TAKEN)


_NONE: Final = object()


def _linear_step(
    snapshot: Snapshot,
    plan: Plan,
    receipt: Receipt,
    event: Any,
    now: float,
    ended: tuple[bool, str] | None = None,
) -> StepResult:
    """Perform a linear plan on the snapshot's tables.

    ``ended`` is the service (True) or timer (False) whose end is the event: it is not stopped.

    Raises:
        Fault: an action raised.
    """
    rev, _, context, _, rest = snapshot
    rev += 1
    for action in plan.updates:
        try:
            if action.form == 2:
                updates = action.fn(context, event)
            else:
                updates = action.fn(context, event, action.params)
            if updates is not None:
                context = merge(context, updates)
        except Exception as error:
            raise Fault(error) from error
    history, timers, children, sends, output, failure, run, batch_no = rest
    effects = plan.start_effects
    # Copied when they are first written to; `copy` of a read-only view gives a dict.
    clocks: dict[str, Any] | None = None
    running: dict[str, Any] | None = None
    if plan.stops:
        stopped: list[Effect] = []
        for is_service, key, state_id, effect in plan.stops:
            if is_service:
                child = children.get(key)
                if child is None or child[6] != state_id:
                    continue
                if running is None:
                    running = children.copy()
                del running[key]
                if child[2] == "active" and ended != (True, key):
                    stopped.append(effect)
            elif key in timers:
                if clocks is None:
                    clocks = timers.copy()
                del clocks[key]
                if ended != (False, key):
                    stopped.append(effect)
        if stopped:
            effects = (*stopped, *effects)
    for is_service, key, value, src, state_id, _ in plan.starts:
        if is_service:
            if running is None:
                running = children.copy()
            fields = (src, f"{key}@{rev}", "active", value, None, False, state_id)
            running[key] = _new(Child, fields)
        else:
            if clocks is None:
                clocks = timers.copy()
            clocks[key] = _new(Timer, (now + value,))
    if clocks is not None:
        timers = MappingProxyType(clocks) if clocks else EMPTY
    if running is not None:
        children = MappingProxyType(running) if running else EMPTY
    rest = _new(Rest, (history, timers, children, sends, output, failure, run, batch_no))
    return _new(Snapshot, (rev, "active", context, plan.next, rest)), effects, receipt


def _external_step(
    machine: Machine,
    snapshot: Snapshot,
    event: Event,
    now: float,
    host: Any,
    row: Row | None = None,
    chosen: Any = None,
) -> StepResult:
    """Handle an event from outside; ``chosen`` is a candidate `step` has already picked."""
    config: Configuration = snapshot[3]
    if row is None:
        machine.require_bound()
        if is_reserved(event.type):
            return _refused(snapshot, "denied", "the event type is the engine's")
        row = config.row(event.type)
        if row is None and machine.strict and not machine.knows(event.type):
            return _refused(snapshot, "denied", "strict: no state handles this event type")
        if row is not None and (row.fast is not None or row.flat is not None):
            return step(machine, snapshot, event, now=now, host=host)
    run = Run(machine, snapshot, now, host)
    known = None
    try:
        if chosen is None:
            transitions = run.select(row.selections, event) if row is not None else ()
            status = run.take(transitions, event, row is not None and bool(row.selections))
        elif chosen is _NONE:
            status = run.take((), event, True)
        else:
            status, known = _take_candidate(run, row, chosen, event)
        if run.queue or run.config.eventless:
            run.settle(event)
    except Fault as fault:
        return _faulted(run, fault.error)
    return run.finish(*status, known)


def _take_candidate(
    run: Run, row: Row | None, candidate: Candidate, event: Event
) -> tuple[tuple[ReceiptStatus, str | None], Receipt | None]:
    """Run the plan of a candidate, and keep it with the candidate for the next time."""
    plan = candidate.plan
    if plan is None:
        if candidate.idle:
            return FORBIDDEN, None
        plan = run.config.plan(candidate.transitions, run.history)
        if row is not None and not plan.consulted:
            candidate.receipt = run.config.taken(row.event_type, plan)
            candidate.plan = plan
    run.execute(plan, event)
    return TAKEN, candidate.receipt


def resolve(snapshot: Snapshot, event: EngineEvent) -> Event | None:
    """Return the `Event` an engine event stands for here, None where it would be dropped.

    The object is made once and kept on the engine event, so that a host's observers and the
    chart's actions see the same one.
    """
    kind, key = event.kind, event.key
    _, status, _, config, rest = snapshot
    if status != "active":
        return None
    if kind == "fired":
        if key in rest.sends:
            event.event = rest.sends[key].event
        elif key in rest.timers:
            if event.event is None:
                event.event = Event(config.machine.timers[key][1].event_type, event.value)
        else:
            return None
        return event.event
    child_id = key.rpartition("@")[0]
    child = rest.children.get(child_id)
    if child is None or child.key != key or child.status != "active":
        return None
    if event.event is None:
        prefix = _OF_CHILD[kind]
        node = None if child.spawned else config.machine.nodes.get(child.state_id)
        event.event = DoneEvent(
            prefix + child_id, event.value, child.src, invoke_id=child_id, node=node
        )
    return event.event


def _engine_step(
    machine: Machine, snapshot: Snapshot, engine_event: EngineEvent, now: float, host: Any
) -> StepResult:
    """Settle the timer or child, then select as for any event."""
    config: Configuration = snapshot[3]
    quick = _quick(machine, snapshot, engine_event)
    if quick is not None:
        plan, receipt, ended = quick
        try:
            event = resolve(snapshot, engine_event) if plan.updates else None
            return _linear_step(snapshot, plan, receipt, event, now, ended)
        except Fault as fault:
            run = Run(machine, snapshot, now, host)
            if engine_event.kind == "fired":
                run.settle_timer(ended[1])
            else:
                run.settle_child(ended[1], engine_event.kind, engine_event.value)
            return _faulted(run, fault.error)
    event = resolve(snapshot, engine_event)
    if event is None:
        what = "timer" if engine_event.kind == "fired" else "child"
        return _refused(snapshot, "dropped", f"no such {what} is pending")
    machine.require_bound()
    kind, key = engine_event.kind, engine_event.key
    run = Run(machine, snapshot, now, host)
    if kind == "fired":
        if key in run.sends:
            return _delayed_send(run, snapshot, key)
        run.settle_timer(key)
    known = None
    try:
        if kind != "fired" and kind != "observed":
            run.settle_child(key.rpartition("@")[0], kind, engine_event.value)
        row = config.engine_row(event.type)
        candidate = None
        if row.flat is not None:
            candidate = run.pick(row.flat, event)
            transitions: Chosen = () if candidate is None else candidate.transitions
        else:
            transitions = run.select(row.selections, event)
        if kind == "failed" and not transitions:
            error = engine_event.value
            left, _ = run.fallen_back()
            reason = "no state handles the failure of this child"
            return _in_error(left, (*run.faults, error), error, "ignored", reason)
        if candidate is not None:
            status, known = _take_candidate(run, row, candidate, event)
        else:
            status = run.take(transitions, event, bool(row.selections))
        if run.queue or run.config.eventless:
            run.settle(event)
    except Fault as fault:
        return _faulted(run, fault.error)
    return run.finish(*status, known)


def _quick(
    machine: Machine, snapshot: Snapshot, engine_event: EngineEvent
) -> tuple[Plan, Receipt, tuple[bool, str]] | None:
    """Return the linear plan that answers a completion no guard decides, and its receipt.

    Only where the plan leaves the state that owned the timer or child, so that nothing of it
    is to be recorded, and where no ``settle`` has a say.
    """
    status, rest = snapshot[1], snapshot[4]
    config: Configuration = snapshot[3]
    kind, key = engine_event.kind, engine_event.key
    if status != "active":
        return None
    if kind == "fired":
        settled = key
        if key not in rest.timers:
            return None
        row = config.engine_rows.get(AFTER + key)
    else:
        settled = key.rpartition("@")[0]
        if settled in machine.settling:
            return None
        child = rest.children.get(settled)
        if child is None or child[1] != key or child[2] != "active" or child[5]:  # spawned
            return None
        row = config.engine_rows.get(_OF_CHILD[kind] + settled)
    if row is None:
        return None
    if row.ending is None and row.flat and row.flat[0].test is None:
        plan, receipt = row.flat[0].plan, row.flat[0].receipt
        ended = (kind != "fired", settled)
        if (
            plan is not None
            and receipt is not None
            and plan.linear
            and ended in plan.stopped
            and kind != "observed"
        ):
            row.ending = plan, receipt, ended
    return row.ending


def _delayed_send(run: Run, snapshot: Snapshot, key: str) -> StepResult:
    """Deliver a delayed send that is due: as this step's event, or to somebody else."""
    send = run.sends[key]
    run.drop_send(key)
    if send.target is not None:
        run.effects.append(Send(send.target, send.event))
        return run.finish(*TAKEN)
    without = run.snapshot().replace(rev=snapshot.rev)
    following, effects, receipt = step(run.machine, without, send.event, now=run.now, host=run.host)
    if following.rev == snapshot.rev:
        following = following.replace(rev=snapshot.rev + 1)
    return following, effects, receipt._replace(changed=True)


RAISED: Final = "an action or guard raised"


def _refused(snapshot: Snapshot, status: ReceiptStatus, reason: str) -> StepResult:
    receipt = Receipt(status, reason, (), False, snapshot.state_ids)
    return snapshot, NO_EFFECTS, receipt


def _error_info(error: BaseException) -> Mapping[str, Any]:
    """What a snapshot says of an exception: the message only where it is one of ours."""
    message = str(error)[:MAX_ERROR_CHARS] if isinstance(error, GuardchartError) else ""
    return MappingProxyType({"type": type(error).__name__, "message": message})


def _faulted(run: Run, error: BaseException) -> StepResult:
    """Apply the policy to what an action or guard raised; nothing of the step remains."""
    snapshot, settled = run.fallen_back()
    faults = (*run.faults, error)
    if run.machine.policy == "fail":
        snapshot = snapshot.replace(rev=run.rev)
        return _in_error(snapshot, faults, error, "denied", RAISED)
    receipt = Receipt("denied", RAISED, faults, settled, snapshot.state_ids)
    return snapshot, NO_EFFECTS, receipt


def _in_error(
    snapshot: Snapshot,
    faults: tuple[BaseException, ...],
    error: BaseException,
    status: ReceiptStatus,
    reason: str,
) -> StepResult:
    """Put the machine in error: everything that runs stops, nothing else happens."""
    following = snapshot.replace(
        status="error",
        children=EMPTY,
        timers=EMPTY,
        sends=EMPTY,
        error=_error_info(error),
    )
    effects = tuple(stops(snapshot.children, snapshot.timers, snapshot.sends))
    return following, effects, Receipt(status, reason, faults, True, snapshot.state_ids)
