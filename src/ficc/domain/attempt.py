"""An attempt: one try at running a workload on a node.

The executor's ledger holds the truth and the controller a mirror; both advance by this table. The rules
that matter: the intent to start is recorded before anything starts, and an attempt whose start was intended
but whose end nobody observed has the outcome `unknown`, never a guess. Capacity is given back only by
proof of cleanup (`CleanUp`) or by what stands in for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from ficc.domain.errors import Reason
from ficc.domain.lifecycle import next_state


class State(StrEnum):
    PLANNED = "planned"  # recorded by the controller, not yet admitted by an executor
    ADMITTED = "admitted"  # reservation held
    STAGING = "staging"  # inputs arriving
    PREPARED = "prepared"  # could start at once
    STARTING = "starting"  # start intent recorded, sandbox being made
    RUNNING = "running"  # the process was seen
    STOPPING = "stopping"
    FINISHED = "finished"  # it has an outcome; its reservation is still held
    RELEASED = "released"  # nothing of it is left


class Outcome(StrEnum):
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    UNKNOWN = "unknown"


# Events.


@dataclass(frozen=True, slots=True)
class Admit:
    """The executor reserved what the plan asks for."""


@dataclass(frozen=True, slots=True)
class Reject:
    """The executor refused the plan; nothing was reserved."""

    reason: Reason


@dataclass(frozen=True, slots=True)
class BeginStaging:
    pass


@dataclass(frozen=True, slots=True)
class Prepare:
    """Every input is at hand and the image is known."""


@dataclass(frozen=True, slots=True)
class IntendStart:
    """To be durable before the sandbox is made."""


@dataclass(frozen=True, slots=True)
class Run:
    """The process was seen, with the limits and privileges that the plan asks for."""


@dataclass(frozen=True, slots=True)
class RequestStop:
    """Somebody with authority ends the attempt; it will end `cancelled`, or `failed` with this reason
    where the cause is a fault (a lapsed lease)."""

    reason: Reason
    outcome: Outcome = Outcome.CANCELLED

    def __post_init__(self) -> None:
        if self.outcome not in (Outcome.CANCELLED, Outcome.FAILED):
            raise ValueError(f"nobody can ask for the outcome {self.outcome.value}")


@dataclass(frozen=True, slots=True)
class End:
    """The end was observed: the process exited by itself, was killed, or never came to be."""

    outcome: Outcome
    reason: Reason

    def __post_init__(self) -> None:
        if self.outcome is Outcome.UNKNOWN:
            raise ValueError("an observed end is never unknown")


@dataclass(frozen=True, slots=True)
class LoseTrack:
    """Nobody observed the end and nobody will: the machine rebooted, or its lease ran out unseen."""

    reason: Reason


@dataclass(frozen=True, slots=True)
class Quarantine:
    """What is left of it cannot be removed, for this reason; its reservation stays held meanwhile."""

    reason: Reason


@dataclass(frozen=True, slots=True)
class CleanUp:
    """Proof that no process, mount, cgroup or socket of the attempt is left."""


Event = (
    Admit
    | Reject
    | BeginStaging
    | Prepare
    | IntendStart
    | Run
    | RequestStop
    | End
    | LoseTrack
    | Quarantine
    | CleanUp
)
EVENTS: tuple[type, ...] = (
    Admit, Reject, BeginStaging, Prepare, IntendStart, Run, RequestStop, End, LoseTrack, Quarantine, CleanUp,
)  # fmt: skip

_S = State
TRANSITIONS: Mapping[tuple[State, type], State] = {
    (_S.PLANNED, Admit): _S.ADMITTED,
    (_S.PLANNED, Reject): _S.FINISHED,
    (_S.PLANNED, End): _S.FINISHED,
    (_S.PLANNED, LoseTrack): _S.FINISHED,
    (_S.ADMITTED, BeginStaging): _S.STAGING,
    (_S.ADMITTED, RequestStop): _S.STOPPING,
    (_S.ADMITTED, End): _S.FINISHED,
    (_S.ADMITTED, LoseTrack): _S.FINISHED,
    (_S.STAGING, Prepare): _S.PREPARED,
    (_S.STAGING, RequestStop): _S.STOPPING,
    (_S.STAGING, End): _S.FINISHED,
    (_S.STAGING, LoseTrack): _S.FINISHED,
    (_S.PREPARED, IntendStart): _S.STARTING,
    (_S.PREPARED, RequestStop): _S.STOPPING,
    (_S.PREPARED, End): _S.FINISHED,
    (_S.PREPARED, LoseTrack): _S.FINISHED,
    (_S.STARTING, Run): _S.RUNNING,
    (_S.STARTING, RequestStop): _S.STOPPING,
    (_S.STARTING, End): _S.FINISHED,
    (_S.STARTING, LoseTrack): _S.FINISHED,
    (_S.RUNNING, RequestStop): _S.STOPPING,
    (_S.RUNNING, End): _S.FINISHED,
    (_S.RUNNING, LoseTrack): _S.FINISHED,
    (_S.STOPPING, RequestStop): _S.STOPPING,
    (_S.STOPPING, End): _S.FINISHED,
    (_S.STOPPING, LoseTrack): _S.FINISHED,
    (_S.FINISHED, Quarantine): _S.FINISHED,
    (_S.FINISHED, CleanUp): _S.RELEASED,
}

LIVE = frozenset(_S) - {_S.FINISHED, _S.RELEASED}
"""States in which the attempt may still run or come to run."""


@dataclass(frozen=True, slots=True)
class Record:
    """`ending` is set while STOPPING: how the attempt will have ended once its end is observed. `quarantine` says why
    an attempt that ended is not released yet."""

    state: State = State.PLANNED
    start_intended: bool = False
    outcome: Outcome | None = None
    reason: Reason | None = None
    ending: Outcome | None = None
    quarantine: Reason | None = None


def advance(record: Record, event: Event) -> Record:
    """The record after the event. Raises IllegalTransition for an event that the state does not admit.

    What is to be done follows from the record alone, so that whoever reads it again after a crash does the same.
    """
    after = replace(record, state=next_state(TRANSITIONS, record.state, event))
    match event:
        case Admit() | BeginStaging() | Prepare() | Run():
            return after
        case Quarantine(reason):
            return replace(after, quarantine=reason)
        case CleanUp():
            return replace(after, quarantine=None)
        case Reject(reason):
            return replace(after, outcome=Outcome.FAILED, reason=reason)
        case IntendStart():
            return replace(after, start_intended=True)
        case RequestStop(reason, outcome):
            if record.state is State.STOPPING:
                return record  # the first cause stands
            return replace(after, ending=outcome, reason=reason)
        case End(outcome, reason):
            if record.ending is not None:
                outcome, reason = record.ending, record.reason or reason
            return replace(after, outcome=outcome, reason=reason)
        case LoseTrack(reason):
            outcome = Outcome.UNKNOWN if record.start_intended else Outcome.CANCELLED
            return replace(after, outcome=outcome, reason=reason)


_ORDER = {state: place for place, state in enumerate(State)}


def later(one: Record, other: Record) -> Record:
    """Whichever of two reports of one attempt is further on, for a listener to whom they may come out of
    order: a lifecycle never goes back."""
    return other if _progress(other) >= _progress(one) else one


def _progress(record: Record) -> tuple[int, bool]:
    return _ORDER[record.state], record.quarantine is not None


REPLICA_STATES = (
    "queued", "staging", "preparing", "starting", "ready", "draining", "stopping", "finished",
)  # fmt: skip


def replica_state(state: State, *, ready: bool, draining: bool) -> str:
    """What people see of a replica, from its attempt."""
    if state is State.RUNNING:
        if not ready:
            return "starting"
        return "draining" if draining else "ready"
    return {
        State.PLANNED: "queued",
        State.ADMITTED: "staging",
        State.STAGING: "staging",
        State.PREPARED: "preparing",
        State.STARTING: "preparing",
        State.STOPPING: "stopping",
    }.get(state, "finished")


def as_json(record: Record) -> dict[str, Any]:
    return {
        "state": record.state.value,
        "start_intended": record.start_intended,
        "outcome": None if record.outcome is None else record.outcome.value,
        "reason": None if record.reason is None else record.reason.as_json(),
        "ending": None if record.ending is None else record.ending.value,
        "quarantine": None if record.quarantine is None else record.quarantine.as_json(),
    }


def from_json(document: Mapping[str, Any]) -> Record:
    reason, quarantine = document.get("reason"), document.get("quarantine")
    outcome, ending = document.get("outcome"), document.get("ending")
    return Record(
        state=State(document["state"]),
        start_intended=document["start_intended"],
        outcome=None if outcome is None else Outcome(outcome),
        reason=None if reason is None else Reason(reason["code"], reason["message"]),
        ending=None if ending is None else Outcome(ending),
        quarantine=None if quarantine is None else Reason(quarantine["code"], quarantine["message"]),
    )
