"""The task ``step``: the only place where a compiled chart moves, and where calls are proposed."""

from __future__ import annotations

import asyncio
import operator
import threading
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

from langgraph.config import get_config
from langgraph.types import Command, Send

from guardchart.agents import (
    WAITING_STATES,
    AgentStep,
    decisions_event,
    initial_agent_step,
    pending_approval,
    resolve_agent_step,
    transition_agent_step,
)
from guardchart.agents._stepper import Stepper
from guardchart.errors import AgentConfigError, AgentError, StepError
from guardchart.gate._approvals import HUMAN_EVENTS
from guardchart.kernel import Machine, Receipt, Snapshot, can, dump
from guardchart.langgraph._reducers import mark_open
from guardchart.langgraph._state import read_key
from guardchart.langgraph._task import (
    APPROVAL,
    END,
    ITEM,
    MODEL,
    SCOPE,
    SERVICE,
    TIMER,
    TOOLS,
    BaseTask,
    GraphSettings,
)
from guardchart.langgraph._update import close
from guardchart.langgraph._visit import Visit
from guardchart.runtime._rest import serving_due

__all__ = ["Step"]


class Step(BaseTask):
    """Moves the machine: results, deadlines that have passed, then the event."""

    def __init__(self, settings: GraphSettings) -> None:
        super().__init__(settings)
        self._begun = _Begun()

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
            return await asyncio.to_thread(move.update)
        return move.update()

    def _opened(self, state: Any, config: Any) -> Visit:
        visit = self.visit(self.settings.view(state), config)
        if self.settings.remembers and visit.runtime is not None and self._begun.again():
            raise AgentConfigError(_BEGUN_AGAIN)
        return visit


_BEGUN_AGAIN: Final = (
    "statechart_graph(as_subgraph=True) was begun a second time in one task of its parent, by a "
    "retry of the node around it or by a second call. LangGraph gives it an empty memory there, so "
    "that what has run already would run anew. Nothing was done this time: invoke the outer graph "
    "with None to go on. Pass retry_policy= to statechart_graph and none to the node around it"
)


class _Begun:
    """Under which namespaces a subgraph has been begun, to tell when it is begun again.

    LangGraph numbers the subgraphs that a task begins: ``agent|step:<id>``, then
    ``agent|1|step:<id>``. The number alone says nothing, since another subgraph may have come
    first. A retry happens in one process, so its memory is enough.
    """

    MOST: Final = 1024

    def __init__(self) -> None:
        self._known: dict[tuple[Any, str, str], str] = {}
        self._lock = threading.Lock()

    def again(self) -> bool:
        """Whether the running task's parent has begun this subgraph before, elsewhere."""
        configurable = get_config().get("configurable") or {}
        namespace, _, _ = str(configurable.get("checkpoint_ns")).rpartition("|")
        graphs = configurable.get("checkpoint_map") or {}
        base, _, number = namespace.rpartition("|")
        # A node may have a number for its name: before it stands a graph, before a count a node.
        if not number.isdecimal() or base in graphs:
            base = namespace
        around = graphs.get(base.rpartition("|")[0])
        if around is None:  # nothing is kept, so that there is nothing to lose
            return False
        key = (configurable.get("thread_id"), base, around)
        with self._lock:
            first = self._known.setdefault(key, namespace)
            if len(self._known) > self.MOST:
                del self._known[next(iter(self._known))]
        return first != namespace


class _Settled(NamedTuple):
    """A machine after a step, as `close` reads an interpreter."""

    snapshot: Snapshot
    error: BaseException | None
    faults: tuple[BaseException, ...]
    actors: tuple[Any, ...] = ()
    bubbled: BaseException | None = None

    @property
    def machine(self) -> Any:
        return self.snapshot.machine

    def dump(self) -> dict[str, Any]:
        return dump(self.snapshot)


class _Move:
    """One run of ``step``."""

    def __init__(self, task: Step, visit: Visit, ledger: Any, state: Any) -> None:
        self.task, self.visit, self.ledger, self.state = task, visit, ledger, state
        self.settings, self.node = task.settings, task.node
        self.now = visit.now_ms()
        self.faults: list[BaseException] = []
        self.receipt: Receipt | None = None
        self.error: BaseException | None = None
        self.services: list[str] = []
        self.step: AgentStep | None = None
        self.snapshot = self._found()

    def _found(self) -> Snapshot:
        visit = self.visit
        if visit.snapshot is None:
            # What is made here will be sealed; nobody else has had it.
            visit.own = self.node.seal is not None
            self.step = initial_agent_step(
                self.node.machine,
                run=visit.nonce(),
                now=self.now,
                ledger=self.ledger,
                scope=visit.scope,
            )
            found = self.step.snapshot
            conversation = visit.conversation
            if conversation is not None and conversation.before:
                context = found.context | {"messages": conversation.before}
                found = found.replace(context=context)
            visit.snapshot = found
        visit.kept = visit.snapshot.context.get("messages") or ()
        return visit.snapshot

    def update(self) -> Any:
        """Take everything in, and say where to go on; a ``Command``."""
        settings, visit = self.settings, self.visit
        results = read_key(self.state, settings.results)
        dated = [(self._at(result), result) for result in results or ()]
        for at, result in sorted(dated, key=operator.itemgetter(0)):
            self._fire_until(at)
            self._take(result, at)
        self._fire_until(self.now)
        if self._comes_too_early(visit.event):
            # It stays in the state, and is taken once the turn is over.
            visit.event, visit.consumed = None, False
        if visit.event is not None:
            self.receipt = self._note(self._transition(visit.event))
        settled = _Settled(self.snapshot, self.error, tuple(self.faults))
        update = close(visit, settled, self.receipt)
        also: list[Any] = []
        if isinstance(update, Command):
            chosen = update.goto or []
            also = [*chosen] if isinstance(chosen, list | tuple) else [chosen]
            update = update.update or {}
        written = dict(update)
        if results:
            written[settings.results] = None
        work = self._work()
        self._remember(written)
        goto = self._goto(work, written)
        visit.leave()
        if goto != [END]:
            mark_open(written, self.node.state_key)
            visit.remember(written.get(self.node.state_key), self._last())
        if settings.positional == "accept" and any(name == APPROVAL for name, _ in work):
            written[settings.asked] = self.now
        if settings.caches:
            written[SCOPE] = visit.scope
        return Command(update=written, goto=[*also, *goto])

    def _comes_too_early(self, event: Any) -> bool:
        """Whether a START finds another turn that was cut off, and would be ignored by it."""
        if event is None or event.type != "START" or self.node.agent is None:
            return False
        snapshot = self.snapshot
        for said in reversed(snapshot.context.get("messages") or ()):
            if isinstance(said, Mapping) and said.get("role") == "user":
                if said.get("content") == event.payload.get("prompt"):
                    return False  # The turn's own START again, by a client that retries.
                break
        return snapshot.status == "active" and bool(self._work()) and not can(snapshot, event)

    # Moving

    def _options(self) -> dict[str, Any]:
        visit = self.visit
        return {"ledger": self.ledger, "scope": visit.scope, "trusted": visit.own}

    def _transition(self, event: Any, at: float | None = None, agent: str | None = None) -> Any:
        now = self.now if at is None else at
        return transition_agent_step(
            self.node.machine, self.snapshot, event, agent=agent, now=now, **self._options()
        )

    def _take(self, result: Any, at: float) -> None:
        """A result of a task, or decisions of a person. State is untrusted: an odd one is not."""
        if not (type(result) is dict or isinstance(result, Mapping)):
            return
        if not self.task.is_own(self.visit, result):
            return
        if "decisions" in result:
            for event in self._decided(result):
                self.receipt = self._note(self._transition(event, at))
            return
        ident = result.get("id")
        if not isinstance(ident, str):
            return
        for event in _sent(result.get("sent")):
            self._note(self._transition(event, at))
        error = result.get("error")
        if isinstance(error, Mapping):
            self._resolve(ident, at, error=error)
            return
        try:
            self._resolve(ident, at, output=result.get("output"))
        except AgentError as refused:
            # No result of such a request; nothing has changed yet.
            self._resolve(ident, at, error=refused)

    def _resolve(self, ident: str, at: float, **outcome: Any) -> None:
        machine, options = self.node.machine, self._options()
        self._note(resolve_agent_step(machine, self.snapshot, ident, now=at, **outcome, **options))

    def _decided(self, result: Mapping[str, Any]) -> Iterable[Any]:
        """One event for each agent whose calls were decided."""
        decided, by = result["decisions"], result.get("by")
        decided = decided if isinstance(decided, list) else []
        if not all(isinstance(each, Mapping) for each in decided):
            return
        owners = {each["id"]: each.get("agent_id") for each in pending_approval(self.snapshot)}
        by_agent: dict[Any, list[Any]] = {}
        for each in decided:
            ident = each.get("id")
            owner = owners.get(ident) if isinstance(ident, str) else None
            by_agent.setdefault(owner, []).append(each)
        for agent, decisions in by_agent.items():
            yield decisions_event(decisions, by=by if isinstance(by, str) else None, agent_id=agent)

    def _at(self, result: Any) -> float:
        """When a result was made; never later than now.

        Only a seal vouches for a decision's date: without one, it is made when it is seen. Dated
        back, it would be in time for a deadline that has passed.
        """
        if not (type(result) is dict or isinstance(result, Mapping)):
            return 0.0
        if "decisions" in result and self.node.seal is None:
            return self.now
        at = result.get("at")
        return min(at, self.now) if isinstance(at, int | float) and at >= 0 else 0.0

    def _fire_until(self, at: float) -> None:
        """Deliver the deadlines that had passed by then, in order of ``due_at``."""
        for _ in range(_MOST_TIMERS):
            if self.snapshot.status != "active":
                return
            if _rests_until(self.snapshot, at):
                return
            timers = self._standing().timers()
            if not timers or (timers[0].due_at or 0.0) > at:
                return
            self._note(self._transition(timers[0], max(at, timers[0].due_at or 0.0)))
        raise StepError(f"more than {_MOST_TIMERS} deadlines were due at once")

    def _note(self, step: AgentStep) -> Receipt | None:
        before = self.snapshot
        self.step, self.snapshot = step, step.snapshot
        receipt = step.receipt
        if receipt is not None:
            self.faults.extend(receipt.faults)
        error = step._left.error
        if isinstance(error, BaseException):
            self.error = error
        if before.state_ids != step.snapshot.state_ids:
            self._tell(before, step)
        return receipt

    def _tell(self, before: Snapshot, step: AgentStep) -> None:
        writer = self.visit.writer()
        if writer is not None:
            writer(
                {
                    "type": "statechart.transition",
                    "machine": step.snapshot.machine.id,
                    "event": step._record.get("event", {}).get("type"),
                    "from": sorted(before.state_ids),
                    "to": sorted(step.snapshot.state_ids),
                }
            )

    # Where to

    def _work(self) -> list[tuple[str, str]]:
        """What is to be done now: the task, and what it is about."""
        self.services = []
        if self.snapshot.status != "active":
            return []
        work: list[tuple[str, str]] = []
        if self.snapshot.children:
            work = [(TOOLS if each.kind == "tool" else MODEL, each.id) for each in self._requests()]
            # A machine below, which has a snapshot, may have spawned something, too.
            below = self.snapshot.children.values()
            if self.settings.serves or any(c.spawned or c.snapshot is not None for c in below):
                self.services = self._services()
                work += [(SERVICE, ident) for ident in self.services]
        if work:
            return work
        # A person is asked once nothing else is left to be done.
        asked = [item["id"] for item in pending_approval(self.snapshot)]
        if self.settings.per_call:
            return [(APPROVAL, each) for each in asked]
        return [(APPROVAL, "")] if asked else []

    def _services(self) -> list[str]:
        """The services that wait to be run and are neither a model nor a tool."""
        waiting = self._standing().waiting()
        found = [each for each in waiting if not hasattr(each.invocation.service, "step_requests")]
        for each in found:
            if each.invocation.service is None:
                raise AgentConfigError(
                    f"statechart_graph: {each.actor.machine.id!r} spawned a service that its logic "
                    "does not name, so that no task finds it; put it into services="
                )
        return [each.id for each in found]

    def _goto(self, work: list[tuple[str, str]], written: Mapping[str, Any]) -> list[Any]:
        if work:
            return self._sent(work, written)
        if self.snapshot.status != "active":
            return [END]
        due = serving_due(self._standing(), WAITING_STATES)
        clock = self.node.clock
        if due is not None and due - self.now <= self.node.serve_delay_s * 1000.0:
            return [END] if clock is not None and clock.simulated else [TIMER]
        return [END]

    def _requests(self) -> tuple[Any, ...]:
        step = self._last()
        return self.task.requests(self._here(), self.ledger) if step is None else step.requests

    def _standing(self) -> Stepper:
        step = self._last()
        return self.task.standing(self._here(), self.ledger) if step is None else step._left

    def _last(self) -> AgentStep | None:
        """The step that led here, which has looked already; None where the task has taken none."""
        step = self.step
        return step if step is not None and step.snapshot is self.snapshot else None

    def _remember(self, written: dict[str, Any]) -> None:
        """Which event began each service that waits: what the service is handed when it runs."""
        settings = self.settings
        known = read_key(self.state, settings.begun)
        if not known and not self.services:
            return
        known = dict(known) if isinstance(known, Mapping) else {}
        begun = {ident: known[ident] for ident in self.services if ident in known}
        event = self.visit.event
        if event is not None:
            data = {**event.payload, "type": event.type}
            begun |= {ident: data for ident in self.services if ident not in begun}
        if begun != known:
            written[settings.begun] = begun

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
                    SCOPE: self.visit.scope,
                    settings.asked: self.now,
                    settings.begun: written.get(
                        settings.begun, read_key(self.state, settings.begun)
                    ),
                },
            )
            for name, ident in work
        ]


_MOST_TIMERS: Final = 1000


def _rests_until(snapshot: Snapshot, at: float) -> bool:
    """Whether no deadline is due, as far as can be told without opening the machine."""
    rest = snapshot.rest
    services = getattr(snapshot.machine.logic, "services", None) or {}
    for child in rest.children.values():
        service = services.get(child.src)
        if child.status == "active" and (service is None or isinstance(service, Machine)):
            return False
    for table in (rest.timers, rest.sends):
        for timer in table.values():
            if timer.due_at <= at:
                return False
    return True


def _sent(events: Any) -> Iterable[dict[str, Any]]:
    """What a service sent its machine. A person's decision is never a service's to send."""
    for event in events if isinstance(events, list) else ():
        kind = event.get("type") if isinstance(event, Mapping) else None
        if isinstance(kind, str) and kind and kind not in HUMAN_EVENTS:
            yield dict(event)
