"""The event log: a snapshot rebuilt from what happened, without a model and without a tool."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from guardchart.agents._recorded import recall_verdict
from guardchart.agents._step import AgentStep, fingerprint, step_once
from guardchart.agents._stepper import Recorded
from guardchart.errors import GuardchartError, ReplayDivergedError, SnapshotError
from guardchart.kernel import Event, Machine, Snapshot, load

__all__ = ["Fork", "fork", "replay"]

_KINDS: Final = frozenset({"init", "event", "decision", "result", "failure", "timer"})


class Fork(NamedTuple):
    """Another way on from an earlier entry.

    Attributes:
        snapshot: Where the agent stood after it.
        log: The entries up to there, to be appended to; the original is not changed.

    Example:
        >>> from guardchart import create_machine
        >>> from guardchart.agents import fork, initial_agent_step
        >>> door = create_machine({"id": "door", "initial": "shut", "states": {"shut": {}}})
        >>> len(fork(door, [initial_agent_step(door).entry], 0).log)
        1
    """

    snapshot: Snapshot
    log: list[dict[str, Any]]


class _Given:
    """The arguments of a step that is replayed: the log's time, and nobody to ask."""

    ledger = scope = None
    trusted = True
    plugins = ()

    def __init__(self, at_ms: float) -> None:
        self.now = at_ms
        self.snapshot: Snapshot | None = None

    def after(self, machine: Machine, step: Any) -> _Given:
        self.snapshot = step.snapshot if isinstance(step, AgentStep) else step
        return self


def replay(machine: Machine, log: Iterable[Mapping[str, Any]], *, verify: bool = True) -> Snapshot:
    """Rebuild a snapshot from the entries of its steps.

    Nothing is executed: recorded results stand in for models and tools, and the ledger, whose
    verdicts are in the log, is not asked.

    Args:
        machine: The machine; it may be a newer version of the one that wrote the log.
        log: ``step.entry`` of every step, from `initial_agent_step` on; or from a snapshot on,
            as a store's ``compact`` leaves it, which is taken as yours.
        verify: Whether to compare each entry with what is reached. Without it an entry that
            this chart does not take changes nothing.

    Returns:
        The snapshot after the last entry.

    Raises:
        ReplayDivergedError: This chart reaches something else than the log says; ``index`` is
            the first such entry. Or an entry is not one.

    Source: @statelyai/agent, event sourcing.

    Example:
        >>> from guardchart import create_machine
        >>> from guardchart.agents import initial_agent_step, transition_agent_step
        >>> door = create_machine({"id": "door", "initial": "shut", "states": {
        ...     "shut": {"on": {"OPEN": "open"}}, "open": {}}})
        >>> first = initial_agent_step(door)
        >>> second = transition_agent_step(door, first, "OPEN")
        >>> replay(door, [first.entry, second.entry]) == second.snapshot
        True
    """
    step: AgentStep | Snapshot | None = None
    for index, entry in enumerate(log):
        if index == 0 and isinstance(entry, Mapping) and entry.get("kind") == "snapshot":
            step = _compacted(machine, entry)
        else:
            step = _replayed(machine, step, entry, index, verify)
    if step is None:
        raise ReplayDivergedError("the log is empty; its first entry is initial_agent_step's", 0)
    return step.snapshot if isinstance(step, AgentStep) else step


def fork(machine: Machine, log: Sequence[Mapping[str, Any]], at: int) -> Fork:
    """Go back to an earlier entry, to go on from there in another way.

    The run stays the same, so that a tool call that was entered on the old way is answered from
    its row and not entered again.

    Args:
        machine: The machine that wrote the log.
        log: The entries; not changed.
        at: The index of the last entry to keep.

    Returns:
        The snapshot after that entry, and the log up to it.

    Raises:
        ReplayDivergedError: As `replay`, or there is no such entry.

    Example:
        >>> from guardchart import create_machine
        >>> from guardchart.agents import initial_agent_step, transition_agent_step
        >>> door = create_machine({"id": "door", "initial": "shut", "states": {
        ...     "shut": {"on": {"OPEN": "open"}}, "open": {}}})
        >>> first = initial_agent_step(door)
        >>> log = [first.entry, transition_agent_step(door, first, "OPEN").entry]
        >>> sorted(fork(door, log, 0).snapshot.state_ids)
        ['door.shut']
    """
    if not 0 <= at < len(log):
        raise ReplayDivergedError(f"the log has no entry {at}; it has {len(log)}", at)
    kept = [dict(entry) for entry in log[: at + 1]]
    return Fork(replay(machine, kept), kept)


def _compacted(machine: Machine, entry: Mapping[str, Any]) -> Snapshot:
    found = entry.get("snapshot")
    if not isinstance(found, Mapping):
        raise ReplayDivergedError("entry 0 is not well formed", 0)
    try:
        return load(machine, dict(found), trusted=True)
    except SnapshotError as error:
        raise ReplayDivergedError(f"entry 0 cannot be applied: {error}", 0) from error


def _replayed(
    machine: Machine, step: AgentStep | Snapshot | None, entry: Any, index: int, verify: bool
) -> AgentStep:
    record = _record(entry, index)
    if (record["kind"] == "init") is not (step is None):
        raise ReplayDivergedError("a log begins with the entry of initial_agent_step", index)
    try:
        recorded = Recorded(_verdicts(entry, index), _updates(entry), _sends(entry))
        following = step_once(machine, step, record, _Given(entry["at_ms"]), recorded)
    except GuardchartError as error:
        raise ReplayDivergedError(f"entry {index} cannot be applied: {error}", index) from error
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ReplayDivergedError(f"entry {index} is not well formed", index) from error
    if verify:
        _verify(machine, following, entry, index)
    return following


def _record(entry: Any, index: int) -> dict[str, Any]:
    if not isinstance(entry, Mapping) or not isinstance(entry.get("event"), Mapping):
        raise ReplayDivergedError(f"entry {index} is not {{event, raw, at_ms}}", index)
    at_ms = entry.get("at_ms")
    if isinstance(at_ms, bool) or not isinstance(at_ms, int | float):
        raise ReplayDivergedError(f"entry {index}: at_ms must be a number", index)
    kind = entry.get("kind", "event")
    if kind not in _KINDS:
        raise ReplayDivergedError(f"entry {index} is of no known kind", index)
    record = {"kind": kind, "event": entry["event"], "raw": entry.get("raw")}
    for key in ("agent", "payload", "request", "run", "timer"):
        if key in entry:
            record[key] = entry[key]
    return record


def _verdicts(entry: Mapping[str, Any], index: int) -> dict[int, Any]:
    noted = entry.get("verdicts", {})
    if not isinstance(noted, Mapping):
        raise ReplayDivergedError(f"entry {index} is not well formed", index)
    return {int(number): _recaller(data) for number, data in noted.items()}


def _updates(entry: Mapping[str, Any]) -> list[tuple[int, str, Mapping[str, Any]]]:
    return [(at, agent, dict(updates)) for at, agent, updates in entry.get("updates", ())]


def _sends(entry: Mapping[str, Any]) -> dict[int, tuple[str, str, Event]]:
    return {
        int(number): (sent["agent"], sent["origin"], Event(sent["type"], sent["payload"]))
        for number, sent in entry.get("sends", {}).items()
    }


def _recaller(data: Mapping[str, Any]) -> Callable[[Any, Any], Any]:
    def recalled(stepper: Any, came: Any) -> Any:
        def judged(turn: Any) -> Any:
            return stepper._hook.judged(stepper.snapshot, came)

        return recall_verdict(data, came, judged)

    return recalled


def _verify(machine: Machine, step: AgentStep, entry: Mapping[str, Any], index: int) -> None:
    said = entry.get("after")
    if not isinstance(said, Mapping):
        dropped = step.receipt is not None and step.receipt.status == "dropped"
        if dropped and entry.get("kind", "event") != "event":
            raise ReplayDivergedError(
                f"entry {index}: nothing waits for this in the chart as it is now", index
            )
        return
    found = fingerprint(step.snapshot)
    if all(said.get(key) == found[key] for key in found):
        return
    if said.get("state_ids") != found["state_ids"]:
        logged = [each for each in said.get("state_ids") or () if each in machine.nodes]
        raise ReplayDivergedError(
            f"entry {index}: the log says {logged}, this chart reaches {found['state_ids']}", index
        )
    raise ReplayDivergedError(
        f"entry {index}: the states are those of the log, the context or what is pending is not",
        index,
    )
