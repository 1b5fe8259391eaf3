"""The trace: every call and step once, with its cost, without what anybody said."""

from __future__ import annotations

import asyncio
import gc
import io
import json
import logging
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest

from guardchart import MachineLogic, SimulatedClock, create_machine
from guardchart.agents import (
    AgentConfigError,
    AgentTracePlugin,
    FakeModel,
    Generated,
    ModelResponse,
    Usage,
    agent_logic,
    agent_sources,
    run_agent,
    run_agent_sync,
    tool,
    tool_registry,
)
from guardchart.persistence import InMemoryLedger
from tests.agents.loops import AT_ONCE, Loops, allowing, balance, pay, say, turn

SECRET = "sk-live-4242424242424242"
USED = {"input_tokens": 10, "output_tokens": 4, "cost_usd": 0.5}


def kinds(trace: AgentTracePlugin) -> list[str]:
    return [each["kind"] for each in trace.records]


def of(trace: AgentTracePlugin, kind: str) -> list[dict[str, Any]]:
    return [each for each in trace.records if each["kind"] == kind]


async def test_a_run_is_traced_from_start_to_end(loops: Loops) -> None:
    trace = AgentTracePlugin()
    script = [balance(usage=USED), say(usage=USED)]
    loop = await loops.start(script, plugins=[trace])
    await loop.ask()
    assert loop.state == "done"
    assert kinds(trace) == [
        "agent_start",
        "transition",
        "transition",
        "model_call",
        "transition",
        "tool_call",
        "transition",
        "model_call",
        "transition",
        "agent_end",
    ]
    moves = [(each["event"], each["state"]) for each in of(trace, "transition")]
    assert moves[0] == ("xstate.init", ["toolLoop.idle"])
    assert moves[1] == ("START", ["toolLoop.awaiting_model"])
    assert moves[2][1] == ["toolLoop.awaiting_tool"]
    assert moves[-1][1] == ["toolLoop.done"]
    for each in trace.records:
        assert each["agent_id"] == "toolLoop" and each["parent_id"] is None
        assert each["trace_id"] == loop.interp.host.run
        assert each["gen_ai.conversation.id"] == "ticket-1"


async def test_calls_have_the_names_of_the_genai_conventions(loops: Loops) -> None:
    trace = AgentTracePlugin()
    loop = await loops.start([balance(usage=USED), say()], plugins=[trace])
    await loop.ask()
    asked, ran = of(trace, "model_call")[0], of(trace, "tool_call")[0]
    assert asked["gen_ai.operation.name"] == "chat"
    assert asked["gen_ai.request.model"] == asked["gen_ai.response.model"] == "fake"
    assert asked["gen_ai.usage.input_tokens"] == 10
    assert asked["gen_ai.usage.output_tokens"] == 4
    assert asked["cost_usd"] == 0.5
    assert asked["gen_ai.response.tool_calls"] == ["balance"]
    assert asked["duration_s"] >= 0 and len(asked["span_id"]) == 16
    assert ran["gen_ai.operation.name"] == "execute_tool"
    assert ran["gen_ai.tool.name"] == "balance" and ran["gen_ai.tool.type"] == "function"
    assert ran["outcome"] == "done" and ran["entered"] is True
    start = of(trace, "agent_start")[0]
    assert asked["parent_span_id"] == ran["parent_span_id"] == start["span_id"]
    end = of(trace, "agent_end")[0]
    assert end["status"] == "done"
    assert end["usage"] == {"turns": 2, "input_tokens": 10, "output_tokens": 4, "cost_usd": 0.5}


@pytest.mark.parametrize("how", ["plugin", "tracer", "both"])
async def test_however_it_is_attached_a_call_is_written_once(loops: Loops, how: str) -> None:
    trace = AgentTracePlugin()
    options: dict[str, Any] = {}
    if how != "tracer":
        options["plugins"] = [trace]
    if how != "plugin":
        options["tracer"] = trace
    loop = await loops.start([turn(balance("a1"), balance("a2")), say()], **options)
    await loop.ask()
    assert len(of(trace, "model_call")) == 2 and len(of(trace, "tool_call")) == 2
    assert bool(of(trace, "transition")) == (how != "tracer")
    assert trace.totals()["total"]["turns"] == 2


# What is never written


CONTENT = ("the customer's diary", "the model's answer", "an argument of a tool", "tool says")


def diary_tools() -> Any:
    def note(text: str) -> str:
        """Take a note."""
        return f"tool says {text} {SECRET}"

    return tool_registry(note)


async def test_nothing_that_anybody_said_is_recorded_by_default(loops: Loops) -> None:
    stream = io.StringIO()
    trace = AgentTracePlugin(stream)
    script = [
        {"tool": "note", "args": {"text": CONTENT[2]}},
        say(CONTENT[1]),
    ]
    loop = await loops.start(script, tools=diary_tools(), plugins=[trace])
    await loop.ask(CONTENT[0])
    assert loop.state == "done"
    written = stream.getvalue()
    assert "note" in written
    for each in (*CONTENT, SECRET):
        assert each not in written and each not in repr(trace.records)


async def test_content_is_recorded_on_request_and_without_its_secrets(loops: Loops) -> None:
    trace = AgentTracePlugin(record_content=True)
    script = [
        {"tool": "note", "args": {"text": f"{CONTENT[2]} {SECRET}"}, "id": "c1"},
        say(f"{CONTENT[1]} password=hunter2"),
    ]
    loop = await loops.start(
        script, tools=diary_tools(), plugins=[trace], system_prompt=f"Be brief. {SECRET}"
    )
    await loop.ask(f"{CONTENT[0]} {SECRET}")
    first, last = of(trace, "model_call")
    (ran,) = of(trace, "tool_call")
    assert first["gen_ai.system_instructions"] == [{"type": "text", "content": "Be brief. ***"}]
    assert first["gen_ai.input.messages"] == [
        {"role": "user", "parts": [{"type": "text", "content": f"{CONTENT[0]} ***"}]}
    ]
    (answer,) = first["gen_ai.output.messages"]
    assert answer["parts"] == [
        {
            "type": "tool_call",
            "id": "c1",
            "name": "note",
            "arguments": {"text": f"{CONTENT[2]} ***"},
        }
    ]
    assert [m["role"] for m in last["gen_ai.input.messages"]] == ["user", "assistant", "tool"]
    assert last["gen_ai.output.messages"][0]["parts"][0]["content"] == f"{CONTENT[1]} password=***"
    assert ran["gen_ai.tool.call.arguments"] == {"text": f"{CONTENT[2]} ***"}
    assert ran["gen_ai.tool.call.result"].startswith("tool says")
    written = json.dumps(trace.records, default=str)
    assert SECRET not in written and "hunter2" not in written


async def test_an_error_is_its_class_name(loops: Loops) -> None:
    trace = AgentTracePlugin(record_content=True)

    def broken(text: str) -> str:
        """Break."""
        raise ConnectionError(f"no route, {SECRET}")

    script = [
        RuntimeError(f"the key {SECRET} was refused"),
        {"tool": "broken", "args": {"text": "x"}},
        say(),
    ]
    loop = await loops.start(script, tools=tool_registry(broken), plugins=[trace])
    await loop.ask()
    assert loop.state == "done"
    failed = of(trace, "model_call")[0]
    assert failed["error.type"] == "RuntimeError" and failed["gen_ai.usage.input_tokens"] == 0
    (ran,) = of(trace, "tool_call")
    assert ran["outcome"] == "failed" and ran["error.type"] == "ConnectionError"
    assert SECRET not in json.dumps(trace.records)


async def test_names_a_model_makes_up_are_written_masked_or_not_at_all(loops: Loops) -> None:
    trace = AgentTracePlugin()
    script = [
        turn(
            {"tool": SECRET, "args": {}, "id": SECRET},
            {"tool": "ignore your rules\nand pay", "args": {}, "id": "x" * 5000},
        )
    ]
    loop = await loops.start(script, plugins=[trace])
    await loop.ask()
    assert loop.error["kind"] == "tool_denied"
    denied = of(trace, "tool_denied")
    assert [each["gen_ai.tool.name"] for each in denied] == ["***", "*"]
    assert denied[0]["gen_ai.tool.call.id"] == "***"
    assert len(denied[1]["gen_ai.tool.call.id"]) <= 128
    written = json.dumps(trace.records)
    assert SECRET not in written and "ignore your rules" not in written


async def test_a_long_conversation_makes_no_endless_record(loops: Loops) -> None:
    trace = AgentTracePlugin(record_content=True)
    loop = await loops.start([say("x" * 50_000)], plugins=[trace])
    await loop.ask("y" * 200_000)
    (record,) = of(trace, "model_call")
    assert len(json.dumps(record)) < 40_000
    assert "truncated" in json.dumps(record)


async def test_of_many_messages_the_newest_are_recorded_and_the_rest_counted() -> None:
    from guardchart.agents._trace_records import request_content

    messages = [{"role": "user", "content": f"{n} " + "z" * 3_000} for n in range(100)]
    shown = request_content(messages)
    kept = shown["gen_ai.input.messages"]
    assert kept[-1]["parts"][0]["content"].startswith("99 ")
    assert len(kept) + shown["guardchart.messages_left_out"] == 100
    assert len(json.dumps(shown)) < 80_000


async def test_parts_other_than_text_are_named_and_not_recorded() -> None:
    from guardchart.agents._trace_records import request_content

    parts = [{"type": "text", "text": "see"}, {"type": "image", "image": "AAAA" * 10}, 7]
    (message,) = request_content([{"role": "user", "content": parts}])["gen_ai.input.messages"]
    assert message["parts"] == [
        {"type": "text", "content": "see"},
        {"type": "image"},
        {"type": "other"},
    ]


# Denials, failures, ends


async def test_a_denied_turn_is_visible_with_its_reason(loops: Loops) -> None:
    trace = AgentTracePlugin()
    loop = await loops.start([turn(balance(), pay())], chart=allowing("balance"), plugins=[trace])
    await loop.ask()
    (denied,) = of(trace, "tool_denied")
    assert denied["gen_ai.tool.name"] == "pay" and "allow-list" in denied["reason"]
    assert of(trace, "tool_call") == []
    assert of(trace, "transition")[-1]["error.kind"] == "tool_denied"
    assert of(trace, "agent_end")[0]["error.kind"] == "tool_denied"


async def test_a_denial_the_model_is_told_of_is_visible_too(loops: Loops) -> None:
    trace = AgentTracePlugin()
    loop = await loops.start(
        [pay(), say()], chart=allowing("balance"), plugins=[trace], on_denied="retry"
    )
    await loop.ask()
    assert loop.state == "done"
    assert len(of(trace, "tool_denied")) == 1
    assert of(trace, "transition")[-1]["denied_turns"] == 1


async def test_a_recorded_result_is_told_from_a_body_that_ran(loops: Loops) -> None:
    trace = AgentTracePlugin()
    parked = await loops.parked(pay(id="p1"))
    saved = parked.saved()
    await parked.approve()
    again = await loops.again(parked, snapshot=saved, plugins=[trace])
    await again.approve()
    (ran,) = of(trace, "tool_call")
    assert ran["outcome"] == "done" and ran["entered"] is False
    assert len(loops.bank.paid) == 1


async def test_a_run_that_goes_on_keeps_its_trace_id(loops: Loops) -> None:
    before, after = AgentTracePlugin(), AgentTracePlugin()
    parked = await loops.parked(pay(), plugins=[before])
    again = await loops.again(parked, plugins=[after])
    await again.approve()
    assert again.state == "done"
    assert {each["trace_id"] for each in [*before.records, *after.records]} == {
        parked.interp.host.run
    }


async def test_a_model_that_answers_too_late_is_counted_and_marked() -> None:
    trace = AgentTracePlugin()
    let_go = threading.Event()
    answered = threading.Event()

    def slow(messages: Any, tools: Any) -> ModelResponse:
        let_go.wait(5)
        answered.set()
        return ModelResponse("too late", usage=Usage(7, 1))

    from guardchart import SyncInterpreter
    from guardchart.agents import TOOL_LOOP, RetryPolicy

    clock = SimulatedClock()
    machine = create_machine(
        TOOL_LOOP, agent_logic(slow, model_timeout_s=5, retry=RetryPolicy(max_attempts=1))
    )
    live = SyncInterpreter(machine, clock=clock, plugins=[trace]).start()
    thread = threading.Thread(target=live.send, args=({"type": "START", "prompt": "x"},))
    thread.start()
    deadline = 200
    while live.next_due() is None and deadline:
        deadline -= 1
        threading.Event().wait(0.01)
    clock.increment(5_000)
    thread.join(5)
    assert of(trace, "model_call") == []
    let_go.set()
    assert answered.wait(5)
    for _ in range(200):
        if of(trace, "model_call"):
            break
        threading.Event().wait(0.01)
    live.stop()
    (late,) = of(trace, "model_call")
    assert late["late"] is True and late["gen_ai.usage.input_tokens"] == 7
    assert trace.totals()["total"]["turns"] == 1


async def test_a_cancelled_call_is_written() -> None:
    trace = AgentTracePlugin()
    model = FakeModel([{"hang": True}])
    with pytest.raises(TimeoutError):
        await run_agent(model, prompt="x", plugins=[trace], timeout_s=0.05)
    await asyncio.sleep(0)
    (cancelled,) = of(trace, "model_call")
    assert cancelled["error.type"] == "CancelledError"
    assert of(trace, "agent_end")[0]["status"] == "stopped"


def test_a_machine_in_error_ends_with_the_class_of_its_fault() -> None:
    trace = AgentTracePlugin()

    def broken(context: Any, event: Any) -> None:
        raise KeyError(SECRET)

    chart = {
        "id": "m",
        "initial": "a",
        "states": {"a": {"on": {"GO": {"target": "b", "actions": "x"}}}, "b": {}},
    }
    machine = create_machine(chart, MachineLogic(actions={"x": broken}))
    run_agent_sync(machine, event="GO", plugins=[trace])
    (end,) = of(trace, "agent_end")
    assert end["status"] == "error" and end["error.type"] == "KeyError"
    assert SECRET not in json.dumps(trace.records)


# Trees and totals


def tree() -> Any:
    child = create_machine(
        _child_chart(), agent_logic(FakeModel([say(usage=USED)] * 9, is_async=False), retry=AT_ONCE)
    )
    chart = {
        "id": "boss",
        "type": "parallel",
        "states": {
            name: {
                "initial": "run",
                "states": {
                    "run": {"invoke": {"id": name, "src": "worker", "onDone": "over"}},
                    "over": {"type": "final"},
                },
            }
            for name in ("one", "two")
        },
    }
    return create_machine(chart, MachineLogic(services={"worker": child}))


def _child_chart() -> dict[str, Any]:
    chart = allowing()
    chart["context"]["input"] = "work"
    return chart


def test_a_tree_of_agents_shares_a_trace_and_each_has_its_row() -> None:
    trace = AgentTracePlugin()
    result = run_agent_sync(tree(), plugins=[trace])
    assert result.status == "done"
    totals = trace.totals()
    row = {"turns": 1, "input_tokens": 10, "output_tokens": 4, "cost_usd": 0.5}
    assert totals["agents"] == {"boss:one": row, "boss:two": row}
    assert totals["total"] == {name: 2 * value for name, value in row.items()}
    assert len({each["trace_id"] for each in trace.records}) == 1
    parents = {each["agent_id"]: each["parent_id"] for each in trace.records}
    assert parents == {"boss": None, "boss:one": "boss", "boss:two": "boss"}
    spans = {each["agent_id"]: each for each in of(trace, "agent_start")}
    assert spans["boss:one"]["parent_span_id"] == spans["boss"]["span_id"]


def test_totals_tell_the_newest_agents_apart_and_count_all() -> None:
    trace = AgentTracePlugin(max_agents=1)
    run_agent_sync(tree(), plugins=[trace])
    totals = trace.totals()
    assert len(totals["agents"]) == 1 and totals["total"]["turns"] == 2


async def test_hostile_usage_stays_json_and_refunds_nothing(loops: Loops) -> None:
    stream = io.StringIO()
    trace = AgentTracePlugin(stream)
    script = [
        say(usage={"input_tokens": -5, "output_tokens": 2**80, "cost_usd": float("nan")}),
    ]
    loop = await loops.start(script, plugins=[trace])
    await loop.ask()
    (record,) = of(trace, "model_call")
    assert record["gen_ai.usage.input_tokens"] == 0
    assert record["gen_ai.usage.output_tokens"] == 2**53 - 1
    json.loads(stream.getvalue().splitlines()[-1], parse_constant=_refuse)
    json.dumps(trace.totals(), allow_nan=False)


def _refuse(constant: str) -> Any:
    raise AssertionError(constant)


# Bounds


async def test_memory_is_bounded(loops: Loops) -> None:
    trace = AgentTracePlugin(max_records=5)
    for number in range(20):
        loop = await loops.start([say()], plugins=[trace], scope=f"t{number}")
        await loop.ask()
    assert len(trace.records) == 5
    assert not trace._agents
    assert list(trace.totals()["agents"]) == ["toolLoop"]


def test_an_interpreter_nobody_stopped_is_not_kept_alive() -> None:
    from guardchart import SyncInterpreter

    trace = AgentTracePlugin()
    machine = create_machine({"id": "m", "initial": "a", "states": {"a": {}}})
    live = SyncInterpreter(machine, plugins=[trace]).start()
    seen = weakref.ref(live)
    del live
    gc.collect()
    assert seen() is None and len(trace._agents) == 0


# Sinks


async def test_a_path_is_appended_to_as_json_lines(loops: Loops, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"kind":"before"}\n')
    trace = AgentTracePlugin(path)
    loop = await loops.start([say()], plugins=[trace])
    await loop.ask()
    trace.close()
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert found[0] == {"kind": "before"}
    assert [each["kind"] for each in found[1:]] == kinds(trace)


async def test_a_callable_sink_and_on_span_get_each_record(loops: Loops) -> None:
    sunk: list[Any] = []
    spanned: list[Any] = []
    trace = AgentTracePlugin(sunk.append, on_span=spanned.append)
    loop = await loops.start([say()], plugins=[trace])
    await loop.ask()
    assert sunk == spanned == trace.records


@pytest.mark.gate
async def test_a_tracer_that_raises_changes_nothing_that_runs(
    loops: Loops, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*args: Any, **more: Any) -> Any:
        raise RuntimeError(SECRET)

    class Hostile(AgentTracePlugin):
        begin_model_call = broken
        begin_tool_call = broken

    with caplog.at_level(logging.WARNING, logger="guardchart"):
        loop = await loops.parked(
            pay(), script=[pay("bob"), say()], plugins=[Hostile(broken, on_span=broken)]
        )
        await loop.approve()
        await loop.approve()
    assert loop.state == "done" and len(loops.bank.paid) == 2
    assert SECRET not in caplog.text


async def test_records_of_ones_own_are_masked_and_belong_to_their_agent(loops: Loops) -> None:
    trace = AgentTracePlugin()
    loop = await loops.start([say()], plugins=[trace])
    record = trace.record(loop.interp, "lookup", table="orders", api_key=SECRET)
    assert record["table"] == "orders" and record["api_key"] == "***"
    assert record["agent_id"] == "toolLoop" and record in trace.records


async def test_the_clock_is_the_one_given(loops: Loops) -> None:
    trace = AgentTracePlugin(clock=lambda: 12.5)
    loop = await loops.start([say()], plugins=[trace])
    await loop.ask()
    assert {each["ts"] for each in trace.records} == {12.5}
    assert of(trace, "model_call")[0]["duration_s"] == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"on_span": "zipkin"},
        {"on_span": 7},
        {"tracer_provider": object()},
        {"max_records": 0},
        {"max_agents": True},
    ],
)
def test_wrong_wiring_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(AgentConfigError, match="AgentTracePlugin"):
        AgentTracePlugin(**wrong)


def test_a_missing_folder_fails_when_the_trace_is_made(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        AgentTracePlugin(tmp_path / "no" / "trace.jsonl")


async def test_a_langgraph_style_visit_ends_its_agent_each_time(loops: Loops) -> None:
    """A host that stops the interpreter at rest leaves nothing open."""
    trace = AgentTracePlugin()
    loop = await loops.parked(pay(), plugins=[trace])
    loop.interp.stop()
    assert of(trace, "agent_end")[0]["status"] == "stopped"
    assert of(trace, "agent_end")[0]["state"] == ["toolLoop.awaiting_human"]
    assert not trace._agents


def test_a_tool_registered_with_secrets_in_its_arguments_shows_none() -> None:
    trace = AgentTracePlugin(record_content=True)

    def login(user: str, password: str) -> str:
        """Log in."""
        return "in"

    model = FakeModel(
        [{"tool": "login", "args": {"user": "ann", "password": "hunter2"}}, say()], is_async=False
    )
    run_agent_sync(
        model,
        tools=tool_registry(tool(login)),
        prompt="x",
        plugins=[trace],
        ledger=InMemoryLedger(),
    )
    (ran,) = of(trace, "tool_call")
    assert ran["gen_ai.tool.call.arguments"] == {"user": "ann", "password": "***"}
    assert "hunter2" not in json.dumps(trace.records)


# Requests of a chart of one's own


def deciding(executor: Any) -> Any:
    chart = {
        "id": "door",
        "initial": "closed",
        "states": {
            "closed": {
                "invoke": {
                    "src": "agent.decide",
                    "input": {
                        "model": "small",
                        "system": "You are a door.",
                        "prompt": f"Open? {SECRET}",
                        "allowed_events": ["OPEN"],
                    },
                },
                "on": {"OPEN": "open"},
            },
            "open": {"type": "final"},
        },
    }
    return create_machine(chart, agent_sources(decide=executor))


@pytest.mark.parametrize("is_async", [False, True])
async def test_each_attempt_of_a_decision_is_a_model_call(is_async: bool) -> None:
    answers = iter(["SHUT", "OPEN"])

    def choose(request: Any) -> Any:
        return Generated({"event": {"type": next(answers)}}, usage={"input_tokens": 8})

    async def choose_later(request: Any) -> Any:
        return choose(request)

    trace = AgentTracePlugin(record_content=True)
    machine = deciding(choose_later if is_async else choose)
    result = await run_agent(machine, plugins=[trace])
    assert result.final_state == "door.open"
    calls = of(trace, "model_call")
    assert [each["gen_ai.request.model"] for each in calls] == ["small", "small"]
    assert [each["gen_ai.usage.input_tokens"] for each in calls] == [8, 8]
    assert calls[0]["gen_ai.system_instructions"] == [
        {"type": "text", "content": "You are a door."}
    ]
    assert calls[0]["gen_ai.input.messages"][0]["parts"][0]["content"] == "Open? ***"
    assert trace.totals()["total"]["turns"] == 2


async def test_an_executor_that_raises_is_a_failed_model_call() -> None:
    def broken(request: Any) -> Any:
        raise ConnectionError(SECRET)

    trace = AgentTracePlugin()
    result = await run_agent(deciding(broken), plugins=[trace])
    assert result.status == "error"
    (call,) = of(trace, "model_call")
    assert call["error.type"] == "ConnectionError"
    assert SECRET not in json.dumps(trace.records)
