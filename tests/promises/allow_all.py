"""A gate that allows everything: the negative control of the promise tests.

It stands where the reference monitor stands. Every registered tool runs with whatever
arguments it is given, nobody is asked, and no row is claimed.
"""

from __future__ import annotations

import json
from typing import Any

from guardchart.gate import ToolCall
from guardchart.gate._check import Checked, Facts
from guardchart.gate._rules import Rule


def allow(call: ToolCall, facts: Facts, before: Checked | None = None) -> Checked:
    """Allow one call, unseen."""
    tool = facts.registry.get(call.name) or next(iter(facts.registry))
    arguments = dict(call.arguments)
    try:
        arguments, text = tool.load(arguments)
    except Exception:
        text = json.dumps(arguments, default=str)
    return Checked(call, tool, arguments, text, "0" * 64, False, False, Rule())


def install(monkeypatch: Any) -> None:
    """Put `allow` where the reference monitor stands."""
    from guardchart.gate import _check

    monkeypatch.setattr(_check, "check", allow)
