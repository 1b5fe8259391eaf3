"""How a service is called: its form, what it is handed, and how its outcome settles."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Mapping
from types import GeneratorType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from guardchart.kernel import Machine, Snapshot, StateNode, StreamEvent, service_form

if TYPE_CHECKING:
    from guardchart.runtime._base import InterpreterBase

__all__ = [
    "Invocation",
    "ServiceScope",
    "async_services",
    "awaited",
    "call_service",
    "is_awaitable",
    "is_async_service",
]


class Invocation(NamedTuple):
    """One run of a service.

    Attributes:
        id: The invoke's id, as in ``snapshot.children``.
        key: ``"<id>@<rev>"``; a completion under any other key is dropped.
        src: The service's name in the chart.
        service: The callable or Machine behind it.
        state_id: The state that invoked it, or None for a spawned actor.
        event: The event whose step started it.
        input: The invoke's ``input``, evaluated.
    """

    id: str
    key: str
    src: str
    service: Any
    state_id: str | None
    event: Any
    input: Any


class ServiceScope:
    """What a three-argument service is handed first: a live, read-only view of its machine."""

    __slots__ = ("_interpreter", "invocation")

    def __init__(self, interpreter: InterpreterBase, invocation: Invocation) -> None:
        self._interpreter = interpreter
        self.invocation = invocation

    @property
    def id(self) -> str:
        """The actor path of the machine."""
        return self._interpreter.id

    @property
    def parent(self) -> Any:
        """The interpreter that spawned this one, or None."""
        return self._interpreter.parent

    @property
    def engine(self) -> str:
        """``"sync"`` or ``"async"``."""
        return self._interpreter.engine

    @property
    def state_id(self) -> str | None:
        """The state that invoked the service."""
        return self.invocation.state_id

    @property
    def node(self) -> StateNode | None:
        """The node of that state, for its ``meta``."""
        state_id = self.invocation.state_id
        return None if state_id is None else self._interpreter.machine.nodes.get(state_id)

    @property
    def snapshot(self) -> Snapshot:
        """The snapshot as it is now, not as it was when the service started."""
        return self._interpreter.snapshot

    @property
    def context(self) -> Mapping[str, Any]:
        """The context as it is now."""
        return self._interpreter.snapshot.context

    @property
    def active(self) -> bool:
        """Whether this very invocation is still what its state is waiting for."""
        return self._interpreter.is_current(self.invocation)

    @property
    def host(self) -> Any:
        """The `Host`: scope, ledger, run and agent."""
        return self._interpreter.host

    @property
    def clock(self) -> Any:
        """The interpreter's clock."""
        return self._interpreter.clock

    @property
    def logic(self) -> Any:
        """The `MachineLogic` of the machine."""
        return self._interpreter.logic

    @property
    def interpreter(self) -> InterpreterBase:
        """The interpreter itself."""
        return self._interpreter

    def send(self, event: Any, **payload: Any) -> None:
        """Queue an event for the machine; safe from any thread, never waits."""
        self._interpreter.post(event, **payload)

    def stream(self, item: Any) -> None:
        """Queue a ``STREAM`` event whose ``data`` is ``item``."""
        self._interpreter.post(StreamEvent(item))


_FORMS: Final[weakref.WeakKeyDictionary[Any, int]] = weakref.WeakKeyDictionary()
_COROUTINES: Final[weakref.WeakKeyDictionary[Any, bool]] = weakref.WeakKeyDictionary()


def _form(service: Callable[..., Any]) -> int:
    """3 for ``(scope, context, event)``, 1 for ``(input)``; read from a signature once."""
    declared = getattr(service, "__guardchart_form__", None)
    if isinstance(declared, int):
        return declared
    # A bound method is made anew at each access; its function stays.
    key = getattr(service, "__func__", service)
    try:
        known = _FORMS.get(key)
        if known is None:
            known = _FORMS[key] = service_form(service)
    except TypeError:  # not to be kept in a weak table
        return service_form(service)
    return known


class Manner(NamedTuple):
    """How a service is to be called, found out once for each interpreter.

    Attributes:
        service: The callable all this is about.
        form: 3 for ``(scope, context, event)``, 1 for ``(input)``.
        is_async: Whether calling it gives an awaitable.
        bounded: Whether a sync one promises to end before any deadline: its ``bounded`` is
            True. It is called in the caller's thread even while a deadline is pending, which
            spares it the way to a worker and back.
        delivers: Whether its output is an event for the machine, to be taken first.
    """

    service: Any
    form: int
    is_async: bool
    bounded: bool
    delivers: bool


def manner_of(service: Any) -> Manner:
    """How ``service`` is to be called."""
    bounded = getattr(service, "bounded", False) is True
    delivers = getattr(service, "deliver", None) is not None
    return Manner(service, _form(service), is_async_service(service), bounded, delivers)


def call_service(
    interpreter: InterpreterBase, invocation: Invocation, form: int | None = None
) -> Any:
    """Call the service in its form; returns what it returns, an awaitable if it is async."""
    service = invocation.service
    if interpreter._plugins.items:
        interpreter._plugins.call("on_service_call", interpreter, invocation)
    if (_form(service) if form is None else form) == 1:
        return service(invocation.input)
    snapshot = interpreter._snapshot
    assert snapshot is not None
    return service(ServiceScope(interpreter, invocation), snapshot[2], invocation.event)


def is_awaitable(value: Any) -> bool:
    """As `inspect.isawaitable`, which asks an ABC even of what has no ``__await__``."""
    may_be = hasattr(value, "__await__") or type(value) is GeneratorType
    return may_be and inspect.isawaitable(value)


async def awaited(awaitable: Any) -> Any:
    """What a service that looked synchronous gave after all."""
    return await awaitable


def is_async_service(service: Any) -> bool:
    """Whether calling ``service`` gives an awaitable (a Machine never does)."""
    if isinstance(service, Machine):
        return False
    declared = getattr(service, "is_async", None)
    if isinstance(declared, bool):
        return declared
    # A bound method is made anew at each access; its function stays.
    key = getattr(service, "__func__", service)
    try:
        known = _COROUTINES.get(key)
        if known is None:
            known = _COROUTINES[key] = _gives_coroutine(service)
    except TypeError:  # not to be kept in a weak table
        return _gives_coroutine(service)
    return known


def _gives_coroutine(service: Any) -> bool:
    target = service
    while isinstance(target, functools.partial):
        target = target.func
    return inspect.iscoroutinefunction(target) or inspect.iscoroutinefunction(
        getattr(target, "__call__", None)  # noqa: B004
    )


_ASYNC: Final[weakref.WeakKeyDictionary[Machine, tuple[str, ...]]] = weakref.WeakKeyDictionary()


def async_services(machine: Machine) -> tuple[str, ...]:
    """The names of the async services a machine invokes, those of its child machines included."""
    known = _ASYNC.get(machine)
    if known is None:
        found: set[str] = set()
        _collect_async(machine, found, set())
        known = _ASYNC[machine] = tuple(sorted(found))
    return known


def _collect_async(machine: Machine, found: set[str], seen: set[int]) -> None:
    if id(machine) in seen:
        return
    seen.add(id(machine))
    services = getattr(machine.logic, "services", None) or {}
    for name in {invoke.src for node in machine.order for invoke in node.invokes}:
        service = services.get(name)
        if isinstance(service, Machine):
            _collect_async(service, found, seen)
        elif is_async_service(service):
            found.add(name)
