"""Whether a final reply is what its state asked for."""

from __future__ import annotations

import functools
import importlib
import json
from collections.abc import Callable, Mapping
from typing import Any, Final

import pydantic
from pydantic_core import to_json

from guardchart.agents._messages import safe_text
from guardchart.agents._parser import ANY_KIND, ReplyParser, json_parser
from guardchart.errors import AgentConfigError
from guardchart.gate._schema import declared_names, errors_text
from guardchart.kernel import Machine

__all__ = ["OutputCheck", "structured_output", "validate_structured"]

OutputModel = type[pydantic.BaseModel] | str

NOT_JSON: Final = "not valid JSON"
_KINDS: Final[dict[Any, frozenset[type]]] = {
    "object": frozenset({dict}),
    "array": frozenset({list}),
}


class Shape:
    """One pydantic model as what a reply must fit; everything it needs is worked out at once.

    Args:
        model: The model.

    Attributes:
        kinds: What a reply that fits it is: a dict, a list, or either.
    """

    def __init__(self, model: type[pydantic.BaseModel]) -> None:
        self.model = model
        names = set(model.model_fields)
        kinds = ANY_KIND
        try:
            declared_names(model.model_json_schema(by_alias=False), names)
            schema = model.model_json_schema()
            declared_names(schema, names)
            kinds = _KINDS.get(schema.get("type"), ANY_KIND)
        except Exception:  # some validators have no JSON Schema; their names are not shown
            pass
        self.kinds = kinds
        self._declared = frozenset(names)

    def fit(self, value: Any, *, by_name: bool | None = None) -> tuple[bool, Any]:
        """``(True, what the model makes of the value, as JSON)`` or ``(False, what is wrong)``.

        The value is read as JSON is, so a date may be text even for a strict model.

        Args:
            value: A JSON value.
            by_name: Whether fields may be named by their own names beside their aliases.
        """
        try:
            text = to_json(value)
        except Exception:  # a parser of the host's gave something that is not JSON
            return False, NOT_JSON
        try:
            made = self.model.model_validate_json(text, by_name=by_name)
        except pydantic.ValidationError as error:
            errors = error.errors(include_url=False, include_input=False)
            if errors[0]["type"] == "json_invalid":
                return False, NOT_JSON
            return False, self._told(errors)
        except Exception as error:  # a validator of the host's did not expect such a value
            return False, f"a validator raised {type(error).__name__}"
        try:
            found = made.model_dump(mode="json", warnings=False)  # they repeat values
            json.dumps(found, allow_nan=False)  # a result is kept: no NaN, no infinity
        except Exception:
            return False, NOT_JSON
        return True, found

    def _told(self, errors: list[Any]) -> str:
        if len(errors) == 1 and not errors[0]["loc"]:
            return errors_text(errors, self._declared).removeprefix("*: ")
        return errors_text(errors, self._declared)

    def read(self, text: str, parser: Callable[[str], Any]) -> tuple[bool, Any]:
        """`fit`, for what a parser makes of a text."""
        try:
            if isinstance(parser, ReplyParser):
                value = parser.parse(text, self.kinds)
            else:
                value = parser(text)
        except ValueError as error:
            own = isinstance(parser, ReplyParser)
            return False, str(error) if own else NOT_JSON
        except Exception:  # a parser of the host's did not expect such a text
            return False, NOT_JSON
        return self.fit(value)


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
        output_model: OutputModel | None,
        parser: Callable[[str], Any] | None,
        max_retries: int,
    ) -> None:
        if type(max_retries) is not int or max_retries < 0:
            raise AgentConfigError("max_output_retries must be an int >= 0")
        self.max_retries = max_retries
        self._parser = parser if parser is not None else json_parser(False)
        self._shape = shape_of(output_model) if output_model is not None else None
        self._by_meta: dict[Any, Shape] = {}

    def on_machine(self, machine: Machine) -> None:
        """Resolve every ``meta.output_model`` of a chart while it is built, never later.

        Raises:
            AgentConfigError: One is neither a pydantic model nor the path of one.
        """
        for node in machine.nodes.values():
            if "output_model" not in node.meta:
                continue
            given = node.meta["output_model"]
            try:
                self._by_meta[given] = shape_of(given)
            except AgentConfigError as error:
                raise AgentConfigError(f"state {node.id!r}: meta.{error}") from error

    def of(self, context: Mapping[str, Any], event: Any) -> tuple[bool, Any]:
        """``(True, result)`` for a reply that fits, else ``(False, what is wrong)``."""
        turn = getattr(event, "data", None)
        text = getattr(turn, "text", None)
        shape = self._shape_of(getattr(event, "node", None))
        if shape is None:
            return True, safe_text(text) if text is not None else ""
        if text is None:
            return False, NOT_JSON
        return shape.read(text, self._parser)

    def _shape_of(self, node: Any) -> Shape | None:
        """The schema of the nearest state that declares one, else the logic's own."""
        while node is not None:
            given = node.meta.get("output_model")
            if given is not None and given in self._by_meta:
                return self._by_meta[given]
            node = node.parent
        return self._shape


def structured_output(
    model_cls: OutputModel | None = None,
    *,
    retries: int = 2,
    use_instructor: bool | None = None,
) -> dict[str, Any]:
    """The arguments of ``agent_logic`` that hold final replies to a schema.

    Args:
        model_cls: The pydantic model every final reply must fit, or its ``"module:Model"``
            path; None leaves it to each state's ``meta.output_model``.
        retries: How often a reply that does not fit is asked for again (``RETRY_OUTPUT``).
            Each time is a model turn and counts against every budget.
        use_instructor: See `json_parser`.

    Returns:
        ``output_model``, ``max_output_retries`` and ``output_parser``, for
        ``agent_logic(model, tools, **structured_output(Model))`` or ``run_agent``.

    Raises:
        AgentConfigError: The model cannot be resolved, ``retries`` is no int >= 0, or
            ``use_instructor=True`` without instructor.

    Source: xstate-statemachine, agents reference: structured output.

    Example:
        >>> sorted(structured_output(retries=1, use_instructor=False))
        ['max_output_retries', 'output_model', 'output_parser']
    """
    if type(retries) is not int or retries < 0:
        raise AgentConfigError("structured_output: retries must be an int >= 0")
    if model_cls is not None:
        model_cls = shape_of(model_cls).model
    return {
        "output_model": model_cls,
        "max_output_retries": retries,
        "output_parser": json_parser(use_instructor),
    }


def validate_structured(
    model_cls: OutputModel, value: Any, *, use_instructor: bool | None = None
) -> tuple[bool, Any]:
    """Check one value as the loop checks a reply.

    Args:
        model_cls: The pydantic model, or its ``"module:Model"`` path.
        value: Reply text, a JSON value, a pydantic model's instance, or the result of a
            pydantic-ai run, whose ``output`` is taken. An instance is checked anew: it may
            have been changed since it was made.
        use_instructor: See `json_parser`.

    Returns:
        ``(True, the model dumped as JSON)``, or ``(False, what is wrong)``: declared fields and
        pydantic's own words, never a value.

    Raises:
        AgentConfigError: The model cannot be resolved, or ``use_instructor=True`` without
            instructor.

    Source: xstate-statemachine, agents reference: structured output.

    Example:
        >>> class Order(pydantic.BaseModel):
        ...     order_id: int = pydantic.Field(gt=0)
        >>> validate_structured(Order, '{"order_id": 42}')
        (True, {'order_id': 42})
        >>> validate_structured(Order, {"order_id": -1})
        (False, 'order_id: Input should be greater than 0')
    """
    shape = shape_of(model_cls)
    parser = json_parser(use_instructor)
    if not isinstance(value, pydantic.BaseModel | Mapping | list) and hasattr(value, "output"):
        value = value.output
    if isinstance(value, str):
        return shape.read(value, parser)
    if isinstance(value, pydantic.BaseModel):
        try:
            value = value.model_dump(mode="json", round_trip=True, by_alias=False, warnings=False)
        except Exception:
            return False, NOT_JSON
        return shape.fit(value, by_name=True)
    # Through the strict parser, so that it holds nothing that a reply could not hold.
    try:
        text = to_json(value, inf_nan_mode="constants").decode()
    except Exception:
        return False, NOT_JSON
    return shape.read(text, json_parser(False))


_WRONG: Final = "output_model must be a pydantic model class or 'module:Model'"


def shape_of(model: Any) -> Shape:
    """The shape of a pydantic model, or of the one a ``"module:Model"`` path leads to.

    The path is imported, so it must be the wiring's own: nothing of a snapshot comes here.

    Raises:
        AgentConfigError: It is neither.
    """
    if isinstance(model, type) and issubclass(model, pydantic.BaseModel):
        return _complete(model)
    if not isinstance(model, str):
        raise AgentConfigError(_WRONG)
    module, _, name = model.partition(":")
    cause: Exception | None = None
    found: Any = None
    try:
        found = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except Exception as error:  # the module's own code runs, and may raise anything
        found, cause = None, error
    if isinstance(found, type) and issubclass(found, pydantic.BaseModel):
        return _complete(found)
    raise AgentConfigError(
        f"output_model {model!r} cannot be resolved; write 'package.module:Model', a pydantic model"
    ) from cause


def _complete(model: type[pydantic.BaseModel]) -> Shape:
    try:
        model.model_rebuild()
    except Exception as error:
        raise AgentConfigError(
            f"output_model {model.__name__} cannot be resolved: one of its types is not defined yet"
        ) from error
    return _shape(model)


@functools.lru_cache(maxsize=256)
def _shape(model: type[pydantic.BaseModel]) -> Shape:
    return Shape(model)
