"""guardchart in a pydantic-ai app: the gate in front of an Agent's tools, an Agent as a service.

``pip install "guardchart[pydantic-ai]"``.
"""

from __future__ import annotations

from guardchart._extras import (
    PYDANTIC_AI_TESTED,
    check_version,
    installed_version,
    require,
    warn_untested,
)

require("pydantic_ai", extra="pydantic-ai")

from guardchart.pydantic_ai._approvals import approvals_for, pending_approval  # noqa: E402
from guardchart.pydantic_ai._guard import StatechartGuard  # noqa: E402
from guardchart.pydantic_ai._models import model  # noqa: E402
from guardchart.pydantic_ai._service import pydantic_ai_service  # noqa: E402
from guardchart.pydantic_ai._tool import agent_tool_from_machine  # noqa: E402
from guardchart.pydantic_ai._usage import usage_logic  # noqa: E402

__all__ = [
    "PYDANTIC_AI_TESTED",
    "StatechartGuard",
    "agent_tool_from_machine",
    "approvals_for",
    "check_pydantic_ai_version",
    "model",
    "pending_approval",
    "pydantic_ai_service",
    "usage_logic",
]


def check_pydantic_ai_version(version: str | None = None) -> None:
    """Raise unless a pydantic-ai version lies in the range this bridge is tested with.

    Importing the bridge outside of the range only warns.

    Args:
        version: the version's text; None takes the one that is installed.

    Raises:
        ImportError: it is outside the range, or no version. Install a tested one.

    >>> check_pydantic_ai_version("2.68.0")
    """
    found = _installed() if version is None else version
    check_version("pydantic-ai", found, PYDANTIC_AI_TESTED)


def _installed() -> str | None:
    return installed_version("pydantic-ai-slim") or installed_version("pydantic-ai")


warn_untested("pydantic-ai", _installed(), PYDANTIC_AI_TESTED)
