"""From the text of a reply to one JSON value: strict, or tolerant of prose around it.

Nothing is repaired here. A reply that two readers could take differently (two values, a
truncated one, a key twice, a number that is not finite) is refused, and the model is asked
again.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, Final

from guardchart.errors import AgentConfigError
from guardchart.gate._arguments import ArgumentsRefused, canonical, parse_json, parse_json_at

__all__ = ["ANY_KIND", "ReplyParser", "instructor_available", "json_parser"]

MAX_REPLY_BYTES: Final = 1 << 20
"""The largest reply that is parsed: what a snapshot may hold."""

ANY_KIND: Final[frozenset[type]] = frozenset({dict, list})
"""Both kinds of value that are looked for within prose."""

NOT_JSON: Final = "not valid JSON"

_FENCE: Final = "```"
_BLANKS: Final = " \t\r\n"
_MAX_ASIDES: Final = 1_000  # each costs the parser a look at all that stands before it
# "[sic]", "[see below]": brackets of prose, in which no value can hide.
_ASIDE = re.compile(r'\[[^\[\]{}"]*\]')
_BRACKET = re.compile(r"[\[\]{}]")


@functools.cache
def _extractor() -> Callable[[str], Any]:
    """instructor's extractor; raises whatever its import raises."""
    from instructor.utils import extract_json_from_codeblock

    return extract_json_from_codeblock


def instructor_available() -> bool:
    """Whether instructor is installed and has the extractor that `json_parser` uses.

    Returns:
        False also for an installation that cannot be imported.

    Source: xstate-statemachine, agents reference: structured output.

    Example:
        >>> instructor_available() in (True, False)
        True
    """
    try:
        _extractor()
    except Exception:  # a broken installation is no extractor either
        return False
    return True


class ReplyParser:
    """Parses a reply: ``text -> JSON value``; made by `json_parser`.

    Args:
        extract: ``text -> JSON text`` for a reply that is not JSON alone, or None to refuse it.

    Example:
        >>> ReplyParser(None)('{"a": 1}')
        {'a': 1}
    """

    __slots__ = ("_extract",)

    def __init__(self, extract: Callable[[str], Any] | None) -> None:
        self._extract = extract

    def __call__(self, text: str) -> Any:
        """Parse a reply that may hold a value of either kind; see `parse`."""
        return self.parse(text)

    def parse(self, text: str, kinds: frozenset[type] = ANY_KIND) -> Any:
        """Parse a reply.

        Args:
            text: The reply.
            kinds: What to look for within prose: dicts, lists or both.

        Returns:
            The value, as plain dicts, lists, strings, numbers, booleans and None.

        Raises:
            ValueError: There is no value, or not exactly one; the text is never repeated.
        """
        if not isinstance(text, str):
            raise ArgumentsRefused(NOT_JSON)
        try:
            return parse_json(_unfenced(text), max_bytes=MAX_REPLY_BYTES)
        except ArgumentsRefused as refused:
            if self._extract is None or str(refused) != NOT_JSON:
                raise _refused(refused) from None
        try:
            return self._within(text, kinds)
        except ArgumentsRefused as refused:
            raise _refused(refused) from None

    def _within(self, text: str, kinds: frozenset[type]) -> Any:
        """The one value within prose that both the extractor and our own scan find."""
        assert self._extract is not None
        found = {canonical(value): value for value in scan(text) if type(value) in kinds}
        if len(found) > 1:
            raise ArgumentsRefused("more than one value")
        try:
            extracted = self._extract(text)
        except Exception:  # the extractor's own limits; its text would repeat the reply's
            raise ArgumentsRefused(NOT_JSON) from None
        value = parse_json(extracted, max_bytes=MAX_REPLY_BYTES)
        if canonical(value) not in found:
            raise ArgumentsRefused("more than one value" if found else NOT_JSON)
        return value


def _unfenced(text: str) -> str:
    """What stands in the one fenced block that a text is, else the text."""
    text = text.strip(_BLANKS)
    head, newline, body = text.partition("\n")
    if not newline or not head.startswith(_FENCE) or not body.endswith(_FENCE):
        return text
    if head[len(_FENCE) :].strip(_BLANKS).lower() not in ("", "json"):
        return text
    return body[: -len(_FENCE)]


def scan(text: str) -> list[Any]:
    """Every object and array that stands in a text, outermost ones only, in their order.

    A bracket that neither belongs to such a value nor is an aside of the prose is the trace of
    a value that was cut or garbled, whose parts must not be taken for the whole.

    Raises:
        ArgumentsRefused: There is such a bracket, or a value that strict JSON refuses.

    Example:
        >>> scan('It is {"a": [1]} [2], they say [sic].')
        [{'a': [1]}, [2]]
    """
    values: list[Any] = []
    at = asides = 0
    while (bracket := _BRACKET.search(text, at)) is not None:
        at = bracket.start()
        if bracket[0] in "]}":
            raise ArgumentsRefused(NOT_JSON)
        try:
            value, at = parse_json_at(text, at, max_bytes=MAX_REPLY_BYTES)
        except ArgumentsRefused:
            aside = _ASIDE.match(text, at)
            asides += 1
            if aside is None or asides > _MAX_ASIDES:
                raise
            at = aside.end()
        else:
            values.append(value)
    return values


def json_parser(use_instructor: bool | None = None) -> ReplyParser:
    """Make the parser of replies: ``text -> JSON value``.

    The strict one takes a reply that is one JSON value, bare or in one fenced block. With
    instructor, prose around an object or array is tolerated where exactly one stands in it.

    Args:
        use_instructor: True needs instructor, False does without it, None takes it where it is
            installed.

    Returns:
        A callable that raises ``ValueError`` for a reply without exactly one value, and for one
        with a duplicate key, a number that is not finite, a lone surrogate, NUL, more than 64
        levels or more than 1 MiB.

    Raises:
        AgentConfigError: ``use_instructor=True`` without instructor, or no bool.

    Source: xstate-statemachine, agents reference: structured output.

    Example:
        >>> json_parser(False)('```json\\n{"a": 1}\\n```')
        {'a': 1}
        >>> json_parser(False)('Here: {"a": 1}')
        Traceback (most recent call last):
            ...
        guardchart.gate._arguments.ArgumentsRefused: not valid JSON
    """
    if use_instructor is not None and not isinstance(use_instructor, bool):
        raise AgentConfigError("use_instructor must be True, False or None")
    if use_instructor is False:
        return ReplyParser(None)
    try:
        return ReplyParser(_extractor())
    except Exception as error:
        if use_instructor is None:
            return ReplyParser(None)
        raise AgentConfigError(
            "use_instructor=True but instructor is not installed: pip install instructor"
        ) from error


def _refused(refused: ArgumentsRefused) -> ArgumentsRefused:
    """The refusal with the words every reader looks for."""
    text = str(refused)
    return ArgumentsRefused(text if text.startswith(NOT_JSON) else f"{NOT_JSON} ({text})")
