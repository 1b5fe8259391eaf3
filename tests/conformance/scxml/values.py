"""Values that SCXML documents compute with: markup, records, and the absence of a value."""

from __future__ import annotations

from typing import Any
from xml.parsers import expat


class Undefined:
    """ECMAScript's ``undefined``; there is one."""

    def __bool__(self) -> bool:
        return False

    def __repr__(self) -> str:
        return "undefined"

    def __copy__(self) -> Undefined:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Undefined:
        return self


UNDEFINED = Undefined()


class Record(dict[str, Any]):
    """An object of the data model: keys are attributes, too, as Python expressions want them."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


def is_object(value: Any) -> bool:
    """Whether the value has properties that can be set."""
    return isinstance(value, dict | list) or callable(value)


class Node:
    """An XML element, with the place where it stands.

    It answers the few questions of a DOM that documents ask: `getElementsByTagName` and
    `getAttribute` in one data model, `findall` and `get` in the other.
    """

    def __init__(self, tag: str, attributes: dict[str, str], line: int, column: int) -> None:
        self.tag = tag.rpartition("}")[2]
        self.attributes = attributes
        self.line = line
        self.column = column
        self.children: list[Node | str] = []

    @property
    def elements(self) -> list[Node]:
        return [child for child in self.children if isinstance(child, Node)]

    @property
    def text(self) -> str:
        return "".join(child for child in self.children if isinstance(child, str))

    def get(self, name: str, default: Any = None) -> Any:
        return self.attributes.get(name, default)

    def findall(self, tag: str) -> list[Node]:
        return [child for child in self.elements if child.tag == tag]

    def walk(self) -> list[Node]:
        """This element and all below it, in document order."""
        return [self] + [below for child in self.elements for below in child.walk()]

    def own(self) -> list[Node]:
        """As `walk`, without what belongs to a document inside of this one."""
        inner = [child for child in self.elements if child.tag != "scxml"]
        return [self] + [below for child in inner for below in child.own()]

    def getElementsByTagName(self, tag: str) -> list[Node]:
        return [node for node in self.walk()[1:] if node.tag == tag]

    def getAttribute(self, name: str) -> Any:
        return self.attributes.get(name, UNDEFINED)


def parse_xml(data: bytes | str) -> Node:
    """Parse a document.

    Raises:
        ValueError: It is not well-formed.
    """
    parser = expat.ParserCreate(namespace_separator="}")
    parser.buffer_text = True
    top: list[Node] = []
    stack: list[Node] = []

    def start(tag: str, attributes: dict[str, str]) -> None:
        node = Node(tag, attributes, parser.CurrentLineNumber, parser.CurrentColumnNumber)
        (stack[-1].children if stack else top).append(node)
        stack.append(node)

    def characters(text: str) -> None:
        if stack:
            stack[-1].children.append(text)

    parser.StartElementHandler = start
    parser.EndElementHandler = lambda tag: stack.pop()
    parser.CharacterDataHandler = characters
    try:
        parser.Parse(data.strip(), True)
    except expat.ExpatError as error:
        raise ValueError(f"not well-formed: {error}") from None
    return top[0]
