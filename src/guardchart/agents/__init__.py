"""Agents as statecharts: the model proposes, the chart decides.

Everything of ``guardchart.gate`` that an agent's author needs is exported here too.
"""

from __future__ import annotations

from guardchart.agents._approval import pending_approval
from guardchart.agents._budgets import Budget, budget_guards
from guardchart.agents._charts import (
    CHARTS_DIR,
    TOOL_LOOP,
    WAITING_STATES,
    load_chart,
    state_tools,
    validate_agent_chart,
)
from guardchart.agents._loop import AgentSettings, agent_logic
from guardchart.agents._messages import Message
from guardchart.agents._models import (
    FakeModel,
    ModelCall,
    ModelResponse,
    RetryPolicy,
    Usage,
)
from guardchart.agents._providers import field, price, require_sdk
from guardchart.agents._run import AgentResult, run_agent, run_agent_sync
from guardchart.errors import (
    AgentConfigError,
    AgentError,
    NotSentError,
    ToolDeniedError,
    ToolTimeoutError,
)
from guardchart.gate import (
    AGENT_REDACT_KEYS,
    ALL_TOOLS,
    DEFAULT_MAX_OUTPUT_CHARS,
    DEFAULT_TOOL_TIMEOUT_S,
    GuardSession,
    IdempotencyKey,
    Seal,
    Tool,
    ToolCall,
    ToolRegistry,
    approval_event,
    decisions_event,
    display,
    scrub,
    tool,
    tool_registry,
)

__all__ = [
    "AGENT_REDACT_KEYS",
    "ALL_TOOLS",
    "AgentConfigError",
    "AgentError",
    "AgentResult",
    "AgentSettings",
    "Budget",
    "CHARTS_DIR",
    "DEFAULT_MAX_OUTPUT_CHARS",
    "DEFAULT_TOOL_TIMEOUT_S",
    "FakeModel",
    "GuardSession",
    "IdempotencyKey",
    "Message",
    "ModelCall",
    "ModelResponse",
    "NotSentError",
    "RetryPolicy",
    "Seal",
    "TOOL_LOOP",
    "Tool",
    "ToolCall",
    "ToolDeniedError",
    "ToolRegistry",
    "ToolTimeoutError",
    "Usage",
    "WAITING_STATES",
    "agent_logic",
    "approval_event",
    "budget_guards",
    "decisions_event",
    "display",
    "field",
    "load_chart",
    "pending_approval",
    "price",
    "require_sdk",
    "run_agent",
    "run_agent_sync",
    "scrub",
    "state_tools",
    "tool",
    "tool_registry",
    "validate_agent_chart",
]
