"""The built-in sources a chart can invoke by name, and the binding of a host's executors."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, Final

from guardchart.agents._decisions import decide_source
from guardchart.agents._request_logic import Binding, RequestLogic
from guardchart.agents._requests import (
    AgentDecisionExecutor,
    AgentRequestExecutor,
    AgentUserInputExecutor,
    executor_form,
)
from guardchart.agents._text_logic import text_source, user_input_source
from guardchart.errors import AgentConfigError
from guardchart.kernel import Invoke, Machine
from guardchart.runtime import MachineLogic

__all__ = ["BUILT_IN", "agent_sources", "bind_executors", "with_sources"]


def _built_in() -> dict[str, RequestLogic]:
    decide, ask = decide_source(), user_input_source()
    generate, stream = text_source(False), text_source(True)
    return {
        "agent.decide": decide,
        "agent.generate_text": generate,
        "agent.generateText": generate,
        "agent.stream_text": stream,
        "agent.streamText": stream,
        "agent.user_input": ask,
        "agent.userInput": ask,
    }


BUILT_IN: Final[Mapping[str, RequestLogic]] = _built_in()
"""The built-in sources by name; those of several words also as XState spells them."""


def agent_sources(
    *,
    generate_text: AgentRequestExecutor | None = None,
    stream_text: AgentRequestExecutor | None = None,
    decide: AgentDecisionExecutor | None = None,
    user_input: AgentUserInputExecutor | None = None,
) -> MachineLogic:
    """The built-in sources as a logic, for an interpreter of your own.

    `run_agent`, the steps and `setup_agent` know them already. On a bare interpreter
    ``agent.decide`` needs ``allowed_events`` in its input, and guards are not checked before an
    event is sent.

    Args:
        generate_text: Serves ``agent.generate_text``.
        stream_text: Serves ``agent.stream_text``.
        decide: Serves ``agent.decide``.
        user_input: Serves ``agent.user_input``.

    Returns:
        A logic to merge into your own.

    Raises:
        AgentConfigError: An executor takes neither ``(request)`` nor ``(request, info)``.

    Example:
        >>> from guardchart import SyncInterpreter, create_machine
        >>> chart = {"id": "door", "initial": "choosing", "states": {
        ...     "choosing": {"invoke": {"src": "agent.decide", "input": {"allowedEvents": "*"}},
        ...                  "on": {"OPEN": "open", "LOCK": "locked"}},
        ...     "open": {}, "locked": {}}}
        >>> logic = agent_sources(decide=lambda request: {"event": {"type": "LOCK"}})
        >>> sorted(SyncInterpreter(create_machine(chart, logic)).start().current_state_ids)
        ['door.locked']
    """
    given = {
        "generate_text": generate_text,
        "stream_text": stream_text,
        "decide": decide,
        "user_input": user_input,
    }
    for executor in given.values():
        if executor is not None:
            executor_form(executor)
    services: dict[str, Any] = {}
    for name, logic in BUILT_IN.items():
        execute = given[logic.slot]
        services[name] = logic if execute is None else logic.with_executor(execute)
    return MachineLogic(services=services)


# Binding


_UNKNOWN: Final[Any] = object()
_WITH_SOURCES: Final[weakref.WeakKeyDictionary[Machine, Machine | None]] = (
    weakref.WeakKeyDictionary()
)


def with_sources(machine: Machine) -> Machine:
    """The machine with the built-in sources it invokes and does not define, children included.

    Returns:
        The same object where nothing is missing; else the same new one each time, so that
        snapshots of it fit one another.
    """
    known = _WITH_SOURCES.get(machine, _UNKNOWN)
    if known is not _UNKNOWN:
        return machine if known is None else known
    made = _rebuilt(machine, _Sources())
    # A machine that lacks nothing is not its own value: it would never be collected.
    _WITH_SOURCES[machine] = None if made is machine else made
    _WITH_SOURCES.setdefault(made, None)
    return made


def bind_executors(machine: Machine, binding: Binding) -> Machine:
    """The machine with a host's executors behind its request logic, children included.

    Logic with an executor of its own keeps it and gets the rest of the binding. What a machine
    invokes, directly or in a child, must have one or the other.

    Args:
        machine: Any machine; its built-in sources need not be defined.
        binding: The host's.

    Returns:
        A new machine, or the same object where it has no request logic.

    Raises:
        AgentConfigError: A source has no executor; the message names the source and the slot.
        ChartError: A name of the machine is defined nowhere; all of them are listed.
    """
    for slot in ("generate_text", "stream_text", "decide", "user_input"):
        executor = getattr(binding.executors, slot)
        if executor is not None:
            executor_form(executor)
    bound = _rebuilt(machine, _Executors(binding))
    _check_wired(bound, set())
    return bound


class _Sources:
    """Adds built-in sources."""

    def of(self, logic: RequestLogic) -> RequestLogic:
        return logic


class _Executors(_Sources):
    """Binds request logic."""

    def __init__(self, binding: Binding) -> None:
        self._binding = binding
        self._made: dict[int, RequestLogic] = {}

    def of(self, logic: RequestLogic) -> RequestLogic:
        made = self._made.get(id(logic))
        if made is None:
            made = self._made[id(logic)] = logic.bound(self._binding)
        return made


def _rebuilt(machine: Machine, change: _Sources, seen: dict[int, Machine] | None = None) -> Machine:
    """The machine with changed request logic; children that do not change stay as they are."""
    made = {} if seen is None else seen
    if id(machine) in made:
        return made[id(machine)]
    made[id(machine)] = machine
    logic = machine.logic
    services: Mapping[str, Any] = getattr(logic, "services", None) or {}
    used = {invoke.src for invoke in _invokes(machine) if isinstance(invoke.spec.src, str)}
    missing = {name: BUILT_IN[name] for name in used & BUILT_IN.keys() if name not in services}
    changed: dict[str, Any] = {}
    for name, service in {**services, **missing}.items():
        found = service
        if isinstance(service, Machine):
            found = _rebuilt(service, change, made)
        elif isinstance(service, RequestLogic):
            found = change.of(service)
        if found is not service or name in missing:
            changed[name] = found
    if changed:
        rebuilt = made[id(machine)] = machine.with_logic(_merged(logic, changed))
        own: dict[str, Any] = rebuilt.logic.services
        # A machine may start itself as a child.
        own.update({name: rebuilt for name, each in own.items() if each is machine})
    return made[id(machine)]


def _merged(logic: Any, services: Mapping[str, Any]) -> MachineLogic:
    if isinstance(logic, MachineLogic):
        return logic.merge(MachineLogic(services=services))
    kinds = ("actions", "guards", "services", "delays")
    given = {kind: getattr(logic, kind, None) for kind in kinds}
    return MachineLogic(**given).merge(MachineLogic(services=services))


def _invokes(machine: Machine) -> list[Invoke]:
    return [invoke for node in machine.order for invoke in node.invokes]


def _check_wired(machine: Machine, seen: set[int]) -> None:
    if id(machine) in seen:
        return
    seen.add(id(machine))
    machine.require_bound()
    for invoke in _invokes(machine):
        service = invoke.service
        if isinstance(service, RequestLogic) and service.executor is None:
            raise AgentConfigError(_unwired(machine, invoke, service))
    spawned = (getattr(machine.logic, "services", None) or {}).values()
    for service in (*(invoke.service for invoke in _invokes(machine)), *spawned):
        if isinstance(service, Machine):
            _check_wired(service, seen)


def _unwired(machine: Machine, invoke: Invoke, logic: RequestLogic) -> str:
    where = f"source {invoke.src!r} of machine {machine.id!r}"
    if not isinstance(invoke.spec.src, str):
        return (
            f"{where} stands in the chart itself and has no executor: give it one by "
            "with_executor(...), or name it and put it into the logic's services"
        )
    if logic.slot == "user_input":
        return (
            f"{where} needs a handler: pass user_input=; or, better, wait for the person in a "
            "state that handles the answer as an event, so that the run settles idle and can be "
            "resumed anywhere"
        )
    return f"{where} needs an executor: pass {logic.slot}="
