"""Secrets and values of a model reach neither model, context, snapshot, trace nor log."""

from __future__ import annotations

import collections
import dataclasses
import json
import logging
from typing import Any

import pytest
from pydantic import BaseModel, Field, field_validator

from guardchart import SyncInterpreter, create_machine
from guardchart.agents import FakeModel, agent_logic, scrub, tool_registry
from tests.promises.bank import AT_ONCE, SAY, listed_chart

CANARY = "sk-proj-CANARY0123456789abcdefABCDEF0123456789"
BEARER = "Bearer CANARYeyJhbGciOiJIUzI1NiJ9abcdef0123456789"


class Holder(BaseModel):
    api_key: str = CANARY
    note: str = "fine"


@dataclasses.dataclass
class Box:
    password: str = CANARY


Pair = collections.namedtuple("Pair", ["token", "n"])


class Shows:
    def __str__(self) -> str:
        return f"authorization: {BEARER}"


LEAKS: dict[str, Any] = {
    "a dict": {"api_key": CANARY, "note": "fine"},
    "a nested list": [[{"x": [BEARER]}]],
    "a model": Holder(),
    "a dataclass": Box(),
    "a namedtuple": Pair(CANARY, 1),
    "a set": {CANARY},
    "an object's __str__": Shows(),
    "a dict's key": {CANARY: 1},
    "bytes": CANARY.encode(),
    "JSON text": json.dumps({"secret": CANARY}),
    "plain text": f"the key is {CANARY}, keep it",
}


@pytest.mark.parametrize("what", LEAKS)
def test_canary_secrets_of_a_tool_reach_neither_model_context_snapshot_nor_log(
    what: str, caplog: pytest.LogCaptureFixture
) -> None:
    _no_canary(lambda n: LEAKS[what], caplog)


def test_canary_secrets_in_exception_texts_and_chains_do_not_leak(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fails(n: int) -> Any:
        try:
            raise KeyError(CANARY)
        except KeyError as error:
            raise ValueError(f"token={CANARY}") from error

    _no_canary(fails, caplog)


def _no_canary(body: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="guardchart")

    def leak(n: int) -> Any:
        """Leak."""
        return body(n)

    model = FakeModel([{"tool": "leak", "args": {"n": 1}}, SAY], is_async=False)
    logic = agent_logic(model, tool_registry(leak), retry=AT_ONCE)
    interpreter = SyncInterpreter(create_machine(listed_chart("leak"), logic)).start()
    interpreter.send("START", prompt="Go.")
    interpreter.settle()
    assert interpreter.status == "done"
    everything = "\n".join(
        [str(model.calls), interpreter.get_snapshot(), str(interpreter.context), caplog.text]
    )
    assert "CANARY" not in everything


class Checked(BaseModel):
    email: str = Field(max_length=5)

    @field_validator("email")
    @classmethod
    def _no(cls, value: str) -> str:
        raise ValueError(f"bad {value}")


@pytest.mark.gate
def test_validation_errors_carry_no_values_unknown_keys_or_validator_text() -> None:
    def mail(to: Checked, n: int = Field(gt=0)) -> str:
        """Mail."""
        return "sent"

    for arguments in (
        {"to": {"email": "CANARY@example.com"}, "n": 1},
        {"to": {"email": "a"}, "n": 1, "CANARY_key": 1},
        {"to": {"email": "CANAR"}, "n": 1},
        {"to": {"email": "a", "CANARY_nested": 1}, "n": 1},
        {"to": {"email": "a"}, "n": "CANARY"},
    ):
        model = FakeModel([{"tool": "mail", "args": arguments}], is_async=False)
        logic = agent_logic(model, tool_registry(mail), retry=AT_ONCE)
        interpreter = SyncInterpreter(create_machine(listed_chart("mail"), logic)).start()
        interpreter.send("START", prompt="Go.")
        error = interpreter.context["error"]
        assert error["kind"] == "tool_denied"
        assert "CANARY" not in error["message"] and "bad " not in error["message"]
        results = [each for each in interpreter.context["messages"] if each["role"] == "tool"]
        assert "CANARY" not in str(results)


def test_redaction_at_depth_900_does_not_crash_and_leaves_harmless_names_alone() -> None:
    deep: Any = {"api_key": CANARY}
    for _ in range(900):
        deep = {"x": deep}
    assert "CANARY" not in str(scrub(deep))
    harmless = {
        "max_tokens": 100,
        "next_page_token": "page-2",
        "tokens_used": 7,
        "cookie_policy": "strict",
        "course": "sk-learning-curve",
    }
    assert scrub(harmless) == harmless
