"""Services: what each amounts to by its replicas, and new attempts for those that are to be tried again."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from sqlalchemy import Connection

from ficc.controller.operations.context import Context
from ficc.controller.operations.ports import Load
from ficc.controller.operations.restarts import Retry, retries
from ficc.controller.operations.services import Services
from ficc.controller.reconcilers.attempts import AttemptSteps
from ficc.controller.reconcilers.deadlines import Deadlines
from ficc.controller.store import attempts as attempt_rows
from ficc.controller.store import services as rows
from ficc.controller.store.attempts import Attempt
from ficc.controller.store.database import Transaction
from ficc.controller.store.services import Service
from ficc.domain import service

log = logging.getLogger("ficc.controller")


@dataclass(frozen=True, slots=True)
class Found:
    """A service that is not at rest. `others`: earlier attempts that hold reservations; `retries`: what follows
    current ones that ended, by their ids."""

    row: Service
    current: Sequence[Attempt]
    others: Sequence[Attempt]
    retries: Mapping[str, Retry]


class ServiceReconciler:
    def __init__(self, context: Context, steps: AttemptSteps, services: Services, load: Load) -> None:
        self._context = context
        self._steps = steps
        self._services = services
        self._load = load
        self._deadlines = Deadlines(context)
        self._first = True

    async def once(self) -> set[str]:
        """Look at everything that is not at rest, and take each next step; the attempts that were looked at."""
        lifecycle = self._context.settings.lifecycle

        def unsettled(connection: Connection) -> list[Found]:
            # Of one that failed, what its node says at last is noticed in the pass that records it: the first
            # pass makes good for a controller that was gone then.
            found = rows.unsettled(connection, failed=self._first)
            current = attempt_rows.current(connection, found)
            held = attempt_rows.unreleased(connection, [row.id for row in found])
            planned = retries(connection, lifecycle, [(row, current[row.id]) for row in found])
            return [
                Found(row, current[row.id], _without(held[row.id], current[row.id]), planned) for row in found
            ]

        found = await self._context.database.read(unsettled)
        for one in found:
            await self._look_at(one)
        self._first = False
        attempts = {attempt.id for one in found for attempt in (*one.current, *one.others)}
        self._deadlines.forget_all_but({*attempts, *(one.row.id for one in found)})
        return attempts

    async def _look_at(self, found: Found) -> None:
        row = found.row
        wanted = row.record.state not in (service.State.STOPPING, *service.ENDED)
        for one in found.current:
            await self._steps.take(one, wanted=wanted)
        for one in found.others:
            await self._steps.take(one, wanted=False)
        corrected = row.record.state is service.State.FAILED and any(
            not one.released for one in found.current
        )
        if corrected or self._settled(found) != row or self._due(found):
            await self._context.database.write(partial(self._settle, seen=row))

    def _settle(self, tx: Transaction, seen: Service) -> None:
        """Record what the replicas amount to now, and plan new attempts for those that are due."""
        tx.take_turns(f"service {seen.id}")
        row = rows.get(tx.connection, seen.project_id, seen.id)
        if row is None or row.record.generation != seen.record.generation:
            return
        current = attempt_rows.current(tx.connection, [row])[row.id]
        planned = retries(tx.connection, self._context.settings.lifecycle, [(row, current)])
        found = Found(row, current, (), planned)
        after = self._settled(found)
        if after != row and not rows.put(tx, row, replace(after, updated_at=self._context.now())):
            return  # somebody was quicker; what they wrote wakes us again
        for one in self._due(replace(found, row=after)):
            if planned[one.id].again.acknowledged:
                self._services.note_acknowledgement(tx, row, one)
            self._services.add_attempt(tx, one.workload_id)
            log.info("service %s: replica %d is tried again after attempt %s", row.id, one.replica, one.id)

    def _settled(self, found: Found) -> Service:
        replicas = [
            replace(one.as_replica(), again=found.retries[one.id].again if one.id in found.retries else None)
            for one in found.current
        ]
        event = service.observe(found.row.record, replicas, idle=self._idle(found.row))
        if event is None:
            return found.row
        return replace(found.row, record=service.advance(found.row.record, event))

    def _due(self, found: Found) -> list[Attempt]:
        """Ended attempts whose replicas are to be tried again now: what they reserved is back."""
        if found.row.record.desired is not service.Desired.RUNNING or found.row.record.state in service.ENDED:
            return []
        return [one for one in found.current if one.released and self._is_due(one, found.retries.get(one.id))]

    def _is_due(self, one: Attempt, retry: Retry | None) -> bool:
        return retry is not None and self._deadlines.passed(one.id, retry.at, retry.again.delay_seconds)

    def _idle(self, row: Service) -> bool:
        """Whether a draining service has nothing open, or its last deadline passed."""
        late = self._deadlines.passed(row.id, row.drain_until, row.spec["deadline_seconds"])
        return late or self._load.total(row.id) == 0


def _without(attempts: Sequence[Attempt], others: Sequence[Attempt]) -> list[Attempt]:
    ids = {one.id for one in others}
    return [one for one in attempts if one.id not in ids]
