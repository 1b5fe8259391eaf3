"""The kernel against XState and against a literal reading of the rulings, on drawn charts.

`make conformance` compares 2 000 charts of each family; here are a hundred fixed ones.
"""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from guardchart import Interpreter, SimulatedClock, SyncInterpreter
from guardchart.errors import StepError
from guardchart.kernel import (
    Machine,
    Snapshot,
    active_nodes,
    create_machine,
    done,
    dump,
    failed,
    fired,
    initial_step,
    load,
    matches,
    step,
)
from tests.conformance.differential import (
    EXPLAINED_SHARE,
    Unavailable,
    Walk,
    compare,
    drawn,
    full_tally,
    plain_tally,
    walk,
    xstate_home,
)
from tests.conformance.strategy import EVENTS, Family, charts
from tests.conformance.vocabulary import Logic

CHUNKS = [range(start, start + 25) for start in range(0, 100, 25)]
FAMILIES: tuple[Family, Family] = ("plain", "full")


@pytest.mark.parametrize("seeds", CHUNKS, ids=str)
def test_full_charts_step_as_the_rulings_read(seeds: range) -> None:
    assert full_tally(seeds).unexplained == ()


@pytest.mark.parametrize("seeds", CHUNKS, ids=str)
def test_plain_charts_step_as_the_rulings_read(seeds: range) -> None:
    assert [(s, walk(s, "plain").differences) for s in seeds] == [(s, []) for s in seeds]


@pytest.mark.needs_node
def test_plain_charts_step_as_in_xstate_or_a_ruling_says_why_not() -> None:
    try:
        xstate_home()
    except Unavailable as reason:
        pytest.skip(str(reason))
    found = plain_tally(range(100))
    assert found.unexplained == ()
    assert found.explained <= EXPLAINED_SHARE * found.steps


@settings(max_examples=15, deadline=None, derandomize=True, database=None)
@given(charts("full"))
def test_any_chart_that_compiles_steps_as_the_rulings_read(given_: Any) -> None:
    chart, moves = given_
    logic = Logic()
    try:
        machine = create_machine(chart, logic)
    except ValueError:
        return
    assert compare(chart, moves, machine, logic).differences == []


def test_the_reference_is_short_enough_to_be_checked_by_reading() -> None:
    text = Path(__file__).with_name("reference.py").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 300
    assert "guardchart" not in text


# Invariants of our own


def engine_event(snapshot: Snapshot, move: dict[str, Any]) -> Any:
    if "event" in move:
        return move["event"]
    if "timer" in move:
        return fired(move["timer"])
    key = snapshot.children[move["child"]].key
    return failed(key, RuntimeError("no")) if move["failed"] else done(key, 1)


def replay(machine: Machine, found: Walk) -> list[tuple[Snapshot, Any, Any]]:
    """The results of all steps; the last one is left out where it finds no end."""
    try:
        results = [initial_step(machine)]
        for move in found.moves:
            snapshot = results[-1][0]
            event = engine_event(snapshot, move)
            results.append(step(machine, snapshot, event, now=move["now"]))
    except StepError:
        results = results if "results" in locals() else []
    return results


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_leaves_the_snapshot_it_was_given_as_it_was(family: Family) -> None:
    for seed in range(12):
        found = walk(seed, family)
        machine = create_machine(found.chart, Logic())
        assert found.chart == json.loads(json.dumps(found.chart))
        results = replay(machine, found)
        dumps = [dump(result[0]) for result in results]
        contexts = [copy.deepcopy(dict(result[0].context)) for result in results]
        for number, move in enumerate(found.moves[: len(results) - 1]):
            snapshot = results[number][0]
            step(machine, snapshot, engine_event(snapshot, move), now=move["now"])
        assert [dump(result[0]) for result in results] == dumps
        assert [dict(result[0].context) for result in results] == contexts


@pytest.mark.parametrize("family", FAMILIES)
def test_a_replay_gives_the_same_snapshots_effects_and_receipts(family: Family) -> None:
    for seed in range(12):
        found = walk(seed, family)
        one, other = (replay(create_machine(found.chart, Logic()), found) for _ in range(2))
        assert [dump(result[0]) for result in one] == [dump(result[0]) for result in other]
        assert [list(map(repr, result[1])) for result in one] == [
            list(map(repr, result[1])) for result in other
        ]
        assert [result[2].status for result in one] == [result[2].status for result in other]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_run_may_be_dumped_and_loaded_after_any_step(family: Family) -> None:
    for seed in range(12):
        found = walk(seed, family)
        machine = create_machine(found.chart, Logic())
        whole = replay(machine, found)
        for number, (snapshot, _, _) in enumerate(whole):
            data = dump(snapshot)
            loaded = load(machine, json.dumps(data))
            assert dump(loaded) == data
            assert loaded.config is snapshot.config
            if number + 1 < len(whole):
                move = found.moves[number]
                event = engine_event(loaded, move)
                following = step(machine, loaded, event, now=move["now"])[0]
                assert dump(following) == dump(whole[number + 1][0])


@pytest.mark.parametrize("family", FAMILIES)
def test_pictures_and_questions_agree_with_the_configuration(family: Family) -> None:
    for seed in range(12):
        found = walk(seed, family)
        machine = create_machine(found.chart, Logic())
        for snapshot, _, _ in replay(machine, found):
            active = active_nodes(snapshot)
            leaves = [node for node in active if not node.children]
            drawing = machine.to_mermaid(snapshot)
            marked = re.findall(r"^    class (\S+) active$", drawing, re.MULTILINE)[0].split(",")
            names = ["_".join((machine.id, *node.path)) for node in leaves]
            assert marked == names
            assert all(f" as {name}" in drawing for name in names)
            assert matches(snapshot, snapshot.value)
            assert {node.id for node in machine.order if matches(snapshot, node.id)} == {
                node.id for node in active
            }


def children(logic: Logic) -> None:
    """Let services be machines: they end, fail or wait at once in either engine."""
    ends = {"initial": "a", "states": {"a": {"type": "final"}}, "output": 1}
    raises = {"initial": "a", "states": {"a": {"entry": {"type": "crash", "params": {}}}}}
    waits: dict[str, Any] = {"initial": "a", "states": {"a": {}}}
    for name, chart in (("good", ends), ("bad", raises), ("slow", waits)):
        logic.services[name] = create_machine({"id": name, **chart}, logic)


def shown(interpreter: Any, logic: Logic) -> Any:
    snapshot = interpreter.snapshot
    data = json.loads(json.dumps(dump(snapshot)))
    data.pop("run", None)
    return data, interpreter.status, list(logic.log), len(interpreter.faults)


@pytest.mark.parametrize("family", FAMILIES)
async def test_both_interpreters_go_through_the_same_snapshots(family: Family) -> None:
    for seed in range(12):
        chart, moves, *_ = next(drawn(seed, family))
        sides: list[tuple[Any, Logic, SimulatedClock]] = []
        for engine in (SyncInterpreter, Interpreter):
            logic, clock = Logic(), SimulatedClock()
            children(logic)
            machine = create_machine(chart, logic)
            sides.append((engine(machine, clock=clock), logic, clock))
        (one, one_log, one_clock), (other, other_log, other_clock) = sides
        try:
            one.start()
        except StepError:
            with pytest.raises(StepError):
                await other.start()
            continue
        await other.start()
        assert shown(one, one_log) == shown(other, other_log)
        for number, (kind, given_) in enumerate(moves):
            if kind == "fire":
                try:
                    one_clock.increment(15)
                except StepError:
                    with pytest.raises(StepError):
                        await other_clock.increment(15)
                    break
                moved = other_clock.increment(15)
                assert moved is not None
                await moved
            else:
                event = given_ if kind == "send" else {"type": EVENTS[number % len(EVENTS)]}
                receipt = one.send(event)
                assert (await other.send(event, wait=True)).status == receipt.status
            assert shown(one, one_log) == shown(other, other_log)
        one.stop()
        other.stop()
