"""``python -m examples.support_bot``: the service, and beside it the worker with the deadlines."""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import uvicorn

from examples.support_bot.app import make_app
from examples.support_bot.desk import Desk


def arguments() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(prog="support_bot", description=__doc__)
    parser.add_argument("--port", type=int, default=8000, help="0 for any that is free")
    parser.add_argument("--data", type=Path, default=Path("support-bot-data"))
    parser.add_argument("--model", default="", help="openai:<name> or anthropic:<name>")
    parser.add_argument("--human-timeout-s", type=float, default=86_400)
    parser.add_argument("--scan-every-s", type=float, default=15)
    parser.add_argument("--no-worker", action="store_true", help="deadlines are kept elsewhere")
    parser.add_argument("--worker", action="store_true", help="only keep the deadlines")
    return parser.parse_args()


def reviewers() -> dict[str, str]:
    """Names by token, from ``BOT_REVIEWERS="ann=token1,bob=token2"``; nobody by default."""
    found = {}
    for entry in os.environ.get("BOT_REVIEWERS", "").split(","):
        name, _, token = entry.strip().partition("=")
        if token:
            found[token] = name
    return found


def work(desk: Desk, every_s: float) -> None:
    """Keep the deadlines until standard input ends, as it does when the service is gone."""
    stop = threading.Event()

    def watch() -> None:
        sys.stdin.buffer.read()
        stop.set()

    threading.Thread(target=watch, daemon=True).start()
    desk.scanner().run_forever(every_s, stop=stop)


def main() -> None:
    """Serve, or work."""
    given = arguments()
    desk = Desk.open(given.data, model=given.model, human_timeout_s=given.human_timeout_s)
    if given.worker:
        work(desk, given.scan_every_s)
        return
    worker = None
    if not given.no_worker:
        command = [sys.executable, "-m", "examples.support_bot", "--worker"]
        command += ["--data", str(given.data), "--model", given.model]
        command += ["--human-timeout-s", str(given.human_timeout_s)]
        command += ["--scan-every-s", str(given.scan_every_s)]
        worker = subprocess.Popen(command, stdin=subprocess.PIPE)
    listener = socket.create_server(("127.0.0.1", given.port))
    print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    if not reviewers():
        print('nobody may approve: set BOT_REVIEWERS="ann=a-secret"', file=sys.stderr)
    config = uvicorn.Config(make_app(desk, reviewers()), log_level="warning")
    try:
        uvicorn.Server(config).run(sockets=[listener])
    finally:
        if worker is not None:
            worker.communicate()


if __name__ == "__main__":
    main()
