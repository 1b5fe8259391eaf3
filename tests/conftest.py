"""What every test runs under: no network, no leaked threads, no silent skips on CI."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest

from tests.postgres import PrivateCluster, Unavailable

ROOT = Path(__file__).resolve().parent.parent
ON_CI = os.environ.get("CI", "").lower() in {"1", "true"}
NEEDS = ("needs_postgres", "needs_node", "needs_browser")

# A developer's own keys and tracing settings must not reach a test.
for _name in list(os.environ):
    if _name.startswith(("LANGSMITH_", "LANGCHAIN_", "OPENAI_", "ANTHROPIC_", "OTEL_", "LOGFIRE_")):
        del os.environ[_name]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--allow-all-gate",
        action="store_true",
        help="replace the gate by one that allows everything: each test marked `gate` must fail",
    )


# --- the negative control ----------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _gate_or_none(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.config.getoption("--allow-all-gate", default=False):
        from tests.promises.allow_all import install

        install(monkeypatch)


# --- skips -------------------------------------------------------------------------------------


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if {"postgres_dsn", "postgres_database"} & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.needs_postgres)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report: Any = yield
    needs = [name for name in NEEDS if item.get_closest_marker(name)]
    if ON_CI and needs and report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} ({', '.join(needs)}) must not be skipped on CI: {reason}"
    return report


# --- network -----------------------------------------------------------------------------------


class NetworkForbidden(RuntimeError):
    """A test reached for something other than the loopback interface."""


_attempts: list[str] = []


def _is_loopback(host: object) -> bool:
    if isinstance(host, bytes):
        host = host.decode("ascii", "replace")
    if host is None or host in {"", "localhost"}:
        return True
    try:
        return ip_address(str(host).partition("%")[0]).is_loopback
    except ValueError:
        return False


def _forbid_network(event: str, args: tuple[Any, ...]) -> None:
    if not event.startswith("socket."):
        return
    if event in {"socket.connect", "socket.sendto", "socket.sendmsg"}:
        address = args[1]
        if not isinstance(address, tuple):  # a UNIX socket, or an already connected one
            return
        host = address[0]
    elif event in {"socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr"}:
        host = args[0]
    else:
        return
    if not _is_loopback(host):
        _attempts.append(f"{event} {host!r}")
        raise NetworkForbidden(f"tests reach the loopback interface only, not {host!r}")


# An audit hook sees every Python socket, whoever opened it and however it was imported.
sys.addaudithook(_forbid_network)


@pytest.fixture(autouse=True)
def _no_network() -> Iterator[None]:
    """Fail a test that tried, even if a library swallowed the error."""
    _attempts.clear()
    yield
    attempts, _attempts[:] = list(_attempts), []
    assert not attempts, f"the test reached for the network: {attempts}"


# --- threads -----------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _no_leaked_threads() -> Iterator[None]:
    """Fail a test that leaves a thread behind which would keep the process alive."""
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + 2.0
    while leaked := [t for t in threading.enumerate() if t not in before and not t.daemon]:
        if time.monotonic() > deadline:
            pytest.fail(f"leaked threads: {sorted(t.name for t in leaked)}", pytrace=False)
        time.sleep(0.01)


# --- PostgreSQL --------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def _postgres_cluster() -> Iterator[PrivateCluster]:
    try:
        cluster = PrivateCluster.start()
    except Unavailable as exc:
        pytest.skip(str(exc))
    try:
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture(scope="session")
def postgres_dsn(_postgres_cluster: PrivateCluster) -> str:
    """Return the connection string, password included, of a private PostgreSQL server."""
    return _postgres_cluster.dsn()


@pytest.fixture
def postgres_database(_postgres_cluster: PrivateCluster) -> str:
    """Return the connection string of a database that no other test uses."""
    return _postgres_cluster.create_database()
