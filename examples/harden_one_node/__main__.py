"""Tells the story of one hardened node, each step in a process of its own.

``python -m examples.harden_one_node`` (or ``make demo``). The tool appends a line to a file
and syncs it; ``refunds entered`` counts those lines.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    """Run the story; 0 if every step came out as promised."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ledger", default=os.environ.get("GUARDCHART_DEMO_LEDGER") or "on")
    parser.add_argument("--model", default=os.environ.get("GUARDCHART_DEMO_MODEL") or "")
    parser.add_argument("--folder", type=Path, default=Path("demo-output"))
    options = parser.parse_args()
    shutil.rmtree(options.folder, ignore_errors=True)
    options.folder.mkdir(parents=True)
    story = Story(options.folder, options.ledger, options.model)
    story.tell()
    return story.close()


class Story:
    """The steps, what each printed, and whether it came out as promised."""

    def __init__(self, folder: Path, ledger: str, model: str) -> None:
        self.folder = folder
        self.ledger = ledger
        self.model = model
        self.scripted = not model
        self.failed: list[str] = []

    def tell(self) -> None:
        row("step", "state", "what happened", "entered")
        row("-" * 4, "-" * 5, "-" * 13, "-" * 7)
        opened = self.run("open")
        self.line("ticket 7 comes in", opened, "parks; a person is asked", 0)
        shown = self.run("show")["pending"]
        for call in shown:
            what = f"{call['name']}({arguments(call['arguments'])}) digest {call['digest'][:12]}"
            row("another process lists", "", what, str(self.entered()))
        self.expect("the pending call is listed", len(shown) == 1)
        self.line("approved, in a new process", self.run("approve"), None, 1)
        self.line("approved a second time", self.run("approve"), None, 1)
        self.line("fork before it, approve again", self.run("fork"), None, 1)
        for number, each in enumerate(self.race(), start=1):
            self.line(f"two at once, process {number}", each, None, 1)
        self.line("amount edited in checkpoint", self.run("tamper"), None, 1, error="tampered")
        self.line("injected: call wire_money", self.run("inject"), None, 1, error="tool_denied")

    def run(self, step: str) -> dict[str, Any]:
        return self.collect(self.start(step))

    def race(self) -> list[dict[str, Any]]:
        at = time.time() + 4.0
        processes = [self.start("fork", at), self.start("fork", at)]
        return [self.collect(each) for each in processes]

    def start(self, step: str, at: float = 0.0) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "examples.harden_one_node.step", step]
        command += ["--folder", str(self.folder.resolve()), "--ledger", self.ledger]
        command += ["--model", self.model, "--at", str(at)]
        return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)

    def collect(self, process: subprocess.Popen[str]) -> dict[str, Any]:
        out, _ = process.communicate()
        if process.returncode:
            raise SystemExit(process.returncode)
        result: dict[str, Any] = json.loads(out.splitlines()[-1])
        return result

    def entered(self) -> int:
        log = self.folder / "refunds.log"
        return len(log.read_text().splitlines()) if log.exists() else 0

    def line(
        self, step: str, told: dict[str, Any], text: str | None, count: int, error: str = ""
    ) -> None:
        kind = (told["error"] or {}).get("kind", "")
        receipt = told["receipt"]
        if text is None:
            text = told["result"] or ""
            if kind:
                text = f"{kind}: {told['error']['message']}"
            elif receipt.get("status") not in (None, "taken"):
                text = f"{receipt['status']}: {receipt.get('reason')}"
        row(step, str(told["state"]), text, str(self.entered()))
        self.expect(step, self.entered() == count)
        if error:
            self.expect(step, kind == error)

    def expect(self, step: str, held: bool) -> None:
        if not held and self.scripted and self.ledger != "off":
            self.failed.append(step)

    def close(self) -> int:
        entered = self.entered()
        print(f"\nrefunds entered: {entered}")
        print(f"chart (Mermaid): {self.folder / 'chart.mmd'}")
        print(f"checkpoints and ledger (SQLite): {self.folder / 'app.sqlite'}")
        if self.ledger == "off":
            print("without the ledger every fork and every race enters the refund again")
            return 0 if entered > 1 or not self.scripted else 1
        for step in self.failed:
            print(f"NOT AS PROMISED: {step}")
        return 1 if self.failed else 0


def arguments(values: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in values.items())


def row(step: str, state: str, text: str, entered: str) -> None:
    print(f"{step:<30} {state:<15} {text[:76]:<76} {entered:>7}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
