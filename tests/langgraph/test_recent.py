"""What tasks of one run hand to each other in memory: never more than the state itself says."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import Command

from guardchart import MachineLogic
from guardchart.agents import FakeModel, agent_logic, approval_event
from guardchart.agents._stepper import Stepper
from guardchart.gate import Seal
from guardchart.kernel import create_machine, initial_transition
from guardchart.langgraph import _task, _visit, statechart_graph
from guardchart.langgraph._messages import Conversation
from guardchart.langgraph._recent import _MOST, Known, Recent, text_of
from guardchart.persistence import InMemoryLedger
from guardchart.runtime import SystemClock
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


@pytest.mark.parametrize("mode", ["batched", "per_call"])
def test_a_run_that_waits_for_a_person_leaves_no_machine_behind(mode: str) -> None:
    def alive() -> int:
        return sum(isinstance(each, Stepper) for each in gc.get_objects())

    graph = made([REFUND, {"text": "done"}], interrupt_mode=mode)
    gc.collect()
    gc.disable()
    try:
        before = alive()
        assert graph.invoke({"event": start()}, thread())["__interrupt__"]
        assert alive() <= before
    finally:
        gc.enable()


@pytest.mark.gate
@pytest.mark.parametrize("late_s", [0, 7200], ids=["in time", "late"])
def test_an_approval_that_expires_on_the_way_to_its_tool_is_not_used(
    late_s: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Later(SystemClock):
        def now_ms(self) -> float:
            return super().now_ms() + late_s * 1000

    refunds = Refunds()
    # It is good for an hour.
    graph = made([REFUND, {"text": "done"}], refunds=refunds)
    out = graph.invoke({"event": start()}, thread())
    resume = approval_event(out["__interrupt__"][0].value["calls"])
    values = []
    for state in graph.stream(Command(resume=resume), thread(), stream_mode="values"):
        values.append(state["xsm"]["value"])
        # The task of the tool looks at the machine that the step left, but not at its time.
        if values[-1] == "awaiting_tool":
            monkeypatch.setattr(_task, "SystemClock", Later)
    assert "awaiting_tool" in values
    assert refunds.done == ([] if late_s else [(7, 500)])


# --- what the app's own functions have in their hands ------------------------------------------


class Noting:
    """A model that notes what it is told."""

    is_async = False

    def __init__(self, *script: Any) -> None:
        self.told: list[list[dict[str, Any]]] = []
        self._inner = FakeModel(list(script), is_async=False)

    def __call__(self, messages: Any, tools: Any) -> Any:
        self.told.append([dict(each) for each in messages])
        return self._inner(messages, tools)


@pytest.mark.parametrize("saver", [False, True], ids=["no saver", "saver"])
def test_a_message_that_is_redacted_between_two_tasks_is_told_to_no_model(saver: bool) -> None:
    model, config = Noting(LOOKUP, LOOKUP, {"text": "done"}), thread() if saver else {}
    graph = statechart_graph(
        loop_chart("lookup", "refund"),
        agent_logic(model, Refunds().tools()),
        messages_key="messages",
        checkpointer=InMemorySaver() if saver else None,
    )
    given = {"event": start("a secret")}
    for state in graph.stream(given, config, stream_mode="values"):
        if len(state.get("messages") or ()) == 3:  # the first result stands there
            state["messages"][0].content = "gone"
    assert [each[0]["content"] for each in model.told] == ["a secret", "gone", "gone"]


def _service(scope: Any, context: Any, event: Any) -> str:
    context["deep"]["list"].append("in place")
    return "done"


@pytest.mark.parametrize("child", [False, True])
def test_a_context_that_a_service_changes_in_place_is_no_other_tasks(child: bool) -> None:
    chart: dict[str, Any] = {
        "id": "two",
        "initial": "first",
        "context": {"deep": {"list": []}},
        "states": {
            "first": {"invoke": {"id": "a", "src": "changes", "onDone": "second"}},
            "second": {"invoke": {"id": "b", "src": "changes", "onDone": "over"}},
            "over": {"type": "final"},
        },
    }
    logic = MachineLogic(services={"changes": _service})
    if child:
        inner = create_machine(chart, logic)
        logic = MachineLogic(services={"inner": inner})
        chart = {
            "id": "around",
            "initial": "busy",
            "states": {"busy": {"invoke": {"id": "i", "src": "inner"}}},
        }
    graph = statechart_graph(chart, logic)
    seen = list(graph.stream({"event": "GO"}, stream_mode="values"))
    assert "'deep': {'list': []}" in str(seen)
    assert "in place" not in str(seen)


# --- the memory itself --------------------------------------------------------------------------


def known(data: Any, scope: str | None = "t", channel: Any = None) -> Known:
    machine = create_machine(COUNTER | {"states": {"low": {}}})
    talk = None if channel is None else Conversation(channel).extended()
    return Known.made(data, scope, initial_transition(machine)[0], talk)


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
    kept = known({}, channel=said)
    assert kept.begins(said) and kept.begins([*said, HumanMessage("more")])
    assert not kept.begins([HumanMessage("hi"), said[1]])
    assert not kept.begins(said[:1]) and not kept.begins(None)
    said.append(HumanMessage("more"))
    assert kept.conversation is not None and len(kept.conversation.channel) == 2


def test_a_message_that_was_edited_in_place_is_read_again() -> None:
    said = [
        HumanMessage("a secret"),
        AIMessage([{"type": "text", "text": "a secret"}]),
        ToolMessage("found", tool_call_id="c0", name="lookup"),
    ]
    for edit in (
        lambda: setattr(said[0], "content", "gone"),
        lambda: said[1].content[0].update(text="gone"),
        lambda: said[1].tool_calls.append({"name": "lookup", "args": {}, "id": "c1"}),
        lambda: setattr(said[2], "tool_call_id", "c1"),
        lambda: setattr(said[2], "name", "gone"),
    ):
        kept = known({}, channel=said)
        assert kept.stands()
        edit()
        assert not kept.stands()


def test_an_extended_conversation_is_what_reading_the_channel_would_give() -> None:
    said = [HumanMessage("hi", id="r-1")]
    added = [AIMessage("", id="r-2", tool_calls=[{"name": "t", "args": {}, "id": "c1"}])]
    talk = Conversation(said)
    assert talk.call_ids("r") == []
    for chart in ([], Conversation([*said, *added]).told):
        made, read = talk.extended(added, chart), Conversation([*said, *added])
        assert (made.channel, made.told, made.before) == (read.channel, read.told, read.before)
        assert made.call_ids("r") == read.call_ids("r") == ["c1"]
        next_one = [{"role": "user", "content": "more"}]
        assert made.new((), next_one, "r")[0].id == read.new((), next_one, "r")[0].id == "r-3"
        assert made.new((), next_one, "s")[0].id == "s-1"


def test_a_snapshot_whose_context_was_edited_in_place_is_not_known() -> None:
    machine = create_machine(COUNTER | {"context": {"list": []}, "states": {"low": {}}})
    recent, data, snapshot = Recent(), {"n": 1}, initial_transition(machine)[0]
    kept = Known.made(data, "t", snapshot)
    recent.keep(kept)
    assert recent.find(data, "t") is kept
    snapshot.context["list"].append(1)
    assert recent.find(data, "t") is None


def test_what_has_no_plain_form_is_not_kept() -> None:
    assert text_of({"odd": object()}) is None
    odd = AIMessage("hi", tool_calls=[{"name": "lookup", "args": {"at": object()}, "id": "c1"}])
    kept = known({}, channel=[odd])
    assert kept.stands() and not kept.begins([odd])
    assert not known({"odd": object()}).stands()
