"""An Agent as a service: what it gives, what it is charged, how it pauses and goes on."""

from __future__ import annotations

import asyncio
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.exceptions import ModelHTTPError, UsageLimitExceeded
from pydantic_ai.messages import ModelResponse, TextPart
from pydantic_ai.models.function import DeltaToolCall, FunctionModel
from pydantic_ai.models.test import TestModel
from pydantic_ai.tools import DeferredToolRequests
from pydantic_ai.usage import RequestUsage

from guardchart import Interpreter, MachineLogic, SyncInterpreter, create_machine
from guardchart.agents import budget_guards
from guardchart.errors import AgentConfigError, NotSupportedError
from guardchart.gate import approval_event
from guardchart.persistence import InMemoryLedger
from guardchart.pydantic_ai import pending_approval, pydantic_ai_service, usage_logic
from tests.pydantic_ai.agents import Script, call

COUNTERS = {"tokens_in": 0, "tokens_out": 0, "turns": 0}
CHART: dict[str, Any] = {
    "id": "ask",
    "initial": "asking",
    "context": COUNTERS,
    "states": {
        "asking": {
            "meta": {"tools": ["refund", "look_up", "crash"]},
            "invoke": {
                "src": "ask",
                "onDone": [
                    {"guard": "agentPaused", "target": "waiting", "actions": "recordAgentUsage"},
                    {"target": "answered", "actions": "recordAgentUsage"},
                ],
                "onError": {"target": "failed", "actions": ["recordAgentUsage", "note"]},
            },
            "on": {"LEAVE": "left"},
        },
        "waiting": {
            "tags": ["waiting"],
            "on": {
                "HUMAN_APPROVED": "asking",
                "HUMAN_REJECTED": "asking",
                "HUMAN_DECIDED": "asking",
                "NEW": "asking",
            },
        },
        "answered": {"on": {"AGAIN": "asking"}},
        "failed": {"on": {"AGAIN": "asking"}},
        "left": {"on": {"AGAIN": "asking"}},
    },
}


def prompt(context: Any, event: Any) -> Any:
    payload = getattr(event, "payload", None) or {}
    return payload.get("prompt", "hello")


def logic(service: Any, **more: Any) -> MachineLogic:
    errors: list[Any] = []

    def note(context: Any, event: Any) -> dict[str, Any]:
        errors.append(event.error)
        return {"error": type(event.error).__name__}

    return MachineLogic(services={"ask": service}, actions={"note": note}).merge(usage_logic())


class Asking:
    """A machine that asks an agent, and what came of it."""

    def __init__(self, agent: Any, chart: Any = None, **options: Any) -> None:
        self.service = pydantic_ai_service(agent, **{"prompt_from": prompt, **options})
        self.machine = create_machine(CHART if chart is None else chart, logic(self.service))
        self.streamed: list[Any] = []
        self.ledger = InMemoryLedger()

    async def start(self, **options: Any) -> Interpreter:
        self.interpreter = await Interpreter(
            self.machine, scope="ticket-7", ledger=self.ledger, plugins=[self], **options
        ).start()
        return self.interpreter

    def on_event_received(self, interpreter: Any, event: Any) -> None:
        if event.type == "STREAM":
            self.streamed.append(event.data)

    async def until(self, *states: str) -> Any:
        async def reached() -> None:
            wanted = {f"ask.{each}" for each in states}
            while not wanted & set(self.interpreter.current_state_ids):
                assert self.interpreter.status == "running", self.interpreter.error
                if "failed" not in states and "error" in self.interpreter.context:
                    raise AssertionError(self.interpreter.context)
                await self.interpreter.changed()

        await asyncio.wait_for(reached(), 20)
        return self.interpreter.context


def used(context: Any) -> tuple[int, int, int]:
    return context["tokens_in"], context["tokens_out"], context["turns"]


async def charged(interpreter: Any) -> None:
    """Until the cancelled run has come to its own end."""
    for _ in range(500):
        if interpreter.context["turns"]:
            return
        await asyncio.sleep(0.01)


def answer(text: str, **usage: Any) -> ModelResponse:
    return ModelResponse(parts=[TextPart(text)], usage=RequestUsage(**usage))


# --- results -----------------------------------------------------------------------------------


async def test_a_result_is_the_output_and_the_usage() -> None:
    seen: list[Any] = []
    agent = Agent(Script(answer("hi", input_tokens=7, output_tokens=2)).model)
    asking = Asking(agent)
    asking.machine = create_machine(
        CHART,
        logic(asking.service).merge(
            MachineLogic(actions={"recordAgentUsage": lambda c, e: seen.append(e.data)})
        ),
    )
    await asking.start()
    await asking.until("answered")
    assert seen == [
        {"output": "hi", "usage": {"input_tokens": 7, "output_tokens": 2, "requests": 1}}
    ]
    assert used(asking.interpreter.context) == (7, 2, 1)


async def test_a_pydantic_model_is_dumped_to_json_and_the_result_is_stored() -> None:
    class Refund(BaseModel):
        cents: int

    asking = Asking(Agent(TestModel(custom_output_args={"cents": 5}), output_type=Refund))
    await asking.start()
    context = await asking.until("answered")
    assert context["result"] == {"cents": 5}


async def test_a_charged_completion_is_not_charged_again_by_the_action() -> None:
    agent = Agent(Script(*[answer("hi", input_tokens=7, output_tokens=2)] * 2).model)
    asking = Asking(agent)
    interpreter = await asking.start()
    await asking.until("answered")
    await interpreter.send("AGAIN", wait=True)
    await asking.until("answered")
    assert used(interpreter.context) == (14, 4, 2)


def test_the_action_alone_charges_a_plain_result() -> None:
    record = usage_logic("charge").actions["charge"]
    data = {"output": "x", "usage": {"input_tokens": 3, "output_tokens": 1, "requests": 2}}
    event = SimpleNamespace(data=data, error=None)
    assert used(record({"tokens_in": 1}, event)) == (4, 1, 2)


async def test_an_object_that_is_no_agent_is_asked_with_prompt_and_deps_alone() -> None:
    class Duck:
        async def run(self, prompt: str, deps: Any) -> Any:
            return SimpleNamespace(
                output=f"{prompt} {deps}",
                usage=SimpleNamespace(input_tokens=3, output_tokens=1, requests=1),
            )

    asking = Asking(Duck(), deps_from=lambda context, event: "deps")
    await asking.start()
    context = await asking.until("answered")
    assert context["result"] == "hello deps" and used(context) == (3, 1, 1)


def test_something_without_a_run_is_refused() -> None:
    with pytest.raises(AgentConfigError, match="no run"):
        pydantic_ai_service(object(), prompt_from=prompt)


def test_the_sync_engine_refuses_the_service_at_its_start() -> None:
    machine = create_machine(
        CHART, logic(pydantic_ai_service(Agent(TestModel()), prompt_from=prompt))
    )
    with pytest.raises(NotSupportedError, match="async"):
        SyncInterpreter(machine).start()


def test_an_agent_with_output_validators_must_declare_that_it_pauses() -> None:
    agent: Agent[Any, Any] = Agent(TestModel())

    @agent.output_validator
    def fine(output: Any) -> Any:
        return output

    with pytest.raises(AgentConfigError, match="DeferredToolRequests"):
        pydantic_ai_service(agent, prompt_from=prompt)
    declared: Agent[Any, Any] = Agent(TestModel(), output_type=[str, DeferredToolRequests])
    declared.output_validator(lambda output: output)
    assert pydantic_ai_service(declared, prompt_from=prompt)
    assert pydantic_ai_service(agent, prompt_from=prompt, guard=False)


# --- usage that is charged however a run ends --------------------------------------------------


def failing(*script: Any, **options: Any) -> Agent[Any, Any]:
    agent: Agent[Any, Any] = Agent(Script(*script).model, **options)

    @agent.tool_plain
    async def crash() -> str:
        raise RuntimeError("boom")

    @agent.tool_plain
    async def look_up(order: int) -> str:
        return "delivered"

    return agent


def asks(name: str, args: Any = None, id: str = "c1") -> ModelResponse:
    return ModelResponse(
        parts=[call(name, args, id)], usage=RequestUsage(input_tokens=5, output_tokens=1)
    )


class Number(BaseModel):
    n: int


ENDS: dict[str, tuple[Any, Any, str, tuple[int, int, int]]] = {
    "a tool that crashes": (failing(asks("crash")), None, "RuntimeError", (5, 1, 1)),
    "retries exhausted": (
        failing(
            asks("final_result", {"n": "x"}),
            asks("final_result", {"n": "x"}, "c2"),
            output_type=Number,
        ),
        None,
        "UnexpectedModelBehavior",
        (10, 2, 2),
    ),
    "an invalid output": (
        failing(asks("final_result", {"m": 1}), output_type=Number, retries={"output": 0}),
        None,
        "UnexpectedModelBehavior",
        (5, 1, 1),
    ),
    "a failing provider": (
        failing(asks("look_up", {"order": 1}), ModelHTTPError(500, "m")),
        None,
        "ModelHTTPError",
        (5, 1, 2),
    ),
    "a provider that fails at once": (
        failing(ModelHTTPError(500, "m")),
        None,
        "ModelHTTPError",
        (0, 0, 1),
    ),
    "the request limit": (
        failing(asks("look_up", {"order": 1}), asks("look_up", {"order": 1}, "c2")),
        {"request_limit": 1},
        "UsageLimitExceeded",
        (5, 1, 1),
    ),
    "the input token limit": (
        failing(asks("look_up", {"order": 1})),
        {"input_tokens_limit": 3},
        "UsageLimitExceeded",
        (5, 1, 1),
    ),
    "the output token limit": (
        failing(asks("look_up", {"order": 1})),
        {"output_tokens_limit": 0},
        "UsageLimitExceeded",
        (5, 1, 1),
    ),
    "the total token limit": (
        failing(asks("look_up", {"order": 1})),
        {"total_tokens_limit": 2},
        "UsageLimitExceeded",
        (5, 1, 1),
    ),
    "the input token limit of one request": (
        failing(asks("look_up", {"order": 1}), "done"),
        {"per_request_input_tokens_limit": 3},
        "UsageLimitExceeded",
        (5, 1, 1),
    ),
    "the cost limit": (
        failing(
            ModelResponse(
                parts=[call("look_up", {"order": 1})],
                usage=RequestUsage(input_tokens=5, output_tokens=1, cost=Decimal("0.5")),
            )
        ),
        {"cost_limit": Decimal("0.1")},
        "UsageLimitExceeded",
        (5, 1, 1),
    ),
    "the tool call limit": (
        failing(asks("look_up", {"order": 1}), "done"),
        {"tool_calls_limit": 0},
        "UsageLimitExceeded",
        (5, 1, 1),
    ),
}


@pytest.mark.parametrize("name", ENDS)
async def test_a_failed_run_is_charged_what_it_used(name: str) -> None:
    agent, limits, error, expected = ENDS[name]
    asking = Asking(agent, limits_from=(lambda c, e: limits) if limits else None)
    await asking.start()
    context = await asking.until("failed")
    assert context["error"] == error
    assert used(context) == expected
    assert issubclass(UsageLimitExceeded, Exception)


async def test_negative_tokens_refund_nothing() -> None:
    asking = Asking(Agent(Script(answer("hi", input_tokens=-500, output_tokens=-1)).model))
    await asking.start()
    assert used(await asking.until("answered")) == (0, 0, 1)


async def test_a_run_that_the_chart_leaves_is_cancelled_and_charged() -> None:
    begun, ended = asyncio.Event(), asyncio.Event()
    agent = failing(asks("look_up", {"order": 1}), "never")

    @agent.tool_plain
    async def slow() -> str:
        begun.set()
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()
        return "late"

    chart = {**CHART, "states": {**CHART["states"]}}
    chart["states"]["asking"] = {**CHART["states"]["asking"], "meta": {"tools": ["slow"]}}
    agent.model = Script(asks("slow"), "never").model
    asking = Asking(agent, chart)
    interpreter = await asking.start()
    await asyncio.wait_for(begun.wait(), 5)
    await interpreter.send("LEAVE", wait=True)
    await asyncio.wait_for(ended.wait(), 5)
    await charged(interpreter)
    assert interpreter.current_state_ids == {"ask.left"}
    assert used(interpreter.context) == (5, 1, 1)


async def test_a_run_that_takes_too_long_is_charged() -> None:
    async def slow(messages: Any, info: Any) -> ModelResponse:
        if len(messages) > 1:
            await asyncio.sleep(60)
        return asks("look_up", {"order": 1})

    agent = failing("unused")
    agent.model = FunctionModel(slow)
    chart = {**CHART, "states": {**CHART["states"]}}
    chart["states"]["asking"] = {**CHART["states"]["asking"], "after": {"200": "left"}}
    asking = Asking(agent, chart)
    await asking.start()
    await asking.until("left")
    await charged(asking.interpreter)
    assert used(asking.interpreter.context)[:2] == (5, 1)


async def test_the_budget_of_the_chart_stops_the_next_run() -> None:
    chart = {
        "id": "ask",
        "initial": "gate",
        "context": COUNTERS,
        "states": {
            "gate": {
                "always": [{"guard": "!underTokenBudget", "target": "over"}, {"target": "asking"}]
            },
            "asking": {"invoke": {"src": "ask", "onDone": {"target": "gate"}}},
            "over": {"type": "final"},
        },
    }
    script = Script(*[answer("hi", input_tokens=4, output_tokens=2)] * 5)
    machine = create_machine(
        chart,
        logic(pydantic_ai_service(Agent(script.model), prompt_from=prompt)).merge(
            budget_guards(max_tokens=10)
        ),
    )
    interpreter = await Interpreter(machine).start()
    await interpreter.settle()
    assert interpreter.status == "done" and len(script.tools) == 2


# --- streaming ---------------------------------------------------------------------------------


def streaming(*chunks: Any) -> FunctionModel:
    async def stream(messages: Any, info: Any) -> Any:
        for each in chunks:
            if isinstance(each, BaseException):
                raise each
            yield each

    return FunctionModel(stream_function=stream)


async def test_text_is_streamed_from_its_first_chunk_on_and_then_the_result() -> None:
    asking = Asking(Agent(streaming("one ", "two ", "three")), stream=True)
    await asking.start()
    await asking.until("answered")
    deltas = [each["delta"] for each in asking.streamed if "delta" in each]
    assert deltas[0] == "one " and "".join(deltas) == "one two three"
    assert asking.streamed[-1]["output"] == "one two three"
    assert set(asking.streamed[-1]) == {"output", "usage"}


async def test_a_structured_answer_is_streamed_as_its_json() -> None:
    parts = [
        {0: DeltaToolCall(name="final_result", tool_call_id="c1")},
        {0: DeltaToolCall(json_args='{"n":')},
        {0: DeltaToolCall(json_args=" 3}")},
    ]
    asking = Asking(Agent(streaming(*parts), output_type=Number), stream=True)
    await asking.start()
    context = await asking.until("answered")
    assert context["result"] == {"n": 3}
    assert "".join(each.get("delta", "") for each in asking.streamed) == '{"n": 3}'


async def test_deltas_are_held_back_while_the_state_wants_no_answer() -> None:
    chart = {**CHART, "states": {**CHART["states"]}}
    chart["states"]["asking"] = {
        **CHART["states"]["asking"],
        "meta": {"tools": ["look_up"], "outputs": []},
    }
    agent = Agent(streaming("not yet"), retries={"output": 0})
    asking = Asking(agent, chart, stream=True)
    await asking.start()
    await asking.until("failed")
    assert asking.streamed == []


async def test_a_stream_that_breaks_off_is_an_error_and_charged() -> None:
    asking = Asking(Agent(streaming("one ", ModelHTTPError(500, "m"))), stream=True)
    await asking.start()
    context = await asking.until("failed")
    assert context["error"] == "ModelHTTPError" and context["turns"] == 1
    assert asking.streamed == [{"delta": "one "}]


async def test_a_duck_that_streams_is_streamed() -> None:
    class Run:
        usage = SimpleNamespace(input_tokens=1, output_tokens=1, requests=1)

        async def __aenter__(self) -> Any:
            return self

        async def __aexit__(self, *_: Any) -> None:
            return None

        async def stream_text(self, delta: bool) -> Any:
            yield "a"
            yield "b"

        async def get_output(self) -> str:
            return "ab"

    class Duck:
        async def run(self, prompt: str, deps: Any) -> Any: ...

        def run_stream(self, prompt: str, deps: Any) -> Any:
            return Run()

    asking = Asking(Duck(), stream=True)
    await asking.start()
    await asking.until("answered")
    assert asking.streamed[:2] == [{"delta": "a"}, {"delta": "b"}]


# --- tools behind the state --------------------------------------------------------------------


def desk(did: list[Any], *script: Any) -> Agent[Any, Any]:
    agent: Agent[Any, Any] = Agent(Script(*script).model)

    @agent.tool_plain(requires_approval=True)
    async def refund(order: int) -> str:
        did.append(("refund", order))
        return "refunded"

    @agent.tool_plain
    async def wipe() -> str:
        did.append("wipe")
        return "gone"

    return agent


async def test_the_tools_of_the_agent_are_those_of_the_invoking_state() -> None:
    did: list[Any] = []
    asking = Asking(desk(did, call("wipe"), "done"))
    await asking.start()
    context = await asking.until("answered")
    assert did == [] and context["result"] == "done"


async def test_without_the_guard_the_agent_is_left_as_it_is() -> None:
    did: list[Any] = []
    asking = Asking(desk(did, call("wipe"), "done"), guard=False)
    await asking.start()
    await asking.until("answered")
    assert did == ["wipe"]


# --- pausing -----------------------------------------------------------------------------------


async def test_a_run_that_needs_a_person_completes_as_paused_and_is_charged() -> None:
    did: list[Any] = []
    asking = Asking(desk(did, asks("refund", {"order": 7})))
    await asking.start()
    context = await asking.until("waiting")
    kept = context["paused_agent"]
    assert set(kept) == {"deferred", "messages", "conversation_id"}
    assert kept["deferred"][0]["arguments"] == {"order": 7}
    assert used(context) == (5, 1, 1) and did == []


async def test_an_approval_from_outside_resumes_the_run_and_the_call_runs_once() -> None:
    did: list[Any] = []
    asking = Asking(desk(did, call("refund", {"order": 7}), "done"))
    interpreter = await asking.start()
    context = await asking.until("waiting")
    event = approval_event(context["paused_agent"]["deferred"], by="ann")
    receipt = await interpreter.send(event, wait=True)
    assert receipt.status == "taken"
    context = await asking.until("answered")
    assert did == [("refund", 7)] and context["result"] == "done"
    assert context["paused_agent"] is None


async def test_two_calls_of_one_answer_are_asked_about_and_run_one_after_the_other() -> None:
    did: list[Any] = []
    both = [call("refund", {"order": 7}), call("refund", {"order": 8}, "c2")]
    asking = Asking(desk(did, both, "done"))
    interpreter = await asking.start()
    for order, known in ((7, 2), (8, 1)):
        context = await asking.until("waiting")
        pending = pending_approval(context["paused_agent"])
        assert len(context["paused_agent"]["deferred"]) == known
        assert [each["arguments"] for each in pending] == [{"order": order}]
        await interpreter.send(approval_event(pending, by="ann"), wait=True)
        await interpreter.idle()
    context = await asking.until("answered")
    assert did == [("refund", 7), ("refund", 8)] and context["result"] == "done"


async def test_a_wrong_approval_is_denied_and_the_chart_stays() -> None:
    did: list[Any] = []
    asking = Asking(desk(did, call("refund", {"order": 7}), "done"))
    interpreter = await asking.start()
    await asking.until("waiting")
    receipt = await interpreter.send(
        {"type": "HUMAN_APPROVED", "call_ids": ["c1"], "digests": {"c1": "0" * 64}}, wait=True
    )
    assert receipt.denied and interpreter.current_state_ids == {"ask.waiting"} and did == []


async def test_a_rejection_resumes_the_run_with_the_reason() -> None:
    did: list[Any] = []
    asking = Asking(desk(did, call("refund", {"order": 7}), "sorry"))
    interpreter = await asking.start()
    await asking.until("waiting")
    await interpreter.send({"type": "HUMAN_REJECTED", "reason": "no"}, wait=True)
    context = await asking.until("answered")
    assert did == [] and context["result"] == "sorry"


async def test_a_run_entered_again_before_anybody_decided_waits_on_and_costs_nothing() -> None:
    did: list[Any] = []
    asking = Asking(desk(did, [call("refund", {"order": 7})], "done"))
    interpreter = await asking.start()
    await asking.until("waiting")
    await interpreter.send("NEW", prompt=None)
    await interpreter.idle()
    assert interpreter.current_state_ids == {"ask.waiting"} and did == []
    assert interpreter.context["turns"] == 1


async def test_a_new_prompt_while_a_call_waits_closes_it_and_goes_with_it() -> None:
    did: list[Any] = []
    agent = desk(did)
    script = Script(call("refund", {"order": 7}), "as you like")
    agent.model = script.model
    asking = Asking(agent)
    interpreter = await asking.start()
    await asking.until("waiting")
    await interpreter.send("NEW", prompt="never mind", wait=True)
    context = await asking.until("answered")
    assert did == [] and context["result"] == "as you like"
    said = str(script.messages[-1][-1])
    assert "superseded" in said and "never mind" in said
    assert asking.ledger.row("ticket-7", "c1").status == "void"


async def test_a_paused_run_goes_on_in_another_process_from_its_snapshot() -> None:
    did: list[Any] = []
    asking = Asking(desk(did, call("refund", {"order": 7}), "done"))
    interpreter = await asking.start()
    context = await asking.until("waiting")
    event = approval_event(context["paused_agent"]["deferred"])
    text = interpreter.get_snapshot()
    interpreter.stop()
    again = Asking(desk(did, "done"))
    again.interpreter = Interpreter.from_snapshot(
        text, again.machine, scope="ticket-7", ledger=asking.ledger
    )
    await again.interpreter.start()
    await again.interpreter.send(event, wait=True)
    await again.until("answered")
    assert did == [("refund", 7)]


async def test_an_approved_call_cancelled_in_flight_is_in_doubt_and_the_next_run_is_told() -> None:
    begun = asyncio.Event()
    agent: Agent[Any, Any] = Agent(Script("unused").model)
    script = Script(call("refund", {"order": 7}), "so be it")
    agent.model = script.model

    @agent.tool_plain(requires_approval=True)
    async def refund(order: int) -> str:
        begun.set()
        await asyncio.sleep(60)
        return "refunded"

    asking = Asking(agent)
    interpreter = await asking.start()
    context = await asking.until("waiting")
    await interpreter.send(approval_event(context["paused_agent"]["deferred"]), wait=True)
    await asyncio.wait_for(begun.wait(), 5)
    await interpreter.send("LEAVE", wait=True)
    before = interpreter.context["turns"]
    for _ in range(500):
        if interpreter.context["turns"] > before:
            break
        await asyncio.sleep(0.01)
    assert asking.ledger.row("ticket-7", "c1").status == "claimed"
    await interpreter.send("AGAIN", prompt="and now?", wait=True)
    await asking.until("answered")
    assert "in doubt" in str(script.messages[-1][-1])


async def test_history_from_gives_the_conversation_so_far() -> None:
    script = Script("first", "second")
    kept: list[Any] = []
    agent = Agent(script.model)
    first = await agent.run("one")
    kept.extend(first.all_messages())
    asking = Asking(agent, history_from=lambda context, event: kept)
    await asking.start()
    await asking.until("answered")
    assert len(script.messages[-1]) == 3


@pytest.mark.parametrize("is_async", [False, True])
def test_the_service_runs_in_a_node_of_a_graph_and_is_charged(is_async: bool) -> None:
    from typing import TypedDict

    from langgraph.graph import END, START, StateGraph

    from guardchart.langgraph import statechart_node

    class State(TypedDict, total=False):
        xsm: dict[str, Any]
        said: str

    agent = Agent(Script(answer("hi", input_tokens=7, output_tokens=2)).model)
    machine = create_machine(CHART, logic(pydantic_ai_service(agent, prompt_from=prompt)))
    graph: Any = StateGraph(State)
    graph.add_node(
        "ask",
        statechart_node(
            machine,
            event_from_state=lambda state: None,
            result_to_state=lambda run, state: {"said": run.context["result"]},
        ),
    )
    graph.add_edge(START, "ask")
    graph.add_edge("ask", END)
    app = graph.compile()
    out = asyncio.run(app.ainvoke({})) if is_async else app.invoke({})
    assert out["said"] == "hi"
    assert used(out["xsm"]["context"]) == (7, 2, 1)
