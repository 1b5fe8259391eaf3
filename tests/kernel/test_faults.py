"""Raising actions and guards, callable forms, the draft, purity: ruling K17, K20 and K21."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from guardchart.errors import ChartError, StepError
from guardchart.kernel import (
    Log,
    StopService,
    action,
    create_machine,
    dump,
    initial_transition,
    transition,
)
from tests.kernel.drive import Driver


def _boom(context: Any, event: Any) -> Any:
    raise ValueError("boom")


def _faulty(policy: str, **kind: Any) -> Driver:
    go = {"target": "b", "actions": ["add", "boom", "after"], **kind}
    return Driver(
        {"actionErrorPolicy": policy, "context": {"n": 0}, "initial": "a", "states": {
            "a": {"on": {"GO": [go, {"target": "c"}]}, "invoke": {"id": "w", "src": "work"}},
            "b": {}, "c": {}}},
        actions={"boom": _boom, "add": lambda c, e: {"n": c["n"] + 1}},
        guards={"boom": _boom},
    )  # fmt: skip


def test_fail_rolls_back_stops_all_and_puts_the_machine_in_error_k17() -> None:
    chart = _faulty("fail")
    receipt = chart.send("GO")
    assert isinstance(receipt.error, ValueError)
    assert (receipt.status, receipt.changed) == ("denied", True)
    assert (chart.snapshot.status, chart.value, chart.context) == ("error", "a", {"n": 0})
    assert chart.snapshot.error == {"type": "ValueError", "message": ""}
    assert chart.effects == (StopService("w"),)


def test_rollback_leaves_the_snapshot_as_it_was_k17() -> None:
    chart = _faulty("rollback")
    before = chart.snapshot
    assert chart.send("GO").denied
    assert chart.snapshot is before
    assert chart.effects == ()


def test_continue_drops_the_rest_of_the_list_and_logs_k17() -> None:
    chart = _faulty("continue")
    receipt = chart.send("GO")
    assert receipt.status == "taken"
    assert isinstance(receipt.error, ValueError)
    assert (chart.value, chart.context, chart.seen) == ("b", {"n": 1}, [])
    assert isinstance(chart.effects[-1], Log)


@pytest.mark.parametrize("guard", ["boom", "!boom", {"type": "or", "guards": ["no", "boom"]}])
def test_a_raising_guard_never_counts_as_an_answer_k17(guard: Any) -> None:
    chart = _faulty("rollback", guard=guard)
    assert chart.send("GO").denied
    assert chart.value == "a"
    chart = _faulty("fail", guard=guard)
    chart.send("GO")
    assert chart.snapshot.status == "error"
    chart = _faulty("continue", guard=guard)
    chart.send("GO")
    assert chart.value == "c"


def test_an_awaitable_is_no_answer_of_a_guard_nor_of_an_action_k17() -> None:
    async def wait() -> bool:
        return True

    chart = Driver({"on": {"G": {"guard": "w", "actions": "x"}, "A": {"actions": "w"}}},
                   guards={"w": lambda c, e: wait()}, actions={"w": lambda c, e: wait()})  # fmt: skip
    start = chart.snapshot
    for event in ("G", "A"):
        chart.snapshot = start
        assert isinstance(chart.send(event).error, StepError)


@pytest.mark.parametrize("answer", [1, "text", [("n", 1)], {1: 2}, ("n",)])
def test_an_update_action_returns_keys_or_none_k20(answer: Any) -> None:
    chart = Driver({"on": {"GO": {"actions": "x"}}}, actions={"x": lambda c, e: answer})
    assert isinstance(chart.send("GO").error, StepError)


def test_the_form_of_an_action_is_the_first_that_binds_k20() -> None:
    got: list[Any] = []
    forms = {
        "two": lambda c, e: got.append(2),
        "three": lambda c, e, p: got.append(p),
        "four": lambda s, c, e, a: got.append((a.type, a.params, s.state_id, s.engine)),
        "star": lambda *args: got.append(len(args)),
        "declared": action(2)(lambda *args: got.append(len(args))),
    }
    chart = Driver({"on": {"GO": {"actions": [
        "two", {"type": "three", "params": 3}, {"type": "four", "params": 4}, "star",
        "declared"]}}}, actions=forms)  # fmt: skip
    chart.send("GO")
    assert got == [2, 3, ("four", 4, "m", None), 4, 2]


def test_actions_run_in_order_each_on_the_context_the_last_one_left_k20() -> None:
    chart = Driver({"context": {"n": 1}, "on": {"GO": {"actions": ["add", "draft", "add"]}}},
                   actions={"add": lambda c, e: {"n": c["n"] + 1},
                            "draft": lambda s, c, e, a: c.update(n=c["n"] * 10)})  # fmt: skip
    chart.send("GO")
    assert chart.context == {"n": 21}


def test_an_update_action_and_a_guard_get_a_read_only_context_k20() -> None:
    chart = Driver({"context": {"n": 1}, "on": {"GO": {"actions": "edit"}}},
                   actions={"edit": lambda c, e: c.update(n=2)})  # fmt: skip
    assert isinstance(chart.send("GO").error, AttributeError)


def test_an_async_action_or_guard_is_refused_and_invoke_named_k20() -> None:
    async def wait(context: Any, event: Any) -> None: ...

    for kind, config in (("actions", {"on": {"GO": {"actions": "w"}}}),
                         ("guards", {"on": {"GO": {"guard": "w"}}})):  # fmt: skip
        with pytest.raises(ChartError, match="invoke"):
            Driver(config, **{kind: {"w": wait}})


def test_a_function_without_a_fitting_signature_is_refused_with_its_path_k20() -> None:
    with pytest.raises(ChartError) as caught:
        Driver({"entry": ["ok", "one"]}, actions={"one": lambda c: None})
    assert caught.value.path == "$.entry[1]"


_EDITS: dict[str, Any] = {
    "getitem": lambda c: c["list"].append(1),
    "get": lambda c: c.get("list").append(1),
    "items": lambda c: dict(c.items())["list"].append(1),
    "values": lambda c: next(iter(c.values())).append(1),
    "star": lambda c: {**c}["list"].append(1),
    "dict": lambda c: dict(c)["list"].append(1),
    "or": lambda c: (c | {})["list"].append(1),
    "ror": lambda c: ({} | c)["list"].append(1),
    "copy": lambda c: c.copy()["list"].append(1),
    "copy.copy": lambda c: copy.copy(c)["list"].append(1),
    "pop": lambda c: c.pop("list").append(1),
    "setdefault": lambda c: c.setdefault("list", []).append(1),
    "nested": lambda c: c["deep"]["list"].append(1),
    "popitem": lambda c: c.popitem()[1]["list"].append(1),
    "iteration": lambda c: next(c[k] for k in c).append(1),
    "match": lambda c: [v.append(1) for k, v in c.items() if k == "list"],
}


@pytest.mark.parametrize("edit", sorted(_EDITS))
def test_no_way_of_reaching_a_value_of_the_draft_changes_the_old_snapshot_k21(edit: str) -> None:
    chart = Driver({"context": {"list": [0], "deep": {"list": [0]}},
                    "on": {"GO": {"actions": "edit"}}},
                   actions={"edit": lambda s, c, e, a: _EDITS[edit](c) and None})  # fmt: skip
    before = chart.snapshot
    chart.send("GO")
    assert before.context == {"list": [0], "deep": {"list": [0]}}


def test_what_a_draft_does_not_change_keeps_its_identity_k21() -> None:
    chart = Driver({"context": {"big": [1, 2], "n": 0}, "on": {"GO": {"actions": "look"}}},
                   actions={"look": lambda s, c, e, a: c.update(n=len(c["big"]))})  # fmt: skip
    big = chart.snapshot.context["big"]
    chart.send("GO")
    assert chart.snapshot.context["big"] is big
    assert chart.context["n"] == 2


@pytest.mark.parametrize(
    ("edit", "left"),
    [
        (lambda c: c.update(a=c.pop("a")), {"a": None, "b": None}),
        (lambda c: (c.pop("a"), c.update(z=None)), {"b": None, "z": None}),
        (lambda c: c.update(b=1), {"a": None, "b": 1}),
    ],
)
def test_a_draft_tells_a_key_that_came_from_one_that_went_k21(edit: Any, left: Any) -> None:
    chart = Driver({"context": {"a": None, "b": None}, "on": {"GO": {"actions": "edit"}}},
                   actions={"edit": lambda s, c, e, a: edit(c) and None})  # fmt: skip
    chart.send("GO")
    assert dict(chart.snapshot.context) == left


def test_a_value_that_cannot_be_copied_is_shared_by_the_draft_k21() -> None:
    chart = Driver({"on": {"PUT": {"actions": "put"}, "GO": {"actions": "look"}}},
                   actions={"put": lambda c, e: dict(e.payload),
                            "look": lambda s, c, e, a: c["gen"] and None})  # fmt: skip
    chart.send({"type": "PUT", "gen": (i for i in range(3))})
    assert chart.send("GO").status == "taken"


def test_check_purity_finds_an_action_that_edits_a_nested_value_k20() -> None:
    class Logic:
        actions = {"bad": lambda c, e: c["list"].append(1)}

    config = {"context": {"list": []}, "on": {"GO": {"actions": "bad"}}, "id": "m",
              "actionErrorPolicy": "rollback"}  # fmt: skip
    machine = create_machine(config, Logic(), check_purity=True)
    snapshot, _ = initial_transition(machine)
    from guardchart.kernel import step

    receipt = step(machine, snapshot, "GO")[2]
    assert "changed a value inside the context" in str(receipt.error)


_MIXED: dict[str, Any] = {
    "context": {"n": 0, "list": []},
    "type": "parallel",
    "states": {
        "p": {"initial": "x", "states": {
            "x": {"on": {"A": {"target": "y", "actions": "grow"}}, "after": {"10": "y"}},
            "y": {"on": {"B": {"target": "x", "guard": "even"}}, "invoke": {"src": "work"}},
            "h": {"type": "history"}}, "on": {"H": ".h"}},
        "q": {"initial": "x", "states": {
            "x": {"always": {"target": "y", "guard": "even"}, "on": {"A": {"actions": "grow"}}},
            "y": {"on": {"B": "x", "A": {"actions": ["grow", "raise"]}}}}},
    },
    "on": {"R": {"actions": "grow"}, "E": {"actions": "boom"}},
}  # fmt: skip


def _grow(scope: Any, context: Any, event: Any, action: Any) -> None:
    context["n"] += 1
    context["list"].append(context["n"])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(["A", "B", "H", "E", "Z", "a.b"]), max_size=12))
def test_a_step_changes_nothing_it_was_given_and_repeats_itself(events: list[str]) -> None:
    chart = Driver({**_MIXED, "actionErrorPolicy": "rollback"},
                   guards={"even": lambda c, e: c["n"] % 2 == 0},
                   actions={"grow": _grow, "boom": _boom,
                            "raise": lambda s, c, e, a: s.raise_("R")})  # fmt: skip
    for event in events:
        before = chart.snapshot
        frozen = json.dumps(dump(before))
        first = transition(chart.machine, before, event)
        second = transition(chart.machine, before, event)
        assert json.dumps(dump(before)) == frozen
        assert first == second
        chart.send(event)
        assert dump(chart.snapshot) == dump(first[0])
