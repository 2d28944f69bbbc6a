"""The audit: who did what to what, when, and how it ended. A row is written by the transaction of the deed itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Row, insert, select

from ficc.controller.store import schema
from ficc.controller.store.database import Transaction
from ficc.domain.access import Actor

_t = schema.audit.c


def add(
    tx: Transaction,
    *,
    entry_id: str,
    at: float,
    actor: Actor,
    request_id: str,
    action: str,
    object_kind: str,
    object_id: str,
    outcome: str,
    details: Mapping[str, Any],
) -> None:
    tx.execute(
        insert(schema.audit).values(
            id=entry_id,
            project_id=actor.project_id,
            at=at,
            subject_id=actor.subject_id,
            authority_kind=actor.kind,
            authority_id=actor.authority_id,
            action=action,
            object_kind=object_kind,
            object_id=object_id,
            request_id=request_id,
            outcome=outcome,
            details=dict(details),
        )
    )
    tx.changed("audit", entry_id)


def page(connection: Connection, project_id: str, after: str | None, limit: int) -> Sequence[Row[Any]]:
    query = select(schema.audit).where(_t.project_id == project_id)
    if after is not None:
        query = query.where(_t.id < after)
    return connection.execute(query.order_by(_t.id.desc()).limit(limit + 1)).all()
