"""When a failed model or tool turn is tried again, and after what delay."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

from guardchart.errors import AgentConfigError

__all__ = ["RetryPolicy"]


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often, and after what delay, a failed model or tool turn is tried again.

    Args:
        max_attempts: Attempts in all, the first one included; at least 1.
        delay_s: Delay before the second attempt, in seconds.
        backoff: Factor from each delay to the next; 1 keeps it constant.
        jitter: Share of the delay, 0 to 1, that is spread: 0.2 means 80 % to 120 %.
        max_delay_s: Upper limit of any delay, in seconds.

    Raises:
        AgentConfigError: A number is of the wrong type, not finite or out of range.

    Example:
        >>> policy = RetryPolicy(delay_s=0.5, backoff=2)
        >>> [policy.delay_ms(attempt) for attempt in (1, 2, 3)]
        [500, 1000, 2000]
    """

    max_attempts: int = 3
    delay_s: float = 1.0
    backoff: float = 1.0
    jitter: float = 0.0
    max_delay_s: float = 60.0

    def __post_init__(self) -> None:
        if not _is_int(self.max_attempts) or self.max_attempts < 1:
            raise AgentConfigError("RetryPolicy: max_attempts must be an int of at least 1")
        for name, low, high in (
            ("delay_s", 0.0, math.inf),
            ("backoff", 1.0, math.inf),
            ("jitter", 0.0, 1.0),
            ("max_delay_s", 0.0, math.inf),
        ):
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not low <= value <= high or value == math.inf:
                top = "" if high == math.inf else f" and at most {high:g}"
                raise AgentConfigError(
                    f"RetryPolicy: {name} must be a finite number of at least {low:g}{top}"
                )

    def delay_ms(self, attempt: int, key: str = "") -> int:
        """Milliseconds to wait after a failed attempt.

        The jitter is drawn from ``attempt`` and ``key``, not from a random source, so that a
        step evaluated twice, or replayed, gets the same delay; a key that differs from run to
        run spreads them.

        Args:
            attempt: Which attempt failed, the first being 1. Anything else counts as 1: it may
                come from a snapshot.
            key: What spreads equal attempts of different runs, e.g. the run's nonce.

        Returns:
            The delay, at most ``max_delay_s``.
        """
        n = attempt if _is_int(attempt) and attempt >= 1 else 1
        try:
            delay_s = self.delay_s * float(self.backoff) ** (n - 1)
        except OverflowError:
            delay_s = self.max_delay_s if self.delay_s else 0.0
        if self.jitter:
            drawn = hashlib.sha256(f"{key}\0{n}".encode("utf-8", "surrogatepass")).digest()
            share = int.from_bytes(drawn[:8]) / 2**63 - 1.0
            delay_s *= 1.0 + self.jitter * share
        return round(min(delay_s, self.max_delay_s) * 1000)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
