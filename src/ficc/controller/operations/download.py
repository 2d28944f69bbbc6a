"""The download of one file: ranges from its durable offset, written, made durable and said, until every byte is
there or its source has used up its patience.

A reader takes the body off the network while a writer writes what came before: a slow disk holds the source
back through a short queue, and a slow source never keeps finished bytes from becoming durable.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field

from ficc.controller.operations.contents import Claim, Contents
from ficc.controller.operations.context import Context
from ficc.controller.sources.https import Https, Response
from ficc.controller.store import downloads as rows
from ficc.domain import fetching
from ficc.domain.errors import Reason, Refused

BLOCK_BYTES = 1 << 20
"""How much is gathered before it is written,"""
BLOCK_PIECES_MAX = 1024
"""and in how many pieces: a source may send single bytes."""
BLOCKS_QUEUED_MAX = 4
"""Blocks that wait for the disk, of one file."""
UNIT_BYTES_MAX = 16 << 20
"""Written bytes become durable at the latest when they are so many,"""
UNIT_SECONDS = 1.0
"""or after this time, so that a slow download is not lost either."""
Block = list[bytes]
"""Pieces as they came, which are written as they are; an empty one is the end."""
TRANSIENT = frozenset({"source_unavailable", "stalled"})
"""What a source is asked again after."""


class Pace:
    """A rate that several downloads share: each takes its bytes before it reads on."""

    def __init__(self, bytes_per_second: int) -> None:
        self._rate = bytes_per_second
        self._free_at = 0.0

    async def take(self, count: int) -> None:
        if not self._rate:
            return
        now = asyncio.get_running_loop().time()
        wait = self._free_at - now
        self._free_at = max(now, self._free_at) + count / self._rate
        if wait > 0:
            await asyncio.sleep(wait)


@dataclass(slots=True)
class FileDownload:
    """`stop` ends it after the write that is under way. `note` is told what it waits for, or None."""

    context: Context
    contents: Contents
    https: Https
    pace: Pace
    luck: Callable[[], float]
    url: str
    credential: str | None
    claim: Claim
    stop: asyncio.Event
    note: Callable[[Reason | None], None]
    etag: str | None = None
    gained: int = 0
    """Bytes of the attempt under way that became durable."""
    backoff: fetching.Backoff = field(init=False)

    def __post_init__(self) -> None:
        self.backoff = fetching.Backoff(self.context.settings.acquisition.max_attempts)

    async def run(self) -> None:
        """Until every byte is durable or `stop` is set. Raises Refused; then what is durable stays."""
        key, limits = self.claim.key, self.context.settings.acquisition
        loop = asyncio.get_running_loop()
        self.etag = await self.context.database.read(
            lambda connection: rows.etag(connection, key.project_id, key.sha256, self.url)
        )
        while not self.stop.is_set():
            record = self.claim.record
            wanted = fetching.next_range(record.offset, record.bytes, limits.range_bytes, self.etag)
            if wanted is None:
                return
            self.gained, began = 0, loop.time()
            retry = await self._ask(wanted)
            if fetching.is_progress(self.gained, loop.time() - began, limits.bytes_per_second_min):
                self.backoff = self.backoff.progressed()
            if retry is None:
                self.note(None)
                continue
            self.backoff, seconds = self.backoff.failed(retry, luck=self.luck())
            self.note(
                Reason(retry.reason.code, f"{retry.reason.message} It is asked again in {seconds:.0f} s.")
            )
            with suppress(TimeoutError):
                await asyncio.wait_for(self.stop.wait(), seconds)

    async def _ask(self, wanted: fetching.Wanted) -> fetching.Retry | None:
        """One request, and what has come of it: None when it brought what it promised, or was stopped."""
        async with AsyncExitStack() as stack:
            try:
                response = await stack.enter_async_context(
                    self.https.open(self.url, headers=wanted.headers, credential=self.credential)
                )
            except Refused as refused:
                return _retry(refused)
            now = self.context.now()
            answer = fetching.check_answer(wanted, response.status, response.headers, now=now)
            match answer:
                case fetching.Retry():
                    return answer
                case fetching.Restart(why, body):
                    self.backoff = self.backoff.restarted(answer)
                    await self.contents.restart(self.claim, why)
                    await self._remember(body.etag if body else None)
                    return None if body is None else await self._receive(body, response)
                case fetching.Body():
                    await self._remember(answer.etag)
                    return await self._receive(answer, response)

    async def _remember(self, etag: str | None) -> None:
        """The entity tag, before the first of its bytes: a restarted controller continues the same file."""
        if etag != self.etag:
            self.etag = etag
            await self.context.database.write(lambda tx: rows.set_etag(tx, self.claim.token, self.url, etag))

    # One body: a reader and a writer.

    async def _receive(self, body: fetching.Body, response: Response) -> fetching.Retry | None:
        blocks: asyncio.Queue[Block] = asyncio.Queue(BLOCKS_QUEUED_MAX)
        reading = asyncio.create_task(self._read(body, response, blocks))
        try:
            await self._write(body.offset, blocks)
            return await reading
        finally:
            reading.cancel()
            await asyncio.wait([reading])

    async def _read(
        self, body: fetching.Body, response: Response, blocks: asyncio.Queue[Block]
    ) -> fetching.Retry | None:
        """Gather blocks until the body ends, breaks or is stopped. What came is written in every case."""
        loop, refusal, retry = asyncio.get_running_loop(), None, None
        block: Block = []
        at = begun = body.offset
        since = loop.time()
        try:
            async for piece in response.chunks():
                block.append(piece[: body.end - at])
                at += len(piece)
                retry = fetching.check_received(body, at)
                if retry is not None:
                    break
                full = at - begun >= BLOCK_BYTES or len(block) >= BLOCK_PIECES_MAX
                if full or loop.time() - since >= UNIT_SECONDS:
                    await blocks.put(block)
                    block, begun, since = [], at, loop.time()
                if self.stop.is_set():
                    break
                await self.pace.take(len(piece))
            else:
                retry = fetching.check_ended(body, at)
        except Refused as refused:
            refusal = refused
        if block:
            await blocks.put(block)
        await blocks.put([])
        return retry if refusal is None else _retry(refusal)

    async def _write(self, at: int, blocks: asyncio.Queue[Block]) -> None:
        """Write block after block. While one unit is being made durable, the next one is written."""
        loop, written, since = asyncio.get_running_loop(), 0, 0.0
        commit: asyncio.Task[None] | None = None
        try:
            while True:
                try:
                    async with asyncio.timeout_at(since + UNIT_SECONDS if written else None):
                        block = await blocks.get()
                except TimeoutError:
                    block = None
                if block:
                    since = since if written else loop.time()
                    await self.contents.write(self.claim, at, *block)
                    count = sum(map(len, block))
                    at, written = at + count, written + count
                if written >= UNIT_BYTES_MAX or not block or loop.time() - since >= UNIT_SECONDS:
                    if commit is not None:
                        await commit
                    commit, written = asyncio.create_task(self._commit(written)), 0
                if block == []:
                    return
        finally:
            if commit is not None:
                await commit
            if written:  # the disk is full, or this was cancelled: what it did take stays
                with suppress(Refused):
                    await self._commit(written)

    async def _commit(self, count: int) -> None:
        await self.contents.commit(self.claim, count)
        self.gained += count


def _retry(refused: Refused) -> fetching.Retry:
    """What a source is asked again after; raises the refusal where that is no use."""
    if refused.code not in TRANSIENT:
        raise refused
    return fetching.Retry(Reason(refused.code, refused.message))
