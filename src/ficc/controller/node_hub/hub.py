"""Which nodes are connected here, and what each last said: kept in memory, snapshots also as rows."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ficc.controller.operations.context import Context
from ficc.controller.store import attempts
from ficc.controller.store import nodes as rows
from ficc.domain.errors import Refused

if TYPE_CHECKING:
    from ficc.controller.node_hub.local import LocalLink

SNAPSHOT_WRITE_SECONDS = 30.0
"""What is free changes all the time; a row is written when something else changed, and at least so often."""

log = logging.getLogger("ficc.controller")


class Hub:
    """`on_change` is called when a node joined, left or reported: reconcilers have something to look at.
    `on_join` is called besides when one joined, `on_peak` when more memory of an attempt was measured."""

    def __init__(
        self,
        context: Context,
        on_change: Callable[[], None],
        on_join: Callable[[], None],
        on_peak: Callable[[str, int], None],
    ) -> None:
        self._context = context
        self._on_change = on_change
        self._on_join = on_join
        self.on_peak = on_peak
        self._links: dict[str, LocalLink] = {}
        self._written: dict[str, tuple[float, dict[str, Any]]] = {}
        self._writing: set[asyncio.Task[None]] = set()

    def link(self, node_id: str) -> LocalLink | None:
        link = self._links.get(node_id)
        return link if link is not None and link.connected else None

    def links(self) -> list[LocalLink]:
        return [link for link in self._links.values() if link.connected]

    async def joined(self, link: LocalLink) -> None:
        """A node is connected and said what it has. What it did not mention of attempts that are recorded
        here (it lists those it still holds) is asked for. Raises Refused."""
        await self._write(link)
        held = await self._context.database.read(lambda c: attempts.held_on(c, link.node_id))
        for one in held:
            if link.reported(one.id) is None:
                await link.learn(one.id)
        self._links[link.node_id] = link
        log.info("node %s joined", link.node_id)
        self._on_join()
        self._on_change()

    def left(self, link: LocalLink) -> None:
        if self._links.get(link.node_id) is link:
            del self._links[link.node_id]
            self._on_change()

    def reported(self, attempt_id: str) -> None:
        self._on_change()

    def measured(self, link: LocalLink) -> None:
        """A new snapshot came: keep the row fresh without writing every measurement."""
        written_at, before = self._written.get(link.node_id, (0.0, {}))
        due = self._context.now() - written_at > SNAPSHOT_WRITE_SECONDS
        if due or _steady(before) != _steady(link.snapshot):
            task = asyncio.create_task(self._write_quietly(link))
            self._writing.add(task)
            task.add_done_callback(self._writing.discard)

    async def _write_quietly(self, link: LocalLink) -> None:
        try:
            await self._write(link)
        except Refused as refused:
            log.warning("a snapshot was not recorded: %s", refused)

    async def _write(self, link: LocalLink) -> None:
        now, snapshot = self._context.now(), link.snapshot
        self._written[link.node_id] = now, snapshot
        await self._context.database.write(
            lambda tx: rows.put_snapshot(
                tx,
                link.node_id,
                name=str(snapshot["machine"]["hostname"]),
                mode="managed",
                snapshot=snapshot,
                now=now,
            )
        )


def _steady(snapshot: dict[str, Any]) -> dict[str, Any]:
    """The part of a snapshot that does not move by itself."""
    return {name: value for name, value in snapshot.items() if name != "free"}
