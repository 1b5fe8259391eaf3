"""The last toolset before the tools: what the state hides is gone, every call passes the gate."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

from pydantic_ai.exceptions import ToolFailed
from pydantic_ai.tools import AgentDepsT, RunContext, ToolDefinition
from pydantic_ai.toolsets import ToolsetTool, WrapperToolset

from guardchart.gate import NOT_ALLOWED
from guardchart.pydantic_ai._arguments import StrictArguments
from guardchart.pydantic_ai._calls import OWN_KINDS
from guardchart.pydantic_ai._run import GuardRun

__all__ = ["GuardToolset", "skipped"]

Durably = Callable[[RunContext[Any], str], Awaitable[Any]]


@dataclass
class GuardToolset(WrapperToolset[AgentDepsT]):
    """The last toolset before the tools themselves."""

    run: GuardRun
    durably: Durably

    async def get_tools(self, ctx: RunContext[AgentDepsT]) -> dict[str, ToolsetTool[AgentDepsT]]:
        """Return the tools of this step that the state allows, each behind the gate."""
        found = await self.wrapped.get_tools(ctx)
        run = self.run
        for name in run.forget:
            ctx.retries.pop(name, None)
        run.tools.update(found, ctx.validation_context)
        run.session.registry = run.tools.registry
        allowed = run.session.allowed()
        kept = run.kept(ctx.messages)
        out: dict[str, ToolsetTool[AgentDepsT]] = {}
        light = set()
        for name, tool in found.items():
            known = run.tools.by_name.get(name)
            if known is None or not (name in allowed or name in kept):
                continue
            effect = known.tool.side_effect
            if effect and known.kind == "external":
                continue  # it would be handed out before anybody could be asked
            alone = effect or run.session.moves_chart(name)
            if not alone:
                light.add(name)
            out[name] = replace(
                tool,
                tool_def=_definition(tool.tool_def, alone),
                args_validator=StrictArguments(
                    known.shape, name, ToolFailed, self._admitted(name, known.kind)
                ),
            )
        run.light = frozenset(light)
        return out

    def _admitted(self, name: str, kind: str) -> Callable[[], None] | None:
        if kind != "external":
            return None
        run = self.run

        def admitted() -> None:
            # External calls are collected after their siblings have run, and may find the
            # chart elsewhere.
            if name not in run.session.allowed():
                raise ToolFailed(f"error: tool {name!r} denied: {NOT_ALLOWED}")

        return admitted

    async def call_tool(
        self,
        name: str,
        tool_args: dict[str, Any],
        ctx: RunContext[AgentDepsT],
        tool: ToolsetTool[AgentDepsT],
    ) -> Any:
        """Take one call through the gate, with the arguments it would run with."""
        run = self.run
        run.open(ctx.messages, skipped(ctx))

        async def body(values: dict[str, Any]) -> Any:
            return await self.wrapped.call_tool(name, values, ctx, tool)

        durably: Callable[[str], Awaitable[Any]] | None = None
        if run.durable:

            async def durably(ticket: str) -> Any:
                return await self.durably(ctx, ticket)

        return await run.call(name, tool_args, ctx.tool_call_id or "", body, durably)


def _definition(given: ToolDefinition, alone: bool) -> ToolDefinition:
    kind: Any = "function" if given.kind == "unapproved" else given.kind
    if kind == given.kind and (not alone or given.sequential):
        return given
    metadata = given.metadata
    if given.kind == "unapproved":
        # A guard around this one still has to see that it changes something.
        metadata = {**(metadata or {}), "side_effect": True}
    return replace(given, kind=kind, sequential=given.sequential or alone, metadata=metadata)


def skipped(ctx: RunContext[Any]) -> Callable[[str], bool]:
    manager = ctx.tool_manager

    def skip(name: str) -> bool:
        tool_def = None
        if manager is not None and manager.tools is not None:
            tool_def = manager.get_tool_def(name)
        return tool_def is not None and (
            tool_def.kind == "output" or tool_def.tool_kind in OWN_KINDS
        )

    return skip
