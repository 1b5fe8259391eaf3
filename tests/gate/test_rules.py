from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from guardchart.errors import AgentConfigError
from guardchart.gate import (
    allowed_in_all,
    allowed_tools,
    as_allowed,
    tool_registry,
    validate_tools,
)


def node(ident: str, tools: Any = None, parent: Any = None) -> Any:
    meta = {} if tools is None else {"tools": tools}
    return SimpleNamespace(id=ident, meta=meta, parent=parent)


def a(x: int) -> str:
    return ""


def b(x: int) -> str:
    return ""


REGISTRY = tool_registry(a, b)
ROOT = node("m", ["a", "b"])


def test_the_nearest_declaring_state_decides_alone() -> None:
    middle = node("m.s", ["a"], ROOT)
    leaf = node("m.s.t", None, middle)
    assert allowed_tools(leaf).names(REGISTRY) == ("a",)
    assert allowed_tools(node("m.u", None, ROOT)).names(REGISTRY) == ("a", "b")
    assert allowed_tools(node("m.v", [], ROOT)).names(REGISTRY) == ()


def test_no_declaration_and_no_state_permit_nothing() -> None:
    assert allowed_tools(node("x")).names(REGISTRY) == ()
    assert allowed_tools(None).names(REGISTRY) == ()
    assert allowed_in_all([]).names(REGISTRY) == ()


def test_star_is_every_registered_tool_and_nothing_else() -> None:
    allowed = allowed_tools(node("m", ["*"]))
    assert allowed.everything
    assert allowed.names(REGISTRY) == ("a", "b")
    assert as_allowed("*") == as_allowed(["*"]) == allowed


def test_parallel_regions_are_intersected_for_a_door_without_a_state() -> None:
    left, right = node("m.l", ["a", "b"]), node("m.r", ["b"])
    assert allowed_in_all([left, right]).names(REGISTRY) == ("b",)
    assert allowed_in_all([left, node("m.r", ["*"])]).names(REGISTRY) == ("a", "b")
    assert allowed_in_all([left, node("m.r")]).names(REGISTRY) == ()


def test_a_region_does_not_lend_its_tools_to_its_sibling() -> None:
    root = node("m", ["a"])
    assert allowed_tools(node("m.r", None, root)).names(REGISTRY) == ("a",)
    assert allowed_tools(node("m.l", ["b"], root)).names(REGISTRY) == ("b",)


@pytest.mark.parametrize("bad", ["a", 1, {"a": 1}, [1], [None], [["a"]], True])
def test_what_is_no_list_of_names_is_a_config_error(bad: Any) -> None:
    with pytest.raises(AgentConfigError, match="list of tool names"):
        allowed_tools(node("m.s", bad))


def test_rule_objects_are_refused_until_they_are_kept() -> None:
    with pytest.raises(AgentConfigError, match="rule objects are not supported"):
        allowed_tools(node("m.s", ["a", {"name": "b", "approval": "never"}]))


def test_an_unknown_name_in_a_chart_is_a_config_error_that_names_the_state() -> None:
    machine = SimpleNamespace(nodes={"m.s": node("m.s", ["a", "typo"])})
    with pytest.raises(
        AgentConfigError,
        match=r"state 'm\.s': meta\.tools lists 'typo', which is not in the tool registry",
    ):
        validate_tools(machine, REGISTRY)
    validate_tools(SimpleNamespace(nodes={"m": ROOT, "x": node("x")}), REGISTRY)


def test_names_of_an_allow_list_must_be_an_iterable_of_text() -> None:
    assert as_allowed(None).names(REGISTRY) == ()
    assert as_allowed({"a"}).names(REGISTRY) == ("a",)
    assert as_allowed(n for n in ["b"]).names(REGISTRY) == ("b",)
    with pytest.raises(AgentConfigError):
        as_allowed("a")
    with pytest.raises(AgentConfigError):
        as_allowed(3)
