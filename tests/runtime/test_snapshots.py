"""Snapshots of interpreters: writing, restoring, restarting, sync and async alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from guardchart import SnapshotDriftError, SnapshotError
from guardchart.kernel import load
from guardchart.runtime import MachineLogic, create_machine
from tests.runtime.conftest import COUNT, Rig, counter_chart, inc


async def test_a_snapshot_is_json_text_and_restores_to_the_same(rig: Rig) -> None:
    machine = create_machine(counter_chart(), COUNT)
    live = await rig.start(machine)
    await rig.send(live, "N")
    text = live.get_snapshot()
    assert isinstance(text, str) and json.loads(text) == live.dump()
    for data in (text, live.dump(), load(machine, live.dump())):
        again = await rig.restore(data, machine)
        assert again.dump() == live.dump()
        await rig.send(again, "N")
        assert again.context["n"] == 2 and live.context["n"] == 1


async def test_state_ids_and_configuration_may_be_left_out(rig: Rig) -> None:
    machine = create_machine(counter_chart(), COUNT)
    data = (await rig.start(machine)).dump()
    data.pop("state_ids")
    data.pop("configuration", None)
    assert (await rig.restore(data, machine)).current_state_ids == {"c.a"}


async def test_nothing_runs_before_start_and_a_restored_machine_enters_nothing(rig: Rig) -> None:
    ran: list[str] = []
    chart = counter_chart(entry="note")
    logic = MachineLogic(actions={"inc": inc, "note": lambda c, e: ran.append("entry")})
    machine = create_machine(chart, logic)
    live = await rig.start(machine)
    again = rig.kind.from_snapshot(live.dump(), machine)
    assert again.status == "uninitialized" and again.context == {"n": 0}
    assert again.current_state_ids == {"c.a"}
    await rig.go(again)
    assert ran == ["entry"] and again.snapshot.rev == live.snapshot.rev


async def test_restart_services_runs_again_what_ran(rig: Rig) -> None:
    ran: list[Any] = []
    chart = {
        "id": "m",
        "initial": "a",
        "context": {"got": None},
        "states": {
            "a": {"invoke": {"id": "s", "src": "svc", "onDone": {"target": "b", "actions": "k"}}},
            "b": {},
        },
    }

    def svc(scope: Any, context: Any, event: Any) -> str:
        ran.append(event.type)
        return "out"

    logic = MachineLogic(actions={"k": lambda c, e: {"got": e.data}}, services={"svc": svc})
    machine = create_machine(chart, logic)
    data = json.loads((await rig.start(machine)).get_snapshot())
    data.update(value="a", state_ids=["m.a"])
    data["children"] = {"s": {"src": "svc", "key": "s@1", "status": "active"}}
    data["context"] = {"got": None}
    quiet = await rig.restore(data, machine)
    assert quiet.current_state_ids == {"m.a"} and ran == ["xstate.init"]
    again = await rig.restore(data, machine, restart_services=True)
    assert again.current_state_ids == {"m.b"} and again.context["got"] == "out"
    assert ran == ["xstate.init", "xstate.init"] and again.snapshot.rev > data["rev"]


async def test_a_snapshot_of_another_machine_is_refused(rig: Rig, toggle: Any) -> None:
    live = await rig.start(counter_chart(), COUNT)
    with pytest.raises(SnapshotDriftError, match="'c'.*'t'"):
        rig.kind.from_snapshot(live.dump(), toggle)
    with pytest.raises(SnapshotError, match="not valid snapshot JSON"):
        rig.kind.from_snapshot("{", toggle)
    with pytest.raises(SnapshotError, match="another machine object"):
        rig.kind.from_snapshot(live.snapshot, create_machine(counter_chart(), COUNT))


async def test_context_that_is_no_json_is_refused_when_written_and_nothing_is_lost(
    rig: Rig,
) -> None:
    live = await rig.start(counter_chart(), COUNT)
    live.update_context({"bad": object()})
    with pytest.raises(SnapshotError):
        live.get_snapshot()
    assert (await rig.send(live, "N")).status == "taken"


async def test_the_run_is_minted_once_and_kept(rig: Rig) -> None:
    machine = create_machine(counter_chart(), COUNT)
    live = await rig.start(machine)
    run = live.host.run
    assert run and live.host.scope == run and live.dump()["run"] == run
    again = await rig.restore(live.dump(), machine, run="other", scope="thread")
    assert again.host.run == run and again.host.scope == "thread"
    named = await rig.start(machine, run="mine", ledger="ledger")
    assert named.host == ("mine", "ledger", "mine", "c")
    assert (await rig.start(machine)).host.run != run


async def test_status_active_stands_only_in_snapshots(rig: Rig) -> None:
    live = await rig.start(counter_chart(), COUNT)
    assert live.status == "running" and live.dump()["status"] == "active"


def test_create_machine_reads_a_path_and_text(tmp_path: Path) -> None:
    text = json.dumps({"id": "m", "initial": "a", "states": {"a": {}}})
    (tmp_path / "m.json").write_text(text, encoding="utf-8")
    assert create_machine(tmp_path / "m.json").id == create_machine(text).id == "m"
    assert create_machine(text, strict_config=False).shape == create_machine(text).shape


def test_merge_gives_a_new_logic_in_which_the_later_wins() -> None:
    def hook(*args: Any) -> None: ...

    bound: list[str] = []
    base = MachineLogic(
        actions={"a": inc},
        guards={"g": lambda c, e: False},
        before_step=hook,
        attachments={"registry": 1, "x": 1},
        on_machine=lambda m: bound.append("base"),
    )
    other = MachineLogic(
        guards={"g": lambda c, e: True},
        services={"s": lambda i: 1},
        delays={"d": 5},
        attachments={"x": 2},
        on_machine=lambda m: bound.append("other"),
    )
    merged = base.merge(other)
    assert merged is not base and base.attachments == {"registry": 1, "x": 1}
    assert merged.guards["g"]({}, None) and not base.guards["g"]({}, None)
    assert set(merged.actions) == {"a"} and set(merged.services) == {"s"}
    assert merged.attachments == {"registry": 1, "x": 2} and merged.before_step is hook
    assert merged.delays == {"d": 5} and base.delays == {}
    create_machine({"id": "m", "initial": "a", "states": {"a": {}}}, merged)
    assert bound == ["base", "other"]
    assert type(merged.actions) is type(merged.delays) is dict
