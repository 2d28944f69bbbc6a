"""When replicas whose attempts ended are tried again, by their service's policy and their history."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection

from ficc.controller.store import histories
from ficc.controller.store.attempts import Attempt
from ficc.controller.store.services import Service
from ficc.domain import restart, service
from ficc.domain.restart import Again, Policy
from ficc.settings import Lifecycle


@dataclass(frozen=True, slots=True)
class Retry:
    """A replica is tried again after an attempt. `at` is by the wall clock, for people."""

    again: Again
    at: float


def retries(
    connection: Connection, lifecycle: Lifecycle, found: Iterable[tuple[Service, Sequence[Attempt]]]
) -> dict[str, Retry]:
    """Of services with the current attempts of their replicas: what follows those that ended, by their ids."""
    ended = [
        (row, one)
        for row, current in found
        for one in current
        if row.record.desired is service.Desired.RUNNING and one.record.outcome is not None
    ]
    pasts = histories.pasts(connection, {one.workload_id for _, one in ended})
    planned = {}
    for row, one in ended:
        again = restart.decide(
            policy_of(row, lifecycle),
            pasts[one.workload_id],
            acknowledge_reboot=lifecycle.acknowledge_unknown_on_boot,
        )
        if again is not None:
            planned[one.id] = Retry(again, one.since_at + again.delay_seconds)
    return planned


def policy_of(row: Service, lifecycle: Lifecycle) -> Policy:
    """What the service's specification says, and for what it leaves out the settings."""
    given = row.spec.get("restart")
    backoff = given["on_failure"] if isinstance(given, Mapping) else {}
    defaults = {
        "delay_seconds": lifecycle.restart_delay_seconds,
        "factor": lifecycle.restart_factor,
        "delay_seconds_max": lifecycle.restart_delay_seconds_max,
        "failures_max": lifecycle.restart_failures_max,
        "stable_seconds": lifecycle.restart_stable_seconds,
    }
    own = {name: value for name, value in backoff.items() if value is not None}
    return Policy(on_failure=given != "never", **{**defaults, **own})
