"""A lease: the time-limited authority of an attempt to run.

Time is CLOCK_BOOTTIME in nanoseconds together with the boot id of the machine that reads it, so that
neither a jump of the wall clock nor a suspended machine stretches a lease. The holder (the executor)
counts from when the renewal was *sent*, the grantor (the controller) from when its answer was committed,
with a margin: the holder always lapses first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from ficc.domain.lifecycle import next_state

TTL_SECONDS_MIN = 5
TTL_SECONDS_MAX = 3600
TTL_SECONDS_DEFAULT = 60
STOP_BUDGET_SECONDS = 10
"""How long an executor may take from the lapse of a lease until nothing of the attempt runs."""
MARGIN_SECONDS = 5
SECOND = 1_000_000_000  # in nanoseconds


class State(StrEnum):
    HELD = "held"
    LAPSED = "lapsed"


@dataclass(frozen=True, slots=True)
class Renew:
    """`sent_ns` is the holder's clock when the renewal was asked for (or sent, on one machine)."""

    sequence: int
    boot_id: str
    sent_ns: int
    ttl_seconds: int


@dataclass(frozen=True, slots=True)
class Lapse:
    pass


Event = Renew | Lapse
EVENTS: tuple[type, ...] = (Renew, Lapse)

TRANSITIONS: Mapping[tuple[State, type], State] = {
    (State.HELD, Renew): State.HELD,
    (State.HELD, Lapse): State.LAPSED,
}


@dataclass(frozen=True, slots=True)
class Lease:
    sequence: int
    boot_id: str
    deadline_ns: int
    state: State = State.HELD


@dataclass(frozen=True, slots=True)
class SetDeadline:
    """The watchdog is to kill the sandbox at this CLOCK_BOOTTIME, nanoseconds."""

    deadline_ns: int


@dataclass(frozen=True, slots=True)
class StopSandbox:
    pass


Effect = SetDeadline | StopSandbox


class StaleRenewal(Exception):
    """A renewal that does not count: not newer than the last one, of another boot, or for a time that no
    lease lasts. It is ignored, and said so."""


def grant(first: Renew) -> Lease:
    """The lease that comes with admission."""
    return Lease(first.sequence, first.boot_id, _deadline(first))


def advance(lease: Lease, event: Event) -> tuple[Lease, tuple[Effect, ...]]:
    """The lease after the event, and what the holder has to do about it.

    Raises StaleRenewal, and IllegalTransition: a lapsed lease is never renewed, since its sandbox may
    already be gone.
    """
    after = replace(lease, state=next_state(TRANSITIONS, lease.state, event))
    match event:
        case Renew(sequence, boot_id, _, ttl_seconds):
            if not TTL_SECONDS_MIN <= ttl_seconds <= TTL_SECONDS_MAX:
                raise StaleRenewal(f"a lease lasts {TTL_SECONDS_MIN} to {TTL_SECONDS_MAX} seconds")
            if boot_id != lease.boot_id:
                raise StaleRenewal("the renewal is of another boot")
            if sequence <= lease.sequence:
                raise StaleRenewal(f"sequence {sequence} is not above {lease.sequence}")
            # An answer that was long under way must not shorten what a quicker one granted.
            deadline = max(lease.deadline_ns, _deadline(event))
            return replace(after, sequence=sequence, deadline_ns=deadline), (SetDeadline(deadline),)
        case Lapse():
            return after, (StopSandbox(),)


def lapsed(lease: Lease, now_ns: int) -> bool:
    return lease.state is State.HELD and now_ns >= lease.deadline_ns


@dataclass(frozen=True, slots=True)
class Belief:
    """When a grantor may hold a lease to be over: on its own CLOCK_BOOTTIME, in the boot that it says.
    `ttl_seconds` is the longest time to live that was granted."""

    boot_id: str
    over_ns: int
    ttl_seconds: int


def patience_ns(ttl_seconds: int) -> int:
    """How long after the commit of a grant its grantor holds the lease to be in force."""
    return (ttl_seconds + STOP_BUDGET_SECONDS + MARGIN_SECONDS) * SECOND


def over_for_grantor(committed_ns: int, ttl_seconds: int) -> int:
    """When the grantor may hold the lease to be over, on the clock of `committed_ns`.

    Where the time to live changed meanwhile, the latest of this over all that was granted counts: a renewal
    may be lost, and then the holder goes by an earlier one.
    """
    return committed_ns + patience_ns(ttl_seconds)


def believed_over(belief: Belief, boot_id: str, now_ns: int, seen_ns: int) -> bool:
    """Whether the grantor, which has known of this belief since `seen_ns`, may hold the lease to be over. What
    was written in another boot, or by another controller, says nothing about this clock: then it waits as
    long as for a grant that it just saw."""
    return now_ns >= over_in_this_boot(belief, boot_id, seen_ns)


def over_in_this_boot(belief: Belief, boot_id: str, seen_ns: int) -> int:
    """The moment that `believed_over` goes by, on the grantor's own clock."""
    return belief.over_ns if belief.boot_id == boot_id else over_for_grantor(seen_ns, belief.ttl_seconds)


def renewal_interval_seconds(ttl_seconds: int) -> float:
    """A third of the time to live: two renewals may be lost."""
    return ttl_seconds / 3


def _deadline(renewal: Renew) -> int:
    return renewal.sent_ns + renewal.ttl_seconds * SECOND
