"""Names, parameters and defaults of the user's reference, row by row.

Ours may take more parameters, never fewer, and each with the default that is written there.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest

from guardchart.errors import MissingExtraError

AGENTS = "guardchart.agents"
GRAPH = "guardchart.langgraph"
OPENAI = "guardchart.openai"
ANTHROPIC = "guardchart.anthropic"
PYDANTIC_AI = "guardchart.pydantic_ai"
STORES = "guardchart.persistence"

REQUIRED: Any = inspect.Parameter.empty
ANY: Any = object()
"""A default that the reference leaves open."""

ARGS = "*"
"""A row's marker: what follows is keyword-only."""

Signature = list[Any]

CALLABLES: list[tuple[str, str, Signature]] = [
    (
        AGENTS,
        "tool_registry",
        ["*fns", ARGS, ("timeout_s", 30), ("side_effect", False), ("max_output_chars", 4000)],
    ),
    (
        AGENTS,
        "tool",
        [
            ("fn", REQUIRED),
            ARGS,
            ("timeout_s", ANY),
            ("side_effect", ANY),
            ("name", ANY),
            ("description", ANY),
        ],
    ),
    (
        AGENTS,
        "agent_logic",
        [
            ("model", REQUIRED),
            ("tools", None),
            ARGS,
            ("budgets", None),
            ("output_model", None),
            ("max_messages", 200),
            ("summarise", None),
            ("max_output_retries", 2),
            ("system_prompt", None),
            ("model_timeout_s", 60),
            ("human_timeout_s", 86400),
            ("retry", None),
            ("sync", None),
            ("tracer", None),
            ("max_tool_calls", 8),
            ("output_parser", None),
        ],
    ),
    (
        AGENTS,
        "budget_guards",
        [("max_tokens", None), ("max_usd", None), ("max_turns", None)],
    ),
    *[
        (
            AGENTS,
            name,
            [
                ("machine_or_chart", None),
                ("logic", None),
                ARGS,
                ("model", ANY),
                ("tools", ANY),
                ("prompt", ANY),
                ("event", ANY),
                ("store", None),
                ("key", ANY),
                ("until", ("done", "error")),
                ("clock", ANY),
                ("plugins", ()),
                ("timeout_s", None),
                ("approve", None),
                "**agent_logic_kw",
            ],
        )
        for name in ("run_agent", "run_agent_sync")
    ],
    (
        AGENTS,
        "FakeModel",
        [("script", REQUIRED), ARGS, ("is_async", True), ("name", "fake"), ("default_usage", None)],
    ),
    (
        AGENTS,
        "ModelResponse",
        [("text", ANY), ("tool_calls", ANY), ("usage", ANY), ("model", ANY)],
    ),
    (AGENTS, "ToolCall", [("id", REQUIRED), ("name", REQUIRED), ("arguments", ANY)]),
    (AGENTS, "Usage", [("input_tokens", ANY), ("output_tokens", ANY), ("cost_usd", ANY)]),
    (AGENTS, "Budget", [("max_tokens", None), ("max_usd", None), ("max_turns", 10)]),
    (
        AGENTS,
        "AgentTracePlugin",
        [
            ("sink", None),
            ARGS,
            ("record_content", False),
            ("on_span", None),
            ("clock", None),
        ],
    ),
    (AGENTS, "AgentTracePlugin.totals", ["self"]),
    (
        AGENTS,
        "BudgetPlugin",
        [
            ("max_total_usd", None),
            ("max_total_tokens", None),
            ARGS,
            ("max_tracked_agents", 10_000),
        ],
    ),
    (AGENTS, "BudgetPlugin.guards", ["self"]),
    (AGENTS, "RetryPolicy", [("max_attempts", 3), ("delay_s", 1.0)]),
    (AGENTS, "pending_approval", [("context", REQUIRED)]),
    (
        AGENTS,
        "spawn_agent",
        [
            ("child_chart", REQUIRED),
            ("model", REQUIRED),
            ("tools", None),
            ARGS,
            ("budget", REQUIRED),
            ("parent_tools", None),
            ("name", "agent"),
            ("task_key", "task"),
            ("tracer", None),
            "**agent_logic_kw",
        ],
    ),
    (AGENTS, "handoff_guard", [("allowed", REQUIRED), ARGS, ("name", "handoffAllowed")]),
    (AGENTS, "check_budget_event_declared", [("interpreter", REQUIRED)]),
    (AGENTS, "load_chart", [("name", "tool_loop")]),
    (AGENTS, "state_tools", [("interp", REQUIRED), ("event", None)]),
    (AGENTS, "validate_agent_chart", [("machine", REQUIRED), ("registry", ANY)]),
    (AGENTS, "Tool.validate", ["self", ("arguments", REQUIRED)]),
    (
        AGENTS,
        "ToolRegistry.authorise",
        ["self", ("call", REQUIRED), ("allowed", REQUIRED), ("approved_ids", ANY)],
    ),
    (AGENTS, "scrub", [("value", REQUIRED), ARGS, ("by_key", True)]),
    (
        AGENTS,
        "structured_output",
        [("model_cls", None), ARGS, ("retries", 2), ("use_instructor", None)],
    ),
    (
        AGENTS,
        "validate_structured",
        [("model_cls", REQUIRED), ("value", REQUIRED), ARGS, ("use_instructor", None)],
    ),
    (AGENTS, "json_parser", [("use_instructor", None)]),
    (AGENTS, "instructor_available", []),
    (AGENTS, "ToolDeniedError", [("tool", REQUIRED), ("reason", REQUIRED)]),
    (AGENTS, "ToolTimeoutError", [("tool", REQUIRED), ("timeout_s", REQUIRED)]),
    (AGENTS, "require_sdk", [("name", REQUIRED)]),
    (AGENTS, "field", [("obj", REQUIRED), ("name", REQUIRED)]),
    (AGENTS, "price", [("prices", REQUIRED), ("tokens_in", REQUIRED), ("tokens_out", REQUIRED)]),
    (
        OPENAI,
        "openai_model",
        [
            ("client", REQUIRED),
            ("model", "gpt-4o-mini"),
            ARGS,
            ("prices", None),
            "**create_kw",
        ],
    ),
    (OPENAI, "to_openai_messages", [("messages", REQUIRED)]),
    (OPENAI, "to_openai_tools", [("tools", REQUIRED)]),
    (OPENAI, "from_openai_response", [("response", REQUIRED)]),
    (
        ANTHROPIC,
        "anthropic_model",
        [
            ("client", REQUIRED),
            ("model", "claude-sonnet-4-5"),
            ARGS,
            ("max_tokens", 1024),
            ("prices", None),
            "**create_kw",
        ],
    ),
    (ANTHROPIC, "to_anthropic_messages", [("messages", REQUIRED)]),
    (ANTHROPIC, "to_anthropic_tools", [("tools", REQUIRED)]),
    (ANTHROPIC, "from_anthropic_response", [("response", REQUIRED)]),
    (
        GRAPH,
        "statechart_node",
        [
            ("machine", REQUIRED),
            ("logic", None),
            ARGS,
            ("state_key", "xsm"),
            ("event_from_state", REQUIRED),
            ("result_to_state", None),
        ],
    ),
    (
        GRAPH,
        "route_by_statechart",
        [
            ("machine", REQUIRED),
            ("mapping", REQUIRED),
            ARGS,
            ("state_key", "xsm"),
            ("default", None),
        ],
    ),
    (
        GRAPH,
        "langgraph_service",
        [
            ("compiled_graph", REQUIRED),
            ARGS,
            ("input_from", REQUIRED),
            ("output_to", None),
            ("stream", False),
            ("stream_mode", "values"),
            ("config", None),
            ("on_interrupt", "error"),
        ],
    ),
    (GRAPH, "check_langgraph_version", [("version", REQUIRED)]),
    (STORES, "MemoryStore", [ARGS, ("max_snapshot_bytes", 1 << 20)]),
    (STORES, "SQLiteStore", [("source", REQUIRED), ARGS, ("max_snapshot_bytes", 1 << 20)]),
    (STORES, "persisted", [("store", REQUIRED), ("key", REQUIRED), ("machine", REQUIRED)]),
    (STORES, "apersisted", [("store", REQUIRED), ("key", REQUIRED), ("machine", REQUIRED)]),
    (STORES, "DueTimerScanner", [("store", REQUIRED), ("machine_for_key", REQUIRED)]),
    (STORES, "DueTimerScanner.run_once", ["self", ("now", None)]),
    (STORES, "DueTimerScanner.run_forever", ["self", ("interval_s", 30.0)]),
    (
        PYDANTIC_AI,
        "pydantic_ai_service",
        [
            ("agent", REQUIRED),
            ARGS,
            ("prompt_from", REQUIRED),
            ("deps_from", None),
            ("stream", False),
        ],
    ),
    (PYDANTIC_AI, "usage_logic", [("name", "recordAgentUsage")]),
    (
        PYDANTIC_AI,
        "agent_tool_from_machine",
        [("runner", REQUIRED), ARGS, ("name", "run_statechart"), ("description", ANY)],
    ),
    (PYDANTIC_AI, "check_pydantic_ai_version", [("version", ANY)]),
]

VALUES: list[tuple[str, str, Any]] = [
    (AGENTS, "WAITING_STATES", ("awaiting_human",)),
    (AGENTS, "ALL_TOOLS", "*"),
    (AGENTS, "DEFAULT_TOOL_TIMEOUT_S", 30.0),
    (AGENTS, "DEFAULT_MAX_OUTPUT_CHARS", 4000),
    (AGENTS, "TOOL_LOOP", ANY),
    (AGENTS, "CHARTS_DIR", ANY),
    (AGENTS, "AGENT_REDACT_KEYS", ANY),
    (AGENTS, "Message", ANY),
    (AGENTS, "ModelCall", ANY),
    (AGENTS, "AgentResult", ANY),
    (AGENTS, "AgentError", ANY),
    (AGENTS, "AgentConfigError", ANY),
    (AGENTS, "Tool", ANY),
    (AGENTS, "ToolRegistry", ANY),
    (GRAPH, "LANGGRAPH_TESTED", ANY),
    (PYDANTIC_AI, "PYDANTIC_AI_TESTED", ANY),
    (GRAPH, "LangChainCallbackPlugin", ANY),
    (GRAPH, "INTERRUPT_KEY", "__interrupt__"),
    (GRAPH, "GraphInterruptedError", ANY),
]


def _ids(table: list[Any]) -> list[str]:
    return [f"{row[0].removeprefix('guardchart.')}.{row[1]}" for row in table]


def _module(entry_point: str) -> Any:
    try:
        return importlib.import_module(entry_point)
    except MissingExtraError as exc:
        pytest.skip(str(exc))


def _found(entry_point: str, name: str) -> Any:
    found = _module(entry_point)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _same(default: Any, wanted: Any) -> bool:
    if wanted is ANY:
        return default is not REQUIRED
    if wanted is REQUIRED:
        return default is REQUIRED
    return bool(default == wanted) and isinstance(default, bool) == isinstance(wanted, bool)


@pytest.mark.parametrize(("entry_point", "name", "row"), CALLABLES, ids=_ids(CALLABLES))
def test_a_callable_takes_the_parameters_of_its_row(
    entry_point: str, name: str, row: Signature
) -> None:
    found = _found(entry_point, name)
    parameters = dict(inspect.signature(found).parameters)
    positional = [
        each.name
        for each in parameters.values()
        if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
    ]
    keyword_only = False
    place = 0
    for item in row:
        if item == ARGS:
            keyword_only = True
            continue
        if isinstance(item, str):
            kind = {"**": inspect.Parameter.VAR_KEYWORD}.get(item[:2])
            kind = kind or (inspect.Parameter.VAR_POSITIONAL if item[0] == "*" else None)
            if kind is not None:
                assert any(each.kind is kind for each in parameters.values()), item
                continue
            item = (item, REQUIRED)
        wanted, default = item
        assert wanted in parameters, f"{name} lacks {wanted}"
        assert _same(parameters[wanted].default, default), f"{name}: default of {wanted}"
        if keyword_only:
            assert parameters[wanted].kind is not inspect.Parameter.POSITIONAL_ONLY
        else:
            assert positional[place] == wanted, f"{name}: {wanted} is not at place {place}"
            place += 1
    if "." not in name:
        assert name in _module(entry_point).__all__
    # Whatever more it takes, a call by the row still fits.
    named = {item[0] for item in row if isinstance(item, tuple)} | set(row[:1]) - {ARGS}
    extra = [
        each.name
        for each in parameters.values()
        if each.name not in named
        and each.default is REQUIRED
        and each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)
        and each.name != "self"
    ]
    assert not extra, f"{name} needs {extra} too"


@pytest.mark.parametrize(("entry_point", "name", "value"), VALUES, ids=_ids(VALUES))
def test_a_name_has_the_value_of_its_row(entry_point: str, name: str, value: Any) -> None:
    found = _found(entry_point, name)
    assert value is ANY or found == value
    assert name in _module(entry_point).__all__


def test_no_name_stands_in_two_tables() -> None:
    rows = [(entry, name) for entry, name, _ in [*CALLABLES, *VALUES]]
    assert len(rows) == len(set(rows))


def test_errors_are_of_the_families_the_reference_names() -> None:
    from guardchart.agents import AgentConfigError, AgentError, ToolDeniedError, ToolTimeoutError

    assert issubclass(AgentConfigError, ValueError)
    for each in (AgentConfigError, ToolDeniedError, ToolTimeoutError):
        assert issubclass(each, AgentError)
    denied = ToolDeniedError("pay", "why")
    assert (denied.tool, denied.reason) == ("pay", "why")
    late = ToolTimeoutError("pay", 3.0)
    assert (late.tool, late.timeout_s) == ("pay", 3.0)


def test_a_result_has_the_attributes_the_reference_names() -> None:
    from guardchart.agents import AgentResult

    named = {"final_state", "status", "context", "output", "error", "waiting"}
    assert named <= set(inspect.signature(AgentResult).parameters)
    assert isinstance(AgentResult.usage, property)
