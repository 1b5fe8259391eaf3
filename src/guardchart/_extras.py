"""Optional dependencies: the tested version ranges and the helpers that speak of them.

A bridge imports its framework through :func:`require`, so a missing one is a single typed
error that names the command. Importing a bridge outside the tested range warns once
(:func:`warn_untested`) and goes on; an app that would rather stop calls the bridge's own
``check_*_version``, which is :func:`check_version` and raises.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import re
import warnings
from types import ModuleType

from guardchart.errors import MissingExtraError

__all__ = [
    "LANGCHAIN_TESTED",
    "LANGGRAPH_TESTED",
    "PYDANTIC_AI_TESTED",
    "check_version",
    "installed_version",
    "require",
    "version_in_range",
    "warn_untested",
]

LANGGRAPH_TESTED = ">=1.0,<2.0"
"""The LangGraph releases that the LangGraph bridge is tested with."""

LANGCHAIN_TESTED = ">=1.0,<2.0"
"""The langchain-core releases that the LangChain bridge is tested with."""

PYDANTIC_AI_TESTED = ">=2.0,<3"
"""The pydantic-ai releases that the pydantic-ai bridge is tested with."""

_PACKAGES = {"LangGraph": "langgraph", "LangChain": "langchain-core", "DBOS": "dbos"}

_BOUND = r"\s*(?P<op>>=|<=|==|!=|>|<)\s*(?P<version>[^\s,]+)\s*"
_MAX_VERSION_CHARS = 128

_warned: set[tuple[str, str]] = set()


@functools.cache
def _version() -> re.Pattern[str]:
    """The public part of a PEP 440 version, compiled when a version is first looked at.

    ASCII digits only, and not many of them: the text may come from anywhere, and int() of a very
    long one is slow.
    """
    return re.compile(
        r"v?(?P<release>[0-9]{1,8}(?:\.[0-9]{1,8}){0,7})"
        r"(?P<pre>[-_.]?(?:alpha|beta|preview|pre|dev|rc|a|b|c)[-_.]?[0-9]{0,8}"
        r"(?:\.?dev[0-9]{0,8})?)?"
        r"(?:[-_.]?(?:post|rev|r)[-_.]?[0-9]{0,8}|-[0-9]{1,8})?"
        r"(?:\+[a-z0-9]+(?:[-_.][a-z0-9]+){0,15})?",
        re.ASCII | re.IGNORECASE,
    )


def require(module: str, *, extra: str) -> ModuleType:
    """Import an optional dependency, or say which extra brings it.

    Args:
        module: Dotted name of the module to import.
        extra: The guardchart extra that installs it.

    Returns:
        The imported module.

    Raises:
        MissingExtraError: The module, or the package it lies in, is not installed. The message
            names the ``pip install``. An installed package that itself fails to import raises
            its own error: reinstalling would not mend it.

    Example:
        >>> require("json", extra="langgraph").__name__
        'json'
        >>> require("no_such_framework", extra="langgraph")
        Traceback (most recent call last):
            ...
        guardchart.errors.MissingExtraError: no_such_framework is not installed: \
pip install "guardchart[langgraph]"
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as exc:
        missing = exc.name or ""
        if module != missing and not module.startswith(f"{missing}."):
            raise
        raise MissingExtraError(missing, f'pip install "guardchart[{extra}]"') from None


def version_in_range(version: object, tested: str) -> bool:
    """Tell whether a version lies in a range such as ``">=1.0,<2.0"``.

    A pre-release counts as older than its release, and is never inside a range whose excluded
    upper end it leads up to: 2.0rc1 is not below 2.0 for somebody who has not tested 2.

    Args:
        version: The version's text; anything else is in no range.
        tested: Bounds joined by commas.

    Returns:
        True if every bound holds; False if one does not, or the version cannot be read.

    Raises:
        ValueError: ``tested`` itself cannot be read.

    Example:
        >>> version_in_range("1.2.24", ">=1.0,<2.0")
        True
        >>> [version_in_range(v, ">=1.0,<2.0") for v in ("0.6.1", "2.0rc1", "1.0rc1", "one", None)]
        [False, False, False, False, False]
    """
    bounds = [re.fullmatch(_BOUND, part, re.ASCII) for part in tested.split(",")]
    found = _parse(version)
    for bound in bounds:
        limit = _parse(bound["version"]) if bound else None
        if bound is None or limit is None:
            raise ValueError(f"not a version range: {tested!r}")
        if found is None or not _holds(found, bound["op"], limit):
            return False
    return True


def check_version(dist_label: str, version: object, tested: str) -> None:
    """Raise unless a framework's version lies in the range its bridge is tested with.

    Args:
        dist_label: The framework as people write it, e.g. ``"LangGraph"``.
        version: Its version's text.
        tested: The bridge's range, e.g. :data:`LANGGRAPH_TESTED`.

    Raises:
        ImportError: The version is outside the range, is no version, or is not text. Install a
            tested one, or do not call this: the bridge itself only warns.

    Example:
        >>> check_version("LangGraph", "1.2.24", LANGGRAPH_TESTED)
        >>> check_version("LangGraph", "0.6.0", LANGGRAPH_TESTED)
        Traceback (most recent call last):
            ...
        ImportError: guardchart's LangGraph bridge is tested with langgraph >=1.0,<2.0; found 0.6.0
    """
    if not version_in_range(version, tested):
        raise ImportError(_untested(dist_label, version, tested))


def warn_untested(dist_label: str, version: object, tested: str) -> None:
    """Warn, once per framework and version, that a bridge runs outside its tested range.

    Never raises, not even where warnings are errors: a release of the framework must not turn
    an app's import into a crash.

    Args:
        dist_label: The framework as people write it, e.g. ``"LangGraph"``.
        version: Its version's text.
        tested: The bridge's range.

    Example:
        >>> warn_untested("LangGraph", "1.2.24", LANGGRAPH_TESTED)
    """
    try:
        if version_in_range(version, tested):
            return
        text = _untested(dist_label, version, tested)
        if (dist_label, text) in _warned:
            return
        _warned.add((dist_label, text))
        warnings.warn(text, RuntimeWarning, stacklevel=3)
    except Exception:  # a warning filter set to "error" ends here, on purpose
        return


def installed_version(distribution: str) -> str | None:
    """Return the version of an installed distribution, or None if it has none.

    Args:
        distribution: Its name on the package index.

    Example:
        >>> installed_version("no-such-distribution") is None
        True
    """
    try:
        return importlib.metadata.version(distribution)
    except Exception:  # broken metadata of another package is not our failure
        return None


def _untested(dist_label: str, version: object, tested: str) -> str:
    package = _PACKAGES.get(dist_label, dist_label.lower())
    readable = isinstance(version, str) and len(version) <= _MAX_VERSION_CHARS
    found = version if readable and str(version).isprintable() else "no readable version"
    return f"guardchart's {dist_label} bridge is tested with {package} {tested}; found {found}"


def _parse(version: object) -> tuple[tuple[int, ...], bool] | None:
    """Return the release numbers without trailing zeros and whether it is a final release."""
    if not isinstance(version, str) or len(version) > _MAX_VERSION_CHARS:
        return None
    match = _version().fullmatch(version)
    if match is None:
        return None
    release = [int(part) for part in match["release"].split(".")]
    while release and release[-1] == 0:
        release.pop()
    return tuple(release), match["pre"] is None


def _holds(
    found: tuple[tuple[int, ...], bool], op: str, limit: tuple[tuple[int, ...], bool]
) -> bool:
    match op:
        case ">=":
            return found >= limit
        case ">":
            return found > limit
        case "<=":
            return found <= limit
        case "<":
            return found[0] < limit[0]
        case "!=":
            return found != limit
        case _:
            return found == limit
