"""Services: preview, create, read, replace, control, and their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy import Connection

from ficc.controller.operations.access import Access
from ficc.controller.operations.context import Context, Page, check_revision, not_found, page_of
from ficc.controller.operations.losses import Losses
from ficc.controller.operations.planning import Planned, Planning
from ficc.controller.operations.ports import Load, Nodes
from ficc.controller.operations.progress import Progress
from ficc.controller.operations.restarts import retries
from ficc.controller.operations.service_views import ServiceView
from ficc.controller.store import access as access_rows
from ficc.controller.store import attempts as attempt_rows
from ficc.controller.store import audit, histories
from ficc.controller.store import models as model_rows
from ficc.controller.store import services as rows
from ficc.controller.store.attempts import Attempt
from ficc.controller.store.database import Transaction
from ficc.controller.store.histories import Kept
from ficc.controller.store.services import Service
from ficc.domain import service
from ficc.domain.access import Actor
from ficc.domain.errors import Refused, invalid
from ficc.domain.lifecycle import IllegalTransition
from ficc.inference.schema import Specification
from ficc.protocol.http_api import rfc3339

START_SCOPES = ("inference:manage", "jobs:execute", "contributors:read", "models:read")
STOP_SCOPES = ("inference:manage", "jobs:cancel")
LOGS_KEPT = 5
"""Attempts at each replica whose logs are read here; executors keep them at least so long."""
ACTIONS = ("start", "drain", "stop", "remove")


class Services:
    def __init__(
        self,
        context: Context,
        nodes: Nodes,
        access: Access,
        load: Load,
        planning: Planning,
        losses: Losses,
        progress: Progress,
    ) -> None:
        self._context = context
        self._planning = planning
        self._losses = losses
        self._nodes = nodes
        self._access = access
        self._load = load
        self._progress = progress

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
        current = attempt_rows.current(connection, found)
        models = model_rows.served(connection, [row.model_id for row in found])
        connected = frozenset(link.node_id for link in self._nodes.links())
        planned = retries(
            connection, self._context.settings.lifecycle, [(row, current[row.id]) for row in found]
        )
        said = {one.id: self._progress.of(one.id) for row in found for one in current[row.id]}
        return [
            ServiceView(
                service=row,
                attempts=tuple(current[row.id]),
                capabilities=models[row.model_id].served_capabilities,
                in_flight=self._load.in_flight(row.id),
                connected=connected,
                retries=planned,
                progress={attempt_id: line for attempt_id, line in said.items() if line},
            )
            for row in found
        ]

    # Planning.

    async def preview(self, actor: Actor, specification: Specification) -> Planned:
        """What a submission would reserve and run; reserves nothing."""
        actor.require("inference:manage")
        await self._losses.look_at_model(specification.model_id)
        return await self._context.database.read(
            lambda c: self._planning.plan(c, actor.project_id, specification)
        )

    # Submitting.

    async def create(
        self, actor: Actor, specification: Specification, preview_digest: str | None
    ) -> ServiceView:
        """The service with every replica planned, or nothing. Raises Refused."""
        actor.require(*START_SCOPES)
        await self._losses.look_at_model(specification.model_id)
        now, service_id = self._context.now(), self._context.new_id()

        def work(tx: Transaction) -> ServiceView:
            planned = self._planning.accepted(tx, actor.project_id, specification, preview_digest)
            if rows.by_alias(tx.connection, actor.project_id, specification.alias) is not None:
                raise _alias_taken(specification.alias)
            record = service.advance(service.Record(), service.Start())
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

    def _plan_replicas(self, tx: Transaction, row: Service, planned: Planned) -> None:
        """One workload and its first attempt per placement, of the service's generation."""
        now = self._context.now()
        for index, (job, plan) in enumerate(zip(planned.jobs, planned.plans, strict=True)):
            workload_id = self._context.new_id()
            attempt_rows.add_workload(
                tx,
                id=workload_id,
                project_id=row.project_id,
                service_id=row.id,
                generation=row.record.generation,
                replica=index,
                node_id=plan.node_id,
                plan=plan.as_json(),
                plan_digest=plan.digest,
                readiness=job.readiness_document(),
                created_at=now,
            )
            self.add_attempt(tx, workload_id)

    def add_attempt(self, tx: Transaction, workload_id: str) -> None:
        """Plan the next attempt at a workload. Its time begins when it is sent to its node."""
        attempt_rows.add(
            tx, attempt_id=self._context.new_id(), workload_id=workload_id, now=self._context.now()
        )
        histories.prune_attempts(tx, workload_id)

    def note_acknowledgement(self, tx: Transaction, row: Service, one: Attempt) -> None:
        """Record that a setting acknowledged the unknown outcome of an attempt, so that another may follow."""
        audit.add(
            tx,
            entry_id=self._context.new_id(),
            at=self._context.now(),
            actor=Actor("setting", row.id, row.id, row.project_id, frozenset()),
            request_id=one.id,
            action="service.acknowledge_unknown",
            object_kind="service",
            object_id=row.id,
            outcome="done",
            details={"setting": "lifecycle.acknowledge_unknown_on_boot", "attempt_id": one.id},
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
            planned = self._planning.accepted(tx, actor.project_id, specification, None)
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
                planned = self._planning.accepted(tx, actor.project_id, specification, None)
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
        current = attempt_rows.current(tx.connection, [row])[row.id]
        held = {one.id: one for one in [*current, *attempt_rows.unreleased(tx.connection, [row.id])[row.id]]}
        replicas = [one.as_replica() for one in held.values()]
        service.check_start(row.record, replicas, acknowledge_unknown=acknowledge_unknown)

    def _start(
        self, tx: Transaction, before: Service, after: Service, event: service.Event, planned: Planned
    ) -> ServiceView:
        record = service.advance(before.record, event)
        after = replace(after, record=record, drain_until=None, updated_at=self._context.now())
        _put(tx, before, after)
        self._plan_replicas(tx, after, planned)
        histories.prune_generations(tx, after.id)
        return self._views(tx.connection, [after])[0]

    def _wind_down(self, tx: Transaction, row: Service, event: service.Event) -> ServiceView:
        try:
            record = service.advance(row.record, event)
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
        held = attempt_rows.unreleased(tx.connection, [row.id])[row.id]
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

    async def log(
        self, actor: Actor, service_id: str, replica: int, number: int | None, generation: int | None
    ) -> dict[str, Any]:
        """The newest part of the log of one of a replica's latest attempts: of the newest, or of that number in
        a generation (in the current one, if none is named). Raises Refused."""
        actor.require("jobs:logs")

        def work(connection: Connection) -> tuple[Service, list[Kept]]:
            row = _require(connection, actor, service_id)
            return row, histories.of_replica(connection, service_id, replica, LOGS_KEPT)

        row, kept = await self._context.database.read(work)
        if not kept:
            raise Refused("not_found", f"The service has no replica {replica}; they count from 0.", "replica")
        wanted = generation or row.record.generation
        chosen = [
            one
            for one in kept
            if (number is None or one.number == number)
            and ((number is None and generation is None) or one.fence.generation == wanted)
        ]
        if not chosen:
            raise Refused(
                "not_found",
                f"Logs are kept of the latest {LOGS_KEPT} attempts at each replica; here of "
                + ", ".join(f"{one.number} (generation {one.fence.generation})" for one in kept)
                + ".",
                "attempt",
            )
        link = self._nodes.link(chosen[0].node_id)
        if link is None:
            raise Refused(
                "executor_unavailable", "The replica's node is not connected.", retry_after_seconds=1
            )
        text, truncated = await link.log(chosen[0].fence)
        return {
            "attempt_id": chosen[0].fence.attempt_id,
            "attempt": chosen[0].number,
            "generation": chosen[0].fence.generation,
            "text": text,
            "truncated": truncated,
            "attempts": [_kept(one) for one in kept],
        }


def _kept(one: Kept) -> dict[str, Any]:
    record = one.record
    return {
        "attempt_id": one.fence.attempt_id,
        "attempt": one.number,
        "generation": one.fence.generation,
        "outcome": None if record.outcome is None else record.outcome.value,
        "reason": None if record.reason is None else record.reason.as_json(),
        "since_at": rfc3339(one.since_at),
    }


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
