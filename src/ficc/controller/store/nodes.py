"""Nodes: the machines whose executors carry attempts, with what each last said of itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Row, insert, select, update

from ficc.controller.store import schema
from ficc.controller.store.database import Transaction
from ficc.domain import placement
from ficc.domain.plan import Limits

_n = schema.nodes.c
_a = schema.attempts.c


def put_snapshot(
    tx: Transaction, node_id: str, *, name: str, mode: str, snapshot: Mapping[str, Any], now: float
) -> None:
    """Record what a node says, adding the node at its first word."""
    values = {"snapshot": dict(snapshot), "snapshot_at": now, "boot_id": snapshot["boot_id"], "name": name}
    changed = tx.execute(update(schema.nodes).where(_n.id == node_id).values(**values))
    if not changed.rowcount:
        tx.execute(insert(schema.nodes).values(id=node_id, mode=mode, created_at=now, **values))
    tx.changed("node", node_id)


def page(connection: Connection, after: str | None, limit: int) -> Sequence[Row[Any]]:
    query = select(schema.nodes)
    if after is not None:
        query = query.where(_n.id < after)
    return connection.execute(query.order_by(_n.id.desc()).limit(limit + 1)).all()


def get(connection: Connection, node_id: str) -> Row[Any] | None:
    return connection.execute(select(schema.nodes).where(_n.id == node_id)).one_or_none()


def lock(tx: Transaction, node_ids: Sequence[str]) -> None:
    """Let no other transaction place on these nodes until this one ends (no-op on SQLite, where writers
    take turns anyway)."""
    tx.execute(select(_n.id).where(_n.id.in_(node_ids)).order_by(_n.id).with_for_update())


def reserved(connection: Connection, node_ids: Sequence[str]) -> dict[str, Limits]:
    """What attempts that are not released hold on each node."""
    w = schema.workloads.c
    rows = connection.execute(
        select(_a.node_id, w.plan)
        .select_from(schema.attempts)
        .join(schema.workloads, w.id == _a.workload_id)
        .where(_a.node_id.in_(node_ids), _a.released.is_(False))
    )
    held: dict[str, list[Limits]] = {node_id: [] for node_id in node_ids}
    for node_id, plan in rows:
        held[node_id].append(Limits.from_json(plan["limits"]))
    return {node_id: placement.total(limits) for node_id, limits in held.items()}
