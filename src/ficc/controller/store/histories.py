"""The earlier attempts at replicas: how each ended, and how many rows of them are kept."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from sqlalchemy import Connection, delete, exists, func, select

from ficc.controller.store import schema
from ficc.controller.store.database import Transaction
from ficc.domain import attempt
from ficc.domain.plan import Fence
from ficc.domain.restart import Past

ATTEMPTS_KEPT = 20
"""Of one workload, the newest; and whatever is not released."""
GENERATIONS_KEPT = 5
"""Of one service, besides those of which an attempt is not released."""

_w = schema.workloads.c
_a = schema.attempts.c


def pasts(connection: Connection, workload_ids: Collection[str]) -> dict[str, list[Past]]:
    """Of each workload: how its attempts ended, the newest first."""
    found: dict[str, list[Past]] = {workload_id: [] for workload_id in workload_ids}
    if not workload_ids:
        return found
    query = select(_a.workload_id, _a.record, _a.ready_at, _a.since_at)
    wanted = query.where(_a.workload_id.in_(workload_ids)).order_by(_a.number.desc())
    for row in connection.execute(wanted):
        record = attempt.from_json(row.record)
        if record.outcome is not None and record.reason is not None:
            ready_seconds = None if row.ready_at is None else max(0.0, row.since_at - row.ready_at)
            found[row.workload_id].append(Past(record.outcome, record.reason.code, ready_seconds))
    return found


@dataclass(frozen=True, slots=True)
class Kept:
    """An attempt of which a row is kept, with what its log is asked for by."""

    fence: Fence
    node_id: str
    number: int
    since_at: float
    record: attempt.Record


def of_replica(connection: Connection, service_id: str, replica: int, limit: int) -> list[Kept]:
    """The newest attempts at one replica of a service, of every generation, the newest first."""
    rows = connection.execute(
        select(_a.id, _a.generation, _a.plan_digest, _a.node_id, _a.number, _a.since_at, _a.record)
        .join(schema.workloads, _w.id == _a.workload_id)
        .where(_w.service_id == service_id, _w.replica == replica)
        .order_by(_a.generation.desc(), _a.number.desc())
        .limit(limit)
    )
    return [
        Kept(
            Fence(row.id, row.generation, row.plan_digest),
            row.node_id,
            row.number,
            row.since_at,
            attempt.from_json(row.record),
        )
        for row in rows
    ]


def prune_attempts(tx: Transaction, workload_id: str) -> None:
    """Forget the oldest released attempts at a workload past ATTEMPTS_KEPT."""
    newest = tx.scalar(select(func.max(_a.number)).where(_a.workload_id == workload_id)) or 0
    tx.execute(
        delete(schema.attempts).where(
            _a.workload_id == workload_id, _a.number <= newest - ATTEMPTS_KEPT, _a.released.is_(True)
        )
    )


def prune_generations(tx: Transaction, service_id: str) -> None:
    """Forget workloads of a service's generations past GENERATIONS_KEPT, once every attempt is released."""
    newest = tx.scalar(select(func.max(_w.generation)).where(_w.service_id == service_id)) or 0
    old = select(_w.id).where(_w.service_id == service_id, _w.generation <= newest - GENERATIONS_KEPT)
    held = exists().where(_a.workload_id == _w.id, _a.released.is_(False))
    ids = list(tx.execute(old.where(~held)).scalars())
    if ids:
        tx.execute(delete(schema.attempts).where(_a.workload_id.in_(ids)))
        tx.execute(delete(schema.workloads).where(_w.id.in_(ids)))
