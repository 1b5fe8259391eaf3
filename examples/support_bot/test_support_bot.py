"""The bot from outside: real processes, a real client, a kill between question and answer."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

ROOT = Path(__file__).resolve().parents[2]
ANN = {"authorization": "Bearer s3cret"}
WISH = "Please refund order 7, it came broken."


class Bot:
    """One running service with its worker."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "examples.support_bot"),
                *("--port", "0", "--data", str(folder), *options),
            ],
            cwd=ROOT,
            env={**os.environ, "BOT_REVIEWERS": "ann=s3cret, bob=other"},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.http = httpx.Client(base_url=self.process.stdout.readline().strip(), timeout=30)

    def open(self, text: str = WISH) -> dict[str, Any]:
        answer = self.http.post("/tickets", json={"text": text})
        assert answer.status_code == 201, answer.text
        return answer.json()

    def shown(self, ticket: str) -> list[dict[str, Any]]:
        listed = self.http.get("/reviews", headers=ANN).json()
        return next(each["calls"] for each in listed if each["ticket"] == ticket)

    def review(self, ticket: str, calls: list[dict[str, Any]], decision: str = "approve") -> Any:
        body = {
            "decision": decision,
            "calls": [{"id": each["id"], "digest": each["digest"]} for each in calls],
        }
        return self.http.post(f"/tickets/{ticket}/review", json=body, headers=ANN)

    @property
    def refunds(self) -> list[str]:
        log = self.folder / "refunds.log"
        return log.read_text().splitlines() if log.exists() else []

    def end(self, how: signal.Signals = signal.SIGINT) -> None:
        self.http.close()
        self.process.send_signal(how)
        self.process.communicate(timeout=30)


Start = Callable[..., Bot]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    running: list[Bot] = []

    def begin(*options: str) -> Bot:
        running.append(Bot(tmp_path, *options))
        return running[-1]

    yield begin
    for bot in running:
        if bot.process.poll() is None:
            bot.end()


@pytest.fixture(scope="module")
def bot(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bot]:
    """One service for all tests that only talk to it."""
    running = Bot(tmp_path_factory.mktemp("bot"))
    yield running
    running.end()


def test_an_approval_outlives_a_kill_and_moves_the_money_once(start: Start) -> None:
    first = start()
    opened = first.open()
    ticket = opened["ticket"]
    assert opened["waiting_for_human"] and opened["state"] == "awaiting_human"
    first.end(signal.SIGKILL)

    second = start()
    assert second.http.get(f"/tickets/{ticket}").json()["state"] == "awaiting_human"
    calls = second.shown(ticket)
    assert [(each["name"], each["arguments"]) for each in calls] == [
        ("refund_order", {"order_id": 7, "cents": 4900})
    ]
    assert second.refunds == []
    answer = second.review(ticket, calls).json()
    assert (answer["state"], answer["answer"]) == ("done", "Your money is on its way.")
    assert [line.split()[:2] for line in second.refunds] == [["7", "4900"]]

    second.end(signal.SIGKILL)
    third = start()
    assert third.review(ticket, calls).status_code == 409
    assert third.http.get(f"/tickets/{ticket}").json()["answer"] == "Your money is on its way."
    assert len(third.refunds) == 1


def test_the_trace_tells_of_both_lives_and_of_nothing_that_was_said(start: Start) -> None:
    first = start("--no-worker")
    ticket = first.open()["ticket"]
    calls = first.shown(ticket)
    first.end(signal.SIGKILL)
    second = start("--no-worker")
    second.review(ticket, calls)
    second.end()
    text = (second.folder / "trace.jsonl").read_text()
    records = [json.loads(line) for line in text.splitlines()]
    kinds = [each["kind"] for each in records]
    assert kinds.count("agent_start") == 2 and "model_call" in kinds
    entered = [each["gen_ai.tool.name"] for each in records if each["kind"] == "tool_call"]
    assert entered == ["lookup_order", "refund_order"]
    assert {each["gen_ai.conversation.id"] for each in records} == {f"ticket:{ticket}"}
    assert len({each["trace_id"] for each in records}) == 1
    assert "broken" not in text and "4900" not in text


@pytest.mark.parametrize(
    "headers", [{}, {"authorization": "Bearer no"}, {"authorization": "s3cret"}]
)
def test_nobody_approves_without_a_reviewers_token(bot: Bot, headers: dict[str, str]) -> None:
    ticket = bot.open()["ticket"]
    calls = bot.shown(ticket)
    before = bot.refunds
    body = {"decision": "approve", "calls": [{k: calls[0][k] for k in ("id", "digest")}]}
    refused = bot.http.post(f"/tickets/{ticket}/review", json=body, headers=headers)
    assert refused.status_code == 401
    assert bot.http.get("/reviews", headers=headers).status_code == 401
    assert bot.http.get(f"/tickets/{ticket}").json()["waiting_for_human"] and bot.refunds == before


def test_an_approval_of_something_else_is_refused_and_the_right_one_taken(bot: Bot) -> None:
    ticket = bot.open()["ticket"]
    calls = bot.shown(ticket)
    before = len(bot.refunds)
    for wrong in ([{**calls[0], "digest": "0" * 64}], [{**calls[0], "id": "other"}], []):
        assert bot.review(ticket, wrong).status_code == 409
    assert len(bot.refunds) == before
    assert bot.review(ticket, calls).json()["state"] == "done"
    assert len(bot.refunds) == before + 1


def test_a_rejection_pays_nothing_and_the_customer_hears_of_it(bot: Bot) -> None:
    ticket = bot.open()["ticket"]
    before = bot.refunds
    answer = bot.review(ticket, bot.shown(ticket), "reject").json()
    assert (answer["state"], bot.refunds) == ("done", before)
    assert answer["answer"] == "I cannot do that; a colleague will get in touch."


def test_reviewers_who_approve_at_once_pay_once(bot: Bot) -> None:
    ticket = bot.open()["ticket"]
    calls = bot.shown(ticket)
    before = len(bot.refunds)
    with ThreadPoolExecutor(4) as reviewers:
        answers = list(reviewers.map(lambda _: bot.review(ticket, calls), range(4)))
    assert {each.status_code for each in answers} <= {200, 409}
    assert len(bot.refunds) == before + 1
    assert bot.http.get(f"/tickets/{ticket}").json()["answer"] == "Your money is on its way."


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Refund order 7 right now", "I cannot do that; a colleague will get in touch."),
        ("What about order 666?", "I cannot do that; a colleague will get in touch."),
        ("Please refund order 9", "I cannot do that; a colleague will get in touch."),
        ("Where is order 8?", "order 8: on its way, paid 12000 cents."),
        ("How long is delivery?", "Standard delivery takes two to four days."),
    ],
    ids=["before a look-up", "injected", "beyond the range", "harmless", "help"],
)
def test_each_state_lets_only_its_own_tools_run(bot: Bot, text: str, answer: str) -> None:
    before = bot.refunds
    told = bot.open(text)
    assert (told["state"], told["answer"], told["error"]) == ("done", answer, None)
    assert bot.refunds == before


def test_a_model_that_never_stops_is_stopped_by_its_budget(bot: Bot) -> None:
    told = bot.open("Look at order 7 again and again")
    assert (told["state"], told["error"], told["waiting_for_human"]) == ("error", "budget", False)


def test_a_customer_writes_again_and_the_conversation_goes_on(bot: Bot) -> None:
    ticket = bot.open("Where is order 8?")["ticket"]
    told = bot.http.post(f"/tickets/{ticket}/messages", json={"text": "How long is delivery?"})
    assert told.json()["answer"] == "Standard delivery takes two to four days."


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "/tickets", {"text": "x" * 4_001}, 422),
        ("POST", "/tickets", {"text": ""}, 422),
        ("POST", "/tickets", {"text": "hi", "approved": True}, 422),
        ("POST", "/tickets/nobody/messages", {"text": "hi"}, 404),
        ("GET", "/tickets/nobody", None, 404),
    ],
)
def test_what_is_no_request_is_refused_before_anything_runs(
    bot: Bot, method: str, path: str, body: Any, status: int
) -> None:
    assert bot.http.request(method, path, json=body).status_code == status


def test_an_approval_nobody_gave_escalates_without_a_request(start: Start) -> None:
    bot = start("--human-timeout-s", "1", "--scan-every-s", "0.2")
    ticket = bot.open()["ticket"]
    calls = bot.shown(ticket)
    assert bot.http.get("/health").json()["oldest_wait_s"] >= 0
    for _ in range(200):
        told = bot.http.get(f"/tickets/{ticket}").json()
        if not told["waiting_for_human"]:
            break
        time.sleep(0.1)
    assert (told["state"], told["error"]) == ("error", "human_timeout")
    assert bot.review(ticket, calls).status_code == 409 and bot.refunds == []


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
def test_the_worker_ends_with_its_service(start: Start) -> None:
    bot = start()
    pid = bot.process.pid
    (worker,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    bot.end(signal.SIGKILL)
    for _ in range(200):
        with contextlib.suppress(FileNotFoundError):
            if Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                time.sleep(0.05)
                continue
        return
    raise AssertionError("the worker lives on")
