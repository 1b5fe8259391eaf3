"""The documents of the outside suites, and which of them are not expected to pass.

A document is listed as excluded with one of three reasons: a ruling of docs/semantics.md (its
number), something that is out of scope, or a fault of the document. An excluded document must
fail: one that passes is no exclusion any more.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from tests.conformance.scxml.fetch import SCION, STATEMACHINE, folder

REGION = "K10: a region that reenters leaves its sibling regions alone; SCXML exits them all"
DROPPED = "K15: the state that invoked was left, so the completion of its child is dropped"
HISTORY = "K13: default content of a history state is not available (docs/differences.md)"
HTTP = "out of scope: HTTP event processor"
MANUAL = "out of scope: manual, a person has to read the log; the document has no state 'pass'"
CANCELLED = "out of scope: manual; a stopped child runs no exit actions (docs/runtime.md)"

EXCLUDED: dict[str, dict[str, str]] = {
    "scripted": {
        "more-parallel/test2": REGION,
        "more-parallel/test3": REGION,
        "more-parallel/test3b": REGION,
        "more-parallel/test5": REGION,
        "more-parallel/test6": REGION,
        "more-parallel/test6b": REGION,
        "more-parallel/test7": REGION,
    },
    "irp": {
        "mandatory/test236": DROPPED,
        "mandatory/test240": "K22: the document targets a state it does not have ('subFinal1')",
        "mandatory/test352": "the document: wants the short name of the processor, test198 the URI",
        "mandatory/test579": HISTORY,
        "optional/test201": HTTP,
        "optional/test509": HTTP,
        "optional/test510": HTTP,
        "optional/test518": HTTP,
        "optional/test519": HTTP,
        "optional/test520": HTTP,
        "optional/test522": HTTP,
        "optional/test531": HTTP,
        "optional/test532": HTTP,
        "optional/test534": HTTP,
        "optional/test567": HTTP,
        "optional/test577": HTTP,
    },
    "irp-scion": {
        "w3c-ecma/test201.txml": HTTP,
        "w3c-ecma/test230.txml": MANUAL,
        "w3c-ecma/test236.txml": DROPPED,
        "w3c-ecma/test250.txml": CANCELLED,
        "w3c-ecma/test307.txml": MANUAL,
        "w3c-ecma/test579.txml": HISTORY,
    },
}


class Case(NamedTuple):
    """One document: its name, its file, what its suite expects, the data model it starts from."""

    name: str
    path: Path
    script: Any
    model: str

    @property
    def expected(self) -> set[str]:
        """The states the document ends in."""
        if self.script is None:
            return {"pass"}
        events = self.script["events"]
        return set(
            events[-1]["nextConfiguration"] if events else self.script["initialConfiguration"]
        )


def cases(family: str) -> list[Case]:
    """The documents of a family, none where its suite was not fetched."""
    if family == "irp":
        found = sorted(folder(STATEMACHINE).glob("*/*.scxml"))
        return [_case(path, None, "python") for path in found if "sub" not in path.name]
    scripts = sorted(folder(SCION).glob("*/*.json"))
    return [
        _case(path.with_suffix(".scxml"), json.loads(path.read_text("utf-8")), "ecmascript")
        for path in scripts
        if (path.parent.name == "w3c-ecma") is (family == "irp-scion")
    ]


def _case(path: Path, script: Any, model: str) -> Case:
    return Case(f"{path.parent.name}/{path.stem}", path, script, model)
