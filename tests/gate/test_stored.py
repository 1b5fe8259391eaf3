"""StoredSession: a session made anew in each hook, from a snapshot, row ids and events."""

from __future__ import annotations

from typing import Any

import pytest

from guardchart.gate import ToolCall, approval_event, tool, tool_registry
from guardchart.gate._stored import FOLLOWS, StoredSession
from guardchart.kernel import create_machine, dump, load
from guardchart.persistence import InMemoryLedger

CHART: Any = {
    "id": "desk",
    "initial": "open",
    "states": {
        "open": {
            "meta": {"tools": ["lookup", "refund", "ping"]},
            "on": {"tool.done.refund": "closed", "tool.denied.lookup": "alarmed"},
        },
        "closed": {"meta": {"tools": ["lookup"]}},
        "alarmed": {},
    },
}


class Story:
    """One conversation, taken up again and again."""

    def __init__(self) -> None:
        self.entered: list[int] = []

        def lookup(n: int) -> str:
            return f"seen {n}"

        def refund(n: int) -> str:
            self.entered.append(n)
            return f"refunded {n}"

        def ping() -> str:
            return "pong"

        self.machine = create_machine(CHART)
        self.registry = tool_registry(lookup, tool(refund, side_effect=True), ping)
        self.ledger = InMemoryLedger()
        self.at = 1_000_000
        self.stored: Any = None

    def take_up(self) -> StoredSession:
        snapshot = None if self.stored is None else load(self.machine, self.stored)
        return StoredSession(
            self.machine,
            self.registry,
            self.ledger,
            "t",
            snapshot,
            now=lambda: self.at,
            human_timeout_s=60,
        )

    def put_down(self, session: StoredSession) -> None:
        self.stored = dump(session.snapshot)


C1 = ToolCall("c1", "refund", {"n": 1})
C2 = ToolCall("c2", "refund", {"n": 2})
L1 = ToolCall("l1", "lookup", {"n": 1})


def parked(*calls: ToolCall) -> tuple[Story, list[Any]]:
    story = Story()
    session = story.take_up()
    items = session.propose(calls)
    story.put_down(session)
    return story, [None if item.row is None else item.row.id for item in items]


@pytest.mark.gate
def test_a_parked_call_is_found_again_by_its_row_and_runs_once() -> None:
    story, ids = parked(C1)
    session = story.take_up()
    session.restore([C1], row_ids=ids)
    session.decide(approval_event(session.pending()))
    for _ in range(2):
        again = story.take_up()
        again.restore([C1], row_ids=ids)
        assert again.run(C1).text == "refunded 1"
    assert story.entered == [1]


@pytest.mark.gate
def test_each_of_two_equal_calls_keeps_its_own_row_when_taken_up_alone() -> None:
    story = Story()
    chart = {**CHART, "states": {"open": {"meta": {"tools": ["refund"]}}}}
    story.machine = create_machine(chart)
    session = story.take_up()
    twin = ToolCall("c9", "refund", {"n": 1})
    ids = [item.row.id for item in session.propose([C1, twin])]
    story.put_down(session)
    again = story.take_up()
    again.restore([C1, twin], row_ids=ids)
    again.decide(approval_event(again.pending()))
    for call, ident in zip([C1, twin], ids, strict=True):
        alone = story.take_up()
        alone.restore([call], row_ids=[ident])
        assert alone.run(call).status == "done"
    assert story.entered == [1, 1]


@pytest.mark.gate
@pytest.mark.parametrize("row_id", ["c2", "nothing", 7, None])
def test_a_row_id_that_is_not_the_calls_own_runs_nothing(row_id: Any) -> None:
    story, _ = parked(ToolCall("c2", "ping"), C1)
    session = story.take_up()
    forged = ToolCall("c1", "refund", {"n": 99})
    (item,) = session.restore([forged], row_ids=[row_id])
    assert item.status == "denied"
    assert session.run(forged).status == "denied" and story.entered == []


@pytest.mark.gate
def test_an_edit_is_found_by_the_row_of_the_call_that_was_edited() -> None:
    story, ids = parked(C1)
    session = story.take_up()
    session.restore([C1], row_ids=ids)
    digest = session.pending()[0]["digest"]
    edit = {"id": ids[0], "decision": "edit", "digest": digest, "arguments": {"n": 5}}
    session.decide([edit])
    again = story.take_up()
    rewritten = ToolCall("c1", "refund", {"n": 5})
    again.restore([rewritten], row_ids=ids)
    assert again.run(rewritten).text.endswith("refunded 5") and story.entered == [5]


@pytest.mark.gate
def test_what_follows_a_call_that_moves_the_chart_is_put_off_and_no_denial() -> None:
    story = Story()
    session = story.take_up()
    first, second, third = session.propose([C1, L1, C2])
    assert first.status == "ask"
    assert [second.verdict.reason, third.verdict.reason] == [FOLLOWS, FOLLOWS]
    assert second.row is None and third.row is None
    assert session.snapshot.state_ids == {"desk.open"}  # `tool.denied.lookup` was not sent


def test_a_refused_call_before_it_puts_nothing_off() -> None:
    session = Story().take_up()
    bad = ToolCall("c0", "refund", {"n": "1"})
    ping, refused = session.propose([bad, ToolCall("p", "ping")])[::-1]
    assert (refused.status, ping.status) == ("denied", "run")


def ran() -> tuple[Story, list[dict[str, Any]]]:
    story, ids = parked(C1)
    session = story.take_up()
    session.restore([C1], row_ids=ids)
    session.decide(approval_event(session.pending()))
    outcome = session.run(C1)
    return story, session.stored_events(0, outcome.row_id)


def test_a_stored_outcome_moves_the_chart_where_it_is_folded() -> None:
    story, events = ran()
    session = story.take_up()
    assert session.snapshot.state_ids == {"desk.open"}
    assert session.fold(events) and session.snapshot.state_ids == {"desk.closed"}


@pytest.mark.parametrize(
    "change",
    [
        {"row": None},
        {"row": "nothing"},
        {"row": 7},
        {"batch": 0},
        {"batch": None},
        {"type": "tool.failed.refund", "row": "c2"},
        {"type": "HUMAN_APPROVED"},
        {"type": "model.turn"},
        {"type": "tool.done.nothing"},
        {"type": "tool.done"},
        {"type": 7},
    ],
    ids=repr,
)
def test_a_stored_outcome_that_the_ledger_does_not_bear_out_is_dropped(change: Any) -> None:
    story, events = (
        parked(C1)[0],
        [{"type": "tool.done.refund", "id": "c1", "batch": 1, "row": "c1"}],
    )
    session = story.take_up()
    assert not session.fold([{**events[0], **change}, events[0]])
    assert session.snapshot.state_ids == {"desk.open"}


@pytest.mark.parametrize("events", [None, [], [7, None, "x", {}], [{"type": "tool.done.lookup"}]])
def test_stored_outcomes_of_any_shape_are_survived(events: Any) -> None:
    session = parked(C1)[0].take_up()
    session.fold(events)
    assert session.snapshot.state_ids == {"desk.open"}


def test_a_stored_outcome_counts_once() -> None:
    session = parked(L1)[0].take_up()
    one = {"type": "tool.failed.lookup", "id": "l1", "batch": 1}
    session.fold([one, dict(one)])
    assert len(session.told) == 1


def test_more_stored_outcomes_than_a_turn_can_have_are_bounded() -> None:
    session = parked(L1)[0].take_up()
    one = {"type": "tool.failed.lookup", "id": "l1", "batch": 1}
    session.fold([one] * 100_000)
    assert len(session.told) <= 1000


def test_refusals_say_what_fails_now() -> None:
    story, events = ran()
    session = story.take_up()
    assert session.refusals([L1, C2]) == {}
    session.fold(events)
    assert set(session.refusals([L1, C2])) == {"c2"}


def test_a_row_is_late_after_its_deadline() -> None:
    story, _ = parked(C1)
    session = story.take_up()
    row = story.ledger.row("t", "c1")
    assert not session.late(row)
    story.at += 61_000
    assert session.late(row)
    assert session.close_rows(["c1"], "expired")["c1"].status == "expired"


def test_a_turn_nobody_proposed_is_judged_and_files_nothing() -> None:
    story = Story()
    session = story.take_up()
    refund, lookup = session.judge([C1, ToolCall("x", "lookup", {"n": "1"})])
    assert (refund.status, lookup.status) == ("run", "denied")
    assert session.run(C1).status == "denied" and story.entered == []
    assert story.ledger.row("t", "c1") is None
