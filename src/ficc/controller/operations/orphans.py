"""Files of the content store that no row refers to, and how they go.

Removing goes the other way round than publishing: the database first, then the disk. So a crash leaves a file
without a row, never a row without its file, and whoever finds such a file may remove it, at any time and as
often as they like. A file is moved to the bin inside a transaction that has made sure of its being an orphan
and keeps others from taking it up meanwhile: it holds the turn in which models are registered for a partial,
the turn in which files are verified for a blob. Moving is one rename; the bin is emptied after it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import groupby, islice
from typing import TypeVar

from ficc.content.store import ContentStore, Key
from ficc.controller.operations.context import Context
from ficc.controller.store import eviction as rows
from ficc.controller.store import models as model_rows
from ficc.controller.store.database import Transaction
from ficc.domain.upload import State

ORPHAN_SECONDS = 3600.0
"""A file without a row that is older belongs to nobody, whatever other controllers are about to record."""
INCOMING_SECONDS = 24 * 3600.0
"""After which a file that was put into the incoming directory, and never adopted, is removed."""
MOVES_MAX = 256
"""Files moved to the bin in one transaction: others wait for it."""

T = TypeVar("T")

log = logging.getLogger("ficc.controller")


class Orphans:
    def __init__(self, context: Context, store: ContentStore) -> None:
        self._context = context
        self._store = store

    async def remove(self, partials: Iterable[Key], blobs: Iterable[str]) -> int:
        """Remove those of these files that nothing refers to; how many there were."""
        count = 0
        by_project = sorted(partials, key=lambda key: key.project_id)
        for project_id, keys in groupby(by_project, lambda key: key.project_id):
            for digests in _batches(key.sha256 for key in keys):
                count += await self._context.database.write(
                    partial(self._bin_partials, project_id=project_id, digests=digests)
                )
        for digests in _batches(blobs):
            count += await self._context.database.write(partial(self._bin_blobs, digests=digests))
        await asyncio.to_thread(self._store.empty_bin)
        return count

    def _bin_partials(self, tx: Transaction, project_id: str, digests: Sequence[str]) -> int:
        model_rows.take_turns(tx, project_id)
        orphans = set(digests) - rows.growing(tx.connection, project_id, digests)
        return sum(self._store.bin_partial(Key(project_id, sha256)) for sha256 in orphans)

    def _bin_blobs(self, tx: Transaction, digests: Sequence[str]) -> int:
        rows.take_turns(tx)
        orphans = set(digests) - rows.wanted_blobs(tx.connection, digests)
        return sum(self._store.bin_blob(sha256) for sha256 in orphans)

    async def sweep(self, age_seconds: float = ORPHAN_SECONDS) -> None:
        """Remove files without a row that are older than this, and what was left in the bin."""
        now, store = self._context.now(), self._store
        partials = await asyncio.to_thread(store.partial_keys, now - age_seconds)
        blobs = await asyncio.to_thread(store.blob_digests, now - age_seconds)
        incoming = await asyncio.to_thread(store.incoming_names, now - INCOMING_SECONDS)
        contents = await self._context.database.read(model_rows.all_contents)
        known = {Key(p, record.sha256) for p, record in contents if record.state is not State.VERIFIED}
        published = await self._context.database.read(model_rows.blob_digests)
        removed = await self.remove(set(partials) - known, set(blobs) - published)
        for name in incoming:
            await asyncio.to_thread(store.decline, name)
        if removed or incoming:
            log.info("removed %d files of the content store that nothing refers to", removed + len(incoming))


def _batches(items: Iterable[T]) -> Iterator[list[T]]:
    iterator = iter(items)
    while batch := list(islice(iterator, MOVES_MAX)):
        yield batch
