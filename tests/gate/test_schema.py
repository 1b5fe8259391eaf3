"""Strictness at every depth, usable JSON types, fixed points, and errors that tell nothing."""

from __future__ import annotations

import datetime as dt
import decimal
import enum
import itertools
import typing
import uuid
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple

import pydantic
import pytest
from pydantic import BaseModel, ConfigDict, Field
from typing_extensions import TypedDict

from guardchart.errors import AgentConfigError, ToolDeniedError
from guardchart.gate import IdempotencyKey, ToolCall, digest, tool, tool_registry
from guardchart.gate._schema import IdempotencyKey as Key


class Plain(BaseModel):
    n: int


class Open(BaseModel):
    model_config = ConfigDict(extra="allow", strict=False)
    n: int


class Lax(BaseModel):
    n: Annotated[int, Field(strict=False)]


class Outer(BaseModel):
    inner: list[Open]


class Typed(TypedDict):
    n: int


class OpenTyped(TypedDict):
    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]
    n: int


@dataclass
class Data:
    n: int


@pydantic.dataclasses.dataclass(config=ConfigDict(extra="ignore", strict=False))
class OpenData:
    n: int


class Named(NamedTuple):
    n: int


class Cat(BaseModel):
    kind: Literal["cat"]
    n: int


class Dog(BaseModel):
    kind: Literal["dog"]
    m: int


class Aliased(BaseModel):
    n: int = Field(alias="theN")


ONE: dict[str, Any] = {"n": 1}
NESTED: dict[str, tuple[Any, Any]] = {
    "model": (Plain, lambda x: x),
    "model that allows": (Open, lambda x: x),
    "lax field": (Lax, lambda x: x),
    "model in list in model": (Outer, lambda x: {"inner": [x]}),
    "TypedDict": (Typed, lambda x: x),
    "TypedDict that allows": (OpenTyped, lambda x: x),
    "dataclass": (Data, lambda x: x),
    "dataclass that ignores": (OpenData, lambda x: x),
    "optional": (Open | None, lambda x: x),
    "union": (Open | Typed, lambda x: x),
    "union with text": (OpenData | str, lambda x: x),
    "dict of": (dict[str, OpenTyped], lambda x: {"k": x}),
    "tuple of": (tuple[Open, int], lambda x: [x, 1]),
    "list of lists": (list[list[OpenData]], lambda x: [[x]]),
    "annotated": (Annotated[Open, Field(description="d")], lambda x: x),
}


def _tool(annotation: Any) -> Any:
    def body(value: Any) -> str:
        return repr(value)

    body.__annotations__ = {"value": annotation, "return": str}
    return tool(body, name="body")


@pytest.mark.parametrize(("annotation", "wrap"), NESTED.values(), ids=NESTED.keys())
def test_unknown_keys_and_coercions_are_refused_at_every_depth(annotation: Any, wrap: Any) -> None:
    made = _tool(annotation)
    assert made.validate({"value": wrap({"n": 1})}) == {"value": wrap({"n": 1})}
    for bad in ({"n": 1, "zz": 2}, {"n": "1"}, {"n": 1.0}, {"n": True}, {}, {"n": None}):
        with pytest.raises(ToolDeniedError, match="invalid arguments"):
            made.validate({"value": wrap(bad)})


def test_a_named_tuple_takes_no_extra_and_no_coercion() -> None:
    made = _tool(Named)
    for bad in ({"n": 1, "zz": 2}, ["1"], [1, 2]):
        with pytest.raises(ToolDeniedError):
            made.validate({"value": bad})


def test_a_tagged_union_is_strict_in_its_branch() -> None:
    made = _tool(Annotated[Cat | Dog, Field(discriminator="kind")])
    assert made.validate({"value": {"kind": "dog", "m": 2}})
    for bad in ({"kind": "dog", "m": 2, "n": 1}, {"kind": "dog", "n": 1}, {"kind": "SECRET-x"}):
        with pytest.raises(ToolDeniedError) as caught:
            made.validate({"value": bad})
        assert "SECRET" not in str(caught.value)


def test_aliases_are_the_names_a_model_uses() -> None:
    made = _tool(Aliased)
    assert made.validate({"value": {"theN": 1}}) == {"value": {"theN": 1}}
    with pytest.raises(ToolDeniedError, match="theN"):
        made.validate({"value": {"n": 1}})


def test_unknown_and_missing_top_level_arguments_are_refused() -> None:
    def refund(order_id: int, note: str = "") -> str:
        return ""

    made = tool(refund)
    for bad in ({}, {"order_id": 1, "zz": 1}, {"order_id": "1"}, {"order_id": True}, {"note": "x"}):
        with pytest.raises(ToolDeniedError):
            made.validate(bad)


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1


USABLE: dict[str, tuple[Any, Any, Any]] = {
    "datetime": (dt.datetime, "2024-05-01T10:00:00Z", dt.datetime(2024, 5, 1, 10, tzinfo=dt.UTC)),
    "date": (dt.date, "2024-05-01", dt.date(2024, 5, 1)),
    "time": (dt.time, "10:00:00", dt.time(10)),
    "timedelta": (dt.timedelta, "PT90S", dt.timedelta(seconds=90)),
    "uuid": (
        uuid.UUID,
        "12345678-1234-5678-1234-567812345678",
        uuid.UUID(int=0x12345678123456781234567812345678),
    ),
    "decimal text": (decimal.Decimal, "10.50", decimal.Decimal("10.50")),
    "decimal number": (decimal.Decimal, 3, decimal.Decimal(3)),
    "enum": (Colour, "red", Colour.RED),
    "int enum": (Level, 1, Level.LOW),
    "literal": (Literal["a", 1], 1, 1),
    "tuple": (tuple[int, str], [1, "a"], (1, "a")),
    "any tuple": (tuple[int, ...], [1, 2], (1, 2)),
    "set": (set[str], ["b", "a"], {"a", "b"}),
    "frozenset": (frozenset[int], [2, 1], frozenset({1, 2})),
    "bytes": (bytes, "aGk=", b"hi"),
    "float of int": (float, 1, 1.0),
    "dataclass": (Data, {"n": 1}, Data(1)),
    "typed dict": (Typed, {"n": 1}, {"n": 1}),
    "model": (Plain, {"n": 1}, Plain(n=1)),
    "optional": (int | None, None, None),
    "union": (int | str, "x", "x"),
    "any": (
        Any,
        {"__class__": "x", "__proto__": {"a": 1}},
        {"__class__": "x", "__proto__": {"a": 1}},
    ),
    "free dict": (dict[str, int], {"__class__": 1}, {"__class__": 1}),
    "dict of date keys": (dict[dt.date, int], {"2024-05-01": 1}, {dt.date(2024, 5, 1): 1}),
}


@pytest.mark.parametrize(("annotation", "given", "value"), USABLE.values(), ids=USABLE.keys())
def test_json_types_are_usable_and_canonical(annotation: Any, given: Any, value: Any) -> None:
    made = _tool(annotation)
    arguments, text = made.load({"value": given})
    assert made.load(arguments) == (arguments, text), "a canonical form is a fixed point"
    args, kwargs = made.shape.bind(text, "key")
    assert args == []
    assert kwargs == {"value": value}
    assert type(kwargs["value"]) is type(value)


def test_defaults_are_part_of_what_is_shown_and_signed() -> None:
    def pay(amount: int, currency: str = "EUR", tags: list[str] | None = None) -> str:
        return ""

    made = tool(pay)
    full = {"amount": 1, "currency": "EUR", "tags": None}
    assert made.validate({"amount": 1}) == full
    assert digest(made.validate({"amount": 1})) == digest(full)


def test_sets_are_sorted_so_that_order_changes_no_digest() -> None:
    class Box(BaseModel):
        names: set[str]
        points: list[frozenset[int]]

    made = _tool(Box)
    values = ["d", "a", "c", "b"]
    seen = {
        made.load({"value": {"names": list(p), "points": [[3, 1, 2], list(range(9, 0, -1))]}})[1]
        for p in itertools.permutations(values)
    }
    assert len(seen) == 1
    assert '"names":["a","b","c","d"]' in seen.pop()


def test_a_set_of_sets_has_no_canonical_form_and_is_refused() -> None:
    with pytest.raises(ToolDeniedError, match="set inside a set"):
        _tool(set[frozenset[int]]).validate({"value": [[1, 2]]})


def test_a_validator_that_rewrites_each_time_is_refused_at_park_time() -> None:
    made = _tool(Annotated[int, pydantic.AfterValidator(lambda v: v + 1)])
    with pytest.raises(ToolDeniedError, match="change a value each time"):
        made.validate({"value": 1})


def test_a_validator_that_settles_is_fine() -> None:
    made = _tool(Annotated[str, pydantic.AfterValidator(str.strip)])
    assert made.validate({"value": " a "}) == {"value": "a"}


def test_a_default_factory_is_fixed_by_the_canonical_form() -> None:
    counter = itertools.count()

    class Stamped(BaseModel):
        at: int = Field(default_factory=lambda: next(counter))

    made = _tool(Stamped)
    arguments, text = made.load({"value": {}})
    for _ in range(3):
        assert made.load(arguments)[1] == text


def test_a_field_that_is_not_dumped_cannot_smuggle_a_value() -> None:
    class Hidden(BaseModel):
        seen: int
        unseen: int = Field(default=0, exclude=True)

    made = _tool(Hidden)
    _, text = made.load({"value": {"seen": 1, "unseen": 99}})
    assert made.shape.bind(text, "")[1]["value"].unseen == 0
    assert "99" not in text


@pytest.mark.parametrize("value", [(10**400), -(10**400)])
@pytest.mark.parametrize("annotation", [float, float | None, list[float], Any, dict[str, float]])
def test_a_number_beyond_float_never_becomes_infinite(annotation: Any, value: int) -> None:
    made = _tool(annotation)
    wrapped: Any = value
    if annotation == list[float]:
        wrapped = [value]
    elif annotation == dict[str, float]:
        wrapped = {"k": value}
    try:
        arguments, _ = made.load({"value": wrapped})
    except ValueError:
        return
    assert annotation is Any
    assert arguments == {"value": value}


def test_a_number_beyond_float_in_a_nested_model_is_refused() -> None:
    class Price(BaseModel):
        amount: float
        maybe: float | None = None

    made = _tool(Price)
    for bad in ({"amount": 10**400}, {"amount": 1, "maybe": 10**400}):
        with pytest.raises(ToolDeniedError):
            made.validate({"value": bad})


# --- what an error may say ---------------------------------------------------------------------

CANARY = "CANARY-4711"


def _boom(value: Any) -> Any:
    raise ValueError(f"leaks {value} {CANARY}")


def _assert(value: Any) -> Any:
    raise AssertionError(f"leaks {value} {CANARY}")


def _key(value: Any) -> Any:
    raise KeyError(CANARY)


def _custom(value: Any) -> Any:
    raise pydantic_core.PydanticCustomError("my_kind", "leaks {value}", {"value": CANARY})


import pydantic_core  # noqa: E402

LEAKY: dict[str, tuple[Any, Any]] = {
    "value error": (Annotated[str, pydantic.AfterValidator(_boom)], CANARY),
    "assertion": (Annotated[str, pydantic.BeforeValidator(_assert)], CANARY),
    "other exception": (Annotated[str, pydantic.AfterValidator(_key)], CANARY),
    "custom error": (Annotated[str, pydantic.AfterValidator(_custom)], CANARY),
    "type": (int, CANARY),
    "literal": (Literal["a", "b"], CANARY),
    "enum": (Colour, CANARY),
    "uuid": (uuid.UUID, CANARY),
    "date": (dt.date, CANARY),
    "datetime": (dt.datetime, CANARY),
    "url": (pydantic.HttpUrl, CANARY + "://x"),
    "pattern": (Annotated[str, Field(pattern="^a$")], CANARY),
    "max length": (Annotated[str, Field(max_length=2)], CANARY),
    "list length": (Annotated[list[str], Field(max_length=1)], [CANARY, CANARY, CANARY]),
    "decimal": (decimal.Decimal, CANARY),
    "undeclared key": (Plain, {"n": 1, CANARY: 2}),
    "key of a dict": (dict[int, int], {CANARY: 1}),
    "value below an undeclared key": (dict[str, int], {CANARY: "x"}),
    "deep": (dict[str, dict[str, Plain]], {CANARY: {CANARY: {CANARY: 1}}}),
    "tag": (Annotated[Cat | Dog, Field(discriminator="kind")], {"kind": CANARY}),
    "union": (int | Plain, {CANARY: CANARY}),
    "bytes": (bytes, CANARY + "!"),
    "multiple of": (Annotated[int, Field(multiple_of=10)], 4711),
    "less than": (Annotated[int, Field(lt=7)], 4711),
    "named tuple": (Named, [CANARY]),
    "json": (pydantic.Json[int], CANARY),
}


@pytest.mark.parametrize(("annotation", "bad"), LEAKY.values(), ids=LEAKY.keys())
def test_errors_hold_no_value_no_undeclared_key_and_no_validator_text(
    annotation: Any, bad: Any
) -> None:
    with pytest.raises(ToolDeniedError) as caught:
        _tool(annotation).validate({"value": bad})
    text = str(caught.value)
    assert "CANARY" not in text
    assert "4711" not in text
    assert "leaks" not in text
    assert text.startswith("tool 'body' denied: invalid arguments (")
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


def test_errors_name_declared_fields_with_pydantics_own_text() -> None:
    def refund(order_id: int, amount_cents: int = Field(gt=0, le=100_000)) -> str:
        return ""

    with pytest.raises(ToolDeniedError) as caught:
        tool(refund).validate({"order_id": 7, "amount_cents": -1})
    assert "amount_cents: Input should be greater than 0" in str(caught.value)
    assert "-1" not in str(caught.value)


def test_an_undeclared_key_is_printed_as_a_star() -> None:
    with pytest.raises(ToolDeniedError, match=r"\(value\.\*: Extra inputs are not permitted\)"):
        _tool(Plain).validate({"value": {"n": 1, "zz": 1}})


def test_many_errors_are_cut() -> None:
    with pytest.raises(ToolDeniedError) as caught:
        _tool(list[int]).validate({"value": ["x"] * 500})
    assert "495 more" in str(caught.value)
    assert len(str(caught.value)) < 600


# --- signatures --------------------------------------------------------------------------------


def test_a_parameter_without_annotation_is_a_config_error() -> None:
    def bad(a, b: int) -> None:  # type: ignore[no-untyped-def]
        ...

    with pytest.raises(AgentConfigError, match="no type annotation"):
        tool(bad)


def test_star_parameters_are_a_config_error() -> None:
    def args(*a: int) -> None: ...
    def kwargs(**a: int) -> None: ...

    for bad in (args, kwargs):
        with pytest.raises(AgentConfigError, match=r"\*args or \*\*kwargs"):
            tool(bad)


def test_a_type_json_cannot_carry_is_a_config_error() -> None:
    class Anything: ...

    def bad(a: Anything) -> None: ...

    bad.__annotations__ = {"a": Anything}
    with pytest.raises(AgentConfigError, match="cannot be carried by JSON"):
        tool(bad)


def test_an_annotation_that_does_not_resolve_is_a_config_error() -> None:
    def bad(a: NoSuchThing) -> None: ...  # type: ignore[name-defined] # noqa: F821

    with pytest.raises(AgentConfigError, match="cannot be resolved"):
        tool(bad)


@pytest.mark.parametrize("default", [None, "1", 1.5])
def test_a_default_that_does_not_fit_is_a_config_error(default: Any) -> None:
    def bad(a: int = default) -> None: ...

    with pytest.raises(AgentConfigError, match="default of parameter 'a'"):
        tool(bad)


def test_field_defaults_and_default_factories_are_kept() -> None:
    def fine(a: int = Field(3, ge=1), b: list[int] = Field(default_factory=list)) -> None: ...  # noqa: B008

    assert tool(fine).validate({}) == {"a": 3, "b": []}


def test_awkward_parameter_names_work() -> None:
    def odd(schema: int, model_config: int, _private: int, copy: int, model_x: int) -> str:
        return ""

    names = ["schema", "model_config", "_private", "copy", "model_x"]
    made = tool(odd)
    assert list(made.parameters["properties"]) == names
    arguments = dict.fromkeys(names, 1)
    assert made.validate(arguments) == arguments
    assert made.shape.bind(made.load(arguments)[1], "")[1] == arguments
    with pytest.raises(ToolDeniedError, match="_private: Field required"):
        made.validate({name: 1 for name in names if name != "_private"})


def test_positional_only_parameters_are_passed_in_place() -> None:
    def body(a: int, b: int, /, c: int) -> int:
        return a * 100 + b * 10 + c

    made = tool(body)
    args, kwargs = made.shape.bind(made.load({"a": 1, "b": 2, "c": 3})[1], "")
    assert body(*args, **kwargs) == 123


def test_the_idempotency_key_is_hidden_from_the_schema_and_filled_in() -> None:
    def pay(amount: int, key: IdempotencyKey) -> str:
        return ""

    made = tool(pay)
    assert list(made.parameters["properties"]) == ["amount"]
    with pytest.raises(ToolDeniedError):
        made.validate({"amount": 1, "key": "mine"})
    assert made.shape.bind(made.load({"amount": 1})[1], "K")[1] == {"amount": 1, "key": Key("K")}


def test_methods_and_callable_objects_are_tools() -> None:
    class Service:
        def call(self, a: int) -> int:
            return a

        def __call__(self, b: int) -> int:
            return b

    assert list(tool(Service().call).parameters["properties"]) == ["a"]
    assert list(tool(Service(), name="svc").parameters["properties"]) == ["b"]


def test_the_schema_is_closed_at_every_object_and_has_no_generated_titles() -> None:
    class Item(BaseModel):
        title: str

    def order(items: list[Item], data: Data, free: dict[str, int]) -> str:
        """Order things.

        Second paragraph.
        """
        return ""

    order.__annotations__.update(items=list[Item], data=Data, free=dict[str, int])
    made = tool(order)
    assert made.description == "Order things."
    schema = made.parameters
    assert schema["additionalProperties"] is False
    assert schema["$defs"]["Item"]["additionalProperties"] is False
    assert schema["$defs"]["Data"]["additionalProperties"] is False
    assert schema["properties"]["free"]["additionalProperties"] == {"type": "integer"}
    assert list(schema["$defs"]["Item"]["properties"]) == ["title"]
    assert "title" not in schema


def test_a_default_json_cannot_show_makes_no_warning() -> None:
    @dataclass
    class Opaque:
        n: int = field(default=1)

    def body(a: typing.Any = object) -> str:
        return ""

    made = tool(body)
    assert "default" not in made.parameters["properties"]["a"]
    with pytest.raises(ToolDeniedError, match="not JSON after validation"):
        made.validate({})


# --- JSON Schema documents ---------------------------------------------------------------------

from guardchart.gate import Tool  # noqa: E402

DOCUMENT: dict[str, Any] = {
    "type": "object",
    "properties": {
        "q": {"type": "string", "maxLength": 5},
        "opts": {"type": "object", "properties": {"n": {"type": "integer", "minimum": 1}}},
    },
    "required": ["q"],
}


def _external() -> Tool:
    return Tool.from_schema("ext", DOCUMENT, lambda **kw: kw)


def test_a_tool_known_by_its_json_schema_is_validated_against_it() -> None:
    made = _external()
    good = {"q": "a", "opts": {"n": 2}}
    assert made.validate(good) == good
    assert made.shape.bind(made.load(good)[1], "") == ([], good)
    for bad in ({}, {"q": 1}, {"q": "toolong"}, {"q": "a", "zz": 1}, {"q": "a", "opts": {"n": 0}}):
        with pytest.raises(ToolDeniedError, match="invalid arguments"):
            made.validate(bad)
    with pytest.raises(ToolDeniedError):
        made.validate({"q": "a", "opts": {"zz": 1}})


def test_errors_of_a_json_schema_hold_no_value_and_no_undeclared_key() -> None:
    for bad in ({"q": CANARY}, {"q": "a", CANARY: 1}, {"q": "a", "opts": {"n": CANARY}}):
        with pytest.raises(ToolDeniedError) as caught:
            _external().validate(bad)
        assert CANARY not in str(caught.value)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array"},
        {"type": "object", "properties": {"a": {"type": "nonsense"}}},
        {"type": "object", "properties": {"a": {"$ref": "https://example.invalid/x.json"}}},
        {"type": "object", "properties": {"a": {"const": float("nan")}}},
    ],
)
def test_a_document_that_is_no_usable_schema_is_a_config_error(schema: Any) -> None:
    with pytest.raises(AgentConfigError):
        Tool.from_schema("ext", schema, lambda **kw: kw)


def test_a_registry_takes_both_kinds_of_tool() -> None:
    def local(a: int) -> str:
        return ""

    registry = tool_registry(local, _external())
    assert registry.names == ("local", "ext")
    assert registry.authorise(ToolCall("1", "ext", {"q": "a"}), ["ext"]) == {"q": "a"}
