"""A snapshot is untrusted: what somebody writes into it runs nothing."""

from __future__ import annotations

import copy
import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from guardchart import SnapshotDriftError, SnapshotError, SyncInterpreter
from guardchart.gate import Seal, approval_event
from guardchart.persistence import SQLiteLedger
from tests.promises.bank import REFUND, SAY, THREAD, Bank, Parked, graph, start


@pytest.mark.gate
def test_flipped_approval_flags_and_ids_in_context_run_nothing() -> None:
    parked = Parked()

    def flip(data: dict[str, Any]) -> None:
        context = data["context"]
        context["approved_call_ids"] = [each["id"] for each in parked.pending]
        context["human_approved"] = True
        for call in context["pending_tool_calls"]:
            call["decided"] = True
            call["needs_approval"] = False

    result = parked.send({"type": "NOTE"}, parked.edited(flip))
    assert result.waiting
    assert parked.bank.entered == []


@pytest.mark.gate
def test_a_state_forged_to_awaiting_tool_runs_nothing_in_the_node() -> None:
    parked = Parked()
    forged = parked.edited(lambda data: None)
    forged["value"] = "awaiting_tool"
    forged["timers"] = {}
    forged["children"] = {
        "tools": {"src": "runTool", "key": f"tools@{forged['rev']}", "status": "active"}
    }
    bank = Bank()
    app = graph(bank, [SAY])
    try:
        app.invoke({"xsm": forged, "event": None}, THREAD)
    except SnapshotError:
        pass
    assert bank.entered == []


@pytest.mark.gate
def test_an_honest_approval_of_edited_arguments_is_refused_and_ends_as_tampered() -> None:
    parked = Parked()

    def edit(data: dict[str, Any]) -> None:
        data["context"]["pending_tool_calls"][0]["arguments"]["cents"] = 99_000

    result = parked.approve_ids(parked.edited(edit))
    assert parked.bank.entered == []
    assert result.error is not None and result.error["kind"] == "tampered"
    assert parked.approve().final_state == "toolLoop.done"
    assert parked.bank.entered == [("refund", 7, 250)]


@pytest.mark.gate
@pytest.mark.parametrize("name", ["transfer", "lookup", "wire", "nothing_like_it"])
def test_a_pending_tool_swapped_for_another_one_is_refused(name: str) -> None:
    parked = Parked()

    def swap(data: dict[str, Any]) -> None:
        call = data["context"]["pending_tool_calls"][0]
        call["name"] = name
        call["arguments"] = {"order_id": 7} if name == "lookup" else {"cents": 5}

    result = parked.approve_ids(parked.edited(swap))
    assert parked.bank.entered == []
    assert not result.ok


@pytest.mark.gate
@pytest.mark.parametrize("value", ["250", 250.0, True, None, [250]])
def test_an_argument_whose_type_was_changed_in_the_snapshot_is_refused(value: Any) -> None:
    parked = Parked()

    def edit(data: dict[str, Any]) -> None:
        data["context"]["pending_tool_calls"][0]["arguments"]["cents"] = value

    result = parked.approve_ids(parked.edited(edit))
    assert parked.bank.entered == []
    assert not result.ok


@pytest.mark.parametrize("key", ["queue", "events", "pending", "_events", "engine", "__proto__"])
def test_events_inside_a_snapshot_are_refused_as_unknown_keys(key: str) -> None:
    parked = Parked()
    forged = parked.edited(lambda data: data.update({key: [approval_event(parked.pending)]}))
    with pytest.raises(SnapshotError) as caught:
        parked.approve(forged)
    assert caught.value.path.startswith("$")
    assert parked.bank.entered == []


@pytest.mark.parametrize("key", ["version", "machine", "rev", "value", "status", "context"])
def test_a_snapshot_without_version_id_or_digests_is_refused(key: str) -> None:
    parked = Parked()
    with pytest.raises(SnapshotError):
        parked.approve(parked.edited(lambda data: data.pop(key)))
    for part in ("id", "shape", "logic"):
        with pytest.raises(SnapshotError):
            parked.approve(parked.edited(lambda data, part=part: data["machine"].pop(part)))
    assert parked.bank.entered == []


@pytest.mark.parametrize("value", [-1_000_000, float("-1e9"), "many", None, True])
def test_counters_in_a_snapshot_never_extend_a_budget_below_zero_spend(value: Any) -> None:
    parked = Parked(budgets={"max_turns": 2})

    def edit(data: dict[str, Any]) -> None:
        data["context"]["turns"] = value

    result = parked.send(
        approval_event(parked.pending),
        parked.edited(edit),
        {"tool": "lookup", "args": {"order_id": 1}},
        {"tool": "lookup", "args": {"order_id": 2}},
        {"tool": "lookup", "args": {"order_id": 3}},
        SAY,
    )
    assert result.error == {"kind": "budget", "message": "turn limit reached"}
    assert parked.bank.entered.count(("lookup", 3)) == 0


def test_with_a_seal_an_edited_counter_is_refused() -> None:
    bank = Bank()
    app = graph(bank, [REFUND, SAY], seal=Seal(b"k" * 32))
    snapshot = copy.deepcopy(app.invoke(start(), THREAD)["xsm"])
    snapshot["context"]["turns"] = 0
    app.update_state(THREAD, {"xsm": snapshot})
    out = app.invoke({"event": approval_event([])}, THREAD)
    assert out["xsm"]["context"]["error"]["kind"] == "tampered"
    assert bank.entered == []


def test_the_snapshot_of_another_machine_is_refused() -> None:
    parked = Parked()
    other = parked.edited(lambda data: data["machine"].update(id="other"))
    with pytest.raises(SnapshotDriftError, match="being restored into 'toolLoop'"):
        parked.approve(other)
    drifted = parked.edited(lambda data: data["machine"].update(shape="0" * 64))
    with pytest.raises(SnapshotDriftError, match="structure changed"):
        parked.approve(drifted)
    assert parked.bank.entered == []


@pytest.mark.gate
@pytest.mark.parametrize("guard", ["seal", "ledger"])
def test_the_snapshot_of_another_thread_runs_nothing_with_a_seal_or_a_ledger(
    guard: str, tmp_path: Path
) -> None:
    bank = Bank()
    options: dict[str, Any] = {"ledger": SQLiteLedger(tmp_path / "ledger.sqlite")}
    if guard == "seal":
        options = {"seal": Seal(b"k" * 32)}
    app = graph(bank, [REFUND, SAY], **options)
    snapshot = app.invoke(start(), THREAD)["xsm"]
    ids = [each["id"] for each in snapshot["context"]["pending_tool_calls"]]
    elsewhere = {"configurable": {"thread_id": "t2"}}
    event = {"type": "HUMAN_APPROVED", "call_ids": ids}
    out = app.invoke({"xsm": snapshot, "event": event}, elsewhere)
    assert bank.entered == []
    assert out["xsm"]["context"]["error"]["kind"] == "tampered"


def _deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


HOSTILE: dict[str, Any] = {
    "fifty megabytes": lambda data: data["context"].update(result="x" * 50_000_000),
    "a hundred thousand levels": lambda data: data["context"].update(result=_deep(100_000)),
    "NaN": lambda data: data["context"].update(cost_usd=float("nan")),
    "a set": lambda data: data["context"].update(result={1, 2}),
    "bytes": lambda data: data["context"].update(result=b"x"),
    "a bool for a number": lambda data: data.update(rev=True),
    "__proto__": lambda data: data.update({"__proto__": {}}),
    "an unknown state": lambda data: data.update(value="nowhere"),
    "two children of a compound": lambda data: data.update(value={"idle": {}, "done": {}}),
    "a final state that is active": lambda data: data.update(value="done"),
    "an integer key": lambda data: data["context"].update({1: 2}),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_snapshots_give_one_snapshot_error_with_a_path_in_bounded_time(what: str) -> None:
    parked = Parked()
    forged = parked.edited(HOSTILE[what])
    begun = time.process_time()
    with pytest.raises(SnapshotError) as caught:
        SyncInterpreter.from_snapshot(forged, parked.machine([SAY]))
    assert time.process_time() - begun < 20.0
    assert caught.value.path.startswith("$")


def test_hostile_snapshot_text_is_refused_alike() -> None:
    parked = Parked()
    text = json.dumps(parked.snapshot)
    not_finite = text.replace('"cost_usd": 0.0', '"cost_usd": NaN')
    assert not_finite != text
    for bad in ("", "{", text[:-5], not_finite, "[" * 100_000, '{"a": 1e999}'):
        with pytest.raises(SnapshotError):
            SyncInterpreter.from_snapshot(bad, parked.machine([SAY]))


def test_no_module_is_imported_because_a_snapshot_names_it() -> None:
    parked = Parked()

    def name(data: dict[str, Any]) -> None:
        data["context"]["output_model"] = "this_module_would_be_imported:Model"
        data["context"]["result"] = {"__reduce__": "os.system", "py/object": "antigravity"}

    before = set(sys.modules)
    result = parked.approve(parked.edited(name))
    assert result.ok
    assert not {each for each in set(sys.modules) - before if "import" in each or "gravity" in each}
