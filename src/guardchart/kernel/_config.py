"""Read a Stately/XState chart: JSON or a dict in, checked specifications out.

Nothing is looked up here, neither targets nor names of logic: this module knows which keys
may stand where and what shapes they take. Every error carries the JSON path of its cause.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from guardchart.errors import ChartError
from guardchart.kernel._delays import literal_delay
from guardchart.kernel._specs import (
    MISSING,
    ActionSpec,
    ChartSpec,
    GuardSpec,
    InvokeSpec,
    NodeSpec,
    Path,
    TransitionSpec,
    qualified_name,
)

DEFAULT_MAX_MICROSTEPS: Final = 1_000


_COMMON = {"id", "type", "tags", "meta", "description"}
_FINAL = _COMMON | {"entry", "exit", "output"}
_HISTORY = _COMMON | {"history", "target"}
_STATE = _COMMON | {
    "initial", "states", "on", "after", "always", "onDone", "entry", "exit", "invoke", "output",
    "history", "target",
}  # fmt: skip
_ROOT = {"key", "version", "context", "strict", "actionErrorPolicy", "maxMicrosteps"}
_TRANSITION = {"target", "guard", "actions", "reenter", "description", "meta"}
_INVOKE = {
    "src", "id", "input", "onDone", "onError", "onSnapshot", "description", "meta",
}  # fmt: skip
_IGNORED_ROOT = {
    "$schema", "types", "schemas", "triggers", "predictableActionArguments",
    "preserveActionOrder", "tsTypes",
}  # fmt: skip
_REFUSED = {
    "cond": "use 'guard'",
    "internal": "use 'reenter' (its opposite)",
    "data": "use 'output' on a final state, 'input' on an invoke",
    "activities": "use 'invoke'",
    "in": 'use the guard {"type": "stateIn", "state": "#id"}',
    "delimiter": "state paths are always joined by '.'",
    "options": "give guards, actions, services and delays as logic",
    "systemId": "use the invoke's 'id'",
    "context": "a transition changes the context by an action",
    "timeout": "use 'after' on the invoking state",
    "heartbeat": "use 'after' on the invoking state",
    "retry": "use 'onError' and 'after' on the invoking state",
}
_POLICIES = ("fail", "rollback", "continue")
_TYPES = ("atomic", "compound", "parallel", "final", "history")
_WILDCARD = re.compile(r"\*|[^*]+\.\*")
_COMPOSITES = ("and", "or", "not", "stateIn")


@dataclass(slots=True)
class _Reader:
    """Reads one chart and remembers what it passed over."""

    ignored: list[str] = field(default_factory=list)

    def keys(
        self,
        value: Mapping[str, Any],
        allowed: Iterable[str],
        path: Path,
        what: str,
        ignored: Iterable[str] = (),
    ) -> None:
        for key in value:
            if not isinstance(key, str):
                raise ChartError("a key must be text", path=path)
            if key in allowed:
                continue
            if key in ignored or key.startswith("x-"):
                self.ignored.append(_join(path, key))
            elif key in _REFUSED:
                raise ChartError(f"{key!r} is not supported: {_REFUSED[key]}", path=path)
            else:
                raise ChartError(f"unknown key {key!r} in {what}", path=path)

    def chart(self, config: Mapping[str, Any]) -> ChartSpec:
        _no_templates(config, "$")
        root = self.node(config, "$", "", root=True)
        chart_id = config.get("id", config.get("key", "(machine)"))
        version = config.get("version")
        if version is not None and not isinstance(version, str):
            raise ChartError("'version' must be text", path="$.version")
        context = config.get("context", {})
        if not isinstance(context, Mapping) or not all(isinstance(k, str) for k in context):
            raise ChartError("'context' must be an object", path="$.context")
        policy = config.get("actionErrorPolicy", "fail")
        if policy not in _POLICIES:
            raise ChartError(f"must be one of {', '.join(_POLICIES)}", path="$.actionErrorPolicy")
        limit = config.get("maxMicrosteps", DEFAULT_MAX_MICROSTEPS)
        if type(limit) is not int or limit < 1:
            raise ChartError("must be a whole number above 0", path="$.maxMicrosteps")
        strict = _flag(config.get("strict", False), "$.strict")
        return ChartSpec(
            _name(chart_id, "$.id"), version, context, strict, policy, limit, root
        )  # fmt: skip

    def node(self, config: Any, path: Path, key: str, *, root: bool = False) -> NodeSpec:
        if not isinstance(config, Mapping):
            raise ChartError("a state must be an object", path=path)
        kind = _node_type(config, path, root)
        allowed = {"final": _FINAL, "history": _HISTORY}.get(kind, _STATE - {"history", "target"})
        ignored = {"order"} | (_IGNORED_ROOT if root else set())
        if root:
            allowed = allowed | _ROOT
            if config.get("profile") == "xstate":
                ignored = ignored | {"profile"}
        if kind == "parallel":
            allowed, ignored = allowed - {"initial"}, ignored | {"initial"}
        if kind in ("final", "history"):
            for extra in sorted((_STATE - allowed) & set(config)):
                raise ChartError(f"a {kind} state takes no {extra!r}", path=path)
        self.keys(config, allowed, path, f"a {kind} state", ignored)
        states = self.states(config, path)
        return NodeSpec(
            key=key,
            path=path,
            id=None if config.get("id") is None else _name(config["id"], path + ".id"),
            type=kind,
            initial=self.initial(config, path) if kind == "compound" else None,
            states=states,
            on=self.on(config.get("on"), path + ".on"),
            always=self.transitions(config.get("always", []), path + ".always"),
            after=self.after(config.get("after"), path + ".after"),
            on_done=self.on_done(config, path, kind),
            entry=self.actions(config.get("entry"), path + ".entry"),
            exit=self.actions(config.get("exit"), path + ".exit"),
            invokes=self.invokes(config.get("invoke"), path + ".invoke"),
            tags=frozenset(_texts(config.get("tags"), path + ".tags")),
            output=config.get("output", MISSING),
            history=_history(config.get("history"), path) if kind == "history" else "",
            target=_texts(config.get("target"), path + ".target"),
            meta=self.meta(config.get("meta"), path + ".meta"),
            description=_description(config, path),
        )

    def states(self, config: Mapping[str, Any], path: Path) -> Mapping[str, NodeSpec]:
        raw = config.get("states") or {}
        if not isinstance(raw, Mapping):
            raise ChartError("'states' must be an object", path=path + ".states")
        found = {}
        for key, value in raw.items():
            here = _join(path + ".states", key)
            if not isinstance(key, str) or not key:
                raise ChartError("a state's key must be text", path=here)
            if "." in key or key.startswith("#"):
                raise ChartError("a state's key holds no '.' and starts with no '#'", path=here)
            found[key] = self.node(value, here, key)
        return found

    def initial(self, config: Mapping[str, Any], path: Path) -> TransitionSpec:
        raw = config.get("initial")
        here = path + ".initial"
        if raw is None:
            raise ChartError("a state with children needs 'initial'", path=path)
        if isinstance(raw, Mapping):
            self.keys(raw, {"target", "actions", "description", "meta"}, here, "'initial'")
            spec = self.transition(raw, here)
        else:
            spec = self.transition({"target": raw}, here)
        if not spec.targets:
            raise ChartError("'initial' needs a target", path=here)
        return spec

    def on(self, raw: Any, path: Path) -> tuple[tuple[str, tuple[TransitionSpec, ...]], ...]:
        if raw is None:
            return ()
        if not isinstance(raw, Mapping):
            raise ChartError("'on' must be an object", path=path)
        found = []
        for descriptor, value in raw.items():
            here = _join(path, descriptor)
            if descriptor == "":
                raise ChartError("an eventless transition is written under 'always'", path=here)
            if not isinstance(descriptor, str):
                raise ChartError("an event descriptor must be text", path=here)
            if "*" in descriptor and not _WILDCARD.fullmatch(descriptor):
                raise ChartError("write a wildcard as '*' or 'a.*'", path=here)
            found.append((descriptor, self.transitions(value, here)))
        return tuple(found)

    def on_done(
        self, config: Mapping[str, Any], path: Path, kind: str
    ) -> tuple[TransitionSpec, ...]:
        if "onDone" not in config:
            return ()
        if kind not in ("compound", "parallel"):
            raise ChartError("'onDone' needs a state with children", path=path + ".onDone")
        return self.transitions(config["onDone"], path + ".onDone")

    def after(self, raw: Any, path: Path) -> tuple[tuple[str, tuple[TransitionSpec, ...]], ...]:
        if raw is None:
            return ()
        if not isinstance(raw, Mapping):
            raise ChartError("'after' must be an object", path=path)
        found: dict[str, tuple[TransitionSpec, ...]] = {}
        for delay, value in raw.items():
            here = _join(path, delay)
            if isinstance(delay, bool) or not isinstance(delay, (str, int, float)):
                raise ChartError("a delay is a number, a name or an ISO-8601 text", path=here)
            if isinstance(delay, float) and delay.is_integer():
                delay = int(delay)
            name = str(delay)
            if not name or name in found:
                raise ChartError("this delay is empty or given twice", path=here)
            literal_delay(name, here)
            found[name] = self.transitions(value, here)
        return tuple(found.items())

    def transitions(self, raw: Any, path: Path) -> tuple[TransitionSpec, ...]:
        if isinstance(raw, list | tuple):
            return tuple(self.transition(item, f"{path}[{i}]") for i, item in enumerate(raw))
        return (self.transition({} if raw is None else raw, path),)

    def transition(self, raw: Any, path: Path) -> TransitionSpec:
        if isinstance(raw, str):
            raw = {"target": raw}
        if not isinstance(raw, Mapping):
            raise ChartError("a transition is a target or an object", path=path)
        self.keys(raw, _TRANSITION, path, "a transition", {"order"})
        guard = raw.get("guard")
        return TransitionSpec(
            targets=_texts(raw.get("target"), path + ".target"),
            guard=None if guard is None else self.guard(guard, path + ".guard"),
            actions=self.actions(raw.get("actions"), path + ".actions"),
            reenter=_flag(raw.get("reenter", False), path + ".reenter"),
            description=_description(raw, path),
            meta=self.meta(raw.get("meta"), path + ".meta"),
            path=path,
        )

    def actions(self, raw: Any, path: Path) -> tuple[ActionSpec, ...]:
        if raw is None:
            return ()
        if isinstance(raw, list | tuple):
            return tuple(self.action(item, f"{path}[{i}]") for i, item in enumerate(raw))
        return (self.action(raw, path),)

    def action(self, raw: Any, path: Path) -> ActionSpec:
        if callable(raw) and not isinstance(raw, str):
            return ActionSpec(qualified_name(raw), raw, None, path)
        params = None
        if isinstance(raw, Mapping):
            self.keys(raw, {"type", "params"}, path, "an action")
            params = raw.get("params")
            raw = raw.get("type")
        name = _name(raw, path)
        if name in ("core.assign", "xstate.assign"):
            raise ChartError("'core.assign' is not supported: name an action", path=path)
        return ActionSpec(name, None, params, path)

    def guard(self, raw: Any, path: Path) -> GuardSpec:
        if callable(raw) and not isinstance(raw, str):
            return GuardSpec("name", qualified_name(raw), raw, None, (), path)
        if isinstance(raw, str):
            if raw.startswith("!"):
                inner = self.guard(raw[1:], path)
                return GuardSpec("not", "", None, None, (inner,), path)
            return GuardSpec("name", _name(raw, path), None, None, (), path)
        if not isinstance(raw, Mapping):
            raise ChartError("a guard is a name or an object", path=path)
        kind = _name(raw.get("type"), path + ".type")
        if kind not in _COMPOSITES:
            self.keys(raw, {"type", "params"}, path, "a guard")
            return GuardSpec("name", kind, None, raw.get("params"), (), path)
        if kind == "stateIn":
            self.keys(raw, {"type", "state"}, path, "a 'stateIn' guard")
            return GuardSpec(
                kind, _name(raw.get("state"), path + ".state"), None, None, (), path
            )  # fmt: skip
        if kind == "not":
            self.keys(raw, {"type", "guard"}, path, "a 'not' guard")
            return GuardSpec(
                kind, "", None, None, (self.guard(raw.get("guard"), path + ".guard"),), path
            )  # fmt: skip
        self.keys(raw, {"type", "guards"}, path, f"an {kind!r} guard")
        parts = raw.get("guards")
        if not isinstance(parts, list | tuple) or not parts:
            raise ChartError("'guards' must be a list that is not empty", path=path)
        inner_guards = tuple(self.guard(g, f"{path}.guards[{i}]") for i, g in enumerate(parts))
        return GuardSpec(kind, "", None, None, inner_guards, path)

    def invokes(self, raw: Any, path: Path) -> tuple[InvokeSpec, ...]:
        if raw is None:
            return ()
        if isinstance(raw, list | tuple):
            return tuple(self.invoke(item, f"{path}[{i}]") for i, item in enumerate(raw))
        return (self.invoke(raw, path),)

    def invoke(self, raw: Any, path: Path) -> InvokeSpec:
        if not isinstance(raw, Mapping):
            raw = {"src": raw}
        self.keys(raw, _INVOKE, path, "an invoke")
        src = raw.get("src")
        if isinstance(src, str) or src is None:
            src = _name(src, path + ".src")
        events = {
            key: self.transitions(raw.get(key, []), f"{path}.{key}")
            for key in ("onDone", "onError", "onSnapshot")
        }
        return InvokeSpec(
            id=None if raw.get("id") is None else _name(raw["id"], path + ".id"),
            src=src,
            input=raw.get("input"),
            on_done=events["onDone"],
            on_error=events["onError"],
            on_snapshot=events["onSnapshot"],
            description=_description(raw, path),
            meta=self.meta(raw.get("meta"), path + ".meta"),
            path=path,
        )

    def meta(self, raw: Any, path: Path) -> Mapping[str, Any]:
        if raw is None:
            return {}
        if not isinstance(raw, Mapping):
            raise ChartError("'meta' must be an object", path=path)
        self.ignored.extend(_join(path, k) for k in raw if str(k).startswith("@statelyai."))
        return raw


def read_chart(config: Mapping[str, Any] | str) -> ChartSpec:
    """Check a chart and return its specification.

    Args:
        config: the chart as a mapping or JSON text. It is never changed.

    Raises:
        ChartError: with the JSON path of the first thing that is wrong.

    Warns:
        UserWarning: once, naming the keys that were passed over.
    """
    if isinstance(config, str):
        config = _parse(config)
    if not isinstance(config, Mapping):
        raise ChartError("a chart is an object or JSON text")
    reader = _Reader()
    try:
        spec = reader.chart(config)
    except RecursionError:
        raise ChartError("the chart is nested too deeply") from None
    if reader.ignored:
        names = ", ".join(reader.ignored)
        warnings.warn(f"chart {spec.id!r}: ignored {names}", UserWarning, stacklevel=3)
    return spec


def copy_config(value: Any) -> Any:
    """Copy the containers of a chart; functions and machines are shared."""
    if isinstance(value, Mapping):
        return {key: copy_config(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [copy_config(item) for item in value]
    return value


def _parse(text: str) -> Any:
    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(items)
        if len(found) != len(items):
            raise ChartError("a key is given twice in one object")
        return found

    def constant(name: str) -> Any:
        raise ChartError(f"{name} is not JSON")

    try:
        return json.loads(text, object_pairs_hook=pairs, parse_constant=constant)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise ChartError(f"not valid JSON: {error.msg} ({where})") from None
    except RecursionError:
        raise ChartError("the chart is nested too deeply") from None


def _node_type(config: Mapping[str, Any], path: Path, root: bool) -> str:
    children = bool(config.get("states"))
    kind = config.get("type")
    if kind is None:
        if children:
            return "compound"
        return "history" if config.get("history") and not root else "atomic"
    if kind not in _TYPES:
        raise ChartError(f"must be one of {', '.join(_TYPES)}", path=path + ".type")
    if root and kind in ("final", "history"):
        raise ChartError(f"the root cannot be a {kind} state", path=path + ".type")
    if children and kind in ("atomic", "final", "history"):
        raise ChartError(f"{kind} state has children", path=path + ".states")
    if kind in ("compound", "parallel") and not children:
        raise ChartError(f"{kind} state has no children", path=path)
    return str(kind)


def _history(raw: Any, path: Path) -> str:
    if raw is None or raw is True or raw == "shallow":
        return "shallow"
    if raw == "deep":
        return "deep"
    raise ChartError("must be 'shallow' or 'deep'", path=path + ".history")


def _join(path: Path, key: Any) -> Path:
    if isinstance(key, str) and re.fullmatch(r"[A-Za-z_$@][\w$-]*", key):
        return f"{path}.{key}"
    return f"{path}[{json.dumps(str(key))}]"


def _name(raw: Any, path: Path) -> str:
    if not isinstance(raw, str) or not raw:
        raise ChartError("must be a text that is not empty", path=path)
    return raw


def _flag(raw: Any, path: Path) -> bool:
    if not isinstance(raw, bool):
        raise ChartError("must be true or false", path=path)
    return raw


def _texts(raw: Any, path: Path) -> tuple[str, ...]:
    if raw is None:
        return ()
    if isinstance(raw, str):
        return (_name(raw, path),)
    if isinstance(raw, list | tuple):
        return tuple(_name(item, f"{path}[{i}]") for i, item in enumerate(raw))
    raise ChartError("must be text or a list of texts", path=path)


def _description(raw: Mapping[str, Any], path: Path) -> str | None:
    text = raw.get("description")
    if text is not None and not isinstance(text, str):
        raise ChartError("must be text", path=path + ".description")
    return text


def _no_templates(value: Any, path: Path) -> None:
    """Refuse ``{{ }}`` wherever it would be taken for an expression."""
    if isinstance(value, str):
        if "{{" in value and "}}" in value:
            raise ChartError("'{{ }}' expressions are not supported: name logic", path=path)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if key not in ("meta", "description"):
                _no_templates(item, _join(path, key))
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            _no_templates(item, f"{path}[{i}]")
