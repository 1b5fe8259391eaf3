"""A provider on the loopback interface: answers from a list, keeps what it was asked.

A `Stream` is answered as server-sent events: OpenAI's end with ``[DONE]``, Anthropic's are named.
One that breaks off closes the connection in the middle of its body; one with ``hold`` waits there.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"


def fixture(name: str) -> Any:
    return json.loads((FIXTURES / name).read_text())


@dataclass
class Stream:
    """A streamed answer: the events, and how many of them are sent before it breaks off."""

    events: list[Any]
    named: bool = False
    breaks_after: int | None = None
    hold: threading.Event | None = None
    gone: threading.Event = field(default_factory=threading.Event)

    def lines(self) -> Iterator[bytes]:
        for event in self.events[: self.breaks_after]:
            head = f"event: {event['type']}\n" if self.named else ""
            yield f"{head}data: {json.dumps(event)}\n\n".encode()
        if self.breaks_after is None and not self.named:
            yield b"data: [DONE]\n\n"


class Provider:
    """What the server answered and was asked."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.answers: list[tuple[int, Any]] = []
        self.requests: list[tuple[str, Any]] = []


@contextmanager
def provider(*answers: tuple[int, Any]) -> Iterator[Provider]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.close_connection = True
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            state.requests.append((self.path, body))
            status, answer = state.answers.pop(0)
            if isinstance(answer, Stream):
                self.stream(answer)
                return
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Connection", "close")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def stream(self, answer: Stream) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            try:
                for line in answer.lines():
                    self.chunk(line)
                if answer.hold is not None:
                    answer.hold.wait(5)
                    for _ in range(200):  # until the other side is seen to be gone
                        self.chunk(b": still here\n\n")
                        time.sleep(0.01)
                if answer.breaks_after is None:
                    self.wfile.write(b"0\r\n\r\n")
            except OSError:
                answer.gone.set()

        def chunk(self, data: bytes) -> None:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
            self.wfile.flush()

        protocol_version = "HTTP/1.1"

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state = Provider(f"http://127.0.0.1:{server.server_port}")
    state.answers = list(answers)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
