"""DueTimerScanner: deadlines of runs nobody runs, delivered once, by any number of scanners."""

from __future__ import annotations

import threading
import time
from collections import Counter

import pytest

from guardchart import MachineLogic, create_machine
from guardchart.errors import StoreError
from guardchart.persistence import DueTimerScanner, MemoryStore, SQLiteStore, persisted

CHART = {
    "id": "desk",
    "initial": "asked",
    "context": {"n": 0},
    "states": {
        "asked": {"tags": ["waiting"], "after": {"1000": {"target": "late", "actions": "count"}}},
        "late": {"tags": ["waiting"], "after": {"1000": {"target": "over", "actions": "count"}}},
        "over": {"type": "final"},
    },
}
HOUR = 3_600_000


def desk(**logic):
    actions = {"count": lambda context, event: {"n": context["n"] + 1}}
    return create_machine(CHART, MachineLogic(actions=actions, **logic))


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def store(request, tmp_path):
    if request.param == "memory":
        yield MemoryStore()
    elif request.param == "sqlite":
        with SQLiteStore(tmp_path / "runs.db") as store:
            yield store
    else:
        from guardchart.persistence import PostgresStore

        with PostgresStore(request.getfixturevalue("postgres_database")) as store:
            yield store


def park(store, key="k", machine=None):
    with persisted(store, key, machine or desk()) as interpreter:
        assert interpreter.matches("asked")
    return store.load(key).updated_at


def test_what_is_not_due_is_left_alone(store):
    at = park(store)
    assert DueTimerScanner(store, lambda key: desk()).run_once(now=at + 900) == ((), (), {})
    assert store.load("k").rev == 1


def test_a_deadline_is_delivered_once_under_its_name(store):
    at = park(store)
    scanner = DueTimerScanner(store, lambda key: desk())
    assert scanner.run_once(now=at + 1_100).delivered == (("k", "1000.desk.asked@1"),)
    assert scanner.run_once(now=at + 1_100) == ((), (), {})
    found = store.load("k").snapshot
    assert (found["value"], found["context"]["n"]) == ("late", 1)
    assert store.events("k")[-1]["id"] == "1000.desk.asked@1"


def test_deadlines_that_follow_are_kept_in_later_rounds(store):
    at = park(store)
    scanner = DueTimerScanner(store, lambda key: desk())
    scanner.run_once(now=at + 1_100)
    assert scanner.run_once(now=at + 2_000).delivered == ()
    assert scanner.run_once(now=at + 2_200).delivered == (("k", "1000.desk.late@2"),)
    assert store.load("k").snapshot["status"] == "done"
    assert scanner.run_once(now=at + HOUR).delivered == ()


def test_many_scanners_deliver_each_deadline_once(store):
    keys = [f"k{n}" for n in range(12)]
    at = max(park(store, key) for key in keys)
    scanners = [DueTimerScanner(store, lambda key: desk(), limit=2) for _ in range(4)]
    barrier = threading.Barrier(4)
    delivered = []

    def scan(scanner):
        barrier.wait()
        while found := scanner.run_once(now=at + 1_900).delivered:
            delivered.extend(found)

    threads = [threading.Thread(target=scan, args=(each,)) for each in scanners]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert Counter(key for key, _ in delivered) == dict.fromkeys(keys, 1)
    assert all(store.load(key).snapshot["context"]["n"] == 1 for key in keys)


def test_a_second_delivery_of_a_lease_that_ended_changes_nothing(store):
    at = park(store)
    slow = DueTimerScanner(store, lambda key: desk(), lease_s=0)
    seen = []

    def machine_for_key(key):  # a scanner that sleeps here is overtaken by another one
        if not seen:
            seen.append(key)
            assert slow.run_once(now=at + 1_100).delivered
        return desk()

    late = DueTimerScanner(store, machine_for_key, lease_s=0)
    assert late.run_once(now=at + 1_100) == ((), ("k",), {})
    assert store.load("k").snapshot["context"]["n"] == 1


def test_a_run_that_fails_disturbs_no_other_and_comes_again(store):
    at = max(park(store, "good"), park(store, "bad"))
    other = create_machine({"id": "other", "initial": "a", "states": {"a": {}}})
    machines = {"good": desk(), "bad": other}
    scanner = DueTimerScanner(store, machines.get, lease_s=10)
    scan = scanner.run_once(now=at + 1_500)
    assert [key for key, _ in scan.delivered] == ["good"] and list(scan.errors) == ["bad"]
    assert scanner.run_once(now=at + 1_600).errors == {}
    machines["bad"] = desk()
    scan = scanner.run_once(now=at + 11_600)
    assert {key for key, _ in scan.delivered} == {"good", "bad"}


def test_runs_of_somebody_else_are_skipped(store):
    at = park(store)
    assert DueTimerScanner(store, lambda key: None).run_once(now=at + 1_500).skipped == ("k",)
    assert store.load("k").rev == 1


WORKING = {
    "id": "job",
    "initial": "working",
    "states": {
        "working": {
            "invoke": {"src": "work", "onDone": "over"},
            "after": {"1000": "given_up"},
        },
        "given_up": {"type": "final"},
        "over": {"type": "final"},
    },
}


def test_a_run_somebody_works_on_keeps_its_own_deadlines_for_a_while():
    store = MemoryStore()
    began, go_on = threading.Event(), threading.Event()

    def work(scope, context, event):
        began.set()
        go_on.wait(10)
        return 1

    machine = create_machine(WORKING, MachineLogic(services={"work": work}))

    def run():
        with persisted(store, "k", machine, manual_timers=True):
            pass

    worker = threading.Thread(target=run)
    worker.start()
    began.wait(10)
    at = store.load("k").updated_at
    scanner = DueTimerScanner(store, lambda key: machine)
    assert scanner.run_once(now=at + 1_500).skipped == ("k",)
    go_on.set()
    worker.join()
    assert store.load("k").snapshot["status"] == "done"


def test_a_run_whose_worker_died_is_taken_over_later():
    store = MemoryStore()
    left = []

    def work(scope, context, event):
        left.append(store.load("k").snapshot)

    machine = create_machine(WORKING, MachineLogic(services={"work": work}))
    with persisted(store, "k", machine):
        pass
    store.delete("k")
    store.create("k", left[0], now=0)  # as it was while the service ran
    due_at = left[0]["timers"]["1000.job.working"]["due_at"]
    scanner = DueTimerScanner(store, lambda key: machine, lease_s=1)
    assert scanner.run_once(now=due_at + 100).skipped == ("k",)
    scanner.run_once(now=due_at + 20_000)
    assert store.load("k").snapshot["status"] == "done"


def test_async_services_that_a_deadline_starts_run_to_their_end(store):
    async def answer(scope, context, event):
        return 42

    chart = {
        "id": "desk",
        "initial": "asked",
        "states": {
            "asked": {"tags": ["waiting"], "after": {"1000": "answering"}},
            "answering": {"invoke": {"src": "answer", "onDone": "over"}},
            "over": {"type": "final"},
        },
    }
    machine = create_machine(chart, MachineLogic(services={"answer": answer}))
    with persisted(store, "k", machine, allow_async=True):
        pass
    at = store.load("k").updated_at
    DueTimerScanner(store, lambda key: machine).run_once(now=at + 1_500)
    assert store.load("k").snapshot["value"] == "over"


def test_run_forever_goes_on_after_a_round_that_failed_and_stops_when_told():
    class Failing(MemoryStore):
        rounds = 0

        def claim_due(self, *args, **more):
            self.rounds += 1
            if self.rounds == 1:
                raise StoreError("the database is away")
            return super().claim_due(*args, **more)

    store = Failing()
    machine = create_machine(
        {
            "id": "d",
            "initial": "a",
            "states": {"a": {"tags": ["waiting"], "after": {"1": "b"}}, "b": {}},
        }
    )
    with persisted(store, "k", machine):
        pass
    stop = threading.Event()
    scanner = DueTimerScanner(store, lambda key: machine)
    worker = threading.Thread(target=scanner.run_forever, args=(0.02,), kwargs={"stop": stop})
    worker.start()
    for _ in range(250):
        if store.load("k").snapshot["value"] == "b":
            break
        time.sleep(0.02)
    stop.set()
    worker.join(10)
    assert not worker.is_alive()
    assert store.load("k").snapshot["value"] == "b" and store.rounds > 1
