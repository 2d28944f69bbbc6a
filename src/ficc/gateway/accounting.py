"""The record of an invocation that has ended."""

from __future__ import annotations

from ficc.domain import usage
from ficc.domain.errors import Refused
from ficc.gateway.invocation import Invocation
from ficc.protocol import http_api

PATH_CHARACTERS_MAX = 64
GONE = http_api.CODES["client_gone"].status


def record_of(invocation: Invocation, why: Refused | None, now: float) -> usage.Record:
    """What is kept of it. `why` ended it early; `now` is the loop's time."""
    tally, pull, replica = invocation.tally, invocation.pull, invocation.replica
    progress = usage.Progress(
        invocation.computing,
        invocation.status,
        invocation.whole,
        None if tally is None else tally.events,
        invocation.counted(),
    )
    outcome, code = usage.outcome_of(why, progress)
    counted, tokens = usage.tokens_of(outcome, progress)
    status = invocation.status
    if status is None:
        status = GONE if why is None else http_api.status_of(why)
    first_at = None if pull is None else pull.first_at
    actor = invocation.actor
    return usage.Record(
        invocation.id,
        invocation.request_id,
        actor.project_id,
        None if invocation.alias is None else invocation.service_id,
        invocation.alias,
        actor.kind,
        actor.authority_id,
        actor.subject_id,
        invocation.path[:PATH_CHARACTERS_MAX],
        outcome,
        code,
        status,
        int(invocation.started_at // usage.SECONDS_PER_DAY),
        invocation.started_at,
        invocation.queue_seconds * 1000,
        None if first_at is None else (first_at - invocation.began) * 1000,
        (now - invocation.began) * 1000,
        counted,
        tokens.prompt,
        tokens.completion,
        None if replica is None else replica.model_revision,
        None if replica is None else replica.fence.plan_digest,
        None if replica is None else replica.fence.generation,
        None if replica is None else replica.attempt_id,
    )
