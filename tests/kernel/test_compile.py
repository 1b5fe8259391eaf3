"""What is refused when a chart is compiled, with the path of its cause: ruling K22."""

from __future__ import annotations

import json
import warnings
from typing import Any

import pytest

from guardchart.errors import ChartError
from guardchart.kernel import create_machine, initial_step, initial_transition, step, transition
from guardchart.kernel._delays import literal_delay
from tests.kernel.drive import Driver, Logic

_AB: dict[str, Any] = {"initial": "a", "states": {"a": {}, "b": {}}}
_PAR: dict[str, Any] = {"type": "parallel", "states": {"p": _AB, "q": _AB}}


def _a(**more: Any) -> dict[str, Any]:
    return {"initial": "a", "states": {"a": more, "b": {}}}


_WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "unknown initial": ({"initial": "x", "states": {"a": {}}}, "$.initial"),
    "no initial": ({"states": {"a": {}}}, "$"),
    "unknown target": (_a(on={"GO": "nowhere"}), "$.states.a.on.GO.target"),
    "unknown id": (_a(on={"GO": ["b", {"target": "#x"}]}), "$.states.a.on.GO[1].target"),
    "root target without a dot": ({**_AB, "on": {"GO": "a"}}, "$.on.GO.target"),
    "unknown key": (_a(onn={}), "$.states.a"),
    "unknown transition key": (_a(on={"GO": {"taget": "b"}}), "$.states.a.on.GO"),
    "duplicate id": (_a(id="m"), "$.states.a"),
    "final with on": (_a(type="final", on={}), "$.states.a"),
    "final with children": (_a(type="final", states={"x": {}}), "$.states.a.states"),
    "targets apart": (_a(on={"GO": {"target": ["a", "b"]}}), "$.states.a.on.GO.target"),
    "history target outside": (
        {"initial": "a", "states": {"a": {"initial": "x", "states": {
            "x": {}, "h": {"type": "history", "target": "#b"}}}, "b": {"id": "b"}}},
        "$.states.a.states.h.target"),
    "eventless cycle": (
        {"initial": "a", "states": {"a": {"always": "b"}, "b": {"always": "a"}}},
        "$.states.a.always"),
    "bad wildcard": (_a(on={"a*": "b"}), '$.states.a.on["a*"]'),
    "infix wildcard": (_a(on={"a.*.b": "b"}), '$.states.a.on["a.*.b"]'),
    "empty event": (_a(on={"": "b"}), '$.states.a.on[""]'),
    "same invoke id together": (
        {"invoke": {"id": "w", "src": "s"}, **_a(invoke={"id": "w", "src": "s"})},
        "$.states.a.invoke"),
    "negative delay": (_a(after={"-1": "b"}), '$.states.a.after["-1"]'),
    "onDone without children": (_a(onDone="b"), "$.states.a.onDone"),
    "type of context": ({"context": []}, "$.context"),
    "max microsteps": ({"maxMicrosteps": 0}, "$.maxMicrosteps"),
    "policy": ({"actionErrorPolicy": "ignore"}, "$.actionErrorPolicy"),
    "stateIn of nothing": (
        _a(on={"GO": {"guard": {"type": "stateIn", "state": "#x"}}}), "$.states.a.on.GO.guard.state"),
    "template": (_a(entry={"type": "x", "params": {"v": "{{ context.v }}"}}),
                 "$.states.a.entry.params.v"),
    "assign": (_a(entry={"type": "core.assign"}), "$.states.a.entry"),
    "history initial without a target": (
        {"initial": "h", "states": {"h": {"type": "history"}, "a": {}}}, "$.initial"),
    "a dot in a key": ({"initial": "a.b", "states": {"a.b": {}}}, '$.states["a.b"]'),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(_WRONG))
def test_a_wrong_chart_is_refused_with_the_path_of_its_cause_k22(name: str) -> None:
    config, path = _WRONG[name]
    with pytest.raises(ChartError) as caught:
        create_machine({"id": "m", **config})
    assert caught.value.path == path


@pytest.mark.parametrize(
    ("where", "key", "hint"),
    [
        ("transition", "cond", "guard"), ("transition", "internal", "reenter"),
        ("transition", "in", "stateIn"), ("transition", "context", "action"),
        ("state", "data", "output"), ("state", "activities", "invoke"),
        ("state", "delimiter", "'.'"), ("state", "options", "logic"),
        ("invoke", "systemId", "id"), ("invoke", "timeout", "after"),
        ("invoke", "heartbeat", "after"), ("invoke", "retry", "onError"),
    ],
)  # fmt: skip
def test_a_key_of_other_days_is_refused_and_its_replacement_named_k22(
    where: str, key: str, hint: str
) -> None:
    extra = {key: 1}
    config = {
        "transition": _a(on={"GO": extra}),
        "state": _a(**extra),
        "invoke": _a(invoke={"src": "s", **extra}),
    }[where]
    with pytest.raises(ChartError, match=hint):
        create_machine(config)


def test_harmless_keys_are_ignored_with_one_warning_k22() -> None:
    config = {
        "id": "m", "$schema": "x", "types": {}, "profile": "xstate", "x-note": 1,
        "type": "parallel", "initial": "a", "meta": {"@statelyai.color": 1},
        "states": {"a": {"order": 1, "on": {"GO": {"order": 2, "target": "b"}}}, "b": {}},
    }  # fmt: skip
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        create_machine(config)
    assert len(caught) == 1
    for part in ("$.$schema", "$.profile", "$.x-note", "$.initial", "$.states.a.on.GO.order"):
        assert part in str(caught[0].message)


def test_all_missing_names_are_listed_when_an_unbound_machine_is_run_k22() -> None:
    config = {**_a(entry="act", on={"GO": {"guard": "!grd", "target": "b"}}, after={"dly": "b"},
                   invoke={"src": "svc"}), "id": "m"}  # fmt: skip
    machine = create_machine(config)
    assert not machine.bound
    assert set(machine.states) == {"a", "b"}
    with pytest.raises(ChartError) as caught:
        initial_transition(machine)
    for name in ("action 'act'", "guard 'grd'", "delay 'dly'", "service 'svc'", "$.states.a.entry"):
        assert name in str(caught.value)
    bound = machine.with_logic(Logic(guards={"grd": lambda c, e: True}, services={"svc": print},
                                     delays={"dly": 5}))  # fmt: skip
    assert bound.bound
    assert initial_transition(bound)[0].value == "a"


def test_a_chart_is_json_text_or_a_mapping_and_is_never_changed_k22() -> None:
    config = {"id": "m", "context": {"list": []}, **_AB, "on": {"GO": {"actions": ["add"]}}}
    text = json.dumps(config)
    logic = Logic(actions={"add": lambda s, c, e, a: c["list"].append(1)})
    machine = create_machine(config, logic)
    snapshot, _ = initial_transition(machine)
    transition(machine, snapshot, "GO")
    assert json.dumps(config) == text
    assert create_machine(text, logic).logic_digest == machine.logic_digest
    assert initial_transition(machine)[0].context == {"list": []}


@pytest.mark.parametrize(
    "text", ["{", '{"id": NaN}', '{"id": "a", "id": "b"}', "[" * 100_000, "[]"]
)
def test_text_that_is_no_chart_is_one_error_k22(text: str) -> None:
    with pytest.raises(ChartError):
        create_machine(text)


def test_digests_tell_shape_from_logic_k22() -> None:
    one = create_machine({"id": "m", **_a(on={"GO": "b"})})
    text = create_machine({"id": "m", **_a(on={"GO": "b"}, description="x")})
    other = create_machine({"id": "m", **_a(on={"GO": "b", "BACK": "a"})})
    moved = create_machine({"id": "m", "initial": "a", "states": {"a": {}, "c": {}}})
    assert one.logic_digest == text.logic_digest
    assert (one.shape == other.shape, one.logic_digest == other.logic_digest) == (True, False)
    assert one.shape != moved.shape


def test_inline_functions_and_machines_are_taken_and_enter_the_digest_k22() -> None:
    child = create_machine({"id": "child", **_AB})
    config = {"id": "m", "context": {"n": 1}, "initial": "a", "states": {"a": {
        "entry": [lambda c, e: {"n": 2}],
        "invoke": {"id": "w", "src": child, "input": lambda c, e: {"n": c["n"]}},
        "on": {"GO": {"guard": lambda c, e: True, "target": "f"}}},
        "f": {"type": "final", "output": lambda c, e: c["n"]}}}  # fmt: skip
    machine = create_machine(config)
    snapshot, _ = initial_transition(machine)
    assert (snapshot.children["w"].src, snapshot.children["w"].input) == ("child", {"n": 2})
    assert transition(machine, snapshot, "GO")[0].output == 2


def test_input_is_seen_by_entry_actions_and_fills_an_undeclared_key() -> None:
    got: list[Any] = []
    config = {"id": "m", "entry": "got"}
    logic = Logic(actions={"got": lambda c, e: got.append(e.input)})
    assert initial_transition(create_machine(config, logic), 5)[0].context == {"input": 5}
    declared = create_machine({**config, "context": {"input": 0}}, logic)
    assert initial_transition(declared, 5)[0].context == {"input": 0}
    assert got == [5, 5]


def test_a_target_is_a_sibling_a_descendant_an_id_or_a_path_below_one() -> None:
    chart = Driver({
        "initial": "a", "on": {"ROOT": ".b.y"},
        "states": {"a": {"on": {"S": "b.y", "ID": "#bee", "PATH": "#bee.y", "FULL": "#m.b.y"}},
                   "b": {"id": "bee", "initial": "x", "states": {"x": {}, "y": {}}}},
    })  # fmt: skip
    start = chart.snapshot
    for event, at in (("S", "y"), ("ID", "x"), ("PATH", "y"), ("FULL", "y"), ("ROOT", "y")):
        chart.snapshot = start
        chart.send(event)
        assert chart.value == {"b": at}


@pytest.mark.parametrize(
    ("text", "ms"),
    [("250", 250), ("1.5", 1.5), ("PT1.5S", 1500), ("P1DT2H", 93_600_000), ("P1W", 604_800_000),
     ("PT", None), ("P", None), ("P1M", None), ("modelTimeout", None)],
)  # fmt: skip
def test_delays_are_numbers_iso_durations_or_names_k14(text: str, ms: float | None) -> None:
    assert literal_delay(text) == ms


def test_the_tables_stay_bounded_under_many_configurations() -> None:
    regions = {f"r{i}": {"initial": "x", "states": {
        "x": {"on": {f"E{i}": "y", "ALL": "y"}}, "y": {"on": {f"E{i}": "x"}}}}
        for i in range(12)}  # fmt: skip
    machine = create_machine({"id": "m", "type": "parallel", "states": regions})
    snapshot = initial_step(machine)[0]
    for i in range(4_000):
        snapshot = step(machine, snapshot, f"E{(i * i + i // 7) % 12}")[0]
    cache = machine.cache
    assert len(cache._configurations) <= cache.limit
    assert sum(len(c.plans) for c in cache._filled) <= cache.limit
    snapshot = step(machine, snapshot, "ALL")[0]
    assert set(snapshot.value.values()) == {"y"}


def test_a_snapshot_of_another_machine_is_refused() -> None:
    one, two = create_machine({"id": "m", **_AB}), create_machine({"id": "m", **_AB})
    with pytest.raises(Exception, match="of machine 'm'"):
        step(two, initial_transition(one)[0], "GO")


def test_a_compiled_machine_hands_itself_to_its_logic() -> None:
    class Watching(Logic):
        def on_machine(self, machine: Any) -> None:
            self.machine = machine

    logic = Watching()
    assert create_machine({"id": "m"}, logic) is logic.machine
