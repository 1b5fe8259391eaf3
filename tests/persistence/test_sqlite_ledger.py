"""SQLiteLedger: across processes, crashes, locks and releases."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from guardchart.errors import LedgerError, StoreError
from guardchart.persistence import Decision, Slot, SQLiteLedger

NOW = 1_000_000
SLOT = Slot("t", "r", "", 1, "pay", "d")

CLAIMANT = """
import sys
from guardchart.persistence import SQLiteLedger, owner_id
ledger = SQLiteLedger(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
for n in range(int(sys.argv[2])):
    claim = ledger.claim("t", f"c{n}", "d", owner=owner_id(), now=1000000)
    if claim.token is not None:
        print(n, flush=True)
"""

VICTIM = """
import sys
from guardchart.persistence import Decision, Slot, SQLiteLedger, owner_id
ledger = SQLiteLedger(sys.argv[1])
n = 0
while True:
    n += 1
    slot = Slot("t", "r", "", n, "pay", "d")
    row = ledger.propose(slot, "c", {"n": n}, now=1)
    edited = Decision("edit", None, {"n": -n}, "e")
    child = ledger.decide("t", {row.id: edited}, now=1)[row.id]
    token = ledger.claim("t", child.id, "e", owner=owner_id(), now=1).token
    print(child.id, flush=True)
    ledger.record("t", child.id, token, "done", "ok", now=1)
"""

FORKING = """
import os, sys
from guardchart.persistence import SQLiteLedger
ledger = SQLiteLedger(sys.argv[1])
connection = ledger._connection
pid = os.fork()
if pid == 0:
    won = ledger.claim("t", "c", "d", owner="child", now=1000000).token is not None
    print(won and ledger._connection is not connection, flush=True)
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
claim = ledger.claim("t", "c", "d", owner="parent", now=1000000)
assert claim.token is None
print(claim.row.owner)
"""


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ledger.db"


@pytest.fixture
def ledger(path):
    with SQLiteLedger(path) as ledger:
        yield ledger


def start(script, *args):
    return subprocess.Popen(
        [sys.executable, "-c", script, *map(str, args)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_every_commit_is_synced_and_readers_are_not_blocked(ledger):
    connection = ledger._connection
    assert connection.execute("PRAGMA synchronous").fetchone() == (2,)
    assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_processes_that_claim_at_once_have_one_winner_a_row(path, ledger):
    rows, processes = 30, 3
    for n in range(rows):
        ledger.propose(SLOT._replace(batch_no=n + 1), f"c{n}", {}, approve_until=NOW, now=NOW)
    children = [start(CLAIMANT, path, rows) for _ in range(processes)]
    for child in children:
        assert child.stdout.readline() == "ready\n"
    for child in children:
        child.stdin.write("\n")
        child.stdin.flush()
    won = [child.communicate(timeout=60)[0].split() for child in children]
    assert [child.returncode for child in children] == [0] * processes
    assert sorted(int(n) for each in won for n in each) == list(range(rows))


def test_a_killed_process_leaves_whole_rows_and_a_claim_in_doubt(path, ledger):
    victim = start(VICTIM, path)
    for _ in range(15):
        claimed = victim.stdout.readline().strip()
    victim.send_signal(signal.SIGKILL)
    rest = victim.communicate()[0].split()
    claimed = rest[-1] if rest else claimed
    for row in ledger.pending():
        assert row.arguments == {"n": row.slot.batch_no}
    n = 0
    while rows := ledger.lookup("t", "r", "", n + 1):
        n += 1
        statuses = [row.status for row in rows]
        whole = ["proposed"], ["edited", "approved"], ["edited", "claimed"], ["edited", "done"]
        assert statuses in whole
    assert n >= 15
    last = ledger.row("t", claimed)
    assert last.status in ("claimed", "done")
    if last.status == "claimed" and sys.platform == "linux":
        assert last in ledger.in_doubt(now=1)


def test_rows_outlive_the_object(path):
    with SQLiteLedger(path) as ledger:
        row = ledger.propose(SLOT, "c", {"n": 1.5, "s": "\u00e9"}, now=NOW)
    with SQLiteLedger(path) as ledger:
        assert ledger.pending() == [row]
        ledger.disconnect()
        assert ledger.pending() == [row]


def test_an_in_memory_ledger_is_not_durable():
    with SQLiteLedger(":memory:") as ledger:
        assert (ledger.durable, ledger.requires_proposal) == (False, True)
    with SQLiteLedger(":memory:") as ledger:
        assert ledger.pending() == []


def test_a_connection_factory_opens_the_connections(path):
    opened = []

    def factory():
        opened.append(sqlite3.connect(path, check_same_thread=False))
        return opened[-1]

    with SQLiteLedger(factory) as ledger:
        row = ledger.propose(SLOT, "c", {}, now=NOW)
        assert ledger.pending() == [row]
    assert len(opened) == 1


def test_a_read_of_one_statement_is_no_transaction_of_several(ledger):
    row = ledger.propose(SLOT, "c", {}, now=NOW)
    statements = []
    ledger._connection.set_trace_callback(statements.append)
    assert ledger.slot_row(SLOT) == row
    assert ledger.lookup(*SLOT[:4]) == ledger.pending() == ledger.pending("t") == [row]
    assert ledger.in_doubt(now=NOW) == []
    assert [each.split()[0] for each in statements] == ["SELECT"] * 5
    statements.clear()
    assert ledger.row("t", row.id) == row
    assert [each.split()[0] for each in statements] == ["BEGIN", "SELECT", "COMMIT"]


def test_a_signal_while_a_verb_waits_for_its_lock_leaves_no_transaction_open(path, ledger):
    class Interrupted(sqlite3.Connection):
        at = None

        def execute(self, sql, *values):
            done = super().execute(sql, *values)
            if sql == self.at:
                self.at = None
                raise KeyboardInterrupt  # as Python raises it after a call that was waiting
            return done

    def factory():
        return sqlite3.connect(path, check_same_thread=False, factory=Interrupted)

    with SQLiteLedger(factory) as waiting:
        waiting._connection.at = "BEGIN IMMEDIATE"
        with pytest.raises(KeyboardInterrupt):
            waiting.propose(SLOT, "c", {}, now=NOW)
        row = ledger.propose(SLOT, "c", {}, now=NOW)
        assert waiting.pending() == [row]
        with ThreadPoolExecutor(1) as others:
            decided = others.submit(waiting.decide, "t", {row.id: Decision("approve")}, now=NOW)
            assert decided.result(timeout=30)[row.id].status == "approved"


def test_a_relative_path_stays_the_same_file_when_the_directory_changes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with SQLiteLedger("ledger.db") as ledger:
        row = ledger.propose(SLOT, "c", {}, now=NOW)
        ledger.disconnect()
        (tmp_path / "sub").mkdir()
        monkeypatch.chdir(tmp_path / "sub")
        assert ledger.pending() == [row]


def test_a_locked_file_is_a_store_error_and_the_verb_may_be_repeated(path):
    with SQLiteLedger(path, timeout_s=0.05) as ledger:
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreError, match="SQLITE_BUSY") as caught:
            ledger.propose(SLOT, "c", {}, now=NOW)
        assert not isinstance(caught.value, LedgerError)
        assert ledger.pending() == []
        other.execute("ROLLBACK")
        other.close()
        assert ledger.propose(SLOT, "c", {}, now=NOW).status == "proposed"


def test_a_verb_waits_for_a_lock_that_is_given_back(path, ledger):
    other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    timer = threading.Timer(0.2, other.execute, ["COMMIT"])
    timer.start()
    assert ledger.propose(SLOT, "c", {}, now=NOW).status == "proposed"
    timer.join()
    other.close()


def test_a_file_that_is_no_database_is_a_store_error(path):
    path.write_bytes(b"not a database at all" * 100)
    with pytest.raises(StoreError, match="SQLITE_NOTADB"):
        SQLiteLedger(path, timeout_s=0.05)


def test_a_missing_directory_is_a_store_error(tmp_path):
    with pytest.raises(StoreError, match="SQLITE_CANTOPEN"):
        SQLiteLedger(tmp_path / "nowhere" / "ledger.db")


def test_a_schema_of_a_newer_release_is_refused(path):
    SQLiteLedger(path).disconnect()
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE guardchart_schema SET version = 99")
        connection.commit()
    with pytest.raises(StoreError, match="version 99"):
        SQLiteLedger(path)


def test_first_openers_at_once_make_one_schema(path):
    barrier = threading.Barrier(6)
    errors = []

    def run():
        try:
            barrier.wait()
            with SQLiteLedger(path) as ledger:
                ledger.propose(SLOT, "c", {}, now=NOW)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    with SQLiteLedger(path) as ledger:
        assert len(ledger.pending()) == 1


def test_an_interrupted_verb_writes_nothing_and_leaves_the_ledger_usable(ledger, monkeypatch):
    row = ledger.propose(SLOT, "c", {}, now=NOW)
    decisions = {row.id: Decision("edit", None, {"n": object()}, "e")}
    with pytest.raises(TypeError):
        ledger.decide("t", decisions, now=NOW)
    assert ledger.lookup("t", "r", "", 1) == [row]
    assert ledger.decide("t", {row.id: Decision("approve")}, now=NOW)[row.id].status == "approved"


def test_an_interrupt_on_the_way_out_leaves_the_ledger_to_other_threads(ledger):
    row = ledger.propose(SLOT, "c", {}, now=NOW)

    def trace(frame, event, arg):
        if frame.f_code.co_name == "__exit__":
            sys.settrace(None)
            raise KeyboardInterrupt

    for verb in (ledger.pending, lambda: ledger.close("t", [row.id], now=NOW)):
        sys.settrace(trace)
        with contextlib.suppress(KeyboardInterrupt):
            verb()
            raise AssertionError("nothing was interrupted")
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(ledger.row, "t", row.id).result(10) == row


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_uses_a_connection_of_its_own(path, ledger):
    ledger.propose(SLOT, "c", {}, approve_until=NOW, now=NOW)
    parent = start(FORKING, path)
    assert parent.communicate(timeout=60)[0].split() == ["True", "child"]
    assert parent.returncode == 0
