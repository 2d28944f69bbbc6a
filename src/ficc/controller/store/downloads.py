"""Downloads as rows: which models are being fetched, what they still need, and where a partial came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy import Connection, func, select, update

from ficc.controller.store import schema
from ficc.controller.store.database import Transaction
from ficc.domain import acquisition, upload

_m, _f, _c = schema.models.c, schema.model_files.c, schema.contents.c
_UNDER_WAY = _m.state.in_([acquisition.State.ACQUIRING.value, acquisition.State.PAUSING.value]) | (
    (_m.state == acquisition.State.VERIFYING.value) & _m.fetching
)


@dataclass(frozen=True, slots=True)
class Download:
    """A model that is being fetched, or whose pause has still to be confirmed."""

    project_id: str
    model_id: str
    state: acquisition.State


def under_way(connection: Connection) -> list[Download]:
    """Of every project, the oldest first."""
    query = select(_m.project_id, _m.id, _m.state).where(_UNDER_WAY).order_by(_m.id)
    return [
        Download(row.project_id, row.id, acquisition.State(row.state)) for row in connection.execute(query)
    ]


def outstanding(connection: Connection) -> Mapping[tuple[str, str], int]:
    """The bytes that downloads of the whole installation have still to write, by project and digest."""
    query = (
        select(_c.project_id, _c.sha256, _c.bytes, _c.offset)
        .join(schema.model_files, (_f.project_id == _c.project_id) & (_f.sha256 == _c.sha256))
        .join(schema.models, _m.id == _f.model_id)
        .where(_UNDER_WAY, _c.state != upload.State.VERIFIED.value)
    )
    return {(row.project_id, row.sha256): row.bytes - row.offset for row in connection.execute(query)}


def held_bytes(connection: Connection, project_id: str) -> int:
    """What the contents of a project that were begun declare altogether."""
    query = select(func.sum(_c.bytes)).where(
        _c.project_id == project_id, _c.state != upload.State.MISSING.value
    )
    return int(connection.scalar(query) or 0)


def etag(connection: Connection, project_id: str, sha256: str, url: str) -> str | None:
    """The entity tag that the partial's bytes came with, if they came from this very URL."""
    source = connection.scalar(
        select(_c.source).where(_c.project_id == project_id, _c.sha256 == sha256, _c.offset > 0)
    )
    return source["etag"] if source is not None and source["url"] == url else None


def set_etag(tx: Transaction, token: str, url: str, found: str | None) -> None:
    """Remember where the bytes of a claimed content come from."""
    source = None if found is None else {"url": url, "etag": found}
    tx.execute(update(schema.contents).where(_c.claim_token == token).values(source=source))
