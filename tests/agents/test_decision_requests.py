from __future__ import annotations

import asyncio
import json

import pydantic
import pytest

from guardchart.agents import (
    AgentDecisionRequest,
    AgentEventDescriptor,
    AgentExecutorInfo,
    AgentTextRequest,
    DecisionAttempt,
    Generated,
    ModelResponse,
    Usage,
    request_from_json,
    user_message,
)
from guardchart.agents._requests import as_generated, call_executor, settled
from guardchart.errors import AgentConfigError, AgentError

TEXT = AgentTextRequest(
    id="0.draft.writing",
    src="agent.generate_text",
    model="small",
    system="Be brief.",
    prompt="Say hi.",
    messages=[user_message("hello")],
    tools=[{"name": "lookup", "description": "", "parameters": {"type": "object"}}],
    output_schema={"type": "object"},
    max_output_tokens=20,
    top_p=0.5,
    stop_sequences=["END"],
    metadata={"ticket": 4},
)
DECISION = AgentDecisionRequest(
    id="0.game.choosing",
    src="agent.decide",
    events=[
        AgentEventDescriptor(
            type="ATTACK",
            tool_name="send_event_ATTACK",
            input_schema={"type": "object", "properties": {"target": {"type": "string"}}},
        ),
        AgentEventDescriptor(type="HEAL", tool_name="send_event_HEAL"),
    ],
    attempts=[
        DecisionAttempt(event={"type": "HEAL"}, failure="rejected-by-guard", reason="not now"),
        DecisionAttempt(failure="unknown-event", reason="no event was chosen"),
    ],
    max_retries=1,
    temperature=0.0,
)


@pytest.mark.parametrize("request_", [TEXT, DECISION], ids=["text", "decision"])
def test_decision_ruling_d8_a_request_survives_its_json(request_):
    data = json.loads(json.dumps(request_.to_json()))
    assert request_from_json(data) == request_
    assert type(request_)(**request_.model_dump(by_alias=False)) == request_


def test_decision_ruling_d8_the_json_of_a_request_is_camel_case_and_without_nulls():
    data = DECISION.to_json()
    assert data["kind"] == "decision"
    assert data["events"][0]["toolName"] == "send_event_ATTACK"
    assert "inputSchema" not in data["events"][1]
    assert "event" not in data["attempts"][1]
    assert data["maxRetries"] == 1
    assert "system" not in data
    assert TEXT.to_json()["maxOutputTokens"] == 20


def test_decision_ruling_d8_retries_change_attempts_and_nothing_else():
    fresh = DECISION.with_attempts([])
    assert fresh.attempts == [] and len(DECISION.attempts) == 2
    assert fresh.with_attempts(DECISION.attempts) == DECISION


@pytest.mark.parametrize(
    "data",
    [
        None,
        [],
        {},
        {"kind": "secret", "id": "x"},
        {"kind": ["text"], "id": "x"},
        {"kind": "text"},
        {"kind": "text", "id": "x", "secret_key": 1},
        {"kind": "decision", "id": "x"},
        {"kind": "decision", "id": "x", "events": [{"type": "A"}]},
        {"kind": "decision", "id": "x", "events": [], "maxRetries": -1},
        {"kind": "decision", "id": "x", "events": [], "attempts": [{"failure": "secret"}]},
        {"kind": "text", "id": "x", "messages": [{"role": "secret", "content": "x"}]},
    ],
)
def test_decision_ruling_d8_what_is_no_request_is_one_typed_error(data):
    with pytest.raises(AgentError) as refused:
        request_from_json(data)
    assert "secret" not in str(refused.value)


def test_decision_ruling_d8_requests_do_not_change():
    with pytest.raises(pydantic.ValidationError):
        TEXT.prompt = "other"


# Executors


def test_executors_are_called_with_what_they_take():
    info = AgentExecutorInfo(on_chunk=print)

    class Decider:
        def __call__(self, request, info):
            return request, info

        def method(self, request):
            return request, None

    assert call_executor(lambda request: request, 1, info) == 1
    assert call_executor(lambda request, info: (request, info), 1, info) == (1, info)
    assert call_executor(lambda request, *, info=None: (request, info), 1, info) == (1, info)
    assert call_executor(lambda request, temperature=0.5: temperature, 1, info) == 0.5
    assert call_executor(lambda *request: request, 1, info) == (1,)
    assert call_executor(Decider(), 1, info) == (1, info)
    assert call_executor(Decider().method, 1, info) == (1, None)
    assert call_executor(lambda request, info: info, 1, None) == AgentExecutorInfo()


@pytest.mark.parametrize(
    "executor", [None, "decide", lambda: None, lambda a, b, c: None, lambda request, *, tools: None]
)
def test_executors_of_no_known_form_are_refused(executor):
    with pytest.raises(AgentConfigError, match="executor"):
        call_executor(executor, 1, None)


def test_decision_ruling_d8_results_are_values_or_generated():
    usage = Usage(3, 1)
    whole = Generated("hi", usage=usage, raw={"id": 1})
    assert as_generated(whole) is whole
    assert as_generated(Generated("hi")).raw == "hi"
    assert as_generated("hi") == Generated("hi", raw="hi")
    assert as_generated(None).output is None
    assert as_generated(ModelResponse("hi", usage=usage)).usage is usage


@pytest.mark.parametrize(
    ("result", "output"),
    [
        ({"object": {"a": 1}, "text": "t", "output": "o"}, {"a": 1}),
        ({"text": "t", "output": "o"}, "t"),
        ({"output": "o"}, "o"),
        ({"object": None, "text": "t"}, None),
        ({"answer": 1}, {"answer": 1}),
        ({"toolResults": [{"output": "x"}], "a": 1}, {"toolResults": [{"output": "x"}], "a": 1}),
        ([{"output": "x"}], [{"output": "x"}]),
    ],
)
def test_decision_ruling_d8_a_plain_dict_is_unwrapped_and_tool_results_are_not(result, output):
    found = as_generated(result)
    assert found.output == output
    assert found.raw == result


def test_results_are_awaited_as_often_as_it_takes():
    async def inner():
        return "hi"

    async def outer():
        return inner()

    assert asyncio.run(settled(outer())) == "hi"
    assert asyncio.run(settled("hi")) == "hi"
