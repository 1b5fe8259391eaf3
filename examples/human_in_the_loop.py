"""A mail that a person approves, in another process than the one that wrote it.

``python examples/human_in_the_loop.py`` tells the whole story, each step in a process of its own:
the agent drafts and comes to rest, its snapshot is a file, a person sends it back and later
approves, and the mail is sent once. One step by hand: ``--folder DIR start``, then
``--folder DIR APPROVE`` or ``REJECT``. Runs offline: the model is a script.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from guardchart import Machine, MachineLogic, create_machine
from guardchart.agents import AgentResult, get_accepted_events, run_agent_sync
from guardchart.kernel import load

CHART: dict[str, Any] = {
    "id": "mail",
    "initial": "drafting",
    "context": {"draft": None, "rounds": 0},
    "states": {
        "drafting": {
            "invoke": {
                "src": "agent.generate_text",
                "input": {"prompt": "A mail to Ada: the invoice is attached."},
                "onDone": {"target": "review", "actions": "keepDraft"},
            }
        },
        # A person comes in here: the run settles idle, whoever brings the event resumes it.
        "review": {"tags": ["waiting"], "on": {"APPROVE": "sending", "REJECT": "drafting"}},
        "sending": {"invoke": {"src": "sendMail", "onDone": "sent"}},
        "sent": {"type": "final"},
    },
}


def note(path: Path, line: str) -> None:
    """Add a line to a file: what the outside world remembers."""
    with path.open("a", encoding="utf-8") as file:
        file.write(line + "\n")


def count(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines()) if path.exists() else 0


def machine(folder: Path) -> Machine:
    """The chart with what its names mean; made anew in each process."""

    def keep_draft(context: Any, event: Any) -> dict[str, Any]:
        return {"draft": event.data, "rounds": context["rounds"] + 1}

    def send_mail(scope: Any, context: Any, event: Any) -> str:
        note(folder / "sent.txt", context["draft"])
        return "on its way"

    return create_machine(
        CHART, MachineLogic(actions={"keepDraft": keep_draft}, services={"sendMail": send_mail})
    )


def run(folder: Path, event: str | None) -> AgentResult[Any]:
    """One process's part: from the stored snapshot, if there is one, to where it rests again."""

    def generate_text(request: Any) -> str:
        note(folder / "calls.txt", request.prompt)
        return f"Dear Ada, please find the invoice attached. (draft {count(folder / 'calls.txt')})"

    stored = folder / "snapshot.json"
    result = run_agent_sync(
        machine(folder),
        snapshot=json.loads(stored.read_text(encoding="utf-8")) if stored.exists() else None,
        event=event,
        generate_text=generate_text,
    )
    stored.write_text(json.dumps(result.snapshot), encoding="utf-8")
    return result


def step(folder: Path, event: str | None) -> None:
    result = run(folder, event)
    if result.ignored is not None:
        print(f"{result.ignored.type} is not possible now")
    if result.waiting:
        snapshot = load(machine(folder), dict(result.snapshot))
        choices = ", ".join(each.type for each in get_accepted_events(snapshot))
        print(f"draft: {result.context['draft']}")
        print(f"waits for a person in {result.final_state}; possible: {choices}")
    else:
        print(f"{result.status} in {result.final_state}")


def story() -> None:
    with tempfile.TemporaryDirectory() as name:
        for event in ("start", "REJECT", "APPROVE"):
            print(f"-- a process of its own: {event}", flush=True)
            subprocess.run([sys.executable, __file__, "--folder", name, event], check=True)
        calls, sent = count(Path(name) / "calls.txt"), count(Path(name) / "sent.txt")
        print(f"-- model calls: {calls}, mails sent: {sent}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("event", nargs="?", default="start")
    given = parser.parse_args()
    if given.folder is None:
        story()
    else:
        step(given.folder, None if given.event == "start" else given.event)


if __name__ == "__main__":
    main()
