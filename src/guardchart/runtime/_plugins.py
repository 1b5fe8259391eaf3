"""Observers of an interpreter: duck-typed hooks, each optional, each contained.

A hook that raises is logged by class name and never disturbs the machine.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from guardchart.kernel import Event

__all__ = ["HOOKS", "Plugin", "Plugins"]

_LOG = logging.getLogger("guardchart")

HOOKS = (
    "on_interpreter_start",
    "on_interpreter_stop",
    "on_before_send",
    "on_event_received",
    "on_transition",
    "on_service_start",
    "on_service_done",
    "on_service_error",
    "on_context",
    "on_done",
    "on_error",
)


class Plugin(Protocol):
    """The hooks a plugin may have. None is required; this protocol documents them all.

    ``on_before_send`` sees an event when it is queued, ``on_event_received`` when its step
    begins; both get the same ``Event`` object. ``on_transition`` is called once a macrostep
    that was taken, with the leaf ids before and after.
    """

    def on_interpreter_start(self, interpreter: Any) -> None: ...
    def on_interpreter_stop(self, interpreter: Any) -> None: ...
    def on_before_send(self, interpreter: Any, event: Event) -> None: ...
    def on_event_received(self, interpreter: Any, event: Event) -> None: ...
    def on_transition(
        self, interpreter: Any, from_ids: frozenset[str], to_ids: frozenset[str], taken: Any
    ) -> None: ...
    def on_service_start(self, interpreter: Any, invocation: Any, input: Any) -> None: ...
    def on_service_done(self, interpreter: Any, invocation: Any, output: Any) -> None: ...
    def on_service_error(self, interpreter: Any, invocation: Any, error: Any) -> None: ...
    def on_context(self, interpreter: Any, updates: dict[str, Any]) -> None: ...
    def on_done(self, interpreter: Any, output: Any) -> None: ...
    def on_error(self, interpreter: Any, error: Any) -> None: ...


class Plugins:
    """The plugins of one interpreter, resolved to one tuple of callables per hook."""

    __slots__ = ("_calls", "items")

    def __init__(self, items: Iterable[Any] = ()) -> None:
        self.items: tuple[Any, ...] = ()
        self._calls: dict[str, tuple[Any, ...]] = {}
        for item in items:
            self.add(item)

    def add(self, plugin: Any) -> None:
        self.items = (*self.items, plugin)
        for hook in HOOKS:
            call = getattr(plugin, hook, None)
            if callable(call):
                self._calls[hook] = (*self._calls.get(hook, ()), call)

    def call(self, hook: str, *args: Any) -> None:
        """Call ``hook`` of every plugin that has it; what one raises is logged, not raised."""
        for each in self._calls.get(hook, ()):
            try:
                each(*args)
            except Exception as error:
                _LOG.warning(
                    "plugin %s.%s raised %s",
                    type(getattr(each, "__self__", each)).__name__,
                    hook,
                    type(error).__name__,
                )
