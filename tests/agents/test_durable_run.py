"""``run_agent(store=, key=)``: resumed by key, written before anything begins, once."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from guardchart import MachineLogic, create_machine
from guardchart.agents import (
    FakeModel,
    ModelResponse,
    RetryPolicy,
    ToolCall,
    agent_logic,
    load_chart,
    pending_approval,
    run_agent,
    run_agent_sync,
    spawn_agent,
    tool,
    tool_registry,
)
from guardchart.errors import (
    AgentConfigError,
    SnapshotDriftError,
    SnapshotTooLargeError,
    StoreConflictError,
)
from guardchart.persistence import (
    DueTimerScanner,
    InMemoryLedger,
    MemoryStore,
    SQLiteLedger,
    SQLiteStore,
)

ASK = {"tool": "refund", "args": {"order_id": 7}}
SAY = {"text": "Done."}


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def store(request: pytest.FixtureRequest, tmp_path: Any) -> Any:
    if request.param == "memory":
        yield MemoryStore()
        return
    if request.param == "sqlite":
        with SQLiteStore(tmp_path / "runs.db") as store:
            yield store
        return
    from guardchart.persistence import PostgresStore

    with PostgresStore(request.getfixturevalue("postgres_database")) as store:
        yield store


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def is_async(request: pytest.FixtureRequest) -> bool:
    return request.param


class Desk:
    """A refund desk, in one process or, made anew, in another."""

    def __init__(self, script: list[Any], *, is_async: bool, **options: Any) -> None:
        self.entered: list[int] = []
        self.model = FakeModel(script, is_async=is_async)
        self.is_async = is_async

        def refund(order_id: int) -> str:
            """Refund an order."""
            self.entered.append(order_id)
            return "refunded"

        options.setdefault("retry", RetryPolicy(delay_s=0))
        tools = tool_registry(tool(refund, timeout_s=5, side_effect=True))
        self.machine = create_machine(load_chart(), logic=agent_logic(self.model, tools, **options))

    def run(self, store: Any, key: str = "ticket:1", **given: Any) -> Any:
        if self.is_async:
            return asyncio.run(run_agent(self.machine, store=store, key=key, **given))
        return run_agent_sync(self.machine, store=store, key=key, **given)


# --- by key ---------------------------------------------------------------------------------------


def test_a_parked_run_is_resumed_by_its_key_alone(store: Any, is_async: bool) -> None:
    first = Desk([ASK], is_async=is_async)
    res = first.run(store, prompt="refund order 7")
    assert res.waiting and first.entered == []
    second = Desk([SAY], is_async=is_async)
    seen = second.run(store)
    assert seen.waiting and seen.snapshot == res.snapshot
    res = second.run(store, approve=pending_approval(seen.context))
    assert res.ok and res.output == "Done." and second.entered == [7]
    assert store.load("ticket:1").snapshot == res.snapshot
    assert len(first.model.calls) == len(second.model.calls) == 1


def test_a_rejection_is_taken_by_key_too(store: Any, is_async: bool) -> None:
    Desk([ASK], is_async=is_async).run(store, prompt="refund order 7")
    desk = Desk([{"text": "Not done."}], is_async=is_async)
    res = desk.run(store, approve=False)
    assert res.ok and res.output == "Not done." and desk.entered == []


def test_a_second_prompt_is_the_next_turn_of_the_conversation(store: Any, is_async: bool) -> None:
    Desk([{"text": "Hello."}], is_async=is_async).run(store, prompt="hi")
    res = Desk([{"text": "Still here."}], is_async=is_async).run(store, prompt="and now?")
    said = [each["content"] for each in res.context["messages"]]
    assert said == ["hi", "Hello.", "and now?", "Still here."]


def test_runs_of_several_keys_know_nothing_of_each_other(store: Any, is_async: bool) -> None:
    desk = Desk([ASK, {"text": "Other."}, SAY], is_async=is_async)
    assert desk.run(store, "a", prompt="refund order 7").waiting
    assert desk.run(store, "b", prompt="hi").output == "Other."
    assert desk.run(store, "a", approve=True).ok and desk.entered == [7]


def test_calls_are_filed_in_the_ledger_beside_the_store(store: Any) -> None:
    desk = Desk([ASK], is_async=False)
    desk.run(store, prompt="refund order 7")
    [row] = store.ledger.pending("ticket:1")
    assert row.tool == "refund"


def test_a_ledger_given_or_of_the_logic_comes_before_the_stores(tmp_path: Any) -> None:
    store = MemoryStore()
    given = InMemoryLedger()
    Desk([ASK], is_async=False).run(store, "a", prompt="x", ledger=given)
    assert len(given.pending("a")) == 1
    with SQLiteLedger(tmp_path / "own.db") as own:
        Desk([ASK], is_async=False, ledger=own).run(store, "b", prompt="x")
        assert len(own.pending("b")) == 1
    assert store.ledger.pending() == []


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"key": None}, "needs key="),
        ({"key": ""}, "needs key="),
        ({"snapshot": {}}, "snapshot= or store="),
        ({"store": "runs.db"}, "takes a Store"),
    ],
)
def test_wrong_wiring_is_refused_before_anything_is_written(
    given: Any, says: str, is_async: bool
) -> None:
    store = MemoryStore()
    desk = Desk([SAY], is_async=is_async)
    with pytest.raises(AgentConfigError, match=says):
        desk.run(**{"store": store, "prompt": "hi", **given})
    assert store.find() == [] and desk.model.calls == []


def test_the_run_of_another_machine_is_refused_and_stays(store: Any) -> None:
    Desk([ASK], is_async=False).run(store, prompt="refund order 7")
    before = store.load("ticket:1")
    other = create_machine({"id": "other", "initial": "a", "states": {"a": {}}})
    with pytest.raises(SnapshotDriftError):
        run_agent_sync(other, store=store, key="ticket:1")
    assert store.load("ticket:1") == before


# --- sizes ----------------------------------------------------------------------------------------


def test_a_prompt_too_large_is_refused_at_the_first_save_and_no_run_exists(
    store: Any, is_async: bool
) -> None:
    desk = Desk([SAY], is_async=is_async)
    with pytest.raises(SnapshotTooLargeError):
        desk.run(store, prompt="x" * store.max_snapshot_bytes)
    assert store.load("ticket:1") is None and store.find() == []
    assert desk.model.calls == []
    assert desk.run(store, prompt="shorter").ok


def test_a_conversation_that_grows_too_large_keeps_its_last_stored_step(is_async: bool) -> None:
    store = MemoryStore(max_snapshot_bytes=20_000)
    desk = Desk([{"text": "x" * 30_000}], is_async=is_async)
    with pytest.raises(SnapshotTooLargeError):
        desk.run(store, prompt="tell me everything")
    assert store.load("ticket:1").snapshot["state_ids"] == ["toolLoop.awaiting_model"]


# --- when it is written ---------------------------------------------------------------------------


def test_a_step_is_stored_before_the_model_is_called(store: Any, is_async: bool) -> None:
    seen: list[Any] = []

    def model(messages: Any, tools: Any) -> Any:
        seen.append(store.load("k").snapshot["state_ids"])
        return ModelResponse("Done.")

    async def amodel(messages: Any, tools: Any) -> Any:
        return model(messages, tools)

    if is_async:
        res = asyncio.run(run_agent(model=amodel, prompt="hi", store=store, key="k"))
    else:
        res = run_agent_sync(model=model, prompt="hi", store=store, key="k")
    assert res.ok and seen == [["toolLoop.awaiting_model"]]


def test_an_approved_call_is_entered_only_once_the_approval_is_stored(
    store: Any, is_async: bool
) -> None:
    stored: list[Any] = []

    def refund(order_id: int) -> str:
        """Refund an order."""
        stored.append(store.load("k").snapshot["state_ids"])
        return "refunded"

    tools = tool_registry(tool(refund, timeout_s=5, side_effect=True))
    given: Any = {"model": FakeModel([ASK, SAY], is_async=is_async), "tools": tools}

    def run(**more: Any) -> Any:
        if is_async:
            return asyncio.run(run_agent(**given, store=store, key="k", **more))
        return run_agent_sync(**given, store=store, key="k", **more)

    run(prompt="refund order 7")
    assert run(approve=True).ok and stored == [["toolLoop.awaiting_tool"]]


def test_the_log_tells_what_happened_step_by_step(store: Any, is_async: bool) -> None:
    desk = Desk([ASK, SAY], is_async=is_async)
    desk.run(store, prompt="refund order 7")
    desk.run(store, approve=True)
    log = store.events("ticket:1")
    assert [(each["kind"], each["event"]["type"]) for each in log if "event" in each] == [
        ("init", "xstate.init"),
        ("event", "START"),
        ("result", "xstate.done.actor.model"),
        ("event", "HUMAN_APPROVED"),
        ("result", "xstate.done.actor.tools"),
        ("result", "xstate.done.actor.model"),
    ]
    assert log[1]["event"]["payload"] == {"prompt": "refund order 7"}
    assert log[2]["raw"]["tool_calls"][0]["name"] == "refund"
    # A verdict is a named tuple, which a log keeps by its names.
    assert log[2]["raw"]["verdicts"][0]["digest"]
    assert [each["rev"] for each in log] == sorted(each["rev"] for each in log)
    assert all(isinstance(each["at_ms"], float) for each in log)


def test_services_that_were_running_start_again_and_finished_ones_do_not(
    store: Any, is_async: bool
) -> None:
    with pytest.raises(TimeoutError):
        Desk([{"hang": True}], is_async=is_async).run(store, prompt="hi", timeout_s=0.2)
    rev = store.load("ticket:1").rev
    desk = Desk([ASK, SAY], is_async=is_async)
    assert desk.run(store).waiting and len(desk.model.calls) == 1
    assert store.events("ticket:1", after=rev)[0]["kind"] == "update"
    again = Desk([SAY], is_async=is_async)
    assert again.run(store, approve=True).usage["turns"] == 2 and len(again.model.calls) == 1


# --- time -----------------------------------------------------------------------------------------


def test_a_run_that_times_out_keeps_its_last_snapshot(store: Any, is_async: bool) -> None:
    with pytest.raises(TimeoutError):
        Desk([{"hang": True}], is_async=is_async).run(store, prompt="hi", timeout_s=0.3)
    assert store.load("ticket:1").snapshot["state_ids"] == ["toolLoop.awaiting_model"]
    res = Desk([SAY], is_async=is_async).run(store)
    assert res.ok and [each["content"] for each in res.context["messages"]] == ["hi", "Done."]


async def test_a_cancelled_run_keeps_its_last_snapshot(store: Any) -> None:
    desk = Desk([{"hang": True}], is_async=True)
    running = run_agent(desk.machine, prompt="hi", store=store, key="k")
    task = asyncio.create_task(running)
    while not desk.model.calls:
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    found = await asyncio.to_thread(store.load, "k")
    assert found.snapshot["state_ids"] == ["toolLoop.awaiting_model"]


def test_an_approval_after_the_deadline_is_ignored_and_the_run_has_escalated(
    is_async: bool,
) -> None:
    store = MemoryStore()
    desk = Desk([ASK, SAY], is_async=is_async, human_timeout_s=0.05)
    desk.run(store, prompt="refund order 7")
    threading.Event().wait(0.1)
    res = desk.run(store, approve=True)
    assert res.final_state == "toolLoop.error" and res.error["kind"] == "human_timeout"
    assert res.ignored is not None and desk.entered == []


def test_a_scanner_escalates_an_approval_nobody_gave(store: Any, is_async: bool) -> None:
    desk = Desk([ASK], is_async=is_async, human_timeout_s=3600)
    desk.run(store, prompt="refund order 7")
    scanner = DueTimerScanner(store, lambda key: desk.machine)
    assert scanner.run_once().delivered == ()
    later = store.load("ticket:1").updated_at + 3_600_001
    [(key, name)] = scanner.run_once(now=later).delivered
    assert key == "ticket:1" and name.endswith("@2")
    found = store.load("ticket:1").snapshot
    assert found["context"]["error"]["kind"] == "human_timeout"
    assert store.events("ticket:1")[-1]["id"] == name
    assert scanner.run_once(now=later).delivered == ()
    assert store.ledger.pending() == [] and desk.entered == []


# --- two at once ----------------------------------------------------------------------------------


def test_people_who_approve_at_once_enter_once_whoever_may_write(
    store: Any, is_async: bool
) -> None:
    Desk([ASK], is_async=is_async).run(store, prompt="refund order 7")
    desks = [Desk([SAY, SAY], is_async=is_async) for _ in range(3)]
    barrier = threading.Barrier(3)
    outcomes: list[Any] = []

    def approve(desk: Desk) -> None:
        barrier.wait()
        try:
            outcomes.append(desk.run(store, approve=True).output)
        except StoreConflictError as error:
            outcomes.append(type(error))

    threads = [threading.Thread(target=approve, args=(desk,)) for desk in desks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(len(desk.entered) for desk in desks) == 1
    assert "Done." in outcomes and set(outcomes) <= {"Done.", StoreConflictError}
    assert store.load("ticket:1").snapshot["context"]["result"] == "Done."


def test_a_run_overtaken_by_another_stops_before_its_next_effect(store: Any) -> None:
    calls: list[str] = []

    def overtaken(messages: Any, tools: Any) -> Any:
        found = store.load("k")
        store.commit("k", found.rev, found.snapshot, now=0)
        calls.append("model")
        return ModelResponse(None, (ToolCall("c1", "note", {}),))

    def note() -> str:
        """Note something."""
        calls.append("tool")
        return "noted"

    with pytest.raises(StoreConflictError):
        run_agent_sync(
            model=overtaken, tools=tool_registry(note), prompt="hi", store=store, key="k"
        )
    assert calls == ["model"]


# --- child machines -------------------------------------------------------------------------------


def test_a_child_machine_goes_on_where_it_was(store: Any) -> None:
    child = create_machine(
        {
            "id": "child",
            "initial": "one",
            "states": {
                "one": {"tags": ["waiting"], "after": {"3600000": "two"}},
                "two": {"type": "final"},
            },
        }
    )
    parent = create_machine(
        {
            "id": "parent",
            "initial": "working",
            "states": {
                "working": {"invoke": {"id": "helper", "src": "child", "onDone": "finished"}},
                "finished": {"type": "final"},
            },
        },
        MachineLogic(services={"child": child}),
    )
    assert run_agent_sync(parent, store=store, key="k").status == "idle"
    below = store.load("k").snapshot["children"]["helper"]["snapshot"]
    assert below["value"] == "one"
    scanner = DueTimerScanner(store, lambda key: parent)
    later = store.load("k").updated_at + 3_600_001
    [(_, name)] = scanner.run_once(now=later).delivered
    assert name.startswith("helper/") and store.load("k").snapshot["status"] == "done"


# --- agents that spawn agents ---------------------------------------------------------------------


def test_a_spawned_agents_approval_is_given_by_key_in_another_process(store: Any) -> None:
    sent: list[str] = []

    def send_letter(to: str) -> str:
        """Send a letter."""
        sent.append(to)
        return "on its way"

    def supervisor(script: list[Any]) -> Any:
        chart = {
            "id": "boss",
            "initial": "working",
            "context": {"task": "write to the mayor", "results": []},
            "states": {
                "working": {
                    "entry": "spawnWorker",
                    "meta": {"tools": ["send_letter"]},
                    "on": {"AGENT_DONE": {"target": "over", "actions": "collect"}},
                },
                "over": {"type": "final"},
            },
        }
        worker = spawn_agent(
            None,
            FakeModel(script),
            tool_registry(tool(send_letter, side_effect=True)),
            budget={"max_turns": 4},
            name="worker",
        )
        collect = MachineLogic(actions={"collect": lambda c, e: {"results": [e.payload["result"]]}})
        return create_machine(chart, worker.merge(collect))

    def run(machine: Any, **given: Any) -> Any:
        return asyncio.run(run_agent(machine, store=store, key="desk", **given))

    parked = run(supervisor([{"tool": "send_letter", "args": {"to": "the mayor"}}]))
    shown = pending_approval(parked)
    assert parked.waiting and [each["arguments"] for each in shown] == [{"to": "the mayor"}]
    assert sent == [] and len(store.ledger.pending("desk")) == 1

    res = run(supervisor([{"text": "The mayor knows."}]), approve=shown)
    assert res.status == "done" and sent == ["the mayor"]
    assert res.context["results"] == ["The mayor knows."]
    assert {each.get("agent") for each in store.events("desk")} == {None, shown[0]["agent_id"]}
