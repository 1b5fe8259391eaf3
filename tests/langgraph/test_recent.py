"""What tasks of one run hand to each other in memory: never more than the state itself says."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import Command

from guardchart.agents import FakeModel, agent_logic, approval_event
from guardchart.gate import Seal
from guardchart.kernel import create_machine, initial_transition
from guardchart.langgraph import _visit, statechart_graph
from guardchart.langgraph._recent import _MOST, Known, Recent, text_of
from guardchart.persistence import InMemoryLedger
from tests.langgraph.graphs import COUNTER, REFUND, Refunds, loop_chart, start, thread

LOOKUP = {"tool": "lookup", "args": {"order_id": 1}}
SEAL = Seal(b"k" * 32)
SEALS = pytest.mark.parametrize("seal", [None, SEAL], ids=["unsealed", "sealed"])


def made(script: list[Any], seal: Any = None, refunds: Any = None, **options: Any) -> Any:
    options = {"checkpointer": InMemorySaver(), "messages_key": "messages"} | options
    return statechart_graph(
        loop_chart("lookup", "refund"),
        agent_logic(FakeModel(script, is_async=False), (refunds or Refunds()).tools()),
        ledger=InMemoryLedger(),
        seal=seal,
        **options,
    )


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every snapshot that is read and checked."""
    found: list[Any] = []
    load = _visit.load

    def counted(machine: Any, data: Any, **options: Any) -> Any:
        found.append(data)
        return load(machine, data, **options)

    monkeypatch.setattr(_visit, "load", counted)
    return found


@SEALS
@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_a_snapshot_is_read_once_a_run(kind: str, seal: Any, loads: list[Any]) -> None:
    graph = made([LOOKUP, {"text": "one"}, LOOKUP, LOOKUP, {"text": "two"}], seal)
    for number in range(2):
        given = {"event": start(f"question {number}")}
        if kind == "async":
            out = await graph.ainvoke(given, thread())
        else:
            out = await asyncio.to_thread(graph.invoke, given, thread())
        assert out["xsm"]["state_ids"] == ["toolLoop.done"]
        # A fresh thread has none to read; the next turn reads what the checkpoint holds.
        assert len(loads) == number
    assert [each.type for each in out["messages"]].count("tool") == 3


@pytest.mark.gate
@SEALS
def test_a_call_that_is_edited_after_it_was_approved_does_not_run(seal: Any) -> None:
    refunds = Refunds()
    graph = made([REFUND, {"text": "done"}], seal, refunds)
    out = graph.invoke({"event": start()}, thread())
    resume = approval_event(out["__interrupt__"][0].value["calls"])
    for state in graph.stream(Command(resume=resume), thread(), stream_mode="values"):
        for call in state["xsm"]["context"]["pending_tool_calls"]:
            call["arguments"]["amount_cents"] = 90_000
    assert refunds.done == []
    assert graph.get_state(thread()).values["xsm"]["context"]["error"]["kind"] == "tampered"


@pytest.mark.gate
def test_calls_that_are_edited_while_the_answer_is_on_its_way_are_read_anew(
    loads: list[Any],
) -> None:
    refunds = Refunds()
    graph = made([REFUND, {"text": "done"}], refunds=refunds)
    out = graph.invoke({"event": start()}, thread())
    resume = approval_event(out["__interrupt__"][0].value["calls"])
    edited = []
    for kind, state in graph.stream(
        Command(resume=resume), thread(), stream_mode=["updates", "values"]
    ):
        # Between the task that asked and the step that takes the answer.
        if kind == "values" and len(loads) == 1 and state["xsm"]["context"]["pending_tool_calls"]:
            state["xsm"]["context"]["pending_tool_calls"][0]["arguments"]["amount_cents"] = 90_000
            edited.append(state["xsm"])
    assert edited and len(loads) == 2
    assert refunds.done == []
    assert graph.get_state(thread()).values["xsm"]["context"]["error"]["kind"] == "tampered"


@pytest.mark.parametrize("saver", [False, True], ids=["no saver", "saver"])
def test_a_snapshot_that_is_edited_between_two_tasks_is_read_as_it_stands(saver: bool) -> None:
    config = thread() if saver else {}
    graph = made([{"text": "one"}], checkpointer=InMemorySaver() if saver else None)
    seen = []
    for state in graph.stream({"event": start("before")}, config, stream_mode="values"):
        if "xsm" in state and state["xsm"]["status"] == "active":
            state["xsm"]["context"]["turns"] = 3
        seen.append(state)
    # The counter that the app wrote, and the turn that was taken from there.
    assert seen[-1]["xsm"]["context"]["turns"] == 4


def test_a_sealed_snapshot_that_is_edited_between_two_tasks_is_not_kept() -> None:
    graph = made([{"text": "one"}], SEAL)
    seen = []
    for state in graph.stream({"event": start("before")}, thread(), stream_mode="values"):
        if "xsm" in state and state["xsm"]["status"] == "active":
            state["xsm"]["context"]["turns"] = 3
        seen.append(state)
    assert seen[-1]["xsm"]["context"]["error"]["kind"] == "tampered"


def test_a_state_that_is_handed_in_again_after_an_edit_counts_as_edited() -> None:
    graph = statechart_graph(COUNTER | {"context": {"n": 0}}, _adds(), checkpointer=None)
    out = graph.invoke({"event": "ADD"})
    out["xsm"]["context"]["n"] = 41
    assert graph.invoke({"xsm": out["xsm"], "event": "ADD"})["xsm"]["context"]["n"] == 42


def _adds() -> Any:
    from guardchart import MachineLogic
    from tests.langgraph.graphs import add

    return MachineLogic(actions={"add": add}, guards={"allowed": lambda c, e: True})


@pytest.mark.gate
def test_a_snapshot_that_waits_for_a_person_is_read_again_when_it_goes_on(
    loads: list[Any],
) -> None:
    refunds = Refunds()
    graph = made([REFUND, {"text": "done"}], refunds=refunds)
    out = graph.invoke({"event": start()}, thread())
    assert refunds.done == [] and loads == []
    calls = out["__interrupt__"][0].value["calls"]
    out = graph.invoke(Command(resume=approval_event(calls)), thread())
    # By the task that asks; the step that takes the answer finds what that one read.
    assert refunds.done == [(7, 500)] and len(loads) == 1


# --- the memory itself --------------------------------------------------------------------------


def known(data: Any, scope: str | None = "t", channel: Any = (), compact: Any = ()) -> Known:
    machine = create_machine(COUNTER | {"states": {"low": {}}})
    text = text_of(data)
    assert text is not None
    return Known(data, text, scope, initial_transition(machine)[0], channel, compact, None)


def test_only_the_same_dict_with_the_same_content_and_thread_is_known() -> None:
    recent, data = Recent(), {"context": {"n": 1}, "ids": ["a"]}
    kept = known(data)
    recent.keep(kept)
    assert recent.find(data, "t") is kept
    assert recent.find(data, "u") is None
    assert recent.find({"context": {"n": 1}, "ids": ["a"]}, "t") is None
    data["context"]["n"] = True
    assert recent.find(data, "t") is None
    data["context"]["n"] = 1
    recent.leave(kept)
    assert recent.find(data, "t") is None


def test_runs_that_were_given_up_are_forgotten_in_time() -> None:
    recent = Recent()
    kept = [known({"n": number}) for number in range(_MOST + 1)]
    for each in kept:
        recent.keep(each)
    assert recent.find(kept[0].data, "t") is None
    assert all(recent.find(each.data, "t") is each for each in kept[1:])


def test_a_channel_is_known_as_far_as_its_messages_are_the_same_objects() -> None:
    said = [HumanMessage("hi"), AIMessage("hello")]
    told = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    kept = known({}, channel=said, compact=told)
    assert kept.told([*said, HumanMessage("more")]) == told
    assert kept.told([HumanMessage("hi"), said[1]]) == ()
    assert kept.told(said[:1]) == () and kept.told(None) == ()


def test_what_has_no_plain_form_is_not_kept() -> None:
    assert text_of({"odd": object()}) is None
