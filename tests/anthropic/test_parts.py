"""Images and files in Messages API turns, from objects and from their JSON."""

from __future__ import annotations

import base64
from typing import Any

import pytest
from anthropic.types import MessageParam
from pydantic import TypeAdapter

from guardchart.agents import (
    FilePart,
    ImagePart,
    TextPart,
    ToolCallPart,
    assistant_message,
    system_message,
    tool_message,
    user_message,
)
from guardchart.anthropic import to_anthropic_messages
from guardchart.errors import AgentError, NotSupportedError

PNG = b"\x89PNG\r\n\x1a\n" + b"\0" * 8
PNG64 = base64.b64encode(PNG).decode()


def turns(*messages: Any) -> Any:
    _, written = to_anthropic_messages(messages)
    for each in written:
        TypeAdapter(MessageParam).validate_python(each)
    return written


def blocks(*parts: Any) -> Any:
    (turn,) = turns(user_message(list(parts)))
    return turn["content"]


def result(output: Any, id_: str = "c1") -> Any:
    return {"type": "tool-result", "toolCallId": id_, "toolName": "t", "output": output}


def test_a_conversation_of_parts_is_written_as_its_compact_twin() -> None:
    typed = [
        system_message("Be brief."),
        user_message("Where?"),
        assistant_message([ToolCallPart(tool_call_id="c1", tool_name="a.b", input={"id": 42})]),
        tool_message([result({"type": "text", "value": "shipped"})]),
    ]
    compact = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Where?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c1", "name": "a.b", "arguments": {"id": 42}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "shipped"},
    ]
    assert to_anthropic_messages(typed) == to_anthropic_messages(compact)
    assert to_anthropic_messages([each.to_json() for each in typed]) == to_anthropic_messages(
        compact
    )


@pytest.mark.parametrize(
    ("part", "source"),
    [
        (
            ImagePart(image=PNG),
            {"type": "base64", "media_type": "image/png", "data": PNG64},
        ),
        (
            ImagePart(image=f"data:image/webp;base64,{PNG64}"),
            {"type": "base64", "media_type": "image/webp", "data": PNG64},
        ),
        (
            ImagePart(image="https://example.org/cat.png"),
            {"type": "url", "url": "https://example.org/cat.png"},
        ),
        (
            FilePart(data=PNG, media_type="image/png"),
            {"type": "base64", "media_type": "image/png", "data": PNG64},
        ),
    ],
)
def test_images_are_base64_or_urls(part: Any, source: Any) -> None:
    assert blocks(TextPart(text="See."), part) == [
        {"type": "text", "text": "See."},
        {"type": "image", "source": source},
    ]


def test_pdf_and_text_files_are_documents() -> None:
    pdf = FilePart(data=b"%PDF", media_type="application/pdf", filename="bill.pdf")
    far = FilePart(data="https://example.org/b.pdf", media_type="application/pdf")
    text = FilePart(data="hé".encode(), media_type="text/plain")
    assert blocks(pdf, far, text) == [
        {
            "type": "document",
            "source": {
                "type": "base64",
                "media_type": "application/pdf",
                "data": base64.b64encode(b"%PDF").decode(),
            },
            "title": "bill.pdf",
        },
        {"type": "document", "source": {"type": "url", "url": "https://example.org/b.pdf"}},
        {
            "type": "document",
            "source": {"type": "text", "media_type": "text/plain", "data": "hé"},
        },
    ]


@pytest.mark.parametrize(
    "part",
    [
        FilePart(data=b"PK", media_type="application/zip"),
        FilePart(data="https://example.org/a.txt", media_type="text/plain"),
        ImagePart(image=PNG, media_type="image/tiff"),
    ],
)
def test_what_the_api_has_no_place_for_is_refused(part: Any) -> None:
    with pytest.raises(NotSupportedError, match="Anthropic takes"):
        blocks(part)


def test_results_may_hold_images_and_say_that_a_tool_failed() -> None:
    seen = result({"type": "content", "value": [TextPart(text="a cat"), ImagePart(image=PNG)]})
    failed = result({"type": "error-json", "value": {"code": 404}}, "c2")
    asked = assistant_message(
        [ToolCallPart(tool_call_id=each, tool_name="t", input={}) for each in ("c1", "c2")]
    )
    _, turn = turns(asked, tool_message([seen, failed]))
    assert [each["type"] for each in turn["content"]] == ["tool_result", "tool_result"]
    assert [each["type"] for each in turn["content"][0]["content"]] == ["text", "image"]
    assert turn["content"][1] == {
        "type": "tool_result",
        "tool_use_id": "c2",
        "content": '{"code": 404}',
        "is_error": True,
    }


def test_cache_control_stands_on_the_part_or_on_the_last_block_of_its_message() -> None:
    cached = {"anthropic": {"cache_control": {"type": "ephemeral"}}}
    (first,) = blocks(TextPart(text="long", provider_options=cached))
    assert first["cache_control"] == {"type": "ephemeral"}
    message = user_message([TextPart(text="a"), TextPart(text="b")], provider_options=cached)
    (turn,) = turns(message)
    assert ["cache_control" in each for each in turn["content"]] == [False, True]


def test_results_come_before_images_of_the_same_turn() -> None:
    asked = assistant_message([ToolCallPart(tool_call_id="c1", tool_name="t", input={})])
    _, turn = turns(
        asked,
        user_message([ImagePart(image=PNG), TextPart(text="and this")]),
        tool_message([result({"type": "text", "value": "ok"})]),
    )
    assert [each["type"] for each in turn["content"]] == ["tool_result", "image", "text"]


@pytest.mark.parametrize("message", [{"role": "user", "content": [{"type": "secret"}]}, 7])
def test_a_malformed_message_is_named_by_its_place_alone(message: Any) -> None:
    with pytest.raises(AgentError, match=r"messages\[0\]") as refused:
        to_anthropic_messages([message])
    assert "secret" not in str(refused.value)
