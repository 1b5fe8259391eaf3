"""A slow interpreter that reads docs/semantics.md literally: no cache, no plan, no short cut.

It shares no code with the kernel. `Reference.notes` names, after each step, the rulings that
decided something otherwise than XState 5 would have; that is what explains a difference.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.conformance.chart import Chart, Move, State, covers, listed
from tests.conformance.vocabulary import Raised, act, delay_of, passes

Event = dict[str, Any]


class Endless(Exception):
    """More microsteps than the chart allows (K9)."""


class Reference:
    """A machine and where it stands."""

    def __init__(self, raw: Any) -> None:
        self.chart = Chart(raw)
        self.root, self.policy = self.chart.root, raw.get("actionErrorPolicy", "fail")
        self.limit, self.strict = raw.get("maxMicrosteps", 1_000), raw.get("strict", False)
        self.active: set[State] = set()
        self.context: dict[str, Any] = dict(raw.get("context", {}))
        self.history: dict[str, list[State]] = {}
        self.timers: dict[str, float] = {}
        self.children: dict[str, str] = {}
        self.status, self.receipt, self.rev = "active", "taken", 0
        self.output: Any = None
        self.log: list[str] = []
        self.effects: list[tuple[str, str]] = []
        self.queue: list[tuple[Event, bool]] = []
        self.pending: dict[tuple[str, str], float] = {}
        self.notes: set[str] = set()

    # Steps

    def start(self, now: float) -> None:
        self.begin(now)
        event = {"type": "xstate.init"}
        try:
            entered = [self.root]
            followed: set[State] = set()
            self.descend(self.root, [], entered, followed)
            self.enter(entered, followed, event)
            self.settle(event)
        except Raised:
            self.status, self.receipt = "error", "denied"
            self.active = {s for s in self.chart.states if s in entered}
            self.context, self.effects = dict(self.chart.raw.get("context", {})), []
        self.end(changed=True)

    def send(self, event: Event, now: float) -> None:
        self.begin(now)
        known = any(covers(key, event["type"]) for key in self.chart.descriptors)
        if self.status != "active":  # K12
            self.receipt = "dropped"
        elif self.strict and not known:  # K18
            self.receipt = "denied"
        else:
            self.step(event, engine=False)

    def fire(self, timer: str, now: float) -> None:
        self.begin(now)
        if self.status != "active" or timer not in self.timers:  # K15
            self.receipt = "dropped"
            return
        del self.timers[timer]
        self.step({"type": "xstate.after." + timer}, engine=True)

    def finish(self, child: str, failed: bool, now: float) -> None:
        self.begin(now)
        if self.status != "active" or self.children.get(child) != "active":  # K15
            self.receipt = "dropped"
            return
        self.children[child] = "error" if failed else "done"
        kind = "error" if failed else "done"
        self.step({"type": f"xstate.{kind}.actor.{child}"}, engine=True)

    def begin(self, now: float) -> None:
        self.now, self.log, self.effects, self.notes = now, [], [], set()
        self.queue, self.pending = [], {}

    def step(self, event: Event, engine: bool) -> None:
        before = self.seen()
        try:
            chosen, handled = self.select(event, engine)
            self.receipt = "denied" if handled else "ignored"
            if event["type"].startswith("xstate.error.") and not chosen:  # K16
                self.status, self.receipt = "error", "ignored"
            if chosen:
                self.receipt = "forbidden" if all(m.idle for m in chosen) else "taken"
                self.microstep(chosen, event)
            self.settle(event)
        except Raised:  # K17
            self.active, self.context, self.status, self.history, self.timers, self.children = before
            self.receipt, self.effects = "denied", []
            if self.policy == "fail":
                self.status = "error"
        changed = engine or self.receipt == "taken" or self.seen() != before
        self.end(changed or bool(self.effects))

    def seen(self) -> Any:
        return (
            *(set(self.active), dict(self.context), self.status),
            *(dict(self.history), dict(self.timers), dict(self.children)),
        )

    def end(self, changed: bool) -> None:
        if self.status != "active":
            running = [name for name, status in self.children.items() if status == "active"]
            self.effects += [("stop", name) for name in running]
            self.effects += [("cancel", name) for name in self.timers]
            self.children, self.timers, self.pending = {}, {}, {}
        for (kind, name), due in self.pending.items():
            self.effects.append((kind, name))
            if kind == "schedule":
                self.timers[name] = due
            else:
                self.children[name] = "active"
        self.rev += changed or bool(self.pending)

    def settle(self, event: Event) -> None:  # K8
        steps, look = 0, True
        while self.status == "active":
            chosen = self.eventless(event) if look else []
            if not chosen and not self.queue:
                return
            steps += 1
            if steps > self.limit:  # K9
                raise Endless
            if chosen:
                before = set(self.active), dict(self.context)
                self.microstep(chosen, event)
                look = before != (self.active, self.context)
                self.notes |= set() if look else {"K8"}
                continue
            following, engine = self.queue.pop(0)
            chosen, _ = self.select(following, engine)
            look = True
            if chosen:
                event = following
                self.microstep(chosen, event)

    # Selection

    def select(self, event: Event, engine: bool) -> tuple[list[Move], bool]:
        """The transitions that answer an event, and whether any handler was asked (K1 to K3)."""
        moves, kind = self.chart.moves, event["type"]

        def exact(state: State) -> list[Move]:
            return moves.get((state, kind), [])

        def wild(state: State) -> list[Move]:
            mine = [key for one, key in moves if one is state and key.endswith("*")]
            mine = sorted((key for key in mine if covers(key, kind)), key=len, reverse=True)
            return [move for key in mine for move in moves[state, key]]

        handled = any(exact(state) or wild(state) for state in self.active)
        if not engine:
            return self.choose(self.root, lambda s: exact(s) + wild(s), event), handled
        if any(wild(state) for state in self.active):
            self.notes.add("K1")
        found = self.choose(self.root, exact, event) or self.choose(self.root, wild, event)
        return found, handled

    def choose(self, state: State, pick: Callable[[State], list[Move]], event: Event) -> list[Move]:
        below = [child for child in state.children if child in self.active]
        found = [move for child in below for move in self.choose(child, pick, event)]
        return found or self.first(pick(state), event)

    def eventless(self, event: Event) -> list[Move]:
        found: dict[Move, None] = {}
        for leaf in (s for s in self.chart.states if s in self.active and not s.children):
            for state in (leaf, *leaf.above()):
                if chosen := self.first(self.chart.moves.get((state, ""), []), event):
                    found[chosen[0]] = None
                    break
        self.notes |= {"K3"} if len(found) > 1 else set()
        return list(found)

    def first(self, candidates: list[Move], event: Event) -> list[Move]:
        active = {name for state in self.active for name in (state.id, state.path)}
        for move in candidates:
            try:
                if passes(move.guard, event, self.context, active):  # K6
                    return [move]
            except Raised:  # K17
                if self.policy != "continue":
                    raise
        return []

    # Microsteps

    def restored(self, target: State, followed: set[State]) -> list[State]:
        """What a target stands for: itself, or what a history state restores (K13)."""
        parent = target.parent
        if target.type != "history" or parent is None:
            return [target]
        if record := self.history.get(target.id):
            return record
        default = [parent.at(text) for text in listed(target.raw.get("target"))]
        if not default and parent.type == "parallel":
            return parent.children
        if not default:
            followed.add(parent)
            default = self.chart.initial(parent)
        return [state for each in default for state in self.restored(each, followed)]

    def domain(self, move: Move) -> tuple[State | None, bool]:
        """The domain, and whether it is the source, exited and entered with the rest (K10)."""
        source, history = move.source, any(t.type == "history" for t in move.targets)
        reached = [s for t in move.targets for s in self.restored(t, set())]
        again = history and source in reached  # K13
        inside = all(t is source or source.holds(t) for t in reached) and not again
        common = [s for s in source.above() if all(s.holds(t) for t in reached)]
        domain = source if inside else next(iter(common), None if move.reenter else self.root)
        self.notes |= {"K13"} if again else set()
        while domain and domain.type == "parallel" and not move.reenter:
            regions = [c for c in domain.children if all(c is t or c.holds(t) for t in reached)]
            if not regions:
                break
            domain = regions[0]
            self.notes.add("K10")
        return domain, inside and move.reenter

    def left(self, move: Move) -> set[State]:
        domain, itself = self.domain(move) if move.targets else (None, False)
        if not move.targets:
            return set()
        return {s for s in self.active if domain is None or domain.holds(s) or itself and s is domain}

    def microstep(self, chosen: list[Move], event: Event) -> None:
        kept: list[Move] = []
        for move in chosen:  # K4
            rivals = [other for other in kept if self.left(other) & self.left(move)]
            if all(rival.source.holds(move.source) for rival in rivals):
                kept = [*(other for other in kept if other not in rivals), move]
        domains = [self.domain(move) for move in kept]
        leaving: set[State] = set().union(*(self.left(move) for move in kept))
        self.leave([s for s in reversed(self.chart.states) if s in leaving], event)
        for move in kept:
            self.act(move.actions, event)
        entered: list[State] = []
        followed: set[State] = set()
        self.active = self.active - leaving
        for move, (domain, itself) in zip(kept, domains, strict=True):
            if move.targets:
                wanted = [s for t in move.targets for s in self.restored(t, followed)]
                if domain is None or itself:
                    entered.append(domain or self.root)
                self.descend(domain or self.root, wanted, entered, followed)
        self.enter(entered, followed, event)

    def leave(self, leaving: list[State], event: Event) -> None:  # K7
        for state in leaving:
            below = [s for s in self.chart.states if s in self.active and state.holds(s)]
            for record in state.histories:  # K13
                deep = record.raw.get("history") == "deep"
                kept = [s for s in below if (not s.children if deep else s.parent is state)]
                self.history[record.id] = kept
        for state in leaving:
            self.act(listed(state.raw.get("exit")), event)
            for name, _ in state.invokes:
                if not self.pending.pop(("start", name), 0) and name in self.children:
                    if self.children.pop(name) == "active":
                        self.effects.append(("stop", name))
            for name, _ in state.timers:
                if self.pending.pop(("schedule", name), None) is None and name in self.timers:
                    del self.timers[name]
                    self.effects.append(("cancel", name))

    def descend(
        self, state: State, wanted: list[State], entered: list[State], followed: set[State]
    ) -> None:
        """Enter what lies below a state: towards what is wanted, else by default."""
        below = [target for target in wanted if state.holds(target)]
        if state.type == "compound" and not below:
            followed.add(state)
            initial = self.chart.initial(state)
            below = [s for target in initial for s in self.restored(target, followed)]
        for child in state.children:
            if state.type == "parallel" or any(child is t or child.holds(t) for t in below):
                if child not in self.active:
                    entered.append(child)
                self.descend(child, below, entered, followed)

    def enter(self, entered: list[State], followed: set[State], event: Event) -> None:
        completed: set[State] = set()
        for state in (s for s in self.chart.states if s in entered or s in followed):
            if state in entered:
                self.active.add(state)
                self.act(listed(state.raw.get("entry")), event)
                for name, delay in state.timers:
                    self.pending["schedule", name] = self.now + delay_of(delay, self.context)
                for name, _ in state.invokes:
                    self.pending["start", name] = 1
            if state in followed:
                self.act(self.chart.initial_actions(state), event)
            if state in entered and state.type == "final":
                self.complete(state, completed)
        if self.status == "done":
            self.queue.clear()
            for state in (s for s in reversed(self.chart.states) if s in self.active):
                self.act(listed(state.raw.get("exit")), event)

    def complete(self, final: State, completed: set[State]) -> None:  # K11
        parent = final.parent
        if parent is not None and parent.type == "compound":
            self.queue.append(({"type": f"xstate.done.state.{parent.id}"}, True))
        for state in final.above():
            if state.type == "parallel" and state not in completed and self.is_done(state):
                completed.add(state)
                self.queue.append(({"type": f"xstate.done.state.{state.id}"}, True))
        if self.is_done(self.root):
            self.status = "done"
            own = final.raw.get("output") if parent is self.root else None
            self.output = self.chart.raw.get("output", own)

    def is_done(self, state: State) -> bool:
        if state.type == "compound":
            return any(c.type == "final" and c in self.active for c in state.children)
        if state.type == "parallel":
            return all(self.is_done(child) for child in state.children)
        return state.type == "final" and state in self.active

    def act(self, actions: list[Any], event: Event) -> None:
        for action in actions:
            try:
                act(action, event, self.context, self.log, self.queue)
            except Raised:  # K17
                if self.policy != "continue":
                    raise
                return
