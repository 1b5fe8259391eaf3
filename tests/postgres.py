"""A private PostgreSQL server: a temporary cluster on a free loopback port."""

from __future__ import annotations

import glob
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

_OS_USER = "postgres"  # initdb refuses to run as root
_ROLE = "guardchart"

# Waits until the other end of its standard input is closed, by stop() or by death.
_UNDERTAKER = """
import shutil, subprocess, sys
sys.stdin.buffer.read()
subprocess.run(sys.argv[2:])
shutil.rmtree(sys.argv[1], ignore_errors=True)
"""


class Unavailable(Exception):
    """No PostgreSQL server can be started here; the text says why."""


@dataclass
class PrivateCluster:
    """A running server that holds nothing but what the tests put into it."""

    bin_dir: Path
    base: Path
    port: int
    password: str
    _databases: int = field(default=0)
    _undertaker: subprocess.Popen[bytes] = field(init=False, repr=False)

    @classmethod
    def start(cls) -> PrivateCluster:
        """Create a cluster and wait until it answers.

        Raises:
            Unavailable: No server binaries, or no user to run them as.
        """
        bin_dir = _find_binaries()
        base = Path(tempfile.mkdtemp(prefix="guardchart-pg-"))
        cluster = cls(bin_dir, base, _free_port(), secrets.token_urlsafe(12))
        try:
            cluster._initialise()
        except BaseException:
            shutil.rmtree(base, ignore_errors=True)
            raise
        return cluster

    def _initialise(self) -> None:
        password_file = self.base / "password"
        password_file.write_text(self.password)
        if os.geteuid() == 0:
            shutil.chown(self.base, _OS_USER)
            shutil.chown(password_file, _OS_USER)
        self._run(
            "initdb",
            f"--pgdata={self._data}",
            f"--username={_ROLE}",
            f"--pwfile={password_file}",
            "--auth=scram-sha-256",
            "--encoding=UTF8",
            "--no-locale",
            "--no-sync",
        )
        password_file.unlink()
        # The tests kill clients, never the server: it may keep its pages in memory.
        options = f"-p {self.port} -c listen_addresses=127.0.0.1 -c unix_socket_directories="
        self._run(
            "pg_ctl",
            "start",
            f"--pgdata={self._data}",
            f"--log={self.base / 'log'}",
            "--wait",
            f"--options={options} -c fsync=off",
        )

        # Outlives a killed test run, and then tidies up after it.
        stop = self._command("pg_ctl", "stop", f"--pgdata={self._data}", "--mode=immediate")
        self._undertaker = subprocess.Popen(
            [sys.executable, "-c", _UNDERTAKER, str(self.base), *stop],
            cwd="/",
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def stop(self) -> None:
        """Stop the server and remove every trace of it."""
        self._undertaker.communicate()

    def dsn(self, database: str = "postgres") -> str:
        """Return a connection string for one of the server's databases."""
        return f"postgresql://{_ROLE}:{self.password}@127.0.0.1:{self.port}/{database}"

    def create_database(self) -> str:
        """Create an empty database and return its connection string."""
        import psycopg

        self._databases += 1
        name = f"test_{self._databases}"
        with psycopg.connect(self.dsn(), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name} TEMPLATE template0")
        return self.dsn(name)

    @property
    def _data(self) -> Path:
        return self.base / "data"

    def _command(self, program: str, *args: str) -> list[str]:
        command = [str(self.bin_dir / program), *args]
        return ["runuser", "-u", _OS_USER, "--", *command] if os.geteuid() == 0 else command

    def _run(self, program: str, *args: str) -> None:
        command = self._command(program, *args)
        # Output goes to a file: a server that inherits a pipe would keep it open for ever.
        with open(self.base / "output", "ab") as output:
            done = subprocess.run(
                command, cwd="/", stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
        if done.returncode:
            text = (self.base / "output").read_text(errors="replace")[-2000:]
            raise RuntimeError(f"{program} failed:\n{text}")


def _find_binaries() -> Path:
    candidates = sorted(
        glob.glob("/usr/lib/postgresql/*/bin/pg_ctl"),
        key=lambda path: int(path.split("/")[4]) if path.split("/")[4].isdigit() else 0,
    )
    found = candidates[-1] if candidates else shutil.which("pg_ctl")
    if found is None:
        raise Unavailable("PostgreSQL server binaries (initdb, pg_ctl) are not installed")
    if os.geteuid() == 0:
        import pwd

        try:
            pwd.getpwnam(_OS_USER)
        except KeyError:
            raise Unavailable(
                f"no user {_OS_USER!r} to run a server as, and root may not"
            ) from None
        if shutil.which("runuser") is None:
            raise Unavailable("runuser is not installed, and root may not run a server")
    return Path(found).resolve().parent


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
