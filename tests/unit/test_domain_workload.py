"""The lifecycle of a job: the whole table, that its outcome is its newest attempt's, and when it may be tried again,
removed or released."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ficc.domain import attempt, workload
from ficc.domain.attempt import Outcome
from ficc.domain.errors import Reason, Refused
from ficc.domain.lifecycle import IllegalTransition
from ficc.domain.workload import (
    CANCELLED,
    EVENTS,
    EXPIRED,
    TRANSITIONS,
    Began,
    Cancel,
    End,
    Event,
    Expire,
    Held,
    Record,
    Retry,
    State,
    advance,
    observe,
    state_of,
)
from support.lifecycles import final, product, reachable

EXITED = Reason("exited", "The command exited with status 0.")
LOST = Reason("lease_over", "The node has not answered.")
SAMPLES: list[Event] = [Began(), Cancel(), Expire(), End(Outcome.SUCCEEDED, EXITED), Retry()]
RUNS = st.lists(st.sampled_from([*SAMPLES, End(Outcome.UNKNOWN, LOST)]), max_size=12)


def after(*events: Event) -> Record:
    record = Record()
    for event in events:
        record = advance(record, event)
    return record


@pytest.mark.parametrize(("state", "event"), product(State, SAMPLES))
def test_the_table(state: State, event: Event) -> None:
    expected = TRANSITIONS.get((state, type(event)))
    if expected is None:
        with pytest.raises(IllegalTransition):
            advance(Record(state), event)
    else:
        assert advance(Record(state), event).state is expected


def test_every_event_is_in_the_table_and_every_state_is_reached() -> None:
    assert {type(event) for event in SAMPLES} == set(EVENTS) == {kind for _, kind in TRANSITIONS}
    assert reachable(TRANSITIONS, Record().state) == set(State)
    assert final(TRANSITIONS, State) == set()


def test_only_an_operator_leads_out_of_the_end() -> None:
    ways = {kind for (state, kind), to in TRANSITIONS.items() if state is State.ENDED is not to}
    assert ways == {Retry}


@given(RUNS)
def test_there_is_an_outcome_exactly_at_the_end_and_revisions_rise(events: list[Event]) -> None:
    record = Record()
    for event in events:
        before = record
        try:
            record = advance(before, event)
        except IllegalTransition:
            continue
        assert (record.outcome is not None) == (record.state is State.ENDED)
        assert record.revision == before.revision + (record != before)


def test_the_first_cause_of_an_end_stands_and_the_outcome_is_the_attempts() -> None:
    assert after(Began(), Expire(), Cancel()).reason == EXPIRED
    assert after(Began(), Expire(), Cancel()).expired
    assert after(Cancel()).reason == CANCELLED
    assert not after(Cancel()).expired
    assert after(Cancel(), Cancel()) == after(Cancel())
    done = after(Began(), Cancel(), End(Outcome.SUCCEEDED, EXITED))
    assert (done.outcome, done.reason) == (Outcome.SUCCEEDED, EXITED)  # it had ended before it was stopped


def test_a_retry_begins_without_an_outcome() -> None:
    again = after(End(Outcome.UNKNOWN, LOST), Retry())
    assert (again.state, again.outcome, again.reason) == (State.QUEUED, None, None)


# What its attempt says.

STATES = {
    attempt.State.PLANNED: State.QUEUED,
    attempt.State.ADMITTED: State.QUEUED,
    attempt.State.STAGING: State.QUEUED,
    attempt.State.PREPARED: State.QUEUED,
    attempt.State.STARTING: State.QUEUED,
    attempt.State.RUNNING: State.RUNNING,
    attempt.State.STOPPING: State.STOPPING,
    attempt.State.FINISHED: State.ENDED,
    attempt.State.RELEASED: State.ENDED,
}


def tried(state: attempt.State) -> attempt.Record:
    ended = STATES[state] is State.ENDED
    return attempt.Record(state, True, Outcome.FAILED if ended else None, EXITED if ended else None)


@pytest.mark.parametrize("state", attempt.State)
def test_a_replicas_state_is_its_attempts(state: attempt.State) -> None:
    assert state_of(tried(state)) is STATES[state]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("tried_state", attempt.State)
@pytest.mark.parametrize("state", State)
def test_what_is_observed_is_admitted_and_tells_something(
    state: State, tried_state: attempt.State, late: bool
) -> None:
    record, newest = Record(state), tried(tried_state)
    if state is State.ENDED and newest.outcome is not None:
        return  # it has an outcome itself: below
    event = observe(record, newest, late=late)
    if event is not None:
        assert advance(record, event).revision == 1
    if newest.outcome is not None:
        assert event == End(Outcome.FAILED, EXITED)
    elif state in (State.STOPPING, State.ENDED):
        assert event is None
    elif late:
        assert event == Expire()


@pytest.mark.parametrize("known", [Outcome.SUCCEEDED, Outcome.FAILED, Outcome.CANCELLED])
def test_an_outcome_that_nobody_knew_is_corrected_and_no_other_is(known: Outcome) -> None:
    said = attempt.Record(attempt.State.RELEASED, True, known, EXITED)
    lost = after(Began(), End(Outcome.UNKNOWN, LOST))
    event = observe(lost, said, late=True)
    assert event == End(known, EXITED)
    assert (advance(lost, event).outcome, advance(lost, event).reason) == (known, EXITED)
    assert observe(advance(lost, event), UNKNOWN, late=False) is None
    assert observe(lost, UNKNOWN, late=False) is None
    sure = after(Began(), End(Outcome.FAILED, EXITED))
    assert observe(sure, said, late=False) is None
    assert advance(sure, End(known, LOST)) == sure


def test_why_nobody_knows_an_outcome_is_said_as_the_attempt_says_it_at_last() -> None:
    """The lease is over first, and the node that comes back says that it saw no end either."""
    unseen = Reason("end_not_observed", "Nobody saw how the engine ended.")
    lost = after(Began(), End(Outcome.UNKNOWN, LOST))
    event = observe(lost, replace(UNKNOWN, state=attempt.State.RELEASED, reason=unseen), late=False)
    assert event == End(Outcome.UNKNOWN, unseen)
    said = advance(lost, event)
    assert (said.outcome, said.reason) == (Outcome.UNKNOWN, unseen)
    assert observe(said, replace(UNKNOWN, reason=unseen), late=False) is None


# Trying again, removing.


def refusal(call: object, *arguments: object, **named: object) -> str:
    with pytest.raises(Refused) as caught:
        call(*arguments, **named)  # type: ignore[operator]
    return caught.value.code


ENDED = replace(Record(State.ENDED), outcome=Outcome.FAILED)
UNKNOWN = attempt.Record(attempt.State.FINISHED, True, Outcome.UNKNOWN, LOST)


def test_a_job_is_tried_again_once_it_has_ended_and_is_released() -> None:
    check = workload.check_retry
    failed = tried(attempt.State.RELEASED)
    check(ENDED, failed, [], acknowledge_unknown=False)
    for state in set(State) - {State.ENDED}:
        assert refusal(check, Record(state), failed, [], acknowledge_unknown=True) == "action_not_allowed"
    assert refusal(check, ENDED, failed, ["a"], acknowledge_unknown=True) == "attempt_not_released"
    assert refusal(check, ENDED, UNKNOWN, [], acknowledge_unknown=False) == "unknown_outcome"
    assert refusal(check, ENDED, UNKNOWN, ["a"], acknowledge_unknown=True) == "attempt_not_released"
    check(ENDED, UNKNOWN, [], acknowledge_unknown=True)


def test_a_job_is_removed_once_it_has_ended_and_is_released() -> None:
    workload.check_remove(ENDED, [])
    assert refusal(workload.check_remove, ENDED, ["a"]) == "attempt_not_released"
    assert refusal(workload.check_remove, Record(State.RUNNING), []) == "action_not_allowed"


# Releasing.


def test_what_may_be_released() -> None:
    over = Held("a", leased=True, running=False, over_in_seconds=-1.0)
    workload.check_release([over])
    assert refusal(workload.check_release, []) == "action_not_allowed"
    assert refusal(workload.check_release, [over, replace(over, leased=False)]) == "action_not_allowed"
    assert refusal(workload.check_release, [over, replace(over, running=True)]) == "attempt_not_released"


def test_a_refusal_of_a_release_says_when() -> None:
    held = [Held("a", True, False, 3.2), Held("b", True, False, 8.7)]
    assert workload.longest_lease_seconds(held) == 8.7
    refused = workload.lease_not_over(held, "2030-01-01T00:00:00.000Z")
    assert (refused.code, refused.retry_after_seconds) == ("lease_not_over", 9)
    assert refused.details == {"attempts": ["a", "b"], "lease_over_at": "2030-01-01T00:00:00.000Z"}


@pytest.mark.parametrize("state", sorted(attempt.LIVE))
@pytest.mark.parametrize("intended", [False, True])
def test_a_released_attempt_of_which_nothing_is_known_has_an_unknown_outcome_if_it_may_have_run(
    state: attempt.State, intended: bool
) -> None:
    gone = workload.released(attempt.Record(state, intended), LOST)
    assert gone.state is attempt.State.RELEASED
    assert (gone.outcome, gone.reason) == (Outcome.UNKNOWN if intended else Outcome.CANCELLED, LOST)


def test_a_release_leaves_an_outcome_that_somebody_saw() -> None:
    ended = tried(attempt.State.FINISHED)
    gone = workload.released(ended, LOST)
    assert gone == replace(ended, state=attempt.State.RELEASED)
