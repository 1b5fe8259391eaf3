"""What must hold of an installed wheel whose only dependency is pydantic."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import pkgutil
import sys
from pathlib import Path

import guardchart
from guardchart.errors import MissingExtraError

# Bridges that import their framework at once, and the extra that a user is told to install.
EXTRAS = {"langgraph": "langgraph", "pydantic_ai": "pydantic-ai"}

# Names of the core that need a driver, and its extra.
DRIVERS = {"PostgresLedger": "postgres", "PostgresStore": "postgres"}

CORE = ("guardchart", "guardchart.persistence", "guardchart.gate", "guardchart.agents")


def main() -> None:
    """Check; raise on the first thing that does not hold."""
    package = Path(guardchart.__file__).parent
    assert package.is_relative_to(sys.prefix), package
    assert (package / "py.typed").is_file()
    assert importlib.metadata.version("guardchart")

    requires = importlib.metadata.requires("guardchart") or []
    assert [r for r in requires if "extra ==" not in r] == ["pydantic>=2.12"], requires
    for framework in ("langgraph", "langchain_core", "pydantic_ai", "openai", "psycopg"):
        assert importlib.util.find_spec(framework) is None, framework

    for name in CORE:
        module = importlib.import_module(name)
        for exported in module.__all__:
            if exported not in DRIVERS:
                getattr(module, exported)
                continue
            try:
                getattr(module, exported)
            except MissingExtraError as exc:
                assert f'pip install "guardchart[{DRIVERS[exported]}]"' in str(exc), exc
            else:
                raise AssertionError(f"{name}.{exported} needs no driver?")

    charts = sorted((package / "agents" / "charts").glob("*.json"))
    assert charts
    for chart in charts:
        json.loads(chart.read_text(encoding="utf-8"))

    for module in pkgutil.iter_modules(guardchart.__path__):
        if extra := EXTRAS.get(module.name):
            try:
                importlib.import_module(f"guardchart.{module.name}")
            except MissingExtraError as exc:
                assert f'pip install "guardchart[{extra}]"' in str(exc), exc
            else:
                raise AssertionError(f"guardchart.{module.name} needs no framework?")

    machine = guardchart.create_machine(
        {"id": "door", "initial": "shut", "states": {"shut": {"on": {"OPEN": "open"}}, "open": {}}}
    )
    interpreter = guardchart.SyncInterpreter(machine).start()
    interpreter.send("OPEN")
    assert interpreter.current_state_ids == {"door.open"}
    print("the wheel holds with pydantic alone")


if __name__ == "__main__":
    main()
