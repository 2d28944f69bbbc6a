"""The one writer of a file's bytes: claims, durable offsets, verification and publishing.

Uploads and downloads use it: whoever brings the bytes, they become durable and proved the same way.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator, Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import ParamSpec, TypeVar
from weakref import WeakValueDictionary

from ficc.content.store import ContentStore, Key, hash_file
from ficc.controller.operations.context import Context
from ficc.controller.operations.orphans import ORPHAN_SECONDS, Orphans
from ficc.controller.store import eviction
from ficc.controller.store import models as rows
from ficc.controller.store.database import Transaction, to_the_end
from ficc.domain import acquisition, upload
from ficc.domain.errors import Reason, Refused

CLAIM_SECONDS = 60.0
"""A claim outlives its holder by at most this; holders extend it."""
TURN_SECONDS = 5.0
"""How long a writer waits for another one of this process, rather than be told at once."""
VERIFY_THREADS = 2
DISK_THREADS = 16
"""What waits for the disk has threads of its own: a flush takes as long as the disk likes, and nothing else that
needs a thread for a moment stands behind it."""
RATE_SECONDS = 10.0
"""Over how long a rate is averaged."""
HASHERS_MAX = 64
"""Files whose hash is carried along while they grow: those that began last. The rest are hashed at the end."""
PUBLISHING = frozenset({upload.State.VERIFYING, upload.State.VERIFIED})
"""While a content is in the first of these its blob may be there before its row."""

P = ParamSpec("P")
T = TypeVar("T")

log = logging.getLogger("ficc.controller")


@dataclass(slots=True)
class Claim:
    """Being the one writer of a content. `record` is what is durable."""

    key: Key
    kind: str
    token: str
    record: upload.Record
    inherited: bool
    """Its last holder never gave it back, so disk and row may differ."""


@dataclass(slots=True)
class Meter:
    """Durable bytes over time, and how far a running hash is."""

    samples: list[tuple[float, int]] = field(default_factory=list)
    verified_bytes: int = 0

    def add(self, now: float, count: int) -> None:
        self.samples.append((now, count))
        self.samples = [s for s in self.samples if s[0] > now - RATE_SECONDS]

    def rate(self, now: float) -> float:
        recent = [s for s in self.samples if s[0] > now - RATE_SECONDS]
        if not recent:
            return 0.0
        return sum(count for _, count in recent) / max(1.0, now - recent[0][0])


class Contents:
    """`meters` tells readers of a model how fast it grows and how far its hash is."""

    def __init__(self, context: Context, store: ContentStore) -> None:
        self._context = context
        self.store = store
        self.orphans = Orphans(context, store)
        self.meters: dict[Key, Meter] = {}
        self._hashers: dict[Key, tuple[int, hashlib._Hash]] = {}
        self._locks: WeakValueDictionary[Key, asyncio.Lock] = WeakValueDictionary()
        self._verifying: dict[Key, asyncio.Task[upload.Record]] = {}
        self._hash_threads = ThreadPoolExecutor(VERIFY_THREADS, "hash")
        self._disk_threads = ThreadPoolExecutor(DISK_THREADS, "disk")
        self._closing = False

    async def _on_disk(self, work: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
        call = partial(work, *args, **named)
        return await asyncio.get_running_loop().run_in_executor(self._disk_threads, call)

    # Claims.

    @asynccontextmanager
    async def writing(self, key: Key, kind: str, at_most: int | None = None) -> AsyncIterator[Claim]:
        """Hold the claim of a content, after whoever of this process holds it now.

        `at_most` bounds the claims of this kind in the installation. Raises Refused `upload_busy`,
        `model_busy`, `not_found`.
        """
        async with self._turn(key, None if kind == "verify" else TURN_SECONDS):
            claim = await self._claim(key, kind, at_most)
            extending = asyncio.create_task(self._extend(claim))
            try:
                if claim.inherited or claim.record.state is upload.State.VERIFYING:
                    await self._mend(claim)
                yield claim
            finally:
                extending.cancel()
                with suppress(Refused):  # then it runs out by itself; what was achieved stands
                    await self._context.database.write(lambda tx: rows.release_claim(tx, claim.token))

    @asynccontextmanager
    async def _turn(self, key: Key, seconds: float | None) -> AsyncIterator[None]:
        lock = self._locks.setdefault(key, asyncio.Lock())
        try:
            async with asyncio.timeout(seconds):
                await lock.acquire()
        except TimeoutError:
            content = await self._context.database.read(
                lambda connection: rows.content(connection, key.project_id, key.sha256)
            )
            raise _busy(content) from None
        try:
            yield
        finally:
            lock.release()

    async def _claim(self, key: Key, kind: str, at_most: int | None) -> Claim:
        now, token = self._context.now(), self._context.new_id()

        def work(tx: Transaction) -> tuple[upload.Record, bool]:
            if at_most is not None:
                tx.take_turns(f"{kind} claims")
                if rows.active_claims(tx.connection, kind, now) >= at_most:
                    raise too_many_streams()
            before = rows.content(tx.connection, key.project_id, key.sha256)
            if before is None:
                raise Refused("not_found", "The model was removed.")
            until = now + CLAIM_SECONDS
            if not rows.claim(
                tx, key.project_id, key.sha256, token=token, kind=kind, now=now, expires_at=until
            ):
                raise _busy(before)
            content = rows.content(tx.connection, key.project_id, key.sha256)
            assert content is not None
            return content.record, before.claim_expires_at is not None

        record, inherited = await self._context.database.write(work)
        return Claim(key, kind, token, record, inherited)

    async def _extend(self, claim: Claim) -> None:
        while True:
            await asyncio.sleep(CLAIM_SECONDS / 3)
            until = self._context.now() + CLAIM_SECONDS
            with suppress(Refused):  # the database may be back before the claim runs out
                await self._context.database.write(
                    partial(rows.extend_claim, token=claim.token, expires_at=until)
                )

    # Writing.

    async def write(self, claim: Claim, at: int, *pieces: bytes) -> None:
        """Write at an absolute position past the durable offset, not yet durable, hashing along."""
        position, hasher = self._hashers.pop(claim.key, (-1, None))
        if at == 0:
            hasher = hashlib.sha256()
        elif position != at:
            hasher = None

        def run() -> None:
            self.store.write(claim.key, at, *pieces)
            if hasher is not None:
                for piece in pieces:
                    hasher.update(piece)

        await self._on_disk(run)
        if hasher is not None:
            if len(self._hashers) >= HASHERS_MAX:
                del self._hashers[next(iter(self._hashers))]
            self._hashers[claim.key] = (at + sum(map(len, pieces)), hasher)

    async def commit(self, claim: Claim, length: int) -> None:
        """Make `length` bytes past the offset durable, then say so. Raises Refused `model_busy` when the
        claim was lost, `database_unavailable` when nobody knows whether it was said: then the bytes stay."""
        if not length:
            return
        await self._on_disk(self.store.sync, claim.key)
        await self._store(claim, upload.advance(claim.record, upload.Write(length)))
        self.meters.setdefault(claim.key, Meter()).add(self._context.now(), length)

    async def abandon(self, claim: Claim) -> None:
        """Drop bytes past the durable offset that nobody tried to commit."""
        self._hashers.pop(claim.key, None)
        await self._on_disk(self.store.truncate, claim.key, claim.record.offset)

    async def _store(self, claim: Claim, after: upload.Record, blob_at: float | None = None) -> None:
        """Write the record of a claimed content, and of its blob if it was published at a time."""
        key, settles = claim.key, after.state is not claim.record.state

        def work(tx: Transaction) -> None:
            if settles:
                rows.take_turns(tx, key.project_id)
            if after.state in PUBLISHING:
                eviction.take_turns(tx)
            if blob_at is not None:
                rows.add_blob(tx, key.sha256, after.bytes, blob_at)
            if not rows.set_content(tx, key.project_id, after, token=claim.token):
                raise Refused("model_busy", "The claim on this file was lost; read the model and try again.")
            if settles:
                settle_models(tx, key.project_id, [key.sha256], supplied=claim.kind == "upload")

        await self._context.database.write(work)
        claim.record = after

    async def restart(self, claim: Claim, why: Reason) -> None:
        """Begin again at 0, and say why. The row comes first: a partial longer than its row is cut."""
        self._hashers.pop(claim.key, None)
        await self._store(claim, upload.advance(claim.record, upload.Restart(why)))
        await self._on_disk(self.store.truncate, claim.key, 0)

    async def adopt(self, claim: Claim, name: str) -> None:
        """Take a file of the incoming directory as the whole partial; drop it where nothing is missing."""
        if claim.record.state is upload.State.VERIFIED:
            await self._on_disk(self.store.decline, name)
            return
        self._hashers.pop(claim.key, None)
        await self._on_disk(self.store.adopt, claim.key, name, claim.record.bytes)
        missing = claim.record.bytes - claim.record.offset
        await self._store(claim, upload.advance(claim.record, upload.Write(missing)))

    async def discard(self, keys: Collection[Key], blobs: Iterable[str]) -> None:
        """Remove the files of contents that were given up, and the blobs that went with them."""
        for key in keys:
            self._forget(key)
        await self.orphans.remove(keys, blobs)

    def _forget(self, key: Key) -> None:
        self.meters.pop(key, None)
        self._hashers.pop(key, None)

    # Verifying.

    def verify(self, key: Key, *, refetch: bool = False) -> asyncio.Task[upload.Record]:
        """Hash, compare and publish a full-length partial, once at a time; the task ends with the record.
        The caller may stop waiting: it goes on. `refetch`: bytes that are wrong for the first time are to be
        fetched once more, which is no failure yet."""
        task = self._verifying.get(key)
        if task is None or task.done():
            task = asyncio.create_task(self._verify(key, refetch))
            task.add_done_callback(lambda done: self._verified(key, done))
            self._verifying[key] = task
        return task

    def _verified(self, key: Key, task: asyncio.Task[upload.Record]) -> None:
        self._verifying.pop(key, None)
        if not task.cancelled():
            task.exception()  # looked at: whoever waits gets it, and nobody has to

    async def _verify(self, key: Key, refetch: bool) -> upload.Record:
        async with self.writing(key, "verify") as claim:
            if claim.record.offset == claim.record.bytes:
                await self._mend(claim)  # what is hashed must be there
            if claim.record.state is upload.State.VERIFIED or claim.record.offset != claim.record.bytes:
                return claim.record
            await self._store(claim, upload.advance(claim.record, upload.Verify()))
            try:
                actual = await self._hash(key, claim.record.bytes)
                await to_the_end(asyncio.create_task(self._conclude(claim, actual, refetch)))
            except BaseException:
                await self._mend(claim)
                raise
            return claim.record

    async def _conclude(self, claim: Claim, actual: str, refetch: bool) -> None:
        """Publish, or start again at 0.

        A partial that is gone while its row says `verifying` was published. So the row of a mismatch comes
        before the removal of its bytes: else a crash between the two would pass them off as right.
        """
        if actual == claim.key.sha256:
            await self._publish(claim)
        elif refetch and not upload.was_mismatch(claim.record):
            await self.restart(claim, upload.mismatch_reason(claim.key.sha256, actual))
        else:
            await self._store(claim, upload.advance(claim.record, upload.Mismatch(actual)))
            await self._on_disk(self.store.truncate, claim.key, 0)
        self._forget(claim.key)

    async def _publish(self, claim: Claim) -> None:
        await self._on_disk(self.store.publish, claim.key, claim.record.bytes)
        after = upload.advance(claim.record, upload.Match())
        await self._store(claim, after, blob_at=self._context.now())

    async def _hash(self, key: Key, size: int) -> str:
        """From the hash carried along where there is one, else from the first byte, off the event loop."""
        position, hasher = self._hashers.pop(key, (0, None))
        if hasher is not None and position == size:
            return hasher.hexdigest()
        if size == 0:
            return hashlib.sha256().hexdigest()
        meter = self.meters.setdefault(key, Meter())

        def run() -> str:
            def progress(count: int) -> None:
                meter.verified_bytes = count
                if self._closing:
                    raise InterruptedError("the controller is shutting down")

            return hash_file(self.store.partial(key), progress).hexdigest()

        try:
            return await asyncio.get_running_loop().run_in_executor(self._hash_threads, run)
        except BaseException:
            meter.verified_bytes = 0
            raise

    # Starting.

    async def recover(self, *, alone: bool) -> None:
        """Bring disk and rows together after a crash. `alone`: no other controller shares the store."""
        if alone:
            await self._context.database.write(rows.drop_claims)
        for project_id, record in await self._context.database.read(rows.all_contents):
            if record.state is not upload.State.VERIFIED:
                await self._recover_one(Key(project_id, record.sha256), record)
        await self.orphans.sweep(0.0 if alone else ORPHAN_SECONDS)

    async def _recover_one(self, key: Key, record: upload.Record) -> None:
        length = await self._on_disk(self.store.length, key)
        if length == record.offset and record.state is not upload.State.VERIFYING:
            return
        try:
            async with self.writing(key, "recover") as claim:
                await self._mend(claim)
        except Refused as refused:
            if refused.code not in ("model_busy", "not_found"):  # another controller sees to it
                raise

    async def _mend(self, claim: Claim) -> None:
        """Bring the row of a claimed content and its partial together."""
        key, record = claim.key, claim.record
        if record.state is upload.State.VERIFIED:
            return
        length = await self._on_disk(self.store.length, key)
        if record.state is upload.State.VERIFYING:
            gone = length == 0 and record.bytes > 0
            if gone and await self._on_disk(self.store.has_blob, key.sha256, record.bytes):
                await self._publish(claim)
                return
            record = upload.advance(record, upload.Interrupt())
        if length > record.offset:
            await self._on_disk(self.store.truncate, key, record.offset)
        elif length < record.offset:
            self._hashers.pop(key, None)
            record = upload.advance(record, upload.Shorten(length))
        if record != claim.record:
            await self._store(claim, record)

    async def close(self) -> None:
        """Interrupt what verifies; it is hashed again when somebody finishes it."""
        self._closing = True
        for task in list(self._verifying.values()):
            task.cancel()
        await asyncio.gather(*self._verifying.values(), return_exceptions=True)
        self._hash_threads.shutdown(wait=False, cancel_futures=True)
        self._disk_threads.shutdown(wait=False)


def settle_models(
    tx: Transaction, project_id: str, digests: Iterable[str], *, supplied: bool = False
) -> None:
    """Bring the state of every model of the project that has one of these files in line with its files."""
    for model in rows.progress(tx.connection, project_id, digests):
        after = acquisition.advance(
            model.record, acquisition.event_of_files(model.record, model.files, supplied=supplied)
        )
        if after != model.record:
            rows.set_record(tx, model.model_id, model.record, after)


def too_many_streams() -> Refused:
    return Refused(
        "upload_busy",
        f"{upload.OCTET_STREAMS_MAX} octet-stream uploads are active already; send this one when one has ended.",
        retry_after_seconds=1,
    )


def _busy(content: rows.Content | None) -> Refused:
    if content is None:
        return Refused("not_found", "The model was removed.")
    return Refused(
        "model_busy",
        "Another writer holds this file; read the model and try again.",
        retry_after_seconds=1,
        beside={"offset": content.record.offset},
    )
