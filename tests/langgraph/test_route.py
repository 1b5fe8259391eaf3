"""`route_by_statechart`: which node follows the active state."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import pytest
from langgraph.graph import END, START, StateGraph

from guardchart.errors import AgentConfigError
from guardchart.kernel import create_machine
from guardchart.langgraph import route_by_statechart

CHART: dict[str, Any] = {
    "id": "order",
    "initial": "open",
    "states": {
        "open": {
            "initial": "new",
            "states": {
                "new": {"on": {"PAY": "paid"}},
                "paid": {"tags": ["waiting"], "on": {"SHIP": "#order.closed"}},
            },
        },
        "closed": {"type": "final"},
    },
}
PARALLEL: dict[str, Any] = {
    "id": "p",
    "type": "parallel",
    "states": {
        "a": {"initial": "a1", "states": {"a1": {"initial": "deep", "states": {"deep": {}}}}},
        "b": {"initial": "b1", "states": {"b1": {}}},
    },
}


def at(*ids: str) -> dict[str, Any]:
    return {"xsm": {"state_ids": sorted(ids)}}


def test_router_takes_full_ids_keys_and_ancestors_and_prefers_the_deepest() -> None:
    router = route_by_statechart(CHART, {"order.open": "work", "paid": "pack", "closed": END})
    assert router(at("order.open.new")) == "work"
    assert router(at("order.open.paid")) == "pack"
    assert router(at("order.closed")) == END


def test_router_prefers_a_full_id_to_a_key_that_reads_the_same() -> None:
    chart: dict[str, Any] = {
        "id": "m",
        "initial": "a",
        "states": {"a": {"id": "b"}, "b": {"id": "c"}},
    }
    router = route_by_statechart(chart, {"b": "by_id", "c": "other"})
    assert router(at("b")) == "by_id" and router(at("c")) == "other"


def test_router_prefers_the_deepest_state_over_parallel_regions() -> None:
    router = route_by_statechart(PARALLEL, {"a": "left", "deep": "deepest", "b1": "right"})
    assert router(at("p.a.a1.deep", "p.b.b1")) == "deepest"
    router = route_by_statechart(PARALLEL, {"a1": "left", "b1": "right"})
    assert router(at("p.a.a1.deep", "p.b.b1")) == "left", "equally deep ones go by sorted id"


@pytest.mark.parametrize("form", [dict, json.dumps, create_machine], ids=["dict", "text", "built"])
def test_router_takes_a_chart_in_any_form(form: Any) -> None:
    assert route_by_statechart(form(CHART), {}, default="n")(at("order.open.new")) == "n"


def test_router_takes_the_path_of_a_chart(tmp_path: Path) -> None:
    path = tmp_path / "chart.json"
    path.write_text(json.dumps(CHART))
    assert route_by_statechart(path, {}, default="n")(at("order.closed")) == "n"


def test_router_reads_snapshots_as_text_and_states_by_attribute() -> None:
    @dataclass
    class State:
        other: Any = None

    router = route_by_statechart(CHART, {}, default="n", state_key="other")
    assert router({"other": json.dumps({"state_ids": ["order.closed"]})}) == "n"
    assert router(State({"state_ids": ["order.closed"]})) == "n"


@pytest.mark.parametrize(
    ("mapping", "says"),
    [
        ({"nowhere": "n", "closed": END, "paid": "n"}, "'nowhere' names no state"),
        ({"order": "n"}, "'order' names the root"),
        ({"open": "n"}, "no route for .'order.closed'., where the chart can rest"),
        ({"closed": END}, "no route for .'order.open.paid'., where the chart can rest"),
        ({}, "the mapping is empty"),
        ({"open": "n", "closed": 7}, "a route leads to a node's name"),
    ],
)
def test_router_is_refused_at_build_when_a_mapping_is_wrong(
    mapping: dict[str, Any], says: str
) -> None:
    with pytest.raises(AgentConfigError, match=says):
        route_by_statechart(CHART, mapping)


def test_router_raises_when_an_active_state_has_no_route() -> None:
    router = route_by_statechart(CHART, {"paid": "pack", "closed": END})
    with pytest.raises(AgentConfigError, match=r"route_by_statechart\('order'\): no route for"):
        router(at("order.open.new"))


@pytest.mark.parametrize("ids", [["order.evil"], ["order"], ["order.open.paid", "x"]])
def test_router_raises_without_repeating_it_when_a_state_is_not_the_charts(ids: list[str]) -> None:
    router = route_by_statechart(CHART, {"closed": END}, default="fallback")
    if ids == ["order"]:
        assert router(at(*ids)) == "fallback"
        return
    with pytest.raises(AgentConfigError, match="does not have") as caught:
        router(at(*ids))
    assert "evil" not in str(caught.value)


@pytest.mark.parametrize(
    "value", [None, {}, "", [], "nope", {"state_ids": []}, {"state_ids": "order.closed"},
              {"state_ids": [1]}, {"value": "closed"}]
)  # fmt: skip
def test_router_raises_when_there_is_no_snapshot(value: Any) -> None:
    router = route_by_statechart(CHART, {"closed": END}, default="fallback")
    with pytest.raises(AgentConfigError):
        router({"xsm": value})


class State(TypedDict, total=False):
    xsm: dict[str, Any]
    seen: list[str]


def graph(router: Any) -> Any:
    builder = StateGraph(State)
    builder.add_node("agent", lambda state: {"xsm": {"state_ids": ["order.open.paid"]}})
    builder.add_node("pack", lambda state: {"seen": ["pack"]})
    builder.add_node("other", lambda state: {"seen": ["other"]})
    builder.add_edge(START, "agent")
    builder.add_conditional_edges("agent", router)
    return builder.compile()


async def test_router_works_in_a_graph_and_keeps_its_edges_in_drawings() -> None:
    router = route_by_statechart(CHART, {"paid": "pack", "closed": END})
    app = graph(router)
    assert app.invoke({})["seen"] == ["pack"]
    assert (await app.ainvoke({}))["seen"] == ["pack"]
    edges = {(e.source, e.target) for e in app.get_graph().edges if e.conditional}
    assert edges == {("agent", "pack"), ("agent", "__end__")}
    assert router.path_map == {"pack": "pack", END: END}


def test_two_routers_of_one_chart_have_names_of_their_own() -> None:
    names = {
        route_by_statechart(CHART, {}, default="n").name,
        route_by_statechart(CHART, {}, default="n", state_key="y").name,
    }
    assert len(names) == 2
