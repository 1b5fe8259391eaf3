"""``route_by_statechart``: the active state of a chart decides which node runs next."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from langchain_core.runnables import RunnableConfig, RunnableLambda

from guardchart.errors import AgentConfigError
from guardchart.langgraph._chart import as_machine, lineage, walk
from guardchart.langgraph._state import is_blank, parse_snapshot, read_key

if TYPE_CHECKING:
    from guardchart.kernel import Machine, StateNode

__all__ = ["StatechartRouter", "route_by_statechart"]

_SHOWN = 10


class StatechartRouter(RunnableLambda[Any, str]):
    """A conditional edge; made by `route_by_statechart`.

    It is a ``Runnable``, so that LangGraph opens neither a trace run nor a worker thread
    for it, and callable, so that a test can ask it directly.

    Attributes:
        path_map: Every node it can lead to. LangGraph finds the same names in the return
            annotation and draws an edge for each.
    """

    def __init__(self, route: Callable[[Any], str], name: str, ends: tuple[str, ...]) -> None:
        route.__annotations__["return"] = Literal[ends]
        super().__init__(route, name=name)
        self.path_map: dict[str, str] = {end: end for end in ends}
        self._route = route
        # LangGraph prefers the annotations of a class's `__call__` to the function's, and a
        # class cannot annotate what each of its instances returns. It looks on the instance.
        self.__dict__["__call__"] = route

    def __call__(self, state: Any) -> str:
        return self._route(state)

    def invoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> str:
        """Return the name of the node that the state's snapshot leads to."""
        return self._route(input)

    async def ainvoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> str:
        """As `invoke`; there is nothing to wait for."""
        return self._route(input)


def route_by_statechart(
    machine: Machine | Mapping[str, Any] | str | Path,
    mapping: Mapping[str, str],
    *,
    state_key: str = "xsm",
    default: str | None = None,
) -> StatechartRouter:
    """Route by the active state of the chart that `statechart_node` keeps in the graph state.

    Args:
        machine: The chart: a built machine, a dict, JSON text or the path of one. It needs
            no logic.
        mapping: State to node name (or ``END``). A state is its full id or its key; a
            compound state stands for everything inside it. Of several that fit, the deepest
            wins, over all parallel regions; equally deep ones by sorted id.
        state_key: Where the snapshot is kept.
        default: The node for a state that the mapping leaves out.

    Returns:
        A router for ``add_conditional_edges``. It reads only the snapshot's ``state_ids``,
        and carries the names of its targets, so that drawings keep their edges.

    Raises:
        AgentConfigError: A key names no state (or the root, which is always active); a
            top-level final state, or a state tagged ``waiting``, is neither mapped nor
            covered by ``default``. When routing: no snapshot, or an active state without a
            route. It never ends the graph silently.

    Example:
        >>> chart = {"id": "m", "initial": "a", "states": {"a": {}, "b": {"type": "final"}}}
        >>> router = route_by_statechart(chart, {"a": "more", "b": "__end__"})
        >>> router({"xsm": {"state_ids": ["m.a"]}})
        'more'
    """
    built = as_machine(machine, caller="route_by_statechart")
    label = f"route_by_statechart({built.id!r})"
    routes = _resolve(built, mapping, default, label)
    if default is None:
        _check_covered(built, routes, label)
    memo: dict[tuple[str, ...], str] = {}

    def route(state):  # type: ignore[no-untyped-def]  # LangGraph reads these annotations
        value = read_key(state, state_key)
        if is_blank(value):
            raise AgentConfigError(
                f"{label}: state[{state_key!r}] holds no snapshot yet; "
                "route from the statechart_node of this chart"
            )
        ids = _state_ids(parse_snapshot(value, state_key), state_key)
        target = memo.get(ids)
        if target is None:
            target = _choose(built, ids, routes, default, label)
            if len(memo) >= 1024:
                memo.clear()
            memo[ids] = target
        return target

    suffix = "" if state_key == "xsm" else f"_{state_key}"
    targets = dict.fromkeys([*mapping.values(), *([] if default is None else [default])])
    return StatechartRouter(route, f"route_by_{built.id}{suffix}", tuple(targets))


def _resolve(
    machine: Machine, mapping: Mapping[str, str], default: str | None, label: str
) -> dict[str, str]:
    """The mapping by state id; a full id wins over a key that happens to read the same."""
    if not mapping and default is None:
        raise AgentConfigError(f"{label}: the mapping is empty and there is no default")
    for target in [*mapping.values(), default]:
        if target is not None and not isinstance(target, str):
            raise AgentConfigError(f"{label}: a route leads to a node's name, a string, or END")
    nodes = list(walk(machine.root))
    by_id = {node.id: node for node in nodes}
    routes: dict[str, str] = {}
    for name, target in mapping.items():
        if name not in by_id:
            named = [node for node in nodes if node.key == name]
            if not named:
                what = "the root, which is always active" if name == machine.root.id else "no state"
                raise AgentConfigError(f"{label}: {name!r} names {what}")
            for node in named:
                routes.setdefault(node.id, target)
    return routes | {name: target for name, target in mapping.items() if name in by_id}


def _check_covered(machine: Machine, routes: Mapping[str, str], label: str) -> None:
    """Every place where the chart comes to rest for good, or for a person, needs a route."""
    missing = [
        node.id
        for node in walk(machine.root)
        if _rests(node) and not any(each.id in routes for each in lineage(node))
    ]
    if missing:
        raise AgentConfigError(
            f"{label}: no route for {missing[:_SHOWN]}, where the chart can rest; "
            "map each one (full id or key) or pass default="
        )


def _rests(node: StateNode) -> bool:
    # Inside parallel regions another region's route may serve; that is seen when it happens.
    if any(each.parent is not None and each.parent.type == "parallel" for each in lineage(node)):
        return False
    top_level = node.parent is not None and node.parent.parent is None
    return (node.type == "final" and top_level) or "waiting" in node.tags


def _state_ids(snapshot: Mapping[str, Any], key: str) -> tuple[str, ...]:
    ids = snapshot.get("state_ids")
    if isinstance(ids, list) and ids and all(type(each) is str for each in ids):
        return tuple(ids)
    raise AgentConfigError(
        f"state[{key!r}] must be a snapshot dict or JSON string with its 'state_ids'; "
        "reserve the key for statechart_node"
    )


def _choose(
    machine: Machine,
    ids: tuple[str, ...],
    routes: Mapping[str, str],
    default: str | None,
    label: str,
) -> str:
    best: tuple[int, str] | None = None
    for each in ids:
        node = machine.nodes.get(each)
        if node is None:
            # Ids come from graph state: one that is not the chart's own is not repeated.
            raise AgentConfigError(
                f"{label}: the snapshot names a state that this chart does not have"
            )
        for at in lineage(node):
            if at.id in routes:
                rank = (-len(at.path), at.id)
                best = rank if best is None or rank < best else best
                break
    if best is not None:
        return routes[best[1]]
    if default is not None:
        return default
    raise AgentConfigError(
        f"{label}: no route for active states {sorted(ids)[:_SHOWN]}; "
        "map one of them (full id or key) or pass default="
    )
