"""What the approval task asks by ``interrupt()``, and the schema that judges the answer.

The schema is that of one question. LangGraph validates an answer before it keeps it, so a
stale, replayed, foreign or malformed one raises there, nothing is saved, and the question stays
open for the right one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Final

from langgraph.config import get_config
from langgraph.errors import GraphInterrupt
from langgraph.types import interrupt
from pydantic import ConfigDict, RootModel, model_validator

from guardchart.errors import DecisionRefused
from guardchart.langchain._ask import Positional, Show, question, read_answer

__all__ = ["Asked", "ask"]

_VALIDATES: Final = "response_schema" in inspect.signature(interrupt).parameters


class Asked:
    """One question: the calls it is about, and how it may be answered.

    Args:
        pending: Items of ``pending_approval``, in the order of the calls.
        machine: The chart's id.
        alone: Whether it is about one call only, as ``interrupt_mode="per_call"`` asks.
        show: ``"full"`` shows the arguments, secrets masked; ``"ids"`` leaves them out.
        positional: Whether an answer may name the calls by their place.
        registry: For the arguments of an edit.
        too_soon: Tells whether an answer by place comes too soon to have been read.

    Attributes:
        taken: What the answer decides, once it has been validated.
    """

    taken: tuple[list[dict[str, Any]], str | None]

    def __init__(
        self,
        pending: Sequence[Mapping[str, Any]],
        *,
        machine: str,
        alone: bool,
        show: Show,
        positional: Positional,
        registry: Any,
        too_soon: Callable[[], bool],
    ) -> None:
        self.pending = pending
        self.machine = machine
        self.alone = alone
        self.show = show
        self.positional = positional
        self.registry = registry
        self.too_soon = too_soon

    def payload(self) -> dict[str, Any]:
        """What the person is shown."""
        shown = question(self.pending, machine=self.machine, show=self.show)
        if not self.alone:
            return shown
        call, request = shown["calls"][0], shown["action_requests"][0]
        return {
            "type": "tool_approval",
            "machine": self.machine,
            **call,
            "args": request["args"],
            "description": request["description"],
        }

    def read(self, answer: Any) -> tuple[list[dict[str, Any]], str | None]:
        """What an answer decides about each call, and who decided.

        Raises:
            DecisionRefused: It does not fit the question.
        """
        if self.alone:
            answer = self._of_one(answer)
        decided, by = read_answer(
            self.pending, answer, registry=self.registry, positional=self.positional
        )
        if self.positional == "accept" and not _names_digests(answer) and self.too_soon():
            raise DecisionRefused("the answer came before anybody can have read the question")
        return [decided[item["id"]] for item in self.pending], by

    def _of_one(self, answer: Any) -> Any:
        """A decision about the one call as a list of decisions."""
        if not isinstance(answer, Mapping) or "decisions" in answer:
            return answer
        if not ({"decision", "type"} & answer.keys()) or str(answer.get("type")).isupper():
            return answer
        item = self.pending[0]
        decision = {key: each for key, each in answer.items() if key != "by"}
        by = {} if answer.get("by") is None else {"by": answer["by"]}
        if self.positional == "refuse" or "digest" in decision:
            decision.setdefault("id", item["id"])
        return {"decisions": [decision], **by}

    def json_schema(self) -> dict[str, Any]:
        """The form a client draws for the answer."""
        shared: dict[str, Any] = {}
        each = [self._decision_schema(item, shared) for item in self.pending]
        definitions = {"$defs": shared} if shared else {}
        if self.alone:
            return {"title": "Decision", **each[0], **definitions}
        return {
            "title": "Decisions",
            **definitions,
            "type": "object",
            "required": ["decisions"],
            "properties": {
                "decisions": {
                    "type": "array",
                    "minItems": len(each),
                    "maxItems": len(each),
                    "items": each[0] if len(each) == 1 else {"oneOf": each},
                },
                "by": {"type": "string"},
            },
        }

    def _decision_schema(self, item: Mapping[str, Any], shared: dict[str, Any]) -> dict[str, Any]:
        named = [] if self.positional == "accept" else ["id", "digest"]
        tool = self.registry.get(item["name"])
        arguments = {"type": "object"} if tool is None else tool.parameters
        if "$defs" in arguments:
            # What a tool's schema refers to from its own root is found from the form's.
            moved = _moved(arguments, f"#/$defs/{item['name']}.")
            shared |= {f"{item['name']}.{key}": each for key, each in moved.pop("$defs").items()}
            arguments = moved
        return {
            "type": "object",
            "required": [*named, "decision"],
            "properties": {
                "id": {"const": item["id"]},
                "digest": {"const": item["digest"]},
                "decision": {"enum": ["approve", "reject", "edit"]},
                "arguments": arguments,
                "reason": {"type": "string"},
            },
        }


def _moved(schema: Any, to: str) -> Any:
    """A copy of a schema that refers to its definitions elsewhere."""
    if isinstance(schema, list):
        return [_moved(each, to) for each in schema]
    if not isinstance(schema, dict):
        return schema
    copy: dict[str, Any] = {key: _moved(each, to) for key, each in schema.items()}
    # Pydantic tells the members of a discriminated union by their references, too.
    mapping = copy.get("mapping")
    for names in (copy, mapping if isinstance(mapping, dict) else {}):
        for key, each in names.items():
            if isinstance(each, str) and each.startswith("#/$defs/") and key not in _VALUES:
                names[key] = to + each.removeprefix("#/$defs/")
    return copy


_VALUES: Final = frozenset({"const", "default", "description", "title"})


class Decision(RootModel[Any]):
    """An answer to the question that is open; each decision names its call by id and digest."""

    # One class for all questions: making a pydantic class costs more than a superstep.
    model_config = ConfigDict(hide_input_in_errors=True)

    @model_validator(mode="after")
    def _fits(self) -> Decision:
        try:
            _OPEN.get().taken = _OPEN.get().read(self.root)
        except DecisionRefused as refused:
            raise ValueError(str(refused)) from None
        return self


_OPEN: Final[ContextVar[Asked]] = ContextVar("guardchart_question")
"""The question whose answer `interrupt` is validating."""


def ask(asked: Asked) -> tuple[list[dict[str, Any]], str | None]:
    """Ask by one ``interrupt()`` and return what is decided.

    Raises:
        GraphInterrupt: Nobody has answered yet; LangGraph's own.
        pydantic.ValidationError: The answer does not fit; it was not kept.
    """
    if _VALIDATES:
        if _may_be_answered():
            token = _OPEN.set(asked)
            try:
                interrupt(None, response_schema=Decision)
                return asked.taken
            except GraphInterrupt:
                pass  # Another task has taken the answer: this one asks.
            finally:
                _OPEN.reset(token)
        # As a dict, since of a class LangGraph has pydantic make one for each question.
        return asked.read(interrupt(asked.payload(), response_schema=asked.json_schema()))
    payload = asked.payload()
    while True:
        # A LangGraph that cannot validate keeps every answer: the next one is asked for.
        answer = interrupt(payload)
        try:
            return asked.read(answer)
        except DecisionRefused as refused:
            payload = {**asked.payload(), "refused": str(refused)}


def _may_be_answered() -> bool:
    """Whether ``interrupt()`` has an answer to return, or, where LangGraph does not tell, may."""
    scratchpad: Any = (get_config().get("configurable") or {}).get("__pregel_scratchpad")
    try:
        return bool(scratchpad.resume) or scratchpad.get_null_resume(False) is not None
    except (AttributeError, TypeError):
        return True


def _names_digests(answer: Any) -> bool:
    if isinstance(answer, Mapping) and "digests" in answer:
        return True
    given = answer.get("decisions") if isinstance(answer, Mapping) else answer
    return isinstance(given, list | tuple) and all(
        isinstance(each, Mapping) and "digest" in each for each in given
    )
