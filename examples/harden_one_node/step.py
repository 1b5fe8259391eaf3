"""One process of the story: opens the SQLite file, does one thing, prints one JSON line."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from langgraph.checkpoint.sqlite import SqliteSaver

from examples.harden_one_node.app import build_graph, chart
from examples.harden_one_node.models import make_model
from guardchart import create_machine
from guardchart.agents import approval_event, pending_approval
from guardchart.langgraph import ledger_for

TICKET = "Order 7 came late, please refund 49.00 EUR of it."
POISONED = "Where is order 666?"


def main() -> int:
    """Do the step named on the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("step", choices=sorted(STEPS))
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--ledger", default="on")
    parser.add_argument("--model", default="")
    parser.add_argument("--at", type=float, default=0.0, help="epoch seconds to start at")
    options = parser.parse_args()
    with SqliteSaver.from_conn_string(str(options.folder / "app.sqlite")) as saver:
        script = {"open": "refund", "inject": "injected"}.get(options.step, "answer")
        ledger = ledger_for(saver) if options.ledger != "off" else None
        app = build_graph(make_model(options.model, script), options.folder, saver, ledger)
        time.sleep(max(0.0, options.at - time.time()))
        result = STEPS[options.step](app, options.folder)
    sys.stdout.write(json.dumps(result) + "\n")
    return 0


def thread(name: str = "ticket-7") -> dict[str, Any]:
    return {"configurable": {"thread_id": name}}


def checkpoint(parked: dict[str, Any]) -> dict[str, Any]:
    """The parked checkpoint of ticket 7, to fork from."""
    place = {"thread_id": "ticket-7", "checkpoint_ns": "", "checkpoint_id": parked["checkpoint_id"]}
    return {"configurable": place}


def told(state: dict[str, Any]) -> dict[str, Any]:
    """What a caller can see of a run: state, receipt, last result, error."""
    snapshot = state["xsm"]
    context = snapshot["context"]
    results = [each["content"] for each in context["messages"] if each["role"] == "tool"]
    return {
        "state": snapshot["value"],
        "receipt": snapshot.get("receipt") or {},
        "error": context["error"],
        "result": results[-1] if results else None,
        "reply": state.get("reply"),
    }


def open_ticket(app: Any, folder: Path) -> dict[str, Any]:
    event = {"type": "START", "prompt": TICKET}
    return told(app.invoke({"ticket": TICKET, "event": event}, thread()))


def show(app: Any, folder: Path) -> dict[str, Any]:
    """List exactly what will run, and remember which checkpoint is parked."""
    state = app.get_state(thread())
    parked = state.config["configurable"]["checkpoint_id"]
    pending = pending_approval(state.values["xsm"]["context"])
    (folder / "parked.json").write_text(json.dumps({"checkpoint_id": parked, "pending": pending}))
    machine = create_machine(chart())
    (folder / "chart.mmd").write_text(machine.to_mermaid(), encoding="utf-8")
    return {"pending": pending}


def approve(app: Any, folder: Path) -> dict[str, Any]:
    return told(app.invoke({"event": approval_event(_parked(folder)["pending"])}, thread()))


def fork_approve(app: Any, folder: Path) -> dict[str, Any]:
    """Go back to the checkpoint before the approval and approve once more."""
    parked = _parked(folder)
    event = approval_event(parked["pending"])
    return told(app.invoke({"event": event}, checkpoint(parked)))


def tamper(app: Any, folder: Path) -> dict[str, Any]:
    """Edit the amount in the checkpoint, then approve what was shown before."""
    parked = _parked(folder)
    config = checkpoint(parked)
    snapshot = json.loads(json.dumps(app.get_state(config).values["xsm"]))
    for call in snapshot["context"]["pending_tool_calls"]:
        call["arguments"]["amount_cents"] = 99_900
    config = app.update_state(config, {"xsm": snapshot}, as_node="notify")
    ids = [each["id"] for each in parked["pending"]]
    return told(app.invoke({"event": {"type": "HUMAN_APPROVED", "call_ids": ids}}, config))


def inject(app: Any, folder: Path) -> dict[str, Any]:
    event = {"type": "START", "prompt": POISONED}
    return told(app.invoke({"ticket": POISONED, "event": event}, thread("ticket-666")))


def _parked(folder: Path) -> dict[str, Any]:
    parked: dict[str, Any] = json.loads((folder / "parked.json").read_text())
    return parked


STEPS = {
    "open": open_ticket,
    "show": show,
    "approve": approve,
    "fork": fork_approve,
    "tamper": tamper,
    "inject": inject,
}

if __name__ == "__main__":
    sys.exit(main())
