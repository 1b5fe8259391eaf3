"""TOOL_LOOP under test: one way to drive it, whichever engine and ledger it runs on."""

from __future__ import annotations

import asyncio
import functools
import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import Field

from guardchart import Interpreter, Machine, SyncInterpreter, create_machine
from guardchart.agents import (
    TOOL_LOOP,
    WAITING_STATES,
    FakeModel,
    RetryPolicy,
    agent_logic,
    load_chart,
    pending_approval,
    tool,
    tool_registry,
)
from guardchart.agents._messages import check_messages
from guardchart.gate import approval_event, decisions_event

AT_ONCE = RetryPolicy(delay_s=0)
ENDS = ("done", "error")


class Bank:
    """Two tools with side effects and two without, and what was done with them."""

    def __init__(self) -> None:
        self.entered: list[Any] = []
        self.at_once = 0
        self.most_at_once = 0
        self._lock = threading.Lock()
        self._plain: Any = None

    def enter(self, entry: Any) -> None:
        with self._lock:
            self.entered.append(entry)

    def registry(self, *more: Any, timeout_s: float = 5) -> Any:
        """``pay`` and ``close_account`` ask a person, ``balance`` and ``rate`` do not."""
        if not more and timeout_s == 5 and self._plain is not None:
            return self._plain
        made = self._made(more, timeout_s)
        if not more and timeout_s == 5:
            self._plain = made
        return made

    def _made(self, more: Any, timeout_s: float) -> Any:

        def pay(to: str, cents: Annotated[int, Field(gt=0, le=100_000)], note: str = "none") -> str:
            """Send money."""
            self.enter(("pay", to, cents, note))
            return f"paid {cents} to {to}"

        def close_account(name: str) -> str:
            """Close an account."""
            self.enter(("close_account", name))
            return f"closed {name}"

        def balance(account: str) -> str:
            """Look up a balance."""
            self.enter(("balance", account))
            return f"{account}: 12 EUR"

        def rate(currency: str) -> str:
            """Look up a rate."""
            return f"{currency}: 1.1"

        return tool_registry(
            tool(pay, side_effect=True),
            tool(close_account, side_effect=True),
            balance,
            rate,
            *more,
            timeout_s=timeout_s,
        )

    @property
    def paid(self) -> list[Any]:
        return [each for each in self.entered if each[0] == "pay"]

    def slow(self, name: str, seconds: float, *, is_async: bool = False) -> Any:
        """A read-only tool that takes a while and notes how many of its kind run at once."""

        def begin() -> None:
            with self._lock:
                self.at_once += 1
                self.most_at_once = max(self.most_at_once, self.at_once)

        def end(key: str) -> str:
            with self._lock:
                self.at_once -= 1
                self.entered.append((name, key))
            return f"{name} {key}"

        if is_async:

            async def waiting(key: str) -> str:
                begin()
                await asyncio.sleep(seconds)
                return end(key)

            return tool(waiting, name=name)

        def blocking(key: str) -> str:
            begin()
            time.sleep(seconds)
            return end(key)

        return tool(blocking, name=name)


def pay(to: str = "ann", cents: int = 500, **more: Any) -> dict[str, Any]:
    return {"tool": "pay", "args": {"to": to, "cents": cents}, **more}


def balance(account: str = "a1", **more: Any) -> dict[str, Any]:
    return {"tool": "balance", "args": {"account": account}, **more}


def turn(*calls: dict[str, Any], **more: Any) -> dict[str, Any]:
    """One model turn that proposes several calls."""
    return {"tool_calls": list(calls), **more}


def say(text: str = "All done.", **more: Any) -> dict[str, Any]:
    return {"text": text, **more}


def allowing(*tools: str) -> dict[str, Any]:
    """TOOL_LOOP with an allow-list."""
    chart = load_chart()
    for state in ("awaiting_model", "awaiting_tool"):
        chart["states"][state]["meta"]["tools"] = list(tools)
    return chart


@functools.cache
def _compiled() -> Machine:
    return create_machine(TOOL_LOOP)


class Loop:
    """One running TOOL_LOOP. Its methods are async for both engines."""

    def __init__(self, kind: str, machine: Machine, model: FakeModel, interp: Any) -> None:
        self.kind = kind
        self.machine = machine
        self.model = model
        self.interp = interp

    @property
    def context(self) -> dict[str, Any]:
        return dict(self.interp.context)

    @property
    def state(self) -> str:
        """The active leaf's key."""
        (leaf,) = self.interp.current_state_ids
        return str(leaf).partition(".")[2]

    @property
    def error(self) -> Any:
        return self.context["error"]

    @property
    def pending(self) -> list[dict[str, Any]]:
        return pending_approval(self.interp.context)

    @property
    def results(self) -> list[str]:
        """The texts of every tool result in the conversation, oldest first."""
        return [m["content"] for m in self.context["messages"] if m["role"] == "tool"]

    @property
    def rows(self) -> dict[str, str]:
        """Status of each row of this conversation's batches, by row id."""
        host = self.interp.host
        batches = range(self.interp.snapshot.batch_no + 1)
        return {
            row.id: row.status
            for number in batches
            for row in host.ledger.lookup(host.scope, host.run, host.agent, number)
        }

    async def send(self, event: Any, /, **payload: Any) -> Any:
        """Send from outside and run until the loop rests; returns the receipt."""
        if self.kind == "sync":
            receipt = self.interp.send(event, **payload)
            if not self.interp.clock.simulated:
                self.interp.settle(30, waiting=WAITING_STATES, until=ENDS)
            return receipt
        receipt = await self.interp.send(event, wait=True, **payload)
        if self.interp.clock.simulated:
            await self.interp.idle()
        else:
            await self.interp.settle(30, waiting=WAITING_STATES, until=ENDS)
        return receipt

    async def ask(self, prompt: str = "please") -> Any:
        return await self.send("START", prompt=prompt)

    async def begin(self, event: Any = None) -> None:
        """Send an event (START by default) without waiting for the services it starts."""
        event = event or {"type": "START", "prompt": "please"}
        if self.kind == "async":
            await self.interp.send(event, wait=True)
            return
        thread = threading.Thread(target=self.interp.send, args=(event,), daemon=True)
        thread.start()
        await asyncio.sleep(0)

    async def until(self, condition: Callable[[], bool], seconds: float = 5.0) -> None:
        """Wait until something is so."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "it never came"
            await asyncio.sleep(0.005)

    async def move(self, seconds: float) -> None:
        """Move a simulated clock."""
        moving = self.interp.clock.increment(seconds * 1000)
        if moving is not None:
            await moving
        if self.kind == "async":
            await self.interp.idle()
        else:
            await self.until(self.interp.quiet)

    async def approve(self, **extra: Any) -> Any:
        return await self.send({**approval_event(self.pending), **extra})

    async def decide(self, *decisions: dict[str, Any], **extra: Any) -> Any:
        return await self.send({**decisions_event(decisions), **extra})

    def saved(self) -> dict[str, Any]:
        """The snapshot after a round trip through JSON text."""
        return json.loads(self.interp.get_snapshot())


class Loops:
    """Makes loops that share a ledger, and looks at every conversation when the test ends."""

    def __init__(self, kind: str, ledger: Any) -> None:
        self.kind = kind
        self.ledger = ledger
        self.bank = Bank()
        self.made: list[Loop] = []

    @property
    def is_async(self) -> bool:
        return self.kind == "async"

    def machine(
        self, script: list[Any], tools: Any = None, chart: Any = None, **options: Any
    ) -> tuple[Machine, FakeModel]:
        model = FakeModel(script, is_async=options.pop("model_async", self.is_async))
        options.setdefault("retry", AT_ONCE)
        options.setdefault("sync", not self.is_async)
        registry = tools if tools is not None else self.bank.registry()
        logic = agent_logic(options.pop("model", model), registry, **options)
        if chart is not None:
            return create_machine(chart, logic), model
        return _compiled().with_logic(logic), model

    async def start(
        self,
        script: list[Any],
        tools: Any = None,
        *,
        chart: Any = None,
        snapshot: Any = None,
        trusted: bool = False,
        clock: Any = None,
        scope: str | None = "ticket-1",
        ledger: Any = None,
        plugins: Any = (),
        **options: Any,
    ) -> Loop:
        """A started loop: fresh, or going on from a snapshot."""
        machine, model = self.machine(script, tools, chart, **options)
        made: Any = Interpreter if self.is_async else SyncInterpreter
        given = {
            "clock": clock,
            "scope": scope,
            "ledger": ledger or self.ledger,
            "plugins": plugins,
        }
        if snapshot is None:
            interp = made(machine, **given)
        else:
            interp = made.from_snapshot(snapshot, machine, restart_services=trusted, **given)
        loop = Loop(self.kind, machine, model, interp)
        self.made.append(loop)
        interp.start()
        if self.is_async:
            await interp.idle()
        return loop

    async def parked(self, *calls: dict[str, Any], **options: Any) -> Loop:
        """A loop that waits for a person to decide about these calls."""
        script = options.pop("script", [say()])
        loop = await self.start([turn(*(calls or (pay(),))), *script], **options)
        await loop.ask()
        assert loop.state == "awaiting_human", loop.context
        return loop

    async def again(self, loop: Loop, script: list[Any] | None = None, **options: Any) -> Loop:
        """The same conversation in another process: its saved snapshot, a new machine."""
        options.setdefault("snapshot", loop.saved())
        return await self.start(script if script is not None else [say()], **options)

    def close(self) -> None:
        for loop in self.made:
            loop.interp.stop()
            loop.model.release()
        for loop in self.made:
            assert_sound(loop)


def assert_sound(loop: Loop) -> None:
    """No conversation ends with a tool call that lacks its result, nor with one too many."""
    context = loop.context
    messages = check_messages(context["messages"])
    waiting: Counter[str] = Counter()
    for message in messages:
        if message["role"] == "tool":
            waiting[message["tool_call_id"]] -= 1
            assert waiting[message["tool_call_id"]] >= 0, "a result that nobody asked for"
        else:
            assert not +waiting, f"calls without a result: {dict(waiting)}"
            waiting.update(call["id"] for call in message.get("tool_calls", ()))
    open_calls = Counter(entry["id"] for entry in context["pending_tool_calls"])
    assert +waiting == open_calls
    if loop.state not in ("awaiting_human", "awaiting_tool"):
        assert not open_calls, f"{loop.state} holds open calls"
    json.dumps(loop.interp.dump(), allow_nan=False).encode()
    error = context["error"]
    assert error is None or set(error) == {"kind", "message"}
