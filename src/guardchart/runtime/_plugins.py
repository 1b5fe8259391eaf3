"""Observers of an interpreter: duck-typed hooks, each optional, each contained.

A hook that raises is logged by class name and never disturbs the machine.
"""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final, Protocol

from guardchart.errors import NotSupportedError

if TYPE_CHECKING:
    from guardchart.kernel import Event

__all__ = [
    "HOOKS",
    "NO_PLUGINS",
    "Plugin",
    "Plugins",
    "contained",
    "install",
    "uninstall",
    "with_installed",
]

_LOG = logging.getLogger("guardchart")

HOOKS = (
    "on_interpreter_start",
    "on_interpreter_stop",
    "on_before_send",
    "on_event_received",
    "on_transition",
    "on_service_start",
    "on_service_call",
    "on_service_done",
    "on_service_error",
    "on_chunk",
    "on_context",
    "on_done",
    "on_error",
)


class Plugin(Protocol):
    """The hooks a plugin may have. None is required; this protocol documents them all.

    Hooks run where the step runs, one at a time. What they send is queued behind what they are
    told about, and `update_context` is theirs to call.

    Example:
        >>> from guardchart import SyncInterpreter, create_machine
        >>> class Trace:
        ...     def on_transition(self, interpreter, from_ids, to_ids, taken):
        ...         print(sorted(from_ids), "->", sorted(to_ids))
        >>> lamp = create_machine({"id": "lamp", "initial": "off", "states": {
        ...     "off": {"on": {"FLIP": "on"}}, "on": {}}})
        >>> receipt = SyncInterpreter(lamp, plugins=[Trace()]).start().send("FLIP")
        [] -> ['lamp.off']
        ['lamp.off'] -> ['lamp.on']
    """

    def on_interpreter_start(self, interpreter: Any) -> None:
        """The machine entered its initial states, or took up its snapshot."""

    def on_interpreter_stop(self, interpreter: Any) -> None:
        """The machine ended, or was stopped; called once."""

    def on_before_send(self, interpreter: Any, event: Event) -> None:
        """An event was queued, by whomever; not called for what the engine reports."""

    def on_event_received(self, interpreter: Any, event: Event) -> None:
        """The step of an event begins; the same ``Event`` object as in ``on_before_send``."""

    def on_transition(
        self, interpreter: Any, from_ids: frozenset[str], to_ids: frozenset[str], taken: Any
    ) -> None:
        """A macrostep took a transition: leaf ids before and after, and its `Receipt`."""

    def on_service_start(self, interpreter: Any, invocation: Any, input: Any) -> None:
        """A service or child machine is about to start; see `Invocation`."""

    def on_service_call(self, interpreter: Any, invocation: Any) -> None:
        """A service is called now, on the thread or in the task where it runs.

        Its context variables are its own: what is set here, the service sees and nobody else.
        """

    def on_service_done(self, interpreter: Any, invocation: Any, output: Any) -> None:
        """It gave its output, which its machine is told next."""

    def on_service_error(self, interpreter: Any, invocation: Any, error: Any) -> None:
        """It raised."""

    def on_chunk(self, interpreter: Any, invocation: Any, chunk: str) -> None:
        """A service gave a piece of its text; called where the service runs.

        Of one invocation they come in order; those of services side by side may mingle.
        """

    def on_context(self, interpreter: Any, updates: dict[str, Any]) -> None:
        """`update_context` wrote these keys."""

    def on_done(self, interpreter: Any, output: Any) -> None:
        """The machine reached its end."""

    def on_error(self, interpreter: Any, error: Any) -> None:
        """A fault put the machine into ``error``."""


class Plugins:
    """The plugins of one interpreter, resolved to one tuple of callables per hook; immutable.

    Raises:
        NotSupportedError: A hook of one of them is async.
    """

    __slots__ = ("_calls", "items")

    def __init__(self, items: tuple[Any, ...] = ()) -> None:
        self.items = items
        self._calls: dict[str, tuple[Any, ...]] = {}
        for item in items:
            self._add(item)

    def _add(self, plugin: Any) -> None:
        found = [(hook, call) for hook in HOOKS if callable(call := getattr(plugin, hook, None))]
        for hook, call in found:
            if _is_async(getattr(call, "__func__", call)):
                raise NotSupportedError(
                    f"{type(plugin).__name__}.{hook} is async; hooks are called, not awaited"
                )
        for hook, call in found:
            self._calls[hook] = (*self._calls.get(hook, ()), call)

    def has(self, hook: str) -> bool:
        """Whether a plugin has this hook."""
        return hook in self._calls

    def call(self, hook: str, *args: Any) -> None:
        """Call ``hook`` of every plugin that has it; what one raises is logged, not raised."""
        for each in self._calls.get(hook, ()):
            contained(hook, each, *args)


NO_PLUGINS: Final = Plugins()

_installed: tuple[Any, ...] = ()
_install_lock = threading.Lock()


def install(plugin: Any) -> None:
    """Attach a plugin to every interpreter made from now on; a second time changes nothing.

    Raises:
        NotSupportedError: One of its hooks is async.
    """
    global _installed
    Plugins((plugin,))
    with _install_lock:
        if not any(each is plugin for each in _installed):
            _installed = (*_installed, plugin)


def uninstall(plugin: Any) -> None:
    """Undo `install` for interpreters made from now on."""
    global _installed
    with _install_lock:
        _installed = tuple(each for each in _installed if each is not plugin)


def with_installed(plugins: Iterable[Any]) -> Iterable[Any]:
    """The plugins of a root interpreter: its own, then the installed ones it does not name."""
    if not _installed:
        return plugins
    own = tuple(plugins)
    return own + tuple(each for each in _installed if not any(each is mine for mine in own))


def _is_async(function: Any) -> bool:
    """Whether a hook is a coroutine function; asking ``inspect`` costs more than calling it."""
    code = getattr(function, "__code__", None)
    if code is None:
        return inspect.iscoroutinefunction(function)
    return bool(code.co_flags & inspect.CO_COROUTINE)


def contained(what: str, call: Callable[..., Any], *args: Any) -> None:
    """Call an observer; what it raises is logged by class name and goes no further."""
    try:
        call(*args)
    except Exception as error:
        owner = type(getattr(call, "__self__", call)).__name__
        _LOG.warning("%s of %s raised %s", what, owner, type(error).__name__)
