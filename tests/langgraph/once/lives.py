"""Processes that are killed: ``python -m tests.langgraph.once.lives``.

Reads one order a line, forks a process that lives it, and prints how that ended. So imports are
paid for once.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

from tests.langgraph.graphs import start
from tests.langgraph.once.hosts import Host, Place, opened

ROOT = Path(__file__).resolve().parents[3]


class Lives:
    """The process that forks those that die; begun when it is first needed."""

    @functools.cached_property
    def _parent(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.langgraph.once.lives"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    async def die(self, host: Host, doing: str, point: str) -> None:
        """Have a process start a turn or approve its call, and die right after ``point``."""
        code = await self.live(host, doing, point)
        assert code == -signal.SIGKILL, f"it ended with {code}"

    async def live(self, host: Host, doing: str, point: str) -> int:
        """The same; how the process ended, 0 where it came to its end."""
        told = {
            "place": list(host.place),
            "doing": doing,
            "open": {
                "saver": host.kind.name,
                "host": host.name,
                "durability": host.durability,
                "remembers": host.remembers,
                "thread": host.thread,
                "timeout_s": host.timeout_s,
                "kill": point,
            },
        }
        return await asyncio.to_thread(self._live, json.dumps(told))

    def _live(self, order: str) -> int:
        assert self._parent.stdin is not None and self._parent.stdout is not None
        self._parent.stdin.write(order + "\n")
        self._parent.stdin.flush()
        return int(self._parent.stdout.readline())

    def close(self) -> None:
        """End the process that forks."""
        if "_parent" in vars(self):
            self._parent.communicate()


async def live(order: dict[str, Any]) -> None:
    async with opened(place=Place(*order["place"]), **order["open"]) as host:
        if order["doing"] == "start":
            await host.invoke({"event": start()})
        else:
            await host.answer(await host.asked())


def main() -> None:
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            try:
                asyncio.run(live(json.loads(line)))
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
