from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from guardchart.errors import AgentConfigError, NotSupportedError, ToolDeniedError
from guardchart.gate import (
    Answer,
    AuthorisedCall,
    DecisionRefused,
    GuardSession,
    ToolCall,
    approval_event,
    decisions_event,
    run_authorised,
    tool,
    tool_registry,
)
from guardchart.kernel import create_machine, dump, load
from guardchart.persistence import InMemoryLedger, SQLiteLedger

entered: list[Any] = []


@pytest.fixture(autouse=True)
def _fresh() -> None:
    entered.clear()


def look_up(order: int) -> str:
    entered.append(("look_up", order))
    return f"order {order}"


def refund(order: int, cents: int = 100) -> str:
    entered.append(("refund", order, cents))
    return f"refunded {cents}"


def note(text: str) -> str:
    entered.append(("note", text))
    return "noted"


REGISTRY = tool_registry(tool(look_up, trusted=True), tool(refund, side_effect=True), tool(note))
CHART: dict[str, Any] = {
    "id": "policy",
    "initial": "triage",
    "context": {"result": None, "denied": 0},
    "states": {
        "triage": {
            "meta": {"tools": ["look_up", "note"]},
            "on": {"tool.done.look_up": {"target": "paying"}},
        },
        "paying": {
            "meta": {"tools": ["refund", "look_up", "note"]},
            "on": {"tool.done.refund": {"target": "closed"}, "tool.rejected.refund": "triage"},
        },
        "closed": {"meta": {"tools": []}},
    },
}
LOOK = ToolCall("l1", "look_up", {"order": 7})
REFUND = ToolCall("r1", "refund", {"order": 7})


class Clock:
    def __init__(self) -> None:
        self.at = 1_000_000

    def __call__(self) -> int:
        return self.at


def session(chart: Any = CHART, **more: Any) -> GuardSession:
    more.setdefault("ledger", InMemoryLedger())
    more.setdefault("scope", "t1")
    return GuardSession(create_machine(chart), REGISTRY, **more)


def in_paying(**more: Any) -> GuardSession:
    made = session(**more)
    made.propose([LOOK])
    assert made.run(LOOK).ok
    return made


def state(made: GuardSession) -> set[str]:
    return {ident.partition(".")[2] for ident in made.snapshot.state_ids}


def test_a_conversation_moves_the_chart_and_enters_each_tool_once() -> None:
    made = session()
    assert made.allowed().names(REGISTRY) == ("look_up", "note")
    assert [s["name"] for s in made.schemas()] == ["look_up", "note"]
    (item,) = made.propose([LOOK])
    assert item.status == "run"
    assert made.run(LOOK).text == "order 7"
    assert state(made) == {"paying"}
    (item,) = made.propose([REFUND])
    assert item.status == "ask"
    (shown,) = made.pending()
    assert shown["arguments"] == {"order": 7, "cents": 100}
    assert made.run(REFUND).status == "denied"
    made.decide(approval_event(made.pending(), by="ann"))
    assert made.run(REFUND).text == "refunded 100"
    assert state(made) == {"closed"}
    assert made.run(REFUND).text == "refunded 100"
    assert entered == [("look_up", 7), ("refund", 7, 100)]


def test_an_unlisted_call_is_denied_before_anybody_is_asked() -> None:
    made = session()
    (item,) = made.propose([REFUND])
    assert item.status == "denied"
    assert item.text.startswith("error: tool 'refund' denied: not in this state's meta.tools")
    assert made.pending() == []
    assert made.ledger.pending() == []
    assert made.run(REFUND).status == "denied"
    assert entered == []


def test_a_denial_is_an_event_of_the_chart() -> None:
    chart = {
        "id": "p",
        "initial": "a",
        "states": {"a": {"meta": {"tools": []}, "on": {"tool.denied.refund": "b"}}, "b": {}},
    }
    made = session(chart)
    made.propose([REFUND])
    assert state(made) == {"b"}


def test_enter_and_leave_serve_a_door_that_runs_the_body_itself() -> None:
    made = session()
    made.propose([LOOK])
    got = made.enter(LOOK)
    assert isinstance(got, AuthorisedCall)
    outcome = run_authorised(got, body=lambda arguments: f"mine {arguments['order']}")
    made.leave(LOOK, outcome)
    assert outcome.text == "mine 7"
    assert state(made) == {"paying"}


def test_a_call_is_checked_in_the_state_as_it_is_at_its_entry() -> None:
    made = in_paying()
    made.propose([REFUND])
    made.decide(approval_event(made.pending()))
    made.send("tool.rejected.refund", id="x", reason="")
    assert state(made) == {"triage"}
    with pytest.raises(ToolDeniedError, match="allow-list"):
        made.enter(REFUND)
    assert entered == [("look_up", 7)]


def test_what_was_not_proposed_cannot_be_entered() -> None:
    made = in_paying()
    with pytest.raises(ToolDeniedError, match="human approval"):
        made.enter(REFUND)


def test_calls_after_one_that_waits_are_held_and_run_after_it() -> None:
    made = in_paying()
    second = ToolCall("r2", "refund", {"order": 8})
    reader = ToolCall("n1", "note", {"text": "x"})
    mover = ToolCall("l2", "look_up", {"order": 9})
    made.propose([REFUND, second, reader, mover])
    assert [i.status for i in made.turn()] == [
        "ask",
        "ask",
        "run",
        "held" if made.moves_chart("look_up") else "run",
    ]
    assert made.run(mover).text.startswith("not run: held")
    with pytest.raises(ToolDeniedError, match="held"):
        made.enter(mover)
    assert made.run(reader).ok
    made.decide(approval_event(made.pending()))
    assert [i.status for i in made.turn()] == ["run"] * 4
    assert made.run(mover).ok


def test_tools_that_move_the_chart_are_known_at_build_time() -> None:
    made = session()
    assert made.moves_chart("look_up")
    assert made.moves_chart("refund")
    assert not made.moves_chart("note")
    wild = session({"id": "w", "initial": "a", "states": {"a": {"on": {"tool.*": "b"}}, "b": {}}})
    assert wild.moves_chart("note")


def test_calls_are_decided_one_by_one_and_a_rejection_is_an_event() -> None:
    made = in_paying()
    second = ToolCall("r2", "refund", {"order": 8, "cents": 5})
    made.propose([REFUND, second])
    made.decide(
        decisions_event(
            [
                {"id": "r1", "decision": "edit", "arguments": {"order": 7, "cents": 50}},
                {"id": "r2", "decision": "approve"},
            ],
            by="ann",
        )
    )
    assert made.run(REFUND).text.endswith("refunded 50")
    assert state(made) == {"closed"}


def test_a_rejection_closes_the_call_and_moves_the_chart() -> None:
    made = in_paying()
    made.propose([REFUND])
    rows = made.decide({"type": "HUMAN_REJECTED", "reason": "no"})
    assert rows["r1"].status == "rejected"
    assert state(made) == {"triage"}
    assert made.run(REFUND).text == "not run: rejected by a reviewer: no"
    assert entered == [("look_up", 7)]


@pytest.mark.parametrize(
    "arguments", [{"order": "7"}, {"order": 7, "zz": 1}, {}, {"order": 7, "cents": None}]
)
def test_an_edit_is_judged_like_any_call(arguments: Any) -> None:
    made = in_paying()
    made.propose([REFUND])
    before = dump(made.snapshot)
    with pytest.raises(DecisionRefused, match="the edited call is refused"):
        made.decide([{"id": "r1", "decision": "edit", "arguments": arguments}])
    assert dump(made.snapshot) == before
    assert made.ledger.row("t1", "r1").status == "proposed"


def test_a_second_approval_is_refused_and_adds_nothing() -> None:
    made = in_paying()
    made.propose([REFUND])
    event = approval_event(made.pending())
    made.decide(event)
    made.run(REFUND)
    with pytest.raises(DecisionRefused):
        made.decide(event)
    made.run(REFUND)
    assert len(entered) == 2


def test_a_late_decision_is_refused() -> None:
    clock = Clock()
    made = in_paying(now=clock, human_timeout_s=60)
    made.propose([REFUND])
    event = approval_event(made.pending())
    clock.at += 60_001
    with pytest.raises(DecisionRefused, match="deadline"):
        made.decide(event)
    assert made.close("expired") == {"r1": "not run: no human decision in time"}


def test_a_human_event_the_chart_knows_is_taken_by_the_chart() -> None:
    chart = json.loads(json.dumps(CHART))
    chart["states"]["paying"]["on"]["HUMAN_APPROVED"] = "released"
    chart["states"]["released"] = {"meta": {"tools": ["refund"]}}
    made = in_paying(chart=chart)
    made.propose([REFUND])
    made.decide(approval_event(made.pending()))
    assert state(made) == {"released"}
    assert made.run(REFUND).ok


def test_a_human_event_cannot_be_sent_past_the_ledger() -> None:
    with pytest.raises(AgentConfigError, match="decide"):
        session().send("HUMAN_APPROVED", call_ids=["r1"])


def test_new_input_closes_what_is_open_with_a_truthful_text() -> None:
    made = in_paying()
    second = ToolCall("r2", "refund", {"order": 8})
    made.propose([REFUND, second, ToolCall("n1", "note", {"text": "x"})])
    made.decide([{"id": "r1", "decision": "approve"}])
    made.run(REFUND)
    texts = made.close("superseded")
    assert texts == {
        "r1": "refunded 100",
        "r2": "not run: superseded by new input",
        "n1": "not run: superseded by new input",
    }
    assert made.turn() == []


def test_a_parked_turn_is_resumed_by_another_session(tmp_path: Path) -> None:
    machine = create_machine(CHART)
    ledger = SQLiteLedger(tmp_path / "l.db")
    first = GuardSession(machine, REGISTRY, ledger, "t1")
    first.propose([LOOK])
    first.run(LOOK)
    first.propose([REFUND])
    text = json.dumps(dump(first.snapshot))

    second = GuardSession(machine, REGISTRY, ledger, "t1", load(machine, text))
    (item,) = second.restore([REFUND])
    assert item.status == "ask"
    second.decide(approval_event(second.pending()))
    assert second.run(REFUND).text == "refunded 100"

    third = GuardSession(machine, REGISTRY, ledger, "t1", load(machine, text))
    (item,) = third.restore([REFUND])
    assert (item.status, item.text) == ("answered", "refunded 100")
    assert isinstance(third.enter(REFUND), Answer)
    assert len(entered) == 2


def test_a_parked_call_that_was_edited_in_the_conversation_is_refused(tmp_path: Path) -> None:
    machine = create_machine(CHART)
    ledger = SQLiteLedger(tmp_path / "l.db")
    first = GuardSession(machine, REGISTRY, ledger, "t1")
    first.propose([LOOK])
    first.run(LOOK)
    first.propose([REFUND])
    first.decide(approval_event(first.pending()))
    second = GuardSession(
        machine, REGISTRY, ledger, "t1", load(machine, json.dumps(dump(first.snapshot)))
    )
    changed = ToolCall("r1", "refund", {"order": 7, "cents": 99_900})
    (item,) = second.restore([changed])
    assert item.status == "denied"
    assert "does not match" in item.text
    assert second.run(changed).status == "denied"
    assert entered == [("look_up", 7)]


def test_parallel_regions_allow_what_each_of_them_allows() -> None:
    made = session(
        {
            "id": "p",
            "type": "parallel",
            "states": {
                "a": {"meta": {"tools": ["look_up", "refund"]}},
                "b": {"meta": {"tools": ["look_up", "note"]}},
            },
        }
    )
    assert made.allowed().names(REGISTRY) == ("look_up",)


def test_a_due_timer_fires_before_the_state_is_read() -> None:
    clock = Clock()
    made = session(
        {
            "id": "p",
            "initial": "open",
            "states": {
                "open": {"meta": {"tools": ["*"]}, "after": {"1000": "shut"}},
                "shut": {"meta": {"tools": []}},
            },
        },
        now=clock,
    )
    made.propose([LOOK])
    clock.at += 1001
    with pytest.raises(ToolDeniedError):
        made.enter(LOOK)
    assert made.allowed().names(REGISTRY) == ()


def test_a_finished_chart_allows_nothing() -> None:
    made = session(
        {
            "id": "p",
            "initial": "a",
            "states": {
                "a": {"meta": {"tools": ["*"]}, "on": {"END": "z"}},
                "z": {"type": "final", "meta": {"tools": ["*"]}},
            },
        }
    )
    made.send("END")
    assert made.allowed().names(REGISTRY) == ()


def test_a_chart_with_an_unknown_tool_or_a_service_is_refused_when_built() -> None:
    with pytest.raises(AgentConfigError, match="not in the tool registry"):
        session({"id": "p", "initial": "a", "states": {"a": {"meta": {"tools": ["typo"]}}}})
    from guardchart.runtime import MachineLogic

    machine = create_machine(
        {"id": "p", "initial": "a", "states": {"a": {"invoke": {"src": "svc"}}}},
        MachineLogic(services={"svc": lambda scope, ctx, event: 1}),
    )
    with pytest.raises(NotSupportedError, match="policy"):
        GuardSession(machine, REGISTRY, InMemoryLedger())


def test_a_durable_ledger_needs_a_scope(tmp_path: Path) -> None:
    with pytest.raises(AgentConfigError, match="scope="):
        GuardSession(create_machine(CHART), REGISTRY, SQLiteLedger(tmp_path / "l.db"))


def test_ids_of_earlier_turns_are_spent() -> None:
    made = in_paying()
    (item,) = made.propose([ToolCall("l1", "note", {"text": "x"})])
    assert item.status == "denied"
    assert "duplicate tool call ids" in item.text


def test_malformed_calls_of_a_turn_are_kept_apart() -> None:
    made = session()
    odd = ToolCall(["l1"], "look_up", {"order": 1})  # type: ignore[arg-type]
    assert made.run(odd).status == "denied"
    items = made.propose([LOOK, LOOK, odd, odd])
    assert [i.status for i in items] == ["denied"] * 4


def test_an_outcome_is_told_to_the_chart_once() -> None:
    chart = {
        "id": "p",
        "initial": "a",
        "meta": {"tools": ["note"]},
        "states": {
            "a": {"on": {"tool.done.note": "b"}},
            "b": {"on": {"tool.done.note": "c"}},
            "c": {},
        },
    }
    made = session(chart)
    call = ToolCall("n1", "note", {"text": "x"})
    made.propose([call])
    outcome = made.run(call)
    assert made.leave(call, outcome) is None
    assert state(made) == {"b"}


async def test_a_session_serves_a_running_loop() -> None:
    made = session()
    made.propose([LOOK])
    outcome = await made.arun(LOOK)
    assert outcome.text == "order 7"
    made.propose([REFUND])
    made.decide(approval_event(made.pending()))
    outcomes = await asyncio.gather(*(made.arun(REFUND) for _ in range(5)))
    assert {o.text for o in outcomes} == {"refunded 100"}
    assert entered.count(("refund", 7, 100)) == 1


def test_a_trusted_result_rides_in_the_event_and_no_other() -> None:
    seen: list[Any] = []
    from guardchart.runtime import MachineLogic

    def keep(context: Any, event: Any) -> None:
        seen.append(dict(event.payload))

    chart = {
        "id": "p",
        "initial": "a",
        "meta": {"tools": ["look_up", "note"]},
        "states": {"a": {"on": {"tool.done.*": {"actions": "keep"}}}},
    }
    made = GuardSession(
        create_machine(chart, MachineLogic(actions={"keep": keep})), REGISTRY, InMemoryLedger()
    )
    other = ToolCall("n1", "note", {"text": "x"})
    made.propose([LOOK, other])
    made.run(LOOK)
    made.run(other)
    assert seen == [{"id": "l1", "result": "order 7"}, {"id": "n1"}]
