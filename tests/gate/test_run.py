"""What a body may do, and what is told and recorded of it."""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import BaseModel

from guardchart.errors import LedgerError, NotSentError, StoreError, ToolTimeoutError
from guardchart.gate import (
    AuthorisedCall,
    Facts,
    IdempotencyKey,
    Outcome,
    ToolCall,
    aexecute,
    arun_authorised,
    as_allowed,
    authorise,
    execute,
    run_authorised,
    tool,
    tool_registry,
)
from guardchart.gate import _run as module
from guardchart.persistence import InMemoryLedger
from tests.gate.helpers import Batch

CALL = ToolCall("c1", "body", {})


def registry_of(fn: Callable[..., Any], **more: Any) -> Any:
    chars = more.pop("max_output_chars", 4000)
    return tool_registry(tool(fn, name="body", **more), max_output_chars=chars)


def ran(fn: Callable[..., Any], **more: Any) -> Outcome:
    return execute(CALL, Facts(registry_of(fn, **more), as_allowed("*")))


async def aran(fn: Callable[..., Any], **more: Any) -> Outcome:
    return await aexecute(CALL, Facts(registry_of(fn, **more), as_allowed("*")))


def approved(fn: Callable[..., Any], ledger: Any = None, **more: Any) -> Batch:
    batch = Batch(registry_of(fn, side_effect=True, **more), [CALL], ledger=ledger)
    batch.decide()
    return batch


BOUNDED = pytest.mark.parametrize("bounded", [False, True], ids=["watched", "bounded"])


# --- texts -------------------------------------------------------------------------------------


class Weather(BaseModel):
    city: str
    token: str = "CANARY"


@dataclasses.dataclass
class Point:
    x: int


class Odd:
    def __str__(self) -> str:
        return "odd sk-CANARY0123456789abcd"


RESULTS = [
    ("plain", "plain"),
    (None, "null"),
    (True, "true"),
    (1.5, "1.5"),
    ({"b": 1, "a": "é"}, '{"b":1,"a":"é"}'),
    ([1, "x"], '[1,"x"]'),
    (Weather(city="Kochi"), '{"city":"Kochi","token":"***"}'),
    (Point(1), '{"x":1}'),
    (b"hi", "hi"),
    (b"\xff", "\ufffd"),
    ({"api_key": "CANARY"}, '{"api_key":"***"}'),
    ("Bearer CANARY1234567", "***"),
    (Odd(), '"odd ***"'),
    (float("nan"), "NaN"),
]


@pytest.mark.parametrize(("value", "text"), RESULTS, ids=[repr(v)[:25] for v, _ in RESULTS])
def test_a_result_becomes_masked_text(value: Any, text: str) -> None:
    outcome = ran(lambda: value)
    assert (outcome.status, outcome.text, outcome.ok, outcome.entered) == ("done", text, True, True)
    assert outcome.value is value


def test_a_long_result_is_cut_with_a_marker_after_it_was_masked() -> None:
    outcome = ran(lambda: "x" * 89 + " sk-CANARY0123456789abcd" + " y" * 50, max_output_chars=100)
    assert outcome.text.startswith("x" * 89 + " ***")
    assert "truncated 113" in outcome.text
    assert "CANARY" not in outcome.text


@pytest.mark.parametrize(
    "value",
    [
        "x" * 50_000_000,
        ["x" * 50_000_000],
        [0] * 3_000_000,
        {"a": "Bearer x1" * 5_000_000},
        b"x" * 50_000_000,
    ],
    ids=range(5),
)
def test_a_huge_result_is_cut_before_it_costs_much(value: Any) -> None:
    started = time.process_time()
    outcome = ran(lambda: value)
    assert time.process_time() - started < 1
    assert len(outcome.text) < 4100
    assert "truncated" in outcome.text


def test_a_deep_result_makes_a_text() -> None:
    value: Any = "x"
    for _ in range(5000):
        value = [value]
    assert len(ran(lambda: value).text) < 4100


def test_a_result_that_cannot_be_shown_is_named() -> None:
    class Broken:
        def __str__(self) -> str:
            raise RuntimeError("no")

    assert ran(lambda: Broken()).text == '"<Broken>"'


def test_an_error_is_told_by_class_and_masked_text_only() -> None:
    def body() -> str:
        try:
            raise KeyError("inner CANARY")
        except KeyError as exc:
            raise ValueError("refused: password=CANARY") from exc

    outcome = ran(body)
    assert (outcome.status, outcome.text) == ("failed", "error: ValueError: refused: password=***")
    assert isinstance(outcome.error, ValueError)


# --- threads, tasks, time ----------------------------------------------------------------------

variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")


def _see() -> str:
    return variable.get()


async def _asee() -> str:
    await asyncio.sleep(0)
    return variable.get()


@BOUNDED
@pytest.mark.parametrize("fn", [_see, _asee])
def test_context_variables_reach_a_body_from_sync_code(fn: Any, bounded: bool) -> None:
    variable.set("seen")
    assert ran(fn, bounded=bounded).text == "seen"


@BOUNDED
def test_a_body_sets_no_context_variable_of_its_caller(bounded: bool) -> None:
    variable.set("the caller's")
    assert ran(lambda: variable.set("the body's") and None, bounded=bounded).ok
    assert variable.get() == "the caller's"


class _Lazy:
    def __str__(self) -> str:
        return variable.get()


@BOUNDED
@pytest.mark.parametrize("made", [_Lazy, _asee])
def test_what_a_body_set_is_seen_by_what_it_returns(made: Any, bounded: bool) -> None:
    outcome = ran(lambda: (variable.set("the body's"), made())[1], bounded=bounded)
    assert "the body's" in outcome.text


@BOUNDED
def test_a_bounded_body_is_called_in_its_callers_thread(bounded: bool) -> None:
    threads: list[Any] = []
    assert ran(lambda: threads.append(threading.current_thread()), bounded=bounded).ok
    assert (threads == [threading.current_thread()]) is bounded


async def test_a_bounded_body_does_not_block_a_loop() -> None:
    threads: list[Any] = []
    outcome = await aran(lambda: threads.append(threading.current_thread()), bounded=True)
    assert outcome.ok and threads != [threading.current_thread()]


@pytest.mark.parametrize("fn", [lambda: _asee(), _asee], ids=["returned", "async"])
def test_what_a_bounded_body_wants_awaited_is_awaited_within_its_time(fn: Any) -> None:
    variable.set("seen")
    assert ran(fn, bounded=True).text == "seen"
    assert ran(_ahang, bounded=True, timeout_s=0.05).status == "timeout"


def test_a_bounded_body_that_is_late_after_all_is_done() -> None:
    batch = approved(lambda: time.sleep(0.05) or "paid", timeout_s=0.01, bounded=True)
    assert execute(CALL, **batch.arguments()).text == "paid"
    assert batch.row().status == "done"


@BOUNDED
def test_a_body_that_would_end_its_host_has_failed(bounded: bool) -> None:
    outcome = ran(lambda: exec("raise SystemExit(3)"), bounded=bounded)
    assert (outcome.status, outcome.text) == ("failed", "error: SystemExit: 3")


def test_a_bounded_call_that_is_interrupted_stays_claimed() -> None:
    def body() -> str:
        raise KeyboardInterrupt

    batch = approved(body, bounded=True)
    with pytest.raises(KeyboardInterrupt):
        execute(CALL, **batch.arguments())
    assert batch.row().status == "claimed"


@pytest.mark.parametrize("fn", [_see, _asee])
async def test_context_variables_reach_a_body_from_a_loop(fn: Any) -> None:
    variable.set("seen")
    assert (await aran(fn)).text == "seen"


async def test_an_async_tool_runs_from_sync_code_inside_a_running_loop() -> None:
    assert ran(_asee).ok


async def test_a_sync_tool_does_not_block_the_loop() -> None:
    went_on = threading.Event()

    async def go_on() -> None:
        for _ in range(5):
            await asyncio.sleep(0.005)
        went_on.set()

    task = asyncio.ensure_future(go_on())
    assert (await aran(lambda: went_on.wait(5))).text == "true"
    await task


def _hang() -> None:
    mine = ended
    release.wait(5)
    mine.set()


async def _ahang() -> None:
    await asyncio.sleep(5)
    ended.set()


async def _stubborn() -> None:
    released, mine = release, ended
    for _ in range(250):
        try:
            await asyncio.sleep(0.02)
        except asyncio.CancelledError:
            continue
        if released.is_set():
            break
    mine.set()


release = threading.Event()
ended = threading.Event()


@pytest.fixture(autouse=True)
def _released() -> Any:
    """Events of each test's own: a body that is left behind ends in a later one."""
    global release, ended
    release, ended = threading.Event(), threading.Event()
    yield
    release.set()


@pytest.mark.parametrize("fn", [_hang, _ahang, _stubborn])
def test_a_timeout_holds_from_sync_code(fn: Any) -> None:
    outcome = ran(fn, timeout_s=0.05)
    assert not ended.is_set()
    assert outcome.status == "timeout"
    assert isinstance(outcome.error, ToolTimeoutError)
    assert "tool call timed out" in outcome.text


@pytest.mark.parametrize("fn", [_hang, _ahang, _stubborn])
async def test_a_timeout_holds_in_a_loop(fn: Any) -> None:
    outcome = await aran(fn, timeout_s=0.05)
    assert not ended.is_set()
    assert outcome.status == "timeout"
    release.set()
    while fn is _stubborn and not ended.is_set():
        await asyncio.sleep(0.01)


def test_a_bodys_own_timeout_error_is_a_failure() -> None:
    def body() -> None:
        raise TimeoutError("mine")

    async def abody() -> None:
        raise TimeoutError("mine")

    for fn in (body, abody):
        outcome = ran(fn)
        assert (outcome.status, outcome.text) == ("failed", "error: TimeoutError: mine")


async def test_a_bodys_own_timeout_error_is_a_failure_in_a_loop() -> None:
    async def body() -> None:
        async with asyncio.timeout(0.01):
            await asyncio.sleep(1)

    assert (await aran(body)).status == "failed"


# --- the ledger --------------------------------------------------------------------------------


@BOUNDED
def test_a_side_effect_is_recorded_and_given_again(bounded: bool) -> None:
    count = []
    batch = approved(lambda: count.append(1) or "paid", bounded=bounded)
    first = execute(CALL, **batch.arguments())
    second = execute(CALL, **batch.arguments())
    assert (first.text, first.entered) == ("paid", True)
    assert (second.text, second.entered, second.status) == ("paid", False, "done")
    assert len(count) == 1


@BOUNDED
def test_a_failure_is_recorded_and_not_run_again(bounded: bool) -> None:
    count = []

    def body() -> None:
        count.append(1)
        raise ValueError("password=CANARY")

    batch = approved(body, bounded=bounded)
    first = execute(CALL, **batch.arguments())
    second = execute(CALL, **batch.arguments())
    assert first.text == second.text == "error: ValueError: password=***"
    assert batch.row().status == "failed"
    assert len(count) == 1


def test_a_timed_out_side_effect_is_in_doubt_until_its_thread_ends() -> None:
    batch = approved(lambda: release.wait(5) and "late", timeout_s=0.05)
    outcome = execute(CALL, **batch.arguments())
    assert outcome.status == "timeout"
    assert "in doubt" in outcome.text
    assert batch.row().status == "claimed"
    batch.at += 10_000
    assert execute(CALL, **batch.arguments()).status == "in_doubt"
    release.set()
    for _ in range(200):
        if batch.row().status == "done":
            break
        time.sleep(0.01)
    assert batch.row().status == "done"
    assert execute(CALL, **batch.arguments()).text == batch.row().result == "late"


@pytest.mark.parametrize("times", [1, 3])
def test_what_was_certainly_not_sent_is_tried_again_up_to_three_times(times: int) -> None:
    count = []

    def body() -> str:
        count.append(1)
        if len(count) <= times:
            raise NotSentError("no connection")
        return "paid"

    batch = approved(body)
    assert execute(CALL, **batch.arguments()).text == "paid"
    assert (len(count), batch.row().releases, batch.row().status) == (times + 1, times, "done")


@BOUNDED
def test_what_is_never_sent_fails_in_the_end(bounded: bool) -> None:
    count = []

    def body() -> str:
        count.append(1)
        raise NotSentError("no connection")

    batch = approved(body, bounded=bounded)
    outcome = execute(CALL, **batch.arguments())
    assert outcome.status == "failed"
    assert len(count) == 4
    assert batch.row().status == "failed"


def test_a_released_call_is_judged_anew_before_it_is_tried_again() -> None:
    count = []

    def body() -> str:
        count.append(1)
        batch.allowed = []
        raise NotSentError("no connection")

    batch = approved(body)
    assert execute(CALL, **batch.arguments()).status == "denied"
    assert (len(count), batch.row().status) == (1, "approved")


class Failing(InMemoryLedger):
    """A ledger whose record fails a number of times."""

    def __init__(self, failures: int, error: Exception) -> None:
        super().__init__()
        self.failures, self.error = failures, error

    def record(self, *args: Any, **kwargs: Any) -> Any:
        if self.failures:
            self.failures -= 1
            raise self.error
        return super().record(*args, **kwargs)


def test_a_record_that_fails_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_RECORD_TRIES", (0, 0, None))
    batch = approved(lambda: "paid", ledger=Failing(2, StoreError("disk")))
    assert execute(CALL, **batch.arguments()).status == "done"
    assert batch.row().status == "done"


def test_a_result_that_cannot_be_recorded_is_in_doubt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_RECORD_TRIES", (0, 0, None))
    batch = approved(lambda: "paid", ledger=Failing(9, StoreError("disk")))
    outcome = execute(CALL, **batch.arguments())
    assert (outcome.status, outcome.value) == ("in_doubt", "paid")
    assert "in doubt" in outcome.text


def test_a_person_who_resolved_the_call_meanwhile_has_the_last_word() -> None:
    def body() -> str:
        row = batch.row()
        ledger.resolve("t", row.id, "failed", "found undone", by="ann", now=row.claimed_at + 10**6)
        return "paid"

    ledger = InMemoryLedger()
    batch = approved(body, ledger=ledger)
    outcome = execute(CALL, **batch.arguments())
    assert (outcome.status, outcome.text) == ("failed", "found undone")


def test_a_loser_waits_for_the_winners_result() -> None:
    batch = approved(lambda: release.wait(5) and "paid")
    outcomes: list[Outcome] = []
    threads = [
        threading.Thread(target=lambda: outcomes.append(execute(CALL, **batch.arguments())))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    release.set()
    for thread in threads:
        thread.join(5)
    assert [o.status for o in outcomes] == ["done"] * 4
    assert sum(o.entered for o in outcomes) == 1
    assert len({o.text for o in outcomes}) == 1


async def test_losers_in_a_loop_wait_too() -> None:
    count = []

    async def body() -> str:
        count.append(1)
        await asyncio.sleep(0.1)
        return "paid"

    batch = approved(body)
    outcomes = await asyncio.gather(*(aexecute(CALL, **batch.arguments()) for _ in range(8)))
    assert [o.text for o in outcomes] == ["paid"] * 8
    assert len(count) == 1


@BOUNDED
def test_a_pausing_body_releases_its_claim_and_propagates(bounded: bool) -> None:
    class Pause(Exception):
        pass

    pausing = [True]

    def body() -> str:
        if pausing:
            raise Pause
        return "paid"

    batch = approved(body, bounded=bounded)
    with pytest.raises(Pause):
        execute(CALL, **batch.arguments(), pauses=(Pause,))
    assert (batch.row().status, batch.row().releases) == ("approved", 0)
    pausing.clear()
    assert execute(CALL, **batch.arguments(), pauses=(Pause,)).text == "paid"


async def test_a_call_cancelled_before_its_body_is_released() -> None:
    batch = approved(lambda: "paid")
    got = authorise(CALL, **batch.arguments())
    assert isinstance(got, AuthorisedCall)
    gate = asyncio.Event()

    async def body(_: dict[str, Any]) -> str:
        await gate.wait()
        return "paid"

    task = asyncio.ensure_future(arun_authorised(got, body=body))
    task.cancel()  # before its first step
    with pytest.raises(asyncio.CancelledError):
        await task
    # The task never began, so nobody could release; the claim then ends in doubt, not twice.
    assert batch.row().status == "claimed"


async def test_a_call_cancelled_in_its_body_stays_claimed() -> None:
    entered = asyncio.Event()

    async def body() -> str:
        entered.set()
        await asyncio.sleep(5)
        return "paid"

    batch = approved(body)
    task = asyncio.ensure_future(aexecute(CALL, **batch.arguments()))
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert batch.row().status == "claimed"


async def test_a_thread_that_ends_after_its_task_was_cancelled_is_recorded() -> None:
    batch = approved(lambda: release.wait(5) and "paid")
    task = asyncio.ensure_future(aexecute(CALL, **batch.arguments()))
    while batch.row().status != "claimed":
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    release.set()
    for _ in range(200):
        if batch.row().status == "done":
            break
        await asyncio.sleep(0.01)
    assert batch.row().status == "done"


def test_a_door_may_bring_the_body_and_the_text() -> None:
    seen = []

    def handler(arguments: dict[str, Any]) -> list[int]:
        seen.append(arguments)
        return [1]

    batch = approved(lambda: "own")
    outcome = execute(CALL, **batch.arguments(), body=handler, as_text=lambda v: f"v{v}")
    assert (outcome.value, outcome.text, batch.row().result) == ([1], "v[1]", "v[1]")
    assert seen == [{}]


def test_a_tool_gets_the_key_of_its_row() -> None:
    keys = []

    def body(key: IdempotencyKey) -> str:
        keys.append(key)
        if len(keys) == 1:
            raise NotSentError("x")
        return "paid"

    batch = approved(body)
    execute(CALL, **batch.arguments())
    assert len(keys) == 2
    assert keys[0] == keys[1]
    assert isinstance(keys[0], IdempotencyKey)


def test_a_denial_is_an_outcome_and_runs_nothing() -> None:
    count = []
    batch = Batch(registry_of(lambda: count.append(1), side_effect=True), [CALL])
    outcome = execute(CALL, **batch.arguments())
    assert (outcome.status, count) == ("denied", [])
    assert outcome.text == "error: tool 'body' denied: needs human approval"
    tampered = execute(ToolCall("c1", "body", {"x": 1}), **batch.arguments())
    assert tampered.status == "tampered"


@pytest.mark.parametrize(
    ("decision", "status", "text"),
    [
        ("reject", "rejected", "not run: rejected by a reviewer: too much"),
        ("close", "void", "not run: the call was closed"),
    ],
)
def test_a_closed_call_is_answered_from_its_row(decision: str, status: str, text: str) -> None:
    count = []
    batch = Batch(registry_of(lambda: count.append(1), side_effect=True), [CALL])
    batch.decide(decision=decision, reason="too much" if decision == "reject" else None)
    outcome = execute(CALL, **batch.arguments())
    assert (outcome.status, outcome.text, count) == (status, text, [])


def test_an_unclaimable_row_is_a_denial() -> None:
    class Strange(InMemoryLedger):
        def claim(self, *args: Any, **kwargs: Any) -> Any:
            raise LedgerError("no", reason="unproposed")

    batch = approved(lambda: "paid", ledger=Strange())
    assert execute(CALL, **batch.arguments()).status == "denied"


def test_the_edits_note_is_no_part_of_the_record() -> None:
    from guardchart.gate import digest

    def body(n: int) -> str:
        return f"n={n}"

    call = ToolCall("c1", "body", {"n": 1})
    batch = Batch(registry_of(body, side_effect=True), [call])
    child = batch.decide(decision="edit", arguments={"n": 2}, new_digest=digest({"n": 2}))
    outcome = execute(call, **batch.arguments())
    assert outcome.text.startswith("(ran with arguments that a reviewer edited) n=2")
    assert batch.ledger.row("t", child.id).result == "n=2"


def test_no_thread_is_left_behind_by_a_body_that_ended() -> None:
    for _ in range(20):
        ran(lambda: "x")
    time.sleep(0.05)
    workers = [t for t in threading.enumerate() if "guardchart" in t.name]
    assert all(t.daemon for t in workers)


def test_run_authorised_alone_runs_what_was_authorised() -> None:
    got = authorise(CALL, Facts(registry_of(lambda: "x"), as_allowed("*")))
    assert isinstance(got, AuthorisedCall)
    assert run_authorised(got).text == "x"
