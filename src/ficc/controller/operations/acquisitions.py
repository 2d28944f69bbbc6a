"""Acquisition: models whose files this controller fetches, from `acquire` to `ready`, `paused` or `failed`.

The row of a model says what is wanted; the background work here makes it so, also after a restart. Each file
is fetched under the claim of its content, so several controllers, or two models with a file in common, never
write the same bytes at once. A pause is written as done only after the last write that was under way.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from ficc.content.store import Key
from ficc.controller.operations.contents import Contents
from ficc.controller.operations.context import Context, not_found
from ficc.controller.operations.download import FileDownload, Pace
from ficc.controller.sources.addresses import Walls, check_url
from ficc.controller.sources.https import Https
from ficc.controller.store import downloads
from ficc.controller.store import models as rows
from ficc.controller.store.database import Change, Transaction
from ficc.domain import acquisition, upload
from ficc.domain.access import Actor
from ficc.domain.acquisition import State
from ficc.domain.errors import Reason, Refused, invalid
from ficc.domain.quantity import size

SCAN_SECONDS = 2.0
"""How often what other controllers changed is looked at."""
BUSY_SECONDS = 0.5
"""How long a file is left to another writer before it is looked at again."""
DATABASE_SECONDS = 2.0
"""How long a database that does not answer is left alone; a download does not fail for it."""

T = TypeVar("T")

log = logging.getLogger("ficc.controller")


@dataclass(eq=False, slots=True)
class _Fetching:
    """One model's background work. `stop`: nothing more than the write under way."""

    stop: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None


class Acquisitions:
    """`notes` tells readers of a model why a file does not get on just now."""

    def __init__(
        self,
        context: Context,
        contents: Contents,
        https: Https,
        walls: Walls,
        credential: Callable[[str], str | None],
        luck: Callable[[], float],
    ) -> None:
        limits = context.settings.acquisition
        self._context = context
        self._contents = contents
        self._https = https
        self._walls = walls
        self._credential = credential
        self._luck = luck
        self._pace = Pace(limits.bytes_per_second_max)
        self._places = asyncio.Semaphore(limits.files_max)
        self._places_of_host: defaultdict[str, asyncio.Semaphore] = defaultdict(
            lambda: asyncio.Semaphore(limits.files_per_host_max)
        )
        self._fetching: dict[str, _Fetching] = {}
        self._wake = asyncio.Event()
        self.notes: dict[Key, Reason] = {}
        context.database.on_commit(self._committed)

    # What operators ask for.

    async def acquire(self, actor: Actor, model_id: str) -> None:
        """Want a model's bytes from its sources. Of a ready model, or one that is being fetched, nothing is
        wanted. Raises Refused before anything is written: `invalid_request` where a file has no source,
        `source_refused`, `disk_full` and `quota_exceeded` with the numbers, `model_busy` while it is pausing.
        """
        actor.require("models:manage")
        free = await asyncio.to_thread(self._contents.store.free_bytes)
        project_id = actor.project_id

        def work(tx: Transaction) -> None:
            tx.take_turns("acquisitions")
            rows.take_turns(tx, project_id)
            model = rows.get(tx.connection, project_id, model_id)
            if model is None:
                raise not_found("model", model_id)
            if model.record.state is State.PAUSING:
                raise Refused(
                    "model_busy",
                    "The model is being paused; acquire it once it is.",
                    retry_after_seconds=1,
                )
            if model.record.state is State.READY or model.record.fetching:
                return
            files = rows.files(tx.connection, [model_id])[model_id]
            missing = self._missing(model, files)
            self._check_room(tx, project_id, missing, free)
            for record in {file.sha256: file for file in files}.values():
                if record.state is upload.State.FAILED:
                    rows.set_content(tx, project_id, upload.advance(record, upload.Retry()), token=None)
            rows.set_record(
                tx, model_id, model.record, acquisition.advance(model.record, acquisition.Acquire())
            )

        await self._context.database.write(work)

    def _missing(self, model: rows.Model, files: list[upload.Record]) -> dict[str, upload.Record]:
        """The contents to fetch, by digest. Raises Refused where one cannot be."""
        urls = _urls(model)
        missing: dict[str, upload.Record] = {}
        for index, (file, record) in enumerate(zip(model.manifest.files, files, strict=True)):
            if record.state is upload.State.VERIFIED:
                continue
            if record.offset < record.bytes and file.sha256 not in urls:
                raise invalid(
                    f"{file.name!r} has no url to fetch it from: upload it, or register a manifest that "
                    "names its source.",
                    f"files[{index}].url",
                )
            if file.sha256 in urls:
                check_url(urls[file.sha256], self._walls)
            missing[file.sha256] = record
        return missing

    def _check_room(
        self, tx: Transaction, project_id: str, missing: Mapping[str, upload.Record], free: int
    ) -> None:
        needed = {(project_id, record.sha256): record.bytes - record.offset for record in missing.values()}
        admitted = downloads.outstanding(tx.connection)
        others = sum(count for key, count in admitted.items() if key not in needed)
        wanted = sum(needed.values())
        if wanted > free - others:
            raise Refused(
                "disk_full",
                f"The model needs {size(wanted)} more; {size(max(0, free))} are free beyond content.reserve_bytes"
                f"{f', of which other downloads need {size(others)}' if others else ''}. Make room, then acquire "
                "again.",
                details={"bytes_needed": wanted, "bytes_free": free, "bytes_admitted": others},
            )
        quota = self._context.settings.acquisition.project_quota_bytes
        if quota:
            held = downloads.held_bytes(tx.connection, project_id)
            added = sum(r.bytes for r in missing.values() if r.state is upload.State.MISSING)
            if held + added > quota:
                raise Refused(
                    "quota_exceeded",
                    f"The project holds {size(held)} of the {size(quota)} that acquisition.project_quota_bytes "
                    f"gives it, and the model adds {size(added)}. Remove a model first.",
                    details={"bytes_held": held, "bytes_added": added, "quota_bytes": quota},
                )

    async def pause(self, actor: Actor, model_id: str) -> None:
        """End a download after the write that is under way. Raises Refused `action_not_allowed` where there is
        none."""
        actor.require("models:manage")

        def work(tx: Transaction) -> None:
            rows.take_turns(tx, actor.project_id)
            model = rows.get(tx.connection, actor.project_id, model_id)
            if model is None:
                raise not_found("model", model_id)
            if (model.record.state, acquisition.Pause) not in acquisition.TRANSITIONS:
                raise Refused(
                    "action_not_allowed",
                    f"The model is {model.record.state}; only a download can be paused.",
                    details={"state": model.record.state.value},
                )
            after = acquisition.advance(model.record, acquisition.Pause())
            if after != model.record:
                rows.set_record(tx, model_id, model.record, after)

        await self._context.database.write(work)

    # The background work.

    def _committed(self, changes: list[Change]) -> None:
        if any(subject == "model" for subject, _ in changes):
            self._wake.set()

    async def run(self) -> None:
        """Start and stop the work on models as their rows want it."""
        try:
            while True:
                self._wake.clear()
                with suppress(Refused):  # the database is away; what runs goes on
                    self._align(await self._context.database.read(downloads.under_way))
                with suppress(TimeoutError):
                    async with asyncio.timeout(SCAN_SECONDS):
                        await self._wake.wait()
        finally:
            await self._end_all()

    def _align(self, wanted: list[downloads.Download]) -> None:
        for model_id in set(self._fetching) - {
            one.model_id for one in wanted if one.state is not State.PAUSING
        }:
            self._fetching[model_id].stop.set()  # paused, removed, or failed by somebody else
        for one in wanted:
            if one.model_id not in self._fetching:
                fetching = self._fetching[one.model_id] = _Fetching()
                fetching.task = asyncio.create_task(self._carry_out(one, fetching.stop))
                fetching.task.add_done_callback(partial(self._ended, one.model_id))

    def _ended(self, model_id: str, task: asyncio.Task[None]) -> None:
        self._fetching.pop(model_id, None)
        self._wake.set()
        if not task.cancelled() and task.exception() is not None:
            log.error("a fault in the download of model %s", model_id, exc_info=task.exception())

    async def _end_all(self) -> None:
        """The writes under way become durable; the rest is for the next start."""
        fetching = list(self._fetching.values())
        for one in fetching:
            assert one.task is not None
            one.task.cancel()
        await asyncio.gather(*(one.task for one in fetching if one.task), return_exceptions=True)

    async def _carry_out(self, one: downloads.Download, stop: asyncio.Event) -> None:
        """Fetch what is missing of a model, then write down how it ended."""
        failure: Reason | None = None
        if one.state is not State.PAUSING:
            try:
                await self._fetch_files(one, stop)
            except Refused as refused:
                failure = Reason(refused.code, refused.message)
        await self._patiently(lambda: self._conclude(one, failure))

    async def _conclude(self, one: downloads.Download, failure: Reason | None) -> None:
        def work(tx: Transaction) -> None:
            rows.take_turns(tx, one.project_id)
            model = rows.get(tx.connection, one.project_id, one.model_id)
            if model is None:
                return
            if failure is not None and (model.record.state, acquisition.Fail) in acquisition.TRANSITIONS:
                event: acquisition.Event = acquisition.Fail(failure)
            elif model.record.state is State.PAUSING:
                event = acquisition.Settle()
            else:
                return  # its files have brought it there
            rows.set_record(tx, one.model_id, model.record, acquisition.advance(model.record, event))

        await self._context.database.write(work)

    async def _fetch_files(self, one: downloads.Download, stop: asyncio.Event) -> None:
        """Every content of the model, several at once. The first that fails stops the others."""
        model = await self._patiently(
            lambda: self._context.database.read(
                lambda connection: rows.get(connection, one.project_id, one.model_id)
            )
        )
        if model is None:
            return
        urls = _urls(model)
        names = {file.sha256: file.name for file in reversed(model.manifest.files)}
        tasks = [
            asyncio.create_task(self._fetch(Key(one.project_id, sha256), urls.get(sha256), stop, name))
            for sha256, name in names.items()
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            stop.set()
            results = await asyncio.gather(*tasks, return_exceptions=True)
        except asyncio.CancelledError:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def _fetch(self, key: Key, url: str | None, stop: asyncio.Event, name: str) -> None:
        """One content, until it is verified or `stop` is set. Raises Refused that names the file."""
        try:
            while not stop.is_set():
                try:
                    if await self._bring(key, url, stop) is upload.State.VERIFIED:
                        return
                except Refused as refused:
                    if refused.code == "model_busy":
                        await asyncio.sleep(BUSY_SECONDS)
                    elif refused.code == "database_unavailable":
                        await asyncio.sleep(DATABASE_SECONDS)
                    elif refused.code == "not_found":  # the model was removed
                        return
                    else:
                        raise Refused(refused.code, f"{name}: {refused.message}") from None
        finally:
            self.notes.pop(key, None)

    async def _bring(self, key: Key, url: str | None, stop: asyncio.Event) -> upload.State:
        """Fetch the rest of a content and verify it; a partial of full length needs no request."""
        content = await self._context.database.read(
            lambda connection: rows.content(connection, key.project_id, key.sha256)
        )
        if content is None:
            raise Refused("not_found", "The model was removed.")
        record = content.record
        if record.state is not upload.State.VERIFIED and record.offset < record.bytes:
            if url is None:
                raise Refused("source_unavailable", "It has no url to fetch it from; upload it.")
            async with self._place(url), self._contents.writing(key, "acquire") as claim:
                download = FileDownload(
                    self._context,
                    self._contents,
                    self._https,
                    self._pace,
                    self._luck,
                    url,
                    self._credential(url),
                    claim,
                    stop,
                    lambda note: self._note(key, note),
                )
                await download.run()
                record = claim.record
        if record.state is upload.State.VERIFIED or record.offset < record.bytes:
            return record.state
        verified = await self._unless_stopped(self._contents.verify(key, refetch=True), stop)
        if verified is not None and verified.state is upload.State.FAILED and verified.error is not None:
            raise Refused(verified.error.code, verified.error.message)
        return record.state if verified is None else verified.state

    @asynccontextmanager
    async def _place(self, url: str) -> AsyncIterator[None]:
        """One of the places for downloads, of the installation and of the host."""
        async with self._places_of_host[check_url(url, self._walls).host], self._places:
            yield

    @staticmethod
    async def _unless_stopped(
        verifying: asyncio.Task[upload.Record], stop: asyncio.Event
    ) -> upload.Record | None:
        """The verdict; None when the download is stopped first, while the hash goes on by itself."""
        stopped = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait([verifying, stopped], return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()
        return verifying.result() if verifying.done() else None

    def _note(self, key: Key, note: Reason | None) -> None:
        if note is None:
            self.notes.pop(key, None)
        else:
            self.notes[key] = note

    @staticmethod
    async def _patiently(work: Callable[[], Awaitable[T]]) -> T:
        """Until the database answers."""
        while True:
            try:
                return await work()
            except Refused as refused:
                if refused.code != "database_unavailable":
                    raise
                await asyncio.sleep(DATABASE_SECONDS)


def _urls(model: rows.Model) -> dict[str, str]:
    """A source for each digest that has one."""
    return {file.sha256: file.url for file in reversed(model.manifest.files) if file.url is not None}
