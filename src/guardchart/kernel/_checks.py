"""What a compiled chart must not say as a whole: targets, invokes and loops that cannot work."""

from __future__ import annotations

from guardchart.errors import ChartError
from guardchart.kernel._nodes import StateNode

__all__ = ["check_eventless", "check_invoke_ids", "check_joint"]


def _common_ancestor(a: StateNode, b: StateNode) -> StateNode | None:
    return next((node for node in a.ancestors if node.contains(b)), None)


def _together(a: StateNode, b: StateNode) -> bool:
    """Tell whether two states can be active at once."""
    if a is b or a.contains(b) or b.contains(a):
        return True
    common = _common_ancestor(a, b)
    return common is not None and common.type == "parallel"


def check_joint(targets: list[StateNode], path: str) -> None:
    """Refuse targets of one transition that cannot be active together."""
    for i, a in enumerate(targets):
        for b in targets[i + 1 :]:
            if not _together(a, b):
                raise ChartError("these targets cannot be active together", path=path + ".target")


def check_invoke_ids(order: list[StateNode]) -> None:
    """Refuse an invoke id that two states share which can be active together."""
    users: dict[str, list[StateNode]] = {}
    for node in order:
        for invoke in node.invokes:
            for other in users.setdefault(invoke.id, []):
                if _together(node, other):
                    raise ChartError(
                        f"the invoke id {invoke.id!r} is used twice by states that can be "
                        "active together",
                        path=invoke.spec.path,
                    )
            users[invoke.id].append(node)


def check_eventless(order: list[StateNode]) -> None:
    """Refuse a cycle made of unguarded first ``always`` candidates alone.

    A leaf follows the innermost ``always`` at or above it, as selection would; a move that
    ends where it began changes nothing and stops, so it is no cycle.
    """
    for start in order:
        if start.children or start.type == "history":
            continue
        seen: list[StateNode] = []
        leaf: StateNode | None = start
        while leaf is not None and leaf not in seen:
            seen.append(leaf)
            following = _follow(leaf)
            leaf = None if following is leaf else following
        if leaf is not None:
            culprit = next(n for n in (leaf, *leaf.ancestors) if n.always)
            raise ChartError(
                "eventless transitions without a guard form a cycle",
                path=culprit.spec.path + ".always",
            )


def _follow(leaf: StateNode) -> StateNode | None:
    source = next((n for n in (leaf, *leaf.ancestors) if n.always), None)
    if source is None:
        return None
    first = source.always[0]
    if first.guard is not None or len(first.targets) != 1:
        return None
    target = first.targets[0]
    if target is source and not source.children and not first.reenter:
        return leaf
    while target.type == "compound":
        assert target.initial is not None
        if len(target.initial.targets) != 1:
            return None
        target = target.initial.targets[0]
    if target.children or target.type == "history" or _region(target) is not _region(leaf):
        return None
    return target


def _region(node: StateNode) -> StateNode | None:
    """The innermost region (child of a parallel state) that holds the node."""
    for one in (node, *node.ancestors):
        if one.parent is not None and one.parent.type == "parallel":
            return one
    return None
