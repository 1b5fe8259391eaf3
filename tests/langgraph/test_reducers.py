"""Reducers of snapshots: nodes side by side, `Send`, subgraphs, forks, and what is no conflict."""

from __future__ import annotations

import asyncio
import contextlib
import json
import operator
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypedDict

import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from langgraph.errors import InvalidUpdateError
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import add_messages
from langgraph.types import Command, Overwrite, Send

from guardchart import MachineLogic
from guardchart.agents import FakeModel, agent_logic
from guardchart.errors import AgentConfigError, SnapshotConflictError, StepError
from guardchart.gate import Seal
from guardchart.langgraph import (
    apending_approval,
    pending_approval,
    snapshot_map_reducer,
    snapshot_reducer,
    statechart_graph,
    statechart_node,
)
from guardchart.persistence import InMemoryLedger
from tests.langgraph.graphs import COUNTER, REFUND, Refunds, add, loop_chart, start, thread

SAY = {"text": "Done."}
TWICE: dict[str, Any] = {
    "id": "counter",
    "initial": "low",
    "context": {"n": 0},
    "states": {"low": {"on": {"ADD": {"actions": "add"}, "OTHER": {"actions": "add"}}}},
}


class One(TypedDict, total=False):
    """One machine in one key."""

    xsm: Annotated[dict[str, Any], snapshot_reducer]
    event: Any
    messages: Annotated[list[Any], add_messages]


class Plain(TypedDict, total=False):
    xsm: dict[str, Any]
    event: Any


class Naive(TypedDict, total=False):
    xsm: Annotated[dict[str, Any], lambda left, right: right]
    event: Any


class Many(TypedDict, total=False):
    """One snapshot an item."""

    runs: Annotated[dict[str, Any], snapshot_map_reducer]
    todo: dict[str, Any]


Run = Callable[..., Any]


@dataclass
class Place:
    """A saver, and how a graph that has it is run."""

    saver: Any
    is_async: bool

    async def run(self, graph: Any, value: Any, config: Any = None) -> Any:
        config = thread() if config is None else config
        if self.is_async:
            return await graph.ainvoke(value, config)
        return await asyncio.to_thread(graph.invoke, value, config)

    async def kept(self) -> Any:
        """The snapshot in the newest checkpoint; `get_state` would take in what tasks wrote since."""
        if self.is_async:
            found = await self.saver.aget_tuple(thread())
        else:
            found = await asyncio.to_thread(self.saver.get_tuple, thread())
        return found.checkpoint["channel_values"]["xsm"]

    async def asked(self, graph: Any) -> Any:
        if self.is_async:
            return await apending_approval(graph, thread())
        return await asyncio.to_thread(pending_approval, graph, thread())

    async def history(self, graph: Any) -> list[Any]:
        if self.is_async:
            return [each async for each in graph.aget_state_history(thread())]
        return await asyncio.to_thread(lambda: list(graph.get_state_history(thread())))

    async def update(self, graph: Any, config: Any, values: Any, **more: Any) -> Any:
        if self.is_async:
            return await graph.aupdate_state(config, values, **more)
        return await asyncio.to_thread(lambda: graph.update_state(config, values, **more))


@contextlib.asynccontextmanager
async def opened(name: str, path: Path) -> AsyncIterator[Place]:
    kind, _, how = name.partition("-")
    file = str(path / "checkpoints.sqlite")
    if kind == "memory":
        yield Place(InMemorySaver(), how == "async")
    elif how == "async":
        async with AsyncSqliteSaver.from_conn_string(file) as saver:
            yield Place(saver, True)
    else:
        with SqliteSaver.from_conn_string(file) as saver:
            yield Place(saver, False)


PLACES = pytest.mark.parametrize(
    "name", ["memory-sync", "memory-async", "sqlite-sync", "sqlite-async"]
)


def counter(*, event: Any = "ADD", times: int = 1, **options: Any) -> Any:
    """A node whose machine takes an event ``times`` times, one revision each."""
    node = statechart_node(
        TWICE,
        MachineLogic(actions={"add": add}),
        event_from_state=lambda state: event,
        **options,
    )
    if times == 1:
        return node

    def repeated(state: Any) -> Any:
        for _ in range(times):
            state = {**state, **node(state)}
        return {"xsm": state["xsm"]}

    return repeated


def beside(schema: Any, saver: Any, **nodes: Any) -> Any:
    """A graph whose nodes all run in the first superstep."""
    graph = StateGraph(schema)
    for name, node in nodes.items():
        graph.add_node(name, node)
        graph.add_edge(START, name)
        graph.add_edge(name, END)
    return graph.compile(checkpointer=saver)


def behind(schema: Any, saver: Any, **nodes: Any) -> Any:
    """A graph whose nodes run one after the other."""
    graph = StateGraph(schema)
    at = START
    for name, node in nodes.items():
        graph.add_node(name, node)
        graph.add_edge(at, name)
        at = name
    graph.add_edge(at, END)
    return graph.compile(checkpointer=saver)


def loop(script: list[Any], refunds: Refunds | None = None, **options: Any) -> Any:
    options.setdefault("ledger", InMemoryLedger())
    return statechart_graph(
        loop_chart("lookup", "refund"),
        agent_logic(FakeModel(script, is_async=False), (refunds or Refunds()).tools()),
        **options,
    )


# --- one key, several writers ------------------------------------------------------------------


@PLACES
@pytest.mark.parametrize("steps", [(1, 1), (1, 2), (2, 1)])
async def test_two_nodes_that_move_one_machine_at_once_are_an_error_that_says_what_to_do(
    name: str, steps: tuple[int, int], tmp_path: Path
) -> None:
    async with opened(name, tmp_path) as place:
        first = behind(One, place.saver, a=counter())
        await place.run(first, {})
        a, b = (counter(times=each) for each in steps)
        graph = beside(One, place.saver, a=a, b=b)
        with pytest.raises(SnapshotConflictError, match="snapshot_map_reducer") as refused:
            await place.run(graph, {})
        assert isinstance(refused.value, StepError) and refused.value.code == "snapshot-conflict"
        assert "state key of its own" in str(refused.value)
        # Nothing of the superstep was kept, and the thread goes on with new input.
        assert (await place.kept())["context"]["n"] == 1
        assert (await place.run(first, {}))["xsm"]["context"]["n"] == 2


@PLACES
async def test_two_nodes_that_start_a_machine_at_once_are_two_runs(
    name: str, tmp_path: Path
) -> None:
    async with opened(name, tmp_path) as place:
        graph = beside(One, place.saver, a=counter(), b=counter())
        with pytest.raises(SnapshotConflictError, match="two runs of one machine"):
            await place.run(graph, {})


def test_two_machines_in_one_key_are_an_error() -> None:
    other = statechart_node({**COUNTER, "id": "other"}, MachineLogic(
        actions={"add": add}, guards={"allowed": lambda c, e: True}
    ), event_from_state=lambda state: "ADD")  # fmt: skip
    graph = beside(One, InMemorySaver(), a=counter(), b=other)
    with pytest.raises(SnapshotConflictError, match="snapshots of two machines"):
        graph.invoke({}, thread())


def test_two_moves_that_come_to_the_same_are_two_all_the_same() -> None:
    graph = behind(One, InMemorySaver(), a=counter())
    graph.invoke({}, thread())
    moved = [counter()(graph.get_state(thread()).values) for _ in "ab"]
    assert len({json.dumps(each["xsm"]["context"]) for each in moved}) == 1
    both = beside(One, graph.checkpointer, a=counter(), b=counter(event="OTHER"))
    with pytest.raises(SnapshotConflictError):
        both.invoke({}, thread())


@PLACES
async def test_nodes_one_after_the_other_move_the_machine_in_turn(
    name: str, tmp_path: Path
) -> None:
    async with opened(name, tmp_path) as place:
        graph = behind(One, place.saver, a=counter(), b=counter(times=3), c=counter(event="NO"))
        assert (await place.run(graph, {}))["xsm"]["context"]["n"] == 4
        out = await place.run(graph, {})
        assert out["xsm"]["context"]["n"] == 8 and out["xsm"]["receipt"]["event"] == "NO"


@pytest.mark.parametrize("idle", ["a", "z"])
def test_a_node_beside_that_moves_nothing_is_no_conflict(idle: str) -> None:
    graph = behind(One, InMemorySaver(), m=counter())
    graph.invoke({}, thread())
    quiet = {
        idle: counter(event=None),
        idle * 2: lambda state: dict(state),  # hands on what it was given
        idle * 3: lambda state: {"xsm": None},
    }
    app = beside(One, graph.checkpointer, m=counter(), **quiet)
    assert app.invoke({}, thread())["xsm"]["context"]["n"] == 2


def test_without_the_reducer_langgraph_refuses_and_a_naive_one_loses_a_move() -> None:
    plain = beside(Plain, InMemorySaver(), a=counter(), b=counter())
    with pytest.raises(InvalidUpdateError, match="At key 'xsm': Can receive only one value"):
        plain.invoke({}, thread())
    naive = beside(Naive, InMemorySaver(), a=counter(), b=counter(times=3))
    assert naive.invoke({}, thread())["xsm"]["context"]["n"] == 3


# --- Send --------------------------------------------------------------------------------------


def fan_out(node: Any, schema: Any, saver: Any, split: Any) -> Any:
    graph = StateGraph(schema)
    graph.add_node("agent", node)
    graph.add_conditional_edges(START, split, ["agent"])
    graph.add_edge("agent", END)
    return graph.compile(checkpointer=saver)


def of_item(node: Any, is_async: bool) -> Any:
    """A node that moves the machine of one item, and writes it into the map."""
    if is_async:

        async def acall(state: Any) -> Any:
            return {"runs": {state["item"]: (await node.ainvoke(state)).get("xsm")}}

        return acall

    def call(state: Any) -> Any:
        return {"runs": {state["item"]: node(state).get("xsm")}}

    return call


def each_item(state: Any) -> list[Send]:
    runs = state.get("runs") or {}
    return [
        Send("agent", {"item": item, "event": event, "xsm": runs.get(item)})
        for item, event in state["todo"].items()
    ]


def sent(**options: Any) -> Any:
    return statechart_node(
        TWICE,
        MachineLogic(actions={"add": add}),
        event_from_state=lambda state: state["event"],
        **options,
    )


@PLACES
async def test_items_sent_to_one_node_keep_a_snapshot_each_in_one_map(
    name: str, tmp_path: Path
) -> None:
    async with opened(name, tmp_path) as place:
        graph = fan_out(of_item(sent(), place.is_async), Many, place.saver, each_item)
        todo = {item: {"type": "ADD", "by": by} for item, by in (("a", 1), ("b", 2), ("c", 3))}
        out = await place.run(graph, {"todo": todo})
        assert {k: v["context"]["n"] for k, v in out["runs"].items()} == {"a": 1, "b": 2, "c": 3}
        assert len({each["run"] for each in out["runs"].values()}) == 3
        out = await place.run(graph, {"todo": {"b": {"type": "ADD", "by": 10}, "c": None}})
        assert {k: v["context"]["n"] for k, v in out["runs"].items()} == {"a": 1, "b": 12, "c": 3}


@PLACES
async def test_one_item_sent_twice_is_an_error(name: str, tmp_path: Path) -> None:
    async with opened(name, tmp_path) as place:
        graph = fan_out(
            of_item(sent(), place.is_async),
            Many,
            place.saver,
            lambda state: [*each_item(state), *each_item(state)],
        )
        with pytest.raises(SnapshotConflictError):
            await place.run(graph, {"todo": {"a": "ADD"}})


@PLACES
async def test_items_sent_to_one_node_on_one_key_are_an_error(name: str, tmp_path: Path) -> None:
    async with opened(name, tmp_path) as place:
        graph = fan_out(
            sent(),
            One,
            place.saver,
            lambda state: [Send("agent", {"event": {"type": "ADD", "by": n}}) for n in (1, 2, 3)],
        )
        with pytest.raises(SnapshotConflictError, match="two runs of one machine"):
            await place.run(graph, {})


# --- subgraphs ---------------------------------------------------------------------------------


def approval(calls: list[dict[str, Any]]) -> Command[Any]:
    """The answer that approves all of them."""
    decided = [{"id": c["id"], "digest": c["digest"], "decision": "approve"} for c in calls]
    return Command(resume={"decisions": decided})


@PLACES
@pytest.mark.parametrize("as_subgraph", [False, True])
async def test_a_subgraphs_snapshot_is_taken_however_far_it_went(
    name: str, as_subgraph: bool, tmp_path: Path
) -> None:
    async with opened(name, tmp_path) as place:
        refunds = Refunds()
        script = [REFUND, SAY, SAY, REFUND, SAY]
        inner = loop(script, refunds, as_subgraph=as_subgraph, messages_key="messages")
        graph = behind(One, place.saver, agent=inner)

        async def turn(value: Any) -> Any:
            return await place.run(graph, value)

        async def approved() -> Any:
            return await turn(approval(await place.asked(graph)))

        await turn({"event": start("one")})
        revs = [(await approved())["xsm"]["rev"]]
        revs.append((await turn({"event": start("two")}))["xsm"]["rev"])
        await turn({"event": start("three")})
        revs.append((await approved())["xsm"]["rev"])
        assert refunds.done == [(7, 500)] * 2 and revs == sorted(set(revs))
        assert revs[0] > 2


@PLACES
@pytest.mark.parametrize("as_subgraph", [False, True])
@pytest.mark.parametrize("longer", ["a", "b"])
async def test_two_subgraphs_side_by_side_on_one_key_are_an_error(
    name: str, as_subgraph: bool, longer: str, tmp_path: Path
) -> None:
    async with opened(name, tmp_path) as place:
        first = behind(One, place.saver, a=loop([SAY]))
        before = (await place.run(first, {"event": start("one")}))["xsm"]
        look = {"tool": "lookup", "args": {"order_id": 1}}
        scripts = {"a": [SAY], "b": [SAY], longer: [look, look, SAY]}
        inner = {
            name: loop(script, as_subgraph=as_subgraph, state_schema=Plain)
            for name, script in scripts.items()
        }

        def only(state: Any) -> Any:
            return {"event": None}

        graph = StateGraph(Reports)
        graph.add_node("rest", only)
        for name_, node in inner.items():
            graph.add_node(name_, node)
            graph.add_edge(START, name_)
            graph.add_edge(name_, "rest")
        app = graph.compile(checkpointer=place.saver)
        with pytest.raises(SnapshotConflictError, match="two updates of one machine"):
            await place.run(app, {"event": start("two")})
        assert (await place.kept()) == before


class Reports(TypedDict, total=False):
    xsm: Annotated[dict[str, Any], snapshot_reducer]
    event: Annotated[Any, lambda left, right: right]


@PLACES
async def test_two_subgraphs_side_by_side_on_keys_of_their_own_both_move(
    name: str, tmp_path: Path
) -> None:
    class Two(TypedDict, total=False):
        a: Annotated[dict[str, Any], snapshot_reducer]
        b: Annotated[dict[str, Any], snapshot_reducer]
        event: Annotated[Any, lambda left, right: right]

    async with opened(name, tmp_path) as place:
        graph = beside(
            Two,
            place.saver,
            one=loop([SAY, SAY], state_key="a"),
            two=loop([SAY, SAY], state_key="b"),
        )
        for turn in ("one", "two"):
            out = await place.run(graph, {"event": start(turn)})
        assert [out[key]["context"]["result"] for key in "ab"] == ["Done.", "Done."]


@PLACES
@pytest.mark.parametrize("memory", [None, True])
async def test_a_node_that_runs_often_in_a_subgraph_of_the_app_is_one_update(
    name: str, memory: Any, tmp_path: Path
) -> None:
    def again(state: Any) -> str:
        return END if state["xsm"]["context"]["n"] % 5 == 0 else "n"

    def looping() -> Any:
        graph = StateGraph(Plain)
        graph.add_node("n", counter())
        graph.add_edge(START, "n")
        graph.add_conditional_edges("n", again, ["n", END])
        return graph.compile(checkpointer=memory)

    async with opened(name, tmp_path) as place:
        single = behind(One, place.saver, a=looping())
        for n in (5, 10, 15):
            assert (await place.run(single, {}))["xsm"]["context"]["n"] == n
        # One writes a single snapshot, the other one several, the last of them far ahead.
        for order in ({"a": counter(), "z": looping()}, {"a": looping(), "z": counter()}):
            with pytest.raises(SnapshotConflictError):
                await place.run(beside(One, place.saver, **order), {}, None)
            assert (await place.kept())["context"]["n"] == 15


@PLACES
@pytest.mark.parametrize("schema", [Plain, One])
async def test_new_input_to_a_waiting_subgraph_finds_the_run_of_a_later_turn_too(
    name: str, schema: Any, tmp_path: Path
) -> None:
    class Said(schema, total=False):  # type: ignore[misc, valid-type]
        messages: Annotated[list[Any], add_messages]

    async with opened(name, tmp_path) as place:
        refunds, ledger = Refunds(), InMemoryLedger()
        inner = loop(
            [SAY, REFUND, {"text": "What else?"}, SAY],
            refunds,
            ledger=ledger,
            as_subgraph=True,
            messages_key="messages",
            state_schema=Said,
        )
        graph = behind(Said, place.saver, agent=inner)
        await place.run(graph, {"event": start("hello")})
        await place.run(graph, {"event": start("a refund")})
        (asked,) = await place.asked(graph)
        out = await place.run(graph, {"event": start("never mind")})
        assert [type(each) for each in out["messages"]] == [
            HumanMessage, AIMessage, HumanMessage, AIMessage, ToolMessage, HumanMessage, AIMessage,
        ]  # fmt: skip
        assert out["messages"][4].content == "not run: superseded by new input"
        assert ledger.row("t1", asked["id"]).status == "void" and refunds.done == []
        # The snapshot that came to the parent is the one that the next turn starts from.
        again = await place.run(graph, {"event": start("bye")})
        assert again["xsm"]["rev"] > out["xsm"]["rev"] and again["messages"][-1].content == "Done."


@dataclass
class Defaults:
    """A parent's state that hands its subgraph a None for what it has not got yet."""

    xsm: Any = None
    event: Any = None
    messages: Annotated[list[Any], add_messages] = field(default_factory=list)


def test_new_input_to_a_waiting_subgraph_finds_its_run_where_the_parents_state_has_defaults() -> (
    None
):
    refunds = Refunds()
    inner = loop(
        [REFUND, {"text": "What else?"}],
        refunds,
        as_subgraph=True,
        messages_key="messages",
        state_schema=Defaults,
    )
    graph = behind(Defaults, InMemorySaver(), agent=inner)
    graph.invoke({"event": start("a refund")}, thread())
    out = graph.invoke({"event": start("never mind")}, thread())
    assert out["messages"][2].content == "not run: superseded by new input"


def test_a_subgraph_that_came_to_its_end_goes_back_with_its_parent() -> None:
    inner = loop([SAY, SAY, SAY], as_subgraph=True, state_schema=Plain)
    graph = behind(Plain, InMemorySaver(), agent=inner)
    first = graph.invoke({"event": start("one")}, thread())["xsm"]
    then = graph.get_state(thread()).config
    second = graph.invoke({"event": start("two")}, thread())["xsm"]
    forked = graph.invoke({"event": start("three")}, then)["xsm"]
    assert first["rev"] < second["rev"] == forked["rev"]
    said = [each["content"] for each in forked["context"]["messages"]]
    assert said == ["one", "Done.", "three", "Done."]


# --- forks, time travel, what is written on purpose -----------------------------------------------


@PLACES
async def test_a_fork_goes_on_from_where_it_began(name: str, tmp_path: Path) -> None:
    async with opened(name, tmp_path) as place:
        graph = behind(One, place.saver, a=counter(), b=counter())
        for _ in range(3):
            await place.run(graph, {})
        states = await place.history(graph)
        n_of = [(each.values.get("xsm") or {}).get("context", {}).get("n", 0) for each in states]
        then = states[n_of.index(2)]
        # Once more from a checkpoint in the middle, without input: time travel.
        middle = states[n_of.index(3)]
        assert (await place.run(graph, None, middle.config))["xsm"]["context"]["n"] == 4
        assert (await place.run(graph, {}, then.config))["xsm"]["context"]["n"] == 4
        forked = await place.update(graph, then.config, {"event": "x"}, as_node="b")
        assert (await place.run(graph, {}, forked))["xsm"]["context"]["n"] == 4
        assert (await place.run(graph, {}))["xsm"]["context"]["n"] == 6


@PLACES
async def test_a_snapshot_is_put_back_or_taken_away_by_overwrite_only(
    name: str, tmp_path: Path
) -> None:
    async with opened(name, tmp_path) as place:
        graph = behind(One, place.saver, a=counter())
        old = (await place.run(graph, {}))["xsm"]
        await place.run(graph, {})
        new = (await place.run(graph, {}))["xsm"]
        with pytest.raises(SnapshotConflictError, match="Overwrite"):
            await place.run(graph, {"xsm": old})
        edited = {**new, "context": {"n": 40}}
        with pytest.raises(SnapshotConflictError, match="Overwrite"):
            await place.update(graph, thread(), {"xsm": edited})
        # The same again, and nothing, are no updates.
        assert (await place.run(graph, {"xsm": new}))["xsm"]["context"]["n"] == 4
        assert (await place.run(graph, {"xsm": {}}))["xsm"]["context"]["n"] == 5
        assert (await place.run(graph, {"xsm": Overwrite(edited)}))["xsm"]["context"]["n"] == 41
        await place.update(graph, thread(), {"xsm": Overwrite(old)})
        assert (await place.run(graph, {}))["xsm"]["context"]["n"] == 2
        out = await place.run(graph, {"xsm": Overwrite({})})
        assert out["xsm"]["context"]["n"] == 1 and out["xsm"]["run"] != old["run"]


@pytest.mark.parametrize("seal", [None, Seal("0123456789abcdef")])
@pytest.mark.parametrize("messages_key", [None, "messages"])
def test_a_compiled_chart_keeps_its_own_key_by_the_reducer_if_it_is_declared(
    seal: Any, messages_key: str | None
) -> None:
    refunds = Refunds()
    graph = loop(
        [REFUND, SAY, SAY],
        refunds,
        state_schema=One,
        seal=seal,
        messages_key=messages_key,
        checkpointer=InMemorySaver(),
    )
    graph.invoke({"event": start()}, thread())
    graph.invoke(approval(pending_approval(graph, thread())), thread())
    out = graph.invoke({"event": start("and?")}, thread())
    assert refunds.done == [(7, 500)] and out["xsm"]["context"]["result"] == "Done."


@pytest.mark.gate
def test_a_tampered_snapshot_ends_as_tampered_under_the_reducer_too() -> None:
    refunds = Refunds()
    graph = loop(
        [REFUND, SAY],
        refunds,
        state_schema=One,
        seal=Seal("0123456789abcdef"),
        checkpointer=InMemorySaver(),
    )
    state = graph.invoke({"event": start()}, thread())["xsm"]
    state["context"]["pending_tool_calls"][0]["arguments"]["amount_cents"] = 99
    graph.update_state(thread(), {"xsm": Overwrite(state)}, as_node="model")
    out = graph.invoke(None, thread())
    assert out["xsm"]["context"]["error"]["kind"] == "tampered" and refunds.done == []


# --- the reducers alone ------------------------------------------------------------------------


def mark(tasks: list[str], came: list[str], **more: Any) -> dict[str, Any]:
    return {"rev": 1, "run": "r", "lineage": {"tasks": tasks, "from": came}, **more}


def test_siblings_are_told_in_any_order() -> None:
    base, one, two = mark(["a"], [""]), mark(["b"], ["a"]), mark(["c", "d"], ["a", "x"])
    for first, second in ((one, two), (two, one)):
        held = snapshot_reducer(base, first)
        assert held is first
        with pytest.raises(SnapshotConflictError):
            snapshot_reducer(held, second)


def test_snapshots_as_json_text_are_compared_as_what_they_say() -> None:
    base, one = mark(["a"], [""]), mark(["b"], ["a"])
    text = json.dumps(base)
    assert snapshot_reducer(base, text) is base and snapshot_reducer(text, base) is text
    assert snapshot_reducer(text, one) is one
    assert snapshot_reducer(text, json.loads(json.dumps(one))) == one


def test_a_snapshot_from_before_there_were_marks_is_told_by_run_and_revision() -> None:
    graph = behind(One, InMemorySaver(), a=counter())
    old = graph.invoke({}, thread())["xsm"]
    del old["lineage"]
    assert graph.invoke({"xsm": Overwrite(old)}, thread())["xsm"]["context"]["n"] == 2
    with pytest.raises(SnapshotConflictError):
        beside(One, InMemorySaver(), a=counter(), b=counter()).invoke({"xsm": old}, thread())


@pytest.mark.parametrize(
    "odd",
    [
        {"lineage": 5},
        {"lineage": {"tasks": "ab", "from": {"a": 1}}},
        {"lineage": {"tasks": [1], "from": [None]}},
        {"lineage": {"open": "yes"}},
        {"machine": 3},
        {"run": [], "rev": {}},
    ],
)
def test_odd_marks_in_the_state_are_none(odd: dict[str, Any]) -> None:
    base = mark(["a"], [""])
    with pytest.raises(SnapshotConflictError):
        snapshot_reducer(base, odd)
    with pytest.raises(SnapshotConflictError):
        snapshot_reducer(odd, base)
    assert snapshot_reducer(odd, dict(odd)) is odd


@pytest.mark.parametrize("value", [5, [], "no json", object()])
def test_what_is_no_snapshot_is_refused(value: Any) -> None:
    with pytest.raises(AgentConfigError):
        snapshot_reducer({}, value)
    with pytest.raises(AgentConfigError):
        snapshot_map_reducer({}, {"a": value})
    with pytest.raises(AgentConfigError, match="map of snapshots"):
        snapshot_map_reducer({}, value)


def test_a_map_is_merged_item_by_item_and_not_changed_in_place() -> None:
    base = {"a": mark(["1"], [""]), "b": mark(["2"], [""])}
    kept = dict(base)
    merged = snapshot_map_reducer(base, {"b": mark(["3"], ["2"]), "c": mark(["4"], [""])})
    assert base == kept and sorted(merged) == ["a", "b", "c"]
    assert merged["b"]["lineage"]["tasks"] == ["3"] and merged["a"] is base["a"]
    assert snapshot_map_reducer(merged, {"b": None}) == merged
    assert snapshot_map_reducer(None, None) == {}
    with pytest.raises(SnapshotConflictError):
        snapshot_map_reducer(merged, {"b": mark(["5"], ["2"])})


def test_outside_of_a_graph_a_node_writes_no_marks() -> None:
    assert "lineage" not in counter()({})["xsm"]
    assert operator.contains(behind(One, None, a=counter()).invoke({})["xsm"], "lineage")
