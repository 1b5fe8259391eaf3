"""What a guard costs a pydantic-ai Agent: ``python -m benchmarks.pydantic_ai [--rounds N]``.

The same scripted runs with and without `StatechartGuard`, in one process, taking turns. Each row
is the ratio of CPU times per tool round: a model request, its tool calls, their results. Exit
status 1: a bar was missed.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import statistics
import sys
import time
from typing import Any, NamedTuple

from pydantic_ai import Agent
from pydantic_ai.messages import ModelResponse, TextPart, ToolCallPart
from pydantic_ai.models.function import AgentInfo, FunctionModel

from guardchart import create_machine
from guardchart.gate import GuardSession
from guardchart.persistence import InMemoryLedger
from guardchart.pydantic_ai import StatechartGuard

TOOL_ROUNDS = 10


class Row(NamedTuple):
    """One case, and the ratio it must stay under."""

    title: str
    calls: int
    bar: float


ROWS = (
    Row("one call a round", 1, 1.3),
    Row("four calls a round", 4, 1.3),
)
CHART: dict[str, Any] = {
    "id": "desk",
    "initial": "open",
    "states": {"open": {"meta": {"tools": ["look_up"]}}, "closed": {}},
}


def scripted(calls: int) -> FunctionModel:
    def answer(messages: list[Any], info: AgentInfo) -> ModelResponse:
        turn = sum(isinstance(each, ModelResponse) for each in messages)
        if turn == TOOL_ROUNDS:
            return ModelResponse(parts=[TextPart("done")])
        return ModelResponse(
            parts=[
                ToolCallPart(
                    "look_up",
                    f'{{"order": {turn}, "lines": ["a", "b"], "note": "round {n}"}}',
                    tool_call_id=f"c{turn}-{n}",
                )
                for n in range(calls)
            ]
        )

    return FunctionModel(answer)


def agent(row: Row, guarded: bool) -> Agent[Any, Any]:
    capabilities: list[Any] = []
    if guarded:
        session = GuardSession(create_machine(CHART), ledger=InMemoryLedger())
        capabilities = [StatechartGuard(session)]
    made: Agent[Any, Any] = Agent(scripted(row.calls), capabilities=capabilities)

    @made.tool_plain
    async def look_up(order: int, lines: list[str], note: str = "") -> str:
        """Look up an order."""
        return "delivered"

    return made


def seconds(made: Agent[Any, Any]) -> float:
    """CPU seconds of one run."""

    async def run() -> float:
        began = time.process_time()
        result = await made.run("Where are my orders?")
        spent = time.process_time() - began
        assert result.output == "done", result.output
        return spent

    return asyncio.run(run())


def measured(row: Row, rounds: int) -> tuple[float, float]:
    """Return CPU milliseconds a tool round, bare and guarded: the median of runs in turns."""
    bare, guarded = agent(row, False), agent(row, True)
    for made in (bare, guarded):
        seconds(made)
    times: tuple[list[float], list[float]] = ([], [])
    gc.collect()
    for _ in range(rounds):
        for made, into in zip((bare, guarded), times, strict=True):
            into.append(seconds(made) / TOOL_ROUNDS * 1000)
    return statistics.median(times[0]), statistics.median(times[1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    missed = 0
    print(f"{'':24} {'bare':>9} {'guarded':>9} {'ratio':>6} {'bar':>5}")
    for row in ROWS:
        bare, guarded = measured(row, options.rounds)
        ratio = guarded / bare
        missed += ratio > row.bar
        print(
            f"{row.title:24} {bare:7.2f}ms {guarded:7.2f}ms {ratio:6.2f} {row.bar:5.2f}"
            + ("  missed" if ratio > row.bar else "")
        )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
