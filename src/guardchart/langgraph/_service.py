"""``langgraph_service``: a compiled LangGraph graph as the service of a chart."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal

from langchain_core.runnables.config import var_child_runnable_config
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.types import Command

from guardchart.errors import AgentConfigError, GraphInterruptedError
from guardchart.kernel import Event, can
from guardchart.runtime import ServiceScope

__all__ = ["INTERRUPT_KEY", "langgraph_service"]

INTERRUPT_KEY: Final = "__interrupt__"
"""Where LangGraph puts the interrupts of a graph that paused, beside its state."""

OnInterrupt = Literal["error", "done", "park"]
Config = Mapping[str, Any] | Callable[[Mapping[str, Any], Any], Mapping[str, Any]]


class LangGraphService:
    """A compiled graph as a service; made by `langgraph_service`."""

    is_async = True
    __guardchart_form__ = 3

    def __init__(
        self,
        graph: Any,
        *,
        input_from: Callable[[Mapping[str, Any], Any], Any],
        output_to: Callable[[Any], Any] | None,
        stream: bool,
        stream_mode: str | Sequence[str],
        config: Config | None,
        on_interrupt: OnInterrupt,
        park_event: str,
        resume_event: str,
    ) -> None:
        self.graph = graph
        self.input_from = input_from
        self.output_to = output_to
        self.stream = stream
        self.stream_mode = stream_mode
        self.config = config
        self.on_interrupt = on_interrupt
        self.park_event = park_event
        self.resume_event = resume_event

    async def __call__(
        self, scope: ServiceScope | None, context: Mapping[str, Any], event: Any
    ) -> Any:
        """Run the graph; its output, or what becomes of its interrupt."""
        config = self._config(context, event)
        resumed = self.on_interrupt == "park" and getattr(event, "type", None) == self.resume_event
        given = _resume(event) if resumed else self.input_from(context, event)
        work = self._streamed(scope, given, config) if self.stream else self._invoked(given, config)
        state, interrupts = await self._apart(work)
        if not interrupts or self.on_interrupt == "done":
            return state if self.output_to is None else self.output_to(state)
        if self.on_interrupt == "park":
            asked = [{"id": each.id, "value": each.value} for each in interrupts]
            parked = Event(self.park_event, {"interrupts": asked})
            if scope is not None and can(scope.snapshot, parked):
                scope.send(parked)
                return {INTERRUPT_KEY: asked}
        raise GraphInterruptedError(interrupts, state)

    def _config(self, context: Mapping[str, Any], event: Any) -> dict[str, Any]:
        config = self.config(context, event) if callable(self.config) else self.config
        found = dict(config or {})
        if self.on_interrupt == "park" and not _thread(found):
            raise AgentConfigError(
                "langgraph_service: on_interrupt='park' needs a thread of the inner graph; let "
                "config give {'configurable': {'thread_id': ...}}, one for each instance"
            )
        return found

    async def _apart(self, work: Any) -> Any:
        """Run a graph that keeps its own checkpoints apart from the graph this runs in.

        Inside of a LangGraph node an inner graph takes itself for a part of the outer one: its
        interrupt would pause that, and run the outer node again. One that has a saver and a
        thread of its own is its own run; its callbacks are the outer ones all the same.
        """
        if not isinstance(self.graph.checkpointer, BaseCheckpointSaver):
            return await work
        apart = contextvars.copy_context()
        apart.run(var_child_runnable_config.set, None)
        task = asyncio.get_running_loop().create_task(work, context=apart)
        try:
            return await task
        except asyncio.CancelledError:
            task.cancel()
            raise

    async def _invoked(self, given: Any, config: dict[str, Any]) -> tuple[Any, Sequence[Any]]:
        out = await self.graph.ainvoke(given, config)
        interrupts = getattr(out, "interrupts", None)
        if interrupts is not None and hasattr(out, "value"):  # version="v2"
            return out.value, interrupts
        found = out.get(INTERRUPT_KEY) if isinstance(out, Mapping) else None
        return out, tuple(found or ())

    async def _streamed(
        self, scope: ServiceScope | None, given: Any, config: dict[str, Any]
    ) -> tuple[Any, Sequence[Any]]:
        """Hand on each chunk; the last one is the output.

        Only some modes tell of an interrupt, so one that does is asked for beside them.
        """
        wanted = [self.stream_mode] if isinstance(self.stream_mode, str) else list(self.stream_mode)
        modes = wanted if "updates" in wanted else [*wanted, "updates"]
        last: Any = None
        interrupts: Sequence[Any] = ()
        async for mode, chunk in self.graph.astream(given, config, stream_mode=modes):
            if mode == "updates" and isinstance(chunk, Mapping) and INTERRUPT_KEY in chunk:
                interrupts = tuple(chunk[INTERRUPT_KEY])
            if mode not in wanted:
                continue
            if self.on_interrupt != "done" and isinstance(chunk, Mapping):
                told = {key: each for key, each in chunk.items() if key != INTERRUPT_KEY}
                if len(told) < len(chunk):
                    if not told:
                        continue
                    chunk = told
            last = chunk if isinstance(self.stream_mode, str) else (mode, chunk)
            if scope is not None:
                scope.stream(last)
        return last, interrupts


def langgraph_service(
    compiled_graph: Any,
    *,
    input_from: Callable[[Mapping[str, Any], Any], Any],
    output_to: Callable[[Any], Any] | None = None,
    stream: bool = False,
    stream_mode: str | Sequence[str] = "values",
    config: Config | None = None,
    on_interrupt: OnInterrupt = "error",
    park_event: str = "GRAPH_INTERRUPTED",
    resume_event: str = "GRAPH_RESUMED",
) -> LangGraphService:
    """Make a compiled graph a service of a chart, for ``invoke``.

    The graph's output is untrusted: validate what ``onDone`` receives like any tool result.
    Leaving the state cancels the run.

    Args:
        compiled_graph: The graph, compiled.
        input_from: ``(context, event)``, giving the graph's input.
        output_to: Makes of the graph's output what ``onDone`` receives; the output itself by
            default.
        stream: Whether each chunk becomes a ``STREAM`` event whose ``data`` is the chunk;
            ``onDone`` then receives the last one.
        stream_mode: LangGraph's, one or a list; of a list each chunk is ``(mode, chunk)``.
        config: LangGraph's configuration, or ``(context, event)`` that gives it, so that each
            instance of the machine has a ``thread_id`` of its own.
        on_interrupt: What happens when the graph calls ``interrupt()``. ``"error"``: ``onError``
            with a `GraphInterruptedError`. ``"done"``: ``onDone`` with LangGraph's own output.
            ``"park"``: the machine gets ``park_event``, to go into a waiting state; entering the
            invoking state by ``resume_event`` goes on with the graph where it stopped. A machine
            that does not take ``park_event`` gets ``onError``.
        park_event: Its ``payload["interrupts"]`` is ``[{"id", "value"}, ...]``.
        resume_event: Its ``payload["resume"]`` is the answer: LangGraph's ``Command(resume=...)``.

    Returns:
        The service, for ``MachineLogic(services=...)``. It is async: it runs under
        ``Interpreter``, ``run_agent``, ``statechart_node`` and ``statechart_graph``.

    Raises:
        AgentConfigError: The graph is not compiled; an argument has another form; ``"park"``
            with a graph that has no checkpointer of its own. When run: ``"park"`` without a
            ``thread_id``.

    Source: xstate-statemachine, agents reference: langgraph_service.

    Example:
        >>> import asyncio
        >>> from typing import TypedDict
        >>> from langgraph.graph import END, START, StateGraph
        >>> from guardchart import MachineLogic, create_machine
        >>> from guardchart.agents import run_agent
        >>> class Number(TypedDict):
        ...     n: int
        >>> graph = StateGraph(Number)
        >>> _ = graph.add_node("double", lambda state: {"n": state["n"] * 2})
        >>> _ = graph.add_edge(START, "double"), graph.add_edge("double", END)
        >>> doubling = langgraph_service(graph.compile(),
        ...     input_from=lambda context, event: {"n": context["n"]},
        ...     output_to=lambda out: out["n"])
        >>> chart = {"id": "host", "initial": "busy", "context": {"n": 21}, "states": {
        ...     "busy": {"invoke": {"src": "graph", "onDone": {"target": "over",
        ...                                                    "actions": "keep"}}},
        ...     "over": {"type": "final"}}}
        >>> machine = create_machine(chart, MachineLogic(services={"graph": doubling},
        ...     actions={"keep": lambda context, event: {"n": event.data}}))
        >>> asyncio.run(run_agent(machine)).context["n"]
        42
    """
    for method in ("ainvoke", "astream"):
        if not callable(getattr(compiled_graph, method, None)):
            raise AgentConfigError(
                f"langgraph_service needs a compiled graph, not a {type(compiled_graph).__name__}; "
                "call .compile() first"
            )
    if not callable(input_from):
        raise AgentConfigError("langgraph_service: input_from must be (context, event) -> input")
    if output_to is not None and not callable(output_to):
        raise AgentConfigError("langgraph_service: output_to must be callable")
    if config is not None and not callable(config) and not isinstance(config, Mapping):
        raise AgentConfigError(
            "langgraph_service: config must be a dict, or (context, event) -> dict"
        )
    modes = [stream_mode] if isinstance(stream_mode, str) else list(stream_mode)
    if not modes or not all(isinstance(mode, str) for mode in modes):
        raise AgentConfigError("langgraph_service: stream_mode is a mode or a list of modes")
    if on_interrupt not in ("error", "done", "park"):
        raise AgentConfigError('langgraph_service: on_interrupt is "error", "done" or "park"')
    if on_interrupt == "park":
        saver = getattr(compiled_graph, "checkpointer", None)
        if not isinstance(saver, BaseCheckpointSaver):
            raise AgentConfigError(
                "langgraph_service: on_interrupt='park' needs a graph with a checkpointer of its "
                "own; compile(checkpointer=...) it, or the graph around it is paused instead"
            )
        if not callable(config) and not _thread(config or {}):
            raise AgentConfigError(
                "langgraph_service: on_interrupt='park' needs config= with a thread_id"
            )
    return LangGraphService(
        compiled_graph,
        input_from=input_from,
        output_to=output_to,
        stream=stream,
        stream_mode=stream_mode,
        config=config,
        on_interrupt=on_interrupt,
        park_event=park_event,
        resume_event=resume_event,
    )


def _thread(config: Mapping[str, Any]) -> Any:
    configurable = config.get("configurable")
    return configurable.get("thread_id") if isinstance(configurable, Mapping) else None


def _resume(event: Any) -> Command[Any]:
    payload = event.payload
    return Command(resume=payload.get("resume", payload))
