"""Whether a final reply is what its state asked for."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping
from typing import Any

import pydantic

from guardchart.agents._messages import safe_text
from guardchart.errors import AgentConfigError
from guardchart.kernel import Machine

__all__ = ["OutputCheck", "describe"]


def describe(model: type[pydantic.BaseModel], error: pydantic.ValidationError) -> str:
    """The first validation error as ``<loc>: <msg>``: declared fields and pydantic's own words.

    A key that is no declared field is shown as ``*``, a validator's own text as its error type.
    """
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    declared = _declared(model)
    loc = ".".join(
        str(part) if isinstance(part, int) or part in declared else "*" for part in first["loc"]
    )
    kind = str(first["type"])
    text = kind if kind in ("value_error", "assertion_error") else str(first["msg"])
    return f"{loc}: {text}" if loc else text


def _declared(model: type[pydantic.BaseModel]) -> set[str]:
    names: set[str] = set()
    stack: list[Any] = [model.model_json_schema()]
    while stack:
        part = stack.pop()
        if isinstance(part, dict):
            properties = part.get("properties")
            if isinstance(properties, dict):
                names.update(properties)
            stack.extend(part.values())
        elif isinstance(part, list):
            stack.extend(part)
    return names


class OutputCheck:
    """Validates final replies against ``output_model`` or the state's ``meta.output_model``.

    Args:
        output_model: A pydantic model class, its ``"module:Model"`` path, or None for text.
        parser: ``text -> JSON value``; strict JSON by default.
        max_retries: How often a reply that fails is asked for again.

    Raises:
        AgentConfigError: The model cannot be resolved, or ``max_retries`` is no int >= 0.
    """

    def __init__(
        self,
        output_model: type[pydantic.BaseModel] | str | None,
        parser: Callable[[str], Any] | None,
        max_retries: int,
    ) -> None:
        if type(max_retries) is not int or max_retries < 0:
            raise AgentConfigError("max_output_retries must be an int >= 0")
        self.max_retries = max_retries
        self._parser = parser
        self._model = _resolve(output_model) if output_model is not None else None
        self._by_path: dict[str, type[pydantic.BaseModel]] = {}

    def on_machine(self, machine: Machine) -> None:
        """Resolve every ``meta.output_model`` of a chart while it is built, never later."""
        for node in machine.nodes.values():
            path = node.meta.get("output_model")
            if isinstance(path, str):
                self._by_path[path] = _resolve(path)

    def of(self, context: Mapping[str, Any], event: Any) -> tuple[bool, Any]:
        """``(True, result)`` for a reply that fits, else ``(False, what is wrong)``."""
        turn = getattr(event, "data", None)
        text = getattr(turn, "text", None)
        model = self._model_of(getattr(event, "node", None))
        if model is None:
            return True, safe_text(text) if text is not None else ""
        if text is None:
            return False, "not valid JSON"
        try:
            found = (
                model.model_validate_json(text)
                if self._parser is None
                else model.model_validate(self._parser(text))
            ).model_dump(mode="json")
            json.dumps(found, allow_nan=False)  # a result is kept: no NaN, no infinity
            return True, found
        except pydantic.ValidationError as error:
            if error.errors(include_url=False)[0]["type"] == "json_invalid":
                return False, "not valid JSON"
            return False, describe(model, error)
        except ValueError:
            return False, "not valid JSON"

    def _model_of(self, node: Any) -> type[pydantic.BaseModel] | None:
        while node is not None:
            path = node.meta.get("output_model")
            if isinstance(path, str) and path in self._by_path:
                return self._by_path[path]
            node = node.parent
        return self._model


def _resolve(model: Any) -> type[pydantic.BaseModel]:
    if isinstance(model, type) and issubclass(model, pydantic.BaseModel):
        return model
    if isinstance(model, str):
        module, _, name = model.partition(":")
        try:
            found = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError, ValueError):
            found = None
        if isinstance(found, type) and issubclass(found, pydantic.BaseModel):
            return found
        raise AgentConfigError(
            f"output_model {model!r} cannot be resolved; write 'package.module:Model', a pydantic "
            "model"
        )
    raise AgentConfigError("output_model must be a pydantic model class or 'module:Model'")
