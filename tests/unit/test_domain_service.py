"""A service: its table, generation and revision, what its replicas amount to, and when it may start."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ficc.domain import attempt, restart, service, steps
from ficc.domain.attempt import Outcome
from ficc.domain.errors import Reason, Refused
from ficc.domain.lifecycle import IllegalTransition
from ficc.domain.restart import Again
from ficc.domain.service import (
    ENDED,
    ROUTABLE,
    TRANSITIONS,
    AllEnded,
    AllReady,
    Desired,
    Drain,
    Event,
    Idle,
    NoneLeft,
    NoneReady,
    Record,
    Replace,
    Replica,
    SomeReady,
    Start,
    State,
    Stop,
    advance,
    check_start,
    observe,
)
from support.lifecycles import final, product, reachable, ways_into

BROKEN = Reason("engine_exited", "The engine exited with status 1.")
SAMPLES: list[Event] = [
    Start(),
    Replace(),
    Drain(),
    Stop(),
    AllReady(),
    SomeReady(),
    NoneReady(),
    NoneLeft(BROKEN),
    Idle(),
    AllEnded(),
]
RUNS = st.lists(st.sampled_from(SAMPLES), max_size=20)


def after(*events: Event, record: Record | None = None) -> Record:
    record = record or Record()
    for event in events:
        record = advance(record, event)
    return record


def walk(events: list[Event]) -> list[tuple[Event, Record, Record]]:
    """Every legal step of a run that skips what is not legal."""
    record, taken = Record(), []
    for event in events:
        try:
            following = advance(record, event)
        except IllegalTransition:
            continue
        taken.append((event, record, following))
        record = following
    return taken


# The table.


@pytest.mark.parametrize(("state", "event"), product(State, SAMPLES))
def test_exactly_the_table_is_legal(state: State, event: Event) -> None:
    if (state, type(event)) in TRANSITIONS:
        assert advance(Record(state), event).state is TRANSITIONS[state, type(event)]
    else:
        with pytest.raises(IllegalTransition):
            advance(Record(state), event)


def test_every_state_is_reached_and_every_one_can_be_left() -> None:
    assert tuple(type(event) for event in SAMPLES) == service.EVENTS
    assert reachable(TRANSITIONS, State.STOPPED) == set(State)
    assert final(TRANSITIONS, State) == set()


def test_start_and_replacement_are_taken_when_stopped_or_failed_and_never_else() -> None:
    for event in (Start, Replace):
        assert {state for state in State if (state, event) in TRANSITIONS} == {State.STOPPED, State.FAILED}
    assert {State.STOPPED, State.FAILED} == ENDED


def test_a_drain_ends_in_a_stop_and_never_goes_back() -> None:
    """Neither a replica that becomes ready nor anything else brings a draining service back."""
    out = {after for (before, _), after in TRANSITIONS.items() if before is State.DRAINING}
    assert out == {State.DRAINING, State.STOPPING, State.STOPPED}
    assert {State.STARTING, State.READY, State.DEGRADED} == {
        before for before, _ in ways_into(TRANSITIONS, State.DRAINING)
    }
    assert not {State.DRAINING, State.STOPPING, *ENDED} & ROUTABLE


def test_every_service_can_be_stopped() -> None:
    assert all((state, Stop) in TRANSITIONS for state in State)


# Numbers.


@given(RUNS)
def test_the_generation_rises_once_per_start_or_replacement(events: list[Event]) -> None:
    for event, before, record in walk(events):
        started = isinstance(event, Start | Replace)
        assert record.generation == before.generation + started


@given(RUNS)
def test_the_revision_rises_by_one_exactly_when_something_changed(events: list[Event]) -> None:
    for _, before, record in walk(events):
        same = (before.state, before.desired, before.generation, before.reason) == (
            record.state,
            record.desired,
            record.generation,
            record.reason,
        )
        assert record.revision == before.revision + (not same)


@given(RUNS)
def test_a_reason_alone_never_moves_the_revision(events: list[Event]) -> None:
    """The interface names specification, desired state and state."""
    for _, before, record in walk(events):
        if (before.state, before.desired, before.generation) == (
            record.state,
            record.desired,
            record.generation,
        ):
            assert record.revision == before.revision


@given(RUNS)
def test_only_operators_change_what_is_desired(events: list[Event]) -> None:
    for event, before, record in walk(events):
        if not isinstance(event, service.OPERATORS):
            assert record.desired is before.desired
        else:
            expected = Desired.RUNNING if isinstance(event, Start | Replace) else Desired.STOPPED
            assert record.desired is expected


def test_the_first_start_is_generation_one() -> None:
    record = advance(Record(), Start())
    assert record == Record(State.STARTING, Desired.RUNNING, generation=1, revision=1)


# Reasons.


def test_a_reason_stays_with_a_failed_service_until_the_next_start() -> None:
    failed = after(Start(), NoneLeft(BROKEN))
    assert (failed.state, failed.reason, failed.desired) == (State.FAILED, BROKEN, Desired.RUNNING)
    assert after(Stop(), record=failed).reason == BROKEN
    assert after(Start(), record=failed).reason is None


# What the replicas amount to.


def replica(
    *,
    live: bool = True,
    ready: bool = False,
    released: bool = False,
    outcome: Outcome | None = None,
    code: str | None = None,
    again: Again | None = None,
) -> Replica:
    reason = None if code is None else Reason(code, ".")
    return Replica("0" * 26, live, ready, released, outcome, reason, again)


READY = replica(ready=True)
LIVE = replica()
FAILED = replica(live=False, outcome=Outcome.FAILED, code="engine_exited")
LOST = replica(live=False, outcome=Outcome.UNKNOWN, code="lease_over")
INTERRUPTED = replica(live=False, outcome=Outcome.CANCELLED, code="executor_shutdown", again=Again(0, 1))
RETRIED = replica(live=False, outcome=Outcome.FAILED, code="engine_exited", again=Again(2, 1, 5))


@pytest.mark.parametrize("state", [State.STARTING, State.READY, State.DEGRADED])
@pytest.mark.parametrize(
    ("replicas", "event"),
    [
        ([READY], AllReady()),
        ([READY, READY], AllReady()),
        ([READY, LIVE], SomeReady()),
        ([FAILED, READY], SomeReady()),
        ([LOST, READY], SomeReady()),
        ([LIVE, FAILED], NoneReady()),
        ([INTERRUPTED], NoneReady()),
        ([RETRIED], NoneReady()),
        ([RETRIED, FAILED], NoneReady()),
        ([RETRIED, READY], SomeReady()),
        ([INTERRUPTED, LOST], NoneReady()),
        ([FAILED], NoneLeft(FAILED.reason or BROKEN)),
        ([LOST, FAILED], NoneLeft(LOST.reason or BROKEN)),
        ([], NoneLeft(Reason("no_replicas", "The service has no replica."))),
    ],
)
def test_what_replicas_amount_to(state: State, replicas: list[Replica], event: Event) -> None:
    assert observe(Record(state), replicas, idle=True) == event


def test_a_draining_service_waits_for_its_requests_and_a_stopping_one_for_its_replicas() -> None:
    assert observe(Record(State.DRAINING), [READY], idle=False) is None
    assert observe(Record(State.DRAINING), [READY], idle=True) == Idle()
    assert observe(Record(State.DRAINING), [FAILED, LOST], idle=False) == AllEnded()
    assert observe(Record(State.STOPPING), [LIVE, FAILED], idle=True) is None
    assert observe(Record(State.STOPPING), [FAILED], idle=True) == AllEnded()


REPLICAS = st.builds(
    replica,
    live=st.booleans(),
    ready=st.booleans(),
    outcome=st.none() | st.sampled_from(Outcome),
    code=st.none() | st.sampled_from(["engine_exited", *sorted(restart.INTERRUPTIONS)]),
    again=st.none() | st.builds(Again, st.floats(0, 300), st.integers(1, 20), st.none() | st.integers(2, 15)),
)


@given(st.sampled_from(State), st.lists(REPLICAS, max_size=4), st.booleans())
def test_what_is_observed_is_always_legal(state: State, replicas: list[Replica], idle: bool) -> None:
    event = observe(Record(state), replicas, idle=idle)
    if event is None:
        assert state in (*ENDED, State.DRAINING, State.STOPPING)
    else:
        advance(Record(state), event)


@given(st.sampled_from(State), st.lists(REPLICAS, max_size=4), st.booleans())
def test_observing_again_changes_nothing(state: State, replicas: list[Replica], idle: bool) -> None:
    """A reconciler may run as often as it likes."""
    record = Record(state)
    for _ in range(3):  # a drain that is idle takes two steps to its end
        event = observe(record, replicas, idle=idle)
        record = record if event is None else after(event, record=record)
    event = observe(record, replicas, idle=idle)
    assert event is None or after(event, record=record) == record


# Coming back.


def test_a_failed_service_comes_back_when_its_node_says_that_it_was_only_interrupted() -> None:
    """L2: the lease of a node that was cut off was held to be over, and the node ended the engine itself."""
    given_up = after(Start(), AllReady(), NoneLeft(BROKEN))
    assert observe(given_up, [LOST], idle=True) is None
    assert observe(given_up, [INTERRUPTED, FAILED], idle=True) == NoneReady()
    back = after(NoneReady(), record=given_up)
    assert (back.state, back.reason, back.generation) == (State.STARTING, None, given_up.generation)


@pytest.mark.parametrize("record", [Record(State.STOPPED), Record(State.FAILED, Desired.STOPPED)])
def test_a_service_that_nobody_wants_does_not_come_back(record: Record) -> None:
    assert observe(record, [INTERRUPTED], idle=True) is None


def test_a_failed_service_stays_failed_when_its_engine_would_only_be_tried_more_often() -> None:
    """A bound that was raised meanwhile starts nothing by itself."""
    failed = Record(State.FAILED, Desired.RUNNING)
    assert observe(failed, [RETRIED], idle=True) is None


@pytest.mark.parametrize("reason", [steps.LEASE_OVER, steps.GONE])
def test_a_node_that_went_away_before_the_start_interrupts(reason: Reason) -> None:
    """Nothing ran, so there is nothing to acknowledge: the desired state is still wanted."""
    waiting, running = attempt.Record(attempt.State.PREPARED), attempt.Record(attempt.State.RUNNING, True)
    for record, interrupted in ((waiting, True), (running, False)):
        lost = attempt.advance(record, attempt.LoseTrack(reason))
        assert lost.outcome is not None
        past = restart.Past(lost.outcome, reason.code)
        assert (restart.decide(restart.Policy(), [past]) is not None) == interrupted


# Starting.


def test_l7_a_start_needs_an_ended_service() -> None:
    for state in State:
        if state in ENDED:
            check_start(Record(state), [], acknowledge_unknown=False)
        else:
            with pytest.raises(Refused) as caught:
                check_start(Record(state), [], acknowledge_unknown=True)
            assert caught.value.code == "service_not_stopped"


def test_an_unknown_replica_wants_an_acknowledgement_first() -> None:
    lost = Replica("a" * 26, False, False, released=True, outcome=Outcome.UNKNOWN)
    for state in ENDED:
        with pytest.raises(Refused) as caught:
            check_start(Record(state), [lost], acknowledge_unknown=False)
        assert caught.value.code == "inference_unknown_outcome"
        assert caught.value.details == {"attempts": ["a" * 26]}
        check_start(Record(state), [lost], acknowledge_unknown=True)


def test_an_acknowledgement_releases_nothing() -> None:
    lost = Replica("a" * 26, False, False, released=False, outcome=Outcome.UNKNOWN)
    with pytest.raises(Refused) as caught:
        check_start(Record(), [lost], acknowledge_unknown=True)
    assert caught.value.code == "attempt_not_released"
    assert caught.value.details == {"attempts": ["a" * 26]}
    assert caught.value.retry_after_seconds


def test_every_attempt_that_is_not_released_is_named() -> None:
    held = [Replica(c * 26, False, False, released=c == "b", outcome=Outcome.FAILED) for c in "abc"]
    with pytest.raises(Refused) as caught:
        check_start(Record(), held, acknowledge_unknown=False)
    assert caught.value.details == {"attempts": ["a" * 26, "c" * 26]}
    check_start(Record(), [held[1]], acknowledge_unknown=False)


def test_a_refused_action_names_the_state() -> None:
    refused = service.refuse_action(Record(State.STOPPED), "drain")
    assert refused.code == "action_not_allowed"
    assert "stopped cannot drain" in refused.message


# What is shown while nodes are not connected.


@pytest.mark.parametrize(
    ("state", "replicas", "shown"),
    [
        (State.READY, [LIVE], State.STARTING),
        (State.READY, [READY, LIVE], State.DEGRADED),
        (State.DEGRADED, [LIVE, FAILED], State.STARTING),
        (State.DEGRADED, [READY, READY], State.DEGRADED),  # the record says what it waits for
        (State.STARTING, [LIVE], State.STARTING),
        (State.DRAINING, [LIVE], State.DRAINING),
        (State.STOPPING, [LIVE], State.STOPPING),
        (State.FAILED, [FAILED], State.FAILED),
    ],
)
def test_a_replica_that_is_not_reached_is_not_shown_as_an_answer(
    state: State, replicas: list[Replica], shown: State
) -> None:
    assert service.as_reached(Record(state), replicas) is shown


@given(st.sampled_from(State), st.lists(st.sampled_from([READY, LIVE, FAILED, LOST]), max_size=4))
def test_what_is_shown_is_never_better_than_what_is_recorded(state: State, replicas: list[Replica]) -> None:
    shown = service.as_reached(Record(state), replicas)
    assert shown is state or (state in service.ROUTABLE and shown in (State.DEGRADED, State.STARTING))
    assert (shown, state) not in {(State.READY, State.DEGRADED), (State.READY, State.STARTING)}
