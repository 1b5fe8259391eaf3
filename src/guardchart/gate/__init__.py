"""The gate: everything between a tool call that a model proposes and one that runs.

`check` judges a call from facts; `authorise` also claims its row and alone makes what an
executor accepts; `GuardSession` does both for frameworks that own their own loop.
"""

from __future__ import annotations

from guardchart._redact import AGENT_REDACT_KEYS, error_text, scrub
from guardchart.errors import DecisionRefused
from guardchart.gate._answers import (
    Answer,
    Outcome,
    answer_from_row,
    close_open,
    closing_text,
    follow,
)
from guardchart.gate._approvals import (
    approval_event,
    decisions_event,
    display,
    pending_item,
    read_decisions,
    sign_decision,
    verify_decision,
)
from guardchart.gate._arguments import (
    MAX_ARGUMENT_BYTES,
    UNPARSEABLE,
    canonical,
    digest,
    parse_arguments,
)
from guardchart.gate._authorise import AuthorisedCall, aauthorise, authorise
from guardchart.gate._batch import (
    Verdict,
    assess,
    lookup_verdicts,
    propose_verdicts,
    slots,
    turn_facts,
)
from guardchart.gate._check import (
    DEFAULT_MAX_TOOL_CALLS,
    MISMATCH,
    NEEDS_APPROVAL,
    NOT_ALLOWED,
    Checked,
    Facts,
    check,
)
from guardchart.gate._registry import DEFAULT_MAX_OUTPUT_CHARS, ToolRegistry, tool_registry
from guardchart.gate._rules import (
    ALL_TOOLS,
    Allowed,
    Rule,
    allowed_in_all,
    allowed_tools,
    as_allowed,
    validate_tools,
)
from guardchart.gate._run import aexecute, arun_authorised, execute, run_authorised
from guardchart.gate._schema import IdempotencyKey
from guardchart.gate._seal import Seal
from guardchart.gate._session import GuardSession
from guardchart.gate._tools import (
    DEFAULT_TOOL_TIMEOUT_S,
    Tool,
    ToolCall,
    shown_name,
    tool,
)
from guardchart.gate._turn import Proposed

__all__ = [
    "AGENT_REDACT_KEYS",
    "ALL_TOOLS",
    "Allowed",
    "Answer",
    "AuthorisedCall",
    "Checked",
    "DEFAULT_MAX_OUTPUT_CHARS",
    "DEFAULT_MAX_TOOL_CALLS",
    "DEFAULT_TOOL_TIMEOUT_S",
    "DecisionRefused",
    "Facts",
    "GuardSession",
    "IdempotencyKey",
    "MAX_ARGUMENT_BYTES",
    "MISMATCH",
    "NEEDS_APPROVAL",
    "NOT_ALLOWED",
    "Outcome",
    "Proposed",
    "Rule",
    "Seal",
    "Tool",
    "ToolCall",
    "ToolRegistry",
    "UNPARSEABLE",
    "Verdict",
    "aauthorise",
    "aexecute",
    "allowed_in_all",
    "allowed_tools",
    "answer_from_row",
    "approval_event",
    "arun_authorised",
    "as_allowed",
    "assess",
    "authorise",
    "canonical",
    "check",
    "close_open",
    "closing_text",
    "decisions_event",
    "digest",
    "display",
    "error_text",
    "execute",
    "follow",
    "lookup_verdicts",
    "parse_arguments",
    "pending_item",
    "propose_verdicts",
    "read_decisions",
    "run_authorised",
    "scrub",
    "shown_name",
    "sign_decision",
    "slots",
    "tool",
    "tool_registry",
    "turn_facts",
    "validate_tools",
    "verify_decision",
]
