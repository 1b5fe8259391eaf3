"""``messages_key``: a conversation that lives in a LangGraph message channel.

The chart keeps messages in compact form (``role``, ``content`` and, where they apply,
``tool_calls``, ``tool_call_id``, ``name``); the channel holds LangChain messages. Only what
a turn adds is written back, under ids that a retry of the node repeats.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    HumanMessage,
    convert_to_messages,
)

from guardchart.errors import AgentConfigError
from guardchart.langchain._messages import from_compact, to_compact

__all__ = ["SPENT_IDS", "Conversation", "without"]

SPENT_IDS: Final = "spent_call_ids"
"""The context's key that would grow with every call: the channel's own messages tell it."""


class Conversation:
    """The channel's messages as one invocation finds them, and what it adds to them.

    Args:
        channel: The content of the message channel, oldest first; None if never written.
        prompt: The text of the START event about to be sent. Where the channel ends with
            the same message from the user, it is that message, and not said twice.
        told: The compact form of its first messages, as far as an earlier task of the run knew.

    Attributes:
        channel: The messages, as LangChain's.
        told: All of them in compact form.
        before: The same without the prompt.
    """

    def __init__(
        self, channel: Any, prompt: Any = None, told: Sequence[dict[str, Any]] = ()
    ) -> None:
        if channel is None:
            channel = ()
        if type(channel) is not list and (
            isinstance(channel, str) or not isinstance(channel, Sequence)
        ):
            raise AgentConfigError(
                "messages_key: the channel must hold a list of messages; "
                "declare it as Annotated[list, add_messages]"
            )
        self.channel, self.told = _compacted(channel, told)
        self._found: tuple[str, list[tuple[str, dict[str, Any]]]] | None = None
        self.before = list(self.told)
        last = self.before[-1] if self.before else None
        self.prompted = (
            last is not None
            and prompt is not None
            and last["role"] == "user"
            and last["content"] == prompt
        )
        if self.prompted:
            self.before.pop()

    def new(
        self,
        kept: Sequence[Any],
        after: Sequence[Mapping[str, Any]],
        run: str,
        *,
        begun: bool = True,
    ) -> list[BaseMessage]:
        """Return what the channel has to gain, as LangChain messages.

        Args:
            kept: The very message objects the chart started with.
            after: The chart's messages at the end, oldest first.
            run: The run's nonce; ids are ``<run>-<n>`` and never used twice.
            begun: Whether the run is older than this invocation, so that the channel may hold
                messages of it.

        Returns:
            The messages after the last one that was there before. A window cut at the front
            or a summary put there concerns the model; the channel keeps what was said.
        """
        start = _after_the_last(kept, after)
        added = list(after[start:])
        if self.prompted:
            # Results of calls that the prompt superseded are told before it.
            said = next((i for i, m in enumerate(added) if m.get("role") != "tool"), None)
            if said is not None and added[said].get("role") == "user":
                added.pop(said)
        if not added:
            return []
        n = self._last_number(run) if begun else 0
        return [from_compact(each, f"{run}-{n + 1 + i}") for i, each in enumerate(added)]

    def extended(
        self, added: Sequence[BaseMessage] = (), said: Sequence[dict[str, Any]] = ()
    ) -> Conversation:
        """The conversation with what was added, in lists of its own.

        Args:
            added: The messages that the channel gains.
            said: The chart's messages. Where they say the same they are the compact form: what is
                the very same is soon compared.
        """
        new = list(map(to_compact, added))
        told: Sequence[dict[str, Any]] = [*self.told, *new]
        made = Conversation([*self.channel, *added], None, said if said == told else told)
        if self._found is not None:
            run, found = self._found
            mine = [(each.id or "").removeprefix(f"{run}-") for each in added]
            made._found = run, [*found, *zip(mine, made.told[len(self.told) :], strict=True)]
        return made

    def call_ids(self, run: str | None, added: Sequence[BaseMessage] = ()) -> list[str]:
        """The ids of the calls that this run has put into the channel, oldest first."""
        found = [
            call["id"]
            for _, compact in self._of_run(run or "")
            if "tool_calls" in compact
            for call in compact["tool_calls"]
        ]
        said = [each for each in added if isinstance(each, AIMessage)]
        return [*found, *(call["id"] or "" for each in said for call in each.tool_calls)]

    def _last_number(self, run: str) -> int:
        last = 0
        for tail, _ in self._of_run(run):
            if tail.isascii() and tail.isdigit() and len(tail) < 16:
                last = max(last, int(tail))
        return last

    def _of_run(self, run: str) -> list[tuple[str, dict[str, Any]]]:
        """The messages of a run in compact form, each with its id's tail."""
        if self._found is None or self._found[0] != run:
            prefix = f"{run}-"
            ids = [message.id for message in self.channel]
            found = [
                (ident[len(prefix) :], compact)
                for ident, compact in zip(ids, self.told, strict=True)
                if ident and ident.startswith(prefix)
            ]
            self._found = run, found
        return self._found[1]


def without(ids: Sequence[Any], told: Collection[str]) -> list[Any]:
    """The ids that are not told elsewhere. A context is untrusted: what is no text stays."""
    known = frozenset(told)
    return [each for each in ids if not (isinstance(each, str) and each in known)]


_PLAIN: Final[dict[type[Any], str]] = {HumanMessage: "user", AIMessage: "assistant"}


def _compacted(
    channel: Sequence[Any], told: Sequence[dict[str, Any]]
) -> tuple[Sequence[BaseMessage], list[dict[str, Any]]]:
    """The channel as LangChain messages and in compact form.

    A long conversation is read at every call of the node; the two classes that make up most of
    it are taken apart here, without a call each.
    """
    try:
        new = [
            {"role": role, "content": text}
            if (role := _PLAIN.get(type(message)))
            and type(text := message.content) is str
            and (role == "user" or not message.tool_calls)
            else _of_message(message)
            for message in (channel[len(told) :] if told else channel)
        ]
        return channel, [*told, *new] if told else new
    except _Foreign:
        channel = _converted(channel)
        return channel, [to_compact(each) for each in channel]


class _Foreign(Exception):
    """The channel holds something that is to be converted first."""


def _of_message(message: Any) -> dict[str, Any]:
    if not isinstance(message, BaseMessage):
        raise _Foreign
    return to_compact(message)


def _after_the_last(kept: Sequence[Any], after: Sequence[Mapping[str, Any]]) -> int:
    """Where in ``after`` the messages begin that come after all that were kept."""
    if not kept:
        return 0
    last = kept[-1]
    for index in range(len(after) - 1, -1, -1):
        if after[index] is last:
            added = set(map(id, after[index + 1 :]))
            if added.isdisjoint(map(id, kept)):
                return index + 1
            break  # a result was put behind its call, which stands further up
    known = {id(each) for each in kept}
    for index in range(len(after) - 1, -1, -1):
        if id(after[index]) in known:
            return index + 1
    # Nothing old is left, so everything was summarised; the newest turn is what was said.
    for index in range(len(after) - 1, -1, -1):
        if after[index].get("role") == "user":
            return index
    return 0


def _converted(channel: Sequence[Any]) -> list[BaseMessage]:
    try:
        return convert_to_messages(channel)
    except Exception:
        raise AgentConfigError(
            "messages_key: the channel must hold messages; "
            "declare it as Annotated[list, add_messages]"
        ) from None
