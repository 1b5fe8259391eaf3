"""Delays: a number of milliseconds, an ISO-8601 duration, or a name that logic explains."""

from __future__ import annotations

import math
import re
from typing import Any

from guardchart.errors import ChartError

__all__ = ["checked_delay", "literal_delay"]

_ISO = re.compile(
    r"P(?:(?P<w>\d+(?:\.\d+)?)W)?(?:(?P<d>\d+(?:\.\d+)?)D)?"
    r"(?:T(?:(?P<h>\d+(?:\.\d+)?)H)?(?:(?P<m>\d+(?:\.\d+)?)M)?(?:(?P<s>\d+(?:\.\d+)?)S)?)?"
)
_UNITS_MS = {"w": 604_800_000, "d": 86_400_000, "h": 3_600_000, "m": 60_000, "s": 1_000}
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")


def literal_delay(text: str, path: str = "") -> float | None:
    """Return the milliseconds a number or an ISO-8601 duration says; None for a name.

    Years and months have no fixed length and are no durations here.

    Raises:
        ChartError: a number that is negative or not finite.

    >>> literal_delay("PT1.5S"), literal_delay("250"), literal_delay("modelTimeout")
    (1500, 250, None)
    """
    if _NUMBER.fullmatch(text):
        return checked_delay(float(text), path)
    match = _ISO.fullmatch(text)
    if match is None or text[-1] in "PT" or not any(match.groupdict().values()):
        return None
    total = math.fsum(float(n) * _UNITS_MS[u] for u, n in match.groupdict().items() if n)
    return checked_delay(total, path)


def checked_delay(value: Any, path: str = "") -> float:
    """Return a delay in milliseconds, whole where it can be; refuse what is none."""
    if isinstance(value, str):
        found = literal_delay(value, path)
        if found is None:
            raise ChartError("a delay must be milliseconds or an ISO-8601 duration", path=path)
        return found
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ChartError("a delay must be milliseconds or an ISO-8601 duration", path=path)
    if not math.isfinite(value) or value < 0:
        raise ChartError("a delay must be finite and not negative", path=path)
    return int(value) if float(value).is_integer() else value
