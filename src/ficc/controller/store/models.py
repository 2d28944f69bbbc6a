"""Models, their files, and contents: the bytes of one file as one project has them."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, and_, delete, exists, func, insert, select, update

from ficc.controller.store import schema
from ficc.controller.store.database import Transaction
from ficc.domain import acquisition, ids, upload
from ficc.domain.errors import Reason
from ficc.domain.manifest import Manifest, manifest

_c = schema.contents.c
_f = schema.model_files.c
_m = schema.models.c


@dataclass(frozen=True, slots=True)
class Model:
    id: str
    project_id: str
    revision: str
    manifest: Manifest
    record: acquisition.Record
    created_at: float


def take_turns(tx: Transaction, project_id: str) -> None:
    """What a project's models amount to is decided by one transaction after another, so that each sees what
    the one before it did."""
    tx.take_turns(f"models of {project_id}")


def add(tx: Transaction, model: Model) -> None:
    """The model, its files, and a content row for each digest that the project does not know yet."""
    tx.execute(
        insert(schema.models).values(
            id=model.id,
            project_id=model.project_id,
            revision=model.revision,
            name=model.manifest.name,
            manifest=model.manifest.as_json(),
            state=model.record.state.value,
            fetching=model.record.fetching,
            error=_reason(model.record.error),
            created_at=model.created_at,
        )
    )
    tx.execute(
        insert(schema.model_files),
        [
            {"model_id": model.id, "index": index, "project_id": model.project_id, "sha256": file.sha256}
            for index, file in enumerate(model.manifest.files)
        ],
    )
    known = contents(tx.connection, model.project_id, [file.sha256 for file in model.manifest.files])
    missing = {file.sha256: file.bytes for file in model.manifest.files if file.sha256 not in known}
    if missing:
        tx.execute(
            insert(schema.contents),
            [
                {
                    "project_id": model.project_id,
                    "sha256": sha256,
                    "id": _content_id(model, sha256),
                    "bytes": size,
                    "offset": 0,
                    "state": upload.State.MISSING.value,
                }
                for sha256, size in missing.items()
            ],
        )
    tx.changed("model", model.id)


def _content_id(model: Model, sha256: str) -> str:
    """Of the content that a model brings into its project: as old as the model, and no other's."""
    drawn = hashlib.sha256(f"{model.id} {sha256}".encode()).digest()
    return ids.make(int(model.created_at * 1000), drawn[: ids.RANDOM_BYTES])


def share_blobs(tx: Transaction, project_id: str, digests: Iterable[str]) -> None:
    """Let a project have what the installation already holds; for installations of one owner only. In the
    turn of blobs."""
    held = exists().where(schema.blobs.c.sha256 == _c.sha256, schema.blobs.c.bytes == _c.bytes)
    tx.execute(
        update(schema.contents)
        .where(_c.project_id == project_id, _c.sha256.in_(set(digests)), _c.claim_token.is_(None), held)
        .values(offset=_c.bytes, state=upload.State.VERIFIED.value, error=None)
    )


def get(connection: Connection, project_id: str, model_id: str) -> Model | None:
    row = connection.execute(
        select(schema.models).where(_m.id == model_id, _m.project_id == project_id)
    ).one_or_none()
    return None if row is None else _model(row)


def by_revision(connection: Connection, project_id: str, revision: str) -> Model | None:
    row = connection.execute(
        select(schema.models).where(_m.project_id == project_id, _m.revision == revision)
    ).one_or_none()
    return None if row is None else _model(row)


def page(connection: Connection, project_id: str, after: str | None, limit: int) -> list[Model]:
    """Newest first; one more than `limit` if there are more."""
    query = select(schema.models).where(_m.project_id == project_id)
    if after is not None:
        query = query.where(_m.id < after)
    return [_model(row) for row in connection.execute(query.order_by(_m.id.desc()).limit(limit + 1))]


def delete_model(tx: Transaction, project_id: str, model_id: str) -> None:
    """The model with its files and what was measured of it; their contents are looked after by `eviction`. A
    service that was put in at the same moment holds the model by its foreign key: then this begins again, and
    finds it."""
    revision = select(_m.revision).where(_m.id == model_id).scalar_subquery()
    peaks = schema.memory_peaks.c
    tx.execute(
        delete(schema.memory_peaks).where(peaks.project_id == project_id, peaks.model_revision == revision)
    )
    tx.execute(delete(schema.model_files).where(_f.model_id == model_id))
    tx.execute(delete(schema.models).where(_m.id == model_id, _m.project_id == project_id))
    tx.changed("model", model_id)


def set_record(tx: Transaction, model_id: str, before: acquisition.Record, after: acquisition.Record) -> bool:
    """Whether the model was still in the state that `before` says."""
    changed = tx.execute(
        update(schema.models)
        .where(_m.id == model_id, _m.state == before.state.value)
        .values(state=after.state.value, fetching=after.fetching, error=_reason(after.error))
    )
    tx.changed("model", model_id)
    return changed.rowcount == 1


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a model is, and each of its files in order."""

    model_id: str
    record: acquisition.Record
    files: tuple[upload.Record, ...]


def progress(connection: Connection, project_id: str, digests: Iterable[str]) -> list[Progress]:
    """Of every model of a project that has a file of one of these digests."""
    having = select(_f.model_id).where(_f.project_id == project_id, _f.sha256.in_(set(digests)))
    models = connection.execute(
        select(_m.id, _m.state, _m.fetching, _m.error).where(_m.id.in_(having)).order_by(_m.id)
    ).all()
    files: dict[str, list[upload.Record]] = {row.id: [] for row in models}
    for model_id, row in _files(connection, files):
        files[model_id].append(_content(row).record)
    return [Progress(row.id, _record(row), tuple(files[row.id])) for row in models]


def _files(connection: Connection, model_ids: Iterable[str]) -> Iterator[tuple[str, Row[Any]]]:
    """The content of every file of these models, in order, with its model's id."""
    rows = connection.execute(
        select(_f.model_id, schema.contents)
        .join(schema.contents, and_(_c.project_id == _f.project_id, _c.sha256 == _f.sha256))
        .where(_f.model_id.in_(list(model_ids)))
        .order_by(_f.model_id, _f.index)
    )
    for row in rows:
        yield row.model_id, row


def references(connection: Connection, model_ids: Sequence[str]) -> dict[str, list[str]]:
    """Which services refer to each model."""
    s = schema.services.c
    found: dict[str, list[str]] = {model_id: [] for model_id in model_ids}
    rows = connection.execute(select(s.model_id, s.id).where(s.model_id.in_(model_ids)).order_by(s.id))
    for model_id, service_id in rows:
        found[model_id].append(service_id)
    return found


def served(connection: Connection, model_ids: Sequence[str]) -> dict[str, Manifest]:
    """The manifest of each of these models."""
    rows = connection.execute(select(_m.id, _m.manifest).where(_m.id.in_(set(model_ids))))
    return {model_id: manifest(document) for model_id, document in rows}


def _model(row: Row[Any]) -> Model:
    return Model(
        id=row.id,
        project_id=row.project_id,
        revision=row.revision,
        manifest=manifest(row.manifest),
        record=_record(row),
        created_at=row.created_at,
    )


def _record(row: Any) -> acquisition.Record:
    return acquisition.Record(acquisition.State(row.state), _error(row.error), row.fetching)


# Contents.


@dataclass(frozen=True, slots=True)
class Content:
    record: upload.Record
    claim_kind: str | None
    claim_expires_at: float | None  # also of a claim that ran out: its holder never gave it back

    def claimed(self, now: float) -> bool:
        return self.claim_expires_at is not None and self.claim_expires_at > now


def contents(connection: Connection, project_id: str, digests: Iterable[str]) -> Mapping[str, Content]:
    """Contents of a project by digest, of one model's files at most."""
    query = select(schema.contents).where(_c.project_id == project_id, _c.sha256.in_(set(digests)))
    return {row.sha256: _content(row) for row in connection.execute(query)}


def content(connection: Connection, project_id: str, sha256: str) -> Content | None:
    return contents(connection, project_id, [sha256]).get(sha256)


def files(connection: Connection, model_ids: Sequence[str]) -> dict[str, list[upload.Record]]:
    """The files of each of these models, in order."""
    found: dict[str, list[upload.Record]] = {model_id: [] for model_id in model_ids}
    for model_id, row in _files(connection, model_ids):
        found[model_id].append(_content(row).record)
    return found


def file(
    connection: Connection, project_id: str, model_id: str, index: int
) -> tuple[acquisition.State, upload.Record | None] | None:
    """The state of a model and its file of this index, if it has one; None for no such model."""
    row = connection.execute(
        select(_m.state.label("model_state"), schema.contents)
        .select_from(schema.models)
        .outerjoin(schema.model_files, and_(_f.model_id == _m.id, _f.index == index))
        .outerjoin(schema.contents, and_(_c.project_id == _f.project_id, _c.sha256 == _f.sha256))
        .where(_m.id == model_id, _m.project_id == project_id)
    ).one_or_none()
    if row is None:
        return None
    return acquisition.State(row.model_state), None if row.sha256 is None else _content(row).record


def all_contents(connection: Connection) -> list[tuple[str, upload.Record]]:
    """Every content of every project, with its project."""
    return [(row.project_id, _content(row).record) for row in connection.execute(select(schema.contents))]


def claim(
    tx: Transaction, project_id: str, sha256: str, *, token: str, kind: str, now: float, expires_at: float
) -> bool:
    """Become the one writer of a content, if nobody is."""
    free = _c.claim_token.is_(None) | (_c.claim_expires_at <= now)
    changed = tx.execute(
        update(schema.contents)
        .where(_c.project_id == project_id, _c.sha256 == sha256, free)
        .values(claim_token=token, claim_kind=kind, claim_expires_at=expires_at)
    )
    return changed.rowcount == 1


def active_claims(connection: Connection, kind: str, now: float) -> int:
    count = connection.scalar(select(func.count()).where(_c.claim_kind == kind, _c.claim_expires_at > now))
    return int(count or 0)


def extend_claim(tx: Transaction, token: str, expires_at: float) -> bool:
    changed = tx.execute(
        update(schema.contents).where(_c.claim_token == token).values(claim_expires_at=expires_at)
    )
    return changed.rowcount == 1


def release_claim(tx: Transaction, token: str) -> None:
    tx.execute(
        update(schema.contents)
        .where(_c.claim_token == token)
        .values(claim_token=None, claim_kind=None, claim_expires_at=None)
    )


def drop_claims(tx: Transaction) -> None:
    """For a controller that is known to be the only one: no claim of an earlier run holds."""
    tx.execute(update(schema.contents).values(claim_token=None, claim_kind=None, claim_expires_at=None))


def set_content(tx: Transaction, project_id: str, record: upload.Record, *, token: str | None) -> bool:
    """Write a content's record; whether the claim still holds (None: nobody may hold one)."""
    holds = _c.claim_token.is_(None) if token is None else _c.claim_token == token
    changed = tx.execute(
        update(schema.contents)
        .where(_c.project_id == project_id, _c.sha256 == record.sha256, holds)
        .values(offset=record.offset, state=record.state.value, error=_reason(record.error))
    )
    return changed.rowcount == 1


def add_blob(tx: Transaction, sha256: str, size: int, now: float) -> None:
    """Two projects may publish the same bytes at the same moment: the second finds the row, if need be when
    its transaction begins again."""
    known = tx.scalar(select(schema.blobs.c.sha256).where(schema.blobs.c.sha256 == sha256))
    if known is None:
        tx.execute(insert(schema.blobs).values(sha256=sha256, bytes=size, created_at=now))


def blob_digests(connection: Connection) -> set[str]:
    return set(connection.scalars(select(schema.blobs.c.sha256)))


def blobs(connection: Connection, digests: Collection[str] | None) -> dict[str, int]:
    """The sizes of these blobs, or of all, as far as they are known."""
    query = select(schema.blobs.c.sha256, schema.blobs.c.bytes)
    if digests is not None:
        query = query.where(schema.blobs.c.sha256.in_(digests))
    return {row.sha256: row.bytes for row in connection.execute(query)}


def having(connection: Connection, sha256: str) -> list[str]:
    """The projects that have a digest, verified."""
    verified = _c.state == upload.State.VERIFIED.value
    return list(connection.scalars(select(_c.project_id).where(_c.sha256 == sha256, verified)))


def forget_blob(tx: Transaction, sha256: str) -> None:
    """Drop the row of a blob that no project has any more."""
    held = exists().where(_c.sha256 == schema.blobs.c.sha256, _c.state == upload.State.VERIFIED.value)
    tx.execute(delete(schema.blobs).where(schema.blobs.c.sha256 == sha256, ~held))


def _content(row: Row[Any]) -> Content:
    record = upload.Record(row.sha256, row.bytes, row.offset, upload.State(row.state), _error(row.error))
    return Content(record, row.claim_kind, row.claim_expires_at)


def _reason(reason: Reason | None) -> dict[str, str] | None:
    return None if reason is None else reason.as_json()


def _error(document: Mapping[str, str] | None) -> Reason | None:
    return None if document is None else Reason(document["code"], document["message"])
