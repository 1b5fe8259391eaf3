"""Finding actions and guards that change the context they were only to read.

The read-only view that they get is shallow, so a nested list could be appended to and the
snapshot before the step would change. In development each call is compared with a copy.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from guardchart.errors import StepError
from guardchart.kernel._callables import WithForm
from guardchart.kernel._draft import clone, same


def watched(fn: Callable[..., Any], what: str) -> Callable[..., Any]:
    """Wrap ``fn(context, event, ...)`` so that it fails when it changed the context."""

    @functools.wraps(fn)
    def call(context: Any, *args: Any) -> Any:
        before = clone(dict(context), {})
        answer = fn(context, *args)
        if not same(dict(context), before):
            raise StepError(f"{what} changed a value inside the context it was given")
        return answer

    form = getattr(fn, "__guardchart_form__", None)
    return call if form is None else WithForm(call, form)
