"""``agent_logic``: what the names of TOOL_LOOP (and of charts like it) mean."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, Literal

from guardchart.agents._actions import LoopActions
from guardchart.agents._budgets import Budget, budget_guards
from guardchart.agents._context import pending_entries
from guardchart.agents._conversation import (
    continued,
    is_final,
    is_start,
    smaller,
    tampered,
)
from guardchart.agents._guards import LoopGuards
from guardchart.agents._hook import LedgerHook
from guardchart.agents._messages import Message
from guardchart.agents._models import ModelCall, is_async_model, reports_cost
from guardchart.agents._retry import RetryPolicy
from guardchart.agents._services import CallModel, RunTool
from guardchart.agents._structured import OutputCheck
from guardchart.errors import AgentConfigError
from guardchart.gate import ToolRegistry, tool_registry
from guardchart.kernel import Event, Machine, Snapshot, StateNode
from guardchart.persistence import default_ledger
from guardchart.runtime import MachineLogic

if TYPE_CHECKING:
    import pydantic

__all__ = ["AgentSettings", "agent_logic"]

_CLAIM_WAIT_S: Final = 5.0
_BATCH_SLACK_S: Final = 5.0
_LARGE: Final = 1 << 19
_EVERY_MODEL_TOKENS: Final = 4096


class AgentSettings:
    """What hosts want to know of an ``agent_logic``; found in ``logic.attachments["agent"]``.

    Attributes:
        registry: The tools.
        retry: The policy of ``timed_out``.
        ledger: The logic's own ledger, None for the process's.
        budget_scope: ``"turn"`` or ``"conversation"``.

    Example:
        >>> from guardchart.agents import FakeModel, agent_logic
        >>> agent_logic(FakeModel([])).attachments["agent"].budget_scope
        'turn'
    """

    def __init__(
        self,
        registry: ToolRegistry,
        retry: RetryPolicy,
        ledger: Any,
        budget_scope: Literal["turn", "conversation"],
    ) -> None:
        self.registry = registry
        self.retry = retry
        self.ledger = ledger
        self.budget_scope = budget_scope

    def ledger_of(self, host: Any) -> Any:
        """The ledger a host brought, else the logic's own, else the process's."""
        brought = getattr(host, "ledger", None)
        if brought is not None:
            return brought
        return self.ledger if self.ledger is not None else default_ledger()

    def next_turn(self, machine: Machine, snapshot: Snapshot, event: Any) -> Snapshot | None:
        """The idle snapshot of the next turn of a finished conversation.

        Returns:
            None where the snapshot is not a finished loop or the event is no START.
        """
        if snapshot.status != "done" or "idle" not in machine.states or not is_start(event):
            return None
        return continued(machine, snapshot, budget_scope=self.budget_scope)

    def tampered(self, machine: Machine, run: str) -> Snapshot | None:
        """The ``error`` end, kind ``tampered``, with a fresh context; None without such a state."""
        return tampered(machine, run) if is_final(machine, "error") else None

    def smaller(self, machine: Machine, snapshot: Snapshot) -> Iterator[Snapshot]:
        """What to save in place of a snapshot that is too large, the best first.

        Returns:
            Nothing where it is not the loop's own context that is too large.
        """
        try:
            size = len(json.dumps(snapshot.context.copy()))
        except (TypeError, ValueError, RecursionError):
            return iter(())
        return smaller(machine, snapshot) if size > _LARGE else iter(())


def agent_logic(
    model: ModelCall,
    tools: ToolRegistry | Iterable[Any] | None = None,
    *,
    budgets: Budget | Mapping[str, Any] | None = None,
    output_model: type[pydantic.BaseModel] | str | None = None,
    max_messages: int = 200,
    summarise: Callable[[list[Message]], list[Message]] | None = None,
    max_output_retries: int = 2,
    system_prompt: str | None = None,
    model_timeout_s: float = 60,
    human_timeout_s: float = 86400,
    retry: RetryPolicy | None = None,
    sync: bool | None = None,
    tracer: Any = None,
    max_tool_calls: int = 8,
    output_parser: Callable[[str], Any] | None = None,
    on_denied: Literal["fail", "retry"] = "fail",
    max_denied: int = 2,
    ledger: Any = None,
    approval_ttl_s: float = 3600,
    budget_scope: Literal["turn", "conversation"] = "turn",
) -> MachineLogic:
    """The logic of TOOL_LOOP: model and tool services, guards, actions and delays.

    Args:
        model: ``(messages, tools) -> ModelResponse``, sync or async.
        tools: The registry; None for an agent that only talks.
        budgets: A `Budget` or a mapping of its fields; 10 turns by default.
        output_model: A pydantic model (or ``"module:Model"``) the final reply must fit.
        max_messages: How many messages the context keeps, cut at turn boundaries.
        summarise: ``messages -> messages``, instead of cutting; a plain function, called within
            a step. One that raises is logged, and the conversation cut.
        max_output_retries: How often a reply that does not fit is asked for again.
        system_prompt: Prepended to every request, never stored.
        model_timeout_s: Seconds a model call may take.
        human_timeout_s: Seconds a decision may take; later ones are refused.
        retry: What happens after a failed model or tool turn; 3 attempts by default.
        sync: Whether the services are synchronous; as the model by default.
        tracer: Kept in ``attachments`` for trace plugins.
        max_tool_calls: The most calls one turn may propose.
        output_parser: ``text -> JSON value`` for ``output_model``.
        on_denied: ``"fail"`` ends the run as ``tool_denied``; ``"retry"`` tells the model, at
            most ``max_denied`` times a run.
        max_denied: See ``on_denied``.
        ledger: Where approvals and claims are kept, unless the host brings its own; the
            process's in-memory ledger by default.
        approval_ttl_s: Seconds an approval is good for.
        budget_scope: Whether a conversation's turns share one budget.

    Returns:
        The logic; ``attachments`` hold ``agent`` (`AgentSettings`), ``registry``, ``ledger``
        and ``tracer``.

    Raises:
        AgentConfigError: An argument is out of range or of the wrong type.

    Source: xstate-statemachine, agents reference: agent_logic.

    Example:
        >>> from guardchart.agents import FakeModel, tool_registry
        >>> logic = agent_logic(FakeModel([{"text": "hi"}]), tool_registry())
        >>> sorted(logic.services)
        ['callModel', 'runTool']
    """
    registry = _registry(tools)
    _callable(summarise=summarise, output_parser=output_parser)
    if is_async_model(summarise):
        raise AgentConfigError(
            "agent_logic: summarise is async, but it is called within a step; make it a plain "
            "function"
        )
    if not callable(model):
        hint = "; docs/models.md shows how to wrap a chat model" if model is not None else ""
        raise AgentConfigError(f"agent_logic: model must be callable: (messages, tools){hint}")
    _seconds(
        model_timeout_s=model_timeout_s,
        human_timeout_s=human_timeout_s,
        approval_ttl_s=approval_ttl_s,
    )
    _counts(1, max_messages=max_messages, max_tool_calls=max_tool_calls)
    _counts(0, max_denied=max_denied)
    _one_of(
        on_denied=(on_denied, "fail", "retry"), budget_scope=(budget_scope, "turn", "conversation")
    )
    if system_prompt is not None and not isinstance(system_prompt, str):
        raise AgentConfigError("agent_logic: system_prompt must be a str, or None")
    if retry is not None and not isinstance(retry, RetryPolicy):
        raise AgentConfigError("agent_logic: retry must be a RetryPolicy of guardchart.agents")
    budget = Budget.of(budgets)
    _warn_of_cost(budget, model)
    model = _capped(budget, model)
    policy = retry if retry is not None else RetryPolicy()
    is_async = is_async_model(model) if sync is None else not sync
    settings = AgentSettings(registry, policy, ledger, budget_scope)
    output = OutputCheck(output_model, output_parser, max_output_retries)
    guards = LoopGuards(
        registry,
        output=output,
        retry=policy,
        max_tool_calls=max_tool_calls,
        on_denied=on_denied,
        max_denied=max_denied,
    )
    actions = LoopActions(
        output=output,
        max_messages=max_messages,
        summarise=summarise,
        judge=guards.judge,
        budget_scope=budget_scope,
    )

    def on_machine(machine: Machine) -> None:
        output.on_machine(machine)
        _check_regions(machine)

    return MachineLogic(
        actions=actions.table(),
        guards={
            **guards.table(),
            **budget_guards(budget.max_tokens, budget.max_usd, budget.max_turns).guards,
        },
        services={
            "callModel": CallModel(model, registry, system_prompt=system_prompt, is_async=is_async),
            "runTool": RunTool(
                registry,
                ledger=settings.ledger_of,
                max_tool_calls=max_tool_calls,
                is_async=is_async,
            ),
        },
        delays={
            "modelTimeout": model_timeout_s * 1000,
            "toolTimeout": _batch_timeout(registry),
            "humanTimeout": human_timeout_s * 1000,
            "retryDelay": _retry_delay(policy),
        },
        before_step=LedgerHook(
            guards,
            ledger=settings.ledger_of,
            human_timeout_s=human_timeout_s,
            approval_ttl_s=approval_ttl_s,
        ),
        on_machine=on_machine,
        attachments={
            "agent": settings,
            "registry": registry,
            "ledger": ledger,
            "tracer": tracer,
        },
    )


def _check_regions(machine: Machine) -> None:
    """Refuse two loops side by side: they would write one conversation and one pending list."""
    for node in machine.nodes.values():
        if node.type != "parallel":
            continue
        asking = [child.key for child in node.states.values() if _asks_model(child)]
        if len(asking) > 1:
            raise AgentConfigError(
                f"state {node.id!r}: the regions {asking} each call the model over one context, so "
                "one's pending calls would overwrite the other's; make each loop a child machine"
            )


def _asks_model(node: StateNode) -> bool:
    return any(invoke.src == "callModel" for invoke in node.invokes) or any(
        map(_asks_model, node.states.values())
    )


def _registry(tools: Any) -> ToolRegistry:
    if tools is None:
        return tool_registry()
    if isinstance(tools, ToolRegistry):
        return tools
    if isinstance(tools, Iterable) and not isinstance(tools, str | bytes | Mapping):
        return tool_registry(*tools)
    raise AgentConfigError("agent_logic: tools must be a ToolRegistry; make one by tool_registry()")


def _callable(**given: Any) -> None:
    for name, value in given.items():
        if value is not None and not callable(value):
            raise AgentConfigError(f"agent_logic: {name} must be callable")


def _seconds(**given: Any) -> None:
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e10:
            raise AgentConfigError(f"agent_logic: {name} must be a number of seconds above zero")


def _counts(least: int, **given: Any) -> None:
    for name, value in given.items():
        if type(value) is not int or value < least:
            raise AgentConfigError(f"agent_logic: {name} must be an int >= {least}")


def _one_of(**given: tuple[Any, ...]) -> None:
    for name, (value, *allowed) in given.items():
        if value not in allowed:
            choice = " or ".join(f'"{each}"' for each in allowed)
            raise AgentConfigError(f"agent_logic: {name} is {choice}")


def _warn_of_cost(budget: Budget, model: Any) -> None:
    if budget.max_usd is not None and not reports_cost(model):
        import warnings

        warnings.warn(
            "max_usd is set, but the model reports no cost; pass prices= to the adapter",
            stacklevel=3,
        )


def _capped(budget: Budget, model: Any) -> Any:
    """A model whose answers declare a cap, so that a token budget is overshot by that at most.

    Providers refuse a cap above what the model can write, so one without a cap of its own is
    given none that not every model could take.
    """
    limit, capped = budget.max_tokens, getattr(model, "capped", None)
    if limit is None or limit < 1 or not callable(capped):
        return model
    if limit > _EVERY_MODEL_TOKENS and getattr(model, "max_output_tokens", None) is None:
        return model
    return capped(limit)


def _batch_timeout(registry: ToolRegistry) -> Callable[[Mapping[str, Any], Any], float]:
    """Milliseconds for a whole batch: readers side by side, side effects one after another."""

    def timeout(context: Mapping[str, Any], event: Event | None) -> float:
        beside = in_order = 0.0
        for entry in pending_entries(context):
            tool = registry.get(entry["name"])
            if tool is None:
                continue
            if tool.side_effect or tool.requires_approval or tool.sequential:
                in_order += 2 * tool.timeout_s + _CLAIM_WAIT_S
            else:
                beside = max(beside, tool.timeout_s)
        return (beside + in_order + _BATCH_SLACK_S) * 1000.0

    return timeout


def _retry_delay(policy: RetryPolicy) -> Callable[[Mapping[str, Any], Any], float]:
    def delay(context: Mapping[str, Any], event: Event | None) -> float:
        retries = context.get("retries", 0)
        return float(policy.delay_ms((retries if type(retries) is int else 0) + 1))

    return delay
