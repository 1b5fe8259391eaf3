"""Child machines in a compiled chart: invoked loops, spawned agents, their calls and deadlines."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from langgraph.types import Command

from guardchart import MachineLogic, SimulatedClock, create_machine
from guardchart.agents import (
    FakeModel,
    RetryPolicy,
    agent_logic,
    create_text_logic,
    load_chart,
    spawn_agent,
)
from guardchart.errors import AgentConfigError
from guardchart.gate import Seal
from guardchart.langgraph import (
    apending_approval,
    aresume_pending,
    ledger_for,
    pending_approval,
    resume_pending,
    statechart_graph,
    statechart_node,
)
from guardchart.persistence import InMemoryLedger
from tests.langgraph.graphs import REFUND, Refunds, compiled, loop_chart, thread
from tests.langgraph.test_graph import run, visited

KEY = "0123456789abcdef"
SAY = {"text": "Done."}
LOOKUP = {"tool": "lookup", "args": {"order_id": 42}}
KINDS = pytest.mark.parametrize("kind", ["sync", "async"])

BOSS: dict[str, Any] = {
    "id": "boss",
    "initial": "work",
    "states": {
        "work": {
            "invoke": {
                "src": "worker",
                "id": "w",
                "input": "please",
                "onDone": "end",
                "onError": "failed",
            }
        },
        "end": {"type": "final"},
        "failed": {"type": "final"},
    },
}
"""It invokes a tool loop."""

DESK: dict[str, Any] = {
    "id": "desk",
    "initial": "open",
    "context": {"answers": [], "left": 0},
    "meta": {"tools": ["lookup", "refund"]},
    "states": {
        "open": {
            "on": {
                "ASK": {"actions": ["count", "spawnClerk"]},
                "AGENT_DONE": {"actions": "keep"},
                "AGENT_FAILED": {"actions": "fail"},
            },
            "always": {"target": "closed", "guard": "allIn"},
        },
        "closed": {"type": "final"},
    },
}
"""It spawns an agent for each ASK and closes when all have reported."""


def boss(script: list[Any], refunds: Refunds, *, is_async: bool = False, **options: Any) -> Any:
    worker = create_machine(
        loop_chart("lookup", "refund"),
        agent_logic(
            FakeModel(script, is_async=is_async),
            refunds.tools(),
            retry=RetryPolicy(max_attempts=2, delay_s=0),
        ),
    )
    logic = MachineLogic(services={"worker": worker})
    return statechart_graph(BOSS, logic, **options)


def desk(scripts: list[Any], refunds: Refunds, *, is_async: bool = False, **options: Any) -> Any:
    clerk = spawn_agent(
        loop_chart("lookup", "refund"),
        FakeModel(scripts, is_async=is_async),
        refunds.tools(),
        budget={"max_turns": 5},
        name="clerk",
    )
    own = MachineLogic(
        actions={
            "count": lambda context, event: {"left": context["left"] + 1},
            "keep": lambda context, event: {
                "answers": [*context["answers"], event.payload["result"]],
                "left": context["left"] - 1,
            },
            "fail": lambda context, event: {"left": context["left"] - 1},
        },
        guards={"allIn": lambda context, event: context["left"] == 0 and bool(context["answers"])},
    )
    return statechart_graph(DESK, own.merge(clerk), **options)


class Life:
    """One process: it opens the saver, builds the graph, and does one thing with it."""

    def __init__(self, kind: str, file: Path, build: Any) -> None:
        self.kind, self.file, self.build = kind, str(file / "app.sqlite"), build

    async def ask(self, value: Any) -> list[dict[str, Any]]:
        """Run, and say what waits for a person."""
        if self.kind == "async":
            async with AsyncSqliteSaver.from_conn_string(self.file) as saver:
                graph = self.build(checkpointer=saver, ledger=ledger_for(saver))
                await graph.ainvoke(value, thread())
                return await apending_approval(graph, thread())

        def once() -> list[dict[str, Any]]:
            with SqliteSaver.from_conn_string(self.file) as saver:
                graph = self.build(checkpointer=saver, ledger=ledger_for(saver))
                graph.invoke(value, thread())
                return pending_approval(graph, thread())

        return await asyncio.to_thread(once)

    async def answer(self, decisions: list[dict[str, Any]]) -> Any:
        """Resume with decisions, from another process."""
        if self.kind == "async":
            async with AsyncSqliteSaver.from_conn_string(self.file) as saver:
                graph = self.build(checkpointer=saver, ledger=ledger_for(saver))
                return await aresume_pending(graph, thread(), decisions, by="ann")

        def once() -> Any:
            with SqliteSaver.from_conn_string(self.file) as saver:
                graph = self.build(checkpointer=saver, ledger=ledger_for(saver))
                return resume_pending(graph, thread(), decisions, by="ann")

        return await asyncio.to_thread(once)


def approve(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**call, "decision": "approve"} for call in calls]


# --- invoked -----------------------------------------------------------------------------------


@KINDS
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("seal", [None, Seal(KEY)])
@pytest.mark.parametrize("mode", ["batched", "per_call"])
async def test_an_invoked_loop_asks_a_person_and_is_resumed_elsewhere(
    kind: str, is_async: bool, seal: Any, mode: Any, tmp_path: Path
) -> None:
    refunds = Refunds()
    options: dict[str, Any] = {"is_async": is_async, "seal": seal, "interrupt_mode": mode}
    first = Life(kind, tmp_path, lambda **more: boss([LOOKUP, REFUND], refunds, **options, **more))
    (call,) = await first.ask({"event": None})
    assert call["agent_id"] == "boss:w" and refunds.done == []
    # The other process has a model that goes on: none is asked again.
    second = Life(kind, tmp_path, lambda **more: boss([SAY], refunds, **options, **more))
    out = await second.answer(approve([call]))
    assert refunds.done == [(7, 500)]
    assert out["xsm"]["value"] == "end"


@KINDS
async def test_each_call_of_an_invoked_loop_is_a_task_of_its_own(kind: str) -> None:
    graph = boss([LOOKUP, SAY], Refunds(), checkpointer=InMemorySaver())
    if kind == "async":
        await graph.ainvoke({"event": None}, thread())
    else:
        await asyncio.to_thread(graph.invoke, {"event": None}, thread())
    assert visited(graph) == ["step", "model", "step", "tools", "step", "model", "step"]


def test_an_invoked_loops_model_is_tried_again_by_the_loops_own_timer() -> None:
    graph = boss([RuntimeError("down"), SAY], Refunds(), checkpointer=InMemorySaver())
    out = graph.invoke({"event": None}, thread())
    assert out["xsm"]["value"] == "end" and visited(graph).count("model") == 2


def test_what_an_invoked_loop_did_is_kept_when_the_process_dies() -> None:
    class Killed(BaseException):
        """The process ends here."""

    refunds, inner = Refunds(), FakeModel([LOOKUP, SAY], is_async=False)
    alive = iter([True, False])

    def model(*args: Any) -> Any:
        if not next(alive, True):
            raise Killed
        return inner(*args)

    worker = create_machine(loop_chart("lookup"), agent_logic(model, refunds.tools()))
    logic = MachineLogic(services={"worker": worker})
    graph = statechart_graph(BOSS, logic, checkpointer=InMemorySaver())
    with pytest.raises(Killed):
        graph.invoke({"event": None}, thread())
    out = resume_pending(graph, thread())
    assert out["xsm"]["value"] == "end" and len(inner.calls) == 2


@pytest.mark.gate
def test_a_rejected_call_of_an_invoked_loop_runs_nothing() -> None:
    refunds = Refunds()
    graph = boss([REFUND, SAY], refunds, checkpointer=InMemorySaver(), ledger=InMemoryLedger())
    graph.invoke({"event": None}, thread())
    (call,) = pending_approval(graph, thread())
    out = resume_pending(graph, thread(), [{**call, "decision": "reject", "reason": "no"}])
    assert refunds.done == [] and out["xsm"]["value"] == "end"


def _ticking() -> tuple[Any, MachineLogic]:
    child = create_machine(
        {
            "id": "child",
            "initial": "one",
            "states": {
                "one": {"after": {"1000": "two"}},
                "two": {"on": {"GO": "three"}},
                "three": {"type": "final"},
            },
        }
    )
    chart = {
        "id": "host",
        "initial": "on",
        "states": {
            "on": {"invoke": {"src": "child", "id": "c", "onDone": "off"}},
            "off": {"type": "final"},
        },
    }
    return chart, MachineLogic(services={"child": child})


@pytest.mark.parametrize("form", ["graph", "node"])
def test_a_childs_deadline_that_passes_between_two_calls_is_kept(form: str) -> None:
    chart, logic = _ticking()
    clock = SimulatedClock()
    if form == "graph":
        graph = statechart_graph(chart, logic, clock=clock, checkpointer=InMemorySaver())
    else:
        graph = compiled(
            statechart_node(chart, logic, event_from_state=lambda state: None, clock=clock)
        )

    def child() -> Any:
        return graph.get_state(thread()).values["xsm"]["children"]["c"]["snapshot"]["value"]

    graph.invoke({"event": None}, thread())
    assert child() == "one"
    clock.increment(2000)
    graph.invoke({"event": None}, thread())
    assert child() == "two"


# --- spawned -----------------------------------------------------------------------------------


@KINDS
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("mode", ["batched", "per_call"])
async def test_a_spawned_agent_asks_a_person_and_is_resumed_elsewhere(
    kind: str, is_async: bool, mode: Any, tmp_path: Path
) -> None:
    refunds = Refunds()
    options: dict[str, Any] = {"is_async": is_async, "seal": Seal(KEY), "interrupt_mode": mode}
    first = Life(kind, tmp_path, lambda **more: desk([LOOKUP, REFUND], refunds, **options, **more))
    (call,) = await first.ask({"event": {"type": "ASK", "task": "Refund order 7"}})
    assert call["agent_id"] == "desk:clerk-1" and refunds.done == []
    second = Life(kind, tmp_path, lambda **more: desk([SAY], refunds, **options, **more))
    out = await second.answer(approve([call]))
    assert refunds.done == [(7, 500)]
    assert out["xsm"]["value"] == "closed" and out["xsm"]["context"]["answers"] == ["Done."]


def _two(refunds: Refunds, scripts: list[Any], **options: Any) -> Any:
    """A desk with two clerks that both want to refund."""
    options.setdefault("checkpointer", InMemorySaver())
    options.setdefault("ledger", InMemoryLedger())
    graph = desk(scripts, refunds, seal=Seal(KEY), **options)
    for task in ("one", "two"):
        graph.invoke({"event": {"type": "ASK", "task": task}}, thread())
    return graph


def _refund(order: int) -> dict[str, Any]:
    return {"tool": "refund", "args": {"order_id": order, "amount_cents": 5}}


@pytest.mark.gate
@pytest.mark.parametrize("mode", ["batched", "per_call"])
def test_one_agents_call_is_approved_and_anothers_rejected(mode: Any) -> None:
    refunds = Refunds()
    graph = _two(refunds, [_refund(1), _refund(2), SAY, SAY], interrupt_mode=mode)
    calls = pending_approval(graph, thread())
    assert [call["agent_id"] for call in calls] == ["desk:clerk-1", "desk:clerk-2"]
    decided = [{**calls[0], "decision": "reject"}, {**calls[1], "decision": "approve"}]
    out = resume_pending(graph, thread(), decided)
    assert refunds.done == [(2, 5)] and out["xsm"]["context"]["answers"] == ["Done.", "Done."]


@pytest.mark.gate
def test_an_answer_to_one_agents_call_counts_for_no_other_agent() -> None:
    refunds = Refunds()
    graph = _two(refunds, [_refund(1), _refund(1), SAY, SAY])
    first, second = pending_approval(graph, thread())
    both = [{**first, "decision": "approve"}, {**first, "decision": "approve"}]
    with pytest.raises((AgentConfigError, ValueError)):
        resume_pending(graph, thread(), both)
    assert refunds.done == []
    assert pending_approval(graph, thread()) == [first, second]


def test_models_of_agents_are_asked_side_by_side() -> None:
    refunds = Refunds()
    graph = _two(refunds, [_refund(1), _refund(2), SAY, SAY])
    decided = [{**call, "decision": "reject"} for call in pending_approval(graph, thread())]
    resume_pending(graph, thread(), decided)
    assert visited(graph)[-4:] == ["step", "model", "model", "step"]


def test_an_actions_error_about_a_child_is_the_apps() -> None:
    def broken(context: Any, event: Any) -> None:
        raise LookupError("the app's own")

    chart = json.loads(json.dumps(BOSS))
    chart["states"]["work"]["invoke"]["onDone"] = {"target": "end", "actions": "keep"}
    worker = create_machine(
        load_chart(), agent_logic(FakeModel([SAY], is_async=False), Refunds().tools())
    )
    logic = MachineLogic(services={"worker": worker}, actions={"keep": broken})
    graph = statechart_graph(
        {**chart, "actionErrorPolicy": "fail"}, logic, checkpointer=InMemorySaver()
    )
    with pytest.raises(LookupError):
        graph.invoke({"event": None}, thread())


@pytest.mark.gate
def test_an_agent_edited_in_the_state_runs_nothing() -> None:
    refunds = Refunds()
    graph = _two(refunds, [_refund(1), _refund(2), SAY, SAY])
    calls = pending_approval(graph, thread())
    state = graph.get_state(thread()).values["xsm"]
    below = state["children"]["clerk-1"]["snapshot"]["context"]["pending_tool_calls"]
    below[0]["arguments"]["amount_cents"] = 99_999
    graph.update_state(thread(), {"xsm": state}, as_node="model")
    with pytest.raises(Exception, match="seal"):
        graph.invoke(Command(resume={"decisions": approve(calls)}), thread())
    assert refunds.done == []


def test_spawned_agents_without_a_seal_are_refused_when_the_graph_is_built() -> None:
    with pytest.raises(AgentConfigError, match="pass seal="):
        desk([SAY], Refunds())
    spawned = spawn_agent(
        load_chart(),
        FakeModel([SAY], is_async=False),
        Refunds().tools(),
        budget={"max_turns": 1},
        name="clerk",
        retry=RetryPolicy(delay_s=60),
    )
    own = MachineLogic(
        actions=dict.fromkeys(("count", "keep", "fail"), lambda context, event: None),
        guards={"allIn": lambda context, event: False},
    )
    with pytest.raises(AgentConfigError, match="retry delay"):
        statechart_graph(DESK, own.merge(spawned), seal=Seal(KEY))


SPAWNING: dict[str, Any] = {
    "id": "spawning",
    "initial": "open",
    "context": {"found": None},
    "states": {
        "open": {
            "entry": "begin",
            "on": {"xstate.done.actor.helper": {"target": "over", "actions": "keep"}},
        },
        "over": {"type": "final"},
    },
}
"""What it waits for is invoked by no state: an action spawns it."""


@KINDS
@pytest.mark.parametrize("below", [False, True], ids=["alone", "below"])
@pytest.mark.parametrize("named", [True, False], ids=["named", "unnamed"])
async def test_a_service_that_an_action_spawns_is_run_if_a_task_can_find_it(
    kind: str, named: bool, below: bool
) -> None:
    def work(scope: Any, context: Any, event: Any) -> int:
        return 42

    def begin(scope: Any, context: Any, event: Any, action: Any) -> None:
        scope.spawn("work" if named else work, id="helper")

    chart = SPAWNING
    logic = MachineLogic(
        actions={"begin": begin, "keep": lambda context, event: {"found": event.data}},
        services={"work": work} if named else {},
    )
    if below:
        logic = MachineLogic(services={"kid": create_machine(chart, logic)})
        kid = {"src": "kid", "id": "kid", "onDone": "over"}
        states = {"open": {"invoke": kid}, "over": {"type": "final"}}
        chart = {"id": "around", "initial": "open", "states": states}
    graph = statechart_graph(chart, logic, seal=Seal(KEY), checkpointer=InMemorySaver())
    if not named:
        with pytest.raises(AgentConfigError, match="put it into services="):
            await run(kind, graph, {"event": "GO"})
        assert "xsm" not in graph.get_state(thread()).values
        return
    out = await run(kind, graph, {"event": "GO"})
    assert out["xsm"]["status"] == "done"
    assert out["xsm"]["context"] == ({} if below else {"found": 42})


def test_a_question_to_a_model_that_only_an_action_spawns_is_asked() -> None:
    def begin(scope: Any, context: Any, event: Any, action: Any) -> None:
        scope.spawn("greet", id="helper")

    logic = MachineLogic(
        actions={"begin": begin, "keep": lambda context, event: {"found": event.data}},
        services={"greet": create_text_logic(prompt="Say hi.")},
    )
    graph = statechart_graph(
        SPAWNING, logic, seal=Seal(KEY), executors={"generate_text": lambda request: "hi"}
    )
    out = graph.invoke({"event": "GO"}, thread())
    assert out["xsm"]["status"] == "done" and out["xsm"]["context"] == {"found": "hi"}
