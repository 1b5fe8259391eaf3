"""The HTTP service. Customers write; reviewers, who authenticate, decide."""

# Without `from __future__ import annotations`: FastAPI reads these annotations, and some name
# what only exists inside `make_app`.

import asyncio
import hmac
import secrets
import time
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from fastapi import Depends, FastAPI, Header, HTTPException, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from examples.support_bot.desk import WAITING, Desk
from guardchart.agents import pending_approval, run_agent
from guardchart.errors import SnapshotTooLargeError, StoreConflictError
from guardchart.gate import approval_event


class Strict(BaseModel):
    """A body without unknown keys."""

    model_config = ConfigDict(extra="forbid")


class Said(Strict):
    """What a customer writes. Bounded here, long before a snapshot is too large."""

    text: str = Field(min_length=1, max_length=4_000)


class Shown(Strict):
    """A call as the reviewer saw it."""

    id: str
    digest: str


class Review(Strict):
    """A reviewer's answer to everything that waits on a ticket."""

    decision: Literal["approve", "reject"]
    calls: list[Shown] = []


def make_app(desk: Desk, reviewers: Mapping[str, str]) -> FastAPI:
    """The service.

    Args:
        desk: The bot.
        reviewers: Their names by their tokens.
    """
    app = FastAPI(title="support bot")

    def reviewer(authorization: Annotated[str, Header()] = "") -> str:
        """Who asks. Whoever may send an approval can approve: this is the only gate before it."""
        scheme, _, given = authorization.partition(" ")
        for token, name in reviewers.items():
            if scheme.lower() == "bearer" and hmac.compare_digest(given.encode(), token.encode()):
                return name
        raise HTTPException(401, "a reviewer's token, please", {"WWW-Authenticate": "Bearer"})

    Reviewer = Annotated[str, Depends(reviewer)]

    async def known(ticket: str) -> Any:
        stored = await asyncio.to_thread(desk.store.load, f"ticket:{ticket}")
        if stored is None:
            raise HTTPException(404, "no such ticket")
        return stored

    async def run(ticket: str, **given: Any) -> Any:
        return await run_agent(
            desk.machine,
            store=desk.store,
            key=f"ticket:{ticket}",
            plugins=[desk.trace],
            timeout_s=120,
            **given,
        )

    def told(ticket: str, result: Any) -> dict[str, Any]:
        return {
            "ticket": ticket,
            "state": result.final_state.partition(".")[2],
            "waiting_for_human": result.waiting,
            "answer": result.output,
            "error": (result.error or {}).get("kind"),
        }

    @app.post("/tickets", status_code=201)
    async def open_ticket(said: Said) -> dict[str, Any]:
        ticket = secrets.token_urlsafe(12)
        return told(ticket, await run(ticket, prompt=said.text))

    @app.post("/tickets/{ticket}/messages")
    async def write(ticket: str, said: Said) -> dict[str, Any]:
        await known(ticket)
        return told(ticket, await run(ticket, prompt=said.text))

    @app.get("/tickets/{ticket}")
    async def read(ticket: str) -> dict[str, Any]:
        snapshot = (await known(ticket)).snapshot
        return {
            "ticket": ticket,
            "state": snapshot["value"],
            "waiting_for_human": snapshot["state_ids"] == [WAITING],
            "answer": snapshot["context"]["result"],
            "error": (snapshot["context"]["error"] or {}).get("kind"),
        }

    @app.get("/reviews")
    async def reviews(name: Reviewer) -> list[dict[str, Any]]:
        """What waits for a person, the oldest first, with exactly what would run."""
        found = []
        for each in await asyncio.to_thread(lambda: desk.store.find(state=WAITING)):
            stored = await asyncio.to_thread(desk.store.load, each.key)
            if stored is not None:
                found.append(
                    {
                        "ticket": each.key.partition(":")[2],
                        "waiting_s": round(time.time() - each.since / 1000),
                        "calls": pending_approval(stored.snapshot["context"]),
                    }
                )
        return found

    @app.post("/tickets/{ticket}/review")
    async def review(ticket: str, answer: Review, name: Reviewer) -> dict[str, Any]:
        await known(ticket)
        event: dict[str, Any] = {"type": "HUMAN_REJECTED", "reason": "declined", "by": name}
        if answer.decision == "approve":
            # The digests are those the reviewer saw, so nothing else can be what is approved.
            event = approval_event([each.model_dump() for each in answer.calls], by=name)
        result = await run(ticket, event=event)
        if result.ignored is not None:
            raise HTTPException(409, "this is not what waits for a decision; look again")
        return told(ticket, result)

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return {"oldest_wait_s": await asyncio.to_thread(desk.oldest_wait_s)}

    @app.exception_handler(StoreConflictError)
    async def overtaken(request: Request, error: StoreConflictError) -> JSONResponse:
        return JSONResponse({"detail": "somebody else moved this ticket; look again"}, 409)

    @app.exception_handler(SnapshotTooLargeError)
    async def too_large(request: Request, error: SnapshotTooLargeError) -> JSONResponse:
        return JSONResponse({"detail": "this conversation is too long; open a new ticket"}, 413)

    return app
