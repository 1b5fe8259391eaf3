"""Images and files in Chat Completions messages, from objects and from their JSON."""

from __future__ import annotations

import base64
from typing import Any

import pytest
from openai.types.chat import ChatCompletionMessageParam
from pydantic import TypeAdapter

from guardchart.agents import (
    FilePart,
    ImagePart,
    TextPart,
    ToolCallPart,
    ToolResultPart,
    assistant_message,
    system_message,
    tool_message,
    user_message,
)
from guardchart.errors import AgentError, NotSupportedError
from guardchart.openai import to_openai_messages

PNG = b"\x89PNG\r\n\x1a\n" + b"\0" * 8
PNG64 = base64.b64encode(PNG).decode()
PDF64 = base64.b64encode(b"%PDF-1.7").decode()


def content(*parts: Any) -> Any:
    (message,) = to_openai_messages([user_message(list(parts))])
    TypeAdapter(ChatCompletionMessageParam).validate_python(message)
    return message["content"]


def test_a_conversation_of_parts_is_written_as_its_compact_twin() -> None:
    typed = [
        system_message("Be brief."),
        user_message("Where is order 42?"),
        assistant_message(
            [
                TextPart(text="Let me look."),
                ToolCallPart(tool_call_id="c1", tool_name="shop.lookup", input={"id": 42}),
            ]
        ),
        tool_message(
            [
                ToolResultPart(
                    tool_call_id="c1",
                    tool_name="shop.lookup",
                    output={"type": "json", "value": {"state": "shipped"}},
                )
            ]
        ),
        assistant_message("It has shipped."),
    ]
    compact = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Where is order 42?"},
        {
            "role": "assistant",
            "content": "Let me look.",
            "tool_calls": [{"id": "c1", "name": "shop.lookup", "arguments": {"id": 42}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": '{"state": "shipped"}'},
        {"role": "assistant", "content": "It has shipped."},
    ]
    expected = to_openai_messages(compact)
    assert to_openai_messages(typed) == expected
    assert to_openai_messages([each.to_json() for each in typed]) == expected
    for message in expected:
        TypeAdapter(ChatCompletionMessageParam).validate_python(message)


@pytest.mark.parametrize(
    ("part", "url"),
    [
        (ImagePart(image=PNG), f"data:image/png;base64,{PNG64}"),
        (ImagePart(image=PNG64), f"data:image/png;base64,{PNG64}"),
        (ImagePart(image=PNG64, media_type="image/webp"), f"data:image/webp;base64,{PNG64}"),
        (ImagePart(image=f"data:image/gif;base64,{PNG64}"), f"data:image/gif;base64,{PNG64}"),
        (ImagePart(image="https://example.org/cat.png"), "https://example.org/cat.png"),
        (FilePart(data=PNG, media_type="image/png"), f"data:image/png;base64,{PNG64}"),
        (FilePart(data="http://example.org/a", media_type="image/png"), "http://example.org/a"),
    ],
)
def test_images_are_urls_or_data_urls(part: Any, url: str) -> None:
    assert content(TextPart(text="What is this?"), part) == [
        {"type": "text", "text": "What is this?"},
        {"type": "image_url", "image_url": {"url": url}},
    ]


def test_options_for_openai_are_added_and_those_for_others_are_not() -> None:
    part = ImagePart(
        image=PNG, provider_options={"openai": {"detail": "low"}, "anthropic": {"x": 1}}
    )
    (image,) = content(part)
    assert image["image_url"]["detail"] == "low" and "x" not in image["image_url"]


def test_files_are_sent_as_what_the_api_has_for_them() -> None:
    pdf = FilePart(data=b"%PDF-1.7", media_type="application/pdf", filename="bill.pdf")
    wav = FilePart(data=b"RIFF", media_type="audio/wav")
    text = FilePart(data=b"aMOp", media_type="text/csv; charset=utf-8")
    text = FilePart(data=base64.b64encode("hé".encode()).decode(), media_type="text/csv;x=y")
    assert content(pdf, wav, text) == [
        {
            "type": "file",
            "file": {"filename": "bill.pdf", "file_data": f"data:application/pdf;base64,{PDF64}"},
        },
        {
            "type": "input_audio",
            "input_audio": {"data": base64.b64encode(b"RIFF").decode(), "format": "wav"},
        },
        {"type": "text", "text": "hé"},
    ]


@pytest.mark.parametrize(
    "part",
    [
        FilePart(data="https://example.org/a.pdf", media_type="application/pdf"),
        FilePart(data=b"PK", media_type="application/zip"),
        FilePart(data=b"x", media_type="audio/ogg"),
    ],
)
def test_a_file_the_api_has_no_place_for_is_refused(part: Any) -> None:
    with pytest.raises(NotSupportedError, match="OpenAI takes"):
        content(part)


@pytest.mark.parametrize(
    "image",
    ["not base64!", "file:///etc/passwd", "ftp://example.org/x", "data:image/png,plain", "AAAA"],
)
def test_what_is_no_image_is_refused_without_being_repeated(image: str) -> None:
    with pytest.raises(AgentError) as refused:
        content(ImagePart(image=image))
    assert image not in str(refused.value)


def test_text_that_is_no_utf8_is_refused() -> None:
    with pytest.raises(AgentError, match="UTF-8"):
        content(FilePart(data=b"\xff\xfe", media_type="text/plain"))


def test_a_tool_result_may_hold_text_and_no_image() -> None:
    def result(*parts: Any) -> Any:
        output = {"type": "content", "value": list(parts)}
        part = {"type": "tool-result", "toolCallId": "c", "toolName": "t", "output": output}
        return to_openai_messages([tool_message([part])])

    assert result(TextPart(text="a"), TextPart(text="b"))[0]["content"] == "a\nb"
    with pytest.raises(NotSupportedError, match="tool result"):
        result(ImagePart(image=PNG))


def test_what_a_model_made_or_a_provider_ran_cannot_be_sent_back() -> None:
    file = FilePart(data=b"x", media_type="text/plain")
    ran = {
        "type": "tool-result",
        "toolCallId": "c",
        "toolName": "t",
        "output": {"type": "text", "value": "x"},
    }
    for part in (file, ran):
        with pytest.raises(NotSupportedError, match=r"messages\[0\]"):
            to_openai_messages([assistant_message([part])])


@pytest.mark.parametrize(
    "message",
    [
        {"role": "robot", "content": "secret"},
        {"role": "user", "content": [{"type": "secret"}]},
        {"role": "user", "content": [{"type": "image"}]},
        {"role": "user", "content": 7},
        {"content": "secret"},
        "secret",
        None,
    ],
)
def test_a_malformed_message_is_named_by_its_place_alone(message: Any) -> None:
    with pytest.raises(AgentError, match=r"messages\[1\]") as refused:
        to_openai_messages([{"role": "user", "content": "hi"}, message])
    assert "secret" not in str(refused.value)
