"""The ledger: one row a call, outside everything that can be rolled back.

``Ledger`` is what the gate calls. ``Rows`` is the small transactional interface under it: a
storage finds and writes rows and decides nothing (``RuleLedger`` holds the verbs).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol, runtime_checkable

from guardchart.persistence._rows import Claim, Decision, Proposal, ReleaseReason, Row, Slot


@runtime_checkable
class Ledger(Protocol):
    """The protocol between a proposed call and its one entry.

    Every verb is synchronous and one transaction, or none at all when it raises. ``now`` is
    the caller's clock in epoch ms. A verb that does not fit raises ``LedgerError`` with a
    stable ``reason``; a storage that fails raises ``StoreError``, and nothing was written.

    Attributes:
        durable: whether rows outlive the process.
        blocking: whether verbs do I/O, so that async hosts call them in a thread.
        requires_proposal: whether only proposed calls are known. Otherwise ``adopt`` may
            take over a batch that another process parked.
    """

    durable: bool
    blocking: bool
    requires_proposal: bool

    def propose(
        self,
        slot: Slot,
        model_id: str,
        arguments: Mapping[str, object],
        *,
        decide_by: int | None = None,
        timeout_s: float = 30.0,
        approve_until: int | None = None,
        now: int,
    ) -> Row:
        """Return the slot's row, or make it: ``propose_batch`` of one."""
        ...

    def propose_batch(self, proposals: Sequence[Proposal], *, now: int) -> list[Row]:
        """Return the rows of the slots, in order, making those that are missing.

        A row that exists is returned whatever its status, its arguments and decisions as
        they were. Only the step that first sees the model's answer may call this.

        Args:
            proposals: calls of one scope.
            now: epoch ms.

        Raises:
            LedgerError: ``scope`` (several scopes), ``slot`` (text no ledger can keep),
                ``evicted`` (``InMemoryLedger`` dropped this batch).
        """
        ...

    def adopt(self, proposals: Sequence[Proposal], *, now: int) -> list[Row]:
        """Return the rows of parked or restored calls, compared with what the snapshot says.

        Where ``requires_proposal`` is False, a batch of which nothing is known is taken over
        if its ``batch_no`` is above any known of that (scope, run, agent).

        Args:
            proposals: the snapshot's open calls of one batch, each with ``row_id``.
            now: epoch ms.

        Returns:
            One row a call, in order, not followed.

        Raises:
            LedgerError: ``unproposed`` (no such row), ``mismatch`` (another tool, digest or
                slot than the row's). No row was changed: the snapshot is not to be trusted.
        """
        ...

    def decide(
        self,
        scope: str,
        decisions: Mapping[str, Decision],
        by: str | None = None,
        *,
        again: bool = False,
        now: int,
        use_by: int | None = None,
    ) -> dict[str, Row]:
        """Decide about several rows, all or none, in one transaction.

        Args:
            scope: the conversation.
            decisions: by row id.
            by: who decided, as the host names them; ``"policy"`` for no human.
            again: reopen closed rows, or open an edit of an entered one; needs the digest.
            now: epoch ms.
            use_by: epoch ms until which approvals are good; None is an hour from ``now``.

        Returns:
            For every id given, the row that counts now: the edit instead of the edited row,
            the outcome where the call was entered before. Use that row's id from here on.

        Raises:
            LedgerError: ``unproposed``, ``digest``, ``late`` (past ``decide_by``: fire the
                human timeout; the row stays until ``close(status="expired")``),
                ``arguments``, ``decision``, ``ambiguous``, or the status of a closed row.
        """
        ...

    def close(
        self,
        scope: str,
        row_ids: Sequence[str],
        reason: str | None = None,
        *,
        status: Literal["void", "expired"] = "void",
        now: int,
    ) -> dict[str, Row]:
        """Close the open ones of these calls, following edits.

        Returns:
            The row that counts, by the id given: closed now, or as it was where it had been
            closed or entered. Unknown ids are left out.
        """
        ...

    def claim(self, scope: str, row_id: str, digest: str, *, owner: str, now: int) -> Claim:
        """Take the right to enter a call, following edits.

        Args:
            digest: of the arguments that will run.
            owner: ``owner_id()``.

        Returns:
            ``Claim(row, token)`` for the one caller that may enter; ``Claim(row, None)``
            where it was entered before: use the recorded result, wait, or report in doubt.

        Raises:
            LedgerError: ``unproposed``, ``digest``, ``not-approved``, ``rejected``,
                ``edited``, ``void``, ``expired``.
        """
        ...

    def record(
        self,
        scope: str,
        row_id: str,
        token: str,
        outcome: Literal["done", "failed"],
        result: str,
        *,
        now: int,
    ) -> Row:
        """Record how a claimed call ended. May be repeated after a storage error.

        Raises:
            LedgerError: ``unproposed``, ``token``, ``not-claimed``, ``outcome``.
        """
        ...

    def release(
        self, scope: str, row_id: str, token: str, *, reason: ReleaseReason, now: int
    ) -> Row:
        """Give a claim back, the body certainly not having happened.

        Args:
            reason: ``not-sent`` (``NotSentError``; at most three times a row), ``paused``,
                ``state-changed``, ``cancelled``, ``late-entry``.

        Raises:
            LedgerError: ``unproposed``, ``token``, ``not-claimed``, ``releases`` (record it
                as failed instead).
        """
        ...

    def resolve(
        self,
        scope: str,
        row_id: str,
        outcome: Literal["done", "failed"],
        result: str,
        *,
        by: str | None,
        now: int,
    ) -> Row:
        """Settle a claimed row whose claimant is silent; never to something claimable.

        Raises:
            LedgerError: ``unproposed``, ``not-claimed``, ``outcome``, ``early`` (before
                5 s plus the tool's timeout after the claim).
        """
        ...

    def row(self, scope: str, row_id: str, *, follow: bool = True) -> Row | None:
        """Return a row, by default the one its edits lead to; None where there is none."""
        ...

    def slot_row(self, slot: Slot) -> Row | None:
        """Return the row proposed for a slot, not followed; None where there is none."""
        ...

    def lookup(self, scope: str, run: str, agent: str, batch_no: int) -> list[Row]:
        """Return every row of a batch, edits included, oldest first."""
        ...

    def pending(self, scope: str | None = None) -> list[Row]:
        """Return the rows nobody decided yet, oldest first; None is every scope."""
        ...

    def in_doubt(self, scope: str | None = None, *, now: int) -> list[Row]:
        """Return claimed rows that are overdue or whose owner is dead, oldest first."""
        ...

    def forget(self, scope: str, *, now: int) -> int:
        """Blank arguments, results and reasons of a scope; return how many rows it has.

        Keys, ids and statuses stay, so that nothing can be entered or named again. Digests
        stay too: arguments that can be guessed can be confirmed by them.
        """
        ...


class Rows(Protocol):
    """Rows as one transaction sees them: all that a storage has to implement.

    Reads see the transaction's own writes. Writes are visible to others together, or never.
    """

    def by_id(self, scope: str, row_id: str) -> Row | None:
        """Return the row with that id."""
        ...

    def by_slot(self, slot: Slot, parent_id: str | None) -> Row | None:
        """Return the row proposed for a slot, or the edit of ``parent_id`` with that slot."""
        ...

    def count_model_id(self, scope: str, model_id: str) -> int:
        """Return how many rows of the scope came from calls with that model id."""
        ...

    def of_batch(self, scope: str, run: str, agent: str, batch_no: int) -> list[Row]:
        """Return the rows of a batch, oldest first."""
        ...

    def of_status(self, scope: str | None, status: str) -> list[Row]:
        """Return the rows with a status, oldest first; None is every scope."""
        ...

    def of_scope(self, scope: str) -> list[Row]:
        """Return the rows of a scope, oldest first."""
        ...

    def insert(self, row: Row) -> None:
        """Add a new row."""
        ...

    def update(self, row: Row) -> None:
        """Replace the row with that scope and id. Its id, slot and parent never change."""
        ...
