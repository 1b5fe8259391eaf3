"""What the doors share: chart, tools and ledger, and a session out of graph state.

`StatechartMiddleware`, `guard_tool_node` and `approval_gate` differ in where LangGraph calls
them. Each opens a session from the state it is given, hands calls to it, and writes back what the
chart became; none of them decides what may run.
"""

from __future__ import annotations

import contextvars
import dataclasses
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from langchain_core.messages import AIMessage
from langchain_core.tools import BaseTool
from langchain_core.tools import tool as langchain_tool

from guardchart.errors import AgentConfigError, SnapshotTamperedError
from guardchart.gate import (
    DEFAULT_MAX_OUTPUT_CHARS,
    DEFAULT_MAX_TOOL_CALLS,
    Seal,
    Tool,
    ToolCall,
    ToolRegistry,
    canonical,
    tool_registry,
)
from guardchart.gate._authorise import in_thread
from guardchart.gate._charts import PolicyChart
from guardchart.gate._stored import StoredSession, rowless
from guardchart.kernel import Machine, Snapshot, dump, initial_step, load
from guardchart.langchain._ask import Positional, Show
from guardchart.langchain._tools import as_tool, tool_of
from guardchart.persistence import default_ledger
from guardchart.runtime import create_machine

__all__ = [
    "CURRENT",
    "Current",
    "Door",
    "Opened",
    "appended",
    "as_call",
    "calls_of",
    "turn_of",
]

_RECENT: Final = 256
SHOWN: Final = frozenset({"full", "ids"})
Note = dict[str, Any]


class Current:
    """The call whose body runs now: the way in for a wrapped tool, once.

    A tool is known by identity: another one may have the same name and run something else.
    """

    __slots__ = ("_text", "_tool", "_used", "session")

    def __init__(self, session: Any, arguments: Mapping[str, Any], tool: Any) -> None:
        self.session = session
        self._text = canonical(dict(arguments))
        self._tool = tool
        self._used = False

    def passes(self, tool: Any, arguments: Any) -> bool:
        """Whether this is the very call that the gate let through, made for the first time."""
        if self._used or tool is not self._tool:
            return False
        try:
            same = canonical(arguments) == self._text
        except ValueError:
            return False
        self._used = same
        return same


CURRENT: contextvars.ContextVar[Current | None] = contextvars.ContextVar(
    "guardchart_langchain_current", default=None
)


@dataclasses.dataclass(slots=True)
class Opened:
    """A session, and what of the graph state it was made from.

    Attributes:
        session: On the stored snapshot, stored outcomes folded in.
        notes: Of the stored turn: ``{"id", "row"?, "ask"?, "denied"?}`` by call id.
        message_id: The AIMessage that the stored turn belongs to.
        changed: Whether the chart is not as it was stored any more.
        fresh: Whether nothing was stored.
        scope: The thread, or what else rows are filed under.
        folded: Whether there were stored outcomes.
        rev: How many steps of the chart were stored.
    """

    session: StoredSession
    notes: dict[str, Note]
    message_id: str | None
    changed: bool
    fresh: bool
    scope: str | None
    folded: bool
    rev: int

    @property
    def moved(self) -> bool:
        """Whether the chart is not where the stored snapshot has it, or nothing is stored."""
        return self.fresh or self.folded or self.session.snapshot.rev != self.rev


class Door:
    """Chart, tools and settings of one door; see the doors for the arguments."""

    def __init__(
        self,
        name: str,
        machine: Any,
        tools: Iterable[Any],
        *,
        ledger: Any = None,
        side_effects: Iterable[str] = (),
        outputs: Iterable[str] = (),
        scope: str | Callable[[Any], str] | None = None,
        seal: Seal | None = None,
        positional: Positional = "refuse",
        interrupt_payload: Show = "full",
        max_tool_calls: int = DEFAULT_MAX_TOOL_CALLS,
        human_timeout_s: float | None = 86_400.0,
        approval_ttl_s: float = 3600.0,
        max_output_chars: int = DEFAULT_MAX_OUTPUT_CHARS,
        state_key: str = "xsm",
        messages_key: str = "messages",
        now: Callable[[], float] | None = None,
    ) -> None:
        if positional not in ("refuse", "accept"):
            raise AgentConfigError(f'{name}: positional is "refuse" or "accept"')
        if interrupt_payload not in SHOWN:
            raise AgentConfigError(f'{name}: interrupt_payload is "full" or "ids"')
        self.name = name
        self.machine = _machine(machine)
        self.state_key = state_key
        self.messages_key = messages_key
        self.events_key = f"{state_key}_events"
        self.seal = seal
        self.positional = positional
        self.interrupt_payload = interrupt_payload
        self.outputs = frozenset(outputs)
        self.provider_tools: dict[str, dict[str, Any]] = {}
        self.tools: dict[str, BaseTool] = {}
        self.registry = self._register(tools, frozenset(side_effects), max_output_chars)
        self._recent: dict[int, tuple[Any, str | None, Snapshot]] = {}
        self._recent_lock = threading.Lock()
        self._scope = scope
        self._ledger = ledger
        self._now = now
        self._options: dict[str, Any] = {
            "now": now,
            "max_tool_calls": max_tool_calls,
            "human_timeout_s": human_timeout_s,
            "approval_ttl_s": approval_ttl_s,
        }
        self._check_outputs()
        # Wrong wiring is told when the door is built: unknown names, services, actions that fail.
        snapshot = self._start("check")
        StoredSession(self.machine, self.registry, scope="", snapshot=snapshot, **self._options)
        self._chart = PolicyChart(self.machine, snapshot, input=None, now=0)

    def _register(
        self, tools: Iterable[Any], side_effects: frozenset[str], max_output_chars: int
    ) -> ToolRegistry:
        made: list[Tool] = []
        for item in tools:
            if isinstance(item, Mapping):
                made.append(self._provider_tool(dict(item)))
                continue
            if isinstance(item, Tool):
                theirs, own = tool_of(item), item
                if theirs is None:
                    raise AgentConfigError(
                        f"{self.name}: tool {item.name!r} is no LangChain tool; pass the function, "
                        "or tool(<LangChain tool>)"
                    )
                if theirs.name != own.name:
                    raise AgentConfigError(
                        f"{self.name}: {own.name!r} is {theirs.name!r} to LangChain; use one name"
                    )
            else:
                theirs = item if isinstance(item, BaseTool) else langchain_tool(item)
                own = as_tool(theirs, side_effect=True if theirs.name in side_effects else None)
            self.tools[theirs.name] = theirs
            made.append(own)
        unknown = sorted(side_effects - self.tools.keys())
        if unknown:
            raise AgentConfigError(f"{self.name}: side_effects names {unknown[0]!r}, no tool of it")
        return tool_registry(*made, max_output_chars=max_output_chars)

    def _provider_tool(self, item: dict[str, Any]) -> Tool:
        function = item.get("function")
        name = item.get("name") or (function or {}).get("name") or item.get("type")
        if not isinstance(name, str):
            raise AgentConfigError(f"{self.name}: a provider's tool needs a name or a type")
        self.provider_tools[name] = item

        def at_the_provider() -> str:
            raise AgentConfigError("a provider's tool runs at the provider")

        return tool_registry(_named(at_the_provider, name)).get(name)  # type: ignore[return-value]

    def _check_outputs(self) -> None:
        for node in self.machine.nodes.values():
            wanted = (node.meta or {}).get("outputs")
            if isinstance(wanted, list | tuple) and self.outputs:
                for each in wanted:
                    if each != "*" and each not in self.outputs:
                        raise AgentConfigError(
                            f"{self.name}: state {node.id!r}: meta.outputs lists {each!r}, which "
                            "is not in outputs="
                        )

    def may_ask(self) -> bool:
        """Whether any call can come to need a person."""
        return any(tool.side_effect or tool.requires_approval for tool in self.registry)

    def may_move(self) -> bool:
        """Whether the outcome of any call can move the chart."""
        return self._chart.hears_tools()

    # State

    def _ms(self) -> float:
        return time.time() * 1000.0 if self._now is None else self._now()

    def _start(self, run: str) -> Snapshot:
        snapshot, effects, receipt = initial_step(self.machine, None, now=self._ms())
        if receipt.error is not None:
            raise receipt.error
        if effects and any(type(each).__name__ == "StartService" for each in effects):
            raise AgentConfigError(
                f"{self.name}: the chart invokes a service; a door's chart is a policy, the "
                "framework's loop is the agent"
            )
        return snapshot.replace(run=run)

    def ledger(self) -> Any:
        """The ledger; one that is found beside an async saver must have been found before."""
        given: Any = default_ledger() if self._ledger is None else self._ledger
        return given.resolve() if hasattr(type(given), "aresolve") else given

    async def aledger(self) -> Any:
        """The ledger, looked up on the saver's own loop where it has to be."""
        given: Any = default_ledger() if self._ledger is None else self._ledger
        return await given.aresolve() if hasattr(type(given), "aresolve") else given

    def open(self, state: Any, runtime: Any) -> Opened:
        """Make the session of this conversation from graph state.

        Raises:
            SnapshotTamperedError: A seal is asked for and does not fit; nothing is kept.
            SnapshotError: The stored snapshot is not one of this chart.
            AgentConfigError: A durable ledger or a seal, and no thread to file calls under.
        """
        return self._opened(self.ledger(), state, runtime)

    async def aopen(self, state: Any, runtime: Any) -> Opened:
        """Do what `open` does, from a running loop."""
        ledger = await self.aledger()
        return await in_thread(ledger, lambda: self._opened(ledger, state, runtime))

    def _opened(self, ledger: Any, state: Any, runtime: Any) -> Opened:
        scope = self._scope_of(state, runtime)
        if scope is None and (ledger.durable or self.seal is not None):
            raise AgentConfigError(
                f"{self.name}: a durable ledger or a seal needs to know the thread; compile with "
                "a checkpointer and pass a thread_id, or pass scope="
            )
        entry = _read(state, self.state_key)
        turn: Mapping[str, Any] = {}
        if not entry:
            snapshot = self._start(_run_of(runtime))
        else:
            snapshot = self._loaded(entry, scope)
            turn = entry.get("turn") or {}
        # Its tools were checked against the chart when this door was built.
        chart = self._chart.at(snapshot)
        session = StoredSession(
            self.machine, self.registry, ledger, scope, _chart=chart, **self._options
        )
        events = _read(state, self.events_key)
        changed = session.fold(self._genuine(events, scope)) if events else False
        return Opened(
            session,
            _notes(turn),
            turn.get("id") if isinstance(turn, Mapping) else None,
            changed,
            not entry,
            scope,
            bool(events),
            snapshot.rev,
        )

    def written(
        self, opened: Opened, notes: Sequence[Note] = (), message_id: str | None = None
    ) -> dict[str, Any]:
        """Return what is stored under the state key: the snapshot, and the open turn's notes."""
        snapshot = opened.session.snapshot
        data = dump(snapshot)
        if notes:
            data["turn"] = {"id": message_id, "calls": list(notes)}
        if self.seal is not None:
            thread = opened.scope or ""
            data["seal"] = self.seal.sign(data, thread=thread, machine=self.machine.id)
        self._remember(data, opened.scope, snapshot)
        return data

    def _loaded(self, entry: Any, scope: str | None) -> Snapshot:
        """The snapshot of a stored entry.

        Within one run LangGraph hands the very object that was written to the next hooks; it
        need not be read again. Nobody but this process has had it.
        """
        known = self._recent.get(id(entry))
        if known is not None and known[0] is entry and known[1] == scope:
            return known[2]
        data = dict(entry)
        self._check_seal(data, scope)
        data.pop("turn", None)
        return load(self.machine, data)

    def _remember(self, data: dict[str, Any], scope: str | None, snapshot: Snapshot) -> None:
        with self._recent_lock:
            while len(self._recent) >= _RECENT:
                del self._recent[next(iter(self._recent))]
            self._recent[id(data)] = (data, scope, snapshot)

    def settled_turn(self, state: Any, message: AIMessage) -> bool:
        """Whether the stored notes leave nothing to answer or ask about in this turn.

        A hint that spares a look: whether a call may run is judged again when it runs.
        """
        entry = _read(state, self.state_key)
        turn = entry.get("turn") if isinstance(entry, dict) else None
        if not isinstance(turn, Mapping) or turn.get("id") != message.id:
            # A lone call that has no row and was not refused leaves no notes.
            calls = calls_of(message)
            return len(calls) == 1 and rowless(self.registry, calls[0])
        notes = _notes(turn)
        return all(
            (note := notes.get(call["id"] or "")) is not None and note.keys() == {"id"}
            for call in message.tool_calls
        )

    def signed(self, events: list[dict[str, Any]], scope: str) -> list[dict[str, Any]]:
        """Return outcomes as they are stored: with a seal, each under its own signature."""
        if self.seal is None:
            return events
        marks = {"thread": scope, "machine": self.machine.id, "purpose": "outcome"}
        return [{**each, "seal": self.seal.sign(each, **marks)} for each in events]

    def _genuine(self, events: Any, scope: str | None) -> list[Any]:
        found = [each for each in events if isinstance(each, Mapping)]
        if self.seal is None:
            return found
        marks = {"thread": scope or "", "machine": self.machine.id, "purpose": "outcome"}
        genuine = []
        for each in found:
            bare = {key: value for key, value in each.items() if key != "seal"}
            if self.seal.fits(each.get("seal"), bare, **marks):
                genuine.append(bare)
        return genuine

    def _check_seal(self, data: dict[str, Any], scope: str | None) -> None:
        mark = data.pop("seal", None)
        if self.seal is None:
            return
        if not self.seal.fits(mark, data, thread=scope or "", machine=self.machine.id):
            raise SnapshotTamperedError(
                f"state[{self.state_key!r}]: the snapshot's seal is missing or does not fit; "
                "nothing of it was kept"
            )

    def _scope_of(self, state: Any, runtime: Any) -> str | None:
        scope = self._scope(state) if callable(self._scope) else self._scope
        if scope is None:
            thread = _thread(runtime)
            return None if thread is None else str(thread)
        if not isinstance(scope, str) or not scope:
            raise AgentConfigError(f"{self.name}: scope= must give a text that is not empty")
        return scope

    # What the chart says of outputs

    def output_allowed(self, opened: Opened, name: str) -> bool:
        """Return whether the state wants this output; none is wanted once the chart has ended."""
        session = opened.session
        return session.snapshot.status == "active" and session.wants(name)


def _machine(machine: Any) -> Machine:
    made = machine if isinstance(machine, Machine) else None
    if made is None:
        if not isinstance(machine, Mapping | str | Path):
            raise AgentConfigError(f"expected a chart or a machine, not {type(machine).__name__}")
        made = create_machine(machine)
    made.require_bound()
    return made


def _named(fn: Callable[[], str], name: str) -> Tool:
    from guardchart.gate import tool

    return tool(fn, name=name, description="runs at the provider")


def _read(state: Any, key: str) -> Any:
    if isinstance(state, (dict, Mapping)):  # a dict is told at once, without the ABC
        return state.get(key)
    return getattr(state, key, None)


def _notes(turn: Any) -> dict[str, Note]:
    calls = turn.get("calls") if turn and isinstance(turn, Mapping) else None
    if not isinstance(calls, list | tuple):
        return {}
    return {
        each["id"]: dict(each)
        for each in calls
        if isinstance(each, Mapping) and isinstance(each.get("id"), str)
    }


def _info(runtime: Any) -> Any:
    return getattr(runtime, "execution_info", None)


def _thread(runtime: Any) -> Any:
    """The thread's id, from the runtime or, before LangGraph had one there, from the config."""
    thread = getattr(_info(runtime), "thread_id", None)
    if thread is not None:
        return thread
    config = getattr(runtime, "config", None)
    if config is None:
        from langgraph.config import get_config

        try:
            config = get_config()
        except RuntimeError:
            return None
    return (config.get("configurable") or {}).get("thread_id")


def _run_of(runtime: Any) -> str:
    """A nonce for a chart that starts now; the same again when LangGraph retries."""
    task = getattr(_info(runtime), "task_id", None)
    return str(task) if task else uuid.uuid4().hex


def appended(left: Any, right: Any) -> list[Any]:
    """Add outcomes to those that are stored: the reducer of the doors' channel."""
    return [*(left or ()), *(right or ())]


# Messages


def as_call(call: Mapping[str, Any]) -> ToolCall:
    """Return LangChain's tool call as the gate's."""
    ident, args = call.get("id"), call.get("args")
    return ToolCall(
        ident if isinstance(ident, str) else "",
        call.get("name") or "",
        args if isinstance(args, dict) else {},
    )


def calls_of(message: AIMessage | None) -> list[ToolCall]:
    """Return the calls of an answer."""
    return [] if message is None else [as_call(each) for each in message.tool_calls]


def turn_of(messages: Sequence[Any]) -> AIMessage | None:
    """Return the newest answer; with structured output it is not the last message."""
    for message in reversed(messages):
        if isinstance(message, AIMessage):
            return message
    return None
