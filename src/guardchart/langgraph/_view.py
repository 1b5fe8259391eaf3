"""What of a machine leaves the node: a read-only view, a receipt, a stream of transitions."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Mapping
from typing import Any

from guardchart.kernel import Receipt, Snapshot

__all__ = ["StatechartView", "TransitionStream", "receipt_json", "refusal"]

_REASON_CHARS = 500
_TYPE_CHARS = 200


class StatechartView:
    """The machine as ``result_to_state`` sees it, after the node's event. Read-only.

    Attributes:
        id: The machine's id.
        context: Its context; `pending_approval` finds those of spawned agents in it, too.
        status: ``"running"``, ``"done"`` or ``"error"``.
        current_state_ids: The ids of the active leaf states.
        output: The machine's output once it is done.
        run: The nonce of this machine's life, one a conversation.
        receipt: What became of the event, as the snapshot's ``"receipt"`` has it.
    """

    __slots__ = ("_context", "_receipt", "_snapshot")

    def __init__(
        self, snapshot: Snapshot, receipt: Mapping[str, Any] | None, interpreter: Any = None
    ) -> None:
        self._snapshot = snapshot
        below = interpreter is not None and interpreter.actors
        self._context = interpreter.context if below else snapshot.context
        self._receipt = receipt

    @property
    def id(self) -> str:
        return self._snapshot.machine.id

    @property
    def context(self) -> Mapping[str, Any]:
        return self._context

    @property
    def status(self) -> str:
        status = self._snapshot.status
        return "running" if status == "active" else status

    @property
    def current_state_ids(self) -> frozenset[str]:
        return self._snapshot.state_ids

    @property
    def output(self) -> Any:
        return self._snapshot.output

    @property
    def run(self) -> str | None:
        return self._snapshot.run

    @property
    def receipt(self) -> Mapping[str, Any] | None:
        return self._receipt


def receipt_json(event_type: str | None, receipt: Receipt) -> dict[str, Any]:
    """Return a receipt in JSON types, as it stands in the snapshot under ``"receipt"``.

    Args:
        event_type: The event's type; None where no event was sent and timers alone moved on.
        receipt: The receipt of its macrostep.
    """
    error = receipt.error
    return {
        "event": _shown(event_type),
        "status": receipt.status,
        "changed": receipt.changed,
        "denied": receipt.denied,
        "reason": None if receipt.reason is None else receipt.reason[:_REASON_CHARS],
        "error": None if error is None else type(error).__name__,
    }


def refusal(status: str, event_type: str | None, reason: str) -> dict[str, Any]:
    """Return the receipt of an event that is not sent at all.

    Args:
        status: ``"denied"`` or ``"dropped"``.
        event_type: Its type; None for something that is no event.
        reason: Why, in words.
    """
    return {
        "event": _shown(event_type),
        "status": status,
        "changed": False,
        "denied": status == "denied",
        "reason": reason,
        "error": None,
    }


def _shown(event_type: str | None) -> str | None:
    """An event's type may come from anywhere: bounded, and text that every store can hold."""
    if event_type is None:
        return None
    return event_type[:_TYPE_CHARS].encode("utf-8", "replace").decode().replace("\0", "\ufffd")


class TransitionStream:
    """A plugin that writes every transition to LangGraph's custom stream.

    One item a macrostep: ids and event types, never context, payloads or messages.
    """

    __slots__ = ("_context", "_event", "_write")

    def __init__(self, write: Callable[[Any], None]) -> None:
        self._write = write
        # LangGraph's writer asks its context variables whose stream it is; a service may end,
        # and the machine move, on a thread or in a callback that has others.
        self._context = contextvars.copy_context()
        self._event: Any = None

    def on_event_received(self, interpreter: Any, event: Any) -> None:
        self._event = event

    def on_transition(
        self, interpreter: Any, from_ids: frozenset[str], to_ids: frozenset[str], taken: Any
    ) -> None:
        # An engine event learns what it is called while it is stepped.
        event, self._event = self._event, None
        named = getattr(event, "event", None) or event
        self._context.copy().run(
            self._write,
            {
                "type": "statechart.transition",
                "machine": interpreter.id,
                "event": getattr(named, "type", None),
                "from": sorted(from_ids),
                "to": sorted(to_ids),
            },
        )
