"""Where recordings and traces go: JSON lines in a file or stream, or a callable.

What a sink raises disturbs nobody: it is logged once, and what could not be written is counted.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

__all__ = ["JsonLinesSink", "Outlet"]

_LOG = logging.getLogger("guardchart")


def _encoded(message: Mapping[str, Any]) -> str:
    """One line of ASCII: no character of the message can end it early or confuse a terminal."""
    return json.dumps(message, separators=(",", ":"), default=str) + "\n"


class JsonLinesSink:
    """Writes each message as one line of JSON, appended to a file or written to a text stream.

    A file is opened at once and written a whole line at a time, so that several threads and
    processes may share it, and a log shipper may copy and truncate it. It is closed by
    ``close()``, by the end of a ``with`` block, or when the sink is collected; a stream is
    yours to close.

    Args:
        target: A path, or a stream with ``write``.

    Raises:
        OSError: The file cannot be opened.

    Source: xstate-statemachine, agents reference: recordings.

    Example:
        >>> import io
        >>> stream = io.StringIO()
        >>> JsonLinesSink(stream).send({"type": "note", "n": 1})
        >>> stream.getvalue()
        '{"type":"note","n":1}\\n'
    """

    def __init__(self, target: str | os.PathLike[str] | Any) -> None:
        self._lock = threading.Lock()
        self._stream: Any = None
        self._fd: int | None = None
        if hasattr(target, "write"):
            self._stream = target
            return
        flags = os.O_APPEND | os.O_CREAT | os.O_WRONLY | getattr(os, "O_BINARY", 0)
        self._fd = os.open(Path(target), flags, 0o666)
        self._finalizer = weakref.finalize(self, os.close, self._fd)

    def send(self, message: Mapping[str, Any]) -> None:
        """Write one message.

        Args:
            message: JSON types; anything else is written as its ``str``.

        Raises:
            ValueError: The sink is closed.
            OSError: The file cannot be written.
        """
        line = _encoded(message)
        with self._lock:
            if self._stream is not None:
                self._stream.write(line)
                return
            if self._fd is None:
                raise ValueError("the sink is closed")
            left = line.encode("ascii")
            while left:
                left = left[os.write(self._fd, left) :]

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        with self._lock:
            if self._fd is not None:
                self._finalizer()
                self._fd = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Outlet:
    """A sink as something that can be called without care.

    Args:
        sink: A path, a stream, a callable, an object with ``send``, or None for nowhere.

    Attributes:
        lost: How many messages the sink raised at.
    """

    def __init__(self, sink: Any) -> None:
        self.lost = 0
        self._name = type(sink).__name__
        self._opened: JsonLinesSink | None = None
        self._send: Callable[[dict[str, Any]], Any] | None
        if sink is None:
            self._send = None
        elif callable(getattr(sink, "send", None)):
            self._send = sink.send
        elif callable(sink) and not hasattr(sink, "write"):
            self._send = sink
        else:
            self._opened = JsonLinesSink(sink)
            self._send = self._opened.send

    def __call__(self, message: dict[str, Any]) -> None:
        if self._send is None:
            return
        try:
            self._send(message)
        except Exception as error:
            self.lost += 1
            if self.lost == 1:
                _LOG.warning(
                    "a sink (%s) raised %s; what it does not take is lost",
                    self._name,
                    type(error).__name__,
                )

    def close(self) -> None:
        """Close the file this outlet opened, if any."""
        if self._opened is not None:
            self._opened.close()
