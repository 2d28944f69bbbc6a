"""The acquisition of a model: its table, and that no course of its files' uploads ever leads out of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ficc.domain import acquisition, upload
from ficc.domain.acquisition import (
    TRANSITIONS,
    Acquire,
    Complete,
    Event,
    Fail,
    Lose,
    Pause,
    Proceed,
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

GONE = Reason("content_lost", "The file is gone.")
FULL = Reason("disk_full", "The content store has no room.")
SAMPLES: list[Event] = [
    Acquire(),
    Pause(),
    Settle(),
    Supply(),
    Proceed(),
    Verify(),
    Complete(),
    Fail(FULL),
    Lose(GONE),
]


@pytest.mark.parametrize(("state", "event"), product(State, SAMPLES))
def test_exactly_the_table_is_legal(state: State, event: Event) -> None:
    if (state, type(event)) in TRANSITIONS:
        assert advance(Record(state), event).state is TRANSITIONS[state, type(event)]
    else:
        with pytest.raises(IllegalTransition):
            advance(Record(state), event)


def test_every_state_is_reached_and_only_a_loss_ends_readiness() -> None:
    """A model whose bytes are evicted is removed with them; one whose bytes are lost begins again."""
    assert tuple(type(event) for event in SAMPLES) == acquisition.EVENTS
    assert reachable(TRANSITIONS, State.REGISTERED) == set(State)
    assert final(TRANSITIONS, State) == set()
    assert {event for state, event in TRANSITIONS if state is State.READY} == {Acquire, Complete, Lose}


def test_of_a_ready_model_a_lost_file_is_told_and_brought_again() -> None:
    whole = upload.Record("a" * 64, 9, 9, upload.State.VERIFIED)
    lost = upload.advance(replace(whole, sha256="b" * 64), upload.Lose(GONE))
    event = event_of_files(Record(State.READY), [whole, lost], supplied=False)
    assert advance(Record(State.READY), event) == Record(State.REGISTERED, GONE)


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
    assert event_of_files(Record(), files, supplied=False) == event
    proceeding = Proceed() if event == Supply() else event
    assert event_of_files(Record(State.ACQUIRING, fetching=True), files, supplied=False) == proceeding


def test_a7_a_download_that_was_cut_off_while_it_was_verified_goes_on() -> None:
    """A crash leaves the file partial; so does a wrong hash that is fetched once more."""
    verifying = advance(advance(Record(), Acquire()), Verify())
    assert advance(verifying, event_of_files(verifying, [PARTIAL], supplied=False)).state is State.ACQUIRING
    uploaded = advance(Record(), Verify())
    assert advance(uploaded, event_of_files(uploaded, [PARTIAL], supplied=False)).state is State.REGISTERED


def test_why_a_download_failed_outlives_the_files_that_still_came_to_their_end() -> None:
    failed = advance(advance(Record(), Acquire()), Fail(FULL))
    assert advance(failed, event_of_files(failed, [VERIFIED, PARTIAL], supplied=False)) == failed
    assert advance(failed, event_of_files(failed, [VERIFIED, VERIFIED], supplied=False)).state is State.READY
    wrong = advance(Record(), event_of_files(Record(), [FAILED], supplied=True))
    assert advance(wrong, event_of_files(wrong, [PARTIAL], supplied=True)).state is State.REGISTERED, (
        "an upload begins anew"
    )


def test_a15_what_was_paused_is_not_fetched_any_more() -> None:
    pausing = advance(advance(Record(), Acquire()), Pause())
    assert not pausing.fetching
    verifying = advance(pausing, Verify())
    assert advance(verifying, event_of_files(verifying, [PARTIAL], supplied=False)).state is State.REGISTERED


def test_a25_a_model_with_a_failed_file_is_never_ready() -> None:
    for others in ([], [VERIFIED], [VERIFIED, VERIFYING]):
        event = event_of_files(Record(), [*others, FAILED], supplied=False)
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
        self.model = advance(self.model, event_of_files(self.model, self.files, supplied=True))

    @rule(
        index=st.integers(0, 2),
        event=st.builds(upload.Write, st.integers(0, 3))
        | st.builds(upload.Shorten, st.integers(0, 2))
        | st.sampled_from(
            [
                upload.Verify(),
                upload.Match(),
                upload.Mismatch("b" * 64),
                upload.Interrupt(),
                upload.Restart(FULL),
            ]
        ),
    )
    def change(self, index: int, event: upload.Event) -> None:
        index %= len(self.files)
        try:
            self.files[index] = upload.advance(self.files[index], event)
        except (IllegalTransition, ValueError):
            return
        self.settle()

    @rule()
    def acquire(self) -> None:
        """As the controller does it: files that failed begin anew."""
        if (self.model.state, Acquire) in TRANSITIONS:
            self.model = advance(self.model, Acquire())
            self.files = [
                upload.advance(file, upload.Retry()) if file.state is upload.State.FAILED else file
                for file in self.files
            ]

    @rule(event=st.sampled_from([Pause(), Settle(), Fail(FULL)]))
    def operate(self, event: Event) -> None:
        if (self.model.state, type(event)) in TRANSITIONS:
            self.model = advance(self.model, event)

    @invariant()
    def ready_means_that_every_file_is_verified(self) -> None:
        verified = all(file.state is upload.State.VERIFIED for file in self.files)
        assert (self.model.state is State.READY) == verified

    @invariant()
    def an_error_means_failed(self) -> None:
        assert (self.model.error is not None) == (self.model.state is State.FAILED)


Course.TestCase.settings = settings(max_examples=80, stateful_step_count=25)
TestCourse = Course.TestCase
