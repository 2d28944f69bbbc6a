"""The acquisition of a model: its table, and that no course of its files' uploads ever leads out of it."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ficc.domain import acquisition, upload
from ficc.domain.acquisition import (
    TRANSITIONS,
    Acquire,
    Complete,
    Event,
    Evict,
    Fail,
    Pause,
    Record,
    Settle,
    State,
    Supply,
    Verify,
    advance,
    event_of_files,
)
from ficc.domain.errors import Reason
from ficc.domain.lifecycle import IllegalTransition
from support.lifecycles import final, product, reachable, ways_into

FULL = Reason("disk_full", "The content store has no room.")
SAMPLES: list[Event] = [
    Acquire(),
    Pause(),
    Settle(),
    Supply(),
    Verify(),
    Complete(),
    Fail(FULL),
    Evict(),
]


@pytest.mark.parametrize(("state", "event"), product(State, SAMPLES))
def test_exactly_the_table_is_legal(state: State, event: Event) -> None:
    if (state, type(event)) in TRANSITIONS:
        assert advance(Record(state), event).state is TRANSITIONS[state, type(event)]
    else:
        with pytest.raises(IllegalTransition):
            advance(Record(state), event)


def test_every_state_is_reached_and_every_one_can_be_left() -> None:
    assert tuple(type(event) for event in SAMPLES) == acquisition.EVENTS
    assert reachable(TRANSITIONS, State.REGISTERED) == set(State)
    assert final(TRANSITIONS, State) == set()


def test_every_state_but_ready_can_fail() -> None:
    """The published bytes of a ready model are not touched again."""
    assert {state for state in State if (state, Fail) not in TRANSITIONS} == {State.READY}


# Pausing.


def test_a15_only_the_worker_says_that_it_paused() -> None:
    assert ways_into(TRANSITIONS, State.PAUSED) == {(State.PAUSING, Settle)}
    assert ways_into(TRANSITIONS, State.PAUSING) == {(State.ACQUIRING, Pause)}


def test_a15_a_write_under_way_completes_while_pausing() -> None:
    record = advance(advance(advance(Record(), Acquire()), Pause()), Supply())
    assert record.state is State.PAUSING
    assert advance(record, Settle()).state is State.PAUSED


def test_a15_nothing_but_acquire_resumes() -> None:
    assert {way for way in ways_into(TRANSITIONS, State.ACQUIRING) if way[0] is State.PAUSED} == {
        (State.PAUSED, Acquire)
    }
    assert advance(Record(State.PAUSED), Supply()).state is State.PAUSED
    with pytest.raises(IllegalTransition):
        advance(Record(State.PAUSING), Acquire())


def test_a_pause_that_the_last_write_overtook_has_nothing_to_pause() -> None:
    assert advance(Record(State.PAUSING), Verify()).state is State.VERIFYING


# Errors.


def test_an_error_stays_until_something_happens() -> None:
    failed = advance(Record(State.ACQUIRING), Fail(FULL))
    assert failed == Record(State.FAILED, FULL)
    for event in (Acquire(), Supply(), Verify(), Complete()):
        assert advance(failed, event).error is None


# What the files amount to.


def file(state: upload.State, error: Reason | None = None) -> upload.Record:
    return upload.Record("a" * 64, 10, 0, state, error)


MISSING, PARTIAL = file(upload.State.MISSING), file(upload.State.PARTIAL)
VERIFYING, VERIFIED = file(upload.State.VERIFYING), file(upload.State.VERIFIED)
FAILED = file(upload.State.FAILED, upload.mismatch_reason("a" * 64, "b" * 64))


@pytest.mark.parametrize(
    ("files", "event"),
    [
        ([VERIFIED], Complete()),
        ([VERIFIED, VERIFIED], Complete()),
        ([VERIFIED, VERIFYING], Verify()),
        ([VERIFYING], Verify()),
        ([VERIFIED, MISSING], Supply()),
        ([VERIFYING, PARTIAL], Supply()),
        ([MISSING], Supply()),
        ([VERIFYING, FAILED], Fail(FAILED.error or FULL)),
        ([FAILED, PARTIAL], Fail(FAILED.error or FULL)),
    ],
)
def test_what_files_amount_to(files: list[upload.Record], event: Event) -> None:
    assert event_of_files(files) == event


def test_a25_a_model_with_a_failed_file_is_never_ready() -> None:
    for others in ([], [VERIFIED], [VERIFIED, VERIFYING]):
        event = event_of_files([*others, FAILED])
        assert isinstance(event, Fail)
        assert event.reason.code == "source_mismatch"


class Course(RuleBasedStateMachine):
    """Files go their ways, somebody uploads, acquires and pauses; after each step the model is brought in line
    with its files as the controller does it, and that is always legal."""

    @initialize(sizes=st.lists(st.integers(0, 3), min_size=1, max_size=3))
    def register(self, sizes: list[int]) -> None:
        self.files = [upload.Record("a" * 64, size) for size in sizes]
        self.model = Record()
        self.settle()

    def settle(self) -> None:
        self.model = advance(self.model, event_of_files(self.files))

    @rule(
        index=st.integers(0, 2),
        event=st.builds(upload.Write, st.integers(0, 3))
        | st.builds(upload.Shorten, st.integers(0, 2))
        | st.sampled_from([upload.Verify(), upload.Match(), upload.Mismatch("b" * 64), upload.Interrupt()]),
    )
    def change(self, index: int, event: upload.Event) -> None:
        index %= len(self.files)
        try:
            self.files[index] = upload.advance(self.files[index], event)
        except (IllegalTransition, ValueError):
            return
        self.settle()

    @rule(event=st.sampled_from([Acquire(), Pause(), Settle(), Fail(FULL)]))
    def operate(self, event: Event) -> None:
        if (self.model.state, type(event)) in TRANSITIONS:
            self.model = advance(self.model, event)

    @precondition(lambda self: self.model.state is State.READY)
    @rule()
    def evict(self) -> None:
        self.files[0] = upload.advance(self.files[0], upload.Evict())
        self.model = advance(self.model, Evict())

    @invariant()
    def ready_means_that_every_file_is_verified(self) -> None:
        verified = all(file.state is upload.State.VERIFIED for file in self.files)
        assert (self.model.state is State.READY) == verified

    @invariant()
    def an_error_means_failed(self) -> None:
        assert (self.model.error is not None) == (self.model.state is State.FAILED)


Course.TestCase.settings = settings(max_examples=80, stateful_step_count=25)
TestCourse = Course.TestCase
