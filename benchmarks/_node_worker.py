"""Measures one library's LangGraph node; run by `benchmarks.node`, in that library's environment.

Reads one JSON request a line, ``{"case": ..., "rounds": n}``, and answers each with one line,
``{"ratio": ..., "pairs": ..., "noop_us": ..., "node_us": ...}``. ``ratio`` compares the medians of
the two graphs' CPU times in this process, their invocations taking turns; ``pairs`` is the median
of the ratios of one turn each. Garbage is collected before every sample, of either graph, so that
none pays for what the other left; what the set-up made is frozen before, so that a collection
does not walk through it. What the collector does within a sample counts.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from operator import truediv
from typing import Annotated, Any, TypedDict

from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import add_messages

HELD = 199
ANSWER = "It is on its way."


class State(TypedDict, total=False):
    """The state of a small support graph."""

    xsm: dict[str, Any]
    question: str


class Talk(State, total=False):
    """The same, with the conversation in a channel of its own."""

    messages: Annotated[list[Any], add_messages]


def _event(state: Any) -> dict[str, Any]:
    return {"type": "START", "prompt": state["question"]}


def conversation() -> list[dict[str, Any]]:
    """Return the messages that a long-lived thread holds already."""
    return [
        {
            "role": "user" if n % 2 == 0 else "assistant",
            "content": f"message {n}: what of order {n}?",
        }
        for n in range(HELD)
    ]


def _ours(with_channel: bool, bounded: bool = True) -> tuple[Any, dict[str, Any]]:
    from guardchart.agents import FakeModel, agent_logic, load_chart, tool_registry
    from guardchart.kernel import create_machine, dump, initial_transition
    from guardchart.langgraph import statechart_node

    def lookup(order_id: int) -> str:
        """Look up an order."""
        return f"order {order_id}: shipped"

    model = FakeModel([{"text": ANSWER}] * 100_000, is_async=False)
    # As a provider's model, which promises no end: the call moves to a worker thread.
    model.bounded = bounded
    machine = create_machine(load_chart(), agent_logic(model, tool_registry(lookup)))
    node = statechart_node(
        machine, event_from_state=_event, messages_key="messages" if with_channel else None
    )
    return node, dump(initial_transition(machine)[0])


def _peer() -> tuple[Any, dict[str, Any]]:
    from xstate_statemachine import SyncInterpreter, create_machine  # type: ignore[import-not-found]
    from xstate_statemachine.contrib.agents import (  # type: ignore[import-not-found]
        FakeModel,
        agent_logic,
        load_chart,
        tool_registry,
    )
    from xstate_statemachine.contrib.agents.langgraph import (  # type: ignore[import-not-found]
        statechart_node,
    )

    def lookup(order_id: int) -> str:
        """Look up an order."""
        return f"order {order_id}: shipped"

    model = FakeModel([{"text": ANSWER}] * 100_000, is_async=False)
    logic = agent_logic(model, tool_registry(lookup))
    interpreter = SyncInterpreter(create_machine(load_chart(), logic=logic)).start()
    snapshot = json.loads(interpreter.get_snapshot())
    interpreter.stop()
    return statechart_node(load_chart(), logic, event_from_state=_event), snapshot


def _graph(schema: Any, node: Any) -> Any:
    graph = StateGraph(schema)
    graph.add_node("agent", node)
    graph.add_edge(START, "agent")
    graph.add_edge("agent", END)
    return graph.compile(checkpointer=InMemorySaver())


def _case(library: str, case: str) -> tuple[Any, Any, dict[str, Any]]:
    """Return the no-op's graph, the node's, and what a thread holds before the measured call."""
    channel = case == "channel"
    node, idle = _ours(channel, case != "worker") if library == "guardchart" else _peer()
    schema = Talk if channel else State
    held: dict[str, Any] = {}
    if case == "snapshot":
        idle["context"] = {**idle["context"], "messages": conversation()}
        held = {"xsm": idle}
    elif channel:
        held = {"messages": conversation()}
    return _graph(schema, lambda state: {}), _graph(schema, node), held


def _measure(app: Any, thread: str, held: dict[str, Any], proof: bool) -> float:
    config = {"configurable": {"thread_id": thread}}
    if held:
        app.update_state(config, held)
    gc.collect()
    start = time.process_time()
    result = app.invoke({"question": "Where is order 42?"}, config)
    spent = time.process_time() - start
    if proof and result["xsm"]["state_ids"] != ["toolLoop.done"]:
        raise SystemExit(f"the node did not finish: {result['xsm']['state_ids']}")
    return spent


def measure(library: str, case: str, rounds: int) -> dict[str, float]:
    """Measure one case; see the module."""
    noop, node, held = _case(library, case)
    gc.collect()
    gc.freeze()
    spent: dict[str, list[float]] = {"noop": [], "node": []}
    for n in range(rounds + 5):
        a = _measure(noop, f"n{n}", held, proof=False)
        b = _measure(node, f"n{n}", held, proof=True)
        if n >= 5:  # the first ones warm caches up
            spent["noop"].append(a)
            spent["node"].append(b)
    noop_s, node_s = statistics.median(spent["noop"]), statistics.median(spent["node"])
    return {
        "ratio": node_s / noop_s,
        "pairs": statistics.median(map(truediv, spent["node"], spent["noop"])),
        "noop_us": noop_s * 1e6,
        "node_us": node_s * 1e6,
    }


def measure_check(rounds: int) -> dict[str, float]:
    """Measure the gate's `check` on a call of five arguments against pydantic alone."""
    from guardchart.gate import Facts, ToolCall, as_allowed, check, tool_registry

    def book(name: str, nights: int, price_cents: int, breakfast: bool, note: str) -> str:
        """Book a room."""
        return name

    registry = tool_registry(book)
    arguments = {
        "name": "Ann",
        "nights": 3,
        "price_cents": 12_000,
        "breakfast": True,
        "note": "late arrival",
    }
    call, text = ToolCall("c1", "book", arguments), json.dumps(arguments)
    facts = Facts(registry, as_allowed(["book"]))
    model = registry.get("book").args_model  # type: ignore[union-attr]
    bare = _each(lambda: model.model_validate_json(text), rounds)
    checked = _each(lambda: check(call, facts), rounds)
    return {"ratio": checked / bare, "noop_us": bare * 1e6, "node_us": checked * 1e6}


def _each(function: Callable[[], Any], rounds: int, calls: int = 200) -> float:
    best = []
    for _ in range(rounds):
        start = time.process_time()
        for _ in range(calls):
            function()
        best.append((time.process_time() - start) / calls)
    return statistics.median(best)


def main() -> None:
    """Answer requests until the input ends."""
    library = sys.argv[1]
    for line in sys.stdin:
        request = json.loads(line)
        if request["case"] == "check":
            answer = measure_check(request["rounds"])
        else:
            answer = measure(library, request["case"], request["rounds"])
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
