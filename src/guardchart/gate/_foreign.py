"""Tools of other frameworks: which bridge makes a `Tool` of what an application hands over.

The gate knows the frameworks by the names of their classes alone. Nothing of a framework, and
nothing of its bridge, is imported before somebody registers one of its tools.
"""

from __future__ import annotations

import importlib
from typing import Any, Final

__all__ = ["adapted"]

_BRIDGES: Final = {
    "langchain_core.tools.base.BaseTool": ("guardchart.langchain._tools", "as_tool"),
}
"""Class, by module and qualified name, to the function ``(item, **options) -> Tool``."""


def adapted(item: Any, **options: Any) -> Any:
    """Return a framework's tool as a `Tool`, None where it is no tool of a known framework.

    Args:
        item: what was to be registered.
        options: the keyword arguments of `tool`.

    Raises:
        AgentConfigError: it is one, but cannot be checked or run by the gate.

    >>> adapted(print) is None
    True
    """
    for base in type(item).__mro__:
        home = _BRIDGES.get(f"{base.__module__}.{base.__qualname__}")
        if home is not None:
            make = getattr(importlib.import_module(home[0]), home[1])
            return make(item, **options)
    return None
