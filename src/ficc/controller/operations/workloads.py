"""Workloads: batch jobs with their submission and control, and what carries replicas, to be seen and released."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import Connection

from ficc.controller.operations.beliefs import Beliefs
from ficc.controller.operations.context import Context, Page, check_revision, not_found, page_of
from ficc.controller.operations.losses import Losses
from ficc.controller.operations.planning import Planning
from ficc.controller.operations.ports import NodeLink, Nodes
from ficc.controller.operations.submission import Submission
from ficc.controller.operations.workload_views import WorkloadView
from ficc.controller.store import attempts as attempt_rows
from ficc.controller.store import audit, eviction
from ficc.controller.store import nodes as node_rows
from ficc.controller.store import workloads as rows
from ficc.controller.store.attempts import Attempt
from ficc.controller.store.database import Transaction
from ficc.controller.store.workloads import Workload
from ficc.domain import attempt, placement, workload
from ficc.domain.access import Actor
from ficc.domain.errors import Reason, Refused, invalid
from ficc.domain.estimate import Estimate
from ficc.domain.lifecycle import IllegalTransition
from ficc.domain.plan import Fence, Plan
from ficc.protocol.http_api import rfc3339

EXECUTE_SCOPES = ("jobs:execute", "contributors:read")
NO_ESTIMATE = Estimate(weights_bytes=0, overhead_bytes=0)
"""Of a job nothing is known but its limits."""
RELEASED_BY_OPERATOR = Reason(
    "lease_over",
    "The node had not answered since before its lease ended when an operator released the attempt.",
)


@dataclass(frozen=True, slots=True)
class Part:
    """Which part of what an attempt left: of the output `name`, or of the stream `log`."""

    name: str | None
    stream: str | None
    attempt: int | None
    """Its number; None: the newest."""
    offset: int
    limit: int


class Workloads:
    def __init__(
        self, context: Context, nodes: Nodes, planning: Planning, losses: Losses, beliefs: Beliefs
    ) -> None:
        self._context = context
        self._nodes = nodes
        self._planning = planning
        self._losses = losses
        self._beliefs = beliefs

    # Reading.

    async def page(self, actor: Actor, page: Page) -> tuple[list[WorkloadView], str | None]:
        actor.require("jobs:read")

        def work(connection: Connection) -> tuple[list[WorkloadView], str | None]:
            found = rows.page(connection, actor.project_id, page.after, page.limit)
            shown, cursor = page_of(found, page, lambda row: row.id)
            return _views(connection, shown), cursor

        return await self._context.database.read(work)

    async def get(self, actor: Actor, workload_id: str) -> WorkloadView:
        actor.require("jobs:read")
        return await self._context.database.read(
            lambda connection: _in_full(connection, _require(connection, actor, workload_id))
        )

    async def output(self, actor: Actor, workload_id: str, part: Part) -> dict[str, Any]:
        """A part of what an attempt left. Raises Refused."""
        actor.require("jobs:logs")

        def work(connection: Connection) -> tuple[Workload, str]:
            row = _require(connection, actor, workload_id)
            if (part.name is None) == (part.stream is None):
                raise invalid('Send either name, or stream: "log".', "name")
            attempt_id = rows.numbered(connection, workload_id, part.attempt)
            if attempt_id is None:
                raise Refused("not_found", f"The workload has no attempt {part.attempt}.", "attempt")
            return row, attempt_id

        row, attempt_id = await self._context.database.read(work)
        link = self._nodes.link(row.node_id)
        if link is None:
            raise Refused(
                "executor_unavailable",
                "The workload's node is not connected, and what the attempt left is kept there.",
                retry_after_seconds=1,
            )
        try:
            fence = Fence(attempt_id, row.generation, row.plan_digest)
            piece = await link.output(fence, part.name, part.offset, part.limit)
        except Refused as refused:
            if refused.code != "attempt_unknown":
                raise
            message = "The node has nothing of the attempt: it was not admitted yet, or is forgotten by now."
            raise Refused("not_found", message, "attempt") from None
        size = len(str(piece["data"])) // 4 * 3 - str(piece["data"])[-2:].count("=")
        return {"attempt_id": attempt_id, **piece, "next_offset": part.offset + size}

    # Submitting.

    async def submit(self, actor: Actor, submission: Submission) -> tuple[WorkloadView, bool]:
        """The job, and whether this made it: under a key that the project has used it is the one of then. Raises
        Refused."""
        self._check_execute(actor, reads=bool(submission.inputs))
        await self._losses.look({sha256 for _, sha256 in submission.inputs})
        now, workload_id = self._context.now(), self._context.new_id()

        def work(tx: Transaction) -> tuple[WorkloadView, bool]:
            earlier = _earlier(tx.connection, actor.project_id, submission)
            if earlier is not None:
                return _in_full(tx.connection, earlier), False
            digests = {sha256 for _, sha256 in submission.inputs}
            sizes = rows.verified_bytes(tx.connection, actor.project_id, digests)
            if missing := sorted(digests - set(sizes)):
                raise _not_verified(missing)
            plan = submission.plan(sizes)
            self._reserve(tx, actor.project_id, plan)
            row = Workload(
                id=workload_id,
                project_id=actor.project_id,
                node_id=plan.node_id,
                plan_digest=plan.digest,
                revision=0,
                sensitive=plan.sensitive,
                model_revision=None,
                service_id=None,
                generation=1,
                replica=0,
                record=workload.Record(),
                deadline_seconds=submission.deadline_seconds,
                deadline_at=now + submission.deadline_seconds,
                idempotency_key=submission.idempotency_key,
                request_digest=submission.digest,
                created_at=now,
            )
            rows.add_job(tx, row, plan.as_json())
            self._plan_attempt(tx, workload_id)
            return _in_full(tx.connection, row), True

        return await self._context.database.write(work)

    def _check_execute(self, actor: Actor, *, reads: bool) -> None:
        """A job can copy what it reads into its outputs, so inputs are for those who may read models."""
        actor.require(*EXECUTE_SCOPES, *(("models:read",) if reads else ()))

    def _reserve(self, tx: Transaction, project_id: str, plan: Plan) -> None:
        """Hold the node until the transaction ends, and the contents that the plan reads; refuse what does not fit."""
        node_rows.lock(tx, [plan.node_id])
        nodes = self._planning.node_views(tx.connection, {plan.node_id})
        (verdict,) = placement.place([(plan, NO_ESTIMATE)], nodes)
        if not verdict.fits:
            raise Refused(
                "does_not_fit",
                " ".join(dict.fromkeys(problem.message for problem in verdict.problems)),
                details={"problems": [problem.as_json() for problem in verdict.problems]},
            )
        digests = {entry.sha256 for entry in plan.inputs}
        if not eviction.use(tx, project_id, digests, self._context.now()):
            raise _not_verified(sorted(digests))

    def _plan_attempt(self, tx: Transaction, workload_id: str) -> None:
        attempt_rows.add(
            tx, attempt_id=self._context.new_id(), workload_id=workload_id, now=self._context.now()
        )

    # Control.

    async def cancel(self, actor: Actor, workload_id: str, revision: int) -> WorkloadView:
        """Let a job end. Raises Refused."""
        actor.require("jobs:cancel")

        def work(tx: Transaction) -> WorkloadView:
            row, record = _require_job(tx.connection, actor, workload_id, revision)
            try:
                after = workload.advance(record, workload.Cancel())
            except IllegalTransition:
                raise Refused("action_not_allowed", "The job has ended; read it again.") from None
            return _put(tx, row, replace(row, record=after, revision=after.revision))

        return await self._context.database.write(work)

    async def retry(
        self, actor: Actor, workload_id: str, revision: int, *, acknowledge_unknown: bool
    ) -> WorkloadView:
        """Another attempt at the plan of a job that has ended. Raises Refused."""
        actor.require(*EXECUTE_SCOPES)
        plan = await self._context.database.read(lambda c: _plan(c, _require(c, actor, workload_id)))
        self._check_execute(actor, reads=bool(plan.inputs))
        await self._losses.look({entry.sha256 for entry in plan.inputs})

        def work(tx: Transaction) -> WorkloadView:
            row, record = _require_job(tx.connection, actor, workload_id, revision)
            last = rows.seen(tx.connection, [workload_id], limit=1)[workload_id][0]
            held = rows.unreleased(tx.connection, workload_id)
            workload.check_retry(record, last.record, held, acknowledge_unknown=acknowledge_unknown)
            self._reserve(tx, actor.project_id, plan)
            after = workload.advance(record, workload.Retry())
            deadline_at = self._context.now() + (row.deadline_seconds or 0)
            changed = replace(row, record=after, revision=after.revision, deadline_at=deadline_at)
            _write(tx, row, changed)
            self._plan_attempt(tx, workload_id)
            return _in_full(tx.connection, changed)

        return await self._context.database.write(work)

    async def remove(self, actor: Actor, workload_id: str, revision: int) -> None:
        """Forget a job that has ended and is released, with what its attempts left. Raises Refused."""
        actor.require("jobs:cancel")

        def work(tx: Transaction) -> tuple[Workload, list[str]]:
            row, record = _require_job(tx.connection, actor, workload_id, revision)
            workload.check_remove(record, rows.unreleased(tx.connection, workload_id))
            attempt_ids = rows.attempt_ids(tx.connection, workload_id)
            rows.remove(tx, workload_id)
            return row, attempt_ids

        row, attempt_ids = await self._context.database.write(work)
        link = self._nodes.link(row.node_id)
        if link is not None:
            await _discard(link, [Fence(one, row.generation, row.plan_digest) for one in attempt_ids])

    async def release(self, actor: Actor, workload_id: str, revision: int, request_id: str) -> WorkloadView:
        """Give back what attempts of a workload hold, on an operator's word that their node will not: once their
        leases are held to be over. Raises Refused."""
        actor.require("jobs:cancel")
        database = self._context.database
        row = await database.read(lambda c: _require(c, actor, workload_id))
        check_revision(row.revision, revision)
        found = (await database.read(lambda c: attempt_rows.of_workloads(c, [workload_id])))[workload_id]
        held = [one for one in found if not one.released]
        asked = [self._held(one) for one in held]
        workload.check_release(asked)
        seconds = workload.longest_lease_seconds(asked)
        if seconds > 0:
            raise workload.lease_not_over(asked, str(rfc3339(self._context.now() + seconds)))
        return await database.write(lambda tx: self._release(tx, actor, row, held, request_id))

    def _held(self, one: Attempt) -> workload.Held:
        link = self._nodes.link(one.node_id)
        reported = None if link is None else link.reported(one.id)
        return workload.Held(
            attempt_id=one.id,
            leased=one.belief is not None,
            running=reported is not None and reported.state in attempt.LIVE,
            over_in_seconds=self._beliefs.over_in_seconds(one),
        )

    def _release(
        self, tx: Transaction, actor: Actor, row: Workload, held: Sequence[Attempt], request_id: str
    ) -> WorkloadView:
        now, outcomes = self._context.now(), {}
        for one in held:
            record = workload.released(one.record, RELEASED_BY_OPERATOR)
            if not attempt_rows.put(tx, one, attempt_rows.changed_to(one, record, now)):
                raise _changed()
            assert record.outcome is not None
            outcomes[one.id] = record.outcome.value
        audit.add(
            tx,
            entry_id=self._context.new_id(),
            at=now,
            actor=actor,
            request_id=request_id,
            action="workload.release",
            object_kind="workload",
            object_id=row.id,
            outcome="released",
            details={"node_id": row.node_id, "service_id": row.service_id, "attempts": outcomes},
        )
        return _in_full(tx.connection, _require(tx.connection, actor, row.id))


def _views(connection: Connection, found: Sequence[Workload]) -> list[WorkloadView]:
    seen = rows.seen(connection, [row.id for row in found])
    return [WorkloadView(row, tuple(seen[row.id])) for row in found]


def _in_full(connection: Connection, row: Workload) -> WorkloadView:
    (view,) = _views(connection, [row])
    return replace(view, plan=rows.plan_of(connection, row.id))


def _plan(connection: Connection, row: Workload) -> Plan:
    return Plan.from_json(rows.plan_of(connection, row.id))


def _require(connection: Connection, actor: Actor, workload_id: str) -> Workload:
    row = rows.get(connection, actor.project_id, workload_id)
    if row is None:
        raise not_found("workload", workload_id)
    return row


def _require_job(
    connection: Connection, actor: Actor, workload_id: str, revision: int
) -> tuple[Workload, workload.Record]:
    """A job at the revision that was read."""
    row = _require(connection, actor, workload_id)
    if row.record is None:
        raise Refused(
            "action_not_allowed",
            f"The workload carries a replica of service {row.service_id}: act on the service.",
            details={"service_id": row.service_id},
        )
    check_revision(row.revision, revision)
    return row, row.record


def _earlier(connection: Connection, project_id: str, submission: Submission) -> Workload | None:
    """What was made under this key before."""
    if submission.idempotency_key is None:
        return None
    found = rows.by_key(connection, project_id, submission.idempotency_key)
    if found is not None and found.request_digest != submission.digest:
        raise Refused(
            "idempotency_conflict",
            f"The key was used for another job, {found.id}. Send another key with another job.",
            "idempotency_key",
            details={"workload_id": found.id},
        )
    return found


def _not_verified(digests: Sequence[str]) -> Refused:
    return Refused(
        "input_not_verified",
        f"The project has no verified file with the digest {digests[0]}; an input is a file of one of its models.",
        "inputs",
        details={"digests": list(digests)},
    )


def _put(tx: Transaction, before: Workload, after: Workload) -> WorkloadView:
    if after != before:
        _write(tx, before, after)
    return _in_full(tx.connection, after)


def _write(tx: Transaction, before: Workload, after: Workload) -> None:
    if not rows.put_job(tx, before, after):
        raise _changed()


def _changed() -> Refused:
    return Refused(
        "revision_conflict", "The workload changed meanwhile; read it again and decide anew.", "revision"
    )


async def _discard(link: NodeLink, fences: Sequence[Fence]) -> None:
    """What a node does not hear of, it drops with the attempt's own record."""
    for fence in fences:
        try:
            await link.discard(fence)
        except Refused as refused:
            if refused.code == "executor_unavailable":
                return
