"""`LangSmithRecorder`: a LangSmith endpoint on the loopback interface that keeps what is posted."""

from __future__ import annotations

import gzip
import http.server
import json
import re
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final, Self

__all__ = ["LangSmithRecorder"]

_INFO: Final = {
    "version": "0.10.0",
    "batch_ingest_config": {
        "use_multipart_endpoint": True,
        "size_limit": 100,
        "size_limit_bytes": 20_971_520,
        "scale_up_nthreads_limit": 1,
        "scale_up_qsize_trigger": 1000,
        "scale_down_nempty_trigger": 4,
    },
}
_PARTS: Final = ("inputs", "outputs", "events", "error", "extra", "serialized")


class LangSmithRecorder:
    """Records what a real LangSmith client posts, so that a test can read the run tree.

    Speaks ``/info``, ``/runs/multipart`` (plain, gzip, zstd), ``/runs/batch`` and single runs.
    It listens on the loopback interface and keeps everything in memory.

    Args:
        multipart: Whether clients are told to use the multipart endpoint.
        zstd: Whether clients are told that they may compress. A client that does keeps a thread
            until its process ends, and one that does not logs that it could.

    Attributes:
        url: The client's ``api_url``.
        bodies: Each posted body, uncompressed, in order of arrival.

    Example:
        >>> from langsmith import Client
        >>> with LangSmithRecorder() as recorder:
        ...     client = Client(api_url=recorder.url, api_key="none")
        ...     client.create_run("hello", {"n": 1}, run_type="chain")
        ...     client.flush()
        ...     [run["name"] for run in recorder.wait_for(lambda runs: runs)]
        ['hello']
    """

    def __init__(self, *, multipart: bool = True, zstd: bool = False) -> None:
        self.bodies: list[bytes] = []
        self._runs: dict[str, dict[str, Any]] = {}
        self._lock = threading.Lock()
        self._info = json.dumps(
            {
                **_INFO,
                "instance_flags": {"zstd_compression_enabled": zstd},
                "batch_ingest_config": {
                    **_INFO["batch_ingest_config"],  # type: ignore[dict-item]
                    "use_multipart_endpoint": multipart,
                },
            }
        ).encode()
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
        )
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop listening; what was recorded stays readable."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5)

    # Reading

    def runs(self) -> list[dict[str, Any]]:
        """Return every run as it stands after all its posts and patches, in the tree's order."""
        with self._lock:
            found = [dict(run) for run in self._runs.values()]
        return sorted(found, key=lambda run: str(run.get("dotted_order") or run.get("id")))

    def named(self, name: str) -> list[dict[str, Any]]:
        """Return the runs of this name."""
        return [run for run in self.runs() if run.get("name") == name]

    def children(self, run: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the runs directly below a run."""
        return [each for each in self.runs() if each.get("parent_run_id") == run["id"]]

    def open(self) -> list[str]:
        """Return the names of runs that were begun and never ended."""
        return [str(run.get("name")) for run in self.runs() if not run.get("end_time")]

    def tree(self) -> str:
        """Return the runs as indented text: kind and name, and the event of a transition.

        Runs whose parent was not posted stand at the left edge.
        """
        runs = self.runs()
        ids = {run["id"] for run in runs}
        lines: list[str] = []

        def walk(run: dict[str, Any], depth: int) -> None:
            inputs = run.get("inputs")
            moved = isinstance(inputs, dict) and set(inputs) == {"from", "event"}
            event = inputs.get("event") if moved and isinstance(inputs, dict) else None
            note = f"  [{event}]" if isinstance(event, str) else ""
            error = "  failed" if run.get("error") else ""
            lines.append(f"{'  ' * depth}{run.get('run_type')} {run.get('name')}{note}{error}")
            for each in runs:
                if each.get("parent_run_id") == run["id"]:
                    walk(each, depth + 1)

        for run in runs:
            if run.get("parent_run_id") not in ids:
                walk(run, 0)
        return "\n".join(lines)

    def wait_for(
        self, done: Callable[[list[dict[str, Any]]], Any], timeout_s: float = 10.0
    ) -> list[dict[str, Any]]:
        """Return the runs once ``done(runs)`` holds.

        Raises:
            TimeoutError: It does not hold in time; the runs are kept.
        """
        until = time.monotonic() + timeout_s
        while not done(runs := self.runs()):
            if time.monotonic() > until:
                raise TimeoutError(f"{len(runs)} runs after {timeout_s:g} s, and not those")
            time.sleep(0.01)
        return runs

    # Recording

    def _record(self, path: str, content_type: str, body: bytes) -> None:
        with self._lock:
            self.bodies.append(body)
            if path.endswith("/runs/multipart"):
                self._multipart(body, content_type)
            elif path.endswith("/runs/batch"):
                data = json.loads(body)
                for run in [*(data.get("post") or ()), *(data.get("patch") or ())]:
                    self._merge(run)
            elif "/runs" in path:
                run = json.loads(body)
                run.setdefault("id", path.rpartition("/")[2])
                self._merge(run)

    def _merge(self, run: dict[str, Any]) -> None:
        known = self._runs.setdefault(run["id"], {})
        known.update({key: value for key, value in run.items() if value is not None})

    def _multipart(self, body: bytes, content_type: str) -> None:
        found = re.search(r'boundary="?([^";]+)', content_type)
        if found is None:
            return
        for part in body.split(b"--" + found[1].encode()):
            head, _, value = part.strip(b"\r\n").partition(b"\r\n\r\n")
            name = re.search(rb'name="([^"]+)"', head)
            if name is None:
                continue
            # "post.<id>", then "post.<id>.inputs" and its kin
            kind, _, rest = name[1].decode().partition(".")
            ident, _, field = rest.partition(".")
            if kind not in ("post", "patch"):
                continue
            if not field:
                self._merge({"id": ident, **json.loads(value)})
            elif field in _PARTS:
                self._merge({"id": ident, field: json.loads(value)})


def _handler(recorder: LangSmithRecorder) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            """Say nothing."""

        def _answer(self, code: int, body: bytes = b"{}") -> None:
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def _body(self) -> bytes:
            length = self.headers.get("Content-Length")
            if length is not None:
                data = self.rfile.read(int(length))
            else:
                data = b""
                while size := int(self.rfile.readline().strip() or b"0", 16):
                    data += self.rfile.read(size)
                    self.rfile.readline()
                self.rfile.readline()
            return _plain(data, self.headers.get("Content-Encoding") or "")

        def do_GET(self) -> None:
            """Say what this server can."""
            known = self.path.endswith("/info")
            self._answer(200, recorder._info) if known else self._answer(404)

        def do_POST(self) -> None:
            """Take new runs."""
            recorder._record(self.path, self.headers.get("Content-Type") or "", self._body())
            self._answer(202)

        do_PATCH = do_POST

    return Handler


def _plain(data: bytes, encoding: str) -> bytes:
    if encoding == "gzip":
        return gzip.decompress(data)
    if encoding == "zstd":
        import zstandard

        return zstandard.ZstdDecompressor().decompressobj().decompress(data)
    return data
