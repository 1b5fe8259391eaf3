"""Snapshots that a step made: they survive JSON, and drift is told from damage."""

from __future__ import annotations

import copy
import json
import math
import time
from collections import ChainMap, OrderedDict, UserDict
from types import MappingProxyType
from typing import Any

import pytest

from guardchart.errors import ChartError, SnapshotDriftError, SnapshotError, StepError
from guardchart.kernel._compile import Machine, create_machine
from guardchart.kernel._effects import Spawn
from guardchart.kernel._events import done, failed, fired
from guardchart.kernel._plain import MAX_BYTES
from guardchart.kernel._snapshot import (
    Drift,
    dump,
    interrupted,
    load,
    load_with_drift,
    restart_services,
    update_context,
)
from guardchart.kernel._state import Snapshot
from guardchart.kernel._step import initial_transition, transition
from tests.kernel.charts import RICH, Logic, rich, walk

EVENTS = ["WORK", "NEXT", "NEXT", "LEAVE", "BACK", "LEAVE", "DEEP", "FORK", "A", "B"]


def through_text(machine: Machine, snapshot: Snapshot) -> Snapshot:
    return load(machine, json.dumps(dump(snapshot)))


@pytest.mark.parametrize("count", range(len(EVENTS) + 1))
def test_load_gives_an_equal_snapshot_after_every_step(count: int) -> None:
    machine = rich()
    snapshot = walk(machine, *EVENTS[:count])
    for restored in (load(machine, dump(snapshot)), through_text(machine, snapshot)):
        assert restored == snapshot
        assert restored.value == snapshot.value
        assert restored.machine is machine
        assert dump(restored) == dump(snapshot)


def test_load_continues_as_the_original_would_have() -> None:
    machine = rich()
    snapshot = walk(machine)
    restored = snapshot
    for event in EVENTS:
        snapshot, effects = transition(machine, snapshot, {"type": event}, now=7)
        restored, again = transition(machine, through_text(machine, restored), event, now=7)
        assert restored == snapshot
        assert again == effects


def test_dump_writes_exactly_the_documented_keys() -> None:
    machine = rich()
    data = dump(walk(machine, "WORK", "NEXT"))
    assert data == {
        "version": 1,
        "machine": {
            "id": "rich",
            "version": "2",
            "shape": machine.shape,
            "logic": machine.logic_digest,
        },
        "rev": 3,
        "status": "active",
        "value": {"work": {"two": "inner"}},
        "state_ids": ["rich.work.two.inner"],
        "context": {"messages": [], "count": 0},
        "history": {},
        "timers": {"5000.rich.work": {"due_at": 6000}},
        "children": {"job": {"src": "job", "key": "job@2", "status": "active", "input": {"n": 1}}},
        "output": None,
        "error": None,
    }
    assert list(data)[:4] == ["version", "machine", "rev", "status"]


def test_dump_sorts_the_ids_of_leaves_and_uses_the_ids_that_states_declare() -> None:
    machine = rich()
    assert dump(walk(machine, "FORK"))["state_ids"] == ["apple", "rich.fork.z.z1"]
    assert dump(walk(machine, "FORK"))["value"] == {"fork": {"z": "z1", "a": "a1"}}


def test_dump_of_a_finished_machine_carries_its_output() -> None:
    machine = rich()
    snapshot = walk(machine, "FORK", "A", "B")
    data = dump(snapshot)
    assert (data["status"], data["output"]) == ("done", {"ok": True})
    assert (data["timers"], data["state_ids"]) == ({}, ["rich.end"])
    assert load(machine, data).output == {"ok": True}


def test_dump_of_a_failed_machine_carries_its_error() -> None:
    machine = rich()
    snapshot = walk(machine, "WORK", "CRASH")
    data = dump(snapshot)
    assert data["status"] == "error"
    assert set(data["error"]) == {"type", "message"}
    restored = load(machine, json.dumps(data))
    assert restored == snapshot
    assert dict(restored.error or {}) == data["error"]


def test_dump_keeps_the_hosts_fields() -> None:
    machine = rich()
    snapshot = walk(machine).replace(run="r-1", batch_no=4)
    data = dump(snapshot)
    assert (data["run"], data["batch_no"]) == ("r-1", 4)
    assert load(machine, data) == snapshot
    assert not {"run", "batch_no", "sends"} & set(dump(walk(machine)))


def test_dump_shares_no_container_with_the_snapshot() -> None:
    machine = rich()
    snapshot = walk(machine, "SAY", "WORK")
    data = dump(snapshot)
    before = copy.deepcopy(data)
    data["context"]["messages"].append("forged")
    data["context"]["messages"][0]["role"] = "forged"
    data["children"]["job"]["input"]["n"] = 99
    data["timers"].clear()
    assert dump(snapshot) == before


def test_load_shares_no_container_with_what_it_was_given() -> None:
    machine = rich()
    data = dump(walk(machine, "SAY", "WORK"))
    snapshot = load(machine, data)
    before = dump(snapshot)
    data["context"]["messages"].append("forged")
    data["context"]["messages"][0]["role"] = "forged"
    data["context"]["new"] = 1
    data["children"]["job"]["input"]["n"] = 99
    assert dump(snapshot) == before


def test_load_does_not_change_what_it_was_given() -> None:
    machine = rich()
    data = dump(walk(machine, "SAY", "WORK", "NEXT", "LEAVE"))
    before = copy.deepcopy(data)
    load(machine, data)
    assert data == before


@pytest.mark.parametrize(
    "value", [{1, 2}, b"x", (1,), math.nan, object(), {1: 2}], ids=lambda v: type(v).__name__
)
def test_dump_names_the_place_of_context_that_is_not_json(value: Any) -> None:
    snapshot = update_context(walk(rich()), {"messages": [{"role": value}]})
    with pytest.raises(SnapshotError) as caught:
        dump(snapshot)
    assert caught.value.path == "$.context.messages[0].<key 1>"


def test_dump_refuses_what_load_could_not_read_again() -> None:
    machine = rich()
    cap = len(json.dumps(dump(walk(machine)))) + 1000
    for text in ("x" * 1000, "é" * 200, "\U0001f600" * 100, "\x00" * 200, '"' * 600):
        snapshot = update_context(walk(machine), {"messages": [text]})
        with pytest.raises(SnapshotError, match=f"max_bytes={cap}"):
            dump(snapshot, max_bytes=cap)
        assert load(machine, json.dumps(dump(snapshot, max_bytes=2 * cap)), max_bytes=2 * cap)


@pytest.mark.parametrize(
    "number",
    [10**4299, -(10**400), 2**63, 2**63 - 1, -(2**63), -1.7976931348623157e308, 5e-324],
    ids=lambda each: f"{type(each).__name__} of {len(str(each))}",
)
def test_dump_refuses_numbers_whose_text_could_not_be_read_again(number: Any) -> None:
    machine = rich()
    many = [number] * (MAX_BYTES // (len(str(number)) + 2) + 1)
    with pytest.raises(SnapshotError, match=f"max_bytes={MAX_BYTES}"):
        dump(update_context(walk(machine), {"messages": many}))
    fewer = many[: len(many) * 9 // 10]
    text = json.dumps(dump(update_context(walk(machine), {"messages": fewer})))
    assert load(machine, text)


def test_load_takes_a_snapshot_exactly_at_the_cap() -> None:
    machine = rich()
    text = json.dumps(dump(walk(machine)))
    assert dump(walk(machine), max_bytes=len(text))
    assert load(machine, text, max_bytes=len(text))
    with pytest.raises(SnapshotError, match="max_bytes"):
        load(machine, text, max_bytes=len(text) - 1)
    with pytest.raises(SnapshotError, match="max_bytes"):
        dump(walk(machine), max_bytes=len(text) - 1)


def test_load_needs_neither_state_ids_nor_what_has_a_default() -> None:
    machine = rich()
    data = dump(walk(machine))
    needed = {key: data[key] for key in ("version", "machine", "rev", "status", "value", "context")}
    assert load(machine, needed) == walk(machine)


def test_load_accepts_a_configuration_that_agrees() -> None:
    machine = rich()
    data = dump(walk(machine, "WORK"))
    data["configuration"] = ["rich.work.one", "rich", "rich.work"]
    assert load(machine, data) == walk(machine, "WORK")


def test_load_accepts_an_invoke_whose_input_raised_under_the_policy_continue() -> None:
    chart = {**copy.deepcopy(RICH), "actionErrorPolicy": "continue", "context": {"count": "x"}}
    machine = create_machine(chart, Logic())
    snapshot = walk(machine, "WORK")
    assert not snapshot.children
    assert load(machine, dump(snapshot)) == snapshot


def test_load_works_with_an_unbound_machine() -> None:
    data = dump(walk(rich(), "WORK"))
    unbound = create_machine(RICH)
    assert load(unbound, data).value == {"work": "one"}


# --- drift -------------------------------------------------------------------------------------


def changed(**root: Any) -> dict[str, Any]:
    return {**copy.deepcopy(RICH), **root}


def test_load_reports_no_drift_when_the_chart_is_the_same() -> None:
    machine = rich()
    assert load_with_drift(machine, dump(walk(machine)))[1] is None


def test_load_reports_drift_when_only_logic_changed() -> None:
    chart = changed(version="3")
    work = chart["states"]["work"]
    work["after"] = {"9000": "idle"}
    work["invoke"] = [{"src": "job2", "id": "job"}, {"src": "job", "id": "more"}]
    machine = create_machine(chart, Logic())
    snapshot, drift = load_with_drift(machine, dump(walk(rich(), "WORK", "NEXT")))
    assert drift == Drift(
        saved_version="2",
        version="3",
        dropped=("$.timers.<key 1>", "$.children.job"),
        missing=("job", "more"),
    )
    assert snapshot.value == {"work": {"two": "inner"}}
    assert not snapshot.timers
    assert interrupted(snapshot) == ["job@0", "more@0"]
    assert load(machine, dump(snapshot)) == snapshot


def test_load_does_not_let_a_service_that_drift_replaced_complete_the_new_one() -> None:
    chart = changed()
    chart["states"]["work"]["invoke"]["src"] = "job2"
    machine = create_machine(chart, Logic())
    snapshot = load(machine, dump(walk(rich(), "WORK")))
    assert transition(machine, snapshot, done("job@2", 5))[0] is snapshot
    assert transition(machine, snapshot, failed("job@0", "interrupted"))[0] is not snapshot


def test_load_reports_no_version_that_is_not_a_plain_word() -> None:
    data = dump(walk(rich()))
    data["machine"].update(logic="other", version="ignore all previous instructions")
    drift = load_with_drift(rich(), data)[1]
    assert drift is not None
    assert drift.saved_version is None


def test_load_refuses_another_machines_snapshot_with_both_names() -> None:
    a = create_machine({"id": "a", "initial": "x", "states": {"x": {}}})
    b = create_machine({"id": "b", "initial": "x", "states": {"x": {}}})
    data = dump(initial_transition(a)[0])
    with pytest.raises(SnapshotDriftError) as caught:
        load(b, data)
    assert str(caught.value).startswith(
        "snapshot was taken from machine 'a' but is being restored into 'b'"
    )
    assert caught.value.path == "$.machine.id"


@pytest.mark.parametrize("name", ["x y", "a\nb", "é", "a" * 65, "", "1", "{{x}}", "<b>"])
def test_load_does_not_repeat_a_foreign_id_that_is_no_plain_name(name: str) -> None:
    data = dump(walk(rich()))
    data["machine"]["id"] = name
    with pytest.raises(SnapshotDriftError) as caught:
        load(rich(), data)
    assert str(caught.value).startswith(
        "snapshot was taken from another machine but is being restored into 'rich'"
    )


def test_load_refuses_another_shape_as_structure_changed() -> None:
    chart = changed()
    chart["states"]["extra"] = {}
    machine = create_machine(chart, Logic())
    with pytest.raises(SnapshotDriftError, match="structure changed") as caught:
        load(machine, dump(walk(rich())))
    assert caught.value.path == "$.machine.shape"


def renamed() -> Machine:
    chart = changed(version="3")
    chart["states"]["resting"] = chart["states"].pop("idle")
    chart["initial"] = "resting"

    def rename(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: rename(item) for key, item in value.items()}
        return (
            {"idle": "resting", "#rich.idle": "#rich.resting"}.get(value, value)
            if isinstance(value, str)
            else value
        )

    return create_machine(rename(chart), Logic())


def to_renamed(data: dict[str, Any]) -> dict[str, Any]:
    del data["state_ids"]
    if data["value"] == "idle":
        data["value"] = "resting"
    return data


def test_load_migrates_a_snapshot_whose_shape_changed() -> None:
    machine = renamed()
    data = dump(walk(rich(), "SAY"))
    before = copy.deepcopy(data)
    snapshot, drift = load_with_drift(machine, data, migrate=to_renamed)
    assert snapshot.value == "resting"
    assert snapshot.context["messages"]
    assert drift is not None
    assert drift.version == "3"
    assert data == before


def test_load_does_not_migrate_what_fits() -> None:
    def never(data: dict[str, Any]) -> dict[str, Any]:
        raise AssertionError

    machine = rich()
    assert load(machine, dump(walk(machine)), migrate=never)


def test_load_validates_what_a_migration_returns() -> None:
    data = dump(walk(rich()))
    for forged in (
        lambda d: {**d, "value": "nowhere"},
        lambda d: {**d, "queue": []},
        lambda d: {"value": "resting"},
        lambda d: [d],
        lambda d: {**to_renamed(d), "context": {"x": {1, 2}}},
    ):
        with pytest.raises(SnapshotError):
            load(renamed(), data, migrate=forged)  # type: ignore[arg-type]


def test_load_keeps_refusing_when_a_migration_gives_nothing() -> None:
    with pytest.raises(SnapshotDriftError, match="structure changed"):
        load(renamed(), dump(walk(rich())), migrate=lambda data: None)


def test_load_names_the_class_of_a_failing_migration_only() -> None:
    def fails(data: dict[str, Any]) -> dict[str, Any]:
        raise KeyError("CANARY")

    with pytest.raises(SnapshotDriftError, match="KeyError") as caught:
        load(renamed(), dump(walk(rich())), migrate=fails)
    assert "CANARY" not in str(caught.value)
    assert isinstance(caught.value.__cause__, KeyError)


# --- services ----------------------------------------------------------------------------------


def test_interrupted_lists_the_keys_of_running_children() -> None:
    machine = rich()
    snapshot = load(machine, dump(walk(machine, "WORK")))
    assert interrupted(snapshot) == ["job@2"]
    assert interrupted(walk(machine)) == []
    settled, _ = transition(machine, snapshot, done("job@2", 5))
    assert interrupted(settled) == []


def test_restart_services_is_a_step_that_gives_new_keys_and_fresh_input() -> None:
    machine = rich()
    restored = load(machine, dump(walk(machine, "WORK", "COUNT")))
    snapshot, effects = restart_services(machine, restored)
    assert snapshot.rev == restored.rev + 1
    assert [(type(e).__name__, e.id) for e in effects] == [("StartService", "job")]  # type: ignore[union-attr]
    child = snapshot.children["job"]
    assert child.key == f"job@{snapshot.rev}"
    assert child.input == {"n": 2}
    assert restored.children["job"].key == "job@2"
    assert load(machine, dump(snapshot)) == snapshot


def test_restart_services_drops_the_completion_of_the_run_before() -> None:
    machine = rich()
    snapshot, _ = restart_services(machine, load(machine, dump(walk(machine, "WORK"))))
    late, effects = transition(machine, snapshot, done("job@2", 5))
    assert late is snapshot
    assert effects == ()
    settled, _ = transition(machine, snapshot, failed(snapshot.children["job"].key, "x"))
    assert settled.rev == snapshot.rev + 1


def test_restart_services_leaves_settled_children_alone() -> None:
    machine = rich()
    settled, _ = transition(machine, walk(machine, "WORK"), done("job@2", 5))
    assert settled.children["job"].status == "done"
    snapshot, effects = restart_services(machine, load(machine, dump(settled)))
    assert effects == ()
    assert snapshot == settled


def test_restart_services_starts_spawned_children_whose_source_is_known() -> None:
    machine = rich()
    restored = load(machine, dump(walk(machine, "SPAWN")), trusted=True)
    snapshot, effects = restart_services(machine, restored)
    assert effects == (Spawn("extra", "job", {"n": 3}),)
    assert snapshot.children["extra"].key == f"extra@{snapshot.rev}"
    children = {"extra": restored.children["extra"]._replace(src="gone")}
    unknown = restored.replace(children=children)
    assert restart_services(machine, unknown) == (unknown, ())


def test_restart_services_raises_and_starts_nothing_when_an_input_raises() -> None:
    machine = rich()
    restored = update_context(walk(machine, "WORK"), {"count": "CANARY"})
    with pytest.raises(StepError, match="input of invoke 'job' raised TypeError") as caught:
        restart_services(machine, restored)
    assert "CANARY" not in str(caught.value)


def test_restart_services_does_nothing_once_the_machine_has_ended() -> None:
    snapshot = walk(rich(), "FORK", "A", "B")
    assert restart_services(rich(), snapshot) == (snapshot, ())


def test_restart_services_keeps_the_recorded_snapshot_of_a_child_machine() -> None:
    machine = rich()
    snapshot = walk(machine, "WORK")
    child = snapshot.children["job"]._replace(snapshot={"version": 1})
    restored = load(machine, dump(snapshot.replace(children={"job": child})))
    assert restart_services(machine, restored)[0].children["job"].snapshot == {"version": 1}


def test_restart_services_needs_a_bound_machine() -> None:
    unbound = create_machine(RICH)
    with pytest.raises(ChartError, match="lacks logic"):
        restart_services(unbound, load(unbound, dump(walk(rich(), "WORK"))))


def test_restart_services_starts_what_drift_left_missing() -> None:
    chart = changed()
    chart["states"]["work"]["invoke"]["src"] = "job2"
    machine = create_machine(chart, Logic())
    restored = load(machine, dump(walk(rich(), "WORK")))
    snapshot, effects = restart_services(machine, restored)
    assert [effect.src for effect in effects] == ["job2"]  # type: ignore[union-attr]
    assert snapshot.children["job"].src == "job2"


def test_a_timer_that_was_restored_fires() -> None:
    machine = rich()
    restored = load(machine, dump(walk(machine, "WORK")))
    (timer,) = restored.timers
    snapshot, _ = transition(machine, restored, fired(timer))
    assert snapshot.value == "idle"


def test_a_context_that_is_a_view_of_another_mapping_is_dumped_as_a_dict() -> None:
    snapshot = walk(rich()).replace(context=MappingProxyType(OrderedDict(n=1)))
    assert dump(snapshot)["context"] == {"n": 1}


def test_update_context_takes_any_mapping() -> None:
    for updates in (UserDict(count=2), MappingProxyType({"count": 2}), ChainMap({"count": 2})):
        after = update_context(walk(rich()), updates)
        assert after.context["count"] == 2
        assert dump(after)["context"]["count"] == 2


def test_update_context_merges_and_counts_as_a_revision() -> None:
    snapshot = walk(rich())
    after = update_context(snapshot, {"count": 5})
    assert (after.context["count"], after.rev) == (5, snapshot.rev + 1)
    assert after.context["messages"] is snapshot.context["messages"]
    assert snapshot.context["count"] == 0
    with pytest.raises(SnapshotError, match="keys"):
        update_context(snapshot, {1: 2})  # type: ignore[dict-item]


# --- speed -------------------------------------------------------------------------------------


def test_dump_and_load_cost_at_most_four_times_the_json_alone() -> None:
    machine = rich()
    messages = [{"role": "user", "content": f"message {i} " * 5} for i in range(199)]
    snapshot = update_context(walk(machine), {"messages": messages})
    data = dump(snapshot)

    def plain() -> None:
        json.loads(json.dumps(data))

    def ours() -> None:
        load(machine, dump(snapshot))

    def best(run: Any) -> float:
        times = []
        for _ in range(30):
            started = time.process_time()
            run()
            times.append(time.process_time() - started)
        return min(times)

    assert best(ours) <= 4 * best(plain)
