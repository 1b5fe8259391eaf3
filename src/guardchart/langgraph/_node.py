"""``statechart_node``: a chart as one node of a LangGraph graph."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from langchain_core.runnables import Runnable, RunnableConfig

from guardchart.agents import validate_agent_chart
from guardchart.agents._multi import spawned_agents
from guardchart.errors import AgentConfigError
from guardchart.langgraph._chart import as_machine
from guardchart.langgraph._ledger import DeferredLedger
from guardchart.langgraph._update import close
from guardchart.langgraph._view import StatechartView
from guardchart.langgraph._visit import Settings, Visit
from guardchart.runtime import Interpreter, SyncInterpreter

if TYPE_CHECKING:
    from guardchart.agents import RetryPolicy
    from guardchart.gate import Seal
    from guardchart.kernel import Machine
    from guardchart.persistence import Ledger
    from guardchart.runtime import Clock, MachineLogic

__all__ = ["StatechartNode", "statechart_node"]


class StatechartNode(Runnable[Any, Any]):
    """A chart as a LangGraph node; made by `statechart_node`.

    A ``Runnable`` of its own, so that LangGraph opens no trace run beside the node's, and
    callable, so that it works without a graph: ``node(state)`` gives the update.
    """

    def __init__(self, settings: Settings) -> None:
        self.name = settings.machine.id
        self._settings = settings

    @property
    def machine(self) -> Machine:
        """The machine the node runs."""
        return self._settings.machine

    def __call__(self, input: Any, config: RunnableConfig | None = None) -> Any:
        return self.invoke(input, config)

    def invoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        """Run the chart on a graph state and return the update; async services run too."""
        settings = self._settings
        visit = Visit(settings, input, config)
        ledger = settings.ledger
        if isinstance(ledger, DeferredLedger):
            ledger = ledger.resolve()
        visit.check_ledger(ledger)
        visit.load()
        interpreter = _make(SyncInterpreter, visit, visit.options(False, ledger), allow_async=True)
        # Deadlines are this call's to serve: no alarm may move a machine that has been written.
        interpreter.manual_timers = True
        try:
            interpreter.start()
            visit.started(interpreter)
            if visit.snapshot is not None:
                rev = interpreter.snapshot.rev
                if not visit.own:
                    interpreter.fail_interrupted()
                interpreter.fire_overdue()
                if interpreter.snapshot.rev != rev:
                    interpreter.settle(settings.serve_delay_s, **settings.settling)
            receipt = None if visit.event is None else interpreter.send(visit.event)
            interpreter.settle(settings.serve_delay_s, **settings.settling)
            return close(visit, interpreter, receipt)
        finally:
            interpreter.stop()

    async def ainvoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        """As `invoke`, on the running loop; sync services run on worker threads."""
        settings = self._settings
        visit = Visit(settings, input, config)
        ledger = settings.ledger
        if isinstance(ledger, DeferredLedger):
            ledger = await ledger.aresolve()
        visit.check_ledger(ledger)
        visit.load()
        interpreter = _make(Interpreter, visit, visit.options(True, ledger))
        interpreter.mixed = True
        try:
            interpreter.start()
            visit.started(interpreter)
            if visit.snapshot is not None:
                rev = interpreter.snapshot.rev
                if not visit.own:
                    interpreter.fail_interrupted()
                interpreter.fire_overdue()
                if interpreter.snapshot.rev != rev or interpreter.busy:
                    await interpreter.settle(settings.serve_delay_s, **settings.settling)
            receipt = None
            if visit.event is not None:
                receipt = await interpreter.send(visit.event, wait=True)
            await interpreter.settle(settings.serve_delay_s, **settings.settling)
            return close(visit, interpreter, receipt)
        finally:
            interpreter.stop()


def _make(engine: Any, visit: Visit, options: dict[str, Any], **more: Any) -> Any:
    machine = visit.settings.machine
    if visit.snapshot is None:
        return engine(machine, **options, **more)
    return engine.from_snapshot(
        visit.snapshot, machine, restart_services=visit.own, adopt_children=True, **options, **more
    )


def statechart_node(
    machine: Machine | Mapping[str, Any] | str | Path,
    logic: MachineLogic | None = None,
    *,
    state_key: str = "xsm",
    event_from_state: Callable[..., Any],
    result_to_state: Callable[[StatechartView, Any], Any] | None = None,
    event_key: str | None = None,
    messages_key: str | None = None,
    ledger: Ledger | None = None,
    seal: Seal | None = None,
    signed_approvals: bool = False,
    plugins: Iterable[Any] = (),
    on_wait: Literal["rest", "interrupt"] = "rest",
    scope: str | Callable[[Any], str] | None = None,
    multi_turn: bool = False,
    serve_delay_s: float = 30.0,
    clock: Clock | None = None,
) -> StatechartNode:
    """Make a chart a LangGraph node: restore it from the graph state, send one event, write back.

    Every call takes the snapshot under ``state_key`` (or starts the machine), fires deadlines
    that have passed, sends the event, runs services to quiet, serves short delays, and writes
    the new snapshot as plain JSON, with the event's receipt under ``"receipt"``. Whatever
    checkpointer the graph has keeps it. Without an event and without a change, nothing is
    written.

    Args:
        machine: The chart as a dict, JSON text or path, bound to ``logic``; or a built machine,
            which carries its logic.
        logic: Callables of the chart.
        state_key: Where the snapshot is kept in the graph state (a dict, a pydantic model or a
            dataclass). The state's schema must declare it.
        event_from_state: ``(state)`` or ``(state, runtime)``, giving the event to send: an
            ``Event``, a dict with ``"type"``, a type, or None to only re-enter.
        result_to_state: ``(machine view, state)``, giving further updates as a dict, or a
            ``Command``, whose ``goto`` adds to what the router decides.
        event_key: The state entry the event is read from. It is set to None once the event is
            consumed, so that it is never sent twice.
        messages_key: The message channel (``Annotated[list, add_messages]``) that holds the
            conversation, in place of the snapshot. Only new messages are written.
        ledger: Where approvals and claims of tool calls are kept; see `ledger_for`. By default
            the process's own in-memory ledger.
        seal: Signs the snapshot, so that an edited one is refused. A TOOL_LOOP then ends in
            ``error``, kind ``tampered``, on a fresh context; any other chart raises.
        signed_approvals: With ``seal``: refuse a decision (``HUMAN_...``) that was not signed
            with the same key.
        plugins: Observers of the interpreter. One with ``bind_invocation(config, *, is_async)``
            is replaced by what that returns, for this invocation.
        on_wait: What happens when the node is entered while the chart waits for somebody:
            ``"rest"`` returns to the graph; ``"interrupt"`` asks by LangGraph's ``interrupt()``
            and sends the answer, an event. Route the waiting state back to the node then.
        scope: What tool calls are filed under in the ledger, a text or ``(state) -> text``; the
            thread's id by default.
        multi_turn: Whether ``START`` on a finished TOOL_LOOP begins the next turn. ``event_key``
            has the same effect.
        serve_delay_s: The longest delay of the chart, in seconds, that is waited for inside the
            node. A longer one rests, with its deadline in the snapshot.
        clock: Where the time comes from.

    Returns:
        The node, for ``add_node``. It also works without a graph: ``node(state)``.

    Raises:
        AgentConfigError: A built machine together with ``logic``; keys that collide; a state
            whose ``meta.tools`` names a tool that is not registered; spawned agents whose tools
            ask for approval, without ``seal``; a retry
            delay of a TOOL_LOOP beyond ``serve_delay_s``, which would leave a thread in
            ``timed_out``. When called: a state that lacks a key, no event where one was
            promised, a durable ledger without a thread; the graph state is unchanged.
        ChartError: The chart is wrong, or its logic misses names.
        SnapshotError: When called: the snapshot is not one of this machine, or was changed.

    Example:
        >>> chart = {"id": "door", "initial": "shut", "states": {
        ...     "shut": {"on": {"OPEN": "open"}}, "open": {}}}
        >>> node = statechart_node(chart, event_from_state=lambda state: state["event"])
        >>> node({"event": "OPEN"})["xsm"]["value"]
        'open'
    """
    built = as_machine(machine, logic, caller="statechart_node")
    built.require_bound()
    _check_keys(state_key=state_key, event_key=event_key, messages_key=messages_key)
    if on_wait not in ("rest", "interrupt"):
        raise AgentConfigError('statechart_node: on_wait is "rest" or "interrupt"')
    _check_callables(event_from_state=event_from_state, result_to_state=result_to_state)
    if not isinstance(serve_delay_s, int | float) or not 0 <= serve_delay_s < float("inf"):
        raise AgentConfigError("statechart_node: serve_delay_s must be a number of seconds")
    if signed_approvals and seal is None:
        raise AgentConfigError("statechart_node: signed_approvals=True needs seal=")
    if messages_key is not None and not isinstance(built.context.get("messages"), list | tuple):
        raise AgentConfigError(
            f"statechart_node: messages_key needs a chart whose context declares 'messages': []; "
            f"{built.id!r} does not"
        )
    agent = getattr(built.logic, "attachments", {}).get("agent")
    if agent is not None:
        validate_agent_chart(built)
        _check_retry(agent.retry, serve_delay_s)
        ledger = agent.ledger if ledger is None else ledger
    spawned = spawned_agents(built.logic)
    _check_spawned(spawned, seal, serve_delay_s)
    return StatechartNode(
        Settings(
            machine=built,
            state_key=state_key,
            event_from_state=event_from_state,
            takes_runtime=_takes_runtime(event_from_state),
            result_to_state=result_to_state,
            event_key=event_key,
            messages_key=messages_key,
            ledger=ledger,
            seal=seal,
            signed_approvals=signed_approvals,
            plugins=tuple(plugins),
            interrupts=on_wait == "interrupt",
            scope=scope,
            clock=clock,
            serve_delay_s=serve_delay_s,
            multi_turn=multi_turn,
            agent=agent,
            spawns=bool(spawned),
        )
    )


def _check_keys(**keys: str | None) -> None:
    given = [key for key in keys.values() if key is not None]
    for name, key in keys.items():
        if key is not None and (not isinstance(key, str) or not key):
            raise AgentConfigError(f"statechart_node: {name} must be a text that is not empty")
    if len(set(given)) < len(given):
        raise AgentConfigError(
            "statechart_node: state_key, event_key and messages_key must be different entries"
        )


def _check_callables(**functions: Any) -> None:
    for name, function in functions.items():
        if function is None and name == "result_to_state":
            continue
        if not callable(function):
            raise AgentConfigError(f"statechart_node: {name} must be callable")
        if inspect.iscoroutinefunction(function):
            raise AgentConfigError(
                f"statechart_node: {name} must be a plain function; what it needs to await "
                "belongs into a node before or after this one, or into a service of the chart"
            )


def _check_retry(
    retry: RetryPolicy, serve_delay_s: float, *, caller: str = "statechart_node"
) -> None:
    """A delay the node does not wait for would leave a thread in ``timed_out``, unwoken."""
    delays = [retry.delay_ms(attempt) for attempt in range(1, min(retry.max_attempts, 999) + 1)]
    longest_s = max(delays, default=0) / 1000.0 * (1.0 + retry.jitter)
    longest_s = min(longest_s, retry.max_delay_s)
    if longest_s > serve_delay_s:
        raise AgentConfigError(
            f"{caller}: the retry delay can reach {longest_s:g} s, but the node waits at "
            f"most serve_delay_s={serve_delay_s:g}; a thread would rest in timed_out with nobody "
            "to wake it. Shorten the RetryPolicy or raise serve_delay_s"
        )


def _check_spawned(machines: Iterable[Machine], seal: Seal | None, serve_delay_s: float) -> None:
    """Spawned agents that will wait for a person have to be found again by a later call."""
    for machine in machines:
        agent = getattr(machine.logic, "attachments", {})["agent"]
        _check_retry(agent.retry, serve_delay_s)
        tools = [agent.registry.get(name) for name in agent.registry.names]
        if seal is None and any(each.side_effect or each.requires_approval for each in tools):
            raise AgentConfigError(
                "statechart_node: an agent that waits for an approval is kept in the snapshot as a "
                "spawned actor, which loads only from a sealed one; pass seal=Seal(key)"
            )


def _takes_runtime(function: Callable[..., Any]) -> bool:
    """Whether a second argument is wanted: one without a default, or named ``runtime``.

    A second parameter with a default is how closures bind a loop variable; it stays theirs.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return False
    places = [
        each
        for each in parameters
        if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
    ]
    return len(places) > 1 and (places[1].default is places[1].empty or places[1].name == "runtime")
