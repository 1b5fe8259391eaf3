"""`agent_tool_from_machine`: a statechart as a tool of an outer agent."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

from pydantic_ai import Tool
from pydantic_ai.exceptions import ApprovalRequired
from pydantic_ai.tools import RunContext
from pydantic_core import to_jsonable_python

from guardchart.agents import pending_approval, run_agent
from guardchart.errors import AgentConfigError
from guardchart.kernel import Machine

__all__ = ["agent_tool_from_machine"]

_DESCRIPTION = "Hand a task to a process that works by its own rules, and get its result."


def agent_tool_from_machine(
    runner: Machine | Callable[..., Any],
    *,
    name: str = "run_statechart",
    description: str = _DESCRIPTION,
    store: Any = None,
) -> Tool[object]:
    """Make a machine a tool of a pydantic-ai agent, its own budgets and rules still in force.

    The tool gives ``{"state", "output", "error"}`` and nothing of the inner conversation.

    With a store, a machine that waits for a person pauses the outer run: the tool raises
    ``ApprovalRequired`` with ``{"machine", "key", "pending"}`` under ``metadata["guardchart"]``.
    Decide in the *inner* machine (``run_agent(machine, store=store, key=key, approve=pending)``),
    then resume the outer run with ``ToolApproved()``, after a rejection as well: the machine then
    says itself how it ended. A ``ToolDenied`` leaves the inner run to its own deadline.

    Args:
        runner: a built machine; or a function ``(prompt) -> AgentResult``, sync or async. One
            that takes ``key`` is given the run's, and ``prompt=None`` when it is to go on.
        name: the tool's name.
        description: what the outer model is told.
        store: where inner runs are kept between the pause and the resume. Without one, a machine
            that waits is reported as it stands.

    Raises:
        AgentConfigError: neither a machine nor a function.

    >>> import asyncio
    >>> from guardchart import create_machine
    >>> from guardchart.agents import TOOL_LOOP, FakeModel, agent_logic
    >>> machine = create_machine(TOOL_LOOP, agent_logic(FakeModel([{"text": "42"}])))
    >>> tool = agent_tool_from_machine(machine, name="deep_thought")
    >>> asyncio.run(tool.function("What is the answer?"))
    {'state': 'toolLoop.done', 'output': '42', 'error': None}

    Source: xstate-statemachine, agents reference: pydantic-ai.
    """
    if not isinstance(runner, Machine) and not callable(runner):
        raise AgentConfigError(
            f"agent_tool_from_machine: expected a machine or a function, not "
            f"{type(runner).__name__}"
        )
    machine = _Runner(runner, store)

    async def run_statechart(ctx: RunContext[object], prompt: str) -> dict[str, Any]:
        key = f"{ctx.conversation_id}:{ctx.tool_call_id}"
        return await machine.run(prompt, key)

    made: Tool[object] = Tool(run_statechart, name=name, description=description, takes_ctx=True)

    async def function(prompt: str) -> dict[str, Any]:
        return await machine.run(prompt, None)

    # By hand it is called without a context; pydantic-ai itself calls what it made its schema of.
    made.function = function
    return made


class _Runner:
    """Runs the machine, or has it run, and reads what came of it."""

    def __init__(self, runner: Any, store: Any) -> None:
        self._runner = runner
        self._store = store
        self._keyed = isinstance(runner, Machine) or _takes_key(runner)

    async def run(self, prompt: str, key: str | None) -> dict[str, Any]:
        resumable = self._store is not None and key is not None and self._keyed
        going_on = resumable and await asyncio.to_thread(self._store.load, key) is not None
        result = await self._result(None if going_on else prompt, key, resumable)
        if resumable and result.waiting:
            shown = {
                "machine": getattr(self._runner, "id", None),
                "key": key,
                "pending": pending_approval(result.context),
            }
            raise ApprovalRequired(metadata={"guardchart": shown})
        error = result.error
        if error is None and result.waiting:
            error = {"kind": "waiting", "message": "it waits for a person; nobody can resume it"}
        return {
            "state": result.final_state,
            "output": to_jsonable_python(result.output, fallback=str),
            "error": None if error is None else to_jsonable_python(error, fallback=str),
        }

    async def _result(self, prompt: str | None, key: str | None, resumable: bool) -> Any:
        if isinstance(self._runner, Machine):
            kept: dict[str, Any] = {"store": self._store, "key": key} if resumable else {}
            return await run_agent(self._runner, prompt=prompt, **kept)
        found = self._runner(prompt, key=key) if self._keyed else self._runner(prompt)
        return await found if inspect.isawaitable(found) else found


def _takes_key(fn: Any) -> bool:
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(each.name == "key" or each.kind is each.VAR_KEYWORD for each in parameters)
