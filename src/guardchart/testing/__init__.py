"""Conformance kits and stand-ins for tests. Names are loaded when first used.

The kits need pytest; the stand-ins need what the part they belong to needs.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "LangSmithRecorder": "guardchart.testing._langsmith",
    "LedgerConformance": "guardchart.testing._ledger",
    "Refusal": "guardchart.testing._executors",
    "ScriptedExecutors": "guardchart.testing._executors",
    "StoreConformance": "guardchart.testing._store",
}

__all__ = [
    "LangSmithRecorder",
    "LedgerConformance",
    "Refusal",
    "ScriptedExecutors",
    "StoreConformance",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted(_HOME)
