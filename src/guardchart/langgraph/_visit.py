"""One invocation of a statechart node: what it is handed, and what it hands back.

Nothing here runs a machine; `_node` does, between `Visit.load` and `Visit.close`.
"""

from __future__ import annotations

import dataclasses
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from langgraph.config import get_config
from langgraph.runtime import Runtime, get_runtime
from langgraph.types import Command, interrupt

from guardchart.agents import WAITING_STATES, pending_approval
from guardchart.errors import (
    AgentConfigError,
    QueueFullError,
    SnapshotTamperedError,
    StepError,
    StoreError,
)
from guardchart.gate import verify_decision
from guardchart.kernel import (
    Event,
    Machine,
    Receipt,
    Snapshot,
    active_nodes,
    as_event,
    dump,
    interrupted,
    load,
)
from guardchart.langgraph._messages import Conversation
from guardchart.langgraph._state import check_clearable, is_blank, parse_snapshot, read_key
from guardchart.langgraph._view import StatechartView, TransitionStream, receipt_json

__all__ = ["Settings", "Visit"]

_FINISHED = (
    "finished: this conversation has ended; for a next turn on the same thread pass "
    "event_key=, which clears the event once it is consumed, or multi_turn=True"
)
_DECISIONS = frozenset({"HUMAN_APPROVED", "HUMAN_REJECTED", "HUMAN_DECIDED"})
# The machine could not take an event at all; with `fail`, an action's own error says so itself.
_HOST_FAULTS = (StepError, StoreError, QueueFullError)


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
    checked: set[type[Any]] = dataclasses.field(default_factory=set)


class Visit:
    """One invocation: identity, snapshot and event as found; the update at the end.

    Attributes:
        event: The event to send, None where the node is only re-entered.
        snapshot: The snapshot to go on from, None where the machine starts afresh.
        own: Whether a seal vouches for it, so that services may be restarted.
    """

    __slots__ = (
        "_conversation",
        "_entry",
        "_event_consumed",
        "_kept",
        "_loaded",
        "_receipt",
        "_rewrite",
        "config",
        "event",
        "own",
        "runtime",
        "scope",
        "settings",
        "snapshot",
        "state",
        "thread",
    )

    def __init__(self, settings: Settings, state: Any, config: Any) -> None:
        self.settings = settings
        self.state = state
        self.config = config
        self.runtime = _runtime()
        self.thread = _thread(self.runtime, config)
        self.scope = self._find_scope()
        self.event: Event | None = None
        self.snapshot: Snapshot | None = None
        self.own = False
        self._conversation: Conversation | None = None
        self._event_consumed = False
        self._kept: list[Any] = []
        self._loaded: Snapshot | None = None
        self._receipt: dict[str, Any] | None = None
        self._check_state()
        entry = read_key(state, settings.state_key)
        self._entry = None if is_blank(entry) else entry
        # A snapshot that came as text is written back as a dict, whatever happens to it.
        self._rewrite = isinstance(entry, str)

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
        asks = False
        if self._entry is not None:
            self.snapshot = self._loaded = self._load_snapshot()
            asks = self.settings.interrupts and self._asks(self.snapshot)
        if not asks or self._event_waits():
            self.event = self._read_event()
            self._event_consumed = self.event is not None
        elif self.runtime is not None:
            self._ask()
        if self.settings.signed_approvals:
            self._check_signature()
        if self.snapshot is not None and self.snapshot.status != "active":
            self._go_on_after_the_end(self.snapshot)
        self._converse()

    def plugins(self, is_async: bool) -> list[Any]:
        """The plugins of this invocation: the custom stream's, and the bound ones."""
        found: list[Any] = []
        if self.runtime is not None:
            found.append(TransitionStream(self.runtime.stream_writer))
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
            "run": self._run(),
        }

    def started(self, interpreter: Any) -> None:
        """Take up the conversation once the machine is started, before any event."""
        conversation = self._conversation
        if conversation is None:
            return
        if self._loaded is None and conversation.before:
            interpreter.update_context({"messages": conversation.before})
        self._kept = list(interpreter.snapshot.context.get("messages") or ())

    # What is handed back

    def close(self, interpreter: Any, receipt: Receipt | None) -> Any:
        """Return the node's update.

        Raises:
            BaseException: What broke the machine, where an action, a guard or an unhandled
                service did: the app's error, raised as it is, so that LangGraph's
                ``RetryPolicy`` sees its class. The graph state keeps the snapshot it had.
        """
        settings = self.settings
        snapshot: Snapshot = interpreter.snapshot
        self._raise_fault(interpreter, snapshot, receipt)
        if receipt is not None:
            event_type = None if self.event is None else self.event.type
            self._receipt = receipt_json(event_type, receipt)
        update: dict[str, Any] = {}
        before = self._loaded
        if (
            before is None
            or self._receipt is not None
            or snapshot.rev != before.rev
            or snapshot.status != before.status
            or self._rewrite
        ):
            update = self._written(self._dumped(interpreter, snapshot), snapshot)
        if settings.event_key is not None and self._event_consumed:
            update[settings.event_key] = None
        if settings.result_to_state is None:
            return update
        view = StatechartView(snapshot, self._receipt)
        return self._merged(update, settings.result_to_state(view, self.state))

    def _written(self, data: dict[str, Any], snapshot: Snapshot) -> dict[str, Any]:
        settings = self.settings
        update: dict[str, Any] = {settings.state_key: data}
        if self._conversation is not None:
            added = self._conversation.new(
                self._kept, snapshot.context.get("messages") or (), snapshot.run or ""
            )
            if added:
                update[settings.messages_key or ""] = added
        if settings.seal is not None:
            thread, machine = self._sealed_for()
            data["seal"] = settings.seal.sign(data, thread=thread, machine=machine)
        if self._receipt is not None:
            data["receipt"] = self._receipt
        return update

    def _dumped(self, interpreter: Any, snapshot: Snapshot) -> dict[str, Any]:
        """The snapshot as JSON types, without a conversation that the channel holds.

        Raises:
            AgentConfigError: Nobody could load it again.
        """
        if self._conversation is None:
            data: dict[str, Any] = interpreter.dump()
        elif interpreter.actors:
            data = interpreter.dump()
            data["context"]["messages"] = []
        else:
            data = dump(snapshot.replace(context={**snapshot.context, "messages": []}))
        if self.settings.seal is None and (
            data.get("sends") or any("spawned" in each for each in data["children"].values())
        ):
            raise AgentConfigError(
                f"statechart_node: {snapshot.machine.id!r} rests with a delayed send or a spawned "
                "actor, which load only from a sealed snapshot; pass seal="
            )
        return data

    def _merged(self, update: dict[str, Any], result: Any) -> Any:
        if result is None:
            return update
        if isinstance(result, Command):
            extra = {} if result.update is None else result.update
            if isinstance(extra, list | tuple):
                extra = dict(extra)
            if not isinstance(extra, Mapping):
                raise AgentConfigError(
                    "result_to_state: a Command's update must be a dict, a list of pairs or None"
                )
            return dataclasses.replace(result, update=self._joined(update, extra))
        if not isinstance(result, Mapping):
            raise AgentConfigError(
                "result_to_state must return a dict, a Command or None, "
                f"not {type(result).__name__}"
            )
        return self._joined(update, result)

    def _joined(self, update: dict[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
        settings = self.settings
        if settings.state_key in extra:
            raise AgentConfigError(
                f"result_to_state must not write {settings.state_key!r}: "
                "the key is reserved for statechart_node"
            )
        joined = {**update, **extra}
        key = settings.messages_key
        if key is not None and key in update and key in extra:
            more = extra[key]
            joined[key] = [*update[key], *(more if isinstance(more, list) else [more])]
        return joined

    def _raise_fault(self, interpreter: Any, snapshot: Snapshot, receipt: Receipt | None) -> None:
        if snapshot.status == "error" and (self._loaded is None or self._loaded.status != "error"):
            error = interpreter.error
            if isinstance(error, BaseException):
                raise error
            raise StepError(f"the machine {snapshot.machine.id!r} failed")
        for fault in interpreter.faults:
            if isinstance(fault, _HOST_FAULTS):
                raise fault
        if receipt is not None and receipt.error is not None and self._undecided(receipt):
            raise receipt.error

    @staticmethod
    def _undecided(receipt: Receipt) -> bool:
        """Whether the event was denied because deciding about it raised, not by the chart."""
        return receipt.denied and (receipt.reason or "").endswith("while deciding")

    # Parts

    def _check_state(self) -> None:
        """Once per class of state: the keys exist, and the event's can be cleared."""
        settings, kind = self.settings, type(self.state)
        if kind in settings.checked:
            return
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

    def _run(self) -> str:
        """A nonce for a machine that starts now; the same again when LangGraph retries."""
        info = getattr(self.runtime, "execution_info", None)
        task_id = getattr(info, "task_id", None)
        return str(task_id) if task_id else uuid.uuid4().hex

    def _now_ms(self) -> float:
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
        conversation = Conversation(read_key(self.state, key), prompt)
        self._conversation = conversation
        if self.snapshot is not None:
            context = {**self.snapshot.context, "messages": conversation.before}
            self.snapshot = self.snapshot.replace(context=context)

    def _load_snapshot(self) -> Snapshot:
        settings = self.settings
        data = dict(parse_snapshot(self._entry, settings.state_key))
        data.pop("receipt", None)
        seal = data.pop("seal", None)
        if settings.seal is not None:
            thread, machine = self._sealed_for()
            if not settings.seal.fits(seal, data, thread=thread, machine=machine):
                return self._refuse_tampered()
            self.own = True
        return load(settings.machine, data, trusted=self.own)

    def _sealed_for(self) -> tuple[str, str]:
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
            ended = settings.agent.tampered(settings.machine, self._run())
        if ended is None:
            raise SnapshotTamperedError(
                f"state[{settings.state_key!r}]: the snapshot's seal is missing or does not fit; "
                "nothing of it was kept"
            )
        self._rewrite = True
        return ended  # type: ignore[no-any-return]

    def _check_signature(self) -> None:
        event = self.event
        if event is None or event.type not in _DECISIONS:
            return
        thread, _ = self._sealed_for()
        if not verify_decision(self.settings.seal, event, thread):
            self.event = None
            self._receipt = _refusal("denied", event.type, "the decision is not signed")

    def _go_on_after_the_end(self, snapshot: Snapshot) -> None:
        """A finished conversation begins its next turn, where the caller asked for turns."""
        settings, event = self.settings, self.event
        if event is None or event.type != "START" or settings.agent is None:
            return
        if settings.event_key is None and not settings.multi_turn:
            self.event = None
            self._receipt = _refusal("dropped", event.type, _FINISHED)
            return
        following = settings.agent.next_turn(settings.machine, snapshot, event)
        if following is not None:
            self.snapshot = following

    def _asks(self, snapshot: Snapshot) -> bool:
        """Whether to interrupt: it waits for somebody, and nothing else is to be done first."""
        if snapshot.status != "active" or interrupted(snapshot):
            return False
        now = self._now_ms()
        if any(timer.due_at <= now for timer in snapshot.timers.values()):
            return False
        nodes = active_nodes(snapshot)
        return any("waiting" in node.tags or node.key in WAITING_STATES for node in nodes)

    def _ask(self) -> None:
        assert self.snapshot is not None
        answer = interrupt(
            {
                "type": "statechart.waiting",
                "machine": self.snapshot.machine.id,
                "state_ids": sorted(self.snapshot.state_ids),
                "pending": pending_approval(self.snapshot.context),
            }
        )
        try:
            self.event = as_event(answer)
        except StepError:
            # Raising here would raise again at every later resume: the answer is stored.
            self._receipt = _refusal("denied", None, "the answer is not an event")


def _refusal(status: str, event_type: str | None, reason: str) -> dict[str, Any]:
    return {
        "event": event_type,
        "status": status,
        "changed": False,
        "denied": status == "denied",
        "reason": reason,
        "error": None,
    }


def _runtime() -> Runtime[Any] | None:
    """LangGraph's runtime, or None where the node is called outside a graph."""
    try:
        return get_runtime()
    except (RuntimeError, KeyError):
        return None


def _thread(runtime: Runtime[Any] | None, config: Any) -> Any:
    """The thread's id, from the runtime or, before it had one, from the configuration."""
    info = getattr(runtime, "execution_info", None)
    thread = getattr(info, "thread_id", None)
    if thread is None:
        if config is None:
            try:
                config = get_config()
            except RuntimeError:
                return None
        thread = (config.get("configurable") or {}).get("thread_id")
    return thread
