"""Two digests of a chart: what its states are, and everything else it says.

A snapshot names both. The same logic digest restores silently, the same shape with a report
of drift, another shape not at all.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

from guardchart.kernel._specs import MISSING, ChartSpec, qualified_name

if TYPE_CHECKING:
    from guardchart.kernel._nodes import StateNode

_SKIPPED = frozenset({"path", "description"})


def shape(spec: ChartSpec, order: Iterable[StateNode]) -> str:
    """Digest the state tree: ids, keys, kinds and nesting."""
    tree = [[n.id, list(n.path), n.type, n.history] for n in order]
    return _sha256([spec.id, tree])


def logic(spec: ChartSpec) -> str:
    """Digest the whole chart but descriptions, the version and ``@statelyai.*`` meta."""
    return _sha256(_plain([spec.id, spec.context, spec.strict, spec.policy, spec.root]))


def _plain(value: Any) -> Any:
    if value is MISSING:
        return {"": "missing"}
    if is_dataclass(value) and not isinstance(value, type):
        return {
            f.name: _plain(getattr(value, f.name)) for f in fields(value) if f.name not in _SKIPPED
        }
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items() if not str(k).startswith("@statelyai.")}
    if isinstance(value, frozenset | set):
        return sorted(str(item) for item in value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, str | int | float | bool):
        return value
    digest = getattr(value, "logic_digest", None)
    return {"": digest if isinstance(digest, str) else qualified_name(value)}


def _sha256(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
