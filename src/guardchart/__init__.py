"""guardchart: a statechart between a model and its tools. The model proposes, the chart decides.

This entry point is the kernel and its runtime; it imports no third party package. Tools and
agents live in ``guardchart.gate`` and ``guardchart.agents``, each framework in a bridge of
its own (``guardchart.langgraph``, ...).
"""

from __future__ import annotations

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

__version__ = "0.1.0"

__all__ = [
    "ChartError",
    "DoneEvent",
    "Event",
    "GuardchartError",
    "Interpreter",
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
    "transition",
]
