"""The lifecycle of an attempt: the whole table, and the promises that the rest is built on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ficc.domain import attempt
from ficc.domain.attempt import (
    LIVE,
    TRANSITIONS,
    Admit,
    BeginStaging,
    CleanUp,
    End,
    Event,
    IntendStart,
    LoseTrack,
    Outcome,
    Prepare,
    Quarantine,
    Record,
    Reject,
    RequestStop,
    Run,
    State,
    advance,
)
from ficc.domain.errors import Reason
from ficc.domain.lifecycle import IllegalTransition
from support.lifecycles import final, product, reachable, ways_into

EXITED = Reason("engine_exited", "The engine exited with status 1.")
STOPPED = Reason("service_stopped", "The service was stopped.")
LAPSED = Reason("lease_lapsed", "The lease was not renewed in time.")
STUCK = Reason("quarantined", "A process does not end.")
REBOOTED = Reason("node_rebooted", "The machine was rebooted.")

SAMPLES: list[Event] = [
    Admit(),
    Reject(EXITED),
    BeginStaging(),
    Prepare(),
    IntendStart(),
    Run(),
    RequestStop(STOPPED),
    End(Outcome.FAILED, EXITED),
    LoseTrack(REBOOTED),
    Quarantine(STUCK),
    CleanUp(),
]

EVENTS = st.sampled_from(
    [
        *SAMPLES,
        RequestStop(LAPSED, Outcome.FAILED),
        End(Outcome.SUCCEEDED, EXITED),
        End(Outcome.CANCELLED, STOPPED),
    ]
)
RUNS = st.lists(EVENTS, max_size=14)
TO_RUNNING: list[Event] = [Admit(), BeginStaging(), Prepare(), IntendStart(), Run()]


def after(*events: Event, record: Record | None = None) -> Record:
    record = record or Record()
    for event in events:
        record = advance(record, event)
    return record


def walk(events: list[Event]) -> list[tuple[Event, Record, Record]]:
    """Every legal step of a run that skips what is not legal."""
    record, steps = Record(), []
    for event in events:
        try:
            following = advance(record, event)
        except IllegalTransition:
            continue
        steps.append((event, record, following))
        record = following
    return steps


# The table.


def test_there_is_a_sample_of_every_event() -> None:
    assert tuple(type(event) for event in SAMPLES) == attempt.EVENTS


@pytest.mark.parametrize(("state", "event"), product(State, SAMPLES))
def test_exactly_the_table_is_legal(state: State, event: Event) -> None:
    record = Record(state=state)
    if (state, type(event)) in TRANSITIONS:
        assert advance(record, event).state is TRANSITIONS[state, type(event)]
    else:
        with pytest.raises(IllegalTransition):
            advance(record, event)


def test_every_state_is_reached_and_only_released_is_final() -> None:
    assert reachable(TRANSITIONS, State.PLANNED) == set(State)
    assert final(TRANSITIONS, State) == {State.RELEASED}
    assert not [way for way in TRANSITIONS if way[0] is State.RELEASED]


def test_what_is_live_is_what_has_no_outcome() -> None:
    assert set(State) - LIVE == {State.FINISHED, State.RELEASED}


def test_every_live_state_can_end_and_be_lost() -> None:
    for state in LIVE:
        assert TRANSITIONS[state, End] is State.FINISHED
        assert TRANSITIONS[state, LoseTrack] is State.FINISHED


# Starting.


def test_the_start_is_intended_before_it_happens() -> None:
    """The one way to a running process leads over a recorded intent, from a prepared attempt."""
    assert ways_into(TRANSITIONS, State.RUNNING) == {(State.STARTING, Run)}
    assert ways_into(TRANSITIONS, State.STARTING) == {(State.PREPARED, IntendStart)}
    assert after(*TO_RUNNING[:3]).start_intended is False
    assert after(*TO_RUNNING[:4]).start_intended is True


@given(RUNS)
def test_a_start_is_intended_at_most_once_and_on_nothing_but_an_intent(events: list[Event]) -> None:
    intents = [step for step in walk(events) if step[2].state is State.STARTING]
    assert len(intents) <= 1
    for event, before, following in intents:
        assert event == IntendStart()
        assert not before.start_intended
        assert following.start_intended


@given(RUNS)
def test_an_intent_is_never_forgotten(events: list[Event]) -> None:
    for _, before, following in walk(events):
        assert following.start_intended or not before.start_intended


# Outcomes.


@given(RUNS)
def test_there_is_an_outcome_exactly_from_the_end_on(events: list[Event]) -> None:
    for _, _, record in walk(events):
        assert (record.outcome is None) == (record.state in LIVE)
        assert record.outcome is None or record.reason is not None


@given(RUNS)
def test_unknown_only_where_a_start_was_intended_and_no_end_observed(events: list[Event]) -> None:
    for event, before, record in walk(events):
        if before.state in LIVE and record.outcome is not None:
            expected = isinstance(event, LoseTrack) and before.start_intended
            assert (record.outcome is Outcome.UNKNOWN) == expected


def test_losing_track_before_a_start_is_no_mystery() -> None:
    assert after(Admit(), BeginStaging(), LoseTrack(REBOOTED)).outcome is Outcome.CANCELLED
    assert after(*TO_RUNNING, LoseTrack(REBOOTED)).outcome is Outcome.UNKNOWN
    assert after(*TO_RUNNING, RequestStop(STOPPED), LoseTrack(REBOOTED)).outcome is Outcome.UNKNOWN


def test_an_observed_end_is_never_unknown_and_nobody_asks_for_unknown_or_success() -> None:
    with pytest.raises(ValueError, match="never unknown"):
        End(Outcome.UNKNOWN, EXITED)
    for outcome in (Outcome.UNKNOWN, Outcome.SUCCEEDED):
        with pytest.raises(ValueError, match="nobody can ask"):
            RequestStop(STOPPED, outcome)


@given(RUNS)
def test_an_outcome_stands(events: list[Event]) -> None:
    for _, before, record in walk(events):
        if before.outcome is not None:
            assert (record.outcome, record.reason) == (before.outcome, before.reason)


# Stopping.


def test_the_first_cause_of_a_stop_stands() -> None:
    stopping = after(*TO_RUNNING, RequestStop(LAPSED, Outcome.FAILED))
    again = advance(stopping, RequestStop(STOPPED))
    assert again == stopping
    ended = after(End(Outcome.SUCCEEDED, EXITED), record=again)
    assert (ended.outcome, ended.reason) == (Outcome.FAILED, LAPSED)


def test_an_attempt_that_ends_by_itself_ends_as_observed() -> None:
    ended = after(*TO_RUNNING, End(Outcome.FAILED, EXITED))
    assert (ended.outcome, ended.reason) == (Outcome.FAILED, EXITED)


# Release and refusal.


@given(RUNS)
def test_capacity_comes_back_once_and_only_by_proof(events: list[Event]) -> None:
    releases = [step for step in walk(events) if step[2].state is State.RELEASED]
    assert len(releases) <= 1
    for event, before, _ in releases:
        assert event == CleanUp()
        assert before.outcome is not None


def test_a_refused_plan_reserved_nothing_and_is_a_failure() -> None:
    record = advance(Record(), Reject(EXITED))
    assert (record.state, record.outcome, record.reason) == (State.FINISHED, Outcome.FAILED, EXITED)


# How it is told, shown and stored.


@given(RUNS)
def test_of_two_reports_the_later_is_taken_in_whatever_order_they_come(events: list[Event]) -> None:
    records = [Record(), *(following for _, _, following in walk(events))]
    for index, earlier in enumerate(records):
        for record in records[index:]:
            assert attempt.later(earlier, record) == attempt.later(record, earlier) == record


@pytest.mark.parametrize(
    ("state", "ready", "draining", "shown"),
    [
        (State.PLANNED, False, False, "queued"),
        (State.ADMITTED, False, False, "staging"),
        (State.STAGING, False, False, "staging"),
        (State.PREPARED, False, False, "preparing"),
        (State.STARTING, False, False, "preparing"),
        (State.RUNNING, False, False, "starting"),
        (State.RUNNING, False, True, "starting"),
        (State.RUNNING, True, False, "ready"),
        (State.RUNNING, True, True, "draining"),
        (State.STOPPING, True, True, "stopping"),
        (State.FINISHED, True, False, "finished"),
        (State.RELEASED, False, True, "finished"),
    ],
)
def test_what_people_see_of_a_replica(state: State, ready: bool, draining: bool, shown: str) -> None:
    assert attempt.replica_state(state, ready=ready, draining=draining) == shown
    assert shown in attempt.REPLICA_STATES


@given(
    st.sampled_from(State),
    st.booleans(),
    st.none() | st.sampled_from(Outcome),
    st.none() | st.builds(Reason, st.text(), st.text()),
    st.none() | st.sampled_from(Outcome),
)
def test_a_record_survives_being_stored(
    state: State, intended: bool, outcome: Outcome | None, reason: Reason | None, ending: Outcome | None
) -> None:
    record = Record(state, intended, outcome, reason, ending)
    assert attempt.from_json(attempt.as_json(record)) == record
