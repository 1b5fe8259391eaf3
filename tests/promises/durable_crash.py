"""Runs in a store, killed at every call of store, ledger or effect, and taken up again.

``python -m tests.promises.durable_crash <folder> <dsn or -> <sync|async> <ledger|none>
<every|seed>`` forks one process for each life, so that imports are paid for once. A life is
killed by SIGKILL right before or right after its k-th call; with a seed, at a random moment.
Then another process takes the run up, as a person and a worker would. Prints one JSON line a
run: what its last caller saw, and what had happened.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

from guardchart.agents import (
    ModelResponse,
    RetryPolicy,
    ToolCall,
    agent_logic,
    load_chart,
    pending_approval,
    run_agent,
    run_agent_sync,
    tool,
    tool_registry,
)
from guardchart.persistence import SQLiteStore
from guardchart.runtime import create_machine

STORE = ("load", "create", "commit")
LEDGER = ("propose_batch", "decide", "claim", "record", "release", "close", "adopt")
MAX_POINTS = 200
RANDOM_LIVES = 25


class Kill:
    """Counts calls, and kills its process before or after one of them."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.count = 0

    def point(self) -> None:
        self.count += 1
        if self.count == self.at:
            os.kill(os.getpid(), signal.SIGKILL)

    def around(self, target: Any, names: tuple[str, ...]) -> Any:
        for name in names:
            setattr(target, name, self._counted(getattr(target, name)))
        return target

    def _counted(self, call: Any) -> Any:
        def counted(*args: Any, **named: Any) -> Any:
            self.point()
            result = call(*args, **named)
            self.point()
            return result

        return counted


class World:
    """One process with its connections, machine and log of effects."""

    def __init__(self, options: list[str], key: str, kill: Kill) -> None:
        folder, dsn, engine, ledger, _ = options
        self.key, self.is_async = key, engine == "async"
        self.log = Path(folder) / f"{key}.log"
        if dsn == "-":
            self.store: Any = SQLiteStore(Path(folder) / "runs.db")
        else:
            from guardchart.persistence import PostgresStore

            self.store = PostgresStore(dsn)
        kill.around(self.store, STORE)
        kill.around(self.store.ledger, LEDGER)

        def refund(order_id: int) -> str:
            """Refund an order."""
            kill.point()
            self.note(f"refund {order_id}")
            kill.point()
            return "refunded"

        def model(messages: Any, tools: Any) -> ModelResponse:
            self.note("model")
            if messages[-1]["role"] == "user":
                return ModelResponse(None, (ToolCall("call_1", "refund", {"order_id": 7}),))
            return ModelResponse("Done.")

        async def amodel(messages: Any, tools: Any) -> ModelResponse:
            return model(messages, tools)

        # Without a ledger row nothing keeps a call from being entered again.
        tools = tool_registry(tool(refund, timeout_s=0.3, side_effect=ledger == "ledger"))
        self.machine = create_machine(
            load_chart(),
            agent_logic(amodel if self.is_async else model, tools, retry=RetryPolicy(delay_s=0)),
        )

    def note(self, what: str) -> None:
        with self.log.open("a") as log:
            log.write(f"{what}\n")
            log.flush()
            os.fsync(log.fileno())

    def run(self, **given: Any) -> Any:
        if self.is_async:
            return asyncio.run(run_agent(self.machine, store=self.store, key=self.key, **given))
        return run_agent_sync(self.machine, store=self.store, key=self.key, **given)

    def life(self) -> Any:
        """Ask, approve what is shown, and go on until the run has ended."""
        known = self.store.load(self.key) is not None
        result = self.run() if known else self.run(prompt="refund order 7")
        for _ in range(4):
            if result.status != "idle":
                break
            shown = pending_approval(result.context)
            result = self.run(approve=shown) if result.waiting else self.run()
        return result


def process(options: list[str], key: str, at: int = 0) -> int:
    """Live one life in a process of its own; return its pid."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        world = World(options, key, Kill(at))
        result = world.life()
        if at == 0:
            told = [e["content"] for e in result.context["messages"] if e["role"] == "tool"]
            (Path(options[0]) / f"{key}.json").write_text(
                json.dumps({"state": result.final_state, "told": told})
            )
        code = 0
    finally:
        os._exit(code)


def ended(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def report(options: list[str], key: str) -> None:
    """Take a run up in another process, and say what came of it."""
    assert ended(process(options, key)) == 0, key
    told = json.loads((Path(options[0]) / f"{key}.json").read_text())
    log = (Path(options[0]) / f"{key}.log").read_text().splitlines()
    told.update(key=key, effects=log.count("refund 7"), models=log.count("model"))
    print(json.dumps(told), flush=True)


def main() -> None:
    options = sys.argv[1:6]
    if options[4] == "every":
        for at in range(1, MAX_POINTS):
            code = ended(process(options, f"k{at}", at))
            if code == 0:
                return
            assert code == -signal.SIGKILL, code
            report(options, f"k{at}")
        raise AssertionError("a life has more points than were tried")
    dice = random.Random(int(options[4]))
    for number in range(RANDOM_LIVES):
        pid = process(options, f"r{number}", MAX_POINTS)
        time.sleep(dice.uniform(0.0, 0.25))
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        ended(pid)
        report(options, f"r{number}")


if __name__ == "__main__":
    main()
