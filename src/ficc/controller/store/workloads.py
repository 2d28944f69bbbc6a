"""Workloads as their readers and their operators see them; and jobs, which are those without a service."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, and_, delete, func, or_, select, update

from ficc.controller.store import attempts, schema
from ficc.controller.store.database import Transaction
from ficc.domain import attempt, upload, workload
from ficc.domain.attempt import Outcome
from ficc.domain.errors import Reason

_w = schema.workloads.c
_a = schema.attempts.c

ATTEMPTS_SHOWN = 10
"""Of one workload, the newest."""


@dataclass(frozen=True, slots=True)
class Workload:
    """A workload without its plan, which may be large. `record` is a job's; a replica has the members of its
    service instead."""

    id: str
    project_id: str
    node_id: str
    plan_digest: str
    revision: int
    sensitive: bool
    model_revision: str | None
    service_id: str | None
    generation: int
    replica: int
    record: workload.Record | None
    deadline_seconds: int | None
    deadline_at: float | None
    idempotency_key: str | None
    request_digest: str | None
    created_at: float


@dataclass(frozen=True, slots=True)
class Seen:
    """An attempt as it is shown: without what it was told to run."""

    id: str
    number: int
    record: attempt.Record
    created_at: float
    since_at: float

    @property
    def released(self) -> bool:
        return self.record.state is attempt.State.RELEASED


def add_job(tx: Transaction, row: Workload, plan: Mapping[str, Any]) -> None:
    attempts.add_workload(
        tx,
        id=row.id,
        project_id=row.project_id,
        service_id=None,
        generation=row.generation,
        replica=row.replica,
        node_id=row.node_id,
        plan=dict(plan),
        plan_digest=row.plan_digest,
        readiness=None,
        idempotency_key=row.idempotency_key,
        request_digest=row.request_digest,
        deadline_seconds=row.deadline_seconds,
        created_at=row.created_at,
        **_changing(row),
    )


def put_job(tx: Transaction, before: Workload, after: Workload) -> bool:
    """Write what changes of a job, if nobody changed it since `before` was read."""
    changed = tx.execute(
        update(schema.workloads)
        .where(_w.id == before.id, _w.service_id.is_(None), _w.revision == before.revision)
        .values(**_changing(after))
    )
    tx.changed("workload", before.id)
    return changed.rowcount == 1


def _changing(row: Workload) -> dict[str, Any]:
    record = row.record
    assert record is not None
    return {
        "revision": record.revision,
        "state": record.state.value,
        "outcome": None if record.outcome is None else record.outcome.value,
        "reason": None if record.reason is None else record.reason.as_json(),
        "deadline_at": row.deadline_at,
    }


def remove(tx: Transaction, workload_id: str) -> None:
    """The workload with its attempts, whose reservations must be released."""
    tx.execute(delete(schema.attempts).where(_a.workload_id == workload_id))
    tx.execute(delete(schema.workloads).where(_w.id == workload_id))
    tx.changed("workload", workload_id)


# Reading.


def _query() -> Any:
    plan = {"plan", "readiness"}
    return select(
        *(column for column in schema.workloads.columns if column.name not in plan),
        _w.plan["sensitive"].as_boolean().label("sensitive"),
        _w.plan["model_revision"].as_string().label("model_revision"),
    )


def get(connection: Connection, project_id: str, workload_id: str) -> Workload | None:
    query = _query().where(_w.id == workload_id, _w.project_id == project_id)
    row = connection.execute(query).one_or_none()
    return None if row is None else _workload(row)


def by_key(connection: Connection, project_id: str, key: str) -> Workload | None:
    query = _query().where(_w.project_id == project_id, _w.idempotency_key == key)
    row = connection.execute(query).one_or_none()
    return None if row is None else _workload(row)


def page(connection: Connection, project_id: str, after: str | None, limit: int) -> list[Workload]:
    """Newest first; one more than `limit` if there are more."""
    query = _query().where(_w.project_id == project_id)
    if after is not None:
        query = query.where(_w.id < after)
    return [_workload(row) for row in connection.execute(query.order_by(_w.id.desc()).limit(limit + 1))]


def plan_of(connection: Connection, workload_id: str) -> Mapping[str, Any]:
    plan: Mapping[str, Any] = connection.execute(select(_w.plan).where(_w.id == workload_id)).scalar_one()
    return plan


def unsettled(connection: Connection, *, unknown: bool = False) -> list[Workload]:
    """Every job that a reconciler may have to do something about: all but the ended, and those of them that still
    have an attempt which is not released, or, if asked for, of which nobody knows the outcome."""
    held = select(_a.workload_id).where(_a.released.is_(False), _a.service_id.is_(None)).scalar_subquery()
    going = [state.value for state in workload.State if state is not workload.State.ENDED]
    wanted = or_(_w.state.in_(going), _w.id.in_(held))
    if unknown:
        wanted = or_(
            wanted, and_(_w.state == workload.State.ENDED.value, _w.outcome == Outcome.UNKNOWN.value)
        )
    query = _query().where(wanted)
    return [_workload(row) for row in connection.execute(query)]


def seen(
    connection: Connection, workload_ids: Sequence[str], limit: int = ATTEMPTS_SHOWN
) -> dict[str, list[Seen]]:
    """The newest attempts of each workload, newest first."""
    last = (
        select(_a.workload_id, func.max(_a.number).label("number"))
        .where(_a.workload_id.in_(workload_ids))
        .group_by(_a.workload_id)
        .subquery()
    )
    rows = connection.execute(
        select(_a.id, _a.workload_id, _a.number, _a.record, _a.created_at, _a.since_at)
        .join(last, last.c.workload_id == _a.workload_id)
        .where(_a.number > last.c.number - limit)
        .order_by(_a.number.desc())
    )
    found: dict[str, list[Seen]] = {workload_id: [] for workload_id in workload_ids}
    for row in rows:
        one = Seen(row.id, row.number, attempt.from_json(row.record), row.created_at, row.since_at)
        found[row.workload_id].append(one)
    return found


def verified_bytes(connection: Connection, project_id: str, digests: Collection[str]) -> dict[str, int]:
    """The sizes of those contents that the project has verified."""
    c = schema.contents.c
    query = select(c.sha256, c.bytes).where(
        c.project_id == project_id, c.sha256.in_(digests), c.state == upload.State.VERIFIED.value
    )
    return {row.sha256: row.bytes for row in connection.execute(query)}


def unreleased(connection: Connection, workload_id: str) -> list[str]:
    """Ids of the workload's attempts that are not released."""
    query = select(_a.id).where(_a.workload_id == workload_id, _a.released.is_(False))
    return list(connection.execute(query.order_by(_a.number)).scalars())


def attempt_ids(connection: Connection, workload_id: str) -> list[str]:
    return list(connection.execute(select(_a.id).where(_a.workload_id == workload_id)).scalars())


def numbered(connection: Connection, workload_id: str, number: int | None) -> str | None:
    """The id of the workload's attempt with this number, or of its newest."""
    query = select(_a.id).where(_a.workload_id == workload_id)
    if number is not None:
        query = query.where(_a.number == number)
    return connection.execute(query.order_by(_a.number.desc()).limit(1)).scalar_one_or_none()


def _workload(row: Row[Any]) -> Workload:
    record = None
    if row.state is not None:
        reason = None if row.reason is None else Reason(row.reason["code"], row.reason["message"])
        outcome = None if row.outcome is None else Outcome(row.outcome)
        record = workload.Record(workload.State(row.state), row.revision, outcome, reason)
    return Workload(
        id=row.id,
        project_id=row.project_id,
        node_id=row.node_id,
        plan_digest=row.plan_digest,
        revision=row.revision,
        sensitive=bool(row.sensitive),
        model_revision=row.model_revision,
        service_id=row.service_id,
        generation=row.generation,
        replica=row.replica,
        record=record,
        deadline_seconds=row.deadline_seconds,
        deadline_at=row.deadline_at,
        idempotency_key=row.idempotency_key,
        request_digest=row.request_digest,
        created_at=row.created_at,
    )
