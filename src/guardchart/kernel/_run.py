"""One macrostep in progress: selection, microsteps, and what they ask for.

`Run` is what `step` turns to when a move does more than change states and merge updates. It
works on the snapshot's own tables until one has to change, and leaves all of them as they were.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from itertools import repeat
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeAlias, TypeVar

from guardchart.errors import StepError
from guardchart.kernel._configuration import Candidate, Selection
from guardchart.kernel._delays import checked_delay
from guardchart.kernel._draft import Draft, Scope
from guardchart.kernel._effects import (
    NO_EFFECTS,
    CancelSend,
    CancelTimer,
    Effect,
    Effects,
    Log,
    Spawn,
    StopService,
)
from guardchart.kernel._events import DONE_STATE, DoneEvent, Event
from guardchart.kernel._guards import verdict
from guardchart.kernel._plan import (
    ACTIONS,
    DONE,
    START,
    STOP,
    Chosen,
    Completion,
    Plan,
)
from guardchart.kernel._specs import MISSING, source_name
from guardchart.kernel._state import (
    EMPTY,
    Child,
    DelayedSend,
    Microstep,
    Receipt,
    ReceiptStatus,
    Rest,
    Snapshot,
    Timer,
)

if TYPE_CHECKING:
    from guardchart.kernel._compile import Machine
    from guardchart.kernel._nodes import Action, Invoke, StateNode, Transition

StepResult = tuple[Snapshot, Effects, Receipt]
T = TypeVar("T")
Table: TypeAlias = dict[str, T] | MappingProxyType[str, T]
"""A table of the snapshot as it was, or this step's own copy."""

_new = tuple.__new__


class Fault(Exception):
    """Carries what application code raised through the macrostep."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error


class Run:
    """One macrostep that takes the long road: what changes while it lasts.

    Tables of the snapshot are copied when they are first written to. ``pending`` holds what
    entered states asked for, timers and services; it becomes effects when the machine has come
    to rest, so what is left again within the macrostep is never started.
    """

    __slots__ = (
        "base", "before", "children", "config", "context", "effects", "faults", "history", "host",
        "machine", "microsteps", "now", "output", "pending", "queue", "rev", "sends", "status",
        "steps", "timers",
    )  # fmt: skip

    def __init__(self, machine: Machine, snapshot: Snapshot, now: float, host: Any) -> None:
        rev, _, self.context, self.config, rest = snapshot
        self.machine = machine
        self.before = snapshot
        self.now = now
        self.host = host
        self.rev = rev + 1
        self.status = "active"
        self.history: Table[tuple[str, ...]] = rest.history
        self.timers: Table[Timer] = rest.timers
        self.children: Table[Child] = rest.children
        self.sends: Table[DelayedSend] = rest.sends
        self.output: Any = None
        self.effects: list[Effect] = []
        self.queue: list[tuple[Event, bool]] = []
        self.faults: list[BaseException] = []
        self.pending: dict[tuple[int, str], tuple[Any, Effect]] = {}
        self.microsteps: list[tuple[str, frozenset[str], frozenset[str]]] = []
        self.base: tuple[MappingProxyType[str, Any], Any, Any, Any] | None = None
        self.steps = 0

    # Selection

    def select(self, selections: tuple[Selection, ...], event: Event) -> Chosen:
        """Return the transitions that answer an event, one per region at most."""
        for selection in selections:
            found = self._select(selection, event)
            if found:
                return tuple(found)
        return ()

    def _select(self, selection: Selection, event: Event) -> list[Transition]:
        found: list[Transition] = []
        for region in selection.regions:
            found += self._select(region, event)
        if not found:
            for candidate in selection.own:
                if self._passes(candidate, event):
                    return [candidate]
        return found

    def _select_eventless(self, event: Event) -> Chosen:
        """Per leaf the innermost enabled candidate; a guard shared by leaves is asked once."""
        found: dict[Transition, None] = {}
        refused: set[Transition] = set()
        for chain in self.config.eventless:
            for candidate in chain:
                if candidate in refused:
                    continue
                if candidate in found or self._passes(candidate, event):
                    found[candidate] = None
                    break
                refused.add(candidate)
        return tuple(found)

    def _passes(self, candidate: Transition, event: Event) -> bool:
        guard = candidate.guard
        if guard is None:
            return True
        try:
            if guard.fn is not None:
                answer = guard.fn(self.context, event)
                return answer is True or (answer is not False and verdict(answer))
            return guard.test(self.context, event, self.config)
        except Exception as error:
            self._fault(error, candidate.spec.path + ".guard")
            return False

    # Microsteps

    def pick(self, candidates: tuple[Candidate, ...], event: Event) -> Candidate | None:
        """Return the first candidate of a row without regions whose guard passes."""
        for candidate in candidates:
            if candidate.test is None or self._passes(candidate.transitions[0], event):
                return candidate
        return None

    def take(
        self, transitions: Chosen, event: Event, handled: bool
    ) -> tuple[ReceiptStatus, str | None]:
        """Run the microstep of an event; return what to say of it."""
        if not transitions:
            receipt = self.config.denied if handled else self.config.ignored
            return receipt.status, receipt.reason
        if all(t.idle for t in transitions):
            return FORBIDDEN
        self.execute(self.config.plan(transitions, self.history), event)
        return TAKEN

    def settle(self, event: Event) -> None:
        """Eventless transitions until none is enabled, then one internal event, and again."""
        look = True
        while self.status == "active":
            if look and self.config.eventless:
                transitions = self._select_eventless(event)
                if transitions:
                    self._count()
                    config, context = self.config, self.context
                    plan = config.plan(transitions, self.history)
                    self.execute(plan, event, "")
                    look = self.config != config or self._differs(context)
                    continue
            if not self.queue:
                return
            self._count()
            following, engine = self.queue.pop(0)
            look = True
            row = (self.config.engine_row if engine else self.config.row)(following.type)
            transitions = () if row is None else self.select(row.selections, following)
            if transitions:
                event = following
                if not all(t.idle for t in transitions):
                    self.execute(self.config.plan(transitions, self.history), event)

    def _differs(self, context: Mapping[str, Any]) -> bool:
        """Whether the context has other values than this earlier one."""
        mine = self.context
        if mine is context:
            return False
        if len(mine) != len(context):
            return True
        for key, value in mine.items():
            old = context.get(key, MISSING)
            if value is old:
                continue
            if type(value) is type(old) and type(value) in _PLAIN and value == old:
                continue
            return True
        return False

    def _count(self) -> None:
        self.steps += 1
        if self.steps > self.machine.max_microsteps:
            raise StepError(
                f"more than {self.machine.max_microsteps} microsteps without coming to rest: "
                "eventless transitions or raised events form a cycle"
            )

    def execute(self, plan: Plan, event: Event, event_type: str | None = None) -> None:
        """Perform a plan: exits, transition actions, entries, in its order.

        ``event_type`` is what the receipt says of the microstep, "" for an eventless one.
        """
        if plan.records:
            self.history = self.history | dict(plan.records)
        for op, node, argument in plan.ops:
            if op == ACTIONS:
                self._actions(node, argument, event)
            elif op == STOP:
                self._stop(node)
            elif op == START:
                self._start(node, event)
            elif op == DONE:
                self._complete(argument, event)
        if plan.ends:
            self.status = "done"
            self.queue.clear()
        kind = event.type if event_type is None else event_type
        self.microsteps.append((kind, self.config.ids, plan.next.ids))
        self.config = plan.next

    def _actions(self, node: StateNode, actions: tuple[Action, ...], event: Event) -> None:
        for action in actions:
            mark = (len(self.effects), len(self.queue), self.children, self.sends)
            try:
                if action.form == 2:
                    updates = action.fn(self.context, event)
                elif action.form == 3:
                    updates = action.fn(self.context, event, action.params)
                else:
                    self._draft(node, action, event)
                    continue
                if updates is not None:
                    self.context = merge(self.context, updates)
            except Exception as error:
                # Under `continue` only this action and the rest of its list are lost.
                effects, queued, self.children, self.sends = mark
                del self.effects[effects:], self.queue[queued:]
                self._fault(error, f"action {action.name}")
                return

    def _draft(self, node: StateNode, action: Action, event: Event) -> None:
        draft = Draft(self.context)
        answer = action.fn(Scope(self, self.host, node, draft), draft, event, action.info)
        if answer is not None and inspect.isawaitable(answer):
            _refuse_awaitable(answer)
        written = draft.finish()
        if written is not None:
            self.context = MappingProxyType(written)

    def _fault(self, error: Exception, where: str) -> None:
        """Note a fault; unwind the macrostep unless the policy is to go on."""
        if self.machine.policy != "continue":
            raise Fault(error) from error
        self.faults.append(error)
        self.effects.append(Log(f"{type(error).__name__} in {where}"))

    # States left and entered

    def _stop(self, node: StateNode) -> None:
        for invoke in node.invokes:
            if self.pending.pop((1, invoke.id), None) is not None:
                continue
            child = self.children.get(invoke.id)
            if child is not None and child.state_id == node.id:
                self._drop_child(invoke.id)
                if child.status == "active":
                    self.effects.append(invoke.stop)
        for timer in node.timers:
            if self.pending.pop((0, timer.id), None) is None and timer.id in self.timers:
                self._drop_timer(timer.id)
                self.effects.append(timer.cancel)

    def _start(self, node: StateNode, event: Event) -> None:
        for timer in node.timers:
            delay = timer.delay
            if callable(delay):
                try:
                    delay = checked_delay(delay(self.context, event))
                except Exception as error:
                    self._fault(error, f"delay {timer.name}")
                    continue
            self.pending[0, timer.id] = Timer(self.now + delay), timer.schedule
        for invoke in node.invokes:
            self._record(node, invoke, event)

    def _record(self, node: StateNode, invoke: Invoke, event: Event) -> None:
        given = invoke.input
        if callable(given):
            try:
                given = given(self.context, event)
            except Exception as error:
                self._fault(error, f"input of {invoke.id}")
                return
        key = f"{invoke.id}@{self.rev}"
        fields = (invoke.src, key, "active", given, None, False, node.id)
        self.pending[1, invoke.id] = _new(Child, fields), invoke.start

    def _complete(self, completion: Completion, event: Event) -> None:
        final = completion.final
        output = None
        if final.output is not MISSING and (completion.compound or completion.top is final):
            output = self._output(final, event)
        if completion.compound is not None:
            self._raise_done(completion.compound, output)
        for parallel in completion.parallels:
            self._raise_done(parallel, None)
        top = completion.top
        if top is None:
            return
        root = self.machine.root
        if root.output is MISSING:
            self.output = output if top is final else None
        else:
            made = DoneEvent(DONE_STATE + top.id, output if top is final else None, top.id)
            self.output = self._output(root, made)

    def _output(self, node: StateNode, event: Event) -> Any:
        if not callable(node.output):
            return node.output
        try:
            return node.output(self.context, event)
        except Exception as error:
            self._fault(error, f"output of {node.id}")
            return None

    def _raise_done(self, node: StateNode, output: Any) -> None:
        self.queue.append((DoneEvent(DONE_STATE + node.id, output, node.id), True))

    # Children, timers, delayed sends

    def settle_timer(self, timer_id: str) -> None:
        """Take a fired timer off the table; the step's base from here on."""
        self._drop_timer(timer_id)
        self.base = (self.context, self.timers, self.children, self.sends)

    def settle_child(self, child_id: str, kind: str, outcome: Any) -> None:
        """Record a child's end and let its service's ``settle`` change the context.

        This stands whatever becomes of the step: usage is charged also when an action raises.
        """
        child = self.children[child_id]
        if child.spawned:
            self._drop_child(child_id)
        else:
            src, key, _, given, _, spawned, state_id = child
            status = "done" if kind == "done" else "error"
            ended = _new(Child, (src, key, status, given, None, spawned, state_id))
            self.children = self.children | {child_id: ended}
        self.base = (self.context, self.timers, self.children, self.sends)
        settle = _settle_of(self.machine, child_id, child)
        if settle is not None:
            try:
                updates = settle(self.context, outcome)
                if updates is not None:
                    self.context = merge(self.context, updates)
            except Exception as error:
                self._fault(error, f"settle of {child_id}")
            self.base = (self.context, self.timers, self.children, self.sends)

    def spawn(self, src: Any, child_id: str | None, given: Any) -> str:
        """Record a spawned child and ask the host to start it; see `Scope.spawn`."""
        if isinstance(src, str):
            services = getattr(self.machine.logic, "services", None) or {}
            if src not in services:
                raise StepError("spawn: the logic has no service of this name")
        name = source_name(src)
        if child_id is None:
            n = 1
            while f"{name}-{n}" in self.children:
                n += 1
            child_id = f"{name}-{n}"
        elif (1, child_id) in self.pending or self._lives(child_id):
            raise StepError("spawn: a child with this id exists")
        key = f"{child_id}@{self.rev}"
        self._set_child(child_id, Child(name, key, "active", given, None, True, ""))
        self.effects.append(Spawn(child_id, src, given))
        return child_id

    def _lives(self, child_id: str) -> bool:
        """Whether a child has this id; one of which the host knows that it is over gives way."""
        child = self.children.get(child_id)
        if child is None:
            return False
        over = getattr(self.host, "is_over", None) if child.spawned else None
        return over is None or not over(child_id)

    def stop_spawned(self, child_id: str) -> None:
        """Stop a spawned child, if there is one with this id."""
        child = self.children.get(child_id)
        if child is not None and child.spawned:
            self._drop_child(child_id)
            self.effects.append(StopService(child_id))

    def _set_child(self, child_id: str, child: Child) -> None:
        self.children = self.children | {child_id: child}

    def _drop_child(self, child_id: str) -> None:
        self.children = _without(self.children, child_id)

    def _drop_timer(self, timer_id: str) -> None:
        self.timers = _without(self.timers, timer_id)

    def timer_ids(self) -> Mapping[str, Any]:
        """The ids that timers of this machine can have."""
        return self.machine.timers

    def set_send(self, send_id: str, send: DelayedSend) -> None:
        """Record a delayed send."""
        self.sends = self.sends | {send_id: send}

    def drop_send(self, send_id: str) -> bool:
        """Forget a delayed send; tell whether there was one."""
        if send_id not in self.sends:
            return False
        self.sends = _without(self.sends, send_id)
        return True

    # The end

    def finish(
        self, status: ReceiptStatus, reason: str | None, known: Receipt | None = None
    ) -> StepResult:
        """Turn what is pending into effects and return the result of the step.

        ``known`` is a receipt prepared for this plan; it holds while nothing came after it.
        """
        if self.status != "active":
            self._end()
        elif self.pending:
            self._begin()
        elif self._idle():
            faults = tuple(self.faults)
            return self.before, NO_EFFECTS, Receipt(status, reason, faults, False, self.config.ids)
        if known is None or len(self.microsteps) != 1 or self.faults:
            steps = tuple(map(_new, repeat(Microstep), self.microsteps))
            fields = (status, reason, tuple(self.faults), True, self.config.ids, steps)
            known = _new(Receipt, fields)
        return self.snapshot(), tuple(self.effects), known

    def _idle(self) -> bool:
        """Whether nothing at all came of the event, so that the old snapshot stands."""
        if self.base is not None or self.effects:
            return False
        if self.microsteps and self.microsteps[0][0]:
            return False
        _, _, context, config, rest = self.before
        return (
            self.config == config
            and self.history == rest.history
            and self.timers is rest.timers
            and self.children is rest.children
            and self.sends is rest.sends
            and not self._differs(context)
        )

    def _begin(self) -> None:
        """Start what the entered states asked for, in order of entry."""
        timers = self.timers.copy()
        children = self.children.copy()
        for (kind, key), (value, effect) in self.pending.items():
            if kind == 0:
                timers[key] = value
            else:
                children[key] = value
            self.effects.append(effect)
        self.timers, self.children = timers, children

    def _end(self) -> None:
        """Stop all that still runs."""
        self.effects.extend(stops(self.children, self.timers, self.sends))
        self.children = self.timers = self.sends = EMPTY

    def snapshot(self) -> Snapshot:
        """The snapshot as things stand."""
        rest = self.before[4]
        if not (
            self.timers is rest.timers
            and self.children is rest.children
            and self.history is rest.history
            and self.sends is rest.sends
            and self.output is None
        ):
            _, _, _, _, _, _, run, batch_no = rest
            tables = (
                _frozen(self.history),
                _frozen(self.timers),
                _frozen(self.children),
                _frozen(self.sends),
            )
            rest = _new(Rest, (*tables, self.output, None, run, batch_no))
        return _new(Snapshot, (self.rev, self.status, self.context, self.config, rest))

    def fallen_back(self) -> tuple[Snapshot, bool]:
        """The snapshot a fault leaves: the one before, or that with its timer or child settled.

        The second value says whether it is another one than before.
        """
        if self.base is None:
            return self.before, False
        context, timers, children, sends = self.base
        before = self.before
        rest = before[4]._replace(
            timers=_frozen(timers), children=_frozen(children), sends=_frozen(sends)
        )
        return Snapshot(self.rev, "active", context, before[3], rest), True


_PLAIN: Final = frozenset({str, int, float, bool, type(None)})
TAKEN: Final[tuple[ReceiptStatus, str | None]] = ("taken", None)
FORBIDDEN: Final[tuple[ReceiptStatus, str | None]] = ("forbidden", "a handler swallows this event")


def _without(table: Table[T], key: str) -> dict[str, T]:
    left = table.copy()
    del left[key]
    return left


def _frozen(table: Table[T]) -> MappingProxyType[str, T]:
    if not table:
        return EMPTY
    return table if isinstance(table, MappingProxyType) else MappingProxyType(table)


def merge(context: MappingProxyType[str, Any], updates: Any) -> MappingProxyType[str, Any]:
    """Return the context with what an update-form action returned; refuse anything else."""
    if type(updates) is not dict:
        if not isinstance(updates, Mapping):
            if inspect.isawaitable(updates):
                _refuse_awaitable(updates)
            raise StepError("an action must return the keys to update, or None")
        updates = dict(updates)
    for key in updates:
        if type(key) is not str:
            raise StepError("an action must return text keys")
    # A view's own `|` works on the dict below it; `{**context}` would ask the view key by key.
    return MappingProxyType(context | updates)


def _refuse_awaitable(answer: Any) -> NoReturn:
    close = getattr(answer, "close", None)
    if close is not None:
        close()
    raise StepError("an action answered with an awaitable: run async work by 'invoke'")


def _settle_of(machine: Machine, child_id: str, child: Child) -> Any:
    if child.spawned:
        services = getattr(machine.logic, "services", None) or {}
        return getattr(services.get(child.src), "settle", None)
    node = machine.nodes.get(child.state_id)
    invokes: tuple[Invoke, ...] = node.invokes if node is not None else ()
    return next((one.settle for one in invokes if one.id == child_id), None)


def stops(
    children: Mapping[str, Child],
    timers: Mapping[str, Timer],
    sends: Mapping[str, DelayedSend],
) -> list[Effect]:
    """The effects that stop all that runs: children, timers, delayed sends."""
    found: list[Effect] = [StopService(k) for k, c in children.items() if c.status == "active"]
    found.extend(CancelTimer(key) for key in timers)
    found.extend(CancelSend(key) for key in sends)
    return found
