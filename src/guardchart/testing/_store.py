"""What every store must do, as tests: subclass ``StoreConformance`` and say how to make one."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import pytest

from guardchart.errors import SnapshotTooLargeError, StoreConflictError, StoreError
from guardchart.persistence import Due, Ledger, Slot, Store

NOW = 1_700_000_000_000

_T = TypeVar("_T")
_WORKERS = 6


def snapshot(state: str = "open", *, status: str = "active", **more: Any) -> dict[str, Any]:
    """Return what a store looks at of a snapshot, and more."""
    return {"status": status, "state_ids": [f"m.{state}"], "context": {}, **more}


def timers(**due_at: float) -> dict[str, dict[str, float]]:
    """Return the ``timers`` of a snapshot."""
    return {name: {"due_at": at} for name, at in due_at.items()}


def at_once(count: int, work: Callable[[int], _T]) -> list[_T | StoreConflictError]:
    """Run ``work(0) .. work(count - 1)`` in threads that start together.

    Returns:
        Their results in order; a conflict stands for itself, another error is raised.
    """
    results: list[Any] = [None] * count
    barrier = threading.Barrier(count)

    def run(index: int) -> None:
        try:
            barrier.wait(30)
            results[index] = work(index)
        except BaseException as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, StoreConflictError):
            raise result
    return results


class WriteChecks:
    """Creating, committing, reading back."""

    def test_what_was_written_is_read_again(self, store: Store) -> None:
        written = snapshot(context={"text": "caf\u00e9 \U0001f600 \0 end", "n": [1, 2.5, None]})
        assert store.load("k") is None
        assert store.create("k", written, now=NOW) == 1
        found = store.load("k")
        assert found is not None
        assert (found.key, found.rev, found.snapshot) == ("k", 1, written)
        assert found.updated_at == NOW

    def test_a_snapshot_read_is_the_callers_own(self, store: Store) -> None:
        given = snapshot(context={"list": [1]})
        store.create("k", given, now=NOW)
        given["context"]["list"].append(2)
        found = store.load("k")
        assert found is not None
        found.snapshot["context"]["list"].append(3)
        again = store.load("k")
        assert again is not None
        assert again.snapshot["context"] == {"list": [1]}

    def test_a_second_create_is_a_conflict_and_changes_nothing(self, store: Store) -> None:
        store.create("k", snapshot("first"), events=[{"n": 1}], now=NOW)
        with pytest.raises(StoreConflictError):
            store.create("k", snapshot("second", timers=timers(t=1)), events=[{"n": 2}], now=NOW)
        found = store.load("k")
        assert found is not None
        assert found.snapshot["state_ids"] == ["m.first"]
        assert store.events("k") == [{"n": 1, "rev": 1}]
        assert store.claim_due(NOW, "me") == []

    def test_a_commit_follows_the_write_it_names_or_none(self, store: Store) -> None:
        with pytest.raises(StoreConflictError):
            store.commit("k", 1, snapshot(), now=NOW)
        assert store.load("k") is None
        store.create("k", snapshot("a"), now=NOW)
        assert store.commit("k", 1, snapshot("b"), now=NOW + 1) == 2
        for stale in (0, 1, 3):
            with pytest.raises(StoreConflictError):
                store.commit("k", stale, snapshot("c"), events=[{"n": 1}], now=NOW + 2)
        found = store.load("k")
        assert found is not None
        assert (found.rev, found.snapshot["state_ids"]) == (2, ["m.b"])
        assert (found.updated_at, store.events("k")) == (NOW + 1, [])

    @pytest.mark.parametrize("key", ["", "a\0b", "\ud800", None, 5, b"k"])
    def test_what_can_be_no_key_is_refused(self, store: Store, key: Any) -> None:
        verbs: list[Callable[[], Any]] = [
            lambda: store.load(key),
            lambda: store.create(key, snapshot(), now=NOW),
            lambda: store.commit(key, 1, snapshot(), now=NOW),
            lambda: store.events(key),
            lambda: store.compact(key, now=NOW),
            lambda: store.delete(key),
        ]
        for verb in verbs:
            with pytest.raises(StoreError) as refused:
                verb()
            assert not isinstance(refused.value, StoreConflictError)
        assert store.find() == []

    def test_keys_are_told_apart_to_the_letter_and_may_be_long(self, store: Store) -> None:
        keys = ["k", "K", "k ", " k", "\u00e9", "e\u0301", "k" * 10_000, "k" * 9_999]
        for number, key in enumerate(keys):
            assert store.create(key, snapshot(context={"n": number}), now=NOW) == 1
        for number, key in enumerate(keys):
            found = store.load(key)
            assert found is not None
            assert (found.key, found.snapshot["context"]) == (key, {"n": number})

    def test_what_is_no_json_is_refused_and_nothing_written(self, store: Store) -> None:
        for bad in (object(), float("nan"), {1, 2}):
            with pytest.raises(StoreError, match="not JSON"):
                store.create("k", snapshot(context={"x": bad}), now=NOW)
            with pytest.raises(StoreError, match="not JSON"):
                store.create("k", snapshot(), events=[{"x": bad}], now=NOW)
        assert store.load("k") is None

    def test_a_snapshot_of_the_largest_size_is_taken_and_no_larger_one(self, store: Store) -> None:
        def padded(size: int) -> dict[str, Any]:
            empty = snapshot(context={"text": "\u00e9"})
            base = 2 + len('{"status":"active","state_ids":["m.open"],"context":{"text":""}}')
            assert size >= base
            empty["context"]["text"] += "x" * (size - base)
            return empty

        largest = store.max_snapshot_bytes
        with pytest.raises(SnapshotTooLargeError, match="max_messages") as caught:
            store.create("k", padded(largest + 1), now=NOW)
        assert (caught.value.size_bytes, caught.value.max_bytes) == (largest + 1, largest)
        assert store.load("k") is None
        store.create("k", padded(largest), now=NOW)
        with pytest.raises(SnapshotTooLargeError):
            store.commit("k", 1, padded(largest + 1), events=[{"n": 1}], now=NOW)
        found = store.load("k")
        assert found is not None
        assert (found.rev, store.events("k")) == (1, [])

    def test_a_deleted_run_is_gone_with_its_log_and_deadlines(self, store: Store) -> None:
        store.create("k", snapshot(timers=timers(t=1)), events=[{"id": "e"}], now=NOW)
        store.create("other", snapshot(timers=timers(t=1)), events=[{"id": "e"}], now=NOW)
        assert store.delete("k") is True
        assert store.delete("k") is False
        assert store.load("k") is None
        assert store.events("k") == []
        assert [due.key for due in store.claim_due(NOW, "me")] == ["other"]
        assert store.create("k", snapshot(), events=[{"id": "e"}], now=NOW) == 1

    def test_the_ledger_beside_it_is_one_and_as_durable(self, store: Store) -> None:
        ledger = store.ledger
        assert isinstance(ledger, Ledger)
        assert store.ledger is ledger
        assert ledger.durable == store.durable
        row = ledger.propose(Slot("k", "r", "", 1, "pay", "d"), "c", {}, now=NOW)
        assert ledger.pending("k") == [row]


class LogChecks:
    """The event log, and lists of runs."""

    def test_the_log_is_in_order_and_says_which_write(self, store: Store) -> None:
        store.create("k", snapshot(), events=[{"n": 1}, {"n": 2}], now=NOW)
        store.commit("k", 1, snapshot(), now=NOW)
        store.commit("k", 2, snapshot(), events=[{"n": 3, "text": "\0\u00e9"}], now=NOW)
        assert store.events("k") == [
            {"n": 1, "rev": 1},
            {"n": 2, "rev": 1},
            {"n": 3, "text": "\0\u00e9", "rev": 3},
        ]
        assert [each["n"] for each in store.events("k", after=1)] == [3]
        assert store.events("k", after=3) == []
        assert store.events("nobody") == []

    def test_an_event_of_one_id_is_taken_once(self, store: Store) -> None:
        store.create("k", snapshot("a"), events=[{"id": "t@1"}], now=NOW)
        for again in ([{"id": "t@1"}], [{"id": "t@2"}, {"id": "t@2"}]):
            with pytest.raises(StoreConflictError):
                store.commit("k", 1, snapshot("b"), events=again, now=NOW)
        found = store.load("k")
        assert found is not None
        assert (found.rev, found.snapshot["state_ids"]) == (1, ["m.a"])
        assert store.commit("k", 1, snapshot(), events=[{"id": "t@2"}], now=NOW) == 2

    def test_compaction_keeps_a_snapshot_and_the_ids(self, store: Store) -> None:
        store.create("k", snapshot("a"), events=[{"id": "t@1"}, {"n": 1}], now=NOW)
        store.commit("k", 1, snapshot("b"), events=[{"n": 2}], now=NOW)
        before = store.load("k")
        assert store.compact("k", now=NOW) == 3
        assert store.load("k") == before
        base = {"kind": "snapshot", "snapshot": snapshot("b"), "rev": 2}
        assert store.events("k") == [base]
        with pytest.raises(StoreConflictError):
            store.commit("k", 2, snapshot("c"), events=[{"id": "t@1"}], now=NOW)
        store.commit("k", 2, snapshot("c"), events=[{"n": 3}], now=NOW)
        assert store.events("k") == [base, {"n": 3, "rev": 3}]
        assert store.compact("nobody", now=NOW) == 0

    def test_runs_are_found_by_state_those_longest_in_it_first(self, store: Store) -> None:
        store.create("a", snapshot("waiting"), now=NOW)
        store.create("b", snapshot("open"), now=NOW + 1)
        store.create("c", snapshot("open"), now=NOW + 2)
        store.commit("b", 1, snapshot("waiting"), now=NOW + 3)
        store.commit("a", 1, snapshot("waiting", context={"n": 1}), now=NOW + 4)
        store.create("d", snapshot("end", status="done"), now=NOW + 5)
        found = store.find(state="m.waiting")
        assert [(each.key, each.rev, each.since, each.updated_at) for each in found] == [
            ("a", 2, NOW, NOW + 4),
            ("b", 2, NOW + 3, NOW + 3),
        ]
        assert [each.key for each in store.find()] == ["a", "c", "b", "d"]
        assert [each.key for each in store.find(limit=2)] == ["a", "c"]
        assert store.find(state="waiting") == store.find(limit=0) == []
        assert store.find()[-1].status == "done"
        assert store.find()[-1].state_ids == ("m.end",)

    def test_runs_of_the_same_age_are_found_in_the_order_of_their_keys(self, store: Store) -> None:
        for key in ("k2", "k3", "k1"):
            store.create(key, snapshot(), now=NOW)
        assert [each.key for each in store.find()] == ["k1", "k2", "k3"]
        assert [each.key for each in store.find(limit=2)] == ["k1", "k2"]


class DueChecks:
    """Deadlines: armed with a write, leased to one, gone with the next write."""

    def test_a_deadline_is_due_at_its_millisecond(self, store: Store) -> None:
        store.create("k", snapshot(timers=timers(t=NOW + 10)), now=NOW)
        assert store.claim_due(NOW + 9, "me") == []
        assert store.claim_due(NOW + 10, "me") == [Due("k", "t", NOW + 10, 1)]

    def test_deadlines_come_in_order_and_as_many_as_asked_for(self, store: Store) -> None:
        for number in (3, 1, 2):
            store.create(f"k{number}", snapshot(timers=timers(t=NOW + number)), now=NOW)
        assert [due.key for due in store.claim_due(NOW + 9, "me", limit=2)] == ["k1", "k2"]
        assert [due.key for due in store.claim_due(NOW + 9, "me")] == ["k3"]
        assert store.claim_due(NOW + 9, "me", limit=0) == []

    def test_sends_and_child_machines_have_deadlines_too(self, store: Store) -> None:
        below = snapshot(timers=timers(t=NOW + 3), children={"c": {"snapshot": None}})
        store.create(
            "k",
            snapshot(
                sends=timers(s=NOW + 2),
                timers=timers(t=NOW + 1),
                children={
                    "child": {"status": "active", "snapshot": below},
                    "ended": {"status": "done", "snapshot": below},
                },
            ),
            now=NOW,
        )
        assert [due.timer_id for due in store.claim_due(NOW + 9, "me")] == ["t", "s", "child/t"]

    def test_a_lease_keeps_others_away_until_it_ends(self, store: Store) -> None:
        store.create("k", snapshot(timers=timers(t=NOW)), now=NOW)
        assert len(store.claim_due(NOW, "me", lease_s=5)) == 1
        assert store.claim_due(NOW + 4_999, "you") == []
        assert store.claim_due(NOW + 5_000, "you") == [Due("k", "t", NOW, 1)]

    def test_a_commit_ends_leases_and_disarms_what_it_no_longer_holds(self, store: Store) -> None:
        store.create("k", snapshot(timers=timers(a=NOW, b=NOW)), now=NOW)
        store.claim_due(NOW, "me")
        store.commit("k", 1, snapshot(timers=timers(b=NOW, c=NOW)), now=NOW)
        assert store.claim_due(NOW, "you") == [Due("k", "b", NOW, 1), Due("k", "c", NOW, 2)]
        store.commit("k", 2, snapshot(timers=timers(b=NOW + 7)), now=NOW)
        assert store.claim_due(NOW, "you") == []
        assert store.claim_due(NOW + 7, "you") == [Due("k", "b", NOW + 7, 3)]
        store.commit("k", 3, snapshot("end", status="done"), now=NOW)
        assert store.claim_due(NOW * 2, "you") == []


class ConcurrencyChecks:
    """Threads and several handles at once: one write wins, one scanner gets a deadline."""

    def test_commits_at_once_have_one_winner_and_lose_no_write(
        self, make_store: Callable[[], Store]
    ) -> None:
        handles = [make_store() for _ in range(3)]
        handles[0].create("k", snapshot(context={"by": None}), now=NOW)

        def commit(rev: int, number: int) -> int:
            event = {"by": number, "id": f"{number}@{rev}"}
            after = snapshot(context={"by": number}, timers=timers(t=NOW + number))
            return handles[number % 3].commit("k", rev, after, events=[event], now=NOW)

        for rev in range(1, 6):
            results = at_once(_WORKERS, partial(commit, rev))
            assert [each for each in results if isinstance(each, int)] == [rev + 1]
        found = handles[1].load("k")
        assert found is not None
        assert found.rev == 6
        log = handles[2].events("k")
        assert [each["rev"] for each in log] == [2, 3, 4, 5, 6]
        assert log[-1]["by"] == found.snapshot["context"]["by"]
        [due] = handles[0].claim_due(NOW + 9, "me")
        assert due.due_at == NOW + log[-1]["by"]

    def test_creates_at_once_have_one_winner(self, make_store: Callable[[], Store]) -> None:
        handles = [make_store() for _ in range(3)]
        results = at_once(
            _WORKERS,
            lambda i: handles[i % 3].create("k", snapshot(context={"by": i}), now=NOW),
        )
        assert Counter(type(each) for each in results) == {int: 1, StoreConflictError: 5}

    def test_many_scanners_share_out_what_is_due(self, make_store: Callable[[], Store]) -> None:
        handles = [make_store() for _ in range(3)]
        for number in range(30):
            handles[0].create(f"k{number}", snapshot(timers=timers(t=NOW)), now=NOW)

        def claim(number: int) -> list[str]:
            found: list[str] = []
            while some := handles[number % 3].claim_due(NOW, f"scanner {number}", limit=3):
                found += [due.key for due in some]
            return found

        shares = [each for each in at_once(_WORKERS, claim) if isinstance(each, list)]
        taken = Counter(key for share in shares for key in share)
        assert taken == {f"k{number}": 1 for number in range(30)}

    def test_runs_do_not_disturb_each_other(self, make_store: Callable[[], Store]) -> None:
        handles = [make_store() for _ in range(2)]

        def life(number: int) -> int:
            store, key = handles[number % 2], f"k{number}"
            rev = store.create(key, snapshot(timers=timers(t=NOW)), now=NOW)
            for _ in range(5):
                rev = store.commit(key, rev, snapshot(), events=[{"n": rev}], now=NOW)
            return rev

        assert at_once(_WORKERS, life) == [6] * _WORKERS

    def test_what_one_handle_writes_another_reads(self, make_store: Callable[[], Store]) -> None:
        one, two = make_store(), make_store()
        one.create("k", snapshot("a"), now=NOW)
        two.commit("k", 1, snapshot("b"), now=NOW)
        found = one.load("k")
        assert found is not None
        assert found.snapshot["state_ids"] == ["m.b"]


class StoreConformance(WriteChecks, LogChecks, DueChecks, ConcurrencyChecks):
    """Every promise of a store as a test. Subclass it and override ``make_store``.

    Example::

        class TestMyStore(StoreConformance):
            @pytest.fixture
            def make_store(self, tmp_path):
                return lambda: MyStore(tmp_path / "runs.db")
    """

    @pytest.fixture
    def make_store(self) -> Callable[[], Store]:
        """Return a function that opens one more handle on the same, at first empty, store.

        A store that lives in one object returns that object each time.
        """
        raise NotImplementedError("override the fixture make_store")

    @pytest.fixture
    def store(self, make_store: Callable[[], Store]) -> Store:
        """Return one handle, checked to implement the protocol."""
        store = make_store()
        assert isinstance(store, Store)
        return store
