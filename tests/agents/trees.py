"""A supervisor under test: one way to drive a tree of agents, whichever engine runs it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from guardchart import Interpreter, Machine, MachineLogic, SyncInterpreter, create_machine
from guardchart.agents import (
    WAITING_STATES,
    FakeModel,
    RetryPolicy,
    handoff_guard,
    load_chart,
    pending_approval,
    spawn_agent,
    tool,
    tool_registry,
)
from guardchart.persistence import InMemoryLedger

AT_ONCE = RetryPolicy(delay_s=0)


def search(query: str) -> str:
    """Search the archive."""
    return f"found: {query}"


class Till:
    """A tool with a side effect, and what it was used for."""

    def __init__(self) -> None:
        self.paid: list[tuple[str, int]] = []

    def registry(self) -> Any:
        def pay(to: str, cents: int) -> str:
            """Send money."""
            self.paid.append((to, cents))
            return f"paid {cents} to {to}"

        return tool_registry(tool(pay, side_effect=True), search)


def pays(to: str, cents: int, **more: Any) -> dict[str, Any]:
    return {"tool": "pay", "args": {"to": to, "cents": cents}, **more}


def per_task(scripts: Mapping[str, list[Any]], is_async: bool) -> Any:
    """A model that plays the script of the task it is asked about."""
    models = {task: FakeModel(script, is_async=is_async) for task, script in scripts.items()}

    def task_of(messages: list[Any]) -> str:
        return next(str(each["content"]) for each in messages if each["role"] == "user")

    if is_async:

        async def answer(messages: Any, tools: Any) -> Any:
            return await models[task_of(messages)](messages, tools)  # type: ignore[misc]

        return answer

    def answer_sync(messages: Any, tools: Any) -> Any:
        return models[task_of(messages)](messages, tools)

    return answer_sync


def store_plan(context: Any, event: Any) -> dict[str, Any]:
    tasks = list(event.payload["tasks"])
    return {"tasks": tasks, "outstanding": len(tasks)}


def hand_off(scope: Any, context: Any, event: Any, action: Any) -> None:
    for task in context["tasks"]:
        scope.send("HANDOFF", **{"from": "planner", "to": "worker", "task": task})


def collecting(key: str, what: str) -> Callable[[Any, Any], dict[str, Any]]:
    return lambda context, event: {key: [*context[key], event.payload[what]]}


def all_reported(context: Any, event: Any) -> bool:
    return 0 < context["outstanding"] <= len(context["results"]) + len(context["failures"])


def supervisor_logic(worker: MachineLogic, **guard: Any) -> MachineLogic:
    return MachineLogic(
        actions={
            "storePlan": store_plan,
            "handOffTasks": hand_off,
            "collectResult": collecting("results", "result"),
            "collectFailure": collecting("failures", "error"),
        },
        guards={"allWorkersReported": all_reported},
    ).merge(worker, handoff_guard({"planner": ["worker"]}, **guard))


def supervisor_chart(*tools: str) -> dict[str, Any]:
    """The shipped chart with other tools for its workers."""
    chart = load_chart("supervisor")
    workers = chart["states"]["running"]["states"]["workers"]
    workers["meta"]["tools"] = workers["states"]["working"]["meta"]["tools"] = list(tools)
    return chart


class Desk:
    """A supervisor whose workers pay and search."""

    def __init__(self, engine: str, scripts: Mapping[str, list[Any]], **options: Any) -> None:
        self.engine = engine
        till, ledger = options.pop("till", None), options.pop("ledger", None)
        self.till = Till() if till is None else till
        self.ledger = InMemoryLedger() if ledger is None else ledger
        self.model = options.pop("model", None) or per_task(scripts, self.is_async)
        options.setdefault("budget", {"max_turns": 4})
        options.setdefault("retry", AT_ONCE)
        worker = spawn_agent(None, self.model, self.till.registry(), name="worker", **options)
        self.machine = create_machine(supervisor_chart("pay", "search"), supervisor_logic(worker))
        self.live: Any = None

    @property
    def is_async(self) -> bool:
        return self.engine == "async"

    async def start(self, snapshot: Any = None, **options: Any) -> Any:
        kind: Any = Interpreter if self.is_async else SyncInterpreter
        options = {"scope": "desk-1", "ledger": self.ledger, **options}
        if snapshot is None:
            self.live = kind(self.machine, **options)
        else:
            self.live = kind.from_snapshot(snapshot, self.machine, restart_services=True, **options)
        self.live.start()
        await self.rest()
        return self.live

    async def rest(self) -> None:
        if self.is_async:
            await self.live.settle(30, waiting=WAITING_STATES)
        else:
            self.live.settle(30, waiting=WAITING_STATES)

    async def send(self, event: Any, /, **payload: Any) -> Any:
        if self.is_async:
            receipt = await self.live.send(event, wait=True, **payload)
        else:
            receipt = self.live.send(event, **payload)
        await self.rest()
        return receipt

    async def plan(self, *tasks: str) -> Any:
        return await self.send("PLAN", tasks=list(tasks))

    @property
    def pending(self) -> list[dict[str, Any]]:
        return pending_approval(self.live.context)

    @property
    def context(self) -> Mapping[str, Any]:
        return dict(self.live.context)

    @property
    def state(self) -> str:
        return ", ".join(sorted(each.partition(".")[2] for each in self.live.current_state_ids))

    def stop(self) -> None:
        if self.live is not None:
            self.live.stop()


def running(machine: Machine, engine: str, **options: Any) -> Any:
    kind: Any = Interpreter if engine == "async" else SyncInterpreter
    return kind(machine, **options).start()


async def quiet(live: Any) -> Any:
    if live.engine == "async":
        await asyncio.wait_for(live.idle(), 10)
    return live
