"""Lease renewals: a task of their own, on a connection of their own, that waits for nothing else.

A renewal is committed before it is sent, so that this side never believes a lease over before the executor
does. The executor counts from `sent_ns`, which is read before the commit.
"""

from __future__ import annotations

import asyncio
import logging

from ficc.controller.operations.context import Context
from ficc.controller.operations.ports import NodeLink, Nodes
from ficc.controller.store import attempts as rows
from ficc.controller.waiting import woken
from ficc.domain import lease
from ficc.domain.errors import Refused
from ficc.failpoints import failpoint

log = logging.getLogger("ficc.controller")


class LeaseRenewer:
    def __init__(self, context: Context, nodes: Nodes) -> None:
        self._context = context
        self._nodes = nodes
        self._wake = asyncio.Event()

    def wake(self) -> None:
        """A node joined: its leases are renewed at once."""
        self._wake.set()

    async def run(self) -> None:
        interval = lease.renewal_interval_seconds(self._context.settings.leases.ttl_seconds)
        while True:
            self._wake.clear()
            await asyncio.gather(*(self._renew(link) for link in self._nodes.links()))
            await woken(self._wake, interval)

    async def _renew(self, link: NodeLink) -> None:
        boot_id, sent_ns = link.lease_clock()
        ttl = self._context.settings.leases.ttl_seconds
        belief = self._context.believe(ttl)
        try:
            renewed = await self._context.database.write(
                lambda tx: rows.renew_leases(tx, link.node_id, boot_id, belief)
            )
            if not renewed:
                return
            failpoint("controller.renewal_committed")
            results = await link.renew(
                [(fence, lease.Renew(sequence, boot_id, sent_ns, ttl)) for fence, sequence in renewed]
            )
            failpoint("controller.renewal_answered")
        except Refused as refused:
            log.warning("leases on node %s were not renewed: %s", link.node_id, refused)
            return
        for result in results:
            if "refused" in result:
                log.info("lease of %s: %s", result["attempt_id"], result["refused"]["message"])
