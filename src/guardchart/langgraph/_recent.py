"""What the tasks of one run hand to each other in memory, so that it is read once a run.

Within a run LangGraph hands the very objects that one task wrote to the next. A snapshot that is
still that object, and still says the same, need not be read and checked again, and of a message
channel only what is new has to be converted. What comes from a checkpoint, from a parent graph or
from the app is another object, or says something else, and is read as the untrusted state it is.
What is remembered has been in the hands of the app's own functions, too, and counts only as long as
none of them has changed it in place.
"""

from __future__ import annotations

import operator
import threading
from typing import Any, Final, NamedTuple

import ormsgpack

from guardchart.agents import AgentStep
from guardchart.kernel import Snapshot
from guardchart.langgraph._messages import Conversation

__all__ = ["Known", "Recent", "text_of"]

_MOST: Final = 64

_AS_IT_IS: Final = (
    ormsgpack.OPT_PASSTHROUGH_DATACLASS
    | ormsgpack.OPT_PASSTHROUGH_DATETIME
    | ormsgpack.OPT_PASSTHROUGH_SUBCLASS
    | ormsgpack.OPT_PASSTHROUGH_UUID
    | getattr(ormsgpack, "OPT_PASSTHROUGH_ENUM", 0)
)
"""Refuse what is no JSON type, instead of writing a text in its place."""


class Known(NamedTuple):
    """A snapshot as a task wrote or read it, and the conversation beside it.

    Attributes:
        data: The very dict that was written or read.
        scope: Whose it is.
        snapshot: What reading it would give.
        conversation: The messages of the channel, in a list of its own; None where there is none.
        step: The step that led to it; None where nobody has looked. What its requests were made
            of is judged again when they are executed.
        text: What the dict, the snapshot and the messages say, as bytes; None where one of them
            has no plain form.
    """

    data: Any
    scope: str | None
    snapshot: Snapshot
    conversation: Conversation | None
    step: AgentStep | None
    text: bytes | None

    @classmethod
    def made(
        cls,
        data: Any,
        scope: str | None,
        snapshot: Snapshot,
        conversation: Conversation | None = None,
        step: AgentStep | None = None,
    ) -> Known:
        """What is known from now on."""
        text = _said(data, snapshot, conversation)
        if text is None and conversation is not None:
            # A part of a message that no checkpoint's format has: such a channel is always read.
            conversation = None
            text = _said(data, snapshot, None)
        return cls(data, scope, snapshot, conversation, step, text)

    def stands(self) -> bool:
        """Whether all of it says what it said when it was made."""
        text = self.text
        return text is not None and _said(self.data, self.snapshot, self.conversation) == text

    def begins(self, channel: Any) -> bool:
        """Whether the messages of the conversation are the very ones a channel begins with."""
        conversation = self.conversation
        if conversation is None or not isinstance(channel, list):
            return False
        known = conversation.channel
        return len(channel) >= len(known) and all(map(operator.is_, known, channel))


def text_of(data: Any) -> bytes | None:
    """What JSON types say, as bytes; None where something else is among them.

    Different data differ in it, but for a tuple, which reads as the list it equals.
    """
    try:
        # What LangGraph itself writes checkpoints with; nothing in Python is as fast.
        return ormsgpack.packb(data, None, _AS_IT_IS)
    except TypeError:
        return None


def _said(data: Any, snapshot: Snapshot, conversation: Conversation | None) -> bytes | None:
    inputs = [each.input for each in snapshot.children.values()]
    messages = []
    if conversation is not None:
        # One that was edited in place, to take out what no model shall see, is another message.
        fields = map(vars, conversation.channel)
        # All that its compact form is made of.
        messages = [
            (each["content"], each.get("tool_calls"), each.get("tool_call_id"), each.get("name"))
            for each in fields
        ]
    return text_of((data, snapshot.context.copy(), inputs, messages))


class Recent:
    """The snapshots of runs that are under way, by the dict that was written."""

    def __init__(self) -> None:
        self._known: dict[int, Known] = {}
        self._lock = threading.Lock()

    def keep(self, known: Known) -> None:
        """Remember a snapshot until it is left; the oldest give way."""
        with self._lock:
            while len(self._known) >= _MOST:
                del self._known[next(iter(self._known))]
            self._known[id(known.data)] = known

    def find(self, data: Any, scope: str | None) -> Known | None:
        """What is known of a state entry; None unless it is the dict that was kept, unchanged."""
        known = self._known.get(id(data))
        if known is None or known.data is not data or known.scope != scope:
            return None
        return known if known.stands() else None

    def leave(self, known: Known) -> None:
        """Forget a snapshot: the run goes on from another, or hands this one out."""
        with self._lock:
            if self._known.get(id(known.data)) is known:
                del self._known[id(known.data)]
