"""Arguments of pydantic-ai's tools: read strictly, and written down in one canonical form.

A tool comes with a validator that coerces, and with a JSON Schema. The shape here asks the same
validator to be strict and closed at every depth; where the validator takes anything (MCP,
external tools), the JSON Schema decides. What a call runs with is compared by the canonical text
of the *Python values*, so a hook that changes them afterwards is found out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Final

import pydantic
from pydantic_core import SchemaSerializer, core_schema, to_jsonable_python

from guardchart.errors import ToolDeniedError
from guardchart.gate import parse_arguments
from guardchart.gate._arguments import ArgumentsRefused, admit, encode
from guardchart.gate._schema import (
    DocumentShape,
    declared_names,
    holds_secret,
    refusal,
    sort_sets,
    unordered,
)

__all__ = ["ForeignShape", "StrictArguments", "probed"]

_PROBE: Final = "guardchart_probe_"
_PLAIN: Final = SchemaSerializer(core_schema.any_schema())
_UNSTABLE: Final = "the tool's validators change a value each time it is read"


def probed(validator: Any, parameters: Mapping[str, Any]) -> tuple[bool, dict[str, Any]]:
    """Return whether a tool takes undeclared keys, and how its validator is asked to be strict."""
    options: dict[str, Any] = {"strict": True, "extra": "forbid"}
    if parameters.get("additionalProperties"):  # it says so: ``**more``
        return True, {"strict": True}
    try:
        validator.validate_json(f'{{"{_PROBE}": 1}}', **options)
    except pydantic.ValidationError as exc:
        errors = exc.errors(include_url=False, include_input=False)
        closed = any(e["type"] == "extra_forbidden" and _PROBE in e["loc"] for e in errors)
        return not closed, options
    except TypeError:  # a validator of somebody's own, which does not know how to be strict
        return True, {}
    except Exception:
        return True, options
    return True, options


class ForeignShape:
    """The arguments of one tool of pydantic-ai; a `Shape` of the gate.

    Args:
        name: the tool's name, for errors.
        validator: the tool's ``args_validator``.
        parameters: the tool's JSON Schema.
        single: the one parameter that stands for the whole object, where the tool has such.
        context: what validators are given as ``context``.

    Raises:
        MissingExtraError: the schema alone can decide, and ``jsonschema`` is not installed.
        AgentConfigError: it is not a usable JSON Schema.
    """

    args_model: type[pydantic.BaseModel] | None = None

    def __init__(
        self,
        name: str,
        validator: Any,
        parameters: Mapping[str, Any],
        *,
        single: str | None = None,
        context: Any = None,
    ) -> None:
        self.validator = validator
        self.parameters: dict[str, Any] = dict(parameters)
        self.context = context
        self.open, self._options = probed(validator, parameters)
        self.hides = holds_secret(self.parameters)
        self._single = single
        self._document = DocumentShape(name, parameters) if self.open else None
        self._declared = frozenset(declared_names(self.parameters, set()))
        self._unordered = unordered(self.parameters)

    def read(self, raw: bytes) -> dict[str, Any]:
        """Return the Python values of JSON text, read strictly.

        Raises:
            ArgumentsRefused: they do not fit.
        """
        try:
            if self._document is not None:
                self._document.load(parse_arguments(raw), raw)
            values = self.validator.validate_json(raw, context=self.context, **self._options)
        except pydantic.ValidationError as exc:
            raise refusal(
                exc.errors(include_url=False, include_input=False), self._declared
            ) from None
        except ArgumentsRefused:
            raise
        except Exception as exc:  # a validator of the tool's author
            raise ArgumentsRefused(f"a validator raised {type(exc).__name__}") from None
        if type(values) is not dict:
            raise ArgumentsRefused("not a JSON object")
        return values

    def write(self, values: Any) -> dict[str, Any]:
        """Return Python values as the JSON object they came from.

        Raises:
            ArgumentsRefused: they are not JSON.
        """
        if type(values) is not dict:
            raise ArgumentsRefused("not a JSON object")
        if self._single is not None:
            if set(values) != {self._single}:
                raise ArgumentsRefused("the arguments are not those of this tool")
            values = values[self._single]
        try:
            dumped = to_jsonable_python(
                values, by_alias=True, round_trip=True, inf_nan_mode="constants"
            )
            if self._unordered:
                plain = _PLAIN.to_python(values, mode="python", by_alias=True, round_trip=True)
                dumped = sort_sets(plain, dumped)
        except ArgumentsRefused:
            raise
        except Exception as exc:
            raise ArgumentsRefused(f"not JSON after validation: {type(exc).__name__}") from None
        if type(dumped) is not dict:
            raise ArgumentsRefused("not a JSON object")
        return dumped

    def load(self, arguments: dict[str, Any], raw: bytes) -> tuple[dict[str, Any], str]:
        """Validate admitted arguments; return the canonical ones and their text.

        Raises:
            ArgumentsRefused: the schema, or the fixed point, does not hold.
        """
        out = self.write(self.read(raw))
        text = _text(out)
        if text != _text(arguments) and _text(self.write(self.read(text.encode()))) != text:
            raise ArgumentsRefused(_UNSTABLE)
        return out, text

    def fresh(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return fresh Python values of canonical arguments."""
        return self.read(_text(arguments).encode())

    def bind(self, text: str, *_: str) -> tuple[list[Any], dict[str, Any]]:
        """Return fresh Python values, read from canonical text."""
        return [], self.read(text.encode())


def _text(value: dict[str, Any]) -> str:
    try:
        return encode(value)
    except Exception as exc:
        raise ArgumentsRefused(f"not JSON after validation: {type(exc).__name__}") from None


@dataclasses.dataclass(slots=True)
class StrictArguments:
    """Stands in for a tool's ``args_validator``: strict, closed, and on the raw text first.

    Args:
        shape: the tool's shape.
        name: the tool's name, for errors.
        refused: makes the exception that pydantic-ai is to see of a reason.
        admitted: called before anything is read, where the state must be asked once more.
    """

    shape: ForeignShape
    name: str
    refused: Callable[[str], Exception]
    admitted: Callable[[], None] | None = None

    def validate_json(
        self, input: str | bytes | bytearray, *, allow_partial: Any = False, **rest: Any
    ) -> Any:
        """Read what the model wrote."""
        if allow_partial not in (False, "off"):
            return self.shape.validator.validate_json(input, allow_partial=allow_partial, **rest)
        if self.admitted is not None:
            self.admitted()
        try:
            text = bytes(input) if isinstance(input, bytearray) else input
            parse_arguments(text)
            return self.shape.read(text.encode() if isinstance(text, str) else text)
        except ToolDeniedError as exc:
            raise self.refused(exc.reason) from None
        except ArgumentsRefused as exc:
            raise self.refused(f"invalid arguments ({exc})") from None

    def validate_python(self, input: Any, *, allow_partial: Any = False, **rest: Any) -> Any:
        """Read what a provider, a history or an approval holds as an object: as JSON, too."""
        if allow_partial not in (False, "off"):
            return self.shape.validator.validate_python(input, allow_partial=allow_partial, **rest)
        if self.admitted is not None:
            self.admitted()
        try:
            return self.shape.read(admit(input))
        except ArgumentsRefused as exc:
            raise self.refused(f"invalid arguments ({exc})") from None
