"""A batch job: a finite command that runs once on a node, as a workload without a service.

Nothing here is run again by itself: a command may have done half of its work, so only an operator says `Retry`, and
of an attempt whose end nobody saw only with open eyes. The outcome is always that of the newest attempt: a cancelled
job that had ended by itself before it could be stopped has succeeded, or failed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from ficc.domain import attempt
from ficc.domain.attempt import Outcome
from ficc.domain.errors import Reason, Refused
from ficc.domain.lifecycle import next_state

DEADLINE_SECONDS_MAX = 30 * 86_400


class State(StrEnum):
    QUEUED = "queued"  # its attempt is not running yet
    RUNNING = "running"
    STOPPING = "stopping"  # somebody, or its deadline, wants it to end
    ENDED = "ended"  # it has an outcome


# Events.


@dataclass(frozen=True, slots=True)
class Began:
    """The process of its attempt was seen."""


@dataclass(frozen=True, slots=True)
class Cancel:
    """An operator wants it to end."""


@dataclass(frozen=True, slots=True)
class Expire:
    """Its deadline passed."""


@dataclass(frozen=True, slots=True)
class End:
    """Its attempt has an outcome. Of a job that has ended: what nobody could know is known after all."""

    outcome: Outcome
    reason: Reason | None


@dataclass(frozen=True, slots=True)
class Retry:
    """An operator wants another attempt at the same plan."""


Event = Began | Cancel | Expire | End | Retry
EVENTS: tuple[type, ...] = (Began, Cancel, Expire, End, Retry)

_S = State
TRANSITIONS: Mapping[tuple[State, type], State] = {
    (_S.QUEUED, Began): _S.RUNNING,
    (_S.QUEUED, Cancel): _S.STOPPING,
    (_S.QUEUED, Expire): _S.STOPPING,
    (_S.QUEUED, End): _S.ENDED,
    (_S.RUNNING, Cancel): _S.STOPPING,
    (_S.RUNNING, Expire): _S.STOPPING,
    (_S.RUNNING, End): _S.ENDED,
    (_S.STOPPING, Cancel): _S.STOPPING,
    (_S.STOPPING, End): _S.ENDED,
    (_S.ENDED, End): _S.ENDED,
    (_S.ENDED, Retry): _S.QUEUED,
}

CANCELLED = Reason("job_cancelled", "The job was cancelled.")
EXPIRED = Reason("deadline_exceeded", "The job did not end within its deadline, so it was stopped.")


@dataclass(frozen=True, slots=True)
class Record:
    """`reason` says while STOPPING why it has to end, and afterwards how it did."""

    state: State = State.QUEUED
    revision: int = 0
    outcome: Outcome | None = None
    reason: Reason | None = None

    @property
    def expired(self) -> bool:
        """Whether it is being ended by its deadline, and so will have failed."""
        return self.state is State.STOPPING and self.reason == EXPIRED


def advance(record: Record, event: Event) -> Record:
    """The record after the event. Raises IllegalTransition.

    An event that changes nothing leaves the revision as it is. What is to be done follows from the record alone: an
    attempt is wanted while it is queued or running.
    """
    after = replace(record, state=next_state(TRANSITIONS, record.state, event))
    match event:
        case Began():
            pass
        case Cancel():
            after = replace(after, reason=record.reason or CANCELLED)  # the first cause stands
        case Expire():
            after = replace(after, reason=EXPIRED)
        case End(outcome, reason):
            if record.outcome in (None, Outcome.UNKNOWN):
                after = replace(after, outcome=outcome, reason=reason)
        case Retry():
            after = replace(after, outcome=None, reason=None)
    if after != record:
        after = replace(after, revision=record.revision + 1)
    return after


def state_of(newest: attempt.Record) -> State:
    """What a workload amounts to by its newest attempt alone: all that is known of a replica's."""
    if newest.outcome is not None:
        return State.ENDED
    if newest.state is attempt.State.STOPPING:
        return State.STOPPING
    return State.RUNNING if newest.state is attempt.State.RUNNING else State.QUEUED


def observe(record: Record, newest: attempt.Record, *, late: bool) -> Event | None:
    """What became of a job, as an event that its state admits, or None when there is nothing to tell. `late`: its
    deadline has passed."""
    if newest.outcome is not None:
        told = (record.outcome, record.reason) == (newest.outcome, newest.reason)
        tells = record.outcome is None or (record.outcome is Outcome.UNKNOWN and not told)
        return End(newest.outcome, newest.reason) if tells else None
    if record.state in (State.STOPPING, State.ENDED):
        return None
    if late:
        return Expire()
    return Began() if record.state is State.QUEUED and newest.state is attempt.State.RUNNING else None


@dataclass(frozen=True, slots=True)
class Held:
    """An attempt that is not released, as a release asks about it."""

    attempt_id: str
    leased: bool
    running: bool
    """Its node is connected and says that it lives."""
    over_in_seconds: float
    """From now until its lease is held to be over; not above zero: it is over."""


def check_retry(
    record: Record, last: attempt.Record, unreleased: Sequence[str], *, acknowledge_unknown: bool
) -> None:
    """Whether a job may be tried again. Raises Refused."""
    if record.state is not State.ENDED:
        raise Refused(
            "action_not_allowed",
            f"The job is {record.state}; it can be tried again once it has ended.",
        )
    if last.outcome is Outcome.UNKNOWN and not acknowledge_unknown:
        raise Refused(
            "unknown_outcome",
            "Nobody can know what the last attempt did, and whether it did all of it. Send acknowledge_unknown: true "
            "to run the command once more from its beginning.",
            "acknowledge_unknown",
        )
    if unreleased:
        raise _not_released(unreleased)


def check_remove(record: Record, unreleased: Sequence[str]) -> None:
    """Whether a job may be removed. Raises Refused."""
    if record.state is not State.ENDED:
        raise Refused("action_not_allowed", f"The job is {record.state}; cancel it before removing it.")
    if unreleased:
        raise _not_released(unreleased)


def _not_released(attempts: Sequence[str]) -> Refused:
    return Refused(
        "attempt_not_released",
        f"The attempt {', '.join(attempts)} still holds its reservation. It is released when its node confirms that "
        "nothing of it is left; if the node will not come back, release the workload once its lease is over.",
        retry_after_seconds=1,
        details={"attempts": list(attempts)},
    )


def check_release(held: Sequence[Held]) -> None:
    """Whether an operator may release these attempts of one workload, without their node's word. Raises Refused."""
    if not held:
        raise Refused("action_not_allowed", "Every attempt of the workload is released already.")
    for one in held:
        if not one.leased:
            raise Refused(
                "action_not_allowed",
                "The attempt was never sent to its node, so nothing runs: cancel the job, or stop the service.",
                details={"attempts": [one.attempt_id]},
            )
        if one.running:
            raise Refused(
                "attempt_not_released",
                "The attempt's node is connected and still has it running. It is released when the node confirms that "
                "nothing of it is left: cancel the job, or stop the service.",
                details={"attempts": [one.attempt_id]},
            )


def longest_lease_seconds(held: Sequence[Held]) -> float:
    """Until the last lease of these attempts is held to be over; not above zero: all are."""
    return max(one.over_in_seconds for one in held)


def lease_not_over(held: Sequence[Held], over_at: str) -> Refused:
    seconds = longest_lease_seconds(held)
    return Refused(
        "lease_not_over",
        f"The node may still run the attempt: its lease is over at {over_at} at the earliest, and later if the node is "
        "heard of meanwhile. Release it then.",
        retry_after_seconds=max(1, int(seconds) + 1),
        details={"attempts": [one.attempt_id for one in held], "lease_over_at": over_at},
    )


def released(record: attempt.Record, reason: Reason) -> attempt.Record:
    """The attempt once an operator stood in for its node's word: without an outcome so far it has an unknown one, if
    its start was intended."""
    if record.outcome is None:
        record = attempt.advance(record, attempt.LoseTrack(reason))
    record = attempt.advance(record, attempt.CleanUp())
    return record
