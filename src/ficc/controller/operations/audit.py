"""The audit, for those who may read it: who did what to what, when, and how it ended."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Row

from ficc.controller.operations.context import Context, Page, page_of
from ficc.controller.store import audit as rows
from ficc.domain.access import Actor
from ficc.protocol.http_api import rfc3339


class AuditReads:
    def __init__(self, context: Context) -> None:
        self._context = context

    async def page(self, actor: Actor, page: Page) -> tuple[list[dict[str, Any]], str | None]:
        actor.require("audit:read")
        found = await self._context.database.read(
            lambda c: rows.page(c, actor.project_id, page.after, page.limit)
        )
        shown, cursor = page_of(found, page, lambda row: str(row.id))
        return [_as_json(row) for row in shown], cursor


def _as_json(row: Row[Any]) -> dict[str, Any]:
    return {
        "id": row.id,
        "at": rfc3339(row.at),
        "subject_id": row.subject_id,
        "authority": {"kind": row.authority_kind, "id": row.authority_id},
        "action": row.action,
        "object": {"kind": row.object_kind, "id": row.object_id},
        "request_id": row.request_id,
        "outcome": row.outcome,
        "details": dict(row.details),
    }
