"""Allow-lists: which tools the active states permit, and the rules that go with them.

A state's ``meta.tools`` is a list of names. The nearest state that declares one, from the
invoking (for actions: owning) state upward, decides alone; lists of parallel regions are never
joined. ``["*"]`` is every registered tool, an absent list is none.

Rule objects (``{"name": ..., "args": ..., "approval": ...}``) have their place here: `parse`
turns each into a `Rule`, `Allowed.rule` hands it to the reference monitor, and `judge` is its
check 5. Until they exist, `parse` refuses them, so no chart can rely on a rule that is not kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Final, Protocol

from guardchart.errors import AgentConfigError

__all__ = [
    "ALL_TOOLS",
    "Allowed",
    "Rule",
    "allowed_in_all",
    "allowed_tools",
    "as_allowed",
    "judge",
    "parse",
    "validate_tools",
]


ALL_TOOLS = "*"
"""In ``meta.tools``: every registered tool."""


class NodeLike(Protocol):
    """What of a state node is read here."""

    @property
    def id(self) -> str:
        """The full id."""

    @property
    def meta(self) -> Mapping[str, Any]:
        """The state's ``meta``."""

    @property
    def parent(self) -> Any:
        """The parent node, None at the root."""


@dataclass(frozen=True, slots=True)
class Rule:
    """What a state says of one tool, besides that it may be called.

    Args:
        approval: ``"by_tool"`` asks where the tool has a side effect; ``"always"`` asks;
            ``"never"`` lets the chart itself (``policy``) approve.
    """

    approval: str = "by_tool"


PLAIN = Rule()
_NO_RULES: Mapping[str, Rule] = MappingProxyType({})
_NAMES: Final = frozenset({str})


@dataclass(frozen=True, slots=True)
class Allowed:
    """An allow-list: `listed` names, or every registered tool where `everything` is set."""

    listed: frozenset[str] = frozenset()
    everything: bool = False
    rules: Mapping[str, Rule] = field(default_factory=lambda: _NO_RULES)

    def __contains__(self, name: object) -> bool:
        return self.everything or name in self.listed

    def rule(self, name: str) -> Rule:
        """Return the rule for a tool; the plain one where the chart says only its name."""
        return self.rules.get(name, PLAIN)

    def names(self, registry: Any) -> tuple[str, ...]:
        """Return the permitted names, in registry order."""
        return tuple(name for name in registry.names if name in self)

    def __and__(self, other: Allowed) -> Allowed:
        if self.everything:
            listed, everything = other.listed, other.everything
        elif other.everything:
            listed, everything = self.listed, False
        else:
            listed, everything = self.listed & other.listed, False
        return Allowed(listed, everything, {**self.rules, **other.rules})


NONE = Allowed()
ALL = Allowed(everything=True)


def parse(value: Any, node: NodeLike | None = None) -> Allowed:
    """Read the ``meta.tools`` of a state, or a list of names that somebody else gives.

    Raises:
        AgentConfigError: not a list of names; a rule object is none.
    """
    listed = isinstance(value, (list, tuple, set, frozenset))
    if not listed or not _NAMES.issuperset(map(type, value)):
        where = "the allow-list" if node is None else f"state {node.id!r}: meta.tools"
        if listed and any(isinstance(item, Mapping) for item in value):
            raise AgentConfigError(
                f"{where}: rule objects are not supported by this release; list plain names"
            )
        raise AgentConfigError(f"{where} must be a list of tool names")
    return _listing(tuple(value))


@lru_cache(maxsize=256)
def _listing(names: tuple[str, ...]) -> Allowed:
    """Read a list of names: the few that charts have, which every look at a state reads again."""
    return ALL if ALL_TOOLS in names else Allowed(frozenset(names))


def as_allowed(value: Any) -> Allowed:
    """Return an `Allowed` for names, ``"*"``, ``["*"]``, None (nothing), or one itself.

    >>> ["refund" in as_allowed(value) for value in (["refund"], "*", None)]
    [True, True, False]
    """
    if type(value) is Allowed:
        return value
    if value is None:
        return NONE
    if value == ALL_TOOLS:
        return ALL
    if isinstance(value, Iterable) and not isinstance(value, (str, Mapping)):
        return parse(list(value))
    raise AgentConfigError("an allow-list is a list of tool names")


def allowed_tools(node: NodeLike | None) -> Allowed:
    """Return the allow-list that governs a state: the nearest declared one, upward.

    Args:
        node: the invoking (for actions: owning) state; None permits nothing.

    Returns:
        That state's list alone; nothing where no state up to the root declares one.

    >>> from guardchart.kernel import create_machine
    >>> machine = create_machine({"id": "desk", "initial": "open", "meta": {"tools": ["look_up"]},
    ...     "states": {"open": {}, "paying": {"meta": {"tools": ["refund"]}}}})
    >>> sorted(allowed_tools(machine.nodes["desk.open"]).listed)
    ['look_up']
    >>> sorted(allowed_tools(machine.nodes["desk.paying"]).listed)
    ['refund']
    """
    at: Any = node
    while at is not None:
        meta = at.meta
        if meta and "tools" in meta:
            return parse(meta["tools"], at)
        at = at.parent
    return NONE


def allowed_in_all(nodes: Iterable[NodeLike]) -> Allowed:
    """Return what every one of the active leaves permits.

    For doors without an invoking state: in parallel regions a tool must be allowed in each.
    """
    out: Allowed | None = None
    for node in nodes:
        here = allowed_tools(node)
        out = here if out is None else out & here
    return NONE if out is None else out


def judge(rule: Rule, arguments: Mapping[str, Any], facts: Any) -> str | None:
    """Check 5: return why the state's rule refuses these arguments, or None.

    A plain name sets no constraint. Argument schemas, sources and quotas are judged here once
    charts may state them; the decision must depend on the arguments and the facts alone.
    """
    return None


def validate_tools(machine: Any, registry: Any) -> None:
    """Check every ``meta.tools`` of a machine against a registry.

    Args:
        machine: a compiled machine (its ``nodes`` are read).
        registry: the tools of the application.

    Raises:
        AgentConfigError: a state lists a tool that is not registered, or something that is not
            a list of names.
    """
    for node in machine.nodes.values():
        meta = node.meta
        if not meta or "tools" not in meta:
            continue
        allowed = parse(meta["tools"], node)
        for name in sorted(allowed.listed):
            if name not in registry:
                raise AgentConfigError(
                    f"state {node.id!r}: meta.tools lists {name!r}, "
                    "which is not in the tool registry"
                )
