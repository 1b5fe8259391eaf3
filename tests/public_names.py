"""The public names of each entry point, pinned in public_names.json.

``python -m tests.public_names`` writes that file anew from the code.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
from pathlib import Path

import guardchart
from guardchart.errors import MissingExtraError

_FILE = Path(__file__).with_suffix(".json")

# Packages that are reached through `guardchart`, and the command line, which is no import.
_INTERNAL = {"kernel", "runtime", "cli"}

PINNED: dict[str, list[str]] = json.loads(_FILE.read_text()) if _FILE.exists() else {}


def entry_points() -> list[str]:
    """Return the dotted names of the modules that users import from."""
    found = [
        f"guardchart.{module.name}"
        for module in pkgutil.iter_modules(guardchart.__path__)
        if not module.name.startswith("_") and module.name not in _INTERNAL
    ]
    return ["guardchart", *sorted(found)]


def public_names(entry_point: str) -> list[str]:
    """Return an entry point's ``__all__``."""
    return list(getattr(importlib.import_module(entry_point), "__all__", ()))


def main() -> None:
    """Write public_names.json; a bridge whose framework is not installed keeps its old row."""
    names = {}
    for entry_point in entry_points():
        try:
            names[entry_point] = public_names(entry_point)
        except MissingExtraError:
            if entry_point in PINNED:
                names[entry_point] = PINNED[entry_point]
    _FILE.write_text(json.dumps(names, indent=1) + "\n")


if __name__ == "__main__":
    main()
