import asyncio
import concurrent.futures
import dataclasses
import functools
import math
import subprocess
import sys
import threading
from types import MappingProxyType

import pytest

from guardchart.agents._models import (
    FakeModel,
    ModelResponse,
    RetryPolicy,
    Usage,
    is_async_model,
    reports_cost,
    tool_names,
)
from guardchart.errors import AgentConfigError, AgentError
from guardchart.gate import ToolCall

ASK = [{"role": "user", "content": "hello"}]
LOOKUP = {"name": "lookup", "description": "", "parameters": {"type": "object"}}


def sync_model(*items, **kw):
    return FakeModel(items, is_async=False, **kw)


# --- FakeModel: what an item answers -----------------------------------------------------------


def test_fake_model_answers_text_with_its_name_and_no_usage():
    assert sync_model({"text": "hi"})(ASK, []) == ModelResponse("hi", (), Usage(), "fake")


async def test_fake_model_is_awaited_by_default():
    model = FakeModel([{"text": "hi"}])
    answer = model(ASK, [])
    assert asyncio.iscoroutine(answer)
    assert (await answer).text == "hi"


def test_fake_model_proposes_one_call_from_tool_and_args():
    answer = sync_model({"tool": "lookup", "args": {"n": 1}})(ASK, [])
    (call,) = answer.tool_calls
    assert (answer.text, call.name, call.arguments) == (None, "lookup", {"n": 1})
    assert call.id


def test_fake_model_gives_a_tool_without_args_an_empty_object():
    assert sync_model({"tool": "now"})(ASK, []).tool_calls[0].arguments == {}


def test_fake_model_proposes_several_calls_in_order():
    answer = sync_model(
        {
            "text": "on it",
            "tool_calls": [
                {"tool": "a", "args": {"x": 1}},
                {"name": "b", "arguments": {"y": 2}, "id": "mine"},
                ToolCall("theirs", "c", {}),
            ],
        }
    )(ASK, [])
    assert [(c.name, c.arguments) for c in answer.tool_calls] == [
        ("a", {"x": 1}),
        ("b", {"y": 2}),
        ("c", {}),
    ]
    assert [c.id for c in answer.tool_calls[1:]] == ["mine", "theirs"]
    assert answer.text == "on it"


def test_fake_model_keeps_an_id_that_the_script_gives():
    model = sync_model({"tool": "a", "id": "c1"}, {"tool": "b", "id": "c1"})
    assert [model(ASK, []).tool_calls[0].id for _ in range(2)] == ["c1", "c1"]


def test_fake_model_mints_ids_that_differ_between_instances_playing_one_script():
    script = [{"tool_calls": [{"tool": "a"}, {"tool": "a"}]}]
    ids = [
        call.id
        for model in (FakeModel(script, is_async=False) for _ in range(50))
        for call in model(ASK, []).tool_calls
    ]
    assert len(set(ids)) == 100


def test_fake_model_returns_a_model_response_as_it_is():
    response = ModelResponse("x", [ToolCall("c", "t", {})], Usage(1, 2, 3.0), "other")
    assert sync_model(response)(ASK, []) is response


@pytest.mark.parametrize("error", [ValueError("boom"), TimeoutError, asyncio.CancelledError()])
def test_fake_model_raises_an_exception_item(error):
    with pytest.raises(type(error) if isinstance(error, BaseException) else error):
        sync_model(error)(ASK, [])


def test_fake_model_goes_on_after_an_exception():
    model = sync_model(ValueError("boom"), {"text": "better"})
    with pytest.raises(ValueError, match="boom"):
        model(ASK, [])
    assert model(ASK, []).text == "better"


def test_fake_model_reports_usage_per_item_and_default_usage_elsewhere():
    model = sync_model(
        {"text": "a", "usage": {"input_tokens": 7}},
        {"text": "b", "usage": Usage(1, 2, 0.5)},
        {"text": "c"},
        default_usage={"output_tokens": 9},
    )
    assert [model(ASK, []).usage for _ in range(3)] == [
        Usage(7, 0, 0.0),
        Usage(1, 2, 0.5),
        Usage(0, 9, 0.0),
    ]


def test_fake_model_can_report_usage_that_no_honest_provider_would():
    usage = {"input_tokens": -5, "output_tokens": True, "cost_usd": math.nan}
    reported = sync_model({"text": "x", "usage": usage})(ASK, []).usage
    assert reported.input_tokens == -5 and math.isnan(reported.cost_usd)


def test_fake_model_says_how_many_calls_it_was_good_for_when_exhausted():
    model = sync_model({"text": "a"}, {"text": "b"})
    model(ASK, [])
    model(ASK, [])
    for _ in range(2):
        with pytest.raises(AgentError, match=r"FakeModel script exhausted after 2 call\(s\)"):
            model(ASK, [])
    assert len(model.calls) == 2


# --- FakeModel: what it records ----------------------------------------------------------------


def test_fake_model_records_messages_and_tool_names_of_each_call():
    model = sync_model({"text": "a"}, {"text": "b"})
    model(ASK, [LOOKUP])
    model([*ASK, {"role": "assistant", "content": "a"}], [])
    assert model.calls[0] == {"messages": ASK, "tools": ["lookup"]}
    assert len(model.calls[1]["messages"]) == 2 and model.calls[1]["tools"] == []


def test_fake_model_records_what_was_sent_even_if_the_list_changes_later():
    messages = [dict(ASK[0])]
    model = sync_model({"text": "a"})
    model(messages, [])
    messages[0]["content"] = "other"
    messages.append({})
    assert model.calls[0]["messages"] == ASK


def test_what_the_fake_was_sent_stays_as_it_was_sent() -> None:
    model = FakeModel([{"text": "a"}, {"text": "b"}], is_async=False)
    call = {"id": "c1", "name": "lookup", "arguments": {"order_id": 1}}
    plain = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    odd = [MappingProxyType({"role": "user", "content": object()})]
    model(plain, [])
    model(odd, [])
    call["arguments"]["order_id"] = 2
    assert model.calls[0]["messages"][0]["tool_calls"][0]["arguments"] == {"order_id": 1}
    assert model.calls[1]["messages"] == [dict(odd[0])]
    assert model.calls is model.calls and len(model.calls) == 2


async def test_fake_model_records_nothing_when_its_answer_is_never_awaited():
    model = FakeModel([{"text": "hi"}])
    model(ASK, []).close()
    assert model.calls == []
    assert (await model(ASK, [])).text == "hi"


def test_fake_model_plays_each_item_once_when_threads_race():
    n = 200
    model = sync_model(*({"text": str(i)} for i in range(n)))
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        texts = [r.text for r in pool.map(lambda _: model(ASK, []), range(n))]
    assert sorted(texts, key=int) == [str(i) for i in range(n)]
    assert len(model.calls) == n


# --- FakeModel: hanging ------------------------------------------------------------------------


async def test_fake_model_hangs_until_its_task_is_cancelled():
    model = FakeModel([{"hang": True}, {"text": "after"}])
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(model(ASK, []), 0.02)
    assert (await model(ASK, [])).text == "after"


def test_fake_model_hangs_in_its_thread_until_it_is_released():
    model = sync_model({"hang": True})
    outcome = []

    def ask():
        try:
            model(ASK, [])
        except AgentError as exc:
            outcome.append(str(exc))

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()
    model.release()
    thread.join(5)
    assert outcome == ["FakeModel released a call that was hanging"]


@pytest.mark.parametrize(
    "start",
    [
        "import threading; threading.Thread(target=ask).start()",
        "import concurrent.futures as f; p = f.ThreadPoolExecutor(1); p.submit(ask)",
    ],
    ids=["thread", "executor"],
)
def test_fake_model_that_hangs_does_not_keep_the_interpreter_from_exiting(start):
    code = f"""
import time
from guardchart.agents._models import FakeModel
from guardchart.errors import AgentError
def ask():
    try:
        FakeModel([{{"hang": True}}], is_async=False)([], [])
    except AgentError:
        pass
{start}
time.sleep(0.1)
"""
    done = subprocess.run([sys.executable, "-c", code], timeout=30, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")


# --- FakeModel: scripts ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("item", "words"),
    [
        ("hi", "expected a mapping"),
        (None, "expected a mapping"),
        ({}, "expected `text`"),
        ({"usage": {}}, "expected `text`"),
        ({"txt": "hi"}, "unknown key 'txt'"),
        ({"args": {}}, "need a `tool`"),
        ({"text": "x", "id": "c1"}, "need a `tool`"),
        ({"hang": False}, "hang"),
        ({"hang": True, "text": "x"}, "hang"),
        ({"text": "x", "usage": {"tokens": 1}}, "unknown key 'tokens'"),
        ({"text": "x", "usage": 5}, "expected a Usage"),
        ({"tool_calls": ["a"]}, "expected a mapping or a ToolCall"),
        ({"tool_calls": [{"args": {}}]}, "exactly one of"),
        ({"tool_calls": [{"tool": "a", "name": "b"}]}, "exactly one of"),
        ({"tool_calls": [{"tool": "a", "args": {}, "arguments": {}}]}, "at most one of"),
    ],
)
def test_fake_model_refuses_a_malformed_item_when_built_and_names_its_index(item, words):
    with pytest.raises(AgentConfigError, match=r"script\[1\]") as caught:
        FakeModel([{"text": "fine"}, item])
    assert words in str(caught.value)


def test_fake_model_refuses_a_malformed_default_usage():
    with pytest.raises(AgentConfigError, match="default_usage"):
        FakeModel([], default_usage={"tokens": 1})


def test_fake_model_takes_a_script_from_a_generator():
    assert FakeModel(({"text": t} for t in "ab"), is_async=False)(ASK, []).text == "a"


# --- other model types -------------------------------------------------------------------------


def test_model_response_keeps_calls_as_a_tuple():
    call = ToolCall("c", "t", {})
    assert ModelResponse(tool_calls=[call]).tool_calls == (call,)
    assert ModelResponse(tool_calls=None).tool_calls == ()
    assert ModelResponse() == ModelResponse(None, (), Usage(0, 0, 0.0), None)


def test_a_dataclass_made_of_a_model_response_keeps_its_calls_as_a_tuple_too():
    @dataclasses.dataclass(frozen=True)
    class Noted(ModelResponse):
        note: str = ""

    call = ToolCall("c", "t", {})
    assert Noted(tool_calls=[call], note="n").tool_calls == (call,)
    assert dataclasses.replace(Noted("hi"), tool_calls=[call]).tool_calls == (call,)


async def _async_call(messages, tools):
    return ModelResponse("x")


def _sync_call(messages, tools):
    return ModelResponse("x")


class _AsyncObject:
    async def __call__(self, messages, tools):
        return ModelResponse("x")


class _SyncObject:
    def __call__(self, messages, tools):
        return ModelResponse("x")


@functools.wraps(_async_call)
def _wrapped(*args):
    return _async_call(*args)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (_async_call, True),
        (_sync_call, False),
        (lambda m, t: ModelResponse(), False),
        (_AsyncObject(), True),
        (_SyncObject(), False),
        (_AsyncObject().__call__, True),
        (functools.partial(_async_call), True),
        (functools.partial(functools.partial(_sync_call)), False),
        (_wrapped, True),
        (FakeModel([]), True),
        (FakeModel([], is_async=False), False),
        ("no model", False),
    ],
)
def test_is_async_model_sees_through_objects_partials_and_wrappers(model, expected):
    assert is_async_model(model) is expected


def test_reports_cost_is_false_only_for_a_model_without_its_price_sheet():
    class Priced:
        prices = None

    assert not reports_cost(Priced())
    Priced.prices = {"input_per_mtok": 1}
    assert reports_cost(Priced()) and reports_cost(_sync_call)


def test_tool_names_reads_schemas_and_objects_with_a_name():
    class Named:
        name = "c"

    schemas = [LOOKUP, {"type": "function", "function": {"name": "b"}}, Named()]
    assert tool_names(schemas) == ["lookup", "b", "c"]


# --- RetryPolicy -------------------------------------------------------------------------------


def test_retry_policy_waits_one_second_three_times_without_jitter_by_default():
    policy = RetryPolicy()
    assert policy.max_attempts == 3
    assert [policy.delay_ms(n) for n in (1, 2, 3)] == [1000, 1000, 1000]


def test_retry_policy_multiplies_by_backoff_up_to_the_longest_delay():
    policy = RetryPolicy(max_attempts=9, delay_s=0.1, backoff=10, max_delay_s=5)
    assert [policy.delay_ms(n) for n in (1, 2, 3, 4, 10**9)] == [100, 1000, 5000, 5000, 5000]


def test_retry_policy_without_delay_never_waits():
    assert RetryPolicy(delay_s=0, backoff=3, jitter=1).delay_ms(10**9) == 0


def test_retry_policy_jitter_is_the_same_for_one_attempt_of_one_run_and_spread_over_runs():
    policy = RetryPolicy(jitter=0.5)
    delays = [policy.delay_ms(1, f"run-{n}") for n in range(200)]
    assert delays == [policy.delay_ms(1, f"run-{n}") for n in range(200)]
    assert min(delays) < 700 and max(delays) > 1300
    assert all(500 <= d <= 1500 for d in delays)
    assert len(set(delays)) > 100
    assert policy.delay_ms(1, "r") != policy.delay_ms(2, "r")


@pytest.mark.parametrize("attempt", [0, -3, True, None, "2", 1.5, math.nan])
def test_retry_policy_counts_a_forged_attempt_as_the_first(attempt):
    assert RetryPolicy(backoff=2).delay_ms(attempt) == 1000


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_attempts": 0},
        {"max_attempts": True},
        {"max_attempts": 2.0},
        {"max_attempts": "3"},
        {"delay_s": -1},
        {"delay_s": "1"},
        {"delay_s": math.nan},
        {"delay_s": math.inf},
        {"delay_s": False},
        {"backoff": 0.5},
        {"backoff": math.nan},
        {"jitter": 1.1},
        {"jitter": -0.1},
        {"max_delay_s": -1},
        {"max_delay_s": math.inf},
    ],
)
def test_retry_policy_refuses_a_number_out_of_range(wrong):
    with pytest.raises(AgentConfigError, match=next(iter(wrong))):
        RetryPolicy(**wrong)
