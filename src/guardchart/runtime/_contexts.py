"""A machine's context together with those of its live child machines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

__all__ = ["TreeContext"]


class TreeContext(dict[str, Any]):
    """A copy of a machine's context that knows the contexts below it. Read-only.

    Attributes:
        actors: The contexts of its live child machines by full id, each one a
            ``TreeContext`` where that machine has children, too.
    """

    __slots__ = ("actors",)

    def __init__(self, context: Mapping[str, Any], actors: Mapping[str, Mapping[str, Any]]) -> None:
        super().__init__(context)
        self.actors = dict(actors)

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError("a context is changed by events or update_context, not in place")

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __copy__(self) -> dict[str, Any]:
        return dict(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        import copy

        return copy.deepcopy(dict(self), memo)

    def __reduce__(self) -> Any:
        return type(self), (dict(self), self.actors)
