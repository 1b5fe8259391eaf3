"""In which order things happen, and what a move exits and enters: rulings K7 to K10."""

from __future__ import annotations

from typing import Any

import pytest

from guardchart.errors import StepError
from guardchart.kernel import (
    ScheduleTimer,
    Send,
    StartService,
    StopService,
    create_machine,
    done,
    initial_transition,
    transition,
)
from tests.kernel.drive import Driver, leaf, note_event, raising


def test_exits_run_inside_out_then_actions_then_entries_outside_in_k7() -> None:
    def branch(name: str, go: dict[str, Any] | None = None) -> dict[str, Any]:
        inner = leaf(name=name + "1", **({"on": {"GO": go}} if go else {}))
        return leaf(name=name, initial="one", states={"one": inner})

    chart = Driver({"initial": "a", "states": {"a": branch("a", {"target": "#m.b",
                    "actions": "go"}), "b": branch("b")}})  # fmt: skip
    chart.send("GO")
    assert chart.seen == ["-a1", "-a", "go", "+b", "+b1"]


def test_services_and_timers_of_a_state_left_in_the_same_macrostep_never_start_k7() -> None:
    chart = Driver({
        "initial": "a",
        "states": {
            "a": {"on": {"GO": "b"}},
            "b": {"invoke": {"src": "work"}, "after": {"10": "a"}, "always": "c"},
            "c": {"invoke": {"id": "w", "src": "work"}, "after": {"10": "a"}},
        },
    })  # fmt: skip
    chart.send("GO")
    assert chart.effects == (ScheduleTimer("10.m.c"), StartService("w", "work", "m.c"))
    assert set(chart.snapshot.children) == {"w"}


def test_what_an_exit_action_sends_comes_before_the_stop_of_its_service_k7() -> None:
    def tell(scope: Any, context: Any, event: Any, action: Any) -> None:
        scope.send_to("w", "BYE", to="somebody")

    chart = Driver({
        "initial": "a",
        "states": {"a": {"invoke": {"id": "w", "src": "work"}, "exit": "tell",
                         "on": {"GO": {"target": "b", "actions": "tell"}}}, "b": {}},
    }, actions={"tell": tell})  # fmt: skip
    chart.send("GO")
    assert [type(e) for e in chart.effects] == [Send, StopService, Send]
    assert chart.effects[0].event.payload == {"to": "somebody"}


def test_eventless_transitions_run_before_a_raised_event_k8() -> None:
    chart = Driver({
        "initial": "a",
        "states": {
            "a": {"on": {"GO": {"target": "b", "actions": "r"}}},
            "b": {"always": {"target": "c", "actions": "always"}},
            "c": {"on": {"R": {"actions": "raised"}}},
        },
    }, actions={"r": raising("R")})  # fmt: skip
    chart.send("GO")
    assert chart.seen == ["always", "raised"]


def test_raised_events_are_handled_first_in_first_out_with_their_payload_k8() -> None:
    got: list[Any] = []
    chart = Driver({
        "on": {"GO": {"actions": "r"}, "A": {"actions": "got"}, "B": {"actions": "got"}},
    }, actions={"r": lambda s, c, e, a: (s.raise_("A", n=1), s.raise_({"type": "B", "n": 2})),
                "got": lambda c, e: got.append((e.type, e.payload))})  # fmt: skip
    chart.send("GO")
    assert got == [("A", {"n": 1}), ("B", {"n": 2})]


def test_two_regions_that_raise_have_both_events_handled_k8() -> None:
    region = {"initial": "x", "states": {"x": {"on": {"GO": {"target": "y", "actions": "r"}}},
                                         "y": {}}}  # fmt: skip
    chart = Driver({"type": "parallel", "states": {"p": region, "q": region},
                    "on": {"R": {"actions": "got"}}}, actions={"r": raising("R")})  # fmt: skip
    chart.send("GO")
    assert chart.seen == ["got", "got"]


def test_initial_actions_run_whenever_initial_is_followed_k8() -> None:
    inner = {"initial": {"target": "x", "actions": "init"}, "states": {"x": {}, "y": {}},
             "entry": "in", "on": {"AGAIN": "a", "Y": ".y"}}  # fmt: skip
    chart = Driver({"initial": "z", "states": {"z": {"on": {"GO": "a", "DEEP": "a.y"}},
                                               "a": inner}})  # fmt: skip
    chart.send("GO")
    assert chart.seen == ["in", "init"]
    chart.send("AGAIN")
    assert chart.seen == ["init"]


def test_an_eventless_transition_sees_the_event_last_taken_k8() -> None:
    seen: list[str] = []
    chart = Driver({
        "initial": "a",
        "states": {"a": {"on": {"GO": "b"}}, "b": {"always": {"target": "c", "actions": "n"}},
                   "c": {}},
    }, actions={"n": note_event(seen)})  # fmt: skip
    chart.send("GO")
    assert seen == ["GO"]


def test_eventless_selection_stops_when_nothing_changed_k8() -> None:
    chart = Driver({"always": {"guard": "yes", "actions": "tick"}, "on": {"GO": {"actions": "x"}}})
    chart.send("GO")
    assert chart.seen == ["x", "tick"]


@pytest.mark.parametrize("shape", ["always", "raise"])
def test_a_macrostep_without_end_raises_and_leaves_the_snapshot_as_it_was_k9(shape: str) -> None:
    config: dict[str, Any] = {"id": "m", "context": {"n": 0}, "maxMicrosteps": 50, "initial": "a"}
    actions: dict[str, Any] = {"add": lambda c, e: {"n": c["n"] + 1}, "r": raising("R")}
    if shape == "always":
        loop: dict[str, Any] = {"always": {"guard": "go", "actions": "add"}}
    else:
        loop = {"entry": "r", "on": {"R": {"actions": ["add", "r"]}}}
    config["states"] = {"a": {"on": {"GO": "b"}}, "b": loop}

    class Logic:
        guards = {"go": lambda c, e: True}

    Logic.actions = actions  # type: ignore[attr-defined]
    machine = create_machine(config, Logic())
    snapshot, _ = initial_transition(machine)
    with pytest.raises(StepError, match="50 microsteps"):
        transition(machine, snapshot, "GO")
    assert snapshot.context == {"n": 0}
    assert snapshot.value == "a"


def test_as_many_microsteps_as_allowed_are_taken_k9() -> None:
    chart = Driver(
        {"maxMicrosteps": 5, "context": {"n": 0},
         "always": {"guard": "few", "actions": "add"}},
        guards={"few": lambda c, e: c["n"] < 5},
        actions={"add": lambda c, e: {"n": c["n"] + 1}},
    )  # fmt: skip
    assert chart.context == {"n": 5}


def test_an_atomic_self_target_runs_only_its_actions_k10() -> None:
    chart = Driver({"initial": "a", "states": {"a": leaf(name="a", on={
        "GO": {"target": "a", "actions": "x"},
        "RE": {"target": "a", "actions": "x", "reenter": True}})}})  # fmt: skip
    chart.send("GO")
    assert chart.seen == ["x"]
    chart.send("RE")
    assert chart.seen == ["-a", "x", "+a"]


def test_a_compound_self_target_resets_its_children_only_k10() -> None:
    states = {"x": leaf(name="x"), "y": leaf(name="y")}
    chart = Driver({"initial": "a", "states": {"a": leaf(name="a", initial="x", states=states,
                    on={"Y": ".y", "GO": "a"})}})  # fmt: skip
    chart.send("Y")
    chart.send("GO")
    assert chart.seen == ["-y", "+x"]


def _two_regions() -> dict[str, Any]:
    def region(name: str, on: dict[str, Any]) -> dict[str, Any]:
        return leaf(name=name, initial="x", states={
            "x": leaf(name=name + "x", on=on, after={"1000": f"#m.{name}.y"},
                      invoke={"id": "w" + name, "src": "work"}),
            "y": leaf(name=name + "y")})  # fmt: skip

    return {"type": "parallel", "states": {
        "p": region("p", {"Q": "#m.q.y", "RE": {"target": "#m.p", "reenter": True},
                          "QQ": "#m.q", "SELF": "#m.p"}),
        "q": region("q", {}),
    }}  # fmt: skip


def test_a_target_in_a_sibling_region_moves_that_region_only_k10() -> None:
    chart = Driver(_two_regions())
    timers, key = chart.snapshot.timers, chart.key("wp")
    chart.send("Q")
    assert chart.value == {"p": "x", "q": "y"}
    assert chart.seen == ["-qx", "+qy"]
    assert set(timers) - set(chart.snapshot.timers) == {"1000.m.q.x"}
    assert chart.key("wp") == key


def test_a_parallel_state_that_targets_one_region_leaves_the_others_alone_k10() -> None:
    on = {"P": ".p.y", "ALL": {"target": ".p.y", "reenter": True}}
    chart = Driver({**_two_regions(), "on": on})
    chart.send("Q")
    chart.send("P")
    assert (chart.value, chart.seen) == ({"p": "y", "q": "y"}, ["-px", "+py"])
    chart.send("ALL")
    assert chart.value == {"p": "y", "q": "x"}


def test_a_target_equal_to_the_domain_only_resets_its_children_k10() -> None:
    chart = Driver(_two_regions())
    chart.send("Q")
    chart.send("QQ")
    assert chart.seen == ["-qy", "+qx"]
    chart.send("SELF")
    assert chart.seen == ["-px", "+px"]


def test_a_region_that_reenters_itself_leaves_its_sibling_alone_k10() -> None:
    config = _two_regions()
    config["states"]["p"]["on"] = {"RE": {"target": "p", "reenter": True}}
    del config["states"]["p"]["states"]["x"]["on"]["RE"]
    chart = Driver(config)
    chart.send("Q")
    chart.send("RE")
    assert chart.value == {"p": "x", "q": "y"}
    assert chart.seen == ["-px", "-p", "+p", "+px"]


def test_an_unchanged_move_onto_the_same_states_restarts_their_services_k7() -> None:
    chart = Driver({"initial": "a", "states": {"a": {"invoke": {"id": "w", "src": "work"},
                    "on": {"RE": {"target": "a", "reenter": True}}}}})  # fmt: skip
    old = chart.key("w")
    chart.send("RE")
    assert chart.effects == (StopService("w"), StartService("w", "work", "m.a"))
    assert chart.send(done(old, 1)).status == "dropped"
