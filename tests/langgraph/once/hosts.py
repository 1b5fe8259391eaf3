"""A conversation on one saver, in one of the hosts, with one side effect to count.

Everything is awaited: what a sync saver serves runs on a thread, so that a fault is written once.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple
from unittest import mock

from langchain_core.callbacks import BaseCallbackHandler
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.postgres import PostgresSaver
from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from langgraph.graph import END, START, StateGraph
from langgraph.types import Command
from langgraph.types import RetryPolicy as LangGraphRetry
from pydantic import ValidationError

from guardchart.agents import ModelResponse, RetryPolicy, ToolCall, agent_logic, tool, tool_registry
from guardchart.agents import pending_approval as pending_of
from guardchart.gate import IdempotencyKey, _rules, decisions_event
from guardchart.langgraph import (
    apending_approval,
    ledger_for,
    pending_approval,
    statechart_graph,
    statechart_node,
)
from tests.agents.test_window import assert_accepted
from tests.langgraph.graphs import State, from_event, loop_chart, loop_router, start
from tests.langgraph.once.ledgers import Countdown, Forgets, Kills, Meets, die

CENTS = 500
DURABILITIES = ("sync", "async", "exit")


# --- savers --------------------------------------------------------------------------------------


class Place(NamedTuple):
    """Where a durable saver keeps its checkpoints."""

    folder: str
    dsn: str = ""

    @property
    def file(self) -> str:
        return str(Path(self.folder) / "checkpoints.sqlite")

    @property
    def log(self) -> Path:
        return Path(self.folder) / "effects.log"


class SaverKind(NamedTuple):
    """One of LangGraph's checkpointers."""

    name: str
    open: Callable[[Place], Any]
    is_async: bool = False
    durable: bool = True

    @property
    def on_postgres(self) -> bool:
        return "Postgres" in self.name


SAVERS = {
    kind.name: kind
    for kind in (
        SaverKind("InMemory", lambda place: contextlib.nullcontext(InMemorySaver()), durable=False),
        SaverKind("Sqlite", lambda place: SqliteSaver.from_conn_string(place.file)),
        SaverKind("AsyncSqlite", lambda place: AsyncSqliteSaver.from_conn_string(place.file), True),
        SaverKind("Postgres", lambda place: PostgresSaver.from_conn_string(place.dsn)),
        SaverKind(
            "AsyncPostgres", lambda place: AsyncPostgresSaver.from_conn_string(place.dsn), True
        ),
    )
}


# --- what a caller hears -------------------------------------------------------------------------


class Heard(NamedTuple):
    """What somebody who called the graph was told about a call.

    Attributes:
        what: ``done``, ``in doubt``, ``rejected``, ``superseded``, ``expired``, ``refused``,
            ``asked``, ``answered`` (a prompt that had its answer), ``raised`` (the saver's own
            error) or ``nothing``.
        text: The words.
        cents: The amount of the call it is about.
    """

    what: str
    text: str
    cents: int = CENTS


_WORDS = {
    "refunded": "done",
    "in doubt": "in doubt",
    "no human decision in time": "expired",
    "superseded": "superseded",
    "rejected": "rejected",
    "denied": "denied",
    "not run": "not run",
}


def heard(out: Any, item: Mapping[str, Any] | None) -> Heard:
    """Read what a state tells of one call; of the last answer where it is about none."""
    if isinstance(out, SaverDown):
        return Heard("raised", "SaverDown")
    if isinstance(out, ValidationError):
        return Heard("refused", "the answer does not fit the question")
    xsm = (out or {}).get("xsm")
    if xsm is None:
        return Heard("nothing", "")
    context, receipt = xsm["context"], xsm.get("receipt") or {}
    if item is None:
        answered = xsm["value"] == "done" and context["result"]
        return Heard("answered", context["result"]) if answered else Heard("nothing", str(receipt))
    cents = item["arguments"]["amount_cents"]
    for message in context["messages"]:
        if message["role"] == "tool" and message["tool_call_id"] == item["tool_call_id"]:
            text = message["content"]
            what = next((what for word, what in _WORDS.items() if word in text), "nothing")
            return Heard(what, text, cents)
    reason = receipt.get("reason")
    if reason and (receipt.get("denied") or receipt.get("status") == "dropped"):
        return Heard("refused", reason, cents)
    if pending_of(context):
        return Heard("asked", "", cents)
    return Heard("nothing", str(receipt), cents)


# --- the model, the effect, the fault ------------------------------------------------------------


@dataclass
class Sample:
    """What the model proposes when it is asked for a refund."""

    cents: int = CENTS
    id: str = "call_1"


class SaverDown(Exception):
    """The saver cannot write."""


class RaisesAfter(BaseCallbackHandler):
    """A callback that fails once, inside of a task that has just had its effect."""

    raise_error = True

    def __init__(self, task: str, happened: Callable[[], bool]) -> None:
        self.task, self.happened = task, happened
        self.runs: set[uuid.UUID] = set()
        self.raised = 0

    def on_chain_start(self, *args: Any, run_id: uuid.UUID, **more: Any) -> None:
        if more.get("name") == self.task:
            self.runs.add(run_id)

    def on_chain_end(self, *args: Any, run_id: uuid.UUID, **more: Any) -> None:
        if run_id in self.runs and self.happened() and not self.raised:
            self.raised += 1
            raise ConnectionError("after the effect")


@dataclass
class Host:
    """One thread, and those who call it.

    Args:
        kind: The saver's kind.
        place: Where it keeps its checkpoints, and the log of effects.
        saver: The saver, open.
        ledger: The ledger, whatever was done to it.
        remembers: Whether the ledger remembers what was entered.
        durability: LangGraph's, for every call.
        timeout_s: The tool's.
        effect_s: How long the effect takes.
        human_timeout_s: How long a person may think.
        kill: ``"effect"``: the process dies right after the effect.
        countdown: Ends when the process is to die.
        thread: The thread's id.
    """

    kind: SaverKind
    place: Place
    saver: Any
    ledger: Any
    remembers: bool
    durability: str
    timeout_s: float = 5.0
    effect_s: float = 0.0
    human_timeout_s: float = 60.0
    kill: str = ""
    countdown: Countdown = field(default_factory=lambda: Countdown(0))
    thread: str = field(default_factory=lambda: uuid.uuid4().hex)
    sample: Sample = field(default_factory=Sample)
    die_elsewhere: Callable[[Host, str, str], Awaitable[None]] | None = None

    name: ClassVar[str]
    task: ClassVar[str]

    # What happened

    @property
    def entries(self) -> list[str]:
        """The effects there were, one line each; equal ones are of one call."""
        log = self.place.log
        lines = log.read_text().splitlines() if log.exists() else []
        return [line for line in lines if line.startswith(self.thread)]

    def entries_of(self, cents: int) -> int:
        return sum(line.split()[1] == str(cents) for line in self.entries)

    # The graph

    def logic(self) -> Any:
        def refund(order_id: int, amount_cents: int, key: IdempotencyKey) -> str:
            """Refund an order."""
            self.countdown.point()
            with self.place.log.open("a") as log:
                log.write(f"{self.thread} {amount_cents} {key}\n")
                log.flush()
                os.fsync(log.fileno())
            if self.kill == "effect":
                die()
            self.countdown.point()
            time.sleep(self.effect_s)
            return f"refunded {amount_cents}"

        def model(messages: Any, tools: Any) -> ModelResponse:
            said = messages[-1]
            if said["role"] == "user" and "refund" in said["content"]:
                arguments = {"order_id": 7, "amount_cents": self.sample.cents}
                return ModelResponse(None, (ToolCall(self.sample.id, "refund", arguments),))
            return ModelResponse(f"You said: {said['content']}")

        async def amodel(messages: Any, tools: Any) -> ModelResponse:
            return model(messages, tools)

        return agent_logic(
            amodel if self.kind.is_async else model,
            tool_registry(tool(refund, side_effect=True, timeout_s=self.timeout_s)),
            retry=RetryPolicy(delay_s=0),
            human_timeout_s=self.human_timeout_s,
        )

    @property
    def retried(self) -> LangGraphRetry:
        return LangGraphRetry(max_attempts=3, initial_interval=0.01, jitter=False)

    def graph(self) -> Any:
        """A graph of its own for each caller, as in workers of their own."""
        raise NotImplementedError

    # Callers

    def config(self, at: Any = None) -> dict[str, Any]:
        return dict(at) if at is not None else {"configurable": {"thread_id": self.thread}}

    async def invoke(self, value: Any, at: Any = None, **config: Any) -> Any:
        """Call the graph; what it returned, or what it raised for its caller."""
        graph, place = self.graph(), {**self.config(at), **config}
        try:
            if self.kind.is_async:
                return await graph.ainvoke(value, place, durability=self.durability)
            return await asyncio.to_thread(graph.invoke, value, place, durability=self.durability)
        except (ValidationError, SaverDown) as error:
            return error

    async def say(self, prompt: str, *, about: Mapping[str, Any] | None = None) -> Heard:
        """Give a prompt; whether it was answered, or what is then told of a call."""
        out = await self.invoke({"event": start(prompt)})
        answered = heard(out, None)
        told = answered if about is None else heard(out, about)
        return told if answered.what == "answered" and told.text else answered

    async def park(self, at: Any = None, **sample: Any) -> Mapping[str, Any]:
        """Have the model propose a refund; the call a person is asked about."""
        if sample:
            self.sample = Sample(**sample)
        await self.invoke({"event": start()}, at)
        return await self.asked()

    async def asked(self) -> Mapping[str, Any]:
        (item,) = await self.pending()
        return item

    async def answer(
        self, item: Mapping[str, Any], decision: str = "approve", at: Any = None, **config: Any
    ) -> Heard:
        return heard(await self.invoke(self.decided(item, decision), at, **config), item)

    async def go_on(self, item: Mapping[str, Any], at: Any = None) -> Heard:
        """``invoke(None)``."""
        return heard(await self.invoke(None, at), item)

    async def at_once(
        self, *calls: Awaitable[Heard], first: str = "", until: str = ""
    ) -> list[Heard]:
        """Two callers of whom neither decides before the other wants to; see `Meets`."""
        self.ledger.expect_two(first, until)
        return list(await asyncio.gather(*calls))

    async def recover(self) -> Heard:
        """What an operator does with a thread that was cut off: go on, and answer what it asks."""
        state = await self.state()
        if not state.values.get("xsm") and not state.tasks:
            await self.invoke({"event": start()})
        elif state.tasks and not any(task.interrupts for task in state.tasks):
            await self.invoke(None)
        pending = await self.pending()
        if pending:
            return await self.answer(pending[0])
        return await self.look()

    @contextlib.contextmanager
    def failing_saver(self) -> Iterator[None]:
        """Have the saver lose everything from the effect on."""

        def failing(write: Any) -> Any:
            def put(*args: Any, **more: Any) -> Any:
                if self.entries:
                    raise SaverDown
                return write(*args, **more)

            return put

        with contextlib.ExitStack() as stack:
            for name in ("put", "put_writes", "aput", "aput_writes"):
                write = getattr(self.saver, name)
                stack.enter_context(mock.patch.object(self.saver, name, failing(write)))
            yield

    async def killed(self, doing: str, point: str) -> None:
        """Have another process call the graph, and die right after ``point``."""
        assert self.die_elsewhere is not None
        await self.die_elsewhere(self, doing, point)

    # The thread

    async def state(self) -> Any:
        graph = self.graph()
        if self.kind.is_async:
            return await graph.aget_state(self.config())
        return await asyncio.to_thread(graph.get_state, self.config())

    async def here(self) -> Any:
        """The newest checkpoint, to come back to."""
        return (await self.state()).config

    async def history(self) -> list[Any]:
        """Every checkpoint, newest first."""
        graph = self.graph()
        if self.kind.is_async:
            return [each async for each in graph.aget_state_history(self.config())]
        return await asyncio.to_thread(lambda: list(graph.get_state_history(self.config())))

    async def before_effect(self) -> Any:
        """The newest checkpoint whose next task is the one that has the effect."""
        return next(each.config for each in await self.history() if each.next == (self.task,))

    async def before_anything(self) -> Any:
        """The checkpoint in which the machine has not begun, but its first prompt is given."""
        return (await self.history())[-2].config

    async def look(self) -> Heard:
        """What the thread itself tells of its newest call."""
        values = (await self.state()).values
        messages = values["xsm"]["context"]["messages"]
        calls = [call for message in messages for call in message.get("tool_calls") or ()]
        arguments = {"amount_cents": self.sample.cents}
        return heard(values, {"tool_call_id": calls[-1]["id"], "arguments": arguments})

    async def next_turn(self) -> None:
        """A thread that is not stranded answers the next prompt, and its model is told all."""
        assert await self.say("Thanks!") == ("answered", "You said: Thanks!", CENTS)
        assert_accepted((await self.state()).values["xsm"]["context"]["messages"])

    # What differs

    def decided(self, item: Mapping[str, Any], decision: str) -> Any:
        """What a person sends who has looked at a call."""
        raise NotImplementedError

    async def pending(self) -> list[Any]:
        raise NotImplementedError


def _decision(item: Mapping[str, Any], decision: str) -> dict[str, Any]:
    return {"id": item["id"], "digest": item["digest"], "decision": decision}


class NodeHost(Host):
    """The chart is one node; answers come as events."""

    name = "node"
    task = "agent"
    on_wait: ClassVar[Literal["rest", "interrupt"]] = "rest"

    def graph(self) -> Any:
        node = statechart_node(
            loop_chart("refund"),
            self.logic(),
            event_from_state=from_event,
            event_key="event",
            ledger=self.ledger,
            on_wait=self.on_wait,
        )
        graph = StateGraph(State)
        graph.add_node("agent", node, retry_policy=self.retried)
        graph.add_edge(START, "agent")
        waits = "agent" if self.on_wait == "interrupt" else END
        graph.add_conditional_edges("agent", loop_router(awaiting_human=waits))
        return graph.compile(checkpointer=self.saver)

    def decided(self, item: Mapping[str, Any], decision: str) -> Any:
        return {"event": decisions_event([_decision(item, decision)])}

    async def pending(self) -> list[Any]:
        xsm = (await self.state()).values.get("xsm")
        return [] if xsm is None else pending_of(xsm)


class AskingHost(NodeHost):
    """The node asks by ``interrupt()``; answers resume it."""

    name = "asks"
    on_wait = "interrupt"

    def decided(self, item: Mapping[str, Any], decision: str) -> Any:
        return Command(resume=decisions_event([_decision(item, decision)]))


class GraphHost(Host):
    """The chart is a graph of tasks; answers resume its interrupt."""

    name = "graph"
    task = "tools"

    def graph(self) -> Any:
        return statechart_graph(
            loop_chart("refund"),
            self.logic(),
            ledger=self.ledger,
            checkpointer=self.saver,
            retry_policy={"tools": self.retried, "step": self.retried},
        )

    def decided(self, item: Mapping[str, Any], decision: str) -> Any:
        return Command(resume={"decisions": [_decision(item, decision)]})

    async def pending(self) -> list[Any]:
        if self.kind.is_async:
            return await apending_approval(self.graph(), self.config())
        return await asyncio.to_thread(pending_approval, self.graph(), self.config())


class SubgraphHost(GraphHost):
    """That graph as a node of another one, with a retry policy around it too."""

    name = "subgraph"
    task = "agent"

    def graph(self) -> Any:
        inner = statechart_graph(
            loop_chart("refund"), self.logic(), ledger=self.ledger, as_subgraph=True
        )
        graph = StateGraph(State)
        graph.add_node("agent", inner, retry_policy=self.retried)
        graph.add_edge(START, "agent")
        graph.add_edge("agent", END)
        return graph.compile(checkpointer=self.saver)


HOSTS: dict[str, type[Host]] = {host.name: host for host in (NodeHost, AskingHost, GraphHost)}


@asynccontextmanager
async def opened(
    saver: str,
    host: str,
    durability: str,
    place: Place,
    remembers: bool,
    kill: str = "",
    **more: Any,
) -> AsyncIterator[Host]:
    """Open a host on its saver; with a ledger, or with one that forgets every entry.

    ``kill`` is a verb of the ledger after which the process dies, ``"effect"``, or the number of
    a call of ledger, saver or effect.
    """
    kind = SAVERS[saver]
    async with contextlib.AsyncExitStack() as stack:
        made = kind.open(place)
        if kind.is_async:
            opened = await stack.enter_async_context(made)
            if kind.on_postgres:
                await opened.setup()
            real = await ledger_for(opened).aresolve()  # type: ignore[attr-defined]
        else:
            opened = stack.enter_context(made)
            if kind.on_postgres:
                opened.setup()
            real = ledger_for(opened)
        if kind.durable:
            stack.callback(real.disconnect)
        used: Any = real if remembers else Forgets(real)
        countdown = Countdown(int(kill) if kill.isdigit() else 0)
        if kill.isdigit():
            countdown.around(used, Countdown.WRITES)
            countdown.around(opened, Countdown.SAVES)
        elif kill and kill != "effect":
            used = Kills(used, kill)
        yield {**HOSTS, SubgraphHost.name: SubgraphHost}[host](
            kind,
            place,
            opened,
            Meets(used),
            remembers,
            durability,
            kill=kill,
            countdown=countdown,
            **more,
        )


@contextlib.contextmanager
def nobody_asked() -> Iterator[None]:
    """The state's rule for the refund is ``approval: never``: the chart itself approves."""
    plain = _rules.parse

    def parse(value: Any, where: str = "meta.tools") -> Any:
        allowed = plain(value, where)
        return _rules.Allowed(
            allowed.listed, allowed.everything, {"refund": _rules.Rule(approval="never")}
        )

    with mock.patch.object(_rules, "parse", parse):
        yield
