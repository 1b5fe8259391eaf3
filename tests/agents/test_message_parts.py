from __future__ import annotations

import base64
import json

import pydantic
import pytest

from guardchart.agents import (
    AgentMessage,
    AssistantMessage,
    FilePart,
    ImagePart,
    TextPart,
    ToolCallPart,
    ToolResultPart,
    assistant_message,
    messages_from_compact,
    messages_schema,
    messages_to_compact,
    system_message,
    tool_message,
    user_message,
)
from guardchart.errors import AgentError

CALL = {"type": "tool-call", "toolCallId": "c1", "toolName": "lookup", "input": {"id": 4}}
TEXT = {"type": "text", "text": "hello"}
IMAGE = {"type": "image", "image": "https://example.org/cat.png"}
FILE = {"type": "file", "data": "aGk=", "mediaType": "text/plain", "filename": "hi.txt"}


def result(output):
    return {"type": "tool-result", "toolCallId": "c1", "toolName": "lookup", "output": output}


RESULT = result({"type": "text", "value": "shipped"})
OUTPUTS = [
    {"type": "text", "value": "shipped"},
    {"type": "json", "value": {"state": ["shipped", None]}},
    {"type": "json", "value": None},
    {"type": "error-text", "value": "no such order"},
    {"type": "error-json", "value": {"code": 404}},
    {"type": "content", "value": [TEXT, IMAGE]},
]


def written(messages):
    return messages_schema.dump_python(messages, mode="json")


# M1


def test_message_ruling_m1_each_helper_makes_its_role():
    assert system_message("s").role == "system"
    assert user_message("u").content == "u"
    assert assistant_message([CALL]).content == [
        ToolCallPart(tool_call_id="c1", tool_name="lookup", input={"id": 4})
    ]
    assert isinstance(tool_message([RESULT]).content[0], ToolResultPart)


def test_message_ruling_m1_parts_are_taken_as_objects_and_from_any_sequence():
    message = user_message((TextPart(text="what?"), ImagePart(image=b"\x89PNG")))
    assert [part.type for part in message.content] == ["text", "image"]


@pytest.mark.parametrize("output", OUTPUTS, ids=lambda each: each["type"])
def test_message_ruling_m1_each_output_of_a_tool_survives_a_round_trip(output):
    messages = [{"role": "tool", "content": [result(output)]}]
    assert written(messages_schema.validate_python(messages)) == messages


PLACES = {
    "user": [TEXT, IMAGE, FILE],
    "assistant": [TEXT, FILE, CALL, RESULT],
    "tool": [RESULT],
}


@pytest.mark.parametrize("role", PLACES)
@pytest.mark.parametrize("part", [TEXT, IMAGE, FILE, CALL, RESULT], ids=lambda each: each["type"])
def test_message_ruling_m1_a_part_stands_only_where_it_has_a_place(role, part):
    messages = [{"role": role, "content": [part]}]
    if part in PLACES[role]:
        assert written(messages_schema.validate_python(messages)) == messages
    else:
        with pytest.raises(pydantic.ValidationError):
            messages_schema.validate_python(messages)


@pytest.mark.parametrize("role", ["system", "tool"])
def test_message_ruling_m1_a_system_message_has_no_parts_and_a_tool_message_no_text(role):
    content = [TEXT] if role == "system" else "text"
    with pytest.raises(pydantic.ValidationError):
        messages_schema.validate_python([{"role": role, "content": content}])


# M2

WRONG = {
    "an unknown role": {"role": "secret-role", "content": "x"},
    "no role": {"content": "x"},
    "no mapping": "secret-text",
    "an unknown part": {"role": "user", "content": [{"type": "secret-type", "text": "x"}]},
    "a part without type": {"role": "user", "content": [{"text": "secret-text"}]},
    "a missing field": {
        "role": "assistant",
        "content": [{**CALL, "input": 1} | {"toolName": None}],
    },
    "no input": {"role": "assistant", "content": [{k: CALL[k] for k in list(CALL)[:3]}]},
    "an unknown output": {"role": "tool", "content": [result({"type": "secret", "value": "x"})]},
    "an ill-typed output": {"role": "tool", "content": [result({"type": "text", "value": 7})]},
    "a file in an output": {
        "role": "tool",
        "content": [result({"type": "content", "value": [FILE]})],
    },
    "a number as text": {"role": "user", "content": 7},
    "bytes as text": {"role": "user", "content": b"secret-text"},
    "ill-typed options": {"role": "user", "content": "x", "providerOptions": {"secret-key": 7}},
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_message_ruling_m2_what_is_no_message_is_refused_and_not_repeated(wrong):
    with pytest.raises(pydantic.ValidationError) as refused:
        messages_schema.validate_python([wrong])
    assert "secret-role" not in str(refused.value) and "secret-type" not in str(refused.value)
    assert "secret-text" not in str(refused.value)
    with pytest.raises(AgentError, match=r"^messages: 0") as told:
        messages_to_compact([wrong])
    assert "secret" not in str(told.value)


def test_message_ruling_m2_a_helper_names_the_place():
    with pytest.raises(AgentError, match=r"UserMessage: content\.parts\.1: unknown type"):
        user_message([TEXT, {"type": "tool-call"}])


@pytest.mark.parametrize("nothing", [None, 7, "text", {"role": "user"}])
def test_message_ruling_m2_a_conversation_is_a_list(nothing):
    with pytest.raises(AgentError):
        messages_to_compact(nothing)
    with pytest.raises(AgentError):
        messages_from_compact(nothing)


# M3


def test_message_ruling_m3_both_spellings_are_read_and_camel_case_is_written():
    snake = {"type": "tool-call", "tool_call_id": "c1", "tool_name": "lookup", "input": {"id": 4}}
    message = assistant_message([snake])
    assert message == assistant_message([CALL])
    assert message.content[0].tool_call_id == "c1"
    assert message.to_json() == {"role": "assistant", "content": [CALL]}
    assert json.loads(message.model_dump_json()) == message.to_json()
    assert AssistantMessage.from_json(message.to_json()) == message


def test_message_ruling_m3_a_required_null_is_written_and_an_optional_one_is_not():
    call = ToolCallPart(tool_call_id="c", tool_name="t", input=None)
    assert call.to_json() == {
        "type": "tool-call",
        "toolCallId": "c",
        "toolName": "t",
        "input": None,
    }


def test_message_ruling_m3_messages_do_not_change():
    with pytest.raises(pydantic.ValidationError):
        user_message("a").content = "b"


def test_message_ruling_m3_the_union_is_an_annotation_for_a_users_own_model():
    class Context(pydantic.BaseModel):
        messages: list[AgentMessage]

    context = Context.model_validate({"messages": [{"role": "user", "content": "hi"}]})
    assert context.messages == [user_message("hi")]
    assert "UserMessage" in json.dumps(Context.model_json_schema())


# M4


def test_message_ruling_m4_what_nobody_declared_survives():
    options = {"anthropic": {"cacheControl": {"type": "ephemeral"}}}
    given = {
        "role": "user",
        "content": [{**TEXT, "x_note": [1]}],
        "providerOptions": options,
        "cost": 3,
    }
    [message] = messages_schema.validate_python([given])
    assert message.provider_options == options
    assert written([message]) == [given]


# M5


def test_message_ruling_m5_bytes_are_base64_in_json():
    data = bytes(range(256))
    for value in (data, bytearray(data), memoryview(data)):
        part = ImagePart(image=value, media_type="image/png")
        assert part.image == data
        assert part.to_json()["image"] == base64.b64encode(data).decode()
    assert FilePart.from_json(FILE).data == "aGk="


def test_message_ruling_m5_a_url_is_text():
    url = pydantic.AnyUrl("https://example.org/cat.png")
    assert ImagePart(image=url).to_json()["image"] == "https://example.org/cat.png"


def test_message_ruling_m5_what_is_not_json_is_an_error_of_ours():
    part = ToolCallPart(tool_call_id="c", tool_name="t", input=object())
    with pytest.raises(AgentError, match="ToolCallPart: a field holds what is not JSON"):
        part.to_json()


# M6

COMPACT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Where is order 4?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "c1", "name": "lookup", "arguments": {"id": 4}},
            {"id": "c2", "name": "lookup", "arguments": {}},
        ],
    },
    {"role": "tool", "content": "shipped", "tool_call_id": "c1", "name": "lookup"},
    {"role": "tool", "content": "unknown", "tool_call_id": "c2", "name": "lookup"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "c3", "name": "lookup", "arguments": {}}],
    },
    {"role": "tool", "content": "", "tool_call_id": "c3", "name": "lookup"},
    {"role": "assistant", "content": None},
    {"role": "assistant", "content": "It is on its way."},
]


def test_message_ruling_m6_compact_to_parts_and_back_is_the_same():
    parts = messages_from_compact(COMPACT)
    assert [part.role for part in parts] == [each["role"] for each in COMPACT]
    assert messages_to_compact(parts) == COMPACT
    assert messages_to_compact(written(parts)) == COMPACT
    assert messages_from_compact(iter(COMPACT)) == parts


def test_message_ruling_m6_a_result_takes_its_tools_name_from_the_call():
    nameless = [*COMPACT[2:4], {"role": "tool", "content": "x", "tool_call_id": "other"}]
    del (changed := dict(nameless[1]))["name"]
    parts = messages_from_compact([nameless[0], changed, nameless[2]])
    assert parts[1].content[0].tool_name == "lookup"
    assert parts[2].content[0].tool_name == ""
    assert "name" not in messages_to_compact(parts)[2]


def test_message_ruling_m6_parts_are_joined_and_results_become_messages_of_their_own():
    parts = [
        user_message([TEXT, {"type": "text", "text": "again"}]),
        assistant_message([TEXT, CALL, RESULT]),
        tool_message([result({"type": "json", "value": {"é": 1}}), result(OUTPUTS[3])]),
        tool_message([result({"type": "content", "value": [TEXT]})]),
    ]
    compact = messages_to_compact(parts)
    assert [each["content"] for each in compact] == [
        "hello\nagain",
        "hello",
        "shipped",
        '{"é": 1}',
        "no such order",
        "hello",
    ]
    assert compact[1]["tool_calls"] == [{"id": "c1", "name": "lookup", "arguments": {"id": 4}}]


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": [TEXT, IMAGE]},
        {"role": "assistant", "content": [FILE]},
        {"role": "tool", "content": [result({"type": "content", "value": [IMAGE]})]},
    ],
)
def test_message_ruling_m6_an_image_or_a_file_is_refused(message):
    with pytest.raises(AgentError, match=r"messages\[1\]: the compact form has no place for"):
        messages_to_compact([{"role": "user", "content": "x"}, message])


def test_message_ruling_m6_a_result_that_is_not_json_is_refused():
    part = ToolResultPart(
        tool_call_id="c", tool_name="t", output={"type": "json", "value": float("nan")}
    )
    with pytest.raises(AgentError, match="not JSON"):
        messages_to_compact([tool_message([part])])


def test_message_ruling_m6_a_compact_conversation_is_checked():
    with pytest.raises(AgentError, match=r"messages\[0\]: unknown role"):
        messages_from_compact([{"role": "robot", "content": "x"}])
