"""The queue of one interpreter, and one event at a time: hook, kernel, receipt.

`InterpreterBase` carries out what a step asks for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final

from guardchart.errors import QueueFullError, StepError
from guardchart.kernel import EngineEvent, Event, Receipt, Snapshot, failed, resolve, step
from guardchart.runtime._core import ENGINE, OUTSIDE, AnyEvent, Entry, InterpreterCore
from guardchart.runtime._logic import BeforeStep

__all__ = ["InterpreterSteps"]

_NOTHING: Final = BeforeStep()


class InterpreterSteps(InterpreterCore):
    """How events wait and are stepped; see `InterpreterBase`."""

    __slots__ = ()

    # The queue

    def post(self, event: str | Mapping[str, Any] | Event, **payload: Any) -> None:
        """Queue an event from inside (a service, a tool); safe from any thread, never waits.

        Such an event never decides an approval.
        """
        raise NotImplementedError

    def _accept(self, event: AnyEvent, origin: str) -> Entry:
        """Queue an event and process it, unless something is being processed.

        Hooks see it once it is queued and before it is processed, so that what they send in
        turn comes after it.
        """
        return self._accept_entry(Entry(event, origin))

    def _accept_entry(self, entry: Entry) -> Entry:
        queue = self._queue
        if entry.origin is not ENGINE:
            self._check_room(len(queue))
        entry.counted = self._driving
        queue.append(entry)
        # While a step is computed nothing may write context: hooks get to see it right after.
        if self._plugins.items and not self._stepping:
            self._show_entry(entry)
        self._drive()
        return entry

    def _show_entry(self, entry: Entry) -> None:
        if entry.shown or entry.origin is ENGINE:
            return
        entry.shown = True
        driving, self._driving = self._driving, True
        try:
            self._plugins.call("on_before_send", self, entry.event)
        finally:
            self._driving = driving

    def _check_room(self, waiting: int) -> None:
        if waiting >= self.max_queue:
            raise QueueFullError(f"{self.id}: {self.max_queue} events are waiting already")

    def _drive(self) -> None:
        """Process the queue to its end, macrostep by macrostep."""
        if self._driving:
            return
        queue = self._queue
        self._driving = True
        try:
            while queue:
                self._take(queue.popleft())
        finally:
            self._driving = False

    def _take(self, entry: Entry) -> None:
        self._streak = self._streak + 1 if entry.counted else 0
        if self._streak > self.max_queue:
            self._cut(entry)
            return
        if self._plugins.items:
            self._show_entry(entry)
        try:
            entry.receipt = self._apply(entry.event, entry.origin)
        finally:
            self._answer(entry)

    def _answer(self, entry: Entry) -> None:
        if entry.waiter is not None:
            receipt = entry.receipt or self._refused("dropped", f"the machine is {self._state}")
            entry.waiter(receipt)

    def _cut(self, entry: Entry) -> None:
        """Events breed events without end: drop what is left of them."""
        error = StepError(f"{self.id}: more than {self.max_queue} events followed from one")
        self._fault(error)
        dropped = [entry, *(each for each in self._queue if each.counted)]
        kept = [each for each in self._queue if not each.counted]
        self._queue.clear()
        self._queue.extend(kept)
        self._streak = 0
        for each in dropped:
            each.receipt = self._refused("dropped", str(error), error)
            self._answer(each)

    # One step

    def _apply(self, event: AnyEvent, origin: str) -> Receipt:
        """One event, one macrostep: hook, kernel, effects. Raises no ``Exception``."""
        if self._state != "running":
            return self._refused("dropped", f"the machine is {self._state}")
        if self._hook is None and not self._plugins.items:
            return self._step(event)
        came = event
        if type(event) is EngineEvent and resolve(self.snapshot, event) is None:
            return self._step(event)
        denied: str | None = None
        if self._hook is not None:
            verdict = self._verdict or self._ask_hook(event, origin)
            self._verdict = None
            if isinstance(verdict, Exception):
                self._fault(verdict)
                if origin is not ENGINE:
                    reason = f"{type(verdict).__name__} while deciding"
                    return self._refused("denied", reason, verdict)
                # What the engine reports happened: a result nobody could check is a failure.
                if isinstance(event, EngineEvent) and event.kind == "done":
                    event = failed(event.key, verdict)
            else:
                denied = verdict.denied
                if verdict.batch_no is not None:
                    self._snapshot = self.snapshot.replace(batch_no=verdict.batch_no)
                if verdict.event is not None:
                    event = verdict.event
                elif denied is not None:
                    return self._refused("denied", denied)
        if self._plugins.items:
            seen = resolve(self.snapshot, event) if isinstance(event, EngineEvent) else event
            if isinstance(came, Event) and seen is not None and seen.type == came.type:
                seen = came
            self._plugins.call("on_event_received", self, seen)
            if self._state != "running":
                return self._refused("dropped", f"the machine is {self._state}")
        receipt = self._step(event)
        return receipt if denied is None else receipt._replace(status="denied", reason=denied)

    def _step(self, event: AnyEvent) -> Receipt:
        before = self._snapshot
        assert before is not None
        self._stepping = True
        try:
            after, effects, receipt = step(
                self.machine, before, event, now=self.clock.now_ms(), host=self
            )
        except Exception as error:
            return self._failed_step(event, error)
        finally:
            self._stepping = False
        if receipt.faults:
            for fault in receipt.faults:
                self._fault(fault)
        if after is not before:
            self._snapshot = after
            if self._observed or after[1] != "active":
                self._commit(after, effects, receipt, event, before[3].ids)
            elif effects:
                self._perform(effects, event)
        return receipt

    def _failed_step(self, event: AnyEvent, error: Exception) -> Receipt:
        """The step could not be completed. The snapshot stays, but no timer or child is left
        waiting for ever: a result becomes a failure, and what fails again is forgotten.
        """
        self._stepping = False
        self._fault(error)
        if isinstance(event, EngineEvent):
            if event.kind == "done":
                return self._step(failed(event.key, error))
            self._forget(event)
        return self._refused("denied", str(error), error)

    def _forget(self, event: EngineEvent) -> None:
        snapshot, key = self.snapshot, event.key
        children = snapshot.children.copy()
        name = key.rpartition("@")[0]
        if event.kind == "failed" and name in children and children[name].key == key:
            ended = (
                {} if children[name].spawned else {name: children[name]._replace(status="error")}
            )
            children = {**{n: c for n, c in children.items() if n != name}, **ended}
        timers = {each: at for each, at in snapshot.timers.items() if each != key}
        sends = {each: at for each, at in snapshot.sends.items() if each != key}
        self._snapshot = snapshot.replace(
            rev=snapshot.rev + 1,
            children=MappingProxyType(children),
            timers=MappingProxyType(timers),
            sends=MappingProxyType(sends),
        )

    def _ask_hook(self, event: AnyEvent, origin: str) -> BeforeStep | Exception:
        """The hook's answer, or what it raised; may run on a worker thread."""
        assert self._hook is not None
        try:
            answer = self._hook(
                self.snapshot, event, self.clock.now_ms(), self.host, origin is OUTSIDE
            )
        except Exception as error:
            return error
        return answer if answer is not None else _NOTHING

    def _commit(
        self,
        snapshot: Snapshot,
        effects: Iterable[Any],
        receipt: Receipt,
        event: AnyEvent,
        before: frozenset[str],
    ) -> None:
        """Tell who looks on, and carry out what a step asked for.

        The snapshot is the machine's already.
        """
        raise NotImplementedError

    def _perform(self, effects: Iterable[Any], event: AnyEvent) -> None:
        """Carry out effects, in their order."""
        raise NotImplementedError
