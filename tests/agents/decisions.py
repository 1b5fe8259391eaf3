"""Charts that decide, run bare or under a host, on either engine."""

from __future__ import annotations

import asyncio
from typing import Any

from guardchart import MachineLogic, create_machine
from guardchart.agents import AgentRequestExecutors
from guardchart.agents._request_logic import Binding
from guardchart.agents._sources import bind_executors
from guardchart.runtime import Interpreter, SyncInterpreter


class Script:
    """A ``decide`` that answers with one event after another and keeps its requests."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.requests: list[Any] = []

    def __call__(self, request: Any) -> Any:
        self.requests.append(request)
        answer = self.answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        if isinstance(answer, str):
            answer = {"type": answer}
        return answer if answer is None or "event" in answer else {"event": answer}


class AsyncScript(Script):
    """The same, awaited."""

    is_async = True

    def __call__(self, request: Any) -> Any:
        return self._later(request)

    async def _later(self, request: Any) -> Any:
        await asyncio.sleep(0)
        return super().__call__(request)


def game(**state: Any) -> dict[str, Any]:
    """hp 10; ATTACK leads out, HEAL only below 5 hp, NOTE stays."""
    choosing = {
        "invoke": {"src": "agent.decide", "input": {"prompt": "Your move."}},
        "on": {
            "ATTACK": {"target": "fought", "actions": "hit"},
            "HEAL": {"target": "healed", "guard": "weak"},
            "NOTE": {"actions": "note"},
        },
    }
    return {
        "id": "game",
        "initial": "choosing",
        "context": {"hp": 10, "notes": [], "hit": None},
        "states": {
            "choosing": {**choosing, **state},
            "fought": {"type": "final"},
            "healed": {"type": "final"},
            "fumbled": {},
            "seen": {},
        },
    }


LOGIC = MachineLogic(
    guards={"weak": lambda context, event: context["hp"] < 5},
    actions={
        "hit": lambda context, event: {"hit": event.payload.get("target")},
        "note": lambda context, event: {"notes": [*context["notes"], event.payload]},
        "see": lambda context, event: {"seen": event.data},
        "fail": lambda context, event: {"failed": type(event.error).__name__},
    },
)


def hosted(chart: Any, decide: Any, logic: MachineLogic = LOGIC, **binding: Any) -> Any:
    """The machine under a host that checks guards."""
    machine = chart if not isinstance(chart, dict) else create_machine(chart, logic)
    return bind_executors(machine, Binding(AgentRequestExecutors(decide=decide), **binding))


def play(machine: Any, engine: str = "sync", *events: Any, plugins: Any = ()) -> Any:
    """Run a machine until nothing is in flight; the interpreter, stopped if it still ran."""
    if engine == "sync":
        interpreter = SyncInterpreter(machine, plugins=plugins).start()
        for event in events:
            interpreter.send(event)
        return interpreter.stop()

    async def main() -> Any:
        running = await Interpreter(machine, plugins=plugins).start()
        await running.idle()
        for event in events:
            await running.send(event, wait=True)
            await running.idle()
        return running.stop()

    return asyncio.run(main())


def keys(interpreter: Any) -> set[str]:
    """The active leaves by key."""
    return {each.rpartition(".")[2] for each in interpreter.current_state_ids}
