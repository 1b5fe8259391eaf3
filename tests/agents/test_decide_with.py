from __future__ import annotations

import asyncio
import json

import pydantic
import pytest

from guardchart import MachineLogic, create_machine, initial_transition
from guardchart.agents import (
    AgentDecisionRequest,
    FakeModel,
    ModelResponse,
    Usage,
    decide_with,
    get_accepted_events,
    resolve_decision,
    resolve_decision_sync,
    user_message,
)
from guardchart.agents._requests import DecisionAttempt, as_generated
from guardchart.errors import AgentConfigError, AgentError, DecisionExhaustedError
from guardchart.gate import ToolCall
from tests.agents.decisions import AsyncScript, Script, game, hosted, keys, play
from tests.agents.loopback import provider


class Attack(pydantic.BaseModel):
    """Hit somebody."""

    target: str


class Say(pydantic.BaseModel):
    reason: str


CHART = {
    "id": "m",
    "initial": "a",
    "states": {"a": {"on": {"ATTACK": "b", "say.loud": "b", "FLEE": "b", "EXPLAIN": "b"}}, "b": {}},
}
LOGIC = MachineLogic(attachments={"events": {"ATTACK": Attack, "FLEE": None, "EXPLAIN": Say}})


def request(**more):
    snapshot = initial_transition(create_machine(CHART, LOGIC))[0]
    return AgentDecisionRequest(id="d", events=get_accepted_events(snapshot), **more)


def fake(*script, is_async=False):
    return FakeModel(script, is_async=is_async)


def ask(model, asked, **options):
    if not getattr(model, "is_async", False):
        return resolve_decision_sync(asked, decide_with(model, **options))
    return asyncio.run(resolve_decision(asked, decide_with(model, **options)))


@pytest.mark.parametrize("is_async", [False, True])
def test_decide_with_offers_each_candidate_as_a_tool_and_takes_the_call(is_async):
    model = fake({"tool": "send_event_ATTACK", "args": {"target": "orc"}}, is_async=is_async)
    asked = request(system="Be brave.", prompt="Your move.", messages=[user_message("hello")])
    assert ask(model, asked) == {"type": "ATTACK", "target": "orc"}
    [call] = model.calls
    assert call["tools"] == [
        "send_event_ATTACK",
        "send_event_say_loud",
        "send_event_FLEE",
        "send_event_EXPLAIN",
    ]
    system, hello, prompt = call["messages"]
    assert system["content"].startswith("Be brave.\n\nChoose exactly one")
    assert (hello["content"], prompt["content"]) == ("hello", "Your move.")


def test_decide_with_describes_events_and_their_payloads():
    seen = []

    def model(messages, tools):
        seen.extend(tools)
        return ModelResponse(tool_calls=[ToolCall("c", "send_event_say_loud", {})])

    assert ask(model, request()) == {"type": "say.loud"}
    attack, say, flee, _ = seen
    assert attack["description"] == "Hit somebody."
    assert attack["parameters"]["required"] == ["target"]
    assert say["description"] == "Send the event say.loud."
    assert say["parameters"] == {"type": "object", "properties": {}}
    assert flee["parameters"]["additionalProperties"] is False


def test_decide_with_keeps_the_text_beside_the_call_and_the_usage_for_the_host():
    model = fake({"text": "it is close", "tool": "send_event_FLEE", "usage": Usage(9, 2)})
    result = as_generated(decide_with(model)(request()))
    assert result.output == {"event": {"type": "FLEE"}, "reason": "it is close"}
    assert result.usage == Usage(9, 2) and isinstance(result.raw, ModelResponse)


def test_decide_with_tells_failed_attempts_so_that_retries_converge():
    def model(messages, tools):
        told = messages[-1]["content"]
        if "You chose FLEE. It was not taken: the chart does not take this event now." in told:
            assert "choose differently" in told
            return ModelResponse(tool_calls=[ToolCall("c", "send_event_ATTACK", {"target": "orc"})])
        return ModelResponse(tool_calls=[ToolCall("c", "send_event_FLEE", {})])

    chosen = resolve_decision_sync(
        request(prompt="Go."), decide_with(model), can_take=lambda event: event["type"] != "FLEE"
    )
    assert chosen == {"type": "ATTACK", "target": "orc"}


def test_decide_with_tells_what_was_wrong_with_each_answer():
    model = fake(
        {"tool": "send_event_ATTACK", "args": {"target": 7}},
        {"tool": "send_event_FLY"},
        {"text": "I would rather not."},
        {"tool_calls": [{"tool": "send_event_FLEE"}, {"tool": "send_event_FLEE"}]},
        {"tool": "send_event_FLEE"},
    )
    asked = request(prompt="Go.", max_retries=4)
    assert ask(model, asked) == {"type": "FLEE"}
    lines = model.calls[-1]["messages"][-1]["content"].splitlines()
    assert lines == [
        'You chose ATTACK with {"target": 7}. It was not taken: the payload does not fit '
        "(target: Input should be a valid string).",
        "You chose send_event_FLY. It was not taken: not an event to choose here; choose from: "
        "ATTACK, say.loud, FLEE, EXPLAIN.",
        "Your answer was not taken: no event was chosen: call exactly one of the tools.",
        "Your answer was not taken: several events were chosen: choose exactly one.",
        "Choose again, from: ATTACK, say.loud, FLEE, EXPLAIN.",
    ]
    # Everything before that message stays as it was.
    assert model.calls[-1]["messages"][:-1] == model.calls[0]["messages"]


def test_decide_with_cuts_what_it_repeats():
    attempt = DecisionAttempt(
        event={"type": "ATTACK", "target": "x" * 5000}, failure="rejected-by-guard", reason="no"
    )
    told = decide_with(fake()).messages(request(attempts=[attempt]))[-1]["content"]
    assert len(told) < 800


def test_decide_with_always_asks_something():
    decide = decide_with(fake())
    assert decide.messages(request())[-1] == {"role": "user", "content": "Choose."}
    asked = request(messages=[user_message("hello")])
    assert [each["role"] for each in decide.messages(asked)] == ["system", "user"]


@pytest.mark.parametrize(
    ("text", "event", "reason"),
    [
        (
            '{"event": {"type": "ATTACK", "target": "orc"}, "reason": "near"}',
            ("ATTACK", "orc"),
            "near",
        ),
        ('{"type": "ATTACK", "target": "orc"}', ("ATTACK", "orc"), None),
        ('{"event": "ATTACK", "target": "orc"}', ("ATTACK", "orc"), None),
        (
            '```json\n{"type": "ATTACK", "target": "orc", "reason": "near"}\n```',
            ("ATTACK", "orc"),
            "near",
        ),
        ('{"event": {"type": "send_event_FLEE"}}', ("FLEE",), None),
        (" FLEE\n", ("FLEE",), None),
        ("send_event_FLEE", ("FLEE",), None),
    ],
)
@pytest.mark.parametrize("mode", ["tools", "json"])
def test_decide_with_understands_a_model_that_answers_in_text(text, event, reason, mode):
    result = as_generated(decide_with(fake({"text": text}), mode=mode)(request()))
    wanted = {"type": event[0], **({"target": event[1]} if event[1:] else {})}
    assert result.output == {"event": wanted, "reason": reason}


def test_decide_with_leaves_a_reason_that_belongs_to_the_event():
    answer = {"type": "EXPLAIN", "reason": "because"}
    assert ask(fake({"text": json.dumps(answer)}), request()) == answer


@pytest.mark.parametrize(
    "text", ["I choose FLEE.", "", '["FLEE"]', '{"event": 7}', "{oops", '{"event": {"to": 1}}']
)
def test_decide_with_does_not_guess_a_choice_out_of_prose(text):
    result = as_generated(decide_with(fake({"text": text}))(request()))
    assert result.output["event"] is None


def test_decide_with_can_do_without_tools():
    model = fake({"text": "no idea"}, {"text": '{"event": {"type": "FLEE"}}'})
    assert ask(model, request(system="s"), mode="json") == {"type": "FLEE"}
    first, second = model.calls
    assert first["tools"] == [] and second["tools"] == []
    system = first["messages"][0]["content"]
    assert "- ATTACK, payload: {" in system and "- say.loud\n" in system
    assert "answer with one JSON object" in second["messages"][-1]["content"]


@pytest.mark.parametrize("arguments", [{"__unparseable__": "{oops"}, "text", None])
def test_decide_with_counts_arguments_that_are_no_json_as_an_invalid_payload(arguments):
    def model(messages, tools):
        return ModelResponse(tool_calls=[ToolCall("c", "send_event_say_loud", arguments)])

    with pytest.raises(DecisionExhaustedError) as exhausted:
        ask(model, request(max_retries=0))
    assert exhausted.value.attempts[0].failure == "invalid-payload"


def test_decide_with_takes_the_type_from_the_tool_and_not_from_its_arguments():
    model = fake({"tool": "send_event_say_loud", "args": {"type": "FLEE", "words": "hey"}})
    assert ask(model, request()) == {"type": "say.loud", "words": "hey"}


def test_decide_with_passes_on_what_the_model_raises():
    with pytest.raises(ConnectionError):
        ask(fake(ConnectionError("down")), request())


def test_decide_with_refuses_what_is_no_model():
    with pytest.raises(AgentConfigError, match="chat_model"):
        decide_with(object())
    with pytest.raises(AgentConfigError, match="mode"):
        decide_with(fake(), mode="xml")
    with pytest.raises(AgentError, match="no ModelResponse"):
        ask(lambda messages, tools: "FLEE", request())


def test_decide_with_hands_images_on_in_parts():
    model = fake({"tool": "send_event_FLEE"})
    image = user_message([{"type": "image", "image": "https://example.org/x"}])
    ask(model, request(messages=[user_message("look:"), image]))
    _, text, sent = model.calls[0]["messages"]
    assert text == {"role": "user", "content": "look:"} and sent == image.to_json()


def test_decide_with_asks_a_model_that_takes_settings_for_them():
    seen = []

    class Model:
        is_async = False

        def with_settings(self, settings):
            seen.append(settings.given())
            return fake({"tool": "send_event_FLEE"})

        def __call__(self, messages, tools):
            raise AssertionError

    asked = request(temperature=0.0, max_output_tokens=9, top_k=3, stop_sequences=["x"])
    ask(Model(), asked)
    assert seen == [
        {
            "force_tool": True,
            "temperature": 0.0,
            "max_output_tokens": 9,
            "top_k": 3,
            "stop_sequences": ["x"],
        }
    ]


def test_decide_with_waits_for_a_plain_function_that_returns_an_awaitable():
    async def later():
        return ModelResponse(tool_calls=[ToolCall("c", "send_event_FLEE", {})])

    decide = decide_with(lambda messages, tools: later())
    assert asyncio.run(resolve_decision(request(), decide)) == {"type": "FLEE"}


@pytest.mark.parametrize("engine", ["sync", "async"])
def test_decide_with_plays_a_chart_on_either_engine(engine):
    model = fake(
        {"tool": "send_event_HEAL"},
        {"tool": "send_event_ATTACK", "args": {"target": "goblin"}},
        is_async=engine == "async",
    )
    done = play(hosted(game(), decide_with(model)), engine)
    assert keys(done) == {"fought"} and done.context["hit"] == "goblin"
    assert decide_with(model).bounded and (Script().requests == AsyncScript().requests == [])


# Real clients, against a provider on the loopback interface


def test_decide_with_forces_one_tool_of_openai(monkeypatch):
    openai = pytest.importorskip("openai")
    from guardchart.openai import openai_model

    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    call = {
        "id": "c1",
        "type": "function",
        "function": {"name": "send_event_ATTACK", "arguments": '{"target": "orc"}'},
    }
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    body = {
        "id": "x",
        "object": "chat.completion",
        "created": 1,
        "model": "gpt-4o-mini",
        "choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}],
    }
    with provider((200, body)) as server:
        options = {"api_key": "unused", "base_url": f"{server.url}/v1", "max_retries": 0}
        with openai.OpenAI(**options) as client:
            model = openai_model(client, temperature=1.0)
            asked = request(temperature=0.25, max_output_tokens=40, seed=7, top_k=3)
            assert ask(model, asked) == {"type": "ATTACK", "target": "orc"}
    [(_, sent)] = server.requests
    assert sent["tool_choice"] == "required" and sent["parallel_tool_calls"] is False
    assert (sent["temperature"], sent["max_tokens"], sent["seed"]) == (0.25, 40, 7)
    assert "top_k" not in sent


def test_decide_with_forces_one_tool_of_anthropic(monkeypatch):
    anthropic = pytest.importorskip("anthropic")
    from guardchart.anthropic import anthropic_model

    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    block = {"type": "tool_use", "id": "c1", "name": "send_event_FLEE", "input": {}}
    body = {
        "id": "x",
        "type": "message",
        "role": "assistant",
        "model": "claude-sonnet-4-5",
        "content": [block],
        "stop_reason": "tool_use",
        "usage": {"input_tokens": 3, "output_tokens": 2},
    }
    with provider((200, body)) as server:
        options = {"api_key": "unused", "base_url": server.url, "max_retries": 0}
        with anthropic.Anthropic(**options) as client:
            model = anthropic_model(client, model="claude-test")
            assert ask(model, request(max_output_tokens=40, top_k=3)) == {"type": "FLEE"}
    [(_, sent)] = server.requests
    assert sent["tool_choice"] == {"type": "any", "disable_parallel_tool_use": True}
    assert sent["max_tokens"] == 40


def test_decide_with_forces_a_tool_of_a_langchain_chat_model():
    pytest.importorskip("langchain_core")
    from langchain_core.messages import AIMessage

    from guardchart.langchain import chat_model
    from tests.langchain.fakes import Scripted

    bound = []

    class Model(Scripted):
        def bind_tools(self, tools, **kwargs):
            bound.append(kwargs)
            return super().bind_tools(tools, **kwargs)

    call = {"name": "send_event_FLEE", "args": {}, "id": "c1"}
    fake_chat = Model(script=[AIMessage("", tool_calls=[call])])
    model = chat_model(fake_chat, is_async=False)
    assert ask(model, request(temperature=0.5)) == {"type": "FLEE"}
    assert bound == [{"temperature": 0.5, "tool_choice": "any"}]
    assert fake_chat.told[0][0] == "send_event_ATTACK"


def test_settings_about_tools_are_left_out_of_a_request_without_any(monkeypatch):
    openai = pytest.importorskip("openai")
    from guardchart.agents import ModelSettings
    from guardchart.openai import openai_model

    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    message = {"role": "assistant", "content": "hi"}
    body = {
        "id": "x",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
    }
    with provider((200, body)) as server:
        options = {"api_key": "unused", "base_url": f"{server.url}/v1", "max_retries": 0}
        with openai.OpenAI(**options) as client:
            model = openai_model(client).with_settings(ModelSettings(force_tool=True, top_p=0.5))
            assert model([{"role": "user", "content": "x"}], []).text == "hi"
    [(_, sent)] = server.requests
    assert "tool_choice" not in sent and sent["top_p"] == 0.5
