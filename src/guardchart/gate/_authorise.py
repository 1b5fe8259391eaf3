"""`authorise`: the only place where a tool call becomes executable.

It calls the reference monitor, claims the call's row, looks at the state once more, and makes an
`AuthorisedCall`. Executors take nothing else, and nobody else can make one.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn, TypeVar

from guardchart.errors import LedgerError, ToolDeniedError
from guardchart.gate import _check
from guardchart.gate._answers import Answer, answer_from_row, follow
from guardchart.gate._arguments import canonical, digest_text
from guardchart.gate._check import MISMATCH, NEEDS_APPROVAL, TOO_LATE, Checked, Facts
from guardchart.gate._tools import Tool, ToolCall, shown_name
from guardchart.persistence import Claim, ReleaseReason, owner_id

__all__ = ["AuthorisedCall", "ClaimedRow", "Look", "aauthorise", "authorise", "wall_ms"]

ENTRY_S = 5.0
"""Seconds within which a body starts after its claim, by a monotonic clock."""

RUNNING = "running"

Look = Facts | Callable[[], Facts]
Now = float | Callable[[], float] | None
T = TypeVar("T")
_MAKER = object()


def wall_ms() -> int:
    """Return the system's time, in epoch milliseconds."""
    return time.time_ns() // 1_000_000


def read_now(now: Now) -> int:
    """Return the host's time: a number as it is, a clock's reading, or the system's."""
    if now is None:
        return wall_ms()
    return int(now() if callable(now) else now)


class ClaimedRow:
    """A row as its claimant may settle it, with the token of its claim.

    Each method is one verb of the ledger and raises what that raises.

    Attributes:
        id: the row's id.
        ledger: where it is.
    """

    __slots__ = ("_now", "_scope", "_token", "id", "ledger")

    def __init__(self, ledger: Any, scope: str, row_id: str, token: str, now: Now) -> None:
        self.ledger = ledger
        self.id = row_id
        self._scope = scope
        self._token = token
        self._now = now

    def record(self, outcome: str, text: str) -> None:
        """Record how the call ended: ``done`` or ``failed``, and what the conversation gets."""
        at = read_now(self._now)
        self.ledger.record(self._scope, self.id, self._token, outcome, text, now=at)

    def release(self, reason: ReleaseReason) -> None:
        """Give the claim back, the body certainly not having happened."""
        at = read_now(self._now)
        self.ledger.release(self._scope, self.id, self._token, reason=reason, now=at)

    def read(self) -> Any:
        """Return the row as it is now."""
        return self.ledger.row(self._scope, self.id)


class AuthorisedCall:
    """The right to enter one tool call, once. Made by `authorise` alone.

    Attributes:
        call: the call that runs (with a reviewer's arguments, where they were edited).
        tool: the registered tool.
        text: canonical JSON of the arguments; the body's values are read from it afresh.
        digest: of that text.
        edited: whether a reviewer's arguments replaced the model's.
        claimed: the claimed row, None for a read-only call.
        max_output_chars: where the text of its result is cut.
    """

    __slots__ = (
        "_entry_by",
        "_lock",
        "_scope",
        "_state",
        "call",
        "claimed",
        "digest",
        "edited",
        "max_output_chars",
        "text",
        "tool",
    )

    call: ToolCall
    tool: Tool
    text: str
    digest: str
    edited: bool
    claimed: ClaimedRow | None
    max_output_chars: int
    _scope: str
    _entry_by: float
    _state: str
    _lock: threading.Lock

    def __init__(self, maker: object, **parts: Any) -> None:
        if maker is not _MAKER:
            raise TypeError("an AuthorisedCall is made by authorise() only")
        for name, value in parts.items():
            object.__setattr__(self, name, value)
        object.__setattr__(self, "_state", "ready")
        object.__setattr__(self, "_lock", threading.Lock())

    def __init_subclass__(cls) -> None:
        raise TypeError("AuthorisedCall cannot be subclassed")

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError("an AuthorisedCall does not change")

    __delattr__ = __setattr__  # type: ignore[assignment]

    def __reduce__(self) -> NoReturn:
        raise TypeError("an AuthorisedCall is neither copied nor pickled")

    def __copy__(self) -> NoReturn:
        self.__reduce__()

    def __deepcopy__(self, memo: object) -> NoReturn:
        self.__reduce__()

    def __repr__(self) -> str:
        return f"<AuthorisedCall {self.tool.name} {self.row_id or 'read-only'}>"

    @property
    def row_id(self) -> str | None:
        """The id of the claimed row, None for a read-only call."""
        return None if self.claimed is None else self.claimed.id

    @property
    def idempotency_key(self) -> str:
        """The same for every entry of this row, and for nothing else."""
        parts = [self._scope, self.row_id or self.call.id, self.digest]
        return hashlib.sha256(canonical(parts).encode()).hexdigest()[:32]

    def take(self) -> None:
        """Hand the right over to an executor; a second time is refused.

        Raises:
            TypeError: it was used before.
        """
        self._move("ready", "taken", "this AuthorisedCall was used before")

    def enter(self) -> bool:
        """Begin the body: True once, and only while it is in time and not given up."""
        with self._lock:
            if self._state != "taken" or time.monotonic() > self._entry_by:
                return False
            object.__setattr__(self, "_state", "entered")
            return True

    def give_up(self) -> bool:
        """Forbid the body; False where it has begun already."""
        with self._lock:
            if self._state == "entered":
                return False
            object.__setattr__(self, "_state", "given up")
            return True

    def _move(self, before: str, after: str, otherwise: str) -> None:
        with self._lock:
            if self._state != before:
                raise TypeError(otherwise)
            object.__setattr__(self, "_state", after)


def _same_call(call: ToolCall, facts: Callable[[], Facts], rows: tuple[Any, ...]) -> bool:
    """Whether a row was made for this call: its tool, and its arguments or their edit."""
    if any(row.slot.tool != call.name for row in rows):
        return False
    digests = {row.digest for row in rows}
    try:
        if digest_text(canonical(call.arguments)) in digests:
            return True
        tool = facts().registry.get(call.name) if type(call.name) is str else None
        return tool is not None and digest_text(tool.load(call.arguments)[1]) in digests
    except ValueError:
        return False


def _before(
    call: ToolCall, facts: Callable[[], Facts], ledger: Any, row: Any, now: int
) -> tuple[ToolCall, Any, Answer | None]:
    """Before the checks: a call that was closed or entered is answered from its row.

    Returns:
        The call that would run, the row that stands for it, and the answer where there is one.
    """
    current = follow(ledger, row)
    if not _same_call(call, facts, (row, current)):
        raise ToolDeniedError(shown_name(call.name), MISMATCH)
    answer = answer_from_row(row, ledger=ledger, now=now)
    if answer is None and current.status == "claimed":
        answer = Answer("", RUNNING, current.id)
    if current.parent_id is not None and current.arguments is not None:
        call = ToolCall(call.id, call.name, dict(current.arguments))
    return call, current, answer


_DENIALS = {"expired": TOO_LATE, "digest": MISMATCH}


def _answer_claim(claim: Any, ledger: Any, now: int) -> Answer:
    answer = answer_from_row(claim.row, ledger=ledger, now=now)
    return answer or Answer("", RUNNING, claim.row.id)


class _Attempt:
    """One run through check and claim; the sync and the async form differ in the I/O only."""

    def __init__(
        self, call: ToolCall, look: Look, ledger: Any, scope: str, row: Any, owner: Any, now: Now
    ) -> None:
        self.look = look
        self.ledger = ledger
        self.scope = scope
        self.owner = owner
        self.now = now
        self.at = read_now(now)
        self.call, self.row, self.answer = call, row, None
        if row is not None:
            self.call, self.row, self.answer = _before(call, self._facts, ledger, row, self.at)
        self.checked: Checked | None = None

    def _facts(self) -> Facts:
        return self.look() if callable(self.look) else self.look

    def check(self) -> Checked:
        facts = self._facts()
        if self.row is not None or facts.row is not None or facts.proposing:
            facts = facts._replace(row=self.row, now=self.at, proposing=False)
        self.max_output_chars = facts.registry.max_output_chars
        self.checked = _check.check(self.call, facts, self.checked)
        return self.checked

    def claim(self) -> Any:
        assert self.checked is not None
        try:
            return self.ledger.claim(
                self.scope,
                self.row.id,
                self.checked.digest,
                owner=self.owner or owner_id(),
                now=self.at,
            )
        except LedgerError as exc:
            # Somebody may have rejected or edited the call since its row was read.
            fresh = self.ledger.row(self.scope, self.row.id, follow=False)
            if fresh is not None and fresh.closed and fresh.status != self.row.status:
                return Claim(fresh, None)
            reason = _DENIALS.get(exc.reason, NEEDS_APPROVAL)
            raise ToolDeniedError(self.call.name, reason) from exc

    def claimed(self, token: str) -> ClaimedRow:
        return ClaimedRow(self.ledger, self.scope, self.row.id, token, self.now)

    def make(self, claimed: ClaimedRow | None, claimed_at: float) -> AuthorisedCall:
        checked = self.checked
        assert checked is not None
        return AuthorisedCall(
            _MAKER,
            call=self.call,
            tool=checked.tool,
            text=checked.text,
            digest=checked.digest,
            edited=self.row is not None and self.row.parent_id is not None,
            claimed=claimed,
            max_output_chars=self.max_output_chars,
            _scope=self.scope,
            _entry_by=claimed_at + ENTRY_S,
        )


def authorise(
    call: ToolCall,
    look: Look,
    *,
    ledger: Any = None,
    scope: str = "",
    row: Any = None,
    owner: str | None = None,
    now: Now = None,
) -> AuthorisedCall | Answer:
    """Let one call through, or say what became of it.

    Args:
        call: the call, as the model or the restored snapshot has it.
        look: the facts, or a function that reads them from the live state. A function is called
            again after the claim; a call that fails then gives its claim back.
        ledger: where the row is.
        scope: the row's scope.
        row: the call's row, None where it has none. An edit is followed to its child, whose
            arguments then run.
        owner: who claims; None for this process.
        now: host time in epoch milliseconds, or a clock; None for the system's.

    Returns:
        An `AuthorisedCall`, or the `Answer` of a row that was closed or entered before
        (status ``running``, without text, while another claimant is in time).

    Raises:
        ToolDeniedError: the check that failed. Nothing ran; the row is not claimed.

    >>> from guardchart.gate import as_allowed, run_authorised, tool_registry
    >>> def look_up(order: int) -> str:
    ...     return f"order {order}: delivered"
    >>> facts = Facts(tool_registry(look_up), as_allowed(["look_up"]))
    >>> run_authorised(authorise(ToolCall("c1", "look_up", {"order": 7}), facts)).text
    'order 7: delivered'
    """
    attempt = _Attempt(call, look, ledger, scope, row, owner, now)
    if attempt.answer is not None:
        return attempt.answer
    claimed_at = time.monotonic()
    if not attempt.check().needs_row:
        return attempt.make(None, claimed_at)
    claim = attempt.claim()
    if claim.token is None:
        return _answer_claim(claim, ledger, attempt.at)
    claimed = attempt.claimed(claim.token)
    try:
        if callable(look):
            attempt.check()
    except BaseException:
        claimed.release("state-changed")
        raise
    return attempt.make(claimed, claimed_at)


def _blocks(ledger: Any) -> bool:
    return bool(getattr(ledger, "blocking", False))


async def in_thread(ledger: Any, fn: Callable[[], T]) -> T:
    """Call a ledger's verb, in a thread where it blocks."""
    return await asyncio.to_thread(fn) if _blocks(ledger) else fn()


async def to_its_end(ledger: Any, fn: Callable[[], T]) -> T:
    """Call a ledger's verb as `in_thread` does, however often this task is cancelled meanwhile."""
    return await finish(asyncio.to_thread(fn)) if _blocks(ledger) else fn()


async def finish(awaitable: Awaitable[T]) -> T:
    """Await something to its end, however often this task is cancelled meanwhile."""
    task = asyncio.ensure_future(awaitable)
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            continue
        except BaseException:
            break
    return task.result()


async def aauthorise(
    call: ToolCall,
    look: Look,
    *,
    ledger: Any = None,
    scope: str = "",
    row: Any = None,
    owner: str | None = None,
    now: Now = None,
) -> AuthorisedCall | Answer:
    """Do what `authorise` does, from a running loop.

    The claim is shielded: a task that is cancelled while it is being written waits for it,
    releases it, and only then is cancelled.
    """
    attempt = await in_thread(ledger, lambda: _Attempt(call, look, ledger, scope, row, owner, now))
    if attempt.answer is not None:
        return attempt.answer
    claimed_at = time.monotonic()
    if not attempt.check().needs_row:
        return attempt.make(None, claimed_at)
    claim = await _aclaim(attempt) if _blocks(ledger) else attempt.claim()
    if claim.token is None:
        return _answer_claim(claim, ledger, attempt.at)
    claimed = attempt.claimed(claim.token)
    try:
        if callable(look):
            attempt.check()
    except BaseException:
        await to_its_end(ledger, lambda: claimed.release("state-changed"))
        raise
    return attempt.make(claimed, claimed_at)


async def _aclaim(attempt: _Attempt) -> Any:
    writing = asyncio.ensure_future(asyncio.to_thread(attempt.claim))
    try:
        return await asyncio.shield(writing)
    except asyncio.CancelledError:
        try:
            token = (await finish(writing)).token
        except Exception:
            token = None
        if token is not None:
            given_up = attempt.claimed(token)
            await finish(asyncio.to_thread(lambda: given_up.release("cancelled")))
        raise
