"""LangChain: the gate in front of the tools of an agent you already have, and runs you can see.

See docs/bridges/langchain.md. Names are loaded when they are first used. `StatechartMiddleware`
needs ``langchain``, `guard_tool_node` and `approval_gate` need ``langgraph``, the others no more
than ``langchain-core``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from guardchart._extras import LANGCHAIN_TESTED, installed_version, require, warn_untested

if TYPE_CHECKING:
    from guardchart.langchain._callbacks import LangChainCallbackPlugin
    from guardchart.langchain._guarded import guard_tool
    from guardchart.langchain._messages import from_langchain_messages, to_langchain_messages
    from guardchart.langchain._middleware import StatechartMiddleware
    from guardchart.langchain._models import chat_model
    from guardchart.langchain._nodes import GuardState, approval_gate, guard_tool_node

__all__ = [
    "GuardState",
    "LANGCHAIN_TESTED",
    "LangChainCallbackPlugin",
    "StatechartMiddleware",
    "approval_gate",
    "chat_model",
    "from_langchain_messages",
    "guard_tool",
    "guard_tool_node",
    "to_langchain_messages",
]

_MODULES = {
    "GuardState": "_nodes",
    "LangChainCallbackPlugin": "_callbacks",
    "StatechartMiddleware": "_middleware",
    "approval_gate": "_nodes",
    "chat_model": "_models",
    "from_langchain_messages": "_messages",
    "guard_tool": "_guarded",
    "guard_tool_node": "_nodes",
    "to_langchain_messages": "_messages",
}

require("langchain_core.messages", extra="langchain")


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warn_untested("LangChain", installed_version("langchain-core"), LANGCHAIN_TESTED)
    value = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
