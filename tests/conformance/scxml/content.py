"""Executable content: what happens on entry, on exit and on a transition."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from guardchart.kernel import DoneEvent, Event, InitEvent
from tests.conformance.scxml.datamodels import Model, ModelError
from tests.conformance.scxml.values import Node, Record

PROCESSOR = "http://www.w3.org/TR/scxml/#SCXMLEventProcessor"
PROCESSORS = ("", "scxml", PROCESSOR)
SESSION = "#_scxml_"


class ContentError(ModelError):
    """A construct cannot be carried out."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(reason)
        self.name = name


class Session:
    """What one run of a document keeps outside its variables.

    ``path`` is its interpreter's, and its address; ``pending`` holds errors met by conditions
    and by arguments of an invoke, where nothing can be raised yet.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.pending: list[Event] = []
        self.sends = 0

    @property
    def invoke_id(self) -> str | None:
        return self.path.rpartition(":")[2] if ":" in self.path else None

    def __deepcopy__(self, memo: dict[int, Any]) -> Session:
        return self


def made(name: str, kind: str, **fields: Any) -> Event:
    """An event as a document sends it; fields that are None are left out."""
    present = {key: value for key, value in fields.items() if value is not None}
    return Event(name, {"kind": kind, **present})


def error_event(error: ModelError, node: Node | None) -> Event:
    """The event an error becomes; ``node`` is where it was met unless the error knows better."""
    node = error.node or node
    place: dict[str, Any] = {"reason": str(error)}
    if node is not None:
        place |= {"tagname": node.tag, "line": node.line, "column": node.column}
    return made(error.name, "platform", sendid=error.sendid, data=Record(place))


def seen(event: Event, absent: Any) -> Any:
    """The system variable ``_event``."""
    if isinstance(event, InitEvent):
        return absent
    fields = dict(event.payload)
    name = name_of(event)
    if isinstance(event, DoneEvent):
        fields = {"kind": "platform", "data": event.data}
        if event.invoke_id is not None:
            fields |= {"kind": "external", "invokeid": event.invoke_id}
        if fields["data"] is None:
            del fields["data"]
    return Record(
        name=name,
        type=fields.get("kind", "external"),
        **{
            key: fields.get(key, absent)
            for key in ("sendid", "origin", "origintype", "invokeid", "data")
        },
    )


def name_of(event: Event) -> str:
    """The name under which a document knows the event."""
    name = event.type
    for ours, theirs in (
        ("xstate.done.state.", "done.state."),
        ("xstate.done.actor.", "done.invoke."),
    ):
        if name.startswith(ours):
            return theirs + name.removeprefix(ours)
    return name


class Frame:
    """Content being executed: for one session, one event, with one action's scope.

    ``scope`` is None in ``finalize``, which may only compute.
    """

    def __init__(self, document: Any, variables: Any, event: Event, scope: Any = None) -> None:
        self.document = document
        self.session: Session = variables["_session"]
        self.scope = scope
        self.model: Model = document.model(variables, event)
        self.model.system["In"] = variables.get("_active", ()).__contains__

    def block(self, nodes: Iterable[Node]) -> None:
        """Execute a block; an error ends it and is raised as an event."""
        self.flush()
        try:
            for node in nodes:
                self.execute(node)
        except ModelError as error:
            if self.scope is not None:
                self.scope.raise_(error_event(error, None))

    def flush(self) -> None:
        """Raise what is pending, so that it comes before what the block raises."""
        while self.scope is not None and self.session.pending:
            self.scope.raise_(self.session.pending.pop(0))

    def execute(self, node: Node) -> None:
        try:
            getattr(self, "_" + node.tag)(node)
        except ModelError as error:
            error.node = error.node or node
            raise

    # Elements

    def _raise(self, node: Node) -> None:
        self.scope.raise_(made(node.get("event"), "internal"))

    def _log(self, node: Node) -> None:
        if node.get("expr"):
            self.model.evaluate(node.get("expr"))

    def _script(self, node: Node) -> None:
        self.model.execute(self.document.script(node))

    def _assign(self, node: Node) -> None:
        expr = node.get("expr")
        value = self.model.written(node) if expr is None else self.model.evaluate(expr)
        self.model.assign(node.get("location"), value)

    def _if(self, node: Node) -> None:
        active = self.model.test(node.get("cond"))
        taken = active
        for child in node.elements:
            if child.tag in ("else", "elseif"):
                active = not taken and (child.tag == "else" or self.model.test(child.get("cond")))
                taken = taken or active
            elif active:
                self.execute(child)

    def _foreach(self, node: Node) -> None:
        item, index = node.get("item"), node.get("index")
        for name in (item, index):
            if name is not None and name not in self.model.variables:
                self.model.declare(name, self.model.absent)
        for position, value in enumerate(self.model.items(node.get("array"))):
            self.model.declare(item, value)
            if index is not None:
                self.model.declare(index, position)
            for child in node.elements:
                self.execute(child)

    def _cancel(self, node: Node) -> None:
        self.scope.cancel(self._text(node, "sendid"))

    def _send(self, node: Node) -> None:
        sendid = node.get("id")
        if node.get("idlocation") is not None:
            self.session.sends += 1
            sendid = f"send.{self.session.sends}"
            self.model.assign(node.get("idlocation"), sendid)
        try:
            self._dispatch(node, sendid)
        except ModelError as error:
            error.sendid = sendid
            raise

    def _dispatch(self, node: Node, sendid: str | None) -> None:
        kind = self._text(node, "type") or ""
        target = self._text(node, "target") or ""
        delay = milliseconds(self._text(node, "delay") or "0s")
        data = self.data(node)
        if kind not in PROCESSORS:
            raise ContentError("error.execution", "no such processor")
        name = self._text(node, "event") or ""
        if target == "#_internal":
            self.scope.raise_(made(name, "internal", sendid=sendid, data=data))
            return
        address = self._address(target)
        event = made(
            name,
            "external",
            sendid=sendid,
            data=data,
            origin=SESSION + self.session.path,
            origintype=PROCESSOR,
            invokeid=self.session.invoke_id if address == "#parent" else None,
        )
        if delay:
            self.scope.send_after(delay, event, id=sendid, target=address)
        elif address is None:
            self.scope.send(event)
        else:
            self.scope.send_to(address, event)

    def _address(self, target: str) -> str | None:
        """The kernel's name of a target: None for this machine, ``#parent`` or a child's id."""
        mine = self.session.path
        if target in ("", SESSION + mine):
            return None
        above = mine.rpartition(":")[0]
        if above and target in ("#_parent", SESSION + above):
            return "#parent"
        child = target.removeprefix("#_")
        if target.startswith(f"{SESSION}{mine}:"):
            child = target.removeprefix(f"{SESSION}{mine}:")
        if target.startswith("#_") and child in self.document.invokes:
            return child
        if target.startswith("#_"):
            raise ContentError("error.communication", "no such session")
        raise ContentError("error.execution", "no target")

    # Arguments

    def _text(self, node: Node, name: str) -> Any:
        given = node.get(name)
        expr = node.get(name + "expr")
        return given if expr is None else self.model.evaluate(expr)

    def data(self, node: Node) -> Any:
        """What ``namelist``, ``param`` and ``content`` of an element say."""
        found = Record()
        for name in (node.get("namelist") or "").split():
            found[name] = self.model.evaluate(name)
        for param in node.findall("param"):
            text = param.get("expr") or param.get("location") or ""
            found[param.get("name")] = self.model.evaluate(text)
        for content in node.findall("content"):
            expr = content.get("expr")
            return self.model.written(content) if expr is None else self.model.evaluate(expr)
        return found or None


def milliseconds(text: str) -> float:
    """A duration of CSS, as documents write it.

    Raises:
        ModelError: It is none.
    """
    match = re.fullmatch(r"\s*(\d*\.?\d+)\s*(ms|s|m|h)\s*", str(text))
    if match is None:
        raise ModelError("not a duration")
    unit = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000}[match.group(2)]
    return float(match.group(1)) * unit
