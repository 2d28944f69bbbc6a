"""A service: what an operator asks to keep running, and what its replicas amount to.

`desired` is changed only by operators. `generation` rises once per start and once per replacement; it
fences everything that belongs to an earlier one. `revision` rises when the specification, the desired
state or the state changes, so that an operator's mutation names what it saw.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from ficc.domain.attempt import Outcome
from ficc.domain.errors import Reason, Refused
from ficc.domain.lifecycle import next_state
from ficc.domain.restart import Again


class State(StrEnum):
    STARTING = "starting"
    READY = "ready"
    DEGRADED = "degraded"
    DRAINING = "draining"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"


class Desired(StrEnum):
    RUNNING = "running"
    STOPPED = "stopped"


# Operators' events.


@dataclass(frozen=True, slots=True)
class Start:
    pass


@dataclass(frozen=True, slots=True)
class Replace:
    """Start the next generation under another specification."""


@dataclass(frozen=True, slots=True)
class Drain:
    pass


@dataclass(frozen=True, slots=True)
class Stop:
    pass


# What the replicas amount to.


@dataclass(frozen=True, slots=True)
class AllReady:
    pass


@dataclass(frozen=True, slots=True)
class SomeReady:
    pass


@dataclass(frozen=True, slots=True)
class NoneReady:
    """None answers yet, but at least one may come to."""


@dataclass(frozen=True, slots=True)
class NoneLeft:
    """Every replica ended, and none is to be tried again."""

    reason: Reason


@dataclass(frozen=True, slots=True)
class Idle:
    """No admitted request is open, or the last deadline passed."""


@dataclass(frozen=True, slots=True)
class AllEnded:
    """Every attempt has an outcome."""


Event = Start | Replace | Drain | Stop | AllReady | SomeReady | NoneReady | NoneLeft | Idle | AllEnded
EVENTS: tuple[type, ...] = (
    Start, Replace, Drain, Stop, AllReady, SomeReady, NoneReady, NoneLeft, Idle, AllEnded,
)  # fmt: skip
OPERATORS: tuple[type, ...] = (Start, Replace, Drain, Stop)

_S = State
TRANSITIONS: Mapping[tuple[State, type], State] = {
    **{
        (state, event): after
        for state in (_S.STARTING, _S.READY, _S.DEGRADED)
        for event, after in (
            (AllReady, _S.READY),
            (SomeReady, _S.DEGRADED),
            (NoneReady, _S.STARTING),
            (NoneLeft, _S.FAILED),
            (Drain, _S.DRAINING),
            (Stop, _S.STOPPING),
        )
    },
    (_S.DRAINING, Drain): _S.DRAINING,
    (_S.DRAINING, Idle): _S.STOPPING,
    (_S.DRAINING, Stop): _S.STOPPING,
    (_S.DRAINING, AllEnded): _S.STOPPED,
    (_S.STOPPING, Stop): _S.STOPPING,
    (_S.STOPPING, AllEnded): _S.STOPPED,
    (_S.STOPPED, Start): _S.STARTING,
    (_S.STOPPED, Replace): _S.STARTING,
    (_S.STOPPED, Stop): _S.STOPPED,
    (_S.FAILED, NoneReady): _S.STARTING,
    (_S.FAILED, Start): _S.STARTING,
    (_S.FAILED, Replace): _S.STARTING,
    (_S.FAILED, Stop): _S.STOPPED,
}

ROUTABLE = frozenset({_S.READY, _S.DEGRADED})
ENDED = frozenset({_S.STOPPED, _S.FAILED})


@dataclass(frozen=True, slots=True)
class Record:
    state: State = State.STOPPED
    desired: Desired = Desired.STOPPED
    generation: int = 0
    revision: int = 0
    reason: Reason | None = None


def advance(record: Record, event: Event) -> Record:
    """The record after the event. Raises IllegalTransition.

    An event that changes nothing leaves the revision as it is. What is to be done follows from the record alone:
    replicas are wanted of its generation unless it is stopping or ended.
    """
    after = replace(record, state=next_state(TRANSITIONS, record.state, event))
    match event:
        case Start() | Replace():
            generation = record.generation + 1
            after = replace(after, desired=Desired.RUNNING, generation=generation, reason=None)
        case Drain() | Stop():
            after = replace(after, desired=Desired.STOPPED)
        case NoneLeft(reason):
            after = replace(after, reason=reason)
        case AllReady() | NoneReady():
            after = replace(after, reason=None)
        case SomeReady() | Idle() | AllEnded():
            pass
    if after != record:
        after = replace(after, revision=record.revision + 1)
    return after


@dataclass(frozen=True, slots=True)
class Replica:
    """One replica as its current attempt has it; `again` once that ended and another is to follow."""

    attempt_id: str
    live: bool
    ready: bool
    released: bool = False
    outcome: Outcome | None = None
    reason: Reason | None = None
    again: Again | None = None


def observe(record: Record, replicas: Sequence[Replica], *, idle: bool) -> Event | None:
    """What the replicas amount to, as an event that the state admits, or None when there is nothing
    to tell."""
    if record.state in ENDED:
        return NoneReady() if _comes_back(record, replicas) else None
    if record.state in (State.DRAINING, State.STOPPING):
        if not any(replica.live for replica in replicas):
            return AllEnded()
        return Idle() if record.state is State.DRAINING and idle else None
    ready = sum(replica.ready for replica in replicas)
    if ready:
        return AllReady() if ready == len(replicas) else SomeReady()
    if any(replica.live or replica.again for replica in replicas):
        return NoneReady()
    ended = [replica.reason for replica in replicas if replica.reason]
    return NoneLeft(ended[0] if ended else Reason("no_replicas", "The service has no replica."))


def _comes_back(record: Record, replicas: Sequence[Replica]) -> bool:
    """Whether a service that had failed is only interrupted after all: a node that was given up came back and
    said how its attempt ended."""
    wanted = record.state is State.FAILED and record.desired is Desired.RUNNING
    return wanted and any(replica.again is not None and replica.again.interrupted for replica in replicas)


def as_reached(record: Record, replicas: Sequence[Replica]) -> State:
    """The state as it is shown where some replicas cannot be reached and count as not ready: no more than what
    the rest of them amounts to. The record stays as it is, since their engines may run on under their leases.
    """
    if record.state not in ROUTABLE:
        return record.state
    event = observe(record, replicas, idle=False)
    return advance(record, event).state if isinstance(event, (SomeReady, NoneReady)) else record.state


def check_start(record: Record, replicas: Sequence[Replica], *, acknowledge_unknown: bool) -> None:
    """Whether a start or a replacement may go ahead.

    Raises Refused `service_not_stopped`, `inference_unknown_outcome` or `attempt_not_released`.
    """
    if record.state not in ENDED:
        raise Refused(
            "service_not_stopped",
            f"The service is {record.state}; drain or stop it first, then read its new revision.",
        )
    unknown = [r.attempt_id for r in replicas if r.outcome is Outcome.UNKNOWN]
    if unknown and not acknowledge_unknown:
        raise Refused(
            "inference_unknown_outcome",
            "Nobody can know what the last requests of these attempts did: "
            + ", ".join(unknown)
            + ". Send acknowledge_unknown: true to start new attempts; nothing is replayed.",
            details={"attempts": unknown},
        )
    held = [r.attempt_id for r in replicas if not r.released]
    if held:
        raise Refused(
            "attempt_not_released",
            "Earlier attempts still hold their reservations: "
            + ", ".join(held)
            + ". Each is released when its node confirms that nothing of it is left.",
            retry_after_seconds=1,
            details={"attempts": held},
        )


def refuse_action(record: Record, action: str) -> Refused:
    return Refused("action_not_allowed", f"A service that is {record.state} cannot {action}; read it again.")
