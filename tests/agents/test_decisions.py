from __future__ import annotations

import asyncio
import json
import threading
from typing import Literal

import pydantic
import pytest

from guardchart import MachineLogic, create_machine, initial_transition
from guardchart.agents import (
    AgentDecisionRequest,
    AgentEventDescriptor,
    AgentRequestExecutors,
    Generated,
    agent_sources,
    create_decision_logic,
    get_accepted_events,
    request_from_json,
    resolve_decision,
    resolve_decision_sync,
    user_message,
)
from guardchart.agents._request_logic import Binding
from guardchart.agents._sources import bind_executors, with_sources
from guardchart.errors import (
    AbortedError,
    AgentConfigError,
    AgentError,
    ChartError,
    DecisionExhaustedError,
    NotSupportedError,
)
from guardchart.kernel import Event
from guardchart.runtime import Interpreter, Plugin, SyncInterpreter
from tests.agents.decisions import LOGIC, AsyncScript, Script, game, hosted, keys, play


class Attack(pydantic.BaseModel):
    target: str
    times: int = 1


EVENTS = {"ATTACK": Attack, "HEAL": None}
TYPED = LOGIC.merge(MachineLogic(attachments={"events": EVENTS}))
SCRIPTS = {"sync": Script, "async": AsyncScript}


def chart_of(on, **root):
    return {"id": "m", "initial": "a", "states": {"a": {"on": on}, "b": {}}, **root}


def snapshot_of(chart, logic=None):
    return initial_transition(create_machine(chart, logic))[0]


def request_of(*types, **more):
    events = [AgentEventDescriptor(type=each, tool_name=f"send_event_{each}") for each in types]
    return AgentDecisionRequest(id="d", events=events, **more)


def resolve(engine, request, decide, **options):
    if engine == "sync":
        return resolve_decision_sync(request, decide, **options)
    return asyncio.run(resolve_decision(request, decide, **options))


# D1: candidates


def test_decision_ruling_d1_without_allowed_events_everything_accepted_is_a_candidate():
    script = Script("ATTACK")
    play(hosted(game(), script))
    assert [each.type for each in script.requests[0].events] == ["ATTACK", "HEAL", "NOTE"]


@pytest.mark.parametrize(
    ("allowed", "candidates"),
    [
        (["ATTACK"], ["ATTACK"]),
        ("ATTACK", ["ATTACK"]),
        ("*", ["ATTACK", "say.loud", "say.low", "say"]),
        ("say.*", ["say.loud", "say.low", "say"]),
        (["ATTACK", "say.loud"], ["ATTACK", "say.loud"]),
        (["REST", "ATTACK"], ["ATTACK"]),
    ],
)
def test_decision_ruling_d1_allowed_events_narrow_what_is_accepted(allowed, candidates):
    chart = {
        "id": "m",
        "initial": "a",
        "states": {
            "a": {
                "invoke": {"src": "agent.decide", "input": {"allowed_events": allowed}},
                "on": {"ATTACK": "b", "say.loud": "b", "say.low": "b", "say": "b"},
            },
            "b": {"on": {"REST": "a"}},
        },
    }
    script = Script("ATTACK" if "ATTACK" in candidates else "say.loud")
    play(hosted(chart, script))
    assert [each.type for each in script.requests[0].events] == candidates


def test_decision_ruling_d1_candidates_are_those_of_the_moment_of_the_decision():
    chart = {
        "id": "m",
        "type": "parallel",
        "states": {
            "left": {
                "initial": "choosing",
                "states": {
                    "choosing": {"invoke": {"src": "agent.decide"}, "on": {"GO": "gone"}},
                    "gone": {"invoke": {"src": "agent.decide"}, "on": {"BACK": "choosing"}},
                },
            },
            "right": {
                "initial": "one",
                "states": {
                    "one": {"on": {"ONE": {}, "GO": "two"}},
                    "two": {"on": {"TWO": {"actions": "note"}}},
                },
            },
        },
    }
    script = Script("GO", "TWO")
    play(hosted(chart, script, MachineLogic(actions={"note": lambda context, event: None})))
    assert [each.type for each in script.requests[0].events] == ["GO"]
    assert [each.type for each in script.requests[1].events] == ["BACK", "TWO"]


def test_decision_ruling_d1_allowed_events_may_be_computed_from_the_input():
    seen = []

    def moves(input):
        seen.append(input)
        return ["NOTE"] if input["hp"] > 5 else ["HEAL"]

    chart = game(
        invoke={
            "src": "move",
            "input": lambda context, event: {"hp": context["hp"]},
            "onDone": "seen",
        }
    )
    logic = LOGIC.merge(
        MachineLogic(services={"move": create_decision_logic(allowed_events=moves)})
    )
    script = Script("NOTE")
    assert keys(play(hosted(chart, script, logic))) == {"seen"}
    assert [each.type for each in script.requests[0].events] == ["NOTE"]
    assert seen == [{"hp": 10}]


@pytest.mark.parametrize("allowed", [["ATACK"], "ATACK", "say.*", ["ATTACK", "xstate.init"]])
def test_decision_ruling_d1_an_unknown_name_fails_when_the_machine_is_built(allowed):
    logic = LOGIC.merge(
        MachineLogic(services={"move": create_decision_logic(allowed_events=allowed)})
    )
    with pytest.raises(ChartError, match=r"allowed_events names .* its events are: ATTACK, HEAL"):
        create_machine(game(invoke={"src": "move"}), logic)
    invoke = {"src": "agent.decide", "input": {"allowedEvents": allowed}}
    with pytest.raises(ChartError, match=r"\$\.states\.choosing\.invoke: allowed_events names"):
        create_machine(game(invoke=invoke), LOGIC.merge(agent_sources()))
    with pytest.raises(ChartError):
        hosted(game(invoke=invoke), Script())


def test_decision_ruling_d1_an_unknown_name_that_is_computed_is_an_error_of_the_service():
    logic = LOGIC.merge(
        MachineLogic(
            services={"move": create_decision_logic(allowed_events=lambda input: ["ATACK"])}
        )
    )
    script = Script()
    done = play(hosted(game(invoke={"src": "move"}), script, logic))
    assert done.status == "error" and isinstance(done.error, AgentConfigError)
    assert not script.requests


def test_decision_ruling_d1_a_name_that_only_a_wildcard_takes_is_a_candidate_when_declared():
    chart = chart_of({"say.*": {"target": "b"}})
    chart["states"]["a"]["invoke"] = {
        "src": "agent.decide",
        "input": {"allowedEvents": ["say.hello", "say.bye"]},
    }
    script = Script("say.bye")
    assert keys(play(hosted(chart, script))) == {"b"}
    assert [each.type for each in script.requests[0].events] == ["say.hello", "say.bye"]
    assert script.requests[0].events[0].tool_name == "send_event_say_hello"


def test_decision_ruling_d1_an_event_that_a_schema_names_and_a_wildcard_takes_is_accepted():
    logic = MachineLogic(attachments={"events": {"say.hello": None}})
    snapshot = snapshot_of(chart_of({"say.*": "b"}), logic)
    assert [each.type for each in get_accepted_events(snapshot)] == ["say.hello"]


def test_decision_ruling_d1_without_a_candidate_nobody_is_asked():
    chart = game(
        invoke={"src": "agent.decide", "input": {"allowedEvents": []}, "onError": "fumbled"}
    )
    script = Script()
    assert keys(play(hosted(chart, script))) == {"fumbled"}
    assert not script.requests


# D1: descriptors


def test_decision_ruling_d1_names_that_a_provider_would_not_take_stay_distinct():
    on = dict.fromkeys(("foo.bar", "foo/bar", "foo bar", "foo_bar_2"), "b")
    names = [each.tool_name for each in get_accepted_events(snapshot_of(chart_of(on)))]
    assert names == [
        "send_event_foo_bar",
        "send_event_foo_bar_2",
        "send_event_foo_bar_3",
        "send_event_foo_bar_2_2",
    ]


def test_decision_ruling_d1_long_and_foreign_names_fit_every_provider():
    on = {"é" * 100: "b", "é" * 99: "b", "x" * 80: "b"}
    names = [each.tool_name for each in get_accepted_events(snapshot_of(chart_of(on)))]
    assert len(set(names)) == 3
    assert all(len(name) <= 64 and name.isascii() for name in names)


def test_decision_ruling_d1_a_tools_name_does_not_change_with_the_state():
    chart = {
        "id": "m",
        "initial": "a",
        "states": {"a": {"on": {"x.y": "b", "x y": "b"}}, "b": {"on": {"x y": "a"}}},
    }
    machine = create_machine(chart)
    one = initial_transition(machine)[0]
    names = {each.type: each.tool_name for each in get_accepted_events(one)}
    other = play(machine, "sync", "x y").snapshot
    assert [(each.type, each.tool_name) for each in get_accepted_events(other)] == [
        ("x y", names["x y"])
    ]


def test_accepted_events_do_not_ask_guards_and_leave_out_what_is_forbidden_or_over():
    on = {"GO": {"target": "b", "guard": lambda context, event: False}, "NO": {}}
    snapshot = snapshot_of(chart_of(on))
    assert [each.type for each in get_accepted_events(snapshot)] == ["GO"]
    final = {
        "id": "m",
        "initial": "end",
        "states": {"end": {"type": "final"}},
        "on": {"GO": ".end"},
    }
    assert get_accepted_events(snapshot_of(final)) == []


def test_decision_ruling_d1_schemas_come_from_the_logic_or_from_the_chart():
    schema = {"type": "object", "properties": {"cents": {"type": "integer"}}, "required": ["cents"]}
    chart = chart_of(
        {"PAY": "b", "ATTACK": "b", "HEAL": "b", "ANY": "b"}, meta={"events": {"PAY": schema}}
    )
    found = get_accepted_events(snapshot_of(chart, MachineLogic(attachments={"events": EVENTS})))
    by_type = {each.type: each.input_schema for each in found}
    assert by_type["PAY"]["required"] == ["cents"]
    assert by_type["ATTACK"]["properties"]["target"] == {"type": "string"}
    assert by_type["HEAL"]["properties"] == {} and not by_type["HEAL"]["additionalProperties"]
    assert by_type["ANY"] is None
    assert json.dumps([each.to_json() for each in found])


@pytest.mark.parametrize("events", [{"ATTACK": int}, {"ATTACK": {"type": "array"}}, ["ATTACK"]])
def test_a_schema_that_describes_no_payload_fails_when_the_machine_is_built(events):
    logic = LOGIC.merge(agent_sources(), MachineLogic(attachments={"events": events}))
    invoke = {"src": "agent.decide", "input": {"allowedEvents": ["ATTACK"]}}
    with pytest.raises(ValueError, match="event"):
        create_machine(game(invoke=invoke), logic)


# D2: attempts


@pytest.mark.parametrize("engine", ["sync", "async"])
def test_decision_ruling_d2_a_guarded_event_is_rejected_and_asked_again(engine):
    script = SCRIPTS[engine]({"type": "HEAL"}, {"type": "ATTACK", "target": "goblin"})
    done = play(hosted(game(), script), engine)
    assert keys(done) == {"fought"} and done.context["hit"] == "goblin"
    assert [len(each.attempts) for each in script.requests] == [0, 1]
    [attempt] = script.requests[1].attempts
    assert (attempt.failure, attempt.event) == ("rejected-by-guard", {"type": "HEAL"})


def test_decision_ruling_d2_a_guard_sees_the_payload():
    chart = chart_of(
        {"PAY": {"target": "b", "guard": lambda context, event: event.payload["cents"] < 500}}
    )
    chart["states"]["a"]["invoke"] = {"src": "agent.decide"}
    script = Script({"type": "PAY", "cents": 900}, {"type": "PAY", "cents": 100})
    assert keys(play(hosted(chart, script))) == {"b"}
    assert script.requests[1].attempts[0].event == {"type": "PAY", "cents": 900}


@pytest.mark.parametrize("engine", ["sync", "async"])
def test_decision_ruling_d2_an_answer_outside_the_candidates_is_an_unknown_event(engine):
    script = SCRIPTS[engine]({"type": "FLY", "to": "the moon"}, "GO")
    assert resolve(engine, request_of("GO", "STAY"), script) == {"type": "GO"}
    [attempt] = script.requests[1].attempts
    assert attempt.failure == "unknown-event"
    assert attempt.event == {"type": "FLY", "to": "the moon"}
    assert attempt.reason == "not an event to choose here; choose from: GO, STAY"


@pytest.mark.parametrize("engine", ["sync", "async"])
def test_decision_ruling_d2_a_missing_field_without_retries_exhausts_the_decision(engine):
    snapshot = snapshot_of(chart_of({"ATTACK": "b"}), MachineLogic(attachments={"events": EVENTS}))
    request = AgentDecisionRequest(id="d", events=get_accepted_events(snapshot))
    script = SCRIPTS[engine]({"type": "ATTACK"})
    with pytest.raises(DecisionExhaustedError) as exhausted:
        resolve(engine, request, script, max_retries=0)
    [attempt] = exhausted.value.attempts
    assert attempt.failure == "invalid-payload"
    assert attempt.reason == "the payload does not fit (target: Field required)"
    assert isinstance(exhausted.value, AgentError) and exhausted.value.code == "decision-exhausted"


@pytest.mark.parametrize(
    "payload",
    [
        {"target": 7},
        {"target": "x", "times": "2"},
        {"target": "x", "more": 1},
        {"target": "x", "times": float("nan")},
        {"target": "\ud800"},
        {"target": object()},
        {"target": "x" * 70_000},
    ],
)
def test_decision_ruling_d2_a_payload_is_checked_strictly_and_never_repeated(payload):
    snapshot = snapshot_of(chart_of({"ATTACK": "b"}), MachineLogic(attachments={"events": EVENTS}))
    request = AgentDecisionRequest(id="d", events=get_accepted_events(snapshot))
    script = Script({"type": "ATTACK", **payload}, {"type": "ATTACK", "target": "orc"})
    assert resolve("sync", request, script) == {"type": "ATTACK", "target": "orc", "times": 1}
    [attempt] = script.requests[1].attempts
    assert attempt.failure == "invalid-payload"
    assert "more" not in attempt.reason and len(attempt.reason) < 200
    assert script.requests[1].to_json()


def test_decision_ruling_d2_an_event_declared_without_payload_takes_none():
    snapshot = snapshot_of(chart_of({"HEAL": "b"}), MachineLogic(attachments={"events": EVENTS}))
    request = AgentDecisionRequest(id="d", events=get_accepted_events(snapshot))
    script = Script({"type": "HEAL", "by": 9}, "HEAL")
    assert resolve("sync", request, script) == {"type": "HEAL"}
    assert script.requests[1].attempts[0].failure == "invalid-payload"


def test_decision_ruling_d2_without_a_schema_a_payload_is_any_json():
    request = request_of("GO")
    given = {"type": "GO", "way": [1, {"x": None}]}
    assert resolve("sync", request, Script(given)) == given
    with pytest.raises(DecisionExhaustedError):
        resolve("sync", request, Script({"type": "GO", "way": {1, 2}}), max_retries=0)


def test_decision_ruling_d2_a_request_read_from_json_is_checked_by_its_schema():
    snapshot = snapshot_of(chart_of({"ATTACK": "b"}), MachineLogic(attachments={"events": EVENTS}))
    request = AgentDecisionRequest(id="d", events=get_accepted_events(snapshot))
    read = request_from_json(json.loads(json.dumps(request.to_json())))
    assert read == request
    script = Script({"type": "ATTACK", "target": 7}, {"type": "ATTACK", "target": "orc"})
    assert resolve("sync", read, script)["target"] == "orc"
    assert script.requests[1].attempts[0].failure == "invalid-payload"


def test_decision_ruling_d2_every_attempt_is_seen_and_nothing_else_changes():
    request = request_of("GO", prompt="p", system="s", messages=[user_message("m")])
    script = Script("A", "B", "GO")
    resolve("sync", request, script)
    assert [[a.event["type"] for a in each.attempts] for each in script.requests] == [
        [],
        ["A"],
        ["A", "B"],
    ]
    assert all(each.with_attempts([]) == request for each in script.requests)
    assert request.attempts == []


def test_decision_ruling_d2_attempts_of_a_recorded_request_are_kept():
    request = request_of("GO")
    with pytest.raises(DecisionExhaustedError) as first:
        resolve("sync", request, Script("A"), max_retries=0)
    again = request.with_attempts(list(first.value.attempts))
    script = Script("B", "GO")
    resolve("sync", again, script)
    assert [a.event["type"] for a in script.requests[1].attempts] == ["A", "B"]


@pytest.mark.parametrize(("retries", "calls"), [(None, 3), (0, 1), (1, 2), (4, 5)])
def test_decision_ruling_d2_there_is_one_call_more_than_there_are_retries(retries, calls):
    script = Script(*["A"] * 9)
    with pytest.raises(DecisionExhaustedError) as exhausted:
        resolve("sync", request_of("GO"), script, max_retries=retries)
    assert len(script.requests) == len(exhausted.value.attempts) == calls
    assert "unknown-event" in str(exhausted.value)


def test_decision_ruling_d2_retries_are_those_of_the_chart_unless_a_host_says_otherwise():
    script = Script("A", "A")
    with pytest.raises(DecisionExhaustedError):
        resolve("sync", request_of("GO", max_retries=0), script)
    assert len(script.requests) == 1
    chart = game(invoke={"src": "agent.decide", "input": {"maxRetries": 1}, "onError": "fumbled"})
    script = Script("A", "A", "A")
    assert keys(play(hosted(chart, script))) == {"fumbled"}
    assert len(script.requests) == 2


@pytest.mark.parametrize("retries", [-1, True, 1.5, "2"])
def test_decision_ruling_d2_retries_are_a_number(retries):
    with pytest.raises(AgentConfigError, match="max_retries"):
        resolve("sync", request_of("GO"), Script("GO"), max_retries=retries)


def test_decision_ruling_d2_choosing_nothing_is_an_attempt_without_an_event():
    script = Script({"event": None, "reason": "several were chosen"}, {"event": None}, "GO")
    resolve("sync", request_of("GO"), script)
    assert [(a.failure, a.event, a.reason) for a in script.requests[2].attempts] == [
        ("unknown-event", None, "several were chosen"),
        ("unknown-event", None, "no event was chosen"),
    ]


def test_decision_ruling_d2_what_was_chosen_is_kept_as_far_as_a_log_can_hold_it():
    script = Script({"type": "x" * 5000 + "\ud800", "why": {1}}, "GO")
    resolve("sync", request_of("GO"), script)
    [attempt] = script.requests[1].attempts
    assert attempt.event == {"type": "x" * 256}
    assert "x" * 5 not in attempt.reason


@pytest.mark.parametrize("engine", ["sync", "async"])
@pytest.mark.parametrize(
    "answer",
    [
        None,
        "GO",
        [],
        {},
        {"type": "GO"},
        {"event": "GO"},
        {"event": {"to": 1}},
        {"event": {"type": 1}},
    ],
    ids=str,
)
def test_decision_ruling_d2_a_malformed_answer_ends_the_decision_at_once(engine, answer):
    calls = []

    def decide(request):
        calls.append(request)
        return answer

    with pytest.raises(AgentError, match="the decide executor returned") as raised:
        resolve(engine, request_of("GO"), decide)
    assert not isinstance(raised.value, DecisionExhaustedError) and len(calls) == 1


@pytest.mark.parametrize("engine", ["sync", "async"])
def test_decision_ruling_d2_what_the_executor_raises_passes_through(engine):
    script = SCRIPTS[engine](ConnectionError("down"), "GO")
    with pytest.raises(ConnectionError):
        resolve(engine, request_of("GO"), script)
    assert len(script.requests) == 1


def test_decision_ruling_d2_what_can_take_raises_passes_through():
    def can_take(event):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        resolve("sync", request_of("GO"), Script("GO"), can_take=can_take)


def test_decision_ruling_d2_only_false_rejects():
    assert resolve("sync", request_of("GO"), Script("GO"), can_take=lambda event: None)


def test_decision_ruling_d2_an_async_executor_is_not_for_the_sync_form():
    with pytest.raises(NotSupportedError, match="await resolve_decision"):
        resolve_decision_sync(request_of("GO"), AsyncScript("GO"))


def test_decision_ruling_d2_a_plain_function_may_return_an_awaitable():
    async def later():
        return {"event": {"type": "GO"}}

    assert resolve("async", request_of("GO"), lambda request: later()) == {"type": "GO"}


# Signals


@pytest.mark.parametrize("engine", ["sync", "async"])
def test_a_signal_that_is_set_ends_the_decision_before_the_next_call(engine):
    signal = threading.Event()

    def decide(request, info):
        assert info.signal is signal
        signal.set()
        return {"event": {"type": "A"}}

    with pytest.raises(AbortedError):
        resolve(engine, request_of("GO"), decide, signal=signal)
    with pytest.raises(AbortedError):
        resolve(engine, request_of("GO"), Script(), signal=signal)


def test_an_asyncio_event_ends_a_decision_during_the_call():
    cancelled = []

    async def main():
        signal = asyncio.Event()

        async def decide(request):
            asyncio.get_running_loop().call_soon(signal.set)
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                cancelled.append(True)
                raise

        with pytest.raises(AbortedError):
            await resolve_decision(request_of("GO"), decide, signal=signal)
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(main())
    assert cancelled == [True]


def test_a_signal_that_is_not_set_changes_nothing():
    async def main():
        return await resolve_decision(request_of("GO"), AsyncScript("GO"), signal=asyncio.Event())

    assert asyncio.run(main()) == {"type": "GO"}


def test_cancelling_a_decision_cancels_the_call():
    async def main():
        started = asyncio.Event()

        async def decide(request):
            started.set()
            await asyncio.sleep(3600)

        task = asyncio.ensure_future(resolve_decision(request_of("GO"), decide))
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())


# D3: reason and type


def test_decision_ruling_d3_a_reason_is_in_raw_and_never_in_the_event():
    seen = []
    answer = {"event": {"type": "ATTACK", "target": "orc"}, "reason": "it is close"}
    machine = hosted(game(), Script(answer), on_result=lambda request, result: seen.append(result))
    done = play(machine)
    assert done.context["hit"] == "orc"
    assert seen[0].raw == answer and "reason" not in seen[0].output["event"]


def test_decision_ruling_d3_the_type_wins_over_a_field_of_that_name():
    class Loud(pydantic.BaseModel):
        type: Literal["SHOUT"]
        words: str

    logic = MachineLogic(attachments={"events": {"SHOUT": Loud}})
    snapshot = snapshot_of(chart_of({"SHOUT": "b"}), logic)
    [descriptor] = get_accepted_events(snapshot)
    assert "type" not in descriptor.input_schema["properties"]
    assert descriptor.input_schema["required"] == ["words"]
    request = AgentDecisionRequest(id="d", events=[descriptor])
    event = Event("SHOUT", {"type": "WHISPER", "words": "hey"})
    chosen = resolve("sync", request, lambda request: {"event": event})
    assert chosen == {"type": "SHOUT", "words": "hey"}
    plain = resolve("sync", request_of("GO"), lambda request: {"event": Event("GO", {"type": "X"})})
    assert plain == {"type": "GO"}


def test_decision_ruling_d3_an_answer_may_be_generated_or_wrapped_as_toolkits_do():
    answer = {"event": {"type": "GO"}}
    for given in (Generated(answer), {"object": answer}, {"output": answer, "toolResults": []}):
        assert resolve("sync", request_of("GO"), lambda request, given=given: given) == {
            "type": "GO"
        }


# D4: what is checked where


@pytest.mark.parametrize("engine", ["sync", "async"])
def test_decision_ruling_d4_a_bare_interpreter_checks_types_and_payloads_but_no_guards(engine):
    invoke = {
        "src": "agent.decide",
        "input": {"allowedEvents": ["HEAL", "ATTACK"]},
        "onDone": "seen",
    }
    script = SCRIPTS[engine]("FLY", {"type": "ATTACK"}, "HEAL")
    machine = create_machine(game(invoke=invoke), TYPED.merge(agent_sources(decide=script)))
    done = play(machine, engine)
    failures = [each.failure for each in script.requests[2].attempts]
    assert failures == ["unknown-event", "invalid-payload"]
    # The guard refused the event when it came, so the state stayed and the invoke completed.
    assert keys(done) == {"seen"}


@pytest.mark.parametrize("engine", ["sync", "async"])
def test_decision_ruling_d4_a_bare_interpreter_needs_allowed_events(engine):
    script = SCRIPTS[engine]()
    machine = create_machine(game(), LOGIC.merge(agent_sources(decide=script)))
    done = play(machine, engine)
    assert done.status == "error"
    assert isinstance(done.error, AgentConfigError) and "declare allowed_events" in str(done.error)
    assert not script.requests


def test_decision_ruling_d4_a_logic_with_its_own_executor_gets_guards_from_its_host():
    script = Script("HEAL", "ATTACK")
    move = create_decision_logic(allowed_events="*").with_executor(script)
    logic = LOGIC.merge(MachineLogic(services={"move": move}))
    machine = hosted(game(invoke={"src": "move"}), None, logic)
    assert keys(play(machine)) == {"fought"}
    assert script.requests[1].attempts[0].failure == "rejected-by-guard"


def test_decision_ruling_d4_a_guard_that_raises_is_an_error_of_the_decision():
    logic = LOGIC.merge(MachineLogic(guards={"weak": lambda context, event: 1 / 0}))
    invoke = {"src": "agent.decide", "onError": {"target": "fumbled", "actions": "fail"}}
    done = play(hosted(game(invoke=invoke), Script("HEAL"), logic))
    assert keys(done) == {"fumbled"} and done.context["failed"] == "StepError"


# D5: delivery


class Watch(Plugin):
    def __init__(self):
        self.events = []
        self.ended = []

    def on_event_received(self, interpreter, event):
        self.events.append(event.type)

    def on_service_done(self, interpreter, invocation, output):
        self.ended.append(output)


@pytest.mark.parametrize("engine", ["sync", "async"])
def test_decision_ruling_d5_an_in_state_event_completes_the_invoke_with_the_event(engine):
    invoke = {"src": "agent.decide", "onDone": {"target": "seen", "actions": "see"}}
    watch = Watch()
    script = SCRIPTS[engine]({"type": "NOTE", "text": "hm"})
    done = play(hosted(game(invoke=invoke), script), engine, plugins=[watch])
    assert keys(done) == {"seen"}
    assert done.context["notes"] == [{"text": "hm"}]
    assert done.context["seen"] == {"type": "NOTE", "text": "hm"}
    assert watch.events.count("NOTE") == 1 and len(watch.ended) == 1


@pytest.mark.parametrize("engine", ["sync", "async"])
def test_decision_ruling_d5_an_exiting_event_cancels_the_invoke(engine):
    invoke = {"src": "agent.decide", "onDone": {"target": "seen", "actions": "see"}}
    watch = Watch()
    done = play(hosted(game(invoke=invoke), SCRIPTS[engine]("ATTACK")), engine, plugins=[watch])
    assert keys(done) == {"fought"}
    assert "seen" not in done.context
    assert watch.events.count("ATTACK") == 1 and watch.ended == []


@pytest.mark.parametrize("engine", ["sync", "async"])
def test_decision_ruling_d5_a_reentering_event_starts_a_new_decision(engine):
    chart = game(
        on={
            "AGAIN": {"target": "choosing", "reenter": True},
            "ATTACK": "fought",
        }
    )
    script = SCRIPTS[engine]("AGAIN", "AGAIN", "ATTACK")
    assert keys(play(hosted(chart, script), engine)) == {"fought"}
    assert len(script.requests) == 3 and not any(each.attempts for each in script.requests)


@pytest.mark.parametrize("engine", ["sync", "async"])
def test_decision_ruling_d5_a_decision_inside_a_child_goes_to_the_child(engine):
    parent = {
        "id": "parent",
        "initial": "playing",
        "states": {
            "playing": {"invoke": {"src": "game", "onDone": "over"}, "on": {"ATTACK": "wrong"}},
            "over": {},
            "wrong": {},
        },
    }
    logic = MachineLogic(services={"game": create_machine(game(), LOGIC)})
    script = SCRIPTS[engine]("HEAL", "ATTACK")
    done = play(hosted(parent, script, logic), engine)
    assert keys(done) == {"over"}
    assert [len(each.attempts) for each in script.requests] == [0, 1]


def test_decision_ruling_d5_an_answer_that_comes_too_late_is_not_sent():
    async def main():
        release = asyncio.Event()

        async def decide(request):
            try:
                await release.wait()
            except asyncio.CancelledError:  # a client that does not give up
                await release.wait()
            return {"event": {"type": "ATTACK"}}

        chart = game(on={"LEAVE": "seen", "ATTACK": "fought"})
        chart["states"]["seen"] = {"on": {"ATTACK": "fumbled"}}
        running = await Interpreter(hosted(chart, decide)).start()
        await running.send("LEAVE", wait=True)
        release.set()
        for _ in range(5):
            await asyncio.sleep(0)
        running.stop()
        return running

    assert keys(asyncio.run(main())) == {"seen"}


def test_decision_ruling_d5_a_slow_sync_decision_is_not_sent_to_a_state_that_was_left():
    release = threading.Event()
    entered = threading.Event()

    def decide(request):
        entered.set()
        release.wait(10)
        return {"event": {"type": "ATTACK"}}

    async def main():
        chart = game(on={"LEAVE": "seen", "ATTACK": "fought"})
        chart["states"]["seen"] = {"on": {"ATTACK": "fumbled"}}
        running = await Interpreter(hosted(chart, decide)).start()
        await asyncio.to_thread(entered.wait, 10)
        await running.send("LEAVE", wait=True)
        release.set()
        while running.computing():
            await running.changed()
        running.stop()
        return running

    assert keys(asyncio.run(main())) == {"seen"}


def test_decision_ruling_d5_the_event_comes_from_inside_and_approves_nothing():
    outside = []

    def before_step(snapshot, event, now, host, from_outside):
        outside.append((getattr(event, "type", "engine"), from_outside))

    logic = LOGIC.merge(MachineLogic(before_step=before_step))
    play(hosted(game(), Script("ATTACK"), logic))
    assert ("ATTACK", False) in outside


@pytest.mark.parametrize("engine", ["sync", "async"])
def test_decision_ruling_d5_an_exhausted_decision_goes_to_on_error_with_its_attempts(engine):
    seen = []
    logic = LOGIC.merge(
        MachineLogic(actions={"keep": lambda context, event: seen.append(event.error)})
    )
    invoke = {"src": "agent.decide", "onError": {"target": "fumbled", "actions": "keep"}}
    script = SCRIPTS[engine]("HEAL", "FLY", "HEAL")
    assert keys(play(hosted(game(invoke=invoke), script, logic), engine)) == {"fumbled"}
    assert [each.failure for each in seen[0].attempts] == [
        "rejected-by-guard",
        "unknown-event",
        "rejected-by-guard",
    ]


def test_decision_ruling_d5_an_exhausted_decision_without_on_error_puts_the_machine_in_error():
    done = play(hosted(game(), Script("HEAL", "HEAL", "HEAL")))
    assert done.status == "error" and isinstance(done.error, DecisionExhaustedError)
    assert done.snapshot.error["type"] == "DecisionExhaustedError"


# D6: calls are counted, wiring is checked


def test_decision_ruling_d6_a_host_sees_each_call_and_may_refuse_it():
    seen = []

    class Enough(Exception):
        pass

    def before_call(request):
        seen.append(len(request.attempts))
        if len(seen) > 2:
            raise Enough

    script = Script("HEAL", "HEAL", "ATTACK")
    done = play(hosted(game(), script, before_call=before_call))
    assert seen == [0, 1, 2] and len(script.requests) == 2
    assert isinstance(done.error, Enough)


def test_decision_ruling_d6_a_host_sees_each_result():
    seen = []
    play(
        hosted(
            game(),
            Script("HEAL", "ATTACK"),
            on_result=lambda request, result: seen.append((len(request.attempts), result.output)),
        )
    )
    assert seen == [(0, {"event": {"type": "HEAL"}}), (1, {"event": {"type": "ATTACK"}})]


def test_decision_ruling_d6_a_missing_executor_is_found_when_the_machine_is_bound():
    with pytest.raises(AgentConfigError, match=r"source 'agent.decide' of machine 'game'.*decide="):
        hosted(game(), None)


def test_decision_ruling_d6_a_missing_executor_of_a_child_is_found_too():
    parent = {
        "id": "parent",
        "initial": "playing",
        "states": {"playing": {"invoke": {"src": "game"}}},
    }
    logic = MachineLogic(services={"game": create_machine(game(), LOGIC)})
    with pytest.raises(AgentConfigError, match="of machine 'game'"):
        hosted(parent, None, logic)


def test_decision_ruling_d6_logic_in_the_chart_itself_cannot_be_bound_and_says_so():
    move = create_decision_logic(allowed_events=["ATTACK"])
    with pytest.raises(AgentConfigError, match="stands in the chart itself"):
        hosted(game(invoke={"src": move}), Script())
    decided = move.with_executor(Script("ATTACK"))
    assert keys(play(hosted(game(invoke={"src": decided}), None))) == {"fought"}


def test_decision_ruling_d6_an_unbound_source_says_what_it_lacks():
    invoke = {"src": "agent.decide", "input": {"allowedEvents": "*"}}
    done = play(create_machine(game(invoke=invoke), LOGIC.merge(agent_sources())))
    assert isinstance(done.error, AgentConfigError) and "pass decide=" in str(done.error)


@pytest.mark.parametrize("executor", [7, lambda: None])
def test_decision_ruling_d6_an_executor_of_no_known_form_is_refused(executor):
    with pytest.raises(AgentConfigError, match="executor"):
        agent_sources(decide=executor)
    with pytest.raises(AgentConfigError, match="executor"):
        create_decision_logic().with_executor(executor)
    with pytest.raises(AgentConfigError, match="executor"):
        hosted(game(), executor)


def test_decision_ruling_d6_a_name_that_is_defined_nowhere_is_listed():
    chart = game(entry="missing", invoke=[{"src": "agent.decide"}, {"src": "nothing"}])
    with pytest.raises(ChartError, match="'missing'.*'nothing'"):
        hosted(chart, Script())


def test_binding_leaves_machines_without_request_logic_alone():
    machine = create_machine({"id": "m", "initial": "a", "states": {"a": {}}})
    assert bind_executors(machine, Binding(AgentRequestExecutors())) is machine
    assert with_sources(machine) is machine


def test_the_built_in_sources_are_added_once():
    machine = create_machine(game(), LOGIC)
    assert not machine.bound
    completed = with_sources(machine)
    assert completed.bound and with_sources(machine) is completed
    assert with_sources(completed) is completed


def test_a_machine_that_starts_itself_is_bound_once():
    services = {}
    machine = create_machine(game(), LOGIC.merge(MachineLogic(services=services)))
    machine.logic.services["again"] = machine
    bound = hosted(machine, Script("ATTACK"))
    assert bound.logic.services["again"] is bound


# D7: sources by name


@pytest.mark.parametrize("key", ["allowed_events", "allowedEvents"])
def test_decision_ruling_d7_the_input_of_agent_decide_takes_both_spellings(key):
    invoke = {
        "src": "agent.decide",
        "input": {
            "model": "small",
            "system": "s",
            "prompt": "p",
            "messages": [{"role": "user", "content": "m"}],
            key: ["ATTACK"],
            "maxRetries": 0,
            "maxOutputTokens": 9,
            "stop_sequences": ["x"],
            "metadata": {"a": 1},
        },
    }
    script = Script("ATTACK")
    play(hosted(game(invoke=invoke), script))
    [request] = script.requests
    assert (request.model, request.system, request.prompt) == ("small", "s", "p")
    assert request.messages == [user_message("m")]
    assert (request.max_retries, request.max_output_tokens) == (0, 9)
    assert (request.id, request.src) == ("0.game.choosing", "agent.decide")


@pytest.mark.parametrize(
    "given",
    [{"promt": "x"}, {"maxRetries": "many"}, {"allowedEvents": 7}, {"messages": ["hi"]}, 7],
)
def test_decision_ruling_d7_an_input_that_does_not_fit_is_found_early(given):
    with pytest.raises(ChartError, match=r"\$\.states\.choosing\.invoke: input of 'agent.decide'"):
        hosted(game(invoke={"src": "agent.decide", "input": given}), Script())
    chart = game(invoke={"src": "agent.decide", "input": lambda context, event: given})
    done = play(hosted(chart, Script()))
    assert isinstance(done.error, AgentConfigError)


def test_decision_ruling_d7_a_chart_defines_its_own_source_under_a_built_in_name():
    mine = create_decision_logic(prompt="mine", allowed_events="*")
    logic = LOGIC.merge(MachineLogic(services={"agent.decide": mine}))
    script = Script("ATTACK")
    play(hosted(game(invoke={"src": "agent.decide"}), script, logic))
    assert script.requests[0].prompt == "mine"


def test_decision_ruling_d7_settings_are_values_or_functions_of_the_input():
    class Input(pydantic.BaseModel):
        hp: int

    move = create_decision_logic(
        model="small",
        system=lambda input: f"hp {input.hp}",
        messages=lambda input: [user_message("m")],
        temperature=lambda input: 0.5,
        allowed_events=lambda input: ["A", "B"],
        max_retries=1,
        input=Input,
    )
    assert (move.kind, move.max_retries) == ("decision", 1)
    request = move.request({"hp": 3}, id="x", src="move")
    assert (request.id, request.src, request.model, request.system) == (
        "x",
        "move",
        "small",
        "hp 3",
    )
    assert (request.temperature, request.max_retries) == (0.5, 1)
    assert [each.type for each in request.events] == ["A", "B"]
    with pytest.raises(AgentConfigError, match="create_decision_logic: input: hp"):
        move.request({"hp": "full"})


def test_decision_ruling_d7_without_a_snapshot_the_candidates_must_be_written():
    for allowed in (None, "*", ["a.*"]):
        with pytest.raises(AgentConfigError, match="unknown without a snapshot"):
            create_decision_logic(allowed_events=allowed).request()
    snapshot = snapshot_of(game(invoke=[]), LOGIC)
    request = create_decision_logic().request(None, snapshot)
    assert [each.type for each in request.events] == ["ATTACK", "HEAL", "NOTE"]


@pytest.mark.parametrize(
    "options",
    [
        {"max_retries": -1},
        {"max_retries": True},
        {"allowed_events": 7},
        {"allowed_events": [1]},
        {"allowed_events": [""]},
        {"prompt": lambda: "x"},
        {"prompt": lambda context, event: "x"},
    ],
)
def test_decision_ruling_d7_a_wrong_setting_is_refused_at_once(options):
    with pytest.raises(AgentConfigError):
        create_decision_logic(**options)


def test_decision_ruling_d7_an_async_setting_is_refused():
    async def prompt(input):
        return "x"

    with pytest.raises(AgentConfigError, match="prompt is async"):
        create_decision_logic(prompt=prompt)


def test_decision_ruling_d7_a_setting_that_computes_nonsense_is_named():
    move = create_decision_logic(prompt=lambda input: 7, allowed_events=["A"])
    with pytest.raises(AgentConfigError, match="prompt"):
        move.request()


def test_a_sync_machine_that_decides_survives_its_snapshot():
    invoke = {"src": "agent.decide", "onDone": {"target": "seen", "actions": "see"}}
    machine = hosted(game(invoke=invoke), Script({"type": "NOTE", "text": "hm"}))
    done = play(machine)
    again = SyncInterpreter.from_snapshot(json.loads(json.dumps(done.dump())), machine).start()
    assert again.context["seen"] == {"type": "NOTE", "text": "hm"}
    again.stop()
