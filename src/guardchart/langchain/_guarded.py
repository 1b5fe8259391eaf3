"""`guard_tool`: one tool behind the gate, wherever it is called from."""

from __future__ import annotations

import functools
import uuid
from collections.abc import Callable, Mapping
from typing import Any, Final

from langchain_core.messages import ToolMessage
from langchain_core.tools import BaseTool
from pydantic import ConfigDict, PrivateAttr
from pydantic_core import to_jsonable_python

from guardchart.errors import AgentConfigError, ToolDeniedError
from guardchart.gate import GuardSession, Outcome, ToolCall
from guardchart.gate._run import render
from guardchart.langchain._door import CURRENT
from guardchart.langchain._tools import (
    ToolFailedError,
    injected_arguments,
    messages_in,
    shown_of,
    tool_text,
)

__all__ = ["GuardedTool", "guard_tool"]

Sessions = Callable[[Any], GuardSession]
_COPIED: Final = (
    *("name", "description", "args_schema", "return_direct", "verbose", "tags", "metadata"),
    *("handle_tool_error", "handle_validation_error", "response_format", "extras"),
)


class GuardedTool(BaseTool):
    """A tool behind the gate; made by `guard_tool`. Schema and injection are the tool's own."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    guardchart_inner: BaseTool
    _session: Any = PrivateAttr(default=None)
    _injected: frozenset[str] = PrivateAttr(default=frozenset())

    @property
    def func(self) -> Any:
        """The function behind the tool: LangGraph reads from it what to inject."""
        return getattr(self.guardchart_inner, "func", None)

    @property
    def coroutine(self) -> Any:
        """The async function behind the tool."""
        return getattr(self.guardchart_inner, "coroutine", None)

    @functools.cached_property
    def _injected_args_keys(self) -> frozenset[str]:
        return self.guardchart_inner._injected_args_keys

    def get_input_schema(self, config: Any = None) -> Any:
        """Return the tool's own schema."""
        return self.guardchart_inner.get_input_schema(config)

    def run(self, tool_input: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the tool if the gate lets this call through.

        Raises:
            ToolDeniedError: It does not, and was called without a call's id, so that there is
                no message to tell it by. Nothing ran.
        """
        call, injected = self._call(tool_input, kwargs)
        current = CURRENT.get()
        if current is not None and current.passes(self, call.arguments):
            return self.guardchart_inner.run(tool_input, *args, **kwargs)
        session = self._find(current, kwargs)
        held: list[Any] = []

        def body(arguments: dict[str, Any]) -> Any:
            given = {**arguments, **injected}
            return _kept(held, self.guardchart_inner.run(given, *args, **kwargs))

        self._known(session, call)
        outcome = session.run(call, body=body, as_text=_as_text(session))
        return self._told(outcome, held, kwargs)

    async def arun(self, tool_input: Any, *args: Any, **kwargs: Any) -> Any:
        """Do what `run` does, from a running loop."""
        call, injected = self._call(tool_input, kwargs)
        current = CURRENT.get()
        if current is not None and current.passes(self, call.arguments):
            return await self.guardchart_inner.arun(tool_input, *args, **kwargs)
        session = self._find(current, kwargs)
        held: list[Any] = []

        async def body(arguments: dict[str, Any]) -> Any:
            given = {**arguments, **injected}
            return _kept(held, await self.guardchart_inner.arun(given, *args, **kwargs))

        self._known(session, call)
        outcome = await session.arun(call, body=body, as_text=_as_text(session))
        return self._told(outcome, held, kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        raise ToolDeniedError(self.name, "its body is entered by the gate alone")

    def _call(self, tool_input: Any, options: Mapping[str, Any]) -> tuple[ToolCall, dict[str, Any]]:
        given = tool_input if isinstance(tool_input, Mapping) else {"__arg1": tool_input}
        injected = {key: value for key, value in given.items() if key in self._injected}
        rest = {key: value for key, value in given.items() if key not in self._injected}
        try:
            arguments = to_jsonable_python(rest)
        except Exception:  # the gate refuses what is no JSON
            arguments = rest
        ident = options.get("tool_call_id") or f"nested-{uuid.uuid4().hex}"
        return ToolCall(ident, self.name, arguments), injected

    def _find(self, current: Any, options: Mapping[str, Any]) -> GuardSession:
        session = self._session
        if callable(session) and not isinstance(session, GuardSession):
            session = session(options.get("config"))
        if session is None and current is not None:
            session = current.session
        if not isinstance(session, GuardSession):
            raise ToolDeniedError(self.name, "it was called outside of every door of the gate")
        return session

    def _known(self, session: GuardSession, call: ToolCall) -> None:
        if self.name not in session.registry:
            raise AgentConfigError(
                f"guard_tool: {self.name!r} is not in the registry of its session; register it "
                "there, and list it in the states that may call it"
            )

    def _told(self, outcome: Outcome, held: list[Any], options: Mapping[str, Any]) -> Any:
        ident = options.get("tool_call_id")
        if outcome.entered and held:
            result = held[0]
            if isinstance(result, ToolMessage) and isinstance(result.content, str):
                return result.model_copy(update={"content": outcome.text})
            return outcome.text if isinstance(result, str) else result
        if ident is not None:
            status = "success" if outcome.ok else "error"
            return ToolMessage(outcome.text, name=self.name, tool_call_id=ident, status=status)
        if outcome.ok:
            return outcome.text
        if isinstance(outcome.error, Exception):
            raise outcome.error
        raise ToolDeniedError(self.name, outcome.text)


def _kept(held: list[Any], result: Any) -> Any:
    held.append(result)
    for message in messages_in(result):
        if isinstance(message, ToolMessage) and message.status == "error":
            raise ToolFailedError(tool_text(message))
    return shown_of(result)


def _as_text(session: GuardSession) -> Callable[[Any], str]:
    def as_text(value: Any) -> str:
        texts = [tool_text(each) for each in messages_in(value) if isinstance(each, ToolMessage)]
        return render("".join(texts) if texts else value, session.registry.max_output_chars)

    return as_text


def guard_tool(tool: BaseTool, session: GuardSession | Sessions | None = None) -> GuardedTool:
    """Put one LangChain tool behind the gate, wherever it is called from.

    For tools that are called from within tools, from nodes of your own, or by a framework that
    has no door here. The wrapped tool keeps name, schema and injected arguments.

    Args:
        tool: Any ``BaseTool``.
        session: The conversation's `GuardSession`, or ``(config) -> GuardSession``. None takes
            the session of the door through which the running call came: of `StatechartMiddleware`
            or `guard_tool_node`; outside of one every call is refused.

    Returns:
        The wrapped tool. A refused call gives an error message where it was called with a call's
        id, as ToolNode does, and raises `ToolDeniedError` where it was not. A call that was let
        through by the door around it is not judged twice.

    Raises:
        AgentConfigError: Not a tool, or wrapped already.

    Example:
        >>> from langchain_core.tools import tool as langchain_tool
        >>> from guardchart.gate import tool_registry
        >>> from guardchart.kernel import create_machine
        >>> @langchain_tool
        ... def lookup(order_id: int) -> str:
        ...     "Look up an order."
        ...     return f"order {order_id}: shipped"
        >>> chart = {"id": "desk", "initial": "open", "states": {
        ...     "open": {"meta": {"tools": ["lookup"]}, "on": {"CLOSE": "closed"}}, "closed": {}}}
        >>> session = GuardSession(create_machine(chart), tool_registry(lookup))
        >>> guarded = guard_tool(lookup, session)
        >>> guarded.invoke({"order_id": 7})
        'order 7: shipped'
        >>> _ = session.send("CLOSE")
        >>> guarded.invoke({"order_id": 7})
        Traceback (most recent call last):
            ...
        guardchart.errors.ToolDeniedError: tool 'lookup' denied: not in this state's meta.tools \
allow-list
    """
    if not isinstance(tool, BaseTool):
        raise AgentConfigError(
            f"guard_tool: {type(tool).__name__} is not a LangChain tool; decorate it with @tool"
        )
    if isinstance(tool, GuardedTool):
        raise AgentConfigError(f"guard_tool: {tool.name!r} is guarded already")
    made = GuardedTool(guardchart_inner=tool, **{field: getattr(tool, field) for field in _COPIED})
    made._session = session
    made._injected = frozenset(injected_arguments(tool)) | tool._injected_args_keys
    return made
