"""Draws charts and the moves made on them, from a seed.

Two families. A *plain* chart avoids what the rulings decide otherwise than XState 5 does:
targets across regions, regions that are entered again, ``initial`` actions. A *full* chart
uses everything. Actions and guards are a small vocabulary that every engine can be taught:
``log inc set raise crash`` and ``lt odd x crash``; see `vocabulary`.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any, Literal

from hypothesis import strategies as st

Family = Literal["plain", "full"]
Chart = dict[str, Any]
Move = tuple[str, Any]

EVENTS = ("E1", "E2", "E3", "a.b", "a.c", "a.b.c")
DESCRIPTORS = ("E1", "E1", "E2", "E2", "E3", "a.b", "a.c", "a.*", "*")
KEYS = ("n", "k")
DELAYS = ("10", "20", "slow", "by_n")
MAX_DEPTH = 5
MAX_REGIONS = 6
MAX_STATES = 34
MAX_MICROSTEPS = 120


class Place:
    """A state while its chart is being drawn."""

    def __init__(self, key: str, parent: Place | None, kind: str, order: int) -> None:
        self.key, self.parent, self.kind, self.order = key, parent, kind, order
        self.path: tuple[str, ...] = () if parent is None else (*parent.path, key)
        self.children: list[Place] = []
        self.config: Chart = {}
        self.id = ".".join(("m", *self.path))

    def above(self) -> Iterator[Place]:
        place = self.parent
        while place is not None:
            yield place
            place = place.parent

    def holds(self, other: Place) -> bool:
        return self in other.above()


def draw(seed: int | str, family: Family) -> tuple[Chart, list[Move]]:
    """Return the chart and the moves that a seed stands for."""
    drawn = _Drawing(Random(f"{family} {seed}"), family)
    return drawn.chart(), drawn.moves()


def charts(family: Family) -> st.SearchStrategy[tuple[Chart, list[Move]]]:
    """A hypothesis strategy over the same charts."""
    return st.integers(0, 2**32).map(lambda seed: draw(seed, family))


class _Drawing:
    def __init__(self, rng: Random, family: Family) -> None:
        self.rng = rng
        self.full = family == "full"
        self.places: list[Place] = []
        self.invokes = 0
        self.eventful = rng.random() < 0.75  # whether raises and `always` occur at all
        self.wild = rng.random() < (0.6 if self.full else 0.2)
        self.width = rng.choice((2, 2, 3, 3, 4, MAX_REGIONS))
        self.faulty = self.full and rng.random() < 0.25

    def often(self, chance: float) -> bool:
        return self.rng.random() < chance

    # The tree

    def chart(self) -> Chart:
        root = self.tree("m", None, 0)
        for place in self.places:
            if place.kind not in ("final", "history"):
                self.behave(place)
            elif place.kind == "history":
                self.remember(place)
        chart = root.config
        chart["id"] = "m"
        chart["context"] = {"n": 0, "k": 0}
        chart["maxMicrosteps"] = MAX_MICROSTEPS
        chart.pop("onDone", None)
        if self.often(0.3):
            chart["output"] = {"root": True}
        if self.full and self.often(0.2):
            chart["strict"] = True
        if self.faulty:
            chart["actionErrorPolicy"] = self.rng.choice(("fail", "rollback", "continue"))
        return chart

    def tree(self, key: str, parent: Place | None, depth: int) -> Place:
        room = len(self.places) < MAX_STATES and depth < MAX_DEPTH
        kind = "atomic"
        if depth == 0 or (room and self.often(0.62 - 0.08 * depth)):
            kind = "parallel" if self.often(0.35) else "compound"
        place = Place(key, parent, kind, len(self.places))
        self.places.append(place)
        config = place.config
        if parent is not None and self.often(0.1):
            place.id = config["id"] = f"id{place.order}"
        if kind == "atomic":
            return place
        if kind == "parallel":
            config["type"] = "parallel"
        config["states"] = {}
        count = self.rng.randint(2, self.width if kind == "parallel" else 4)
        names = [f"{'r' if kind == 'parallel' else 's'}{i}" for i in range(count)]
        for name in names:
            place.children.append(self.tree(name, place, depth + 1))
        if kind == "compound":
            self.end(place)
            first = self.rng.choice([c for c in place.children if c.kind != "final" or self.full])
            config["initial"] = first.key
            if self.full and self.often(0.3):
                target = self.first_below(first, place)
                config["initial"] = {"target": target, "actions": [self.log(f"i{place.order}")]}
        if self.often(0.4 if self.full else 0.3):
            deep = self.often(0.5)
            name = f"h{len(self.places)}"
            child = Place(name, place, "history", len(self.places))
            child.config.update(type="history", history="deep" if deep else "shallow")
            self.places.append(child)
            at = self.rng.randint(0, len(place.children)) if self.full else len(place.children)
            place.children.insert(at, child)
        config["states"] = {child.key: child.config for child in place.children}
        return place

    def first_below(self, first: Place, place: Place) -> Any:
        """A target of `initial`: the child, something below it, or several regions of it."""
        below = [p for p in self.places if first.holds(p) and p.kind != "history"]
        if not below or self.often(0.4):
            return first.key
        if first.kind == "parallel" and self.often(0.5):
            regions = [c for c in first.children if c.kind != "history"][:2]
            return [".".join(c.path[len(place.path) :]) for c in regions]
        return ".".join(self.rng.choice(below).path[len(place.path) :])

    def end(self, place: Place) -> None:
        """Make a child of a compound state final, or give it one."""
        if not self.often(0.5):
            return
        child = Place("end", place, "final", len(self.places))
        self.places.append(child)
        child.config["type"] = "final"
        child.config["entry"] = [self.log(f"+{child.order}")]
        if self.often(0.4):
            child.config["output"] = {"from": child.order}
        if self.full and self.often(0.4):
            child.config["exit"] = [self.log(f"-{child.order}")]
        place.children.append(child)

    def remember(self, place: Place) -> None:
        parent = place.parent
        assert parent is not None
        below = [p for p in self.places if parent.holds(p) and p.kind != "history"]
        if self.often(0.5) and below:
            near = below if self.full else [p for p in below if p.parent is parent]
            if not self.full and parent.kind == "parallel":
                return
            place.config["target"] = ".".join(self.rng.choice(near).path[len(parent.path) :])

    # What states do

    def log(self, name: str) -> Chart:
        return {"type": "log", "params": {"name": name}}

    def behave(self, place: Place) -> None:
        rng, config = self.rng, place.config
        if self.often(0.85):
            config["entry"] = [self.log(f"+{place.order}"), *self.some_actions(0.12)]
        if self.often(0.85):
            config["exit"] = [self.log(f"-{place.order}"), *self.some_actions(0.08)]
        handlers: Chart = {}
        for _ in range(rng.choice((0, 1, 1, 2, 3) if place.parent else (0, 0, 1))):
            descriptor = rng.choice((*DESCRIPTORS, "xstate.*") if self.full else DESCRIPTORS)
            if "*" in descriptor and not self.wild:
                continue
            handlers[descriptor] = self.candidates(place, 0.35)
        if handlers:
            config["on"] = handlers
        if self.eventful and self.often(0.14):
            config["always"] = [self.eventless(place) for _ in range(rng.choice((1, 1, 2)))]
        if self.often(0.14) and place.parent:
            config["after"] = {
                rng.choice((*DELAYS, "PT0.03S") if self.full else DELAYS): self.candidates(
                    place, 0.3
                )
                for _ in range(rng.choice((1, 1, 2)))
            }
        if self.often(0.1) and place.parent:
            config["invoke"] = [self.invoke(place) for _ in range(rng.choice((1, 1, 1, 2)))]
        if place.kind in ("compound", "parallel") and place.parent and self.often(0.6):
            config["onDone"] = self.candidates(place, 0.2)

    def invoke(self, place: Place) -> Chart:
        self.invokes += 1
        found: Chart = {"src": self.rng.choice(("good", "bad", "slow"))}
        if self.often(0.5):
            found["id"] = f"job{self.invokes}"
        if self.often(0.8):
            found["onDone"] = self.candidates(place, 0.2)
        if self.often(0.8):
            found["onError"] = self.candidates(place, 0.2)
        return found

    def some_actions(self, chance: float) -> list[Chart]:
        found = []
        kinds = ["inc", "inc_draft", "set", "raise" if self.eventful else "inc"]
        while self.often(chance):
            kind = self.rng.choice([*kinds, "crash"] if self.faulty else kinds)
            key = self.rng.choice(KEYS)
            if kind == "crash":
                found.append({"type": "crash", "params": {}})
            elif kind.startswith("inc"):
                found.append({"type": kind, "params": {"key": key, "by": self.rng.choice((1, 2))}})
            elif kind == "set":
                value = self.rng.randint(0, 3)
                found.append({"type": "set", "params": {"key": key, "value": value}})
            else:
                event = self.rng.choice(EVENTS)
                found.append({"type": "raise", "params": {"event": event}})
        return found

    def guard(self) -> Any:
        rng = self.rng
        kinds = ["lt", "lt", "odd", "x", "not", "and", "or", "stateIn"]
        kind = rng.choice([*kinds, "crash"] if self.faulty else kinds)
        if kind == "crash":
            return {"type": "crash", "params": {}}
        if kind == "lt":
            return {"type": "lt", "params": {"key": rng.choice(KEYS), "value": rng.randint(0, 5)}}
        if kind == "odd":
            return {"type": "odd", "params": {"key": rng.choice(KEYS)}}
        if kind == "not":
            return {"type": "not", "guard": self.guard()}
        if kind in ("and", "or"):
            return {"type": kind, "guards": [self.guard() for _ in range(2)]}
        if kind == "stateIn":
            places = [p for p in self.places if p.kind != "history"]
            return {"type": "stateIn", "state": "#" + rng.choice(places).id}
        return "x"

    def candidates(self, place: Place, guarded: float) -> Any:
        if self.often(0.05):
            return {}
        found = []
        while self.often(guarded) and len(found) < 3:
            found.append({**self.transition(place), "guard": self.guard()})
        found.append(self.transition(place))
        if self.often(0.15):
            found[-1]["guard"] = self.guard()
        only = found[0]
        if len(found) == 1 and set(only) == {"target"} and isinstance(only["target"], str):
            return only["target"]
        return found

    def transition(self, place: Place) -> Chart:
        found: Chart = {}
        if self.often(0.85):
            reenter = self.often(0.2)
            target = self.target(place, reenter)
            if target is not None:
                found["target"] = target
                if reenter:
                    found["reenter"] = True
        if self.often(0.6) or not found:
            log = self.log(f"t{place.order}.{self.rng.randint(0, 99)}")
            found["actions"] = [log, *self.some_actions(0.25)]
        return found

    def eventless(self, place: Place) -> Chart:
        """An `always` candidate that mostly makes its own guard fail in the end."""
        key = self.rng.choice(KEYS)
        found = self.transition(place)
        if self.full and self.often(0.1):
            if self.often(0.7):
                found["guard"] = self.guard()
            return found
        limit = {"key": key, "value": self.rng.randint(1, 6)}
        found["guard"] = {"type": "lt", "params": limit}
        step = {"type": "inc", "params": {"key": key, "by": 1}}
        found["actions"] = [*found.get("actions", ()), step]
        return found

    # Targets

    def target(self, place: Place, reenter: bool) -> Any:
        for _ in range(12):
            other = self.rng.choice(self.places)
            if self.often(0.4) and place.parent is not None:
                other = self.rng.choice(place.parent.children)
            if other.parent is None:
                continue
            others = [other]
            if other.parent.kind == "parallel" and self.often(0.15):
                others += [c for c in other.parent.children if c.kind != "history"][:3]
            if self.full and self.often(0.05):
                others += [p for p in self.places if other.holds(p) or p.parent is other.parent][:1]
            others = list(dict.fromkeys(others))
            if not self.full and not _plain(place, others, reenter):
                continue
            texts = [self.text(place, each) for each in others]
            return texts[0] if len(texts) == 1 else texts
        return None

    def text(self, place: Place, other: Place) -> str:
        if other.parent is place.parent and place.parent is not None and self.often(0.7):
            return other.key
        if place.holds(other) and self.often(0.7):
            return "." + ".".join(other.path[len(place.path) :])
        return "#" + other.id

    # Moves

    def moves(self) -> list[Move]:
        """Moves to come: what of the accepted events, timers and children, is decided on the way."""
        found: list[Move] = []
        for _ in range(self.rng.randint(8, 16)):
            luck = self.rng.random()
            if luck < 0.2:
                found.append(("fire", self.rng.random()))
            elif luck < 0.35:
                found.append(("end", (self.rng.random(), self.often(0.7))))
            elif luck < 0.38:
                found.append(("send", {"type": "unknown.type"}))
            elif luck < 0.75:
                found.append(("accepted", (self.rng.random(), self.often(0.5))))
            else:
                event = {"type": self.rng.choice(EVENTS)}
                if self.often(0.4):
                    event["x"] = self.rng.choice((True, False))
                found.append(("send", event))
        return found


def _plain(source: Place, targets: list[Place], reenter: bool) -> bool:
    """Whether XState 5 and the rulings mean the same by this transition."""
    reached = [t.parent if t.kind == "history" and t.parent else t for t in targets]
    if len(targets) > 1 and any(t.kind == "history" for t in targets):
        return False
    for target, real in zip(targets, reached, strict=True):
        # History that may restore the source, or a state around it.
        if target is not real and (real is source or real.holds(source)):
            return False
    inside = all(t is source or source.holds(t) for t in reached)
    domain = source
    if not inside or reenter:
        domain = next(
            (p for p in source.above() if all(p.holds(t) for t in reached)),
            source if source.parent is None else list(source.above())[-1],
        )
        if any(t is domain for t in reached):
            return False
    if domain.kind != "parallel" or domain in reached:
        return True
    regions = {next(c for c in domain.children if c is t or c.holds(t)) for t in reached}
    return not reenter and inside and len(regions) > 1
