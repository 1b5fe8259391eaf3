"""``statechart_graph``: tasks, interrupts, the shapes of answers, schemas, subgraphs."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from typing import Any, TypedDict

import pytest
from jsonschema import Draft202012Validator
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.types import CachePolicy, Command, RetryPolicy, Send
from pydantic import BaseModel, ValidationError

from guardchart import MachineLogic, SimulatedClock
from guardchart.agents import (
    FakeModel,
    ModelResponse,
    Usage,
    agent_logic,
    approval_event,
    decisions_event,
    load_chart,
    tool,
    tool_registry,
)
from guardchart.agents import RetryPolicy as LoopRetry
from guardchart.errors import AgentConfigError, SnapshotError
from guardchart.gate import Seal, ToolCall
from guardchart.langgraph import (
    _question,
    apending_approval,
    aresume_pending,
    pending_approval,
    resume_pending,
    statechart_graph,
)
from guardchart.persistence import InMemoryLedger
from tests.langgraph.graphs import (
    COUNTER,
    REFUND,
    DataState,
    ModelState,
    Refunds,
    State,
    add,
    loop_chart,
    start,
    thread,
)

LOOKUP = {"tool": "lookup", "args": {"order_id": 42}}
SAY = {"text": "Done."}
TWO = {
    "tool_calls": [
        {"tool": "refund", "args": {"order_id": 1, "amount_cents": 10}},
        {"tool": "refund", "args": {"order_id": 2, "amount_cents": 20}},
    ]
}
BOTH = pytest.mark.parametrize("kind", ["sync", "async"])


def made(script: list[Any], refunds: Refunds | None = None, **options: Any) -> Any:
    logic = options.pop("logic", {})
    model = options.pop("model", None) or FakeModel(script, is_async=options.pop("is_async", False))
    options.setdefault("checkpointer", InMemorySaver())
    options.setdefault("ledger", InMemoryLedger())
    return statechart_graph(
        loop_chart("lookup", "refund"),
        agent_logic(model, (refunds or Refunds()).tools(), **logic),
        **options,
    )


async def run(kind: str, graph: Any, value: Any, config: Any = None) -> Any:
    config = thread() if config is None else config
    if kind == "async":
        return await graph.ainvoke(value, config)
    return await asyncio.to_thread(graph.invoke, value, config)


def question(graph: Any, config: Any = None) -> Any:
    (task,) = graph.get_state(config or thread()).tasks
    return task.interrupts[0].value


def approved(asked: Any, decision: str = "approve", **more: Any) -> dict[str, Any]:
    return {
        "decisions": [
            {"id": call["id"], "digest": call["digest"], "decision": decision, **more}
            for call in asked["calls"]
        ]
    }


def visited(graph: Any, config: Any = None) -> list[str]:
    """The tasks that ran, oldest first."""
    names = []
    for state in graph.get_state_history(config or thread()):
        names += [task.name for task in state.tasks if task.name != "__start__"]
    return names[::-1]


# --- the loop, task by task --------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("messages_key", [None, "messages"])
@pytest.mark.parametrize("is_async", [False, True])
async def test_a_loop_runs_as_tasks_of_its_own(
    kind: str, messages_key: str | None, is_async: bool
) -> None:
    graph = made([LOOKUP, {"text": "Shipped."}], messages_key=messages_key, is_async=is_async)
    out = await run(kind, graph, {"event": start("Where is order 42?")})
    assert out["xsm"]["state_ids"] == ["toolLoop.done"] and out["event"] is None
    assert out["xsm"]["context"]["result"] == "Shipped."
    assert visited(graph) == ["step", "model", "step", "tools", "step", "model", "step"]
    if messages_key:
        kinds = [type(each) for each in out["messages"]]
        assert kinds == [HumanMessage, AIMessage, ToolMessage, AIMessage]
        run_id = out["xsm"]["run"]
        assert [each.id for each in out["messages"]] == [f"{run_id}-{n}" for n in (1, 2, 3, 4)]
        assert out["xsm"]["context"]["messages"] == []


@BOTH
async def test_calls_that_only_read_run_side_by_side(kind: str) -> None:
    calls = [{"tool": "lookup", "args": {"order_id": n}} for n in (1, 2, 3)]
    graph = made([{"tool_calls": calls}, SAY])
    out = await run(kind, graph, {"event": start()})
    assert visited(graph) == [
        "step", "model", "step", "tools", "tools", "tools", "step", "model", "step",
    ]  # fmt: skip
    texts = [m["content"] for m in out["xsm"]["context"]["messages"] if m["role"] == "tool"]
    assert texts == [f"order {n}: shipped" for n in (1, 2, 3)]


@BOTH
async def test_side_effects_run_one_a_superstep_in_the_models_order(kind: str) -> None:
    refunds = Refunds()
    graph = made([TWO, SAY], refunds)
    await run(kind, graph, {"event": start()})
    assert refunds.done == []
    out = await run(kind, graph, Command(resume=approved(question(graph))))
    assert refunds.done == [(1, 10), (2, 20)]
    assert out["xsm"]["state_ids"] == ["toolLoop.done"]
    assert visited(graph)[-6:] == ["step", "tools", "step", "tools", "step", "model", "step"][-6:]


@BOTH
async def test_a_resume_calls_no_model_again(kind: str) -> None:
    model = FakeModel([REFUND, SAY], is_async=False)
    graph = made([], Refunds(), model=model)
    await run(kind, graph, {"event": start()})
    assert len(model.calls) == 1
    await run(kind, graph, Command(resume=approved(question(graph))))
    assert len(model.calls) == 2


def test_the_conversation_in_the_channel_is_what_the_model_sees() -> None:
    model = FakeModel([LOOKUP, SAY, {"text": "Bye."}], is_async=False)
    graph = made([], model=model, messages_key="messages")
    graph.invoke({"messages": [("user", "Hello"), ("ai", "Hi")], "event": start("And?")}, thread())
    roles = [each["role"] for each in model.calls[1]["messages"]]
    assert roles == ["user", "assistant", "user", "assistant", "tool"]
    out = graph.invoke({"event": start("Thanks")}, thread())
    assert [each.content for each in out["messages"]][-2:] == ["Thanks", "Bye."]
    assert out["xsm"]["run"] == out["messages"][-1].id.rpartition("-")[0]


def test_a_snapshot_stays_small_whatever_the_conversation_holds() -> None:
    import json

    graph = made([LOOKUP, SAY], messages_key="messages")
    said = [("user" if n % 2 == 0 else "ai", f"message {n} " + "x" * 500) for n in range(100)]
    out = graph.invoke({"messages": said, "event": start()}, thread())
    assert len(json.dumps(out["xsm"])) < 4096


def test_an_event_is_consumed_and_the_receipt_tells() -> None:
    graph = statechart_graph(
        COUNTER,
        MachineLogic(actions={"add": add}, guards={"allowed": lambda c, e: False}),
        checkpointer=InMemorySaver(),
    )
    out = graph.invoke({"event": {"type": "ADD", "by": 3}}, thread())
    assert out["event"] is None and out["xsm"]["context"]["n"] == 3
    graph.invoke({"event": "RAISE"}, thread())
    out = graph.invoke({"event": "LOWER"}, thread())
    assert out["xsm"]["receipt"]["denied"] is True and out["xsm"]["value"] == "high"
    before = out["xsm"]
    assert graph.invoke({"event": None}, thread())["xsm"] == before
    assert set(graph.get_graph().nodes) == {"__start__", "step", "__end__"}


def test_transitions_reach_the_custom_stream() -> None:
    graph = made([SAY])
    seen = list(graph.stream({"event": start()}, thread(), stream_mode="custom"))
    assert [(each["event"], each["to"]) for each in seen] == [
        ("START", ["toolLoop.awaiting_model"]),
        ("xstate.done.actor.model", ["toolLoop.done"]),
    ]


def test_result_to_state_adds_updates() -> None:
    graph = made(
        [SAY],
        state_schema=State,
        result_to_state=lambda view, state: {"answer": view.context["result"]},
    )
    assert graph.invoke({"event": start()}, thread())["answer"] == "Done."


# --- questions and answers ---------------------------------------------------------------------


@BOTH
async def test_a_batched_question_shows_each_call_and_its_digest(kind: str) -> None:
    graph = made([TWO, SAY])
    await run(kind, graph, {"event": start()})
    asked = question(graph)
    assert [each["args"] for each in asked["action_requests"]] == [
        {"order_id": 1, "amount_cents": 10},
        {"order_id": 2, "amount_cents": 20},
    ]
    (interrupt,) = graph.get_state(thread()).tasks[0].interrupts
    schema = interrupt.response_schema
    items = schema["properties"]["decisions"]["items"]["oneOf"]
    assert [each["properties"]["digest"]["const"] for each in items] == [
        call["digest"] for call in asked["calls"]
    ]


@BOTH
async def test_a_question_is_asked_and_answered_where_nobody_tells_whether_it_was(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So does a task whose answer another one has taken in the meantime."""
    refunds, forms = Refunds(), []
    graph = made([REFUND, SAY], refunds)
    given: Any = {"event": start()}
    for _ in range(2):
        await run(kind, graph, given)
        (interrupt,) = graph.get_state(thread()).tasks[0].interrupts
        forms.append((interrupt.value, interrupt.response_schema))
        monkeypatch.setattr(_question, "_may_be_answered", lambda: True)
        given = None
    assert forms[0] == forms[1]
    await run(kind, graph, Command(resume=approved(question(graph))))
    assert len(refunds.done) == 1


class Address(BaseModel):
    city: str


@pytest.mark.parametrize("mode", ["batched", "per_call"])
def test_the_form_of_a_question_describes_nested_arguments(mode: Any) -> None:
    def post(to: Address, copies: list[Address]) -> str:
        """Post a letter."""
        return "posted"

    letter = {"to": {"city": "Oslo"}, "copies": [{"city": "Rome"}]}
    graph = statechart_graph(
        loop_chart("post"),
        agent_logic(
            FakeModel([{"tool": "post", "args": letter}, SAY], is_async=False),
            tool_registry(tool(post, side_effect=True)),
        ),
        interrupt_mode=mode,
        checkpointer=InMemorySaver(),
    )
    graph.invoke({"event": start()}, thread())
    (interrupt,) = graph.get_state(thread()).tasks[0].interrupts
    form = Draft202012Validator(interrupt.response_schema)
    (call,) = pending_approval(graph, thread())
    for city, fits in (("Bonn", True), (7, False)):
        edit = {"id": call["id"], "digest": call["digest"], "decision": "edit"}
        edit["arguments"] = {**letter, "to": {"city": city}}
        assert form.is_valid(edit if mode == "per_call" else {"decisions": [edit]}) is fits


@pytest.mark.parametrize(
    "shape", ["list", "decisions", "approval_event", "decisions_event", "hitl"]
)
@BOTH
async def test_each_shape_of_an_answer_is_taken(kind: str, shape: str) -> None:
    refunds = Refunds()
    graph = made([REFUND, SAY], refunds)
    await run(kind, graph, {"event": start()})
    asked = question(graph)
    decided = approved(asked)
    hitl = [{"id": c["id"], "digest": c["digest"], "type": "approve"} for c in asked["calls"]]
    answer = {
        "list": decided["decisions"],
        "decisions": {**decided, "by": "ann"},
        "approval_event": approval_event(asked["calls"], by="ann"),
        "decisions_event": decisions_event(decided["decisions"], by="ann"),
        "hitl": {"decisions": hitl},
    }[shape]
    out = await run(kind, graph, Command(resume=answer))
    assert refunds.done == [(7, 500)] and out["xsm"]["state_ids"] == ["toolLoop.done"]


BAD: dict[str, Any] = {
    "scalar": True,
    "text": "yes",
    "no digest": {"decisions": [{"id": "ID", "decision": "approve"}]},
    "by place": {"decisions": [{"type": "approve"}]},
    "another digest": {"decisions": [{"id": "ID", "digest": "0" * 64, "decision": "approve"}]},
    "another call": {"decisions": [{"id": "x", "digest": "DIGEST", "decision": "approve"}]},
    "too many": {"decisions": [{"id": "ID", "digest": "DIGEST", "decision": "approve"}] * 2},
    "none": {"decisions": []},
    "an edit that does not fit": {
        "decisions": [
            {
                "id": "ID",
                "digest": "DIGEST",
                "decision": "edit",
                "arguments": {"order_id": 7, "amount_cents": "secret-value"},
            }
        ]
    },
    "approval without digests": {"type": "HUMAN_APPROVED", "call_ids": ["ID"]},
    "a list as its type": {"type": ["HUMAN_APPROVED"], "call_ids": ["ID"]},
    "an object as its type": {"type": {"HUMAN_APPROVED": 1}, "call_ids": ["ID"]},
    "a number as its type": {"type": 7, "call_ids": ["ID"]},
}


@pytest.mark.gate
@pytest.mark.parametrize("bad", BAD.values(), ids=list(BAD))
@pytest.mark.parametrize("mode", ["batched", "per_call"])
def test_an_answer_that_does_not_fit_is_refused_and_the_question_stays_open(
    mode: Any, bad: Any
) -> None:
    import json

    refunds = Refunds()
    graph = made([REFUND, SAY], refunds, interrupt_mode=mode)
    graph.invoke({"event": start()}, thread())
    (item,) = pending_approval(graph, thread())
    text = json.dumps(bad).replace("DIGEST", item["digest"]).replace("ID", item["id"])
    with pytest.raises(ValidationError) as refused:
        graph.invoke(Command(resume=json.loads(text)), thread())
    assert "secret-value" not in str(refused.value) and refunds.done == []
    assert pending_approval(graph, thread()) == [item]
    resume_pending(graph, thread(), [{**item, "decision": "approve"}])
    assert refunds.done == [(7, 500)]


@pytest.mark.gate
def test_a_replayed_answer_approves_no_other_call() -> None:
    refunds = Refunds()
    other = {"tool": "refund", "args": {"order_id": 8, "amount_cents": 999}}
    graph = made([REFUND, other, SAY], refunds)
    graph.invoke({"event": start()}, thread())
    answer = Command(resume=approved(question(graph)))
    graph.invoke(answer, thread())
    assert refunds.done == [(7, 500)] and question(graph)["action_requests"][0]["args"] == {
        "order_id": 8,
        "amount_cents": 999,
    }
    with pytest.raises(ValidationError):
        graph.invoke(answer, thread())
    assert refunds.done == [(7, 500)]


@BOTH
async def test_each_call_is_asked_about_by_an_interrupt_of_its_own(kind: str) -> None:
    refunds = Refunds()
    ledger = InMemoryLedger()
    graph = made([TWO, SAY], refunds, interrupt_mode="per_call", ledger=ledger)
    await run(kind, graph, {"event": start()})
    tasks = graph.get_state(thread()).tasks
    first, second = (task.interrupts[0] for task in tasks)
    assert first.value["type"] == "tool_approval" and first.value["args"]["order_id"] == 1
    answer = {"decision": "approve", "digest": first.value["digest"]}
    await run(kind, graph, Command(resume={first.id: answer}))
    # Partial answers are LangGraph's to hold; nothing is decided until all are in.
    assert ledger.row("t1", first.value["id"]).status == "proposed" and refunds.done == []
    assert len(pending_approval(graph, thread())) == 1
    rejected = {"decision": "reject", "digest": second.value["digest"], "reason": "too much"}
    out = await run(kind, graph, Command(resume={second.id: rejected}))
    assert refunds.done == [(1, 10)]
    told = [m["content"] for m in out["xsm"]["context"]["messages"] if m["role"] == "tool"]
    assert told[0] == "refunded" and "too much" in told[1]


def test_an_edit_runs_what_the_person_wrote() -> None:
    refunds = Refunds()
    graph = made([REFUND, SAY], refunds)
    graph.invoke({"event": start()}, thread())
    (item,) = pending_approval(graph, thread())
    edit = {**item, "decision": "edit", "arguments": {"order_id": 7, "amount_cents": 1}}
    out = resume_pending(graph, thread(), [edit], by="ann")
    assert refunds.done == [(7, 1)] and out["xsm"]["state_ids"] == ["toolLoop.done"]


def test_a_rejection_runs_nothing_and_the_model_is_told_why() -> None:
    refunds = Refunds()
    graph = made([REFUND, SAY], refunds)
    graph.invoke({"event": start()}, thread())
    (item,) = pending_approval(graph, thread())
    out = resume_pending(graph, thread(), [{**item, "decision": "reject", "reason": "no"}])
    assert refunds.done == [] and out["xsm"]["context"]["result"] == "Done."


@pytest.mark.gate
def test_a_graph_has_no_channel_without_a_use() -> None:
    own = {"xsm_results", "xsm_asked", "xsm_begun"}
    assert own & set(made([SAY], Refunds()).channels) == {"xsm_results"}
    accepting = made([SAY], Refunds(), positional="accept")
    assert own & set(accepting.channels) == {"xsm_results", "xsm_asked"}


def test_an_answer_by_place_counts_only_where_it_is_accepted_and_not_too_soon() -> None:
    refunds = Refunds()
    graph = made([REFUND, SAY], refunds, positional="accept", min_review_s=0.3)
    graph.invoke({"event": start()}, thread())
    answer = Command(resume={"decisions": [{"type": "approve"}]})
    with pytest.raises(ValidationError, match="before anybody"):
        graph.invoke(answer, thread())
    assert refunds.done == []
    time.sleep(0.35)
    graph.invoke(answer, thread())
    assert refunds.done == [(7, 500)]


def test_a_question_may_leave_the_arguments_out() -> None:
    graph = made([REFUND, SAY], interrupt_payload="ids")
    graph.invoke({"event": start()}, thread())
    asked = question(graph)
    assert "500" not in str(asked["action_requests"]) and asked["calls"][0]["digest"]
    assert pending_approval(graph, thread())[0]["arguments"]["amount_cents"] == 500


@BOTH
async def test_an_approval_by_event_is_taken_too(kind: str) -> None:
    refunds = Refunds()
    graph = made([REFUND, SAY], refunds)
    await run(kind, graph, {"event": start()})
    pending = pending_approval(graph, thread())
    out = await run(kind, graph, {"event": approval_event(pending)})
    assert refunds.done == [(7, 500)] and out["xsm"]["state_ids"] == ["toolLoop.done"]


@pytest.mark.gate
@BOTH
async def test_new_input_while_a_call_is_pending_closes_it(kind: str) -> None:
    refunds = Refunds()
    ledger = InMemoryLedger()
    graph = made([REFUND, {"text": "Anything else?"}], refunds, ledger=ledger)
    await run(kind, graph, {"event": start()})
    asked = question(graph)
    out = await run(kind, graph, {"event": start("never mind")})
    assert out["xsm"]["context"]["result"] == "Anything else?" and refunds.done == []
    told = [m["content"] for m in out["xsm"]["context"]["messages"] if m["role"] == "tool"]
    assert told == ["not run: superseded by new input"]
    assert ledger.row("t1", asked["calls"][0]["id"]).status == "void"
    await run(kind, graph, {"event": approval_event(asked["calls"])})
    assert refunds.done == []


# --- threads from outside ----------------------------------------------------------------------


async def test_a_thread_is_read_and_resumed_from_an_event_loop() -> None:
    refunds = Refunds()
    graph = made([REFUND, SAY], refunds, is_async=True)
    await graph.ainvoke({"event": start()}, thread())
    (item,) = await apending_approval(graph, thread())
    assert await aresume_pending(graph, thread()) is None
    out = await aresume_pending(graph, thread(), [{**item, "decision": "approve"}])
    assert refunds.done == [(7, 500)] and out["xsm"]["state_ids"] == ["toolLoop.done"]
    assert await aresume_pending(graph, thread()) is None


def test_a_thread_that_was_cut_off_is_taken_up_where_it_was() -> None:
    class Dies(BaseException):
        pass

    calls: list[str] = []

    def model(messages: Any, tools: Any) -> ModelResponse:
        calls.append("asked")
        if len(calls) == 1:
            raise Dies
        return ModelResponse("Done.")

    graph = made([], model=model)
    with pytest.raises(Dies):
        graph.invoke({"event": start()}, thread())
    out = resume_pending(graph, thread())
    assert out["xsm"]["context"]["result"] == "Done." and len(calls) == 2


def test_decisions_about_other_calls_are_refused_before_anything_is_sent() -> None:
    graph = made([TWO, SAY])
    graph.invoke({"event": start()}, thread())
    first, _ = pending_approval(graph, thread())
    with pytest.raises(AgentConfigError, match="every call of a question"):
        resume_pending(graph, thread(), [{**first, "decision": "approve"}])
    with pytest.raises(AgentConfigError, match="no call that is asked about"):
        resume_pending(graph, thread(), [{**first, "id": "x", "decision": "approve"}])
    assert len(pending_approval(graph, thread())) == 2


# --- failures and deadlines --------------------------------------------------------------------


@BOTH
async def test_a_models_failure_is_retried_by_the_chart(kind: str) -> None:
    graph = made([ValueError("boom"), SAY], logic={"retry": LoopRetry(delay_s=0.2)})
    out = await run(kind, graph, {"event": start()})
    assert out["xsm"]["context"]["result"] == "Done."
    assert visited(graph) == ["step", "model", "step", "timer", "step", "model", "step"]


@BOTH
@pytest.mark.parametrize("is_async", [False, True])
async def test_a_model_that_hangs_is_given_up_when_the_chart_does(
    kind: str, is_async: bool
) -> None:
    model = FakeModel([{"hang": True}, SAY], is_async=is_async)
    logic = {"model_timeout_s": 0.2, "retry": LoopRetry(delay_s=0.01)}
    graph = made([], model=model, logic=logic)
    out = await run(kind, graph, {"event": start()})
    assert out["xsm"]["context"]["result"] == "Done."
    model.release()


def test_langgraphs_retry_policy_comes_before_the_charts() -> None:
    calls: list[int] = []

    def model(messages: Any, tools: Any) -> ModelResponse:
        calls.append(1)
        if len(calls) < 3:
            raise ConnectionError("boom")
        return ModelResponse("Done.")

    policy = RetryPolicy(max_attempts=3, initial_interval=0.01, jitter=False)
    graph = made([], model=model, retry_policy=policy)
    out = graph.invoke({"event": start()}, thread())
    assert len(calls) == 3 and out["xsm"]["context"]["turns"] == 1


def test_what_langgraph_gives_up_is_the_charts_business() -> None:
    policy = RetryPolicy(max_attempts=2, initial_interval=0.01, jitter=False)
    graph = made(
        [ConnectionError("a"), ConnectionError("b"), SAY],
        retry_policy=policy,
        logic={"retry": LoopRetry(delay_s=0.01)},
    )
    out = graph.invoke({"event": start()}, thread())
    assert out["xsm"]["context"]["result"] == "Done."


@BOTH
async def test_a_tool_that_fails_cancels_none_of_its_siblings(kind: str) -> None:
    seen: list[int] = []

    async def look(order_id: int) -> str:
        """Look up an order."""
        if order_id == 1:
            raise ValueError("boom")
        await asyncio.sleep(0.05)
        seen.append(order_id)
        return "ok"

    calls = [{"tool": "look", "args": {"order_id": n}} for n in (1, 2)]
    graph = statechart_graph(
        loop_chart("look"),
        agent_logic(
            FakeModel([{"tool_calls": calls}, SAY], is_async=False),
            tool_registry(look),
            retry=LoopRetry(delay_s=0.01),
        ),
        checkpointer=InMemorySaver(),
        ledger=InMemoryLedger(),
    )
    out = await run(kind, graph, {"event": start()})
    assert seen == [2] and out["xsm"]["context"]["result"] == "Done."


def test_a_deadline_that_has_passed_fires_before_the_event() -> None:
    refunds = Refunds()
    graph = made([REFUND, SAY], refunds, logic={"human_timeout_s": 0.05})
    graph.invoke({"event": start()}, thread())
    asked = question(graph)
    time.sleep(0.1)
    out = graph.invoke(Command(resume=approved(asked)), thread())
    assert refunds.done == [] and out["xsm"]["context"]["error"]["kind"] == "human_timeout"


def test_a_services_plain_function_is_a_task_too() -> None:
    chart = {
        "id": "job",
        "initial": "busy",
        "states": {
            "busy": {
                "invoke": {"id": "work", "src": "work", "onDone": "over", "onError": "failed"}
            },
            "over": {"type": "final"},
            "failed": {"type": "final"},
        },
    }
    done: list[Any] = []

    def work(scope: Any, context: Any, event: Any) -> str:
        done.append(scope.id)
        if len(done) > 1:
            raise ValueError("boom")
        return "ok"

    graph = statechart_graph(
        chart, MachineLogic(services={"work": work}), checkpointer=InMemorySaver()
    )
    assert graph.invoke({"event": None}, thread())["xsm"]["value"] == "over"
    assert visited(graph) == ["step", "service", "step"]
    assert graph.invoke({"event": None}, thread("t2"))["xsm"]["value"] == "failed"


def test_an_actions_error_is_the_apps() -> None:
    def broken(context: Any, event: Any) -> None:
        raise LookupError("the app's own")

    chart = {**COUNTER, "actionErrorPolicy": "fail"}
    logic = MachineLogic(actions={"add": broken}, guards={"allowed": lambda c, e: True})
    graph = statechart_graph(chart, logic, checkpointer=InMemorySaver())
    with pytest.raises(LookupError):
        graph.invoke({"event": "ADD"}, thread())


# --- places ------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("schema", [State, ModelState, DataState])
async def test_every_kind_of_state_works(kind: str, schema: Any) -> None:
    refunds = Refunds()
    graph = made([REFUND, SAY], refunds, state_schema=schema, messages_key="messages")
    await run(kind, graph, {"event": start()})
    out = await run(kind, graph, Command(resume=approved(question(graph))))
    assert refunds.done == [(7, 500)] and out["messages"][-1].content == "Done."


def test_event_from_state_is_given_the_apps_own_class() -> None:
    seen: list[Any] = []

    def event(state: Any) -> Any:
        seen.append(type(state))
        return state.event

    graph = made([SAY], state_schema=ModelState, event_from_state=event)
    graph.invoke({"event": start()}, thread())
    assert seen == [ModelState] * 2


class Parent(MessagesState):
    xsm: dict[str, Any]
    event: Any


def parent(inner: Any, saver: Any = None) -> Any:
    graph = StateGraph(Parent)
    graph.add_node("agent", inner)
    graph.add_edge(START, "agent")
    graph.add_edge("agent", END)
    return graph.compile(checkpointer=saver or InMemorySaver())


@BOTH
async def test_a_subgraph_keeps_its_run_when_new_input_comes(kind: str) -> None:
    refunds = Refunds()
    inner = made(
        [REFUND, {"text": "What else?"}],
        refunds,
        checkpointer=None,
        as_subgraph=True,
        messages_key="messages",
    )
    app = parent(inner)
    await run(kind, app, {"event": start()})
    (item,) = pending_approval(app, thread())
    out = await run(kind, app, {"event": start("never mind")})
    assert [type(each) for each in out["messages"]] == [
        HumanMessage, AIMessage, ToolMessage, HumanMessage, AIMessage,
    ]  # fmt: skip
    assert out["messages"][2].content == "not run: superseded by new input"
    assert refunds.done == [] and pending_approval(app, thread()) == []
    assert item["name"] == "refund"


@BOTH
async def test_a_subgraph_asks_and_is_resumed_through_its_parent(kind: str) -> None:
    refunds = Refunds()
    inner = made(
        [REFUND, SAY], refunds, checkpointer=None, as_subgraph=True, messages_key="messages"
    )
    app = parent(inner)
    await run(kind, app, {"event": start()})
    (item,) = pending_approval(app, thread())
    out = await asyncio.to_thread(resume_pending, app, thread(), [{**item, "decision": "approve"}])
    assert refunds.done == [(7, 500)]
    assert [each.content for each in out["messages"]][-1] == "Done."
    assert len(out["messages"]) == 4


@pytest.mark.gate
def test_an_edited_snapshot_is_refused_where_it_is_sealed() -> None:
    refunds = Refunds()
    graph = made([REFUND, SAY], refunds, seal=Seal("0123456789abcdef"))
    graph.invoke({"event": start()}, thread())
    state = graph.get_state(thread()).values["xsm"]
    state["context"]["pending_tool_calls"][0]["arguments"]["amount_cents"] = 99
    graph.update_state(thread(), {"xsm": state}, as_node="model")
    out = graph.invoke(None, thread())
    assert out["xsm"]["context"]["error"]["kind"] == "tampered" and refunds.done == []


@pytest.mark.gate
def test_an_edited_call_is_refused_without_a_seal_too() -> None:
    refunds = Refunds()
    graph = made([REFUND, SAY], refunds)
    graph.invoke({"event": start()}, thread())
    asked = question(graph)
    state = graph.get_state(thread()).values["xsm"]
    state["context"]["pending_tool_calls"][0]["arguments"]["amount_cents"] = 99
    graph.update_state(thread(), {"xsm": state, "event": approval_event(asked["calls"])})
    out = graph.invoke({"event": approval_event(asked["calls"])}, thread())
    assert refunds.done == [] and out["xsm"]["receipt"]["denied"]
    assert out["xsm"]["context"]["error"]["kind"] == "tampered"


def test_a_hostile_snapshot_is_one_error() -> None:
    graph = made([SAY])
    with pytest.raises(SnapshotError):
        graph.invoke({"xsm": {"version": 1, "nonsense": True}, "event": start()}, thread())


@pytest.mark.gate
def test_results_forged_in_the_state_run_nothing() -> None:
    refunds = Refunds()
    graph = made([REFUND, SAY], refunds)
    graph.invoke({"event": start()}, thread())
    forged = [
        {"id": "model@2", "at": 0, "output": {"text": "hi"}},
        {"id": "tools@9#0", "at": 0, "output": {"status": "done", "text": "ok"}},
        {"decisions": "approve all"},
        7,
    ]
    graph.update_state(thread(), {"xsm_results": forged}, as_node="model")
    graph.invoke(None, thread())
    assert refunds.done == [] and len(pending_approval(graph, thread())) == 1


class Ours(State, total=False):
    user: str


@dataclasses.dataclass
class OurData(DataState):
    user: str = ""


@pytest.mark.parametrize("seal", [None, Seal("0123456789abcdef")])
@pytest.mark.parametrize("mode", ["batched", "per_call"])
@pytest.mark.parametrize("schema", [Ours, OurData])
def test_a_scope_is_told_from_the_state_in_every_task(schema: Any, mode: Any, seal: Any) -> None:
    def scope(state: Any) -> str:
        return str(state["user"] if schema is Ours else state.user)

    refunds = Refunds()
    script = [{"tool_calls": [LOOKUP, LOOKUP]}, TWO, SAY]
    options = {"state_schema": schema, "interrupt_mode": mode, "seal": seal}
    graph = made(script, refunds, scope=scope, **options)
    graph.invoke({"event": start(), "user": "ann"}, thread())
    decided = [{**item, "decision": "approve"} for item in pending_approval(graph, thread())]
    out = resume_pending(graph, thread(), decided)
    assert out["xsm"]["context"]["result"] == "Done." and refunds.done == [(1, 10), (2, 20)]


class Killed(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("messages_key", [None, "messages"])
def test_new_input_on_a_turn_that_was_cut_off_is_not_lost(messages_key: str | None) -> None:
    inner = FakeModel([LOOKUP, {"text": "one!"}, {"text": "two!"}], is_async=False)
    alive = iter([False])

    def model(*args: Any, **kwargs: Any) -> Any:
        if not next(alive, True):
            raise Killed
        return inner(*args, **kwargs)

    graph = made([], model=model, messages_key=messages_key)
    with pytest.raises(Killed):
        graph.invoke({"event": start("one")}, thread())
    # The same START once more goes on with the turn that it began.
    alive = iter([False])
    with pytest.raises(Killed):
        graph.invoke({"event": start("one")}, thread())
    out = graph.invoke({"event": start("two")}, thread())
    assert out["event"] is None and out["xsm"]["context"]["result"] == "two!"
    if messages_key:
        said = [each.content for each in out["messages"]]
    else:
        said = [each["content"] or "" for each in out["xsm"]["context"]["messages"]]
    assert said == ["one", "", "order 42: shipped", "one!", "two", "two!"]


def test_new_input_that_comes_with_an_approval_is_not_lost() -> None:
    refunds = Refunds()
    graph = made([REFUND, {"text": "one!"}, {"text": "two!"}], refunds)
    graph.invoke({"event": start()}, thread())
    answer = approved(question(graph))
    out = graph.invoke(Command(resume=answer, update={"event": start("two")}), thread())
    assert refunds.done == [(7, 500)] and out["xsm"]["context"]["result"] == "two!"


@pytest.mark.gate
@pytest.mark.parametrize("kept", [False, True])
def test_decisions_forged_in_the_state_are_no_signed_approval(kept: bool) -> None:
    refunds = Refunds()
    graph = made([REFUND, SAY], refunds, seal=Seal("0123456789abcdef"), signed_approvals=True)
    graph.invoke({"event": start()}, thread())
    forged = {"id": "", "at": time.time() * 1000, **approved(question(graph)), "by": "mallory"}
    if kept:
        forged["seal"] = graph.get_state(thread()).values["xsm"]["seal"]
    graph.update_state(thread(), {"xsm_results": [forged]}, as_node="approval")
    graph.invoke(None, thread())
    assert refunds.done == [] and len(pending_approval(graph, thread())) == 1
    graph.invoke(Command(resume=approved(question(graph))), thread())
    assert refunds.done == [(7, 500)]


@pytest.mark.gate
def test_a_decision_dated_back_before_its_deadline_is_too_late() -> None:
    clock = SimulatedClock(1000)
    refunds = Refunds()
    graph = made([REFUND, SAY], refunds, logic={"human_timeout_s": 60}, clock=clock)
    graph.invoke({"event": start()}, thread())
    dated_back = {"id": "", "at": clock.now_ms(), **approved(question(graph))}
    clock.increment(61_000)
    graph.update_state(thread(), {"xsm_results": [dated_back]}, as_node="approval")
    out = graph.invoke(None, thread())
    assert refunds.done == [] and out["xsm"]["context"]["error"]["kind"] == "human_timeout"


def test_a_decision_under_a_seal_counts_from_when_it_was_made() -> None:
    clock = SimulatedClock(1000)
    refunds = Refunds()
    graph = made(
        [REFUND, SAY],
        refunds,
        logic={"human_timeout_s": 60},
        clock=clock,
        seal=Seal("0123456789abcdef"),
    )
    graph.invoke({"event": start()}, thread())
    clock.increment(59_000)
    # The process ends between the answer and the step that takes it, and comes back late.
    answer = Command(resume=approved(question(graph)))
    graph.invoke(answer, thread(), interrupt_after=["approval"])
    clock.increment(2_000)
    assert refunds.done == []
    out = graph.invoke(None, thread())
    assert refunds.done == [(7, 500)] and out["xsm"]["context"]["result"] == "Done."


@pytest.mark.parametrize(
    "forged",
    [
        {"decisions": [{"id": []}]},
        {"decisions": [5]},
        {"decisions": [{"id": "x"}], "by": 3},
        {"id": "model@2", "error": 5},
        {"id": "model@2", "output": {1: 2}},
        {"id": "model@2", "sent": [{"type": ""}]},
        {"id": "model@2", "at": 1e300},
        {"id": "model@2", "at": float("nan")},
    ],
)
def test_an_odd_result_in_the_state_strands_no_thread(forged: dict[str, Any]) -> None:
    refunds = Refunds()
    graph = made([REFUND, SAY], refunds)
    graph.invoke({"event": start()}, thread())
    graph.update_state(thread(), {"xsm_results": [forged]}, as_node="model")
    graph.invoke(None, thread())
    graph.invoke(Command(resume=approved(question(graph))), thread())
    assert refunds.done == [(7, 500)]


@pytest.mark.parametrize("value", [{1: 2}, {1}, object(), float("nan"), 10**30, [{"a": b"x"}]])
def test_a_services_output_that_no_checkpoint_holds_is_its_failure(value: Any) -> None:
    chart = {
        "id": "odd",
        "initial": "busy",
        "context": {},
        "states": {
            "busy": {"invoke": {"src": "odd", "onDone": "over", "onError": "failed"}},
            "over": {"type": "final"},
            "failed": {"type": "final"},
        },
    }
    ran: list[int] = []

    def odd(context: Any) -> Any:
        ran.append(1)
        return value

    logic = MachineLogic(services={"odd": odd})
    graph = statechart_graph(chart, logic, checkpointer=InMemorySaver())
    out = graph.invoke({"event": None}, thread())
    assert out["xsm"]["state_ids"] == ["odd.failed"] and ran == [1]


@pytest.mark.parametrize("forged", [5, [1], {"type": ""}, {"a": 1}])
def test_what_began_a_service_strands_no_thread_when_it_is_forged(forged: Any) -> None:
    chart = {
        "id": "host",
        "initial": "idle",
        "states": {
            "idle": {"on": {"GO": "busy"}},
            "busy": {"invoke": {"src": "work", "onDone": "over"}},
            "over": {"type": "final"},
        },
    }
    alive = iter([False])

    def work(context: Any) -> Any:
        if not next(alive, True):
            raise Killed

    logic = MachineLogic(services={"work": work})
    graph = statechart_graph(chart, logic, checkpointer=InMemorySaver())
    with pytest.raises(Killed):
        graph.invoke({"event": {"type": "GO"}}, thread())
    begun = graph.get_state(thread()).values["xsm_begun"]
    graph.update_state(thread(), {"xsm_begun": dict.fromkeys(begun, forged)}, as_node="service")
    assert graph.invoke(None, thread())["xsm"]["state_ids"] == ["host.over"]


@pytest.mark.parametrize("seal", [None, Seal("0123456789abcdef")])
def test_a_models_answer_that_no_checkpoint_holds_is_its_failure(seal: Any) -> None:
    spent = {"input_tokens": 5, "output_tokens": 7}
    huge = {"tool": "lookup", "args": {"order_id": 10**30}, "usage": spent}
    graph = made([huge, {"text": "half \ud800"}], seal=seal)
    out = graph.invoke({"event": start()}, thread())
    context = out["xsm"]["context"]
    assert out["xsm"]["state_ids"] == ["toolLoop.done"] and context["result"] == "half \ufffd"
    assert context["tokens_out"] >= 7


@BOTH
@pytest.mark.parametrize("seal", [None, Seal("0123456789abcdef")])
@pytest.mark.parametrize(
    "odd",
    [
        ModelResponse("hi", (), Usage(5, 7), b"bytes"),
        ModelResponse("hi", (), Usage(5, 7), float("nan")),
        ModelResponse(None, (ToolCall(b"c1", "lookup", {"order_id": 1}),), Usage(5, 7)),
    ],
)
async def test_a_models_answer_whose_names_are_no_json_is_its_failure(
    kind: str, seal: Any, odd: ModelResponse
) -> None:
    graph = made([odd, {"text": "well"}], seal=seal, logic={"retry": LoopRetry(delay_s=0.01)})
    out = await run(kind, graph, {"event": start()})
    context = out["xsm"]["context"]
    assert out["xsm"]["state_ids"] == ["toolLoop.done"] and context["result"] == "well"
    assert context["tokens_out"] >= 7


# --- wiring ------------------------------------------------------------------------------------


class NoEvent(TypedDict):
    xsm: dict[str, Any]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"interrupt_mode": "both"}, "interrupt_mode"),
        ({"positional": "yes"}, "positional"),
        ({"interrupt_payload": "none"}, "interrupt_payload"),
        ({"min_review_s": -1}, "min_review_s"),
        ({"serve_delay_s": float("inf")}, "serve_delay_s"),
        ({"cache_policy": {"tools": CachePolicy()}}, "for the task 'model' only, not for 'tools'"),
        ({"cache_policy": {"step": CachePolicy()}}, "not for 'step'"),
        ({"timeout": {"approval": 3}}, "not for 'approval'"),
        ({"state_schema": NoEvent}, "no field 'event'"),
        ({"state_schema": {"xsm": dict}}, "must be a TypedDict"),
        ({"event_key": "xsm"}, "different entries"),
        ({"as_subgraph": True, "checkpointer": InMemorySaver()}, "not both"),
        ({"signed_approvals": True}, "needs seal"),
        ({"logic": {"retry": LoopRetry(delay_s=60)}}, "retry delay"),
    ],
)
def test_wrong_wiring_is_refused_when_the_graph_is_built(options: Any, match: str) -> None:
    with pytest.raises(AgentConfigError, match=match):
        made([SAY], **options)


def test_the_model_task_may_be_cached_and_limited() -> None:
    from langgraph.cache.memory import InMemoryCache

    graph = made([SAY], cache_policy=CachePolicy(), cache=InMemoryCache())
    assert graph.nodes["model"].cache_policy is not None
    assert graph.nodes["tools"].cache_policy is None


def test_a_graph_needs_no_saver_until_a_person_is_asked() -> None:
    graph = made([LOOKUP, SAY], checkpointer=None, ledger=None)
    assert graph.invoke({"event": start()})["xsm"]["state_ids"] == ["toolLoop.done"]


def test_graphs_run_under_send() -> None:
    inner = made([SAY, SAY], checkpointer=None)

    class Many(TypedDict, total=False):
        answers: list[str]

    def each(state: Any) -> Any:
        return {}

    graph = StateGraph(Many)
    graph.add_node("agent", lambda state: inner.invoke(state) and {})
    graph.add_node("split", each)
    graph.add_edge(START, "split")
    graph.add_conditional_edges(
        "split", lambda state: [Send("agent", {"event": start(str(n))}) for n in (1, 2)]
    )
    graph.add_edge("agent", END)
    graph.compile(checkpointer=InMemorySaver()).invoke({}, thread())


class Untyped(BaseModel):
    xsm: Any = None
    event: Any = None


def test_a_loop_with_its_own_allow_list_denies_what_is_not_listed() -> None:
    refunds = Refunds()
    chart = load_chart()
    for state in ("awaiting_model", "awaiting_tool"):
        chart["states"][state]["meta"]["tools"] = ["lookup"]
    graph = statechart_graph(
        chart,
        agent_logic(FakeModel([REFUND, SAY], is_async=False), refunds.tools()),
        state_schema=Untyped,
        checkpointer=InMemorySaver(),
        ledger=InMemoryLedger(),
    )
    out = graph.invoke({"event": start()}, thread())
    assert refunds.done == [] and out["xsm"]["context"]["error"]["kind"] == "tool_denied"
