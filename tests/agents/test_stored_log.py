"""The step path on a store: its log replays to the stored snapshot, compacted or not."""

from __future__ import annotations

from typing import Any

import pytest

from guardchart import create_machine
from guardchart.agents import (
    FakeModel,
    agent_logic,
    approval_event,
    execute_agent_request_sync,
    initial_agent_step,
    load_chart,
    pending_approval,
    replay,
    resolve_agent_step,
    tool,
    tool_registry,
    transition_agent_step,
)
from guardchart.errors import ReplayDivergedError, StoreConflictError
from guardchart.kernel import dump, load
from guardchart.persistence import MemoryStore, SQLiteStore

KEY = "ticket:7"


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def store(request: pytest.FixtureRequest, tmp_path: Any) -> Any:
    if request.param == "memory":
        yield MemoryStore()
    elif request.param == "sqlite":
        with SQLiteStore(tmp_path / "runs.db") as store:
            yield store
    else:
        from guardchart.persistence import PostgresStore

        with PostgresStore(request.getfixturevalue("postgres_database")) as store:
            yield store


def refund(order: int) -> str:
    """Refund an order."""
    return f"refunded order {order}"


def make_machine() -> Any:
    script = [{"tool": "refund", "args": {"order": 7}}, {"text": "On its way."}]
    model = FakeModel(script, is_async=False)
    return create_machine(
        load_chart(), agent_logic(model, tool_registry(tool(refund, side_effect=True)))
    )


class Host:
    """A durable engine in thirty lines: each step is one compare-and-swap with its entry."""

    def __init__(self, store: Any, machine: Any) -> None:
        self.store, self.machine = store, machine
        self.rev = 0

    def keep(self, step: Any) -> Any:
        given = {"events": [step.entry], "now": int(step.entry["at_ms"])}
        snapshot = dump(step.snapshot)
        if self.rev == 0:
            self.rev = self.store.create(KEY, snapshot, **given)
        else:
            self.rev = self.store.commit(KEY, self.rev, snapshot, **given)
        return step

    def perform(self, step: Any) -> Any:
        while step.requests:
            for request in step.requests:
                output = execute_agent_request_sync(request)
                step = self.keep(resolve_agent_step(self.machine, step, request, output))
        return step

    def ask(self) -> Any:
        options = {"ledger": self.store.ledger, "scope": KEY}
        step = self.keep(initial_agent_step(self.machine, **options))
        start = {"type": "START", "prompt": "refund order 7"}
        return self.perform(self.keep(transition_agent_step(self.machine, step, start, **options)))

    def approve(self, step: Any) -> Any:
        event = approval_event(pending_approval(step.snapshot.context))
        options = {"ledger": self.store.ledger, "scope": KEY}
        return self.perform(self.keep(transition_agent_step(self.machine, step, event, **options)))


def test_a_replay_of_the_stored_log_equals_the_stored_snapshot(store: Any) -> None:
    host = Host(store, make_machine())
    host.approve(host.ask())
    stored = load(host.machine, store.load(KEY).snapshot, trusted=True)
    assert stored.status == "done" and stored.context["result"] == "On its way."
    assert replay(host.machine, store.events(KEY)) == stored


def test_a_log_compacted_on_the_way_replays_to_the_same_snapshot(store: Any) -> None:
    host = Host(store, make_machine())
    step = host.ask()
    store.compact(KEY, now=0)
    assert len(store.events(KEY)) == 1
    host.approve(step)
    stored = load(host.machine, store.load(KEY).snapshot, trusted=True)
    assert stored.status == "done"
    assert replay(host.machine, store.events(KEY)) == stored


def test_a_second_host_of_one_run_is_told_before_its_step_counts(store: Any) -> None:
    host = Host(store, make_machine())
    step = host.ask()
    other = Host(store, host.machine)
    other.rev = host.rev
    host.approve(step)
    with pytest.raises(StoreConflictError):
        other.keep(transition_agent_step(other.machine, step, "HUMAN_REJECTED"))


@pytest.mark.parametrize("base", [{}, {"snapshot": 5}, {"snapshot": {"version": 1}}])
def test_a_compacted_log_whose_snapshot_is_none_is_refused(base: Any) -> None:
    with pytest.raises(ReplayDivergedError, match="entry 0"):
        replay(make_machine(), [{"kind": "snapshot", **base}])
