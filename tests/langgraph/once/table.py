"""The matrix as text: what was counted in the cells that ran."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from tests.langgraph.once.faults import FAULTS
from tests.langgraph.once.hosts import DURABILITIES, HOSTS, SAVERS

PROPERTY = "once"

_Counts = dict[tuple[str, str, str, str], dict[bool, int]]

_LEGEND = (
    "entries of the side effect with a ledger / with one that forgets entries; "
    "s, a, e: the durability, where it matters; . did not run, - does not exist"
)


def cell_property(
    fault: str, saver: str, host: str, durability: str, remembers: bool, entries: int
) -> str:
    """What a test hands to ``record_property``; it reaches the controller of pytest-xdist."""
    return json.dumps([fault, saver, host, durability, remembers, entries])


def counted(reports: Iterable[Any]) -> _Counts:
    """Collect the cells from test reports."""
    found: _Counts = {}
    for report in reports:
        for name, value in getattr(report, "user_properties", ()):
            if name == PROPERTY and report.when == "call":
                fault, saver, host, durability, remembers, entries = json.loads(value)
                cell = found.setdefault((fault, saver, host, durability), {})
                cell[remembers] = entries
    return found


def lines(found: _Counts) -> Iterator[str]:
    """The table: a row for each fault that ran, a column for each saver and host that did."""
    rows = [fault for fault in FAULTS if any(key[0] == fault for key in found)]
    parts = [["", "", *rows]]
    for saver in SAVERS:
        hosts = [host for host in HOSTS if any(key[1:3] == (saver, host) for key in found)]
        if hosts:
            columns = [[host, *(_cell(found, row, saver, host) for row in rows)] for host in hosts]
            parts.append([saver, *_beside(columns)])
    yield from _beside(parts, "   ")
    yield _LEGEND


def _beside(columns: list[list[str]], gap: str = "  ") -> Iterator[str]:
    """Columns of text side by side, each as wide as its widest."""
    widths = [max(map(len, column)) for column in columns]
    for row in zip(*columns, strict=True):
        texts = (text.ljust(width) for text, width in zip(row, widths, strict=True))
        yield gap.join(texts).rstrip()


def _cell(found: _Counts, fault: str, saver: str, host: str) -> str:
    if FAULTS[fault].kills and not SAVERS[saver].durable:
        return "-"
    by = {each: found.get((fault, saver, host, each), {}) for each in DURABILITIES}
    if len(FAULTS[fault].entries) > 1:
        # Who of two comes first is chance, and no matter of the durability.
        counts = [
            [each[remembers] for each in by.values() if remembers in each]
            for remembers in (True, False)
        ]
        return "/".join(map(_range, counts)) if any(counts) else "."
    texts: dict[str, str] = {}
    for durability, each in by.items():
        if each:
            text = f"{each.get(True, '.')}/{each.get(False, '.')}"
            texts[text] = texts.get(text, "") + durability[0]
    if len(texts) < 2:
        return next(iter(texts), ".")
    return " ".join(f"{letters}:{text}" for text, letters in texts.items())


def _range(counts: list[int]) -> str:
    """``1``, or ``0-2`` where they differ."""
    if not counts:
        return "."
    least, most = min(counts), max(counts)
    return str(least) if least == most else f"{least}-{most}"
