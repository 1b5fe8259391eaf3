"""``statechart_graph``: a chart compiled into LangGraph tasks, each call a checkpoint."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

from langgraph.channels.base import BaseChannel
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import add_messages
from langgraph.types import RetryPolicy
from pydantic import BaseModel
from typing_extensions import TypedDict  # before 3.12 pydantic makes no JSON schema of typing's

from guardchart.agents import validate_agent_chart
from guardchart.agents._multi import spawned_agents
from guardchart.agents._services import CallModel, RunTool
from guardchart.agents._sources import with_sources
from guardchart.errors import AgentConfigError
from guardchart.kernel import Machine
from guardchart.langgraph._chart import as_machine
from guardchart.langgraph._node import _check_callables, _check_keys, _check_retry, _takes_runtime
from guardchart.langgraph._policies import attempts_of, cache_of, check_limits, limits_of, of_task
from guardchart.langgraph._recent import Recent
from guardchart.langgraph._reducers import resuming_reducer
from guardchart.langgraph._state import read_key
from guardchart.langgraph._task import (
    APPROVAL,
    MODEL,
    SCOPE,
    SERVICE,
    STEP,
    TIMER,
    TOOLS,
    GraphSettings,
)
from guardchart.langgraph._tasks import tasks_of
from guardchart.langgraph._view import StatechartView
from guardchart.langgraph._visit import Settings

if TYPE_CHECKING:
    from langgraph.graph.state import CompiledStateGraph

    from guardchart.gate import Seal, Tool
    from guardchart.persistence import Ledger
    from guardchart.runtime import Clock, MachineLogic

__all__ = ["statechart_graph"]


def statechart_graph(
    machine: Machine | Mapping[str, Any] | str | Path,
    logic: MachineLogic | None = None,
    *,
    state_schema: type[Any] | None = None,
    state_key: str = "xsm",
    event_key: str = "event",
    event_from_state: Callable[..., Any] | None = None,
    messages_key: str | None = None,
    result_to_state: Callable[[StatechartView, Any], Any] | None = None,
    ledger: Ledger | None = None,
    seal: Seal | None = None,
    signed_approvals: bool = False,
    scope: str | Callable[[Any], str] | None = None,
    executors: Any = None,
    interrupt_mode: Literal["batched", "per_call"] = "batched",
    positional: Literal["refuse", "accept"] = "refuse",
    min_review_s: float = 1.0,
    interrupt_payload: Literal["full", "ids"] = "full",
    serve_delay_s: float = 30.0,
    clock: Clock | None = None,
    retry_policy: RetryPolicy | Mapping[str, RetryPolicy] | None = None,
    cache_policy: Any = None,
    timeout: Any = None,
    context_schema: type[Any] | None = None,
    checkpointer: Any = None,
    store: Any = None,
    cache: Any = None,
    name: str | None = None,
    as_subgraph: bool = False,
) -> CompiledStateGraph[Any, Any, Any, Any]:
    """Compile a chart into a LangGraph graph: each model call, tool call and approval is a task.

    ``step`` moves the machine and alone proposes calls; ``model`` asks the model; ``tools``
    takes one call through the gate (read-only calls run side by side, side effects one a
    superstep); ``approval`` holds nothing but ``interrupt()``; ``service`` and ``timer`` serve
    what else the chart has. Each is checkpointed for itself, so that a crash, a retry or a
    resume repeats no model call and enters no side effect twice.

    Args:
        machine: The chart as a dict, JSON text or path, bound to ``logic``; or a built machine,
            which carries its logic.
        logic: Callables of the chart.
        state_schema: The graph's state, a ``TypedDict``, a pydantic model or a dataclass that
            declares the keys below; one that has just them by default.
        state_key: Where the snapshot is kept.
        event_key: Where an event for the machine is put; cleared once it is consumed.
        event_from_state: ``(state)`` or ``(state, runtime)``, giving the event to send, or None;
            the entry of ``event_key`` by default.
        messages_key: The message channel (``Annotated[list, add_messages]``) that holds the
            conversation, in place of the snapshot.
        result_to_state: ``(machine view, state)``, giving further updates as a dict.
        ledger: Where approvals and claims of tool calls are kept; see `ledger_for`. By default
            the process's own in-memory ledger, which does not outlive it.
        seal: Signs the snapshot, so that an edited one is refused.
        signed_approvals: With ``seal``: refuse a decision that comes by ``event_key`` unsigned.
        scope: What tool calls are filed under, a text or ``(state) -> text``; the thread's id
            by default.
        executors: ``AgentRequestExecutors``, or a dict of its fields, for text requests and
            decisions of the chart.
        interrupt_mode: ``"batched"`` asks about all pending calls at once, in the shape of
            LangChain's ``HITLRequest`` with ``calls`` beside; ``"per_call"`` asks about each
            by an interrupt of its own, ``{"type": "tool_approval", ...}``.
        positional: ``"accept"`` also takes answers that name the calls by their place, as
            existing approval pages give them: whatever is pending when the answer comes.
        min_review_s: How soon after the question such an answer may come, in seconds.
        interrupt_payload: ``"ids"`` leaves the arguments out of the question, which tracers and
            streams get to see.
        serve_delay_s: The longest delay of the chart, in seconds, that the graph waits for. A
            longer one rests, with its deadline in the snapshot.
        clock: Where the time comes from.
        retry_policy: LangGraph's policy for the model task, or a dict of policies by task.
            What is left when it gives up is the chart's business.
        cache_policy: LangGraph's cache policy of the model task, without a ``key_func``: a fork
            or time travel to before an answer finds it, another turn or thread does not.
        timeout: LangGraph's time limit of the model task, under ``ainvoke`` only. It ends the run
            with LangGraph's ``NodeTimeoutError``; the chart's own deadline is the chart's business.
        context_schema: LangGraph's, for ``runtime.context``.
        checkpointer: LangGraph's; pass the saver whose ledger is ``ledger``.
        store: LangGraph's.
        cache: LangGraph's.
        name: The graph's name; the machine's id by default.
        as_subgraph: Whether it becomes a node of another graph. It then keeps its own
            checkpoints in the parent's saver, so that new input while a call is pending finds
            the run it belongs to. Where it is not the only one that moves this machine, the
            parent declares the state key with `snapshot_reducer`.

    Returns:
        The compiled graph.

    Raises:
        AgentConfigError: A built machine together with ``logic``; a key that the schema does
            not declare, or keys that collide; a cache policy or time limit on another task than
            the model's, or one with a ``key_func``; a retry delay of a TOOL_LOOP beyond
            ``serve_delay_s``; spawned agents without ``seal``.
        ChartError: The chart is wrong, or its logic misses names.
        SnapshotError: When run: the snapshot is not one of this machine, or was changed.

    Example:
        >>> from guardchart.agents import TOOL_LOOP, FakeModel, agent_logic
        >>> model = FakeModel([{"text": "hi"}], is_async=False)
        >>> graph = statechart_graph(TOOL_LOOP, agent_logic(model, []))
        >>> state = graph.invoke({"event": {"type": "START", "prompt": "hello"}})
        >>> state["xsm"]["context"]["result"]
        'hi'
    """
    built = with_sources(as_machine(machine, logic, caller="statechart_graph"))
    built.require_bound()
    _check(locals(), built)
    public = state_schema or _default_schema(state_key, event_key, messages_key)
    present = _present(built)
    settings = GraphSettings(
        node=_node_settings(locals(), built),
        results=f"{state_key}_results",
        asked=f"{state_key}_asked",
        begun=f"{state_key}_begun",
        executors=executors,
        per_call=interrupt_mode == "per_call",
        positional=positional,
        min_review_s=min_review_s,
        show=interrupt_payload,
        attempts=attempts_of(of_task(retry_policy, MODEL)),
        view=_viewing(public),
        registry=_Tools(built),
        remembers=as_subgraph,
        caches=of_task(cache_policy, MODEL) is not None,
        serves=SERVICE in present,
    )
    graph: StateGraph[Any, Any, Any, Any] = StateGraph(
        _inner_schema(public, settings, resumes=as_subgraph),
        context_schema=context_schema,
        input_schema=public,
        output_schema=public,
    )
    tasks = tasks_of(settings)
    limits = limits_of(settings, cache_policy, timeout)
    for task in (STEP, *present):
        options: dict[str, Any] = dict(limits) if task == MODEL else {}
        retry = of_task(retry_policy, task)
        if retry is not None:
            options["retry_policy"] = retry
        if task == STEP:
            options["destinations"] = (*present, END)
        graph.add_node(task, tasks[task], **options)
        graph.add_edge(START if task == STEP else task, STEP)
    return graph.compile(
        checkpointer=True if as_subgraph else checkpointer,
        store=store,
        cache=cache_of(settings, cache),
        name=name or built.id,
    )


def _check(given: Mapping[str, Any], built: Machine) -> None:
    _check_keys(
        state_key=given["state_key"],
        event_key=given["event_key"],
        messages_key=given["messages_key"],
    )
    functions = {
        key: given[key] for key in ("event_from_state", "result_to_state") if given[key] is not None
    }
    _check_callables(**functions)
    _one_of("interrupt_mode", given["interrupt_mode"], "batched", "per_call")
    _one_of("positional", given["positional"], "refuse", "accept")
    _one_of("interrupt_payload", given["interrupt_payload"], "full", "ids")
    for key in ("serve_delay_s", "min_review_s"):
        value = given[key]
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise AgentConfigError(f"statechart_graph: {key} must be a number of seconds")
        if not 0 <= value < math.inf:
            raise AgentConfigError(f"statechart_graph: {key} must be a number of seconds")
    if given["signed_approvals"] and given["seal"] is None:
        raise AgentConfigError("statechart_graph: signed_approvals=True needs seal=")
    if given["as_subgraph"] and given["checkpointer"] is not None:
        raise AgentConfigError(
            "statechart_graph: a subgraph keeps its checkpoints in its parent's saver; pass "
            "checkpointer= or as_subgraph=True, not both"
        )
    messages = built.context.get("messages")
    if given["messages_key"] is not None and not isinstance(messages, list | tuple):
        raise AgentConfigError(
            "statechart_graph: messages_key needs a chart whose context declares "
            f"'messages': []; {built.id!r} does not"
        )
    check_limits(given["cache_policy"], given["timeout"])
    _check_schema(given)
    agent = getattr(built.logic, "attachments", {}).get("agent")
    if agent is not None:
        validate_agent_chart(built)
        _check_retry(agent.retry, given["serve_delay_s"], caller="statechart_graph")
    _check_spawned(built, given)


def _check_spawned(built: Machine, given: Mapping[str, Any]) -> None:
    """Between two tasks a spawned agent is in the snapshot, whatever it is busy with."""
    spawned = spawned_agents(built.logic)
    if spawned and given["seal"] is None:
        raise AgentConfigError(
            "statechart_graph: an agent is kept in the snapshot as a spawned actor while its model "
            "and tools run as tasks, and loads only from a sealed one; pass seal=Seal(key)"
        )
    for machine in spawned:
        retry = getattr(machine.logic, "attachments", {})["agent"].retry
        _check_retry(retry, given["serve_delay_s"], caller="statechart_graph")


def _one_of(key: str, value: Any, *allowed: str) -> None:
    if value not in allowed:
        raise AgentConfigError(f"statechart_graph: {key} is {' or '.join(map(repr, allowed))}")


def _check_schema(given: Mapping[str, Any]) -> None:
    schema = given["state_schema"]
    if schema is None:
        return
    if not isinstance(schema, type):
        raise AgentConfigError(
            "statechart_graph: state_schema must be a TypedDict, a pydantic model or a dataclass"
        )
    fields = get_type_hints(schema, include_extras=True)
    keys = [given["state_key"]]
    if given["event_from_state"] is None:
        keys.append(given["event_key"])
    if given["messages_key"] is not None:
        keys.append(given["messages_key"])
    for key in keys:
        if key not in fields:
            raise AgentConfigError(
                f"statechart_graph: the graph state {schema.__name__} has no field {key!r}: "
                "declare it, or LangGraph drops what is written to it"
            )


def _node_settings(given: Mapping[str, Any], built: Machine) -> Settings:
    event_key = given["event_key"]
    agent = getattr(built.logic, "attachments", {}).get("agent")
    event_from_state = given["event_from_state"]
    if event_from_state is None:

        def event_from_state(state: Any) -> Any:
            return read_key(state, event_key)

    ledger = given["ledger"]
    return Settings(
        machine=built,
        state_key=given["state_key"],
        event_from_state=event_from_state,
        takes_runtime=_takes_runtime(event_from_state),
        result_to_state=given["result_to_state"],
        event_key=event_key,
        messages_key=given["messages_key"],
        ledger=agent.ledger if ledger is None and agent is not None else ledger,
        seal=given["seal"],
        signed_approvals=given["signed_approvals"],
        plugins=(),
        interrupts=False,
        scope=given["scope"],
        clock=given["clock"],
        serve_delay_s=given["serve_delay_s"],
        multi_turn=True,
        agent=agent,
        recent=Recent(),
    )


# The state


def _default_schema(state_key: str, event_key: str, messages_key: str | None) -> type[Any]:
    fields: dict[str, Any] = {state_key: dict[str, Any], event_key: Any}
    if messages_key is not None:
        fields[messages_key] = Annotated[list[Any], add_messages]
    return TypedDict("StatechartState", fields, total=False)  # type: ignore[operator, no-any-return]


def _inner_schema(public: type[Any], settings: GraphSettings, *, resumes: bool) -> type[Any]:
    """The public state, and the channels that are the graph's own.

    LangGraph looks at every channel in every superstep, so that there is none without a use.
    """
    fields: dict[str, Any] = dict(get_type_hints(public, include_extras=True))
    key = settings.node.state_key
    if resumes and not _has_reducer(fields[key]):
        fields[key] = Annotated[fields[key], resuming_reducer]
    fields[settings.results] = Annotated[list[Any], _gathered]
    if settings.positional == "accept":
        fields[settings.asked] = float
    if settings.serves:
        fields[settings.begun] = dict[str, Any]
    if settings.caches:
        fields[SCOPE] = str
    return TypedDict("StatechartGraphState", fields, total=False)  # type: ignore[operator, no-any-return]


def _has_reducer(hint: Any) -> bool:
    """Whether LangGraph would find a reducer, or a channel, in an annotation."""
    marks: tuple[Any, ...] = getattr(hint, "__metadata__", ())
    return bool(marks) and (
        callable(marks[-1]) or any(isinstance(each, BaseChannel) for each in marks)
    )


def _gathered(held: Any, new: Any) -> list[Any]:
    """The reducer of the results channel: what several tasks bring is kept, None empties it."""
    return [] if new is None else [*(held or ()), *new]


def _viewing(schema: type[Any]) -> Callable[[Any], Any]:
    """What makes the state's dict an instance of the app's own schema."""
    if isinstance(schema, type) and issubclass(schema, BaseModel):
        names = set(schema.model_fields)
        return lambda state: schema.model_construct(
            **{key: value for key, value in state.items() if key in names}
        )
    if dataclasses.is_dataclass(schema):
        known = {field.name for field in dataclasses.fields(schema)}
        return lambda state: schema(**{k: v for k, v in state.items() if k in known})
    return lambda state: state


# The tasks


def _present(built: Machine) -> list[str]:
    """The tasks that a machine can ask for; children count."""
    found = set()
    for machine in _family(built):
        services = getattr(machine.logic, "services", None) or {}
        named = [services.get(each.src) for node in machine.order for each in node.invokes]
        # An action may spawn what no state invokes, but for the two services of the loop.
        loops = CallModel, RunTool
        spawned = [each for each in services.values() if not isinstance(each, loops)]
        for service in (*named, *spawned):
            if isinstance(service, Machine):
                continue
            if not hasattr(service, "step_requests"):
                found.add(SERVICE)
            elif hasattr(service, "registry") and hasattr(service, "max_tool_calls"):
                found |= {TOOLS, APPROVAL}
            else:
                found.add(MODEL)
        if machine.timers:
            found.add(TIMER)
    return [task for task in (MODEL, TOOLS, APPROVAL, SERVICE, TIMER) if task in found]


def _family(machine: Machine, seen: set[int] | None = None) -> Iterator[Machine]:
    """A machine and every one its services name."""
    seen = set() if seen is None else seen
    if id(machine) in seen:
        return
    seen.add(id(machine))
    yield machine
    for service in (getattr(machine.logic, "services", None) or {}).values():
        if isinstance(service, Machine):
            yield from _family(service, seen)


class _Tools:
    """The registered tools of a machine and its children, by name."""

    def __init__(self, machine: Machine) -> None:
        self._registries = [
            registry
            for each in _family(machine)
            if (registry := getattr(each.logic, "attachments", {}).get("registry")) is not None
        ]

    def get(self, name: str) -> Tool | None:
        """The tool of this name, None where there is none."""
        for registry in self._registries:
            tool: Tool | None = registry.get(name)
            if tool is not None:
                return tool
        return None
