"""What a chart's names mean: actions, guards, services and delays, as four plain dicts.

``MachineLogic`` is data. It is bound to a chart by ``create_machine`` and may carry two
things beside the callables: ``before_step``, which every host calls before it steps (the
agents layer takes its decisions in the ledger there), and ``attachments``, objects a
layer above wants to find again (a tool registry, a tracer).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from guardchart.kernel import EngineEvent, Event, Machine, Snapshot

__all__ = ["BeforeStep", "BeforeStepHook", "Host", "MachineLogic"]


class Host(NamedTuple):
    """Who is running a machine: the identity a ledger files its calls under.

    Attributes:
        scope: The thread id, store key or, with neither, the run.
        ledger: A ``guardchart.persistence.Ledger`` the host brought, or None.
        run: The nonce minted when the machine first started.
        agent: The actor path, e.g. ``"supervisor:worker-1"``.
    """

    scope: str
    ledger: Any
    run: str
    agent: str


class BeforeStep(NamedTuple):
    """What ``before_step`` asks of its host.

    Attributes:
        event: The event to step instead of the one that came, or None to keep it.
        batch_no: The number of the tool batch this event opened, kept in the snapshot.
        denied: A reason. Without ``event`` nothing is stepped; with it the event is
            stepped. In both cases the receipt says denied, with this reason.
    """

    event: Event | EngineEvent | None = None
    batch_no: int | None = None
    denied: str | None = None


class BeforeStepHook(Protocol):
    """Called by every host before a step; may look things up, never performs effects."""

    def __call__(
        self, snapshot: Snapshot, event: Event | EngineEvent, now: float, host: Host, outside: bool
    ) -> BeforeStep | None:
        """Decide before a step.

        Args:
            snapshot: The snapshot the step will start from.
            event: The event about to be stepped.
            now: The host's clock, epoch ms.
            host: Scope, ledger, run and agent.
            outside: Whether the event came from outside through the host; only such an
                event may decide an approval.
        """
        ...


class MachineLogic:
    """Names to callables; see docs/charts.md for the forms each may take.

    Args:
        actions: ``(context, event) -> updates | None`` and the longer forms.
        guards: ``(context, event[, params]) -> bool``.
        services: ``(scope, context, event)`` or ``(input)``, sync or async, or a Machine.
        delays: ``(context, event) -> ms``, or a number of milliseconds.
        before_step: A hook every host calls before it steps.
        on_machine: Called once with each machine this logic is bound to.
        attachments: Objects a layer above wants to find again.

    Example:
        >>> logic = MachineLogic(
        ...     guards={"small": lambda context, event: event.payload["cents"] < 500},
        ...     actions={"note": lambda context, event: {"cents": event.payload["cents"]}},
        ... )
        >>> sorted(logic.actions), sorted(logic.guards)
        (['note'], ['small'])
    """

    __slots__ = (
        "actions",
        "attachments",
        "before_step",
        "delays",
        "guards",
        "on_machine",
        "services",
    )

    def __init__(
        self,
        actions: Mapping[str, Callable[..., Any]] | None = None,
        guards: Mapping[str, Callable[..., Any]] | None = None,
        services: Mapping[str, Any] | None = None,
        delays: Mapping[str, Any] | None = None,
        *,
        before_step: BeforeStepHook | None = None,
        on_machine: Callable[[Machine], None] | None = None,
        attachments: Mapping[str, Any] | None = None,
    ) -> None:
        self.actions: dict[str, Callable[..., Any]] = dict(actions or {})
        self.guards: dict[str, Callable[..., Any]] = dict(guards or {})
        self.services: dict[str, Any] = dict(services or {})
        self.delays: dict[str, Any] = dict(delays or {})
        self.before_step = before_step
        self.on_machine = on_machine
        self.attachments: dict[str, Any] = dict(attachments or {})

    def merge(self, *others: MachineLogic) -> MachineLogic:
        """A new logic holding everything of this one and the others; later wins.

        Returns:
            A new ``MachineLogic``; none of the inputs changes. Attachments of earlier ones are
            kept where a later one brings none. ``before_step`` of each is asked in turn, and
            what one denies is denied.

        Example:
            >>> base = MachineLogic(guards={"ok": lambda c, e: False})
            >>> base.merge(MachineLogic(guards={"ok": lambda c, e: True})).guards["ok"]({}, None)
            True
        """
        merged = MachineLogic(
            self.actions,
            self.guards,
            self.services,
            self.delays,
            before_step=self.before_step,
            on_machine=self.on_machine,
            attachments=self.attachments,
        )
        for other in others:
            merged.actions.update(other.actions)
            merged.guards.update(other.guards)
            merged.services.update(other.services)
            merged.delays.update(other.delays)
            merged.attachments.update(other.attachments)
            merged.before_step = _one_after_other(merged.before_step, other.before_step)
            merged.on_machine = _both(merged.on_machine, other.on_machine)
        return merged


def _both(
    first: Callable[[Machine], None] | None, second: Callable[[Machine], None] | None
) -> Callable[[Machine], None] | None:
    if first is None or second is None or first is second:
        return first or second

    def both(machine: Machine) -> None:
        first(machine)
        second(machine)

    return both


class _Hooks:
    """Two ``before_step`` hooks: the second sees what the first makes of the event."""

    def __init__(self, first: Any, second: Any) -> None:
        self._all = (first, second)
        self.judged = next((h.judged for h in self._all if hasattr(h, "judged")), None)

    def concerns(self, snapshot: Snapshot, event: Event | EngineEvent) -> bool:
        """Whether either may block."""
        return any(
            not hasattr(hook, "concerns") or hook.concerns(snapshot, event) for hook in self._all
        )

    def asked(self, snapshot: Snapshot, event: Event) -> int:
        """How well a decision fits what either asks."""
        return max(
            hook.asked(snapshot, event) if hasattr(hook, "asked") else 0 for hook in self._all
        )

    def __call__(
        self, snapshot: Snapshot, event: Event | EngineEvent, now: float, host: Host, outside: bool
    ) -> BeforeStep | None:
        first, second = self._all
        said = first(snapshot, event, now, host, outside)
        if said is None:
            return second(snapshot, event, now, host, outside)  # type: ignore[no-any-return]
        if said.denied is not None:
            return said  # type: ignore[no-any-return]
        then = second(snapshot, said.event or event, now, host, outside)
        if then is None:
            return said  # type: ignore[no-any-return]
        batch_no = said.batch_no if then.batch_no is None else then.batch_no
        return BeforeStep(then.event or said.event, batch_no, then.denied)


def _one_after_other(first: Any, second: Any) -> Any:
    if first is None or second is None or first is second:
        return first or second
    return _Hooks(first, second)
