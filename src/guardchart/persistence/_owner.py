"""Who claims: the name of this process, and whether the process of a name still lives."""

from __future__ import annotations

import os
import socket
import uuid

_own: tuple[int, str] | None = None


def owner_id() -> str:
    """Return this process's owner name, ``pid:starttime:uuid@host``.

    It is the same for the life of the process, and another one after ``os.fork``.

    >>> owner_id() == owner_id()
    True
    """
    global _own
    pid = os.getpid()
    if _own is None or _own[0] != pid:
        _own = (pid, f"{pid}:{_start_time(pid) or 0}:{uuid.uuid4().hex[:12]}@{_host()}")
    return _own[1]


def owner_alive(owner: str) -> bool:
    """Return whether the process that made an owner name may still be running.

    Args:
        owner: as ``owner_id`` gave it, or any other text.

    Returns:
        False only where the name is from this host (and this pid namespace) and no process
        has that pid and start time. True for a living one, another host, or a foreign form.

    >>> owner_alive(owner_id())
    True
    """
    head, _, host = owner.partition("@")
    parts = head.split(":")
    if host != _host() or len(parts) != 3 or not (parts[0].isascii() and parts[0].isdigit()):
        return True
    pid = int(parts[0][:12])
    started = _start_time(pid)
    if started is not None:
        return parts[1] == started or parts[1] == "0"
    if os.name != "posix":
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True


def _host() -> str:
    try:
        space = os.readlink("/proc/self/ns/pid")
    except OSError:
        space = ""
    return f"{socket.gethostname()}/{space}" if space else socket.gethostname()


def _start_time(pid: int) -> str | None:
    """Return the start time of a process in clock ticks since boot, None where unknown."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None


# Read when it is imported: a first claim may be made on an event loop, which is not to wait for
# a file, and which a server in development refuses to do.
owner_id()
