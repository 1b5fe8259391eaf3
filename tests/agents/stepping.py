"""An agent under a host that keeps each step: what the durable bridges do, in small."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from guardchart import Machine
from guardchart.agents import (
    AgentStep,
    approval_event,
    execute_agent_request_sync,
    get_agent_requests,
    initial_agent_step,
    pending_approval,
    resolve_agent_step,
    transition_agent_step,
)
from guardchart.kernel import Snapshot, dump, load

START = {"type": "START", "prompt": "please"}


class Stepped:
    """One run, step by step.

    Args:
        machine: The machine.
        json_each: Whether everything crosses JSON between any two steps, as in a host whose
            every step is another process.
        now: The time, epoch milliseconds; it moves only where a test moves it.
    """

    def __init__(
        self,
        machine: Machine,
        ledger: Any,
        *,
        scope: str = "ticket-1",
        input: Any = None,
        json_each: bool = False,
        executors: Any = None,
        run: str | None = None,
        now: float = 1_000.0,
    ) -> None:
        self.machine = machine
        self.given = {"ledger": ledger, "scope": scope}
        self.json_each = json_each
        self.executors = executors
        self.now = now
        self.executed: list[Any] = []
        self.log: list[dict[str, Any]] = []
        self.step = self.keep(initial_agent_step(machine, input, run=run, now=now, **self.given))

    @property
    def context(self) -> dict[str, Any]:
        return dict(self.step.snapshot.context)

    @property
    def state(self) -> str:
        (leaf,) = self.step.snapshot.state_ids
        return leaf.partition(".")[2]

    @property
    def pending(self) -> list[dict[str, Any]]:
        return pending_approval(self.step.snapshot.context)

    @property
    def results(self) -> list[str]:
        return [m["content"] for m in self.context["messages"] if m["role"] == "tool"]

    @property
    def at(self) -> Any:
        """Where the next step starts."""
        if not self.json_each:
            return self.step
        return json.loads(json.dumps(dump(self.step.snapshot)))

    @property
    def requests(self) -> tuple[Any, ...]:
        if not self.json_each:
            return self.step.requests
        found = get_agent_requests(self.machine, self.at, trusted=True, **self.given)
        assert found == self.step.requests
        return found

    def keep(self, step: AgentStep) -> AgentStep:
        self.step = step
        self.log.append(json.loads(json.dumps(step.entry)))
        return step

    def send(self, event: Any, **options: Any) -> Any:
        step = transition_agent_step(
            self.machine, self.at, event, now=self.now, trusted=True, **self.given, **options
        )
        return self.keep(step).receipt

    def execute(self, request: Any, **options: Any) -> Any:
        self.executed.append(request)
        return execute_agent_request_sync(
            request, self.executors, now=self.now, **self.given, **options
        )

    def bring(self, request: Any, output: Any = None, **options: Any) -> Any:
        if "error" not in options:
            options["output"] = output
        step = resolve_agent_step(
            self.machine, self.at, request, now=self.now, trusted=True, **self.given, **options
        )
        return self.keep(step).receipt

    def perform(self, request: Any) -> Any:
        try:
            output = self.execute(request)
        except Exception as error:
            return self.bring(request, error=error)
        if self.json_each:
            output = json.loads(json.dumps(output))
        return self.bring(request, output)

    def run(self, *, timers: bool = True) -> Stepped:
        """Execute what is asked for until nothing is; short timers are served at once."""
        for _ in range(100):
            if self.step.done:
                return self
            requests = self.requests
            for request in requests:
                self.perform(request)
            if not requests:
                due = [t for t in self.step.timers if t.due_at <= self.now + 1_000]
                if not (timers and due):
                    return self
                self.now = max(self.now, due[0].due_at)
                self.send(due[0])
        raise AssertionError("it never came to rest")

    def ask(self, prompt: str = "please") -> Stepped:
        self.send({"type": "START", "prompt": prompt})
        return self.run()

    def approve(self, **extra: Any) -> Any:
        receipt = self.send({**approval_event(self.pending), **extra})
        self.run()
        return receipt


def changed(snapshot: Snapshot, edit: Callable[[dict[str, Any]], None]) -> Snapshot:
    """The snapshot after somebody wrote into it."""
    data = json.loads(json.dumps(dump(snapshot)))
    edit(data)
    return load(snapshot.machine, data)
