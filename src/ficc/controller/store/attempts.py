"""Workloads and the attempts at them: what runs on nodes, for a service or by itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import Connection, case, func, insert, select, update

from ficc.controller.store import eviction, schema
from ficc.controller.store.database import Transaction
from ficc.controller.store.services import Service
from ficc.domain import attempt, lease, service, workload
from ficc.domain.plan import Fence

_s = schema.services.c
_w = schema.workloads.c
_a = schema.attempts.c


@dataclass(frozen=True, slots=True)
class Attempt:
    """An attempt with what its workload says: everything a reconciler decides on."""

    id: str
    workload_id: str
    service_id: str | None
    replica: int
    node_id: str
    number: int
    generation: int
    plan: Mapping[str, Any]
    plan_digest: str
    readiness: Mapping[str, Any] | None
    record: attempt.Record
    ready_at: float | None
    since_at: float
    deadline_at: float | None
    boot_id: str | None
    lease_sequence: int
    belief: lease.Belief | None
    """What is believed of the leases that were granted, once one was sent."""

    @property
    def fence(self) -> Fence:
        return Fence(self.id, self.generation, self.plan_digest)

    @property
    def released(self) -> bool:
        return self.record.state is attempt.State.RELEASED

    @property
    def live(self) -> bool:
        return self.record.state in attempt.LIVE

    @property
    def ready(self) -> bool:
        return self.record.state is attempt.State.RUNNING and self.ready_at is not None

    def as_replica(self) -> service.Replica:
        return service.Replica(
            attempt_id=self.id,
            live=self.live,
            ready=self.ready,
            released=self.released,
            outcome=self.record.outcome,
            reason=self.record.reason,
        )


def add_workload(tx: Transaction, **columns: Any) -> None:
    tx.execute(insert(schema.workloads).values(**{"revision": 0, **columns}))
    tx.changed("workload", columns["id"])


def add(tx: Transaction, *, attempt_id: str, workload_id: str, now: float) -> None:
    """The next attempt at a workload, planned."""
    of = tx.execute(select(schema.workloads).where(_w.id == workload_id)).one()
    last = tx.scalar(select(func.max(_a.number)).where(_a.workload_id == workload_id)) or 0
    record = attempt.Record()
    tx.execute(
        insert(schema.attempts).values(
            id=attempt_id,
            workload_id=workload_id,
            service_id=of.service_id,
            node_id=of.node_id,
            number=last + 1,
            generation=of.generation,
            plan_digest=of.plan_digest,
            state=record.state.value,
            record=attempt.as_json(record),
            released=False,
            since_at=now,
            lease_sequence=0,
            created_at=now,
        )
    )
    _replica_changed(tx, workload_id)
    _tell(tx, workload_id, of.service_id)


def put(tx: Transaction, before: Attempt, after: Attempt) -> bool:
    """Write an attempt, if its state, readiness and lease are still as `before` was read. With its release it
    lets go of what it read, and with the state that it amounts to changes the revision of a replica's workload."""
    belief = after.belief
    changed = tx.execute(
        update(schema.attempts)
        .where(
            _a.id == before.id,
            _a.state == before.record.state.value,
            _a.lease_sequence == before.lease_sequence,
            _a.ready_at.is_not_distinct_from(before.ready_at),
        )
        .values(
            state=after.record.state.value,
            record=attempt.as_json(after.record),
            released=after.released,
            ready_at=after.ready_at,
            since_at=after.since_at,
            deadline_at=after.deadline_at,
            boot_id=after.boot_id,
            lease_sequence=after.lease_sequence,
            lease_over_ns=None if belief is None else belief.over_ns,
            lease_over_boot_id=None if belief is None else belief.boot_id,
            lease_ttl_seconds=None if belief is None else belief.ttl_seconds,
        )
    )
    _tell(tx, before.workload_id, before.service_id)
    if changed.rowcount and after.released and not before.released:
        eviction.used(tx, before.workload_id, before.plan, after.since_at)
    if changed.rowcount and workload.state_of(before.record) is not workload.state_of(after.record):
        _replica_changed(tx, before.workload_id)
    return changed.rowcount == 1


def _replica_changed(tx: Transaction, workload_id: str) -> None:
    """A job's revision is its own record's."""
    tx.execute(
        update(schema.workloads)
        .where(_w.id == workload_id, _w.service_id.is_not(None))
        .values(revision=_w.revision + 1)
    )


def _tell(tx: Transaction, workload_id: str, service_id: str | None) -> None:
    tx.changed("workload", workload_id)
    if service_id is not None:
        tx.changed("service", service_id)


def _attempts(connection: Connection, *conditions: Any) -> list[Attempt]:
    rows = connection.execute(
        select(
            schema.attempts,
            _w.replica,
            _w.plan,
            _w.readiness,
        )
        .join(schema.workloads, _w.id == _a.workload_id)
        .where(*conditions)
        .order_by(_a.workload_id, _a.number)
    )
    return [
        Attempt(
            id=row.id,
            workload_id=row.workload_id,
            service_id=row.service_id,
            replica=row.replica,
            node_id=row.node_id,
            number=row.number,
            generation=row.generation,
            plan=row.plan,
            plan_digest=row.plan_digest,
            readiness=row.readiness,
            record=attempt.from_json(row.record),
            ready_at=row.ready_at,
            since_at=row.since_at,
            deadline_at=row.deadline_at,
            boot_id=row.boot_id,
            lease_sequence=row.lease_sequence,
            belief=None
            if row.lease_over_ns is None
            else lease.Belief(row.lease_over_boot_id, row.lease_over_ns, row.lease_ttl_seconds),
        )
        for row in rows
    ]


def get(connection: Connection, attempt_id: str) -> Attempt | None:
    found = _attempts(connection, _a.id == attempt_id)
    return found[0] if found else None


def held_on(connection: Connection, node_id: str) -> list[Attempt]:
    """Attempts on a node that are not released."""
    return _attempts(connection, _a.node_id == node_id, _a.released.is_(False))


def of_workloads(connection: Connection, workload_ids: Sequence[str]) -> dict[str, list[Attempt]]:
    """Of each workload: the newest attempt, and before it every earlier one that is not released."""
    if not workload_ids:
        return {}
    newest = (
        select(_a.workload_id, func.max(_a.number).label("number"))
        .where(_a.workload_id.in_(workload_ids))
        .group_by(_a.workload_id)
        .subquery()
    )
    is_newest = select(newest).where(newest.c.workload_id == _a.workload_id, newest.c.number == _a.number)
    wanted = _a.released.is_(False) | is_newest.exists()
    found: dict[str, list[Attempt]] = {workload_id: [] for workload_id in workload_ids}
    for one in _attempts(connection, _a.workload_id.in_(workload_ids), wanted):
        found[one.workload_id].append(one)
    return found


def current(connection: Connection, services: Sequence[Service]) -> dict[str, list[Attempt]]:
    """Of each service: the newest attempt of each replica of its generation, in the order of placements."""
    if not services:
        return {}
    wanted = {s.id: s.record.generation for s in services}
    generation = select(_s.generation).where(_s.id == _a.service_id).scalar_subquery()
    found = _attempts(connection, _a.service_id.in_(list(wanted)), _a.generation == generation)
    newest: dict[tuple[str, int], Attempt] = {}
    for one in found:  # ordered by number within a workload
        if one.service_id is not None and one.generation == wanted[one.service_id]:
            newest[one.service_id, one.replica] = one
    result: dict[str, list[Attempt]] = {service_id: [] for service_id in wanted}
    for (service_id, _), one in sorted(newest.items(), key=lambda item: item[0]):
        result[service_id].append(one)
    return result


def unreleased(connection: Connection, service_ids: Sequence[str]) -> dict[str, list[Attempt]]:
    """Of each service: attempts of any generation that are not released."""
    if not service_ids:
        return {}
    found: dict[str, list[Attempt]] = {service_id: [] for service_id in service_ids}
    for one in _attempts(connection, _a.service_id.in_(service_ids), _a.released.is_(False)):
        if one.service_id is not None:
            found[one.service_id].append(one)
    return found


def changed_to(before: Attempt, record: attempt.Record, now: float, **others: Any) -> Attempt:
    """The attempt with another record; `since_at` is when its state changed, of one that ended when it finished."""
    states = before.record.state, record.state
    stays = states[0] is states[1] or states == (attempt.State.FINISHED, attempt.State.RELEASED)
    since = before.since_at if stays else now
    return replace(before, record=record, since_at=since, **others)


def renew_leases(
    tx: Transaction, node_id: str, boot_id: str, belief: lease.Belief
) -> list[tuple[Fence, int]]:
    """Raise the sequence of every lease that is held on a node in this boot, and when it is held to be over;
    each fence and its new sequence. What an earlier renewal granted for longer stands."""
    longer = (_a.lease_over_boot_id == belief.boot_id) & (_a.lease_over_ns > belief.over_ns)
    ttl_seconds = belief.ttl_seconds
    live = [state.value for state in attempt.LIVE]
    held = (_a.node_id == node_id, _a.state.in_(live), _a.boot_id == boot_id, _a.lease_sequence > 0)
    tx.execute(
        update(schema.attempts)
        .where(*held)
        .values(
            lease_sequence=_a.lease_sequence + 1,
            lease_over_ns=case((longer, _a.lease_over_ns), else_=belief.over_ns),
            lease_over_boot_id=belief.boot_id,
            lease_ttl_seconds=case(
                (_a.lease_ttl_seconds > ttl_seconds, _a.lease_ttl_seconds), else_=ttl_seconds
            ),
        )
    )
    rows = tx.execute(select(_a.id, _a.generation, _a.plan_digest, _a.lease_sequence).where(*held))
    return [(Fence(row.id, row.generation, row.plan_digest), row.lease_sequence) for row in rows]
