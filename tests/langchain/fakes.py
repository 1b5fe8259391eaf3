"""Chat models that play a script, and what they were sent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable
from pydantic import PrivateAttr


class Scripted(BaseChatModel):
    """Plays AIMessages in order; streams text word by word; notes tools and messages."""

    script: list[Any]
    _next: int = PrivateAttr(default=0)
    _asked: list[list[BaseMessage]] = PrivateAttr(default_factory=list)
    _tools: list[list[str]] = PrivateAttr(default_factory=list)

    @property
    def asked(self) -> list[list[BaseMessage]]:
        return self._asked

    @property
    def told(self) -> list[list[str]]:
        """Names of the tools of each bind, in order."""
        return self._tools

    @property
    def _llm_type(self) -> str:
        return "scripted"

    def bind_tools(self, tools: Sequence[Any], **kwargs: Any) -> Runnable[Any, Any]:
        names = []
        for each in tools:
            if isinstance(each, dict):
                function = each.get("function", each)
                names.append(function.get("name") or each.get("type"))
            else:
                names.append(getattr(each, "name", getattr(each, "__name__", "?")))
        self._tools.append(names)
        return self.bind(tools=names, **kwargs)

    def _take(self, messages: list[BaseMessage]) -> AIMessage:
        self._asked.append(list(messages))
        item = self.script[self._next]
        self._next += 1
        if isinstance(item, BaseException):
            raise item
        if callable(item):
            item = item(messages)
        if isinstance(item, str):
            item = AIMessage(item)
        message: AIMessage = item.model_copy(deep=True)
        return message

    def _generate(
        self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any
    ) -> Any:
        return ChatResult(generations=[ChatGeneration(message=self._take(messages))])

    def _stream(
        self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any
    ) -> Iterator[ChatGenerationChunk]:
        message = self._take(messages)
        words = str(message.text).split(" ") if message.text else [""]
        for index, word in enumerate(words):
            text = word if index == 0 else f" {word}"
            last = index == len(words) - 1
            chunk = AIMessageChunk(
                content=text,
                id=message.id,
                tool_call_chunks=[
                    {
                        "name": c["name"],
                        "args": _json(c["args"]),
                        "id": c["id"],
                        "index": i,
                        "type": "tool_call_chunk",
                    }
                    for i, c in enumerate(message.tool_calls)
                ]
                if last
                else [],
                usage_metadata=message.usage_metadata if last else None,
                response_metadata=message.response_metadata if last else {},
            )
            made = ChatGenerationChunk(message=chunk)
            if run_manager is not None:
                run_manager.on_llm_new_token(text, chunk=made)
            yield made


def _json(value: Any) -> str:
    import json

    return json.dumps(value)


def call(name: str, id: str = "c1", /, **args: Any) -> dict[str, Any]:
    return {"name": name, "args": args, "id": id, "type": "tool_call"}


def says(*calls: dict[str, Any], text: str = "", **more: Any) -> AIMessage:
    """An answer that proposes calls."""
    return AIMessage(content=text, tool_calls=list(calls), **more)
