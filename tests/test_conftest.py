"""The guards of tests/conftest.py hold."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

CONFTEST = (Path(__file__).parent / "conftest.py").read_text()
WITHOUT_PLUGINS = [
    f"-pno:{name}" for name in ("cacheprovider", "langsmith_plugin", "hypothesispytest", "xdist")
]


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """Return an empty project with this suite's conftest."""
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parent.parent))
    pytester.makeconftest(CONFTEST)
    pytester.makepyprojecttoml(
        """
        [tool.pytest.ini_options]
        asyncio_mode = "auto"
        asyncio_default_fixture_loop_scope = "function"
        markers = ["needs_node: x", "needs_postgres: x"]
        """
    )
    return pytester


def test_network_is_refused_when_a_test_leaves_the_loopback(suite: pytest.Pytester) -> None:
    suite.makepyfile(
        """
        import socket

        def test_swallows():
            try:
                socket.create_connection(("192.0.2.1", 9), timeout=1)
            except Exception:
                pass

        def test_resolves():
            socket.getaddrinfo("example.invalid", 80)

        def test_loopback():
            with socket.create_server(("127.0.0.1", 0)) as server:
                socket.create_connection(server.getsockname()).close()
        """
    )
    result = suite.runpytest_subprocess(*WITHOUT_PLUGINS)
    result.assert_outcomes(passed=2, failed=1, errors=2)
    result.stdout.fnmatch_lines(["*the test reached for the network: *192.0.2.1*"])


def test_leaked_thread_fails_its_test(suite: pytest.Pytester) -> None:
    suite.makepyfile(
        """
        import threading, time

        def test_leaks():
            threading.Thread(target=time.sleep, args=(3,), name="left-behind").start()

        def test_finishes_in_time():
            threading.Thread(target=time.sleep, args=(0.1,)).start()

        def test_daemon():
            threading.Thread(target=time.sleep, args=(9,), daemon=True).start()
        """
    )
    result = suite.runpytest_subprocess(*WITHOUT_PLUGINS)
    result.assert_outcomes(passed=3, errors=1)
    result.stdout.fnmatch_lines(["*leaked threads: ?'left-behind'?*"])


@pytest.mark.parametrize("ci", ["true", ""])
def test_skip_of_a_needed_service_fails_only_on_ci(
    suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, ci: str
) -> None:
    suite.makepyfile(
        """
        import pytest

        @pytest.mark.needs_node
        def test_marked():
            pytest.skip("no node here")

        @pytest.mark.needs_node
        @pytest.mark.skip(reason="static")
        def test_marked_statically():
            pass

        @pytest.mark.needs_node
        @pytest.mark.xfail
        def test_expected():
            assert False

        def test_plain():
            pytest.skip("fine")
        """
    )
    monkeypatch.setenv("CI", ci)
    result = suite.runpytest_subprocess(*WITHOUT_PLUGINS)
    if ci:
        # A static skip happens while setting up, which pytest counts as an error.
        result.assert_outcomes(failed=1, errors=1, skipped=1, xfailed=1)
        result.stdout.fnmatch_lines(["*must not be skipped on CI: *no node here*"])
    else:
        result.assert_outcomes(skipped=3, xfailed=1)


async def test_default_executor_leaves_no_thread_when_the_loop_closes() -> None:
    assert await asyncio.to_thread(threading.active_count) >= 1


def test_postgres_answers_with_its_password(postgres_dsn: str) -> None:
    import psycopg

    with psycopg.connect(postgres_dsn) as connection:
        assert connection.execute("SELECT 6 * 7").fetchone() == (42,)
    without_password = postgres_dsn.replace(postgres_dsn.split(":")[2].split("@")[0], "wrong")
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(without_password)


def test_postgres_databases_are_apart(postgres_database: str, postgres_dsn: str) -> None:
    import psycopg

    assert postgres_database != postgres_dsn
    with psycopg.connect(postgres_database) as connection:
        connection.execute("CREATE TABLE only_here (n integer)")
    with psycopg.connect(postgres_dsn) as connection:
        assert connection.execute("SELECT to_regclass('only_here')").fetchone() == (None,)


@pytest.mark.needs_postgres
def test_postgres_stops_when_the_test_run_is_killed(postgres_dsn: str) -> None:
    program = (
        "import os; from tests.postgres import PrivateCluster\n"
        "print(PrivateCluster.start().base, flush=True); os.kill(os.getpid(), 9)"
    )
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True)
    base = Path(done.stdout.strip())
    assert done.returncode == -9 and base.name.startswith("guardchart-pg-")
    deadline = time.monotonic() + 20
    while base.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not base.exists()


def test_loopback_sockets_are_free_to_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname()).close()
