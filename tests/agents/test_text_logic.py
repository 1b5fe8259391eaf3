from __future__ import annotations

import asyncio
import threading

import pydantic
import pytest

from guardchart import MachineLogic, create_machine
from guardchart.agents import (
    AgentRequestExecutors,
    Generated,
    agent_sources,
    create_text_logic,
    tool,
    tool_registry,
    user_message,
)
from guardchart.agents._request_logic import Binding
from guardchart.agents._sources import bind_executors
from guardchart.errors import AbortedError, AgentConfigError, AgentError, ChartError
from tests.agents.decisions import keys, play


def asking(src="agent.generate_text", **invoke):
    return {
        "id": "m",
        "initial": "asking",
        "states": {
            "asking": {
                "invoke": {
                    "src": src,
                    "input": {"prompt": "Say hi."},
                    "onDone": {"target": "said", "actions": "keep"},
                    "onError": {"target": "failed", "actions": "keep"},
                    **invoke,
                }
            },
            "said": {},
            "failed": {},
        },
    }


LOGIC = MachineLogic(actions={"keep": lambda context, event: {"answer": event.error or event.data}})


def bind(chart, logic=LOGIC, *, binding=None, **executors):
    machine = create_machine(chart, logic)
    return bind_executors(machine, Binding(AgentRequestExecutors(**executors), **(binding or {})))


def in_engine(engine, fn):
    """The function as an executor of an engine."""
    if engine == "sync":
        return fn

    async def later(request):
        await asyncio.sleep(0)
        return fn(request)

    return later


@pytest.mark.parametrize("engine", ["sync", "async"])
@pytest.mark.parametrize(
    "src", ["agent.generate_text", "agent.generateText", "agent.stream_text", "agent.streamText"]
)
def test_decision_ruling_d7_text_sources_have_two_spellings_and_one_executor_each(engine, src):
    requests = []

    def answer(request):
        requests.append(request)
        return {"text": "hi"}

    slot = "stream_text" if "stream" in src else "generate_text"
    done = play(bind(asking(src), **{slot: in_engine(engine, answer)}), engine)
    assert keys(done) == {"said"} and done.context["answer"] == "hi"
    assert requests[0].prompt == "Say hi." and requests[0].src == src
    assert requests[0].stream is ("stream" in src)


@pytest.mark.parametrize(
    ("src", "slot"),
    [
        ("agent.generate_text", "generate_text"),
        ("agent.streamText", "stream_text"),
        ("agent.decide", "decide"),
        ("agent.user_input", "user_input"),
    ],
)
def test_decision_ruling_d6_each_source_without_executor_is_named_with_its_slot(src, slot):
    chart = asking(src, input={})
    with pytest.raises(AgentConfigError, match=rf"source '{src}' of machine 'm' .*{slot}="):
        bind(chart)


def test_a_missing_handler_for_a_person_recommends_to_wait_for_an_event():
    with pytest.raises(AgentConfigError, match="settles idle"):
        bind(asking("agent.userInput", input={}))


def test_decision_ruling_d8_an_answer_is_normalised_for_the_chart_and_raw_for_the_host():
    seen = []
    raw = {"object": {"a": 1}, "toolCalls": [], "usage": {"input_tokens": 3}}
    binding = {"on_result": lambda request, result: seen.append((request.id, result))}
    done = play(bind(asking(), binding=binding, generate_text=lambda request: raw))
    assert done.context["answer"] == {"a": 1}
    [(id_, result)] = seen
    assert id_ == "0.m.asking" and result.raw == raw and result.usage == {"input_tokens": 3}


def test_chunks_reach_the_host_with_their_request():
    chunks = []

    def stream(request, info):
        for piece in ("h", "i"):
            info.on_chunk(piece)
        return "hi"

    binding = {"on_chunk": lambda chunk, request: chunks.append((chunk, request.id))}
    done = play(bind(asking("agent.stream_text"), binding=binding, stream_text=stream))
    assert done.context["answer"] == "hi"
    assert chunks == [("h", "0.m.asking"), ("i", "0.m.asking")]


def test_a_bare_interpreter_has_nobody_to_hear_chunks():
    def stream(request, info):
        assert info.on_chunk is None and info.signal is None
        return "hi"

    machine = create_machine(
        asking("agent.stream_text"), LOGIC.merge(agent_sources(stream_text=stream))
    )
    assert keys(play(machine)) == {"said"}


def test_decision_ruling_d6_text_calls_are_counted_and_may_be_refused():
    def refuse(request):
        raise AgentError("enough")

    asked = []
    machine = bind(asking(), binding={"before_call": refuse}, generate_text=asked.append)
    assert keys(play(machine)) == {"failed"} and asked == []


def test_a_signal_that_is_set_asks_no_model():
    signal = threading.Event()
    signal.set()
    machine = bind(asking(), binding={"signal": signal}, generate_text=lambda request: "hi")
    done = play(machine)
    assert isinstance(done.context["answer"], AbortedError)


def test_a_text_logic_has_the_settings_of_its_input():
    class Input(pydantic.BaseModel):
        name: str

    class Greeting(pydantic.BaseModel):
        words: str

    def look_up(order: int) -> str:
        """Find an order."""
        return ""

    greet = create_text_logic(
        model="small",
        prompt=lambda input: f"Greet {input.name}.",
        messages=[user_message("m")],
        tools=lambda input: tool_registry(look_up),
        output=Greeting,
        input=Input,
        max_output_tokens=9,
        seed=4,
    )
    assert (greet.kind, greet.slot) == ("text", "generate_text")
    request = greet.request({"name": "Ada"}, id="x", src="greet")
    assert request.prompt == "Greet Ada." and request.seed == 4
    assert request.output_schema["properties"] == {"words": {"title": "Words", "type": "string"}}
    assert [each["name"] for each in request.tools] == ["look_up"]
    assert create_text_logic(tools=[tool(look_up)]).request().tools == request.tools
    assert create_text_logic(tools=request.tools).request().tools == request.tools
    assert create_text_logic(stream=True).slot == "stream_text"


@pytest.mark.parametrize(
    ("answer", "output"),
    [
        ({"words": "hi"}, {"words": "hi"}),
        ('{"words": "hi"}', {"words": "hi"}),
        (Generated({"words": "hi"}), {"words": "hi"}),
        ({"object": {"words": "hi"}}, {"words": "hi"}),
    ],
)
def test_an_answer_is_validated_where_a_type_is_wanted(answer, output):
    class Greeting(pydantic.BaseModel):
        words: str

    greet = create_text_logic(output=Greeting).with_executor(lambda request: answer)
    done = play(
        create_machine(asking("greet"), LOGIC.merge(MachineLogic(services={"greet": greet})))
    )
    assert done.context["answer"] == output


@pytest.mark.parametrize("answer", [{"words": 7}, "secret text", {"secret": 1}, None])
def test_an_answer_that_does_not_fit_is_an_error_without_the_answer(answer):
    class Greeting(pydantic.BaseModel):
        words: str

    greet = create_text_logic(output=Greeting).with_executor(lambda request: answer)
    done = play(
        create_machine(asking("greet"), LOGIC.merge(MachineLogic(services={"greet": greet})))
    )
    error = done.context["answer"]
    assert keys(done) == {"failed"} and isinstance(error, AgentError)
    assert "does not fit its output" in str(error) and "secret" not in str(error)


def test_text_may_be_the_type_that_is_wanted():
    assert create_text_logic(output=str).read("5") == "5"
    assert create_text_logic(output=list[int]).read("[1, 2]") == [1, 2]
    assert create_text_logic(output={"type": "object"}).read("free") == "free"


@pytest.mark.parametrize("options", [{"stream": 1}, {"prompt": lambda: "x"}])
def test_a_wrong_setting_of_a_text_logic_is_refused_at_once(options):
    with pytest.raises(AgentConfigError):
        create_text_logic(**options)


@pytest.mark.parametrize("given", [{"promt": "x"}, {"tools": 7}, {"allowedEvents": ["A"]}])
def test_an_input_of_a_text_source_that_does_not_fit_is_found_when_the_machine_is_built(given):
    with pytest.raises(ChartError, match=r"\$\.states\.asking\.invoke: input of 'agent.generate"):
        bind(asking(input=given), generate_text=lambda request: "hi")


# People


@pytest.mark.parametrize("engine", ["sync", "async"])
@pytest.mark.parametrize("src", ["agent.user_input", "agent.userInput"])
def test_decision_ruling_d7_a_person_is_asked_inline(engine, src):
    asked = []

    def handler(question):
        asked.append(question)
        return {"colour": "blue"}

    chart = asking(src, input={"prompt": "Which colour?", "inputSchema": {"type": "object"}})
    done = play(bind(chart, user_input=in_engine(engine, handler)), engine)
    assert done.context["answer"] == {"colour": "blue"}
    assert (asked[0].id, asked[0].src, asked[0].prompt) == ("0.m.asking", src, "Which colour?")


def test_asking_a_person_is_no_model_call():
    def refuse(request):
        raise AssertionError

    machine = bind(
        asking("agent.user_input"), binding={"before_call": refuse}, user_input=lambda asked: "x"
    )
    assert keys(play(machine)) == {"said"}
