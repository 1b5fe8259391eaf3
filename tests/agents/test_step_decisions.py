"""Decisions and text requests, one recorded step at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pydantic import BaseModel

from guardchart import Machine, MachineLogic, create_machine
from guardchart.agents import (
    AgentConfigError,
    FakeModel,
    ModelResponse,
    agent_logic,
    approval_event,
    create_decision_logic,
    create_text_logic,
    execute_agent_request,
    execute_agent_request_sync,
    get_agent_requests,
    initial_agent_step,
    load_chart,
    pending_approval,
    replay,
    request_from_json,
    resolve_agent_step,
    transition_agent_step,
)
from guardchart.errors import AgentError, DecisionExhaustedError, NotSupportedError, StepError
from guardchart.kernel import dump, load
from guardchart.persistence import InMemoryLedger
from tests.agents.loops import AT_ONCE, Bank, pay
from tests.agents.stepping import Stepped

GAME = {
    "id": "game",
    "initial": "choosing",
    "context": {"hp": 10},
    "states": {
        "choosing": {
            "invoke": {
                "id": "move",
                "src": "agent.decide",
                "input": {"prompt": "Your move."},
                "onDone": {"actions": "noted"},
                "onError": "fumbled",
            },
            "on": {
                "ATTACK": {"target": "won", "actions": "struck"},
                "HEAL": {"target": "choosing", "guard": "isHurt", "reenter": True},
                "NOTE": {"actions": "wrote"},
            },
        },
        "won": {"type": "final"},
        "fumbled": {"on": {"AGAIN": "choosing"}},
    },
}
LOGIC = MachineLogic(
    guards={"isHurt": lambda context, event: context["hp"] < 5},
    actions={
        "struck": lambda context, event: {"target": event.payload["target"]},
        "wrote": lambda context, event: {"note": event.payload.get("text")},
        "noted": lambda context, event: {"done": event.data},
    },
)


class Attack(BaseModel):
    target: str


def game(**schemas: Any) -> Machine:
    logic = LOGIC.merge(MachineLogic(attachments={"events": schemas}))
    return create_machine(GAME, logic)


def answers(*events: Any) -> tuple[dict[str, Any], list[Any]]:
    """A ``decide`` that gives these answers, and the requests it was given."""
    seen: list[Any] = []
    left = iter(events)

    def decide(request: Any) -> Any:
        seen.append(request)
        answer = next(left)
        if isinstance(answer, Exception):
            raise answer
        return {"event": answer, "reason": "because"}

    return {"decide": decide}, seen


@pytest.mark.parametrize("json_each", [False, True])
def test_a_decision_ends_in_one_recorded_event_after_two_calls_p9(json_each: bool) -> None:
    executors, seen = answers({"type": "HEAL"}, {"type": "ATTACK", "target": "orc"})
    stepped = Stepped(game(), None, executors=executors, json_each=json_each)
    (request,) = stepped.requests
    assert (request.kind, request.id) == ("decision", "move@1")
    assert [each.type for each in request.events] == ["ATTACK", "HEAL", "NOTE"]
    stepped.run()
    assert stepped.step.done and stepped.context["target"] == "orc"
    assert [[a.failure for a in each.attempts] for each in seen] == [[], ["rejected-by-guard"]]
    types = [entry["event"]["type"] for entry in stepped.log]
    assert types == ["xstate.init", "ATTACK"]
    assert stepped.log[1]["event"] == {"type": "ATTACK", "target": "orc"}
    assert replay(game(), stepped.log).context == stepped.context


def test_a_reason_rides_in_raw_and_never_in_the_event_d3() -> None:
    executors, _ = answers({"type": "ATTACK", "target": "orc"})
    step = initial_agent_step(game())
    executed = execute_agent_request_sync(step.requests[0], executors, verbose=True)
    assert executed.output == {"type": "ATTACK", "target": "orc"}
    step = resolve_agent_step(
        game_of(step), step, step.requests[0], executed.output, raw=executed.raw
    )
    assert step.entry["raw"]["reason"] == "because"
    assert "reason" not in step.entry["event"]


def game_of(step: Any) -> Machine:
    return step.snapshot.machine  # type: ignore[no-any-return]


def test_a_decision_that_stays_in_its_state_completes_with_the_event_d5() -> None:
    executors, _ = answers({"type": "NOTE", "text": "hm"})
    stepped = Stepped(game(), None, executors=executors)
    (request,) = stepped.requests
    stepped.perform(request)
    assert stepped.context["note"] == "hm" and stepped.context["done"]["type"] == "NOTE"
    assert stepped.requests == () and not stepped.step.done
    assert replay(game(), stepped.log).context == stepped.context


@pytest.mark.parametrize(
    ("event", "failure"),
    [
        ({"type": "FLEE"}, "unknown-event"),
        ({"type": "HEAL"}, "rejected-by-guard"),
        ({"type": "ATTACK"}, "invalid-payload"),
        ({"type": "ATTACK", "target": 3}, "invalid-payload"),
        ("ATTACK", "without a type"),
        (None, "no event was chosen"),
        ({"target": "orc"}, "without a type"),
    ],
)
def test_a_host_cannot_bring_an_event_that_was_not_to_be_chosen_d4(
    event: Any, failure: str
) -> None:
    machine = game(ATTACK=Attack)
    step = initial_agent_step(machine)
    with pytest.raises(AgentError, match=failure):
        resolve_agent_step(machine, step, step.requests[0], event)
    assert [each.id for each in step.requests] == ["move@1"]


def test_exhausted_decisions_go_to_on_error_with_their_attempts_and_replay_p11() -> None:
    executors, _ = answers(*[{"type": "FLEE"}] * 3)
    machine = game()
    seen: list[Any] = []
    logic = LOGIC.merge(MachineLogic(actions={"noted": lambda c, e: None}))
    chart = {**GAME, "states": {**GAME["states"]}}  # type: ignore[dict-item]
    choosing = dict(GAME["states"]["choosing"])  # type: ignore[index]
    choosing["invoke"] = {
        **choosing["invoke"],
        "onError": {"target": "fumbled", "actions": "failed"},
    }
    chart["states"]["choosing"] = choosing

    def failed(context: Any, event: Any) -> dict[str, Any]:
        seen.append(event.error)
        return {"failures": [each.failure for each in event.error.attempts]}

    machine = create_machine(chart, logic.merge(MachineLogic(actions={"failed": failed})))
    stepped = Stepped(machine, None, executors=executors).run()
    assert stepped.step.snapshot.value == "fumbled"
    assert stepped.context["failures"] == ["unknown-event"] * 3
    assert type(seen[0]) is DecisionExhaustedError
    assert replay(machine, stepped.log) == stepped.step.snapshot


def test_what_an_executor_raises_is_brought_as_a_failure() -> None:
    executors, seen = answers(OSError("down"))
    stepped = Stepped(game(), None, executors=executors).run()
    assert stepped.step.snapshot.value == "fumbled" and len(seen) == 1


def test_a_missing_decide_executor_is_named_d6() -> None:
    step = initial_agent_step(game())
    with pytest.raises(AgentConfigError, match=r"agent\.decide.*decide="):
        execute_agent_request_sync(step.requests[0])


async def test_an_async_decide_is_awaited_and_refused_by_the_sync_form() -> None:
    async def decide(request: Any) -> Any:
        return {"event": {"type": "ATTACK", "target": "orc"}}

    step = initial_agent_step(game())
    chosen = await execute_agent_request(step.requests[0], {"decide": decide})
    assert chosen == {"type": "ATTACK", "target": "orc"}
    with pytest.raises(NotSupportedError, match="await execute_agent_request"):
        execute_agent_request_sync(step.requests[0], {"decide": decide})


def test_a_request_read_from_json_is_decided_by_type_and_payload() -> None:
    """Guards need the state; whoever brings the event is checked again."""
    machine = game()
    step = initial_agent_step(machine)
    read = request_from_json(step.requests[0].to_json())
    executors, _ = answers({"type": "HEAL"})
    chosen = execute_agent_request_sync(read, executors)
    assert chosen == {"type": "HEAL"}
    with pytest.raises(AgentError, match="rejected-by-guard"):
        resolve_agent_step(machine, step, read, chosen)


@pytest.mark.gate
def test_a_model_that_chooses_an_approval_approves_nothing_p6() -> None:
    """The loop waits for a person; a region beside it lets a model choose any event."""
    bank = Bank()
    chart: dict[str, Any] = {
        "id": "both",
        "type": "parallel",
        "context": load_chart()["context"],
        "states": {
            "loop": {k: v for k, v in load_chart().items() if k in ("initial", "states")},
            "other": {
                "initial": "waiting",
                "states": {
                    "waiting": {"on": {"ASK": "asking"}},
                    "asking": {"invoke": {"src": "agent.decide", "id": "d"}},
                },
            },
        },
    }
    logic = agent_logic(FakeModel([pay()], is_async=False), bank.registry(), retry=AT_ONCE)
    machine = create_machine(chart, logic)
    given: dict[str, Any] = {"ledger": InMemoryLedger(), "scope": "s"}
    step = initial_agent_step(machine, **given)
    step = transition_agent_step(machine, step, {"type": "START", "prompt": "pay"})
    (request,) = step.requests
    step = resolve_agent_step(machine, step, request, execute_agent_request_sync(request))
    step = transition_agent_step(machine, step, "ASK")
    (request,) = step.requests
    assert request.kind == "decision"
    forged = approval_event(pending_approval(step.snapshot.context))
    step = resolve_agent_step(machine, step, request, forged)
    assert "both.loop.awaiting_human" in step.snapshot.state_ids
    assert not any(each.kind == "tool" for each in step.requests) and bank.paid == []


def test_a_decision_inside_a_child_goes_to_the_child_p10() -> None:
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
    executors, _ = answers({"type": "ATTACK", "target": "orc"})
    stepped = Stepped(machine, None, executors=executors).run()
    assert stepped.step.snapshot.value == "end"
    assert replay(machine, stepped.log) == stepped.step.snapshot


# --- text --------------------------------------------------------------------------------------


class Draft(BaseModel):
    title: str
    words: int = 0


def _writer(source: Any) -> Machine:
    chart = {
        "id": "writer",
        "initial": "writing",
        "states": {
            "writing": {
                "invoke": {
                    "src": "write",
                    "id": "w",
                    "input": {"topic": "tea"},
                    "onDone": {"target": "done", "actions": "keep"},
                    "onError": {"target": "failed", "actions": "note"},
                }
            },
            "done": {},
            "failed": {},
        },
    }
    return create_machine(
        chart,
        MachineLogic(
            services={"write": source},
            actions={
                "keep": lambda context, event: {"draft": event.data},
                "note": lambda context, event: {"failure": type(event.error).__name__},
            },
        ),
    )


@pytest.mark.parametrize(
    ("answer", "draft"),
    [
        ('{"title": "Tea"}', {"title": "Tea", "words": 0}),
        (Draft(title="Tea", words=3), {"title": "Tea", "words": 3}),
        ({"output": {"title": "Tea"}}, {"title": "Tea", "words": 0}),
        ({"title": 7}, None),
        ("Tea", None),
    ],
)
def test_an_answer_is_read_by_the_source_that_asked(answer: Any, draft: Any) -> None:
    source = create_text_logic(prompt=lambda input: f"About {input['topic']}.", output=Draft)
    machine = _writer(source)
    stepped = Stepped(machine, None, executors={"generate_text": lambda request: answer})
    (request,) = stepped.requests
    assert request.prompt == "About tea." and "title" in request.output_schema["properties"]
    stepped.run()
    assert stepped.step.snapshot.value == ("done" if draft else "failed")
    assert stepped.context.get("draft") == draft
    assert replay(machine, stepped.log) == stepped.step.snapshot


def test_a_source_with_an_executor_of_its_own_needs_none_of_the_hosts() -> None:
    source = create_text_logic(prompt="x").with_executor(lambda request: {"text": "own"})
    stepped = Stepped(_writer(source), None, executors={"generate_text": _never}).run()
    assert stepped.context["draft"] == "own"


def _never(request: Any) -> Any:
    raise AssertionError("the host's executor was called")


def test_a_source_that_streams_is_served_by_stream_text() -> None:
    source = create_text_logic(prompt="x", stream=True)
    executors = {"generate_text": _never, "stream_text": lambda request: "streamed"}
    stepped = Stepped(_writer(source), None, executors=executors).run()
    assert stepped.context["draft"] == "streamed"


def test_a_model_response_of_a_plain_text_request_is_its_text() -> None:
    source = create_text_logic(prompt="x")
    executors = {"generate_text": lambda request: ModelResponse("hello")}
    stepped = Stepped(_writer(source), None, executors=executors).run()
    assert stepped.context["draft"] == "hello"


def test_a_question_to_a_person_is_an_action_and_not_a_request() -> None:
    chart = {
        "id": "m",
        "initial": "asking",
        "states": {
            "asking": {
                "invoke": {
                    "src": "agent.user_input",
                    "id": "u",
                    "input": {"prompt": "Which colour?"},
                    "onDone": "answered",
                }
            },
            "answered": {},
        },
    }
    machine = create_machine(chart)
    step = initial_agent_step(machine)
    (action,) = step.actions
    assert (action.kind, action.id, action.value) == ("start", "u@1", {"prompt": "Which colour?"})
    assert resolve_agent_step(machine, step, action, "blue").snapshot.value == "answered"


def test_a_source_that_stands_in_the_chart_is_asked_too() -> None:
    source: Callable[..., Any] = create_decision_logic(allowed_events=["GO"])
    chart = {
        "id": "m",
        "initial": "a",
        "states": {"a": {"invoke": {"src": source, "id": "d"}, "on": {"GO": "b"}}, "b": {}},
    }
    machine = create_machine(chart)
    step = initial_agent_step(machine)
    (request,) = step.requests
    assert [each.type for each in request.events] == ["GO"]
    assert resolve_agent_step(machine, step, request, {"type": "GO"}).snapshot.value == "b"


def test_a_snapshot_of_the_machine_without_its_sources_can_be_stepped() -> None:
    bare = game()
    step = initial_agent_step(bare)
    assert get_agent_requests(bare, dump(step.snapshot)) == step.requests
    assert get_agent_requests(bare, load(bare, dump(step.snapshot))) == step.requests
    with pytest.raises(StepError, match="another machine"):
        transition_agent_step(game(), step, "NOTE")
