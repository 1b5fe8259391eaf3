"""A chart as checked data: what `_config` reads and `_compile` builds from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

Path = str


class _Missing:
    """The type of `MISSING`, which marks a key that is absent (None is a value)."""

    def __repr__(self) -> str:
        return "<missing>"


MISSING: Final = _Missing()


@dataclass(frozen=True, slots=True)
class ActionSpec:
    """An action as the chart names it, or a function given in place of a name."""

    name: str
    fn: Callable[..., Any] | None
    params: Any
    path: Path


@dataclass(frozen=True, slots=True)
class GuardSpec:
    """A guard: ``kind`` is ``name``, ``and``, ``or``, ``not`` or ``stateIn``."""

    kind: str
    name: str
    fn: Callable[..., Any] | None
    params: Any
    guards: tuple[GuardSpec, ...]
    path: Path


@dataclass(frozen=True, slots=True)
class TransitionSpec:
    """A transition whose targets are still text."""

    targets: tuple[str, ...]
    guard: GuardSpec | None
    actions: tuple[ActionSpec, ...]
    reenter: bool
    description: str | None
    meta: Mapping[str, Any]
    path: Path


@dataclass(frozen=True, slots=True)
class InvokeSpec:
    """An invoke; ``src`` is a name, a function or a machine."""

    id: str | None
    src: Any
    input: Any
    on_done: tuple[TransitionSpec, ...]
    on_error: tuple[TransitionSpec, ...]
    on_snapshot: tuple[TransitionSpec, ...]
    description: str | None
    meta: Mapping[str, Any]
    path: Path


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """A state. ``initial`` is what following it means; None for other than compound."""

    key: str
    path: Path
    id: str | None
    type: str
    initial: TransitionSpec | None
    states: Mapping[str, NodeSpec]
    on: tuple[tuple[str, tuple[TransitionSpec, ...]], ...]
    always: tuple[TransitionSpec, ...]
    after: tuple[tuple[str, tuple[TransitionSpec, ...]], ...]
    on_done: tuple[TransitionSpec, ...]
    entry: tuple[ActionSpec, ...]
    exit: tuple[ActionSpec, ...]
    invokes: tuple[InvokeSpec, ...]
    tags: frozenset[str]
    output: Any
    history: str
    target: tuple[str, ...]
    meta: Mapping[str, Any]
    description: str | None


@dataclass(frozen=True, slots=True)
class ChartSpec:
    """A whole chart."""

    id: str
    version: str | None
    context: Mapping[str, Any]
    strict: bool
    policy: str
    max_microsteps: int
    root: NodeSpec


def qualified_name(fn: Any) -> str:
    """Return the stable name under which a function given in a chart enters the digest."""
    inner = getattr(fn, "func", fn)
    name = getattr(inner, "__qualname__", type(inner).__qualname__)
    return f"{getattr(inner, '__module__', '')}.{name}"


def source_name(src: Any) -> str:
    """Return what a snapshot calls the source of a child: its name, or a machine's id."""
    if isinstance(src, str):
        return src
    named = getattr(src, "source_name", None)
    return named if isinstance(named, str) else qualified_name(src)
