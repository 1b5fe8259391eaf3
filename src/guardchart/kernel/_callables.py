"""The forms in which an application's functions may be written.

A form is the number of positional arguments the kernel calls a function with. It is read
from the signature once, when the chart is compiled; a callable without one is wrapped by
`action`, `guard` or `service`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from guardchart.errors import ChartError

_FORM = "__guardchart_form__"
ACTION_FORMS = (4, 3, 2)
GUARD_FORMS = (3, 2)
DELAY_FORMS = (2,)
SERVICE_FORMS = (3, 1)


class WithForm:
    """A callable whose form is declared instead of read from its signature."""

    def __init__(self, fn: Callable[..., Any], form: int) -> None:
        self._fn = fn
        self.__guardchart_form__ = form
        self.__wrapped__ = fn
        self.__qualname__ = getattr(fn, "__qualname__", type(fn).__qualname__)
        self.__module__ = getattr(fn, "__module__", "") or ""

    def __call__(self, *args: Any) -> Any:
        """Call the wrapped function."""
        return self._fn(*args)


def action(form: int = 2) -> Callable[[Callable[..., Any]], WithForm]:
    """Declare the form of an action: 4 (draft), 3 or 2 (update).

    >>> action(2)(max).__guardchart_form__
    2
    """
    return _declare(form, ACTION_FORMS, "an action")


def guard(form: int = 2) -> Callable[[Callable[..., Any]], WithForm]:
    """Declare the form of a guard: 3 or 2 arguments."""
    return _declare(form, GUARD_FORMS, "a guard")


def service(form: int = 1) -> Callable[[Callable[..., Any]], WithForm]:
    """Declare the form of a service: 3 arguments or 1 (its input)."""
    return _declare(form, SERVICE_FORMS, "a service")


def _declare(
    form: int, forms: tuple[int, ...], what: str
) -> Callable[[Callable[..., Any]], WithForm]:
    if form not in forms:
        raise ChartError(f"{what} takes {_either(forms)} arguments")
    return lambda fn: WithForm(fn, form)


def form_of(fn: Any, forms: tuple[int, ...], what: str, path: str) -> int:
    """Return the first of ``forms`` that the function's signature accepts.

    Args:
        fn: the callable.
        forms: numbers of positional arguments, in the order they are tried.
        what: how to name it in an error, e.g. ``"action 'log'"``.
        path: the JSON path that names it.

    Raises:
        ChartError: not callable, no signature, or none that fits.
    """
    if not callable(fn):
        raise ChartError(f"{what} is not callable", path=path)
    declared = getattr(fn, _FORM, None)
    if type(declared) is int and declared in forms:
        return declared
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        raise ChartError(
            f"{what} has no signature: wrap it with @action, @guard or @service", path=path
        ) from None
    for form in forms:
        try:
            signature.bind(*(None,) * form)
        except TypeError:
            continue
        return form
    raise ChartError(f"{what} must take {_either(forms)} positional arguments", path=path)


def refuse_async(fn: Any, what: str, path: str) -> None:
    """Refuse a coroutine function where the kernel calls it within a step."""
    call = getattr(fn, "__call__", None)  # noqa: B004 - an object whose __call__ is async
    for one in (fn, call, getattr(fn, "__wrapped__", None)):
        if inspect.iscoroutinefunction(one) or inspect.isasyncgenfunction(one):
            raise ChartError(
                f"{what} is async: a step does not wait, so run it as a service by 'invoke'",
                path=path,
            )


def service_form(fn: Any, what: str = "a service", path: str = "") -> int:
    """Return 3 for ``(scope, context, event)`` and 1 for ``(input)``."""
    return form_of(fn, SERVICE_FORMS, what, path)


def _either(forms: tuple[int, ...]) -> str:
    return " or ".join(str(form) for form in sorted(forms))
