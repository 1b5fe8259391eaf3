from __future__ import annotations

import copy
import math
from typing import Any

import pydantic
import pytest

from guardchart.errors import AgentConfigError, ToolDeniedError
from guardchart.gate import (
    ALL_TOOLS,
    DEFAULT_MAX_OUTPUT_CHARS,
    DEFAULT_TOOL_TIMEOUT_S,
    ToolCall,
    tool,
    tool_registry,
)


def look(q: str) -> str:
    """Look something up."""
    return q


def pay(amount: int) -> str:
    """Pay."""
    return str(amount)


def test_defaults_of_a_registry_reach_tools_that_say_nothing() -> None:
    registry = tool_registry(look, tool(pay, timeout_s=5, side_effect=True))
    assert DEFAULT_TOOL_TIMEOUT_S == 30.0
    assert DEFAULT_MAX_OUTPUT_CHARS == 4000
    found = {t.name: (t.timeout_s, t.side_effect) for t in registry}
    assert found == {"look": (30.0, False), "pay": (5.0, True)}
    strict = tool_registry(look, tool(pay, side_effect=False), timeout_s=2, side_effect=True)
    assert {t.name: (t.timeout_s, t.side_effect) for t in strict} == {
        "look": (2.0, True),
        "pay": (2.0, False),
    }


def test_a_registry_does_not_change_the_tools_it_is_given() -> None:
    made = tool(look)
    tool_registry(made, timeout_s=1, side_effect=True)
    assert made.timeout_s == DEFAULT_TOOL_TIMEOUT_S
    assert not made.side_effect


@pytest.mark.parametrize("bad", [0, -1, -0.0, math.nan, math.inf, True, "5", 10**400])
def test_a_timeout_that_is_not_above_zero_is_refused(bad: Any) -> None:
    with pytest.raises(AgentConfigError, match="timeout_s"):
        tool(look, timeout_s=bad)
    with pytest.raises(AgentConfigError, match="timeout_s"):
        tool_registry(look, timeout_s=bad)


NAMES = {
    "star": ALL_TOOLS,
    "empty": "",
    "cyrillic": "р\u0430y",
    "zero width": "pa\u200by",
    "newline": "pay\n",
    "space": "pay ",
    "slash": "a/b",
    "long": "a" * 65,
    "very long": "a" * 10_000,
    "fullwidth": "ｐay",
}


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES.keys())
def test_a_name_that_is_no_ascii_identifier_is_refused(name: str) -> None:
    with pytest.raises(AgentConfigError):
        tool(pay, name=name)


def test_names_with_dots_and_dashes_are_fine() -> None:
    assert tool(pay, name="mcp.server-1_pay").name == "mcp.server-1_pay"


@pytest.mark.parametrize("thing", [3, "look", None, [look], dict, int])
def test_what_is_not_a_function_is_not_a_tool(thing: Any) -> None:
    with pytest.raises(AgentConfigError, match="not a tool"):
        tool_registry(thing)


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(AgentConfigError, match="two tools are named 'look'"):
        tool_registry(look, tool(pay, name="look"))


def test_a_registry_is_asked_by_exact_name() -> None:
    registry = tool_registry(look, pay)
    assert len(registry) == 2
    assert "look" in registry
    assert "Look" not in registry
    assert registry.get("look ") is None
    assert registry.expand("*") == registry.expand(["*"]) == ("look", "pay")
    assert registry.expand(["pay"]) == ("pay",)
    with pytest.raises(AgentConfigError, match="'nope' is not in the tool registry"):
        registry.expand(["nope"])


def test_schemas_are_those_of_allowed_tools_only() -> None:
    registry = tool_registry(look, pay)
    assert [s["name"] for s in registry.schemas()] == ["look", "pay"]
    assert [s["name"] for s in registry.schemas(["pay"])] == ["pay"]
    assert registry.schemas([]) == []
    (schema,) = registry.schemas(["look"])
    assert schema == {
        "name": "look",
        "description": "Look something up.",
        "parameters": {
            "type": "object",
            "properties": {"q": {"type": "string"}},
            "required": ["q"],
            "additionalProperties": False,
        },
    }


def test_output_is_cut_with_a_visible_marker() -> None:
    registry = tool_registry(look, max_output_chars=10)
    assert registry.truncate("x" * 10) == "x" * 10
    assert registry.truncate("x" * 13) == "x" * 10 + "... [truncated 3 characters]"


def test_authorise_of_a_registry_rehearses_every_check() -> None:
    registry = tool_registry(look, tool(pay, side_effect=True))
    call = ToolCall("c1", "pay", {"amount": 1})
    with pytest.raises(ToolDeniedError, match="human approval"):
        registry.authorise(call, ["pay"])
    assert registry.authorise(call, ["pay"], ["c1"]) == {"amount": 1}
    with pytest.raises(ToolDeniedError, match=r"not in this state.s meta\.tools allow-list"):
        registry.authorise(call, ["look"], ["c1"])
    with pytest.raises(ToolDeniedError, match="human approval"):
        registry.authorise(call, ["pay"], ["C1", "c1 "])


def test_a_tool_cannot_be_called_by_itself() -> None:
    assert not callable(tool(pay))


def test_registries_can_be_joined() -> None:
    assert tool_registry(tool_registry(look), pay).names == ("look", "pay")


def test_a_tool_call_is_plain_and_comparable() -> None:
    call = ToolCall("a", "pay", {"amount": 1})
    assert copy.deepcopy(call) == call
    assert ToolCall("a", "pay") == ToolCall("a", "pay", {})


@pytest.mark.parametrize("kind", [pydantic.SecretStr, list[pydantic.SecretBytes]])
def test_a_parameter_that_hides_its_value_is_refused(kind: Any) -> None:
    def login(password: Any) -> str:
        """Log in."""
        return "in"

    login.__annotations__["password"] = kind
    with pytest.raises(AgentConfigError, match="SecretStr or SecretBytes"):
        tool(login)
