"""`setup_agent`: payloads checked where they arrive, contexts checked in development, types."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import core_schema

from guardchart import Event, MachineLogic, SyncInterpreter
from guardchart.agents import (
    AgentConfigError,
    FakeModel,
    agent_logic,
    approval_event,
    get_accepted_events,
    initial_agent_step,
    load_chart,
    pending_approval,
    replay,
    run_agent_sync,
    setup_agent,
    transition_agent_step,
)
from guardchart.errors import AgentError, ChartError
from guardchart.persistence import InMemoryLedger
from tests.agents.decisions import Script
from tests.agents.loops import AT_ONCE, Bank, pay, say
from tests.agents.stepping import Stepped


class Mail(BaseModel):
    draft: str | None = None
    rounds: int = Field(default=0, ge=0, le=3)


class Topic(BaseModel):
    topic: str


class Sent(BaseModel):
    to: str


class Approve(BaseModel):
    by: str
    note: str = "ok"


CHART: dict[str, Any] = {
    "id": "mail",
    "initial": "review",
    "context": {"draft": None, "rounds": 0},
    "output": lambda context, event: {"to": context["draft"]},
    "states": {
        "review": {
            "on": {
                "APPROVE": {"target": "sent", "actions": "sign"},
                "REDO": {"actions": "again", "guard": "mayRetry"},
                "STOP": "stopped",
            }
        },
        "sent": {"type": "final"},
        "stopped": {},
    },
}


def mail(**options: Any) -> Any:
    agent = setup_agent(
        context=Mail,
        output=Sent,
        events={"APPROVE": Approve, "STOP": None},
        **{"input": Topic, **options},
    )

    @agent.action("sign", event=Approve)
    def sign(context: Mail, event: Approve) -> Mail:
        return context.model_copy(update={"draft": f"{event.by}: {event.note}"})

    @agent.action("again")
    def again(context: Mail, event: Event) -> dict[str, Any]:
        return {"rounds": context.rounds + 1}

    @agent.guard("mayRetry")
    def may_retry(context: Mail, event: Event) -> bool:
        return context.rounds < 9

    return agent


def test_a_payload_that_does_not_fit_is_denied_and_changes_nothing() -> None:
    machine = mail().create_machine(CHART)
    interp = SyncInterpreter(machine).start()
    for payload in ({}, {"by": 3}, {"by": "ann", "extra": 1}):
        receipt = interp.send("APPROVE", **payload)
        assert receipt.denied and "the payload does not fit" in (receipt.reason or "")
    assert interp.send("STOP", by="ann").denied
    assert interp.current_state_ids == {"mail.review"}
    assert interp.send("APPROVE", by="ann").status == "taken"
    assert interp.context["draft"] == "ann: ok"


def test_no_value_of_a_payload_is_shown_in_the_reason() -> None:
    interp = SyncInterpreter(mail().create_machine(CHART)).start()
    receipt = interp.send("APPROVE", by=12345, hunter2="s3cret")
    assert "s3cret" not in receipt.reason and "hunter2" not in receipt.reason
    assert "12345" not in receipt.reason


def test_events_are_made_by_their_models() -> None:
    agent = mail()
    assert agent.event(Approve)(by="ann") == Event("APPROVE", {"by": "ann", "note": "ok"})
    with pytest.raises(ValueError):
        agent.event(Approve)(by=3)
    with pytest.raises(AgentConfigError, match="no event has this payload"):
        agent.event(Topic)
    twice = setup_agent(events={"A": Approve, "B": Approve})
    with pytest.raises(AgentConfigError, match=r"\['A', 'B'\]"):
        twice.event(Approve)


def test_a_run_has_typed_output_and_context() -> None:
    agent = mail()
    machine = agent.create_machine(CHART)
    result = agent.run_sync(machine, input=Topic(topic="tea"), event=agent.event(Approve)(by="ann"))
    assert result.ok and result.output == Sent(to="ann: ok")
    assert (
        result.typed_context == Mail(draft="ann: ok") and result.context["input"]["topic"] == "tea"
    )
    again = asyncio.run(agent.run(machine, event=agent.event(Approve)(by="bob")))
    assert again.output == Sent(to="bob: ok")


def test_an_output_that_does_not_fit_is_told_as_an_error() -> None:
    agent = mail()
    chart = {**CHART, "output": lambda context, event: {"to": 7}}
    result = agent.run_sync(agent.create_machine(chart), event=agent.event(Approve)(by="ann"))
    assert (result.status, result.cause) == ("error", "machine")
    assert result.error["kind"] == "output" and isinstance(result.exception, AgentError)


def test_an_input_that_does_not_fit_is_refused_before_anything_runs() -> None:
    agent = mail()
    with pytest.raises(AgentConfigError, match=r"input does not fit Topic: topic"):
        agent.run_sync(agent.create_machine(CHART), input={"subject": 1})


class Handle:
    """A type of the application's that JSON Schema knows nothing of."""


class Boxed:
    """A type whose JSON Schema fails, with a text of its own."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        return core_schema.any_schema()

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: Any, handler: Any) -> Any:
        raise ValueError("s3cret of the type")


class Held(BaseModel):
    model_config = ConfigDict(arbitrary_types_allowed=True)

    handle: Handle
    n: int


class Packed(BaseModel):
    box: Boxed
    n: int


@pytest.mark.parametrize("model", [Held, Packed])
def test_a_type_without_a_json_schema_is_told_without_a_value_too(model: Any) -> None:
    agent = mail(input=model)
    given = {"handle": "s3cret", "box": 1, "n": "s3cret", "hunter2": 1}
    with pytest.raises(AgentConfigError, match="input does not fit") as refused:
        agent.run_sync(agent.create_machine(CHART), input=given)
    assert "s3cret" not in str(refused.value) and "hunter2" not in str(refused.value)
    assert "valid integer" in str(refused.value)


def test_a_context_is_checked_after_every_update_in_development() -> None:
    agent = mail(check_context=True)
    interp = SyncInterpreter(agent.create_machine(CHART)).start()
    for _ in range(3):
        assert interp.send("REDO").status == "taken"
    receipt = interp.send("REDO")
    assert isinstance(receipt.error, AgentError) and "rounds" in str(receipt.error)
    assert "action 'again'" in str(receipt.error) and interp.status == "error"
    loose = SyncInterpreter(mail().create_machine(CHART)).start()
    for _ in range(4):
        assert loose.send("REDO").status == "taken"


def test_actions_that_stand_in_the_chart_are_checked_in_every_form() -> None:
    def two(context: Any, event: Any) -> dict[str, Any]:
        return {"rounds": -1}

    def four(scope: Any, context: Any, event: Any, action: Any) -> None:
        context["rounds"] = "many"

    for action in (two, [two], four):
        states = {**CHART["states"], "stopped": {"entry": action}}
        agent = mail(check_context=True)
        interp = SyncInterpreter(agent.create_machine({**CHART, "states": states})).start()
        receipt = interp.send("STOP")
        assert isinstance(receipt.error, AgentError), action


def test_a_context_that_does_not_fit_to_begin_with_is_refused_at_build_time() -> None:
    with pytest.raises(ChartError, match=r"\$\.context.*rounds") as caught:
        mail(check_context=True).create_machine({**CHART, "context": {"rounds": -1}})
    assert caught.value.path == "$.context"


@pytest.mark.parametrize(
    "options",
    [
        {"context": dict},
        {"input": 7},
        {"output": "Sent"},
        {"events": {"A": dict}},
        {"events": {1: Approve}},
        {"events": [Approve]},
        {"check_context": True},
    ],
)
def test_types_that_are_none_are_refused(options: Any) -> None:
    with pytest.raises(AgentConfigError, match="setup_agent"):
        setup_agent(**options)


def test_decisions_are_told_the_schemas_of_events() -> None:
    agent = setup_agent(events={"APPROVE": Approve})
    chart = {
        "id": "m",
        "initial": "a",
        "states": {
            "a": {"invoke": {"src": "agent.decide"}, "on": {"APPROVE": "b"}},
            "b": {"type": "final"},
        },
    }
    machine = agent.create_machine(chart)
    step = initial_agent_step(machine)
    (event,) = get_accepted_events(step.snapshot)
    assert event.input_schema is not None and event.input_schema["required"] == ["by"]
    decide = Script({"type": "APPROVE"}, {"type": "APPROVE", "by": "model"})
    assert agent.run_sync(machine, decide=decide).ok
    assert [each.failure for each in decide.requests[1].attempts] == ["invalid-payload"]


def test_a_tool_loop_keeps_its_ledger_and_its_approvals_under_typed_events() -> None:
    bank = Bank()
    agent = setup_agent(events={"NOTE": Approve})
    logic = agent_logic(FakeModel([pay(), say()], is_async=False), bank.registry(), retry=AT_ONCE)
    machine = agent.create_machine(load_chart(), logic)
    stepped = Stepped(machine, InMemoryLedger()).ask()
    assert stepped.send({"type": "NOTE", "by": 7}).denied
    assert stepped.send(approval_event(stepped.pending)).status == "taken"
    stepped.run()
    assert stepped.context["result"] == "All done." and len(bank.paid) == 1
    assert replay(machine, stepped.log) == stepped.step.snapshot
    parked = run_agent_sync(
        agent.create_machine(
            load_chart(), agent_logic(FakeModel([pay()], is_async=False), bank.registry())
        ),
        prompt="x",
    )
    assert parked.waiting and pending_approval(parked.context)


def test_defaults_of_a_payload_are_filled_in_on_the_step_path_and_replayed() -> None:
    machine = mail().create_machine(CHART)
    first = initial_agent_step(machine, run="r", now=0)
    second = transition_agent_step(machine, first, {"type": "APPROVE", "by": "ann"}, now=1)
    assert second.snapshot.context["draft"] == "ann: ok"
    assert replay(machine, [first.entry, second.entry]) == second.snapshot
    denied = transition_agent_step(machine, first, "APPROVE", now=1)
    assert denied.receipt is not None and denied.receipt.denied
    assert replay(machine, [first.entry, denied.entry]) == denied.snapshot == first.snapshot


def test_logic_of_others_is_merged_below_what_was_declared() -> None:
    agent = mail()
    logic = MachineLogic(actions={"again": lambda c, e: {"rounds": 7}, "other": lambda c, e: None})
    machine = agent.create_machine(CHART, logic)
    assert "other" in machine.logic.actions
    interp = SyncInterpreter(machine).start()
    interp.send("REDO")
    assert interp.context["rounds"] == 1
