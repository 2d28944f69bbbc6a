"""Leases: strictly newer renewals only, never after the lapse, and the holder's end always comes first."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ficc.domain import lease
from ficc.domain.lease import (
    MARGIN_SECONDS,
    SECOND,
    STOP_BUDGET_SECONDS,
    TRANSITIONS,
    TTL_SECONDS_MAX,
    TTL_SECONDS_MIN,
    Event,
    Lapse,
    Lease,
    Renew,
    SetDeadline,
    StaleRenewal,
    State,
    StopSandbox,
    advance,
    grant,
    lapsed,
)
from ficc.domain.lifecycle import IllegalTransition
from support.lifecycles import final, product, reachable

FIRST = Renew(1, "boot-a", 1000 * SECOND, 60)
SAMPLES: list[Event] = [replace(FIRST, sequence=2), Lapse()]


def renew(sequence: int, sent_seconds: int = 1010, *, boot: str = "boot-a", ttl: int = 60) -> Renew:
    return Renew(sequence, boot, sent_seconds * SECOND, ttl)


# The table.


@pytest.mark.parametrize(("state", "event"), product(State, SAMPLES))
def test_exactly_the_table_is_legal(state: State, event: Event) -> None:
    held = replace(grant(FIRST), state=state)
    if (state, type(event)) in TRANSITIONS:
        assert advance(held, event)[0].state is TRANSITIONS[state, type(event)]
    else:
        with pytest.raises(IllegalTransition):
            advance(held, event)


def test_every_state_is_reached_and_a_lapse_is_final() -> None:
    assert tuple(type(event) for event in SAMPLES) == lease.EVENTS
    assert reachable(TRANSITIONS, State.HELD) == set(State)
    assert final(TRANSITIONS, State) == {State.LAPSED}


def test_a_lapsed_lease_is_never_renewed() -> None:
    gone, effects = advance(grant(FIRST), Lapse())
    assert effects == (StopSandbox(),)
    with pytest.raises(IllegalTransition):
        advance(gone, renew(2, 2000))


# Renewals.


def test_a_renewal_moves_the_deadline_from_when_it_was_sent() -> None:
    held = grant(FIRST)
    assert held == Lease(1, "boot-a", 1060 * SECOND)
    after, effects = advance(held, renew(2, 1010))
    assert after == Lease(2, "boot-a", 1070 * SECOND)
    assert effects == (SetDeadline(1070 * SECOND),)


@pytest.mark.parametrize("sequence", [0, 1])
def test_a_renewal_that_is_not_newer_is_stale(sequence: int) -> None:
    with pytest.raises(StaleRenewal, match="not above 1"):
        advance(grant(FIRST), renew(sequence))


def test_a_renewal_of_another_boot_is_stale() -> None:
    with pytest.raises(StaleRenewal, match="another boot"):
        advance(grant(FIRST), renew(2, boot="boot-b"))


@pytest.mark.parametrize("ttl", [TTL_SECONDS_MIN - 1, TTL_SECONDS_MAX + 1, 0, -60])
def test_a_renewal_for_a_time_that_no_lease_lasts_does_not_count(ttl: int) -> None:
    with pytest.raises(StaleRenewal, match="5 to 3600 seconds"):
        advance(grant(FIRST), renew(2, ttl=ttl))


@pytest.mark.parametrize("ttl", [TTL_SECONDS_MIN, TTL_SECONDS_MAX])
def test_the_shortest_and_the_longest_lease(ttl: int) -> None:
    after, _ = advance(Lease(1, "boot-a", 0), renew(2, 1000, ttl=ttl))
    assert after.deadline_ns == (1000 + ttl) * SECOND


def test_an_answer_that_was_long_under_way_shortens_nothing() -> None:
    quick, _ = advance(grant(FIRST), renew(2, 1050))
    late, effects = advance(quick, renew(3, 1040))
    assert late == Lease(3, "boot-a", 1110 * SECOND)
    assert effects == (SetDeadline(1110 * SECOND),)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 200), st.sampled_from(["boot-a", "boot-b"]))))
def test_sequences_rise_strictly_and_deadlines_never_fall(renewals: list[tuple[int, int, str]]) -> None:
    held = grant(Renew(0, "boot-a", 0, 60))
    for sequence, sent, boot in renewals:
        counts = sequence > held.sequence and boot == "boot-a"
        try:
            after, _ = advance(held, renew(sequence, sent, boot=boot))
        except StaleRenewal:
            assert not counts
            continue
        assert counts
        assert after.deadline_ns >= held.deadline_ns
        held = after


# Time.


def test_a_lease_lapses_at_its_deadline() -> None:
    held = grant(FIRST)
    assert not lapsed(held, held.deadline_ns - 1)
    assert lapsed(held, held.deadline_ns)
    assert not lapsed(replace(held, state=State.LAPSED), held.deadline_ns)


def test_the_numbers_of_a_lease() -> None:
    assert (TTL_SECONDS_MIN, lease.TTL_SECONDS_DEFAULT, TTL_SECONDS_MAX) == (5, 60, 3600)
    assert lease.renewal_interval_seconds(60) == 20
    assert lease.over_for_grantor(1000, 60) == 1000 + (60 + 10 + 5) * SECOND
    assert grant(Renew(1, "boot", 5, 60)).deadline_ns == 60_000_000_005


def test_two_renewals_may_be_lost() -> None:
    for ttl in (TTL_SECONDS_MIN, 60, TTL_SECONDS_MAX):
        assert 3 * lease.renewal_interval_seconds(ttl) <= ttl


@st.composite
def grants(draw: st.DrawFn, ttl: st.SearchStrategy[int]) -> list[tuple[int, int, int, bool]]:
    """Grants in the order of their commits, each: sent, committed (seconds of one true time), time to live,
    delivered. The commit never comes before the sending; the first grant always arrives."""
    committed, made = 0, []
    for index in range(draw(st.integers(1, 8))):
        committed += draw(st.integers(0, 40))
        sent = committed - draw(st.integers(0, 90))
        made.append((sent, committed, draw(ttl), index == 0 or draw(st.booleans())))
    return made


def holder_after(made: list[tuple[int, int, int, bool]], skew: int) -> Lease:
    """The holder reads another clock than the grantor: its own, with any offset."""
    held: Lease | None = None
    for sequence, (sent, _, ttl, delivered) in enumerate(made, 1):
        renewal = Renew(sequence, "boot-a", (sent + skew) * SECOND, ttl)
        if held is None:
            held = grant(renewal)
        elif delivered:
            held, _ = advance(held, renewal)
    assert held is not None
    return held


@given(grants(st.just(60)), st.integers(0, 10**6))
def test_the_holder_is_done_before_the_grantor_believes_it(
    made: list[tuple[int, int, int, bool]], skew: int
) -> None:
    """Whatever was lost or slow: from the holder's deadline there is still time to stop, and a margin."""
    deadline = holder_after(made, skew).deadline_ns / SECOND - skew
    believed = lease.over_for_grantor(made[-1][1] * SECOND, 60) / SECOND
    assert deadline + STOP_BUDGET_SECONDS + MARGIN_SECONDS <= believed


@given(grants(st.integers(TTL_SECONDS_MIN, 300)), st.integers(0, 10**6))
def test_with_changing_times_to_live_the_latest_belief_counts(
    made: list[tuple[int, int, int, bool]], skew: int
) -> None:
    deadline = holder_after(made, skew).deadline_ns / SECOND - skew
    believed = max(lease.over_for_grantor(at * SECOND, ttl) for _, at, ttl, _ in made) / SECOND
    assert deadline + STOP_BUDGET_SECONDS < believed


# What the grantor believes.


@given(st.integers(0, 10**6), st.integers(TTL_SECONDS_MIN, TTL_SECONDS_MAX), st.integers(-(10**6), 10**6))
def test_l14_a_belief_of_this_boot_is_judged_by_its_clock_alone(at: int, ttl: int, later: int) -> None:
    over_ns = lease.over_for_grantor(at * SECOND, ttl)
    now_ns = over_ns + later * SECOND
    belief = lease.Belief("boot", over_ns, ttl)
    assert lease.believed_over(belief, "boot", now_ns, seen_ns=now_ns) == (later >= 0)


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(TTL_SECONDS_MIN, TTL_SECONDS_MAX))
def test_l14_of_another_boot_a_whole_lease_is_waited_for(over: int, seen: int, ttl: int) -> None:
    """Whatever the other clock said, which may be far ahead or behind."""
    belief = lease.Belief("an earlier boot", over * SECOND, ttl)
    until_ns = lease.over_for_grantor(seen * SECOND, ttl)
    assert not lease.believed_over(belief, "boot", until_ns - 1, seen * SECOND)
    assert lease.believed_over(belief, "boot", until_ns, seen * SECOND)
