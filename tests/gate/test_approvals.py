from __future__ import annotations

from typing import Any

import pytest

from guardchart.gate import (
    DecisionRefused,
    Seal,
    approval_event,
    decisions_event,
    display,
    read_decisions,
    sign_decision,
    verify_decision,
)
from guardchart.kernel import Event


def item(ident: str, call_id: str | None = None, digest: str = "d") -> dict[str, Any]:
    return {
        "id": ident,
        "tool_call_id": call_id or ident,
        "name": "pay",
        "arguments": {},
        "digest": digest + ident,
    }


PENDING = [item("c1"), item("c2")]


def approve(ids: Any, **more: Any) -> dict[str, Any]:
    return {"type": "HUMAN_APPROVED", "call_ids": ids, **more}


def test_the_event_for_what_was_shown_approves_exactly_that() -> None:
    event = approval_event(PENDING, by="ann")
    assert event["by"] == "ann"
    decisions = read_decisions(event, PENDING)
    assert {k: (d.decision, d.digest) for k, d in decisions.items()} == {
        "c1": ("approve", "dc1"),
        "c2": ("approve", "dc2"),
    }
    payload = {k: v for k, v in event.items() if k != "type"}
    assert read_decisions(Event("HUMAN_APPROVED", payload), PENDING) == decisions


def test_ids_alone_approve_in_any_order() -> None:
    assert set(read_decisions(approve(["c2", "c1"]), PENDING)) == {"c1", "c2"}


BAD_IDS = {
    "case": ["C1", "c2"],
    "blank": ["c1 ", "c2"],
    "zero width": ["c1\u200b", "c2"],
    "extra": ["c1", "c2", "c3"],
    "missing": ["c1"],
    "none": [],
    "duplicate": ["c1", "c1", "c2"],
    "text": "c1c2",
    "absent": None,
    "mapping": {"c1": 1, "c2": 1},
    "integer": [1, 2],
    "nested": [["c1"], "c2"],
    "true": True,
}


@pytest.mark.parametrize("ids", BAD_IDS.values(), ids=BAD_IDS.keys())
def test_ids_that_are_not_exactly_the_pending_ones_are_refused(ids: Any) -> None:
    with pytest.raises(DecisionRefused):
        read_decisions(approve(ids), PENDING)


def test_the_integer_one_is_not_the_text_one() -> None:
    with pytest.raises(DecisionRefused):
        read_decisions(approve([1]), [item("1")])
    assert read_decisions(approve(["1"]), [item("1")])


BAD_DIGESTS = {
    "other": {"c1": "dc1", "c2": "dc1"},
    "missing one": {"c1": "dc1"},
    "unknown call": {"c1": "dc1", "c2": "dc2", "c3": "x"},
    "not text": {"c1": 1, "c2": "dc2"},
    "a list": ["dc1", "dc2"],
}


@pytest.mark.parametrize("digests", BAD_DIGESTS.values(), ids=BAD_DIGESTS.keys())
def test_digests_must_all_be_those_of_the_pending_calls(digests: Any) -> None:
    with pytest.raises(DecisionRefused):
        read_decisions(approve(["c1", "c2"], digests=digests), PENDING)


def test_a_providers_id_names_a_call_only_where_it_is_unambiguous() -> None:
    pending = [item("c1-2", "c1"), item("c9", "c9")]
    assert set(read_decisions(approve(["c1", "c9"]), pending)) == {"c1-2", "c9"}
    assert set(
        read_decisions(approve(["c1", "c9"], digests={"c1": "dc1-2", "c9": "dc9"}), pending)
    ) == {"c1-2", "c9"}
    twice = [item("a", "x"), item("b", "x")]
    with pytest.raises(DecisionRefused):
        read_decisions(approve(["x", "b"]), twice)
    with pytest.raises(DecisionRefused):
        read_decisions(approve(["c1", "c1-2"]), [item("c1-2", "c1"), item("c3")])


def test_a_row_id_wins_over_another_calls_provider_id() -> None:
    pending = [item("c1", "c7"), item("c1-2", "c1")]
    (only,) = read_decisions(decisions_event([{"id": "c1", "decision": "reject"}]), pending)
    assert only == "c1"


def test_a_rejection_closes_every_pending_call() -> None:
    decisions = read_decisions({"type": "HUMAN_REJECTED", "reason": "no"}, PENDING)
    assert {k: (d.decision, d.reason) for k, d in decisions.items()} == {
        "c1": ("reject", "no"),
        "c2": ("reject", "no"),
    }


def test_calls_are_decided_one_by_one() -> None:
    event = decisions_event(
        [
            {"id": "c1", "decision": "edit", "arguments": {"n": 1}, "digest": "dc1"},
            {"id": "c2", "decision": "reject", "reason": "no"},
        ],
        by="ann",
        again=True,
    )
    assert event["again"] is True
    decisions = read_decisions(event, PENDING)
    assert decisions["c1"].arguments == {"n": 1}
    assert decisions["c2"].reason == "no"
    assert set(read_decisions(decisions_event([{"id": "c2", "decision": "approve"}]), PENDING)) == {
        "c2"
    }


BAD_DECISIONS: dict[str, Any] = {
    "empty": [],
    "text": "approve",
    "not objects": ["c1"],
    "unknown id": [{"id": "c3", "decision": "approve"}],
    "no id": [{"decision": "approve"}],
    "unknown verb": [{"id": "c1", "decision": "allow"}],
    "verb as a list": [{"id": "c1", "decision": ["approve"]}],
    "twice": [{"id": "c1", "decision": "approve"}, {"id": "c1", "decision": "reject"}],
    "wrong digest": [{"id": "c1", "decision": "approve", "digest": "x"}],
    "edit without arguments": [{"id": "c1", "decision": "edit"}],
    "arguments without edit": [{"id": "c1", "decision": "approve", "arguments": {}}],
    "unknown key": [{"id": "c1", "decision": "approve", "tool": "other"}],
    "reason is no text": [{"id": "c1", "decision": "reject", "reason": {"a": 1}}],
    "huge reason": [{"id": "c1", "decision": "reject", "reason": "x" * 10**6}],
}


@pytest.mark.parametrize("given", BAD_DECISIONS.values(), ids=BAD_DECISIONS.keys())
def test_a_malformed_decision_is_refused(given: Any) -> None:
    with pytest.raises(DecisionRefused):
        read_decisions({"type": "HUMAN_DECIDED", "decisions": given}, PENDING)


@pytest.mark.parametrize(
    "event", [{"type": "APPROVE"}, approve(["c1", "c2"], again="yes"), approve(["c1", "c2"], by=3)]
)
def test_what_is_no_decision_is_refused(event: Any) -> None:
    with pytest.raises(DecisionRefused):
        read_decisions(event, PENDING)


def test_nothing_pending_takes_no_decision() -> None:
    for event in (approve([]), {"type": "HUMAN_REJECTED"}, decisions_event([])):
        with pytest.raises(DecisionRefused, match="no call is waiting"):
            read_decisions(event, [])


def test_a_refusal_repeats_nothing_of_the_event() -> None:
    with pytest.raises(DecisionRefused) as caught:
        read_decisions(approve(["CANARY", "c2"], digests={"CANARY": "x"}), PENDING)
    assert "CANARY" not in caught.value.reason


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain é 漢字 🙂", "plain é 漢字 🙂"),
        ("a\u202eb", "a\\u202eb"),
        ("a\u2066b\u2069", "a\\u2066b\\u2069"),
        ("pa\u200by", "pa\\u200by"),
        ("\ufeffa", "\\ufeffa"),
        ("a\x00\x1b[31m\n\t\x7f\x9b", "a\\u0000\\u001b[31m\\u000a\\u0009\\u007f\\u009b"),
        ("\u2028\u2029\u00a0", "\\u2028\\u2029\\u00a0"),
        ("\U000e0041", "\\U000e0041"),
        ("\u00ad", "\\u00ad"),
    ],
)
def test_what_cannot_be_seen_is_shown_escaped(text: str, shown: str) -> None:
    assert display(text) == shown
    assert display({text: [text]}) == {shown: [shown]}


def test_display_changes_no_value() -> None:
    value = {"a": ["\u202e"], "n": 1}
    assert display(value) == {"a": ["\\u202e"], "n": 1}
    assert value == {"a": ["\u202e"], "n": 1}


SEAL = Seal("k" * 16)


def test_a_signed_decision_is_verified_for_its_thread_and_type() -> None:
    signed = sign_decision(SEAL, approval_event(PENDING), "t1")
    assert read_decisions(signed, PENDING)
    assert verify_decision(SEAL, signed, "t1")
    payload = {k: v for k, v in signed.items() if k != "type"}
    assert verify_decision(SEAL, Event("HUMAN_APPROVED", payload), "t1")
    assert not verify_decision(SEAL, Event("HUMAN_REJECTED", payload), "t1")
    assert not verify_decision(SEAL, signed, "t2")
    assert not verify_decision(SEAL, signed, "t1", "m")
    assert not verify_decision(SEAL, {**signed, "call_ids": ["c1"]}, "t1")
    assert not verify_decision(SEAL, {**signed, "again": True}, "t1")
    assert not verify_decision(SEAL, approval_event(PENDING), "t1")
    assert not verify_decision(Seal("z" * 16), signed, "t1")
    with pytest.raises(TypeError):
        verify_decision(SEAL, payload, "t1")
