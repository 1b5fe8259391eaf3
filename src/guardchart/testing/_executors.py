"""Executors that play a script: requests are recorded, answers are replayed, refusals simulated."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from guardchart.agents import AgentRequestExecutors, Generated
from guardchart.agents._requests import AgentExecutorInfo, as_generated
from guardchart.errors import AgentConfigError, AgentError
from guardchart.kernel import Event

__all__ = ["Refusal", "ScriptedExecutors"]

Slot = Literal["generate_text", "stream_text", "decide", "user_input"]

_SLOTS: Final[tuple[Slot, ...]] = ("generate_text", "stream_text", "decide", "user_input")


@dataclass(frozen=True, slots=True)
class Refusal:
    """A model that will not: a decision chooses nothing, a text is the refusal itself.

    Attributes:
        reason: Its words.

    Example:
        >>> Refusal("I would rather not.").reason
        'I would rather not.'
    """

    reason: str = "the model refused"


class ScriptedExecutors:
    """Executors for tests: one script for each slot, one item for each call.

    An item of any slot may be a value, a `Generated`, an exception (which is raised), a function
    of the request, ``{"hang": True}`` (an async call that never answers) or a `Refusal`. Of
    ``decide`` it may also be an event: its type, or ``{"type", **payload}``. Of ``stream_text`` a
    list of texts is streamed chunk by chunk.

    Args:
        generate_text: The script of that slot; None leaves the slot empty, so that wiring is
            checked as it would be.
        stream_text: As above.
        decide: As above.
        user_input: As above.
        is_async: Whether the executors are awaited; False pairs with the sync engine.

    Attributes:
        requests: Every request that came, oldest first.

    Example:
        >>> from guardchart.agents import create_decision_logic, resolve_decision_sync
        >>> from guardchart.testing import Refusal, ScriptedExecutors
        >>> script = ScriptedExecutors(decide=[Refusal(), "FLEE"], is_async=False)
        >>> request = create_decision_logic(allowed_events=["ATTACK", "FLEE"]).request()
        >>> resolve_decision_sync(request, script.decide)
        {'type': 'FLEE'}
        >>> [attempt.reason for attempt in script.requests[1].attempts]
        ['the model refused']
    """

    def __init__(
        self,
        *,
        generate_text: Iterable[Any] | None = None,
        stream_text: Iterable[Any] | None = None,
        decide: Iterable[Any] | None = None,
        user_input: Iterable[Any] | None = None,
        is_async: bool = True,
    ) -> None:
        given: dict[Slot, Iterable[Any] | None] = {
            "generate_text": generate_text,
            "stream_text": stream_text,
            "decide": decide,
            "user_input": user_input,
        }
        scripts: dict[Slot, _Script | _Replay] = {
            slot: _Script(slot, each) for slot, each in given.items() if each is not None
        }
        self._set_up(scripts, is_async)

    def _set_up(self, scripts: Mapping[Slot, _Script | _Replay], is_async: bool) -> None:
        self.requests: list[Any] = []
        self._results: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        self._scripts = scripts
        self._players: dict[str, Any] = {slot: _Player(self, slot, is_async) for slot in scripts}

    @property
    def generate_text(self) -> Any:
        """The executor of that slot, or None."""
        return self._players.get("generate_text")

    @property
    def stream_text(self) -> Any:
        """The executor of that slot, or None."""
        return self._players.get("stream_text")

    @property
    def decide(self) -> Any:
        """The executor of that slot, or None."""
        return self._players.get("decide")

    @property
    def user_input(self) -> Any:
        """The executor of that slot, or None."""
        return self._players.get("user_input")

    @property
    def options(self) -> dict[str, Any]:
        """The executors as keyword arguments of ``run_agent``; empty slots are left out."""
        return dict(self._players)

    @property
    def executors(self) -> AgentRequestExecutors:
        """The executors for ``execute_agent_request``."""
        return AgentRequestExecutors(**self._players)

    @property
    def recording(self) -> list[dict[str, Any]]:
        """What came and what was answered, as JSON: ``{"slot", "request", "output"}`` each.

        A call that raised, or that still hangs, has no ``output``.

        Raises:
            AgentError: A request holds something that is not JSON.
        """
        with self._lock:
            return [{**each, "request": each["request"].to_json()} for each in self._results]

    @classmethod
    def replaying(
        cls, recording: Sequence[Mapping[str, Any]], *, is_async: bool = True
    ) -> ScriptedExecutors:
        """Executors that answer what a recording says, and refuse any other request.

        Requests are told apart by their id and their number of attempts, so that those of
        parallel states may come in any order.

        Args:
            recording: What `recording` gave.
            is_async: As for the constructor.

        Raises:
            AgentConfigError: It is no recording.

        Example:
            >>> from guardchart.agents import AgentTextRequest
            >>> first = ScriptedExecutors(generate_text=["hi"], is_async=False)
            >>> request = AgentTextRequest(id="greet", prompt="Say hi.")
            >>> first.generate_text(request)
            'hi'
            >>> again = ScriptedExecutors.replaying(first.recording, is_async=False)
            >>> again.generate_text(request).output
            'hi'
        """
        by_slot: dict[Slot, _Replay] = {}
        for each in recording:
            slot: Any = each.get("slot")
            if slot not in _SLOTS or not isinstance(each.get("request"), Mapping):
                raise AgentConfigError("replaying: an entry is {'slot', 'request', 'output'}")
            by_slot.setdefault(slot, _Replay(slot)).keep(each)
        made = cls.__new__(cls)
        made._set_up(by_slot, is_async)
        return made

    def assert_played(self) -> None:
        """Fail where a script was not played to its end.

        Raises:
            AssertionError: Items are left; the message says how many of which slot.
        """
        left = {slot: script.left for slot, script in self._scripts.items() if script.left}
        if left:
            raise AssertionError(f"not played: {left}")

    def _take(self, slot: Slot, request: Any) -> tuple[Any, dict[str, Any]]:
        entry: dict[str, Any] = {"slot": slot, "request": request}
        with self._lock:
            self.requests.append(request)
            self._results.append(entry)
            item = self._scripts[slot].take(request)
        if callable(item) and not isinstance(item, type):
            item = item(request)
        if isinstance(item, BaseException) or (
            isinstance(item, type) and issubclass(item, BaseException)
        ):
            raise item
        return item, entry


class _Script:
    """Items, one after another."""

    def __init__(self, slot: Slot, items: Iterable[Any]) -> None:
        self._slot = slot
        self._items = list(items)
        self._next = 0

    @property
    def left(self) -> int:
        return len(self._items) - self._next

    def take(self, request: Any) -> Any:
        if not self.left:
            return AgentError(
                f"ScriptedExecutors: the {self._slot} script is exhausted "
                f"after {self._next} call(s)"
            )
        self._next += 1
        return self._items[self._next - 1]


class _Replay:
    """Recorded answers, found by the id and the number of attempts of a request."""

    def __init__(self, slot: Slot) -> None:
        self._slot = slot
        self._kept: dict[tuple[str, int], list[Mapping[str, Any]]] = {}

    def keep(self, entry: Mapping[str, Any]) -> None:
        self._kept.setdefault(_place(entry["request"]), []).append(entry)

    @property
    def left(self) -> int:
        return sum(map(len, self._kept.values()))

    def take(self, request: Any) -> Any:
        came = request.to_json()
        found = self._kept.get(_place(came))
        if not found:
            return AssertionError(f"no recorded request of {self._slot} has the id {came['id']!r}")
        recorded = found[0]["request"]
        names = sorted({*came, *recorded})
        changed = [name for name in names if came.get(name) != recorded.get(name)]
        if changed:
            return AssertionError(
                f"request {came['id']!r} differs from the recorded one: {changed}"
            )
        entry = found.pop(0)
        if "output" not in entry:
            return AgentError("the recorded call did not answer")
        return Generated(entry["output"])


def _place(request: Mapping[str, Any]) -> tuple[str, int]:
    return str(request.get("id")), len(request.get("attempts") or ())


class _Player:
    """One slot as an executor."""

    bounded = True

    def __init__(self, kit: ScriptedExecutors, slot: Slot, is_async: bool) -> None:
        self._kit = kit
        self._slot = slot
        self.is_async = is_async

    def __call__(self, request: Any, info: AgentExecutorInfo | None = None) -> Any:
        return self._later(request, info) if self.is_async else self._now(request, info)

    def _now(self, request: Any, info: AgentExecutorInfo | None) -> Any:
        item, entry = self._kit._take(self._slot, request)
        if _hangs(item):
            raise AgentConfigError('ScriptedExecutors: {"hang": True} needs is_async=True')
        return self._given(item, entry, info)

    async def _later(self, request: Any, info: AgentExecutorInfo | None) -> Any:
        item, entry = self._kit._take(self._slot, request)
        await asyncio.sleep(0)
        if _hangs(item):
            await asyncio.get_running_loop().create_future()
        return self._given(item, entry, info)

    def _given(self, item: Any, entry: dict[str, Any], info: AgentExecutorInfo | None) -> Any:
        result = self._result(item, info)
        entry["output"] = as_generated(result).output if self._slot != "decide" else _plain(result)
        return result

    def _result(self, item: Any, info: AgentExecutorInfo | None) -> Any:
        if isinstance(item, Generated):
            return item
        if self._slot == "decide":
            return _decision(item)
        if isinstance(item, Refusal):
            return item.reason
        if self._slot == "stream_text" and isinstance(item, list | tuple):
            for chunk in item:
                if info is not None and info.on_chunk is not None:
                    info.on_chunk(chunk)
            return "".join(item)
        return item


def _hangs(item: Any) -> bool:
    return isinstance(item, Mapping) and item == {"hang": True}


def _decision(item: Any) -> Any:
    if item is None or isinstance(item, Refusal):
        return {"event": None, "reason": item.reason if item is not None else None}
    if isinstance(item, str):
        return {"event": {"type": item}}
    if isinstance(item, Event):
        return {"event": {**item.payload, "type": item.type}}
    if isinstance(item, Mapping) and "event" not in item and "type" in item:
        return {"event": dict(item)}
    return item


def _plain(result: Any) -> Any:
    return result.output if isinstance(result, Generated) else result
