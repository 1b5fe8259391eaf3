"""The two data models of the suites behind one interface."""

from __future__ import annotations

import ast
import builtins
import json
from collections.abc import MutableMapping
from typing import Any

from tests.conformance.scxml import ecmascript
from tests.conformance.scxml.values import UNDEFINED, Node, Record, parse_xml


class ModelError(Exception):
    """An expression, script or location is illegal, or evaluating it failed.

    ``name`` is the event it becomes, ``sendid`` the send it kept from happening, ``node`` the
    element that met it.
    """

    name = "error.execution"
    sendid: str | None = None
    node: Node | None = None


class Model:
    """Expressions over the variables of one session at one moment.

    Args:
        variables: What documents declared; written to by assignments.
        system: The system variables, which nothing may write to.
    """

    absent: Any = None

    def __init__(self, variables: MutableMapping[str, Any], system: dict[str, Any]) -> None:
        self.variables = variables
        self.system = system

    def evaluate(self, text: str) -> Any:
        raise NotImplementedError

    def test(self, text: str) -> bool:
        return ecmascript.truthy(self.evaluate(text))

    def execute(self, text: str) -> None:
        raise NotImplementedError

    def assign(self, location: str, value: Any) -> None:
        """Write to a location whose variable is declared."""
        raise NotImplementedError

    def items(self, text: str) -> list[Any]:
        """The items of a collection, as they are now."""
        found = self.evaluate(text)
        if not isinstance(found, list | tuple):
            raise ModelError("not a collection")
        return list(found)

    def declare(self, name: str, value: Any) -> None:
        """Set a variable, declared or not."""
        if not ecmascript.is_identifier(name) or name.startswith("_"):
            raise ModelError("not the name of a variable")
        self.variables[name] = value

    def written(self, node: Node) -> Any:
        """The value that stands inside an element: markup, JSON or text."""
        if node.elements:
            return node.elements[0]
        return self.read(node.text)

    def read(self, text: str) -> Any:
        """The value of a text from outside: markup, JSON or the text, white space normalised."""
        stripped = text.strip()
        try:
            return json.loads(stripped, object_hook=Record)
        except ValueError:
            pass
        if stripped.startswith("<"):
            try:
                return parse_xml(stripped)
            except ValueError:
                pass
        return " ".join(stripped.split())

    def _root_of(self, name: str) -> None:
        if name.startswith("_") or name not in self.variables:
            raise ModelError("not a declared variable")


class Ecmascript(Model):
    absent = UNDEFINED

    def _evaluator(self) -> ecmascript.Evaluator:
        return ecmascript.Evaluator(self.variables, self.system)

    def evaluate(self, text: str) -> Any:
        try:
            return self._evaluator().evaluate(text)
        except ecmascript.ScriptError as error:
            raise ModelError(str(error)) from None

    def execute(self, text: str) -> None:
        try:
            self._evaluator().execute(text)
        except ecmascript.ScriptError as error:
            raise ModelError(str(error)) from None

    def assign(self, location: str, value: Any) -> None:
        evaluator = self._evaluator()
        try:
            place = ecmascript.place(location)
            root = place
            while root[0] == "member":
                root = root[1]
            self._root_of(root[1] if root[0] == "name" else "")
            evaluator.put(place, value)
        except ecmascript.ScriptError as error:
            raise ModelError(str(error)) from None

    def read(self, text: str) -> Any:
        try:  # object literals and arrays that are no JSON
            if text.strip()[:1] in ("{", "["):
                return self._evaluator().evaluate(text)
        except ecmascript.ScriptError:
            pass
        return super().read(text)


class Python(Model):
    def _names(self) -> dict[str, Any]:
        spelled = {"true": True, "false": False, "__builtins__": builtins}
        return {**spelled, **self.system, **{k: self.variables[k] for k in self.variables}}

    def evaluate(self, text: str) -> Any:
        try:
            return eval(text.strip(), self._names())
        except Exception as error:
            raise ModelError(f"{type(error).__name__}: {error}") from None

    def test(self, text: str) -> bool:
        return bool(self.evaluate(text))

    def execute(self, text: str) -> None:
        names = self._names()
        before = dict(names)
        try:
            exec(text.strip(), names)
        except Exception as error:
            raise ModelError(f"{type(error).__name__}: {error}") from None
        for name, value in names.items():
            if name not in before or before[name] is not value:
                self.variables[name] = value

    def assign(self, location: str, value: Any) -> None:
        try:
            place = ast.parse(location.strip(), mode="eval").body
        except SyntaxError:
            raise ModelError("not a location") from None
        root: Any = place
        while isinstance(root, ast.Attribute | ast.Subscript):
            root = root.value
        self._root_of(root.id if isinstance(root, ast.Name) else "")
        try:
            if isinstance(place, ast.Name):
                self.variables[place.id] = value
            elif isinstance(place, ast.Attribute):
                setattr(self.evaluate(ast.unparse(place.value)), place.attr, value)
            elif isinstance(place, ast.Subscript):
                self.evaluate(ast.unparse(place.value))[self.evaluate(ast.unparse(place.slice))] = (
                    value
                )
        except (AttributeError, LookupError, TypeError) as error:
            raise ModelError(str(error)) from None
