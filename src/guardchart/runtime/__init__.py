"""Runs machines: interpreters, their clock, their plugins and the logic bound to a chart.

Semantics stay in the kernel; this layer performs effects.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from guardchart.kernel import Machine
from guardchart.kernel import create_machine as _create_machine
from guardchart.runtime._aio import Interpreter
from guardchart.runtime._clock import Clock, SimulatedClock, SystemClock
from guardchart.runtime._logic import BeforeStep, BeforeStepHook, Host, MachineLogic
from guardchart.runtime._plugins import Plugin
from guardchart.runtime._services import Invocation, ServiceScope, is_async_service
from guardchart.runtime._sync import SyncInterpreter

__all__ = [
    "BeforeStep",
    "BeforeStepHook",
    "Clock",
    "Host",
    "Interpreter",
    "Invocation",
    "MachineLogic",
    "Plugin",
    "ServiceScope",
    "SimulatedClock",
    "SyncInterpreter",
    "SystemClock",
    "create_machine",
    "is_async_service",
]


def create_machine(
    config: Mapping[str, Any] | str | Path,
    logic: MachineLogic | None = None,
    *,
    strict_config: bool = True,
    check_purity: bool = False,
) -> Machine:
    """Compile a chart into an immutable machine.

    Args:
        config: Stately/XState JSON: a dict, its text, or the ``Path`` of a file holding it.
        logic: What the chart's names mean. Without it (or with names missing) the machine
            can be inspected, routed and drawn, and running it raises.
        strict_config: Accepted for compatibility; checks are always on.
        check_purity: Find actions and guards that change a value inside the context they are
            only to read; for development, since it copies the context at each call.

    Returns:
        The machine.

    Raises:
        ChartError: The chart is wrong; ``.path`` is the JSON path of the place.

    Example:
        >>> create_machine({"id": "m", "initial": "a", "states": {"a": {}}}).id
        'm'
    """
    if isinstance(config, Path):
        config = config.read_text(encoding="utf-8")
    return _create_machine(config, logic, strict_config=strict_config, check_purity=check_purity)
