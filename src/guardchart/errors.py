"""Every error guardchart raises: one root, a few families, a stable code each.

A message names what is wrong, where, and how to mend it. It never repeats a value that came
from a model, a snapshot or an attacker: declared names only, and of a tool that a model named
the name, where it has the form of one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

__all__ = [
    "AbortedError",
    "AgentConfigError",
    "AgentError",
    "ApprovalPendingError",
    "ChartError",
    "DecisionExhaustedError",
    "DecisionRefused",
    "GraphInterruptedError",
    "GuardchartError",
    "LedgerError",
    "MissingExtraError",
    "NotSentError",
    "NotSupportedError",
    "QueueFullError",
    "RecordedFailure",
    "RecordingError",
    "ReplayDivergedError",
    "ServiceInterruptedError",
    "SnapshotConflictError",
    "SnapshotDriftError",
    "SnapshotError",
    "SnapshotTamperedError",
    "SnapshotTooLargeError",
    "StepError",
    "StoreConflictError",
    "StoreError",
    "TamperedError",
    "ToolBatchError",
    "ToolDeniedError",
    "ToolTimeoutError",
]


class GuardchartError(Exception):
    """The root of every error this library raises.

    ``code`` is stable across releases and listed in docs/errors.md.
    """

    code: ClassVar[str] = "guardchart"


class ChartError(GuardchartError, ValueError):
    """A chart (or the logic bound to it) is wrong; found when it is compiled.

    ``path`` is the JSON path of the offending place, ``""`` where there is none.

    >>> str(ChartError("unknown target 'paid'", path="$.states.idle.on.PAY"))
    "$.states.idle.on.PAY: unknown target 'paid'"
    """

    code = "chart"

    def __init__(self, message: str, *, path: str = "") -> None:
        super().__init__(f"{path}: {message}" if path else message)
        self.path = path


class StepError(GuardchartError):
    """A step could not be completed; the snapshot that was given is unchanged."""

    code = "step"


class ReplayDivergedError(StepError):
    """A log does not lead this chart where it says; ``index`` is the first such entry.

    Replay with the version of the chart that wrote it, or start anew from a snapshot.

    >>> ReplayDivergedError("entry 3: ...", 3).index
    3
    """

    code = "replay-diverged"

    def __init__(self, message: str, index: int) -> None:
        super().__init__(message)
        self.index = index


class SnapshotConflictError(StepError):
    """An update of a snapshot does not start from the snapshot that is there; none was kept.

    Two nodes moved one machine in the same superstep of a LangGraph graph, or a state key of
    another machine was written. Give each machine a key of its own.
    """

    code = "snapshot-conflict"


class NotSupportedError(GuardchartError):
    """The chosen engine cannot do this, e.g. an async service on the sync engine."""

    code = "not-supported"


class QueueFullError(GuardchartError):
    """An interpreter's bounded queue is full; the event was not accepted."""

    code = "queue-full"


class RecordingError(GuardchartError, ValueError):
    """A file is no recording of an inspector."""

    code = "recording"


class ServiceInterruptedError(GuardchartError):
    """A service was running when its snapshot was taken; its outcome is unknown."""

    code = "service-interrupted"


class SnapshotError(GuardchartError):
    """A snapshot cannot be loaded: malformed, inconsistent or too large.

    ``path`` is the place in the snapshot, ``"$"`` being its root. Nothing was restored.
    """

    code = "snapshot"

    def __init__(self, message: str, *, path: str = "$") -> None:
        super().__init__(f"{message} (at {path})" if path != "$" else message)
        self.path = path


class SnapshotDriftError(SnapshotError):
    """A snapshot belongs to another machine, or to another shape of this one."""

    code = "snapshot-drift"


class SnapshotTamperedError(SnapshotError):
    """The seal of a snapshot is missing or does not fit; nothing of it was kept."""

    code = "snapshot-tampered"


class StoreError(GuardchartError):
    """A store or ledger refused or failed; nothing was written."""

    code = "store"


class StoreConflictError(StoreError):
    """Somebody else has written this run meanwhile; nothing was written.

    Load it again and look at where it stands: what was to be done may be done already.
    """

    code = "store-conflict"


class SnapshotTooLargeError(StoreError):
    """A snapshot is larger than its store takes; nothing was written.

    ``size_bytes`` is the length of its JSON text, ``max_bytes`` the store's
    ``max_snapshot_bytes``. What was stored before is still there; if this was the first write,
    the run does not exist.

    >>> str(SnapshotTooLargeError(2_000_000, 1_048_576)).partition(":")[0]
    'the snapshot takes 2000000 bytes, this store takes 1048576'
    """

    code = "snapshot-too-large"

    def __init__(self, size_bytes: int, max_bytes: int) -> None:
        super().__init__(
            f"the snapshot takes {size_bytes} bytes, this store takes {max_bytes}: cap the input "
            "before it gets here, lower max_messages or pass summarise=, or raise the store's "
            "max_snapshot_bytes"
        )
        self.size_bytes = size_bytes
        self.max_bytes = max_bytes


class LedgerError(StoreError):
    """A ledger verb does not fit the row it names; the row is unchanged.

    ``reason`` is a short stable word (``"unknown"``, ``"closed"``, ``"digest"``,
    ``"expired"``, ``"token"``, ``"early"``, ``"unproposed"``, ...), ``row_id`` the row
    where there is one.

    >>> LedgerError("nobody has approved the call yet", reason="not-approved").reason
    'not-approved'
    """

    code = "ledger"

    def __init__(self, message: str, *, reason: str, row_id: str | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.row_id = row_id


class AgentError(GuardchartError):
    """The family of everything above the kernel: tools, models, agents, bridges."""

    code = "agent"


class AgentConfigError(AgentError, ValueError):
    """The wiring is wrong; raised while building, before anything ran."""

    code = "agent-config"


class GraphInterruptedError(AgentError):
    """The inner graph of a ``langgraph_service`` called ``interrupt()``: it is paused, not done.

    ``interrupts`` are LangGraph's ``Interrupt`` objects, ``state`` is the graph's state so far.
    Route ``onError`` to a waiting state and resume the graph on the same thread with
    ``Command(resume=...)``, or let ``on_interrupt="park"`` do that.
    """

    code = "graph-interrupted"

    def __init__(self, interrupts: Sequence[Any] = (), state: Any = None) -> None:
        count = len(interrupts)
        many = "1 question" if count == 1 else f"{count} questions"
        super().__init__(f"LangGraph interrupt(): the graph is paused, asking [{many}]")
        self.interrupts = tuple(interrupts)
        self.state = state


class ToolDeniedError(AgentError):
    """The gate refused a tool call; the tool did not run.

    ``tool`` is the name where it has the form of a tool's name, else ``"*"``; ``reason`` names
    the check.
    ``results`` are those of the calls of its turn, as in `ToolBatchError`; empty where the
    call did not belong to one.

    >>> ToolDeniedError("refund", "needs human approval").reason
    'needs human approval'
    """

    code = "tool-denied"

    def __init__(self, tool: str, reason: str) -> None:
        super().__init__(f"tool {tool!r} denied: {reason}")
        self.tool = tool
        self.reason = reason
        self.results: Sequence[Mapping[str, str]] = ()


class TamperedError(ToolDeniedError):
    """A parked call is not the one that was proposed; none of the open calls ran."""

    code = "tampered"

    def __init__(self, tool: str) -> None:
        super().__init__(tool, "the pending call is not the one that was proposed")


class ToolBatchError(AgentError):
    """A call of a batch failed; what the others gave is kept in ``results``.

    ``results`` are ``{"tool_call_id", "content"}``, one for each call of the batch whose
    outcome is known.
    """

    code = "tool-batch"

    def __init__(self, message: str, results: Sequence[Mapping[str, str]]) -> None:
        super().__init__(message)
        self.results: Sequence[Mapping[str, str]] = list(results)


class ToolTimeoutError(AgentError):
    """A tool did not answer within its ``timeout_s``; a side effect is in doubt.

    ``results`` are those of the calls of its turn, as in `ToolBatchError`.
    """

    code = "tool-timeout"

    def __init__(self, tool: str, timeout_s: float) -> None:
        super().__init__(f"tool {tool!r} did not answer within {timeout_s:g} s")
        self.tool = tool
        self.timeout_s = timeout_s
        self.results: Sequence[Mapping[str, str]] = ()


class DecisionRefused(AgentError):
    """A decision does not fit the calls that wait for one; nothing was decided.

    ``reason`` says what does not fit and is safe to show. Look at the pending calls again and
    answer those.
    """

    code = "decision-refused"

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class DecisionExhaustedError(AgentError):
    """No answer to a decision could be taken; no event was sent.

    ``attempts`` are the `DecisionAttempt` objects, oldest first; empty where the chart accepted
    none of the candidates, so that nobody was asked.
    """

    code = "decision-exhausted"

    def __init__(self, attempts: Sequence[Any] = ()) -> None:
        self.attempts: tuple[Any, ...] = tuple(attempts)
        failures = ", ".join(each.failure for each in self.attempts)
        super().__init__(
            f"no event that the chart takes was chosen in {len(self.attempts)} attempt(s): "
            f"{failures}"
            if failures
            else "none of the events that may be chosen is accepted here"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.attempts,)


class AbortedError(AgentError):
    """The signal of a run was set; no further model was asked."""

    code = "aborted"


class ApprovalPendingError(AgentError):
    """A run cannot be resumed yet: calls still wait for a person.

    ``pending`` lists them as a reviewer is shown them. Decide about those, and try again.

    >>> str(ApprovalPendingError([{"id": "c1"}]))
    '1 tool call still waits for a decision'
    """

    code = "approval-pending"

    def __init__(self, pending: Sequence[Mapping[str, object]]) -> None:
        many = len(pending) != 1
        super().__init__(
            f"{len(pending)} tool call{'s' * many} still wait{'' if many else 's'} for a decision"
        )
        self.pending: Sequence[Mapping[str, object]] = list(pending)


class NotSentError(AgentError):
    """Raised by a tool to say that its side effect certainly did not happen.

    The gate releases the claim (at most three times), so the call may be tried again.

    >>> def charge(order: int) -> str:
    ...     raise NotSentError("the provider refused the connection")
    >>> charge(7)
    Traceback (most recent call last):
        ...
    guardchart.errors.NotSentError: the provider refused the connection
    """

    code = "not-sent"


class RecordedFailure(AgentError):
    """A failure as a log, or another process, has it.

    Its class has the name of the original's and no more of it: compare names, not classes.
    """

    code = "recorded-failure"


class MissingExtraError(GuardchartError, ImportError):
    """An optional dependency is not installed; the message names the command."""

    code = "missing-extra"

    def __init__(self, what: str, install: str) -> None:
        super().__init__(f"{what} is not installed: {install}")
        self.what = what
        self.install = install
