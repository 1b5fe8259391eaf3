"""Every interleaving of a bounded model, and random walks through it."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Hashable, Iterable
from typing import NamedTuple, Protocol

from tests.protocol import paper


class Verb(NamedTuple):
    """One call of the ledger as the model makes it, and what it answered on paper.

    ``answer`` is ``Row`` or ``dict[str, Row]``, or the reason of a refusal as text.
    """

    name: str
    given: dict[str, object]
    answer: object
    rows: paper.Rows


class Step(NamedTuple):
    label: str
    state: Hashable
    broken: str | None = None
    verb: Verb | None = None


class Model(Protocol):
    def start(self) -> Hashable: ...

    def steps(self, state: Hashable) -> Iterable[Step]: ...

    def at_rest(self, state: Hashable) -> str | None:
        """Return the promise that a state breaks in which nothing is under way."""


class Explored(NamedTuple):
    states: int
    broken: dict[str, list[str]]  # promise -> shortest way to break it
    complete: bool


def explore(model: Model, *, limit: int, first_only: bool = False) -> Explored:
    """Visit every reachable state, breadth first, up to ``limit`` states."""
    start = model.start()
    parents: dict[Hashable, tuple[Hashable, str] | None] = {start: None}
    queue = deque([start])
    broken: dict[str, list[str]] = {}

    def path(state: Hashable) -> list[str]:
        labels = []
        while (parent := parents[state]) is not None:
            state, label = parent
            labels.append(label)
        return labels[::-1]

    while queue and len(parents) <= limit:
        state = queue.popleft()
        promise = model.at_rest(state)
        if promise is not None and promise not in broken:
            broken[promise] = path(state)
        for step in model.steps(state):
            if step.broken is not None and step.broken not in broken:
                broken[step.broken] = [*path(state), step.label]
            if step.state not in parents:
                parents[step.state] = (state, step.label)
                queue.append(step.state)
        if broken and first_only:
            return Explored(len(parents), broken, complete=False)
    return Explored(len(parents), broken, complete=not queue)


def walk(model: Model, rng: random.Random, length: int) -> list[Verb]:
    """Return the ledger's verbs along one random way through the model."""
    state, verbs = model.start(), []
    for _ in range(length):
        steps = list(model.steps(state))
        if not steps:
            break
        step = rng.choice(steps)
        if step.verb is not None:
            verbs.append(step.verb)
        state = step.state
    return verbs
