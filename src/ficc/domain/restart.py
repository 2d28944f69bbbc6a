"""Whether a replica whose attempt ended is tried again, and after which pause: a decision from how its latest
attempts ended, so that it comes out the same after a restart of the controller.

Ends are of three kinds. An *interruption* says nothing about the engine: the machine, its processes or its
connection went away. The first one is made good at once, more in a row after growing pauses, without a bound on
their number. A *failure* is the engine's: it is tried again after growing pauses, until so many failed in a row
without a stable run between them. Everything else stays as it is: what somebody cancelled, what another attempt
would meet again until somebody acts, and above all an outcome that nobody knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from ficc.domain.attempt import Outcome

DELAY_SECONDS = 2
FACTOR = 2
DELAY_SECONDS_MAX = 300
FAILURES_MAX = 5
STABLE_SECONDS = 60
FAILURES_LIMIT = 15
"""The most failures in a row that a policy may allow: fewer than the attempts whose rows are kept."""
SECONDS_LIMIT = 86_400
FACTOR_LIMIT = 10

INTERRUPTIONS = frozenset(
    {
        "executor_shutdown",
        "executor_restarted",
        "lease_lapsed",
        "start_not_confirmed",
        # These three end an attempt `unknown` if its start was intended, and then it is not tried again.
        "lease_over",
        "node_rebooted",
        "attempt_unknown",
    }
)
LASTING = frozenset(
    {
        "fenced",
        "image_not_found",
        "invalid_request",
        "limits_unenforceable",
        "model_not_ready",
        "runtime_changed",
        "source_mismatch",
    }
)
"""Reasons that another attempt at the same plan meets again until somebody acts."""
REBOOT = "node_rebooted"


@dataclass(frozen=True, slots=True)
class Policy:
    """`on_failure`: whether an attempt that failed is followed by another. The pause before it is
    `delay_seconds` after one failure, `factor` times as long after each further one, and at most
    `delay_seconds_max`. After `failures_max` failures in a row it is left at that; a run that was ready for
    `stable_seconds` begins the count anew."""

    on_failure: bool = True
    delay_seconds: int = DELAY_SECONDS
    factor: int = FACTOR
    delay_seconds_max: int = DELAY_SECONDS_MAX
    failures_max: int = FAILURES_MAX
    stable_seconds: int = STABLE_SECONDS


@dataclass(frozen=True, slots=True)
class Past:
    """How one attempt ended. `ready_seconds` is how long it had been ready by then, None if it never was: by the wall
    clock, so a jump of that may make a run count as stable that was not, or the other way, once."""

    outcome: Outcome
    code: str
    ready_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Again:
    """To be tried again so long after the end. `in_a_row` counts ends of its kind without a stable run between
    them; `bound` is at how many it is left at that, None for interruptions."""

    delay_seconds: float
    in_a_row: int
    bound: int | None = None
    acknowledged: bool = False
    """The outcome is unknown, and a standing acknowledgement covers it."""

    @property
    def interrupted(self) -> bool:
        return self.bound is None


class _Kind(Enum):
    INTERRUPTION = auto()
    FAILURE = auto()
    REST = auto()


def decide(policy: Policy, past: Sequence[Past], *, acknowledge_reboot: bool = False) -> Again | None:
    """What follows the newest of a replica's ended attempts (they come newest first); None: nothing.

    `acknowledge_reboot`: an operator acknowledged beforehand every unknown outcome that a reboot leaves.
    """
    newest = past[0]
    kind = _kind(newest, acknowledge_reboot)
    if kind is _Kind.REST or (newest.outcome is Outcome.FAILED and not policy.on_failure):
        return None
    in_a_row = _in_a_row(policy, past, kind, acknowledge_reboot)
    if kind is _Kind.INTERRUPTION:
        delay = _delay(policy, in_a_row - 1) if in_a_row > 1 else 0
        return Again(delay, in_a_row, acknowledged=newest.outcome is Outcome.UNKNOWN)
    if in_a_row >= policy.failures_max:
        return None
    return Again(_delay(policy, in_a_row), in_a_row, policy.failures_max)


def _kind(one: Past, acknowledge_reboot: bool) -> _Kind:
    if one.outcome is Outcome.UNKNOWN:
        return _Kind.INTERRUPTION if acknowledge_reboot and one.code == REBOOT else _Kind.REST
    if one.outcome is Outcome.SUCCEEDED:
        return _Kind.REST
    if one.code in INTERRUPTIONS:
        return _Kind.INTERRUPTION
    return _Kind.FAILURE if one.outcome is Outcome.FAILED and one.code not in LASTING else _Kind.REST


def _in_a_row(policy: Policy, past: Sequence[Past], kind: _Kind, acknowledge_reboot: bool) -> int:
    """How many ended this way since the last stable run, whose own end counts."""
    count = 0
    for one in past:
        count += _kind(one, acknowledge_reboot) is kind
        if one.ready_seconds is not None and one.ready_seconds >= policy.stable_seconds:
            break
    return count


def _delay(policy: Policy, in_a_row: int) -> int:
    return min(policy.delay_seconds_max, int(policy.delay_seconds * policy.factor ** (in_a_row - 1)))
