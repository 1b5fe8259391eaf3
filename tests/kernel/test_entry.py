"""What a move enters when targets overlap or lie in another region: rulings K10 and K13."""

from __future__ import annotations

from typing import Any

from guardchart.kernel import dump, load
from tests.kernel.drive import Driver, leaf


def test_a_history_default_in_another_region_leaves_the_own_region_alone_k13() -> None:
    chart = Driver({
        "initial": "both",
        "states": {
            "past": {"type": "history", "target": "both.left.two"},
            "both": {
                "type": "parallel",
                "states": {
                    "left": {"initial": "one", "states": {"one": {}, "two": {}}},
                    "right": {
                        "initial": "one",
                        "states": {
                            "one": {"on": {"GO": "two"}},
                            "two": leaf(name="two", on={"JUMP": "#m.past"}),
                        },
                    },
                },
            },
        },
    })  # fmt: skip
    chart.send("GO")
    chart.send("JUMP")
    assert chart.value == {"both": {"left": "two", "right": "two"}}
    assert len(chart.snapshot.config.leaves) == 2
    assert chart.seen == []
    load(chart.machine, dump(chart.snapshot))


def nested(targets: list[str]) -> Driver:
    inner: dict[str, Any] = {"initial": "one", "states": {"one": {}, "two": {}}}
    chart = Driver({
        "initial": "start",
        "states": {
            "start": {"on": {"GO": {"target": targets}}},
            "work": {
                "type": "parallel",
                "states": {"left": inner, "right": inner, "past": {"type": "history", "history": "deep"}},
                "on": {"LEAVE": "start", "LEFT": ".left.two"},
            },
        },
    })  # fmt: skip
    chart.send("GO")
    return chart


def test_a_target_below_another_target_decides_what_is_entered_there_k10() -> None:
    for targets in (["work", "#m.work.left.two"], ["#m.work.left.two", "work"]):
        chart = nested(targets)
        assert chart.value == {"work": {"left": "two", "right": "one"}}
        assert len(chart.snapshot.config.leaves) == 2


def test_a_history_target_beside_one_of_its_regions_restores_that_region_k13() -> None:
    chart = nested(["#m.work.past", "#m.work.left"])
    assert chart.value == {"work": {"left": "one", "right": "one"}}
    chart.send("LEFT")
    chart.send("LEAVE")
    chart.send("GO")
    assert chart.value == {"work": {"left": "two", "right": "one"}}
    assert len(chart.snapshot.config.leaves) == 2
