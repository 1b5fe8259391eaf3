"""Seals: a snapshot or a decision that only a holder of the key could have written."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping, Sequence
from typing import Any

from guardchart.errors import AgentConfigError, SnapshotTamperedError
from guardchart.gate._arguments import canonical

__all__ = ["SEAL_KEY", "Seal"]

SEAL_KEY = "seal"
_PREFIX = "v1."
_MIN_KEY_BYTES = 16


class Seal:
    """HMAC-SHA-256 over canonical JSON, bound to a thread and a machine.

    Args:
        key: at least 16 bytes (text is taken as UTF-8), or a list of them. The first signs;
            every one verifies, so that keys can be rotated.

    Raises:
        AgentConfigError: no key, or one that is too short.

    >>> seal = Seal("0123456789abcdef")
    >>> data = seal.seal({"context": {"n": 1}}, thread="t1", machine="m")
    >>> seal.open(data, thread="t1", machine="m")
    {'context': {'n': 1}}
    """

    __slots__ = ("_keys",)

    def __init__(self, key: str | bytes | Sequence[str | bytes]) -> None:
        keys = [key] if isinstance(key, (str, bytes)) else list(key)
        raw = [k.encode() if isinstance(k, str) else k for k in keys]
        if not raw or any(not isinstance(k, bytes) or len(k) < _MIN_KEY_BYTES for k in raw):
            raise AgentConfigError(f"Seal: give keys of at least {_MIN_KEY_BYTES} bytes")
        self._keys: tuple[bytes, ...] = tuple(bytes(k) for k in raw)

    def __repr__(self) -> str:
        return f"<Seal with {len(self._keys)} key(s)>"

    def __reduce__(self) -> str | tuple[Any, ...]:
        raise TypeError("a Seal holds keys and is not copied or pickled")

    @staticmethod
    def _mac(key: bytes, purpose: str, thread: str, machine: str, data: Any) -> str:
        text = canonical(["guardchart", purpose, thread, machine, data])
        return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()

    def sign(self, data: Any, *, thread: str, machine: str, purpose: str = "snapshot") -> str:
        """Return the seal of JSON data.

        Args:
            data: JSON types only.
            thread: the thread or store key it belongs to.
            machine: the machine's id.
            purpose: what it is; a seal of one purpose does not fit another.

        Raises:
            ValueError: the data is not canonical JSON.
        """
        return _PREFIX + self._mac(self._keys[0], purpose, thread, machine, data)

    def fits(
        self, seal: object, data: Any, *, thread: str, machine: str, purpose: str = "snapshot"
    ) -> bool:
        """Return whether a seal was made by one of the keys for exactly this data."""
        if not isinstance(seal, str) or not seal.startswith(_PREFIX) or not seal.isascii():
            return False
        given = seal[len(_PREFIX) :]
        found = False
        for key in self._keys:
            try:
                expected = self._mac(key, purpose, thread, machine, data)
            except (ValueError, RecursionError):
                return False
            found |= hmac.compare_digest(given, expected)
        return found

    def seal(self, data: Mapping[str, Any], *, thread: str, machine: str) -> dict[str, Any]:
        """Return a copy of a snapshot with its seal under ``"seal"``."""
        body = {key: value for key, value in data.items() if key != SEAL_KEY}
        return {**body, SEAL_KEY: self.sign(body, thread=thread, machine=machine)}

    def open(self, data: Mapping[str, Any], *, thread: str, machine: str) -> dict[str, Any]:
        """Return a sealed snapshot without its seal.

        Raises:
            SnapshotTamperedError: the seal is missing or does not fit; keep nothing of it.
        """
        body = {key: value for key, value in data.items() if key != SEAL_KEY}
        if not self.fits(data.get(SEAL_KEY), body, thread=thread, machine=machine):
            raise SnapshotTamperedError("the snapshot's seal is missing or does not fit")
        return body
