"""Several agents: spawning them, their reports, and who may hand work to whom.

An agent is a child machine of the chart that spawned it, with a model, tools and a budget of its
own. What it may do is bounded when it is spawned; what it wants a person to decide is asked, and
answered, under its own id; and whatever becomes of it, its parent gets exactly one report.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Literal

from guardchart.agents._actions import error_of, report_of
from guardchart.agents._budgets import Budget
from guardchart.agents._charts import TOOL_LOOP, validate_agent_chart
from guardchart.agents._loop import agent_logic
from guardchart.agents._models import ModelCall
from guardchart.errors import AgentConfigError, AgentError, ChartError, StepError
from guardchart.gate import ToolRegistry, allowed_tools, as_allowed
from guardchart.kernel import Event, Machine, StateNode, accepted_events, initial_transition
from guardchart.runtime import MachineLogic, create_machine

__all__ = ["check_budget_event_declared", "handoff_guard", "spawn_agent", "spawned_agents"]

_LOG = logging.getLogger("guardchart")
_MAX_ID: Final = 128
_EXCEEDED: Final = "BUDGET_EXCEEDED"


def spawn_agent(
    child_chart: Mapping[str, Any] | str | Path | None,
    model: ModelCall,
    tools: ToolRegistry | None = None,
    *,
    budget: Budget | Mapping[str, Any] | None,
    parent_tools: Any = None,
    name: str = "agent",
    task_key: str = "task",
    tracer: Any = None,
    logic: MachineLogic | None = None,
    **agent_logic_kw: Any,
) -> MachineLogic:
    """The logic by which a chart spawns agents: the action ``spawn<Name>``, to be merged in.

    Each time the action runs, it starts an agent on the ``task`` of its event, or else on
    ``context[task_key]``. The agent's id is the event's ``id``, or the name and a number that is
    never given twice. When it ends it sends its parent ``AGENT_DONE`` or ``AGENT_FAILED``, with
    ``{agent_id, usage, result, error}``; also where it ends by a fault (kind ``machine``).

    Args:
        child_chart: The agent's chart as a dict, JSON text or path; None for TOOL_LOOP. Some
            state of it has to run ``notifyParent``.
        model: The agent's model. A sync one needs ``SyncInterpreter``, an async one
            ``Interpreter``; hosts that take either kind (``run_agent``, ``statechart_node``,
            ``allow_async=True``) take either here.
        tools: The agent's tools; None for one that only talks.
        budget: The agent's own limits, never inherited: a `Budget` or a mapping of its fields.
        parent_tools: The names the parent allows, a registry, or ``"*"``. None leaves it to
            ``meta.tools`` of the spawning state alone; where neither says anything, an agent
            may have no tools.
        name: What agents of this kind are called; ``"worker"`` gives ``spawnWorker``.
        task_key: Where in the parent's context the task is, if the event has none.
        tracer: For trace plugins, as in ``agent_logic``.
        logic: What further names of ``child_chart`` mean.
        **agent_logic_kw: Options of ``agent_logic``.

    Returns:
        A ``MachineLogic``: the action, the agent's machine as the service ``name``, and the
        guard ``from<Name>``, true for a report of such an agent.

    Raises:
        AgentConfigError: No budget; tools that ``parent_tools`` lacks; a built machine, or a
            chart that never runs ``notifyParent``; what ``agent_logic`` refuses. The action
            raises it, too: no task, or one that is no text; tools that the spawning state lacks;
            an id that is malformed or in use; a model of the other engine; a strict chart that
            does not know ``BUDGET_EXCEEDED``. Nothing was spawned, and the chart's
            ``actionErrorPolicy`` applies.
        ChartError: The child chart is wrong.

    Source: xstate-statemachine, agents reference: spawn_agent.

    Example:
        >>> from guardchart import SyncInterpreter, create_machine
        >>> from guardchart.agents import FakeModel
        >>> desk = {"id": "desk", "initial": "open", "context": {"answers": []}, "states": {
        ...     "open": {"on": {"ASK": {"actions": "spawnClerk"},
        ...                     "AGENT_DONE": {"actions": "keep"}}}}}
        >>> def keep(context, event):
        ...     return {"answers": [*context["answers"], event.payload["result"]]}
        >>> clerk = spawn_agent(None, FakeModel([{"text": "At nine."}], is_async=False),
        ...                     budget={"max_turns": 2}, name="clerk")
        >>> machine = create_machine(desk, MachineLogic(actions={"keep": keep}).merge(clerk))
        >>> running = SyncInterpreter(machine).start()
        >>> running.send("ASK", task="When do you open?").status, running.context["answers"]
        ('taken', ['At nine.'])
    """
    caller = "spawn_agent"
    if isinstance(child_chart, Machine):
        raise AgentConfigError(
            f"{caller}: pass the child chart as a dict (or None for TOOL_LOOP); "
            "spawn_agent binds the agent's logic to it"
        )
    if budget is None:
        raise AgentConfigError(
            f"{caller} requires an explicit budget=: an agent never inherits its parent's"
        )
    if not isinstance(name, str) or not name.isidentifier():
        raise AgentConfigError(f"{caller}: name must be a word, e.g. 'worker'")
    if not isinstance(task_key, str):
        raise AgentConfigError(f"{caller}: task_key must be a key of the parent's context")
    own = agent_logic(model, tools, budgets=budget, tracer=tracer, **agent_logic_kw)
    if logic is not None:
        own = own.merge(logic)
    own.attachments["report"] = _report
    machine = create_machine(child_chart if child_chart is not None else TOOL_LOOP, own)
    machine.require_bound()
    validate_agent_chart(machine)
    if not _notifies(machine):
        raise AgentConfigError(
            f"{caller}: the child chart never runs 'notifyParent', so its parent would wait for "
            'ever; give its final states "entry": "notifyParent"'
        )
    held = own.attachments["registry"].names
    if parent_tools is not None:
        allowed = parent_tools.names if isinstance(parent_tools, ToolRegistry) else parent_tools
        _check_subset(held, as_allowed(allowed))
    title = name[0].upper() + name[1:]
    spawner = _Spawner(f"spawn{title}", name, machine, task_key, bounded=parent_tools is not None)
    return MachineLogic(
        actions={spawner.action: spawner},
        guards={f"from{title}": _from(name)},
        services={name: machine},
    )


class _Spawner:
    """The action that spawns agents of one kind."""

    __guardchart_form__ = 4

    def __init__(
        self, action: str, name: str, machine: Machine, task_key: str, *, bounded: bool
    ) -> None:
        self.action = action
        self.name = name
        self.machine = machine
        self.task_key = task_key
        self.bounded = bounded
        logic = machine.logic
        self.held: tuple[str, ...] = logic.attachments["registry"].names
        self.is_async: bool = logic.services["callModel"].is_async
        self.needs_start = _needs_start(machine)

    def __call__(self, scope: Any, context: Any, event: Any, action: Any) -> None:
        if scope is None:
            raise AgentConfigError(f"{self.action} runs inside of a machine only")
        if context.get("budget_exceeded") not in (None, False):
            # No state depends on this line; it is how an operator learns that work was dropped.
            _LOG.warning("%s: %s: global budget exceeded; not spawning", scope.id, self.action)
            return
        self._check_tools(scope.node, scope.machine.logic)
        self._check_engine(scope)
        _check_strict(scope.machine)
        task = self._task(context, event)
        agent = self._id(context, event, scope)
        try:
            scope.spawn(self.name, agent, {"task": task})
        except StepError:
            raise AgentConfigError(
                f"{self.action}: an agent with the event's id is still running; the id is free "
                "again once that agent has reported"
            ) from None
        if self.needs_start:
            scope.send_to(agent, "START", prompt=task)

    def _task(self, context: Mapping[str, Any], event: Any) -> str:
        task = event.payload.get("task") if event is not None else None
        if task is None:
            task = context.get(self.task_key)
        if task is not None and not isinstance(task, str):
            raise AgentConfigError(f"{self.action}: the task must be a text")
        if task is None or not task.strip():
            raise AgentConfigError(
                f"{self.action}: no task (event.task or context[{self.task_key!r}])"
            )
        return task

    def _id(self, context: Any, event: Any, scope: Any) -> str:
        given = event.payload.get("id") if event is not None else None
        if given is not None:
            known = isinstance(given, str) and 0 < len(given) <= _MAX_ID and given.isprintable()
            if not known or ":" in given:
                raise AgentConfigError(
                    f"{self.action}: the event's id must be a printable text of 1 to {_MAX_ID} "
                    "characters without ':'"
                )
            return str(given)
        counts = context.get("spawned_agents")
        counts = dict(counts) if isinstance(counts, Mapping) else {}
        before = counts.get(self.name)
        number = before + 1 if type(before) is int and before >= 0 else 1
        counts[self.name] = number
        context["spawned_agents"] = counts
        return f"{self.name}-{number}"

    def _check_tools(self, node: StateNode, parent: Any) -> None:
        if not self.held:
            return
        declares = any(each.meta and "tools" in each.meta for each in (node, *node.ancestors))
        allowed = allowed_tools(node)
        own = getattr(parent, "attachments", {})
        registry = own.get("registry")
        if registry is not None and ("report" in own or allowed.everything):
            # "*" is every tool the parent has; and an agent gives no more than it was given.
            _check_subset(self.held, as_allowed(registry.names))
        if declares or not self.bounded:
            _check_subset(self.held, allowed)

    def _check_engine(self, scope: Any) -> None:
        if scope.engine is None or scope.mixed or self.is_async == (scope.engine == "async"):
            return
        kind, engine = (
            ("an async", "Interpreter") if self.is_async else ("a sync", "SyncInterpreter")
        )
        raise AgentConfigError(
            f"{self.action}: {kind} model pairs with {engine}, not with this engine; change one of "
            "them, or run the machine by a host that takes both"
        )


def _check_subset(held: tuple[str, ...], allowed: Any) -> None:
    more = [each for each in held if each not in allowed]
    if more:
        listed = ["*"] if allowed.everything else sorted(allowed.listed)
        raise AgentConfigError(
            f"sub-agent tools {more} are not in the parent's allow-list {listed}"
        )


def _notifies(machine: Machine) -> bool:
    """Whether any state or transition runs ``notifyParent``."""
    return any(
        action.name == "notifyParent"
        for node in machine.nodes.values()
        for action in _actions(node)
    )


def _actions(node: StateNode) -> list[Any]:
    transitions = [each for row in node.on.values() for each in row]
    transitions += node.always
    found = [*node.entry, *node.exit]
    for each in transitions:
        found += each.actions
    return found


def _needs_start(machine: Machine) -> bool:
    """Whether an agent with a task rests until it gets START; TOOL_LOOP begins by itself."""
    try:
        snapshot, _ = initial_transition(machine, {"task": "-"})
    except (ChartError, StepError):
        return True
    return "START" in accepted_events(snapshot)


def _report(agent_id: str, actor: Any, error: BaseException | None) -> Event | None:
    """The report of an agent that has not made one: it failed, or its chart forgot to."""
    context: Mapping[str, Any] = {}
    if actor is not None and actor._snapshot is not None:
        context = actor.snapshot.context
        if context.get("reported") is True and error is None:
            return None
    if error is None:
        return Event(*report_of(agent_id, context))
    message = str(error) if isinstance(error, AgentError) else type(error).__name__
    return Event(*report_of(agent_id, context, error_of("machine", message)))


def _from(name: str) -> Callable[[Any, Any], bool]:
    def from_agent(context: Any, event: Any) -> bool:
        sender = getattr(event, "sender", None)
        if sender is not None:
            return name in sender
        agent_id = event.payload.get("agent_id") if event is not None else None
        if not isinstance(agent_id, str):
            return False
        kind, dash, number = agent_id.rpartition(":")[2].rpartition("-")
        return bool(dash) and kind == name and number.isdecimal()

    return from_agent


def spawned_agents(logic: Any) -> list[Machine]:
    """The machines of the agents that a logic spawns, those of its agents included."""
    found: list[Machine] = []
    for service in getattr(logic, "services", {}).values():
        if isinstance(service, Machine) and service not in found:
            attached = getattr(service.logic, "attachments", {})
            if "report" in attached:
                found += [service, *spawned_agents(service.logic)]
    return found


def check_budget_event_declared(interpreter: Any) -> None:
    """Check that a strict chart takes ``BUDGET_EXCEEDED``.

    A plugin's event that a strict chart does not declare is denied, and a hook that fails
    disturbs nothing: the budget of the whole tree would trip without anybody noticing.
    ``spawn<Name>`` calls this before it spawns.

    Args:
        interpreter: A running machine, or a `Machine`.

    Raises:
        AgentConfigError: The chart is ``strict`` and no state of it declares the event.

    Source: xstate-statemachine, agents reference: BudgetPlugin.

    Example:
        >>> from guardchart import create_machine
        >>> desk = create_machine({"id": "desk", "strict": True, "initial": "open",
        ...     "states": {"open": {}}})
        >>> check_budget_event_declared(desk)
        Traceback (most recent call last):
            ...
        guardchart.errors.AgentConfigError: the strict chart 'desk' does not declare \
BUDGET_EXCEEDED; handle it in every state that waits for agents
    """
    _check_strict(interpreter if isinstance(interpreter, Machine) else interpreter.machine)


def _check_strict(machine: Machine) -> None:
    if machine.strict and not machine.knows(_EXCEEDED):
        raise AgentConfigError(
            f"the strict chart {machine.id!r} does not declare {_EXCEEDED}; "
            "handle it in every state that waits for agents"
        )


def handoff_guard(
    allowed: Mapping[str, Any],
    *,
    name: str = "handoffAllowed",
    sender: Literal["payload", "verified"] = "payload",
) -> MachineLogic:
    """The guard that lets only listed hand-offs pass: closed by default, exact, case-sensitive.

    Args:
        allowed: ``{from: [to, ...]}``.
        name: The guard's name in the chart.
        sender: ``"payload"`` reads the event's ``from``, which is whatever its sender wrote.
            ``"verified"`` ignores it and asks the machine who sent the event: a state of this
            machine (by its key or that of a state around it), or a child (by the name of its
            source, ``"worker"`` for agents that ``spawnWorker`` made). An event from outside has
            no such sender, so it is refused.

    Returns:
        A ``MachineLogic`` with the guard. It is false where ``from`` or ``to`` is no text.

    Raises:
        AgentConfigError: A name is no text, or the receivers are not a list of names: a single
            text would be read letter by letter.

    Source: xstate-statemachine, agents reference: handoff_guard.

    Example:
        >>> from guardchart import Event
        >>> guard = handoff_guard({"planner": ["worker"]}).guards["handoffAllowed"]
        >>> guard({}, Event("HANDOFF", {"from": "planner", "to": "worker"}))
        True
        >>> guard({}, Event("HANDOFF", {"from": "worker", "to": "judge"}))
        False
    """
    if sender not in ("payload", "verified"):
        raise AgentConfigError('handoff_guard: sender is "payload" or "verified"')
    if not isinstance(name, str) or not name:
        raise AgentConfigError("handoff_guard: name must be a text")
    if not isinstance(allowed, Mapping):
        raise AgentConfigError('handoff_guard: pass a mapping, e.g. {"planner": ["worker"]}')
    table = {_name(source): _receivers(to) for source, to in allowed.items()}

    def handoff_allowed(context: Any, event: Any) -> bool:
        payload = getattr(event, "payload", {})
        to = payload.get("to")
        if type(to) is not str:
            return False
        senders: tuple[Any, ...] = (payload.get("from"),)
        if sender == "verified":
            senders = getattr(event, "sender", ())
        return any(type(each) is str and to in table.get(each, ()) for each in senders)

    return MachineLogic(guards={name: handoff_allowed})


def _name(value: Any) -> str:
    if type(value) is not str or not value:
        raise AgentConfigError("handoff_guard: names must be texts that are not empty")
    return value


def _receivers(value: Any) -> frozenset[str]:
    if not isinstance(value, list | tuple | set | frozenset):
        raise AgentConfigError(
            'handoff_guard: the receivers must be a list of names: ["worker"], not "worker"'
        )
    return frozenset(map(_name, value))
