"""Conversations in both forms, multimodal ones too."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    FunctionMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)

from guardchart.errors import AgentConfigError
from guardchart.langchain import from_langchain_messages, to_langchain_messages

CALL = {"id": "c1", "name": "lookup", "arguments": {"order_id": 42}}
TEXT: list[dict[str, Any]] = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "where is it?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "shipped", "tool_call_id": "c1", "name": "lookup"},
    {"role": "assistant", "content": "It has shipped."},
]


def test_a_conversation_survives_the_way_there_and_back() -> None:
    there = to_langchain_messages(TEXT)
    assert [type(each) for each in there] == [
        SystemMessage,
        HumanMessage,
        AIMessage,
        ToolMessage,
        AIMessage,
    ]
    assert from_langchain_messages(there) == TEXT


PARTS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (
        {"type": "image", "image": "https://example.com/a.png"},
        {"type": "image", "url": "https://example.com/a.png"},
    ),
    (
        {"type": "image", "image": "QUJD", "mediaType": "image/png"},
        {"type": "image", "base64": "QUJD", "mime_type": "image/png"},
    ),
    (
        {"type": "file", "data": "QUJD", "mediaType": "application/pdf", "filename": "a.pdf"},
        {"type": "file", "base64": "QUJD", "mime_type": "application/pdf", "filename": "a.pdf"},
    ),
    (
        {"type": "file", "data": "QUJD", "mediaType": "audio/wav"},
        {"type": "audio", "base64": "QUJD", "mime_type": "audio/wav"},
    ),
    (
        {"type": "file", "data": "https://example.com/v.mp4", "mediaType": "video/mp4"},
        {"type": "video", "url": "https://example.com/v.mp4", "mime_type": "video/mp4"},
    ),
]


@pytest.mark.parametrize(("part", "block"), PARTS, ids=lambda each: str(each["type"]))
def test_images_files_audio_and_video_convert_both_ways(
    part: dict[str, Any], block: dict[str, Any]
) -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "look: "}, part]}
    (made,) = to_langchain_messages([message])
    assert made.content == [{"type": "text", "text": "look: "}, block]
    assert from_langchain_messages([made]) == [message]


def test_bytes_and_data_urls_become_base64() -> None:
    content = [
        {"type": "image", "image": b"ABC", "mediaType": "image/png"},
        {"type": "image", "image": "data:image/jpeg;base64,QUJD"},
    ]
    (made,) = to_langchain_messages([{"role": "user", "content": content}])
    assert made.content == [
        {"type": "image", "base64": "QUJD", "mime_type": "image/png"},
        {"type": "image", "base64": "QUJD", "mime_type": "image/jpeg"},
    ]


def test_a_providers_own_image_block_is_read_like_the_standard_one() -> None:
    url = "data:image/png;base64,QUJD"
    message = HumanMessage([{"type": "image_url", "image_url": {"url": url}}])
    (made,) = from_langchain_messages([message])
    assert made["content"] == [{"type": "image", "image": "QUJD", "mediaType": "image/png"}]


def test_reasoning_is_left_out_and_an_unknown_block_is_named() -> None:
    message = AIMessage(
        [
            {"type": "reasoning", "reasoning": "hm"},
            {"type": "text", "text": "yes"},
            {"type": "non_standard", "value": {"secret": 1}},
        ]
    )
    (made,) = from_langchain_messages([message])
    assert made["content"] == [
        {"type": "text", "text": "yes"},
        {"type": "text", "text": "[attachment]"},
    ]


def test_a_typed_conversation_with_calls_and_results_converts() -> None:
    typed = [
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "let me see"},
                {"type": "tool-call", "toolCallId": "c1", "toolName": "lookup", "input": {"n": 1}},
            ],
        },
        {
            "role": "tool",
            "content": [
                {
                    "type": "tool-result",
                    "toolCallId": "c1",
                    "toolName": "lookup",
                    "output": {"type": "json", "value": {"ok": True}},
                },
                {
                    "type": "tool-result",
                    "tool_call_id": "c2",
                    "tool_name": "lookup",
                    "output": {"type": "error-text", "value": "no"},
                },
            ],
        },
    ]
    assistant, first, second = to_langchain_messages(typed)
    assert isinstance(assistant, AIMessage) and assistant.tool_calls[0]["args"] == {"n": 1}
    assert isinstance(first, ToolMessage) and first.content == '{"ok": true}'
    assert isinstance(second, ToolMessage) and (second.status, second.tool_call_id) == (
        "error",
        "c2",
    )


def test_a_result_with_an_image_keeps_it() -> None:
    output = {"type": "content", "value": [{"type": "image", "image": "https://e.com/a.png"}]}
    part = {"type": "tool-result", "toolCallId": "c1", "toolName": "draw", "output": output}
    (made,) = to_langchain_messages([{"role": "tool", "content": [part]}])
    assert made.content == [{"type": "image", "url": "https://e.com/a.png"}]


def test_arguments_that_were_no_json_object_stay_a_call_that_can_be_answered() -> None:
    call = {"id": "c1", "name": "lookup", "arguments": {"__unparseable__": "{oops"}}
    (made,) = to_langchain_messages([{"role": "assistant", "content": None, "tool_calls": [call]}])
    assert isinstance(made, AIMessage)
    assert made.tool_calls[0]["args"] == {"__unparseable__": "{oops"}


@pytest.mark.parametrize(
    "message",
    [
        {"role": "robot", "content": "x"},
        {"role": "user", "content": [{"type": "hologram", "SECRET": 1}]},
        {"role": "user", "content": [{"type": "image"}]},
        {"role": "tool", "content": [{"type": "text", "text": "SECRET"}]},
        {"role": "user", "content": [7]},
        7,
    ],
)
def test_a_malformed_message_is_refused_without_its_values(message: Any) -> None:
    with pytest.raises(AgentConfigError) as caught:
        to_langchain_messages([message])
    assert "SECRET" not in str(caught.value)


@pytest.mark.parametrize("message", [FunctionMessage(content="x", name="f"), object()])
def test_what_has_no_place_in_a_conversation_is_refused(message: Any) -> None:
    with pytest.raises(AgentConfigError):
        from_langchain_messages([message])


def test_what_langchain_converts_itself_is_taken() -> None:
    given: list[Any] = [("user", "hi"), {"role": "assistant", "content": "hello"}]
    assert [each["role"] for each in from_langchain_messages(given)] == ["user", "assistant"]
    assert all(isinstance(each, BaseMessage) for each in to_langchain_messages(TEXT))
