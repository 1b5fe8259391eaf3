"""Small helpers for tests that drive the kernel by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from guardchart.kernel import Machine, Receipt, Snapshot, create_machine, initial_step, step


class Logic:
    """Logic whose unknown actions write their own name to ``seen``; the rest is given."""

    def __init__(
        self,
        actions: Mapping[str, Any] | None = None,
        guards: Mapping[str, Any] | None = None,
        services: Mapping[str, Any] | None = None,
        delays: Mapping[str, Any] | None = None,
    ) -> None:
        self.seen: list[str] = []
        self.actions = _Logging(self.seen, actions or {})
        self.guards = {"yes": lambda c, e: True, "no": lambda c, e: False, **(guards or {})}
        self.services = {"work": lambda given: given, **(services or {})}
        self.delays = dict(delays or {})


class _Logging(dict[str, Callable[..., Any]]):
    def __init__(self, seen: list[str], known: Mapping[str, Any]) -> None:
        super().__init__(known)
        self._seen = seen

    def get(self, name: str, default: Any = None) -> Any:
        if name in self:
            return self[name]

        def log(context: Any, event: Any) -> None:
            self._seen.append(name)

        return log


class Driver:
    """A machine, its latest snapshot, effects and receipt, and what its actions logged."""

    def __init__(self, config: Mapping[str, Any], now: float = 0, **logic: Any) -> None:
        self.logic = Logic(**logic)
        self.machine: Machine = create_machine({"id": "m", **config}, self.logic)
        self.now = now
        self.snapshot: Snapshot
        self.snapshot, self.effects, self.receipt = initial_step(self.machine, now=now)

    def send(self, event: Any) -> Receipt:
        self.logic.seen.clear()
        self.snapshot, self.effects, self.receipt = step(
            self.machine, self.snapshot, event, now=self.now
        )
        return self.receipt

    @property
    def seen(self) -> list[str]:
        return list(self.logic.seen)

    @property
    def value(self) -> Any:
        return self.snapshot.value

    @property
    def context(self) -> dict[str, Any]:
        return dict(self.snapshot.context)

    def key(self, child: str) -> str:
        return self.snapshot.children[child].key


def raising(*types: str) -> Callable[..., None]:
    """An action that raises events of these types."""

    def act(scope: Any, context: Any, event: Any, action: Any) -> None:
        for one in types:
            scope.raise_(one)

    return act


def note_event(seen: list[str]) -> Callable[..., None]:
    """An action that notes the type of the event it sees."""

    def act(context: Any, event: Any) -> None:
        seen.append(event.type)

    return act


def leaf(**more: Any) -> dict[str, Any]:
    """A state that logs its entry and exit under a name given as ``name``."""
    name = more.pop("name")
    return {"entry": f"+{name}", "exit": f"-{name}", **more}
