"""What can go wrong between an answer and its effect, one function each.

A fault does something to a host and returns what each caller heard; the last one speaks for the
thread where that is another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

from tests.langgraph.once.hosts import CENTS, Heard, Host, RaisesAfter, nobody_asked

Run = Callable[[Host], Awaitable[list[Heard]]]

EVERY = frozenset({"node", "asks", "graph"})
NEITHER: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Fault:
    """One row of the matrix.

    Args:
        name: What goes wrong.
        run: Does it.
        entries: How often the effect may then have happened, with a ledger.
        hears: What callers may hear of it.
        twice: The hosts in which it happens again without a ledger, for certain.
        kills: Whether a process is killed, so that the saver must outlive it.
        on_exit: Whether there is such a thing when checkpoints are written on exit only.
    """

    name: str
    run: Run
    entries: frozenset[int] = frozenset({1})
    hears: frozenset[str] = frozenset({"done"})
    twice: frozenset[str] = EVERY
    kills: bool = False
    on_exit: bool = True


async def two_resumes(host: Host) -> list[Heard]:
    item = await host.park()
    return await host.at_once(host.answer(item), host.answer(item))


async def retried(host: Host) -> list[Heard]:
    item = await host.park()
    fails = RaisesAfter(host.task, lambda: bool(host.entries))
    told = await host.answer(item, callbacks=[fails])
    assert fails.raised == 1
    return [told]


async def unasked_and_retried(host: Host) -> list[Heard]:
    with nobody_asked():
        fails = RaisesAfter(host.task, lambda: bool(host.entries))
        await host.invoke(
            {"event": {"type": "START", "prompt": "refund order 7"}}, callbacks=[fails]
        )
        assert fails.raised == 1
        return [await host.look()]


async def time_travel(host: Host) -> list[Heard]:
    item = await host.park()
    first = await host.answer(item)
    again = await host.go_on(item, await host.before_effect())
    # Back at an interrupt, LangGraph asks anew.
    return [first, await host.answer(item) if again.what == "asked" else again]


async def reborn(host: Host) -> list[Heard]:
    first = await host.park()
    done = await host.answer(first)
    await host.go_on(first, await host.before_anything())
    anew = await host.asked()
    assert anew["id"] != first["id"]
    return [done, await host.answer(anew)]


async def fork(host: Host) -> list[Heard]:
    item = await host.park()
    parked = await host.here()
    first = await host.answer(item)
    return [first, await host.answer(item, at=parked)]


async def double_click(host: Host) -> list[Heard]:
    item = await host.park()
    return [await host.answer(item), await host.answer(item)]


async def nothing_given(host: Host) -> list[Heard]:
    item = await host.park()
    asked = await host.go_on(item)
    return [asked, await host.answer(item), await host.go_on(item)]


def resampled(second_id: str) -> Run:
    async def run(host: Host) -> list[Heard]:
        await host.say("Hello!")
        before = await host.here()
        first = await host.answer(await host.park())
        again = await host.park(at=before, id=second_id)
        return [first, await host.answer(again)]

    return run


async def changed(host: Host) -> list[Heard]:
    await host.say("Hello!")
    before = await host.here()
    first = await host.answer(await host.park())
    other = await host.park(at=before, cents=CENTS + 400)
    return [first, await host.answer(other)]


def against(other: str, first: str, until: str) -> Run:
    """An approval, and at the same time a rejection or new input; ``first`` gets ahead."""

    async def run(host: Host) -> list[Heard]:
        host.effect_s = 0.1
        item = await host.park()
        says = (
            host.answer(item, "reject")
            if other == "reject"
            else host.say("Never mind.", about=item)
        )
        return await host.at_once(host.answer(item), says, first=first, until=until)

    return run


async def too_late(host: Host) -> list[Heard]:
    host.human_timeout_s = 0.05
    item = await host.park()
    await asyncio.sleep(0.1)
    return [await host.answer(item)]


async def saver_fails(host: Host) -> list[Heard]:
    item = await host.park()
    with host.failing_saver():
        told = await host.answer(item)
    return [told, await host.recover()]


def killed_after(point: str) -> Run:
    async def run(host: Host) -> list[Heard]:
        if point == "propose":
            await host.killed("start", point)
        else:
            await host.park()
            await host.killed("approve", point)
        return [await host.recover()]

    return run


DONE = frozenset({"done"})
DOUBT = frozenset({"in doubt"})


def races(other: str, verb: str, closed: str) -> Iterator[Fault]:
    """An approval against something else: which of the two is decided first, and by how much.

    Either may win. Of an interrupt LangGraph may hand the answer that it has stored already to
    both callers, who then agree.
    """
    entries = frozenset({0, 1})
    hears = frozenset({"done", "in doubt", "refused", closed, "answered"})
    for name, first, until in (
        (f"approve after {other}", verb, verb if verb == "close" else "decide"),
        (f"{other} before the claim", "approve", "decide"),
        (f"{other} while it runs", "approve", "claim"),
        (f"{other} after it ran", "approve", "record"),
    ):
        yield Fault(name, against(other, first, until), entries, hears, NEITHER)


FAULTS = {
    fault.name: fault
    for fault in (
        Fault("two resumes at once", two_resumes),
        Fault("RetryPolicy after the effect", retried),
        Fault("approval never, RetryPolicy", unasked_and_retried),
        Fault("time travel before the effect", time_travel, on_exit=False),
        Fault("time travel before the start", reborn, frozenset({2}), twice=NEITHER, on_exit=False),
        Fault("fork before the gate", fork),
        Fault("fork sampled again, same id", resampled("call_1")),
        Fault("fork sampled again, fresh id", resampled("call_2")),
        Fault("fork with another call", changed, frozenset({2}), twice=NEITHER),
        Fault("double click", double_click, hears=frozenset({"done", "refused"}), twice=NEITHER),
        Fault("invoke(None)", nothing_given, hears=frozenset({"asked", "done"}), twice=NEITHER),
        Fault("approve too late", too_late, frozenset({0}), frozenset({"expired"}), NEITHER),
        *races("reject", "reject", "rejected"),
        *races("new input", "close", "superseded"),
        Fault("saver fails after the effect", saver_fails, hears=frozenset({"raised", "done"})),
        Fault("kill after propose", killed_after("propose"), twice=NEITHER, kills=True),
        Fault("kill after decide", killed_after("decide"), twice=NEITHER, kills=True),
        Fault("kill after claim", killed_after("claim"), frozenset({0}), DOUBT, NEITHER, True),
        Fault("kill after the effect", killed_after("effect"), hears=DOUBT, kills=True),
        Fault("kill after record", killed_after("record"), kills=True),
    )
}
