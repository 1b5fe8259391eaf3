"""From an SCXML document to a chart and its logic.

What maps to what:

- ``event="a b"`` to ``a.*`` and ``b.*``. Within a state SCXML asks in document order and the
  kernel asks longer descriptors first (ruling K1), so each key lists, in document order, all
  transitions of the state that cover it.
- ``done.state.x`` and ``done.invoke.x`` to the engine's own types.
- A transition to ``reenter: true``, unless it is internal by SCXML's definition.
- A block of executable content to one draft-form action. An error in it is raised as an event.
- A condition to a guard, ``In('x')`` to ``stateIn``. A condition that fails is false; as a guard
  can raise no event, ``always`` of the root does so next. The same for arguments of an invoke.
- ``In`` inside of content to a list that entry and exit actions keep in the context.
- ``invoke`` to ``invoke``; where the document to run is computed, to a spawned child that the
  exit of the state stops.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from guardchart.kernel import Event, Machine
from guardchart.runtime import MachineLogic, create_machine
from tests.conformance.scxml.content import (
    PROCESSOR,
    SESSION,
    ContentError,
    Frame,
    Session,
    error_event,
    seen,
)
from tests.conformance.scxml.datamodels import Ecmascript, Model, ModelError, Python
from tests.conformance.scxml.values import Node, Record, parse_xml

CHART = "(document)"
STATES = ("state", "parallel", "final", "history")
INVOKABLE = ("", "scxml", "http://www.w3.org/TR/scxml", "http://www.w3.org/TR/scxml/")


class LoadError(ValueError):
    """The document is rejected."""


def load(path: Path, default_model: str) -> Document:
    """Load a document from a file.

    Raises:
        LoadError: It cannot be run.
    """
    try:
        return Document(parse_xml(path.read_bytes()), path.parent, default_model)
    except (OSError, ValueError) as error:
        raise LoadError(str(error)) from error


class Invoked:
    """What an invoke asks for beside what the kernel does."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.autoforward = node.get("autoforward") == "true"
        self.finalize = next(iter(node.findall("finalize")), None)


class Document:
    """One document: ``machine`` runs it."""

    def __init__(self, root: Node, folder: Path, default_model: str) -> None:
        self.root = root
        self.folder = folder
        self.default_model = default_model
        self.model_name = root.get("datamodel", default_model)
        self.late = root.get("binding") == "late"
        self.asks = any(
            "In(" in (each.get("cond") or "") for each in root.own() if each.tag != "transition"
        )
        self.conditions = 0
        self.invokes: dict[str, Invoked] = {}
        self.services: dict[str, Any] = {}
        self.ids: dict[int, str] = {}
        for number, node in enumerate(self.states()):
            self.ids[id(node)] = node.get("id") or f"(state {number})"
        for node in root.own():
            if node.tag == "script":
                self.script(node)
        config = self.chart()
        logic = MachineLogic(services=self.services, attachments={"document": self})
        self.machine: Machine = create_machine(config, logic)

    def states(self) -> list[Node]:
        found: list[Node] = []

        def below(node: Node) -> None:
            for child in node.elements:
                if child.tag in STATES:
                    found.append(child)
                    below(child)

        below(self.root)
        return found

    def script(self, node: Node) -> str:
        """The text of a script.

        Raises:
            LoadError: Its file cannot be read.
        """
        if node.get("src") is None:
            return node.text
        return self.file(node.get("src")).read_text(encoding="utf-8")

    def file(self, url: str) -> Path:
        path = self.folder / url.removeprefix("file:")
        if not path.is_file():
            raise LoadError(f"no file {url!r}")
        return path

    def text(self, url: str) -> str:
        """What a running document reads from a file."""
        try:
            return self.file(url).read_text(encoding="utf-8")
        except LoadError as error:
            raise ContentError("error.execution", str(error)) from None

    def model(self, variables: Any, event: Event) -> Model:
        """The data model over these variables, as it is while the event is processed."""
        kind = Python if self.model_name == "python" else Ecmascript
        session: Session = variables["_session"]
        scxml = Record(location=SESSION + session.path)
        system = {
            "_event": seen(event, kind.absent),
            "_sessionid": session.path,
            "_name": self.root.get("name", ""),
            "_ioprocessors": Record({"scxml": scxml, PROCESSOR: scxml}),
            "_session": session,
        }
        return kind(variables, system)

    # The chart

    def chart(self) -> dict[str, Any]:
        root = self.state(self.root)
        root |= {"id": CHART, "type": "compound", "entry": [self.begin]}
        # Only where it is needed, so that other documents take the kernel's shorter roads.
        if self.conditions or self.invokes:
            root["always"] = [{"guard": _has_pending, "actions": [_raise_pending]}]
        if self.invokes:
            root["actionErrorPolicy"] = "continue"
        return root

    def state(self, node: Node) -> dict[str, Any]:
        children = [child for child in node.elements if child.tag in STATES]
        config: dict[str, Any] = {
            "entry": [self.action(each.elements) for each in node.findall("onentry")],
            "exit": [self.action(each.elements) for each in node.findall("onexit")],
        }
        if children:
            config["states"] = {self.key(c): self.child(c) for c in children}
            if node.tag != "parallel":
                config["initial"] = self.initial(node, children)
        if node.tag == "parallel" and children:
            config["type"] = "parallel"
        if self.asks and node is not self.root:
            config["entry"].insert(0, _marking(self.ids[id(node)], True))
            config["exit"].append(_marking(self.ids[id(node)], False))
        if node.tag == "final":
            return config | self.final(node, config)
        config["always"], config["on"] = self.transitions(node)
        self.invocations(node, config)
        if self.late and node is not self.root:
            config["entry"].insert(0, self.binding(node))
        return config

    def child(self, node: Node) -> dict[str, Any]:
        if node.tag != "history":
            return {"id": self.ids[id(node)], **self.state(node)}
        default = node.findall("transition")
        if default and default[0].elements:
            raise LoadError("content of a history state's default transition")
        return {
            "id": self.ids[id(node)],
            "type": "history",
            "history": node.get("type", "shallow"),
            "target": self.targets(default[0]) if default else [],
        }

    def key(self, node: Node) -> str:
        name = self.ids[id(node)]
        return name.replace(".", "_").replace("#", "_")

    def initial(self, node: Node, children: list[Node]) -> dict[str, Any]:
        given = node.findall("initial")
        if given:
            transition = given[0].findall("transition")[0]
            actions = [self.action(transition.elements)] if transition.elements else []
            return {"target": self.targets(transition), "actions": actions}
        if node.get("initial"):
            return {"target": [f"#{name}" for name in node.get("initial").split()]}
        first = next(child for child in children if child.tag != "history")
        return {"target": [f"#{self.ids[id(first)]}"]}

    def targets(self, node: Node) -> list[str]:
        return [f"#{name}" for name in (node.get("target") or "").split()]

    def final(self, node: Node, config: dict[str, Any]) -> dict[str, Any]:
        given = node.findall("donedata")
        found: dict[str, Any] = {"type": "final"}
        if given:
            key = f"_done {self.ids[id(node)]}"

            def compute(scope: Any, context: Any, event: Any, action: Any) -> None:
                context[key] = None
                frame = Frame(self, context, event, scope)
                try:
                    context[key] = frame.data(given[0])
                except ModelError as error:
                    scope.raise_(error_event(error, given[0]))

            config["entry"].append(compute)
            found["output"] = lambda context, event: context[key]
        return found

    def action(self, nodes: list[Node]) -> Callable[..., None]:
        def run(scope: Any, context: Any, event: Any, action: Any) -> None:
            Frame(self, context, event, scope).block(nodes)

        return run

    # Transitions

    def transitions(self, node: Node) -> tuple[list[Any], dict[str, list[Any]]]:
        always: list[Any] = []
        handlers: list[tuple[list[str], Any]] = []
        for each in node.findall("transition"):
            transition = self.transition(node, each)
            if each.get("event") is None:
                always.append(transition)
            else:
                keys = [key for name in each.get("event").split() for key in _keys(name)]
                handlers.append((keys, transition))
        on = {
            key: [t for covered, t in handlers if any(_covers(one, key) for one in covered)]
            for keys, _ in handlers
            for key in keys
        }
        return always, on

    def transition(self, source: Node, node: Node) -> dict[str, Any]:
        found: dict[str, Any] = {}
        targets = (node.get("target") or "").split()
        if targets:
            below = {self.ids.get(id(one)) for one in source.own()[1:]}
            internal = (
                node.get("type") == "internal"
                and source.tag == "state"
                and all(target in below for target in targets)
            )
            found = {"target": self.targets(node), "reenter": not internal}
        if node.elements:
            found["actions"] = [self.action(node.elements)]
        if (node.get("cond") or "").strip():
            found["guard"] = self.guard(node)
        return found

    def guard(self, node: Node) -> Any:
        cond = node.get("cond").strip()
        match = re.fullmatch(r"(!|not\s)?\s*In\(\s*['\"]([^'\"]+)['\"]\s*\)", cond)
        if match is not None:
            inside = {"type": "stateIn", "state": f"#{match.group(2)}"}
            return {"type": "not", "guard": inside} if match.group(1) else inside

        self.conditions += 1

        def test(context: Any, event: Any) -> bool:
            try:
                return self.model(dict(context), event).test(cond)
            except ModelError as error:
                context["_session"].pending.append(error_event(error, node))
                return False

        return test

    # Data

    def begin(self, scope: Any, context: Any, event: Any, action: Any) -> None:
        """Entry of the root: bind the variables, run the scripts of the document."""
        context["_session"] = Session(scope.id or CHART)
        given = event.input or {}
        model = self.model(context, event)
        top = [data for each in self.root.findall("datamodel") for data in each.findall("data")]
        for data in (node for node in self.root.own() if node.tag == "data"):
            name = data.get("id")
            context[name] = model.absent
        for data in (node for node in self.root.own() if node.tag == "data"):
            if data in top and data.get("id") in given:
                context[data.get("id")] = given[data.get("id")]
            elif data in top or not self.late:
                self.bind(scope, model, data)
        Frame(self, context, event, scope).block(self.root.findall("script"))

    def binding(self, node: Node) -> Callable[..., None]:
        nodes = [data for each in node.findall("datamodel") for data in each.findall("data")]
        bound = f"_bound {self.ids[id(node)]}"

        def bind(scope: Any, context: Any, event: Any, action: Any) -> None:
            if bound not in context:
                context[bound] = True
                model = self.model(context, event)
                for data in nodes:
                    self.bind(scope, model, data)

        return bind

    def bind(self, scope: Any, model: Model, node: Node) -> None:
        try:
            if node.get("expr") is not None:
                value = model.evaluate(node.get("expr"))
            elif node.get("src") is not None:
                value = model.read(self.text(node.get("src")))
            elif node.text.strip() or node.elements:
                value = model.written(node)
            else:
                return
        except ModelError as error:
            scope.raise_(error_event(error, node))
        else:
            model.variables[node.get("id")] = value

    # Invoke

    def invocations(self, state: Node, config: dict[str, Any]) -> None:
        invokes = []
        for number, node in enumerate(state.findall("invoke")):
            name = node.get("id") or f"{self.ids[id(state)]}.invoke{number}"
            self.invokes[name] = Invoked(node)
            if node.get("idlocation") is not None:
                config["entry"].append(self.naming(node, name))
            computed = node.get("srcexpr") or any(c.get("expr") for c in node.findall("content"))
            if computed:
                config["entry"].append(self.spawning(node, name))
                config["exit"].append(_stopping(name))
                continue
            self.services[name] = self.invoked(node)
            failed = {"actions": [_failed(node)]}
            given = self.arguments(node)
            invokes.append({"id": name, "src": name, "input": given, "onError": failed})
        config["invoke"] = invokes

    def invoked(self, node: Node) -> Any:
        """The machine an invoke runs, or a service that fails where there is none."""
        try:
            if node.get("src") is not None:
                return load(self.file(node.get("src")), self.default_model).machine
            for content in node.findall("content"):
                return Document(content.elements[0], self.folder, self.default_model).machine
        except (LoadError, LookupError):
            pass
        return _unable

    def arguments(self, node: Node) -> Callable[..., Any]:
        def compute(context: Any, event: Any) -> Any:
            frame = Frame(self, dict(context), event)
            try:
                return self._given(frame, node)
            except ModelError as error:
                frame.session.pending.append(error_event(error, node))
                raise

        return compute

    def _given(self, frame: Frame, node: Node) -> Any:
        kind = frame._text(node, "type") or ""
        if kind not in INVOKABLE:
            raise ContentError("error.execution", "nothing of this type can be invoked")
        without = Node("invoke", node.attributes, node.line, node.column)
        without.children = [child for child in node.elements if child.tag == "param"]
        return frame.data(without)

    def naming(self, node: Node, name: str) -> Callable[..., None]:
        def assign(scope: Any, context: Any, event: Any, action: Any) -> None:
            frame = Frame(self, context, event, scope)
            try:
                frame.model.assign(node.get("idlocation"), name)
            except ModelError as error:
                scope.raise_(error_event(error, node))

        return assign

    def spawning(self, node: Node, name: str) -> Callable[..., None]:
        def spawn(scope: Any, context: Any, event: Any, action: Any) -> None:
            frame = Frame(self, context, event, scope)
            try:
                given = self._given(frame, node)
                scope.spawn(self.computed(frame, node), name, given)
            except ModelError as error:
                scope.raise_(error_event(error, node))

        return spawn

    def computed(self, frame: Frame, node: Node) -> Machine:
        """The machine of an invoke whose document only an expression gives."""
        if node.get("srcexpr"):
            markup: Any = self.text(frame.model.evaluate(node.get("srcexpr")))
        else:
            markup = frame.model.evaluate(node.findall("content")[0].get("expr"))
        try:
            if isinstance(markup, str):
                markup = parse_xml(markup.encode())
            if isinstance(markup, Node) and markup.tag == "scxml":
                return Document(markup, self.folder, self.default_model).machine
        except ValueError:
            pass
        raise ContentError("error.execution", "not a document")


def _keys(descriptor: str) -> list[str]:
    """The chart's keys for one of SCXML's event descriptors."""
    name = descriptor.removesuffix("*").removesuffix(".")
    if not name:
        return ["*"]
    found = [f"{name}.*"]
    for theirs, ours in (("done.state", "xstate.done.state"), ("done.invoke", "xstate.done.actor")):
        if name.startswith(theirs + "."):
            found.append(ours + name.removeprefix(theirs))
        elif theirs.startswith(name + ".") or name == theirs:
            found.append(f"{ours}.*")
    return found


def _covers(descriptor: str, key: str) -> bool:
    if descriptor == "*" or descriptor == key:
        return True
    prefix = descriptor.removesuffix("*")
    return descriptor.endswith(".*") and (key.startswith(prefix) or key + "." == prefix)


def _has_pending(context: Any, event: Any) -> bool:
    return bool(context["_session"].pending)


def _raise_pending(scope: Any, context: Any, event: Any, action: Any) -> None:
    pending: list[Event] = context["_session"].pending
    while pending:
        scope.raise_(pending.pop(0))


def _marking(name: str, active: bool) -> Callable[..., None]:
    def act(scope: Any, context: Any, event: Any, action: Any) -> None:
        others = [each for each in context.get("_active", ()) if each != name]
        context["_active"] = [*others, name] if active else others

    return act


def _failed(node: Node) -> Callable[..., None]:
    def act(scope: Any, context: Any, event: Any, action: Any) -> None:
        scope.raise_(error_event(ContentError("error.communication", "it failed"), node))

    return act


def _stopping(name: str) -> Callable[..., None]:
    def act(scope: Any, context: Any, event: Any, action: Any) -> None:
        scope.stop(name)

    return act


def _unable(given: Any) -> None:
    raise LoadError("there is no such document")
