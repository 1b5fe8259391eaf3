"""Once means once: each fault on each saver, durability and host, with a ledger and without.

``once/faults.py`` is the matrix. `make test` runs each fault and each saver, `make slow` every
cell there is; ``pytest tests/langgraph -v`` prints what was counted.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypedDict

import pytest
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.postgres import PostgresSaver
from langgraph.graph import START, StateGraph

from guardchart.agents import FakeModel, agent_logic
from guardchart.errors import AgentConfigError
from guardchart.gate import approval_event
from guardchart.langgraph import statechart_graph
from tests.langgraph.graphs import Refunds, State, loop_chart, start, thread
from tests.langgraph.once.faults import FAULTS, Fault
from tests.langgraph.once.hosts import (
    DURABILITIES,
    HOSTS,
    SAVERS,
    Heard,
    Host,
    Place,
    RaisesAfter,
    SaverKind,
    heard,
    opened,
)
from tests.langgraph.once.lives import Lives
from tests.langgraph.once.table import PROPERTY, cell_property, counted, lines

KILLED_TIMEOUT_S = 1.0
"""A claim whose process died is in doubt once the tool's timeout has passed."""

MOST_CALLS = 100


class Cell(NamedTuple):
    fault: str
    saver: str
    host: str
    durability: str

    def __str__(self) -> str:
        return "-".join(self).replace(" ", "_")

    @property
    def kind(self) -> SaverKind:
        return SAVERS[self.saver]

    def exists(self) -> bool:
        fault = FAULTS[self.fault]
        return (self.kind.durable or not fault.kills) and (
            fault.on_exit or self.durability != "exit"
        )


def cells() -> Iterator[Any]:
    """Every cell. Fast are each fault in memory on each host, and on one durable saver in turn."""
    durable = [name for name, kind in SAVERS.items() if kind.durable]
    hosts = list(HOSTS)
    for row, fault in enumerate(FAULTS):
        in_turn = Cell(fault, durable[row % 4], hosts[row % 3], DURABILITIES[row % 2])
        for saver, host, durability in product(SAVERS, hosts, DURABILITIES):
            cell = Cell(fault, saver, host, durability)
            if not cell.exists():
                continue
            fast = cell == in_turn or (saver == "InMemory" and durability == "async")
            marks = [] if fast else [pytest.mark.slow]
            if cell.kind.on_postgres:
                marks.append(pytest.mark.needs_postgres)
            yield pytest.param(cell, id=str(cell), marks=marks)


@pytest.fixture(scope="module")
def lives() -> Iterator[Lives]:
    made = Lives()
    yield made
    made.close()


@pytest.fixture(scope="module")
def dsn(request: pytest.FixtureRequest) -> str:
    made: str = request.getfixturevalue("_postgres_cluster").create_database()
    with PostgresSaver.from_conn_string(made) as saver:
        saver.setup()
    return made


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path, cell: Cell) -> Place:
    dsn = request.getfixturevalue("dsn") if cell.kind.on_postgres else ""
    return Place(str(tmp_path), dsn)


def host_of(cell: Cell, place: Place, lives: Lives, *, remembers: bool) -> Any:
    more: dict[str, Any] = {}
    if FAULTS[cell.fault].kills:
        more = {"timeout_s": KILLED_TIMEOUT_S, "die_elsewhere": lives.die}
    return opened(cell.saver, cell.host, cell.durability, place, remembers, **more)


def assert_true(fault: Fault, host: Host, told: Heard) -> None:
    """Nobody is told of a success that did not happen, nor that nothing happened when it did."""
    entered = host.entries_of(told.cents)
    assert told.what in fault.hears and (told.text or told.what == "asked"), told
    if told.what == "done":
        assert entered and told.text == f"refunded {told.cents}", told
    if told.what in ("rejected", "superseded"):
        assert not entered, told


@pytest.mark.parametrize("cell", list(cells()))
async def test_an_effect_is_entered_once_and_every_caller_is_told_the_truth(
    cell: Cell, place: Place, lives: Lives, record_property: Any
) -> None:
    fault = FAULTS[cell.fault]
    async with host_of(cell, place, lives, remembers=True) as host:
        told = await fault.run(host)
        record_property(PROPERTY, cell_property(*cell, True, len(host.entries)))
        assert len(host.entries) in fault.entries
        assert len(set(host.entries)) == len(host.entries), "a call was entered twice"
        for each in [*told, await host.look()]:
            assert_true(fault, host, each)
        before = host.entries
        await host.next_turn()
        assert host.entries == before


@pytest.mark.parametrize("cell", list(cells()))
async def test_without_a_ledger_the_effect_is_entered_again_where_only_a_ledger_prevents_it(
    cell: Cell, place: Place, lives: Lives, record_property: Any
) -> None:
    fault = FAULTS[cell.fault]
    async with host_of(cell, place, lives, remembers=False) as host:
        await fault.run(host)
        record_property(PROPERTY, cell_property(*cell, False, len(host.entries)))
        if cell.host in fault.twice:
            assert len(host.entries) > max(fault.entries)


@pytest.mark.slow
@pytest.mark.parametrize("doing", ["start", "approve"])
@pytest.mark.parametrize("durability", DURABILITIES)
@pytest.mark.parametrize("name", HOSTS)
@pytest.mark.parametrize(
    "saver", ["Sqlite", pytest.param("AsyncPostgres", marks=pytest.mark.needs_postgres)]
)
async def test_a_process_killed_at_any_call_of_saver_ledger_or_tool_leaves_one_entry_or_a_doubt(
    saver: str,
    name: str,
    durability: str,
    doing: str,
    tmp_path: Path,
    lives: Lives,
    request: pytest.FixtureRequest,
) -> None:
    dsn = request.getfixturevalue("dsn") if SAVERS[saver].on_postgres else ""
    place = Place(str(tmp_path), dsn)
    for call in range(1, MOST_CALLS):
        async with opened(saver, name, durability, place, True, timeout_s=0.3) as host:
            if doing == "approve":
                await host.park()
            code = await lives.live(host, doing, str(call))
            if code == 0:
                assert call > 4
                return
            assert code == -signal.SIGKILL
            told = [await host.recover(), await host.look()]
            entered = len(host.entries)
            for each in told:
                assert each.what == ("in doubt" if "in doubt" in each.text else "done"), call
                assert entered == 1 or (each.what == "in doubt" and entered == 0), call
            await host.next_turn()
            assert len(host.entries) == entered
    raise AssertionError("a life has more calls than were tried")


@pytest.mark.parametrize("durability", DURABILITIES)
@pytest.mark.parametrize("saver", ["InMemory", "AsyncSqlite"])
async def test_a_retry_of_the_node_around_a_subgraph_is_refused_and_the_thread_goes_on(
    saver: str, durability: str, tmp_path: Path
) -> None:
    async with opened(saver, "subgraph", durability, Place(str(tmp_path)), True) as host:
        item = await host.park()
        fails = RaisesAfter("agent", lambda: bool(host.entries))
        with pytest.raises(AgentConfigError, match=r"(?s)begun a second time.*with None to go on"):
            await host.answer(item, callbacks=[fails])
        assert len(host.entries) == fails.raised == 1
        assert (await host.go_on(item)).what == "done" and await host.pending() == []
        await host.next_turn()
        assert len(host.entries) == 1


def test_a_subgraph_is_begun_once_a_task_whatever_other_subgraph_the_task_began_before() -> None:
    def small(prompt: str) -> Any:
        model = FakeModel([{"text": f"{prompt} {n}"} for n in range(9)], is_async=False)
        return statechart_graph(
            loop_chart("lookup"), agent_logic(model, Refunds().tools()), as_subgraph=True
        )

    first, second = small("first"), small("second")
    calls = [first, second]

    def both(state: Any) -> Any:
        said = [each.invoke({"event": start("Go on.")})["xsm"]["context"] for each in calls]
        return {"answer": [context["result"] for context in said]}

    graph = StateGraph(State)
    graph.add_node("both", both)
    graph.add_edge(START, "both")
    app = graph.compile(checkpointer=InMemorySaver())
    for turn in range(2):
        assert app.invoke({}, thread())["answer"] == [f"first {turn}", f"second {turn}"]
    calls.append(second)
    with pytest.raises(AgentConfigError, match="begun a second time"):
        app.invoke({}, thread())


def first_of(held: Any, new: Any) -> Any:
    return held or new


class Beside(TypedDict, total=False):
    """A state that two nodes write in one superstep."""

    xsm: Annotated[Any, first_of]
    event: Annotated[Any, first_of]


def test_a_subgraph_may_stand_at_nodes_whose_names_are_numbers() -> None:
    def inner() -> Any:
        model = FakeModel([{"text": "Hello."}, {"text": "Hello."}], is_async=False)
        return statechart_graph(
            loop_chart("lookup"), agent_logic(model, Refunds().tools()), as_subgraph=True
        )

    both = inner()
    graph = StateGraph(Beside)
    for name in ("1", "2"):
        graph.add_node(name, both)
        graph.add_edge(START, name)
    app = graph.compile(checkpointer=InMemorySaver())
    out = app.invoke({"event": start()}, thread())
    assert out["xsm"]["context"]["result"] == "Hello."


@pytest.mark.parametrize("way", ["again", "reject", "new input"])
@pytest.mark.parametrize("name", HOSTS)
async def test_a_thread_that_shows_a_call_closed_elsewhere_refuses_it_and_has_ways_out(
    name: str, way: str, tmp_path: Path
) -> None:
    place = Place(str(tmp_path))
    async with opened("Sqlite", name, "async", place, remembers=True) as host:
        item = await host.park()
        parked = await host.here()
        await host.say("Never mind.")
        told = await host.answer(item, at=parked)
        assert told.what == "refused" and "closed" in told.text
        shown = await host.asked()
        assert shown["digest"] == item["digest"]
        if way == "again":
            again = {"event": approval_event([shown], again=True)}
            assert heard(await host.invoke(again), item).what == "done"
        elif way == "reject":
            assert (await host.answer(shown, "reject")).what == "rejected"
        await host.next_turn()
        assert await host.pending() == []
        assert len(host.entries) == (way == "again")


def test_the_matrix_is_printed_from_the_reports_of_the_cells_that_ran() -> None:
    class Report(NamedTuple):
        user_properties: list[tuple[str, str]]
        when: str = "call"

    def report(*cell: Any) -> Report:
        return Report([(PROPERTY, cell_property(*cell))])

    fork, race, kill = "fork before the gate", "reject before the claim", "kill after record"
    reports = [
        report(fork, "InMemory", "node", "async", True, 1),
        report(fork, "InMemory", "node", "async", False, 2),
        report(kill, "AsyncPostgres", "graph", "sync", True, 1),
        report(kill, "AsyncPostgres", "graph", "exit", True, 1),
        report(kill, "AsyncPostgres", "graph", "exit", False, 3),
        report(race, "InMemory", "node", "sync", True, 0),
        report(race, "InMemory", "node", "exit", True, 1),
        Report([("other", "x")]),
        Report([(PROPERTY, cell_property(fork, "Sqlite", "node", "async", True, 9))], "teardown"),
    ]
    assert list(lines(counted(reports)))[:-1] == [
        "                          InMemory   AsyncPostgres",
        "                          node       graph",
        "fork before the gate      1/2        .",
        "reject before the claim   0-1/.      .",
        "kill after record         -          s:1/. e:1/3",
    ]
