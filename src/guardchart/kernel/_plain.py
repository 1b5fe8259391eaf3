"""Plain JSON data: a checked, private copy of a value nobody has vouched for.

The walk is level by level, so nesting costs no stack, and it stops at the first value
beyond a cap, so shared or cyclic containers cost no more than the caps allow. Each
container is copied before it is looked at: what was checked is what is kept, whatever
another thread does to the original meanwhile.
"""

from __future__ import annotations

import json
from collections.abc import Container
from itertools import chain
from typing import Any, Final

from guardchart.errors import SnapshotError

__all__ = ["MAX_BYTES", "MAX_DEPTH", "copy_json", "parse_json", "written_size"]

MAX_BYTES: Final = 1 << 20
MAX_DEPTH: Final = 100

# CPython neither writes nor reads longer integers as text (sys.set_int_max_str_digits).
_INT_LIMIT: Final = 10**4300
_FLOAT_MAX: Final = 1.7976931348623157e308
_FLOAT_LEAST: Final = -_FLOAT_MAX
# A shorter integer takes no more digits than a float, which is counted as nothing.
_INT_SHORT: Final = 2**63
_INT_SHORT_LEAST: Final = -_INT_SHORT
_SEGMENTS_SHOWN: Final = 12
_OBJECTS: Final = {dict}
# From how many objects on a list is worth trying to take all at once.
_MANY: Final = 6
_TEXTS: Final = {str}

_TYPE: Final = "only null, booleans, numbers, strings, lists and objects are JSON"
_KEY: Final = "the keys of an object must be strings"
_FINITE: Final = "a number must be finite"
_LONG: Final = "an integer has more than 4300 digits"


class _Refused(Exception):
    """The walk met something it must not copy; `_explain` says what and where."""


class _TooLarge(Exception):
    """The walk reached the size cap; a second walk would only cost as much again."""


def parse_json(text: str, max_bytes: int) -> object:
    """Parse JSON text from outside, its size checked first.

    Args:
        text: The text as received.
        max_bytes: Cap on its UTF-8 length.

    Returns:
        Whatever the text holds. NaN and infinities are left for `copy_json` to find,
        which knows their path. Of a key written twice the last counts.

    Raises:
        SnapshotError: The text is longer than the cap, is not JSON, or is nested beyond
            what the parser's own guard permits.
    """
    size = len(text)
    if size <= max_bytes and not text.isascii():
        size = len(text.encode("utf-8", "surrogatepass"))
    if size > max_bytes:
        raise _too_large(max_bytes)
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        # The parser's own message counts characters of hostile text: it helps nobody.
        raise SnapshotError("not valid snapshot JSON") from None


def copy_json(
    value: dict[str, Any],
    max_bytes: int,
    max_depth: int,
    names: Container[str],
    *,
    owned: bool = False,
) -> tuple[dict[str, Any], int]:
    """Copy a dict, making sure that it holds plain JSON data within the caps.

    Args:
        value: Any dict; nothing about its contents is assumed.
        max_bytes: Cap on the size, counted as the characters of strings and keys, most digits of
            long integers and the least punctuation: never more than the JSON text would have.
        max_depth: Cap on nested containers, ``value`` itself being the first.
        names: Keys that may appear in an error's path. Any other is shown by position.
        owned: Whether the parser has just made ``value`` and nobody else holds any of it:
            then it is checked where it is, and returned itself.

    Returns:
        A copy sharing no container with ``value``, and its counted size.

    Raises:
        SnapshotError: Naming the first offending place, level by level.
    """
    try:
        return _copy(value, max_bytes, max_depth, owned)
    except _TooLarge:
        raise _too_large(max_bytes) from None
    except _Refused:
        raise _explain(value, max_depth, names) from None


def _copy(
    root: dict[str, Any], max_bytes: int, max_depth: int, owned: bool
) -> tuple[dict[str, Any], int]:
    if len(root) > max_bytes:
        raise _TooLarge
    copy = root if owned else root.copy()
    # A container's entries are charged as soon as it is copied: one that is reached a thousand
    # times would otherwise be copied as often before the next level is looked at.
    left = max_bytes - 4 * len(copy)
    level: list[Any] = [copy]
    depth = 1
    while level:
        if depth > max_depth:
            raise _Refused
        depth += 1
        below: list[Any] = []
        for node in level:
            size = 0
            # The same chain twice: a call per value would double the cost of a load.
            if type(node) is dict:
                for key, item in node.items():
                    if type(key) is not str:
                        raise _Refused
                    size += len(key)
                    kind = type(item)
                    if kind is str:
                        size += len(item)
                    elif kind is int:
                        if not _INT_SHORT_LEAST < item < _INT_SHORT:
                            size += _digits(item)
                    elif item is None or kind is bool:
                        pass
                    elif kind is list or kind is dict:
                        if not item and depth <= max_depth:
                            # Nothing is to be looked at in an empty one, unless it lies too deep.
                            if not owned:
                                node[key] = kind()
                            continue
                        if len(item) > left:
                            raise _TooLarge
                        if not owned:
                            node[key] = item = item.copy()
                        left -= (4 if kind is dict else 2) * len(item)
                        below.append(item)
                    elif kind is not float or not _FLOAT_LEAST <= item <= _FLOAT_MAX:
                        raise _Refused
            elif (
                len(node) >= _MANY
                and depth <= max_depth
                and set(map(type, node)) == _OBJECTS
                and (texts := _all_texts(node, left, owned)) is not None
            ):
                size = texts
            else:
                for index, item in enumerate(node):
                    kind = type(item)
                    if kind is str:
                        size += len(item)
                    elif kind is dict or kind is list:
                        if len(item) > left:
                            raise _TooLarge
                        if not owned:
                            node[index] = item = item.copy()
                        left -= (4 if kind is dict else 2) * len(item)
                        if item or depth > max_depth:
                            below.append(item)
                    elif item is None or kind is bool:
                        pass
                    elif kind is int:
                        if not _INT_SHORT_LEAST < item < _INT_SHORT:
                            size += _digits(item)
                    elif kind is not float or not _FLOAT_LEAST <= item <= _FLOAT_MAX:
                        raise _Refused
            left -= size
            if left < 0:
                raise _TooLarge
        level = below
    return copy, max_bytes - left


def _digits(number: int) -> int:
    """About how many digits a long integer has, and not more."""
    if not -_INT_LIMIT < number < _INT_LIMIT:
        raise _Refused
    return number.bit_length() // 4


def _all_texts(objects: list[dict[Any, Any]], left: int, owned: bool) -> int | None:
    """The size of objects that hold nothing but texts; None for others.

    A conversation is a list of such objects: its messages are copied and measured all at once,
    without a step for each of their entries. A parser makes no subclass of ``str`` and no other
    key, so there only the values are in question.
    """
    fields = sum(map(len, objects))
    if 4 * fields > left:
        raise _TooLarge
    copies = objects if owned else list(map(dict.copy, objects))
    texts = list(chain.from_iterable(map(dict.values, copies)))
    texts.extend(chain.from_iterable(copies))
    try:
        if not owned and set(map(type, texts)) != _TEXTS:
            return None
        size = len("".join(texts))
    except TypeError:
        return None
    objects[:] = copies
    return 4 * fields + size


class _Place:
    """A container met by `_explain`, and how it was reached."""

    __slots__ = ("key", "node", "position", "up")

    def __init__(self, node: Any, up: _Place | None, key: object, position: int) -> None:
        self.node = node
        self.up = up
        self.key = key
        self.position = position

    def path(self, names: Container[str]) -> str:
        segments: list[str] = []
        place: _Place | None = self
        while place is not None and place.up is not None:
            if type(place.up.node) is list:
                segments.append(f"[{place.position}]")
            elif type(place.key) is str and place.key in names:
                segments.append(f".{place.key}")
            else:
                segments.append(f".<key {place.position + 1}>")
            place = place.up
        segments.reverse()
        rest = "..." if len(segments) > _SEGMENTS_SHOWN else ""
        return "$" + "".join(segments[:_SEGMENTS_SHOWN]) + rest


def _explain(root: dict[str, Any], max_depth: int, names: Container[str]) -> SnapshotError:
    """Say what `_copy` refused, and where; walks no further than `_copy` went."""
    level = [_Place(root, None, None, 0)]
    for _ in range(max_depth):
        below: list[_Place] = []
        for place in level:
            node = place.node
            pairs = list(node.items()) if type(node) is dict else list(enumerate(node))
            for position, (key, item) in enumerate(pairs):
                if type(node) is dict and type(key) is not str:
                    return SnapshotError(_KEY, path=place.path(names))
                if type(item) is dict or type(item) is list:
                    below.append(_Place(item, place, key, position))
                    continue
                fault = _fault(item)
                if fault is not None:
                    here = _Place(item, place, key, position)
                    return SnapshotError(fault, path=here.path(names))
        if not below:
            # Only another thread can have mended it meanwhile.
            return SnapshotError("the snapshot changed while it was read")
        level = below
    return SnapshotError(f"nested deeper than max_depth={max_depth}", path=level[0].path(names))


def _fault(item: object) -> str | None:
    if item is None or type(item) is bool or type(item) is str:
        return None
    if type(item) is int:
        return None if -_INT_LIMIT < item < _INT_LIMIT else _LONG
    if type(item) is float:
        return None if _FLOAT_LEAST <= item <= _FLOAT_MAX else _FINITE
    return _TYPE


def _too_large(max_bytes: int) -> SnapshotError:
    return SnapshotError(f"larger than max_bytes={max_bytes}")


def written_size(data: dict[str, Any]) -> int:
    """Return the length of the data's JSON text, as `json.dumps` writes it by default."""
    return len(json.dumps(data))
