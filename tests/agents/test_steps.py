"""The step path: TOOL_LOOP one recorded step at a time, and the same as when it runs by itself."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from guardchart import MachineLogic, SyncInterpreter, create_machine
from guardchart.agents import (
    AgentConfigError,
    AgentTextRequest,
    AgentToolRequest,
    FakeModel,
    agent_logic,
    approval_event,
    execute_agent_request,
    execute_agent_request_sync,
    get_agent_requests,
    initial_agent_step,
    load_chart,
    pending_approval,
    request_from_json,
    resolve_agent_step,
    tool,
    transition_agent_step,
)
from guardchart.errors import AgentError, NotSupportedError, SnapshotError, StepError
from guardchart.gate import tool_registry
from guardchart.kernel import dump, initial_transition
from guardchart.persistence import InMemoryLedger
from tests.agents.loops import AT_ONCE, Bank, Loop, Loops, allowing, balance, pay, say, turn
from tests.agents.stepping import START, Stepped, changed


def _raising(order: int) -> str:
    """Fails."""
    raise KeyError("secret value")


def _slow(order: int) -> str:
    """Takes too long."""
    time.sleep(0.2)
    return "late"


def _decide(kind: str, **more: Any) -> Callable[[list[dict[str, Any]]], dict[str, Any]]:
    def event(pending: list[dict[str, Any]]) -> dict[str, Any]:
        items = [
            {"id": each["id"], "digest": each["digest"], "decision": kind, **more}
            for each in pending
        ]
        return {"type": "HUMAN_DECIDED", "decisions": items, "by": "ann"}

    return event


def _first_only(pending: list[dict[str, Any]]) -> dict[str, Any]:
    return _decide("reject", reason="not that one")(pending[:1])


REJECT = {"type": "HUMAN_REJECTED", "reason": "no"}
BOTH = turn(pay("ann", 1, id="p1"), balance("a1", id="b1"), pay("bob", 2, id="p2"))

_NARROW = load_chart()
_NARROW["states"]["awaiting_tool"]["meta"]["tools"] = ["balance"]

# name: (script, what people say when asked, options)
SCENARIOS: dict[str, tuple[list[Any], list[Any], dict[str, Any]]] = {
    "text": ([say("hello")], [], {}),
    "reads": ([turn(balance("a1", id="b1"), balance("a2", id="b2")), say()], [], {}),
    "approved": ([BOTH, say()], [approval_event], {}),
    "rejected": ([BOTH, say()], [REJECT], {}),
    "edited": (
        [pay("ann", 5, id="p1"), say()],
        [_decide("edit", arguments={"to": "ann", "cents": 1})],
        {},
    ),
    "decided one by one": ([BOTH, say()], [_first_only, _decide("approve")], {}),
    "new input": ([BOTH, say()], [START], {}),
    "unlisted": ([pay("ann", 5, id="p1")], [], {"chart": allowing("balance")}),
    "bad arguments": ([balance(7, id="b1"), say()], [], {"on_denied": "retry"}),  # type: ignore[arg-type]
    "listed no more": (
        [turn(balance(id="b1"), pay(id="p1"))],
        [approval_event],
        {"chart": _NARROW},
    ),
    "raising": (
        [
            turn({"tool": "_raising", "args": {"order": 1}, "id": "r1"}, balance("a", id="b1")),
            say(),
        ],
        [],
        {"more": (_raising,)},
    ),
    "raising side effect": (
        [turn({"tool": "_raising", "args": {"order": 1}, "id": "r1"}, pay(id="p1")), say()],
        [approval_event],
        {"more": (tool(_raising, side_effect=True),)},
    ),
    "slow": (
        [{"tool": "_slow", "args": {"order": 1}, "id": "s1"}, say()],
        [],
        {"more": (tool(_slow, timeout_s=0.02),)},
    ),
    "model fails": ([RuntimeError("down"), say()], [], {}),
    "model fails for good": ([RuntimeError("a"), OSError("b"), KeyError("c")], [], {}),
    "turn limit": ([balance("a", id="b1"), say()], [], {"budgets": {"max_turns": 1}}),
    "usage": ([say("x", usage={"input_tokens": 3, "output_tokens": 4})], [], {}),
}


def _machine(script: list[Any], options: dict[str, Any], bank: Bank) -> tuple[Any, FakeModel]:
    options = dict(options)
    chart, more = options.pop("chart", None), options.pop("more", ())
    model = FakeModel(script, is_async=False)
    registry = bank.registry(*more)
    logic = agent_logic(model, registry, retry=AT_ONCE, **options)
    return create_machine(chart or load_chart(), logic), model


def _stepped(name: str, *, json_each: bool = False) -> tuple[Stepped, Bank, FakeModel]:
    script, people, options = SCENARIOS[name]
    bank = Bank()
    machine, model = _machine(script, options, bank)
    stepped = Stepped(machine, InMemoryLedger(), json_each=json_each).ask()
    for answer in people:
        stepped.send(answer(stepped.pending) if callable(answer) else answer)
        stepped.run()
    return stepped, bank, model


@pytest.mark.parametrize("name", SCENARIOS)
async def test_a_loop_run_step_by_step_ends_as_one_that_runs_by_itself_p1(name: str) -> None:
    script, people, options = SCENARIOS[name]
    loops = Loops("sync", InMemoryLedger())
    machine, model = _machine(script, options, loops.bank)
    interp = SyncInterpreter(machine, scope="ticket-1", ledger=loops.ledger).start()
    loop = Loop("sync", machine, model, interp)
    await loop.ask()
    for answer in people:
        await loop.send(answer(loop.pending) if callable(answer) else answer)
    loop.interp.stop()

    stepped, bank, _ = _stepped(name)
    assert stepped.context == loop.context
    assert stepped.state == loop.state
    assert sorted(bank.entered) == sorted(loops.bank.entered)


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_loop_whose_every_step_is_another_process_ends_the_same_p2(name: str) -> None:
    one, bank, _ = _stepped(name)
    other, other_bank, _ = _stepped(name, json_each=True)
    assert other.context == one.context and sorted(other_bank.entered) == sorted(bank.entered)
    assert [entry["event"]["type"] for entry in other.log] == [
        entry["event"]["type"] for entry in one.log
    ]


def test_reads_come_side_by_side_and_side_effects_one_by_one_in_order_p3() -> None:
    stepped, _, _ = _stepped("text")
    machine, _ = _machine([turn(pay("a", 1), balance("x"), pay("b", 2), balance("y"))], {}, Bank())
    stepped = Stepped(machine, InMemoryLedger()).ask()
    assert stepped.requests == () and stepped.state == "awaiting_human"
    stepped.send(approval_event(stepped.pending))
    seen = []
    while stepped.state == "awaiting_tool":
        seen.append(
            [(each.name, each.side_effect, each.needs_approval) for each in stepped.requests]
        )
        for request in stepped.requests:
            stepped.perform(request)
    assert seen == [
        [("balance", False, False), ("balance", False, False)],
        [("pay", True, True)],
        [("pay", True, True)],
    ]


def test_a_model_call_is_a_text_request_with_the_conversation_and_the_allowed_tools_p1() -> None:
    machine, _ = _machine(
        [say()], {"chart": allowing("balance"), "system_prompt": "Be brief."}, Bank()
    )
    stepped = Stepped(machine, InMemoryLedger())
    stepped.send(START)
    (request,) = stepped.requests
    assert (request.kind, request.id, request.src) == ("text", "model@2", "callModel")
    assert request.system == "Be brief."
    assert [each["name"] for each in request.tools] == ["balance"]
    assert [(m.role, m.content) for m in request.messages] == [("user", "please")]
    assert request_from_json(json.loads(json.dumps(request.to_json()))) == request


def test_a_result_of_a_request_that_nobody_waits_for_is_dropped_but_its_usage_is_charged_p4() -> (
    None
):
    machine, _ = _machine([say()], {}, Bank())
    stepped = Stepped(machine, InMemoryLedger())
    stepped.send(START)
    (request,) = stepped.requests
    (timer,) = stepped.step.timers
    stepped.send(timer)
    assert stepped.state == "timed_out"
    before = stepped.context
    receipt = stepped.bring(request, {"text": "late", "usage": {"input_tokens": 7}})
    assert receipt.status == "dropped" and stepped.state == "timed_out"
    assert stepped.context == {**before, "tokens_in": 7}


def test_a_second_result_of_the_same_call_changes_nothing_p4() -> None:
    machine, _ = _machine([turn(balance("a"), balance("b")), say()], {}, Bank())
    stepped = Stepped(machine, InMemoryLedger())
    stepped.send(START)
    stepped.perform(stepped.requests[0])
    first, second = stepped.requests
    stepped.bring(first, {"status": "done", "text": "one"})
    stepped.bring(first, {"status": "done", "text": "another"})
    stepped.bring(second, {"status": "done", "text": "two"})
    assert stepped.results == ["one", "two"]


def test_timers_are_actions_and_never_requests_p5() -> None:
    machine, _ = _machine([RuntimeError("down"), say()], {}, Bank())
    stepped = Stepped(machine, InMemoryLedger(), now=5_000.0)
    stepped.send(START)
    (action,) = [each for each in stepped.step.actions if each.kind == "timer"]
    assert action.due_at == 5_000.0 + 60_000 and stepped.step.timers == (action,)
    assert [each.kind for each in stepped.requests] == ["text"]
    stepped.perform(stepped.requests[0])
    assert [each.kind for each in stepped.step.actions] == ["cancel", "timer"]
    assert stepped.requests == ()
    stepped.send(stepped.step.timers[0])
    assert stepped.state == "awaiting_model"


def test_a_timer_that_is_not_pending_is_dropped_p5() -> None:
    machine, _ = _machine([say("done")], {}, Bank())
    stepped = Stepped(machine, InMemoryLedger())
    stepped.send(START)
    (timer,) = stepped.step.timers
    stepped.run()
    assert stepped.send(timer).status == "dropped"


def test_the_next_start_of_a_finished_conversation_is_its_next_turn() -> None:
    machine, _ = _machine([say("one"), say("two")], {}, Bank())
    stepped = Stepped(machine, InMemoryLedger()).ask("first").ask("second")
    assert stepped.context["result"] == "two"
    assert [m["role"] for m in stepped.context["messages"]] == ["user", "assistant"] * 2


# --- the gate at execution ---------------------------------------------------------------------


@pytest.mark.gate
def test_a_tool_request_read_from_json_runs_nothing_p6() -> None:
    """It knows no state, and where no state is known nothing is allowed."""
    bank = Bank()
    machine, _ = _machine([turn(balance("a1"))], {}, bank)
    stepped = Stepped(machine, InMemoryLedger())
    stepped.send(START)
    stepped.perform(stepped.requests[0])
    (request,) = stepped.requests
    read = request_from_json(request.to_json())
    assert read == request
    told = execute_agent_request_sync(read, tools=bank.registry())
    assert told["status"] == "denied" and bank.entered == []


def test_what_is_written_into_a_request_is_not_what_runs_p6() -> None:
    bank = Bank()
    machine, _ = _machine([turn(balance("a1"))], {}, bank)
    stepped = Stepped(machine, InMemoryLedger())
    stepped.send(START)
    stepped.perform(stepped.requests[0])
    (request,) = stepped.requests
    forged = request.model_copy(update={"name": "pay", "arguments": {"to": "eve", "cents": 9}})
    assert stepped.execute(forged)["text"] == "a1: 12 EUR"
    assert bank.entered == [("balance", "a1")]


@pytest.mark.gate
def test_a_snapshot_moved_past_the_approval_runs_nothing_p6() -> None:
    bank = Bank()
    machine, _ = _machine([turn(pay(), balance())], {}, bank)
    stepped = Stepped(machine, InMemoryLedger()).ask()

    def move(data: dict[str, Any]) -> None:
        data["value"] = "awaiting_tool"
        data["state_ids"] = ["toolLoop.awaiting_tool"]
        data["timers"] = {}
        data["children"] = {
            "tools": {"src": "runTool", "key": f"tools@{data['rev']}", "status": "active"}
        }

    stepped.step = transition_agent_step(
        machine, changed(stepped.step.snapshot, move), "NOTE", now=stepped.now, **stepped.given
    )
    while stepped.step.requests:
        stepped.perform(stepped.step.requests[0])
    assert bank.paid == []


@pytest.mark.gate
def test_an_approval_that_a_timer_or_the_chart_sends_decides_nothing_p6() -> None:
    """Only an event that the host was given from outside does."""
    bank = Bank()
    chart = load_chart()
    chart["states"]["awaiting_human"]["after"]["5000"] = {"actions": "approveAll"}
    model = FakeModel([pay()], is_async=False)

    def approve_all(scope: Any, context: Any, event: Any, action: Any) -> None:
        scope.send(approval_event(pending_approval(context)))

    logic = agent_logic(model, bank.registry(), retry=AT_ONCE).merge(
        MachineLogic(actions={"approveAll": approve_all})
    )
    stepped = Stepped(create_machine(chart, logic), InMemoryLedger()).ask()
    assert stepped.state == "awaiting_human"
    (timer,) = [each for each in stepped.step.timers if each.due_at <= stepped.now + 5000]
    stepped.now += 5000
    stepped.send(timer)
    stepped.run()
    assert bank.paid == []


@pytest.mark.parametrize("messages", [7, [7], [{"role": 7}], [{"role": "tool"}], [None], "x"])
def test_a_context_whose_messages_are_none_is_one_typed_error_where_they_are_looked_at_p6(
    messages: Any,
) -> None:
    machine, _ = _machine([say()], {}, Bank())
    stepped = Stepped(machine, InMemoryLedger())
    stepped.send(START)

    def write(data: dict[str, Any]) -> None:
        data["context"]["messages"] = messages

    (request,) = get_agent_requests(machine, changed(stepped.step.snapshot, write))
    assert request.kind == "text" and request.id == "model@2"
    if isinstance(messages, list):
        with pytest.raises(AgentError):
            request.to_json()


def test_results_that_are_written_into_a_snapshot_are_read_as_untrusted_p6() -> None:
    """What fits is believed, as the conversation itself is; what does not is left out."""
    bank = Bank()
    machine, _ = _machine([turn(balance("a"), balance("b")), say()], {}, bank)
    stepped = Stepped(machine, InMemoryLedger())
    stepped.send(START)
    stepped.perform(stepped.requests[0])
    for noted in (
        {"results": 7},
        {"results": {"x": 1, "-1": {}, "99": {"status": "done", "text": ""}}},
        {"results": {"0": {"status": 5}, "1": {"status": "done", "text": 4}, "²": {}}},
        {"results": {"0": {"status": "done", "text": "x", "batch": 3}}},
        {"other": []},
    ):

        def write(data: dict[str, Any], noted: Any = noted) -> None:
            data["children"]["tools"]["snapshot"] = noted

        found = get_agent_requests(machine, changed(stepped.step.snapshot, write), **stepped.given)
        assert [each.name for each in found] == ["balance", "balance"]


def test_an_effect_whose_result_was_lost_is_answered_from_its_row_and_not_repeated_p7() -> None:
    bank = Bank()
    machine, _ = _machine([pay(), say()], {}, bank)
    stepped = Stepped(machine, InMemoryLedger()).ask()
    stepped.send(approval_event(stepped.pending))
    (request,) = stepped.requests
    first = stepped.execute(request)
    # The host died here; another one takes the same snapshot.
    again = stepped.execute(get_agent_requests(machine, stepped.at, **stepped.given)[0])
    assert first == again == {"status": "done", "text": "paid 500 to ann"}
    stepped.bring(request, again)
    assert len(bank.paid) == 1 and stepped.results == ["paid 500 to ann"]


def test_a_rejection_that_came_before_the_effect_is_what_the_call_is_told_p7() -> None:
    """An old request, executed after its turn was closed, enters nothing."""
    bank = Bank()
    machine, _ = _machine([pay(), say()], {}, bank)
    stepped = Stepped(machine, InMemoryLedger()).ask()
    parked = stepped.step
    stepped.send(approval_event(stepped.pending))
    (request,) = stepped.requests
    (timer,) = stepped.step.timers
    stepped.send(timer)
    assert stepped.state == "timed_out"
    told = stepped.execute(request)
    assert told["status"] == "void" and bank.paid == []
    del parked


async def test_the_async_form_runs_calls_side_by_side_and_claims_off_the_loop_p3(
    ledger: Any,
) -> None:
    bank = Bank()
    reads = [bank.slow(name, 0.05, is_async=True) for name in ("one", "two")]
    model = FakeModel(
        [
            turn(
                {"tool": "one", "args": {"key": "k"}}, {"tool": "two", "args": {"key": "k"}}, pay()
            ),
            say(),
        ]
    )
    logic = agent_logic(model, bank.registry(*reads), retry=AT_ONCE)
    machine = create_machine(load_chart(), logic)
    step = initial_agent_step(machine, "please", ledger=ledger, scope="s")
    while not step.done:
        if not step.requests:
            step = transition_agent_step(
                machine, step, approval_event(pending_approval(step.snapshot.context))
            )
            continue
        outputs = await asyncio.gather(*(execute_agent_request(r) for r in step.requests))
        for request, output in zip(step.requests, outputs, strict=True):
            step = resolve_agent_step(machine, step, request, output)
    assert step.snapshot.context["result"] == "All done."
    assert bank.most_at_once == 2 and len(bank.paid) == 1


def test_an_async_model_cannot_be_executed_by_the_sync_form() -> None:
    machine = create_machine(load_chart(), agent_logic(FakeModel([say()]), []))
    step = initial_agent_step(machine, "hi")
    with pytest.raises(NotSupportedError, match="await execute_agent_request"):
        execute_agent_request_sync(step.requests[0])


# --- what a host hands in ----------------------------------------------------------------------


def test_a_result_that_is_no_json_is_refused_and_changes_nothing() -> None:
    machine, _ = _machine([say()], {}, Bank())
    step = initial_agent_step(machine, "hi")
    with pytest.raises(AgentError, match="holds a set"):
        resolve_agent_step(machine, step, step.requests[0], {"text": {1}})


def test_a_result_of_another_form_is_refused() -> None:
    machine, _ = _machine([turn(balance()), say()], {}, Bank())
    stepped = Stepped(machine, InMemoryLedger())
    stepped.send(START)
    with pytest.raises(AgentError, match="turn is a text"):
        stepped.bring(stepped.requests[0], 7)
    stepped.perform(stepped.requests[0])
    with pytest.raises(AgentError, match="execute_agent_request gave"):
        stepped.bring(stepped.requests[0], "done")
    assert stepped.state == "awaiting_tool"


def test_events_that_are_the_engines_are_refused_from_outside() -> None:
    machine, _ = _machine([say()], {}, Bank())
    stepped = Stepped(machine, InMemoryLedger())
    stepped.send(START)
    forged = {"type": "xstate.done.actor.model", "data": {"text": "mine"}}
    assert stepped.send(forged).status == "denied" and stepped.state == "awaiting_model"


def test_an_executor_that_is_missing_is_named_before_anything_runs() -> None:
    request = AgentTextRequest(id="draft@2", src="writeDraft")
    with pytest.raises(AgentConfigError, match=r"writeDraft.*generate_text="):
        execute_agent_request_sync(request)
    with pytest.raises(AgentConfigError, match=r"stream_text="):
        execute_agent_request_sync(request.model_copy(update={"stream": True}))
    with pytest.raises(AgentConfigError, match="AgentRequestExecutors"):
        execute_agent_request_sync(request, {"generateText": print})


def test_a_step_of_another_machine_is_refused() -> None:
    machine, _ = _machine([say()], {}, Bank())
    other, _ = _machine([say()], {}, Bank())
    step = initial_agent_step(machine)
    with pytest.raises(StepError, match="another machine"):
        transition_agent_step(other, step, START)
    with pytest.raises(SnapshotError):
        transition_agent_step(other, {"version": 1}, START)


def test_steps_with_a_given_run_and_time_are_the_same_twice_p8() -> None:
    """Pure."""
    entries = []
    for _ in range(2):
        stepped, _, _ = _stepped("reads")
        machine = stepped.machine
        one = initial_agent_step(machine, "hi", run="r", now=1.0)
        two = resolve_agent_step(
            machine, one, one.requests[0], {"text": "done"}, now=2.0, ledger=InMemoryLedger()
        )
        entries.append([one.entry, two.entry])
    assert entries[0] == entries[1]


def test_every_action_of_the_loop_gives_the_same_twice_p8() -> None:
    """Actions are evaluated twice on the same context and event, which stay as they were."""
    checked: set[str] = set()

    def twice(name: str, fn: Any) -> Any:
        def action(context: Any, event: Any) -> Any:
            before = json.dumps(dict(context), default=str)
            first, second = fn(context, event), fn(context, event)
            assert first == second, name
            assert json.dumps(dict(context), default=str) == before, name
            checked.add(name)
            return second

        return action

    for name in SCENARIOS:
        script, people, options = SCENARIOS[name]
        machine, _ = _machine(script, options, Bank())
        logic = machine.logic.merge(
            MachineLogic(
                actions={
                    each: twice(each, fn)
                    for each, fn in machine.logic.actions.items()
                    if each != "notifyParent"
                }
            )
        )
        stepped = Stepped(machine.with_logic(logic), InMemoryLedger()).ask()
        for answer in people:
            stepped.send(answer(stepped.pending) if callable(answer) else answer)
            stepped.run()
        assert stepped.step.done
    assert {
        "appendUserMessage",
        "recordModelResponse",
        "appendToolResults",
        "approveHuman",
    } <= checked
    assert {"noteDecisions", "rejectPending", "supersedePending", "recordFailure"} <= checked


# --- other services, children ------------------------------------------------------------------


def test_a_service_that_is_no_request_is_an_action_and_its_result_is_brought() -> None:
    chart = {
        "id": "m",
        "initial": "a",
        "states": {
            "a": {
                "invoke": {
                    "src": "fetch",
                    "id": "f",
                    "input": {"n": 1},
                    "onDone": "b",
                    "onError": "c",
                }
            },
            "b": {},
            "c": {},
        },
    }
    machine = create_machine(chart, MachineLogic(services={"fetch": lambda input: 1}))
    step = initial_agent_step(machine)
    (action,) = step.actions
    assert action == ("start", "m", "f@1", None, "fetch", {"n": 1}) and step.requests == ()
    assert resolve_agent_step(machine, step, action, 7).snapshot.value == "b"
    failed = resolve_agent_step(machine, step, action, error=ValueError("x"))
    assert failed.snapshot.value == "c"
    assert failed.entry["event"] == {
        "type": "xstate.error.actor.f",
        "error": {"type": "ValueError"},
    }


def test_what_a_machine_sends_itself_is_taken_in_the_same_step_and_is_no_entry_p9() -> None:

    def again(scope: Any, context: Any, event: Any, action: Any) -> None:
        scope.send("TWO")

    def three(scope: Any, context: Any, event: Any, action: Any) -> None:
        scope.raise_("THREE")

    chart = {
        "id": "m",
        "initial": "a",
        "states": {
            "a": {"on": {"ONE": {"actions": "again"}, "TWO": "b"}},
            "b": {
                "entry": "three",
                "on": {"THREE": "c"},
            },
            "c": {},
        },
    }
    machine = create_machine(chart, MachineLogic(actions={"again": again, "three": three}))
    stepped = Stepped(machine, InMemoryLedger())
    stepped.send("ONE")
    assert stepped.step.snapshot.value == "c"
    assert [entry["event"]["type"] for entry in stepped.log] == ["xstate.init", "ONE"]


def _supervised(bank: Bank, script: list[Any]) -> Any:
    worker = create_machine(
        load_chart(), agent_logic(FakeModel(script, is_async=False), bank.registry(), retry=AT_ONCE)
    )
    chart = {
        "id": "boss",
        "initial": "work",
        "states": {
            "work": {
                "invoke": {"src": "worker", "id": "w", "input": "please", "onDone": "end"},
                "after": {"90000": "end"},
            },
            "end": {"type": "final"},
        },
    }
    return create_machine(chart, MachineLogic(services={"worker": worker}))


@pytest.mark.parametrize("json_each", [False, True])
def test_a_childs_requests_timers_and_approvals_are_reached_from_the_root_p10(
    json_each: bool,
) -> None:
    bank = Bank()
    machine = _supervised(bank, [turn(pay(), balance()), say()])
    stepped = Stepped(machine, InMemoryLedger(), json_each=json_each)
    assert [each.id for each in stepped.requests] == ["w:model@1"]
    assert {each.agent for each in stepped.step.timers} == {"boss", "boss:w"}
    stepped.perform(stepped.requests[0])
    assert stepped.requests == ()
    child = stepped.step.snapshot.children["w"].snapshot
    event = approval_event(pending_approval(child["context"]))
    assert stepped.send(event, agent="boss:w").status == "taken"
    stepped.run()
    assert stepped.step.done and bank.entered == [("balance", "a1"), ("pay", "ann", 500, "none")]
    with pytest.raises(StepError, match="no such agent"):
        stepped.send(event, agent="boss:w")


def test_a_childs_model_failure_is_retried_by_the_childs_own_timer_p10() -> None:
    machine = _supervised(Bank(), [RuntimeError("down"), say()])
    stepped = Stepped(machine, InMemoryLedger()).run()
    assert stepped.step.done


def test_a_batch_without_calls_ends_at_once() -> None:
    """A chart may lead there; nobody would ever bring a result."""
    chart = load_chart()
    chart["states"]["idle"]["on"]["START"] = {
        "target": "awaiting_tool",
        "actions": "appendUserMessage",
    }
    model = FakeModel([say()], is_async=False)
    machine = create_machine(chart, agent_logic(model, Bank().registry()))
    stepped = Stepped(machine, InMemoryLedger())
    stepped.send(START)
    assert [each.kind for each in stepped.requests] == ["text"]


def test_a_plain_kernel_snapshot_can_be_stepped() -> None:
    machine, _ = _machine([say("hi")], {}, Bank())
    snapshot, _ = initial_transition(machine, "please")
    step = transition_agent_step(machine, snapshot, "NOTE")
    assert [each.kind for each in step.requests] == ["text"]
    assert get_agent_requests(machine, dump(snapshot)) == step.requests
    assert isinstance(step.snapshot.run, str)


def test_a_request_whose_fields_are_made_late_is_dumped_as_any_other() -> None:
    machine, _ = _machine([turn(balance()), say()], {"chart": allowing("balance")}, Bank())
    stepped = Stepped(machine, InMemoryLedger())
    stepped.send(START)
    (asking,) = stepped.requests
    stepped.perform(asking)
    for request in (asking, *stepped.requests):
        plain = request_from_json(request.to_json())
        assert request.model_dump(include={"id"}) == {"id": request.id}
        for how in ({"exclude": {"src", "digest"}}, {"by_alias": False}, {"by_alias": True}):
            assert request.model_dump(**how) == plain.model_dump(**how)
    assert [each.kind for each in stepped.requests] == ["tool"]


def test_a_tool_request_says_what_it_is() -> None:
    with pytest.raises(AgentConfigError, match="a request of a step"):
        execute_agent_request_sync("tools@4#0")  # type: ignore[arg-type]
    with pytest.raises(AgentConfigError, match="ToolRegistry"):
        execute_agent_request_sync(
            AgentToolRequest(id="x", tool_call_id="c", name="n", arguments={}),
            tools=[],  # type: ignore[arg-type]
        )
    assert tool_registry().names == ()
