"""Removing models, and content that no model refers to.

First the rows, in one transaction that sees everybody who holds them; then the files, which nothing refers to
any more (`orphans`). Killed between the two, the next sweep removes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection

from ficc.content.store import Key
from ficc.controller.operations.contents import Contents
from ficc.controller.operations.context import Context, Page, not_found, page_of
from ficc.controller.store import eviction as rows
from ficc.controller.store import models as model_rows
from ficc.controller.store.database import Transaction
from ficc.domain import acquisition, upload
from ficc.domain.access import Actor
from ficc.domain.eviction import Holders, Holding, Outcome, outcome
from ficc.protocol.http_api import rfc3339

PRUNED_MAX = 500
"""Contents given up in one transaction."""


@dataclass(frozen=True, slots=True)
class EvictionView:
    """What evicting a model would come to."""

    outcome: Outcome
    holders: Holders

    def as_json(self) -> dict[str, Any]:
        reason = self.holders.reason
        return {
            "allowed": reason is None,
            "reason": None if reason is None else reason.as_json(),
            "bytes_freed": self.outcome.bytes_freed,
            "bytes_retained_shared": self.outcome.bytes_retained_shared,
            "services": list(self.holders.services),
            "attempts": list(self.holders.attempts),
            "busy": self.holders.writing,
        }


@dataclass(slots=True)
class Pruned:
    """What a prune removed, or would remove."""

    dry_run: bool
    count: int = 0
    bytes_freed: int = 0
    bytes_retained_shared: int = 0

    def add(self, holdings: list[Holding]) -> None:
        given_up = outcome(holdings, evict=True)
        self.count += len(given_up.dropped)
        self.bytes_freed += given_up.bytes_freed
        self.bytes_retained_shared += given_up.bytes_retained_shared

    def as_json(self) -> dict[str, Any]:
        return {
            "dry_run": self.dry_run,
            "count": self.count,
            "bytes_freed": self.bytes_freed,
            "bytes_retained_shared": self.bytes_retained_shared,
        }


class Eviction:
    def __init__(self, context: Context, contents: Contents) -> None:
        self._context = context
        self._contents = contents

    # One model.

    async def preview(self, actor: Actor, model_id: str) -> EvictionView:
        """What evicting a model would free and keep, and what forbids it."""
        actor.require("models:read")
        return await self._context.database.read(lambda c: self._judge(c, actor, model_id, evict=True))

    def _judge(self, connection: Connection, actor: Actor, model_id: str, *, evict: bool) -> EvictionView:
        model = model_rows.get(connection, actor.project_id, model_id)
        if model is None:
            raise not_found("model", model_id)
        result = outcome(rows.holdings(connection, model_id), evict=evict)
        readers = rows.readers(connection, actor.project_id)
        attempts = set().union(*(readers.get(sha256, ()) for sha256 in result.dropped))
        now, record = self._context.now(), model.record
        written = model_rows.contents(connection, actor.project_id, result.dropped).values()
        holders = Holders(
            services=tuple(model_rows.references(connection, [model_id])[model_id]),
            attempts=tuple(sorted(attempts)),
            writing=record.fetching
            or record.state is acquisition.State.PAUSING
            or any(content.claimed(now) for content in written),
        )
        return EvictionView(result, holders)

    async def delete(self, actor: Actor, model_id: str, *, evict: bool) -> dict[str, Any]:
        """Remove a model: what was begun of its files goes too, and with `evict` what is verified. Raises
        Refused `model_referenced`, `model_busy`."""
        actor.require("models:manage")
        project_id = actor.project_id

        def work(tx: Transaction) -> tuple[Outcome, set[str]]:
            model_rows.take_turns(tx, project_id)
            rows.take_turns(tx)
            rows.lock(tx, model_id)
            view = self._judge(tx.connection, actor, model_id, evict=evict)
            view.holders.check()
            model_rows.delete_model(tx, project_id, model_id)
            return view.outcome, rows.drop(tx, project_id, view.outcome.dropped)

        result, blobs = await self._context.database.write(work)
        await self._contents.discard([Key(project_id, sha256) for sha256 in result.dropped], blobs)
        return {
            "removed": True,
            "bytes_freed": result.bytes_freed,
            "bytes_retained_shared": result.bytes_retained_shared,
        }

    # Content without a model.

    async def page(self, actor: Actor, page: Page) -> tuple[list[dict[str, Any]], str | None]:
        """What the project has bytes of, newest first."""
        actor.require("models:manage")
        found = await self._context.database.read(
            lambda c: rows.page(c, actor.project_id, page.after, page.limit)
        )
        shown, cursor = page_of(found, page, lambda kept: kept.id)
        return [_as_json(kept) for kept in shown], cursor

    async def prune(self, actor: Actor, *, dry_run: bool) -> Pruned:
        """Give up every content that no model of the project has and no attempt reads."""
        actor.require("models:manage")
        pruned = Pruned(dry_run)
        if dry_run:
            pruned.add(await self._context.database.read(lambda c: self._unreferenced(c, actor.project_id)))
            return pruned
        while holdings := await self._prune_some(actor.project_id):
            pruned.add(holdings)
        return pruned

    def _unreferenced(
        self, connection: Connection, project_id: str, limit: int | None = None
    ) -> list[Holding]:
        read = rows.readers(connection, project_id)
        return rows.unreferenced(connection, project_id, self._context.now(), set(read), limit)

    async def _prune_some(self, project_id: str) -> list[Holding]:
        """Some of them, with their files; none once nothing is left to be pruned."""

        def work(tx: Transaction) -> tuple[list[Holding], set[str]]:
            model_rows.take_turns(tx, project_id)
            rows.take_turns(tx)
            holdings = self._unreferenced(tx.connection, project_id, PRUNED_MAX)
            return holdings, rows.drop(tx, project_id, outcome(holdings, evict=True).dropped)

        holdings, blobs = await self._context.database.write(work)
        await self._contents.discard([Key(project_id, one.record.sha256) for one in holdings], blobs)
        return holdings


def _as_json(kept: rows.Kept) -> dict[str, Any]:
    verified = kept.record.state is upload.State.VERIFIED
    return {
        "sha256": kept.record.sha256,
        "state": "blob" if verified else "partial",
        "bytes": kept.record.bytes,
        "offset": kept.record.offset,
        "references": list(kept.references),
        "shared": kept.shared,
        "last_used_at": rfc3339(kept.last_used_at),
    }
