"""Jobs: what each amounts to by its newest attempt, and the end of those whose time is up."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from sqlalchemy import Connection

from ficc.controller.operations.context import Context
from ficc.controller.reconcilers.attempts import AttemptSteps, Ending
from ficc.controller.reconcilers.deadlines import Deadlines
from ficc.controller.store import attempts as attempt_rows
from ficc.controller.store import workloads as rows
from ficc.controller.store.attempts import Attempt
from ficc.controller.store.database import Transaction
from ficc.controller.store.workloads import Workload
from ficc.domain import workload
from ficc.domain.attempt import Outcome

GOING = frozenset({workload.State.QUEUED, workload.State.RUNNING})


class WorkloadReconciler:
    def __init__(self, context: Context, steps: AttemptSteps) -> None:
        self._context = context
        self._steps = steps
        self._deadlines = Deadlines(context)
        self._first = True

    async def once(self) -> set[str]:
        """Look at every job that is not at rest, and take each next step; the attempts that were looked at."""
        # What a node says at last of a job whose outcome is unknown is noticed in the pass that records it: the first
        # pass makes good for a controller that was gone then.
        found = await self._context.database.read(partial(_unsettled, unknown=self._first))
        for row, attempts in found:
            await self._look_at(row, attempts)
        self._first = False
        held = {one.id for _, attempts in found for one in attempts}
        self._deadlines.forget_all_but({row.id for row, _ in found})
        return held

    async def _look_at(self, row: Workload, attempts: list[Attempt]) -> None:
        assert row.record is not None
        for one in attempts:
            wanted = one is attempts[-1] and (row.record.state in GOING or row.record.expired)
            await self._steps.take(one, wanted=wanted, why=_why(row.record))
        if row.record.outcome is Outcome.UNKNOWN or self._event(row, attempts) is not None:
            await self._context.database.write(partial(self._settle, seen=row))

    def _event(self, row: Workload, attempts: list[Attempt]) -> workload.Event | None:
        assert row.record is not None
        late = self._deadlines.passed(row.id, row.deadline_at, row.deadline_seconds or 0)
        return workload.observe(row.record, attempts[-1].record, late=late)

    def _settle(self, tx: Transaction, seen: Workload) -> None:
        """Record what became of a job, by what is recorded of its attempt now."""
        row = rows.get(tx.connection, seen.project_id, seen.id)
        if row is None or row.record is None:
            return
        event = self._event(row, attempt_rows.of_workloads(tx.connection, [row.id])[row.id])
        if event is not None:
            record = workload.advance(row.record, event)
            # Who loses against somebody quicker is woken by what they wrote.
            rows.put_job(tx, row, replace(row, record=record, revision=record.revision))


def _why(record: workload.Record) -> Ending:
    """One that is over time is stopped as one that failed, and not as one that is no longer wanted."""
    return Ending(unwanted=workload.CANCELLED, overdue=workload.EXPIRED if record.expired else None)


def _unsettled(connection: Connection, *, unknown: bool) -> list[tuple[Workload, list[Attempt]]]:
    """Each job that is not at rest, with its attempts that count, the newest last."""
    found = rows.unsettled(connection, unknown=unknown)
    attempts = attempt_rows.of_workloads(connection, [row.id for row in found])
    return [(row, attempts[row.id]) for row in found]
