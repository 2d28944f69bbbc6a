"""When a replica is tried again: by how its latest attempts ended, bounded, and never after an unknown outcome."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ficc.domain import restart
from ficc.domain.attempt import Outcome
from ficc.domain.restart import INTERRUPTIONS, LASTING, Again, Past, Policy, decide

POLICY = Policy(
    delay_seconds=2, factor=3, delay_seconds_max=10, failures_max=4, stable_seconds=60
)  # pauses: 2, 6, 10
NEVER = Policy(on_failure=False)


def failed(ready_seconds: float | None = None, code: str = "engine_exited") -> Past:
    return Past(Outcome.FAILED, code, ready_seconds)


def cut(ready_seconds: float | None = None, code: str = "executor_restarted") -> Past:
    return Past(Outcome.FAILED, code, ready_seconds)


F, I = failed(), cut()  # noqa: E741
SHUTDOWN = Past(Outcome.CANCELLED, "executor_shutdown")
REBOOTED = Past(Outcome.UNKNOWN, "node_rebooted", 5.0)


@pytest.mark.parametrize(
    ("newest_first", "expected"),
    [
        # L10: the engine fails again and again
        ([F], Again(2, 1, 4)),
        ([F, F], Again(6, 2, 4)),
        ([F, F, F], Again(10, 3, 4)),
        ([F, F, F, F], None),
        ([F, F, F, F, F], None),
        # a stable run begins the count anew; its own end counts
        ([failed(60.0), F, F, F], Again(2, 1, 4)),
        ([F, failed(60.0), F, F], Again(6, 2, 4)),
        ([F, failed(59.9), F, F], None),
        ([F, cut(3600.0), F, F, F], Again(2, 1, 4)),
        # interruptions: the first at once, and however many
        ([I], Again(0, 1)),
        ([I, I], Again(2, 2)),
        ([I, I, I], Again(6, 3)),
        ([I, I, I, I], Again(10, 4)),
        ([I] * 20, Again(10, 20)),
        ([cut(60.0), I, I], Again(0, 1)),
        ([SHUTDOWN, failed(60.0)], Again(0, 1)),
        # neither counts as the other
        ([F, I, I, I], Again(2, 1, 4)),
        ([I, F, F, F], Again(0, 1)),
        ([F, I, F, I, F], Again(10, 3, 4)),
        ([F, I, F, I, F, I, F], None),
    ],
)
def test_what_follows(newest_first: list[Past], expected: Again | None) -> None:
    assert decide(POLICY, newest_first) == expected


@pytest.mark.parametrize(
    ("newest", "expected"),
    [(F, None), (I, None), (SHUTDOWN, Again(0, 1)), (Past(Outcome.CANCELLED, "lease_over"), Again(0, 1))],
)
def test_never_means_never_after_a_failure_whatever_failed(newest: Past, expected: Again | None) -> None:
    """An orderly shutdown is no failure: the service is still wanted."""
    assert decide(NEVER, [newest]) == expected


@pytest.mark.parametrize("code", sorted(LASTING))
def test_what_another_attempt_would_meet_again_is_left_at_that(code: str) -> None:
    assert decide(POLICY, [failed(code=code)]) is None


@pytest.mark.parametrize("code", ["service_stopped", "workload_cancelled"])
def test_what_somebody_cancelled_stays_cancelled(code: str) -> None:
    assert decide(POLICY, [Past(Outcome.CANCELLED, code)]) is None


@pytest.mark.parametrize("code", sorted(INTERRUPTIONS))
def test_nothing_follows_an_unknown_outcome(code: str) -> None:
    assert decide(POLICY, [Past(Outcome.UNKNOWN, code)]) is None
    assert decide(POLICY, [Past(Outcome.UNKNOWN, code), F, I]) is None


@pytest.mark.parametrize("code", sorted(INTERRUPTIONS - {"node_rebooted"}))
def test_l5_a_standing_acknowledgement_covers_reboots_alone(code: str) -> None:
    again = decide(POLICY, [REBOOTED], acknowledge_reboot=True)
    assert again == Again(0, 1, acknowledged=True)
    assert decide(NEVER, [REBOOTED], acknowledge_reboot=True) == again
    assert decide(POLICY, [REBOOTED, REBOOTED], acknowledge_reboot=True) == Again(2, 2, acknowledged=True)
    assert decide(POLICY, [Past(Outcome.UNKNOWN, code)], acknowledge_reboot=True) is None


PASTS = st.builds(
    Past,
    st.sampled_from(Outcome),
    st.sampled_from(sorted({*INTERRUPTIONS, *LASTING, "engine_exited", "service_stopped"})),
    st.none() | st.floats(0, 1e6),
)
POLICIES = st.builds(
    Policy,
    st.booleans(),
    st.integers(1, 100),
    st.integers(1, 10),
    st.integers(1, 1000),
    st.integers(1, restart.FAILURES_LIMIT),
    st.integers(1, 1000),
)


@given(POLICIES, st.lists(PASTS, min_size=1, max_size=20), st.booleans())
def test_every_pause_and_every_count_is_bounded(policy: Policy, past: list[Past], acknowledge: bool) -> None:
    again = decide(policy, past, acknowledge_reboot=acknowledge)
    if again is None:
        return
    assert 0 <= again.delay_seconds <= policy.delay_seconds_max
    assert 1 <= again.in_a_row <= len(past)
    assert again.bound is None or again.in_a_row < again.bound == policy.failures_max
    assert again.acknowledged == (past[0].outcome is Outcome.UNKNOWN)


@given(POLICIES, PASTS)
def test_an_engine_that_only_fails_is_given_up_after_so_many(policy: Policy, one: Past) -> None:
    for count in range(1, policy.failures_max + 1):
        again = decide(policy, [F] * count)
        assert (again is None) == (not policy.on_failure or count >= policy.failures_max)
