"""The pending calls of one turn: who may run now, what became of each, and what that makes.

A host runs them in one of two ways: the loop's own service runs them all, a durable host runs
each as a request of its own. Both ask `ready` what may run, enter a call by `run` or `arun`, and
end the batch by `close`, so that order, gate and outcome are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple, Self

from guardchart.agents._context import calls_of, pending_entries, row_ids
from guardchart.agents._observe import Watch, watch_tool
from guardchart.agents._recorded import named_failure
from guardchart.errors import TamperedError, ToolBatchError, ToolDeniedError, ToolTimeoutError
from guardchart.gate import (
    Facts,
    Outcome,
    ToolCall,
    ToolRegistry,
    Verdict,
    aexecute,
    allowed_tools,
    answer_from_row,
    as_allowed,
    assess,
    execute,
    lookup_verdicts,
    shown_name,
)
from guardchart.runtime import ServiceScope

__all__ = ["CallResult", "PendingCalls"]

NOT_RUN: Final = "not run: another call of this turn failed"
_BROKEN: Final = "broken"
_FAILED: Final = frozenset({"failed", "timeout", "not_sent", "denied", "tampered", _BROKEN})


class CallResult(NamedTuple):
    """What became of one call, as far as the loop wants to know; plain data but for ``cause``.

    Attributes:
        status: As of a gate's ``Outcome``; ``broken`` where the ledger failed on the way.
        text: What the conversation gets.
        error: The class of what was raised, "" where nothing was.
        reason: Why it was denied, "" where it was not.
        tool: The tool whose refusal spoilt the whole batch before any of it ran, else "".
        batch: Results of that batch, else None.
        cause: The exception itself; not kept when the result is written down.
    """

    status: str
    text: str
    error: str = ""
    reason: str = ""
    tool: str = ""
    batch: tuple[Mapping[str, str], ...] | None = None
    cause: BaseException | None = None

    @classmethod
    def of(cls, outcome: Outcome) -> Self:
        """The result an outcome of the gate makes."""
        error = outcome.error
        reason = ""
        if outcome.status == "denied":
            reason = error.reason if isinstance(error, ToolDeniedError) else outcome.text
        name = type(error).__name__ if error is not None else ""
        return cls(outcome.status, outcome.text, name, reason, cause=error)

    @classmethod
    def broken(cls, error: BaseException) -> Self:
        """The result of a call whose ledger failed: whether it was entered only its row knows."""
        return cls(_BROKEN, "", type(error).__name__, cause=error)

    @classmethod
    def refused(cls, error: ToolDeniedError) -> Self:
        """The result of a call whose whole batch was refused before any of it ran."""
        return cls(
            "tampered" if isinstance(error, TamperedError) else "denied",
            f"refused: {error.reason}",
            type(error).__name__,
            error.reason,
            error.tool,
            tuple(map(dict, error.results)),
            error,
        )

    def dump(self) -> dict[str, Any]:
        """The result as JSON types; empty parts are left out."""
        data: dict[str, Any] = {"status": self.status, "text": self.text}
        if self.error:
            data["error"] = self.error
        if self.reason:
            data["reason"] = self.reason
        if self.batch is not None:
            data["tool"] = self.tool
            data["batch"] = [dict(each) for each in self.batch]
        return data

    @classmethod
    def load(cls, data: Any) -> Self | None:
        """The result that JSON data describes, None where it describes none."""
        if not isinstance(data, Mapping):
            return None
        status, text = data.get("status"), data.get("text", "")
        error, reason = data.get("error", ""), data.get("reason", "")
        if not (isinstance(status, str) and status and isinstance(text, str)):
            return None
        if not (isinstance(error, str) and isinstance(reason, str)):
            return None
        batch = data.get("batch")
        if batch is not None:
            if not isinstance(batch, list | tuple):
                return None
            batch = tuple(each for each in batch if isinstance(each, Mapping))
        tool = "" if batch is None else shown_name(data.get("tool"))
        cause = named_failure(error) if error else None
        return cls(status, text, error, reason, tool, batch, cause)


class PendingCalls:
    """The pending calls of one machine, taken from its context as it is now.

    Args:
        scope: The service's view of its machine; None where it was called by hand.
        context: The machine's context.
        registry: The tools.
        ledger: Where the calls' rows are; None to judge only, when nothing is run.
        max_tool_calls: The most calls one turn may have.
    """

    def __init__(
        self,
        scope: ServiceScope | None,
        context: Mapping[str, Any],
        registry: ToolRegistry,
        *,
        ledger: Any = None,
        max_tool_calls: int = 8,
    ) -> None:
        self.registry = registry
        self.max_tool_calls = max_tool_calls
        self.scope = scope
        self.host = None if scope is None else scope.host
        self.ledger = ledger
        self.context = context
        self.entries = pending_entries(context)
        self.calls = calls_of(self.entries)
        self._verdicts: list[Verdict] | None = None
        self.rows: list[Any] = [None] * len(self.calls)
        self.results: dict[int, CallResult] = {}
        self._recalled = False
        self._groups: tuple[list[int], list[int]] | None = None

    # Who they are

    def judge(self) -> list[Verdict]:
        """Judge every call by checks 1 to 5, in the state as it is now; pure.

        Whether an id was spent before was asked when the calls were proposed, which spent it.
        """
        self._verdicts = assess(
            self.calls,
            self.registry,
            allowed_tools(None if self.scope is None else self.scope.node),
            max_tool_calls=self.max_tool_calls,
            context=self.context,
        )
        return self._verdicts

    @property
    def verdicts(self) -> list[Verdict]:
        """What was judged of each call; they are judged now where nobody has asked yet."""
        return self.judge() if self._verdicts is None else self._verdicts

    def prepare(self) -> None:
        """Judge every call and look up its row, before any of them runs.

        Raises:
            ToolDeniedError: One may not run, so none of them does; ``results`` are attached.
        """
        self.judge()
        if self.host is not None and self.calls:
            anywhere = self.verdicts
            if not all(verdict.ok for verdict in anywhere):
                # Rows are found whatever the state allows: what ran before is told, not refused.
                anywhere = assess(
                    self.calls, self.registry, as_allowed("*"), max_tool_calls=self.max_tool_calls
                )
            self.rows = lookup_verdicts(
                self.ledger,
                self.host,
                self.scope.snapshot.batch_no if self.scope is not None else 0,
                anywhere,
                row_ids=row_ids(self.entries),
                now=self._now(),
            )
            self._take_up_edits()
        for index, verdict in enumerate(self.verdicts):
            if not verdict.ok and not self._answered(index):
                raise self._denial(ToolDeniedError(_shown(verdict), verdict.reason or ""))
        for index, verdict in enumerate(self.verdicts):
            if verdict.needs_row and self.rows[index] is None:
                raise self._denial(TamperedError(_shown(verdict)))

    def recall(self, results: Mapping[int, CallResult]) -> None:
        """Take up what is known of some calls; asks no ledger."""
        self.results.update(results)
        self._recalled = True

    def _take_up_edits(self) -> None:
        """Turn to the edit of a call that had run, where its row vouches for the note."""
        for index, entry in enumerate(self.entries):
            row, noted = self.rows[index], entry.get("edit_row_id")
            if row is None or not row.entered or not isinstance(noted, str):
                continue
            edit = self.ledger.row(row.slot.scope, noted)
            if (
                edit is not None
                and edit.parent_id == (row.parent_id or row.id)
                and edit.slot._replace(digest=row.digest) == row.slot
                and edit.arguments is not None
            ):
                call = self.calls[index]
                self.rows[index] = edit
                self.calls[index] = ToolCall(call.id, call.name, dict(edit.arguments))

    # Who may run

    def ordered(self, index: int) -> bool:
        """Whether a call runs in its turn, after the calls that only read."""
        verdict = self.verdicts[index]
        tool = verdict.tool
        return verdict.needs_row or (tool is not None and tool.sequential)

    def ready(self) -> list[int]:
        """Indices of the calls that may run now, side by side; none once the batch is over.

        Calls that only read come first, together; then the others, one after another in the
        model's order, until one fails.
        """
        results = self.results
        if len(results) == len(self.calls):
            return []
        if len(self.calls) == 1:  # alone, it waits for nobody
            return [0]
        if self._groups is None:
            writers = [index for index in range(len(self.calls)) if self.ordered(index)]
            readers = [index for index in range(len(self.calls)) if index not in writers]
            self._groups = readers, writers
        readers, writers = self._groups
        if len(results) < len(readers) or any(index not in results for index in readers):
            return [index for index in readers if index not in results]
        if self.failed():
            return []
        for index in writers:
            if index not in results:
                return [index]
        return []

    def failed(self) -> bool:
        """Whether a call spoiled the batch."""
        return any(each.status in _FAILED for each in self.results.values())

    # Running one

    def run(self, index: int) -> None:
        """Take one call through the gate; its result is kept. Raises no ``Exception``."""
        try:
            with self._watch(index) as watch:
                outcome = execute(self.calls[index], self._facts, **self._claimant(index))
                self.results[index] = CallResult.of(outcome)
                watch.ended(outcome)
        except Exception as error:
            self.results[index] = CallResult.broken(error)

    async def arun(self, index: int) -> None:
        """Do what `run` does, from a running loop."""
        try:
            with self._watch(index) as watch:
                outcome = await aexecute(self.calls[index], self._facts, **self._claimant(index))
                self.results[index] = CallResult.of(outcome)
                watch.ended(outcome)
        except Exception as error:
            self.results[index] = CallResult.broken(error)

    def _watch(self, index: int) -> Watch:
        return watch_tool(self.scope, self.calls[index], self.verdicts[index].tool)

    def _now(self) -> int:
        return 0 if self.scope is None else int(self.scope.clock.now_ms())

    def _facts(self) -> Facts:
        scope = self.scope
        return Facts(
            self.registry,
            allowed_tools(scope.node if scope is not None and scope.active else None),
            max_tool_calls=self.max_tool_calls,
            turn_size=len(self.calls),
            context=self.context,
        )

    def _claimant(self, index: int) -> dict[str, Any]:
        now: Callable[[], int] = self._now
        return {
            "ledger": self.ledger,
            "scope": "" if self.host is None else self.host.scope,
            "row": self.rows[index],
            "now": now,
        }

    def _answered(self, index: int) -> bool:
        """Whether the call was closed or entered before, so that its row has its result."""
        row = self.rows[index]
        return row is not None and answer_from_row(row, ledger=self.ledger) is not None

    # What it makes

    def close(self) -> list[dict[str, str]]:
        """The results, one a call in order.

        Raises:
            ToolDeniedError, ToolTimeoutError, ToolBatchError: The call that spoiled the batch;
                ``results`` hold what is known of the others.
        """
        results = self._told(NOT_RUN)
        found = sorted(self.results.items())
        for index, each in found:
            if each.batch is not None:
                raise _refusal(each)
            if each.status == "tampered":
                raise self._denial(TamperedError(self._shown(index)))
            if each.status == "denied":
                denied = ToolDeniedError(self._shown(index), each.reason)
                denied.results = results
                raise denied
        for index, each in found:
            if each.status == "timeout":
                timeout = ToolTimeoutError(self._shown(index), self._timeout_s(index))
                timeout.results = results
                raise timeout
            if each.status in _FAILED and each.status != _BROKEN:
                raise ToolBatchError(
                    f"tool {self._shown(index)!r} failed: {each.error or 'AgentError'}",
                    results,
                ) from each.cause
        for index, each in found:
            if each.status == _BROKEN:
                raise ToolBatchError(
                    f"tool {self._shown(index)!r}: {each.error}", results
                ) from each.cause
        return results

    def _told(self, default: str) -> list[dict[str, str]]:
        """A result per call, but for one that only its row knows about.

        A call that was not reached, or whose ledger failed, may have been entered elsewhere.
        """
        told = []
        for index, call in enumerate(self.calls):
            result = self.results.get(index)
            if result is not None and result.status != _BROKEN:
                told.append({"tool_call_id": call.id, "content": result.text})
            elif result is None and not self._has_row(index):
                told.append({"tool_call_id": call.id, "content": default})
        return told

    def _has_row(self, index: int) -> bool:
        """Whether a call's row has the word on it; only `prepare` has looked the rows up."""
        if not self._recalled:
            return self.rows[index] is not None
        return self.verdicts[index].needs_row or "row_id" in self.entries[index]

    def _denial(self, error: ToolDeniedError) -> ToolDeniedError:
        error.results = self._told(f"refused: {error.reason}")
        return error

    def _shown(self, index: int) -> str:
        return _shown(self.verdicts[index])

    def _timeout_s(self, index: int) -> float:
        tool = self.registry.get(self.calls[index].name)
        return 0.0 if tool is None else tool.timeout_s


def _refusal(result: CallResult) -> ToolDeniedError:
    tampered = result.status == "tampered"
    error = TamperedError(result.tool) if tampered else ToolDeniedError(result.tool, result.reason)
    error.results = result.batch or ()
    return error


def _shown(verdict: Verdict) -> str:
    return verdict.tool.name if verdict.tool is not None else "*"
