"""Canaries: secrets in every place a value can hold them, and what must be left alone."""

from __future__ import annotations

import collections
import dataclasses
import datetime as dt
import enum
import json
import re
import time
from typing import Any

import pytest
from pydantic import BaseModel, SecretStr

from guardchart import _redact
from guardchart._redact import scrub_bounded, scrub_capped
from guardchart.gate import AGENT_REDACT_KEYS, error_text, scrub

PEM = "-----BEGIN RSA PRIVATE KEY-----\nMIICANARYabc123\nCANARY\n-----END RSA PRIVATE KEY-----"
SECRETS = {
    "bearer": "Bearer CANARY.abc123-xyz",
    "basic": "Basic CANARYQ0FOQVJZOnBhc3M=",
    "jwt": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJDQU5BUlkifQ.CANARYsig",
    "openai": "sk-CANARY0123456789abcd",
    "openai project": "sk-proj-CANARY0123456789abcd_xyz",
    "anthropic": "sk-ant-api03-CANARY0123456789",
    "stripe": "sk_live_CANARY0123456789",
    "stripe restricted": "rk_live_0123456789CANARYabc",
    "aws": "AKIACANARY0123456789",
    "github": "ghp_CANARY0123456789abcdefghij0123456789",
    "github fine": "github_pat_CANARY0123456789_abcdefghij",
    "gitlab": "glpat-CANARY0123456789ab",
    "slack": "xoxb-CANARY-0123456789",
    "google": "AIzaCANARY0123456789abcdefghij0123456789",
    "google oauth": "ya29.CANARY0123456789abcdef",
    "npm": "npm_CANARY0123456789abcdefghij0123456789",
    "sendgrid": "SG.CANARY0123456789abcd.CANARY0123456789abcd",
    "pem": PEM,
    "pem without end": PEM.split("-----END")[0],
    "url": "postgres://user:CANARYpw@db.example/x",
    "assignment": "password=CANARY",
    "json in text": 'failed with {"api_key": "CANARY x", "n": 1} today',
    "assignment after a name": "refused: password=CANARY",
    "assignment in a query": "GET /x?a=1&access_token=CANARY&b=2",
    "escaped json": 'body: "{\\"token\\": \\"CANARY\\"}"',
    "header in text": "authorization: CANARYvalue",
}


class Model(BaseModel):
    token: str = "CANARY"
    note: str = "fine"


class Free(BaseModel, extra="allow"):
    n: int = 1


@dataclasses.dataclass
class Data:
    password: str
    note: str


Point = collections.namedtuple("Point", "secret note")


class Talking:
    def __init__(self, text: str) -> None:
        self.text = text

    def __str__(self) -> str:
        return self.text


class Held(enum.Enum):
    ONE = "sk-CANARY0123456789abcd"


def holds(value: Any) -> bool:
    return "CANARY" in repr(value) or "CANARY" in str(value)


@pytest.mark.parametrize("secret", SECRETS.values(), ids=SECRETS.keys())
def test_a_secret_is_masked_wherever_it_is_held(secret: str) -> None:
    places: list[Any] = [
        secret,
        f"before {secret} after",
        [secret],
        (secret, 1),
        {secret},
        frozenset({secret}),
        {"note": secret},
        {secret: "value"},
        {"a": [{"b": (secret,)}]},
        secret.encode(),
        bytearray(secret.encode()),
        Talking(secret),
        {Talking(secret): 1},
        Free.model_validate({"n": 1, "more": secret}),
        Data("x", secret),
        Point("x", secret),
        json.dumps({"note": secret}),
        json.dumps([json.dumps({"note": secret})]),
        ValueError(secret),
        {"error": KeyError(secret)},
        collections.OrderedDict(a=secret),
        collections.deque([secret]),
    ]
    for place in places:
        assert not holds(scrub(place)), place


def test_values_are_masked_without_keys_too() -> None:
    assert not holds(scrub({"a": SECRETS["bearer"]}, by_key=False))
    assert scrub({"password": "plain"}, by_key=False) == {"password": "plain"}


def test_an_exception_chain_is_masked_to_its_end() -> None:
    try:
        try:
            raise KeyError("token=CANARY")
        except KeyError as exc:
            raise RuntimeError("Bearer CANARY12345") from exc
    except RuntimeError as exc:
        text = error_text(exc)
    assert text == "RuntimeError: *** <- KeyError: 'token=***'"
    assert len(error_text(ValueError("x" * 10**6))) < 600


def test_enums_and_typed_secrets_are_masked() -> None:
    assert not holds(scrub(Held.ONE))
    assert not holds(scrub({"a": SecretStr("CANARY")}))
    assert not holds(scrub(Model()))


MASKED_KEYS = [
    "token", "access_token", "accessToken", "ACCESS_TOKEN", "refresh-token", "x-api-key",
    "X-API-Key", "apiKey", "APIKey", "api_key", "apikey", "openai_api_key", "api key", "password",
    "user_password", "db.password", "passwd", "pwd", "secret", "client_secret", "clientSecret",
    "secret_key", "authorization", "Authorization", "bearer", "cookie", "set-cookie", "private_key",
    "credential", "credentials", "aws_secret_access_key", "csrf_token", "password_hash",
    "token_value", "api_key_1", "passphrase",
]  # fmt: skip
KEPT_KEYS = [
    "next_page_token", "nextPageToken", "page_token", "continuation_token", "tokens_used",
    "tokensUsed", "max_tokens", "tokens", "prompt_tokens", "total_tokens", "token_count",
    "tokenCount", "cookie_policy", "cookiePolicy", "password_policy", "password_length",
    "secretary", "tokenizer", "author", "keyboard", "api", "key", "monkey", "passenger",
    "token_type", "secret_name", "authored_by", "cookies_enabled", "access", "bearings",
    "max_token", "stop_token", "auth_method",
]  # fmt: skip


@pytest.mark.parametrize("key", MASKED_KEYS)
def test_a_key_that_names_a_secret_masks_its_value(key: str) -> None:
    assert scrub({key: "CANARY"}) == {key: "***"}
    assert scrub({key: {"deep": ["CANARY"]}}) == {key: "***"}
    assert scrub({key: 1234}) == {key: "***"}
    assert scrub({key: None}) == {key: None}
    assert scrub({key: True}) == {key: True}


@pytest.mark.parametrize("key", KEPT_KEYS)
def test_a_key_that_only_sounds_like_one_is_left_alone(key: str) -> None:
    assert scrub({key: "value"}) == {key: "value"}
    assert scrub({key: 12}) == {key: 12}
    assert scrub(f"{key}=value") == f"{key}=value"


KEPT_VALUES = [
    "sk-learning-curve", "the sk-learn package", "task-0123456789abcdef", "risk_0123456789abcdef",
    "bearer of bad news", "Basic training", "https://example.com/a?b=c", "eyJ", "AKIA",
    "time: 12:30", "a: b", "x=1", "ghp_short", "note: token expired", '{"a": 1,  "b": 2}',
    "[1, 2]", "{not json", "2024-05-01T10:00:00Z", "hf_model", "token", "password",
    "3f2504e0-4f89-11d3-9a0c-0305e82c3301", "basic auth is off",
]  # fmt: skip


@pytest.mark.parametrize("value", KEPT_VALUES)
def test_ordinary_text_is_left_alone(value: str) -> None:
    assert scrub(value) == value
    assert scrub({"note": value}) == {"note": value}
    assert scrub(value.encode()) == value.encode()


def test_shapes_and_plain_values_are_kept() -> None:
    when = dt.datetime(2024, 5, 1)
    value = {"n": 1, "f": 1.5, "t": (1, 2), "s": {1, 2}, "d": when, "x": None, 3: [b"raw\xff"]}
    assert scrub(value) == value
    assert scrub(Point("s", "n")) == Point("***", "n")
    assert scrub(Data("p", "n")) == {"password": "***", "note": "n"}
    assert scrub(Model()) == {"token": "***", "note": "fine"}


def test_the_value_given_is_not_changed() -> None:
    value = {"token": "x", "a": [{"password": "y"}]}
    scrub(value)
    assert value == {"token": "x", "a": [{"password": "y"}]}


@pytest.mark.parametrize("depth", [900, 20_000])
def test_depth_does_not_crash_redaction(depth: int) -> None:
    value: Any = {"token": "CANARY"}
    for i in range(depth):
        value = {"a": value} if i % 3 else ([value] if i % 2 else (value,))
    out: Any = scrub(value)
    for _ in range(depth):
        out = out["a"] if isinstance(out, dict) else out[0]
    assert out == {"token": "***"}


def test_a_deep_json_text_does_not_crash_redaction() -> None:
    for depth in (900, 5000, 100_000):
        text = '{"a":' * depth + '{"password": "CANARY"}' + "}" * depth
        assert not holds(scrub(text))


def test_what_refers_to_itself_is_shown_once() -> None:
    value: dict[str, Any] = {"a": 1}
    value["self"] = value
    value["list"] = [value]
    assert scrub(value) == {"a": 1, "self": "[...]", "list": ["[...]"]}
    shared = [1]
    assert scrub([shared, shared]) == [[1], [1]]


def test_an_object_whose_str_fails_is_named_only() -> None:
    class Broken:
        def __str__(self) -> str:
            raise RuntimeError("CANARY")

    assert scrub(Broken()) == "<Broken>"


def test_redaction_is_stable() -> None:
    for secret in SECRETS.values():
        once = scrub(secret)
        assert scrub(once) == once


def test_a_cut_leaves_no_half_of_a_secret() -> None:
    for secret in ("sk-CANARY0123456789abcdCANARY", PEM, "Bearer CANARY0123456789CANARY"):
        for before in range(90, 101):
            for total in (0, 50, 20_000):
                text = "x " * (before // 2) + secret + " y" * total
                assert "CANARY" not in scrub_capped(text, 100)
        huge = ("Bearer CANARYabc1234567 " * 2000) + "tail"
        assert "CANARY" not in scrub_capped(huge, 100)


@pytest.mark.parametrize(
    "text",
    [
        "a" * 2_000_000,
        "=" * 500_000,
        ("a=" * 300_000),
        ('"' * 300_000),
        ("-----BEGIN PRIVATE KEY-----" * 20_000),
        ("eyJ" * 300_000),
        ("sk-" * 300_000),
        ("bearer " * 100_000),
        ("://" * 200_000),
        ("password='" * 60_000),
        ("token=" + "\\" * 500_000),
        ("[" * 500_000),
    ],
    ids=lambda t: t[:8],
)
def test_hostile_text_costs_bounded_time(text: str) -> None:
    started = time.process_time()
    scrub_capped(text, 4000)
    assert time.process_time() - started < 1.5


def test_bounded_redaction_stops_at_its_bound() -> None:
    value = [[str(i)] for i in range(1_000_000)]
    started = time.process_time()
    out = scrub_bounded(value, max_nodes=100, max_text=100)
    assert time.process_time() - started < 0.5
    assert out[0] == ["0"]
    assert out[-1] == "[...]"
    assert len(out) < 100
    assert len(scrub_bounded({str(i): i for i in range(10**5)}, max_nodes=50, max_text=9)) <= 50


def test_the_list_of_keys_is_sorted_and_public() -> None:
    assert list(AGENT_REDACT_KEYS) == sorted(AGENT_REDACT_KEYS)
    assert {"api_key", "authorization", "token", "secret", "password"} <= set(AGENT_REDACT_KEYS)


def test_no_text_that_is_too_short_to_be_searched_could_hold_a_secret() -> None:
    least, _ = re._parser.parse(_redact._VALUES.pattern).getwidth()
    assert least >= _redact._SHORTEST
