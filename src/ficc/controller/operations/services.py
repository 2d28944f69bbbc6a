"""Services: preview, create, read, replace, control, and their tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import Connection

from ficc.controller.operations.access import Access
from ficc.controller.operations.context import Context, Page, check_revision, not_found, page_of
from ficc.controller.operations.estimates import Estimates
from ficc.controller.operations.losses import Losses
from ficc.controller.operations.ports import Load, Nodes
from ficc.controller.store import access as access_rows
from ficc.controller.store import eviction
from ficc.controller.store import models as model_rows
from ficc.controller.store import nodes as node_rows
from ficc.controller.store import services as rows
from ficc.controller.store.database import Transaction
from ficc.controller.store.services import Attempt, Service
from ficc.domain import acquisition, attempt, canonical, estimate, placement, service
from ficc.domain.access import Actor
from ficc.domain.errors import Reason, Refused, invalid
from ficc.domain.lifecycle import IllegalTransition
from ficc.domain.placement import Snapshot, Verdict
from ficc.domain.plan import Plan
from ficc.inference import registry
from ficc.inference.contract import Job, ModelRecord, input_references
from ficc.inference.schema import Specification
from ficc.protocol.http_api import rfc3339

START_SCOPES = ("inference:manage", "jobs:execute", "contributors:read", "models:read")
STOP_SCOPES = ("inference:manage", "jobs:cancel")
ACTIONS = ("start", "drain", "stop", "remove")


@dataclass(frozen=True, slots=True)
class Planned:
    """A specification turned into plans and judged: what a preview shows and a submission creates."""

    specification: Specification
    model: model_rows.Model
    jobs: tuple[Job, ...]
    plans: tuple[Plan, ...]
    verdicts: tuple[Verdict, ...]
    estimates: tuple[estimate.Estimate, ...]
    doubts: tuple[Reason, ...]

    @property
    def accepted(self) -> bool:
        return all(verdict.fits for verdict in self.verdicts)

    @property
    def preview_digest(self) -> str:
        """Of what would run, not of what happens to be free now."""
        return canonical.digest(
            {"plans": [plan.digest for plan in self.plans], "alias": self.specification.alias}
        )

    def as_json(self) -> dict[str, Any]:
        replicas = []
        for plan, verdict, needed in zip(self.plans, self.verdicts, self.estimates, strict=True):
            replicas.append(
                {
                    "node_id": plan.node_id,
                    "plan_digest": plan.digest,
                    "reservation": plan.limits.as_json(),
                    "available": None if verdict.available is None else verdict.available.as_json(),
                    "estimate": needed.in_full(),
                    "staging_bytes": 0,
                    "fits": verdict.fits,
                    "problems": [problem.as_json() for problem in verdict.problems],
                }
            )
        warnings = [
            warning.as_json()
            for warning in (*self.doubts, *(one for verdict in self.verdicts for one in verdict.warnings))
        ]
        return {
            "accepted": self.accepted,
            "preview_digest": self.preview_digest,
            "replicas": replicas,
            "warnings": warnings,
        }


@dataclass(frozen=True, slots=True)
class ServiceView:
    """A service as its readers see it."""

    service: Service
    attempts: tuple[Attempt, ...]
    capabilities: tuple[str, ...]
    in_flight: Mapping[str, int]
    connected: frozenset[str]
    """Nodes of its replicas that are connected now."""

    def as_json(self) -> dict[str, Any]:
        row, record = self.service, self.service.record
        state, reason = record.state, record.reason
        unreached = [one for one in self.attempts if self._unreached(one)]
        if unreached:
            replicas = [
                replace(one.as_replica(), ready=one.ready and one not in unreached) for one in self.attempts
            ]
            state, reason = service.as_reached(record, replicas), reason or _disconnected(unreached[0])
        return {
            "id": row.id,
            "alias": row.alias,
            "project_id": row.project_id,
            "revision": record.revision,
            "generation": record.generation,
            "state": state.value,
            "desired": record.desired.value,
            "reason": None if reason is None else reason.as_json(),
            "spec": dict(row.spec),
            "capabilities": list(self.capabilities),
            "replicas": [self._replica(one) for one in self.attempts],
            "created_at": rfc3339(row.created_at),
            "updated_at": rfc3339(row.updated_at),
            "endpoint": f"/api/v1/inference/{row.id}/v1",
        }

    def _unreached(self, one: Attempt) -> bool:
        """Whether nothing of an attempt that lives can be seen or asked for now."""
        return one.live and one.node_id not in self.connected

    def _replica(self, one: Attempt) -> dict[str, Any]:
        record = one.record
        reason = None if record.reason is None else record.reason.as_json()
        if self._unreached(one):
            reason = _disconnected(one).as_json()
        failed = record.outcome in (attempt.Outcome.FAILED, attempt.Outcome.UNKNOWN)
        return {
            "workload_id": one.workload_id,
            "node_id": one.node_id,
            "attempt_id": one.id,
            "attempt": one.number,
            "generation": one.generation,
            "plan_digest": one.plan_digest,
            "model_revision": one.plan.get("model_revision"),
            "state": attempt.replica_state(
                record.state,
                ready=one.ready,
                draining=self.service.record.state is service.State.DRAINING,
            ),
            "since_at": rfc3339(one.since_at),
            "deadline_at": rfc3339(one.deadline_at),
            "reason": reason,
            "outcome": None if record.outcome is None else record.outcome.value,
            "released": one.released,
            "ready_at": rfc3339(one.ready_at),
            "in_flight": self.in_flight.get(one.id, 0),
            "error": reason if failed else None,
        }


class Services:
    def __init__(
        self,
        context: Context,
        nodes: Nodes,
        access: Access,
        load: Load,
        estimates: Estimates,
        losses: Losses,
    ) -> None:
        self._context = context
        self._estimates = estimates
        self._losses = losses
        self._nodes = nodes
        self._access = access
        self._load = load

    # Reading.

    async def page(self, actor: Actor, page: Page) -> tuple[list[ServiceView], str | None]:
        actor.require("inference:read")

        def work(connection: Connection) -> tuple[list[ServiceView], str | None]:
            found = rows.page(connection, actor.project_id, page.after, page.limit)
            shown, cursor = page_of(found, page, lambda row: row.id)
            return self._views(connection, shown), cursor

        return await self._context.database.read(work)

    async def get(self, actor: Actor, service_id: str) -> ServiceView:
        actor.require("inference:read")

        def work(connection: Connection) -> ServiceView:
            return self._views(connection, [_require(connection, actor, service_id)])[0]

        return await self._context.database.read(work)

    def _views(self, connection: Connection, found: Sequence[Service]) -> list[ServiceView]:
        current = rows.current(connection, found)
        models = model_rows.served(connection, [row.model_id for row in found])
        connected = frozenset(link.node_id for link in self._nodes.links())
        return [
            ServiceView(
                service=row,
                attempts=tuple(current[row.id]),
                capabilities=models[row.model_id].served_capabilities,
                in_flight=self._load.in_flight(row.id),
                connected=connected,
            )
            for row in found
        ]

    # Planning.

    async def preview(self, actor: Actor, specification: Specification) -> Planned:
        """What a submission would reserve and run; reserves nothing."""
        actor.require("inference:manage")
        await self._losses.look_at_model(specification.model_id)
        return await self._context.database.read(lambda c: self._plan(c, actor.project_id, specification))

    def _plan(self, connection: Connection, project_id: str, specification: Specification) -> Planned:
        model = model_rows.get(connection, project_id, specification.model_id)
        if model is None:
            raise Refused(
                "not_found", f"There is no model {specification.model_id} in this project.", "model_id"
            )
        if model.record.state is not acquisition.State.READY:
            why = "" if model.record.error is None else f" {model.record.error.message}"
            raise Refused(
                "model_not_ready",
                f"The model is {model.record.state}; a service starts from verified files only.{why}",
                "model_id",
            )
        adapter = registry.adapter(specification.engine)
        record = ModelRecord(model.id, model.revision, model.manifest)
        references = input_references(model.manifest)
        runtime = specification.runtime.to_domain()
        jobs = [adapter.job(specification, record, one, references) for one in specification.placements]
        plans = [
            job.plan(one.node_id, runtime) for job, one in zip(jobs, specification.placements, strict=True)
        ]
        estimates, doubts = self._estimates.of(model.manifest, specification)
        nodes = self._node_views(connection, {plan.node_id for plan in plans})
        verdicts = placement.place(list(zip(plans, estimates, strict=True)), nodes)
        return Planned(specification, model, tuple(jobs), tuple(plans), tuple(verdicts), estimates, doubts)

    def _node_views(self, connection: Connection, node_ids: set[str]) -> dict[str, placement.Node]:
        reserved = node_rows.reserved(connection, sorted(node_ids))
        found = {}
        for node_id in node_ids:
            row = node_rows.get(connection, node_id)
            if row is not None:
                link = self._nodes.link(node_id)
                snapshot = row.snapshot if link is None else link.snapshot  # the newest measurement
                found[node_id] = placement.Node(
                    id=node_id,
                    name=row.name,
                    connected=link is not None,
                    snapshot=None if snapshot is None else Snapshot.from_json(snapshot),
                    reserved=reserved[node_id],
                )
        return found

    # Submitting.

    async def create(
        self, actor: Actor, specification: Specification, preview_digest: str | None
    ) -> ServiceView:
        """The service with every replica planned, or nothing. Raises Refused."""
        actor.require(*START_SCOPES)
        await self._losses.look_at_model(specification.model_id)
        now, service_id = self._context.now(), self._context.new_id()

        def work(tx: Transaction) -> ServiceView:
            planned = self._accepted(tx, actor.project_id, specification, preview_digest)
            if rows.by_alias(tx.connection, actor.project_id, specification.alias) is not None:
                raise _alias_taken(specification.alias)
            record, _ = service.advance(service.Record(), service.Start())
            row = Service(
                id=service_id,
                project_id=actor.project_id,
                alias=specification.alias,
                model_id=specification.model_id,
                record=record,
                spec=specification.as_json(),
                drain_until=None,
                created_at=now,
                updated_at=now,
            )
            rows.add(tx, row)
            self._plan_replicas(tx, row, planned)
            return self._views(tx.connection, [row])[0]

        return await self._context.database.write(work)

    def _accepted(
        self, tx: Transaction, project_id: str, specification: Specification, preview_digest: str | None
    ) -> Planned:
        """The plans, none of them refused, with their nodes held until the transaction ends."""
        node_rows.lock(tx, sorted({one.node_id for one in specification.placements}))
        planned = self._plan(tx.connection, project_id, specification)
        if preview_digest is not None and preview_digest != planned.preview_digest:
            raise Refused(
                "preview_changed",
                "What would run differs from the preview that was accepted; look at the new one.",
                beside={"preview": planned.as_json()},
            )
        problems = [problem for verdict in planned.verdicts for problem in verdict.problems]
        if problems:
            raise Refused(
                "does_not_fit",
                " ".join(dict.fromkeys(problem.message for problem in problems)),
                details={"problems": [problem.as_json() for problem in problems]},
                beside={"preview": planned.as_json()},
            )
        self._hold_inputs(tx, project_id, planned)
        return planned

    def _hold_inputs(self, tx: Transaction, project_id: str, planned: Planned) -> None:
        """Before anything is written: an eviction at the same moment comes first, or finds the attempts."""
        digests = {entry.sha256 for plan in planned.plans for entry in plan.inputs}
        if not eviction.use(tx, project_id, digests, self._context.now()):
            raise Refused(
                "model_not_ready",
                "A file that the replicas would read is not there, verified; read the model again.",
                "model_id",
            )

    def _plan_replicas(self, tx: Transaction, row: Service, planned: Planned) -> None:
        """One workload and its first attempt per placement, of the service's generation."""
        now = self._context.now()
        for index, (job, plan) in enumerate(zip(planned.jobs, planned.plans, strict=True)):
            workload_id = self._context.new_id()
            rows.add_workload(
                tx,
                id=workload_id,
                project_id=row.project_id,
                service_id=row.id,
                generation=row.record.generation,
                replica=index,
                node_id=plan.node_id,
                plan=plan.as_json(),
                plan_digest=plan.digest,
                readiness={"path": job.readiness.path, "body": dict(job.readiness.body)},
                created_at=now,
            )
            self.add_attempt(tx, workload_id)

    def add_attempt(self, tx: Transaction, workload_id: str) -> None:
        """Plan the next attempt at a workload. Its time begins when it is sent to its node."""
        rows.add_attempt(
            tx, attempt_id=self._context.new_id(), workload_id=workload_id, now=self._context.now()
        )

    async def replace(
        self,
        actor: Actor,
        service_id: str,
        revision: int,
        specification: Specification,
        *,
        acknowledge_unknown: bool,
    ) -> ServiceView:
        """Another specification for a stopped service, and its next generation. Raises Refused."""
        actor.require(*START_SCOPES)
        await self._losses.look_at_model(specification.model_id)

        def work(tx: Transaction) -> ServiceView:
            row = _require(tx.connection, actor, service_id)
            check_revision(row.record.revision, revision)
            self._check_start(tx, row, acknowledge_unknown=acknowledge_unknown)
            other = rows.by_alias(tx.connection, actor.project_id, specification.alias)
            if other is not None and other.id != service_id:
                raise _alias_taken(specification.alias)
            planned = self._accepted(tx, actor.project_id, specification, None)
            after = replace(
                row,
                alias=specification.alias,
                model_id=specification.model_id,
                spec=specification.as_json(),
            )
            return self._start(tx, row, after, service.Replace(), planned)

        return await self._context.database.write(work)

    # Control.

    async def control(
        self, actor: Actor, service_id: str, action: str, revision: int, acknowledge_unknown: bool | None
    ) -> ServiceView | None:
        """The service after an operator's action; None once it was removed. Raises Refused."""
        actor.require(*(START_SCOPES if action == "start" else STOP_SCOPES))
        if action not in ACTIONS:
            raise Refused("not_found", f"The actions are {', '.join(ACTIONS)}.", "action")
        if acknowledge_unknown is not None and action != "start":
            raise invalid("acknowledge_unknown belongs to start only.", "acknowledge_unknown")
        if action == "start":
            stored = await self._context.database.read(lambda c: _require(c, actor, service_id))
            await self._losses.look_at_model(stored.model_id)

        def work(tx: Transaction) -> ServiceView | None:
            row = _require(tx.connection, actor, service_id)
            check_revision(row.record.revision, revision)
            if action == "start":
                self._check_start(tx, row, acknowledge_unknown=bool(acknowledge_unknown))
                specification = Specification.model_validate(row.spec)
                planned = self._accepted(tx, actor.project_id, specification, None)
                return self._start(tx, row, row, service.Start(), planned)
            if action == "remove":
                self._remove(tx, row)
                return None
            return self._wind_down(tx, row, service.Drain() if action == "drain" else service.Stop())

        view = await self._context.database.write(work)
        if view is None:
            await self._access.refresh()  # its tokens are gone before the answer says so
        return view

    def _check_start(self, tx: Transaction, row: Service, *, acknowledge_unknown: bool) -> None:
        current = rows.current(tx.connection, [row])[row.id]
        held = {one.id: one for one in [*current, *rows.unreleased(tx.connection, [row.id])[row.id]]}
        replicas = [one.as_replica() for one in held.values()]
        service.check_start(row.record, replicas, acknowledge_unknown=acknowledge_unknown)

    def _start(
        self, tx: Transaction, before: Service, after: Service, event: service.Event, planned: Planned
    ) -> ServiceView:
        record, _ = service.advance(before.record, event)
        after = replace(after, record=record, drain_until=None, updated_at=self._context.now())
        _put(tx, before, after)
        self._plan_replicas(tx, after, planned)
        return self._views(tx.connection, [after])[0]

    def _wind_down(self, tx: Transaction, row: Service, event: service.Event) -> ServiceView:
        try:
            record, _ = service.advance(row.record, event)
        except IllegalTransition:
            raise service.refuse_action(row.record, type(event).__name__.lower()) from None
        now = self._context.now()
        until = row.drain_until
        if isinstance(event, service.Drain) and until is None:
            until = now + row.spec["deadline_seconds"]
        after = replace(row, record=record, drain_until=until, updated_at=now)
        if record != row.record:
            _put(tx, row, after)
        return self._views(tx.connection, [after])[0]

    def _remove(self, tx: Transaction, row: Service) -> None:
        if row.record.state not in service.ENDED:
            raise Refused(
                "service_not_stopped", f"The service is {row.record.state}; stop it before removing it."
            )
        held = rows.unreleased(tx.connection, [row.id])[row.id]
        if held:
            raise Refused(
                "attempt_not_released",
                "Attempts still hold their reservations: " + ", ".join(one.id for one in held) + ".",
                retry_after_seconds=1,
                details={"attempts": [one.id for one in held]},
            )
        access_rows.revoke_tokens(tx, self._context.now(), service_id=row.id)
        rows.remove(tx, row.id)

    # Beside.

    async def create_token(self, actor: Actor, service_id: str, lifetime: int, origin: str) -> dict[str, Any]:
        """A token bound to this service. `origin` is how the caller reaches us."""
        actor.require("inference:manage", "inference:invoke", "tokens:manage")
        row = await self._context.database.read(lambda c: _require(c, actor, service_id))
        token = await self._access.create_service_token(actor, service_id, row.alias, lifetime)
        return {**token, "base_url": f"{origin}/api/v1/inference/{service_id}/v1"}

    async def log(self, actor: Actor, service_id: str, replica: int) -> dict[str, Any]:
        """The newest part of the log of a replica's current attempt. Raises Refused."""
        actor.require("jobs:logs")

        def work(connection: Connection) -> list[Attempt]:
            row = _require(connection, actor, service_id)
            return rows.current(connection, [row])[row.id]

        attempts = await self._context.database.read(work)
        found = [one for one in attempts if one.replica == replica]
        if not found:
            raise Refused("not_found", f"The service has replicas 0 to {len(attempts) - 1}.", "replica")
        link = self._nodes.link(found[0].node_id)
        if link is None:
            raise Refused(
                "executor_unavailable", "The replica's node is not connected.", retry_after_seconds=1
            )
        text, truncated = await link.log(found[0].fence)
        return {"attempt_id": found[0].id, "text": text, "truncated": truncated}


def _disconnected(one: Attempt) -> Reason:
    message = f"Node {one.node_id} is not connected; its replica takes no requests until it is."
    return Reason("node_disconnected", message)


def _require(connection: Connection, actor: Actor, service_id: str) -> Service:
    row = rows.get(connection, actor.project_id, service_id)
    if row is None:
        raise not_found("service", service_id)
    return row


def _put(tx: Transaction, before: Service, after: Service) -> None:
    if not rows.put(tx, before, after):
        raise Refused(
            "revision_conflict", "The service changed meanwhile; read it again and decide anew.", "revision"
        )


def _alias_taken(alias: str) -> Refused:
    return Refused(
        "alias_taken", f"Another service of this project is called {alias!r}; choose another alias.", "alias"
    )
