"""From a Python signature, or a JSON Schema, to a strict check of arguments.

Two kinds of `Shape` exist. `SignatureShape` wraps a pydantic model built from a function's
parameters, `TypeShape` a type that is there already; validation runs in JSON mode with
``strict=True`` and ``extra="forbid"`` given *at the call*, where they override the configuration of
every nested model, dataclass and TypedDict. `DocumentShape` wraps a JSON Schema document for tools
known by nothing else.
"""

from __future__ import annotations

import functools
import inspect
import json
import typing
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import pydantic
import pydantic_core
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import to_json

from guardchart.errors import AgentConfigError, MissingExtraError
from guardchart.gate._arguments import ArgumentsRefused, canonical, encode

__all__ = [
    "DocumentShape",
    "IdempotencyKey",
    "Shape",
    "SignatureShape",
    "TypeShape",
    "declared_names",
    "errors_text",
    "model_shape",
    "signature_shape",
    "type_shape",
]


class IdempotencyKey(str):
    """Annotates a tool parameter that receives the call's idempotency key.

    The parameter is hidden from the schema. The key is the same for every entry of one
    approved call, and different for any other, so it can be handed to a payment provider.

    >>> from guardchart.gate import tool
    >>> def pay(cents: int, key: IdempotencyKey) -> str:
    ...     "Pay."
    >>> sorted(tool(pay).parameters["properties"])
    ['cents']
    """

    __slots__ = ()


class Shape(Protocol):
    """What the gate asks of a tool's arguments."""

    @property
    def parameters(self) -> dict[str, Any]:
        """The JSON Schema."""

    @property
    def args_model(self) -> type[pydantic.BaseModel] | None:
        """The pydantic model, where there is one."""

    def load(self, arguments: dict[str, Any], raw: bytes) -> tuple[dict[str, Any], str]:
        """Validate admitted arguments; return the canonical ones and their text."""

    def bind(self, text: str, key: str, call_id: str = "") -> tuple[list[Any], dict[str, Any]]:
        """Return the positional and keyword arguments for the function's body."""


# Errors

_DERIVED = (
    *("{error}", "{tag}", "{actual_length}", "{actual_type}", "{input_value}"),
    *("{encoding_error}", "{tz_actual}"),
)
_AUTHORED = frozenset({"value_error", "assertion_error", "custom_error"})
_SHOWN = 5


def _message(error: Mapping[str, Any]) -> str:
    """Return pydantic's own text, cut before anything it derives from the value."""
    kind = str(error["type"])
    ctx = error.get("ctx")
    if kind in _AUTHORED:
        return kind
    try:
        known = pydantic_core.PydanticKnownError(kind, ctx)  # type: ignore[arg-type]
        template = known.message_template
    except Exception:  # an error type of the tool's author
        return kind
    cut = min((template.find(d) for d in _DERIVED if d in template), default=-1)
    if cut < 0:
        return str(known.message())  # pydantic's text: an author may use its names for his own
    head = template[:cut].rpartition(",")[0]
    for name, value in (ctx or {}).items():
        head = head.replace("{" + name + "}", str(value))
    head = head.replace("{expected_plural}", "s")
    return kind if not head or "{" in head else head


def errors_text(errors: list[Any], declared: frozenset[str]) -> str:
    """Return pydantic's errors as ``<loc>: <msg>``: declared names, no value, nobody's own text.

    A place that is no declared name is shown as ``*``, a validator's own text as its type.
    """
    parts = []
    for error in errors[:_SHOWN]:
        loc = ".".join(
            str(at) if isinstance(at, int) or at in declared else "*" for at in error["loc"]
        )
        parts.append(f"{loc or '*'}: {_message(error)}")
    if len(errors) > _SHOWN:
        parts.append(f"{len(errors) - _SHOWN} more")
    return "; ".join(parts)


def refusal(errors: list[Any], declared: frozenset[str]) -> ArgumentsRefused:
    return ArgumentsRefused(errors_text(errors, declared))


# Signatures


class _Schema(GenerateJsonSchema):
    # A default that JSON cannot show is left out of the schema; that is no cause for a warning.
    def emit_warning(self, kind: Any, detail: str) -> None:
        """Say nothing."""


_CONFIG = pydantic.ConfigDict(
    strict=True,
    extra="forbid",
    arbitrary_types_allowed=False,
    protected_namespaces=(),
    ser_json_bytes="base64",
    val_json_bytes="base64",
    ser_json_inf_nan="constants",
    allow_inf_nan=False,
)
_TAKEN = frozenset(dir(pydantic.BaseModel))


def _tidy(node: Any, inside: str = "") -> Any:
    """Drop generated titles and close every object that declares its properties."""
    if isinstance(node, list):
        return [_tidy(item) for item in node]
    if not isinstance(node, dict):
        return node
    if inside in ("properties", "$defs", "patternProperties"):
        return {key: _tidy(item) for key, item in node.items()}
    if inside in ("default", "const", "enum", "examples"):
        return node
    out = {
        key: node[key] if key in ("default", "const", "enum", "examples") else _tidy(node[key], key)
        for key in node
        if not (key == "title" and isinstance(node[key], str))
    }
    if "properties" in out:
        out["additionalProperties"] = False
    return out


def declared_names(node: Any, into: set[str]) -> set[str]:
    """Add every property name of a JSON Schema, at any depth, to ``into`` and return it."""
    if isinstance(node, dict):
        properties = node.get("properties")
        if isinstance(properties, dict):
            into.update(k for k in properties if isinstance(k, str))
        for item in node.values():
            declared_names(item, into)
    elif isinstance(node, list):
        for item in node:
            declared_names(item, into)
    return into


def unordered(node: Any) -> bool:
    if isinstance(node, dict):
        return node.get("uniqueItems") is True or any(map(unordered, node.values()))
    return isinstance(node, list) and any(map(unordered, node))


def sort_sets(value: Any, dumped: Any) -> Any:
    """Sort the lists in ``dumped`` that stand for sets in ``value`` (the same dump, as Python)."""
    if isinstance(value, (set, frozenset)):
        if any(isinstance(item, (tuple, frozenset)) and _nests(item) for item in value):
            raise ArgumentsRefused("a set inside a set has no canonical form")
        return sorted(dumped, key=encode) if isinstance(dumped, list) else dumped
    if isinstance(value, dict) and isinstance(dumped, dict) and len(value) == len(dumped):
        pairs = zip(value.values(), dumped.items(), strict=True)
        return {key: sort_sets(item, below) for item, (key, below) in pairs}
    if isinstance(value, (list, tuple)) and isinstance(dumped, list) and len(value) == len(dumped):
        return [sort_sets(item, below) for item, below in zip(value, dumped, strict=True)]
    return dumped


def _nests(item: Any) -> bool:
    return isinstance(item, frozenset) or (isinstance(item, tuple) and any(map(_nests, item)))


class TypeShape:
    """A JSON object that a pydantic type describes, strictly.

    Args:
        validator: pydantic's validator of the type.
        serializer: its serializer.
        parameters: the JSON Schema.
    """

    def __init__(self, validator: Any, serializer: Any, parameters: dict[str, Any]) -> None:
        self.parameters = parameters
        self._declared = frozenset(declared_names(parameters, set()))
        self._unordered = unordered(parameters)
        self._validate = validator.validate_json
        self._dump = serializer.to_python

    def _read(self, text: str | bytes) -> Any:
        try:
            return self._validate(text, strict=True, extra="forbid")
        except pydantic.ValidationError as exc:
            errors = exc.errors(include_url=False, include_input=False)
            raise refusal(errors, self._declared) from None
        except Exception as exc:  # a validator of the tool's author
            raise ArgumentsRefused(f"a validator raised {type(exc).__name__}") from None

    def _write(self, values: Any) -> tuple[dict[str, Any], str]:
        try:
            dumped = self._dump(values, mode="json", by_alias=True, round_trip=True)
            if self._unordered:
                plain = self._dump(values, mode="python", by_alias=True, round_trip=True)
                dumped = sort_sets(plain, dumped)
        except ArgumentsRefused:
            raise
        except Exception as exc:
            raise ArgumentsRefused(f"not JSON after validation: {type(exc).__name__}") from None
        try:
            return dumped, encode(dumped)
        except ValueError:
            raise ArgumentsRefused("a number is not finite") from None
        except Exception as exc:
            raise ArgumentsRefused(f"not JSON after validation: {type(exc).__name__}") from None

    def load(self, arguments: dict[str, Any], raw: bytes) -> tuple[dict[str, Any], str]:
        """Validate admitted arguments; return the canonical ones and their text.

        What comes back is a fixed point: reading it gives itself. Where the call named every
        argument in full the first reading shows that already; else it is read once more.

        Args:
            arguments: what `admit` let through.
            raw: their JSON text.

        Raises:
            ArgumentsRefused: the schema, or the fixed point, does not hold.
        """
        out, text = self._write(self._read(raw))
        given = to_json(out) == raw or encode(arguments) == text
        if not given and self._write(self._read(text))[1] != text:
            raise ArgumentsRefused("its validators change a value each time it is read")
        return out, text


class SignatureShape(TypeShape):
    """The arguments of a Python function."""

    def __init__(
        self,
        model: type[pydantic.BaseModel],
        fields: Mapping[str, str],
        positional: tuple[str, ...],
        keys: tuple[str, ...],
        parameters: dict[str, Any],
    ) -> None:
        super().__init__(model.__pydantic_validator__, model.__pydantic_serializer__, parameters)
        self.args_model: type[pydantic.BaseModel] | None = model
        self._fields = dict(fields)  # parameter -> field of the model
        self._positional = positional
        self._keys = keys

    def bind(self, text: str, key: str, call_id: str = "") -> tuple[list[Any], dict[str, Any]]:
        """Return fresh Python values for the function, read from canonical text."""
        values = self._read(text)
        named = {name: getattr(values, field) for name, field in self._fields.items()}
        named.update(dict.fromkeys(self._keys, IdempotencyKey(key)))
        return [named.pop(name) for name in self._positional], named


def _hints(fn: Callable[..., Any], label: str) -> dict[str, Any]:
    target: Any = fn
    while isinstance(target, functools.partial):
        target = target.func
    if not (inspect.isroutine(target) or inspect.isclass(target)):
        target = type(target).__call__
    try:
        return typing.get_type_hints(inspect.unwrap(target), include_extras=True)
    except Exception as exc:
        raise AgentConfigError(
            f"{label}: its annotations cannot be resolved ({type(exc).__name__}); define the "
            "types they name at module level"
        ) from None


def _is_key(annotation: Any) -> bool:
    if typing.get_origin(annotation) is typing.Annotated:
        annotation = typing.get_args(annotation)[0]
    return isinstance(annotation, type) and issubclass(annotation, IdempotencyKey)


def _check_default(label: str, name: str, annotation: Any, default: Any) -> None:
    if isinstance(default, FieldInfo):
        if default.default is pydantic_core.PydanticUndefined:
            return
        value: Any = default.default
    else:
        value = default
    config = pydantic.ConfigDict(**{**_CONFIG, "validate_default": True})
    probe = pydantic.create_model("probe", __config__=config, value=(annotation, value))
    try:
        probe.__pydantic_validator__.validate_python({})
    except pydantic.ValidationError:
        raise AgentConfigError(
            f"{label}: the default of parameter {name!r} does not fit its annotation"
        ) from None


def signature_shape(fn: Callable[..., Any], tool: str) -> SignatureShape:
    """Build the strict shape of a function's parameters.

    Raises:
        AgentConfigError: a parameter has no type annotation, is ``*args`` or ``**kwargs``, has
            a type JSON cannot carry, or a default that does not fit.
    """
    label = f"tool {tool!r}"
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        raise AgentConfigError(f"{label}: has no readable signature") from None
    hints = _hints(fn, label)
    definitions: dict[str, Any] = {}
    fields: dict[str, str] = {}
    positional: list[str] = []
    keys: list[str] = []
    for name, parameter in signature.parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise AgentConfigError(
                f"{label}: parameter {name!r} is *args or **kwargs; name every parameter, "
                "since the schema must list what a model may send"
            )
        if parameter.annotation is parameter.empty or name not in hints:
            raise AgentConfigError(f"{label}: parameter {name!r} has no type annotation")
        annotation = hints[name]
        if parameter.kind is parameter.POSITIONAL_ONLY:
            positional.append(name)
        if _is_key(annotation):
            keys.append(name)
            continue
        default = ... if parameter.default is parameter.empty else parameter.default
        plain = name.isascii() and not name.startswith("_") and name not in _TAKEN
        field = name if plain else f"arg{len(fields)}_"
        fields[name] = field
        if not plain:
            annotation = typing.Annotated[annotation, pydantic.Field(alias=name)]
        definitions[field] = (annotation, default)
    try:
        model = pydantic.create_model(f"{tool}_arguments", __config__=_CONFIG, **definitions)
    except Exception as exc:
        raise _not_json(label, exc) from exc
    parameters = _parameters(model, label)
    for name, parameter in signature.parameters.items():
        if name in fields and parameter.default is not parameter.empty:
            _check_default(label, name, hints[name], parameter.default)
    return SignatureShape(model, fields, tuple(positional), tuple(keys), parameters)


def model_shape(model: type[pydantic.BaseModel], tool: str) -> SignatureShape:
    """Build the strict shape of arguments that a pydantic model describes.

    Raises:
        AgentConfigError: a field has a type that JSON cannot carry, or hides its value.
    """
    fields = {name: name for name in model.model_fields}
    return SignatureShape(model, fields, (), (), _parameters(model, f"tool {tool!r}"))


def _parameters(model: type[pydantic.BaseModel], label: str) -> dict[str, Any]:
    try:
        schema = model.model_json_schema(by_alias=True, schema_generator=_Schema)
    except Exception as exc:
        raise _not_json(label, exc) from exc
    parameters: dict[str, Any] = _tidy(schema)
    if holds_secret(parameters):
        raise AgentConfigError(
            f"{label}: a parameter is a SecretStr or SecretBytes, whose value is never shown, so "
            "nobody could approve what runs; keep secrets in the tool's closure"
        )
    parameters.pop("description", None)
    parameters.setdefault("properties", {})
    parameters["additionalProperties"] = False
    return parameters


def _not_json(label: str, exc: Exception) -> AgentConfigError:
    return AgentConfigError(
        f"{label}: a parameter's type cannot be carried by JSON ({type(exc).__name__})"
    )


def type_shape(annotation: Any, label: str) -> TypeShape:
    """Build the strict shape of an object that a model, dataclass or TypedDict describes.

    Args:
        annotation: the type.
        label: how to name it in an error.

    Raises:
        AgentConfigError: it does not describe a JSON object.
    """
    try:
        adapter: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(annotation)
        parameters = _tidy(adapter.json_schema(by_alias=True, schema_generator=_Schema))
    except Exception as exc:
        raise AgentConfigError(
            f"{label}: its type cannot be carried by JSON ({type(exc).__name__})"
        ) from exc
    top = parameters
    if isinstance(parameters.get("$ref"), str):
        top = parameters.get("$defs", {}).get(parameters["$ref"].rpartition("/")[2], {})
    if top.get("type", "object") != "object":
        raise AgentConfigError(f"{label}: its type does not describe an object")
    return TypeShape(adapter.validator, adapter.serializer, parameters)


def holds_secret(schema: Any) -> bool:
    """Whether a parameter hides its value: pydantic marks such types write-only passwords."""
    if isinstance(schema, list):
        return any(map(holds_secret, schema))
    if not isinstance(schema, dict):
        return False
    if schema.get("writeOnly") is True and schema.get("format") == "password":
        return True
    return any(map(holds_secret, schema.values()))


# JSON Schema documents


def _close(node: Any) -> Any:
    """Refuse undeclared keys wherever an object lists its properties and says nothing of others.

    Below a combinator nothing is added: there each branch sees the keys of its siblings.
    """
    if not isinstance(node, dict):
        return node
    out = dict(node)
    if isinstance(out.get("properties"), dict):
        out["properties"] = {k: _close(v) for k, v in out["properties"].items()}
        open_ended = {"additionalProperties", "patternProperties", "unevaluatedProperties"}
        combined = {"allOf", "anyOf", "oneOf", "$ref", "if"}
        if not (open_ended | combined) & out.keys():
            out["additionalProperties"] = False
    for key in ("items", "additionalProperties"):
        if isinstance(out.get(key), dict):
            out[key] = _close(out[key])
    if isinstance(out.get("$defs"), dict) and not {"allOf", "anyOf", "oneOf"} & out.keys():
        out["$defs"] = {k: _close(v) for k, v in out["$defs"].items()}
    return out


def _remote(node: Any) -> bool:
    if isinstance(node, dict):
        for key in ("$ref", "$dynamicRef", "$recursiveRef"):
            ref = node.get(key)
            if isinstance(ref, str) and not ref.startswith("#"):
                return True
        return any(map(_remote, node.values()))
    return isinstance(node, list) and any(map(_remote, node))


class DocumentShape:
    """The arguments of a tool that is known by its JSON Schema only."""

    args_model: type[pydantic.BaseModel] | None = None

    def __init__(self, tool: str, schema: Mapping[str, Any], *, label: str | None = None) -> None:
        label = label or f"tool {tool!r}"
        try:
            import jsonschema
            import referencing
        except ImportError:
            raise MissingExtraError(
                f"{label} is known by a JSON Schema only, and jsonschema",
                'pip install "guardchart[jsonschema]"',
            ) from None
        try:
            document = json.loads(json.dumps(dict(schema), allow_nan=False))
        except (TypeError, ValueError, RecursionError):
            raise AgentConfigError(f"{label}: its schema is not JSON") from None
        if document.get("type", "object") != "object":
            raise AgentConfigError(f"{label}: its schema does not describe an object")
        if _remote(document):
            raise AgentConfigError(f"{label}: its schema refers to another document")
        closed = _close({"type": "object", "properties": {}, **document})
        cls = jsonschema.validators.validator_for(closed, jsonschema.Draft202012Validator)
        try:
            cls.check_schema(closed)
        except jsonschema.SchemaError as exc:
            raise AgentConfigError(f"{label}: not a JSON Schema ({exc.validator})") from None
        # An explicit, empty registry: nothing is ever fetched for a reference.
        self._validator: Any = cls(closed, registry=referencing.Registry())
        self.parameters: dict[str, Any] = closed
        self._declared = frozenset(declared_names(closed, set()))

    def load(self, arguments: dict[str, Any], raw: bytes) -> tuple[dict[str, Any], str]:
        """Validate admitted arguments; they come back unchanged.

        Raises:
            ArgumentsRefused: the schema does not hold.
        """
        text = canonical(arguments)
        arguments = json.loads(text)
        parts = []
        try:
            for error in self._validator.iter_errors(arguments):
                loc = ".".join(
                    str(at) if isinstance(at, int) or at in self._declared else "*"
                    for at in error.absolute_path
                )
                parts.append(f"{loc or '*'}: does not satisfy {error.validator!r}")
                if len(parts) == _SHOWN:
                    break
        except Exception as exc:
            raise ArgumentsRefused(f"the schema raised {type(exc).__name__}") from None
        if parts:
            raise ArgumentsRefused("; ".join(parts))
        return arguments, text

    def bind(self, text: str, key: str, call_id: str = "") -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments as keywords."""
        return [], json.loads(text)
