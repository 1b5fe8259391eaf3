"""A session whose door files call by call, on a chart that it shares or that runs by itself."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from guardchart import Interpreter, SyncInterpreter, create_machine
from guardchart.errors import AgentConfigError, NotSupportedError, ToolDeniedError
from guardchart.gate import GuardSession, ToolCall, approval_event, tool, tool_registry
from guardchart.persistence import InMemoryLedger, SQLiteLedger

CHART: dict[str, Any] = {
    "id": "desk",
    "initial": "open",
    "states": {
        "open": {
            "meta": {"tools": ["look_up", "refund", "close"], "hint": "be kind"},
            "on": {"tool.done.close": "closed", "HUMAN_APPROVED": {}},
        },
        "closed": {"meta": {"tools": ["look_up"]}},
    },
}


def look_up(order: int) -> str:
    return f"order {order}"


def refund(order: int, cents: int = 100) -> str:
    return f"refunded {cents}"


def close() -> str:
    return "closed"


REGISTRY = tool_registry(look_up, tool(refund, side_effect=True), close)


def base(**options: Any) -> GuardSession:
    options.setdefault("ledger", InMemoryLedger())
    return GuardSession(create_machine(CHART), REGISTRY, **options)


def opened(session: GuardSession, *calls: ToolCall, fresh: bool = True, run: str = "r") -> None:
    session.open(calls, run=run, batch_no=1, fresh=fresh)


REFUND = ToolCall("c1", "refund", {"order": 7})


def test_conversations_share_the_chart_and_keep_their_own_rows() -> None:
    desk = base()
    a, b = desk.conversation("a"), desk.conversation("b")
    for each in (a, b):
        opened(each, REFUND)
        assert each.file(REFUND).status == "ask"
    assert {row.slot.scope for row in desk.ledger.pending()} == {"a", "b"}
    a.send("tool.done.close")
    assert b.snapshot.state_ids == {"desk.closed"} and desk.snapshot is b.snapshot


def test_a_call_is_filed_with_the_arguments_it_is_about_to_run_with() -> None:
    session = base().conversation("a")
    opened(session, ToolCall("c1", "refund", {"order": 1}))
    item = session.file(ToolCall("c1", "refund", {"order": 7, "cents": 5}))
    assert item.row.arguments == {"order": 7, "cents": 5}


@pytest.mark.gate
def test_a_call_that_comes_again_with_other_arguments_is_refused() -> None:
    session = base().conversation("a")
    opened(session, REFUND)
    session.file(REFUND)
    other = ToolCall("c1", "refund", {"order": 8})
    item = session.file(other)
    assert item.status == "denied" and "differs" in item.verdict.reason


def test_the_same_call_filed_again_meets_its_row() -> None:
    session = base().conversation("a")
    opened(session, REFUND)
    first = session.file(REFUND)
    opened(session, REFUND, fresh=False)
    assert session.file(REFUND).row == first.row
    opened(session, ToolCall("c9", "refund", {"order": 7}))
    assert session.file(ToolCall("c9", "refund", {"order": 7})).row.id == "c1"


def test_equal_calls_of_one_turn_have_rows_of_their_own() -> None:
    session = base().conversation("a")
    second = ToolCall("c2", "refund", {"order": 7})
    opened(session, REFUND, second)
    session.file(REFUND)
    session.resume([(session.ledger.row("a", "c1"), "c1")])
    session.decide(approval_event(session.pending()))
    opened(session, REFUND, second, fresh=False)
    assert session.file(REFUND).status == "run"
    item = session.file(second)
    assert item.status == "ask" and item.row.slot.ordinal == 1


def test_what_follows_a_waiting_call_is_held_without_a_row() -> None:
    session = base().conversation("a")
    closing = ToolCall("c2", "close")
    opened(session, REFUND, closing, ToolCall("c3", "look_up", {"order": 1}))
    session.file(REFUND)
    assert session.file(closing).status == "held"
    assert session.file(ToolCall("c3", "look_up", {"order": 1})).status == "run"


def test_a_replayed_session_holds_what_follows_a_call_that_another_process_filed() -> None:
    ledger = InMemoryLedger()
    closing = ToolCall("c2", "close")
    first = base(ledger=ledger).conversation("a")
    opened(first, REFUND, closing)
    first.file(REFUND)
    replayed = base(ledger=ledger).conversation("a")
    opened(replayed, REFUND, closing)
    assert replayed.file(closing).status == "held"


def test_a_stored_side_effect_without_a_row_is_asked_about() -> None:
    session = base().conversation("a")
    opened(session, REFUND, fresh=False)
    assert session.file(REFUND).status == "ask"


@pytest.mark.gate
def test_turn_rules_hold_for_calls_that_are_filed_one_by_one() -> None:
    session = base(max_tool_calls=2).conversation("a")
    calls = [ToolCall(f"c{n}", "look_up", {"order": n}) for n in range(3)]
    opened(session, *calls)
    assert [session.file(each).status for each in calls] == ["denied"] * 3
    opened(session, calls[0], run="later")
    assert "already used" in session.file(calls[0]).verdict.reason


async def test_a_call_that_was_filed_is_performed_and_the_chart_told_by_leave() -> None:
    session = base().conversation("a")
    call = ToolCall("c1", "close")
    opened(session, call)
    assert session.file(call).status == "run"
    outcome = await session.aperform(call)
    assert outcome.text == "closed" and session.snapshot.state_ids == {"desk.open"}
    session.leave(call, outcome)
    assert session.snapshot.state_ids == {"desk.closed"}


def test_a_nested_call_has_its_place_below_the_call_that_makes_it() -> None:
    session = base().conversation("a")
    outer = ToolCall("c1", "look_up", {"order": 1})
    opened(session, outer)
    first = session.file(ToolCall("x", "refund", {"order": 7}), within="c1", ordinal=0)
    again = session.file(ToolCall("y", "refund", {"order": 7}), within="c1", ordinal=0)
    other = session.file(ToolCall("z", "refund", {"order": 7}), within="c1", ordinal=1)
    assert again.row.id == first.row.id and other.status == "held"


def test_a_session_without_a_registry_takes_its_tools_later() -> None:
    session = GuardSession(create_machine(CHART), ledger=InMemoryLedger()).conversation("a")
    opened(session, REFUND)
    assert session.file(REFUND).status == "denied"
    session.registry = REGISTRY
    assert session.file(REFUND).status == "ask"


def test_a_durable_ledger_needs_no_scope_where_conversations_bring_theirs(tmp_path: Any) -> None:
    ledger = SQLiteLedger(tmp_path / "ledger.db")
    with pytest.raises(AgentConfigError, match="scope"):
        GuardSession(create_machine(CHART), REGISTRY, ledger)
    session = GuardSession(create_machine(CHART), ledger=ledger).conversation("a")
    assert session.host.scope == "a"


def test_meta_of_the_active_state_is_read_from_the_nearest_that_has_it() -> None:
    session = base()
    assert session.meta("hint") == ["be kind"] and session.meta("other") == []
    session.send("tool.done.close")
    assert session.meta("hint") == []


@pytest.mark.parametrize(
    ("left", "right", "wanted"),
    [
        (None, None, ["text", "Refund", "other"]),
        (["text", "Refund"], None, ["text", "Refund"]),
        (["text", "Refund"], ["Refund", "other"], ["Refund"]),
        ("*", ["*"], ["text", "Refund", "other"]),
        (True, ["text"], ["text"]),
        ([], None, []),
        (False, None, []),
        ("text", None, []),
        ([{"name": "text"}, ["Refund"], "other"], None, ["other"]),
    ],
)
def test_an_answer_is_wanted_where_every_region_that_names_answers_names_it(
    left: Any, right: Any, wanted: list[str]
) -> None:
    def region(outputs: Any) -> dict[str, Any]:
        inner = {} if outputs is None else {"meta": {"outputs": outputs}}
        return {"initial": "a", "states": {"a": inner}}

    chart = {"id": "m", "type": "parallel", "states": {"l": region(left), "r": region(right)}}
    session = GuardSession(create_machine(chart))
    assert [each for each in ("text", "Refund", "other") if session.wants(each)] == wanted
    assert session.wants("nobody's", "Refund") is ("Refund" in wanted)


def test_a_sync_interpreter_is_asked_and_told() -> None:
    interpreter = SyncInterpreter(create_machine(CHART)).start()
    session = GuardSession(interpreter, REGISTRY, InMemoryLedger(), "a")
    call = ToolCall("c1", "close")
    session.open([call], run="r", batch_no=1, fresh=True)
    assert session.run(call).ok
    assert interpreter.current_state_ids == {"desk.closed"}
    assert "close" not in session.allowed()
    interpreter.stop()
    assert "look_up" not in session.allowed()


async def test_an_interpreter_of_another_threads_loop_is_asked_and_told() -> None:
    import asyncio

    interpreter = await Interpreter(create_machine(CHART)).start()
    session = GuardSession(interpreter, REGISTRY, InMemoryLedger(), "a")
    done: list[Any] = []

    def work() -> None:
        done.append(session.send("tool.done.close").status)

    thread = threading.Thread(target=work)
    thread.start()
    while thread.is_alive():
        await asyncio.sleep(0.01)
    thread.join()
    assert done == ["taken"] and interpreter.current_state_ids == {"desk.closed"}
    interpreter.stop()


def test_a_chart_with_services_is_pointed_to_an_interpreter() -> None:
    from guardchart import MachineLogic

    machine = create_machine(
        {"id": "m", "initial": "a", "states": {"a": {"invoke": {"src": "s"}}}},
        MachineLogic(services={"s": lambda value: None}),
    )
    with pytest.raises(NotSupportedError, match="interpreter"):
        GuardSession(machine, REGISTRY)


def test_an_approval_that_was_not_used_can_be_taken_back() -> None:
    session = base(scope="a")
    session.propose([REFUND])
    session.decide(approval_event(session.pending()))
    session.decide({"type": "HUMAN_REJECTED", "reason": "no"})
    assert session.run(REFUND).status == "rejected"
    with pytest.raises(ToolDeniedError):
        session.enter(ToolCall("c2", "wipe"))


async def test_a_chart_is_told_once_how_a_filed_call_ended() -> None:
    session = base().conversation("a")
    call = ToolCall("c1", "refund", {"order": 7})
    opened(session, call)
    session.file(call)
    session.decide(approval_event(session.pending()))
    outcome = await session.aperform(call)
    assert session.leave(call, outcome) is None  # no state names it, and it counts as told
    again = base(ledger=session.ledger).conversation("a")
    opened(again, call, fresh=False)
    assert again.file(call).status == "answered"
