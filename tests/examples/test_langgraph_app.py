"""examples/langgraph_app as ``langgraph dev`` takes it: its file, its graphs, what Studio asks for.

The graphs are imported by path, as the server does it, and get a saver by the configuration.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.pregel import Pregel
from langgraph.types import Command

from guardchart.langgraph import pending_approval

APP = Path(__file__).resolve().parents[2] / "examples" / "langgraph_app"
PROMPT = "Refund order 7, please."

pytestmark = [
    pytest.mark.needs_src,
    pytest.mark.skipif(not APP.is_dir(), reason="the examples are not here"),
]


def graphs() -> dict[str, str]:
    named: dict[str, str] = json.loads((APP / "langgraph.json").read_text())["graphs"]
    return named


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Each graph that the file names, loaded from its path under a name made of the path."""
    found = {}
    for name, spec in graphs().items():
        path, _, variable = spec.partition(":")
        module_name = path.replace("/", "__").replace(".py", "").lstrip(".")
        made = importlib.util.spec_from_file_location(module_name, APP / path)
        assert made is not None and made.loader is not None
        module = importlib.util.module_from_spec(made)
        monkeypatch.setitem(sys.modules, module_name, module)
        made.loader.exec_module(module)
        found[name] = module.__dict__[variable]
    yield found


def kept(graph: Any, saver: Any) -> Any:
    """The graph with the server's saver."""
    return graph.copy(update={"checkpointer": saver})


def test_the_file_is_one_that_the_cli_accepts() -> None:
    cli = pytest.importorskip("langgraph_cli.config", reason="a dependency of development")
    config = cli.validate_config_file(APP / "langgraph.json")
    assert config["graphs"] == graphs() and set(graphs()) == {"refunds", "chat"}


def test_each_graph_is_compiled_and_brings_no_saver_or_store(served: dict[str, Any]) -> None:
    for graph in served.values():
        assert isinstance(graph, Pregel) and graph.store is None
        assert not isinstance(graph.checkpointer, BaseCheckpointSaver)


def test_each_graph_is_drawn_with_the_tasks_of_the_chart(served: dict[str, Any]) -> None:
    plain = set(served["refunds"].get_graph().nodes)
    assert plain == {"__start__", "step", "model", "tools", "approval", "timer", "__end__"}
    assert "step -.-> approval;" in served["refunds"].get_graph().draw_mermaid()
    assert set(served["chat"].get_graph().nodes) == {"__start__", "listen", "agent", "__end__"}
    deep = set(served["chat"].get_graph(xray=True).nodes)
    assert {f"agent:{task}" for task in ("step", "model", "tools", "approval")} <= deep


def test_what_studio_asks_about_a_graph_has_a_json_schema(served: dict[str, Any]) -> None:
    for graph in served.values():
        for schema in (graph.get_input_jsonschema(), graph.get_output_jsonschema()):
            assert json.loads(json.dumps(schema)) == schema
            assert set(schema["properties"]) == {"xsm", "event", "messages"}
        json.dumps(graph.get_context_jsonschema())
        # The server makes the schema of the whole state from the channels.
        for key in graph.stream_channels_list:
            assert graph.channels[key].UpdateType is not None


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("name", ["refunds", "chat"])
async def test_a_turn_pauses_for_a_person_and_goes_on(
    served: dict[str, Any], name: str, kind: str
) -> None:
    graph = kept(served[name], InMemorySaver())
    config = {"configurable": {"thread_id": "t1"}}

    async def run(value: Any) -> Any:
        if kind == "async":
            return await graph.ainvoke(value, config)
        return await asyncio.to_thread(graph.invoke, value, config)

    def said(text: str) -> dict[str, Any]:
        if name == "chat":
            return {"messages": [{"role": "user", "content": text}]}
        return {"event": {"type": "START", "prompt": text}}

    for _ in range(2):  # a thread holds many turns
        await run(said(PROMPT))
        (call,) = pending_approval(graph, config)
        assert call["arguments"] == {"order_id": 7, "amount_cents": 2500}
        decided = {"id": call["id"], "digest": call["digest"], "decision": "approve"}
        out = await run(Command(resume={"decisions": [decided]}))
        assert out["messages"][-1].content == "refunded 2500 cents of order 7"
    assert [each.content for each in out["messages"]].count(PROMPT) == 2
    # New input while a person is asked closes the question.
    await run(said(PROMPT))
    out = await run(said("hello"))
    assert out["messages"][-1].content == "Which order is it about?"
    assert pending_approval(graph, config) == []
