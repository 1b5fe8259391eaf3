"""Runs a loaded document on an interpreter, by a clock that moves only when told to."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from guardchart.kernel import DoneEvent, Event, Send, fired, initial_step, step
from guardchart.runtime import Interpreter, SimulatedClock, SyncInterpreter
from tests.conformance.scxml.content import Frame, made, name_of
from tests.conformance.scxml.loader import Document, Invoked
from tests.conformance.scxml.values import Node

LONGEST_MS = 120_000


class Invokes:
    """A plugin that does what SCXML wants done when an event arrives: finalize and autoforward."""

    def on_event_received(self, interpreter: Any, event: Event) -> None:
        document: Document = interpreter.logic.attachments["document"]
        if not document.invokes:
            return
        child = event.invoke_id if isinstance(event, DoneEvent) else event.payload.get("invokeid")
        for name, invoked in document.invokes.items():
            running = interpreter.snapshot.children.get(name)
            if running is None:
                continue
            if name == child and invoked.finalize is not None:
                self.finalize(interpreter, document, invoked, event)
            actor = interpreter.actors.get(f"{interpreter.id}:{name}")
            if actor is not None and invoked.autoforward:
                actor.post(copied(event))

    def finalize(
        self, interpreter: Any, document: Document, invoked: Invoked, event: Event
    ) -> None:
        context = {key: copy.deepcopy(value) for key, value in interpreter.snapshot.context.items()}
        frame = Frame(document, context, event)
        assert invoked.finalize is not None
        if invoked.finalize.elements:
            frame.block(invoked.finalize.elements)
        else:
            data = event.payload.get("data")
            for name, location in _locations(invoked.node):
                if isinstance(data, Mapping) and name in data:
                    frame.model.assign(location, data[name])
        interpreter.update_context(context)


def _locations(node: Node) -> list[tuple[str, str]]:
    params = [(each.get("name"), each.get("location")) for each in node.findall("param")]
    names = [(name, name) for name in (node.get("namelist") or "").split()]
    return names + [(name, location) for name, location in params if location]


def copied(event: Event) -> Event:
    """The event as another session gets it."""
    if isinstance(event, DoneEvent):
        return made(name_of(event), "external", invokeid=event.invoke_id, data=event.data)
    return event


class Run:
    """A document being run by the synchronous interpreter."""

    def __init__(self, document: Document) -> None:
        self.clock = SimulatedClock()
        self.interpreter = SyncInterpreter(
            document.machine, clock=self.clock, plugins=[Invokes()]
        ).start()

    def close(self) -> None:
        self.interpreter.stop()

    @property
    def active(self) -> set[str]:
        return set(self.interpreter.current_state_ids)

    def send(self, name: str) -> None:
        self.interpreter.send(made(name, "external"))

    def wait(self, ms: float) -> None:
        self.clock.increment(ms)

    def finish(self) -> set[str]:
        """Let time pass until the machine ends or waits for nothing; the active states then."""
        while self.interpreter.status == "running" and self.clock.now_ms() < LONGEST_MS:
            due = self.interpreter.next_due()
            if due is None:
                break
            self.clock.set(max(due[0], self.clock.now_ms()))
        return self.active


def verdict(document: Document) -> set[str]:
    """Run a document to its end: the states it ends in."""
    run = Run(document)
    try:
        return run.finish()
    finally:
        run.close()


async def verdict_async(document: Document) -> set[str]:
    """As `verdict`, with the asynchronous interpreter."""
    clock = SimulatedClock()
    interpreter = await Interpreter(document.machine, clock=clock, plugins=[Invokes()]).start()
    try:
        while interpreter.status == "running" and clock.now_ms() < LONGEST_MS:
            moved = clock.increment(0)
            assert moved is not None
            await moved
            due = interpreter.next_due()
            if interpreter.status != "running" or due is None:
                break
            moved = clock.set(max(due[0], clock.now_ms()))
            assert moved is not None
            await moved
        return set(interpreter.current_state_ids)
    finally:
        await interpreter.stop()


class PureRun:
    """A document without children being run by the pure functions alone."""

    def __init__(self, document: Document) -> None:
        self.machine = document.machine
        self.now = 0.0
        self.queue: list[Any] = []
        self.snapshot, effects, _ = initial_step(self.machine, now=self.now)
        self._settle(effects)

    @property
    def active(self) -> set[str]:
        return set(self.snapshot.state_ids)

    def send(self, name: str) -> None:
        self.queue.append(made(name, "external"))
        self._settle(())

    def wait(self, ms: float) -> None:
        until = self.now + ms
        while True:
            due = [(send.due_at, name) for name, send in self.snapshot.sends.items()]
            if not due or min(due)[0] > until:
                break
            self.now, name = min(due)
            self.queue.append(fired(name))
            self._settle(())
        self.now = until

    def _settle(self, effects: Sequence[Any]) -> None:
        self._perform(effects)
        while self.queue:
            self.snapshot, effects, _ = step(
                self.machine, self.snapshot, self.queue.pop(0), now=self.now
            )
            self._perform(effects)

    def _perform(self, effects: Sequence[Any]) -> None:
        for effect in effects:
            if isinstance(effect, Send) and not effect.delay:
                assert effect.target is None
                self.queue.append(effect.event)

    def close(self) -> None:
        """Nothing runs."""


def follow(run: Run | PureRun, script: Mapping[str, Any]) -> str | None:
    """Lead a run through a script of events; what differed first, or None.

    A step of the script may say to wait for ``after`` milliseconds before its event.
    """
    try:
        expected = set(script["initialConfiguration"])
        if run.active != expected:
            return f"at the start {sorted(run.active)}, expected {sorted(expected)}"
        for number, each in enumerate(script["events"]):
            run.wait(each.get("after", 0))
            run.send(each["event"]["name"])
            expected = set(each["nextConfiguration"])
            if run.active != expected:
                return f"after step {number + 1} {sorted(run.active)}, expected {sorted(expected)}"
        return None
    finally:
        run.close()
