"""The gateway's table of routes, kept in memory and brought up to date after every commit that concerns it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from sqlalchemy import Connection

from ficc.controller.operations.context import Context
from ficc.controller.operations.ports import Nodes
from ficc.controller.store import attempts as attempt_rows
from ficc.controller.store import models as model_rows
from ficc.controller.store import services as rows
from ficc.controller.store.database import Change
from ficc.controller.waiting import woken
from ficc.domain.errors import Refused
from ficc.gateway.ports import Link, Replica, Route

REFRESH_SECONDS = 1.5
"""How often everything is read again, for what other controllers changed: an open stream outlives its service by two
seconds at most."""

SETTLE_SECONDS = 2.0
"""How long a request that would be refused waits for the table; reading it takes milliseconds."""

log = logging.getLogger("ficc.controller")


class RouteTable:
    """`on_change` is called after each refresh that changed something."""

    def __init__(self, context: Context, nodes: Nodes, on_change: Callable[[], None]) -> None:
        self._context = context
        self._nodes = nodes
        self._on_change = on_change
        self._routes: dict[str, Route] = {}
        self._aliases: dict[tuple[str, str], str] = {}
        self._stale: set[str] = set()
        self._unread: set[str] = set()  # stale ones, until what was committed is in the table
        self._wake = asyncio.Event()
        self._settled = asyncio.Event()
        self._settled.set()
        context.database.on_commit(self._committed)

    # The gateway's port.

    def get(self, service_id: str) -> Route | None:
        return self._routes.get(service_id)

    def by_alias(self, project_id: str, alias: str) -> Route | None:
        service_id = self._aliases.get((project_id, alias))
        return None if service_id is None else self._routes.get(service_id)

    def of_project(self, project_id: str) -> Sequence[Route]:
        return [route for route in self._routes.values() if route.project_id == project_id]

    def link(self, node_id: str) -> Link | None:
        return self._nodes.link(node_id)

    # Keeping it fresh.

    def _committed(self, changes: list[Change]) -> None:
        for subject, subject_id in changes:
            if subject == "service" and subject_id:
                self._stale.add(subject_id)
                self._unread.add(subject_id)
                self._settled.clear()
                self._wake.set()

    def is_stale(self, service_id: str) -> bool:
        return service_id in self._unread

    async def settle(self) -> None:
        await woken(self._settled, SETTLE_SECONDS)

    async def refresh(self, only: set[str] | None = None) -> None:
        """Read services again: all of them, or those named."""
        found = await self._context.database.read(lambda connection: _read(connection, only))
        before = dict(self._routes)
        if only is None:
            self._routes.clear()
        else:
            for service_id in only:
                self._routes.pop(service_id, None)
        self._routes.update({route.service_id: route for route in found})
        self._aliases = {(r.project_id, r.alias): r.service_id for r in self._routes.values()}
        if self._routes != before:
            self._on_change()

    async def run(self) -> None:
        while True:
            await woken(self._wake, REFRESH_SECONDS)
            self._wake.clear()
            stale, self._stale = self._stale, set()
            try:
                await self.refresh(stale or None)
                self._unread = set(self._stale)
                if not self._stale:
                    self._settled.set()
            except Refused as refused:
                log.warning("the routes were not refreshed: %s", refused)
                self._stale |= stale
                self._unread.clear()  # nobody waits for a database that is away
                self._settled.set()
                await asyncio.sleep(REFRESH_SECONDS)


def _read(connection: Connection, only: set[str] | None) -> list[Route]:
    services = rows.of_ids(connection, only)
    attempts = attempt_rows.current(connection, services)
    models = model_rows.served(connection, [row.model_id for row in services])
    return [
        Route(
            service_id=row.id,
            project_id=row.project_id,
            alias=row.alias,
            model_name=models[row.model_id].name,
            capabilities=frozenset(models[row.model_id].served_capabilities),
            state=row.record.state,
            generation=row.record.generation,
            deadline_seconds=row.spec["deadline_seconds"],
            created_at=row.created_at,
            replicas=tuple(
                Replica(
                    one.id,
                    one.node_id,
                    one.fence,
                    one.plan["endpoint"]["concurrency"],
                    one.plan["model_revision"],
                )
                for one in attempts[row.id]
                if one.ready
            ),
        )
        for row in services
    ]
