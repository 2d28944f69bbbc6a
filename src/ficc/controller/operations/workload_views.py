"""A workload as its readers see it: a job, or what carries a replica."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ficc.controller.store.workloads import Seen, Workload
from ficc.domain import workload
from ficc.protocol.http_api import rfc3339


@dataclass(frozen=True, slots=True)
class WorkloadView:
    """`attempts` are the newest ones, newest first; `plan` is there where the workload is shown in full."""

    workload: Workload
    attempts: tuple[Seen, ...]
    plan: Mapping[str, Any] | None = None

    def as_json(self) -> dict[str, Any]:
        row, newest = self.workload, self.attempts[0].record
        job, is_replica = row.record, row.record is None
        state = workload.state_of(newest) if job is None else job.state
        outcome = newest.outcome if job is None else job.outcome
        reason = newest.reason if job is None else job.reason
        document = {
            "id": row.id,
            "project_id": row.project_id,
            "node_id": row.node_id,
            "revision": row.revision,
            "state": state.value,
            "outcome": None if outcome is None else outcome.value,
            "reason": None if reason is None else reason.as_json(),
            "released": all(one.released for one in self.attempts),
            "plan_digest": row.plan_digest,
            "sensitive": row.sensitive,
            "attempts": [_attempt(one) for one in self.attempts],
            "deadline_seconds": row.deadline_seconds,
            "deadline_at": rfc3339(row.deadline_at),
            "idempotency_key": row.idempotency_key,
            "service_id": row.service_id,
            "generation": row.generation if is_replica else None,
            "replica": row.replica if is_replica else None,
            "model_revision": row.model_revision,
            "created_at": rfc3339(row.created_at),
        }
        if self.plan is not None:
            document["plan"] = _shown(self.plan)
        return document


def _attempt(one: Seen) -> dict[str, Any]:
    record = one.record
    return {
        "attempt_id": one.id,
        "attempt": one.number,
        "state": record.state.value,
        "outcome": None if record.outcome is None else record.outcome.value,
        "reason": None if record.reason is None else record.reason.as_json(),
        "released": one.released,
        "created_at": rfc3339(one.created_at),
        "since_at": rfc3339(one.since_at),
    }


def _shown(plan: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a sensitive plan's environment never come back."""
    environment = plan["environment"]
    if plan["sensitive"]:
        environment = dict.fromkeys(environment)
    return {**plan, "environment": environment}
