"""What the tasks of a compiled chart share: their names, their settings, where they are."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, ClassVar, Final, NamedTuple

from langchain_core.runnables import Runnable, RunnableConfig

from guardchart.agents import AgentStep
from guardchart.agents._recorded import dump_failure, plain
from guardchart.agents._step import Origin, requests_of
from guardchart.agents._stepper import FixedClock, Stepper, Waiting
from guardchart.errors import AgentError
from guardchart.langchain._ask import Show
from guardchart.langgraph._ledger import DeferredLedger
from guardchart.langgraph._recent import text_of
from guardchart.langgraph._visit import Settings, Visit
from guardchart.runtime import SystemClock

__all__ = [
    "APPROVAL",
    "BaseTask",
    "END",
    "GraphSettings",
    "ITEM",
    "MODEL",
    "SCOPE",
    "SERVICE",
    "STEP",
    "TIMER",
    "TOOLS",
    "Task",
]

END: Final = "__end__"
STEP, MODEL, TOOLS, APPROVAL, SERVICE, TIMER = (
    "step",
    "model",
    "tools",
    "approval",
    "service",
    "timer",
)
ITEM: Final = "statechart_item"
"""What a ``Send`` is about: a request, a service or a call by its id."""

SCOPE: Final = "statechart_scope"
"""What the calls of a ``Send`` and a cached answer are filed under: nothing else there tells."""


class GraphSettings(NamedTuple):
    """The arguments of ``statechart_graph``, checked.

    Attributes:
        node: What it has in common with ``statechart_node``.
        results: The channel of what tasks hand to ``step``.
        asked: The channel that holds when the open question was asked, epoch milliseconds,
            where an answer by place may come too soon.
        begun: The channel that holds which event began each service that waits.
        executors: Executors of text requests and decisions.
        per_call: Whether each call is asked about by an interrupt of its own.
        positional: ``"refuse"`` or ``"accept"``.
        min_review_s: How soon an answer by place may come, in seconds.
        show: ``"full"`` or ``"ids"``.
        attempts: How often LangGraph runs a failing model task, and whether it would.
        view: Makes of the state's dict what ``event_from_state`` expects.
        registry: The tools of the machine and its children, by name.
        remembers: Whether it is a subgraph with checkpoints of its own.
        caches: Whether answers of a model are cached.
        serves: Whether there is a task for services that are neither a model nor a tool.
    """

    node: Settings
    results: str
    asked: str
    begun: str
    executors: Any
    per_call: bool
    positional: Any
    min_review_s: float
    show: Show
    attempts: Callable[[BaseException], int]
    view: Callable[[Any], Any]
    registry: Any
    remembers: bool
    caches: bool
    serves: bool


class Task(Runnable[Any, Any]):
    """A node of the graph: LangGraph opens no trace run beside the node's."""

    def __init__(
        self,
        name: str,
        run: Callable[[Any, Any], Any],
        arun: Callable[[Any, Any], Awaitable[Any]],
    ) -> None:
        self.name = name
        self._run, self._arun = run, arun

    def invoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        """Run the task on a graph state and return its update."""
        return self._run(input, config)

    async def ainvoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        """As `invoke`, on the running loop."""
        return await self._arun(input, config)


class BaseTask:
    """What the tasks share: finding out where they are.

    Attributes:
        alone: Whether the task reads a snapshot of its own, which no other task of the run has.
    """

    alone: ClassVar[bool] = False

    def __init__(self, settings: GraphSettings) -> None:
        self.settings = settings
        self.node = settings.node

    def run(self, state: Any, config: Any) -> Any:
        """The task on a graph state; its update."""
        raise NotImplementedError

    async def arun(self, state: Any, config: Any) -> Any:
        """As `run`, on the running loop."""
        raise NotImplementedError

    def visit(self, state: Any, config: Any, scope: str | None = None) -> Visit:
        visit = Visit(self.node, state, config, scope)
        visit.check_ledger(self.node.ledger)
        return visit

    def looked(self, state: Any, config: Any) -> Visit:
        if (type(state) is dict or isinstance(state, Mapping)) and ITEM in state:
            scope = state.get(SCOPE)
            visit = self.visit(state, config, scope if isinstance(scope, str) else None)
        else:
            visit = self.visit(self.settings.view(state), config)
        visit.look(alone=self.alone)
        return visit

    def ledger(self) -> Any:
        ledger = self.node.ledger
        return ledger.resolve() if isinstance(ledger, DeferredLedger) else ledger

    async def aledger(self) -> Any:
        ledger = self.node.ledger
        return await ledger.aresolve() if isinstance(ledger, DeferredLedger) else ledger

    def standing(self, visit: Visit, ledger: Any) -> Stepper:
        """The machine as the snapshot has it, standing still; opened once a task.

        Its clock is the one that approvals are judged by.
        """
        snapshot, standing = visit.snapshot, visit.standing
        assert snapshot is not None
        if standing is None or standing[0] is not snapshot:
            clock = self.node.clock
            simulated = clock is not None and clock.simulated
            shown = FixedClock(clock.now_ms()) if simulated else SystemClock()
            step = self.led_here(visit)
            left = None if step is None else step._left
            if left is None or left.actors or left.snapshot is not snapshot:
                left = self.origin(visit, ledger).opened(shown)
            left.clock = shown
            standing = visit.standing = snapshot, left
        return standing[1]

    def led_here(self, visit: Visit) -> AgentStep | None:
        """The step that led here, if the conversation is still the one it saw.

        Only once: an executor may have changed its requests in place, so a retry looks anew.
        """
        step = None if visit.known is None else visit.known.step
        if step is None or step.snapshot is not visit.snapshot:
            return None
        info = getattr(visit.runtime, "execution_info", None)
        return step if getattr(info, "node_attempt", 0) == 1 else None

    def origin(self, visit: Visit, ledger: Any) -> Origin:
        assert visit.snapshot is not None
        return Origin(self.node.machine, visit.snapshot, visit.scope, ledger, visit.own)

    def waiting(self, visit: Visit, ident: str, ledger: Any) -> Waiting | None:
        service_id = ident.rpartition("#")[0] or ident
        for waiting in self.standing(visit, ledger).waiting():
            if waiting.id == service_id:
                return waiting
        return None

    def requests(self, visit: Visit, ledger: Any) -> tuple[Any, ...]:
        if visit.snapshot is None:
            return ()
        step = self.led_here(visit)
        if step is not None:
            return step.requests
        return requests_of(self.standing(visit, ledger), self.origin(visit, ledger))

    def limit_s(self, visit: Visit, ledger: Any) -> float | None:
        """How long the chart waits, in seconds; None where it has no deadline."""
        clock = self.node.clock
        due = self.standing(visit, ledger).next_due()
        if due is None or (clock is not None and clock.simulated):
            return None
        return max(0.0, (due[0] - visit.now_ms()) / 1000.0)

    def result(
        self, visit: Visit, ident: str, *, dumped: bool = False, **outcome: Any
    ) -> dict[str, Any]:
        """The update that hands an outcome to ``step``; where there is a seal, under the seal.

        What no checkpoint could hold is a failure: raising would repeat the call at each resume.

        Args:
            visit: Where the task stands.
            ident: What it is the outcome of.
            dumped: Whether it has been made of JSON types for this, and nobody else holds it.
            **outcome: The outcome.
        """
        base = {"id": ident, "at": visit.now_ms()}
        told = {**base, **outcome}
        try:
            # What the serialiser of checkpoints takes has no need of a copy, if it is ours.
            as_it_is = dumped and text_of(told) is not None
            made = self._sealed(visit, told if as_it_is else _storable(told))
        except (AgentError, ValueError) as error:
            failure = dump_failure(error)
            output = outcome.get("output")
            usage = output.get("usage") if isinstance(output, dict) else None
            if isinstance(usage, dict):
                with contextlib.suppress(AgentError):
                    failure["usage"] = _storable(usage)
            made = self._sealed(visit, {**base, "error": failure})
        return {self.settings.results: [made]}

    def _sealed(self, visit: Visit, result: dict[str, Any]) -> dict[str, Any]:
        seal = self.node.seal
        if seal is None:
            return result
        thread, machine = visit.sealed_for()
        sealed = seal.sign(_text(result), thread=thread, machine=machine, purpose=_PURPOSE)
        return {**result, "seal": sealed}

    def is_own(self, visit: Visit, result: Mapping[str, Any]) -> bool:
        """Whether a task of this thread made a result; only a seal tells."""
        seal = self.node.seal
        if seal is None:
            return True
        thread, machine = visit.sealed_for()
        try:
            text = _text({key: each for key, each in result.items() if key != "seal"})
        except (TypeError, ValueError, RecursionError):
            return False
        given, purpose = result.get("seal"), _PURPOSE
        fits: bool = seal.fits(given, text, thread=thread, machine=machine, purpose=purpose)
        return fits


_PURPOSE: Final = "result"


def _text(result: dict[str, Any]) -> str:
    """What is signed, in ASCII: a model may have said half of a surrogate pair."""
    return json.dumps(result, sort_keys=True)


def _storable(value: dict[str, Any]) -> dict[str, Any]:
    """A copy of a result as JSON types, with no integer that a checkpoint cannot hold.

    Raises:
        AgentError: It has no such form.
    """
    made: dict[str, Any] = plain(value, "the result of a task")
    # The serialiser of checkpoints knows at once that there is none, if all the texts are whole.
    if text_of(made) is None and _holds_huge(made):
        raise AgentError("the result of a task holds an integer beyond 64 bits")
    return made


def _holds_huge(value: Any) -> bool:
    """Whether JSON types hold an integer that no checkpoint takes."""
    level = [value]
    while level:
        below: list[Any] = []
        for each in level:
            kind = type(each)
            if kind is dict:
                below.extend(each.values())
            elif kind is list:
                below.extend(each)
            elif kind is int and not -(2**63) <= each < 2**64:
                return True
        level = below
    return False
