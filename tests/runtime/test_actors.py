"""Child machines and spawned actors: ids, messages, ends, errors, snapshots, bounds."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest

from guardchart import SimulatedClock, SnapshotError, StepError
from guardchart.errors import ChartError
from guardchart.runtime import MachineLogic, create_machine
from tests.runtime.conftest import Rig, inc


def child(**more: Any) -> dict[str, Any]:
    return {
        "id": "k",
        "initial": "a",
        "context": {"n": 0},
        "output": lambda c, e: {"n": c["n"]},
        "states": {
            "a": {
                "on": {
                    "ADD": {"actions": "inc"},
                    "TELL": {"actions": "tell"},
                    "END": "z",
                    "BOOM": {"actions": "boom"},
                }
            },
            "z": {"type": "final"},
        },
        **more,
    }


def tell(scope: Any, context: Any, event: Any, action: Any) -> None:
    scope.send_parent("TOLD", n=context["n"], who=scope.id)


def boom(context: Any, event: Any) -> None:
    raise ValueError("no")


KID = MachineLogic(actions={"inc": inc, "tell": tell, "boom": boom})


def parent(**more: Any) -> dict[str, Any]:
    return {
        "id": "m",
        "initial": "a",
        "context": {"got": None, "told": []},
        "states": {
            "a": {
                "invoke": {
                    "id": "kid",
                    "src": "kid",
                    "onDone": {"target": "b", "actions": "keep"},
                    "onError": {"target": "bad", "actions": "keep"},
                },
                "on": {
                    "ADD": {"actions": "pass"},
                    "TELL": {"actions": "pass"},
                    "END": {"actions": "pass"},
                    "BOOM": {"actions": "pass"},
                    "TOLD": {"actions": "hear"},
                    "LEAVE": "left",
                },
                **more,
            },
            "b": {},
            "bad": {},
            "left": {"on": {"BACK": "a"}},
        },
    }


def relay(scope: Any, context: Any, event: Any, action: Any) -> None:
    scope.send_to("kid", event.type)


def logic(machine: Any = None, **more: Any) -> MachineLogic:
    return MachineLogic(
        actions={
            "keep": lambda c, e: {"got": e.data},
            "pass": relay,
            "hear": lambda c, e: {"told": [*c["told"], e.payload]},
            **more,
        },
        services={"kid": machine if machine is not None else create_machine(child(), KID)},
    )


async def test_an_invoked_machine_lives_in_actors_until_it_ends(rig: Rig) -> None:
    live = await rig.start(parent(), logic())
    (kid,) = live.actors.values()
    assert list(live.actors) == ["m:kid"] == list(live._actors)
    assert kid.id == "m:kid" and kid.parent is live and kid.status == "running"
    assert kid.host.agent == "m:kid" and kid.host.run == kid.snapshot.run != live.host.run
    await rig.send(live, "ADD")
    await rig.send(live, "END")
    assert live.actors == {} and kid.status == "done"
    assert live.current_state_ids == {"m.b"} and live.context["got"] == {"n": 1}


async def test_parent_and_child_send_to_each_other_by_id(rig: Rig) -> None:
    live = await rig.start(parent(), logic())
    await rig.send(live, "ADD")
    await rig.send(live, "TELL")
    assert live.context["told"] == [{"n": 1, "who": "m:kid"}]


async def test_an_actor_can_be_sent_to_from_outside(rig: Rig) -> None:
    live = await rig.start(parent(), logic())
    kid = live.actors["m:kid"]
    assert (await rig.send(kid, "TELL")).status == "taken"
    assert live.context["told"] == [{"n": 0, "who": "m:kid"}]
    assert (await rig.send(kid, "END")).status == "taken"
    assert live.current_state_ids == {"m.b"}


async def test_an_error_in_a_child_is_its_parents_event(rig: Rig) -> None:
    live = await rig.start(parent(), logic())
    kid = live.actors["m:kid"]
    await rig.send(live, "BOOM")
    assert kid.status == "error" and live.current_state_ids == {"m.bad"}
    assert isinstance(live.context["got"], ValueError) and live.context["got"] is kid.error
    assert live.actors == {} and live.status == "running"


async def test_an_error_in_a_child_that_nobody_handles_is_the_parents(rig: Rig) -> None:
    chart = parent()
    del chart["states"]["a"]["invoke"]["onError"]
    live = await rig.start(chart, logic())
    await rig.send(live, "BOOM")
    assert live.status == "error" and isinstance(live.error, ValueError)


async def test_leaving_the_state_stops_its_child_and_entering_starts_another(rig: Rig) -> None:
    live = await rig.start(parent(), logic())
    first = live.actors["m:kid"]
    await rig.send(live, "ADD")
    await rig.send(live, "LEAVE")
    assert first.status == "stopped" and live.actors == {}
    await rig.send(live, "BACK")
    second = live.actors["m:kid"]
    assert second is not first and second.context["n"] == 0


async def test_what_an_exit_action_sends_reaches_the_child_before_it_stops(rig: Rig) -> None:
    def last(scope: Any, context: Any, event: Any, action: Any) -> None:
        scope.send_to("kid", "ADD")
        scope.send_to("kid", "TELL")

    live = await rig.start(parent(exit="last"), logic(last=last))
    kid = live.actors["m:kid"]
    await rig.send(live, "LEAVE")
    assert kid.context["n"] == 1 and kid.status == "stopped"
    assert live.current_state_ids == {"m.left"}  # TOLD found nobody to hear it


async def test_sending_to_a_child_that_is_gone_does_no_harm(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    chart = parent()
    chart["states"]["left"]["on"]["ADD"] = {"actions": "pass"}
    live = await rig.start(chart, logic())
    await rig.send(live, "LEAVE")
    assert (await rig.send(live, "ADD")).status == "taken"
    assert "no actor" in caplog.text


async def test_send_parent_without_a_parent_does_no_harm(rig: Rig) -> None:
    live = await rig.start(child(), KID)
    assert (await rig.send(live, "TELL")).status == "taken"


async def test_a_child_that_ends_at_once_is_reported_at_once(rig: Rig) -> None:
    kid = create_machine({"id": "k", "initial": "z", "states": {"z": {"type": "final"}}})
    live = await rig.start(parent(), logic(kid))
    assert live.current_state_ids == {"m.b"} and live.actors == {}


async def test_a_child_that_fails_at_once_is_reported_at_once(rig: Rig) -> None:
    kid = create_machine(child(entry="boom"), KID)
    live = await rig.start(parent(), logic(kid))
    assert live.current_state_ids == {"m.bad"} and isinstance(live.context["got"], ValueError)


async def test_a_child_whose_first_step_never_rests_is_reported(rig: Rig) -> None:
    kid = create_machine(
        child(maxMicrosteps=10, states={"a": {"always": {"guard": "yes", "actions": "inc"}}}),
        MachineLogic(actions={"inc": inc}, guards={"yes": lambda c, e: True}),
    )
    live = await rig.start(parent(), logic(kid))
    assert live.current_state_ids == {"m.bad"} and isinstance(live.context["got"], StepError)


async def test_a_child_without_its_logic_is_reported_and_strands_nothing(rig: Rig) -> None:
    live = await rig.start(parent(), logic(create_machine(child())))
    assert live.current_state_ids == {"m.bad"} and isinstance(live.context["got"], ChartError)


async def test_the_input_of_an_invoke_is_the_childs(rig: Rig) -> None:
    chart = parent()
    chart["states"]["a"]["invoke"]["input"] = {"q": 1}
    live = await rig.start(chart, logic())
    assert live.actors["m:kid"].context["input"] == {"q": 1}


async def test_stopping_the_parent_stops_the_whole_tree(rig: Rig) -> None:
    middle = create_machine(
        {"id": "mid", "initial": "a", "states": {"a": {"invoke": {"id": "kid", "src": "kid"}}}},
        logic(),
    )
    live = await rig.start(parent(), logic(middle))
    inner = live.actors["m:kid"].actors["m:kid:kid"]
    assert inner.status == "running" and inner.parent.parent is live
    live.stop()
    assert inner.status == "stopped" and live.actors == {}


async def test_a_timer_of_a_child_fires(rig: Rig) -> None:
    clock = SimulatedClock()
    kid = create_machine(
        {
            "id": "k",
            "initial": "a",
            "states": {"a": {"after": {"50": "z"}}, "z": {"type": "final"}},
        }
    )
    live = await rig.start(parent(after={"80": "left"}), logic(kid), clock=clock)
    assert live.next_due() == (50.0, "50.k.a")
    await rig.move(clock, 100)
    assert live.current_state_ids == {"m.b"} and clock.now_ms() == 100


async def test_a_real_timer_of_a_child_fires_by_itself(rig: Rig) -> None:
    kid = create_machine(
        {
            "id": "k",
            "initial": "a",
            "states": {"a": {"after": {"20": "z"}}, "z": {"type": "final"}},
        }
    )
    live = await rig.start(parent(), logic(kid))
    await rig.until(lambda: live.current_state_ids == {"m.b"})


async def test_the_service_of_a_child_runs(rig: Rig) -> None:
    kid = create_machine(
        {
            "id": "k",
            "initial": "a",
            "states": {"a": {"invoke": {"src": "svc", "onDone": "z"}}, "z": {"type": "final"}},
        },
        MachineLogic(services={"svc": lambda input: 1}),
    )
    live = await rig.start(parent(), logic(kid))
    assert live.current_state_ids == {"m.b"}


# onSnapshot


async def test_on_snapshot_shows_the_parent_each_state_of_a_child(rig: Rig) -> None:
    chart = parent()
    chart["states"]["a"]["invoke"]["onSnapshot"] = {"actions": "watch"}
    chart["context"]["seen"] = []
    watch = {"watch": lambda c, e: {"seen": [*c["seen"], e.data.context["n"]]}}
    live = await rig.start(chart, logic(**watch))
    assert live.context["seen"] == [0]
    await rig.send(live, "ADD")
    await rig.send(live, "ADD")
    assert live.context["seen"] == [0, 1, 2]
    await rig.send(live, "END")
    assert live.context["seen"] == [0, 1, 2] and live.current_state_ids == {"m.b"}


async def test_without_on_snapshot_a_parent_takes_no_step_for_its_child(rig: Rig) -> None:
    live = await rig.start(parent(), logic())
    rev = live.snapshot.rev
    await rig.send(live.actors["m:kid"], "ADD")
    assert live.snapshot.rev == rev


# Spawned actors


def spawner(*, src: Any = "kid", **more: Any) -> tuple[dict[str, Any], MachineLogic]:
    def spawn(scope: Any, context: Any, event: Any, action: Any) -> None:
        scope.spawn(src, event.payload.get("id"), event.payload.get("input"))

    def stop(scope: Any, context: Any, event: Any, action: Any) -> None:
        scope.stop("kid-1")

    def send(scope: Any, context: Any, event: Any, action: Any) -> None:
        scope.send_to(event.payload["to"], event.payload["what"])

    chart = {
        "id": "m",
        "initial": "a",
        "context": {"told": [], "ends": []},
        "states": {
            "a": {
                "on": {
                    "SPAWN": {"actions": "spawn"},
                    "STOP": {"actions": "stop"},
                    "SEND": {"actions": "send"},
                    "TOLD": {"actions": "hear"},
                    "xstate.done.actor.kid-1": {"actions": "end"},
                    "xstate.error.actor.kid-1": {"actions": "end"},
                }
            }
        },
        **more,
    }
    actions = {
        "spawn": spawn,
        "stop": stop,
        "send": send,
        "hear": lambda c, e: {"told": [*c["told"], e.payload]},
        "end": lambda c, e: {"ends": [*c["ends"], e.data]},
    }
    return chart, MachineLogic(
        actions=actions, services={"kid": create_machine(child(), KID), "svc": lambda input: 7}
    )


async def test_spawned_actors_get_numbered_ids_and_messages(rig: Rig) -> None:
    live = await rig.start(*spawner())
    await rig.send(live, "SPAWN")
    await rig.send(live, "SPAWN", input=3)
    assert sorted(live.actors) == ["m:kid-1", "m:kid-2"]
    assert live.actors["m:kid-2"].context["input"] == 3
    await rig.send(live, "SEND", to="kid-2", what="ADD")
    await rig.send(live, "SEND", to="kid-2", what="TELL")
    assert live.context["told"] == [{"n": 1, "who": "m:kid-2"}]


async def test_the_end_of_a_spawned_actor_is_an_event(rig: Rig) -> None:
    live = await rig.start(*spawner())
    await rig.send(live, "SPAWN")
    await rig.send(live, "SEND", to="kid-1", what="END")
    assert live.context["ends"] == [{"n": 0}] and live.actors == {}
    assert dict(live.snapshot.children) == {}


async def test_the_error_of_a_spawned_actor_is_an_event(rig: Rig) -> None:
    live = await rig.start(*spawner())
    await rig.send(live, "SPAWN")
    await rig.send(live, "SEND", to="kid-1", what="BOOM")
    assert isinstance(live.context["ends"][0], ValueError) and live.status == "running"


async def test_a_spawned_actor_can_be_stopped(rig: Rig) -> None:
    live = await rig.start(*spawner())
    await rig.send(live, "SPAWN")
    kid = live.actors["m:kid-1"]
    await rig.send(live, "STOP")
    assert kid.status == "stopped" and live.actors == {} and live.context["ends"] == []


@pytest.mark.parametrize("src", ["svc", lambda input: 7])
async def test_functions_can_be_spawned_too(rig: Rig, src: Any) -> None:
    live = await rig.start(*spawner(src=src))
    await rig.send(live, "SPAWN", id="kid-1")
    assert live.context["ends"] == [7]


# Snapshots of trees


async def test_a_snapshot_holds_live_children_and_restores_them(rig: Rig) -> None:
    machine = create_machine(parent(), logic())
    live = await rig.start(machine)
    await rig.send(live, "ADD")
    data = json.loads(live.get_snapshot())
    assert data["children"]["kid"]["snapshot"]["context"] == {"n": 1}
    live.stop()
    again = await rig.restore(data, machine, restart_services=True)
    assert again.actors["m:kid"].context["n"] == 1
    await rig.send(again, "ADD")
    await rig.send(again, "END")
    assert again.context["got"] == {"n": 2}


async def test_without_restart_a_restored_child_does_not_run(rig: Rig) -> None:
    machine = create_machine(parent(), logic())
    live = await rig.start(machine)
    data = live.dump()
    again = await rig.restore(data, machine)
    assert again.actors == {}
    again.fail_interrupted()
    assert again.current_state_ids == {"m.bad"}


async def test_spawned_actors_go_on_from_their_own_snapshots(rig: Rig) -> None:
    chart, actions = spawner()
    machine = create_machine(chart, actions)
    live = await rig.start(machine)
    await rig.send(live, "SPAWN")
    await rig.send(live, "SEND", to="kid-1", what="ADD")
    data = live.dump()
    live.stop()
    with pytest.raises(SnapshotError, match="spawned"):
        rig.kind.from_snapshot(data, machine)
    again = await rig.restore(data, machine, restart_services=True)
    assert again.actors["m:kid-1"].context["n"] == 1
    await rig.send(again, "SEND", to="kid-1", what="END")
    assert again.context["ends"] == [{"n": 1}]


async def test_an_actor_whose_source_has_no_name_cannot_be_restored(rig: Rig) -> None:
    chart, actions = spawner(src=create_machine(child(), KID))
    machine = create_machine(chart, actions)
    live = await rig.start(machine)
    await rig.send(live, "SPAWN")
    data = live.dump()
    again = rig.kind.from_snapshot(data, machine, restart_services=True)
    with pytest.raises(ChartError, match="restored"):
        again.start()
    assert again.status == "uninitialized" and again.actors == {}


async def test_a_nested_snapshot_is_checked_and_a_bad_one_fails_the_child(rig: Rig) -> None:
    machine = create_machine(parent(), logic())
    live = await rig.start(machine)
    data = live.dump()
    data["children"]["kid"]["snapshot"]["value"] = "nowhere"
    again = await rig.restore(data, machine, restart_services=True)
    assert again.current_state_ids == {"m.bad"}
    assert isinstance(again.context["got"], SnapshotError)


# Bounds


async def test_machines_that_spawn_themselves_come_to_an_end(rig: Rig) -> None:
    box: list[Any] = []

    def bomb(scope: Any, context: Any, event: Any, action: Any) -> None:
        scope.spawn("self")

    chart = {"id": "m", "initial": "a", "entry": "bomb", "states": {"a": {}}}
    made = MachineLogic(actions={"bomb": bomb})
    box.append(create_machine(chart, made))
    made.services["self"] = box[0]
    live = await rig.start(box[0])
    assert live.status == "error" and "too many child machines" in str(live.error)
    assert live.actors == {}


async def test_no_more_than_max_queue_children_live(rig: Rig) -> None:
    chart, actions = spawner(actionErrorPolicy="rollback")
    live = await rig.start(chart, actions, max_queue=5)
    for n in range(5):
        await rig.send(live, "SPAWN", id=f"x-{n}")
    assert len(live.actors) == 5
    await rig.send(live, "SPAWN", id="kid-1")
    assert len(live.actors) == 5 and isinstance(live.context["ends"][0], StepError)


async def test_a_ping_pong_of_parent_and_child_is_cut_off(rig: Rig) -> None:
    def pong(scope: Any, context: Any, event: Any, action: Any) -> None:
        scope.send_parent("TOLD")

    kid = create_machine(
        {"id": "k", "initial": "a", "states": {"a": {"on": {"ADD": {"actions": "pong"}}}}},
        MachineLogic(actions={"pong": pong}),
    )

    def ping(scope: Any, context: Any, event: Any, action: Any) -> None:
        scope.send_to("kid", "ADD")

    live = await rig.start(parent(), logic(kid, hear=ping), max_queue=50)
    await rig.send(live, "ADD")
    assert "followed from one" in str(live.faults[-1])
    assert (await rig.send(live, "LEAVE")).status == "taken"


async def test_a_restored_child_that_had_ended_is_reported(rig: Rig) -> None:
    machine = create_machine(parent(), logic())
    live = await rig.start(machine)
    data = live.dump()
    ended = await rig.start(create_machine(child(), KID))
    await rig.send(ended, "END")
    data["children"]["kid"]["snapshot"] = ended.dump()
    again = await rig.restore(data, machine, restart_services=True)
    assert again.current_state_ids == {"m.b"} and again.context["got"] == {"n": 0}


async def test_a_child_is_stopped_while_its_service_hangs(rig: Rig) -> None:
    release = threading.Event()
    kid = create_machine(
        {"id": "k", "initial": "a", "states": {"a": {"invoke": {"src": "hang"}}}},
        MachineLogic(services={"hang": lambda input: release.wait(20)}),
    )
    live = await rig.start(parent(after={"30": "left"}), logic(kid))
    await rig.until(lambda: live.current_state_ids == {"m.left"})
    release.set()
    await asyncio.sleep(0.01)
    assert live.current_state_ids == {"m.left"}
