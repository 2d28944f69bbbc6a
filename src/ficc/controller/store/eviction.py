"""Who holds which content, and how a project gives content up.

Two things hold content: a model by its files, and an attempt by the inputs of its plan. Whoever plans an
attempt locks the rows of what it will read (`use`); whoever gives content up locks them before it looks for
holders (`holdings`). So of a start and an eviction at the same moment one comes second, and sees the other.

A blob's row goes with the last verified content of its digest; its file goes after that, and only by
`ficc.controller.operations.orphans`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, and_, delete, exists, select, update

from ficc.controller.store import schema
from ficc.controller.store.database import Transaction
from ficc.domain import upload
from ficc.domain.eviction import Holding

_c = schema.contents.c
_f = schema.model_files.c
_b = schema.blobs.c
_a = schema.attempts.c
_w = schema.workloads.c
_VERIFIED = upload.State.VERIFIED.value


def take_turns(tx: Transaction) -> None:
    """What becomes a blob, and what stops being one, is decided by one transaction after another: of every
    project, and of the sweeper. To be called after a project's own turn."""
    tx.take_turns("blobs")


# Attempts.


def use(tx: Transaction, project_id: str, digests: Collection[str], now: float) -> bool:
    """Let attempts that this transaction plans read these contents. Whether the project has them all,
    verified: they are there until it ends, and then its attempts hold them."""
    mine = and_(_c.project_id == project_id, _c.sha256.in_(digests))
    found = _locked(tx, and_(mine, _c.state == _VERIFIED))
    if found != set(digests):
        return False
    tx.execute(update(schema.contents).where(mine).values(last_used_at=now))
    return True


def used(tx: Transaction, workload_id: str, plan: Mapping[str, Any], now: float) -> None:
    """An attempt at a workload read its plan's inputs until now."""
    project = select(_w.project_id).where(_w.id == workload_id).scalar_subquery()
    read = and_(_c.project_id == project, _c.sha256.in_(_inputs(plan)))
    _locked(tx, read)
    tx.execute(update(schema.contents).where(read).values(last_used_at=now))


def readers(connection: Connection, project_id: str) -> dict[str, set[str]]:
    """The attempts of a project that are not released, by the digests that they read."""
    rows = connection.execute(
        select(_a.id, _w.plan)
        .join(schema.workloads, _w.id == _a.workload_id)
        .where(_w.project_id == project_id, _a.released.is_(False))
    )
    found: dict[str, set[str]] = {}
    for attempt_id, plan in rows:
        for sha256 in _inputs(plan):
            found.setdefault(sha256, set()).add(attempt_id)
    return found


def _inputs(plan: Mapping[str, Any]) -> set[str]:
    return {entry["sha256"] for entry in plan.get("inputs", ())}


def _locked(tx: Transaction, condition: ColumnElement[bool]) -> set[str]:
    """Digests of the contents that match, held until the transaction ends. In one order for all who lock
    several, so that no two wait for each other (on SQLite writers take turns anyway)."""
    query = select(_c.sha256).where(condition).order_by(_c.project_id, _c.sha256).with_for_update()
    return set(tx.execute(query).scalars())


# What a project has.


def _needed(but_for: str | None = None) -> ColumnElement[bool]:
    """Whether a model of the content's project, other than this one, has a file of its digest."""
    of_project = exists().where(_f.project_id == _c.project_id, _f.sha256 == _c.sha256)
    return of_project if but_for is None else of_project.where(_f.model_id != but_for)


def _elsewhere() -> ColumnElement[bool]:
    """Whether another project has the content's digest, verified."""
    other = schema.contents.alias("other").c
    return exists().where(
        other.sha256 == _c.sha256, other.project_id != _c.project_id, other.state == _VERIFIED
    )


def lock(tx: Transaction, model_id: str) -> None:
    """Hold the contents of a model until the transaction ends; for whoever may give them up."""
    files = select(_f.project_id, _f.sha256).where(_f.model_id == model_id).distinct().subquery()
    _locked(tx, _exists_in(files))


def _exists_in(files: Any) -> ColumnElement[bool]:
    return exists().where(files.c.project_id == _c.project_id, files.c.sha256 == _c.sha256)


def holdings(connection: Connection, model_id: str) -> list[Holding]:
    """The contents of a model, each digest once."""
    files = select(_f.project_id, _f.sha256).where(_f.model_id == model_id).distinct().subquery()
    return _holdings(connection, _exists_in(files), _needed(model_id))


def unreferenced(
    connection: Connection, project_id: str, now: float, spared: Collection[str], limit: int | None = None
) -> list[Holding]:
    """Contents of a project that no model of it has and nobody writes, without those that are spared."""
    free = _c.claim_expires_at.is_(None) | (_c.claim_expires_at <= now)
    wanted = and_(_c.project_id == project_id, ~_needed(), free, _c.sha256.not_in(spared))
    return _holdings(connection, wanted, _needed(), limit)


def _holdings(
    connection: Connection,
    wanted: ColumnElement[bool],
    needed: ColumnElement[bool],
    limit: int | None = None,
) -> list[Holding]:
    query = (
        select(schema.contents, needed.label("needed"), _elsewhere().label("elsewhere"))
        .where(wanted)
        .order_by(_c.id)
        .limit(limit)
    )
    return [
        Holding(
            upload.Record(row.sha256, row.bytes, row.offset, upload.State(row.state)),
            needed=bool(row.needed),
            elsewhere=bool(row.elsewhere),
        )
        for row in connection.execute(query)
    ]


# Giving up.


def drop(tx: Transaction, project_id: str, digests: Collection[str]) -> set[str]:
    """Let a project give up contents; the digests whose blob nobody has any more. In the turn of blobs."""
    if not digests:
        return set()
    tx.execute(delete(schema.contents).where(_c.project_id == project_id, _c.sha256.in_(digests)))
    held = exists().where(_c.sha256 == _b.sha256, _c.state == _VERIFIED)
    gone = and_(_b.sha256.in_(digests), ~held)
    found = set(tx.execute(select(_b.sha256).where(gone)).scalars())
    tx.execute(delete(schema.blobs).where(gone))
    return found


def wanted_blobs(connection: Connection, digests: Collection[str]) -> set[str]:
    """Those whose file is a blob, or is about to become one: it is published before its row is written, by
    whoever verifies it."""
    published = select(_b.sha256).where(_b.sha256.in_(digests))
    coming = select(_c.sha256).where(_c.sha256.in_(digests), _c.state == upload.State.VERIFYING.value)
    return set(connection.execute(published.union(coming)).scalars())


def growing(connection: Connection, project_id: str, digests: Iterable[str]) -> set[str]:
    """Those that the project has begun or may begin to write: every content but the verified ones."""
    query = select(_c.sha256).where(
        _c.project_id == project_id, _c.sha256.in_(set(digests)), _c.state != _VERIFIED
    )
    return set(connection.execute(query).scalars())


# Listing.


@dataclass(frozen=True, slots=True)
class Kept:
    """A content of a project of which there are bytes."""

    id: str
    record: upload.Record
    references: tuple[str, ...]
    """Models of the project that have it."""
    shared: bool
    """Another project has the same bytes; never said of bytes that this one has not proved to have."""
    last_used_at: float | None


def page(connection: Connection, project_id: str, after: str | None, limit: int) -> list[Kept]:
    """What was begun or is complete, newest first; one more than `limit` if there are more."""
    there = (_c.offset > 0) | (_c.state == _VERIFIED)
    query = select(schema.contents, _elsewhere().label("elsewhere")).where(_c.project_id == project_id, there)
    if after is not None:
        query = query.where(_c.id < after)
    rows = connection.execute(query.order_by(_c.id.desc()).limit(limit + 1)).all()
    references = _references(connection, project_id, [row.sha256 for row in rows])
    return [
        Kept(
            row.id,
            upload.Record(row.sha256, row.bytes, row.offset, upload.State(row.state)),
            references=tuple(references[row.sha256]),
            shared=bool(row.elsewhere) and row.state == _VERIFIED,
            last_used_at=row.last_used_at,
        )
        for row in rows
    ]


def _references(connection: Connection, project_id: str, digests: Sequence[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {sha256: [] for sha256 in digests}
    query = (
        select(_f.sha256, _f.model_id)
        .where(_f.project_id == project_id, _f.sha256.in_(digests))
        .distinct()
        .order_by(_f.model_id.desc())
    )
    for sha256, model_id in connection.execute(query):
        found[sha256].append(model_id)
    return found
