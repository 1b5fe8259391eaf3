"""LangGraph's policies in a compiled chart: retries of tasks, cache and time limit of the model."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from langgraph.cache.base import BaseCache
from langgraph.types import CachePolicy, RetryPolicy

from guardchart.errors import AgentConfigError
from guardchart.langgraph._messages import Conversation
from guardchart.langgraph._reducers import LINEAGE
from guardchart.langgraph._state import is_blank, parse_snapshot, read_key
from guardchart.langgraph._task import (
    APPROVAL,
    ITEM,
    MODEL,
    SCOPE,
    SERVICE,
    STEP,
    TIMER,
    TOOLS,
    GraphSettings,
)

__all__ = ["attempts_of", "cache_of", "check_limits", "limits_of", "of_task"]

_UNTOLD: Final = (LINEAGE, "receipt", "seal", "timers")

_REFUSED: Final = {
    STEP: "it decides what runs",
    APPROVAL: "a person's answer counts once",
    TOOLS: "a cached call would be told as done, an abandoned one runs on unseen",
    SERVICE: "a service of the chart may have side effects",
    TIMER: "it only sleeps",
}


def check_limits(cache_policy: Any, timeout: Any) -> None:
    """Refuse what is not for the model task.

    Raises:
        AgentConfigError: Naming the policy, the task and why.
    """
    _model_only("cache_policy", cache_policy)
    _model_only("timeout", timeout)
    cached = of_task(cache_policy, MODEL)
    if cached is not None and cached.key_func is not CachePolicy().key_func:
        raise AgentConfigError(
            "statechart_graph: cache_policy takes no key_func: an answer belongs to the request it "
            "was given to, and what another turn or thread was told would be passed over"
        )


def limits_of(settings: GraphSettings, cache_policy: Any, timeout: Any) -> dict[str, Any]:
    """What ``add_node`` is given for the model task."""
    limits = {}
    cached, limit = of_task(cache_policy, MODEL), of_task(timeout, MODEL)
    if cached is not None:
        limits["cache_policy"] = dataclasses.replace(cached, key_func=_key_of(settings))
    if limit is not None:
        limits["timeout"] = limit
    return limits


def cache_of(settings: GraphSettings, cache: Any) -> Any:
    """What the graph is compiled with: the app's cache, which is handed answers only."""
    if not settings.caches or not isinstance(cache, BaseCache):
        return cache
    return _Answers(cache, settings.results)


class _Answers(BaseCache[Any]):
    """Keeps no failure of a model, which to LangGraph is a result: who goes back asks anew."""

    def __init__(self, inner: BaseCache[Any], results: str) -> None:
        super().__init__(serde=inner.serde)
        self._inner, self._results = inner, results

    def get(self, keys: Sequence[Any]) -> dict[Any, Any]:
        return self._inner.get(keys)

    async def aget(self, keys: Sequence[Any]) -> dict[Any, Any]:
        return await self._inner.aget(keys)

    def set(self, pairs: Mapping[Any, Any]) -> None:
        if answers := self._answers(pairs):
            self._inner.set(answers)

    async def aset(self, pairs: Mapping[Any, Any]) -> None:
        if answers := self._answers(pairs):
            await self._inner.aset(answers)

    def clear(self, namespaces: Sequence[Any] | None = None) -> None:
        self._inner.clear(namespaces)

    async def aclear(self, namespaces: Sequence[Any] | None = None) -> None:
        await self._inner.aclear(namespaces)

    def _answers(self, pairs: Mapping[Any, Any]) -> dict[Any, Any]:
        return {key: pair for key, pair in pairs.items() if self._is_answer(pair[0])}

    def _is_answer(self, writes: Any) -> bool:
        handed = [value for channel, value in writes if channel == self._results]
        return any("output" in result for value in handed for result in value)


def of_task(value: Any, task: str) -> Any:
    """The part of a policy that is for one task; a bare value is for the model's."""
    if isinstance(value, Mapping):
        return value.get(task)
    return value if task == MODEL else None


def attempts_of(policy: Any) -> Callable[[BaseException], int]:
    """How often LangGraph tries, for an error it would try again after."""
    # One policy is a tuple itself.
    several = isinstance(policy, list | tuple) and not isinstance(policy, RetryPolicy)
    policies = policy if several else [] if policy is None else [policy]

    def attempts(error: BaseException) -> int:
        for each in policies:
            on: Any = each.retry_on
            kinds = (
                on if isinstance(on, type) else tuple(on) if isinstance(on, list | tuple) else ()
            )
            if isinstance(error, kinds) if kinds else on(error):
                return int(each.max_attempts)
        return 1

    return attempts


def _model_only(key: str, value: Any) -> None:
    """A cached tool call tells another thread that it ran; a timed out one runs on unseen."""
    if not isinstance(value, Mapping):
        return
    for task in value:
        if task != MODEL:
            why = _REFUSED.get(task, "there is no such task")
            raise AgentConfigError(
                f"statechart_graph: {key} is for the task {MODEL!r} only, not for {task!r}: {why}"
            )


def _key_of(settings: GraphSettings) -> Callable[[Any], str]:
    """What a cached answer is filed under: all that the model task starts from.

    LangGraph's own key is a pickle, which differs for one state that is held and one that was
    loaded, so that no fork would find what it looks for.
    """
    node = settings.node

    def key(state: Any) -> str:
        snapshot = read_key(state, node.state_key)
        if not is_blank(snapshot):
            # Deadlines, and how the snapshot came about, are nothing that a model is told.
            held = parse_snapshot(snapshot, node.state_key)
            snapshot = {key: each for key, each in held.items() if key not in _UNTOLD}
        said = () if node.messages_key is None else read_key(state, node.messages_key)
        # Two threads that were begun from one snapshot are the same to all but their scope.
        whose = [read_key(state, each) for each in (SCOPE, ITEM)]
        try:
            text = json.dumps([snapshot, [*Conversation(said).before], *whose], sort_keys=True)
        except (TypeError, ValueError, RecursionError):
            # A message may hold what is no JSON. Raising would end the run, at each resume again.
            text = uuid.uuid4().hex
        return hashlib.sha256(text.encode()).hexdigest()

    return key
