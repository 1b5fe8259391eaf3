"""Only `authorise` makes a call executable, and it claims before it does."""

from __future__ import annotations

import asyncio
import copy
import pickle
import threading
import time
from typing import Any

import pytest

from guardchart.errors import ToolDeniedError
from guardchart.gate import (
    MISMATCH,
    NEEDS_APPROVAL,
    NOT_ALLOWED,
    Answer,
    AuthorisedCall,
    Facts,
    ToolCall,
    aauthorise,
    as_allowed,
    authorise,
    run_authorised,
    tool,
    tool_registry,
)
from guardchart.gate import _authorise as module
from guardchart.persistence import InMemoryLedger
from tests.gate.helpers import Batch


def read(q: str) -> str:
    return q


def pay(amount: int) -> str:
    return f"paid {amount}"


REGISTRY = tool_registry(read, tool(pay, side_effect=True, timeout_s=5))
PAY = ToolCall("c1", "pay", {"amount": 5})
READ = ToolCall("c2", "read", {"q": "x"})


def test_nobody_else_can_make_an_authorised_call() -> None:
    for make in (
        lambda: AuthorisedCall(None),
        lambda: AuthorisedCall(object(), call=PAY),
        lambda: type("Mine", (AuthorisedCall,), {}),
    ):
        with pytest.raises(TypeError):
            make()
    hollow = object.__new__(AuthorisedCall)
    with pytest.raises((TypeError, AttributeError)):
        run_authorised(hollow)


def test_an_authorised_call_is_not_copied_changed_or_used_twice() -> None:
    got = authorise(READ, Facts(REGISTRY, as_allowed("*")))
    assert isinstance(got, AuthorisedCall)
    for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError):
            attempt(got)  # type: ignore[operator]
    with pytest.raises(AttributeError):
        got.text = '{"q":"y"}'
    assert run_authorised(got).text == "x"
    with pytest.raises(TypeError, match="used before"):
        run_authorised(got)


@pytest.mark.parametrize("thing", [PAY, {"call": PAY}, None, Answer("x", "done", "c1")])
def test_an_executor_takes_nothing_else(thing: Any) -> None:
    with pytest.raises(TypeError):
        run_authorised(thing)


def test_arguments_changed_after_the_check_do_not_run() -> None:
    call = ToolCall("c2", "read", {"q": "x"})
    got = authorise(call, Facts(REGISTRY, as_allowed("*")))
    assert isinstance(got, AuthorisedCall)
    call.arguments["q"] = "y"
    assert run_authorised(got).text == "x"


def test_a_side_effect_without_a_row_or_an_approval_is_denied() -> None:
    with pytest.raises(ToolDeniedError, match=NEEDS_APPROVAL):
        authorise(PAY, Facts(REGISTRY, as_allowed("*")))
    batch = Batch(REGISTRY, [PAY])
    with pytest.raises(ToolDeniedError, match=NEEDS_APPROVAL):
        authorise(PAY, **batch.arguments())
    assert batch.row().status == "proposed"


def test_an_approved_call_is_claimed_before_it_is_handed_out() -> None:
    batch = Batch(REGISTRY, [PAY])
    batch.decide()
    got = authorise(PAY, **batch.arguments())
    assert isinstance(got, AuthorisedCall)
    row = batch.row()
    assert (row.status, row.claimed_at) == ("claimed", batch.at)
    assert run_authorised(got).text == "paid 5"
    assert batch.row().result == "paid 5"


def test_a_read_only_call_needs_no_ledger() -> None:
    got = authorise(READ, Facts(REGISTRY, as_allowed(["read"])))
    assert isinstance(got, AuthorisedCall)
    assert got.row_id is None


def test_the_state_is_looked_at_again_after_the_claim() -> None:
    batch = Batch(REGISTRY, [PAY])
    batch.decide()
    ledger = batch.ledger
    claim = ledger.claim

    def claiming(*args: Any, **kwargs: Any) -> Any:
        batch.allowed = ["read"]  # the chart moves while the claim is written
        return claim(*args, **kwargs)

    ledger.claim = claiming
    with pytest.raises(ToolDeniedError, match=NOT_ALLOWED):
        authorise(PAY, **batch.arguments())
    row = batch.row()
    assert (row.status, row.releases, row.token) == ("approved", 0, None)


def test_a_recorded_result_is_given_again_whatever_the_state_is_now() -> None:
    batch = Batch(REGISTRY, [PAY])
    batch.decide()
    got = authorise(PAY, **batch.arguments())
    assert isinstance(got, AuthorisedCall)
    run_authorised(got)
    batch.allowed = []
    answer = authorise(PAY, **batch.arguments())
    assert answer == Answer("paid 5", "done", "c1")


@pytest.mark.parametrize("changed", [{"amount": 6}, {"amount": "5"}, {}, {"amount": 5, "zz": 1}])
@pytest.mark.parametrize("entered", [False, True])
def test_arguments_that_differ_from_the_row_are_refused(changed: Any, entered: bool) -> None:
    batch = Batch(REGISTRY, [PAY])
    batch.decide()
    if entered:
        got = authorise(PAY, **batch.arguments())
        assert isinstance(got, AuthorisedCall)
        run_authorised(got)
    before = batch.row()
    with pytest.raises(ToolDeniedError) as caught:
        authorise(ToolCall("c1", "pay", changed), **batch.arguments())
    assert caught.value.reason == MISMATCH
    assert batch.row() == before


def test_another_tool_in_the_place_of_the_proposed_one_is_refused() -> None:
    batch = Batch(REGISTRY, [PAY])
    batch.decide()
    for name in ("read", "nope"):
        with pytest.raises(ToolDeniedError) as caught:
            authorise(ToolCall("c1", name, {"amount": 5}), **batch.arguments())
        assert caught.value.reason == MISMATCH


def test_an_edit_runs_with_the_reviewers_arguments() -> None:
    from guardchart.gate import digest

    batch = Batch(REGISTRY, [PAY])
    child = batch.decide(decision="edit", arguments={"amount": 3}, new_digest=digest({"amount": 3}))
    got = authorise(PAY, **batch.arguments())
    assert isinstance(got, AuthorisedCall)
    assert (got.edited, got.row_id, got.call.arguments) == (True, child.id, {"amount": 3})
    outcome = run_authorised(got)
    assert outcome.text.endswith("paid 3")
    assert "edited" in outcome.text
    again = authorise(PAY, **batch.arguments())
    assert isinstance(again, Answer)
    assert again.text == outcome.text
    rewritten = authorise(ToolCall("c1", "pay", {"amount": 3}), **batch.arguments())
    assert rewritten == again
    with pytest.raises(ToolDeniedError, match=MISMATCH):
        authorise(ToolCall("c1", "pay", {"amount": 4}), **batch.arguments())


def test_an_approval_that_expired_is_denied() -> None:
    batch = Batch(REGISTRY, [PAY])
    batch.decide()
    batch.at += 3_600_001
    with pytest.raises(ToolDeniedError, match="expired"):
        authorise(PAY, **batch.arguments())


def test_of_many_claimants_one_enters() -> None:
    batch = Batch(REGISTRY, [PAY])
    batch.decide()
    got: list[Any] = []
    start = threading.Barrier(8)

    def claim() -> None:
        start.wait()
        got.append(authorise(PAY, **batch.arguments()))

    threads = [threading.Thread(target=claim) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(isinstance(each, AuthorisedCall) for each in got) == 1
    assert all(each.status == "running" for each in got if isinstance(each, Answer))


def test_a_claim_that_is_not_entered_in_time_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Batch(REGISTRY, [PAY])
    batch.decide()
    monkeypatch.setattr(module, "ENTRY_S", 0.01)
    got = authorise(PAY, **batch.arguments())
    assert isinstance(got, AuthorisedCall)
    time.sleep(0.03)
    outcome = run_authorised(got)
    assert (outcome.status, outcome.entered) == ("not_sent", False)
    assert batch.row().status == "approved"


async def test_a_claim_is_shielded_from_cancellation_and_released() -> None:
    class Slow(InMemoryLedger):
        blocking = True

        def claim(self, *args: Any, **kwargs: Any) -> Any:
            claiming.set()
            time.sleep(0.1)
            return super().claim(*args, **kwargs)

    claiming = threading.Event()
    batch = Batch(REGISTRY, [PAY], ledger=Slow())
    batch.decide()
    task = asyncio.ensure_future(aauthorise(PAY, **batch.arguments()))
    while not claiming.is_set():
        await asyncio.sleep(0.005)
    task.cancel()
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert batch.row().status == "approved"
    got = await aauthorise(PAY, **batch.arguments())
    assert isinstance(got, AuthorisedCall)


def test_the_idempotency_key_belongs_to_the_row() -> None:
    keys = []
    for scope_batch in (1, 1, 2):
        batch = Batch(REGISTRY, [PAY], batch_no=scope_batch)
        batch.decide()
        got = authorise(PAY, **batch.arguments())
        assert isinstance(got, AuthorisedCall)
        keys.append(got.idempotency_key)
    assert len(keys[0]) == 32
    assert keys[0] == keys[1]
