"""Entering an authorised call: the body, its timeout, its record, and the text of its result."""

from __future__ import annotations

import asyncio
import functools
import json
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from pydantic_core import to_json

from guardchart._redact import error_text, scrub_bounded, scrub_capped, truncated
from guardchart.errors import LedgerError, NotSentError, ToolDeniedError, ToolTimeoutError
from guardchart.gate._answers import (
    EDITED_NOTE,
    IN_DOUBT,
    Answer,
    Outcome,
    answer_from_row,
    closing_text,
)
from guardchart.gate._authorise import (
    RUNNING,
    AuthorisedCall,
    ClaimedRow,
    Look,
    Now,
    aauthorise,
    authorise,
    in_thread,
    read_now,
    to_its_end,
)
from guardchart.gate._bodies import BodyQuit, BodyTimeout, run_async, run_here, run_sync
from guardchart.gate._check import MISMATCH
from guardchart.gate._tools import ToolCall, shown_name
from guardchart.persistence import ReleaseReason

__all__ = ["aexecute", "arun_authorised", "execute", "run_authorised"]

LOSER_MARGIN_S = 5.0
_RECORD_TRIES = (0.05, 0.2, None)
_MAX_ENTRIES = 8
UNSHOWN = "the tool ran to its end, but its result cannot be shown"

Body = Callable[[dict[str, Any]], Any]
AsText = Callable[[Any], str]
Pauses = tuple[type[BaseException], ...]


class _NotEntered(Exception):
    """The body was given up before it began."""


def render(value: Any, max_chars: int) -> str:
    """Return a tool's result as the text a conversation gets: masked, cut, marked.

    The value is bounded before it is masked and masked before it is cut, so that neither a
    huge result costs much nor a cut leaves half a secret.
    """
    if isinstance(value, (bytes, bytearray)):
        value = bytes(value[: max_chars * 4 + 65536]).decode("utf-8", "replace")
    if isinstance(value, str):
        clean = scrub_capped(value, max_chars)
        over = len(value) - max_chars
        return clean if over <= 0 else truncated(clean, max_chars, over)
    clean_value = scrub_bounded(value, max_nodes=max_chars * 4 + 1000, max_text=max_chars)
    try:
        text = to_json(clean_value, inf_nan_mode="constants", fallback=_shown).decode()
    except Exception:
        text = f"<{type(value).__name__}>"
    over = len(text) - max_chars
    return text if over <= 0 else truncated(text, max_chars, over)


def _shown(value: Any) -> str:
    try:
        return str(value)
    except Exception:
        return f"<{type(value).__name__}>"


class _Run:
    """One entry. The sync and the async form share every step but the waiting."""

    def __init__(self, authorised: AuthorisedCall, body: Body | None, as_text: AsText | None):
        if type(authorised) is not AuthorisedCall:
            raise TypeError("an executor takes an AuthorisedCall, made by authorise()")
        authorised.take()
        self.auth = authorised
        self.body = body
        self.as_text = as_text
        self.note = EDITED_NOTE if authorised.edited else ""

    @property
    def threaded(self) -> bool:
        if self.body is None:
            return not self.auth.tool.is_async
        return not asyncio.iscoroutinefunction(self.body)

    def enter(self) -> Any:
        """Run the body; called on the thread or in the task where it is to run."""
        auth = self.auth
        if self.body is not None:
            arguments = json.loads(auth.text)
            if not auth.enter():
                raise _NotEntered
            return self.body(arguments)
        args, kwargs = auth.tool.shape.bind(auth.text, auth.idempotency_key, auth.call.id)
        if not auth.enter():
            raise _NotEntered
        return auth.tool.fn(*args, **kwargs)

    def outcome(self, status: str, text: str, **more: Any) -> Outcome:
        auth = self.auth
        note = self.note if more.get("entered") else ""
        return Outcome(
            auth.call.id, auth.tool.name, status, note + text, row_id=auth.row_id, **more
        )

    def returned(self, value: Any) -> Outcome:
        """The outcome of a body that came to its end; it is done, whether or not it can be shown.

        Showing a value may run its own code (``__str__``, a lazy query), so this is called where
        the body ran, on its time.
        """
        try:
            text = (
                render(value, self.auth.max_output_chars)
                if self.as_text is None
                else self.as_text(value)
            )
        except (Exception, SystemExit) as exc:
            text = f"{UNSHOWN} ({type(exc).__name__})"
        return self.outcome("done", text, value=value, entered=True)

    def raised(self, exc: BaseException) -> Outcome:
        if isinstance(exc, BodyQuit):
            exc = exc.cause
        text = f"error: {error_text(exc, chain=False)}"
        return self.outcome("failed", text, error=exc, entered=True)

    def timed_out(self) -> Outcome:
        tool = self.auth.tool
        text = f"error: tool call timed out after {tool.timeout_s:g} s"
        if self.auth.row_id is not None:
            text += "; whether it took effect is not known (in doubt), do not repeat it"
        error = ToolTimeoutError(tool.name, tool.timeout_s)
        return self.outcome("timeout", text, error=error, entered=True)

    def not_entered(self) -> Outcome:
        return self.outcome("not_sent", "not run: it could not be started in time")

    # The ledger's part: each is one call, made in a thread by the async form

    def record(self, outcome: Outcome) -> Outcome:
        """Write a settled outcome to the row; what cannot be written is in doubt."""
        claimed = self.auth.claimed
        if claimed is None or outcome.status not in ("done", "failed"):
            return outcome
        text = outcome.text[len(self.note) :]
        failure: Exception | None = None
        for pause_s in _RECORD_TRIES:
            try:
                claimed.record(outcome.status, text)
                return outcome
            except LedgerError as exc:
                if exc.reason in ("token", "not-claimed"):
                    # A person was faster; the row's word counts.
                    return self._resolved(claimed, outcome)
                failure = exc
            except Exception as exc:
                failure = exc
            if pause_s is not None:
                time.sleep(pause_s)
        return self.outcome("in_doubt", IN_DOUBT, value=outcome.value, error=failure, entered=True)

    def _resolved(self, claimed: ClaimedRow, outcome: Outcome) -> Outcome:
        try:
            answer = answer_from_row(claimed.read())
        except Exception:
            answer = None
        if answer is None:
            return self.outcome("in_doubt", IN_DOUBT, entered=True)
        return Outcome(
            outcome.id,
            outcome.tool,
            answer.status,
            answer.text,
            value=outcome.value,
            error=outcome.error,
            row_id=claimed.id,
            entered=True,
        )

    def release(self, reason: ReleaseReason) -> bool:
        """Give the claim back; False where the ledger did not take it."""
        claimed = self.auth.claimed
        if claimed is None:
            return True
        try:
            claimed.release(reason)
        except Exception:
            return False
        return True

    def not_sent(self, exc: NotSentError) -> Outcome:
        if self.auth.claimed is not None and self.release("not-sent"):
            text = "not run: the tool could not send its request"
            return self.outcome("not_sent", text, error=exc)
        return self.record(self.raised(exc))

    def late(self, future: Future[Any]) -> None:
        """Record a body that ends after nobody waited for it, so that it is not in doubt."""
        if self.auth.claimed is None:
            return

        def settle(done: Future[Any]) -> None:
            exc = done.exception()
            if isinstance(exc, _NotEntered):
                return
            if exc is not None:
                self.record(self.raised(exc))
                return
            ended = done.result()
            self.record(ended if isinstance(ended, Outcome) else self.returned(ended))

        future.add_done_callback(settle)


def run_authorised(
    authorised: AuthorisedCall,
    *,
    body: Body | None = None,
    as_text: AsText | None = None,
    pauses: Pauses = (),
) -> Outcome:
    """Enter an authorised call, wait for its body at most the tool's timeout, record it.

    A tool that bounds itself is called in this thread, and waited for until it ends.

    Args:
        authorised: from `authorise`; used up by this call.
        body: runs in place of the tool's own function, with the arguments as a dict; for doors
            whose framework runs the tool.
        as_text: turns the body's value into the text that is recorded; None masks and cuts it.
        pauses: exceptions by which a body pauses: the claim is released and they propagate.

    Returns:
        ``done``, ``failed``, ``timeout`` (a side effect is then in doubt, and recorded if its
        thread still ends), ``not_sent`` (released; may be authorised again) or ``in_doubt``.

    Raises:
        TypeError: not an AuthorisedCall, or used before.
    """
    run = _Run(authorised, body, as_text)
    tool = authorised.tool
    run_body = run_here if tool.bounded else run_sync
    try:
        ended = run_body(run.enter, tool.timeout_s, run.late, run.returned)
    except BodyTimeout:
        if authorised.give_up():
            run.release("late-entry")
            return run.not_entered()
        return run.timed_out()
    except _NotEntered:
        run.release("late-entry")
        return run.not_entered()
    except NotSentError as exc:
        return run.not_sent(exc)
    except pauses:
        run.release("paused")
        raise
    except Exception as exc:
        return run.record(run.raised(exc))
    except BaseException:
        if authorised.give_up():
            run.release("cancelled")
        raise
    return run.record(ended)


async def arun_authorised(
    authorised: AuthorisedCall,
    *,
    body: Body | None = None,
    as_text: AsText | None = None,
    pauses: Pauses = (),
) -> Outcome:
    """Do what `run_authorised` does, from a running loop.

    A cancellation before the body begins releases the claim; after that the call is in doubt,
    unless its thread still ends and is recorded.
    """
    run = _Run(authorised, body, as_text)
    # A read-only call writes nothing, so nothing of it needs a thread.
    ledger = None if authorised.claimed is None else authorised.claimed.ledger
    timeout_s = authorised.tool.timeout_s
    try:
        ended = await run_async(run.enter, timeout_s, run.late, run.returned, threaded=run.threaded)
    except BodyTimeout:
        if authorised.give_up():
            await to_its_end(ledger, lambda: run.release("late-entry"))
            return run.not_entered()
        return run.timed_out()
    except _NotEntered:
        await to_its_end(ledger, lambda: run.release("late-entry"))
        return run.not_entered()
    except NotSentError as exc:
        sent = exc
        return await to_its_end(ledger, lambda: run.not_sent(sent))
    except pauses:
        await to_its_end(ledger, lambda: run.release("paused"))
        raise
    except asyncio.CancelledError:
        if authorised.give_up():
            await to_its_end(ledger, lambda: run.release("cancelled"))
        raise
    except Exception as exc:
        failed = run.raised(exc)
        return await to_its_end(ledger, lambda: run.record(failed))
    return await to_its_end(ledger, lambda: run.record(ended))


def _denied(call: ToolCall, exc: ToolDeniedError, row: Any) -> Outcome:
    ident = call.id if type(call.id) is str else ""
    row_id = None if row is None else row.id
    if exc.reason == MISMATCH:
        text = closing_text("tampered")
        return Outcome(ident, exc.tool, "tampered", text, error=exc, row_id=row_id)
    text = f"error: tool {exc.tool!r} denied: {exc.reason}"
    return Outcome(ident, exc.tool, "denied", text, error=exc, row_id=row_id)


def _answered(call: ToolCall, answer: Answer) -> Outcome:
    status = "in_doubt" if answer.status == RUNNING else answer.status
    text = IN_DOUBT if answer.status == RUNNING else answer.text
    return Outcome(call.id, shown_name(call.name), status, text, row_id=answer.row_id)


class _Wait:
    """How long a loser waits for the claimant: the tool's timeout and a margin."""

    def __init__(self, ledger: Any, scope: str, row_id: str, now: Now) -> None:
        self.ledger, self.scope, self.row_id, self.now = ledger, scope, row_id, now
        self.pause_s = 0.01
        row = ledger.row(scope, row_id)
        timeout_s = 0.0 if row is None else float(row.timeout_s)
        self.until = time.monotonic() + timeout_s + LOSER_MARGIN_S

    def look(self) -> Answer | None:
        row = self.ledger.row(self.scope, self.row_id)
        answer = answer_from_row(row, ledger=self.ledger, now=read_now(self.now))
        if answer is None and (row is None or row.status != "claimed"):
            return Answer("", "open", self.row_id)  # released: it may be authorised again
        if answer is None and time.monotonic() > self.until:
            return Answer(IN_DOUBT, "in_doubt", self.row_id)
        self.pause_s = min(self.pause_s * 2, 0.25)
        return answer


def execute(
    call: ToolCall,
    look: Look,
    *,
    ledger: Any = None,
    scope: str = "",
    row: Any = None,
    owner: str | None = None,
    now: Now = None,
    body: Body | None = None,
    as_text: AsText | None = None,
    pauses: Pauses = (),
) -> Outcome:
    """Take one call the whole way: authorise, run, record; or say why not.

    Retries a body that was certainly not sent, and waits for a claimant who was faster. Takes
    the arguments of `authorise` and `run_authorised`.

    Returns:
        What the conversation is told; a denial is an outcome here, never an exception.

    >>> from guardchart.gate import Facts, as_allowed, tool_registry
    >>> def look_up(order: int) -> str:
    ...     return f"order {order}: delivered"
    >>> facts = Facts(tool_registry(look_up), as_allowed(["look_up"]))
    >>> execute(ToolCall("c1", "look_up", {"order": 7}), facts).text
    'order 7: delivered'
    >>> execute(ToolCall("c2", "delete_all"), facts).status
    'denied'
    """
    last: Outcome | None = None
    for _ in range(_MAX_ENTRIES):
        try:
            got = authorise(call, look, ledger=ledger, scope=scope, row=row, owner=owner, now=now)
        except ToolDeniedError as exc:
            return _denied(call, exc, row)
        if isinstance(got, Answer):
            if got.status != RUNNING:
                return _answered(call, got)
            wait = _Wait(ledger, scope, got.row_id, now)
            while (answer := wait.look()) is None:
                time.sleep(wait.pause_s)
            last = _answered(call, replace(answer, status=RUNNING))
            if answer.status != "open":
                return _answered(call, answer)
        else:
            last = run_authorised(got, body=body, as_text=as_text, pauses=pauses)
            if last.status != "not_sent":
                return last
        row = None if row is None else ledger.row(scope, row.id, follow=False)
    assert last is not None
    return last


async def aexecute(
    call: ToolCall,
    look: Look,
    *,
    ledger: Any = None,
    scope: str = "",
    row: Any = None,
    owner: str | None = None,
    now: Now = None,
    body: Body | None = None,
    as_text: AsText | None = None,
    pauses: Pauses = (),
) -> Outcome:
    """Do what `execute` does, from a running loop."""
    last: Outcome | None = None
    for _ in range(_MAX_ENTRIES):
        try:
            got = await aauthorise(
                call, look, ledger=ledger, scope=scope, row=row, owner=owner, now=now
            )
        except ToolDeniedError as exc:
            return _denied(call, exc, row)
        if isinstance(got, Answer):
            if got.status != RUNNING:
                return _answered(call, got)
            wait = await in_thread(ledger, functools.partial(_Wait, ledger, scope, got.row_id, now))
            while (answer := await in_thread(ledger, wait.look)) is None:  # noqa: ASYNC110
                await asyncio.sleep(wait.pause_s)  # another process claims: nothing to wait on
            last = _answered(call, replace(answer, status=RUNNING))
            if answer.status != "open":
                return _answered(call, answer)
        else:
            last = await arun_authorised(got, body=body, as_text=as_text, pauses=pauses)
            if last.status != "not_sent":
                return last
        if row is not None:
            row = await in_thread(
                ledger, functools.partial(ledger.row, scope, row.id, follow=False)
            )
    assert last is not None
    return last
