"""Blobs that are gone, or are no longer what they were: the rows follow the disk.

A blob is written once and never again, so one that is missing or changed was removed or damaged by somebody else. Every
project that had it verified has it missing then, says so, and may bring its bytes again.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Collection, Mapping
from functools import partial

from ficc.content.store import ContentStore, hash_file
from ficc.controller.operations.contents import settle_models
from ficc.controller.operations.context import Context
from ficc.controller.store import eviction
from ficc.controller.store import models as rows
from ficc.controller.store.database import Transaction
from ficc.domain import upload
from ficc.domain.errors import Reason

GONE = Reason(
    "content_lost",
    "The verified file is gone from the content store. Upload it or acquire the model again; it starts at offset 0.",
)

log = logging.getLogger("ficc.controller")


class Losses:
    def __init__(self, context: Context, store: ContentStore) -> None:
        self._context = context
        self._store = store

    async def look(self, digests: Collection[str] | None = None) -> None:
        """Whether the files of these blobs, or of all, are there in their size: a look at each name."""
        known = await self._context.database.read(lambda c: rows.blobs(c, digests))
        for sha256 in await asyncio.to_thread(self._missing, known):
            await self._lose(sha256, known[sha256])

    async def look_at_model(self, model_id: str) -> None:
        """The same for the files of one model, before it is relied on."""
        found = await self._context.database.read(lambda c: rows.files(c, [model_id])[model_id])
        await self.look({file.sha256 for file in found if file.state is upload.State.VERIFIED})

    async def examine(self, digests: Collection[str]) -> None:
        """The same, and whether they still hold the bytes they are named for: each is read once. What does
        not is removed."""
        known = await self._context.database.read(lambda c: rows.blobs(c, digests))
        for sha256, size in known.items():
            if not await asyncio.to_thread(self._holds, sha256, size):
                await self._lose(sha256, size)

    def _missing(self, known: Mapping[str, int]) -> list[str]:
        return [sha256 for sha256, size in known.items() if not self._store.has_blob(sha256, size)]

    def _holds(self, sha256: str, size: int) -> bool:
        if not self._store.has_blob(sha256, size):
            return False
        actual = hash_file(self._store.blob(sha256), lambda _: None) if size else hashlib.sha256()
        if actual.hexdigest() == sha256:
            return True
        self._store.bin_blob(sha256)
        return False

    async def _lose(self, sha256: str, size: int) -> None:
        for project_id in await self._context.database.read(lambda c: rows.having(c, sha256)):
            lost = await self._context.database.write(
                partial(self._give_up, project_id=project_id, sha256=sha256, size=size)
            )
            if lost:
                log.error("project %s lost blob %s: gone or damaged in the content store", project_id, sha256)
        await self._context.database.write(partial(self._forget, sha256=sha256, size=size))
        await asyncio.to_thread(self._store.empty_bin)

    def _give_up(self, tx: Transaction, project_id: str, sha256: str, size: int) -> bool:
        """Unless it came back meanwhile: it was published again, before its row is written."""
        rows.take_turns(tx, project_id)
        eviction.take_turns(tx)
        content = rows.content(tx.connection, project_id, sha256)
        if content is None or content.record.state is not upload.State.VERIFIED:
            return False
        if self._store.has_blob(sha256, size):
            return False
        lost = upload.advance(content.record, upload.Lose(GONE))
        if not rows.set_content(tx, project_id, lost, token=None):
            return False  # somebody is about to write to it; the next look finds it again
        settle_models(tx, project_id, [sha256])
        return True

    def _forget(self, tx: Transaction, sha256: str, size: int) -> None:
        eviction.take_turns(tx)
        if not self._store.has_blob(sha256, size):
            rows.forget_blob(tx, sha256)
