"""A service and its replicas as their readers see them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ficc.controller.operations.restarts import Retry
from ficc.controller.store.attempts import Attempt
from ficc.controller.store.services import Service
from ficc.domain import attempt, service
from ficc.domain.errors import Reason
from ficc.protocol.http_api import rfc3339


@dataclass(frozen=True, slots=True)
class ServiceView:
    """A service as its readers see it."""

    service: Service
    attempts: tuple[Attempt, ...]
    capabilities: tuple[str, ...]
    in_flight: Mapping[str, int]
    connected: frozenset[str]
    """Nodes of its replicas that are connected now."""
    retries: Mapping[str, Retry] = field(default_factory=dict)
    """What follows attempts that ended, by their ids."""
    progress: Mapping[str, str] = field(default_factory=dict)
    """What engines that load said last, by the ids of their attempts."""

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
        state = attempt.replica_state(
            record.state, ready=one.ready, draining=self.service.record.state is service.State.DRAINING
        )
        reason = self._reason(one, state)
        failed = record.outcome in (attempt.Outcome.FAILED, attempt.Outcome.UNKNOWN)
        return {
            "workload_id": one.workload_id,
            "node_id": one.node_id,
            "attempt_id": one.id,
            "attempt": one.number,
            "generation": one.generation,
            "plan_digest": one.plan_digest,
            "model_revision": one.plan.get("model_revision"),
            "state": state,
            "since_at": rfc3339(one.since_at),
            "deadline_at": rfc3339(one.deadline_at),
            "reason": None if reason is None else reason.as_json(),
            "outcome": None if record.outcome is None else record.outcome.value,
            "released": one.released,
            "ready_at": rfc3339(one.ready_at),
            "in_flight": self.in_flight.get(one.id, 0),
            "error": record.reason.as_json() if failed and record.reason is not None else None,
        }

    def _reason(self, one: Attempt, state: str) -> Reason | None:
        """Why a replica is as it is, or what becomes of it."""
        if self._unreached(one):
            return _disconnected(one)
        if one.record.quarantine is not None:
            return one.record.quarantine
        if one.id in self.retries and self.service.record.state not in service.ENDED:
            return _pending(one, self.retries[one.id])
        if state == "starting" and one.id in self.progress:
            return Reason("engine_loading", self.progress[one.id])
        return one.record.reason


def _pending(one: Attempt, retry: Retry) -> Reason:
    again = retry.again
    when = f"at {rfc3339(retry.at)}" if again.delay_seconds else "at once"
    if not one.released:
        when += ", once nothing is left of this attempt"
    count = f"interruption {again.in_a_row}"
    if again.bound is not None:
        count = f"failure {again.in_a_row} of at most {again.bound}"
    why = "" if one.record.reason is None else f" {one.record.reason.message}"
    return Reason("restart_pending", f"It is tried again {when}, after {count} in a row.{why}")


def _disconnected(one: Attempt) -> Reason:
    message = f"Node {one.node_id} is not connected; its replica takes no requests until it is."
    return Reason("node_disconnected", message)
