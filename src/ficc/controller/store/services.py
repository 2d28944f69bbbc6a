"""Services."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, delete, insert, select, update

from ficc.controller.store import schema
from ficc.controller.store.database import Transaction
from ficc.domain import service
from ficc.domain.errors import Reason

_s = schema.services.c
_w = schema.workloads.c
_a = schema.attempts.c


@dataclass(frozen=True, slots=True)
class Service:
    id: str
    project_id: str
    alias: str
    model_id: str
    record: service.Record
    spec: Mapping[str, Any]
    drain_until: float | None
    created_at: float
    updated_at: float


def add(tx: Transaction, row: Service) -> None:
    tx.execute(insert(schema.services).values(**_columns(row)))
    tx.changed("service", row.id)


def put(tx: Transaction, before: Service, after: Service) -> bool:
    """Write a service, if nobody changed it since `before` was read."""
    changed = tx.execute(
        update(schema.services)
        .where(_s.id == before.id, _s.revision == before.record.revision)
        .values(**_columns(after))
    )
    tx.changed("service", before.id)
    return changed.rowcount == 1


def _columns(row: Service) -> dict[str, Any]:
    record = row.record
    return {
        "id": row.id,
        "project_id": row.project_id,
        "alias": row.alias,
        "model_id": row.model_id,
        "revision": record.revision,
        "generation": record.generation,
        "state": record.state.value,
        "desired": record.desired.value,
        "reason": None if record.reason is None else record.reason.as_json(),
        "spec": dict(row.spec),
        "drain_until": row.drain_until,
        "created_at": row.created_at,
        "updated_at": row.updated_at,
    }


def get(connection: Connection, project_id: str, service_id: str) -> Service | None:
    row = connection.execute(
        select(schema.services).where(_s.id == service_id, _s.project_id == project_id)
    ).one_or_none()
    return None if row is None else _service(row)


def by_alias(connection: Connection, project_id: str, alias: str) -> Service | None:
    row = connection.execute(
        select(schema.services).where(_s.alias == alias, _s.project_id == project_id)
    ).one_or_none()
    return None if row is None else _service(row)


def page(connection: Connection, project_id: str, after: str | None, limit: int) -> list[Service]:
    query = select(schema.services).where(_s.project_id == project_id)
    if after is not None:
        query = query.where(_s.id < after)
    return [_service(row) for row in connection.execute(query.order_by(_s.id.desc()).limit(limit + 1))]


def unsettled(connection: Connection, *, failed: bool = False) -> list[Service]:
    """Every service that a reconciler may have to do something about: all but the stopped and failed, and
    those of them that still have an attempt which is not released; with `failed`, also all that failed and
    are still wanted."""
    held = select(_a.service_id).where(_a.released.is_(False), _a.service_id.is_not(None))
    ended = [state.value for state in service.ENDED]
    wanted = _s.state.not_in(ended) | _s.id.in_(held.scalar_subquery())
    if failed:
        wanted |= (_s.state == service.State.FAILED.value) & (_s.desired == service.Desired.RUNNING.value)
    query = select(schema.services).where(wanted)
    return [_service(row) for row in connection.execute(query)]


def of_ids(connection: Connection, only: Collection[str] | None) -> list[Service]:
    """These services, or all of every project."""
    query = select(schema.services)
    if only is not None:
        query = query.where(_s.id.in_(only))
    return [_service(row) for row in connection.execute(query)]


def deadline_seconds(connection: Connection, service_id: str | None) -> int:
    """How long a request of a service has; 0 for one that is not there."""
    spec = connection.execute(select(_s.spec).where(_s.id == service_id)).scalar()
    return 0 if spec is None else int(spec["deadline_seconds"])


def remove(tx: Transaction, service_id: str) -> None:
    """The service with its workloads and attempts, whose reservations must be released."""
    workloads = select(_w.id).where(_w.service_id == service_id).scalar_subquery()
    tx.execute(delete(schema.attempts).where(_a.workload_id.in_(workloads)))
    tx.execute(delete(schema.workloads).where(_w.service_id == service_id))
    tx.execute(delete(schema.services).where(_s.id == service_id))
    tx.changed("service", service_id)


def _service(row: Row[Any]) -> Service:
    reason = None if row.reason is None else Reason(row.reason["code"], row.reason["message"])
    return Service(
        id=row.id,
        project_id=row.project_id,
        alias=row.alias,
        model_id=row.model_id,
        record=service.Record(
            state=service.State(row.state),
            desired=service.Desired(row.desired),
            generation=row.generation,
            revision=row.revision,
            reason=reason,
        ),
        spec=row.spec,
        drain_until=row.drain_until,
        created_at=row.created_at,
        updated_at=row.updated_at,
    )
