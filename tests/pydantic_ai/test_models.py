"""A pydantic-ai model in guardchart's own loop."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest
from pydantic_ai import Agent
from pydantic_ai.messages import ModelRequest, ModelResponse, TextPart, ToolCallPart
from pydantic_ai.models.function import FunctionModel
from pydantic_ai.models.test import TestModel
from pydantic_ai.usage import RequestUsage

from guardchart.agents import run_agent, run_agent_sync, tool, tool_registry
from guardchart.errors import AgentConfigError
from guardchart.pydantic_ai import model
from tests.pydantic_ai.agents import Script, call


def look_up(order: int) -> str:
    """Look up an order."""
    return f"order {order}: delivered"


async def test_it_drives_the_tool_loop_with_its_usage() -> None:
    script = Script(
        ModelResponse(
            parts=[call("look_up", {"order": 7})],
            usage=RequestUsage(input_tokens=5, output_tokens=2),
        ),
        "It was delivered.",
    )
    result = await run_agent(
        model=model(script.model), tools=tool_registry(look_up), prompt="Where is order 7?"
    )
    assert result.output == "It was delivered."
    assert result.usage["turns"] == 2 and result.usage["tokens_in"] >= 5
    assert script.tools == [["look_up"], ["look_up"]]
    last = script.messages[-1]
    assert isinstance(last[1], ModelResponse) and last[1].tool_calls[0].args == {"order": 7}
    assert isinstance(last[2], ModelRequest) and "delivered" in str(last[2].parts[0])


def test_it_drives_the_sync_engine() -> None:
    script = Script(call("look_up", {"order": 7}), "Delivered.")
    result = run_agent_sync(
        model=model(script.model, is_async=False),
        tools=tool_registry(look_up),
        prompt="Where is order 7?",
    )
    assert result.output == "Delivered."


async def test_a_side_effect_waits_for_a_person_as_with_any_model() -> None:
    script = Script(call("look_up", {"order": 7}))
    result = await run_agent(
        model=model(script.model),
        tools=tool_registry(tool(look_up, side_effect=True)),
        prompt="Where is order 7?",
    )
    assert result.waiting


async def test_arguments_that_are_no_json_are_denied() -> None:
    script = Script(call("look_up", "order=7"))
    result = await run_agent(
        model=model(script.model), tools=tool_registry(look_up), prompt="Where is order 7?"
    )
    assert result.error is not None and result.error["kind"] == "tool_denied"


def test_it_takes_the_model_of_an_agent() -> None:
    agent = Agent(TestModel(custom_output_text="hi"))
    assert model(agent, is_async=False)([{"role": "user", "content": "hello"}], []).text == "hi"


@pytest.mark.parametrize("given", [Agent(), object(), 5])
def test_what_is_no_model_is_refused(given: Any) -> None:
    with pytest.raises(AgentConfigError, match="model"):
        model(given)


async def test_text_is_told_piece_by_piece() -> None:
    async def stream(messages: Any, info: Any) -> Any:
        yield "one "
        yield "two"

    heard: list[str] = []
    answer = await model(FunctionModel(stream_function=stream)).stream(
        [{"role": "user", "content": "hello"}], [], heard.append
    )
    assert heard == ["one ", "two"] and answer.text == "one two"


async def test_a_cap_is_part_of_the_request() -> None:
    seen: list[Any] = []

    def answer(messages: Any, info: Any) -> ModelResponse:
        seen.append(info.model_settings)
        return ModelResponse(
            parts=[TextPart("hi"), ToolCallPart("a", {}, tool_call_id="c1")],
            usage=RequestUsage(cost=Decimal("0.25")),
        )

    capped = model(FunctionModel(answer), settings={"max_tokens": 100}).capped(7)
    found = await capped([{"role": "system", "content": "be short"}], [])  # type: ignore[misc]
    assert seen[0]["max_tokens"] == 7 and capped.capped(50) is capped
    assert found.text == "hi" and found.tool_calls[0].name == "a"
    assert found.usage.cost_usd == 0.25
    with pytest.raises(AgentConfigError, match="capped"):
        capped.capped(0)


def test_dots_in_tool_names_come_back() -> None:
    script = Script(call("shop_look_up", {"order": 7}), "Delivered.")
    result = run_agent_sync(
        model=model(script.model, is_async=False),
        tools=tool_registry(tool(look_up, name="shop.look_up")),
        prompt="Where is order 7?",
    )
    assert result.output == "Delivered." and script.tools[0] == ["shop_look_up"]


async def test_it_decides_which_event_comes_next() -> None:
    from guardchart import Interpreter, create_machine
    from guardchart.agents import agent_sources, decide_with

    chart = {
        "id": "m",
        "initial": "a",
        "states": {
            "a": {
                "invoke": {
                    "src": "agent.decide",
                    "input": {"prompt": "Left or right?", "allowed_events": ["LEFT", "RIGHT"]},
                },
                "on": {"LEFT": "left", "RIGHT": "right"},
            },
            "left": {},
            "right": {},
        },
    }
    script = Script(call("send_event_RIGHT", {}))
    machine = create_machine(chart, agent_sources(decide=decide_with(model(script.model))))
    interpreter = await Interpreter(machine).start()
    await interpreter.settle()
    assert interpreter.current_state_ids == {"m.right"}
    interpreter.stop()


async def test_a_decision_forces_one_tool_and_brings_its_settings() -> None:
    from pydantic_ai.messages import ModelMessage
    from pydantic_ai.models.function import AgentInfo, FunctionModel

    from guardchart.agents import (
        ModelSettings,
        create_decision_logic,
        decide_with,
        resolve_decision,
    )

    shown: list[Any] = []

    def answer(messages: list[ModelMessage], info: AgentInfo) -> Any:
        shown.append(info.model_settings)
        return Script(call("send_event_RIGHT", {}))(messages, info)

    asked = model(FunctionModel(answer), settings={"max_tokens": 30, "temperature": 1.0})
    request = create_decision_logic(
        allowed_events=["LEFT", "RIGHT"], temperature=0.25, seed=7, max_output_tokens=90
    ).request()
    assert await resolve_decision(request, decide_with(asked)) == {"type": "RIGHT"}
    assert shown == [
        {
            "max_tokens": 30,
            "temperature": 0.25,
            "seed": 7,
            "tool_choice": "required",
            "parallel_tool_calls": False,
        }
    ]
    # Without tools there is nothing to be forced.
    forced = asked.with_settings(ModelSettings(force_tool=True))
    assert forced._options([], {})["model_settings"] == {"max_tokens": 30, "temperature": 1.0}
