"""`statechart_node` with TOOL_LOOP: turns, approvals, retries, forks, seals, messages."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from langgraph.graph import END, START, StateGraph
from langgraph.types import Command, RetryPolicy

from guardchart.agents import FakeModel, agent_logic, pending_approval, tool_registry
from guardchart.agents import RetryPolicy as LoopRetry
from guardchart.errors import AgentConfigError, SnapshotTamperedError, StoreError
from guardchart.gate import Seal, sign_decision
from guardchart.langgraph import ledger_for, statechart_node
from guardchart.persistence import InMemoryLedger, SQLiteLedger
from tests.agents.test_window import assert_accepted
from tests.langgraph.graphs import (
    COUNTER,
    REFUND,
    DataState,
    ModelState,
    Refunds,
    State,
    compiled,
    from_event,
    loop_chart,
    loop_node,
    loop_router,
    start,
    thread,
)

DONE = ["toolLoop.done"]
WAITING = ["toolLoop.awaiting_human"]
LOOKUP: dict[str, Any] = {"tool": "lookup", "args": {"order_id": 42}}


def approval(xsm: dict[str, Any], **extra: Any) -> dict[str, Any]:
    pending = pending_approval(xsm["context"])
    return {
        "type": "HUMAN_APPROVED",
        "call_ids": [each["id"] for each in pending],
        "digests": {each["id"]: each["digest"] for each in pending},
        **extra,
    }


async def run(kind: str, app: Any, state: Any, config: Any) -> Any:
    return app.invoke(state, config) if kind == "sync" else await app.ainvoke(state, config)


BOTH = pytest.mark.parametrize("kind", ["sync", "async"])


# --- the main road -----------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("is_async", [False, True], ids=["sync model", "async model"])
@pytest.mark.parametrize("schema", [State, ModelState, DataState])
async def test_a_turn_runs_to_its_answer(kind: str, is_async: bool, schema: Any) -> None:
    node = loop_node(
        [LOOKUP, {"text": "Shipped."}],
        is_async=is_async,
        result_to_state=lambda view, state: {"answer": view.context["result"]},
    )
    app = compiled(node, schema, router=loop_router())
    out = await run(kind, app, {"event": start("Where is order 42?")}, thread())
    assert out["answer"] == "Shipped." and out["xsm"]["state_ids"] == DONE
    assert out["xsm"]["context"]["turns"] == 2


@BOTH
async def test_an_approved_side_effect_runs_once(kind: str) -> None:
    refunds = Refunds()
    app = compiled(loop_node([REFUND, {"text": "Refunded."}], refunds), router=loop_router())
    out = await run(kind, app, {"event": start()}, thread())
    assert out["xsm"]["state_ids"] == WAITING and refunds.done == []
    event = approval(out["xsm"])
    out = await run(kind, app, {"event": event}, thread())
    assert out["xsm"]["state_ids"] == DONE and refunds.done == [(7, 500)]
    out = await run(kind, app, {"event": event}, thread())
    assert out["xsm"]["receipt"]["status"] == "dropped" and refunds.done == [(7, 500)]


def test_another_process_may_answer_when_it_shares_the_checkpointer() -> None:
    refunds, saver = Refunds(), InMemorySaver()
    script: list[Any] = [REFUND, {"text": "Refunded."}]
    out = compiled(loop_node(script, refunds), saver=saver).invoke({"event": start()}, thread())
    again = compiled(
        loop_node([{"text": "Refunded."}], refunds, ledger=InMemoryLedger()), saver=saver
    )
    out = again.invoke({"event": approval(out["xsm"])}, thread())
    assert out["xsm"]["state_ids"] == DONE and refunds.done == [(7, 500)]


def test_a_wrong_approval_is_denied_and_says_so_in_the_state() -> None:
    refunds = Refunds()
    app = compiled(loop_node([REFUND, {"text": "x"}], refunds))
    app.invoke({"event": start()}, thread())
    out = app.invoke({"event": {"type": "HUMAN_APPROVED", "call_ids": ["other"]}}, thread())
    receipt = out["xsm"]["receipt"]
    assert receipt["denied"] and receipt["reason"] and "other" not in receipt["reason"]
    assert out["xsm"]["state_ids"] == WAITING and refunds.done == []


def test_what_is_written_survives_strict_msgpack_and_names_no_type() -> None:
    refunds = Refunds()
    node = loop_node([REFUND, {"text": "x"}], refunds)
    xsm = node({"event": start()})["xsm"]
    serde = JsonPlusSerializer(allowed_msgpack_modules=None)
    assert serde.loads_typed(serde.dumps_typed(xsm)) == xsm
    assert json.loads(json.dumps(xsm)) == xsm


STRICT = """
import os, tempfile, warnings
from langgraph.checkpoint.sqlite import SqliteSaver
from guardchart.langgraph import ledger_for
from tests.langgraph.graphs import *
from tests.langgraph.test_node_loop import approval
warnings.simplefilter("error")
with tempfile.TemporaryDirectory() as folder:
    with SqliteSaver.from_conn_string(os.path.join(folder, "c.sqlite")) as saver:
        ledger = ledger_for(saver)
        refunds = Refunds()
        node = loop_node([REFUND, {"text": "ok"}], refunds, ledger=ledger, messages_key="messages")
        app = compiled(node, saver=saver)
        out = app.invoke({"event": start()}, thread())
        out = app.invoke({"event": approval(out["xsm"])}, thread())
        kept = app.get_state(thread()).values
        assert kept == out and kept["xsm"]["value"] == "done", kept
        assert [each.type for each in kept["messages"]] == ["human", "ai", "tool", "ai"]
        ledger.disconnect()
print("strict", refunds.done)
"""


def test_a_graph_runs_the_same_under_strict_msgpack() -> None:
    done = subprocess.run(
        [sys.executable, "-c", STRICT],
        capture_output=True,
        text=True,
        cwd=Path(__file__).resolve().parents[2],
        env={**os.environ, "LANGGRAPH_STRICT_MSGPACK": "true"},
    )
    assert done.stdout.strip() == "strict [(7, 500)]", done.stderr
    assert "Deserializing" not in done.stderr and "Blocked" not in done.stderr


def test_tokens_of_a_chat_model_reach_the_messages_stream() -> None:
    from langchain_core.language_models.fake_chat_models import GenericFakeChatModel

    from guardchart.agents import ModelResponse

    chat = GenericFakeChatModel(messages=iter([AIMessage("It has shipped")]))

    def model(messages: Any, tools: Any) -> ModelResponse:
        return ModelResponse(text="".join(each.text for each in chat.stream("hi")))

    node = statechart_node(loop_chart(), agent_logic(model), event_from_state=from_event)
    chunks = [
        chunk.content
        for chunk, _ in compiled(node).stream({"event": start()}, thread(), stream_mode="messages")
    ]
    assert "".join(chunks) == "It has shipped"


# --- turns -------------------------------------------------------------------------------------


def test_a_stale_start_on_a_finished_conversation_is_dropped_and_says_why() -> None:
    app = compiled(loop_node([{"text": "one"}, {"text": "two"}]))
    app.invoke({"event": start("first")}, thread())
    out = app.invoke({"event": start("second")}, thread())
    receipt = out["xsm"]["receipt"]
    assert receipt["status"] == "dropped" and receipt["reason"].startswith("finished")
    assert "event_key=" in receipt["reason"] and "multi_turn=True" in receipt["reason"]
    assert out["xsm"]["context"]["result"] == "one"


def test_a_stale_start_does_not_close_calls_that_wait_for_a_decision() -> None:
    refunds = Refunds()
    chart = loop_chart("refund")
    script = [{"tool": "refund", "args": {"order_id": 7, "amount_cents": 5}}, {"text": "Done."}]
    logic = agent_logic(FakeModel(script, is_async=False), refunds.tools())
    node = statechart_node(chart, logic, event_from_state=lambda state: state["event"])
    app = compiled(node)
    start = {"type": "START", "prompt": "Refund order 7."}
    pending = app.invoke({"event": start}, thread())["xsm"]
    again = app.invoke({"answer": "unrelated"}, thread())["xsm"]
    assert again["value"] == "awaiting_human"
    assert again["receipt"]["status"] == "dropped" and "event_key=" in again["receipt"]["reason"]
    out = app.invoke({"event": approval(pending)}, thread())
    assert out["xsm"]["value"] == "done" and refunds.done == [(7, 5)]


@BOTH
@pytest.mark.parametrize("options", [{"event_key": "event"}, {"multi_turn": True}], ids=str)
async def test_a_new_start_begins_the_next_turn(kind: str, options: dict[str, Any]) -> None:
    app = compiled(loop_node([{"text": "one"}, {"text": "two"}], **options))
    first = await run(kind, app, {"event": start("first")}, thread())
    second = await run(kind, app, {"event": start("second")}, thread())
    assert second["xsm"]["context"]["result"] == "two"
    assert second["xsm"]["run"] == first["xsm"]["run"]
    said = [each["content"] for each in second["xsm"]["context"]["messages"]]
    assert said == ["first", "one", "second", "two"]


def test_new_input_while_an_approval_is_pending_supersedes_it() -> None:
    refunds = Refunds()
    app = compiled(loop_node([REFUND, {"text": "Never mind."}], refunds, event_key="event"))
    parked = app.invoke({"event": start()}, thread())["xsm"]
    out = app.invoke({"event": start("forget it")}, thread())["xsm"]
    assert out["state_ids"] == DONE and refunds.done == []
    tool_results = [m for m in out["context"]["messages"] if m["role"] == "tool"]
    assert len(tool_results) == 1
    late = app.invoke({"event": approval(parked)}, thread())["xsm"]
    assert late["receipt"]["status"] == "dropped" and refunds.done == []


# --- nothing transient strands a thread --------------------------------------------------------


@BOTH
async def test_a_transient_model_error_is_retried_inside_the_node(kind: str) -> None:
    node = loop_node(
        [ConnectionError("502"), {"text": "ok"}], logic={"retry": LoopRetry(delay_s=0.02)}
    )
    out = await run(kind, compiled(node, router=loop_router()), {"event": start()}, thread())
    assert out["xsm"]["state_ids"] == DONE and out["xsm"]["context"]["result"] == "ok"


@BOTH
async def test_a_model_that_always_fails_ends_the_turn_and_not_the_thread(kind: str) -> None:
    node = loop_node(
        [ConnectionError("502"), ConnectionError("502"), {"text": "back"}],
        logic={"retry": LoopRetry(max_attempts=2, delay_s=0.01)},
        event_key="event",
    )
    app = compiled(node, router=loop_router())
    out = await run(kind, app, {"event": start()}, thread())
    assert out["xsm"]["state_ids"] == ["toolLoop.error"]
    out = await run(kind, app, {"event": start("again")}, thread())
    assert out["xsm"]["state_ids"] == DONE and out["xsm"]["context"]["result"] == "back"


@BOTH
async def test_a_hung_tool_is_given_up_in_time_and_the_turn_goes_on(kind: str) -> None:
    hold = threading.Event()
    ended: list[bool] = []

    def slow() -> str:
        """Take for ever."""
        ended.append(hold.wait(30))
        return "late"

    node = statechart_node(
        loop_chart("slow"),
        agent_logic(
            FakeModel([{"tool": "slow", "args": {}}, {"text": "No luck."}], is_async=False),
            tool_registry(slow, timeout_s=0.2),
            retry=LoopRetry(delay_s=0.01),
        ),
        event_from_state=from_event,
    )
    out = await run(kind, compiled(node), {"event": start()}, thread())
    assert ended == []
    hold.set()
    assert out["xsm"]["state_ids"] == DONE and out["xsm"]["context"]["result"] == "No luck."


@BOTH
async def test_a_ledger_that_fails_for_a_moment_raises_and_strands_nothing(kind: str) -> None:
    class Flaky(InMemoryLedger):
        fails = 1

        def decide(self, *args: Any, **kwargs: Any) -> Any:
            if self.fails:
                self.fails -= 1
                raise StoreError("the disk is busy")
            return super().decide(*args, **kwargs)

    refunds = Refunds()
    app = compiled(loop_node([REFUND, {"text": "Refunded."}], refunds, ledger=Flaky()))
    out = await run(kind, app, {"event": start()}, thread())
    event = approval(out["xsm"])
    with pytest.raises(StoreError, match="the disk is busy"):
        await run(kind, app, {"event": event}, thread())
    assert app.get_state(thread()).values["xsm"]["state_ids"] == WAITING
    out = await run(kind, app, {"event": event}, thread())
    assert out["xsm"]["state_ids"] == DONE and refunds.done == [(7, 500)]


def test_a_retry_delay_the_node_would_not_wait_for_is_refused_at_build() -> None:
    with pytest.raises(AgentConfigError, match="timed_out"):
        loop_node([], logic={"retry": LoopRetry(delay_s=31)})
    with pytest.raises(AgentConfigError, match="can reach 40 s"):
        loop_node([], logic={"retry": LoopRetry(delay_s=10, backoff=2, max_attempts=3)})
    loop_node([], logic={"retry": LoopRetry(delay_s=31)}, serve_delay_s=31)


@BOTH
async def test_a_decision_after_its_deadline_finds_the_loop_escalated(kind: str) -> None:
    refunds = Refunds()
    node = loop_node([REFUND, {"text": "x"}], refunds)
    state = {"event": start(), **node({"event": start()})}
    for timer in state["xsm"]["timers"].values():
        timer["due_at"] = 1
    state["event"] = approval(state["xsm"])
    out = node(state) if kind == "sync" else await node.ainvoke(state)
    assert out["xsm"]["state_ids"] == ["toolLoop.error"] and refunds.done == []
    assert out["xsm"]["receipt"]["status"] == "dropped"


# --- at most once ------------------------------------------------------------------------------


def test_a_retry_after_the_effect_enters_no_second_time() -> None:
    refunds, fails = Refunds(), [ConnectionError("after"), ConnectionError("after")]

    def result(view: Any, state: Any) -> dict[str, Any]:
        if refunds.done and fails:
            raise fails.pop()
        return {}

    script: list[Any] = [REFUND, *[{"text": "Refunded."}] * 5]
    graph = StateGraph(State)
    graph.add_node(
        "agent",
        loop_node(script, refunds, result_to_state=result),
        retry_policy=RetryPolicy(initial_interval=0.01, jitter=False),
    )
    graph.add_edge(START, "agent")
    app = graph.compile(checkpointer=InMemorySaver())
    out = app.invoke({"event": start()}, thread())
    out = app.invoke({"event": approval(out["xsm"])}, thread())
    assert out["xsm"]["state_ids"] == DONE and refunds.done == [(7, 500)] and not fails


def test_a_fork_to_before_the_approval_enters_no_second_time() -> None:
    refunds = Refunds()
    app = compiled(loop_node([REFUND, *[{"text": "Refunded."}] * 3], refunds))
    out = app.invoke({"event": start()}, thread())
    parked = app.get_state(thread()).config
    event = approval(out["xsm"])
    app.invoke({"event": event}, thread())
    for _ in range(2):
        out = app.invoke({"event": event}, parked)
        assert out["xsm"]["state_ids"] != ["toolLoop.awaiting_tool"]
    assert refunds.done == [(7, 500)]


def test_eight_approvals_at_once_enter_once(tmp_path: Path) -> None:
    refunds = Refunds()
    ledger = SQLiteLedger(tmp_path / "ledger.sqlite")
    node = loop_node([REFUND, *[{"text": "Refunded."}] * 20], refunds, ledger=ledger, scope="t")
    state = {"event": start(), **node({"event": start()})}
    event = approval(state["xsm"])
    together = threading.Barrier(8)

    def approve(_: int) -> Any:
        together.wait()
        return node({"xsm": copy.deepcopy(state["xsm"]), "event": event})["xsm"]["state_ids"]

    with ThreadPoolExecutor(8) as pool:
        ends = list(pool.map(approve, range(8)))
    assert refunds.done == [(7, 500)]
    assert DONE in ends
    ledger.disconnect()


def test_an_edited_snapshot_is_refused_and_does_not_stay_parked() -> None:
    refunds = Refunds()
    app = compiled(loop_node([REFUND, {"text": "x"}], refunds))
    out = app.invoke({"event": start()}, thread())
    event = approval(out["xsm"])
    forged = copy.deepcopy(out["xsm"])
    for call in forged["context"]["pending_tool_calls"]:
        call["arguments"]["amount_cents"] = 99_999
    app.update_state(thread(), {"xsm": forged})
    out = app.invoke({"event": event}, thread())
    assert refunds.done == []
    assert out["xsm"]["state_ids"] == ["toolLoop.error"]
    assert out["xsm"]["context"]["error"]["kind"] == "tampered"
    assert out["xsm"]["receipt"]["denied"]


def test_a_state_forged_to_awaiting_tool_runs_nothing() -> None:
    refunds = Refunds()
    app = compiled(loop_node([REFUND, {"text": "No refund then."}], refunds, logic={
        "retry": LoopRetry(delay_s=0.01)}))  # fmt: skip
    out = app.invoke({"event": start()}, thread())
    forged = copy.deepcopy(out["xsm"])
    ids = [each["id"] for each in pending_approval(forged["context"])]
    forged["context"]["approved_call_ids"] = ids
    forged |= {
        "value": "awaiting_tool",
        "state_ids": ["toolLoop.awaiting_tool"],
        "timers": {"toolTimeout.toolLoop.awaiting_tool": {"due_at": 4e12}},
        "children": {
            "tools": {"src": "runTool", "key": f"tools@{forged['rev']}", "status": "active"}
        },
    }
    forged.pop("configuration", None)
    app.update_state(thread(), {"xsm": forged})
    out = app.invoke({"event": None}, thread())
    assert refunds.done == []
    assert out["xsm"]["state_ids"] == DONE


# --- ledgers, scopes ---------------------------------------------------------------------------


def test_the_ledger_beside_a_sqlite_saver_holds_the_rows_under_the_thread(tmp_path: Path) -> None:
    refunds = Refunds()
    with SqliteSaver.from_conn_string(str(tmp_path / "c.sqlite")) as saver:
        ledger = ledger_for(saver)
        node = loop_node([REFUND, {"text": "Refunded."}], refunds, ledger=ledger)
        app = compiled(node, saver=saver)
        out = app.invoke({"event": start()}, thread(7))
        (row,) = ledger.pending("7")
        assert row.slot.run == out["xsm"]["run"]
        out = app.invoke({"event": approval(out["xsm"])}, thread(7))
        assert out["xsm"]["state_ids"] == DONE and refunds.done == [(7, 500)]
        done = ledger.row("7", row.id)
        assert done is not None and done.status == "done"
        ledger.disconnect()  # type: ignore[attr-defined]


async def test_the_ledger_beside_an_async_sqlite_saver_is_found_by_the_node(
    tmp_path: Path,
) -> None:
    refunds = Refunds()
    async with AsyncSqliteSaver.from_conn_string(str(tmp_path / "c.sqlite")) as saver:
        ledger: Any = ledger_for(saver)
        node = loop_node(
            [REFUND, {"text": "Refunded."}], refunds, is_async=True, logic={"ledger": ledger}
        )
        app = compiled(node, saver=saver)
        out = await app.ainvoke({"event": start()}, thread())
        out = await app.ainvoke({"event": approval(out["xsm"])}, thread())
        assert out["xsm"]["state_ids"] == DONE and refunds.done == [(7, 500)]
        (await ledger.aresolve()).disconnect()


def test_a_durable_ledger_without_a_thread_is_refused_before_anything_runs(tmp_path: Path) -> None:
    ledger = SQLiteLedger(tmp_path / "ledger.sqlite")
    node = loop_node([REFUND, {"text": "x"}], ledger=ledger)
    with pytest.raises(AgentConfigError, match="a durable ledger needs to know the thread"):
        node({"event": start()})
    scoped = loop_node([REFUND], ledger=ledger, scope=lambda state: "ticket")
    assert scoped({"event": start()})["xsm"]["state_ids"] == WAITING
    assert len(list(ledger.pending("ticket"))) == 1
    ledger.disconnect()


# --- on_wait="interrupt" -----------------------------------------------------------------------


@BOTH
async def test_interrupt_asks_and_sends_the_answer_without_calling_the_model_again(
    kind: str,
) -> None:
    refunds = Refunds()
    model = FakeModel([REFUND, {"text": "Refunded."}], is_async=False)
    node = statechart_node(
        loop_chart("refund"),
        agent_logic(model, refunds.tools()),
        event_from_state=from_event,
        on_wait="interrupt",
    )
    app = compiled(node, router=loop_router(awaiting_human="agent"))
    out = await run(kind, app, {"event": start()}, thread())
    (asked,) = out["__interrupt__"]
    assert asked.value["state_ids"] == WAITING
    assert asked.value["pending"] == pending_approval(out["xsm"]["context"])
    assert len(model.calls) == 1
    # An answer that is no event, then a wrong one: each is told so and asked again.
    out = await run(kind, app, Command(resume="yes please"), thread())
    assert out["xsm"]["receipt"]["reason"]
    wrong = {"type": "HUMAN_APPROVED", "call_ids": ["nope"]}
    out = await run(kind, app, Command(resume=wrong), thread())
    assert out["xsm"]["receipt"]["denied"] and out["__interrupt__"] and refunds.done == []
    out = await run(kind, app, Command(resume=approval(out["xsm"])), thread())
    assert out["xsm"]["state_ids"] == DONE and refunds.done == [(7, 500)]
    assert len(model.calls) == 2


def test_interrupt_gives_way_to_a_new_event_under_event_key() -> None:
    refunds = Refunds()
    node = loop_node(
        [REFUND, {"text": "Never mind."}], refunds, on_wait="interrupt", event_key="event"
    )
    app = compiled(node, router=loop_router(awaiting_human="agent"))
    assert app.invoke({"event": start()}, thread())["__interrupt__"]
    out = app.invoke({"event": start("forget it")}, thread())
    assert out["xsm"]["state_ids"] == DONE and refunds.done == []


# --- seals -------------------------------------------------------------------------------------

KEY = "a key of many bytes"


def test_a_sealed_snapshot_goes_on_and_an_edited_one_keeps_nothing() -> None:
    refunds = Refunds()
    app = compiled(loop_node([REFUND, {"text": "x"}], refunds, seal=Seal(KEY)))
    out = app.invoke({"event": start()}, thread())
    assert isinstance(out["xsm"]["seal"], str)
    event = approval(out["xsm"])
    for change in ({"turns": -5}, {"cost_usd": 0.5}):
        forged = copy.deepcopy(out["xsm"])
        forged["context"] |= change
        app.update_state(thread("other"), {"xsm": forged})
        ended = app.invoke({"event": event}, thread("other"))["xsm"]
        assert ended["state_ids"] == ["toolLoop.error"] and refunds.done == []
        assert ended["context"]["error"]["kind"] == "tampered"
        assert ended["context"]["messages"] == []
    out = app.invoke({"event": event}, thread())
    assert out["xsm"]["state_ids"] == DONE and refunds.done == [(7, 500)]


def test_a_tampered_conversation_does_not_go_on_with_the_event_that_found_it_out() -> None:
    app = compiled(loop_node([{"text": "one"}, {"text": "two"}], seal=Seal(KEY), event_key="event"))
    out = app.invoke({"event": start("first")}, thread())
    forged = copy.deepcopy(out["xsm"])
    forged["context"]["cost_usd"] = 0.0001
    app.update_state(thread(), {"xsm": forged})
    out = app.invoke({"event": start("second")}, thread())
    assert out["xsm"]["context"]["error"]["kind"] == "tampered" and out["event"] is None
    assert out["xsm"]["receipt"]["reason"].startswith("tampered")
    out = app.invoke({"event": start("third")}, thread())
    assert out["xsm"]["context"]["result"] == "two"


def test_another_threads_sealed_snapshot_is_refused() -> None:
    app = compiled(loop_node([REFUND, {"text": "x"}], seal=Seal(KEY)))
    out = app.invoke({"event": start()}, thread("a"))
    app.update_state(thread("b"), {"xsm": out["xsm"]})
    assert app.invoke({"event": None}, thread("b"))["xsm"]["state_ids"] == ["toolLoop.error"]


def test_a_chart_without_an_error_end_raises_when_its_seal_does_not_fit() -> None:
    node = statechart_node(
        {"id": "m", "initial": "a", "states": {"a": {}}},
        event_from_state=lambda s: None,
        seal=Seal(KEY),
        scope="t",
    )
    sealed = node({})["xsm"]
    assert node({"xsm": sealed}) == {}
    with pytest.raises(SnapshotTamperedError):
        node({"xsm": {**sealed, "rev": 7}})
    with pytest.raises(SnapshotTamperedError):
        node({"xsm": {key: value for key, value in sealed.items() if key != "seal"}})


def test_a_seal_without_a_thread_is_refused() -> None:
    with pytest.raises(AgentConfigError, match="a seal is bound to the thread"):
        loop_node([{"text": "x"}], seal=Seal(KEY))({"event": start()})


def test_an_unsigned_decision_is_refused_where_signatures_are_asked_for() -> None:
    refunds, seal = Refunds(), Seal(KEY)
    app = compiled(loop_node([REFUND, {"text": "x"}], refunds, seal=seal, signed_approvals=True))
    out = app.invoke({"event": start()}, thread())
    event = approval(out["xsm"])
    out = app.invoke({"event": event}, thread())
    assert out["xsm"]["receipt"]["reason"] == "the decision is not signed" and refunds.done == []
    elsewhere = sign_decision(seal, event, "t2")
    assert app.invoke({"event": elsewhere}, thread())["xsm"]["receipt"]["denied"]
    out = app.invoke({"event": sign_decision(seal, event, "t1")}, thread())
    assert out["xsm"]["state_ids"] == DONE and refunds.done == [(7, 500)]


# --- messages_key ------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("schema", [State, ModelState, DataState])
async def test_the_conversation_lives_in_the_channel(kind: str, schema: Any) -> None:
    node = loop_node(
        [LOOKUP, {"text": "Shipped."}, {"text": "Bye."}], messages_key="messages", event_key="event"
    )
    app = compiled(node, schema)
    out = await run(kind, app, {"event": start("Where is order 42?")}, thread())
    run_id = out["xsm"]["run"]
    assert [type(each) for each in out["messages"]] == [
        HumanMessage, AIMessage, ToolMessage, AIMessage,
    ]  # fmt: skip
    assert [each.id for each in out["messages"]] == [f"{run_id}-{n}" for n in (1, 2, 3, 4)]
    assert out["messages"][1].tool_calls[0]["args"] == {"order_id": 42}
    assert out["xsm"]["context"]["messages"] == []
    question = HumanMessage("Thanks", id="app-1")
    out = await run(kind, app, {"messages": [question], "event": start("Thanks")}, thread())
    assert [each.content for each in out["messages"]][4:] == ["Thanks", "Bye."]
    assert [each.id for each in out["messages"]][4:] == ["app-1", f"{run_id}-5"]


def test_the_model_sees_the_whole_channel() -> None:
    model = FakeModel([{"text": "ok"}], is_async=False)
    node = statechart_node(
        loop_chart(),
        agent_logic(model),
        event_from_state=lambda s: start("and now?"),
        messages_key="messages",
    )
    compiled(node).invoke({"messages": [HumanMessage("hi"), AIMessage("hello")]}, thread())
    assert [each["content"] for each in model.calls[0]["messages"]] == ["hi", "hello", "and now?"]


def test_an_approval_goes_on_with_the_channels_conversation() -> None:
    refunds = Refunds()
    app = compiled(loop_node([REFUND, {"text": "Refunded."}], refunds, messages_key="messages"))
    out = app.invoke({"event": start()}, thread())
    assert [each.type for each in out["messages"]] == ["human", "ai"]
    out = app.invoke({"event": approval(out["xsm"])}, thread())
    assert refunds.done == [(7, 500)]
    assert [each.type for each in out["messages"]] == ["human", "ai", "tool", "ai"]


@BOTH
@pytest.mark.parametrize("in_channel", [True, False], ids=["channel", "snapshot"])
async def test_a_thread_holds_many_turns_and_the_model_is_never_sent_an_open_call(
    kind: str, in_channel: bool
) -> None:
    options: dict[str, Any] = {"messages_key": "messages"} if in_channel else {}
    refunds = Refunds()
    sent: list[Any] = []
    app, out = None, {}
    saver = InMemorySaver()
    for number in range(24):
        model = FakeModel(
            [REFUND if number % 3 == 1 else LOOKUP, {"text": f"answer {number}"}], is_async=False
        )
        logic = agent_logic(model, refunds.tools(), max_messages=9)
        node = statechart_node(
            loop_chart("lookup", "refund"),
            logic,
            event_from_state=from_event,
            event_key="event",
            **options,
        )
        app = compiled(node, saver=saver)
        # Every third turn asks a person, and the next question supersedes it.
        state: dict[str, Any] = {"event": start(f"question {number}")}
        if in_channel:
            state["messages"] = [HumanMessage(f"question {number}")]
        out = await run(kind, app, state, thread())
        sent += [call["messages"] for call in model.calls]
        expected = "awaiting_human" if number % 3 == 1 else "done"
        assert out["xsm"]["value"] == expected, (number, out["xsm"]["context"]["error"])
    for messages in sent:
        assert_accepted(messages)
        assert in_channel or len(messages) <= 10
    assert refunds.done == [] and out["xsm"]["batch_no"] == 24
    if in_channel:
        said = [each.content for each in out["messages"] if isinstance(each, HumanMessage)]
        assert said == [f"question {number}" for number in range(24)]
        results = [each.tool_call_id for each in out["messages"] if each.type == "tool"]
        proposing = [each for each in out["messages"] if isinstance(each, AIMessage)]
        asked = [call["id"] for each in proposing for call in each.tool_calls]
        assert sorted(results) == sorted(asked)


@BOTH
@pytest.mark.parametrize("scope", ["turn", "conversation"])
async def test_turns_of_a_thread_have_their_own_budget_or_share_one(kind: str, scope: Any) -> None:
    model = FakeModel([{"text": "x"}] * 3, is_async=False)
    logic = agent_logic(model, budgets={"max_turns": 2}, budget_scope=scope)
    node = statechart_node(loop_chart(), logic, event_from_state=from_event, event_key="event")
    app = compiled(node)
    ends = []
    for number in range(3):
        out = await run(kind, app, {"event": start(f"question {number}")}, thread())
        ends.append((out["xsm"]["value"], out["xsm"]["context"]["turns"]))
    assert ends == (
        [("done", 1)] * 3 if scope == "turn" else [("done", 1), ("done", 2), ("error", 2)]
    )


def test_a_call_that_another_node_left_open_in_the_channel_is_answered_for_the_model() -> None:
    model = FakeModel([{"text": "ok"}], is_async=False)
    node = statechart_node(
        loop_chart(),
        agent_logic(model),
        event_from_state=lambda s: start("and now?"),
        messages_key="messages",
    )
    call = {"id": "o1", "name": "fetch", "args": {}, "type": "tool_call"}
    channel = [HumanMessage("hi"), AIMessage("", tool_calls=[call]), HumanMessage("and now?")]
    out = compiled(node).invoke({"messages": channel}, thread())
    (request,) = [each["messages"] for each in model.calls]
    assert_accepted(request)
    assert [each["role"] for each in request] == ["user", "assistant", "tool", "user"]
    assert [each.type for each in out["messages"]] == ["human", "ai", "human", "tool", "ai"]


def test_result_to_state_may_add_messages_of_its_own() -> None:
    node = loop_node(
        [{"text": "Shipped."}],
        messages_key="messages",
        result_to_state=lambda view, state: {"messages": AIMessage("noted", id="n")},
    )
    out = compiled(node).invoke({"event": start()}, thread())
    assert [each.content for each in out["messages"]][-1] == "noted"


def test_two_nodes_of_one_graph_keep_apart() -> None:
    graph = StateGraph(State)
    graph.add_node("agent", loop_node([{"text": "one"}]))
    counter = statechart_node(
        {**COUNTER, "states": {"low": {}}},
        event_from_state=lambda s: None,
        state_key="answer",
    )
    graph.add_node("count", counter)
    graph.add_edge(START, "agent")
    graph.add_edge("agent", "count")
    graph.add_edge("count", END)
    out = graph.compile().invoke({"event": start()})
    assert out["xsm"]["state_ids"] == DONE and out["answer"]["state_ids"] == ["counter.low"]
