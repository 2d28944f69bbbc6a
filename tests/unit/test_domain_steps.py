"""What a controller does next about an attempt, over every combination of what it may know."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest

from ficc.domain import attempt, steps
from ficc.domain.attempt import LIVE, Outcome, Record, State
from ficc.domain.errors import Reason
from ficc.domain.steps import (
    Apply,
    Ask,
    Follow,
    Probe,
    SendAdmit,
    SendStart,
    SendStop,
    View,
    Wait,
    Watch,
    next_step,
)

WHY = Reason("engine_exited", "The engine exited with status 1.")
LATE = Reason("prepare_timeout", "The engine was not started in time.")

PLANNED = Record()
ADMITTED = Record(State.ADMITTED)
STAGING = Record(State.STAGING)
PREPARED = Record(State.PREPARED)
STARTING = Record(State.STARTING, True)
RUNNING = Record(State.RUNNING, True)
STOPPING = Record(State.STOPPING, True, reason=WHY, ending=Outcome.CANCELLED)
STOPPING_EARLY = replace(STOPPING, start_intended=False)
FAILED = Record(State.FINISHED, True, Outcome.FAILED, WHY)
CANCELLED = Record(State.FINISHED, False, Outcome.CANCELLED, WHY)
UNKNOWN = Record(State.FINISHED, True, Outcome.UNKNOWN, steps.LEASE_OVER)
RELEASED = replace(FAILED, state=State.RELEASED)

LEDGER = [
    ADMITTED,
    STAGING,
    PREPARED,
    STARTING,
    RUNNING,
    STOPPING,
    STOPPING_EARLY,
    FAILED,
    CANCELLED,
    RELEASED,
]
"""What an executor may say; it never has an attempt that is only planned."""
MIRROR = [PLANNED, UNKNOWN, *LEDGER]
HAPPY = View(
    record=PREPARED,
    wanted=True,
    ready=False,
    connected=True,
    reported=PREPARED,
    leased=True,
    lease_over=False,
    start_under_way=False,
    overdue=None,
)


def possible(view: View) -> bool:
    """A lease that is over was granted, and whatever an executor admitted came with a lease."""
    if view.lease_over and not view.leased:
        return False
    return view.leased or view.record in (PLANNED, CANCELLED)


def every_view() -> Iterator[View]:
    flags = (False, True)
    for record, reported in product(MIRROR, [None, *LEDGER]):
        for wanted, ready, connected, leased, over, starting, late, admitting, denied in product(
            flags, repeat=9
        ):
            view = View(
                record,
                wanted,
                ready,
                connected,
                reported,
                leased,
                over,
                starting,
                LATE if late else None,
                admitting,
                denied,
            )
            if possible(view):
                yield view


@pytest.fixture(scope="module")
def decided() -> list[tuple[View, steps.Step]]:
    return [(view, next_step(view)) for view in every_view()]


Decided = list[tuple[View, steps.Step]]


# Every combination.


def test_a_start_is_sent_only_from_a_prepared_attempt_that_both_sides_agree_on(decided: Decided) -> None:
    """After it the record has an intent, so it is never sent again."""
    starts = [view for view, step in decided if isinstance(step, SendStart)]
    assert starts
    for view in starts:
        assert view.record == view.reported == PREPARED
        assert view.connected
        assert view.wanted
        assert view.overdue is None


def test_an_admission_is_sent_only_when_wanted_and_unknown_to_the_executor(decided: Decided) -> None:
    admissions = [view for view, step in decided if isinstance(step, SendAdmit)]
    assert admissions
    for view in admissions:
        assert view.record == PLANNED
        assert view.connected
        assert view.reported is None
        assert view.wanted
        assert view.overdue is None
        assert not view.admit_under_way


def test_nothing_is_said_to_or_followed_from_a_node_that_is_not_connected(decided: Decided) -> None:
    silent = [(view, step) for view, step in decided if not view.connected]
    assert any(view.reported is not None for view, _ in silent)
    for view, step in silent:
        assert isinstance(step, Wait | Apply)
        assert step == next_step(replace(view, reported=None))


def test_l2_nothing_is_concluded_about_a_silent_node_before_its_lease_is_over(decided: Decided) -> None:
    leased = [step for view, step in decided if not view.connected and view.leased and not view.lease_over]
    assert leased
    assert set(leased) == {Wait()}


def test_an_event_that_is_applied_is_legal(decided: Decided) -> None:
    applied = [(view, step) for view, step in decided if isinstance(step, Apply)]
    assert applied
    for view, step in applied:
        attempt.advance(view.record, step.event)


def test_an_executors_word_is_followed_and_never_overruled(decided: Decided) -> None:
    """No track is lost of what an executor tells of, and nothing is made up beside what it says."""
    for view, step in decided:
        if view.connected and view.reported is not None:
            assert not isinstance(step, Apply)
        if isinstance(step, Follow):
            assert view.reported is not None
            assert step.record != view.record
            assert attempt.later(view.record, step.record) is step.record
            kept = replace(step.record, outcome=view.reported.outcome, reason=view.reported.reason)
            assert kept == view.reported


def test_another_controller_that_heard_more_is_not_taken_back(decided: Decided) -> None:
    """L8: what this one last heard is older than the record; its own news is under way."""
    for view, step in decided:
        if view.connected and view.reported is not None and view.record.state in LIVE - {State.PLANNED}:
            behind = attempt.later(view.record, view.reported) is not view.reported
            if behind and view.record.start_intended == view.reported.start_intended:
                assert step == Wait()


def test_nothing_is_gone_before_its_executor_was_asked(decided: Decided) -> None:
    """L8: an attempt that another controller had admitted was given up by one that had not heard of it yet, and
    a second copy could have followed."""
    asked = 0
    for view, step in decided:
        silent = view.connected and view.reported is None and view.record.state is not State.RELEASED
        if silent and view.leased and view.record.state is not State.PLANNED and not view.denied:
            assert step == Ask()
            asked += 1
    assert asked


def test_an_outcome_that_was_recorded_stays(decided: Decided) -> None:
    """What nobody could know may be learned; an admission that came too late changes nothing else."""
    for view, step in decided:
        if isinstance(step, Follow) and view.record.outcome not in (None, Outcome.UNKNOWN):
            assert (step.record.outcome, step.record.reason) == (view.record.outcome, view.record.reason)


def test_an_intent_is_forgotten_only_for_an_attempt_that_ended(decided: Decided) -> None:
    for view, step in decided:
        if isinstance(step, Follow) and view.record.start_intended and not step.record.start_intended:
            assert step.record.state not in LIVE


def test_l7_an_intent_that_the_executor_has_not_heard_of_ends_the_attempt(decided: Decided) -> None:
    """It may still be on its way: neither sent again nor taken as not given."""
    for view, step in decided:
        intended = view.record.start_intended and view.record.state in LIVE
        if not (view.connected and intended and view.reported is not None):
            continue
        if view.reported.start_intended or view.reported.state not in LIVE:
            continue
        if view.start_under_way or view.reported.state is State.STOPPING:
            assert step == Wait()
        else:
            assert step == SendStop(steps.START_NOT_CONFIRMED, Outcome.CANCELLED)


def test_only_what_lives_and_is_not_ending_is_asked_to_stop(decided: Decided) -> None:
    stops = [(view, step) for view, step in decided if isinstance(step, SendStop)]
    assert stops
    for view, step in stops:
        assert view.reported is not None
        assert view.reported.state in LIVE - {State.STOPPING}
        assert step.outcome in (Outcome.CANCELLED, Outcome.FAILED)


def test_what_is_not_wanted_is_stopped_whatever_its_state(decided: Decided) -> None:
    for view, step in decided:
        settled = view.connected and view.record == view.reported and view.record.state in LIVE
        if settled and not view.wanted and view.record.state is not State.STOPPING:
            assert step == SendStop(steps.STOPPED, Outcome.CANCELLED)


def test_what_lasts_past_its_limit_fails(decided: Decided) -> None:
    assert next_step(replace(HAPPY, overdue=LATE)) == SendStop(LATE, Outcome.FAILED)
    planned = replace(HAPPY, record=PLANNED, reported=None, overdue=LATE)
    assert next_step(planned) == Apply(attempt.End(Outcome.FAILED, LATE))


def test_capacity_comes_back_by_the_executors_word_alone(decided: Decided) -> None:
    for view, step in decided:
        if isinstance(step, Apply) and isinstance(step.event, attempt.CleanUp):
            assert not view.leased or (view.connected and view.reported is None and view.denied)


def test_a_lost_attempt_that_lives_after_all_is_stopped() -> None:
    back = replace(HAPPY, record=UNKNOWN, reported=RUNNING)
    assert next_step(back) == SendStop(steps.LEASE_OVER, Outcome.CANCELLED)
    assert next_step(replace(back, reported=STOPPING)) == Wait()
    assert next_step(replace(back, reported=RELEASED)) == Follow(RELEASED)


def test_an_admission_under_way_is_waited_for_even_when_no_longer_wanted(decided: Decided) -> None:
    for view, step in decided:
        if view.record == PLANNED and view.admit_under_way and not (view.connected and view.reported):
            assert step == Wait()


def test_readiness_is_probed_only_of_a_running_engine_that_is_wanted(decided: Decided) -> None:
    probes = [view for view, step in decided if isinstance(step, Probe)]
    assert probes
    for view in probes:
        assert view.record == view.reported == RUNNING
        assert view.wanted
        assert not view.ready
        assert view.overdue is None


def test_a_running_engine_that_answered_is_watched() -> None:
    assert next_step(replace(HAPPY, record=RUNNING, reported=RUNNING, ready=True)) == Watch()


def test_what_is_no_longer_wanted_ends_for_the_reason_that_is_given() -> None:
    gone = replace(HAPPY, record=RUNNING, reported=RUNNING, wanted=False, unwanted=WHY)
    assert next_step(gone) == SendStop(WHY, Outcome.CANCELLED)
    never = replace(HAPPY, record=PLANNED, reported=None, wanted=False, leased=False, unwanted=WHY)
    assert next_step(never) == Apply(attempt.End(Outcome.CANCELLED, WHY))


def test_a_released_attempt_is_done(decided: Decided) -> None:
    for view, step in decided:
        if view.record.state is State.RELEASED:
            assert step == Wait()


def in_the_executors_hands(view: View) -> bool:
    """The executor is ending the attempt or removing what is left, and tells when it is done; or only its
    return can prove that nothing is left."""
    if not view.connected:
        return view.record.state is State.FINISHED and view.leased
    if view.reported is None:
        return False
    if attempt.later(view.record, view.reported) is not view.reported:
        return True  # another controller heard of it, and so will this one
    removing = view.reported == view.record and view.record.state is State.FINISHED
    return removing or view.reported.state is State.STOPPING


def test_whatever_is_not_over_moves_under_some_clock(decided: Decided) -> None:
    stuck = set()
    for view, _ in decided:
        if view.record.state is State.RELEASED or in_the_executors_hands(view):
            continue
        clocks = (
            replace(
                view,
                lease_over=over and view.leased,
                overdue=late,
                start_under_way=False,
                admit_under_way=False,
            )
            for over, late in product((False, True), (None, LATE))
        )
        if all(next_step(clock) == Wait() for clock in clocks):
            stuck.add(view)
    assert stuck == set()
