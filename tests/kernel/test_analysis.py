"""What may happen next, what is on, what can never be reached, and how a chart is drawn."""

from __future__ import annotations

from typing import Any

import pytest

from guardchart.errors import ChartError, StepError
from guardchart.kernel._analysis import (
    accepted_events,
    active_nodes,
    can,
    get_meta,
    has_tag,
    matches,
    reachable,
    to_mermaid,
    unreachable,
)
from guardchart.kernel._compile import Machine, create_machine
from guardchart.kernel._snapshot import dump, load
from guardchart.kernel._step import initial_transition, step
from tests.kernel.charts import RICH, rich, walk


class Guards:
    def __init__(self, **guards: Any) -> None:
        self.guards = guards
        self.actions = {"act": lambda context, event: None}
        self.services: dict[str, Any] = {}
        self.delays: dict[str, Any] = {}


def chart(on: dict[str, Any], logic: Any = None, **root: Any) -> Machine:
    config = {"id": "m", "initial": "a", "states": {"a": {"on": on}, "b": {}}, **root}
    return create_machine(config, logic if logic is not None else Guards())


# --- what is on --------------------------------------------------------------------------------


def test_active_nodes_are_in_document_order() -> None:
    snapshot = walk(rich(), "FORK")
    assert [node.id for node in active_nodes(snapshot)] == [
        "rich", "rich.fork", "rich.fork.z", "rich.fork.z.z1", "rich.fork.a", "apple",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "state",
    [
        "fork", "fork.z", "fork.z.z1", "fork.a.a1", "rich.fork", "#rich.fork", "apple", "#apple",
        "rich", {"fork": {"z": "z1"}}, {"fork": {"z": "z1", "a": "a1"}}, {"fork": {}}, {},
    ],
    ids=str,
)  # fmt: skip
def test_matches_an_active_state_by_id_path_or_value(state: Any) -> None:
    assert matches(walk(rich(), "FORK"), state)


@pytest.mark.parametrize(
    "state",
    [
        "idle", "fork.z.z2", "z", "nowhere", "", "fork.", "rich.fork.a.a1", {"fork": {"z": "z2"}},
        {"fork": {"z": "z1", "b": {}}}, {"idle": {}}, {"fork": 1}, "work.last",
    ],
    ids=str,
)  # fmt: skip
def test_matches_nothing_that_is_not_active(state: Any) -> None:
    assert not matches(walk(rich(), "FORK"), state)


def test_has_tag_asks_every_active_state() -> None:
    assert has_tag(walk(rich()), "resting")
    assert not has_tag(walk(rich(), "WORK"), "resting")


def test_get_meta_is_by_id_and_only_of_active_states_that_have_one() -> None:
    assert get_meta(walk(rich())) == {}
    found = get_meta(walk(rich(), "WORK"))
    assert list(found) == ["rich.work"]
    assert found["rich.work"]["tools"][0] == "search"


# --- events ------------------------------------------------------------------------------------


def test_accepted_events_are_in_document_order_without_the_engines() -> None:
    assert accepted_events(walk(rich(), "WORK")) == ("SAY", "COUNT", "CRASH", "LEAVE", "NEXT")


def test_accepted_events_may_be_asked_for_by_name_where_a_wildcard_takes_them() -> None:
    snapshot = initial_transition(chart({"say.*": {"actions": "act"}}))[0]
    assert accepted_events(snapshot) == ()
    asked = ("say.hi", "sing", "say.hi", "xstate.init")
    assert accepted_events(snapshot, types=asked) == ("say.hi",)


def test_accepted_events_of_a_finished_machine_are_none() -> None:
    assert accepted_events(walk(rich(), "FORK", "A", "B")) == ()
    assert accepted_events(walk(rich(), "CRASH")) == ()


def test_accepted_events_do_not_evaluate_guards() -> None:
    def never(context: Any, event: Any) -> bool:
        raise AssertionError

    machine = chart({"GO": {"target": "b", "guard": "no"}}, Guards(no=never))
    assert accepted_events(initial_transition(machine)[0]) == ("GO",)


@pytest.mark.parametrize(
    ("on", "accepted"),
    [
        ({"GO": {}}, False),
        ({"GO": None}, False),
        ({"GO": {"actions": []}}, False),
        ({"GO": []}, False),
        ({"GO": [{"guard": "ok"}, {"target": "b"}]}, True),
        ({"GO": [{}, {"target": "b"}]}, False),
        ({"GO": {"guard": "ok"}}, False),
        ({"*": "b"}, True),
        ({"GO": {}, "*": "b"}, False),
        ({"GO": {"guard": "ok"}, "*": "b"}, True),
    ],
    ids=str,
)
def test_accepted_events_leave_out_what_is_forbidden(on: dict[str, Any], accepted: bool) -> None:
    config = {
        "id": "m", "initial": "a", "states": {"a": {"on": on}, "b": {"on": {"GO": "a"}}},
    }  # fmt: skip
    machine = create_machine(config, Guards(ok=lambda context, event: True))
    assert ("GO" in accepted_events(initial_transition(machine)[0])) is accepted


def test_accepted_events_see_a_parent_only_behind_what_a_child_forbids() -> None:
    config = {
        "id": "m", "initial": "a", "on": {"GO": {"actions": "act"}},
        "states": {"a": {"on": {"GO": {}}}},
    }  # fmt: skip
    assert accepted_events(initial_transition(create_machine(config, Guards()))[0]) == ()


def parallel(left: Any, right: Any, own: Any) -> Machine:
    config = {
        "id": "p",
        "type": "parallel",
        "on": {"GO": own} if own is not None else {},
        "states": {
            "l": {"initial": "x", "states": {"x": {"on": {"GO": left} if left else {}}, "y": {}}},
            "r": {
                "initial": "x",
                "states": {"x": {"on": {"GO": right} if right is not None else {}}, "y": {}},
            },
        },
    }
    return create_machine(config, Guards())


@pytest.mark.parametrize(
    ("left", "right", "own", "accepted"),
    [
        ("y", None, None, True),
        (None, {}, {"actions": "act"}, False),
        (None, None, {"actions": "act"}, True),
        ("y", {}, None, True),
    ],
)
def test_accepted_events_treat_each_region_alone(
    left: Any, right: Any, own: Any, accepted: bool
) -> None:
    machine = parallel(left, right, own)
    snapshot = initial_transition(machine)[0]
    assert accepted_events(snapshot) == (("GO",) if accepted else ())
    assert can(snapshot, "GO") is accepted


def test_can_evaluates_guards_with_the_payload() -> None:
    machine = chart(
        {"GO": {"target": "b", "guard": "paid"}},
        Guards(paid=lambda context, event: event.payload.get("sum", 0) > 3),
    )
    snapshot = initial_transition(machine)[0]
    assert can(snapshot, {"type": "GO", "sum": 4})
    assert not can(snapshot, {"type": "GO", "sum": 3})
    assert not can(snapshot, "GO")


def test_can_is_false_for_what_no_step_would_take() -> None:
    snapshot = walk(rich(), "WORK")
    assert can(snapshot, "NEXT")
    for event in ("NOPE", "xstate.done.actor.job", "xstate.after.5000.rich.work", "guardchart.x"):
        assert not can(snapshot, event)
    assert not can(walk(rich(), "FORK", "A", "B"), "SAY")
    assert not can(initial_transition(chart({"GO": {}}))[0], "GO")


def test_can_changes_nothing() -> None:
    snapshot = walk(rich(), "WORK")
    before = dump(snapshot)
    assert can(snapshot, "SAY")
    assert can(snapshot, "CRASH")
    assert dump(snapshot) == before


def test_can_agrees_with_the_step() -> None:
    machine = rich()
    for path in ((), ("WORK",), ("WORK", "NEXT"), ("FORK",), ("FORK", "A"), ("WORK", "LEAVE")):
        snapshot = walk(machine, *path)
        for event in sorted(machine.event_types):
            taken = step(machine, snapshot, event)[2].status == "taken" or event == "CRASH"
            assert can(snapshot, event) is taken, (path, event)


def test_can_reports_a_guard_that_raises_as_the_policy_has_it() -> None:
    def broken(context: Any, event: Any) -> bool:
        raise LookupError("CANARY")

    on = {"GO": [{"target": "b", "guard": "broken"}, "a"]}
    with pytest.raises(StepError, match="LookupError") as caught:
        can(initial_transition(chart(on, Guards(broken=broken)))[0], "GO")
    assert "CANARY" not in str(caught.value)
    machine = chart(on, Guards(broken=broken), actionErrorPolicy="continue")
    assert can(initial_transition(machine)[0], "GO")


def test_can_needs_a_bound_machine() -> None:
    unbound = create_machine(RICH)
    snapshot = load(unbound, dump(walk(rich())))
    assert accepted_events(snapshot)
    with pytest.raises(ChartError, match="lacks logic"):
        can(snapshot, "SAY")


def test_a_machine_answers_the_same_questions() -> None:
    machine = rich()
    snapshot = walk(machine)
    assert machine.accepted_events(snapshot) == accepted_events(snapshot)
    assert machine.can(snapshot, "WORK")
    assert machine.to_mermaid(snapshot) == to_mermaid(machine, snapshot)


# --- reachability ------------------------------------------------------------------------------


def test_reachable_holds_every_state_of_a_connected_chart() -> None:
    # `last` is entered by BACK and `deepest` by DEEP; nothing points at `all`.
    assert unreachable(rich()) == ("rich.work.all",)


def test_unreachable_finds_what_nothing_points_at() -> None:
    machine = create_machine(
        {
            "id": "m",
            "initial": "a",
            "states": {
                "a": {"on": {"GO": [{"target": "b"}, {"target": "never"}]}},
                "b": {
                    "initial": "x",
                    "onDone": "later",
                    "states": {"x": {}, "y": {"type": "final"}},
                },
                "never": {},
                "later": {"initial": "z", "states": {"z": {}}},
            },
        }
    )
    assert unreachable(machine) == ("m.b.y", "m.never", "m.later", "m.later.z")
    assert reachable(machine) == {"m", "m.a", "m.b", "m.b.x"}


def test_reachable_follows_timers_services_history_and_regions() -> None:
    machine = create_machine(
        {
            "id": "m",
            "initial": "a",
            "states": {
                "a": {
                    "after": {"10": "b"},
                    "invoke": {"src": "s", "onError": "c.hist"},
                    "always": {"target": "p.r2.y", "guard": "g"},
                },
                "b": {},
                "c": {"initial": "x", "states": {"x": {}, "hist": {"type": "history"}}},
                "p": {
                    "type": "parallel",
                    "states": {
                        "r1": {"initial": "x", "states": {"x": {}, "n": {}}},
                        "r2": {"initial": "x", "states": {"x": {}, "y": {}}},
                    },
                },
            },
        }
    )
    assert unreachable(machine) == ("m.p.r1.n", "m.p.r2.x")


# --- drawing -----------------------------------------------------------------------------------

DRAWN = """\
stateDiagram-v2
    state "shop" as shop {
        state "idle" as shop_idle
        note right of shop_idle
            entry / greet
        end note
        state "buy * (tools search, book, invoke callModel)" as shop_buy {
            state "one" as shop_buy_one
            state "end" as shop_buy_end
            state "h (H*)" as shop_buy_h
            [*] --> shop_buy_one : / start
            shop_buy_one --> shop_buy_end : NEXT
            shop_buy_end --> [*]
        }
        state "both" as shop_both {
            state "l" as shop_both_l
            --
            state "r" as shop_both_r
        }
        [*] --> shop_idle
        shop_idle --> shop_buy : GO [(paid and !(late or in shop.both))] / log, act
        shop_idle --> shop_buy_h : BACK
        shop_buy --> shop_both : done
        shop_buy --> shop_idle : done 0.shop.buy
        shop_buy --> shop_idle : error 0.shop.buy [late]
        shop_buy --> shop_idle : after 5000
        shop_both --> shop_idle : [late]
    }
    [*] --> shop
    shop --> shop : ANY / act
    classDef active fill:#ffd866,stroke:#8a6d00,stroke-width:2px,color:#000000
    class shop_buy_one active
"""
SHOP: dict[str, Any] = {
    "id": "shop",
    "initial": "idle",
    "on": {"ANY": {"actions": "act"}},
    "states": {
        "idle": {
            "entry": "greet",
            "on": {
                "GO": {
                    "target": "buy",
                    "actions": ["log", "act"],
                    "guard": {
                        "type": "and",
                        "guards": [
                            "paid",
                            {
                                "type": "not",
                                "guard": {
                                    "type": "or",
                                    "guards": ["late", {"type": "stateIn", "state": "#shop.both"}],
                                },
                            },
                        ],
                    },
                },
                "BACK": "buy.h",
                "NO": {},
            },
        },
        "buy": {
            "initial": {"target": "one", "actions": "start"},
            "meta": {"tools": ["search", {"name": "book"}, 3]},
            "onDone": "both",
            "invoke": {
                "src": "callModel",
                "onDone": "idle",
                "onError": {"target": "idle", "guard": "late"},
            },
            "after": {"5000": "idle"},
            "states": {
                "one": {"on": {"NEXT": "end"}},
                "end": {"type": "final"},
                "h": {"type": "history", "history": "deep"},
            },
        },
        "both": {
            "type": "parallel",
            "always": {"target": "idle", "guard": "late"},
            "states": {"l": {}, "r": {}},
        },
    },
}


def shop_at(machine: Machine, value: Any) -> Any:
    return load(
        machine,
        {
            "version": 1,
            "machine": {
                "id": machine.id,
                "version": None,
                "shape": machine.shape,
                "logic": "earlier",
            },
            "rev": 1,
            "status": "active",
            "value": value,
            "context": {"secret": "CANARY"},
        },
    )


def test_to_mermaid_draws_labels_tools_and_active_states() -> None:
    machine = create_machine(SHOP)
    assert to_mermaid(machine, shop_at(machine, {"buy": "one"})) == DRAWN


def test_to_mermaid_marks_nothing_without_a_snapshot() -> None:
    text = to_mermaid(create_machine(SHOP))
    assert "active" not in text
    assert " * " not in text


def test_to_mermaid_marks_a_leaf_of_every_region() -> None:
    machine = create_machine(SHOP)
    text = to_mermaid(machine, shop_at(machine, {"both": {"l": {}, "r": {}}}))
    assert "    class shop_both_l,shop_both_r active\n" in text
    assert 'state "both *" as shop_both {' in text


def test_to_mermaid_shows_nothing_of_the_context() -> None:
    machine = create_machine(SHOP)
    assert "CANARY" not in to_mermaid(machine, shop_at(machine, "idle"))


def test_to_mermaid_escapes_what_mermaid_would_read_as_grammar() -> None:
    machine = create_machine(
        {
            "id": 'x"; %%',
            "initial": 'a"b',
            "states": {
                'a"b': {"on": {"X: --> Y;\n%%": {"target": "a-b", "actions": "<script>"}}},
                "a-b": {},
                "a_b": {},
            },
        }
    )
    text = to_mermaid(machine)
    assert text.splitlines() == [
        "stateDiagram-v2",
        '    state "a#34;b" as x______a_b',
        '    state "a-b" as x______a_b_2',
        '    state "a_b" as x______a_b_3',
        "    [*] --> x______a_b",
        "    x______a_b --> x______a_b_2 : X#58; --#62; Y#59;#10;#37;#37; / #60;script#62;",
    ]


@pytest.mark.parametrize("name", ["end", "state", "1", "é"])
def test_to_mermaid_gives_no_state_a_keyword_for_its_id(name: str) -> None:
    first = to_mermaid(create_machine({"id": name})).splitlines()[1]
    assert first.rpartition(" as ")[2] in {"send", "sstate", "s1", "s_"}


def test_to_mermaid_draws_a_chart_without_states_and_one_of_regions() -> None:
    assert to_mermaid(create_machine({"id": "m"})) == (
        'stateDiagram-v2\n    state "m" as m\n    [*] --> m\n'
    )
    regions = create_machine({"id": "m", "type": "parallel", "states": {"a": {}, "b": {}}})
    assert to_mermaid(regions).splitlines()[1:5] == [
        '    state "m" as m {',
        '        state "a" as m_a',
        "        --",
        '        state "b" as m_b',
    ]


def test_to_mermaid_draws_the_rich_chart() -> None:
    text = to_mermaid(rich(), walk(rich(), "WORK"))
    assert "work * (tools search, book, invoke job)" in text
    assert text == to_mermaid(rich(), walk(rich(), "WORK", "SAY"))
