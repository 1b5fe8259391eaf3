"""``AgentResult``: how a run settled, read from the machine it leaves behind."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Generic, Literal, TypeVar

from guardchart.agents._charts import WAITING_STATES
from guardchart.agents._control import Cause, RunControl, cause_of
from guardchart.errors import AgentError, SnapshotError
from guardchart.kernel import Event, dump
from guardchart.runtime._rest import waits

__all__ = ["AgentResult", "result_of"]

OutputT = TypeVar("OutputT")

_MESSAGES: Final = {
    "aborted": "the signal was set",
    "max-model-calls": "the run made max_model_calls model calls and asked for one more",
    "stopped": "the machine was stopped by somebody else",
}


@dataclass(frozen=True)
class AgentResult(Generic[OutputT]):
    """How a run settled.

    Attributes:
        final_state: The active leaf's id; several are joined by commas.
        status: ``"done"`` a final state was reached, ``"idle"`` it rests and may be resumed,
            ``"error"`` the run itself failed; see ``cause``.
        context: The machine's context.
        output: The machine's output, else ``context["result"]``.
        error: ``{"kind", "message"}`` of a run that went wrong, else None. A loop that ended in
            its ``error`` state is ``done`` with ``error`` set.
        waiting: Whether it waits for a person.
        snapshot: Snapshot JSON to resume from.
        cause: Why ``status`` is ``"error"``: ``"aborted"`` (the signal was set),
            ``"max-model-calls"``, ``"decision-exhausted"`` (and the chart handled it nowhere),
            ``"machine"`` (any other fault, see ``error``) or ``"stopped"`` (somebody stopped the
            machine); else None.
        exception: The exception behind ``error`` of a machine that failed in this call.
        ignored: The event the resumed state did not take, else None.

    Example:
        >>> from guardchart.agents import FakeModel, run_agent_sync
        >>> result = run_agent_sync(FakeModel([{"text": "hi"}], is_async=False), prompt="hello")
        >>> result.ok, result.status, result.output, result.usage["turns"]
        (True, 'done', 'hi', 1)
    """

    final_state: str
    status: Literal["done", "idle", "error"]
    context: Mapping[str, Any]
    output: OutputT | None
    error: Mapping[str, Any] | None
    waiting: bool
    snapshot: Mapping[str, Any] = field(repr=False)
    cause: Cause | None = None
    ignored: Event | None = None
    exception: BaseException | None = field(default=None, repr=False, compare=False)

    @property
    def usage(self) -> dict[str, Any]:
        """``{turns, tokens_in, tokens_out, cost_usd}`` as far as the context counts them."""
        return {
            key: self.context[key]
            for key in ("turns", "tokens_in", "tokens_out", "cost_usd")
            if key in self.context
        }

    @property
    def ok(self) -> bool:
        """Whether the run came to a clean end."""
        return self.status == "done" and self.error is None


def result_of(interpreter: Any, ignored: Event | None, control: RunControl) -> AgentResult[Any]:
    """How a run settled; the machine may still be running."""
    snapshot = interpreter.snapshot
    context = interpreter.context if interpreter.actors else snapshot.context.copy()
    status: Literal["done", "idle", "error"] = "idle"
    cause = cause_of(interpreter, control)
    error = context.get("error")
    exception: BaseException | None = None
    if interpreter.status == "done":
        status = "done"
    elif cause is not None:
        status = "error"
        if cause in _MESSAGES:
            error = {"kind": cause, "message": _MESSAGES[cause]}
        else:
            error = error or _machine_error(interpreter, cause)
            exception = interpreter.error if isinstance(interpreter.error, Exception) else None
    return AgentResult(
        final_state=", ".join(sorted(snapshot.state_ids)),
        status=status,
        context=context,
        output=snapshot.output if snapshot.output is not None else context.get("result"),
        error=error,
        waiting=status == "idle" and waits(interpreter, WAITING_STATES),
        snapshot=_saved(interpreter),
        cause=cause,
        ignored=ignored,
        exception=exception,
    )


def _saved(interpreter: Any) -> dict[str, Any]:
    """The snapshot; of a conversation that is too large for one, its newest turns."""
    try:
        return interpreter.dump()  # type: ignore[no-any-return]
    except SnapshotError:
        agent = getattr(interpreter.machine.logic, "attachments", {}).get("agent")
        fewer = () if agent is None else agent.smaller(interpreter.machine, interpreter.snapshot)
        for each in fewer:
            with contextlib.suppress(SnapshotError):
                return dump(each)
        raise


def _machine_error(interpreter: Any, kind: str) -> dict[str, str]:
    error = interpreter.error
    if isinstance(error, Mapping):
        return {"kind": kind, "message": str(error.get("message") or error.get("type"))}
    message = str(error) if isinstance(error, AgentError) else type(error).__name__
    return {"kind": kind, "message": message}
