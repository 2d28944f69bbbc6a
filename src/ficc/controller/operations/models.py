"""Models: register, read, upload, adopt. `eviction` removes them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection

from ficc.content.store import Key
from ficc.controller.operations.contents import Claim, Contents, settle_models, too_many_streams
from ficc.controller.operations.context import Context, Page, not_found, page_of
from ficc.controller.store import eviction
from ficc.controller.store import models as rows
from ficc.controller.store.database import Transaction
from ficc.domain import acquisition, upload
from ficc.domain.access import Actor
from ficc.domain.errors import Reason, Refused, invalid
from ficc.domain.manifest import Manifest, manifest
from ficc.domain.upload import Record
from ficc.protocol.http_api import rfc3339

WRITE_BYTES = 1 << 20
"""How much of a stream is gathered before it is written."""
BUSY = frozenset({acquisition.State.ACQUIRING, acquisition.State.PAUSING})


@dataclass(frozen=True, slots=True)
class FileView:
    index: int
    name: str
    record: Record
    verified_bytes: int
    error: Reason | None


@dataclass(frozen=True, slots=True)
class ModelView:
    """A model as its readers see it."""

    model: rows.Model
    files: tuple[FileView, ...]
    references: tuple[str, ...]
    rate_bytes_per_second: float

    @property
    def bytes_durable(self) -> int:
        return sum(file.record.offset for file in self.files)

    def as_json(self) -> dict[str, Any]:
        manifest = self.model.manifest
        rate = self.rate_bytes_per_second
        error = self.model.record.error
        return {
            "id": self.model.id,
            "revision": self.model.revision,
            "manifest": manifest.as_json(),
            "state": self.model.record.state.value,
            "error": None if error is None else error.as_json(),
            "files": [
                {
                    "index": file.index,
                    "name": file.name,
                    "bytes": file.record.bytes,
                    "sha256": file.record.sha256,
                    "offset": file.record.offset,
                    "state": file.record.state.value,
                    "verified_bytes": file.verified_bytes,
                    "error": None if file.error is None else file.error.as_json(),
                }
                for file in self.files
            ],
            "bytes_total": manifest.bytes_total,
            "bytes_durable": self.bytes_durable,
            "rate_bytes_per_second": int(rate) if rate else None,
            "eta_seconds": int((manifest.bytes_total - self.bytes_durable) / rate) if rate else None,
            "references": list(self.references),
            "created_at": rfc3339(self.model.created_at),
        }


class Models:
    """`notes` says of a file why it does not get on just now."""

    def __init__(self, context: Context, contents: Contents, notes: Mapping[Key, Reason]) -> None:
        self._context = context
        self._contents = contents
        self._notes = notes
        self._octet_streams = 0

    # Reading and registering.

    async def page(self, actor: Actor, page: Page) -> tuple[list[ModelView], str | None]:
        actor.require("models:read")

        def work(connection: Connection) -> tuple[list[ModelView], str | None]:
            found = rows.page(connection, actor.project_id, page.after, page.limit)
            shown, cursor = page_of(found, page, lambda model: model.id)
            return self._views(connection, list(shown)), cursor

        return await self._context.database.read(work)

    async def get(self, actor: Actor, model_id: str) -> ModelView:
        actor.require("models:read")
        return await self.view(actor, model_id)

    async def view(self, actor: Actor, model_id: str) -> ModelView:
        """For whoever changed the model, and is shown what it became."""

        def work(connection: Connection) -> ModelView:
            return self._views(connection, [_require(connection, actor, model_id)])[0]

        return await self._context.database.read(work)

    async def register(self, actor: Actor, document: Mapping[str, Any]) -> tuple[ModelView, bool]:
        """The model of a manifest, and whether this call registered it."""
        actor.require("models:manage")
        checked, revision = await asyncio.to_thread(_checked, document)
        now = self._context.now()
        model_id, project_id = self._context.new_id(), actor.project_id
        digests = {file.sha256 for file in checked.files}
        share = self._context.settings.content.share_across_projects

        def work(tx: Transaction) -> tuple[ModelView, bool]:
            rows.take_turns(tx, project_id)
            if share:
                eviction.take_turns(tx)
            known = rows.by_revision(tx.connection, project_id, revision)
            if known is None:
                _check_sizes(checked, rows.contents(tx.connection, project_id, digests))
                record = acquisition.Record()
                rows.add(tx, rows.Model(model_id, project_id, revision, checked, record, now))
            if share:
                rows.share_blobs(tx, project_id, digests)
            if share or known is None:
                settle_models(tx, project_id, digests)
            model = rows.by_revision(tx.connection, project_id, revision)
            assert model is not None
            return self._views(tx.connection, [model])[0], known is None

        return await self._context.database.write(work)

    def _views(self, connection: Connection, found: list[rows.Model]) -> list[ModelView]:
        """Views of models, in three reads whatever their number."""
        ids = [model.id for model in found]
        files, references = rows.files(connection, ids), rows.references(connection, ids)
        return [self._view(model, files[model.id], references[model.id]) for model in found]

    def _view(self, model: rows.Model, records: Sequence[Record], references: Sequence[str]) -> ModelView:
        now, rate, meters = self._context.now(), 0.0, self._contents.meters
        files = []
        for index, (file, record) in enumerate(zip(model.manifest.files, records, strict=True)):
            verified = record.bytes if record.state is upload.State.VERIFIED else 0
            key = Key(model.project_id, file.sha256)
            meter = meters.get(key)
            if meter is not None and record.state is not upload.State.VERIFIED:
                rate += meter.rate(now)
                verified = meter.verified_bytes
            files.append(FileView(index, file.name, record, verified, self._notes.get(key, record.error)))
        return ModelView(model, tuple(files), tuple(references), rate)

    # Bringing bytes.

    async def upload(self, actor: Actor, model_id: str, index: int, offset: int, data: bytes) -> Record:
        """One piece, whole in memory: at most 1 MiB."""
        actor.require("models:manage")
        if len(data) > upload.JSON_BYTES_MAX:
            raise Refused("too_large", f"data is at most {upload.JSON_BYTES_MAX} bytes once decoded.", "data")
        key = await self._writable(actor, model_id, index)
        async with self._contents.writing(key, "upload") as claim:
            decision = upload.admit(claim.record, offset, len(data))
            if isinstance(decision, upload.Append):
                await self._keep(claim, offset, 0, data)
        return await self._conclude(key, claim.record)

    async def upload_stream(
        self,
        actor: Actor,
        model_id: str,
        index: int,
        offset: int,
        declared: int | None,
        body: AsyncIterator[bytes],
    ) -> Record:
        """One piece as it arrives: at most 16 MiB, two at a time in the installation. What arrived before
        the body broke off stays, durable. `declared` is the Content-Length, if there is one."""
        actor.require("models:manage")
        if declared is not None and declared > upload.OCTET_STREAM_BYTES_MAX:
            raise _stream_too_large()
        key = await self._writable(actor, model_id, index)
        if self._octet_streams >= upload.OCTET_STREAMS_MAX:
            raise too_many_streams()
        self._octet_streams += 1
        try:
            async with self._contents.writing(key, "octets", upload.OCTET_STREAMS_MAX) as claim:
                await self._take_stream(claim, offset, declared, body)
        finally:
            self._octet_streams -= 1
        return await self._conclude(key, claim.record)

    async def _take_stream(
        self, claim: Claim, offset: int, declared: int | None, body: AsyncIterator[bytes]
    ) -> None:
        if declared is None:  # at the end it may be empty, elsewhere there is at least a byte
            upload.admit(claim.record, offset, 0 if offset == claim.record.bytes else 1)
        else:
            upload.admit(claim.record, offset, declared)
        received = written = 0
        gathered = bytearray()
        try:
            async for chunk in body:
                received += len(chunk)
                if received > upload.OCTET_STREAM_BYTES_MAX:
                    raise _stream_too_large()
                if chunk:
                    upload.admit(claim.record, offset, received)
                gathered += chunk
                if len(gathered) >= WRITE_BYTES:
                    await self._contents.write(claim, offset + written, bytes(gathered))
                    written += len(gathered)
                    gathered.clear()
            upload.admit(claim.record, offset, received)
        except (Refused, OSError):
            await self._contents.abandon(claim)
            raise
        except BaseException:
            # The client is gone; what it sent is a valid prefix.
            await asyncio.shield(self._keep(claim, offset + written, written, bytes(gathered)))
            raise
        await self._keep(claim, offset + written, written, bytes(gathered))

    async def _keep(self, claim: Claim, at: int, written: int, rest: bytes) -> None:
        """Make what was written, and the rest of it, durable."""
        try:
            if rest:
                await self._contents.write(claim, at, rest)
        except Exception:
            await self._contents.abandon(claim)
            raise
        await self._contents.commit(claim, written + len(rest))

    async def adopt(self, actor: Actor, model_id: str, index: int, name: str) -> Record:
        """Take a file that the command line on this machine put into the incoming directory."""
        actor.require("models:manage")
        key = await self._writable(actor, model_id, index)
        async with self._contents.writing(key, "upload") as claim:
            await self._contents.adopt(claim, name)
        return await self._conclude(key, claim.record)

    async def _writable(self, actor: Actor, model_id: str, index: int) -> Key:
        found = await self._context.database.read(
            lambda connection: rows.file(connection, actor.project_id, model_id, index)
        )
        if found is None:
            raise not_found("model", model_id)
        state, record = found
        if state in BUSY:
            raise Refused("model_busy", "The model is being downloaded; pause it before uploading.")
        if record is None:
            raise Refused("not_found", f"The model has no file {index}; they count from 0.", "index")
        return Key(actor.project_id, record.sha256)

    async def _conclude(self, key: Key, record: Record) -> Record:
        """Once every byte is there: verify, and wait a while for the verdict.

        Raises Refused `source_mismatch` when the bytes are not what the manifest declares.
        """
        if record.state is upload.State.VERIFIED or record.offset != record.bytes:
            return record
        task = self._contents.verify(key)
        try:
            async with asyncio.timeout(self._context.settings.uploads.verify_wait_seconds):
                record = await asyncio.shield(task)
        except TimeoutError:
            return upload.advance(record, upload.Verify())
        if record.state is upload.State.FAILED and record.error is not None:
            raise Refused(record.error.code, record.error.message, beside={"offset": record.offset})
        return record


def _require(connection: Connection, actor: Actor, model_id: str) -> rows.Model:
    model = rows.get(connection, actor.project_id, model_id)
    if model is None:
        raise not_found("model", model_id)
    return model


def _checked(document: Mapping[str, Any]) -> tuple[Manifest, str]:
    """The manifest of a document and its revision: a tenth of a second where there are thousands of files."""
    checked = manifest(document)
    return checked, checked.revision


def _check_sizes(checked: Manifest, known: Mapping[str, rows.Content]) -> None:
    """A digest has one size. Raises Refused for a file that another model of the project declares otherwise."""
    for index, file in enumerate(checked.files):
        content = known.get(file.sha256)
        if content is not None and content.record.bytes != file.bytes:
            raise invalid(
                f"{file.name!r}: another model of this project declares {content.record.bytes} bytes for this "
                "digest; correct this one or delete that model.",
                f"files[{index}].bytes",
            )


def _stream_too_large() -> Refused:
    return Refused("too_large", f"An octet-stream upload is at most {upload.OCTET_STREAM_BYTES_MAX} bytes.")
