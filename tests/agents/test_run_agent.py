"""`run_agent` as the one host: decisions, texts, callbacks, limits, aborts, settling, resuming."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from typing import Any

import pytest
from pydantic import BaseModel

from guardchart import Machine, MachineLogic, create_machine
from guardchart.agents import (
    AgentConfigError,
    AgentRequestExecutors,
    AgentResult,
    FakeModel,
    Generated,
    agent_logic,
    create_decision_logic,
    create_text_logic,
    initial_agent_step,
    is_idle,
    load_chart,
    run_agent,
    run_agent_sync,
    transition_agent_step,
)
from guardchart.errors import ChartError, DecisionExhaustedError, NotSupportedError
from guardchart.kernel import load
from guardchart.persistence import InMemoryLedger
from guardchart.runtime import SimulatedClock
from tests.agents.decisions import AsyncScript, Script
from tests.agents.loops import AT_ONCE, Bank, balance, pay, say, turn


async def run(engine: str, *args: Any, **kwargs: Any) -> AgentResult[Any]:
    if engine == "async":
        return await run_agent(*args, **kwargs)
    return await asyncio.to_thread(run_agent_sync, *args, **kwargs)


def script(engine: str, *answers: Any) -> Script:
    return (AsyncScript if engine == "async" else Script)(*answers)


def saved(result: AgentResult[Any]) -> dict[str, Any]:
    """The snapshot as another process reads it."""
    return json.loads(json.dumps(result.snapshot))  # type: ignore[no-any-return]


class Attack(BaseModel):
    target: str


def game(hp: int = 10, *, schemas: Any = None, **choosing: Any) -> Machine:
    state = {
        "invoke": {"id": "move", "src": "agent.decide", "input": {"prompt": "Your move."}},
        "on": {
            "ATTACK": {"target": "won", "actions": "struck"},
            "HEAL": {"target": "won", "guard": "isHurt"},
            "NOTE": {"actions": "wrote"},
        },
        **choosing,
    }
    chart = {
        "id": "game",
        "initial": "choosing",
        "context": {"hp": hp},
        "states": {
            "choosing": state,
            "won": {"type": "final"},
            "fumbled": {"on": {"GO": "choosing"}},
        },
    }
    logic = MachineLogic(
        guards={"isHurt": lambda context, event: context["hp"] < 5},
        actions={
            "struck": lambda context, event: {"target": event.payload.get("target")},
            "wrote": lambda context, event: {"note": event.payload.get("text")},
            "noted": lambda context, event: {"done": event.data},
        },
        attachments={"events": schemas or {}},
    )
    return create_machine(chart, logic)


# --- decisions ---------------------------------------------------------------------------------


async def test_a_move_the_guard_rejects_is_asked_again_and_one_event_is_taken_d2(
    engine: str,
) -> None:
    decide = script(engine, "HEAL", {"type": "ATTACK", "target": "orc"})
    events: list[str] = []
    result = await run(
        engine, game(), decide=decide, on_transition=lambda s, event: events.append(event.type)
    )
    assert result.ok and result.context["target"] == "orc"
    assert [[a.failure for a in each.attempts] for each in decide.requests] == [
        [],
        ["rejected-by-guard"],
    ]
    assert events == ["xstate.init", "ATTACK"]


async def test_an_answer_outside_the_candidates_is_asked_again_d2(engine: str) -> None:
    decide = script(engine, "FLY", "ATTACK")
    assert (await run(engine, game(), decide=decide)).ok
    assert [each.failure for each in decide.requests[1].attempts] == ["unknown-event"]


async def test_a_missing_field_without_retries_exhausts_the_decision_d2(engine: str) -> None:
    invoke = {"src": "agent.decide", "input": {"maxRetries": 0}}
    machine = game(schemas={"ATTACK": Attack}, invoke=invoke)
    result = await run(engine, machine, decide=script(engine, "ATTACK"))
    assert (result.status, result.cause) == ("error", "decision-exhausted")
    assert isinstance(result.exception, DecisionExhaustedError)
    assert [each.failure for each in result.exception.attempts] == ["invalid-payload"]
    assert result.error is not None and result.error["kind"] == "decision-exhausted"
    again = await run(engine, machine, snapshot=saved(result), decide=script(engine))
    assert (again.status, again.cause) == ("error", "decision-exhausted")


async def test_an_exhausted_decision_that_the_chart_handles_is_idle_there_d2(engine: str) -> None:
    invoke = {"src": "agent.decide", "onError": "fumbled"}
    result = await run(engine, game(invoke=invoke), decide=script(engine, *["FLY"] * 3))
    assert (result.status, result.final_state, result.cause) == ("idle", "game.fumbled", None)


async def test_a_note_that_stays_completes_the_invoke_with_the_event_d5(engine: str) -> None:
    invoke = {"src": "agent.decide", "onDone": {"actions": "noted"}}
    result = await run(
        engine, game(invoke=invoke), decide=script(engine, {"type": "NOTE", "text": "hm"})
    )
    assert result.status == "idle" and result.context["note"] == "hm"
    assert result.context["done"] == {"type": "NOTE", "text": "hm"}


async def test_a_decision_inside_a_child_goes_to_the_child_d5(engine: str) -> None:
    boss = {
        "id": "boss",
        "initial": "work",
        "states": {
            "work": {
                "invoke": {"src": "game", "id": "g", "onDone": "end"},
                "on": {"ATTACK": "wrong"},
            },
            "end": {"type": "final"},
            "wrong": {},
        },
    }
    machine = create_machine(boss, MachineLogic(services={"game": game()}))
    result = await run(engine, machine, decide=script(engine, "ATTACK"))
    assert result.final_state == "boss.end"


# --- wiring ------------------------------------------------------------------------------------


def _asks(src: Any, **logic: Any) -> Machine:
    chart = {
        "id": "m",
        "initial": "a",
        "states": {
            "a": {"entry": "begin", "invoke": {"src": src, "id": "s", "onDone": "b"}},
            "b": {"type": "final"},
        },
    }
    began: list[int] = []
    machine = create_machine(
        chart, MachineLogic(actions={"begin": lambda c, e: began.append(1)}, **logic)
    )
    machine.logic.attachments["began"] = began
    return machine


@pytest.mark.parametrize(
    ("src", "names"),
    [
        ("agent.decide", r"agent\.decide.*decide="),
        ("agent.generate_text", r"agent\.generate_text.*generate_text="),
        ("agent.streamText", r"agent\.streamText.*stream_text="),
        ("agent.user_input", r"agent\.user_input.*idle"),
    ],
)
async def test_an_executor_that_is_missing_is_named_before_anything_runs_r1(
    engine: str, src: str, names: str
) -> None:
    machine = _asks(src)
    with pytest.raises(AgentConfigError, match=names):
        await run(engine, machine)
    boss = create_machine(
        {"id": "boss", "initial": "a", "states": {"a": {"invoke": {"src": "m"}}}},
        MachineLogic(services={"m": machine}),
    )
    with pytest.raises(AgentConfigError, match=names):
        await run(engine, boss)
    assert machine.logic.attachments["began"] == []


async def test_a_service_that_is_missing_is_named_before_anything_runs_r1(engine: str) -> None:
    machine = _asks("fetch")
    with pytest.raises(ChartError, match="fetch"):
        await run(engine, machine)
    result = await run(engine, machine, services={"fetch": lambda input: 7})
    assert result.ok and machine.logic.attachments["began"] == [1]


async def test_a_machine_that_brings_its_executors_needs_none_r1(engine: str) -> None:
    own = create_decision_logic().with_executor(script(engine, "ATTACK"))
    machine = game()
    machine = machine.with_logic(machine.logic.merge(MachineLogic(services={"agent.decide": own})))
    assert (await run(engine, machine)).ok


async def test_a_chart_alone_runs_with_the_hosts_executors_r1(engine: str) -> None:
    chart = {
        "id": "m",
        "initial": "a",
        "states": {
            "a": {"invoke": {"src": "agent.decide"}, "on": {"GO": "b"}},
            "b": {"type": "final"},
        },
    }
    assert (await run(engine, chart, decide=script(engine, "GO"))).ok
    with pytest.raises(AgentConfigError, match="pass a machine, a logic, or a model"):
        await run(engine, chart)


@pytest.mark.parametrize(
    "options",
    [
        {"max_model_calls": 0},
        {"max_model_calls": True},
        {"signal": 7},
        {"on_chunk": 7},
        {"on_result": "x"},
        {"on_transition": ()},
        {"decide": 7},
        {"decide": lambda: None},
    ],
)
async def test_wrong_arguments_are_refused_before_anything_runs_r1(
    engine: str, options: Any
) -> None:
    machine = _asks("fetch", services={"fetch": lambda input: 1})
    with pytest.raises(AgentConfigError):
        await run(engine, machine, **options)
    assert machine.logic.attachments["began"] == []


# --- settling ----------------------------------------------------------------------------------


async def test_a_person_beside_a_slow_request_leaves_it_busy_until_the_answer_r2(
    engine: str,
) -> None:
    answered: list[float] = []

    async def slowly(request: Any) -> str:
        await asyncio.sleep(0.05)
        answered.append(1)
        return "x"

    def slow(request: Any) -> str:
        time.sleep(0.05)
        answered.append(1)
        return "x"

    chart = {
        "id": "m",
        "type": "parallel",
        "states": {
            "person": {
                "initial": "asked",
                "states": {"asked": {"tags": ["waiting"], "on": {"OK": "ok"}}, "ok": {}},
            },
            "model": {
                "initial": "a",
                "states": {"a": {"invoke": {"src": "agent.generate_text", "onDone": "b"}}, "b": {}},
            },
        },
    }
    executor = slowly if engine == "async" else slow
    result = await run(engine, create_machine(chart), generate_text=executor)
    assert result.status == "idle" and result.waiting and answered == [1]
    assert result.final_state == "m.model.b, m.person.asked"


async def test_a_state_whose_always_is_false_is_idle_and_not_hung_r2(engine: str) -> None:
    chart = {
        "id": "m",
        "initial": "a",
        "states": {"a": {"always": {"guard": "never", "target": "b"}, "on": {"GO": "b"}}, "b": {}},
    }
    machine = create_machine(chart, MachineLogic(guards={"never": lambda c, e: False}))
    result = await run(engine, machine, timeout_s=5)
    assert result.status == "idle" and result.final_state == "m.a"


def _supervised(engine: str, bank: Bank, answers: list[Any]) -> Machine:
    model = FakeModel(answers, is_async=engine == "async")
    worker = create_machine(load_chart(), agent_logic(model, bank.registry(), retry=AT_ONCE))
    chart = {
        "id": "boss",
        "initial": "work",
        "states": {
            "work": {"invoke": {"src": "worker", "id": "w", "input": "please", "onDone": "end"}},
            "end": {"type": "final"},
        },
    }
    return create_machine(chart, MachineLogic(services={"worker": worker}))


async def test_a_child_that_waits_leaves_its_parent_idle_and_goes_on_after_json_r2(
    engine: str,
) -> None:
    bank, ledger = Bank(), InMemoryLedger()
    parked = await run(
        engine, _supervised(engine, bank, [turn(pay(), balance())]), ledger=ledger, key="k"
    )
    assert parked.status == "idle" and parked.waiting
    again = await run(
        engine,
        _supervised(engine, bank, [say()]),
        snapshot=saved(parked),
        approve=True,
        ledger=ledger,
        key="k",
    )
    assert again.ok and again.final_state == "boss.end"
    assert len(bank.paid) == 1


async def test_a_waiting_state_rests_whatever_its_timers_and_others_are_served_r3(
    engine: str,
) -> None:
    chart = {
        "id": "m",
        "initial": "a",
        "states": {
            "a": {"after": {"10": "b"}},
            "b": {"tags": ["waiting"], "after": {"5000": "c"}},
            "c": {"after": {"600000": "d"}},
            "d": {},
        },
    }
    machine = create_machine(chart)
    result = await run(engine, machine)
    assert result.final_state == "m.b" and result.waiting
    later = await run(
        engine, machine, snapshot=saved(result), clock=SimulatedClock(9e9), serve_delay_s=30
    )
    assert later.final_state == "m.c" and later.status == "idle" and not later.waiting
    assert later.snapshot["timers"]


def test_is_idle_says_of_a_snapshot_what_a_run_would_r2() -> None:
    chart = {
        "id": "m",
        "initial": "a",
        "states": {
            "a": {"on": {"ASK": "asking", "WAIT": "person", "TIME": "timed", "END": "end"}},
            "asking": {"invoke": {"src": "agent.decide"}, "on": {"A": "a"}},
            "person": {"tags": ["waiting"], "after": {"1000": "a"}},
            "timed": {"after": {"1000": "a"}},
            "end": {"type": "final"},
        },
    }
    machine = create_machine(chart)
    start = initial_agent_step(machine, now=0)
    at = {
        name: transition_agent_step(machine, start, name, now=0)
        for name in ("ASK", "WAIT", "TIME", "END")
    }
    assert is_idle(start) and is_idle(start.snapshot)
    assert [is_idle(at[name]) for name in at] == [False, True, False, False]
    assert is_idle(at["TIME"], due_after=500) and not is_idle(at["TIME"], due_after=1000)


async def test_is_idle_looks_into_child_machines_r2() -> None:
    machine = _supervised("async", Bank(), [turn(pay())])
    assert not is_idle(initial_agent_step(machine))
    parked = await run_agent(machine)
    assert is_idle(load(machine, saved(parked)))


# --- callbacks ---------------------------------------------------------------------------------


def _writer(stream: bool = False, **kw: Any) -> Machine:
    source = create_text_logic(prompt="Write.", stream=stream, **kw)
    chart = {
        "id": "w",
        "initial": "writing",
        "states": {
            "writing": {
                "invoke": {
                    "src": "write",
                    "id": "x",
                    "onDone": {"target": "done", "actions": "keep"},
                    "onError": "failed",
                }
            },
            "done": {"type": "final"},
            "failed": {},
        },
    }
    keep = {"keep": lambda context, event: {"result": event.data}}
    return create_machine(chart, MachineLogic(services={"write": source}, actions=keep))


async def test_chunks_and_results_are_shown_with_their_requests_r4(engine: str) -> None:
    seen: list[Any] = []

    def stream_text(request: Any, info: Any) -> Any:
        info.on_chunk("he")
        info.on_chunk("llo")
        return Generated("hello", usage={"input_tokens": 1}, raw={"finish": "stop"})

    result = await run(
        engine,
        _writer(stream=True),
        stream_text=stream_text,
        on_chunk=lambda chunk, request: seen.append((chunk, request.src)),
        on_result=lambda request, executed: seen.append((request.kind, executed)),
    )
    assert result.output == "hello"
    assert seen == [("he", "write"), ("llo", "write"), ("text", ("hello", {"finish": "stop"}))]


async def test_the_loops_model_calls_are_shown_as_results_too_r4(engine: str) -> None:
    seen: list[Any] = []
    model = FakeModel([balance(), say("done")], is_async=engine == "async")
    result = await run(
        engine,
        model,
        tools=Bank().registry(),
        prompt="please",
        on_result=lambda request, executed: seen.append((request, executed)),
    )
    assert result.ok and [each[1].output["text"] for each in seen] == [None, "done"]
    assert [message.role for message in seen[1][0].messages] == ["user", "assistant", "tool"]
    chunks: list[Any] = []
    model = FakeModel([say("one two")], is_async=engine == "async")
    await run(engine, model, prompt="x", on_chunk=lambda c, r: chunks.append((c, r.src)))
    assert "".join(each[0] for each in chunks) == "one two" and chunks[0][1] == "callModel"


async def test_every_attempt_of_a_decision_is_a_result_with_its_reason_r4(engine: str) -> None:
    seen: list[Any] = []
    decide = script(engine, {"event": {"type": "HEAL"}, "reason": "low"}, "ATTACK")
    await run(engine, game(), decide=decide, on_result=lambda r, e: seen.append(e.raw))
    assert seen[0]["reason"] == "low" and len(seen) == 2


@pytest.mark.parametrize("name", ["on_transition", "on_result", "on_chunk"])
async def test_what_a_callback_raises_is_the_callers_and_ends_the_run_r4(
    engine: str, name: str
) -> None:
    def stream_text(request: Any, info: Any) -> str:
        if info.on_chunk is not None:
            info.on_chunk("x")
        return "hello"

    def broken(*args: Any) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        await run(engine, _writer(stream=True), stream_text=stream_text, **{name: broken})


async def test_transitions_are_shown_with_snapshot_and_event_r4(engine: str) -> None:
    seen: list[Any] = []

    def on_transition(snapshot: Any, event: Any) -> None:
        seen.append((sorted(snapshot.state_ids), event.type))

    await run(engine, _writer(), generate_text=lambda r: "x", on_transition=on_transition)
    assert seen == [(["w.writing"], "xstate.init"), (["w.done"], "xstate.done.actor.x")]


# --- resuming ----------------------------------------------------------------------------------


def _drafting(sent: list[str]) -> Machine:
    chart = {
        "id": "mail",
        "initial": "drafting",
        "context": {"draft": None, "rounds": 0},
        "states": {
            "drafting": {
                "invoke": {
                    "src": "agent.generate_text",
                    "id": "d",
                    "input": {"prompt": "Draft a mail."},
                    "onDone": {"target": "review", "actions": "keep"},
                }
            },
            "review": {"tags": ["waiting"], "on": {"APPROVE": "sending", "REJECT": "drafting"}},
            "sending": {"invoke": {"src": "send", "id": "s", "onDone": "sent"}},
            "sent": {"type": "final"},
        },
    }

    def send(scope: Any, context: Any, event: Any) -> str:
        sent.append(context["draft"])
        return "ok"

    return create_machine(
        chart,
        MachineLogic(
            services={"send": send},
            actions={"keep": lambda c, e: {"draft": e.data, "rounds": c["rounds"] + 1}},
        ),
    )


@pytest.mark.parametrize(("answer", "calls"), [("APPROVE", 1), ("REJECT", 2)])
async def test_a_draft_is_reviewed_after_json_without_asking_again_r5(
    engine: str, answer: str, calls: int
) -> None:
    sent: list[str] = []
    asked: list[Any] = []

    def write(request: Any) -> str:
        asked.append(request)
        return f"draft {len(asked)}"

    first = await run(engine, _drafting(sent), generate_text=write)
    assert first.status == "idle" and first.waiting and not sent
    second = await run(
        engine, _drafting(sent), snapshot=saved(first), event=answer, generate_text=write
    )
    assert len(asked) == calls
    if answer == "REJECT":
        assert second.waiting
        second = await run(
            engine, _drafting(sent), snapshot=saved(second), event="APPROVE", generate_text=write
        )
    assert second.ok and sent == [f"draft {calls}"] and len(asked) == calls


async def test_an_event_the_state_cannot_take_is_reported_as_ignored_r8(engine: str) -> None:
    first = await run(engine, _drafting([]), generate_text=lambda r: "x")
    result = await run(
        engine, _drafting([]), snapshot=saved(first), event="PUBLISH", generate_text=lambda r: "x"
    )
    assert result.status == "idle" and result.ignored is not None
    assert result.ignored.type == "PUBLISH"


async def test_a_request_that_was_cut_off_is_made_again_on_resume_r5(engine: str) -> None:
    calls: list[int] = []

    def write(request: Any) -> str:
        calls.append(1)
        return "hello"

    cut = await run(engine, _writer(), generate_text=write, signal=_set())
    assert cut.cause == "aborted" and calls == []
    result = await run(engine, _writer(), snapshot=saved(cut), generate_text=write)
    assert result.ok and result.output == "hello" and calls == [1]


async def test_a_child_of_a_run_that_was_cut_off_goes_on_where_it_stood_r5(engine: str) -> None:
    bank = Bank()
    signal = threading.Event()

    def on_result(request: Any, executed: Any) -> None:
        signal.set()

    first = await run(
        engine,
        _supervised(engine, bank, [balance("a1"), say()]),
        signal=signal,
        on_result=on_result,
        max_model_calls=1,
    )
    assert first.status == "error" and first.cause == "aborted"
    child = first.snapshot["children"]["w"]["snapshot"]
    assert child["context"]["turns"] == 1


async def test_timers_that_are_overdue_fire_before_the_event_r5(engine: str) -> None:
    chart = {
        "id": "m",
        "initial": "a",
        "states": {
            "a": {"tags": ["waiting"], "after": {"1000": "late"}, "on": {"OK": "in_time"}},
            "late": {"on": {"OK": "too_late"}},
            "in_time": {},
            "too_late": {},
        },
    }
    machine = create_machine(chart)
    first = await run(engine, machine, clock=SimulatedClock(1))
    later = await run(engine, machine, snapshot=saved(first), event="OK", clock=SimulatedClock(9))
    assert later.final_state == "m.too_late"


# --- limits ------------------------------------------------------------------------------------


async def test_a_loop_that_reenters_itself_is_cut_and_on_error_cannot_swallow_it_r6(
    engine: str,
) -> None:
    invoke = {"src": "agent.decide", "onError": "fumbled"}
    machine = game(invoke=invoke, on={"AGAIN": {"target": "choosing", "reenter": True}})
    decide = script(engine, *["AGAIN"] * 10)
    result = await run(engine, machine, decide=decide, max_model_calls=3)
    assert (result.status, result.cause) == ("error", "max-model-calls")
    assert len(decide.requests) == 3 and result.final_state == "game.choosing"
    assert result.error == {
        "kind": "max-model-calls",
        "message": "the run made max_model_calls model calls and asked for one more",
    }


async def test_each_attempt_counts_as_a_model_call_r6(engine: str) -> None:
    decide = script(engine, "FLY", "FLY", "ATTACK")
    result = await run(engine, game(), decide=decide, max_model_calls=2)
    assert result.cause == "max-model-calls" and len(decide.requests) == 2
    assert (await run(engine, game(), decide=script(engine, "FLY", "ATTACK"), max_model_calls=2)).ok


async def test_the_loops_own_calls_and_those_of_children_count_r6(engine: str) -> None:
    model = FakeModel([balance(), balance("b"), say()], is_async=engine == "async")
    result = await run(engine, model, tools=Bank().registry(), prompt="x", max_model_calls=2)
    assert result.cause == "max-model-calls" and len(model.calls) == 2
    machine = _supervised(engine, Bank(), [balance(), balance("b"), say()])
    result = await run(engine, machine, max_model_calls=2)
    assert result.cause == "max-model-calls"


async def test_a_run_that_was_cut_goes_on_with_more_calls_r6(engine: str) -> None:
    machine = game(on={"AGAIN": {"target": "choosing", "reenter": True}, "ATTACK": "won"})
    first = await run(engine, machine, decide=script(engine, "AGAIN", "AGAIN"), max_model_calls=1)
    assert first.cause == "max-model-calls"
    again = await run(engine, machine, snapshot=saved(first), decide=script(engine, "ATTACK"))
    assert again.ok


# --- aborting ----------------------------------------------------------------------------------


def _set() -> threading.Event:
    signal = threading.Event()
    signal.set()
    return signal


async def test_a_run_aborted_before_it_begins_starts_nothing_r7(engine: str) -> None:
    machine = _asks("fetch", services={"fetch": lambda input: pytest.fail("it ran")})
    result = await run(engine, machine, signal=_set())
    assert (result.status, result.cause) == ("error", "aborted")
    assert result.error == {"kind": "aborted", "message": "the signal was set"}
    assert result.final_state == "m.a" and load(machine, saved(result)).status == "active"


async def test_a_run_resumed_with_a_set_signal_stays_where_it_stood_r7(engine: str) -> None:
    first = await run(engine, _drafting([]), generate_text=lambda r: "x")
    result = await run(
        engine,
        _drafting([]),
        snapshot=saved(first),
        event="APPROVE",
        generate_text=lambda r: "x",
        signal=_set(),
    )
    assert result.cause == "aborted" and saved(result) == saved(first)


@pytest.mark.parametrize("kind", ["asyncio", "threading"])
async def test_a_signal_ends_a_request_that_is_under_way_r7(kind: str) -> None:
    signal: Any = asyncio.Event() if kind == "asyncio" else threading.Event()
    cancelled: list[bool] = []

    async def forever(request: Any, info: Any) -> str:
        assert not info.signal.is_set()
        asyncio.get_running_loop().call_soon(signal.set)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(info.signal.is_set())
            raise
        return "never"

    result = await run_agent(_writer(), generate_text=forever, signal=signal)
    await asyncio.sleep(0)
    assert result.cause == "aborted" and result.final_state == "w.writing"
    assert cancelled == [True]


def test_a_signal_ends_a_sync_run_between_two_calls_r7() -> None:
    signal = threading.Event()
    machine = game(on={"AGAIN": {"target": "choosing", "reenter": True}})

    def decide(request: Any) -> Any:
        signal.set()
        return {"event": {"type": "AGAIN"}}

    result = run_agent_sync(machine, decide=decide, signal=signal)
    assert result.cause == "aborted"


def test_a_signal_ends_a_sync_run_that_waits_for_a_timer_r7() -> None:
    signal = threading.Event()
    machine = create_machine(
        {"id": "m", "initial": "a", "states": {"a": {"after": {"600000": "b"}}, "b": {}}}
    )
    threading.Timer(0.05, signal.set).start()
    result = run_agent_sync(machine, signal=signal)
    assert result.cause == "aborted" and result.final_state == "m.a"


async def test_somebody_who_stops_the_machine_is_told_as_stopped_r7(engine: str) -> None:
    class Stopper:
        def on_transition(self, interpreter: Any, *args: Any) -> None:
            interpreter.stop()

    result = await run(engine, _drafting([]), generate_text=lambda r: "x", plugins=[Stopper()])
    assert (result.status, result.cause) == ("error", "stopped")
    assert result.error is not None and result.error["kind"] == "stopped"


async def test_a_cancelled_task_stops_the_machine_and_is_cancelled_r7() -> None:
    stopped: list[str] = []

    class Watch:
        def on_interpreter_stop(self, interpreter: Any) -> None:
            stopped.append(interpreter.status)

    async def forever(request: Any) -> str:
        await asyncio.Event().wait()
        return "never"

    task = asyncio.ensure_future(run_agent(_writer(), generate_text=forever, plugins=[Watch()]))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert stopped == ["stopped"]


async def test_a_run_that_takes_too_long_raises_and_stops_r7(engine: str) -> None:
    gate = threading.Event()

    def slow(request: Any) -> str:
        gate.wait(5)
        return "late"

    with pytest.raises(TimeoutError):
        await run(engine, _writer(), generate_text=slow, timeout_s=0.05)
    gate.set()


# --- engines -----------------------------------------------------------------------------------


async def test_the_sync_form_says_what_to_use_in_a_loop_and_with_async_executors_r9() -> None:
    with pytest.raises(NotSupportedError, match=r"await run_agent"):
        run_agent_sync(game(), decide=Script("ATTACK"))
    with pytest.raises(NotSupportedError, match="async"):
        await asyncio.to_thread(run_agent_sync, game(), decide=AsyncScript("ATTACK"))


async def test_sync_executors_serve_an_async_run_r9() -> None:
    assert (await run_agent(game(), decide=Script("ATTACK"))).ok
    assert AgentRequestExecutors().decide is None


async def test_a_fault_of_the_machine_is_told_as_machine_with_its_exception(engine: str) -> None:
    machine = create_machine(
        {"id": "m", "initial": "a", "states": {"a": {"entry": "broken"}}},
        MachineLogic(actions={"broken": lambda c, e: 1 / 0}),
    )
    result = await run(engine, machine)
    assert (result.status, result.cause) == ("error", "machine")
    assert isinstance(result.exception, ZeroDivisionError)


async def test_user_input_is_answered_inline_where_a_handler_is_given(engine: str) -> None:
    machine = _asks("agent.user_input")
    seen: list[Any] = []
    result = await run(engine, machine, user_input=lambda request: seen.append(request) or "blue")
    assert result.ok and seen[0].id == "s"
