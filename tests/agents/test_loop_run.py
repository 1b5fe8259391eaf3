"""`run_agent`: how runs settle, resume and go wrong; charts; names called by hand."""

from __future__ import annotations

import asyncio
import inspect
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from guardchart import MachineLogic, create_machine
from guardchart.agents import (
    CHARTS_DIR,
    TOOL_LOOP,
    WAITING_STATES,
    AgentConfigError,
    AgentResult,
    FakeModel,
    ModelResponse,
    RetryPolicy,
    ToolCall,
    ToolDeniedError,
    agent_logic,
    approval_event,
    load_chart,
    pending_approval,
    run_agent,
    run_agent_sync,
    state_tools,
    tool,
    tool_registry,
    validate_agent_chart,
)
from guardchart.errors import ChartError, NotSupportedError, SnapshotError
from guardchart.persistence import InMemoryLedger
from guardchart.runtime import SimulatedClock
from tests.agents.loops import AT_ONCE, Bank, balance, pay, say


@pytest.fixture
def bank() -> Bank:
    return Bank()


async def run(engine: str, script: Any, *args: Any, **kwargs: Any) -> AgentResult[Any]:
    """`run_agent` or `run_agent_sync` (in a thread of its own, without a loop)."""
    if isinstance(script, list):
        args = (FakeModel(script, is_async=engine == "async"), *args)
    if engine == "async":
        return await run_agent(*args, **kwargs)
    return await asyncio.to_thread(run_agent_sync, *args, **kwargs)


# --- how a run settles -------------------------------------------------------------------------


async def test_a_clean_end_is_done_and_ok(engine: str) -> None:
    res = await run(engine, [say("hi", usage={"input_tokens": 3})], prompt="hello")
    assert res.status == "done" and res.ok and not res.waiting and res.cause is None
    assert res.final_state == "toolLoop.done" and res.output == "hi" and res.error is None
    assert res.usage == {"turns": 1, "tokens_in": 3, "tokens_out": 0, "cost_usd": 0.0}
    assert res.context["task"] == "hello" and res.ignored is None


async def test_an_end_in_error_is_done_with_the_error(engine: str) -> None:
    res = await run(engine, [{"tool": "nope"}], prompt="x")
    assert res.status == "done" and not res.ok
    assert res.final_state == "toolLoop.error" and res.error is not None
    assert res.error["kind"] == "tool_denied"


@pytest.mark.parametrize(
    ("shortcut", "message"),
    [
        ({"max_turns": 1}, "turn limit reached"),
        ({"max_tokens": 1}, "token budget exhausted"),
        ({"max_usd": 0.01}, "cost budget exhausted"),
        ({"budgets": {"max_turns": 1}}, "turn limit reached"),
    ],
)
async def test_limits_may_be_given_to_the_run(
    engine: str, bank: Bank, shortcut: Any, message: str
) -> None:
    spent = {"input_tokens": 1, "cost_usd": 0.01}
    script = [balance(usage=spent)] * 3
    res = await run(engine, script, tools=bank.registry(), prompt="x", **shortcut)
    assert res.error == {"kind": "budget", "message": message} and res.usage["turns"] == 1


async def test_a_person_is_waited_for_and_the_run_resumes_from_its_snapshot(
    engine: str, bank: Bank
) -> None:
    ledger = InMemoryLedger()
    common: dict[str, Any] = {"tools": bank.registry(), "key": "t-1", "ledger": ledger}
    res = await run(engine, [balance(), pay(), say("x")], prompt="go", **common)
    assert res.status == "idle" and res.waiting and res.final_state == "toolLoop.awaiting_human"
    assert len(pending_approval(res.context)) == 1 and bank.paid == []
    done = await run(engine, [say("paid")], snapshot=res.snapshot, approve=True, **common)
    assert done.ok and done.output == "paid" and len(bank.paid) == 1
    assert done.usage["turns"] == 3


async def test_approve_takes_a_shown_list_and_false(engine: str, bank: Bank) -> None:
    common: dict[str, Any] = {"tools": bank.registry(), "key": "t-1", "ledger": InMemoryLedger()}
    res = await run(engine, [pay()], prompt="go", **common)
    shown = pending_approval(res.context)
    forged = [{**shown[0], "digest": "0" * 64}]
    refused = await run(engine, [say()], snapshot=res.snapshot, approve=forged, **common)
    assert refused.waiting and refused.ignored is not None and bank.paid == []
    rejected = await run(engine, [say("ok")], snapshot=res.snapshot, approve=False, **common)
    assert rejected.output == "ok" and bank.paid == []
    late = await run(engine, [say()], snapshot=res.snapshot, approve=shown, **common)
    assert late.waiting and late.ignored is not None and bank.paid == []


async def test_an_event_the_state_cannot_take_is_reported_as_ignored(
    engine: str, bank: Bank
) -> None:
    res = await run(engine, [pay()], tools=bank.registry(), prompt="go")
    again = await run(
        engine, [say()], tools=bank.registry(), snapshot=res.snapshot, event={"type": "NOISE"}
    )
    assert again.ignored is not None and again.ignored.type == "NOISE" and again.waiting
    approved = await run(engine, [say()], prompt=None, approve=True)
    assert approved.ignored is not None and approved.final_state == "toolLoop.idle"


async def test_a_finished_conversation_given_a_prompt_goes_on(engine: str, bank: Bank) -> None:
    common: dict[str, Any] = {"tools": bank.registry(), "key": "t-1", "ledger": InMemoryLedger()}
    first = await run(engine, [balance(id="c1"), say("one")], prompt="first", **common)
    second = await run(
        engine, [pay("ann", 1), say("two")], snapshot=first.snapshot, prompt="second", **common
    )
    assert second.waiting and second.usage["turns"] == 1
    done = await run(engine, [say("two")], snapshot=second.snapshot, approve=True, **common)
    assert done.output == "two" and len(bank.paid) == 1
    said = [m["content"] for m in done.context["messages"] if m["role"] == "user"]
    assert said == ["first", "second"] and "c1" in done.context["spent_call_ids"]


async def test_a_conversation_may_have_one_budget(engine: str, bank: Bank) -> None:
    common: dict[str, Any] = {"budget_scope": "conversation", "max_turns": 2}
    first = await run(engine, [say("one")], prompt="first", **common)
    second = await run(engine, [say("two")], snapshot=first.snapshot, prompt="second", **common)
    third = await run(engine, [say("no")], snapshot=second.snapshot, prompt="third", **common)
    assert second.usage["turns"] == 2
    assert third.error == {"kind": "budget", "message": "turn limit reached"}


async def test_until_stops_in_a_named_state(engine: str) -> None:
    res = await run(
        engine,
        [ConnectionError()],
        prompt="x",
        until=("timed_out",),
        retry=RetryPolicy(delay_s=20),
    )
    assert res.final_state == "toolLoop.timed_out" and res.status == "idle"


async def test_a_delay_longer_than_is_served_settles_idle_with_its_deadline(engine: str) -> None:
    res = await run(
        engine, [ConnectionError()], prompt="x", retry=RetryPolicy(delay_s=20), serve_delay_s=1
    )
    assert res.status == "idle" and not res.waiting
    (timer,) = res.snapshot["timers"].values()
    assert timer["due_at"] > time.time() * 1000


async def test_a_short_delay_is_served_in_the_call(engine: str) -> None:
    res = await run(
        engine, [ConnectionError(), say("ok")], prompt="x", retry=RetryPolicy(delay_s=0.02)
    )
    assert res.output == "ok"


async def test_an_overdue_deadline_fires_on_entry(engine: str, bank: Bank) -> None:
    res = await run(
        engine,
        [pay()],
        tools=bank.registry(),
        prompt="x",
        human_timeout_s=60,
        clock=SimulatedClock(wall_start=0),
    )
    later = await run(
        engine,
        [say()],
        tools=bank.registry(),
        snapshot=res.snapshot,
        approve=True,
        clock=SimulatedClock(wall_start=1000),
    )
    assert later.error is not None and later.error["kind"] == "human_timeout"
    assert bank.paid == []


async def test_a_run_interrupted_in_its_model_call_asks_again(engine: str) -> None:
    seen: list[Any] = []

    class Watch:
        def on_transition(self, interp: Any, before: Any, after: Any, t: Any) -> None:
            seen.append(interp.dump())

    await run(engine, [say("one")], prompt="x", plugins=[Watch()])
    halfway = next(each for each in seen if each["state_ids"] == ["toolLoop.awaiting_model"])
    res = await run(engine, [say("two")], snapshot=halfway, retry=AT_ONCE)
    assert res.output == "two" and res.usage["turns"] == 2
    assert res.context["last_failure"] == "ServiceInterruptedError"


async def test_timeout_s_raises_timeout_error(engine: str) -> None:
    model = FakeModel([{"hang": True}], is_async=engine == "async")  # it never answers
    with pytest.raises(TimeoutError):
        await run(engine, model, model, prompt="x", timeout_s=0.05)
    model.release()


async def test_a_cancelled_run_propagates_the_cancellation() -> None:
    model = FakeModel([{"hang": True}])
    task = asyncio.ensure_future(run_agent(model, prompt="x"))
    while not model.calls:
        await asyncio.sleep(0.005)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_fault_in_the_machine_is_status_error(engine: str) -> None:
    def explode(context: Mapping[str, Any], event: Any) -> None:
        raise RuntimeError("defect")

    model = FakeModel([say()], is_async=engine == "async")
    logic = agent_logic(model).merge(MachineLogic(actions={"storeResult": explode}))
    res = await run(engine, None, None, logic, prompt="x")
    assert res.status == "error" and res.cause == "machine" and not res.ok
    assert res.error is not None and res.error["kind"] == "machine"
    assert "defect" not in str(res.error)


async def test_a_machine_of_ones_own_runs_without_a_prompt(engine: str) -> None:
    chart = {
        "id": "ask",
        "initial": "asking",
        "context": {"messages": [], "task": "Say hi", "turns": 0},
        "states": {
            "asking": {
                "invoke": {
                    "src": "callModel",
                    "onDone": {"target": "done", "actions": ["recordModelResponse", "storeResult"]},
                }
            },
            "done": {"type": "final"},
        },
    }
    model = FakeModel([say("hi")], is_async=engine == "async")
    res = await run(engine, None, create_machine(chart, agent_logic(model)), prompt="ignored")
    assert res.final_state == "ask.done" and res.output == "hi" and res.usage["turns"] == 1
    assert model.calls[0]["messages"] == [{"role": "user", "content": "Say hi"}]


# --- misuse ------------------------------------------------------------------------------------


def _model() -> FakeModel:
    return FakeModel([say()], is_async=False)


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((), {}),
        ((), {"prompt": "x"}),
        ((_model(),), {"model": _model()}),
        ((TOOL_LOOP, agent_logic(_model())), {"model": _model()}),
        ((TOOL_LOOP, agent_logic(_model())), {"max_turns": 3}),
        ((create_machine(TOOL_LOOP, agent_logic(_model())),), {"tools": tool_registry()}),
        ((create_machine(TOOL_LOOP, agent_logic(_model())), agent_logic(_model())), {}),
        ((_model(),), {"prompt": 7}),
        ((_model(),), {"prompt": "x", "event": "START", "approve": True}),
        ((_model(),), {"budgets": {}, "max_turns": 1}),
        ((_model(),), {"max_turns": "3"}),
        ((_model(),), {"tools": 7}),
        ((_model(),), {"tools": {"a": 1}}),
        ((_model(),), {"max_messages": 0}),
        ((_model(),), {"max_tool_calls": True}),
        ((_model(),), {"model_timeout_s": 0}),
        ((_model(),), {"human_timeout_s": float("nan")}),
        ((_model(),), {"on_denied": "ignore"}),
        ((_model(),), {"budget_scope": "day"}),
        ((_model(),), {"max_output_retries": -1}),
        ((_model(),), {"output_model": "nowhere:Model"}),
        ((_model(),), {"output_model": 7}),
        ((_model(),), {"max_denied": -1}),
        ((_model(),), {"max_denied": True}),
        ((_model(),), {"retry": 3}),
        ((_model(),), {"summarise": "cut"}),
        ((_model(),), {"output_parser": 7}),
        ((_model(),), {"system_prompt": 7}),
        (("model",), {"prompt": "x"}),
    ],
)
async def test_misuse_is_refused_before_anything_runs(engine: str, args: Any, kwargs: Any) -> None:
    with pytest.raises((AgentConfigError, ChartError)):
        await run(engine, None, *args, **kwargs)


async def test_an_unknown_option_is_a_type_error(engine: str) -> None:
    with pytest.raises(TypeError, match="max_turn"):
        await run(engine, None, _model(), prompt="x", max_turn=3)


async def test_a_machine_without_its_logic_is_refused(engine: str) -> None:
    with pytest.raises(ChartError, match="callModel"):
        await run(engine, None, create_machine(TOOL_LOOP))


@pytest.mark.parametrize("snapshot", ["not json", {}, {"state_ids": ["x"]}, "[]"])
async def test_a_broken_snapshot_is_refused(engine: str, snapshot: Any) -> None:
    with pytest.raises(SnapshotError):
        await run(engine, [say()], snapshot=snapshot)


async def test_run_agent_sync_inside_a_loop_says_what_to_use() -> None:
    with pytest.raises(NotSupportedError, match="await run_agent"):
        run_agent_sync(_model(), prompt="x")


def test_an_async_model_under_run_agent_sync_is_refused() -> None:
    with pytest.raises(NotSupportedError, match="async"):
        run_agent_sync(FakeModel([say()]), prompt="x")


def test_a_typo_in_meta_tools_is_refused_before_the_first_turn() -> None:
    chart = load_chart()
    chart["states"]["awaiting_model"]["meta"]["tools"] = ["lookup"]
    with pytest.raises(AgentConfigError, match="'lookup', which is not in the tool registry"):
        run_agent_sync(chart, model=_model(), prompt="x")


def test_a_cost_limit_without_prices_is_warned_of() -> None:
    def priced(messages: Any, tools: Any) -> ModelResponse:
        return ModelResponse("x")

    priced.prices = None  # type: ignore[attr-defined]
    with pytest.warns(UserWarning, match="prices="):
        agent_logic(priced, budgets={"max_usd": 1.0})


# --- charts ------------------------------------------------------------------------------------


def test_load_chart_gives_a_fresh_copy_each_time() -> None:
    chart = load_chart()
    assert chart == TOOL_LOOP and chart is not load_chart()
    chart["states"].clear()
    assert load_chart()["states"] and TOOL_LOOP["states"]
    assert (CHARTS_DIR / "tool_loop.json").is_file() and WAITING_STATES == ("awaiting_human",)


@pytest.mark.parametrize("name", ["nope", "../charts/tool_loop", "", "tool_loop.json", "/etc/x"])
def test_load_chart_knows_only_shipped_names(name: str) -> None:
    with pytest.raises(AgentConfigError, match="tool_loop"):
        load_chart(name)


def test_the_shipped_chart_has_the_shape_recipes_bind_to() -> None:
    states = load_chart()["states"]
    invoke = states["awaiting_model"]["invoke"]
    assert isinstance(invoke, dict) and invoke["onDone"][0]["guard"] == "!toolAllowed"
    assert states["done"]["entry"] == states["error"]["entry"] == "notifyParent"
    assert all(states[s]["meta"]["tools"] == ["*"] for s in ("awaiting_model", "awaiting_tool"))
    assert TOOL_LOOP["actionErrorPolicy"] == "fail"
    assert {
        "turns",
        "tokens_in",
        "tokens_out",
        "cost_usd",
        "messages",
        "pending_tool_calls",
        "result",
        "error",
    } <= set(TOOL_LOOP["context"])


@pytest.mark.needs_src
def test_the_picture_in_the_docs_has_the_transitions_of_the_chart() -> None:
    arrow = re.compile(
        r"^ *(?:toolLoop_)?([a-z_]+|\[\*\]) --> (?:toolLoop_)?([a-z_]+|\[\*\])", re.MULTILINE
    )
    page = (Path(__file__).resolve().parents[2] / "docs" / "agents.md").read_text()
    (picture,) = re.findall(r"```mermaid\n(.*?)```", page, re.DOTALL)
    drawn = arrow.findall(picture)
    assert set(drawn) == set(arrow.findall(create_machine(TOOL_LOOP).to_mermaid()))
    assert len(drawn) == len(set(drawn))


def test_validate_agent_chart_lists_what_runs_without_asking(bank: Bank) -> None:
    machine = create_machine(TOOL_LOOP, agent_logic(_model(), bank.registry()))
    assert validate_agent_chart(machine) == ("balance", "rate")
    assert validate_agent_chart(machine, bank.registry()) == ("balance", "rate")
    with pytest.raises(AgentConfigError, match="registry"):
        validate_agent_chart(create_machine(TOOL_LOOP))


def test_state_tools_is_the_allow_list_of_the_current_step(bank: Bank) -> None:
    from guardchart import SyncInterpreter

    chart = load_chart()
    chart["states"]["awaiting_model"]["meta"]["tools"] = ["balance", "pay"]
    seen: list[Any] = []
    model = FakeModel([pay()], is_async=False)

    def ask(messages: Any, tools: Any) -> Any:
        seen.append(state_tools(interp))
        return model(messages, tools)

    logic = agent_logic(ask, bank.registry())
    interp = SyncInterpreter(create_machine(chart, logic)).start()
    assert state_tools(interp) == () == state_tools(None)
    interp.send("START", prompt="x")
    interp.stop()
    assert seen == [("balance", "pay")]


# --- every name, called by hand ----------------------------------------------------------------


NAMES = {
    "actions": "appendUserMessage recordModelResponse appendToolResults approveHuman "
    "rejectPending storeResult retryOutput denyTool recordFailure recordModelTimeout "
    "recordToolTimeout failTurnLimit failTokenBudget failCostBudget failOutput failRetries "
    "escalateHuman notifyParent retryBump retryReset",
    "guards": "toolAllowed needsHuman hasToolCalls outputValid canRetryOutput isToolDenied "
    "hasTask approvalMatches underTurnLimit underTokenBudget underCostBudget retryCanRetry",
    "services": "callModel runTool",
    "delays": "modelTimeout toolTimeout humanTimeout retryDelay",
}


def _logic(**options: Any) -> MachineLogic:
    return agent_logic(FakeModel([say("hi")], is_async=False), Bank().registry(), **options)


def test_the_logic_has_every_name_a_chart_may_use() -> None:
    logic = _logic()
    for table, names in NAMES.items():
        assert set(names.split()) <= set(getattr(logic, table))
    assert set(logic.services) == {"callModel", "runTool"}


class Said:
    """An event made by hand."""

    def __init__(self, data: Any = None, error: Any = None, **payload: Any) -> None:
        self.type = "x"
        self.data = data
        self.error = error
        self.payload = payload
        self.node = None


def _context(**more: Any) -> dict[str, Any]:
    return {**load_chart()["context"], **more}


def test_actions_may_be_called_by_hand() -> None:
    actions = _logic(max_tool_calls=3).actions
    ctx = _context()
    assert actions["appendUserMessage"](None, ctx, Said(prompt="hi"), None) is None
    assert ctx["task"] == "hi" and ctx["messages"] == [{"role": "user", "content": "hi"}]
    call = ToolCall("c1", "balance", {"account": "a"})
    actions["recordModelResponse"](None, ctx, Said(ModelResponse(None, (call,))), None)
    assert [each["id"] for each in ctx["pending_tool_calls"]] == ["c1"] and ctx["turns"] == 1
    actions["approveHuman"](None, ctx, Said(call_ids=["c1"]), None)
    assert ctx["approved_call_ids"] == ["c1"]
    actions["appendToolResults"](None, ctx, Said([{"tool_call_id": "c1", "content": "7"}]), None)
    assert ctx["messages"][-1]["content"] == "7" and ctx["pending_tool_calls"] == []
    actions["storeResult"](None, ctx, Said(ModelResponse("done")), None)
    assert ctx["result"] == "done"
    for name, kind in [
        ("failTurnLimit", "budget"),
        ("failTokenBudget", "budget"),
        ("failCostBudget", "budget"),
        ("failRetries", "retries"),
        ("escalateHuman", "human_timeout"),
        ("recordModelTimeout", "timeout"),
        ("recordToolTimeout", "timeout"),
    ]:
        actions[name](None, ctx, Said(), None)
        assert ctx["error"]["kind"] == kind
    actions["denyTool"](None, ctx, Said(error=ToolDeniedError("t", "why")), None)
    assert ctx["error"]["kind"] == "tool_denied"
    actions["recordFailure"](None, ctx, Said(error=OSError("x")), None)
    assert ctx["last_failure"] == "OSError"
    actions["retryBump"](None, ctx, Said(), None)
    assert ctx["retries"] == 1
    actions["retryReset"](None, ctx, Said(), None)
    assert ctx["retries"] == 0 and ctx["error"] is None
    assert actions["notifyParent"](None, ctx, Said(), None) is None


@pytest.mark.parametrize("name", ["rejectPending", "escalateHuman", "recordToolTimeout"])
def test_closing_by_hand_gives_every_pending_call_a_result(name: str) -> None:
    ctx = _context(pending_tool_calls=[{"id": "c", "name": "balance", "arguments": {}}])
    _logic().actions[name](None, ctx, Said(), None)
    assert ctx["pending_tool_calls"] == [] and ctx["messages"][-1]["tool_call_id"] == "c"


def test_guards_may_be_called_by_hand() -> None:
    guards = _logic().guards
    ctx = _context()
    for name in NAMES["guards"].split():
        assert isinstance(guards[name](ctx, None), bool)
    assert guards["underTurnLimit"](ctx, None) and not guards["underTurnLimit"]({"turns": 10}, None)
    assert guards["outputValid"](ctx, Said(ModelResponse("x")))
    assert not guards["toolAllowed"](ctx, Said(ModelResponse(None, (ToolCall("c", "pay", {}),))))
    waiting = _context(
        pending_tool_calls=[
            {"id": "c", "name": "pay", "arguments": {}, "needs_approval": True, "digest": "d"}
        ]
    )
    from guardchart.kernel import Event

    assert guards["approvalMatches"](waiting, Event("HUMAN_APPROVED", {"call_ids": ["c"]}))
    assert not guards["approvalMatches"](waiting, Event("HUMAN_APPROVED", {"call_ids": []}))
    assert not guards["approvalMatches"](waiting, None)


def test_delays_and_services_may_be_called_by_hand() -> None:
    logic = _logic(model_timeout_s=3, human_timeout_s=4, retry=RetryPolicy(delay_s=2, backoff=2))
    assert logic.delays["modelTimeout"] == 3000 and logic.delays["humanTimeout"] == 4000
    assert logic.delays["retryDelay"]({"retries": 1}, None) == 4000
    assert logic.delays["toolTimeout"](_context(), None) >= 0
    assert logic.services["callModel"](None, _context(task="x"), None).text == "hi"
    assert logic.services["runTool"](None, _context(), None) == []
    pending = [{"id": "c", "name": "balance", "arguments": {"account": "a"}}]
    with pytest.raises(ToolDeniedError, match="not in this state's meta.tools allow-list"):
        logic.services["runTool"](None, _context(pending_tool_calls=pending), None)


@pytest.mark.parametrize("retries", [-5, "1", None, True, 2.5, 10**9])
def test_edited_counters_grant_no_extra_retries(retries: Any) -> None:
    guards = _logic().guards
    assert not guards["retryCanRetry"]({"retries": retries}, None)
    assert not guards["canRetryOutput"]({"output_retries": retries}, None)


def test_merging_keeps_the_hook_and_later_names_win(bank: Bank) -> None:
    logic = _logic()
    merged = logic.merge(MachineLogic(guards={"outputValid": lambda c, e: False}))
    assert merged.before_step is logic.before_step
    assert merged.attachments["registry"] is logic.attachments["registry"]
    assert not merged.guards["outputValid"]({}, None) and logic.guards["outputValid"](
        {}, Said(ModelResponse("x"))
    )


def test_run_agent_and_its_sync_twin_take_the_same_arguments() -> None:
    one, two = inspect.signature(run_agent), inspect.signature(run_agent_sync)
    assert list(one.parameters.values()) == list(two.parameters.values())


async def test_the_hosts_ledger_comes_before_the_logics_own(engine: str, bank: Bank) -> None:
    own, brought = InMemoryLedger(), InMemoryLedger()
    model = FakeModel([pay()], is_async=engine == "async")
    logic = agent_logic(model, bank.registry(), ledger=own)
    await run(engine, None, TOOL_LOOP, logic, prompt="x", key="a")
    assert len(own) == 1
    model = FakeModel([pay()], is_async=engine == "async")
    logic = agent_logic(model, bank.registry(), ledger=own)
    await run(engine, None, TOOL_LOOP, logic, prompt="x", key="b", ledger=brought)
    assert len(own) == 1 and len(brought) == 1


def test_approval_event_names_what_was_shown() -> None:
    shown = [{"id": "a", "digest": "x", "name": "pay", "arguments": {}, "tool_call_id": "a"}]
    assert approval_event(shown, by="eve") == {
        "type": "HUMAN_APPROVED",
        "call_ids": ["a"],
        "digests": {"a": "x"},
        "by": "eve",
    }


def test_pending_approval_of_a_hostile_context_never_raises() -> None:
    for value in (None, 7, "x", [7], [{"id": 1}], [{"id": "a", "name": "b"}], {"a": 1}):
        assert pending_approval({"pending_tool_calls": value}) == []
    assert pending_approval({}) == []


def test_a_tool_with_its_own_timeout_bounds_the_batch() -> None:
    def read(key: str) -> str:
        """Read."""
        return key

    registry = tool_registry(
        tool(read, name="a", timeout_s=2),
        tool(read, name="b", timeout_s=3),
        tool(read, name="c", timeout_s=4, side_effect=True),
    )
    delay = agent_logic(_model(), registry).delays["toolTimeout"]
    entry = {"id": "x", "arguments": {}}
    both = _context(pending_tool_calls=[{**entry, "name": "a"}, {**entry, "name": "b"}])
    assert 3000 < delay(both, None) < 3000 + 6000
    three = _context(pending_tool_calls=[*both["pending_tool_calls"], {**entry, "name": "c"}])
    assert delay(three, None) > delay(both, None) + 4000
