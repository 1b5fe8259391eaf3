"""Stores on a disk or server: locks, lost connections, newer releases, forks, kills."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import threading

import psycopg
import pytest

from guardchart.errors import StoreConflictError, StoreError
from guardchart.persistence import PostgresStore, SQLiteStore
from guardchart.testing._store import NOW, snapshot, timers
from tests.persistence.test_sqlite_ledger import start

WRITER = """
from guardchart.errors import StoreConflictError
import sys
from guardchart.persistence import {store}
store = {store}(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
won = 0
while won < int(sys.argv[2]):
    found = store.load("k")
    n = found.snapshot["context"]["n"] + 1
    try:
        store.commit("k", found.rev, {{**found.snapshot, "context": {{"n": n}}}}, events=[{{"n": n}}], now=1)
    except StoreConflictError:
        continue
    won += 1
print("done", flush=True)
"""

VICTIM = """
import sys
from guardchart.persistence import {store}
store = {store}(sys.argv[1])
rev = store.create("k", {{"status": "active", "state_ids": ["m.a"], "context": {{"n": 1}}}}, events=[{{"n": 1}}], now=1)
while True:
    n = rev + 1
    after = {{"status": "active", "state_ids": ["m.a"], "context": {{"n": n}}, "timers": {{"t": {{"due_at": float(n)}}}}}}
    rev = store.commit("k", rev, after, events=[{{"n": n}}], now=n)
    print(rev, flush=True)
"""

FORKING = """
import os
import sys
from guardchart.persistence import {store}
store = {store}(sys.argv[1])
store.create("k", {{"status": "active", "state_ids": ["m.a"]}}, now=1)
pid = os.fork()
if pid == 0:
    print(store.commit("k", 1, {{"status": "active", "state_ids": ["m.b"]}}, now=1), flush=True)
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
print(store.load("k").rev)
"""


@pytest.fixture(params=["SQLiteStore", "PostgresStore"])
def kind(request):
    return request.param


@pytest.fixture
def place(kind, request, tmp_path):
    if kind == "SQLiteStore":
        return str(tmp_path / "runs.db")
    return request.getfixturevalue("postgres_database")


@pytest.fixture
def store(kind, place):
    with (SQLiteStore if kind == "SQLiteStore" else PostgresStore)(place) as store:
        yield store


def test_processes_that_write_at_once_lose_no_write(kind, place, store):
    store.create("k", snapshot(context={"n": 0}), now=NOW)
    writers = [start(WRITER.format(store=kind), place, 20) for _ in range(3)]
    for each in writers:
        assert each.stdout.readline() == "ready\n"
    for each in writers:
        each.stdin.write("\n")
        each.stdin.flush()
    assert [each.communicate(timeout=60)[0] for each in writers] == ["done\n"] * 3
    found = store.load("k")
    assert (found.rev, found.snapshot["context"]) == (61, {"n": 60})
    assert [each["n"] for each in store.events("k")] == list(range(1, 61))


def test_a_killed_writer_leaves_a_whole_write(kind, place, store):
    victim = start(VICTIM.format(store=kind), place)
    for _ in range(15):
        rev = int(victim.stdout.readline())
    victim.send_signal(signal.SIGKILL)
    rest = victim.stdout.read().split()  # `communicate` would miss what was read ahead
    victim.communicate()
    rev = int(rest[-1]) if rest else rev
    for _ in range(100):  # the server may still finish what it was told
        found = store.load("k")
        log = store.events("k")
        if len(log) == found.rev:
            break
        threading.Event().wait(0.02)
    assert found.rev in (rev, rev + 1)
    assert found.snapshot["context"]["n"] == found.rev
    assert [each["n"] for each in log] == list(range(1, found.rev + 1))
    [due] = store.claim_due(NOW, "me")
    assert due.due_at == found.rev


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_writes_on_a_connection_of_its_own(kind, place):
    parent = start(FORKING.format(store=kind), place)
    assert parent.communicate(timeout=60)[0].split() == ["2", "2"]
    assert parent.returncode == 0


def test_a_store_may_be_used_again_after_it_was_disconnected(store):
    store.create("k", snapshot(), now=NOW)
    store.ledger.pending()
    store.disconnect()
    assert store.load("k").rev == 1 and store.ledger.pending() == []


def test_a_locked_file_is_a_store_error_and_the_write_may_be_repeated(tmp_path):
    path = tmp_path / "runs.db"
    with SQLiteStore(path, timeout_s=0.05) as store:
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreError, match="SQLite store: SQLITE_BUSY") as caught:
            store.create("k", snapshot(), now=NOW)
        assert not isinstance(caught.value, StoreConflictError)
        assert store.load("k") is None and store.claim_due(NOW, "me") == []
        other.execute("ROLLBACK")
        other.close()
        assert store.create("k", snapshot(), now=NOW) == 1


def test_scanning_an_idle_file_waits_for_no_writer(tmp_path):
    path = tmp_path / "runs.db"
    with SQLiteStore(path, timeout_s=0.05) as store:
        store.create("k", snapshot(timers=timers(t=NOW + 10)), now=NOW)
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        assert store.claim_due(NOW, "me") == []
        other.close()


@pytest.mark.parametrize("part", ["store", "ledger"])
def test_a_schema_of_a_newer_release_is_refused(tmp_path, part):
    path = tmp_path / "runs.db"
    with SQLiteStore(path) as store:
        assert store.ledger.pending() == []
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE guardchart_schema SET version = 99 WHERE name = ?", (part,))
        connection.commit()
    with (
        pytest.raises(StoreError, match=f"the {part}'s schema has version 99"),
        SQLiteStore(path) as store,
    ):
        store.ledger.pending()


def test_first_openers_at_once_make_one_schema(kind, place):
    barrier = threading.Barrier(5)
    errors = []

    def run(number):
        try:
            barrier.wait()
            with (SQLiteStore if kind == "SQLiteStore" else PostgresStore)(place) as store:
                store.create(f"k{number}", snapshot(), now=NOW)
                assert store.ledger.pending() == []
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(n,)) for n in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


@pytest.mark.needs_postgres
def test_a_connection_lost_while_idle_is_replaced_unnoticed(postgres_database):
    with PostgresStore(postgres_database) as store:
        store.create("k", snapshot(), now=NOW)
        with psycopg.connect(postgres_database, autocommit=True) as admin:
            admin.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
        assert store.commit("k", 1, snapshot("b"), now=NOW) == 2


@pytest.mark.needs_postgres
def test_ledger_and_store_share_a_schema_of_their_own(postgres_database):
    with psycopg.connect(postgres_database, autocommit=True) as admin:
        admin.execute("CREATE SCHEMA bot")
        with PostgresStore(postgres_database, schema="bot") as store:
            store.create("k", snapshot(timers=timers(t=NOW)), events=[{"n": 1}], now=NOW)
            assert store.ledger.pending() == [] and len(store.claim_due(NOW, "me")) == 1
            assert store.compact("k", now=NOW) == 1 and store.delete("k")
        query = "SELECT DISTINCT schemaname FROM pg_tables WHERE tablename LIKE 'guardchart%'"
        assert admin.execute(query).fetchall() == [("bot",)]
