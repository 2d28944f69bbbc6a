"""Nodes, as people ask about them: what each has, what is reserved, which runtimes it offers."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection

from ficc.controller.operations.context import Context, Page, not_found, page_of
from ficc.controller.operations.ports import Nodes
from ficc.controller.store import nodes as rows
from ficc.domain import placement
from ficc.domain.access import Actor
from ficc.domain.plan import Limits
from ficc.protocol.http_api import rfc3339


class NodeReads:
    def __init__(self, context: Context, nodes: Nodes) -> None:
        self._context = context
        self._nodes = nodes

    async def page(self, actor: Actor, page: Page) -> tuple[list[dict[str, Any]], str | None]:
        actor.require("contributors:read")

        def work(connection: Connection) -> tuple[list[dict[str, Any]], str | None]:
            found = rows.page(connection, page.after, page.limit)
            shown, cursor = page_of(found, page, lambda row: str(row.id))
            reserved = rows.reserved(connection, [row.id for row in shown])
            return [self._view(row, reserved[row.id]) for row in shown], cursor

        return await self._context.database.read(work)

    async def get(self, actor: Actor, node_id: str) -> dict[str, Any]:
        actor.require("contributors:read")

        def work(connection: Connection) -> dict[str, Any]:
            row = rows.get(connection, node_id)
            if row is None:
                raise not_found("node", node_id)
            return self._view(row, rows.reserved(connection, [node_id])[node_id])

        return await self._context.database.read(work)

    def _view(self, row: Any, reserved: Limits) -> dict[str, Any]:
        link = self._nodes.link(row.id)
        document = row.snapshot if link is None else link.snapshot
        snapshot = placement.Snapshot.from_json(document)
        return {
            "id": row.id,
            "name": row.name,
            "mode": row.mode,
            "connected": link is not None,
            "snapshot_at": rfc3339(row.snapshot_at),
            "capacity": document["capacity"],
            "reserved": reserved.as_json(),
            "available": placement.available(snapshot, reserved).as_json(),
            "unenforceable": document["unenforceable"],
            "quarantined": document.get("quarantined", {}),
            "runtimes": document["runtimes"],
            "endpoint_version": document.get("endpoint_version"),
            "boot_id": document["boot_id"],
            "release": document["release"],
            "accounts": document["accounts"],
            "machine": document["machine"],
            "created_at": rfc3339(row.created_at),
        }
