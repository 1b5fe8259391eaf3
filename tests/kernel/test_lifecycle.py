"""Done, history, timers and services: rulings K11 to K16 and K19."""

from __future__ import annotations

from typing import Any

import pytest

from guardchart.errors import NotSentError, ServiceInterruptedError
from guardchart.kernel import (
    CancelTimer,
    DoneEvent,
    ScheduleTimer,
    Send,
    Spawn,
    StartService,
    StopService,
    done,
    dump,
    failed,
    fired,
    load,
    observed,
    resolve,
    restart_services,
    step,
    transition,
)
from tests.kernel.drive import Driver, leaf


def _final(**more: Any) -> dict[str, Any]:
    return {"type": "final", **more}


def test_a_final_child_raises_done_with_its_output_k11() -> None:
    got: list[Any] = []
    chart = Driver({
        "initial": "a",
        "states": {
            "a": {"initial": "x", "onDone": {"target": "b", "actions": "got"},
                  "states": {"x": {"on": {"GO": "f"}}, "f": _final(output={"n": 1})}},
            "b": {},
        },
    }, actions={"got": lambda c, e: got.append((e.type, e.data))})  # fmt: skip
    chart.send("GO")
    assert got == [("xstate.done.state.m.a", {"n": 1})]
    assert chart.value == "b"


def test_a_nested_parallel_is_done_when_all_its_regions_are_k11() -> None:
    region = {"initial": "x", "states": {"x": {"on": {"GO": "f"}}, "f": _final()}}
    slow = {"initial": "x", "states": {"x": {"on": {"LAST": "f"}}, "f": _final()}}
    got: list[Any] = []
    chart = Driver({
        "initial": "p",
        "states": {
            "p": {"type": "parallel", "onDone": {"target": "z", "actions": "got"}, "states": {
                "one": {"type": "parallel", "states": {"i": region, "j": slow,
                        "h": {"type": "history"}}},
                "two": region}},
            "z": {},
        },
    }, actions={"got": lambda c, e: got.append(e.data)})  # fmt: skip
    chart.send("GO")
    assert "p" in chart.value
    chart.send("LAST")
    assert (chart.value, got) == ("z", [None])


def test_a_parallel_with_a_final_child_and_an_open_region_stays_active_k11() -> None:
    region = {"initial": "x", "states": {"x": {"on": {"GO": "f"}}, "f": _final()}}
    chart = Driver({"type": "parallel", "states": {"end": _final(), "open": region}})
    assert chart.snapshot.status == "active"
    chart.send("GO")
    assert chart.snapshot.status == "done"


def test_a_done_machine_runs_all_exit_actions_stops_all_and_has_an_output_k11() -> None:
    chart = Driver({
        **leaf(name="root"), "initial": "a", "output": lambda c, e: {"from": e.data},
        "invoke": {"id": "w", "src": "work"}, "after": {"50": {}},
        "states": {"a": {"on": {"GO": "f"}}, "f": leaf(name="f", type="final", output=7)},
    })  # fmt: skip
    chart.send("GO")
    assert chart.seen == ["+f", "-f", "-root"]
    assert chart.effects == (StopService("w"), CancelTimer("50.m"))
    assert (chart.snapshot.status, chart.snapshot.output) == ("done", {"from": 7})
    assert chart.value == "f"


def test_without_an_output_of_its_own_the_machine_has_the_final_states_k11() -> None:
    chart = Driver({"initial": "a", "states": {"a": {"on": {"GO": "f"}},
                    "f": _final(output=[1])}})  # fmt: skip
    chart.send("GO")
    assert chart.snapshot.output == [1]


def test_a_done_snapshot_takes_nothing_k12() -> None:
    chart = Driver({"initial": "f", "states": {"f": _final()}, "on": {"*": {"actions": "x"}}})
    before = chart.snapshot
    for event in ("GO", done("w@1"), fired("1.m")):
        assert chart.send(event).status == "dropped"
        assert chart.snapshot is before


def _history(kind: str, **more: Any) -> dict[str, Any]:
    deep = {"initial": "p", "states": {"p": {"on": {"IN": "q"}}, "q": {}}}
    return {
        "initial": "a",
        "states": {
            "a": {"initial": "one", "on": {"OUT": "b"}, "states": {
                "one": {"on": {"NEXT": "two"}}, "two": deep,
                "h": {"type": "history", "history": kind, **more}}},
            "b": {"on": {"BACK": "a.h"}},
        },
    }  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "expected"), [("shallow", {"a": {"two": "p"}}), ("deep", {"a": {"two": "q"}})]
)
def test_history_restores_what_was_active_also_after_json_k13(kind: str, expected: Any) -> None:
    chart = Driver(_history(kind))
    for event in ("NEXT", "IN", "OUT"):
        chart.send(event)
    chart.snapshot = load(chart.machine, dump(chart.snapshot))
    chart.send("BACK")
    assert chart.value == expected


def test_history_without_a_record_enters_its_target_else_the_default_k13() -> None:
    for more, expected in (({}, "one"), ({"target": "two"}, {"two": "p"})):
        chart = Driver({**_history("shallow", **more), "initial": "b"})
        chart.send("BACK")
        assert chart.value == {"a": expected}


def test_a_history_target_sees_the_record_of_its_own_exit_k13() -> None:
    config = _history("deep")
    config["states"]["a"]["on"]["RE"] = {"target": ".h", "reenter": True}
    chart = Driver(config)
    for event in ("NEXT", "IN", "RE"):
        chart.send(event)
    assert chart.value == {"a": {"two": "q"}}


def test_restoring_the_source_through_history_exits_and_enters_it_k13() -> None:
    chart = Driver({"initial": "a", "states": {
        "a": {"initial": "x", "on": {"OUT": "b"}, "states": {
            "x": leaf(name="x", on={"H": "h"}), "h": {"type": "history"}}},
        "b": {"on": {"IN": "a"}}}})  # fmt: skip
    for event in ("OUT", "IN", "H"):
        chart.send(event)
    assert chart.seen == ["-x", "+x"]


def test_history_enters_no_state_that_was_not_left_k13() -> None:
    inner = leaf(
        name="in",
        initial="x",
        states={"x": leaf(name="x", on={"Y": "y"}), "y": leaf(name="y", on={"H": "#m.a.h"})},
    )
    chart = Driver({"initial": "a", "states": {
        "a": {"initial": "in", "on": {"OUT": "b"}, "states": {
            "in": inner, "h": {"type": "history", "history": "deep"}}},
        "b": {"on": {"IN": "a"}}}})  # fmt: skip
    for event in ("OUT", "IN", "Y", "H"):
        chart.send(event)
    assert chart.seen == ["-y", "+x"]


def test_a_timer_is_set_on_entry_cancelled_on_exit_and_fires_once_k14() -> None:
    chart = Driver({
        "initial": "a", "context": {"n": 3},
        "states": {"a": {"on": {"GO": "b"}, "after": {
            "1000": [{"guard": "no", "target": "c"}, {"target": "b"}], "PT1.5S": "c",
            "later": "c"}}, "b": {}, "c": {}},
    }, now=10_000, delays={"later": lambda c, e: c["n"] * 10})  # fmt: skip
    due = {key: timer.due_at for key, timer in chart.snapshot.timers.items()}
    assert due == {"1000.m.a": 11_000, "PT1.5S.m.a": 11_500, "later.m.a": 10_030}
    assert chart.effects == tuple(ScheduleTimer(key) for key in due)
    start = chart.snapshot
    chart.send(fired("1000.m.a"))
    assert chart.value == "b"
    assert chart.effects == (CancelTimer("PT1.5S.m.a"), CancelTimer("later.m.a"))
    assert chart.send(fired("1000.m.a")).status == "dropped"
    chart.snapshot = load(chart.machine, dump(start))
    chart.send(fired("later.m.a"))
    assert chart.value == "c"


def test_what_a_timer_brings_is_the_payload_of_its_event_k14() -> None:
    got: list[Any] = []
    chart = Driver({"after": {"5": {"actions": "got"}}},
                   actions={"got": lambda c, e: got.append((e.type, e.payload))})  # fmt: skip
    chart.send(fired("5.m", {"late": True}))
    assert got == [("xstate.after.5.m", {"late": True})]


def test_a_fired_timer_is_settled_also_when_its_guard_refuses_k14() -> None:
    chart = Driver({"after": {"5": {"guard": "no", "actions": "x"}}})
    rev = chart.snapshot.rev
    assert chart.send(fired("5.m")).denied
    assert (chart.snapshot.rev, dict(chart.snapshot.timers)) == (rev + 1, {})


@pytest.mark.parametrize("delay", [-1, float("nan"), float("inf"), True, "soon", None])
def test_a_delay_that_is_none_is_a_fault_k14(delay: Any) -> None:
    chart = Driver({"initial": "a", "states": {"a": {"on": {"GO": "b"}}, "b": {"after": {"d": "a"}}}},
                   delays={"d": lambda c, e: delay})  # fmt: skip
    assert chart.send("GO").error is not None
    assert chart.snapshot.status == "error"


def test_a_delayed_send_waits_in_the_snapshot_and_comes_back_as_its_event_k14() -> None:
    def later(scope: Any, context: Any, event: Any, action: Any) -> None:
        scope.send_after(50, {"type": "PING", "n": 1}, id="p")

    chart = Driver({"on": {"GO": {"actions": "later"}, "NO": {"actions": "cancel"},
                           "PING": {"actions": "got"}}}, now=100,
                   actions={"later": later, "cancel": lambda s, c, e, a: s.cancel("p")})  # fmt: skip
    chart.send("GO")
    assert chart.snapshot.sends["p"].due_at == 150
    waiting = chart.snapshot
    chart.send(fired("p"))
    assert (chart.seen, dict(chart.snapshot.sends)) == (["got"], {})
    chart.snapshot = waiting
    chart.send("NO")
    assert chart.send(fired("p")).status == "dropped"


def _service(**more: Any) -> dict[str, Any]:
    return {
        "initial": "idle",
        "states": {
            "idle": {"on": {"GO": "busy"}},
            "busy": {"invoke": {"id": "w", "src": "work", "input": {"n": 1}, **more},
                     "on": {"STOP": "idle"}},
            "ok": {}, "bad": {},
        },
    }  # fmt: skip


def test_a_completion_has_to_carry_the_key_of_the_step_that_started_it_k15() -> None:
    chart = Driver(_service(onDone="ok"))
    chart.send("GO")
    assert chart.effects == (StartService("w", "work", "m.busy"),)
    child = chart.snapshot.children["w"]
    assert (child.key, child.input, child.status) == (f"w@{chart.snapshot.rev}", {"n": 1}, "active")
    first = child.key
    chart.send("STOP")
    chart.send("GO")
    before = chart.snapshot
    assert chart.send(done(first, 1)).status == "dropped"
    assert chart.snapshot is before
    chart.send(done(chart.key("w"), 1))
    assert chart.value == "ok"
    assert dict(chart.snapshot.children) == {}


def test_guards_and_actions_see_one_done_event_with_its_node_k15() -> None:
    seen: list[Any] = []
    chart = Driver(_service(onDone={"guard": "look", "target": "ok", "actions": "look"}),
                   guards={"look": lambda c, e: seen.append(e) or True},
                   actions={"look": lambda c, e: seen.append(e)})  # fmt: skip
    chart.send("GO")
    report = done(chart.key("w"), {"x": 1})
    expected = resolve(chart.snapshot, report)
    chart.send(report)
    assert [e is expected for e in seen] == [True, True]
    assert isinstance(expected, DoneEvent)
    assert (expected.src, expected.invoke_id, expected.error) == ("work", "w", None)
    assert expected.node is chart.machine.nodes["m.busy"]
    assert (expected.data, expected.payload) == ({"x": 1}, {"data": {"x": 1}})


def test_settle_changes_the_context_before_guards_look_on_done_and_error_k15() -> None:
    def work(given: Any) -> Any: ...

    work.settle = lambda context, outcome: {"spent": context["spent"] + 5}  # type: ignore[attr-defined]
    for outcome, target in ((done, "ok"), (failed, "bad")):
        chart = Driver({**_service(onDone={"guard": "charged", "target": "ok"},
                                   onError={"guard": "charged", "target": "bad"}),
                        "context": {"spent": 0}}, services={"work": work},
                       guards={"charged": lambda c, e: c["spent"] == 5})  # fmt: skip
        chart.send("GO")
        chart.send(outcome(chart.key("w"), RuntimeError()))
        assert (chart.value, chart.context) == (target, {"spent": 5})


def test_an_unhandled_service_error_puts_the_machine_in_error_k16() -> None:
    for error, message in ((ValueError("secret"), ""), (NotSentError("ours"), "ours")):
        chart = Driver(_service(onDone="ok"))
        chart.send("GO")
        receipt = chart.send(failed(chart.key("w"), error))
        assert chart.snapshot.status == "error"
        assert chart.snapshot.error == {"type": type(error).__name__, "message": message}
        assert receipt.error is error


def test_a_handler_or_a_wildcard_takes_a_service_error_k16() -> None:
    chart = Driver(_service(onError="bad"))
    chart.send("GO")
    chart.send(failed(chart.key("w"), ValueError()))
    assert chart.value == "bad"
    chart = Driver({**_service(), "on": {"*": {"actions": "star"}}})
    chart.send("GO")
    chart.send(failed(chart.key("w"), ValueError()))
    assert (chart.seen, chart.snapshot.status) == (["star"], "active")


def test_a_childs_new_snapshot_is_an_event_that_settles_nothing_k15() -> None:
    chart = Driver(_service(onSnapshot={"actions": "look"}))
    chart.send("GO")
    chart.send(observed(chart.key("w"), {"n": 1}))
    assert (chart.seen, chart.snapshot.children["w"].status) == (["look"], "active")


def test_restarting_is_a_step_so_old_keys_die_k19() -> None:
    chart = Driver(_service(onDone="ok"))
    chart.send("GO")
    restored = load(chart.machine, dump(chart.snapshot))
    old = restored.children["w"].key
    again, effects = restart_services(chart.machine, restored)
    assert effects == (StartService("w", "work", "m.busy"),)
    assert again.rev == restored.rev + 1
    assert transition(chart.machine, again, done(old, 1))[0] is again


def test_an_interrupted_service_is_an_error_the_chart_can_handle_k19() -> None:
    chart = Driver(_service(onError="bad"))
    chart.send("GO")
    chart.send(failed(chart.key("w"), ServiceInterruptedError()))
    assert chart.value == "bad"


def test_a_done_child_stays_recorded_until_its_state_is_left_k19() -> None:
    chart = Driver(_service())
    chart.send("GO")
    chart.send(done(chart.key("w"), 1))
    assert chart.snapshot.children["w"].status == "done"
    assert restart_services(chart.machine, chart.snapshot) == (chart.snapshot, ())
    chart.send("STOP")
    assert (dict(chart.snapshot.children), chart.effects) == ({}, ())


def test_a_spawned_child_outlives_states_and_leaves_the_table_when_it_settles_k19() -> None:
    got: list[Any] = []
    chart = Driver({"on": {"GO": {"actions": "spawn"}, "xstate.done.actor.*": {"actions": "got"}}},
                   actions={"spawn": lambda s, c, e, a: s.spawn("work", input=1),
                            "got": lambda c, e: got.append((e.src, e.data))})  # fmt: skip
    chart.send("GO")
    chart.send("GO")
    assert chart.effects == (Spawn("work-2", "work", 1),)
    chart.send(done(chart.key("work-1"), 9))
    assert got == [("work", 9)]
    assert set(chart.snapshot.children) == {"work-2"}


def test_host_fields_are_carried_along_by_every_kind_of_step_k15() -> None:
    chart = Driver(
        {**_service(onDone="ok"), "on": {"T": {"actions": "x"}, "B": {"target": ".bad"}}}
    )
    chart.snapshot = chart.snapshot.replace(run="r1", batch_no=4)
    for event in ("T", "GO", lambda: done(chart.key("w"), 1), "B"):
        chart.send(event() if callable(event) else event)
        assert (chart.snapshot.run, chart.snapshot.batch_no) == ("r1", 4)


def test_a_live_payload_need_not_be_json() -> None:
    thing = object()
    got: list[Any] = []
    chart = Driver({"on": {"GO": {"actions": "got"}}},
                   actions={"got": lambda c, e: got.append(e.payload["thing"])})  # fmt: skip
    chart.send({"type": "GO", "thing": thing})
    assert got == [thing]
    assert step(chart.machine, chart.snapshot, "X")[1] == ()


def test_a_send_to_a_stopped_service_is_only_an_effect_k7() -> None:
    chart = Driver({"initial": "a", "states": {"a": {"invoke": {"id": "w", "src": "work"},
                    "on": {"GO": {"target": "b", "actions": "tell"}}}, "b": {}}},
                   actions={"tell": lambda s, c, e, a: s.send_to("w", "LATE")})  # fmt: skip
    chart.send("GO")
    assert [type(e) for e in chart.effects] == [StopService, Send]
