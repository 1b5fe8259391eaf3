"""One invocation of a statechart node: what it finds before anything runs."""

from __future__ import annotations

import dataclasses
import math
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from langgraph.config import get_config
from langgraph.errors import GraphBubbleUp
from langgraph.runtime import Runtime, get_runtime
from langgraph.types import interrupt

from guardchart.agents import WAITING_STATES, AgentStep, pending_approval
from guardchart.agents._charts import saved_children, waits
from guardchart.agents._stepper import Stepper
from guardchart.errors import (
    AgentConfigError,
    SnapshotTamperedError,
    StepError,
)
from guardchart.gate import verify_decision
from guardchart.gate._approvals import HUMAN_EVENTS
from guardchart.kernel import (
    Event,
    Machine,
    Snapshot,
    as_event,
    interrupted,
    load,
)
from guardchart.langgraph._messages import SPENT_IDS, Conversation, without
from guardchart.langgraph._recent import Known, Recent, text_of
from guardchart.langgraph._reducers import LINEAGE
from guardchart.langgraph._state import check_clearable, is_blank, parse_snapshot, read_key
from guardchart.langgraph._view import StatechartView, TransitionStream, refusal

__all__ = ["Settings", "Visit"]

_FINISHED = (
    "finished: this conversation has ended; for a next turn on the same thread pass "
    "event_key=, which clears the event once it is consumed, or multi_turn=True"
)
_WAITING = (
    "waiting: a START would close the calls that wait for a decision; if the same START may stand "
    "in the state still, nothing tells it from a new one. Pass event_key=, which clears the event "
    "once it is consumed, or multi_turn=True"
)
_TAMPERED = "tampered: the snapshot's seal does not fit, and nothing of it was kept"
# LangGraph gives a run that nobody streams a writer that does nothing.
_UNHEARD = (lambda item: None).__code__.co_code


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """The arguments of ``statechart_node``, checked."""

    machine: Machine
    state_key: str
    event_from_state: Callable[..., Any]
    takes_runtime: bool
    result_to_state: Callable[[StatechartView, Any], Any] | None
    event_key: str | None
    messages_key: str | None
    ledger: Any
    seal: Any
    signed_approvals: bool
    plugins: tuple[Any, ...]
    interrupts: bool
    scope: str | Callable[[Any], str] | None
    clock: Any
    serve_delay_s: float
    multi_turn: bool
    agent: Any
    spawns: bool = False
    recent: Recent | None = None
    checked: set[type[Any]] = dataclasses.field(default_factory=set)

    @property
    def settling(self) -> dict[str, Any]:
        """How ``settle`` is called: a tool loop's retries end by its budget, so all are served."""
        total_s = math.inf if self.agent is not None or self.spawns else None
        return {"waiting": WAITING_STATES, "serve_total_s": total_s}


class Visit:
    """One invocation: identity, snapshot and event, as they are found.

    Attributes:
        event: The event to send, None where the node is only re-entered.
        found: The snapshot as it stands in the state, None where there is none.
        consumed: Whether the state's event is used up, whatever becomes of it.
        loaded: The snapshot as it was found, None where there was none.
        snapshot: The snapshot to go on from, None where the machine starts afresh.
        own: Whether a seal vouches for it, so that services may be restarted.
        standing: A snapshot, and its machine as somebody has looked at it.
        tampered: Whether its seal did not fit, so that nothing of it is left.
        rewrite: Whether it is written back even if nothing happens.
        receipt: What is known of the event's fate before it is sent: a refusal.
        conversation: The messages of ``messages_key``.
        kept: The very message objects the chart starts with.
        known: What an earlier task of this run knew of the snapshot.
        written: The snapshot that is written back, None where none is.
        added: The messages that are written to the channel.
    """

    __slots__ = (
        "_entry",
        "_text",
        "added",
        "config",
        "consumed",
        "conversation",
        "event",
        "found",
        "kept",
        "known",
        "loaded",
        "own",
        "receipt",
        "rewrite",
        "runtime",
        "scope",
        "settings",
        "snapshot",
        "standing",
        "state",
        "tampered",
        "thread",
        "written",
    )

    def __init__(
        self, settings: Settings, state: Any, config: Any, scope: str | None = None
    ) -> None:
        self.settings = settings
        self.state = state
        self.config = config
        self.runtime = _runtime()
        info = getattr(self.runtime, "execution_info", None)
        thread = getattr(info, "thread_id", None)
        self.thread = _thread(config) if thread is None else thread
        self.scope = scope or self._find_scope()
        self.event: Event | None = None
        self.found: dict[str, Any] | None = None
        self.written: Snapshot | None = None
        self.added: Sequence[Any] = ()
        self.known: Known | None = None
        self.snapshot: Snapshot | None = None
        self.standing: tuple[Snapshot, Stepper] | None = None
        self.own = False
        self.tampered = False
        self.conversation: Conversation | None = None
        self.consumed = False
        self.kept: Any = ()
        self.loaded: Snapshot | None = None
        self.receipt: dict[str, Any] | None = None
        if type(state) not in settings.checked:
            self._check_state()
        entry = read_key(state, settings.state_key)
        self._entry = None if is_blank(entry) else entry
        self._text: bytes | None = None
        # A snapshot that came as text is written back as a dict, whatever happens to it.
        self.rewrite = isinstance(entry, str)

    # What is found

    def check_ledger(self, ledger: Any) -> None:
        """Refuse a ledger on disk that has nothing to file this thread's calls under.

        Raises:
            AgentConfigError: Without a thread id the scope would be a nonce, and no later
                invocation would find its rows.
        """
        if ledger is not None and self.scope is None and getattr(ledger, "durable", False):
            raise AgentConfigError(
                "statechart_node: a durable ledger needs to know the thread; compile the graph "
                "with a checkpointer and pass a thread_id, or pass scope="
            )

    def load(self) -> None:
        """Read snapshot and event; see the attributes for what was found. Nothing runs.

        Raises:
            AgentConfigError: ``event_from_state`` gave no event, or something else holds the
                state key.
            SnapshotError: The snapshot is not one of this machine.
        """
        waits = False
        if self._entry is not None:
            self.snapshot = self.loaded = self._load_snapshot()
            waits = self.settings.interrupts and self._waits(self.snapshot)
        if not waits or self._event_waits():
            self.event = self._read_event()
            self.consumed = self.event is not None
        elif self.runtime is not None and not self._is_due(self.snapshot):
            self._ask()
        if self.tampered:
            self._refuse("denied", _TAMPERED)
        if self.settings.signed_approvals:
            self._check_signature()
        if self.snapshot is not None:
            self._next_turn(self.snapshot)
        self._converse()

    def look(self, *, alone: bool = False) -> None:
        """Read the snapshot and its conversation, but no event: what a task of a graph needs.

        Args:
            alone: Read it from the state, for a task that hands its context to the app's code.

        Raises:
            AgentConfigError, SnapshotError: As `load`.
        """
        if self._entry is not None:
            self.snapshot = self.loaded = self._load_snapshot(alone=alone)
        self._converse()
        recent, snapshot = self.settings.recent, self.snapshot
        if recent is None or snapshot is None or self._text is None or self.rewrite:
            return
        # The tasks after one that was taken up from a checkpoint find the same object.
        conversation = self.conversation
        talk = None if conversation is None else conversation.extended()
        known = Known.made(self.found, self.scope, snapshot, talk)
        if text_of(self.found) == self._text:
            recent.keep(known)

    def remember(self, data: Any, step: AgentStep | None) -> None:
        """Have the next tasks of this run spared what this one knows of a snapshot it wrote."""
        recent, snapshot = self.settings.recent, self.written
        if recent is None or snapshot is None:
            return
        talk, said = self.conversation, snapshot.context.get("messages")
        if talk is not None:
            talk = talk.extended(self.added, said if isinstance(said, list) else ())
        recent.keep(Known.made(data, self.scope, snapshot, talk, step))

    def leave(self) -> None:
        """Have what is known of the snapshot that was found forgotten: no other task reads it."""
        if self.known is not None and self.settings.recent is not None:
            self.settings.recent.leave(self.known)
            # An interrupt keeps the frames of its task, which is a cycle.
            self.known = None

    def writer(self) -> Callable[[Any], None] | None:
        """What writes to the custom stream; None where nobody reads it."""
        writer = None if self.runtime is None else self.runtime.stream_writer
        return writer if _is_heard(writer) else None

    def plugins(self, is_async: bool) -> list[Any]:
        """The plugins of this invocation: the custom stream's, and the bound ones."""
        writer = self.writer()
        found: list[Any] = [] if writer is None else [TransitionStream(writer)]
        for plugin in self.settings.plugins:
            bind = getattr(plugin, "bind_invocation", None)
            found.append(plugin if bind is None else bind(self.config, is_async=is_async))
        return found

    def options(self, is_async: bool, ledger: Any) -> dict[str, Any]:
        """The keyword arguments of the interpreter."""
        return {
            "clock": self.settings.clock,
            "plugins": self.plugins(is_async),
            "scope": self.scope,
            "ledger": ledger,
            "run": self.nonce(),
            # `interrupt()` in a service, or a `Command` to a parent graph.
            "bubbles": (GraphBubbleUp,),
        }

    def started(self, interpreter: Any) -> None:
        """Take up the conversation once the machine is started, before any event."""
        conversation = self.conversation
        if conversation is None:
            return
        if self.loaded is None and conversation.before:
            interpreter.update_context({"messages": conversation.before})
        self.kept = interpreter.snapshot.context.get("messages") or ()

    # Parts

    def _check_state(self) -> None:
        """Once per class of state: the keys exist, and the event's can be cleared."""
        settings, kind = self.settings, type(self.state)
        if not isinstance(self.state, Mapping):
            for key in (settings.event_key, settings.messages_key):
                if key is not None:
                    read_key(self.state, key)
            if settings.event_key is not None:
                check_clearable(kind, settings.event_key)
        settings.checked.add(kind)

    def _find_scope(self) -> str | None:
        scope = self.settings.scope
        if callable(scope):
            scope = scope(self.state)
        if scope is None:
            return None if self.thread is None else str(self.thread)
        if not isinstance(scope, str) or not scope:
            raise AgentConfigError("statechart_node: scope= must give a text that is not empty")
        return scope

    def nonce(self) -> str:
        """A nonce for a machine that starts now; the same again when LangGraph retries."""
        runtime = self.runtime
        if runtime is None:
            return uuid.uuid4().hex
        task_id = getattr(getattr(runtime, "execution_info", None), "task_id", None)
        if not task_id:
            # Before LangGraph 1.1 only the namespace's last part tells: "agent:<task id>".
            namespace = (get_config().get("configurable") or {}).get("checkpoint_ns")
            task_id = namespace.rpartition(":")[2] if isinstance(namespace, str) else None
        return str(task_id) if task_id else uuid.uuid4().hex

    def now_ms(self) -> float:
        """The time, epoch milliseconds."""
        clock = self.settings.clock
        return time.time() * 1000.0 if clock is None else float(clock.now_ms())

    def _read_event(self) -> Event | None:
        settings = self.settings
        if settings.takes_runtime:
            runtime = self.runtime if self.runtime is not None else Runtime()
            value = settings.event_from_state(self.state, runtime)
        else:
            value = settings.event_from_state(self.state)
        if value is None:
            return None
        try:
            return as_event(value)
        except StepError:
            raise AgentConfigError(
                "event_from_state must return an event (an Event, a dict with a text under "
                f"'type', or a type) or None, not {type(value).__name__}"
            ) from None

    def _event_waits(self) -> bool:
        """Whether the state holds an event that has not been consumed; only event_key tells."""
        key = self.settings.event_key
        return key is not None and read_key(self.state, key) is not None

    def _converse(self) -> None:
        key = self.settings.messages_key
        if key is None:
            return
        prompt = None if self.event is None else self.event.payload.get("prompt")
        channel, known = read_key(self.state, key), self.known
        conversation = None
        if known is not None and known.begins(channel):
            conversation = known.conversation
        if conversation is None:
            conversation = Conversation(channel, prompt)
        elif prompt is not None or len(channel) > len(conversation.channel):
            conversation = Conversation(channel, prompt, conversation.told)
        self.conversation = conversation
        if self.snapshot is not None:
            before = conversation.before
            if known is not None and self.snapshot.context.get("messages") == before:
                return
            context = self.snapshot.context | {"messages": list(before)}
            # What is known from this run has them still.
            if self.known is None and isinstance(context.get(SPENT_IDS), list):
                ids = conversation.call_ids(self.snapshot.run)
                context[SPENT_IDS] = [*ids, *without(context[SPENT_IDS], ids)]
            self.snapshot = self.snapshot.replace(context=context)

    def _load_snapshot(self, *, alone: bool = False) -> Snapshot:
        settings = self.settings
        self.found = parse_snapshot(self._entry, settings.state_key)
        recent = None if alone else settings.recent
        if recent is not None:
            self.known = recent.find(self.found, self.scope)
        if self.known is not None:
            self.own = settings.seal is not None
            return self.known.snapshot
        if recent is not None:
            # Before it is read: what changes it meanwhile is not what was read.
            self._text = text_of(self.found)
        data = dict(self.found)
        data.pop("receipt", None)
        data.pop(LINEAGE, None)
        seal = data.pop("seal", None)
        if settings.seal is not None:
            thread, machine = self.sealed_for()
            if not settings.seal.fits(seal, data, thread=thread, machine=machine):
                return self._refuse_tampered()
            self.own = True
        return load(settings.machine, data, trusted=self.own)

    def sealed_for(self) -> tuple[str, str]:
        if self.scope is None:
            raise AgentConfigError(
                "statechart_node: a seal is bound to the thread; compile the graph with a "
                "checkpointer and pass a thread_id, or pass scope="
            )
        return self.scope, self.settings.machine.id

    def _refuse_tampered(self) -> Snapshot:
        """Keep nothing of a snapshot whose seal does not fit: a loop ends in ``error``."""
        settings = self.settings
        ended = None
        if settings.agent is not None:
            ended = settings.agent.tampered(settings.machine, self.nonce())
        if ended is None:
            raise SnapshotTamperedError(
                f"state[{settings.state_key!r}]: the snapshot's seal is missing or does not fit; "
                "nothing of it was kept"
            )
        self.tampered = self.rewrite = True
        return ended  # type: ignore[no-any-return]

    def _check_signature(self) -> None:
        event = self.event
        if event is None or event.type not in HUMAN_EVENTS:
            return
        thread, _ = self.sealed_for()
        if not verify_decision(self.settings.seal, event, thread):
            self._refuse("denied", "the decision is not signed")

    def _refuse(self, status: str, reason: str) -> None:
        """Do not send the event; its receipt says why."""
        if self.event is not None:
            self.receipt = refusal(status, self.event.type, reason)
            self.event = None

    def _next_turn(self, snapshot: Snapshot) -> None:
        """Take a START on a conversation that ended, or waits, only where turns were asked for.

        LangGraph hands the old value of a state key to the next run, so that without
        ``event_key`` a START that was answered long ago cannot be told from a new one.
        """
        settings, event = self.settings, self.event
        if event is None or event.type != "START" or settings.agent is None:
            return
        ended = snapshot.status != "active"
        if settings.event_key is None and not settings.multi_turn:
            if ended or self._waits(snapshot):
                self._refuse("dropped", _FINISHED if ended else _WAITING)
            return
        if not ended:
            return
        following = settings.agent.next_turn(settings.machine, snapshot, event)
        if following is not None:
            self.snapshot = following

    def _waits(self, snapshot: Snapshot) -> bool:
        """Whether the chart waits for somebody, whom an interrupt is to ask."""
        return snapshot.status == "active" and waits(snapshot)

    def _is_due(self, snapshot: Snapshot | None) -> bool:
        """Whether something happens on entry that the question would come too early for."""
        if snapshot is None:
            return True
        if snapshot.children:
            below = saved_children(snapshot) if self.own else []
            if len(interrupted(snapshot)) > len(below) or any(map(self._is_due, below)):
                return True
        now = self.now_ms()
        return any(timer.due_at <= now for timer in snapshot.timers.values())

    def _ask(self) -> None:
        assert self.snapshot is not None
        answer = interrupt(
            {
                "type": "statechart.waiting",
                "machine": self.snapshot.machine.id,
                "state_ids": sorted(self.snapshot.state_ids),
                "pending": pending_approval(self.snapshot),
            }
        )
        try:
            self.event = as_event(answer)
        except StepError:
            # Raising here would raise again at every later resume: the answer is stored.
            self.receipt = refusal("denied", None, "the answer is not an event")


def _is_heard(writer: Any) -> bool:
    """Whether anybody reads what is written: whether the writer's body does anything at all."""
    if writer is None:
        return False
    code = getattr(writer, "__code__", None)
    return code is None or code.co_code != _UNHEARD


def _runtime() -> Runtime[Any] | None:
    """LangGraph's runtime, or None where the node is called outside a graph."""
    try:
        return get_runtime()
    except (RuntimeError, KeyError):
        return None


def _thread(config: Any) -> Any:
    """The thread's id from the configuration: of an older LangGraph, or outside of one."""
    if config is None:
        try:
            config = get_config()
        except RuntimeError:
            return None
    return (config.get("configurable") or {}).get("thread_id")
