"""Services: what each amounts to by its replicas, and new attempts for those that are to be tried again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from sqlalchemy import Connection

from ficc.controller.operations.context import Context
from ficc.controller.operations.ports import Load
from ficc.controller.operations.services import Services
from ficc.controller.reconcilers.attempts import AttemptSteps
from ficc.controller.store import attempts as attempt_rows
from ficc.controller.store import services as rows
from ficc.controller.store.attempts import Attempt
from ficc.controller.store.database import Transaction
from ficc.controller.store.services import Service
from ficc.domain import service


class ServiceReconciler:
    def __init__(self, context: Context, steps: AttemptSteps, services: Services, load: Load) -> None:
        self._context = context
        self._steps = steps
        self._services = services
        self._load = load

    async def once(self) -> set[str]:
        """Look at everything that is not at rest, and take each next step; the attempts that were looked at."""
        found = await self._context.database.read(_unsettled)
        for row, current, others in found:
            wanted = row.record.state not in (service.State.STOPPING, *service.ENDED)
            for one in current:
                await self._steps.take(one, wanted=wanted)
            for one in others:
                await self._steps.take(one, wanted=False)
            if self._settled(row, current) != row or self._interrupted(row, current):
                await self._context.database.write(partial(self._settle, seen=row))
        return {one.id for _, current, others in found for one in (*current, *others)}

    def _settle(self, tx: Transaction, seen: Service) -> None:
        """Record what the replicas amount to now, and plan new attempts for those only interrupted."""
        row = rows.get(tx.connection, seen.project_id, seen.id)
        if row is None or row.record.generation != seen.record.generation:
            return
        current = attempt_rows.current(tx.connection, [row])[row.id]
        after = self._settled(row, current)
        if after != row and not rows.put(tx, row, replace(after, updated_at=self._context.now())):
            return  # somebody was quicker; what they wrote wakes us again
        for one in self._interrupted(after, current):
            self._services.add_attempt(tx, one.workload_id)

    def _settled(self, row: Service, current: Sequence[Attempt]) -> Service:
        event = service.observe(row.record, [one.as_replica() for one in current], idle=self._idle(row))
        if event is None:
            return row
        record, _ = service.advance(row.record, event)
        return replace(row, record=record)

    def _interrupted(self, row: Service, current: Sequence[Attempt]) -> list[Attempt]:
        """Replicas to be tried again: their end says nothing about their engine, their reservation is back."""
        if row.record.desired is not service.Desired.RUNNING or row.record.state in service.ENDED:
            return []
        return [one for one in current if one.released and one.as_replica().interrupted]

    def _idle(self, row: Service) -> bool:
        """Whether a draining service has nothing open, or its last deadline passed."""
        late = row.drain_until is not None and self._context.now() >= row.drain_until
        return late or self._load.total(row.id) == 0


def _unsettled(connection: Connection) -> list[tuple[Service, list[Attempt], list[Attempt]]]:
    """Each service that is not at rest, its current attempts, and earlier ones that hold reservations."""
    found = rows.unsettled(connection)
    current = attempt_rows.current(connection, found)
    held = attempt_rows.unreleased(connection, [row.id for row in found])
    result = []
    for row in found:
        ids = {one.id for one in current[row.id]}
        result.append((row, current[row.id], [one for one in held[row.id] if one.id not in ids]))
    return result
