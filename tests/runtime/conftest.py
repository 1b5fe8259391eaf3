"""One fixture that runs a behavioural test on both engines, and a check for leaks."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from guardchart import Interpreter, SyncInterpreter
from guardchart.runtime import create_machine
from guardchart.runtime._logic import MachineLogic


class Rig:
    """Drives an interpreter of either engine in the same words."""

    def __init__(self, engine: str) -> None:
        self.engine = engine
        self.made: list[Any] = []

    @property
    def is_async(self) -> bool:
        return self.engine == "async"

    @property
    def kind(self) -> Any:
        return Interpreter if self.is_async else SyncInterpreter

    async def start(self, machine: Any, logic: MachineLogic | None = None, **options: Any) -> Any:
        if isinstance(machine, dict):
            machine = create_machine(machine, logic)
        return await self.go(self.kind(machine, **options))

    async def restore(self, data: Any, machine: Any, **options: Any) -> Any:
        return await self.go(self.kind.from_snapshot(data, machine, **options))

    async def go(self, interpreter: Any) -> Any:
        self.made.append(interpreter)
        started = interpreter.start()
        if self.is_async:
            assert await started is interpreter
            await interpreter.idle()
        return interpreter

    async def send(self, interpreter: Any, event: Any, **payload: Any) -> Any:
        """Send, and wait until nothing is in flight; the receipt."""
        if not self.is_async:
            return interpreter.send(event, **payload)
        receipt = await interpreter.send(event, wait=True, **payload)
        await interpreter.idle()
        return receipt

    async def settle(self, interpreter: Any, *args: Any, **options: Any) -> None:
        settled = interpreter.settle(*args, **options)
        if self.is_async:
            await asyncio.wait_for(settled, 10)

    async def move(self, clock: Any, ms: float) -> None:
        await clock.increment(ms)

    async def until(self, condition: Callable[[], Any], timeout_s: float = 5.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, "it did not come about in time"
            await asyncio.sleep(0.002)


@pytest.fixture(params=["sync", "async"])
async def rig(request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    made = Rig(request.param)
    yield made
    for interpreter in made.made:
        interpreter.stop()
        assert not interpreter.actors
        assert not interpreter._in_flight()
    for _ in range(5):
        await asyncio.sleep(0)
    tasks = [each.get_name() for each in asyncio.all_tasks() if "guardchart" in each.get_name()]
    assert not tasks, f"leaked tasks: {tasks}"


@pytest.fixture(autouse=True)
def _no_forgotten_exceptions() -> Any:
    """Make what a collected future or coroutine would warn of appear in the test it is from."""
    yield
    gc.collect()


@pytest.fixture
def toggle() -> Any:
    return create_machine(
        {
            "id": "t",
            "initial": "off",
            "states": {"off": {"on": {"FLIP": "on"}}, "on": {"on": {"FLIP": "off"}}},
        }
    )


class Recorder:
    """A plugin that writes down every hook it is called by."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, hook: str) -> Any:
        if not hook.startswith("on_"):
            raise AttributeError(hook)

        def call(interpreter: Any, *args: Any) -> None:
            self.calls.append((hook, interpreter.id, *args))

        return call

    @property
    def hooks(self) -> list[str]:
        return [each[0] for each in self.calls]

    def args(self, hook: str) -> list[tuple[Any, ...]]:
        return [each[2:] for each in self.calls if each[0] == hook]


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


def counter_chart(**more: Any) -> dict[str, Any]:
    """A chart that counts: ``N`` adds one."""
    return {
        "id": "c",
        "initial": "a",
        "context": {"n": 0},
        "states": {"a": {"on": {"N": {"actions": "inc"}}}},
        **more,
    }


def inc(context: Any, event: Any) -> dict[str, Any]:
    return {"n": context["n"] + 1}


COUNT = MachineLogic(actions={"inc": inc})
