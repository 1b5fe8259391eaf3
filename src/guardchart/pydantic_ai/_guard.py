"""`StatechartGuard`: a chart in front of every tool of a pydantic-ai Agent."""

from __future__ import annotations

import copy
import inspect
import logging
import sys
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from pydantic_ai.capabilities import AbstractCapability, CapabilityOrdering, durable_operation
from pydantic_ai.exceptions import ModelRetry, UserError
from pydantic_ai.tools import AgentDepsT, DeferredToolRequests, RunContext, ToolDefinition
from pydantic_ai.toolsets import AbstractToolset
from pydantic_graph import End

from guardchart.errors import AgentConfigError
from guardchart.gate import NOT_ALLOWED, GuardSession, ToolCall
from guardchart.pydantic_ai._calls import OWN_KINDS, Tools, asks, names
from guardchart.pydantic_ai._outputs import output_name, output_wanted
from guardchart.pydantic_ai._report import unpoliced
from guardchart.pydantic_ai._run import GuardRun
from guardchart.pydantic_ai._toolset import GuardToolset, skipped
from guardchart.pydantic_ai._usage import ledger_of
from guardchart.runtime import Interpreter, ServiceScope, SyncInterpreter

if TYPE_CHECKING:
    from pydantic_ai.agent import AbstractAgent
    from pydantic_ai.models import ModelRequestContext
    from pydantic_ai.output import OutputContext

__all__ = ["StatechartGuard"]

_LOG = logging.getLogger("guardchart")
DEFAULT_TIMEOUT_S = 300.0
_MAX_SESSIONS = 1024
_TOOL_SEARCH = "tool_search"
"""The provider looks for tools; those it finds are called as any other."""
NOT_NOW = "An answer is not possible in this state; go on with the tools you have."

Chart: TypeAlias = GuardSession | Interpreter | SyncInterpreter | ServiceScope
"""A GuardSession, or an interpreter that was started."""
Runner: TypeAlias = Chart | Callable[[RunContext[AgentDepsT]], Chart | Awaitable[Chart]]
"""A chart, or a callable of RunContext that returns one."""


class StatechartGuard(AbstractCapability[AgentDepsT]):
    """A capability that lets the chart decide about every tool call of an agent.

    It covers tools of the agent, of a run, dynamic ones and MCP servers, whatever other
    capabilities do. Attach it once, last in the list: ``Agent(..., capabilities=[guard])``.

    Args:
        runner: the chart: a `GuardSession` (made without a registry: the agent brings the
            tools), an interpreter that was started, or a function of ``RunContext`` that
            returns either, so that each conversation can have its own.
        scope: under what calls are filed: text, or a function of ``RunContext``; None takes the
            conversation's id. Needed under a durable engine, as is ``id``.
        on_denied: ``fail_call`` tells the model that the call failed; ``fail_run`` raises.
        native: ``deny`` takes the provider's own tools out of each request, since nobody can
            check them; ``allow`` leaves them.
        side_effects: names of tools that change something, beside those registered with
            ``requires_approval=True`` or the metadata ``side_effect: True``.
        max_denied: how many refused calls a run survives.
        id: names this guard. A guard passed to a run replaces the agent's of the same id; two
            guards without one both apply.
        timeout_s: seconds a side effect, or a tool that moves the chart, may take that has no
            timeout of its own. Others are bounded by pydantic-ai's own ``timeout=`` alone.

    Raises:
        AgentConfigError: an argument is not usable. Nothing was attached.

    >>> import asyncio
    >>> from pydantic_ai import Agent
    >>> from pydantic_ai.models.test import TestModel
    >>> from guardchart import create_machine
    >>> chart = {"id": "desk", "initial": "open", "states": {
    ...     "open": {"meta": {"tools": ["look_up"]}}}}
    >>> guard = StatechartGuard(GuardSession(create_machine(chart)))
    >>> agent = Agent(TestModel(), capabilities=[guard])
    >>> @agent.tool_plain
    ... def look_up(order: int) -> str:
    ...     return "delivered"
    >>> @agent.tool_plain
    ... def wipe() -> str:
    ...     return "gone"
    >>> asyncio.run(agent.run("Where is order 7?")).output
    '{"look_up":"delivered"}'
    """

    def __init__(
        self,
        runner: Runner[AgentDepsT],
        *,
        scope: str | Callable[[RunContext[AgentDepsT]], str] | None = None,
        on_denied: Literal["fail_call", "fail_run"] = "fail_call",
        native: Literal["deny", "allow"] = "deny",
        side_effects: Collection[str] = (),
        max_denied: int = 8,
        id: str | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        defer_loading: bool = False,
    ) -> None:
        if on_denied not in ("fail_call", "fail_run"):
            raise AgentConfigError("StatechartGuard: on_denied is fail_call or fail_run")
        if native not in ("deny", "allow"):
            raise AgentConfigError("StatechartGuard: native is deny or allow")
        if defer_loading:
            raise AgentConfigError(
                "StatechartGuard: a guard that the model has to load guards nothing; "
                "leave out defer_loading"
            )
        if isinstance(side_effects, str):
            raise AgentConfigError("StatechartGuard: side_effects is a list of tool names")
        if type(max_denied) is not int or max_denied < 0:
            raise AgentConfigError("StatechartGuard: max_denied is a number from 0")
        if not callable(runner) and not _is_runner(runner):
            raise AgentConfigError(
                "StatechartGuard: runner is a GuardSession, a started interpreter, or a function "
                f"of RunContext, not {type(runner).__name__}"
            )
        self.id = id
        self.description = None
        self.defer_loading = False
        self._runner: Any = runner
        self._scope = scope
        self._on_denied = on_denied
        self._native = native
        self._side_effects = frozenset(side_effects)
        self._max_denied = max_denied
        self._timeout_s = timeout_s
        # Shared by the copies that pydantic-ai makes of this guard.
        self.dropped: set[tuple[str, str]] = set()
        self.agents: list[Any] = []
        self._sessions: OrderedDict[str, GuardSession] = OrderedDict()
        self._run: GuardRun | None = None

    # Attaching

    def get_ordering(self) -> CapabilityOrdering:
        """Stand innermost: nothing may change a call between its check and its body."""
        return CapabilityOrdering(position="innermost")

    def for_agent(self, agent: AbstractAgent[AgentDepsT, Any]) -> AbstractCapability[AgentDepsT]:
        """Say what of this agent cannot be policed; the agent keeps this guard."""
        for line in unpoliced(agent, native=self._native):
            _LOG.warning("StatechartGuard: %s", line)
        if not any(each is agent for each in self.agents):
            self.agents.append(agent)
        return self

    def session_of(self, scope: str) -> GuardSession:
        """Return the gate of one conversation, for whoever decides about its calls.

        Args:
            scope: of the conversation, as in the metadata of a call that waits.

        Raises:
            AgentConfigError: the runner is a function of ``RunContext``, and this process has
                not seen the conversation. Use the session itself.
        """
        known = self._sessions.get(scope)
        if known is not None:
            return known
        if not _is_runner(self._runner):
            raise AgentConfigError(
                "StatechartGuard: this process has not seen that conversation, and its runner is "
                "a function of RunContext; pass the conversation's GuardSession instead"
            )
        return _session(self._runner, scope)

    def unpoliced(self, agent: AbstractAgent[Any, Any]) -> list[str]:
        """Return what of an agent this guard cannot police, one sentence each."""
        return unpoliced(agent, native=self._native)

    async def for_run(self, ctx: RunContext[AgentDepsT]) -> AbstractCapability[AgentDepsT]:
        """Return a copy that holds what belongs to one run."""
        runner = self._runner
        if callable(runner) and not _is_runner(runner):
            runner = runner(ctx)
            if inspect.isawaitable(runner):
                runner = await runner
        made = copy.copy(self)
        tools = Tools(
            side_effects=self._side_effects, timeout_s=self._timeout_s, max_output_chars=4000
        )
        session = _session(runner, self._filed_under(ctx))
        self._sessions[session.host.scope] = session
        self._sessions.move_to_end(session.host.scope)
        while len(self._sessions) > _MAX_SESSIONS:
            self._sessions.popitem(last=False)
        made._run = GuardRun(
            session,
            tools,
            on_denied=self._on_denied,
            max_denied=self._max_denied,
            dropped=self.dropped,
            run_id=ctx.run_id,
        )
        return made

    def _filed_under(self, ctx: RunContext[AgentDepsT]) -> str:
        scope = self._scope(ctx) if callable(self._scope) else self._scope
        if scope is None:
            scope = ctx.conversation_id
        if not isinstance(scope, str) or not scope:
            raise AgentConfigError("StatechartGuard: scope= must give a text that is not empty")
        return scope

    async def before_run(self, ctx: RunContext[AgentDepsT]) -> None:
        """Refuse a wiring in which something could change a call behind this guard.

        Raises:
            UserError: a capability that wraps toolsets lies inside this one, or a durable
                engine replays the run and ``id`` or ``scope`` is missing. Nothing ran.
        """
        run = self._state()
        if (inside := _inside(ctx.root_capability, self)) is not None:
            raise UserError(
                f"{inside} wraps toolsets inside of StatechartGuard, where it could change a "
                "call that was checked; list the guard after it"
            )
        if ctx.in_durable_context:
            if self.id is None or self._scope is None:
                raise UserError(
                    "StatechartGuard under a durable engine needs id= and scope=: the default "
                    "conversation id follows the workflow's, so a fork would enter again"
                )
            run.durable = True

    def _state(self) -> GuardRun:
        if self._run is None:
            raise UserError("StatechartGuard is used outside of a run")
        return self._run

    # Tools

    def get_wrapper_toolset(
        self, toolset: AbstractToolset[AgentDepsT]
    ) -> AbstractToolset[AgentDepsT] | None:
        """Put the gate around every tool of the run."""
        run = self._run
        return None if run is None else GuardToolset(toolset, run, self._durable_call)

    @durable_operation(name="call")
    async def _durable_call(self, ctx: RunContext[Any], ticket: str) -> Any:
        return await self._state().perform(ticket)

    async def before_tool_execute(
        self,
        ctx: RunContext[AgentDepsT],
        *,
        call: Any,
        tool_def: ToolDefinition,
        args: dict[str, Any],
    ) -> dict[str, Any]:
        """Hold tools that other capabilities add around this one to the same allow-list."""
        run = self._state()
        name = tool_def.name
        if name in run.tools.by_name or tool_def.tool_kind in OWN_KINDS:
            return args
        proposed = ToolCall(call.tool_call_id, call.tool_name)
        if name not in run.session.allowed():
            run.refuse(proposed, NOT_ALLOWED)
        if asks(tool_def, self._side_effects):
            run.refuse(
                proposed, "it changes something, and runs where nobody can hold it to one entry"
            )
        return args

    # Model requests

    async def prepare_model_request(
        self, ctx: RunContext[AgentDepsT], request_context: ModelRequestContext
    ) -> ModelRequestContext:
        """Show the model what it may call now, and nothing else."""
        run = self._state()
        run.asked = True
        given = request_context.model_request_parameters
        allowed = run.session.allowed()
        kept = run.kept(ctx.messages)
        shown = [
            each
            for each in given.function_tools
            if each.name in allowed or each.name in kept or each.tool_kind in OWN_KINDS
        ]
        native = [
            each
            for each in given.native_tools
            if self._native == "allow" or each.kind == _TOOL_SEARCH
        ]
        if len(shown) != len(given.function_tools) or len(native) != len(given.native_tools):
            given = replace(given, function_tools=shown, native_tools=native)
        if given.instruction_parts is None and run.instructs:
            # Otherwise what an earlier state said would be sent again, from the history.
            given = replace(given, instruction_parts=[])
        request_context.model_request_parameters = given
        return request_context

    def get_instructions(self) -> Any:
        """Add the ``meta.instructions`` of the active states to each request."""
        run = self._run
        if run is None or not run.instructs:
            return None

        # Async: pydantic-ai hands a plain function to a thread.
        async def instructions(ctx: RunContext[Any]) -> str | None:
            found = [each for each in run.session.meta("instructions") if isinstance(each, str)]
            return "\n\n".join(found) or None

        return instructions

    # Nodes

    async def before_node_run(self, ctx: RunContext[AgentDepsT], *, node: Any) -> Any:
        """Take an answer's calls as one turn before any of them is looked at."""
        run = self._state()
        if hasattr(node, "model_response"):
            run.open(ctx.messages, skipped(ctx))
        elif hasattr(node, "request"):
            run.asked = True
        return node

    async def after_node_run(self, ctx: RunContext[AgentDepsT], *, node: Any, result: Any) -> Any:
        """Tell the chart what the framework refused by itself; close what an answer leaves open."""
        if not hasattr(node, "model_response"):
            return result
        run = self._state()
        ended = isinstance(result, End)
        last = ctx.messages[-1] if ended and ctx.messages else getattr(result, "request", None)
        run.settle(getattr(last, "parts", ()))
        if ended and not isinstance(result.data.output, DeferredToolRequests):
            run.close(ctx.messages)
        return result

    # Outputs

    async def prepare_output_tools(
        self, ctx: RunContext[AgentDepsT], tool_defs: list[ToolDefinition]
    ) -> list[ToolDefinition]:
        """Show the output tools that the state allows."""
        session = self._state().session
        return [each for each in tool_defs if output_wanted(session, each.name)]

    async def before_output_process(
        self, ctx: RunContext[AgentDepsT], *, output_context: OutputContext, output: Any
    ) -> Any:
        """Send an answer back that the state does not want; it costs an output retry."""
        run = self._state()
        if output_wanted(run.session, output_name(output_context)):
            return output
        if not ctx.partial_output:
            run.output_denied()
        raise ModelRetry(NOT_NOW)


def _is_runner(value: Any) -> bool:
    return isinstance(value, (GuardSession, Interpreter, SyncInterpreter, ServiceScope))


def _session(runner: Any, scope: str) -> GuardSession:
    """Return the session of one conversation on a runner's chart."""
    if isinstance(runner, ServiceScope):
        interpreter = runner.interpreter
        base = GuardSession(interpreter, None, _ledger(interpreter), interpreter.host.scope)
        return base.conversation(scope, on_behalf_of=runner)
    if isinstance(runner, (Interpreter, SyncInterpreter)):
        runner = GuardSession(runner, None, _ledger(runner), runner.host.scope)
    if not isinstance(runner, GuardSession):
        raise AgentConfigError(
            "StatechartGuard: the function must return a GuardSession or a started interpreter, "
            f"not {type(runner).__name__}"
        )
    return runner.conversation(scope)


def _ledger(interpreter: Any) -> Any:
    return ledger_of(interpreter.host.ledger, interpreter.logic)


def _inside(root: AbstractCapability[Any] | None, guard: AbstractCapability[Any]) -> str | None:
    """Return the capability that wraps toolsets inside of a guard, by the name of its class."""
    leaves: list[AbstractCapability[Any]] = []
    if root is not None:
        root.apply(leaves.append)
    if guard not in leaves:
        return None
    base = sys.modules.get("pydantic_ai.durable_exec._base")
    durable = getattr(base, "BaseDurabilityCapability", ())
    wraps = AbstractCapability.get_wrapper_toolset
    found = [
        type(each).__name__
        for each in leaves[leaves.index(guard) + 1 :]
        if type(each).get_wrapper_toolset is not wraps
        and not isinstance(each, (StatechartGuard, *([durable] if durable else [])))
    ]
    return names(found) if found else None
