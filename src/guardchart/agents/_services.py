"""The loop's two services: the model call, and the tools a turn may run."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final

from guardchart.agents._budgets import add_usage, clamp_usage
from guardchart.agents._context import (
    pending_calls,
    pending_entries,
    request_messages,
    row_ids,
)
from guardchart.agents._models import ModelCall, ModelResponse, Usage, is_async_model
from guardchart.agents._observe import Watch, watch_model, watch_tool
from guardchart.agents._turn import ModelTurn
from guardchart.errors import (
    AgentError,
    TamperedError,
    ToolBatchError,
    ToolDeniedError,
    ToolTimeoutError,
)
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
)
from guardchart.runtime import ServiceScope

__all__ = ["CallModel", "RunTool"]

NOT_RUN: Final = "not run: another call of this turn failed"


class CallModel:
    """Asks the model once: ``(scope, context, event) -> ModelTurn``.

    Its usage is added by ``settle`` when it ends, failed or not, and by ``late`` when it ends
    after its state was left.
    """

    __guardchart_form__ = 3

    def __init__(
        self,
        model: ModelCall,
        registry: ToolRegistry,
        *,
        system_prompt: str | None = None,
        is_async: bool | None = None,
    ) -> None:
        self.model = model
        self.registry = registry
        self.system_prompt = system_prompt
        self.is_async = is_async_model(model) if is_async is None else is_async
        self.bounded = getattr(model, "bounded", False) is True

    def __call__(self, scope: ServiceScope | None, context: Mapping[str, Any], event: Any) -> Any:
        node = None if scope is None else scope.node
        allowed = allowed_tools(node) if node is not None else as_allowed(())
        messages = request_messages(context, self.system_prompt)
        schemas = self.registry.schemas(allowed.names(self.registry))
        if self.is_async:
            return self._ask(scope, messages, schemas)
        with watch_model(scope, self.model, messages, schemas) as watch:
            answer = self.model(messages, schemas)
            if inspect.isawaitable(answer):
                if inspect.iscoroutine(answer):
                    answer.close()
                raise TypeError(
                    "the model returned an awaitable under SyncInterpreter; use a sync model, or "
                    "the async Interpreter"
                )
            turn = _turn(answer)
            watch.ended(turn)
        return turn

    async def _ask(
        self, scope: ServiceScope | None, messages: list[Any], schemas: list[Any]
    ) -> ModelTurn:
        with watch_model(scope, self.model, messages, schemas) as watch:
            answer: Any = self.model(messages, schemas)
            turn = _turn(await answer if inspect.isawaitable(answer) else answer)
            watch.ended(turn)
        return turn

    def settle(self, context: Mapping[str, Any], outcome: Any) -> dict[str, Any]:
        """One more turn and its usage; a failed call is a turn too."""
        return add_usage(context, _usage(outcome), turns=1)

    def late(self, context: Mapping[str, Any], outcome: Any) -> dict[str, Any]:
        """The usage of a call whose turn was counted when its deadline fired."""
        return add_usage(context, _usage(outcome))


def _turn(answer: Any) -> ModelTurn:
    if not isinstance(answer, ModelResponse):
        raise AgentError(
            f"a model must return a ModelResponse, not {type(answer).__name__}; see ModelCall"
        )
    if answer.text is not None and not isinstance(answer.text, str):
        raise AgentError("a model's text must be a str or None")
    if not all(isinstance(call, ToolCall) for call in answer.tool_calls):
        raise AgentError("a model's tool_calls must be ToolCall objects")
    return ModelTurn(
        answer.text, answer.tool_calls, clamp_usage(answer.usage), answer.model, charged=True
    )


def _usage(outcome: Any) -> Usage:
    found = getattr(outcome, "usage", None)
    return found if found is not None else Usage()


class RunTool:
    """Runs the pending calls through the gate: ``(scope, context, event) -> results``.

    Read-only calls run concurrently, then side effects one after another in the model's
    order. Whatever happens, every pending call has a result: in what is returned, or in
    ``results`` of what is raised.

    Returns:
        ``[{"tool_call_id", "content"}, ...]``, one per pending call.

    Raises:
        ToolDeniedError: A call may not run; none of the batch did.
        ToolBatchError, ToolTimeoutError: A tool failed or did not answer in time.
    """

    __guardchart_form__ = 3

    def __init__(
        self,
        registry: ToolRegistry,
        *,
        ledger: Callable[[Any], Any],
        max_tool_calls: int = 8,
        is_async: bool = True,
    ) -> None:
        self.registry = registry
        self.ledger = ledger
        self.max_tool_calls = max_tool_calls
        self.is_async = is_async

    def __call__(self, scope: ServiceScope | None, context: Mapping[str, Any], event: Any) -> Any:
        batch = _Batch(self, scope, context)
        return self._arun(batch) if self.is_async else self._run(batch)

    def _run(self, batch: _Batch) -> list[dict[str, str]]:
        batch.prepare()
        readers, writers = batch.groups()
        if len(readers) > 1:
            from guardchart.runtime._workers import WORKERS

            for future in [WORKERS.submit(batch.run, index) for index in readers]:
                future.result()
        else:
            for index in readers:
                batch.run(index)
        for index in writers:
            if batch.failed():
                break
            batch.run(index)
        return batch.close()

    async def _arun(self, batch: _Batch) -> list[dict[str, str]]:
        if getattr(batch.ledger, "blocking", False):
            await asyncio.to_thread(batch.prepare)
        else:
            batch.prepare()
        readers, writers = batch.groups()
        await asyncio.gather(*(batch.arun(index) for index in readers))
        for index in writers:
            if batch.failed():
                break
            await batch.arun(index)
        return batch.close()


class _Batch:
    """One run of the pending calls: who they are, their rows, and what became of them."""

    def __init__(
        self, service: RunTool, scope: ServiceScope | None, context: Mapping[str, Any]
    ) -> None:
        self.registry = service.registry
        self.max_tool_calls = service.max_tool_calls
        self.scope = scope
        self.host = None if scope is None else scope.host
        self.ledger = service.ledger(self.host)
        self.context = context
        self.entries = pending_entries(context)
        self.calls = pending_calls(context)
        self.verdicts: list[Verdict] = []
        self.rows: list[Any] = [None] * len(self.calls)
        self.outcomes: dict[int, Outcome] = {}
        self.broken: dict[int, Exception] = {}

    def prepare(self) -> None:
        """Assess every call again and look up its row, before any of them runs."""
        scope = self.scope
        own = {call.id for call in self.calls}
        raw_spent = self.context.get("spent_call_ids")
        spent = [each for each in raw_spent or () if isinstance(each, str) and each not in own]
        node = None if scope is None else scope.node
        allowed = allowed_tools(node) if node is not None else as_allowed(())
        self.verdicts = assess(
            self.calls,
            self.registry,
            allowed,
            spent_ids=spent,
            max_tool_calls=self.max_tool_calls,
            context=self.context,
        )
        if self.host is not None and self.calls:
            # Rows are found whatever the state allows now: what ran before is told, not refused.
            anywhere = assess(
                self.calls, self.registry, as_allowed("*"), max_tool_calls=self.max_tool_calls
            )
            self.rows = lookup_verdicts(
                self.ledger,
                self.host,
                scope.snapshot.batch_no if scope is not None else 0,
                anywhere,
                row_ids=row_ids(self.context),
                now=self.now(),
            )
            self._take_up_edits()
        for index, verdict in enumerate(self.verdicts):
            if not verdict.ok and not self._answered(index):
                raise self._denial(ToolDeniedError(_shown(verdict), verdict.reason or ""))
        for index, verdict in enumerate(self.verdicts):
            if verdict.needs_row and self.rows[index] is None:
                raise self._denial(TamperedError(_shown(verdict)))

    def _take_up_edits(self) -> None:
        """Turn to the edit of a call that had run, where its row vouches for the note."""
        for index, entry in enumerate(pending_entries(self.context)):
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

    def now(self) -> int:
        return 0 if self.scope is None else int(self.scope.clock.now_ms())

    def groups(self) -> tuple[list[int], list[int]]:
        """Indices of the calls that may run side by side, and of those that run in order."""
        readers = [i for i, verdict in enumerate(self.verdicts) if not _ordered(verdict)]
        return readers, [i for i in range(len(self.calls)) if i not in readers]

    def _facts(self, index: int) -> Facts:
        scope = self.scope
        node = scope.node if scope is not None and scope.active else None
        own = self.calls[index].id
        return Facts(
            self.registry,
            allowed_tools(node) if node is not None else as_allowed(()),
            max_tool_calls=self.max_tool_calls,
            turn_size=len(self.calls),
            spent_ids=frozenset(
                each
                for each in self.context.get("spent_call_ids") or ()
                if isinstance(each, str) and each != own
            ),
            context=self.context,
            row=self.rows[index],
            now=self.now(),
        )

    def _claimant(self, index: int) -> dict[str, Any]:
        return {
            "ledger": self.ledger,
            "scope": "" if self.host is None else self.host.scope,
            "row": self.rows[index],
            "now": self.now,
        }

    def _watch(self, index: int) -> Watch:
        return watch_tool(self.scope, self.calls[index], self.verdicts[index].tool)

    def run(self, index: int) -> None:
        try:
            with self._watch(index) as watch:
                outcome = self.outcomes[index] = execute(
                    self.calls[index], lambda: self._facts(index), **self._claimant(index)
                )
                watch.ended(outcome)
        except Exception as error:
            self.broken[index] = error

    async def arun(self, index: int) -> None:
        try:
            with self._watch(index) as watch:
                outcome = self.outcomes[index] = await aexecute(
                    self.calls[index], lambda: self._facts(index), **self._claimant(index)
                )
                watch.ended(outcome)
        except Exception as error:
            self.broken[index] = error

    def failed(self) -> bool:
        return bool(self.broken) or any(e.status in _FAILED for e in self.outcomes.values())

    def results(self, default: str) -> list[dict[str, str]]:
        """A result per call, but for one that only its row knows about.

        A call that was not reached, or whose ledger failed, may have been entered elsewhere.
        """
        return [
            {
                "tool_call_id": call.id,
                "content": self.outcomes[index].text if index in self.outcomes else default,
            }
            for index, call in enumerate(self.calls)
            if index in self.outcomes or (self.rows[index] is None and index not in self.broken)
        ]

    def _answered(self, index: int) -> bool:
        """Whether the call was closed or entered before, so that its row has its result."""
        row = self.rows[index]
        return row is not None and answer_from_row(row, ledger=self.ledger) is not None

    def _denial(self, error: ToolDeniedError) -> ToolDeniedError:
        error.results = self.results(f"refused: {error.reason}")
        return error

    def close(self) -> list[dict[str, str]]:
        """The results, or the error that says which call spoiled the batch."""
        results = self.results(NOT_RUN)
        for index, outcome in sorted(self.outcomes.items()):
            if outcome.status == "tampered":
                raise self._denial(TamperedError(_shown(self.verdicts[index])))
            if outcome.status == "denied":
                error = outcome.error
                reason = error.reason if isinstance(error, ToolDeniedError) else outcome.text
                denied = ToolDeniedError(_shown(self.verdicts[index]), reason)
                denied.results = results
                raise denied
        for index, outcome in sorted(self.outcomes.items()):
            if outcome.status == "timeout":
                timeout = ToolTimeoutError(_shown(self.verdicts[index]), self._timeout_s(index))
                timeout.results = results
                raise timeout
            if outcome.status in _FAILED:
                name = type(outcome.error).__name__ if outcome.error is not None else "AgentError"
                raise ToolBatchError(
                    f"tool {_shown(self.verdicts[index])!r} failed: {name}", results
                ) from outcome.error
        for index, broken in sorted(self.broken.items()):
            raise ToolBatchError(
                f"tool {_shown(self.verdicts[index])!r}: {type(broken).__name__}", results
            ) from broken
        return results

    def _timeout_s(self, index: int) -> float:
        tool = self.registry.get(self.calls[index].name)
        return 0.0 if tool is None else tool.timeout_s


_FAILED: Final = frozenset({"failed", "timeout", "not_sent", "denied", "tampered"})


def _ordered(verdict: Verdict) -> bool:
    tool = verdict.tool
    return verdict.needs_row or (tool is not None and tool.sequential)


def _shown(verdict: Verdict) -> str:
    return verdict.tool.name if verdict.tool is not None else "*"
