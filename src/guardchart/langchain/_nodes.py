"""The gate in a graph of your own: `guard_tool_node` runs calls, `approval_gate` asks before."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Annotated, Any, Final, Literal

from langchain_core.runnables import Runnable, RunnableConfig
from langgraph.graph import END
from langgraph.prebuilt import ToolNode
from langgraph.runtime import get_runtime
from langgraph.types import Command, Overwrite, Send, interrupt
from typing_extensions import TypedDict  # as MessagesState has it: bases must be of one kind

from guardchart.errors import AgentConfigError
from guardchart.gate._authorise import in_thread
from guardchart.langchain._door import Door, Opened, appended, turn_of
from guardchart.langchain._entry import Entry
from guardchart.langchain._turns import Asking, answered_ids, propose, spent_before

__all__ = ["ApprovalGate", "GuardState", "approval_gate", "guard_tool_node"]

_HINT: Final = "; an approval_gate before this node asks for one"


class GuardState(TypedDict, total=False):
    """What `guard_tool_node` and `approval_gate` keep in a graph's state; inherit from it.

    Example:
        >>> from langgraph.graph import MessagesState
        >>> class State(MessagesState, GuardState):
        ...     pass
        >>> sorted(State.__annotations__)
        ['messages', 'xsm', 'xsm_events']
    """

    xsm: dict[str, Any]
    xsm_events: Annotated[list[dict[str, Any]], appended]


def guard_tool_node(
    tools: Iterable[Any],
    machine: Any,
    *,
    ledger: Any = None,
    side_effects: Iterable[str] = (),
    messages_key: str = "messages",
    name: str = "tools",
    **options: Any,
) -> ToolNode:
    """Make a ``ToolNode`` whose every call passes the gate.

    It never pauses. A call that needs a person and has no approval is refused; put an
    `approval_gate` between the model and this node, with the same arguments.

    Args:
        tools: As for `StatechartMiddleware`; what is not here does not run.
        machine: The chart.
        ledger: Where approvals and claims are kept; None takes the process's own, in memory.
        side_effects: Names of tools of which a person approves each call.
        messages_key: The message channel.
        name: The node's name.
        **options: ``scope``, ``seal``, ``max_tool_calls``, ``human_timeout_s``,
            ``approval_ttl_s``, ``max_output_chars`` and ``now``, as for `StatechartMiddleware`.

    Returns:
        The node. The graph's state inherits from `GuardState`.

    Raises:
        AgentConfigError: As `StatechartMiddleware`.

    Example:
        >>> from langchain_core.tools import tool as langchain_tool
        >>> @langchain_tool
        ... def lookup(order_id: int) -> str:
        ...     "Look up an order."
        ...     return "shipped"
        >>> chart = {"id": "desk", "meta": {"tools": ["lookup"]}, "initial": "open",
        ...          "states": {"open": {}}}
        >>> sorted(guard_tool_node([lookup], chart).tools_by_name)
        ['lookup']
    """
    door = Door(
        "guard_tool_node",
        machine,
        tools,
        ledger=ledger,
        side_effects=side_effects,
        messages_key=messages_key,
        **options,
    )

    def wrap(request: Any, handler: Callable[[Any], Any]) -> Any:
        return Entry(door, door.open(request.state, request.runtime), request, _HINT).run(handler)

    async def awrap(request: Any, handler: Callable[[Any], Awaitable[Any]]) -> Any:
        opened = await door.aopen(request.state, request.runtime)
        entry = await in_thread(opened.session.ledger, lambda: Entry(door, opened, request, _HINT))
        return await entry.arun(handler)

    return ToolNode(
        list(door.tools.values()),
        name=name,
        messages_key=messages_key,
        wrap_tool_call=wrap,
        awrap_tool_call=awrap,
    )


class ApprovalGate(Runnable[Any, Any]):
    """The node between model and tools; made by `approval_gate`."""

    def __init__(self, door: Door, tool_node: str, model_node: str, end_node: str) -> None:
        self.name = "approval_gate"
        self._door = door
        self._tool_node = tool_node
        self._model_node = model_node
        self._end_node = end_node

    def invoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        """Propose the newest answer's calls, ask, and send on what may run."""
        opened = self._door.open(input, get_runtime())
        asking = self._asking(opened, input)
        if asking is None:
            return self._leave(opened)
        if asking.waits:
            asking.decide(*asking.ask(interrupt))
        return self._gone(opened, asking)

    async def ainvoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        """Do what `invoke` does, from a running loop."""
        opened = await self._door.aopen(input, get_runtime())
        ledger = opened.session.ledger
        asking = await in_thread(ledger, lambda: self._asking(opened, input))
        if asking is None:
            return self._leave(opened)
        if await in_thread(ledger, lambda: asking.waits):
            decisions, by = asking.ask(interrupt)
            await in_thread(ledger, lambda: asking.decide(decisions, by))
        return await in_thread(ledger, lambda: self._gone(opened, asking))

    def _messages(self, state: Any) -> list[Any]:
        key = self._door.messages_key
        found = state.get(key) if hasattr(state, "get") else getattr(state, key, None)
        return list(found or ())

    def _asking(self, opened: Opened, state: Any) -> Asking | None:
        messages = self._messages(state)
        message = turn_of(messages)
        done = set() if message is None else answered_ids(messages, message)
        if message is None or not {call["id"] for call in message.tool_calls} - done:
            return None
        if message.id is None:
            raise AgentConfigError("approval_gate: the message channel must use add_messages")
        if opened.message_id != message.id:
            spent = spent_before(messages, message)
            denied = dict.fromkeys(done, "")
            notes = propose(self._door, opened, message, spent=spent, denied=denied)
            opened.notes = {note["id"]: note for note in notes}
            opened.message_id = message.id
        return Asking(self._door, opened, message, done)

    def _leave(self, opened: Opened) -> Command[Any]:
        update = self._stored(opened) if opened.folded or opened.fresh else {}
        return Command(update=update, goto=self._end_node)

    def _gone(self, opened: Opened, asking: Asking) -> Command[Any]:
        settled = asking.settle()
        update = self._stored(opened)
        messages: list[Any] = [*settled.results]
        if settled.rewritten is not None:
            messages.insert(0, settled.rewritten)
        if messages:
            update[self._door.messages_key] = messages
        answer = asking.message if settled.rewritten is None else settled.rewritten
        going = [
            Send(self._tool_node, [call])
            for call in answer.tool_calls
            if call["id"] in settled.may_run
        ]
        return Command(update=update, goto=going or self._model_node)

    def _stored(self, opened: Opened) -> dict[str, Any]:
        door = self._door
        notes = list(opened.notes.values())
        update: dict[str, Any] = {door.state_key: door.written(opened, notes, opened.message_id)}
        if opened.folded:
            update[door.events_key] = Overwrite([])
        return update


def approval_gate(
    machine: Any,
    tools: Iterable[Any],
    tool_node: str = "tools",
    model_node: str = "agent",
    *,
    end_node: str = END,
    ledger: Any = None,
    side_effects: Iterable[str] = (),
    messages_key: str = "messages",
    **options: Any,
) -> ApprovalGate:
    """Make the node between a model and a `guard_tool_node`.

    It proposes the newest answer's calls, gives each refused one its result, asks by one
    ``interrupt()`` for all that need a person, and leaves by ``Send(tool_node, [call])`` for each
    that may run. A plain edge into a ToolNode would run rejected calls as well. The model is not
    called again when an answer comes.

    Args:
        machine: The chart, as for the `guard_tool_node`.
        tools: The tools, as for the `guard_tool_node`.
        tool_node: Where calls that may run go.
        model_node: Where to go when none may run.
        end_node: Where to go when the answer has no open call.
        ledger: As for the `guard_tool_node`.
        side_effects: As for the `guard_tool_node`.
        messages_key: The message channel.
        **options: As for the `guard_tool_node`; also ``positional`` and ``interrupt_payload``, as
            for `StatechartMiddleware`.

    Returns:
        The node, reached by an edge from the model. It has no edges of its own: it says where to
        go.

    Raises:
        AgentConfigError: As `StatechartMiddleware`.

    Example:
        >>> from langchain_core.tools import tool as langchain_tool
        >>> @langchain_tool
        ... def refund(order_id: int) -> str:
        ...     "Refund an order."
        ...     return "refunded"
        >>> chart = {"id": "desk", "meta": {"tools": ["refund"]}, "initial": "open",
        ...          "states": {"open": {}}}
        >>> approval_gate(chart, [refund], side_effects=["refund"]).name
        'approval_gate'
    """
    door = Door(
        "approval_gate",
        machine,
        tools,
        ledger=ledger,
        side_effects=side_effects,
        messages_key=messages_key,
        **options,
    )

    def call(self: ApprovalGate, input: Any, config: RunnableConfig | None = None) -> Any:
        return self.invoke(input, config)

    # LangGraph reads from a node's return annotation where it may go, and draws that.
    ends: Any = Literal.__getitem__((tool_node, model_node, end_node))
    call.__annotations__ = {"return": Command[ends]}
    kind = type("ApprovalGate", (ApprovalGate,), {"__call__": call, "__module__": __name__})
    made: ApprovalGate = kind(door, tool_node, model_node, end_node)
    return made
