"""A slow interpreter that reads docs/semantics.md literally: no cache, no plan, no short cut.

It shares no code with the kernel. `Reference.notes` names, after each step, the rulings that
decided something otherwise than XState 5 would have; that is what explains a difference.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from tests.conformance.chart import Chart, Move, State, covers, listed
from tests.conformance.vocabulary import Endless, Raised, act, delay_of, passes

Event = dict[str, Any]


class Reference:
    """A machine and where it stands."""

    def __init__(self, raw: Any) -> None:
        self.chart = Chart(raw)
        self.root, self.policy = self.chart.root, raw.get("actionErrorPolicy", "fail")
        self.limit, self.strict = raw.get("maxMicrosteps", 1_000), raw.get("strict", False)
        self.active: set[State] = set()
        self.context = dict(raw.get("context", {}))
        self.history: dict[str, list[State]] = {}
        self.timers, self.children = {}, {}
        self.status, self.receipt, self.rev = "active", "taken", 0
        self.output: Any = None
        self.begin(0)

    def start(self, now: float) -> None:
        self.begin(now)
        event = {"type": "xstate.init"}
        try:
            entered, followed = [self.root], set()
            self.descend(self.root, [], entered, followed)
            self.enter(entered, followed, event)
            self.settle(event)
        except Raised:
            vars(self).update(status="error", receipt="denied", active=set(entered), effects=[])
            context = dict(self.chart.raw.get("context", {}))
            self.context, self.history, self.output = context, {}, None
        self.end(changed=True)

    def send(self, event: Event, now: float) -> None:
        self.begin(now)
        known = any(covers(key, event["type"]) for key in self.chart.descriptors)
        self.receipt = "dropped" if self.status != "active" else "denied"  # K12
        if self.status == "active" and (known or not self.strict):  # K18
            self.step(event, engine=False)

    def fire(self, timer: str, now: float) -> None:
        self.begin(now)
        self.report(self.timers.pop(timer, None) is not None, f"xstate.after.{timer}")

    def finish(self, child: str, failed: bool, now: float) -> None:
        self.begin(now)
        running, kind = self.children.get(child) == "active", "error" if failed else "done"
        self.children |= {child: kind} if running else {}
        self.report(running, f"xstate.{kind}.actor.{child}")

    def report(self, pending: bool, event_type: str) -> None:
        self.receipt = "dropped"
        if self.status == "active" and pending:  # K15
            self.step({"type": event_type}, engine=True)

    def begin(self, now: float) -> None:
        self.now, self.log, self.effects, self.notes = now, [], [], set()
        self.queue, self.pending, self.logged = [], {}, False

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
            vars(self).update(before, receipt="denied", effects=[], pending={}, output=None)
            self.status = "error" if self.policy == "fail" else "active"
        changed = engine or self.receipt == "taken" or self.seen() != before
        self.end(changed or self.logged or bool(self.effects))

    def seen(self) -> Any:
        tables = ("context", "history", "timers", "children")
        kept = {name: dict(getattr(self, name)) for name in tables}
        return {**kept, "active": set(self.active), "status": self.status}

    def end(self, changed: bool) -> None:
        if self.status != "active":
            running = [name for name, status in self.children.items() if status == "active"]
            self.effects += [("stop", name) for name in running]
            self.effects += [("cancel", name) for name in self.timers]
            self.children, self.timers, self.pending = {}, {}, {}
        for (kind, name), due in self.pending.items():
            self.effects.append((kind, name))
            self.timers |= {name: due} if kind == "schedule" else {}
            self.children |= {name: "active"} if kind == "start" else {}
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
            chosen, look = self.select(following, engine)[0], True
            event = following if chosen else event
            self.microstep(chosen, event)

    def select(self, event: Event, engine: bool) -> tuple[list[Move], bool]:
        """The transitions that answer an event, and whether any handler was asked (K1 to K3)."""
        exact, wild = (partial(f, event["type"]) for f in (self.chart.exact, self.chart.wild))
        handled = any(exact(state) or wild(state) for state in self.active)
        if not engine:
            return self.choose(self.root, lambda s: exact(s) + wild(s), event), handled
        found = self.choose(self.root, exact, event) or self.choose(self.root, wild, event)
        with suppress(Raised):
            plain = self.choose(self.root, lambda s: exact(s) + wild(s), event)
            self.notes |= {"K1"} if plain != found else set()
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
                self.logged = True
        return []

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
        followed |= set() if default else {parent}
        default = default or self.chart.initial(parent)
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
            domain, self.notes = regions[0], self.notes | {"K10"}
        return domain, inside and move.reenter

    def left(self, move: Move) -> set[State]:
        if not move.targets:
            return set()
        domain, itself = self.domain(move)
        top, itself = domain or self.root, itself or domain is None
        return {s for s in self.active if top.holds(s) or (itself and s is top)}

    def microstep(self, chosen: list[Move], event: Event) -> None:
        kept: list[Move] = []
        for move in chosen:  # K4
            rivals = [other for other in kept if self.left(other) & self.left(move)]
            if all(rival.source.holds(move.source) for rival in rivals):
                kept = [*(other for other in kept if other not in rivals), move]
        aimed = [(move, *self.domain(move)) for move in kept if move.targets]
        leaving: set[State] = set().union(*(self.left(move) for move in kept))
        self.leave([s for s in reversed(self.chart.states) if s in leaving], event)
        for move in kept:
            self.act(move.actions, event)
        entered, followed, self.active = [], set(), self.active - leaving
        for move, domain, itself in aimed:
            wanted = [s for t in move.targets for s in self.restored(t, followed)]
            top = domain or self.root
            entered += [top] if domain is None or itself else []
            self.descend(top, wanted, entered, followed)
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
                new = self.pending.pop(("start", name), 0)
                if not new and self.children.pop(name, "") == "active":
                    self.effects.append(("stop", name))
            for name, _ in state.timers:
                new = self.pending.pop(("schedule", name), None) is not None
                if not new and self.timers.pop(name, None) is not None:
                    self.effects.append(("cancel", name))

    def descend(self, state: State, wanted: Any, entered: list[State], followed: Any) -> None:
        """Enter what lies below a state: towards what is wanted, else by default."""
        below = [target for target in wanted if state.holds(target)]
        if state.type == "compound" and not below:
            followed.add(state)
            below = [s for t in self.chart.initial(state) for s in self.restored(t, followed)]
        for child in state.children:
            if state.type == "parallel" or any(child is t or child.holds(t) for t in below):
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
                self.logged = True
                return
