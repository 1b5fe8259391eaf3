"""``AgentTracePlugin``: what agents did and what it cost, one record a step."""

from __future__ import annotations

import hashlib
import os
import re
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from guardchart.agents import _trace_records as records
from guardchart.agents._budgets import MAX_COST_USD, MAX_COUNT
from guardchart.agents._models import Usage
from guardchart.errors import AgentConfigError
from guardchart.kernel import Event
from guardchart.runtime import ServiceScope
from guardchart.runtime._sinks import Outlet

__all__ = ["AgentTracePlugin"]

_HEX: Final = re.compile(r"[0-9a-f]{32}")
_OPERATIONS: Final = {
    "model_call": "chat",
    "tool_call": "execute_tool",
    "tool_denied": "execute_tool",
}
_AGENT: Final = "invoke_agent"

Record = dict[str, Any]


@dataclass(eq=False)
class _Agent:
    """One machine under observation: its place in the tree, and what it used."""

    id: str
    parent_id: str | None
    run: str
    trace_id: str
    span_id: str
    parent_span_id: str | None
    conversation: str | None
    started: float
    event: str | None = None
    span: Any = None
    used: dict[str, Any] = field(default_factory=lambda: _nothing())


def _nothing() -> dict[str, Any]:
    return {"turns": 0, "input_tokens": 0, "output_tokens": 0, "cost_usd": 0.0}


def _add(row: dict[str, Any], usage: Usage, turns: int) -> None:
    row["turns"] = min(row["turns"] + turns, MAX_COUNT)
    row["input_tokens"] = min(row["input_tokens"] + usage.input_tokens, MAX_COUNT)
    row["output_tokens"] = min(row["output_tokens"] + usage.output_tokens, MAX_COUNT)
    row["cost_usd"] = min(row["cost_usd"] + usage.cost_usd, MAX_COST_USD)


class AgentTracePlugin:
    """Traces agents: a JSON line for each model call, tool call and transition, and the totals.

    Attach it to an interpreter (``plugins=[trace]``, ``interpreter.use(trace)``): child machines
    are traced with it. Passed as ``tracer=trace`` to ``agent_logic`` alone it sees model and
    tool calls only; with both, each is written once.

    Every record has ``ts`` (epoch seconds), ``kind``, ``gen_ai.operation.name``, ``trace_id``,
    ``span_id``, ``agent_id``, ``parent_id`` (the agent's parent) and ``state``. The kinds are
    ``agent_start``, ``transition``, ``model_call``, ``tool_call``, ``tool_denied``, ``budget``
    and ``agent_end``; docs/tracing.md lists their fields. A run that goes on from a snapshot
    keeps its ``trace_id``.

    By default a record holds names, states, counts and cost, and nothing that anybody said.
    Secrets are masked in what it holds either way.

    Args:
        sink: Where records go: a path (JSON lines, appended), a text stream, a callable, an
            object with ``send``; None keeps them in ``records`` only.
        record_content: Also record messages, arguments and results, masked and bounded.
        on_span: A callable that is given each record, or ``"otel"`` for real OpenTelemetry spans.
        clock: ``() -> float``, epoch seconds, for ``ts`` and durations.
        tracer_provider: With ``on_span="otel"``, the provider; the global one by default.
        max_records: How many of the newest records stay in ``records``.
        max_agents: How many agents ``totals()`` tells apart; of more, those that have been
            quiet longest are left out of ``agents``, and stay in ``total``.

    Raises:
        AgentConfigError: ``on_span`` is neither callable nor ``"otel"``, or a bound is below 1.
        MissingExtraError: ``"otel"`` without OpenTelemetry.
        OSError: The file of ``sink`` cannot be opened.

    Source: xstate-statemachine, agents reference: AgentTracePlugin; OpenTelemetry semantic
        conventions for generative AI.

    Example:
        >>> from guardchart.agents import AgentTracePlugin, FakeModel, run_agent_sync
        >>> trace = AgentTracePlugin()
        >>> model = FakeModel([{"text": "hi", "usage": {"input_tokens": 9}}], is_async=False)
        >>> done = run_agent_sync(model, prompt="hello", plugins=[trace])
        >>> [record["kind"] for record in trace.records if record["kind"] != "transition"]
        ['agent_start', 'model_call', 'agent_end']
        >>> trace.totals()["agents"]
        {'toolLoop': {'turns': 1, 'input_tokens': 9, 'output_tokens': 0, 'cost_usd': 0.0}}
    """

    def __init__(
        self,
        sink: Any = None,
        *,
        record_content: bool = False,
        on_span: Callable[[Record], Any] | Literal["otel"] | None = None,
        clock: Callable[[], float] | None = None,
        tracer_provider: Any = None,
        max_records: int = 1_000,
        max_agents: int = 10_000,
    ) -> None:
        for name, bound in (("max_records", max_records), ("max_agents", max_agents)):
            if type(bound) is not int or bound < 1:
                raise AgentConfigError(f"AgentTracePlugin: {name} must be an int of at least 1")
        self.record_content = bool(record_content)
        self._records: deque[Record] = deque(maxlen=max_records)
        self._spans: Any = None
        if on_span == "otel":
            from guardchart.agents._otel import OtelSpans

            self._spans = OtelSpans(tracer_provider)
            on_span = None
        elif on_span is not None and not callable(on_span):
            raise AgentConfigError('AgentTracePlugin: on_span is a callable, "otel" or None')
        elif tracer_provider is not None:
            raise AgentConfigError('AgentTracePlugin: tracer_provider= needs on_span="otel"')
        self._outlets = (Outlet(sink), Outlet(on_span))
        self._now = clock if clock is not None else time.time
        self._tick = clock if clock is not None else time.perf_counter
        self._max_agents = max_agents
        self._lock = threading.RLock()
        self._agents: weakref.WeakKeyDictionary[Any, _Agent] = weakref.WeakKeyDictionary()
        self._rows: OrderedDict[str, dict[str, Any]] = OrderedDict()
        self._total = _nothing()

    @property
    def records(self) -> list[Record]:
        """The newest records, oldest first; a new list each time."""
        with self._lock:
            return list(self._records)

    @property
    def lost(self) -> int:
        """How many records the sink or ``on_span`` raised at."""
        return sum(outlet.lost for outlet in self._outlets)

    def totals(self) -> dict[str, Any]:
        """What was used, per agent and in all.

        Returns:
            ``{"agents": {agent_id: row}, "total": row}``, a row being ``{"turns",
            "input_tokens", "output_tokens", "cost_usd"}``. An agent that asked no model has no
            row. A failed call is a turn.

        Source: xstate-statemachine, agents reference: AgentTracePlugin, Operations.
        """
        with self._lock:
            agents = {agent_id: dict(row) for agent_id, row in self._rows.items()}
            return {"agents": agents, "total": dict(self._total)}

    def close(self) -> None:
        """Close the file of a ``sink`` that was given as a path."""
        for outlet in self._outlets:
            outlet.close()

    def record(self, interpreter: Any, kind: str, **fields: Any) -> Record:
        """Write a record of your own kind, e.g. of a service that asks a model by itself.

        Args:
            interpreter: The machine it belongs to.
            kind: The record's kind.
            **fields: More fields; secrets are masked, long texts cut.

        Returns:
            The record as written.
        """
        agent = self._agent(interpreter)
        clean: Record = records.bounded(fields)
        return self._write(interpreter, agent, kind, agent.span_id, clean)

    # Records

    def _write(
        self, interpreter: Any, agent: _Agent, kind: str, span_id: str, fields: Mapping[str, Any]
    ) -> Record:
        record: Record = {
            "ts": self._now(),
            "kind": kind,
            "gen_ai.operation.name": _OPERATIONS.get(kind, _AGENT),
            "trace_id": agent.trace_id,
            "span_id": span_id,
            "agent_id": agent.id,
            "parent_id": agent.parent_id,
            "state": sorted(interpreter.current_state_ids),
        }
        parent = agent.parent_span_id if span_id == agent.span_id else agent.span_id
        if parent is not None:
            record["parent_span_id"] = parent
        if agent.conversation is not None:
            record["gen_ai.conversation.id"] = agent.conversation
        record.update(fields)
        with self._lock:
            self._records.append(record)
            for outlet in self._outlets:
                outlet(record)
        return record

    def _agent(self, interpreter: Any) -> _Agent:
        with self._lock:
            known = self._agents.get(interpreter)
            if known is None:
                known = self._agents[interpreter] = self._met(interpreter)
            return known

    def _met(self, interpreter: Any) -> _Agent:
        parent = interpreter.parent
        above = None if parent is None else self._agent(parent)
        host = interpreter.host
        run = _trace_id(host.run) if above is None else above.run
        return _Agent(
            id=records.named(interpreter.id) or "",
            parent_id=None if above is None else above.id,
            run=run,
            trace_id=run if above is None else above.trace_id,
            span_id=os.urandom(8).hex(),
            parent_span_id=None if above is None else above.span_id,
            conversation=records.named(host.scope) if host.scope != host.run else None,
            started=self._tick(),
        )

    # Hooks

    def on_interpreter_start(self, interpreter: Any) -> None:
        """``agent_start``."""
        agent = self._agent(interpreter)
        if self._spans is not None:
            parent = interpreter.parent
            self._spans.start_agent(agent, None if parent is None else self._agent(parent))
        self._write(interpreter, agent, "agent_start", agent.span_id, {})

    def on_event_received(self, interpreter: Any, event: Event) -> None:
        """``tool_denied`` for each call of a model's turn that the gate refused."""
        agent = self._agent(interpreter)
        agent.event = records.named(event.type)
        for denied in records.denials(getattr(event, "data", None)):
            self._write(interpreter, agent, "tool_denied", agent.span_id, denied)

    def on_transition(self, interpreter: Any, from_ids: Any, to_ids: Any, taken: Any) -> None:
        """``transition``: from which states, by which event, and how the run goes."""
        agent = self._agent(interpreter)
        fields = {
            "event": agent.event or "xstate.init",
            "from": sorted(from_ids),
            **records.run_facts(interpreter.context),
        }
        self._write(interpreter, agent, "transition", agent.span_id, fields)
        if agent.span is not None:
            self._spans.note(agent, "transition", {**fields, "to": sorted(to_ids)})

    def on_context(self, interpreter: Any, updates: Mapping[str, Any]) -> None:
        """``budget``, when the budget of a tree is used up."""
        if updates.get("budget_exceeded") is True:
            agent = self._agent(interpreter)
            self._write(
                interpreter, agent, "budget", agent.span_id, records.run_facts(interpreter.context)
            )

    def on_interpreter_stop(self, interpreter: Any) -> None:
        """``agent_end``: how the machine ended or was stopped, and what it used."""
        agent = self._agent(interpreter)
        fields: Record = {
            "status": interpreter.status,
            "duration_s": self._since(agent.started),
            **records.run_facts(interpreter.context),
            "usage": dict(agent.used),
        }
        if interpreter.status == "error":
            fields["error.type"] = _class_name(interpreter.error)
        self._write(interpreter, agent, "agent_end", agent.span_id, fields)
        if agent.span is not None:
            self._spans.end_agent(agent, fields)
        with self._lock:
            self._agents.pop(interpreter, None)

    # Calls

    def begin_model_call(
        self, scope: ServiceScope, model: Any, messages: Sequence[Any], tools: Sequence[Any]
    ) -> Callable[[Any, BaseException | None], None]:
        """``model_call``, written when the call ends; see `Tracer`."""
        asked = records.model_request(model)
        if self.record_content:
            asked.update(records.request_content(messages))
        call = _Call(self, scope, "model_call", asked)
        self._count(call.agent, Usage(), turns=1)

        def end(result: Any, error: BaseException | None) -> None:
            usage = records.reported(error if result is None else result)
            self._count(call.agent, usage, turns=0)
            fields: Record = {
                "gen_ai.usage.input_tokens": usage.input_tokens,
                "gen_ai.usage.output_tokens": usage.output_tokens,
                "cost_usd": usage.cost_usd,
            }
            if result is not None:
                fields.update(records.model_result(result))
                if self.record_content:
                    fields.update(records.response_content(result))
            call.end("model_call", fields, error)

        return end

    def begin_tool_call(
        self, scope: ServiceScope, call: Any, tool: Any
    ) -> Callable[[Any, BaseException | None], None]:
        """``tool_call``, or ``tool_denied``, written when the call ends; see `Tracer`."""
        asked = records.tool_request(call)
        if self.record_content:
            asked["gen_ai.tool.call.arguments"] = records.bounded(call.arguments)
        running = _Call(self, scope, "tool_call", asked)

        def end(outcome: Any, error: BaseException | None) -> None:
            fields: Record = {}
            if outcome is not None:
                fields = records.tool_result(outcome)
                if self.record_content:
                    fields["gen_ai.tool.call.result"] = records.bounded(outcome.text)
            denied = fields.get("outcome") in ("denied", "tampered")
            running.end("tool_denied" if denied else "tool_call", fields, error)

        return end

    def _count(self, agent: _Agent, usage: Usage, *, turns: int) -> None:
        with self._lock:
            row = self._rows.get(agent.id)
            if row is None:
                row = self._rows[agent.id] = _nothing()
                if len(self._rows) > self._max_agents:
                    self._rows.popitem(last=False)
            self._rows.move_to_end(agent.id)
            for each in (row, self._total, agent.used):
                _add(each, usage, turns)

    def _since(self, start: float) -> float:
        return round(max(0.0, self._tick() - start), 6)


class _Call:
    """A call that is going on, as the machine that made it was when it began."""

    def __init__(self, trace: AgentTracePlugin, scope: ServiceScope, kind: str, asked: Record):
        self.trace = trace
        self.scope = scope
        self.asked = asked
        self.agent = trace._agent(scope.interpreter)
        self.started = trace._tick()
        self.span_id = os.urandom(8).hex()
        self.span: Any = None
        if trace._spans is not None:
            self.span = trace._spans.start_call(self.agent, kind, asked)
            self.span_id = self.span.id or self.span_id

    def end(self, kind: str, fields: Record, error: BaseException | None) -> None:
        """Write the record, and close the span."""
        if error is not None:
            fields = {"error.type": type(error).__name__, **fields}
        fields["duration_s"] = self.trace._since(self.started)
        if not self.scope.active:
            fields["late"] = True
        if self.span is not None:
            self.trace._spans.end_call(self.span, fields)
        if self.span is not None and self.span.trace_id is not None:
            fields["trace_id"] = self.span.trace_id
        interpreter = self.scope.interpreter
        self.trace._write(interpreter, self.agent, kind, self.span_id, {**self.asked, **fields})


def _class_name(error: Any) -> str:
    named = error.get("name") if isinstance(error, Mapping) else type(error).__name__
    return records.named(named) or "Error"


def _trace_id(run: str) -> str:
    """The run's nonce where it has the form of a trace id, so that a resumed run keeps its own."""
    return run if _HEX.fullmatch(run) else hashlib.sha256(run.encode()).hexdigest()[:32]
