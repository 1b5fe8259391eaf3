"""Which transitions an event selects: rulings K1 to K6 and K18."""

from __future__ import annotations

from typing import Any

import pytest

from guardchart.kernel import can, done
from tests.kernel.drive import Driver, raising


def test_an_exact_descriptor_beats_wildcards_and_longer_wildcards_beat_shorter_k1() -> None:
    on = {"*": {"actions": "any"}, "a.*": {"actions": "a"}, "a.b.*": {"actions": "ab"},
          "a.b": {"actions": "exact"}}  # fmt: skip
    chart = Driver({"on": on})
    for event, expected in (("a.b", "exact"), ("a.b.c", "ab"), ("a", "a"), ("ax", "any")):
        chart.send(event)
        assert chart.seen == [expected]


def test_the_first_candidate_whose_guard_passes_is_taken_k1() -> None:
    on = {"GO": [{"guard": "no", "actions": "one"}, {"guard": "yes", "actions": "two"},
                 {"actions": "three"}], "*": {"actions": "any"}}  # fmt: skip
    chart = Driver({"on": on})
    chart.send("GO")
    assert chart.seen == ["two"]


def test_a_wildcard_is_tried_when_all_guards_of_the_exact_key_refuse_k1() -> None:
    chart = Driver({"on": {"GO": {"guard": "no", "actions": "one"}, "*": {"actions": "any"}}})
    chart.send("GO")
    assert chart.seen == ["any"]


def test_a_childs_wildcard_does_not_starve_the_parents_handler_of_an_engine_event_k1() -> None:
    child: dict[str, Any] = {"on": {"*": {"actions": "star"}}}
    chart = Driver({
        "initial": "a",
        "states": {
            "a": {"initial": "b", "states": {"b": child}, "invoke": {"id": "w", "src": "work",
                  "onDone": "z"}},
            "z": {},
        },
    })  # fmt: skip
    chart.send("OTHER")
    assert chart.seen == ["star"]
    chart.send(done(chart.key("w"), 1))
    assert chart.value == "z"


def test_a_wildcard_takes_a_completion_that_nobody_claims_k1() -> None:
    chart = Driver({"invoke": {"id": "w", "src": "work"}, "on": {"*": {"actions": "star"}}})
    chart.send(done(chart.key("w"), 1))
    assert chart.seen == ["star"]


def test_a_childs_wildcard_beats_its_parents_exact_key_k2() -> None:
    chart = Driver({
        "initial": "a",
        "on": {"GO": {"actions": "parent"}},
        "states": {"a": {"on": {"*": {"actions": "child"}}}},
    })  # fmt: skip
    chart.send("GO")
    assert chart.seen == ["child"]


def _regions(**root: Any) -> dict[str, Any]:
    return {
        "type": "parallel",
        "states": {
            "p": {"initial": "x", "states": {"x": {"on": {"GO": {"actions": "p"}}}}},
            "q": {"initial": "x", "states": {"x": {"on": {"GO": {"actions": "q"}}}}},
            "r": {},
        },
        **root,
    }


def test_each_region_selects_for_itself_in_document_order_k3() -> None:
    chart = Driver(_regions(on={"GO": {"actions": "root"}, "UP": {"actions": "root"}}))
    chart.send("GO")
    assert chart.seen == ["p", "q"]
    chart.send("UP")
    assert chart.seen == ["root"]


def test_an_ancestors_always_counts_for_every_leaf_that_has_none_enabled_k3() -> None:
    chart = Driver({
        "initial": "idle",
        "states": {
            "idle": {"on": {"GO": "both"}},
            "both": {
                "type": "parallel",
                "always": {"guard": "fresh", "actions": ["shared", "age"]},
                "states": {"l": {"always": {"guard": "fresh", "actions": "own"}}, "r": {}},
            },
        },
        "context": {"age": 0},
    }, guards={"fresh": lambda c, e: c["age"] == 0},
       actions={"age": lambda c, e: {"age": 1}})  # fmt: skip
    chart.send("GO")
    assert chart.seen == ["own", "shared"]


def test_a_conflict_goes_to_the_descendant_else_to_the_earlier_region_k4() -> None:
    def region(name: str, target: str) -> dict[str, Any]:
        return {"initial": "x", "states": {"x": {"on": {"GO": {"target": target,
                "actions": name}}}}}  # fmt: skip

    chart = Driver({
        "initial": "both",
        "states": {
            "both": {"type": "parallel", "states": {"p": region("p", "#one"),
                     "q": region("q", "#two")}},
            "one": {"id": "one"}, "two": {"id": "two"},
        },
    })  # fmt: skip
    chart.send("GO")
    assert (chart.value, chart.seen) == ("one", ["p"])


def test_a_conflict_goes_to_the_descendant_also_when_it_is_selected_later_k4() -> None:
    before = {"type": "not", "guard": {"type": "stateIn", "state": "#y"}}
    chart = Driver({
        "initial": "idle",
        "states": {
            "idle": {"on": {"GO": "both"}},
            "both": {
                "type": "parallel",
                "always": {"guard": before, "target": "out", "actions": "outer"},
                "states": {
                    "l": {},  # its leaf comes first, and has only what the parent offers
                    "r": {"initial": "x", "states": {
                        "x": {"always": {"target": "y", "actions": "inner"}}, "y": {"id": "y"}}},
                },
            },
            "out": {},
        },
    })  # fmt: skip
    chart.send("GO")
    assert (chart.value, chart.seen) == ({"both": {"l": {}, "r": "y"}}, ["inner"])


@pytest.mark.parametrize("handler", [{}, {"actions": []}, None])
def test_an_empty_handler_forbids_the_event_k5(handler: Any) -> None:
    chart = Driver({
        "initial": "a", "on": {"GO": ".b"}, "states": {"a": {"on": {"GO": handler}}, "b": {}},
    })  # fmt: skip
    before = chart.snapshot
    assert not can(before, "GO")
    assert chart.send("GO").status == "forbidden"
    assert chart.snapshot is before


def test_an_empty_list_is_no_handler_k5() -> None:
    chart = Driver({
        "initial": "a", "on": {"GO": ".b"}, "states": {"a": {"on": {"GO": []}}, "b": {}},
    })  # fmt: skip
    chart.send("GO")
    assert chart.value == "b"


def test_guards_see_the_context_and_configuration_from_before_the_microstep_k6() -> None:
    def region(name: str) -> dict[str, Any]:
        go = {"guard": {"type": "and", "guards": ["zero", {"type": "stateIn", "state": "#px"}]},
              "target": "y", "actions": "add"}  # fmt: skip
        return {"initial": "x", "states": {"x": {"id": f"{name}x", "on": {"GO": go}}, "y": {}}}

    chart = Driver(
        {"type": "parallel", "context": {"n": 0}, "states": {"p": region("p"), "q": region("q")}},
        guards={"zero": lambda c, e: c["n"] == 0},
        actions={"add": lambda c, e: {"n": c["n"] + 1}},
    )
    chart.send("GO")
    assert chart.value == {"p": "y", "q": "y"}
    assert chart.context == {"n": 2}


def test_composite_guards_combine_their_parts_k6() -> None:
    def go(guard: Any) -> str:
        return Driver({"on": {"GO": {"guard": guard, "actions": "x"}}}).send("GO").status

    assert go("!no") == "taken"
    assert go({"type": "not", "guard": "yes"}) == "denied"
    assert go({"type": "or", "guards": ["no", "yes"]}) == "taken"
    assert go({"type": "and", "guards": ["yes", "no"]}) == "denied"


def test_a_refused_event_is_denied_an_unknown_one_ignored_k18() -> None:
    chart = Driver({"on": {"GO": {"guard": "no", "actions": "x"}}})
    before = chart.snapshot
    assert chart.send("GO").denied
    assert chart.send("OTHER").status == "ignored"
    assert chart.snapshot is before
    assert chart.effects == ()


def test_a_strict_chart_denies_what_no_state_knows_and_ignores_the_rest_k18() -> None:
    chart = Driver({
        "strict": True, "initial": "a", "states": {"a": {}, "b": {"on": {"GO": "a", "x.*": "a"}}},
    })  # fmt: skip
    assert chart.send("TYPO").denied
    assert chart.send("GO").status == "ignored"
    assert chart.send("x.y").status == "ignored"


@pytest.mark.parametrize("event", ["xstate.done.actor.w", "guardchart.x", "xstate.init"])
def test_an_outside_event_of_a_reserved_type_is_denied_k15(event: str) -> None:
    chart = Driver({"invoke": {"id": "w", "src": "work", "onDone": {"actions": "fooled"}},
                    "on": {"*": {"actions": "fooled"}}})  # fmt: skip
    for form in (event, {"type": event}):
        assert chart.send(form).denied
        assert chart.seen == []


def test_an_unknown_type_leaves_no_trace_in_the_tables_k1() -> None:
    chart = Driver({"on": {"*": {"actions": "x"}, "GO": {"actions": "y"}}})
    for i in range(50):
        chart.send(f"made.up.{i}")
    assert len(chart.snapshot.config.rows) == 1


def test_a_raised_event_may_not_be_of_a_reserved_type_k15() -> None:
    chart = Driver({"on": {"GO": {"actions": "r"}}}, actions={"r": raising("xstate.done.x")})
    assert chart.send("GO").error is not None
