"""StatechartMiddleware in a real create_agent: what runs, what is refused, who is asked."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Annotated, Any

import pytest
from langchain.agents.middleware import (
    AgentMiddleware,
    HumanInTheLoopMiddleware,
    ToolRetryMiddleware,
)
from langchain.agents.structured_output import ToolStrategy
from langchain_core.messages import AIMessage, HumanMessage, RemoveMessage, ToolMessage
from langchain_core.tools import InjectedToolCallId, StructuredTool, tool
from langgraph.types import Command, interrupt
from pydantic import BaseModel

from guardchart.errors import AgentConfigError, SnapshotError, SnapshotTamperedError
from guardchart.gate import Seal, approval_event
from guardchart.langchain import StatechartMiddleware, guard_tool
from guardchart.persistence import InMemoryLedger, SQLiteLedger
from guardchart.runtime._workers import WORKERS
from tests.langchain.desk import (
    CLOSING,
    THREAD,
    Agent,
    Desk,
    asked,
    both,
    chart,
    complete,
    decision,
    results,
)
from tests.langchain.fakes import call, says

AFTER_MODEL = "StatechartMiddleware.after_model"

# --- what runs ---------------------------------------------------------------------------------


@both
def test_a_listed_read_only_tool_runs_unasked(is_async: bool) -> None:
    agent = Agent([says(call("lookup", order_id=7)), "shipped"], is_async=is_async)
    out = agent.invoke()
    assert agent.entered == [("lookup", 7)]
    assert results(out) == {"c1": "order 7: shipped"} and complete(out["messages"])
    assert "xsm" not in out and "xsm_events" not in out


def test_from_a_running_loop_the_gate_takes_no_thread_where_nothing_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: list[Any] = []
    monkeypatch.setattr(WORKERS, "start", lambda *args: taken.append(args))
    monkeypatch.setattr(asyncio, "to_thread", lambda *args: taken.append(args))
    turn = says(call("lookup", order_id=7), call("refund", "c2", order_id=7))
    agent = Agent([turn, "done"], is_async=True)
    out = agent.resume(approval_event(asked(agent.invoke())["calls"]))
    assert results(out) == {"c1": "order 7: shipped", "c2": "refunded 100"}
    assert taken == []


@pytest.mark.gate
@both
def test_a_tool_the_state_does_not_list_is_denied_and_never_shown(is_async: bool) -> None:
    agent = Agent([says(call("wire", cents=5)), "no"], is_async=is_async)
    out = agent.invoke()
    assert agent.entered == []
    assert "not in this state's meta.tools" in results(out)["c1"]
    assert all("wire" not in told for told in agent.model.told)


@pytest.mark.gate
@both
def test_an_unknown_tool_reads_like_an_unlisted_one(is_async: bool) -> None:
    agent = Agent(
        [says(call("wire", "c1", cents=5), call("nothing", "c2")), "no"], is_async=is_async
    )
    out = results(agent.invoke())
    assert out["c1"].replace("wire", "X") == out["c2"].replace("nothing", "X")
    assert agent.entered == []


@pytest.mark.gate
@both
def test_bad_arguments_in_a_parallel_batch_are_refused_and_the_others_run(is_async: bool) -> None:
    turn = says(
        call("lookup", "c1", order_id="7"),
        call("lookup", "c2", order_id=8),
        call("lookup", "c3", order_id=9, SECRET=1),
    )
    agent = Agent([turn, "one"], is_async=is_async)
    out = agent.invoke()
    assert agent.entered == [("lookup", 8)]
    told = results(out)
    assert "valid integer" in told["c1"] and "Extra inputs" in told["c3"]
    assert "SECRET" not in str(told) and complete(out["messages"])


@pytest.mark.gate
@both
def test_more_calls_than_a_turn_may_have_are_all_refused(is_async: bool) -> None:
    turn = says(*(call("lookup", f"c{n}", order_id=n) for n in range(4)))
    agent = Agent([turn, "no"], max_tool_calls=3, is_async=is_async)
    agent.invoke()
    assert agent.entered == []


@pytest.mark.gate
@both
def test_a_middleware_that_never_asks_refuses_just_the_same_and_needs_no_node(
    is_async: bool,
) -> None:
    turn = says(
        call("lookup", "c1", order_id=7),
        call("wire", "c2", cents=5),
        call("nothing", "c3"),
        call("lookup", "c4", order_id="7"),
    )
    agent = Agent([turn, "done"], side_effects=(), is_async=is_async)
    out = agent.invoke()
    assert agent.entered == [("lookup", 7)] and complete(out["messages"])
    told = results(out)
    assert told["c1"] == "order 7: shipped"
    assert all("denied" in told[ident] for ident in ("c2", "c3", "c4"))
    nodes = set(agent.app.get_graph().nodes)
    assert "StatechartMiddleware.after_model" not in nodes
    asking = set(Agent(["hi"]).app.get_graph().nodes)
    assert "StatechartMiddleware.after_model" in asking


def test_a_middleware_whose_chart_hears_of_no_tool_needs_no_node_at_the_end() -> None:
    def nodes(**options: Any) -> set[str]:
        return {each for each in Agent(["hi"], **options).app.get_graph().nodes if "." in each}

    assert nodes(side_effects=()) == {"StatechartMiddleware.before_agent"}
    for event in ("tool.done.refund", "tool.failed.*", "*"):
        machine = chart("lookup", on={event: {"actions": []}})
        assert "StatechartMiddleware.after_agent" in nodes(machine=machine)


@both
def test_a_lone_call_that_needs_nobody_stores_nothing_of_its_turn(is_async: bool) -> None:
    turns = [says(call("lookup", f"c{n}", order_id=n)) for n in range(3)]
    agent = Agent([*turns, "done"], is_async=is_async)
    agent.invoke()
    kept = [each.values.get("xsm") for each in agent.app.get_state_history(THREAD)]
    assert len({str(each) for each in kept if each}) == 1
    assert agent.entered == [("lookup", n) for n in range(3)]


@pytest.mark.gate
@both
def test_a_lone_call_that_is_edited_into_a_side_effect_does_not_run(is_async: bool) -> None:
    agent = Agent(
        [says(call("lookup", "c1", order_id=7)), "done"],
        is_async=is_async,
        agent={"interrupt_before": ["tools"]},
    )
    message = agent.invoke()["messages"][-1]
    forged = message.model_copy(update={"tool_calls": [call("refund", "c1", order_id=7)]})
    agent.app.update_state(THREAD, {"messages": [forged]}, as_node=AFTER_MODEL)
    out = agent.invoke(None)
    assert agent.entered == [] and "needs human approval" in results(out)["c1"]


@both
def test_an_id_that_older_notes_speak_of_is_a_call_of_its_own(is_async: bool) -> None:
    agent = Agent(
        [says(call("wire", "c1", cents=5)), "no", says(call("lookup", "c1", order_id=7)), "done"],
        is_async=is_async,
    )
    agent.invoke()
    gone = [RemoveMessage(each.id) for each in agent.state().values["messages"]]
    agent.app.update_state(THREAD, {"messages": gone})
    assert results(agent.invoke()) == {"c1": "order 7: shipped"}


def test_a_subclass_of_the_middleware_stays_what_it_is() -> None:
    class Mine(StatechartMiddleware):
        """Somebody's own."""

    guard = Mine(chart("lookup"), tools=Desk().tools)
    assert type(guard) is Mine and isinstance(guard, StatechartMiddleware)


def test_a_middleware_that_never_asks_withholds_outputs_and_puts_calls_off() -> None:
    machine: Any = {
        "id": "desk",
        "initial": "open",
        "states": {
            "open": {
                "meta": {"tools": ["lookup"], "outputs": []},
                "on": {"tool.done.lookup": "ready"},
            },
            "ready": {"meta": {"tools": [], "outputs": ["Answer"]}},
        },
    }
    turn = says(call("lookup", "c1", order_id=1), call("lookup", "c2", order_id=2), ANSWER)
    agent = Agent(
        [turn, says(call("Answer", "o2", text="now"))],
        machine=machine,
        side_effects=(),
        agent={"response_format": ToolStrategy(Answer)},
    )
    out = agent.invoke()
    told = results(out)
    assert agent.entered == [("lookup", 1)]
    assert "propose this again" in told["c2"] and "not wanted" in told["o1"]
    assert out["structured_response"] == Answer(text="now")


# --- approval ----------------------------------------------------------------------------------

REFUND = says(call("refund", "c1", order_id=7))


@pytest.mark.gate
@both
def test_a_side_effect_waits_for_a_person_and_runs_once(is_async: bool) -> None:
    agent = Agent([REFUND, "done"], is_async=is_async)
    out = agent.invoke()
    question = asked(out)
    assert agent.entered == [] and question["calls"][0]["name"] == "refund"
    assert question["action_requests"][0]["args"] == {"order_id": 7, "cents": 100}
    done = agent.approve(out)
    assert agent.entered == [("refund", 7, 100)]
    assert results(done) == {"c1": "refunded 100"}
    assert len(agent.model.asked) == 2  # not asked again by the resume


@both
def test_approve_one_and_reject_one_each_happens_once(is_async: bool) -> None:
    turn = says(call("refund", "c1", order_id=7), call("refund", "c2", order_id=8))
    agent = Agent([turn, "done"], is_async=is_async)
    first, second = asked(agent.invoke())["calls"]
    out = agent.resume(
        {"decisions": [decision(second, "reject", reason="no"), decision(first)], "by": "ann"}
    )
    assert agent.entered == [("refund", 7, 100)]
    assert results(out)["c2"] == "not run: rejected by a reviewer: no"
    assert complete(out["messages"])
    rows = [agent.ledger.row("t", each["id"]) for each in (first, second)]
    assert [row.status for row in rows] == ["done", "rejected"] and rows[0].by == "ann"


@both
def test_an_edit_runs_with_the_reviewers_arguments_and_rewrites_the_answer(is_async: bool) -> None:
    agent = Agent([REFUND, "done"], is_async=is_async)
    (item,) = asked(agent.invoke())["calls"]
    out = agent.resume(
        {"decisions": [decision(item, "edit", arguments={"order_id": 7, "cents": 5})]}
    )
    assert agent.entered == [("refund", 7, 5)]
    answer = next(each for each in out["messages"] if isinstance(each, AIMessage))
    assert answer.tool_calls[0]["args"] == {"order_id": 7, "cents": 5}
    assert results(out)["c1"] == "(ran with arguments that a reviewer edited) refunded 5"


@both
def test_a_bad_edit_is_asked_again_and_the_right_one_taken(is_async: bool) -> None:
    agent = Agent([REFUND, "done"], is_async=is_async)
    (item,) = asked(agent.invoke())["calls"]
    for bad in ({"order_id": "7"}, {"order_id": 7, "SECRET": 1}, {}):
        again = asked(agent.resume({"decisions": [decision(item, "edit", arguments=bad)]}))
        assert "refused" in again and "SECRET" not in again["refused"]
    other = {"type": "edit", "edited_action": {"name": "wire", "args": {"cents": 1}}}
    again = asked(
        agent.resume({"decisions": [{**other, "id": item["id"], "digest": item["digest"]}]})
    )
    assert again["refused"] == "an edit keeps the tool"
    agent.resume({"decisions": [decision(item, "edit", arguments={"order_id": 7, "cents": 1})]})
    assert agent.entered == [("refund", 7, 1)]


@pytest.mark.parametrize(
    "wrong",
    [
        {"decisions": []},
        {"decisions": [{"type": "approve"}, {"type": "approve"}]},
        [],
        {},
        "approve",
        True,
        {"type": "HUMAN_APPROVED", "call_ids": ["c1"]},
        {"type": "HUMAN_APPROVED", "call_ids": ["c2"], "digests": {"c2": "x"}},
        {"decisions": [{"id": "c1", "digest": "0" * 64, "decision": "approve"}]},
        {"decisions": [{"id": "c1", "decision": "approve"}]},
        {"decisions": [{"type": "approve"}]},
        {"decisions": [{"type": "respond", "message": "SECRET"}]},
        {"decisions": [7]},
    ],
    ids=repr,
)
@pytest.mark.gate
@both
def test_a_wrong_answer_or_number_of_decisions_is_followed_by_the_right_one(
    wrong: Any, is_async: bool
) -> None:
    agent = Agent([REFUND, "done"], is_async=is_async)
    agent.invoke()
    again = asked(agent.resume(wrong))
    assert wrong == {} or "refused" in again  # LangGraph itself takes {} for no answer
    assert "SECRET" not in str(again)
    assert agent.entered == []
    agent.resume(approval_event(again["calls"]))
    assert agent.entered == [("refund", 7, 100)]
    assert len(agent.model.asked) == 2


TWO = [REFUND, says(call("refund", "c2", order_id=8)), "done"]


@pytest.mark.gate
@both
def test_a_double_click_by_interrupt_id_approves_nothing_else(is_async: bool) -> None:
    agent = Agent(list(TWO), is_async=is_async, positional="accept")
    out = agent.invoke()
    answer = {out["__interrupt__"][0].id: {"decisions": [{"type": "approve"}]}}
    second = agent.resume(answer)
    assert asked(second)["calls"][0]["id"] == "c2"
    try:
        agent.resume(answer)
    except Exception as exc:  # LangGraph may refuse an id that is not pending
        assert "interrupt" in str(exc).lower()
    assert agent.entered == [("refund", 7, 100)]


@pytest.mark.gate
@both
def test_a_scalar_double_click_approves_nothing_else(is_async: bool) -> None:
    agent = Agent(list(TWO), is_async=is_async)
    out = agent.invoke()
    answer = approval_event(asked(out)["calls"])
    agent.resume(answer)
    again = agent.resume(answer)
    assert asked(again)["refused"] and agent.entered == [("refund", 7, 100)]
    agent.approve(again)
    assert agent.entered == [("refund", 7, 100), ("refund", 8, 100)]


@pytest.mark.gate
@both
def test_a_double_click_with_digest_of_a_finished_thread_enters_nothing(is_async: bool) -> None:
    agent = Agent([REFUND, "done"], is_async=is_async)
    out = agent.invoke()
    for _ in range(3):
        agent.approve(out)
    assert agent.entered == [("refund", 7, 100)] and len(agent.model.asked) == 2


@both
def test_answers_by_position_are_taken_where_the_app_accepts_them(is_async: bool) -> None:
    turn = says(call("refund", "c1", order_id=7), call("refund", "c2", order_id=8))
    agent = Agent([turn, "done"], positional="accept", is_async=is_async)
    agent.invoke()
    agent.resume(
        {
            "decisions": [
                {"type": "reject", "message": "no"},
                {
                    "type": "edit",
                    "edited_action": {"name": "refund", "args": {"order_id": 8, "cents": 1}},
                },
            ]
        }
    )
    assert agent.entered == [("refund", 8, 1)]


@both
def test_invoke_none_asks_the_same_question_again(is_async: bool) -> None:
    agent = Agent([REFUND, "done"], is_async=is_async)
    first = asked(agent.invoke())
    again = agent.invoke(None)
    assert asked(again) == first and len(agent.model.asked) == 1
    agent.approve(again)
    assert agent.entered == [("refund", 7, 100)]


@pytest.mark.gate
@both
def test_a_new_message_while_pending_puts_the_result_beside_its_answer(is_async: bool) -> None:
    agent = Agent([REFUND, "hello", "?"], is_async=is_async)
    out = agent.invoke()
    after = agent.invoke({"messages": [("user", "never mind")]})
    kinds = [each.type for each in after["messages"]]
    assert kinds == ["human", "ai", "tool", "human", "ai"] and complete(after["messages"])
    assert results(after) == {"c1": "not run: superseded by new input"}
    row = agent.ledger.row("t", "c1")
    assert row.status == "void" and agent.entered == []
    agent.approve(out)  # the old approval
    assert agent.entered == []


FRESH = """
import sys
sys.path.insert(0, {root!r})
import sqlite3
from langgraph.checkpoint.sqlite import SqliteSaver
from guardchart.persistence import SQLiteLedger
from tests.langchain.desk import Agent, asked
from tests.langchain.test_middleware import REFUND
step, path = sys.argv[1], sys.argv[2]
saver = SqliteSaver(sqlite3.connect(path + "/threads.sqlite", check_same_thread=False))
ledger = SQLiteLedger(path + "/threads.sqlite")
agent = Agent([REFUND, "done"] if step == "ask" else ["done"], saver=saver, ledger=ledger)
if step == "ask":
    print(asked(agent.invoke())["calls"][0]["id"])
else:
    out = agent.approve(agent.invoke(None))
    print(agent.entered, out["messages"][-1].content)
"""


def test_a_question_is_answered_in_a_fresh_process(tmp_path: Any) -> None:
    import subprocess
    import sys
    from pathlib import Path

    program = FRESH.format(root=str(Path(__file__).resolve().parents[2]))

    def step(name: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", program, name, str(tmp_path)], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    assert step("ask") == "c1"
    assert step("answer") == "[('refund', 7, 100)] done"


def test_the_default_ledger_takes_over_a_question_from_another_process() -> None:
    first = Agent([REFUND, "done"])
    out = first.invoke()
    # Another process: the checkpoints are shared, the ledger in memory is not.
    second = Agent(["done"], desk=first.desk, saver=first.saver, ledger=InMemoryLedger())
    second.approve(out)
    assert first.entered == [("refund", 7, 100)]


def test_from_a_running_loop_a_ledger_that_blocks_is_asked_on_other_threads_only(
    tmp_path: Any,
) -> None:
    asked_on: dict[str, set[int]] = {}

    def watched(verb: str) -> Any:
        def call_it(self: Any, *args: Any, **options: Any) -> Any:
            asked_on.setdefault(verb, set()).add(threading.get_ident())
            return getattr(SQLiteLedger, verb)(self, *args, **options)

        return call_it

    verbs = ("propose_batch", "row", "decide", "close", "claim", "record", "slot_row")
    ledger: Any = type("Watched", (SQLiteLedger,), {verb: watched(verb) for verb in verbs})
    turn = says(call("refund", "c1", order_id=7), call("refund", "c2", order_id=8))
    agent = Agent([turn, "done"], ledger=ledger(tmp_path / "l.sqlite"), is_async=True)
    one, two = asked(agent.invoke())["calls"]
    out = agent.resume({"decisions": [decision(one), decision(two, "reject", reason="no")]})
    assert agent.entered == [("refund", 7, 100)] and complete(out["messages"])
    assert {"propose_batch", "row", "decide", "claim", "record"} <= asked_on.keys()
    assert threading.get_ident() not in set().union(*asked_on.values())


@pytest.mark.gate
@both
def test_a_fork_to_before_the_approval_gets_the_recorded_result(is_async: bool) -> None:
    agent = Agent([REFUND, "done", "done again"], is_async=is_async)
    out = agent.invoke()
    parked = agent.state().config
    agent.approve(out)
    again = agent.resume(approval_event(asked(out)["calls"]), parked)
    assert agent.entered == [("refund", 7, 100)]
    assert results(again) == {"c1": "refunded 100"}


@pytest.mark.gate
@both
def test_a_fork_that_asks_the_model_again_gets_the_recorded_result(is_async: bool) -> None:
    agent = Agent(
        [REFUND, "done", says(call("refund", "c9", order_id=7)), "done again"], is_async=is_async
    )
    out = agent.invoke()
    agent.approve(out)
    before = [
        each.config for each in agent.app.get_state_history(THREAD) if each.next == ("model",)
    ][-1]
    again = agent.invoke(None, before)
    assert agent.entered == [("refund", 7, 100)] and results(again) == {"c9": "refunded 100"}


@both
def test_a_late_answer_is_refused_and_the_model_told(is_async: bool) -> None:
    at = [1_000_000.0]
    agent = Agent([REFUND, "too bad"], human_timeout_s=60, now=lambda: at[0], is_async=is_async)
    out = agent.invoke()
    at[0] += 61_000
    late = agent.approve(out)
    assert agent.entered == [] and results(late) == {"c1": "not run: no human decision in time"}
    assert late["messages"][-1].content == "too bad"


@pytest.mark.gate
def test_eight_resumes_at_once_enter_once(tmp_path: Any) -> None:
    desk = Desk()
    ledger = SQLiteLedger(tmp_path / "ledger.sqlite")
    agents = [Agent([REFUND], desk=desk, ledger=ledger)]
    out = agents[0].invoke()
    agents += [Agent(["done"], desk=desk, ledger=ledger, saver=agents[0].saver) for _ in range(7)]
    agents[0] = Agent(["done"], desk=desk, ledger=ledger, saver=agents[0].saver)
    threads = [threading.Thread(target=agent.approve, args=(out,)) for agent in agents]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert desk.entered == [("refund", 7, 100)]


# --- beside other middleware -------------------------------------------------------------------


class Hook(AgentMiddleware[Any, Any, Any]):
    """Changes a request on its way to the tool."""

    def __init__(self, change: Any) -> None:
        super().__init__()
        self.change = change

    def wrap_tool_call(self, request: Any, handler: Any) -> Any:
        return handler(self.change(request))

    async def awrap_tool_call(self, request: Any, handler: Any) -> Any:
        return await handler(self.change(request))


def swapped(**change: Any) -> Any:
    return lambda request: request.override(tool_call={**request.tool_call, **change})


@both
@pytest.mark.parametrize(
    ("script", "change"),
    [
        pytest.param(
            REFUND, swapped(args={"order_id": 7, "cents": 99_999}), marks=pytest.mark.gate
        ),
        (REFUND, swapped(name="wire", args={"cents": 5})),
        (says(call("lookup", "c1", order_id=7)), swapped(name="refund")),
        (says(call("lookup", "c1", order_id=7)), swapped(name="wire", args={"cents": 5})),
        pytest.param(
            says(call("lookup", "c1", order_id=7)),
            swapped(args={"order_id": "7"}),
            marks=pytest.mark.gate,
        ),
    ],
    ids=["arguments", "name", "to a side effect", "to an unlisted one", "to bad arguments"],
)
def test_an_outer_middleware_that_swaps_the_call_is_refused(
    script: Any, change: Any, is_async: bool
) -> None:
    agent = Agent([script, "done"], outer=(Hook(change),), is_async=is_async)
    out = agent.invoke()
    if "__interrupt__" in out:
        out = agent.approve(out)
    assert agent.entered == []
    assert out["messages"][-2].status == "error"


@both
def test_an_outer_middleware_that_swaps_the_tool_object_is_refused(is_async: bool) -> None:
    other = Desk()
    agent = Agent(
        [says(call("lookup", "c1", order_id=7)), "done"],
        outer=(Hook(lambda request: request.override(tool=other.lookup)),),
        is_async=is_async,
    )
    out = agent.invoke()
    assert agent.entered == [] and other.entered == []
    assert "not the registered one" in results(out)["c1"]


@both
def test_an_inner_tool_hook_is_refused_at_the_first_call(is_async: bool) -> None:
    agent = Agent(
        [says(call("lookup", "c1", order_id=7))],
        inner=(Hook(swapped(args={"order_id": 1})),),
        is_async=is_async,
    )
    with pytest.raises(AgentConfigError, match="put StatechartMiddleware last"):
        agent.invoke()
    assert agent.entered == []


class Edits(AgentMiddleware[Any, Any, Any]):
    """Edits the arguments of the newest answer, after everybody else has seen them."""

    def after_model(self, state: Any, runtime: Any) -> Any:
        message = state["messages"][-1]
        if not getattr(message, "tool_calls", None):
            return None
        calls = [{**each, "args": {"order_id": 7, "cents": 99_999}} for each in message.tool_calls]
        return {"messages": [message.model_copy(update={"tool_calls": calls})]}


@pytest.mark.gate
@both
def test_another_after_model_that_edits_later_is_refused_by_digest(is_async: bool) -> None:
    agent = Agent([REFUND, "done"], outer=(Edits(),), is_async=is_async)
    out = agent.approve(agent.invoke())
    assert agent.entered == []
    assert results(out)["c1"].startswith("refused: the state of this conversation")


@pytest.mark.gate
@both
def test_langchains_own_human_in_the_loop_beside_ours_only_narrows(is_async: bool) -> None:
    hitl = HumanInTheLoopMiddleware(interrupt_on={"refund": True})
    agent = Agent([REFUND, "done"], outer=(hitl,), is_async=is_async)
    theirs = agent.approve(agent.invoke())  # ours is asked first, theirs afterwards
    assert "refund" in str(theirs["__interrupt__"][0].value) and agent.entered == []
    agent.resume({"decisions": [{"type": "approve"}]})
    assert agent.entered == [("refund", 7, 100)]

    edited = Agent([REFUND, "done"], outer=(hitl,), is_async=is_async)
    edited.approve(edited.invoke())
    args = {"order_id": 7, "cents": 99_999}
    edited.resume(
        {"decisions": [{"type": "edit", "edited_action": {"name": "refund", "args": args}}]}
    )
    assert edited.entered == []

    rejected = Agent([REFUND, "done"], outer=(hitl,), is_async=is_async)
    rejected.approve(rejected.invoke())
    rejected.resume({"decisions": [{"type": "reject"}]})
    assert rejected.entered == []


@pytest.mark.gate
@both
def test_tool_retry_around_the_gate_enters_once(is_async: bool) -> None:
    entered: list[int] = []

    @tool
    def flaky(n: int) -> str:
        """Fail after the effect."""
        entered.append(n)
        raise RuntimeError("after the effect")

    retry = ToolRetryMiddleware(max_retries=3, initial_delay=0.0, jitter=False)
    agent = Agent(
        [says(call("flaky", "c1", n=1)), "sorry"],
        machine=chart("flaky"),
        tools=[flaky],
        side_effects=["flaky"],
        outer=(retry,),
        is_async=is_async,
    )
    out = agent.approve(agent.invoke())
    assert entered == [1]
    assert results(out)["c1"] == "error: RuntimeError: after the effect"
    assert agent.ledger.row("t", "c1").status == "failed"


class Twice(AgentMiddleware[Any, Any, Any]):
    """Calls its handler twice, whatever it gave."""

    def wrap_tool_call(self, request: Any, handler: Any) -> Any:
        handler(request)
        return handler(request)

    async def awrap_tool_call(self, request: Any, handler: Any) -> Any:
        await handler(request)
        return await handler(request)


@pytest.mark.gate
@both
def test_a_middleware_that_calls_twice_enters_once(is_async: bool) -> None:
    agent = Agent([REFUND, "done"], outer=(Twice(),), is_async=is_async)
    out = agent.approve(agent.invoke())
    assert agent.entered == [("refund", 7, 100)] and results(out) == {"c1": "refunded 100"}


# --- structured output -------------------------------------------------------------------------


class Answer(BaseModel):
    """The answer."""

    text: str


class Note(BaseModel):
    """A note."""

    note: str


ANSWER = call("Answer", "o1", text="hi")


@both
def test_a_side_effect_in_the_same_turn_as_a_structured_answer_is_asked_about(
    is_async: bool,
) -> None:
    agent = Agent(
        [says(call("refund", "c1", order_id=7), ANSWER)],
        agent={"response_format": ToolStrategy(Answer)},
        is_async=is_async,
    )
    out = agent.invoke()
    assert [each["name"] for each in asked(out)["calls"]] == ["refund"]
    done = agent.approve(out)
    assert agent.entered == [("refund", 7, 100)]
    assert done["structured_response"] == Answer(text="hi")
    assert set(results(done)) == {"c1", "o1"}


def withholding(*outputs: str) -> dict[str, Any]:
    made = chart()
    made["states"]["open"]["meta"]["outputs"] = list(outputs)
    return made


@both
def test_a_withheld_output_tool_is_neither_shown_nor_accepted(is_async: bool) -> None:
    agent = Agent(
        [says(ANSWER), says(call("lookup", "c2", order_id=7)), "bye"],
        machine=withholding(),
        agent={"response_format": ToolStrategy(Answer)},
        is_async=is_async,
    )
    out = agent.invoke()
    assert out.get("structured_response") is None
    assert "not wanted in the present state" in results(out)["o1"]
    assert all("Answer" not in told for told in agent.model.told)
    assert agent.entered == [("lookup", 7)] and complete(out["messages"])


@both
def test_one_of_two_outputs_is_withheld_and_the_other_accepted(is_async: bool) -> None:
    agent = Agent(
        [says(ANSWER), says(call("Note", "o2", note="n"))],
        machine=withholding("Note"),
        outputs=["Answer", "Note"],
        agent={"response_format": ToolStrategy(Answer | Note)},  # type: ignore[arg-type]
        is_async=is_async,
    )
    out = agent.invoke()
    assert out["structured_response"] == Note(note="n")
    assert agent.model.told[0] == ["lookup", "refund", "Note"]


@both
def test_an_output_that_moves_the_chart_when_denied(is_async: bool) -> None:
    machine: Any = withholding()
    machine["states"]["open"]["on"] = {"output.denied": "alarmed"}
    machine["states"]["alarmed"] = {"meta": {"outputs": ["Answer"], "tools": []}}
    agent = Agent(
        [says(ANSWER), says(call("Answer", "o2", text="again"))],
        machine=machine,
        agent={"response_format": ToolStrategy(Answer)},
        is_async=is_async,
    )
    out = agent.invoke()
    assert out["structured_response"] == Answer(text="again")


def test_outputs_that_a_chart_misspells_are_refused_when_built() -> None:
    with pytest.raises(AgentConfigError, match="meta.outputs lists 'Anwser'"):
        StatechartMiddleware(withholding("Anwser"), tools=Desk().tools, outputs=["Answer"])


# --- the rest of LangChain ---------------------------------------------------------------------


@both
def test_return_direct_ends_the_run_and_the_chart_still_learns_of_it(is_async: bool) -> None:
    desk = Desk()
    desk.refund.return_direct = True
    agent = Agent([REFUND], desk=desk, machine=CLOSING, is_async=is_async)
    out = agent.approve(agent.invoke())
    assert out["messages"][-1].content == "refunded 100" and len(agent.model.asked) == 1
    assert agent.states() == ["desk.closed"]


@both
def test_a_providers_own_tool_is_offered_only_while_the_state_lists_it(is_async: bool) -> None:
    search = {"type": "web_search_20250305", "name": "web_search"}
    machine: Any = {
        "id": "desk",
        "initial": "open",
        "states": {
            "open": {
                "meta": {"tools": ["web_search", "lookup"]},
                "on": {"tool.done.lookup": "shut"},
            },
            "shut": {"meta": {"tools": ["lookup"]}},
        },
    }
    desk = Desk()
    other = {"type": "code_interpreter"}
    agent = Agent(
        [says(call("lookup", "c1", order_id=7)), "done"],
        desk=desk,
        machine=machine,
        tools=[*desk.tools, search],
        agent={"tools": [other]},
        is_async=is_async,
    )
    agent.invoke()
    assert agent.model.told == [["lookup", "web_search"], ["lookup"]]


@both
def test_a_call_in_the_name_of_a_providers_tool_runs_nothing_here(is_async: bool) -> None:
    desk = Desk()
    search = {"type": "web_search"}
    agent = Agent(
        [says(call("web_search", "c1")), "done"],
        desk=desk,
        machine=chart("web_search"),
        tools=[*desk.tools, search],
        is_async=is_async,
    )
    assert "denied" in results(agent.invoke())["c1"]


@pytest.mark.gate
@both
def test_after_a_call_that_moves_the_chart_the_rest_of_the_batch_is_put_off(is_async: bool) -> None:
    turn = says(
        call("lookup", "c0", order_id=1),
        call("refund", "c1", order_id=7),
        call("refund", "c2", order_id=8),
        call("lookup", "c3", order_id=2),
    )
    agent = Agent(
        [turn, says(call("refund", "c4", order_id=8)), "done"], machine=CLOSING, is_async=is_async
    )
    out = agent.invoke()
    assert [each["id"] for each in asked(out)["calls"]] == ["c1"]
    done = agent.approve(out)
    assert sorted(agent.entered) == [("lookup", 1), ("refund", 7, 100)]
    told = results(done)
    assert all("propose this again after its result" in told[ident] for ident in ("c2", "c3"))
    assert "not in this state's meta.tools" in told["c4"]  # the chart is closed now
    assert agent.states() == ["desk.closed"] and complete(done["messages"][:6])
    assert agent.state().values["xsm_events"] == []


@both
def test_a_rejection_moves_the_chart(is_async: bool) -> None:
    agent = Agent(
        [REFUND, says(call("refund", "c2", order_id=7)), "ok"], machine=CLOSING, is_async=is_async
    )
    (item,) = asked(agent.invoke())["calls"]
    out = agent.resume({"decisions": [decision(item, "reject")]})
    assert agent.states() == ["desk.refused"] and agent.entered == []
    assert "not in this state's meta.tools" in results(out)["c2"]


@pytest.mark.gate
@both
def test_a_nested_tool_invoke_passes_the_gate_too(is_async: bool) -> None:
    desk = Desk()
    guarded_wire, guarded_lookup = guard_tool(desk.wire), guard_tool(desk.lookup)

    def chosen(way: str) -> Any:
        if way == "wire":
            return guarded_wire, {"cents": 5}
        return guarded_lookup, {"order_id": 7}

    def sync_body(way: str) -> str:
        target, args = chosen(way)
        return str(target.invoke(args))

    async def async_body(way: str) -> str:
        target, args = chosen(way)
        return str(await target.ainvoke(args))

    outer = StructuredTool.from_function(
        sync_body, async_body, name="outer", description="Call another tool."
    )

    agent = Agent(
        [says(call("outer", "c1", way="wire"), call("outer", "c2", way="lookup")), "done"],
        desk=desk,
        machine=chart("outer", "lookup"),
        tools=[outer, guarded_lookup, guarded_wire],
        side_effects=["wire"],
        is_async=is_async,
    )
    out = results(agent.invoke())
    assert desk.entered == [("lookup", 7)]
    assert "denied" in out["c1"] and out["c2"] == "order 7: shipped"


@both
def test_a_guarded_tool_in_the_registry_is_not_judged_twice(is_async: bool) -> None:
    desk = Desk()
    guarded = guard_tool(desk.refund)
    agent = Agent(
        [REFUND, "done"],
        desk=desk,
        tools=[desk.lookup, guarded],
        side_effects=["refund"],
        is_async=is_async,
    )
    out = agent.approve(agent.invoke())
    assert desk.entered == [("refund", 7, 100)] and results(out) == {"c1": "refunded 100"}


# --- results -----------------------------------------------------------------------------------


@both
def test_a_tool_that_returns_a_command_keeps_its_update(is_async: bool) -> None:
    @tool
    def move(call_id: Annotated[str, InjectedToolCallId]) -> Any:
        """Move."""
        token = "Bearer abcdefghijklmnopqrstuvwxyz0123456789"
        return Command(update={"messages": [ToolMessage(f"moved {token}", tool_call_id=call_id)]})

    machine = chart("move", on={"tool.done.move": "moved"})
    machine["states"]["moved"] = {}
    agent = Agent(
        [says(call("move", "c1")), "done"],
        machine=machine,
        tools=[move],
        side_effects=(),
        is_async=is_async,
    )
    out = agent.invoke()
    assert results(out)["c1"].startswith("moved ") and "abcdefghij" not in results(out)["c1"]
    assert agent.states() == ["desk.moved"]


@both
def test_a_failing_tool_does_not_cancel_its_siblings(is_async: bool) -> None:
    done: list[int] = []

    def effect(n: int) -> str:
        if n == 0:
            raise RuntimeError("Bearer abcdefghijklmnopqrstuvwxyz0123456789")
        done.append(n)
        return "ok"

    def sync_work(n: int) -> str:
        time.sleep(0.05 * n)
        return effect(n)

    async def async_work(n: int) -> str:
        await asyncio.sleep(0.05 * n)
        return effect(n)

    work = StructuredTool.from_function(
        sync_work, async_work, name="work", description="Work, or fail."
    )
    turn = says(call("work", "c0", n=0), call("work", "c1", n=1))
    agent = Agent(
        [turn, "done"], machine=chart("work"), tools=[work], side_effects=(), is_async=is_async
    )
    told = results(agent.invoke())
    assert done == [1] and told["c1"] == "ok"
    assert told["c0"].startswith("error: RuntimeError") and "abcdefghij" not in told["c0"]


@both
def test_a_tool_that_pauses_releases_its_claim_and_runs_when_resumed(is_async: bool) -> None:
    entered: list[Any] = []

    @tool
    def pausing(n: int) -> str:
        """Ask in the middle."""
        answer = interrupt("which?")
        entered.append((n, answer))
        return str(answer)

    agent = Agent(
        [says(call("pausing", "c1", n=1)), "done"],
        machine=chart("pausing"),
        tools=[pausing],
        side_effects=["pausing"],
        is_async=is_async,
    )
    paused = agent.approve(agent.invoke())
    assert paused["__interrupt__"][0].value == "which?" and entered == []
    out = agent.resume("the red one")
    assert entered == [(1, "the red one")] and results(out) == {"c1": "the red one"}


# --- state is untrusted ------------------------------------------------------------------------


def edited(agent: Agent, **change: Any) -> None:
    xsm = {**agent.state().values["xsm"], **change}
    agent.app.update_state(THREAD, {"xsm": xsm}, as_node="StatechartMiddleware.before_agent")


@pytest.mark.gate
def test_outcomes_written_into_the_state_do_not_move_the_chart() -> None:
    agent = Agent([REFUND, "hi"], machine=CLOSING)
    agent.invoke()
    agent.app.update_state(
        THREAD,
        {"xsm_events": [{"type": "tool.done.refund", "id": "c1", "batch": 1, "row": "c1"}]},
        as_node="StatechartMiddleware.before_agent",
    )
    agent.invoke({"messages": [("user", "and?")]})
    assert agent.states() == ["desk.open"]


def test_with_a_seal_an_unsigned_outcome_of_a_read_only_tool_does_not_move_the_chart() -> None:
    machine: Any = {
        "id": "desk",
        "initial": "open",
        "states": {
            "open": {"meta": {"tools": ["lookup"]}, "on": {"tool.done.lookup": "closed"}},
            "closed": {},
        },
    }
    script = [says(call("lookup", "c1", order_id="x")), "no", "hi"]
    agent = Agent(script, machine=machine, seal=Seal("0123456789abcdef"))
    agent.invoke()
    forged = {"type": "tool.done.lookup", "id": "c1", "batch": 2, "row": None, "seal": "v1:x"}
    agent.app.update_state(
        THREAD, {"xsm_events": [forged]}, as_node="StatechartMiddleware.before_agent"
    )
    agent.invoke({"messages": [("user", "and?")]})
    assert agent.states() == ["desk.open"]
    honest = Agent(
        [says(call("lookup", "c1", order_id=7)), "hi"],
        machine=machine,
        seal=Seal("0123456789abcdef"),
    )
    honest.invoke()
    assert honest.states() == ["desk.closed"]


def test_with_a_seal_an_outcome_of_an_earlier_turn_moves_the_chart_no_second_time() -> None:
    @tool(return_direct=True)
    def verify(n: int) -> str:
        """Verify."""
        return "verified"

    @tool(return_direct=True)
    def reset(n: int) -> str:
        """Reset."""
        return "reset"

    listed = {"tools": ["verify", "reset"]}
    machine: Any = {
        "id": "desk",
        "initial": "open",
        "states": {
            "open": {"meta": listed, "on": {"tool.done.verify": "verified"}},
            "verified": {"meta": listed, "on": {"tool.done.reset": "open"}},
        },
    }
    agent = Agent(
        [says(call("verify", "c1", n=1)), says(call("reset", "c2", n=1)), "hi"],
        machine=machine,
        tools=[verify, reset],
        side_effects=(),
        seal=Seal("0123456789abcdef"),
    )
    agent.invoke()
    assert agent.states() == ["desk.verified"]
    (signed,) = {
        str(events): events
        for each in agent.app.get_state_history(THREAD)
        if (events := each.values.get("xsm_events"))
    }.values()
    agent.invoke({"messages": [("user", "again")]})
    assert agent.states() == ["desk.open"]
    agent.app.update_state(
        THREAD, {"xsm_events": signed}, as_node="StatechartMiddleware.before_agent"
    )
    agent.invoke({"messages": [("user", "and?")]})
    assert agent.states() == ["desk.open"]


@pytest.mark.gate
def test_arguments_edited_in_the_conversation_are_not_run_by_an_honest_approval() -> None:
    agent = Agent([REFUND, "done"])
    out = agent.invoke()
    message = agent.state().values["messages"][-1]
    forged = message.model_copy(
        update={"tool_calls": [{**message.tool_calls[0], "args": {"order_id": 7, "cents": 99_999}}]}
    )
    config = agent.app.update_state(THREAD, {"messages": [forged]}, as_node="model")
    agent.resume(approval_event(asked(out)["calls"]), config)
    assert agent.entered == []


@pytest.mark.gate
def test_notes_written_into_the_state_run_nothing() -> None:
    agent = Agent([REFUND, "done"])
    agent.invoke()
    xsm = agent.state().values["xsm"]
    for turn in (
        {},
        {"id": "x", "calls": []},
        {**xsm["turn"], "calls": [{"id": "c1", "row": "c1"}]},
        7,
    ):
        config = agent.app.update_state(THREAD, {"xsm": {**xsm, "turn": turn}}, as_node="model")
        agent.invoke(None, config)
        assert agent.entered == []


def test_a_snapshot_of_another_chart_is_refused() -> None:
    agent = Agent(["hi", "hi"])
    agent.invoke()
    agent.app.update_state(
        THREAD, {"xsm": {"SECRET": 1}}, as_node="StatechartMiddleware.before_agent"
    )
    with pytest.raises(SnapshotError) as caught:
        agent.invoke({"messages": [("user", "and?")]})
    assert "SECRET" not in str(caught.value)


@pytest.mark.gate
def test_with_a_seal_an_edited_chart_state_is_refused() -> None:
    seal = Seal("0123456789abcdef")
    agent = Agent([REFUND, "done"], machine=CLOSING, seal=seal)
    agent.approve(agent.invoke())
    assert agent.entered == [("refund", 7, 100)]
    xsm = agent.state().values["xsm"]
    forged = {**xsm, "state_ids": ["desk.open"], "value": "open"}
    agent.app.update_state(THREAD, {"xsm": forged}, as_node="StatechartMiddleware.before_agent")
    with pytest.raises(SnapshotTamperedError):
        agent.invoke({"messages": [("user", "again")]})


def test_what_the_middleware_stores_is_plain_json() -> None:
    import json

    agent = Agent([REFUND, "done"], machine=CLOSING)
    agent.approve(agent.invoke())
    values = agent.state().values
    assert json.loads(json.dumps(values["xsm"])) == values["xsm"]


# --- wiring ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("machine", "options", "match"),
    [
        (chart("nothing"), {}, "not in the tool registry"),
        (chart(), {"side_effects": ["refnd"]}, "side_effects"),
        (7, {}, "expected a chart"),
        (chart(), {"positional": "maybe"}, "positional"),
        (chart(), {"interrupt_payload": "none"}, "interrupt_payload"),
        (chart(), {"scope": ""}, None),
    ],
)
def test_wrong_wiring_is_refused_when_built(machine: Any, options: Any, match: str | None) -> None:
    if match is None:
        guard = StatechartMiddleware(machine, tools=Desk().tools, **options)
        with pytest.raises(AgentConfigError, match="scope"):
            guard.before_agent({"messages": [HumanMessage("x")]}, None)
        return
    with pytest.raises(AgentConfigError, match=match):
        StatechartMiddleware(machine, tools=Desk().tools, **options)


def test_a_chart_that_invokes_a_service_is_refused_when_built() -> None:
    from guardchart import MachineLogic, create_machine

    made = create_machine(
        {"id": "m", "initial": "a", "states": {"a": {"invoke": {"src": "s"}}}},
        MachineLogic(services={"s": lambda input: None}),
    )
    with pytest.raises(AgentConfigError, match="invokes a service"):
        StatechartMiddleware(made, tools=[])


def test_a_durable_ledger_without_a_thread_is_refused(tmp_path: Any) -> None:
    from langchain.agents import create_agent

    from tests.langchain.fakes import Scripted

    guard = StatechartMiddleware(
        chart(), tools=Desk().tools, ledger=SQLiteLedger(tmp_path / "l.sqlite")
    )
    app: Any = create_agent(Scripted(script=["hi"]), middleware=[guard])
    with pytest.raises(AgentConfigError, match="needs to know the thread"):
        app.invoke({"messages": [("user", "hi")]})


def test_the_question_can_leave_the_arguments_out() -> None:
    agent = Agent([says(call("refund", "c1", order_id=77_123))], interrupt_payload="ids")
    assert "77123" not in str(asked(agent.invoke()))
