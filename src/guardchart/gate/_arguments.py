"""Arguments as JSON text: the strict parser, the limits, the canonical form and the digest.

Everything here happens before a schema is looked at. A value that JSON cannot carry, that two
parsers would read differently, or that is large enough to be an attack in itself is refused,
whether it arrives as text (`parse_arguments`) or as Python containers (`admit`).
"""

from __future__ import annotations

import hashlib
import json
import json.encoder
import re
from collections.abc import Callable
from math import isfinite
from typing import Any, NoReturn

from pydantic_core import to_json

from guardchart.errors import ToolDeniedError

__all__ = [
    "ArgumentsRefused",
    "MAX_ARGUMENT_BYTES",
    "MAX_DEPTH",
    "UNPARSEABLE",
    "admit",
    "canonical",
    "digest",
    "digest_text",
    "parse_arguments",
    "parse_json",
    "parse_json_at",
]

MAX_ARGUMENT_BYTES = 64 * 1024
MAX_DEPTH = 64
MAX_INT_DIGITS = 4300
UNPARSEABLE = "__unparseable__"
"""The key under which an adapter hands over text that is not JSON; always refused."""

_INT_LIMIT = 10**MAX_INT_DIGITS
_STRINGS = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)


class ArgumentsRefused(ValueError):
    """Arguments failed before or in their schema; the text is safe to show to anyone."""


def _encoder() -> Callable[[Any], str]:
    """Return the canonical encoder: sorted keys, no blanks, no NaN, non-ASCII kept."""
    slow = json.JSONEncoder(
        sort_keys=True, ensure_ascii=False, separators=(",", ":"), allow_nan=False
    ).encode
    make: Any = getattr(json.encoder, "c_make_encoder", None)
    basestring: Any = getattr(json.encoder, "encode_basestring", None)

    def not_json(value: object) -> NoReturn:
        raise TypeError(f"{type(value).__name__} is not JSON")

    # JSONEncoder.encode builds its C encoder anew for every call, which costs more than the
    # encoding of a typical argument object. The C encoder is kept here, and checked against
    # the public one, since its constructor is not documented.
    try:
        encode = make(None, not_json, basestring, None, ":", ",", True, False, False)
        probe = {"b": [1, 1.5, True, None, 'é"\\\x01'], "a": {}}
        if "".join(encode(probe, 0)) != slow(probe):
            return slow
    except Exception:
        return slow
    return lambda value: "".join(encode(value, 0))


encode = _encoder()
"""The canonical encoder itself; raises TypeError, ValueError or RecursionError."""


def canonical(value: object) -> str:
    """Return the canonical JSON text of a JSON value: sorted keys, no blanks.

    Args:
        value: dicts with string keys, lists, strings, numbers, booleans and None.

    Returns:
        The text over which digests and seals are taken; equal values give equal text, and
        ``1``, ``1.0`` and ``True`` give different ones.

    Raises:
        ValueError: the value is not finite JSON, nested too deeply, or refers to itself.

    >>> canonical({"b": 1, "a": [True, "é"]})
    '{"a":[true,"é"],"b":1}'
    """
    try:
        return encode(value)
    except (TypeError, RecursionError) as exc:
        raise ValueError(f"not canonical JSON: {type(exc).__name__}") from None


def digest_text(text: str) -> str:
    """Return the digest of a canonical text, as 64 hexadecimal digits."""
    return hashlib.sha256(text.encode()).hexdigest()


def digest(value: object) -> str:
    """Return the SHA-256 of a JSON value's canonical text, as 64 hexadecimal digits.

    Raises:
        ValueError: as `canonical`.

    >>> digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})
    True
    """
    return digest_text(canonical(value))


def _holds_nul(value: Any) -> bool:
    if isinstance(value, str):
        return "\x00" in value
    if isinstance(value, dict):
        return any(map(_holds_nul, value)) or any(map(_holds_nul, value.values()))
    return isinstance(value, list) and any(map(_holds_nul, value))


def _walk(items: Any, depth: int, left: int) -> int:
    """Look at every value below a container; return what is left of the size allowance.

    The allowance is in characters, so that a huge value is given up before it is encoded.
    """
    if depth > MAX_DEPTH:
        raise ArgumentsRefused(f"nested more than {MAX_DEPTH} levels deep")
    for item in items:
        kind = type(item)
        left -= 1
        if kind is str:
            left -= len(item)
        elif kind is int:
            if item.bit_length() > 14_000 and abs(item) >= _INT_LIMIT:
                raise ArgumentsRefused(f"an integer has more than {MAX_INT_DIGITS} digits")
        elif kind is bool or item is None:
            pass
        elif kind is list:
            left = _walk(item, depth + 1, left)
        elif kind is dict:
            left = _walk(item.values(), depth + 1, _keys(item, left))
        elif kind is float:
            if not isfinite(item):
                raise ArgumentsRefused("a number is not finite")
        else:
            raise ArgumentsRefused("a value is not JSON")
        if left < 0:
            break
    return left


def _keys(value: dict[Any, Any], left: int) -> int:
    for key in value:
        if type(key) is not str:
            raise ArgumentsRefused("a key is not a string")
        left -= len(key) + 1
        if left < 0:
            break
    return left


def admit(arguments: object, max_bytes: int = MAX_ARGUMENT_BYTES) -> bytes:
    """Return the JSON text of arguments that may be shown to a schema.

    Args:
        arguments: what a call carries; must be a dict of JSON values with string keys.
        max_bytes: the largest text, in UTF-8 bytes.

    Raises:
        ArgumentsRefused: not an object, not JSON, or beyond a limit.
    """
    if type(arguments) is not dict:
        raise ArgumentsRefused("not a JSON object")
    if UNPARSEABLE in arguments:
        raise ArgumentsRefused("not valid JSON")
    if _walk(arguments.values(), 1, _keys(arguments, max_bytes)) < 0:
        raise ArgumentsRefused(f"larger than {max_bytes} bytes")
    return _text_of(arguments, max_bytes)


def _text_of(value: Any, max_bytes: int) -> bytes:
    """Return the JSON text of a value that was walked."""
    try:
        text = to_json(value)
    except Exception:  # the walk has left it nothing else to stumble over
        raise ArgumentsRefused("a string holds a lone surrogate") from None
    if b"\\u0000" in text and _holds_nul(value):
        raise ArgumentsRefused("a string holds a NUL character")
    if len(text) > max_bytes:
        raise ArgumentsRefused(f"larger than {max_bytes} bytes")
    return text


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise ArgumentsRefused("an object has a duplicate key")
    return out


def _constant(_: str) -> NoReturn:
    raise ArgumentsRefused("a number is not finite")


def _float(text: str) -> float:
    value = float(text)
    if not isfinite(value):
        raise ArgumentsRefused("a number is not finite")
    return value


def _int(text: str) -> int:
    if len(text) - (text[0] == "-") > MAX_INT_DIGITS:
        raise ArgumentsRefused(f"an integer has more than {MAX_INT_DIGITS} digits")
    try:
        return int(text)
    except ValueError:
        raise ArgumentsRefused(f"an integer has more than {MAX_INT_DIGITS} digits") from None


_decoder = json.JSONDecoder(
    object_pairs_hook=_pairs, parse_constant=_constant, parse_float=_float, parse_int=_int
)
_parse = _decoder.decode


def _too_deep(text: str) -> bool:
    if text.count("[") + text.count("{") <= MAX_DEPTH:
        return False
    depth = 0
    for char in _STRINGS.sub("", text):
        if char in "[{":
            depth += 1
            if depth > MAX_DEPTH:
                return True
        elif char in "]}":
            depth -= 1
    return False


def _decode(text: object, max_bytes: int) -> Any:
    if isinstance(text, (bytes, bytearray)):
        if len(text) > max_bytes:
            raise ArgumentsRefused(f"larger than {max_bytes} bytes")
        try:
            text = text.decode()
        except UnicodeDecodeError:
            raise ArgumentsRefused("not UTF-8") from None
    if not isinstance(text, str):
        raise ArgumentsRefused("not valid JSON")
    if len(text) > max_bytes or len(text.encode("utf-8", "surrogatepass")) > max_bytes:
        raise ArgumentsRefused(f"larger than {max_bytes} bytes")
    if _too_deep(text):
        raise ArgumentsRefused(f"nested more than {MAX_DEPTH} levels deep")
    try:
        return _parse(text)
    except json.JSONDecodeError:
        raise ArgumentsRefused("not valid JSON") from None


def _admit_any(value: Any, max_bytes: int) -> Any:
    """Return a value of any kind if it is within the limits of `admit`."""
    if _walk([value], 0, max_bytes) < 0:
        raise ArgumentsRefused(f"larger than {max_bytes} bytes")
    _text_of(value, max_bytes)
    return value


def parse_json(text: str | bytes, *, max_bytes: int = MAX_ARGUMENT_BYTES) -> Any:
    """Parse one JSON value of any kind, as strictly as arguments are parsed.

    Args:
        text: the whole text, with nothing but blanks around the value.
        max_bytes: the largest text, in UTF-8 bytes.

    Raises:
        ArgumentsRefused: as `parse_arguments`; the text is never repeated.

    >>> parse_json("[1, 2]")
    [1, 2]
    """
    return _admit_any(_decode(text, max_bytes), max_bytes)


def parse_json_at(text: str, at: int, *, max_bytes: int = MAX_ARGUMENT_BYTES) -> tuple[Any, int]:
    """Parse the JSON value that begins at a place of a longer text, as strictly.

    Returns:
        The value, and where it ends.

    Raises:
        ArgumentsRefused: as `parse_json`.

    >>> parse_json_at("say [1] now", 4)
    ([1], 7)
    """
    try:
        value, end = _decoder.raw_decode(text, at)
    except (json.JSONDecodeError, StopIteration):
        raise ArgumentsRefused("not valid JSON") from None
    except RecursionError:
        raise ArgumentsRefused(f"nested more than {MAX_DEPTH} levels deep") from None
    return _admit_any(value, max_bytes), end


def parse_arguments(
    text: str | bytes, *, tool: str = "*", max_bytes: int = MAX_ARGUMENT_BYTES
) -> dict[str, Any]:
    """Parse the JSON text of a call's arguments, strictly; the one parser adapters use.

    Args:
        text: what the provider sent, as text or UTF-8 bytes.
        tool: the name for the error; ``"*"`` where it is not known to be a registered one.
        max_bytes: the largest text, in UTF-8 bytes.

    Returns:
        The object, as plain dicts, lists, strings, numbers, booleans and None.

    Raises:
        ToolDeniedError: not JSON, not an object, or one of: a duplicate key, NaN or an
            infinity (as a literal or by overflow), an integer beyond 4 300 digits, a lone
            surrogate, NUL, more than 64 levels, too large. The text is never repeated.

    >>> parse_arguments('{"city": "Kochi"}')
    {'city': 'Kochi'}
    """
    try:
        value = _decode(text, max_bytes)
        admit(value, max_bytes)
        return value  # type: ignore[no-any-return]
    except ArgumentsRefused as exc:
        raise ToolDeniedError(tool, f"invalid arguments ({exc})") from None
