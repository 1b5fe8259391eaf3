"""LangChain tools in a guardchart registry: one schema, the same checks, the tool's own body.

What a model may send is the tool's schema without its injected arguments, checked strictly.
What LangChain or LangGraph injects (the call's id, config, state, store, runtime) is injected by
them, from the run the call is part of, and is refused where a model sends it.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import typing
from collections.abc import Mapping
from typing import Annotated, Any, Final

import pydantic
from langchain_core.messages import ToolMessage
from langchain_core.tools import (
    BaseTool,
    InjectedToolArg,
    InjectedToolCallId,
    StructuredTool,
    ToolException,
)
from langchain_core.tools import Tool as SingleInputTool
from langchain_core.tools.base import _DirectlyInjectedToolArg, get_all_basemodel_annotations

from guardchart.errors import AgentConfigError
from guardchart.gate import IdempotencyKey, Tool
from guardchart.gate._arguments import ArgumentsRefused
from guardchart.gate._schema import DocumentShape, Shape, model_shape
from guardchart.langchain._messages import text_of_blocks

__all__ = [
    "ToolFailedError",
    "as_tool",
    "injected_arguments",
    "messages_in",
    "shown_of",
    "tool_of",
    "tool_text",
]

# What a BaseTool passes by itself; no model sees these either.
_CONFIG: Final = frozenset({"callbacks", "run_manager", "config"})
_NO_RUNTIME: Final = (
    "it asks for LangGraph's state, store or runtime, and is called outside of a graph; run the "
    "loop in a LangGraph node (statechart_node)"
)


class ToolFailedError(ToolException):
    """A LangChain tool reported a failure as a message instead of raising it."""


class _Arguments:
    """A tool's arguments: strict, and without what is injected."""

    def __init__(self, inner: Shape, injected: frozenset[str]) -> None:
        self._inner = inner
        self._injected = injected
        self.parameters = inner.parameters
        self.args_model = inner.args_model

    def load(self, arguments: dict[str, Any], raw: bytes) -> tuple[dict[str, Any], str]:
        """Validate admitted arguments; see `Shape`.

        Raises:
            ArgumentsRefused: the schema does not hold, or an injected argument was sent.
        """
        if not self._injected.isdisjoint(arguments):
            raise ArgumentsRefused("*: Extra inputs are not permitted")
        return self._inner.load(arguments, raw)

    def bind(self, text: str, key: str, call_id: str = "") -> tuple[list[Any], dict[str, Any]]:
        """Return what `_Body` is called with: arguments as JSON values, key, the call's id."""
        return [json.loads(text), key, call_id], {}


class _Body:
    """Runs a LangChain tool as LangChain would, within the run that is current."""

    def __init__(self, tool: BaseTool, injected: Mapping[str, str]) -> None:
        self.__name__ = tool.name
        self.tool = tool
        self._keys = [name for name, kind in injected.items() if kind == "key"]
        self._node: Any = None
        if "graph" in injected.values():
            from langgraph.prebuilt import ToolNode

            self._node = ToolNode([tool], handle_tool_errors=False)
        self.is_async, self.is_sync = _forms(tool)

    def __call__(self, arguments: dict[str, Any], key: str, call_id: str) -> Any:
        args = {**arguments, **{name: IdempotencyKey(key) for name in self._keys}}
        call = {"type": "tool_call", "name": self.tool.name, "args": args, "id": call_id}
        if not self.is_sync or (self.is_async and _in_loop()):
            return self._arun(call)
        return _told(self.tool.invoke(call) if self._node is None else self._node_run(call))

    async def _arun(self, call: dict[str, Any]) -> Any:
        if self._node is None:
            return _told(await self.tool.ainvoke(call))
        _need_graph()
        return _told(_of_node(await self._node.ainvoke([call])))

    def _node_run(self, call: dict[str, Any]) -> Any:
        _need_graph()
        return _of_node(self._node.invoke([call]))


def _in_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _need_graph() -> None:
    from langgraph.runtime import get_runtime

    try:
        get_runtime()
    except (RuntimeError, KeyError):
        raise AgentConfigError(_NO_RUNTIME) from None


def _of_node(answer: Any) -> Any:
    """What one call of a ToolNode gave: its message, or what else the tool returned."""
    messages = answer.get("messages") if isinstance(answer, Mapping) else None
    return messages[0] if messages and len(messages) == 1 else answer


def _forms(tool: BaseTool) -> tuple[bool, bool]:
    """Whether a tool has a native async form, and whether it has a sync one."""
    if isinstance(tool, StructuredTool | SingleInputTool):
        return tool.coroutine is not None, tool.func is not None
    kind = type(tool)
    return kind._arun is not BaseTool._arun, kind._run is not BaseTool._run


def tool_text(message: ToolMessage) -> str:
    """Return the text of a tool's result; images and files are named.

    Example:
        >>> tool_text(ToolMessage("shipped", tool_call_id="c1"))
        'shipped'
    """
    content = message.content
    return content if isinstance(content, str) else text_of_blocks(content)


def _told(result: Any) -> Any:
    """What the conversation is told of a tool's result.

    Raises:
        ToolFailedError: the tool says that it failed.
    """
    if isinstance(result, ToolMessage):
        text = tool_text(result)
        if result.status == "error":
            raise ToolFailedError(text)
        return text
    found = [each for each in messages_in(result) if isinstance(each, ToolMessage)]
    if not found:
        return "done; it returned no message, and what else it returned was not applied"
    return "".join(tool_text(each) for each in found)


def messages_in(result: Any, key: str = "messages") -> list[Any]:
    """Return the messages of a result: a message, a Command, or a list of them."""
    if isinstance(result, list | tuple):
        return [message for each in result for message in messages_in(each, key)]
    if isinstance(result, ToolMessage):
        return [result]
    update = result if isinstance(result, Mapping) else getattr(result, "update", None)
    if isinstance(update, Mapping):
        update = update.get(key)
    return list(update) if isinstance(update, list | tuple) else []


def shown_of(result: Any) -> Any:
    """Return the text of a result that is a text only, another result as it is.

    A text is shown without anybody's code, so an async gate needs no thread for it.
    """
    plain = type(result) is ToolMessage and type(result.content) is str
    return result.content if plain else result


# The schema


def injected_arguments(tool: BaseTool) -> dict[str, str]:
    """Return the arguments of a tool that no model may send, and who injects each.

    Returns:
        Name to ``"call_id"`` (LangChain), ``"graph"`` (LangGraph), ``"key"`` (the gate: an
        `IdempotencyKey`), ``"default"`` (nobody: its default holds) or ``"nobody"``.
    """
    hints = _hints(tool)
    schema = tool.args_schema
    fields: Mapping[str, Any] = {}
    if isinstance(schema, type) and issubclass(schema, pydantic.BaseModel):
        fields = schema.model_fields
        hints |= get_all_basemodel_annotations(schema)
    found = {name: kind for name, hint in hints.items() if (kind := _kind(hint)) is not None}
    for name, kind in found.items():
        if kind == "plain":
            field = fields.get(name)
            optional = field is not None and not field.is_required()
            found[name] = "default" if optional or _has_default(tool, name) else "nobody"
    return found


def _functions(tool: BaseTool) -> list[Any]:
    own = [getattr(tool, "func", None), getattr(tool, "coroutine", None)]
    return [each for each in own if each is not None] or [tool._run, tool._arun]


def _hints(tool: BaseTool) -> dict[str, Any]:
    hints: dict[str, Any] = {}
    for function in _functions(tool):
        try:
            hints |= typing.get_type_hints(function, include_extras=True)
        except Exception:  # names that only a type checker can resolve: the schema has them
            continue
    hints.pop("return", None)
    return hints


def _has_default(tool: BaseTool, name: str) -> bool:
    for function in _functions(tool):
        parameter = inspect.signature(function).parameters.get(name)
        if parameter is not None:
            return parameter.default is not parameter.empty
    return False


def _kind(hint: Any) -> str | None:
    marks = typing.get_args(hint)[1:] if typing.get_origin(hint) is Annotated else ()
    bare = typing.get_args(hint)[0] if marks else hint
    bare = typing.get_origin(bare) or bare
    if isinstance(bare, type) and issubclass(bare, IdempotencyKey):
        return "key"
    kinds = [mark if isinstance(mark, type) else type(mark) for mark in marks]
    kinds = [kind for kind in kinds if issubclass(kind, InjectedToolArg)]
    if isinstance(bare, type) and issubclass(bare, InjectedToolArg | _DirectlyInjectedToolArg):
        kinds.append(bare)
    if not kinds:
        return None
    if any(issubclass(kind, InjectedToolCallId) for kind in kinds):
        return "call_id"
    if any(kind.__module__.partition(".")[0] == "langgraph" for kind in kinds):
        return "graph"
    return "plain"


def _shape(tool: BaseTool, name: str) -> Shape:
    schema: Any = tool.args_schema
    if schema is None and isinstance(tool, SingleInputTool):
        # What LangChain itself tells a model of a tool that takes one text.
        schema = pydantic.create_model(name, arg=(str, pydantic.Field(alias="__arg1")))
    elif not isinstance(schema, Mapping):
        schema = tool.tool_call_schema
    if isinstance(schema, Mapping):
        return DocumentShape(name, schema)
    if not (isinstance(schema, type) and issubclass(schema, pydantic.BaseModel)):
        raise AgentConfigError(
            f"tool {name!r}: its args_schema is not a pydantic 2 model; give it one, or a JSON "
            "Schema"
        )
    own = tool.args_schema
    if (
        isinstance(own, type)
        and issubclass(own, pydantic.BaseModel)
        and set(own.model_fields) == set(schema.model_fields)
    ):
        schema = own  # nothing is injected: its own validators see the arguments, too
    return model_shape(schema, name)


def as_tool(
    item: BaseTool,
    *,
    timeout_s: float | None = None,
    side_effect: bool | None = None,
    name: str | None = None,
    description: str | None = None,
    trusted: bool = False,
    sequential: bool = False,
    requires_approval: bool = False,
    bounded: bool = False,
) -> Tool:
    """Return a LangChain tool as a `Tool`; `tool` and `tool_registry` call this.

    Args:
        item: The tool. ``metadata={"side_effect": True}`` makes it a side effect where nothing
            else is said; a server's ``readOnlyHint`` counts for nothing.
        timeout_s: Seconds the body may take; None takes the registry's.
        side_effect: True asks a human for each call; None takes metadata's, then the registry's.
        name: None takes the tool's own; another name is for one whose own is taken.
        description: None takes the tool's own.
        trusted: True lets its results count as trusted sources for rules.
        sequential: True never runs it beside another call of the same turn.
        requires_approval: True asks a human though it changes nothing.
        bounded: True says that the body ends within ``timeout_s`` by itself. A synchronous host
            then calls it in its own thread, and nobody stops waiting for it.

    Returns:
        The tool. Its body is ``invoke`` or ``ainvoke``, with the config of the current run.

    Raises:
        AgentConfigError: Its schema cannot be checked, or an injected argument has no source.
        MissingExtraError: It is known by a JSON Schema, and ``jsonschema`` is not installed.
    """
    item = getattr(item, "guardchart_inner", item)
    label = item.name if name is None else name
    injected = injected_arguments(item)
    for argument, kind in injected.items():
        if kind == "nobody":
            raise AgentConfigError(
                f"tool {label!r}: nobody injects {argument!r}; give it a default, or take it "
                "from ToolRuntime, InjectedState or the config"
            )
    if side_effect is None and (item.metadata or {}).get("side_effect") is True:
        side_effect = True
    body = _Body(item, injected)
    names = frozenset(injected) | getattr(item, "_injected_args_keys", frozenset())
    if isinstance(item.args_schema, Mapping):
        names |= _CONFIG - item.args_schema.get("properties", {}).keys()
    made = Tool(
        label,
        body,
        _Arguments(_shape(item, label), names),
        description=item.description if description is None else description,
        timeout_s=timeout_s,
        side_effect=side_effect,
        trusted=trusted,
        sequential=sequential,
        requires_approval=requires_approval,
        bounded=bounded,
    )
    made.is_async = body.is_async
    return made


def tool_of(made: Tool) -> BaseTool | None:
    """Return the LangChain tool that a `Tool` was made of, None for one of another kind."""
    return made.fn.tool if isinstance(made.fn, _Body) else None
