"""`LangChainCallbackPlugin`: transitions and services as runs that LangSmith shows.

Custom events alone do not reach LangSmith: its tracer does not take them. So each external
transition and each service is a child run. What leaves here is ids, event types, names of
services and of exception classes; never context, arguments, messages or texts of errors.
"""

from __future__ import annotations

import datetime
import threading
import uuid
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Final, Literal

from langchain_core.callbacks import (
    BaseCallbackHandler,
    BaseCallbackManager,
    CallbackManager,
    CallbackManagerForChainRun,
)
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import ensure_config, patch_config, var_child_runnable_config

from guardchart.errors import AgentConfigError

__all__ = ["LangChainCallbackPlugin"]

Granularity = Literal["transition", "service", "event"]

TRANSITION: Final = "xsm.transition"
SERVICE_DONE: Final = "xsm.service_done"
SERVICE_ERROR: Final = "xsm.service_error"
TAG: Final = "guardchart"
_KINDS: Final = ("transition", "service", "event")
_MAX_CHARS: Final = 200
_MAX_STEPS: Final = 100


class ServiceFailed(Exception):
    """Stands for what a service raised: tracers post text, traceback and causes of an error."""


class LangChainCallbackPlugin:
    """Show a machine's transitions and services to LangChain callbacks, and so in LangSmith.

    Each external transition is a child run named ``from -> to``, with the event's type in its
    inputs and its microsteps in its outputs; each service is one, too, and the models and tools
    it calls lie under it. The custom events ``xsm.transition``, ``xsm.service_done`` and
    ``xsm.service_error`` are sent besides, for handlers that take them.

    One plugin serves any number of machines at once, from any thread.

    Args:
        handler_or_manager: A handler, a list of them, or a callback manager, whose parent run
            the runs lie under. None takes the callbacks of the LangGraph node, or of the
            runnable, that the machine runs in, and otherwise what tracing the environment
            turns on.
        granularity: ``"transition"`` shows both; ``"service"`` no transitions; ``"event"`` opens
            no runs and only sends custom events.
        run_id: The id of the root run that is opened where there is no parent; for one machine.

    Raises:
        AgentConfigError: Not something that takes callbacks, or an unknown granularity.

    Source: xstate-statemachine, agents reference: LangChainCallbackPlugin.

    Example:
        >>> from guardchart import SyncInterpreter, create_machine
        >>> class Show(BaseCallbackHandler):
        ...     def on_chain_start(self, serialized, inputs, *, name=None, **kwargs):
        ...         print(name, inputs)
        >>> lamp = create_machine({"id": "lamp", "initial": "off", "states": {
        ...     "off": {"on": {"FLIP": "on"}}, "on": {}}})
        >>> lamp = SyncInterpreter(lamp, plugins=[LangChainCallbackPlugin(Show())]).start()
        lamp {'machine': 'lamp'}
        (start) -> lamp.off {'from': [], 'event': None}
        >>> receipt = lamp.send("FLIP")
        lamp.off -> lamp.on {'from': ['lamp.off'], 'event': 'FLIP'}
        >>> _ = lamp.stop()
    """

    def __init__(
        self,
        handler_or_manager: BaseCallbackHandler
        | BaseCallbackManager
        | Sequence[BaseCallbackHandler]
        | None = None,
        *,
        granularity: Granularity = "transition",
        run_id: uuid.UUID | str | None = None,
    ) -> None:
        if granularity not in _KINDS:
            raise AgentConfigError(
                f"LangChainCallbackPlugin: granularity is one of {', '.join(_KINDS)}"
            )
        given: Any = handler_or_manager
        if isinstance(given, BaseCallbackHandler):
            given = [given]
        self._manager: CallbackManager | None = None
        if isinstance(given, BaseCallbackManager):
            self._manager = _sync(given)
        elif isinstance(given, list | tuple) and all(
            isinstance(each, BaseCallbackHandler) for each in given
        ):
            self._manager = CallbackManager(list(given), inheritable_handlers=list(given))
        elif given is not None:
            raise AgentConfigError(
                f"LangChainCallbackPlugin: a {type(given).__name__} is neither a callback handler "
                "nor a callback manager"
            )
        self.granularity = granularity
        try:
            self._run_id = uuid.UUID(run_id) if isinstance(run_id, str) else run_id
        except ValueError:
            raise AgentConfigError("LangChainCallbackPlugin: run_id is not a UUID") from None
        self._shows: weakref.WeakKeyDictionary[Any, Show] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    def bind_invocation(self, config: RunnableConfig | None, *, is_async: bool = False) -> Any:
        """Return the plugin of one invocation of a LangGraph node.

        Args:
            config: The node's config.
            is_async: Whether it is awaited. Hooks are plain calls in both cases; handlers that
                are async are run to their end.
        """
        found = ensure_config(config)
        theirs = CallbackManager.configure(inheritable_callbacks=found.get("callbacks"))
        manager = theirs
        if self._manager is not None:
            manager = self._manager.copy()
            known = {id(each) for each in theirs.handlers}
            if manager.parent_run_id is None and all(id(h) in known for h in manager.handlers):
                manager.parent_run_id = theirs.parent_run_id
        return Show(manager, self.granularity, self._run_id, found)

    # A machine outside of LangGraph

    def _show(self, interpreter: Any) -> Show:
        root = interpreter
        while root.parent is not None:
            root = root.parent
        with self._lock:
            show = self._shows.get(root)
            if show is None:
                config = ensure_config()
                manager = (
                    CallbackManager.configure(inheritable_callbacks=config.get("callbacks"))
                    if self._manager is None
                    else self._manager.copy()
                )
                show = self._shows[root] = Show(manager, self.granularity, self._run_id, config)
            return show

    def on_interpreter_start(self, interpreter: Any) -> None:
        """Open the root run where nothing else is the parent."""
        self._show(interpreter).on_interpreter_start(interpreter)

    def on_interpreter_stop(self, interpreter: Any) -> None:
        """Close every run that is open."""
        self._show(interpreter).on_interpreter_stop(interpreter)
        if interpreter.parent is None:
            with self._lock:
                self._shows.pop(interpreter, None)

    def on_event_received(self, interpreter: Any, event: Any) -> None:
        """Remember what the next transition is due to."""
        self._show(interpreter).on_event_received(interpreter, event)

    def on_transition(
        self, interpreter: Any, from_ids: frozenset[str], to_ids: frozenset[str], taken: Any
    ) -> None:
        """Show a transition."""
        self._show(interpreter).on_transition(interpreter, from_ids, to_ids, taken)

    def on_service_start(self, interpreter: Any, invocation: Any, input: Any) -> None:
        """Open a service's run."""
        self._show(interpreter).on_service_start(interpreter, invocation, input)

    def on_service_call(self, interpreter: Any, invocation: Any) -> None:
        """Make a service's run the parent of what it calls."""
        self._show(interpreter).on_service_call(interpreter, invocation)

    def on_service_done(self, interpreter: Any, invocation: Any, output: Any) -> None:
        """Close a service's run."""
        self._show(interpreter).on_service_done(interpreter, invocation, output)

    def on_service_error(self, interpreter: Any, invocation: Any, error: Any) -> None:
        """Close a service's run with the class of its error."""
        self._show(interpreter).on_service_error(interpreter, invocation, error)


class Show:
    """The runs of one machine and its children, for as long as it runs."""

    def __init__(
        self,
        manager: CallbackManager,
        granularity: str,
        run_id: uuid.UUID | None,
        config: RunnableConfig,
    ) -> None:
        self._manager = manager
        self._granularity = granularity
        self._run_id = run_id
        self._config = config
        self._heard = bool(manager.handlers)
        self._root: CallbackManagerForChainRun | None = None
        self._events: dict[str, str | None] = {}
        # A service's run, by the actor that invoked it and the invocation's key.
        self._open: dict[tuple[str, str], tuple[Any, CallbackManagerForChainRun]] = {}

    def on_interpreter_start(self, interpreter: Any) -> None:
        if not self._heard or interpreter.parent is not None or self._root is not None:
            return
        if self._manager.parent_run_id is None and self._granularity != "event":
            manager = self._marked(interpreter, self._manager.copy())
            self._root = manager.on_chain_start(
                None,
                {"machine": interpreter.machine.id},
                run_id=self._run_id,
                name=_text(interpreter.id),
            )

    def on_interpreter_stop(self, interpreter: Any) -> None:
        for key, (_, run) in list(self._open.items()):
            actor = key[0]
            if actor == interpreter.id or actor.startswith(f"{interpreter.id}:"):
                self._open.pop(key, None)
                run.on_chain_end({"status": "stopped"})
        self._events.pop(interpreter.id, None)
        if interpreter.parent is None and self._root is not None:
            root, self._root = self._root, None
            ids = sorted(map(_text, interpreter.current_state_ids))
            root.on_chain_end({"status": interpreter.status, "state_ids": ids})

    def on_event_received(self, interpreter: Any, event: Any) -> None:
        # An engine event learns what it is called while it is stepped.
        named = getattr(event, "event", None) or event
        kind = getattr(named, "type", None)
        self._events[interpreter.id] = kind if isinstance(kind, str) else None

    def on_transition(
        self, interpreter: Any, from_ids: frozenset[str], to_ids: frozenset[str], taken: Any
    ) -> None:
        if not self._heard:
            return
        self._close_left(interpreter)
        event = self._events.pop(interpreter.id, None)
        before, after = sorted(map(_text, from_ids)), sorted(map(_text, to_ids))
        shown = None if event is None else _text(event)
        manager = self._parent(interpreter)
        if self._granularity == "transition":
            name = f"{', '.join(before) or '(start)'} -> {', '.join(after)}"
            run = self._marked(interpreter, manager.copy()).on_chain_start(
                None, {"from": before, "event": shown}, name=name[: 2 * _MAX_CHARS]
            )
            steps = [_step(each) for each in taken.microsteps[:_MAX_STEPS]]
            _add_events(run, steps)
            run.on_chain_end({"to": after, "microsteps": steps})
        data = {"machine": _text(interpreter.id), "event": shown, "from": before, "to": after}
        self._custom(manager, TRANSITION, data)

    def on_service_start(self, interpreter: Any, invocation: Any, input: Any) -> None:
        if not self._heard or self._granularity == "event":
            return
        manager = self._marked(interpreter, self._parent(interpreter).copy())
        inputs = {"service": _text(invocation.src), "id": _text(invocation.id)}
        if invocation.state_id is not None:
            inputs["state"] = _text(invocation.state_id)
        run = manager.on_chain_start(None, inputs, name=_text(invocation.src))
        self._open[interpreter.id, invocation.key] = (invocation, run)

    def on_service_call(self, interpreter: Any, invocation: Any) -> None:
        found = self._open.get((interpreter.id, invocation.key))
        if found is not None:
            base = var_child_runnable_config.get() or self._config
            _enter(patch_config(base, callbacks=found[1].get_child()))

    def on_service_done(self, interpreter: Any, invocation: Any, output: Any) -> None:
        found = self._open.pop((interpreter.id, invocation.key), None)
        if found is not None:
            found[1].on_chain_end({"status": "done"})
        if self._heard:
            data = {"machine": _text(interpreter.id), "service": _text(invocation.src)}
            self._custom(self._parent(interpreter), SERVICE_DONE, data)

    def on_service_error(self, interpreter: Any, invocation: Any, error: Any) -> None:
        kind = _text(type(error).__name__)
        found = self._open.pop((interpreter.id, invocation.key), None)
        if found is not None:
            found[1].on_chain_error(ServiceFailed(kind))
        if self._heard:
            data = {"machine": _text(interpreter.id), "service": _text(invocation.src)}
            self._custom(self._parent(interpreter), SERVICE_ERROR, {**data, "error": kind})

    # Inside

    def _close_left(self, interpreter: Any) -> None:
        """Close the runs of services that a transition has left: nobody tells of those."""
        for key, (invocation, run) in list(self._open.items()):
            if key[0] == interpreter.id and not interpreter.is_current(invocation):
                self._open.pop(key, None)
                run.on_chain_end({"status": "cancelled"})

    def _parent(self, interpreter: Any) -> CallbackManager:
        """The manager under which a machine's runs lie: of its service, of the root, or given."""
        parent, invocation = interpreter.parent, getattr(interpreter, "_invocation", None)
        if parent is not None and invocation is not None:
            found = self._open.get((parent.id, invocation.key))
            if found is not None:
                return found[1].get_child()
            return self._parent(parent)
        return self._manager if self._root is None else self._root.get_child()

    def _marked(self, interpreter: Any, manager: CallbackManager) -> CallbackManager:
        machine = interpreter.machine
        metadata: dict[str, Any] = {
            "guardchart.machine": _text(interpreter.id),
            "guardchart.state": ",".join(sorted(interpreter.current_state_ids))[:_MAX_CHARS],
        }
        if machine.version is not None:
            metadata["guardchart.version"] = _text(str(machine.version))
        manager.add_metadata(metadata, inherit=False)
        manager.add_tags([TAG], inherit=False)
        return manager

    def _custom(self, manager: CallbackManager, name: str, data: dict[str, Any]) -> None:
        manager.on_custom_event(name, data, run_id=manager.parent_run_id)


def _sync(manager: Any) -> CallbackManager:
    """A manager whose methods are called, whatever kind was given."""
    if isinstance(manager, CallbackManager):
        return manager.copy()
    return CallbackManager(
        list(manager.handlers),
        inheritable_handlers=list(manager.inheritable_handlers),
        parent_run_id=manager.parent_run_id,
        tags=list(manager.tags),
        inheritable_tags=list(manager.inheritable_tags),
        metadata=dict(manager.metadata),
        inheritable_metadata=dict(manager.inheritable_metadata),
    )


def _text(value: str) -> str:
    """A name from anywhere, bounded, as text that every tracer can post."""
    return value[:_MAX_CHARS].encode("utf-8", "replace").decode().replace("\0", "\ufffd")


def _step(step: Any) -> dict[str, Any]:
    return {
        "event": _text(step.event_type),
        "from": sorted(map(_text, step.from_ids)),
        "to": sorted(map(_text, step.to_ids)),
    }


def _add_events(run: CallbackManagerForChainRun, steps: Iterable[dict[str, Any]]) -> None:
    """Add microsteps to the run as events, where a handler lets its run be seen."""
    now = datetime.datetime.now(datetime.UTC).isoformat()
    for handler in run.handlers:
        shown = getattr(handler, "run_map", {}).get(str(run.run_id))
        events = getattr(shown, "events", None)
        if isinstance(events, list):
            events.extend({"name": "microstep", "time": now, "kwargs": step} for step in steps)


def _enter(config: RunnableConfig) -> None:
    """Make a config the current one, for LangChain and for LangSmith's ``traceable``."""
    try:
        from langchain_core.runnables.config import _set_config_context
    except ImportError:
        var_child_runnable_config.set(config)
    else:
        _set_config_context(config)
