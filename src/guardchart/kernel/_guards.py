"""Guards: from a specification to one test over (context, event, configuration).

A guard that raises, or answers with something to be awaited, is a fault of the step, also
below ``not``: no exception is ever read as a refusal or turned into a permission.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from guardchart.errors import ChartError, StepError
from guardchart.kernel._callables import GUARD_FORMS, form_of, refuse_async
from guardchart.kernel._events import Event
from guardchart.kernel._specs import GuardSpec

if TYPE_CHECKING:
    from guardchart.kernel._configuration import Configuration
    from guardchart.kernel._nodes import StateNode

Test = Callable[[Mapping[str, Any], Event, "Configuration"], bool]


class Guard:
    """A bound guard. ``fn`` is set for a plain two-argument one, which the step calls itself."""

    __slots__ = ("fn", "spec", "test")

    def __init__(self, spec: GuardSpec, test: Test, fn: Callable[..., Any] | None = None) -> None:
        self.spec = spec
        self.test = test
        self.fn = fn


def verdict(answer: Any) -> bool:
    """Return the truth of what a guard answered; refuse an awaitable, which is always true."""
    if answer is True or answer is False:
        return bool(answer)
    if inspect.isawaitable(answer):
        close = getattr(answer, "close", None)
        if close is not None:
            close()
        raise StepError("a guard answered with an awaitable: a guard must be a plain function")
    return bool(answer)


def bind_guard(
    spec: GuardSpec,
    find: Callable[[GuardSpec], Callable[..., Any] | None],
    resolve: Callable[[str, str], StateNode],
) -> Guard:
    """Bind a guard specification.

    Args:
        spec: the specification.
        find: gives the function of a ``name`` guard, None where it is unknown.
        resolve: gives the state that a ``stateIn`` text names; arguments text and path.
    """
    if spec.kind == "stateIn":
        node = resolve(spec.name, spec.path + ".state")
        return Guard(spec, lambda context, event, config: node in config.active)
    if spec.kind == "name":
        return _named(spec, find(spec))
    inner = [bind_guard(each, find, resolve) for each in spec.guards]
    if spec.kind == "not":
        return _negated(spec, inner[0])
    tests = [each.test for each in inner]
    if spec.kind == "and":
        return Guard(
            spec, lambda context, event, config: all(t(context, event, config) for t in tests)
        )
    return Guard(spec, lambda context, event, config: any(t(context, event, config) for t in tests))


def _negated(spec: GuardSpec, inner: Guard) -> Guard:
    test, fn = inner.test, inner.fn
    if fn is None:
        return Guard(spec, lambda context, event, config: not test(context, event, config))
    return Guard(
        spec,
        lambda context, event, config: not verdict(fn(context, event)),
        lambda context, event: not verdict(fn(context, event)),
    )


def _named(spec: GuardSpec, fn: Callable[..., Any] | None) -> Guard:
    name = spec.name
    if fn is None:

        def unbound(context: Mapping[str, Any], event: Event, config: Configuration) -> bool:
            raise ChartError(f"guard {name!r} has no implementation", path=spec.path)

        return Guard(spec, unbound)
    what = f"guard {name!r}"
    refuse_async(fn, what, spec.path)
    if form_of(fn, GUARD_FORMS, what, spec.path) == 3:
        params = spec.params
        return Guard(spec, lambda context, event, config: verdict(fn(context, event, params)))
    return Guard(spec, lambda context, event, config: verdict(fn(context, event)), fn)
