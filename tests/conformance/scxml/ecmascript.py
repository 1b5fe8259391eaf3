"""As much of ECMAScript as the documents of the suites use: a parser and an evaluator.

Numbers are Python's, objects are `Record` and arrays are lists. Identity of objects means
equality here: a context hands out clones, so that no two reads give the same object.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, MutableMapping
from typing import Any

from tests.conformance.scxml.values import UNDEFINED, Node, Record, is_object


class ScriptError(Exception):
    """A syntax error, or an exception at run time."""


_TOKEN = re.compile(
    r"""\s+|//[^\n]*|/\*.*?\*/
    |(?P<number>0[xX][0-9a-fA-F]+|\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+)
    |(?P<string>'(?:\\.|[^'\\\n])*'|"(?:\\.|[^"\\\n])*")
    |(?P<name>[A-Za-z_$][\w$]*)
    |(?P<op>===|!==|>>>|\+\+|--|&&|\|\||[-+*/%]=|[<>=!]=|<<|>>|[-+*/%<>=!&|^~?:;,.(){}\[\]])""",
    re.VERBOSE | re.DOTALL,
)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "0": "\0"}
_WORDS = {
    "break", "continue", "delete", "do", "else", "false", "for", "function", "if", "in",
    "instanceof", "new", "null", "return", "this", "throw", "true", "typeof", "var", "while",
    "class", "default", "switch", "try", "catch", "finally", "void", "with", "case",
}  # fmt: skip
_BINARY = {
    "||": 1, "&&": 2, "|": 3, "^": 4, "&": 5, "==": 6, "!=": 6, "===": 6, "!==": 6,
    "<": 7, ">": 7, "<=": 7, ">=": 7, "instanceof": 7, "in": 7, "<<": 8, ">>": 8,
    "+": 9, "-": 9, "*": 10, "/": 10, "%": 10,
}  # fmt: skip
_ASSIGN = {"=", "+=", "-=", "*=", "/=", "%="}

Tree = tuple[Any, ...]


def is_identifier(text: str) -> bool:
    """Whether the text is the name of a variable."""
    return re.fullmatch(r"[A-Za-z_$][\w$]*", text) is not None and text not in _WORDS


def place(text: str) -> Tree:
    """The syntax of a place to assign to.

    Raises:
        ScriptError: It is none.
    """
    parser = _Parser(text)
    tree = parser.expression()
    if parser.more() or tree[0] not in ("name", "member"):
        raise ScriptError("SyntaxError: not a place to assign to")
    return tree


class _Parser:
    def __init__(self, text: str) -> None:
        self.tokens: list[tuple[str, str]] = []
        at = 0
        while at < len(text):
            match = _TOKEN.match(text, at)
            if match is None:
                raise ScriptError(f"SyntaxError: unexpected {text[at]!r}")
            at = match.end()
            kind = match.lastgroup
            if kind is not None:
                word = match.group()
                self.tokens.append(("word" if word in _WORDS else kind, word))
        self.at = 0

    def peek(self) -> str:
        return self.tokens[self.at][1] if self.more() and self.kind() != "string" else ""

    def kind(self) -> str:
        return self.tokens[self.at][0] if self.more() else ""

    def more(self) -> bool:
        return self.at < len(self.tokens)

    def take(self) -> tuple[str, str]:
        if not self.more():
            raise ScriptError("SyntaxError: unexpected end of input")
        self.at += 1
        return self.tokens[self.at - 1]

    def accept(self, text: str) -> bool:
        if self.more() and self.peek() == text:
            self.at += 1
            return True
        return False

    def expect(self, text: str) -> None:
        if not self.accept(text):
            raise ScriptError(f"SyntaxError: {text!r} expected")

    def name(self) -> str:
        kind, text = self.take()
        if kind != "name":
            raise ScriptError("SyntaxError: a name expected")
        return text

    # Statements

    def program(self) -> Tree:
        found = []
        while self.more():
            found.append(self.statement())
        return ("block", found)

    def block(self) -> Tree:
        self.expect("{")
        found = []
        while not self.accept("}"):
            found.append(self.statement())
        return ("block", found)

    def statement(self) -> Tree:
        if self.peek() == "{" and self.kind() == "op":
            return self.block()
        if self.accept(";"):
            return ("block", [])
        if self.accept("var"):
            tree = self.declarations()
        elif self.accept("if"):
            return self.conditional()
        elif self.accept("while"):
            self.expect("(")
            test = self.expression()
            self.expect(")")
            return ("while", test, self.statement())
        elif self.accept("return"):
            bare = self.peek() in (";", "}") or not self.more()
            tree = ("return", None if bare else self.expression())
        elif self.accept("throw"):
            tree = ("throw", self.expression())
        elif self.peek() == "function" and self.tokens[self.at + 1][0] == "name":
            self.take()
            return ("declare", self.function(self.name()))
        else:
            tree = ("expression", self.expression())
        self.accept(";")
        return tree

    def conditional(self) -> Tree:
        self.expect("(")
        test = self.expression()
        self.expect(")")
        then = self.statement()
        return ("if", test, then, self.statement() if self.accept("else") else None)

    def declarations(self) -> Tree:
        found = []
        while True:
            name = self.name()
            found.append((name, self.assignment() if self.accept("=") else None))
            if not self.accept(","):
                return ("var", found)

    def function(self, name: str) -> Tree:
        self.expect("(")
        parameters = []
        while not self.accept(")"):
            parameters.append(self.name())
            if self.peek() != ")":
                self.expect(",")
        return ("function", name, parameters, self.block())

    # Expressions

    def expression(self) -> Tree:
        tree = self.assignment()
        while self.accept(","):
            tree = ("comma", tree, self.assignment())
        return tree

    def assignment(self) -> Tree:
        left = self.binary(1)
        if self.kind() == "op" and self.peek() in _ASSIGN:
            _, op = self.take()
            if left[0] not in ("name", "member"):
                raise ScriptError("SyntaxError: not a place to assign to")
            return ("assign", op, left, self.assignment())
        if self.accept("?"):
            then = self.assignment()
            self.expect(":")
            return ("choose", left, then, self.assignment())
        return left

    def binary(self, level: int) -> Tree:
        left = self.unary()
        while self.kind() in ("op", "word") and _BINARY.get(self.peek(), 0) >= level:
            _, op = self.take()
            left = ("binary", op, left, self.binary(_BINARY[op] + 1))
        return left

    def unary(self) -> Tree:
        if self.kind() in ("op", "word"):
            for op in ("!", "-", "+", "typeof", "void", "delete"):
                if self.accept(op):
                    return ("unary", op, self.unary())
            for op in ("++", "--"):
                if self.accept(op):
                    return ("assign", op[0] + "=", self.unary(), ("value", 1))
        tree = self.postfix(self.primary())
        for op in ("++", "--"):
            if self.accept(op):
                return ("after", op[0] + "=", tree)
        return tree

    def postfix(self, tree: Tree, calls: bool = True) -> Tree:
        while True:
            if self.accept("."):
                tree = ("member", tree, ("value", self.take()[1]))
            elif self.accept("["):
                tree = ("member", tree, self.expression())
                self.expect("]")
            elif calls and self.accept("("):
                tree = ("call", tree, self.arguments())
            else:
                return tree

    def arguments(self) -> list[Tree]:
        found = []
        while not self.accept(")"):
            found.append(self.assignment())
            if self.peek() != ")":
                self.expect(",")
        return found

    def primary(self) -> Tree:
        kind, text = self.take()
        if kind == "number":
            value = int(text, 16) if text[:2].lower() == "0x" else float(text)
            return ("value", int(value) if float(value).is_integer() else value)
        if kind == "string":
            return ("value", _unescape(text[1:-1]))
        if kind == "name":
            return ("name", text)
        constants = {"true": True, "false": False, "null": None}
        if text in constants:
            return ("value", constants[text])
        if text == "this":
            return ("this",)
        if text == "function":
            return self.function(self.name() if self.kind() == "name" else "")
        if text == "new":
            made = self.postfix(self.primary(), calls=False)
            return ("new", made, self.arguments() if self.accept("(") else [])
        if text == "(":
            tree = self.expression()
            self.expect(")")
            return tree
        if text == "[":
            return ("array", self.elements())
        if text == "{":
            return ("object", self.properties())
        raise ScriptError(f"SyntaxError: unexpected {text!r}")

    def elements(self) -> list[Tree]:
        found = []
        while not self.accept("]"):
            found.append(self.assignment())
            if self.peek() != "]":
                self.expect(",")
        return found

    def properties(self) -> list[tuple[str, Tree]]:
        found = []
        while not self.accept("}"):
            kind, key = self.take()
            if kind not in ("name", "word", "string", "number"):
                raise ScriptError("SyntaxError: a key expected")
            self.expect(":")
            found.append((_unescape(key[1:-1]) if kind == "string" else key, self.assignment()))
            if self.peek() != "}":
                self.expect(",")
        return found


def _unescape(text: str) -> str:
    text = re.sub(r"\\u([0-9a-fA-F]{4})", lambda m: chr(int(m.group(1), 16)), text)
    return re.sub(r"\\(.)", lambda m: _ESCAPES.get(m.group(1), m.group(1)), text, flags=re.DOTALL)


class _Return(Exception):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


class Function:
    """A function of the document; its globals are those of whoever calls it."""

    def __init__(self, name: str, parameters: list[str], body: Tree, scopes: list[Any]) -> None:
        self.name = name
        self.parameters = parameters
        self.body = body
        self.scopes = scopes

    def __deepcopy__(self, memo: dict[int, Any]) -> Function:
        return self

    def __call__(self, *arguments: Any) -> Any:
        raise ScriptError("a function is called by the document only")


class Evaluator:
    """Evaluates in the scope of ``variables``; ``system`` holds what cannot be written to."""

    def __init__(self, variables: MutableMapping[str, Any], system: dict[str, Any]) -> None:
        self.variables = variables
        self.system = system
        self.scopes: list[dict[str, Any]] = []
        self.this: Any = UNDEFINED

    def evaluate(self, text: str) -> Any:
        """The value of an expression.

        Raises:
            ScriptError: It is none, or evaluating it failed.
        """
        parser = _Parser(text)
        tree = parser.expression()
        parser.accept(";")
        if parser.more():
            raise ScriptError("SyntaxError: unexpected token after the expression")
        return self._guarded(self.value, tree)

    def execute(self, text: str) -> None:
        """Run a program."""
        self._guarded(self.run, _Parser(text).program())

    def _guarded(self, step: Callable[[Tree], Any], tree: Tree) -> Any:
        try:
            return step(tree)
        except (ScriptError, _Return):
            raise
        except Exception as error:
            raise ScriptError(f"{type(error).__name__}: {error}") from error

    # Statements

    def run(self, tree: Tree) -> None:
        kind = tree[0]
        if kind == "block":
            for each in tree[1]:
                if each[0] == "declare":
                    self.declare(each[1][1], self.value(each[1]))
            for each in tree[1]:
                self.run(each)
        elif kind == "expression":
            self.value(tree[1])
        elif kind == "var":
            for name, given in tree[1]:
                if given is not None:
                    self.declare(name, self.value(given))
                elif name not in (self.scopes[-1] if self.scopes else self.variables):
                    self.declare(name, UNDEFINED)
        elif kind == "if":
            chosen = tree[2] if truthy(self.value(tree[1])) else tree[3]
            if chosen is not None:
                self.run(chosen)
        elif kind == "while":
            while truthy(self.value(tree[1])):
                self.run(tree[2])
        elif kind == "return":
            raise _Return(UNDEFINED if tree[1] is None else self.value(tree[1]))
        elif kind == "throw":
            raise ScriptError(f"thrown: {self.value(tree[1])}")

    def declare(self, name: str, value: Any) -> None:
        if self.scopes:
            self.scopes[-1][name] = value
        else:
            self.variables[name] = value

    # Expressions

    def value(self, tree: Tree) -> Any:
        return getattr(self, "_" + tree[0])(*tree[1:])

    def _value(self, value: Any) -> Any:
        return value

    def _name(self, name: str) -> Any:
        for scope in (*reversed(self.scopes), self.variables, self.system, BUILTINS):
            if name in scope:
                return scope[name]
        raise ScriptError(f"ReferenceError: {name} is not defined")

    def _this(self) -> Any:
        return self.this

    def _comma(self, left: Tree, right: Tree) -> Any:
        self.value(left)
        return self.value(right)

    def _choose(self, test: Tree, then: Tree, otherwise: Tree) -> Any:
        return self.value(then if truthy(self.value(test)) else otherwise)

    def _array(self, items: list[Tree]) -> Any:
        return [self.value(item) for item in items]

    def _object(self, items: list[tuple[str, Tree]]) -> Any:
        return Record((key, self.value(item)) for key, item in items)

    def _function(self, name: str, parameters: list[str], body: Tree) -> Function:
        return Function(name, parameters, body, list(self.scopes))

    def _member(self, owner: Tree, key: Tree) -> Any:
        return member(self.value(owner), self.value(key))

    def _call(self, callee: Tree, arguments: list[Tree]) -> Any:
        this: Any = UNDEFINED
        if callee[0] == "member":
            this = self.value(callee[1])
            fn = member(this, self.value(callee[2]))
        else:
            fn = self.value(callee)
        return self.call(fn, this, [self.value(each) for each in arguments])

    def call(self, fn: Any, this: Any, arguments: list[Any]) -> Any:
        if not isinstance(fn, Function):
            if not callable(fn):
                raise ScriptError("TypeError: not a function")
            return fn(*arguments)
        given = dict.fromkeys(fn.parameters, UNDEFINED) | dict(
            zip(fn.parameters, arguments, strict=False)
        )
        scopes, before = self.scopes, self.this
        self.scopes, self.this = [*fn.scopes, given], this
        try:
            self.run(fn.body)
        except _Return as returned:
            return returned.value
        finally:
            self.scopes, self.this = scopes, before
        return UNDEFINED

    def _new(self, callee: Tree, arguments: list[Tree]) -> Any:
        made = Record()
        answer = self.call(self.value(callee), made, [self.value(each) for each in arguments])
        return answer if is_object(answer) else made

    def _assign(self, op: str, place: Tree, given: Tree) -> Any:
        value = self.value(given)
        if op != "=":
            value = operate(op[0], self.value(place), value)
        self.put(place, value)
        return value

    def _after(self, op: str, place: Tree) -> Any:
        before = self.value(place)
        self.put(place, operate(op[0], before, 1))
        return before

    def put(self, place: Tree, value: Any) -> None:
        if place[0] == "name":
            name = place[1]
            if name in self.system:
                raise ScriptError(f"{name} cannot be written to")
            for scope in reversed(self.scopes):
                if name in scope:
                    scope[name] = value
                    return
            self.variables[name] = value
            return
        owner, key = self.value(place[1]), self.value(place[2])
        if isinstance(owner, list):
            owner[int(key)] = value
        elif isinstance(owner, Record):
            owner[str(key)] = value
        else:
            raise ScriptError("TypeError: not an object")

    def _unary(self, op: str, given: Tree) -> Any:
        if op == "typeof":
            try:
                return typeof(self.value(given))
            except ScriptError:
                return "undefined"
        value = self.value(given)
        if op == "!":
            return not truthy(value)
        if op == "-":
            return -value
        return UNDEFINED if op == "void" else value

    def _binary(self, op: str, left: Tree, right: Tree) -> Any:
        first = self.value(left)
        if op in ("&&", "||"):
            return self.value(right) if truthy(first) is (op == "&&") else first
        return operate(op, first, self.value(right))


def truthy(value: Any) -> bool:
    """What a condition makes of a value."""
    if value is None or value is UNDEFINED or value is False:
        return False
    if isinstance(value, int | float):
        return value != 0 and not math.isnan(value)
    return value != "" if isinstance(value, str) else True


def typeof(value: Any) -> str:
    """The operator."""
    if value is UNDEFINED:
        return "undefined"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "function" if callable(value) else "object"


def _strict_equals(a: Any, b: Any) -> bool:
    return typeof(a) == typeof(b) and (a is None) == (b is None) and bool(a == b)


def _equals(a: Any, b: Any) -> bool:
    nothing = (None, UNDEFINED)
    if any(a is one for one in nothing) or any(b is one for one in nothing):
        return any(a is one for one in nothing) and any(b is one for one in nothing)
    if typeof(a) == typeof(b):
        return bool(a == b)
    try:
        return float(a) == float(b)
    except (TypeError, ValueError):
        return False


def operate(op: str, a: Any, b: Any) -> Any:
    """Apply a binary operator to two values."""
    if op in ("==", "!="):
        return _equals(a, b) is (op == "==")
    if op in ("===", "!=="):
        return _strict_equals(a, b) is (op == "===")
    if op == "+" and (isinstance(a, str) or isinstance(b, str)):
        return to_text(a) + to_text(b)
    if op == "in":
        return (str(b) if isinstance(b, bool) else b) is not None and a in b
    if op == "instanceof":
        return isinstance(a, list) if b is list else isinstance(a, Record)
    if a is UNDEFINED or b is UNDEFINED:
        return False if op in ("<", ">", "<=", ">=") else math.nan
    return {
        "+": lambda: a + b, "-": lambda: a - b, "*": lambda: a * b, "%": lambda: a % b,
        "/": lambda: a / b if b else math.inf, "<": lambda: a < b, ">": lambda: a > b,
        "<=": lambda: a <= b, ">=": lambda: a >= b, "|": lambda: int(a) | int(b),
        "&": lambda: int(a) & int(b), "^": lambda: int(a) ^ int(b),
        "<<": lambda: int(a) << int(b), ">>": lambda: int(a) >> int(b),
    }[op]()  # fmt: skip


def to_text(value: Any) -> str:
    """The value as text."""
    if value is UNDEFINED or value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}.get(value, "undefined")
    if isinstance(value, list):
        return ",".join(map(to_text, value))
    return "[object Object]" if isinstance(value, dict) else str(value)


def member(owner: Any, key: Any) -> Any:
    """A property of a value."""
    if owner is None or owner is UNDEFINED:
        raise ScriptError("TypeError: no properties of undefined")
    if isinstance(owner, list) and isinstance(key, int | float):
        return owner[int(key)] if 0 <= key < len(owner) else UNDEFINED
    if isinstance(owner, list | str) and key == "length":
        return len(owner)
    if isinstance(owner, list) and key == "concat":
        return lambda *given: (
            owner
            + [item for each in given for item in (each if isinstance(each, list) else [each])]
        )
    if isinstance(owner, str) and key == "slice":
        return lambda start=0, end=None: owner[int(start) : None if end is None else int(end)]
    if isinstance(owner, Record):
        return owner.get(str(key), UNDEFINED)
    if isinstance(owner, Node) and key in ("getElementsByTagName", "getAttribute"):
        return getattr(owner, key)
    return UNDEFINED


def _stringify(value: Any) -> Any:
    return json.dumps(value, default=lambda other: None)


def _is_nan(value: Any) -> bool:
    return value is UNDEFINED or not isinstance(value, int | float) or math.isnan(value)


BUILTINS: dict[str, Any] = {
    "undefined": UNDEFINED,
    "NaN": math.nan,
    "Array": list,
    "Object": Record,
    "String": to_text,
    "isNaN": _is_nan,
    "JSON": Record(stringify=_stringify),
    "Math": Record(pow=lambda a, b: a**b, floor=math.floor, abs=abs, max=max, min=min),
}
