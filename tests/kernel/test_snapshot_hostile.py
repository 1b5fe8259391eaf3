"""Snapshots somebody else wrote: refused with one error and a path, or perfectly legal."""

from __future__ import annotations

import copy
import json
import math
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from guardchart.errors import SnapshotDriftError, SnapshotError
from guardchart.kernel import Machine, StateNode, create_machine
from guardchart.kernel._snapshot import dump, load, load_with_drift
from guardchart.kernel._state import Snapshot
from guardchart.kernel._step import initial_transition, transition
from tests.kernel.charts import Logic, rich, walk

CANARY = "CANARY-7f3a"


def work() -> dict[str, Any]:
    """A valid snapshot with history, a timer, a child and context, as its own copy."""
    return dump(walk(rich(), "SAY", "WORK", "NEXT", "LEAVE", "WORK"))


def fork() -> dict[str, Any]:
    return dump(walk(rich(), "FORK", "A"))


def finished() -> dict[str, Any]:
    return dump(walk(rich(), "FORK", "A", "B"))


def broken() -> dict[str, Any]:
    return dump(walk(rich(), "CRASH"))


def refusal(data: Any, machine: Machine | None = None, **how: Any) -> SnapshotError:
    with pytest.raises(SnapshotError) as caught:
        load(machine or rich(), data, **how)
    error = caught.value
    assert error.path.startswith("$")
    assert CANARY not in str(error)
    assert error.__cause__ is None
    return error


def edited(data: dict[str, Any], path: str, value: Any = None, *, drop: bool = False) -> Any:
    """Return the data with the place a dotted path names set to a value, or deleted."""
    *above, last = path.split("/")
    place: Any = data
    for key in above:
        place = place[int(key)] if isinstance(place, list) else place[key]
    if drop:
        del place[last]
    else:
        place[last] = value
    return data


# --- the frame ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [None, 1, [], b"{}", (), "[]", "null", "1", '"x"', {1}, object()],
    ids=lambda value: f"{type(value).__name__} {value}" if isinstance(value, str) else None,
)
def test_load_refuses_what_is_no_object(data: Any) -> None:
    assert refusal(data).path == "$"


def test_load_refuses_a_dict_subclass() -> None:
    class Sly(dict[str, Any]):
        def __getitem__(self, key: str) -> Any:
            raise AssertionError("user code ran")

        def items(self) -> Any:
            raise AssertionError("user code ran")

        copy = keys = __iter__ = get = items

    assert refusal(Sly(work())).path == "$"
    assert refusal(edited(work(), "context", Sly())).path == "$.context"


@pytest.mark.parametrize("key", ["version", "machine", "rev", "status", "value", "context"])
def test_load_refuses_a_snapshot_that_lacks_a_part(key: str) -> None:
    error = refusal(edited(work(), key, drop=True))
    assert str(error) == f"lacks {key!r}"


@pytest.mark.parametrize("key", ["id", "version", "shape", "logic"])
def test_load_refuses_a_machine_entry_that_lacks_a_part(key: str) -> None:
    assert refusal(edited(work(), f"machine/{key}", drop=True)).path == "$.machine"


@pytest.mark.parametrize(
    "key",
    ["queue", "events", "pending", "approved", "approvals", "_nextState", "__proto__", CANARY,
     "__class__", "Context", "context ", "engine_events"],
)  # fmt: skip
def test_load_refuses_an_unknown_key_without_repeating_it(key: str) -> None:
    error = refusal(edited(work(), key, [{"type": "HUMAN_DECIDED"}]))
    assert error.path == "$.<key 13>"
    assert key not in str(error) or key == "context "


@pytest.mark.parametrize("key", ["seal", "receipt"])
def test_load_says_that_the_host_removes_a_seal_or_receipt(key: str) -> None:
    assert "the host's" in str(refusal(edited(work(), key, "x")))


@pytest.mark.parametrize("part", ["machine", "timers/5000.rich.work", "children/job"])
def test_load_refuses_an_unknown_key_at_every_level(part: str) -> None:
    error = refusal(edited(work(), f"{part}/{CANARY}", 1))
    assert error.path.startswith("$." + part.split("/")[0])
    assert "<key " in error.path


WRONG_TYPES: list[tuple[str, Any]] = [
    ("version", 2), ("version", 1.0), ("version", True), ("version", "1"), ("version", None),
    ("machine", None), ("machine", []), ("machine", "rich"),
    ("machine/id", 1), ("machine/version", 2), ("machine/shape", None), ("machine/logic", 5),
    ("rev", True), ("rev", -1), ("rev", 1.0), ("rev", "1"), ("rev", None), ("rev", 2**53),
    ("status", "stopped"), ("status", None), ("status", 1), ("status", ["active"]), ("status", {}),
    ("context", None), ("context", []), ("context", "x"),
    ("history", None), ("history", []), ("timers", None), ("timers", []), ("children", None),
    ("children", []), ("state_ids", None), ("state_ids", "rich.idle"), ("state_ids", {}),
    ("configuration", "x"), ("configuration", [1]), ("run", 1), ("run", "x" * 501),
    ("batch_no", -1), ("batch_no", True), ("batch_no", None), ("batch_no", 1.0),
    ("output", 1), ("error", {"type": "X", "message": ""}), ("error", "x"),
    ("timers/5000.rich.work", None), ("timers/5000.rich.work", 5),
    ("timers/5000.rich.work/due_at", None), ("timers/5000.rich.work/due_at", "5"),
    ("timers/5000.rich.work/due_at", True), ("timers/5000.rich.work/due_at", 10**400),
    ("timers/5000.rich.work/due_at", -(10**400)), ("timers/5000.rich.work", {}),
    ("children/job", None), ("children/job", {}), ("children/job/src", 1),
    ("children/job/src", CANARY), ("children/job/status", "running"),
    ("children/job/status", None), ("children/job/status", {}), ("children/job/key", 6),
    ("children/job/key", "job"), ("children/job/key", "job@"), ("children/job/key", "other@6"),
    ("children/job/key", "job@7"), ("children/job/key", "job@-1"), ("children/job/key", "job@+1"),
    ("children/job/key", "job@01"), ("children/job/key", "job@1.0"), ("children/job/key", "job@१"),
    ("children/job/key", "job@1\n"), ("children/job/key", "job@" + "9" * 400),
    ("children/job/key", " job@1"), ("children/job/snapshot", "x"), ("children/job/snapshot", []),
    ("children/job/spawned", True), ("children/job/spawned", 1), ("children/job/spawned", None),
    ("sends", {}), ("sends", None),
]  # fmt: skip


@pytest.mark.parametrize(("path", "value"), WRONG_TYPES, ids=lambda item: str(item)[:40])
def test_load_refuses_a_wrong_value(path: str, value: Any) -> None:
    error = refusal(edited(work(), path, value))
    assert error.path.startswith("$." + path.split("/")[0])


@pytest.mark.parametrize(("path", "value"), WRONG_TYPES, ids=lambda item: str(item)[:40])
def test_load_refuses_the_same_of_text(path: str, value: Any) -> None:
    refusal(json.dumps(edited(work(), path, value)))


# --- the configuration -------------------------------------------------------------------------

VALUES: list[Any] = [
    None, 1, True, "", [], {}, CANARY, "rich", "rich.idle", "#rich.idle", "idle.x", "work",
    "fork", {"idle": {}}, {"idle": None}, {"work": {}}, {"work": None}, {"work": "two"},
    {"work": "nowhere"}, {"work": "last"}, {"work": {"last": {}}}, {"work": {"one": {}}},
    {"work": {"two": {}}}, {"work": {"two": "deepest"}}, {"work": ["one"]},
    {"work": "one", "idle": {}}, {"work": {"one": {}, "two": "inner"}},
    {"fork": "z"}, {"fork": {}}, {"fork": {"z": "z1"}}, {"fork": {"z": "z1", "a": None}},
    {"fork": {"z": "z1", "a": "a1", "b": "b1"}}, {"fork": {"z": "z1", "b": "a1"}},
    {"fork": {"z": "z1", "a": {}}}, {"fork": {"z": {"z1": {}}, "a": "a1"}},
    {"fork": ["z1", "a1"]}, {"__proto__": {}}, {"__class__": "idle"}, {"constructor": {}},
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=str)
def test_load_refuses_a_configuration_that_is_not_legal(value: Any) -> None:
    data = dump(walk(rich()))
    del data["state_ids"]
    error = refusal(edited(data, "value", value))
    assert error.path.startswith("$.value")


@pytest.mark.parametrize(
    "ids",
    [[], ["rich"], ["rich.work"], ["rich.idle", "rich.idle"], ["rich.end"], ["idle"],
     ["rich.work.one", "rich.idle"], [None], [["rich.work.one"]], [CANARY]],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("part", ["state_ids", "configuration"])
def test_load_refuses_ids_that_disagree_with_the_value(ids: list[Any], part: str) -> None:
    assert refusal(edited(work(), part, ids)).path == f"$.{part}"


def test_load_refuses_a_status_that_the_configuration_contradicts() -> None:
    for data, status in ((work(), "done"), (fork(), "done"), (finished(), "active")):
        data["output"] = None
        data["timers"], data["children"] = {}, {}
        assert refusal(edited(data, "status", status)).path == "$.status"
    assert refusal(edited(work(), "status", "error")).path == "$.timers"
    assert refusal(edited(finished(), "status", "error")).path == "$.output"
    assert refusal(edited(broken(), "status", "active")).path == "$.error"
    assert refusal(edited(broken(), "error", None)).path == "$.error"


def test_load_refuses_a_final_state_beside_an_open_region() -> None:
    machine = create_machine(
        {
            "id": "p",
            "type": "parallel",
            "states": {
                "l": {"initial": "x", "states": {"x": {}, "y": {"type": "final"}}},
                "r": {"initial": "x", "states": {"x": {}, "y": {"type": "final"}}},
            },
        },
        Logic(),
    )
    data = dump(initial_transition(machine)[0])
    del data["state_ids"]
    open_region = {"l": "y", "r": "x"}
    assert load(machine, {**data, "value": open_region}).value == open_region
    assert refusal({**data, "value": open_region, "status": "done"}, machine).path == "$.status"
    closed = {"l": "y", "r": "y"}
    assert refusal({**data, "value": closed}, machine).path == "$.status"
    assert load(machine, {**data, "value": closed, "status": "done"}).status == "done"


@pytest.mark.parametrize(
    "error",
    [{}, {"type": "X"}, {"type": "X", "message": "", "more": 1}, {"type": 1, "message": ""},
     {"type": "X", "message": None}, {"type": "X", "message": "x" * 501}, [], "X"],
    ids=lambda error: str(error)[:30],
)  # fmt: skip
def test_load_refuses_a_malformed_error(error: Any) -> None:
    assert refusal(edited(broken(), "error", error)).path.startswith("$.error")


# --- what is pending ---------------------------------------------------------------------------


def test_load_refuses_a_timer_that_no_active_state_declares() -> None:
    for key in (CANARY, "5000.rich.idle", "5000", "work", "xstate.after.5000.rich.work"):
        data = work()
        data["timers"][key] = {"due_at": 1}
        assert refusal(data).path == "$.timers.<key 2>"
    idle = dump(walk(rich()))
    idle["timers"]["5000.rich.work"] = {"due_at": 1}
    assert refusal(idle).path == "$.timers.<key 1>"


@pytest.mark.parametrize("due_at", [math.nan, math.inf, -math.inf])
def test_load_refuses_a_delay_that_is_not_finite(due_at: float) -> None:
    data = edited(work(), "timers/5000.rich.work/due_at", due_at)
    assert "finite" in str(refusal(data))
    assert "finite" in str(refusal(json.dumps(data)))
    assert "finite" in str(refusal(json.dumps(data).replace("Infinity", "1e999")))


def test_load_refuses_a_child_that_no_active_state_invokes() -> None:
    for key in (CANARY, "work", "0.rich.work"):
        data = work()
        data["children"][key] = {"src": "job", "key": f"{key}@1", "status": "active"}
        assert refusal(data).path == "$.children.<key 2>"
    idle = dump(walk(rich()))
    idle["children"]["job"] = {"src": "job", "key": "job@1", "status": "active"}
    assert refusal(idle).path == "$.children.<key 1>"


def test_load_refuses_a_snapshot_whose_running_child_was_stripped() -> None:
    assert refusal(edited(work(), "children", {})).path == "$.children.job"
    assert refusal(edited(work(), "children", drop=True)).path == "$.children.job"


@pytest.mark.parametrize("data", [finished(), broken()], ids=["done", "error"])
def test_load_refuses_anything_pending_once_the_machine_has_ended(data: dict[str, Any]) -> None:
    timers = {"5000.rich.work": {"due_at": 1}}
    assert refusal({**data, "timers": timers}).path == "$.timers"
    children = {"job": {"src": "job", "key": "job@1", "status": "done"}}
    assert refusal({**data, "children": children}).path == "$.children"
    send = {"s": {"due_at": 1, "target": None, "event": {"type": "A", "payload": {}}}}
    assert refusal({**data, "sends": send}, trusted=True).path == "$.sends"


@pytest.mark.parametrize(
    "history",
    [{CANARY: []}, {"rich.work": ["rich.work.one"]}, {"rich.work.last": []},
     {"rich.work.last": "rich.work.one"}, {"rich.work.last": [1]},
     {"rich.work.last": ["rich.work.one", "rich.work.two"]}, {"rich.work.last": [CANARY]},
     {"rich.work.last": ["rich.idle"]}, {"rich.work.last": ["rich.work"]},
     {"rich.work.last": ["rich.work.two.inner"]}, {"rich.work.last": ["rich.work.last"]},
     {"rich.work.last": ["rich.work.one", "rich.work.one"]}, {"rich.work.all": []},
     {"rich.work.all": ["rich.work.two"]}, {"rich.work.all": ["rich.end"]},
     {"rich.work.all": ["rich.work.one", "rich.work.two.inner"]}, {"rich.work.last": None}],
    ids=str,
)  # fmt: skip
def test_load_refuses_a_history_that_could_not_have_been_recorded(history: Any) -> None:
    assert refusal(edited(work(), "history", history)).path.startswith("$.history")


def test_load_accepts_only_whole_records_of_a_parallel_state() -> None:
    region = {"initial": "x", "states": {"x": {}, "y": {}}}
    machine = create_machine(
        {
            "id": "m",
            "initial": "p",
            "states": {
                "p": {
                    "type": "parallel",
                    "on": {"OUT": "o"},
                    "states": {
                        "l": {**region, "on": {"GO": ".y"}},
                        "r": region,
                        "h": {"type": "history"},
                        "d": {"type": "history", "history": "deep"},
                    },
                },
                "o": {"on": {"BACK": "p.d"}},
            },
        },
        Logic(),
    )
    snapshot = walk(machine, "GO", "OUT")
    data = dump(snapshot)
    assert data["history"] == {"m.p.h": ["m.p.l", "m.p.r"], "m.p.d": ["m.p.l.y", "m.p.r.x"]}
    assert load(machine, data) == snapshot
    for key, ids in (
        ("m.p.h", ["m.p.l"]),
        ("m.p.d", ["m.p.l.y"]),
        ("m.p.d", ["m.p.l.y", "m.p.r"]),
        ("m.p.d", ["m.p.l.y", "m.p.l.x"]),
        ("m.p.d", ["m.p.l.y", "m.p.l.x", "m.p.r.x"]),
    ):
        assert refusal({**data, "history": {key: ids}}, machine).path == f"$.history.{key}"
    shuffled = {**data, "history": {"m.p.d": ["m.p.r.x", "m.p.l.y"]}}
    back = transition(machine, load(machine, shuffled), "BACK")[0]
    assert back.value == {"p": {"l": "y", "r": "x"}}


# --- trusted only ------------------------------------------------------------------------------


def test_load_takes_delayed_sends_from_a_trusted_snapshot_alone() -> None:
    machine = rich()
    snapshot = walk(machine, "LATER")
    data = dump(snapshot)
    assert data["sends"]
    assert refusal(data).path == "$.sends"
    assert load(machine, json.dumps(data), trusted=True) == snapshot


def test_load_takes_spawned_children_from_a_trusted_snapshot_alone() -> None:
    machine = rich()
    snapshot = walk(machine, "SPAWN")
    data = dump(snapshot)
    assert data["children"]["extra"]["spawned"] is True
    assert refusal(data).path == "$.children.<key 1>"
    assert load(machine, json.dumps(data), trusted=True) == snapshot
    data["children"]["extra"]["spawned"] = False
    assert refusal(data, trusted=True).path == "$.children.<key 1>"


@pytest.mark.parametrize(
    "send",
    [None, {}, {"due_at": 1, "target": None}, {"due_at": "1", "target": None, "event": {}},
     {"due_at": 1, "target": 1, "event": {"type": "A", "payload": {}}},
     {"due_at": 1, "target": None, "event": {"type": "", "payload": {}}},
     {"due_at": 1, "target": None, "event": {"type": "A"}},
     {"due_at": 1, "target": None, "event": {"type": "A", "payload": []}},
     {"due_at": 1, "target": None, "event": {"type": "xstate.done.actor.job", "payload": {}}},
     {"due_at": 1, "target": None, "event": {"type": "guardchart.x", "payload": {}}},
     {"due_at": 1, "target": None, "event": {"type": "A", "payload": {}}, "kind": "engine"}],
    ids=str,
)  # fmt: skip
def test_load_refuses_a_malformed_send_even_of_a_trusted_snapshot(send: Any) -> None:
    data = {**dump(walk(rich())), "sends": {"s": send}}
    assert refusal(data, trusted=True).path.startswith("$.sends.<key 1>")


def test_load_refuses_a_send_with_the_id_of_a_timer() -> None:
    send = {"due_at": 1, "target": None, "event": {"type": "A", "payload": {}}}
    data = {**dump(walk(rich())), "sends": {"5000.rich.work": send}}
    assert refusal(data, trusted=True).path == "$.sends.<key 1>"


def test_load_refuses_a_spawned_child_that_takes_an_invokes_id() -> None:
    data = edited(work(), "children/job/spawned", True)
    assert refusal(data, trusted=True).path == "$.children.job"


# --- size and depth ----------------------------------------------------------------------------


def test_load_refuses_fifty_megabytes_in_bounded_time() -> None:
    data = edited(work(), "context", {"messages": ["x" * 1_000_000] * 50})
    text = json.dumps(data)
    for hostile in (data, text, edited(work(), "context", {"messages": [0] * 25_000_000})):
        started = time.process_time()
        assert "max_bytes=1048576" in str(refusal(hostile))
        assert time.process_time() - started < 1


@pytest.mark.parametrize("place", ["context", "value", "history", "machine", "state_ids"])
@pytest.mark.parametrize("kind", ["list", "dict"])
def test_load_refuses_a_hundred_thousand_levels(place: str, kind: str) -> None:
    bottom: Any = [] if kind == "list" else {}
    value = bottom
    for _ in range(100_000):
        value = [value] if kind == "list" else {"work": value}
    data = {**work(), place: value}
    error = refusal(data)
    assert "max_depth=100" in str(error)
    assert len(str(error)) < 300
    while value:
        value = value.pop() if kind == "list" else value.pop("work")
    brackets = "[" * 100_000 + "]" * 100_000 if kind == "list" else '{"work":' * 90_000 + "1"
    frame = json.dumps({**work(), place: "HERE"})
    assert refusal(frame.replace('"HERE"', brackets)).path == "$"


def test_load_refuses_depth_in_text_that_the_parser_still_takes() -> None:
    for levels, fits in ((98, True), (99, False), (400, False)):
        frame = json.dumps({**work(), "context": {"messages": "HERE"}})
        text = frame.replace('"HERE"', "[" * levels + "]" * levels)
        if fits:
            assert load(rich(), text)
        else:
            assert "max_depth=100" in str(refusal(text))


def test_load_takes_other_caps() -> None:
    assert load(rich(), work(), max_depth=5)
    assert "max_depth=2" in str(refusal(work(), max_depth=2))
    assert "max_bytes=64" in str(refusal(work(), max_bytes=64))


# --- what loading must not do ------------------------------------------------------------------


def test_load_runs_no_code_of_the_application_and_imports_nothing() -> None:
    def forbidden(*args: Any) -> Any:
        raise AssertionError("user code ran")

    class Armed(Logic):
        def __init__(self) -> None:
            super().__init__()
            self.actions = dict.fromkeys(self.actions, lambda context, event: forbidden())
            self.guards = {"often": lambda context, event: forbidden()}
            self.services = {"job": lambda given: forbidden()}
            self.on_machine = lambda machine: None

    machine = create_machine(_chart(), Armed())
    data = work()
    data["context"]["messages"] = [{"__class__": "os.system", "py/object": "os", "lc": 1}]
    data["children"]["job"]["input"] = {"__reduce__": ["os.system", ["x"]], "src": "os:system"}
    before = set(sys.modules)
    snapshot = load(machine, data)
    assert set(sys.modules) == before
    assert snapshot.context["messages"][0]["__class__"] == "os.system"
    assert snapshot.children["job"].src == "job"


def _chart() -> dict[str, Any]:
    from tests.kernel.charts import RICH

    return RICH


def test_load_gives_the_keys_of_free_objects_no_meaning() -> None:
    data = work()
    odd = {"__proto__": {"x": 1}, "__class__": "y", "constructor": 1, "": 2, "\x00": 3}
    data["context"].update(odd)
    assert {key: load(rich(), data).context[key] for key in odd} == odd


def test_load_never_repeats_a_value_of_the_snapshot() -> None:
    for path in ("rev", "status", "value", "history", "timers", "children", "context", "run"):
        for value in (CANARY, [CANARY], {CANARY: CANARY}, {CANARY: {CANARY: [b""]}}):
            try:
                load(rich(), edited(work(), path, value))
            except SnapshotError as error:
                assert CANARY not in str(error) + repr(error) + error.path
                assert error.__cause__ is None


def test_load_with_a_forged_logic_digest_gains_nothing_that_runs() -> None:
    data = edited(work(), "machine/logic", "0" * 64)
    data["children"]["evil"] = {"src": "os.system", "key": "evil@1", "status": "active"}
    data["timers"]["evil"] = {"due_at": 0}
    snapshot, drift = load_with_drift(rich(), data)
    assert drift is not None
    assert drift.dropped == ("$.timers.<key 2>", "$.children.<key 2>")
    assert set(snapshot.children) == {"job"}
    assert set(snapshot.timers) == {"5000.rich.work"}


# --- at random ---------------------------------------------------------------------------------

SEEDS: list[Callable[[], dict[str, Any]]] = [
    work,
    fork,
    finished,
    broken,
    lambda: dump(walk(rich())),
    lambda: dump(walk(rich(), "SPAWN", "LATER", "WORK", "NEXT")),
]
NAMES = sorted(
    {CANARY, "", "job", "job@1", "active", "done", "error", "__proto__", "sends", "spawned"}
    | {"value", "context", "rev", "status", "history", "timers", "children", "due_at", "key"}
    | set(rich().nodes) | {key for node in rich().order for key in node.states}
    | set(rich().timers)
)  # fmt: skip
SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(NAMES)
    | st.text(max_size=5) | st.sampled_from([10**400, 2**64, -1, 0, 1])
)  # fmt: skip
ODD = st.sampled_from([(), (1,), b"x", {1, 2}, 1j, object(), {1: 2}, {None: 1}, range(2)])
JSON = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=3)
    ),
    max_leaves=6,
)


def places(value: Any, found: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in pairs:
        found.append((value, key))
        if isinstance(item, dict | list):
            places(item, found)
    return found


@st.composite
def mutants(draw: st.DrawFn) -> dict[str, Any]:
    data = draw(st.sampled_from(SEEDS))()
    for _ in range(draw(st.integers(1, 4))):
        spots = places(data, [])
        if not spots:
            break
        parent, key = draw(st.sampled_from(spots))
        what = draw(st.sampled_from(["set", "odd", "drop", "add", "swap", "copy"]))
        if what == "set":
            parent[key] = draw(JSON)
        elif what == "odd":
            parent[key] = copy.deepcopy(draw(ODD))
        elif what == "drop":
            del parent[key]
        elif what == "add" and isinstance(parent, dict):
            parent[draw(st.sampled_from(NAMES))] = draw(JSON)
        elif what == "swap":
            other, there = draw(st.sampled_from(spots))
            if there in other if isinstance(other, dict) else there < len(other):
                parent[key], other[there] = copy.deepcopy(other[there]), copy.deepcopy(parent[key])
        elif what == "copy":
            other, there = draw(st.sampled_from(spots))
            if there in other if isinstance(other, dict) else there < len(other):
                parent[key] = copy.deepcopy(other[there])
    return data


def assert_legal(machine: Machine, snapshot: Snapshot) -> None:
    active = set(snapshot.config.nodes)
    assert machine.root in active

    def whole(node: StateNode) -> None:
        below = [child for child in node.children if child in active]
        wanted = len(node.children) if node.type == "parallel" else min(1, len(node.children))
        assert len(below) == wanted
        assert node.type != "history"
        for child in below:
            whole(child)

    whole(machine.root)
    assert all(node.parent is None or node.parent in active for node in active)
    ended = machine.states["end"] in active
    assert snapshot.status != "done" or ended
    assert snapshot.status != "active" or not ended
    assert (snapshot.status == "error") == (snapshot.error is not None)
    timers = {timer.id for node in active for timer in node.timers}
    assert set(snapshot.timers) <= timers
    assert all(math.isfinite(timer.due_at) for timer in snapshot.timers.values())
    invokes = {invoke.id: node.id for node in active for invoke in node.invokes}
    for key, child in snapshot.children.items():
        assert child.spawned or invokes[key] == child.state_id
        assert child.key.rpartition("@")[0] == key
    for key, ids in snapshot.history.items():
        parent = machine.nodes[key].parent
        assert parent is not None
        assert all(parent.contains(machine.nodes[one]) for one in ids)
    if snapshot.status != "active":
        assert not (snapshot.timers or snapshot.children or snapshot.sends)
    json.dumps(dict(snapshot.context), allow_nan=False)


@settings(
    max_examples=400,
    deadline=2000,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(data=mutants(), trusted=st.booleans(), as_text=st.booleans())
def test_any_mutation_loads_to_a_legal_snapshot_or_is_refused_with_a_path(
    data: dict[str, Any], trusted: bool, as_text: bool
) -> None:
    machine = rich()
    given_data: Any = data
    if as_text:
        try:
            given_data = json.dumps(data)
        except (TypeError, ValueError):
            as_text = False
    try:
        snapshot = load(machine, given_data, trusted=trusted)
    except SnapshotDriftError as error:
        assert error.path.startswith("$.machine")
    except SnapshotError as error:
        assert type(error) is SnapshotError
        assert error.path.startswith("$")
        assert CANARY not in str(error)
        assert error.__cause__ is None
    else:
        assert_legal(machine, snapshot)
        again = dump(snapshot)
        assert load(machine, again, trusted=True) == snapshot
        for event in ("SAY", "NEXT", "BACK", "LEAVE", "DEEP"):
            snapshot = transition(machine, snapshot, event, now=1)[0]
            assert_legal(machine, snapshot)


@settings(max_examples=150, deadline=2000)
@given(text=st.text(max_size=200) | st.binary(max_size=200).map(lambda b: b.decode("latin-1")))
def test_any_text_is_refused_with_one_error(text: str) -> None:
    refusal(text)


@settings(max_examples=150, deadline=2000, suppress_health_check=[HealthCheck.too_slow])
@given(position=st.integers(0, 2000), piece=st.text(max_size=3), cut=st.integers(0, 3))
def test_any_damage_to_the_text_is_refused_or_harmless(position: int, piece: str, cut: int) -> None:
    text = json.dumps(work())
    position %= len(text)
    try:
        snapshot = load(rich(), text[:position] + piece + text[position + cut :])
    except SnapshotError as error:
        assert error.path.startswith("$")
    else:
        assert_legal(rich(), snapshot)
