"""The base of what travels: snake_case attributes in Python, camelCase in JSON."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Annotated, Any, Self, TypeVar

import pydantic
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    PlainSerializer,
    StrictBytes,
    StrictStr,
    model_serializer,
)
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticSerializationError

from guardchart.errors import AgentError

__all__ = ["Bytes", "Wire", "read_wire", "wire_error"]


_ReadT = TypeVar("_ReadT")


class Wire(BaseModel):
    """Frozen; both spellings of a field are read, camelCase is written.

    Optional fields that hold None are not written.
    """

    model_config = ConfigDict(
        alias_generator=to_camel,
        validate_by_name=True,
        validate_by_alias=True,
        serialize_by_alias=True,
        frozen=True,
        hide_input_in_errors=True,
    )

    @model_serializer(mode="wrap")
    def _written(self, handler: Any) -> dict[str, Any]:
        data: dict[str, Any] = handler(self)
        for name, field in type(self).model_fields.items():
            if field.default is None and getattr(self, name) is None:
                data.pop(field.alias or name, None)
                data.pop(name, None)
        return data

    def to_json(self) -> dict[str, Any]:
        """This as JSON types, keys in camelCase.

        Raises:
            AgentError: A free-form field holds something that is not JSON.
        """
        try:
            return self.model_dump(mode="json")
        except PydanticSerializationError:
            raise AgentError(f"{type(self).__name__}: a field holds what is not JSON") from None

    @classmethod
    def from_json(cls, data: Any) -> Self:
        """Read what `to_json` wrote; snake_case keys are read too.

        Raises:
            AgentError: It is not one; the message names the place, never a value.
        """
        return read_wire(cls.__name__, cls.model_validate, data)


def read_wire(what: str, validate: Callable[[Any], _ReadT], data: Any) -> _ReadT:
    """Validate data from outside, with our own error in place of pydantic's."""
    try:
        return validate(data)
    except pydantic.ValidationError as error:
        raise AgentError(f"{what}: {wire_error(error)}") from None


def wire_error(error: pydantic.ValidationError) -> str:
    """The first few problems as ``place: problem``, without any value."""
    found = error.errors(include_url=False, include_input=False, include_context=False)
    parts = [f"{_place(each['loc'])}: {each['msg']}" for each in found[:3]]
    if len(found) > 3:
        parts.append(f"{len(found) - 3} more")
    return "; ".join(parts)


def _place(loc: tuple[Any, ...]) -> str:
    """Where a problem is; a key that nobody declared is shown as ``*``."""
    known = _declared(Wire) | {"text", "parts"}
    shown = (str(each) if isinstance(each, int) or each in known else "*" for each in loc)
    return ".".join(shown) or "$"


def _declared(cls: type[Wire]) -> set[str]:
    names = set()
    for each in cls.__subclasses__():
        names |= _declared(each)
    for name, field in cls.model_fields.items():
        names |= {name, field.alias or name}
        if name in ("type", "role", "kind") and isinstance(field.default, str):
            names.add(field.default)
    return names


def _as_bytes(value: Any) -> Any:
    if isinstance(value, bytearray | memoryview):
        return bytes(value)
    if isinstance(value, pydantic.AnyUrl):
        return str(value)
    return value


def _as_text(value: str | bytes) -> str:
    return base64.b64encode(value).decode("ascii") if isinstance(value, bytes) else value


Bytes = Annotated[
    StrictStr | StrictBytes,
    BeforeValidator(_as_bytes),
    PlainSerializer(_as_text, return_type=str, when_used="json"),
]
"""Bytes, or text: base64, a ``data:`` URL or another URL. Bytes are base64 in JSON."""
