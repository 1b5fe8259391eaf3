"""guardchart: a statechart between a model and its tools. The model proposes, the chart decides.

This entry point is the kernel and its runtime; it imports no third party package, and each
name is loaded when it is first used. Tools and agents live in ``guardchart.gate`` and
``guardchart.agents``, each framework in a bridge of its own (``guardchart.langgraph``, ...).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from guardchart.errors import (
        ChartError,
        GuardchartError,
        MissingExtraError,
        NotSupportedError,
        SnapshotDriftError,
        SnapshotError,
        StepError,
    )
    from guardchart.kernel import (
        DoneEvent,
        Event,
        Machine,
        Receipt,
        Snapshot,
        accepted_events,
        can,
        initial_transition,
        transition,
    )
    from guardchart.runtime import (
        Interpreter,
        MachineLogic,
        Plugin,
        SimulatedClock,
        SyncInterpreter,
        SystemClock,
        create_machine,
    )
    from guardchart.runtime._inspector import InspectorPlugin, read_recording
    from guardchart.runtime._sinks import JsonLinesSink

__version__ = "0.1.0"

__all__ = [
    "ChartError",
    "DoneEvent",
    "Event",
    "GuardchartError",
    "InspectorPlugin",
    "Interpreter",
    "JsonLinesSink",
    "Machine",
    "MachineLogic",
    "MissingExtraError",
    "NotSupportedError",
    "Plugin",
    "Receipt",
    "SimulatedClock",
    "Snapshot",
    "SnapshotDriftError",
    "SnapshotError",
    "StepError",
    "SyncInterpreter",
    "SystemClock",
    "accepted_events",
    "can",
    "create_machine",
    "initial_transition",
    "read_recording",
    "transition",
]

_MODULES = {
    "ChartError": "errors",
    "DoneEvent": "kernel",
    "Event": "kernel",
    "GuardchartError": "errors",
    "InspectorPlugin": "runtime._inspector",
    "Interpreter": "runtime",
    "JsonLinesSink": "runtime._sinks",
    "Machine": "kernel",
    "MachineLogic": "runtime",
    "MissingExtraError": "errors",
    "NotSupportedError": "errors",
    "Plugin": "runtime",
    "Receipt": "kernel",
    "SimulatedClock": "runtime",
    "Snapshot": "kernel",
    "SnapshotDriftError": "errors",
    "SnapshotError": "errors",
    "StepError": "errors",
    "SyncInterpreter": "runtime",
    "SystemClock": "runtime",
    "accepted_events": "kernel",
    "can": "kernel",
    "create_machine": "runtime",
    "initial_transition": "kernel",
    "read_recording": "runtime._inspector",
    "transition": "kernel",
}


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
