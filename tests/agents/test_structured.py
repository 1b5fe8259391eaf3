"""Replies with a shape: the parser, the check of one value, and schemas per state."""

from __future__ import annotations

import dataclasses
import sys
import types
from collections.abc import Iterator
from datetime import date
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, RootModel, field_validator

from guardchart import MachineLogic, create_machine
from guardchart.agents import (
    AgentConfigError,
    FakeModel,
    agent_logic,
    instructor_available,
    json_parser,
    load_chart,
    run_agent,
    run_agent_sync,
    structured_output,
    validate_structured,
)
from guardchart.agents._parser import scan

CANARY = "canary-4711"


class Parcel(BaseModel):
    model_config = ConfigDict(extra="forbid")
    weight_g: int = Field(gt=0, le=30_000)
    note: str = Field(default="", max_length=40)


# --- the strict parser -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a": 1}', {"a": 1}),
        ('  \n{"a": [1, 2.5, null, true]}\n', {"a": [1, 2.5, None, True]}),
        ('```json\n{"a": 1}\n```', {"a": 1}),
        ('\n```JSON\r\n{"a": 1}\r\n```\n', {"a": 1}),
        ("```\n[1]```", [1]),
        ('{"a": "```\\n```"}', {"a": "```\n```"}),
        ('```json\n{"a": "```"}\n```', {"a": "```"}),
        ('"text"', "text"),
        ("7", 7),
    ],
)
def test_the_strict_parser_takes_one_value_bare_or_in_one_fence(text: str, value: Any) -> None:
    assert json_parser(False)(text) == value


@pytest.mark.parametrize(
    "text",
    [
        "",
        "warm, I think",
        'Here you go: {"a": 1}',
        '{"a": 1} and that is all',
        '{"a": 1}{"a": 1}',
        '```json\n{"a": 1}\n```\n```json\n{"a": 1}\n```',
        'So:\n```json\n{"a": 1}\n```',
        '```python\n{"a": 1}\n```',
        '```json {"a": 1}```',
        '```json\n{"a": 1}',
        '{"a": {"b": 1}',
        '{"a": 1,}',
        "{'a': 1}",
        "{a: 1}",
        '{"a": 1} // one',
        '\ufeff{"a": 1}',
        '{"a": "line\nbreak"}',
    ],
)
def test_the_strict_parser_repairs_nothing(text: str) -> None:
    with pytest.raises(ValueError, match="^not valid JSON$"):
        json_parser(False)(text)


@pytest.mark.parametrize("parser", [False, True], ids=["strict", "instructor"])
@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"a": 1, "a": 2}', "duplicate key"),
        ('[{"b": {"a": 1, "a": 1}}]', "duplicate key"),
        ('{"a": NaN}', "not finite"),
        ('{"a": -Infinity}', "not finite"),
        ('{"a": 1e999}', "not finite"),
        ('{"a": ' + "1" * 5_000 + "}", "digits"),
        ('{"a": "\\ud800"}', "surrogate"),
        ('{"a": "\\u0000"}', "NUL"),
        ("[" * 65 + "]" * 65, "levels"),
        ('"' + "x" * (1 << 20) + '"', "larger"),
    ],
)
def test_what_strict_json_refuses_is_refused_whole_or_in_prose(
    parser: bool, text: str, why: str
) -> None:
    with pytest.raises(ValueError, match=rf"^not valid JSON \(.*{why}"):
        json_parser(parser)(text)
    with pytest.raises(ValueError, match="^not valid JSON"):
        json_parser(parser)(f"It is {text}.")


@pytest.mark.parametrize("parser", [False, True], ids=["strict", "instructor"])
@pytest.mark.parametrize(
    "text",
    [
        "```\n" + " " * 900_000,
        "[" * 900_000,
        "{" * 900_000,
        "[a" * 400_000,
        "[a]" * 300_000,
        '{"a":' * 150_000,
        '["' * 400_000,
        "[1," * 300_000,
        "`" * 900_000,
    ],
)
def test_an_endless_reply_is_refused_without_endless_work(parser: bool, text: str) -> None:
    # Quadratic work on these would run for hours; the suite's own timeout is what would tell.
    with pytest.raises(ValueError, match="^not valid JSON"):
        json_parser(parser)(text)


@pytest.mark.parametrize("wrong", [1, 0, "yes", [], 1.0])
def test_use_instructor_is_a_bool_or_none(wrong: Any) -> None:
    with pytest.raises(AgentConfigError, match="use_instructor"):
        json_parser(wrong)


# --- prose around JSON -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        'Here you go: {"a": 1} hope that helps',
        'So:\n```json\n{"a": 1}\n```\nDone.',
        '{"a": 1}. I repeat: {"a": 1}',
        '{"a": 1} and, spelled otherwise, { "a" : 1 }',
        'They wrote [sic] this: {"a": 1} [see below].',
    ],
)
def test_with_instructor_prose_around_exactly_one_value_is_tolerated(text: str) -> None:
    assert json_parser(True)(text) == {"a": 1}
    assert json_parser()(text) == {"a": 1}


@pytest.mark.parametrize(
    "text",
    [
        'Not {"a": 1} but {"a": 2}',
        'The answer is {"a": 1}. The example was {"a": "x"}.',
        'Numbers differ: {"a": 1} {"a": 1.0} {"a": true}',
        'See {"a": 1} [2]',
        'It starts {"outer": {"a": 1}',
        'A list [{"a": 1}, {"a": 2}',
        'It was cut: {"a": 1}, "b": {"a": 1}}',
        'JavaScript: {x: {"a": 1}}',
        '{"a": 1, "a": 2} means {"a": 1}',
        'the key "{" means {"a": 1}',
        "no JSON at all",
        "only {} and {",
        "just 7",
    ],
)
def test_with_instructor_what_is_ambiguous_or_truncated_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="^not valid JSON"):
        json_parser(True)(text)


def test_only_values_of_the_wanted_kind_count() -> None:
    class Ids(RootModel[list[int]]):
        pass

    class Thing(BaseModel):
        a: int

    assert validate_structured(Thing, 'List [1] or {"a": 1}', use_instructor=True) == (
        True,
        {"a": 1},
    )
    assert validate_structured(Ids, 'Of {"a": 1} the ids: [1, 2]', use_instructor=True) == (
        True,
        [1, 2],
    )
    # The extractor takes the footnote; what it takes must be what we found.
    assert not validate_structured(Thing, '{"a": 1} [2]', use_instructor=True)[0]


def test_the_extractor_alone_is_never_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    from guardchart.agents._parser import ReplyParser

    for lie in ('{"a": 2}', "7", "", '{"a": 1, "a": 1}', None):
        with pytest.raises(ValueError, match="^not valid JSON"):
            ReplyParser(lambda text, lie=lie: lie)('It is {"a": 1}')

    def fails(text: str) -> str:
        raise KeyError(text)

    with pytest.raises(ValueError, match="^not valid JSON$"):
        ReplyParser(fails)(f'It is {{"a": 1}} {CANARY}')


def test_scan_finds_outermost_values_in_order() -> None:
    assert scan('a {"b": {"c": []}} d [1, {"e": 2}]') == [{"b": {"c": []}}, [1, {"e": 2}]]


@pytest.fixture
def without_instructor(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from guardchart.agents._parser import _extractor

    monkeypatch.setitem(sys.modules, "instructor", None)
    monkeypatch.setitem(sys.modules, "instructor.utils", None)
    _extractor.cache_clear()
    yield
    _extractor.cache_clear()


def test_without_instructor_the_parser_is_strict_and_true_is_refused(
    without_instructor: None,
) -> None:
    assert not instructor_available()
    with pytest.raises(ValueError, match="^not valid JSON$"):
        json_parser()('Here: {"a": 1}')
    assert json_parser()('{"a": 1}') == {"a": 1}
    for wiring in (json_parser, structured_output):
        with pytest.raises(AgentConfigError, match="instructor is not installed: pip install"):
            wiring(use_instructor=True)
    with pytest.raises(AgentConfigError, match="instructor is not installed"):
        validate_structured(Parcel, "{}", use_instructor=True)


def test_an_instructor_that_cannot_be_imported_is_not_available(
    without_instructor: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = types.ModuleType("instructor.utils")  # an old one, without the extractor
    monkeypatch.setitem(sys.modules, "instructor", types.ModuleType("instructor"))
    monkeypatch.setitem(sys.modules, "instructor.utils", broken)
    assert not instructor_available()


# --- one value ---------------------------------------------------------------------------------


def test_validate_structured_takes_text_values_instances_and_run_results() -> None:
    class Run:
        """What a pydantic-ai agent returns, as far as it matters here."""

        def __init__(self, output: Any) -> None:
            self.output = output

    good = (True, {"weight_g": 5, "note": "x"})
    parcel = Parcel(weight_g=5, note="x")
    assert validate_structured(Parcel, '{"weight_g": 5, "note": "x"}') == good
    assert validate_structured(Parcel, {"weight_g": 5, "note": "x"}) == good
    assert validate_structured(Parcel, parcel) == good
    assert validate_structured(Parcel, Run(parcel)) == good
    assert validate_structured(Parcel, Run('{"weight_g": 5, "note": "x"}')) == good
    assert validate_structured(f"{__name__}:Parcel", parcel) == good


async def test_validate_structured_takes_the_result_of_a_real_pydantic_ai_run() -> None:
    from pydantic_ai import Agent
    from pydantic_ai.models.test import TestModel

    agent = Agent(TestModel(custom_output_args={"weight_g": 5}), output_type=Parcel)
    result = await agent.run("weigh it")
    assert validate_structured(Parcel, result) == (True, {"weight_g": 5, "note": ""})


def test_an_instance_that_was_changed_since_is_checked_anew() -> None:
    parcel = Parcel(weight_g=5)
    parcel.weight_g = -1
    ok, detail = validate_structured(Parcel, parcel)
    assert not ok and detail == "weight_g: Input should be greater than 0"
    assert not validate_structured(Parcel, Parcel.model_construct(weight_g=CANARY))[0]


def test_an_instance_with_aliases_passes_its_own_check() -> None:
    class Wire(BaseModel):
        model_config = ConfigDict(extra="forbid")
        unit_price: int = Field(validation_alias="unitPrice", serialization_alias="price")

    assert validate_structured(Wire, Wire(unitPrice=3)) == (True, {"unit_price": 3})
    assert validate_structured(Wire, {"unitPrice": 3})[0]
    assert validate_structured(Wire, {"unit_price": 3})[0] is False


def test_json_types_are_read_as_json_even_by_a_strict_model() -> None:
    class Strict(BaseModel):
        model_config = ConfigDict(strict=True)
        day: date
        n: int

    assert validate_structured(Strict, '{"day": "2026-03-01", "n": 1}') == (
        True,
        {"day": "2026-03-01", "n": 1},
    )
    assert not validate_structured(Strict, '{"day": "2026-03-01", "n": "1"}')[0]


@dataclasses.dataclass
class Weighed:
    weight_g: int


@pytest.mark.parametrize(
    ("value", "ok"),
    [
        (Weighed(3), True),
        ({"weight_g": float("nan")}, False),
        ({"weight_g": 3, "note": "\ud800"}, False),
        ({"weight_g": 3, "note": "a\0b"}, False),
        ({"weight_g": object()}, False),
        ([], False),
        (None, False),
        (7, False),
    ],
)
def test_validate_structured_takes_nothing_that_a_reply_could_not_hold(
    value: Any, ok: bool
) -> None:
    assert validate_structured(Parcel, value)[0] is ok


def test_no_detail_repeats_a_value_a_key_or_a_validators_text() -> None:
    class Cat(BaseModel):
        kind: Literal["cat"]

    class Dog(BaseModel):
        kind: Literal["dog"]

    class Zoo(BaseModel):
        model_config = ConfigDict(extra="forbid")
        animal: Annotated[Cat | Dog, Field(discriminator="kind")] = Cat(kind="cat")
        limits: dict[str, int] = {}
        code: str = ""

        @field_validator("code")
        @classmethod
        def _code(cls, value: str) -> str:
            if value:
                raise ValueError(f"bad code {value}")
            return value

    bad = [
        {"animal": {"kind": CANARY}},
        {"limits": {CANARY: "x"}},
        {"limits": {"ok": CANARY}},
        {"code": CANARY},
        {CANARY: 1},
    ]
    for value in bad:
        ok, detail = validate_structured(Zoo, value)
        assert not ok and CANARY not in detail, detail
    assert validate_structured(Zoo, {"code": CANARY})[1] == "code: value_error"
    assert validate_structured(Zoo, {"limits": {CANARY: "x"}})[1].startswith("limits.*: ")


def test_several_mistakes_are_told_at_once_and_not_without_end() -> None:
    ok, detail = validate_structured(Parcel, {"weight_g": -1, "note": "n" * 50})
    assert not ok
    assert detail == (
        "weight_g: Input should be greater than 0; note: String should have at most 40 characters"
    )

    class Many(RootModel[list[int]]):
        pass

    detail = validate_structured(Many, ["x"] * 1_000)[1]
    assert detail.endswith("995 more") and len(detail) < 1_000


def test_a_validator_that_trips_over_a_hostile_value_is_a_refusal() -> None:
    class Named(BaseModel):
        name: str

        @field_validator("name")
        @classmethod
        def _second_word(cls, value: str) -> str:
            return value.split()[1]

    assert validate_structured(Named, {"name": CANARY}) == (False, "a validator raised IndexError")


def test_a_model_without_a_json_schema_is_usable() -> None:
    class Odd:
        pass

    class Holder(BaseModel):
        model_config = ConfigDict(arbitrary_types_allowed=True)
        n: int
        odd: Odd | None = None

    assert validate_structured(Holder, {"n": 1}) == (True, {"n": 1, "odd": None})
    assert validate_structured(Holder, {"n": "x"})[1].startswith("n: ")


# --- wiring ------------------------------------------------------------------------------------


@pytest.mark.parametrize("retries", [-1, 1.5, "2", True, None])
def test_retries_are_an_int_of_at_least_zero(retries: Any) -> None:
    with pytest.raises(AgentConfigError, match="retries must be an int >= 0"):
        structured_output(Parcel, retries=retries)


@pytest.mark.parametrize(
    "model",
    [
        "nowhere:Model",
        "json:JSONDecoder",
        "json",
        "json:",
        ":Parcel",
        f"{__name__}:Parcle",
        f"{__name__}:Parcel.Inner",
        "",
        int,
        {"type": "object"},
        Parcel(weight_g=1),
    ],
)
def test_an_output_model_that_cannot_be_resolved_is_refused_when_built(model: Any) -> None:
    for build in (
        lambda: structured_output(model),
        lambda: validate_structured(model, "{}"),
        lambda: agent_logic(FakeModel([]), output_model=model),
        lambda: _bound(model),
    ):
        with pytest.raises(AgentConfigError, match="output_model"):
            build()


def _bound(model: Any) -> Any:
    chart = load_chart()
    chart["states"]["awaiting_model"]["meta"]["output_model"] = model
    return create_machine(chart, agent_logic(FakeModel([])))


def test_the_state_with_the_wrong_path_is_named() -> None:
    with pytest.raises(AgentConfigError, match="awaiting_model.*nowhere:Model"):
        _bound("nowhere:Model")
    with pytest.raises(AgentConfigError, match="awaiting_model"):
        _bound(None)


def test_a_module_that_fails_to_import_is_a_wiring_mistake(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "guardchart_broken_forms.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(AgentConfigError, match="cannot be resolved") as caught:
        structured_output("guardchart_broken_forms:Model")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_model_with_an_undefined_type_is_a_wiring_mistake() -> None:
    class Later(BaseModel):
        other: NotThere  # type: ignore[name-defined]  # noqa: F821

    with pytest.raises(AgentConfigError, match="not defined yet"):
        structured_output(Later)


def test_a_path_is_imported_when_the_machine_is_built_and_never_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forms = types.ModuleType("guardchart_test_forms")
    forms.Parcel = Parcel  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "guardchart_test_forms", forms)
    script = [{"text": "{}"}, {"text": '{"weight_g": 1}'}]
    chart = load_chart()
    chart["states"]["awaiting_model"]["meta"]["output_model"] = "guardchart_test_forms:Parcel"
    machine = create_machine(chart, agent_logic(FakeModel(script, is_async=False)))
    monkeypatch.setitem(sys.modules, "guardchart_test_forms", None)
    result = run_agent_sync(machine, prompt="Weigh it.")
    assert result.output == {"weight_g": 1, "note": ""}


# --- in the loop -------------------------------------------------------------------------------


@pytest.mark.parametrize("parser", [json_parser(False), json_parser(True), None])
async def test_a_duplicate_key_is_asked_for_again_and_never_repaired(parser: Any) -> None:
    model = FakeModel([{"text": '{"weight_g": 1, "weight_g": 2}'}, {"text": '{"weight_g": 2}'}])
    result = await run_agent(model, prompt="x", output_model=Parcel, output_parser=parser)
    assert result.output == {"weight_g": 2, "note": ""}
    asked = model.calls[1]["messages"][-1]["content"]
    assert asked.startswith("RETRY_OUTPUT: ") and "duplicate key" in asked


async def test_a_refused_value_is_not_sent_back_as_an_error() -> None:
    model = FakeModel([{"text": f'{{"{CANARY}": -7123}}'}, {"text": '{"weight_g": 2}'}])
    await run_agent(model, prompt="x", **structured_output(Parcel, use_instructor=False))
    asked = model.calls[1]["messages"][-1]["content"]
    assert "weight_g: Field required" in asked and CANARY not in asked and "7123" not in asked


@pytest.mark.parametrize(
    "error", [KeyError("x"), TypeError("x"), RecursionError(), ValueError("x")]
)
async def test_a_parser_that_raises_is_a_refusal(error: Exception) -> None:
    def parse(text: str) -> Any:
        raise error

    model = FakeModel([{"text": "{}"}])
    result = await run_agent(
        model, prompt="x", output_model=Parcel, output_parser=parse, max_output_retries=0
    )
    assert result.error == {
        "kind": "output",
        "message": "model output failed validation (not valid JSON)",
    }


async def test_a_parser_of_the_hosts_is_used_as_it_is() -> None:
    def pairs(text: str) -> Any:
        return dict(each.split("=") for each in text.split(";"))

    model = FakeModel([{"text": "weight_g=12;note=soft"}])
    result = await run_agent(model, prompt="x", output_model=Parcel, output_parser=pairs)
    assert result.output == {"weight_g": 12, "note": "soft"}


async def test_exhaustion_writes_no_result_and_keeps_none_of_an_earlier_one() -> None:
    first = await run_agent(
        FakeModel([{"text": '{"weight_g": 1}'}]), prompt="x", output_model=Parcel
    )
    again = await run_agent(
        FakeModel([{"text": '{"weight_g": 0}'}]),
        prompt="y",
        snapshot=first.snapshot,
        **structured_output(Parcel, retries=0),
    )
    assert again.error is not None and again.error["kind"] == "output"
    assert again.output is None and again.context["result"] is None


def _form(state: str, schema: Any, target: str) -> dict[str, Any]:
    return {
        "meta": {"output_model": schema},
        "invoke": {
            "src": "callModel",
            "onDone": [
                {
                    "guard": "outputValid",
                    "target": target,
                    "actions": ["recordModelResponse", "storeResult", "keep"],
                },
                {
                    "guard": "canRetryOutput",
                    "target": state,
                    "reenter": True,
                    "actions": ["recordModelResponse", "retryOutput"],
                },
                {"target": "error", "actions": ["recordModelResponse", "failOutput"]},
            ],
        },
    }


class Sender(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str = Field(min_length=1)


@pytest.mark.parametrize("by_path", [True, False], ids=["path", "class"])
async def test_each_state_holds_the_reply_to_its_own_schema(by_path: bool) -> None:
    schemas: list[Any] = (
        [f"{__name__}:Sender", f"{__name__}:Parcel"]
        if by_path
        else [
            Sender,
            Parcel,
        ]
    )
    chart = {
        "id": "post",
        "initial": "sender",
        "context": {"messages": [], "kept": {}, "turns": 0, "task": "Post it"},
        "states": {
            "sender": _form("sender", schemas[0], "parcel"),
            "parcel": _form("parcel", schemas[1], "done"),
            "done": {"type": "final"},
            "error": {"type": "final"},
        },
    }
    keep = MachineLogic(
        actions={"keep": lambda context, event: {"kept": {**context["kept"], **context["result"]}}}
    )
    model = FakeModel(
        [
            {"text": '{"name": "Ann", "weight_g": 5}'},  # the parcel's field, too early
            {"text": '{"name": "Ann"}'},
            {"text": '{"name": "Ann"}'},  # the sender's field, too late
            {"text": '{"weight_g": 5}'},
        ]
    )
    logic = agent_logic(model, **structured_output(retries=2)).merge(keep)
    result = await run_agent(create_machine(chart, logic))
    assert result.final_state == "post.done" and result.usage["turns"] == 4
    assert result.context["kept"] == {"name": "Ann", "weight_g": 5, "note": ""}
    assert result.context["output_retries"] == 2


async def test_a_nested_state_takes_the_schema_of_the_nearest_ancestor() -> None:
    chart: dict[str, Any] = {
        "id": "post",
        "initial": "outer",
        "context": {"messages": [], "kept": {}, "turns": 0, "task": "Post it"},
        "states": {
            "outer": {
                "meta": {"output_model": Parcel},
                "initial": "inner",
                "states": {"inner": _form("inner", None, "#done")},
            },
            "done": {"type": "final", "id": "done"},
        },
    }
    inner = chart["states"]["outer"]["states"]["inner"]
    del inner["meta"]
    inner["invoke"]["onDone"] = inner["invoke"]["onDone"][:2]
    keep = MachineLogic(actions={"keep": lambda context, event: None})
    model = FakeModel([{"text": '{"name": "Ann"}'}, {"text": '{"weight_g": 5}'}])
    logic = agent_logic(model, output_model=Sender).merge(keep)
    result = await run_agent(create_machine(chart, logic))
    assert result.output == {"weight_g": 5, "note": ""}
