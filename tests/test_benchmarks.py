"""A benchmark that no longer runs would be noticed by nobody: each case of ours, once."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

pytestmark = [
    pytest.mark.needs_src,
    pytest.mark.skipif(not (ROOT / "benchmarks").is_dir(), reason="the benchmarks are not here"),
]


@pytest.mark.parametrize("case", ["rounds:2", "held"])
def test_the_loop_benchmark_measures_what_it_says(case: str) -> None:
    from benchmarks._loop_worker import measure

    assert measure("guardchart", case, 1) > 0


@pytest.mark.parametrize("langchain", [False, True], ids=["functions", "langchain"])
@pytest.mark.parametrize("kind", ["answer", "tool", "approval"])
def test_the_graphs_that_are_compared_say_the_same_in_as_many_supersteps(
    kind: str, langchain: bool
) -> None:
    from langgraph.checkpoint.memory import InMemorySaver

    from benchmarks._graph_rows import GraphRow, measure
    from benchmarks._task_graphs import KINDS, by_hand, of_chart, talk

    said = []
    for make, chart in ((of_chart, True), (by_hand, False)):
        app = make(KINDS[kind], InMemorySaver(), langchain=langchain)
        thread = {"configurable": {"thread_id": "t"}}
        for _ in range(2):
            out = talk(app, KINDS[kind], thread, chart=chart)
        said.append([(m.type, m.content, getattr(m, "tool_calls", None)) for m in out["messages"]])
    assert said[0] == said[1]
    assert (
        measure(GraphRow(kind, "SqliteSaver", 0, langchain, 1.3), 1).supersteps
        == {
            "answer": 3,
            "tool": 7,
            "approval": 9,
        }[kind]
    )
