"""PostgresLedger: across processes, crashes, locks, lost connections and releases."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from guardchart.errors import LedgerError, MissingExtraError, StoreError
from guardchart.persistence import Decision, PostgresLedger, Slot
from guardchart.persistence._postgres import lock_key
from tests.persistence.test_sqlite_ledger import CLAIMANT, FORKING, VICTIM, start

NOW = 1_000_000
SLOT = Slot("t", "r", "", 1, "pay", "d")

pytestmark = pytest.mark.needs_postgres


def on_postgres(script: str) -> str:
    return script.replace("SQLiteLedger", "PostgresLedger")


@pytest.fixture
def dsn(postgres_database):
    return postgres_database


@pytest.fixture
def ledger(dsn):
    with PostgresLedger(dsn) as ledger:
        yield ledger


@pytest.fixture
def admin(dsn):
    with psycopg.connect(dsn, autocommit=True) as connection:
        yield connection


def terminate(admin):
    """End every other session, as a restart of the server or a failover does."""
    admin.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
        "WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )


def sessions(admin):
    query = (
        "SELECT count(*) FROM pg_stat_activity "
        "WHERE datname = current_database() AND application_name = 'guardchart'"
    )
    return admin.execute(query).fetchone()[0]


def test_processes_that_claim_at_once_have_one_winner_a_row(dsn, ledger):
    rows, processes = 30, 3
    for n in range(rows):
        ledger.propose(SLOT._replace(batch_no=n + 1), f"c{n}", {}, approve_until=NOW, now=NOW)
    children = [start(on_postgres(CLAIMANT), dsn, rows) for _ in range(processes)]
    for child in children:
        assert child.stdout.readline() == "ready\n"
    for child in children:
        child.stdin.write("\n")
        child.stdin.flush()
    won = [child.communicate(timeout=60)[0].split() for child in children]
    assert [child.returncode for child in children] == [0] * processes
    assert sorted(int(n) for each in won for n in each) == list(range(rows))


def test_a_killed_process_leaves_whole_rows_and_a_claim_in_doubt(dsn, ledger):
    victim = start(on_postgres(VICTIM), dsn)
    for _ in range(15):
        claimed = victim.stdout.readline().strip()
    victim.send_signal(signal.SIGKILL)
    rest = victim.communicate()[0].split()
    claimed = rest[-1] if rest else claimed
    # Waits for what the server still does of the dead one's last transaction.
    ledger.propose(SLOT._replace(batch_no=10_000), "c", {"n": 10_000}, now=NOW)
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


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_uses_a_connection_of_its_own(dsn, ledger):
    ledger.propose(SLOT, "c", {}, approve_until=NOW, now=NOW)
    script = on_postgres(FORKING).replace("ledger._connection", "ledger._database._idle[0]")
    parent = start(script, dsn)
    assert parent.communicate(timeout=60)[0].split() == ["True", "child"]
    assert parent.returncode == 0


def test_rows_outlive_the_object(dsn):
    with PostgresLedger(dsn) as ledger:
        row = ledger.propose(SLOT, "c", {"n": 1.5, "s": "\u00e9"}, now=NOW)
    with PostgresLedger(dsn) as ledger:
        assert ledger.pending() == [row]
        ledger.disconnect()
        assert ledger.pending() == [row]


def test_connections_lost_while_idle_are_replaced_unnoticed(ledger, admin):
    row = ledger.propose(SLOT, "c", {}, now=NOW)
    terminate(admin)
    assert ledger.decide("t", {row.id: Decision("approve")}, now=NOW)[row.id].status == "approved"
    terminate(admin)
    assert ledger.row("t", row.id).status == "approved"


def test_a_connection_lost_inside_a_verb_is_a_store_error_and_writes_nothing(
    ledger, admin, monkeypatch
):
    row = ledger.propose(SLOT, "c", {}, now=NOW)
    rows = ledger._database.__class__.transaction

    def cut(self, begin):
        manager = rows(self, begin)

        class Cutting:
            def __enter__(self):
                cursor = manager.__enter__()
                terminate(admin)
                return cursor

            def __exit__(self, *args):
                return manager.__exit__(*args)

        return Cutting()

    monkeypatch.setattr(ledger._database.__class__, "transaction", cut)
    with pytest.raises(StoreError, match=r"AdminShutdown.* while working; nothing was written"):
        ledger.decide("t", {row.id: Decision("approve")}, now=NOW)
    monkeypatch.undo()
    assert ledger.row("t", row.id) == row


def test_a_connection_lost_while_committing_says_that_the_outcome_is_unknown(ledger, monkeypatch):
    from guardchart.persistence import _postgres

    run = _postgres._run

    def lose(connection, statements):
        if statements == "COMMIT":
            connection.close()
            raise psycopg.OperationalError("the connection was lost")
        run(connection, statements)

    monkeypatch.setattr(_postgres, "_run", lose)
    with pytest.raises(StoreError, match="while committing; whether it was written is unknown"):
        ledger.propose(SLOT, "c", {}, now=NOW)
    monkeypatch.undo()
    assert ledger.pending() == []


def test_another_scopes_lock_is_not_waited_for_and_ones_own_is_bounded(dsn, admin):
    with PostgresLedger(dsn, timeout_s=0.1) as ledger:
        admin.execute("SELECT pg_advisory_lock(%s)", (lock_key("ledger", "t"),))
        with pytest.raises(StoreError, match="LockNotAvailable.*raise timeout_s") as caught:
            ledger.propose(SLOT, "c", {}, now=NOW)
        assert not isinstance(caught.value, LedgerError)
        assert ledger.propose(SLOT._replace(scope="u"), "c", {}, now=NOW).id == "c"
        assert ledger.pending("t") == []
        admin.execute("SELECT pg_advisory_unlock_all()")
        assert ledger.propose(SLOT, "c", {}, now=NOW).status == "proposed"


def test_a_verb_waits_for_a_lock_that_is_given_back(ledger, admin):
    admin.execute("SELECT pg_advisory_lock(%s)", (lock_key("ledger", "t"),))
    timer = threading.Timer(0.2, admin.execute, ["SELECT pg_advisory_unlock_all()"])
    timer.start()
    assert ledger.propose(SLOT, "c", {}, now=NOW).status == "proposed"
    timer.join()


def test_connections_are_bounded_and_a_wait_for_one_ends(dsn, admin):
    with PostgresLedger(dsn, timeout_s=0.2, max_connections=2) as ledger:
        admin.execute("SELECT pg_advisory_lock(%s)", (lock_key("ledger", "t"),))
        errors = []

        def propose(n):
            try:
                ledger.propose(SLOT._replace(batch_no=n), "c", {}, now=NOW)
            except StoreError as error:
                errors.append(str(error))

        threads = [threading.Thread(target=propose, args=(n,)) for n in range(1, 7)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(errors) == 6 and sessions(admin) <= 2
        assert any("no connection became free" in error for error in errors)


@pytest.mark.parametrize(
    "setting",
    [
        "default_transaction_isolation = 'serializable'",
        "default_transaction_read_only = on",
        "synchronous_commit = off",
    ],
)
def test_the_databases_defaults_do_not_weaken_a_transaction(dsn, admin, setting):
    with PostgresLedger(dsn) as ledger:
        row = ledger.propose(SLOT, "c", {}, approve_until=NOW, now=NOW)
    name = admin.execute("SELECT current_database()").fetchone()[0]
    admin.execute(f"ALTER DATABASE {name} SET {setting}")
    with PostgresLedger(dsn) as ledger:
        with ledger._transaction("t", write=True) as rows:
            query = "SELECT current_setting('synchronous_commit'), current_setting('transaction_isolation')"
            assert rows._cursor.execute(query).fetchone() == ("on", "read committed")
        assert ledger.claim("t", row.id, "d", owner="o", now=NOW).token


def test_a_wrong_address_is_a_store_error_that_names_no_password(dsn):
    nowhere = make_conninfo(dsn, port=1, connect_timeout=2)
    with pytest.raises(StoreError, match="OperationalError while connecting") as caught:
        PostgresLedger(nowhere)
    password = psycopg.conninfo.conninfo_to_dict(dsn)["password"]
    assert password not in str(caught.value)
    with pytest.raises(StoreError, match="no connection string") as caught:
        PostgresLedger(f"postgresql://a:{password}@h:port/x y=1")
    assert password not in str(caught.value) and caught.value.__cause__ is None


@pytest.mark.parametrize("source", [None, 5, object()])
def test_a_source_of_another_kind_is_refused(source):
    with pytest.raises(TypeError, match="pass a DSN"):
        PostgresLedger(source)


@pytest.mark.parametrize("options", [{"schema": ""}, {"schema": "a\0b"}, {"max_connections": 0}])
def test_an_option_out_of_range_is_refused(dsn, options):
    with pytest.raises(ValueError, match=next(iter(options))):
        PostgresLedger(dsn, **options)


def test_a_schema_of_its_own_keeps_the_tables(dsn, admin):
    admin.execute('CREATE SCHEMA "App ""1"""')
    with PostgresLedger(dsn, schema='App "1"') as ledger, PostgresLedger(dsn) as other:
        ledger.propose(SLOT, "c", {}, now=NOW)
        assert other.pending() == []
        query = "SELECT schemaname FROM pg_tables WHERE tablename = 'guardchart_ledger'"
        assert sorted(admin.execute(query).fetchall()) == [('App "1"',), ("public",)]
    with pytest.raises(StoreError, match="InvalidSchemaName"):
        PostgresLedger(dsn, schema="missing")


def test_a_role_that_may_not_create_tables_uses_those_that_are_there(dsn, admin):
    name = admin.execute("SELECT current_database()").fetchone()[0]
    role = f"limited_{name}"
    admin.execute(f"CREATE ROLE {role} LOGIN PASSWORD 'pw'")
    limited = make_conninfo(dsn, user=role, password="pw")
    with pytest.raises(StoreError, match="InsufficientPrivilege.*a role that may"):
        PostgresLedger(limited)
    PostgresLedger(dsn).disconnect()
    for table in ("ledger", "schema"):
        admin.execute(f"GRANT SELECT, INSERT, UPDATE ON guardchart_{table} TO {role}")
    with PostgresLedger(limited) as ledger:
        assert ledger.propose(SLOT, "c", {}, now=NOW).status == "proposed"
    admin.execute(f"DROP OWNED BY {role}")
    admin.execute(f"DROP ROLE {role}")


def test_a_schema_of_a_newer_release_is_refused(dsn, admin):
    PostgresLedger(dsn).disconnect()
    admin.execute("UPDATE guardchart_schema SET version = 99")
    with pytest.raises(StoreError, match="version 99"):
        PostgresLedger(dsn)


def test_first_openers_at_once_make_one_schema(dsn):
    barrier = threading.Barrier(6)
    errors = []

    def run():
        try:
            barrier.wait()
            with PostgresLedger(dsn) as ledger:
                ledger.propose(SLOT, "c", {}, now=NOW)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    with PostgresLedger(dsn) as ledger:
        assert len(ledger.pending()) == 1


def test_scopes_ids_and_agents_may_be_longer_than_an_index_entry(ledger):
    slot = SLOT._replace(scope=os.urandom(5_000).hex(), agent=os.urandom(5_000).hex())
    model_id = os.urandom(5_000).hex()
    row = ledger.propose(slot, model_id, {}, now=NOW)
    assert ledger.row(slot.scope, model_id) == ledger.slot_row(slot) == row
    assert ledger.lookup(*slot[:4]) == ledger.pending(slot.scope) == [row]
    assert ledger.propose(slot._replace(ordinal=1), model_id, {}, now=NOW).id == f"{model_id}-2"


def test_an_interrupted_verb_writes_nothing_and_leaves_the_ledger_usable(ledger, admin):
    row = ledger.propose(SLOT, "c", {}, now=NOW)
    decisions = {row.id: Decision("edit", None, {"n": object()}, "e")}
    with pytest.raises(TypeError):
        ledger.decide("t", decisions, now=NOW)
    assert ledger.lookup("t", "r", "", 1) == [row]
    assert ledger.decide("t", {row.id: Decision("approve")}, now=NOW)[row.id].status == "approved"
    assert sessions(admin) == 1


def test_a_ledger_that_is_dropped_closes_its_connections(dsn, admin):
    ledger = PostgresLedger(dsn)
    ledger.pending()
    assert sessions(admin) == 1
    del ledger
    gc.collect()
    for _ in range(100):
        if not sessions(admin):
            return
        threading.Event().wait(0.02)
    raise AssertionError("a session outlived its ledger")


def test_a_function_opens_the_connections(dsn):
    opened = []

    def connect():
        opened.append(psycopg.connect(dsn, prepare_threshold=None))
        return opened[-1]

    with PostgresLedger(connect) as ledger:
        row = ledger.propose(SLOT, "c", {}, now=NOW)
        assert ledger.pending() == [row]
    assert len(opened) == 1 and opened[0].closed


WITHOUT = """
import sys
sys.modules["psycopg"] = None
import guardchart.persistence
from guardchart.errors import MissingExtraError
try:
    from guardchart.persistence import PostgresLedger
except MissingExtraError as error:
    print(error)
"""


def test_without_psycopg_the_import_names_the_extra():
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == 'psycopg is not installed: pip install "guardchart[postgres]"\n'
    assert issubclass(MissingExtraError, ImportError)
