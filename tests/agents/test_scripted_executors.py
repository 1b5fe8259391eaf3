from __future__ import annotations

import asyncio
import json

import pytest

from guardchart.agents import (
    AgentTextRequest,
    AgentUserInput,
    Generated,
    create_decision_logic,
    resolve_decision,
    resolve_decision_sync,
)
from guardchart.agents._requests import AgentExecutorInfo
from guardchart.errors import AgentConfigError, AgentError, DecisionExhaustedError
from guardchart.kernel import Event
from guardchart.testing import Refusal, ScriptedExecutors
from tests.agents.decisions import game, hosted, keys, play

REQUEST = create_decision_logic(allowed_events=["ATTACK", "FLEE"]).request(id="d")
TEXT = AgentTextRequest(id="t", prompt="Say hi.")


def sync(**scripts):
    return ScriptedExecutors(**scripts, is_async=False)


@pytest.mark.parametrize(
    "item",
    [
        "FLEE",
        {"type": "FLEE"},
        {"event": {"type": "FLEE"}, "reason": "x"},
        Event("FLEE"),
        Generated({"event": {"type": "FLEE"}}),
        lambda request: request.events[1].type,
    ],
    ids=["type", "event", "answer", "Event", "Generated", "function"],
)
def test_scripted_executors_take_a_decision_in_any_form(item):
    assert resolve_decision_sync(REQUEST, sync(decide=[item]).decide) == {"type": "FLEE"}


def test_scripted_executors_record_every_request_and_simulate_refusals():
    script = sync(decide=[Refusal("no"), None, {"type": "FLEE", "to": "the hills"}])
    assert resolve_decision_sync(REQUEST, script.decide) == {"type": "FLEE", "to": "the hills"}
    assert [len(each.attempts) for each in script.requests] == [0, 1, 2]
    assert [each.reason for each in script.requests[2].attempts] == ["no", "no event was chosen"]
    script.assert_played()


def test_scripted_executors_refuse_for_good_where_the_script_does():
    with pytest.raises(DecisionExhaustedError):
        resolve_decision_sync(REQUEST, sync(decide=[Refusal()] * 3).decide)


def test_scripted_executors_raise_what_the_script_holds():
    script = sync(generate_text=[ConnectionError("down"), KeyError])
    with pytest.raises(ConnectionError):
        script.generate_text(TEXT)
    with pytest.raises(KeyError):
        script.generate_text(TEXT)
    assert len(script.requests) == 2


def test_scripted_executors_say_when_the_script_is_over_or_not_played():
    script = sync(generate_text=["hi"], decide=["A", "B"], user_input=[])
    script.generate_text(TEXT)
    with pytest.raises(AgentError, match=r"generate_text script is exhausted after 1 call"):
        script.generate_text(TEXT)
    with pytest.raises(AgentError, match=r"user_input script is exhausted after 0 call"):
        script.user_input(AgentUserInput(id="u"))
    with pytest.raises(AssertionError, match=r"not played: \{'decide': 2\}"):
        script.assert_played()


def test_scripted_executors_leave_a_slot_empty_that_has_no_script():
    script = sync(decide=[])
    assert script.generate_text is None and script.stream_text is None and script.user_input is None
    assert script.options == {"decide": script.decide}
    assert script.executors.decide is script.decide and script.executors.generate_text is None


def test_scripted_executors_stream_chunks():
    heard = []
    script = sync(stream_text=[["h", "i"], "whole", Refusal("no")])
    info = AgentExecutorInfo(on_chunk=heard.append)
    assert script.stream_text(TEXT, info) == "hi" and heard == ["h", "i"]
    assert script.stream_text(TEXT) == "whole"
    assert script.stream_text(TEXT) == "no"


def test_scripted_executors_can_hang_until_they_are_cancelled():
    async def main():
        script = ScriptedExecutors(decide=[{"hang": True}])
        task = asyncio.ensure_future(resolve_decision(REQUEST, script.decide))
        while not script.requests:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    with pytest.raises(AgentConfigError, match="is_async"):
        sync(generate_text=[{"hang": True}]).generate_text(TEXT)


@pytest.mark.parametrize("engine", ["sync", "async"])
def test_scripted_executors_play_a_machine_and_replay_it(engine):
    is_async = engine == "async"
    script = ScriptedExecutors(
        decide=["HEAL", {"type": "ATTACK", "target": "orc"}], is_async=is_async
    )
    assert keys(play(hosted(game(), script.decide), engine)) == {"fought"}
    recording = json.loads(json.dumps(script.recording))
    assert [each["output"]["event"]["type"] for each in recording] == ["HEAL", "ATTACK"]

    again = ScriptedExecutors.replaying(recording, is_async=is_async)
    done = play(hosted(game(), again.decide), engine)
    assert keys(done) == {"fought"} and done.context["hit"] == "orc"
    again.assert_played()


def test_a_replay_finds_its_answers_by_id_whatever_the_order():
    script = sync(generate_text=["one", "two"])
    first, second = AgentTextRequest(id="a"), AgentTextRequest(id="b")
    script.generate_text(first), script.generate_text(second)
    again = ScriptedExecutors.replaying(script.recording, is_async=False)
    assert again.generate_text(second).output == "two"
    with pytest.raises(AssertionError, match=r"not played: \{'generate_text': 1\}"):
        again.assert_played()
    assert again.generate_text(first).output == "one"


def test_a_replay_refuses_a_request_that_was_not_recorded():
    script = sync(generate_text=["one", ConnectionError("down")])
    script.generate_text(TEXT)
    with pytest.raises(ConnectionError):
        script.generate_text(AgentTextRequest(id="u"))
    again = ScriptedExecutors.replaying(script.recording, is_async=False)
    with pytest.raises(AssertionError, match="no recorded request of generate_text has the id 'x'"):
        again.generate_text(AgentTextRequest(id="x"))
    with pytest.raises(AssertionError, match=r"differs from the recorded one: \['prompt'\]"):
        again.generate_text(AgentTextRequest(id="t", prompt="Say ho."))
    with pytest.raises(AgentError, match="did not answer"):
        again.generate_text(AgentTextRequest(id="u"))


@pytest.mark.parametrize("recording", [[{}], [{"slot": "x", "request": {}}]])
def test_a_replay_refuses_what_is_no_recording(recording):
    with pytest.raises(AgentConfigError, match="replaying"):
        ScriptedExecutors.replaying(recording)
